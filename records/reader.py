"""What the tools of this room take from logs/, the library that reads runs.

This is the only import from one room into another, and the only change of sys.path. The folder is
appended: logs/trace.py must not hide the standard library's trace.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "logs"))

from cli import Parser, fault_of_script_name, missing  # noqa: E402
from configuration import conditions, differences, times, written  # noqa: E402
from lines import SUBMITTED, Result, Validation  # noqa: E402
from results import (  # noqa: E402
    evaluations,
    half_unit,
    headline,
    passed_over,
    score,
    stated_by_seed,
    submitted,
    validation_result,
)
from runs import Run, read_log  # noqa: E402
from significance import (  # noqa: E402
    ALPHA,
    CAP_BYTES,
    NATS,
    Question,
    Sample,
    compare_samples,
)

__all__ = [
    "ALPHA",
    "CAP_BYTES",
    "NATS",
    "SUBMITTED",
    "Parser",
    "Question",
    "Result",
    "Run",
    "Sample",
    "Validation",
    "compare_samples",
    "conditions",
    "differences",
    "evaluations",
    "fault_of_script_name",
    "half_unit",
    "headline",
    "missing",
    "passed_over",
    "read_log",
    "score",
    "stated_by_seed",
    "submitted",
    "times",
    "validation_result",
    "written",
]
