"""Run Python scripts in forks of a process that has already imported torch, to save time.

Each line on standard input is a request in JSON. The answer to {"pid": n} is the exit code of that
process, or null while it runs. Any other request starts a script; the answer is its pid.
"""

import json
import os
import runpy
import signal
import sys
import traceback

import numpy  # noqa: F401  (imported for the scripts, like the next ones)
import sentencepiece  # noqa: F401
import torch
import torch._dynamo  # the first optimizer imports it, which takes a second


def run(request: dict) -> None:
    """Do in a fork what `python3 script arguments` would do, in a new session; never return."""
    os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    sys.argv = [request["script"], *request["arguments"]]
    folders = os.environ.get("PYTHONPATH", "").split(":")
    sys.path[:1] = [os.path.dirname(request["script"]), *filter(None, folders)]
    torch.set_num_threads(1)
    code = 0
    try:
        runpy.run_path(request["script"], run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)  # a normal exit of the interpreter takes a second


def answer(request: dict) -> int | None:
    """Return the answer to a request, see the docstring of this file."""
    if "pid" in request:
        ended, status = os.waitpid(request["pid"], os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if ended else None
    pid = os.fork()
    if not pid:
        run(request)
    return pid


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
