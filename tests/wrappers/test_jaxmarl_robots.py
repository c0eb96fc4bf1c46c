"""JaxMARL's robots, wrapped."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mava.config import scenarios_of
from mava.types import LAST, MID, Continuous, Discrete
from mava.wrappers.episode_metrics import EpisodeMetrics
from mava.wrappers.jaxmarl import quiet
from mava.wrappers.jaxmarl_robots import JaxNavEnv, MabraxEnv


@pytest.fixture(scope="module")
def cheetah():
    env = EpisodeMetrics(MabraxEnv("halfcheetah_6x1", time_limit=3))
    return env, jax.jit(env.reset), jax.jit(env.step)


def test_mabrax_plays_braxs_episodes(cheetah):
    """The same states and rewards as Brax itself, cut at the limit."""
    env, reset, step = cheetah
    assert (env.num_agents, env.action_spec) == (6, Continuous(1))
    state, first = reset(jax.random.key(0))
    theirs = env.env._env.env
    their_step, their_state = jax.jit(theirs.step), state.env_state.env_state
    action = jnp.linspace(-1.0, 1.0, 6)[:, None]
    rewards = []
    for i in range(3):
        state, timestep = step(state, action)
        with quiet():
            their_state = their_step(their_state, action[:, 0])
        rewards.append(float(their_state.reward))
        np.testing.assert_allclose(timestep.reward, rewards[-1], rtol=1e-4)
        np.testing.assert_allclose(timestep.observation.global_state, their_state.obs, rtol=1e-3)
        assert timestep.step_type == (LAST if i == 2 else MID)
        np.testing.assert_array_equal(timestep.discount, 1.0)
    np.testing.assert_allclose(timestep.extras["episode_return"], sum(rewards), rtol=1e-4)
    view = first.observation.agents_view
    assert view.shape == (6, 9)
    np.testing.assert_array_equal(view[jnp.array([2, 5]), 8], 0.0)  # these see 8 numbers


@pytest.mark.parametrize(("done", "truncation"), [(1.0, 0.0), (1.0, 1.0), (0.0, 0.0)])
def test_mabrax_falling_is_an_end(cheetah, done, truncation):
    """Brax's truncation flag is 0 where both coincide."""
    env, reset, _ = cheetah
    state, _ = reset(jax.random.key(0))
    inner = state.env_state.env_state
    inner = inner.replace(done=done, info={**inner.info, "truncation": truncation})
    assert bool(env.env._terminated(inner)) == (done == 1 and truncation == 0)


@pytest.mark.slow
def test_mabrax_robots_fall():
    env = MabraxEnv("hopper_3x1", time_limit=100)
    state, timestep = jax.jit(env.reset)(jax.random.key(0))
    step = jax.jit(env.step)
    while not timestep.last():
        state, timestep = step(state, jnp.ones((3, 1)))
    assert timestep.observation.step_count < 100
    np.testing.assert_array_equal(timestep.discount, 0.0)


def test_mabrax_robots_have_scenarios():
    tasks = {
        "ant_4x2": 4,
        "halfcheetah_6x1": 6,
        "hopper_3x1": 3,
        "humanoid_9|8": 2,
        "walker2d_2x3": 2,
    }
    assert sorted(scenarios_of("MABrax")) == sorted(name.replace("|", "_") for name in tasks)
    for task, num_agents in tasks.items():
        assert MabraxEnv(task).num_agents == num_agents
    padded = MabraxEnv("humanoid_9|8")
    np.testing.assert_array_equal(padded._action_mask.sum(axis=1), [9, 8])
    with pytest.raises(ValueError, match="task=cat must be one of ant_4x2"):
        MabraxEnv("cat")


WITHOUT_BRAX = """
import sys
sys.modules["brax"] = None
out = sys.stdout
from mava.config import UserError, make_env
from omegaconf import OmegaConf
cfg = {"factory": "mava.wrappers.jaxmarl_robots.MabraxEnv", "kwargs": {},
       "scenario": {"task_config": {"task": "ant_4x2"}}}
try:
    make_env(OmegaConf.create(cfg))
except UserError as error:
    assert 'pip install "mava[brax]"' in str(error), error
    assert sys.stdout is out
    print("refused")
"""


def test_a_missing_brax_is_named():
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_BRAX], check=True, capture_output=True, text=True
    )
    assert result.stdout == "refused\n"


@pytest.fixture(scope="module")
def nav():
    env = JaxNavEnv(num_beams=20, time_limit=3)
    state, _ = jax.jit(env.reset)(jax.random.key(0))
    return env, jax.jit(env.step), state


STAND = jnp.array([[-1.0, 0.0], [-1.0, 0.0]])  # speed 0 is the lowest


def put(state, **arrays):
    return state.replace(env_state=state.env_state.replace(**arrays))


def test_robots_that_arrive_win(nav):
    _, step, state = nav
    places = state.env_state.pos
    goals = state.env_state.goal.at[0].set(places[0])
    state, timestep = step(put(state, goal=goals), STAND)
    np.testing.assert_array_equal(timestep.observation.agent_mask, True)
    np.testing.assert_array_equal(timestep.discount, 1.0)
    assert timestep.step_type == MID
    driven, _ = step(state, jnp.array([[1.0, 0.0], [-1.0, 0.0]]))  # who arrived still drives
    assert np.any(driven.env_state.pos[0] != places[0])
    # 4 for the goal; 0.01 less for time; half of a robot's own and half of the mean.
    np.testing.assert_allclose(timestep.reward, [3.0 - 0.01, 1.0 - 0.01], atol=1e-5)
    state, timestep = step(put(state, goal=places), STAND)
    assert timestep.step_type == LAST
    np.testing.assert_array_equal(timestep.discount, 0.0)
    assert timestep.extras["won_episode"]
    assert timestep.extras["env_metrics"]["ratio_arrived"] == 1


def test_robots_that_crash_lose(nav):
    _, step, state = nav
    places = jnp.tile(state.env_state.pos[:1], (2, 1))
    _, timestep = step(put(state, pos=places, step=jnp.int32(2)), STAND)  # at the limit, too
    assert timestep.step_type == LAST
    np.testing.assert_array_equal(timestep.discount, 0.0)
    assert not timestep.extras["won_episode"]
    assert timestep.extras["env_metrics"]["ratio_crashed"] == 1
    np.testing.assert_array_equal(timestep.observation.agent_mask, False)
    assert (timestep.reward < -4).all()


def test_robots_are_cut_at_the_limit(nav):
    _, step, state = nav
    for i in range(3):
        state, timestep = step(state, STAND)
        assert timestep.step_type == (LAST if i == 2 else MID)
    np.testing.assert_array_equal(timestep.discount, 1.0)
    np.testing.assert_array_equal(timestep.observation.agent_mask, True)


def test_bad_fractions_are_refused():
    for option in ({"fill": 2}, {"individual_reward": -0.5}):
        with pytest.raises(ValueError, match="must be between 0 and 1"):
            JaxNavEnv(**option)


def test_robots_take_both_kinds_of_actions(nav):
    env, _, _ = nav
    discrete = JaxNavEnv(num_beams=20, action_type="discrete")
    assert (env.action_spec, discrete.action_spec) == (Continuous(2), Discrete(15))
    speeds = env._actions(jnp.array([[1.0, -1.0], [0.0, 0.5]]))
    np.testing.assert_allclose(list(speeds.values()), [[1.0, -0.6], [0.5, 0.3]], rtol=1e-6)
    speeds = discrete._actions(jnp.array([4, 12]))
    np.testing.assert_allclose(list(speeds.values()), [[0.0, -0.5], [1.0, 0.0]])
    with pytest.raises(ValueError, match="action_type=some"):
        JaxNavEnv(action_type="some")
