"""The download tool with the real hub client, against a local hub that fails on purpose."""

import contextlib
import functools
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import cached_challenge_fineweb
import cli
import numpy as np
import pytest
from fake_hub import FakeHub, Fault
from huggingface_hub import HfApi
from running import ROOT, started, until

REPO, NAME, SHARDS = "willdepueoai/parameter-golf", "fineweb10B_sp1024", 5
VAL = f"datasets/{NAME}/fineweb_val_000000.bin"
TRAIN = [f"datasets/{NAME}/fineweb_train_{number:06d}.bin" for number in range(SHARDS)]
TOKENIZER = ["tokenizers/fineweb_1024_bpe.model", "tokenizers/fineweb_1024_bpe.vocab"]
DOCS = ["docs_selected.jsonl", "docs_selected.source_manifest.json"]
ALL = [*TOKENIZER, VAL, *TRAIN]


def shard(num_tokens: int, seed: int) -> bytes:
    tokens = np.random.default_rng(seed).integers(0, 1024, num_tokens).astype("<u2")
    header = np.array([20240520, 1, num_tokens], "<i4").tobytes()
    return header.ljust(1024, b"\0") + tokens.tobytes()


STATS = {"files_train": SHARDS, "files_val": 1}
MANIFEST = {
    "datasets": [{"name": NAME, "tokenizer_name": "bpe", "stats": STATS}],
    "tokenizers": [{"name": "bpe", "model_path": TOKENIZER[0], "vocab_path": TOKENIZER[1]}],
}
CONTENT = {
    "manifest.json": json.dumps(MANIFEST).encode(),
    TOKENIZER[0]: bytes(range(256)) * 30,
    TOKENIZER[1]: b"<unk>\t0\n",
    VAL: shard(40_000, 8),
    DOCS[0]: b'{"text": "a"}\n' * 2000,
    DOCS[1]: b"{}",
    **{name: shard(150_000, number) for number, name in enumerate(TRAIN)},
    TRAIN[0]: shard(6_000_000, 0),  # longer than what the client writes at once
}


class Place:
    """A repository with the tool in its data/ folder, and the hub that it talks to."""

    def __init__(self, root: Path, hub: FakeHub) -> None:
        self.data, self.hub = root / os.fsdecode(b"caf\xe9") / "data", hub  # not UTF-8
        self.data.mkdir(parents=True)
        for path in (ROOT / "data").glob("*.py"):
            shutil.copy(path, self.data)
        (self.data.parent / "tools").mkdir()
        shutil.copy(ROOT / "tools" / "cli.py", self.data.parent / "tools")
        left_out = ("HF_", "MATCHED_")
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
        self.env |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(root / "home")}
        self.env |= {"HF_HUB_DISABLE_TELEMETRY": "1"}
        self.producing = self.data / "datasets" / NAME / ".producing"

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        tool = self.data / "cached_challenge_fineweb.py"
        return started([sys.executable, tool, *arguments], env=self.env)

    def run(self, *arguments: str, code: int = 0, retries: bool = False, **env: str) -> str:
        """Runs the tool's main in this process; returns what it printed, errors last."""
        self.hub.transfers.clear()
        tool, env, out, err = cached_challenge_fineweb, self.env | env, io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tool, "DATA", self.data)
            patch.setattr(tool, "HfApi", functools.partial(HfApi, endpoint=env["HF_ENDPOINT"]))
            patch.setattr(tool.time, "sleep", lambda seconds: None)
            patch.setattr(sys, "argv", [tool.__file__, *arguments])
            patch.setattr(os, "environ", env)
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                assert (cli.run(tool.main, refused=2) or 0) == code, err.getvalue()
        for thread in threading.enumerate():
            if thread.name.startswith("ThreadPool"):
                thread.join()  # after an error, files that had begun to come still do
        out, err = out.getvalue(), err.getvalue()
        assert (code != 0 or retries) == bool(err), err
        assert code or not self.producing.exists()
        return out + err

    def holds_exactly(self, names: list[str]) -> None:
        for name in names:
            assert (self.data / name).read_bytes() == CONTENT[name], name
        found = {path.name for path in self.data.glob("datasets/*/*.bin")}
        assert found == {Path(name).name for name in names if name.endswith(".bin")}

    def transferred(self) -> list[str]:
        return [transfer.path.removeprefix("datasets/") for transfer in self.hub.transfers]

    def plant(self, name: str, *faults: Fault) -> None:
        self.hub.faults[f"datasets/{name}"] = list(faults)

    def damage(self, name: str) -> None:
        """Flip a bit as a bad disk would: the size stays."""
        content = bytearray((self.data / name).read_bytes())
        content[3000] ^= 1
        (self.data / name).write_bytes(content)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with FakeHub(REPO, {f"datasets/{name}": content for name, content in CONTENT.items()}) as hub:
        yield Place(tmp_path, hub)


def test_files_come_in_the_order_of_training_and_only_once(place: Place) -> None:
    place.run("--jobs", "1", "--train-shards", "3")
    assert place.transferred() == ["manifest.json", *TOKENIZER, VAL, *TRAIN[:3]]
    place.holds_exactly([*TOKENIZER, VAL, *TRAIN[:3]])
    place.run("5", "--with-docs")
    assert sorted(place.transferred()) == sorted(["manifest.json", *TRAIN[3:], *DOCS])
    place.run("--skip-manifest")
    assert place.transferred() == []
    place.holds_exactly([*ALL, *DOCS])


def test_eighty_shards_come_unless_another_number_is_asked_for(place: Place, monkeypatch) -> None:
    entry = MANIFEST["datasets"][0] | {"stats": {"files_train": 195, "files_val": 1}}
    (place.data / "manifest.json").write_text(json.dumps(MANIFEST | {"datasets": [entry]}))
    monkeypatch.setattr(cached_challenge_fineweb, "DATA", place.data)
    for wanted, count in ((None, 80), (3, 3), (195, 195)):
        names, before = cached_challenge_fineweb.wanted_names("sp1024", wanted, place.hub)
        assert sum("_train_" in name for name in names) == len(names) - before == count


@pytest.mark.parametrize("linked", ["data", "data/datasets"])
def test_a_folder_may_be_a_link_to_another_disk(place: Place, linked: str) -> None:
    """The programs as users start them; what they print can be pasted."""
    root, shm = place.data.parent, Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == root.stat().st_dev:
        pytest.skip("needs a second disk")

    def tool(name: str, *arguments: object) -> str:
        command = [sys.executable, f"data/{name}.py", *arguments]
        done = subprocess.run(command, cwd=root, env=place.env, capture_output=True)
        assert done.returncode == 0 and disk not in done.stdout.decode(), done.stdout + done.stderr
        return done.stdout.decode()

    with tempfile.TemporaryDirectory(dir=shm) as disk:
        shutil.copytree(place.data, Path(disk, "data"))
        Path(disk, "data", "datasets").mkdir()
        shutil.rmtree(root / linked, ignore_errors=True)
        (root / linked).symlink_to(Path(disk, linked))
        (root / "own.txt").write_text("\n\n".join(f"Paragraph {i}." for i in range(999)))
        own, model = "data/datasets/own_byte260", "data/tokenizers/own_byte260.json"
        said = tool("cached_challenge_fineweb", "--train-shards", "1")
        assert f"/data/datasets/{NAME}' TOKENIZER_PATH=" in said
        tool("cached_challenge_fineweb", "--verify")
        tool("tokenize_docs", "own.txt", "--bytes", "--name", "own")
        tool("quickstart", "--prepare-only", f"DATA_PATH={own}")
        assert "proved: " in tool("audit", "--tokenizer", model, "--data", own, "--docs", "own.txt")
        for sums in (*place.data.glob("datasets/*/*sha256"), place.producing.parent / "sha256sums"):
            subprocess.run(["sha256sum", "-c", sums.name], cwd=sums.parent, check=True)


def test_training_is_told_while_files_come(place: Place) -> None:
    """.producing changes while nothing comes, says when validation is complete, and goes away."""
    faults = {name: Fault("wait", 1000) for name in (VAL, TRAIN[2])}
    for name, fault in faults.items():
        place.plant(name, fault)
    process = place.start("--jobs", "2")
    try:
        until(lambda: place.producing.exists())
        first = place.producing.read_text()
        assert json.loads(first)["val_complete"] is False
        until(lambda: place.producing.read_text() != first)
        faults[VAL].event.set()
        until(lambda: '"val_complete": true' in place.producing.read_text())
        assert (place.data / VAL).read_bytes() == CONTENT[VAL]
        until(lambda: (place.data / TRAIN[1]).exists())
        second = place.producing.read_text()
        until(lambda: place.producing.read_text() != second)
        assert not (place.data / TRAIN[2]).exists()
    finally:
        for fault in faults.values():
            fault.event.set()
    assert process.wait(60) == 0 and not place.producing.exists()
    place.holds_exactly(ALL)


@pytest.mark.parametrize("is_in_manifest", [True, False])
def test_bytes_of_validation_come_before_training(place: Place, is_in_manifest: bool) -> None:
    """Known from the manifest, or from the hub's list of files."""
    variant = "sp8192_lossless_caps_caseops_v1_reserved"
    name = f"fineweb10B_{variant}"
    tokenizer = f"tokenizers/fineweb_{variant[2:]}.model"
    names = [f"datasets/{name}/fineweb_{n}_000000.bin" for n in ("val", "val_bytes", "train")]
    stats = {"files_train": 1, "files_val": 1}
    entry = {"name": name, "tokenizer_name": "caseops", "stats": stats}
    entry |= {"val_bytes_glob": "/home/x/fineweb_val_bytes_*.bin"} if is_in_manifest else {}
    made_by = {"name": "caseops", "model_path": tokenizer}
    manifest = {"datasets": [entry], "tokenizers": [made_by]}
    files = {name: shard(1000, number) for number, name in enumerate(names)}
    files |= {tokenizer: bytes(range(256)) * 9, "manifest.json": json.dumps(manifest).encode()}
    place.hub.repo = "romeerp/parameter-golf-caseops-v1"
    place.hub.files = {f"datasets/{name}": content for name, content in files.items()}
    place.env["MATCHED_FINEWEB_REPO_ID"] = place.hub.repo
    said = place.run("--variant", variant, "--jobs", "1")
    assert place.transferred() == ["manifest.json", tokenizer, *names]
    assert all((place.data / name).read_bytes() == files[name] for name in names)
    assert " VOCAB_SIZE=8192 " in said
    assert "all 4 files are right" in place.run("--variant", variant, "--verify")
    del place.hub.files[f"datasets/{names[1]}"]
    said = place.run("--variant", variant, code=2 if is_in_manifest else 0)
    assert not is_in_manifest or "fineweb_val_bytes_000000.bin is not on the hub" in said


def test_faults_that_pass_end_in_a_complete_set(place: Place) -> None:
    place.plant(VAL, Fault("status", 503), Fault("cut", 100))
    place.plant(TRAIN[0], Fault("cut", 11_000_000), Fault("cut", 10))
    place.plant(TRAIN[1], Fault("flip", 5000))
    place.producing.parent.mkdir(parents=True)
    partial_of(place, TRAIN[2]).write_bytes(b"not its beginning")
    partial_of(place, TRAIN[3]).write_bytes(b"longer" * 99_999)
    said = place.run("--jobs", "4", retries=True)
    assert said.count("wrong checksum; trying again") == 2
    place.holds_exactly(ALL)
    first = [t for t in place.hub.transfers if t.path.endswith(TRAIN[0])]
    assert [transfer.start for transfer in first] == [0, 10 << 20, 10 << 20]


def partial_of(place: Place, name: str) -> Path:
    return (place.data / name).with_name(f".{Path(name).name}.{NAME}.partial")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_download_continues_each_file(place: Place, number: int) -> None:
    place.plant(TRAIN[0], Fault("wait", 11_000_000), Fault("none"))
    process, partial = place.start("--jobs", "1"), partial_of(place, TRAIN[0])
    until(lambda: partial.is_file() and partial.stat().st_size == 10 << 20)
    process.send_signal(number)
    said = process.communicate(timeout=20)[1]
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert (number == signal.SIGINT) == ("the same command continues where it stopped" in said)
    state = json.loads(place.producing.read_text())
    assert state["command"].endswith("cached_challenge_fineweb.py' --jobs 1")
    assert not (place.data / TRAIN[0]).exists()
    place.run("--jobs", "1")
    assert place.transferred() == ["manifest.json", *TRAIN]
    assert place.hub.transfers[1].start == 10 << 20
    place.holds_exactly(ALL)
    assert not list(place.data.rglob("*.partial")), "nothing is left behind"


def test_a_fault_that_stays_is_named(place: Place) -> None:
    place.plant(TRAIN[1], *[Fault("flip", 5000)] * 2)
    said = place.run("--retries", "1", code=2)
    assert f"{TRAIN[1]}: what came has a wrong checksum; run again" in said
    assert "wrong checksum" in json.loads(place.producing.read_text())["error"]
    assert not (place.data / TRAIN[1]).exists()
    place.run()
    place.holds_exactly(ALL)


WRONG = {  # arguments and settings, and what is said
    "variant": (["--variant", "sp512"], {}, "lists sp1024"),
    "too many shards": (["--train-shards", "9"], {}, "--train-shards 9: sp1024 has 0 to 5"),
    "nothing to verify": (["--verify"], {}, "run without --verify"),
    "gated": ([], {}, "; if it is private or gated, set HF_TOKEN to a token that may read it"),
    "no hub": ([], {"HF_ENDPOINT": "http://127.0.0.1:9"}, "check the network, HF_ENDPOINT and "),
    "a file is missing": ([], {}, f"{TRAIN[2]} is not on the hub"),
    "a path elsewhere": ([], {}, "has '../../secret.bin', which is neither a shard nor a tok"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_and_what_the_hub_cannot_give_are_one_line(place: Place, case: str) -> None:
    arguments, env, words = WRONG[case]
    if case == "a file is missing":
        del place.hub.files[f"datasets/{TRAIN[2]}"]
    elif case == "gated":
        place.plant("manifest.json", Fault("status", 401))
    elif case == "a path elsewhere":
        manifest = CONTENT["manifest.json"].replace(TOKENIZER[0].encode(), b"../../secret.bin")
        place.hub.files["datasets/manifest.json"] = manifest
    said = place.run(*arguments, code=2, **env)
    assert words in said and said.count("\n") == 1, said
    assert not list(place.data.glob("datasets/*/*.bin"))


def test_files_of_others_are_not_replaced(place: Place) -> None:
    own = place.data / TOKENIZER[0]
    own.parent.mkdir()
    own.write_bytes(b"mine")
    assert f"{TOKENIZER[0]}: another file, which was not fetched here" in place.run(code=2)
    assert own.read_bytes() == b"mine"
    own.unlink()
    place.producing.parent.mkdir(exist_ok=True)
    (place.data / TRAIN[0]).write_bytes(CONTENT[TRAIN[0]])  # right: it is kept
    (place.data / TRAIN[1]).write_bytes(CONTENT[TRAIN[0]])  # wrong: it is replaced
    place.run()
    assert TRAIN[0] not in place.transferred() and TRAIN[1] in place.transferred()
    place.holds_exactly(ALL)


def test_verify_finds_damage_and_the_next_run_mends_it(place: Place) -> None:
    place.run()
    dead = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    assert "all 8 files are right" in place.run("--verify", **dead)
    place.damage(TRAIN[1])
    (place.data / TRAIN[2]).unlink()
    place.damage(TOKENIZER[0])
    said = place.run("--verify", code=2, **dead)
    names = ["../../" + TOKENIZER[0], Path(TRAIN[1]).name, Path(TRAIN[2]).name]
    assert f"missing or wrong: {', '.join(names)}; run without --verify" in said
    place.run()
    place.holds_exactly(ALL)
    place.run("--verify", **dead)
    place.hub.files[f"datasets/{TOKENIZER[0]}"] = bytes(range(256))[::-1] * 30
    assert "made with another tokenizer than the repository has now" in place.run(code=2)
    place.holds_exactly(ALL)
