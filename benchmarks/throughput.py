"""Training speed of a system, and how near it is to what the machine can do.

    python benchmarks/throughput.py --system ff_mappo --env rware --num-envs 16 64 256

One row per number of environments, all in environment steps per second:
- raw: the vectorised environment alone on one device, random legal actions, no resets;
- rollout: the policy acting in the vectorised, auto-resetting environment, on one device;
- training: whole updates, as `mava.experiment` compiles them;
- bound: 1 / (seconds of a raw step + seconds of the bare matrix work per step), the matrix work
  being the networks' gradients on the same minibatches for the same epochs and their forward
  passes (of a recurrent network with its cell's), timed on one device in the same process; times
  the devices. The fraction of the bound is training / bound, by wall and by CPU seconds;
- saving overhead: how much longer training takes with a checkpoint after every block of the run, of
  which the loop itself waits "saving blocks"; the rest is written while the next block runs;
- with --record, recording overhead: how much longer training takes when all is recorded.

    python benchmarks/throughput.py --all

One row per environment, with its default scenario and 64 copies: raw and training steps per second.

Pin it to one core (`taskset -c 0`) for figures that repeat: wall and CPU seconds then agree.
"""

import argparse
import dataclasses
import functools
import json
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hydra import compose, initialize_config_module
from rich.console import Console
from rich.table import Table

import mava
from mava import config as configuration
from mava import experiment
from mava.check_env import random_action
from mava.checkpoints import Checkpoints, list_checkpoints
from mava.programs import split_keys
from mava.recorder import Recorder, vault_steps
from mava.resume import about_run
from mava.snapshot import Progress, Snapshot
from mava.stored_vault import bytes_on_disk, find_vault, read_steps
from mava.types import Observation

SECONDS = 2.0  # of a measurement
RECORDED_CHUNKS = 6  # in a measurement of the cost of recording
REPEATS = 3  # measurements; the fastest counts, others on the machine can only slow it down


def measure(run: Callable[[int], Any], steps: int) -> tuple[float, float]:
    """Returns wall and CPU seconds per environment step.

    Args:
        run: does n rounds and waits for them.
        steps: environment steps in a round.
    """
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
    return wall / rounds / steps, cpu / rounds / steps


def repeat(function: Callable[[Any], Any], carry: Any) -> Callable[[int], None]:
    """Returns a runner of n rounds of `carry = function(carry)`, compiled."""
    loop = jax.jit(lambda n, carry: jax.lax.fori_loop(0, n, lambda i, c: function(c), carry))
    return lambda n: jax.block_until_ready(loop(np.int32(n), carry))


def raw_runner(vector_env: Any, length: int) -> Callable[[int], None]:
    """The environments alone: a round is `length` steps of all copies, which are never reset."""
    env = vector_env.env

    def step(carry: tuple, key: jax.Array) -> tuple[tuple, None]:
        state, mask, total = carry
        action = random_action(env.action_spec, mask, key)
        state, timestep = jax.vmap(env.step)(state, action)
        kept = jax.tree.leaves((timestep.observation, timestep.reward))
        total += sum(jnp.sum(x, dtype=jnp.float32) for x in kept)
        return (state, timestep.observation.action_mask, total), None

    def round_(carry: tuple) -> tuple:
        key, steps_key = jax.random.split(carry[0])
        rest, _ = jax.lax.scan(step, carry[1:], jax.random.split(steps_key, length))
        return key, *rest

    state, timestep = jax.jit(vector_env.reset)(jax.random.key(1))
    carry = (jax.random.key(0), state, timestep.observation.action_mask, jnp.float32(0))
    return repeat(round_, carry)


def rollout_runner(vector_env: Any, system: Any, length: int) -> Callable[[int], None]:
    """The policy in the environments: a round is `length` steps of all copies."""
    learner_state = jax.jit(system.init)(jax.random.key(0))
    act_params = system.act_params(learner_state)
    state, timestep = jax.jit(vector_env.reset)(jax.random.key(1))

    def step(carry: tuple, key: jax.Array) -> tuple[tuple, None]:
        state, observation, memory, total = carry
        act_key, env_key = jax.random.split(key)
        action, memory = system.act(act_params, observation, memory, act_key, False)
        state, timestep = vector_env.step(state, action, env_key)
        kept = jax.tree.leaves((timestep.observation, timestep.reward))
        total += sum(jnp.sum(x, dtype=jnp.float32) for x in kept)
        return (state, timestep.observation, memory, total), None

    def round_(carry: tuple) -> tuple:
        key, steps_key = jax.random.split(carry[0])
        rest, _ = jax.lax.scan(step, carry[1:], jax.random.split(steps_key, length))
        return key, *rest

    memory = system.init_memory(vector_env.num_envs)
    carry = (jax.random.key(2), state, timestep.observation, memory, jnp.float32(0))
    return repeat(round_, carry)


class Network(NamedTuple):
    """The products of a network: dense layers, a recurrent cell (or None) and more of them."""

    before: list[tuple[jax.Array, jax.Array]]
    cell: Any
    after: list[tuple[jax.Array, jax.Array]]


def bare_network(params: Any) -> Network:
    """Returns what is multiplied in a network of a PPO system with torsos of dense layers."""

    def layers(modules: Any) -> list[tuple[jax.Array, jax.Array]]:
        dense = {
            int(name.split("_")[1]): leaf for name, leaf in modules.items() if "kernel" in leaf
        }
        return [(dense[i]["kernel"], dense[i]["bias"]) for i in sorted(dense)]

    torso, head = params["params"]["torso"], layers(params["params"]["head"])
    if "cell" not in torso:
        return Network(before=layers(torso), cell=None, after=head)
    after = layers(torso["post_torso"]) + head
    return Network(before=layers(torso["pre_torso"]), cell=torso["cell"], after=after)


def forward(network: Network, cell: Any, x: jax.Array) -> jax.Array:
    """The bare products of a network with relu, for x (T, rows, features)."""
    num_steps, num_rows, _ = x.shape
    x = x.reshape(num_steps * num_rows, -1)
    for kernel, bias in network.before:
        x = jax.nn.relu(x @ kernel + bias)
    if network.cell is not None:
        x = x.reshape(num_steps, num_rows, -1)
        carry = cell.initialize_carry(jax.random.key(0), x.shape[1:])
        _, x = jax.lax.scan(lambda c, x: cell.apply({"params": network.cell}, c, x), carry, x)
        x = x.reshape(num_steps * num_rows, -1)
    for i, (kernel, bias) in enumerate(network.after):
        x = x @ kernel + bias
        x = x if i == len(network.after) - 1 else jax.nn.relu(x)
    return x


def matrix_runner(
    params: Any, run: Any, num_agents: int, spec: Observation
) -> Callable[[int], None]:
    """The matrix work of one update of a PPO system: a round is one update."""
    config, num_envs = run.system, run.arch.num_envs
    modules = configuration.make_networks(run.composed.network)
    cells = [modules[f"{name}_network"].get("cell") for name in ("actor", "critic")]
    networks = [bare_network(network) for network in (params.actor, params.critic)]
    # A minibatch: whole sequences (steps, rows) for a recurrent network, else steps of any time.
    is_recurrent = cells[0] is not None
    num_steps = config.chunk_length if is_recurrent else 1
    num_rows = config.rollout_length // num_steps * num_envs // config.num_minibatches
    key, inputs, rollouts = jax.random.key(0), [], []
    for network in networks:
        num_features = network.before[0][0].shape[0]
        views = num_agents if num_features == spec.agents_view.shape[-1] else 1
        inputs.append(jax.random.normal(key, (num_steps, num_rows * views, num_features)))
        whole = (config.rollout_length, num_envs * views, num_features)
        rollouts.append(jax.random.normal(key, whole))

    def learn(carry: Any, _: None) -> tuple[Any, None]:
        gradients = [
            jax.grad(lambda n, x, cell: jnp.mean(forward(n, cell, x) ** 2))(network, x, cell)
            for network, x, cell in zip(carry, inputs, cells, strict=True)
        ]
        return jax.tree.map(lambda x, g: x - 1e-6 * g, carry, gradients), None

    def act(x: jax.Array, actor: Any) -> jax.Array:
        return x + 1e-6 * jnp.mean(forward(actor, cells[0], x))

    def round_(carry: tuple) -> tuple:
        networks, x, total = carry
        x = jax.lax.fori_loop(0, config.rollout_length, lambda i, x: act(x, networks[0]), x)
        total += jnp.sum(forward(networks[1], cells[1], rollouts[1]))  # other networks each round
        num_gradients = config.ppo_epochs * config.num_minibatches
        networks, _ = jax.lax.scan(learn, networks, None, length=num_gradients)
        return networks, x, total

    return repeat(round_, (networks, rollouts[0][:1], jnp.float32(0)))


def training_runner(run: Any, module: Any) -> tuple[Callable[[int], Snapshot], float, Any]:
    """Returns a runner of n updates, the seconds it took to compile, and the plan."""
    env, system, plan = experiment.build(module, run)
    start = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        programs = experiment.compile_programs(env, system, plan, run, pool)
        setup, block = programs.setup.result(), programs.block.result()
        programs.evaluate.result()
    seconds = time.perf_counter() - start
    states = list(setup(jax.random.key(0), split_keys(jax.random.key(1), plan), ()))

    def run_updates(n: int) -> Snapshot:
        states[0], states[1], _, bad, _ = block(states[0], states[1], np.int32(n), ())
        assert int(bad) < 0, "training diverged"
        return Snapshot(states[0], states[1], system.act_params(states[0]), Progress())

    return run_updates, seconds, plan


def saving_cost(run_updates: Callable[[int], Snapshot], run: Any, plan: Any) -> dict[str, float]:
    """Returns what checkpoints cost if one is saved after every block of the run, as they are."""
    num_updates = plan.block_end(0)
    run_updates(num_updates)
    start = time.perf_counter()
    run_updates(num_updates)
    num_blocks = max(2, round(2 * SECONDS / (time.perf_counter() - start)))
    seconds: dict[bool, list[float]] = {False: [], True: []}
    blocked, env_step = [], 0
    with tempfile.TemporaryDirectory() as folder:
        options = dataclasses.replace(run.logger.checkpointing, save_interval_steps=1)
        saver = Checkpoints(Path(folder, "checkpoints"), options, about_run(run, plan, {}))
        saver.save_now(run_updates(1))
        for saving in [False, True] * REPEATS:
            start = time.perf_counter()
            for _ in range(num_blocks):
                snapshot = run_updates(num_updates)
                if saving:
                    env_step += num_updates * plan.steps_per_update
                    progress = dataclasses.replace(snapshot.progress, env_step=env_step)
                    before = time.perf_counter()
                    saver.save_if_due(snapshot._replace(progress=progress))
                    blocked.append(time.perf_counter() - before)
            seconds[saving].append(time.perf_counter() - start)
        saver.close()
        newest = list_checkpoints(Path(folder, "checkpoints"))[-1]
        num_bytes = bytes_on_disk(newest)
    return {
        "block_seconds": min(seconds[False]) / num_blocks,
        "saving_overhead_percent": 100 * (min(seconds[True]) / min(seconds[False]) - 1),
        "saving_blocks_ms": 1e3 * float(np.mean(blocked)),
        "checkpoint_kilobytes": num_bytes / 1e3,
    }


def recording_cost(run: Any, module: Any) -> dict[str, float]:
    """Returns what recording into a vault costs, and the vault's size against its raw arrays."""
    options = dataclasses.replace(run.logger.vault, record=True, every=2)  # so, both programs
    run = dataclasses.replace(run, logger=dataclasses.replace(run.logger, vault=options))
    env, system, plan = experiment.build(module, run)
    to_steps = functools.partial(vault_steps, env=env, has_agent_ids=run.system.add_agent_id)
    with ThreadPoolExecutor(4) as pool:
        programs = experiment.compile_programs(env, system, plan, run, pool, to_steps)
        setup, block = programs.setup.result(), programs.block.result()
        assert programs.record is not None
        record = programs.record.result()
    states = list(setup(jax.random.key(0), split_keys(jax.random.key(1), plan), ()))
    at_once = programs.num_recorded
    times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(run, Path(folder), env.num_streams * env.num_envs, None)
        for recording in [False, True] * (REPEATS + 1):
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(RECORDED_CHUNKS):
                program = record if recording else block
                states[0], states[1], _, bad, steps = program(*states[:2], np.int32(at_once), ())
                assert int(bad) < 0, "training diverged"
                if recording:
                    recorder.add(steps, at_once)
            recorder.settle()
            times[recording].append((time.perf_counter() - wall, time.process_time() - cpu))
        recorder.close()
        vault = find_vault(Path(folder))
        raw = sum(x.nbytes for x in read_steps(vault).values())
        disk = bytes_on_disk(Path(folder))
    # The first of either warms up.
    (plain_wall, plain_cpu), (wall, cpu) = (
        np.min(times[recording][1:], axis=0) for recording in (False, True)
    )
    return {
        "recording_overhead_percent": 100 * (wall / plain_wall - 1),
        "recording_overhead_cpu_percent": 100 * (cpu / plain_cpu - 1),
        "vault_bytes_of_raw_percent": 100 * disk / raw,
        "recorded_raw_megabytes": raw / 1e6,
    }


def make_run(arguments: argparse.Namespace, env: str, num_envs: int, module: Any) -> Any:
    """Returns what a run with these environments is told."""
    overrides = [
        f"env={env}",
        f"arch.num_envs={num_envs}",
        f"arch.num_devices={arguments.devices}",
        *arguments.overrides,
    ]
    if arguments.scenario:
        overrides.append(f"env/scenario={arguments.scenario}")
    with initialize_config_module("mava.configs", version_base=None):
        return configuration.parse(compose("mava", overrides), Path(module.__file__))


def survey(arguments: argparse.Namespace, module: Any) -> Iterator[dict[str, Any]]:
    """Yields the rows of the table of all environments."""
    for env in all_envs():
        try:
            yield survey_one(arguments, env, module)
        except configuration.UserError as error:
            print(f"{env} is left out: {error}")


def survey_one(arguments: argparse.Namespace, env: str, module: Any) -> dict[str, Any]:
    """Returns the row of one environment."""
    run = make_run(arguments, env, arguments.num_envs[0], module)
    training, compile_seconds, plan = training_runner(run, module)
    train_wall, _ = measure(training, plan.steps_per_update)
    vector_env = experiment.make_vector_env(run)
    length = run.system.rollout_length
    raw_wall, _ = measure(raw_runner(vector_env, length), run.arch.num_envs * length)
    experiment.forget_programs()
    return {
        "env": env,
        "task": run.task_name,
        "num_agents": vector_env.num_agents,
        "raw_steps_per_second": 1 / raw_wall,
        "training_steps_per_second": 1 / train_wall,
        "compile_seconds": compile_seconds,
    }


def benchmark(arguments: argparse.Namespace, num_envs: int, module: Any) -> dict[str, Any]:
    """Returns one row of results."""
    run = make_run(arguments, arguments.env, num_envs, module)
    _, system, _ = experiment.build(module, run)
    vector_env = experiment.make_vector_env(run)
    params = jax.jit(system.init)(jax.random.key(0)).params
    length = run.system.rollout_length

    training, compile_seconds, plan = training_runner(run, module)
    train_wall, train_cpu = measure(training, plan.steps_per_update)
    saving = saving_cost(training, run, plan)
    # Of the process so far, compiling included: give counts in ascending order.
    peak_memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    steps = num_envs * length
    raw_wall, raw_cpu = measure(raw_runner(vector_env, length), steps)
    rollout_wall, _ = measure(rollout_runner(vector_env, system, length), steps)
    matrix = matrix_runner(params, run, vector_env.num_agents, vector_env.observation_spec)
    matrix_wall, matrix_cpu = measure(matrix, steps)
    streams = len(plan.devices)  # the bound is that of one device, as often as there are devices
    bound_wall, bound_cpu = streams / (raw_wall + matrix_wall), 1 / (raw_cpu + matrix_cpu)
    return {
        "num_envs": num_envs,
        "raw_steps_per_second": 1 / raw_wall,
        "rollout_steps_per_second": 1 / rollout_wall,
        "training_steps_per_second": 1 / train_wall,
        "training_steps_per_cpu_second": 1 / train_cpu,
        "bound_steps_per_second": bound_wall,
        "fraction_of_bound": 1 / train_wall / bound_wall,
        "fraction_of_bound_cpu": 1 / train_cpu / bound_cpu,
        "raw_us": raw_wall * 1e6,
        "matrix_us": matrix_wall * 1e6,
        "compile_seconds": compile_seconds,
        "peak_memory_mb": peak_memory_mb,
        **saving,
        **(recording_cost(run, module) if arguments.record else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--system", default="ff_mappo")
    parser.add_argument("--env", default="rware")
    parser.add_argument("--scenario")
    parser.add_argument("--record", action="store_true", help="also the cost of recording vaults")
    parser.add_argument("--all", action="store_true", help="every environment, briefly")
    parser.add_argument("--num-envs", type=int, nargs="+", help="default: 16 64 256; 64 with --all")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, e.g. system.ppo_epochs=2")
    arguments = parser.parse_args()
    file = Path(mava.__file__).parent / "systems" / f"{arguments.system}.py"
    module = configuration.load_system(str(file))
    network = "rnn" if arguments.system.startswith("rec_") else "mlp"
    configuration.register(module.Config, arguments.system, network)
    jax.config.update("jax_enable_compilation_cache", False)  # compile_seconds are real

    arguments.num_envs = arguments.num_envs or ([64] if arguments.all else [16, 64, 256])
    if arguments.all:
        if arguments.scenario or len(arguments.num_envs) > 1:
            parser.error("--all takes one number of environments and no scenario.")
        cases = survey(arguments, module)
    else:
        cases = (benchmark(arguments, num_envs, module) for num_envs in arguments.num_envs)
    rows = []
    for row in cases:
        rows.append(row)
        rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
        print(json.dumps(rounded), flush=True)
    (print_survey if arguments.all else print_table)(arguments, rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))


def all_envs() -> list[str]:
    """Returns the names that `env=` takes."""
    folder = Path(mava.__file__).parent / "configs" / "env"
    return sorted(file.stem for file in folder.glob("*.yaml") if file.stem != "custom")


def print_survey(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """One row per environment."""
    title = f"{arguments.system}, {arguments.num_envs[0]} environments, environment steps/s"
    table = Table(title=title)
    for name in ("env", "task", "agents", "raw", "training", "compile s"):
        table.add_column(name, justify="left" if name in ("env", "task") else "right")
    for row in rows:
        values = [x if isinstance(x, str) else f"{x:,.0f}" for x in row.values()]
        table.add_row(*values)
    Console().print(table)


def print_table(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """One column per number of environments, so that it fits a terminal."""
    table = Table(title=f"{arguments.system} {arguments.env} {arguments.scenario or ''}")
    table.add_column("environments per device")
    for row in rows:
        table.add_column(f"{row['num_envs']:,}", justify="right")
    for name in list(rows[0])[1:]:
        values = [row[name] for row in rows]
        table.add_row(
            name.replace("_", " "), *(f"{x:,.2f}" if x < 100 else f"{x:,.0f}" for x in values)
        )
    Console().print(table)


if __name__ == "__main__":
    main()
