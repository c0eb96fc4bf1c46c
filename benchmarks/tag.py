"""Speed of continuous Tag with 5, 100 and 1000 agents, alone and in training, and its memory.

    taskset -c 0 python benchmarks/tag.py --json out.json

One row per number of agents, view (of all others, or of the 10 nearest; of the 4 there are with 5
agents) and number of copies, in environment steps per second of CPU and of wall time:
- raw: random actions, which are drawn in the loop; timesteps are written out, nothing is reset and
  caught runners stay, so that every step costs the same;
- training: whole updates of ff_ippo, one policy for all agents, which see the nearest.
A gain is raw, per CPU second, over WarpDrive's own CPU environment, in Python and NumPy, which
caught runners don't leave either, on one core of another machine.

Then what XLA says a step of 1000 agents in 2000 copies needs, compiled but not run, by the number
of observers at a time (`env.kwargs.chunk_size`).
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import throughput
from rich.console import Console
from rich.table import Table

import mava
from mava import config as configuration
from mava import experiment
from mava.environments.tag_continuous import TagContinuous
from mava.wrappers.vector import strongly_typed

TEAMS = {5: (1, 4), 100: (10, 90), 1000: (100, 900)}
COPIES = {5: (16, 256, 4096), 100: (4, 32, 256), 1000: (1, 4, 16)}
NEAREST = 10
NUM_STEPS = 8  # of a round
REFERENCE = {  # WarpDrive's steps per CPU second, by agents and whether all others are seen
    (5, True): 5100.0, (100, True): 280.0, (1000, True): 5.2,
    (5, False): 3900.0, (100, False): 46.0, (1000, False): 0.5,
}  # fmt: skip


def make_env(num_agents: int, num_observed: int | None, **options: Any) -> TagContinuous:
    """Returns an environment as WarpDrive's run configs have it, at its density of agents."""
    num_taggers, num_runners = TEAMS[num_agents]
    return TagContinuous(
        num_taggers=num_taggers,
        num_runners=num_runners,
        grid_length=2.0 * num_agents**0.5,
        num_other_agents_observed=num_observed,
        num_acceleration_levels=20,
        num_turn_levels=20,
        tagging_distance=0.2 / num_agents**0.5,
        **options,
    )


def raw(num_agents: int, num_observed: int | None, num_copies: int) -> tuple[float, float]:
    """Returns wall and CPU seconds of a step of one copy."""
    env = make_env(num_agents, num_observed, runner_exits_game_after_tagged=False)

    def step(carry: tuple, key: jax.Array) -> tuple[tuple, None]:
        action = jax.random.randint(key, (num_copies, num_agents, 2), 0, 21)
        return strongly_typed(jax.vmap(env.step)(carry[0], action)), None

    def round_(carry: tuple) -> tuple:
        key, steps_key = jax.random.split(carry[0])
        rest, _ = jax.lax.scan(step, carry[1:], jax.random.split(steps_key, NUM_STEPS))
        return key, *rest

    keys = jax.random.split(jax.random.key(0), num_copies)
    carry = (jax.random.key(1), *strongly_typed(jax.jit(jax.vmap(env.reset))(keys)))
    return throughput.measure(throughput.repeat(round_, carry), num_copies * NUM_STEPS)


def training(arguments: argparse.Namespace, num_agents: int, module: Any) -> dict[str, Any]:
    """Returns the row of ff_ippo."""
    arguments.devices, arguments.scenario = 1, None
    num_taggers, num_runners = TEAMS[num_agents]
    length, num_copies = (16, 4) if num_agents == 1000 else (32, 16)
    arguments.overrides = [
        f"env.scenario.task_config.num_taggers={num_taggers}",
        f"env.scenario.task_config.num_runners={num_runners}",
        f"env.scenario.task_config.grid_length={2.0 * num_agents**0.5}",
        f"env.kwargs.num_other_agents_observed={min(NEAREST, num_agents - 1)}",
        "system.add_agent_id=false",
        f"system.rollout_length={length}",
    ]
    run = throughput.make_run(arguments, "tag_continuous", num_copies, module)
    updates, _, plan = throughput.training_runner(run, module)
    wall, cpu = throughput.measure(updates, plan.steps_per_update)
    experiment.forget_programs()
    return row("training", num_agents, "nearest", num_copies, wall, cpu)


def row(kind: str, agents: int, view: str, copies: int, wall: float, cpu: float) -> dict[str, Any]:
    result = {
        "kind": kind,
        "num_agents": agents,
        "view": view,
        "num_copies": copies,
        "steps_per_cpu_second": 1 / cpu,
        "steps_per_wall_second": 1 / wall,
        "agent_steps_per_cpu_second": agents / cpu,
        "us_per_agent_step_cpu": 1e6 * cpu / agents,
    }
    if kind == "raw":
        result["gain"] = 1 / cpu / REFERENCE[agents, view == "all"]
    return result


def speeds(arguments: argparse.Namespace, module: Any) -> Iterator[dict[str, Any]]:
    for num_agents, view in itertools.product(TEAMS, ("all", "nearest")):
        num_observed = None if view == "all" else min(NEAREST, num_agents - 1)
        for num_copies in COPIES[num_agents]:
            if (num_agents, view, num_copies) == (1000, "all", 16):
                continue  # 450 MB of views, twice
            wall, cpu = raw(num_agents, num_observed, num_copies)
            yield row("raw", num_agents, view, num_copies, wall, cpu)
    for num_agents in TEAMS:
        yield training(arguments, num_agents, module)


def memory(num_copies: int, chunk_size: int | None) -> dict[str, Any]:
    """Returns gigabytes of the compiled step of 1000 agents."""
    env = make_env(1000, NEAREST, chunk_size=chunk_size)

    def reset(key: jax.Array) -> Any:
        return jax.vmap(env.reset)(jax.random.split(key, num_copies))

    state, _ = jax.eval_shape(reset, jax.random.key(0))
    action = jax.ShapeDtypeStruct((num_copies, 1000, 2), jnp.int32)
    step = jax.jit(jax.vmap(env.step), donate_argnums=0)
    analysis: Any = step.lower(state, action).compile().memory_analysis()
    return {
        "num_copies": num_copies,
        "chunk_size": chunk_size,
        "arguments_gb": analysis.argument_size_in_bytes / 1e9,
        "results_gb": analysis.output_size_in_bytes / 1e9,
        "temporary_gb": analysis.temp_size_in_bytes / 1e9,
    }


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(*(name.replace("_", " ") for name in rows[0]))
    for line in rows:
        values = (line.get(name, "") for name in rows[0])
        table.add_row(*(f"{x:,.4g}" if isinstance(x, float) else str(x) for x in values))
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a measurement")
    arguments = parser.parse_args()
    throughput.SECONDS = arguments.seconds
    module = configuration.load_system(str(Path(mava.__file__).parent / "systems" / "ff_ippo.py"))
    configuration.register(module.Config, "ff_ippo", "mlp")
    memories = []
    for chunk_size in (None, 128, 32):
        memories.append(memory(2000, chunk_size))
        print(json.dumps(memories[-1]), flush=True)
    rows = []
    for line in speeds(arguments, module):
        rows.append(line)
        print(json.dumps(line), flush=True)
    show(rows)
    show(memories)
    if arguments.json:
        arguments.json.write_text(json.dumps({"speed": rows, "memory": memories}, indent=2))


if __name__ == "__main__":
    main()
