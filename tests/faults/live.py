"""A run that is going on: its signals, its files, its end, and what the rest of it gives once it
is resumed."""

import atexit
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from conftest import clean_environment, free_port, heed_interrupts

DRIVER = Path(__file__).with_name("driver.py")
PATIENCE_S = 120


@functools.cache
def server() -> subprocess.Popen:
    """The process that forks runs."""
    started = subprocess.Popen(
        [sys.executable, str(DRIVER), "serve"],
        text=True,
        env=clean_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    atexit.register(lambda: [started.stdin.close(), started.wait()])
    return started


def ask_server(**request: object) -> int | None:
    server().stdin.write(json.dumps(request) + "\n")
    server().stdin.flush()
    return json.loads(server().stdout.readline())


def torchrun(ranks: int, restarts: int) -> list[str]:
    options = ["--nnodes=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}"]
    options += [f"--nproc_per_node={ranks}", f"--max-restarts={restarts}"]
    return [sys.executable, "-m", "torch.distributed.run", *options, str(DRIVER)]


class Live:
    """A run of the trainer in `folder`, with a fault in it.

    ranks=0: one process without a process group; else as many, each told its rank as a launcher
    does. shell: a command of bash that starts it. restarts: torchrun starts them, and starts them
    again so often.
    """

    def __init__(
        self,
        folder: Path,
        ranks: int = 0,
        fault: dict | None = None,
        *,
        restarts: int | None = None,
        shell: str = "",
        file_limit: int = 0,
        **settings: object,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.run_id = folder, str(settings.get("RUN_ID", ""))
        self.since, self.took = time.monotonic(), 0.0  # the fault; seconds from it to the end
        self.launcher, self.pids, self.codes = None, [], {}
        fault = fault or {}
        if shell:
            self.launch(["bash", "-c", shell], INJECT=json.dumps(fault), **settings)
            return
        if restarts is not None:
            self.launch(torchrun(ranks, restarts), INJECT=json.dumps(fault), **settings)
            return
        port = free_port()
        for rank in range(max(1, ranks)):
            place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "MASTER_PORT": port}
            place |= {"LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "localhost"}
            pid = ask_server(
                folder=str(folder),
                fault=fault,
                environment=clean_environment(**settings, **(place if ranks else {})),
                file_limit=file_limit,
                out=str(folder / "out"),
                err=str(folder / "err"),
            )
            self.pids.append(pid)

    def launch(self, command: list[str], **settings: object) -> None:
        with open(self.folder / "out", "w") as out, open(self.folder / "err", "w") as err:
            self.launcher = subprocess.Popen(
                command,
                cwd=self.folder,
                env=clean_environment(**settings),
                stdout=out,
                stderr=err,
                preexec_fn=heed_interrupts,
                start_new_session=True,
            )

    def text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""

    @property
    def out(self) -> str:
        return self.text("out")

    @property
    def err(self) -> str:
        return self.text("err")

    @property
    def log(self) -> str:
        """The text log without the script's source."""
        return self.text(f"logs/{self.run_id}.txt").split("=" * 100 + "\n", 2)[-1]

    @property
    def said(self) -> list[str]:
        """The lines that say how it ended; torchrun's own are left out."""
        return [line for line in self.err.splitlines() if line.startswith("train_gpt.py: ")]

    def poll(self) -> bool:
        """Has all of it ended?"""
        if self.launcher:
            return self.launcher.poll() is not None
        for pid in self.pids:
            code = self.codes.get(pid)
            self.codes[pid] = ask_server(pid=pid) if code is None else code
        return None not in self.codes.values()

    def until(self, condition: Callable[[], object]) -> "Live":
        """Waits for a condition, as long as the run is alive."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            ended, tail = self.poll(), f"{self.out[-800:]}\n{self.err[-2000:]}"
            assert not ended or condition(), f"it ended early: {tail}"
            assert time.monotonic() < deadline, f"waited in vain: {tail}"
            time.sleep(0.02)
        return self

    def until_held(self, rank: int = 0) -> "Live":
        """Waits until the fault of a rank has happened."""
        self.until((self.folder / f"held.{rank}").exists)
        self.since = time.monotonic()
        return self

    def until_line(self, text: str) -> "Live":
        """Waits until the console has it."""
        self.until(lambda: text in self.out)
        self.since = time.monotonic()
        return self

    def send(self, number: int, rank: int | None = None) -> "Live":
        """A signal, to one rank or to all (through torchrun where that started them)."""
        if rank is not None:
            pids = [int(self.text(f"pids/{rank}.0"))]
        else:
            pids = [self.launcher.pid] if self.launcher else self.pids
        for pid in pids:
            os.kill(pid, number)
        self.since = time.monotonic()
        return self

    def go(self) -> "Live":
        (self.folder / "go").touch()
        return self

    def end(self) -> list[int]:
        """The exit code of each rank, or of torchrun; what is left after two minutes is killed."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.poll():
            if time.monotonic() > deadline:
                self.kill()
            time.sleep(0.02)
        self.took = time.monotonic() - self.since
        self.kill()  # the ranks of a launcher that has gone
        return [self.launcher.returncode] if self.launcher else list(self.codes.values())

    def finish(self) -> "Live":
        """The end of a run that nothing has ended early."""
        codes = self.end()
        assert set(codes) == {0}, f"{codes} {self.err[-3000:]}"
        assert self.status == ("finished", 0)
        return self

    def kill(self) -> None:
        pids = [pid for pid in self.pids if self.codes.get(pid) is None]
        if self.launcher:
            pids = [int(path.read_text()) for path in (self.folder / "pids").glob("*.*")]
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if self.launcher and self.launcher.poll() is None:
            self.launcher.kill()

    def events(self, name: str) -> list[dict]:
        lines = self.text(f"logs/{self.run_id}.jsonl").splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == name]

    @property
    def status(self) -> tuple[str, int]:
        last = self.events("end")[-1]
        return last["status"], last["exit_code"]

    def resumed(self) -> list[int]:
        """The steps from which this run went on, each time that it did."""
        return [event["step"] for event in self.events("checkpoint") if "resumed_from" in event]

    def notes(self, rank: int = 0) -> dict:
        return json.loads(self.text(f"notes.{rank}"))

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / self.run_id / f"step_{step:08d}.pt"

    def checkpoints(self) -> list[int]:
        """The steps of the checkpoints that have a final name."""
        paths = (self.folder / "checkpoints" / self.run_id).glob("step_*.pt")
        return sorted(int(path.stem.split("_")[1]) for path in paths)

    def load(self, step: int) -> dict:
        return torch.load(self.checkpoint(step), map_location="cpu", weights_only=True)

    def losses(self) -> dict[int, tuple[float, str]]:
        """Loss and data_crc of each step; a step trained twice gave the same both times."""
        found: dict[int, tuple[float, str]] = {}
        for event in self.events("step"):
            value = event["train_loss"], event["data_crc"]
            before = found.setdefault(event["step"], value)
            assert abs(before[0] - value[0]) < 1e-4 and before[1] == value[1], event
        return found

    def weights(self) -> np.ndarray:
        state = torch.load(self.folder / "final_model.pt", weights_only=True)
        return torch.cat([tensor.flatten() for tensor in state.values()]).numpy()


def assert_same_result(run: Live, reference: Live, exact: bool) -> None:
    """Losses, checksums, score, weights are those of an uninterrupted run: to the bit, or to
    rounding."""
    mine, theirs = run.losses(), reference.losses()
    assert {step: crc for step, (_, crc) in mine.items()} == {
        step: crc for step, (_, crc) in theirs.items()
    }
    scores = [live.events("score")[-1]["val_bpb"] for live in (run, reference)]
    if exact:
        assert mine == theirs and scores[0] == scores[1]
        assert np.array_equal(run.weights(), reference.weights())
        return
    losses = [[values[step][0] for step in theirs] for values in (mine, theirs)]
    np.testing.assert_allclose(*losses, atol=1e-4)
    np.testing.assert_allclose(run.weights(), reference.weights(), atol=1e-3)
    assert abs(scores[0] - scores[1]) < 1e-3
