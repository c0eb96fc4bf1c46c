"""Rover-Tower: an episode recorded from its authors' program, what a reset draws, what is cut."""

import itertools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from omegaconf import OmegaConf

import mava
from mava.check_env import find_problems
from mava.config import make_env, scenarios_of
from mava.environments.rover_tower import RoverTower, RoverTowerState
from mava.types import FIRST, LAST, MID

DATA = Path(__file__).parent.parent / "data" / "rover_tower.npz"
CONFIGS = Path(mava.__file__).parent / "configs" / "env"
NUM_COPIES = 8192


@pytest.fixture(scope="module")
def recorded():
    """200 steps of 4 pairs in the program of Iqbal & Sha (MIT licence), and their start."""
    data = dict(np.load(DATA))
    state = RoverTowerState(
        rover_positions=jnp.array(data["x0"][:4]),
        rover_velocities=jnp.zeros((4, 2)),
        tower_positions=jnp.array(data["x0"][4:]),
        landmark_positions=jnp.array(data["goal"]),  # it tells the goals' places alone
        tower_of=jnp.array(data["tower_of"], jnp.int32),
        rover_of=jnp.array(data["rover_of"], jnp.int32),
        goal_of=jnp.arange(4),
        message=jnp.full(4, -1),
        step_count=jnp.int32(0),
    )
    return data, state


@pytest.fixture(scope="module")
def run():
    """Returns a compiled function: the timesteps of 200 actions (200, N) from a state."""
    env = RoverTower(time_limit=200)
    return jax.jit(lambda state, actions: jax.lax.scan(env.step, state, actions)[1])


@pytest.fixture(scope="module")
def random_play():
    """First states and timesteps of many copies, and rewards and step types of random actions."""
    env = RoverTower()

    def random_step(state, key):
        action = jax.random.randint(key, (env.num_agents,), 0, env.action_spec.num_actions)
        state, timestep = env.step(state, action)
        return state, (timestep.reward, timestep.step_type, timestep.discount)

    def play(key):
        reset_key, steps_key = jax.random.split(key)
        state, first = env.reset(reset_key)
        return state, first, jax.lax.scan(random_step, state, jax.random.split(steps_key, 25))[1]

    return jax.jit(jax.vmap(play))(jax.random.split(jax.random.key(0), NUM_COPIES))


def test_it_is_the_authors_world(recorded, run):
    data, state = recorded
    steps = run(state, jnp.array(data["actions"], jnp.int32))
    view_sizes = RoverTower().view_sizes
    assert view_sizes == (13,) * 4 + (8,) * 4
    views = np.split(data["obs"], np.cumsum(view_sizes)[:-1], axis=1)
    expected = np.stack([np.pad(x, ((0, 0), (0, 13 - x.shape[1]))) for x in views], axis=1)
    np.testing.assert_allclose(steps.observation.agents_view, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(steps.reward, data["rewards"], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(steps.step_type, [MID] * 199 + [LAST])
    np.testing.assert_array_equal(steps.discount, 1.0)
    squares = data["rewards"] - 10.0 * (data["rewards"] > 0)
    assert (squares < -0.1725).any()  # off a goal
    assert ((squares < -(0.1725**2)) & (squares > -0.1725)).any()  # only the square is small
    assert (squares > -(0.1725**2)).any()  # both are


def test_the_first_views(recorded):
    """They are zeros where a message will be."""
    data, state = recorded
    view = jax.jit(RoverTower()._observation)(state).agents_view
    np.testing.assert_allclose(view[0], data["obs0_agent0"], atol=1e-6)
    np.testing.assert_allclose(view[7], np.pad(data["obs0_last"], (0, 5)), atol=1e-6)
    np.testing.assert_array_equal(view[:4, 4:9], 0.0)


def test_the_order_of_rovers_does_not_matter(recorded, run):
    data, state = recorded
    order = jnp.array([2, 0, 3, 1])  # new rover i is the old order[i]
    agents = jnp.concatenate([order, jnp.arange(4, 8)])
    other = state.replace(
        rover_positions=state.rover_positions[order],
        tower_of=state.tower_of[order],
        rover_of=jnp.argsort(state.tower_of[order]),
    )
    actions = jnp.array(data["actions"], jnp.int32)
    steps, others = run(state, actions), run(other, actions[:, agents])
    np.testing.assert_array_equal(steps.reward[:, agents], others.reward)
    views, other_views = steps.observation.agents_view, others.observation.agents_view
    np.testing.assert_array_equal(views[:, order], other_views[:, :4])
    np.testing.assert_array_equal(views[:, 4:, 4:], other_views[:, 4:, 4:])  # but whose guide


def test_only_the_pair_hears_and_is_paid(recorded, run):
    """What one tower says and where one rover goes is of no account to the other pairs."""
    data, state = recorded
    pair = [1, 4 + int(state.tower_of[1])]
    actions = jnp.array(data["actions"], jnp.int32)
    steps = run(state, actions)
    others = run(state, actions.at[:, jnp.array(pair)].set((actions[:, jnp.array(pair)] + 1) % 5))
    changed_views = (steps.observation.agents_view != others.observation.agents_view).any((0, 2))
    np.testing.assert_array_equal(np.flatnonzero(changed_views), pair)
    np.testing.assert_array_equal(np.flatnonzero((steps.reward != others.reward).any(axis=0)), pair)


def test_what_a_reset_draws(random_play):
    state, first, _ = jax.device_get(random_play)
    assert (first.step_type == FIRST).all()
    for places in (state.rover_positions, state.tower_positions, state.landmark_positions):
        assert (np.abs(places) <= 1.0).all()
        np.testing.assert_allclose(places.mean(axis=(0, 1)), 0.0, atol=0.02)
        np.testing.assert_allclose(places.var(axis=(0, 1)), 1 / 3, atol=0.01)
        assert len(np.unique(places.reshape(NUM_COPIES, -1), axis=0)) == NUM_COPIES
    orders, counts = np.unique(state.tower_of, axis=0, return_counts=True)
    np.testing.assert_array_equal(orders, list(itertools.permutations(range(4))))
    np.testing.assert_allclose(counts / NUM_COPIES, 1 / 24, atol=0.01)
    np.testing.assert_array_equal(
        np.take_along_axis(state.rover_of, state.tower_of, axis=1),
        np.tile(range(4), (NUM_COPIES, 1)),
    )
    for tower in range(4):  # with replacement: the goals of two towers are independent
        pairs = 6 * state.goal_of[:, tower] + state.goal_of[:, (tower + 1) % 4]
        frequencies = np.bincount(pairs, minlength=36) / NUM_COPIES
        np.testing.assert_allclose(frequencies, 1 / 36, atol=0.01)


def test_the_return_of_random_actions(random_play):
    """Simulated apart from this code, in NumPy: -8.0 (standard error 0.2); here 0.5 of chance."""
    _, _, (reward, step_type, discount) = random_play
    np.testing.assert_allclose(np.sum(reward, axis=1).mean(), -8.0, atol=1.5)
    np.testing.assert_array_equal(step_type, [[MID] * 24 + [LAST]] * NUM_COPIES)
    np.testing.assert_array_equal(discount, 1.0)  # a truncation


@pytest.mark.parametrize("sizes", [(4, 6), (1, 1), (3, 9)])
def test_it_keeps_the_contract(sizes):
    assert find_problems(RoverTower(*sizes, time_limit=7)) == []


def test_every_scenario_is_what_its_name_says():
    names = [f"rover-tower-{n}a" for n in (4, 8, 12, 16)]
    assert sorted(scenarios_of("RoverTower")) == sorted(names)
    for name in names:
        cfg = OmegaConf.load(CONFIGS / "rover_tower.yaml")
        cfg.scenario = OmegaConf.load(CONFIGS / "scenario" / f"{name}.yaml")
        env = make_env(cfg)
        assert cfg.scenario.task_name == name
        assert f"rover-tower-{env.num_agents}a" == name
        assert env.time_limit == 25
        state, first = jax.eval_shape(env.reset, jax.random.key(0))
        action = jax.ShapeDtypeStruct((env.num_agents,), jnp.int32)
        _, later = jax.eval_shape(env.step, state, action)
        spec = jax.tree.map(lambda x: (x.shape, x.dtype), env.observation_spec)
        for timestep in (first, later):
            assert jax.tree.map(lambda x: (x.shape, x.dtype), timestep.observation) == spec


@pytest.mark.parametrize("name", ["num_pairs", "num_landmarks", "time_limit"])
@pytest.mark.parametrize("value", [0, 2.0, None])
def test_bad_arguments_are_refused(name, value):
    with pytest.raises(ValueError, match=f"^{name}={value} must be an integer of at least 1.$"):
        RoverTower(**{name: value})


def test_keys_are_used_once():
    with jax.debug_key_reuse(True):
        state, _ = jax.jit(RoverTower().reset)(jax.random.key(0))
    assert not any(
        jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(state)
    )


def test_it_is_drawn(recorded):
    """The rover in its colour, where it is, and the symbol of its tower."""
    _, state = recorded
    away = state.replace(rover_positions=state.rover_positions.at[0].set(jnp.array([-1.5, 1.5])))
    spoken = away.replace(message=jnp.full(4, 3))
    images = list(RoverTower().draw([state, away, spoken]))
    assert [x.shape for x in images] == [(400, 400, 3)] * 3
    assert {x.dtype for x in images} == {np.dtype(np.uint8)}
    blue = [np.abs(x[:120, :120].astype(int) - [76, 146, 195]).sum(axis=-1) < 6 for x in images]
    assert blue[0].sum() == 0
    assert blue[1].sum() > 100
    assert (images[1][30:] != images[2][30:]).any()  # below the number of the step


NO_SUITE = """
import sys
import mava.environments.rover_tower, mava.environments.treasure_collection
import mava.environments.tag_continuous, mava.environments.tag_grid
assert not {"jaxmarl", "jumanji", "matplotlib"} & {x.split(".")[0] for x in sys.modules}
"""


def test_it_needs_no_suite():
    subprocess.run([sys.executable, "-c", NO_SUITE], check=True)
