"""Sweeps: which jobs failed, and which need not run again."""

import contextlib
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import OmegaConf

from mava.config import RunConfig, UserError
from mava.logger import read_record
from mava.summary import first_values, return_of_learners


class RememberFolder(Callback):
    """Hydra calls it in the process that starts the jobs: it alone lists the failed ones."""

    folder: Path | None = None  # of the last sweep that was started

    def on_multirun_start(self, config: Any, **kwargs: Any) -> None:
        RememberFolder.folder = Path(config.hydra.sweep.dir)


@contextlib.contextmanager
def failed_jobs_listed() -> Iterator[None]:
    """Lists the failed jobs of a sweep when it is over; Hydra itself names the first alone."""
    RememberFolder.folder = None
    try:
        yield
    finally:
        folder = RememberFolder.folder
        if folder is not None:
            list_failed(folder)


def list_failed(folder: Path) -> None:
    """Prints what `record_failure` wrote, in the order of the jobs."""
    failed = sorted(folder.glob("failed/*.txt"), key=lambda file: int(file.stem))
    if failed:
        print(f"Failed jobs, {len(failed)}; the others are complete:", file=sys.stderr)
    for file in failed:
        print(f"  {file.read_text()}", file=sys.stderr)


def record_failure(folder: str, number: int, overrides: list[str], error: Exception) -> None:
    """Says at once that a job failed, and writes it to <folder>/failed/<number>.txt for the list.

    Args:
        folder: of the sweep.
        number: of the job.
        overrides: of the job.
        error: what ended it.
    """
    lines = str(error).strip().splitlines() or [""]
    reason = lines[0] if isinstance(error, UserError) else f"{type(error).__name__}: {lines[0]}"
    if not isinstance(error, UserError):
        traceback.print_exception(error)
    print(f"Job {number} failed: {reason}", file=sys.stderr, flush=True)
    path = Path(folder, "failed", f"{number}.txt")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"job {number}, {' '.join(overrides)}: {reason}")


def find_finished(run: RunConfig) -> tuple[Path, float] | None:
    """Returns the folder and the result of a finished run of the same config and system file.

    Args:
        run: what the user asks for.
    """
    pattern = (run.system_name, run.env_name, run.task_name, f"seed_{run.system.seed}")
    wanted = comparable(run.composed)
    for folder in sorted(Path(run.logger.base_exp_path, *pattern).glob("*")):
        config, copy = folder / "config.yaml", folder / run.system_file.name
        if not config.exists() or not copy.exists():
            continue
        if copy.read_bytes() != run.system_file.read_bytes():
            continue
        if comparable(OmegaConf.load(config)) != wanted:
            continue
        record = read_record(folder / "metrics.json")
        last = f"step_{run.arch.num_evaluation - 1}"
        last = "absolute_metrics" if run.arch.absolute_metric else last
        if last in record:
            return folder, return_of_learners(first_values(record[last]), run)
    return None


def comparable(cfg: Any) -> Any:
    """Returns a config as plain values, without what does not change a run."""
    values: Any = OmegaConf.to_container(cfg, resolve=True)
    return {name: x for name, x in values.items() if name != "skip_finished"}
