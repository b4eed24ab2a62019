"""A run that is going on: its signals, its files, its end, and what the rest of it gives once it is resumed."""

import contextlib
import json
import os
import resource
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


def command_line(ranks: int, restarts: int = 0, script: Path = DRIVER) -> list[str]:
    launcher = (
        [
            "-m",
            "torch.distributed.run",
            f"--nproc_per_node={ranks}",
            "--nnodes=1",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=localhost:{free_port()}",
            f"--max-restarts={restarts}",
        ]
        if ranks
        else []
    )
    return [sys.executable, *launcher, str(script)]


class Live:
    """A run in `folder`, started by the driver with a fault, or by a shell; ranks=0: without a launcher."""

    def __init__(
        self,
        folder: Path,
        ranks: int,
        fault: dict,
        *,
        restarts: int = 0,
        file_limit: int = 0,
        command: list[str] | None = None,
        **settings: object,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.run_id = folder, str(settings.get("RUN_ID", ""))
        environment = clean_environment(
            **settings, **({"INJECT": json.dumps(fault)} if fault else {})
        )
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"

        def prepare() -> None:
            heed_interrupts()
            if file_limit:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))

        with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
            self.process = subprocess.Popen(
                command or command_line(ranks, restarts),
                cwd=folder,
                env=environment,
                stdout=out,
                stderr=err,
                preexec_fn=prepare,
                start_new_session=True,
            )

    def text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    @property
    def out(self) -> str:
        return self.text("out")

    @property
    def err(self) -> str:
        return self.text("err")

    @property
    def said(self) -> list[str]:
        """The lines that say how it ended; torchrun's own are left out."""
        return [line for line in self.err.splitlines() if "train_gpt.py: " in line]

    def until(
        self, condition: Callable[[], object], tick: Callable[[], object] = lambda: None
    ) -> "Live":
        """Waits for a condition, as long as the run is alive; `tick` is called every half a second."""
        deadline, ticked = time.monotonic() + PATIENCE_S, 0.0
        while not condition():
            assert self.process.poll() is None, (
                f"it ended early: {self.out[-800:]}\n{self.err[-2000:]}"
            )
            assert time.monotonic() < deadline, (
                f"waited in vain: {self.out[-800:]}\n{self.err[-2000:]}"
            )
            if time.monotonic() - ticked > 0.5:
                ticked = time.monotonic()
                tick()
            time.sleep(0.01)
        return self

    def held(self, rank: int = 0) -> "Live":
        """Waits until the fault of a rank has happened."""
        return self.until((self.folder / f"held.{rank}").exists)

    def until_line(self, text: str) -> "Live":
        return self.until(lambda: text in self.out)

    def send(self, number: int, rank: int | None = None) -> "Live":
        """A signal, to one rank alone or to what was started (the launcher, or the only process)."""
        pid = self.process.pid if rank is None else int(self.text(f"pids/{rank}.0"))
        os.kill(pid, number)
        return self

    def go(self) -> "Live":
        (self.folder / "go").touch()
        return self

    def end(self) -> int:
        """Its exit code; whatever is left of it after two minutes is killed."""
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """The launcher and the ranks, if they still live."""
        if self.process.poll() is None:
            self.process.kill()
            for path in (self.folder / "pids").glob("*.*"):
                with contextlib.suppress(OSError, ValueError):
                    os.kill(int(path.read_text()), signal.SIGKILL)

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

    def checkpoints(self) -> list[int]:
        """The steps of the checkpoints that have a final name."""
        return sorted(
            int(path.stem.split("_")[1])
            for path in (self.folder / "checkpoints").glob("*/step_*.pt")
        )

    def load(self, step: int) -> dict:
        path = self.folder / "checkpoints" / self.run_id / f"step_{step:08d}.pt"
        return torch.load(path, map_location="cpu", weights_only=True)

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


def same_result(run: Live, reference: Live, exact: bool) -> str:
    """Asserts that losses, checksums, score, weights are those of an uninterrupted run: to the bit, or to rounding."""
    mine, theirs = run.losses(), reference.losses()
    assert [(step, crc) for step, (_, crc) in sorted(mine.items())] == [
        (step, crc) for step, (_, crc) in sorted(theirs.items())
    ]
    scores = [live.events("score")[-1]["val_bpb"] for live in (run, reference)]
    if exact:
        assert mine == theirs and scores[0] == scores[1]
        assert np.array_equal(run.weights(), reference.weights())
        return f"{len(mine)} steps equal to the bit"
    np.testing.assert_allclose(
        [mine[step][0] for step in theirs], [loss for loss, _ in theirs.values()], atol=1e-4
    )
    np.testing.assert_allclose(run.weights(), reference.weights(), atol=1e-3)
    assert abs(scores[0] - scores[1]) < 1e-3
    return f"{len(mine)} steps equal to rounding"
