"""What every wrapper forwards, and what environments share."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mava.types import FIRST, MarlEnv, Observation, TimeStep, array_spec


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


def check_known(name: str, value: str, known: Iterable[str]) -> None:
    """Raises ValueError if the value is none of the known ones."""
    if value not in known:
        raise ValueError(f"{name}={value} must be one of {', '.join(known)}.")


def view_spec(env: Any, view_shape: tuple[int, ...]) -> Observation:
    """Returns the observation spec of views (N, *view_shape) without a global state; of `env` are
    read the number of agents and the actions, one discrete or continuous for each.
    """
    return Observation(
        agents_view=array_spec((env.num_agents, *view_shape), jnp.float32),
        action_mask=array_spec((env.num_agents, *env.action_spec), bool),
        agent_mask=array_spec((env.num_agents,), bool),
        step_count=array_spec((), jnp.int32),
    )


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


def agents_in_turn(num_agents: int) -> jax.Array:
    """Returns for each agent all of them, (N, N): itself, the next, ..., the one before."""
    agent_ids = jnp.arange(num_agents)
    return (agent_ids[:, None] + agent_ids) % num_agents


def view_sizes(env: Any) -> tuple[int, ...]:
    """Returns how many features of each agent's view, (N,), are not padding at the end of it.

    An environment whose agents differ says so in `view_sizes`; wrappers only add features.
    """
    inner = _first_with(env, "view_sizes")
    num_agents, *axes = env.observation_spec.agents_view.shape
    num_features = math.prod(axes)
    if inner is None:
        return (num_features,) * num_agents
    padded = inner.observation_spec.agents_view.shape[-1]
    return tuple(num_features - (padded - size) for size in inner.view_sizes)


def action_sizes(env: Any) -> tuple[int, ...]:
    """Returns how many of the discrete actions each agent has, (N,): those that it never has come
    last. An environment whose agents differ says so in `action_sizes`.
    """
    inner = _first_with(env, "action_sizes")
    sizes = None if inner is None else inner.action_sizes
    return sizes or (env.action_spec.num_actions,) * env.num_agents


def teams(env: Any) -> dict[str, tuple[int, ...]]:
    """Returns the agents of each team by its name. An environment with several says so in `teams`;
    in others all are one: {"all": (0, ..., N - 1)}.
    """
    inner = _first_with(env, "teams")
    return {"all": tuple(range(env.num_agents))} if inner is None else inner.teams


def _first_with(env: Any, name: str) -> Any:
    """Returns the outermost of an environment and its wrappers with that attribute, or None."""
    while not hasattr(env, name) and hasattr(env, "env"):
        env = env.env
    return env if hasattr(env, name) else None


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
