"""Heads: hidden features (..., H) in, a distribution over actions or values out."""

from typing import TYPE_CHECKING

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.initializers import orthogonal

if TYPE_CHECKING:
    import distrax


class CategoricalHead(nn.Module):
    """A distribution over A actions that never takes a masked one."""

    num_actions: int

    @nn.compact
    def __call__(self, x: jax.Array, action_mask: jax.Array) -> "distrax.Categorical":
        """Maps (..., H) and the legal actions (..., A) to a categorical over (...)."""
        import distrax  # 1.7 s of import: only where it is used

        logits = nn.Dense(self.num_actions, kernel_init=orthogonal(0.01))(x)
        # Not -inf: the entropy of an illegal action would be 0 * inf = NaN.
        logits = jnp.where(action_mask, logits, jnp.finfo(logits.dtype).min)
        return distrax.Categorical(logits=logits)


class ValueHead(nn.Module):
    """`num_values` values of one input, e.g. one for each agent from the global state."""

    num_values: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (..., H) to (..., num_values)."""
        return nn.Dense(self.num_values, kernel_init=orthogonal(1.0))(x)
