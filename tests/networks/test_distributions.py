import jax
import jax.numpy as jnp
import numpy as np

from mava.networks import CategoricalHead
from mava.networks.distributions import Categorical


def test_hand_worked():
    logits = jnp.log(jnp.array([[1.0, 2.0, 5.0], [1.0, 1.0, 6.0]]))
    mask = jnp.array([[True, True, True], [True, True, False]])
    policy = Categorical.masked(logits, mask)
    log_prob = policy.log_prob(jnp.array([2, 0]))
    np.testing.assert_allclose(np.exp(log_prob), [5 / 8, 1 / 2], rtol=1e-6)
    p = np.array([1, 2, 5]) / 8
    expected = [-(p * np.log(p)).sum(), np.log(2)]
    np.testing.assert_allclose(policy.entropy(), expected, rtol=1e-6)
    np.testing.assert_array_equal(policy.mode()[0], 2)
    assert policy.mode()[1] != 2


def test_masked_actions_are_never_taken_and_carry_no_gradient():
    mask = jnp.array([True, False, True, False])

    def loss(logits):
        policy = Categorical.masked(logits, mask)
        return policy.entropy() + policy.log_prob(jnp.int32(2))

    gradient = jax.grad(loss)(jnp.array([0.3, 50.0, -0.2, 1.0]))
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[~mask], 0.0)
    assert (gradient[mask] != 0).all()

    policy = Categorical.masked(jnp.zeros((10_000, 4)), mask)
    actions = policy.sample(jax.random.key(0))
    counts = np.bincount(actions, minlength=4)
    assert counts[1] == counts[3] == 0
    assert abs(counts[0] - 5000) < 200


def test_only_one_legal_action():
    policy = Categorical.masked(jnp.array([3.0, -2.0]), jnp.array([False, True]))
    assert policy.entropy() == 0.0
    assert policy.log_prob(jnp.int32(1)) == 0.0


def test_head_gives_distributions_of_the_batch():
    head = CategoricalHead(5)
    x, mask = jnp.ones((3, 2, 8)), jnp.ones((3, 2, 5), bool)
    policy = head.apply(head.init(jax.random.key(0), x, mask), x, mask)
    assert policy.entropy().shape == (3, 2)
