"""Check whether a record would be accepted, and print one line for each finding. No file of the
record is run.

    python3 tools/check.py FOLDER...       records/<track>/<YYYY-MM-DD>_<Description>, or anywhere
    python3 tools/check.py FOLDER --track track_10min_16mb     check by the rules of this track

A finding is one of these: refused (the record breaks a rule of the challenge), warned (a maintainer
will ask about it), not checked (no log can show it). Only the runs whose mean is the stated val_bpb
are judged: runs of other variants and of earlier stages in the folder do not count. To find out
whether a record is better than another one, use compare.py --a FOLDER --b OTHER.

Exit code: 0 no folder was refused, 1 a folder was refused, 2 wrong usage.
"""

# This module builds on runs.py (reads logs), samples.py (which runs belong together) and packed.py
# (compares scripts).

import json
import math
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from itertools import islice, product
from pathlib import Path, PurePosixPath
from statistics import fmean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # python3 -P does not add it
import cli
from cli import join_some, printable
from packed import MAX_SOURCE, describe_difference, parse_script
from runs import SUBMITTED, Run, read_log
from samples import (
    SAME_TEXT,
    SIZE_LIMIT_BYTES,
    bytes_scored,
    least_bytes_scored,
    relevant_differences,
    repeated_seeds,
    run_identity,
    seed_groups,
)

RECORD_TRACK, OPEN_TRACK = TRACKS = ("track_10min_16mb", "track_non_record_16mb")
LEVELS = ("refused", "warned", "not checked")
SCRIPT = "train_gpt.py"
SCORES = ("val_bpb", "val_loss")
CLOSE = 1e-4  # nats or bits per byte: results that differ by less were rounded differently
TIME_LIMIT_MS = 600_000.0  # of training, and of evaluation
TEXT_BYTES = 151_080_362  # of the challenge's validation split, as published
# Counted bytes may differ by this factor: tokenizers, and sequences that are left out, change less.
SAME_BYTES = 1.01
JUDGED_BY_OTHER_RULES = ("code", "code_bytes", "device")  # conditions
TODO = "TODO: "  # package.py writes it where the author has to write a text
USUAL_FILES = re.compile(r"(requirements.*\.txt|license|.*\.(md|json|log|png|svg|jpe?g|gif|pdf))")
NEVER_CHECKED = "what the script computes: read it, and run it"
LOG = re.compile(r"(?!requirements|readme|license).*\.(log|txt|out)", re.IGNORECASE)


def list_folder(folder: Path) -> dict[str, int]:
    """Return {path in the folder: size in bytes} of all files in a folder. Symbolic links are left
    out."""
    sizes: dict[str, int] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not path.is_symlink() and not name.startswith(".git/"):
            sizes[name] = path.stat().st_size
    return sizes


def find_file(files: Collection[str], name: str, pattern: str) -> str:
    """Return `name` if there is such a file, or else the only name that matches the pattern."""
    others = [other for other in files if re.fullmatch(pattern, other)]
    return others[0] if name not in files and len(others) == 1 else name


def read_start(path: Path) -> bytes:
    """Return the beginning of a file: more bytes than a script, a README or submission.json has."""
    with open(path, "rb") as file:
        return file.read(MAX_SOURCE + 1)


def read_submission(data: bytes) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return the values of submission.json and its faults. Floats are Decimals, so that all written
    digits are kept."""
    import jsonschema

    try:
        text = data.decode("utf-8-sig")
        given = json.loads(text, parse_float=Decimal, parse_constant=str)
        values = {key: value for key, value in given.items() if value is not None}
    except (ValueError, ArithmeticError, RecursionError, AttributeError) as error:
        where = f" (line {error.lineno})" if isinstance(error, json.JSONDecodeError) else ""
        return {}, [("refused", f"submission.json is not a JSON object{where}")]
    rules = json.loads((cli.ROOT / "tools/submission.schema.json").read_text(encoding="utf-8"))
    found = jsonschema.Draft202012Validator(rules).iter_errors(values)
    faults = []
    for error in found:
        words = [*map(str, error.absolute_path), error.message[:200]]
        faults.append(("warned", f"submission.json: {': '.join(words)}"))
    return values, faults


def is_number(value: object) -> bool:
    return type(value) in (int, float, Decimal) and -1e18 < value < 1e18  # false for nan


def read_runs(root: Path, files: Iterable[str]) -> tuple[dict[str, Run], dict[str, str]]:
    """Return {name of a log: its run}, and {name of a file: why it has no run}. If several logs are
    copies of each other, only the first one is read. What was left out of a log is in the run's
    `notes`."""
    runs: dict[str, Run] = {}
    problems: dict[str, str] = {}
    names_by_identity: dict[Any, str] = {}
    names = [name for name in files if LOG.fullmatch(PurePosixPath(name).name)]
    for name in sorted(names, key=lambda name: (not is_submitted(name), name)):
        log = read_log(root / name, events=False)  # reviewers read the text, so the text counts
        identity = run_identity(log.runs[0]) if log.runs else None
        if not log.runs:
            problems[name] = log.problems[0]
        elif identity and names_by_identity.setdefault(identity, name) != name:
            problems[name] = f"it is a copy of {names_by_identity[identity]}"
        else:
            runs[name] = log.runs[0]
    return runs, problems


def is_submitted(name: str) -> bool:
    """Return whether the name is that of a log of a submitted run."""
    return re.fullmatch(r"train(_seed\d+)?\.log", name) is not None


def is_scored(run: Run) -> bool:
    return run.result is not None and is_number(run.result.val_bpb) and run.result.val_bpb > 0


class Record:
    """The facts about a folder that the rules judge, and the findings of the rules."""

    def __init__(self, folder: Path, track: str | None = None) -> None:
        root = self.root = Path(
            os.path.abspath(folder)
        )  # the rules use its name and its parent's name
        self.files = list_folder(root)
        self.stated: dict[str, Any] = {}  # the values of submission.json
        self.submission_faults = [
            ("refused", "there is no submission.json; make it with tools/package.py from the logs")
        ]
        name = find_file(self.files, "submission.json", r"submission\w*\.json")
        if name in self.files:
            self.stated, self.submission_faults = read_submission(read_start(root / name))
            if name != "submission.json":
                words = f"submission.json is missing; rename {name} to submission.json"
                self.submission_faults.append(("warned", words))
        self.runs, self.no_logs = read_runs(root, self.files)  # {name of a log: run}
        self.judged = score_runs(self.stated, self.runs)  # the runs of the score
        self.script = find_file(self.files, SCRIPT, r"train\w*\.py")
        self.source = read_start(root / self.script) if self.script in self.files else b""
        folder_track = root.parent.name if root.parent.name in TRACKS else None
        is_open = re.search("non.?record", str(self.stated.get("track")), re.IGNORECASE)
        self.track = track or folder_track or (OPEN_TRACK if is_open else RECORD_TRACK)
        # The level of findings that refuse a record, but are only warnings in the other track.
        self.serious = "refused" if self.track == RECORD_TRACK else "warned"
        self.code_bytes = self.files.get(self.script, 0)
        self.model_bytes = max([0, *(run.model_bytes or 0 for run in self.judged.values())])
        # True if the model and the script as it is are too large together.
        total = self.model_bytes + self.code_bytes
        self.too_large_unpacked = bool(self.model_bytes) and total > SIZE_LIMIT_BYTES
        # The findings, the worst one first: a level, a sentence, and the logs that have the
        # finding.
        self.findings: list[tuple[str, str, list[str]]] = []

    @property
    def verdict(self) -> str:
        worst = self.findings[0][0] if self.findings else ""
        return worst if worst in ("refused", "warned") else "accepted"


def score_runs(stated: Mapping[str, Any], runs: Mapping[str, Run]) -> dict[str, Run]:
    """Return the runs whose mean is the stated val_bpb, each with the result of which it is the
    mean. A folder may also contain logs of other variants and of earlier stages, and a log may
    contain results of several evaluations: the results of a mean must have the same name. If no
    mean is the stated one, return the last results of the logs with the names of submitted runs,
    or of all logs."""
    scored = {name: run for name, run in runs.items() if is_scored(run)}
    usual = {name: run for name, run in scored.items() if is_submitted(name)} or scored
    best, misfits = usual, math.inf
    if not is_number(stated.get("val_bpb")) or not usual:
        return usual
    for group in groups_of_runs(scored, usual):
        for chosen in (group, *with_equal_names(group)):
            gaps = [rounding_gap(stated, key, chosen.values()) for key in SCORES]
            wrong = sum(map(bool, gaps))
            if gaps[0] <= CLOSE and wrong < misfits:
                best, misfits = chosen, wrong
    return best


def groups_of_runs(scored: Mapping[str, Run], usual: Mapping[str, Run]) -> Iterator[dict[str, Run]]:
    """Yield groups of runs of which a score may be the mean: the submitted runs by their names, the
    runs of one configuration, one run of each seed."""
    yield dict(usual)
    names = [*scored]
    for numbers in seed_groups([*scored.values()], JUDGED_BY_OTHER_RULES):
        yield {names[number]: scored[names[number]] for number in numbers}
    of_seed: dict[Any, list[str]] = {}
    for name, run in scored.items():
        of_seed.setdefault(name if run.known_seed is None else run.known_seed, []).append(name)
    for one_each in islice(product(*of_seed.values()), 1000):
        yield {name: scored[name] for name in one_each}


def with_equal_names(
    group: Mapping[Any, Run], kinds: Collection[str] = SUBMITTED
) -> Iterator[dict[Any, Run]]:
    """Yield the runs with their results of one name, for each name that all runs have. `kinds` are
    those of the results."""
    results = [
        {one.name: one for one in run.results if one.kind in kinds and is_number(one.val_bpb)}
        for run in group.values()
    ]
    for name in reversed(results[0] if results else {}):
        if all(name in of_run for of_run in results):
            pairs = zip(group.items(), results, strict=True)
            yield {log: replace(run, result=of_run[name]) for (log, run), of_run in pairs}


def rounding_gap(stated: Mapping[str, Any], key: str, runs: Collection[Run]) -> float:
    """Return how far a number of submission.json is from the mean of the runs' results; 0 if it is
    the rounded mean, or if the number or a result is not known."""
    given, values = stated.get(key), [getattr(run.result, key) for run in runs]
    if not is_number(given) or not values or not all(map(is_number, values)):
        return 0.0
    rounding = min(0.51 * 10.0 ** -len(str(given).partition(".")[2]), 0.0051)
    rounding += max(max(0.51 * 10.0**-run.result.digits for run in runs), 1e-8)
    gap = abs(fmean(values) - float(given))
    return gap if gap > rounding else 0.0


Findings = Iterator[tuple[str, str]]  # levels and sentences


def check_files(record: Record) -> Findings:
    """Check README.md, submission.json, the script and the other files."""
    if "README.md" not in record.files:
        yield "refused", "there is no README.md; write what was done and how to run it"
    elif TODO.encode() in read_start(record.root / "README.md"):
        yield "warned", "README.md still contains a TODO; write what was done"
    for name in sorted(record.files.keys() - {*record.runs, *record.no_logs, record.script}):
        if not USUAL_FILES.fullmatch(PurePosixPath(name).name.lower()):
            yield (
                "not checked",
                f"{name}: if {record.script} needs this file, its bytes count as code",
            )
    if not record.source:
        yield record.serious, "train_gpt.py is missing or empty; add the script that ran"
    elif record.script != SCRIPT:
        yield "warned", f"train_gpt.py is missing; rename {record.script} to train_gpt.py"
    try:
        parse_script(record.source)
    except ValueError as error:
        yield "warned", f"{record.script}: {error}"
    yield from record.submission_faults


def check_logs(record: Record) -> Findings:
    """Check that the logs have results."""
    if not record.judged:
        yield record.serious, "no log has a result; add train_seed<N>.log for each seed"
    for name, problem in record.no_logs.items():
        if is_submitted(name):
            yield "warned", f"{name}: {problem}"
    for name, run in record.runs.items():
        if not is_scored(run) and "/" not in name:
            yield "warned", f"{name}: {run.status} at step {run.last_step:,}, without a result"
        if is_submitted(name) or name in record.judged:
            yield from (("warned", f"{name}: {note}") for note in run.notes)
    others = len(record.runs) - len(record.judged)
    if others > 0 and record.judged:
        words = f"{others} further runs in the folder; only these were judged"
        yield "not checked", f"{words}: {join_some([*record.judged])}"


def check_seeds(record: Record) -> Findings:
    """Check that there are several seeds of one configuration, and that submission.json lists
    them."""
    runs = record.judged
    numbers = sorted(run.known_seed for run in runs.values() if run.known_seed is not None)
    given = record.stated.get("seeds")
    if isinstance(given, list) and numbers and {*map(str, given)} != {*map(str, numbers)}:
        words = f"submission.json lists the seeds {join_some(given)}"
        yield "warned", f"{words}, but the logs have {join_some(numbers)}"
    for seed, repeated in repeated_seeds([*runs.values()]).items():
        names = " and ".join(run.name for run in repeated)
        yield (
            "warned",
            f"{names} have the same seed {seed}, so they are one sample; give one of them",
        )
    if 0 < len(runs) < 3 and record.track == RECORD_TRACK:
        yield "warned", f"there are only {len(runs)} runs; three seeds are usual"
    if differing := relevant_differences([*runs.values()], allow=JUDGED_BY_OTHER_RULES):
        yield "warned", f"the runs differ in configuration: {join_some(differing)}"


def check_stated_results(record: Record) -> Findings:
    """Check that the stated val_bpb and val_loss are means of results."""
    for key in SCORES:
        if rounding_gap(record.stated, key, record.judged.values()):
            given = record.stated[key]
            found = explain_number(key, [*record.judged.values()])
            level, words, value = min(found, key=lambda one: abs(one[2] - float(given)))
            if abs(value - float(given)) > CLOSE:
                level, words = "refused", f"in no result line; the nearest is {words}"
            level = level if key == "val_bpb" else "warned"  # records are judged by val_bpb
            yield level, f"{key} {given} is {words}, {value:.8f}"


def explain_number(key: str, runs: Sequence[Run]) -> Iterator[tuple[str, str, float]]:
    """Yield what a number that is not the mean of the results may be: (level of the finding, in
    words, value)."""
    for chosen in (*with_equal_names(dict(enumerate(runs))), dict(enumerate(runs))):
        values = [getattr(run.result, key) for run in chosen.values()]
        if all(map(is_number, values)):
            yield "warned", f"the mean of {chosen[0].result.name}", fmean(values)
    for chosen in with_equal_names(dict(enumerate(runs)), ["before"]):
        results = [run.result for run in chosen.values()]
        values = [getattr(result, key) for result in results]
        if all(map(is_number, values)):
            words = f"the mean of {results[0].name}, which is no score of the artifact"
            if (longest := max(result.eval_ms or 0 for result in results)) > TIME_LIMIT_MS:
                words += f" (and took up to {longest / 1e3:,.1f} s; the limit is 600 s)"
            yield "refused", words, fmean(values)
    for run in runs:
        for one in run.results:
            level = "warned" if one.kind in SUBMITTED else "refused"
            yield level, f"{one.name} of {run.name}", getattr(one, key) or math.inf


def check_sizes(record: Record) -> Findings:
    """Check that code and model are at most 16,000,000 bytes, and that submission.json says their
    size."""
    model, size = record.model_bytes, record.code_bytes
    allowed = f"; {SIZE_LIMIT_BYTES:,} bytes are allowed"
    totals = [run.total_bytes for run in record.judged.values() if run.total_bytes]
    counted = max([0, *(run.code_bytes or 0 for run in record.judged.values())]) or size
    stated = record.stated.get("bytes_total")
    stated = stated if is_number(stated) else 0
    if record.judged and not model:
        yield "not checked", "the size of the compressed model"
    if size > SIZE_LIMIT_BYTES:
        yield "refused", f"{record.script} has {size:,} bytes{allowed}"
    if stated > SIZE_LIMIT_BYTES:
        yield "refused", f"bytes_total is {stated:,}{allowed}"
    if max(totals, default=0) > SIZE_LIMIT_BYTES:
        yield "refused", f"a log's total is {max(totals):,} bytes{allowed}"
    elif record.too_large_unpacked and counted < size:
        words = f"model and {record.script} are {model + size:,} bytes{allowed}"
        yield (
            "warned",
            f"{words}; the logs count only {counted:,} bytes of code: submit that packed form",
        )
    elif record.too_large_unpacked:
        yield "refused", f"model and code are {model + size:,} bytes{allowed}; pack the script"
    totals.append(model + size)
    if model and stated and not min(totals) - 1 <= stated <= max(totals):
        yield "warned", f"bytes_total is {stated:,}, but model and code are {model + size:,} bytes"


def check_script(record: Record, run: Run) -> Findings:
    """Check that the submitted script, readable or packed, made the whole run."""
    size = record.code_bytes
    if not run.source:
        yield "not checked", "the script that ran"
    if len({*run.scripts}) > 1:
        yield "refused", "the run was resumed with another script; submit a run of one script"
    elif run.resumed_at:
        yield record.serious, f"the run was resumed at step {run.resumed_at[-1]:,}"
    if record.source and run.source is not None:
        if words := describe_difference(run.source, record.source):
            yield "warned", f"the log contains another script than {record.script}: {words}"
    elif record.source and run.code_bytes not in (None, size) and not record.too_large_unpacked:
        words = f"the log counts {run.code_bytes:,} bytes of code, but {record.script} has {size:,}"
        yield "warned", f"{words}; submit the script that ran"


def check_warnings(record: Record, run: Run) -> Findings:
    """Repeat the warnings of the run, for example that GPTQ took longer than its reserved time."""
    for text in run.warnings:
        yield "warned", f"the log says: {text}"


def check_times(record: Record, run: Run) -> Findings:
    """Check that training and evaluation took at most ten minutes each."""
    known = [run.train_time_ms, *(step.train_time_ms for step in run.steps)]
    trained = max(filter(is_number, known), default=0.0)
    late = 2 * trained / max(1, run.last_step)  # a run may end one or two steps after the limit
    if not trained:
        yield "not checked", "the training time"
    elif trained > TIME_LIMIT_MS + late:
        yield "refused", f"training took {trained / 1e3:,.1f} s; the limit is 600 s"
    # One evaluation may be printed twice. Diagnostic results are no part of the evaluation.
    kept = [one for one in run.results if one.kind in SUBMITTED and one.eval_ms]
    passes = [*{round(one.val_bpb, 4): one.eval_ms for one in kept}.values()]
    if not passes:
        yield "not checked", "the evaluation time"
    elif max(passes) > TIME_LIMIT_MS:
        yield "refused", f"the evaluation took {max(passes) / 1e3:,.1f} s; the limit is 600 s"
    elif sum(passes) > TIME_LIMIT_MS:
        words = f"{len(passes)} evaluations took {sum(passes) / 1e3:,.1f} s together"
        yield "warned", f"{words}; the limit is 600 s for all that the score needs"


def check_machine(record: Record, run: Run) -> Findings:
    """Check that the run was made on 8 H100s."""
    device, count = str(run.machine.get("device") or ""), run.world_size
    remedy = f"; this rule does not apply with --track {OPEN_TRACK}"
    if count not in (None, 8):
        yield (
            "refused",
            f"the run was made on {count} x {device or 'a device'}, not on 8 H100s{remedy}",
        )
    elif device and "H100" not in device:
        yield "warned", f"the run was made on {count or '?'} x {device}, not on 8 H100s{remedy}"
    elif not device:
        yield "not checked", "the GPU"


def check_validation_data(record: Record, run: Run) -> Findings:
    """Check that the whole validation split was scored and each of its bytes was counted once."""
    size = bytes_scored(run)
    counted = f"it counted {size or 0:,.0f} bytes of text, the challenge's split has {TEXT_BYTES:,}"
    if run.partial_val:
        yield "refused", "it scored only a part of the validation split; run it with VAL_TOKENS=0"
    elif size is None:
        yield from check_chunks(run)
    elif size > TEXT_BYTES * SAME_TEXT:
        yield "refused", f"{counted}; some may be counted twice: run data/audit.py"
    elif size > TEXT_BYTES * SAME_BYTES:
        yield "warned", f"{counted}; run data/audit.py"
    elif size < TEXT_BYTES / SAME_BYTES:
        yield record.serious, f"{counted}; score the whole split"


def check_chunks(run: Run) -> Findings:
    """Check the number of counted bytes of a log that says only how many chunks it scored."""
    least = least_bytes_scored(run)
    if least is None or least < TEXT_BYTES / SAME_BYTES:
        yield "not checked", "the number of counted bytes; run data/audit.py to check it"
    elif least > TEXT_BYTES * SAME_BYTES:
        scored = f"{least / 1e6:,.1f} million bytes of text or more in {run.val_chunks:,} chunks"
        words = f"it counted {scored}, the challenge's split has {TEXT_BYTES:,} bytes"
        level = "refused" if least > TEXT_BYTES * SAME_TEXT else "warned"
        yield level, f"{words}; some may be counted twice: run data/audit.py"


RULES = (check_files, check_logs, check_seeds, check_stated_results, check_sizes)
RUN_RULES = (check_script, check_warnings, check_validation_data)  # for each run
RECORD_RULES = (check_times, check_machine)  # for each run in the record track


def check_folder(folder: Path, track: str | None = None) -> Record:
    """Check a folder. If several logs have the same finding, it is listed once."""
    record = Record(folder, track)
    found: dict[tuple[str, str], list[str]] = {}
    for rule in RULES:
        for finding in rule(record):
            found.setdefault(finding, [])
    run_rules = [*RUN_RULES, *(RECORD_RULES if record.track == RECORD_TRACK else ())]
    for rule, (log, run) in product(run_rules, record.judged.items()):
        for finding in rule(record, run):
            found.setdefault(finding, []).append(log)
    findings = [(*finding, logs) for finding, logs in found.items()]
    record.findings = sorted(findings, key=lambda finding: LEVELS.index(finding[0]))
    return record


def report_lines(record: Record, name: object) -> list[str]:
    """Return the verdict, the figures and the findings as lines of text."""
    verdict = {"accepted": "accepted", "warned": "warnings", "refused": "refused"}[record.verdict]
    result = [f"{printable(str(name))}: {verdict} (by the rules of {record.track})"]
    scores = []
    for key in SCORES:
        values = [getattr(run.result, key) for run in record.judged.values()]
        if values and all(map(is_number, values)):
            spread = f" +- {stdev(values):.5f}" if len(values) > 1 else ""
            scores.append(f"{key} {fmean(values):.5f}{spread}")
    if scores:
        seeds = sorted(str(run.known_seed) for run in record.judged.values())
        result.append(f"  {', '.join(scores)}, seeds {', '.join(seeds)}")
    if record.model_bytes and record.source:
        total = record.model_bytes + record.code_bytes
        parts = f"code {record.code_bytes:,} + model {record.model_bytes:,} = {total:,} bytes"
        result.append(f"  {parts}, {SIZE_LIMIT_BYTES - total:,} unused")
    for level, message, found_in in record.findings:
        logs = found_in if len(found_in) < len(record.judged) else ()
        subject = f"{join_some(logs)}: " if logs else ""
        result.append(printable(f"  {level:11}  {subject}{message}"))
    return [*result, f"  not checked  {NEVER_CHECKED}"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    add("folders", nargs="+", type=Path, metavar="FOLDER", help="the folder of a record")
    add(
        "--track",
        choices=TRACKS,
        help="check by the rules of this track (default: the track of the folder)",
    )
    options = parser.parse_args(arguments)
    for folder in options.folders:
        if not folder.is_dir():
            parser.error(f"{folder}: no such folder; give the folder of a record")
    records = [check_folder(folder, options.track) for folder in options.folders]
    pairs = zip(records, options.folders, strict=True)
    print("\n\n".join("\n".join(report_lines(record, folder)) for record, folder in pairs))
    return int(any(record.verdict == "refused" for record in records))


if __name__ == "__main__":
    sys.exit(cli.run(main))
