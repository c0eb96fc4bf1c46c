import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mava.networks import CategoricalHead, make_action_head
from mava.networks.distributions import Categorical, MultiCategorical, TanhNormal
from mava.types import Continuous, MultiDiscrete


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


def test_several_choices_are_independent():
    first = Categorical.masked(jnp.log(jnp.array([1.0, 3.0])), jnp.array([True, True]))
    second = Categorical.masked(jnp.log(jnp.array([1.0, 1.0, 2.0])), jnp.array([True, True, False]))
    policy = MultiCategorical(parts=(first, second))
    np.testing.assert_allclose(np.exp(policy.log_prob(jnp.array([1, 0]))), 3 / 4 / 2, rtol=1e-6)
    np.testing.assert_allclose(policy.entropy(), first.entropy() + np.log(2), rtol=1e-6)
    np.testing.assert_array_equal(policy.mode(), [1, 0])

    head = make_action_head(MultiDiscrete((2, 3)))
    x, mask = jnp.ones((4000, 8)), jnp.array([True, True, True, False, True])
    policy = head.apply(head.init(jax.random.key(0), x, mask), x, mask)
    actions = policy.sample(jax.random.key(1))
    assert actions.shape == (4000, 2)
    assert set(np.unique(actions[:, 0])) == {0, 1}
    assert set(np.unique(actions[:, 1])) == {0, 2}
    correlation = np.corrcoef(actions.T)[0, 1]
    assert abs(correlation) < 0.06  # keys of their own


def tanh_normal(mean, scale):
    return TanhNormal(mean=jnp.array([mean]), scale=jnp.array([scale]), mask=jnp.array([True]))


@pytest.mark.parametrize(("mean", "scale"), [(0.0, 1.0), (0.7, 0.3), (-2.0, 1.5), (0.0, 4.0)])
def test_density_of_squashed_actions(mean, scale):
    """It integrates to 1, edges included, and agrees with frequencies and with the entropy."""
    policy = tanh_normal(mean, scale)
    actions = np.linspace(-1, 1, 200_001)
    density = np.exp(jax.vmap(policy.log_prob)(jnp.array(actions[:, None], jnp.float32)))
    np.testing.assert_allclose(np.trapezoid(density, actions), 1.0, atol=2e-3)

    keys = jax.random.split(jax.random.key(0), 100_000)
    samples = np.array(jax.vmap(policy.sample)(keys))[:, 0]
    for low, high in ((-1, -0.9995), (-0.9, 0.2), (0.5, 0.9), (0.9995, 1)):
        inside = (actions >= low) & (actions <= high)
        expected = np.trapezoid(density[inside], actions[inside])
        if abs(low) < 0.99:
            frequency = np.mean((samples >= low) & (samples <= high))
            np.testing.assert_allclose(frequency, expected, atol=0.01)
    entropies = jax.vmap(policy.entropy)(keys)
    if scale < 2:  # else much of it lies in the edges, where the density is a stand-in
        expected = -np.trapezoid(density * np.log(density + 1e-30), actions)
        np.testing.assert_allclose(np.mean(entropies), expected, atol=0.03)


@pytest.mark.parametrize("action", [-1.0, -0.999, -0.5, 0.0, 0.9989, 0.9991, 1.0])
def test_squashed_actions_have_finite_gradients_everywhere(action):
    def log_prob(mean, scale):
        return tanh_normal(mean, scale).log_prob(jnp.array([action]))

    gradients = jax.grad(log_prob, (0, 1))(0.1, 0.5)
    assert np.isfinite(gradients).all()
    step = 1e-2  # uphill: the mean moves towards the action
    assert np.sign(log_prob(0.1 + step, 0.5) - log_prob(0.1 - step, 0.5)) == np.sign(gradients[0])


def test_a_number_that_an_agent_does_not_have():
    head = make_action_head(Continuous(2))
    x, mask = jnp.ones((3, 8)), jnp.array([[True, True], [True, False], [True, True]])
    params = head.init(jax.random.key(0), x, mask)
    policy = head.apply(params, x, mask)
    for action in (policy.sample(jax.random.key(1)), policy.mode()):
        assert action.shape == (3, 2)
        np.testing.assert_array_equal(action[1, 1], 0.0)
        assert (action[mask] != 0).all()

    def loss(mean):
        one = policy.replace(mean=mean)
        return jnp.sum(one.log_prob(jnp.full((3, 2), 0.3)) + one.entropy(jax.random.key(2)))

    gradient = jax.grad(loss)(policy.mean)
    np.testing.assert_array_equal(gradient[1, 1], 0.0)
    assert (gradient[mask] != 0).all()
