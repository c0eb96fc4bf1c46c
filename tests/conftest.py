"""Two CPU devices for every test, and a compilation cache shared by all of them."""

import os
from importlib.metadata import version

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
# Tests compile more than they run. Without the emitters compiling takes a third of the time; JAX
# 0.12 has lost that flag, and stops at one that it does not know.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_backend_optimization_level=0"
    + " --xla_cpu_use_fusion_emitters=false" * version("jax").startswith("0.10.")
)

import sys
from pathlib import Path

import jax
import pytest
from absl import logging as absl_logging

import mava  # noqa: F401  before any suite starts the backend
from mava.experiment import forget_programs

# Hydra shuts old log handlers down, and absl's then closes its stream: pytest's, if it got that.
absl_logging.get_absl_handler().python_handler.stream = sys.__stderr__


MAX_MEMORY_MAPS = 20_000  # of the 65,530 that Linux allows


SLOW = Path(__file__).with_name("slow.txt").read_text().splitlines()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks the tests in slow.txt, of more than 10 s of a core: `make test-all` runs them."""
    for item in items:
        if item.nodeid.removeprefix("tests/") in SLOW:
            item.add_marker(pytest.mark.slow)


def num_memory_maps():
    maps = Path("/proc/self/maps")
    return len(maps.read_text().splitlines()) if maps.exists() else 0


@pytest.fixture(autouse=True)
def few_memory_maps():
    """Hundreds of compiled programs in one process would crash it."""
    yield
    if num_memory_maps() > MAX_MEMORY_MAPS:
        forget_programs()


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    """Programs compiled once per session, also those of the runs that tests start."""
    folder = tmp_path_factory.mktemp("compilation_cache")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder / "tests"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return folder
