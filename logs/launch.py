"""Runs a trainer's command for ablate.py and preflight.py: found, made independent of the folder
in which it is started, watched, and ended with whoever started it."""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cli import Parser, missing  # noqa: F401  (records/ asks for Parser here)

PATH_SETTINGS = ("DATA_PATH", "TOKENIZER_PATH", "DATA_DIR", "TRAIN_FILES", "VAL_FILES", "RESUME")
OURS = ("RUN_ID", "SEED")  # set a run, so never part of what runs have in common
LAST_LINES = 12  # shown of a run that failed
PATIENCE_S = 20.0  # for a run to end after each signal


class ToolError(Exception):
    """What is wrong, for people: one line, or the trainer's own list."""


class Trainer:
    """A command that starts a run. `python3` and `torchrun` mean those of the Python that runs this
    tool, whether or not its environment is activated; so does a script alone."""

    def __init__(self, command: Sequence[str], folder: Path, environ: Mapping[str, str]) -> None:
        """Raises ToolError where the program or the script is not found."""
        self.given, self.folder = list(command), folder
        if len(command) == 1 and len(command[0].split()) > 1 and not os.path.isfile(command[0]):
            raise ToolError(f"'{command[0]}' is one word: write the command without the quotes")
        parts = [*_launcher(command[0]), *command[1:]]
        program = shutil.which(parts[0], path=environ.get("PATH"))
        if program is None:
            if "=" in command[0]:
                reason = "settings go in front of the tool, not behind --"
                raise ToolError(f"{command[0]}: {reason}: {command[0]} python3 ...")
            raise ToolError(f"{command[0]}: no such program: write -- python3 train_gpt.py")
        self.argv = [os.path.join(folder, program), *(self._absolute(word) for word in parts[1:])]
        scripts = [word for word in self.argv[1:] if word.endswith(".py")]
        lost = next((word for word in scripts if not os.path.isfile(word)), None)
        if lost:
            raise ToolError(f"{lost}: no such script in {folder}: name it with its folder")
        self.script = Path(scripts[0]) if scripts else None
        self.python = program if re.match(r"python[\d.]*$", Path(program).name) else sys.executable
        self.environ = {name: value for name, value in environ.items() if name not in OURS}

    def _absolute(self, word: str) -> str:
        """Words that name a file here, such as train_gpt.py; nothing that only looks like one."""
        names_file = not word.startswith("-") and re.search(r"[./]", word)
        here = names_file and (self.folder / word).is_file()
        return os.path.join(self.folder, word) if here else word

    @property
    def command_line(self) -> str:
        return shlex.join(self.given)

    def with_script(self, script: Path) -> "Trainer":
        """The same command with another script. Raises ToolError where it has none, or where this
        one is not found."""
        if self.script is None:
            raise ToolError(
                f"--script: {self.command_line} names no script: write -- python3 train_gpt.py"
            )
        given = next(word for word in self.given if word.endswith(".py"))
        command = [str(script) if word == given else word for word in self.given]
        return Trainer(command, self.folder, self.environ)

    def frozen_in(self, work: Path) -> "Trainer":
        """The same command with a copy of its script in the folder of the run."""
        copy = work / self.script.name
        shutil.copyfile(self.script, copy)
        return self.with_script(copy.resolve())

    def source(self) -> str:
        return self.script.read_text(encoding="utf-8", errors="replace") if self.script else ""

    def variables(self, **settings: str) -> dict[str, str]:
        """The environment of a run. Relative paths are those of the folder of the command."""
        environ = {**self.environ, **settings}
        for name in PATH_SETTINGS:
            value = environ.get(name)
            if value and (name != "RESUME" or (self.folder / value).exists()):
                environ[name] = os.path.normpath(self.folder / value)
        return environ

    def configuration(self, **settings: str) -> dict[str, dict[str, Any]] | None:
        """--print-config: name -> {"value", "source"}; None: the script has no such argument.

        Raises ToolError with the script's own words where it refuses the settings.
        """
        if self.script is None or "--print-config" not in self.source():
            return None
        command = [self.python, str(self.script), "--print-config"]
        name, environ = f"{self.script.name} --print-config", self.variables(**settings)
        streams = {"capture_output": True, "encoding": "utf-8", "errors": "replace"}
        done = subprocess.run(command, cwd=self.folder, env=environ, **streams)
        if done.returncode:
            said = done.stderr.strip() or f"{name}: exit code {done.returncode}"
            if "arguments: --print-config" in said:  # data/quickstart.py
                return None
            if lacks := re.search(r"(?:No module named '|: )(\w+)('| is missing)", said):
                said = missing(lacks[1], python=self.python)
            if "Traceback (most recent call last)" in said:
                said = f"{name}: {said.splitlines()[-1]}"
            raise ToolError(said)
        try:
            entries = json.loads(done.stdout[done.stdout.index("{") :])
            return {name: dict(entry) for name, entry in entries.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise ToolError(f"{name}: not the JSON object expected ({error})") from error

    def settings(self, configuration: Mapping[str, Mapping[str, Any]] | None) -> dict[str, str]:
        """The trainer's settings in the environment; without --print-config those of the names
        that its text quotes."""
        if configuration is not None:
            entries = configuration.items()
            names = {k.upper() for k, entry in entries if entry.get("source") == "environment"}
        else:
            names = set(re.findall(r"""["']([A-Z][A-Z0-9_]{2,})["']""", self.source()))
            names -= {"PATH", "HOME", "RANK"}
        return {name: self.environ[name] for name in sorted(names & set(self.environ))}


def _launcher(word: str) -> list[str]:
    if word.endswith(".py"):
        return [sys.executable, word]
    own = importlib.util.find_spec("torch") is not None
    if word in ("python", "python3"):
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run"] if word == "torchrun" and own else [word]


def fresh_folder(path: Path, trainer: Trainer) -> Path:
    """An empty working folder, in which the defaults ./data/... are found, too. Only a folder of
    an earlier run is emptied."""
    if path.is_dir() and any(path.iterdir()) and not (path / "output.txt").exists():
        raise ToolError(f"{path}: holds other files than those of a run: name another --out")
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    if (trainer.folder / "data").is_dir():
        (path / "data").symlink_to(trainer.folder / "data")
    return path


def run_child(trainer: Trainer, work: Path, settings: Mapping[str, str]) -> int:
    """Runs the command in `work` to its exit code, its output in output.txt. Whatever ends this
    ends it, too."""
    output = work / "output.txt"
    with open(output, "wb") as out:
        child = subprocess.Popen(
            trainer.argv,
            cwd=work,
            env=trainer.variables(**settings),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return child.wait()
        finally:
            if child.poll() is None:
                end(child)


def end(child: "subprocess.Popen[bytes]") -> None:
    """Ends a command and its group: politely first, as torchrun has to end its workers."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            child.wait(PATIENCE_S)
            return


def last_lines(output: Path, count: int = LAST_LINES) -> list[str]:
    try:
        with open(output, "rb") as file:
            file.seek(max(0, output.stat().st_size - 20_000))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    return [line[:300] for line in lines if line.strip()][-count:]


def indented(lines: Sequence[str]) -> str:
    return "\n".join(f"      {line}" for line in lines) or "      it printed nothing"


def gpus() -> list[dict[str, str]]:
    """Name, driver and MiB of each NVIDIA device; none without nvidia-smi."""
    query = "--query-gpu=name,driver_version,memory.total"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        names = ("name", "driver", "total_mib")
        rows = (re.split(r"\s*,\s*", line.strip()) for line in done.stdout.splitlines())
        return [dict(zip(names, row, strict=True)) for row in rows if len(row) == 3]
    return []


def split_command(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """A tool's own words, and the trainer's command: all that follows the first --."""
    parts = list(arguments)
    at = parts.index("--") if "--" in parts else len(parts)
    return parts[:at], parts[at + 1 :]


def parse_with_command(
    parser: Parser, arguments: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """A tool's options, and the trainer's command behind --."""
    ours, command = split_command(arguments)
    options, rest = parser.parse_known_args(ours)
    positionals = [word for word in rest if not word.startswith("-")]
    if command and positionals:
        parser.error(f"{positionals[0]}: write values with commas and no spaces between: v1,v2")
    if rest and not positionals:
        parser.error(f"unrecognized arguments: {shlex.join(rest)}")
    if positionals:
        given = shlex.join(rest[rest.index(positionals[0]) :])
        parser.exit(2, f"error: put -- before the command: -- {given}\n")
    if not command:
        parser.exit(2, "error: name the command after --, such as: -- python3 train_gpt.py\n")
    return options, command


def run_tool(work: Callable[[], int]) -> int:
    """A tool's exit code; what goes wrong is one line. SIGTERM ends it as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        return work()
    except ToolError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or 'system'}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


if __name__ == "__main__":
    sys.exit("error: launch.py is a part of other tools: run logs/ablate.py or logs/preflight.py")
