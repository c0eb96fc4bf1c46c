"""The loop around every system: train a block, evaluate, log; and `main`, the command line."""

import dataclasses
import functools
import gc
import math
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
from flax.errors import FlaxError

from mava import config as configuration
from mava.config import RunConfig, UserError
from mava.devices import choose_devices, use_compilation_cache
from mava.evaluator import in_order
from mava.logger import ConsoleLogger, Event, JsonLogger, Logger, TensorBoardLogger
from mava.plan import Plan, announce, make_plan
from mava.programs import Programs, compile_programs, split_keys
from mava.run_folder import create_run_folder
from mava.signals import Stopped, StopSignals
from mava.summary import summarise_episodes, summarise_training
from mava.types import MarlEnv, Metrics, System
from mava.wrappers.episode_metrics import EpisodeMetrics
from mava.wrappers.observation import AgentIds, GlobalState
from mava.wrappers.vector import VectorEnv

POLL_SECONDS = 0.005


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
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    try:
        module = configuration.load_system(file)
        return run(module, configuration.parse(cfg, Path(file).resolve()))
    except UserError as error:
        if HydraConfig.get().mode == RunMode.MULTIRUN:  # Hydra itself waits for the last job
            print(f"Job {HydraConfig.get().job.num} failed: {error}", file=sys.stderr, flush=True)
        raise


def make_vector_env(run: RunConfig) -> VectorEnv:
    """Returns the environments of one replica, wrapped; raises UserError."""
    env: MarlEnv = configuration.make_env(run.composed.env)
    if env.observation_spec.global_state is None:
        env = GlobalState(env)
    if run.system.add_agent_id:
        env = AgentIds(env)
    return VectorEnv(EpisodeMetrics(env), run.arch.num_envs)


def build(module: ModuleType, run: RunConfig) -> tuple[VectorEnv, System, Plan]:
    """Returns the environments, the system on them, and the plan; raises UserError."""
    devices = choose_devices(1 if run.arch.debug else run.arch.num_devices)
    env = make_vector_env(run)
    networks = configuration.make_networks(run.composed.network)
    try:
        steps_per_update = module.make_system(env, networks, run.system).steps_per_update
        plan = make_plan(run, steps_per_update, devices)
        system_config = dataclasses.replace(
            run.system, num_updates=plan.num_updates, total_timesteps=plan.total_steps
        )
        system = module.make_system(env, networks, system_config)
    except ValueError as error:
        raise UserError(f"Bad option: {error}") from error
    except KeyError as error:
        raise UserError(f"{run.system_name} needs {error} in its network config.") from error
    try:
        jax.eval_shape(system.init, jax.random.key(0))
    except (TypeError, ValueError, FlaxError) as error:
        view = env.observation_spec.agents_view.shape
        raise UserError(
            f"The network does not fit the observation, agents_view (N, O) = {view}: {error}"
        ) from error
    return env, system, plan


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
    stop_if_asked(signals, env_step)
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
        now = time.perf_counter()
        first_time = first_time or now
        speed, elapsed = {"steps_per_second": block_steps / seconds}, now - first_time
        trained = summarise_training(jax.device_get(metrics)) | speed
        log(loggers, Event("train", index, env_step, elapsed, trained))
        stop_if_asked(signals, env_step)

        act_params = system.act_params(learner_state)
        evaluated = evaluate(index, act_params, plan.num_episodes) | speed
        mean_return = evaluated["mean_episode_return"]
        if not math.isfinite(mean_return):
            raise TrainingError(f"The return of evaluation {index} is {mean_return}.")
        log(loggers, Event("evaluation", index, env_step, elapsed, evaluated))
        if mean_return >= best_return:  # of equals the latest: where returns have a maximum, luck
            # reaches it in some evaluation long before the parameters are any good
            best_params, best_return = act_params, mean_return
        stop_if_asked(signals, env_step)

    if plan.num_absolute_episodes:
        absolute = evaluate(plan.num_evaluations, best_params, plan.num_absolute_episodes)
        absolute["steps_per_second"] = env_step / train_seconds
        log(loggers, Event("absolute", plan.num_evaluations, env_step, elapsed, absolute))
        mean_return = absolute["mean_episode_return"]
        stop_if_asked(signals, env_step)
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


def diverged(metrics: Metrics, update: int, plan: Plan) -> TrainingError:
    bad = [name for name, (total, _) in metrics.learn.items() if not np.isfinite(total)]
    return TrainingError(
        f"NaN or infinity in {', '.join(bad)}, first in update {update}, at environment step "
        f"{(update + 1) * plan.steps_per_update:,}. Training stopped; the parameters of this "
        f"block are not kept. arch.debug=true stops at the operation that made the first NaN."
    )


def stop_if_asked(signals: StopSignals, env_step: int) -> None:
    signum = signals.received
    if signum is not None:
        raise Stopped(signum, f"Stopped by signal {signum} after {env_step:,} environment steps.")


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Importing suites and tracing make many objects and little garbage: a second saved of 8."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
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
    """Makes JAX stop at the first operation that gives a NaN."""
    if not active:
        yield
        return
    with jax.debug_nans(True):
        yield
