"""Both PPO systems: contract, randomness, and learning on environments whose values are known."""

import difflib
import inspect
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mava.networks.distributions import Categorical
from tests.running import (
    SYSTEMS,
    build,
    mean_return,
    over_axes,
    streams,
    system_module,
    trained,
)

PPO = ["ff_ippo", "ff_mappo", "rec_ippo", "rec_mappo"]
FEED_FORWARD, RECURRENT = PPO[:2], PPO[2:]


@pytest.mark.parametrize("name", PPO)
def test_update_keeps_shapes_and_types(name):
    _, system, _ = build(name)
    update = over_axes(system.update)
    learner_state = jax.eval_shape(system.init, jax.random.key(0))
    actor_state = jax.eval_shape(partial(streams, system), jax.random.key(0))
    new_learner_state, new_actor_state, _, experience = jax.eval_shape(
        update, learner_state, actor_state
    )
    signature = partial(jax.tree.map, lambda x: (x.shape, x.dtype))
    without_axes = partial(jax.tree.map, lambda x: (x.shape[2:], x.dtype))
    assert without_axes(new_learner_state) == signature(learner_state)
    assert signature(new_actor_state) == signature(actor_state)
    assert experience.action.shape == (1, 1, 8, 4, 2)
    assert experience.last.shape == (1, 1, 8, 4)
    assert system.steps_per_update == 32


FAST = ("arch.num_envs=16", "system.actor_lr=0.02", "system.critic_lr=0.02", "system.gamma=0.5")


@pytest.mark.parametrize("name", FEED_FORWARD)
@pytest.mark.parametrize(
    ("probe", "expected"),
    [
        # The cue that both agents see, and the value of it; gamma is 0.5.
        ("ConstantReward", {1.0: 1.0, -1.0: 1.0}),
        ("RewardFromObservation", {1.0: 1.0, -1.0: -1.0}),
        ("DelayedReward", {0.0: 0.5, 1.0: 1.0}),
        ("Ended", {0.0: 1.875, 0.25: 1.75, 0.5: 1.5, 0.75: 1.0}),
        ("Cut", {1.0: 2.0, -1.0: -2.0}),
        ("LeftEarly", {0.0: 0.25, 0.5: 0.5, 1.0: 1.0}),
    ],
)
def test_learns_values(name, probe, expected):
    overrides = (*FAST, "system.clip_eps=10", "system.max_grad_norm=10")
    algo, learner_state = trained(name, 150, *overrides, probe=probe)
    spec = algo.env.observation_spec
    for cue, value in expected.items():
        observation = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), spec).replace(
            agents_view=jnp.array([[cue, 1, 0], [cue, 0, 1]]),  # with ids
            global_state=jnp.array([cue, cue]),
        )
        values = system_module(name).values(algo, learner_state.params.critic, observation)
        np.testing.assert_allclose(values, [value, value], atol=0.15)


@pytest.mark.parametrize("name", FEED_FORWARD)
@pytest.mark.parametrize("probe", ["RightAction", "RightJointAction"])
def test_learns_to_act(name, probe):
    algo, learner_state = trained(name, 60, *FAST, probe=probe)
    for cues in ([1, 1], [1, -1], [-1, 1], [-1, -1]):
        spec = algo.env.observation_spec
        view = jnp.concatenate([jnp.array(cues, jnp.float32)[:, None], jnp.eye(2)], axis=-1)
        observation = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), spec)
        policy = algo.actor.apply(learner_state.params.actor, observation.replace(agents_view=view))
        right = policy.log_prob((jnp.array(cues) > 0).astype(jnp.int32))
        assert (np.exp(right) > 0.9).all(), (cues, np.exp(right))


@pytest.mark.parametrize("name", ["ff_ippo", "rec_mappo"])
@pytest.mark.parametrize(("probe", "learnt"), [("RightPair", 0.95), ("RightPlace", -0.1)])
def test_learns_several_and_continuous_actions(name, probe, learnt):
    """At first they return 1/4 and -1."""
    assert mean_return(name, 80, *FAST, probe=probe) > learnt


@pytest.mark.parametrize("name", FEED_FORWARD)
def test_first_ratios_are_one(name):
    """What the rollout stored and what learning computes are the same policy."""
    _, system, _ = build(name)
    module, algo = system_module(name), system.update.args[0]
    learner_state = system.init(jax.random.key(0))
    trajectory = module.rollout(algo, learner_state.params, system.reset(jax.random.key(1)))[1]
    policy = algo.actor.apply(learner_state.params.actor, trajectory.observation)
    np.testing.assert_allclose(policy.log_prob(trajectory.action), trajectory.log_prob, atol=1e-6)


@pytest.mark.parametrize("name", PPO)
def test_agents_out_of_the_game_do_not_move_the_policy(name):
    """Only the rewards of the masked agent differ: the actor must become the same."""
    params = []
    for junk in (0.0, 1e6):
        _, system, _ = build(name, probe="OneOut", junk=junk)
        learner_state = jax.jit(system.init)(jax.random.key(0))
        update = over_axes(system.update)
        params.append(update(learner_state, streams(system, jax.random.key(1)))[0].params)
    jax.tree.map(np.testing.assert_array_equal, params[0].actor, params[1].actor)
    bias = params[0].actor["params"]["head"]["Dense_0"]["bias"][0, 0]
    assert not np.array_equal(bias, learner_state.params.actor["params"]["head"]["Dense_0"]["bias"])


@pytest.mark.parametrize("name", PPO)
def test_every_key_is_used_once(name, monkeypatch):
    """Over time, devices, replicas, environments; by a reset, an action, a shuffle or a split."""
    used = []

    def record(key):
        jax.debug.callback(
            lambda data: used.append(tuple(int(x) for x in data)), jax.random.key_data(key)
        )

    def recorded_split(key, *args):
        if sys._getframe(1).f_globals["__name__"] == name:  # environments split keys of their own
            record(key)
        return split(key, *args)

    sample, bits, split = Categorical.sample, jax.random.bits, jax.random.split
    monkeypatch.setattr(jax.random, "split", recorded_split)
    monkeypatch.setattr(
        Categorical, "sample", lambda self, key: (record(key), sample(self, key))[1]
    )
    monkeypatch.setattr(
        jax.random, "bits", lambda key, *a, **k: (record(key), bits(key, *a, **k))[1]
    )
    _, system, _ = build(name, "system.add_agent_id=false", probe="KeyProbe")
    num_devices, num_replicas, num_updates = 2, 2, 2
    update = over_axes(system.update, num_devices, num_replicas)
    learner_state = system.init(jax.random.key(0))
    actor_state = streams(system, jax.random.key(1), num_devices, num_replicas)
    for _ in range(num_updates):
        learner_state, actor_state, _, experience = update(learner_state, actor_state)
        learner_state = jax.tree.map(lambda x: x[0, 0], learner_state)
        mark = np.array(experience.observation.agents_view)[..., 0, :].astype(np.uint32)
        keys = (mark[..., :2] << 16) + mark[..., 2:]  # every step begins an episode
        used += [tuple(int(x) for x in key) for key in keys.reshape(-1, 2)]
    jax.effects_barrier()
    streams_run = num_devices * num_replicas * num_updates
    # In an update: resets (T, E), actions (T,), a shuffle, four splits. A split for each stream's
    # reset, and one to initialise.
    expected = streams_run * (8 * 4 + 8 + 1 + 4) + num_devices * num_replicas + 1
    assert len(used) == expected
    assert len(set(used)) == len(used)


FEED_FORWARD_DIFFERENCE = """\
+    GroupedCentral,
-    axes_of_views,
-    critic: Grouped  # of FeedForwardCritic
+    critic: GroupedCentral  # of FeedForwardCritic
-    \"""Returns V of every agent, (..., N), each from its own view.\"""
-    return algo.critic.apply(critic_params, observation.agents_view)[..., 0]
+    \"""Returns V of every agent, (..., N), all from the global state.\"""
+    return algo.critic.apply(critic_params, observation.global_state)
-        critic=algo.critic.init(critic_key, observation.agents_view),
+        critic=algo.critic.init(critic_key, observation.global_state),
-    critic = FeedForwardCritic(torso=networks["critic_network"]["pre_torso"], head=ValueHead(1))
+    critic = FeedForwardCritic(
+        torso=networks["critic_network"]["pre_torso"], head=ValueHead(env.num_agents)
+    )
-    critics = Grouped(critic, groups, axes_of_views(env.observation_spec.agents_view))
+    critics = GroupedCentral(critic, groups)
"""
RECURRENT_DIFFERENCE = """\
+    GroupedCentral,
-    axes_of_memory_and_views,
-    memory: Memory  # before the observation: (E, N, H)
+    memory: Memory  # before the observation: actor (E, N, H), critic (E, H)
-    critic: Grouped  # of RecurrentCritic
+    critic: GroupedCentral  # of RecurrentCritic
-    \"""Returns the memories after each step (T, E, N, H) and V of every agent (T, E, N), each from
-    its own view.
+    \"""Returns the memories after each step (T, E, H) and V of every agent (T, E, N), all from the
+    global state.
-    memories, value = algo.critic.apply(critic_params, memory, observation.agents_view, start)
-    return memories, value[..., 0]
+    return algo.critic.apply(critic_params, memory, observation.global_state, start)
-    (T, E, N, H) and V of the steps themselves (T, E, N).
+    (T, E, H) and V of the steps themselves (T, E, N).
-    \"""Returns the critic's memory after the rollout (E, N, H) and at the start of each chunk
-    (C, E, N, H), and samples (T, E, ...), advantages normalised over all of them.
+    \"""Returns the critic's memory after the rollout (E, H) and at the start of each chunk
+    (C, E, H), and samples (T, E, ...), advantages normalised over all of them.
-        memory: of the critic at the start of the rollout, (E, N, H).
+        memory: of the critic at the start of the rollout, (E, H).
-        critic=algo.critic.init(critic_key, memory.critic, observation.agents_view, start),
+        critic=algo.critic.init(critic_key, memory.critic, observation.global_state, start),
-        critic=algo.critic.network.torso.init_memory(num_envs, algo.env.num_agents),
+        critic=algo.critic.network.torso.init_memory(num_envs, *algo.critic.memory_axes),
-    critic = RecurrentCritic(torso=make_torso(networks["critic_network"]), head=ValueHead(1))
+    critic = RecurrentCritic(
+        torso=make_torso(networks["critic_network"]), head=ValueHead(env.num_agents)
+    )
-    critics = Grouped(critic, groups, axes_of_memory_and_views)
+    critics = GroupedCentral(critic, groups)
"""


@pytest.mark.parametrize(
    ("names", "expected"),
    [(FEED_FORWARD, FEED_FORWARD_DIFFERENCE), (RECURRENT, RECURRENT_DIFFERENCE)],
    ids=["feed-forward", "recurrent"],
)
def test_siblings_differ_only_where_they_must(names, expected):
    """The two files side by side: a fix in one that is not made in the other shows here."""
    texts = [(SYSTEMS / f"{name}.py").read_text() for name in names]
    bodies = [text.split('"""', 2)[2].splitlines() for text in texts]  # without the docstring
    difference = [
        line
        for line in difflib.unified_diff(*bodies, n=0, lineterm="")
        if line[:2] not in ("--", "++", "@@")
    ]
    print("\n".join(difference))
    assert difference == expected.splitlines()


def test_all_four_share_what_memory_does_not_touch():
    for name in ("Params", "OptimStates", "LearnerState", "Transition", "Sample", "make_optim"):
        sources = {inspect.getsource(getattr(system_module(system), name)) for system in PPO}
        assert len(sources) == 1, name
