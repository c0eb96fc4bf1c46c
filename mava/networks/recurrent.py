"""Recurrent actors and critics: a torso, a cell that runs over time, another torso, and a head.

All of them take sequences, time first, and which of their steps start an episode: there the cell's
state is zero, whatever came before. One step is a sequence of length 1.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from mava.networks.distributions import Policy
from mava.types import Observation


class RecurrentTorso(nn.Module):
    """Features of a sequence: `pre_torso`, a recurrent cell of flax.linen, `post_torso`."""

    pre_torso: nn.Module
    cell: nn.RNNCellBase
    post_torso: nn.Module

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.cell, nn.RNNCellBase) or self.cell.num_feature_axes != 1:
            raise ValueError(
                f"cell={type(self.cell).__name__} is no recurrent cell of flax.linen for vectors "
                "(GRUCell, OptimizedLSTMCell...)."
            )
        size = self.cell.features
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"hidden_state_dim={size} must be an integer of at least 1.")

    @nn.nowrap
    def init_memory(self, *batch: int) -> Any:
        """Returns the cell's state at the start of an episode: zeros, (*batch, H)."""
        shapes = jax.eval_shape(
            lambda: self.cell.initialize_carry(jax.random.key(0), (*batch, self.cell.features))
        )
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    @nn.compact
    def __call__(self, memory: Any, x: jax.Array, start: jax.Array) -> tuple[Any, jax.Array]:
        """Returns the states after each step (T, ..., H), and features (T, ..., H').

        Args:
            memory: states before the first step, (..., H).
            x: (T, ..., F), or grids of features if `pre_torso` takes those.
            start: bool, (T, ...) or with fewer axes at the end: true at the first step of an
                episode.
        """
        x = self.pre_torso(x)
        num_steps, *batch = x.shape[:-1]
        start = start.reshape(start.shape + (1,) * (x.ndim - 1 - start.ndim))
        start = jnp.broadcast_to(start, x.shape[:-1]).reshape(num_steps, -1, 1)
        # As matrices; see MLPTorso.
        x = x.reshape(num_steps, -1, x.shape[-1])
        memory = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), memory)

        def step(
            cell: nn.RNNCellBase, state: Any, inputs: tuple[jax.Array, jax.Array]
        ) -> tuple[Any, tuple[Any, jax.Array]]:
            x, start = inputs
            state = jax.tree.map(lambda x: jnp.where(start, 0.0, x), state)
            state, features = cell(state, x)
            return state, (state, features)

        scan = nn.scan(step, variable_broadcast="params", split_rngs={"params": False})
        _, (memories, features) = scan(self.cell, memory, (x, start))
        memories, features = jax.tree.map(
            lambda x: x.reshape(num_steps, *batch, x.shape[-1]), (memories, features)
        )
        return memories, self.post_torso(features)


class RecurrentActor(nn.Module):
    """Each agent's distribution over its actions, given all that it has seen in the episode; the
    parameters are shared by all agents.
    """

    torso: RecurrentTorso
    head: nn.Module

    def __call__(self, memory: Any, observation: Observation) -> tuple[Any, Policy]:
        """Returns the memories after each step (T, E, N, H) and distributions over (T, E, N).

        Args:
            memory: before the first step, (E, N, H).
            observation: (T, E, ...). Where `step_count` is 0 an episode starts.
        """
        start = observation.step_count == 0
        memories, features = self.torso(memory, observation.agents_view, start)
        return memories, self.head(features, observation.action_mask)


class RecurrentCritic(nn.Module):
    """Values of whatever the critic is shown over an episode."""

    torso: RecurrentTorso
    head: nn.Module

    def __call__(self, memory: Any, x: jax.Array, start: jax.Array) -> tuple[Any, jax.Array]:
        """Returns the memories after each step (T, ..., H) and (T, ..., values of the head).

        Args:
            memory: before the first step, (..., H).
            x: (T, ..., S).
            start: (T, E), bool: the first step of an episode.
        """
        memories, features = self.torso(memory, x, start)
        return memories, self.head(features)
