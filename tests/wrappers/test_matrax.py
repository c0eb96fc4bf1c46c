"""Matrax's games, wrapped: what they pay, what the players see, what is learnt."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mava.check_env import find_problems
from mava.config import UserError, make_env, scenarios_of
from mava.types import LAST, MID, Discrete
from mava.wrappers.episode_metrics import EpisodeMetrics
from mava.wrappers.matrax import MatraxEnv
from tests.running import make_run, trained

TWO_BY_TWO = [f"NoConflict-{i}" for i in range(21)] + [f"Conflict-{i}" for i in range(57)]


def payoffs(task):
    """Returns what both players get for every pair of actions: (A, A, 2)."""
    env = MatraxEnv(task)
    state, _ = env.reset(jax.random.key(0))
    num_actions = env.action_spec.num_actions
    pairs = jnp.stack(jnp.meshgrid(*[jnp.arange(num_actions)] * 2, indexing="ij"), axis=-1)
    return np.array(jax.vmap(jax.vmap(lambda pair: env.step(state, pair)[1].reward))(pairs))


@pytest.mark.parametrize("scenario", scenarios_of("Matrax"))
def test_scenarios_keep_the_contract(scenario):
    cfg = make_run("ff_ippo", "env=matrax", f"env/scenario={scenario}").composed.env
    assert cfg.scenario.task_name == cfg.scenario.task_config.task.lower() == scenario
    env = make_env(cfg)
    assert env.time_limit == (1000 if "stateful" in scenario else 500)
    assert env.action_spec == Discrete(3)
    state, first = jax.eval_shape(env.reset, jax.random.key(0))
    _, later = jax.eval_shape(env.step, state, jax.ShapeDtypeStruct((2,), jnp.int32))
    spec = jax.tree.map(lambda x: (x.shape, x.dtype), env.observation_spec)
    for timestep in (first, later):
        assert jax.tree.map(lambda x: (x.shape, x.dtype), timestep.observation) == spec


@pytest.mark.parametrize("task", ["Climbing-stateful-v0", "Conflict-0-stateless-v0"])
def test_games_keep_the_contract(task):
    assert find_problems(MatraxEnv(task, time_limit=3)) == []


@pytest.mark.parametrize("state", ["stateless", "stateful"])
def test_common_payoffs_are_those_published(state):
    """Claus and Boutilier 1998, rows and columns of the penalty game in Matrax's order."""
    climbing = [[11, -30, 0], [-30, 7, 0], [0, 6, 5]]
    both = np.stack([climbing, climbing], axis=-1)
    np.testing.assert_array_equal(payoffs(f"Climbing-{state}-v0"), both)
    for k in (0, 25, 50, 75, 100):
        penalty = [[-k, 0, 10], [0, 2, 0], [10, 0, -k]]
        both = np.stack([penalty, penalty], axis=-1)
        np.testing.assert_array_equal(payoffs(f"Penalty-{k}-{state}-v0"), both)


def test_games_of_two_actions_rank_their_outcomes():
    """Rapoport and Guyer 1966: each player ranks the outcomes 1 to 4; the best is the same one for
    both in the games without a conflict, and only there; all games differ.
    """
    tables = {task: MatraxEnv(f"{task}-stateless-v0")._env.payoff_matrix for task in TWO_BY_TWO}
    games = {task: np.moveaxis(np.array(table), 0, -1) for task, table in tables.items()}
    for task, game in games.items():
        np.testing.assert_array_equal(np.sort(game.reshape(4, 2), axis=0).T, [[1, 2, 3, 4]] * 2)
        assert (game == 4).all(axis=-1).any() == task.startswith("No")
    assert len({game.tobytes() for game in games.values()}) == 78
    prisoners = [[[2, 2], [4, 1]], [[1, 4], [3, 3]]]  # number 12; to defect is action 0
    np.testing.assert_array_equal(games["Conflict-5"], prisoners)
    np.testing.assert_array_equal(payoffs("Conflict-5-stateful-v0"), prisoners)


def test_the_limit_cuts():
    """Players of the prisoner's dilemma, one of them defects: 4 and 1 a round, on average 2.5."""
    env = EpisodeMetrics(MatraxEnv("Conflict-5-stateless-v0", time_limit=3))
    state, _ = env.reset(jax.random.key(0))
    for step in range(3):
        state, timestep = env.step(state, jnp.array([0, 1]))
        assert timestep.step_type == (LAST if step == 2 else MID)
        np.testing.assert_array_equal(timestep.discount, 1.0)
        np.testing.assert_array_equal(timestep.reward, [4.0, 1.0])
    assert timestep.extras["episode_return"] == 7.5


@pytest.mark.parametrize("stateful", [True, False])
def test_players_see_the_last_round(stateful):
    env = MatraxEnv(f"Climbing-state{'ful' if stateful else 'less'}-v0")
    state, first = env.reset(jax.random.key(0))
    np.testing.assert_array_equal(first.observation.agents_view, np.zeros((2, 6)))
    _, timestep = env.step(state, jnp.array([0, 2]))
    seen = np.array([[1, 0, 0, 0, 0, 1], [0, 0, 1, 1, 0, 0]])  # own action first
    np.testing.assert_array_equal(timestep.observation.agents_view, stateful * seen)


@pytest.mark.parametrize(
    "task", ["Climbing", "climbing-stateful-v0", "Snake-v1", "Conflict-57-stateful-v0"]
)
def test_refuses_what_is_no_game(task):
    cfg = make_run("ff_ippo", "env=matrax", f"env.scenario.task_config.task={task}").composed.env
    with pytest.raises(UserError, match=f"task={task} must be Climbing"):
        make_env(cfg)


FAST = ("arch.num_envs=16", "system.actor_lr=0.02", "system.critic_lr=0.02", "system.gamma=0.5")


@pytest.mark.parametrize("task", ["Conflict-5", "NoConflict-0"])
@pytest.mark.parametrize("state", ["stateless", "stateful"])
def test_dominant_actions_are_learnt(task, state):
    """Action 0 is better for each player whatever the other does, though both defect in the first
    game and get less than if neither did.
    """
    task = f"env.scenario.task_config.task={task}-{state}-v0"
    algo, learner_state = trained("ff_ippo", 80, *FAST, "env=matrax", task, probe=None)
    first = algo.env.env.reset(jax.random.key(0))[1].observation
    policy = algo.actor.apply(learner_state.params.actor, first)
    assert (np.exp(policy.log_prob(jnp.array([0, 0]))) > 0.9).all()
