"""Runs train_gpt.py with one fault in it: python driver.py, or under torchrun; the fault is JSON in $INJECT.

    {"kind": "hold", "place": "train", "call": 3, "rank": 1, "after": "checkpoints/r/step_00000004.pt"}

A fault happens at a place (train, validation, export: calls of the model; fsync; start) at its n-th call on a rank,
once the file `after` is there, and never after a restart. hold waits for the file go, or until this process was sent a
signal; hang waits for ever; nan spoils the loss; raise and kill end it. Each leaves the file held.<rank> first. A
process writes its pid to pids/<rank>.<restart>, and at its end the number of its calls to calls.<rank>.
{"settled": true} stands for a disk that is always faster than training: writers end before training goes on.
"""

import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import ModuleType

SCRIPT = Path(
    os.environ.get("INJECT_SCRIPT") or Path(__file__).resolve().parents[2] / "train_gpt.py"
)
RANK, RESTART = os.environ.get("RANK", "0"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
CALLS: Counter[str] = Counter()
HEARD: list[int] = []  # signals


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_gpt"] = module
    spec.loader.exec_module(module)
    return module


def happens(fault: dict, place: str) -> bool:
    """Counts the calls at each place; True if the fault happened here (a hold: and is over)."""
    CALLS[place] += 1
    if (place, CALLS[place], RANK, RESTART) != (
        fault["place"],
        fault.get("call", 1),
        str(fault.get("rank", 0)),
        "0",
    ):
        return False
    while not Path(fault.get("after", ".")).exists():
        time.sleep(0.02)
    Path(f"held.{RANK}").touch()
    if fault["kind"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault["kind"] == "raise":
        raise ValueError("an injected error")
    patience = {
        "hold": lambda: HEARD and not fault.get("deaf") or Path("go").exists(),
        "hang": lambda: False,
    }
    while not patience.get(fault["kind"], lambda: True)():
        time.sleep(0.02)
    return True


def inject(trainer: ModuleType, fault: dict) -> None:
    """Patches the trainer at the places where faults happen."""
    forward, fsync, start, listen = (
        trainer.GPT.forward,
        os.fsync,
        trainer.Runtime.start,
        signal.signal,
    )

    def faulty_forward(model, x, y):  # type: ignore[no-untyped-def]
        exporting = Path("final_model.int8.ptz").exists()
        place = (
            "train" if trainer.torch.is_grad_enabled() else "export" if exporting else "validation"
        )
        spoilt = happens(fault, place) and fault["kind"] == "nan"
        return forward(model, x, y) * (float("nan") if spoilt else 1)

    def faulty_fsync(descriptor: int) -> None:
        happens(fault, "fsync")
        fsync(descriptor)

    def faulty_start(*arguments):  # type: ignore[no-untyped-def]
        happens(fault, "start")
        return start(*arguments)

    def noting(number, handler):  # type: ignore[no-untyped-def]
        return listen(number, lambda *arguments: [HEARD.append(number), handler(*arguments)])

    trainer.GPT.forward, os.fsync, trainer.Runtime.start, signal.signal = (
        faulty_forward,
        faulty_fsync,
        faulty_start,
        noting,
    )


def settle() -> None:
    """A thread that writes a checkpoint is waited for."""
    start = threading.Thread.start

    def start_and_wait(thread: threading.Thread) -> None:
        target = getattr(thread, "_target", None)  # gone once it has run
        start(thread)
        name = getattr(getattr(target, "func", target), "__qualname__", "")
        if "write" in name or "checkpoint" in name:
            thread.join()

    threading.Thread.start = start_and_wait


def main() -> None:
    Path("pids").mkdir(exist_ok=True)
    Path("pids", f"{RANK}.{RESTART}").write_text(str(os.getpid()), encoding="utf-8")
    trainer, fault = load_script(), json.loads(os.environ.get("INJECT", "{}"))
    if "place" in fault:
        inject(trainer, fault)
    if fault.get("settled"):
        settle()
    if "wait_s" in fault:  # the longest wait for another rank
        trainer.FIRST_WAIT_S = fault["wait_s"]
    if "artifact" in fault:
        trainer.pack = lambda *_: (Path(fault["artifact"]).read_bytes(), 1, 1)
    code = trainer.main()
    Path(f"calls.{RANK}").write_text(json.dumps(CALLS), encoding="utf-8")
    sys.stdout.flush()
    os._exit(code)  # as the script itself ends


if __name__ == "__main__":
    main()
