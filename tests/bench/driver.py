"""Runs a script in its own process and reads the clock at lines of its output (for steps.py)."""

import json
import os
import platform
import re
import resource
import runpy
import sys
import time
from pathlib import Path
from typing import NamedTuple


def write_whole(path, value):
    """The file appears whole, or an older one stays."""
    path.with_suffix(".new").write_text(json.dumps(value), encoding="utf-8")
    path.with_suffix(".new").replace(path)


class Mark(NamedTuple):
    """The line at which the clock is read."""

    kind: str  # train or val
    step: int


LINE = re.compile(r"step:(\d+)/\d+ (train|val)_loss:(\S+)(?:.* data_crc:(\w+))?")


class Recorder:
    """A stdout that reads the clock, the device idle, at the lines of `marks`,
    and calls `finish` with all it has seen after the last."""

    def __init__(self, out, marks, synchronize, clock, finish):
        self.out, self.left, self.pending = out, list(marks), ""
        self.synchronize, self.clock, self.finish = synchronize, clock, finish
        self.seen = {"times": [], "losses": {"train": {}, "val": {}}, "crcs": {}, "val_tokens": ""}
        self.seen["warnings"] = []

    def write(self, text):
        *lines, self.pending = (self.pending + text).split("\n")
        for line in lines:
            self.out.write(line + "\n")
            self.heed(line)
        return len(text)

    def heed(self, line):
        if line.startswith("warning:") and "does not work here" in line:
            self.seen["warnings"].append(line)
        if line.startswith("val_loader:"):
            self.seen["val_tokens"] = re.search(r"tokens:(\d+)", line)[1]
        found = LINE.match(line)
        if not found:
            return
        mark = Mark(found[2], int(found[1]))
        if mark in self.left:
            self.synchronize()
            self.seen["times"].append([*mark, self.clock()])
            self.left.remove(mark)
        self.seen["losses"][mark.kind][mark.step] = float(found[3])
        if found[4]:
            self.seen["crcs"][mark.step] = found[4]
        if not self.left:
            self.finish(self.seen)

    def flush(self):
        self.out.flush()

    def __getattr__(self, name):
        return getattr(self.out, name)


def cuda_in_use():
    """torch.cuda, once the script has begun to use it; else None."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch and torch.cuda.is_initialized() else None


def synchronize():
    if cuda := cuda_in_use():
        cuda.synchronize()


def hardware():
    """The device, and the peak of memory: of the allocator on CUDA, else of the process."""
    if cuda := cuda_in_use():
        return {"device": cuda.get_device_name(), "peak_mib": cuda.max_memory_allocated() >> 20}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10  # on Linux
    return {"device": platform.machine(), "peak_mib": peak}


def drive(order):
    """Runs a script as `python script` does; at its last mark the result is written."""

    def finish(seen):
        write_whole(Path(order["result"]), seen | hardware())
        sys.stdout.flush()
        os._exit(0)  # what follows, a validation and an export, is not asked for

    # torchrun's processes are in sessions of their own: who ends the run must find them.
    Path(order["result"]).with_name(f"{os.getpid()}.pid").touch()
    marks = [Mark(*mark) for mark in order["marks"]]
    sys.stdout = Recorder(sys.stdout, marks, synchronize, time.perf_counter, finish)
    sys.argv, sys.path[0] = [order["script"]], str(Path(order["script"]).parent)
    runpy.run_path(order["script"], run_name="__main__")
    print(f"the script ended before its lines {order['marks']}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].startswith("{"):
        sys.exit("error: driver.py is a part of another tool: run tests/bench/steps.py")
    sys.exit(drive(json.loads(sys.argv[1])))
