"""mava.plot: what it finds, refuses, merges, groups and writes."""

import csv
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import mava
from mava import comparison as comparing
from mava import figures, results, statistics
from mava.comparison import compare, curve
from mava.config import UserError
from mava.logger import Event, JsonLogger
from mava.plot import main
from mava.results import read_runs

CONFIG = """\
system: {{seed: {seed}, actor_lr: {lr}, layers: [8, 8]}}
logger: {{base_exp_path: {path}, use_tb: {tb}, checkpointing: {{load_model: false}}}}
resume: null
vault: {vault}
"""


def write_run(
    root, system="ff_ippo", env="Env", task="one", seed=0, values=(0.0, 1.0, 2.0), score=None,
    steps=None, seconds=None, lr=0.001, vault="null", aborted=False, folder="",
):  # fmt: skip
    """A run folder as training leaves it."""
    path = root / system / env / task / f"seed_{seed}" / (folder or f"run{lr}")
    path.mkdir(parents=True)
    text = CONFIG.format(seed=seed, lr=lr, path=path, tb=str(seed == 0).lower(), vault=vault)
    (path / "config.yaml").write_text(text)
    logger = JsonLogger(path / "metrics.json", env, task, system, seed)
    steps = steps or [100 * (i + 1) for i in range(len(values))]
    seconds = seconds or [2.0 * i * (1 + 0.1 * seed) for i in range(len(values))]
    for i, value in enumerate(values):
        metrics = {"mean_episode_return": value, "win_rate": 10 * value, "steps_per_second": 5.0}
        logger.write(Event("evaluation", i, steps[i], seconds[i], metrics))
    if not aborted:
        score = values[-1] if score is None else score
        metrics = {"mean_episode_return": score, "win_rate": 10 * score, "steps_per_second": 5.0}
        logger.write(Event("absolute", len(values) - 1, steps[-1], seconds[-1], metrics))
    return path / "metrics.json"


def change(file, edit):
    """Edits the record of a file's only run."""
    content = json.loads(file.read_text())
    record = content
    for _ in range(4):
        (record,) = record.values()
    edit(record)
    file.write_text(json.dumps(content))


@pytest.fixture
def grid(tmp_path):
    """2 systems, 2 tasks, 3 seeds: scores (R, T) of ff_ippo [0.2 s, 2 s], of ff_mappo 1 more."""
    root = tmp_path / "results"
    for seed in range(3):
        for system, more in (("ff_ippo", 0.0), ("ff_mappo", 1.0)):
            for task, scale in (("one", 0.2), ("two", 2.0)):
                values = (0.0, scale * seed / 2, scale * seed + more)
                write_run(root, system, task=task, seed=seed, values=values)
    return root


@pytest.fixture(autouse=True)
def no_figures(request, monkeypatch):
    """They take seconds: one test draws them."""
    if request.function is not test_everything_is_written_and_can_be_opened:
        monkeypatch.setattr(figures, "draw_all", lambda comparison, rows: iter(()))


def load(*folders, metric="mean_episode_return"):
    files = results.find_files(folders)
    return [run for file in files for run in read_runs(file, metric)[0]]


def plot(*arguments):
    main([*map(str, arguments), "--resamples", "50"])


def test_everything_is_written_and_can_be_opened(grid, tmp_path, capsys):
    out = tmp_path / "plots"
    plot(grid, "--out", out)
    names = {"curve_Env_one", "curve_Env_two", "curve_all_tasks", "aggregate_scores",
             "performance_profiles", "probability_of_improvement"}  # fmt: skip
    wanted = {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    assert {f.name for f in out.iterdir()} == wanted | {"results.csv", "results.md", "report.html"}
    for name in names:
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        ElementTree.parse(out / f"{name}.svg")
    page = (out / "report.html").read_text()
    assert page.count('src="data:image/png;base64,') == len(names)
    assert not re.findall(r'(?:src|href)="(?!data:)', page), "the page needs another file"
    printed = capsys.readouterr()
    assert "Env one, ff_ippo: 3 runs, seeds 0, 1, 2; 300 environment steps" in printed.out
    assert printed.err == ""


def test_the_tables_hold_the_numbers(grid, tmp_path):
    out = tmp_path / "plots"
    plot(grid, "--out", out)
    rows = list(csv.DictReader((out / "results.csv").read_text().splitlines()))

    def value(task, system, statistic, column="value"):
        (row,) = (r for r in rows if (r["task"], r["system"], r["statistic"])
                  == (task, system, statistic))  # fmt: skip
        return float(row[column])

    assert value("Env one", "ff_ippo", "mean") == pytest.approx(0.2)
    assert value("Env two", "ff_mappo", "IQM") == pytest.approx(3.0)
    one, two = np.array([0, 0.2, 0.4]) / 1.4, np.array([0, 2, 4]) / 5  # 0 to 1.4, 0 to 5
    scores = np.stack([one, two], axis=1)
    for name, statistic in (
        ("median", statistics.median), ("IQM", statistics.interquartile_mean),
        ("mean", statistics.mean), ("optimality gap", statistics.optimality_gap),
    ):  # fmt: skip
        found = statistics.estimate(statistic, scores, np.random.default_rng(0), 50)
        for column, number in zip(("value", "low", "high"), found, strict=True):
            assert value("all tasks, normalised", "ff_ippo", name, column) == pytest.approx(
                number, abs=1e-5
            )
    wins = (0 / 9 + 3 / 9) / 2  # 0, 0.2, 0.4 against 1, 1.2, 1.4; 0, 2, 4 against 1, 3, 5
    improvement = value("all tasks, normalised", "ff_ippo", "probability of improvement")
    assert improvement == pytest.approx(wins, abs=1e-5)
    text = (out / "results.md").read_text()
    assert "| Env one | ff_ippo | 3 | 300 | 0.2 [" in text
    assert "| ff_ippo over ff_mappo | 0.167 [" in text


def test_curves_stand_at_their_steps_and_times(tmp_path):
    for seed, (end, late) in enumerate([(10.0, 2.0), (20.0, 4.0)]):
        values = (0.0, 1.0 + seed, 2.0 + seed)
        write_run(tmp_path, seed=seed, values=values, steps=[64, 512, 1000],
                  seconds=[0.0, late, end])  # fmt: skip
    comparison = compare(load(tmp_path), "mean_episode_return", 50)
    x, found = curve(comparison, [comparison.runs["ff_ippo", ("Env", "one")]], "steps", False)
    assert x.tolist() == [64, 512, 1000]
    np.testing.assert_allclose(found.value, [0, 1.5, 2.5])
    x, found = curve(comparison, [comparison.runs["ff_ippo", ("Env", "one")]], "seconds", True)
    np.testing.assert_allclose(x, [0, 5, 10])  # as far as both go
    first, second = np.interp(x, [0, 2, 10], [0, 1, 2]), np.interp(x, [0, 4, 20], [0, 2, 3])
    np.testing.assert_allclose(found.value, (first + second) / 2 / 3)


def test_tasks_of_different_length_end_with_the_shortest(tmp_path):
    write_run(tmp_path, task="one", steps=[100, 200, 300], values=(0.0, 1.0, 1.0))
    write_run(tmp_path, task="two", steps=[200, 400, 600], values=(0.0, 2.0, 4.0))
    comparison = compare(load(tmp_path), "mean_episode_return", 50)
    x, found = curve(comparison, comparison.complete("ff_ippo"), "steps", True)
    assert x.tolist() == [200, 250, 300]
    np.testing.assert_allclose(found.value, [0.5, (1 + 0.125) / 2, (1 + 0.25) / 2])


def test_an_aborted_run_is_reported_and_left_out(grid, tmp_path, capsys):
    file = write_run(grid, "ff_ippo", seed=3, aborted=True, values=(float("nan"),))
    plot(grid, "--out", tmp_path / "plots", "--merge", tmp_path / "all.json")
    printed = capsys.readouterr()
    assert f"aborted run: {file}, Env/one/ff_ippo/seed_3: 1 evaluation, no" in printed.err
    assert "ff_ippo: 3 runs, seeds 0, 1, 2" in printed.out
    assert "seed_3" not in (tmp_path / "all.json").read_text()
    assert str(file) in (tmp_path / "plots" / "report.html").read_text()


def test_over_all_tasks_the_seeds_in_common_count(grid, tmp_path, capsys):
    write_run(grid, "ff_ippo", seed=7, task="one", values=(0.0, 0.0, 0.1))
    plot(grid, "--out", tmp_path / "plots")
    printed = capsys.readouterr()
    assert "ff_ippo: 4 runs, seeds 0, 1, 2, 7" in printed.out
    assert "ff_ippo has no run of seed_7 on some task: over all tasks only seed_0, seed_1, " in (
        printed.err
    )
    table = (tmp_path / "plots" / "results.md").read_text()
    assert "| all tasks, normalised | ff_ippo | 3 |" in table


def set_value(step, name, value):
    return lambda record: record[step].__setitem__(name, value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda r: r.pop("step_1"), "seed_1: step_1 is missing; there are step_0, step_2."),
        (lambda r: r["step_1"].pop("mean_episode_return"),
         "seed_1, step_1: mean_episode_return is missing; there are step_count"),
        (lambda r: r["step_0"].pop("steps_per_second"),
         "seed_1, step_0: steps_per_second is missing"),
        (lambda r: r["step_2"].pop("win_rate"), "seed_1, step_2: win_rate is missing"),
        (lambda r: r["step_2"].pop("elapsed_time"), "seed_1, step_2: elapsed_time is missing"),
        (lambda r: r["absolute_metrics"].pop("mean_episode_return"),
         "seed_1, absolute_metrics: mean_episode_return is missing"),
        (set_value("step_1", "mean_episode_return", [float("nan")]),
         "seed_1, step_1: mean_episode_return=[nan] must be a finite number"),
        (set_value("absolute_metrics", "win_rate", [float("inf")]),
         "absolute_metrics: win_rate=[inf] must be a finite number"),
        (set_value("step_1", "mean_episode_return", "high"), "mean_episode_return=high must be"),
        (set_value("step_1", "mean_episode_return", []), "mean_episode_return=[] must be"),
        (set_value("step_2", "step_count", 200),
         "seed_1, step_2: step_count=200 and elapsed_time=4.4 must be above"),
        (set_value("step_1", "step_count", 150),
         "step_count of evaluation 1 is 200 and 150, and must be equal"),
        (lambda r: r.__setitem__("step_1", 3), "seed_1, step_1: this must be an object"),
        (lambda r: [r.pop(name) for name in ("step_0", "step_1", "step_2")],
         "seed_1: there is no evaluation."),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(grid, tmp_path, edit, message):
    file = next(grid.glob("ff_ippo/Env/one/seed_1/*/metrics.json"))
    change(file, edit)
    with pytest.raises(UserError, match=re.escape(message)) as error:
        plot(grid, "--out", tmp_path / "plots")
    assert str(file) in str(error.value)
    assert not (tmp_path / "plots").exists()


def test_a_name_that_is_there_twice_is_refused(tmp_path):
    file = write_run(tmp_path)
    file.write_text(file.read_text().replace('"step_2"', '"step_1"'))
    with pytest.raises(UserError, match="Env/one/ff_ippo/seed_0: step_1 is there twice"):
        plot(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"Env": 3}', '{"Env": {"one": {"s": {"r": 1}}}}'])
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "metrics.json").write_text(text)
    with pytest.raises(UserError, match=r"metrics\.json"):
        plot(tmp_path)


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        ({"system": "FF_ippo"}, "system names"),
        ({"env": "ENV"}, "environment names"),
        ({"task": "One"}, "task names"),
    ],
)
def test_names_equal_but_for_case_are_refused(tmp_path, names, kind):
    first, second = write_run(tmp_path), write_run(tmp_path, **{"seed": 1, **names})
    with pytest.raises(UserError, match=f"{kind} .* differ only by case") as error:
        plot(tmp_path)
    assert str(first) in str(error.value)
    assert str(second) in str(error.value)


def test_equal_runs_are_refused_with_both_paths(tmp_path):
    files = [write_run(tmp_path, folder=name) for name in ("a", "b")]
    with pytest.raises(UserError, match="have equal options") as error:
        plot(tmp_path, "--merge", tmp_path / "all.json")
    assert all(str(file) in str(error.value) for file in files)
    assert not (tmp_path / "all.json").exists()


@pytest.mark.parametrize("seed", [0, 1])
def test_other_options_are_refused_with_both_paths(tmp_path, seed):
    files = [write_run(tmp_path), write_run(tmp_path, seed=seed, lr=0.01)]
    text = r"differ in system.actor_lr \(0.001 and 0.01\).*--group-by system.actor_lr"
    with pytest.raises(UserError, match=text) as error:
        plot(tmp_path)
    assert all(str(file) in str(error.value) for file in files)


def test_seed_paths_and_loggers_may_differ(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path, seed=seed, vault=f"vaults/{seed}")
    comparing.check_configs(load(tmp_path))


def test_grouping_tells_options_apart(tmp_path, capsys):
    for lr in (0.001, 0.01):
        for seed in (0, 1):
            write_run(tmp_path / "results", seed=seed, lr=lr)
    plot(tmp_path, "--out", tmp_path / "plots", "--group-by", "system.actor_lr",
         "--group-by", "system.layers", "--merge", tmp_path / "all.json")  # fmt: skip
    printed = capsys.readouterr().out
    assert "ff_ippo actor_lr=0.001 layers=[8 8]: 2 runs, seeds 0, 1" in printed
    systems = json.loads((tmp_path / "all.json").read_text())["Env"]["one"]
    assert list(systems) == [f"ff_ippo actor_lr={lr} layers=[8 8]" for lr in (0.001, 0.01)]
    with pytest.raises(UserError, match=r"--group-by system.lr: no run's config.yaml has"):
        plot(tmp_path / "results", "--group-by", "system.lr")


def test_merging_twice_changes_nothing(grid, tmp_path):
    out = tmp_path / "all.json"
    plot(grid, "--out", tmp_path / "plots", "--merge", out)
    once = out.read_bytes()
    content = json.loads(once)
    for task in ("one", "two"):
        for system in ("ff_ippo", "ff_mappo"):
            assert list(content["Env"][task][system]) == ["seed_0", "seed_1", "seed_2"]
    file = next(grid.glob("ff_mappo/Env/two/seed_2/*/metrics.json"))
    record = json.loads(file.read_text())["Env"]["two"]["ff_mappo"]["seed_2"]
    assert content["Env"]["two"]["ff_mappo"]["seed_2"] == record
    plot(grid, "--out", tmp_path / "plots", "--merge", out)
    assert out.read_bytes() == once
    plot(out, "--out", tmp_path / "plots", "--merge", out)
    assert out.read_bytes() == once


def test_a_merged_file_below_the_folders_is_not_read_again(grid, tmp_path):
    out = grid / "metrics.json"
    for _ in range(2):
        plot(grid, "--out", tmp_path / "plots", "--merge", out)
        assert len(json.loads(out.read_text())["Env"]["one"]["ff_ippo"]) == 3
    with pytest.raises(UserError, match=r"Both .*metrics.json and .*metrics.json are Env/one"):
        plot(grid, "--out", tmp_path / "plots")


def test_merging_loses_no_runs(grid, tmp_path):
    out = tmp_path / "all.json"
    plot(grid, "--out", tmp_path / "plots", "--merge", out)
    before = out.read_bytes()
    with pytest.raises(UserError, match="would lose Env/one/ff_mappo/seed_0"):
        plot(grid / "ff_ippo", "--out", tmp_path / "plots", "--merge", out)
    assert out.read_bytes() == before


def test_runs_of_different_length(tmp_path, capsys):
    for seed in (0, 1):
        write_run(tmp_path, "short", seed=seed, score=9.0)
        write_run(tmp_path, "long", seed=seed, values=(0.0, 1.0, 2.0, 5.0, 9.0), score=9.0)
    with pytest.raises(UserError, match=r"long/seed_0 ends at 500 steps.*at 300.*--up-to 300"):
        plot(tmp_path)
    out = tmp_path / "plots"
    plot(tmp_path, "--out", out, "--up-to", 300)
    assert "long: 2 runs, seeds 0, 1; 300 environment steps" in capsys.readouterr().out
    table = (out / "results.md").read_text()
    assert "| Env one | long | 2 | 300 | 2 [2, 2] |" in table
    assert "last evaluation up to 300 steps" in table
    for steps, message in ((50, "begins at 100"), (400, "ends at 300")):
        with pytest.raises(UserError, match=message):
            plot(tmp_path, "--out", out, "--up-to", steps)


def test_budgets_rounded_differently_are_compared(tmp_path):
    write_run(tmp_path, "a", steps=[100, 200, 300])
    write_run(tmp_path, "b", steps=[96, 192, 288])
    comparing.check_lengths(load(tmp_path))


def test_steps_of_learning_are_not_environment_steps(tmp_path):
    write_run(tmp_path, "offline", vault="vaults/a")
    write_run(tmp_path, "online")
    with pytest.raises(UserError, match=r"counts gradient steps and .* environment steps"):
        plot(tmp_path)


def test_a_system_must_have_every_task(grid, tmp_path, capsys):
    write_run(grid, "rec_ippo", task="one")
    with pytest.raises(UserError, match="rec_ippo has no finished run on Env two"):
        plot(grid)
    plot(grid, "--out", tmp_path / "plots", "--systems", "ff_ippo", "rec_ippo", "--tasks", "one")
    printed = capsys.readouterr()
    assert "Env one, rec_ippo: 1 run, seeds 0" in printed.out
    assert "rec_ippo has one run a task: no intervals." in printed.err
    assert "ff_mappo" not in printed.out
    assert "two" not in printed.out
    table = (tmp_path / "plots" / "results.md").read_text()
    assert "| Env one | rec_ippo | 1 | 300 | 2 | 2 |  |  |" in table
    with pytest.raises(UserError, match="--systems ff_ipo: there is no finished run of it"):
        plot(grid, "--systems", "ff_ippo", "ff_ipo")


def test_the_win_rate(grid, tmp_path):
    plot(grid, "--out", tmp_path / "plots", "--metric", "win_rate")
    table = (tmp_path / "plots" / "results.md").read_text()
    assert "| Env two | ff_mappo | 3 | 300 | 30 [" in table
    assert "win rate (%)" in table


def test_other_mistakes(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no metrics\.json below"):
        plot(tmp_path / "empty")
    with pytest.raises(UserError, match="does not exist"):
        plot(tmp_path / "nowhere")
    write_run(tmp_path, aborted=True)
    with pytest.raises(UserError, match="no finished run to compare"):
        plot(tmp_path)
    assert "Left out, an aborted run" in capsys.readouterr().err
    with pytest.raises(UserError, match="--resamples 0 must be at least 1"):
        main([str(tmp_path), "--resamples", "0"])


def test_matplotlib_is_imported_where_it_is_used():
    for file in Path(mava.__file__).parent.rglob("*.py"):
        assert not re.search(r"^(import|from) matplotlib", file.read_text(), re.MULTILINE), file
