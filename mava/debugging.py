"""Looking inside a run: JAX's profiler and its search for NaNs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax


@contextmanager
def profiled(active: bool, folder: Path) -> Iterator[None]:
    """Records what runs inside for TensorBoard's profile page."""
    if not active:
        yield
        return
    with jax.profiler.trace(str(folder / "profile")):
        yield


@contextmanager
def debug_nans(active: bool) -> Iterator[None]:
    """Makes JAX stop at the first operation that gives a NaN."""
    if not active:
        yield
        return
    with jax.debug_nans(True):
        yield
