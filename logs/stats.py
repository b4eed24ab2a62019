"""Statistics for comparing runs, without a package:
groups of seeds, Welch's and the paired t-test, the byte check.

The t distribution comes from the regularised incomplete beta function: Lentz's continued fraction
(Numerical Recipes, 6.4), with the logarithm of the beta function from Stirling's series where its
arguments are large. Tests hold it against scipy. All functions are pure; they raise ValueError for
arguments outside their domain, and nothing else.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

TINY, EPSILON = 1e-300, 1e-16
MAX_TERMS = 200_000  # of the continued fraction; it needs about sqrt(max(a, b))
# Share of the bytes by which sliding windows or diagnostics are off that count each token rightly.
NEAR = 0.002
STIRLING_FROM = 12.0  # below, lgamma is exact enough
# Degrees of freedom from which the fraction loses digits and the normal series has them.
NEARLY_NORMAL = 1e6

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
    """Is the difference of means above a margin?

    One-sided p; 95 % interval of the difference (two-sided).
    """

    # Mean of the second minus mean of the first: positive, the first has the lower loss.
    difference: float
    margin: float
    t: float
    df: float
    p: float
    low: float
    high: float


@dataclass(frozen=True)
class ByteCheck:
    """Bytes that follow from a loss, its bits per byte and its tokens,
    with what the printed digits leave open.
    """

    verdict: str  # agrees; near: off by less than NEAR; differs; unknown
    bytes: float
    tolerance: float
    ratio: float  # to the nearest known total of as many tokens; nan: none is known
    split: str | None  # the split of that total
    words: str


def summary(values: Sequence[float]) -> Group:
    """Raises ValueError for no values, or values that are not finite."""
    if not values or not all(math.isfinite(value) for value in values):
        raise ValueError("a mean needs finite values, one at least")
    try:
        mean = math.fsum(values) / len(values)
        squares = math.fsum((value - mean) * (value - mean) for value in values)
    except OverflowError as error:
        raise ValueError("the values are too large to add") from error
    std = math.sqrt(squares / (len(values) - 1)) if len(values) > 1 else math.nan
    return Group(len(values), mean, std)


def welch(first: Sequence[float], second: Sequence[float], *, margin: float = 0.0) -> Test:
    """Welch's t-test of mean(second) - mean(first) > margin; two values a sample at least."""
    a, b = summary(first), summary(second)
    if min(a.n, b.n) < 2:
        raise ValueError("Welch's test needs two runs a group at least")
    va, vb = a.std**2 / a.n, b.std**2 / b.n
    scale = max(va, vb)
    if scale > 0:
        # Ratios, since the squares of tiny variances underflow.
        ra, rb = va / scale, vb / scale
        df = (ra + rb) ** 2 / (ra**2 / (a.n - 1) + rb**2 / (b.n - 1))
    else:
        df = float(a.n + b.n - 2)
    return _test(b.mean - a.mean, math.sqrt(va + vb), df, margin)


def paired(first: Sequence[float], second: Sequence[float], *, margin: float = 0.0) -> Test:
    """The paired t-test of mean(second - first) > margin; two pairs at least."""
    if len(first) != len(second):
        raise ValueError("pairs need as many values on both sides")
    differences = summary([b - a for a, b in zip(first, second, strict=True)])
    if differences.n < 2:
        raise ValueError("a paired test needs two pairs at least")
    error = differences.std / math.sqrt(differences.n)
    return _test(differences.mean, error, differences.n - 1.0, margin)


def _test(difference: float, error: float, df: float, margin: float) -> Test:
    if error == 0:
        above = difference - margin
        t = math.copysign(math.inf, above) if above else 0.0
        p = 0.0 if above > 0 else 1.0 if above < 0 else 0.5
        return Test(difference, margin, t, df, p, difference, difference)
    t = (difference - margin) / error
    reach = t_quantile(0.975, df) * error
    return Test(difference, margin, t, df, t_sf(t, df), difference - reach, difference + reach)


def t_sf(t: float, df: float) -> float:
    """P(T > t) of Student's t with df > 0 degrees of freedom (any real number)."""
    if not df > 0 or math.isnan(t):
        raise ValueError("the t distribution needs df > 0 and a number t")
    if math.isinf(t):
        return 0.0 if t > 0 else 1.0
    square = t * t
    if math.isinf(square):
        return 0.0 if t > 0 else 1.0
    if df > NEARLY_NORMAL:
        # Abramowitz and Stegun 26.7.8; the next term is below 1e-12.
        density = math.exp(-0.5 * square) / math.sqrt(2 * math.pi)
        return 0.5 * math.erfc(t / math.sqrt(2)) + density * (t * min(square, 1e9) + t) / (4 * df)
    # Both halves of the argument are passed, each exact where it is small.
    tail = 0.5 * _beta_ratio(df / 2, 0.5, df / (df + square), square / (df + square))
    return tail if t >= 0 else 1.0 - tail


def t_cdf(t: float, df: float) -> float:
    """P(T <= t)."""
    return t_sf(-t, df)


def t_quantile(p: float, df: float) -> float:
    """The t with P(T <= t) = p, 0 < p < 1, by bisection."""
    if not 0 < p < 1:
        raise ValueError("a quantile needs 0 < p < 1")
    if p < 0.5:
        return -t_quantile(1 - p, df)
    low, high = 0.0, 1.0
    while t_sf(high, df) > 1 - p and high < 1e300:
        low, high = high, 2 * high
    for _ in range(200):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        low, high = (middle, high) if t_sf(middle, df) > 1 - p else (low, middle)
    return 0.5 * (low + high)


def beta_regularised(a: float, b: float, x: float) -> float:
    """I_x(a, b) for a, b > 0 and 0 <= x <= 1."""
    if not (a > 0 and b > 0 and 0 <= x <= 1):
        raise ValueError("the incomplete beta function needs a > 0, b > 0 and 0 <= x <= 1")
    return _beta_ratio(a, b, x, 1 - x)


def _beta_ratio(a: float, b: float, x: float, y: float) -> float:
    """I_x(a, b) where y = 1 - x is given too."""
    if x <= 0 or y <= 0:
        return 0.0 if x <= 0 else 1.0
    # The fraction converges fast on one side of the mean only; the other side is the complement.
    if x > (a + 1) / (a + b + 2):
        return 1.0 - _beta_ratio(b, a, y, x)
    log_x = math.log(x) if x < 0.5 else math.log1p(-y)
    log_y = math.log(y) if y < 0.5 else math.log1p(-x)
    front = math.exp(a * log_x + b * log_y - log_beta(a, b)) / a
    return min(1.0, front * _fraction(a, b, x))


def _fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of the incomplete beta function by Lentz's method."""

    def safe(value: float) -> float:
        return value if abs(value) > TINY else TINY

    c, d = 1.0, 1 / safe(1 - (a + b) * x / (a + 1))
    result = d
    for m in range(1, MAX_TERMS):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / safe(1 + numerator * d)
            c = safe(1 + numerator / c)
            result *= d * c
        if abs(d * c - 1) < EPSILON:
            break
    return result


def log_beta(a: float, b: float) -> float:
    """ln B(a, b); where an argument is large,
    without the cancellation of three large logarithms.
    """
    a, b = min(a, b), max(a, b)
    if b < STIRLING_FROM:
        return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    if a < STIRLING_FROM:
        # ln Gamma(b) - ln Gamma(a + b) by Stirling's series of both
        return (
            math.lgamma(a)
            + _stirling(b)
            - _stirling(a + b)
            - (b - 0.5) * math.log1p(a / b)
            - a * math.log(a + b)
            + a
        )
    return (
        0.5 * math.log(2 * math.pi / b)
        + _stirling(a)
        + _stirling(b)
        - _stirling(a + b)
        + (a - 0.5) * math.log(a / (a + b))
        - b * math.log1p(a / b)
    )


def _stirling(z: float) -> float:
    """ln Gamma(z) - ((z - 1/2) ln z - z + ln(2 pi) / 2), for z >= 12."""
    w = 1 / (z * z)
    return (
        1 / 12 - w * (1 / 360 - w * (1 / 1260 - w * (1 / 1680 - w * (1 / 1188 - w * 691 / 360360))))
    ) / z


def implied_bytes(val_loss: float, val_bpb: float, tokens: int) -> float:
    """Bytes a score was divided by: nats a token over ln 2, times tokens, over bits a byte."""
    return val_loss / math.log(2) * tokens / val_bpb


def check_bytes(
    val_loss: float,
    val_bpb: float,
    tokens: int,
    *,
    loss_digits: int | None = None,
    bpb_digits: int | None = None,
    stated: int | None = None,
) -> ByteCheck:
    """Holds the bytes of a score against the published splits,
    and against `stated`, the log's own count.

    Digits are decimals as printed (None: full precision); what rounding leaves open is the
    tolerance. A split of another size is unknown, never wrong. Raises ValueError where a score is
    not positive and finite.
    """
    if not (0 < val_loss < math.inf and 0 < val_bpb < math.inf and tokens > 0):
        raise ValueError("the byte check needs a positive loss, bits per byte and tokens")
    found = implied_bytes(val_loss, val_bpb, tokens)
    open_share = sum(
        0.5 * 10.0**-digits / value
        for digits, value in ((loss_digits, val_loss), (bpb_digits, val_bpb))
        if digits is not None
    )
    # One byte more: the published totals are themselves known to a byte.
    tolerance = found * (open_share + 1e-12) + 1.5
    known = {"this log's own count": (tokens, stated)} if stated else {}
    known |= {name: totals for name, totals in PUBLISHED.items() if totals[0] == tokens}
    about = f"{found:,.0f} bytes ({found / tokens:.4f} a token)"
    if not known:
        words = f"{about}: no published split has {tokens:,} tokens"
        return ByteCheck("unknown", found, tolerance, math.nan, None, words)
    totals = ((name, total) for name, (_, total) in known.items())
    name, nearest = min(totals, key=lambda pair: abs(pair[1] - found))
    ratio, off = found / nearest, found - nearest
    if abs(off) <= tolerance:
        verdict, words = "agrees", f"{nearest:,} bytes: {name}"
    elif abs(ratio - 1) < NEAR:
        verdict = "near"
        words = (
            f"{nearest:,} bytes {off:+,.0f}: {name}, with some windows left out or counted twice?"
        )
    else:
        guess = ": the leading space counted twice?" if 1.14 < ratio < 1.20 else ""
        guess = ": the leading space not counted?" if 0.82 < ratio < 0.88 else guess
        verdict, words = "differs", f"{about}, but {name} has {nearest:,}: x{ratio:.4f}{guess}"
    return ByteCheck(verdict, found, tolerance, ratio, name, words)
