"""A run of train_gpt.py in its own processes: its signals, its files, its end.

A fault is an edit of the script: {text: what replaces it}.
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

TIMEOUT_S = 120  # of every wait


def in_step(code: str) -> dict[str, str]:
    """An edit: `code` at the start of each training step; `self` is the Trainer."""
    line = "        reducer.vector.zero_()\n"
    return {line: textwrap.indent(code, " " * 8) + "\n" + line}


def edited(path: Path, edits: Iterable[tuple[str, str]]) -> Path:
    """Writes an edited copy of the script to `path`."""
    text = TRAINER.read_text(encoding="utf-8")
    for old, new in edits:
        assert text.count(old) == 1, f"{text.count(old)} times in {TRAINER}: {old}"
        text = text.replace(old, new)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


class Live(Run):
    """A run in `folder`.

    ranks=0: one process without a process group; else as many, each told its rank as a launcher
    does. other: settings of rank 1 that differ, its "edits" and its "folder". restarts: torchrun
    starts the ranks, and restarts them so often.
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
            self.script = edited(folder / "edited.py", edits.items())
        for name in ("out", "err"):
            (folder / name).write_text("")
        if restarts is not None:
            self.launch(ranks, restarts, settings)
            return
        other = dict(other or {})
        other_folder = other.pop("folder", folder)
        other_script = self.script
        if "edits" in other:
            other_script = edited(folder / "other.py", other.pop("edits").items())
        port = free_port()
        for rank in range(max(1, ranks)):
            place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "MASTER_PORT": port}
            place |= {"LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "localhost"}
            mine = settings | (place if ranks else {})
            if rank == 0:
                pid = start_script(self.script, folder, **mine)
            else:
                pid = start_script(other_script, other_folder, **mine | other)
            self.codes[pid] = None

    def launch(self, ranks: int, restarts: int, settings: dict) -> None:
        command = torchrun(self.script, ranks, f"--max-restarts={restarts}")
        with open(self.folder / "out", "w") as out, open(self.folder / "err", "w") as err:
            place = {"cwd": self.folder, "env": clean_environment(**settings)}
            self.launcher = start_process(command, **place, stdout=out, stderr=err)

    @property
    def said(self) -> list[str]:
        """The trainer's own lines on how it ended, without "train_gpt.py: "."""
        start = "train_gpt.py: "
        lines = self.err.splitlines()
        return [line.removeprefix(start) for line in lines if line.startswith(start)]

    def poll(self) -> bool:
        if self.launcher:
            return self.launcher.poll() is not None
        for pid, code in self.codes.items():
            self.codes[pid] = ask_server(pid=pid) if code is None else code
        return None not in self.codes.values()

    def until(self, condition: Callable[[], object]) -> "Live":
        """Waits for a condition, as long as the run is alive."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            ended = self.poll()
            tail = f"{self.out[-800:]}\n{self.err[-2000:]}"
            assert not ended or condition(), f"it ended early: {tail}"
            assert time.monotonic() < deadline, f"waited in vain: {tail}"
            time.sleep(0.02)
        return self

    def until_line(self, text: str) -> "Live":
        return self.until(lambda: text in self.out)

    def end(self) -> list[int]:
        """Waits for the end; the exit codes, of one rank or torchrun or of each rank."""
        deadline = time.monotonic() + TIMEOUT_S
        while not self.poll():
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"no end: {self.out[-800:]}\n{self.err[-2000:]}")
            time.sleep(0.01)
        return [self.launcher.returncode] if self.launcher else list(self.codes.values())

    def finish(self) -> "Live":
        """Waits for the end, and asserts that it is a good one."""
        codes = self.end()
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
        last = self.events("end")[-1]
        return last["status"], last["exit_code"]

    def resumed(self) -> list[int]:
        return [event["step"] for event in self.events("checkpoint") if "resumed_from" in event]

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / self.run_id / f"step_{step:08d}.pt"

    def checkpoints(self) -> list[int]:
        paths = (self.folder / "checkpoints" / self.run_id).glob(f"step_{8 * '[0-9]'}.pt")
        return sorted(int(path.stem.split("_")[1]) for path in paths)

    def load(self, step: int) -> dict:
        return torch.load(self.checkpoint(step), map_location="cpu", weights_only=True)

    def artifact(self) -> bytes:
        data = (self.folder / "logs" / f"{self.run_id}.int8.ptz").read_bytes()
        assert (self.folder / "final_model.int8.ptz").read_bytes() == data
        return data

    def losses(self) -> dict[int, tuple[float, str]]:
        """Loss and data_crc of each step; a step trained twice gave the same both times."""
        found: dict[int, tuple[float, str]] = {}
        for event in self.events("step"):
            value = event["train_loss"], event["data_crc"]
            before = found.setdefault(event["step"], value)
            assert abs(before[0] - value[0]) < 1e-4 and before[1] == value[1], event
        return found

    def digits(self) -> list[tuple]:
        """All that it has measured of its model and data, exact."""
        words = "step", "train_loss", "val_loss", "val_bpb", "data_crc"
        said = self.events("validation") + self.events("step") + self.events("score")
        return [tuple(event.get(word) for word in words) for event in said]


def assert_same_result(run: Live, reference: Live) -> None:
    """Every loss, the data's checksums, the score and the artifact, to the bit."""
    assert run.losses() == reference.losses()
    scores = [each.events("score")[-1]["val_bpb"] for each in (run, reference)]
    assert scores[0] == scores[1]
    assert run.artifact() == reference.artifact()
