"""The download tool, run as a user runs it, with the real hub client against a local hub that fails
on purpose."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import pty
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from fake_hub import FakeHub, Fault, Transfer

ROOT = Path(__file__).resolve().parent.parent
REPO, NAME, SHARDS = "willdepueoai/parameter-golf", "fineweb10B_sp1024", 5
VAL = f"datasets/{NAME}/fineweb_val_000000.bin"
TRAIN = [f"datasets/{NAME}/fineweb_train_{number:06d}.bin" for number in range(SHARDS)]
TOKENIZER = ["tokenizers/fineweb_1024_bpe.model", "tokenizers/fineweb_1024_bpe.vocab"]
DOCS = ["docs_selected.jsonl", "docs_selected.source_manifest.json"]
# Pauses before another try are longer; test_the_hub_is_asked_ever_more_slowly counts them.
IMPATIENT = "import time; sleep = time.sleep; time.sleep = lambda s: sleep(min(s, 0.02))\n"
CHUNK = 1 << 20  # what the client writes at once, so what a broken connection may cost

pytestmark = pytest.mark.timeout(60)


def shard(num_tokens: int, seed: int) -> bytes:
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, num_tokens
    return (
        header.tobytes()
        + np.random.default_rng(seed).integers(0, 1024, num_tokens).astype("<u2").tobytes()
    )


def manifest() -> dict[str, list[dict[str, object]]]:
    stats = {"files_train": SHARDS, "files_val": 1}
    return {
        "datasets": [
            {"name": NAME, "tokenizer_name": "sp_bpe_1024", "stats": stats},
            {"name": "fineweb10B_byte260", "tokenizer_name": "bytes", "stats": stats},
        ],
        "tokenizers": [
            {"name": "sp_bpe_1024", "model_path": TOKENIZER[0], "vocab_path": TOKENIZER[1]},
            {"name": "bytes", "path": "tokenizers/fineweb_byte260.json"},
        ],
    }


CONTENT = {
    "manifest.json": json.dumps(manifest()).encode(),
    TOKENIZER[0]: bytes(range(256)) * 30,
    TOKENIZER[1]: b"<unk>\t0\n",
    VAL: shard(400_000, 8),
    DOCS[0]: b'{"text": "a"}\n' * 2000,
    DOCS[1]: b"{}",
    **{name: shard(1_500_000, number) for number, name in enumerate(TRAIN)},
}
SIZE = len(CONTENT[TRAIN[0]])


class Place:
    """A repository with the tool in its data/ folder, and the hub that it talks to."""

    def __init__(self, root: Path, hub: FakeHub, prefix: str = "datasets/") -> None:
        # A folder that is not UTF-8, as some are; the console below shows no more than ASCII.
        self.data, self.hub, self.prefix = root / os.fsdecode(b"caf\xe9") / "data", hub, prefix
        self.data.mkdir(parents=True)
        for path in (ROOT / "data").glob("*.py"):
            shutil.copy(path, self.data)
        self.home = root / "home"
        self.home.mkdir()
        left_out = {
            "HF_TOKEN",
            "HF_HUB_OFFLINE",
            "MATCHED_FINEWEB_REPO_ID",
            "MATCHED_FINEWEB_REMOTE_ROOT_PREFIX",
        }
        self.env = {
            **{key: value for key, value in os.environ.items() if key not in left_out},
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(root / "home"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "PYTHONIOENCODING": "ascii",
            "PYTHONPATH": os.pathsep.join([str(root / "home"), os.environ.get("PYTHONPATH", "")]),
        }
        hub.observers.append(lambda transfer: self.final_names_are_right())

    @property
    def producing(self) -> Path:
        return self.data / "datasets" / NAME / ".producing"

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, str(self.data / "cached_challenge_fineweb.py"), *arguments]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*arguments),
            env=self.env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(
        self, *arguments: str, code: int = 0, first: str = "", **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs the tool to its end, after the statements `first`;
        forgets the hub's earlier requests; checks what holds after every run."""
        (self.home / "sitecustomize.py").write_text(IMPATIENT + first)
        self.hub.transfers.clear()
        self.hub.requests.clear()
        env = {**self.env, **env}
        done = subprocess.run(
            self.command(*arguments), env=env, text=True, capture_output=True, timeout=50
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        assert not self.hub.observed, self.hub.observed
        if code == 0:
            assert not self.producing.exists()
        return done

    def last_words(self) -> str:
        """What the download has left to training about its failure."""
        return json.loads(self.producing.read_text())["error"]

    def final_names_are_right(self) -> None:
        """No file that is not whole has a shard's final name."""
        for path in self.data.glob("datasets/*/*.bin"):
            assert path.stat().st_size == len(CONTENT[f"datasets/{NAME}/{path.name}"]), path.name

    def holds_exactly(self, names: list[str]) -> None:
        for name in names:
            assert (self.data / name).read_bytes() == CONTENT[name], name
        assert sorted(path.name for path in self.data.glob("datasets/*/*.bin")) == sorted(
            Path(name).name for name in names if name.endswith(".bin")
        )

    def transferred(self) -> list[str]:
        return [transfer.path.removeprefix(self.prefix) for transfer in self.hub.transfers]

    def plant(self, **by_shard: list[Fault] | Fault) -> None:
        """Faults by shard: t0=[...] passes, t0=Fault(...) stays."""
        for word, fault in by_shard.items():
            path = self.prefix + (VAL if word == "val" else TRAIN[int(word[1:])])
            (self.hub.faults if isinstance(fault, list) else self.hub.lasting)[path] = fault

    def damage(self, name: str, position: int = 3000) -> None:
        """Flip a bit as a bad disk would: size and modification time stay."""
        stat = (self.data / name).stat()
        with open(self.data / name, "r+b") as handle:
            handle.seek(position)
            byte = handle.read(1)[0]
            handle.seek(position)
            handle.write(bytes([byte ^ 1]))
        os.utime(self.data / name, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with FakeHub(REPO, {f"datasets/{name}": content for name, content in CONTENT.items()}) as hub:
        yield Place(tmp_path, hub)


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.syspath_prepend(str(ROOT / "data"))
    module = importlib.import_module("cached_challenge_fineweb")
    monkeypatch.setattr(module, "DATA", tmp_path)
    monkeypatch.setattr(module, "MANIFEST", tmp_path / "manifest.json")
    return module


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "did not happen within 30 s"
        time.sleep(0.02)


ALL = [*TOKENIZER, VAL, *TRAIN]


# --- A hub without faults -------------------------------------------------------------------------


@pytest.mark.slow
def test_files_come_in_the_order_training_needs_them_and_a_second_run_moves_no_byte(
    place: Place,
) -> None:
    done = place.run("--variant", "sp1024", "--with-docs", "--jobs", "1")
    assert place.transferred() == ["manifest.json", *ALL, *DOCS]
    place.holds_exactly(["manifest.json", *ALL, *DOCS])
    assert "\r" not in done.stdout and "MB/s" in done.stdout, (
        "plain lines with a rate, away from a terminal"
    )
    folder, model = (
        shlex.quote(str(place.data / name)).encode("ascii", "backslashreplace").decode()
        for name in (f"datasets/{NAME}", TOKENIZER[0])
    )
    assert done.stdout.endswith(f"DATA_PATH={folder} TOKENIZER_PATH={model} VOCAB_SIZE=1024\n")
    check = ["sha256sum", "-c", "tokenizer.sha256"]
    assert not subprocess.run(
        check, cwd=place.data / "datasets" / NAME, stdout=subprocess.DEVNULL
    ).returncode
    assert not list(place.data.rglob("*.partial"))

    place.damage(TRAIN[2])  # a run that read the files again would see this
    place.run("--with-docs")
    assert place.transferred() == [] and len(place.hub.requests) == 3
    assert TRAIN[2] in place.run("--verify", code=1).stderr
    place.run("--with-docs")
    assert place.transferred() == [TRAIN[2]], (
        "what --verify has found to be damaged is fetched again"
    )
    place.holds_exactly(ALL)


def test_the_number_of_shards_and_the_wrong_ones(place: Place) -> None:
    place.run("--train-shards", "3", "2")
    for arguments in (["--train-shards", "6"], ["--variant", "sp4096"]):
        stderr = place.run(*arguments, code=2).stderr
        assert stderr.startswith("error: ") and stderr.count("\n") == 1 and arguments[1] in stderr
    assert "did you mean sp1024?" in place.run("--variant", "fineweb10B_SP1024", code=2).stderr
    stderr = place.run(code=1, HF_ENDPOINT="hub.example").stderr
    assert stderr == (
        "error: HF_ENDPOINT=hub.example: an address is expected; set https://hub.example\n"
    )
    assert place.transferred() == []
    place.holds_exactly([*TOKENIZER, VAL, *TRAIN[:2]])


def test_another_repository_and_folder_and_a_token_that_stays_with_the_hub(tmp_path: Path) -> None:
    env = {
        "MATCHED_FINEWEB_REPO_ID": "me/mine",
        "MATCHED_FINEWEB_REMOTE_ROOT_PREFIX": "a/b",
        "HF_TOKEN": "hf_secret",
    }
    files = {f"a/b/{name}": content for name, content in CONTENT.items()}
    with FakeHub("me/mine", files, api_statuses=[503]) as hub:
        place = Place(tmp_path, hub, prefix="a/b/")
        place.run("0", **env)
        place.holds_exactly([*TOKENIZER, VAL])
        assert hub.tokens == {"127.0.0.1": {"Bearer hf_secret"}, "localhost": {None}}
        stderr = place.run("0", code=1, **{**env, "MATCHED_FINEWEB_REPO_ID": "me/nobodys"}).stderr
        assert "me/nobodys" in stderr and "401" in stderr and stderr.count("\n") == 1


def test_a_terminal_sees_a_bar(place: Place) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    with subprocess.Popen(place.command(), env=place.env, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        seen, piece = b"", b"-"
        while piece:
            try:
                piece = os.read(ours, 1 << 16)
            except OSError:  # how Linux says that the other end is closed
                piece = b""
            seen += piece
    os.close(ours)
    assert process.returncode == 0 and b"\r" in seen and b"%|" in seen and b"B/s]" in seen, seen


def test_manifest_keeps_own_data_sets_and_can_be_left_alone(place: Place) -> None:
    own = {
        "datasets": [{"name": "docs_sp300", "tokenizer_name": "mine"}],
        "tokenizers": [{"name": "mine"}],
    }
    (place.data / "manifest.json").write_text(json.dumps(own))
    place.run("0")
    merged = json.loads((place.data / "manifest.json").read_text())
    for kind in own:
        assert len(merged[kind]) == 3 and all(
            entry in merged[kind] for entry in own[kind] + manifest()[kind]
        )
    stderr = place.run("--variant", "sp4096", code=2).stderr
    assert "lists sp1024, byte260;" in stderr, "what can be downloaded, and nothing else"
    assert place.transferred() == []

    changed = manifest()
    changed["datasets"][0]["stats"] = {"files_train": 2, "files_val": 1}
    (place.data / "manifest.json").write_text(json.dumps(changed))
    place.run("--skip-manifest")
    assert sorted(place.transferred()) == TRAIN[:2]


def test_a_data_set_made_here_is_not_touched(place: Place) -> None:
    own = place.data / TRAIN[0]
    own.parent.mkdir(parents=True)
    own.write_bytes(CONTENT[TRAIN[1]])
    (own.parent / "export.json").write_text("{}")
    assert "tokenize_docs.py" in place.run(code=1).stderr
    assert own.read_bytes() == CONTENT[TRAIN[1]] and place.hub.requests == []


@pytest.mark.row("a repository that names paths elsewhere", "nothing is written there")
def test_nothing_is_written_elsewhere(place: Place) -> None:
    """A manifest may name what it likes: data/producer.py, and the next tool would have run it."""
    named = manifest()
    named["tokenizers"][0]["model_path"] = "producer.py"
    place.hub.files["datasets/manifest.json"] = json.dumps(named).encode()
    place.hub.files["datasets/producer.py"] = b"print('the next tool runs this')" * 100
    before = {path: path.read_bytes() for path in place.data.glob("*.py")}
    stderr = place.run(code=1).stderr
    assert stderr.startswith("error: ") and stderr.count("\n") == 1 and "'producer.py'" in stderr
    assert place.transferred() == ["manifest.json"]
    assert {path: path.read_bytes() for path in place.data.parent.rglob("*.py")} == before


@pytest.mark.parametrize(
    "model_path, data_set",
    [
        ("tokenizers/producer.py", "sp1024"),
        ("tokenizers/../producer.py", "sp1024"),
        ("tokenizers/../../a.model", "sp1024"),
        ("/tmp/a.model", "sp1024"),
        ("tokenizers/.a.model", "sp1024"),
        ("tokenizers/a.model\n", "sp1024"),
        ("datasets/x/export.json", "sp1024"),
        ("manifest.json", "sp1024"),
        ("tokenizers/a.model", "x/../../../x"),
    ],
)
@pytest.mark.row(
    "a repository that names files of another kind (..)", "not fetched; nothing is replaced"
)
def test_only_shards_and_tokenizers_are_fetched(tool, model_path: str, data_set: str) -> None:
    stats = {"files_train": 1, "files_val": 1}
    named = {
        "datasets": [{"name": f"fineweb10B_{data_set}", "tokenizer_name": "m", "stats": stats}],
        "tokenizers": [{"name": "m", "model_path": model_path}],
    }
    tool.MANIFEST.write_text(json.dumps(named))
    with pytest.raises(tool.DataError, match="no shard and no tokenizer"):
        tool.wanted_names(data_set, 1)
    named["tokenizers"][0]["model_path"] = "tokenizers/a_1024.model"
    named["datasets"][0]["name"] = "fineweb10B_sp1024"
    tool.MANIFEST.write_text(json.dumps(named))
    assert len(tool.wanted_names("sp1024", 1)[0]) == 3


@pytest.mark.slow
def test_own_tokenizers_and_documents_are_not_replaced(place: Place) -> None:
    own = [place.data / TOKENIZER[0], place.data / DOCS[0]]
    for path in own:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"own")
    lines = place.run("--with-docs", "1", code=1).stderr.splitlines()
    assert len(lines) == 3 and all("not fetched here; move it away" in line for line in lines[1:])
    assert [path.read_bytes() for path in own] == [b"own", b"own"]
    place.run("--verify", "--with-docs", "1", code=1)  # which must not make them ours
    place.run("--with-docs", "1", code=1)
    assert [path.read_bytes() for path in own] == [b"own", b"own"]
    for path in own:
        path.rename(path.with_suffix(".own"))
    place.run("--with-docs", "1")
    place.holds_exactly([*TOKENIZER, *DOCS, VAL, TRAIN[0]])
    place.damage(TOKENIZER[0])
    place.run("--verify", code=1)
    place.run("1")
    place.holds_exactly([*TOKENIZER, *DOCS, VAL, TRAIN[0]])


def test_without_a_network_there_is_a_remedy(place: Place) -> None:
    for env in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:1"}):
        stderr = place.run("--retries", "0", code=1, **env).stderr
        assert stderr.startswith("error: ") and stderr.rstrip("'\n").endswith("data/quickstart.py")
        assert stderr.count("\n") == 1


# --- While it runs --------------------------------------------------------------------------------


def test_several_at_once_and_word_to_training(place: Place) -> None:
    go = threading.Event()
    place.plant(**{word: [Fault("wait", 300_000, go)] for word in ("val", "t0", "t1")})
    process = place.start("--train-shards", "3")
    until(lambda: {VAL, *TRAIN[:2]} <= set(place.transferred()) and place.producing.exists())
    assert all(place.transferred().count(name) == 1 for name in (VAL, *TRAIN[:2])), (
        "one after the other, by giving up"
    )
    word = json.loads(place.producing.read_text())
    assert (word["pid"], word["shards_promised"], word["val_complete"]) == (process.pid, 3, False)
    until(
        lambda: json.loads(place.producing.read_text())["progress"] > 1_000_000
    )  # of what waits, a part is there
    until(lambda: (place.data / TRAIN[2]).exists())
    before = json.loads(place.producing.read_text())["progress"]
    until(lambda: json.loads(place.producing.read_text())["progress"] > before)  # though all wait
    assert (place.data / "manifest.json").exists()
    second = subprocess.run(place.command(), env=place.env, text=True, capture_output=True)
    assert second.returncode == 1 and "another download" in second.stderr
    assert place.producing.exists(), "the second one must not take the first one's word away"
    go.set()
    assert process.communicate()[1] == "" and process.returncode == 0
    assert not place.producing.exists()
    place.holds_exactly([*TOKENIZER, VAL, *TRAIN[:3]])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_goes_on_inside_the_file(place: Place, number: int) -> None:
    place.plant(t1=[Fault("wait", 2 * CHUNK + 5, threading.Event())])
    process = place.start()
    partial = place.data / f"datasets/{NAME}/.fineweb_train_000001.bin.partial"
    until(
        lambda: partial.exists() and partial.stat().st_size > 2 * CHUNK - 10_000
    )  # less what Python still buffers
    until(lambda: all((place.data / name).exists() for name in ALL if name != TRAIN[1]))
    process.send_signal(number)
    _, stderr = process.communicate()
    assert (
        process.returncode == (-9 if number == signal.SIGKILL else 130)
        and "Traceback" not in stderr
    )
    word = json.loads(place.producing.read_text())
    assert word.get("error") == (
        None if number == signal.SIGKILL else "its producer was interrupted"
    )
    place.holds_exactly([name for name in ALL if name != TRAIN[1]])
    kept = partial.stat().st_size
    place.run()
    assert place.transferred() == [TRAIN[1]] and place.hub.transfers[0].start == kept
    place.holds_exactly(ALL)


@pytest.mark.row("a download that is killed", "the set is incomplete; .producing says what goes on")
def test_what_a_killed_download_leaves_says_what_to_run(place: Place) -> None:
    """Also that validation is complete. The command works, in any folder."""
    place.plant(t1=[Fault("wait", 2 * CHUNK + 5, threading.Event())])
    process = place.start("--train-shards", "2")
    until(
        lambda: place.producing.exists() and json.loads(place.producing.read_text())["val_complete"]
    )
    assert all((place.data / name).exists() for name in (VAL, TOKENIZER[0]))
    process.kill()
    process.communicate()
    word = json.loads(place.producing.read_text())
    assert "error" not in word and place.producing.exists()
    left = subprocess.run(
        ["sh", "-c", word["command"]], cwd="/", env=place.env, capture_output=True, text=True
    )
    assert left.returncode == 0, left.stderr
    assert not place.producing.exists()
    place.holds_exactly([*TOKENIZER, VAL, *TRAIN[:2]])


def test_a_set_is_complete_with_the_shards_that_were_asked_for(place: Place) -> None:
    """Also after a download of more has ended early, and where the hub is silent."""
    place.plant(t1=Fault("status", 404))
    place.run("--train-shards", "2", code=1)
    assert place.last_words().startswith("its producer failed: ")
    silent = {"HF_ENDPOINT": "http://127.0.0.1:1"}
    assert "run again without --verify" in place.run("--verify", "1", code=1).stderr
    place.run("1", "--retries", "0", **silent)
    assert not place.producing.exists()


@pytest.mark.row("a hub that swaps the tokenizer under older shards", "refused in one line")
@pytest.mark.parametrize("record", ["download record", "tokenizer.sha256"])
def test_another_tokenizer_under_older_shards_is_refused(place: Place, record: str) -> None:
    place.run("2")
    held = {name: (place.data / name).read_bytes() for name in [*TOKENIZER, VAL, *TRAIN[:2]]}
    place.hub.files[f"datasets/{TOKENIZER[0]}"] = bytes(range(256)) * 31
    folder = place.data / "datasets" / NAME
    if record == "download record":
        (folder / "tokenizer.sha256").unlink()
    else:
        (folder.parent / ".download.json").unlink()
    stderr = place.run("3", code=1).stderr
    assert "has another tokenizer now than the one that made the 3 shards" in stderr
    assert stderr.count("\n") == 1 and place.transferred() in ([], ["manifest.json"])
    assert {name: (place.data / name).read_bytes() for name in held} == held
    assert not (place.data / TRAIN[2]).exists() and not place.producing.exists()
    shutil.rmtree(folder)  # as the line says
    if record == "tokenizer.sha256":  # a tokenizer that nobody knows is never replaced
        (place.data / TOKENIZER[0]).unlink()
    place.run("1")
    assert (place.data / TOKENIZER[0]).read_bytes() == bytes(range(256)) * 31


# --- Faults ---------------------------------------------------------------------------------------


def test_faults_that_pass_end_in_a_complete_set(place: Place) -> None:
    place.plant(
        val=[Fault("flip", 500_000)],
        t0=[Fault("status", 500)],
        t1=[Fault("cut", 2 * CHUNK + 9)],
        t2=[Fault("cut", CHUNK + 9), Fault("whole")],
        t3=[Fault("short", 1000)],
        t4=[Fault("long", 1000)],
    )
    place.hub.faults["datasets/manifest.json"] = [Fault("status", 503)]
    stderr = place.run().stderr
    place.holds_exactly(ALL)
    starts = {
        name: [t.start for t in place.hub.transfers_of(f"datasets/{name}")]
        for name in (VAL, *TRAIN)
    }
    assert starts == {
        VAL: [0, 0],
        TRAIN[0]: [0, 0],
        TRAIN[1]: [0, 2 * CHUNK],
        TRAIN[2]: [0, 0],
        TRAIN[3]: [0, SIZE - 1000],
        TRAIN[4]: [0, 0],
    }
    assert f"{VAL}: of what came, its checksum is wrong; trying again" in stderr
    assert f"{TRAIN[0]}: the hub answered 500; trying again" in stderr
    assert not list(place.data.rglob("*.partial"))


def test_faults_that_stay_are_named_and_the_rest_comes(place: Place) -> None:
    place.plant(
        t0=Fault("status", 500),
        t1=Fault("cut", 0),
        t2=Fault("flip", 2000),
        t3=Fault("short", 1000),
        t4=Fault("long", 1000),
    )
    stderr = place.run("--retries", "0", code=1).stderr
    assert [line.split(":")[0].strip() for line in stderr.splitlines()[1:]] == TRAIN
    assert "5 of 8 files" in stderr and "answered 500" in stderr and "checksum" in stderr
    assert place.last_words().startswith(
        f"its producer failed: {place.data}: 5 of 8 files are missing or wrong: {TRAIN[0]}: "
    )
    place.holds_exactly([*TOKENIZER, VAL])
    place.hub.lasting.clear()
    place.run()
    place.holds_exactly(ALL)
    assert set(place.transferred()) == set(TRAIN), "what was right is not fetched again"


def test_files_that_are_missing_or_no_shards_on_the_hub(place: Place) -> None:
    del place.hub.files[f"datasets/{TRAIN[3]}"]
    place.hub.files[f"datasets/{TRAIN[4]}"] = (
        b"<html>" + CONTENT[TRAIN[4]][6:]
    )  # rightly stored, and not a shard
    place.plant(t1=Fault("status", 404))
    lines = place.run("--retries", "1", code=1).stderr.splitlines()
    assert [line.split(":")[0].strip() for line in lines if line.startswith("  ")] == [
        TRAIN[1],
        TRAIN[3],
        TRAIN[4],
    ]
    assert "not on the hub" in lines[-2] and "header" in lines[-1]
    place.holds_exactly([*TOKENIZER, VAL, TRAIN[0], TRAIN[2]])
    assert len(place.hub.transfers_of(f"datasets/{TRAIN[1]}")) == 1, "a refusal is not asked again"
    assert place.run("--variant", "byte260", code=1).stderr.count("not on the hub") == SHARDS + 2


def test_the_hub_is_asked_ever_more_slowly_and_new_ground_counts(
    tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(tool.time, "sleep", waits.append)
    reached = iter([0, *[5] * 8, *[9] * 40])

    def fail() -> None:
        raise ConnectionResetError("cut")

    with pytest.raises(ConnectionResetError):
        tool.patiently("a file", fail, retries=7, reached=lambda: next(reached))
    assert waits == [1, 2, 4, 8, 1, 2, 4, 8, 16, 32, 60], (
        "the fifth fault came further than the fourth"
    )


def test_a_full_disk_is_seen_before_anything_is_fetched(place: Place) -> None:
    small = (
        "import shutil, types; "
        "shutil.disk_usage = lambda path: types.SimpleNamespace(free=10_000_000)"
    )
    stderr = place.run(code=1, first=small).stderr
    assert "15.8MB are needed, 10.0MB are free" in stderr and stderr.count("\n") == 1
    assert place.transferred() == ["manifest.json"]
    place.run("--train-shards", "3", first=small)
    place.holds_exactly([*TOKENIZER, VAL, *TRAIN[:3]])


def test_a_disk_that_takes_no_more_ends_the_run(place: Place) -> None:
    limit = 2 * CHUNK + 100  # bytes a file, so that the shards do not fit and the rest does
    full = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))"
    stderr = place.run("--train-shards", "2", code=1, first=full).stderr
    assert all(f"{name}: OSError: [Errno " in stderr for name in TRAIN[:2])
    assert sorted(place.transferred()) == sorted(["manifest.json", *TOKENIZER, VAL, *TRAIN[:2]]), (
        "no second try"
    )
    place.holds_exactly([*TOKENIZER, VAL])
    place.run("--train-shards", "2")
    assert [transfer.start for transfer in place.hub.transfers] == [limit, limit]
    place.holds_exactly([*TOKENIZER, VAL, *TRAIN[:2]])


# --- What is on disk ------------------------------------------------------------------------------


def test_files_from_elsewhere_are_read_once_and_the_wrong_ones_replaced(place: Place) -> None:
    for name in ALL:
        (place.data / name).parent.mkdir(parents=True, exist_ok=True)
        (place.data / name).write_bytes(CONTENT[name])
    place.damage(TRAIN[1])
    os.truncate(place.data / TRAIN[2], 0)
    os.truncate(place.data / TRAIN[3], 2 * CHUNK)
    (place.data / TRAIN[4]).write_bytes(CONTENT[TRAIN[4]] + b"\0\0")
    (place.data / f"datasets/{NAME}/.fineweb_train_000004.bin.partial").write_bytes(bytes(SIZE + 1))

    def is_gone(transfer: Transfer) -> None:
        assert not (place.data / transfer.path.removeprefix(place.prefix)).exists(), transfer.path

    place.hub.observers[:] = [
        is_gone
    ]  # the files begin wrong: they may not wait for their replacement
    place.run()
    assert sorted(place.transferred()) == [
        "manifest.json" if name == "manifest.json" else name
        for name in sorted([*TRAIN[1:], "manifest.json"])
    ]
    place.holds_exactly(ALL)
    place.damage(TRAIN[0])
    place.run()
    assert place.transferred() == [], "read once"


def test_verify_with_and_without_the_hub(place: Place) -> None:
    place.run()
    faults = {
        TRAIN[0]: lambda path: place.damage(TRAIN[0]),
        TRAIN[1]: lambda path: os.truncate(path, SIZE - 2),
        TRAIN[2]: Path.unlink,
        VAL: lambda path: path.write_bytes(bytes(len(CONTENT[VAL]))),
        TOKENIZER[0]: lambda path: place.damage(TOKENIZER[0]),
    }
    offline = {"HF_HUB_OFFLINE": "1"}
    unreachable = {"HF_ENDPOINT": "http://127.0.0.1:1"}
    place.hub.requests.clear()
    assert "as far as is known here" in place.run("--verify").stdout
    assert place.hub.requests == []
    place.run("--retries", "0", **unreachable)  # nothing to do, so no hub is needed
    place.hub.observers.clear()
    for name, fault in faults.items():
        fault(place.data / name)
    for env in (offline, unreachable, {}):  # thrice: the first must not make the second forget
        lines = place.run("--verify", code=1, **env).stderr.splitlines()
        assert [line.split(":")[0].strip() for line in lines[1:]] == [
            name for name in ALL if name in faults
        ]
        assert place.transferred() == []


@pytest.mark.row("--verify with nothing downloaded", "one line says so; no hub is asked")
def test_verify_with_nothing_there(place: Place) -> None:
    stderr = place.run("--verify", code=1).stderr
    folder = place.data / "datasets" / NAME
    words = f"error: {folder}: nothing was downloaded here; run without --verify\n"
    assert stderr == words.encode("ascii", "backslashreplace").decode()
    assert place.hub.requests == [] and not (place.data / "datasets").exists()


def test_verify_without_hub_and_record_goes_by_the_headers(place: Place) -> None:
    place.run("--train-shards", "2")
    (place.data / "datasets" / ".download.json").unlink()
    place.hub.observers.clear()
    said = place.run("--verify", "2").stdout
    assert "note: 5 of 5 files have no checksum" in said
    os.truncate(place.data / TRAIN[1], SIZE - 2)
    stderr = place.run("--verify", "3", code=1, HF_HUB_OFFLINE="1").stderr
    assert (
        f"{TRAIN[1]}: " in stderr and f"{TRAIN[2]}: missing" in stderr and "2 of 6 files" in stderr
    )
