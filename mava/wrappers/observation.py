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


class GlobalState(_ObservationWrapper):
    """Gives an environment without a global state one: all agents' views, one after the other."""

    @property
    def observation_spec(self) -> Observation:
        spec = self.env.observation_spec
        return spec.replace(global_state=array_spec((spec.agents_view.size,), jnp.float32))

    def _add(self, timestep: TimeStep) -> TimeStep:
        observation = timestep.observation
        global_state = observation.agents_view.reshape(-1)
        return timestep.replace(observation=observation.replace(global_state=global_state))


class AgentIds(_ObservationWrapper):
    """Appends a one-hot agent id to every agent's view, so that shared parameters can tell the
    agents apart: (N, O) becomes (N, O + N), the id last.
    """

    @property
    def observation_spec(self) -> Observation:
        spec = self.env.observation_spec
        num_agents, num_features = spec.agents_view.shape
        return spec.replace(
            agents_view=array_spec((num_agents, num_features + num_agents), jnp.float32)
        )

    def _add(self, timestep: TimeStep) -> TimeStep:
        observation = timestep.observation
        view = observation.agents_view
        view = jnp.concatenate([view, jnp.eye(self.num_agents, dtype=view.dtype)], axis=-1)
        return timestep.replace(observation=observation.replace(agents_view=view))
