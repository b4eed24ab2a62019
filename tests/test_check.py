"""records/check.py: what is accepted, warned about and refused, in folders made by anybody."""

import base64
import hashlib
import json
import lzma
import re
import sys
import zlib
from collections.abc import Callable
from functools import partial
from os import truncate
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import check
import pytest
import rules
import script
import submission
from conftest import ARTIFACT, NAME, ROOT, RULE, SCRIPT, SMI, Call, bpb_of, make_record, record_log
from damage import DAMAGE, damaged, processor_time
from findings import CODES, OPEN, RECORD
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from script import look, pack
from significance import welch

Build = Callable[[Path], Path]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "records" / RECORD / NAME


def texts(report: check.Report, code: str) -> list[str]:
    return [finding.text for finding in report.findings if finding.code == code]


def test_a_record_in_order_is_accepted(place: Path, call: Call) -> None:
    code, out, err = call(check.main, make_record(place))
    assert (code, err) == (0, "") and out.startswith(f"{place}: accepted as track_10min_16mb\n")
    assert "val_bpb 1.12558 +- 0.00030, val_loss 1.90050 +- 0.00050, seeds 1, 42, 1337" in out
    total = ARTIFACT + len(SCRIPT)
    assert f"{len(SCRIPT):,} + model" in out and f"{total:,} bytes, {16_000_000 - total:,} l" in out
    assert out.count("\n") == 3, "nothing else is said"
    code, out, _ = call(check.main, place, "--json")
    [report] = json.loads(out)
    assert (code, report["verdict"], report["findings"]) == (0, "accepted", [])
    assert [run["val_loss"] for run in report["runs"]] == [1.9, 1.901, 1.9005]
    assert report["runs"][0]["result"] == "final_int8_zlib_roundtrip"


def edit(**changed: Any) -> Build:
    return lambda folder: make_record(folder, **changed)


def then(after: Callable[[Path], object]) -> Build:
    def build(folder: Path) -> Path:
        after(make_record(folder))
        return folder

    return build


def says(**changed: Any) -> Build:
    return edit(changed=changed)


def add(name: str, text: str = "x", **changed: Any) -> Build:
    return edit(files={name: text}, **changed)


def rewrite(old: str, new: str) -> Build:
    return edit(first=(old, new))


def log_of_42(changed: dict[str, Any] | None = None, **log: Any) -> Build:
    """A record of which the log of seed 42 is another than its sisters."""
    text = record_log(**{"seed": 42, "nats": 1.901} | log)
    return add("train_seed42.log", text, changed=changed or {})


TWO_SCRIPTS = {"train_b.py": SCRIPT, "train_gpt.py": "print()\n"}
SOURCE, JSON, LOG = "train_gpt.py", "submission.json", "train_seed1.log"
ONE = bpb_of(1.9)  # of seed 1
FLOAT = round(bpb_of(1.8905), 4)  # before quantisation
MEAN_BPB = round(bpb_of(1.9005), 8)
NO_RESULTS = {"seed_results": None, "val_loss": None}
SEVEN = NO_RESULTS | {"seeds": [1, 42, 1337, 7]}
ONE_AS_7 = add("train_seed7.log", record_log(nats=1.9002), changed=SEVEN)
LATER, LAST = "step:10000/20000 train_loss", "step:13790/20000 train_loss"
LONG = (SCRIPT + "".join(f"x{i} = {i * 7919}\n" for i in range(900))).encode()
MISLABELLED = pack(LONG).decode().replace(hashlib.sha256(LONG).hexdigest(), "0" * 64)
REACHES = SCRIPT + "import socket\nfrom torch.utils import cpp_extension\n"
VALIDATION = 'class A:\n    train_files = os.path.join("d", "fineweb_val_*.bin")\n'
WORDS = f"seed:1\nworld_size:8\nCode size: 7 bytes\nfinal_int8 val_bpb:{ONE:.8f}\n"
FIRST = ("final_int8_zlib", "int6_first val_loss:1.8 val_bpb:1.1\nfinal_int8_zlib")
OF_FIRST = {"each": lambda text: text.replace(*FIRST), "changed": {"val_loss": 1.8}}
BETTER, HUGE, MEAN = {"val_bpb": 1.1}, {"bytes_total": 16_000_001}, {"bytes_total": 15_466_751}
NEARLY = {"code": 5_000, "artifact": 15_990_000, "script": LONG.decode()}
COUNTED = NEARLY | {"artifact": 15_996_000, "total": 15_999_000}
COUNTED["each"] = lambda text: f"{text}Code size (compressed): 3000 bytes\n"
UNFINISHED, SHORT = (record_log().split(words)[0] for words in ("final_int8", "step:1/20000 val"))
BEHIND = "final_sliding_window val_loss:1.95 val_bpb:1.1549 eval_time:700000ms\n"
ODD, ODD_END = {"val_bpb": 1.0512} | NO_RESULTS, f"{record_log()}the mixture gets 1.05118 now\n"


def cheat_of_times(words: str) -> Build:
    """A record whose log of seed 1 has five more lines that contradict its end."""
    line = f"step:{{step}}/20000 train_loss:2.0 {words}\n"
    steps = range(11_000, 13_001, 500)
    text = "".join(line.format(step=step, time=f"train_time:{step}ms") for step in steps)
    return rewrite(LAST, text + LAST)


def no_logs(folder: Path) -> None:
    for log in folder.glob("*.log"):
        log.rename(log.with_suffix(".txt")).write_text(log.name)


def logs_apart(folder: Path) -> None:
    (folder / "logs").mkdir()
    for log in folder.glob("*.log"):
        log.rename(folder / "logs" / log.name)


WITHOUT_SIZES = partial(re.sub, r".* bytes.*\n", "")
WITHOUT_LOSSES = partial(re.sub, r" val_loss:\S+", "")
VALIDATED = partial(re.sub, r"(?s)Serialized model.*", "")  # no result of the decoded artifact
VALIDATION_ALONE = {"each": VALIDATED, "results": {7: 1.9}}
VALIDATION_ALONE["changed"] = {"val_bpb": round(bpb_of(1.89), 4)} | NO_RESULTS


def links(folder: Path) -> None:
    """Two that leave the folder, to a log and to a folder of logs, and one that does not."""
    (folder.parent / "secret.log").write_text(record_log(seed=9))
    (folder / "train_seed9.log").symlink_to(folder.parent / "secret.log")
    (folder / "up").symlink_to(folder.parent)
    (folder / "circle").symlink_to(folder)


def many_files(record: Path, folder: str = "extra", count: int = 2001) -> None:
    (record / folder).mkdir()
    for number in range(count):
        (record / folder / f"{number}.txt").touch()


# A folder for each code, with its level and all codes beside it: a rule that is deleted or inverted
# fails here.
FAULTS: dict[str, Build] = {
    "refused R101: no such folder: name the folder of a": lambda folder: folder,
    "refused R101: it is a file: name": lambda f: make_record(f) / JSON,
    f"refused R101: records/{RECORD}/{NAME}/inner": lambda f: make_record(f / "inner").parent,
    "refused R102: the folder is empty": lambda f: f.mkdir(parents=True) or f,
    "refused R102: no README.md": edit(moved=("README.md", "../gone")),
    "refused R102: no train_gpt.py": edit(moved=("train_gpt.py", "../gone")),
    "refused R102: no submission.json: let": edit(moved=("submission.json", "../gone")),
    "refused R102 R109: name it train_seed<N>.log (train_seed1.txt: no training log": then(no_logs),
    "warned R103: a.py: rename it to train_gpt.py (it is": edit(moved=(SOURCE, "a.py")),
    "warned R103 R109: rename it to train_gpt.py (train_gpt.py is not": edit(files=TWO_SCRIPTS),
    "warned R103: submission_2.json": edit(moved=(JSON, "submission_2.json")),
    "warned R103 R109: readme.txt: rename it to README.md": edit(moved=("README.md", "readme.txt")),
    "refused R104: up is a link": then(links),
    "warned R105: final_model.pt": add("final_model.pt"),
    "warned R106 R109: logs/0.txt was left by a run": then(lambda f: many_files(f, "logs", 1)),
    "warned R107: TODO": edit(readme="TODO: " + "words " * 30),
    "warned R107: says nothing": add("README.md", "# A\n"),
    "warned R108 R109: more than 2,000 files": then(many_files),
    "warned R108 R109: only 60 logs": then(lambda f: many_files(f, "tried", 60)),
    "note R109: extra/3.txt (0 bytes) and 2 more": then(lambda f: many_files(f, count=6)),
    "note R109: not counted, not judged: train_b.py": add("train_b.py", SCRIPT * 2),
    "warned R110: non_record_16mb": says(track="non_record_16mb"),
    "warned R111: mine: name the folder": lambda f: make_record(f.parent / "mine"),
    "warned R111: 2026-02-30_A: name the": lambda f: make_record(f.parent / "2026-02-30_A"),
    "note R301: 7.log; other runs, not judged: 1": add("train_seed001.log", record_log(nats=1.7)),
    "warned R305: 1 run: three": edit(results={1: 1.9}),
    "warned R303 R304 R405: train_seed7.log: this run's seed is 1": ONE_AS_7,
    "warned R304 R303 R405: seed 1 is in 2 submitted runs": ONE_AS_7,
    "note R302: a_longer_one.log: the": add("a_longer_one.log", record_log(), changed=NO_RESULTS),
    "warned R306: seed 7, which has no log": says(seeds=[1, 42, 1337, 7]),
    "warned R306: leaves out seed 1337": says(seeds=[1, 42]),
    "warned R307: MATRIX_LR=0.04 | MATRIX_LR=0.02": log_of_42(matrix_lr=0.02),
    "warned R308 R305 R306 R403: failed at step 13,790: no": add(LOG, f"{UNFINISHED}error: no\n"),
    "warned R308: it has validations": edit(each=lambda t: f"{VALIDATED(t)}it got {MEAN_BPB}\n"),
    "warned R308 R109: train_seed7.log: no": add("train_seed7.log", "pip install\n"),
    "refused R309: finished at step 13,790": edit(each=partial(re.sub, r"bpb:1.12\d+", "bpb:nan")),
    "refused R309: no result of the decoded artifact": edit(each=VALIDATED),
    "refused R310: resumed at step 900": rewrite(LATER, f"step:900/20000 train_loss:2\n{LATER}"),
    "warned R311 R403 R407: its times are those of train_seed42.log": log_of_42(nats=1.9, ms=43.5),
    "note R312: tried/short.log: unfinished at step 1: it": add("tried/short.log", SHORT),
    "refused R401: 1.1187 is in no log: the mean of the logs is 1.125": says(val_bpb=1.1187),
    "refused R401: val_loss 1.0 is in no log: the mean of the logs is 1.9": says(val_loss=1.0),
    "refused R401: and val_loss 1.0 are in no log: the means": says(val_bpb=1.0, val_loss=1.0),
    "refused R401 R305: is in no log: the log says": edit(results={1: 1.9}, changed=BETTER),
    "warned R402: is in no log": says(val_bpb=1.1387),
    "warned R403: the bits per byte": says(val_loss=round(bpb_of(1.9005), 6)),
    "warned R403: the int6_first of train_seed1.log alone": edit(first=FIRST, changed=BETTER),
    "warned R403: val_loss 1.8 is the result called int6_first": edit(**OF_FIRST),
    "warned R403: cut off, not rounded": says(val_bpb=1.125),
    "warned R403: from seed 1 alone": says(val_bpb=round(ONE, 8)),
    "refused R404: before quantisation": says(val_bpb=FLOAT),
    "refused R404: not a result of the decoded artifact, which": says(val_bpb=FLOAT, **NO_RESULTS),
    "note R405: nearly right": says(val_loss=1.90055),
    "note R409: ttt 2.3, is taken for failed": add(LOG, record_log() + "final_ttt val_bpb:2.3\n"),
    "note R409: what ran last is final_sliding_window 1.1549": edit(each=lambda t: t + BEHIND),
    "note R406 R603 R604 R704 R706 R804: the logs do not say val_loss": add(LOG, WORDS),
    "warned R604 R406 R603 R704 R706 R804: counts 7 bytes of code, but": add(LOG, WORDS),
    "note R704 R406 R603 R604 R706 R804: does not say how long": add(LOG, WORDS),
    "warned R408: at the end of the logs that was not understood": add(LOG, ODD_END, changed=ODD),
    "refused R410 R305 R306 R308 R503: the decoded": add("a.log", SHORT, **VALIDATION_ALONE),
    "warned R407: steps of seed 1 is 99": says(seed_results={"1": {"steps": 99}}),
    "warned R407: 99, not 15,700,000": says(seed_results={"1": {"artifact_bytes": 99}}),
    "refused R501: too many": edit(artifact=16_000_000),
    "refused R501 R506: a log's own total is 16,024,793 bytes, 24,793": edit(total=16_024_793),
    "warned R502: 50,024,793 too many": edit(total=66_024_793),
    "warned R502 R504: 16,000,000 are allowed; the logs say": says(bytes_total=16_000_001),
    "warned R502 R506: package.py --pack makes it would be": edit(total=15_994_000, **NEARLY),
    "refused R501 R506: package.py --pack makes it would be": edit(total=16_002_000, **NEARLY),
    "warned R502: the script packed as the log counts it it would be 15,999,000": edit(**COUNTED),
    "warned R503: no log says how large": edit(each=WITHOUT_SIZES),
    "refused R501 R503: bytes_total 16,000,001: 16": edit(each=WITHOUT_SIZES, changed=HUGE),
    "warned R504: is in no log": says(bytes_total=15_000_000),
    "note R510: mean of the seeds, the largest is 15,700,084": log_of_42(MEAN, artifact=15_000_000),
    "warned R504: the model alone, the total is": says(bytes_total=ARTIFACT),
    "warned R505: bytes_code 5: train_gpt.py has": says(bytes_code=5),
    "warned R506: its total is 15,300,000 bytes, its model and": edit(total=15_300_000),
    "warned R507: needs helper.py: its 1": add("helper.py", script=f"{SCRIPT}import helper\n"),
    "warned R509: reads table.txt (1 bytes)": add("table.txt", script=SCRIPT + "'cat table.txt'\n"),
    "refused R601 R505: line 11 is '(no such line)', in": add("train_gpt.py", SCRIPT + "# more\n"),
    "warned R602: train_seed42.log: holds another script:": log_of_42(script=f"'My'\n{SCRIPT}"),
    "note R603: what ran is not proved": rewrite(f"{SCRIPT}\n{RULE}\n", ""),
    "refused R605: 73,400,320 bytes: more than": then(lambda f: truncate(f / SOURCE, 70 << 20)),
    "refused R605: train_gpt.py is empty": add("train_gpt.py", ""),
    "warned R607 R606: its first line names another source's": edit(script=MISLABELLED),
    "warned R607 R603: not by lzma, zlib or bz2": edit(script=f'exec("{"x" * 3000}")\n'),
    "warned R610: imports exotic": edit(script="import exotic\n" + SCRIPT),
    "warned R611: line 11 downloads (pip": edit(script=SCRIPT + "os.system('pip install')"),
    "note R612: socket (line 11), torch.utils.cpp_extension (line 12)": edit(script=REACHES),
    "warned R613: line 12 trains on fineweb_val_*.bin": edit(script=SCRIPT + VALIDATION),
    "warned R613: train_files is fineweb_val_*.bin": edit(train_files="fineweb_val_*.bin"),
    "refused R701: trained for 601.2 s": rewrite("cap train_time:599865", "cap train_time:601200"),
    "refused R702: evaluated for 688.0 s": edit(eval_ms=688_000),
    "warned R703 R701: says 599.9 s of training, its steps 650": rewrite(":435000ms", ":650000ms"),
    "refused R701 R703: trained for 825.0 s": cheat_of_times("train_time:13.8m"),
    "warned R703: step_avg x step is 117.0 s": cheat_of_times("{time} step_avg:9.00ms"),
    "warned R703: at its tok/s the training took 1,807 s": cheat_of_times("tok/s: 4000000"),
    "refused R705: on 1 x NVIDIA H100": edit(world=1),
    "refused R705: ran as 1 processes": edit(world=1, smi=""),
    "refused R705: A100": edit(smi=SMI.replace("H100 80GB HBM3", "A100-SXM4")),
    "note R706: does not name the GPU": edit(smi=""),
    "refused R801: partial_val:1: it scored a part of the split": edit(partial=" partial_val:1"),
    "refused R802: +17.00 % of the split's bytes: the leading space": edit(factor=1.17),
    "warned R803: +0.50 % of the split's bytes": edit(factor=1.005),
    "warned R805 R403: not of one evaluation": rewrite("exact val_loss:1.9", "exact val_loss:2.2"),
    "note R804 R307: 999 tokens are of no known split": rewrite("tokens:62021632", "tokens:999"),
    "note R804 R406: bytes: not checked: it does not say val_loss": edit(each=WITHOUT_LOSSES),
    "refused R201: it is no JSON object: it holds a list, not an": add(JSON, "[1]"),
    "warned R203: bytes_total is Infinity": says(bytes_total=10**400),
    "warned R306: leaves out seed 1, 42": says(seeds=1337),
    "refused R201: it is no JSON object: Expecting": add("submission.json", '{"a": 1'),
    "refused R201: (char 9): remove the comma before it": add("submission.json", '{"a": 1,\n}'),
    "refused R201: it is no JSON object: maximum recursion": add("submission.json", "[" * 200_000),
    "warned R202: it does not say val_bpb": says(val_bpb=None),
    'warned R203 R401: val_bpb is "1.1": write a number above 0': says(val_bpb="1.1"),
    "refused R401 R203: val_bpb 1.1 is in no": says(val_bpb="1.1"),
    'warned R203: date is "1 April": write YYYY-MM-DD': says(date="1 April"),
    "note R205: by its usual name: github -> github_id": says(github="ada", github_id=None),
    "warned R204: is a placeholder": says(github_id="your_github_id"),
}
# Codes that other tests are about.
ELSEWHERE = "R508 R606 R608 R609 R901 R902 R903 R904 R999"


@pytest.mark.parametrize("expected", FAULTS)
def test_a_fault_is_found_and_named(expected: str, place: Path) -> None:
    report = check.check_folder(FAULTS[expected](place))
    said = [f"{report.level(one)} {one.code}: {one.text}" for one in report.findings]
    (level, code, *others), words = expected.split(": ", 1)[0].split(), expected.split(": ", 1)[1]
    assert [line for line in said if line.startswith(f"{level} {code}: ") and words in line], said
    assert report.codes == {code, *others}


def test_each_code_has_a_fault() -> None:
    tested = {expected.split()[1].rstrip(":") for expected in FAULTS}
    assert tested.isdisjoint(ELSEWHERE.split()) and tested | {*ELSEWHERE.split()} == {*CODES}


NEWER = 'x = f"{"a" if True else f"{"b"}"}"\ndef f[T](x: T) -> T:\n    return x\n'
RULED = f'x = """\n{RULE}\n{"word " * 2100}"""\n' + "# more of it\n" * 1000
USUAL = dict.fromkeys(("LICENSE", "A.md", "requirements.txt", "a.jpeg", ".git/a.txt"), "x")
IN_ORDER = {
    "syntax of a newer Python, compared as text": edit(script=SCRIPT + NEWER),
    "a rule inside the script": edit(script=SCRIPT + RULED),
    "empty lines in front of it": add(LOG, f"\n\n{record_log()}"),
    "no rule below it": rewrite(f"{RULE}\nRunning Python 3.12.3 (main, x)", "\nmodel:/x/y.npz"),
    "the seed in its name alone": rewrite("seed:1\n", ""),
    "the seed in the log alone": edit(moved=(LOG, "first_1.log")),
    "logs in a folder of their own": then(logs_apart),
    "results of four decimals": edit(each=lambda text: re.sub(r".*_exact.*\n", "", text)),
    "tok/s that agree": cheat_of_times("tok/s: 12000000"),
    "one average that is wrong": rewrite("435000ms step_avg:43.50", "435000ms step_avg:9.00"),
    "another patch of Python": rewrite("Running Python 3.12.3", "Running Python 3.12.4"),
    "paths of two machines": add(LOG, record_log(home="/a/x"), home="/b/x"),
    "usual files": edit(files=USUAL, script=SCRIPT + "'a.jpeg README.md requirements.txt'\n"),
}


@pytest.mark.parametrize("oddity", IN_ORDER)
def test_what_is_odd_but_in_order_is_accepted(oddity: str, place: Path) -> None:
    report = check.check_folder(IN_ORDER[oddity](place))
    older = oddity.startswith("syntax") and sys.version_info < (3, 12)
    expected = {"R609"} if older else {"R706"} if oddity.startswith("no rule") else set()
    assert report.codes == expected and report.verdict == "accepted"
    assert report.facts.seeds == [1, 42, 1337] == sorted(run.seed for run in report.facts.submitted)


def test_place_and_track(tmp_path: Path) -> None:
    """The place decides, then submission.json; only the record track has limits of time."""
    slow = {"results": {1: 1.9}, "ms": 80, "world": 1, "smi": ""}
    slow["changed"] = {"track": "non-record-16mb"}
    folder = make_record(tmp_path / "records" / OPEN / NAME, **slow)
    assert check.check_folder(folder).verdict == "accepted"
    judged = check.check_folder(folder, RECORD)
    assert judged.verdict == "refused" and texts(judged, "R110")[0].endswith(f"records/{RECORD}/")
    elsewhere = check.check_folder(make_record(tmp_path / "mine" / NAME, **slow))
    assert (elsewhere.verdict, elsewhere.facts.track) == ("accepted", OPEN)
    other = make_record(tmp_path / "other" / NAME, changed={"track": None})
    assert check.check_folder(other).facts.track == RECORD


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
}


@pytest.mark.parametrize("form", PACKED)
def test_a_packed_script_is_seen_through(form: str, place: Path) -> None:
    """What its log holds, the packed form or the readable one, is the script that is shipped."""
    assert look(PACKED[form].encode()).text == LONG
    files = {LOG: record_log(seed=1, script=LONG.decode())}
    report = check.check_folder(make_record(place, script=PACKED[form], files=files))
    facts = report.facts
    assert report.verdict == "accepted" and "torch" in facts.script.imports
    assert facts.packed_bytes == facts.code_bytes == len(PACKED[form])
    assert report.codes == {"R606"} and "readable bytes" in texts(report, "R606")[0]


def test_code_beside_the_script_counts(place: Path) -> None:
    """By import, by exec and by name, also from there on; what nobody needs does not."""
    launcher = 'exec(open(__file__.replace("train_gpt.py", "real.py")).read())\n'
    files = {"real.py": "import kernels, pkg.a\n", "unused.py": "x = 1\n" * 9000, "pkg/b.py": ""}
    files |= {"kernels.py": 'load("extra/fast.cpp")\n', "extra/fast.cpp": "x" * 20_000}
    made = make_record(place, script=launcher, artifact=15_990_000, files=files)
    report = check.check_folder(made)
    beside = sorted(file.name for file in report.facts.code_beside)
    assert beside == ["extra/fast.cpp", "kernels.py", "pkg/b.py", "real.py"]
    assert report.facts.code_bytes == len(launcher) + 22 + 23 + 20_000
    assert "too many" in texts(report, "R502")[0] and "unused.py" in texts(report, "R109")[0]
    assert texts(report, "R508")[0].startswith("kernels.py may need extra/fast.cpp")


# A line of a script, and what it shows.
SHOWN = {
    "urlopen(u); a(requests.get(u)); httpx.get(u)": "downloads: httpx get,requests get,urlopen",
    "hf_hub_download(); snapshot_download()": "downloads: hf_hub_download,snapshot_download",
    "load_dataset(); urlretrieve(); get_kernel()": "downloads: get_kernel,load_dataset,urlretrieve",
    "torch.hub.load(); load_state_dict_from_url()": "downloads: hub load,load_state_dict_from_url",
    "gdown.download(); wget.download()": "downloads: gdown download,wget download",
    "subprocess.run('curl -O x', shell=True)": "downloads: curl",
    "subprocess.run(['git', 'clone', 'x'])": "downloads: git clone",
    "os.popen('wget x')": "downloads: wget",
    "os.system('pip3 install x')": "downloads: pip3 install",
    "os.system('ls curly')": "downloads: ",
    "import aiohttp, ftplib, http.client, httpx": "reaching: aiohttp,ftplib,http,httpx",
    "import cffi, ctypes, smtplib, torch.hub": "reaching: cffi,ctypes,smtplib,torch.hub",
    "from urllib import request; import requests": "reaching: requests,urllib",
    "import socketless": "reaching: ",
    "train_files: str = 'fineweb_val_0.bin'": "validation: fineweb_val_0.bin",
    "load(train_path='data/val/*')": "validation: data/val/*",
    "load(val_path='data/val/*', train_path=['valid/x', 'xval_*'])": "validation: ",
    "load(train_shards='a/val_*', train_glob=['validation/*'])": "validation: a/val_*,validation/*",
    "train_files: str; self.data_train = a = 'x/VAL_*', 7": "validation: x/VAL_*",
    "int(os.getenv('A', 3)); os.environ.get('B', f()); os.getenv('C')": "settings: a=3,b=?,c=?",
    "class Config:\n b: str = T\nclass C:\n c: int = 3\nT = 'x'\nT += 'y'": "settings: b=xy",
    "x = f[T](:; os.environ['A']; os.environ.get( \"B\")": "settings: a=?,b=?",
    "import a.b; import_module('c', 'x'); __import__('d'); from .e import f": "imports: .e,a.b,c,d",
    "import a; x = f[T](:": "imports: a",
}


@pytest.mark.parametrize("line", SHOWN)
def test_what_a_line_of_a_script_shows(line: str) -> None:
    field, names = SHOWN[line].split(": ")
    if field == "settings":
        taken = script.settings(line.encode()).items()
        found = [f"{name}={one.value}".replace(str(script.UNKNOWN), "?") for name, one in taken]
    else:
        found = getattr(look(line.encode()), field)
    assert ",".join(sorted(found)) == names


def test_an_old_python_asks_and_a_new_one_warns(place: Path) -> None:
    long = f"f'{'{x}' * 4000}'\n"
    for version, code, line in (((3, 12), "R608", "def f(:\n"), ((3, 11), "R609", long)):
        make_record(place, script=SCRIPT + line)
        python = SimpleNamespace(version_info=version, stdlib_module_names=sys.stdlib_module_names)
        with mock.patch.object(rules, "sys", python):
            report = check.check_folder(place)
        assert report.codes == {code} and "train_gpt.py: line 11: " in texts(report, code)[0]


@pytest.mark.parametrize("unit", ["os.environ.get('A')\n", "a.b(c.d(f'{x}'))\n", "f'{x}' ", "{x}"])
def test_a_script_is_read_in_linear_time(unit: str) -> None:
    """Twice the text takes at most three times as long: of quadratic time it would be four."""
    times = []
    for size in (40_000, 80_000):
        text = f"f'{'{x}' * size}'\n" if unit == "{x}" else unit * (size // len(unit)) + "\n"
        times.append(processor_time(look.__wrapped__, text.encode()))
    assert times[1] < 3 * times[0] + 0.1


def test_nothing_of_the_folder_is_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = place.with_name("ran")
    evil = f"open({str(marker)!r}, 'w').close()\n"
    folder = make_record(place, script=pack((SCRIPT + evil).encode()).decode())
    for name in ("json.py", "ast.py", "sitecustomize.py", "torch.py"):
        (folder / name).write_text(evil)
    monkeypatch.chdir(folder)
    assert check.check_folder(folder).facts.submitted and not marker.exists()


def test_words_of_strangers_do_not_reach_the_terminal_raw(place: Path, call: Call) -> None:
    folder = make_record(place, changed={"date": "\x1b[31m\ud800\n"}, script=LONG.decode())
    (folder / "bad\x1b[2J\udcff.pt").write_bytes(b"")
    _, out, _ = call(check.main, folder)
    [found] = json.loads(call(check.main, folder, "--json")[1])
    assert {*found["findings"][0]} == {"code", "level", "message", "logs"}
    assert "\x1b" not in out and "bad?[2J" in out and "code packed " in out


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
KEYS = st.sampled_from([*submission.schema()["properties"], "extra"])
ANYTHING = {
    JSON: (st.dictionaries(KEYS, VALUES) | VALUES).map(json.dumps).map(str.encode),
    LOG: DAMAGE.map(partial(damaged, record_log())),
    SOURCE: st.binary(max_size=300) | st.text("()[]{}\"'\\\n:=.,-+fx01 #@").map(str.encode),
}


@pytest.mark.parametrize("name", ANYTHING)
def test_anything_in_a_file_is_judged(name: str, place: Path) -> None:
    make_record(place)

    @given(ANYTHING[name])
    @settings(max_examples=50, deadline=None, suppress_health_check=[*HealthCheck])
    def is_judged(content: bytes) -> None:
        (place / name).write_bytes(content)
        report = check.check_folder(place)
        assert check.lines(report) and (name != SOURCE or report.verdict != "accepted")

    is_judged()


def test_one_folder_does_not_take_the_others_along(place: Path, call: Call) -> None:
    (other := place.parent.parent / "x").mkdir(parents=True)
    facts = [ZeroDivisionError(), check.facts_of(make_record(place), place, str(place), None)]
    with mock.patch.object(check, "facts_of", side_effect=facts):
        code, out, _ = call(check.main, other, place)
    assert (
        code == 0
        and f"{other}: warned (1 warned) as {RECORD}" in out
        and "ZeroDivisionError" in out
    )
    assert "[R999]" in out and f"{place}: accepted" in out


def test_significance_against_a_folder_and_a_score(tmp_path: Path, call: Call) -> None:
    """With another tokenizer fewer nats are no better score, and more are no worse one."""
    ours, theirs = {1: 1.8900, 2: 1.8905, 3: 1.8895}, {1: 1.9000, 2: 1.9004, 3: 1.8996}
    old = make_record(tmp_path / "records" / RECORD / "2026-03-01_Old", results=theirs)
    new = make_record(tmp_path / "records" / RECORD / NAME, results=ours)
    other = make_record(tmp_path / "records" / OPEN / NAME, results={1: 1.5, 2: 1.501}, factor=0.7)
    one = make_record(tmp_path / "one" / NAME, results={1: 1.9})
    bare = make_record(tmp_path / NAME, each=WITHOUT_LOSSES)
    stated = make_record(tmp_path / "stated" / NAME, each=VALIDATED, changed={"val_bpb": 1.3})
    p = welch([*ours.values()], [*theirs.values()], margin=0.005).p
    gain = bpb_of(1.5005, 0.7) - bpb_of(1.89)
    for judged, previous, code, words in (
        (new, old, 0, f"better than 2026-03-01_Old; better by 0.00500: p = {p:.2g} [R901]"),
        (old, new, 1, f" 0.01000 nats worse than {NAME}; better by 0.00500: p = "),
        (new, f"{bpb_of(1.9):.6f}", 0, "bpb; better by 0.00300: p = "),
        (new, f"{bpb_of(1.8951):.6f}", 1, ", not below 0.01: not shown [R902]"),
        (new, "1.9nats", 0, "nats can be compared only where the tokenizer is the same [R904]"),
        (new, "1.8951nats", 1, "[R902]"),
        (new, other, 0, f"{gain:.5f} bits per byte better than {NAME}"),
        (new, one, 0, "0.01000 nats better"),
        (one, old, 1, "one run shows no significance: run three seeds [R902]"),
        (bare, "1.9nats", 0, "these logs are not: give a score in bits per byte [R903]"),
        (bare, stated, 0, "bits per byte better than 2026-04-01_WiderMLP; better by 0.00290"),
    ):
        done, out, _ = call(check.main, judged, "--previous", previous)
        assert done == code and words in out, out


def test_wrong_usage_is_one_line_and_code_2(place: Path, call: Call) -> None:
    place.mkdir(parents=True)
    parent = make_record(place.parent.parent / "many" / "one").parent
    wrong = {
        ("--previous", "nothing"): "neither a folder nor a score, such as 1.1228",
        ("--previous", "0"): "a score above 0, such as 1.1228",
        ("--previous", str(place)): "no finished log in it: give its score, as 1.1228",
        ("--previous", str(parent)): f"a folder of records: name those, as {parent / 'one'}",
        ("--previous", str(ROOT / "records")): f"a folder of records: name those, as {ROOT}",
        ("--track", "track_5min"): "track_10min_16mb or track_non_record_16mb",
    }
    for arguments, words in wrong.items():
        code, out, err = call(check.main, place, *arguments)
        assert (code, out) == (2, "") and words in err.splitlines()[-1]
