"""JaxMARL's environments, wrapped: what they give, how battles end, who is out of the game."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mava.check_env import random_action
from mava.config import scenarios_of
from mava.types import FIRST, LAST, MID, Continuous, Discrete
from mava.wrappers.episode_metrics import EpisodeMetrics
from mava.wrappers.jaxmarl import MPE_TASKS, MpeEnv, SmaxEnv, import_suite

STOP, SHOOT_FIRST = 4, 5


@pytest.fixture(scope="module")
def smax():
    """An environment, its compiled reset and step, and a battle of 200 random steps."""
    env = EpisodeMetrics(SmaxEnv("2s3z", time_limit=30))

    def random_step(carry, key):
        state, mask = carry
        action = jax.random.categorical(key, jnp.where(mask, 0.0, -1e9))
        state, timestep = env.step(state, action)
        return (state, timestep.observation.action_mask), timestep

    def play(key):
        state, first = env.reset(key)
        keys = jax.random.split(key, 200)
        carry = (state, first.observation.action_mask)
        return first, jax.lax.scan(random_step, carry, keys)[1]

    return env, jax.jit(env.reset), jax.jit(env.step), jax.jit(play)(jax.random.key(0))


def has_spec(observation, spec, *batch):
    jax.tree.map(
        lambda x, s: np.testing.assert_equal(x.shape, (*batch, *s.shape)), observation, spec
    )
    jax.tree.map(lambda x, s: np.testing.assert_equal(x.dtype, s.dtype), observation, spec)


def test_smax_gives_what_its_spec_says(smax):
    env, _, _, (first, steps) = smax
    assert (env.num_agents, env.action_spec) == (5, Discrete(10))
    has_spec(first.observation, env.observation_spec)
    has_spec(steps.observation, env.observation_spec, 200)
    assert first.step_type == FIRST
    assert first.extras.keys() == steps.extras.keys()
    assert steps.reward.shape == steps.discount.shape == (200, 5)
    assert steps.reward.dtype == steps.discount.dtype == jnp.float32
    np.testing.assert_array_equal(steps.observation.step_count, np.arange(1, 201))
    assert steps.observation.action_mask.any(axis=-1).all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((first, steps)))


def test_smax_reward_is_the_damage_done(smax):
    """Each agent gets the share of the enemies' health that was lost in the step."""
    _, _, _, (_, steps) = smax
    returns = np.cumsum(steps.reward, axis=0)
    np.testing.assert_allclose(steps.extras["episode_return"], returns[:, 0], rtol=1e-5)
    np.testing.assert_array_equal(steps.reward, steps.reward[:, :1] * np.ones(5))
    units = np.array(steps.observation.global_state)[:, :100].reshape(200, 10, 10)
    lost = 1.0 - units[..., 5:, 0].mean(axis=1)  # health of the enemies, 0 if dead
    undecided = ~np.array(steps.extras["won_episode"])
    np.testing.assert_allclose(returns[undecided, 0], lost[undecided], atol=1e-5)


def edit(state, **changes):
    """Returns the state with the arrays of JaxMARL's state of the units changed."""
    battle = state.env_state
    inner = battle.env_state.replace(state=battle.env_state.state.replace(**changes))
    return state.replace(env_state=battle.replace(env_state=inner))


def units(state):
    return state.env_state.env_state.state


def facing(state, health):
    """Returns the state with everyone in range of everyone and this health."""
    grid = jnp.stack([jnp.tile(jnp.arange(5.0), 2), jnp.repeat(jnp.array([0.0, 1.5]), 5)], axis=-1)
    return edit(state, unit_positions=15.0 + grid, unit_health=jnp.array(health, jnp.float32))


@pytest.mark.parametrize("at_limit", [False, True])
@pytest.mark.parametrize("winner", ["agents", "enemies"])
def test_smax_battles_end(smax, winner, at_limit):
    """A dead team is an end, also at the time limit; only the agents' victory is a win."""
    _, reset, step, _ = smax
    state, _ = reset(jax.random.key(1))
    weak, strong = [0.01] * 5, [100.0] * 5
    state = facing(state, strong + weak if winner == "agents" else weak + strong)
    if at_limit:
        state = edit(state, step=jnp.int32(29))
    last = False
    for _ in range(1 if at_limit else 5):
        assert not last
        shoot = SHOOT_FIRST + jnp.arange(5) if winner == "agents" else jnp.full(5, STOP)
        state, timestep = step(state, shoot)
        last = timestep.step_type == LAST
        if last:
            break
    assert last
    np.testing.assert_array_equal(timestep.discount, 0.0)
    assert bool(timestep.extras["won_episode"]) == (winner == "agents")
    if winner == "agents":
        assert timestep.reward[0] >= 1.0
    else:
        assert not timestep.observation.agent_mask.any()


def test_smax_time_limit_is_a_truncation(smax):
    _, reset, step, _ = smax
    state, timestep = reset(jax.random.key(2))
    far = jnp.array(
        [[x, 8.0] for x in (2, 4, 6, 8, 10)] + [[x, 31.0] for x in (22, 24, 26, 28, 30)]
    )
    for i in range(30):
        assert timestep.step_type == (MID if i else FIRST)
        state, timestep = step(edit(state, unit_positions=far), jnp.full(5, STOP))
    assert timestep.step_type == LAST
    assert timestep.observation.step_count == timestep.extras["episode_length"] == 30
    np.testing.assert_array_equal(timestep.discount, 1.0)
    assert not timestep.extras["won_episode"]


def test_smax_dead_units_can_only_stop(smax):
    _, reset, step, _ = smax
    state, timestep = reset(jax.random.key(3))
    assert timestep.observation.agent_mask.all()
    health = units(state).unit_health.at[1].set(0.0)
    state, timestep = step(edit(state, unit_health=health), jnp.full(5, STOP))
    np.testing.assert_array_equal(timestep.observation.agent_mask, [1, 0, 1, 1, 1])
    only_stop = np.arange(10) == STOP
    np.testing.assert_array_equal(timestep.observation.action_mask[1], only_stop)
    assert timestep.observation.action_mask[0].sum() > 1
    np.testing.assert_array_equal(timestep.observation.agents_view[1], 0.0)


def test_smax_equal_keys_give_equal_battles(smax):
    _, reset, step, _ = smax
    first, second = (step(reset(jax.random.key(4))[0], jnp.full(5, STOP)) for _ in range(2))
    other = step(reset(jax.random.key(5))[0], jnp.full(5, STOP))
    leaves = [
        jax.tree.leaves(jax.random.key_data(x[0].env_state.key)) + jax.tree.leaves(x[1])
        for x in (first, second, other)
    ]
    assert all(np.array_equal(x, y) for x, y in zip(*leaves[:2], strict=True))
    assert not np.array_equal(first[1].observation.global_state, other[1].observation.global_state)


def test_smax_draws_its_states(smax):
    env, reset, _, _ = smax
    state, _ = reset(jax.random.key(6))
    dead = edit(state, unit_alive=jnp.zeros(10, bool))
    images = list(env.draw([state, dead]))
    assert [x.dtype for x in images] == [np.uint8] * 2
    assert images[0].shape == images[1].shape == (400, 400, 3)
    blue = [np.abs(x.astype(int) - [31, 119, 180]).sum(axis=-1) < 30 for x in images]
    assert blue[0].sum() > 100 > blue[1].sum()


def test_every_smax_scenario_is_jaxmarls():
    names = import_suite("smax").smax_env.MAP_NAME_TO_SCENARIO
    assert sorted(scenarios_of("SMAX")) == sorted(names)
    for name, scenario in names.items():
        env = SmaxEnv(name)
        assert env.num_agents == scenario.num_allies
        state, first = jax.eval_shape(env.reset, jax.random.key(0))
        action = jax.ShapeDtypeStruct((env.num_agents,), jnp.int32)
        _, timestep = jax.eval_shape(env.step, state, action)
        has_spec(first.observation, env.observation_spec)
        has_spec(timestep.observation, env.observation_spec)


IMPORTS = """
import sys
from mava.wrappers.jaxmarl import import_suite
ours = import_suite("smax")
assert ours.HeuristicEnemySMAX and not [x for x in sys.modules if x.startswith("jaxmarl")]
import jaxmarl.environments.smax
assert jaxmarl.environments.smax.SMAX and jaxmarl.environments.multi_agent_env
jaxmarl.make("HeuristicEnemySMAX")
"""


def test_jaxmarl_is_whole_afterwards():
    """Our import takes one suite; the user's own imports of jaxmarl still work."""
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)


@pytest.mark.parametrize("task", MPE_TASKS)
def test_mpe_gives_what_its_spec_says(task):
    """Through a whole episode, which the time limit cuts, and what a sum of rewards gives."""
    env = EpisodeMetrics(MpeEnv(task, time_limit=10))

    def random_step(state, key):
        state, timestep = env.step(state, random_action(env.action_spec, legal, key))
        return state, timestep

    state, first = jax.jit(env.reset)(jax.random.key(0))
    legal = first.observation.action_mask
    run = jax.jit(lambda state, keys: jax.lax.scan(random_step, state, keys)[1])
    steps = run(state, jax.random.split(jax.random.key(1), 10))
    has_spec(first.observation, env.observation_spec)
    has_spec(steps.observation, env.observation_spec, 10)
    assert steps.reward.shape == steps.discount.shape == (10, env.num_agents)
    np.testing.assert_array_equal(steps.discount, 1.0)
    np.testing.assert_array_equal(steps.step_type, [MID] * 9 + [LAST])
    np.testing.assert_array_equal(steps.observation.step_count, np.arange(1, 11))
    np.testing.assert_array_equal(steps.observation.action_mask, [legal] * 10)
    expected = np.cumsum(np.mean(steps.reward, axis=1))
    np.testing.assert_allclose(steps.extras["episode_return"], expected, rtol=1e-4)
    assert np.abs(steps.observation.agents_view).sum() > 0


def test_mpe_knows_its_options():
    assert MpeEnv("simple_spread_v3", num_agents=4).num_agents == 4
    with pytest.raises(ValueError, match=r"has no option num_agent; it has .*num_agents"):
        MpeEnv("simple_spread_v3", num_agent=4)
    with pytest.raises(ValueError, match="has no option max_steps; it has none"):
        MpeEnv("simple_facmac_3a_v1", max_steps=3)


def test_mpe_pads_agents_that_see_or_can_do_less():
    env = MpeEnv("simple_speaker_listener_v4")  # 3 features and 3 words; 11 features and 5 moves
    _, timestep = env.reset(jax.random.key(0))
    view, mask = timestep.observation.agents_view, timestep.observation.action_mask
    assert view.shape == (2, 11)
    np.testing.assert_array_equal(view[0, 3:], 0.0)
    assert view[0, :3].any()
    np.testing.assert_array_equal(mask, [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])


def test_mpe_does_not_depend_on_the_order_of_agents():
    """Three agents that are alike, places, speeds and actions in another order: so are rewards."""
    env, order = MpeEnv("simple_spread_v3"), jnp.array([2, 0, 1])
    state, _ = env.reset(jax.random.key(0))
    world = state.env_state
    places = world.p_pos.at[1].set(world.p_pos[0] + 0.1)  # two of them push each other
    speeds = jnp.linspace(-0.2, 0.2, world.p_vel.size).reshape(world.p_vel.shape)
    action, step, results = jnp.array([1, 3, 2]), jax.jit(env.step), []
    for index in (jnp.arange(3), order):
        rows = jnp.concatenate([index, jnp.arange(3, len(places))])
        changed = world.replace(p_pos=places[rows], p_vel=speeds[rows])
        results.append(step(state.replace(env_state=changed), action[index]))
    (plain_state, plain), (other_state, other) = results
    np.testing.assert_allclose(plain.reward[order], other.reward, atol=1e-6)
    world, other_world = plain_state.env_state, other_state.env_state
    np.testing.assert_allclose(world.p_pos[order], other_world.p_pos[:3], atol=1e-6)
    own = plain.observation.agents_view[order, :10]  # speed, place, landmarks; then the others
    np.testing.assert_allclose(own, other.observation.agents_view[:, :10], atol=1e-6)
    assert len(np.unique(np.round(plain.reward, 5))) > 1


def test_mpe_plays_jaxmarls_episodes():
    """26 steps as in JaxMARL, with its rewards, observations and keys."""
    env, suite = MpeEnv("simple_spread_v3"), import_suite("mpe")
    theirs = suite.SimpleSpreadMPE()
    state, _ = env.reset(jax.random.key(0))
    their_state, done, num_steps = state.env_state, False, 0
    step, their_step = jax.jit(env.step), jax.jit(theirs.step_env)
    while not done:
        action = jnp.array([num_steps % 5, 1, 3])
        key = jax.random.split(state.key)[1]
        views, their_state, rewards, dones, _ = their_step(
            key, their_state, dict(zip(theirs.agents, action, strict=True))
        )
        state, timestep = step(state, action)
        np.testing.assert_allclose(
            timestep.reward, [rewards[agent] for agent in theirs.agents], rtol=1e-5
        )
        np.testing.assert_allclose(timestep.observation.agents_view[1], views["agent_1"], rtol=1e-5)
        done, num_steps = bool(dones["__all__"]), num_steps + 1
        assert (timestep.step_type == LAST) == done
    assert num_steps == env.time_limit == 26


def test_facmac_predators_are_the_agents():
    """Their prey moves by itself, its penalty is not in the return, actions are continuous."""
    env = MpeEnv("simple_facmac_6a_v1")
    assert (env.num_agents, env.action_spec) == (6, Continuous(5))
    state, _ = env.reset(jax.random.key(0))
    positions = state.env_state.p_pos.at[:8].set(0.02 * jnp.arange(8)[:, None])
    state = state.replace(env_state=state.env_state.replace(p_pos=positions))
    state, timestep = jax.jit(env.step)(state, -jnp.ones((6, 5)))
    assert np.abs(state.env_state.p_vel[6:8]).min() > 0  # the prey's
    assert (timestep.reward > 0).all()
    with pytest.raises(ValueError, match="continuous actions only"):
        MpeEnv("simple_facmac_v1", action_type="discrete")


def test_mpe_is_drawn():
    env = MpeEnv("simple_tag_v3")
    state, _ = env.reset(jax.random.key(0))
    (image,) = env.draw([state])
    assert image.shape == (400, 400, 3)
    assert len(np.unique(image.reshape(-1, 3), axis=0)) > 10


def test_every_mpe_task_has_a_scenario():
    assert sorted(scenarios_of("MPE")) == sorted(MPE_TASKS)
