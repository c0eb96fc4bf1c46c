"""A function applied to only those rows that need it."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Tree = TypeVar("Tree")


def map_where(
    function: Callable[[Any], Tree],
    mask: jax.Array,
    inputs: Any,
    otherwise: Tree,
    chunk_size: int,
) -> Tree:
    """Returns `function(inputs)` in the rows where `mask` is set and `otherwise` in the others.

    The set rows are taken in chunks of `chunk_size`, so the cost follows their number. (A `where`
    or a `vmap(cond)` computes every row.) Not differentiable in reverse mode.

    Args:
        function: maps rows (chunk_size, ...) of `inputs` to rows of the result. Row i of the result
            may depend on row i of the inputs only.
        mask: (R,), bool.
        inputs: tree of arrays (R, ...).
        otherwise: tree of arrays (R, ...), of the shapes and dtypes that `function` gives.
        chunk_size: rows computed at a time, at least 1.
    """
    num_rows = mask.shape[0]
    chunk_size = min(chunk_size, num_rows)

    def body(carry: tuple[jax.Array, Tree]) -> tuple[jax.Array, Tree]:
        todo, result = carry
        # Rows past the last set one get an index past the end: read clipped, written nowhere.
        (rows,) = jnp.nonzero(todo, size=chunk_size, fill_value=num_rows)
        chunk = function(jax.tree.map(lambda x: x.at[rows].get(mode="clip"), inputs))
        result = jax.tree.map(lambda x, y: x.at[rows].set(y, mode="drop"), result, chunk)
        return todo.at[rows].set(False, mode="drop"), result

    _, result = jax.lax.while_loop(lambda carry: jnp.any(carry[0]), body, (mask, otherwise))
    return result
