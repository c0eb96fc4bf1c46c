"""Flashbax vaults on disk: `python -m mava.vault describe|convert|merge <path>`.

A vault is a folder <path>/<source>/<environment>/<scenario>.vlt/<uid>. Ours are in the layout that
OG-MARL's systems read (github.com/instadeepai/og-marl): arrays with the axes (1, T, ...), one
stream of T steps, whole episodes laid end to end:

    observations (N, ...) float32      what each agent acted on, without an agent id
    actions      (N, ...)              int32, or float32 in [-1, 1]
    rewards      (N,) float32
    terminals    (N,) bool             the episode really ended with this step
    truncations  (N,) bool             it was cut by its time limit
    infos/state  (S,) float32          the global state before the action
    infos/legals (N, A) float32        1 for legal actions, before the action; if discrete
"""

import argparse
import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mava.config import UserError, run_command, short_reason

# Gzip, Vault's default, takes longer than training. Readers find the compressor in the vault.
COMPRESSION = {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1}

Steps = dict[str, Any]  # arrays (T, ...) by name, "/" between the parts of a name


class StoredVault(NamedTuple):
    """What is known of a vault without reading its steps."""

    folder: Path
    num_steps: int
    shapes: dict[str, tuple[int, ...]]  # of one step, by name
    dtypes: dict[str, str]
    metadata: dict[str, Any]


def find_vault(path: Path) -> StoredVault:
    """Returns the only vault in a folder or below it; raises UserError."""
    stores = (file.parent for file in path.rglob("manifest.ocdbt"))
    found = sorted(folder for folder in stores if (folder / "metadata.json").exists())
    if not found:
        raise UserError(f"{path} holds no vault.")
    if len(found) > 1:
        names = "".join(f"\n  {folder}" for folder in found)
        raise UserError(f"{path} holds {len(found)} vaults, name one:{names}")
    return open_vault(found[0])


def open_vault(folder: Path) -> StoredVault:
    """Returns the vault in a folder; raises UserError."""
    try:
        metadata = json.loads((folder / "metadata.json").read_text())
        shapes = flat(metadata["structure_shape"])
        sizes = {
            name: tuple(map(int, text.strip("()").rstrip(",").split(",")))
            for name, text in shapes.items()
        }
        num_steps = int(open_array(folder, "vault_index").read().result()[0])
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder} is no vault: {error}") from error
    if any(size[0] != 1 for size in sizes.values()):
        raise UserError(f"{folder} has more than one stream of steps; only one can be read.")
    return StoredVault(
        folder=folder,
        num_steps=num_steps,
        shapes={name: size[2:] for name, size in sizes.items()},
        dtypes=flat(metadata["structure_dtype"]),
        metadata=metadata,
    )


def open_array(folder: Path, name: str) -> Any:
    """Returns the TensorStore of one of a vault's arrays, as flashbax 0.1.3 stores it."""
    import tensorstore

    kvstore = {"driver": "ocdbt", "base": f"file://{folder.resolve()}", "path": name}
    return tensorstore.open({"driver": "zarr", "kvstore": kvstore}).result()


def read_steps(vault: StoredVault, names: tuple[str, ...] | None = None) -> Steps:
    """Returns a vault's arrays (T, ...); all of them, or those named."""
    arrays = {
        name: open_array(vault.folder, name.replace("/", ".") + ".")
        for name in names or vault.shapes
    }
    reads = {name: array[0, : vault.num_steps].read() for name, array in arrays.items()}
    return {name: read.result() for name, read in reads.items()}


def episode_ends(steps: Steps) -> np.ndarray:
    """Returns which steps end an episode, bool (T,)."""
    return np.all(steps["terminals"].astype(bool) | steps["truncations"].astype(bool), axis=-1)


class VaultWriter:
    """Appends steps to one vault; the only one to do so."""

    def __init__(self, folder: Path, metadata: dict[str, Any], keep: int | None = None) -> None:
        """Args:
        folder: of the vault. It is made when the first steps are written.
        metadata: further entries of metadata.json.
        keep: goes on with a vault, of which at most so many steps are kept; None: a new one.

        Raises UserError if a new one is there already.
        """
        self.folder = folder.absolute()
        self.num_steps = 0
        self._metadata = metadata
        self._vault: Any = None
        if self.folder.exists():
            if keep is None:
                raise UserError(f"{folder} is there already: a vault is not written twice.")
            self._vault = self._open(None)
            self.num_steps = self._vault.vault_index = min(keep, self._vault.vault_index)
            open_array(self.folder, "vault_index").write(self.num_steps).result()

    def write(self, steps: Steps) -> None:
        """Appends steps; raises UserError if they can't be written. Few large writes are best."""
        from flashbax.buffers.trajectory_buffer import TrajectoryBufferState

        experience = nested({name: x[None] for name, x in steps.items()})
        length = len(next(iter(steps.values())))
        try:
            if self._vault is None:
                self._vault = self._open(experience)
            # Not Vault's default interval: it takes a full buffer for an empty one.
            state = TrajectoryBufferState(
                experience=experience, current_index=np.int32(length), is_full=np.bool_(False)
            )
            self._vault.write(state, source_interval=(0, length))
        except (OSError, ValueError) as error:
            raise UserError(
                f"Can't write to the vault {self.folder}: {short_reason(error)}. The "
                f"{self.num_steps:,} steps before are complete."
            ) from error
        self.num_steps += length
        assert self._vault.vault_index == self.num_steps

    def _open(self, experience: Any) -> Any:
        from flashbax.vault import Vault

        with silent():
            return Vault(
                vault_name=self.folder.parent.name,
                vault_uid=self.folder.name,
                rel_dir=str(self.folder.parent.parent),
                experience_structure=experience,
                compression=None if experience is None else COMPRESSION,
                metadata=self._metadata,
            )


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Vault prints where it is and how often to write."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def nested(arrays: dict[str, Any]) -> dict[str, Any]:
    """Returns {"infos": {"state": x}} for {"infos/state": x}."""
    tree: dict[str, Any] = {}
    for name, x in arrays.items():
        *parents, leaf = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = x
    return tree


def flat(tree: dict[str, Any], start: str = "") -> dict[str, Any]:
    """Returns {"infos/state": x} for {"infos": {"state": x}}."""
    arrays: dict[str, Any] = {}
    for name, x in tree.items():
        arrays |= flat(x, f"{start}{name}/") if isinstance(x, dict) else {start + name: x}
    return arrays


class Episode(NamedTuple):
    """Where the episodes of a vault are, and what they gave; each (episodes,)."""

    start: np.ndarray  # their first step
    end: np.ndarray  # the step after their last one
    episode_return: np.ndarray  # undiscounted, the mean over agents, as training logs it


def find_episodes(steps: Steps) -> Episode:
    """Returns the episodes of steps (T, ...), of which it needs rewards, terminals, truncations."""
    end = np.flatnonzero(episode_ends(steps)) + 1
    start = np.concatenate([[0], end[:-1]]).astype(end.dtype)
    rewards = np.mean(steps["rewards"], axis=-1, dtype=np.float64)
    so_far = np.concatenate([[0.0], np.cumsum(rewards)])
    return Episode(start=start, end=end, episode_return=so_far[end] - so_far[start])


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
        f"{vault.num_steps:,} steps in {count:,} episodes: {terminated:,} ended, "
        f"{count - terminated:,} were cut by the time limit"
    )
    table = Table("array", "of one step", "dtype", "MB uncompressed")
    table.columns[-1].justify = "right"
    raw = 0
    for name, shape in vault.shapes.items():
        size = vault.num_steps * math.prod(shape) * np.dtype(vault.dtypes[name]).itemsize
        raw += size
        table.add_row(name, str(shape), vault.dtypes[name], f"{size / 1e6:,.1f}")
    console.print(table)
    disk = sum(file.stat().st_size for file in vault.folder.rglob("*") if file.is_file())
    console.print(f"on disk {disk / 1e6:,.1f} MB, {disk / max(raw, 1):.0%} of {raw / 1e6:,.1f} MB")
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
        to: the folder of the new one; a bare name puts it beside the old one.
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
    return write_vault(to if len(to.parts) > 1 else vault.folder.parent / to, steps, [vault])


def merge(vaults: list[StoredVault], to: Path) -> Path:
    """Writes the episodes of several vaults, one after the other, as one; returns it."""
    for vault in vaults[1:]:
        if (vault.shapes, vault.dtypes) != (vaults[0].shapes, vaults[0].dtypes):
            raise UserError(
                f"{vault.folder} can't be merged with {vaults[0].folder}: {vault.shapes} "
                f"{vault.dtypes} against {vaults[0].shapes} {vaults[0].dtypes}."
            )
    parts = [read_steps(vault) for vault in vaults]
    steps = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return write_vault(to, steps, vaults)


def write_vault(folder: Path, steps: Steps, sources: list[StoredVault]) -> Path:
    """Writes a new vault with what is known of the first of its sources; returns its folder."""
    own = ("version", "structure_shape", "structure_dtype")
    metadata = {name: x for name, x in sources[0].metadata.items() if name not in own}
    metadata["made_from"] = [str(vault.folder) for vault in sources]
    VaultWriter(folder, metadata).write(steps)
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
    target.add_argument("--to", type=Path, help="folder of the new vault; a name: beside the old")
    target.add_argument(
        "--subsets",
        action="store_true",
        help="Poor, Medium, Good: thirds of the episodes by return",
    )
    command.add_argument(
        "--percentiles", type=float, nargs=2, default=(0, 100), metavar=("LOW", "HIGH"),
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
    if chosen.subsets:
        for index, name in enumerate(("Poor", "Medium", "Good")):
            low, high = 100 * index / 3, 100 * (index + 1) / 3
            print(convert(vault, Path(name), low, high, chosen.ends_as_terminals))
    else:
        low, high = chosen.percentiles
        print(convert(vault, chosen.to, low, high, chosen.ends_as_terminals))


if __name__ == "__main__":
    run_command(main)
