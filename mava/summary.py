"""Means and spreads of what was measured, under the names by which they are logged."""

import math
from collections.abc import Sequence

import numpy as np

from mava.config import RunConfig
from mava.types import Metrics

OF_TEAM = "mean_episode_return/"  # then a team's name


def summarise_episodes(values: dict[str, np.ndarray]) -> dict[str, float]:
    """Returns means, and the spread of returns, of an evaluation's episodes."""
    returns = values["episode_return"]
    summary = {mean_name(name): float(np.mean(x, dtype=np.float64)) for name, x in values.items()}
    return summary | {
        "std_episode_return": float(np.std(returns, dtype=np.float64)),
        "min_episode_return": float(np.min(returns)),
        "max_episode_return": float(np.max(returns)),
        "num_episodes": float(len(returns)),
    }


def summarise_training(metrics: Metrics, seconds: float) -> dict[str, float]:
    """Returns the means of a block, and the rates of what is counted `_per_second`; a name without
    a single count is left out.

    Args:
        metrics: of the block.
        seconds: that it took.
    """
    summary = {}
    for name, stats in metrics.episodes.items():
        if stats.count > 0:
            summary[mean_name(name)] = float(stats.sum / stats.count)
        if stats.count > 0 and name == "episode_return":
            variance = stats.sum_squares / stats.count - (stats.sum / stats.count) ** 2
            summary["std_episode_return"] = math.sqrt(max(float(variance), 0.0))
            summary["min_episode_return"] = float(stats.min)
            summary["max_episode_return"] = float(stats.max)
            summary["num_episodes"] = float(stats.count)
    for name, (total, count) in metrics.learn.items():
        if count > 0:
            summary[name] = float(total / (seconds if name.endswith("_per_second") else count))
    return summary


def return_of_learners(values: dict[str, float], config: RunConfig) -> float:
    """Returns the mean return of an evaluation; if teams are frozen, the mean over the others: what
    is good for one team may be bad for the other.
    """
    frozen = getattr(config.system, "frozen_teams", ())
    of_others = [
        x
        for name, x in values.items()
        if name.startswith(OF_TEAM) and name.removeprefix(OF_TEAM) not in frozen
    ]
    return float(np.mean(of_others)) if frozen and of_others else values["mean_episode_return"]


def first_values(metrics: dict[str, list[float]]) -> dict[str, float]:
    """Returns metrics as they were before MARL-eval's format made lists of them."""
    return {name: x[0] for name, x in metrics.items()}


def mean_over_seeds(values: list[dict[str, float]]) -> dict[str, float]:
    """Returns the mean of each metric that all seeds have."""
    names = [name for name in values[0] if all(name in x for x in values)]
    return {name: float(np.mean([x[name] for x in values])) for name in names}


def half_interval(values: Sequence[float] | np.ndarray, confidence: float = 0.95) -> float:
    """Returns half of Student's confidence interval of the mean of two or more values."""
    from scipy.special import stdtrit

    spread = np.std(values, ddof=1, dtype=np.float64) / math.sqrt(len(values))
    return float(spread * stdtrit(len(values) - 1, (1 + confidence) / 2))


def mean_name(name: str) -> str:
    """`episode_return` is logged as `mean_episode_return`; rates keep their name."""
    return f"mean_{name}" if name.startswith("episode_") else name
