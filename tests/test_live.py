"""Shards made while training runs: the producer's side.
Their order, the file .producing, the command beside it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT, heed_interrupts
from test_tokenize_docs import make_texts, read_shards, run, snapshot, write_jsonl

sys.path.insert(0, str(ROOT / "data"))
import producer  # noqa: E402  (rooms are folders of scripts, not packages)
import tokenize_docs  # noqa: E402

pytestmark = pytest.mark.timeout(60)
SCRIPT = ROOT / "data" / "tokenize_docs.py"
NUM_VAL, SHARD_TOKENS = 40, 4000

# A stand-in for training: writes down what it finds, then does what its second argument says.
COMMAND = """
import json, os, signal, sys, time
from pathlib import Path
report, then = Path(sys.argv[1]), sys.argv[2]
folder = Path(os.environ["DATA_PATH"])
def word():
    path = folder / ".producing"
    try: return json.loads(path.read_text())
    except FileNotFoundError: return None
def until(condition):
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline: time.sleep(0.01)
manifest = json.loads((folder / "../../manifest.json").read_text())
names = ("DATA_PATH", "TOKENIZER_PATH", "VOCAB_SIZE")
seen = {
    "pid": os.getpid(),
    "python": sys.executable,
    "files": sorted(path.name for path in folder.glob("*.bin")),
    "word": word(),
    "tokenizer": Path(os.environ["TOKENIZER_PATH"]).stat().st_size,
    "manifest": manifest["datasets"],
    "settings": {name: os.environ[name] for name in names},
    "signals": [],
}
def write():
    report.with_suffix(".new").write_text(json.dumps(seen))
    report.with_suffix(".new").replace(report)
def note(number, frame):
    seen["signals"].append([number, word()])
    write()
for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, note)
write()
if then == "until complete": until(lambda: word() is None)
elif then == "until error": until(lambda: "error" in word())
elif then == "until signal": until(lambda: seen["signals"])
elif then == "for ever": until(lambda: False)
if then == "until signal": time.sleep(0.5)  # for a second one
seen["at_end"] = [word(), sorted(path.name for path in folder.glob("*.bin"))]
write()
if then == "kill itself": os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(sys.argv[3]))
"""


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "did not happen within 30 s"
        time.sleep(0.01)


def word_of(folder: Path) -> dict | None:
    try:
        return json.loads((folder / ".producing").read_text())
    except FileNotFoundError:
        return None


class Place:
    """Documents, a folder for what is made of them, and what the stand-in for training saw."""

    def __init__(self, root: Path, documents: Path) -> None:
        self.out, self.documents, self.report = root / "out", documents, root / "report.json"
        self.folder, self.script = self.out / "datasets" / "docs_byte260", root / "command.py"
        self.script.write_text(COMMAND)

    def arguments(self, *more: object) -> list[str]:
        return [
            str(word)
            for word in (
                self.documents,
                "--out",
                self.out,
                "--num-val-docs",
                NUM_VAL,
                "--bytes",
                "--shard-tokens",
                SHARD_TOKENS,
                *more,
            )
        ]

    def live(self, *more: object, then: str = "", code: int = 0) -> list[str]:
        """The arguments of a live export; `then` says what the command beside it does."""
        command = ["--", sys.executable, self.script, self.report, then, code] if then else []
        return self.arguments("--live", *more, *command)

    def start(self, arguments: list[str], **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments],
            env={**os.environ, **env},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=heed_interrupts,
        )

    def seen(self) -> dict:
        return json.loads(self.report.read_text())

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("fineweb_*.bin"))

    def entry(self) -> dict:
        (entry,) = json.loads((self.out / "manifest.json").read_text())["datasets"]
        return entry


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("documents") / "docs.jsonl", make_texts(400))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, documents: Path) -> Path:
    """What an export that nobody watches makes of them."""
    place = Place(tmp_path_factory.mktemp("plain"), documents)
    run(*place.arguments())
    return place.out


@pytest.fixture
def place(tmp_path: Path, documents: Path) -> Place:
    return Place(tmp_path, documents)


@pytest.fixture
def first_sight(place: Place, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shards that are there at the moment at which the command is started, once it is."""
    names, real = [], subprocess.Popen

    def popen(words: list[str], **options: object) -> subprocess.Popen:
        if words[0] == sys.executable:
            assert not names, "once"
            names.extend(place.names())
        return real(words, **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    return names


# === SHARDS =======================================================================================


def test_every_file_is_that_of_a_plain_export(place: Place, plain: Path) -> None:
    run(*place.live("--tokens-per-second", 100_000, then="until complete", code=5), code=5)
    assert snapshot(place.out) == snapshot(plain) and len(place.names()) > 10
    assert place.seen()["at_end"] == [None, place.names()], (
        "training saw the file go when the set was complete"
    )


def test_with_a_trained_tokenizer_too(tmp_path: Path, documents: Path) -> None:
    common = [
        documents,
        "--num-val-docs",
        NUM_VAL,
        "--vocab-size",
        380,
        "--shard-tokens",
        1000,
        "--out",
    ]
    run(*common, tmp_path / "plain")
    run(*common, tmp_path / "live", "--live", "--workers", 2)
    assert snapshot(tmp_path / "live") == snapshot(tmp_path / "plain")
    assert len(read_shards(tmp_path / "live/datasets/docs_sp380", "train")) > 5


def test_what_a_watcher_sees(place: Place, plain: Path) -> None:
    """Shards appear whole and in order,
    .producing is there and right from before the first until the last."""
    expected = sorted(path.name for path in (plain / "datasets/docs_byte260").glob("*.bin"))
    order = [name for split in ("val", "train") for name in expected if split in name]
    tokens = {
        split: sum(map(len, read_shards(plain / "datasets/docs_byte260", split)))
        for split in ("val", "train")
    }
    rate = tokens["train"]  # so that it takes a second
    begin = time.monotonic()
    process = place.start(place.live("--tokens-per-second", rate))
    known: list[str] = []
    words: list[dict] = []
    while process.poll() is None:
        word, names = word_of(place.folder), place.names()  # in this order
        for name in set(names) - set(known):
            content = (place.folder / name).read_bytes()
            assert np.frombuffer(content[:12], "<i4").tolist() == [
                20240520,
                1,
                (len(content) - 1024) // 2,
            ], name
            assert (
                name in (order[-1], "fineweb_val_000001.bin")
                or len(content) == 1024 + 2 * SHARD_TOKENS
            )
        assert sorted(names) == sorted(order[: len(names)]), "in the order of their numbers"
        if word:
            assert word["pid"] == process.pid and "error" not in word
            has_val = set(names) >= {name for name in order if "val" in name}
            assert has_val or not word["val_complete"], "training may begin when it is complete"
            words.append(word)
        elif known:
            assert len(place.names()) == len(order), (
                "nobody must take an incomplete set for a complete one"
            )
        known = names
        time.sleep(0.002)
    assert process.returncode == 0, process.stderr.read()
    assert time.monotonic() - begin > tokens["train"] / rate - 0.02
    assert known == [] or place.names() == expected
    progress = [word["progress"] for word in words]
    assert progress == sorted(progress) and len(set(progress)) > 2
    assert [word["val_complete"] for word in words[-1:]] == [True]
    assert {word["shards_promised"] for word in words} == {None}
    assert sorted(path.name for path in place.folder.parent.iterdir()) == ["docs_byte260"], (
        "no lock is left"
    )
    assert word_of(place.folder) is None


def test_documents_are_tokenised_one_a_call(
    tmp_path: Path, documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tokenize_docs.Source((str(documents),), NUM_VAL)
    (tmp_path / "m.model").write_bytes(tokenize_docs.train_tokenizer(source, 380, "nmt_nfkc"))
    tokenizer, calls = tokenize_docs.Tokenizer(tmp_path / "m.model"), []

    def encode(text: str, **options: object) -> np.ndarray:
        calls.append(text)
        return real(text, **options)

    real = tokenizer.processor.encode
    tokenizer.processor = SimpleNamespace(encode=encode)
    block = next(source.blocks())
    _, lengths, _ = tokenizer.encode_block(block)
    assert calls == make_texts(400) and len(lengths) == 400


def test_what_is_left_of_another_beginning_is_taken_away(
    place: Place, plain: Path, first_sight: list
) -> None:
    """Begun anew, training must not meet shards of the export before."""
    shutil.copytree(plain, place.out)
    (place.folder / "fineweb_train_000002.bin").unlink()
    (place.folder / "fineweb_train_000099.bin").write_bytes(b"of another tokenizer")
    (place.folder / ".fineweb_train_000002.bin.1.partial").write_bytes(
        b"of a process that was killed"
    )
    run(*place.live(then="until complete"))
    assert first_sight == [
        "fineweb_train_000000.bin",
        "fineweb_val_000000.bin",
        "fineweb_val_000001.bin",
    ]
    assert snapshot(place.out) == snapshot(plain)


# === THE FILE .producing ==========================================================================


def test_its_counter_moves_while_the_producer_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without any progress, for as long as that may be normal."""
    assert producer.HEARTBEAT_SECONDS == 2 and producer.MAX_SECONDS_WITHOUT_PROGRESS == 1800
    monkeypatch.setattr(producer, "HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(producer, "PROGRESS_NEWS_SECONDS", 0.01)
    monkeypatch.setattr(producer, "MAX_SECONDS_WITHOUT_PROGRESS", 2.0)
    with producer.Producer(tmp_path, "a command", shards_promised=None) as work:
        first = word_of(tmp_path)
        assert first == {
            "command": "a command",
            "pid": os.getpid(),
            "shards_promised": None,
            "progress": first["progress"],
            "val_complete": False,
        }

        def moved(since: int) -> Callable[[], bool]:
            return lambda: word_of(tmp_path)["progress"] > since

        for _ in range(3):
            until(moved(word_of(tmp_path)["progress"]))
        work.complete_val()
        assert word_of(tmp_path)["val_complete"]

        def stands_still() -> bool:
            before = word_of(tmp_path)["progress"]
            time.sleep(0.3)
            return word_of(tmp_path)["progress"] == before

        until(stands_still)
        work.advance(1)
        until(moved(word_of(tmp_path)["progress"]))
    assert not list(tmp_path.iterdir())


@pytest.mark.row(
    "a producer trains a tokenizer or tokenises one long document", "it counts as alive"
)
def test_the_counter_moves_while_a_tokenizer_is_trained(
    tmp_path: Path, documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SentencePiece does not hold the interpreter's lock meanwhile, or no thread could count."""
    monkeypatch.setattr(producer, "HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(producer, "PROGRESS_NEWS_SECONDS", 0.01)
    source = tokenize_docs.Source(
        (str(write_jsonl(tmp_path / "more.jsonl", make_texts(40_000))),), 5
    )
    seen: list[tuple[float, int]] = []
    real = producer.Producer.write

    def write(self: producer.Producer, **more: str) -> None:
        real(self, **more)
        seen.append((time.monotonic(), word_of(tmp_path)["progress"]))

    monkeypatch.setattr(producer.Producer, "write", write)
    with producer.Producer(tmp_path, "a command"):
        begin = time.monotonic()
        tokenize_docs.train_tokenizer(source, 1500, "identity")
        end = time.monotonic()
    during = [progress for when, progress in seen if begin < when < end]
    assert len(set(during)) > max(1, (end - begin) / 0.5)


def test_progress_is_told_at_once_but_not_for_every_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[int] = []
    real = producer.Producer.write
    monkeypatch.setattr(
        producer.Producer, "write", lambda self, **more: (writes.append(1), real(self, **more))
    )
    begin = time.monotonic()
    with producer.Producer(tmp_path, "") as work:
        until(lambda: work.advance(3) or word_of(tmp_path)["progress"] > 0)
        assert time.monotonic() - begin < producer.HEARTBEAT_SECONDS - 1
        while time.monotonic() - begin < 1:
            work.advance(1)
        assert word_of(tmp_path)["progress"] > 1000
        assert 3 <= len(writes) <= 2 + (time.monotonic() - begin) / producer.PROGRESS_NEWS_SECONDS


@pytest.mark.parametrize(
    "error, words",
    [
        (
            producer.DataError("a:7: not JSON;\n  mend it"),
            "its producer failed: a:7: not JSON; mend it",
        ),
        (OSError(28, "No space left"), "its producer failed: OSError: [Errno 28] No space left"),
        (producer.StoppedEarlyError("has had enough"), "its producer has had enough"),
        (KeyboardInterrupt(), "its producer was interrupted"),
        (producer.DataError("x" * 1000), f"its producer failed: {'x' * 276}..."),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_failure_stays_until_the_next_begins(
    tmp_path: Path, error: BaseException, words: str
) -> None:
    with pytest.raises(type(error)), producer.Producer(tmp_path, "a command") as work:
        work.advance(4)
        raise error
    assert word_of(tmp_path)["error"] == words and word_of(tmp_path)["command"] == "a command"
    with producer.Producer(tmp_path, "a command"):
        assert "error" not in word_of(tmp_path)
    assert word_of(tmp_path) is None


@pytest.mark.row("a producer that leaves early", "says so; training takes it for an error")
def test_who_leaves_before_the_promised_shards_says_so(tmp_path: Path) -> None:
    """Training must not take what is there for the complete set."""
    for made, left in ((2, "its producer left after 2 of 3 shards"), (3, None)):
        with producer.Producer(tmp_path, "", shards_promised=3):
            (tmp_path / f"fineweb_train_{made - 2:06d}.bin").touch()
            (tmp_path / f"fineweb_train_{made - 1:06d}.bin").touch()
        assert (word_of(tmp_path) or {}).get("error") == left
    assert word_of(tmp_path) is None


def test_a_bad_line_reaches_training_after_the_good_shards(place: Place, tmp_path: Path) -> None:
    place.documents = tmp_path / "docs.jsonl"
    text = " ".join(make_texts(40, seed=2))
    good = [json.dumps({"text": f"{number} {text}"}) for number in range(300)]
    place.documents.write_text("\n".join([*good[:200], "{'text': 0}", *good[200:]]) + "\n")
    assert sum(map(len, good[:200])) > 2 * tokenize_docs.BLOCK_BYTES
    process = place.start(place.live("--shard-tokens", 50_000, then="until error"))
    _, error = process.communicate(timeout=30)
    fault = f"{place.documents}:201: not JSON"
    assert (
        process.returncode == 1 and error.startswith(f"error: {fault}") and error.count("\n") == 1
    )
    assert (
        word_of(place.folder)["error"]
        == "its producer failed: " + error.removeprefix("error: ").strip()
    )
    assert place.seen()["at_end"][0]["error"].startswith(f"its producer failed: {fault}"), (
        "the command has ended of it, and first"
    )
    shards = list(read_shards(place.folder, "train"))
    assert len(shards) > 3 and {len(shard) for shard in shards} == {50_000}
    entry = place.entry()
    assert entry["complete"] is False and "files_train" not in entry["stats"]
    assert sorted(entry["shards"]["train"]) == [name for name in place.names() if "train" in name]
    assert entry["stats"]["tokens_train"] == 50_000 * len(shards)


def test_a_killed_producer_leaves_it_and_the_next_goes_on(place: Place, plain: Path) -> None:
    process = place.start(place.live("--tokens-per-second", 20_000))
    until(lambda: len(place.names()) > 5)
    process.kill()
    process.communicate()
    left, known = word_of(place.folder), len(place.names())
    assert left["pid"] == process.pid and "error" not in left
    # So slow that it is at work when the command looks at .producing; the command's end ends it.
    run(*place.live("--tokens-per-second", 2000, then="leave", code=4), code=4)
    assert len(place.seen()["files"]) >= known - 1, "the command need not wait for what is there"
    assert place.seen()["word"]["pid"] == os.getpid()
    run(*place.live())
    assert snapshot(place.out).keys() == snapshot(plain).keys()
    for name, content in snapshot(plain).items():
        assert (place.out / name).read_bytes() == content, name


@pytest.mark.row("kill -9 behind the last shard", "the same command says that all are made")
def test_a_kill_behind_the_last_shard_leaves_nothing_for_ever(place: Place, plain: Path) -> None:
    shutil.copytree(plain, place.out)
    (place.folder / ".producing").write_text('{"progress": 7}')
    run(*place.arguments())
    assert snapshot(place.out) == snapshot(plain)


# === ONE PRODUCER A FOLDER ========================================================================


@pytest.mark.parametrize("kind", ["live", "arguments"])
def test_a_second_producer_is_refused(place: Place, kind: str) -> None:
    process = place.start(place.live("--tokens-per-second", 30_000))
    until(lambda: word_of(place.folder))
    error = run(*getattr(place, kind)(), code=1)
    assert (
        error.startswith(f"error: {place.folder}: another process is making shards in it")
        and error.count("\n") == 1
    )
    word = word_of(place.folder)
    assert word["pid"] == process.pid and "error" not in word
    process.send_signal(signal.SIGTERM)
    process.communicate()


def test_the_lock_is_of_the_file_that_the_next_one_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder before us removes the file between our opening and our locking of it."""
    folder = tmp_path / "datasets" / "x"
    path = folder.with_name(".x.lock")
    real, calls = producer.fcntl.flock, []

    def flock(handle: object, operation: int) -> None:
        if not calls:
            path.unlink()
        calls.append(operation)
        real(handle, operation)

    monkeypatch.setattr(producer.fcntl, "flock", flock)
    with producer.locked(folder):
        assert len(calls) == 2 and path.exists()
        with pytest.raises(producer.DataError, match="another process"), producer.locked(folder):
            pass
    assert not path.exists()
    with pytest.raises(FileNotFoundError), producer.locked(folder):
        raise FileNotFoundError("of the work inside")
    assert not path.exists()


# === THE COMMAND ==================================================================================


def test_the_command_begins_as_soon_as_it_can(place: Place, plain: Path, first_sight: list) -> None:
    whole = json.loads((plain / "manifest.json").read_text())["datasets"][0]
    assert len(whole["shards"]["val"]) == 2
    run(*place.live(then="leave"))
    assert first_sight == ["fineweb_train_000000.bin", *whole["shards"]["val"]]


def test_the_command_finds_what_it_needs_and_its_end_ends_the_export(
    place: Place, plain: Path
) -> None:
    process = place.start(
        place.live("--tokens-per-second", 10_000, then="leave", code=3), DATA_PATH="elsewhere"
    )
    out, error = process.communicate(timeout=30)
    assert process.returncode == 3 and error == ""
    seen, whole = place.seen(), json.loads((plain / "manifest.json").read_text())["datasets"][0]
    tokenizer = place.out / "tokenizers/docs_byte260.json"
    assert seen["settings"] == {
        "DATA_PATH": str(place.folder),
        "TOKENIZER_PATH": str(tokenizer),
        "VOCAB_SIZE": "260",
    }
    assert "replaces DATA_PATH=elsewhere" in out
    assert {"fineweb_train_000000.bin", *whole["shards"]["val"]} <= set(seen["files"])
    assert seen["tokenizer"] == tokenizer.stat().st_size
    assert seen["word"]["pid"] == process.pid and "error" not in seen["word"]
    (entry,) = seen["manifest"]
    assert entry["complete"] is False and entry["stats"]["files_val"] == whole["stats"]["files_val"]
    assert (
        "files_train" not in entry["stats"]
        and entry["docs_sha256"]["val"] == whole["docs_sha256"]["val"]
    )

    num_train = len([name for name in place.names() if "train" in name])
    assert num_train < whole["stats"]["files_train"], "nobody needs the others"
    assert (
        f"{place.folder}: incomplete, {num_train} training shards: its producer stopped early"
        in out
    )
    assert word_of(place.folder)["error"].startswith(
        "its producer stopped early: its command has ended"
    )
    entry = place.entry()
    assert entry["complete"] is False and len(entry["shards"]["train"]) == num_train
    assert not [path for path in place.folder.iterdir() if path.name.endswith(".partial")]
    command = word_of(place.folder)["command"]
    assert out.count(f"the rest is made by: {command}\n") == 1
    place.report.unlink()
    again = subprocess.run(
        ["sh", "-c", command], cwd="/", env={}, capture_output=True, text=True, timeout=50
    )
    assert again.returncode == 0 and not place.report.exists(), again.stderr
    assert snapshot(place.out) == snapshot(plain), "the rest was made, and nothing trained"


def test_a_complete_set_and_a_set_of_one_shard_have_their_command_too(place: Place) -> None:
    run(*place.live("--shard-tokens", 10_000_000, then="leave", code=6), code=6)
    assert place.seen()["files"] == ["fineweb_train_000000.bin", "fineweb_val_000000.bin"]
    assert word_of(place.folder) is None
    place.report.unlink()
    run(*place.live("--shard-tokens", 10_000_000, then="leave", code=7), code=7)
    assert place.seen()["word"] is None and "complete" not in place.seen()["manifest"][0]


def test_a_command_that_a_signal_ended(place: Place) -> None:
    run(*place.live(then="kill itself"), code=128 + signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_command_once_and_ends_both(place: Place, number: int) -> None:
    process = place.start(place.live("--tokens-per-second", 20_000, then="until signal"))
    until(place.report.exists)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    _, error = process.communicate(timeout=30)
    assert (
        process.returncode == 128 + number
        and "Traceback" not in error
        and "waiting for the command" in error
    )
    ((received, word),) = place.seen()["signals"]
    assert received == number and "error" not in word, (
        "the signal is why training ends, not the producer"
    )
    assert "at_end" in place.seen(), "it was waited for"
    assert word_of(place.folder)["error"] == "its producer was interrupted"
    assert place.entry()["complete"] is False


@pytest.mark.parametrize("console", ["full", "gone", "closed"])
@pytest.mark.row("a console that takes no text, --live (..)", "costs its text only")
def test_a_console_that_takes_no_text_costs_nothing_else(
    place: Place, plain: Path, console: str
) -> None:
    """Neither the set, nor the command beside it, nor its exit code."""
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, str(SCRIPT), *place.live(then="until signal", code=7)]
    shell = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh"] if console == "closed" else []
    with open("/dev/full", "wb") as full:
        output = full if console == "full" else theirs
        process = subprocess.Popen([*shell, *command], stdout=output, stderr=output)
    os.close(theirs)
    until(lambda: place.report.exists() and word_of(place.folder) is None)
    time.sleep(0.5)  # in which it says that the set is complete
    assert place.seen()["signals"] == [] and process.poll() is None
    os.kill(place.seen()["pid"], signal.SIGTERM)
    assert process.wait(30) == 7
    assert snapshot(place.out) == snapshot(plain)


def test_a_console_loses_more_than_it_can_hold() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        console = producer.Console(full, "ascii", "backslashreplace")
        assert console.write("é" * 100_000) == 100_000
        console.flush()
        console.detach()


def test_a_signal_after_the_last_shard_reaches_the_command_too(place: Place) -> None:
    process = place.start(place.live(then="until signal"))
    until(lambda: place.report.exists() and word_of(place.folder) is None)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 143 and [number for number, _ in place.seen()["signals"]] == [
        signal.SIGTERM
    ]
    assert word_of(place.folder) is None and "complete" not in place.entry()


def test_a_second_signal_kills_a_command_that_does_not_listen(place: Place) -> None:
    process = place.start(place.live("--tokens-per-second", 20_000, then="for ever"))
    until(place.report.exists)
    process.send_signal(signal.SIGTERM)
    until(lambda: place.seen()["signals"])
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 143
    with pytest.raises(ProcessLookupError):
        os.kill(place.seen()["pid"], 0)


def test_a_signal_while_the_command_is_being_started_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = subprocess.Popen

    def popen(*arguments: object, **options: object) -> subprocess.Popen:
        process = real(*arguments, **options)
        signal.raise_signal(signal.SIGTERM)
        return process

    monkeypatch.setattr(subprocess, "Popen", popen)
    command = tokenize_docs.Command(["sleep", "30"])
    before = signal.getsignal(signal.SIGTERM)
    with command.hearing_signals(), pytest.raises(tokenize_docs.Interrupted) as interruption:
        command.start({})
    assert (
        interruption.value.number == signal.SIGTERM and signal.getsignal(signal.SIGTERM) == before
    )
    command.interrupt(signal.SIGTERM)
    assert command.wait() == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    "launcher", [["python3"], [], ["torchrun", "--standalone", "--nproc_per_node=1"]], ids=str
)
def test_the_command_needs_no_activated_environment(place: Place, launcher: list[str]) -> None:
    words = ["--live", "--", *launcher, place.script, place.report, "leave", 0]
    process = place.start(place.arguments(*words), PATH="/usr/bin:/bin")
    _, error = process.communicate(timeout=50)
    assert process.returncode == 0, error
    assert place.seen()["python"] == sys.executable


@pytest.mark.slow
@pytest.mark.row("a wrong setting on 2 ranks, --live", "the trainer's lines only")
def test_of_torchruns_report_nothing_is_left(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's last words are the last line; nor is torchrun's notice of threads there."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    launcher = ["--live", "--", "torchrun", "--standalone", "--nproc_per_node=2"]
    environment = {"TRAIN_SEQ_LEN": "0", "TRAIN_BATCH_TOKENS": "x"}
    process = place.start(place.arguments(*launcher, ROOT / "train_gpt.py"), **environment)
    _, error = process.communicate(timeout=50)
    lines = error.splitlines()
    assert process.returncode == 1 and len(lines) < 6, error
    assert lines[0] == "train_gpt.py: nothing started, wrong settings:"
    assert all(line.startswith("  TRAIN_") for line in lines[1:])


@pytest.mark.slow
@pytest.mark.row("kill -INT of the torchrun of --live", "its processes end; one line at most of it")
def test_an_interrupt_of_torchrun_alone(place: Place) -> None:
    launcher = ["--live", "--", "torchrun", "--standalone", "--nproc_per_node=1"]
    process = place.start(place.arguments(*launcher, place.script, place.report, "until signal", 3))
    until(place.report.exists)
    parent = Path(f"/proc/{place.seen()['pid']}/stat").read_text().split(") ")[1].split()[1]
    os.kill(int(parent), signal.SIGINT)
    _, error = process.communicate(timeout=50)
    assert process.returncode == 1 and "at_end" in place.seen()
    assert error.count("\n") <= 1 and "Traceback" not in error


@pytest.mark.row("a --live command cannot start", "torchrun's own error is shown")
def test_an_error_of_torchrun_itself_is_shown(place: Place) -> None:
    wrong = ["--live", "--", "torchrun", "--nnodes=2", "--master-addr=no.such.host.invalid"]
    wrong += ["--rdzv-backend=no-such-backend", "--rdzv-endpoint=x:1", ROOT / "train_gpt.py"]
    process = place.start(place.arguments(*wrong))
    _, error = process.communicate(timeout=50)
    assert process.returncode == 1 and error.count("\n") == 1
    assert error.startswith("torchrun: ") and "no-such-backend" in error


@pytest.mark.row("kill -9 of a --live producer", "its command is told to stop")
def test_a_producer_that_is_killed_takes_its_command_along(place: Place) -> None:
    """No more shards will come: training ends at once, and by a signal, so with a checkpoint."""
    process = place.start(place.live("--tokens-per-second", 20_000, then="until signal"))
    until(place.report.exists)
    process.kill()
    until(lambda: "at_end" in place.seen())
    assert [number for number, _ in place.seen()["signals"]] == [signal.SIGTERM]
    process.communicate(timeout=30)


# === WRONG USE AND RATE ===========================================================================


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--live", "--vocab-size", "300", "400"], "--live makes one data set"),
        (["--live", "--vocab-size", "300", "--bytes"], "--live makes one data set"),
        (["--live", "--bytes", "--", "no-such-command", "x"], "no-such-command: no such command"),
        (["--live", "--bytes", "--", "A=1", "x"], "A=1: settings go in front of this tool"),
        (["--live", "--bytes", "--", "python3 a.py"], "one word; write the command without the qu"),
        (["--live", "--bytes", "--", "torchrun", "no.py"], "no.py: no such script"),
        (["--live", "--bytes", "--", "no.py"], "no.py: no such script"),
        (["--bytes", "--live", "torchrun", "--x", "a.py"], "--live -- torchrun --x a.py"),
        (["--bytes", "--live", "python3", "a.py"], "put -- before the command: --live -- python3"),
        (
            ["--bytes", "--live", "train_gpt.py"],
            "put -- before the command: --live -- train_gpt.py",
        ),
    ],
)
def test_wrong_use_is_one_line(place: Place, arguments: list[str], words: str) -> None:
    error = run(place.documents, "--out", place.out, *arguments, code=2)
    assert error.startswith("error: ") and words in error and error.count("\n") == 1
    assert not place.out.exists()


def test_what_follows_two_dashes_is_files_unless_live(place: Place, plain: Path) -> None:
    run(
        "--out",
        place.out,
        "--num-val-docs",
        NUM_VAL,
        "--shard-tokens",
        SHARD_TOKENS,
        "--bytes",
        "--",
        place.documents,
    )
    assert snapshot(place.out) == snapshot(plain)
    assert "a command after -- needs --live" in run(
        "--bytes", "--", place.documents, "torchrun", code=2
    )


def test_defaults_with_and_without_live(place: Place) -> None:
    options = {
        live: tokenize_docs.parse_arguments([str(place.documents), *["--live"] * live])
        for live in (0, 1)
    }
    assert [options[live].shard_tokens for live in (0, 1)] == [100_000_000, 1_000_000]
    assert options[0].workers == os.cpu_count() and options[1].workers == max(
        1, os.cpu_count() // 2
    )
    assert options[1].command == [] and options[1].tokens_per_second is None


def test_the_pace_is_kept_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(tokenize_docs.time, "monotonic", lambda: now)
    pace = tokenize_docs.Pace(1000)
    now = 105.0
    assert pace.lead(500) == 0.5, "the clock starts with the first token"
    now = 105.5
    assert pace.lead(1) == 0.0, "a millisecond is no pause"
    assert pace.lead(499) == 0.5
    now = 107.0
    assert pace.lead(100) == 0.0, "late: what was lost is caught up with"
    now = 107.0
    assert pace.lead(1900) == 1.0
    assert tokenize_docs.Pace(None).lead(10**12) == 0.0


def test_readme_commands_are_known(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Each option the room's README and the tool's own text name exists."""
    text = (ROOT / "data/README.md").read_text() + tokenize_docs.__doc__
    with pytest.raises(SystemExit):
        tokenize_docs.parse_arguments(["--help"])
    known = capsys.readouterr().out.split("options:")[1]
    for line in re.findall(r"tokenize_docs\.py ([^\n`]*)", text):
        for option in re.findall(r"--[a-z][\w-]*", line.split(" -- ")[0]):
            assert option in known, option
