"""The rules by which a record is judged: each takes the facts of a folder and yields findings.

A rule decides whether a finding holds; how serious it is stands in findings.CODES.
"""

import datetime
import hashlib
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path, PurePosixPath
from statistics import fmean

from facts import (
    MAX_LOGS,
    NO_LINE,
    PICTURE,
    WEIGHTS,
    Facts,
    LoggedRun,
    first_difference,
    is_finished,
    track_named,
)
from findings import OPEN, TRACKS, Finding
from packed import promised_sha256
from reader import (
    CAP_BYTES,
    SUBMITTED,
    Result,
    Run,
    Validation,
    differences,
    evaluations,
    half_unit,
    headline,
    passed_over,
    score,
    written,
)
from script import look
from submission import decimals, is_number, shown

Findings = Iterator[Finding]
Rule = Callable[[Facts], Findings]
RULES: list[Rule] = []

CAP_MS = 600_000.0  # of training, and of evaluation
LATE_STEPS = 2  # by which a run that stops itself may miss the cap
CLOSE = 1e-4  # nats or bits: no other result, but one that was rounded elsewhere
FEW_LINES = 5  # step lines below which equal figures prove nothing
# Conditions of which the rules on scripts and machines say more.
OF_SCRIPTS = {"code", "code_bytes", "device"}
TODO = "TODO: "  # begins what package.py leaves to be written by hand
# What the challenge's requirements install.
COMES_WITH = re.compile(
    "torch|triton|numpy|sentencepiece|huggingface_hub|tqdm|datasets|tiktoken|kernels|setuptools|"
    "typing_extensions|torchvision"
)
FOLDER_NAME = re.compile(r"(\d{4}-\d{2}-\d{2})_\S.*")
# Predicted tokens of published validation splits, and the bytes of their text.
SPLITS = {
    62_021_632: 151_080_362,
    62_013_440: 151_061_140,
    61_997_056: 151_024_098,
    45_508_608: 151_074_052,
    45_514_752: 151_074_923,
    40_540_160: 151_078_221,
    47_851_520: 151_074_498,
    151_130_112: 151_130_112,
    63_779_840: 155_769_746,
}
BYTES_OFF, BYTES_WRONG = 1e-3, 1e-2  # shares of a split's bytes: asked about, and refused


def rule(function: Rule) -> Rule:
    RULES.append(function)
    return function


def names_of(items: list[str], most: int = 4) -> str:
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


# --- files and place ---


@rule
def required_files(facts: Facts) -> Findings:
    files = facts.files
    if not files.sizes:
        yield Finding("R102", "the folder is empty")
        return
    if "README.md" not in files.sizes:
        close = [name for name in files.sizes if name.lower() in ("readme.md", "readme.txt")]
        if close:
            yield Finding("R103", f"{close[0]}: rename it to README.md")
        else:
            yield Finding("R102", "no README.md: write what was done and how to run it")
    if facts.submission_name is None:
        yield Finding("R102", "no submission.json: let records/package.py make one of its logs")
    elif facts.submission_name != "submission.json":
        yield Finding("R103", f"{facts.submission_name}: rename it to submission.json")
    if facts.script_name not in files.top:
        yield Finding("R102", "no train_gpt.py: add the script that ran")
    elif facts.script_name != "train_gpt.py":
        other = "train_gpt.py is not what ran" if "train_gpt.py" in files.top else "it is what ran"
        yield Finding("R103", f"{facts.script_name}: rename it to train_gpt.py ({other})")


@rule
def logs_there(facts: Facts) -> Findings:
    """A folder without logs; its .txt files may be something else."""
    tried = [log for log in facts.logs if log.runs or log.name.endswith(".log")]
    if not tried and facts.files.sizes:
        why = [f"{log.name}: {log.problem}" for log in facts.logs if log.problem]
        hint = f" ({names_of(why, 2)})" if why else ""
        yield Finding("R102", f"no log of a run: name it train_seed<N>.log{hint}")


@rule
def links(facts: Facts) -> Findings:
    for name in facts.files.outside[:5]:
        yield Finding("R104", f"{name} is a link that leads out of the folder: copy the file")


@rule
def unwanted_files(facts: Facts) -> Findings:
    sizes = facts.files.sizes
    for name, size in sizes.items():
        if WEIGHTS.fullmatch(PurePosixPath(name).suffix):
            yield Finding("R105", f"{name} ({size:,} bytes): leave weights and data out")
    left = [name for name in sizes if name.startswith("logs/")]
    if left and any(re.fullmatch(r"[^/]+\.log", name) for name in sizes):
        yield Finding("R106", f"{left[0]} was left by a run in this folder: remove logs/")


@rule
def readme(facts: Facts) -> Findings:
    if "README.md" not in facts.files.sizes:
        return
    if len(facts.readme.split()) < 20:
        yield Finding("R107", "README.md says nothing: write what was done and how to run it")
    if TODO in facts.readme:
        yield Finding("R107", "README.md still has a TODO: write what was done")


@rule
def seen_in_full(facts: Facts) -> Findings:
    for problem in facts.files.problems:
        yield Finding("R108", problem)
    if len(facts.logs) == MAX_LOGS:
        yield Finding("R108", f"only {MAX_LOGS} logs were read")


@rule
def unknown_files(facts: Facts) -> Findings:
    """What is neither counted nor judged: whoever reviews the record should look at it."""
    known = {"README.md", "submission.json", facts.submission_name, facts.script_name}
    known |= {log.name for log in facts.logs if log.runs or log.same_as}
    known |= {file.name for file in facts.needed}
    unknown = []
    for name, size in facts.files.sizes.items():
        path = PurePosixPath(name)
        usual = (
            re.match(r"(requirements.*\.txt|license)", path.name.lower()) or path.suffix == ".md"
        )
        seen = usual or PICTURE.fullmatch(path.suffix) or WEIGHTS.fullmatch(path.suffix)
        if name not in known and not seen:
            unknown.append(f"{name} ({size:,} bytes)")
    if unknown:
        yield Finding("R109", f"not counted, not judged: {names_of(unknown)}")


@rule
def place(facts: Facts) -> Findings:
    above = facts.place.parent.name
    placed = above if above in TRACKS else None
    given = facts.submission.values.get("track")
    stated = track_named(given)
    if placed and placed != facts.track:
        yield Finding("R110", f"it lies in {placed}: move it to records/{facts.track}/")
    elif placed and stated not in (placed, None):
        yield Finding("R110", f"it lies in {placed}, but submission.json says track {shown(given)}")
    date = FOLDER_NAME.fullmatch(facts.place.name)
    if not date or not parsed_date(date[1]):
        yield Finding("R111", f"{facts.place.name}: name the folder YYYY-MM-DD_Description")


def parsed_date(text: str) -> datetime.date | None:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        return None


@rule
def submission_file(facts: Facts) -> Findings:
    yield from facts.submission.findings


# --- runs ---


@rule
def which_runs(facts: Facts) -> Findings:
    others = len(facts.finished) - len(facts.submitted)
    if others > 0:
        names = names_of([run.log for run in facts.submitted])
        yield Finding("R301", f"submitted is {names}; other runs, not judged: {others}")
    for log in facts.logs:
        if log.same_as:
            yield Finding("R302", f"the same bytes as {log.same_as}: one run", (log.name,))


@rule
def unfinished_logs(facts: Facts) -> Findings:
    submitted = {id(logged.run) for logged in facts.submitted}
    code = (
        "R308" if facts.finished or facts.submitted or stated_at_end(facts, "val_bpb") else "R309"
    )
    for log in facts.logs:
        if not log.runs and log.problem and log.name.endswith((".log", ".out")):
            yield Finding(level_in(log.name, facts, code), log.problem, (log.name,))
        for run in log.runs:
            if not is_finished(run) and id(run) not in submitted:
                message = f"{run.status} at step {run.last_step:,}: {why_no_result(run)}"
                yield Finding(level_in(log.name, facts, code), message, (log.name,))


def level_in(name: str, facts: Facts, code: str) -> str:
    """Logs in a subfolder may be anything, where others are finished."""
    return "R312" if "/" in name and facts.finished else code


def why_no_result(run: Run) -> str:
    if run.error:
        return run.error
    if run.final_validation is not None:
        return "it has validations, but no result of the decoded artifact"
    return "it ends before the result"


@rule
def seeds(facts: Facts) -> Findings:
    """Several seeds, each once."""
    for logged in facts.submitted:
        run = logged.run
        named = run.seed_in_name is None or str(run.seed) in logged.log
        if run.seed is not None and not named:
            yield Finding("R303", f"this run's seed is {run.seed}", (logged.log,))
    numbers = [logged.seed for logged in facts.submitted if logged.seed is not None]
    for seed in sorted({seed for seed in numbers if numbers.count(seed) > 1}):
        yield Finding("R304", f"seed {seed} is in {numbers.count(seed)} submitted runs")
    count = len(facts.submitted)
    if 0 < count < 3:
        yield Finding("R305", f"{count} run{'s' * (count > 1)}: three are usual")


@rule
def seeds_named(facts: Facts) -> Findings:
    if not facts.submitted:
        return
    named = facts.submission.seeds
    logged = {run.seed for run in facts.finished}
    # A log whose name has another seed than its run is one fault, and named elsewhere.
    misnamed = [run for run in facts.submitted if run.run.seed_in_name not in (run.seed, None)]
    logged |= {run.run.seed_in_name for run in misnamed}
    for seed in [seed for seed in named if seed not in logged][:5]:
        yield Finding("R306", f"submission.json names seed {seed}, which has no log")
    missing = {run.seed for run in facts.submitted if run not in misnamed} - {None, *named}
    if named and missing:
        seeds = ", ".join(map(str, sorted(missing)))
        yield Finding("R306", f"submission.json leaves out seed {seeds}")


@rule
def one_configuration(facts: Facts) -> Findings:
    if len(facts.submitted) < 2:
        return
    apart, _ = differences([logged.run for logged in facts.submitted])
    for difference in apart:
        if not difference.harmless and difference.name not in OF_SCRIPTS:
            values = [written(difference.name, value)[:60] for value, _ in difference.values]
            if not all("/" in value for value in values):  # paths on different machines
                yield Finding("R307", f"the submitted runs differ: {' | '.join(values)}")


@rule
def resumed(facts: Facts) -> Findings:
    for logged in facts.submitted:
        if logged.run.resumed_at:
            yield Finding("R310", f"resumed at step {logged.run.resumed_at[-1]:,}", (logged.log,))


@rule
def copied_runs(facts: Facts) -> Findings:
    """Runs of different seeds never take the same times, nor have the same losses."""
    for first, second in combinations(facts.submitted, 2):
        if first.seed == second.seed:
            continue
        for what, key in (("times", "train_time_ms"), ("losses", "train_loss")):
            figures = [
                [(step.step, getattr(step, key)) for step in logged.run.steps]
                for logged in (first, second)
            ]
            known = [figure for _, figure in figures[0] if figure is not None]
            if figures[0] == figures[1] and len(known) >= FEW_LINES:
                message = f"its {what} are those of {second.log}, to the digit: is it a copy?"
                yield Finding("R311", message, (first.log,))
                break


# --- score ---


@rule
def stated_results(facts: Facts) -> Findings:
    """val_bpb and val_loss are the means of the submitted result lines."""
    said: dict[tuple[str, str], list[tuple[str, str]]] = {}  # by code and reason
    for key in ("val_bpb", "val_loss"):
        given, values = facts.submission.values.get(key), facts.results(key)
        if not facts.submitted:
            continue
        if not values:
            yield Finding("R406", f"the logs do not say {key} of each run")
        elif is_number(given) and given > 0:
            code, reason = judged_result(facts, key, given)
            if code:
                numbers = (f"{key} {given}", f"{fmean(values):.8f}")
                said.setdefault((code, reason), []).append(numbers)
    for (code, reason), numbers in said.items():
        stated, right = (" and ".join(texts) for texts in zip(*numbers, strict=True))
        several = len(numbers) > 1
        mean = "the means of the logs are" if several else "the mean of the logs is"
        logs = mean if len(facts.submitted) > 1 else "the log says"
        yield Finding(code, f"{stated} {'are' if several else 'is'} {reason}: {logs} {right}")


def judged_result(facts: Facts, key: str, given: object) -> tuple[str, str]:
    """The code and the reason where a stated number is not the mean of the submitted results."""
    right, stated, rounding = fmean(facts.results(key)), float(given), half_unit(given)
    digits = [logged.result.digits for logged in facts.submitted]
    rounding += max([0.51 * 10.0**-places for places in digits if places is not None], default=0)
    if abs(stated - right) <= rounding:
        return "", ""
    if abs(stated - right) <= CLOSE:
        return "R405", "nearly right"
    for code, reason, value, tolerance in other_numbers(facts, key, rounding):
        if abs(stated - value) <= tolerance:
            return code, reason
    if decimals(given) >= 3 and abs(stated - right) < 10.0 ** -decimals(given):
        return "R403", "cut off, not rounded"
    if stated_at_end(facts, key):
        return "R408", "a number at the end of the logs that was not understood as the result"
    return ("R401" if stated < right else "R402"), "in no log"


def other_numbers(
    facts: Facts, key: str, rounding: float
) -> Iterator[tuple[str, str, float, float]]:
    """Numbers of the logs that may have been taken for the result: a code, what they are, the
    number, and how exactly it must be met."""
    bpbs = facts.results("val_bpb")
    if key == "val_loss" and bpbs:
        yield "R403", "the bits per byte", fmean(bpbs), CLOSE
    for logged, value in zip(facts.submitted, facts.results(key), strict=True):
        yield "R403", f"from seed {logged.seed} alone", value, rounding
    for name, value in other_results(facts, key):
        yield "R403", name, value, rounding
    before = [getattr(score(logged.run, "pre_quant"), key, None) for logged in facts.submitted]
    if all(map(is_number, before)):
        yield "R404", "the result before quantisation", fmean(before), rounding


def results_of(run: Run) -> list[Result]:
    """Each result of a run once, in the order of their evaluation."""
    return [evaluation.result for evaluation in evaluations(run)]


def other_results(facts: Facts, key: str) -> Iterator[tuple[str, float]]:
    """Results other than the submitted ones, by what to call them: of all runs, then of each."""
    by_tag: list[dict[tuple[str, int], float]] = []  # of each run; a tag may come again
    for logged in facts.submitted:
        values: dict[tuple[str, int], float] = {}
        count: Counter[str] = Counter()
        for result in results_of(logged.run):
            value = getattr(result, key)
            if result.kind in SUBMITTED and is_number(value):
                values[result.tag, count[result.tag]] = value
                count[result.tag] += 1
        by_tag.append(values)
    for tag in by_tag[0]:
        if all(tag in values for values in by_tag):
            yield f"the result called {tag[0]}", fmean(values[tag] for values in by_tag)
    for logged, values in zip(facts.submitted, by_tag, strict=True):
        for (tag, _), value in values.items():
            yield f"the {tag} of {logged.log} alone", value


def stated_at_end(facts: Facts, key: str) -> bool:
    """Do the logs end with the stated result, or with results of seeds of which it is the mean?"""
    ends = [number for log in facts.logs for number in log.last_numbers]

    def is_at_end(value: object) -> bool:
        known = is_number(value) and decimals(value) >= 3
        return known and any(abs(float(value) - number) <= half_unit(value) for number in ends)

    given = facts.submission.values.get(key)
    if is_at_end(given):
        return True
    each = [values.get(key) for values in facts.submission.by_seed.values()]
    if not each or not is_number(given) or not all(map(is_at_end, each)):
        return False
    return abs(fmean(map(float, each)) - float(given)) <= CLOSE


@rule
def submitted_lines(facts: Facts) -> Findings:
    """submission.json may choose a result that is not the last one, or not the artifact's."""
    for logged in facts.submitted:
        result, last, log = logged.result, headline(logged.run), (logged.log,)
        said = f"submitted is {result.tag} {result.val_bpb}"
        if result.kind == "validation" and not is_finished(logged.run):
            yield Finding("R410", f"{said}: the decoded artifact was not evaluated", log)
        elif last is not None and last.val_bpb == result.val_bpb:
            for failed in passed_over(logged.run)[-1:]:
                message = f"what ran last, {failed.tag} {failed.val_bpb}, is taken for failed"
                yield Finding("R409", f"{said}, {message}", log)
        elif result.kind not in SUBMITTED or last is None:
            other = f", which has {last.val_bpb}" if last else ""
            yield Finding("R404", f"{said}, not a result of the decoded artifact{other}", log)
        else:
            yield Finding("R409", f"{said}, what ran last is {last.tag} {last.val_bpb}", log)


@rule
def results_of_seeds(facts: Facts) -> Findings:
    """seed_results, as far as each log says the same; people round as they copy."""
    stated = facts.submission.by_seed
    for logged in facts.submitted:
        run = logged.run
        results = [*results_of(run), *run.validations, logged.result]
        sizes = {float(size) for size in sizes_of(facts, logged)}
        known: dict[str, tuple[float, set[float | None]]] = {
            "val_bpb": (CLOSE, {result.val_bpb for result in results}),
            "val_loss": (10 * CLOSE, {result.val_loss for result in results}),
            "steps": (1, {run.last_step or None}),
            "artifact_bytes": (0, sizes),
            "bytes_total": (0, sizes),
        }
        for key, (tolerance, values) in known.items():
            given, values = stated.get(logged.seed, {}).get(key), values - {None}
            if not values or not is_number(given):
                continue
            if min(abs(float(given) - value) for value in values) > tolerance:
                log_says = " or ".join(f"{value:,.10g}" for value in sorted(values)[:2])
                message = f"seed_results: {key} of seed {logged.seed} is {given}, not {log_says}"
                yield Finding("R407", message)


def sizes_of(facts: Facts, logged: LoggedRun) -> set[int]:
    """What may be called the size of a run's artifact: the model, with or without the code."""
    sizes, model = logged.run.sizes, logged.model_bytes
    totals = {sizes.total}
    if model is not None:
        codes = {0, sizes.code, sizes.packed_code, facts.code_bytes, facts.packed_bytes}
        codes |= {None if facts.source is None else len(facts.source)}
        totals |= {model + code for code in codes if code is not None}
    return totals - {None}


# --- size ---


@rule
def cap(facts: Facts) -> Findings:
    """Code and model are at most 16,000,000 bytes: one finding, whichever number says more."""
    model, code = facts.model_bytes, facts.code_bytes
    stated = facts.submission.values.get("bytes_total")
    totals = {
        logged.run.sizes.total: logged.log for logged in facts.submitted if logged.run.sizes.total
    }
    logged_total = max(totals, default=0)
    if model is None:
        if facts.submitted:
            yield Finding("R503", "no log says how large the compressed model is")
        if is_number(stated) and stated > CAP_BYTES:
            yield Finding("R501", f"bytes_total {stated:,}: {CAP_BYTES:,} are allowed")
        return
    shipped = 0 if code is None else model + code
    # Of far too much, it may be the model before packing.
    over = CAP_BYTES < logged_total < 1.5 * CAP_BYTES
    if over or shipped > CAP_BYTES:
        yield too_large(facts, model, shipped, logged_total if over else 0)
    elif logged_total > CAP_BYTES:
        yield Finding("R502", f"its total is {excess(logged_total)}", (totals[logged_total],))
    elif is_number(stated) and stated > CAP_BYTES:
        message = (
            f"bytes_total {stated:,}: {CAP_BYTES:,} are allowed; the logs say {logged_total:,}"
        )
        yield Finding("R502", message)


def excess(total: int) -> str:
    return f"{total:,} bytes, {total - CAP_BYTES:,} too many"


def too_large(facts: Facts, model: int, shipped: int, logged_total: int) -> Finding:
    """What is too large, and what would make it fit."""
    total = max(shipped, logged_total)
    message = f"the largest run and the code as shipped are {excess(total)}"
    if logged_total > shipped:
        message = f"a log's own total is {excess(total)}"
    counted = [
        logged.run.sizes.packed_code for logged in facts.submitted if logged.run.sizes.packed_code
    ]
    forms = {}
    if facts.packed_bytes is not None:
        forms["with the script that package.py --pack makes"] = model + facts.packed_bytes
    if counted:
        forms["with the script packed as the log counts it"] = model + min(counted)
    fitting = [(how, size) for how, size in forms.items() if size <= CAP_BYTES]
    if fitting:
        message += f"; {fitting[0][0]} it would be {fitting[0][1]:,}: ship that"
    sure = facts.source is not None and len(facts.source) + model > CAP_BYTES
    refused = logged_total > 0 or sure and not fitting
    return Finding("R501" if refused else "R502", message)


@rule
def stated_total(facts: Facts) -> Findings:
    """bytes_total is the code and the model of a submitted run."""
    stated, values = facts.submission.values.get("bytes_total"), set()
    for logged in facts.submitted:
        values |= sizes_of(facts, logged) - {logged.model_bytes}
    if not is_number(stated) or not values or stated in values:
        return
    largest = max(values)
    totals = [logged.run.sizes.total for logged in facts.submitted if logged.run.sizes.total]
    message = f"bytes_total {stated:,} is in no log: they say {largest:,}"
    if stated == facts.model_bytes:
        message = f"bytes_total {stated:,} is the model alone, the total is {largest:,}"
    if totals and abs(float(stated) - fmean(totals)) <= 1:
        message = f"bytes_total {stated:,} is the mean of the seeds, the largest is {max(totals):,}"
        yield Finding("R510", message)
    else:
        yield Finding("R504", message)


@rule
def stated_code(facts: Facts) -> Findings:
    stated, source = facts.submission.values.get("bytes_code"), facts.source
    if source is None or not is_number(stated):
        return
    packed = {logged.run.sizes.packed_code for logged in facts.submitted}
    if stated not in {len(source), facts.code_bytes, facts.packed_bytes} | packed:
        message = f"bytes_code {stated:,}: {facts.script_name} has {len(source):,} bytes"
        yield Finding("R505", message)


@rule
def sums_in_logs(facts: Facts) -> Findings:
    """A log's total is its model and its code."""
    for logged in facts.submitted:
        sizes = logged.run.sizes
        codes = [code for code in (sizes.code, sizes.packed_code) if code is not None]
        if None in (sizes.artifact, sizes.total) or not codes:
            continue
        sums = [sizes.artifact, *(sizes.artifact + code for code in codes)]
        if sizes.total not in sums and sizes.total < 1.5 * CAP_BYTES:
            message = (
                f"its total is {sizes.total:,} bytes, its model and code are {sums[-1]:,}: "
                "which one is right?"
            )
            yield Finding("R506", message, (logged.log,))


@rule
def needed_files(facts: Facts) -> Findings:
    for file in facts.needed:
        if file.is_code:
            verb = "needs" if file.certain else "may need"
            message = f"{file.by} {verb} {file.name}: its {file.size:,} bytes are counted"
            yield Finding("R507" if file.certain else "R508", message)
        else:
            message = (
                f"{file.by} reads {file.name} ({file.size:,} bytes): "
                "it counts if it is part of the model or the code"
            )
            yield Finding("R509", message)


# --- script ---


@rule
def script_in_logs(facts: Facts) -> Findings:
    """The logs hold the shipped script, readable or packed, or count its bytes."""
    if facts.source is None:
        return
    wrong: list[tuple[str, str]] = []
    for logged in facts.submitted:
        source = logged.run.source
        if source is None:
            yield Finding("R603", "does not hold its script: what ran is not proved", (logged.log,))
            yield from counted_script(facts, logged)
        elif message := another_script(facts, source):
            wrong.append((logged.log, message))
    for log, message in wrong:
        # A packed script may be shorter inside than what ran, its names and comments left out.
        certain = len(wrong) == len(facts.submitted) and not facts.script.packed
        yield Finding("R601" if certain else "R602", message, (log,))


def another_script(facts: Facts, source: bytes) -> str | None:
    """In what a log's script differs from the shipped one; None: in nothing that counts."""
    if not first_difference(source, facts.source)[0]:
        return None
    number, here, there = first_difference(look(source).text, facts.script.text)
    # In a log that has no rule below its script, the reader may take lines of the log along.
    runs_on = there == NO_LINE and look(source).error and not facts.script.error
    if not number or runs_on:
        return None
    return f"holds another script: line {number} is {here!r}, in {facts.script_name} {there!r}"


def counted_script(facts: Facts, logged: LoggedRun) -> Findings:
    """Of a log without its script, the code size alone says which one ran."""
    sizes, source = logged.run.sizes, facts.source
    counted = {sizes.code, sizes.packed_code} - {None}
    shipped = {len(source), facts.code_bytes, len(facts.script.text)}
    shipped |= {file.size for file in facts.needed}
    if counted and not counted & shipped:
        message = (
            f"counts {max(counted):,} bytes of code, but {facts.script_name} has {len(source):,}: "
            "which one ran?"
        )
        yield Finding("R604", message, (logged.log,))


@rule
def script_form(facts: Facts) -> Findings:
    name, script = facts.script_name, facts.script
    if facts.source_problem:
        yield Finding("R605", facts.source_problem)
    if script is None:
        return
    if script.packed:
        message = f"{name} is packed: {len(script.text):,} readable bytes (package.py --unpack)"
        yield Finding("R606", message)
        promised = promised_sha256(facts.source)
        if promised and promised != hashlib.sha256(script.text).hexdigest():
            yield Finding("R607", f"{name}: its first line names another source's sha256")
    if script.opaque:
        message = f"{name} is packed, and not by lzma, zlib or bz2: what is inside was not judged"
        yield Finding("R607", message)
    if script.error:
        here = sys.version_info[:2]
        message = f"Python {here[0]}.{here[1]} cannot parse {name}: {script.error}"
        if here < (3, 12):
            message += "; newer ones take more (f-strings of 3.12, say)"
        yield Finding("R608" if here >= (3, 12) else "R609", message)


@rule
def packages(facts: Facts) -> Findings:
    """Packages that a reader of the folder would not know of."""
    if facts.script is None:
        return
    written = facts.files.text("requirements.txt") + facts.readme
    written = re.sub(r"[^a-z0-9]", "", written.lower())
    local = {PurePosixPath(name).parts[0].split(".")[0] for name in facts.files.sizes}
    for module, place_ in facts.script.imports.items():
        root = module.split(".")[0]
        if not root or place_.optional or root in sys.stdlib_module_names | local:
            continue
        # flash_attn_interface is told of as flash-attn, FlashAttention 3 ...
        word = re.sub(r"[^a-z0-9]", "", root.lower().split("_")[0])
        if not COMES_WITH.fullmatch(root) and word not in written:
            message = (
                f"{facts.script_name}: line {place_.line} imports {root}: "
                "name it in requirements.txt or README.md"
            )
            yield Finding("R610", message)


@rule
def reach(facts: Facts) -> Findings:
    """What a script fetches, or with what it could."""
    script, name = facts.script, facts.script_name
    if script is None:
        return
    for call, line in script.downloads.items():
        message = f"line {line} downloads ({call}): nothing may be fetched while it is evaluated"
        yield Finding("R611", f"{name}: {message}")
    if script.reaching:
        modules = [f"{module} (line {line})" for module, line in script.reaching.items()]
        yield Finding("R612", f"{name} imports {names_of(modules)}: look at what for")


@rule
def training_data(facts: Facts) -> Findings:
    """Training on the validation split, as far as the script or a log shows it."""
    if facts.script is not None:
        for text, line in facts.script.validation.items():
            message = f"{facts.script_name}: line {line} trains on {text}: is that validation data?"
            yield Finding("R613", message)
    for logged in facts.submitted:
        files = str(logged.run.config.get("train_files", ""))
        if re.search(r"fineweb_val_", files):
            message = f"train_files is {files[:80]}: is that validation data?"
            yield Finding("R613", message, (logged.log,))


# --- time and machine ---


@rule
def training_time(facts: Facts) -> Findings:
    """Ten minutes of training; a run that stops itself may be two steps late."""
    for logged in facts.submitted:
        run = logged.run
        stated = run.train_time_ms if is_number(run.train_time_ms) else None
        by_steps = longest_of_steps(run)
        longest = max([ms for ms in (stated, by_steps) if ms is not None], default=None)
        if longest is None:
            yield Finding("R704", "does not say how long it trained", (logged.log,))
        elif longest > CAP_MS + LATE_STEPS * longest / max(1, run.last_step):
            yield Finding("R701", f"trained for {longest / 1e3:,.1f} s, not 600", (logged.log,))


def longest_of_steps(run: Run) -> float | None:
    """The longest time of a step line; of minutes in tenths the least that they can mean."""
    times = [step.train_time_ms for step in run.steps if is_number(step.train_time_ms)]
    coarse = [step.coarse_time_ms for step in run.steps]
    times += [ms - 3_000 for ms in coarse if is_number(ms)]
    return max(times, default=None)


@rule
def times_agree(facts: Facts) -> Findings:
    """The end of a log, its step lines, their step_avg and tok/s agree."""
    for logged in facts.submitted:
        run = logged.run
        if run.resumed_at:
            continue
        stated, by_steps = run.train_time_ms, longest_of_steps(run)
        if is_number(stated) and by_steps is not None and by_steps > 1.01 * stated + 1000:
            message = (
                f"its end says {stated / 1e3:,.1f} s of training, its steps {by_steps / 1e3:,.1f} s"
            )
            yield Finding("R703", message, (logged.log,))
        message = wrong_average(run) or wrong_speed(run)
        if message:
            yield Finding("R703", message, (logged.log,))


def wrong_average(run: Run) -> str | None:
    """step_avg x step is the time, save for a few steps that some logs leave out of the mean."""
    wrong = []
    for step in run.steps:
        average = step.step_avg_ms
        if not is_number(average) or not is_number(step.train_time_ms) or step.step < 200:
            continue
        if abs(average * step.step - step.train_time_ms) > 0.06 * step.train_time_ms + average:
            wrong.append(step)
    if len(wrong) < FEW_LINES and len(wrong) < len(run.steps):
        return None
    if not wrong:
        return None
    last = wrong[-1]
    product = last.step_avg_ms * last.step / 1e3
    return (
        f"step {last.step:,}: step_avg x step is {product:,.1f} s, "
        f"its time is {last.train_time_ms / 1e3:,.1f} s"
    )


def wrong_speed(run: Run) -> str | None:
    """Tokens trained on / tok/s is the time, roughly: some logs print the pace of the moment."""
    batch = run.config.get("train_batch_tokens")
    lines = [(step, step.tokens_per_second) for step in run.steps if step.step >= 200]
    lines = [(step, speed) for step, speed in lines if is_number(speed) and speed > 0]
    if not is_number(batch) or len(lines) < FEW_LINES or not is_number(run.train_time_ms):
        return None
    seconds = run.last_step * batch / fmean(speed for _, speed in lines)
    if seconds > 1.15 * run.train_time_ms / 1e3:
        return (
            f"at its tok/s the training took {seconds:,.0f} s, "
            f"its time is {run.train_time_ms / 1e3:,.1f} s"
        )
    return None


@rule
def evaluation_time(facts: Facts) -> Findings:
    """Ten minutes for the evaluation that is submitted."""
    for logged in facts.submitted:
        ms = logged.result.eval_ms
        if is_number(ms) and ms > CAP_MS:
            yield Finding("R702", f"evaluated for {ms / 1e3:,.1f} s, not 600", (logged.log,))


@rule
def machine(facts: Facts) -> Findings:
    for logged in facts.submitted:
        device, count = logged.run.hardware.get("device"), logged.run.world_size
        if count not in (None, 8) or device and "H100" not in str(device):
            ran = f"on {count or '?'} x {device}" if device else f"as {count} processes"
            message = f"ran {ran}, not on 8 H100s: --track {OPEN} has no such rule"
            yield Finding("R705", message, (logged.log,))
        elif not device:
            yield Finding("R706", "does not name the GPU", (logged.log,))


# --- data ---


@rule
def validation_data(facts: Facts) -> Findings:
    """The whole validation split, and its true bytes."""
    for logged in facts.submitted:
        run, result = logged.run, logged.result
        if run.partial_val:
            message = "partial_val:1: it scored a part of the split: run it again with VAL_TOKENS=0"
            yield Finding("R801", message, (logged.log,))
        size = SPLITS.get(run.val_tokens)
        if run.val_tokens is None:
            yield Finding("R804", "bytes: not checked: it does not say val_tokens", (logged.log,))
        elif size is None:
            message = f"bytes: not checked: {run.val_tokens:,} tokens are of no known split"
            yield Finding("R804", message, (logged.log,))
        elif not is_number(result.val_loss) or not result.val_loss > 0:
            yield Finding("R804", "bytes: not checked: it does not say val_loss", (logged.log,))
        else:
            yield from implied_bytes(logged, size)


def share_off(result: Result | Validation, tokens: int, size: int) -> float:
    """By how much the bytes that a loss and its bits per byte imply differ from the split's."""
    return result.val_loss / math.log(2) * tokens / result.val_bpb / size - 1


def implied_bytes(logged: LoggedRun, size: int) -> Findings:
    result, tokens = logged.result, logged.run.val_tokens
    share = share_off(result, tokens, size)
    if abs(share) <= BYTES_OFF:
        return
    last = logged.run.final_validation
    if last is not None and is_number(last.val_loss) and is_number(last.val_bpb):
        others = share_off(last, tokens, size)
        if abs(others) <= BYTES_OFF < BYTES_WRONG < abs(share):
            message = (
                f"val_loss and val_bpb of {result.tag} are not of one evaluation: "
                "those of the last validation imply the split's bytes"
            )
            yield Finding("R805", message, (logged.log,))
            return
    hint = ": the leading space counted twice?" if 0.14 < share < 0.2 else ""
    message = f"val_loss and val_bpb imply {100 * share:+.2f} % of the split's bytes{hint}"
    yield Finding("R802" if abs(share) > BYTES_WRONG else "R803", message, (logged.log,))


def not_a_record(folder: Path, shown_as: str, names: list[str]) -> Finding | None:
    """A path that is no folder, or a folder of records."""
    if not folder.is_dir():
        what = "it is a file" if folder.exists() else "no such folder"
        return Finding("R101", f"{what}: name the folder of a record")
    inside = [name for name in names if re.search(r"/submission[^/]*\.json$", name)]
    own = [name for name in names if re.match(r"submission(?!\.schema)[^/]*\.json$", name)]
    if inside and not own:
        first = Path(shown_as, inside[0]).parent
        return Finding("R101", f"no record, but a folder of records: name those, as {first}")
    return None
