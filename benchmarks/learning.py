"""Learning curves of a system on a task over seeds: return, or win rate, against environment steps.

    python benchmarks/learning.py system.total_timesteps=1e7 arch.num_envs=8 \
        --system ff_mappo --env rware --scenario tiny-2ag --seeds 0 1 2 3 4

Trains one seed after the other, then prints the mean over seeds with its standard error and 95 %
interval (Student's t) at the steps asked for. Finished seeds in the results folder are not trained
again, so a call that was stopped goes on where it was; use a new folder for new options.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy import stats

import mava
from mava.logger import read_record


class Curve(NamedTuple):
    steps: np.ndarray  # (evaluations,)
    values: np.ndarray  # (seeds, evaluations): of the metric asked for
    absolute: np.ndarray  # (seeds,): of each seed's best parameters


def task_folder(arguments: argparse.Namespace) -> Path:
    """Runs of one task share a folder: seeds of another one are never taken for them."""
    return Path(arguments.results, arguments.env, arguments.scenario or "default")


def finished_run(arguments: argparse.Namespace, seed: int) -> dict[str, Any] | None:
    """Returns the MARL-eval record of a finished run of this seed, None if there is none."""
    pattern = f"{arguments.system}/*/*/seed_{seed}/*/metrics.json"
    for file in sorted(task_folder(arguments).glob(pattern)):
        record = read_record(file)
        if "absolute_metrics" in record:
            return record
    return None


def train(arguments: argparse.Namespace, seed: int) -> None:
    file = Path(mava.__file__).parent / "systems" / f"{arguments.system}.py"
    command = [sys.executable, str(file), f"env={arguments.env}", f"system.seed={seed}"]
    if arguments.scenario:
        command.append(f"env/scenario={arguments.scenario}")
    command += [f"logger.base_exp_path={task_folder(arguments)}"]
    command += [text.replace("{seed}", str(seed)) for text in arguments.overrides]
    print(f"Seed {seed}: {' '.join(command[1:])}", flush=True)
    subprocess.run(command, check=True, stdout=None if arguments.verbose else subprocess.DEVNULL)


def collect(arguments: argparse.Namespace) -> Curve:
    records = []
    for seed in arguments.seeds:
        if finished_run(arguments, seed) is None:
            train(arguments, seed)
        record = finished_run(arguments, seed)
        assert record is not None, f"seed {seed} left no finished run in {arguments.results}"
        records.append(record)
    evaluations = [[step for name, step in r.items() if name.startswith("step_")] for r in records]
    steps = np.array([[e["step_count"] for e in run] for run in evaluations])
    assert (steps == steps[0]).all(), "the seeds were evaluated at different steps"
    return Curve(
        steps=steps[0],
        values=np.array([[e[arguments.metric][0] for e in run] for run in evaluations]),
        absolute=np.array([r["absolute_metrics"][arguments.metric][0] for r in records]),
    )


def describe(values: np.ndarray) -> tuple[str, str, str, str]:
    """Returns mean, standard error, 95 % interval and the single values (seeds,)."""
    mean, single = float(np.mean(values)), ", ".join(f"{value:.3g}" for value in values)
    if len(values) < 2:
        return f"{mean:.3g}", "-", "-", single
    error = float(stats.sem(values))
    low, high = stats.t.interval(0.95, len(values) - 1, mean, error) if error else (mean, mean)
    return f"{mean:.3g}", f"{error:.2g}", f"{low:.3g} to {high:.3g}", single


def report(arguments: argparse.Namespace, curve: Curve) -> None:
    table = Table(title=f"{arguments.system} {arguments.env} {arguments.scenario or ''}")
    for name in (
        "environment steps",
        arguments.metric.replace("_", " "),
        "s.e.",
        "95 % interval",
        "each seed",
    ):
        table.add_column(name, justify="right")
    for step in arguments.steps or np.linspace(0, curve.steps[-1], 11)[1:]:
        index = int(np.argmin(np.abs(curve.steps - step)))
        start = max(index - arguments.smooth // 2, 0)
        values = curve.values[:, start : start + arguments.smooth].mean(axis=1)
        table.add_row(f"{curve.steps[index]:,}", *describe(values))
    table.add_row("best parameters", *describe(curve.absolute))
    Console(width=120).print(table)


def draw_mean(
    axes: Any, x: np.ndarray, values: np.ndarray, color: str, label: str, band: str | None = None
) -> None:
    """Draws the mean of values (seeds, evaluations), and its 95 % interval as a band."""
    mean = values.mean(axis=0)
    axes.plot(x, mean, color=color, label=label)
    if len(values) > 1:
        half = stats.sem(values) * stats.t.ppf(0.975, len(values) - 1)
        axes.fill_between(x, mean - half, mean + half, color=color, alpha=0.2, label=band)


def plot(arguments: argparse.Namespace, curve: Curve) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    millions = curve.steps / 1e6
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    axes.plot(millions, curve.values.T, color="tab:blue", alpha=0.25, linewidth=0.8)
    label = f"mean of {len(curve.values)} seeds"
    draw_mean(axes, millions, curve.values, "tab:blue", label, "95 % interval")
    axes.set(xlabel="environment steps (millions)", ylabel=arguments.metric.replace("_", " "))
    axes.set_title(f"{arguments.system}, {arguments.env} {arguments.scenario or ''}")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(arguments.plot, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--system", default="ff_mappo")
    parser.add_argument("--env", default="rware")
    parser.add_argument("--scenario")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--metric", default="mean_episode_return", help="or win_rate, in percent")
    parser.add_argument("--steps", type=float, nargs="+", help="where to print the metric")
    parser.add_argument("--smooth", type=int, default=1, help="neighbouring evaluations averaged")
    parser.add_argument("--results", type=Path, default=Path("results/learning"))
    parser.add_argument("--plot", type=Path, help="also draw the curves into this file")
    parser.add_argument("--verbose", action="store_true", help="show the runs' own output")
    parser.add_argument(
        "overrides",
        nargs="*",
        help="Hydra overrides, e.g. system.gamma=0.95 or vault=vaults/{seed}",
    )
    arguments = parser.parse_args()
    curve = collect(arguments)
    report(arguments, curve)
    if arguments.plot:
        plot(arguments, curve)


if __name__ == "__main__":
    main()
