"""Rollouts, and streams of steps, cut into sequences."""

from typing import TypeVar

import jax
import jax.numpy as jnp

Tree = TypeVar("Tree")


def to_sequences(tree: Tree, num_chunks: int) -> Tree:
    """Cuts arrays (T, E, ...) into C chunks: (L, C * E, ...) with L = T / C.

    Each sequence stays in the order of time: number c * E + e holds the L steps from c * L on of
    environment e.

    Args:
        tree: of arrays (T, E, ...).
        num_chunks: C; divides T.
    """

    def cut(x: jax.Array) -> jax.Array:
        num_steps, num_envs, *rest = x.shape
        length = num_steps // num_chunks
        assert length * num_chunks == num_steps, f"{num_chunks} chunks of {num_steps} steps"
        chunks = x.reshape(num_chunks, length, num_envs, *rest)
        return chunks.swapaxes(0, 1).reshape(length, num_chunks * num_envs, *rest)

    return jax.tree.map(cut, tree)


def sample_sequences(key: jax.Array, stream: Tree, num_sequences: int, length: int) -> Tree:
    """Returns sequences (L, B, ...) of a stream (T, ...), each from a step drawn at random.

    Args:
        key: of the draw.
        stream: of arrays (T, ...).
        num_sequences: B.
        length: L, at most T.
    """
    num_steps = jax.tree.leaves(stream)[0].shape[0]
    assert length <= num_steps, f"sequences of {length} steps from {num_steps}"
    first = jax.random.randint(key, (num_sequences,), 0, num_steps - length + 1)
    rows = first + jnp.arange(length)[:, None]
    return jax.tree.map(lambda x: x[rows], stream)
