import dataclasses
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jumanji.environments.routing.cleaner.constants import CLEAN, DIRTY
from jumanji.environments.routing.connector.constants import POSITION, TARGET
from jumanji.environments.routing.connector.utils import get_action_masks
from omegaconf import OmegaConf

import mava
from mava.config import UserError, make_env, scenarios_of
from mava.types import LAST, MID
from mava.wrappers.episode_metrics import EpisodeMetrics
from mava.wrappers.jumanji import (
    CleanerEnv,
    ConnectorEnv,
    LevelBasedForagingEnv,
    RobotWarehouseEnv,
    SearchAndRescueEnv,
)
from mava.wrappers.observation import AgentIds, GlobalState
from tests.environments import RightAction

CONFIGS = Path(mava.__file__).parent / "configs" / "env"
GROUPS = {"RobotWarehouse": "rware", "LevelBasedForaging": "lbf", "Connector": "connector",
          "Cleaner": "cleaner", "SearchAndRescue": "search_and_rescue"}  # fmt: skip
SCENARIOS = [scenario for env_name in GROUPS for scenario in scenarios_of(env_name)]
NOOP, FORWARD, LEFT, RIGHT, TOGGLE = range(5)


def env_of(scenario: str):
    task = OmegaConf.load(CONFIGS / "scenario" / f"{scenario}.yaml")
    cfg = OmegaConf.load(CONFIGS / f"{GROUPS[task.env_name]}.yaml")
    cfg.scenario = task
    return make_env(cfg)


@pytest.fixture(scope="module")
def warehouse():
    return RobotWarehouseEnv(
        time_limit=20,
        column_height=8,
        shelf_rows=1,
        shelf_columns=3,
        num_agents=2,
        sensor_range=1,
        request_queue_size=2,
    )


@pytest.fixture(scope="module")
def warehouse_step(warehouse):
    return jax.jit(warehouse.step)


def place(state, rows, columns, directions):
    """Puts the two robots somewhere, facing 0 up, 1 right, 2 down, 3 left."""
    agents = state.agents
    position = agents.position._replace(x=jnp.array(rows), y=jnp.array(columns))
    layer = 1  # of the grid: robots; 0 is shelves
    grid = state.grid.at[layer].set(0)
    for i, (row, column) in enumerate(zip(rows, columns, strict=True)):
        grid = grid.at[layer, row, column].set(i + 1)
    agents = agents._replace(position=position, direction=jnp.array(directions))
    return state.replace(grid=grid, agents=agents, action_mask=jnp.ones((2, 5), bool))


def test_scenario_sizes():
    sizes = {name: OmegaConf.load(CONFIGS / "scenario" / f"{name}.yaml") for name in SCENARIOS}
    assert len(sizes) == 32
    for name, scenario in sizes.items():
        assert scenario.task_name == name
    assert sizes["tiny-4ag-easy"].task_config.request_queue_size == 8
    assert sizes["large-8ag-hard"].task_config.request_queue_size == 4
    assert sizes["2s-10x10-3p-3f"].task_config.fov == 2


def test_warehouse_collision_terminates(warehouse, warehouse_step):
    state, _ = warehouse.reset(jax.random.key(0))
    state = place(state, (1, 1), (0, 1), (1, 3))  # face to face on a highway
    _, timestep = warehouse_step(state, jnp.array([FORWARD, NOOP]))
    assert timestep.step_type == LAST
    np.testing.assert_array_equal(timestep.discount, 0.0)


def test_warehouse_time_limit_truncates(warehouse, warehouse_step):
    state, _ = warehouse.reset(jax.random.key(0))
    state = place(state, (1, 5), (0, 0), (0, 0))
    for t in range(20):
        state, timestep = warehouse_step(state, jnp.array([NOOP, NOOP]))
        assert timestep.last() == (t == 19)
        np.testing.assert_array_equal(timestep.discount, 1.0)


def test_warehouse_collision_at_the_time_limit_terminates(warehouse, warehouse_step):
    state, _ = warehouse.reset(jax.random.key(0))
    state = place(state, (1, 1), (0, 1), (1, 3)).replace(step_count=jnp.array(19))
    _, timestep = warehouse_step(state, jnp.array([FORWARD, NOOP]))
    assert timestep.step_type == LAST
    np.testing.assert_array_equal(timestep.discount, 0.0)


@pytest.mark.parametrize("is_requested", [True, False])
def test_warehouse_pays_a_delivery_once(warehouse, warehouse_step, is_requested):
    """A robot carries a shelf onto a goal and stands there."""
    state, _ = warehouse.reset(jax.random.key(0))
    goal = warehouse._env.goals[0]  # (column, row), at the lower edge
    row, column = int(goal[1]), int(goal[0])
    state = place(state, (row - 1, 0), (column, 0), (2, 0))
    carrying = state.agents.is_carrying.at[0].set(1)
    position = state.shelves.position
    position = position._replace(x=position.x.at[0].set(row - 1), y=position.y.at[0].set(column))
    requested = state.shelves.is_requested.at[0].set(is_requested)
    shelves = state.shelves._replace(position=position, is_requested=requested)
    queue = jnp.array([0, 1]) if is_requested else jnp.array([1, 2])
    grid = state.grid.at[0].set(jnp.where(state.grid[0] == 1, 0, state.grid[0]))
    state = state.replace(
        agents=state.agents._replace(is_carrying=carrying),
        shelves=shelves,
        request_queue=queue.astype(state.request_queue.dtype),
        grid=grid.at[0, row - 1, column].set(1),
    )
    rewards = []
    for action in (FORWARD, NOOP, NOOP):
        state, timestep = warehouse_step(state, jnp.array([action, NOOP]))
        rewards.append(timestep.reward.tolist())
    assert rewards == [[float(is_requested)] * 2, [0.0, 0.0], [0.0, 0.0]]


def foraging(**options):
    return LevelBasedForagingEnv(
        grid_size=8, fov=8, num_agents=2, num_food=2, max_agent_level=2, force_coop=True, **options
    )


def test_foraging_scripted_episode():
    """All food eaten: return 1 for the team, 1 / 2 each on average; then it terminates."""
    returns = {}
    for team_reward in (True, False):
        env = EpisodeMetrics(foraging(team_reward=team_reward))
        state, _ = env.reset(jax.random.key(1))
        step = jax.jit(env.step)
        for food in range(2):
            inner = state.env_state
            around = inner.food_items.position[food] + jnp.array([[1, 0], [-1, 0]])
            agents = inner.agents.replace(position=around)
            state = state.replace(env_state=inner.replace(agents=agents))
            state, timestep = step(state, jnp.array([5, 5]))  # both load
            assert timestep.last() == (food == 1)
        np.testing.assert_array_equal(timestep.discount, 0.0)
        np.testing.assert_allclose(timestep.extras["env_metrics"]["percent_eaten"], 100.0)
        returns[team_reward] = timestep.extras["episode_return"]
    np.testing.assert_allclose(returns[True], 1.0, rtol=1e-6)
    np.testing.assert_allclose(returns[False], 0.5, rtol=1e-6)


def test_foraging_does_not_depend_on_the_order_of_agents():
    """Two agents of unlike levels, that load together, swapped: so are views and shares."""
    env = foraging(team_reward=False)
    state, _ = env.reset(jax.random.key(1))
    around = state.food_items.position[0] + jnp.array([[1, 0], [0, 1]])
    agents = state.agents.replace(position=around, level=jnp.array([1, 2]))
    food = state.food_items.replace(level=jnp.array([3, 3]))
    order = jnp.array([1, 0])
    swapped = agents.replace(position=agents.position[order], level=agents.level[order])
    step = jax.jit(env.step)
    for action in ((5, 5), (5, 0), (1, 2)):
        action = jnp.array(action)
        _, plain = step(state.replace(agents=agents, food_items=food), action)
        _, other = step(state.replace(agents=swapped, food_items=food), action[order])
        np.testing.assert_array_equal(plain.reward[order], other.reward)
        views = plain.observation.agents_view, other.observation.agents_view
        np.testing.assert_array_equal(views[0][order], views[1])
    assert not np.array_equal(views[0][0], views[0][1])


def test_foraging_time_limit_truncates():
    env = foraging(time_limit=3)
    state, _ = env.reset(jax.random.key(1))
    for t in range(3):
        state, timestep = env.step(state, jnp.array([0, 0]))
        assert timestep.last() == (t == 2)
        np.testing.assert_array_equal(timestep.discount, 1.0)


def test_refuses_what_the_suite_refuses():
    cfg = OmegaConf.load(CONFIGS / "lbf.yaml")
    cfg.scenario = OmegaConf.load(CONFIGS / "scenario" / "8x8-2p-2f-coop.yaml")
    cfg.scenario.task_config.num_food = 40
    with pytest.raises(UserError, match="LevelBasedForagingEnv refuses"):
        make_env(cfg)


@pytest.mark.parametrize(
    "scenario", ["tiny-2ag", "2s-8x8-2p-2f-coop", "con-5x5x3a", "clean-10x10x3a", "sar-2s-40t"]
)
def test_states_are_drawn(scenario):
    """Through all wrappers, in colours, and differently where something moved."""
    env = EpisodeMetrics(AgentIds(GlobalState(env_of(scenario))))
    states = [jax.jit(env.reset)(jax.random.key(seed))[0] for seed in (0, 0, 1)]
    first, same, other = env.draw(states)
    assert first.shape == (500, 500, 3)
    assert first.dtype == np.uint8
    assert len(np.unique(first.reshape(-1, 3), axis=0)) > 3
    np.testing.assert_array_equal(first, same)
    assert np.any(first != other)


def test_what_does_not_draw_has_no_draw():
    assert not hasattr(EpisodeMetrics(AgentIds(RightAction())), "draw")


def two_agents(ends, targets):
    """Returns a Connector of 5 x 5 with two agents at these places, and its state."""
    env = ConnectorEnv(grid_size=5, num_agents=2, time_limit=4)
    state, _ = env.reset(jax.random.key(0))
    grid = jnp.zeros((5, 5), jnp.int32)
    for agent in range(2):
        grid = grid.at[ends[agent]].set(POSITION + 3 * agent)
        grid = grid.at[targets[agent]].set(TARGET + 3 * agent)
    agents = state.agents.replace(
        start=jnp.array(ends), position=jnp.array(ends), target=jnp.array(targets)
    )
    mask = get_action_masks(agents, grid)
    return env, state.replace(grid=grid, agents=agents, action_mask=mask)


def test_connector_ends_when_all_are_connected():
    env, state = two_agents([(0, 0), (4, 0)], [(0, 1), (4, 2)])
    state, timestep = env.step(state, jnp.array([2, 2]))  # both to the right
    np.testing.assert_allclose(timestep.reward, [0.97, -0.03], rtol=1e-6)
    np.testing.assert_array_equal(timestep.observation.agent_mask, [False, True])
    np.testing.assert_array_equal(timestep.discount, 1.0)
    assert timestep.step_type == MID
    view = timestep.observation.agents_view
    assert view.shape == (2, 5, 5, 5)
    assert view[1, 4, 1, 0] == view[1, 4, 2, 1] == view[1, 0, 1, 2] == view[1, 0, 0, 4] == 1
    assert view[1].sum() == 5  # own end and target, the other's end, two tiles of paths
    state, timestep = env.step(state, jnp.array([0, 2]))
    np.testing.assert_allclose(timestep.reward, [0.0, 0.97], rtol=1e-6)
    np.testing.assert_array_equal(timestep.discount, 0.0)
    assert timestep.step_type == LAST
    assert timestep.extras["won_episode"]


def test_connector_ends_at_its_limit_if_all_are_connected_then():
    env, state = two_agents([(0, 0), (4, 0)], [(0, 1), (4, 1)])
    state = state.replace(step_count=jnp.int32(3))
    _, timestep = env.step(state, jnp.array([2, 2]))
    assert timestep.step_type == LAST
    np.testing.assert_array_equal(timestep.discount, 0.0)


def test_connector_ends_when_the_last_is_blocked():
    """One is connected; the other has its own path on every side but its last way's."""
    env, state = two_agents([(0, 0), (4, 0)], [(0, 1), (2, 2)])
    walls = state.grid.at[3, 0].set(2).at[4, 2].set(2).at[3, 1].set(2)
    state = state.replace(grid=walls, action_mask=get_action_masks(state.agents, walls))
    _, timestep = env.step(state, jnp.array([2, 2]))
    np.testing.assert_array_equal(timestep.observation.agent_mask, False)
    assert timestep.step_type == LAST
    np.testing.assert_array_equal(timestep.discount, 0.0)
    assert not timestep.extras["won_episode"]


def test_connector_is_cut_at_its_limit():
    env, state = two_agents([(0, 0), (4, 0)], [(0, 4), (4, 4)])
    for _ in range(4):
        state, timestep = env.step(state, jnp.array([0, 0]))
    assert timestep.step_type == LAST
    np.testing.assert_array_equal(timestep.discount, 1.0)
    assert not timestep.extras["won_episode"]


@pytest.mark.parametrize(("time_limit", "left"), [(3, 2), (3, 1), (1, 1)])
def test_cleaner_ends_clean_or_is_cut(time_limit, left):
    """One agent, a corridor without walls, so many dirty tiles to its right."""
    env = CleanerEnv(num_rows=5, num_cols=5, num_agents=1, time_limit=time_limit)
    state, _ = env.reset(jax.random.key(0))
    grid = jnp.full((5, 5), CLEAN, state.grid.dtype).at[0, 1 : 1 + left].set(DIRTY)
    state = state.replace(grid=grid, action_mask=jnp.array([[False, True, True, False]]))
    rewards = []
    for step in range(left):
        state, timestep = env.step(state, jnp.array([1]))
        rewards.append(float(timestep.reward[0]))
        assert (timestep.step_type == LAST) == (step == left - 1)
    assert rewards == [0.5] * left
    np.testing.assert_array_equal(timestep.discount, 0.0)
    assert timestep.extras["won_episode"]
    assert timestep.extras["env_metrics"]["ratio_cleaned"] == 1.0


def test_cleaner_is_cut_at_its_limit():
    env = CleanerEnv(num_rows=5, num_cols=5, num_agents=1, time_limit=1)
    state, first = env.reset(jax.random.key(0))
    action = jnp.argmax(first.observation.action_mask, axis=-1)
    _, timestep = env.step(state, action)
    assert timestep.step_type == LAST
    np.testing.assert_array_equal(timestep.discount, 1.0)


@pytest.mark.parametrize(("all_found", "at_limit"), [(True, True), (True, False), (False, True)])
def test_search_ends_when_all_is_found_or_is_cut(all_found, at_limit):
    env = SearchAndRescueEnv(num_searchers=2, num_targets=3, time_limit=9)
    state, _ = env.reset(jax.random.key(0))
    targets = dataclasses.replace(state.targets, found=jnp.full(3, all_found))
    step_count = jnp.int32(8 if at_limit else 0)
    state = dataclasses.replace(state, targets=targets, step=step_count)
    state, timestep = jax.jit(env.step)(state, jnp.zeros((2, 2)))
    assert timestep.step_type == LAST
    np.testing.assert_array_equal(timestep.discount, 0.0 if all_found else 1.0)
    assert bool(timestep.extras["won_episode"]) == all_found


LAZY = """
import sys
import mava.experiment, mava.wrappers.jumanji
imported = {x.split(".")[0] for x in sys.modules}
assert not {"jaxmarl", "brax", "matrax", "distrax", "tensorboardX"} & imported
"""


def test_other_suites_are_not_imported():
    subprocess.run([sys.executable, "-c", LAZY], check=True)
