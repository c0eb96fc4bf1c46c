"""The figures of a comparison."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from mava import report, statistics
from mava.comparison import AXES, LABELS, Axis, Comparison, Task, curve
from mava.report import Row
from mava.statistics import Estimate

# Okabe & Ito's colours for every kind of sight, without the yellow, which white swallows.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
FONT_SIZE = 10.5
THRESHOLDS = np.linspace(0.0, 1.0, 101)  # of the performance profiles


def style(index: int) -> dict[str, Any]:
    """Returns colour, line and marker of a system; 28 differ."""
    color, cycle = index % 7, index // 7
    return {
        "color": COLORS[color],
        "linestyle": LINES[(color + cycle) % 4],
        "marker": MARKERS[(color + cycle) % 7],
    }


def new_figure(title: str, width: float, height: float, **options: Any) -> tuple[Any, Any]:
    """Returns a figure and its axes, without pyplot: no display, nothing to close."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize=FONT_SIZE + 1)
    axes = figure.subplots(**options)
    for each in np.ravel(axes):
        each.grid(color="0.9")
        each.set_axisbelow(True)
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_line(axes: Any, x: np.ndarray, found: Estimate, index: int, label: str) -> None:
    every = max(len(x) // 8, 1)
    start = index % every  # so that markers of two systems don't cover each other
    axes.plot(x, found.value, **style(index), label=label, markevery=(start, every), markersize=5)
    color = style(index)["color"]
    axes.fill_between(x, found.low, found.high, color=color, alpha=0.15, linewidth=0.8)


def draw_interval(axes: Any, found: Estimate, height: float, index: int) -> None:
    color, marker = style(index)["color"], style(index)["marker"]
    ends = {"color": color, "alpha": 0.45, "linewidth": 8, "solid_capstyle": "butt"}
    axes.plot([found.low, found.high], [height, height], **ends)
    axes.plot([found.value], [height], color=color, marker=marker, markeredgecolor="white")


def add_legend(figure: Any, axes: Any, systems: list[str]) -> None:
    """Puts the legend below, where it covers no data; the figure grows by its lines."""
    width, height = figure.get_size_inches()
    longest = max(map(len, systems))
    columns = max(1, min(len(systems), int(width * 11 // (longest + 9))))
    figure.set_size_inches(width, height + 0.22 * math.ceil(len(systems) / columns))
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=3)


def scale_of(against: Axis, unit: str, largest: float) -> tuple[float, str]:
    """Returns what to divide an axis by, and its label."""
    if against == "steps":
        sizes = ((1e6, 1e6, f"{unit} (millions)"), (1e4, 1e3, f"{unit} (thousands)"))
        small = unit
    else:
        time = "wall time since the first evaluation"
        sizes = ((7200, 3600, f"{time} (hours)"), (180, 60, f"{time} (minutes)"))
        small = f"{time} (seconds)"
    for least, divisor, label in sizes:
        if largest >= least:
            return divisor, label
    return 1, small


def over(comparison: Comparison) -> str:
    num_tasks = len(comparison.tasks)
    return "over the one task" if num_tasks == 1 else f"over all {num_tasks} tasks"


def normalised_label(metric: str) -> str:
    return f"normalised {LABELS[metric].removesuffix(' (%)')}"


def draw_curves(comparison: Comparison, task: Task | None) -> Any:
    """Returns a figure of one task, or of all: against steps, and against wall time."""
    title = " ".join(task) if task else over(comparison)
    figure, panels = new_figure(title, 9, 3.8, ncols=2, sharey=True)
    for axes, against in zip(panels, AXES, strict=True):
        lines = []
        for system in comparison.systems:
            runs = [comparison.runs[system, task]] if task else comparison.complete(system)
            lines.append(curve(comparison, runs, against, normalised=task is None))
        divisor, label = scale_of(against, comparison.unit, max(x[-1] for x, _ in lines))
        for index, (x, found) in enumerate(lines):
            draw_line(axes, x / divisor, found, index, comparison.systems[index])
        axes.set_xlabel(label)
    metric = LABELS[comparison.metric] if task else normalised_label(comparison.metric)
    panels[0].set_ylabel(f"{metric}, IQM")
    add_legend(figure, panels[0], comparison.systems)
    return figure


def draw_aggregates(comparison: Comparison, rows: list[Row]) -> Any:
    """Returns a figure of the aggregate scores, a panel each."""
    systems = comparison.systems
    title = f"aggregate scores {over(comparison)}"
    figure, panels = new_figure(title, 10, 1.8 + 0.36 * len(systems), ncols=4, sharey=True)
    estimates = {(r.system, r.statistic): r.estimate for r in rows if r.task == report.ALL_TASKS}
    for axes, name in zip(panels, ("median", "IQM", "mean", "optimality gap"), strict=True):
        for index, system in enumerate(systems):
            draw_interval(axes, estimates[system, name], index, index)
        better = "lower" if name == "optimality gap" else "higher"
        axes.set_title(f"{name}\n({better} is better)", fontsize=FONT_SIZE)
        axes.locator_params(axis="x", nbins=4)
        axes.tick_params(axis="x", labelsize=FONT_SIZE - 1.5)
    figure.get_layout_engine().set(wspace=0.06)
    panels[0].set_yticks(range(len(systems)), systems)
    panels[0].set_ylim(len(systems) - 0.5, -0.5)
    figure.supxlabel(normalised_label(comparison.metric), fontsize=FONT_SIZE)
    return figure


def draw_profiles(comparison: Comparison) -> Any:
    """Returns a figure of which share of the runs is above each score."""
    title = f"performance profiles {over(comparison)}"
    figure, axes = new_figure(title, 6.5, 4)
    for index, system in enumerate(comparison.systems):
        found = statistics.estimate(
            lambda scores: statistics.share_above(scores, THRESHOLDS),
            comparison.scores(system),
            comparison.rng(),
            comparison.num_resamples,
        )
        draw_line(axes, THRESHOLDS, found, index, system)
    axes.set_xlabel(f"{normalised_label(comparison.metric)}, τ")
    axes.set_ylabel("share of runs with a score above τ")
    axes.set(xlim=(0, 1), ylim=(-0.02, 1.02))
    add_legend(figure, axes, comparison.systems)
    return figure


def draw_improvement(comparison: Comparison, rows: list[Row]) -> Any:
    """Returns a figure of the probability of improvement of every pair."""
    pairs = [row for row in rows if row.compared_with]
    names = [f"{row.system} over {row.compared_with}" for row in pairs]
    title = f"probability of improvement {over(comparison)}"
    width, height = 5 + 0.085 * max(map(len, names)), 1.4 + 0.3 * len(pairs)
    figure, axes = new_figure(title, width, height)
    for index, row in enumerate(pairs):
        draw_interval(axes, row.estimate, index, 0)
    axes.axvline(0.5, color="0.3", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(pairs)), names)
    axes.set(xlim=(-0.02, 1.02), ylim=(len(pairs) - 0.5, -0.5))
    axes.set_xlabel("P(a run of the first beats one of the second)")
    return figure


def draw_all(comparison: Comparison, rows: list[Row]) -> Iterator[tuple[str, str, Any]]:
    """Yields file name, title and figure."""
    for env, task in comparison.tasks:
        title = f"{env} {task}: sample efficiency"
        yield f"curve_{env}_{task}", title, draw_curves(comparison, (env, task))
    yield "curve_all_tasks", "All tasks: sample efficiency", draw_curves(comparison, None)
    yield "aggregate_scores", "Aggregate scores", draw_aggregates(comparison, rows)
    yield "performance_profiles", "Performance profiles", draw_profiles(comparison)
    if len(comparison.systems) > 1:
        yield (
            "probability_of_improvement",
            "Probability of improvement",
            draw_improvement(comparison, rows),
        )


@contextmanager
def legible() -> Iterator[None]:
    import matplotlib as mpl

    settings = {"font.size": FONT_SIZE, "svg.hashsalt": "mava", "lines.linewidth": 1.8}
    with mpl.rc_context(settings):  # type: ignore[arg-type]
        yield
