"""The sizes that train fastest on this machine: `python -m mava.autoscale <system> [overrides]`.

Environments, replicas and minibatches, as WarpDrive finds its environments and blocks
(arXiv:2108.13976): by trials whose number grows linearly with the doublings on each axis.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import mava
from mava import figures
from mava.config import RunConfig, UserError, run_command
from mava.scale_search import Setting, Trial, search
from mava.scale_trial import Task, compose_run, run_trial, start_of

SYSTEMS = Path(mava.__file__).parent / "systems"
EPILOG = """Overrides are those of a run, such as env=lbf arch.num_devices=2. The search starts from
their arch.num_envs, system.update_batch_size and number of minibatches, or the defaults. ff_maac is
measured in agents taught per second, and has system.num_chunks in place of minibatches."""


def find_system(name: str) -> Path:
    """Returns the file of a system, given by name or path; raises UserError."""
    shipped = {file.stem: file for file in sorted(SYSTEMS.glob("*_*.py")) if file.stem[0] != "_"}
    if name in shipped:
        return shipped[name]
    file = Path(name)
    if file.suffix != ".py" or not file.is_file():
        raise UserError(f"{name} is neither a system ({', '.join(shipped)}) nor a Python file.")
    return file.resolve()


def unit_of(trial: Trial) -> str:
    counts_agents = trial.agent_updates_per_second is not None
    return "agent updates/s" if counts_agents else "environment steps/s"


def parts_label(task: Task) -> str:
    """Returns what the parts are called: minibatches or chunks."""
    return (task.parts_name or "num_parts").removeprefix("num_")


def gain_over(start: Trial, trial: Trial) -> str:
    return f"{100 * (trial.rate / start.rate - 1):+.0f} %" if start.rate else ""


def describe(trial: Trial, start: Trial, task: Task) -> str:
    """Returns a line on a trial."""
    sizes = " ".join(task.options(trial.setting))
    if not trial.is_measured:
        return f"{sizes}: {trial.status}: {trial.reason}"
    return (
        f"{sizes}: {trial.rate:,.0f} {unit_of(trial)} ({gain_over(start, trial)}), "
        f"{trial.predicted_bytes / 1e6:,.1f} MB, compiled in {trial.compile_seconds:.1f} s"
    )


def print_table(trials: list[Trial], chosen: Trial, task: Task, title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    names = ["envs", "replicas", parts_label(task)][: 3 if task.parts_name else 2]
    unit = unit_of(chosen).removeprefix("environment ")
    for name in (*names, unit, "gain", "memory, MB", "compiling, s"):
        table.add_column(name, justify="right")
    for trial in trials:
        sizes = [f"{x:,}" for x in trial.setting[: 3 if task.parts_name else 2]]
        memory = f"{trial.predicted_bytes / 1e6:,.1f}" if trial.predicted_bytes else ""
        seconds = f"{trial.compile_seconds:.1f}" if trial.compile_seconds else ""
        rate = [trial.status, ""]
        if trial.is_measured:
            rate = [f"{trial.rate:,.0f}", gain_over(trials[0], trial)]
        style = "bold green" if trial is chosen else None
        table.add_row(*sizes, *rate, memory, seconds, style=style)
    Console().print(table)


def draw(trials: list[Trial], chosen: Trial, task: Task, title: str) -> Any:
    """Returns a figure of the speed against the number of environments."""
    lines: dict[str, list[Trial]] = {}
    for trial in sorted((x for x in trials if x.is_measured), key=lambda x: x.setting):
        _, replicas, parts = trial.setting
        name = f"update_batch_size={replicas}"
        if task.parts_name is not None:
            name += f", {task.parts_name}={parts}"
        lines.setdefault(name, []).append(trial)
    figure, axes = figures.new_figure(title, 7, 4.2)
    for index, name in enumerate(lines):
        x = [trial.setting.num_envs for trial in lines[name]]
        y = [trial.rate for trial in lines[name]]
        axes.plot(x, y, **figures.style(index), label=name, markersize=5)
    ring = {"markersize": 15, "markerfacecolor": "none", "markeredgecolor": "black"}
    at = (chosen.setting.num_envs, chosen.rate)
    axes.plot(*at, "o", **ring, label="chosen", linestyle="none")
    axes.set_xscale("log", base=2)
    ticks = sorted({trial.setting.num_envs for of_line in lines.values() for trial in of_line})
    axes.set_xticks(ticks, [f"{x:,}" for x in ticks])
    axes.set_xlabel("environments per device and replica (arch.num_envs)")
    axes.set_ylabel(unit_of(chosen))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(0, 1.1 * max(trial.rate for trial in trials))
    figures.add_legend(figure, axes, [*lines, "chosen"])
    return figure


def title_of(run: RunConfig) -> str:
    return f"{run.system_name} on {run.env_name} {run.task_name}"


def write_json(file: Path, trials: list[Trial], chosen: Trial, task: Task) -> None:
    """Writes all trials, in their order."""
    rows = [
        {
            **dataclasses.asdict(trial),
            "setting": trial.setting._asdict(),
            "overrides": task.options(trial.setting),
            "chosen": trial is chosen,
        }
        for trial in trials
    ]
    try:
        file.write_text(json.dumps(rows, indent=2))
    except OSError as error:
        raise UserError(f"--json {file}: {error.strerror}.") from error


def write_figure(folder: Path, trials: list[Trial], chosen: Trial, task: Task, title: str) -> Path:
    """Returns the file of the figure."""
    file = folder / f"autoscale_{title.replace(' on ', '_').replace(' ', '_')}.png"
    try:
        with figures.legible():
            draw(trials, chosen, task, f"{title}: training speed").savefig(file, dpi=130)
    except OSError as error:
        raise UserError(f"--out {folder}: {error.strerror}.") from error
    return file


def check(arguments: argparse.Namespace) -> None:
    """Raises UserError if an option is out of its range, or nothing can be written."""
    if not arguments.seconds > 0:
        raise UserError(f"--seconds {arguments.seconds} must be above 0.")
    if not arguments.min_gain > 0:
        raise UserError(f"--min-gain {arguments.min_gain} must be above 0.")
    if arguments.max_memory is not None and not arguments.max_memory > 0:
        raise UserError(f"--max-memory {arguments.max_memory} must be above 0.")
    for text in arguments.overrides:
        if text.startswith(("resume=", "vault=")):
            raise UserError(f"{text}: only new runs of online systems are measured: leave it out.")
    if arguments.json is not None and not arguments.json.parent.is_dir():
        raise UserError(f"--json {arguments.json}: there is no folder {arguments.json.parent}.")
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {arguments.out}: {error.strerror}.") from error


def find_scale(task: Task, start: Setting, min_gain: float) -> tuple[Trial, list[Trial]]:
    """Returns the chosen trial and all; prints each as it is made. Raises UserError if the search
    can't start.
    """
    first: list[Trial] = []

    def measure(setting: Setting) -> Trial:
        trial = run_trial(task, setting)
        first[:] = first or [trial]
        if first[0].is_measured:
            print(describe(trial, first[0], task), flush=True)
        return trial

    chosen, trials = search(start, measure, task.parts_name is not None, min_gain)
    if trials[0].status == "refused":
        raise UserError(trials[0].reason)
    if not trials[0].is_measured:
        raise UserError(f"The search can't start: {describe(trials[0], trials[0], task)}.")
    return chosen, trials


def main(arguments: list[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m mava.autoscale",
        description="Finds the environments, replicas and minibatches that train fastest here.",
        epilog=EPILOG,
    )
    add = parser.add_argument
    add("system", help="its name, such as ff_mappo, or the path of its file")
    add("overrides", nargs="*", help="of the run, e.g. env=rware")
    add("--out", type=Path, default=Path("plots"), help="folder of the figure, by default plots")
    add("--json", type=Path, metavar="FILE", help="also write all trials to this file")
    add("--seconds", type=float, default=3.0, help="that a trial trains for, by default 3")
    add("--min-gain", type=float, default=10.0, metavar="PERCENT",
        help="go on doubling while training gets this much faster, by default 10")  # fmt: skip
    add("--max-memory", type=float, metavar="MB",
        help="of each device; by default all, on a CPU a share of what is free")  # fmt: skip
    add("--clock", choices=("wall", "cpu"), default="wall",
        help="cpu: seconds of CPU time, where other work would slow down the trials")  # fmt: skip
    asked = parser.parse_intermixed_args(arguments)
    check(asked)
    file = find_system(asked.system)
    _, run = compose_run(file, tuple(asked.overrides))
    start, parts_name = start_of(run)
    task = Task(
        file=file,
        overrides=tuple(asked.overrides),
        parts_name=parts_name,
        seconds=asked.seconds,
        max_bytes=None if asked.max_memory is None else asked.max_memory * 1e6,
        clock=asked.clock,
    )
    print(f"{title_of(run)}, each trial in a process of its own:", flush=True)
    chosen, trials = find_scale(task, start, asked.min_gain / 100)
    print_table(trials, chosen, task, title_of(run))
    if asked.json is not None:
        write_json(asked.json, trials, chosen, task)
    print(f"{write_figure(asked.out, trials, chosen, task, title_of(run))} shows it.")
    print(
        "Memory is what the compiled program takes of each device. Speed is not learning: an "
        f"update takes {chosen.steps_per_update:,} environment steps with the chosen sizes and "
        f"{trials[0].steps_per_update:,} with those at the start, and larger batches mean fewer "
        "updates for as many steps: compare the returns, too."
    )
    print(" ".join(task.options(chosen.setting)))


if __name__ == "__main__":
    run_command(main)
