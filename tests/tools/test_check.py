"""tools/check.py: which records it accepts, warns about and refuses.

FAULTS is a table of edits to a correct record, each with the sentence that it must cause.
"""

import base64
import json
import lzma
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import check
import pytest
from check import OPEN_TRACK, RECORD_TRACK
from made_logs import ARTIFACT, NAME, RULE, SCRIPT, SMI, TOKENS, bpb_of, make_record, record_log
from packed import pack
from running import Call

Build = Callable[[Path], Path]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "records" / RECORD_TRACK / NAME


def list_findings(report: check.Record) -> list[str]:
    """Return each finding as `level: logs: sentence`."""
    return [
        f"{level}: {''.join(f'{log}: ' for log in logs)}{message}"
        for level, message, logs in report.findings
    ]


def test_a_correct_record_is_accepted(place: Path, call: Call) -> None:
    total = ARTIFACT + len(SCRIPT)
    code, out, err = call(check.main, make_record(place))
    assert (code, err) == (0, "") and out.splitlines() == [
        f"{place}: accepted (by the rules of track_10min_16mb)",
        "  val_bpb 1.12558 +- 0.00030, val_loss 1.90050 +- 0.00050, seeds 1, 1337, 42",
        f"  code {len(SCRIPT)} + model 15,700,000 = {total:,} bytes, {16_000_000 - total:,} unused",
        f"  not checked  {check.NEVER_CHECKED}",
    ]


def edit(**changed: Any) -> Build:
    return lambda folder: make_record(folder, **changed)


def submit(**changed: Any) -> Build:
    return edit(changed=changed)


def add(name: str, text: str = "x", **changed: Any) -> Build:
    return edit(files={name: text}, **changed)


def rewrite(old: str, new: str) -> Build:
    """Replace words in the log of seed 1."""
    return edit(first=(old, new))


def drop(pattern: str, by: str = "", **changed: Any) -> Build:
    """Remove a pattern from each log, or replace it."""
    return edit(each=partial(re.sub, pattern, by), **changed)


SOURCE, JSON, LOG = "train_gpt.py", "submission.json", "train_seed1.log"
OTHER_JSON = "submission_x.json"
PYTHON = f"Python 3.{sys.version_info[1]}"
EACH = f"{LOG}: train_seed1337.log: train_seed42.log"
LONG = SCRIPT + "".join(f"x{i} = {i * 7919}\n" for i in range(900))
MORE = SCRIPT + "more = 1\n"
COPY = record_log()
LATE = "cap train_time:599865", "cap train_time:601200"
ROUGH = 1.12566
PASS = "final_windows val_loss:{:.8f} val_bpb:{:.8f} eval_time:300000ms\n"
TOO_LARGE = {"artifact": 15_990_000, "script": LONG, "changed": {"bytes_total": None}}
NO_SCRIPT = f"{SCRIPT}\n{RULE}\n", ""
SLOW_GPTQ = "GPTQ_RESERVE_SECONDS=8: GPTQ took 5.7 s longer: set 14 or more"
BROKEN = SCRIPT + "def f(:\n"
TWO_PASSES = {"eval_ms": 400_000, "each": lambda log: log + PASS.format(1.1, 1.1)}
DIAGNOSTIC = {
    "changed": {"val_bpb": 1.09, "val_loss": None},
    "each": lambda log: re.sub(
        "final_int8_zlib_roundtrip val",
        "diagnostic quantized_sliding_window val_loss:1.8 val_bpb:1.09000000 eval_time:626346ms\n"
        "final_int8_zlib_roundtrip val",
        log,
    ),
}
# The log does not say how many tokens the split has, but how many chunks were scored.
CHUNKS = "  ttt_chunk_tokens: 32768\nttt:start chunks=1893 ttt_lr=0.005 ttt_epochs=3"
TWICE = r" tokens:\d+", "\n" + CHUNKS
UNFINISHED = record_log().split("final_int8")[0]
LAST = "step:13790/20000 train_loss"
RESUMED = "resumed: step:6000 resumed_from:checkpoints/x/step_00006000.pt\n"
OTHER_SCRIPT = f"{SCRIPT}x = 1\n\n{RULE}\nRunning Python 3.12.3\n{RULE}\n{RESUMED}{LAST}"
FAULTS: dict[str, Build] = {
    # files
    "refused: there is no README.md; write": edit(moved=("README.md", "../gone")),
    "refused: train_gpt.py is missing or empty": edit(moved=(SOURCE, "../gone")),
    "refused: there is no submission.json; make it with tools/package.py": edit(
        moved=(JSON, "../gone")
    ),
    "warned: submission.json is missing; rename submission_x.json": edit(moved=(JSON, OTHER_JSON)),
    "warned: README.md still contains a TODO": edit(readme="TODO: " + "words " * 30),
    "not checked: kernels.py: if train_gpt.py needs this file, its": add(
        "kernels.py", "import os\n"
    ),
    # submission.json
    "warned: submission.json: 'val_bpb' is a required": submit(val_bpb=None),
    # runs
    "warned: train_seed7.log: it is a copy of train_seed1.log": add("train_seed7.log", COPY),
    "warned: train_seed1.log: unfinished at step 13,790, without": add(LOG, UNFINISHED),
    "refused: no log has a result": drop(r"(?s)Serialized model.*"),
    "not checked: 1 further runs in the folder; only": add("other.log", record_log(nats=1.7)),
    "warned: submission.json lists the seeds 1, 42, but the logs": submit(seeds=[1, 42]),
    "warned: train_seed1.log and train_seed42.log have the same seed 1, so": edit(
        files={"train_seed42.log": record_log(nats=1.901, ms=43.6)}
    ),
    "warned: train_seed1.log: 2 runs are in this file; only the last one": edit(
        files={LOG: record_log(seed=7) + record_log(seed=1)}
    ),
    f"warned: {LOG}: the last line has no line end, so its last number": add(LOG, COPY[:-6]),
    "warned: there are only 1 runs; three seeds": edit(results={1: 1.9}),
    "warned: the runs differ in configuration: matrix_lr": add(
        "train_seed42.log", record_log(seed=42, nats=1.901, matrix_lr=0.02)
    ),
    "refused: train_seed1.log: the run was resumed at step 6,001": rewrite(LAST, RESUMED + LAST),
    "refused: train_seed1.log: the run was resumed with another": rewrite(LAST, OTHER_SCRIPT),
    # results
    "refused: val_bpb 1.1187 is in no result line; the nearest is": submit(val_bpb=1.1187),
    "warned: val_loss 0.9 is in no result line": submit(val_loss=0.9),
    f"warned: val_bpb {ROUGH} is the mean of final_int8": submit(val_bpb=ROUGH),
    f"warned: val_bpb {bpb_of(1.9):.8f} is final_int8": submit(val_bpb=round(bpb_of(1.9), 8)),
    "refused: val_bpb 1.09 is the mean of diagnostic quantized_sliding_window, which is no score "
    "of the artifact (and took up to 626.3 s; the limit is 600 s)": edit(**DIAGNOSTIC),
    # size
    "refused: bytes_total is 16,000,001; 16,000,000 bytes are": submit(bytes_total=16_000_001),
    "refused: a log's total is 16,024,793 bytes": edit(total=16_024_793),
    "refused: model and code are 16,003,329 bytes": drop(r"(Code size|Total).*\n", **TOO_LARGE),
    "warned: model and train_gpt.py are 16,003,329 bytes": edit(code=900, **TOO_LARGE),
    "warned: bytes_total is 15,000,000, but model and": submit(bytes_total=15_000_000),
    # script
    f"warned: {EACH}: the log contains another script than train_gpt.py"
    ": line 6 without comments is '(no such line)', not 'more = 1'": add(SOURCE, MORE),
    "not checked: train_seed1.log: the script that ran": rewrite(*NO_SCRIPT),
    "warned: train_seed1.log: the log says: GPTQ_RESERVE_SECONDS=8: GPTQ took 5.7 s": rewrite(
        "\nstopping_early: ", f"\nWARNING: {SLOW_GPTQ}\nstopping_early: "
    ),
    f"warned: {LOG}: the log counts 7 bytes of code": drop(
        r"(?<=Code size: )\d+", "7", first=NO_SCRIPT
    ),
    f"warned: train_gpt.py: {PYTHON} does not compile it: line 11: ": edit(script=BROKEN),
    # time, machine, data
    f"refused: {LOG}: training took 601.2 s; the": rewrite(*LATE),
    "not checked: the training time": drop(r"train_time:\S+ ?|step_avg:\S+"),
    f"refused: {EACH}: the evaluation took 688.0 s; the": edit(eval_ms=688_000),
    "refused: the run was made on 1 x NVIDIA H100": edit(world=1),
    "warned: the run was made on 8 x NVIDIA A100": edit(
        smi=SMI.replace("H100 80GB HBM3", "A100-SXM4")
    ),
    f"warned: {EACH}: 2 evaluations took 700.0 s together": edit(**TWO_PASSES),
    f"refused: {LOG}: train_seed42.log: it counted 302,160,726 bytes of": edit(factor=2),
    "warned: it counted 154,101,969 bytes of text": edit(factor=1.02),
    "refused: it scored only a part of the": edit(partial=" partial_val:1"),
    f"refused: {LOG}: it counted 319,282 bytes of text": rewrite(f"ns:{TOKENS}", "ns:131072"),
    f"refused: {EACH}: it counted 177.9 million bytes of text or more in 1,893 chunks": drop(
        *TWICE, factor=1.178
    ),
    f"warned: {EACH}: it counted 154.0 million bytes of text or more in 1,893 chunks": drop(
        *TWICE, factor=1.02
    ),
    f"not checked: {LOG}: the number of counted bytes; run": rewrite(" tokens:62021632", ""),
}


@pytest.mark.parametrize("expected", FAULTS)
def test_a_fault_is_one_sentence(expected: str, place: Path) -> None:
    """`expected` may lack the names of the logs before the sentence."""
    report = check.check_folder(FAULTS[expected](place))
    found = list_findings(report)
    found += [f"{level}: {message}" for level, message, _ in report.findings]
    assert any(line.startswith(expected) for line in found), found


USUAL = dict.fromkeys(("LICENSE", "A.md", "requirements.txt", "a.jpeg", ".git/a.txt"), "x")
RULED = f'{SCRIPT}x = """\n{RULE}\n{"word " * 2100}"""\n' + "# more of it\n" * 1000
UNUSUAL_BUT_CORRECT = {
    "a rule inside the script": edit(script=RULED),
    "the seed in its name alone": rewrite("seed:1\n", ""),
    "a log twice": add("console.txt", record_log()),
    "results of four decimals": drop(r".*_exact.*\n"),
    "two steps later than 600 s": rewrite("cap train_time:599865", "cap train_time:600080"),
    "usual files": edit(files=USUAL),
    "a score of two decimals": submit(val_bpb=1.13),
    "other comments in the script": add(SOURCE, "# The best one.\n" + SCRIPT, changed={
        "bytes_code": None, "bytes_total": None,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", UNUSUAL_BUT_CORRECT)
def test_an_unusual_but_correct_record_is_accepted(name: str, place: Path) -> None:
    report = check.check_folder(UNUSUAL_BUT_CORRECT[name](place))
    assert list_findings(report) == [] and len(report.judged) == 3


def test_the_score_is_the_mean_of_one_variant(place: Path) -> None:
    """Logs of another variant, of a failed evaluation, or of training alone do not count."""
    make_record(place)
    for path in place.glob("train_*.log"):
        seed = int(path.stem.removeprefix("train_seed"))
        path.rename(place / f"seed{seed}_b.log")
        slow = record_log(seed=seed, nats=1.8, matrix_lr=0.02, total=17_000_000, world=1)
        (place / f"seed{seed}_a.log").write_text(slow)
    report = check.check_folder(place)
    assert {*report.judged} == {f"seed{seed}_b.log" for seed in (1, 42, 1337)}
    assert [line[:33] for line in list_findings(report)] == ["not checked: 3 further runs in th"]
    for seed, nats in {1: 1.87, 42: 1.88, 1337: 1.89}.items():
        (place / "evaluated").mkdir(exist_ok=True)
        text = f"seed:{seed}\n" + PASS.format(nats, bpb_of(nats))
        (place / "evaluated" / f"{seed}.log").write_text(text)
    values = json.loads((place / JSON).read_text())
    values |= {"val_loss": 1.88, "val_bpb": round(bpb_of(1.88), 6), "seed_results": {}}
    (place / JSON).write_text(json.dumps(values))
    report = check.check_folder(place)
    assert {*report.judged} == {f"evaluated/{seed}.log" for seed in (1, 42, 1337)}
    assert report.verdict == "accepted"


def test_huge_and_hostile_files_are_not_read(place: Path) -> None:
    make_record(place, files={JSON: '{"val_bpb": 1e999999999, "seeds": [1e999999999]}'})
    for name in ("train_seed7.log", "other.py", "README.md"):
        with open(place / name, "ab") as file:
            file.truncate(20_000_000_000)
    with open(place / SOURCE, "ab") as file:
        file.truncate(30_000_000)
    os.mkfifo(place / "train_seed8.log")
    (place / "a").symlink_to("b")
    (place / "b").symlink_to("a")
    found = list_findings(check.check_folder(place))
    assert "refused: train_gpt.py has 30,000,000 bytes; 16,000,000 bytes are allowed" in found
    size = "the file has 20,000,000,000 bytes; at most 50,000,000 are read"
    assert f"warned: train_seed7.log: cannot be read: {size}" in found
    assert any("submission.json: val_bpb: " in line for line in found)
    (place / JSON).write_text('{"a":' + "[" * 400_000)
    (place / SOURCE).write_text("x = " + "-" * 400_000 + "1\n")
    found = list_findings(check.check_folder(place))
    assert "refused: submission.json is not a JSON object" in found
    assert any("train_gpt.py: it cannot be parsed: " in line for line in found)


def test_the_track_of_a_folder(tmp_path: Path) -> None:
    """The path decides on the track, then submission.json. Only the record track has time
    limits."""
    slow = {"results": {1: 1.9}, "ms": 80, "world": 1, "smi": "", "eval_ms": 700_000}
    slow["changed"] = {"track": "non-record-16mb"}
    folder = make_record(tmp_path / "records" / OPEN_TRACK / NAME, **slow)
    assert check.check_folder(folder).verdict == "accepted"
    assert check.check_folder(folder, RECORD_TRACK).verdict == "refused"
    elsewhere = check.check_folder(make_record(tmp_path / "mine" / NAME, **slow))
    assert (elsewhere.verdict, elsewhere.track) == ("accepted", OPEN_TRACK)
    other = make_record(tmp_path / "other" / NAME, changed={"track": None})
    assert check.check_folder(other).track == RECORD_TRACK


LITERAL = base64.b85encode(lzma.compress(LONG.encode())).decode()
PACKED = {
    "ours": pack(LONG.encode()).decode(),
    "another's": f'import lzma as L,base64 as B\nexec(L.decompress(B.b85decode("{LITERAL}")))\n',
}


@pytest.mark.parametrize("form", PACKED)
def test_a_packed_script_is_that_of_the_logs(form: str, place: Path) -> None:
    """The logs may contain the packed form or the readable script with comments, and the readable
    script may be in the folder. The packed form of another script is reported."""
    files = {LOG: record_log(seed=1, script=LONG), "readable.py": "# Comments.\n" + LONG}
    report = check.check_folder(make_record(place, script=PACKED[form], files=files))
    assert list_findings(report) == [
        "not checked: readable.py: if train_gpt.py needs this file, its bytes count as code"
    ]
    (place / LOG).write_text(record_log(seed=1, script=LONG + "y = 1\n"))
    assert f"{LOG}: the log contains another script" in "".join(
        list_findings(check.check_folder(place))
    )


def test_nothing_of_the_folder_is_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = place.with_name("ran")
    evil = f"open({str(marker)!r}, 'w').close()\n"
    folder = make_record(place, script=pack((SCRIPT + evil).encode()).decode())
    for name in ("json.py", "ast.py", "sitecustomize.py", "torch.py"):
        (folder / name).write_text(evil)
    monkeypatch.chdir(folder)
    assert check.check_folder(folder).judged and not marker.exists()


def test_control_characters_are_not_printed(place: Path, call: Call) -> None:
    folder = make_record(place, changed={"date": "\x1b[31m\ud800\n"})
    (folder / "bad\x1b[2J\udcff.pt").write_bytes(b"")
    _, out, _ = call(check.main, folder)
    assert "\x1b" not in out and "bad?[2J" in out and "date: " in out
