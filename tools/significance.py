"""Is one group of runs better than another? Welch's and the paired t-test (scipy's), the unit, the
margin, and the reasons why there is no answer. One definition for all tools.

Needs scipy for tests and intervals; without it they raise ImportError.
"""

import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from configuration import checksums, telling, trace
from lines import Result
from results import bytes_per_token, headline
from runs import Run

CAP_BYTES = 16_000_000  # script and model, decimal
MARGIN = 0.005  # nats per token: what the challenge asks of a record
ALPHA = 0.01
SAME_RATE = 0.002  # of bytes per token: runs that differ by more have other tokenizers
SAME_TEXT = 1.05  # times the bytes scored: a row's end that is left out is less, another text more
NATS, BITS = "nats", "bits per byte"
warnings.filterwarnings("ignore", category=RuntimeWarning, module="scipy")  # values without spread
Results = Sequence[Result | None]  # of the runs of one configuration
USUAL_RATE = 2.5  # bytes per token, where no log tells them


# --- tests of numbers ---


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
    def measurable(self) -> bool:
        return not self.low <= 0 <= self.high


def summary(values: Sequence[float]) -> Group:
    std = statistics.stdev(values) if len(values) > 1 else math.nan
    return Group(len(values), statistics.fmean(values), std)


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


# --- results of runs ---


@dataclass
class Comparison:
    """A against B: refused for `refusals`, or tested."""

    unit: str = NATS
    margin: float = MARGIN
    a: Group | None = None
    b: Group | None = None
    test: Test | None = None
    input_wait: Test | None = None  # milliseconds per step, B minus A
    waits: tuple[Group, Group] | None = None
    refusals: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def shown(self) -> bool:
        return self.test is not None and self.test.p < ALPHA


def value_of(result: Result | None, unit: str) -> float | None:
    value = result and (result.val_loss if unit == NATS else result.val_bpb)
    return value if value is not None and math.isfinite(value) else None


def other_tokenizers(results: Sequence[Result | None]) -> list[float]:
    """Bytes per token, the lowest and the highest, where the runs cannot have one tokenizer."""
    rates = [rate for result in results if (rate := bytes_per_token(result))]
    apart = rates and max(rates) / min(rates) > 1 + SAME_RATE
    return [min(rates), max(rates)] if apart else []


def unit_of(results: Sequence[Result | None]) -> str:
    """Nats per token; bits per byte across tokenizers, or where a log has no loss."""
    scored = [result for result in results if value_of(result, BITS) is not None]
    lacking = any(value_of(result, NATS) is None for result in scored)
    return BITS if lacking or other_tokenizers(results) else NATS


def margin_in(unit: str, results: Sequence[Result | None]) -> float:
    """0.005 nats, or as many bits per byte, by the first result that has both."""
    rates = [rate for result in results if (rate := bytes_per_token(result))]
    rate = rates[0] if rates else USUAL_RATE
    return MARGIN if unit == NATS else float(f"{MARGIN / math.log(2) / rate:.2g}")


def compare_samples(
    a: Results, b: Results, margin: float | None = None, names: Sequence[str] = ()
) -> Comparison:
    """Welch's test of A's results against B's, or the reasons why there is none. The margin is
    0.005 nats, or as many bits per byte, where none is given; `names` of the runs: for messages."""
    results = [*a, *b]
    unit = unit_of(results)
    comparison = Comparison(unit, margin_in(unit, [*b, *a]) if margin is None else margin)
    if other_tokenizers(results):
        comparison.notes.append(
            "tokenizers differ: compared in bits per byte, not in nats per token"
        )
    for name, sample in (("A", a), ("B", b)):
        count = len(sample)
        if count < 2:
            runs = f"{count} run{'s' * (count != 1)}"
            comparison.refusals.append(
                f"{name} has {runs}: a test needs two per group at least, better three"
            )
    names = names or [f"result {n}" for n in range(1, len(results) + 1)]
    for name, result in zip(names, results, strict=True):
        if value_of(result, unit) is None:
            comparison.refusals.append(
                f"{name} has no result to compare: leave it out, or let it end"
            )
    if not comparison.refusals:
        values = [[value_of(result, unit) for result in sample] for sample in (a, b)]
        comparison.a, comparison.b = map(summary, values)
        comparison.test = welch(*values, margin=comparison.margin)
    return comparison


def compare_groups(
    a: Sequence[Run],
    b: Sequence[Run],
    margin: float | None = None,
    allow: Sequence[str] = (),
    unread: Sequence[str] = (),
) -> Comparison:
    """Two groups of runs: refused also where a group is not a sample of one configuration.
    `allow`: conditions in which the runs of a group may differ; `unread`: more refusals."""
    if {trace(run) for run in a} & {trace(run) for run in b} - {None}:
        reason = "A and B share a run (equal to the digit): each run belongs to one of them"
        return Comparison(refusals=[*unread, reason])
    samples = [[headline(run) for run in group] for group in (a, b)]
    names = [described(run) for run in (*a, *b)]
    comparison = compare_samples(*samples, margin, names)
    reasons = [*unread, *faults_of_group("A", a, allow), *faults_of_group("B", b, allow)]
    reasons += [*comparison.refusals, *faults_of_split([*a, *b], allow)]
    comparison.refusals = list(dict.fromkeys(reasons))
    if comparison.refusals:
        comparison.a = comparison.b = comparison.test = None
    else:
        compare_waits(a, b, comparison)
    if a and b:
        comparison.notes += notes_on(a, b, allow)
    return comparison


def faults_of_split(runs: Sequence[Run], allow: Sequence[str] = ()) -> Iterator[str]:
    """Reasons not to compare the scores of runs: not all of them are of one whole split."""
    allowed = {name.lower() for name in allow}
    parts = {run.partial_val for run in runs}
    if True in parts and (False in parts or "partial_val" not in allowed):
        which = "some runs" if False in parts else "all runs"
        say = "" if False in parts else ", or say that a part is enough: --allow partial_val"
        yield f"{which} scored a part of the validation split: run again without VAL_TOKENS{say}"
    counts = {f"{run.val_tokens:,}" for run in runs if run.partial_val and run.val_tokens}
    if len(counts) > 1:
        yield f"parts of {' and '.join(counts)} tokens were scored: give all runs one VAL_TOKENS"
    known = [checksums(run) for run in runs]
    tokenizers, splits = (
        {sums[name] for sums in known if name in sums}
        for name in ("tokenizer", "validation_shards")
    )
    same_text = len(tokenizers) > 1 and True not in parts  # perhaps, by another tokenizer
    if len(splits) > 1 and not same_text and "validation_shards" not in allowed:
        yield "the validation shards differ (checksums in made_of): validate all runs on one split"
    sizes = {}
    for run in runs:
        rate = bytes_per_token(headline(run))
        if rate and run.val_tokens and not run.partial_val:
            sizes[run.name] = rate * run.val_tokens
    if sizes and max(sizes.values()) > SAME_TEXT * min(sizes.values()):
        ends = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
        scored = " and ".join(f"{name} {sizes[name]:,.0f} bytes" for name in ends)
        yield f"other validation texts: {scored} scored: validate all runs on one text"


def described(run: Run) -> str:
    return f"{run.name} ({run.status}, step {run.last_step})"


def faults_of_group(name: str, group: Sequence[Run], allow: Sequence[str]) -> Iterator[str]:
    """Reasons why some runs are not a sample of one configuration."""
    if mixed := telling(group, allow):
        options = " ".join(f"--allow {word}" for word in mixed[:3])
        yield (
            f"{name} mixes configurations: {some(mixed)} differ: name the runs of one, or say that "
            f"it does not matter: {options}"
        )
    traces = [trace(run) for run in group]
    for index, run in enumerate(group):
        if traces[index] is not None and traces[index] in traces[:index]:
            yield f"{name}: {run.name} repeats another run's seed and result: one run counts once"
        if run.status in ("failed", "interrupted"):
            yield f"{name}: {run.name} {run.status}: {run.error or 'the log does not say why'}"


def notes_on(a: Sequence[Run], b: Sequence[Run], allow: Sequence[str]) -> list[str]:
    runs, notes = [*a, *b], []
    kinds = sorted({result.kind for run in runs if (result := headline(run))})
    if len(kinds) > 1:
        text = f"the results come from different evaluations ({', '.join(kinds)})"
        notes.append(f"{text}: their difference is the model's and the evaluation's")
    if allow:
        notes.append(f"--allow: the runs of a group may differ in {some(allow)}")
    apart = telling(runs)
    if apart:
        notes.append(f"A and B differ in {some(apart)}: which is better is tested, not why")
    else:
        notes.append("the logs show no difference in configuration between A and B")
    return notes


def compare_waits(a: Sequence[Run], b: Sequence[Run], comparison: Comparison) -> None:
    """The time spent waiting for input, where all logs tell it."""
    waits = [[run.input_wait_per_step() for run in group] for group in (a, b)]
    if any(wait is None or not math.isfinite(wait) for group in waits for wait in group):
        return
    comparison.waits = summary(waits[0]), summary(waits[1])
    comparison.input_wait = welch(*waits)


def some(names: Sequence[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def verdict(comparison: Comparison) -> str:
    """The outcome of a comparison that was not refused, in one sentence."""
    test, unit = comparison.test, comparison.unit
    side = "lower" if test.difference > 0 else "higher"
    measured = f"A is {abs(test.difference):.5f} {unit} {side}"
    if test.difference == 0:
        measured = "A and B have the same mean"
    measured += f" (95 % interval of the difference {test.low:+.5f} to {test.high:+.5f})"
    claim = f"A is better than B by more than {test.margin:g} {unit}: p = {test.p:.2g}"
    if comparison.shown:
        return f"{claim} < {ALPHA:g}; {measured}"
    none = "" if test.measurable else "; no measurable difference"
    return f"not shown that {claim}, not below {ALPHA:g}; {measured}{none}"


def wait_words(comparison: Comparison) -> str:
    """What is to be said about waiting for input; empty where the logs do not tell it."""
    if comparison.waits is None:
        return ""
    a, b = comparison.waits
    test = comparison.input_wait
    reach = f"95 % interval of B - A {test.low:+.2f} to {test.high:+.2f} ms"
    none = "" if test.measurable else ": no measurable difference"
    return f"input_wait: A {a.mean:.2f} ms per step, B {b.mean:.2f} ({reach}{none})"
