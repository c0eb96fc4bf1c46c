"""Tag: episodes recorded from WarpDrive, rare cases by hand, what a reset draws."""

import itertools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from omegaconf import OmegaConf

import mava
from mava.check_env import find_problems
from mava.config import make_env, scenarios_of
from mava.environments.tag_continuous import TagContinuous
from mava.environments.tag_grid import TagGrid
from mava.types import FIRST, LAST, MID, Discrete, MultiDiscrete

DATA = Path(__file__).parent.parent / "data" / "tag.npz"
CONFIGS = Path(mava.__file__).parent / "configs" / "env"
WHOLE_TURN = 2 * np.pi


def recorded(name):
    """Returns arguments of the environment, and an episode of WarpDrive's CPU environment."""
    data = np.load(DATA)
    kwargs = json.loads(str(data["configs_json"]))[name]
    del kwargs["seed"]
    kwargs["time_limit"] = kwargs.pop("episode_length")
    prefix = f"{name}/"
    return kwargs, {x.removeprefix(prefix): data[x] for x in data.files if x.startswith(prefix)}


def play(env, actions, state=None):
    """Returns the first state and timestep, and those of all actions (T, N, ...)."""

    def step(state, action):
        state, timestep = env.step(state, action)
        return state, (state, timestep)

    @jax.jit
    def run(actions):
        first, timestep = env.reset(jax.random.key(0))
        return (first, timestep), jax.lax.scan(step, first if state is None else state, actions)[1]

    return jax.device_get(run(jnp.array(actions, jnp.int32)))


def make_recorded(kwargs, data, **options):
    kwargs = dict(kwargs)
    num_observed = kwargs.pop("num_other_agents_observed", None)
    if kwargs.pop("use_full_observation"):
        num_observed = None
    start = [data["start_x"], data["start_y"], data["start_direction"]]
    return TagContinuous(
        **kwargs,
        num_other_agents_observed=num_observed,
        is_tagger=data["is_tagger"].astype(bool),
        start=start,
        **options,
    )


@pytest.mark.parametrize("name", ["full_exits", "knn_noexit", "knn_exits"])
def test_it_is_warpdrives_continuous_tag(name):
    kwargs, data = recorded(name)
    env = make_recorded(kwargs, data)
    (_, first), (states, steps) = play(env, data["actions"])
    np.testing.assert_allclose(first.observation.agents_view, data["obs_reset"], atol=1e-5)
    # A direction that rounding moves past a whole turn differs by one: compared on the circle.
    errors = steps.observation.agents_view - data["obs"]
    seen = (errors.shape[-1] - 1) // 7
    directions = errors[..., 4 * seen : 5 * seen]
    assert (np.abs(directions) > 0.5).sum() <= 6
    directions -= np.round(directions)
    np.testing.assert_allclose(errors, 0.0, atol=1e-5)
    np.testing.assert_allclose(steps.reward, data["rewards"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(states.x, data["x"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(states.y, data["y"], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(steps.step_type == LAST, data["done"])
    np.testing.assert_array_equal(steps.discount.T, [~data["done"]] * env.num_agents)
    np.testing.assert_array_equal(states.in_game, data["alive"])
    np.testing.assert_array_equal(steps.observation.agent_mask, data["alive"])
    metrics = steps.extras["env_metrics"]
    np.testing.assert_allclose(
        metrics["runners_left_percent"],
        100 * (data["alive"] & (data["is_tagger"] == 0)).sum(axis=1) / kwargs["num_runners"],
        rtol=1e-6,
    )
    assert data["done"][-1]


@pytest.mark.parametrize("name", ["grid_full", "grid_partial"])
def test_it_is_warpdrives_tag_on_a_grid(name):
    """Four episodes, one after the other, each from WarpDrive's own start."""
    kwargs, data = recorded(name)
    full, num_taggers = kwargs.pop("use_full_observation"), kwargs["num_taggers"]
    start = [[kwargs["grid_length"] // 2] * num_taggers + [0]] * 2
    env = TagGrid(**kwargs, full_observation=full, start=start)

    def step(state, action):
        state, timestep = env.step(state, action)
        first, _ = env.reset(jax.random.key(0))
        return jax.tree.map(lambda x, y: jnp.where(timestep.last(), x, y), first, state), timestep

    state, first = env.reset(jax.random.key(0))
    np.testing.assert_allclose(first.observation.agents_view, data["obs_reset"], atol=1e-6)
    run = jax.jit(lambda actions: jax.lax.scan(step, state, actions)[1])
    steps = run(data["actions"].astype(np.int32))
    np.testing.assert_allclose(steps.observation.agents_view, data["obs"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(steps.reward, data["rewards"], rtol=0, atol=1e-6)
    np.testing.assert_array_equal(steps.step_type == LAST, data["done"])
    np.testing.assert_array_equal(steps.discount.T, [~data["done"]] * env.num_agents)
    caught = (data["rewards"][:, 0] > 5).astype(float)
    np.testing.assert_array_equal(steps.extras["env_metrics"]["runners_caught"], caught)
    assert 0 < caught.sum() < data["done"].sum()  # one episode ended by the time limit


SMALL = dict(  # noqa: C408
    num_taggers=2, num_runners=3, time_limit=9, grid_length=8.0, tagging_distance=0.125,
    num_other_agents_observed=3, num_acceleration_levels=2, num_turn_levels=2,
    tag_reward_for_tagger=10.0, tag_penalty_for_runner=-7.0, step_penalty_for_tagger=-0.25,
    step_reward_for_runner=0.5, edge_hit_penalty=-2.0, end_of_game_reward_for_runner=3.0,
)  # fmt: skip


class Small:
    """2 taggers and 3 runners whose tagging distance is 1 in a square of 8; they see 3 others."""

    def __init__(self, **options):
        self.env = TagContinuous(**{**SMALL, **options})
        self._step = jax.jit(self.env.step)
        self._reset = jax.jit(self.env.reset)

    def state(self, places, **changes):
        state, _ = self._reset(jax.random.key(0))
        x, y = jnp.array(places, jnp.float32).T
        changes = {name: jnp.array(value) for name, value in changes.items()}
        return state.replace(x=x, y=y, **{"direction": jnp.zeros(5), **changes})

    def step(self, state, action=None):
        action = np.zeros((5, 2), np.int32) if action is None else np.array(action)
        return jax.device_get(self._step(state, action))


@pytest.fixture(scope="module")
def small():
    return Small()


def test_one_tagger_catches_two_at_once_and_is_paid_twice(small):
    state = small.state([(1, 1), (7, 7), (1.5, 1), (1, 1.5), (5, 2)])
    state, step = small.step(state)
    np.testing.assert_allclose(step.reward, [20 - 0.25, -0.25, 0.5 - 7, 0.5 - 7, 0.5])
    np.testing.assert_array_equal(state.in_game, [1, 1, 0, 0, 1])
    np.testing.assert_array_equal(step.observation.agent_mask, [1, 1, 0, 0, 1])
    assert step.step_type == MID
    metrics = step.extras["env_metrics"]
    assert metrics["runners_caught"] == 2
    np.testing.assert_allclose(metrics["runners_left_percent"], 100 / 3, rtol=1e-6)
    blocks = step.observation.agents_view[:, :-1].reshape(5, 7, 3)
    np.testing.assert_array_equal(blocks[0, 6], 1.0)  # seen as in the game for one more step
    np.testing.assert_allclose(step.observation.agents_view[:, -1], 1 / 9, rtol=1e-6)
    moves = [[2, 2]] * 5
    after, step = small.step(state, moves)
    np.testing.assert_array_equal(step.observation.agents_view[2:4], 0.0)
    np.testing.assert_array_equal(step.reward[2:4], 0.0)
    for name in ("speed", "acceleration", "direction"):
        np.testing.assert_array_equal(getattr(after, name)[2:4], 0.0)
    np.testing.assert_array_equal(after.x[2:4], state.x[2:4])
    np.testing.assert_array_equal(after.y[2:4], state.y[2:4])
    blocks = step.observation.agents_view[:, :-1].reshape(5, 7, 3)
    np.testing.assert_array_equal(blocks[0, 6], [1, 1, 0])  # fewer than 3 are left
    np.testing.assert_array_equal(blocks[0, :, 2], 0.0)
    np.testing.assert_array_equal(blocks[0, 5], [0, 1, 0])  # the runner is nearer
    assert step.observation.global_state.shape == (36,)
    np.testing.assert_array_equal(step.observation.global_state[30:35], state.in_game)


def test_a_runner_at_the_tagging_distance_is_not_caught(small):
    """Only below it; and of two equally near taggers the first is paid."""
    state = small.state([(1, 1), (3, 1), (2, 1), (4 - 2**-10, 1), (1, 5)])
    state, step = small.step(state)
    np.testing.assert_array_equal(state.in_game, [1, 1, 1, 0, 1])
    np.testing.assert_allclose(step.reward, [-0.25, 9.75, 0.5, -6.5, 0.5])
    state, step = small.step(small.state([(1, 1), (2, 1), (1.5, 1), (6, 6), (1, 5)]))
    np.testing.assert_allclose(step.reward, [9.75, -0.25, -6.5, 0.5, 0.5])


def test_who_is_caught_in_the_last_step_gets_no_bonus(small):
    state = small.state([(1, 1), (7, 7), (1.5, 1), (4, 4), (4, 4)], step_count=8)
    _, step = small.step(state.replace(in_game=jnp.array([True, True, True, True, False])))
    np.testing.assert_allclose(step.reward, [9.75, -0.25, 0.5 - 7, 0.5 + 3, 0])
    assert step.step_type == LAST
    np.testing.assert_array_equal(step.discount, 0.0)


def test_who_stays_when_caught_gets_the_bonus_and_is_caught_again():
    small = Small(runner_exits_game_after_tagged=False, num_other_agents_observed=None)
    state = small.state([(1, 1), (7, 7), (1.5, 1), (1, 1.25), (4, 4)], step_count=7)
    state, step = small.step(state)
    np.testing.assert_allclose(step.reward, [19.75, -0.25, -6.5, -6.5, 0.5])
    state, step = small.step(state)
    np.testing.assert_allclose(step.reward, [19.75, -0.25, -3.5, -3.5, 3.5])
    assert step.step_type == LAST
    assert step.extras["env_metrics"]["runners_caught"] == 4
    assert step.extras["env_metrics"]["runners_left_percent"] > 99.99


def test_the_episode_ends_with_the_last_runner(small):
    state = small.state([(1, 1), (7, 7), (1.5, 1), (4, 4), (4, 4)])
    _, step = small.step(state.replace(in_game=jnp.array([True, True, True, False, False])))
    np.testing.assert_allclose(step.reward, [9.75, -0.25, -6.5, 0, 0])
    assert step.step_type == LAST
    np.testing.assert_array_equal(step.discount, 0.0)


def test_of_equally_near_agents_the_first_are_seen(small):
    state = small.state([(5, 4), (3, 4), (4, 4), (4, 5), (4, 3)])
    _, step = small.step(state)
    blocks = step.observation.agents_view[2, :-1].reshape(7, 3)
    apart = np.array([[1, -1, 0], [0, 0, 1]]) / (np.sqrt(2) * 8)  # agents 0, 1 and 3
    np.testing.assert_allclose(blocks[:2], apart, atol=1e-7)
    np.testing.assert_array_equal(blocks[5], [1, 1, 0])


def test_a_wall_stops_but_does_not_slow(small):
    """Standing at it costs nothing; turns are taken before the move."""
    places = [(7.5, 1), (1, 0.25), (8, 0), (0.25, 5), (5, 3)]
    angles = np.float32([0, 1.5, 0, 1, 1.25]) * np.pi
    state = small.state(places, direction=angles, speed=np.float32([1, 0.5, 0, 1, 1]))
    turns = [[0, 0], [0, 0], [0, 0], [0, 0], [0, 2]]
    state, step = small.step(state, turns)
    np.testing.assert_allclose(step.reward, [-2.25, -2.25, 0.5, -1.5, 0.5])
    root = np.sqrt(0.5)
    np.testing.assert_allclose(state.x, [8, 1, 8, 0, 5 + root], atol=1e-6)
    np.testing.assert_allclose(state.y, [1, 0, 0, 5, 3 - root], atol=1e-6)
    np.testing.assert_allclose(state.direction, [*angles[:4], 1.75 * np.pi], rtol=1e-6)
    np.testing.assert_array_equal(state.speed, [1, 0.5, 0, 1, 1])


def test_acceleration_lasts_until_the_speed_limit():
    """A third of a step's change each time; taggers are faster."""
    small = Small(min_acceleration=-0.25, max_acceleration=0.25, skill_level_tagger=2.0)
    state = small.state([(1, 1), (1, 7), (3, 3), (3, 5), (3, 7)])
    speeds, accelerations = [], []
    for action in (2, 0, 0, 2, 1):
        state, _ = small.step(state, [[action, 0]] * 5)
        speeds.append(state.speed[[0, 2]])
        accelerations.append(state.acceleration[[0, 2]])
    # The runner is at its limit after 4 steps and starts to brake from 0 then.
    np.testing.assert_allclose(
        speeds, [[0.25, 0.25], [0.5, 0.5], [0.75, 0.75], [1.25, 1], [1.5, 0.75]]
    )
    np.testing.assert_allclose(
        accelerations, [[0.25, 0.25], [0.25, 0.25], [0.25, 0.25], [0.5, 0], [0.25, -0.25]]
    )


def test_chunks_change_nothing():
    views = []
    for chunk_size in (None, 1, 7):
        env = TagContinuous(
            num_taggers=3, num_runners=19, chunk_size=chunk_size, tagging_distance=0.1
        )  # fmt: skip
        actions = jax.random.randint(jax.random.key(1), (20, 22, 2), 0, 11)
        views.append(play(env, actions)[1][1].observation.agents_view)
    for other in views[1:]:
        np.testing.assert_array_equal(views[0], other)


@pytest.mark.parametrize("full", [True, False])
def test_changing_places_is_no_catch_on_a_grid(full):
    env = TagGrid(num_taggers=2, grid_length=3, time_limit=5, full_observation=full,
                  start=[[1, 3, 2], [1, 1, 1]])  # fmt: skip
    (_, first), (states, steps) = play(env, [[1, 1, 2], [2, 0, 0], [2, 0, 0]])
    np.testing.assert_array_equal(states.x[0], [2, 3, 1])
    np.testing.assert_allclose(steps.reward[0], [-0.01, -0.11, 0.01], rtol=1e-6)  # one hit a wall
    np.testing.assert_allclose(steps.reward[1], [10, 10, -2], rtol=1e-6)
    np.testing.assert_array_equal(steps.step_type[:2], [MID, LAST])
    np.testing.assert_array_equal(steps.discount[:2, 0], [1, 0])
    if not full:  # the runner sees, of two equally near taggers, the first
        np.testing.assert_allclose(first.observation.agents_view[2, 2:4], [1 / 3, 1 / 3])


@pytest.fixture(scope="module")
def first_states():
    env = TagContinuous(num_taggers=1, num_runners=4, num_other_agents_observed=2)
    return jax.device_get(jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), 2048)))


def test_what_a_reset_draws(first_states):
    state, first = first_states
    assert (first.step_type == FIRST).all()
    assert state.in_game.all()
    for places in (state.x, state.y):
        assert ((places >= 0) & (places < 10)).all()
        np.testing.assert_allclose(places.mean(), 5.0, atol=0.1)
        np.testing.assert_allclose(places.var(), 100 / 12, atol=0.3)
        assert len(np.unique(places, axis=0)) == len(places)
    assert abs(np.corrcoef(state.x.ravel(), state.y.ravel())[0, 1]) < 0.05
    quarters, counts = np.unique(state.direction, return_counts=True)
    np.testing.assert_allclose(quarters, np.pi / 2 * np.arange(4), rtol=1e-6)
    np.testing.assert_allclose(counts / counts.sum(), 0.25, atol=0.02)
    np.testing.assert_array_equal(first.observation.agents_view[:, :, -1], 0.0)


def test_what_a_reset_draws_on_a_grid():
    env = TagGrid(num_taggers=2, grid_length=4)
    state, _ = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), 4096))
    np.testing.assert_array_equal((state.x[:, 2], state.y[:, 2]), 0)
    places = np.stack([state.x[:, 0], state.y[:, 0], state.x[:, 1], state.y[:, 1]], axis=-1)
    rows, counts = np.unique(places, axis=0, return_counts=True)
    np.testing.assert_array_equal(rows, list(itertools.product([1, 2, 3], repeat=4)))
    np.testing.assert_allclose(counts / counts.sum(), 1 / 81, atol=0.008)


def test_teams():
    roles = [False, True, False, True, False]
    env = TagContinuous(num_taggers=2, num_runners=3, num_other_agents_observed=4, is_tagger=roles)
    assert env.teams == {"taggers": (1, 3), "runners": (0, 2, 4)}
    assert TagContinuous(num_taggers=2, num_runners=9).teams["taggers"] == (0, 1)
    assert TagGrid().teams == {"taggers": (0, 1, 2, 3), "runners": (4,)}


@pytest.mark.parametrize(
    "env",
    [
        TagContinuous(2, 3, time_limit=7, num_other_agents_observed=5, tagging_distance=0.2),
        TagGrid(num_taggers=1, grid_length=2, time_limit=7, full_observation=False),
    ],
)
def test_it_keeps_the_contract(env):
    assert find_problems(env) == []


def test_every_scenario_is_what_its_name_says():
    names = {"TagContinuous": ["tag-5v20", "tag-5v100", "tag-10v100", "tag-100v900"]}
    names["TagGrid"] = ["tag-grid-4v1"]
    for env_name, file in (("TagContinuous", "tag_continuous"), ("TagGrid", "tag_grid")):
        assert sorted(scenarios_of(env_name)) == sorted(names[env_name])
        for name in names[env_name]:
            cfg = OmegaConf.load(CONFIGS / f"{file}.yaml")
            cfg.scenario = OmegaConf.load(CONFIGS / "scenario" / f"{name}.yaml")
            env = make_env(cfg)
            sizes = [len(env.teams[team]) for team in ("taggers", "runners")]
            assert cfg.scenario.task_name == name
            assert name.endswith("-{}v{}".format(*sizes))
            assert env.time_limit == (500 if "100" in name else 100)
            _, first = jax.eval_shape(env.reset, jax.random.key(0))
            spec = jax.tree.map(lambda x: (x.shape, x.dtype), env.observation_spec)
            assert jax.tree.map(lambda x: (x.shape, x.dtype), first.observation) == spec
    assert env.action_spec == Discrete(5)
    env = TagContinuous(num_acceleration_levels=20, num_turn_levels=4)
    assert env.action_spec == MultiDiscrete((21, 5))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TagContinuous(num_runners=0), "num_runners=0 must be an integer of at least 1."),
        (lambda: TagContinuous(chunk_size=0), "chunk_size=0 must be an integer of at least 1."),
        (lambda: TagContinuous(tagging_distance=2), "tagging_distance=2 must be between 0 and 1."),
        (lambda: TagContinuous(edge_hit_penalty=1), "edge_hit_penalty=1 must be at most 0."),
        (lambda: TagContinuous(tag_reward_for_tagger=-1), "tag_reward_for_tagger=-1 must be at"),
        (lambda: TagContinuous(max_speed=0), "max_speed=0 must be above 0."),
        (lambda: TagContinuous(1, 2), "num_other_agents_observed=10 must be at most"),
        (lambda: TagContinuous(is_tagger=[True] * 25), "must have 25 entries, 5 of them true."),
        (lambda: TagContinuous(start=[[1, 2]]), "start is (1, 2) and must be (3, 25)."),
        (lambda: TagGrid(grid_length=1), "grid_length=1 must be at least 2."),
        (lambda: TagGrid(wall_hit_penalty=-1), "wall_hit_penalty=-1 must be at least 0."),
        (lambda: TagGrid(start=[[1, 2]]), "start is (1, 2) and must be (2, 5)."),
        (lambda: TagGrid(full_observation=1), "full_observation=1 must be true or false."),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_keys_are_used_once():
    with jax.debug_key_reuse(True):
        for env in (TagContinuous(), TagGrid()):
            jax.eval_shape(env.reset, jax.random.key(0))


def colored(image, red, green, blue):
    return (np.abs(image[40:].astype(int) - [red, green, blue]).sum(axis=-1) < 60).sum()


def test_it_is_drawn(small):
    """Taggers red, runners blue, one that left grey."""
    state = small.state([(1, 1), (7, 7), (1, 5), (6, 3), (3, 3)])
    gone = state.replace(in_game=jnp.array([True, True, True, False, True]))
    images = list(small.env.draw([state, gone]))
    assert [(x.shape, x.dtype) for x in images] == [((400, 400, 3), np.uint8)] * 2
    red, blue = ([colored(x, *rgb) for x in images] for rgb in ((255, 25, 25), (53, 133, 187)))
    assert red[0] == red[1] > 50
    assert blue[0] > blue[1] > 50
    grid = TagGrid(grid_length=8)
    state, _ = grid.reset(jax.random.key(0))
    (image,) = grid.draw([state])
    assert colored(image, 53, 133, 187) > 50
