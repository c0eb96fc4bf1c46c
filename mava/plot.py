"""Figures and tables of finished runs: `python -m mava.plot <folder>...`.

Sample-efficiency curves, aggregate scores, performance profiles and probabilities of improvement
as in Agarwal et al. 2021 (arXiv:2108.13264) and Gorsane et al. 2022 (arXiv:2209.10485).
"""

import argparse
import sys
from pathlib import Path

from mava import comparison as comparing
from mava import figures, report, results, statistics
from mava.comparison import LABELS, Comparison
from mava.config import UserError, run_command
from mava.results import Run


def write_all(comparison: Comparison, out: Path, notes: list[str]) -> None:
    """Writes figures, tables and the page into a folder."""
    rows = report.make_rows(comparison)
    caption = [*comparing.explain(comparison), *notes]
    drawn = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        with figures.legible():
            for name, title, figure in figures.draw_all(comparison, rows):
                file = out / f"{name.replace('/', '_')}.png"
                figure.savefig(file, dpi=130)
                figure.savefig(file.with_suffix(".svg"), metadata={"Date": None})
                drawn.append((title, file))
        (out / "results.csv").write_text(report.to_csv(rows))
        (out / "results.md").write_text(report.to_markdown(rows, caption))
        page = report.to_html(rows, caption, drawn, list(comparing.describe(comparison)))
        (out / "report.html").write_text(page)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}.") from error


def read_all(arguments: argparse.Namespace) -> tuple[list[Run], list[str]]:
    """Returns the checked runs, and notes on those left out, which are printed at once."""
    runs, notes = [], []
    for file in results.find_files(arguments.paths, leave_out=arguments.merge):
        found, aborted = results.read_runs(
            file, arguments.metric, arguments.systems, arguments.tasks
        )
        runs += found
        notes += [f"Left out, an aborted run: {line}." for line in aborted]
    for note in notes:
        print(note, file=sys.stderr)
    if not runs:
        raise UserError("There is no finished run to compare.")
    for name in arguments.systems or []:
        if name not in {run.system for run in runs}:
            raise UserError(f"--systems {name}: there is no finished run of it.")
    for name in arguments.tasks or []:
        if name not in {run.task for run in runs}:
            raise UserError(f"--tasks {name}: there is no finished run on it.")
    runs = comparing.group(runs, arguments.group_by)
    comparing.check_names(runs)
    comparing.check_configs(runs)
    return runs, notes


def main(arguments: list[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m mava.plot", description="Figures and tables of finished runs."
    )
    add = parser.add_argument
    add("paths", type=Path, nargs="+", help="folders with metrics.json below, or such files")
    add("--out", type=Path, default=Path("plots"), help="folder of the figures, by default plots")
    add("--metric", choices=list(LABELS), default="mean_episode_return")
    add("--merge", type=Path, metavar="FILE", help="also write all runs as one MARL-eval file")
    add("--group-by", action="append", default=[], metavar="OPTION",
        help="tell a system's runs apart by this option of theirs, e.g. system.actor_lr; again "
        "for another one")  # fmt: skip
    add("--systems", nargs="+", help="compare only these, by their names before --group-by")
    add("--tasks", nargs="+", help="compare only these, e.g. tiny-2ag")
    add("--up-to", type=float, metavar="STEPS",
        help="cut the runs there; their scores are then those of the last evaluation up to there, "
        "not of the best parameters")  # fmt: skip
    add("--resamples", type=int, default=statistics.NUM_RESAMPLES, help="of the bootstrap")
    chosen = parser.parse_args(arguments)
    if chosen.resamples < 1:
        raise UserError(f"--resamples {chosen.resamples} must be at least 1.")
    runs, notes = read_all(chosen)
    if chosen.merge is not None:
        results.merge(runs, chosen.merge)
        print(f"{len(runs)} runs merged into {chosen.merge}")
    if chosen.up_to is not None:
        runs = [comparing.cut(run, chosen.up_to) for run in runs]
    comparing.check_lengths(runs)
    comparison = comparing.compare(runs, chosen.metric, chosen.resamples, chosen.up_to)
    more = list(comparing.find_notes(comparison))
    for line in comparing.describe(comparison):
        print(line)
    for note in more:
        print(note, file=sys.stderr)
    write_all(comparison, chosen.out, [*notes, *more])
    print(f"{chosen.out / 'report.html'} shows everything; tables: results.md, results.csv")


if __name__ == "__main__":
    run_command(main)
