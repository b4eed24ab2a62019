"""tools/package.py makes a folder that check.py accepts from logs, and packs scripts."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import check
import package
import pytest
from check import OPEN_TRACK, RECORD_TRACK
from made_logs import ARTIFACT, NAME, RULE, SCRIPT, event_lines, record_log
from packed import comparable_form, packed_form, unpack_script
from running import ROOT, SMALL_MODEL, Call, byte_data, clean_environment, run_trainer

Make = Callable[..., tuple[int, str, str, Path]]
NATS = {1: 1.9, 42: 1.901, 1337: 1.9005}
BY_HAND = "--name|Wider MLP|--author|Ada|--github-id|ada|--description|Wider.|--date|2026-04-01"


@pytest.fixture
def make(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return a function that calls package.py with logs and returns exit code, output, errors, and
    the path of the folder to be made."""
    records = tmp_path / "records"
    records.mkdir()
    monkeypatch.setattr(package, "RECORDS", records)

    def run(*arguments: object, track: str = RECORD_TRACK) -> tuple[int, str, str, Path]:
        words = ["--track", track, *BY_HAND.split("|"), *arguments]
        return *call(package.main, *words), records / track / NAME

    return run


def seed_logs(tmp_path: Path, **changed: Any) -> list[Path]:
    """Write logs of three seeds on 8 H100s, with the names that runs give them."""
    values = {seed: {"seed": seed, "nats": nats} for seed, nats in NATS.items()}
    texts = {tmp_path / f"run{seed}.txt": record_log(**values[seed] | changed) for seed in values}
    for path, text in texts.items():
        path.write_text(text)
    return [*texts]


def test_a_record_is_complete_and_accepted(tmp_path: Path, make: Make) -> None:
    logs = seed_logs(tmp_path)
    done, out, err, folder = make(*logs)
    assert (done, err) == (0, "") and f"made {folder}" in out
    names = ["train_seed1.log", "train_seed42.log", "train_seed1337.log"]
    assert {path.name for path in folder.glob("*.log")} == {*names}
    assert [(folder / name).read_bytes() for name in names] == [log.read_bytes() for log in logs]
    assert (folder / "train_gpt.py").read_text() == SCRIPT
    assert [path.name for path in folder.parent.parent.iterdir()] == [RECORD_TRACK], (
        "no other folder is left"
    )
    readme = (folder / "README.md").read_text()
    assert "TODO: the log does not contain all settings" in readme
    (folder / "README.md").write_text(readme.replace(check.TODO, "Done: "))
    report = check.check_folder(folder)
    assert report.findings == []
    found = json.loads((folder / "submission.json").read_text())
    results = found.pop("seed_results")
    assert {int(seed): values["val_loss"] for seed, values in results.items()} == NATS
    assert results["1"]["last_step"] == 13_790 and results["1"]["model_bytes"] == ARTIFACT
    assert found == {
        "author": "Ada", "github_id": "ada", "name": "Wider MLP", "blurb": "Wider.",
        "date": "2026-04-01", "track": "10min_16mb", "seeds": [1, 42, 1337],
        "val_loss": 1.9005, "val_bpb": pytest.approx(1.12558, abs=1e-5),
        "bytes_total": ARTIFACT + len(SCRIPT), "bytes_code": len(SCRIPT),
    }  # fmt: skip


def test_the_script_is_that_of_the_logs_or_of_an_option(tmp_path: Path, make: Make) -> None:
    logs, script = seed_logs(tmp_path), tmp_path / "mine.py"
    for path in logs:
        path.write_text(path.read_text().split(f"{RULE}\n", 1)[1])
    assert "--script FILE" in make(*logs)[2]
    script.write_text(SCRIPT)
    done, _, _, folder = make(*logs, "--script", script)
    assert done == 0 and (folder / "train_gpt.py").read_text() == SCRIPT


VERSIONS = f"{RULE}\nRunning Python 3.12.3\n{RULE}\n"
# {words of the error: a change of the third log}
REFUSED = {
    ": unfinished; give the log of a finished run": lambda text: text.split("Serialized model i")[
        0
    ],
    "its seed is not known; run it with another SEED": lambda text: text.replace("seed:1337\n", ""),
    "not a training log": lambda text: "",
    "another log has the same seed 1; run it with": lambda text: text.replace(
        "seed:1337\n", "seed:1\n"
    ),
}


@pytest.mark.parametrize("expected", REFUSED)
def test_logs_that_cannot_be_packaged(expected: str, tmp_path: Path, make: Make) -> None:
    logs, wrong = seed_logs(tmp_path), REFUSED[expected]
    logs[2].write_text(wrong(logs[2].read_text()))
    done, out, err, _ = make(*logs)
    assert (done, out) == (1, "") and expected in err and err.count("\n") == 1
    assert [*(tmp_path / "records").iterdir()] == []


def test_a_folder_that_check_refuses_is_not_made(tmp_path: Path, make: Make) -> None:
    """The run was resumed with another script."""
    log = seed_logs(tmp_path)[0]
    last = "step:13790/20000 train"
    log.write_text(log.read_text().replace(last, f"{SCRIPT}x = 1\n{VERSIONS}{last}"))
    done, out, err, folder = make(log)
    assert done == 1 and "refused      the run was resumed with another script" in out
    assert f"{folder} was not made; the reasons are above" in err and not folder.exists()


def test_the_readme_has_the_settings_that_were_given(tmp_path: Path, make: Make) -> None:
    logs = seed_logs(tmp_path)
    events = event_lines(1, given={"MLP_MULT": "3", "NAMES": "a b"})
    logs[0].with_suffix(".jsonl").write_text(events)
    readme = (make(*logs)[3] / "README.md").read_text()
    assert "  MLP_MULT=3 \\\n  NAMES='a b' \\\n  torchrun " in readme
    assert "does not contain all settings" not in readme


def test_the_readme_has_the_changes_of_the_script(
    tmp_path: Path, make: Make, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a long diff, the README says its size and the command that prints it."""
    trainer, logs = tmp_path / "trainer.py", seed_logs(tmp_path)
    monkeypatch.setattr(package, "TRAINER", trainer)
    trainer.write_text(SCRIPT.replace("import os\n", ""))
    folder = make(*logs)[3]
    readme = (folder / "README.md").read_text()
    assert "\n````diff\n--- train_gpt.py\n+++ the record\n" in readme
    assert '"""A trainer."""\n+import os\n import torch\n' in readme
    trainer.write_text("".join(f"x{n} = {n}\n" for n in range(500)))
    shutil.rmtree(folder)
    readme = (make(*logs)[3] / "README.md").read_text()
    pattern = r"The diff has (\d+) lines; .* run `python3 tools/package.py (.*)`"
    match = re.search(pattern, readme)
    code, out, _ = call(package.main, *match[2].split())
    assert code == 0 and out.count("\n") == int(match[1]) and out.endswith("+main()\n")
    packed = tmp_path / "packed.py"
    script = "import y\n" + trainer.read_text().replace("x7 = 7", "x7 = 7  # seven")
    packed.write_bytes(package.pack(script.encode()))
    lines = call(package.main, "--diff", packed)[1].splitlines()
    assert [line for line in lines[2:] if line[0] in "+-"] == ["+import y"]


def test_no_folder_is_overwritten_or_half_written(tmp_path: Path, make: Make) -> None:
    logs = seed_logs(tmp_path)
    full = OSError(28, "No space left on device")
    with mock.patch.object(package.os, "rename", side_effect=full):
        done, _, err, folder = make(*logs)
    assert done == 1 and "No space left on device" in err and not folder.exists()
    make(*logs)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    done, _, err, _ = make(*logs[:2])
    assert done == 1 and f"{folder} exists already; remove it, or give another --name" in err
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_the_packed_script_is_the_same_run(ranks: int, tmp_path: Path, make: Make) -> None:
    """The runs are equal to the last digit. The log of the packed script contains its text and
    size. The log becomes a record whose README has a command that runs the script again."""
    data = byte_data(tmp_path / "data" / "datasets" / "small set")
    data["TOKENIZER_PATH"] = byte_data(tmp_path / "data" / "tokenizers")["TOKENIZER_PATH"]
    small = SMALL_MODEL | data | {"ITERATIONS": 4, "VAL_LOSS_EVERY": 2, "SEED": 2}
    script, packed = tmp_path / "train_gpt.py", tmp_path / "train_gpt_packed.py"
    script.write_bytes((ROOT / "train_gpt.py").read_bytes())
    assert package.main(["--pack", str(script)]) == 0
    assert packed.stat().st_size < script.stat().st_size / 2
    runs = [
        run_trainer(tmp_path / x.stem, script=x, ranks=ranks, **small) for x in (script, packed)
    ]
    assert [run.code for run in runs] == [0, 0], runs[1].err
    for word in ("train_loss", "val_loss", "val_bpb", "data_crc"):
        assert len(runs[0].values(word)) > 2 and runs[0].values(word) == runs[1].values(word)
    assert f"Code size: {packed.stat().st_size} bytes" in runs[1].text
    made, out, err, folder = make(runs[1].log_path, track=OPEN_TRACK)
    assert (made, err) == (0, ""), out
    assert (folder / "train_gpt.py").read_bytes() == packed.read_bytes()
    assert unpack_script(packed.read_bytes()) == comparable_form(script.read_bytes())
    lines = re.search(r"```bash\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[1]
    lines = lines.replace("python3", sys.executable)
    lines = lines.replace("torchrun", f"{sys.executable} -m torch.distributed.run")
    again = subprocess.run(["bash", "-c", lines], cwd=folder, env=clean_environment())
    text = (folder / "logs" / "seed2.txt").read_text()
    scores = [re.findall(r"_exact (val_loss:.*)", one) for one in (text, runs[1].text)]
    assert again.returncode == 0 and scores[0] and scores[0] == scores[1]


# A script, and the same script without comments.
WHOLE = '''"""Doc."""
import os  # the system


def f(x, y=(1,  # one
            2)):
    """Of two lines."""
    text = """# kept

    """
    return f"{text}#{y}"; "nor this"
'''
LEFT = """import os
def f(x, y=(1, 2)):
    text = '# kept\\n\\n    '
    return f'{text}#{y}'
    'nor this'
"""


def test_comments_and_docstrings_are_left_out(tmp_path: Path, call: Call) -> None:
    """A file that is not a packed script is not overwritten."""
    path, packed = tmp_path / "a.py", tmp_path / "a_packed.py"
    path.write_text(WHOLE)
    packed.write_text("mine")
    code, _, err = call(package.main, "--pack", path)
    assert code == 1 and "move it away" in err and packed.read_text() == "mine"
    packed.unlink()
    code, out, _ = call(package.main, "--pack", path)
    size = packed.stat().st_size
    assert code == 0 and out.endswith(f"became {size:,}, without comments and docstrings\n")
    assert unpack_script(packed.read_bytes()).decode() == LEFT
    code, _, err = call(package.main, "--pack", packed)
    assert code == 1 and "it is packed already" in err and err.count("\n") == 1


def test_the_packed_script_shows_its_readable_lines(tmp_path: Path) -> None:
    """A traceback shows the line that fails; inspect.getsource and torch.compile find lines,
    too."""
    path = tmp_path / "train_gpt.py"
    fails = b"try:\n    import traceback\n    1 / 0\nexcept Exception:\n    traceback.print_exc()\n"
    path.write_bytes(packed_form(fails))
    done = subprocess.run([sys.executable, path], capture_output=True, text=True)
    assert f'{path}", line 3, in <module>\n    1 / 0\n' in done.stderr
