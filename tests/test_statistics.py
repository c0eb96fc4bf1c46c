"""Statistics against rliable's numbers, scipy, plain loops, and what must hold of intervals.

The numbers recorded here are those of rliable 1.2.0 (arch 7.2.0) on the same arrays. Its intervals
are of the same kind (stratified, percentile), with 20,000 resamples, 5,000 for the probability of
improvement. Other random numbers make the difference: with four seeds of ours at most 0.0071.
"""

import itertools
import time

import numpy as np
import pytest
from scipy import stats

from mava import statistics
from mava.statistics import (
    estimate,
    estimate_curve,
    estimate_improvement,
    interquartile_mean,
    interval,
    mean,
    median,
    normalise,
    optimality_gap,
    probability_of_improvement,
    resample,
    share_above,
    take,
)

CHANCE = 0.008  # of the ends of intervals


def make_scores(shape, rate, decimals):
    x = (np.sin(rate * np.arange(1, np.prod(shape) + 1)) + 1) / 2
    return np.round(x, decimals).reshape(shape)


X, Y = make_scores((5, 4), 1.7, 3), make_scores((7, 4), 2.9, 3)
X_WITH_TIES, Y_WITH_TIES = make_scores((5, 4), 1.7, 1), make_scores((7, 4), 2.9, 1)
CURVES = make_scores((5, 4, 3), 2.3, 3)
AGGREGATES = (median, interquartile_mean, mean, lambda scores: optimality_gap(scores, 0.8))


def rng(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize(
    ("scores", "values", "lows", "highs"),
    [
        (
            X,
            [0.5467, 0.5419, 0.527, 0.3156],
            [0.3631, 0.3776, 0.4268475, 0.2317],
            [0.7251025, 0.705705, 0.6257, 0.4028],
        ),
        (
            Y,
            [0.49564285714285716, 0.492, 0.49596428571428575, 0.3401785714285715],
            [0.35364285714285715, 0.30164285714285716, 0.36914196428571433, 0.22810535714285715],
            [0.6389303571428571, 0.6900732142857141, 0.6256455357142854, 0.4518580357142857],
        ),
    ],
)
def test_aggregates_are_rliables(scores, values, lows, highs):
    for statistic, value, low, high in zip(AGGREGATES, values, lows, highs, strict=True):
        found = estimate(statistic, scores, rng(), 20_000)
        np.testing.assert_allclose(found.value, value, rtol=0, atol=1e-12)
        np.testing.assert_allclose([found.low, found.high], [low, high], rtol=0, atol=CHANCE)


def test_profile_is_rliables():
    thresholds = np.array([0.0, 0.25, 0.5, 0.75, 1.0])
    found = estimate(lambda scores: share_above(scores, thresholds), X, rng(), 20_000)
    np.testing.assert_allclose(found.value, [1, 0.65, 0.5, 0.35, 0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.low, [1, 0.5, 0.35, 0.2, 0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.high, [1, 0.8, 0.65, 0.5, 0], rtol=0, atol=1e-12)


def test_improvement_is_rliables():
    found = estimate_improvement(X_WITH_TIES, Y_WITH_TIES, rng(), 20_000)
    assert np.sum(X_WITH_TIES[:, None] == Y_WITH_TIES[None]) == 12
    np.testing.assert_allclose(found.value, 0.5142857142857142, rtol=0, atol=1e-12)
    ends = [0.3677678571428575, 0.6607142857142857]
    np.testing.assert_allclose([found.low, found.high], ends, rtol=0, atol=CHANCE)


def test_curve_is_rliables():
    found = estimate_curve(CURVES, rng(), 20_000)
    np.testing.assert_allclose(found.value, [0.4872, 0.5129, 0.4971], rtol=0, atol=1e-12)
    lows, highs = [0.2485, 0.2769975, 0.2535975], [0.7231, 0.7479075, 0.7411075]
    np.testing.assert_allclose(found.low, lows, rtol=0, atol=CHANCE)
    np.testing.assert_allclose(found.high, highs, rtol=0, atol=CHANCE)


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (4, 1), (5, 3), (6, 4), (10, 7)])
def test_interquartile_mean_is_the_trimmed_mean(shape):
    scores = rng().normal(size=shape)
    wanted = stats.trim_mean(scores, 0.25, axis=None)
    np.testing.assert_allclose(interquartile_mean(scores), wanted, rtol=0, atol=1e-12)


def test_leading_axes_are_kept():
    scores = rng().normal(size=(2, 3, 5, 4))
    for statistic in (*AGGREGATES, lambda x: share_above(x, np.array([0.0, 1.0]))):
        wanted = [[statistic(scores[i, j]) for j in range(3)] for i in range(2)]
        np.testing.assert_allclose(statistic(scores), wanted, rtol=0, atol=1e-12)


def test_improvement_counts_pairs():
    total = 0.0
    for task in range(4):
        for x, y in itertools.product(X_WITH_TIES[:, task], Y_WITH_TIES[:, task]):
            total += 1.0 if x > y else 0.5 if x == y else 0.0
    found = probability_of_improvement(X_WITH_TIES, Y_WITH_TIES)
    np.testing.assert_allclose(found, total / (5 * 7 * 4), rtol=0, atol=1e-12)
    other_way = probability_of_improvement(Y_WITH_TIES, X_WITH_TIES)
    np.testing.assert_allclose(found + other_way, 1.0, rtol=0, atol=1e-12)


def test_improvement_resamples_are_those_of_the_definition():
    """The pairs that are won are looked up; that must equal comparing the resampled scores."""
    of_x, of_y = (lambda r: (resample((5, 4), r, 50), resample((7, 4), r, 50)))(rng(3))
    samples = probability_of_improvement(take(X_WITH_TIES, of_x), take(Y_WITH_TIES, of_y))
    found = estimate_improvement(X_WITH_TIES, Y_WITH_TIES, rng(3), 50)
    np.testing.assert_allclose(found[1:], interval(samples), rtol=0, atol=1e-12)


def test_runs_are_resampled_within_each_task():
    scores = np.array([[0.0, 10.0], [1.0, 11.0], [2.0, 12.0]])
    samples = take(scores, resample((3, 2), rng(), 1000))
    assert samples.shape == (1000, 3, 2)
    assert set(np.unique(samples[..., 0])) == {0, 1, 2}
    assert set(np.unique(samples[..., 1])) == {10, 11, 12}
    rows = np.unique(samples.reshape(-1, 2), axis=0)
    assert len(rows) == 9, "a run of one task must not bring that of another with it"
    assert abs(np.corrcoef(samples[:, :, 0].sum(1), samples[:, :, 1].sum(1))[0, 1]) < 0.1


def test_strata_make_intervals_narrow():
    """Two tasks far apart, all their runs equal: there is no chance in the mean."""
    found = estimate(mean, np.array([[0.0, 1.0]] * 4), rng())
    np.testing.assert_allclose(found, [0.5, 0.5, 0.5], rtol=0, atol=1e-12)


def test_interval_is_of_the_percentiles():
    low, high = interval(np.arange(1001.0))
    assert (low, high) == pytest.approx((25.0, 975.0))


def test_intervals_hold_what_they_promise():
    """Of 300 data sets about 95 % have the true mean in them; fewer, as runs are few."""
    generator = rng(1)
    inside = 0
    for _ in range(300):
        found = estimate(mean, generator.normal(size=(20, 3)), generator, 500)
        inside += found.low <= 0 <= found.high
    assert 0.90 < inside / 300 < 0.98


def test_the_same_seed_gives_the_same_interval():
    a, b, c = (estimate(interquartile_mean, X, rng(seed)) for seed in (0, 0, 1))
    assert a == b
    assert a != c


def test_one_run_has_no_interval():
    found = [
        estimate(mean, X[:1], rng()),
        estimate_curve(CURVES[:1], rng()),
        estimate_improvement(X[:1], Y[:1], rng()),
    ]
    for value, low, high in found:
        assert np.isfinite(value).all()
        assert np.isnan(low).all()
        assert np.isnan(high).all()


def test_normalise():
    np.testing.assert_allclose(normalise(np.array([2.0, 3.0, 6.0]), 2.0, 6.0), [0, 0.25, 1])
    np.testing.assert_array_equal(normalise(np.array([2.0, 2.0]), 2.0, 2.0), [0, 0])


def test_2000_resamples_take_seconds():
    scores = rng().normal(size=(10, 10, 100))
    start = time.perf_counter()
    estimate_curve(scores, rng())
    estimate_improvement(scores[..., 0], scores[..., 1], rng())
    assert time.perf_counter() - start < 20
    assert statistics.NUM_RESAMPLES == 2000
