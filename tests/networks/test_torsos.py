import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mava.networks import MLPTorso


@pytest.mark.parametrize("batch", [(), (3,), (3, 2), (4, 3, 2)])
@pytest.mark.parametrize("use_layer_norm", [False, True])
def test_leading_axes_do_not_matter(batch, use_layer_norm):
    torso = MLPTorso(layer_sizes=(8, 4), activation="tanh", use_layer_norm=use_layer_norm)
    x = jax.random.normal(jax.random.key(0), (*batch, 5))
    params = torso.init(jax.random.key(1), x)
    out = torso.apply(params, x)
    assert out.shape == (*batch, 4)
    rows = jnp.stack([torso.apply(params, row) for row in x.reshape(-1, 5)])
    np.testing.assert_allclose(out.reshape(-1, 4), rows, atol=1e-6)


@pytest.mark.parametrize("options", [{"layer_sizes": ()}, {"layer_sizes": (8, 0)}])
def test_refuses_bad_sizes(options):
    with pytest.raises(ValueError, match="layer_sizes"):
        MLPTorso(**options)


def test_refuses_an_unknown_activation():
    with pytest.raises(ValueError, match="activation=rellu"):
        MLPTorso(activation="rellu")
