"""Tests of the download program: the real hub client talks to a local hub that fails on purpose.

fake_hub.py is that hub.
"""

import contextlib
import errno
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
import huggingface_hub
import numpy as np
import pytest
from fake_hub import FakeHub, Fault
from huggingface_hub import HfApi
from running import ROOT, start_process, wait_until

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


class Checkout:
    """A copy of the repository's data/ folder, and the hub from which its program downloads."""

    def __init__(self, root: Path, hub: FakeHub) -> None:
        self.data, self.hub = root / os.fsdecode(b"caf\xe9") / "data", hub  # not UTF-8
        self.data.mkdir(parents=True)
        for path in (ROOT / "data").glob("*.py"):
            shutil.copy(path, self.data)
        (self.data.parent / "tools").mkdir()
        shutil.copy(ROOT / "tools" / "cli.py", self.data.parent / "tools")
        not_inherited = ("HF_", "MATCHED_")
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(not_inherited)}
        self.env |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(root / "home")}
        self.env |= {"HF_HUB_DISABLE_TELEMETRY": "1"}
        self.producing = self.data / "datasets" / NAME / ".producing"

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        tool = self.data / "cached_challenge_fineweb.py"
        return start_process([sys.executable, tool, *arguments], env=self.env)

    def run(self, *arguments: str, code: int = 0, retries: bool = False, **env: str) -> str:
        """Run the program's main in this process; return stdout and stderr, joined.

        Asserts the exit code, and that stderr is empty unless an error or retries are expected.
        """
        self.hub.transfers.clear()
        tool, env, out, err = cached_challenge_fineweb, self.env | env, io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tool, "DATA", self.data)
            patch.setattr(
                huggingface_hub, "HfApi", functools.partial(HfApi, endpoint=env["HF_ENDPOINT"])
            )
            patch.setattr(tool.time, "sleep", lambda seconds: None)
            patch.setattr(sys, "argv", [tool.__file__, *arguments])
            patch.setattr(os, "environ", env)
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                found = cli.run(tool.main, refused=2) or 0
            for thread in threading.enumerate():
                if thread.name.startswith("ThreadPool"):
                    # After an error, downloads that have begun go on. Afterwards `tool.DATA` is the
                    # repository's folder again.
                    thread.join()
        assert found == code, err.getvalue()
        out, err = out.getvalue(), err.getvalue()
        assert (code != 0 or retries) == bool(err), err
        assert code or not self.producing.exists()
        return out + err

    def assert_holds_exactly(self, names: list[str]) -> None:
        """Assert that these files have the hub's content, and that there are no other shards."""
        for name in names:
            assert (self.data / name).read_bytes() == CONTENT[name], name
        found = {path.name for path in self.data.glob("datasets/*/*.bin")}
        assert found == {Path(name).name for name in names if name.endswith(".bin")}

    def transferred_files(self) -> list[str]:
        """Return the files that the hub has sent since the last `run` began, in order."""
        return [transfer.path.removeprefix("datasets/") for transfer in self.hub.transfers]

    def plant_faults(self, name: str, *faults: Fault) -> None:
        """Let the next requests for a file fail, one fault per request."""
        self.hub.faults[f"datasets/{name}"] = list(faults)

    def damage(self, name: str) -> None:
        """Flip a bit of a file without changing its size, as a bad disk does."""
        content = bytearray((self.data / name).read_bytes())
        content[3000] ^= 1
        (self.data / name).write_bytes(content)


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    with FakeHub(REPO, {f"datasets/{name}": content for name, content in CONTENT.items()}) as hub:
        yield Checkout(tmp_path, hub)


def test_files_are_downloaded_in_the_order_of_training_and_only_once(checkout: Checkout) -> None:
    checkout.run("--jobs", "1", "--train-shards", "3")
    assert checkout.transferred_files() == ["manifest.json", *TOKENIZER, VAL, *TRAIN[:3]]
    checkout.assert_holds_exactly([*TOKENIZER, VAL, *TRAIN[:3]])
    checkout.run("5", "--with-docs")
    assert sorted(checkout.transferred_files()) == sorted(["manifest.json", *TRAIN[3:], *DOCS])
    checkout.run("--skip-manifest")
    assert checkout.transferred_files() == []
    checkout.assert_holds_exactly([*ALL, *DOCS])


def test_the_default_is_eighty_training_shards(checkout: Checkout, monkeypatch) -> None:
    entry = MANIFEST["datasets"][0] | {"stats": {"files_train": 195, "files_val": 1}}
    (checkout.data / "manifest.json").write_text(json.dumps(MANIFEST | {"datasets": [entry]}))
    monkeypatch.setattr(cached_challenge_fineweb, "DATA", checkout.data)
    for wanted, count in ((None, 80), (3, 3), (195, 195)):
        names, before = cached_challenge_fineweb.list_wanted_files("sp1024", wanted, checkout.hub)
        assert sum("_train_" in name for name in names) == len(names) - before == count


@pytest.mark.parametrize("linked", ["data", "data/datasets"])
def test_a_folder_may_be_a_link_to_another_disk(checkout: Checkout, linked: str) -> None:
    """Users start the programs in this way. The commands that they print can be pasted."""
    root, shm = checkout.data.parent, Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == root.stat().st_dev:
        pytest.skip("needs a second disk")

    def tool(name: str, *arguments: object) -> str:
        command = [sys.executable, f"data/{name}.py", *arguments]
        done = subprocess.run(command, cwd=root, env=checkout.env, capture_output=True)
        assert done.returncode == 0 and disk not in done.stdout.decode(), done.stdout + done.stderr
        return done.stdout.decode()

    with tempfile.TemporaryDirectory(dir=shm) as disk:
        shutil.copytree(checkout.data, Path(disk, "data"))
        Path(disk, "data", "datasets").mkdir()
        shutil.rmtree(root / linked, ignore_errors=True)
        (root / linked).symlink_to(Path(disk, linked))
        (root / "own.txt").write_text("\n\n".join(f"Paragraph {i}." for i in range(999)))
        own, model = "data/datasets/own_byte260", "data/tokenizers/own_byte260.json"
        output = tool("cached_challenge_fineweb", "--train-shards", "1")
        assert f"/data/datasets/{NAME}' TOKENIZER_PATH=" in output
        tool("cached_challenge_fineweb", "--verify")
        tool("tokenize_docs", "own.txt", "--bytes", "--name", "own")
        tool("quickstart", "--prepare-only", f"DATA_PATH={own}")
        assert "proved: " in tool("audit", "--tokenizer", model, "--data", own, "--docs", "own.txt")
        for sums in (
            *checkout.data.glob("datasets/*/*sha256"),
            checkout.producing.parent / "sha256sums",
        ):
            subprocess.run(["sha256sum", "-c", sums.name], cwd=sums.parent, check=True)


def test_producing_file_tells_training_that_files_are_being_downloaded(checkout: Checkout) -> None:
    """While a download waits, .producing changes. It says when validation is complete.

    It is removed at the end.
    """
    faults = {name: Fault("wait", 1000) for name in (VAL, TRAIN[2])}
    for name, fault in faults.items():
        checkout.plant_faults(name, fault)
    process = checkout.start("--jobs", "2")
    try:
        wait_until(lambda: checkout.producing.exists())
        first = checkout.producing.read_text()
        assert json.loads(first)["val_complete"] is False
        wait_until(lambda: checkout.producing.read_text() != first)
        faults[VAL].event.set()
        wait_until(lambda: '"val_complete": true' in checkout.producing.read_text())
        assert (checkout.data / VAL).read_bytes() == CONTENT[VAL]
        wait_until(lambda: (checkout.data / TRAIN[1]).exists())
        second = checkout.producing.read_text()
        wait_until(lambda: checkout.producing.read_text() != second)
        assert not (checkout.data / TRAIN[2]).exists()
    finally:
        for fault in faults.values():
            fault.event.set()
    assert process.wait(60) == 0 and not checkout.producing.exists()
    checkout.assert_holds_exactly(ALL)


@pytest.mark.parametrize("is_in_manifest", [True, False])
def test_validation_byte_counts_are_downloaded_before_training_shards(
    checkout: Checkout, is_in_manifest: bool
) -> None:
    """The program learns of these files from the manifest, or from the hub's list of files."""
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
    checkout.hub.repo = "romeerp/parameter-golf-caseops-v1"
    checkout.hub.files = {f"datasets/{name}": content for name, content in files.items()}
    checkout.env["MATCHED_FINEWEB_REPO_ID"] = checkout.hub.repo
    output = checkout.run("--variant", variant, "--jobs", "1")
    assert checkout.transferred_files() == ["manifest.json", tokenizer, *names]
    assert all((checkout.data / name).read_bytes() == files[name] for name in names)
    assert " VOCAB_SIZE=8192 " in output
    assert "all 4 files match their checksums" in checkout.run("--variant", variant, "--verify")
    del checkout.hub.files[f"datasets/{names[1]}"]
    output = checkout.run("--variant", variant, code=2 if is_in_manifest else 0)
    assert not is_in_manifest or "fineweb_val_bytes_000000.bin is not on the hub" in output


def test_download_is_complete_after_faults_that_pass(checkout: Checkout) -> None:
    checkout.plant_faults(VAL, Fault("status", 503), Fault("cut", 100))
    checkout.plant_faults(TRAIN[0], Fault("cut", 11_000_000), Fault("cut", 10))
    checkout.plant_faults(TRAIN[1], Fault("flip", 5000))
    checkout.producing.parent.mkdir(parents=True)
    partial_path(checkout, TRAIN[2]).write_bytes(b"not its beginning")
    partial_path(checkout, TRAIN[3]).write_bytes(b"longer" * 99_999)
    output = checkout.run("--jobs", "4", retries=True)
    assert output.count("wrong checksum; trying again") == 2
    checkout.assert_holds_exactly(ALL)
    first = [t for t in checkout.hub.transfers if t.path.endswith(TRAIN[0])]
    assert [transfer.start for transfer in first] == [0, 10 << 20, 10 << 20]


def partial_path(checkout: Checkout, name: str) -> Path:
    return (checkout.data / name).with_name(f".{Path(name).name}.{NAME}.partial")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_download_continues_each_file(checkout: Checkout, number: int) -> None:
    checkout.plant_faults(TRAIN[0], Fault("wait", 11_000_000), Fault("none"))
    process, partial = checkout.start("--jobs", "1"), partial_path(checkout, TRAIN[0])
    wait_until(lambda: partial.is_file() and partial.stat().st_size == 10 << 20)
    process.send_signal(number)
    output = process.communicate(timeout=20)[1]
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert (number == signal.SIGINT) == (
        "run the same command again to continue where it stopped" in output
    )
    state = json.loads(checkout.producing.read_text())
    assert state["command"].endswith("cached_challenge_fineweb.py' --jobs 1")
    assert not (checkout.data / TRAIN[0]).exists()
    checkout.run("--jobs", "1")
    assert checkout.transferred_files() == ["manifest.json", *TRAIN]
    assert checkout.hub.transfers[1].start == 10 << 20
    checkout.assert_holds_exactly(ALL)
    assert not list(checkout.data.rglob("*.partial")), "a partial file is left over"


def test_a_fault_that_does_not_pass_is_reported(checkout: Checkout) -> None:
    checkout.plant_faults(TRAIN[1], *[Fault("flip", 5000)] * 2)
    output = checkout.run("--retries", "1", code=2)
    assert (
        f"{TRAIN[1]}: the downloaded file has a wrong checksum; run the same command again"
        in output
    )
    assert "wrong checksum" in json.loads(checkout.producing.read_text())["error"]
    assert not (checkout.data / TRAIN[1]).exists()
    checkout.run()
    checkout.assert_holds_exactly(ALL)


WRONG_USE = {  # name: (arguments, environment variables, words of the error message)
    "variant": (["--variant", "sp512"], {}, "lists sp1024"),
    "too many shards": (
        ["--train-shards", "9"],
        {},
        "--train-shards 9: sp1024 has 5 training shards; ",
    ),
    "nothing to verify": (["--verify"], {}, "run without --verify"),
    "gated": ([], {}, "; if it is private or gated, set HF_TOKEN to a token that may read it"),
    "no hub": ([], {"HF_ENDPOINT": "http://127.0.0.1:9"}, "check the network, HF_ENDPOINT and "),
    "a file is missing": ([], {}, f"{TRAIN[2]} is not on the hub"),
    "a path elsewhere": ([], {}, "contains '../../secret.bin', which is neither a shard nor a tok"),
}


@pytest.mark.parametrize("case", WRONG_USE)
def test_wrong_use_and_missing_files_are_errors_of_one_line(checkout: Checkout, case: str) -> None:
    arguments, env, words = WRONG_USE[case]
    if case == "a file is missing":
        del checkout.hub.files[f"datasets/{TRAIN[2]}"]
    elif case == "gated":
        checkout.plant_faults("manifest.json", Fault("status", 401))
    elif case == "a path elsewhere":
        manifest = CONTENT["manifest.json"].replace(TOKENIZER[0].encode(), b"../../secret.bin")
        checkout.hub.files["datasets/manifest.json"] = manifest
    output = checkout.run(*arguments, code=2, **env)
    assert words in output and output.count("\n") == 1, output
    assert not list(checkout.data.glob("datasets/*/*.bin"))


def test_a_page_of_html_is_called_by_its_name(checkout: Checkout) -> None:
    """Such as the page of a proxy, in the place of a file that the hub or somebody else sent."""
    page = b"<!DOCTYPE html><html>Sign in</html>" + b" " * 2000
    checkout.run()
    (checkout.data / "manifest.json").write_bytes(page)
    output = checkout.run("--skip-manifest", code=2)
    assert "manifest.json: is a page of HTML" in output and "run without --skip-manifest" in output
    partial = partial_path(checkout, TRAIN[2])
    (checkout.data / TRAIN[2]).unlink()
    partial.write_bytes(page.ljust(len(CONTENT[TRAIN[2]])))
    output = checkout.run(retries=True)
    assert f"{TRAIN[2]}: the downloaded file is a page of HTML" in output
    checkout.assert_holds_exactly(ALL)


def test_a_download_needs_no_locks(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems have none. The trainer trains there, too."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(cached_challenge_fineweb.dataset.fcntl, "flock", refuse)
    assert "the file system has no locks (No locks available)" in checkout.run()
    checkout.assert_holds_exactly(ALL)


def test_files_that_the_program_did_not_download_are_not_replaced(checkout: Checkout) -> None:
    own = checkout.data / TOKENIZER[0]
    own.parent.mkdir()
    own.write_bytes(b"mine")
    assert (
        f"{TOKENIZER[0]}: differs from the file on the hub and was not downloaded by"
        in checkout.run(code=2)
    )
    assert own.read_bytes() == b"mine"
    own.unlink()
    checkout.producing.parent.mkdir(exist_ok=True)
    (checkout.data / TRAIN[0]).write_bytes(CONTENT[TRAIN[0]])  # right content: the file is kept
    (checkout.data / TRAIN[1]).write_bytes(CONTENT[TRAIN[0]])  # wrong content: the file is replaced
    checkout.run()
    assert TRAIN[0] not in checkout.transferred_files() and TRAIN[1] in checkout.transferred_files()
    checkout.assert_holds_exactly(ALL)


def test_verify_finds_damage_and_the_next_run_repairs_it(checkout: Checkout) -> None:
    checkout.run()
    no_hub = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    assert "all 8 files match their checksums" in checkout.run("--verify", **no_hub)
    checkout.damage(TRAIN[1])
    (checkout.data / TRAIN[2]).unlink()
    checkout.damage(TOKENIZER[0])
    output = checkout.run("--verify", code=2, **no_hub)
    names = ["../../" + TOKENIZER[0], Path(TRAIN[1]).name, Path(TRAIN[2]).name]
    assert f"missing or damaged: {', '.join(names)}; run without --verify" in output
    checkout.run()
    checkout.assert_holds_exactly(ALL)
    checkout.run("--verify", **no_hub)
    checkout.hub.files[f"datasets/{TOKENIZER[0]}"] = bytes(range(256))[::-1] * 30
    assert "made with another tokenizer than the repository has now" in checkout.run(code=2)
    checkout.assert_holds_exactly(ALL)
