import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mava.ops.map_where import map_where


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 50])
@pytest.mark.parametrize("rows", [[], [0], [6], [1, 2, 5], list(range(7))])
def test_only_the_set_rows(rows, chunk_size):
    mask = jnp.zeros(7, bool).at[jnp.array(rows, int)].set(True)
    inputs = {"x": jnp.arange(7.0), "key": jax.random.split(jax.random.key(0), 7)}
    otherwise = (jnp.full(7, -1.0), jnp.full((7, 2), -1, jnp.int32))

    def function(chunk):
        drawn = jax.vmap(lambda key: jax.random.randint(key, (2,), 0, 9))(chunk["key"])
        return 10 * chunk["x"], drawn

    result = jax.jit(lambda: map_where(function, mask, inputs, otherwise, chunk_size))()
    everywhere = function(inputs)
    for out, computed, default in zip(result, everywhere, otherwise, strict=True):
        expected = np.array(default)
        expected[rows] = np.array(computed)[rows]
        np.testing.assert_array_equal(out, expected)


def test_cost_follows_the_number_of_set_rows():
    """Counts calls: three chunks of 2 for 5 rows, none for no row."""
    calls = []

    def function(x):
        jax.debug.callback(lambda: calls.append(1))
        return x

    for num_set, expected in ((5, 3), (0, 0), (1, 1)):
        calls.clear()
        mask = jnp.arange(40) < num_set
        jax.block_until_ready(map_where(function, mask, jnp.ones(40), jnp.zeros(40), 2))
        jax.effects_barrier()
        assert len(calls) == expected
