"""What every wrapper forwards, and what environments share."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mava.types import FIRST, MarlEnv, Observation, TimeStep


def check_counts(**counts: object) -> None:
    """Raises ValueError if one is no number of things."""
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"{name}={count} must be an integer of at least 1.")


def check_fractions(**fractions: object) -> None:
    """Raises ValueError if one is no number between 0 and 1."""
    for name, value in fractions.items():
        if not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ValueError(f"{name}={value} must be between 0 and 1.")


def check_switches(**switches: object) -> None:
    """Raises ValueError if one is neither true nor false."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value} must be true or false.")


def check_time_limit(time_limit: object) -> None:
    """Raises ValueError if that is no number of steps."""
    check_counts(time_limit=time_limit)


def first_timestep(observation: Observation, extras: dict[str, Any]) -> TimeStep:
    """Returns the timestep of a reset."""
    num_agents = observation.agent_mask.shape[0]
    return TimeStep(
        step_type=jnp.int8(FIRST),
        reward=jnp.zeros(num_agents),
        discount=jnp.ones(num_agents),
        observation=observation,
        extras=extras,
    )


class Wrapper:
    """Forwards everything to the wrapped environment; subclasses change what they name."""

    def __init__(self, env: MarlEnv) -> None:
        self.env = env
        self.num_agents = env.num_agents
        self.action_spec = env.action_spec
        self.time_limit = env.time_limit

    @property
    def observation_spec(self) -> Observation:
        return self.env.observation_spec

    def reset(self, key: jax.Array) -> tuple[Any, TimeStep]:
        return self.env.reset(key)

    def step(self, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        return self.env.step(state, action)

    @property
    def draw(self) -> Callable[[Sequence[Any]], Iterator[np.ndarray]]:
        """Draws states of this wrapper; it is there only if the wrapped environment has it."""
        env: Any = self.env
        return env.draw
