"""Return and length of the running episode."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.struct import PyTreeNode

from mava.types import TimeStep
from mava.wrappers.base import Wrapper


class EpisodeState(PyTreeNode, kw_only=True):
    env_state: Any
    episode_return: jax.Array  # ()
    episode_length: jax.Array  # (), int32


class EpisodeMetrics(Wrapper):
    """Adds `episode_return` and `episode_length` so far to the extras; at LAST they are final.

    The return is the mean over agents of each agent's summed, undiscounted reward. Where all
    agents get the team's reward that is the team's return.
    """

    def reset(self, key: jax.Array) -> tuple[EpisodeState, TimeStep]:
        env_state, timestep = self.env.reset(key)
        return self._add(env_state, jnp.float32(0.0), jnp.int32(0), timestep)

    def step(self, state: EpisodeState, action: jax.Array) -> tuple[EpisodeState, TimeStep]:
        env_state, timestep = self.env.step(state.env_state, action)
        episode_return = state.episode_return + jnp.mean(timestep.reward)
        return self._add(env_state, episode_return, state.episode_length + 1, timestep)

    @property
    def draw(self) -> Callable[[Sequence[Any]], Iterator[np.ndarray]]:
        draw = super().draw
        return lambda states: draw([state.env_state for state in states])

    def _add(
        self, env_state: Any, episode_return: jax.Array, length: jax.Array, timestep: TimeStep
    ) -> tuple[EpisodeState, TimeStep]:
        state = EpisodeState(
            env_state=env_state, episode_return=episode_return, episode_length=length
        )
        extras = {
            **timestep.extras,
            "episode_return": episode_return,
            "episode_length": length,
        }
        return state, timestep.replace(extras=extras)
