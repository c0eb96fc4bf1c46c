"""Attention of every agent to the others.

Axis letters: N agents, H heads, C channels of a head, B samples. The samples are the last axis: the
products of a sample are small, and side by side they fill the vector units of a CPU.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

BLOCK_SIZE = 64  # samples at a time on a CPU; see `_by_blocks`


class Attention(NamedTuple):
    """What the agents read, and how much of it from whom."""

    output: jax.Array  # (N, H, C, B): the mean of the other agents' values by the weights
    logits: jax.Array  # (N, N, H, B): <query of i, key of j>, also for j = i
    log_weights: jax.Array  # (N, N, H, B): of what i reads from j; hardly a number for j = i


def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> Attention:
    """Returns what each agent reads from the others, never from itself: the values of j weighted
    by softmax_j(<query of i, key of j> / sqrt(C)) over j != i (arXiv:1810.02912, eq. 5).

    All arguments are (N, H, C, B), N > 1.
    """
    chex.assert_rank([query, key, value], 4)
    chex.assert_equal_shape([query, key, value])
    num_agents, _, num_channels, _ = query.shape
    logits = scores(query, key)
    itself = jnp.eye(num_agents, dtype=bool)[:, :, None, None]
    masked = jnp.where(itself, jnp.finfo(logits.dtype).min, logits / math.sqrt(num_channels))
    log_weights = jax.nn.log_softmax(masked, axis=1)
    output = mix(jnp.exp(log_weights), value)
    return Attention(output=output, logits=logits, log_weights=log_weights)


@jax.custom_vjp
def scores(query: jax.Array, key: jax.Array) -> jax.Array:
    """Returns <query of i, key of j>, (N, N, H, B), for queries and keys (N, H, C, B)."""
    if jax.default_backend() != "cpu":
        return jnp.einsum("ihcb,jhcb->ijhb", query, key)

    def of_block(query: jax.Array, key: jax.Array) -> jax.Array:
        channels = range(query.shape[2])
        return _add_up([query[:, None, :, c] * key[None, :, :, c] for c in channels])

    return _by_blocks(of_block, query, key)


@jax.custom_vjp
def mix(weights: jax.Array, value: jax.Array) -> jax.Array:
    """Returns sum_j weights_ij value_j, (N, H, C, B), for weights (N, N, H, B) and values
    (N, H, C, B).
    """
    if jax.default_backend() != "cpu":
        return jnp.einsum("ijhb,jhcb->ihcb", weights, value)

    def of_block(weights: jax.Array, value: jax.Array) -> jax.Array:
        return _add_up([weights[:, j, :, None] * value[None, j] for j in range(len(value))])

    return _by_blocks(of_block, weights, value)


def _add_up(terms: list[jax.Array]) -> jax.Array:
    """Returns the sum; XLA makes one loop of it, which keeps the sum in a register."""
    total = terms[0]
    for term in terms[1:]:
        total += term
    return total


def _by_blocks(function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """Returns function(*arrays), (..., B), made of blocks of the samples in their last axis.

    On a CPU a batch of products as small as these takes 4 times as long as arithmetic on many
    samples side by side, if that is done by blocks: rows apart by a power of 2 in bytes have to
    share a few lines of the cache. And it is done in a loop, since XLA would else compute a sum
    anew wherever one of its terms is used.
    """
    num_samples = arrays[0].shape[-1]
    size = math.gcd(num_samples, BLOCK_SIZE)

    def block(i: jax.Array) -> jax.Array:
        rows = [jax.lax.dynamic_slice_in_dim(x, i * size, size, axis=-1) for x in arrays]
        return function(*rows)

    def body(i: jax.Array, result: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(result, block(i), i * size, axis=-1)

    of_one = jax.eval_shape(block, jnp.int32(0))
    result = jnp.zeros((*of_one.shape[:-1], num_samples), of_one.dtype)
    return jax.lax.fori_loop(0, num_samples // size, body, result)


def _scores_forward(query: jax.Array, key: jax.Array) -> tuple[jax.Array, Any]:
    return scores(query, key), (query, key)


def _scores_backward(saved: Any, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    query, key = saved
    return mix(grad, key), mix(jnp.swapaxes(grad, 0, 1), query)


def _mix_forward(weights: jax.Array, value: jax.Array) -> tuple[jax.Array, Any]:
    return mix(weights, value), (weights, value)


def _mix_backward(saved: Any, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    weights, value = saved
    return scores(grad, value), mix(jnp.swapaxes(weights, 0, 1), grad)


# XLA would differentiate the sums term by term; the gradient of either is made of the two.
scores.defvjp(_scores_forward, _scores_backward)
mix.defvjp(_mix_forward, _mix_backward)
