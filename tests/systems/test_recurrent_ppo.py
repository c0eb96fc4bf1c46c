"""Recurrent PPO systems: memory and episode ends in line everywhere, and learning that needs it.

What is right is worked out episode by episode and step by step: a fresh state where the trajectory
says that the step before was the last, one application of the network at a time.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mava.evaluator import in_order, make_evaluate
from mava.networks import RecurrentTorso
from mava.networks.distributions import Categorical
from mava.ops.gae import gae
from tests.running import build, mean_return, over_axes, streams, system_module, trained

RECURRENT = ["rec_ippo", "rec_mappo"]
T, E = 8, 32
ENDS = (f"arch.num_envs={E}", f"system.rollout_length={T}", "system.num_minibatches=1")


def opinionated(learner_state):
    """Returns the state with an actor whose policy is far from uniform, as a fresh one's is."""
    actor = learner_state.params.actor
    head = jax.tree.map(lambda x: 100.0 * x, actor["params"]["head"])
    actor = {"params": {**actor["params"], "head": head}}
    return learner_state.replace(params=learner_state.params._replace(actor=actor))


class Played:
    """Two rollouts in a row with untrained networks, and the true memories along the second."""

    def __init__(self, name, *overrides):
        _, system, _ = build(name, *ENDS, *overrides, probe="RandomEnds")
        self.module, self.algo = system_module(name), system.update.args[0]
        self.params = opinionated(jax.jit(system.init)(jax.random.key(0))).params
        run = jax.jit(self._play, static_argnums=0)
        self.first, self.second = run(system, jax.random.key(1))

    def _play(self, system, key):
        actor_state, rollouts = system.reset(key), []
        for _ in range(2):
            memory = actor_state.memory
            actor_state, starts, trajectory = self.module.rollout(
                self.algo, self.params, actor_state
            )
            critic_memory, critic_starts, sample = self.mapped_samples(memory.critic, trajectory)
            memories = self.module.Memory(actor=starts, critic=critic_starts)
            rollouts.append((memory, trajectory, memories, sample))
            actor_state = actor_state.replace(
                memory=actor_state.memory._replace(critic=critic_memory)
            )
        return rollouts

    def mapped_samples(self, memory, trajectory):
        make = partial(self.module.make_samples, self.algo, self.params)
        states = jax.tree.map(lambda x: x[None, None], (memory, trajectory))
        samples = jax.vmap(jax.vmap(make, axis_name="replica"), axis_name="device")(*states)
        return jax.tree.map(lambda x: x[0, 0], samples)

    def step_by_step(self):
        """Returns log-probabilities, values and successors' values along the second rollout."""
        policy_of = jax.jit(partial(self.module.step_policy, self.algo, self.params.actor))
        one = lambda m, o: self.module.values(  # noqa: E731
            self.algo, self.params.critic, m, jax.tree.map(lambda x: x[None], o)
        )
        value_of = jax.jit(lambda m, o: jax.tree.map(lambda x: x[0], one(m, o)))
        fresh = self.module.init_memory(self.algo, E)
        memory, log_probs, values, next_values = fresh, [], [], []
        for _, trajectory, _, _ in (self.first, self.second):
            log_probs, values, next_values = [], [], []
            for t in range(T):
                row = jax.tree.map(lambda x, t=t: x[t], trajectory)
                actor_memory, policy = policy_of(memory.actor, row.observation)
                critic_memory, value = value_of(memory.critic, row.observation)
                log_probs.append(policy.log_probs)
                values.append(value)
                next_values.append(value_of(critic_memory, row.next_observation)[1])
                after = self.module.Memory(actor=actor_memory, critic=critic_memory)
                memory = jax.tree.map(
                    lambda new, old, last=row.last: jnp.where(
                        last.reshape(-1, *(1,) * (new.ndim - 1)), new, old
                    ),
                    fresh,
                    after,
                )
        return jnp.stack(log_probs), jnp.stack(values), jnp.stack(next_values)


@pytest.fixture(
    scope="module",
    params=[
        ("rec_ippo", "null"),
        ("rec_ippo", "4"),
        ("rec_mappo", "null"),
        ("rec_mappo", "1"),
        ("rec_mappo", "lstm"),
    ],
    ids="-".join,
)
def played(request):
    name, chunk = request.param
    if chunk == "lstm":
        cell = "network.{}.cell._target_=flax.linen.OptimizedLSTMCell"
        return Played(name, *(cell.format(n) for n in ("actor_network", "critic_network")))
    return Played(name, f"system.recurrent_chunk_size={chunk}")


def test_replay_is_what_was_played(played):
    """With ends at every position of the rollout; also the ratios of PPO's first minibatch."""
    memory, trajectory, memories, sample = played.second
    assert (np.array(trajectory.last).any(axis=1)).all()
    truncated = np.array(trajectory.last & (trajectory.discount[..., 0] > 0))
    assert truncated.any(axis=1).all()
    assert (~truncated & trajectory.last).any(axis=1).all()
    assert not np.array(trajectory.last[-1]).all()  # some begin in the middle of an episode
    assert all(np.abs(x).max() > 0.01 for x in jax.tree.leaves(memory))

    log_probs, values, _ = played.step_by_step()
    action_log_probs = jnp.take_along_axis(log_probs, trajectory.action[..., None], -1)[..., 0]
    np.testing.assert_allclose(trajectory.log_prob, action_log_probs, atol=1e-5)
    np.testing.assert_allclose(sample.value, values, atol=1e-5)

    module, algo = played.module, played.algo
    num_chunks = algo.config.num_chunks
    starts = module.flatten(memories)
    assert all(x.shape[0] == num_chunks * E for x in jax.tree.leaves(starts))
    replayed = module.to_sequences(sample, num_chunks)
    _, policy = algo.actor.apply(played.params.actor, starts.actor, replayed.observation)
    expected = module.to_sequences(log_probs, num_chunks)
    np.testing.assert_allclose(policy.log_probs, expected, atol=1e-5)
    _, value = module.values(algo, played.params.critic, starts.critic, replayed.observation)
    np.testing.assert_allclose(value, module.to_sequences(values, num_chunks), atol=1e-5)
    _, metrics = module.actor_loss(
        played.params.actor, algo, starts.actor, replayed, jax.random.key(0)
    )
    ratio = jnp.exp(policy.log_prob(replayed.action) - replayed.log_prob)
    np.testing.assert_allclose(ratio, 1.0, atol=1e-5)
    np.testing.assert_allclose(metrics["approx_kl"], 0.0, atol=1e-6)


def test_values_of_true_successors(played):
    """Also where an episode was cut within the rollout, and at its end."""
    _, trajectory, _, sample = played.second
    _, values, next_values = played.step_by_step()
    config = played.algo.config
    _, target = gae(
        trajectory.reward, trajectory.discount, trajectory.last, values, next_values,
        config.gamma, config.gae_lambda,
    )  # fmt: skip
    np.testing.assert_allclose(sample.target, target, atol=1e-5)


@pytest.mark.parametrize("name", RECURRENT)
def test_updates_hand_the_memories_on(name):
    """To the minibatches: without learning, the ratios of all are 1. And to the next update."""
    _, system, _ = build(
        name, "arch.num_envs=8", "system.num_minibatches=4", "system.recurrent_chunk_size=2",
        "system.actor_lr=1e-30", "system.critic_lr=1e-30", probe="RandomEnds",
    )  # fmt: skip
    update = over_axes(system.update)
    learner_state = opinionated(jax.jit(system.init)(jax.random.key(0)))
    actor_state = streams(system, jax.random.key(1))
    module, algo = system_module(name), system.update.args[0]
    for _ in range(2):  # the second begins in the middle of episodes
        first = jax.tree.map(lambda x: x[0, 0], actor_state)
        _, actor_state, metrics, _ = update(learner_state, actor_state)
        total, count = metrics.learn["approx_kl"]
        assert abs(total[0, 0] / count[0, 0]) < 1e-8
        assert metrics.learn["clip_fraction"][0][0, 0] == 0
        played, _, trajectory = module.rollout(algo, learner_state.params, first)
        critic, observation = learner_state.params.critic, trajectory.observation
        memories, _ = module.values(algo, critic, first.memory.critic, observation)
        expected = module.Memory(actor=played.memory.actor, critic=memories[-1])
        memory = jax.tree.map(lambda x: x[0, 0], actor_state.memory)
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), memory, expected)


class CountingCell(nn.RNNCellBase):
    """Its state is the number of steps since it was zero; it puts out that before the step."""

    features: int

    @nn.compact
    def __call__(self, carry: Any, inputs: jax.Array) -> tuple[Any, jax.Array]:
        return carry + 1, carry

    @nn.nowrap
    def initialize_carry(self, rng: Any, input_shape: tuple[int, ...]) -> jax.Array:
        return jnp.full((*input_shape[:-1], self.features), 7.0)  # only its shape counts

    @property
    def num_feature_axes(self) -> int:
        return 1


class Same(nn.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        return x


class TakeCount(nn.Module):
    """Takes the action whose number is the count."""

    def __call__(self, x: jax.Array, mask: jax.Array) -> Categorical:
        return Categorical.masked(100.0 * jax.nn.one_hot(x[..., 0].astype(jnp.int32), 6), mask)


def counting(system):
    """Replaces the actor: the action taken is the number of steps that the memory has seen."""
    algo = system.update.args[0]
    torso = RecurrentTorso(pre_torso=Same(), cell=CountingCell(features=2), post_torso=Same())
    network = algo.actor.network.clone(torso=torso, head=TakeCount())
    return algo._replace(actor=algo.actor._replace(network=network))


@pytest.mark.parametrize("name", RECURRENT)
def test_memory_is_zero_at_the_first_step_of_an_episode_alone(name):
    """In rollouts, the replay and the evaluator, the memory knows how long an episode has run."""
    env, system, _ = build(name, *ENDS, probe="StateOfMemory")
    module, algo = system_module(name), counting(system)
    params = module.Params(actor={}, critic=jax.jit(system.init)(jax.random.key(0)).params.critic)
    actor_state = module.reset(algo, jax.random.key(1))
    for _ in range(2):
        memory = actor_state.memory
        actor_state, _, trajectory = module.rollout(algo, params, actor_state)
        np.testing.assert_array_equal(trajectory.reward, 1.0)
        steps = trajectory.observation.step_count
        assert len(np.unique(steps)) == 5
        memories, _ = algo.actor.apply({}, memory.actor, trajectory.observation)
        np.testing.assert_array_equal(memories[..., 0, 0], steps + 1)

    counting_system = system._replace(
        act=partial(module.act, algo),
        init_memory=lambda num_envs: module.init_memory(algo, num_envs).actor,
    )
    evaluate = make_evaluate(env.env, counting_system, 8, 1, 64, greedy=False)
    results = jax.jit(evaluate)({}, jax.random.key(2), jnp.int32(64), jnp.int32(0))
    results = in_order({k: v[None] for k, v in results.items()}, 64)
    assert len(np.unique(results["episode_length"])) == 5
    np.testing.assert_array_equal(results["episode_return"], results["episode_length"])


@pytest.mark.parametrize("name", RECURRENT)
def test_chunks_learn_the_same_where_no_gradient_crosses(name):
    """Episodes of 4 steps that begin where chunks of 4 do."""
    params = []
    for chunk in ("null", "4"):
        _, system, _ = build(
            name, "system.num_minibatches=1", f"system.recurrent_chunk_size={chunk}", probe="Cut"
        )
        learner_state = jax.jit(system.init)(jax.random.key(0))
        update = over_axes(system.update)
        params.append(update(learner_state, streams(system, jax.random.key(1)))[0].params)
    before = learner_state.params
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), *params)
    change = jax.tree.map(lambda x, y: np.abs(x - y).max(), before, params[0])
    assert max(jax.tree.leaves(change)) > 1e-3


@pytest.mark.parametrize("name", RECURRENT)
def test_parameters_do_not_know_the_batch(name):
    def shapes(*overrides):
        _, system, _ = build(name, *overrides)
        learner_state = jax.eval_shape(system.init, jax.random.key(0))
        return jax.tree.map(lambda x: x.shape, learner_state)

    assert shapes() == shapes("arch.num_envs=16", "system.rollout_length=32")


FAST = ("arch.num_envs=32", "system.actor_lr=0.01", "system.critic_lr=0.01", "system.gamma=0.9")


def recall(name, probe):
    return mean_return(name, 100, *FAST, probe=probe)


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("probe", ["Recall", "JointRecall"])
def test_learns_what_needs_memory(name, probe):
    assert recall(name, probe) > 0.95


@pytest.mark.parametrize("name", ["ff_ippo", "ff_mappo"])
@pytest.mark.parametrize(("probe", "chance"), [("Recall", 0.5), ("JointRecall", 0.25)])
def test_without_memory_it_is_not_learnt(name, probe, chance):
    assert recall(name, probe) < chance + 0.2


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize(
    ("probe", "expected"),
    [
        ("LeftEarly", {0: 0.25, 1: 0.5, 2: 1.0}),  # the second agent leaves, its value counts
        ("Cut", {0: -2.0, 1: 2.0, 2: 2.0, 3: 2.0}),
    ],
)
def test_learns_values(name, probe, expected):
    """Of every step of an episode; gamma is 0.5."""
    overrides = ("system.clip_eps=10", "system.max_grad_norm=10", "system.gamma=0.5")
    algo, learner_state = trained(name, 120, *FAST, *overrides, probe=probe)
    module = system_module(name)
    actor_state = module.reset(algo, jax.random.key(3))
    memory = actor_state.memory.critic
    _, _, trajectory = module.rollout(algo, learner_state.params, actor_state)
    _, value = module.values(algo, learner_state.params.critic, memory, trajectory.observation)
    steps = np.array(trajectory.observation.step_count)
    expected = np.vectorize(expected.get)(steps)[..., None] * np.ones(2)
    np.testing.assert_allclose(value, expected, atol=0.15)
