"""Networks of agents that differ: each has weights of its own, side by side in one array.

Axis letters: N agents, P networks side by side (N, or 1 for all agents), O observation features,
A actions, F and D features in and out of a layer, H heads, B samples. Inside, the samples are the
last axis: (N, F, B).
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from mava.ops.attention import Attention, attend


class StackedDense(nn.Module):
    """P dense layers side by side; a single one serves all agents.

    Weights and biases are drawn evenly from +-1/sqrt(number of inputs), PyTorch's default, which
    MAAC's code has.
    """

    num_features: int  # D
    fan_in: tuple[int, ...]  # (P,): inputs of each, without padding
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (N, F, B) to (N, D, B)."""
        num_agents, num_inputs, _ = x.shape

        def init(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
            bounds = jnp.array(self.fan_in, jnp.float32) ** -0.5
            bounds = bounds.reshape(-1, *[1] * (len(shape) - 1))
            return bounds * jax.random.uniform(key, shape, minval=-1.0)

        num_networks = len(self.fan_in)
        kernel = self.param("kernel", init, (num_networks, num_inputs, self.num_features))
        kernel = jnp.broadcast_to(kernel, (num_agents, *kernel.shape[1:]))
        y = jnp.einsum("nfb,nfd->ndb", x, kernel)
        if self.use_bias:
            y += self.param("bias", init, (num_networks, self.num_features))[:, :, None]
        return y


class StackedMLP(nn.Module):
    """P multi-layer perceptrons side by side, from views to logits of actions."""

    layer_sizes: Sequence[int] = (128, 128)
    activation: str = "leaky_relu"  # the name of a function in flax.linen
    fan_in: tuple[int, ...] = ()  # (P,): features of the views without padding; the system says
    num_actions: int = 0  # A; the system says

    @nn.compact
    def __call__(self, views: jax.Array) -> jax.Array:
        """Maps (B, N, O) to (B, N, A)."""
        x, fan_in = jnp.moveaxis(views, 0, -1), self.fan_in
        for size in self.layer_sizes:
            x = getattr(nn, self.activation)(StackedDense(size, fan_in)(x))
            fan_in = (size,) * len(fan_in)
        return jnp.moveaxis(StackedDense(self.num_actions, fan_in)(x), -1, 0)


class AttentionCritic(nn.Module):
    """Values of each agent's actions given what all see and the others do (arXiv:1810.02912, 3.1).

    Each agent has an encoder of what it sees, one of what it sees and does, and a head; queries,
    keys and values are made by all with the same weights.
    """

    hidden_dim: int = 128  # D
    num_heads: int = 4  # H; divides D
    view_sizes: tuple[int, ...] = ()  # (N,): features of the views without padding; the system says
    action_sizes: tuple[int, ...] = ()  # (N,): actions that each agent has; the system says

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_dim < 1 or self.num_heads < 1 or self.hidden_dim % self.num_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must divide hidden_dim={self.hidden_dim}."
            )

    @nn.compact
    def __call__(self, views: jax.Array, actions: jax.Array) -> tuple[jax.Array, Attention]:
        """Maps views (B, N, O) and one-hot actions (B, N, A), standardised or not, to the values of
        each agent's actions (B, N, A), and its attention.
        """
        size, num_agents, num_actions = self.hidden_dim, views.shape[1], actions.shape[2]
        pair_sizes = tuple(map(sum, zip(self.view_sizes, self.action_sizes, strict=True)))
        views, actions = (jnp.moveaxis(x, 0, -1) for x in (views, actions))  # (N, O, B), (N, A, B)

        state = StackedDense(size, self.view_sizes, name="state_encoder")(views)
        state = nn.leaky_relu(state)  # (N, D, B)
        pair = jnp.concatenate([views, actions], axis=1)
        pair = nn.leaky_relu(StackedDense(size, pair_sizes, name="encoder")(pair))

        query = StackedDense(size, (size,), use_bias=False, name="query")(state)
        key = StackedDense(size, (size,), use_bias=False, name="key")(pair)
        value = nn.leaky_relu(StackedDense(size, (size,), name="value")(pair))
        heads = (num_agents, self.num_heads, size // self.num_heads, -1)
        attention = attend(*(x.reshape(heads) for x in (query, key, value)))

        # A dense layer of both together, as two: that of the state alone can be used twice.
        both = (2 * size,) * num_agents
        hidden = StackedDense(size, both, name="hidden_state")(state)
        attended = attention.output.reshape(state.shape)
        hidden += StackedDense(size, both, use_bias=False, name="hidden_attended")(attended)
        hidden = nn.leaky_relu(hidden)
        values = StackedDense(num_actions, (size,) * num_agents, name="values")(hidden)
        return jnp.moveaxis(values, -1, 0), attention
