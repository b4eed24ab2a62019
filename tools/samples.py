"""Which runs are seeds of one configuration, in what runs differ, and whether one is better."""

import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from runs import Run

# Shown where they differ, but no reason why results would: periods of lines, surroundings.
HARMLESS = re.compile(
    r"(train|val|checkpoint|trace|training)_(.*_)?(every|keep)|trace_steps|checkpoint_.*_steps|"
    r"python|cpus|platform|data_dir|val_progress_log_every"
)
SAME_TEXT = 1.05  # times the bytes scored: a row's end that is left out is less, another text more
SEED_OR_SUFFIX = r"[._-]*seed[._-]?\d+|\.(txt|log|jsonl)\b"  # of a log's name

Places = dict[Any, list[int]]  # values with the numbers (from 0) of those that have them


def places(values: Iterable[Any]) -> Places:
    found: Places = {}
    for number, value in enumerate(values):
        found.setdefault(value, []).append(number)
    return found


def all_conditions(runs: Sequence[Run]) -> dict[str, Places]:
    """The values of each condition. None: the log does not tell it."""
    names = dict.fromkeys(name for run in runs for name in run.conditions)
    return {name: places(run.conditions.get(name) for run in runs) for name in names}


def differences(table: dict[str, Places]) -> list[str]:
    """The conditions that differ, harmless ones last."""
    names = [name for name, values in table.items() if len(values.keys() - {None}) > 1]
    return sorted(names, key=is_harmless)


def is_harmless(name: str) -> bool:
    return HARMLESS.fullmatch(name) is not None


def telling(runs: Sequence[Run], allow: Collection[str] = ()) -> list[str]:
    """Names of the conditions that differ and may change a result; not those that are allowed."""
    names = differences(all_conditions(runs))
    return [name for name in names if not is_harmless(name) and name not in allow]


def seed_groups(runs: Sequence[Run], allow: Collection[str] = ()) -> list[list[int]]:
    """Numbers of the runs that differ in nothing but seed, harmless settings and surroundings."""
    names, result = telling(runs, allow), []
    for group in places(tuple(run.conditions.get(n) for n in names) for run in runs).values():
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


def bytes_scored(run: Run) -> float | None:
    """The bytes of text of which the score is the mean; None: the log does not say it."""
    rate = run.result and run.result.bytes_per_token
    return rate * run.val_tokens if rate and run.val_tokens else None


def faults_of_split(runs: Sequence[Run], allow: Sequence[str] = ()) -> Iterator[str]:
    """Reasons not to compare the scores of runs: not all of them are of one whole split."""
    parts = {bool(run.partial_val) for run in runs}
    if True in parts and (False in parts or "partial_val" not in allow):
        which = "some runs" if False in parts else "all runs"
        yield f"{which} scored a part of the validation split: run again without VAL_TOKENS"
    tokenizers = {run.conditions.get("tokenizer") for run in runs} - {None}
    splits = {run.conditions.get("validation_shards") for run in runs} - {None}
    same_text = len(tokenizers) > 1 and True not in parts  # perhaps, by another tokenizer
    if len(splits) > 1 and not same_text and "validation_shards" not in allow:
        yield "the validation shards differ (checksums in made_of): validate all runs on one split"
    sizes = {run.name: size for run in runs if (size := bytes_scored(run))}
    if sizes and max(sizes.values()) > SAME_TEXT * min(sizes.values()):
        ends = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
        scored = " and ".join(f"{name} {sizes[name]:,.0f} bytes" for name in ends)
        yield f"other validation texts: {scored} scored: validate all runs on one text"


def labels(runs: Sequence[Run], with_seed: bool = True) -> list[str]:
    """Names of the logs, with their folders where some are alike; without the seed where the rest
    tells them apart."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [f"{Path(run.path).resolve().parent.name[:24]}/{run.name}" for run in runs]
    short = [re.sub(SEED_OR_SUFFIX, "", name) for name in names]
    return names if with_seed or len(set(short)) < len(short) else short


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


def t_test(
    first: Sequence[float], second: Sequence[float], margin: float = 0.0, by_seed: bool = False
) -> Test:
    """Welch's test of mean(second) - mean(first) > margin, or the paired one. Where no value varies
    and the margin is met exactly, t and p are nan."""
    from scipy import stats  # slow to import, and optional

    function = stats.ttest_rel if by_seed else partial(stats.ttest_ind, equal_var=False)
    shifted = [value - margin for value in second]
    one_sided = function(shifted, first, alternative="greater")
    two_sided = function(second, first)
    low, high = two_sided.confidence_interval(0.95)
    difference = np.mean(second) - np.mean(first)
    figures = (one_sided.statistic, one_sided.df, one_sided.pvalue, low, high, two_sided.pvalue)
    return Test(float(difference), *map(float, figures))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values that hold for all of them together. One that is nan belongs to no test."""
    result = np.array(p_values)
    order = result.argsort()  # nan last
    factors = np.count_nonzero(~np.isnan(result)) - np.arange(len(result))
    result[order] = np.maximum.accumulate(result[order] * factors).clip(max=1)
    return result.tolist()


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
