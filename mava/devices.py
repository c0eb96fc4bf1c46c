"""Which devices a run uses, and where its compiled programs are kept."""

import hashlib
import os
import platform
import warnings
from pathlib import Path

import jax

from mava.config import UserError

MAX_CACHE_BYTES = 2 * 1024**3
DEFAULT_CPU_DEVICES = 2  # so that a result does not hang on the core count of the host


def choose_devices(num_devices: int | None, option: str = "arch.num_devices") -> list[jax.Device]:
    """Returns the devices to use: as many as the option asks for, else all accelerators, or two CPU
    devices.
    """
    available = jax.local_devices()
    if num_devices is None:
        on_cpu = available[0].platform == "cpu"
        return available[:DEFAULT_CPU_DEVICES] if on_cpu else available
    if num_devices > len(available):
        raise UserError(
            f"{option}={num_devices}, but there are {len(available)} ({available[0].platform})."
        )
    return available[:num_devices]


def use_compilation_cache(folder: str | None) -> None:
    """Keeps compiled programs in `folder`; "auto" is a folder of this JAX version and CPU."""
    if folder is None:
        jax.config.update("jax_enable_compilation_cache", False)
        return
    path = _default_cache_folder() if folder == "auto" else Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".write-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        warnings.warn(f"Compiling without a cache: can't write {path}: {error}.", stacklevel=2)
        return
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_compilation_cache_max_size", MAX_CACHE_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _default_cache_folder() -> Path:
    """A program compiled for one CPU can crash on another: the folder names its features."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        features = platform.processor()
    cpu = hashlib.sha256(features.encode()).hexdigest()[:8]
    return root / "mava" / f"jax-{jax.__version__}-{platform.machine()}-{cpu}"
