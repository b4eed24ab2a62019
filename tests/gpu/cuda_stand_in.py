"""A stand-in for CUDA: code that asks for the device "cuda" runs on the CPU.

    python3 -m pytest tests/gpu --stand-in                          the tests of this folder
    python3 tests/gpu/cuda_stand_in.py train_gpt.py ITERATIONS=3    a script

It makes torch.cuda say that there is one GPU. Tensors of the device "cuda" and pinned memory are on
the CPU, and streams and events exist, but all work is done at once and in the order in which it is
issued. So the branches of a script that only a GPU reaches are executed, and mistakes in them and
in their tests are found: a missing variable, a wrong argument, an operation that does not exist.
Nothing is learned about a GPU's kernels, its asynchronous streams, its memory or its speed.
tests/test_streams.py simulates asynchronous streams.
"""

import contextlib
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo  # makes tables of torch's functions, so import it before they are replaced
from torch.overrides import TorchFunctionMode

DEVICE_NAME = "stand-in on the CPU"


def replace_device(value: Any) -> Any:
    """Return the device "cpu" in place of any CUDA device; return other values unchanged."""
    is_cuda = isinstance(value, torch.device) and value.type == "cuda"
    is_cuda |= isinstance(value, str) and value.partition(":")[0] == "cuda"
    return torch.device("cpu") if is_cuda else value


class OnTheCPU(TorchFunctionMode):
    """Calls torch's functions with the CPU in place of a CUDA device, and without pinned memory.

    A mode belongs to a thread. The reader threads of train_gpt.py create no tensors.
    """

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = {key: replace_device(value) for key, value in (kwargs or {}).items()}
        if func is torch.device:  # the name of the device stays: the script chooses by it
            return func(*args, **kwargs)
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*map(replace_device, args), **kwargs)


class Event:
    """A stand-in for torch.cuda.Event. What comes before it is done when it is recorded."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.has_timing = enable_timing
        self.recorded_at: float | None = None

    def record(self, stream: "Stream | None" = None) -> None:
        self.recorded_at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def wait(self, stream: "Stream | None" = None) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        """Return the time in ms between two records. As with CUDA, both events must have timing."""
        if not (self.has_timing and end.has_timing):
            raise ValueError("both events must be created with enable_timing=True")
        if self.recorded_at is None or end.recorded_at is None:
            raise ValueError("both events must be recorded before their times are compared")
        return 1e3 * (end.recorded_at - self.recorded_at)


class Stream:
    """A stand-in for torch.cuda.Stream: its work is done when it is issued."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = device

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def wait_event(self, event: Event) -> None:
        if not isinstance(event, Event):
            raise TypeError(f"a stream can wait for an event, not for {event!r}")

    def wait_stream(self, stream: "Stream") -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def do_nothing(*_: Any, **__: Any) -> None:
    """Replace functions of torch.cuda that return nothing."""


@contextlib.contextmanager
def use_stream(stream: Stream | None) -> Iterator[None]:
    """Replace torch.cuda.stream."""
    yield


def is_installed() -> bool:
    """Return whether CUDA is replaced in this process."""
    return torch.cuda.Event is Event


def install() -> None:
    """Replace CUDA in this process, until the process ends."""
    only_stream = Stream()
    replacements: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: DEVICE_NAME,
        # Activations are float32 on a device with this capability, which is much faster on a CPU.
        "get_device_capability": lambda *_: (7, 5),
        "set_device": do_nothing,
        "synchronize": do_nothing,
        "manual_seed": do_nothing,
        "manual_seed_all": do_nothing,
        "current_stream": lambda *_: only_stream,
        "default_stream": lambda *_: only_stream,
        "stream": use_stream,
        "Stream": Stream,
        "Event": Event,
        "_sleep": do_nothing,
        "max_memory_allocated": lambda *_: 0,
        "max_memory_reserved": lambda *_: 0,
    }
    for name, replacement in replacements.items():
        if not hasattr(torch.cuda, name):
            raise AttributeError(f"torch.cuda has no {name} any more; remove it from the stand-in")
        setattr(torch.cuda, name, replacement)
    OnTheCPU().__enter__()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(f"usage: {sys.argv[0]} SCRIPT [arguments of the script]")
    install()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
