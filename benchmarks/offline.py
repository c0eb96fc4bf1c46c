"""Online to offline: a system learns, its experience is recorded, others learn from that alone.

    python benchmarks/offline.py --env lbf --steps 3e5 --plot docs/offline_lbf.png

For each seed ff_ippo learns online and records all it sees; rec_maicq and rec_bc then learn from
that vault, and are evaluated in the environment. Prints the mean return (or win rate) of the data,
of the online run's last evaluation and of either's; draws all curves. Finished runs in the results
folder are not run again.
"""

import argparse
import copy
from pathlib import Path
from typing import Any

import numpy as np
from learning import Curve, collect, describe, draw_mean, task_folder
from rich.console import Console
from rich.table import Table

from mava.stored_vault import find_episodes, find_vault, read_steps

NAMES = {"rec_maicq": "MAICQ", "rec_bc": "behaviour cloning"}
COLOURS = {"ff_ippo": "tab:blue", "rec_maicq": "tab:orange", "rec_bc": "tab:green"}


def vault_folder(arguments: argparse.Namespace, seed: Any) -> Path:
    """Returns where the online run of a seed, by itself, has its vault."""
    return task_folder(arguments) / "vaults" / f"seed_{seed}"


def data_return(arguments: argparse.Namespace, seed: int) -> float:
    """Returns the mean return of the episodes recorded."""
    steps = read_steps(
        find_vault(vault_folder(arguments, seed)), ("rewards", "terminals", "truncations")
    )
    return float(find_episodes(steps).episode_return.mean())


def run(arguments: argparse.Namespace, system: str, overrides: list[str]) -> Curve:
    """Trains all seeds of a system and returns their curves."""
    chosen = copy.copy(arguments)
    chosen.system, chosen.overrides = system, [*overrides, *arguments.overrides]
    return collect(chosen)


def report(arguments: argparse.Namespace, curves: dict[str, Curve], data: np.ndarray) -> None:
    table = Table(title=f"{arguments.env} {arguments.scenario or ''}")
    metric = arguments.metric.replace("_", " ")
    for name in ("", metric, "s.e.", "95 % interval", "each seed"):
        table.add_column(name, justify="right" if name else "left")
    if arguments.metric == "mean_episode_return":
        table.add_row("all that was recorded", *describe(data))
    for system, curve in curves.items():
        name = NAMES.get(system, "online, ff_ippo")
        last = curve.values[:, -arguments.smooth :].mean(axis=1)
        table.add_row(f"{name}, last {arguments.smooth} evaluations", *describe(last))
        table.add_row(f"{name}, best parameters", *describe(curve.absolute))
    Console(width=120).print(table)


def plot(arguments: argparse.Namespace, curves: dict[str, Curve], data: np.ndarray) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (online, offline) = plt.subplots(
        1, 2, figsize=(9, 3.6), layout="constrained", sharey=True
    )
    for system, curve in curves.items():
        axes = online if system == "ff_ippo" else offline
        label = NAMES.get(system, system)
        draw_mean(axes, curve.steps / 1e3, curve.values, COLOURS[system], label)
    if arguments.metric == "mean_episode_return":
        offline.axhline(data.mean(), color="0.3", linestyle="--", label="mean of the data")
    online.set(xlabel="environment steps (thousands)", ylabel=arguments.metric.replace("_", " "))
    online.set_title(f"online, {arguments.env} {arguments.scenario or ''}")
    offline.set(xlabel="gradient steps (thousands)", title="offline, from what was recorded")
    for axes in (online, offline):
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
    figure.savefig(arguments.plot, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env", default="lbf")
    parser.add_argument("--scenario")
    parser.add_argument("--steps", type=float, default=3e5, help="environment steps, online")
    parser.add_argument("--updates", type=int, default=20_000, help="gradient steps, offline")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--metric", default="mean_episode_return", help="or win_rate, in percent")
    parser.add_argument("--smooth", type=int, default=5, help="last evaluations averaged")
    parser.add_argument("--results", type=Path, default=Path("results/offline"))
    parser.add_argument("--plot", type=Path, help="also draw the curves into this file")
    parser.add_argument("--verbose", action="store_true", help="show the runs' own output")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of all runs")
    arguments = parser.parse_args()
    vault = f"{vault_folder(arguments, '{seed}')}"
    recording = [f"system.total_timesteps={arguments.steps}", "logger.vault.record=true"]
    learning = [f"system.num_updates={arguments.updates}", f"vault={vault}"]
    curves = {
        "ff_ippo": run(arguments, "ff_ippo", [*recording, f"logger.vault.path={vault}"]),
        "rec_maicq": run(arguments, "rec_maicq", learning),
        "rec_bc": run(arguments, "rec_bc", learning),
    }
    data = np.array([data_return(arguments, seed) for seed in arguments.seeds])
    report(arguments, curves, data)
    if arguments.plot:
        plot(arguments, curves, data)


if __name__ == "__main__":
    main()
