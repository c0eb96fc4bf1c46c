"""Statistics of several runs on several tasks: arrays in, arrays out.

Definitions of Agarwal et al. 2021 (arXiv:2108.13264, "rliable"), used as Gorsane et al. 2022
(arXiv:2209.10485, "MARL-eval") recommend. Axes: R runs, T tasks, E evaluations, K thresholds,
B bootstrap resamples; any axes may stand before (R, T).
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

NUM_RESAMPLES = 2000
LEVEL = 0.95  # of the intervals


class Estimate(NamedTuple):
    """A statistic with its interval; arrays of one shape."""

    value: np.ndarray
    low: np.ndarray  # nan of a single run: there is nothing to resample
    high: np.ndarray


def normalise(x: np.ndarray, low: float, high: float) -> np.ndarray:
    """Returns (x - low) / (high - low), in [0, 1] if low and high are the extremes of a task over
    everything that is compared; 0 where they are equal.
    """
    return (x - low) / (high - low) if high > low else np.zeros_like(x, float)


def mean(scores: np.ndarray) -> np.ndarray:
    """Returns the mean of scores (..., R, T), over runs and tasks."""
    return np.mean(scores, axis=(-2, -1))


def median(scores: np.ndarray) -> np.ndarray:
    """Returns the median over tasks of the mean over runs, of scores (..., R, T)."""
    return np.median(np.mean(scores, axis=-2), axis=-1)


def interquartile_mean(scores: np.ndarray) -> np.ndarray:
    """Returns the mean of scores (..., R, T) without the lowest and highest quarter.

    Runs and tasks are pooled. Of R * T scores floor(R * T / 4) are left out at either end.
    """
    pooled = np.sort(scores.reshape(*scores.shape[:-2], scores.shape[-2] * scores.shape[-1]))
    cut = pooled.shape[-1] // 4
    return np.mean(pooled[..., cut : pooled.shape[-1] - cut], axis=-1)


def optimality_gap(scores: np.ndarray, target: float = 1.0) -> np.ndarray:
    """Returns target - mean(min(score, target)), of scores (..., R, T): 0 is best."""
    return target - np.mean(np.minimum(scores, target), axis=(-2, -1))


def share_above(scores: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Returns which share (..., K) of scores (..., R, T) is above each threshold (K,)."""
    return np.stack([np.mean(scores > tau, axis=(-2, -1)) for tau in thresholds], axis=-1)


def probability_of_improvement(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns how likely a run of x beats one of y on the same task, the mean over tasks.

    P(x > y) + P(x = y) / 2 over all pairs of runs: the Mann-Whitney U divided by R * R'.

    Args:
        x: scores (..., R, T).
        y: scores (..., R', T).
    """
    return np.mean(_wins(x, y), axis=(-3, -2, -1))


def _wins(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns 1, 1/2 or 0 (..., R, R', T) where x wins, draws or loses."""
    difference = x[..., :, None, :] - y[..., None, :, :]
    return (np.sign(difference) + 1) / 2


def resample(shape: tuple[int, int], rng: np.random.Generator, num: int) -> np.ndarray:
    """Returns indices of runs (B, R, T) for scores (R, T), drawn anew within each task.

    The tasks are the strata: each keeps its number of runs, and they are drawn independently.
    """
    return rng.integers(0, shape[0], size=(num, *shape))


def take(scores: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Returns the resampled scores (B, R, T) of scores (R, T)."""
    return np.take_along_axis(scores[None], indices, axis=1)


def interval(samples: np.ndarray, level: float = LEVEL) -> tuple[np.ndarray, np.ndarray]:
    """Returns the percentile interval of a statistic's resamples (B, ...), each end (...)."""
    tail = 50 * (1 - level)
    low, high = np.percentile(samples, (tail, 100 - tail), axis=0)
    return low, high


def estimate(
    statistic: Callable[[np.ndarray], np.ndarray],
    scores: np.ndarray,
    rng: np.random.Generator,
    num_resamples: int = NUM_RESAMPLES,
) -> Estimate:
    """Returns a statistic of scores (R, T) with its stratified bootstrap interval.

    Args:
        statistic: from (..., R, T) to (...) or (..., K).
        scores: one row per run; a run of one task has nothing to do with its row's others.
        rng: seeded.
        num_resamples: B.
    """
    value = statistic(scores)
    if len(scores) == 1:
        return _without_interval(value)
    samples = statistic(take(scores, resample(scores.shape, rng, num_resamples)))
    return Estimate(value, *interval(samples))


def _without_interval(value: np.ndarray) -> Estimate:
    unknown = np.full_like(value, np.nan)
    return Estimate(np.asarray(value), unknown, unknown)


def estimate_curve(
    curves: np.ndarray, rng: np.random.Generator, num_resamples: int = NUM_RESAMPLES
) -> Estimate:
    """Returns the interquartile mean (E,) at each evaluation of curves (R, T, E).

    Whole runs are resampled, and the intervals hold point by point. (rliable draws runs anew for
    every evaluation: the same intervals but for chance.)
    """
    num_runs, num_tasks, num_evaluations = curves.shape
    value = interquartile_mean(np.moveaxis(curves, -1, 0))
    if num_runs == 1:
        return _without_interval(value)
    indices = resample((num_runs, num_tasks), rng, num_resamples)
    ends = [
        interval(interquartile_mean(take(curves[..., index], indices)))
        for index in range(num_evaluations)  # one at a time: all would need gigabytes
    ]
    low, high = np.transpose(ends)
    return Estimate(value, low, high)


def estimate_improvement(
    x: np.ndarray, y: np.ndarray, rng: np.random.Generator, num_resamples: int = NUM_RESAMPLES
) -> Estimate:
    """Returns the probability of improvement of x (R, T) over y (R', T).

    Both are resampled, independently of each other.
    """
    value = probability_of_improvement(x, y)
    if len(x) == 1 and len(y) == 1:
        return _without_interval(value)
    wins = _wins(x, y)
    of_x, of_y = (resample(scores.shape, rng, num_resamples) for scores in (x, y))
    samples = np.zeros(num_resamples)
    for task in range(x.shape[1]):
        pairs = wins[of_x[:, :, None, task], of_y[:, None, :, task], task]  # (B, R, R')
        samples += np.mean(pairs, axis=(1, 2)) / x.shape[1]
    return Estimate(value, *interval(samples))
