"""records/package.py: from logs to a folder that check.py accepts; the packed form of a script."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import check
import conftest
import package
import pytest
from conftest import ARTIFACT, NAME, ROOT, RULE, SCRIPT, Call, byte_data, record_log, run_trainer
from findings import CODES, OPEN, RECORD
from packed import packed_form
from script import pack

Make = Callable[..., tuple[int, str, str, Path]]
BY_HAND = "--name|Wider MLP|--author|Ada|--github-id|ada|--description|Wider.|--date|2026-04-01"


@pytest.fixture
def make(tmp_path: Path, call: Call) -> Make:
    """package.py, called with logs: exit code, output, errors, and the folder that was to be."""

    def run(*arguments: object, track: str = RECORD) -> tuple[int, str, str, Path]:
        records = tmp_path / "records"
        words = ["--track", track, *BY_HAND.split("|"), "--records", records, *arguments]
        return *call(package.main, *words), records / track / NAME

    return run


def seeds(tmp_path: Path, **changed: object) -> list[Path]:
    """Logs of three seeds on 8 H100s under the names that a run gives them."""
    values = {seed: {"seed": seed, "nats": 1.9 + seed * 1e-5} for seed in (1, 42, 1337)}
    texts = {tmp_path / f"run{seed}.txt": record_log(**values[seed] | changed) for seed in values}
    for path, text in texts.items():
        path.write_text(text)
    return [*texts]


def test_a_record_is_made_whole_and_accepted(tmp_path: Path, make: Make) -> None:
    logs = seeds(tmp_path)
    done, out, err, folder = make(*logs, logs[0])
    assert (done, err) == (0, "") and f"made {folder}" in out
    names = ["train_seed1.log", "train_seed42.log", "train_seed1337.log"]
    assert {path.name for path in folder.glob("*.log")} == {*names}
    assert [(folder / name).read_bytes() for name in names] == [log.read_bytes() for log in logs]
    assert (folder / "train_gpt.py").read_text() == SCRIPT
    assert [path.name for path in folder.parent.iterdir()] == [NAME], "nothing temporary stays"
    readme = (folder / "README.md").read_text()
    row = "| train_seed42.log | 42 | 13,790 | 599.9 | 2.1 | 1.90042000 | "
    assert row in readme and "--nproc_per_node=8 train_gpt.py" in readme
    (folder / "README.md").write_text(readme.replace(package.TODO, "Done: "))
    assert check.check_folder(folder).verdict == "accepted"
    found = json.loads((folder / "submission.json").read_text())
    results = found.pop("seed_results")
    losses = {"1": 1.90001, "42": 1.90042, "1337": 1.91337}
    assert {seed: values["val_loss"] for seed, values in results.items()} == losses
    assert results["1"]["steps"] == 13_790 and results["1"]["artifact_bytes"] == ARTIFACT
    assert found == {
        "author": "Ada", "github_id": "ada", "name": "Wider MLP", "blurb": "Wider.",
        "date": "2026-04-01", "track": "10min_16mb", "seeds": [1, 42, 1337],
        "val_loss": pytest.approx(sum(losses.values()) / 3, abs=1e-8),
        "val_loss_std": pytest.approx(0.00759, abs=1e-5),
        "val_bpb": pytest.approx(1.12801, abs=1e-5),
        "val_bpb_std": pytest.approx(0.0045, abs=1e-4),
        "bytes_total": ARTIFACT + len(SCRIPT), "bytes_code": len(SCRIPT),
        "hardware": "8x NVIDIA H100 80GB HBM3", "pytorch_version": "2.9.1+cu128",
    }  # fmt: skip


def test_the_script_of_the_logs_or_the_one_named(tmp_path: Path, make: Make) -> None:
    """Another one in a log is refused by line; --script ships one, which check.py judges: what it
    refuses is not made."""
    logs = seeds(tmp_path)
    logs[2].write_text(record_log(seed=1337, script=SCRIPT.replace("(torch, os)", "(torch)")))
    done, _, err, folder = make(*logs)
    assert done == 1 and not folder.exists()
    assert f"{logs[2]}: not the script of {logs[0]}: line 7 is 'print(torch)', not" in err
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT + "# more\n")
    done, out, err, folder = make(*logs, "--script", script)
    assert done == 1 and re.search(r"\n  refused .*another script: line 11.* \[R601\]\n", out)
    assert "was not made" in err and not folder.parent.exists(), "no trace of it is left"
    silent = [record_log(seed=seed).split(f"{RULE}\n", 1)[1] for seed in (1, 42, 1337)]
    for path, text in zip(logs, silent, strict=True):
        path.write_text(text)
    assert "--script FILE" in make(*logs)[2]
    script.write_text(SCRIPT)
    done, _, _, folder = make(*logs, "--script", script)
    assert done == 0 and (folder / "train_gpt.py").read_text() == SCRIPT


def test_a_packed_script_ships_what_its_logs_hold_readable(tmp_path: Path, make: Make) -> None:
    """bytes_total is of what is shipped: with the readable form it would be too large."""
    long, model = SCRIPT + "".join(f"x{i} = {i}\n" for i in range(500)), 15_996_000
    logs = seeds(tmp_path, script=long, artifact=model, code=5, total=model + 5)
    done, _, err, folder = make(*logs)
    assert done == 1 and "package.py --pack train_gpt.py, and ship it: --script" in err
    assert f"{model + len(long):,} bytes" in err and not folder.exists()
    packed = tmp_path / "packed.py"
    packed.write_bytes(pack(long.encode()))
    done, out, _, folder = make(*logs, "--script", packed)
    assert done == 0 and ": warned (1 warned)" in out, out
    submitted = json.loads((folder / "submission.json").read_text())
    assert submitted["bytes_total"] == model + packed.stat().st_size


# A change of the third log, or an option: the exit code and the words.
REFUSED = {
    "1 ends before the result": lambda text: text.split("Serialized model int8")[0],
    "1 does not say its seed": lambda text: text.replace("seed:1337\n", ""),
    "1 no run in it": lambda text: "",
    "1 run it with another SEED, or leave": lambda text: text.replace("seed:1337\n", "seed:1\n"),
    "1 matrix_lr (0.04": lambda text: text.replace("lr:0.04", "lr:9"),
    "2 --date 2026-4-1: YYYY-MM-DD is expected": ("--date", "2026-4-1"),
    "2 letters or digits are needed": ("--name", "?!"),
    "2 track_10min_16mb or track_non_record_16mb": ("--track", "fast"),
    "2 --author is needed": ("--author", " "),
    "2 write the login alone, such as ada": ("--github-id", "https://github.com/ada"),
    "2 a track's folder: name the one that holds it": ("--records", "records/track_10min_16mb"),
}


@pytest.mark.parametrize("expected", REFUSED)
def test_what_cannot_be_packaged(expected: str, tmp_path: Path, make: Make) -> None:
    logs, wrong = seeds(tmp_path), REFUSED[expected]
    if callable(wrong):
        logs[2].write_text(wrong(logs[2].read_text()))
    done, out, err, _ = make(*logs, *(() if callable(wrong) else wrong))
    assert (done, out) == (int(expected[0]), "") and expected[2:] in err and err.count("\n") == 1
    assert not (tmp_path / "records").exists()


def test_no_folder_is_overwritten_or_half_written(tmp_path: Path, make: Make) -> None:
    logs = seeds(tmp_path)
    full = OSError(28, "No space left on device")
    with mock.patch.object(package.os, "rename", side_effect=full):
        done, _, err, folder = make(*logs)
    assert done == 1 and "No space left on device" in err and not (tmp_path / "records").exists()
    make(*logs)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    done, _, err, _ = make(*logs[:2])
    assert done == 1 and f"{folder}: exists: remove it, or give another --name" in err
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_folder_names() -> None:
    names = {"Overlap Ablation": "OverlapAblation", "10L_Int5": "10L_Int5", "a über/../b": "AUberB"}
    assert {name: package.slug(name) for name in names} == names


def test_arms_of_a_study(tmp_path: Path, make: Make) -> None:
    """The first log's configuration is submitted, the other is named after what differs."""
    other = tmp_path / "other.txt"
    other.write_text(record_log(seed=1, nats=1.95, matrix_lr=0.03))
    done, out, err, folder = make(*seeds(tmp_path), other, track=OPEN)
    assert (done, err) == (0, ""), out
    assert (folder / "train_matrix_lr0.03_seed1.log").read_bytes() == other.read_bytes()
    assert json.loads((folder / "submission.json").read_text())["seeds"] == [1, 42, 1337]


def test_the_command_holds_the_scripts_own_settings(tmp_path: Path, make: Make) -> None:
    """Those that it takes from its environment and that are not its defaults, quoted; a value that
    the script cannot take is left out and becomes a TODO."""
    script = SCRIPT + (
        'lr = float(os.environ.get("MATRIX_LR", 0.02))\n'
        'length = int(os.environ.get("TRAIN_SEQ_LEN", "1024"))\n'
        'path = os.environ.get("DATA_PATH", "./data")\n'
        'text = os.getenv("DATASET_NOTE", "none")\n'
        'both = bool(int(os.environ.get("PARALLEL_RESIDUAL", "1")))\n'
        'other = int(os.environ.get("RECUR_LAYERS", 3))\n'
    )
    logs = seeds(tmp_path, script=script)
    for log in logs:
        words = "dataset_note:a;b parallel_residual:active=1"
        log.write_text(log.read_text().replace("tie_embeddings:True", words))
    readme = (make(*logs)[3] / "README.md").read_text()
    command = re.search(r"```bash\n(.*?)```", readme, re.DOTALL)[1].split(" \\\n  ")
    data = "DATA_PATH=../../../data/datasets/fineweb10B_sp1024"
    assert sorted(command[1:-1]) == ["DATASET_NOTE='a;b'", data, "MATRIX_LR=0.04"]
    assert "TODO: PARALLEL_RESIDUAL is left out above: the log says 'active=1', which" in readme
    assert "do not say RECUR_LAYERS: the script's defaults" in readme
    assert "data_crc: not in the logs" in readme


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_the_packed_script_is_the_same_run(ranks: int, tmp_path: Path, make: Make) -> None:
    """To the digit; its log holds it and its size. It becomes a record, and that record's README
    has the command which, as it stands, runs it again."""
    data = byte_data(tmp_path / "data" / "datasets" / "small")
    data["TOKENIZER_PATH"] = byte_data(tmp_path / "data" / "tokenizers")["TOKENIZER_PATH"]
    small = conftest.SMALL_MODEL | data | {"ITERATIONS": 4, "VAL_LOSS_EVERY": 2}
    script, packed = tmp_path / "train_gpt.py", tmp_path / "train_gpt_packed.py"
    script.write_bytes((ROOT / "train_gpt.py").read_bytes())
    assert package.main(["--pack", str(script)]) == 0
    assert packed.stat().st_size < script.stat().st_size / 2
    runs = [
        run_trainer(tmp_path / one.stem, script=one, ranks=ranks, SEED=2, TRAIN_PREFETCH=0, **small)
        for one in (script, packed)
    ]
    assert [run.code for run in runs] == [0, 0], runs[1].err
    for word in ("train_loss", "val_loss", "val_bpb", "data_crc"):
        assert len(runs[0].values(word)) > 2 and runs[0].values(word) == runs[1].values(word)
    assert f"Code size: {packed.stat().st_size} bytes" in runs[1].text
    made, out, err, folder = make(runs[1].log_path, track=OPEN)
    assert (made, err) == (0, ""), out
    assert (folder / "train_gpt.py").read_bytes() == packed.read_bytes()
    assert package.main(["--unpack", str(packed), "--output", str(tmp_path / "back.py")]) == 0
    assert (tmp_path / "back.py").read_bytes() == script.read_bytes()
    lines = re.search(r"```bash\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[1]
    given = ["NUM_LAYERS=2", "TRAIN_SEQ_LEN=32", "VOCAB_SIZE=260", "DEVICE=cpu", "TRAIN_PREFETCH=0"]
    assert not [setting for setting in (*given, "for seed in 2; do") if setting not in lines]
    assert "LOGIT_SOFTCAP" not in lines, "defaults are not repeated"
    lines = lines.replace("python3", sys.executable)
    lines = lines.replace("torchrun", f"{sys.executable} -m torch.distributed.run")
    again = subprocess.run(["bash", "-c", lines], cwd=folder, env=conftest.clean_environment())
    last = (folder / "logs" / "seed2.txt").read_text().splitlines()[-1]
    assert again.returncode == 0 and last.startswith("final_int8_zlib_roundtrip_exact")
    assert last == runs[1].text.splitlines()[-1]
    assert check.check_folder(folder).verdict == "warned", "for its TODO alone"


@pytest.mark.slow
def test_the_packed_script_shows_its_readable_lines(tmp_path: Path) -> None:
    """--help reads the source of Config; a traceback, the line that fails."""
    text, path = (ROOT / "train_gpt.py").read_bytes(), tmp_path / "train_gpt.py"
    shown = []
    for form in (text, pack(text)):
        path.write_bytes(form)
        shown.append(run_trainer(tmp_path, script=path, args=("--help",)).out)
    assert shown[0] == shown[1] and "class Config" in shown[0]
    fails = b"try:\n    import traceback\n    1 / 0\nexcept Exception:\n    traceback.print_exc()\n"
    path.write_bytes(pack(fails))
    assert f'{path}", line 3, in <module>\n    1 / 0\n' in run_trainer(tmp_path, script=path).err


UNPACKABLE = {
    b"def f(:\n": "does not compile: line 1",
    b"x = 1\n\n" + b"=" * 100 + b"\nPython 3.11\n": "a log of a run: name the script",
    b"x = '\xff'\n": "byte 5 is not UTF-8",
    packed_form(b"import os\n" * 500): "packed already",
}


@pytest.mark.parametrize("text", UNPACKABLE)
def test_what_is_not_packed(text: bytes, tmp_path: Path, call: Call) -> None:
    path = tmp_path / "a.py"
    path.write_bytes(text)
    done, _, err = call(package.main, "--pack", path)
    assert done == 1 and UNPACKABLE[text] in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [path]
    path.write_text("x = 1\n")
    (tmp_path / "a_packed.py").write_text("mine\n")
    done, _, err = call(package.main, "--pack", path)
    assert done == 1 and "name another --output" in err
    assert (tmp_path / "a_packed.py").read_text() == "mine\n", "files of others are kept"
    done, _, err = call(package.main, "--pack", path, "--output", tmp_path)
    assert (done, err) == (1, f"error: {tmp_path}: not a file: name another --output FILE\n")


def test_the_tools_run_as_commands(tmp_path: Path) -> None:
    words = [*seeds(tmp_path), "--track", RECORD, *BY_HAND.split("|"), "--records", tmp_path]
    folder = tmp_path / RECORD / NAME
    for tool, arguments in (("package.py", words), ("check.py", [folder])):
        command = [sys.executable, ROOT / "records" / tool, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
        assert done.returncode == 0 and ": warned (1 warned)" in done.stdout, done.stderr
    # git takes the record, and not what a run in it leaves.
    left = [f"records/{RECORD}/{NAME}/{name}" for name in ("logs/a.txt", "final_model.pt", "a.log")]
    command = ["git", "check-ignore", "--no-index", *left]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == left[:2]


def test_the_rooms_readme_names_each_group_of_rules(call: Call) -> None:
    code, out, _ = call(check.main, "--rules")
    codes = re.findall(r"^(R\d{3}) ", out, re.MULTILINE)
    readme = (ROOT / "records" / "README.md").read_text()
    assert code == 0 and codes == list(CODES) and "check.py --rules" in readme
    assert not [name for name in codes if f"`{name[:2]}..`" not in readme]
