"""Whole runs inside the process: counting, results, determinism, early ends."""

import dataclasses
import json
import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mava
from mava import experiment, signals, training
from mava.plan import make_plan
from mava.programs import compile_programs, split_keys
from mava.training import Training
from mava.types import System
from tests.running import (
    TINY,
    make_run,
    read_metrics,
    run_folder,
    system_module,
    tiny,
    train,
    without_times,
)

QUIET = (*TINY, "logger.use_console=false", "logger.use_tb=false")


def test_json_loads_by_the_rules_of_marl_eval(tmp_path):
    """Also with one episode an evaluation, and a win rate."""
    train(
        "ff_ippo", *QUIET, f"logger.base_exp_path={tmp_path}", "arch.num_eval_episodes=1",
        "arch.num_absolute_metric_eval_episodes=1", "system.num_updates=3", "arch.num_evaluation=3",
        "system.seed=7", probe="RandomLength",
    )  # fmt: skip
    content = json.loads((run_folder(tmp_path) / "metrics.json").read_text())
    assert list(content) == ["Probe"]
    assert list(content["Probe"]) == ["RandomLength"]
    assert list(content["Probe"]["RandomLength"]) == ["ff_ippo"]
    assert list(content["Probe"]["RandomLength"]["ff_ippo"]) == ["seed_7"]
    record = read_metrics(tmp_path)
    assert list(record) == ["step_0", "step_1", "step_2", "absolute_metrics"]
    metrics = ["mean_episode_return", "win_rate", "steps_per_second"]
    for index in range(3):
        step = record[f"step_{index}"]
        assert list(step) == ["step_count", "elapsed_time", *metrics]
        assert isinstance(step["step_count"], int)
        assert step["step_count"] == (index + 1) * 8 * 4 * 2
        assert all(len(step[name]) == 1 for name in metrics)
        assert step["win_rate"][0] in (0.0, 100.0)
    assert list(record["absolute_metrics"]) == metrics
    elapsed = [record[f"step_{index}"]["elapsed_time"] for index in range(3)]
    assert elapsed[0] == 0.0
    assert elapsed == sorted(elapsed)


def test_the_folder_holds_what_is_needed_to_know_the_run(tmp_path):
    train("ff_mappo", *TINY, f"logger.base_exp_path={tmp_path}", probe="RightAction")
    folder = run_folder(tmp_path)
    assert folder.relative_to(tmp_path).parts[:4] == ("ff_mappo", "Probe", "RightAction", "seed_42")
    names = sorted(file.name for file in folder.iterdir() if file.name != ".lock")
    assert names == [
        "checkpoints", "config.yaml", "ff_mappo.py", "metrics.json", "tensorboard", "versions.json",
    ]  # fmt: skip
    versions = json.loads((folder / "versions.json").read_text())
    assert versions["packages"]["jax"] == jax.__version__
    commit = versions["mava_git_commit"]
    assert commit is None or len(commit) >= 40
    assert "rollout_length: 8" in (folder / "config.yaml").read_text()
    (events,) = (folder / "tensorboard").iterdir()
    assert b"evaluation/mean_episode_return" in events.read_bytes()
    assert b"train/entropy" in events.read_bytes()


def test_same_seed_same_results(tmp_path):
    records = []
    for i, seed in enumerate((3, 3, 4)):
        options = (f"logger.base_exp_path={tmp_path / str(i)}", f"system.seed={seed}")
        train("ff_ippo", *QUIET, *options, probe="RandomLength")
        records.append(without_times(read_metrics(tmp_path / str(i))))
    assert records[0] == records[1]
    assert records[0] != records[2]


class Counted:
    """Counts calls of the environment's step, from inside the compiled program."""

    def __init__(self, vector_env):
        self.vector_env, self.steps = vector_env, []

    def __getattr__(self, name):
        return getattr(self.vector_env, name)

    def step(self, state, action, key):
        jax.debug.callback(lambda _: self.steps.append(1), state.env_state.step_count[0])
        return self.vector_env.step(state, action, key)


@pytest.mark.parametrize(("devices", "replicas"), [(1, 1), (2, 1), (2, 2)])
def test_logged_steps_are_the_steps_taken(devices, replicas, tmp_path, monkeypatch):
    counted = []
    make = experiment.make_vector_env

    def make_counted(run):
        counted.append(Counted(make(run)))
        return counted[-1]

    monkeypatch.setattr(experiment, "make_vector_env", make_counted)
    train(
        "ff_ippo", *QUIET, f"logger.base_exp_path={tmp_path}", f"arch.num_devices={devices}",
        f"system.update_batch_size={replicas}", "system.total_timesteps=500", probe="RightAction",
    )  # fmt: skip
    jax.effects_barrier()
    steps = sum(len(env.steps) for env in counted) * 4  # a call steps the copies of one stream
    per_update = 8 * 4 * devices * replicas
    assert steps == -(-500 // per_update) * per_update  # the budget, rounded up
    assert read_metrics(tmp_path)["step_1"]["step_count"] == steps


@pytest.mark.parametrize(
    ("num_updates", "num_evaluation", "expected"),
    [(10, 4, [2, 3, 2, 3]), (5, 5, [1] * 5), (7, 1, [7])],
)
def test_blocks_share_out_the_updates(num_updates, num_evaluation, expected):
    run = make_run("ff_ippo", f"system.num_updates={num_updates}",
                   f"arch.num_evaluation={num_evaluation}")  # fmt: skip
    system = System(*[None] * 6, steps_per_update=32)
    plan = make_plan(run, system, jax.devices()[:1])
    ends = [plan.block_end(block) for block in range(plan.num_evaluations)]
    assert [end - start for start, end in zip([0, *ends], ends, strict=False)] == expected


def test_update_is_traced_once(tmp_path, monkeypatch):
    module = system_module("ff_ippo")
    traces = []
    update = module.update
    monkeypatch.setattr(module, "update", lambda *args: (traces.append(1), update(*args))[1])
    options = ("system.num_updates=5", "arch.num_evaluation=3")  # blocks of 1, 2 and 2 updates
    train("ff_ippo", *QUIET, *options, f"logger.base_exp_path={tmp_path}", probe="RightAction")
    assert len(traces) == 1


def test_evaluation_sees_the_newest_parameters(tmp_path, monkeypatch):
    """The policy is overwritten in the update: the evaluation after it must already act on it."""
    module = system_module("ff_ippo")
    learn = module.learn

    def to_certain(algo, learner_state, samples, key):
        """Makes the policy always take action 1."""
        learner_state, metrics = learn(algo, learner_state, samples, key)
        actor = jax.tree.map(jnp.zeros_like, learner_state.params.actor)
        actor["params"]["head"]["Dense_0"]["bias"] = jnp.array([-50.0, 50.0])
        params = learner_state.params._replace(actor=actor)
        return learner_state.replace(params=params), metrics

    monkeypatch.setattr(module, "learn", to_certain)
    train("ff_ippo", *QUIET, f"logger.base_exp_path={tmp_path}", "arch.num_eval_episodes=64",
          probe="RewardOfAction")  # fmt: skip
    assert read_metrics(tmp_path)["step_0"]["mean_episode_return"] == [1.0]


def test_two_runs_of_the_same_second_do_not_collide(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda *args: "20260101-000000")
    for _ in range(2):
        train("ff_ippo", *QUIET, f"logger.base_exp_path={tmp_path}", probe="RightAction")
    assert len(list(tmp_path.rglob("metrics.json"))) == 2


def test_nan_stops_and_names_the_update(tmp_path, monkeypatch):
    """The 4th update (index 3, in the second block of 2) gives a NaN."""
    module = system_module("ff_ippo")
    learn = module.learn

    def poisoned(algo, learner_state, samples, key):
        count = learner_state.optim_states.actor[1][0].count  # gradient steps so far
        learner_state, metrics = learn(algo, learner_state, samples, key)
        bad = count >= 3 * algo.config.ppo_epochs * algo.config.num_minibatches
        metrics = {**metrics, "actor_loss": jnp.where(bad, jnp.nan, metrics["actor_loss"])}
        return learner_state, metrics

    monkeypatch.setattr(module, "learn", poisoned)
    options = ("system.num_updates=6", "arch.num_evaluation=3", "arch.num_devices=1")
    with pytest.raises(experiment.TrainingError, match=r"actor_loss.* update 3, after 128 env"):
        train("ff_ippo", *QUIET, *options, f"logger.base_exp_path={tmp_path}", probe="RightAction")
    record = read_metrics(tmp_path)
    assert list(record) == ["step_0"]  # what was logged stays, the bad block is not evaluated


@pytest.mark.parametrize(
    ("good", "expected"),
    [
        ([True, False], [1.0, 0.0, 1.0]),  # the first block's
        ([False, True], [0.0, 1.0, 1.0]),  # the last block's
    ],
)
def test_the_absolute_metric_evaluates_the_best_parameters(good, expected, tmp_path, monkeypatch):
    """Action 1 pays; the policy takes it after the good blocks only."""
    module = system_module("ff_ippo")
    learn = module.learn

    def overwritten(algo, learner_state, samples, key):
        is_good = jnp.where(learner_state.optim_states.actor[1][0].count == 0, *good)
        learner_state, metrics = learn(algo, learner_state, samples, key)
        actor = jax.tree.map(jnp.zeros_like, learner_state.params.actor)
        bias = jnp.where(is_good, 50.0, -50.0) * jnp.array([-1.0, 1.0])
        actor["params"]["head"]["Dense_0"]["bias"] = bias
        params = learner_state.params._replace(actor=actor)
        return learner_state.replace(params=params), metrics

    monkeypatch.setattr(module, "learn", overwritten)
    train("ff_ippo", *QUIET, f"logger.base_exp_path={tmp_path}", probe="RewardOfAction")
    record = read_metrics(tmp_path)
    returns = [record[name]["mean_episode_return"][0] for name in record]
    assert returns == expected


def test_of_equally_good_parameters_the_latest_are_the_best(tmp_path, monkeypatch):
    """Every evaluation returns 1: the absolute metric is that of the last block's parameters."""
    compile_all, evaluated = experiment.compile_programs, []

    def watched(*args):
        programs = compile_all(*args)
        evaluate = programs.evaluate.result()
        spy: Future = Future()
        spy.set_result(lambda params, *rest: (evaluated.append(params), evaluate(params, *rest))[1])
        return dataclasses.replace(programs, evaluate=spy)

    monkeypatch.setattr(experiment, "compile_programs", watched)
    train("ff_ippo", *QUIET, f"logger.base_exp_path={tmp_path}", probe="ConstantReward")
    first, last, absolute = evaluated
    assert absolute is last
    assert absolute is not first


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_its_block(signum, tmp_path, monkeypatch):
    wait = Training.wait

    def interrupted(*args):
        os.kill(os.getpid(), signum)
        wait(*args)

    monkeypatch.setattr(Training, "wait", interrupted)
    monkeypatch.setattr(signals.os, "_exit", lambda code: None)  # a second one would exit at once
    with pytest.raises(signals.Stopped, match="64 environment steps") as stop:
        train("ff_ippo", *QUIET, f"logger.base_exp_path={tmp_path}", probe="RightAction")
    assert stop.value.exit_code == 128 + signum
    assert read_metrics(tmp_path) == {}  # valid JSON


def test_a_signal_in_the_last_evaluation_is_not_lost(tmp_path, monkeypatch):
    """The results are complete, but a sweep must not go on to its next job."""
    summarise, calls = training.summarise_episodes, []

    def interrupted(values):
        calls.append(1)
        if len(calls) == 3:  # two evaluations, then the absolute metric
            os.kill(os.getpid(), signal.SIGTERM)
        return summarise(values)

    monkeypatch.setattr(training, "summarise_episodes", interrupted)
    with pytest.raises(signals.Stopped):
        train("ff_ippo", *QUIET, f"logger.base_exp_path={tmp_path}", probe="RightAction")
    assert "absolute_metrics" in read_metrics(tmp_path)


def test_a_second_signal_exits_at_once(monkeypatch):
    codes = []
    monkeypatch.setattr(signals.os, "_exit", codes.append)
    with signals.StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.received, codes) == (signal.SIGTERM, [])
        os.kill(os.getpid(), signal.SIGTERM)
    assert codes == [143]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_debug_prints_every_metric(tmp_path, capsys):
    options = ("arch.debug=true", "system.num_updates=1000", "arch.num_evaluation=100")
    train("ff_ippo", *TINY, *options, f"logger.base_exp_path={tmp_path}", probe="RightAction")
    output = capsys.readouterr().out
    assert "1 cpu device(s) x 1 replica(s)" in output
    for name in ("actor_loss", "value_loss", "entropy", "clip_fraction", "actor_grad_norm"):
        assert output.count(f": {name} = ") == 2  # updates


def test_debug_stops_at_the_operation(tmp_path, monkeypatch):
    module = system_module("ff_ippo")
    monkeypatch.setattr(
        module, "values", lambda algo, params, obs: jnp.log(obs.agents_view[..., 0] * 0 - 1)
    )
    with pytest.raises(FloatingPointError, match="nan"):
        train("ff_ippo", *QUIET, "arch.debug=true", f"logger.base_exp_path={tmp_path}",
              probe="RightAction")  # fmt: skip


def test_a_block_can_be_profiled(tmp_path):
    train("ff_ippo", *QUIET, "logger.profile=1", f"logger.base_exp_path={tmp_path}",
          probe="RightAction")  # fmt: skip
    assert list((run_folder(tmp_path) / "profile").rglob("*.xplane.pb"))


def test_learning_rates_decay_to_zero():
    module = system_module("ff_ippo")
    for decay, last in ((True, 0.0), (False, 0.5)):
        config = module.Config(num_updates=3, decay_learning_rates=decay, actor_lr=0.5)
        optim = module.make_optim(config, config.actor_lr)
        params = {"w": jnp.ones(1)}
        state, sizes = optim.init(params), []
        for _ in range(3 * config.ppo_epochs * config.num_minibatches + 1):
            updates, state = optim.update({"w": jnp.ones(1)}, state, params)
            sizes.append(float(-updates["w"][0]))
        np.testing.assert_allclose([sizes[0], sizes[-1]], [0.5, last], atol=1e-3)


def test_memory_does_not_grow_with_the_updates_of_a_block():
    """One program serves any number of updates, and gives back states and a few scalars."""
    run = make_run("ff_ippo", *QUIET, "arch.num_devices=1", probe="RightAction")
    env, system, plan = experiment.build(system_module("ff_ippo"), run)
    with ThreadPoolExecutor(4) as pool:
        programs = compile_programs(env, system, plan, run, pool)
        setup, block = programs.setup.result(), programs.block.result()
    key = jax.random.key(0)
    *state, _ = setup(key, split_keys(key, plan), ())
    for num_updates in (1, 50):
        *state, metrics, first_bad, _ = block(*state, np.int32(num_updates), ())
        assert float(metrics.learn["entropy"][1]) == num_updates * 4 * 2  # epochs x minibatches
        assert all(leaf.size == 1 for leaf in jax.tree.leaves((metrics, first_bad)))


@pytest.mark.parametrize(
    ("system", "overrides"),
    [
        ("rec_mappo", ("env=smax", "network=lstm", "env.kwargs.time_limit=8")),
        pytest.param(
            *("ff_maac", ("env=smax", "env.kwargs.time_limit=8", "network.policies=shared")),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "ff_maac",
            ("env=lbf", "system.lagged_critic=true", "system.overlap_collection=true"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_systems_from_training_to_the_record(system, overrides, tmp_path):
    train(system, *tiny(system), *overrides, "logger.use_console=false", "logger.use_tb=false",
          "arch.num_devices=1", f"logger.base_exp_path={tmp_path}")  # fmt: skip
    record = read_metrics(tmp_path)
    final = record["absolute_metrics"]
    assert all(np.isfinite(value).all() for value in final.values())
    assert ("win_rate" in final) == ("env=smax" in overrides)
    assert 0 <= final.get("win_rate", [0])[0] <= 100


CONFIGS = Path(mava.__file__).parent / "configs"


@pytest.mark.parametrize("overlay", sorted((CONFIGS / "tuned").rglob("*.yaml")), ids=str)
def test_tuned_overlays_make_a_system(overlay):
    system, *_ = overlay.relative_to(CONFIGS / "tuned").parts
    name = overlay.relative_to(CONFIGS / "tuned").with_suffix("")
    run = make_run(system, f"+tuned={name}")
    assert run.task_name == overlay.stem
    experiment.build(system_module(system), run)
