"""Tests of quickstart.py: its data, the precedence of settings, its output, its end."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import cli
import dataset
import numpy as np
import pytest
import quickstart
import tokenize_docs
from running import ROOT, clean_environment, start_process, write_split

# A stand-in for train_gpt.py that runs in less than a second. It writes the log that the trainer
# would write, and its own environment.
STAND_IN = """
import json, os, signal, subprocess, sys, time
run_id = os.environ["RUN_ID"]
os.makedirs("logs", exist_ok=True)
open(f"logs/{run_id}.txt", "a").close()
log = open(f"logs/{run_id}.jsonl", "a", buffering=1)
def event(name, **values):
    print(json.dumps({"event": name, **values}), file=log)
event("config", iterations=1, mlp_mult=2, run_id=run_id, data_path="", resume="")
os.environ["ARGUMENTS"] = " ".join(sys.argv[1:])
json.dump(dict(os.environ), open(f"{run_id}.env", "w"))
if os.environ["ITERATIONS"] == "8":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        print("ready", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        event("end", status="interrupted")
        sys.exit(130)
print("attention_mode:gqa num_heads:4 num_kv_heads:2\\nWARNING: read this")
print("peak memory allocated: 0 MiB reserved: 0 MiB\\npeak memory allocated: 7 MiB")
event("validation", step=0, val_bpb=4.5)
event("artifact", artifact_bytes=1000, code_bytes=234)
event("score", val_bpb=2.25)
event("end", status="finished")
print("the last line has no end", end="")
if "KEEP_PIPE_OPEN" in os.environ:
    subprocess.Popen(["sleep", "20"])
"""
SAMPLE = "import sys; print(f'sampled {sys.argv[1:]}')"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of data/, with stand-ins for the trainer and for sample.py."""
    root = tmp_path_factory.mktemp("a clone")
    (root / "data").mkdir()
    for path in (ROOT / "data").glob("*.py"):
        shutil.copy(path, root / "data")
    (root / "train_gpt.py").write_text(STAND_IN)
    (root / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "cli.py", root / "tools")
    (root / "tools" / "sample.py").write_text(SAMPLE)
    return root


def start(checkout: Path, folder: Path, *arguments: str, **settings: object) -> subprocess.Popen:
    command = [sys.executable, checkout / "data" / "quickstart.py", *arguments]
    return start_process(command, cwd=folder, env=clean_environment(**settings))


def run(checkout: Path, folder: Path, *arguments: str, code: int = 0, **settings: object) -> str:
    """Run quickstart.py; return stdout and stderr, joined. Asserts the exit code."""
    process = start(checkout, folder, *arguments, **settings)
    out, err = process.communicate(timeout=200)
    assert process.returncode == code, out + err
    return out + err


def read_environment(folder: Path, run_id: str) -> dict[str, str]:
    """Return the environment that the stand-in for the trainer has written."""
    return json.loads((folder / f"{run_id}.env").read_text())


@pytest.fixture(scope="module")
def user_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data set that tokenize_docs.py made of a text of the user."""
    out = tmp_path_factory.mktemp("user")
    (out / "novel.txt").write_text("\n\n".join(f"Paragraph {i}." for i in range(99)))
    words = [str(out / "novel.txt"), "--out", str(out), "--bytes", "--name", "novel"]
    return tokenize_docs.make_data_set(tokenize_docs.parse_arguments(words))[0].folder


@pytest.mark.slow
def test_the_data_set_is_made_once_of_pythons_sources(checkout: Path, tmp_path: Path) -> None:
    output = run(checkout, tmp_path, "--prepare-only")
    assert "making the data" in output
    folder = checkout / "data" / "datasets" / "quickstart_sp1024"
    state = json.loads((folder / "export.json").read_text())
    val, train = (tokenize_docs.count_tokens(state, split) for split in ("val", "train"))
    assert 75_000 < val < 125_000 and train > 1_000_000
    lines = (checkout / "data" / "datasets" / "quickstart.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    assert len(texts) == len(set(texts)) == state["docs"]["val"] + state["docs"]["train"]
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert "making the data" not in run(checkout, tmp_path, "--prepare-only")
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_the_validation_split_depends_only_on_the_names_of_files() -> None:
    """If a file changes, no other file moves to the other split."""
    splits = []
    for word in ("old", "new"):
        names = {f"{word} {i} " * 7000: f"module{i}.py" for i in range(100)}
        val, train = quickstart.split_documents(names)
        splits.append([[names[text] for text in part] for part in (val, train)])
    assert splits[0] == splits[1] and len(splits[0][0]) > 3


def test_another_data_set_of_the_same_name_is_not_replaced(checkout: Path, tmp_path: Path) -> None:
    """A user may have made it with --name quickstart."""
    without_data = shutil.ignore_patterns("datasets", "tokenizers")
    clone = shutil.copytree(checkout, tmp_path / "clone", ignore=without_data)
    folder = clone / "data" / "datasets" / "quickstart_sp1024"
    shard = folder / "fineweb_train_000000.bin"
    folder.mkdir(parents=True)
    shard.write_bytes(b"mine")
    output = run(clone, tmp_path, "--prepare-only", code=2)
    assert f"{folder}: was not made by quickstart.py; move it and " in output
    assert shard.read_bytes() == b"mine"


def test_the_users_settings_take_precedence_and_run_ids_are_new(
    checkout: Path, user_data, tmp_path
) -> None:
    data = {"DATA_PATH": user_data}
    assert "making the data" not in run(checkout, tmp_path, **data)
    first = read_environment(tmp_path, "quickstart")
    assert first["DATA_PATH"] == str(user_data) and first["VOCAB_SIZE"] == "260"
    assert first["TOKENIZER_PATH"] == f"{user_data.parents[1]}/tokenizers/novel_byte260.json"
    assert first["ITERATIONS"] == "500" and first["WARMDOWN_ITERS"] == "400"
    assert first["OMP_NUM_THREADS"] == "1"  # set by the test
    run(checkout, tmp_path, ITERATIONS=30, SEED=7, MLP_MULT=4, **data)
    second = read_environment(tmp_path, "quickstart-2")
    assert second["WARMDOWN_ITERS"] == "24" and second["SEED"] == "7" and second["MLP_MULT"] == "4"
    words = ["RUN_ID=mine", "WARMDOWN_ITERS=3", f"DATA_PATH={user_data}\r"]
    run(checkout, tmp_path, *words, WARMDOWN_ITERS=4, DATA_PATH="elsewhere", ITERATIONS="500\r")
    mine = read_environment(tmp_path, "mine")
    assert mine["WARMDOWN_ITERS"] == "3" and mine["DATA_PATH"] == str(user_data)
    assert mine["ARGUMENTS"] == " ".join(words), "train_gpt.py checks the names of settings"
    assert mine["ITERATIONS"] == "500", "a value of a file with Windows line ends"
    assert "novel: is not a setting; settings have the form NAME=value" in run(
        checkout, tmp_path, "novel", code=2
    )


def test_the_printed_command_can_be_pasted(checkout: Path, user_data: Path, tmp_path: Path) -> None:
    data = (
        shutil.copytree(user_data.parents[1], tmp_path / "it's mine") / "datasets" / user_data.name
    )
    (tmp_path / "mine.py").write_text(STAND_IN)
    settings = {"DATA_PATH": data, "MLP_MULT": 3, "SECRET": "x"}
    output = run(checkout, tmp_path, "--script", "mine.py", **settings).splitlines()
    # The prompt is the beginning of a validation document.
    assert "    sampled ['logs/quickstart.jsonl', '--prompt', 'Paragraph 0.']" in output
    assert "bits per byte: 4.5000 before training, 2.2500 after training" in output
    assert (
        "artifact (the compressed model): 1,000 bytes, and 1,234 bytes with the script; "
        "the challenge's size limit is 16,000,000 bytes"
    ) in output
    assert output[-2] == "log: logs/quickstart.jsonl"
    command = output[-1].removeprefix("to train longer: ")
    assert command.endswith("--script mine.py")
    assert "SECRET" not in command and "RUN_ID" not in command
    done = subprocess.run(command, shell=True, cwd=tmp_path, env=clean_environment())
    assert done.returncode == 0
    second = read_environment(tmp_path, "quickstart-2")
    assert second["MLP_MULT"] == "3" and second["ITERATIONS"] == "2000"
    assert second["DATA_PATH"] == str(data)


def test_the_screen_explains_its_lines_and_leaves_some_to_the_log(
    checkout: Path, user_data: Path, tmp_path: Path
) -> None:
    """What says nothing on a CPU is not printed. What is printed is explained before it."""
    output = run(checkout, tmp_path, DATA_PATH=user_data, KEEP_PIPE_OPEN=1)
    assert "WARNING: read this\n" in output and "allocated: 7 MiB\n" in output
    assert "attention_mode" not in output and "allocated: 0 MiB" not in output
    assert "the last line has no end" in output
    explained = output.partition("WARNING: read this")[0]
    for word in ("val_bpb", "train_loss", "mean_loss", "tok_s", "input_wait", "data_crc", "eta"):
        assert word in explained
    assert "(logs/quickstart.txt contains more of them)" in explained


def test_the_estimate_of_validations_is_that_of_the_data_at_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training step of the default settings has 2,048 tokens."""
    monkeypatch.setattr(os, "environ", {"RUN_ID": "x"})
    for name, tokens, settings, words in (
        ("small", 20_000, {}, "there are 6 of them, .* scores 19,968 of 20,000 tokens .* 4 steps$"),
        ("large", 400_000, {}, "scores 399,872 of 400,000 .* 88 steps; VAL_TOKENS=95000"),
        ("huge", 4_000_000, {}, "879 steps; VAL_TOKENS=95000 would save most of that time"),
        ("part", 4_000_000, {"VAL_TOKENS": "95000"}, "scores 94,976 of 4,000,000 .* 21 steps$"),
        ("last", 400_000, {"VAL_LOSS_EVERY": "0"}, "there are 2 of them"),
        ("wrong", 20_000, {"ITERATIONS": "1e3"}, "^eta does not include validations$"),
    ):
        write_split(tmp_path / name, "val", np.zeros(tokens, int), [tokens // 3])
        given = {"DATA_PATH": str(tmp_path / name), **settings}
        environment = quickstart.training_environment(1, given)
        text = quickstart.describe_validations(environment)
        assert re.search(words, text), text
    (tmp_path / "large" / ".producing").touch()
    text = quickstart.describe_validations({**environment, "DATA_PATH": str(tmp_path / "large")})
    assert text == "eta does not include validations", "more validation shards may come"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_training_and_the_output_says_how_to_continue(
    checkout: Path, user_data: Path, tmp_path: Path, number: int
) -> None:
    """A terminal sends SIGINT to all processes. SIGTERM is usually sent to quickstart.py only."""
    process = start(checkout, tmp_path, DATA_PATH=user_data, ITERATIONS=8)
    assert "ready\n" in process.stdout, "the output ends without it"
    send = os.killpg if number == signal.SIGINT else os.kill
    send(process.pid, number)
    output = process.communicate(timeout=30)[1]
    assert process.returncode == 130
    command = output.splitlines()[-1].removeprefix("to continue: ")
    words = shlex.split(command)
    assert {"RUN_ID=quickstart", "RESUME=auto", "ITERATIONS=8"} < set(words)
    again = command.replace("ITERATIONS=8", "ITERATIONS=9")
    done = subprocess.run(again, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "RESUME" not in done.stdout.splitlines()[-1], "the printed command starts a new run"


def test_two_processes_get_different_run_ids(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [quickstart.reserve_run_id(), quickstart.reserve_run_id()] == [
        "quickstart",
        "quickstart-2",
    ]


def test_a_process_waits_while_another_makes_the_same_data_set(tmp_path: Path) -> None:
    def lock_again() -> None:
        with dataset.locked(tmp_path / "sets", wait=True):
            pass

    thread = threading.Thread(target=lock_again)
    with dataset.locked(tmp_path / "sets"):
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
    thread.join(30)
    assert not thread.is_alive()


PROGRAMS = [path for path in sorted((ROOT / "data").glob("*.py")) if path.stem != "dataset"]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_starts_without_its_folder_on_the_path(program: Path) -> None:
    """python3 -P does not put it there.

    With an old Python, the error message says which Python is needed.
    """
    code = "import runpy, sys; sys.argv = ['x', '--help']; sys.version_info = {}; "
    code += f"runpy.run_path({str(program)!r}, run_name='__main__')"
    for version, result in ((tuple(sys.version_info), 0), ((3, 9, 18), 1)):
        command = [sys.executable, "-P", "-c", code.format(version)]
        done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True)
        assert done.returncode == done.stderr.count("\n") == result, done.stderr
        assert "usage: " in done.stdout or done.stderr.endswith("use Python 3.10 or newer\n")


def test_the_number_of_threads_follows_from_the_usable_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {"RUN_ID": "x", "RESUME": "auto"})
    for cpus in (1, 5):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, cpus=cpus: {*range(cpus)})
        assert tokenize_docs.parse_arguments(["novel.txt"]).workers == cpus
        environment = quickstart.training_environment(1, {})
        assert environment["OMP_NUM_THREADS"] == str(min(2, cpus))


def test_the_tokenizer_of_a_copied_data_set_is_found_or_asked_for(
    user_data, tmp_path, monkeypatch
) -> None:
    copy, name = shutil.copytree(user_data, tmp_path / "copy"), "novel_byte260.json"
    monkeypatch.setattr(os, "environ", {"DATA_PATH": str(copy)})
    monkeypatch.setattr(dataset, "DATA", tmp_path)
    with pytest.raises(cli.ToolError, match=f"{name}; set TOKENIZER_PATH to where it is"):
        quickstart.find_data_settings()
    for folder in (copy, tmp_path / "tokenizers"):
        folder.mkdir(exist_ok=True)
        shutil.copy(user_data.parents[1] / "tokenizers" / name, folder)
        assert quickstart.find_data_settings()["TOKENIZER_PATH"] == str(folder / name)
    record = copy / "tokenizer.sha256"
    record.write_bytes(record.read_bytes().replace(b"\n", b"\r\n"))  # after an editor on Windows
    assert quickstart.find_data_settings()["TOKENIZER_PATH"] == str(folder / name)


@pytest.mark.slow
def test_the_real_trainer_learns_in_two_processes(user_data: Path, tmp_path: Path) -> None:
    short = {"ITERATIONS": 12, "VAL_TOKENS": 256, "VAL_BATCH_SIZE": 512, "TRAIN_SEQ_LEN": 64}
    settings = {**short, "NUM_LAYERS": 2, "MODEL_DIM": 32, "DATA_PATH": user_data}
    output = run(ROOT, tmp_path, "--ranks", "2", **settings).splitlines()
    line = next(line for line in output if line.startswith("bits per byte: "))
    before, after = (float(word) for word in line.split() if word[0].isdigit())
    assert after < before
    assert (tmp_path / "logs" / "quickstart.int8.ptz").exists()
