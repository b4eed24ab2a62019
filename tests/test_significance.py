"""The statistics of logs/significance.py: what the tests ask, what is refused."""

import math

import pytest
import significance

NATS_A, NATS_B = [1.8897, 1.8891, 1.8911], [1.9030, 1.9052, 1.9056]


def test_welch_asks_whether_the_first_is_lower_by_more_than_the_margin() -> None:
    better = significance.welch(NATS_A, NATS_B, margin=0.005)
    assert better.difference == pytest.approx(0.0146333, abs=1e-6) and better.margin == 0.005
    # By hand: both variances over 3, Welch's degrees of freedom, Student's t.
    va, vb = (significance.summary(values).std ** 2 / 3 for values in (NATS_A, NATS_B))
    assert better.t == pytest.approx((better.difference - 0.005) / math.sqrt(va + vb))
    assert better.df == pytest.approx((va + vb) ** 2 / (va**2 / 2 + vb**2 / 2))
    assert better.p < 0.01 and better.low < better.difference < better.high
    assert better.seen_from == pytest.approx(better.difference - better.low)
    assert significance.welch(NATS_A, NATS_B, margin=0.0146333).p == pytest.approx(0.5, abs=1e-3)
    assert significance.welch(NATS_A, NATS_B, margin=0.02).p > 0.9
    worse = significance.welch(NATS_B, NATS_A)
    assert worse.difference == pytest.approx(-better.difference) and worse.p > 0.99
    assert worse.low == pytest.approx(-better.high)


def test_runs_without_spread_decide_by_their_means() -> None:
    for test in (significance.welch, significance.paired):
        outcomes = [test([2.0, 2.0], [2.0 + x, 2.0 + x], margin=0.25) for x in (0.5, 0.0, 0.25)]
        assert [outcome.p for outcome in outcomes] == [0.0, 1.0, 0.5]
        assert [outcome.t for outcome in outcomes] == [math.inf, -math.inf, 0.0]
    one_varies = significance.welch([2.0, 2.0], [2.1, 2.2])
    assert one_varies.df == 1 and one_varies.low < 0.15 < one_varies.high


def test_pairs_take_out_what_both_share() -> None:
    a, b = [1.0, 2.0, 3.0, 4.0], [1.011, 2.009, 3.010, 4.010]
    outcome = significance.paired(a, b, margin=0.005)
    assert outcome.p < 0.001 < 0.4 < significance.welch(a, b, margin=0.005).p
    assert significance.paired(a, b, margin=0.010).p == pytest.approx(0.5, abs=1e-3)
    # Of the differences 11, 9, 10, 10: mean 10, std 0.8165, t(0.975, 3) = 3.1824.
    assert outcome.high - 0.010 == pytest.approx(3.182446 * 0.81650e-3 / 2, rel=1e-4)


def test_mean_standard_deviation_and_interval() -> None:
    group = significance.summary([1.0, 2.0, 4.0])
    assert (group.n, group.mean) == (3, pytest.approx(7 / 3))
    assert group.std == pytest.approx(math.sqrt(7 / 3))
    half = 4.302653 * group.std / math.sqrt(3)
    assert significance.interval([1.0, 2.0, 4.0]) == pytest.approx(half)
    assert math.isnan(significance.summary([5.0]).std) and math.isnan(significance.interval([5.0]))


def test_the_wait_is_said_as_far_as_it_is_known() -> None:
    group = significance.summary([1.0, 2.0])
    comparison = significance.Comparison(waits=(group, group))
    assert significance.wait_words(comparison) == "input_wait: A 1.50 ms per step, B 1.50"
    comparison.input_wait = significance.welch([1.0, 2.0], [1.0, 2.0])
    assert significance.wait_words(comparison).endswith(" ms: no measurable difference)")
    assert significance.some(list("abcdefgh")) == "a, b, c, d, e, f and 2 more"


def test_values_without_meaning_are_refused() -> None:
    for reason, ask, *values in (
        ("finite values", significance.summary, []),
        ("a mean needs finite", significance.summary, [1.0, math.nan]),
        ("two runs per group", significance.welch, [1.0], [2.0, 3.0]),
        ("shorter than", significance.paired, [1.0, 2.0, 3.0], [1.0, 2.1]),
        ("two pairs at least", significance.paired, [1.0], [1.0]),
    ):
        with pytest.raises(ValueError, match=reason):
            ask(*values)
