"""The offline corpus, its split and its reuse; the command that is printed;
the run from files to bits per byte."""

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from conftest import ROOT, heed_interrupts

sys.path.insert(0, str(ROOT / "data"))
import producer  # noqa: E402  (rooms are folders of scripts, not packages)
import quickstart  # noqa: E402
import tokenize_docs  # noqa: E402

pytestmark = pytest.mark.timeout(120)
RECIPE = quickstart.Recipe(
    vocab_size=350, shard_tokens=2000, val_bytes=4000, max_val_document_bytes=2000, min_bytes=10_000
)
NAME = "datasets/quickstart_sp350"


def write_library(folder: Path) -> Path:
    """A small standard library: 60 sources, of which some may not be used,
    and much that is no source."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 8))) for _ in range(200)]
    sources = {
        f"{'package/' * (number % 2)}module{number}.py": "".join(
            f"def {rng.choice(words)}():\n\treturn '{rng.choice(words)}  é{rng.choice(words)}'\n"
            for _ in range(rng.randint(5, 40))
        )
        for number in range(60)
    }
    sources |= {f"large{number}.py": f"large = {number}\n" * 400 for number in range(20)}
    for name in (
        "test/a.py",
        "package/tests/b.py",
        "site-packages/c.py",
        "lib2to3/d.py",
        "__pycache__/e.py",
        "f.txt",
    ):
        sources[name] = "forbidden = 1\n" * 20
    sources |= {"empty.py": "\n", "package/same.py": sources["module0.py"]}
    for name, text in sources.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture()
def library(tmp_path: Path) -> Path:
    return write_library(tmp_path / "library")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is made of the small library."""
    folder = tmp_path_factory.mktemp("built")
    assert quickstart.prepare(folder / "data", write_library(folder / "library"), RECIPE)
    return folder / "data"


def split_tokens(data: Path, split: str) -> np.ndarray:
    """A split's tokens; each shard's header and exact size are checked by hand."""
    tokens = []
    for path in sorted((data / NAME).glob(f"fineweb_{split}_*.bin")):
        content = path.read_bytes()
        assert np.frombuffer(content[:12], "<i4").tolist() == [
            20240520,
            1,
            (len(content) - 1024) // 2,
        ]
        assert not any(content[12:1024]) and len(content) % 2 == 0
        tokens.append(np.frombuffer(content[1024:], "<u2"))
    return np.concatenate(tokens)


def split_documents(data: Path, split: str) -> list[str]:
    """The documents of a split, decoded from its shards: each begins with BOS."""
    model = sentencepiece.SentencePieceProcessor(
        model_file=str(data / "tokenizers/quickstart_350_bpe.model")
    )
    tokens = split_tokens(data, split)
    starts = np.flatnonzero(tokens == 1)
    assert starts[0] == 0
    return [model.decode(part[1:].tolist()) for part in np.split(tokens, starts[1:])]


def snapshot(data: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(data)): path.read_bytes()
        for path in sorted(data.rglob("*"))
        if path.is_file()
    }


# === CORPUS =======================================================================================


def test_every_source_is_in_one_split(built: Path) -> None:
    val, train = split_documents(built, "val"), split_documents(built, "train")
    library = built.parent / "library"
    expected = {path.read_text(encoding="utf-8") for path in library.rglob("*.py")}
    expected = {text for text in expected if text.strip() and "forbidden" not in text}
    assert len(val) + len(train) == len(expected) and {*val} | {*train} == expected
    assert not {*val} & {*train}
    assert 4000 <= sum(len(text.encode()) for text in val) < 6000
    assert {path.read_text() for path in library.glob("large*.py")} <= {*train}
    lines = (built / NAME / "docs.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == val + train
    assert val != sorted(val) and train != sorted(train)


def test_shards_have_their_size(built: Path) -> None:
    sizes = [
        (path.stat().st_size - 1024) // 2
        for path in sorted((built / NAME).glob("fineweb_train_*.bin"))
    ]
    assert len(sizes) > 2 and {*sizes[:-1]} == {2000} and 0 < sizes[-1] <= 2000
    assert int(split_tokens(built, "train").max()) < 350


def test_the_tokenizer_has_not_seen_validation(tmp_path: Path, library: Path, built: Path) -> None:
    """A word in every document of one split becomes a piece
    only when that is the training split."""
    val = {*split_documents(built, "val")}
    found = {}
    for marked in ("val", "train"):
        for path in write_library(library).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if (text in val) == (
                marked == "val"
            ):  # the word is as long as what it replaces: the split stays
                path.write_text(text.replace("return", "qzqzqz"), encoding="utf-8")
        quickstart.prepare(tmp_path / "data", library, RECIPE)
        assert all(
            "qzqzqz" in text for text in split_documents(tmp_path / "data", marked) if "def" in text
        )
        model = sentencepiece.SentencePieceProcessor(
            model_file=str(tmp_path / "data/tokenizers/quickstart_350_bpe.model")
        )
        found[marked] = any("qz" in model.id_to_piece(index) for index in range(350))
    assert found == {"val": False, "train": True}


def test_two_builds_are_identical(tmp_path: Path, library: Path, built: Path) -> None:
    quickstart.prepare(tmp_path / "data", library, RECIPE, workers=3)
    assert snapshot(tmp_path / "data") == snapshot(built)
    names = [name for name in snapshot(built) if "fineweb_" not in name]
    check = ["sha256sum", "-c", "tokenizer.sha256"]
    assert subprocess.run(check, cwd=built / NAME, stdout=subprocess.DEVNULL).returncode == 0
    assert names == [
        f"{NAME}/docs.jsonl",
        f"{NAME}/quickstart.json",
        f"{NAME}/tokenizer.sha256",
        "tokenizers/quickstart_350_bpe.model",
    ]


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[1500] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: flip(data / NAME / "fineweb_train_000001.bin"),
        lambda data: os.truncate(data / NAME / "fineweb_val_000000.bin", 2000),
        lambda data: (data / NAME / "fineweb_train_000000.bin").unlink(),
        lambda data: shutil.copy(
            data / NAME / "fineweb_train_000000.bin", data / NAME / "fineweb_train_000099.bin"
        ),
        lambda data: flip(data / "tokenizers/quickstart_350_bpe.model"),
        lambda data: (data / "tokenizers/quickstart_350_bpe.model").unlink(),
        lambda data: (data / NAME / "quickstart.json").write_text('{"recipe": '),
        lambda data: (data / NAME / "quickstart.json").unlink(),
        lambda data: (data / NAME / "quickstart.json").write_text("[" * 100_000),
        lambda data: make_pipe(data / NAME / "quickstart.json"),
        lambda data: shutil.rmtree(data / NAME),
    ],
    ids=[
        "byte",
        "cut",
        "lost",
        "more",
        "tokenizer byte",
        "tokenizer lost",
        "stamp cut",
        "stamp lost",
        "stamp of deep JSON",
        "stamp a pipe",
        "all lost",
    ],
)
def test_what_is_whole_is_reused_and_what_is_not_is_built_again(
    tmp_path: Path, built: Path, damage: Callable[[Path], object]
) -> None:
    data = tmp_path / "data"
    shutil.copytree(built, data)
    library = built.parent / "library"
    assert quickstart.prepare(data, library, RECIPE) is False
    damage(data)
    assert quickstart.prepare(data, library, RECIPE) is True
    assert snapshot(data) == snapshot(built)
    assert quickstart.prepare(data, library, RECIPE) is False


def test_other_sources_or_another_recipe_build_again(tmp_path: Path, library: Path) -> None:
    data = tmp_path / "data"
    quickstart.prepare(data, library, RECIPE)
    (library / "module2.py").write_text("more = 1\n" * 30)
    assert quickstart.prepare(data, library, RECIPE) is True
    assert "more = 1\n" * 30 in split_documents(data, "train") + split_documents(data, "val")
    assert (
        quickstart.prepare(data, library, quickstart.Recipe(**{**vars(RECIPE), "seed": 2})) is True
    )


def test_a_build_that_fails_changes_nothing(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    quickstart.prepare(data, library, RECIPE)
    before = snapshot(data)
    (library / "module2.py").unlink()

    def fail(*arguments: object, **keywords: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(tokenize_docs, "export_documents", fail)
    with pytest.raises(OSError, match="disk full"):
        quickstart.prepare(data, library, RECIPE)
    assert snapshot(data) == before


def test_a_python_without_sources_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(quickstart, "ROOT", tmp_path)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "nowhere"))
    monkeypatch.setattr(sys, "argv", ["quickstart.py"])
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    assert quickstart.main() == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and sys.executable in error and "0 source files" in error
    assert error.count("\n") == 1


# === COMMAND ======================================================================================


def test_the_printed_command_gives_the_same_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pasted into a fresh shell, whatever the values hold."""
    root = tmp_path / "a folder; with 'quotes'"
    root.mkdir()
    monkeypatch.setattr(quickstart, "ROOT", root)
    user = {
        "RUN_ID": 'it\'s $HOME `x` \\ "y" *',
        "ITERATIONS": "600",
        "QK_GAIN_INIT": "2",
        "HOME": "/elsewhere",
    }
    environment = quickstart.launch_environment(2, 2.0, user)
    program = "import json, os; print(json.dumps([os.getcwd(), dict(os.environ)]))"
    line = quickstart.command_line(
        [sys.executable, "-c", program], environment, ["QK_GAIN_INIT", "RUN_ID"]
    )
    folder, seen = json.loads(
        subprocess.run(
            ["/bin/sh", "-c", line], env={}, check=True, capture_output=True, text=True
        ).stdout
    )
    chosen = {name: environment[name] for name in ("OMP_NUM_THREADS", "WARMDOWN_ITERS")}
    expected = {**quickstart.SETTINGS, **user, **chosen}
    del expected["HOME"]
    assert Path(folder) == root.resolve()
    assert {name: seen[name] for name in expected} == expected and "HOME" not in seen
    assert "\n" not in line and shlex.split(line)[:3] == ["cd", str(root), "&&"]


def test_a_script_is_named_by_the_way_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(ROOT / ".venv/bin/python"))
    monkeypatch.chdir(ROOT)
    assert producer.command_of("data/x.py") == ".venv/bin/python data/x.py"
    monkeypatch.chdir(tmp_path)
    assert producer.command_of("data/x.py") == shlex.join([sys.executable, f"{ROOT}/data/x.py"])


def test_without_a_validation_before_training_the_result_is_told_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, artifact = tmp_path / "log.txt", tmp_path / "final_model.int8.ptz"
    artifact.write_bytes(b"x")
    log.write_text("final_int8_zlib_roundtrip_exact val_loss:3.00000000 val_bpb:2.00000000\n")
    quickstart.report(log, artifact, "")
    out = capsys.readouterr().out
    assert out.startswith("bits per byte: 2.0000 after training\n")


def test_the_users_settings_go_first() -> None:
    environment = quickstart.launch_environment(1, 3.0, {"ITERATIONS": "7", "PATH": "/x"})
    more = {"ITERATIONS": "7", "WARMDOWN_ITERS": "5", "PATH": "/x", "OMP_NUM_THREADS": "3"}
    assert environment == {**quickstart.SETTINGS, **more}
    for wanted in ({}, {"ITERATIONS": "7", "WARMDOWN_ITERS": "400"}, {"ITERATIONS": "x"}):
        assert quickstart.launch_environment(1, 1.0, wanted)["WARMDOWN_ITERS"] == "400"
    assert quickstart.launch_environment(8, 8.0, {"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    "ranks, free, threads", [(1, 7.6, "8"), (1, 0.2, "1"), (2, 7.6, "4"), (4, 2.0, "1")]
)
def test_there_are_no_more_threads_than_free_cores(ranks: int, free: float, threads: str) -> None:
    assert quickstart.launch_environment(ranks, free, {})["OMP_NUM_THREADS"] == threads


def test_free_cores_are_those_that_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the system's own count of ticks; by the load where there is none."""
    cores = quickstart.usable_cores()
    assert 1 <= cores <= (os.cpu_count() or 1)
    for busy, idle, share in ((0, 100, 1.0), (75, 25, 0.25), (100, 0, 0.0)):
        ticks = iter([(1000, 9000), (1000 + busy, 9000 + idle)])
        monkeypatch.setattr(quickstart, "busy_and_idle", lambda ticks=ticks: next(ticks))
        assert quickstart.free_cores(0) == pytest.approx(cores * share)
    monkeypatch.setattr(quickstart, "busy_and_idle", lambda: None)
    monkeypatch.setattr(os, "getloadavg", lambda: (cores + 5.0, 0.0, 0.0))
    assert quickstart.free_cores(0) == 0.0


def test_the_ticks_are_those_of_this_machine() -> None:
    before = quickstart.busy_and_idle()
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        pass
    busy, idle = (b - a for a, b in zip(before, quickstart.busy_and_idle(), strict=True))
    assert busy >= 20 and 0 <= idle <= 100 * 0.4 * (os.cpu_count() or 1) + 20


def test_the_settings_are_the_trainers() -> None:
    names = quickstart.trainer_settings(
        quickstart.launch_environment(1, 1.0, {**os.environ, "MUON_MOMENTUM": "0.9"})
    )
    assert {*quickstart.SETTINGS, "MUON_MOMENTUM"} <= {*names}


# === THE WHOLE RUN ================================================================================

STAND_IN = r"""
import json, os, signal, sys, time
if "--print-config" in sys.argv:
    if os.environ.get("ITERATIONS") == "x":
        # stands for a refusal: a line on stderr and an exit code
        sys.exit("error: ITERATIONS=x is not a number")
    print(json.dumps({name.lower(): {"value": value, "source": "environment"}
                      for name, value in os.environ.items()
                      if name in ("ITERATIONS", "RESUME", "RUN_ID", "DATA_PATH")}))
    sys.exit()
if os.environ["ITERATIONS"] == "wrong":
    if os.environ["RANK"] == "0":
        words = "nothing started, wrong settings:\n  ITERATIONS=wrong: set 1"
        print(f"train_gpt.py: {words}", file=sys.stderr, flush=True)
    else:
        time.sleep(30)
    sys.exit(2)
def say(stream, line):
    # In one write: torchrun starts python -u, where print writes a line's end by itself and the
    # lines of two ranks run together.
    stream.write(line + "\n")
    stream.flush()
os.makedirs("logs", exist_ok=True)
lines = ["source: step:0/9 val_loss:x", "step:0/9 val_loss:6.9 val_bpb:4.0000 train_time:0ms",
         "step:9/9 val_loss:3.1 val_bpb:2.1000 train_time:9ms",
         "Total submission size int8+zlib: 123456 bytes",
         "final_int8_zlib_roundtrip_exact val_loss:3.00000000 val_bpb:2.00000000"]
open(f"logs/{os.environ['RUN_ID']}.txt", "w").write("\n".join(lines) + "\n")
open("final_model.int8.ptz", "wb").write(b"x" * 1234)
def stop(number, frame):
    again = "this command with RUN_ID=my run RESUME=auto goes on"
    say(sys.stderr, f"train_gpt.py: interrupted after step 3: {again}")
    sys.exit(143)
for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, stop)
rank = os.environ["RANK"]
if os.environ["ITERATIONS"] == "kill":
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ["ITERATIONS"] == "raise":
    raise ValueError("of the model")
if os.environ.get("RESUME") == "auto":
    say(sys.stdout, f"resumed {os.environ['RUN_ID']} {os.environ['ITERATIONS']}")
    sys.exit()
end = time.monotonic() + 45
say(sys.stdout, f"pid {os.getpid()} rank {os.environ['RANK']}")
while os.environ["ITERATIONS"] == "0" and time.monotonic() < end:
    time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with a stand-in trainer and the data of this Python's own sources, in a folder
    of another encoding."""
    root = tmp_path_factory.mktemp("checkout") / os.fsdecode(b"caf\xe9")
    (root / "data").mkdir(parents=True)
    for path in (ROOT / "data").glob("*.py"):
        shutil.copy(path, root / "data")
    (root / "train_gpt.py").write_text(STAND_IN)
    done = subprocess.run(
        [sys.executable, root / "data/quickstart.py", "--prepare-only"],
        cwd="/",
        env={},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert [re.match(r"\w[\w ]*|", line)[0] for line in done.stdout.splitlines()] == [
        "corpus",
        "tokenizer",
        "shards",
        "to train",
        "",
    ]
    assert not (root / "logs").exists()
    return root


@pytest.fixture()
def start(checkout: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts the quickstart with ITERATIONS=<steps>: 0 trains for ever, x is refused."""
    started = []

    def start_one(steps: str, *arguments: str, **more: str) -> subprocess.Popen:
        started.append(
            subprocess.Popen(
                [sys.executable, checkout / "data/quickstart.py", *arguments],
                cwd="/",
                text=True,
                env={"ITERATIONS": steps, **more},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                preexec_fn=heed_interrupts,
            )
        )
        return started[-1]

    yield start_one
    for process in started:
        process.kill()
        process.communicate()


def test_the_split_of_this_python(checkout: Path) -> None:
    tokens = [
        (path.stat().st_size - 1024) // 2
        for path in sorted((checkout / "data/datasets/quickstart_sp1024").glob("*.bin"))
    ]
    assert 150_000 < tokens[-1] < 210_000
    assert len(tokens) >= 4 and {*tokens[:-2]} == {1_000_000}


def test_prepare_only_says_what_to_set(start: Callable[..., subprocess.Popen]) -> None:
    """Also where there was nothing to make: who comes from the trainer's advice wants this line."""
    output, error = start("x", "--prepare-only").communicate(timeout=60)
    up_to_date, to_train, before = output.splitlines()
    assert up_to_date.endswith("is up to date") and error == ""
    words = shlex.split(to_train.removeprefix("to train: ").replace("\\udce9", "\udce9"))
    settings = dict(word.split("=") for word in words)
    assert list(settings) == ["DATA_PATH", "TOKENIZER_PATH", "VOCAB_SIZE"]
    assert Path(settings["DATA_PATH"], "fineweb_val_000000.bin").is_file()
    assert Path(settings["TOKENIZER_PATH"]).is_file() and settings["VOCAB_SIZE"] == "1024"
    trainer, quick = re.findall(r"before (.*?), whose", before)
    for command in (f"{trainer} --print-config", quick):
        refused = follow(f"ITERATIONS=x {to_train.removeprefix('to train: ')} {command}")
        assert refused.stderr == "error: ITERATIONS=x is not a number\n"


def test_wrong_use_is_one_line(start: Callable[..., subprocess.Popen]) -> None:
    ranks = start("x", TORCHELASTIC_RUN_ID="a", WORLD_SIZE="2").communicate()[1]
    option = start("x", "--steps", "9").communicate()[1]
    assert ranks.endswith(" --ranks 2\n") and "; settings go in front: ITERATIONS=100 " in option
    assert (ranks + option).count("\n") == 2


def follow(command: str, folder: Path | str = "/") -> subprocess.CompletedProcess:
    """A command that was printed, pasted into a fresh shell."""
    words = ["/bin/sh", "-c", command.replace("\\udce9", "\udce9")]
    return subprocess.run(words, cwd=folder, env={}, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_a_run_ends_in_three_lines(checkout: Path, start: Callable[..., subprocess.Popen]) -> None:
    output, error = start("9", "--ranks", "2", RUN_ID="my run").communicate(timeout=60)
    lines, shown = output.splitlines(), str(checkout).replace("\udce9", "\\udce9")
    assert "is up to date" in lines[0]
    command = next(line for line in lines if line.startswith("training:"))
    assert (
        f"cd '{shown}' && " in command
        and " ITERATIONS=9 " in command
        and " OMP_NUM_THREADS=" in command
    )
    assert command.endswith("-m torch.distributed.run --standalone --nproc_per_node=2 train_gpt.py")
    assert {line.split("rank ")[1] for line in lines if "rank " in line} == {"0", "1"}
    assert lines[-3] == "bits per byte: 4.0000 before training, 2.0000 after (50.0 % less)"
    assert "final_model.int8.ptz, 1,234 bytes, 123,456 with the script" in lines[-2]
    assert f"{shown}/logs/my run.txt" in lines[-1]
    assert "Traceback" not in error
    following = follow(re.search(r"; next: (.*), or edit", lines[-1])[1]).stdout
    for words in (" RUN_ID='my run' ", " ITERATIONS=2000 ", " --nproc_per_node=2 "):
        assert words in following


@pytest.mark.slow
def test_a_failed_run_ends_in_one_line(start: Callable[..., subprocess.Popen]) -> None:
    """Of torchrun's report only the cause is left, where no process could say it. A log is named
    if this run has written it."""
    process = start("kill", "--ranks", "2", RUN_ID="killed")
    output, error = process.communicate(timeout=60)
    assert process.returncode == 1 and "bits per byte" not in output
    [line] = error.splitlines()
    assert line.startswith("error: the training ended with exit code 1 (rank ")
    assert " ended with exit code -9); its log is " in line and line.endswith("/logs/killed.txt")


@pytest.mark.row("a wrong setting on 2 ranks, quickstart", "the trainer's lines only; no log named")
def test_of_torchruns_report_nothing_is_left(start: Callable[..., subprocess.Popen]) -> None:
    process = start("wrong", "--ranks", "2", RUN_ID="wrong")
    output, error = process.communicate(timeout=60)
    assert process.returncode == 1 and "rank 0" not in output
    assert error == "train_gpt.py: nothing started, wrong settings:\n  ITERATIONS=wrong: set 1\n"


@pytest.mark.slow
def test_an_error_of_the_trainer_itself_is_shown(start: Callable[..., subprocess.Popen]) -> None:
    process = start("raise", RUN_ID="raise")
    _, error = process.communicate(timeout=60)
    lines = error.splitlines()
    assert lines[0].startswith("Traceback") and lines[-2] == "ValueError: of the model"
    assert "torch/distributed" not in error and "ChildFailedError" not in error
    assert lines[-1].startswith("error: the training ended with exit code 1; its log is ")


@pytest.mark.slow
@pytest.mark.row("kill -INT of quickstart's torchrun", "the last line is quickstart's own command")
def test_an_interrupt_of_torchrun_alone(start: Callable[..., subprocess.Popen]) -> None:
    process = start("0", "--ranks", "2", RUN_ID="my run")
    line = next(line for line in process.stdout if line.startswith("pid "))
    launcher = int(Path(f"/proc/{line.split()[1]}/stat").read_text().split(") ")[1].split()[1])
    next(line for line in process.stdout if line.startswith("pid "))
    os.kill(launcher, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    (again,) = re.findall(r"^interrupted after step 3: (.*) goes on\n$", error)
    assert "resumed my run 0" in follow(again).stdout and " OMP_NUM_THREADS=" in again


def test_refused_settings_end_before_any_training(start: Callable[..., subprocess.Popen]) -> None:
    process = start("x")
    output, error = process.communicate(timeout=60)
    assert process.returncode == 1 and error == "error: ITERATIONS=x is not a number\n"
    assert "pid" not in output


SLOW = [pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGTERM, signal.SIGHUP)]


@pytest.mark.parametrize("number", [signal.SIGINT, *SLOW])
def test_an_interrupt_ends_the_training_too(
    start: Callable[..., subprocess.Popen], number: int
) -> None:
    """The one line about it says how to go on, and that helps."""
    process = start("0", RUN_ID="my run")
    line = next(line for line in process.stdout if line.startswith("pid "))
    process.send_signal(number)
    _, error = process.communicate(timeout=30)  # the stand-in would go on for longer
    assert process.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int(line.split()[1]), 0)
    (again,) = re.findall(r"^interrupted after step 3: (.*) goes on\n$", error)
    assert "resumed my run 0" in follow(again).stdout


@pytest.mark.slow
def test_the_real_trainer_gets_to_bits_per_byte(tmp_path: Path, checkout: Path) -> None:
    """With neither PATH nor settings but those that make it short."""
    shutil.copytree(checkout / "data", tmp_path / "data")
    (tmp_path / "logs").mkdir()
    for path in (ROOT / "logs").glob("*.py"):
        shutil.copy(path, tmp_path / "logs")
    shutil.copy(ROOT / "train_gpt.py", tmp_path)
    done = subprocess.run(
        [sys.executable, tmp_path / "data/quickstart.py"],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=110,
        env={
            "ITERATIONS": "40",
            "NUM_LAYERS": "1",
            "VAL_TOKENS": "4096",
            "DEVICE": "cpu",
            "HOME": str(tmp_path),
            "OMP_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    scores = re.search(
        r"^bits per byte: ([\d.]+) before training, ([\d.]+) after", done.stdout, re.MULTILINE
    )
    assert float(scores[2]) < float(scores[1])
    log = (tmp_path / "logs/quickstart.txt").read_text()
    assert log.splitlines()[-1].startswith("final_int8_zlib_roundtrip_exact val_loss:")
    assert re.search(r"^sample:\n    def ", done.stdout, re.MULTILINE), done.stderr
    size = (tmp_path / "final_model.int8.ptz").stat().st_size
    assert f"artifact: final_model.int8.ptz, {size:,} bytes" in done.stdout
    assert "ITERATIONS=40 " in done.stdout and "DEVICE=cpu" in done.stdout
