"""The statistics of logs/stats.py: against closed forms, against scipy where it is installed,
and what they refuse."""

import math
import sys
from typing import Any

import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(ROOT / "logs"))
import stats  # noqa: E402  (the room is no package)

pytestmark = pytest.mark.timeout(120)
DEGREES = st.floats(0.3, 1e9)
LOSSES = st.lists(st.floats(1.5, 4), min_size=2, max_size=8)
NATS_A, NATS_B = [1.8897, 1.8891, 1.8911], [1.9030, 1.9052, 1.9056]


def test_the_t_distribution_has_its_closed_forms() -> None:
    for t in (-40.0, -2.5, -0.1, 0.0, 1e-9, 0.7, 1.0, 3.0, 1e4):
        assert stats.t_cdf(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-14)
        assert stats.t_sf(t, 2) == pytest.approx(0.5 - t / (2 * math.sqrt(2 + t * t)), abs=1e-14)
        assert stats.t_sf(t, 1e12) == pytest.approx(0.5 * math.erfc(t / math.sqrt(2)), abs=1e-11)
    assert stats.t_sf(math.inf, 3) == 0 and stats.t_sf(-math.inf, 3) == 1
    assert stats.t_quantile(0.975, 4) == pytest.approx(2.7764451051977987, rel=1e-12)


@given(a=st.floats(0.05, 2000), x=st.floats(0, 1))
def test_the_incomplete_beta_function_has_its_closed_forms(a: float, x: float) -> None:
    assert stats.beta_regularised(a, 1, x) == pytest.approx(x**a, abs=1e-12)
    assert stats.beta_regularised(1, a, x) == pytest.approx(
        -math.expm1(a * math.log1p(-x)) if x < 1 else 1, abs=1e-12
    )
    assert stats.beta_regularised(a, a, 0.5) == pytest.approx(0.5, abs=1e-10)


@given(p=st.floats(1e-6, 1 - 1e-6), df=st.floats(0.5, 1e5))
@settings(max_examples=40)
def test_a_quantile_is_the_inverse_of_the_distribution(p: float, df: float) -> None:
    assert stats.t_cdf(stats.t_quantile(p, df), df) == pytest.approx(p, rel=1e-9, abs=1e-12)


def test_scipy_agrees_on_distributions_to_a_billionth() -> None:
    scipy_stats: Any = pytest.importorskip("scipy.stats")
    special: Any = pytest.importorskip("scipy.special")

    @given(t=st.one_of(st.floats(-60, 60), st.floats(-1e-6, 1e-6)), df=DEGREES)
    @settings(max_examples=400)
    def same_tail(t: float, df: float) -> None:
        assert stats.t_sf(t, df) == pytest.approx(float(scipy_stats.t.sf(t, df)), abs=1e-9)

    # Subnormal x: scipy's log of it is rounded
    # (I_5e-324(1/64, 1/2) = x^a / (a B(a, b)) tells that ours is not).
    @given(a=st.floats(0.01, 1e5), b=st.floats(0.01, 1e5), x=st.floats(0, 1, allow_subnormal=False))
    @settings(max_examples=400)
    def same_beta(a: float, b: float, x: float) -> None:
        assert stats.beta_regularised(a, b, x) == pytest.approx(
            float(special.betainc(a, b, x)), abs=1e-9
        )
        assert stats.log_beta(a, b) == pytest.approx(
            float(special.betaln(a, b)), rel=1e-11, abs=1e-9
        )

    @given(p=st.floats(1e-4, 1 - 1e-4), df=st.floats(0.5, 1e5))
    @settings(max_examples=60)
    def same_quantile(p: float, df: float) -> None:
        assert stats.t_quantile(p, df) == pytest.approx(
            float(scipy_stats.t.ppf(p, df)), rel=1e-9, abs=1e-9
        )

    same_tail()
    same_beta()
    same_quantile()


def test_scipy_agrees_on_the_tests_to_a_billionth() -> None:
    scipy_stats: Any = pytest.importorskip("scipy.stats")

    @given(a=LOSSES, b=LOSSES, margin=st.sampled_from([0.0, 0.005, 0.1]))
    @settings(max_examples=150)
    def same_welch(a: list[float], b: list[float], margin: float) -> None:
        if min(stats.summary(a).std, stats.summary(b).std) < 1e-6:
            return  # scipy warns of cancellation there
        mine = stats.welch(a, b, margin=margin)
        theirs = scipy_stats.ttest_ind(
            [x - margin for x in b], a, equal_var=False, alternative="greater"
        )
        assert mine.p == pytest.approx(theirs.pvalue, abs=1e-9) and mine.df == pytest.approx(
            theirs.df, rel=1e-9
        )
        span = scipy_stats.ttest_ind(b, a, equal_var=False).confidence_interval(0.95)
        assert (mine.low, mine.high) == pytest.approx((span.low, span.high), rel=1e-9, abs=1e-9)

    @given(pairs=st.lists(st.tuples(st.floats(1.5, 4), st.floats(1.5, 4)), min_size=2, max_size=8))
    @settings(max_examples=100)
    def same_paired(pairs: list[tuple[float, float]]) -> None:
        a, b = map(list, zip(*pairs, strict=True))
        if stats.summary([y - x for x, y in pairs]).std < 1e-6:
            return
        theirs = scipy_stats.ttest_rel(b, a, alternative="greater")
        assert stats.paired(a, b).p == pytest.approx(theirs.pvalue, abs=1e-9)

    same_welch()
    same_paired()


def test_welch_asks_whether_the_first_is_lower_by_more_than_the_margin() -> None:
    better = stats.welch(NATS_A, NATS_B, margin=0.005)
    assert better.difference == pytest.approx(0.0146333, abs=1e-6) and better.margin == 0.005
    assert better.p < 0.01 and better.low < better.difference < better.high
    assert stats.welch(NATS_A, NATS_B, margin=0.0146333).p == pytest.approx(0.5, abs=1e-3)
    assert stats.welch(NATS_A, NATS_B, margin=0.02).p > 0.9
    worse = stats.welch(NATS_B, NATS_A)
    assert worse.difference == pytest.approx(-better.difference) and worse.p > 0.99
    assert worse.low == pytest.approx(-better.high)


def test_runs_without_spread_decide_by_their_means() -> None:
    assert stats.welch([2.0, 2.0], [2.1, 2.1], margin=0.005).p == 0
    assert stats.welch([2.0, 2.0], [2.0, 2.0], margin=0.005).p == 1
    assert stats.welch([2.0, 2.0], [2.0, 2.0]).p == 0.5
    assert stats.welch([1e-200, 3e-200], [2e-200, 5e-200]).p == pytest.approx(
        stats.welch([1.0, 3.0], [2.0, 5.0]).p, abs=0.5
    )  # squares that underflow raise nothing


def test_pairs_take_out_what_both_share() -> None:
    a, b = [1.0, 2.0, 3.0, 4.0], [1.011, 2.009, 3.010, 4.010]
    assert stats.paired(a, b, margin=0.005).p < 0.001
    assert stats.welch(a, b, margin=0.005).p > 0.4


def test_mean_and_standard_deviation() -> None:
    group = stats.summary([1.0, 2.0, 4.0])
    assert (group.n, group.mean) == (3, pytest.approx(7 / 3)) and group.std == pytest.approx(
        math.sqrt(7 / 3)
    )
    assert math.isnan(stats.summary([5.0]).std)


@pytest.mark.parametrize(
    "call",
    [
        lambda: stats.summary([]),
        lambda: stats.summary([1.0, math.nan]),
        lambda: stats.welch([1.0], [2.0, 3.0]),
        lambda: stats.paired([1.0, 2.0], [1.0]),
        lambda: stats.paired([1.0], [1.0]),
        lambda: stats.t_sf(1.0, 0.0),
        lambda: stats.t_sf(math.nan, 3),
        lambda: stats.t_quantile(1.0, 3),
        lambda: stats.beta_regularised(0, 1, 0.5),
        lambda: stats.beta_regularised(1, 1, 1.5),
        lambda: stats.summary([1e308, 1e308, 1e308]),
        lambda: stats.check_bytes(math.nan, 1.2, 1000),
        lambda: stats.check_bytes(2.0, 0.0, 1000),
    ],
)
def test_values_without_meaning_are_refused(call: Any) -> None:
    with pytest.raises(ValueError):
        call()


def score_of(nats: float, tokens: int, total_bytes: float) -> tuple[float, float]:
    return nats, nats / math.log(2) * tokens / total_bytes


@pytest.mark.parametrize("split", stats.PUBLISHED)
def test_scores_of_the_published_splits_are_recognised(split: str) -> None:
    tokens, total = stats.PUBLISHED[split]
    loss, bpb = score_of(2.0726, tokens, total)
    check = stats.check_bytes(round(loss, 8), round(bpb, 8), tokens, loss_digits=8, bpb_digits=8)
    assert check.verdict == "agrees" and check.split == split and abs(check.bytes - total) < 3
    assert total == round(stats.implied_bytes(loss, bpb, tokens))


@pytest.mark.parametrize(
    ("factor", "words"), [(1.17, "counted twice"), (1 / 1.171, "not counted"), (1.5, "x1.5")]
)
def test_wrongly_counted_bytes_are_found(factor: float, words: str) -> None:
    tokens, total = stats.PUBLISHED["sp8192"]
    loss, bpb = score_of(2.79, tokens, total * factor)
    check = stats.check_bytes(loss, bpb, tokens)
    assert (
        check.verdict == "differs" and words in check.words and check.ratio == pytest.approx(factor)
    )


def test_few_digits_leave_more_open_and_lost_windows_are_no_error() -> None:
    tokens, total = stats.PUBLISHED["sp1024"]
    loss, bpb = score_of(2.0726, tokens, total + 3000)
    assert stats.check_bytes(loss, bpb, tokens, loss_digits=4, bpb_digits=4).verdict == "agrees"
    near = stats.check_bytes(loss, bpb, tokens, loss_digits=8, bpb_digits=8)
    assert near.verdict == "near" and "+3,000" in near.words
    assert stats.check_bytes(loss, bpb, tokens, loss_digits=8, bpb_digits=8).tolerance < 4


def test_other_splits_are_unknown_and_a_log_is_held_to_its_own_count() -> None:
    loss, bpb = score_of(4.0, 193_536, 662_943)
    unknown = stats.check_bytes(loss, bpb, 193_536)
    assert unknown.verdict == "unknown" and "662,943" in unknown.words
    assert stats.check_bytes(loss, bpb, 193_536, stated=662_943).verdict == "agrees"
    assert stats.check_bytes(loss, bpb, 193_536, stated=600_000).verdict == "differs"
