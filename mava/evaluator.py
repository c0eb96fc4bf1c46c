"""Complete episodes of a policy, exactly as many as asked.

Episodes are numbered before they are played. Of C copies of the environment in all, copy i plays
episodes i, i + C, i + 2C, ...: short episodes are not favoured, as they would be by taking the
first ones to finish. An episode draws from a key that depends on its number alone, so the result
does not depend on the number of devices.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.struct import PyTreeNode

from mava.ops.map_where import map_where
from mava.types import MarlEnv, Observation, System, TimeStep
from mava.utils.parallel import episode_values
from mava.wrappers.vector import RESET_CHUNK_SIZE, strongly_typed


class Evaluation(NamedTuple):
    """The fixed parts that every function below works with."""

    env: MarlEnv  # one environment, with EpisodeMetrics
    system: System
    copies_per_device: int  # c
    num_copies: int  # C, on all devices
    num_rounds: int  # episodes a copy plays at most
    greedy: bool  # passed to `system.act`


class Copies(PyTreeNode, kw_only=True):
    """The c copies of one device."""

    episode: jax.Array  # (c,), int32: number of the episode that is played
    step: jax.Array  # (c,), int32: steps taken in it
    env_state: Any  # (c, ...)
    observation: Observation  # (c, ...)
    memory: Any  # (c, ...)
    results: dict[str, jax.Array]  # (c, episodes of a copy): filled as episodes finish


def make_evaluate(
    env: MarlEnv,
    system: System,
    copies_per_device: int,
    num_devices: int,
    max_episodes: int,
    greedy: bool,
) -> Callable[[Any, jax.Array, jax.Array, jax.Array], dict[str, jax.Array]]:
    """Returns evaluate(act_params, key, num_episodes, device), to be mapped over devices.

    Its result holds, per quantity, the episodes of the device's copies (c, ceil(max_episodes / C));
    `in_order` puts those of all devices into the order of their numbers. `num_episodes` is an
    int32 scalar of at most `max_episodes`, `device` the index of the device.
    """
    num_copies = copies_per_device * num_devices
    evaluation = Evaluation(
        env=env,
        system=system,
        copies_per_device=copies_per_device,
        num_copies=num_copies,
        num_rounds=-(-max_episodes // num_copies),
        greedy=greedy,
    )
    return partial(evaluate, evaluation)


def evaluate(
    evaluation: Evaluation,
    act_params: Any,
    key: jax.Array,
    num_episodes: jax.Array,
    device: jax.Array,
) -> dict[str, jax.Array]:
    """Plays the episodes of one device; see `make_evaluate`."""
    num_copies = evaluation.copies_per_device
    episode = device * num_copies + jnp.arange(num_copies, dtype=jnp.int32)
    state, timestep = jax.vmap(partial(start, evaluation, key))(episode)
    copies = Copies(
        episode=episode,
        step=jnp.zeros_like(episode),
        env_state=strongly_typed(state),
        observation=strongly_typed(timestep.observation),
        memory=evaluation.system.init_memory(num_copies),
        results={
            name: jnp.zeros((num_copies, evaluation.num_rounds))
            for name in episode_values(timestep.extras)
        },
    )
    return jax.lax.while_loop(
        lambda copies: jnp.any(copies.episode < num_episodes),
        partial(step, evaluation, act_params, key, num_episodes),
        copies,
    ).results


def episode_keys(key: jax.Array, episode: jax.Array) -> jax.Array:
    """Returns the keys (2,) of an episode: for its reset and for its actions."""
    return jax.random.split(jax.random.fold_in(key, episode))


def start(evaluation: Evaluation, key: jax.Array, episode: jax.Array) -> tuple[Any, TimeStep]:
    """Returns the state and first timestep of the episode of this number."""
    return evaluation.env.reset(episode_keys(key, episode)[0])


def act(
    evaluation: Evaluation,
    act_params: Any,
    key: jax.Array,
    episode: jax.Array,
    t: jax.Array,
    observation: Observation,
    memory: Any,
) -> tuple[jax.Array, Any]:
    """Returns one copy's action (N,), drawn from a key of its own, and the memory after it."""
    key = jax.random.fold_in(episode_keys(key, episode)[1], t)
    observation, memory = jax.tree.map(lambda x: x[None], (observation, memory))
    result = evaluation.system.act(act_params, observation, memory, key, evaluation.greedy)
    return jax.tree.map(lambda x: x[0], result)


def step(
    evaluation: Evaluation,
    act_params: Any,
    key: jax.Array,
    num_episodes: jax.Array,
    copies: Copies,
) -> Copies:
    """Steps every copy; notes the results of finished episodes and starts the copies' next ones."""
    action, memory = jax.vmap(partial(act, evaluation, act_params, key))(
        copies.episode, copies.step, copies.observation, copies.memory
    )
    env_state, timestep = jax.vmap(evaluation.env.step)(copies.env_state, action)

    finished = timestep.last() & (copies.episode < num_episodes)
    row = jnp.arange(evaluation.copies_per_device)
    # Of a copy that goes on, past the end: written nowhere.
    column = jnp.where(finished, copies.episode // evaluation.num_copies, evaluation.num_rounds)
    results = {
        name: copies.results[name].at[row, column].set(value, mode="drop")
        for name, value in episode_values(timestep.extras).items()
    }

    def restart(episodes: jax.Array) -> tuple[Any, Observation]:
        state, first = jax.vmap(partial(start, evaluation, key))(episodes)
        return state, first.observation

    episode = jnp.where(finished, copies.episode + evaluation.num_copies, copies.episode)
    env_state, observation = map_where(
        restart,
        finished & (episode < num_episodes),
        episode,
        (env_state, timestep.observation),
        RESET_CHUNK_SIZE,
    )
    no_memory = evaluation.system.init_memory(evaluation.copies_per_device)
    memory = jax.tree.map(
        lambda old, new: jnp.where(finished.reshape(-1, *(1,) * (old.ndim - 1)), new, old),
        memory,
        no_memory,
    )
    return Copies(
        episode=episode,
        step=jnp.where(finished, 0, copies.step + 1),
        env_state=env_state,
        observation=observation,
        memory=memory,
        results=results,
    )


def in_order(results: dict[str, jax.Array], num_episodes: int) -> dict[str, np.ndarray]:
    """Returns the values (num_episodes,), by episode number, of results (D, c, rounds)."""
    by_round = {name: np.moveaxis(np.asarray(x), -1, 0) for name, x in results.items()}
    return {name: x.reshape(-1)[:num_episodes] for name, x in by_round.items()}
