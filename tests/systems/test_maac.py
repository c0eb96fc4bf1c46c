"""MAAC: one update against recorded numbers, the buffer, devices and replicas, learning."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mava.networks import AttentionCritic, StackedMLP
from mava.networks.distributions import Categorical
from mava.types import Discrete, array_spec
from mava.wrappers.vector import VectorEnv
from tests.environments import Probe
from tests.running import build, over_axes, streams, system_module

MAAC = system_module("ff_maac")
RECORD = Path(__file__).parents[1] / "data" / "maac_update.npz"
NAMES = {  # of the recorded program's layers; {i} is an agent, {h} a head
    "state_encoder": "state_encoders.{i}.s_enc_fc1",
    "encoder": "critic_encoders.{i}.enc_fc1",
    "query": "selector_extractors.{h}",
    "key": "key_extractors.{h}",
    "value": "value_extractors.{h}.0",
    "hidden": "critics.{i}.critic_fc1",
    "values": "critics.{i}.critic_fc2",
}


class Uneven(Probe):
    """As in the record: two agents see 11 features, two 6 and 5 zeros."""

    num_agents = 4
    action_spec = Discrete(5)
    view_sizes = (11, 11, 6, 6)

    @property
    def observation_spec(self):
        return super().observation_spec.replace(agents_view=array_spec((4, 11), jnp.float32))


def recorded_critic(record, name):
    """Returns the critic's parameters: weights stand as (out, in) in the record."""

    def stack(layer):
        parts = []
        for i in range(4):
            weight = record[f"{name}/{NAMES[layer].format(i=i, h=i)}.weight"].T
            if layer == "state_encoder":
                weight = np.pad(weight, ((0, 11 - len(weight)), (0, 0)))
            elif layer == "encoder":  # between the features of a short view and the action
                views, actions = weight[:-5], weight[-5:]
                weight = np.concatenate([np.pad(views, ((0, 11 - len(views)), (0, 0))), actions])
            parts.append(weight)
        return np.stack(parts)

    def bias(layer):
        return np.stack([record[f"{name}/{NAMES[layer].format(i=i, h=i)}.bias"] for i in range(4)])

    heads = {layer: np.concatenate(stack(layer), axis=1)[None] for layer in ("query", "key", "value")}
    hidden = stack("hidden")
    params = {
        **{layer: {"kernel": heads[layer]} for layer in ("query", "key")},
        "value": {"kernel": heads["value"], "bias": bias("value").reshape(1, -1)},
        "hidden_state": {"kernel": hidden[:, :16], "bias": bias("hidden")},
        "hidden_attended": {"kernel": hidden[:, 16:]},
    }
    for layer in ("state_encoder", "encoder", "values"):
        params[layer] = {"kernel": stack(layer), "bias": bias(layer)}
    return {"params": params}


def recorded_policies(record, name):
    params = {}
    for layer in range(3):
        weights = [record[f"{name}/{i}/fc{layer + 1}.weight"].T for i in range(4)]
        inputs = max(len(x) for x in weights)
        params[f"StackedDense_{layer}"] = {
            "kernel": np.stack([np.pad(x, ((0, inputs - len(x)), (0, 0))) for x in weights]),
            "bias": np.stack([record[f"{name}/{i}/fc{layer + 1}.bias"] for i in range(4)]),
        }
    return {"params": params}


def recorded_networks(record, prefix, when):
    return MAAC.Networks(
        actor=recorded_policies(record, f"{prefix}policy{when}"),
        critic=recorded_critic(record, f"{prefix}critic{when}"),
    )


def recorded_sample(record):
    def padded(name):
        rows = [record[f"{name}/{i}"] for i in range(4)]
        return jnp.stack([np.pad(x, ((0, 0), (0, 11 - x.shape[1]))) for x in rows], axis=1)

    batch = len(record["obs/0"])
    stack = lambda name: jnp.stack([record[f"{name}/{i}"] for i in range(4)], axis=1)  # noqa: E731
    return MAAC.Sample(
        view=padded("obs"),
        next_view=padded("nobs"),
        action=jnp.argmax(stack("act"), axis=-1),
        action_mask=jnp.ones((batch, 4, 5), bool),
        next_action_mask=jnp.ones((batch, 4, 5), bool),
        agent_mask=jnp.ones((batch, 4), bool),
        reward=stack("rew"),
        discount=1.0 - stack("done"),
    )


def small_networks(policies="per_agent", **critic):
    return {
        "policies": policies,
        "actor_network": {"policy": StackedMLP(layer_sizes=(16, 16))},
        "critic_network": {"attention": AttentionCritic(hidden_dim=16, num_heads=4, **critic)},
    }


def make_algo(env, batch_size, **options):
    config = MAAC.Config(batch_size=batch_size, buffer_size=1024, **options)
    return MAAC.make_system(VectorEnv(env, 4), small_networks(), config).update.args[0]


def recorded_actions(monkeypatch, record):
    """The policies' draws become the recorded ones, first the targets'."""
    names = iter(["next_act_sampled", "policy_act_sampled"] * 10)

    def sample(self, key):
        name = next(names)
        return jnp.argmax(jnp.stack([record[f"{name}/{i}"] for i in range(4)], axis=1), axis=-1)

    monkeypatch.setattr(Categorical, "sample", sample)


def run_step(algo, state, sample, num_devices=1, num_replicas=1):
    """One gradient step on a sample cut up over devices and replicas; outputs are (D, U, ...)."""
    cut = jax.tree.map(lambda x: x.reshape(num_devices, num_replicas, -1, *x.shape[1:]), sample)
    keys = jax.random.split(jax.random.key(0), (num_devices, num_replicas))
    step = over_axes(partial(MAAC.gradient_step, algo), num_devices, num_replicas)
    return step(state, (cut, keys))


def recorded_state(algo, record):
    state = algo_init(algo)
    params = state.params._replace(
        online=recorded_networks(record, "", 0), target=recorded_networks(record, "target_", 0)
    )
    assert jax.tree.structure(params) == jax.tree.structure(state.params)
    jax.tree.map(lambda x, y: x.shape == y.shape or pytest.fail(), params, state.params)
    return state.replace(params=jax.tree.map(jnp.asarray, params))


def algo_init(algo):
    return jax.jit(partial(MAAC.init, algo))(jax.random.key(0))


def close(actual, expected, atol):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=atol), actual, expected)


def test_one_update_is_the_recorded_one(monkeypatch):
    """Targets, losses, gradient norm and every parameter after the step."""
    record = np.load(RECORD)
    algo = make_algo(Uneven(), 32)
    recorded_actions(monkeypatch, record)
    seen = {}
    targets = MAAC.targets
    monkeypatch.setattr(
        MAAC, "targets", lambda *args: seen.setdefault("y", targets(*args))
    )
    state = recorded_state(algo, record)
    with jax.disable_jit(False):
        after, metrics = run_step(algo, state, recorded_sample(record))
    after, metrics = jax.tree.map(lambda x: x[0, 0], (after, metrics))
    np.testing.assert_allclose(metrics["critic_grad_norm"], record["q_grad_norm"], rtol=1e-4)
    losses = [record[f"pol_loss/{i}"] for i in range(4)]
    np.testing.assert_allclose(metrics["actor_loss"], np.mean(losses), atol=1e-4)
    print(metrics, record["q_loss"], losses)
    close(after.params.online, recorded_networks(record, "", 1), 1e-4)
    close(after.params.target.critic, recorded_critic(record, "target_critic1"), 1e-5)
