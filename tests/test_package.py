"""records/package.py: from logs to a complete folder that check.py accepts, or to the reason why
there is none; and the packed form of a script."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SMALL_MODEL, byte_data, clean_environment, run_trainer
from test_check import ARTIFACT, RULE, SCRIPT, log_text

sys.path.append(str(ROOT / "records"))
import _code as code  # noqa: E402  (the room is no package)
import check  # noqa: E402
import package  # noqa: E402

Capture = pytest.CaptureFixture[str]
pytestmark = pytest.mark.timeout(300)
BY_HAND = "--name|Wider MLP|--author|Ada|--github-id|ada|--description|Wider.|--date|2026-04-01"
NAME = "2026-04-01_WiderMLP"


def make(
    capsys: Capture,
    tmp_path: Path,
    *arguments: object,
    track: str = check.RECORD,
) -> tuple[int, str, str, Path]:
    """Exit code, output, errors, and the folder that was to be made."""
    records = tmp_path / "records"
    words = ["--track", track, *BY_HAND.split("|"), "--records", records, *arguments]
    try:
        done = package.main([str(word) for word in words])
    except SystemExit as stop:
        done = stop.code
    out = capsys.readouterr()
    return done, out.out, out.err, records / track / NAME


def seeds(tmp_path: Path, **changed: object) -> list[Path]:
    """Logs of three seeds on 8 H100s under the names that a run gives them."""
    paths = []
    for number, seed in enumerate((1, 42, 1337)):
        paths.append(tmp_path / f"run{number}.txt")
        paths[-1].write_text(log_text(**{"seed": seed, "nats": 1.9 + seed * 1e-6} | changed))
    return paths


def test_a_record_is_made_whole_and_accepted(tmp_path: Path, capsys: Capture) -> None:
    logs = seeds(tmp_path)
    done, out, err, folder = make(capsys, tmp_path, *logs, logs[0])
    assert (done, err) == (0, "") and f"made {folder}" in out
    assert {path.name: path.read_bytes() for path in folder.glob("*.log")} == {
        f"train_seed{seed}.log": path.read_bytes()
        for seed, path in zip((1, 42, 1337), logs, strict=True)
    }
    assert (folder / "train_gpt.py").read_text() == SCRIPT
    assert [path.name for path in folder.parent.iterdir()] == [NAME], "nothing temporary stays"
    readme = (folder / "README.md").read_text()
    row = "| train_seed42.log | 42 | 13,790 | 599.9 | 2.1 | 1.90004200 | "
    assert row in readme and "--nproc_per_node=8 train_gpt.py" in readme
    (folder / "README.md").write_text(readme.replace(package.TODO, "Done: "))
    assert check.check_folder(folder).verdict == "accepted"


def test_submission_is_filled_from_the_logs(tmp_path: Path, capsys: Capture) -> None:
    found = json.loads(
        (make(capsys, tmp_path, *seeds(tmp_path))[3] / "submission.json").read_text()
    )
    results = found.pop("seed_results")
    assert [results[seed]["val_loss"] for seed in ("1", "42", "1337")] == [
        1.900001,
        1.900042,
        1.901337,
    ]
    assert results["1"]["steps"] == 13_790 and results["1"]["artifact_bytes"] == ARTIFACT
    assert found == {
        "author": "Ada",
        "github_id": "ada",
        "name": "Wider MLP",
        "blurb": "Wider.",
        "date": "2026-04-01",
        "track": "10min_16mb",
        "val_loss": pytest.approx((1.900001 + 1.900042 + 1.901337) / 3, abs=1e-8),
        "val_loss_std": pytest.approx(0.000759, abs=1e-6),
        "val_bpb": pytest.approx(1.12555, abs=1e-5),
        "val_bpb_std": pytest.approx(0.00045, abs=1e-5),
        "bytes_total": ARTIFACT + len(SCRIPT),
        "bytes_code": len(SCRIPT),
        "seeds": [1, 42, 1337],
        "hardware": "8x NVIDIA H100 80GB HBM3",
        "pytorch_version": "2.9.1+cu128",
    }


def test_the_script_of_the_logs_or_the_one_named(tmp_path: Path, capsys: Capture) -> None:
    """Another one in a log is refused by line; --script ships one, which check.py judges."""
    logs = seeds(tmp_path)
    logs[2].write_text(log_text(seed=1337, script=SCRIPT.replace("(torch, os)", "(torch)")))
    done, _, err, folder = make(capsys, tmp_path, *logs)
    assert done == 1 and not folder.exists()
    assert f"{logs[2]}: not the script of {logs[0]}: line 7 is 'print(torch)', not" in err
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT + "# more\n")
    done, out, _, folder = make(capsys, tmp_path, *logs, "--script", script)
    assert done == 1 and "holds another script: line 11" in out and not folder.exists()
    silent = [log_text(seed=seed).split(f"{RULE}\n", 1)[1] for seed in (1, 42, 1337)]
    for path, text in zip(logs, silent, strict=True):
        path.write_text(text)
    assert "--script FILE" in make(capsys, tmp_path, *logs)[2]
    script.write_text(SCRIPT)
    done, _, _, folder = make(capsys, tmp_path, *logs, "--script", script)
    assert done == 0 and (folder / "train_gpt.py").read_text() == SCRIPT


def test_a_packed_script_ships_what_its_logs_hold_readable(tmp_path: Path, capsys: Capture) -> None:
    long = SCRIPT + "".join(f"x{i} = {i}\n" for i in range(500))
    packed = tmp_path / "packed.py"
    packed.write_bytes(code.pack(long.encode()))
    done, out, _, folder = make(capsys, tmp_path, *seeds(tmp_path, script=long), "--script", packed)
    assert done == 0 and "[source]" not in out, out
    assert json.loads((folder / "submission.json").read_text())["bytes_total"] == (
        ARTIFACT + packed.stat().st_size
    )


REFUSED = {
    "unfinished": (
        lambda text: text.split("Serialized model int8", 1)[0],
        "ends before the result",
    ),
    "no seed": (lambda text: text.replace("seed:1337\n", ""), "does not tell its seed"),
    "nothing": (lambda text: "", "no run in it"),
    "another seed": (lambda text: text.replace("seed:1337\n", "seed:1\n"), "seed 1 again"),
    "other settings": (
        lambda text: text.replace("matrix_lr:0.04", "matrix_lr:9"),
        "matrix_lr (0.04",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_logs_that_cannot_be_packaged(fault: str, tmp_path: Path, capsys: Capture) -> None:
    change, words = REFUSED[fault]
    logs = seeds(tmp_path)
    logs[2].write_text(change(logs[2].read_text()))
    done, out, err, _ = make(capsys, tmp_path, *logs)
    assert (done, out) == (1, "") and words in err and err.count("\n") == 1
    assert not (tmp_path / "records").exists()


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"artifact": 16_000_000}, "cap"),
        ({"ms": 44.0}, "time"),
        ({"world": 1}, "time"),
        ({"factor": 1.17}, "data"),
    ],
)
def test_what_check_refuses_is_not_made(
    tmp_path: Path, capsys: Capture, changed: dict[str, object], rule: str
) -> None:
    done, out, err, folder = make(capsys, tmp_path, *seeds(tmp_path, **changed))
    assert done == 1 and "was not made" in err
    assert re.search(rf"^  refused .*\[{rule}\]$", out, re.MULTILINE)
    assert not folder.parent.exists(), "no trace of it is left"


def test_no_folder_is_overwritten(tmp_path: Path, capsys: Capture) -> None:
    logs = seeds(tmp_path)
    folder = make(capsys, tmp_path, *logs)[3]
    before = {path: path.read_bytes() for path in folder.iterdir()}
    done, _, err, _ = make(capsys, tmp_path, *logs[:2])
    assert done == 1 and f"{folder}: exists: remove it, or give another --name" in err
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_write_that_fails_leaves_nothing(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(package.os, "rename", full)
    done, _, err, _ = make(capsys, tmp_path, *seeds(tmp_path))
    assert done == 1 and "No space left on device" in err and not (tmp_path / "records").exists()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (("--date", "2026-4-1"), "--date 2026-4-1: YYYY-MM-DD is expected"),
        (("--name", "?!"), "letters or digits are needed"),
        (("--track", "fast"), "track_10min_16mb or track_non_record_16mb"),
        (("--author", " "), "--author is needed"),
    ],
)
def test_wrong_usage(tmp_path: Path, capsys: Capture, wrong: tuple[str, str], words: str) -> None:
    done, out, err, _ = make(capsys, tmp_path, *seeds(tmp_path), *wrong)
    assert (done, out) == (2, "") and words in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "folder"),
    [("Overlap Ablation", "OverlapAblation"), ("10L_Int5", "10L_Int5"), ("a über/../b", "AUberB")],
)
def test_folder_names(name: str, folder: str) -> None:
    assert package.slug(name) == folder


def test_arms_of_a_study(tmp_path: Path, capsys: Capture) -> None:
    """The first log's configuration is submitted, the other is named after what differs."""
    other = tmp_path / "other.txt"
    other.write_text(log_text(seed=1, nats=1.95, lr=0.03))
    done, out, err, folder = make(capsys, tmp_path, *seeds(tmp_path), other, track=check.OPEN)
    assert (done, err) == (0, ""), out
    assert (folder / "train_matrix_lr0.03_seed1.log").read_bytes() == other.read_bytes()
    assert json.loads((folder / "submission.json").read_text())["seeds"] == [1, 42, 1337]


def test_the_command_holds_the_scripts_own_settings(tmp_path: Path, capsys: Capture) -> None:
    """Those that it takes from its environment and that are not its defaults, quoted."""
    script = SCRIPT + (
        'lr = float(os.environ.get("MATRIX_LR", 0.02))\n'
        'length = int(os.environ.get("TRAIN_SEQ_LEN", "1024"))\n'
        'path = os.environ.get("DATA_PATH", "./data")\n'
        'text = os.getenv("DATASET_NOTE", "none")\n'
    )
    logs = seeds(tmp_path, script=script)
    for log in logs:
        log.write_text(log.read_text().replace("tie_embeddings:True", "dataset_note:a;b tie:1"))
    readme = (make(capsys, tmp_path, *logs)[3] / "README.md").read_text()
    command = re.search(r"```bash\n(.*?)```", readme, re.DOTALL)[1].split(" \\\n  ")
    assert sorted(command[1:-1]) == [
        "DATASET_NOTE='a;b'",
        "DATA_PATH=../../../data/datasets/fineweb10B_sp1024",
        "MATRIX_LR=0.04",
    ]


@pytest.mark.slow
def test_runs_of_the_trainer(tmp_path: Path, capsys: Capture) -> None:
    """A real run becomes a record; then the README's command, as it stands, runs it again."""
    data = byte_data(tmp_path / "data" / "datasets" / "small")
    tokenizer = tmp_path / "data" / "tokenizers" / "byte.json"
    tokenizer.parent.mkdir()
    Path(data["TOKENIZER_PATH"]).rename(tokenizer)
    small = SMALL_MODEL | data | {"TOKENIZER_PATH": tokenizer, "ITERATIONS": 3, "VAL_LOSS_EVERY": 0}
    done = run_trainer(tmp_path, RUN_ID="a", SEED=2, TRAIN_PREFETCH=0, **small)
    assert done.code == 0, done.err
    done_, out, err, folder = make(capsys, tmp_path, tmp_path / "logs/a.txt", track=check.OPEN)
    assert (done_, err) == (0, ""), out
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


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_the_packed_script_is_the_same_run(ranks: int, tmp_path: Path, capsys: Capture) -> None:
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
    made = make(capsys, tmp_path, runs[1].log_path, track=check.OPEN)
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
def test_what_is_not_packed(text: bytes, words: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "a.py"
    path.write_bytes(text)
    assert package.main(["--pack", str(path)]) == 1
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and len(list(tmp_path.iterdir())) == 1


def test_packing_keeps_the_files_of_others(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "a_packed.py").write_text("mine\n")
    assert package.main(["--pack", str(tmp_path / "a.py")]) == 1
    assert "name another --output" in capsys.readouterr().err
    assert (tmp_path / "a_packed.py").read_text() == "mine\n"


def test_settings_of_the_trainer(tmp_path: Path) -> None:
    done = run_trainer(tmp_path, args=("--print-config",), RUN_ID="x")
    trainers = {name: entry["value"] for name, entry in json.loads(done.out).items()}
    found = code.settings((ROOT / "train_gpt.py").read_bytes())
    assert {name: found[name] for name in trainers} == trainers | {"run_id": ""}


def test_the_tools_run_as_commands(tmp_path: Path) -> None:
    words = [*seeds(tmp_path), "--track", check.RECORD, *BY_HAND.split("|"), "--records", tmp_path]
    folder = tmp_path / check.RECORD / NAME
    for tool, arguments in (("package.py", words), ("check.py", [folder])):
        command = [sys.executable, ROOT / "records" / tool, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
        assert done.returncode == 0 and ": warned (1 warned)" in done.stdout, done.stderr


def test_the_rooms_readme_names_each_rule() -> None:
    text = (ROOT / "records" / "check.py").read_text()
    rules = set(
        re.findall(r'add\(\s*(?:"\w+"|level|report\.severe|[^,()]+ else "\w+"),\s*"(\w+)"', text)
    )
    readme = (ROOT / "records" / "README.md").read_text()
    assert len(rules) > 8 and not [rule for rule in rules if f"`{rule}`" not in readme]
