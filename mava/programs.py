"""The compiled programs of a run: update blocks and evaluations over devices and replicas.

D devices and U replicas are known here and in `mava.utils.parallel`; a system never sees them.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from mava.config import RunConfig, UserError
from mava.evaluator import make_evaluate
from mava.plan import Plan
from mava.types import System
from mava.utils.parallel import merge_metrics
from mava.utils.varying import ALL, NONE, varying_axes
from mava.wrappers.vector import VectorEnv


def over_replicas(function: Callable, num_replicas: int, in_axes: tuple, out_axes: Any) -> Callable:
    """Maps `function` over the replica axis; axis 0 in `in_axes` and `out_axes` is mapped.

    One replica has no axis of its own: under a real vmap `cond` and `while_loop` would compute
    both branches and run as long as the slowest.
    """
    if num_replicas == 1:
        in_axes, out_axes = jax.tree.map(lambda axis: None, (in_axes, out_axes))
    return jax.vmap(function, in_axes, out_axes, axis_name="replica", axis_size=num_replicas)


def over_devices(
    devices: list[jax.Device],
    debug: bool,
    function: Callable,
    in_axes: tuple,
    out_axes: Any = 0,
    donate_argnums: tuple[int, ...] = (),
) -> Any:
    """Maps `function` over the device axis and compiles it.

    To debug, one device is mapped by a vmap: JAX looks for a NaN inside a jit, not inside a pmap.
    """
    if debug:
        return jax.jit(jax.vmap(function, in_axes, out_axes, axis_name="device"))
    return jax.pmap(
        function,
        axis_name="device",
        devices=devices,
        in_axes=in_axes,
        out_axes=out_axes,
        donate_argnums=donate_argnums,
    )


class Traced(NamedTuple):
    """A function traced once."""

    jaxpr: Any
    shapes: Any  # of the results

    def run(self, *arguments: Any) -> Any:
        """Calls the function: binds its operations anew, without its Python."""
        results = jax.extend.core.jaxpr_as_fun(self.jaxpr)(*jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(self.shapes), results)


def trace(function: Callable, *arguments: Any, axes: dict[str, int] | None = None) -> Traced:
    """Traces `function` for arguments of these shapes, inside the named axes."""
    make = jax.make_jaxpr(function, axis_env=list((axes or {}).items()), return_shape=True)
    return Traced(*make(*arguments))


def trace_system(system: System, plan: Plan) -> tuple[Traced, Traced, Traced]:
    """Returns init, reset and update (without its Experience), traced once for all of a run.

    Raises UserError if an average over devices or replicas was forgotten.
    """
    key = jax.random.key(0)
    init, reset = trace(system.init, key), trace(system.reset, key)
    sizes = {"device": len(plan.devices), "replica": plan.num_replicas}
    states = (init.shapes, reset.shapes)
    update = trace(lambda *states: system.update(*states)[:3], *states, axes=sizes)
    before, after = (
        jax.tree.map(lambda x: (x.shape, str(x.dtype)), states)
        for states in (states, update.shapes[:2])
    )
    if before != after:
        raise UserError("`update` changes the structure, shapes or dtypes of a state.")

    inputs = [NONE] * len(jax.tree.leaves(init.shapes))
    inputs += [ALL] * len(jax.tree.leaves(reset.shapes))
    outputs = varying_axes(update.jaxpr.jaxpr, inputs)
    learner_state, _, metrics = jax.tree.unflatten(jax.tree.structure(update.shapes), outputs)
    if any(jax.tree.leaves((learner_state, metrics))):
        check_averages(update, states, sizes)
    return init, reset, update


def check_averages(update: Traced, states: tuple[Any, Any], sizes: dict[str, int]) -> None:
    """Raises UserError if an average over devices or replicas was forgotten.

    Both axes are mapped, also when of size 1: what an update leaves different along one of them
    can't leave through `out_axes=None`. (A pmap checks nothing: parameters would drift apart.)
    Exact but slow, a second for RWARE: only asked when `varying_axes` can't rule it out.
    """
    axes = ((None, 0), (None, 0, None))
    over_both = jax.vmap(
        jax.vmap(update.run, *axes, axis_name="replica"), *axes, axis_name="device"
    )
    stacked = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((*sizes.values(), *x.shape), x.dtype), states[1]
    )
    try:
        jax.eval_shape(over_both, states[0], stacked)
    except ValueError as error:
        if "out_axes" not in str(error):
            raise
        raise UserError(
            "A forgotten average: the LearnerState or the Metrics of `update` differ between "
            "devices or replicas. Average gradients and statistics with "
            "mava.utils.parallel.pmean, and make metrics with reduce_metrics."
        ) from error


def make_block(update: Traced, num_replicas: int) -> Callable:
    """Returns block(learner_state, actor_state, num_updates), to be mapped over devices.

    It gives the two new states, the merged Metrics and the index of the first update with a NaN
    or an infinity among its learn metrics, -1 if there is none.
    """
    update_all = over_replicas(update.run, num_replicas, (None, 0), (None, 0, None))
    no_episodes = {"min": jnp.inf, "max": -jnp.inf}

    def zeros(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = getattr(path[-1], "name", "")
        return jnp.full(leaf.shape, no_episodes.get(name, 0.0), leaf.dtype)

    def body(i: jax.Array, carry: tuple) -> tuple:
        learner_state, actor_state, metrics, first_bad = carry
        learner_state, actor_state, new = update_all(learner_state, actor_state)
        finite = jnp.all(jnp.array([jnp.isfinite(x) for x in jax.tree.leaves(new.learn)]))
        first_bad = jnp.where((first_bad < 0) & ~finite, i, first_bad)
        return learner_state, actor_state, merge_metrics(metrics, new), first_bad

    def block(learner_state: Any, actor_state: Any, num_updates: jax.Array) -> tuple:
        metrics = jax.tree.map_with_path(zeros, update.shapes[2])
        carry = (learner_state, actor_state, metrics, jnp.int32(-1))
        return jax.lax.fori_loop(0, num_updates, body, carry)

    return block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """The programs of a run; calling a future's result runs it on all devices."""

    setup: Future  # (init_key, reset_keys) -> LearnerState, ActorState
    block: Future  # (LearnerState, ActorState, num_updates) -> ..., Metrics, first bad update
    evaluate: Future  # (act_params, key, num_episodes, device indices) -> results (D, c, rounds)


def compile_programs(
    env: VectorEnv, system: System, plan: Plan, config: RunConfig, pool: ThreadPoolExecutor
) -> Programs:
    """Starts compiling all programs, side by side: XLA lets go of Python's lock while it works.

    The evaluation's turn comes when the block is compiled, while the first block runs.
    """
    num_devices, num_replicas = len(plan.devices), plan.num_replicas
    init, reset, update = trace_system(system, plan)
    over_all = functools.partial(over_devices, plan.devices, config.arch.debug)

    def submit(program: Any, *arguments: Any, runs_once: bool = False) -> Future:
        if config.arch.debug:  # JAX looks for a NaN where it compiles by itself
            return pool.submit(lambda: program)
        options = cpu_compiler_options(runs_once) if plan.devices[0].platform == "cpu" else None
        return pool.submit(program.lower(*arguments).compile, options)

    key, count = jax.random.key(0), np.int32(1)
    keys = split_keys(key, plan)
    setup = over_all(
        lambda key, keys: (init.run(key), over_replicas(reset.run, num_replicas, (0,), 0)(keys)),
        in_axes=(None, 0),
        out_axes=(None, 0),
    )
    setup_job = submit(setup, key, keys, runs_once=True)
    block = over_all(
        make_block(update, num_replicas),
        in_axes=(None, 0, None),
        out_axes=(None, 0, None, None),
        donate_argnums=(1,),
    )
    actor_states = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((*keys.shape, *x.shape), x.dtype), reset.shapes
    )
    block_job = submit(block, init.shapes, actor_states, count)

    copies = min(math.ceil(plan.num_episodes / num_devices), plan.num_envs * num_replicas)
    evaluate = make_evaluate(
        env.env,
        system,
        copies,
        num_devices,
        max(plan.num_episodes, plan.num_absolute_episodes),
        config.arch.evaluation_greedy,
    )

    def compile_evaluate() -> Callable:
        block_job.result()
        program = over_all(evaluate, in_axes=(None, None, None, 0))
        act_params = jax.eval_shape(system.act_params, init.shapes)
        devices = np.arange(num_devices, dtype=np.int32)
        return submit(program, act_params, key, count, devices).result()

    evaluate_job = pool.submit(compile_evaluate)
    return Programs(setup=setup_job, block=block_job, evaluate=evaluate_job)


def cpu_compiler_options(runs_once: bool) -> dict[str, int]:
    """Returns XLA's options on a CPU; a level in XLA_FLAGS wins.

    LLVM's level 1 compiles a fifth faster than the default of 3, and the result runs as fast;
    level 0 compiles a third faster, and the result runs at a third of the speed.
    """
    level = "xla_backend_optimization_level"
    return {} if level in os.environ.get("XLA_FLAGS", "") else {level: 0 if runs_once else 1}


def split_keys(key: jax.Array, plan: Plan) -> jax.Array:
    """Returns keys (D,) or, with more than one replica, (D, U)."""
    num_devices, num_replicas = len(plan.devices), plan.num_replicas
    shape = (num_devices,) if num_replicas == 1 else (num_devices, num_replicas)
    return jax.random.split(key, shape)
