"""A run between two blocks, and its arrays by name."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import numpy as np

BUFFER = "actor_state/buffer"  # where a replay buffer is


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is."""

    num_blocks: int = 0  # trained
    num_evaluations: int = 0  # of their parameters: as many, or one fewer
    num_updates: int = 0
    env_step: int = 0  # environment steps, on all devices
    recorded_steps: int = 0  # of these recorded, in whole episodes
    train_seconds: float = 0.0
    steps_per_second: float = 0.0  # of the last block
    elapsed: float = 0.0  # seconds from the end of the first block to that of the last
    mean_return: float = math.nan  # of the last evaluation
    best_return: float = -math.inf  # of the best one
    trained: dict[str, float] = dataclasses.field(default_factory=dict)  # logged of the last block
    evaluated: dict[str, float] = dataclasses.field(default_factory=dict)  # and of its evaluation


class Snapshot(NamedTuple):
    """All of a run between two blocks."""

    learner_state: Any  # the same on all devices
    actor_state: Any  # (D, ...) or, with more than one replica, (D, U, ...)
    best_params: Any  # for System.act; the initial ones before the first evaluation
    progress: Progress
    seed: int | None = None  # its place on the seed axis: the first, of an ActorState the second

    def trees(self) -> dict[str, Any]:
        """Returns what consists of arrays, by name."""
        names = ("learner_state", "actor_state", "best_params")
        return {name: getattr(self, name) for name in names}


class Packed(NamedTuple):
    """Many arrays as one."""

    data: np.ndarray  # uint8: their bytes, one array after the other
    layout: dict[str, tuple[str, tuple[int, ...]]]  # name -> dtype and shape, in order


def to_host(snapshot: Snapshot) -> tuple[Packed, Packed]:
    """Returns copies of the arrays of a snapshot, without and with the replay buffers."""
    named = named_leaves(snapshot.trees())
    for leaf in named.values():
        leaf.copy_to_host_async()
    if snapshot.seed is not None:
        for name, leaf in named.items():
            axis = 1 if name.startswith("actor_state/") else 0
            named[name] = np.take(np.asarray(leaf), snapshot.seed, axis)
    buffers = {name: named.pop(name) for name in list(named) if is_buffer(name)}
    return pack(named), pack(buffers)


def pack(arrays: dict[str, Any]) -> Packed:
    """Returns a copy of all arrays."""
    data = np.empty(sum(x.nbytes for x in arrays.values()), np.uint8)
    start = 0
    for array in arrays.values():
        end = start + array.nbytes
        data[start:end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start = end
    return Packed(data, {name: (str(x.dtype), x.shape) for name, x in arrays.items()})


def unpack(packed: Packed) -> dict[str, np.ndarray]:
    """Returns the arrays by name."""
    arrays, start = {}, 0
    for name, (dtype, shape) in packed.layout.items():
        end = start + math.prod(shape) * np.dtype(dtype).itemsize
        arrays[name] = packed.data[start:end].view(dtype).reshape(shape)
        start = end
    return arrays


def is_buffer(name: str) -> bool:
    return f"{name}/".startswith(f"{BUFFER}/")


def named_leaves(trees: dict[str, Any]) -> dict[str, Any]:
    """Returns the arrays by their path in the trees, "/" between the parts; keys as their data."""
    named = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(trees):
        if _is_key(leaf) and isinstance(leaf, jax.Array):
            leaf = jax.random.key_data(leaf)
        elif _is_key(leaf):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        named[_name(path)] = leaf
    return named


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def first_misfit(arrays: dict[str, np.ndarray], trees: dict[str, Any]) -> str | None:
    """Returns what is wrong with the first leaf of `trees` that the arrays can't fill.

    Args:
        arrays: by name, from a checkpoint.
        trees: of arrays or their shapes, by the start of their names, such as {"best_params": ...}.
    """
    wanted = named_leaves(trees)
    for name, leaf in wanted.items():
        if name not in arrays and is_buffer(name):
            continue
        if name not in arrays:
            return f"{name} is missing in the checkpoint"
        saved = arrays[name]
        if saved.shape != leaf.shape or saved.dtype != leaf.dtype:
            return (
                f"{name} is {saved.dtype} {saved.shape} in the checkpoint, "
                f"{leaf.dtype} {leaf.shape} here"
            )
    starts = tuple(f"{name}/" for name in trees)
    for name in arrays:
        if name.startswith(starts) and name not in wanted:
            return f"{name} of the checkpoint is unknown here"
    return None


def fill(arrays: dict[str, np.ndarray], trees: dict[str, Any]) -> dict[str, Any]:
    """Returns the trees with these values, placed on the devices as the old ones.

    They must fit, see `first_misfit`. A buffer that is not among the arrays stays as it is.
    """

    def value(path: tuple, leaf: jax.Array) -> jax.Array:
        name = _name(path)
        if name not in arrays and is_buffer(name):
            return leaf
        array: Any = arrays[name]
        if _is_key(leaf):
            array = jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))
        return jax.device_put(array, leaf.sharding)

    return jax.tree_util.tree_map_with_path(value, trees)
