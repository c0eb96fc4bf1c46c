"""The loop around every system: train a block, evaluate, log; and `main`, the command line.

D devices and U replicas are known here and in `mava.utils.parallel` alone.
"""

import dataclasses
import functools
import gc
import math
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from mava import config as configuration
from mava.config import RunConfig, UserError
from mava.devices import choose_devices, use_compilation_cache
from mava.evaluator import in_order, make_evaluate
from mava.logger import ConsoleLogger, Event, JsonLogger, Logger, TensorBoardLogger
from mava.run_folder import create_run_folder
from mava.signals import Stopped, StopSignals
from mava.types import Metrics, System
from mava.utils.parallel import AXES, merge_metrics
from mava.utils.varying import NONE, varying_axes
from mava.wrappers.episode_metrics import EpisodeMetrics
from mava.wrappers.observation import AgentIds, GlobalState
from mava.wrappers.vector import VectorEnv

POLL_SECONDS = 0.005
DEBUG_UPDATES = 2
DEBUG_EPISODES = 4


class TrainingError(UserError):
    """Training can't go on; the message says where it stopped."""


def main(file: str, network: str) -> None:
    """The command line of a system file: `experiment.main(__file__, network="mlp")`.

    Args:
        file: the system file; its stem names the system. It defines `Config` and `make_system`.
        network: the config in configs/network used unless another is chosen.
    """
    import hydra

    try:
        module = configuration.load_system(file)
        configuration.register(module.Config, Path(file).stem, network)
        job = functools.partial(run_job, file)
        job.__module__ = Path(file).stem  # Hydra names the job after it
        hydra.main(version_base=None, config_path="pkg://mava.configs", config_name="mava")(job)()
    except UserError as error:
        sys.exit(str(error))
    except Stopped as stop:
        print(stop, file=sys.stderr)
        sys.exit(stop.exit_code)


def run_job(file: str, cfg: Any) -> float:
    """One Hydra job: returns the mean return of the last evaluation made."""
    module = configuration.load_system(file)
    return run(module, configuration.parse(cfg, Path(file).resolve()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How much of what a run does."""

    devices: list[jax.Device]
    num_replicas: int  # U
    num_envs: int  # E
    steps_per_update: int  # environment steps, over all devices and replicas
    num_updates: int
    asked_steps: int | None  # the budget, before it was rounded up to whole updates
    num_evaluations: int
    num_episodes: int  # of an evaluation
    num_absolute_episodes: int  # of the last one; 0: none

    @property
    def total_steps(self) -> int:
        return self.num_updates * self.steps_per_update

    def blocks(self) -> Iterator[int]:
        """Yields the updates of each block: equal but for rounding."""
        ends = [
            self.num_updates * (i + 1) // self.num_evaluations for i in range(self.num_evaluations)
        ]
        yield from (end - start for start, end in zip([0, *ends], ends, strict=False))


def make_plan(run: RunConfig, steps_per_update: int, devices: list[jax.Device]) -> Plan:
    """Returns the plan of a run; `steps_per_update` is that of one replica."""
    system, arch = run.system, run.arch
    replicas = 1 if arch.debug else system.update_batch_size
    steps_per_update *= len(devices) * replicas
    asked_steps = None if system.total_timesteps is None else int(system.total_timesteps)
    num_updates, num_evaluations = system.num_updates, arch.num_evaluation
    if asked_steps is not None:
        if asked_steps < 1:
            raise UserError(f"system.total_timesteps={asked_steps} must be at least 1.")
        num_updates = math.ceil(asked_steps / steps_per_update)
    if arch.debug:
        num_updates, num_evaluations, asked_steps = DEBUG_UPDATES, DEBUG_UPDATES, None
    if num_updates < num_evaluations:
        raise UserError(
            f"{num_updates} updates of {steps_per_update:,} environment steps are fewer than "
            f"arch.num_evaluation={num_evaluations}: each evaluation needs an update before it."
        )
    if run.logger.profile is not None and not 0 <= run.logger.profile < num_evaluations:
        raise UserError(
            f"logger.profile={run.logger.profile} must be a block from 0 to {num_evaluations - 1}."
        )
    absolute = arch.num_absolute_metric_eval_episodes if arch.absolute_metric else 0
    return Plan(
        devices=devices,
        num_replicas=replicas,
        num_envs=arch.num_envs,
        steps_per_update=steps_per_update,
        num_updates=num_updates,
        asked_steps=asked_steps,
        num_evaluations=num_evaluations,
        num_episodes=DEBUG_EPISODES if arch.debug else arch.num_eval_episodes,
        num_absolute_episodes=min(absolute, DEBUG_EPISODES) if arch.debug else absolute,
    )


def make_vector_env(run: RunConfig) -> VectorEnv:
    """Returns the environments of one replica, wrapped; raises UserError."""
    env = configuration.make_env(run.overrides.env)
    if env.observation_spec.global_state is None:
        env = GlobalState(env)
    if run.system.add_agent_id:
        env = AgentIds(env)
    return VectorEnv(EpisodeMetrics(env), run.arch.num_envs)


def build(module: ModuleType, run: RunConfig) -> tuple[VectorEnv, System, Plan]:
    """Returns the environments, the system on them, and the plan; raises UserError."""
    devices = choose_devices(1 if run.arch.debug else run.arch.num_devices)
    env = make_vector_env(run)
    networks = configuration.make_networks(run.overrides.network)
    try:
        steps_per_update = module.make_system(env, networks, run.system).steps_per_update
        plan = make_plan(run, steps_per_update, devices)
        system_config = dataclasses.replace(
            run.system, num_updates=plan.num_updates, total_timesteps=plan.total_steps
        )
        return env, module.make_system(env, networks, system_config), plan
    except ValueError as error:
        raise UserError(f"Bad option: {error}") from error
    except KeyError as error:
        raise UserError(f"{run.system_name} needs network.{error.args[0]}.") from error


def over_replicas(function: Callable, num_replicas: int, in_axes: tuple, out_axes: Any) -> Callable:
    """Maps `function` over the replica axis; axis 0 in `in_axes` and `out_axes` is mapped.

    One replica has no axis of its own: under a real vmap `cond` and `while_loop` would compute
    both branches and run as long as the slowest.
    """
    if num_replicas == 1:
        in_axes, out_axes = jax.tree.map(lambda axis: None, (in_axes, out_axes))
    return jax.vmap(
        function, in_axes, out_axes, axis_name="replica", axis_size=num_replicas
    )


class Traced(NamedTuple):
    """A function traced once: calling it again binds its operations without running Python."""

    jaxpr: Any
    shapes: Any  # of the results

    def __call__(self, *arguments: Any) -> Any:
        results = jax.extend.core.jaxpr_as_fun(self.jaxpr)(*jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(self.shapes), results)


def trace(function: Callable, *arguments: Any, axes: dict[str, int] | None = None) -> Traced:
    """Traces `function` for arguments of these shapes, inside the named axes."""
    make = jax.make_jaxpr(function, axis_env=list((axes or {}).items()), return_shape=True)
    return Traced(*make(*arguments))


def trace_system(system: System, env: VectorEnv, plan: Plan) -> tuple[Traced, Traced, Traced]:
    """Returns init, reset and update (without its Experience), traced once for all of a run.

    Raises UserError if the network misfits or an average over devices or replicas was forgotten.
    """
    key = jax.random.key(0)
    try:
        init = trace(system.init, key)
    except Exception as error:
        view = env.observation_spec.agents_view.shape
        raise UserError(
            f"The network does not fit the observation, agents_view (N, O) = {view}: {error}"
        ) from error
    reset = trace(system.reset, key)
    sizes = {"device": len(plan.devices), "replica": plan.num_replicas}
    states = (init.shapes, reset.shapes)
    update = trace(lambda *states: system.update(*states)[:3], *states, axes=sizes)
    before, after = (
        jax.tree.map(lambda x: (x.shape, str(x.dtype)), states)
        for states in (states, update.shapes[:2])
    )
    if before != after:
        raise UserError("`update` changes the structure, shapes or dtypes of a state.")

    inputs = [NONE] * len(jax.tree.leaves(init.shapes))
    inputs += [frozenset(AXES)] * len(jax.tree.leaves(reset.shapes))
    outputs = varying_axes(update.jaxpr.jaxpr, inputs)
    learner_state, _, metrics = jax.tree.unflatten(jax.tree.structure(update.shapes), outputs)
    if any(jax.tree.leaves((learner_state, metrics))):
        check_averages(update, states, sizes)
    return init, reset, update


def check_averages(update: Callable, states: tuple[Any, Any], sizes: dict[str, int]) -> None:
    """Raises UserError if an average over devices or replicas was forgotten.

    Both axes are mapped, also when of size 1: what an update leaves different along one of them
    can't leave through `out_axes=None`. (A pmap checks nothing: parameters would drift apart.)
    Exact but slow, a second for RWARE: only asked when `varying_axes` can't rule it out.
    """
    axes = ((None, 0), (None, 0, None))
    over_both = jax.vmap(jax.vmap(update, *axes, axis_name="replica"), *axes, axis_name="device")
    stacked = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((*sizes.values(), *x.shape), x.dtype), states[1]
    )
    try:
        jax.eval_shape(over_both, states[0], stacked)
    except ValueError as error:
        if "out_axes" not in str(error):
            raise
        raise UserError(
            "A forgotten average: the LearnerState or the Metrics of `update` differ between "
            "devices or replicas. Average gradients and statistics with "
            "mava.utils.parallel.pmean, and make metrics with reduce_metrics."
        ) from error


def make_block(update: Traced, num_replicas: int) -> Callable:
    """Returns block(learner_state, actor_state, num_updates), to be mapped over devices.

    It gives the two new states, the merged Metrics and the index of the first update with a NaN
    or an infinity among its learn metrics, -1 if there is none.
    """
    update_all = over_replicas(update, num_replicas, (None, 0), (None, 0, None))
    no_episodes = {"min": jnp.inf, "max": -jnp.inf}

    def zeros(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = getattr(path[-1], "name", "")
        return jnp.full(leaf.shape, no_episodes.get(name, 0.0), leaf.dtype)

    def body(i: jax.Array, carry: tuple) -> tuple:
        learner_state, actor_state, metrics, first_bad = carry
        learner_state, actor_state, new = update_all(learner_state, actor_state)
        finite = jnp.all(jnp.array([jnp.isfinite(x) for x in jax.tree.leaves(new.learn)]))
        first_bad = jnp.where((first_bad < 0) & ~finite, i, first_bad)
        return learner_state, actor_state, merge_metrics(metrics, new), first_bad

    def block(learner_state: Any, actor_state: Any, num_updates: jax.Array) -> tuple:
        metrics = jax.tree.map_with_path(zeros, update.shapes[2])
        carry = (learner_state, actor_state, metrics, jnp.int32(-1))
        return jax.lax.fori_loop(0, num_updates, body, carry)

    return block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """The programs of a run; calling a future's result runs it on all devices."""

    setup: Future  # (init_key, reset_keys) -> LearnerState, ActorState
    block: Future  # (LearnerState, ActorState, num_updates) -> ..., Metrics, first bad update
    evaluate: Future  # (act_params, key, num_episodes, device indices) -> results (D, c, rounds)


def compile_programs(
    env: VectorEnv, system: System, plan: Plan, config: RunConfig, pool: ThreadPoolExecutor
) -> Programs:
    """Starts compiling all programs, side by side: XLA lets go of Python's lock while it works.

    The evaluation's turn comes when the block is compiled, while the first block runs.
    """
    num_devices, num_replicas = len(plan.devices), plan.num_replicas
    init, reset, update = trace_system(system, env, plan)
    pmap = functools.partial(jax.pmap, axis_name="device", devices=plan.devices)

    def submit(program: Any, *arguments: Any, runs_once: bool = False) -> Future:
        if config.arch.debug:  # a NaN is looked for operation by operation in what is not compiled
            return pool.submit(lambda: program)
        options = cpu_compiler_options(runs_once) if plan.devices[0].platform == "cpu" else None
        return pool.submit(program.lower(*arguments).compile, options)

    key, count = jax.random.key(0), np.int32(1)
    keys = split_keys(key, plan)
    setup = pmap(
        lambda key, keys: (init(key), over_replicas(reset, num_replicas, (0,), 0)(keys)),
        in_axes=(None, 0),
        out_axes=(None, 0),
    )
    setup_job = submit(setup, key, keys, runs_once=True)
    block = pmap(
        make_block(update, num_replicas),
        in_axes=(None, 0, None),
        out_axes=(None, 0, None, None),
        donate_argnums=(1,),
    )
    actor_states = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((*keys.shape, *x.shape), x.dtype), reset.shapes
    )
    block_job = submit(block, init.shapes, actor_states, count)

    copies = min(math.ceil(plan.num_episodes / num_devices), plan.num_envs * num_replicas)
    evaluate = make_evaluate(
        env.env,
        system,
        copies,
        num_devices,
        max(plan.num_episodes, plan.num_absolute_episodes),
        config.arch.evaluation_greedy,
    )

    def compile_evaluate() -> Callable:
        block_job.result()
        program = pmap(evaluate, in_axes=(None, None, None, 0))
        act_params = jax.eval_shape(system.act_params, init.shapes)
        devices = np.arange(num_devices, dtype=np.int32)
        return submit(program, act_params, key, count, devices).result()

    evaluate_job = pool.submit(compile_evaluate)
    return Programs(setup=setup_job, block=block_job, evaluate=evaluate_job)


def cpu_compiler_options(runs_once: bool) -> dict[str, int]:
    """LLVM's level 1 compiles a fifth faster than XLA's default of 3, and the result runs as fast;
    level 0 compiles a third faster, and the result runs at a third of the speed."""
    return {"xla_backend_optimization_level": 0 if runs_once else 1}


def split_keys(key: jax.Array, plan: Plan) -> jax.Array:
    """Returns keys (D,) or, with more than one replica, (D, U)."""
    num_devices, num_replicas = len(plan.devices), plan.num_replicas
    shape = (num_devices,) if num_replicas == 1 else (num_devices, num_replicas)
    return jax.random.split(key, shape)


def run(module: ModuleType, config: RunConfig) -> float:
    """Trains and evaluates a system; returns the mean return of the last evaluation made."""
    use_compilation_cache(config.arch.compilation_cache)
    with no_garbage_collection():
        env, system, plan = build(module, config)
    with StopSignals() as signals, debug_nans(config.arch.debug):
        folder = create_run_folder(config)
        announce(config, plan, folder)
        loggers = make_loggers(config, plan, folder)
        try:
            with ThreadPoolExecutor(4) as pool:
                with no_garbage_collection():
                    programs = compile_programs(env, system, plan, config, pool)
                return train(system, programs, plan, config, loggers, signals, folder)
        finally:
            for logger in loggers:
                logger.close()


def train(
    system: System,
    programs: Programs,
    plan: Plan,
    config: RunConfig,
    loggers: list[Logger],
    signals: StopSignals,
    folder: Path,
) -> float:
    """Runs all blocks; returns the mean return of the last evaluation made."""
    init_key, reset_key, evaluation_key = jax.random.split(jax.random.key(config.system.seed), 3)
    learner_state, actor_state = programs.setup.result()(init_key, split_keys(reset_key, plan))
    best_params, best_return, env_step, first_time = None, -math.inf, 0, None
    train_seconds = 0.0
    devices = np.arange(len(plan.devices), dtype=np.int32)

    def evaluate(index: int, act_params: Any, num_episodes: int) -> dict[str, float]:
        results = programs.evaluate.result()(
            act_params,
            jax.random.fold_in(evaluation_key, index),
            np.int32(num_episodes),
            devices,
        )
        wait(results, loggers)
        return summarise_episodes(in_order(results, num_episodes))

    block = programs.block.result()
    for index, num_updates in enumerate(plan.blocks()):
        block_steps = num_updates * plan.steps_per_update
        start = time.perf_counter()
        with profiled(config.logger.profile == index, folder):
            learner_state, actor_state, metrics, first_bad = block(
                learner_state, actor_state, np.int32(num_updates)
            )
            wait(first_bad, loggers, block_steps)
        seconds = time.perf_counter() - start
        if int(first_bad) >= 0:
            raise diverged(metrics, env_step // plan.steps_per_update + int(first_bad), plan)
        env_step += block_steps
        train_seconds += seconds
        first_time = first_time or time.perf_counter()
        speed = {"steps_per_second": block_steps / seconds}
        elapsed = time.perf_counter() - first_time
        trained = summarise_training(jax.device_get(metrics)) | speed
        log(loggers, Event("train", index, env_step, elapsed, trained))
        if signals.received is not None:
            raise stopped(signals.received, env_step)

        act_params = system.act_params(learner_state)
        evaluated = evaluate(index, act_params, plan.num_episodes) | speed
        log(loggers, Event("evaluation", index, env_step, elapsed, evaluated))
        mean_return = evaluated["mean_episode_return"]
        if mean_return > best_return:
            best_params, best_return = act_params, mean_return
        if signals.received is not None:
            raise stopped(signals.received, env_step)

    if plan.num_absolute_episodes:
        absolute = evaluate(plan.num_evaluations, best_params, plan.num_absolute_episodes)
        absolute["steps_per_second"] = env_step / train_seconds
        log(loggers, Event("absolute", plan.num_evaluations, env_step, elapsed, absolute))
        mean_return = absolute["mean_episode_return"]
    return mean_return


def wait(result: Any, loggers: list[Logger], block_steps: int = 0) -> None:
    """Waits for a result without blocking signals, moving the live line meanwhile."""
    start = time.perf_counter()
    leaves = jax.tree.leaves(result)
    while not all(leaf.is_ready() for leaf in leaves):
        time.sleep(POLL_SECONDS)
        for logger in loggers:
            if isinstance(logger, ConsoleLogger):
                logger.tick(time.perf_counter() - start, block_steps)


def summarise_episodes(values: dict[str, np.ndarray]) -> dict[str, float]:
    """Returns means, and the spread of returns, of an evaluation's episodes."""
    returns = values["episode_return"]
    summary = {mean_name(name): float(np.mean(x, dtype=np.float64)) for name, x in values.items()}
    return summary | {
        "std_episode_return": float(np.std(returns, dtype=np.float64)),
        "min_episode_return": float(np.min(returns)),
        "max_episode_return": float(np.max(returns)),
        "num_episodes": float(len(returns)),
    }


def summarise_training(metrics: Metrics) -> dict[str, float]:
    """Returns the means of a block; a name without a single count is left out."""
    summary = {}
    for name, stats in metrics.episodes.items():
        if stats.count > 0:
            summary[mean_name(name)] = float(stats.sum / stats.count)
        if stats.count > 0 and name == "episode_return":
            variance = stats.sum_squares / stats.count - (stats.sum / stats.count) ** 2
            summary["std_episode_return"] = math.sqrt(max(float(variance), 0.0))
            summary["min_episode_return"] = float(stats.min)
            summary["max_episode_return"] = float(stats.max)
            summary["num_episodes"] = float(stats.count)
    for name, (total, count) in metrics.learn.items():
        if count > 0:
            summary[name] = float(total / count)
    return summary


def mean_name(name: str) -> str:
    """`episode_return` is logged as `mean_episode_return`; rates and percentages keep their name."""
    return f"mean_{name}" if name.startswith("episode_") else name


def log(loggers: list[Logger], event: Event) -> None:
    for logger in loggers:
        logger.write(event)


def make_loggers(config: RunConfig, plan: Plan, folder: Path) -> list[Logger]:
    chosen: list[Logger] = []
    if config.logger.use_console:
        chosen.append(ConsoleLogger(plan.total_steps, every_metric=config.arch.debug))
    if config.logger.use_tb:
        chosen.append(TensorBoardLogger(folder / "tensorboard"))
    if config.logger.use_json:
        names = (config.env_name, config.task_name, config.system_name, config.system.seed)
        chosen.append(JsonLogger(folder / "metrics.json", *names))
    return chosen


def announce(config: RunConfig, plan: Plan, folder: Path) -> None:
    """Prints what will run, before anything is compiled."""
    if not config.logger.use_console:
        return
    platform = plan.devices[0].platform
    print(
        f"{config.system_name} on {config.env_name} {config.task_name}: "
        f"{len(plan.devices)} {platform} device(s) x {plan.num_replicas} replica(s) x "
        f"{plan.num_envs} environments, {plan.num_updates:,} updates of "
        f"{plan.steps_per_update:,} steps = {plan.total_steps:,} environment steps, "
        f"{plan.num_evaluations} evaluations of {plan.num_episodes} episodes."
    )
    if plan.asked_steps is not None and plan.asked_steps != plan.total_steps:
        print(
            f"system.total_timesteps={plan.asked_steps:,} is rounded up to whole updates: "
            f"{plan.total_steps:,}."
        )
    free = jax.local_device_count() - len(plan.devices)
    if platform == "cpu" and free > 0 and config.arch.num_devices is None:
        print(f"{free} more CPU cores are free: arch.num_devices={free + len(plan.devices)}.")
    print(f"Results: {folder}\nCompiling...", flush=True)


def diverged(metrics: Metrics, update: int, plan: Plan) -> TrainingError:
    bad = [name for name, (total, _) in metrics.learn.items() if not np.isfinite(total)]
    return TrainingError(
        f"NaN or infinity in {', '.join(bad)}, first in update {update}, at environment step "
        f"{(update + 1) * plan.steps_per_update:,}. Training stopped; the parameters of this "
        f"block are not kept. arch.debug=true stops at the operation that made the first NaN."
    )


def stopped(signum: int, env_step: int) -> Stopped:
    return Stopped(signum, f"Stopped by signal {signum} after {env_step:,} environment steps.")


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Importing suites and tracing make many objects and little garbage: a second saved of 8."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def profiled(active: bool, folder: Path) -> Iterator[None]:
    """Records what runs inside for TensorBoard's profile page."""
    if not active:
        yield
        return
    with jax.profiler.trace(str(folder / "profile")):
        yield


@contextmanager
def debug_nans(active: bool) -> Iterator[None]:
    before = jax.config.jax_debug_nans
    jax.config.update("jax_debug_nans", active or before)
    try:
        yield
    finally:
        jax.config.update("jax_debug_nans", before)
