"""records/package.py: from logs to a complete folder that check.py accepts, or to the reason why
there is none; and the packed form of a script."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from conftest import ROOT, RULE, SMALL_MODEL, Call, byte_data, clean_environment, run_trainer
from test_check import ARTIFACT, SCRIPT, log_text

sys.path.append(str(ROOT / "records"))
import _code as code  # noqa: E402  (the room is no package)
import check  # noqa: E402
import package  # noqa: E402

Make = Callable[..., tuple[int, str, str, Path]]
pytestmark = pytest.mark.timeout(300)
BY_HAND = "--name|Wider MLP|--author|Ada|--github-id|ada|--description|Wider.|--date|2026-04-01"
NAME = "2026-04-01_WiderMLP"


@pytest.fixture
def make(tmp_path: Path, call: Call) -> Make:
    """package.py, called with logs: exit code, output, errors, and the folder that was to be."""

    def run(*arguments: object, track: str = check.RECORD) -> tuple[int, str, str, Path]:
        records = tmp_path / "records"
        words = ["--track", track, *BY_HAND.split("|"), "--records", records, *arguments]
        return *call(package.main, *words), records / track / NAME

    return run


def seeds(tmp_path: Path, **changed: object) -> list[Path]:
    """Logs of three seeds on 8 H100s under the names that a run gives them."""
    paths = []
    for number, seed in enumerate((1, 42, 1337)):
        paths.append(tmp_path / f"run{number}.txt")
        paths[-1].write_text(log_text(**{"seed": seed, "nats": 1.9 + seed * 1e-6} | changed))
    return paths


def test_a_record_is_made_whole_and_accepted(tmp_path: Path, make: Make) -> None:
    logs = seeds(tmp_path)
    done, out, err, folder = make(*logs, logs[0])
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


def test_submission_is_filled_from_the_logs(tmp_path: Path, make: Make) -> None:
    found = json.loads((make(*seeds(tmp_path))[3] / "submission.json").read_text())
    results = found.pop("seed_results")
    losses = {"1": 1.900001, "42": 1.900042, "1337": 1.901337}
    assert {seed: values["val_loss"] for seed, values in results.items()} == losses
    assert results["1"]["steps"] == 13_790 and results["1"]["artifact_bytes"] == ARTIFACT
    assert found == {
        "author": "Ada",
        "github_id": "ada",
        "name": "Wider MLP",
        "blurb": "Wider.",
        "date": "2026-04-01",
        "track": "10min_16mb",
        "val_loss": pytest.approx(sum(losses.values()) / 3, abs=1e-8),
        "val_loss_std": pytest.approx(0.000759, abs=1e-6),
        "val_bpb": pytest.approx(1.12555, abs=1e-5),
        "val_bpb_std": pytest.approx(0.00045, abs=1e-5),
        "bytes_total": ARTIFACT + len(SCRIPT),
        "bytes_code": len(SCRIPT),
        "seeds": [1, 42, 1337],
        "hardware": "8x NVIDIA H100 80GB HBM3",
        "pytorch_version": "2.9.1+cu128",
    }


def test_the_script_of_the_logs_or_the_one_named(tmp_path: Path, make: Make) -> None:
    """Another one in a log is refused by line; --script ships one, which check.py judges: what it
    refuses is not made."""
    logs = seeds(tmp_path)
    logs[2].write_text(log_text(seed=1337, script=SCRIPT.replace("(torch, os)", "(torch)")))
    done, _, err, folder = make(*logs)
    assert done == 1 and not folder.exists()
    assert f"{logs[2]}: not the script of {logs[0]}: line 7 is 'print(torch)', not" in err
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT + "# more\n")
    done, out, err, folder = make(*logs, "--script", script)
    assert done == 1 and re.search(r"\n  refused .*another script: line 11.* \[source\]\n", out)
    assert "was not made" in err and not folder.parent.exists(), "no trace of it is left"
    silent = [log_text(seed=seed).split(f"{RULE}\n", 1)[1] for seed in (1, 42, 1337)]
    for path, text in zip(logs, silent, strict=True):
        path.write_text(text)
    assert "--script FILE" in make(*logs)[2]
    script.write_text(SCRIPT)
    done, _, _, folder = make(*logs, "--script", script)
    assert done == 0 and (folder / "train_gpt.py").read_text() == SCRIPT


def test_a_packed_script_ships_what_its_logs_hold_readable(tmp_path: Path, make: Make) -> None:
    long = SCRIPT + "".join(f"x{i} = {i}\n" for i in range(500))
    packed = tmp_path / "packed.py"
    packed.write_bytes(code.pack(long.encode()))
    done, out, _, folder = make(*seeds(tmp_path, script=long), "--script", packed)
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
def test_logs_that_cannot_be_packaged(fault: str, tmp_path: Path, make: Make) -> None:
    change, words = REFUSED[fault]
    logs = seeds(tmp_path)
    logs[2].write_text(change(logs[2].read_text()))
    done, out, err, _ = make(*logs)
    assert (done, out) == (1, "") and words in err and err.count("\n") == 1
    assert not (tmp_path / "records").exists()


def test_no_folder_is_overwritten(tmp_path: Path, make: Make) -> None:
    logs = seeds(tmp_path)
    folder = make(*logs)[3]
    before = {path: path.read_bytes() for path in folder.iterdir()}
    done, _, err, _ = make(*logs[:2])
    assert done == 1 and f"{folder}: exists: remove it, or give another --name" in err
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, make: Make) -> None:
    full = OSError(28, "No space left on device")
    with mock.patch.object(package.os, "rename", side_effect=full):
        done, _, err, _ = make(*seeds(tmp_path))
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
def test_wrong_usage(tmp_path: Path, make: Make, wrong: tuple[str, str], words: str) -> None:
    done, out, err, _ = make(*seeds(tmp_path), *wrong)
    assert (done, out) == (2, "") and words in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "folder"),
    [("Overlap Ablation", "OverlapAblation"), ("10L_Int5", "10L_Int5"), ("a über/../b", "AUberB")],
)
def test_folder_names(name: str, folder: str) -> None:
    assert package.slug(name) == folder


def test_arms_of_a_study(tmp_path: Path, make: Make) -> None:
    """The first log's configuration is submitted, the other is named after what differs."""
    other = tmp_path / "other.txt"
    other.write_text(log_text(seed=1, nats=1.95, matrix_lr=0.03))
    done, out, err, folder = make(*seeds(tmp_path), other, track=check.OPEN)
    assert (done, err) == (0, ""), out
    assert (folder / "train_matrix_lr0.03_seed1.log").read_bytes() == other.read_bytes()
    assert json.loads((folder / "submission.json").read_text())["seeds"] == [1, 42, 1337]


def test_the_command_holds_the_scripts_own_settings(tmp_path: Path, make: Make) -> None:
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
    readme = (make(*logs)[3] / "README.md").read_text()
    command = re.search(r"```bash\n(.*?)```", readme, re.DOTALL)[1].split(" \\\n  ")
    assert sorted(command[1:-1]) == [
        "DATASET_NOTE='a;b'",
        "DATA_PATH=../../../data/datasets/fineweb10B_sp1024",
        "MATRIX_LR=0.04",
    ]


@pytest.mark.slow
def test_runs_of_the_trainer(tmp_path: Path, make: Make) -> None:
    """A real run becomes a record; then the README's command, as it stands, runs it again."""
    data = byte_data(tmp_path / "data" / "datasets" / "small")
    tokenizer = tmp_path / "data" / "tokenizers" / "byte.json"
    tokenizer.parent.mkdir()
    Path(data["TOKENIZER_PATH"]).rename(tokenizer)
    small = SMALL_MODEL | data | {"TOKENIZER_PATH": tokenizer, "ITERATIONS": 3, "VAL_LOSS_EVERY": 0}
    done = run_trainer(tmp_path, RUN_ID="a", SEED=2, TRAIN_PREFETCH=0, **small)
    assert done.code == 0, done.err
    made, out, err, folder = make(tmp_path / "logs/a.txt", track=check.OPEN)
    assert (made, err) == (0, ""), out
    assert (folder / "train_gpt.py").read_bytes() == (ROOT / "train_gpt.py").read_bytes()
    readme = (folder / "README.md").read_text()
    lines = re.search(r"```bash\n(.*?)```", readme, re.DOTALL)[1]
    given = ["NUM_LAYERS=2", "TRAIN_SEQ_LEN=32", "VOCAB_SIZE=260", "DEVICE=cpu", "TRAIN_PREFETCH=0"]
    assert not [setting for setting in (*given, "for seed in 2; do") if setting not in lines]
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
    first, second = next(folder.glob("*.log")), folder / "logs" / "seed2.txt"
    last = [path.read_text().splitlines()[-1] for path in (first, second)]
    assert check.check_folder(folder).verdict == "warned", "nothing is refused"
    assert last[0] == last[1] and last[0].startswith("final_int8_zlib_roundtrip_exact")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_the_packed_script_is_the_same_run(ranks: int, tmp_path: Path, make: Make) -> None:
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
    made = make(runs[1].log_path, track=check.OPEN)
    assert made[0] == 0, made
    assert (made[3] / "train_gpt.py").read_bytes() == packed.read_bytes()
    assert package.main(["--unpack", str(packed), "--output", str(tmp_path / "back.py")]) == 0
    assert (tmp_path / "back.py").read_bytes() == script.read_bytes()


@pytest.mark.slow
def test_the_packed_script_shows_its_readable_lines(tmp_path: Path) -> None:
    """--help reads the source of Config; a traceback, the line that fails."""
    text, path = (ROOT / "train_gpt.py").read_bytes(), tmp_path / "train_gpt.py"
    shown = []
    for form in (text, code.pack(text)):
        path.write_bytes(form)
        shown.append(run_trainer(tmp_path, script=path, args=("--help",)).out)
    assert shown[0] == shown[1] and "NUM_LAYERS=9" in shown[0]
    fails = b"try:\n    import traceback\n    1 / 0\nexcept Exception:\n    traceback.print_exc()\n"
    path.write_bytes(code.pack(fails))
    assert f'{path}", line 3, in <module>\n    1 / 0\n' in run_trainer(tmp_path, script=path).err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"def f(:\n", "does not compile: line 1"),
        (b"x = '\xff'\n", "byte 5 is not UTF-8"),
        (code.packed_form(b"import os\n" * 500), "packed already"),
    ],
)
def test_what_is_not_packed(text: bytes, words: str, tmp_path: Path, call: Call) -> None:
    path = tmp_path / "a.py"
    path.write_bytes(text)
    done, _, err = call(package.main, "--pack", path)
    assert done == 1 and words in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [path]


def test_packing_keeps_the_files_of_others(tmp_path: Path, call: Call) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "a_packed.py").write_text("mine\n")
    done, _, err = call(package.main, "--pack", tmp_path / "a.py")
    assert done == 1 and "name another --output" in err
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


def test_git_takes_the_record_and_not_what_a_run_in_it_left(tmp_path: Path, make: Make) -> None:
    done, out, _, folder = make(*seeds(tmp_path))
    names = {path.name for path in folder.iterdir()}
    (folder / "logs").mkdir()
    for left in ("logs/a.txt", "logs/a.jsonl", "final_model.pt", "final_model.int8.ptz"):
        (folder / left).touch()
    (tmp_path / ".gitignore").write_bytes((ROOT / ".gitignore").read_bytes())
    command = re.search(r"then: (git add .*)", out)[1].split()
    for words in (["git", "init", "-q"], command, ["git", "ls-files", str(folder)]):
        said = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert {Path(name).name for name in said.stdout.splitlines()} == names


def test_the_rooms_readme_names_each_rule() -> None:
    text = (ROOT / "records" / "check.py").read_text()
    rules = set(
        re.findall(r'add\(\s*(?:"\w+"|level|report\.severe|[^,()]+ else "\w+"),\s*"(\w+)"', text)
    )
    readme = (ROOT / "records" / "README.md").read_text()
    assert len(rules) > 8 and not [rule for rule in rules if f"`{rule}`" not in readme]
