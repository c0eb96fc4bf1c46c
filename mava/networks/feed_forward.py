"""Feed-forward actors and critics: a torso and a head."""

import flax.linen as nn
import jax

from mava.networks.distributions import Policy
from mava.types import Observation


class FeedForwardActor(nn.Module):
    """Each agent's distribution over its actions; the parameters are shared by all agents."""

    torso: nn.Module
    head: nn.Module

    def __call__(self, observation: Observation) -> Policy:
        """Maps observations, their views (..., N, O), to a distribution over (..., N)."""
        return self.head(self.torso(observation.agents_view), observation.action_mask)


class FeedForwardCritic(nn.Module):
    """Values of whatever the critic is shown."""

    torso: nn.Module
    head: nn.Module

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (..., S) to (..., values of the head)."""
        return self.head(self.torso(x))
