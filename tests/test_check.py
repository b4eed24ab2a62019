"""records/check.py: what is accepted, warned about and refused;
folders made by others, and by nobody's friends."""

import copy
import functools
import hashlib
import json
import lzma
import math
import os
import random
import sys
import tempfile
from base64 import b85encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, SMALL_MODEL, byte_data, run_trainer
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(ROOT / "records"))
import check  # noqa: E402  (the room is no package)
from _reader import embedded_source, first_difference, welch  # noqa: E402
from _script import look, packed_size  # noqa: E402
from _shards import Shards, data_crcs  # noqa: E402
from _submission import faults, schema  # noqa: E402

pytestmark = pytest.mark.timeout(200)
TOKENS, BYTES = 62_021_632, 151_080_362
RULE = "=" * 100
SCRIPT = (
    '"""A trainer."""\nimport os\nimport torch\n\n\ndef main():\n    print(torch, os)\n\n\nmain()\n'
)
SMI = "\n".join(
    [
        "| NVIDIA-SMI 570.1   Driver Version: 570.1   CUDA Version: 12.8 |",
        *[
            f"|   {n}  NVIDIA H100 80GB HBM3          On  |   00000000:19:00.0 Off | 0 |"
            for n in range(8)
        ],
    ]
)
NAME = "2026-04-01_WiderMLP"
ARTIFACT = 15_700_000


def bpb_of(nats: float, factor: float = 1.0) -> float:
    return nats / math.log(2) * TOKENS / (BYTES * factor)


@dataclass(frozen=True)
class LogWords:
    """What differs from log to log."""

    seed: int = 1
    nats: float = 1.9
    ms: float = 43.5
    steps: int = 13_790
    script: str = SCRIPT
    artifact: int = ARTIFACT
    code: int | None = None
    total: int | None = None
    factor: float = 1.0
    stop: bool = True
    shards: int = 80
    world: int = 8
    lr: float = 0.04
    eval_ms: int = 2100
    smi: str = SMI
    python: str = "3.12.3"
    partial: str = ""

    def head(self) -> list[str]:
        return [
            self.script,
            RULE,
            f"Running Python {self.python} (main, x) [GCC 13.3.0]",
            "Running PyTorch 2.9.1+cu128",
            self.smi,
            RULE,
            f"train_loader:dataset:fineweb10B_sp1024 train_shards:{self.shards}",
            "val_loader:shards pattern=./data/datasets/fineweb10B_sp1024/fineweb_val_*.bin "
            f"tokens:{TOKENS}{self.partial}",
            "model_params:17059912",
            f"world_size:{self.world} grad_accum_steps:1",
            f"tie_embeddings:True embed_lr:0.05 head_lr:0.0 matrix_lr:{self.lr} scalar_lr:0.04",
            "train_batch_tokens:524288 train_seq_len:1024 iterations:20000 warmup_steps:20 "
            "max_wallclock_seconds:600.000",
            f"seed:{self.seed}",
        ]

    def steps_taken(self) -> list[str]:
        nats, ms, steps = self.nats, self.ms, self.steps
        lines = [
            f"step:{k}/20000 train_loss:{nats + 9 / k:.4f} "
            f"train_time:{k * ms:.0f}ms step_avg:{ms:.2f}ms"
            for k in (1, 10, 1000, 10_000)
        ]
        lines.append(
            f"step:{steps}/20000 val_loss:{nats - 0.01:.4f} val_bpb:{bpb_of(nats - 0.01):.4f} "
            f"train_time:{steps * ms:.0f}ms"
        )
        if self.stop:
            lines.append(
                f"stopping_early: wallclock_cap train_time:{steps * ms:.0f}ms step:{steps}/20000"
            )
        return lines

    def result(self) -> list[str]:
        nats, partial = self.nats, self.partial
        bpb = bpb_of(nats, self.factor)
        code = len(self.script.encode()) if self.code is None else self.code
        total = self.artifact + code if self.total is None else self.total
        return [
            "Serialized model: 67000000 bytes",
            f"Code size: {code} bytes",
            f"Serialized model int8+zlib: {self.artifact} bytes",
            f"Total submission size int8+zlib: {total} bytes",
            f"final_int8_zlib_roundtrip val_loss:{nats:.4f} val_bpb:{bpb:.4f} "
            f"eval_time:{self.eval_ms}ms{partial}",
            f"final_int8_zlib_roundtrip_exact val_loss:{nats:.8f} val_bpb:{bpb:.8f}{partial}",
        ]


def log_text(**changed: Any) -> str:
    """A log of the challenge's script, as it would be of 8 H100s."""
    words = LogWords(**changed)
    return "\n".join([*words.head(), *words.steps_taken(), *words.result(), ""])


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


@pytest.fixture(autouse=True, scope="module")
def each_script_is_parsed_once() -> Iterator[None]:
    """check.py looks at a script in a process of its own; here most folders hold the same one."""
    parsed = functools.cache(look)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "look", lambda text: copy.deepcopy(parsed(text)))
        yield


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "records" / check.RECORD / NAME


def found(report: check.Report, rule: str) -> list[tuple[str, str]]:
    return [(one.level, str(one)) for one in report.findings if one.rule == rule]


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    try:
        code = check.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = stop.code
    out = capsys.readouterr()
    return code, out.out, out.err


def test_a_record_in_order_is_accepted(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, make_record(place))
    assert (code, err) == (0, "") and out.startswith(f"{place}: accepted as track_10min_16mb\n")
    assert "val_bpb 1.12558 +- 0.00030, val_loss 1.90050, seeds 1, 42, 1337" in out
    size, packed = len(SCRIPT), packed_size(SCRIPT.encode())
    for bytes_of_code, total in ((size, ARTIFACT + size), (packed, ARTIFACT + packed)):
        assert (
            f"{bytes_of_code:,} + model" in out
            and f"{total:,} bytes, {16_000_000 - total:,} left" in out
        )
    assert "note" not in out.split("left\n", 2)[-1]


def edit(**changed: Any) -> Callable[[Path], None]:
    return lambda folder: make_record(folder, **changed) and None


def then(after: Callable[[Path], object], **changed: Any) -> Callable[[Path], None]:
    return lambda folder: after(make_record(folder, **changed)) and None


def submission(**changed: Any) -> Callable[[Path], None]:
    return edit(changed=changed)


def rewrite(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (make_record(folder) / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return change


def one_other(**changed: Any) -> Callable[[Path], None]:
    """A record of which the log of seed 42 is another than its sisters."""

    def change(folder: Path) -> None:
        make_record(folder)
        (folder / "train_seed42.log").write_text(log_text(**{"seed": 42, "nats": 1.901} | changed))

    return change


def mean_bpb(nats: float = 1.9005) -> float:
    return round(bpb_of(nats), 8)


FAULTS: dict[str, tuple[Callable[[Path], None], str, str, str]] = {
    "no readme": (then(lambda f: (f / "README.md").unlink()), "refused", "files", "no README.md"),
    "no script": (
        then(lambda f: (f / "train_gpt.py").unlink()),
        "refused",
        "files",
        "no train_gpt.py",
    ),
    "no submission": (
        then(lambda f: (f / "submission.json").unlink()),
        "refused",
        "files",
        "no submission.json",
    ),
    "another case": (
        then(lambda f: (f / "README.md").rename(f / "readme.md")),
        "refused",
        "files",
        "readme.md",
    ),
    "no logs": (
        then(lambda f: [log.unlink() for log in f.glob("*.log")]),
        "refused",
        "files",
        "no log of a run",
    ),
    "weights": (
        then(lambda f: (f / "final_model.pt").write_bytes(b"x")),
        "warned",
        "files",
        "final_model.pt",
    ),
    "misspelt log": (
        then(lambda f: (f / "train_seed1.log").rename(f / "trarin_seed1.log")),
        "warned",
        "files",
        "trarin_seed1.log: a log is called",
    ),
    "todo": (edit(readme="TODO: " + "words " * 30), "warned", "files", "TODO"),
    "date apart": (submission(date="2026-03-01"), "warned", "name", "2026-03-01"),
    "other track": (submission(track="non_record_16mb"), "refused", "place", "non_record_16mb"),
    "one seed": (edit(results={1: 1.9}), "warned", "seeds", "1 run: three"),
    "same seed": (
        then(lambda f: (f / "train_seed7.log").write_text(log_text(seed=1, nats=1.9002))),
        "refused",
        "seeds",
        "train_seed7.log: this run's seed is 1",
    ),
    "seed twice": (
        then(lambda f: (f / "train_a_seed1.log").write_text(log_text(seed=1, nats=1.9))),
        "refused",
        "seeds",
        "seed 1 more than once",
    ),
    "bpb wrong": (
        submission(val_bpb=1.1187),
        "refused",
        "score",
        "val_bpb is 1.1187, the mean of the logs is 1.12558",
    ),
    "bpb rounded": (submission(val_bpb=1.126), "warned", "score", "rounded"),
    "bpb too round": (submission(val_bpb=1.1), "refused", "score", "val_bpb is 1.1, the mean"),
    "bpb of one seed": (
        submission(val_bpb=round(bpb_of(1.9), 8)),
        "warned",
        "score",
        "seed 1 alone",
    ),
    "before quantisation": (
        submission(val_bpb=round(bpb_of(1.8905), 4)),
        "refused",
        "score",
        "before quantisation",
    ),
    "bpb as loss": (submission(val_loss=mean_bpb()), "refused", "score", "is val_bpb"),
    "seed result": (
        submission(seed_results={"1": {"val_bpb": 1.1}, "42": {}, "1337": {}}),
        "refused",
        "score",
        "val_bpb of seed 1 is 1.1",
    ),
    "seed without log": (
        submission(seeds=[1, 42, 1337, 7]),
        "refused",
        "seeds",
        "7, which has no log",
    ),
    "seeds left out": (submission(seeds=None), "warned", "seeds", "without 1, 42, 1337"),
    "model alone": (submission(bytes_total=ARTIFACT), "warned", "sizes", "model alone"),
    "total wrong": (submission(bytes_total=15_000_000), "refused", "sizes", "the logs say 15,700,"),
    "code wrong": (submission(bytes_code=5), "refused", "sizes", "bytes_code is 5"),
    "too large": (edit(artifact=16_000_000), "refused", "cap", "too many (below 16 MiB"),
    "log counts more": (edit(total=16_024_793), "refused", "cap", "24,793 too many"),
    "does not add up": (edit(total=15_700_001), "warned", "cap", "is not model"),
    "code size": (
        edit(code=48_000),
        "refused",
        "code size",
        "train_seed1.log and 2 more: Code size: 48,000",
    ),
    "no compiler": (
        edit(script="import os\ndef f(:\n    return 1\n", python="3.10.1"),
        "refused",
        "script",
        "line 2",
    ),
    "code outside": (
        then(
            lambda f: (f / "helper.py").write_text("x = 1\n"),
            script="import helper\nprint(helper)\n",
        ),
        "refused",
        "script",
        "imports helper from the folder",
    ),
    "needs a package": (
        edit(script="import os\nimport exotic\ndef f(): pass\n"),
        "warned",
        "script",
        "imports exotic",
    ),
    "other code": (
        one_other(script=SCRIPT.replace("A trainer", "My trainer")),
        "refused",
        "source",
        'line 1 is \'"""My trainer."""\' in the log',
    ),
    "no source": (
        rewrite("train_seed1.log", f"{SCRIPT}\n{RULE}\n", ""),
        "warned",
        "source",
        "not proved",
    ),
    "other settings": (one_other(lr=0.02), "refused", "configuration", "matrix_lr (0.04 | 0.02)"),
    "log cut": (
        rewrite("train_seed1.log", "final_int8_zlib", "#"),
        "refused",
        "log",
        "it ends before the result",
    ),
    "no run in it": (
        then(lambda f: (f / "train_seed7.log").write_text("pip install torch\n")),
        "refused",
        "log",
        "train_seed7.log: no training log",
    ),
    "late": (edit(ms=43.6, steps=13_790), "refused", "training time", "601.244 s"),
    "late, unsaid": (
        edit(ms=43.51, stop=False),
        "refused",
        "training time",
        "without stopping_early",
    ),
    "just late": (edit(ms=43.5125), "note", "training time", "0.9 steps"),
    "slow evaluation": (edit(eval_ms=688_000), "refused", "evaluation time", "688.0 s"),
    "one card": (edit(world=1), "refused", "hardware", "1 x NVIDIA H100"),
    "another card": (
        edit(smi=SMI.replace("H100 80GB HBM3", "A100-SXM4-80GB")),
        "refused",
        "hardware",
        "A100",
    ),
    "space twice": (
        edit(
            factor=1.17, changed={"val_bpb": round(bpb_of(1.9005, 1.17), 8), "seed_results": None}
        ),
        "refused",
        "bytes",
        "the leading space counted twice?",
    ),
    "partial": (edit(partial=" partial_val:1"), "refused", "data", "partial_val:1"),
    "few shards": (edit(shards=10), "warned", "data", "train_shards:10"),
    "epochs": (edit(shards=10), "warned", "data", "7.23 epochs"),
    "resumed": (
        rewrite(
            "train_seed1.log",
            "step:10000/20000 train_loss",
            "step:900/20000 train_loss:2.0 train_time:9ms\nstep:10000/20000 train_loss",
        ),
        "refused",
        "log",
        "resumed at step 900",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_named(fault: str, place: Path) -> None:
    build, level, rule, words = FAULTS[fault]
    build(place)
    report = check.check_folder(place)
    assert [one for one in found(report, rule) if one[0] == level and words in one[1]], [
        (one.level, one.rule, str(one)) for one in report.findings
    ]
    worst = {"note": "accepted"}.get(level, level)
    assert report.verdict in (worst, "refused") and (
        level != "refused" or report.verdict == "refused"
    )


def test_a_single_fault_is_one_finding(place: Path) -> None:
    report = check.check_folder(make_record(place, changed={"val_bpb": 1.1187}))
    assert [(one.level, one.rule) for one in report.findings] == [("refused", "score")]


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("WiderMLP", "refused"),
        ("2026-04-01 Wider MLP", "refused"),
        ("2026-02-30_WiderMLP", "refused"),
        ("2999-01-01_WiderMLP", "warned"),
    ],
)
def test_folder_names(tmp_path: Path, name: str, level: str) -> None:
    report = check.check_folder(make_record(tmp_path / "records" / check.RECORD / name))
    assert level in [one for one, _ in found(report, "name")]


def test_place_and_track(tmp_path: Path) -> None:
    elsewhere = check.check_folder(make_record(tmp_path / "mine" / NAME))
    assert (elsewhere.verdict, elsewhere.track) == ("warned", check.RECORD) and found(
        elsewhere, "place"
    )
    unknown = check.check_folder(make_record(tmp_path / "records" / "track_5min" / NAME))
    assert unknown.verdict == "refused"
    folder = make_record(
        tmp_path / "records" / check.OPEN / NAME,
        ms=80,
        world=1,
        smi="",
        changed={"track": "non-record-unlimited-compute-16mb"},
    )
    assert check.check_folder(folder).verdict == "accepted", "no record has no limit of time"
    assert check.check_folder(folder, check.Options(check.RECORD)).verdict == "refused"


@pytest.mark.parametrize(
    ("right", "written"),
    [
        ("github_id", "github"),
        ("github_id", "github_username"),
        ("val_bpb", "mean_val_bpb"),
        ("val_loss", "mean_val_loss"),
        ("bytes_total", "artifact_size_bytes"),
        ("bytes_code", "code_bytes"),
        ("name", "title"),
        ("date", "submission_date"),
    ],
)
def test_synonyms_are_named_and_used(place: Path, right: str, written: str) -> None:
    folder = make_record(place)
    values = json.loads((folder / "submission.json").read_text())
    values[written] = values.pop(right)
    (folder / "submission.json").write_text(json.dumps(values))
    report = check.check_folder(folder)
    assert [(one.level, one.words) for one in report.findings] == [
        ("warned", f"submission.json: {written} is to be called {right}")
    ]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("val_bpb", "1.1256", 'val_bpb is the string "1.1256", not a number'),
        ("val_bpb", None, "val_bpb is missing"),
        ("val_bpb", 0.0, "a placeholder?"),
        ("github_id", "your_github_id", "a placeholder"),
        ("author", "", "author is empty"),
        ("date", "1 April", "date is"),
        ("github_id", 7, "github_id is an integer, not a string"),
        ("val_bpb", True, "val_bpb is a boolean"),
    ],
)
def test_submission_values(place: Path, key: str, value: object, words: str) -> None:
    report = check.check_folder(make_record(place, changed={key: value}))
    assert report.verdict == "refused"
    assert any(level == "refused" and words in line for level, line in found(report, "submission"))


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1',
        "[1]",
        "",
        "NaN",
        '{"val_bpb": NaN}',
        "\x00",
        "[" * 200_000,
        "1" * 50_000,
        '{"a":' * 100_000,
    ],
)
def test_a_submission_that_is_no_object(place: Path, text: str) -> None:
    folder = make_record(place)
    (folder / "submission.json").write_text(text)
    report = check.check_folder(folder)
    assert report.verdict == "refused" and found(report, "submission")


def test_a_key_twice_is_told(place: Path) -> None:
    folder = make_record(place)
    text = (folder / "submission.json").read_text()
    (folder / "submission.json").write_text('{"val_bpb": 1.0, ' + text[1:])
    assert found(check.check_folder(folder), "submission") == [
        ("warned", "submission.json has val_bpb more than once: the last one counts")
    ]


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 20_000_000)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.just("2026-04-01"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
SUBMISSIONS = st.dictionaries(
    st.sampled_from([*schema()["properties"], "extra"]), VALUES, max_size=17
)


@given(SUBMISSIONS)
@settings(max_examples=100, deadline=None)
def test_the_validator_agrees_with_jsonschema(value: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    theirs = {
        (error.absolute_path[0] if error.absolute_path else error.message.split("'")[1])
        for error in jsonschema.Draft202012Validator(schema()).iter_errors(value)
    }
    assert {key for key, _ in faults(value, schema())} == theirs


def test_the_schema_says_nothing_that_is_not_checked() -> None:
    rule = {"type": "object", "properties": {"a": {"type": "string", "format": "date"}}}
    with pytest.raises(ValueError, match="format"):
        list(faults({"a": "x"}, rule))
    assert list(faults({"a": 1}, {"properties": {"a": {"type": "string"}}})) == [
        ("a", "a is an integer, not a string")
    ]


# --- folders of strangers ---


def test_links_that_leave_are_refused_and_not_followed(place: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.log"
    secret.write_text(log_text(seed=9))
    folder = make_record(place)
    (folder / "train_seed9.log").symlink_to(secret)
    (folder / "up").symlink_to(tmp_path)
    (folder / "circle").symlink_to(folder)
    (folder / "README.md").rename(folder / "text.md")
    (folder / "README.md").symlink_to("text.md")
    report = check.check_folder(folder)
    assert sorted(line.split()[0] for _, line in found(report, "links")) == [
        "train_seed9.log",
        "up",
    ]
    assert report.seeds == [1, 42, 1337] and not found(report, "files")


def test_a_pipe_is_not_opened(place: Path) -> None:
    folder = make_record(place)
    (folder / "train_gpt.py").unlink()
    os.mkfifo(folder / "train_gpt.py")
    os.mkfifo(folder / "train_seed3.log")
    report = check.check_folder(folder)
    assert report.verdict == "refused" and len(found(report, "files")) == 3


@pytest.mark.parametrize(
    "text",
    [
        "(" * 100_000,
        "-" * 1_000_000 + "1",
        "x" + ".a" * 300_000,
        "f" + "()" * 300_000,
        "if 1:\n " * 50,
        "x = 1\0",
        "# coding: nonsense\n1",
        "return 1\n",
        "print(\u2014)\n",
        "x=" + "1+" * 200_000 + "1",
        "\udcff",
    ],
)
def test_scripts_that_break_parsers(place: Path, text: str) -> None:
    folder = make_record(place)
    (folder / "train_gpt.py").write_bytes(text.encode("utf-8", "surrogateescape"))
    report = check.check_folder(folder)
    assert report.verdict == "refused" and len(found(report, "script")) == 1


def test_nothing_of_the_folder_is_run(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "ran"
    evil = f"open({str(marker)!r}, 'w').close()\n"
    folder = make_record(place, script=SCRIPT + evil)
    for name in ("json.py", "ast.py", "sitecustomize.py", "usercustomize.py", "conftest.py"):
        (folder / name).write_text(evil)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    report = check.check_folder(folder)
    assert report.verdict == "accepted" and len(found(report, "script")) == 5
    assert not marker.exists() and look((SCRIPT + evil).encode()).error is None


def test_a_newer_pythons_script_may_be_right(place: Path) -> None:
    report = check.check_folder(make_record(place, script="def f(:\n", python="3.99.1"))
    assert (
        found(report, "script")[0][0] == "warned"
        and "check with that" in found(report, "script")[0][1]
    )


def test_large_files_are_not_read(place: Path) -> None:
    folder = make_record(place)
    for name in ("train_gpt.py", "submission.json"):
        with open(folder / name, "r+b") as file:
            file.truncate(70 << 20)
    with open(folder / "train_seed1.log", "r+b") as file:
        file.truncate(65 << 20)
    report = check.check_folder(folder)
    assert report.verdict == "refused" and found(report, "cap") and found(report, "submission")
    assert any("only the first and the last" in line for _, line in found(report, "log"))


def test_words_of_strangers_do_not_reach_the_terminal_raw(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_record(place, changed={"date": "\x1b[31m\ud800\n"})
    (folder / "bad\x1b[2J\udcff.pt").write_bytes(b"")
    _, out, _ = call(capsys, folder)
    assert "\x1b" not in out and "bad?[2J" in out


def test_a_packed_script_is_seen_through(place: Path) -> None:
    inner = (SCRIPT + "".join(f"x{i} = {i * 7919}\n" for i in range(900))).encode()
    encoded = b85encode(lzma.compress(inner))
    packed = f"import lzma,base64\nexec(lzma.decompress(base64.b85decode({encoded!r})))\n"
    seen = look(packed.encode())
    assert (seen.unpacked_bytes, seen.unpacked_sha256) == (
        len(inner),
        hashlib.sha256(inner).hexdigest(),
    )
    assert {"torch", "os"} <= {one.module for one in seen.imports}
    folder = make_record(place, script=packed, code=len(inner))
    report = check.check_folder(folder)
    assert any("counted the unpacked script" in line for _, line in found(report, "code size"))
    assert report.packed_code_bytes == report.code_bytes == len(packed)


def test_packed_size_is_that_of_a_script_that_works(tmp_path: Path) -> None:
    text = (ROOT / "records" / "check.py").read_bytes()
    assert len(text) // 5 < packed_size(text) < len(text) // 2
    assert packed_size(b"") < 200


@pytest.fixture(scope="module")
def fuzz_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield make_record(Path(folder) / "records" / check.RECORD / NAME)


@given(SUBMISSIONS | VALUES)
@settings(max_examples=40, deadline=None)
def test_any_submission_is_judged(fuzz_folder: Path, value: Any) -> None:
    (fuzz_folder / "submission.json").write_text(json.dumps(value))
    json.loads(check.as_json([check.check_folder(fuzz_folder)]))


@given(st.integers(0, 2**32), st.integers(0, 6))
@settings(max_examples=40, deadline=None)
def test_any_log_is_judged(fuzz_folder: Path, seed: int, kind: int) -> None:
    """Logs with lines lost, digits replaced, pieces repeated, or of noise."""
    rng, text = random.Random(seed), log_text(seed=1).encode()
    for _ in range(kind):
        at, length = rng.randrange(len(text)), rng.randrange(1, 400)
        piece = rng.choice(
            [
                b"",
                b"nan",
                b"9" * 30,
                b"-1",
                b"0",
                b"\xff\x00",
                text[at : at + length] * 2,
                b"inf",
                b"\n",
            ]
        )
        place = rng.choice([at, max(0, text.find(b"final_int8") + rng.randrange(80))])
        text = text[:place] + piece + text[place + rng.choice([0, 1, length]) :]
    (fuzz_folder / "train_seed1.log").write_bytes(text)
    report = check.check_folder(fuzz_folder)
    assert check.lines(report) and json.loads(check.as_json([report]))


@given(
    st.binary(max_size=300)
    | st.text(alphabet="()[]{}\"'\\\n:=.,-+fx01 #@", max_size=300).map(str.encode)
)
@settings(max_examples=15, deadline=None)
def test_any_script_is_judged(fuzz_folder: Path, text: bytes) -> None:
    (fuzz_folder / "train_gpt.py").write_bytes(text)
    report = check.check_folder(fuzz_folder)
    assert report.code_bytes == len(text) and report.level in check.LEVELS


def test_one_folder_does_not_take_the_others_along(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_record(place)
    real = check.check_files
    monkeypatch.setattr(
        check, "check_files", lambda case: real(case) if case.place.name == NAME else 1 / 0
    )
    code, out, _ = call(capsys, tmp := place.parent, place)
    assert (
        code == 1
        and f"{tmp}: refused" in out
        and "ZeroDivisionError" in out
        and f"{place}: accepted" in out
    )


# --- significance, data, arms, command line ---


def test_significance_against_a_folder_and_a_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = {1: 1.8900, 2: 1.8905, 3: 1.8895}
    theirs = {1: 1.9000, 2: 1.9004, 3: 1.8996}
    old = make_record(tmp_path / "records" / check.RECORD / "2026-03-01_Old", results=theirs)
    new = make_record(tmp_path / "records" / check.RECORD / NAME, results=ours)
    test = welch(list(ours.values()), list(theirs.values()), margin=0.005)
    assert test.p < 0.01
    code, out, _ = call(capsys, new, "--previous", old, "--json")
    finding = [
        one for one in json.loads(out)["folders"][0]["findings"] if one["rule"] == "significance"
    ]
    assert (
        code == 0 and finding[0]["level"] == "note" and f"p = {test.p:.2g}" in finding[0]["words"]
    )
    code, out, _ = call(capsys, new, "--previous", old, "--margin", 0.0098)
    assert code == 1 and "not shown" in out
    assert call(capsys, old, "--previous", new)[0] == 1
    assert call(capsys, new, "--previous", f"{bpb_of(1.9):.6f}")[0] == 0
    assert call(capsys, new, "--previous", f"{bpb_of(1.8951):.6f}")[0] == 1
    assert call(capsys, new, "--previous", "1.9000nats")[0] == 0
    assert call(capsys, new, "--previous", "1.8951nats")[0] == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("--previous", "nothing"),
        ("--previous", "0"),
        ("--alpha", "2"),
        ("--margin", "-1"),
        ("--track", "track_5min"),
        ("--data", "nowhere"),
        ("--nothing",),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    code, out, err = call(capsys, make_record(place), *arguments)
    assert (code, out) == (2, "") and "error: " in err and "Traceback" not in err


def test_a_missing_folder_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = call(capsys, tmp_path / "none")
    assert code == 1 and "no such folder" in out


def test_arms_of_a_study(tmp_path: Path) -> None:
    folder = make_record(
        tmp_path / "records" / check.OPEN / NAME, changed={"track": "non_record_16mb"}
    )
    for seed, nats in ((1, 1.95), (42, 1.96)):
        (folder / f"train_lr0.02_seed{seed}.log").write_text(
            log_text(seed=seed, nats=nats, lr=0.02)
        )
        # Settings of which a text log says nothing: the arm's name alone tells it apart.
        (folder / f"train_other_seed{seed}.log").write_text(log_text(seed=seed, nats=nats + 0.1))
    report = check.check_folder(folder)
    assert (report.verdict, report.val_bpb.n, report.seeds) == ("accepted", 3, [1, 42, 1337])
    assert any(
        "3 arms that differ in matrix_lr" in line for _, line in found(report, "configuration")
    )


def test_data_crc_is_computed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = byte_data(tmp_path / "data", 5000, 2000)
    run = run_trainer(
        tmp_path,
        RUN_ID="r",
        SEED=5,
        **SMALL_MODEL | data | {"TRAIN_BATCH_TOKENS": 1024, "ITERATIONS": 6, "VAL_LOSS_EVERY": 0},
    )
    assert run.code == 0, run.err
    folder = tmp_path / "records" / check.OPEN / "2026-04-01_Small"
    folder.mkdir(parents=True)
    (folder / "train.log").write_bytes(run.log_path.read_bytes())
    (folder / "train_gpt.py").write_bytes((ROOT / "train_gpt.py").read_bytes())
    code, out, _ = call(capsys, folder, "--data", tmp_path / "data")
    assert "train.log: 6 checksums, to step 6, are those of the shards" in out
    assert not [
        line
        for line in out.splitlines()
        if "[source" in line or "[code size" in line or "[script" in line
    ]
    shard = next((tmp_path / "data").glob("fineweb_train_*.bin"))
    damaged = bytearray(shard.read_bytes())
    damaged[1024 + 2 * 3500] ^= 1  # read first in step 4 of 1032 tokens each
    shard.write_bytes(damaged)
    code, out, _ = call(capsys, folder, "--data", tmp_path / "data")
    assert code == 1 and "refused train.log: step 4 has" in out
    shard.write_bytes(damaged[:-2])
    assert call(capsys, folder, "--data", tmp_path / "data")[0] == 2


def test_data_crcs_refuse_what_cannot_be(tmp_path: Path) -> None:
    byte_data(tmp_path, 5000, 2000)
    shards = Shards(tmp_path)
    for batch, length, steps in (
        (1000, 32, [1]),
        (0, 1, [1]),
        (256, 0, [1]),
        (256, 32, [10**12]),
        (1 << 30, 32, [1]),
    ):
        with pytest.raises(ValueError):
            data_crcs(shards, batch_tokens=batch, seq_len=length, steps=steps)
    assert data_crcs(shards, batch_tokens=256, seq_len=32, steps=[]) == {}
    assert shards.read(4998, 4) == shards.read(4998, 2) + shards.read(0, 2)


def test_a_script_with_a_rule_inside_is_the_shipped_one(place: Path) -> None:
    folder = make_record(place, script=SCRIPT + f'x = """\n{RULE}\n"""\n' + "# more of it\n" * 50)
    assert not found(check.check_folder(folder), "source")
    (folder / "train_gpt.py").write_text((folder / "train_gpt.py").read_text() + "# more\n")
    assert "line 64 is ''" in found(check.check_folder(folder), "source")[0][1]


def test_the_script_inside_a_log() -> None:
    text = log_text()
    assert embedded_source(text.encode()) == SCRIPT.encode()
    assert embedded_source(b"step:1/2 train_loss:1.0\n") is None
    with_rule = SCRIPT + f'x = """\n{RULE}\n"""\nimport sys\n' + "# more of it\n" * 50
    assert embedded_source(log_text(script=with_rule).encode()) == with_rule.encode()
    assert first_difference(b"a\nb\n", b"a\nc\n") == (2, "b", "c")
    assert (
        first_difference(b"a", b"a\n") == (2, "(no such line)", "")
        and first_difference(b"a", b"a")[0] == 0
    )
