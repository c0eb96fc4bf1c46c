"""Distributions over actions. (Importing distrax, with TensorFlow Probability, takes as long as
importing JAX.)
"""

import jax
import jax.numpy as jnp
from flax.struct import PyTreeNode


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

    def entropy(self) -> jax.Array:
        """Returns -sum p log p in nats, (...)."""
        return -jnp.sum(jnp.exp(self.log_probs) * self.log_probs, axis=-1)

    def sample(self, key: jax.Array) -> jax.Array:
        """Returns actions (...), int32, drawn with one key for the batch."""
        return jax.random.categorical(key, self.log_probs)

    def mode(self) -> jax.Array:
        """Returns the likeliest actions (...), int32."""
        return jnp.argmax(self.log_probs, axis=-1)
