"""Finished runs, read from their metrics.json: found, checked, merged.

The files are in MARL-eval's format (arXiv:2209.10485), as mava.logger.JsonLogger writes it: one run
a file, or more where they were merged. Nothing is repaired: what is wrong raises UserError, with
file, run and step.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from mava.config import UserError, flat_names
from mava.plan import unit_of

ABSOLUTE = "absolute_metrics"
COUNTERS = ("step_count", "elapsed_time")


class Run(NamedTuple):
    """A finished run; E evaluations."""

    file: Path
    env: str
    task: str
    system: str
    name: str  # "seed_3"
    steps: np.ndarray  # (E,): environment steps, or gradient steps of an offline system
    seconds: np.ndarray  # (E,): since the first evaluation
    values: np.ndarray  # (E,): of the metric that is compared
    score: float  # the metric of the best parameters
    config: dict[str, Any]  # options by dotted name; empty where config.yaml isn't beside the file
    record: dict[str, Any]  # as in the file

    @property
    def where(self) -> str:
        return f"{self.file}, {self.env}/{self.task}/{self.system}/{self.name}"

    @property
    def unit(self) -> str:
        return unit_of(offline=bool(self.config.get("vault")))


def find_files(paths: Iterable[Path], leave_out: Path | None = None) -> list[Path]:
    """Returns the files among `paths` and every metrics.json below its folders, but for one."""
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} does not exist.")
        found = [path] if path.is_file() else sorted(path.rglob("metrics.json"))
        if path.is_dir() and leave_out is not None:
            found = [file for file in found if file.resolve() != leave_out.resolve()]
        if not found:
            raise UserError(f"There is no metrics.json below {path}.")
        files += found
    return list({file.resolve(): file for file in files}.values())


def read_runs(
    file: Path, metric: str, systems: list[str] | None = None, tasks: list[str] | None = None
) -> tuple[list[Run], list[str]]:
    """Returns a file's finished runs, and which of its runs aren't.

    Args:
        file: in MARL-eval's format.
        metric: what is compared.
        systems: those to read, by default all. Others are not even checked.
        tasks: likewise.
    """
    runs, aborted = [], []
    entries = list(_entries(file))
    config = _read_config(file.parent / "config.yaml") if len(entries) == 1 else {}
    for names, record in entries:
        if (tasks and names[1] not in tasks) or (systems and names[2] not in systems):
            continue
        where = f"{file}, {'/'.join(names)}"
        if not isinstance(record, dict):
            raise UserError(f"{where}: this must be an object with the evaluations.")
        if ABSOLUTE not in record:
            count = len(record)
            aborted.append(f"{where}: {count} evaluation{'s' * (count != 1)}, no {ABSOLUTE}")
            continue
        steps, seconds, values, score = _read_record(where, record, metric)
        runs.append(Run(file, *names, steps, seconds, values, score, config, record))
    return runs, aborted


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as it stands in the file: a name can be there twice."""


def _entries(file: Path) -> Iterator[tuple[tuple[str, str, str, str], Any]]:
    """Yields environment, task, system, run and that run's record."""
    try:
        content = json.loads(file.read_text(), object_pairs_hook=_Pairs)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} can't be read as JSON: {error}.") from error
    content = _unique(content, str(file))
    rows: list[tuple[tuple[str, ...], Any]] = [((), content)]
    for level in ("environment", "task", "system", "run"):
        for names, node in rows:
            if not isinstance(node, dict):
                place = f"{file}, {'/'.join(names)}" if names else str(file)
                raise UserError(f"{place}: this must be an object with a name for each {level}.")
        rows = [((*names, name), child) for names, node in rows for name, child in node.items()]
    for names, record in rows:
        env, task, system, run = names
        yield (env, task, system, run), record


def _unique(node: Any, place: str) -> Any:
    """Returns JSON with plain dicts; raises UserError where a name is there twice."""
    if not isinstance(node, _Pairs):
        return node
    table: dict[str, Any] = {}
    for name, value in node:
        if name in table:
            raise UserError(f"{place}: {name} is there twice.")
        table[name] = _unique(value, f"{place}{'/' if ', ' in place else ', '}{name}")
    return table


def _read_record(
    where: str, record: dict[str, Any], metric: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Returns a run's steps, seconds and values (E,), and its score; all is checked."""
    names = [name for name in record if name != ABSOLUTE]
    if not names:
        raise UserError(f"{where}: there is no evaluation.")
    first = 0 if "step_0" in record else 1
    wanted = [f"step_{first + index}" for index in range(len(names))]
    for name in wanted:
        if name not in record:
            raise UserError(f"{where}: {name} is missing; there are {', '.join(names)}.")
    evaluations = [_read_metrics(f"{where}, {name}", record[name]) for name in wanted]
    absolute = _read_metrics(f"{where}, {ABSOLUTE}", record[ABSOLUTE])
    for name, found in zip(wanted, evaluations, strict=True):
        for wanted_metric in (*COUNTERS, metric, *evaluations[0], *absolute):
            if wanted_metric not in found:
                raise UserError(
                    f"{where}, {name}: {wanted_metric} is missing; there are {', '.join(found)}."
                )
        unequal = found.keys() - evaluations[0].keys()
        if unequal:
            raise UserError(f"{where}, {wanted[0]}: {min(unequal)} is missing; {name} has it.")
    if metric not in absolute:
        raise UserError(f"{where}, {ABSOLUTE}: {metric} is missing.")
    steps, seconds, values = (
        np.array([found[name] for found in evaluations]) for name in (*COUNTERS, metric)
    )
    for index in range(1, len(wanted)):
        if steps[index] <= steps[index - 1] or seconds[index] < seconds[index - 1]:
            raise UserError(
                f"{where}, {wanted[index]}: step_count={steps[index]:.0f} and elapsed_time="
                f"{seconds[index]:g} must be above those of the evaluation before, "
                f"{steps[index - 1]:.0f} and {seconds[index - 1]:g}."
            )
    return steps, seconds, values, absolute[metric]


def _read_metrics(where: str, table: Any) -> dict[str, float]:
    """Returns the metrics of an evaluation; of several episodes the mean."""
    if not isinstance(table, dict):
        raise UserError(f"{where}: this must be an object with the metrics.")
    metrics = {}
    for name, value in table.items():
        numbers = value if isinstance(value, list) else [value]
        plain = [type(x) in (int, float) and math.isfinite(x) for x in numbers]
        if not numbers or not all(plain):
            raise UserError(f"{where}: {name}={value} must be a finite number.")
        metrics[name] = sum(numbers) / len(numbers)
    return metrics


def _read_config(file: Path) -> dict[str, Any]:
    """Returns the options in a config.yaml by dotted name; empty if there is none."""
    if not file.exists():
        return {}
    try:
        tree: Any = OmegaConf.to_container(OmegaConf.load(file))
    except (OSError, OmegaConfBaseException, YAMLError) as error:
        raise UserError(f"{file} can't be read: {error}") from error
    return flat_names(tree)


def merge(runs: list[Run], out: Path) -> None:
    """Writes the runs as one MARL-eval file, ordered by name.

    Raises UserError if the file is there with runs that would be lost.
    """
    tree: dict[str, Any] = {}
    for run in sorted(runs, key=order):
        system = tree.setdefault(run.env, {}).setdefault(run.task, {}).setdefault(run.system, {})
        assert run.name not in system  # comparison.check_configs comes before
        system[run.name] = run.record
    if out.exists():
        kept = {run[1:5] for run in runs}
        for names, _ in _entries(out):
            if names not in kept:
                raise UserError(
                    f"--merge {out}: the file is there and would lose {'/'.join(names)}. Name "
                    "another one, or give this one as an input, too."
                )
    temporary = out.with_name(out.name + ".tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(tree, indent=2))
        os.replace(temporary, out)
    except OSError as error:
        raise UserError(f"--merge {out}: {error.strerror}.") from error


def order(run: Run) -> tuple[Any, ...]:
    """Sorts runs by environment, task, system and name."""
    return (run.env, run.task, natural(run.system), natural(run.name))


def natural(name: str) -> list[tuple[float, str]]:
    """Sorts seed_10 after seed_9, and actor_lr=0.001 after actor_lr=3e-4."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[-+]?\d+)?)", name)
    return [(float(x), "") if i % 2 else (-1.0, x) for i, x in enumerate(parts)]
