"""Processes that are killed at any moment: nothing half-written is found afterwards."""

import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mava import experiment
from mava.checkpoints import list_checkpoints
from mava.stored_vault import episode_ends, find_vault, read_steps
from tests.running import SYSTEMS, TINY, read_metrics, run_folder, train, without_times

SYSTEM = SYSTEMS / "ff_ippo.py"


def options(num_evaluations):
    """A run of tiny evaluations, each after 20 tiny updates."""
    counts = (
        f"system.num_updates={20 * num_evaluations}",
        f"arch.num_evaluation={num_evaluations}",
    )
    return (*TINY, "env=lbf", *counts)


def run(*arguments, cwd, kill_after=None, after_line="Compiling", first=""):
    """Runs the system in a process; kills it some seconds after it printed a line.

    `first` is Python to run before it. Returns its exit code, its output and its errors.
    """
    start = f"{first}; import runpy; runpy.run_path({str(SYSTEM)!r}, run_name='__main__')"
    process = subprocess.Popen(
        [sys.executable, *(("-c", start) if first else (str(SYSTEM),)), *arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines = []
    if kill_after is not None:
        for line in process.stdout:
            lines.append(line)
            if after_line in line:
                break
        time.sleep(kill_after)
        process.send_signal(signal.SIGKILL)
    output, errors = process.communicate(timeout=600)
    return process.returncode, "".join(lines) + output, errors


def assert_same_results(first, second):
    """The same JSON but for times, and the same steps in TensorBoard."""
    assert without_times(read_metrics(first)) == without_times(read_metrics(second))
    assert tensorboard_steps(first) == tensorboard_steps(second)


def tensorboard_steps(results):
    accumulator = EventAccumulator(str(run_folder(results) / "tensorboard"))
    accumulator.Reload()
    return {
        tag: [event.step for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def test_a_killed_run_goes_on(tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    killed.mkdir()
    train("ff_ippo", *options(30), "logger.use_console=false", f"logger.base_exp_path={straight}")
    code, _, _ = run(*options(30), cwd=killed, kill_after=0, after_line="[ 50%]")
    assert code == -signal.SIGKILL
    assert len(read_metrics(killed)) < 31  # valid JSON, not all of it
    assert list_checkpoints(run_folder(killed) / "checkpoints")
    experiment.resume(run_folder(killed), "ff_ippo", ["logger.use_console=false"])
    assert_same_results(straight, killed)


def test_a_killed_run_leaves_whole_episodes(tmp_path):
    """In writes of a few episodes, so that it is killed between or in some of them."""
    vault = ("logger.vault.record=true", "logger.checkpointing.save_model=false")
    small = "import mava.recorder; mava.recorder.WRITE_BYTES = 20_000"
    code, _, _ = run(
        *options(500), *vault, cwd=tmp_path, first=small, kill_after=1, after_line="%]"
    )
    assert code == -signal.SIGKILL
    steps = read_steps(find_vault(run_folder(tmp_path)))
    count = len(steps["rewards"])
    assert count > 1000
    ends = episode_ends(steps)
    assert ends[-1]
    assert len(np.unique(steps["infos/state"], axis=0)) > 100  # not what was never written


@pytest.mark.slow
def test_a_run_killed_twenty_times_goes_on(tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    straight.mkdir()
    killed.mkdir()
    code, _, errors = run(*options(500), cwd=straight)
    assert code == 0, errors
    choose = random.Random(0)
    kills, resumed_at = 0, []
    arguments = options(500)
    while kills < 20:
        line, longest = choose.choice([("Compiling", 3), *[("env steps/s", 2)] * 3])
        seconds = choose.uniform(0, longest)
        code, output, errors = run(*arguments, cwd=killed, kill_after=seconds, after_line=line)
        assert code in (-signal.SIGKILL, 0), errors
        kills += code != 0
        arguments = (f"resume={run_folder(killed)}",)
        resumed_at += [line for line in output.splitlines() if line.startswith("Going on after")]
        if code == 0:
            break
    print(f"{kills} kills", *resumed_at, sep="\n")
    code, _, errors = run(*arguments, cwd=killed)
    assert code == 0, errors
    assert_same_results(straight, killed)
    assert kills == 20, "the run was over before: make it longer"
    assert len(set(resumed_at)) > 10, "it must have been killed while it trained"
