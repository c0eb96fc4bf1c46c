"""Torsos: observation features (..., O), or grids of them, in, hidden features (..., H) out."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.initializers import orthogonal


class MLPTorso(nn.Module):
    """Dense layers, each followed by layer norm (if asked for) and the activation.

    Orthogonal initialisation with gain sqrt(2) (Engstrom et al. 2020, arXiv:2005.12729).
    """

    layer_sizes: Sequence[int] = (128, 128)
    activation: str = "relu"  # the name of a function in flax.linen
    use_layer_norm: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_sizes(self, "layer_sizes")
        _check_activation(self.activation)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        *batch, features = x.shape
        # As a matrix: XLA's gradient of a product with two batch axes took 1.8 times as long (CPU).
        x = x.reshape(-1, features)
        for size in self.layer_sizes:
            x = nn.Dense(size, kernel_init=orthogonal(np.sqrt(2)))(x)
            if self.use_layer_norm:
                x = nn.LayerNorm()(x)
            x = getattr(nn, self.activation)(x)
        return x.reshape(*batch, -1)


class CNNTorso(nn.Module):
    """Convolutions over a grid, then dense layers; each followed by layer norm (if asked for) and
    the activation. The edges are padded with zeros.
    """

    channel_sizes: Sequence[int] = (32, 32)  # of the convolutions
    kernel_sizes: Sequence[int] = (3, 3)  # a square's side, of each
    strides: Sequence[int] = (1, 1)  # of each
    layer_sizes: Sequence[int] = (128,)  # of the dense layers
    activation: str = "relu"  # the name of a function in flax.linen
    use_layer_norm: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("channel_sizes", "kernel_sizes", "strides", "layer_sizes"):
            _check_sizes(self, name)
        if not len(self.channel_sizes) == len(self.kernel_sizes) == len(self.strides):
            raise ValueError(
                f"channel_sizes={list(self.channel_sizes)}, "
                f"kernel_sizes={list(self.kernel_sizes)} and strides={list(self.strides)} must be "
                "of the same length: one entry for each convolution."
            )
        _check_activation(self.activation)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (..., rows, columns, O) to (..., H)."""
        batch = x.shape[:-3]
        x = x.reshape(-1, *x.shape[-3:])
        convolutions = zip(self.channel_sizes, self.kernel_sizes, self.strides, strict=True)
        for channels, kernel, stride in convolutions:
            x = nn.Conv(
                channels,
                (kernel, kernel),
                stride,
                kernel_init=orthogonal(np.sqrt(2)),
                conv_general_dilated=_convolve,
            )(x)
            if self.use_layer_norm:
                x = nn.LayerNorm()(x)
            x = getattr(nn, self.activation)(x)
        x = x.reshape(len(x), -1)
        x = MLPTorso(self.layer_sizes, self.activation, self.use_layer_norm)(x)
        return x.reshape(*batch, -1)


def _convolve(
    x: jax.Array,
    kernel: jax.Array,
    strides: Sequence[int],
    padding: str,
    **options: Any,
) -> jax.Array:
    """Returns `jax.lax.conv_general_dilated` of a grid (B, rows, columns, O) as flax calls it.

    On a CPU as a matrix product: in a loop XLA's gradient of a convolution takes 10 times as long.
    """
    if jax.default_backend() != "cpu":
        return jax.lax.conv_general_dilated(x, kernel, strides, padding, **options)
    height, width, num_features, num_channels = kernel.shape
    pads = jax.lax.padtype_to_pads(x.shape[1:3], (height, width), strides, padding)
    x = jnp.pad(x, ((0, 0), *pads, (0, 0)))
    rows = (x.shape[1] - height) // strides[0] + 1
    columns = (x.shape[2] - width) // strides[1] + 1
    cells = [
        x[:, i : i + rows * strides[0] : strides[0], j : j + columns * strides[1] : strides[1]]
        for i in range(height)
        for j in range(width)
    ]
    patches = jnp.stack(cells, axis=3)  # (B, rows, columns, height * width, O)
    y = patches.reshape(-1, height * width * num_features) @ kernel.reshape(-1, num_channels)
    return y.reshape(-1, rows, columns, num_channels)


def _check_sizes(torso: nn.Module, name: str) -> None:
    sizes = getattr(torso, name)
    if not sizes or min(sizes) < 1:
        raise ValueError(f"{name}={list(sizes)} must be positive integers.")


def _check_activation(activation: str) -> None:
    if not callable(getattr(nn, activation, None)):
        raise ValueError(
            f"activation={activation} is no function of flax.linen (relu, tanh, gelu...)."
        )
