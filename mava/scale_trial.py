"""One trial of `python -m mava.autoscale`, in a process of its own that may run out of memory."""

import ast
import dataclasses
import inspect
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from mava import config as configuration
from mava import experiment
from mava.config import RunConfig, UserError
from mava.devices import use_compilation_cache
from mava.plan import Plan
from mava.programs import compile_programs, setup_keys
from mava.scale_search import Setting, Trial
from mava.training import run_keys

BLOCKS = 3  # of a measurement; the fastest counts, others on the machine can only slow it down
MAX_WARM_UPS = 20  # blocks, each twice as long as the one before
AGENT_UPDATES = "agent_updates_per_second"  # what a system reports that learns from a buffer
PARTS = ("num_minibatches", "num_chunks")  # options that say in how many parts a batch is learnt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What is measured; the settings are overrides of it."""

    file: Path  # of the system
    overrides: tuple[str, ...]
    parts_name: str | None  # of the system's option; None: it has none
    seconds: float  # of a measurement
    max_bytes: float | None  # that a trial may take of a device; None: what the device has
    clock: str  # "wall", or "cpu": CPU seconds of all threads

    def options(self, setting: Setting) -> list[str]:
        """Returns the overrides that make a setting."""
        options = [
            f"arch.num_envs={setting.num_envs}",
            f"system.update_batch_size={setting.num_replicas}",
        ]
        if self.parts_name is not None:
            options.append(f"system.{self.parts_name}={setting.num_parts}")
        return options


def defaults_of(file: Path) -> dict[str, str]:
    """Returns the configs, as network=mlp, that a system file gives to `experiment.main`."""
    try:
        tree = ast.parse(file.read_text())
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise UserError(f"{file} can't be read: {error}.") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "experiment.main":
            keywords = {x.arg: x.value for x in node.keywords if x.arg is not None}
            try:
                given = inspect.signature(experiment.main).bind(*node.args, **keywords).arguments
                return {name: ast.literal_eval(x) for name, x in given.items() if name != "file"}
            except (TypeError, ValueError) as error:
                raise UserError(f"{file}, line {node.lineno}: {error}.") from error
    raise UserError(f"{file} is no system file: it calls no experiment.main.")


def compose_run(file: Path, overrides: tuple[str, ...]) -> tuple[ModuleType, RunConfig]:
    """Returns a system file as a module, and what its command line would be told; raises
    UserError.
    """
    defaults = defaults_of(file)
    sys.path.append(str(file.parent))  # as if it were run
    module = configuration.load_system(str(file))
    configuration.register(module.Config, file.stem, **defaults)
    try:
        with initialize_config_module("mava.configs", version_base=None):
            composed = compose("mava", list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        reasons = [str(x) for x in (error, error.__cause__) if x is not None]
        raise UserError("\n".join(reasons)) from error
    return module, configuration.parse(composed, file)


def start_of(run: RunConfig) -> tuple[Setting, str | None]:
    """Returns the setting that a run has, and the name of the system's option for parts."""
    names = {field.name for field in dataclasses.fields(run.system)}
    parts_name = next((name for name in PARTS if name in names), None)
    parts = 1 if parts_name is None else getattr(run.system, parts_name)
    return Setting(run.arch.num_envs, run.system.update_batch_size, parts), parts_name


def check_measurable(module: ModuleType, run: RunConfig, clock: str) -> None:
    """Raises UserError if a run takes no environment steps, or can't be measured so."""
    if run.arch.debug:
        raise UserError("arch.debug=true runs two updates of one replica: leave it out.")
    env = experiment.make_vector_env(run)
    if experiment.make_system(module, env, run, run.system).offline:
        raise UserError(f"{run.system_name} learns offline and has no environments to scale.")
    if clock == "cpu" and jax.default_backend() != "cpu":
        raise UserError(f"--clock cpu: training runs on a {jax.default_backend()}.")


def predicted_bytes(programs: list[Any]) -> int:
    """Returns what the largest of some compiled programs takes of each device."""
    sizes = []
    for program in programs:
        x = program.memory_analysis()
        size = x.argument_size_in_bytes + x.output_size_in_bytes + x.temp_size_in_bytes
        sizes.append(size - x.alias_size_in_bytes)
    return max(sizes)


def device_bytes(devices: list[jax.Device]) -> float:
    """Returns the memory that each device has: of an accelerator, or a share of the host's that is
    free.
    """
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    if all(limits):
        return float(min(x for x in limits if x))
    file = Path("/proc/meminfo")
    if file.exists():
        lines = dict(line.split(":") for line in file.read_text().splitlines())
        free = 1024.0 * int(lines["MemAvailable"].split()[0])
    else:
        free = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    of_container = Path("/sys/fs/cgroup/memory.max")
    limit = of_container.read_text().strip() if of_container.exists() else "max"
    return min(free, math.inf if limit == "max" else float(limit)) / len(devices)


def peak_bytes(devices: list[jax.Device]) -> int:
    """Returns the most that a device had in use; on a CPU this process, compiling included."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in devices]
    unit = 1 if sys.platform == "darwin" else 1024
    return max(peaks) or unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def block_runner(
    setup: Callable, block: Callable, plan: Plan, seed: int, now: Callable[[], float]
) -> Callable[[int], tuple[float, float | None]]:
    """Returns a runner of n updates. It gives the seconds they took and the agent updates made,
    None if the system counts none.

    Args:
        setup: a compiled program, see `Programs`.
        block: likewise.
        plan: of the run.
        seed: the first.
        now: a clock.
    """
    keys = [run_keys(seed + i) for i in range(plan.num_seeds)]
    starts = setup_keys([x.init for x in keys], [x.reset for x in keys], plan)
    states = list(setup(*starts, ())[:2])

    def run_updates(count: int) -> tuple[float, float | None]:
        start = now()
        states[0], states[1], metrics, bad, _ = block(*states, np.int32(count), ())
        bad, taught = jax.device_get((bad, metrics.learn.get(AGENT_UPDATES)))
        if np.any(bad >= 0):
            raise FloatingPointError("a NaN or an infinity in a loss or gradient")
        elapsed = now() - start
        return elapsed, None if taught is None else float(np.sum(taught[0]))

    return run_updates


def measure_rates(
    run_updates: Callable[[int], tuple[float, float | None]], seconds: float
) -> tuple[float, float | None]:
    """Returns updates and agent updates per second, of the fastest of a few blocks.

    Args:
        run_updates: see `block_runner`.
        seconds: that the blocks take together, or one update each if that takes longer.
    """
    count, wanted = 1, seconds / BLOCKS
    elapsed, taught = run_updates(count)
    for _ in range(MAX_WARM_UPS):
        if elapsed >= wanted / 8 and taught != 0:  # an empty buffer teaches nothing
            break
        count *= 2
        elapsed, taught = run_updates(count)
    count = max(1, round(count * wanted / elapsed))
    elapsed, taught = min((run_updates(count) for _ in range(BLOCKS)), key=lambda x: x[0])
    return count / elapsed, None if taught is None else taught / elapsed


def measure(task: Task, setting: Setting) -> Trial:
    """Makes a trial in this process; raises UserError if the system refuses the setting."""
    module, run = compose_run(task.file, (*task.overrides, *task.options(setting)))
    check_measurable(module, run, task.clock)
    use_compilation_cache(run.arch.compilation_cache)
    with experiment.no_garbage_collection():
        env, system, plan = experiment.build(module, run)
    start = time.perf_counter()
    with ThreadPoolExecutor(1) as pool:
        programs = compile_programs(env, system, plan, run, pool)
        programs.evaluate.cancel()
        setup, block = programs.setup.result(), programs.block.result()
    trial = Trial(
        setting=setting,
        compile_seconds=time.perf_counter() - start,
        predicted_bytes=predicted_bytes([setup, block]),
        steps_per_update=plan.steps_per_update,
    )
    has = device_bytes(plan.devices) if task.max_bytes is None else task.max_bytes
    if trial.predicted_bytes > has:
        reason = f"needs {trial.predicted_bytes / 1e6:,.1f} of {has / 1e6:,.1f} MB on each device"
        return dataclasses.replace(trial, status="too large", reason=reason)
    now = time.process_time if task.clock == "cpu" else time.perf_counter
    runner = block_runner(setup, block, plan, run.system.seed, now)
    updates, taught = measure_rates(runner, task.seconds)
    return dataclasses.replace(
        trial,
        steps_per_second=updates * plan.steps_per_update * plan.num_seeds,
        agent_updates_per_second=taught,
        peak_bytes=peak_bytes(plan.devices),
    )


def run_trial(task: Task, setting: Setting) -> Trial:
    """Makes a trial in a process of its own, whatever becomes of that."""
    asked = {**dataclasses.asdict(task), "file": str(task.file), "setting": setting}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trial.json")
        command = [sys.executable, "-m", "mava.scale_trial", json.dumps(asked), str(file)]
        ended = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False
        )
        if file.exists():
            return Trial(**{**json.loads(file.read_text()), "setting": setting})
    if ended.returncode < 0:
        name = signal.Signals(-ended.returncode).name
        reason = f"killed by {name}" + ", as when memory runs out" * (name == "SIGKILL")
    else:
        reason = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
    return Trial(setting=setting, status="failed", reason=reason)


def main(arguments: list[str]) -> None:
    """The process of a trial: writes it to a file."""
    asked, file = json.loads(arguments[0]), Path(arguments[1])
    setting = Setting(*asked.pop("setting"))
    overrides = tuple(asked["overrides"])
    task = Task(**{**asked, "file": Path(asked["file"]), "overrides": overrides})
    try:
        trial = measure(task, setting)
    except UserError as error:
        trial = Trial(setting=setting, status="refused", reason=str(error))
    file.write_text(json.dumps(dataclasses.asdict(trial)))


if __name__ == "__main__":
    main(sys.argv[1:])
