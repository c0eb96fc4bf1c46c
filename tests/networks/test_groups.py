"""Agents in groups with parameters of their own."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mava.networks import (
    CNNTorso,
    FeedForwardActor,
    FeedForwardCritic,
    MLPTorso,
    RecurrentActor,
    RecurrentCritic,
    RecurrentTorso,
    ValueHead,
    make_action_head,
)
from mava.networks.groups import (
    Grouped,
    GroupedCentral,
    axes_of_memory_and_observation,
    axes_of_memory_and_views,
    axes_of_observation,
    axes_of_views,
    grouped_optim,
    learning_rates,
    make_groups,
)
from mava.types import Continuous, Discrete, MultiDiscrete, Observation, array_spec

TEAMS = {"left": (4, 1), "right": (0, 2, 3), "middle": (5, 6)}  # two sizes, ids in no order
NUM_AGENTS = 7
PER_TEAM = make_groups("per_team", TEAMS, NUM_AGENTS)
PER_AGENT = make_groups("per_agent", TEAMS, NUM_AGENTS)


def observation(spec, *batch, view=(6,)):
    keys = jax.random.split(jax.random.key(3), 2)
    size = {Discrete: 3, MultiDiscrete: 5, Continuous: 2}[type(spec)]
    mask = jax.random.bernoulli(keys[0], 0.7, (*batch, NUM_AGENTS, size)).at[..., 0].set(True)
    return Observation(
        agents_view=jax.random.normal(keys[1], (*batch, NUM_AGENTS, *view)),
        action_mask=mask.at[..., 3].set(True) if size == 5 else mask,
        agent_mask=jnp.ones((*batch, NUM_AGENTS), bool),
        step_count=jnp.zeros(batch, jnp.int32).at[1].set(1),
        global_state=jax.random.normal(keys[1], (*batch, 4)),
    )


def params_of(network, params, group):
    """Returns the parameters of one group."""
    for which, of_size in zip(network.members, params, strict=True):
        if group in which:
            place = list(which).index(group)
            return jax.tree.map(lambda x: x[place], of_size)  # noqa: B023
    raise AssertionError


def of_agents(ids, axis, tree):
    return jax.tree.map(lambda x: jnp.take(x, jnp.array(ids), axis), tree)


def close(x, y):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), x, y)


@pytest.mark.parametrize(
    ("groups", "spec"),
    [(PER_AGENT, Discrete(3)), (PER_TEAM, MultiDiscrete((3, 2))), (PER_TEAM, Continuous(2))],
    ids=["per_agent", "several actions", "continuous"],
)
def test_each_agent_acts_with_the_parameters_of_its_group(groups, spec):
    actor = FeedForwardActor(torso=MLPTorso((8,)), head=make_action_head(spec))
    network = Grouped(actor, groups, axes_of_observation)
    params = jax.jit(network.init)(jax.random.key(0), observation(spec, 2))
    seen = observation(spec, 4, 2)
    policy = jax.jit(network.apply)(params, seen)
    for group, ids in enumerate(groups.ids):
        own = seen.replace(
            agents_view=of_agents(ids, 2, seen.agents_view),
            action_mask=of_agents(ids, 2, seen.action_mask),
        )
        close(of_agents(ids, 2, policy), actor.apply(params_of(network, params, group), own))


def test_grids_too():
    view = (4, 4, 2)
    critic = FeedForwardCritic(torso=CNNTorso((3,), (3,), (1,), (8,)), head=ValueHead(1))
    spec = array_spec((NUM_AGENTS, *view), jnp.float32)
    network = Grouped(critic, PER_TEAM, axes_of_views(spec))
    views = observation(Discrete(3), 3, view=view).agents_view
    params = jax.jit(network.init)(jax.random.key(0), views)
    values = jax.jit(network.apply)(params, views)
    assert values.shape == (3, NUM_AGENTS, 1)
    for group, ids in enumerate(PER_TEAM.ids):
        own = critic.apply(params_of(network, params, group), of_agents(ids, 1, views))
        close(of_agents(ids, 1, values), own)


def recurrent_torso():
    return RecurrentTorso(pre_torso=MLPTorso((8,)), cell=nn.GRUCell(5), post_torso=MLPTorso((8,)))


def test_memories_are_the_agents_own():
    seen, start = observation(Discrete(3), 4, 2), jnp.zeros((4, 2), bool).at[2, 0].set(True)
    memory = jax.random.normal(jax.random.key(4), (2, NUM_AGENTS, 5))
    actor = RecurrentActor(torso=recurrent_torso(), head=make_action_head(Discrete(3)))
    network = Grouped(actor, PER_TEAM, axes_of_memory_and_observation)
    params = jax.jit(network.init)(jax.random.key(0), memory, seen)
    result = jax.jit(network.apply)(params, memory, seen)
    critic = RecurrentCritic(torso=recurrent_torso(), head=ValueHead(1))
    critics = Grouped(critic, PER_TEAM, axes_of_memory_and_views)
    critic_params = jax.jit(critics.init)(jax.random.key(0), memory, seen.agents_view, start)
    values = jax.jit(critics.apply)(critic_params, memory, seen.agents_view, start)
    for group, ids in enumerate(PER_TEAM.ids):
        view = of_agents(ids, 2, seen.agents_view)
        own = seen.replace(agents_view=view, action_mask=of_agents(ids, 2, seen.action_mask))
        memory_of = of_agents(ids, 1, memory)
        of_group = params_of(network, params, group)
        close(of_agents(ids, 2, result), actor.apply(of_group, memory_of, own))
        of_group = params_of(critics, critic_params, group)
        close(of_agents(ids, 2, values), critic.apply(of_group, memory_of, view, start))


def test_central_critics_value_their_own_agents():
    state = observation(Discrete(3), 4, 2).global_state
    critic = FeedForwardCritic(torso=MLPTorso((8,)), head=ValueHead(NUM_AGENTS))
    network = GroupedCentral(critic, PER_TEAM)
    params = jax.jit(network.init)(jax.random.key(0), state)
    values = jax.jit(network.apply)(params, state)
    recurrent = RecurrentCritic(torso=recurrent_torso(), head=ValueHead(NUM_AGENTS))
    recurrents = GroupedCentral(recurrent, PER_TEAM)
    memory, start = jnp.zeros((2, *recurrents.memory_axes, 5)), jnp.zeros((4, 2), bool)
    recurrent_params = jax.jit(recurrents.init)(jax.random.key(0), memory, state, start)
    memories, recurrent_values = jax.jit(recurrents.apply)(recurrent_params, memory, state, start)
    assert values.shape == recurrent_values.shape == (4, 2, NUM_AGENTS)
    for group, ids in enumerate(PER_TEAM.ids):
        own = critic.apply(params_of(network, params, group), state)
        close(of_agents(ids, 2, values), of_agents(ids, 2, own))
        of_group = params_of(recurrents, recurrent_params, group)
        after, own = recurrent.apply(of_group, memory[:, group], state, start)
        close(of_agents(ids, 2, recurrent_values), of_agents(ids, 2, own))
        close(memories[:, :, group], after)


def test_groups_start_with_parameters_of_their_own():
    actor = FeedForwardActor(torso=MLPTorso((8,)), head=make_action_head(Discrete(3)))
    network = Grouped(actor, PER_AGENT, axes_of_observation)
    (params,) = jax.jit(network.init)(jax.random.key(0), observation(Discrete(3), 2))
    kernels = np.asarray(params["params"]["head"]["Dense_0"]["kernel"]).reshape(NUM_AGENTS, -1)
    assert len(np.unique(kernels.round(6), axis=0)) == NUM_AGENTS


def test_each_group_is_clipped_and_stepped_alone():
    actor = FeedForwardActor(torso=MLPTorso((8,)), head=make_action_head(Discrete(3)))
    network = Grouped(actor, PER_TEAM, axes_of_observation)
    params = jax.jit(network.init)(jax.random.key(0), observation(Discrete(3), 2))

    def make_optim(learning_rate):
        return optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(learning_rate))

    rates = learning_rates(PER_TEAM, 1.0, {"right": 0.5}, ["middle"])
    assert rates == [1.0, 0.5, 0.0]
    optim = grouped_optim(make_optim, rates, network)
    state = jax.jit(optim.init)(params)
    huge = jax.tree.map(lambda x: 100.0 * jnp.ones_like(x), params)
    updates, _ = optim.update(huge, state)
    for group, rate in enumerate(rates):
        norm = optax.tree.norm(params_of(network, updates, group))
        assert float(norm) == pytest.approx(0.1 * rate)
    small = jax.tree.map(lambda x: 1e-4 * jnp.ones_like(x), params)
    updates, _ = optim.update(small, state)
    step = params_of(network, updates, 0)["params"]["head"]["Dense_0"]["bias"]
    np.testing.assert_allclose(step, -3e-4, rtol=1e-5)  # the loss is a mean over three groups


def test_means_over_groups():
    x = jax.random.normal(jax.random.key(0), (3, 2, NUM_AGENTS))
    means = PER_TEAM.mean(x)
    for ids in map(jnp.array, TEAMS.values()):
        np.testing.assert_allclose(means[ids], jnp.mean(x[..., ids]), rtol=1e-5)
    weighted = jnp.mean(PER_TEAM.weights * x)
    expected = np.mean([jnp.mean(x[..., jnp.array(ids)]) for ids in TEAMS.values()])
    np.testing.assert_allclose(weighted, expected, rtol=1e-5)


def test_groups_of_a_config():
    groups = make_groups({"a": [0, 1, 2], "b": [3], "c": [4, 5, 6]}, TEAMS, NUM_AGENTS)
    assert groups.names == groups.teams == ("a", "b", "c")
    assert list(groups.of_agent) == [0, 0, 0, 1, 2, 2, 2]
    assert PER_AGENT.teams == ("right", "left", "right", "right", "left", "middle", "middle")
    assert make_groups("per_team", {"all": (0, 1)}, 2).ids == ((0, 1),)


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ("each", "network.policies=each must be shared, per_team, per_agent, or"),
        ({"a": [0, 1, 2], "b": [3, 4, 5]}, "must name each of the 7 agents, 0 to 6, once"),
        ({"a": [0, 1, 2, 3], "b": [3, 4, 5, 6]}, "must name each of the 7 agents"),
        ({"a": [0, 1, 2, 3, 4, 5, 6], "b": []}, "leave no group empty"),
    ],
)
def test_refuses_what_are_no_groups(policies, message):
    with pytest.raises(ValueError, match=message):
        make_groups(policies, TEAMS, NUM_AGENTS)


@pytest.mark.parametrize(("rates", "frozen"), [({"up": 1.0}, []), ({}, ["up"])])
def test_refuses_unknown_teams(rates, frozen):
    with pytest.raises(ValueError, match=r"no team up .* there is left, right, middle"):
        learning_rates(PER_TEAM, 1.0, rates, frozen)
    with pytest.raises(ValueError, match=r"no team left .* there is all"):
        learning_rates(make_groups("shared", TEAMS, NUM_AGENTS), 1.0, {"left": 1.0}, [])


def test_refuses_teams_that_leave_agents_out():
    with pytest.raises(ValueError, match="must have each of its 3 agents once"):
        make_groups("shared", {"a": (0, 1)}, 3)
    with pytest.raises(ValueError, match="a group is a list of agents' numbers"):
        make_groups({"a": 0, "b": [1]}, {"all": (0, 1)}, 2)
    with pytest.raises(ValueError, match="must be above 0"):
        learning_rates(PER_TEAM, 1.0, {"right": -1.0}, [])
