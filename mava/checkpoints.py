"""Checkpoints of a run, written with orbax while training goes on.

A checkpoint is the folder `checkpoints/<environment steps>` of a run: an orbax checkpoint whose
item `arrays` maps names such as `learner_state/params/actor/...` to arrays, whose item `buffer` has
those of the actor state's field `buffer` (newest checkpoint only), and whose item `about` is JSON.
It gets its name when it is complete, so a run killed at any moment leaves no half-written one.
"""

import dataclasses
import logging
import math
import os
import re
import shutil
import sys
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from mava.config import Checkpointing, UserError

FORMAT = 1  # of what a checkpoint holds; one more with each change that old code can't read
UNEVALUATED = ".unevaluated"  # suffix of a checkpoint saved between a block and its evaluation
DAMAGED = ".damaged"
BUFFER = "actor_state/buffer"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is."""

    num_blocks: int = 0  # trained
    num_evaluations: int = 0  # of their parameters: as many, or one fewer
    num_updates: int = 0
    env_step: int = 0  # environment steps, on all devices
    train_seconds: float = 0.0
    steps_per_second: float = 0.0  # of the last block
    elapsed: float = 0.0  # seconds from the end of the first block to that of the last
    mean_return: float = math.nan  # of the last evaluation
    best_return: float = -math.inf  # of the best one


class Snapshot(NamedTuple):
    """All of a run between two blocks."""

    learner_state: Any  # the same on all devices
    actor_state: Any  # (D, ...) or, with more than one replica, (D, U, ...)
    best_params: Any  # for System.act; the initial ones before the first evaluation
    progress: Progress

    def trees(self) -> dict[str, Any]:
        """Returns what consists of arrays, by name."""
        return {name: x for name, x in self._asdict().items() if name != "progress"}


class Stored(NamedTuple):
    """A checkpoint read from disk."""

    folder: Path
    arrays: dict[str, np.ndarray]
    about: dict[str, Any]

    @property
    def progress(self) -> Progress:
        return Progress(**self.about["progress"])


class Checkpoints:
    """Saves snapshots of one run in a thread of its own, and deletes old ones."""

    def __init__(self, folder: Path, options: Checkpointing, about: dict[str, Any]) -> None:
        """Args:
        folder: the run's checkpoints.
        options: how often to save and how many to keep.
        about: what every checkpoint of the run says of it, as JSON.
        """
        self._folder = folder.absolute()  # orbax asks for that
        self._options = options
        self._about = about
        self._pool = ThreadPoolExecutor(1)
        self._saving: Future = self._pool.submit(_import_orbax)
        self._saved_step: int | None = None

    def start_from(self, stored: Stored | None) -> None:
        """Goes on from this checkpoint: what is newer, or unfinished, makes way."""
        good = list_checkpoints(self._folder)
        good = good[: good.index(stored.folder) + 1] if stored else []
        for path in self._folder.glob("*"):
            if path in good:
                continue
            if path.name.endswith(DAMAGED):
                continue
            elif path in list_checkpoints(self._folder):
                os.replace(path, path.with_name(f"{path.name}{DAMAGED}"))
            else:
                shutil.rmtree(path)
        self._saved_step = stored.progress.env_step if stored else None

    def save_if_due(self, snapshot: Snapshot) -> None:
        """Saves if the interval is over, unless the last checkpoint is still being written."""
        self.raise_errors()
        env_step = snapshot.progress.env_step
        due = env_step - (self._saved_step or 0) >= self._options.save_interval_steps
        if self._options.save_model and due and self._saving.done():
            self._submit(snapshot)

    def save_now(self, snapshot: Snapshot) -> None:
        """Saves a snapshot, if it isn't saved yet, and waits until it is on disk."""
        if not self._options.save_model:
            return
        self._saving.result()
        if not (self._folder / checkpoint_name(snapshot)).exists():
            self._submit(snapshot)
        self._saving.result()

    def raise_errors(self) -> None:
        """Raises UserError if the last checkpoint could not be written."""
        if self._saving.done():
            self._saving.result()

    def close(self) -> None:
        self._pool.shutdown()

    def _submit(self, snapshot: Snapshot) -> None:
        """Copies the arrays, which the next block may overwrite, and writes them meanwhile."""
        arrays = to_host(snapshot)
        about = {**self._about, "progress": dataclasses.asdict(snapshot.progress)}
        self._saved_step = snapshot.progress.env_step
        self._saving = self._pool.submit(self._write, checkpoint_name(snapshot), arrays, about)

    def _write(self, name: str, arrays: dict[str, np.ndarray], about: dict[str, Any]) -> None:
        try:
            write(self._folder / name, arrays, about)
            self._delete_old()
        except Exception as error:
            raise UserError(
                f"Can't save a checkpoint at {about['progress']['env_step']:,} environment steps "
                f"in {self._folder}: {_reason(error)}. The checkpoints before it are complete."
            ) from error

    def _delete_old(self) -> None:
        """Keeps the newest and the first of each period; a buffer only in the newest."""
        folders = list_checkpoints(self._folder)
        keep = set(folders[-self._options.max_to_keep :])
        if self._options.keep_period is not None:
            periods: set[int] = {0}
            for folder in folders:
                period = env_step_of(folder) // self._options.keep_period
                if period not in periods:
                    keep.add(folder)
                periods.add(period)
        for folder in folders[:-1]:
            if folder not in keep or env_step_of(folder) == env_step_of(folders[-1]):
                _delete(folder)
            elif (folder / "buffer").exists():
                _delete(folder / "buffer")


def _import_orbax() -> None:
    """Takes half a second; done while the programs compile."""
    import orbax.checkpoint  # noqa: F401

    # What fails in its threads is raised here, as one sentence; they also log it with a traceback,
    # and the arrays after the first that can't be written find the event loop closed.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    hook = sys.unraisablehook

    def less_noise(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    sys.unraisablehook = less_noise


def _reason(error: Exception) -> str:
    """Returns the end of what tensorstore says, after all the paths."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rsplit('": ', 1)[-1].rstrip(".")


def _delete(folder: Path) -> None:
    """Deletes a folder that must not be found half deleted."""
    doomed = folder.with_name(f"{folder.name}.deleted")
    os.rename(folder, doomed)
    shutil.rmtree(doomed)


def checkpoint_name(snapshot: Snapshot) -> str:
    progress = snapshot.progress
    evaluated = progress.num_evaluations == progress.num_blocks
    return f"{progress.env_step}{'' if evaluated else UNEVALUATED}"


def env_step_of(folder: Path) -> int:
    return int(folder.name.removesuffix(UNEVALUATED))


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns the complete checkpoints, oldest first; of equal steps the evaluated one last."""
    pattern = re.compile(rf"\d+({re.escape(UNEVALUATED)})?")
    found = [path for path in folder.glob("*") if pattern.fullmatch(path.name)]
    return sorted(found, key=lambda path: (env_step_of(path), not path.suffix))


def to_host(snapshot: Snapshot) -> dict[str, np.ndarray]:
    """Returns copies of all arrays of a snapshot by name; keys as their data."""
    named = named_leaves(snapshot.trees())
    for leaf in named.values():
        leaf.copy_to_host_async()
    return {name: np.array(leaf) for name, leaf in named.items()}


def named_leaves(trees: dict[str, Any]) -> dict[str, Any]:
    """Returns the arrays by their path in the trees, "/" between the parts; keys as their data."""
    named = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(trees):
        if _is_key(leaf) and isinstance(leaf, jax.Array):
            leaf = jax.random.key_data(leaf)
        elif _is_key(leaf):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        named[_name(path)] = leaf
    return named


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def fill(stored: Stored, trees: dict[str, Any]) -> dict[str, Any]:
    """Returns the trees with the checkpoint's values, placed on the devices as the old ones.

    They must fit, see `first_misfit`. A buffer that the checkpoint lost keeps the given values.
    """

    def value(path: tuple, leaf: jax.Array) -> jax.Array:
        name = _name(path)
        if name.startswith(BUFFER) and name not in stored.arrays:
            return leaf
        array: Any = stored.arrays[name]
        if _is_key(leaf):
            array = jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))
        return jax.device_put(array, leaf.sharding)

    return jax.tree_util.tree_map_with_path(value, trees)


def write(folder: Path, arrays: dict[str, np.ndarray], about: dict[str, Any]) -> None:
    """Writes a checkpoint; `folder` appears when it is complete."""
    import orbax.checkpoint as ocp

    buffer = {name: x for name, x in arrays.items() if name.startswith(BUFFER)}
    items: dict[str, Any] = {
        "arrays": ocp.args.PyTreeSave({n: x for n, x in arrays.items() if n not in buffer}),
        "about": ocp.args.JsonSave(
            {
                **about,
                "format": FORMAT,
                "crc32": {name: _checksum(x) for name, x in arrays.items()},
            }
        ),
    }
    if buffer:
        items["buffer"] = ocp.args.PyTreeSave(buffer)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(unfinished, ocp.args.Composite(**items), force=True)
    os.rename(unfinished, folder)


def _checksum(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).tobytes())


def read(folder: Path) -> Stored:
    """Returns a checkpoint; raises an exception of many kinds if it is damaged."""
    import orbax.checkpoint as ocp

    folder = folder.absolute()
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        names = ["arrays"] + (["buffer"] if (folder / "buffer").exists() else [])
        about = checkpointer.restore(folder, ocp.args.Composite(about=ocp.args.JsonRestore())).about
        if about["format"] > FORMAT:
            raise UserError(
                f"{folder} has format {about['format']}; this version reads up to {FORMAT}. "
                "Use the version of the library that wrote it, or a newer one."
            )
        items = checkpointer.restore(
            folder, ocp.args.Composite(**{name: ocp.args.PyTreeRestore() for name in names})
        )
    arrays = {name: x for item in names for name, x in items[item].items()}
    for name, checksum in about["crc32"].items():
        lost = name.startswith(BUFFER) and "buffer" not in names
        if not lost and _checksum(arrays[name]) != checksum:
            raise ValueError(f"{name} is not what was written")
    return Stored(folder, arrays, about)


def read_newest(folder: Path) -> Stored | None:
    """Returns the newest checkpoint that isn't damaged; says which ones are. None: there is none.

    Raises UserError if there are checkpoints and all are damaged.
    """
    found = list_checkpoints(folder)
    for path in reversed(found):
        try:
            return read(path)
        except UserError:
            raise
        except Exception as error:
            print(
                f"The checkpoint {path} is damaged, so the one before it is used: "
                f"{_reason(error)}.",
                file=sys.stderr,
            )
    if found:
        raise UserError(f"All checkpoints in {folder} are damaged.")
    return None


def read_checkpoint(run_folder: Path, which: str) -> Stored:
    """Returns the checkpoint "best" or "last" (the newest one), or that of an environment step."""
    folder = run_folder / "checkpoints"
    steps = {env_step_of(path): path for path in list_checkpoints(folder)}
    if not steps:
        raise UserError(f"There are no checkpoints in {run_folder}.")
    if which in ("best", "last"):
        stored = read_newest(folder)
        assert stored is not None
        return stored
    if not which.isdecimal() or int(which) not in steps:
        raise UserError(
            f"checkpoint={which} must be best, last or one of the environment steps "
            f"{', '.join(map(str, steps))}."
        )
    try:
        return read(steps[int(which)])
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"The checkpoint {steps[int(which)]} is damaged: {_reason(error)}."
        ) from error


def first_misfit(stored: Stored, trees: dict[str, Any]) -> str | None:
    """Returns what is wrong with the first array of `trees` that the checkpoint can't give.

    Args:
        stored: the checkpoint.
        trees: part of a snapshot by name, such as {"best_params": ...}, of arrays or their shapes.
    """
    wanted = named_leaves(trees)
    for name, leaf in wanted.items():
        if name.startswith(BUFFER) and name not in stored.arrays:
            continue
        if name not in stored.arrays:
            return f"{name} is missing in the checkpoint"
        saved = stored.arrays[name]
        if saved.shape != leaf.shape or saved.dtype != leaf.dtype:
            return (
                f"{name} is {saved.dtype} {saved.shape} in the checkpoint, "
                f"{leaf.dtype} {leaf.shape} here"
            )
    prefixes = tuple(f"{name}/" for name in trees)
    for name in stored.arrays:
        if name.startswith(prefixes) and name not in wanted:
            return f"{name} of the checkpoint is unknown here"
    return None
