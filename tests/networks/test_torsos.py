import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mava.networks import CNNTorso, MLPTorso


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


@pytest.mark.parametrize("use_layer_norm", [False, True])
def test_convolutions_are_those_of_xla(use_layer_norm, monkeypatch):
    """With even and odd kernels, strides and sides; leading axes do not matter."""
    sizes = {"channel_sizes": (6, 4, 5), "kernel_sizes": (3, 2, 4), "strides": (1, 2, 3)}
    torso = CNNTorso(**sizes, layer_sizes=(8,), use_layer_norm=use_layer_norm)
    x = jax.random.normal(jax.random.key(0), (3, 2, 9, 8, 5))
    params = torso.init(jax.random.key(1), x)
    kernel = params["params"]["Conv_0"]["kernel"].reshape(45, 6)
    np.testing.assert_allclose(kernel.T @ kernel, 2 * np.eye(6), atol=1e-5)

    def loss(params, x):
        return jnp.sum(torso.apply(params, x) ** 2)

    ours = jax.value_and_grad(loss, argnums=(0, 1))(params, x)
    out = torso.apply(params, x)
    assert out.shape == (3, 2, 8)
    np.testing.assert_allclose(torso.apply(params, x[1, 1]), out[1, 1], atol=1e-5)
    monkeypatch.setattr(jax, "default_backend", lambda: "another")
    theirs = jax.value_and_grad(loss, argnums=(0, 1))(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4), ours, theirs)


def test_every_convolution_needs_its_sizes():
    with pytest.raises(ValueError, match="one entry for each convolution"):
        CNNTorso(channel_sizes=(8, 8), kernel_sizes=(3,))
