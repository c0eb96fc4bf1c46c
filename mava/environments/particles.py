"""How particles move in MPE (Lowe et al. 2017, arXiv:1706.02275), as Iqbal & Sha 2019 changed it.

N particles in an endless plane.
"""

import jax
import jax.numpy as jnp

TIME_STEP = 0.1
DAMPING = 0.25  # share of a velocity that is lost in a step
THRUST = 1.5**2  # acceleration by a push: their code multiplies by its `accel`, 1.5, twice
MAX_SPEED = 1.0
NUM_MOVES = 5  # stay, right, left, up, down


def push(move: jax.Array) -> jax.Array:
    """Returns the accelerations (N, 2) by moves (N,), int32 below NUM_MOVES."""
    x = (move == 1).astype(jnp.float32) - (move == 2)
    y = (move == 3).astype(jnp.float32) - (move == 4)
    return THRUST * jnp.stack([x, y], axis=-1)


def advance(
    positions: jax.Array, velocities: jax.Array, accelerations: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns positions and velocities one step later; all are (N, 2)."""
    velocities = (1.0 - DAMPING) * velocities + TIME_STEP * accelerations
    speeds = distances(velocities, jnp.zeros(2))[:, None]
    velocities = velocities * jnp.where(speeds > MAX_SPEED, MAX_SPEED / speeds, 1.0)
    return positions + TIME_STEP * velocities, velocities


def distances(points: jax.Array, others: jax.Array) -> jax.Array:
    """Returns the distances (...) of points (..., 2) and others (..., 2), which broadcast."""
    apart = points - others
    return jnp.sqrt(apart[..., 0] ** 2 + apart[..., 1] ** 2)
