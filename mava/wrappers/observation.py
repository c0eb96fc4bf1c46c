"""Wrappers that add to what the agents, or a centralised critic, see."""

from typing import Any

import jax
import jax.numpy as jnp

from mava.types import Observation, TimeStep, array_spec
from mava.wrappers.base import Wrapper


class _ObservationWrapper(Wrapper):
    """Shows every timestep through `_add`."""

    def reset(self, key: jax.Array) -> tuple[Any, TimeStep]:
        state, timestep = self.env.reset(key)
        return state, self._add(timestep)

    def step(self, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        state, timestep = self.env.step(state, action)
        return state, self._add(timestep)

    def _add(self, timestep: TimeStep) -> TimeStep:
        raise NotImplementedError


class FlatViews(_ObservationWrapper):
    """Makes vectors of grids: (N, rows, columns, O) becomes (N, rows * columns * O)."""

    @property
    def observation_spec(self) -> Observation:
        spec = self.env.observation_spec
        size = spec.agents_view.size // self.num_agents
        return spec.replace(agents_view=array_spec((self.num_agents, size), jnp.float32))

    def _add(self, timestep: TimeStep) -> TimeStep:
        observation = timestep.observation
        view = observation.agents_view.reshape(self.num_agents, -1)
        return timestep.replace(observation=observation.replace(agents_view=view))


class GlobalState(_ObservationWrapper):
    """Gives an environment without a global state one: all agents' features, one after the other,
    (N * O,); of grids those of each cell, (rows, columns, N * O).
    """

    @property
    def observation_spec(self) -> Observation:
        spec = self.env.observation_spec
        num_agents, *cells, num_features = spec.agents_view.shape
        shape = (*cells, num_agents * num_features)
        return spec.replace(global_state=array_spec(shape, jnp.float32))

    def _add(self, timestep: TimeStep) -> TimeStep:
        observation = timestep.observation
        features = jnp.moveaxis(observation.agents_view, 0, -2)  # (..., N, O)
        global_state = features.reshape(*features.shape[:-2], -1)
        return timestep.replace(observation=observation.replace(global_state=global_state))


def with_agent_ids(xp: Any, view: Any, num_cell_axes: int) -> Any:
    """Returns views (..., N, *cells, O) with one-hot agent ids after their features.

    Args:
        xp: numpy or jax.numpy, of which the views are.
        view: of all agents, perhaps with leading axes.
        num_cell_axes: of a grid 2, of a vector 0.
    """
    num_agents = view.shape[-2 - num_cell_axes]
    ids = xp.eye(num_agents, dtype=view.dtype).reshape(num_agents, *[1] * num_cell_axes, -1)
    ids = xp.broadcast_to(ids, (*view.shape[:-1], num_agents))
    return xp.concatenate([view, ids], axis=-1)


class AgentIds(_ObservationWrapper):
    """Appends a one-hot agent id to every agent's view, so that shared parameters can tell the
    agents apart: (N, O) becomes (N, O + N), the id last; in a grid every cell gets it.
    """

    @property
    def observation_spec(self) -> Observation:
        spec = self.env.observation_spec
        *axes, num_features = spec.agents_view.shape
        shape = (*axes, num_features + self.num_agents)
        return spec.replace(agents_view=array_spec(shape, jnp.float32))

    def _add(self, timestep: TimeStep) -> TimeStep:
        observation = timestep.observation
        view = observation.agents_view
        view = with_agent_ids(jnp, view, num_cell_axes=view.ndim - 2)
        return timestep.replace(observation=observation.replace(agents_view=view))
