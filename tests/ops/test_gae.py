import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mava.ops.gae import gae


def plain_loop(reward, discount, last, value, next_value, gamma, gae_lambda):
    advantages = np.zeros_like(reward)
    for environment in range(reward.shape[1]):
        for agent in range(reward.shape[2]):
            advantage = 0.0
            for t in reversed(range(reward.shape[0])):
                at = (t, environment, agent)
                delta = reward[at] + gamma * discount[at] * next_value[at] - value[at]
                carried = 0.0 if last[t, environment] or discount[at] == 0 else advantage
                advantage = delta + gamma * gae_lambda * carried
                advantages[at] = advantage
    return advantages, advantages + value


@pytest.mark.parametrize(
    ("discount", "last", "expected"),
    [
        # gamma 0.5, lambda 0.5; rewards 1, 2, 3, values 1, 1, 1, true successors worth 4, 4, 4.
        # delta without an end: 1 + 2 - 1 = 2, 2 + 2 - 1 = 3, 3 + 2 - 1 = 4.
        ([1, 1, 1], [0, 0, 0], [3.0, 4.0, 4.0]),  # neither: 4; 3 + 4 / 4; 2 + 4 / 4
        ([1, 0, 1], [0, 1, 0], [2.25, 1.0, 4.0]),  # terminated: 2 + 0 - 1 = 1, nothing carried
        ([1, 1, 1], [0, 1, 0], [2.75, 3.0, 4.0]),  # truncated: bootstraps, nothing carried
        ([1, 0, 1], [0, 0, 0], [2.25, 1.0, 4.0]),  # this agent terminated, the episode goes on
        ([1, 0, 1], [0, 1, 1], [2.25, 1.0, 4.0]),  # terminated, then truncated at the end
    ],
)
def test_hand_worked(discount, last, expected):
    column = lambda x: jnp.array(x, jnp.float32)[:, None, None]  # noqa: E731
    advantage, target = gae(
        column([1, 2, 3]),
        column(discount),
        jnp.array(last, bool)[:, None],
        column([1, 1, 1]),
        column([4, 4, 4]),
        0.5,
        0.5,
    )
    np.testing.assert_allclose(advantage[:, 0, 0], expected)
    np.testing.assert_allclose(target[:, 0, 0], np.array(expected) + 1)


def test_equals_plain_loop():
    rng = np.random.default_rng(0)
    shape = (17, 5, 3)
    reward, value, next_value = rng.normal(size=(3, *shape)).astype(np.float32)
    last = rng.random(shape[:2]) < 0.3
    terminated = last & (rng.random(shape[:2]) < 0.5)
    out_of_the_game = rng.random(shape) < 0.1  # single agents
    discount = (1.0 - (terminated[..., None] | out_of_the_game)).astype(np.float32)
    arguments = (reward, discount, last, value, next_value)
    expected = plain_loop(*arguments, 0.97, 0.9)
    for function in (gae, jax.jit(gae, static_argnums=(5, 6))):
        for result, right in zip(function(*arguments, 0.97, 0.9), expected, strict=True):
            np.testing.assert_allclose(result, right, rtol=1e-5, atol=1e-5)


def test_refuses_other_shapes():
    ones = jnp.ones((3, 2, 1))
    with pytest.raises(AssertionError):
        gae(ones, ones, jnp.ones((3, 2, 1), bool), ones, ones, 0.9, 0.9)
