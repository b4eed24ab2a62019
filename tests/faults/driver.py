"""Runs train_gpt.py with a fault in it, for the tests in this folder.

    INJECT='{"kind": "raise", "place": "train", "call": 3}' python3 tests/faults/driver.py
    python3 tests/faults/driver.py serve

The first form, which torchrun may also start, reads the fault from the environment as JSON. The
second form imports the trainer once and forks a process for each request on its standard input, so
that each run saves the time of the import.

    {"kind": "hold", "place": "train", "call": 3, "rank": 1, "after": "checkpoints/r/x.pt"}

A fault happens at the n-th call of a place on one rank, as soon as the file `after` exists, and
never after a restart. Places: train, validation and export (calls of the model), read (of a
training shard), fsync, start. Kinds:
  hold   wait for the file `go`, or for a signal to this process (unless the fault is "deaf")
  hang   wait for 10 minutes
  slow   take "seconds" longer
  nan    make the loss NaN
  raise  raise an error
  kill   kill the process with SIGKILL
Each kind first writes the file held.<rank>. Other keys of a fault:
  "settled": true      the disk is faster than training: writers end before training continues
  "timeout_s": 12      the timeout of the process group, instead of five minutes
At its end a process writes notes.<rank>: the number of calls at each place, and a checksum of the
weights in each validation.
"""

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
import zlib
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train_gpt  # noqa: E402  (the repository's root is not a package)

CALLS: Counter[str] = Counter()
WEIGHTS: list[int] = []
HEARD: list[int] = []  # signals


def patience_is_over(fault: dict) -> bool:
    """Has what the fault waits for come?"""
    if fault["kind"] == "hold":
        return bool(HEARD and not fault.get("deaf")) or Path("go").exists()
    return fault["kind"] != "hang"


def happens(fault: dict, place: str) -> bool:
    """Counts the calls at each place; True if the fault happened here (a hold: and is over)."""
    CALLS[place] += 1
    rank, restart = os.environ.get("RANK", "0"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    due = fault.get("place"), fault.get("call", 1), str(fault.get("rank", 0)), "0"
    if (place, CALLS[place], rank, restart) != due:
        return False
    while not Path(fault.get("after", ".")).exists():
        time.sleep(0.02)
    Path(f"held.{rank}").touch()
    if fault["kind"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault["kind"] == "raise":
        raise ValueError("an injected error")
    end = time.monotonic() + 600  # no test waits so long, and nothing shall stay behind
    while not patience_is_over(fault):
        if time.monotonic() > end:
            os._exit(1)
        time.sleep(0.02)
    time.sleep(fault.get("seconds", 0))
    return True


def checksum(model: Any) -> int:
    crc = 0
    for parameter in model.parameters():
        crc = zlib.crc32(parameter.detach().numpy(), crc)
    return crc


def inject_into_the_model(fault: dict) -> None:
    forward, last_place = train_gpt.GPT.forward, "train"
    unpack, exporting = train_gpt.unpack, False
    find_score_fault, is_trial = train_gpt.find_score_fault, False

    def noted_trial(run):
        nonlocal is_trial
        is_trial = True
        fault_of_score = find_score_fault(run)
        is_trial = False
        return fault_of_score

    def noted_unpack(*arguments):
        nonlocal exporting
        exporting = True
        return unpack(*arguments)

    def faulty_forward(model, x, y):
        nonlocal last_place
        if is_trial:  # of a row, before and after the run: no call of a place
            return forward(model, x, y)
        place = "export" if exporting else "validation"
        place = "train" if train_gpt.torch.is_grad_enabled() else place
        if place == "validation" != last_place:
            WEIGHTS.append(checksum(model))
        last_place = place
        spoilt = happens(fault, place) and fault["kind"] == "nan"
        return forward(model, x, y) * (float("nan") if spoilt else 1)

    train_gpt.GPT.forward, train_gpt.unpack = faulty_forward, noted_unpack
    train_gpt.find_score_fault = noted_trial


def inject_into_the_system(fault: dict) -> None:
    fsync, start, listen = os.fsync, train_gpt.Runtime.start, signal.signal
    open_regular = train_gpt.open_regular

    def faulty_fsync(descriptor):
        happens(fault, "fsync")
        fsync(descriptor)

    def faulty_start(*arguments):
        happens(fault, "start")
        return start(*arguments)

    def faulty_open(path):
        if threading.current_thread().name == "reader" and "fineweb_train" in str(path):
            happens(fault, "read")
        return open_regular(path)

    def noting(number, handler):
        if not callable(handler):
            return listen(number, handler)
        return listen(number, lambda *arguments: [HEARD.append(number), handler(*arguments)])

    os.fsync, train_gpt.Runtime.start, signal.signal = faulty_fsync, faulty_start, noting
    train_gpt.open_regular = faulty_open


def settle() -> None:
    """Every thread but a pipeline's reader is waited for."""
    start = threading.Thread.start

    def start_and_wait(thread):
        owner = getattr(getattr(thread, "_target", None), "__self__", None)  # gone when it has run
        start(thread)
        if owner and not isinstance(owner, train_gpt.Pipeline):
            thread.join()

    threading.Thread.start = start_and_wait


def shorten_waits(seconds: float) -> None:
    join = train_gpt.dist.init_process_group

    def join_for_a_short_time(*arguments, **options):
        return join(*arguments, **{**options, "timeout": timedelta(seconds=seconds)})

    train_gpt.dist.init_process_group = join_for_a_short_time


def run(fault: dict) -> int:
    """The exit code."""
    rank, restart = os.environ.get("RANK", "0"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    Path("pids").mkdir(exist_ok=True)
    Path("pids", f"{rank}.{restart}").write_text(str(os.getpid()), encoding="utf-8")
    train_gpt.torch.set_num_threads(1)
    inject_into_the_model(fault)
    inject_into_the_system(fault)
    if fault.get("settled"):
        settle()
    if "timeout_s" in fault:
        shorten_waits(fault["timeout_s"])
    code = train_gpt.main([], os.environ)
    Path(f"notes.{rank}").write_text(json.dumps({**CALLS, "weights": WEIGHTS}), encoding="utf-8")
    return code


def become(request: dict) -> None:
    """Of a fork: another folder, environment, console; its own session, as a shell's job."""
    os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["train_gpt.py"]
    for descriptor, path in enumerate((os.devnull, request["out"], request["err"])):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND if descriptor else os.O_RDONLY
        os.dup2(os.open(path, flags), descriptor)
    if request["file_limit"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_limit"],) * 2)


def live(request: dict) -> None:
    """All that a fork does: it never goes on as the server."""
    code = 1
    try:
        become(request)
        code = run(request["fault"])
    except BaseException:
        with contextlib.suppress(OSError):
            traceback.print_exc()
    finally:
        os._exit(code)


def serve() -> None:
    """{"pid"} -> that process' exit code, or null; any other request -> the pid of a new one."""
    importlib.import_module("torch._dynamo")  # every optimizer imports it, for a second
    for line in sys.stdin:
        request, answer = json.loads(line), None
        if "pid" in request:
            ended, status = os.waitpid(request["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        else:
            answer = os.fork()
            if not answer:
                live(request)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    if {"-h", "--help"} & {*sys.argv[1:]}:
        print(__doc__.strip())
    elif sys.argv[1:] not in ([], ["serve"]):
        sys.exit(f"error: {' '.join(sys.argv[1:])}: the only argument is serve; see --help")
    elif sys.argv[1:]:
        serve()
    else:
        exit_code = run(json.loads(os.environ.get("INJECT", "{}")))
        sys.stdout.flush()
        os._exit(exit_code)  # as the script itself ends
