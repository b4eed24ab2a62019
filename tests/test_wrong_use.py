"""Tests of wrong use of each program: one line with the remedy, an exit code, and no files."""

import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import cli
import pytest
from running import ROOT, run_script

ROWS = (ROOT / "tests/wrong_use.txt").read_text("utf-8").splitlines()[1:]
SOURCES = [path for folder in ("data", "tools") for path in sorted((ROOT / folder).glob("*.py"))]
PROGRAMS = [path for path in SOURCES if '__name__ == "__main__"' in path.read_text("utf-8")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder with the wrong inputs that wrong_use.txt uses."""
    (tmp_path / "novel.txt").write_text("word " * 5000 + "\n\n" + "text " * 3000)
    (tmp_path / "latin.txt").write_bytes(b"one\ncaf\xe9")
    (tmp_path / "docs.jsonl").write_text('{"text": "good"}\n' * 30 + "{text: 1}\n")
    (tmp_path / "keys.jsonl").write_text('{"id": 1, "content": "x"}\n')
    (tmp_path / "half.jsonl").write_text('{"text": "\\ud83d"}\n')
    (tmp_path / "a.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "utf16.txt").write_bytes("word\n\n".encode("utf-16-le") * 500)
    (tmp_path / "utf32.txt").write_bytes("word\n".encode("utf-32") * 500)
    (tmp_path / "utf16.jsonl").write_bytes(('{"text": "a"}\n' * 50).encode("utf-16-le"))
    (tmp_path / "pretty.json").write_text('{\n "text": "a"\n}\n')
    (tmp_path / "null.jsonl").write_text('{"text": null}\n')
    (tmp_path / "zip.jsonl.gz").write_bytes(b"PK\3\4" + bytes(99))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "sets" / "mine").mkdir(parents=True)
    (tmp_path / "sets" / "mine" / "fineweb_train_000000.bin").touch()
    (tmp_path / "cli.py").write_text("no = 'trainer'")
    (tmp_path / "events.jsonl").write_text('{"event": "run"}\n')
    (tmp_path / "byte.json").write_text('{"kind": "byte", "offset": 4}')
    return tmp_path


@pytest.mark.parametrize("row", ROWS)
def test_wrong_use_is_one_line(folder: Path, row: str) -> None:
    row = row.replace("{root}", str(ROOT)).replace("{folder}", str(folder))
    command, code, words = row.split(" | ")
    program, *arguments = command.split()
    arguments += ["--out", "made"] if "tokenize_docs" in program else []
    before = {*folder.rglob("*")}
    done = run_script(ROOT / program, folder, *arguments)
    assert done.code == int(code), done.err
    assert done.out == "" or re.search("tokenize_docs|--script cli", row), (
        "only these print progress before the error"
    )
    assert words in done.err and done.err.count("\n") == 1, done.err
    made = {*folder.rglob("*")} - before
    assert not any(path.suffix in (".bin", ".txt", ".jsonl") for path in made)


def test_an_error_of_the_system_names_a_file_only_if_it_has_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A file system without locks fails without a file name: another file would not help."""

    def fail(*words: object) -> None:
        raise OSError(*words)

    with pytest.raises(OSError, match="No locks available"):  # the traceback says where
        cli.run(lambda: fail(37, "No locks available"))
    assert cli.run(lambda: fail(13, "Permission denied", "a.bin"), refused=2) == 2
    assert (
        capsys.readouterr().err == "error: a.bin: Permission denied; give another file or folder\n"
    )


def test_a_closed_pipe_ends_a_tool_without_a_message() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, ROOT / "tools" / "recipe.py", "list"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_an_error_without_a_file_has_a_traceback_and_a_full_disk_a_remedy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No message tells the user to give another file if no file is the reason."""

    def raises(number: int, *path: str) -> Callable[[], int]:
        def main() -> int:
            raise OSError(number, os.strerror(number), *path)

        return main

    with pytest.raises(OSError, match="No locks available"):
        cli.run(raises(errno.ENOLCK))
    for number, path, words in (
        (errno.ENOENT, ["x"], "error: x: No such file or directory; give another file or folder\n"),
        (errno.ENOSPC, ["x"], "error: x: No space left on device; free disk space, or write to "),
        (errno.ENOSPC, [], "error: No space left on device; free disk space, or write to another"),
    ):
        assert cli.run(raises(number, *path), refused=2) == 2
        assert capsys.readouterr().err.startswith(words)


@pytest.mark.parametrize("name", ["quickstart", "tokenize_docs", "cached_challenge_fineweb"])
def test_help_of_data_needs_no_packages(name: str, tmp_path: Path) -> None:
    """Without the packages, every other call says at once which one is missing."""
    program = ROOT / "data" / f"{name}.py"
    (tmp_path / "novel.txt").write_text("word\n\n" * 50)
    arguments = ["novel.txt", "--bytes", "--out", "out"] if name == "tokenize_docs" else []
    where = {"cwd": tmp_path, "capture_output": True, "text": True}
    # -S leaves out the folder of the packages.
    done = subprocess.run([sys.executable, "-IS", program, "--help"], **where)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("usage: ")
    if name != "quickstart":  # it would make its data set in the repository
        done = subprocess.run([sys.executable, "-IS", program, *arguments], **where)
        assert done.returncode == 1 and " is missing; run " in done.stderr
        assert done.stderr.count("\n") == 1 and not (tmp_path / "out").exists()


def test_the_message_on_a_missing_package_has_its_requirements_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the environment of the README exists and is not used, the message says so."""
    monkeypatch.setattr(cli, "VENV_PYTHON", ROOT / "README.md")
    monkeypatch.setattr(cli, "VENV", Path(sys.prefix))
    install = f"is missing; run {sys.executable} -m pip install"
    assert cli.missing_package("torch") == f"torch {install} -r {ROOT}/requirements.txt"
    assert cli.missing_package("scipy.stats") == f"scipy {install} -r {ROOT}/tools/requirements.txt"
    assert cli.missing_package("pyarrow") == f"pyarrow {install} pyarrow"
    monkeypatch.setattr(cli, "VENV", ROOT)
    assert f"; run this program with {cli.VENV_PYTHON}, or {sys.executable}" in cli.missing_package(
        "torch"
    )


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_help_needs_no_packages(program: Path, tmp_path: Path) -> None:
    """A user reads it before installing anything. -S leaves out all installed packages."""
    command = [sys.executable, "-I", "-S", program, "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("usage: ")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_programs_start_without_their_folder_on_the_path(program: Path, tmp_path: Path) -> None:
    """This is so with python3 -P, and if PYTHONSAFEPATH is set."""
    streams = {"cwd": tmp_path, "capture_output": True, "text": True}
    environ = {**os.environ, "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, program, "--help"], env=environ, **streams)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("usage: ")
