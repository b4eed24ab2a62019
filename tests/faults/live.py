"""Runs of train_gpt.py in processes of their own, which tests can signal, watch and inspect.

A fault is put into a run by an edit of the script: a dictionary {text: its replacement}.
"""

import contextlib
import os
import signal
import textwrap
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from running import (
    TRAINER,
    Run,
    ask_server,
    clean_environment,
    free_port,
    start_process,
    start_script,
    torchrun,
)

TIMEOUT_S = 120  # seconds after which a wait fails


def edit_each_step(code: str) -> dict[str, str]:
    """Return an edit that runs `code` at the start of each step; `self` is the Trainer."""
    line = "        reducer.vector.zero_()\n"
    return {line: textwrap.indent(code, " " * 8) + "\n" + line}


def write_edited_script(path: Path, edits: Iterable[tuple[str, str]]) -> Path:
    """Write an edited copy of train_gpt.py to `path`; each text must occur exactly once."""
    text = TRAINER.read_text(encoding="utf-8")
    for old, new in edits:
        assert text.count(old) == 1, f"{text.count(old)} times in {TRAINER}: {old}"
        text = text.replace(old, new)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


class Live(Run):
    """A run in `folder`, which is started at once.

    ranks: 0 is one process without a process group; otherwise so many processes are started, with
        the environment variables that a launcher sets.
    edits: the edit of the script.
    other: settings of rank 1 that differ, and its "edits" and its "folder".
    restarts: if given, torchrun starts the ranks and restarts them so often.
    """

    def __init__(
        self,
        folder: Path,
        ranks: int = 0,
        edits: dict[str, str] | None = None,
        *,
        other: dict | None = None,
        restarts: int | None = None,
        **settings: object,
    ) -> None:
        super().__init__(folder, str(settings.get("RUN_ID", "")))
        folder.mkdir(parents=True, exist_ok=True)
        self.launcher = None
        self.codes: dict[int, int | None] = {}
        self.script = TRAINER
        if edits:
            self.script = write_edited_script(folder / "edited.py", edits.items())
        for name in ("out", "err"):
            (folder / name).write_text("")
        if restarts is not None:
            self.launch(ranks, restarts, settings)
            return
        other = dict(other or {})
        other_folder = other.pop("folder", folder)
        other_script = self.script
        if "edits" in other:
            other_script = write_edited_script(folder / "other.py", other.pop("edits").items())
        port = free_port()
        for rank in range(max(1, ranks)):
            place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "MASTER_PORT": port}
            place |= {"LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "localhost"}
            given = settings | (place if ranks else {})
            if rank == 0:
                pid = start_script(self.script, folder, **given)
            else:
                pid = start_script(other_script, other_folder, **given | other)
            self.codes[pid] = None

    def launch(self, ranks: int, restarts: int, settings: dict) -> None:
        """Start the run with torchrun."""
        command = torchrun(self.script, ranks, f"--max-restarts={restarts}")
        with open(self.folder / "out", "w") as out, open(self.folder / "err", "w") as err:
            place = {"cwd": self.folder, "env": clean_environment(**settings)}
            self.launcher = start_process(command, **place, stdout=out, stderr=err)

    @property
    def error_lines(self) -> list[str]:
        """The lines of stderr in which the trainer says how it ended, without "train_gpt.py: "."""
        start = "train_gpt.py: "
        lines = self.err.splitlines()
        return [line.removeprefix(start) for line in lines if line.startswith(start)]

    def poll(self) -> bool:
        """Return whether all processes have ended; store their exit codes."""
        if self.launcher:
            return self.launcher.poll() is not None
        for pid, code in self.codes.items():
            self.codes[pid] = ask_server(pid=pid) if code is None else code
        return None not in self.codes.values()

    def wait_until(self, condition: Callable[[], object]) -> "Live":
        """Wait until the condition is true; fail if the run ends first."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            ended = self.poll()
            tail = f"{self.out[-800:]}\n{self.err[-2000:]}"
            assert not ended or condition(), f"the run ended early: {tail}"
            assert time.monotonic() < deadline, f"waited in vain: {tail}"
            time.sleep(0.02)
        return self

    def wait_for_line(self, text: str) -> "Live":
        """Wait until the run has printed this text."""
        return self.wait_until(lambda: text in self.out)

    def wait_for_exit(self) -> list[int]:
        """Wait for the end; return the exit code of torchrun, or those of all ranks."""
        deadline = time.monotonic() + TIMEOUT_S
        while not self.poll():
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"the run does not end: {self.out[-800:]}\n{self.err[-2000:]}")
            time.sleep(0.01)
        return [self.launcher.returncode] if self.launcher else list(self.codes.values())

    def finish(self) -> "Live":
        """Wait for the end, and assert that the run has finished without an error."""
        codes = self.wait_for_exit()
        assert set(codes) == {0}, f"{codes} {self.out[-500:]} {self.err[-3000:]}"
        assert self.status == ("finished", 0)
        return self

    def kill(self) -> None:
        for pid, code in self.codes.items():
            if code is None:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        if self.launcher:
            self.launcher.kill()

    @property
    def status(self) -> tuple[str, int]:
        """The status and the exit code in the last `end` event."""
        last = self.events("end")[-1]
        return last["status"], last["exit_code"]

    def resumed_steps(self) -> list[int]:
        """Return the steps of the checkpoints from which the run was resumed."""
        return [event["step"] for event in self.events("checkpoint") if "resumed_from" in event]

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / self.run_id / f"step_{step:08d}.pt"

    def checkpoint_steps(self) -> list[int]:
        """Return the steps of the checkpoints in the folder, in order."""
        paths = (self.folder / "checkpoints" / self.run_id).glob(f"step_{8 * '[0-9]'}.pt")
        return sorted(int(path.stem.split("_")[1]) for path in paths)

    def load_checkpoint(self, step: int) -> dict:
        return torch.load(self.checkpoint(step), map_location="cpu", weights_only=True)

    def artifact(self) -> bytes:
        """Return the bytes of the artifact; assert that its two files are equal."""
        data = (self.folder / "logs" / f"{self.run_id}.int8.ptz").read_bytes()
        assert (self.folder / "final_model.int8.ptz").read_bytes() == data
        return data

    def losses(self) -> dict[int, tuple[float, str]]:
        """Return {step: (loss, data_crc)}; assert that a step trained twice gave the same."""
        found: dict[int, tuple[float, str]] = {}
        for event in self.events("step"):
            value = event["train_loss"], event["data_crc"]
            before = found.setdefault(event["step"], value)
            assert abs(before[0] - value[0]) < 1e-4 and before[1] == value[1], event
        return found

    def measurements(self) -> list[tuple]:
        """Return all losses, scores and data checksums of the run, with all digits."""
        words = "step", "train_loss", "val_loss", "val_bpb", "data_crc"
        events = self.events("validation") + self.events("step") + self.events("score")
        return [tuple(event.get(word) for word in words) for event in events]


def assert_same_result(run: Live, reference: Live) -> None:
    """Assert that losses, data checksums, score and artifact are equal to the last bit."""
    assert run.losses() == reference.losses()
    scores = [each.events("score")[-1]["val_bpb"] for each in (run, reference)]
    assert scores[0] == scores[1]
    assert run.artifact() == reference.artifact()
