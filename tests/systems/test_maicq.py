"""MAICQ against numbers worked by hand, and divided over devices and replicas.

That it learns what its data does not do, and cloning does not, is in tests/test_offline.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mava.networks import LinearMixer
from mava.types import Experience, Observation
from tests.running import build, over_axes, streams, system_module

maicq = system_module("rec_maicq")


@pytest.fixture(scope="module")
def built():
    """System and parts, and a stream of 60 steps that end or are cut by chance."""
    _, system, _ = build("rec_maicq", "vault=unread", probe="Counter")
    rng = np.random.default_rng(0)
    last = rng.random(60) < 0.3
    since = np.arange(60) - np.maximum.accumulate(
        np.where(np.append(True, last[:-1]), range(60), 0)
    )
    stream = Experience(
        observation=Observation(
            agents_view=rng.normal(size=(60, 2, 4)).astype("f4"),
            action_mask=np.ones((60, 2, 2), bool),
            agent_mask=np.ones((60, 2), bool),
            step_count=since.astype("i4"),
            global_state=rng.normal(size=(60, 2)).astype("f4"),
        ),
        action=rng.integers(0, 2, (60, 2)).astype("i4"),
        reward=rng.normal(size=(60, 2)).astype("f4"),
        discount=1.0
        - (last & (rng.random(60) < 0.5)).astype("f4")[:, None] * np.ones((1, 2), "f4"),
        last=last,
    )
    return system, jax.tree.map(jnp.asarray, stream)


@pytest.mark.parametrize(
    ("discount", "last", "expected", "known"),
    [
        ([1, 1, 1], [0, 0, 0], [9.8125, 15.25, 23], [1, 1, 1]),
        ([1, 0, 1], [0, 1, 0], [6.5, 2, 23], [1, 1, 1]),  # ended: nothing comes after
        ([1, 1, 1], [0, 1, 0], [11, None, 23], [1, 0, 1]),  # cut: its own value stands for it
    ],
)
def test_targets(discount, last, expected, known, built, monkeypatch):
    """Team values 10, 20, 30, 40, rewards 1, 2, 3 on average, gamma = lambda = 0.5."""
    system, _ = built
    algo = system.update.args[0]
    config = maicq.Config(gamma=0.5, td_lambda=0.5, value_temperature=1e9)
    algo = algo._replace(config=config)
    values = (None, jnp.array([10.0, 20, 30, 40])[:, None], None)
    monkeypatch.setattr(maicq, "values", lambda *_: values)
    one = Experience(
        observation=None,
        action=None,
        reward=jnp.array([[0.0, 2], [1, 3], [3, 3], [9, 9]])[:, None],
        discount=jnp.array([*discount, 1.0])[:, None, None] * jnp.ones((1, 1, 2)),
        last=jnp.array([*last, 0], bool)[:, None],
    )
    compute = over_axes(lambda params, batch: maicq.targets(algo, params, batch))
    target, is_known = compute(
        maicq.Params(None, None, None), jax.tree.map(lambda x: x[None, None], one)
    )
    assert is_known[0, 0, :, 0].tolist() == known
    for got, wanted in zip(target[0, 0, :, 0].tolist(), expected, strict=True):
        assert wanted is None or got == pytest.approx(wanted)


def test_better_actions_of_the_data_count_more_in_the_targets(built, monkeypatch):
    """Of two sequences that go on with 0 and with 1, at temperature 1 they count 1 to e."""
    system, _ = built
    config = maicq.Config(gamma=1.0, td_lambda=0.0, value_temperature=1.0, sequence_length=2)
    algo = system.update.args[0]._replace(config=config)
    monkeypatch.setattr(maicq, "values", lambda *_: (None, jnp.array([[5.0, 5], [0, 1]]), None))
    batch = Experience(
        observation=None,
        action=None,
        reward=jnp.zeros((2, 2, 2)),
        discount=jnp.ones((2, 2, 2)),
        last=jnp.zeros((2, 2), bool),
    )
    compute = over_axes(lambda params, batch: maicq.targets(algo, params, batch)[0])
    target = compute(maicq.Params(None, None, None), jax.tree.map(lambda x: x[None, None], batch))
    assert target[0, 0, 0].tolist() == pytest.approx([0, 2 * np.e / (1 + np.e)])


@pytest.mark.parametrize(("devices", "replicas"), [(2, 1), (1, 2), (2, 2)])
def test_divided_it_learns_the_same(devices, replicas, built, monkeypatch):
    """One update on a batch of 8 sequences, and on its parts side by side."""
    system, stream = built
    rows = jnp.arange(8) * 7 + jnp.arange(4)[:, None]
    batch = jax.tree.map(lambda x: x[rows], stream)

    def part(*_):
        index = jax.lax.axis_index("device") * replicas + jax.lax.axis_index("replica")
        size = 8 // (devices * replicas)
        return jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, index * size, size, axis=1), batch
        )

    learner_state = system.init(jax.random.key(0))
    monkeypatch.setattr(maicq, "sample_sequences", lambda *_: batch)
    update = over_axes(lambda *states: system.update(*states, stream)[:3:2])
    whole, metrics = update(learner_state, streams(system, jax.random.key(1)))
    monkeypatch.setattr(maicq, "sample_sequences", part)
    update = over_axes(lambda *states: system.update(*states, stream)[:3:2], devices, replicas)
    parts, same = update(learner_state, streams(system, jax.random.key(1), devices, replicas))
    for index in np.ndindex(devices, replicas):
        for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
            np.testing.assert_allclose(a[0, 0], b[index], rtol=1e-5, atol=1e-6)
    for name in ("value_loss", "actor_loss", "target"):
        np.testing.assert_allclose(
            metrics.learn[name][0][0, 0], same.learn[name][0][0, 0], rtol=1e-5
        )
    before = learner_state.params
    after = jax.tree.map(lambda x: x[0, 0], whole.params)
    moved = jax.tree.map(lambda old, new: bool(jnp.any(old != new)), before, after)
    assert any(jax.tree.leaves(moved.actor))
    assert any(jax.tree.leaves(moved.critic.mixer))


def test_targets_follow(built):
    """By tau of the way to the new critic and mixer."""
    system, stream = built
    algo = system.update.args[0]
    learner_state = system.init(jax.random.key(0))
    update = over_axes(lambda *states: system.update(*states, stream)[0])
    new = jax.tree.map(lambda x: x[0, 0], update(learner_state, streams(system, jax.random.key(1))))
    tau = algo.config.tau
    wanted = jax.tree.map(
        lambda target, online: (1 - tau) * target + tau * online,
        learner_state.params.target,
        new.params.critic,
    )
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(new.params.target), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_the_mixer_never_counts_a_value_against_the_team():
    mixer = LinearMixer((8,))
    state = jax.random.normal(jax.random.key(0), (5, 3))
    params = mixer.init(jax.random.key(1), jnp.zeros((5, 2)), state)
    low, weights = mixer.apply(params, jnp.zeros((5, 2)), state)
    high, _ = mixer.apply(params, jnp.array([[1.0, 0]] * 5), state)
    assert (weights >= 0).all()
    np.testing.assert_allclose(high - low, weights[:, 0], rtol=1e-5)
