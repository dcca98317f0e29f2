"""Intervals, pass@k and majority votes against what can be counted, and against coverage."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl.evaluation.statistics import (
    Interval,
    _student_quantile,
    bootstrap_interval,
    difference_in_words,
    majority_score,
    paired_difference,
    pass_at_k,
    seeds_and_problems_interval,
)


def test_interval_of_many_values_is_the_normal_one() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, size=2000)
    interval = bootstrap_interval(values, seed=1)
    half = 1.96 * values.std(ddof=1) / math.sqrt(len(values))
    assert interval.mean == pytest.approx(values.mean())
    assert interval.low == pytest.approx(values.mean() - half, abs=0.005)
    assert interval.high == pytest.approx(values.mean() + half, abs=0.005)


def test_same_seed_same_interval_and_another_seed_another() -> None:
    values = [0.0, 1.0, 1.0, 0.0, 1.0, 0.5, 0.25, 1.0]
    assert bootstrap_interval(values, seed=3) == bootstrap_interval(values, seed=3)
    assert bootstrap_interval(values, seed=3) != bootstrap_interval(values, seed=4)


def test_draws_in_chunks_are_the_draws() -> None:
    """A sample so large that resamples come in several pieces still has the right width."""
    values = np.arange(20_000) % 2
    interval = bootstrap_interval(values, seed=0, num_resamples=400)
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * 0.5 / 20_000**0.5, rel=0.15)


@pytest.mark.parametrize(("n", "least"), [(10, 0.90), (40, 0.93)])
def test_coverage_of_small_samples(n: int, least: float) -> None:
    """Of 400 experiments with a known mean about 95 % of the intervals hold it; plain percentiles give 90 % at n = 10."""
    generator = np.random.default_rng(7)
    hits = 0
    for trial in range(400):
        interval = bootstrap_interval(generator.normal(size=n), seed=trial, num_resamples=1000)
        hits += interval.low <= 0 <= interval.high
    assert least <= hits / 400 <= 0.98


@pytest.mark.parametrize(("freedom", "exact"), [(2, 4.3027), (5, 2.5706), (19, 2.0930)])
def test_student_quantile(freedom: int, exact: float) -> None:
    assert _student_quantile(0.975, freedom) == pytest.approx(
        exact, rel=0.03 if freedom == 2 else 1e-3
    )


def test_pairing_takes_out_what_makes_problems_hard() -> None:
    hardness = np.random.default_rng(0).uniform(size=200)
    change = paired_difference(hardness, hardness + 0.01, seed=0)
    assert change.mean == pytest.approx(0.01)
    assert change.high - change.low < 1e-6
    assert change.is_above_zero
    assert paired_difference([1, 0, 1], [0, 0, 0], seed=0).mean == pytest.approx(-2 / 3)


@pytest.mark.parametrize(
    "values", [[], [math.nan, 1.0], [math.inf], [[1.0, 2.0]]], ids=["none", "nan", "inf", "2d"]
)
def test_values_without_a_mean_are_refused(values: list) -> None:
    with pytest.raises(ValueError, match="values"):
        bootstrap_interval(values, seed=0)


def test_unequal_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="3 values cannot be paired with 2"):
        paired_difference([1, 2, 3], [1, 2], seed=0)


def test_one_value_says_nothing() -> None:
    interval = bootstrap_interval([0.5], seed=0)
    assert interval.mean == 0.5
    assert math.isnan(interval.low)
    assert not interval.is_above_zero and not interval.is_below_zero
    assert "says nothing" in difference_in_words(interval, "avg@4")


def test_seeds_widen_the_interval() -> None:
    """Seeds that disagree must show; seeds that agree leave the interval of the problems."""
    generator = np.random.default_rng(0)
    problems = generator.uniform(size=300)
    agree = np.stack([problems] * 4)
    disagree = agree + np.array([[-0.2], [-0.1], [0.1], [0.2]])
    alone = bootstrap_interval(problems, seed=0)
    same = seeds_and_problems_interval(agree, seed=0)
    other = seeds_and_problems_interval(disagree, seed=0)
    assert same.mean == other.mean == pytest.approx(alone.mean)
    assert same.low <= alone.low + 0.005
    assert other.high - other.low > 2 * (alone.high - alone.low)
    one = seeds_and_problems_interval(problems[None], seed=0)
    assert one.high - one.low == pytest.approx(alone.high - alone.low, rel=0.1)


@given(st.integers(1, 9), st.data())
@settings(max_examples=60, deadline=None)
def test_pass_at_k_counts_subsets(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations(range(n), k))
    hits = sum(any(member < c for member in subset) for subset in subsets)
    assert pass_at_k(n, c, k) == pytest.approx(hits / len(subsets))


@pytest.mark.parametrize("counts", [(4, 5, 1), (4, 1, 5), (4, 1, 0), (0, 0, 1), (4, -1, 1)])
def test_impossible_counts_are_refused(counts: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(*counts)


@pytest.mark.parametrize(
    ("answers", "scores", "expected"),
    [
        (["7", "7", "9"], [1, 1, 0], 1.0),
        (["7", "9", "9"], [1, 0, 0], 0.0),
        (["7", "9"], [1, 0], 0.5),
        (["7", None, None], [1, 0, 0], 1.0),
        ([None, None], [0, 0], 0.0),
        (["7", "7", "9"], [1, 0, 0], 0.5),  # graded on more than the answer
        ([], [], 0.0),
    ],
)
def test_majority(answers: list, scores: list, expected: float) -> None:
    assert majority_score(answers, scores) == expected


def test_words_claim_no_more_than_the_interval() -> None:
    assert difference_in_words(Interval(0.1, 0.02, 0.2), "avg@4") == (
        "avg@4 is higher by 0.100 (95 % interval +0.020 to +0.200)"
    )
    assert "lower by 0.100" in difference_in_words(Interval(-0.1, -0.2, -0.02), "avg@4")
    chance = difference_in_words(Interval(0.1, -0.02, 0.2), "avg@4")
    assert chance == "avg@4 changed by +0.100, which may be chance (95 % interval -0.020 to +0.200)"
    assert difference_in_words(Interval(0.1, 0.0, 0.2), "x").startswith("x changed by")
    assert difference_in_words(Interval(0.0, 0.0, 0.0), "x") == "x is the same on every problem"
    assert "90 %" in difference_in_words(Interval(0.1, 0.02, 0.2, level=0.9), "x")
