"""Torsos: observation features (..., O) in, hidden features (..., H) out."""

from collections.abc import Sequence

import flax.linen as nn
import jax
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
        if not self.layer_sizes or min(self.layer_sizes) < 1:
            raise ValueError(f"layer_sizes={list(self.layer_sizes)} must be positive integers.")
        if not callable(getattr(nn, self.activation, None)):
            raise ValueError(
                f"activation={self.activation} is no function of flax.linen (relu, tanh, gelu...)."
            )

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
