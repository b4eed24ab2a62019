"""Which result of a run counts, and what submission.json says of it.

A run of our trainer has one result, its score event. For the text log of another trainer:
1. Only what was measured on the decoded artifact counts (NAMES in lines.py). Results before
   quantization, diagnostics, progress and differences never do.
2. The last one counts. One that is printed again in a row is one result, with all its digits.
3. An evaluation that broke does not count: its result is not a number, or more than a tenth above
   one that was there before. It is named wherever the run is shown. Among results that did not
   break the last one counts, even if an earlier one is better.
4. A run without results whose last step was validated (modded-nanogpt) has that validation.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from lines import SUBMITTED, Result
from runs import Run

BROKEN = 1.1  # times as large as an earlier result
STATED = ("val_bpb", "bpb", "final_val_bpb")  # how submission.json names the result of a seed


class Submitted(NamedTuple):
    """A run and the result of it that was submitted."""

    run: Run
    result: Result


def evaluations(run: Run) -> list[Result]:
    """The results in their order; those that are printed again in a row once, with the digits of
    the most exact line and the first loss and time that are told."""
    kept: list[Result] = []
    for line in run.results:
        if not kept or not same(kept[-1], line):
            kept.append(line)
            continue
        old = kept[-1]
        exact = max(old, line, key=digits_of)
        kept[-1] = replace(
            old,
            val_bpb=exact.val_bpb,
            digits=exact.digits,
            val_loss=old.val_loss if exact.val_loss is None else exact.val_loss,
            eval_ms=line.eval_ms if old.eval_ms is None else old.eval_ms,
        )
    return kept


def same(first: Result, second: Result) -> bool:
    """Equal as far as both were printed, to two decimals at least."""
    if (first.kind in SUBMITTED) != (second.kind in SUBMITTED):
        return False
    digits = min(digits_of(first), digits_of(second))
    close = digits >= 2 and abs(first.val_bpb - second.val_bpb) <= 0.51 * 10.0**-digits
    return close or first.val_bpb == second.val_bpb


def digits_of(result: Result) -> int:
    return 12 if result.digits is None else result.digits


def ranking(run: Run) -> tuple[list[Result], list[Result]]:
    """What may count, up to the last that did not break, and the broken ones after it."""
    kept = [result for result in evaluations(run) if result.kind in SUBMITTED]
    broken: list[Result] = []
    while kept and has_broken(kept):
        broken.insert(0, kept.pop())
    return kept, broken


def has_broken(results: Sequence[Result]) -> bool:
    last, earlier = results[-1].val_bpb, [result.val_bpb for result in results[:-1]]
    return not math.isfinite(last) or any(last > BROKEN * value for value in earlier)


def headline(run: Run) -> Result | None:
    """The result that counts, by the rule above."""
    kept, broken = ranking(run)
    if kept or broken:
        return (kept or broken)[-1]
    return validation_result(run) if run.complete else None


def passed_over(run: Run) -> list[Result]:
    """Results after the headline that the rule takes for failed: never dropped in silence."""
    kept, broken = ranking(run)
    return broken if kept else []


def validation_result(run: Run) -> Result | None:
    """The last validation, as a result."""
    last = run.final_validation
    if last is None:
        return None
    name = f"validation of step {last.step}"
    more = {"digits": last.digits, "partial": last.partial, "line": last.line}
    return Result("validation", name, last.val_loss, last.val_bpb, **more)


def score(run: Run, kind: str) -> Result | None:
    """The last result of a kind."""
    return next((result for result in reversed(evaluations(run)) if result.kind == kind), None)


def evaluation_ms(run: Run) -> float | None:
    """The time of all evaluation after training: as the log says, else the sum of its lines."""
    timed = [result.eval_ms for result in evaluations(run) if result.eval_ms is not None]
    if run.eval_total_ms is not None or not timed:
        return run.eval_total_ms
    return sum(timed)


def bytes_per_token(result: Result | None) -> float | None:
    """From a loss and its bits per byte."""
    values = (result.val_loss, result.val_bpb) if result else (None, None)
    if not all(value is not None and 0 < value < math.inf for value in values):
        return None
    return result.val_loss / math.log(2) / result.val_bpb


# --- the runs of a submission ---


def submitted(runs: Sequence[Run], submission: Mapping[str, Any] | None = None) -> list[Submitted]:
    """The runs that were submitted, each with its result.

    Where `submission`, the object of submission.json, has a result of each seed, they are the runs
    with these results. Else they are the arm whose mean it states, or the largest arm that is
    highest up in the folders. Without `submission` all runs that have a result.
    """
    usual = [Submitted(run, result) for run in runs if (result := headline(run))]
    if submission is None or not usual:
        return usual
    if stated := of_seeds(runs, stated_by_seed(submission)):
        return stated
    arms: dict[tuple[str, ...], dict[int | None, Submitted]] = {}
    for entry in usual:  # of a seed that was run twice the last run counts
        folder, arm = arm_of(entry.run)
        for key in ((folder, arm), (folder,)):
            arms.setdefault(key, {})[entry.run.known_seed] = entry
    groups = [list(arm.values()) for arm in arms.values()]
    given = submission.get("val_bpb")
    if is_number(given):
        exact = [group for group in groups if states_mean(group, given)]
        groups = exact or groups
    return min(groups, key=lambda group: (len(Path(group[0].run.path).parts), -len(group)))


def of_seeds(runs: Sequence[Run], stated: Mapping[int, Mapping[str, Any]]) -> list[Submitted]:
    """The run of each seed that has the stated result; none: some seed has no such run."""
    entries = []
    for seed, values in stated.items():
        given = next((values[key] for key in STATED if key in values), None)
        found = (line_with(run, given) for run in runs if run.known_seed == seed)
        entry = next((entry for entry in found if entry), None)
        if entry is None:
            return []
        entries.append(entry)
    return entries


def line_with(run: Run, given: Any) -> Submitted | None:
    """The result with a number: the headline, else the last one of the log that has it."""
    for result in (headline(run), *reversed(evaluations(run)), validation_result(run)):
        known = is_number(given) and result is not None and is_number(result.val_bpb)
        if known and abs(result.val_bpb - float(given)) <= half_unit(given):
            return Submitted(run, result)
    return None


def stated_by_seed(submission: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """The values of each seed, from the ways in which people write them."""
    given = submission.get("seed_results", submission.get("seeds"))
    if not isinstance(given, (dict, list)):
        given = {k: v for k, v in submission.items() if re.fullmatch(r"seed_?\d{1,12}", k)}
    if isinstance(given, list):
        rows = [v for v in given if isinstance(v, dict) and isinstance(v.get("seed"), int)]
        return {row["seed"]: row for row in rows}
    return {
        int(number[0]): value if isinstance(value, dict) else {"val_bpb": value}
        for key, value in given.items()
        if (number := re.search(r"\d{1,12}", key))
    }


def is_number(value: object) -> bool:
    if value is None or isinstance(value, (bool, str, list, dict)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def half_unit(given: Any) -> float:
    """What rounding to the digits written leaves open; four at least."""
    places = -Decimal(str(given)).as_tuple().exponent
    return 0.51 * 10.0 ** -max(4, places)


def states_mean(entries: Sequence[Submitted], given: Any) -> bool:
    """Is this number the mean, as exactly as it and the logs are written?"""
    values = [entry.result.val_bpb for entry in entries]
    printed = max(0.51 * 10.0 ** -digits_of(entry.result) for entry in entries)
    return abs(sum(values) / len(values) - float(given)) <= half_unit(given) + printed


def arm_of(run: Run) -> tuple[str, str]:
    """Folder and name of a log without its seed: equal for the seeds of one arm."""
    path = Path(run.path)
    stem = re.sub(r"(?i)[_-]?(?<![a-z])(seed|s)[_-]?\d+", "", path.stem)
    stem = re.sub(rf"(?:(?<=train)|[_-]){run.known_seed}(?!\.?\d)", "", stem)
    return str(path.parent), stem
