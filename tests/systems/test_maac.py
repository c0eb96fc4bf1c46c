"""MAAC: one update against recorded numbers, the buffer, devices and replicas, learning."""

import itertools
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hydra import compose, initialize_config_module
from jax.flatten_util import ravel_pytree

import tests.environments
from mava import config as configuration
from mava import experiment
from mava.config import UserError
from mava.networks import AttentionCritic, StackedMLP
from mava.networks.distributions import Categorical
from mava.types import Discrete, array_spec
from mava.wrappers.vector import VectorEnv
from tests.environments import Probe, RandomEnds
from tests.running import SYSTEMS, build, over_axes, streams, system_module, trained

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

    heads = {
        layer: np.concatenate(stack(layer), axis=1)[None] for layer in ("query", "key", "value")
    }
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


def small_networks(policies):
    return {
        "policies": policies,
        "actor_network": {"policy": StackedMLP(layer_sizes=(16, 16))},
        "critic_network": {"attention": AttentionCritic(hidden_dim=16, num_heads=4)},
    }


def make_algo(probe, batch_size, policies="per_agent", env=None, **options):
    config = MAAC.Config(**{"batch_size": batch_size, "buffer_size": 1024, **options})
    env = env or VectorEnv(probe, 4)
    return MAAC.make_system(env, small_networks(policies), config).update.args[0]


def streams_of(algo, num_devices, num_replicas):
    keys = jax.random.split(jax.random.key(1), (num_devices, num_replicas))
    return jax.jit(jax.vmap(jax.vmap(partial(MAAC.reset, algo))))(keys)


def trajectory_like(algo, num_devices, num_replicas):
    """Returns a trajectory of zeros for each stream."""
    state = jax.eval_shape(partial(MAAC.init, algo), jax.random.key(0))
    stream = jax.eval_shape(partial(MAAC.reset, algo), jax.random.key(0))
    key = jax.random.key(0)
    shapes = jax.eval_shape(partial(MAAC.rollout, algo), state.params, stream, key)[1]
    axes = (num_devices, num_replicas)
    return jax.tree.map(lambda x: jnp.zeros((*axes, *x.shape), x.dtype), shapes)


def recorded_actions(monkeypatch, record):
    """The policies' draws become the recorded ones, first the targets'."""
    names = iter(["next_act_sampled", "policy_act_sampled"] * 10)

    def sample(self, key):
        name = next(names)
        return jnp.argmax(jnp.stack([record[f"{name}/{i}"] for i in range(4)], axis=1), axis=-1)

    monkeypatch.setattr(Categorical, "sample", sample)


def on_axes(sample, num_devices=1, num_replicas=1):
    """Returns a sample cut up over devices and replicas, and keys."""
    cut = jax.tree.map(lambda x: x.reshape(num_devices, num_replicas, -1, *x.shape[1:]), sample)
    return cut, jax.random.split(jax.random.key(0), (num_devices, num_replicas))


def run_step(algo, state, sample, num_devices=1, num_replicas=1):
    """One gradient step on a sample cut up over devices and replicas; outputs are (D, U, ...)."""
    step = over_axes(partial(MAAC.gradient_step, algo), num_devices, num_replicas)
    return step(state, on_axes(sample, num_devices, num_replicas))


def recorded_state(algo, record):
    state = algo_init(algo)
    params = state.params._replace(
        online=recorded_networks(record, "", 0), target=recorded_networks(record, "target_", 0)
    )
    assert jax.tree.structure(params) == jax.tree.structure(state.params)
    shapes = partial(jax.tree.map, lambda x: x.shape)
    assert shapes(params) == shapes(state.params)
    return state.replace(params=jax.tree.map(jnp.asarray, params))


def algo_init(algo):
    return jax.jit(partial(MAAC.init, algo))(jax.random.key(0))


def close(actual, expected, atol):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=atol), actual, expected)


@pytest.mark.parametrize("num_chunks", [1, 4])
def test_one_update_is_the_recorded_one(num_chunks, monkeypatch):
    """Targets, losses, gradient norm before clipping, and every parameter after the step."""
    record = np.load(RECORD)
    algo = make_algo(Uneven(), 32, num_chunks=num_chunks)
    recorded_actions(monkeypatch, record)
    y = {}

    def step(state, xs):
        original = MAAC.targets
        with monkeypatch.context() as patch:
            patch.setattr(MAAC, "targets", lambda *args: y.setdefault("y", original(*args)))
            return *MAAC.gradient_step(algo, state, xs), y.pop("y")

    after, metrics, target = jax.tree.map(
        lambda x: x[0, 0],
        over_axes(step)(recorded_state(algo, record), on_axes(recorded_sample(record))),
    )
    np.testing.assert_allclose(target, record["y"], atol=1e-4)
    np.testing.assert_allclose(metrics["critic_grad_norm"], record["q_grad_norm"], rtol=1e-4)
    np.testing.assert_allclose(metrics["critic_loss"], record["q_loss"], rtol=1e-4)
    losses = [record[f"pol_loss/{i}"] for i in range(4)]
    np.testing.assert_allclose(metrics["actor_loss"], np.mean(losses), atol=1e-4)
    close(after.params.online, recorded_networks(record, "", 1), 1e-4)
    close(after.params.target.critic, recorded_critic(record, "target_critic1"), 1e-6)
    target_actor = jax.tree.map(
        lambda old, new: 0.999 * old + 0.001 * new,
        recorded_policies(record, "target_policy0"),
        recorded_policies(record, "policy1"),
    )
    close(after.params.target.actor, target_actor, 1e-6)


def test_running_statistics_move_by_a_tenth(monkeypatch):
    """Towards mean and unbiased variance of the batch; all else uses the batch's own."""
    record = np.load(RECORD)
    algo = make_algo(Uneven(), 32)
    state, sample = recorded_state(algo, record), recorded_sample(record)
    after = jax.tree.map(lambda x: x[0, 0], run_step(algo, state, sample)[0])
    views = np.array(sample.view)
    close(after.params.statistics.mean, 0.1 * views.mean(axis=0), 1e-6)
    variance = 0.9 + 0.1 * views.var(axis=0, ddof=1)
    np.testing.assert_allclose(after.params.statistics.variance, variance, rtol=1e-5)
    assert (np.abs(views[:, 2:, 6:]) == 0).all()  # padding
    shifted = state.params._replace(
        statistics=MAAC.Statistics(*(x + 3.0 for x in after.params.statistics))
    )
    again = jax.tree.map(
        lambda x: x[0, 0], run_step(algo, state.replace(params=shifted), sample)[0]
    )
    close(again.params.online, after.params.online, 0)


@pytest.mark.parametrize(("num_devices", "num_replicas"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("policies", ["per_agent", "shared"])
def test_split_over_devices_or_replicas_it_is_the_same(
    num_devices, num_replicas, policies, monkeypatch
):
    """Some agents out of the game, more of them in one half. Three steps: Adam forgets its first,
    in which the sign of a gradient is all that counts.
    """
    record = np.load(RECORD)
    algo = make_algo(Uneven(), 32, policies)
    monkeypatch.setattr(Categorical, "sample", lambda self, key: self.mode())
    sample = recorded_sample(record)
    in_game = jnp.arange(32)[:, None] % jnp.array([32, 3, 2, 5]) < jnp.array([5, 2, 1, 4])
    sample = sample.replace(agent_mask=in_game, reward=sample.reward + jnp.arange(32.0)[:, None])
    ends = []
    for axes in ((1, 1), (num_devices, num_replicas)):
        state = algo_init(algo)
        for _ in range(3):
            result, metrics = run_step(algo, state, sample, *axes)
            jax.tree.map(lambda x: np.testing.assert_array_equal(x[0, 0], x[-1, -1]), result)
            state = jax.tree.map(lambda x: x[0, 0], result)
        ends.append((state.params, metrics["critic_grad_norm"][0, 0]))
    close(*ends, 1e-5)


def test_each_policy_is_clipped_alone_and_the_critic_as_a_whole():
    """Seen in Adam's first moment, a tenth of the gradient: a first step shows its signs alone."""
    record = np.load(RECORD)
    options = {"actor_max_grad_norm": 1e-4, "critic_max_grad_norm": 1e-3, "critic_weight_decay": 0}
    algo = make_algo(Uneven(), 32, **options)
    state = recorded_state(algo, record)
    after, _ = run_step(algo, state, recorded_sample(record))
    moments = {}
    for name in ("actor", "critic"):
        (moment,) = optax.tree.get_all_with_path(getattr(after.optim_states, name), "mu")
        unravel = ravel_pytree(getattr(state.params.online, name))[1]
        moments[name] = unravel(10 * moment[1][0, 0])
    norms = jax.vmap(optax.tree.norm)(moments["actor"])
    np.testing.assert_allclose(norms, np.full(4, 1e-4), rtol=0.02)
    np.testing.assert_allclose(optax.tree.norm(moments["critic"]), 4e-3, rtol=1e-3)


def test_lagged_policies_learn_from_the_critic_of_one_step_before(monkeypatch):
    """Two steps by hand: the critic moves as ever, the policies follow it one step behind."""
    record = np.load(RECORD)
    monkeypatch.setattr(Categorical, "sample", lambda self, key: self.mode())
    sample = recorded_sample(record)
    plain, lagged = (make_algo(Uneven(), 32, lagged_critic=lagged) for lagged in (False, True))

    def two_steps(algo, state, xs):
        first, _ = MAAC.gradient_step(algo, state, xs)
        return first, MAAC.gradient_step(algo, first, xs)[0]

    def by_hand(state, xs):
        """Two critic steps of their own; the policies see the critic as it was before each."""
        sample, key = xs
        states = [state]
        for _ in range(2):
            state = states[-1]
            frozen = state.params.online.critic
            after, _ = MAAC.gradient_step(plain, state, xs)  # the critic's step and the targets'
            views = MAAC.normalise(sample.view, MAAC.statistics(sample.view, 4))
            actor, optim_state, _ = MAAC.learn_actor(
                plain, state, frozen, sample, MAAC.Networks(actor=views, critic=views), key
            )
            online = after.params.online._replace(actor=actor)
            target = after.params.target._replace(
                actor=jax.tree.map(
                    lambda x, y: 0.999 * x + 0.001 * y, state.params.target.actor, actor
                )
            )
            params = after.params._replace(online=online, target=target)
            optim_states = after.optim_states._replace(actor=optim_state)
            states.append(after.replace(params=params, optim_states=optim_states))
        return tuple(states[1:])

    state, xs = recorded_state(plain, record), on_axes(sample)
    first = lambda tree: jax.tree.map(lambda x: x[0, 0], tree)  # noqa: E731
    results = first(over_axes(partial(two_steps, lagged))(state, xs))
    expected = first(over_axes(by_hand)(state, xs))
    others = first(over_axes(partial(two_steps, plain))(state, xs))
    for result, hand in zip(results, expected, strict=True):
        close(result.params, hand.params, 1e-6)
    close(results[0].params.online.critic, others[0].params.online.critic, 1e-6)
    moved = jax.tree.map(
        lambda x, y: np.abs(x - y).max(), *(x[0].params.online.actor for x in (results, others))
    )
    assert max(jax.tree.leaves(moved)) > 1e-4


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_rewards_are_standardised_over_the_whole_buffer(offset):
    """On two devices with two replicas, before and after the buffers are full; equal ones are 0."""
    algo = make_algo(Probe(), 32, buffer_size=4 * 3 * 32)
    algo.env.num_streams = 4  # 3 rollouts of 32 on each
    algo = make_algo(Probe(), 32, env=algo.env, buffer_size=4 * 3 * 32)
    actor_state = streams_of(algo, 2, 2)
    replay = actor_state.buffer
    trajectory = trajectory_like(algo, 2, 2)
    add = jax.jit(jax.vmap(jax.vmap(partial(MAAC.store, algo))))
    draw = over_axes(lambda _, xs: MAAC.reward_statistics(xs), 2, 2)
    rewards = []
    for i in range(7):
        reward = offset + jax.random.normal(jax.random.key(i), (2, 2, 8, 4, 2)) * jnp.array([1, 9])
        reward += i
        rewards.append(np.array(reward, np.float64).reshape(2, 2, 32, 2))
        replay = add(replay, trajectory.replace(reward=reward))
        kept = np.concatenate(rewards[-3:], axis=2)
        held = np.array(replay.samples.experience.reward)[:, :, 0]
        np.testing.assert_allclose(
            np.sort(held[:, :, : kept.shape[2], 0]), np.sort(kept[..., 0]), rtol=1e-6
        )
        mean, variance = draw(0.0, replay)
        np.testing.assert_allclose(
            mean[0, 0], kept.mean(axis=(0, 1, 2)), atol=1e-4 * (1 + offset / 10)
        )
        np.testing.assert_allclose(np.sqrt(variance[1, 1]), kept.std(axis=(0, 1, 2)), rtol=1e-4)
    samples = over_axes(lambda _, xs: MAAC.draw(algo, *xs), 2, 2)(
        0.0, (replay, jax.random.split(jax.random.key(0), (2, 2)))
    )
    mean, std = kept.mean(axis=(0, 1, 2)), kept.std(axis=(0, 1, 2))
    drawn = np.array(samples.reward) * std + mean
    assert samples.reward.shape == (2, 2, 4, 8, 2)
    for device, replica in np.ndindex(2, 2):
        distance = np.abs(
            drawn[device, replica, ..., 0].reshape(-1, 1) - kept[device, replica, :, 0]
        )
        assert distance.min(axis=1).max() < 1e-3 * (1 + offset / 100)
    constant = add(replay, trajectory.replace(reward=jnp.full((2, 2, 8, 4, 2), 0.1)))
    for _ in range(2):
        constant = add(constant, trajectory.replace(reward=jnp.full((2, 2, 8, 4, 2), 0.1)))
    samples = over_axes(lambda _, xs: MAAC.draw(algo, *xs), 2, 2)(
        0.0, (constant, jax.random.split(jax.random.key(0), (2, 2)))
    )
    assert jnp.abs(samples.reward).max() < 0.1


def test_the_buffer_holds_the_true_successors():
    """Where an episode is cut, that is not the first view of the next; only real ends stop."""
    for probe, next_cue, discount in (("Cut", 1.0, 1.0), ("Ended", 1.0, 0.0)):
        _, system, _ = build("ff_maac", probe=probe)
        algo = system.update.args[0]
        learner_state = algo_init(algo)
        actor_state = jax.jit(system.reset)(jax.random.key(1))
        _, trajectory = jax.jit(partial(MAAC.rollout, algo))(
            learner_state.params, actor_state, jax.random.key(2)
        )
        replay = jax.jit(partial(MAAC.store, algo))(actor_state.buffer, trajectory)
        rows = jax.tree.map(lambda x: np.array(x[0, :32]), replay.samples.experience)
        last = np.array(trajectory.last).reshape(-1)
        assert last.sum() == 8  # 4 environments, episodes of 4 steps
        assert (rows.next_view[last] == next_cue).all(), probe
        assert (rows.discount[last] == discount).all(), probe
        assert (rows.discount[~last] == 1).all()
        np.testing.assert_array_equal(rows.reward, np.array(trajectory.reward).reshape(32, 2))


def test_learning_begins_with_a_full_batch_and_may_wait_for_its_own_rollout():
    """With batches of two rollouts: in the second update, or in the third, from the first two."""
    states = {}
    for overlap in (False, True):
        options = (
            "arch.num_devices=1",
            "system.batch_size=64",
            f"system.overlap_collection={overlap}",
        )
        _, system, _ = build("ff_maac", *options, probe="RightAction")
        update = over_axes(system.update)
        learner_state, actor_state = (
            algo_init(system.update.args[0]),
            streams(system, jax.random.key(1)),
        )
        states[overlap] = [(learner_state, actor_state)]
        counts = []
        for _ in range(3):
            learner_state, actor_state, metrics, _ = update(learner_state, actor_state)
            learner_state = jax.tree.map(lambda x: x[0, 0], learner_state)
            states[overlap].append((learner_state, actor_state))
            counts.append(float(metrics.learn["critic_loss"][1][0, 0]))
            taught = [float(x[0, 0]) for x in metrics.learn["agent_updates_per_second"]]
            assert taught == ([4.0, 1.0] if counts[-1] else [0.0, 0.0])  # 2 agents, 2 steps
        assert counts == ([0, 0, 2] if overlap else [0, 2, 2])
        biases = [
            state.params.online.actor["params"]["StackedDense_0"]["bias"]
            for state, _ in states[overlap]
        ]
        changed = [not np.array_equal(x, y) for x, y in itertools.pairwise(biases)]
        assert changed == [False, overlap is False, True]
    # The third update of the one that waits learns from the buffer as it was after the second.
    algo = system.update.args[0]
    (before, stream), (after, _) = states[True][2:]
    _, _, draw_key, learn_key = jax.random.split(stream.key[0, 0], 4)

    def by_hand(state, xs):
        replay, draw_key, learn_key = xs
        return MAAC.learn(algo, state, MAAC.draw(algo, replay, draw_key), learn_key)[0]

    xs = jax.tree.map(lambda x: x[None, None], (draw_key, learn_key))
    expected = jax.tree.map(lambda x: x[0, 0], over_axes(by_hand)(before, (stream.buffer, *xs)))
    close(after.params, expected.params, 1e-6)


class Masked(Probe):
    """The second action is illegal for the first agent; the second agent is out of the game."""

    num_agents = 3

    def _observe(self, state):
        mask = jnp.ones((3, 2), bool).at[0, 1].set(False)
        return (
            super()
            ._observe(state)
            .replace(action_mask=mask, agent_mask=jnp.array([True, False, True]))
        )


def test_illegal_actions_and_agents_out_of_the_game_move_no_policy():
    algo = make_algo(Masked(), 32)
    state = algo_init(algo)
    actor = jax.tree.map(lambda x: x, state.params.online.actor)
    head = actor["params"]["StackedDense_2"]
    head["bias"] = head["bias"].at[0, 1].set(50.0)  # an illegal logit; as large as they come
    observation = jax.vmap(Masked().reset)(jax.random.split(jax.random.key(0), 32))[1].observation
    sample = MAAC.Sample(
        view=observation.agents_view, next_view=observation.agents_view,
        action=jnp.zeros((32, 3), jnp.int32), action_mask=observation.action_mask,
        next_action_mask=observation.action_mask, agent_mask=observation.agent_mask,
        reward=jnp.ones((32, 3)), discount=jnp.ones((32, 3)),
    )  # fmt: skip
    views = MAAC.Networks(actor=sample.view, critic=sample.view)

    def loss(state, xs):
        sample, key = xs
        return jax.grad(MAAC.actor_loss, has_aux=True)(
            actor, algo, state.params.online.critic, sample, views, key
        )

    grads, metrics = jax.tree.map(lambda x: x[0, 0], over_axes(loss)(state, on_axes(sample)))
    grads = jax.tree.map(np.array, grads["params"])
    assert np.abs(grads["StackedDense_2"]["bias"][0]).tolist() == [pytest.approx(0, abs=1e-2), 0.0]
    assert not any(np.abs(x[1]).any() for layer in grads.values() for x in layer.values())
    assert np.abs(grads["StackedDense_2"]["kernel"][2]).max() > 0
    assert abs(metrics["actor_loss"]) < 1.0
    policy, _ = MAAC.policies(algo, actor, sample.view, sample.action_mask)
    assert (policy.sample(jax.random.key(1))[:, 0] == 0).all()


FAST = (
    "arch.num_envs=16", "system.actor_lr=0.01", "system.critic_lr=0.01", "system.tau=0.05",
    "system.batch_size=128", "system.num_gradient_steps=4", "system.gamma=0.5",
    "system.buffer_size=4096", "system.rollout_length=4", "arch.num_devices=1",
)  # fmt: skip


@pytest.mark.parametrize(
    ("probe", "options"),
    [
        ("RightAction", ()),
        ("RightJointAction", ()),
        ("RightAction", ("system.lagged_critic=true", "system.overlap_collection=true")),
        ("RightAction", ("network.policies=shared",)),
    ],
)
def test_learns_to_act(probe, options):
    algo, state = trained("ff_maac", 150, *FAST, *options, probe=probe)
    for cues in ([1, 1], [1, -1], [-1, 1], [-1, -1]):
        views = MAAC.normalise(jnp.array(cues, jnp.float32)[None, :, None], state.params.statistics)
        mask = jnp.ones((1, 2, 2), bool)
        policy, _ = MAAC.policies(algo, state.params.online.actor, views, mask)
        right = policy.log_prob((jnp.array(cues)[None] > 0).astype(jnp.int32))
        assert (np.exp(right) > 0.9).all(), (cues, np.exp(right))


class PaysUntilItEnds(RandomEnds):
    """1 a step. One in 0.15 ends the episode, as many only cut it: V = 1 / (1 - 0.85 gamma). What
    comes next looks like what was before, so that both are standardised alike.
    """

    def reward(self, state, action):
        return jnp.ones(2)


def test_learns_values(monkeypatch):
    """With rewards as they are, and hardly a bonus for entropy. Without a bootstrap from what was
    cut they would be 1.54, with one from what ended 2.
    """
    as_it_is = lambda replay: MAAC.Statistics(jnp.zeros(2), jnp.ones(2))  # noqa: E731
    monkeypatch.setattr(MAAC, "reward_statistics", as_it_is)
    monkeypatch.setattr(tests.environments, "PaysUntilItEnds", PaysUntilItEnds, raising=False)
    options = ("system.reward_scale=1e6", "system.critic_lr=0.003")
    algo, state = trained("ff_maac", 250, *FAST, *options, probe="PaysUntilItEnds")
    views = jnp.linspace(-1.5, 1.5, 8)[:, None, None] * jnp.ones((8, 2, 1))
    actions = jnp.broadcast_to(jnp.array([1.0, -1.0]), (8, 2, 2))  # standardised one-hots
    values, _ = algo.critic.apply(state.params.online.critic, views, actions)
    np.testing.assert_allclose(values.mean(), 1 / (1 - 0.5 * 0.85), atol=0.08)


def test_every_key_is_used_once(monkeypatch):
    """Over time, devices and replicas; by a reset, an action, a draw from the buffer or a split."""
    used = []

    def record(key):
        jax.debug.callback(
            lambda data: used.append(tuple(int(x) for x in data)), jax.random.key_data(key)
        )

    def recorded_split(key, *args):
        if sys._getframe(1).f_globals["__name__"].startswith(("ff_maac", "flashbax")):
            record(key)
        return split(key, *args)

    sample, split = Categorical.sample, jax.random.split
    monkeypatch.setattr(jax.random, "split", recorded_split)
    monkeypatch.setattr(
        Categorical, "sample", lambda self, key: (record(key), sample(self, key))[1]
    )
    _, system, _ = build("ff_maac", "system.num_gradient_steps=1", "system.update_batch_size=2",
                         "arch.num_devices=2", probe="KeyProbe")  # fmt: skip
    update = over_axes(system.update, 2, 2)
    learner_state = system.init(jax.random.key(0))
    actor_state = streams(system, jax.random.key(1), 2, 2)
    for _ in range(2):
        learner_state, actor_state, metrics, _ = update(learner_state, actor_state)
        learner_state = jax.tree.map(lambda x: x[0, 0], learner_state)
        assert metrics.learn["critic_loss"][1][0, 0] > 0
    jax.effects_barrier()
    # In an update: actions (T,), two samples to learn, splits of the update, the rollout, the
    # draws, two in one, the steps and the one. A split for each stream's reset and to initialise.
    assert len(used) == 8 * (8 + 2 + 7) + 4 + 1
    assert len(set(used)) == len(used)


@pytest.mark.parametrize(
    ("probe", "overrides", "message"),
    [
        ("RightPlace", (), "one discrete action"),
        ("RightAction", ("system.batch_size=33", "arch.num_devices=2"), "batch_size=33 must be"),
        ("RightAction", ("system.buffer_size=31",), "buffer_size=31 must hold"),
        ("RightAction", ("system.batch_size=512",), "buffer_size=256 must hold"),
        ("RightAction", ("network.policies=both",), "policies=both must be per_agent or shared"),
        ("RightAction", ("network.critic_network.attention.num_heads=3",), "num_heads=3 must"),
        ("RightAction", ("system.tau=0",), "tau=0.* must be above 0"),
    ],
)
def test_refuses_what_does_not_fit(probe, overrides, message):
    with pytest.raises(UserError, match=message):
        build("ff_maac", *overrides, probe=probe)


def test_defaults_are_the_authors():
    """12 environments in all, 96 transitions and 4 steps an update; batch and buffer are totals."""
    configuration.register(MAAC.Config, "ff_maac", "maac", "anakin_12")
    with initialize_config_module("mava.configs", version_base=None):
        run = configuration.parse(compose("mava", ["env=rover_tower"]), SYSTEMS / "ff_maac.py")
    env, system, plan = experiment.build(MAAC, run)
    assert (plan.num_envs, len(plan.devices), plan.num_replicas) == (12, 1, 1)
    assert system.steps_per_update == 96
    algo = system.update.args[0]
    shapes = jax.eval_shape(system.reset, jax.random.key(0)).buffer.samples.experience
    assert shapes.view.shape == (1, 10_416 * 96, 8, 13)
    assert algo.config.batch_size == 1024
    assert isinstance(env, VectorEnv)
