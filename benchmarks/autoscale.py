"""How near `python -m mava.autoscale` comes to the best of a full grid.

    taskset -c 0 python benchmarks/autoscale.py ff_mappo env=rware arch.num_devices=1

Measures every combination of environments, replicas and minibatches with the trials of the search,
then searches, with trials of its own. The largest of many noisy figures is too large: the three
best of the grid and the chosen setting are then measured anew, by turns, and the medians compared.
"""

import argparse
import itertools
import json
import statistics
from dataclasses import asdict
from pathlib import Path

from mava import autoscale
from mava.scale_search import Setting, Trial
from mava.scale_trial import Task, compose_run, run_trial, start_of

FINALISTS = 3  # of the grid
REPEATS = 3  # trials of each


def measure_grid(task: Task, settings: list[Setting]) -> list[Trial]:
    """Returns a trial of each, and prints it."""
    trials: list[Trial] = []
    for setting in settings:
        trials.append(run_trial(task, setting))
        print(autoscale.describe(trials[-1], trials[0], task), flush=True)
    return trials


def judge(task: Task, grid: list[Trial], chosen: Setting) -> dict[Setting, list[float]]:
    """Returns the rates, measured anew by turns, of the best of the grid and the chosen setting."""
    best = sorted(grid, key=lambda trial: -trial.rate)[:FINALISTS]
    rates: dict[Setting, list[float]] = {x: [] for x in [chosen, *(t.setting for t in best)]}
    for _ in range(REPEATS):
        for setting, of_setting in rates.items():
            of_setting.append(run_trial(task, setting).rate)
    return rates


def print_verdict(task: Task, rates: dict[Setting, list[float]], chosen: Setting) -> None:
    medians = {setting: statistics.median(x) for setting, x in rates.items()}
    for setting, of_setting in rates.items():
        each = ", ".join(f"{x:,.0f}" for x in of_setting)
        print(f"{' '.join(task.options(setting))}: {medians[setting]:,.0f} ({each})")
    of_best = max(medians.values())
    print(f"The chosen setting, the first, has {medians[chosen] / of_best:.3f} of the best.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("system")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--envs", type=int, nargs="+", default=[16, 32, 64, 128, 256])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--parts", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", type=Path, help="also write all trials to this file")
    asked = parser.parse_intermixed_args()
    file = autoscale.find_system(asked.system)
    _, run = compose_run(file, tuple(asked.overrides))
    start, parts_name = start_of(run)
    task = Task(
        file=file,
        overrides=tuple(asked.overrides),
        parts_name=parts_name,
        seconds=asked.seconds,
        max_bytes=None,
        clock=asked.clock,
    )
    axes = (asked.envs, asked.replicas, asked.parts if parts_name else [1])
    grid = measure_grid(task, [Setting(*sizes) for sizes in itertools.product(*axes)])
    best = max(grid, key=lambda trial: trial.rate)
    autoscale.print_table(grid, best, task, f"{autoscale.title_of(run)}: the grid")
    print("The search:", flush=True)
    chosen, trials = autoscale.find_scale(task, start, min_gain=0.1)
    autoscale.print_table(trials, chosen, task, f"{autoscale.title_of(run)}: the search")
    in_grid = {trial.setting: trial.rate for trial in grid}.get(chosen.setting)
    print(f"{len(trials)} trials instead of {len(grid)}.")
    if in_grid is not None:
        print(f"By the grid's own single trials: {in_grid / best.rate:.3f} of its best.")
    print("Anew:", flush=True)
    print_verdict(task, judge(task, grid, chosen.setting), chosen.setting)
    if asked.json is not None:
        rows = {"grid": [asdict(x) for x in grid], "search": [asdict(x) for x in trials]}
        asked.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
