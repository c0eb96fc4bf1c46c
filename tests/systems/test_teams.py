"""Teams with parameters of their own, in whole updates."""

import jax
import numpy as np
import pytest

from mava import experiment, summary
from mava.config import UserError
from tests.running import (
    build,
    make_run,
    mean_return,
    over_axes,
    read_metrics,
    streams,
    system_module,
    tiny,
    train,
)

SLOW = pytest.mark.slow
PER_TEAM = ("network.policies=per_team", "system.add_agent_id=false")


def updated(name, *overrides, probe="Teams", **kwargs):
    """Returns the parameters before and after one update: (actor, critic)."""
    _, system, _ = build(name, *overrides, probe=probe, **kwargs)
    start = jax.jit(system.init)(jax.random.key(0))
    end, *_ = over_axes(system.update)(start, streams(system, jax.random.key(1)))
    return jax.tree.map(np.asarray, (start.params, jax.tree.map(lambda x: x[0, 0], end.params)))


def of_team(name, params, team):
    """Returns a team's actor and critic: left has 2 agents, so it is the first of the sizes."""
    central = "mappo" in name
    critic = jax.tree.map(lambda x: x[team], params.critic[0]) if central else params.critic[team]
    return params.actor[team], critic


def equal(x, y):
    pairs = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    "name",
    ["ff_ippo", "rec_mappo", *(pytest.param(x, marks=SLOW) for x in ("ff_mappo", "rec_ippo"))],
)
def test_no_team_moves_the_other(name):
    """Only the rewards of the left differ: nothing of the right does. Frozen, nothing moves."""
    start, end = updated(name, *PER_TEAM)
    _, other = updated(name, *PER_TEAM, scale=50.0)
    _, frozen = updated(name, *PER_TEAM, "system.frozen_teams=[left]")
    for team in (0, 1):
        assert not equal(of_team(name, start, team)[0], of_team(name, end, team)[0])
    assert not equal(of_team(name, other, 0)[1], of_team(name, end, 0)[1])
    assert equal(of_team(name, other, 1), of_team(name, end, 1))
    assert equal(of_team(name, frozen, 0), of_team(name, start, 0))
    assert equal(of_team(name, frozen, 1), of_team(name, end, 1))


def test_one_team_is_as_if_all_shared():
    one = updated("ff_ippo", "network.policies=per_team", probe="RightAction")
    shared = updated("ff_ippo", "network.policies=shared", probe="RightAction")
    assert equal(one, shared)


def test_a_team_alone_learns_what_it_learns_beside_another():
    """From the same start: its loss, its clipping and its steps do not know how many teams are."""
    _, both = updated("ff_ippo", *PER_TEAM)
    _, faster = updated("ff_ippo", *PER_TEAM, "system.actor_lr_by_team={right: 0.01}")
    start, _ = updated("ff_ippo", *PER_TEAM)
    assert equal(both.actor[0], faster.actor[0])
    steps = [
        np.concatenate([np.ravel(x) for x in jax.tree.leaves(jax.tree.map(np.subtract, after, x))])
        for after, x in ((both.actor[1], start.actor[1]), (faster.actor[1], start.actor[1]))
    ]
    assert np.median(np.abs(steps[1])) > 5 * np.median(np.abs(steps[0]))  # the rate is ten times


@pytest.mark.parametrize(
    ("policies", "reward"),
    [
        pytest.param("shared", 0.6, marks=SLOW),  # the larger team's action
        ("per_team", 1.0),
        pytest.param("per_agent", 1.0, marks=SLOW),
        ("{left: [0, 3], first: [1], others: [2, 4]}", 1.0),
    ],
)
def test_learns_what_each_team_wants(policies, reward):
    options = ("system.add_agent_id=false", f"network.policies={policies}", "system.actor_lr=0.01")
    assert mean_return("ff_ippo", 60, *options, probe="Teams") == pytest.approx(reward, abs=0.07)


def test_returns_of_teams_are_logged(tmp_path, capsys):
    train("ff_mappo", *tiny("ff_mappo"), *PER_TEAM, "logger.use_tb=false", "arch.num_devices=1",
          "system.frozen_teams=[right]", f"logger.base_exp_path={tmp_path}", probe="Teams",
          scale=10.0)  # fmt: skip
    record = read_metrics(tmp_path)
    for step in record.values():
        left, right = (step[f"mean_episode_return/{team}"][0] for team in ("left", "right"))
        assert 0 <= left <= 10
        assert 0 <= right <= 1
        mean = (2 * left + 3 * right) / 5
        assert step["mean_episode_return"][0] == pytest.approx(mean, abs=1e-5)
    assert "(left " in capsys.readouterr().out


def test_the_best_parameters_are_those_of_the_team_that_learns():
    values = {
        "mean_episode_return": 1.0,
        "mean_episode_return/left": 5.0,
        "mean_episode_return/right": -5.0,
    }
    for frozen, expected in (
        ("[]", 1.0),
        ("[right]", 5.0),
        ("[left]", -5.0),
        ("[left, right]", 1.0),
    ):
        run = make_run("ff_ippo", *PER_TEAM, f"system.frozen_teams={frozen}", probe="Teams")
        assert summary.return_of_learners(values, run) == expected


def test_groups_of_the_config_have_returns_of_their_own():
    groups = "network.policies={a: [0, 3, 1], b: [2, 4]}"
    env, _, _ = build("ff_ippo", groups, "system.frozen_teams=[b]", probe="Teams")
    _, timestep = env.reset(jax.random.key(0))
    names = [name for name in timestep.extras if name.startswith("episode_return/")]
    assert names == ["episode_return/a", "episode_return/b"]


def test_unknown_teams_are_refused():
    with pytest.raises(UserError, match=r"There is no team up .* there is left, right"):
        build("ff_ippo", *PER_TEAM, "system.frozen_teams=[up]", probe="Teams")


def test_stored_networks_without_groups_still_work():
    run = make_run("ff_ippo", *tiny("ff_ippo"), "~network.policies", probe="Teams")
    _, system, _ = experiment.build(system_module("ff_ippo"), run)
    assert set(jax.eval_shape(system.init, jax.random.key(0)).params.actor) == {"params"}
