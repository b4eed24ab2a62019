"""The statistics of tools/samples.py: what the tests ask, what is refused."""

import math

import pytest
import samples

NATS_A, NATS_B = [1.8897, 1.8891, 1.8911], [1.9030, 1.9052, 1.9056]


def test_welch_asks_whether_the_first_is_lower_by_more_than_the_margin() -> None:
    better = samples.welch(NATS_A, NATS_B, margin=0.005)
    assert better.difference == pytest.approx(0.0146333, abs=1e-6) and better.margin == 0.005
    # By hand: both variances over 3, Welch's degrees of freedom, Student's t.
    va, vb = (samples.spread(values) ** 2 / 3 for values in (NATS_A, NATS_B))
    assert better.t == pytest.approx((better.difference - 0.005) / math.sqrt(va + vb))
    assert better.df == pytest.approx((va + vb) ** 2 / (va**2 / 2 + vb**2 / 2))
    assert better.p < 0.01 and better.low < better.difference < better.high
    assert samples.welch(NATS_A, NATS_B, margin=0.0146333).p == pytest.approx(0.5, abs=1e-3)
    assert samples.welch(NATS_A, NATS_B, margin=0.02).p > 0.9
    worse = samples.welch(NATS_B, NATS_A)
    assert worse.difference == pytest.approx(-better.difference) and worse.p > 0.99
    assert worse.low == pytest.approx(-better.high)


def test_runs_without_spread_decide_by_their_means() -> None:
    for test in (samples.welch, samples.paired):
        outcomes = [test([2.0, 2.0], [2.0 + x, 2.0 + x], margin=0.25) for x in (0.5, 0.0)]
        assert [outcome.p for outcome in outcomes] == [0.0, 1.0]
        assert [(outcome.low, outcome.high) for outcome in outcomes] == [(0.5, 0.5), (0.0, 0.0)]
        assert not test([2.0, 2.0], [2.25, 2.25], margin=0.25).p < 0.01
    one_varies = samples.welch([2.0, 2.0], [2.1, 2.2])
    assert one_varies.df == 1 and one_varies.low < 0.15 < one_varies.high


def test_pairs_take_out_what_both_share() -> None:
    a, b = [1.0, 2.0, 3.0, 4.0], [1.011, 2.009, 3.010, 4.010]
    outcome = samples.paired(a, b, margin=0.005)
    assert outcome.p < 0.001 < 0.4 < samples.welch(a, b, margin=0.005).p
    assert samples.paired(a, b, margin=0.010).p == pytest.approx(0.5, abs=1e-3)
    # Of the differences 11, 9, 10, 10: mean 10, std 0.8165, t(0.975, 3) = 3.1824.
    assert outcome.high - 0.010 == pytest.approx(3.182446 * 0.81650e-3 / 2, rel=1e-4)


def test_holm_makes_p_values_hold_together() -> None:
    """The smallest of n is taken n times, the next one n - 1 times; none becomes smaller."""
    assert samples.holm([0.02, 0.01, math.nan, 0.04]) == pytest.approx(
        [0.04, 0.03, math.nan, 0.04], nan_ok=True
    )
    assert samples.holm([0.6, 0.5]) == [1.0, 1.0]
    same = samples.paired([1.0, 2.0, 3.0], [1.1, 2.0, 3.2])
    assert (same.p_of_none < 0.05) == same.measurable and 0.05 < same.p_of_none < 0.5
