"""A run from the command line to its end: `main`, which every system file calls."""

import dataclasses
import functools
import gc
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
from flax.errors import FlaxError
from omegaconf import OmegaConf

from mava import config as configuration
from mava.checkpoints import Checkpoints, Stored, read_newest
from mava.config import RunConfig, UserError
from mava.debugging import debug_nans
from mava.devices import choose_devices, use_compilation_cache
from mava.logger import Console, JsonLogger, Logger, TensorBoardLogger, read_record
from mava.offline import load_experience, use_vault
from mava.plan import Plan, announce, make_plan
from mava.programs import compile_programs
from mava.recorder import Recorder, vault_steps
from mava.render import Renderer, check_drawable
from mava.resume import (
    Misfit,
    about_run,
    announce_resumed,
    check_fits,
    check_overrides,
    plan_rest,
)
from mava.run_folder import (
    create_run_folder,
    find_versions,
    lock_folder,
    new_name,
    write_config,
)
from mava.services import MakeLogger, find_loggers, start_loggers
from mava.signals import Stopped, StopSignals
from mava.snapshot import Progress
from mava.stored_run import find_system_file, load_run
from mava.summary import first_values, return_of_learners
from mava.sweeps import failed_jobs_listed, find_finished, record_failure
from mava.training import SeedRun, Training, TrainingError, read_pretrained, run_keys
from mava.types import MarlEnv, System, array_spec
from mava.wrappers.episode_metrics import EpisodeMetrics
from mava.wrappers.observation import AgentIds, FlatViews, GlobalState
from mava.wrappers.vector import VectorEnv


def main(file: str, network: str, arch: str = "anakin") -> None:
    """The command line of a system file: `experiment.main(__file__, network="mlp")`.

    Args:
        file: the system file; its stem names the system. It defines `Config` and `make_system`.
        network: the config in configs/network used unless another is chosen.
        arch: that in configs/arch.
    """
    import hydra

    try:
        module = configuration.load_system(file)
        folder, overrides, flags = resume_arguments(sys.argv[1:])
        if folder is not None and not flags:  # what is composed here is not what is stored there
            resume(Path(folder), Path(file).stem, overrides)
            return
        configuration.register(module.Config, Path(file).stem, network, arch)
        job = functools.partial(run_job, file)
        job.__module__ = Path(file).stem  # Hydra names the job after it
        with failed_jobs_listed():
            hydra.main("pkg://mava.configs", "mava", version_base=None)(job)()
    except UserError as error:
        sys.exit(str(error))
    except Stopped as stop:
        print(stop, file=sys.stderr)
        sys.exit(stop.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def resume_arguments(arguments: list[str]) -> tuple[str | None, list[str], list[str]]:
    """Returns the run folder after `resume=`, if any, the other overrides, and the flags."""
    folders = [x.removeprefix("resume=") for x in arguments if x.startswith("resume=")]
    flags = [x for x in arguments if x.startswith("-")]
    overrides = [x for x in arguments if not x.startswith(("-", "resume="))]
    return (folders[-1] if folders else None), overrides, flags


def run_job(file: str, cfg: Any) -> float:
    """One Hydra job: returns the mean return of the last evaluation made."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    hydra_cfg = HydraConfig.get()
    try:
        if cfg.resume is not None:
            _, overrides, _ = resume_arguments(list(hydra_cfg.overrides.task))
            return resume(Path(str(cfg.resume)), Path(file).stem, overrides)
        if cfg.vault is not None:
            use_vault(cfg, list(hydra_cfg.overrides.task))
        module = configuration.load_system(file)
        config = configuration.parse(cfg, Path(file).resolve())
        if cfg.skip_finished:
            finished = [find_finished(x) for x in configuration.runs_of_seeds(config)]
            done = [x for x in finished if x is not None]
            for folder, _ in done:
                print(f"{folder} is such a run, and finished.")
            if len(done) == len(finished):
                return sum(result for _, result in done) / len(done)
        return run(module, config)
    except Exception as error:
        if hydra_cfg.mode == RunMode.MULTIRUN:
            overrides = list(hydra_cfg.overrides.task)
            record_failure(hydra_cfg.sweep.dir, hydra_cfg.job.num, overrides, error)
        raise
    finally:
        if hydra_cfg.mode == RunMode.MULTIRUN:
            forget_programs()


def forget_programs() -> None:
    """Frees compiled programs, which JAX keeps. On a CPU those of a run take 1,300 memory maps and
    more; at the 65,530 that Linux gives a process, LLVM crashes.
    """
    jax.clear_caches()
    gc.collect()


def resume(folder: Path, system_name: str, overrides: list[str]) -> float:
    """Goes on with a run; returns the mean return of the last evaluation made.

    Args:
        folder: of the run.
        system_name: of the system file that was asked to do it.
        overrides: changes of the stored config.
    """
    file = find_system_file(folder)
    if file.stem != system_name:
        raise UserError(f"{folder} holds a run of {file.stem}, not of {system_name}.")
    module, config = load_run(folder, overrides)
    check_overrides(overrides, config)
    try:
        return run(module, config, folder)
    except Misfit as error:
        raise UserError(
            f"{' '.join(misfitting(folder, overrides)) or folder}: can't go on with that: {error}."
        ) from error


def misfitting(folder: Path, overrides: list[str]) -> list[str]:
    """Returns those of the overrides with which, each alone, the checkpoint can't be used."""
    stored = read_newest(folder / "checkpoints")
    guilty = []
    for override in overrides:
        try:
            build(*load_run(folder, [override]), stored)
        except Misfit:
            guilty.append(override)
    return guilty


def make_vector_env(run: RunConfig) -> VectorEnv:
    """Returns the environments of one replica, wrapped; raises UserError."""
    env: MarlEnv = configuration.make_env(run.composed.env)
    view = run.composed.network.get("view", "flat")
    is_grid = env.observation_spec.agents_view.ndim > 2
    if view not in ("flat", "grid"):
        raise UserError(f"network.view={view} must be flat or grid.")
    if view == "grid" and not is_grid:
        raise UserError(
            f"{run.env_name} shows each agent a vector, not a grid (network.view=grid): choose "
            "another network, such as mlp."
        )
    if view == "flat" and is_grid:
        env = FlatViews(env)
    if env.observation_spec.global_state is None:
        env = GlobalState(env)
    if run.system.add_agent_id:
        env = AgentIds(env)
    policies = run.composed.network.get("policies")
    groups: Any = OmegaConf.to_container(policies) if OmegaConf.is_dict(policies) else None
    return VectorEnv(EpisodeMetrics(env, groups), run.arch.num_envs)


def make_system(module: ModuleType, env: VectorEnv, run: RunConfig, config: Any) -> System:
    """Returns the system that the file makes; raises UserError.

    Args:
        module: the system file.
        env: the environments of one replica.
        run: what the user asked for.
        config: the system's Config.
    """
    networks = configuration.make_networks(run.composed.network)
    try:
        system = module.make_system(env, networks, config)
    except ValueError as error:
        raise UserError(f"Bad option: {error}") from error
    except KeyError as error:
        raise UserError(f"{run.system_name} needs {error} in its network config.") from error
    unread = configuration.unread_parts(networks)
    if unread:
        raise UserError(
            f"{run.system_name} has no use for network.{', network.'.join(unread)}: leave it out "
            "or choose another config with network=."
        )
    return system


def check_network(system: System, env: VectorEnv) -> None:
    """Raises UserError if the network does not fit the observation, or a batch of two."""
    batch = jax.tree.map(lambda x: array_spec((2, *x.shape), x.dtype), env.observation_spec)
    key = jax.random.key(0)
    try:
        act_params = jax.eval_shape(lambda key: system.act_params(system.init(key)), key)
        jax.eval_shape(
            lambda params, batch, memory, key: system.act(params, batch, memory, key, True),
            *(act_params, batch, jax.eval_shape(lambda: system.init_memory(2)), key),
        )
    except (TypeError, ValueError, FlaxError) as error:
        view = env.observation_spec.agents_view.shape
        raise UserError(
            f"The network does not fit the observation, agents_view (N, O) = {view}: {error}"
        ) from error


def check_sources(system: System, run: RunConfig) -> None:
    """Raises UserError if a system does not get what it learns from."""
    if system.offline and run.vault is None:
        raise UserError(f"{run.system_name} learns from a vault: add vault=<its folder>.")
    if not system.offline and run.vault is not None:
        raise UserError(f"{run.system_name} does not learn from a vault: leave out vault=.")
    if system.offline and run.logger.vault.record:
        raise UserError(f"{run.system_name} has nothing to record: leave out logger.vault.record.")


def build(
    module: ModuleType, run: RunConfig, stored: Stored | None = None
) -> tuple[VectorEnv, System, Plan]:
    """Returns the environments, the system on them, and the plan; raises UserError.

    Args:
        module: the system file.
        run: what the user asked for.
        stored: the checkpoint from which the run goes on; None for a new run.
    """
    env = make_vector_env(run)
    first = make_system(module, env, run, run.system)
    check_sources(first, run)
    if stored is None:
        devices = choose_devices(1 if run.arch.debug else run.arch.num_devices)
        plan = make_plan(run, first, devices)
    else:
        plan = plan_rest(run, first, stored)
    env.num_streams = len(plan.devices) * plan.num_replicas
    budget = {"num_updates": plan.num_updates, "total_timesteps": plan.total_steps}
    fields = {field.name for field in dataclasses.fields(run.system)}
    known = {name: x for name, x in budget.items() if name in fields}
    system = make_system(module, env, run, dataclasses.replace(run.system, **known))
    check_network(system, env)
    if stored is not None:
        check_fits(system, plan, stored)
    return env, system, plan


def run(module: ModuleType, config: RunConfig, folder: Path | None = None) -> float:
    """Trains and evaluates a system; returns the mean return of the last evaluation made.

    Args:
        module: the system file.
        config: what the user asked for.
        folder: that of a run to go on with; None starts a new one for each seed.
    """
    use_compilation_cache(config.arch.compilation_cache)
    of_seeds = configuration.runs_of_seeds(config)
    with ExitStack() as stack:
        resumed = None
        if folder is not None:
            stack.callback(lock_folder(folder).release)
            resumed = read_newest(folder / "checkpoints")
        with no_garbage_collection():
            env, system, plan = build(module, config, resumed)
        if config.logger.render_every is not None:
            check_drawable(env.env)
        pretrained = None if resumed else read_pretrained(config, system)
        if folder is not None and resumed is not None:
            result = result_if_complete(config, folder, plan, resumed.progress)
            if result is not None:
                return result
        services = find_loggers(config.logger)
        data = (load_experience(config, env),) if system.offline else ()
        signals = stack.enter_context(StopSignals())
        stack.enter_context(debug_nans(config.arch.debug))
        is_new, versions = folder is None, find_versions(config.system_file)
        versions["seeds_trained_together"] = plan.num_seeds
        folders = [folder] if folder else create_run_folders(of_seeds, versions, stack)
        if resumed:
            announce_resumed(config, plan, resumed, versions)
        announce(config, plan, folders, is_new)
        try:
            runs = [
                make_seed_run(
                    *(of_seed, folder, env, system, plan, services, versions, resumed, is_new),
                    stack.enter_context(ExitStack()),
                )
                for of_seed, folder in zip(of_seeds, folders, strict=True)
            ]
            console = None
            if config.logger.use_console:
                console = Console(plan, runs[0].progress.env_step, config.arch.debug)
                stack.callback(console.close)
            to_steps = None
            if config.logger.vault.record:
                has_agent_ids = config.system.add_agent_id
                to_steps = functools.partial(vault_steps, env=env, has_agent_ids=has_agent_ids)
            pool = stack.enter_context(ThreadPoolExecutor(4))
            with no_garbage_collection():
                programs = compile_programs(env, system, plan, config, pool, to_steps, data)
            if not is_new:  # the overrides are known to work now
                write_config(config, folders[0])
            training = Training(system, programs, data, plan, config, runs, console, signals)
            del data  # it is on the devices then, and need not be here, too
            return training.run(resumed, pretrained)
        except OSError as error:
            raise TrainingError(
                f"Can't write to {folders[0]}: {error.strerror or error}. Training stopped; what "
                "was saved before is complete."
            ) from error


def create_run_folders(
    runs: list[RunConfig], versions: dict[str, Any], stack: ExitStack
) -> list[Path]:
    """Returns new folders, all of one name, which are locked until the stack is closed."""
    name, folders = new_name(), []
    for run in runs:
        folders.append(create_run_folder(run, name, versions))
        stack.callback(lock_folder(folders[-1]).release)
    return folders


def make_seed_run(
    config: RunConfig,
    folder: Path,
    env: VectorEnv,
    system: System,
    plan: Plan,
    services: dict[str, MakeLogger],
    versions: dict[str, Any],
    resumed: Stored | None,
    is_new: bool,
    stack: ExitStack,
) -> SeedRun:
    """Returns what one seed has for itself; the stack closes what it opens."""
    about = about_run(config, plan, versions)
    checkpoints = Checkpoints(folder / "checkpoints", config.logger.checkpointing, about)
    stack.callback(checkpoints.close)
    checkpoints.start_from(resumed)
    progress = resumed.progress if resumed else Progress()
    started = start_loggers(services, folder, config, stack)
    loggers = make_loggers(config, folder, progress, is_new)
    for logger in loggers:
        stack.callback(logger.close)
    loggers += started
    renderer = make_renderer(config, env, system, folder, loggers)
    if renderer is not None:
        stack.callback(renderer.close)
    recorder = make_recorder(config, env, folder, None if is_new else progress)
    if recorder is not None:
        stack.callback(recorder.close)
    return SeedRun(
        seed=config.system.seed,
        folder=folder,
        loggers=loggers,
        checkpoints=checkpoints,
        renderer=renderer,
        recorder=recorder,
        stack=stack,
        progress=progress,
    )


def result_if_complete(
    config: RunConfig, folder: Path, plan: Plan, progress: Progress
) -> float | None:
    """Returns the mean return of the last evaluation of a run that has nothing left to do."""
    record = read_record(folder / "metrics.json")
    if progress.num_evaluations < plan.num_evaluations:
        return None
    if plan.num_absolute_episodes and "absolute_metrics" not in record:
        return None
    budget = "system.num_updates" if plan.offline else "system.total_timesteps"
    print(f"{folder} is complete; a larger {budget} makes it go on.")
    if plan.num_absolute_episodes:
        return return_of_learners(first_values(record["absolute_metrics"]), config)
    return progress.mean_return


def make_loggers(config: RunConfig, folder: Path, progress: Progress, is_new: bool) -> list[Logger]:
    chosen: list[Logger] = []
    if config.logger.use_tb:
        chosen.append(TensorBoardLogger(folder / "tensorboard", None if is_new else progress))
    if config.logger.use_json:
        names = (config.env_name, config.task_name, config.system_name, config.system.seed)
        chosen.append(JsonLogger(folder / "metrics.json", *names, progress.num_evaluations))
    return chosen


def make_renderer(
    config: RunConfig, env: VectorEnv, system: System, folder: Path, loggers: list[Logger]
) -> Renderer | None:
    if config.logger.render_every is None:
        return None
    return Renderer(
        env.env,
        system,
        config.arch.evaluation_greedy,
        run_keys(config.system.seed).evaluation,
        config.logger.render_every,
        folder / "animations",
        next((x for x in loggers if isinstance(x, TensorBoardLogger)), None),
    )


def make_recorder(
    config: RunConfig, env: VectorEnv, folder: Path, progress: Progress | None
) -> Recorder | None:
    if not config.logger.vault.record:
        return None
    keep = progress.recorded_steps if progress else None
    return Recorder(config, folder, env.num_streams * env.num_envs, keep)


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
