"""Checkpoints of a run, written with orbax while training goes on.

A checkpoint is the folder `checkpoints/<environment steps>` of a run. It holds `about.json`, and as
an orbax checkpoint `arrays`: the bytes of all arrays, one after the other, in the order in which
about.json lists their names, dtypes and shapes. (One by one they took orbax three times as long.)
`buffer`, in the newest checkpoint only, has those of the actor state's field `buffer`. The folder
gets its name when it is complete, so a run killed at any moment leaves no half-written one.
"""

import dataclasses
import json
import logging
import os
import re
import shutil
import sys
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mava.config import Checkpointing, UserError, short_reason
from mava.snapshot import Packed, Progress, Snapshot, to_host, unpack

FORMAT = 1  # of what a checkpoint holds; one more with each change that old code can't read
UNEVALUATED = ".unevaluated"  # suffix of a checkpoint saved between a block and its evaluation


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
        self._saved: Path | None = None

    def start_from(self, stored: Stored | None) -> None:
        """Goes on from this checkpoint; newer ones, which are damaged, and unfinished make way."""
        for pattern in ("*.unfinished", "*.deleted", "*/*.deleted"):
            for path in self._folder.glob(pattern):
                shutil.rmtree(path)
        complete = list_checkpoints(self._folder)
        newer = complete[complete.index(stored.folder) + 1 :] if stored else complete
        for path in newer:
            damaged = path.with_name(f"{path.name}.damaged")
            shutil.rmtree(damaged, ignore_errors=True)
            os.rename(path, damaged)
        self._saved = stored.folder if stored else None

    def save_if_due(self, snapshot: Snapshot) -> None:
        """Saves if the interval is over, unless the last checkpoint is still being written."""
        self.raise_errors()
        saved_step = env_step_of(self._saved) if self._saved else 0
        due = snapshot.progress.env_step - saved_step >= self._options.save_interval_steps
        if self._saved is not None and self._saved.suffix == UNEVALUATED:  # now it is evaluated
            due = True
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
        arrays, buffers = to_host(snapshot)
        about = {**self._about, "progress": dataclasses.asdict(snapshot.progress)}
        path = self._saved = self._folder / checkpoint_name(snapshot)
        self._saving = self._pool.submit(self._write, path, arrays, buffers, about)

    def _write(self, path: Path, arrays: Packed, buffers: Packed, about: dict[str, Any]) -> None:
        try:
            write(path, arrays, buffers, about)
            self._delete_old()
        except Exception as error:
            raise UserError(
                f"Can't save a checkpoint after {about['progress']['env_step']:,} steps "
                f"in {self._folder}: {short_reason(error)}. The checkpoints before it are complete."
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

    # What fails in its threads is raised here, as one sentence; they also log it with a traceback.
    logging.getLogger("absl").setLevel(logging.CRITICAL)


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


def write(folder: Path, arrays: Packed, buffers: Packed, about: dict[str, Any]) -> None:
    """Writes a checkpoint; `folder` appears when it is complete."""
    import orbax.checkpoint as ocp

    unfinished = folder.with_name(f"{folder.name}.unfinished")
    unfinished.mkdir(parents=True)
    items: dict[str, Any] = {}
    for name, (data, layout) in (("arrays", arrays), ("buffer", buffers)):
        if layout:
            items[name] = {"layout": layout, "crc32": zlib.crc32(data.data)}
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                checkpointer.save(unfinished / name, args=ocp.args.PyTreeSave({"data": data}))
    text = json.dumps({**about, "format": FORMAT, "items": items})
    (unfinished / "about.json").write_text(text)
    os.rename(unfinished, folder)


def read(folder: Path, with_buffer: bool = True) -> Stored:
    """Returns a checkpoint; raises UserError for its format, other exceptions if it is damaged."""
    import orbax.checkpoint as ocp

    folder = folder.absolute()
    about = json.loads((folder / "about.json").read_text())
    if about["format"] > FORMAT:
        raise UserError(
            f"{folder} has format {about['format']}; this version reads up to {FORMAT}. "
            "Use the version of the library that wrote it, or a newer one."
        )
    arrays: dict[str, np.ndarray] = {}
    for name, item in about["items"].items():
        if name == "buffer" and not (with_buffer and (folder / name).exists()):
            continue
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            data = checkpointer.restore(folder / name, args=ocp.args.PyTreeRestore())["data"]
        if zlib.crc32(data.data) != item["crc32"]:
            raise ValueError(f"{name} is not what was written")
        arrays |= unpack(Packed(data, item["layout"]))
    return Stored(folder, arrays, about)


def read_newest(folder: Path, with_buffer: bool = True) -> Stored | None:
    """Returns the newest checkpoint that isn't damaged; says which ones are. None: there is none.

    Raises UserError if there are checkpoints and all are damaged.
    """
    found = list_checkpoints(folder)
    for path in reversed(found):
        try:
            stored = read(path, with_buffer)
            if with_buffer and "buffer" in stored.about["items"] and not (path / "buffer").exists():
                if path == found[-1]:
                    raise ValueError("its replay buffer is missing")
                print(
                    f"{path} has no replay buffer, only the newest checkpoint keeps it: the run "
                    "goes on with an empty one.",
                    file=sys.stderr,
                )
            return stored
        except UserError:
            raise
        except Exception as error:
            if not path.exists():  # a run that goes on has deleted it
                return read_newest(folder, with_buffer)
            print(
                f"The checkpoint {path} is damaged, so the one before it is used: "
                f"{short_reason(error)}.",
                file=sys.stderr,
            )
    if found:
        raise UserError(f"All checkpoints in {folder} are damaged.")
    return None


def read_checkpoint(run_folder: Path, which: str, with_buffer: bool = True) -> Stored:
    """Returns the checkpoint "best" or "last" (the newest one), or that of an environment step."""
    folder = run_folder / "checkpoints"
    steps = {env_step_of(path): path for path in list_checkpoints(folder)}
    if not steps:
        raise UserError(f"There are no checkpoints in {run_folder}.")
    if which in ("best", "last"):
        stored = read_newest(folder, with_buffer)
        assert stored is not None
        return stored
    if not which.isdecimal() or int(which) not in steps:
        raise UserError(
            f"checkpoint={which} must be best, last or one of the steps "
            f"{', '.join(map(str, steps))}."
        )
    try:
        return read(steps[int(which)], with_buffer)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"The checkpoint {steps[int(which)]} is damaged: {short_reason(error)}."
        ) from error
