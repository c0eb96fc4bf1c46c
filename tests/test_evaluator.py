"""Exactly the episodes asked for, each with its own key, whatever the number of devices."""

import functools

import jax
import numpy as np
import pytest

from mava import experiment
from mava.evaluator import in_order, make_evaluate
from mava.summary import summarise_episodes
from tests.running import TINY, make_run, system_module


@functools.cache
def build(num_devices):
    run = make_run("ff_ippo", *TINY, f"arch.num_devices={num_devices}", probe="RandomLength")
    env, system, _ = experiment.build(system_module("ff_ippo"), run)
    return env.env, system


@functools.cache
def evaluator(num_devices, copies, max_episodes):
    env, system = build(num_devices)
    evaluate = make_evaluate(env, system, copies, num_devices, max_episodes, greedy=False)
    return jax.pmap(evaluate, in_axes=(None, None, None, 0), devices=jax.devices()[:num_devices])


def play(num_devices, copies, num_episodes, max_episodes=40, seed=3):
    _, system = build(num_devices)
    params = system.act_params(system.init(jax.random.key(0)))
    results = evaluator(num_devices, copies, max_episodes)(
        params,
        jax.random.key(seed),
        np.int32(num_episodes),
        np.arange(num_devices, dtype=np.int32),
    )
    return in_order(results, num_episodes)


@pytest.mark.parametrize("num_episodes", [1, 4, 7, 40])
@pytest.mark.parametrize(("num_devices", "copies"), [(1, 5), (2, 5), (2, 2)])
def test_exactly_the_episodes_asked_for(num_devices, copies, num_episodes):
    values = play(num_devices, copies, num_episodes)
    lengths = values["episode_length"]
    assert lengths.shape == (num_episodes,)
    assert set(lengths) <= {1.0, 100.0}  # complete episodes, none unplayed
    np.testing.assert_array_equal(values["episode_return"], lengths)
    np.testing.assert_array_equal(values["win_rate"], 100.0 * (lengths == 100))


def test_results_do_not_depend_on_devices_or_copies():
    reference = play(1, 5, 40)["episode_length"]
    for num_devices, copies in ((2, 5), (2, 2), (1, 7)):
        np.testing.assert_array_equal(play(num_devices, copies, 40)["episode_length"], reference)
    assert not np.array_equal(play(1, 5, 40, seed=4)["episode_length"], reference)


def test_short_episodes_are_not_favoured():
    """Half of the episodes are 100 steps long: 3 standard errors of 400 flips are 7.5 %."""
    lengths = play(2, 5, 400, max_episodes=400)["episode_length"]
    assert abs(np.mean(lengths == 100) - 0.5) < 0.075


def test_win_rate_divides_by_the_number_of_episodes():
    values = play(1, 5, 7)
    summary = summarise_episodes(values)
    wins = int((values["episode_length"] == 100).sum())
    assert summary["win_rate"] == pytest.approx(100 * wins / 7)
    assert summary["num_episodes"] == 7
    assert summary["mean_episode_return"] == pytest.approx((wins * 100 + 7 - wins) / 7)
