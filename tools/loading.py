"""Load an edited train_gpt.py, and read the files of its tiny runs.

verify.py runs these functions in new processes. This module builds on nothing of this folder.
"""

import importlib.util
import os
import sys
import traceback
from importlib.machinery import SourceFileLoader

import numpy as np

VAL = "fineweb_val_000000.bin"
VAL_ROWS = 41  # sequences; an odd number, so that the last batch is short


def load(script):
    """Import the script as a module that prints tracebacks and quantizes small matrices, too."""
    sys.path[0] = str(script.parent)
    sys.argv = [str(script)]
    loader = SourceFileLoader("script", str(script))  # the script may be named like another module
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("script", loader))
    sys.modules["script"] = module
    loader.exec_module(module)
    module.KEEP_FLOAT_MAX_NUMEL = 500  # so that the matrices of a tiny model are quantized
    report_failure = module.report_failure

    def print_trace_and_report(error, *more):
        traceback.print_exception(error)
        return report_failure(error, *more)

    module.report_failure = print_trace_and_report
    return module


def call_main(script, arguments=()):
    return load(script).main(list(arguments), os.environ)


def read_shard(path):
    """Return the tokens of a shard as a uint16 array."""
    return np.fromfile(path, "<u2", offset=1024)
