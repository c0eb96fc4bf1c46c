"""Flashbax vaults on disk: found, read and written.

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

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock, Timeout

from mava.config import UserError, flat_names, short_reason

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
    found = sorted(
        folder
        for folder in stores
        if (folder / "metadata.json").exists() and folder.suffix != ".damaged"
    )
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
        shapes = flat_names(metadata["structure_shape"], "/")
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
        dtypes=flat_names(metadata["structure_dtype"], "/"),
        metadata=metadata,
    )


def open_array(folder: Path, name: str) -> Any:
    """Returns the TensorStore of one of a vault's arrays, as flashbax 0.1.3 stores it."""
    import tensorstore

    kvstore = {"driver": "ocdbt", "base": f"file://{folder.resolve()}", "path": name}
    return tensorstore.open({"driver": "zarr", "kvstore": kvstore}).result()


def read_steps(vault: StoredVault, names: tuple[str, ...] | None = None) -> Steps:
    """Returns a vault's arrays (T, ...), all of them or those named; raises UserError."""
    missing = [name for name in names or () if name not in vault.shapes]
    if missing:
        raise UserError(f"The vault {vault.folder} lacks {', '.join(missing)}.")
    arrays = {
        name: open_array(vault.folder, name.replace("/", ".") + ".")
        for name in names or vault.shapes
    }
    reads = {name: array[0, : vault.num_steps].read() for name, array in arrays.items()}
    return {name: read.result() for name, read in reads.items()}


def bytes_on_disk(folder: Path) -> int:
    """Returns the size of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def episode_ends(steps: Steps) -> np.ndarray:
    """Returns which steps end an episode, bool (T,)."""
    return np.all(steps["terminals"].astype(bool) | steps["truncations"].astype(bool), axis=-1)


class VaultWriter:
    """Appends steps to one vault; the only one to do so until it is closed."""

    def __init__(self, folder: Path, metadata: dict[str, Any], keep: int | None = None) -> None:
        """Args:
        folder: of the vault. It is made when the first steps are written.
        metadata: further entries of metadata.json.
        keep: goes on with a vault, of which at most so many steps are kept; None: a new one.

        Raises UserError if a new one is there already, another process writes to it, or it can't
        be written there.
        """
        self.folder = folder.absolute()
        self.num_steps = 0
        self._metadata = metadata
        self._vault: Any = None
        self._lock = FileLock(f"{self.folder}.lock")
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(blocking=False)
        except Timeout as error:
            raise UserError(f"{folder}: another process is writing this vault.") from error
        except OSError as error:
            raise UserError(f"Can't write the vault {folder}: {error.strerror}.") from error
        if self.folder.exists() and keep is None:
            self.close()
            raise UserError(f"{folder} is there already: a vault is not written twice.")
        if self.folder.exists():
            self._go_on(keep or 0)
        if self.num_steps < (keep or 0):
            print(
                f"The vault {folder} has {self.num_steps:,} of the {keep:,} steps that the "
                "checkpoint knows; the others were not written before the run was killed.",
                file=sys.stderr,
            )

    def _go_on(self, keep: int) -> None:
        """Opens a vault, of which at most so many steps are kept; moves a damaged one away."""
        try:
            self._vault = self._open(None)
            self.num_steps = self._vault.vault_index = min(keep, self._vault.vault_index)
            open_array(self.folder, "vault_index").write(self.num_steps).result()
        except (OSError, ValueError, KeyError) as error:
            damaged = self.folder.with_name(f"{self.folder.name}.damaged")
            print(
                f"The vault {self.folder} can't be read and is moved to {damaged}; another one is "
                f"begun: {short_reason(error)}.",
                file=sys.stderr,
            )
            os.rename(self.folder, damaged)
            self._vault = None

    def close(self) -> None:
        """Lets others write to it."""
        self._lock.release()
        Path(self._lock.lock_file).unlink(missing_ok=True)

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
