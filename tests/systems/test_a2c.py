"""Both A2C systems: one gradient step for a rollout, and learning on environments whose values are
known. What they share with PPO is the same text, which is tested there.
"""

import difflib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.running import SYSTEMS, build, over_axes, streams, system_module, trained

A2C = ("ff_ia2c", "ff_maa2c")
FAST = ("arch.num_envs=16", "system.actor_lr=0.02", "system.critic_lr=0.02", "system.gamma=0.5")


@pytest.mark.parametrize(
    ("name", "probe", "expected"),
    [  # the cue that both agents see, and the value of it; gamma is 0.5
        ("ff_ia2c", "Cut", {1.0: 2.0, -1.0: -2.0}),
        ("ff_maa2c", "Cut", {1.0: 2.0, -1.0: -2.0}),
    ],
)
def test_learns_values(name, probe, expected):
    algo, learner_state = trained(name, 400, *FAST, "system.max_grad_norm=10", probe=probe)
    spec = algo.env.observation_spec
    for cue, value in expected.items():
        observation = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), spec).replace(
            agents_view=jnp.array([[cue, 1, 0], [cue, 0, 1]]),  # with ids
            global_state=jnp.array([cue, cue]),
        )
        values = system_module(name).values(algo, learner_state.params.critic, observation)
        np.testing.assert_allclose(values, [value, value], atol=0.15)


@pytest.mark.parametrize("name", A2C)
def test_learns_to_act(name):
    algo, learner_state = trained(name, 150, *FAST, probe="RightJointAction")
    spec = algo.env.observation_spec
    for cues in ([1, 1], [1, -1], [-1, 1], [-1, -1]):
        view = jnp.concatenate([jnp.array(cues, jnp.float32)[:, None], jnp.eye(2)], axis=-1)
        observation = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), spec)
        policy = algo.actor.apply(learner_state.params.actor, observation.replace(agents_view=view))
        right = policy.log_prob((jnp.array(cues) > 0).astype(jnp.int32))
        assert (np.exp(right) > 0.9).all(), (cues, np.exp(right))


def test_an_update_is_one_step_along_the_policy_gradient(monkeypatch):
    """Without clipping, entropy and Adam: against a gradient written out by hand."""
    module = system_module("ff_ia2c")
    monkeypatch.setattr(module, "pmean", lambda x: x)  # of one device and replica
    _, system, _ = build("ff_ia2c", "system.ent_coef=0", "system.max_grad_norm=1e6", probe="OneOut")
    algo = system.update.args[0]
    start = jax.jit(system.init)(jax.random.key(0))
    _, trajectory = module.rollout(algo, start.params, system.reset(jax.random.key(1)))
    final = system.reset(jax.random.key(1)).observation
    samples = module.make_samples(algo, start.params, trajectory, final)
    _, grads = jax.value_and_grad(module.actor_loss, has_aux=True)(
        start.params.actor, algo, samples, jax.random.key(2)
    )

    def by_hand(actor_params):
        """The mean over what agents in the game did; agent 1 of OneOut is out."""
        policy = algo.actor.apply(actor_params, trajectory.observation)
        log_prob = policy.log_prob(trajectory.action)[..., 0]
        return -jnp.mean(log_prob * samples.advantage[..., 0])

    expected = jax.grad(by_hand)(start.params.actor)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), grads, expected)
    np.testing.assert_allclose(jnp.mean(samples.advantage[..., 0]), 0, atol=1e-5)
    end, *_ = over_axes(system.update)(start, streams(system, jax.random.key(1)))
    counts = [x for x in jax.tree.leaves(end.optim_states) if x.dtype == jnp.int32]
    assert counts
    assert all((np.asarray(count) == 1).all() for count in counts)


def test_siblings_differ_only_where_they_must():
    """The critic of ff_maa2c is that of ff_mappo, all else that of ff_ia2c."""

    def difference(*names):
        texts = [(SYSTEMS / f"{name}.py").read_text() for name in names]
        bodies = [text.split('"""', 2)[2].splitlines() for text in texts]  # without the docstring
        lines = difflib.unified_diff(*bodies, n=0, lineterm="")
        return [line for line in lines if line[:2] not in ("--", "++", "@@")]

    assert difference(*A2C) == difference("ff_ippo", "ff_mappo")


def test_what_is_not_ppo_is_shared_with_it():
    states = ("Params", "OptimStates", "LearnerState", "ActorState")
    for name in (*states, "init", "reset", "act", "values"):
        ppo, a2c = (getattr(system_module(x), name) for x in ("ff_ippo", "ff_ia2c"))
        assert inspect.getsource(ppo) == inspect.getsource(a2c), name
