"""Several seeds in one program: each is the run that it would be alone."""

import dataclasses
import json
import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import numpy as np
import pytest
from omegaconf import OmegaConf

from mava import experiment, programs, signals, summary, training
from mava.checkpoints import read_newest
from mava.config import UserError
from mava.evaluator import in_order
from mava.stored_vault import find_episodes, find_vault, read_steps
from tests.running import (
    TINY,
    make_run,
    system_module,
    tiny,
    train,
    without_times,
)

QUIET = (*TINY, "arch.num_devices=1", "logger.use_console=false", "logger.use_tb=false")


def folder_of(root, seed):
    (folder,) = root.glob(f"*/*/*/seed_{seed}/*")
    return folder


class Compiled:
    """The programs of a tiny run, for these seeds."""

    def __init__(self, name, axes, seeds):
        options = (*tiny(name), *axes, f"arch.num_seeds={len(seeds)}")
        run = make_run(name, *options, probe="RandomLength")
        env, system, self.plan = experiment.build(system_module(name), run)
        with ThreadPoolExecutor(4) as pool:
            self.programs = programs.compile_programs(env, system, self.plan, run, pool)
        self.keys = [training.run_keys(seed) for seed in seeds]
        self.act_params = system.act_params if len(seeds) == 1 else jax.vmap(system.act_params)

    def setup(self):
        keys = ([x.init for x in self.keys], [x.reset for x in self.keys])
        *states, _ = self.programs.setup.result()(*programs.setup_keys(*keys, self.plan), ())
        return jax.tree.map(np.array, jax.tree.map(key_data, states)), states

    def train(self, states):
        """Returns the state, the metrics, and the returns of 4 episodes."""
        learner_state, _, metrics, bad, _ = self.programs.block.result()(*states, np.int32(3), ())
        assert np.all(np.asarray(bad) == -1)
        keys = programs.stack_seeds([x.evaluation for x in self.keys])
        devices = np.arange(len(self.plan.devices), dtype=np.int32)
        results = self.programs.evaluate.result()(
            self.act_params(learner_state), keys, np.int32(4), devices
        )
        return jax.device_get((learner_state.params, metrics, results))


def key_data(x):
    return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def assert_close(one, other, tolerance):
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "devices", "replicas", "one_by_one"),
    [("ff_ippo", 2, 2, ()), ("rec_ippo", 2, 1, ("cpu",))],
)
def test_each_seed_is_what_it_is_alone(name, devices, replicas, one_by_one, monkeypatch):
    monkeypatch.setattr(programs, "ONE_BY_ONE", one_by_one)
    axes = (f"arch.num_devices={devices}", f"system.update_batch_size={replicas}")
    alone = Compiled(name, axes, [8])
    together = Compiled(name, axes, [7, 8, 9])
    (learner_one, actor_one), states_one = alone.setup()
    (learner_all, actor_all), states_all = together.setup()
    assert_close(learner_one, jax.tree.map(lambda x: x[1], learner_all), 0)
    assert_close(actor_one, jax.tree.map(lambda x: x[:, 1], actor_all), 0)
    with pytest.raises(AssertionError):
        assert_close(actor_one, jax.tree.map(lambda x: x[:, 0], actor_all), 0)

    params, metrics, results = alone.train(states_one)
    all_params, all_metrics, all_results = together.train(states_all)
    assert_close((params, metrics), jax.tree.map(lambda x: x[1], (all_params, all_metrics)), 1e-4)
    with pytest.raises(AssertionError):
        assert_close(params, jax.tree.map(lambda x: x[0], all_params), 1e-4)
    one = in_order(results, 4)
    same = in_order({name: x[:, 1] for name, x in all_results.items()}, 4)
    assert_close(one, same, 1e-4)


@pytest.fixture(scope="module")
def three_seeds(tmp_path_factory):
    """Seeds 7 to 9 trained together and recorded, in <root>/together; seed 8 in <root>/alone."""
    root = tmp_path_factory.mktemp("seeds")
    options = (*QUIET, "system.num_updates=4", "arch.num_evaluation=4", "logger.use_tb=true")
    options = (*options, "logger.vault.record=true", "logger.vault.every=2", "arch.num_devices=2")
    train("ff_ippo", *options, "system.seed=7", "arch.num_seeds=3",
          f"logger.base_exp_path={root / 'together'}", probe="RandomLength")  # fmt: skip
    train("ff_ippo", *options, "system.seed=8",
          f"logger.base_exp_path={root / 'alone'}", probe="RandomLength")  # fmt: skip
    return root


def test_each_has_a_run_of_its_own(three_seeds):
    folders = [folder_of(three_seeds / "together", seed) for seed in (7, 8, 9)]
    assert len({folder.name for folder in folders}) == 1
    for seed, folder in zip((7, 8, 9), folders, strict=True):
        config = OmegaConf.load(folder / "config.yaml")
        assert (config.system.seed, config.arch.num_seeds) == (seed, 1)
        about = read_newest(folder / "checkpoints").about
        assert about["config"]["system"]["seed"] == seed
        assert list(folder.glob("tensorboard/*"))
    one, same = folder_of(three_seeds / "alone", 8), folders[1]
    records = [json.loads((folder / "metrics.json").read_text()) for folder in (one, same)]
    records = [x["Probe"]["RandomLength"]["ff_ippo"]["seed_8"] for x in records]
    assert without_times(records[0]) == without_times(records[1])
    stored = [read_newest(folder / "checkpoints") for folder in (one, same)]
    assert list(stored[0].arrays) == list(stored[1].arrays)
    assert_close(stored[0].arrays, stored[1].arrays, 1e-4)
    trained = [without_times({"train": x.about["progress"]["trained"]}) for x in stored]
    assert trained[0]["train"] == pytest.approx(trained[1]["train"], rel=1e-4)


def test_each_chooses_its_own_best_parameters(three_seeds):
    """In some evaluation one seed found its best, and another did not."""
    improved = []
    for seed in (7, 8, 9):
        folder = folder_of(three_seeds / "together", seed)
        record = json.loads((folder / "metrics.json").read_text())
        record = record["Probe"]["RandomLength"]["ff_ippo"][f"seed_{seed}"]
        returns = [record[f"step_{i}"]["mean_episode_return"][0] for i in range(4)]
        improved.append(np.maximum.accumulate(returns) == returns)
    assert np.any(np.any(improved, axis=0) & ~np.all(improved, axis=0))


def test_each_records_its_own_episodes(three_seeds):
    one, same, other = (
        read_steps(find_vault(folder_of(three_seeds / name, seed)))
        for name, seed in (("alone", 8), ("together", 8), ("together", 9))
    )
    assert len(find_episodes(one).end) > 0
    assert list(one) == list(same)
    assert all(np.allclose(one[name], same[name], atol=1e-4) for name in one)
    assert not np.array_equal(one["actions"], other["actions"])


def test_one_goes_on_alone(three_seeds):
    records = []
    for name in ("alone", "together"):
        folder = folder_of(three_seeds / name, 8)
        experiment.resume(folder, "ff_ippo", ["system.num_updates=5"])
        record = json.loads((folder / "metrics.json").read_text())
        records.append(record["Probe"]["RandomLength"]["ff_ippo"]["seed_8"])
    assert list(records[0]) == [*[f"step_{i}" for i in range(5)], "absolute_metrics"]
    assert without_times(records[0]) == without_times(records[1])
    with pytest.raises(UserError, match=r"arch\.num_seeds=2: can't be changed"):
        experiment.resume(folder, "ff_ippo", ["arch.num_seeds=2"])


def test_a_seed_that_fails_leaves_the_others(tmp_path, monkeypatch, capsys):
    """A NaN in the second block of the second seed."""
    compile_all, blocks = experiment.compile_programs, []

    def poisoned(*args):
        compiled = compile_all(*args)
        block = compiled.block.result()

        def with_nan(*states):
            *results, first_bad, steps = block(*states)
            blocks.append(1)
            return *results, first_bad.at[1].set(0 if len(blocks) == 2 else -1), steps

        future: Future = Future()
        future.set_result(with_nan)
        return dataclasses.replace(compiled, block=future)

    monkeypatch.setattr(experiment, "compile_programs", poisoned)
    with pytest.raises(experiment.TrainingError, match=r"^Seed 43: NaN .* update 1, after 64 env"):
        train("ff_ippo", *QUIET, "arch.num_seeds=3", f"logger.base_exp_path={tmp_path}",
              probe="RandomLength")  # fmt: skip
    assert "Seed 43: NaN" in capsys.readouterr().err
    for seed, steps in ((42, 3), (43, 1), (44, 3)):
        record = json.loads((folder_of(tmp_path, seed) / "metrics.json").read_text())
        assert len(record["Probe"]["RandomLength"]["ff_ippo"][f"seed_{seed}"]) == steps


def test_a_signal_saves_all(tmp_path, monkeypatch):
    wait = training.Training.wait

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        wait(*args)

    monkeypatch.setattr(training.Training, "wait", interrupted)
    monkeypatch.setattr(signals.os, "_exit", lambda code: None)  # a second one would exit at once
    with pytest.raises(signals.Stopped) as stop:
        train("ff_ippo", *QUIET, "arch.num_seeds=2", f"logger.base_exp_path={tmp_path}",
              probe="RandomLength")  # fmt: skip
    folders = [folder_of(tmp_path, seed) for seed in (42, 43)]
    assert str(stop.value).endswith(f"; to go on: -m resume={folders[0]},{folders[1]}.")
    assert all(list(folder.glob("checkpoints/*")) for folder in folders)


def test_all_start_from_the_same_pretrained_parameters(three_seeds, tmp_path):
    pretrained = folder_of(three_seeds / "alone", 8)
    train("ff_ippo", *QUIET, "arch.num_seeds=2", "logger.checkpointing.load_model=true",
          f"logger.checkpointing.load_args.run={pretrained}", "system.actor_lr=1e-12",
          f"logger.base_exp_path={tmp_path}", probe="RandomLength")  # fmt: skip
    name = "learner_state/params/actor/params/head/Dense_0/bias"
    arrays = [read_newest(folder_of(tmp_path, x) / "checkpoints").arrays[name] for x in (42, 43)]
    wanted = read_newest(pretrained / "checkpoints").arrays[name]
    assert all(np.allclose(x, wanted, rtol=1e-6) for x in arrays)


def test_the_console_shows_mean_and_interval(tmp_path, capsys):
    train("ff_ippo", *TINY, "arch.num_devices=1", "arch.num_seeds=2", "logger.use_tb=false",
          f"logger.base_exp_path={tmp_path}", probe="ConstantReward")  # fmt: skip
    output = capsys.readouterr().out
    assert "for each of 2 seeds, 42 to 43." in output
    assert output.count("return 1 (2 seeds, 95 % ± 0)") == 3
    assert ", 2 x " in output


def test_seeds_out_of_range_are_refused():
    run = make_run("ff_ippo", f"system.seed={2**32 - 2}", "arch.num_seeds=3")
    with pytest.raises(UserError, match="must be between 0 and"):
        experiment.run(system_module("ff_ippo"), run)
    with pytest.raises(UserError, match=r"arch\.num_seeds=0 must be at least 1"):
        make_run("ff_ippo", "arch.num_seeds=0")


def test_the_interval_is_students():
    values = [1.0, 2.0, 4.0]
    assert summary.half_interval(values) == pytest.approx(3.7946, abs=1e-4)  # scipy.stats.t
