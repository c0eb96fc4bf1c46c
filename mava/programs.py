"""The compiled programs of a run: update blocks and evaluations over devices and replicas.

D devices and U replicas are known here and in `mava.utils.parallel`, S seeds here alone; a system
never sees them. The axes of an array stand in this order, those of size 1 but D are left out:
a LearnerState's (S, ...), an ActorState's (D, S, U, ...).
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
from mava.types import MarlEnv, System
from mava.utils.parallel import merge_metrics
from mava.utils.varying import ALL, NONE, varying_axes
from mava.wrappers.vector import VectorEnv

RECORDED_BYTES = 2**25  # of recorded steps that wait on a device until a block returns them
ONE_BY_ONE = ("cpu",)  # platforms that train one seed after the other


def over_replicas(function: Callable, num_replicas: int, in_axes: tuple, out_axes: Any) -> Callable:
    """Maps `function` over the replica axis; axis 0 in `in_axes` and `out_axes` is mapped.

    One replica has no axis of its own: under a real vmap `cond` and `while_loop` would compute
    both branches and run as long as the slowest.
    """
    if num_replicas == 1:
        in_axes, out_axes = jax.tree.map(lambda axis: None, (in_axes, out_axes))
    return jax.vmap(function, in_axes, out_axes, axis_name="replica", axis_size=num_replicas)


def over_seeds(
    function: Callable, num_seeds: int, devices: list[jax.Device], in_axes: tuple[int | None, ...]
) -> Callable:
    """Maps `function` over the seed axis; axis 0 in `in_axes` is mapped, and that of all results.

    At once they fill an accelerator. One fills a CPU, where four of ff_ippo's at once took a fifth
    longer than one by one: under a vmap `cond` computes both branches.
    """
    if num_seeds == 1:
        return function
    if devices[0].platform not in ONE_BY_ONE:
        return jax.vmap(function, in_axes)

    def one_by_one(*arguments: Any) -> Any:
        def of_one(mapped: list[Any]) -> Any:
            of_seed = iter(mapped)
            both = zip(arguments, in_axes, strict=True)
            return function(*[x if axis is None else next(of_seed) for x, axis in both])

        mapped = [x for x, axis in zip(arguments, in_axes, strict=True) if axis is not None]
        return jax.lax.map(of_one, mapped)

    return one_by_one


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


def trace_system(
    system: System,
    plan: Plan,
    to_steps: Callable[[Any], Any] | None = None,
    data: tuple[Any, ...] = (),
) -> tuple[Traced, Traced, Traced]:
    """Returns init, reset and update, traced once for all of a run.

    Args:
        system: to trace.
        plan: of the run.
        to_steps: what `update` then returns of its Experience; None: nothing, and XLA removes
            what that is made of.
        data: what `update` takes besides the states, or its shapes.

    Raises UserError if an average over devices or replicas was forgotten.
    """
    key = jax.random.key(0)
    init, reset = trace(system.init, key), trace(system.reset, key)
    sizes = {"device": len(plan.devices), "replica": plan.num_replicas}
    states = (init.shapes, reset.shapes)

    def update_and_record(*inputs: Any) -> tuple:
        *results, experience = system.update(*inputs)
        return *results, () if to_steps is None else to_steps(experience)

    update = trace(update_and_record, *states, *data, axes=sizes)
    before, after = (
        # Not the states themselves: an environment's may define what == means.
        (jax.tree.structure(x), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(x)])
        for x in (states, update.shapes[:2])
    )
    if before != after:
        raise UserError("`update` changes the structure, shapes or dtypes of a state.")

    inputs = [NONE] * len(jax.tree.leaves(init.shapes))
    inputs += [ALL] * len(jax.tree.leaves(reset.shapes))
    inputs += [NONE] * len(jax.tree.leaves(data))
    outputs = varying_axes(update.jaxpr.jaxpr, inputs)
    learner_state, _, metrics, _ = jax.tree.unflatten(jax.tree.structure(update.shapes), outputs)
    if any(jax.tree.leaves((learner_state, metrics))):
        check_averages(update, states, data, sizes)
    return init, reset, update


def check_averages(
    update: Traced, states: tuple[Any, Any], data: tuple[Any, ...], sizes: dict[str, int]
) -> None:
    """Raises UserError if an average over devices or replicas was forgotten.

    Both axes are mapped, also when of size 1: what an update leaves different along one of them
    can't leave through `out_axes=None`. (A pmap checks nothing: parameters would drift apart.)
    Exact but slow, a second for RWARE: only asked when `varying_axes` can't rule it out.
    """
    axes = ((None, 0, *[None] * len(data)), (None, 0, None, 0))
    over_both = jax.vmap(
        jax.vmap(update.run, *axes, axis_name="replica"), *axes, axis_name="device"
    )
    stacked = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((*sizes.values(), *x.shape), x.dtype), states[1]
    )
    try:
        jax.eval_shape(over_both, states[0], stacked, *data)
    except ValueError as error:
        if "out_axes" not in str(error):
            raise
        raise UserError(
            "A forgotten average: the LearnerState or the Metrics of `update` differ between "
            "devices or replicas. Average gradients and statistics with "
            "mava.utils.parallel.pmean, and make metrics with reduce_metrics."
        ) from error


def make_block(update: Traced, num_replicas: int, num_recorded: int = 0) -> Callable:
    """Returns block(learner_state, actor_state, num_updates, data), to be mapped over devices.

    It gives the two new states, the merged Metrics, the index of the first update with a NaN or an
    infinity among its learn metrics, -1 if there is none, and the steps recorded.

    Args:
        update: the system's.
        num_replicas: U.
        num_recorded: the updates whose steps are kept, the most that a call can do; 0: none are.
    """
    update_all = over_replicas(
        lambda learner_state, actor_state, data: update.run(learner_state, actor_state, *data),
        *(num_replicas, (None, 0, None), (None, 0, None, 0)),
    )
    no_episodes = {"min": jnp.inf, "max": -jnp.inf}

    def zeros(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = getattr(path[-1], "name", "")
        return jnp.full(leaf.shape, no_episodes.get(name, 0.0), leaf.dtype)

    def body(data: tuple, i: jax.Array, carry: tuple) -> tuple:
        learner_state, actor_state, metrics, first_bad, recorded = carry
        learner_state, actor_state, new, steps = update_all(learner_state, actor_state, data)
        if num_recorded:
            recorded = jax.tree.map(lambda kept, x: kept.at[i].set(x), recorded, steps)
        finite = jnp.all(jnp.array([jnp.isfinite(x) for x in jax.tree.leaves(new.learn)]))
        first_bad = jnp.where((first_bad < 0) & ~finite, i, first_bad)
        return learner_state, actor_state, merge_metrics(metrics, new), first_bad, recorded

    def block(learner_state: Any, actor_state: Any, num_updates: jax.Array, data: tuple) -> tuple:
        metrics = jax.tree.map_with_path(zeros, update.shapes[2])
        axes = (num_recorded,) if num_replicas == 1 else (num_recorded, num_replicas)
        kept = update.shapes[3] if num_recorded else ()
        recorded = jax.tree.map(lambda x: jnp.zeros((*axes, *x.shape), x.dtype), kept)
        carry = (learner_state, actor_state, metrics, jnp.int32(-1), recorded)
        return jax.lax.fori_loop(0, num_updates, functools.partial(body, data), carry)

    return block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """The programs of a run; calling a future's result runs it on all devices."""

    setup: Future  # (init_keys, reset_keys, data) -> LearnerState, ActorState, data on the devices
    block: Future  # (LearnerState, ActorState, num_updates, data) -> see `make_block`
    record: Future | None  # a block of at most `num_recorded` updates that returns their steps
    num_recorded: int
    evaluate: Future  # (act_params, keys, num_episodes, devices) -> results (D, S, c, rounds)


def compile_programs(
    env: VectorEnv,
    system: System,
    plan: Plan,
    config: RunConfig,
    pool: ThreadPoolExecutor,
    to_steps: Callable[[Any], Any] | None = None,
    data: tuple[Any, ...] = (),
) -> Programs:
    """Starts compiling all programs, side by side: XLA lets go of Python's lock while it works.

    The evaluation's turn comes when the block is compiled, while the first block runs.

    Args:
        env: the environments of one replica.
        system: to train.
        plan: of the run.
        config: what the user asked for.
        pool: to compile in.
        to_steps: what is recorded of a rollout; None: nothing.
        data: what `update` takes besides the states, or its shapes.
    """
    num_replicas, num_seeds = plan.num_replicas, plan.num_seeds
    init, reset, update = trace_system(system, plan, to_steps, data)
    debug = config.arch.debug
    over_all = functools.partial(over_devices, plan.devices, debug)
    compiler = functools.partial(make_compiler, debug=debug)
    count = np.int32(1)
    keys = setup_keys([jax.random.key(0)] * num_seeds, [jax.random.key(0)] * num_seeds, plan)
    reset_all = over_replicas(reset.run, num_replicas, (0,), 0)
    start = over_seeds(
        lambda key, keys: (init.run(key), reset_all(keys)), num_seeds, plan.devices, (0, 0)
    )
    setup = over_all(
        lambda key, keys, data: (*start(key, keys), data),
        in_axes=(None, 0, None),
        out_axes=(None, 0, None),
    )
    setup_job = pool.submit(compiler(setup, *keys, data, runs_once=True))
    learner_state = with_seeds(init.shapes, num_seeds, axis=0)
    actor_state = with_seeds(actor_state_shapes(reset.shapes, plan), num_seeds, axis=1)

    def compile_block(num_recorded: int) -> Future:
        block = make_block(update, num_replicas, num_recorded)
        program = over_all(
            over_seeds(block, num_seeds, plan.devices, (0, 0, None, None)),
            in_axes=(None, 0, None, None),
            out_axes=(None, 0, None, None, 0),
            donate_argnums=(1,),
        )
        return pool.submit(compiler(program, learner_state, actor_state, count, data))

    recorded = 0 if to_steps is None else updates_recorded_at_once(update.shapes[3], plan)
    record_job = compile_block(recorded) if recorded else None
    always = config.logger.vault.every == 1 and not config.logger.vault.has_cap
    block_job = record_job if record_job and always else compile_block(0)

    def evaluate() -> Callable:
        block_job.result()
        return compile_evaluate(
            env.env,
            system,
            jax.eval_shape(system.act_params, init.shapes),
            plan.devices,
            num_envs=plan.num_envs * num_replicas,
            num_episodes=plan.num_episodes,
            max_episodes=max(plan.num_episodes, plan.num_absolute_episodes),
            greedy=config.arch.evaluation_greedy,
            num_seeds=num_seeds,
            debug=debug,
        )

    return Programs(
        setup=setup_job,
        block=block_job,
        record=record_job,
        num_recorded=recorded,
        evaluate=pool.submit(evaluate),
    )


def updates_recorded_at_once(steps: Any, plan: Plan) -> int:
    """Returns how many updates a block that is recorded does at most: what a device keeps of them
    is bounded.

    Args:
        steps: shapes of what is recorded of an update of one replica.
        plan: of the run.
    """
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(steps))
    longest = math.ceil(plan.schedule.updates / plan.schedule.evaluations)
    return max(min(RECORDED_BYTES // (size * plan.num_replicas * plan.num_seeds), longest), 1)


def compile_evaluate(
    env: MarlEnv,
    system: System,
    act_params: Any,
    devices: list[jax.Device],
    *,
    num_envs: int,
    num_episodes: int,
    max_episodes: int,
    greedy: bool,
    num_seeds: int = 1,
    debug: bool = False,
) -> Callable:
    """Returns evaluate(act_params, keys, num_episodes, device indices), see `Programs`.

    Args:
        env: one environment, with EpisodeMetrics.
        system: whose policy plays.
        act_params: what `system.act` needs of one seed, or its shapes.
        devices: to play on.
        num_envs: episodes at once on a device, at most.
        num_episodes: as many as are played mostly.
        max_episodes: as many as can be asked for.
        greedy: passed to `system.act`.
        num_seeds: S.
        debug: see `over_devices`.
    """
    copies = min(math.ceil(num_episodes / len(devices)), num_envs)
    evaluate = make_evaluate(env, system, copies, len(devices), max_episodes, greedy)
    evaluate = over_seeds(evaluate, num_seeds, devices, (0, 0, None, None))
    program = over_devices(devices, debug, evaluate, in_axes=(None, None, None, 0))
    indices = np.arange(len(devices), dtype=np.int32)
    act_params = with_seeds(act_params, num_seeds, axis=0)
    keys, count = stack_seeds([jax.random.key(0)] * num_seeds), np.int32(1)
    return make_compiler(program, act_params, keys, count, indices, debug=debug)()


def make_compiler(
    program: Any, *arguments: Any, debug: bool, runs_once: bool = False
) -> Callable[[], Callable]:
    """Lowers what `over_devices` made for arguments like these; returns what then compiles it."""
    if debug:  # JAX looks for a NaN where it compiles by itself
        return lambda: program
    on_cpu = jax.local_devices()[0].platform == "cpu"
    options = cpu_compiler_options(runs_once) if on_cpu else None
    return functools.partial(program.lower(*arguments).compile, options)


def cpu_compiler_options(runs_once: bool) -> dict[str, int]:
    """Returns XLA's options on a CPU; a level in XLA_FLAGS wins.

    LLVM's level 1 compiles a fifth faster than the default of 3, and the result runs as fast;
    level 0 compiles a third faster, and the result runs at a third of the speed.
    """
    level = "xla_backend_optimization_level"
    return {} if level in os.environ.get("XLA_FLAGS", "") else {level: 0 if runs_once else 1}


def stream_axes(plan: Plan) -> tuple[int, ...]:
    """Returns the leading axes of a seed's streams: (D,) or, with replicas, (D, U)."""
    num_devices, num_replicas = len(plan.devices), plan.num_replicas
    return (num_devices,) if num_replicas == 1 else (num_devices, num_replicas)


def split_keys(key: jax.Array, plan: Plan) -> jax.Array:
    """Returns a key for each stream of experience of a seed."""
    return jax.random.split(key, stream_axes(plan))


def actor_state_shapes(of_one: Any, plan: Plan) -> Any:
    """Returns the shapes of all ActorStates of a seed from those of one stream."""
    axes = stream_axes(plan)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*axes, *x.shape), x.dtype), of_one)


def stack_seeds(of_each: list[jax.Array], axis: int = 0) -> jax.Array:
    """Returns the arrays of all seeds as one."""
    return of_each[0] if len(of_each) == 1 else jnp.stack(of_each, axis)


def setup_keys(
    init_keys: list[jax.Array], reset_keys: list[jax.Array], plan: Plan
) -> tuple[jax.Array, jax.Array]:
    """Returns what `Programs.setup` takes, from two keys of each seed."""
    streams = [split_keys(key, plan) for key in reset_keys]
    return stack_seeds(init_keys), stack_seeds(streams, axis=1)


def with_seeds(of_one: Any, num_seeds: int, axis: int) -> Any:
    """Returns the shapes of all seeds' arrays from those of one."""
    if num_seeds == 1:
        return of_one

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*x.shape[:axis], num_seeds, *x.shape[axis:]), x.dtype)

    return jax.tree.map(shape, of_one)
