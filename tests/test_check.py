"""records/check.py: what is accepted, warned about and refused, in folders made by anybody."""

import base64
import hashlib
import json
import lzma
import random
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, RULE, Call, bpb_of
from conftest import log_text as challenge_log
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(ROOT / "records"))
import check  # noqa: E402  (the room is no package)
from _code import look, pack  # noqa: E402
from _submission import schema  # noqa: E402

pytestmark = pytest.mark.timeout(200)
SCRIPT = (
    '"""A trainer."""\nimport os\nimport torch\n\n\ndef main():\n    print(torch, os)\n\n\nmain()\n'
)
SMI = "| NVIDIA-SMI 570.1   Driver Version: 570.1   CUDA Version: 12.8 |\n" + "\n".join(
    f"|   {n}  NVIDIA H100 80GB HBM3    On  |   00000000:19:00.0 Off | 0 |" for n in range(8)
)
NAME = "2026-04-01_WiderMLP"
ARTIFACT = 15_700_000


def log_text(**changed: Any) -> str:
    """A log with its script and machine, as it would be of 8 H100s."""
    return challenge_log(**{"script": SCRIPT, "smi": SMI} | changed)


def make_record(
    folder: Path,
    *,
    results: dict[int, float] | None = None,
    script: str = SCRIPT,
    changed: dict[str, Any] | None = None,
    readme: str = "",
    **log: Any,
) -> Path:
    """A record that is in order, save for `changed` keys of submission.json (None: left out)
    and words of its logs."""
    results = {1: 1.9000, 42: 1.9010, 1337: 1.9005} if results is None else results
    folder.mkdir(parents=True)
    for seed, nats in results.items():
        (folder / f"train_seed{seed}.log").write_text(
            log_text(seed=seed, nats=nats, **{"script": script, **log})
        )
    (folder / "train_gpt.py").write_text(script)
    (folder / "README.md").write_text(
        readme or "# Wider MLP\n" + "What was done, and how it was run. " * 5
    )
    loss = sum(results.values()) / len(results)
    total = log.get("artifact", ARTIFACT) + len(script.encode())
    submission = {
        "name": "Wider MLP",
        "author": "Ada",
        "github_id": "ada",
        "date": "2026-04-01",
        "track": "10min_16mb",
        "val_loss": round(loss, 8),
        "val_bpb": round(bpb_of(loss), 8),
        "bytes_total": total,
        "bytes_code": len(script.encode()),
        "seeds": list(results),
        "seed_results": {
            str(seed): {"val_loss": nats, "val_bpb": bpb_of(nats)} for seed, nats in results.items()
        },
    } | (changed or {})
    (folder / "submission.json").write_text(
        json.dumps({k: v for k, v in submission.items() if v is not None})
    )
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "records" / check.RECORD / NAME


def found(report: check.Report, rule: str) -> list[tuple[str, str]]:
    return [(one.level, str(one)) for one in report.findings if one.rule == rule]


def test_a_record_in_order_is_accepted(place: Path, call: Call) -> None:
    code, out, err = call(check.main, make_record(place))
    assert (code, err) == (0, "") and out.startswith(f"{place}: accepted as track_10min_16mb\n")
    assert "val_bpb 1.12558 +- 0.00030, val_loss 1.90050 +- 0.00050, seeds 1, 42, 1337" in out
    total = ARTIFACT + len(SCRIPT)
    assert f"{len(SCRIPT):,} + model" in out and f"{total:,} bytes, {16_000_000 - total:,} l" in out
    assert out.count("\n") == 3, "nothing else is said"


Build = Callable[[Path], object]


def edit(**changed: Any) -> Build:
    return lambda folder: make_record(folder, **changed)


def then(after: Callable[[Path], object], **changed: Any) -> Build:
    return lambda folder: after(make_record(folder, **changed))


def says(**changed: Any) -> Build:
    return edit(changed=changed)


def drop(name: str) -> Build:
    return then(lambda folder: (folder / name).unlink())


def add(name: str, text: str = "x", **changed: Any) -> Build:
    return then(lambda folder: (folder / name).write_text(text), **changed)


def move(name: str, new: str) -> Build:
    return then(lambda folder: (folder / name).rename(folder / new))


def rewrite(name: str, old: str, new: str) -> Build:
    def change(folder: Path) -> None:
        text = (make_record(folder) / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return change


def log_of_42(**changed: Any) -> Build:
    """A record of which the log of seed 42 is another than its sisters."""
    text = log_text(**{"seed": 42, "nats": 1.901} | changed)
    return add("train_seed42.log", text)


ONE = bpb_of(1.9)  # of seed 1
NO_RESULTS = {"seed_results": None}
ONE_AS_7 = add("train_seed7.log", log_text(nats=1.9002), changed=NO_RESULTS)
OTHER = SCRIPT.replace("A trainer", "My trainer")
NEEDS = SCRIPT + "import helper\nprint(helper)\n"
LATER = "step:10000/20000 train_loss"
LONG = (SCRIPT + "".join(f"x{i} = {i * 7919}\n" for i in range(900))).encode()
MISLABELLED = pack(LONG).decode().replace(hashlib.sha256(LONG).hexdigest(), "0" * 64)
OPAQUE = f'exec("{"x" * 3000}")\n'
FAULTS: dict[str, tuple[Build, str]] = {
    "no folder": (lambda folder: None, "refused files: no such folder: name the folder of a"),
    "a file": (
        lambda folder: [folder.parent.mkdir(parents=True), folder.touch()],
        "refused files: it is a file: name the folder of a record",
    ),
    "no readme": (drop("README.md"), "refused files: no README.md"),
    "no script": (drop("train_gpt.py"), "refused files: no train_gpt.py"),
    "no submission": (drop("submission.json"), "refused files: no submission.json"),
    "another name": (move("train_gpt.py", "train_v2.py"), "warned files: train_v2.py is to"),
    "another json": (move("submission.json", "submission_2.json"), "warned files: rename it"),
    "no logs": (
        then(lambda f: [log.unlink() for log in f.glob("*.log")]),
        "refused files: no log of a run",
    ),
    "weights": (add("final_model.pt"), "warned files: final_model.pt"),
    "what a run left": (
        then(lambda folder: [(folder / "logs").mkdir(), (folder / "logs" / "a.txt").touch()]),
        "warned files: logs/a.txt is what a run in this folder left: remove logs/",
    ),
    "todo": (edit(readme="TODO: " + "words " * 30), "warned files: TODO"),
    "other track": (says(track="non_record_16mb"), "warned place: non_record_16mb"),
    "one seed": (edit(results={1: 1.9}), "warned seeds: 1 run: three"),
    "other seed": (ONE_AS_7, "warned seeds: train_seed7.log: this run's seed is 1"),
    "seed twice": (ONE_AS_7, "warned seeds: seed 1 is in 2 different runs"),
    "a copy": (add("train.log", log_text(), changed=NO_RESULTS), "note seeds: the same bytes as"),
    "no log of it": (says(seeds=[1, 42, 1337, 7]), "warned seeds: seed 7, which has no log"),
    "left out": (says(seeds=[1, 42]), "warned seeds: leaves out seed 1337"),
    "other settings": (log_of_42(matrix_lr=0.02), "warned seeds: matrix_lr: 0.04 | 0.02"),
    "too good": (says(val_bpb=1.1187), "refused score: is in no log: the mean of the logs is"),
    "too bad": (says(val_bpb=1.1387), "warned score: is in no log"),
    "one alone": (says(val_bpb=round(ONE, 8)), "warned score: seed 1 alone"),
    "float model": (says(val_bpb=round(bpb_of(1.8905), 4)), "refused score: quantisation"),
    "bpb as loss": (says(val_loss=round(bpb_of(1.9005), 8)), "warned score: bits a byte"),
    "a seed's": (says(seed_results={"1": {"steps": 99}}), "warned score: steps of seed 1 is 99"),
    "a size": (
        says(seed_results={"1": {"artifact_bytes": 99}}),
        "warned score: its log says 15,700,000",
    ),
    "over": (edit(artifact=16_000_000), "refused cap: too many"),
    "its own total": (edit(total=16_024_793), "refused cap: 24,793 too many"),
    "a raw model's": (edit(total=66_024_793), "warned cap: 50,024,793 too many"),
    "stated": (says(bytes_total=16_000_001), "refused cap: 16,000,000 are allowed"),
    "stated less": (says(bytes_total=15_000_000), "warned cap: is in no log"),
    "code stated": (says(bytes_code=5), "warned cap: bytes_code 5: train_gpt.py has"),
    "needs code": (add("helper.py", script=NEEDS), "warned cap: needs helper.py: its 1 bytes"),
    "reads data": (
        add("table.json", script=SCRIPT + 'print(open("table.json"))\n'),
        "warned cap: reads table.json (1 bytes)",
    ),
    "a package": (edit(script="import exotic\n" + SCRIPT), "warned script: imports exotic"),
    "downloads": (
        edit(script=SCRIPT + "import subprocess\nsubprocess.run(['pip', 'install', 'x'])\n"),
        "warned script: line 12 downloads (pip install)",
    ),
    "other code": (
        log_of_42(script=OTHER),
        'warned source: train_seed42.log: holds another script: line 1 is \'"""My trainer."""\'',
    ),
    "more code": (
        add("train_gpt.py", SCRIPT + "# more\n"),
        "refused source: line 11 is '(no such line)', in train_gpt.py '# more'",
    ),
    "header": (edit(script=MISLABELLED), "warned script: its first line names another source's"),
    "opaque": (edit(script=OPAQUE), "warned script: not by lzma, zlib or bz2"),
    "text as bpb": (says(val_bpb="1.1"), "warned submission: val_bpb: '1.1' is not of type"),
    "no bpb": (says(val_bpb=None), "warned submission: it does not say val_bpb"),
    "placeholder": (says(github_id="your_github_id"), "warned submission: is a placeholder"),
    "no author": (says(author=""), "warned submission: it does not say author"),
    "no date": (says(date="1 April"), "warned submission: date: '1 April' does not match"),
    "no json": (add("submission.json", '{"a": 1'), "refused submission: it is no JSON object"),
    "a list": (add("submission.json", "[1]"), "refused submission: it holds a list"),
    "depth": (add("submission.json", "[" * 200_000), "refused submission: it is no JSON object"),
    "digits": (add("submission.json", "1" * 50_000), "refused submission: it is no JSON object"),
    "no source": (
        rewrite("train_seed1.log", f"{SCRIPT}\n{RULE}\n", ""),
        "note source: what ran is not proved",
    ),
    "cut": (rewrite("train_seed1.log", "final_int8", "#"), "warned log: ends before the resu"),
    "no run": (add("train_seed7.log", "pip install\n"), "warned log: train_seed7.log: no"),
    "late": (edit(ms=43.6), "refused time: trained for 601.2 s"),
    "steps say more": (
        rewrite("train_seed1.log", "train_time:435000ms", "train_time:650000ms"),
        "warned time: its end tells 599.9 s of training, its steps 650.0 s",
    ),
    "slow evaluation": (edit(eval_ms=688_000), "refused time: evaluated for 688.0 s"),
    "one card": (edit(world=1), "refused time: on 1 x NVIDIA H100"),
    "A100": (edit(smi=SMI.replace("H100 80GB HBM3", "A100-SXM4")), "refused time: A100"),
    "space twice": (
        edit(factor=1.17, changed={"val_bpb": round(bpb_of(1.9005, 1.17), 8)}),
        "refused data: +17.00 % of the split's bytes: the leading space counted twice?",
    ),
    "partial": (edit(partial=" partial_val:1"), "refused data: partial_val:1"),
    "resumed": (
        rewrite("train_seed1.log", LATER, f"step:900/20000 train_loss:2 train_time:9ms\n{LATER}"),
        "refused log: resumed at step 900",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_named(fault: str, place: Path) -> None:
    build, expected = FAULTS[fault]
    build(place)
    report = check.check_folder(place)
    told = [f"{one.level} {one.rule}: {one}" for one in report.findings]
    kind, words = expected.split(": ", 1)
    assert [one for one in told if one.startswith(f"{kind}: ") and words in one], told
    level = kind.split()[0]
    assert report.verdict in ({"note": "accepted"}.get(level, level), "refused")


NEWER = 'x = f"{"a" if True else f"{"b"}"}"\ndef f[T](x: T) -> T:\n    return x\n'
RULED = f'x = """\n{RULE}\n"""\n' + "# more of it\n" * 50
IN_ORDER = {
    "syntax of a newer Python, compared as text": edit(script=SCRIPT + NEWER),
    "a rule inside the script": edit(script=SCRIPT + RULED),
    "a rule in front of it": add("train_seed1.log", f"{'=' * 80}\n{log_text()}"),
    "seed_results name one of two runs": add("train_seed001.log", log_text(nats=1.7)),
}


@pytest.mark.parametrize("oddity", IN_ORDER)
def test_what_is_odd_but_in_order_is_accepted(oddity: str, place: Path) -> None:
    IN_ORDER[oddity](place)
    report = check.check_folder(place)
    assert report.verdict == "accepted" and report.seeds == [1, 42, 1337]
    assert "train_seed1.log" in [log.name for log in report.main] and not found(report, "source")


def test_a_single_fault_is_one_finding(place: Path) -> None:
    report = check.check_folder(make_record(place, changed={"val_bpb": 1.1187, "val_loss": 1.88}))
    assert [(one.level, one.rule) for one in report.findings] == [("refused", "score")]
    report = check.check_folder(place.parent)
    words = f"no record, but a folder of records: name those, as {place}"
    assert [str(one) for one in report.findings] == [words]


def test_what_a_log_ends_with_in_other_words_is_only_asked_about(place: Path) -> None:
    """A result that this reader has not understood is no reason to refuse."""
    folder = make_record(place, changed={"val_bpb": 1.0512, "val_loss": 1.78, "seed_results": None})
    assert check.check_folder(folder).verdict == "refused"
    with open(folder / "train_seed1.log", "a") as log:
        log.write("the mixture of experts gets 1.05118 in the end\n")
    report = check.check_folder(folder)
    assert "is not what ran last" in found(report, "score")[0][1] and report.verdict == "warned"


def test_place_and_track(tmp_path: Path) -> None:
    """The place decides, then submission.json; only the record track has limits of time."""
    slow = {"ms": 80, "world": 1, "smi": "", "changed": {"track": "non-record-16mb"}}
    folder = make_record(tmp_path / "records" / check.OPEN / NAME, **slow)
    assert check.check_folder(folder).verdict == "accepted"
    assert check.check_folder(folder, check.Options(check.RECORD)).verdict == "refused"
    elsewhere = check.check_folder(make_record(tmp_path / "mine" / NAME, **slow))
    assert (elsewhere.verdict, elsewhere.track) == ("accepted", check.OPEN)
    named = check.check_folder(make_record(tmp_path / "records" / check.RECORD / "mine"))
    assert found(named, "place") == [
        ("warned", "mine: a record's folder is called YYYY-MM-DD_Description")
    ]


# --- submission.json ---


@pytest.mark.parametrize(
    ("right", "written"),
    [("github_id", "GitHub-ID"), ("val_bpb", "mean_val_bpb"), ("bytes_code", "code_bytes")],
)
def test_synonyms_are_named_and_used(place: Path, right: str, written: str) -> None:
    folder = make_record(place)
    values = json.loads((folder / "submission.json").read_text())
    values[written] = values.pop(right)
    (folder / "submission.json").write_text(json.dumps(values))
    report = check.check_folder(folder)
    renamed = f"submission.json: by its usual name: {written} -> {right}"
    assert [str(one) for one in report.findings] == [renamed] and report.values[right]


# --- scripts: packed, of a newer Python, with code beside them ---

RAW = [{"id": lzma.FILTER_LZMA2}]
PACKED = {
    "ours": pack(LONG).decode(),
    "xz": f"import lzma,base64 as b\nexec(lzma.decompress(b.b85decode("
    f"{base64.b85encode(lzma.compress(LONG))!r})))\n",
    "raw": "import lzma as L,base64 as B\nexec(L.decompress(B.b85decode("
    f'"{base64.b85encode(lzma.compress(LONG, format=lzma.FORMAT_RAW, filters=RAW)).decode()}"'
    '),format=L.FORMAT_RAW,filters=[{"id":L.FILTER_LZMA2}]))\n',
    "zlib": "import zlib,base64\nexec(zlib.decompress(base64.b64decode("
    f"{base64.b64encode(zlib.compress(LONG))!r})))\n",
    "bytes": f"import lzma\nexec(lzma.decompress({lzma.compress(LONG)!r}))\n",
}


@pytest.mark.parametrize("form", PACKED)
def test_a_packed_script_is_seen_through(form: str, place: Path) -> None:
    """What its log holds, the packed form or the readable one, is the script that is shipped."""
    assert look(PACKED[form].encode()).text == LONG
    folder = make_record(place, script=PACKED[form])
    (folder / "train_seed1.log").write_text(log_text(seed=1, script=LONG.decode()))
    report = check.check_folder(folder)
    assert report.verdict == "accepted" and "torch" in report.script.imports
    assert report.packed_bytes == report.code_bytes == len(PACKED[form])
    assert any("readable bytes" in line for _, line in found(report, "script"))


def test_over_the_cap_as_shipped_and_below_it_packed(place: Path) -> None:
    """It is asked about, since the readable form costs no bytes once it is packed."""
    long = LONG.decode()
    small = {"code": 5_000, "total": 15_994_000, "artifact": 15_990_000, "script": long}
    report = check.check_folder(make_record(place, changed={"bytes_total": 15_994_000}, **small))
    level, words = found(report, "cap")[0]
    assert level == "warned" and f"as shipped {15_990_000 + len(LONG):,} bytes" in words
    assert "the script that --pack makes" in words and report.verdict == "warned"


def test_code_beside_the_script_counts(place: Path) -> None:
    """By import, by exec and by name, also from there on; what nobody needs does not."""
    launcher = 'exec(open(__file__.replace("train_gpt.py", "real.py")).read())\n'
    folder = make_record(place, script=launcher, artifact=15_990_000)
    (folder / "real.py").write_text("import kernels_of_mine\n")
    (folder / "kernels_of_mine.py").write_text('load("extra/fast.cpp")\n')
    (folder / "extra").mkdir()
    (folder / "extra" / "fast.cpp").write_bytes(random.Random(1).randbytes(20_000))
    (folder / "unused.py").write_text("x = 1\n" * 9000)
    report = check.check_folder(folder)
    assert sorted(report.beside) == ["extra/fast.cpp", "kernels_of_mine.py", "real.py"]
    assert report.code_bytes == len(launcher) + 23 + 23 + 20_000
    assert any("too many" in line for level, line in found(report, "cap") if level == "warned")


# --- which runs are submitted ---


def test_arms_by_folder_and_name(tmp_path: Path) -> None:
    """The arm that submission.json gives the result of is judged, wherever it lies."""
    folder = make_record(tmp_path / "records" / check.RECORD / NAME)
    (folder / "ablation").mkdir()
    for seed, nats in ((1, 1.85), (42, 1.86), (1337, 1.87)):
        (folder / f"train_wide_s{seed}.log").write_text(
            log_text(seed=seed, nats=nats + 0.2, matrix_lr=1)
        )
        log = folder / "ablation" / f"seed_{seed}.txt"
        log.write_text(log_text(seed=seed, nats=nats, artifact=16_000_001, ms=90))
    report = check.check_folder(folder)
    assert report.verdict == "accepted" and [log.name for log in report.main] == [
        "train_seed1.log",
        "train_seed42.log",
        "train_seed1337.log",
    ]
    values = json.loads((folder / "submission.json").read_text())
    values |= {"val_bpb": round(bpb_of(1.86), 6), "val_loss": 1.86, "seed_results": {}}
    (folder / "submission.json").write_text(json.dumps(values))
    report = check.check_folder(folder)
    assert {log.name.split("/")[0] for log in report.main} == {"ablation"} and report.seeds
    assert {one.rule for one in report.findings if one.level == "refused"} == {"cap", "time"}


# --- folders of strangers ---


def test_links_that_leave_are_refused_and_not_followed(place: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.log").write_text(log_text(seed=9))
    folder = make_record(place)
    (folder / "train_seed9.log").symlink_to(tmp_path / "secret.log")
    (folder / "up").symlink_to(tmp_path)
    (folder / "circle").symlink_to(folder)
    report = check.check_folder(folder)
    refused = [line.split()[0] for level, line in found(report, "files") if level == "refused"]
    assert sorted(refused) == ["train_seed9.log", "up"] and report.seeds == [1, 42, 1337]


def test_nothing_of_the_folder_is_run(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "ran"
    evil = f"open({str(marker)!r}, 'w').close()\n"
    folder = make_record(place, script=pack((SCRIPT + evil).encode()).decode())
    for name in ("json.py", "ast.py", "sitecustomize.py", "torch.py"):
        (folder / name).write_text(evil)
    monkeypatch.chdir(folder)
    assert check.check_folder(folder).main and not marker.exists()


def test_large_files_are_not_read(place: Path) -> None:
    folder = make_record(place)
    for name in ("train_gpt.py", "submission.json", "train_seed1.log"):
        with open(folder / name, "r+b") as file:
            file.truncate(70 << 20)
    report = check.check_folder(folder)
    assert (
        "refused",
        "train_gpt.py cannot be read: 73,400,320 bytes: more than 16,000,000 are not read",
    ) in found(report, "script")
    assert found(report, "submission")[0][0] == "refused" and report.text is None


def test_words_of_strangers_do_not_reach_the_terminal_raw(place: Path, call: Call) -> None:
    folder = make_record(place, changed={"date": "\x1b[31m\ud800\n"})
    (folder / "bad\x1b[2J\udcff.pt").write_bytes(b"")
    _, out, _ = call(check.main, folder)
    assert "\x1b" not in out and "bad?[2J" in out


@pytest.fixture(scope="module")
def fuzz_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield make_record(Path(folder) / "records" / check.RECORD / NAME)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*schema()["properties"], "extra"]), VALUES) | VALUES)
@settings(max_examples=60, deadline=None)
def test_any_submission_is_judged(fuzz_folder: Path, value: Any) -> None:
    (fuzz_folder / "submission.json").write_text(json.dumps(value))
    report = check.check_folder(fuzz_folder)
    assert check.lines(report)


@given(st.integers(0, 2**32), st.integers(0, 6))
@settings(max_examples=40, deadline=None)
def test_any_log_is_judged(fuzz_folder: Path, seed: int, kind: int) -> None:
    """Logs with lines lost, digits replaced, pieces repeated, or of noise."""
    rng, text = random.Random(seed), log_text(seed=1).encode()
    for _ in range(kind):
        at, length = rng.randrange(len(text)), rng.randrange(1, 400)
        pieces = [b"", b"nan", b"9" * 30, b"-1", b"0", b"\xff\x00", text[at : at + length] * 2]
        place = rng.choice([at, max(0, text.find(b"final_int8") + rng.randrange(80))])
        text = text[:place] + rng.choice(pieces) + text[place + rng.choice([0, 1, length]) :]
    (fuzz_folder / "train_seed1.log").write_bytes(text)
    report = check.check_folder(fuzz_folder)
    assert check.lines(report)


@given(st.binary(max_size=300) | st.text("()[]{}\"'\\\n:=.,-+fx01 #@").map(str.encode))
@settings(max_examples=40, deadline=None)
def test_any_script_is_judged(fuzz_folder: Path, text: bytes) -> None:
    (fuzz_folder / "train_gpt.py").write_bytes(text)
    assert check.check_folder(fuzz_folder).verdict in ("warned", "refused")


def test_one_folder_does_not_take_the_others_along(
    place: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_record(place)
    (place.parent.parent / "x").mkdir()
    real = check.check_place
    monkeypatch.setattr(
        check, "check_place", lambda report: real(report) if report.place == place else 1 / 0
    )
    code, out, _ = call(check.main, other := place.parent.parent / "x", place)
    assert code == 0 and f"{other}: warned" in out and "ZeroDivisionError" in out
    assert f"{place}: accepted" in out


# --- significance, data, command line ---


def test_significance_against_a_folder_and_a_score(tmp_path: Path, call: Call) -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    ours = {1: 1.8900, 2: 1.8905, 3: 1.8895}
    theirs = {1: 1.9000, 2: 1.9004, 3: 1.8996}
    old = make_record(tmp_path / "records" / check.RECORD / "2026-03-01_Old", results=theirs)
    new = make_record(tmp_path / "records" / check.RECORD / NAME, results=ours)
    moved = [value - 0.005 for value in theirs.values()]
    p = scipy_stats.ttest_ind(moved, list(ours.values()), equal_var=False).pvalue / 2
    code, out, _ = call(check.main, new, "--previous", old)
    assert code == 0 and p < 0.01
    assert f"0.01000 nats better than 2026-03-01_Old; better by 0.00500: p = {p:.2g}" in out
    code, out, _ = call(check.main, old, "--previous", new)
    assert code == 1 and f" 0.01000 nats worse than {NAME}; better by 0.00500: p = " in out
    for score, code in (
        (f"{bpb_of(1.9):.6f}", 0),
        (f"{bpb_of(1.8951):.6f}", 1),
        ("1.9000nats", 0),
        ("1.8951nats", 1),
    ):
        assert call(check.main, new, "--previous", score)[0] == code


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--previous", "nothing"), "neither a folder nor a score, such as 1.1228"),
        (("--previous", "0"), "a score above 0, such as 1.1228"),
        (("--track", "track_5min"), "track_10min_16mb or track_non_record_16mb"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(
    place: Path, call: Call, arguments: tuple[str, ...], words: str
) -> None:
    code, out, err = call(check.main, make_record(place), *arguments)
    assert (code, out) == (2, "") and words in err.splitlines()[-1]
