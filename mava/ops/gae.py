"""Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438)."""

import chex
import jax
import jax.numpy as jnp


def gae(
    reward: jax.Array,
    discount: jax.Array,
    last: jax.Array,
    value: jax.Array,
    next_value: jax.Array,
    gamma: float,
    gae_lambda: float,
) -> tuple[jax.Array, jax.Array]:
    """Returns advantages and value targets, both (T, E, N).

    delta_t = r_t + gamma d_t V(s'_t) - V(s_t), A_t = delta_t + gamma lambda (1 - last_t) A_{t+1}
    (eq. 11, 16), where s'_t is the true successor of s_t. A termination (d_t = 0) takes the value
    of the successor out; a truncation (last_t, d_t = 1) keeps it. Either stops the recursion: the
    episode's for all agents, a single agent's (d_t = 0, not last_t) for that agent.

    Args:
        reward: (T, E, N).
        discount: (T, E, N): 0 = terminated, 1 = goes on.
        last: (T, E), bool: the episode ended or was cut with this step.
        value: (T, E, N): V(s_t).
        next_value: (T, E, N): V(s'_t), of the successor before any reset.
        gamma: discount factor, [0, 1].
        gae_lambda: lambda, [0, 1].
    """
    chex.assert_rank([reward, last], [3, 2])
    chex.assert_equal_shape([reward, discount, value, next_value])
    chex.assert_equal_shape_prefix([reward, last], 2)

    delta = reward + gamma * discount * next_value - value
    decay = gamma * gae_lambda * discount * (1.0 - last.astype(reward.dtype))[..., None]

    def step(advantage: jax.Array, xs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        delta_t, decay_t = xs
        advantage = delta_t + decay_t * advantage
        return advantage, advantage

    _, advantages = jax.lax.scan(step, jnp.zeros_like(delta[0]), (delta, decay), reverse=True)
    return advantages, advantages + value
