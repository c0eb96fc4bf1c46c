"""Mixing: one value of a team from the values of its agents."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from mava.networks.torsos import MLPTorso


class LinearMixer(nn.Module):
    """A sum of the agents' values with weights of at least 0, which the global state decides, and
    an offset: what is best for an agent is best for the team.
    """

    layer_sizes: Sequence[int] = (64,)  # of weights and offset each

    @nn.compact
    def __call__(self, values: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the team's value (...,) and the weights (..., N).

        Args:
            values: of each agent, (..., N).
            state: global, (..., S).
        """
        num_agents = values.shape[-1]
        features = MLPTorso(self.layer_sizes)(state)
        weights = jnp.abs(nn.Dense(num_agents)(features))
        offset = nn.Dense(1)(MLPTorso(self.layer_sizes)(state))[..., 0]
        return jnp.sum(weights * values, axis=-1) + offset, weights
