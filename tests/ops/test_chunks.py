import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mava.ops.chunks import sample_sequences, to_sequences


def test_hand_worked():
    """Four steps of two environments, cut in two: step 10 * t + e."""
    x = jnp.array([[0, 1], [10, 11], [20, 21], [30, 31]])
    expected = [[0, 1, 20, 21], [10, 11, 30, 31]]  # (L, C * E)
    np.testing.assert_array_equal(to_sequences(x, 2), expected)
    np.testing.assert_array_equal(to_sequences(x, 1), x)
    np.testing.assert_array_equal(to_sequences(x, 4), [[0, 1, 10, 11, 20, 21, 30, 31]])


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 6])
def test_against_a_loop(num_chunks):
    x = np.random.default_rng(0).normal(size=(6, 4, 3, 2))
    sequences = to_sequences({"x": jnp.array(x)}, num_chunks)["x"]
    length = 6 // num_chunks
    assert sequences.shape == (length, num_chunks * 4, 3, 2)
    for c in range(num_chunks):
        for e in range(4):
            np.testing.assert_allclose(
                sequences[:, c * 4 + e], x[c * length : (c + 1) * length, e], rtol=1e-6
            )


def test_chunks_must_fit():
    with pytest.raises(AssertionError, match="4 chunks of 6 steps"):
        to_sequences(jnp.zeros((6, 2)), 4)


def test_sequences_of_a_stream():
    """Steps in their order, from every first step that leaves room, at equal chances."""
    stream = {"step": jnp.arange(10), "double": 2.0 * jnp.arange(10)[:, None]}
    sequences = sample_sequences(jax.random.key(0), stream, 8000, 4)
    assert sequences["step"].shape == (4, 8000)
    assert sequences["double"].shape == (4, 8000, 1)
    assert (jnp.diff(sequences["step"], axis=0) == 1).all()
    assert (sequences["double"][..., 0] == 2 * sequences["step"]).all()
    firsts = jnp.bincount(sequences["step"][0], length=10)
    assert (firsts[7:] == 0).all()
    assert (jnp.abs(firsts[:7] / 8000 - 1 / 7) < 0.02).all()
