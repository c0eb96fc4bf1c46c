"""The attention critic and the stacked policies: sizes, first weights, padding, who sees what."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mava.environments.rover_tower import RoverTower
from mava.environments.treasure_collection import TreasureCollection
from mava.networks import AttentionCritic, StackedDense, StackedMLP
from mava.wrappers.base import action_sizes, view_sizes
from mava.wrappers.episode_metrics import EpisodeMetrics
from mava.wrappers.observation import AgentIds, GlobalState

SIZES, ACTIONS = (5, 5, 3), (4, 2, 4)  # of views of 5 features and 4 actions


def critic_and_inputs():
    critic = AttentionCritic(hidden_dim=8, num_heads=2, view_sizes=SIZES, action_sizes=ACTIONS)
    keys = jax.random.split(jax.random.key(0), 3)
    views = jax.random.normal(keys[0], (6, 3, 5)).at[:, 2, 3:].set(0.0)
    actions = jax.nn.one_hot(jax.random.randint(keys[1], (6, 3), 0, 2), 4)
    return critic, jax.jit(critic.init)(keys[2], views, actions), views, actions


@pytest.mark.parametrize(
    ("env", "expected"),
    [(RoverTower(), 346_280), (TreasureCollection(), 499_880)],
    ids=["rover tower", "treasure collection"],
)
def test_sizes_of_the_published_networks(env, expected):
    """As many weights as the authors' critic has, less those of padding."""
    sizes = view_sizes(env)
    critic = AttentionCritic(view_sizes=sizes, action_sizes=(5,) * 8)
    shapes = jax.eval_shape(
        critic.init, jax.random.key(0), jnp.zeros((1, 8, max(sizes))), jnp.zeros((1, 8, 5))
    )
    num_weights = sum(x.size for x in jax.tree.leaves(shapes))
    padding = sum(max(sizes) - size for size in sizes) * 2 * 128  # two encoders
    assert num_weights - padding == expected


def test_own_action_is_not_seen_and_those_of_others_are():
    critic, params, views, actions = critic_and_inputs()
    values = jax.jit(lambda actions: critic.apply(params, views, actions)[0])
    expected = values(actions)
    changed = values(actions.at[:, 1].set(jnp.roll(actions[:, 1], 1, axis=-1)))
    np.testing.assert_array_equal(changed[:, 1], expected[:, 1])
    assert (jnp.abs(changed[:, [0, 2]] - expected[:, [0, 2]]).max(axis=(0, 2)) > 1e-4).all()


def test_padding_changes_nothing():
    """Whatever the weights of padded features and of actions that an agent does not have."""
    critic, params, views, actions = critic_and_inputs()
    actions = actions.at[:, 1, 2:].set(0.0)
    expected = critic.apply(params, views, actions)[0]
    layers = dict(params["params"])
    for name in ("encoder", "state_encoder"):
        kernel = layers[name]["kernel"].at[2, 3:5].set(1e6)
        if name == "encoder":
            kernel = kernel.at[1, 5 + 2 :].set(1e6)
        layers[name] = {**layers[name], "kernel": kernel}
    np.testing.assert_array_equal(critic.apply({"params": layers}, views, actions)[0], expected)


def test_first_weights_have_the_unpadded_number_of_inputs():
    """Even between +-1/sqrt(inputs); of both halves of a head's first layer, of all its inputs."""
    critic = AttentionCritic(hidden_dim=128, view_sizes=(25, 4), action_sizes=(11, 5))
    params = critic.init(jax.random.key(0), jnp.zeros((1, 2, 25)), jnp.zeros((1, 2, 11)))["params"]
    expected = {
        "state_encoder": (25, 4), "encoder": (36, 9), "query": (128,), "key": (128,),
        "value": (128,), "hidden_state": (256, 256), "hidden_attended": (256, 256),
        "values": (128, 128),
    }  # fmt: skip
    assert params.keys() == expected.keys()
    for name, inputs in expected.items():
        for weights in params[name].values():
            largest = jnp.max(jnp.abs(weights.reshape(len(inputs), -1)), axis=1)
            np.testing.assert_array_less(largest, np.array(inputs) ** -0.5 + 1e-6)
            np.testing.assert_array_less(0.9 * np.array(inputs) ** -0.5, largest)
    assert {name for name, layer in params.items() if "bias" not in layer} == {
        "query", "key", "hidden_attended",
    }  # fmt: skip


@pytest.mark.parametrize("fan_in", [(5, 5, 3), (5,)], ids=["per agent", "shared"])
def test_stacked_layers_are_layers_side_by_side(fan_in):
    policy = StackedMLP(layer_sizes=(8,), fan_in=fan_in, num_actions=2)
    views = jax.random.normal(jax.random.key(0), (6, 3, 5))
    params = policy.init(jax.random.key(1), views)
    logits = policy.apply(params, views)
    layers = [params["params"][f"StackedDense_{i}"] for i in range(2)]
    for agent in range(3):
        row = agent if len(fan_in) > 1 else 0
        x = views[:, agent]
        x = jax.nn.leaky_relu(x @ layers[0]["kernel"][row] + layers[0]["bias"][row])
        x = x @ layers[1]["kernel"][row] + layers[1]["bias"][row]
        np.testing.assert_allclose(logits[:, agent], x, atol=1e-5)


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="num_heads=3 must divide hidden_dim=8"):
        AttentionCritic(hidden_dim=8, num_heads=3)
    assert StackedDense(4, (2,)).use_bias


def test_sizes_of_views_and_actions_are_found_in_wrappers():
    env = RoverTower(num_pairs=2)
    assert view_sizes(env) == (11, 11, 6, 6)
    wrapped = EpisodeMetrics(AgentIds(GlobalState(env)))
    assert view_sizes(wrapped) == (15, 15, 10, 10)  # with the ids
    assert action_sizes(wrapped) == (5, 5, 5, 5)
