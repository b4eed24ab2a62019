"""The rules by which a record is judged: what each has to say is a level and a sentence.

A rule in RULES takes the facts of a folder; one in RUN_RULES takes them and a run, for each run
that was submitted.
"""

import datetime
import math
import re
import sys
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import PurePosixPath
from statistics import fmean

from configuration import telling
from facts import (
    NO_LINE,
    OPEN,
    RECORD,
    Facts,
    LoggedRun,
    difference,
    is_code,
    seeds_of,
    shown,
    track_named,
)
from lines import SUBMITTED
from packed import is_ours, packed_form
from results import headline, is_number, stated_by_seed
from runs import Run
from script import look
from significance import CAP_BYTES, some

Said = Iterator[tuple[str, str]]
RULES: list[Callable[[Facts], Said]] = []
RUN_RULES: list[Callable[[Facts, LoggedRun], Said]] = []

CAP_MS = 600_000.0  # of training, and of evaluation
LATE_STEPS = 2  # by which a run that stops itself may miss the cap
CLOSE = 1e-4  # nats or bits: the same result, rounded elsewhere
FEW_LINES = 5  # step lines: fewer prove nothing
LEAST_SPLIT = 40_000_000  # tokens: every published validation split has more
OF_SCRIPTS = ("code", "code_bytes", "device")  # conditions that other rules judge
TODO = "TODO: "  # begins what package.py leaves to be written by hand
USUAL = re.compile(r"(requirements.*\.txt|license|.*\.(md|json|log|png|svg|jpe?g|gif|pdf))")
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


def rule(function: Callable[..., Said]) -> Callable[..., Said]:
    (RUN_RULES if function.__code__.co_argcount == 2 else RULES).append(function)
    return function


@rule
def required_files(facts: Facts) -> Said:
    if "README.md" not in facts.files:
        yield "refused", "no README.md: write what was done and how to run it"
    elif TODO in facts.text("README.md"):
        yield "warned", "README.md still has a TODO: write what was done"
    if not facts.source:
        yield "refused", f"{facts.script_name} is missing or empty: add the script that ran"
    elif facts.script_name != "train_gpt.py":
        yield "warned", f"{facts.script_name}: rename it to train_gpt.py"
    for link in facts.outside[:5]:
        yield "refused", f"{link} is a link that leads out of the folder: copy the file"
    known = {one.log.split("#")[0] for one in facts.runs} | {facts.script_name, *facts.needed}
    for name in sorted(facts.files.keys() - known):
        if not USUAL.fullmatch(PurePosixPath(name).name.lower()):
            yield "not checked", name


@rule
def place_and_submission(facts: Facts) -> Said:
    given = facts.stated.get("track")
    if track_named(given) not in (facts.track, None):
        yield "warned", f"submission.json says track {shown(given)}: it is {facts.track}"
    date, _, description = facts.place.name.partition("_")
    if not parsed_date(date) or not description:
        yield "warned", f"{facts.place.name}: name the folder YYYY-MM-DD_Description"
    yield from facts.of_submission


def parsed_date(text: str) -> datetime.date | None:
    try:
        day = datetime.date.fromisoformat(text)
    except ValueError:
        return None
    return day if str(day) == text else None


# --- runs ---


@rule
def finished_runs(facts: Facts) -> Said:
    if not facts.judged:
        yield "refused", "no log has a result of the artifact: add train_seed<N>.log of each seed"
    for name, problem in facts.no_logs.items():
        if name.endswith(".log"):
            yield "warned", f"{name}: {problem}"
    for one in facts.runs:
        if not one.is_scored and "/" not in one.log:
            ended = one.run.error or "it has no result of the decoded artifact"
            yield "warned", f"{one.log}: {one.run.status} at step {one.run.last_step:,}: {ended}"
    others = len(facts.runs) - len(facts.judged)
    if others > 0 and facts.judged:
        judged = some([one.log for one in facts.judged])
        yield "not checked", f"{others} other runs than those of {judged}"


@rule
def seeds(facts: Facts) -> Said:
    """Several seeds, each once, the same everywhere: one sentence for one cause."""
    misnamed = [one for one in facts.judged if one.misnamed]
    numbers = sorted(one.seed for one in facts.judged if one.seed is not None)
    named = seeds_of(facts.stated)
    if misnamed:
        logs = some([f"{one.log} says seed {one.seed}" for one in misnamed])
        yield "warned", f"the names of logs have other seeds than the logs: {logs}"
    elif named and numbers and named != numbers:
        stated, logged = (", ".join(map(str, part)) for part in (named, numbers))
        yield "warned", f"submission.json names the seeds {stated}, the logs have {logged}"
    if 0 < len(facts.judged) < 3 and facts.track == RECORD:
        yield "warned", f"runs: {len(facts.judged)}; three seeds are usual"


@rule
def one_configuration(facts: Facts) -> Said:
    if apart := telling([one.run for one in facts.judged], allow=OF_SCRIPTS):
        yield "warned", f"the runs differ in configuration: {some(apart)}"


@rule
def copied_runs(facts: Facts) -> Said:
    """Runs of different seeds never have the same losses."""
    for first, second in combinations(facts.judged, 2):
        lines = zip(first.run.steps, second.run.steps, strict=False)
        apart = [abs(a.train_loss - b.train_loss) for a, b in lines]
        if len(apart) >= FEW_LINES and max(apart) <= 5 * CLOSE:
            yield "warned", f"the losses of {first.log} are those of {second.log}: is it a copy?"


# --- score ---


@rule
def stated_results(facts: Facts) -> Said:
    """val_bpb and val_loss are the means of the judged result lines."""
    said: dict[tuple[str, str], list[tuple[str, str]]] = {}  # by level and reason
    for key in ("val_bpb", "val_loss"):
        given, values = facts.stated.get(key), facts.results(key)
        if values and is_number(given) and (reason := wrong_result(facts, key, given)):
            said.setdefault(reason, []).append((f"{key} {given}", f"{fmean(values):.8f}"))
    for one in facts.judged:
        given = stated_by_seed(facts.stated).get(one.seed, {}).get("val_bpb")
        if is_number(given) and abs(float(given) - one.result.val_bpb) > CLOSE:
            right = f"{one.log} has {one.result.val_bpb:.8f}"
            yield "warned", f"submission.json says {given} of seed {one.seed}: {right}"
    for (level, words), numbers in said.items():
        stated, right = (" and ".join(texts) for texts in zip(*numbers, strict=True))
        logs = "mean of the logs" if len(facts.judged) > 1 else "log's result"
        yield level, f"{stated} {'are' if numbers[1:] else 'is'} {words}: the {logs} is {right}"


def wrong_result(facts: Facts, key: str, given: object) -> tuple[str, str] | None:
    """The level and the reason where a stated number is not the mean of the judged results."""
    stated, text, right = float(given), str(given), fmean(facts.results(key))
    digits = len(text.partition(".")[2])
    rounding = 0.51 * 10.0**-digits
    printed = max(0.51 * 10.0 ** -(one.result.digits or 8) for one in facts.judged)
    enough = digits >= (3 if key == "val_bpb" else 2)
    if abs(stated - right) <= printed + (rounding if enough else 0):
        return None
    if abs(stated - right) <= CLOSE:
        return ("note" if stated > right else "warned"), "off in the last digits"
    if abs(stated - fmean(facts.results("val_bpb") or [0])) <= CLOSE:
        return "warned", "the bits per byte"
    for one in facts.runs:
        for line in (*one.run.results, *one.run.validations):
            value, step = getattr(line, key), getattr(line, "step", 0)
            if is_number(value) and abs(value - stated) <= min(rounding, CLOSE):
                artifact = getattr(line, "kind", "") in SUBMITTED
                level = "warned" if artifact or stated > right else facts.serious
                return level, f"{getattr(line, 'tag', f'validation {step:,}')} of {one.log}"
    for one in facts.judged:
        log = facts.text(one.log.split("#")[0])
        if place := re.search(rf"^.*(?<![\d.]){re.escape(text)}(?!\d).*$", log, re.M):
            return "warned", f"in {one.log}, not as a result ({place[0].strip()[:60]})"
    return ("refused" if stated < right else "warned"), "in no log"


@rule
def judged_run(facts: Facts, one: LoggedRun) -> Said:
    """submission.json may choose a result that is not the last one, or not the artifact's."""
    if one.run.resumed_at:
        yield facts.serious, f"resumed at step {one.run.resumed_at[-1]:,}"
    result = one.result
    if result.kind not in SUBMITTED and result != headline(one.run):
        said = f"submitted is {result.tag} {result.val_bpb}"
        yield facts.serious, f"{said}, not a result of the decoded artifact"


# --- size ---


@rule
def sizes(facts: Facts) -> Said:
    """Code and model are at most 16,000,000 bytes, and are what submission.json says."""
    model, code, size = facts.model_bytes, facts.code_bytes, len(facts.source)
    totals = [one.run.sizes.total for one in facts.judged if one.run.sizes.total]
    logged, total = max(totals, default=0), model + code
    stated, stated_code = facts.number("bytes_total"), facts.number("bytes_code")
    allowed = f": {CAP_BYTES:,} are allowed"
    if stated > CAP_BYTES:
        yield "refused", f"bytes_total is {stated:,}{allowed}"
    # Of far too much, it may be the model before it was compressed.
    if CAP_BYTES < logged < 1.5 * CAP_BYTES:
        yield "refused", f"a log's total is {logged:,} bytes{allowed}"
    elif model and total > CAP_BYTES:
        least = total - size + min(size, len(packed_form(facts.source)))
        hint = f"; with the script packed {least:,}" if least < total else ""
        level = "warned" if 0 < logged <= CAP_BYTES or least <= CAP_BYTES else "refused"
        yield level, f"model and code are {total:,} bytes{allowed}{hint}"
    if not model and facts.judged:
        yield "not checked", "the size of the compressed model"
    elif stated and not min([total, *totals]) - 1 <= stated <= max([total, *totals]):
        yield "warned", f"bytes_total is {stated:,}: model and code are {total:,}"
    counted = {one.run.sizes.packed_code for one in facts.judged}
    if stated_code and stated_code not in {size, code, *counted}:
        yield "warned", f"bytes_code is {stated_code:,}: {facts.script_name} has {size:,} bytes"
    for name, by in facts.needed.items():
        beside = facts.files[name]
        level = "warned" if is_code(name) or total + beside <= CAP_BYTES else "refused"
        counts = "it is counted as code" if is_code(name) else "which nobody counts: leave it out"
        yield level, f"{by} needs {name} ({beside:,} bytes), {counts}"


# --- script ---


@rule
def script_in_log(facts: Facts, one: LoggedRun) -> Said:
    """The logs hold the shipped script, readable or packed, or count its bytes."""
    if not facts.source:
        return
    shipped = {len(facts.source), facts.code_bytes, len(facts.script.text)}
    shipped |= {facts.files[name] for name in facts.needed}
    codes = {one.run.sizes.code, one.run.sizes.packed_code} - {None}
    if one.run.source is not None:
        # Who packs a script otherwise may leave out names and comments.
        readable = not facts.script.packed or facts.script.ours
        certain = readable and all(another_script(facts, other.run) for other in facts.judged)
        if words := another_script(facts, one.run):
            yield (facts.serious if certain else "warned"), words
    elif codes and not codes & shipped:
        words = f"counts {max(codes):,} bytes of code, {facts.script_name} has"
        yield "warned", f"{words} {len(facts.source):,}: which one ran?"
    else:
        yield "not checked", "the script that ran"


def another_script(facts: Facts, run: Run) -> str:
    """In what a log's script differs from the shipped one; nothing that counts: empty."""
    if run.source is None or not difference(run.source, facts.source)[0]:
        return ""
    number, here, there = difference(look(run.source).text, facts.script.text)
    # In a log that has no rule after its script, the reader may take lines of the log along.
    if not number or there == NO_LINE and look(run.source).error and not facts.script.error:
        return ""
    return f"holds another script: line {number} is {here!r}, in {facts.script_name} {there!r}"


@rule
def script_form(facts: Facts) -> Said:
    name, script = facts.script_name, facts.script
    if script.stray:
        words = "code around the packed script: only the lines that unpack and run it may be there"
        yield "refused", f"{name}: {words}"
    if is_ours(facts.source) and not script.packed:
        yield "refused", f"{name}: a packed script that is damaged: pack it again"
    if script.error:
        here = sys.version_info[:2]
        words = f"Python {here[0]}.{here[1]} cannot parse {name} ({script.error})"
        yield ("warned" if here >= (3, 12) else "not checked"), words
    if script.reaching:
        found = some([f"{what} (line {line})" for what, line in script.reaching.items()])
        yield "warned", f"{name} can fetch or run what is not in its text: {found}: what for?"
    for text, line in script.validation.items():
        yield "warned", f"{name}: line {line} trains on {text}: is that validation data?"


# --- time, machine and data ---


@rule
def time_and_machine(facts: Facts, one: LoggedRun) -> Said:
    """Ten minutes of training and ten of evaluation, on 8 H100s."""
    if facts.track != RECORD:
        return
    run = one.run
    times = [run.train_time_ms, *(step.train_time_ms for step in run.steps)]
    trained = max(filter(is_number, times), default=0.0)
    evaluated = run.eval_total_ms if one.result.eval_ms is None else one.result.eval_ms
    late = LATE_STEPS * trained / max(1, run.last_step)  # a run that stops itself is late
    if trained > CAP_MS + late:
        yield "refused", f"trained for {trained / 1e3:,.1f} s, not 600"
    elif not trained:
        yield "not checked", "the training time"
    cap = run.config.get("max_wallclock_seconds")
    if is_number(cap) and not 0 < cap <= CAP_MS / 1e3:
        yield "warned", f"its header says max_wallclock_seconds:{cap:g}, not 600"
    if evaluated is None:
        yield "not checked", "the evaluation time"
    elif evaluated > CAP_MS:
        yield "refused", f"evaluated for {evaluated / 1e3:,.1f} s, not 600"
    device, count = run.hardware.get("device"), run.world_size
    if count not in (None, 8) or device and "H100" not in str(device):
        ran = f"on {count or '?'} x {device}" if device else f"as {count} processes"
        yield "refused", f"ran {ran}, not on 8 H100s: --track {OPEN} has no such rule"
    elif not device:
        yield "not checked", "the GPU"


@rule
def validation_data(facts: Facts, one: LoggedRun) -> Said:
    """The whole validation split; a loss and its bits per byte imply the bytes of its text."""
    tokens, nats = one.run.val_tokens, one.result.val_loss
    size = SPLITS.get(tokens)
    if one.run.partial_val:
        yield "refused", "it scored a part of the validation split: run it with VAL_TOKENS=0"
    elif tokens is not None and tokens < LEAST_SPLIT:
        words = f"it scored {tokens:,} tokens: every published split has {LEAST_SPLIT:,} or more"
        yield facts.serious, words
    elif size is None or not is_number(nats) or not nats > 0:
        yield "not checked", "the bytes of the validation split"
    else:
        share = nats / math.log(2) / one.result.val_bpb * tokens / size - 1
        level = facts.serious if abs(share) > BYTES_WRONG else "warned"
        if abs(share) > BYTES_OFF:
            words = f"val_loss and val_bpb imply {100 * share:+.2f} % of the split's bytes"
            yield level, words
