"""Load an edited train_gpt.py, and read the shards of its tiny runs. This module is for verify.py.

`load` and `call_main` are called in the new processes in which verify.py runs the script. This
module imports no other module of tools/.
"""

import importlib.util
import os
import sys
import traceback
from importlib.machinery import SourceFileLoader

import numpy as np

VAL = "fineweb_val_000000.bin"  # the file name of the validation shard
# Number of sequences in the validation shard. It is odd, so that the last batch of a validation has
# fewer sequences than the others.
VAL_ROWS = 41


def load(script):
    """Import the script (a Path) and return it as a module. Two things in the module are changed:

    - It quantizes all tensors with more than 500 numbers. An unchanged script quantizes only larger
      tensors, and all matrices of a tiny model are smaller, so quantization would not be tested.
    - If a run fails, it prints the traceback before it calls `report_failure`. For many errors an
      unchanged script prints only one line, but verify.py needs the traceback to say in which line
      of the script the run failed.
    """
    # `python3 script` sets these two in the same way.
    sys.path[0] = str(script.parent)
    sys.argv = [str(script)]
    # The module is always called "script". If the module had the name of its file, a file with a
    # name such as random.py would hide the module random.
    loader = SourceFileLoader("script", str(script))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("script", loader))
    sys.modules["script"] = module
    loader.exec_module(module)
    module.KEEP_FLOAT_MAX_NUMEL = 500
    report_failure = module.report_failure

    def print_trace_and_report(error, *more):
        traceback.print_exception(error)
        return report_failure(error, *more)

    module.report_failure = print_trace_and_report
    return module


def call_main(script, arguments=()):
    # Run the script with these arguments, with the settings in os.environ. Return its exit code.
    return load(script).main(list(arguments), os.environ)


def read_shard(path):
    """Return the tokens of a shard as a uint16 array. A header of 1,024 bytes comes before them."""
    return np.fromfile(path, "<u2", offset=1024)
