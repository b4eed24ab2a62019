"""Find the runs that are seeds of one configuration, what runs differ in, and whether a group of
runs is better than another one.

compare.py, ablate.py, report.py and check.py use this module. It builds on runs.py, which reads
the logs, and on scipy for the tests. Packages are imported when they are used, so that the
--help of these programs needs none.
"""

import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from runs import Run

# Conditions that are shown where they differ, but cannot change a result: how often a run logs or
# saves, and the machine's surroundings.
HARMLESS = re.compile(
    r"(train|val|checkpoint|trace|training)_(.*_)?(every|keep)|trace_steps|checkpoint_.*_steps|"
    r"python|cpus|platform|data_dir|val_progress_log_every"
)
# Two runs scored the same text if their scored bytes differ by a smaller factor: sequences of other
# lengths leave out a little less or more at the end; another text differs by more.
SAME_TEXT = 1.05
SEED_OR_SUFFIX = r"[._-]*seed[._-]?\d+|\.(txt|log|jsonl)\b"  # in the name of a log

IndicesByValue = dict[Any, list[int]]


def indices_by_value(values: Iterable[Any]) -> IndicesByValue:
    """Return {value: the indices (from 0) at which it occurs}, in the order of the values."""
    found: IndicesByValue = {}
    for index, value in enumerate(values):
        found.setdefault(value, []).append(index)
    return found


def all_conditions(runs: Sequence[Run]) -> dict[str, IndicesByValue]:
    """Return {condition: {value: indices of the runs}}. The value is None if a log does not say."""
    names = dict.fromkeys(name for run in runs for name in run.conditions)
    return {name: indices_by_value(run.conditions.get(name) for run in runs) for name in names}


def differing_conditions(conditions: dict[str, IndicesByValue]) -> list[str]:
    """Return the names of the conditions that differ, those that cannot change a result last."""
    names = [name for name, values in conditions.items() if len(values.keys() - {None}) > 1]
    return sorted(names, key=is_harmless)


def is_harmless(name: str) -> bool:
    return HARMLESS.fullmatch(name) is not None


def relevant_differences(runs: Sequence[Run], allow: Collection[str] = ()) -> list[str]:
    """Return the conditions that differ and may change a result, without those in `allow`."""
    names = differing_conditions(all_conditions(runs))
    return [name for name in names if not is_harmless(name) and name not in allow]


def seed_groups(runs: Sequence[Run], allow: Collection[str] = ()) -> list[list[int]]:
    """Return groups of indices. The runs of a group differ in nothing that may change a result,
    except for their seeds, and no seed is in a group twice."""
    names = relevant_differences(runs, allow)
    configurations = [tuple(run.conditions.get(name) for name in names) for run in runs]
    groups = []
    for indices in indices_by_value(configurations).values():
        seeds = {runs[index].known_seed for index in indices}
        if len(seeds) == len(indices):
            groups.append(indices)
            continue
        # A seed occurs twice, so there is more than one configuration. Logs do not tell everything,
        # for example how slow a disk was: the names of the logs separate the configurations.
        paths = [re.sub(SEED_OR_SUFFIX, "", runs[index].path) for index in indices]
        for positions in indices_by_value(paths).values():
            group = [indices[position] for position in positions]
            repeated = repeated_seeds([runs[index] for index in group]).values()
            again = [id(run) for same_seed in repeated for run in same_seed[1:]]
            groups.append([index for index in group if id(runs[index]) not in again])
            groups += [[index] for index in group if id(runs[index]) in again]
    return sorted(groups)


def repeated_seeds(runs: Sequence[Run]) -> dict[int, list[Run]]:
    """Return {seed: its runs} for each seed that runs of one configuration have several times.
    These runs are one sample: their weights begin equal, and they train on the same batches."""
    names = relevant_differences(runs)
    repeated: dict[int, list[Run]] = {}
    keys = [(run.known_seed, *(run.conditions.get(name) for name in names)) for run in runs]
    for (seed, *_), indices in indices_by_value(keys).items():
        if seed is not None and len(indices) > 1:
            repeated.setdefault(seed, []).extend(runs[index] for index in indices)
    return repeated


def run_identity(run: Run) -> tuple[Any, ...] | None:
    """Return values that are equal in two logs of one run and differ between two runs; None if
    the log says too little. A log without times is told by its losses."""
    values = (run.result.val_bpb, run.result.val_loss) if run.result else ()
    scores = tuple(value and round(value, 8) for value in values)
    if run.train_time_ms is None or not run.last_step:
        losses = tuple((step.step, round(step.train_loss, 4)) for step in run.steps)
        return (run.seed, losses, scores) if losses and scores else None
    times = tuple(step.train_time_ms and round(step.train_time_ms) for step in run.steps)
    return run.seed, run.last_step, round(run.train_time_ms), times, scores


def bytes_scored(run: Run) -> float | None:
    """Return how many bytes of text the score covers; None if the log does not say."""
    rate = run.result and run.result.bytes_per_token
    return rate * run.val_tokens if rate and run.val_tokens else None


def least_bytes_scored(run: Run) -> float | None:
    """Return how many bytes of text the score covers at least, by the number of chunks that the log
    says to have scored. The last chunk has at least one token. None if the log does not say."""
    rate = run.result and run.result.bytes_per_token
    chunk_tokens = run.chunk_tokens or run.config.get("ttt_chunk_tokens")
    if not (rate and run.val_chunks and isinstance(chunk_tokens, int)):
        return None
    return rate * ((run.val_chunks - 1) * chunk_tokens + 1)


def find_split_faults(runs: Sequence[Run], allow: Sequence[str] = ()) -> Iterator[str]:
    """Yield the reasons why the scores of runs cannot be compared: the runs did not all score the
    same, whole validation split."""
    parts = {bool(run.partial_val) for run in runs}
    if True in parts and (False in parts or "partial_val" not in allow):
        which = "some runs" if False in parts else "all runs"
        yield f"{which} scored only a part of the validation split; run them without VAL_TOKENS"
    tokenizers = {run.conditions.get("tokenizer") for run in runs} - {None}
    splits = {run.conditions.get("validation_shards") for run in runs} - {None}
    # Shards of another tokenizer differ although their text may be the same: sizes decide below.
    same_text = len(tokenizers) > 1 and True not in parts
    if len(splits) > 1 and not same_text and "validation_shards" not in allow:
        yield "the validation shards differ (checksums in made_of); validate all runs on one set"
    sizes = {run.name: size for run in runs if (size := bytes_scored(run))}
    if sizes and max(sizes.values()) > SAME_TEXT * min(sizes.values()):
        ends = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
        scored = " and ".join(f"{name} {sizes[name]:,.0f} bytes" for name in ends)
        yield f"the validation texts differ: {scored} were scored; validate all runs on one text"


def log_labels(runs: Sequence[Run], with_seed: bool = True) -> list[str]:
    """Return the names of the logs, with their folders if two names are equal. With
    with_seed=False the seed is left out if the names differ without it."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [f"{Path(run.path).resolve().parent.name[:24]}/{run.name}" for run in runs]
    short = [re.sub(SEED_OR_SUFFIX, "", name) for name in names]
    return names if with_seed or len(set(short)) < len(short) else short


def variant_labels(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Return a label for each group of runs: the settings in which the groups differ, such as
    TRAIN_PREFETCH=0. If the settings alone do not tell the groups apart, the label begins with the
    name of a log."""
    runs = [group[0] for group in groups]
    logs = log_labels(runs, with_seed=False)
    # val_overlap follows from VAL_PREFETCH and VAL_COPY_STREAM.
    names = [name for name in relevant_differences(runs) if name != "val_overlap"]
    texts = []
    for run in runs:
        words = [format_condition(run, name) for name in names if name in run.conditions]
        more = [f"and {len(words) - 3} more"] if len(words) > 3 else []
        texts.append(" ".join([*words[:3], *more]))
    only_settings = all(name in run.config for run in runs for name in names)
    if only_settings and len(set(texts)) == len(texts) and 0 < len(names) <= 3:
        return texts
    return [f"{log}: {text}" if text else log for log, text in zip(logs, texts, strict=True)]


def format_condition(run: Run, name: str) -> str:
    """Return a setting as NAME=value, and another condition as `name value`."""
    value = run.conditions[name]
    if name not in run.config:
        return f"{name} {value}"
    return f"{name.upper()}={int(value) if isinstance(value, bool) else value}"


SIZE_LIMIT_BYTES = 16_000_000  # of script and model together
SAME_RATE = 0.002  # runs whose bytes per token differ by a larger share have other tokenizers
NATS, BITS = "nats", "bits per byte"
warnings.filterwarnings("ignore", category=RuntimeWarning, module="scipy")  # all values are equal


@dataclass(frozen=True)
class Test:
    """The result of a test whether the mean of the second sample is above the mean of the first one
    by more than a margin. `low` and `high` are the 95 % interval of the difference."""

    difference: float  # the mean of the second sample minus the mean of the first one
    t: float
    df: float
    p: float  # one-sided
    low: float
    high: float
    p_two_sided: float  # the probability of such a difference if the means are equal


def t_test(
    first: Sequence[float], second: Sequence[float], margin: float = 0.0, by_seed: bool = False
) -> Test:
    """Return Welch's test of mean(second) - mean(first) > margin, or, with by_seed, the paired
    test. t and p are nan if no value varies and the difference equals the margin."""
    from scipy import stats  # slow to import, and optional

    function = stats.ttest_rel if by_seed else partial(stats.ttest_ind, equal_var=False)
    shifted = [value - margin for value in second]
    one_sided = function(shifted, first, alternative="greater")
    two_sided = function(second, first)
    low, high = two_sided.confidence_interval(0.95)
    difference = fmean(second) - fmean(first)
    figures = (one_sided.statistic, one_sided.df, one_sided.pvalue, low, high, two_sided.pvalue)
    return Test(float(difference), *map(float, figures))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values corrected by Holm's method for several tests. A nan stays nan, and its
    test is not counted."""
    import numpy as np  # slow to import

    result = np.array(p_values)
    order = result.argsort()  # nan comes last
    factors = np.count_nonzero(~np.isnan(result)) - np.arange(len(result))
    result[order] = np.maximum.accumulate(result[order] * factors).clip(max=1)
    return result.tolist()


def detectable_difference(spread: float, seeds: int, comparisons: int) -> float:
    """Return the true difference of two variants that t_test, paired by seed, finds in 80 of 100
    experiments with this number of seeds, if p must be below 0.05 / comparisons. That is the
    strictest limit of Holm's method, so the result is on the safe side. spread: the standard
    deviation of the differences by seed, which are normally distributed.
    """
    from scipy import optimize, stats  # slow to import

    limit = stats.t.ppf(1 - 0.025 / comparisons, seeds - 1)

    # t has a noncentral t distribution. Its noncentrality is the true difference divided by its
    # standard error. The chance that t is below -limit is neglected.
    def excess_misses(noncentrality: float) -> float:
        return stats.nct.cdf(limit, seeds - 1, noncentrality) - 0.2

    # The result is at most about 1.3 times the limit, which it is with two seeds, or the limit + 1.
    # Far above that, scipy's distribution function returns NaN at some places.
    noncentrality = optimize.brentq(excess_misses, 0, 2 * limit + 2)
    return float(noncentrality * spread / math.sqrt(seeds))


def pairs_by_seed(
    first: Sequence[Run], second: Sequence[Run], value: Callable[[Run], float | None]
) -> list[tuple[float, float]]:
    """Return a pair of values for each seed that both groups have, if both values are finite."""
    first_values = {run.known_seed: value(run) for run in first}
    second_values = {run.known_seed: value(run) for run in second}
    seeds = [seed for seed in first_values if seed in second_values]
    pairs = [(first_values[seed], second_values[seed]) for seed in seeds]
    return [pair for pair in pairs if all(v is not None and math.isfinite(v) for v in pair)]


def result_value(run: Run, unit: str) -> float | None:
    """Return the run's result in the unit NATS or BITS; None if it has none or is not finite."""
    value = run.result and (run.result.val_loss if unit == NATS else run.result.val_bpb)
    return value if value is not None and math.isfinite(value) else None


def list_bytes_per_token(runs: Sequence[Run]) -> list[float]:
    """Return the bytes per token of each result that tells them."""
    return [run.result.bytes_per_token for run in runs if run.result and run.result.bytes_per_token]


def choose_unit(runs: Sequence[Run]) -> str:
    """Return the unit in which results are compared: NATS if all runs have one tokenizer, else
    BITS. If a log does not identify the tokenizer, bytes per token do: other tokenizers differ in
    them by more than SAME_RATE and the rounding of the printed results."""
    tokenizers = {run.conditions.get("tokenizer") for run in runs}
    if None not in tokenizers:
        return BITS if len(tokenizers) > 1 else NATS
    lowest, highest = [], []
    for result in (run.result for run in runs if run.result and run.result.bytes_per_token):
        half_unit = 0.5 * 10.0**-result.digits
        rounding = half_unit / result.val_bpb + half_unit / result.val_loss
        lowest.append(result.bytes_per_token * (1 - rounding))
        highest.append(result.bytes_per_token * (1 + rounding))
    return BITS if lowest and max(lowest) > (1 + SAME_RATE) * min(highest) else NATS
