"""Speed of an update of MAAC, in agents taught per second (APS), and how near it is to a bound.

    taskset -c 0 python benchmarks/maac.py --json out.json

An update is one batch drawn from the buffer and one step of critic, policies and targets: batch
1024, width 128, 4 heads. APS is agents * updates / second, by CPU and by wall time. One row each
for Rover-Tower with 4, 8 and 16 agents and Treasure Collection with 8, in the plain and in the
lagged form:
- fraction of bound: CPU seconds of the dense layers' bare matrix products, forward and for the
  gradients that are needed, of the same shapes, timed in the same process, over the update's;
- collection: a whole update's rollout and storing, system.rollout_length steps of all environments,
  against which stand system.num_gradient_steps updates of the networks.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hydra import compose, initialize_config_module
from rich.console import Console
from rich.table import Table

import mava
from mava import config as configuration
from mava import experiment
from mava.programs import cpu_compiler_options
from mava.wrappers.base import action_sizes

SECONDS = 1.5  # of a measurement
REPEATS = 5  # measurements; the fastest counts, others on the machine can only slow it down
TASKS = (
    ("rover_tower", "rover-tower-4a"),
    ("rover_tower", "rover-tower-8a"),
    ("rover_tower", "rover-tower-16a"),
    ("treasure_collection", "treasure-8a"),
)


def measure(run: Callable[[int], Any]) -> tuple[float, float]:
    """Returns wall and CPU seconds of a round; `run` does n of them and waits."""
    run(1)
    start = time.perf_counter()
    run(1)
    rounds = max(1, round(SECONDS / (time.perf_counter() - start)))
    results = []
    for _ in range(REPEATS):
        wall, cpu = time.perf_counter(), time.process_time()
        run(rounds)
        results.append((time.perf_counter() - wall, time.process_time() - cpu))
    wall, cpu = (min(times) for times in zip(*results, strict=True))
    return wall / rounds, cpu / rounds


def compile_loop(body: Callable[[Any], Any], carry: Any) -> tuple[Callable[[int], Any], float]:
    """Returns a runner of n rounds of `carry = body(carry)`, and the seconds it took to compile,
    with the options of a run.
    """

    def loop(n: jax.Array, carry: Any) -> Any:
        return jax.lax.fori_loop(0, n, lambda i, c: body(c), carry)

    options: Any = cpu_compiler_options(False) if jax.default_backend() == "cpu" else None
    start = time.perf_counter()
    program = jax.jit(loop).lower(np.int32(1), carry).compile(options)
    seconds = time.perf_counter() - start
    return lambda n: jax.block_until_ready(program(np.int32(n), carry)), seconds


def over_axes(function: Callable, *arguments: Any) -> Any:
    """Calls a part of a system inside of the axes that it averages over, one stream on each."""
    axes = (None,) * len(arguments)
    for name in ("replica", "device"):
        function = jax.vmap(function, axes, None, axis_name=name, axis_size=1)
    return function(*arguments)


def bare_seconds(algo: Any) -> float:
    """Returns the CPU seconds of all products of the dense layers in an update."""
    config, num_agents = algo.config, algo.env.num_agents
    num_features, num_actions = (
        algo.env.observation_spec.agents_view.shape[1],
        max(action_sizes(algo.env)),
    )
    size = algo.critic.hidden_dim
    inner = [(size, size)] * 5  # query, key, value, both halves of the first layer of a head
    critic = [(num_features, size), (num_features + num_actions, size), *inner, (size, num_actions)]
    sizes = (num_features, *algo.actor.layer_sizes, num_actions)
    actor = list(itertools.pairwise(sizes))
    products: Counter = Counter()
    products.update([("forward", *shape) for shape in 3 * critic + 2 * actor])
    products.update([("weights", *shape) for shape in critic + actor])
    products.update([("inputs", *shape) for shape in critic[2:] + actor[1:]])  # not of the views
    if (
        config.lagged_critic and config.num_chunks == 1
    ):  # what the state alone goes through is done once less
        products.subtract([("forward", num_features, size), *2 * [("forward", size, size)]])
    total = 0.0
    for (kind, inputs, outputs), count in products.items():
        total += count * product_seconds(kind, num_agents, inputs, outputs, config.batch_size)
    return total


@functools.cache
def product_seconds(kind: str, num_agents: int, inputs: int, outputs: int, batch: int) -> float:
    """Returns the CPU seconds of one product, of all agents."""
    key = jax.random.key(0)
    x = jax.random.normal(key, (num_agents, inputs, batch))
    y = jax.random.normal(key, (num_agents, outputs, batch))
    kernel = jax.random.normal(key, (num_agents, inputs, outputs))

    def body(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x, y, kernel = carry
        if kind == "forward":
            y = jnp.einsum("nfb,nfd->ndb", x, kernel)
            kernel = kernel.at[0, 0, 0].add(1e-9 * y[0, 0, 0])  # so that it isn't done just once
        elif kind == "inputs":
            x = jnp.einsum("ndb,nfd->nfb", y, kernel)
            kernel = kernel.at[0, 0, 0].add(1e-9 * x[0, 0, 0])
        else:
            kernel = jnp.einsum("nfb,ndb->nfd", x, y)
            x = x.at[0, 0, 0].add(1e-9 * kernel[0, 0, 0])
        return x, y, kernel

    return measure(compile_loop(body, (x, y, kernel))[0])[1]


def benchmark(module: Any, env_name: str, task: str, lagged: bool, overrides: list[str]) -> dict:
    """Returns one row of results."""
    options = [
        f"env={env_name}",
        f"env/scenario={task}",
        f"system.lagged_critic={lagged}",
        "arch.num_envs=12",
        "arch.num_devices=1",
        "system.buffer_size=20_000",  # more than it needs: a large one takes as long
        *overrides,
    ]
    with initialize_config_module("mava.configs", version_base=None):
        run = configuration.parse(compose("mava", options), Path(module.__file__))
    env, system, _ = experiment.build(module, run)
    algo = system.update.args[0]  # type: ignore[attr-defined]
    algo_of_one = algo._replace(config=dataclasses.replace(algo.config, num_gradient_steps=1))
    learner_state = jax.jit(system.init)(jax.random.key(0))
    actor_state = jax.jit(system.reset)(jax.random.key(1))

    def collect(carry: tuple) -> tuple:
        key, actor_state = carry
        key, rollout_key = jax.random.split(key)
        actor_state, trajectory = over_axes(
            functools.partial(module.rollout, algo),
            learner_state.params,
            actor_state,
            rollout_key,
        )
        replay = module.store(algo, actor_state.buffer, trajectory)
        return key, actor_state.replace(buffer=replay)

    collecting, _ = compile_loop(collect, (jax.random.key(2), actor_state))
    collect_wall, collect_cpu = measure(collecting)
    _, actor_state = collecting(-(-algo.config.batch_size // system.steps_per_update))

    def learn(carry: tuple) -> tuple:
        key, learner_state, replay = carry
        key, draw_key, learn_key = jax.random.split(key, 3)

        def step(state: Any, replay: Any, draw_key: jax.Array, learn_key: jax.Array) -> Any:
            samples = module.draw(algo_of_one, replay, draw_key)
            return module.learn(algo_of_one, state, samples, learn_key)[0]

        return key, over_axes(step, learner_state, replay, draw_key, learn_key), replay

    learning, compile_seconds = compile_loop(
        learn, (jax.random.key(3), learner_state, actor_state.buffer)
    )
    wall, cpu = measure(learning)
    num_agents = env.num_agents
    return {
        "env": env_name,
        "num_agents": num_agents,
        "lagged": lagged,
        "update_cpu_ms": 1e3 * cpu,
        "update_wall_ms": 1e3 * wall,
        "aps_cpu": num_agents / cpu,
        "aps_wall": num_agents / wall,
        "fraction_of_bound": bare_seconds(algo) / cpu,
        "compile_seconds": compile_seconds,
        "collection_cpu_ms": 1e3 * collect_cpu,
        "collection_wall_ms": 1e3 * collect_wall,
        "share_of_collection": collect_wall
        / (collect_wall + algo.config.num_gradient_steps * wall),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--tasks", nargs="+", help="only these scenarios")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, e.g. system.batch_size=512")
    arguments = parser.parse_args()
    module = configuration.load_system(str(Path(mava.__file__).parent / "systems" / "ff_maac.py"))
    configuration.register(module.Config, "ff_maac", "maac")
    jax.config.update("jax_enable_compilation_cache", False)  # compile_seconds are real

    rows = []
    for env_name, task in TASKS:
        for lagged in (False, True):
            if arguments.tasks is None or task in arguments.tasks:
                rows.append(benchmark(module, env_name, task, lagged, arguments.overrides))
                print(json.dumps(rows[-1]), flush=True)
    table = Table("", *(f"{x['env']} {x['num_agents']}" for x in rows))
    for name in list(rows[0])[2:]:
        table.add_row(
            name.replace("_", " "),
            *(str(x[name]) if name == "lagged" else f"{x[name]:,.2f}" for x in rows),
        )
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
