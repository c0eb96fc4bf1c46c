"""Distributions over actions. (Importing distrax, with TensorFlow Probability, takes as long as
importing JAX.)

All have `log_prob(action)`, `entropy(key)`, `sample(key)` and `mode()`; the entropy needs its key
only where it is estimated.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax.struct import PyTreeNode
from jax.scipy.stats import norm


class Categorical(PyTreeNode):
    """A choice among A actions; the leading axes of `log_probs` are those of the batch."""

    log_probs: jax.Array  # (..., A), normalised

    @classmethod
    def masked(cls, logits: jax.Array, action_mask: jax.Array) -> "Categorical":
        """Returns the distribution over the actions (..., A) where `action_mask` is set."""
        # Not -inf: the entropy of an illegal action would be 0 * -inf = NaN.
        legal = jnp.where(action_mask, logits, jnp.finfo(logits.dtype).min)
        return cls(log_probs=jax.nn.log_softmax(legal))

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Returns log p(action), (...), for actions (...), int32."""
        return jnp.take_along_axis(self.log_probs, action[..., None], axis=-1)[..., 0]

    def entropy(self, key: jax.Array | None = None) -> jax.Array:
        """Returns -sum p log p in nats, (...)."""
        return -jnp.sum(jnp.exp(self.log_probs) * self.log_probs, axis=-1)

    def sample(self, key: jax.Array) -> jax.Array:
        """Returns actions (...), int32, drawn with one key for the batch."""
        return jax.random.categorical(key, self.log_probs)

    def mode(self) -> jax.Array:
        """Returns the likeliest actions (...), int32."""
        return jnp.argmax(self.log_probs, axis=-1)


class MultiCategorical(PyTreeNode):
    """K independent choices, among A_1, ..., A_K actions."""

    parts: tuple[Categorical, ...]

    @classmethod
    def masked(
        cls, logits: jax.Array, action_mask: jax.Array, num_actions: tuple[int, ...]
    ) -> "MultiCategorical":
        """Returns the distribution over the choices (..., A_1 + ... + A_K) where `action_mask` is
        set; `num_actions` is (A_1, ..., A_K).
        """
        ends = np.cumsum(num_actions)[:-1]
        parts = zip(*(jnp.split(x, ends, axis=-1) for x in (logits, action_mask)), strict=True)
        return cls(parts=tuple(Categorical.masked(*part) for part in parts))

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Returns log p(action), (...), for actions (..., K), int32."""
        log_probs = [part.log_prob(action[..., k]) for k, part in enumerate(self.parts)]
        return jnp.sum(jnp.stack(log_probs), axis=0)

    def entropy(self, key: jax.Array | None = None) -> jax.Array:
        """Returns the sum of the parts' entropies in nats, (...)."""
        return jnp.sum(jnp.stack([part.entropy() for part in self.parts]), axis=0)

    def sample(self, key: jax.Array) -> jax.Array:
        """Returns actions (..., K), int32, drawn with one key for the batch."""
        keys = jax.random.split(key, len(self.parts))
        samples = [part.sample(k) for part, k in zip(self.parts, keys, strict=True)]
        return jnp.stack(samples, axis=-1)

    def mode(self) -> jax.Array:
        """Returns the likeliest actions (..., K), int32."""
        return jnp.stack([part.mode() for part in self.parts], axis=-1)


EDGE = 0.999  # of the actions: beyond it the density is taken as even
EDGE_INVERSE = float(np.arctanh(EDGE))


class TanhNormal(PyTreeNode):
    """a = tanh(u) with independent normal u: actions in [-1, 1].

    Near the edges float32 can not give back u from a. There, |a| > 0.999, the density is the tail's
    probability spread evenly, so that all of it still is 1. A component that an agent does not
    have is always 0 and counts in neither probability nor entropy.
    """

    mean: jax.Array  # (..., D), of u
    scale: jax.Array  # (..., D), of u, > 0
    mask: jax.Array  # (..., D), bool: components that the agent has

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Returns log p(action), (...), for actions (..., D)."""
        inner = jnp.clip(action, -EDGE, EDGE)
        log_density = norm.logpdf(jnp.arctanh(inner), self.mean, self.scale)
        log_density -= jnp.log1p(-(inner**2))  # da/du = 1 - a^2
        distance = jnp.where(action > 0, self.mean - EDGE_INVERSE, -EDGE_INVERSE - self.mean)
        log_edge = norm.logcdf(distance / self.scale) - np.log(1 - EDGE)
        log_prob = jnp.where(jnp.abs(action) > EDGE, log_edge, log_density)
        return jnp.sum(log_prob, axis=-1, where=self.mask)

    def entropy(self, key: jax.Array) -> jax.Array:
        """Returns an unbiased estimate of the entropy in nats, (...), from one draw."""
        u = self.mean + self.scale * jax.random.normal(key, self.mean.shape)
        of_normal = 0.5 * np.log(2 * np.pi * np.e) + jnp.log(self.scale)
        log_slope = 2 * (np.log(2) - u - jax.nn.softplus(-2 * u))  # log(1 - tanh(u)^2)
        return jnp.sum(of_normal + log_slope, axis=-1, where=self.mask)

    def sample(self, key: jax.Array) -> jax.Array:
        """Returns actions (..., D), drawn with one key for the batch."""
        u = self.mean + self.scale * jax.random.normal(key, self.mean.shape)
        return jnp.where(self.mask, jnp.tanh(u), 0.0)

    def mode(self) -> jax.Array:
        """Returns tanh of the likeliest u, (..., D)."""
        return jnp.where(self.mask, jnp.tanh(self.mean), 0.0)


Policy = Categorical | MultiCategorical | TanhNormal
