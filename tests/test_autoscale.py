"""mava.autoscale: the search on known surfaces, trials that fail, and a real one."""

import json
import math
import re
from types import SimpleNamespace

import pytest

from mava import autoscale
from mava.autoscale import main
from mava.config import UserError
from mava.scale_search import Setting, Trial, search
from mava.scale_trial import Task, defaults_of, measure, run_trial
from tests.running import SYSTEMS, TINY, tiny

START = Setting(16, 1, 2)


def surface(best, failing=lambda setting: None):
    """A measuring function with one maximum, of 1000, and the settings that it was asked for."""
    asked = []

    def sizes(setting):  # the number of streams, and their shape
        return setting.num_envs * setting.num_replicas, *setting[1:]

    def measure(setting):
        asked.append(setting)
        reason = failing(setting)
        if reason is not None:
            return Trial(setting=setting, status=reason[0], reason=reason[1])
        away = sum(
            abs(math.log2(x / y))
            for x, y in zip(sizes(setting), sizes(Setting(*best)), strict=True)
        )
        return Trial(setting=setting, steps_per_second=1000 / 1.3**away)

    return measure, asked


@pytest.mark.parametrize(
    "best",
    [(16, 1, 2), (512, 1, 2), (16, 1, 32), (4, 1, 1), (256, 1, 16), (8, 2, 2), (64, 4, 8),
     (4096, 1, 128)],
)  # fmt: skip
def test_the_maximum_is_found_in_linearly_many_trials(best):
    measure, asked = surface(best)
    chosen, trials = search(START, measure, has_parts=True, min_gain=0.1)
    assert chosen.setting == best
    assert [trial.setting for trial in trials] == asked
    assert len(asked) == len(set(asked)), "a setting was measured twice"
    doublings = sum(abs(math.log2(x / y)) for x, y in zip(best, START, strict=True))
    assert len(asked) <= 14 + 2 * doublings


def test_it_stops_where_the_gain_flattens():
    rates = {16: 100.0, 32: 150.0, 64: 160.0, 128: 1000.0}

    def measure(setting):
        rate = rates[setting.num_envs] if setting[1:] == (1, 2) else 1.0
        return Trial(setting=setting, steps_per_second=rate)

    chosen, trials = search(START, measure, has_parts=True, min_gain=0.1)
    assert chosen.setting == (64, 1, 2)
    assert all(trial.setting.num_envs < 128 for trial in trials)


def test_noise_does_not_make_batches_larger():
    def measure(setting):
        return Trial(setting=setting, steps_per_second=100 + 2 * (setting != START))

    assert search(START, measure, has_parts=True, min_gain=0.1)[0].setting == START


def test_agent_updates_count_where_there_are_any():
    def measure(setting):
        rate = 10.0 if setting == START else 5.0
        return Trial(setting=setting, steps_per_second=1 / rate, agent_updates_per_second=rate)

    assert search(START, measure, has_parts=True, min_gain=0.1)[0].setting == START


@pytest.mark.parametrize("status", ["failed", "too large", "refused"])
def test_trials_that_can_not_be_made_are_survived(status):
    def failing(setting):
        too_many = setting.num_envs * setting.num_replicas > 64 or setting.num_parts == 8
        return (status, "because") if too_many else None

    measure, asked = surface((512, 1, 16), failing)
    chosen, trials = search(START, measure, has_parts=True, min_gain=0.1)
    assert chosen.setting == (64, 1, 4)
    assert Setting(128, 1, 2) in asked
    assert Setting(256, 1, 2) not in asked, "what is larger than too large was tried"
    assert {trial.status for trial in trials} == {"measured", status}


def test_axes_are_searched_again_after_the_others():
    def failing(setting):  # a minibatch of more than 8 environments
        return ("too large", "") if setting.num_envs > 8 * setting.num_parts else None

    measure, asked = surface((32, 1, 4), failing)
    chosen, _ = search(START, measure, has_parts=True, min_gain=0.1)
    assert Setting(32, 1, 2) in asked
    assert chosen.setting == (32, 1, 4)


def test_a_search_that_can_not_start_ends():
    measure, asked = surface((16, 1, 2), lambda setting: ("failed", "no"))
    chosen, _ = search(START, measure, has_parts=True, min_gain=0.1)
    assert not chosen.is_measured
    assert asked == [START]


def test_a_system_without_parts_keeps_their_number():
    measure, asked = surface((64, 1, 8))
    search(Setting(16, 1, 1), measure, has_parts=False, min_gain=0.1)
    assert {setting.num_parts for setting in asked} == {1}


def make_task(file=SYSTEMS / "ff_mappo.py", overrides=(*TINY, "arch.num_devices=1"), **kwargs):
    defaults = {"parts_name": "num_minibatches", "seconds": 0.1, "max_bytes": None, "clock": "wall"}
    return Task(file=file, overrides=overrides, **defaults | kwargs)


def test_a_trial_from_end_to_end(tmp_path, monkeypatch, capfd):
    """The first in a process of its own, the others answered from it."""
    made = []

    def run_once(task, setting):
        made.append(made[0] if made else run_trial(task, setting))
        faster = 1.5 if setting == (8, 1, 2) else 1.0
        speed = made[0].steps_per_second * faster
        return Trial(**{**vars(made[0]), "setting": setting, "steps_per_second": speed})

    monkeypatch.setattr(autoscale, "run_trial", run_once)
    file, out = tmp_path / "trials.json", tmp_path / "plots"
    options = ("--seconds", "0.1", "--json", str(file), "--out", str(out))
    main(["ff_mappo", *options, "env=rware", *TINY, "arch.num_devices=1"])
    (first,) = {id(trial): trial for trial in made}.values()
    assert first.status == "measured"
    assert first.steps_per_update == 4 * 8
    assert first.steps_per_second > 0
    assert first.compile_seconds > 0
    assert 1e3 < first.predicted_bytes < 1e8 < first.peak_bytes
    printed = capfd.readouterr().out
    assert "(+50 %)" in printed
    assert "Speed is not learning" in printed
    last = "arch.num_envs=8 system.update_batch_size=1 system.num_minibatches=2"
    assert printed.splitlines()[-1] == last
    rows = json.loads(file.read_text())
    (chosen,) = (row for row in rows if row["chosen"])
    assert " ".join(chosen["overrides"]) == last
    assert chosen["setting"] == {"num_envs": 8, "num_replicas": 1, "num_parts": 2}
    (figure,) = out.iterdir()
    assert figure.name == "autoscale_ff_mappo_RobotWarehouse_tiny-2ag.png"
    assert figure.read_bytes().startswith(b"\x89PNG")


class Program:
    """Of which only the sizes are known."""

    def __init__(self, *sizes):
        names = ("argument", "output", "temp", "alias")
        self.sizes = {f"{x}_size_in_bytes": n for x, n in zip(names, sizes, strict=True)}

    def result(self):
        return self

    def cancel(self):
        pass

    def memory_analysis(self):
        return SimpleNamespace(**self.sizes)


@pytest.mark.parametrize("limit", [999, 1000])
def test_what_does_not_fit_is_not_run(limit, monkeypatch):
    programs = SimpleNamespace(
        setup=Program(100, 200, 300, 0),
        block=Program(500, 400, 300, 200),
        evaluate=Program(0, 0, 0, 0),
    )
    ran = []
    monkeypatch.setattr("mava.scale_trial.compile_programs", lambda *_: programs)
    monkeypatch.setattr("mava.scale_trial.block_runner", lambda *_: ran.append)
    monkeypatch.setattr("mava.scale_trial.measure_rates", lambda *_: (2.0, None))
    trial = measure(make_task(max_bytes=limit), Setting(4, 1, 2))
    assert trial.predicted_bytes == 1000
    if limit == 1000:
        assert trial.status == "measured"
        assert trial.steps_per_second == 2.0 * 4 * 8
    else:
        assert trial.status == "too large"
        assert trial.reason == "needs 0.0 of 0.0 MB on each device"


def test_a_system_that_learns_from_a_buffer_is_measured_by_its_agent_updates():
    overrides = ("env=rover_tower", *tiny("ff_maac"))
    task = make_task(SYSTEMS / "ff_maac.py", overrides, parts_name="num_chunks")
    trial = measure(task, Setting(4, 1, 2))
    assert trial.agent_updates_per_second > 0
    # 8 agents, 2 gradient steps and 32 environment steps in an update
    ratio = trial.agent_updates_per_second / trial.steps_per_second
    assert ratio == pytest.approx(8 * 2 / 32)


def test_a_trial_that_is_killed_is_reported(tmp_path):
    file = tmp_path / "deadly.py"
    file.write_text(
        "import os\nfrom mava import experiment\nos.kill(os.getpid(), 9)\n"
        'experiment.main(__file__, network="mlp")\n'
    )
    trial = run_trial(make_task(file), Setting(4, 1, 2))
    assert trial.status == "failed"
    assert trial.reason == "killed by SIGKILL, as when memory runs out"


def test_a_forks_defaults_are_read(tmp_path):
    assert defaults_of(SYSTEMS / "ff_maac.py") == {"network": "maac", "arch": "anakin_12"}
    file = tmp_path / "fork.py"
    file.write_text('experiment.main(__file__, "rnn")')
    assert defaults_of(file) == {"network": "rnn"}
    for text in ("", "experiment.main(__file__, network=name)", "experiment.main()", "("):
        file.write_text(text)
        with pytest.raises(UserError, match=r"fork\.py"):
            defaults_of(file)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ff_mapo"], "ff_mapo is neither a system (ff_ia2c, ff_ippo, ff_maa2c"),
        (["ff_mappo", "system.gama=1"], "Key 'gama' not in 'Config'"),
        (["ff_mappo", "system.gamma=2"], "gamma=2.0 must be between 0 and 1."),
        (["ff_mappo", "arch.num_envs=1,2"], "Ambiguous value for argument 'arch.num_envs=1,2'"),
        (["ff_mappo", "--seconds", "0"], "--seconds 0.0 must be above 0."),
        (["ff_mappo", "--min-gain", "-1"], "--min-gain -1.0 must be above 0."),
        (["ff_mappo", "--max-memory", "nan"], "--max-memory nan must be above 0."),
        (["ff_mappo", "--json", "nowhere/x.json"], "there is no folder nowhere."),
        (["rec_bc", "vault=x"], "vault=x: only new runs of online systems are measured"),
    ],
)
def test_bad_input_starts_no_process(arguments, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(autoscale, "run_trial", lambda *_: pytest.fail("a trial was started"))
    with pytest.raises(UserError, match=re.escape(message)):
        main(arguments)


@pytest.mark.parametrize(
    ("system", "overrides", "message"),
    [
        ("rec_bc", (), "rec_bc learns offline and has no environments to scale."),
        ("ff_mappo", ("arch.debug=true",), "arch.debug=true runs two updates"),
        ("ff_mappo", ("system.num_minibatches=3",), "num_minibatches=3 must divide"),
        ("ff_mappo", ("arch.num_devices=99",), "arch.num_devices=99, but there are 2 (cpu)."),
    ],
)
def test_bad_input_is_refused_before_compiling(system, overrides, message, monkeypatch):
    monkeypatch.setattr("mava.scale_trial.compile_programs", lambda *_: pytest.fail("compiled"))
    task = make_task(SYSTEMS / f"{system}.py", overrides, parts_name=None)
    with pytest.raises(UserError, match=re.escape(message)):
        measure(task, Setting(16, 1, 1))


def test_a_refused_start_is_one_sentence(monkeypatch, tmp_path):
    def refuse(task, setting):
        return Trial(setting=setting, status="refused", reason="It must be even.")

    monkeypatch.setattr(autoscale, "run_trial", refuse)
    with pytest.raises(UserError, match=r"^It must be even\.$"):
        main(["ff_mappo", "--out", str(tmp_path)])
