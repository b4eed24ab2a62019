"""Which runs are seeds of one configuration, in what runs differ, and whether one is better."""

import hashlib
import json
import math
import re
import statistics
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cli import setting, some
from runs import Run

# Names of the run, its files and its processes: no part of a configuration.
NOT_CONFIGURATION = re.compile(
    r"run_id|seed|resume|device|rank|local_rank|distributed|is_main_process|warning|logfile|"
    r".*(_|log)(dir|path|file|files)"
)
MADE_OF = {  # conditions that are checksums: the names of what they are made of
    "tokenizer": "tokenizer",
    "validation_shards": r"fineweb_val_\d+\.bin",
    "training_shards": r"fineweb_train_\d+\.bin",
}
# Files that decide what is trained on: compared by their names, wherever they lie.
DATA_FILES = {"data_path", "data_dir", "datasets_dir", "tokenizer_path"}
# Shown where they differ, but no reason why results would: periods of lines, surroundings.
HARMLESS = re.compile(
    r"(train|val|checkpoint|trace|training)_(.*_)?(every|keep)|trace_steps|checkpoint_.*_steps|"
    r"python|cpus|platform|data_dir|val_progress_log_every"
)
FIELDS = ("model_params", "world_size", "micro_steps", "dataset", "train_shards", "val_tokens")
FIELDS += ("partial_val",)
# Not settings: they have no value that one could set.
FACTS = {"code", "code_bytes", "python", "torch", "cuda", "device", "cpus", *FIELDS, *MADE_OF}
SAME_TEXT = 1.05  # times the bytes scored: a row's end that is left out is less, another text more
SETTINGS_IN_NAME = 3  # at most; arms that differ in more are named after their logs
SEED_OR_SUFFIX = r"[._-]*seed[._-]?\d+|\.(txt|log|jsonl)\b"  # of a log's name


# --- what differs ---


def conditions(run: Run) -> dict[str, Any]:
    """Settings, code, versions, devices, data; not the seed."""
    values: dict[str, Any] = {}
    for name, value in run.config.items():
        if name in DATA_FILES and isinstance(value, str):
            values[name] = Path(value).name
        elif name in DATA_FILES or not NOT_CONFIGURATION.fullmatch(name):
            values[name] = value
    if run.micro_steps is not None:  # what GRAD_ACCUM_STEPS has led to
        values.pop("grad_accum_steps", None)
    values |= {
        "code": run.scripts[-1][:12] if run.scripts else None,
        "code_bytes": None if run.scripts else run.code_bytes,
        **{name: getattr(run, name) for name in FIELDS},
        **run.machine,
        **checksums(run),
    }
    return {name: value for name, value in values.items() if value is not None}


def checksums(run: Run) -> dict[str, str]:
    """Of the tokenizer and of each split: eight digits that stand for all of its shards."""
    result = {}
    for name, pattern in MADE_OF.items():
        parts = {k: v for k, v in run.made_of.items() if re.fullmatch(pattern, k)}
        if parts:
            text = json.dumps(parts, sort_keys=True)
            shards = f"{len(parts)} shards, " if len(parts) > 1 else ""
            result[name] = shards + hashlib.sha256(text.encode()).hexdigest()[:8]
    return result


Places = dict[Any, list[int]]  # values with the numbers (from 0) of those that have them


def places(values: Iterable[Any]) -> Places:
    found: Places = {}
    for number, value in enumerate(values):
        found.setdefault(value, []).append(number)
    return found


def all_conditions(runs: Sequence[Run]) -> dict[str, Places]:
    """The values of each condition. None: the log does not tell it."""
    known = [conditions(run) for run in runs]
    names = dict.fromkeys(name for setup in known for name in setup)
    return {name: places(setup.get(name) for setup in known) for name in names}


def differences(table: dict[str, Places]) -> list[str]:
    """The conditions that differ, harmless ones last."""
    names = [name for name, values in table.items() if len(values.keys() - {None}) > 1]
    return sorted(names, key=is_harmless)


def is_harmless(name: str) -> bool:
    return HARMLESS.fullmatch(name) is not None


def telling(runs: Sequence[Run], allow: Collection[str] = ()) -> list[str]:
    """Names of the conditions that differ and may change a result; not those that are allowed."""
    allowed = {name.lower() for name in allow}
    names = [name for name in differences(all_conditions(runs)) if not is_harmless(name)]
    return [name for name in names if name.lower() not in allowed]


def seed_groups(runs: Sequence[Run], allow: Collection[str] = ()) -> list[list[int]]:
    """Numbers of the runs that differ in nothing but seed, harmless settings and surroundings."""
    names, known, result = telling(runs, allow), [conditions(run) for run in runs], []
    for group in places(tuple(setup.get(name) for name in names) for setup in known).values():
        # With a seed twice it is several: logs do not tell all, such as how slow a disk was.
        twice = len({runs[number].known_seed for number in group}) < len(group)
        paths = [re.sub(SEED_OR_SUFFIX, "", runs[number].path) * twice for number in group]
        result += [[group[place] for place in part] for part in places(paths).values()]
    return sorted(result)


def trace(run: Run) -> tuple[Any, ...] | None:
    """What two logs of one run have in common to the digit, and two runs do not; None: too little
    is known."""
    if run.train_time_ms is None or not run.last_step:
        return None
    times = tuple(step.train_time_ms and round(step.train_time_ms) for step in run.steps)
    values = (run.result.val_bpb, run.result.val_loss) if run.result else ()
    scores = tuple(value and round(value, 8) for value in values)
    return run.seed, run.last_step, round(run.train_time_ms), times, scores


# --- why runs are not compared ---


def faults_of_group(name: str, group: Sequence[Run], allow: Sequence[str]) -> Iterator[str]:
    """Reasons why some runs are not a sample of one configuration."""
    if mixed := telling(group, allow):
        options = " ".join(f"--allow {word}" for word in mixed[:3])
        remedy = f"name the runs of one, or say that it does not matter: {options}"
        yield f"{name} mixes configurations: {some(mixed)} differ: {remedy}"
    traces = [trace(run) for run in group]
    for index, run in enumerate(group):
        if traces[index] is not None and traces[index] in traces[:index]:
            yield f"{name}: {run.name} repeats another run's seed and result: one run counts once"
        if run.status in ("failed", "interrupted"):
            yield f"{name}: {run.name} {run.status}: {run.error or 'the log does not say why'}"


def bytes_scored(run: Run) -> float | None:
    """The bytes of text of which the score is the mean; None: the log does not say it."""
    rate = run.result and run.result.bytes_per_token
    return rate * run.val_tokens if rate and run.val_tokens and not run.partial_val else None


def faults_of_split(runs: Sequence[Run], allow: Sequence[str] = ()) -> Iterator[str]:
    """Reasons not to compare the scores of runs: not all of them are of one whole split."""
    allowed = {name.lower() for name in allow}
    parts = {bool(run.partial_val) for run in runs}
    if True in parts and (False in parts or "partial_val" not in allowed):
        which = "some runs" if False in parts else "all runs"
        say = "" if False in parts else ", or say that a part is enough: --allow partial_val"
        yield f"{which} scored a part of the validation split: run again without VAL_TOKENS{say}"
    counts = {f"{run.val_tokens:,}" for run in runs if run.partial_val and run.val_tokens}
    if len(counts) > 1:
        yield f"parts of {' and '.join(counts)} tokens were scored: give all runs one VAL_TOKENS"
    known = [checksums(run) for run in runs]
    tokenizers = {sums.get("tokenizer") for sums in known} - {None}
    splits = {sums.get("validation_shards") for sums in known} - {None}
    same_text = len(tokenizers) > 1 and True not in parts  # perhaps, by another tokenizer
    if len(splits) > 1 and not same_text and "validation_shards" not in allowed:
        yield "the validation shards differ (checksums in made_of): validate all runs on one split"
    sizes = {run.name: size for run in runs if (size := bytes_scored(run))}
    if sizes and max(sizes.values()) > SAME_TEXT * min(sizes.values()):
        ends = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
        scored = " and ".join(f"{name} {sizes[name]:,.0f} bytes" for name in ends)
        yield f"other validation texts: {scored} scored: validate all runs on one text"


# --- names ---


def labels(runs: Sequence[Run]) -> list[str]:
    """Names of the logs; with their folders where some are alike."""
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    return [f"{Path(run.path).resolve().parent.name[:24]}/{run.name}" for run in runs]


def arm_names(groups: Sequence[Sequence[Run]]) -> list[str]:
    """TRAIN_PREFETCH=1 for each arm; where settings are not all that differs, its log's name,
    without the seed where that tells them apart."""
    firsts = [group[0] for group in groups]
    different, known = telling(firsts), [conditions(run) for run in firsts]
    if 0 < len(different) <= SETTINGS_IN_NAME and not FACTS & {*different}:
        named = [" ".join(setting(n, setup.get(n)) for n in different) for setup in known]
        if len({*named}) == len(named):
            return named
    names = labels(firsts)
    short = [re.sub(SEED_OR_SUFFIX, "", name) for name in names]
    return short if len(set(short)) == len(short) else names


# --- statistics ---

CAP_BYTES = 16_000_000  # script and model, decimal
SAME_RATE = 0.002  # of bytes per token: runs that differ by more have other tokenizers
NATS, BITS = "nats", "bits per byte"
warnings.filterwarnings("ignore", category=RuntimeWarning, module="scipy")  # values without spread


@dataclass(frozen=True)
class Test:
    """Is the mean of the second sample above that of the first by more than a margin?

    One-sided p; 95 % interval of the difference (two-sided).
    """

    difference: float  # mean of the second minus mean of the first
    t: float
    df: float
    p: float
    low: float
    high: float
    p_of_none: float  # two-sided: of a difference as large as this where there is none

    @property
    def measurable(self) -> bool:
        return not self.low <= 0 <= self.high


def welch(first: Sequence[float], second: Sequence[float], margin: float = 0.0) -> Test:
    """Welch's t-test of mean(second) - mean(first) > margin."""
    return test_of("ttest_ind", first, second, margin, equal_var=False)


def paired(first: Sequence[float], second: Sequence[float], margin: float = 0.0) -> Test:
    """The paired t-test of mean(second - first) > margin."""
    return test_of("ttest_rel", first, second, margin)


def test_of(
    name: str, first: Sequence[float], second: Sequence[float], margin: float, **options: Any
) -> Test:
    """scipy's test. Where no value varies and the margin is met exactly, t and p are nan."""
    from scipy import stats  # slow to import, and optional

    function = partial(getattr(stats, name), **options)
    shifted = [value - margin for value in second]
    one_sided = function(shifted, first, alternative="greater")
    two_sided = function(second, first)
    low, high = two_sided.confidence_interval(0.95)
    difference = statistics.fmean(second) - statistics.fmean(first)
    figures = (one_sided.statistic, one_sided.df, one_sided.pvalue, low, high, two_sided.pvalue)
    return Test(difference, *map(float, figures))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values that hold for all of them together. One that is nan belongs to no test."""
    places = [place for place, p in enumerate(p_values) if not math.isnan(p)]
    result, least = list(p_values), 0.0
    for rank, place in enumerate(sorted(places, key=lambda place: p_values[place])):
        least = max(least, min(1.0, (len(places) - rank) * p_values[place]))
        result[place] = least
    return result


# --- results ---


def pairs_by_seed(
    first: Sequence[Run], second: Sequence[Run], value: Callable[[Run], float | None]
) -> list[tuple[float, float]]:
    """A value of the runs of each seed that both have."""
    known = [{run.known_seed: value(run) for run in group} for group in (first, second)]
    pairs = [(ours, known[1][seed]) for seed, ours in known[0].items() if seed in known[1]]
    return [p for p in pairs if all(one is not None and math.isfinite(one) for one in p)]


def value_of(run: Run, unit: str) -> float | None:
    """The run's result in nats or in bits per byte."""
    value = run.result and (run.result.val_loss if unit == NATS else run.result.val_bpb)
    return value if value is not None and math.isfinite(value) else None


def rates(runs: Sequence[Run]) -> list[float]:
    """Bytes per token of the results that tell them."""
    return [run.result.bytes_per_token for run in runs if run.result and run.result.bytes_per_token]


def unit_of(runs: Sequence[Run]) -> str:
    """In which results are compared: in nats only of one tokenizer, by their bytes per token."""
    known = rates(runs)
    return BITS if known and max(known) / min(known) > 1 + SAME_RATE else NATS
