"""Statistics for comparing runs: groups of seeds, Welch's and the paired t-test (scipy's).
All functions raise ValueError for values that have no answer."""

import math
import statistics
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import launch

try:
    from scipy import stats as scipy_stats
except ImportError as error:
    sys.exit(f"error: {launch.missing(error.name)}")


@dataclass(frozen=True)
class Group:
    """A sample: its size, mean, and standard deviation (n - 1; nan for one value)."""

    n: int
    mean: float
    std: float


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
    def seen_from(self) -> float:
        """The smallest difference whose interval would have left out zero."""
        return (self.high - self.low) / 2


def summary(values: Sequence[float]) -> Group:
    if not values or not all(math.isfinite(value) for value in values):
        raise ValueError("a mean needs finite values, one at least")
    std = statistics.stdev(values) if len(values) > 1 else math.nan
    return Group(len(values), statistics.fmean(values), std)


def interval(values: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean; nan for one value."""
    group = summary(values)
    if group.n < 2:
        return math.nan
    return float(scipy_stats.t.ppf(0.975, group.n - 1)) * group.std / math.sqrt(group.n)


def welch(first: Sequence[float], second: Sequence[float], *, margin: float = 0.0) -> Test:
    """Welch's t-test of mean(second) - mean(first) > margin; two values a sample at least."""
    a, b = summary(first), summary(second)
    if min(a.n, b.n) < 2:
        raise ValueError("Welch's test needs two runs a group at least")
    if a.std == b.std == 0:
        return _certain(b.mean - a.mean, margin, float(a.n + b.n - 2))
    shifted = [value - margin for value in second]
    with warnings.catch_warnings():  # of digits lost where all values of one group are equal
        warnings.simplefilter("ignore", RuntimeWarning)
        one_sided = scipy_stats.ttest_ind(shifted, first, equal_var=False, alternative="greater")
        low, high = scipy_stats.ttest_ind(second, first, equal_var=False).confidence_interval(0.95)
    figures = (one_sided.statistic, one_sided.df, one_sided.pvalue, low, high)
    return Test(b.mean - a.mean, margin, *map(float, figures))


def paired(first: Sequence[float], second: Sequence[float], *, margin: float = 0.0) -> Test:
    """The paired t-test of mean(second - first) > margin; two pairs at least."""
    differences = [b - a for a, b in zip(first, second, strict=True)]
    group = summary(differences)
    if group.n < 2:
        raise ValueError("a paired test needs two pairs at least")
    if group.std == 0:
        return _certain(group.mean, margin, group.n - 1.0)
    one_sided = scipy_stats.ttest_1samp(differences, margin, alternative="greater")
    reach = interval(differences)
    figures = map(float, (one_sided.statistic, one_sided.df, one_sided.pvalue))
    return Test(group.mean, margin, *figures, group.mean - reach, group.mean + reach)


def _certain(difference: float, margin: float, df: float) -> Test:
    """A test of values that do not vary."""
    above = difference - margin
    t = math.copysign(math.inf, above) if above else 0.0
    p = 0.0 if above > 0 else 1.0 if above < 0 else 0.5
    return Test(difference, margin, t, df, p, difference, difference)
