"""Which result of a log was submitted.

    headline(run)                         the result of one run, by the rule below
    passed_over(run)                      the last results that the rule takes for failed
    score(run, kind)                      the last result of a kind
    evaluations(run)                      the results of a run, each with the lines that print it
    evaluation_ms(run)                    the time of all evaluation after training
    bytes_per_token(result)               from a loss and its bits per byte
    submitted(runs, submission=None)      run and result of each seed that was submitted
    stated_by_seed(submission)            what submission.json says of each seed

The rule, for a run of which nothing else is known:
1. The decoded artifact counts. Results before quantisation, diagnostics, progress and differences
   never do (NAMES in lines.py).
2. A result that is printed again is the same result. It stands where it was first printed, unless
   a later line says that it was evaluated there: the line has one name of its own, as many
   digits, and `_exact`, a time of evaluation, or six digits with a name that says how it was
   evaluated (sliding, TTT, quantised). A summary behind all results moves nothing.
3. The last one is submitted, unless it has failed: it is no number, or it is worse than the one
   before by more than a tenth (with test-time training, which is there to make it better, than
   the artifact's by more than a thousandth). A result that is printed again as
   final_int8_zlib_roundtrip_exact, the challenge's name for it, has not failed.
4. A run without results whose last step was validated (modded-nanogpt) has that validation.

With submission.json the question is another one: which line has the number that was submitted?
Where one has, it is that line, whatever the rule says.
"""

import math
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from lines import SUBMITTED, Result
from runs import Run

# A last evaluation has failed that is this many times as large as the one before it.
FAILED, TTT_FAILED = 1.1, 1.001
CANONICAL = "final_int8_zlib_roundtrip_exact"
ENOUGH_DIGITS = 6  # two results do not share so many by chance
LOOK_BACK = 40  # results among which one that is printed again is looked for
STATED = ("val_bpb", "bpb", "final_val_bpb")  # how submission.json names the result of a seed
CLOSE = 1e-4  # nats or bits: no other result, but one rounded elsewhere


@dataclass(frozen=True)
class Evaluation:
    """A result with all digits and the time that its lines tell, and those lines."""

    result: Result
    lines: tuple[Result, ...]


@dataclass(frozen=True)
class Submitted:
    """A run and the result of it that was submitted."""

    run: Run
    result: Result
    how: str  # "stated": submission.json has its number; "last": by the rule


# --- one run ---


def evaluations(run: Run) -> list[Evaluation]:
    """Each result once, where it stands by rule 2."""
    order: dict[int, list[Result]] = {}  # in the order of their evaluation
    exact: dict[int, Result] = {}  # the line of each with the most digits
    latest: deque[int] = deque(maxlen=LOOK_BACK)
    for number, line in enumerate(run.results):
        old = next((known for known in reversed(latest) if same(exact[known], line)), None)
        if old is None:
            order[number], exact[number] = [line], line
            latest.append(number)
            continue
        if evaluated_there(order[old], exact[old], line):
            order[old] = order.pop(old)
            latest.remove(old)
            latest.append(old)
        order[old].append(line)
        exact[old] = max(exact[old], line, key=digits_of)
    return [Evaluation(completed(lines, exact[old]), tuple(lines)) for old, lines in order.items()]


def same(exact: Result, line: Result) -> bool:
    """Equal as far as both were printed, to four decimals at least; a summary may have fewer."""
    if (exact.kind in SUBMITTED) != (line.kind in SUBMITTED):
        return False
    if exact.val_bpb == line.val_bpb and exact.tag == line.tag:
        return True
    coarse = min(digits_of(exact), digits_of(line))
    if coarse < (2 if coarse == digits_of(line) else 4):
        return False
    return abs(exact.val_bpb - line.val_bpb) <= 0.51 * 10.0**-coarse


def digits_of(result: Result) -> int:
    return 12 if result.digits is None else result.digits


def evaluated_there(before: Sequence[Result], exact: Result, line: Result) -> bool:
    """Does this line say that the result was evaluated here, under a name of its own?"""
    says_how = line.kind != "other" and digits_of(line) >= ENOUGH_DIGITS
    if not (line.name.endswith("_exact") or line.eval_ms is not None or says_how):
        return False
    one_name = re.fullmatch(r"[\w.+-]+", line.name) is not None
    known = any(other.tag == line.tag for other in before[:LOOK_BACK])
    return one_name and not known and digits_of(line) >= digits_of(exact)


def completed(lines: Sequence[Result], exact: Result) -> Result:
    """The first line, with the digits of the most exact one and the first time that is told."""
    losses = [line.val_loss for line in (exact, *lines) if line.val_loss is not None]
    return replace(
        lines[0],
        val_bpb=exact.val_bpb,
        digits=exact.digits,
        val_loss=losses[0] if losses else None,
        eval_ms=next((line.eval_ms for line in lines if line.eval_ms is not None), None),
    )


def ranking(run: Run) -> tuple[list[Evaluation], list[Evaluation]]:
    """What may be submitted, up to the last that has not failed, and the failed ones behind it."""
    candidates = [e for e in evaluations(run) if e.result.kind in SUBMITTED]
    kept = [e for e in candidates if math.isfinite(e.result.val_bpb)]
    failed = [e for e in candidates if not math.isfinite(e.result.val_bpb)]
    while len(kept) > 1 and has_failed(kept):
        failed.insert(0, kept.pop())
    return kept, failed


def has_failed(candidates: Sequence[Evaluation]) -> bool:
    """Is the last one so much worse than the one before it that its evaluation has failed?"""
    last, before = candidates[-1], candidates[-2]
    again = {line.name.lower() for line in last.lines[1:]}
    if last.result.kind != "roundtrip" and CANONICAL in again:
        return False
    bound = FAILED
    if last.result.kind == "ttt":
        bound = TTT_FAILED
        for evaluation in reversed(candidates[:-1]):
            if evaluation.result.kind != "other":  # another mixture is no measure of the model
                before = evaluation
                break
    return not last.result.val_bpb <= bound * before.result.val_bpb


def headline(run: Run) -> Result | None:
    """The result that is submitted, by the rule above."""
    kept, failed = ranking(run)
    if kept or failed:
        return (kept or failed)[-1].result
    return validation_result(run) if run.complete else None


def passed_over(run: Run) -> list[Result]:
    """Results behind the headline that the rule takes for failed: never dropped in silence."""
    kept, failed = ranking(run)
    return [evaluation.result for evaluation in failed] if kept else []


def validation_result(run: Run) -> Result | None:
    """The last validation, as a result."""
    last = run.final_validation
    if last is None:
        return None
    return Result(
        "validation",
        f"validation of step {last.step}",
        last.val_loss,
        last.val_bpb,
        digits=last.digits,
        partial=last.partial,
        line=last.line,
    )


def score(run: Run, kind: str) -> Result | None:
    """The last result of a kind; of "pre_quant" else the validation of the last step."""
    results = [e.result for e in evaluations(run) if e.result.kind == kind]
    if results:
        return results[-1]
    last = run.final_validation
    if kind != "pre_quant" or last is None or not last.step == run.last_step > 0:
        return None
    return replace(validation_result(run), kind="pre_quant", name="validation")


def evaluation_ms(run: Run) -> float | None:
    """The time of all evaluation after training: as the log says, else the sum of its lines."""
    timed = [e.result.eval_ms for e in evaluations(run) if e.result.eval_ms is not None]
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

    `submission` is the object of submission.json. Its result of each seed decides, unless only
    other lines have its val_bpb; else its val_bpb does. Where neither is found in the logs, the
    largest group of runs that is highest up in the folders counts, by the rule. Without
    `submission` all runs that have a result.
    """
    if submission is None:
        return [Submitted(run, result, "last") for run in runs if (result := headline(run))]
    given = submission.get("val_bpb")
    named = named_by_seed(runs, stated_by_seed(submission))
    if named and (not is_number(given) or near(named, given)):
        return named
    candidates = [entries for group in groups(runs) if (entries := of_group(group, given))]
    best = min(candidates, key=lambda entries: rank(entries, given), default=[])
    if not named:
        return best
    # The results of the seeds may be of another stage than the one that was submitted.
    of_artifact = all(entry.result.kind in SUBMITTED for entry in best)
    return best if best and of_artifact and near(best, given) else named


def stated_by_seed(submission: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """The values of each seed, from the ways in which people write them."""
    given = submission.get("seed_results", submission.get("seeds"))
    if not isinstance(given, (dict, list)):
        given = {
            key: value
            for key, value in submission.items()
            if re.fullmatch(r"seed_?\d{1,12}", key) and isinstance(value, dict)
        }
    seeds: dict[int, dict[str, Any]] = {}
    if isinstance(given, dict):
        for key, value in given.items():
            if number := re.search(r"\d{1,12}", key):
                seeds[int(number[0])] = value if isinstance(value, dict) else {"val_bpb": value}
    else:
        for value in given:
            if isinstance(value, dict) and isinstance(value.get("seed"), int):
                seeds[value["seed"]] = value
    return seeds


def is_number(value: object) -> bool:
    if value is None or isinstance(value, (bool, str, list, dict)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def half_unit(given: Any) -> float:
    """What rounding to the digits written leaves open; four at least."""
    if isinstance(given, Decimal):
        places = max(0, -given.as_tuple().exponent)
    else:
        places = len(repr(given).partition(".")[2]) if isinstance(given, float) else 0
    return 0.51 * 10.0 ** -max(4, places)


def line_with(run: Run, given: Any, open_: float) -> Result | None:
    """The result with the number that was submitted: the headline, else the last of the artifact's,
    else any other, else the last validation."""
    own, all_results = headline(run), [e.result for e in evaluations(run)]
    ordered = [own] if own else []
    ordered += [result for result in reversed(all_results) if result.kind in SUBMITTED]
    ordered += [result for result in reversed(all_results) if result.kind not in SUBMITTED]
    ordered += [result] if (result := validation_result(run)) else []
    for result in ordered:
        if is_number(result.val_bpb) and abs(result.val_bpb - float(given)) <= open_:
            return result
    return None


def named_by_seed(runs: Sequence[Run], stated: Mapping[int, Mapping[str, Any]]) -> list[Submitted]:
    """The run of each seed with the line that has its result; none: some seed has no such line."""
    entries = []
    for seed, values in stated.items():
        given = next(
            (values[key] for key in ("val_bpb", "bpb", "final_val_bpb") if key in values), None
        )
        if not is_number(given):
            return []
        open_ = max(half_unit(given), CLOSE / 2)
        lines = [(run, line_with(run, given, open_)) for run in runs if run.known_seed == seed]
        lines = [(run, line) for run, line in lines if line is not None]
        if not lines:
            return []
        best = next((pair for pair in lines if pair[1] == headline(pair[0])), lines[0])
        entries.append(Submitted(*best, "stated"))
    return entries


def groups(runs: Sequence[Run]) -> Iterator[list[Run]]:
    """Runs that may be the seeds of one submission: those of one arm, or of a folder."""
    finished = [run for run in runs if headline(run) is not None]
    members: dict[tuple[Any, ...], list[Run]] = {}
    for run in finished:
        folder, arm = arm_of(run)
        for key in ((folder, arm), (folder,), (folder, arm, run.number)):
            members.setdefault(key, []).append(run)
    for key, group in members.items():
        seeds = [run.known_seed for run in group]
        # An arm whose file holds several runs of a seed is several arms.
        if len(key) < 3 or len(set(seeds)) == len(seeds):
            yield group
        # A run of a seed may have been repeated: then the last one counts.
        latest = {run.known_seed: run for run in group}
        if len(key) == 1 and len(latest) < len(group):
            yield list(latest.values())


def arm_of(run: Run) -> tuple[str, str]:
    """Folder and name of a log without its seed: equal for the seeds of one arm."""
    path = Path(run.path)
    stem = re.sub(r"(?i)[_-]?(?<![a-z])(seed|s)[_-]?\d+", "", path.stem)
    stem = re.sub(rf"(?:(?<=train)|[_-]){run.known_seed}(?!\.?\d)", "", stem)
    return str(path.parent), stem


def of_group(group: Sequence[Run], given: Any) -> list[Submitted]:
    """The results of a group: those whose mean was submitted, else the headlines."""
    usual = [Submitted(run, headline(run), "last") for run in group]
    if not is_number(given) or near(usual, given):
        return usual
    stages = [dict(stage_names(run)) for run in group]
    for stage in reversed(stages[0]):
        if all(stage in names for names in stages):
            entries = [
                Submitted(run, names[stage], "stated")
                for run, names in zip(group, stages, strict=True)
            ]
            if near(entries, given):
                return entries
    return of_one_run(group, stages, given) or usual


def of_one_run(
    group: Sequence[Run], stages: Sequence[Mapping[tuple[str, int], Result]], given: Any
) -> list[Submitted]:
    """The stage in which one run alone has the stated number, where that is no headline; for a
    number of few digits that may be chance."""

    def equal(result: Result | None) -> bool:
        known = result is not None and is_number(result.val_bpb)
        return known and abs(result.val_bpb - float(given)) <= half_unit(given)

    if half_unit(given) > 1e-5 or any(equal(headline(run)) for run in group):
        return []
    for stage in reversed(stages[0]):
        lines = [names.get(stage) for names in stages]
        if None not in lines and lines[0].kind in SUBMITTED and any(map(equal, lines)):
            return [Submitted(*pair, "stated") for pair in zip(group, lines, strict=True)]
    return []


def stage_names(run: Run) -> Iterator[tuple[tuple[str, int], Result]]:
    """Each result under its name and how often that name was there before."""
    seen: dict[str, int] = {}
    results = [evaluation.result for evaluation in evaluations(run)]
    if last := validation_result(run):
        results.insert(0, replace(last, name="validation"))
    for result in results:
        seen[result.tag] = seen.get(result.tag, 0) + 1
        yield (result.tag, seen[result.tag]), result


def near(entries: Sequence[Submitted], given: Any) -> bool:
    """Is this number the mean, as exactly as it and the logs are written?"""
    values = [entry.result.val_bpb for entry in entries]
    if not all(map(is_number, values)):
        return False
    printed = max(0.51 * 10.0 ** -digits_of(entry.result) for entry in entries)
    return abs(sum(values) / len(values) - float(given)) <= half_unit(given) + printed


def rank(entries: Sequence[Submitted], given: Any) -> tuple[float, ...]:
    """The best first: with the stated mean or number, high in the folders, one arm, many runs."""
    distance = 2.0
    values = [entry.result.val_bpb for entry in entries]
    if is_number(given) and all(map(is_number, values)):
        off = abs(sum(values) / len(values) - float(given))
        of_one = 1.5 if entries[0].how == "stated" else 2.0
        distance = 0.0 if near(entries, given) else 1.0 if off <= CLOSE else of_one
    by_rule = entries[0].how == "last"
    arms = len({arm_of(entry.run) for entry in entries})
    depth = min(len(Path(entry.run.path).parts) for entry in entries)
    return distance, not by_rule, depth, arms, -len(entries)
