"""What is written, kept and deleted, and what a full disk does."""

import errno
import json
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mava import checkpoints, experiment
from mava.checkpoints import Checkpoints, list_checkpoints, read_newest
from mava.config import Checkpointing, LoadArgs, UserError
from mava.snapshot import Progress, Snapshot, fill
from tests.running import SYSTEMS, TINY, read_metrics, run_folder, train

DATA = Path(__file__).parent / "data"


def options(**changes):
    values = {
        "save_model": True, "save_interval_steps": 1, "max_to_keep": 2, "keep_period": None,
        "max_block_seconds": 30.0, "load_model": False,
        "load_args": LoadArgs(run=None, checkpoint="last"),
    }  # fmt: skip
    return Checkpointing(**{**values, **changes})


def snapshot(env_step, evaluated=True, **actor_state):
    """A snapshot of a run that evaluates after every 10 steps."""
    progress = Progress(
        num_blocks=env_step // 10, num_evaluations=env_step // 10 - (not evaluated),
        num_updates=env_step // 10, env_step=env_step,
    )  # fmt: skip
    actor_state = {"key": jax.random.split(jax.random.key(env_step), 2), **actor_state}
    learner_state = {"w": jnp.full(3, env_step, jnp.float32)}
    return Snapshot(learner_state, actor_state, {"w": jnp.zeros(3)}, progress)


def names(folder):
    return [path.name for path in list_checkpoints(folder)]


def test_what_is_saved_comes_back(tmp_path):
    saver = Checkpoints(tmp_path, options(), {"note": "x"})
    saver.save_now(snapshot(10, buffer=jnp.arange(4)))
    stored = read_newest(tmp_path)
    assert stored.about["note"] == "x"
    assert stored.progress.num_blocks == 1
    assert stored.progress.best_return == -np.inf
    empty = snapshot(0, buffer=jnp.zeros(4, int)).trees()
    filled = fill(stored.arrays, empty)
    expected = snapshot(10, buffer=jnp.arange(4)).trees()
    assert jax.tree.structure(filled) == jax.tree.structure(expected)
    for new, old in zip(jax.tree.leaves(filled), jax.tree.leaves(expected), strict=True):
        assert new.dtype == old.dtype
        assert jnp.array_equal(new, old)
    saver.close()


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, ["50", "60"]),
        ({"max_to_keep": 1}, ["60"]),
        ({"max_to_keep": 4}, ["30", "40", "50", "60"]),
        ({"save_interval_steps": 25}, ["30", "60"]),
        ({"keep_period": 25, "max_to_keep": 1}, ["30", "50", "60"]),
        ({"save_model": False}, []),
    ],
)
def test_how_many_are_kept(changes, kept, tmp_path):
    saver = Checkpoints(tmp_path, options(**changes), {})
    for env_step in range(10, 70, 10):
        saver._saving.result()  # or it would be passed over
        saver.save_if_due(snapshot(env_step))
    saver.save_now(snapshot(60))
    saver.close()
    assert names(tmp_path) == kept


def test_an_evaluated_checkpoint_takes_the_place_of_the_one_before_the_evaluation(tmp_path):
    saver = Checkpoints(tmp_path, options(max_to_keep=3), {})
    saver.save_now(snapshot(10))
    saver.save_now(snapshot(20, evaluated=False))
    assert names(tmp_path) == ["10", "20.unevaluated"]
    saver.save_now(snapshot(20))
    assert names(tmp_path) == ["10", "20"]
    saver.close()


def test_a_buffer_is_kept_in_the_newest_only(tmp_path):
    saver = Checkpoints(tmp_path, options(max_to_keep=3), {})
    for env_step in (10, 20):
        saver.save_now(snapshot(env_step, buffer={"observation": jnp.full(4, env_step)}))
    saver.close()
    assert [(path / "buffer").exists() for path in list_checkpoints(tmp_path)] == [False, True]
    shutil.rmtree(tmp_path / "20" / "arrays")  # damaged: the one before has no buffer
    stored = read_newest(tmp_path)
    assert stored.progress.env_step == 10
    filled = fill(stored.arrays, snapshot(0, buffer={"observation": jnp.zeros(4)}).trees())
    assert jnp.array_equal(filled["learner_state"]["w"], jnp.full(3, 10.0))
    assert jnp.array_equal(filled["actor_state"]["buffer"]["observation"], jnp.zeros(4))


def test_saving_waits_for_nothing(tmp_path, monkeypatch):
    """While a checkpoint is written the next one is passed over; the last one never is."""
    go, write = threading.Event(), checkpoints.write
    monkeypatch.setattr(checkpoints, "write", lambda *args: (go.wait(), write(*args)))
    saver = Checkpoints(tmp_path, options(max_to_keep=9), {})
    saver._saving.result()
    for env_step in (10, 20, 30):
        saver.save_if_due(snapshot(env_step))
    go.set()
    saver.save_now(snapshot(40))
    saver.close()
    assert names(tmp_path) == ["10", "40"]


def test_what_is_saved_is_a_copy(tmp_path, monkeypatch):
    """The next block may overwrite an actor state before it is on disk."""
    go, write = threading.Event(), Checkpoints._write
    monkeypatch.setattr(Checkpoints, "_write", lambda *args: (go.wait(), write(*args)))
    saver = Checkpoints(tmp_path, options(), {})
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    before = snapshot(10, position=jnp.arange(100_000.0))
    saver._saving.result()
    saver.save_if_due(before)
    jax.block_until_ready(overwrite(before.actor_state["position"]))
    go.set()
    saver.close()
    position = read_newest(tmp_path).arrays["actor_state/position"]
    np.testing.assert_array_equal(position, np.arange(100_000.0))


def test_unfinished_and_newer_checkpoints_make_way(tmp_path):
    saver = Checkpoints(tmp_path, options(max_to_keep=9), {})
    for env_step in (10, 20, 30):
        saver.save_now(snapshot(env_step))
    saver.close()
    (tmp_path / "40.unfinished").mkdir()
    (tmp_path / "5.deleted").mkdir()
    (tmp_path / "30" / "about.json").write_text("{")
    stored = read_newest(tmp_path)
    assert stored.progress.env_step == 20
    saver = Checkpoints(tmp_path, options(max_to_keep=9), {})
    saver.start_from(stored)
    assert names(tmp_path) == ["10", "20"]
    saver.save_now(snapshot(30))
    saver.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "20", "30", "30.damaged"]


def test_a_newer_format_is_refused(tmp_path):
    saver = Checkpoints(tmp_path, options(), {})
    saver.save_now(snapshot(10))
    saver.close()
    file = tmp_path / "10" / "about.json"
    file.write_text(file.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(UserError, match="has format 99; this version reads up to 1"):
        read_newest(tmp_path)


def full(path, *args):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_ends_the_run_with_one_sentence(tmp_path, monkeypatch):
    """The second checkpoint can't be written; the first one stays, and the run goes on from it."""
    write, calls = checkpoints.write, []

    def write_once(*args):
        calls.append(1)
        (write if len(calls) == 1 else full)(*args)

    run = (*TINY, "system.num_updates=8", "arch.num_evaluation=8", "logger.use_console=false")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write", write_once)
        patch.setattr(Checkpoints, "save_if_due", Checkpoints.save_now)
        with pytest.raises(UserError, match=r"Can't save a checkpoint after 128 .*No space left"):
            train("ff_ippo", *run, f"logger.base_exp_path={tmp_path}", probe="RandomLength")
    assert names(run_folder(tmp_path) / "checkpoints") == ["64"]
    experiment.resume(run_folder(tmp_path), "ff_ippo", [])
    assert len(read_metrics(tmp_path)) == 9


@pytest.mark.parametrize(
    ("logger", "file"), [("TensorBoardLogger", "tensorboard"), ("JsonLogger", "metrics.json")]
)
def test_a_disk_full_of_logs(logger, file, tmp_path, monkeypatch):
    """The evaluation can't be logged; nothing of what was is lost, and the run goes on."""
    original = getattr(experiment, logger).write

    def write(self, event):
        if event.evaluation == 3:
            full(None)
        original(self, event)

    run = (*TINY, "system.num_updates=8", "arch.num_evaluation=8", "logger.use_console=false")
    with monkeypatch.context() as patch:
        patch.setattr(getattr(experiment, logger), "write", write)
        patch.setattr(Checkpoints, "save_if_due", Checkpoints.save_now)
        with pytest.raises(UserError, match=r"Can't write to .*: No space left on device\. Tr"):
            train("ff_ippo", *run, f"logger.base_exp_path={tmp_path}", probe="RandomLength")
    assert (run_folder(tmp_path) / file).exists()
    assert list(read_metrics(tmp_path)) == ["step_0", "step_1", "step_2"]
    experiment.resume(run_folder(tmp_path), "ff_ippo", [])
    assert len(read_metrics(tmp_path)) == 9


LIMITED = """
import resource, runpy, sys
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
sys.path.insert(0, sys.argv[1].rpartition("/")[0])
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_files_that_can_not_grow(tmp_path):
    """A real limit, met by the first checkpoint."""
    arguments = (
        *TINY, "env=lbf", "arch.compilation_cache=null",
        "network.actor_network.pre_torso.layer_sizes=[64,64]",
    )  # fmt: skip
    process = subprocess.run(
        [sys.executable, "-c", LIMITED, "20000", str(SYSTEMS / "ff_ippo.py"), *arguments],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert process.returncode == 1
    assert "Traceback" not in process.stderr
    message = (
        r"\nCan't save a checkpoint after 64 steps in .*/checkpoints: Failed to write \d+ "
        r"bytes to file \d+: File too large .*\. The checkpoints before it are complete\.\n"
    )
    assert len(re.findall(message, process.stderr)) == 1, process.stderr
    json.loads((run_folder(tmp_path) / "metrics.json").read_text())


def test_a_checkpoint_of_the_first_format_still_loads(tmp_path):
    """tests/data/run_format_1 is a run that was stopped half-way when the format was new."""
    shutil.copytree(DATA / "run_format_1", tmp_path / "run")
    experiment.resume(tmp_path / "run", "ff_ippo", ["logger.use_console=false"])
    record = json.loads((tmp_path / "run" / "metrics.json").read_text())
    steps = record["LevelBasedForaging"]["2s-8x8-2p-2f-coop"]["ff_ippo"]["seed_42"]
    assert list(steps) == ["step_0", "step_1", "step_2", "step_3", "absolute_metrics"]
