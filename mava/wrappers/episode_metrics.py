"""Return and length of the running episode."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.struct import PyTreeNode

from mava.types import MarlEnv, TimeStep
from mava.wrappers.base import Wrapper, teams


class EpisodeState(PyTreeNode, kw_only=True):
    env_state: Any
    episode_return: jax.Array  # ()
    team_returns: dict[str, jax.Array]  # (), by the team's name; empty if there is one team
    episode_length: jax.Array  # (), int32


class EpisodeMetrics(Wrapper):
    """Adds `episode_return` and `episode_length` so far to the extras; at LAST they are final.

    The return is the mean over agents of each agent's summed, undiscounted reward. Where all
    agents get the team's reward that is the team's return. With several teams
    `episode_return/<team>` is the mean over each one's agents.
    """

    def __init__(self, env: MarlEnv, groups: Mapping[str, Sequence[int]] | None = None) -> None:
        """Args:
        env: the environment.
        groups: of agents, in place of the environment's teams.
        """
        super().__init__(env)
        self.teams = teams(env) if groups is None else dict(groups)

    def reset(self, key: jax.Array) -> tuple[EpisodeState, TimeStep]:
        env_state, timestep = self.env.reset(key)
        names = self.teams if len(self.teams) > 1 else ()
        state = EpisodeState(
            env_state=env_state,
            episode_return=jnp.float32(0.0),
            team_returns={name: jnp.float32(0.0) for name in names},
            episode_length=jnp.int32(0),
        )
        return state, self._add(state, timestep)

    def step(self, state: EpisodeState, action: jax.Array) -> tuple[EpisodeState, TimeStep]:
        env_state, timestep = self.env.step(state.env_state, action)
        team_returns = {
            name: before + jnp.mean(timestep.reward[jnp.array(self.teams[name])])
            for name, before in state.team_returns.items()
        }
        state = EpisodeState(
            env_state=env_state,
            episode_return=state.episode_return + jnp.mean(timestep.reward),
            team_returns=team_returns,
            episode_length=state.episode_length + 1,
        )
        return state, self._add(state, timestep)

    @property
    def draw(self) -> Callable[[Sequence[Any]], Iterator[np.ndarray]]:
        draw = super().draw
        return lambda states: draw([state.env_state for state in states])

    def _add(self, state: EpisodeState, timestep: TimeStep) -> TimeStep:
        extras = {
            **timestep.extras,
            "episode_return": state.episode_return,
            **{f"episode_return/{name}": x for name, x in state.team_returns.items()},
            "episode_length": state.episode_length,
        }
        return timestep.replace(extras=extras)
