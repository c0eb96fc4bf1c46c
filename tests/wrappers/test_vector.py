import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mava.types import FIRST, LAST, Discrete, Observation, TimeStep, array_spec
from mava.wrappers.episode_metrics import EpisodeMetrics
from mava.wrappers.vector import VectorEnv

NUM_ENVS = 9


class Marked:
    """Shows its reset key and its step; the action says whether the episode ends, and how.

    0 goes on, 1 terminates, 2 is cut.
    """

    num_agents, action_spec, time_limit = 1, Discrete(3), 100
    observation_spec = Observation(
        agents_view=array_spec((1, 5), jnp.float32),
        action_mask=array_spec((1, 3), bool),
        agent_mask=array_spec((1,), bool),
        step_count=array_spec((), jnp.int32),
    )

    def _timestep(self, state, step_type, discount):
        mark, step = state
        view = jnp.append(mark, step.astype(jnp.float32))[None]
        observation = Observation(
            agents_view=view,
            action_mask=jnp.ones((1, 3), bool),
            agent_mask=jnp.ones(1, bool),
            step_count=step,
        )
        return state, TimeStep(
            step_type=jnp.asarray(step_type, jnp.int8),
            reward=jnp.ones(1) * step,
            discount=jnp.ones(1) * discount,
            observation=observation,
            extras={},
        )

    def reset(self, key):
        data = jax.random.key_data(key)  # 2 x 32 bits, as 4 floats that hold 16 each
        mark = jnp.concatenate([data >> 16, data & 0xFFFF]).astype(jnp.float32)
        return self._timestep((mark, jnp.int32(0)), FIRST, 1.0)

    def step(self, state, action):
        ended = action[0] > 0
        step_type = jnp.where(ended, LAST, 1)
        return self._timestep((state[0], state[1] + 1), step_type, 1.0 * (action[0] != 1))


@pytest.fixture(scope="module")
def env():
    return VectorEnv(EpisodeMetrics(Marked()), NUM_ENVS)


@pytest.fixture(scope="module")
def step(env):
    return jax.jit(env.step)


def marks(timestep):
    return np.array(timestep.observation.agents_view[:, 0, :4])


def test_resets_are_pairwise_different(env):
    _, timestep = env.reset(jax.random.key(0))
    assert len(np.unique(marks(timestep), axis=0)) == NUM_ENVS


@pytest.mark.parametrize("finished", [[], [0], [8], [2, 5], list(range(5)), list(range(NUM_ENVS))])
def test_exactly_the_finished_copies_are_reset(env, step, finished):
    state, first = env.reset(jax.random.key(0))
    state, timestep = step(state, jnp.zeros((NUM_ENVS, 1), jnp.int32), jax.random.key(1))
    action = np.zeros((NUM_ENVS, 1), np.int32)
    action[finished] = 1 + np.arange(len(finished))[:, None] % 2  # terminated and cut in turn
    state, timestep = step(state, action, jax.random.key(2))

    going_on = [i for i in range(NUM_ENVS) if i not in finished]
    np.testing.assert_array_equal(np.flatnonzero(timestep.last()), finished)
    # The transition is the true one, also of finished copies.
    np.testing.assert_array_equal(timestep.reward[:, 0], 2.0)
    np.testing.assert_array_equal(timestep.extras["episode_length"], 2)
    np.testing.assert_array_equal(timestep.extras["episode_return"], 3.0)
    successor = timestep.extras["next_observation"]
    np.testing.assert_array_equal(successor.step_count, 2)
    np.testing.assert_array_equal(successor.agents_view[:, 0, :4], marks(first))
    # The observation is the successor's, or the first of a fresh episode.
    np.testing.assert_array_equal(timestep.observation.step_count[np.array(going_on, int)], 2)
    np.testing.assert_array_equal(timestep.observation.step_count[np.array(finished, int)], 0)
    np.testing.assert_array_equal(marks(timestep)[going_on], marks(first)[going_on])
    new = np.concatenate([marks(timestep)[finished], marks(first)])
    assert len(np.unique(new, axis=0)) == len(new)

    # The state goes with it: the next step counts from there.
    _, timestep = step(state, jnp.zeros((NUM_ENVS, 1), jnp.int32), jax.random.key(3))
    expected = np.where(np.isin(np.arange(NUM_ENVS), finished), 1, 3)
    np.testing.assert_array_equal(timestep.extras["episode_length"], expected)


def test_state_keeps_its_types(env):
    """Shapes, dtypes and weak types, or a loop over steps could not carry it."""
    state, timestep = jax.eval_shape(env.reset, jax.random.key(0))
    action = jnp.zeros((NUM_ENVS, 1), jnp.int32)
    after, next_timestep = jax.eval_shape(env.step, state, action, jax.random.key(0))
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), (state, timestep)) == (
        jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), (after, next_timestep))
    )


def test_refuses_no_environments():
    with pytest.raises(ValueError, match="num_envs=0"):
        VectorEnv(Marked(), 0)
