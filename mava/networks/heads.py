"""Heads: hidden features (..., H) in, a distribution over actions or values out."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.initializers import orthogonal

from mava.networks.distributions import Categorical, MultiCategorical, TanhNormal
from mava.types import ActionSpec, Continuous, Discrete


class CategoricalHead(nn.Module):
    """A distribution over A actions that never takes a masked one."""

    num_actions: int

    @nn.compact
    def __call__(self, x: jax.Array, action_mask: jax.Array) -> Categorical:
        """Maps (..., H) and the legal actions (..., A) to a distribution over (...)."""
        logits = nn.Dense(self.num_actions, kernel_init=orthogonal(0.01))(x)
        return Categorical.masked(logits, action_mask)


class MultiCategoricalHead(nn.Module):
    """Distributions over several choices, of which none takes a masked action."""

    num_actions: tuple[int, ...]  # (A_1, ..., A_K)

    @nn.compact
    def __call__(self, x: jax.Array, action_mask: jax.Array) -> MultiCategorical:
        """Maps (..., H) and the legal ones (..., A_1 + ... + A_K) to a distribution over (...)."""
        logits = nn.Dense(sum(self.num_actions), kernel_init=orthogonal(0.01))(x)
        return MultiCategorical.masked(logits, action_mask, self.num_actions)


class TanhNormalHead(nn.Module):
    """A distribution over actions in [-1, 1]^D whose spread does not depend on the features."""

    num_dims: int  # D

    @nn.compact
    def __call__(self, x: jax.Array, action_mask: jax.Array) -> TanhNormal:
        """Maps (..., H) and what an agent has of the D numbers to a distribution over (...)."""
        mean = nn.Dense(self.num_dims, kernel_init=orthogonal(0.01))(x)
        log_scale = self.param("log_scale", nn.initializers.zeros_init(), (self.num_dims,))
        scale = jnp.broadcast_to(jnp.exp(log_scale), mean.shape)
        return TanhNormal(mean=mean, scale=scale, mask=action_mask)


def make_action_head(spec: ActionSpec) -> nn.Module:
    """Returns the head for an environment's actions."""
    if isinstance(spec, Discrete):
        return CategoricalHead(spec.num_actions)
    if isinstance(spec, Continuous):
        return TanhNormalHead(spec.num_dims)
    return MultiCategoricalHead(spec.num_actions)


class ValueHead(nn.Module):
    """`num_values` values of one input, e.g. one for each agent from the global state."""

    num_values: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (..., H) to (..., num_values)."""
        return nn.Dense(self.num_values, kernel_init=orthogonal(1.0))(x)
