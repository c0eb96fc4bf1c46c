"""Many copies of an environment, each reset as soon as its episode is over."""

from typing import Any, TypeVar

import jax

from mava.ops.map_where import map_where
from mava.types import MarlEnv, Observation, TimeStep
from mava.wrappers.base import teams

Tree = TypeVar("Tree")

# Copies reset at a time. Episodes mostly end one by one; a chunk costs what all its rows cost.
RESET_CHUNK_SIZE = 4


def strongly_typed(tree: Tree) -> Tree:
    """Returns the same arrays without weak types: a reset makes constants that are weakly typed, a
    step does not, and what is carried through a loop has one type.
    """
    return jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), tree)


class VectorEnv:
    """E copies of an environment under one `reset` and `step`; every array gets a leading axis E.

    A copy whose episode is over starts the next one inside `step`: the reward, discount, step type
    and extras are those of the step taken, the state and the observation those of the new episode.
    `extras["next_observation"]` is the step's true successor, for finished copies too.
    """

    num_streams = 1  # of these, side by side on all devices and replicas; the experiment says

    def __init__(self, env: MarlEnv, num_envs: int) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs={num_envs} must be at least 1.")
        self.env = env
        self.num_envs = num_envs
        self.num_agents = env.num_agents
        self.action_spec = env.action_spec
        self.time_limit = env.time_limit
        self.teams = teams(env)

    @property
    def num_actions(self) -> Any:
        """A of discrete actions. Copies of older system files, kept in runs, read it."""
        return self.action_spec.num_actions  # type: ignore[union-attr]

    @property
    def observation_spec(self) -> Observation:
        """Of one copy: without the axis E."""
        return self.env.observation_spec

    def reset(self, key: jax.Array) -> tuple[Any, TimeStep]:
        """Returns the states and first timesteps of E new episodes."""
        state, timestep = jax.vmap(self.env.reset)(jax.random.split(key, self.num_envs))
        return strongly_typed((state, self._with_successor(timestep)))

    def step(self, state: Any, action: jax.Array, key: jax.Array) -> tuple[Any, TimeStep]:
        """Steps all copies and resets the finished ones.

        Args:
            state: of the E copies.
            action: (E, N, ...), as `action_spec` says.
            key: each finished copy's new episode gets one of the E keys split from it.
        """
        state, timestep = jax.vmap(self.env.step)(state, action)

        def reset_rows(keys: jax.Array) -> tuple[Any, Observation]:
            new_state, first = jax.vmap(self.env.reset)(keys)
            return new_state, first.observation

        keys = jax.random.split(key, self.num_envs)
        state, observation = map_where(
            reset_rows, timestep.last(), keys, (state, timestep.observation), RESET_CHUNK_SIZE
        )
        return state, self._with_successor(timestep).replace(observation=observation)

    @staticmethod
    def _with_successor(timestep: TimeStep) -> TimeStep:
        return timestep.replace(
            extras={**timestep.extras, "next_observation": timestep.observation}
        )
