"""Is one sample of results better than another? Welch's and the paired t-test (scipy's), the unit,
the margin, and the reasons why there is no answer. One definition for all tools.

Needs scipy for tests and intervals; without it they raise ImportError.
"""

import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lines import Result

CAP_BYTES = 16_000_000  # script and model, decimal
MARGIN = 0.005  # nats per token: what the challenge asks of a record
ALPHA = 0.01
SAME_RATE = 0.002  # of bytes per token: runs that differ by more have other tokenizers
NATS, BITS = "nats", "bits per byte"
USUAL_RATE = 2.5  # bytes per token, where no log tells them
warnings.filterwarnings("ignore", category=RuntimeWarning, module="scipy")  # values without spread
Results = Sequence[Result | None]  # of the runs of one configuration


# --- tests of numbers ---


@dataclass(frozen=True)
class Test:
    """Is the mean of the second sample above that of the first by more than a margin?

    One-sided p; 95 % interval of the difference (two-sided).
    """

    difference: float  # mean of the second minus mean of the first
    margin: float
    t: float
    df: float
    p: float
    low: float
    high: float

    @property
    def measurable(self) -> bool:
        return not self.low <= 0 <= self.high


def spread(values: Sequence[float]) -> float:
    """The standard deviation (n - 1); nan for one value."""
    return statistics.stdev(values) if len(values) > 1 else math.nan


def interval(values: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean; nan for one value."""
    from scipy import stats  # slow to import, and optional

    result = stats.ttest_1samp(values, 0.0)
    return float(result.confidence_interval(0.95).high) - statistics.fmean(values)


def welch(first: Sequence[float], second: Sequence[float], *, margin: float = 0.0) -> Test:
    """Welch's t-test of mean(second) - mean(first) > margin."""
    from scipy import stats

    return test_with(partial(stats.ttest_ind, equal_var=False), first, second, margin)


def paired(first: Sequence[float], second: Sequence[float], *, margin: float = 0.0) -> Test:
    """The paired t-test of mean(second - first) > margin."""
    from scipy import stats

    return test_with(stats.ttest_rel, first, second, margin)


def test_with(
    function: Callable[..., Any], first: Sequence[float], second: Sequence[float], margin: float
) -> Test:
    """scipy's test. Where no value varies and the margin is met exactly, t and p are nan."""
    shifted = [value - margin for value in second]
    one_sided = function(shifted, first, alternative="greater")
    low, high = function(second, first).confidence_interval(0.95)
    difference = statistics.fmean(second) - statistics.fmean(first)
    figures = (one_sided.statistic, one_sided.df, one_sided.pvalue, low, high)
    return Test(difference, margin, *map(float, figures))


# --- results ---


@dataclass
class Comparison:
    """A against B: refused for `refusals`, or tested."""

    unit: str = NATS
    margin: float = MARGIN
    samples: Sequence[list[float]] = ()  # of A and of B
    test: Test | None = None
    refusals: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def shown(self) -> bool:
        return self.test is not None and self.test.p < ALPHA

    def verdict(self) -> list[str]:
        """The outcome of a comparison that was not refused: a claim and what was measured."""
        test, unit = self.test, self.unit
        side = "lower" if test.difference > 0 else "higher"
        measured = f"A is {abs(test.difference):.5f} {unit} {side}"
        if test.difference == 0:
            measured = "A and B have the same mean"
        measured += f" (95 % interval of the difference {test.low:+.5f} to {test.high:+.5f})"
        claim = f"A is better than B by more than {test.margin:g} {unit}: p = {test.p:.2g}"
        if self.shown:
            return [f"{claim} < {ALPHA:g}", measured]
        none = [] if test.measurable else ["no measurable difference"]
        return [f"not shown that {claim}, not below {ALPHA:g}", measured, *none]


def value_of(result: Result | None, unit: str) -> float | None:
    value = result and (result.val_loss if unit == NATS else result.val_bpb)
    return value if value is not None and math.isfinite(value) else None


def rates(results: Results) -> list[float]:
    """Bytes per token of the results that tell them."""
    return [one.bytes_per_token for one in results if one and one.bytes_per_token]


def other_tokenizers(results: Results) -> bool:
    """Can the runs not have one tokenizer, by their bytes per token?"""
    known = rates(results)
    return bool(known) and max(known) / min(known) > 1 + SAME_RATE


def compare_samples(
    a: Results, b: Results, margin: float | None = None, names: Sequence[str] = ()
) -> Comparison:
    """Welch's test of A's results against B's, or the reasons why there is none. The margin is
    0.005 nats, or as many bits per byte, where none is given; `names` of the runs: for messages."""
    results = [*a, *b]
    lacking = any(one and one.val_loss is None for one in results)  # a score alone
    unit = BITS if lacking or other_tokenizers(results) else NATS
    if margin is None and unit == BITS:  # as many as MARGIN nats are in the first run of B
        rate = [*rates([*b, *a]), USUAL_RATE][0]
        margin = float(f"{MARGIN / math.log(2) / rate:.2g}")
    comparison = Comparison(unit, MARGIN if margin is None else margin)
    if other_tokenizers(results):
        words = "tokenizers differ: compared in bits per byte, not in nats per token"
        comparison.notes.append(words)
    for name, sample in (("A", a), ("B", b)):
        if len(sample) < 2:
            runs = f"{len(sample)} run{'s' * (len(sample) != 1)}"
            words = f"{name} has {runs}: a test needs two per group at least, better three"
            comparison.refusals.append(words)
    for name, result in zip(names or range(1, len(results) + 1), results, strict=True):
        if value_of(result, unit) is None:
            words = f"{name} has no result to compare: leave it out, or let it end"
            comparison.refusals.append(words)
    if not comparison.refusals:
        comparison.samples = [[value_of(one, unit) for one in sample] for sample in (a, b)]
        comparison.test = welch(*comparison.samples, margin=comparison.margin)
    return comparison
