"""Which runs are compared, and whether they can be.

Axes: R runs, T tasks, E evaluations.
"""

import itertools
import re
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

import numpy as np

from mava import results, statistics
from mava.config import UserError
from mava.results import Run
from mava.statistics import Estimate

LABELS = {"mean_episode_return": "mean episode return", "win_rate": "win rate (%)"}
# What runs of one system on one task may differ in: seed, paths, and what is only logged.
FREE = re.compile(
    r"system\.seed|resume|vault|arch\.(compilation_cache|num_seeds)"
    r"|logger\.(?!checkpointing\.load_model|checkpointing\.load_args\.checkpoint).*"
)
# Budgets are rounded up to whole updates: by so much runs of one task may differ in length.
LENGTH_TOLERANCE = 0.05

Task = tuple[str, str]  # environment and task
Axis = Literal["steps", "seconds"]
AXES: tuple[Axis, ...] = get_args(Axis)


class Comparison(NamedTuple):
    """Runs that can be compared: every system has runs of every task."""

    metric: str
    tasks: list[Task]
    systems: list[str]
    runs: dict[tuple[str, Task], list[Run]]  # by system and task
    limits: dict[Task, tuple[float, float]]  # of the metric, over all that is compared
    num_resamples: int  # of the bootstrap
    up_to: float | None  # the step at which the runs were cut, if they were

    @property
    def unit(self) -> str:
        return next(iter(self.runs.values()))[0].unit

    def complete(self, system: str) -> list[list[Run]]:
        """Returns a system's runs, T lists of R: those whose seed it has on every task."""
        tables = [{run.name: run for run in self.runs[system, task]} for task in self.tasks]
        names = [name for name in tables[0] if all(name in table for table in tables)]
        if not names:
            raise UserError(
                f"{system} has no seed in common on all of {', '.join(map(' '.join, self.tasks))}: "
                "choose with --tasks."
            )
        return [[table[name] for name in names] for table in tables]

    def scores(self, system: str) -> np.ndarray:
        """Returns the normalised scores (R, T)."""
        columns = [
            statistics.normalise(np.array([run.score for run in runs]), *self.limits[task])
            for task, runs in zip(self.tasks, self.complete(system), strict=True)
        ]
        return np.stack(columns, axis=1)

    def rng(self) -> np.random.Generator:
        """Returns the same one for every interval: a system's don't hang on the others."""
        return np.random.default_rng(0)


def compare(
    runs: list[Run], metric: str, num_resamples: int, up_to: float | None = None
) -> Comparison:
    """Returns the runs by system and task; raises UserError where one is lacking."""
    table: dict[tuple[str, Task], list[Run]] = {}
    for run in sorted(runs, key=results.order):
        table.setdefault((run.system, (run.env, run.task)), []).append(run)
    systems = sorted({run.system for run in runs}, key=results.natural)
    tasks = sorted({(run.env, run.task) for run in runs})
    for system, task in itertools.product(systems, tasks):
        if (system, task) not in table:
            raise UserError(
                f"{system} has no finished run on {' '.join(task)}, which others have: choose "
                "what to compare with --systems and --tasks."
            )
    limits = {}
    for task in tasks:
        of_task = [run for system in systems for run in table[system, task]]
        values = np.concatenate([[*run.values, run.score] for run in of_task])
        limits[task] = (float(values.min()), float(values.max()))
    return Comparison(metric, tasks, systems, table, limits, num_resamples, up_to)


def curve(
    comparison: Comparison, runs: list[list[Run]], against: Axis, normalised: bool
) -> tuple[np.ndarray, Estimate]:
    """Returns x (E,) and the interquartile mean of runs (T lists of R) there.

    Where the runs were evaluated at other x than each other (always, in seconds), their values are
    interpolated between evaluations, as far as all of them go.
    """
    every_x = [getattr(run, against) for column in runs for run in column]
    if all(np.array_equal(x, every_x[0]) for x in every_x):
        x = every_x[0]
    else:
        start, end = max(x[0] for x in every_x), min(x[-1] for x in every_x)
        if start >= end:
            raise UserError(
                f"Of {runs[0][0].system} one run has had its last evaluation at {end:,.0f} "
                f"{against}, another its first at {start:,.0f}: choose with --tasks."
            )
        x = np.linspace(start, end, max(map(len, every_x)))
    values = [[np.interp(x, getattr(run, against), run.values) for run in col] for col in runs]
    if normalised:
        values = [
            [statistics.normalise(y, *comparison.limits[run.env, run.task]) for y in column]
            for column, (run, *_) in zip(values, runs, strict=True)
        ]
    curves = np.swapaxes(np.array(values), 0, 1)  # (R, T, E)
    return x, statistics.estimate_curve(curves, comparison.rng(), comparison.num_resamples)


def explain(comparison: Comparison) -> list[str]:
    """Returns what the numbers and figures are, in sentences."""
    scores = "A run's score is that of its best parameters, evaluated anew (absolute metric)."
    if comparison.up_to is not None:
        scores = (
            f"A run's score is that of its last evaluation up to {comparison.up_to:,.0f} steps."
        )
    return [
        f"Metric: {LABELS[comparison.metric]}. {scores} IQM is the interquartile mean; intervals "
        f"are 95 % stratified bootstrap intervals of {comparison.num_resamples:,} resamples.",
        "Over all tasks the metric is normalised: within each task 0 is the lowest and 1 the "
        "highest value of any run and evaluation that is compared here.",
        "Where runs were evaluated at different steps or times, curves are interpolated between "
        "evaluations and end where the shortest run, or task, ends.",
    ]


def describe(comparison: Comparison) -> Iterator[str]:
    """Yields which seeds are compared, a line for each task and system."""
    for task, system in itertools.product(comparison.tasks, comparison.systems):
        runs = comparison.runs[system, task]
        names = ", ".join(run.name.removeprefix("seed_") for run in runs)
        count = f"{len(runs)} run{'s' * (len(runs) != 1)}"
        steps = f"{runs[0].steps[-1]:,.0f} {runs[0].unit}"
        yield f"{' '.join(task)}, {system}: {count}, seeds {names}; {steps}"


def find_notes(comparison: Comparison) -> Iterator[str]:
    """Yields what a reader should know of the comparison."""
    for system in comparison.systems:
        complete = {run.name for run in comparison.complete(system)[0]}
        columns = [comparison.runs[system, task] for task in comparison.tasks]
        every = {run.name for runs in columns for run in runs}
        rest = sorted(every - complete, key=results.natural)
        if rest:
            yield (
                f"{system} has no run of {', '.join(rest)} on some task: over all tasks only "
                f"{', '.join(sorted(complete, key=results.natural))} count."
            )
        if len(complete) == 1:
            yield f"{system} has one run a task: no intervals."
    runs = [run for column in comparison.runs.values() for run in column]
    bare = sum(not run.config for run in runs)
    if bare:
        yield (
            f"{bare} of {len(runs)} runs have no config.yaml beside them: that the runs of a "
            "system had equal options is not checked."
        )


def group(runs: list[Run], options: list[str]) -> list[Run]:
    """Returns the runs with the values of these options in their system's name."""
    for option in options:
        if not any(option in run.config for run in runs):
            raise UserError(f"--group-by {option}: no run's config.yaml has that option.")
    for run in runs:
        if options and not run.config:
            raise UserError(f"--group-by: {run.file} has no config.yaml of its own beside it.")
    lasts = [option.rsplit(".", 1)[-1] for option in options]
    shorts = [x if lasts.count(x) == 1 else full for x, full in zip(lasts, options, strict=True)]
    grouped = []
    for run in runs:
        parts = [
            f"{short}={run.config[option]}".replace(", ", " ").replace(",", " ")
            for short, option in zip(shorts, options, strict=True)
            if option in run.config
        ]
        grouped.append(run._replace(system=" ".join([run.system, *parts])))
    return grouped


def check_names(runs: list[Run]) -> None:
    """Refuses names that differ only by case, and commas in a system's: MARL-eval lowers the
    first and splits at the second.
    """
    seen: dict[tuple[str, ...], tuple[tuple[str, ...], Run]] = {}
    for run in runs:
        if "," in run.system:
            raise UserError(f"{run.where}: MARL-eval takes no comma in a system's name.")
        task = (run.env, run.task)
        for kind, names in (
            ("environment", (run.env,)),
            ("task", task),
            ("system", (run.system,)),
            ("run", (*task, run.system, run.name)),
        ):
            lowered = (kind, *(name.lower() for name in names))
            before, other = seen.setdefault(lowered, (names, run))
            if before != names:
                raise UserError(
                    f"{other.file} and {run.file}: the {kind} names {before[-1]} and {names[-1]} "
                    "differ only by case, and MARL-eval takes them for one."
                )


def check_configs(runs: list[Run]) -> None:
    """Refuses equal runs, and other options than the seed and paths under one system and task."""
    runs_by_name: dict[tuple[str, ...], Run] = {}
    first: dict[tuple[str, ...], Run] = {}
    for run in runs:
        key = (run.env, run.task, run.system)
        other = runs_by_name.setdefault((*key, run.name), run)
        if other is not run:
            found = differences(other, run)
            reason = (
                f"differ in {_suggest(found)}"
                if found
                else "have equal options. Name folders that hold only one of them."
            )
            raise UserError(
                f"Both {other.file} and {run.file} are {'/'.join((*key, run.name))}; they {reason}"
            )
        if not run.config:
            continue
        other = first.setdefault(key, run)
        found = differences(other, run)
        if found:
            raise UserError(
                f"{other.file} and {run.file}, both {run.system} on {run.env} {run.task}, differ "
                f"in {_suggest(found)}"
            )


def _suggest(found: list[str]) -> str:
    """Returns the rest of the sentence on differences, of which there can be dozens."""
    more = f" and {len(found) - 3} more options" if len(found) > 3 else ""
    options = " ".join(f"--group-by {difference.split(' ', 1)[0]}" for difference in found[:3])
    return f"{', '.join(found[:3])}{more}. Tell them apart with {options}."


def differences(a: Run, b: Run) -> list[str]:
    """Returns in which options two runs differ, but for the seed and paths."""
    if not (a.config and b.config):
        return []
    absent = "absent"
    return [
        f"{name} ({a.config.get(name, absent)} and {b.config.get(name, absent)})"
        for name in a.config | b.config
        if not FREE.fullmatch(name) and a.config.get(name, absent) != b.config.get(name, absent)
    ]


def cut(run: Run, up_to: float) -> Run:
    """Returns a run as it was after `up_to` steps; its score is that of its last evaluation."""
    num = int(np.sum(run.steps <= up_to))
    if not num:
        raise UserError(f"--up-to {up_to:g}: {run.where} begins at {run.steps[0]:,.0f} steps.")
    if run.steps[-1] < up_to * (1 - LENGTH_TOLERANCE):
        raise UserError(f"--up-to {up_to:g}: {run.where} ends at {run.steps[-1]:,.0f} steps.")
    steps, seconds, values = run.steps[:num], run.seconds[:num], run.values[:num]
    return run._replace(steps=steps, seconds=seconds, values=values, score=float(values[-1]))


def check_lengths(runs: list[Run]) -> None:
    """Refuses runs of one task that were not evaluated alike.

    Those of one system must have been at the same steps; those of two must end within 5 %, and
    count the same.
    """
    of_system: dict[tuple[str, ...], Run] = {}
    of_task: dict[tuple[str, ...], Run] = {}
    for run in runs:
        other = of_task.setdefault((run.env, run.task), run)
        if other.unit != run.unit:
            raise UserError(
                f"{other.where} counts {other.unit} and {run.where} {run.unit}: plot them apart."
            )
        _check_ends(other, run)
        other = of_system.setdefault((run.env, run.task, run.system), run)
        unequal = np.flatnonzero(other.steps[: len(run.steps)] != run.steps[: len(other.steps)])
        if len(unequal):
            raise UserError(
                f"{other.where} and {run.where}: step_count of evaluation {unequal[0]} is "
                f"{other.steps[unequal[0]]:,.0f} and {run.steps[unequal[0]]:,.0f}, and must be "
                "equal."
            )
        if len(other.steps) != len(run.steps):
            _refuse_lengths(other, run)


def _check_ends(a: Run, b: Run) -> None:
    ends = (a.steps[-1], b.steps[-1])
    if min(ends) < (1 - LENGTH_TOLERANCE) * max(ends):
        _refuse_lengths(a, b)


def _refuse_lengths(a: Run, b: Run) -> None:
    shorter = min(a.steps[-1], b.steps[-1])
    raise UserError(
        f"{a.where} ends at {a.steps[-1]:,.0f} steps, {b.where} at {b.steps[-1]:,.0f}. Compare "
        f"them with --up-to {shorter:.0f}, or choose by --systems and --tasks."
    )
