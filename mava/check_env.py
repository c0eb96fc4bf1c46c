"""Says in plain words what an environment does that breaks the contract `mava.types.MarlEnv`.

    python -m mava.check_env my_module:MyEnv

It builds `my_module.MyEnv()`, plays random steps and prints what it found.
"""

import importlib
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mava.config import UserError, run_command
from mava.networks.distributions import Categorical, MultiCategorical
from mava.types import (
    FIRST,
    LAST,
    MID,
    ActionSpec,
    Continuous,
    Discrete,
    MarlEnv,
    Observation,
    TimeStep,
)
from mava.wrappers.vector import strongly_typed

NUM_STEPS = 200
NUM_EPISODES = 3


def mask_size(spec: ActionSpec) -> int:
    """Returns the length of an agent's action mask."""
    if isinstance(spec, Continuous):
        return spec.num_dims
    return spec.num_actions if isinstance(spec, Discrete) else sum(spec.num_actions)


def random_action(spec: ActionSpec, mask: jax.Array, key: jax.Array) -> jax.Array:
    """Returns legal actions drawn evenly, for masks (..., N, A)."""
    if isinstance(spec, Continuous):
        return jax.random.uniform(key, mask.shape, minval=-1.0) * mask
    logits = jnp.zeros(mask.shape)
    if isinstance(spec, Discrete):
        return Categorical.masked(logits, mask).sample(key)
    return MultiCategorical.masked(logits, mask, spec.num_actions).sample(key)


def find_problems(env: MarlEnv) -> list[str]:
    """Returns a sentence for everything that breaks the contract; none if all is well."""
    problems = _problems_of_attributes(env)
    return problems or _problems_of_shapes(env) or _problems_of_episodes(env)


def _problems_of_attributes(env: Any) -> list[str]:
    problems = []
    for name in ("num_agents", "time_limit"):
        value = getattr(env, name, None)
        if not isinstance(value, int) or value < 1:
            problems.append(f"{name} is {value!r} and must be a positive int.")
    for name, kind in (("action_spec", ActionSpec), ("observation_spec", Observation)):
        try:
            value = getattr(env, name, None)
        except Exception as error:
            problems.append(f"{name} fails: {_first_line(error)}")
            continue
        if not isinstance(value, kind):
            expected = str(kind).replace("mava.types.", "").removeprefix("<class '").rstrip("'>")
            problems.append(f"{name} is {value!r} and must be {expected}.")
    return problems


def _problems_of_shapes(env: MarlEnv) -> list[str]:
    """Traces a reset and a step; runs nothing."""
    try:
        state, first = jax.eval_shape(env.reset, jax.random.key(0))
    except Exception as error:
        return [f"reset(key) fails: {_first_line(error)}"]
    mask = getattr(getattr(first, "observation", None), "action_mask", None)
    if not isinstance(first, TimeStep) or mask is None:
        return ["reset(key) must return (state, TimeStep) with an Observation."]
    problems = _problems_of_extras(first.extras)
    if problems:
        return problems
    expected = (env.num_agents, mask_size(env.action_spec))
    if mask.shape != expected:
        return [f"action_mask is {mask.shape} after a reset and must be {expected}."]
    try:
        action = jax.eval_shape(
            lambda mask, key: random_action(env.action_spec, mask, key), mask, jax.random.key(0)
        )
        next_state, later = jax.eval_shape(env.step, state, action)
    except Exception as error:
        return [f"step(state, action) fails: {_first_line(error)}"]
    if not isinstance(later, TimeStep):
        return ["step(state, action) must return (state, TimeStep)."]
    for name, timestep in (("reset", first), ("step", later)):
        for field in ("reward", "discount"):
            value = getattr(timestep, field)
            if value is None or value.shape != (env.num_agents,) or value.dtype != jnp.float32:
                problems.append(
                    f"{field} after {name} is {_type(value)} and must have one float32 per agent, "
                    f"{(env.num_agents,)}."
                )
        if timestep.step_type.shape != () or timestep.step_type.dtype != jnp.int8:
            problems.append(f"step_type after {name} is {_type(timestep.step_type)}, not () int8.")
        problems += _misfits(
            timestep.observation, env.observation_spec, f"after {name}", "the spec"
        )
    problems += _misfits(later.extras, first.extras, "in extras of step", "reset")
    problems += _misfits(next_state, state, "in the state after step", "reset")
    return problems


def _problems_of_extras(extras: dict[str, Any]) -> list[str]:
    won = extras.get("won_episode")
    problems = []
    if won is not None and (won.shape != () or won.dtype != bool):
        problems.append(f'extras["won_episode"] is {_type(won)} and must be () bool.')
    for name, value in extras.get("env_metrics", {}).items():
        if value.shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
            problems.append(f'extras["env_metrics"]["{name}"] is {_type(value)}, not a () float.')
    return problems


def _play(env: MarlEnv, key: jax.Array) -> tuple[TimeStep, TimeStep]:
    """Returns the first timestep and those of NUM_STEPS random steps."""

    def step(carry: tuple[Any, jax.Array], key: jax.Array) -> tuple[Any, TimeStep]:
        state, mask = carry
        state, timestep = env.step(state, random_action(env.action_spec, mask, key))
        return (strongly_typed(state), timestep.observation.action_mask), timestep

    reset_key, steps_key = jax.random.split(key)
    state, first = env.reset(reset_key)
    carry = (strongly_typed(jax.tree.map(jnp.asarray, state)), first.observation.action_mask)
    return first, jax.lax.scan(step, carry, jax.random.split(steps_key, NUM_STEPS))[1]


def _problems_of_episodes(env: MarlEnv) -> list[str]:
    """Plays random steps, twice from one key, with a fresh trace each time."""
    keys = jax.random.split(jax.random.key(0), NUM_EPISODES)
    first, steps = jax.device_get(jax.jit(jax.vmap(lambda key: _play(env, key)))(keys))
    again = jax.device_get(jax.jit(jax.vmap(lambda key: _play(env, key)))(keys))
    problems = []
    same = jax.tree.map(lambda x, y: np.array_equal(x, y, equal_nan=True), (first, steps), again)
    if not all(jax.tree.leaves(same)):
        problems.append("Equal keys give different episodes: draw from the key alone.")
    for episode in range(NUM_EPISODES):
        pick = lambda tree, episode=episode: jax.tree.map(lambda x: x[episode], tree)  # noqa: E731
        problems += _problems_of_episode(env, pick(first), pick(steps))
    return list(dict.fromkeys(problems))


def _problems_of_episode(env: MarlEnv, first: TimeStep, steps: TimeStep) -> list[str]:
    is_last = steps.step_type == LAST
    length = int(np.argmax(is_last)) + 1 if is_last.any() else NUM_STEPS
    steps = jax.tree.map(lambda x: x[:length], steps)
    count = steps.observation.step_count
    problems = []
    if first.step_type != FIRST or (steps.step_type[:-1] != MID).any():
        problems.append(
            "step_type must be FIRST after a reset, MID on the way and LAST at the end."
        )
    if first.observation.step_count != 0 or (count != np.arange(1, length + 1)).any():
        problems.append("step_count must be 0 after a reset and grow by 1 with every step.")
    if length > env.time_limit or (count[-1] >= env.time_limit and not is_last[length - 1]):
        problems.append(f"An episode goes on after time_limit = {env.time_limit} steps: no LAST.")
    if not ((steps.discount == 0) | (steps.discount == 1)).all():
        problems.append("discount must be 0 (ended) or 1 (goes on, or only cut by the time limit).")
    ended = np.all(steps.discount == 0, axis=-1) & (steps.step_type != LAST)
    if ended.any():
        problems.append(
            f"At step {int(np.argmax(ended)) + 1} every agent's discount is 0 and step_type is not "
            "LAST: a terminal step must be LAST."
        )
    masks = np.concatenate([first.observation.action_mask[None], steps.observation.action_mask])
    if not isinstance(env.action_spec, Continuous):
        sizes = env.action_spec.num_actions
        ends = np.cumsum(sizes if isinstance(sizes, tuple) else (sizes,))[:-1]
        for part in np.split(masks[:-1], ends, axis=-1):
            stuck = np.argwhere(~part.any(axis=-1))
            if len(stuck):
                step, agent = stuck[0]
                problems.append(f"At step {step} agent {agent} has no legal action.")
    for name, values in (("reward", steps.reward), ("observation", steps.observation)):
        floats = [x for x in jax.tree.leaves(values) if np.issubdtype(x.dtype, np.floating)]
        if not all(np.isfinite(x).all() for x in floats):
            problems.append(f"A NaN or an infinity in the {name}.")
    return problems


def _misfits(tree: Any, expected: Any, where: str, as_in: str) -> list[str]:
    """Returns a sentence for each leaf of another shape or dtype."""
    structures: list[Any] = [jax.tree.structure(x) for x in (tree, expected)]
    if structures[0] != structures[1]:
        return [f"Not the same fields {where} as in {as_in}."]
    problems = []
    paths = jax.tree_util.tree_leaves_with_path(tree)
    for (path, leaf), other in zip(paths, jax.tree.leaves(expected), strict=True):
        if leaf.shape != other.shape or leaf.dtype != other.dtype:
            name = jax.tree_util.keystr(path).lstrip(".") or "It"
            problems.append(f"{name} {where} is {_type(leaf)}, but {_type(other)} in {as_in}.")
    return problems


def _type(array: Any) -> str:
    return f"{array.shape} {array.dtype}"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


USAGE = """Checks an environment against the contract.

  python -m mava.check_env my_module:MyEnv     # or a function that returns one"""


def main(arguments: list[str]) -> None:
    """The command line."""
    if len(arguments) != 1 or ":" not in arguments[0]:
        raise UserError(USAGE)
    module_name, _, name = arguments[0].partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        env = getattr(importlib.import_module(module_name), name)()
    except Exception as error:
        raise UserError(f"{arguments[0]} can't be made: {_first_line(error)}") from error
    problems = find_problems(env)
    if problems:
        raise UserError("\n".join(f"- {problem}" for problem in problems))
    print(
        f"{name} keeps the contract: {env.num_agents} agents, {env.action_spec}, views "
        f"{env.observation_spec.agents_view.shape}; {NUM_EPISODES} episodes of random actions."
    )


if __name__ == "__main__":
    run_command(main)
