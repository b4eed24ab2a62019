"""A record's folder: its facts, the rules by which it is judged, and what they say.

Nothing of the folder is run.
"""

import datetime
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path, PurePosixPath
from statistics import fmean, stdev
from typing import Any

from cli import plain, some
from packed import difference, is_ours, parsed, unpacked
from runs import SUBMITTED, Result, Run, read_log
from samples import ALPHA, CAP_BYTES, compare_samples, telling, trace

RECORD, OPEN = TRACKS = ("track_10min_16mb", "track_non_record_16mb")
LEVELS = ("refused", "warned", "note", "not checked")
SCRIPT = "train_gpt.py"
SCHEMA = Path(__file__).resolve().parent / "submission.schema.json"
LOG = re.compile(r"(?!requirements|readme|license).*\.(log|txt|out)", re.IGNORECASE)
SUBMITTED_LOG = re.compile(r"train(_seed\d+)?\.log")


def list_folder(folder: Path) -> tuple[dict[str, int], list[str]]:
    """The files below a folder by their path in it, with their sizes, and links that lead out of
    it, which are never followed."""
    sizes: dict[str, int] = {}
    outside: list[str] = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
            outside.append(name)
        elif path.is_file() and not name.startswith(".git/"):
            sizes[name] = path.stat().st_size
    return sizes, outside


# --- submission.json ---


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
    rules = json.loads(SCHEMA.read_text(encoding="utf-8"))
    faults: dict[str, str] = {}
    for error in jsonschema.Draft202012Validator(rules).iter_errors(values):
        key = str(next(iter(error.absolute_path), ""))
        words = f"{key} is {shown(values[key])}: write {error.schema['x-write']}" if key else ""
        faults.setdefault(key or error.message, f"submission.json: {words or error.message}")
    return values, [("warned", fault) for fault in faults.values()]


def shown(value: object) -> str:
    """A value as it stands in the JSON, shortened."""
    text = str(value) if isinstance(value, Decimal) else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_number(value: object) -> bool:
    return type(value) in (int, float, Decimal) and abs(value) < 1e18  # not nan


# --- logs ---


def read_runs(root: Path, files: Sequence[str]) -> tuple[dict[str, Run], dict[str, str]]:
    """The run of each log by its name, and why no run was read from a file that may be a log. Of
    copies the first one is read."""
    names = [name for name in files if LOG.fullmatch(PurePosixPath(name).name)]
    runs: dict[str, Run] = {}
    problems: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (not is_submitted(name), name)):
        log = read_log(root / name, events=False)  # the reviewer reads the text
        if not log.runs:
            problems[name] = "; ".join(log.problems[:1])
        for run in log.runs:
            known = trace(run)
            first = next((other for other, one in runs.items() if known == trace(one)), None)
            if known is None or first is None:
                runs[name] = run
            else:
                problems[name] = f"it is a copy of {first}"
    return runs, problems


def is_submitted(name: str) -> bool:
    """Is it a log of the submitted runs by its name?"""
    return SUBMITTED_LOG.fullmatch(name) is not None


@dataclass(frozen=True)
class Facts:
    """All that rules judge a folder by."""

    root: Path  # its name, and that of the folder it lies in, count
    track: str = RECORD
    files: Mapping[str, int] = field(default_factory=dict)  # by path, with sizes
    outside: Sequence[str] = ()  # links to outside
    stated: Mapping[str, Any] = field(default_factory=dict)  # submission.json
    of_submission: Sequence[tuple[str, str]] = ()  # its faults: levels and sentences
    runs: Mapping[str, Run] = field(default_factory=dict)  # by the names of their logs
    no_logs: Mapping[str, str] = field(default_factory=dict)  # files: why no run was read
    source: bytes = b""  # the script as shipped

    @property
    def judged(self) -> dict[str, Run]:
        """The submitted runs: those of train_seed<N>.log or train.log that have a result; without
        such logs all that have one."""
        scored = {name: run for name, run in self.runs.items() if is_scored(run)}
        return {name: run for name, run in scored.items() if is_submitted(name)} or scored

    @property
    def serious(self) -> str:
        """The level of what refuses a record, and is asked about in the other track."""
        return "refused" if self.track == RECORD else "warned"

    def results(self, key: str) -> list[float]:
        """val_bpb or val_loss of each judged run; empty where one does not say it."""
        values = [getattr(run.result, key) for run in self.judged.values()]
        return values if all(map(is_number, values)) else []

    @property
    def stated_track(self) -> str | None:
        return track_named(self.stated.get("track"))

    @property
    def by_seed(self) -> dict[int, dict[str, Any]]:
        """What submission.json says of each seed."""
        given = self.stated.get("seed_results")
        return {
            int(number[0]): value if isinstance(value, dict) else {"val_bpb": value}
            for key, value in (given if isinstance(given, dict) else {}).items()
            if (number := re.search(r"\d{1,12}", key))
        }

    def number(self, key: str) -> int:
        """A number of submission.json; 0: it does not say it."""
        value = self.stated.get(key)
        return value if is_number(value) else 0

    @property
    def model_bytes(self) -> int:
        """Of the largest compressed model that the logs name; 0: they name none."""
        return max([0, *(run.model_bytes or 0 for run in self.judged.values())])


def is_scored(run: Run) -> bool:
    return run.result is not None and is_number(run.result.val_bpb) and run.result.val_bpb > 0


def facts_of(folder: Path, track: str | None = None) -> Facts:
    """Reads a folder. Raises nothing for what it holds."""
    root = Path(os.path.abspath(folder))
    files, outside = list_folder(root)
    values: dict[str, Any] = {}
    faults = [("refused", "no submission.json: let tools/package.py make one of the logs")]
    if "submission.json" in files:
        values, faults = read_submission((root / "submission.json").read_bytes())
    runs, no_logs = read_runs(root, list(files))
    source = (root / SCRIPT).read_bytes() if SCRIPT in files else b""
    own = root.parent.name if root.parent.name in TRACKS else None
    track = track or own or track_named(values.get("track")) or RECORD
    return Facts(root, track, files, outside, values, faults, runs, no_logs, source)


def track_named(text: object) -> str | None:
    """A track of TRACKS from how people write it; None: another, or none."""
    name = re.sub(r"[-\s]", "_", str(text).lower()).removeprefix("track_")
    if name in ("10min_16mb", "record_16mb", "10min"):
        return RECORD
    return OPEN if re.match(r"non_?record", name) else None


Said = Iterator[tuple[str, str]]

CAP_MS = 600_000.0  # of training, and of evaluation
LATE_STEPS = 2  # by which a run that stops itself may miss the cap
CLOSE = 1e-4  # nats or bits: the same result, rounded elsewhere
LEAST_SPLIT = 40_000_000  # tokens: every published validation split has more
OF_SCRIPTS = ("code", "code_bytes", "device")  # conditions that other rules judge
TODO = "TODO: "  # begins what package.py leaves to be written by hand
USUAL = re.compile(r"(requirements.*\.txt|license|.*\.(md|json|log|png|svg|jpe?g|gif|pdf))")


def required_files(facts: Facts) -> Said:
    if "README.md" not in facts.files:
        yield "refused", "no README.md: write what was done and how to run it"
    elif TODO in (facts.root / "README.md").read_text("utf-8", "replace"):
        yield "warned", "README.md still has a TODO: write what was done"
    if not facts.source:
        yield "refused", "train_gpt.py is missing or empty: add the script that ran"
    for link in facts.outside[:5]:
        yield "refused", f"{link} is a link that leads out of the folder: copy the file"
    for name in sorted(facts.files.keys() - {*facts.runs, *facts.no_logs, SCRIPT}):
        if not USUAL.fullmatch(PurePosixPath(name).name.lower()):
            other = (facts.root / name).read_bytes() if name.endswith(".py") else b""
            if facts.source and other and not difference(other, facts.source):
                yield "note", f"{name} is the readable form of train_gpt.py"
            else:
                yield "not checked", f"{name}: what train_gpt.py needs counts as code"


def place_and_submission(facts: Facts) -> Said:
    given = facts.stated.get("track")
    if facts.stated_track not in (facts.track, None):
        yield "warned", f"submission.json says track {shown(given)}: it is {facts.track}"
    date, _, description = facts.root.name.partition("_")
    if not parsed_date(date) or not description:
        yield "warned", f"{facts.root.name}: name the folder YYYY-MM-DD_Description"
    yield from facts.of_submission


def parsed_date(text: str) -> datetime.date | None:
    try:
        day = datetime.date.fromisoformat(text)
    except ValueError:
        return None
    return day if str(day) == text else None


# --- runs ---


def finished_runs(facts: Facts) -> Said:
    if not facts.judged:
        yield "refused", "no log has a result of the artifact: add train_seed<N>.log of each seed"
    for name, problem in facts.no_logs.items():
        if is_submitted(name):
            yield "warned", f"{name}: {problem}"
    for name, run in facts.runs.items():
        if not is_scored(run) and "/" not in name:
            yield "warned", f"{name}: {run.status} at step {run.last_step:,}, without a result"
    others = len(facts.runs) - len(facts.judged)
    if others > 0 and facts.judged:
        yield "not checked", f"{others} other runs than those of {some([*facts.judged])}"


def seeds(facts: Facts) -> Said:
    """Several seeds, each once, the same everywhere: one sentence for one cause."""
    runs = facts.judged
    misnamed = [
        name for name, run in runs.items() if run.seed_in_name not in (run.known_seed, None)
    ]
    numbers = sorted(run.known_seed for run in runs.values() if run.known_seed is not None)
    given = facts.stated.get("seeds", [*facts.by_seed])
    named = sorted(seed for seed in given if type(seed) is int) if isinstance(given, list) else []
    if misnamed:
        logs = some([f"{name} says seed {runs[name].seed}" for name in misnamed])
        yield "warned", f"the names of logs have other seeds than the logs: {logs}"
    elif named and numbers and named != numbers:
        stated, logged = (", ".join(map(str, part)) for part in (named, numbers))
        yield "warned", f"submission.json names the seeds {stated}, the logs have {logged}"
    if 0 < len(runs) < 3 and facts.track == RECORD:
        yield "warned", f"runs: {len(runs)}; three seeds are usual"


def one_configuration(facts: Facts) -> Said:
    if apart := telling([*facts.judged.values()], allow=OF_SCRIPTS):
        yield "warned", f"the runs differ in configuration: {some(apart)}"


def trained_at_once(facts: Facts, run: Run) -> Said:
    if len({*run.scripts}) > 1:
        yield "refused", "it was resumed with another script: which one is submitted?"
    elif run.resumed_at:
        yield facts.serious, f"resumed at step {run.resumed_at[-1]:,}"


# --- score ---


def stated_results(facts: Facts) -> Said:
    """val_bpb and val_loss are the means of the logs' results, those of a seed its log's."""
    claims = []
    for key in ("val_bpb", "val_loss"):
        claims.append((key, facts.stated.get(key), key, [*facts.judged.values()]))
        for run in facts.judged.values():
            of_seed = facts.by_seed.get(run.known_seed, {}).get(key)
            claims.append((f"{key} of seed {run.known_seed}", of_seed, key, [run]))
    for name, given, key, runs in claims:
        values = [getattr(run.result, key) for run in runs]
        if is_number(given) and values and all(map(is_number, values)):
            for level, words in wrong_result(str(given), key, runs):
                right = f"the {'mean of the logs' if runs[1:] else 'result of the log'} is"
                yield level, f"{name} {given} is {words}: {right} {fmean(values):.8f}"


def wrong_result(text: str, key: str, runs: list[Run]) -> Said:
    """What is wrong with a stated number that is not the mean of the runs' results."""
    stated, right = float(text), fmean(getattr(run.result, key) for run in runs)
    rounding = 0.51 * 10.0 ** -len(text.partition(".")[2])
    printed = max(0.51 * 10.0**-run.result.digits for run in runs)
    if abs(stated - right) <= max(printed, 1e-8) + min(rounding, 10 * CLOSE):
        return
    for run in runs:
        for line in (*run.results, *run.validations):
            if abs(getattr(line, key) - stated) <= min(rounding, CLOSE):
                kept = getattr(line, "kind", "") in SUBMITTED
                what = getattr(line, "name", f"validation {getattr(line, 'step', 0):,}")
                yield ("warned" if kept else "refused"), f"{what} of {run.name}"
                return
    yield "refused", "in no result line"


# --- size ---


def sizes(facts: Facts) -> Said:
    """Code and model are at most 16,000,000 bytes, and are what submission.json says."""
    model, size = facts.model_bytes, len(facts.source)
    totals = [run.total_bytes for run in facts.judged.values() if run.total_bytes]
    total, allowed = model + size, f": {CAP_BYTES:,} are allowed"
    stated, stated_code = facts.number("bytes_total"), facts.number("bytes_code")
    if stated > CAP_BYTES:
        yield "refused", f"bytes_total is {stated:,}{allowed}"
    if max(totals, default=0) > CAP_BYTES:
        yield "refused", f"a log's total is {max(totals):,} bytes{allowed}"
    elif model and total > CAP_BYTES:
        yield "refused", f"model and code are {total:,} bytes{allowed}: pack the script"
    if not model and facts.judged:
        yield "not checked", "the size of the compressed model"
    elif stated and not min([total, *totals]) - 1 <= stated <= max([total, *totals]):
        yield "warned", f"bytes_total is {stated:,}: model and code are {total:,}"
    if stated_code and stated_code != size:
        yield "warned", f"bytes_code is {stated_code:,}: train_gpt.py has {size:,} bytes"


# --- script ---


def script_in_log(facts: Facts, run: Run) -> Said:
    """The logs hold the shipped script, readable or packed, or count its bytes."""
    if not facts.source:
        return
    if run.source is not None:
        if words := difference(run.source, facts.source):
            yield facts.serious, f"holds another script than train_gpt.py: {words}"
    elif run.code_bytes not in (None, len(facts.source)):
        words = f"counts {run.code_bytes:,} bytes of code, train_gpt.py has"
        yield "warned", f"{words} {len(facts.source):,}: which one ran?"
    else:
        yield "not checked", "the script that ran"


def script_form(facts: Facts) -> Said:
    if is_ours(facts.source) and unpacked(facts.source) is None:
        yield "refused", "train_gpt.py: a packed script that is damaged: pack it again"
    try:
        parsed(facts.source)
    except ValueError as error:
        yield "warned", f"train_gpt.py: {error}"


# --- time, machine and data ---


def time_and_machine(facts: Facts, run: Run) -> Said:
    """Ten minutes of training and ten of evaluation, on 8 H100s."""
    if facts.track != RECORD:
        return
    times = [run.train_time_ms, *(step.train_time_ms for step in run.steps)]
    trained = max(filter(is_number, times), default=0.0)
    late = LATE_STEPS * trained / max(1, run.last_step)  # a run that stops itself is late
    if trained > CAP_MS + late:
        yield "refused", f"trained for {trained / 1e3:,.1f} s, not 600"
    elif not trained:
        yield "not checked", "the training time"
    if run.eval_ms is None:
        yield "not checked", "the evaluation time"
    elif run.eval_ms > CAP_MS:
        yield "refused", f"evaluated for {run.eval_ms / 1e3:,.1f} s, not 600"
    device, count = run.machine.get("device"), run.world_size
    if count not in (None, 8) or device and "H100" not in str(device):
        ran = f"on {count or '?'} x {device}" if device else f"as {count} processes"
        yield "refused", f"ran {ran}, not on 8 H100s: --track {OPEN} has no such rule"
    elif not device:
        yield "not checked", "the GPU"


def validation_data(facts: Facts, run: Run) -> Said:
    """The whole validation split was scored."""
    tokens = run.val_tokens
    if run.partial_val:
        yield "refused", "it scored a part of the validation split: run it with VAL_TOKENS=0"
    elif tokens is None:
        yield "not checked", "the size of the validation split"
    elif tokens < LEAST_SPLIT:
        words = f"it scored {tokens:,} tokens: every published split has {LEAST_SPLIT:,} or more"
        yield facts.serious, words


RULES = (required_files, place_and_submission, finished_runs, seeds, one_configuration)
RULES += (stated_results, sizes, script_form)
RUN_RULES = (trained_at_once, script_in_log, time_and_machine, validation_data)

UNSEEN = "what the script computes: read it, and run it"
SCORE = re.compile(r"\d{0,4}\.?\d{1,12}")

# What is to be beaten: its name, and the results of its seeds, or one number twice.
Previous = tuple[str, list[Result]]


@dataclass(frozen=True)
class Finding:
    """What a rule has to say, in one sentence, about `logs` or the folder."""

    level: str  # one of LEVELS
    message: str
    logs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """A folder's facts, and what the rules say about them, the worst first."""

    facts: Facts
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> str:
        levels = {one.level for one in self.findings}
        return next((level for level in ("refused", "warned") if level in levels), "accepted")


def check_folder(
    folder: Path, track: str | None = None, previous: Previous | None = None
) -> Report:
    """Judges a folder. Raises nothing for what it holds."""
    try:
        facts = facts_of(folder, track)
        said = [(one, "") for rule in RULES for one in rule(facts)]
        for rule in RUN_RULES:
            said += [(one, log) for log, run in facts.judged.items() for one in rule(facts, run)]
    except (OSError, ValueError, RecursionError) as error:
        return Report(Facts(folder), (Finding("refused", f"it cannot be read: {error}"),))
    if previous is not None:
        said += [(one, "") for one in significance(facts, *previous)]
    # The same finding about several logs is one finding; the worst are first.
    logs: dict[tuple[str, str], list[str]] = {}
    for one, log in said:
        logs.setdefault(one, []).extend([log] if log else [])
    found = [Finding(*one, tuple(names)) for one, names in logs.items()]
    return Report(facts, tuple(sorted(found, key=lambda finding: LEVELS.index(finding.level))))


def lines(report: Report, shown: object) -> list[str]:
    """The report as text."""
    facts = report.facts
    result = [f"{plain(str(shown))}: {report.verdict} as {facts.track}"]
    scores = []
    for key in ("val_bpb", "val_loss"):
        if values := facts.results(key):
            spread = f" +- {stdev(values):.5f}" if len(values) > 1 else ""
            scores.append(f"{key} {fmean(values):.5f}{spread}")
    if scores:
        seeds = sorted(str(run.known_seed) for run in facts.judged.values())
        result.append(f"  {', '.join(scores)}, seeds {', '.join(seeds)}")
    if facts.model_bytes and facts.source:
        code = len(facts.source)
        total = facts.model_bytes + code
        left = f"{abs(CAP_BYTES - total):,} {'left' if total <= CAP_BYTES else 'too many'}"
        parts = f"code {code:,} + model {facts.model_bytes:,} = {total:,} bytes"
        result.append(f"  {parts}, {left}")
    for finding in report.findings:
        logs = finding.logs if len(finding.logs) < len(facts.judged) or not facts.judged else ()
        subject = f"{some(logs)}: " if logs else ""
        result.append(plain(f"  {finding.level:11}  {subject}{finding.message}"))
    return [*result, f"  not checked  {UNSEEN}"]


# --- better than the record before? ---


def read_previous(given: str) -> Previous:
    """--previous: a score, or a folder whose logs count. Raises ValueError, in words."""
    if os.path.isdir(given):
        facts = facts_of(Path(given))
        results = [run.result for run in facts.judged.values()]
        if not results:
            raise ValueError(f"--previous {given}: no finished log in it: give its score: 1.1228")
        return facts.root.name, results * 2 if len(results) == 1 else results
    if not SCORE.fullmatch(given) or not float(given) > 0:
        words = "neither a folder nor a score in bits per byte, such as 1.1228"
        raise ValueError(f"--previous {given}: {words}")
    return given, [Result("other", "previous", None, float(given))] * 2


def significance(facts: Facts, name: str, results: list[Result]) -> Said:
    """Welch's test: in bits per byte where tokenizers differ."""
    if len(facts.judged) < 2:
        words = f"runs: {len(facts.judged)}: a test against {name} needs three seeds"
        yield facts.serious, words
        return
    comparison = compare_samples([run.result for run in facts.judged.values()], results)
    for note in comparison.notes:
        yield "note", f"{name}: {note}"
    test = comparison.test
    side = "better" if test.difference >= 0 else "worse"
    words = f"{abs(test.difference):.5f} {comparison.unit} {side} than {name}"
    words += f"; better by {test.margin:.5f}: p = {test.p:.2g}"
    words += "" if comparison.shown else f", not below {ALPHA:g}: not shown"
    yield ("note" if comparison.shown else facts.serious), words
