"""MultiCVRP and MMST, wrapped: on maps and graphs small enough to work out what must come."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jumanji.environments.routing.mmst.types import State as MmstState
from jumanji.environments.routing.mmst.utils import make_action_mask
from jumanji.environments.routing.multi_cvrp.utils import create_action_mask

from mava.check_env import random_action
from mava.config import UserError, make_env, scenarios_of
from mava.types import LAST, MID
from mava.wrappers.episode_metrics import EpisodeMetrics
from mava.wrappers.jumanji_graphs import MmstEnv, MultiCvrpEnv
from mava.wrappers.observation import AgentIds, GlobalState
from tests.running import make_run

SCENARIOS = scenarios_of("MultiCVRP") + scenarios_of("MMST")
DEPOT = 0


def env_of(scenario, *overrides):
    group = "mmst" if scenario.startswith("mmst") else "multi_cvrp"
    overrides = (f"env={group}", f"env/scenario={scenario}", *overrides)
    cfg = make_run("ff_ippo", *overrides).composed.env
    assert cfg.scenario.task_name == scenario
    return make_env(cfg)


def test_what_cannot_be_is_refused():
    with pytest.raises(UserError, match="time_limit=13 must be at most 2 \\* num_customers = 12"):
        env_of("cvrp-2v-6c", "env.kwargs.time_limit=13")
    with pytest.raises(UserError, match="time_limit=0 must be"):
        env_of("cvrp-2v-6c", "env.kwargs.time_limit=0")
    for num_edges in (10, 31):
        change = f"env.scenario.task_config.num_edges={num_edges}"
        with pytest.raises(UserError, match=f"num_edges={num_edges} must be from .* 11 to .* 30"):
            env_of("mmst-2ag-12n", change)
    with pytest.raises(UserError, match="num_nodes_per_agent=1 must be at least 2"):
        env_of("mmst-2ag-12n", "env.scenario.task_config.num_nodes_per_agent=1")


@pytest.mark.parametrize("scenario", ["cvrp-2v-6c", "mmst-2ag-12n"])
def test_states_are_drawn(scenario):
    """Through all wrappers, in colours, differently where something moved. NumPy is not seeded."""
    np.random.seed(1)
    random_state = np.random.get_state()[1].copy()
    env = EpisodeMetrics(AgentIds(GlobalState(env_of(scenario))))
    state, first = jax.jit(env.reset)(jax.random.key(0))
    action = jnp.argmax(first.observation.action_mask[:, ::-1], axis=-1)
    moved, _ = jax.jit(env.step)(state, env.action_spec.num_actions - 1 - action)
    image, same, other = env.draw([state, state, moved])
    assert image.shape == (500, 500, 3)
    assert image.dtype == np.uint8
    assert len(np.unique(image.reshape(-1, 3), axis=0)) > 3
    np.testing.assert_array_equal(image, same)
    assert np.any(image != other)
    np.testing.assert_array_equal(np.random.get_state()[1], random_state)


@pytest.fixture(scope="module")
def two_vehicles():
    """A state of two vehicles whose map is 10 x 10 and whose customers 1 and 2 are each a load: 5
    and 6 from the depot, one wanted at 7 or later, the other by 4.
    """
    state, _ = jax.jit(MultiCvrpEnv(num_customers=6, num_vehicles=2).reset)(jax.random.key(0))
    coordinates = jnp.zeros((7, 2)).at[1].set(jnp.array([3.0, 4.0])).at[2, 1].set(6.0)
    demands = jnp.zeros(7, jnp.int16).at[1:3].set(20)
    nodes = state.nodes.replace(coordinates=coordinates, demands=demands)
    windows = state.windows.replace(
        start=jnp.zeros(7).at[1].set(7.0), end=jnp.full(7, 100.0).at[2].set(4.0)
    )
    coeffs = state.coeffs.replace(
        early=jnp.zeros(7).at[1].set(0.1), late=jnp.zeros(7).at[2].set(0.5)
    )
    mask = create_action_mask(demands, state.vehicles.capacities)
    return state.replace(nodes=nodes, windows=windows, coeffs=coeffs, action_mask=mask)


def vehicles_env(time_limit=None):
    return MultiCvrpEnv(num_customers=6, num_vehicles=2, time_limit=time_limit)


def play(env, state, *actions):
    """Returns the timesteps after the joint actions."""
    step, timesteps = jax.jit(env.step), []
    for action in actions:
        state, timestep = step(state, jnp.array(action))
        timesteps.append(timestep)
    return timesteps


@pytest.mark.parametrize("time_limit", [None, 2])
def test_vehicles_serve_all_and_return(two_vehicles, time_limit):
    """There and back with a load each, which is the shortest: 22; 2 early at 0.1, 2 late at 0.5."""
    out, back = play(vehicles_env(time_limit), two_vehicles, [1, 2], [DEPOT, DEPOT])
    np.testing.assert_allclose(out.reward, [-12.2, -12.2], rtol=1e-6)
    np.testing.assert_allclose(back.reward, [-11.0, -11.0], rtol=1e-6)
    assert (out.step_type, back.step_type) == (MID, LAST)
    np.testing.assert_array_equal([out.discount, back.discount], [[1.0, 1.0], [0.0, 0.0]])
    only_depot = [[True] + 6 * [False]] * 2
    np.testing.assert_array_equal(out.observation.action_mask, only_depot)
    np.testing.assert_array_equal(out.observation.agent_mask, True)
    np.testing.assert_array_equal(back.observation.agent_mask, False)
    assert back.extras["won_episode"]
    metrics = {"distance": 22.0, "time_penalty": 1.2, "customers_left": 0.0}
    for name, value in metrics.items():
        np.testing.assert_allclose(back.extras["env_metrics"][name], value, rtol=1e-6)


def test_vehicles_are_cut_before_they_are_back(two_vehicles):
    """No customer is left, so nothing is charged for one; but one vehicle is not back."""
    env = vehicles_env(3)
    *_, third = play(env, two_vehicles, [DEPOT, 2], [DEPOT, DEPOT], [1, DEPOT])
    np.testing.assert_allclose(third.reward, [-5.2, -5.2], rtol=1e-6)
    assert third.step_type == LAST
    np.testing.assert_array_equal(third.discount, 1.0)
    np.testing.assert_array_equal(third.observation.agent_mask, [True, False])
    assert third.extras["won_episode"]


@pytest.mark.parametrize("time_limit", [2, None])
def test_customers_left_at_the_limit_are_charged(two_vehicles, time_limit):
    """Both one by one: 22 to drive, and at 22 the second is 18 late at 0.5."""
    env = vehicles_env(time_limit)
    *before, cut = play(env, two_vehicles, *[[DEPOT, DEPOT]] * env.time_limit)
    assert env.time_limit == (time_limit or 12)
    for timestep in before:
        assert timestep.step_type == MID
        np.testing.assert_array_equal(timestep.reward, 0.0)
    assert cut.step_type == LAST
    np.testing.assert_allclose(cut.reward, [-31.0, -31.0], rtol=1e-6)
    np.testing.assert_array_equal(cut.discount, 0.0)  # the charge stands for what is to come
    assert not cut.extras["won_episode"]


def test_the_last_step_before_the_cut_costs_what_it_costs(two_vehicles):
    """5 to drive and 2 early; then 12 for the customer left, 2.5 + 12 - 4 late at 0.5."""
    (cut,) = play(vehicles_env(1), two_vehicles, [1, DEPOT])
    np.testing.assert_allclose(cut.reward, 2 * [-(5.2 + 12.0 + 5.25)], rtol=1e-6)


def test_one_customer_takes_one_vehicle(two_vehicles):
    """The first gets it. The other, in the depot, stays."""
    (timestep,) = play(vehicles_env(), two_vehicles, [2, 2])
    np.testing.assert_allclose(timestep.reward, [-7.0, -7.0], rtol=1e-6)
    mask = [[True] + 6 * [False], [True, True] + 5 * [False]]
    np.testing.assert_array_equal(timestep.observation.action_mask, mask)


def test_vehicles_see_where_everything_is(two_vehicles):
    (timestep,) = play(vehicles_env(), two_vehicles, [1, DEPOT])
    views = np.array(timestep.observation.agents_view)
    own, others, nodes = views[:, :6], views[:, 6:11], views[:, 11:].reshape(2, 7, 9)
    # Place, capacity, clock, in the depot, time left; windows end at 30 at the latest.
    np.testing.assert_allclose(own[0], [0.3, 0.4, 0.0, 5 / 35, 0, 11 / 12], rtol=1e-6)
    np.testing.assert_allclose(own[1], [0.0, 0.0, 1.0, 0.0, 1, 11 / 12], rtol=1e-6)
    np.testing.assert_allclose(others[0], [-0.3, -0.4, 1.0, 0.0, 1], rtol=1e-6)
    np.testing.assert_allclose(others[1], [0.3, 0.4, 0.0, 5 / 35, 0], rtol=1e-6)
    # Way, length, demand, window from arrival, costs, legal. No load left; 6 - 4 late.
    way = np.hypot(3, 2)
    late = [-(5 + way) / 30, (4 - 5 - way) / 30]
    np.testing.assert_allclose(
        nodes[0, 2], [-0.3, 0.2, way / 10, 1, *late, 0, 0.5, 0], rtol=1e-5, atol=1e-7
    )
    np.testing.assert_allclose(nodes[1, 2], [0, 0.6, 0.6, 1, -0.2, -2 / 30, 0, 0.5, 1], rtol=1e-5)
    np.testing.assert_allclose(nodes[0, 0, :3], [-0.3, -0.4, 0.5], rtol=1e-6)
    assert not nodes[:, [1, 3, 4, 5, 6]].any()  # served, or never wanted anything


def roll_vehicles(state):
    vehicles = jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), state.vehicles)
    return state.replace(vehicles=vehicles, action_mask=jnp.roll(state.action_mask, 1, axis=0))


def test_the_order_of_vehicles_does_not_matter():
    """Unless they want the same customer."""
    env = MultiCvrpEnv(num_customers=20, num_vehicles=3)
    state, _ = jax.jit(env.reset)(jax.random.key(0))
    actions = jnp.array([[1, 2, 3], [4, 5, 6], [7, 0, 8]])
    rolled = play(env, roll_vehicles(state), *jnp.roll(actions, 1, axis=1))
    for timestep, other in zip(play(env, state, *actions), rolled, strict=True):
        np.testing.assert_allclose(timestep.reward, other.reward, rtol=1e-5)
        for name in ("agents_view", "action_mask", "agent_mask"):
            mine, theirs = (getattr(x.observation, name) for x in (timestep, other))
            np.testing.assert_allclose(np.roll(mine, 1, axis=0), theirs, atol=1e-6)


def episodes(env, choose, num_episodes, num_steps):
    """Returns the timesteps of first episodes, (episodes, steps, ...); later steps pay nothing."""

    def step(carry, key):
        state, observation, over = carry
        state, timestep = env.step(state, choose(observation, key))
        reward = jnp.where(over, 0.0, timestep.reward)
        return (state, timestep.observation, over | timestep.last()), timestep.replace(
            reward=reward
        )

    def episode(key):
        reset_key, steps_key = jax.random.split(key)
        state, first = env.reset(reset_key)
        carry = (state, first.observation, jnp.bool_(False))
        return jax.lax.scan(step, carry, jax.random.split(steps_key, num_steps))[1]

    return jax.jit(jax.vmap(episode))(jax.random.split(jax.random.key(0), num_episodes))


def at_ends(timesteps):
    """Returns the last timesteps of such episodes."""
    ends = jnp.argmax(timesteps.step_type == LAST, axis=1)
    return jax.tree.map(lambda x: x[jnp.arange(len(ends)), ends], timesteps)


def random_choice(env):
    return lambda observation, key: random_action(env.action_spec, observation.action_mask, key)


def test_returns_add_up_and_the_view_tells_who_is_near():
    """Random driving, which ends before the limit, and driving to the nearest that may be."""
    env = MultiCvrpEnv(num_customers=6, num_vehicles=2)

    def to_the_nearest(observation, key):
        nodes = observation.agents_view[:, 11:].reshape(2, 7, 9)
        lengths = jnp.where(nodes[..., -1] > 0, nodes[..., 2], jnp.inf)
        return jnp.argmin(lengths.at[:, DEPOT].set(10.0), axis=-1)

    timesteps = episodes(EpisodeMetrics(env), random_choice(env), 64, 12)
    returns = timesteps.reward.sum(axis=1)
    at_end = at_ends(timesteps)
    np.testing.assert_array_equal(at_end.discount, 0.0)
    final, metrics = at_end.extras["episode_return"], at_end.extras["env_metrics"]
    np.testing.assert_allclose(returns, np.stack([final] * 2, axis=1), rtol=1e-5)
    np.testing.assert_allclose(final, -metrics["distance"] - metrics["time_penalty"], rtol=1e-5)
    near = episodes(env, to_the_nearest, 64, 12).reward.sum(axis=1)
    assert near.mean() > returns.mean() + 3.0


def walkers(edges, owners, starts, time_limit=9):
    """Returns an environment of two agents with two nodes each, and its state on this graph.

    Args:
        edges: pairs of nodes.
        owners: of each node, -1 for nobody.
        starts: of the agents.
    """
    num_nodes = len(owners)
    env = MmstEnv(
        num_nodes=num_nodes, num_edges=num_nodes, max_degree=5, num_agents=2,
        num_nodes_per_agent=2, time_limit=time_limit,
    )  # fmt: skip
    owners, starts = jnp.array(owners), jnp.array(starts)
    adjacency = jnp.zeros((num_nodes, num_nodes), jnp.int32)
    for a, b in edges:
        adjacency = adjacency.at[jnp.array([a, b]), jnp.array([b, a])].set(1)
    node_edges = jnp.tile(jnp.where(adjacency > 0, jnp.arange(num_nodes), -1), (2, 1, 1))
    agent_ids, none = jnp.arange(2), jnp.zeros(2, bool)
    return env, MmstState(
        node_types=owners,
        adj_matrix=adjacency,
        connected_nodes=jnp.full((2, env._env._generator._max_step), -1).at[:, 0].set(starts),
        connected_nodes_index=jnp.full((2, num_nodes), -1).at[agent_ids, starts].set(starts),
        nodes_to_connect=jnp.stack([jnp.flatnonzero(owners == agent) for agent in range(2)]),
        node_edges=node_edges,
        positions=starts,
        position_index=jnp.zeros(2, jnp.int32),
        action_mask=make_action_mask(2, num_nodes, node_edges, starts, none),
        finished_agents=none,
        step_count=jnp.int32(0),
        key=jax.random.key(0),
    )


CHAIN = ([(0, 1), (1, 2), (2, 3), (3, 4)], [0, -1, 0, 1, 1])


@pytest.mark.parametrize("time_limit", [9, 2])
def test_walkers_end_when_all_is_connected(time_limit):
    """Nobody can do better: 4 nodes, of which 2 are starts, and a single step to nobody's node."""
    env, state = walkers(*CHAIN, [0, 3], time_limit)
    first, second = play(env, state, [1, 4], [2, 4])
    np.testing.assert_array_equal([first.reward, second.reward], [[9.0, 9.0], [10.0, 10.0]])
    assert (first.step_type, second.step_type) == (MID, LAST)
    np.testing.assert_array_equal([first.discount, second.discount], [[1.0, 1.0], [0.0, 0.0]])
    np.testing.assert_array_equal(first.observation.agent_mask, [True, False])
    legal = [[True, False, True, False, False], [False, False, False, False, True]]
    np.testing.assert_array_equal(first.observation.action_mask, legal)
    np.testing.assert_array_equal(second.observation.agent_mask, False)
    assert second.observation.action_mask.any(axis=-1).all()
    wins = [bool(timestep.extras["won_episode"]) for timestep in (first, second)]
    ratios = [float(x.extras["env_metrics"]["ratio_connected"]) for x in (first, second)]
    assert (wins, ratios) == ([False, True], [0.5, 1.0])


def test_walkers_are_cut_at_the_limit():
    env, state = walkers(*CHAIN, [0, 3], time_limit=2)
    first, second = play(env, state, [1, 2], [0, 3])  # both there and back
    np.testing.assert_array_equal([first.reward, second.reward], [[-2.0, -2.0]] * 2)
    assert (first.step_type, second.step_type) == (MID, LAST)
    np.testing.assert_array_equal(second.discount, 1.0)
    assert not second.extras["won_episode"]


def test_a_walker_without_a_way_is_out_of_the_game():
    """Agent 1 has one neighbour, nobody's, and agent 0 takes it: agent 1 can only stay, at -2."""
    env, state = walkers([(0, 1), (1, 2), (1, 3), (2, 4)], [0, -1, 0, 1, 1], [0, 3])
    first, second = play(env, state, [1, 3], [0, 3])
    np.testing.assert_array_equal(first.observation.agent_mask, [True, False])
    np.testing.assert_array_equal(first.observation.action_mask[1], jnp.arange(5) == 3)
    np.testing.assert_array_equal(second.reward, [-3.0, -3.0])
    assert second.step_type == MID


def test_a_node_goes_to_one_walker_and_the_other_waits_for_nothing():
    env, state = walkers([(0, 1), (1, 2), (1, 3), (3, 4)], [0, -1, 0, 1, 1], [0, 3])
    (timestep,) = play(env, state, [1, 1])
    np.testing.assert_array_equal(timestep.reward, [-1.0, -1.0])
    there, taken = (timestep.observation.agents_view[:, i * 5 : i * 5 + 5] for i in (0, 6))
    assert there[:, 1].sum() == taken[:, 1].sum() == 1
    assert (there[:, 1] != taken[:, 1]).all()


def test_walkers_see_the_graph():
    env, state = walkers(*CHAIN, [0, 3])
    (timestep,) = play(env, state, [1, 2])  # agent 1 on a node of agent 0
    views = timestep.observation.agents_view
    channels = np.array(views[:, :35]).reshape(2, 7, 5)
    of_agents = [  # there, wanted, visited, legal, another there, wanted, taken
        [[1], [2], [0, 1], [0, 2], [2], [4], []],
        [[2], [4], [2, 3], [3], [1], [2], [1]],
    ]
    for agent, nodes in enumerate(of_agents):
        assert [list(np.flatnonzero(channel)) for channel in channels[agent]] == nodes
    pairs = np.stack(np.triu_indices(5, k=1), axis=-1)
    for agent in range(2):
        joined = [tuple(pair) for pair in pairs[np.array(views[agent, 35:]) > 0]]
        assert joined == CHAIN[0]


def test_the_order_of_walkers_does_not_matter():
    """The same graph with the agents' names exchanged."""
    edges, owners = CHAIN
    env, state = walkers(edges, owners, [0, 3])
    other_env, other = walkers(edges, [{0: 1, 1: 0}.get(owner, owner) for owner in owners], [3, 0])
    timesteps = play(env, state, [1, 2], [2, 3], [2, 4])
    others = play(other_env, other, [2, 1], [3, 2], [4, 2])
    for timestep, mirrored in zip(timesteps, others, strict=True):
        np.testing.assert_array_equal(timestep.reward, mirrored.reward)
        assert timestep.step_type == mirrored.step_type
        for name in ("agents_view", "action_mask", "agent_mask"):
            mine, theirs = (getattr(x.observation, name) for x in (timestep, mirrored))
            np.testing.assert_array_equal(mine[::-1], theirs)


def test_the_view_is_enough_to_connect_all():
    """Who goes the shortest way to the nearest wanted node that nobody has taken wins nearly all
    that is generated; an episode's return is 10 for each of 4 nodes, less the other steps.
    """
    env = env_of("mmst-2ag-12n")
    pairs = np.triu_indices(12, k=1)

    def to_the_nearest(observation, key):
        channels = observation.agents_view[:, : 7 * 12].reshape(2, 7, 12) > 0
        edges = jnp.zeros((2, 12, 12)).at[:, *pairs].set(observation.agents_view[:, 7 * 12 :])
        free = ~channels[:, 6]
        edges = (edges + edges.swapaxes(1, 2)) * free[:, None] * free[..., None]
        steps = jnp.where(channels[:, 1], 0.0, 99.0)  # from each node
        for _ in range(12):
            onward = jnp.where(edges > 0, steps[:, None], 99.0).min(axis=-1) + 1
            steps = jnp.minimum(steps, onward)
        return jnp.argmin(jnp.where(observation.action_mask, steps, 1e3), axis=-1)

    timesteps = episodes(EpisodeMetrics(env), to_the_nearest, 64, 70)
    final = at_ends(timesteps)
    won = np.array(final.extras["won_episode"])
    assert won.mean() > 0.9
    np.testing.assert_array_equal(final.discount, 1.0 - np.stack([won] * 2, axis=1))
    returns = timesteps.reward.sum(axis=1)
    np.testing.assert_allclose(returns[:, 0], final.extras["episode_return"], rtol=1e-5)
    assert returns[won].min() > 15
    assert returns[won].max() <= 40
