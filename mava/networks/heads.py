"""Heads: hidden features (..., H) in, a distribution over actions or values out."""

import flax.linen as nn
import jax
from flax.linen.initializers import orthogonal

from mava.networks.distributions import Categorical


class CategoricalHead(nn.Module):
    """A distribution over A actions that never takes a masked one."""

    num_actions: int

    @nn.compact
    def __call__(self, x: jax.Array, action_mask: jax.Array) -> Categorical:
        """Maps (..., H) and the legal actions (..., A) to a distribution over (...)."""
        logits = nn.Dense(self.num_actions, kernel_init=orthogonal(0.01))(x)
        return Categorical.masked(logits, action_mask)


class ValueHead(nn.Module):
    """`num_values` values of one input, e.g. one for each agent from the global state."""

    num_values: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (..., H) to (..., num_values)."""
        return nn.Dense(self.num_values, kernel_init=orthogonal(1.0))(x)
