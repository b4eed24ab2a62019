"""Statistics for comparing runs: groups of seeds, Welch's and the paired t-test (scipy's), and the
bytes that a score implies. All functions raise ValueError for values that have no answer."""

import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

try:
    from scipy import stats as scipy_stats
except ImportError as error:
    sys.exit(f"error: {error.name} is missing: run {sys.executable} -m pip install scipy")

# Share of the bytes by which sliding windows or diagnostics are off that count each token rightly.
NEAR = 0.002
# Predicted tokens and bytes of published validation splits, as solved from the digits of many logs.
PUBLISHED = {
    "sp1024": (62_021_632, 151_080_362),
    "sp1024, 400 bytes lost": (62_021_632, 151_079_962),
    "sp1024, length 16384": (62_013_440, 151_061_140),
    "sp1024, length 32768": (61_997_056, 151_024_098),
    "sp4096": (45_508_608, 151_074_052),
    "sp4096, another export": (45_514_752, 151_074_923),
    "sp8192": (40_540_160, 151_078_221),
    "CaseOps with a byte sidecar": (47_851_520, 151_074_498),
    "byte260": (151_130_112, 151_130_112),
    "NaiveBaseline export": (63_779_840, 155_769_746),
}


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


@dataclass(frozen=True)
class ByteCheck:
    """Bytes that follow from a loss, its bits per byte and its tokens, with what the printed
    digits leave open."""

    verdict: str  # agrees; near: off by less than NEAR; differs; unknown
    bytes: float
    tolerance: float
    ratio: float  # to the nearest known total of as many tokens; nan: none is known
    split: str | None  # the split of that total
    words: str


def summary(values: Sequence[float]) -> Group:
    if not values or not all(math.isfinite(value) for value in values):
        raise ValueError("a mean needs finite values, one at least")
    try:
        mean = math.fsum(values) / len(values)
        squares = math.fsum((value - mean) * (value - mean) for value in values)
    except OverflowError as error:
        raise ValueError("the values are too large to add") from error
    std = math.sqrt(squares / (len(values) - 1)) if len(values) > 1 else math.nan
    return Group(len(values), mean, std)


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


def check_bytes(
    val_loss: float,
    val_bpb: float,
    tokens: int,
    *,
    loss_digits: int | None = None,
    bpb_digits: int | None = None,
) -> ByteCheck:
    """Holds the bytes of a score against the published splits.

    Digits are decimals as printed (None: full precision); what rounding leaves open is the
    tolerance. A split of another size is unknown, never wrong.
    """
    if not (0 < val_loss < math.inf and 0 < val_bpb < math.inf and tokens > 0):
        raise ValueError("the byte check needs a positive loss, bits per byte and tokens")
    found = val_loss / math.log(2) * tokens / val_bpb
    open_share = sum(
        0.5 * 10.0**-digits / value
        for digits, value in ((loss_digits, val_loss), (bpb_digits, val_bpb))
        if digits is not None
    )
    # One byte more: the published totals are themselves known to a byte.
    tolerance = found * (open_share + 1e-12) + 1.5
    known = {name: totals for name, totals in PUBLISHED.items() if totals[0] == tokens}
    about = f"{found:,.0f} bytes ({found / tokens:.4f} a token)"
    if not known:
        words = f"{about}: no published split has {tokens:,} tokens"
        return ByteCheck("unknown", found, tolerance, math.nan, None, words)
    totals = ((name, total) for name, (_, total) in known.items())
    name, nearest = min(totals, key=lambda pair: abs(pair[1] - found))
    ratio, off = found / nearest, found - nearest
    verdict, words = "differs", f"{about}, but {name} has {nearest:,}: x{ratio:.4f}"
    if abs(off) <= tolerance:
        verdict, words = "agrees", f"{nearest:,} bytes: {name}"
    elif abs(ratio - 1) < NEAR:
        verdict = "near"
        words = f"{nearest:,} bytes {off:+,.0f}: {name}, some windows left out or counted twice?"
    elif 1.14 < ratio < 1.20:
        words += ": the leading space counted twice?"
    elif 0.82 < ratio < 0.88:
        words += ": the leading space not counted?"
    return ByteCheck(verdict, found, tolerance, ratio, name, words)
