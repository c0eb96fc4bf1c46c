"""What mava.plot writes besides figures: tables as Markdown and CSV, and a page with everything."""

import base64
import csv
import html
import io
import itertools
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mava import statistics
from mava.comparison import Comparison
from mava.statistics import Estimate

ALL_TASKS = "all tasks, normalised"
STATISTICS = ("IQM", "mean", "median", "optimality gap")  # the columns of the table


class Row(NamedTuple):
    """A statistic of a system on a task, or on all of them."""

    task: str
    system: str
    compared_with: str  # another system, or nothing
    runs: int  # per task
    steps: str  # at the end of training
    statistic: str
    estimate: Estimate  # of one number


def make_rows(comparison: Comparison) -> list[Row]:
    """Returns every number of the tables."""
    single = {"IQM": statistics.interquartile_mean, "mean": statistics.mean}
    every = {**single, "median": statistics.median, "optimality gap": statistics.optimality_gap}
    rng, num = comparison.rng, comparison.num_resamples
    rows = []
    for task, system in itertools.product(comparison.tasks, comparison.systems):
        runs = comparison.runs[system, task]
        scores = np.array([[run.score] for run in runs])
        steps = f"{runs[0].steps[-1]:,.0f}"
        for name, statistic in single.items():
            found = statistics.estimate(statistic, scores, rng(), num)
            rows.append(Row(" ".join(task), system, "", len(runs), steps, name, found))
    scores_of = {system: comparison.scores(system) for system in comparison.systems}
    for system, scores in scores_of.items():
        for name, statistic in every.items():
            found = statistics.estimate(statistic, scores, rng(), num)
            rows.append(Row(ALL_TASKS, system, "", len(scores), "", name, found))
    for x, y in itertools.combinations(comparison.systems, 2):
        found = statistics.estimate_improvement(scores_of[x], scores_of[y], rng(), num)
        name = "probability of improvement"
        rows.append(Row(ALL_TASKS, x, y, len(scores_of[x]), "", name, found))
    return rows


def to_csv(rows: list[Row]) -> str:
    """Returns one line per statistic; nothing stands for an interval that isn't known."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*Row._fields[:-1], *Estimate._fields])
    for row in rows:
        numbers = ["" if np.isnan(number) else f"{number:.6g}" for number in row.estimate]
        writer.writerow([*row[:-1], *numbers])
    return text.getvalue()


def tables(rows: list[Row]) -> list[list[list[str]]]:
    """Returns the table of systems and that of pairs, if there are any, each with its head."""
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    pairs = []
    for row in rows:
        if row.compared_with:
            pairs.append([f"{row.system} over {row.compared_with}", cell(row.estimate)])
        else:
            key = (row.task, row.system, str(row.runs), row.steps)
            lines.setdefault(key, {})[row.statistic] = cell(row.estimate)
    head = ["task", "system", "runs", "steps", *STATISTICS]
    systems = [[*key, *(cells.get(x, "") for x in STATISTICS)] for key, cells in lines.items()]
    result = [[head, *systems]]
    if pairs:
        result.append([["pair", "probability of improvement"], *pairs])
    return result


def cell(estimate: Estimate) -> str:
    """Returns "0.55 [0.45, 0.64]", without the interval if that isn't known."""
    value, low, high = estimate
    return f"{value:.3g}" if np.isnan(low) else f"{value:.3g} [{low:.3g}, {high:.3g}]"


def to_markdown(rows: list[Row], caption: list[str]) -> str:
    """Returns the tables with what they show."""
    blocks = []
    for head, *body in tables(rows):
        lines = [head, ["---"] * len(head), *body]
        blocks.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
    return "\n\n".join([*blocks, "\n".join(caption)]) + "\n"


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
img { max-width: 100%; height: auto }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: 14px; white-space: nowrap }
th, td { border-bottom: 1px solid #ccc; padding: .3rem .7rem; text-align: left }
"""


def to_html(
    rows: list[Row], caption: list[str], figures: list[tuple[str, Path]], runs: list[str]
) -> str:
    """Returns a page that needs no other file.

    Args:
        rows: of the tables.
        caption: what they show, in sentences.
        figures: title and PNG file of each.
        runs: what was compared, a line each.
    """
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Results</title>',
        f"<style>{STYLE}</style><h1>Results</h1>",
        *(f"<p>{html.escape(line)}</p>" for line in caption),
    ]
    for head, *body in tables(rows):
        parts.append('<div class="wide"><table>' + _html_line(head, "th"))
        parts += [_html_line(line, "td") for line in body]
        parts.append("</table></div>")
    for title, file in figures:
        image = base64.b64encode(file.read_bytes()).decode()
        parts.append(f"<h2>{html.escape(title)}</h2>")
        parts.append(f'<img alt="{html.escape(title)}" src="data:image/png;base64,{image}">')
    parts.append("<h2>Runs</h2><ul>")
    parts += [f"<li>{html.escape(line)}</li>" for line in runs]
    return "\n".join([*parts, "</ul></html>\n"])


def _html_line(cells: list[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(x)}</{tag}>" for x in cells) + "</tr>"
