"""Say whether a record would be accepted, with one line per finding. No file of the record is run.

    python3 tools/check.py FOLDER...       records/<track>/<YYYY-MM-DD>_<Description>, or anywhere
    python3 tools/check.py FOLDER --track track_10min_16mb     judge it by that track's rules

refused: it breaks a rule of the challenge. warned: a maintainer will ask about it. not checked:
what no log can show. The runs that are judged are those whose mean is the stated val_bpb: other
arms and earlier stages in the folder do not count.
Whether it is better than another record is asked by compare.py --a FOLDER --b OTHER.

Exit code: 0 no folder was refused, 1 a folder was refused, 2 wrong usage.
"""

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

sys.path.insert(0, str(Path(__file__).resolve().parent))  # not there with python3 -P
import cli
from cli import join_some, printable
from packed import MAX_SOURCE, difference, parsed
from runs import SUBMITTED, Run, read_log
from samples import (
    SAME_TEXT,
    SIZE_LIMIT_BYTES,
    bytes_scored,
    relevant_differences,
    run_identity,
    seed_groups,
)

RECORD, OPEN = TRACKS = ("track_10min_16mb", "track_non_record_16mb")
LEVELS = ("refused", "warned", "not checked")
SCRIPT = "train_gpt.py"
SCORES = ("val_bpb", "val_loss")
CLOSE = 1e-4  # nats or bits: the same result, rounded elsewhere
CAP_MS = 600_000.0  # of training, and of evaluation
TEXT_BYTES = 151_080_362  # of the challenge's validation split, as published
SAME_BYTES = 1.01  # times: tokenizers, and rows that are left out, change less
OF_SCRIPTS = ("code", "code_bytes", "device")  # conditions that other rules judge
TODO = "TODO: "  # begins what package.py leaves to be written by hand
USUAL = re.compile(r"(requirements.*\.txt|license|.*\.(md|json|log|png|svg|jpe?g|gif|pdf))")
UNSEEN = "what the script computes: read it, and run it"
LOG = re.compile(r"(?!requirements|readme|license).*\.(log|txt|out)", re.IGNORECASE)


def list_folder(folder: Path) -> dict[str, int]:
    """The files below a folder by their path in it, with their sizes. Links are not followed."""
    sizes: dict[str, int] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not path.is_symlink() and not name.startswith(".git/"):
            sizes[name] = path.stat().st_size
    return sizes


def file_named(files: Collection[str], name: str, pattern: str) -> str:
    """This name; if there is no such file, that of the only one whose name is like it."""
    others = [other for other in files if re.fullmatch(pattern, other)]
    return others[0] if name not in files and len(others) == 1 else name


def start_of(path: Path) -> bytes:
    """The file, without what is too much for a script, a README or submission.json."""
    with open(path, "rb") as file:
        return file.read(MAX_SOURCE + 1)


def read_submission(data: bytes) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The values, and the file's faults. Floats are Decimals, as they were written."""
    import jsonschema

    try:
        text = data.decode("utf-8-sig")
        given = json.loads(text, parse_float=Decimal, parse_constant=str)
        values = {key: value for key, value in given.items() if value is not None}
    except (ValueError, ArithmeticError, RecursionError, AttributeError) as error:
        where = f" (line {error.lineno})" if isinstance(error, json.JSONDecodeError) else ""
        return {}, [("refused", f"submission.json: it is not a JSON object{where}")]
    rules = json.loads((cli.ROOT / "tools/submission.schema.json").read_text(encoding="utf-8"))
    found = jsonschema.Draft202012Validator(rules).iter_errors(values)
    faults = [": ".join([*map(str, one.absolute_path), one.message[:200]]) for one in found]
    return values, [("warned", f"submission.json: {fault}") for fault in faults]


def is_number(value: object) -> bool:
    return type(value) in (int, float, Decimal) and -1e18 < value < 1e18  # not nan


def read_runs(root: Path, files: Iterable[str]) -> tuple[dict[str, Run], dict[str, str]]:
    """The run of each log by its name, and why no run was read from a file that may be a log. Of
    copies the first one is read."""
    runs: dict[str, Run] = {}
    problems: dict[str, str] = {}
    traces: dict[Any, str] = {}
    names = [name for name in files if LOG.fullmatch(PurePosixPath(name).name)]
    for name in sorted(names, key=lambda name: (not is_submitted(name), name)):
        log = read_log(root / name, events=False)  # the reviewer reads the text
        known = run_identity(log.runs[0]) if log.runs else None
        if not log.runs:
            problems[name] = log.problems[0]
        elif known and traces.setdefault(known, name) != name:
            problems[name] = f"it is a copy of {traces[known]}"
        else:
            runs[name] = log.runs[0]
    return runs, problems


def is_submitted(name: str) -> bool:
    """Is it a log of the submitted runs by its name?"""
    return re.fullmatch(r"train(_seed\d+)?\.log", name) is not None


def is_scored(run: Run) -> bool:
    return run.result is not None and is_number(run.result.val_bpb) and run.result.val_bpb > 0


class Record:
    """All that rules judge a folder by, and what they say."""

    def __init__(self, folder: Path, track: str | None = None) -> None:
        root = self.root = Path(os.path.abspath(folder))  # its name and its parent's count
        self.files = list_folder(root)
        self.stated: dict[str, Any] = {}  # by submission.json
        self.said = [("refused", "no submission.json: let tools/package.py make one of the logs")]
        name = file_named(self.files, "submission.json", r"submission\w*\.json")
        if name in self.files:
            self.stated, self.said = read_submission(start_of(root / name))
            if name != "submission.json":
                self.said.append(("warned", f"submission.json is missing: it is {name}: rename it"))
        self.runs, self.no_logs = read_runs(root, self.files)  # by the names of the logs
        self.judged = score_runs(self.stated, self.runs)  # those of the score
        self.script = file_named(self.files, SCRIPT, r"train\w*\.py")
        self.source = start_of(root / self.script) if self.script in self.files else b""
        own = root.parent.name if root.parent.name in TRACKS else None
        is_open = re.search("non.?record", str(self.stated.get("track")), re.IGNORECASE)
        self.track = track or own or (OPEN if is_open else RECORD)
        # The level of what refuses a record, and is asked about in the other track.
        self.serious = "refused" if self.track == RECORD else "warned"
        self.code_bytes = self.files.get(self.script, 0)
        self.model_bytes = max([0, *(run.model_bytes or 0 for run in self.judged.values())])
        # Are model and script, as it is, too large together?
        total = self.model_bytes + self.code_bytes
        self.too_large_unpacked = bool(self.model_bytes) and total > SIZE_LIMIT_BYTES
        # What rules say, the worst first: a level, a sentence, and the logs that it is about.
        self.findings: list[tuple[str, str, list[str]]] = []

    @property
    def verdict(self) -> str:
        worst = self.findings[0][0] if self.findings else ""
        return worst if worst in ("refused", "warned") else "accepted"


def score_runs(stated: Mapping[str, Any], runs: Mapping[str, Run]) -> dict[str, Run]:
    """The runs whose mean is the stated val_bpb, each with the result that is meant. A folder may
    also hold logs of other arms and of earlier stages, and a log results of several evaluations:
    a mean is one of equally named results. If none is what is stated: the last results of the
    logs that are submitted by their names, or of all."""
    scored = {name: run for name, run in runs.items() if is_scored(run)}
    usual = {name: run for name, run in scored.items() if is_submitted(name)} or scored
    best, misfits = usual, math.inf
    if not is_number(stated.get("val_bpb")) or not usual:
        return usual
    for group in groups_of_runs(scored, usual):
        for chosen in (group, *with_equal_names(group)):
            gaps = [gap_of(stated, key, chosen.values()) for key in SCORES]
            if gaps[0] <= CLOSE and sum(map(bool, gaps)) < misfits:
                best, misfits = chosen, sum(map(bool, gaps))
    return best


def groups_of_runs(scored: Mapping[str, Run], usual: Mapping[str, Run]) -> Iterator[dict[str, Run]]:
    """Runs of which a score may be the mean: the usual ones, those of one configuration, one of
    each seed."""
    yield dict(usual)
    names = [*scored]
    for numbers in seed_groups([*scored.values()], OF_SCRIPTS):
        yield {names[number]: scored[names[number]] for number in numbers}
    of_seed: dict[Any, list[str]] = {}
    for name, run in scored.items():
        of_seed.setdefault(name if run.known_seed is None else run.known_seed, []).append(name)
    for one_each in islice(product(*of_seed.values()), 1000):
        yield {name: scored[name] for name in one_each}


def with_equal_names(group: Mapping[str, Run]) -> Iterator[dict[str, Run]]:
    """The runs with results of one name, for each name that all of them have."""
    results = [
        {one.name: one for one in run.results if one.kind in SUBMITTED and is_number(one.val_bpb)}
        for run in group.values()
    ]
    for name in reversed(results[0] if results else {}):
        if all(name in own for own in results):
            pairs = zip(group.items(), results, strict=True)
            yield {log: replace(run, result=own[name]) for (log, run), own in pairs}


def gap_of(stated: Mapping[str, Any], key: str, runs: Collection[Run]) -> float:
    """How far a number of submission.json is from the mean of the runs' results; 0: rounded, it is
    the mean, or one of them does not say it."""
    given, values = stated.get(key), [getattr(run.result, key) for run in runs]
    if not is_number(given) or not values or not all(map(is_number, values)):
        return 0.0
    rounding = min(0.51 * 10.0 ** -len(str(given).partition(".")[2]), 0.0051)
    rounding += max(max(0.51 * 10.0**-run.result.digits for run in runs), 1e-8)
    gap = abs(fmean(values) - float(given))
    return gap if gap > rounding else 0.0


Said = Iterator[tuple[str, str]]  # levels and sentences


def folder(record: Record) -> Said:
    """Its name and its files."""
    if "README.md" not in record.files:
        yield "refused", "no README.md: write what was done and how to run it"
    elif TODO.encode() in start_of(record.root / "README.md"):
        yield "warned", "README.md still has a TODO: write what was done"
    for name in sorted(record.files.keys() - {*record.runs, *record.no_logs, record.script}):
        if not USUAL.fullmatch(PurePosixPath(name).name.lower()):
            yield "not checked", f"{name}: what {record.script} needs counts as code"
    if not record.source:
        yield record.serious, "train_gpt.py is missing or empty: add the script that ran"
    elif record.script != SCRIPT:
        yield "warned", f"train_gpt.py is missing: it is {record.script}: rename it"
    try:
        parsed(record.source)
    except ValueError as error:
        yield "warned", f"{record.script}: {error}"
    yield from record.said


def finished_runs(record: Record) -> Said:
    if not record.judged:
        yield record.serious, "no log has a result: add train_seed<N>.log of each seed"
    for name, problem in record.no_logs.items():
        if is_submitted(name):
            yield "warned", f"{name}: {problem}"
    for name, run in record.runs.items():
        if not is_scored(run) and "/" not in name:
            yield "warned", f"{name}: {run.status} at step {run.last_step:,}, without a result"
    others = len(record.runs) - len(record.judged)
    if others > 0 and record.judged:
        yield "not checked", f"{others} other runs than those of {join_some([*record.judged])}"


def seeds(record: Record) -> Said:
    """Several seeds of one configuration, each once, the same everywhere."""
    runs = record.judged
    numbers = sorted(run.known_seed for run in runs.values() if run.known_seed is not None)
    given = record.stated.get("seeds")
    if isinstance(given, list) and numbers and {*map(str, given)} != {*map(str, numbers)}:
        words = f"submission.json names the seeds {join_some(given)}, the logs have {join_some(numbers)}"
        yield "warned", words
    if 0 < len(runs) < 3 and record.track == RECORD:
        yield "warned", f"runs: {len(runs)}; three seeds are usual"
    if apart := relevant_differences([*runs.values()], allow=OF_SCRIPTS):
        yield "warned", f"the runs differ in configuration: {join_some(apart)}"


def stated_results(record: Record) -> Said:
    """val_bpb and val_loss are the means of the results."""
    for key in SCORES:
        if gap_of(record.stated, key, record.judged.values()):
            given = record.stated[key]
            found = meanings(key, [*record.judged.values()])
            level, words, value = min(found, key=lambda one: abs(one[2] - float(given)))
            if abs(value - float(given)) > CLOSE:
                level, words = "refused", f"in no result line: the nearest is {words}"
            level = level if key == "val_bpb" else "warned"  # which is what records are judged by
            yield level, f"{key} {given} is {words}, {value:.8f}"


def meanings(key: str, runs: Sequence[Run]) -> Iterator[tuple[str, str, float]]:
    """What a number that is not the mean of the results may be: how bad that is, in words, and
    its value."""
    for chosen in (*with_equal_names(dict(enumerate(runs))), dict(enumerate(runs))):
        values = [getattr(run.result, key) for run in chosen.values()]
        if all(map(is_number, values)):
            yield "warned", f"the mean of {chosen[0].result.name}", fmean(values)
    for run in runs:
        for one in run.results:
            level = "warned" if one.kind in SUBMITTED else "refused"
            yield level, f"{one.name} of {run.name}", getattr(one, key) or math.inf


def sizes(record: Record) -> Said:
    """Code and model are at most 16,000,000 bytes, and are what submission.json says."""
    model, size, allowed = (
        record.model_bytes,
        record.code_bytes,
        f": {SIZE_LIMIT_BYTES:,} are allowed",
    )
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
        yield "warned", f"{words}; the logs count {counted:,} of code: ship that form, packed"
    elif record.too_large_unpacked:
        yield "refused", f"model and code are {model + size:,} bytes{allowed}: pack the script"
    totals.append(model + size)
    if model and stated and not min(totals) - 1 <= stated <= max(totals):
        yield "warned", f"bytes_total is {stated:,}: model and code are {model + size:,}"


def script_of_run(record: Record, run: Run) -> Said:
    """One script trained it: the shipped one, readable or packed, by its text or by its bytes."""
    size = record.code_bytes
    if not run.source:
        yield "not checked", "the script that ran"
    if len({*run.scripts}) > 1:
        yield "refused", "it was resumed with another script: which one is submitted?"
    elif run.resumed_at:
        yield record.serious, f"resumed at step {run.resumed_at[-1]:,}"
    if record.source and run.source is not None:
        if words := difference(run.source, record.source):
            yield "warned", f"holds another script than {record.script}: {words}"
    elif record.source and run.code_bytes not in (None, size) and not record.too_large_unpacked:
        words = f"counts {run.code_bytes:,} bytes of code, {record.script} has {size:,}"
        yield "warned", f"{words}: which one ran?"


def warnings(record: Record, run: Run) -> Said:
    """What the run itself has warned of, say that GPTQ took longer than the time kept for it."""
    for text in run.warnings:
        yield "warned", f"the log says: {text}"


def times(record: Record, run: Run) -> Said:
    """Ten minutes of training and ten of evaluation."""
    known = [run.train_time_ms, *(step.train_time_ms for step in run.steps)]
    trained = max(filter(is_number, known), default=0.0)
    late = 2 * trained / max(1, run.last_step)  # a run that stops itself is a step or two late
    if not trained:
        yield "not checked", "the training time"
    elif trained > CAP_MS + late:
        yield "refused", f"trained for {trained / 1e3:,.1f} s, not 600"
    # One pass may be printed twice; what is diagnostic is no part of the evaluation.
    kept = [one for one in run.results if one.kind in SUBMITTED and one.eval_ms]
    passes = [*{round(one.val_bpb, 4): one.eval_ms for one in kept}.values()]
    if not passes:
        yield "not checked", "the evaluation time"
    elif max(passes) > CAP_MS:
        yield "refused", f"evaluated for {max(passes) / 1e3:,.1f} s, not 600"
    elif sum(passes) > CAP_MS:
        words = f"its {len(passes)} evaluations took {sum(passes) / 1e3:,.1f} s together"
        yield "warned", f"{words}, and 600 are allowed: which of them are needed for the score?"


def machine(record: Record, run: Run) -> Said:
    """8 H100s."""
    device, count = str(run.machine.get("device") or ""), run.world_size
    remedy = f": --track {OPEN} has no such rule"
    if count not in (None, 8):
        yield "refused", f"ran on {count} x {device or 'a device'}, not on 8 H100s{remedy}"
    elif device and "H100" not in device:
        yield "warned", f"ran on {count or '?'} x {device}, not on 8 H100s{remedy}"
    elif not device:
        yield "not checked", "the GPU"


def validation_data(record: Record, run: Run) -> Said:
    """The whole validation split was scored, and each of its bytes was counted once."""
    size = bytes_scored(run)
    counted = f"it counted {size or 0:,.0f} bytes of text, the challenge's split has {TEXT_BYTES:,}"
    if run.partial_val:
        yield "refused", "it scored a part of the validation split: run it with VAL_TOKENS=0"
    elif size is None:
        yield "not checked", "the bytes that it counted: run data/audit.py"
    elif size > TEXT_BYTES * SAME_TEXT:
        yield "refused", f"{counted}: are some counted twice? Run data/audit.py"
    elif size > TEXT_BYTES * SAME_BYTES:
        yield "warned", f"{counted}: run data/audit.py"
    elif size < TEXT_BYTES / SAME_BYTES:
        yield record.serious, f"{counted}: score the whole of it"


RULES = (folder, finished_runs, seeds, stated_results, sizes)
RUN_RULES = (script_of_run, warnings, validation_data)
RECORD_RULES = (times, machine)  # of each run, too, in the record track


def check_folder(folder: Path, track: str | None = None) -> Record:
    """Judges a folder. The same finding about several logs is one finding."""
    record = Record(folder, track)
    found: dict[tuple[str, str], list[str]] = {}
    for one in (one for rule in RULES for one in rule(record)):
        found.setdefault(one, [])
    of_runs = [*RUN_RULES, *(RECORD_RULES if record.track == RECORD else ())]
    for rule, (log, run) in product(of_runs, record.judged.items()):
        for one in rule(record, run):
            found.setdefault(one, []).append(log)
    findings = [(*one, logs) for one, logs in found.items()]
    record.findings = sorted(findings, key=lambda finding: LEVELS.index(finding[0]))
    return record


def lines(record: Record, shown: object) -> list[str]:
    """The verdict and what it rests on, as text."""
    result = [f"{printable(str(shown))}: {record.verdict} as {record.track}"]
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
        result.append(f"  {parts}, {SIZE_LIMIT_BYTES - total:,} left")
    for level, message, found_in in record.findings:
        logs = found_in if len(found_in) < len(record.judged) else ()
        subject = f"{join_some(logs)}: " if logs else ""
        result.append(printable(f"  {level:11}  {subject}{message}"))
    return [*result, f"  not checked  {UNSEEN}"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    add("folders", nargs="+", type=Path, metavar="FOLDER", help="a record's folder")
    add("--track", choices=TRACKS, help="judge by the rules of this track")
    options = parser.parse_args(arguments)
    for folder in options.folders:
        if not folder.is_dir():
            parser.error(f"{folder}: no such folder: name the folder of a record")
    records = [check_folder(folder, options.track) for folder in options.folders]
    pairs = zip(records, options.folders, strict=True)
    print("\n\n".join("\n".join(lines(record, folder)) for record, folder in pairs))
    return int(any(record.verdict == "refused" for record in records))


if __name__ == "__main__":
    sys.exit(cli.run(main))
