"""Whom the critic of a trained ff_maac looks at in Rover-Tower.

    python benchmarks/attention.py <run folder>

Plays episodes with the policies of the run's newest checkpoint and prints, for each head, how much
of a rover's attention goes to the tower that guides it and of a tower's to the rover that it
guides, against an equal share of all others. Pairs are drawn anew in each episode.
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from mava import experiment
from mava.checkpoints import read_checkpoint
from mava.snapshot import fill
from mava.stored_run import load_run
from mava.utils.parallel import AXES
from mava.wrappers.vector import VectorEnv

EPISODES = 512


def attention_of(folder: Path) -> tuple[jax.Array, jax.Array]:
    """Returns the weights (N, N, H, B) of a run's critic and each rover's tower (P, B)."""
    module, config = load_run(folder, [])
    env = experiment.make_vector_env(config)
    system = experiment.make_system(module, env, config, config.system)
    state = jax.jit(system.init)(jax.random.key(0))
    stored = read_checkpoint(folder, "last", with_buffer=False)
    state = fill(stored.arrays, {"learner_state": state})["learner_state"]
    algo = system.update.args[0]  # type: ignore[attr-defined]

    @jax.jit
    def play(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        many = VectorEnv(env.env, EPISODES)
        env_state, timestep = many.reset(key)

        def step(carry: Any, key: jax.Array) -> Any:
            env_state, observation = carry
            act_key, env_key = jax.random.split(key)
            action, _ = system.act(system.act_params(state), observation, (), act_key, False)
            taken = (observation.agents_view, action, tower_of(env_state))
            env_state, timestep = many.step(env_state, action, env_key)
            return (env_state, timestep.observation), taken

        keys = jax.random.split(key, env.time_limit)
        _, steps = jax.lax.scan(step, (env_state, timestep.observation), keys)
        views, actions, towers = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), steps)
        return on_one_device(look)(views, actions), towers.T

    def look(views: jax.Array, actions: jax.Array) -> jax.Array:
        views = module.normalise(views, module.statistics(views, env.num_agents))
        actions = module.one_hot(algo, actions)
        _, attention = algo.critic.apply(state.params.online.critic, views, actions)
        return jnp.exp(attention.log_weights)

    return play(jax.random.key(0))


def on_one_device(function: Any) -> Any:
    """Gives a function the axes of devices and replicas, both of size 1."""
    for axis in AXES:
        function = jax.vmap(function, None, None, axis_name=axis, axis_size=1)
    return function


def tower_of(state: Any) -> jax.Array:
    """Returns each rover's tower, from the state within those of the wrappers."""
    while not hasattr(state, "tower_of"):
        state = state.env_state
    return state.tower_of


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the folder of a run of ff_maac on rover_tower")
    weights, towers = attention_of(parser.parse_args().run)
    num_pairs, num_agents = towers.shape[0], weights.shape[0]
    own = jax.nn.one_hot(towers, num_pairs, axis=1)[:, :, None]  # (P, P, 1, B): rover, tower
    of_rovers = jnp.sum(weights[:num_pairs, num_pairs:] * own, axis=(0, 1)).mean(-1) / num_pairs
    own = own.swapaxes(0, 1)
    of_towers = jnp.sum(weights[num_pairs:, :num_pairs] * own, axis=(0, 1)).mean(-1) / num_pairs
    table = Table("attention", *[f"head {head}" for head in range(len(of_rovers))], "equal share")
    for name, values in (("rover to its tower", of_rovers), ("tower to its rover", of_towers)):
        table.add_row(name, *[f"{x:.3f}" for x in values], f"{1 / (num_agents - 1):.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
