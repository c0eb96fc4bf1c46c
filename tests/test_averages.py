"""Forgotten averages are refused before anything is trained; averaged parameters stay equal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mava import experiment, programs
from mava.config import UserError
from mava.utils import parallel
from mava.utils.varying import varying_axes
from tests.running import TINY, make_run, system_module, tiny

ONE = (*TINY, "arch.num_devices=1")


def compile_all(module, run):
    _, system, plan = experiment.build(module, run)
    return programs.trace_system(system, plan)


@pytest.mark.parametrize("axes", [(), ("device",), ("replica",)], ids=["both", "replica", "device"])
def test_a_forgotten_average_is_refused(axes, monkeypatch):
    """With one device and one replica, where nothing would drift yet."""
    module = system_module("ff_ippo")
    monkeypatch.setattr(module, "pmean", lambda x: jax.lax.pmean(x, axes) if axes else x)
    with pytest.raises(UserError, match="forgotten average"):
        compile_all(module, make_run("ff_ippo", *ONE, probe="RightAction"))


def test_forgotten_metrics_are_refused(monkeypatch):
    module = system_module("ff_ippo")
    monkeypatch.setattr(parallel.jax.lax, "pmax", lambda x, axes: x)
    with pytest.raises(UserError, match="forgotten average"):
        compile_all(module, make_run("ff_ippo", *ONE, probe="RightAction"))


def test_the_right_update_needs_no_second_look(monkeypatch):
    """`varying_axes` alone clears a correct system: the slow check is never asked."""
    monkeypatch.setattr(programs, "check_averages", None)
    for name in ("ff_ippo", "ff_mappo", "rec_ippo", "rec_mappo", "ff_maac"):
        options = (*tiny(name), "arch.num_devices=1")
        compile_all(system_module(name), make_run(name, *options, probe="RightAction"))


def test_a_state_of_another_shape_is_refused(monkeypatch):
    module = system_module("ff_ippo")
    learn = module.learn

    def growing(algo, learner_state, samples, key):
        state, metrics = learn(algo, learner_state, samples, key)
        return state.replace(params=jax.tree.map(lambda x: x[None], state.params)), metrics

    monkeypatch.setattr(module, "learn", growing)
    with pytest.raises(UserError, match="changes the structure, shapes or dtypes"):
        compile_all(module, make_run("ff_ippo", *ONE, probe="RightAction"))


BOTH = frozenset(parallel.AXES)


def index_in_loop(x):
    return x + 1 + jax.lax.axis_index("device")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda shared, own: shared + 1.0, frozenset()),
        (lambda shared, own: shared + own, BOTH),
        (lambda shared, own: jax.lax.pmean(own, parallel.AXES), frozenset()),
        (lambda shared, own: jax.lax.pmean(own, "device"), frozenset({"replica"})),
        (lambda shared, own: jax.lax.psum(own, "replica"), frozenset({"device"})),
        (lambda shared, own: jax.lax.axis_index("device"), frozenset({"device"})),
        (lambda shared, own: jnp.where(own > 0, shared, shared), BOTH),
        (lambda shared, own: jax.lax.cond(own > 0, lambda: 1.0, lambda: 2.0), BOTH),
        (lambda shared, own: jax.jit(lambda x: jax.lax.pmean(x, parallel.AXES))(own), frozenset()),
        (lambda shared, own: jax.lax.fori_loop(0, own.astype(int), lambda i, x: x + i, 1), BOTH),
        (lambda shared, own: jax.lax.while_loop(lambda x: x < 3, index_in_loop, 0), BOTH),
        (lambda shared, own: jax.checkpoint(lambda: jax.lax.axis_index("device"))(), BOTH),
        (lambda shared, own: jax.lax.ppermute(shared, "device", [(0, 0)]), BOTH),
        (  # into the carry in the second round only, by way of the other carry
            lambda shared, own: jax.lax.scan(
                lambda c, _: ((c[1], c[1] + own), None), (shared, shared), None, length=3
            )[0][0],
            BOTH,
        ),
        (
            lambda shared, own: jax.lax.scan(
                lambda c, x: (c + jax.lax.pmean(x, parallel.AXES), None), shared, own[None]
            )[0],
            frozenset(),
        ),
    ],
)
def test_varying_axes(function, expected):
    jaxpr = jax.make_jaxpr(function, axis_env=[("device", 1), ("replica", 1)])(1.0, jnp.float32(1))
    assert varying_axes(jaxpr.jaxpr, [frozenset(), BOTH]) == [expected]


@pytest.mark.parametrize(
    ("name", "devices", "replicas"),
    [("ff_ippo", *axes) for axes in ((2, 1), (1, 2), (2, 2))]
    + [("ff_mappo", 2, 2), ("rec_mappo", 2, 2)],
)
def test_devices_and_replicas_agree(name, devices, replicas):
    """After training, every device holds the same parameters and another stream of experience."""
    from concurrent.futures import ThreadPoolExecutor

    module = system_module(name)
    options = (f"arch.num_devices={devices}", f"system.update_batch_size={replicas}")
    run = make_run(name, *tiny(name), *options, probe="Cut")
    env, system, plan = experiment.build(module, run)
    with ThreadPoolExecutor(4) as pool:
        compiled = programs.compile_programs(env, system, plan, run, pool)
        setup, block = compiled.setup.result(), compiled.block.result()
    key = jax.random.key(0)
    learner_state, actor_state, _ = setup(key, programs.split_keys(key, plan), ())
    start = jax.device_get(learner_state.params)
    learner_state, actor_state, metrics, bad, _ = block(learner_state, actor_state, np.int32(3), ())
    assert int(bad) == -1
    assert float(metrics.episodes["episode_length"].count) == 3 * 8 * devices * replicas
    for before, leaf in zip(
        jax.tree.leaves(start), jax.tree.leaves(learner_state.params), strict=True
    ):
        shards = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert len(shards) == devices
        assert all(np.array_equal(shards[0], shard) for shard in shards)
        assert not np.array_equal(before, shards[0])
    keys = jax.random.key_data(actor_state.key).reshape(devices * replicas, -1)
    assert len(np.unique(keys, axis=0)) == devices * replicas


def test_replicas_equal_one_big_batch():
    """Two replicas of 4 environments learn what one replica of 8 learns from the same samples."""
    module = system_module("ff_mappo")
    algos, states = {}, {}
    for num_envs in (4, 8):
        run = make_run(
            "ff_mappo", *ONE, f"arch.num_envs={num_envs}", "system.num_minibatches=1",
            probe="RightAction",
        )  # fmt: skip
        _, system, _ = experiment.build(module, run)
        algos[num_envs], states[num_envs] = system.update.args[0], system
    learner_state = states[8].init(jax.random.key(0))
    actor_state, trajectory = module.rollout(
        algos[8], learner_state.params, states[8].reset(jax.random.key(1))
    )

    def learn(algo, trajectory, final_observation):
        samples = module.make_samples(algo, learner_state.params, trajectory, final_observation)
        return module.learn(algo, learner_state, samples, jax.random.key(2))[0].params

    def mapped(algo, trajectory, observation, size):
        inner = jax.vmap(
            lambda t, o: learn(algo, t, o), (0, 0), axis_name="replica", axis_size=size
        )
        outer = jax.vmap(inner, (0, 0), axis_name="device", axis_size=1)
        return jax.tree.map(lambda x: x[0, 0], outer(trajectory, observation))

    whole = jax.tree.map(lambda x: x[None, None], (trajectory, actor_state.observation))
    halves = (
        jax.tree.map(
            lambda x: jnp.moveaxis(x.reshape(x.shape[0], 2, 4, *x.shape[2:]), 1, 0)[None],
            trajectory,
        ),
        jax.tree.map(lambda x: x.reshape(1, 2, 4, *x.shape[1:]), actor_state.observation),
    )
    one = mapped(algos[8], *whole, 1)
    two = mapped(algos[4], *halves, 2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one, two)
