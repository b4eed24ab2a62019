"""Runs train_gpt.py, or an edited copy of it, in forks of a process that has imported torch.

So a run saves the two seconds of the imports. Each line on standard input is a request in JSON:
{"pid": n} is answered with that process's exit code, or null while it runs; any other request
starts a run and is answered with its pid.
"""

import json
import os
import runpy
import signal
import sys
import traceback

import numpy  # noqa: F401  (the script finds these imported)
import sentencepiece  # noqa: F401
import torch
import torch._dynamo  # every optimizer imports it, for a second


def run(request: dict) -> None:
    """All that a fork does: `python3 script` in a session, a folder and an environment."""
    os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    for descriptor, path in ((1, request["out"]), (2, request["err"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    sys.argv = [request["script"]]
    torch.set_num_threads(1)
    runpy.run_path(request["script"], run_name="__main__")


def answer(request: dict) -> int | None:
    if "pid" in request:
        ended, status = os.waitpid(request["pid"], os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if ended else None
    pid = os.fork()
    if not pid:
        try:
            run(request)
        except BaseException:
            traceback.print_exc()
        os._exit(1)  # the script itself ends its process
    return pid


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
