"""Mava: single-file multi-agent reinforcement learning systems in pure JAX."""

import builtins
import os
import warnings
from typing import Any

import jax


def _set_num_cpu_devices() -> None:
    """One CPU device per core of this process, unless the user asked for a number.

    Must run before JAX starts its backend, which importing an environment suite does.
    """
    flags: Any = jax.config
    chosen = flags.jax_num_cpu_devices != -1
    chosen = chosen or "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if chosen:
        return
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    try:
        jax.config.update("jax_num_cpu_devices", num_cores or os.cpu_count() or 1)
    except RuntimeError:  # the backend runs already: its devices are what there is
        return


def _import_jumanji_in_notebooks() -> None:
    """Imports Jumanji as outside of IPython: inside, it sets matplotlib's backend for the whole
    session, and in a notebook fails if that backend, ipympl, is not installed.
    """
    shell = builtins.__dict__.pop("__IPYTHON__", None)
    if shell is None:
        return
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "IProgress not found")  # tqdm's
            import jumanji  # noqa: F401
    finally:
        builtins.__dict__["__IPYTHON__"] = shell


_set_num_cpu_devices()
_import_jumanji_in_notebooks()
