"""Attention against plain loops, and what it must not depend on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mava.ops.attention import attend

HEADS, CHANNELS = 2, 4


def inputs(num_agents, num_samples):
    keys = jax.random.split(jax.random.key(num_agents), 3)
    return [jax.random.normal(k, (num_agents, HEADS, CHANNELS, num_samples)) for k in keys]


def by_loops(query, key, value):
    """Output, logits and weights with one agent, head and sample at a time."""
    num_agents, num_heads, num_channels, num_samples = query.shape
    output = np.zeros(query.shape)
    logits, weights = np.zeros((2, num_agents, num_agents, num_heads, num_samples))
    for i, h, b in np.ndindex(num_agents, num_heads, num_samples):
        others = [j for j in range(num_agents) if j != i]
        scores = np.array([query[i, h, :, b] @ key[j, h, :, b] for j in range(num_agents)])
        shares = np.exp(scores[others] / np.sqrt(num_channels))
        shares /= shares.sum()
        logits[i, :, h, b], weights[i, others, h, b] = scores, shares
        output[i, h, :, b] = sum(w * value[j, h, :, b] for w, j in zip(shares, others, strict=True))
    return output, logits, weights


@pytest.mark.parametrize(
    ("num_agents", "num_samples"), [(2, 3), (3, 6), (4, 65), (8, 128), (16, 2)]
)
def test_equals_plain_loops(num_agents, num_samples):
    arguments = inputs(num_agents, num_samples)
    result = jax.jit(attend)(*arguments)
    output, logits, weights = by_loops(*(np.array(x, np.float64) for x in arguments))
    np.testing.assert_allclose(result.output, output, atol=1e-5)
    np.testing.assert_allclose(result.logits, logits, atol=1e-5)
    np.testing.assert_allclose(jnp.exp(result.log_weights), weights, atol=1e-6)


def by_einsum(query, key, value):
    logits = jnp.einsum("ihcb,jhcb->ijhb", query, key)
    itself = jnp.eye(len(query), dtype=bool)[:, :, None, None]
    weights = jax.nn.softmax(jnp.where(itself, -jnp.inf, logits / CHANNELS**0.5), axis=1)
    return jnp.einsum("ijhb,jhcb->ihcb", weights, value), logits


@pytest.mark.parametrize(("num_agents", "num_samples"), [(3, 6), (8, 128)])
def test_gradients_are_those_of_einsum(num_agents, num_samples):
    """Of a loss that sees output and logits, for one batch and for two at a time."""
    arguments = inputs(num_agents, num_samples)

    def loss(function):
        return lambda *args: sum(jnp.sum(jnp.sin(x)) for x in function(*args)[:2])

    for wrap in (lambda f: f, jax.vmap):
        batch = arguments if wrap is not jax.vmap else [jnp.stack([x, 2 * x]) for x in arguments]
        actual, expected = (
            jax.jit(wrap(jax.grad(loss(f), (0, 1, 2))))(*batch) for f in (attend, by_einsum)
        )
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-4), actual, expected)


@pytest.mark.parametrize("num_agents", [3, 4, 8, 16])
def test_an_agent_reads_the_others_in_any_order_and_never_itself(num_agents):
    query, key, value = inputs(num_agents, 6)
    read = jax.jit(lambda *args: attend(*args).output[1])
    expected = read(query, key, value)
    order = np.array([0, 1, *np.roll(np.arange(2, num_agents), 1)])
    order[0], order[-1] = order[-1], order[0]
    np.testing.assert_allclose(read(query, key[order], value[order]), expected, atol=1e-6)
    key, value = key.at[1].set(7.0), value.at[1].set(-9.0)
    np.testing.assert_allclose(read(query, key, value), expected, atol=1e-6)
    changed = read(query, key, value.at[0].set(-9.0))
    assert not np.allclose(changed, expected, atol=1e-2)
