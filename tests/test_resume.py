"""Runs that are stopped, killed or damaged, and go on as if nothing had happened."""

import dataclasses
import json
import os
import shutil
import signal

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mava import experiment
from mava.checkpoints import Checkpoints, list_checkpoints, read_newest
from mava.config import UserError, load_system
from mava.run_folder import lock_folder
from mava.signals import Stopped
from mava.stored_run import load_run
from mava.training import Training
from tests.running import (
    SYSTEMS,
    TINY,
    make_run,
    read_metrics,
    run_folder,
    tiny,
    train,
    without_times,
)

SIX_UPDATES = ("system.num_updates=6", "arch.num_evaluation=6", "logger.use_console=false")
SIX = (*TINY, *SIX_UPDATES)


class Killed(BaseException):
    """Stands for a process that ends at once."""


def break_at(monkeypatch, method, call, action):
    """Does `action` before the n-th call (from 1) of a method of Training."""
    original, calls = getattr(Training, method), []

    def broken(self, *args):
        calls.append(1)
        if len(calls) == call:
            action()
        return original(self, *args)

    monkeypatch.setattr(Training, method, broken)


def kill():
    raise Killed


def send(signum):
    return lambda: os.kill(os.getpid(), signum)


def go_on(results, system="ff_ippo", *overrides):
    return experiment.resume(run_folder(results), system, list(overrides))


def same_end(first, second):
    """Whether two finished runs have the same record and, bit for bit, the same state."""
    assert without_times(read_metrics(first)) == without_times(read_metrics(second))
    ends = [read_newest(run_folder(results) / "checkpoints") for results in (first, second)]
    assert ends[0].arrays.keys() == ends[1].arrays.keys()
    for name, array in ends[0].arrays.items():
        np.testing.assert_array_equal(array, ends[1].arrays[name], err_msg=name)
    assert ends[0].progress.num_updates == ends[1].progress.num_updates


@pytest.mark.parametrize(
    ("system", "devices", "replicas"),
    [
        pytest.param("ff_ippo", 1, 1, marks=pytest.mark.slow),
        ("ff_ippo", 2, 2),
        pytest.param("ff_mappo", 1, 2, marks=pytest.mark.slow),
        pytest.param("ff_mappo", 2, 1, marks=pytest.mark.slow),
        pytest.param("rec_ippo", 1, 1, marks=pytest.mark.slow),
        pytest.param("rec_mappo", 2, 2, marks=pytest.mark.slow),
        ("ff_maac", 2, 2),
    ],
)
def test_killed_and_stopped_runs_end_like_one_that_was_not(
    system, devices, replicas, tmp_path, monkeypatch
):
    options = (
        *tiny(system), *SIX_UPDATES,
        f"arch.num_devices={devices}", f"system.update_batch_size={replicas}",
    )  # fmt: skip
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    train(system, *options, f"logger.base_exp_path={straight}", probe="RandomLength")
    with monkeypatch.context() as patch:
        break_at(patch, "evaluate_block", 3, kill)
        with pytest.raises(Killed):
            train(system, *options, f"logger.base_exp_path={broken}", probe="RandomLength")
    with monkeypatch.context() as patch:  # while a block runs
        break_at(patch, "wait", 1, send(signal.SIGTERM))
        with pytest.raises(Stopped, match="resume="):
            go_on(broken, system)
    newest = list_checkpoints(run_folder(broken) / "checkpoints")[-1]
    assert newest.name.endswith(".unevaluated")
    with monkeypatch.context() as patch:  # while it is evaluated
        break_at(patch, "evaluate", 2, send(signal.SIGINT))
        with pytest.raises(Stopped):
            go_on(broken, system)
    go_on(broken, system)
    same_end(straight, broken)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A short finished run with three checkpoints; don't write to it."""
    results = tmp_path_factory.mktemp("finished")
    train(
        "ff_ippo", *SIX, f"logger.base_exp_path={results}", "arch.num_devices=1",
        "logger.checkpointing.max_to_keep=3", "system.decay_learning_rates=true",
        probe="RandomLength",
    )  # fmt: skip
    return results


@pytest.fixture
def copy_of(finished, tmp_path):
    """A copy of it, to be damaged or to go on."""
    shutil.copytree(finished, tmp_path / "copy")
    return tmp_path / "copy"


def checkpoints_of(results):
    return list_checkpoints(run_folder(results) / "checkpoints")


def unfinish(results):
    """Removes what came after the last checkpoint, as if the run had been killed there."""
    file = run_folder(results) / "metrics.json"
    file.write_text(file.read_text().replace("absolute_metrics", "step_99"))


def test_a_finished_run_has_nothing_to_do(copy_of, capsys):
    before = read_metrics(copy_of)
    result = go_on(copy_of)
    assert "is complete; a larger system.total_timesteps" in capsys.readouterr().out
    assert read_metrics(copy_of) == before
    assert result == before["absolute_metrics"]["mean_episode_return"][0]


def truncate(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def largest(folder):
    return max(folder.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: truncate(largest(folder / "arrays")),
        lambda folder: flip_a_bit(largest(folder / "arrays")),
        lambda folder: truncate(folder / "about.json"),
        lambda folder: [file.unlink() for file in folder.rglob("*") if file.is_file()],
    ],
    ids=["truncated", "a bit", "about", "empty"],
)
def test_a_damaged_checkpoint_is_passed_over(damage, copy_of, finished, capsys):
    newest, before = checkpoints_of(copy_of)[-1], checkpoints_of(copy_of)[-2]
    damage(newest)
    stored = read_newest(newest.parent)
    assert stored.folder == before
    assert f"{newest} is damaged, so the one before it is used: " in capsys.readouterr().err


def test_going_on_from_before_a_damaged_checkpoint(copy_of, finished, capsys):
    truncate(largest(checkpoints_of(copy_of)[-1] / "arrays"))
    go_on(copy_of)
    assert "is damaged" in capsys.readouterr().err
    same_end(finished, copy_of)


def test_all_checkpoints_damaged(copy_of):
    for folder in checkpoints_of(copy_of):
        truncate(largest(folder / "arrays"))
    with pytest.raises(UserError, match=r"All checkpoints in .* are damaged"):
        go_on(copy_of)


def test_a_run_without_a_checkpoint_starts_anew(copy_of, finished):
    shutil.rmtree(run_folder(copy_of) / "checkpoints")
    go_on(copy_of)
    same_end(finished, copy_of)


FIRST_IS_BEST = """    xs = (rows, keys[1:])
    state, metrics = jax.lax.scan(learn_minibatch, learner_state, xs)
    sign = jnp.where(learner_state.optim_states.actor[1][0].count == 0, 50.0, -50.0)
    actor = jax.tree.map(jnp.zeros_like, state.params.actor)
    actor["params"]["head"]["Dense_0"]["bias"] = sign * jnp.array([-1.0, 1.0])
    return state.replace(params=state.params._replace(actor=actor)), metrics
"""


def test_the_best_parameters_survive(tmp_path, monkeypatch):
    """Action 1 pays; only the first block's policy takes it. Killed after the third."""
    text = (SYSTEMS / "ff_ippo.py").read_text()
    old = "    return jax.lax.scan(learn_minibatch, learner_state, (rows, keys[1:]))\n"
    assert text.count(old) == 1
    file = tmp_path / "first_is_best.py"
    file.write_text(text.replace(old, FIRST_IS_BEST))
    results = tmp_path / "results"
    options = (*SIX, "arch.num_devices=1", f"logger.base_exp_path={results}")
    config = make_run("ff_ippo", *options, probe="RewardOfAction")
    config = dataclasses.replace(config, system_file=file)
    monkeypatch.setattr(Checkpoints, "save_if_due", Checkpoints.save_now)
    with monkeypatch.context() as patch:
        break_at(patch, "train_block", 4, kill)
        with pytest.raises(Killed):
            experiment.run(load_system(str(file)), config)
    go_on(results, "first_is_best")
    record = read_metrics(results)
    returns = [values["mean_episode_return"][0] for values in record.values()]
    assert returns == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]


def test_a_larger_budget_appends_evaluations(copy_of, finished, tmp_path, capsys):
    """The result is that of a run which was longer from the start; twice, by odd numbers."""
    go_on(copy_of, "ff_ippo", "system.num_updates=7", "logger.use_console=true")
    output = capsys.readouterr().out
    assert "Going on after 192 of 224 environment steps." in output
    assert "The budget was 192 steps." in output
    assert "The learning rates now fall to 0 at the new end." in output
    assert (
        without_times(read_metrics(copy_of)).items()
        >= {
            name: values
            for name, values in without_times(read_metrics(finished)).items()
            if name != "absolute_metrics"
        }.items()
    )
    go_on(copy_of, "ff_ippo", "system.total_timesteps=320")
    steps = [x["step_count"] for x in read_metrics(copy_of).values() if "step_count" in x]
    assert steps == [32, 64, 96, 128, 160, 192, 224, 256, 288, 320]
    assert list(read_metrics(copy_of))[-1] == "absolute_metrics"
    with pytest.raises(UserError, match=r"has a budget in system.total_timesteps"):
        go_on(copy_of, "ff_ippo", "system.num_updates=20")


def test_a_longer_run_is_like_one_that_was_long_from_the_start(tmp_path):
    options = (*TINY, "logger.use_console=false", "logger.use_tb=false", "arch.num_devices=1")
    long, extended = tmp_path / "long", tmp_path / "extended"
    train("ff_ippo", *options, f"logger.base_exp_path={long}", "system.num_updates=8",
          "arch.num_evaluation=4", probe="RandomLength")  # fmt: skip
    train("ff_ippo", *options, f"logger.base_exp_path={extended}", "system.num_updates=4",
          "arch.num_evaluation=2", probe="RandomLength")  # fmt: skip
    go_on(extended, "ff_ippo", "system.num_updates=8")
    same_end(long, extended)


def test_a_decayed_learning_rate_follows_the_new_horizon(copy_of):
    """At the old end it was 0; the first update after it moves the parameters again."""
    before = read_newest(run_folder(copy_of) / "checkpoints").arrays
    go_on(copy_of, "ff_ippo", "system.num_updates=7")
    after = read_newest(run_folder(copy_of) / "checkpoints").arrays
    name = "learner_state/params/actor/params/head/Dense_0/bias"
    assert np.abs(after[name] - before[name]).max() > 1e-5


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["arch.num_envs=8", "system.actor_lr=1e-4"],
            r"^arch.num_envs=8: can't go on with that: an update would be 64 environment steps",
        ),
        (
            ["system.gamma=0.9", "network.actor_network.pre_torso.layer_sizes=[32]"],
            r"^network.*\[32\]: can't go on with that: .*params/head/Dense_0/kernel is float32 "
            r"\(16, 2\) in the checkpoint, float32 \(32, 2\) here",
        ),
        (["system.update_batch_size=2"], "^system.update_batch_size=2: can't go on"),
        (["arch.num_devices=2"], "^arch.num_devices=2: can't go on"),
        (["arch.num_evaluation=3"], "^arch.num_evaluation=3: can't be changed .*: blocks stay"),
        (["system.seed=3"], "^system.seed=3: can't be changed .*: a run has one seed"),
        (["network=mlp"], "^network=mlp: of a stored run only single options can be changed"),
        (["system.gama=3"], "Key 'gama' not in 'Config'"),
        (["system.gamma=1.5"], "gamma=1.5 must be between 0 and 1"),
        (["system.num_updates=3"], "has done 192 environment steps, more than the 96 it is asked"),
    ],
)
def test_overrides_that_do_not_fit_are_refused_by_name(overrides, message, finished):
    before = sorted(run_folder(finished).rglob("*"))
    with pytest.raises(UserError, match=message):
        go_on(finished, "ff_ippo", *overrides)
    assert sorted(run_folder(finished).rglob("*")) == before


def test_other_overrides_are_kept(copy_of):
    go_on(copy_of, "ff_ippo", "system.num_updates=7", "system.actor_lr=0.25")
    assert "actor_lr: 0.25" in (run_folder(copy_of) / "config.yaml").read_text()
    about = read_newest(run_folder(copy_of) / "checkpoints").about
    assert about["config"]["system"]["actor_lr"] == 0.25
    assert about["versions"]["packages"]["jax"]


def test_the_wrong_system_or_folder(finished, tmp_path):
    with pytest.raises(UserError, match="holds a run of ff_ippo, not of ff_mappo"):
        go_on(finished, "ff_mappo")
    with pytest.raises(UserError, match="is no run folder"):
        experiment.resume(tmp_path, "ff_ippo", [])
    with pytest.raises(UserError, match="is no folder"):
        experiment.resume(tmp_path / "x", "ff_ippo", [])


def test_the_stored_system_file_is_what_runs(copy_of):
    """Not the one that was edited since."""
    file = run_folder(copy_of) / "ff_ippo.py"
    file.write_text(file.read_text().replace('"entropy": entropy', '"my_entropy": entropy'))
    go_on(copy_of, "ff_ippo", "system.num_updates=7")
    assert "train/my_entropy" in tensorboard(copy_of).Tags()["scalars"]


def test_a_stored_system_file_finds_the_modules_beside_the_original(copy_of, tmp_path):
    (tmp_path / "neighbour_of_mine.py").write_text("")
    file, versions = run_folder(copy_of) / "ff_ippo.py", run_folder(copy_of) / "versions.json"
    file.write_text(
        file.read_text().replace("import jax\n", "import jax\nimport neighbour_of_mine\n")
    )
    with pytest.raises(UserError, match=r"ff_ippo.py can't be imported: No module named 'neigh"):
        load_run(run_folder(copy_of), [])
    known = json.loads(versions.read_text())
    assert known["system_file"].endswith("mava/systems/ff_ippo.py")
    versions.write_text(json.dumps({**known, "system_file": str(tmp_path / "ff_ippo.py")}))
    load_run(run_folder(copy_of), [])


def test_other_devices_than_there_were(copy_of):
    about = checkpoints_of(copy_of)[-1] / "about.json"
    about.write_text(about.read_text().replace('"num_devices": 1', '"num_devices": 8'))
    text = run_folder(copy_of) / "config.yaml"
    text.write_text(text.read_text().replace("num_devices: 1", "num_devices: null"))
    unfinish(copy_of)
    with pytest.raises(UserError, match=r"used 8 devices, here are 2: .*load_model=true"):
        go_on(copy_of)


def tensorboard(results):
    """What TensorBoard shows of a run."""
    accumulator = EventAccumulator(str(run_folder(results) / "tensorboard"))
    accumulator.Reload()
    return accumulator


def test_tensorboard_has_no_gaps_and_no_doubles(tmp_path, monkeypatch):
    """Killed after the third evaluation was logged, with the first checkpoint the last."""
    options = (*SIX, "arch.num_devices=1", "logger.checkpointing.save_interval_steps=32")
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save_if_due", save_only(1))
        break_at(patch, "train_block", 4, kill)
        with pytest.raises(Killed):
            train("ff_ippo", *options, f"logger.base_exp_path={tmp_path}", probe="RandomLength")
    assert list(read_metrics(tmp_path)) == ["step_0", "step_1", "step_2"]
    assert [path.name for path in checkpoints_of(tmp_path)] == ["32"]
    with monkeypatch.context() as patch:
        break_at(patch, "train_block", 1, kill)
        with pytest.raises(Killed):
            go_on(tmp_path)
    assert list(read_metrics(tmp_path)) == ["step_0"]
    go_on(tmp_path)
    for tag in ("train/entropy", "evaluation/mean_episode_return"):
        steps = [event.step for event in tensorboard(tmp_path).Scalars(tag)]
        assert steps == [32, 64, 96, 128, 160, 192]
    assert len(tensorboard(tmp_path).Scalars("absolute/mean_episode_return")) == 1


@pytest.mark.parametrize("call", [1, 2], ids=["evaluated again", "saved since"])
def test_tensorboard_after_a_stop_and_a_kill(call, tmp_path, monkeypatch):
    """Stopped between a block and its evaluation; killed before or after the next is saved."""
    options = (*SIX, "arch.num_devices=1", f"logger.base_exp_path={tmp_path}")
    with monkeypatch.context() as patch:
        break_at(patch, "evaluate_block", 3, send(signal.SIGTERM))
        with pytest.raises(Stopped):
            train("ff_ippo", *options, probe="RandomLength")
    assert checkpoints_of(tmp_path)[-1].name == "96.unevaluated"
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save_if_due", kill_at(call))
        with pytest.raises(Killed):
            go_on(tmp_path)
    go_on(tmp_path)
    for tag in ("train/entropy", "evaluation/mean_episode_return"):
        steps = [event.step for event in tensorboard(tmp_path).Scalars(tag)]
        assert steps == [32, 64, 96, 128, 160, 192]
    go_on(tmp_path, "ff_ippo", "system.num_updates=7")
    steps = [x.step for x in tensorboard(tmp_path).Scalars("absolute/mean_episode_return")]
    assert steps == [224]


def kill_at(call):
    """Returns a `save_if_due` that saves, and is killed at this call."""
    calls = []

    def save(self, snapshot):
        calls.append(1)
        if len(calls) == call:
            kill()
        self.save_now(snapshot)

    return save


def test_an_evaluated_checkpoint_follows_the_one_of_a_stop(tmp_path, monkeypatch):
    options = (*SIX, "arch.num_devices=1", f"logger.base_exp_path={tmp_path}")
    with monkeypatch.context() as patch:
        break_at(patch, "evaluate_block", 3, send(signal.SIGTERM))
        with pytest.raises(Stopped):
            train("ff_ippo", *options, "logger.checkpointing.save_interval_steps=1000",
                  probe="RandomLength")  # fmt: skip
    with monkeypatch.context() as patch:
        break_at(patch, "train_block", 1, kill)
        with pytest.raises(Killed):
            go_on(tmp_path)
    assert [path.name for path in checkpoints_of(tmp_path)] == ["96"]


def test_one_process_at_a_time(finished):
    lock = lock_folder(run_folder(finished))
    with pytest.raises(UserError, match="another process is training there"):
        go_on(finished)
    lock.release()


def test_what_the_user_keeps_among_the_checkpoints_stays(copy_of):
    newest = checkpoints_of(copy_of)[-1]
    shutil.copytree(newest, newest.with_name("mine"))
    newest.with_name("note.txt").write_text("x")
    go_on(copy_of, "ff_ippo", "system.num_updates=7")
    assert (newest.with_name("mine") / "about.json").exists()
    assert newest.with_name("note.txt").exists()


def test_a_full_disk_on_resume(copy_of, monkeypatch):
    def full(config, folder):
        raise OSError(28, "No space left on device")

    before = (run_folder(copy_of) / "config.yaml").read_text()
    monkeypatch.setattr(experiment, "write_config", full)
    with pytest.raises(UserError, match=r"Can't write to .*: No space left on device"):
        go_on(copy_of, "ff_ippo", "system.num_updates=7")
    assert (run_folder(copy_of) / "config.yaml").read_text() == before


def save_only(evaluation):
    """Returns a `save_if_due` that saves after this evaluation alone, and waits."""

    def save(self, snapshot):
        if snapshot.progress.num_evaluations == evaluation:
            self.save_now(snapshot)

    return save


def test_long_blocks_are_warned_of_once(tmp_path, capsys):
    train(
        "ff_ippo", *SIX, f"logger.base_exp_path={tmp_path}", "arch.num_devices=1",
        "logger.checkpointing.max_block_seconds=0.0001", probe="RandomLength",
    )  # fmt: skip
    warning = "more than logger.checkpointing.max_block_seconds=0.0001"
    assert capsys.readouterr().err.count(warning) == 1


def test_a_short_run_is_saved_at_its_end_only(tmp_path):
    options = (*SIX, "arch.num_devices=1", f"logger.base_exp_path={tmp_path}")
    train("ff_ippo", *options, "logger.checkpointing.save_interval_steps=100000",
          probe="RandomLength")  # fmt: skip
    assert [path.name for path in checkpoints_of(tmp_path)] == ["192"]


def test_saving_can_be_turned_off(tmp_path, monkeypatch):
    options = (*SIX, "arch.num_devices=1", f"logger.base_exp_path={tmp_path}")
    break_at(monkeypatch, "wait", 2, send(signal.SIGTERM))
    with pytest.raises(Stopped, match=r"environment steps\.$"):
        train("ff_ippo", *options, "logger.checkpointing.save_model=false", probe="RandomLength")
    assert not checkpoints_of(tmp_path)


def test_starting_from_the_parameters_of_another_run(finished, tmp_path, monkeypatch):
    """On another number of devices; with a learning rate near 0 they stay what they were."""
    options = (
        *SIX, f"logger.base_exp_path={tmp_path}", "arch.num_devices=2", "system.seed=5",
        "system.actor_lr=1e-30", "system.critic_lr=1e-30", "logger.checkpointing.load_model=true",
        f"logger.checkpointing.load_args.run={run_folder(finished)}",
    )  # fmt: skip
    train("ff_ippo", *options, probe="RandomLength")
    before = read_newest(run_folder(finished) / "checkpoints").arrays
    after = read_newest(run_folder(tmp_path) / "checkpoints").arrays
    names = [name for name in before if name.startswith("learner_state/params/")]
    assert len(names) >= 8
    for name in names:
        np.testing.assert_array_equal(before[name], after[name])
    assert after["learner_state/optim_states/actor/1/0/count"] == 6 * 4 * 2  # its own


def test_parameters_that_do_not_fit(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "compile_programs", None)
    options = (
        *SIX, f"logger.base_exp_path={tmp_path}", "logger.checkpointing.load_model=true",
        f"logger.checkpointing.load_args.run={run_folder(finished)}",
    )  # fmt: skip
    wider = "network.actor_network.pre_torso.layer_sizes=[32]"
    with pytest.raises(
        UserError, match=r"don't fit: learner_state/params/actor/params/.* is float"
    ):
        train("ff_ippo", *options, wider, probe="RandomLength")
    assert list(tmp_path.iterdir()) == []
