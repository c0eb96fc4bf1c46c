"""Means and spreads of what was measured, under the names by which they are logged."""

import math
from collections.abc import Sequence

import numpy as np

from mava.types import Metrics


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
