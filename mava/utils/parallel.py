"""What crosses devices and replicas: averages of what is learnt, and the metrics of an update."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from mava.types import EpisodeStats, Metrics

AXES = ("device", "replica")

Tree = TypeVar("Tree")


def _as_one_vector(collective: Callable[[jax.Array, tuple[str, str]], Any], tree: Tree) -> Tree:
    """Applies a collective to all leaves at once: on two CPU devices a rendezvous for each of 12
    leaves took 0.6 ms, one for all of them 0.09 ms.
    """
    vector, unravel = ravel_pytree(tree)
    return unravel(collective(vector, AXES))


def pmean(tree: Tree) -> Tree:
    """Returns the mean of every float leaf over all devices and replicas."""
    return _as_one_vector(jax.lax.pmean, tree)


def pmax(x: jax.Array) -> jax.Array:
    """Returns the largest of each entry over all devices and replicas."""
    return jax.lax.pmax(x, AXES)


def everywhere(flag: jax.Array) -> jax.Array:
    """Returns whether a bool () is set on every device and replica: a predicate for `cond`."""
    return jax.lax.pmin(flag.astype(jnp.int32), AXES) > 0


def episode_stats(value: jax.Array, finished: jax.Array) -> EpisodeStats:
    """Returns the statistics of `value` (any shape) where `finished` (bool, same shape) is set."""
    return EpisodeStats(
        count=jnp.sum(finished, dtype=jnp.float32),
        sum=jnp.sum(value, where=finished),
        sum_squares=jnp.sum(value**2, where=finished),
        min=jnp.min(value, where=finished, initial=jnp.inf),
        max=jnp.max(value, where=finished, initial=-jnp.inf),
    )


def episode_values(extras: dict[str, Any]) -> dict[str, jax.Array]:
    """Returns the quantities of `extras` that describe an episode once it is over, as floats."""
    values = {
        **{name: x for name, x in extras.items() if name.startswith("episode_return")},
        "episode_length": extras["episode_length"].astype(jnp.float32),
        **extras.get("env_metrics", {}),
    }
    if "won_episode" in extras:
        values["win_rate"] = 100.0 * extras["won_episode"].astype(jnp.float32)
    return values


def reduce_metrics(
    extras: dict[str, Any], last: jax.Array, learn: dict[str, tuple[jax.Array, jax.Array]]
) -> Metrics:
    """Returns the Metrics of a rollout and the learning after it, over all devices and replicas.

    Args:
        extras: of the rollout's timesteps, leading axes (T, E).
        last: (T, E), bool: true where an episode finished.
        learn: name -> (sum, count) of this device and replica.
    """
    local = {name: episode_stats(value, last) for name, value in episode_values(extras).items()}
    sums, learn = _as_one_vector(
        jax.lax.psum,
        ({name: (s.count, s.sum, s.sum_squares) for name, s in local.items()}, learn),
    )
    extremes = _as_one_vector(jax.lax.pmax, {name: (s.max, -s.min) for name, s in local.items()})
    episodes = {
        name: EpisodeStats(
            count=sums[name][0],
            sum=sums[name][1],
            sum_squares=sums[name][2],
            min=-extremes[name][1],
            max=extremes[name][0],
        )
        for name in local
    }
    return Metrics(episodes=episodes, learn=learn)


def merge_metrics(first: Metrics, second: Metrics) -> Metrics:
    """Returns the Metrics of two stretches of training taken together."""
    episodes = {
        name: EpisodeStats(
            count=a.count + b.count,
            sum=a.sum + b.sum,
            sum_squares=a.sum_squares + b.sum_squares,
            min=jnp.minimum(a.min, b.min),
            max=jnp.maximum(a.max, b.max),
        )
        for (name, a), b in zip(first.episodes.items(), second.episodes.values(), strict=True)
    }
    return Metrics(episodes=episodes, learn=jax.tree.map(jnp.add, first.learn, second.learn))
