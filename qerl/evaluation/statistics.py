"""What a sample of problems allows to say: bootstrap intervals, paired differences, pass@k. NumPy only, pure functions.

Problems are the unit: completions of one problem are not independent, so a problem's mean over its completions is one
value, and problems are what is resampled. All resampling is seeded; equal inputs and seeds give equal intervals, and
quantities resampled with the same seed and the same number of problems meet the same draws.

Intervals are percentile bootstrap intervals, widened for small samples (Hesterberg 2015, "What Teachers Should Know
About the Bootstrap", section 5.3): the plain ones are too narrow by sqrt((n - 1) / n) and use normal instead of
Student quantiles. Below about 8 values no bootstrap interval covers what it says; it is then the range of the data.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

NUM_RESAMPLES = 10_000
LEVEL = 0.95
_DRAWS_AT_ONCE = 1 << 20
"""Values gathered at a time: about 16 MB."""


@dataclass(frozen=True)
class Interval:
    """A mean and the interval that its resamples fill. Of fewer than two values, low and high are NaN: nothing is known."""

    mean: float
    low: float
    high: float
    level: float = LEVEL

    @property
    def is_above_zero(self) -> bool:
        return self.low > 0

    @property
    def is_below_zero(self) -> bool:
        return self.high < 0

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def bootstrap_interval(
    values: ArrayLike, *, seed: int, num_resamples: int = NUM_RESAMPLES, level: float = LEVEL
) -> Interval:
    """Interval of the mean of `values` [n], one a problem, over resamples of the problems.

    Raises ValueError for no values and for values that are not finite.
    """
    sample = _checked(values, dimensions=1)
    n = len(sample)
    if n == 1:
        return Interval(float(sample[0]), math.nan, math.nan, level)
    generator = np.random.default_rng(seed)
    means = np.empty(num_resamples)
    rows = max(1, _DRAWS_AT_ONCE // n)
    for start in range(0, num_resamples, rows):
        stop = min(start + rows, num_resamples)
        draws = generator.integers(0, n, size=(stop - start, n))
        means[start:stop] = sample[draws].mean(axis=1)
    return _interval(float(sample.mean()), means, n, level)


def paired_difference(
    a: ArrayLike,
    b: ArrayLike,
    *,
    seed: int,
    num_resamples: int = NUM_RESAMPLES,
    level: float = LEVEL,
) -> Interval:
    """Interval of mean(b) - mean(a) for two values a problem, [n] each: from the arm `a` to the arm `b`.

    A resample takes both values of a problem or neither, so what makes problems hard cancels. Raises ValueError for
    different lengths, no values and values that are not finite.
    """
    first, second = _checked(a, dimensions=1), _checked(b, dimensions=1)
    if len(first) != len(second):
        raise ValueError(f"{len(first)} values cannot be paired with {len(second)}")
    return bootstrap_interval(second - first, seed=seed, num_resamples=num_resamples, level=level)


def seeds_and_problems_interval(
    values: ArrayLike, *, seed: int, num_resamples: int = NUM_RESAMPLES, level: float = LEVEL
) -> Interval:
    """Interval of the mean of `values` [S, n]: S training seeds, all evaluated on the same n problems.

    Seeds and problems are resampled each on their own (crossed, not nested), so both kinds of luck are inside; the
    seeds' means are spread by sqrt(S / (S - 1)) about their mean first, which is what resampling so few takes away. For
    two arms with the same seeds and problems give the differences. One seed says nothing about others, and with three
    or four the interval is still a lower bound on what is not known. Raises ValueError as `bootstrap_interval` does.
    """
    sample = _checked(values, dimensions=2)
    num_seeds, n = sample.shape
    if n == 1 and num_seeds == 1:
        return Interval(float(sample[0, 0]), math.nan, math.nan, level)
    mean = float(sample.mean())
    if num_seeds > 1:
        lost = math.sqrt(num_seeds / (num_seeds - 1)) - 1
        sample = sample + lost * (sample.mean(axis=1, keepdims=True) - mean)
    generator = np.random.default_rng(seed)
    means = np.empty(num_resamples)
    rows = max(1, _DRAWS_AT_ONCE // (n + num_seeds))
    for start in range(0, num_resamples, rows):
        count = min(rows, num_resamples - start)
        seeds = generator.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), size=count)
        problems = generator.multinomial(n, np.full(n, 1 / n), size=count)
        totals = ((seeds @ sample) * problems).sum(axis=1)
        means[start : start + count] = totals / (num_seeds * n)
    return _interval(mean, means, n if n > 1 else num_seeds, level)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n samples, drawn without replacement, hold one of the c right ones.

    1 - C(n - c, k) / C(n, k): the unbiased estimate of pass@k from n >= k samples (Chen et al. 2021, arXiv 2107.03374).
    Raises ValueError outside 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {n} samples with {c} right")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def majority_score(answers: Sequence[str | None], scores: Sequence[float]) -> float:
    """maj@k of one problem, k = len(answers): the score of the answer that most samples gave.

    `scores` are the samples' own; an answer's score is the mean over the samples that gave it, and of answers that lead
    together one is chosen at random, so their mean is the expected score. Samples without an answer (None) do not vote;
    if nobody votes the score is 0.
    """
    votes: dict[str, list[float]] = {}
    for answer, score in zip(answers, scores, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(score)
    if not votes:
        return 0.0
    most = max(map(len, votes.values()))
    leading = [sum(given) / most for given in votes.values() if len(given) == most]
    return sum(leading) / len(leading)


def difference_in_words(change: Interval, what: str) -> str:
    """A change as a sentence that claims no more than its interval: a direction only where the interval excludes 0."""
    level = f"{100 * change.level:g} %"
    if math.isnan(change.low):
        return (
            f"{what} changed by {change.mean:+.3f} on one problem, which says nothing about others"
        )
    if change.low == change.high == 0:
        return f"{what} is the same on every problem"
    span = f"{level} interval {change.low:+.3f} to {change.high:+.3f}"
    if change.is_above_zero or change.is_below_zero:
        direction = "higher" if change.is_above_zero else "lower"
        return f"{what} is {direction} by {abs(change.mean):.3f} ({span})"
    return f"{what} changed by {change.mean:+.3f}, which may be chance ({span})"


def _checked(values: ArrayLike, dimensions: int) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != dimensions or array.size == 0:
        raise ValueError(f"values of shape {array.shape}; {dimensions} dimension(s), none empty")
    if not np.isfinite(array).all():
        raise ValueError("values that are not finite have no mean")
    return array


def _interval(mean: float, means: NDArray[np.float64], n: int, level: float) -> Interval:
    tail = _expanded_tail(n, level)
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(mean, float(low), float(high), level)


def _expanded_tail(n: int, level: float) -> float:
    """Share of resamples to leave out on each side: Phi(-sqrt(n / (n - 1)) t), t the Student quantile with n - 1."""
    if not 0 < level < 1:
        raise ValueError(f"level {level} is not between 0 and 1")
    normal = NormalDist()
    return normal.cdf(-math.sqrt(n / (n - 1)) * _student_quantile((1 + level) / 2, n - 1))


def _student_quantile(probability: float, freedom: int) -> float:
    """Student's t quantile by its expansion in 1/freedom (Abramowitz & Stegun 26.7.5): 3 % off at 2, 0.1 % from 5 on."""
    z = NormalDist().inv_cdf(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))
