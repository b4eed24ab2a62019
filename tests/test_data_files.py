"""Files that the tools of data/ meet and did not make: pipes, devices, link loops, damaged JSON,
control characters. Each ends in one line that names the file; nothing is waited for."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT
from test_tokenize_docs import make_texts, run, write_jsonl

sys.path.insert(0, str(ROOT / "data"))
import audit  # noqa: E402  (rooms are folders of scripts, not packages)
import cached_challenge_fineweb  # noqa: E402
import producer  # noqa: E402
import tokenize_docs  # noqa: E402

pytestmark = pytest.mark.timeout(20)  # a tool that waits for a pipe waits for ever


def loop(path: Path) -> None:
    path.symlink_to(path.name)


SPECIAL: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
    "a loop of links": loop,
}
DAMAGED = {
    "deep JSON": "[" * 100_000,
    "an array": "[1, 2]",
    "of other types": '{"datasets": {"a": 1}, "tokenizers": 3, "shards": [], "settings": 1}',
    "cut off": '{"datasets": [',
    "a number of a million digits": "1" * 1_000_000,
    "not UTF-8": "\udcff\udcfe",
}


def put(kind: str, path: Path) -> None:
    """A file of this kind in the place of what may be there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file():
        path.unlink()
    if kind in SPECIAL:
        SPECIAL[kind](path)
    else:
        path.write_bytes(DAMAGED[kind].encode("utf-8", "surrogateescape"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of bytes, and the documents that it was made from."""
    out = tmp_path_factory.mktemp("made")
    documents = write_jsonl(out / "docs.jsonl", make_texts(60))
    run(documents, "--out", out, "--num-val-docs", 9, "--bytes")
    return out


@pytest.fixture
def place(tmp_path: Path, made: Path) -> Path:
    shutil.copytree(made, tmp_path / "out")
    return tmp_path / "out"


def export(place: Path, made: Path) -> str:
    """What is said when the command of the data set is run again."""
    options = ["--out", place, "--num-val-docs", 9, "--bytes"]
    return run(made / "docs.jsonl", *options, code=1)


FOLDER, TOKENIZER = "datasets/docs_byte260", "tokenizers/docs_byte260.json"


@pytest.mark.parametrize("kind", [*SPECIAL, *DAMAGED])
@pytest.mark.parametrize("name", [f"{FOLDER}/export.json", "manifest.json"])
@pytest.mark.row("a file of tokenize_docs.py is something else: ..", "one line names it")
def test_the_files_of_an_export(place: Path, made: Path, name: str, kind: str) -> None:
    put(kind, place / name)
    error = export(place, made)
    assert error.startswith("error: ") and error.count("\n") == 1
    assert str(place / name) in error and "Traceback" not in error


def test_what_an_export_says_to_remove_helps(place: Path, made: Path) -> None:
    put("an array", place / FOLDER / "export.json")
    error = export(place, made)
    assert error.endswith(f"or remove {place / FOLDER} and {place / TOKENIZER}\n")
    shutil.rmtree(place / FOLDER)
    (place / TOKENIZER).unlink()
    run(made / "docs.jsonl", "--out", place, "--num-val-docs", 9, "--bytes")
    assert (place / FOLDER / "export.json").is_file()


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.row("a document or a tokenizer is ..", "one line names it")
def test_what_is_given_to_an_export(tmp_path: Path, made: Path, kind: str) -> None:
    put(kind, tmp_path / "given")
    error = run(tmp_path / "given", "--out", tmp_path, "--bytes", code=2)
    assert error.startswith(f"error: {tmp_path / 'given'}: ") and error.count("\n") == 1
    given = ["--model", tmp_path / "given", "--num-val-docs", 9]
    error = run(made / "docs.jsonl", "--out", tmp_path, *given, code=1)
    assert error.startswith("error: ") and str(tmp_path / "given") in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize(
    "name", [f"{FOLDER}/fineweb_val_000000.bin", f"{FOLDER}/tokenizer.sha256", TOKENIZER, "t.npz"]
)
@pytest.mark.row("an input of audit.py is something else: ..", "one line names it")
def test_the_inputs_of_an_audit(
    place: Path, name: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    put(kind, place / name)
    arguments = ["--tokenizer", place / TOKENIZER, "--data", place / FOLDER, "--seq-len", "8"]
    arguments += ["--table", place / "t.npz"] if name == "t.npz" else []
    assert audit.main([str(word) for word in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and str(place / name) in error


@pytest.mark.parametrize("garbage", ["", "garbage\n", "0" * 64 + " x\n", "\x1b[2J" + "0" * 63])
@pytest.mark.row("garbage in tokenizer.sha256", "audit.py names that file; run again makes it anew")
def test_garbage_in_the_record_of_the_tokenizer(
    place: Path, made: Path, garbage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record = place / FOLDER / "tokenizer.sha256"
    whole = record.read_bytes()
    record.write_text(garbage)
    arguments = ["--tokenizer", place / TOKENIZER, "--data", place / FOLDER, "--seq-len", "8"]
    assert audit.main([str(word) for word in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {record}: ") and error.count("\n") == 1 and "\x1b" not in error
    run(made / "docs.jsonl", "--out", place, "--num-val-docs", 9, "--bytes")
    assert record.read_bytes() == whole


@pytest.mark.parametrize("kind", [*SPECIAL, *DAMAGED])
@pytest.mark.row("a record of the downloader is something else: ..", "one line, or read again")
def test_the_records_of_a_download(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = cached_challenge_fineweb
    monkeypatch.setattr(tool, "DATA", tmp_path)
    monkeypatch.setattr(tool, "MANIFEST", tmp_path / "manifest.json")
    put(kind, tmp_path / "manifest.json")
    with pytest.raises((tool.DataError, tool.argparse.ArgumentTypeError), match=r"manifest\.json"):
        tool.wanted_names("sp1024", None)
    put(kind, tmp_path / "datasets" / ".download.json")
    assert tool.Record().files == {}


# --- Control characters ---------------------------------------------------------------------------

HOSTILE = "a\x1b[2Jb\x07\x9bc\u202ed\re"


@pytest.mark.row("control characters in names and texts of others", "escaped on the terminal")
def test_no_control_character_reaches_the_terminal() -> None:
    """But the line ends, tabs and returns that our own lines have."""
    raw = io.BytesIO()
    console = producer.Console(raw, "utf-8", "backslashreplace")
    print(f"error: {HOSTILE}", file=console)
    print("\r 10 %\t|é日█|  ", end="\r", file=console, flush=True)
    shown = raw.getvalue().decode()
    assert shown == ("error: a\\x1b[2Jb\\x07\\x9bc\\u202ed\\re\n\r 10 %\t|é日█|  \r")
    assert producer.one_line(f" {HOSTILE}\n two ") == "a\\x1b[2Jb\\x07\\x9bc\\u202ed e two"


def test_a_fault_of_a_hostile_manifest_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = cached_challenge_fineweb
    monkeypatch.setattr(tool, "MANIFEST", tmp_path / "manifest.json")
    entry = {"name": f"fineweb10B_{HOSTILE}\n\n", "tokenizer_name": "x"}
    tool.MANIFEST.write_text(json.dumps({"datasets": [entry], "tokenizers": [{"name": 7}]}))
    with pytest.raises(tool.argparse.ArgumentTypeError) as refusal:
        tool.wanted_names("sp1024", None)
    assert "\n" not in str(refusal.value) and "\x1b" not in str(refusal.value)


def test_text_that_a_producer_left_is_one_line(tmp_path: Path) -> None:
    error = tokenize_docs.DataError(HOSTILE)
    with pytest.raises(tokenize_docs.DataError), producer.Producer(tmp_path, ""):
        raise error
    word = json.loads((tmp_path / ".producing").read_text())
    assert word["error"] == "its producer failed: a\\x1b[2Jb\\x07\\x9bc\\u202ed e"
