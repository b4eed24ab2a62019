"""Starts training commands for ablate.py: finds the program, reads its settings, runs it, and stops
it when ablate.py is stopped."""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cli import ToolError, fault_of_script_name, missing
from script import look

OURS = ("RUN_ID", "SEED")  # set for each run
PATIENCE_S = 20.0  # for a run to end after each signal


class Trainer:
    """A command that starts a run. `python3` and `torchrun` mean those of the Python that runs this
    tool, whether or not its environment is activated; so does a script alone."""

    def __init__(self, command: Sequence[str]) -> None:
        """Raises ToolError where the program or the script is not found."""
        self.given = list(command)
        if "=" in command[0]:
            raise ToolError(f"{command[0]}: settings go in front of the tool, not after --")
        self.argv = [*launcher(command[0]), *command[1:]]
        if shutil.which(self.argv[0]) is None:
            raise ToolError(f"{command[0]}: no such program: write -- python3 train_gpt.py")
        scripts = [word for word in self.argv[1:] if word.endswith(".py")]
        self.script = Path(scripts[0]) if scripts else None
        if self.script and not self.script.is_file():
            raise ToolError(f"{self.script}: no such script in {Path.cwd()}: write its path")
        python = re.match(r"python[\d.]*$", Path(self.argv[0]).name)
        self.python = self.argv[0] if python else sys.executable

    def source(self) -> bytes:
        return self.script.read_bytes() if self.script else b""

    def with_script(self, script: str) -> "Trainer":
        """The same command for another script: in place of its own, or as its own --script."""
        if self.script is None:
            raise ToolError("--script: the command names no script: write -- python3 train_gpt.py")
        if fault := fault_of_script_name(Path(script).name):
            raise ToolError(f"--script {script}: {fault}")
        if b'"--script"' in self.source():  # data/quickstart.py
            return Trainer([*self.given, "--script", script])
        own = next(word for word in self.given if word.endswith(".py"))
        return Trainer([script if word == own else word for word in self.given])

    def configuration(self, settings: Mapping[str, str]) -> dict[str, Any] | None:
        """--print-config: name -> {"value", "source"}; None: the script has no such argument.

        Raises ToolError with the script's own words where it refuses the settings.
        """
        if b"--print-config" not in look(self.source()).text:
            return None
        words = self.argv[self.argv.index(str(self.script)) :]
        environ, name = {**os.environ, **settings}, f"{self.script.name} --print-config"
        command = [self.python, *words, "--print-config"]
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
        said = done.stderr.strip() or f"{name}: exit code {done.returncode}"
        if lacks := re.search(r"No module named '(\w+)", said):
            said = missing(lacks[1], python=self.python)
        if done.returncode:
            raise ToolError(said.removeprefix("error: "))
        try:
            return dict(json.loads(done.stdout[done.stdout.index("{") :]))
        except (ValueError, TypeError) as error:
            raise ToolError(
                f"{name}: it prints no JSON ({error}): try the command alone"
            ) from error


def launcher(word: str) -> list[str]:
    if word.endswith(".py"):
        return [sys.executable, word]
    if word in ("python", "python3"):
        return [sys.executable]
    own = importlib.util.find_spec("torch") is not None
    return [sys.executable, "-m", "torch.distributed.run"] if word == "torchrun" and own else [word]


def run_child(trainer: Trainer, settings: Mapping[str, str], output: Path) -> int:
    """Runs the command to its exit code, with what it prints in `output`. Whatever ends this ends
    it, too."""
    with open(output, "wb") as out:
        child = subprocess.Popen(
            trainer.argv,
            env={**os.environ, **settings},
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


def last_lines(output: Path) -> str:
    """The end of what a run printed, indented."""
    text = output.read_bytes()[-20_000:].decode("utf-8", "replace")
    lines = [line[:300] for line in text.splitlines() if line.strip()][-12:]
    return "\n".join(f"      {line}" for line in lines) or "      it printed nothing"
