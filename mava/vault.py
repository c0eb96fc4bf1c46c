"""Commands on vaults: `python -m mava.vault describe|convert|merge <path>`."""

import argparse
import math
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from mava.config import UserError, run_command
from mava.stored_vault import (
    Episode,
    Steps,
    StoredVault,
    VaultWriter,
    bytes_on_disk,
    find_episodes,
    find_vault,
    read_steps,
)

SUBSETS = ("Poor", "Medium", "Good")  # thirds of the episodes, by return


def select(steps: Steps, episodes: Episode, chosen: np.ndarray) -> Steps:
    """Returns the steps of the episodes with these indices, in that order."""
    lengths = episodes.end[chosen] - episodes.start[chosen]
    shift = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    rows = np.arange(lengths.sum()) + np.repeat(episodes.start[chosen] - shift, lengths)
    return {name: x[rows] for name, x in steps.items()}


def describe(vault: StoredVault) -> None:
    """Prints what a vault holds."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    steps = read_steps(vault, ("rewards", "terminals", "truncations"))
    episodes = find_episodes(steps)
    about = vault.metadata.get("mava", {})
    console.print(f"[bold]{vault.folder}[/bold]", soft_wrap=True)
    if about:
        env, seed = about["config"]["env"], about["config"]["system"]["seed"]
        console.print(
            f"recorded by {about['system_name']} on {env['env_name']} {about['task_name']}, "
            f"seed {seed}"
        )
    terminated = int(np.sum(np.any(steps["terminals"][episodes.end - 1], axis=-1)))
    count = len(episodes.end)
    console.print(
        f"{vault.num_steps:,} steps in {count:,} episodes; really ended: {terminated:,}, "
        f"cut by the time limit: {count - terminated:,}"
    )
    table = Table("array", "of one step", "dtype", "MB uncompressed")
    table.columns[-1].justify = "right"
    raw = 0
    for name, shape in vault.shapes.items():
        size = vault.num_steps * math.prod(shape) * np.dtype(vault.dtypes[name]).itemsize
        raw += size
        table.add_row(name, str(shape), vault.dtypes[name], f"{size / 1e6:,.3g}")
    console.print(table)
    disk = bytes_on_disk(vault.folder)
    console.print(f"on disk {disk / 1e6:,.3g} MB, uncompressed {raw / 1e6:,.3g} MB")
    if count:
        print_returns(episodes.episode_return, console)


def print_returns(returns: np.ndarray, console: Any) -> None:
    """Prints a histogram of episode returns."""
    low, middle, high = np.percentile(returns, (25, 50, 75))
    console.print(
        f"episode return {returns.mean():.4g} ± {returns.std():.3g}, "
        f"quartiles {low:.4g}, {middle:.4g}, {high:.4g}"
    )
    counts, edges = np.histogram(returns, bins=10)
    for bin_count, left, right in zip(counts, edges[:-1], edges[1:], strict=True):
        bar = "█" * math.ceil(40 * bin_count / counts.max())
        console.print(f"{left:>10.4g} to {right:<10.4g} {bin_count:>9,} {bar}", highlight=False)


def convert(vault: StoredVault, to: Path, low: float, high: float, ends_as_terminals: bool) -> Path:
    """Writes a part of a vault, or all of it, as another vault; returns that.

    Args:
        vault: the old one.
        to: the folder of the new one.
        low: percentile of the episodes, ordered by return, from which on they are kept.
        high: up to which.
        ends_as_terminals: sets `terminals` where an episode was cut, too, for readers that look
            at nothing else.
    """
    if not 0 <= low < high <= 100:
        raise UserError(
            f"--percentiles {low:g} {high:g} must be from 0 to 100, the lower one first."
        )
    steps = read_steps(vault)
    episodes = find_episodes(steps)
    order = np.argsort(episodes.episode_return, kind="stable")
    first, last = (round(len(order) * part / 100) for part in (low, high))
    if first == last:
        raise UserError(f"{vault.folder} has no episodes between percentiles {low:g} and {high:g}.")
    steps = select(steps, episodes, np.sort(order[first:last]))
    if ends_as_terminals:
        steps["terminals"] = steps["terminals"].astype(bool) | steps["truncations"].astype(bool)
    return write_vault(to, steps, [vault])


def merge(vaults: list[StoredVault], to: Path) -> Path:
    """Writes the episodes of several vaults, one after the other, as one; returns it."""
    for vault in vaults[1:]:
        if (vault.shapes, vault.dtypes) != (vaults[0].shapes, vaults[0].dtypes):
            raise UserError(
                f"{vault.folder} can't be merged with {vaults[0].folder}: {vault.shapes} "
                f"{vault.dtypes} against {vaults[0].shapes} {vaults[0].dtypes}."
            )
    parts = []
    for vault in vaults:
        part = read_steps(vault)
        episodes = find_episodes(part)
        parts.append(select(part, episodes, np.arange(len(episodes.end))))  # no unfinished one
    steps = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return write_vault(to, steps, vaults)


def write_vault(folder: Path, steps: Steps, sources: list[StoredVault]) -> Path:
    """Writes a new vault with what is known of the first of its sources; returns its folder."""
    own = ("version", "structure_shape", "structure_dtype")
    metadata = {name: x for name, x in sources[0].metadata.items() if name not in own}
    metadata["made_from"] = [str(vault.folder) for vault in sources]
    with closing(VaultWriter(folder, metadata)) as writer:
        writer.write(steps)
    return folder


def main(arguments: list[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m mava.vault", description="Flashbax vaults.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("describe", help="what a vault holds, and its returns")
    command.add_argument("path", type=Path, help="a vault, or a folder with one in it")
    command = commands.add_parser(
        "convert", help="a part of a vault, or another form, as a new one"
    )
    command.add_argument("path", type=Path, help="a vault, or a folder with one in it")
    target = command.add_mutually_exclusive_group(required=True)
    target.add_argument("--to", help="folder of the new vault; a bare name: beside the old one")
    target.add_argument(
        "--subsets",
        action="store_true",
        help="Poor, Medium, Good: thirds of the episodes by return",
    )
    command.add_argument(
        "--percentiles", type=float, nargs=2, metavar=("LOW", "HIGH"),
        help="of the episodes, ordered by return",
    )  # fmt: skip
    command.add_argument(
        "--ends-as-terminals", action="store_true", help="terminals at the time limit, too"
    )
    command = commands.add_parser("merge", help="several vaults as one")
    command.add_argument("paths", type=Path, nargs="+")
    command.add_argument("--to", type=Path, required=True, help="folder of the new vault")
    chosen = parser.parse_args(arguments)
    if chosen.command == "describe":
        describe(find_vault(chosen.path))
        return
    if chosen.command == "merge":
        print(merge([find_vault(path) for path in chosen.paths], chosen.to))
        return
    vault = find_vault(chosen.path)
    beside = vault.folder.parent
    if not chosen.subsets:
        low, high = chosen.percentiles or (0, 100)
        to = Path(chosen.to) if "/" in chosen.to else beside / chosen.to
        print(convert(vault, to, low, high, chosen.ends_as_terminals))
        return
    if chosen.percentiles:
        raise UserError("--subsets has percentiles of its own: leave out --percentiles.")
    taken = [name for name in SUBSETS if (beside / name).exists()]
    if taken:
        raise UserError(f"{', '.join(taken)} in {beside}: there already.")
    for index, name in enumerate(SUBSETS):
        low, high = 100 * index / len(SUBSETS), 100 * (index + 1) / len(SUBSETS)
        print(convert(vault, beside / name, low, high, chosen.ends_as_terminals))


if __name__ == "__main__":
    run_command(main)
