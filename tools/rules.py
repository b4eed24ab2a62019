"""The rules by which a record is judged: what each has to say is a level and a sentence.

A rule in RULES takes the facts of a folder; one in RUN_RULES takes them and a run, for each run
that was submitted.
"""

import datetime
import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from statistics import fmean

from cli import some
from configuration import telling
from facts import OPEN, RECORD, SCRIPT, Facts, is_number, is_scored, is_submitted, shown
from lines import SUBMITTED
from packed import difference, is_ours, parsed, unpacked
from runs import Run
from significance import CAP_BYTES

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
