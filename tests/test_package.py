"""records/package.py: from logs to a complete folder that check.py accepts,
or to the reason why there is none."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SMALL_MODEL, byte_data, clean_environment, run_trainer
from test_check import ARTIFACT, SCRIPT, log_text

sys.path.append(str(ROOT / "records"))
import _code as code  # noqa: E402  (the room is no package)
import check  # noqa: E402
import package  # noqa: E402

pytestmark = pytest.mark.timeout(200)
BY_HAND = [
    "--name",
    "Wider MLP",
    "--author",
    "Ada",
    "--github-id",
    "ada",
    "--description",
    "Wider.",
    "--date",
    "2026-04-01",
]
NAME = "2026-04-01_WiderMLP"


def pack(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    *logs: object,
    track: str = check.RECORD,
    more: tuple[object, ...] = (),
) -> tuple[int, str, str, Path]:
    """Exit code, output, errors, and the folder that was to be made."""
    arguments = [*logs, "--track", track, *BY_HAND, "--records", tmp_path / "records", *more]
    try:
        code = package.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = stop.code
    out = capsys.readouterr()
    return code, out.out, out.err, tmp_path / "records" / track / NAME


def seeds(tmp_path: Path, **changed: object) -> list[Path]:
    """Logs of three seeds on 8 H100s under the names that a run gives them."""
    paths = []
    for number, seed in enumerate((1, 42, 1337)):
        paths.append(tmp_path / f"run{number}.txt")
        paths[-1].write_text(log_text(**{"seed": seed, "nats": 1.9 + seed * 1e-6} | changed))
    return paths


def test_a_record_is_made_whole_and_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = seeds(tmp_path)
    code, out, err, folder = pack(capsys, tmp_path, *logs)
    assert (code, err) == (0, "") and f"made {folder}" in out
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "submission.json",
        "train_gpt.py",
        "train_seed1.log",
        "train_seed1337.log",
        "train_seed42.log",
    ]
    assert (folder / "train_gpt.py").read_text() == SCRIPT
    assert [(folder / f"train_seed{seed}.log").read_bytes() for seed in (1, 42, 1337)] == [
        path.read_bytes() for path in logs
    ]
    assert os.listdir(folder.parent) == [NAME], "nothing temporary stays"
    assert (
        f"{len(SCRIPT):,} + model" in out and f"{16_000_000 - ARTIFACT - len(SCRIPT):,} left" in out
    )
    readme = (folder / "README.md").read_text()
    assert (
        "| train_seed42.log | 42 | 13,790 | 43.50 | 599.9 | 2.1 |" in readme
        and package.TODO in readme
    )
    assert (
        "torchrun --standalone --nproc_per_node=8 train_gpt.py" in readme
        and "8x NVIDIA H100 80GB HBM3" in readme
    )
    (folder / "README.md").write_text(readme.replace(package.TODO, "Done: "))
    assert check.check_folder(folder).verdict == "accepted"


def test_submission_is_filled_from_the_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = pack(capsys, tmp_path, *seeds(tmp_path))[3]
    found = json.loads((folder / "submission.json").read_text())
    losses = [1.900001, 1.900042, 1.901337]
    results = found["seed_results"]
    assert found["val_loss"] == pytest.approx(sum(losses) / 3, abs=1e-8)
    assert [results[seed]["val_loss"] for seed in ("1", "42", "1337")] == losses
    assert (
        found["name"],
        found["author"],
        found["github_id"],
        found["blurb"],
        found["date"],
        found["track"],
    ) == ("Wider MLP", "Ada", "ada", "Wider.", "2026-04-01", "10min_16mb")
    assert (found["bytes_code"], found["bytes_total"], found["seeds"]) == (
        len(SCRIPT),
        ARTIFACT + len(SCRIPT),
        [1, 42, 1337],
    )
    assert results["1"]["steps"] == 13_790 and results["1"]["artifact_bytes"] == ARTIFACT
    assert found["val_loss_std"] == pytest.approx(check.summary(losses).std, abs=1e-8)
    assert (found["hardware"], found["pytorch_version"]) == (
        "8x NVIDIA H100 80GB HBM3",
        "2.9.1+cu128",
    )


def test_another_script_is_refused_by_line_and_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = seeds(tmp_path)
    logs[2].write_text(
        log_text(seed=1337, script=SCRIPT.replace("print(torch, os)", "print(torch)"))
    )
    code, out, err, folder = pack(capsys, tmp_path, *logs)
    assert code == 1 and not folder.exists()
    assert err.startswith(
        f"error: {logs[2]}: not the script of {logs[0]}: line 7 is 'print(torch)', not "
        "'print(torch, os)'"
    )
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT + "# more\n")
    code, _, err, _ = pack(capsys, tmp_path, *logs[:2], more=("--script", script))
    assert code == 1 and f"{script}: not the script of" in err and "line 11" in err
    script.write_text(SCRIPT)
    assert pack(capsys, tmp_path, *logs[:2], more=("--script", script))[0] == 0


REFUSED = {
    "no source": (
        lambda text: text.split(f"{'=' * 100}\n", 1)[1],
        "does not begin with the script's text",
    ),
    "unfinished": (
        lambda text: text.split("Serialized model int8", 1)[0],
        "ends before the result",
    ),
    "no seed": (lambda text: text.replace("seed:1337\n", ""), "does not tell its seed"),
    "two runs": (lambda text: text + text.replace("seed:1337", "seed:7"), "2 runs in it"),
    "nothing": (lambda text: "", "0 runs in it"),
    "another seed": (lambda text: text.replace("seed:1337\n", "seed:1\n"), "seed 1 again"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_logs_that_cannot_be_packaged(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, words = REFUSED[fault]
    logs = seeds(tmp_path)
    logs[2].write_text(change(logs[2].read_text()))
    code, out, err, folder = pack(capsys, tmp_path, *logs)
    assert (code, out) == (1, "") and str(logs[2]) in err and words in err and err.count("\n") == 1
    assert not (tmp_path / "records").exists()


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"artifact": 16_000_000}, "cap"),
        ({"ms": 44.0}, "training time"),
        ({"world": 1}, "hardware"),
        ({"partial": " partial_val:1"}, "data"),
        ({"factor": 1.17}, "bytes"),
        ({"code": 10}, "code size"),
        ({"script": "import os\ndef f(:\n    x\n", "python": "3.10.1"}, "script"),
    ],
)
def test_what_check_refuses_is_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, object], rule: str
) -> None:
    code, out, err, folder = pack(capsys, tmp_path, *seeds(tmp_path, **changed))
    assert (
        code == 1
        and "was not made" in err
        and re.search(rf"^  refused .*\[{rule}: ", out, re.MULTILINE)
    )
    assert not folder.parent.exists(), "no trace of it is left"


def test_no_folder_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = seeds(tmp_path)
    folder = pack(capsys, tmp_path, *logs)[3]
    before = {path: path.read_bytes() for path in folder.iterdir()}
    code, _, err, _ = pack(capsys, tmp_path, *logs[:2])
    assert code == 1 and f"{folder}: exists" in err
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_write_that_fails_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(package.os, "fsync", full)
    code, _, err, folder = pack(capsys, tmp_path, *seeds(tmp_path))
    assert code == 1 and "No space left on device" in err and not folder.parent.exists()


@pytest.mark.parametrize(
    "wrong",
    [
        ("--date", "April"),
        ("--date", "2026-4-1"),
        ("--name", "  "),
        ("--name", "?!"),
        ("--track", "fast"),
        ("--author", ""),
    ],
)
def test_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: tuple[str, str]
) -> None:
    code, out, err, _ = pack(capsys, tmp_path, *seeds(tmp_path), more=wrong)
    assert (code, out) == (2, "") and wrong[0] in err


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("Overlap Ablation", "OverlapAblation"),
        ("10L_Int5-MLP", "10L_Int5-MLP"),
        ("a über/../b", "AUberB"),
        ("..", ""),
    ],
)
def test_folder_names(name: str, folder: str) -> None:
    assert package.slug(name) == folder


def test_arms_of_a_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Logs of two configurations: the first log's is submitted, the other is named after what
    differs."""
    other = tmp_path / "other.txt"
    other.write_text(log_text(seed=1, nats=1.95, lr=0.03))
    logs = [*seeds(tmp_path), other]
    code, out, err, folder = pack(capsys, tmp_path, *logs, track=check.OPEN)
    assert (code, err) == (0, ""), out
    assert (folder / "train_matrix_lr0.03_seed1.log").read_bytes() == other.read_bytes()
    assert len(list(folder.glob("train_seed*.log"))) == 3
    assert "| matrix_lr0.03 | 1 |" in (folder / "README.md").read_text()
    assert json.loads((folder / "submission.json").read_text())["seeds"] == [1, 42, 1337]


def test_runs_of_the_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real run becomes a record; then the README's command, as it stands, runs it again."""
    data = byte_data(tmp_path / "data" / "datasets" / "small")
    tokenizer = tmp_path / "data" / "tokenizers" / "byte.json"
    tokenizer.parent.mkdir()
    Path(data["TOKENIZER_PATH"]).rename(tokenizer)
    small = SMALL_MODEL | data | {"TOKENIZER_PATH": tokenizer, "ITERATIONS": 3, "VAL_LOSS_EVERY": 0}
    done = run_trainer(tmp_path, RUN_ID="a", SEED=2, TRAIN_PREFETCH=0, **small)
    assert done.code == 0, done.err
    code, out, err, folder = pack(capsys, tmp_path, tmp_path / "logs/a.txt", track=check.OPEN)
    assert (code, err) == (0, ""), out
    assert (folder / "train_gpt.py").read_bytes() == (ROOT / "train_gpt.py").read_bytes()
    readme = (folder / "README.md").read_text()
    lines = re.search(r"```bash\n(.*?)```", readme, re.DOTALL)[1]
    for setting in (
        "NUM_LAYERS=2",
        "TRAIN_SEQ_LEN=32",
        "VOCAB_SIZE=260",
        "DEVICE=cpu",
        "TRAIN_PREFETCH=0",
        "for seed in 2; do",
    ):
        assert setting in lines
    defaults = "LOGIT_SOFTCAP", "VAL_PREFETCH", "CONTROL_TENSOR_NAME_PATTERNS"
    assert not [name for name in defaults if name in lines], "defaults are not repeated"
    assert check.check_folder(folder).verdict == "warned", "for its TODO alone"
    again = subprocess.run(
        ["bash", "-c", lines.replace("python3", sys.executable)],
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert again.returncode == 0, again.stderr
    last = [
        path.read_text().splitlines()[-1]
        for path in (folder / "logs" / "seed2.txt", next(folder.glob("*.log")))
    ]
    assert {
        one.rule for one in check.check_folder(folder).findings if one.level == "refused"
    } == set()
    assert last[0] == last[1] and last[0].startswith("final_int8_zlib_roundtrip_exact")


@pytest.mark.parametrize("ranks", [0, 2])
def test_the_packed_script_is_the_same_run(
    ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the digit; its log holds it and its size, and check.py has nothing against either."""
    script = tmp_path / "train_gpt.py"
    script.write_bytes((ROOT / "train_gpt.py").read_bytes())
    assert package.main(["--pack", str(script)]) == 0
    packed = tmp_path / "train_gpt_packed.py"
    assert packed.stat().st_size < script.stat().st_size / 2
    small = SMALL_MODEL | byte_data(tmp_path / "data") | {"ITERATIONS": 4, "RUN_ID": "a"}
    runs = [
        run_trainer(tmp_path / one.stem, script=one, ranks=ranks, VAL_LOSS_EVERY=2, **small)
        for one in (script, packed)
    ]
    assert [run.code for run in runs] == [0, 0], runs[1].err
    for word in ("train_loss", "val_loss", "val_bpb", "data_crc"):
        assert len(runs[0].values(word)) > 2 and runs[0].values(word) == runs[1].values(word)
    assert f"Code size: {packed.stat().st_size} bytes" in runs[1].text
    made = pack(capsys, tmp_path, runs[1].log_path, track=check.OPEN)
    assert made[0] == 0, made
    assert (made[3] / "train_gpt.py").read_bytes() == packed.read_bytes()
    assert package.main(["--unpack", str(packed), "--output", str(tmp_path / "back.py")]) == 0
    assert (tmp_path / "back.py").read_bytes() == script.read_bytes()


def test_the_packed_script_shows_its_readable_lines(tmp_path: Path) -> None:
    """--help reads the source of Config; a traceback, the line that fails."""
    texts = []
    for text in ((ROOT / "train_gpt.py").read_bytes(),) * 2:
        path = tmp_path / "train_gpt.py"
        path.write_bytes(code.pack(text) if texts else text)
        texts.append(run_trainer(tmp_path, script=path, args=("--help",)).out)
    assert texts[0] == texts[1] and "NUM_LAYERS=9" in texts[0]
    path.write_bytes(
        code.pack(
            b"import traceback\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n"
            b"    traceback.print_exc()\n"
        )
    )
    assert f'{path}", line 3, in <module>\n    1 / 0\n' in run_trainer(tmp_path, script=path).err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"def f(:\n", "does not compile: line 1"),
        (b"x = '\xff'\n", "byte 5 is not UTF-8"),
        (code.packed_form(b"import os\n" * 500), "packed already"),
    ],
)
def test_what_is_not_packed(
    text: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.py"
    path.write_bytes(text)
    assert package.main(["--pack", str(path)]) == 1
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and len(list(tmp_path.iterdir())) == 1


def test_packing_keeps_the_files_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "a_packed.py").write_text("mine\n")
    assert package.main(["--pack", str(tmp_path / "a.py")]) == 1
    assert "name another --output" in capsys.readouterr().err
    assert (tmp_path / "a_packed.py").read_text() == "mine\n"


def test_settings_without_events_are_those_of_the_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = SCRIPT + (
        "class Config:\n    matrix_lr: float = 0.04\n    train_seq_len: int = 2048\n"
        "    name: str = call()\n"
    )
    folder = pack(capsys, tmp_path, *seeds(tmp_path, script=script))[3]
    readme = (folder / "README.md").read_text()
    assert (
        "TRAIN_SEQ_LEN=1024" in readme
        and "MATRIX_LR" not in readme
        and "As far as the text log tells" in readme
    )


def test_events_of_another_run_are_not_believed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = seeds(tmp_path)
    events = logs[0].with_suffix(".jsonl")
    events.write_text(
        json.dumps({"event": "config", "seed": 1, "matrix_lr": 9})
        + "\n"
        + json.dumps({"event": "score", "val_loss": 1.5, "val_bpb": 0.9})
        + "\n"
    )
    code, _, err, _ = pack(capsys, tmp_path, *logs)
    assert code == 1 and f"{events}: not of the run" in err


def test_defaults_are_those_of_the_trainer(tmp_path: Path) -> None:
    found = package.defaults((ROOT / "train_gpt.py").read_bytes())
    done = run_trainer(tmp_path, args=("--print-config",), RUN_ID="x")
    trainers = {name: entry["value"] for name, entry in json.loads(done.out).items()}
    assert found == trainers | {"run_id": ""}
    assert package.defaults(b"def f(:") == package.defaults(b"x = 1") == {}


def test_the_tools_run_as_commands(tmp_path: Path) -> None:
    logs = seeds(tmp_path)
    command = [
        sys.executable,
        str(ROOT / "records" / "package.py"),
        *map(str, logs),
        "--track",
        "10min_16mb",
        *BY_HAND,
        "--records",
        str(tmp_path / "records"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "records" / check.RECORD / NAME
    done = subprocess.run(
        [sys.executable, str(ROOT / "records" / "check.py"), str(folder)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
    )
    assert done.returncode == 0 and ": warned (1 warned)" in done.stdout, done.stderr


def test_the_rooms_readme_names_the_rules() -> None:
    readme = (ROOT / "records" / "README.md").read_text()
    for name in ("check.py", "package.py", "submission.schema.json", "--previous", "--data"):
        assert name in readme
    tree = ast.parse((ROOT / "records" / "check.py").read_text())
    added = [
        node.args[1]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", "") == "add"
        and len(node.args) >= 3
    ]
    used = {rule.value for rule in added if isinstance(rule, ast.Constant)}
    assert used | {"checker"} == set(check.RULES)
