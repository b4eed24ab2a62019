"""tools/check.py: what is accepted, warned about and refused.

FAULTS is a table of edits to a record that is in order, each with the sentence it must cause.
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
from check import OPEN, RECORD
from made_logs import ARTIFACT, NAME, RULE, SCRIPT, SMI, TOKENS, bpb_of, make_record, record_log
from packed import pack
from running import Call

Build = Callable[[Path], Path]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "records" / RECORD / NAME


def said(report: check.Record) -> list[str]:
    """Each finding as `level: logs: sentence`."""
    return [
        f"{level}: {''.join(f'{log}: ' for log in logs)}{message}"
        for level, message, logs in report.findings
    ]


def test_a_record_in_order_is_accepted(place: Path, call: Call) -> None:
    total = ARTIFACT + len(SCRIPT)
    code, out, err = call(check.main, make_record(place))
    assert (code, err) == (0, "") and out.splitlines() == [
        f"{place}: accepted as track_10min_16mb",
        "  val_bpb 1.12558 +- 0.00030, val_loss 1.90050 +- 0.00050, seeds 1, 1337, 42",
        f"  code {len(SCRIPT)} + model 15,700,000 = {total:,} bytes, {16_000_000 - total:,} left",
        f"  not checked  {check.UNSEEN}",
    ]


def edit(**changed: Any) -> Build:
    return lambda folder: make_record(folder, **changed)


def says(**changed: Any) -> Build:
    return edit(changed=changed)


def add(name: str, text: str = "x", **changed: Any) -> Build:
    return edit(files={name: text}, **changed)


def rewrite(old: str, new: str) -> Build:
    """Other words in the log of seed 1."""
    return edit(first=(old, new))


def drop(pattern: str, by: str = "", **changed: Any) -> Build:
    """Each log without that, or with other words."""
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
UNFINISHED = record_log().split("final_int8")[0]
LAST = "step:13790/20000 train_loss"
RESUMED = "resumed: step:6000 resumed_from:checkpoints/x/step_00006000.pt\n"
OTHER_SCRIPT = f"{SCRIPT}x = 1\n\n{RULE}\nRunning Python 3.12.3\n{RULE}\n{RESUMED}{LAST}"
FAULTS: dict[str, Build] = {
    # files
    "refused: no README.md: write": edit(moved=("README.md", "../gone")),
    "refused: train_gpt.py is missing or empty": edit(moved=(SOURCE, "../gone")),
    "refused: no submission.json: let tools/package.py": edit(moved=(JSON, "../gone")),
    "warned: submission.json is missing: it is submission_x.json": edit(moved=(JSON, OTHER_JSON)),
    "warned: README.md still has a TODO": edit(readme="TODO: " + "words " * 30),
    "not checked: kernels.py: what train_gpt.py needs counts": add("kernels.py", "import os\n"),
    # submission.json
    "warned: submission.json: 'val_bpb' is a required": says(val_bpb=None),
    # runs
    "warned: train_seed7.log: it is a copy of train_seed1.log": add("train_seed7.log", COPY),
    "warned: train_seed1.log: unfinished at step 13,790, without": add(LOG, UNFINISHED),
    "refused: no log has a result": drop(r"(?s)Serialized model.*"),
    "not checked: 1 other runs than those of": add("other.log", record_log(nats=1.7)),
    "warned: submission.json names the seeds 1, 42, the logs": says(seeds=[1, 42]),
    "warned: runs: 1; three seeds are usual": edit(results={1: 1.9}),
    "warned: the runs differ in configuration: matrix_lr": add(
        "train_seed42.log", record_log(seed=42, nats=1.901, matrix_lr=0.02)
    ),
    "refused: train_seed1.log: resumed at step 6,001": rewrite(LAST, RESUMED + LAST),
    "refused: train_seed1.log: it was resumed with another script": rewrite(LAST, OTHER_SCRIPT),
    # results
    "refused: val_bpb 1.1187 is in no result line: the nearest is": says(val_bpb=1.1187),
    "warned: val_loss 0.9 is in no result line": says(val_loss=0.9),
    f"warned: val_bpb {ROUGH} is the mean of final_int8": says(val_bpb=ROUGH),
    f"warned: val_bpb {bpb_of(1.9):.8f} is final_int8": says(val_bpb=round(bpb_of(1.9), 8)),
    # size
    "refused: bytes_total is 16,000,001: 16,000,000 are": says(bytes_total=16_000_001),
    "refused: a log's total is 16,024,793 bytes": edit(total=16_024_793),
    "refused: model and code are 16,003,329 bytes": drop(r"(Code size|Total).*\n", **TOO_LARGE),
    "warned: model and train_gpt.py are 16,003,329 bytes": edit(code=900, **TOO_LARGE),
    "warned: bytes_total is 15,000,000: model and": says(bytes_total=15_000_000),
    # script
    f"warned: {EACH}: holds another script than train_gpt.py"
    ": line 6 without comments is '(no such line)', not 'more = 1'": add(SOURCE, MORE),
    "not checked: train_seed1.log: the script that ran": rewrite(*NO_SCRIPT),
    "warned: train_seed1.log: the log says: GPTQ_RESERVE_SECONDS=8: GPTQ took 5.7 s": rewrite(
        "\nstopping_early: ", f"\nWARNING: {SLOW_GPTQ}\nstopping_early: "
    ),
    f"warned: {LOG}: counts 7 bytes of code": drop(r"(?<=Code size: )\d+", "7", first=NO_SCRIPT),
    f"warned: train_gpt.py: {PYTHON} does not compile it: line 11: ": edit(script=BROKEN),
    # time, machine, data
    f"refused: {LOG}: trained for 601.2 s": rewrite(*LATE),
    "not checked: the training time": drop(r"train_time:\S+ ?|step_avg:\S+"),
    f"refused: {EACH}: evaluated for 688.0 s": edit(eval_ms=688_000),
    "refused: ran on 1 x NVIDIA H100": edit(world=1),
    "warned: ran on 8 x NVIDIA A100": edit(smi=SMI.replace("H100 80GB HBM3", "A100-SXM4")),
    f"warned: {EACH}: its 2 evaluations took 700.0 s together": edit(**TWO_PASSES),
    f"refused: {LOG}: train_seed42.log: it counted 302,160,726 bytes of": edit(factor=2),
    "warned: it counted 154,101,969 bytes of text": edit(factor=1.02),
    "refused: it scored a part of the validation": edit(partial=" partial_val:1"),
    f"refused: {LOG}: it counted 319,282 bytes of text": rewrite(f"ns:{TOKENS}", "ns:131072"),
    f"not checked: {LOG}: the bytes that it counted: run": rewrite(" tokens:62021632", ""),
}


@pytest.mark.parametrize("expected", FAULTS)
def test_a_fault_is_named_in_one_sentence(expected: str, place: Path) -> None:
    """Also without the names of the logs in front of the sentence."""
    report = check.check_folder(FAULTS[expected](place))
    found = said(report)
    found += [f"{level}: {message}" for level, message, _ in report.findings]
    assert any(line.startswith(expected) for line in found), found


USUAL = dict.fromkeys(("LICENSE", "A.md", "requirements.txt", "a.jpeg", ".git/a.txt"), "x")
RULED = f'{SCRIPT}x = """\n{RULE}\n{"word " * 2100}"""\n' + "# more of it\n" * 1000
IN_ORDER = {
    "a rule inside the script": edit(script=RULED),
    "the seed in its name alone": rewrite("seed:1\n", ""),
    "a log twice": add("console.txt", record_log()),
    "results of four decimals": drop(r".*_exact.*\n"),
    "two steps later than 600 s": rewrite("cap train_time:599865", "cap train_time:600080"),
    "usual files": edit(files=USUAL),
    "a score of two decimals": says(val_bpb=1.13),
    "other comments in the script": add(SOURCE, "# The best one.\n" + SCRIPT, changed={
        "bytes_code": None, "bytes_total": None,
    }),
}  # fmt: skip


@pytest.mark.parametrize("oddity", IN_ORDER)
def test_what_is_odd_but_in_order_is_accepted(oddity: str, place: Path) -> None:
    report = check.check_folder(IN_ORDER[oddity](place))
    assert said(report) == [] and len(report.judged) == 3


def test_the_score_is_the_mean_of_one_arm(place: Path) -> None:
    """Logs of another arm, of a failed evaluation, or of training alone are not part of it."""
    make_record(place)
    for path in place.glob("train_*.log"):
        seed = int(path.stem.removeprefix("train_seed"))
        path.rename(place / f"seed{seed}_b.log")
        slow = record_log(seed=seed, nats=1.8, matrix_lr=0.02, total=17_000_000, world=1)
        (place / f"seed{seed}_a.log").write_text(slow)
    report = check.check_folder(place)
    assert {*report.judged} == {f"seed{seed}_b.log" for seed in (1, 42, 1337)}
    assert [line[:33] for line in said(report)] == ["not checked: 3 other runs than th"]
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


def test_folders_of_strangers_are_judged_without_reading_what_is_too_large(place: Path) -> None:
    make_record(place, files={JSON: '{"val_bpb": 1e999999999, "seeds": [1e999999999]}'})
    for name in ("train_seed7.log", "other.py", "README.md"):
        with open(place / name, "ab") as file:
            file.truncate(20_000_000_000)
    with open(place / SOURCE, "ab") as file:
        file.truncate(30_000_000)
    os.mkfifo(place / "train_seed8.log")
    (place / "a").symlink_to("b")
    (place / "b").symlink_to("a")
    found = said(check.check_folder(place))
    assert "refused: train_gpt.py has 30,000,000 bytes: 16,000,000 are allowed" in found
    size = "20,000,000,000 bytes, of which 50,000,000 are read at most"
    assert f"warned: train_seed7.log: cannot be read: {size}" in found
    assert any("submission.json: val_bpb: " in line for line in found)
    (place / JSON).write_text('{"a":' + "[" * 400_000)
    (place / SOURCE).write_text("x = " + "-" * 400_000 + "1\n")
    found = said(check.check_folder(place))
    assert "refused: submission.json: it is not a JSON object" in found
    assert any("train_gpt.py: it cannot be parsed: " in line for line in found)


def test_place_and_track(tmp_path: Path) -> None:
    """The place decides, then submission.json; only the record track has limits of time."""
    slow = {"results": {1: 1.9}, "ms": 80, "world": 1, "smi": "", "eval_ms": 700_000}
    slow["changed"] = {"track": "non-record-16mb"}
    folder = make_record(tmp_path / "records" / OPEN / NAME, **slow)
    assert check.check_folder(folder).verdict == "accepted"
    assert check.check_folder(folder, RECORD).verdict == "refused"
    elsewhere = check.check_folder(make_record(tmp_path / "mine" / NAME, **slow))
    assert (elsewhere.verdict, elsewhere.track) == ("accepted", OPEN)
    other = make_record(tmp_path / "other" / NAME, changed={"track": None})
    assert check.check_folder(other).track == RECORD


LITERAL = base64.b85encode(lzma.compress(LONG.encode())).decode()
PACKED = {
    "ours": pack(LONG.encode()).decode(),
    "another's": f'import lzma as L,base64 as B\nexec(L.decompress(B.b85decode("{LITERAL}")))\n',
}


@pytest.mark.parametrize("form", PACKED)
def test_a_packed_script_is_that_of_the_logs(form: str, place: Path) -> None:
    """Which hold the packed form or the readable one, with comments; the readable script may lie
    beside it; the packed form of another script is none."""
    files = {LOG: record_log(seed=1, script=LONG), "readable.py": "# Comments.\n" + LONG}
    report = check.check_folder(make_record(place, script=PACKED[form], files=files))
    assert said(report) == ["not checked: readable.py: what train_gpt.py needs counts as code"]
    (place / LOG).write_text(record_log(seed=1, script=LONG + "y = 1\n"))
    assert f"{LOG}: holds another script" in "".join(said(check.check_folder(place)))


def test_nothing_of_the_folder_is_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = place.with_name("ran")
    evil = f"open({str(marker)!r}, 'w').close()\n"
    folder = make_record(place, script=pack((SCRIPT + evil).encode()).decode())
    for name in ("json.py", "ast.py", "sitecustomize.py", "torch.py"):
        (folder / name).write_text(evil)
    monkeypatch.chdir(folder)
    assert check.check_folder(folder).judged and not marker.exists()


def test_words_of_strangers_do_not_reach_the_terminal_raw(place: Path, call: Call) -> None:
    folder = make_record(place, changed={"date": "\x1b[31m\ud800\n"})
    (folder / "bad\x1b[2J\udcff.pt").write_bytes(b"")
    _, out, _ = call(check.main, folder)
    assert "\x1b" not in out and "bad?[2J" in out and "date: " in out
