"""What a run's vault holds: whole episodes, each step once, in order, before the action."""

import shutil
import time

import flashbax
import jax
import numpy as np
import pytest
from flashbax.vault import Vault
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mava import experiment, programs, recorder
from mava.checkpoints import read_newest
from mava.config import UserError
from mava.recorder import Episodes
from mava.stored_vault import episode_ends, find_episodes, find_vault, open_vault, read_steps
from mava.training import Training
from tests.running import make_run, run_folder, system_module, tiny, train

QUIET = ("logger.use_console=false", "arch.absolute_metric=false")
STREAMS = ("arch.num_devices=2", "system.update_batch_size=2")


def record(results, *overrides, system="ff_ippo", probe="Counter"):
    options = ("logger.vault.record=true", f"logger.base_exp_path={results}")
    train(system, *tiny(system), *QUIET, *options, *overrides, probe=probe)


def read(results):
    return read_steps(find_vault(results))


def check_counted(steps):
    """Every step of a Counter's episodes follows the one before it, and says the same of itself."""
    number, count = steps["observations"][..., 0], steps["observations"][:, 0, 1]
    end = episode_ends(steps)
    start = np.concatenate([[True], end[:-1]])
    assert end[-1]
    assert (count[start] == 0).all()
    assert (np.diff(count)[~end[:-1]] == 1).all()
    assert (number[1:][~end[:-1]] == number[:-1][~end[:-1]]).all()
    assert len(np.unique(number[start], axis=0)) == start.sum()  # no episode twice
    assert (steps["infos/state"] == np.stack([number[:, 0], count], axis=-1)).all()
    legal = np.eye(2)[count.astype(int) % 2]
    assert (steps["infos/legals"] == legal[:, None]).all()
    assert (steps["actions"] == count[:, None] % 2).all()
    assert (steps["rewards"] == count[:, None] * [1, 2]).all()
    cut = (count == 3) & end
    assert (steps["truncations"] == cut[:, None] & ~steps["terminals"]).all()
    assert (steps["terminals"] | steps["truncations"]).all(axis=-1).tolist() == end.tolist()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run of 6 updates on 2 devices with 2 replicas, recorded."""
    results = tmp_path_factory.mktemp("recorded")
    record(results, *STREAMS, "system.num_updates=6")
    return results


def test_whole_episodes_in_order(recorded):
    steps = read(recorded)
    check_counted(steps)
    both = steps["terminals"][:, 0] & (steps["observations"][:, 0, 1] == 3)
    assert both.any()  # ended with the step that the limit would have cut
    assert steps["truncations"].any()
    assert not (steps["truncations"] & steps["terminals"]).any()


def test_types_are_those_of_og_marl(recorded):
    vault = find_vault(recorded)
    assert vault.dtypes == {
        "observations": "float32",
        "actions": "int32",
        "rewards": "float32",
        "terminals": "bool",
        "truncations": "bool",
        "infos/state": "float32",
        "infos/legals": "float32",
    }
    assert vault.shapes["observations"] == (2, 2)  # without the agent id that the policy saw
    uid, name = vault.folder.name, vault.folder.relative_to(run_folder(recorded) / "vault").parent
    assert str(name) == "mava/Probe/Counter.vlt"
    assert uid == "seed_42"
    assert vault.metadata["mava"]["config"]["system"]["rollout_length"] == 8


def check_logged(results):
    """Every episode that training logged is in the vault: as many, with the same mean."""
    events = EventAccumulator(str(run_folder(results) / "tensorboard"))
    events.Reload()
    logged = {x: [e.value for e in events.Scalars(f"train/{x}")]
              for x in ("num_episodes", "mean_episode_return", "max_episode_return")}  # fmt: skip
    returns = find_episodes(read(results)).episode_return
    counts = np.array(logged["num_episodes"])
    assert len(returns) == counts.sum()
    mean = np.dot(counts, logged["mean_episode_return"]) / counts.sum()
    np.testing.assert_allclose(returns.mean(), mean, rtol=1e-6)
    assert returns.max() == max(logged["max_episode_return"])


def test_returns_are_those_logged(recorded):
    check_logged(recorded)


def test_the_number_of_steps_is_known_to_the_checkpoint(recorded):
    stored = read_newest(run_folder(recorded) / "checkpoints")
    assert stored.progress.recorded_steps == find_vault(recorded).num_steps


@pytest.mark.parametrize("write_bytes", [1, 40 * 7 * 4, 2**26])
def test_however_it_is_cut_up_the_stream_is_the_same(write_bytes, recorded, tmp_path, monkeypatch):
    """Steps leave the device one update at a time, and are written a few at a time, or at once."""
    monkeypatch.setattr(programs, "RECORDED_BYTES", 1)
    monkeypatch.setattr(recorder, "WRITE_BYTES", write_bytes)
    record(tmp_path, *STREAMS, "system.num_updates=6")
    steps, other = read(tmp_path), read(recorded)
    check_counted(steps)
    check_logged(tmp_path)
    assert sorted(steps["observations"][:, 0, 0]) == sorted(other["observations"][:, 0, 0])


def test_og_marl_can_read_it(recorded):
    """As its replay buffer does (flashbax alone): windows of the stream, with add_batch_size 1."""
    vault = find_vault(recorded)
    name = vault.folder.parent.name
    experience = Vault(name, rel_dir=str(vault.folder.parent.parent), vault_uid=vault.folder.name)
    state = experience.read()
    buffer = flashbax.make_trajectory_buffer(
        add_batch_size=1,
        sample_batch_size=64,
        sample_sequence_length=5,
        period=1,
        min_length_time_axis=5,
        max_length_time_axis=vault.num_steps,
    )
    windows = buffer.sample(state, jax.random.key(0)).experience
    steps = read_steps(vault)
    starts = {bytes(x): i for i, x in enumerate(steps["observations"])}
    for rewards, views in zip(windows["rewards"], windows["observations"], strict=True):
        at = starts[bytes(np.asarray(views[0]))]
        np.testing.assert_array_equal(views, steps["observations"][at : at + 5])
        np.testing.assert_array_equal(rewards, steps["rewards"][at : at + 5])


def test_every_second_block(tmp_path):
    record(tmp_path, "system.num_updates=4", "arch.num_evaluation=4", "logger.vault.every=2")
    steps = read(tmp_path)
    check_counted(steps)
    assert 64 < len(steps["rewards"]) <= 128  # two blocks of 64 steps


@pytest.mark.parametrize(("name", "cap"), [("max_steps", 20), ("max_megabytes", 0.0015)])
def test_a_cap(name, cap, tmp_path, monkeypatch):
    """Reached in the first block; what comes in it after that stays out, too."""
    monkeypatch.setattr(programs, "RECORDED_BYTES", 1)
    record(tmp_path, "system.num_updates=4", f"logger.vault.{name}={cap}")
    steps = read(tmp_path)
    check_counted(steps)
    megabytes = sum(x.nbytes for x in steps.values()) / 1e6
    size = len(steps["rewards"]) if name == "max_steps" else megabytes
    assert 0.8 * cap < size <= cap


def test_episodes_against_a_slow_way():
    """Random lengths, steps in any order; the first steps belong to an episode begun before."""
    rng = np.random.default_rng(0)
    count = np.array([3, 0, 5, 0])
    episodes, wanted, got, running = Episodes(4), [], [], [None] * 4
    for call in range(30):
        if call == 15:
            episodes.interrupt()
            running = [None] * 4
        length = rng.integers(1, 6)
        rows, steps = np.zeros((4, length), int), {"start": [], "last": [], "id": []}
        for t, stream in rng.permutation([(t, s) for t in range(length) for s in range(4)]):
            rows[stream, t] = len(steps["id"])
            for name in steps:
                steps[name].append(None)
        for stream in range(4):
            for t in range(length):
                row, last = rows[stream, t], bool(rng.random() < 0.2)
                steps["id"][row] = (stream, call, t)
                steps["start"][row], steps["last"][row] = bool(count[stream] == 0), last
                if count[stream] == 0:
                    running[stream] = []
                if running[stream] is not None:
                    running[stream].append((stream, call, t))
                if last and running[stream] is not None:
                    wanted += running[stream]
                    running[stream] = None
                count[stream] = 0 if last else count[stream] + 1
        done = episodes.add({name: np.array(x) for name, x in steps.items()}, rows)
        assert set(done) == {"id"}
        got += [tuple(x) for x in done["id"].tolist()]
    assert got == wanted


class Killed(BaseException):
    """Stands for a process that ends at once."""


def stop_before(monkeypatch, evaluation):
    """Ends a run before one of its evaluations."""
    original = Training.evaluate_block

    def evaluate_block(self):
        if self.progress.num_evaluations == evaluation:
            raise Killed
        original(self)

    monkeypatch.setattr(Training, "evaluate_block", evaluate_block)


def test_after_a_resume_nothing_is_there_twice(recorded, tmp_path, monkeypatch):
    """The vault knows a block more than the checkpoint; only an episode on the seam is lost."""
    four = ("system.num_updates=4", "arch.num_evaluation=4")
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    record(straight, *four)
    with monkeypatch.context() as patch:
        stop_before(patch, 2)
        with pytest.raises(Killed):
            record(stopped, *four)
    saved = read_newest(run_folder(stopped) / "checkpoints").progress.recorded_steps
    before = read(stopped)
    assert 0 < saved < len(before["rewards"])
    experiment.resume(run_folder(stopped), "ff_ippo", list(QUIET))
    after, whole = read(stopped), read(straight)
    check_counted(after)
    for name, x in after.items():
        np.testing.assert_array_equal(x[:saved], before[name][:saved])
    lost = len(whole["rewards"]) - len(after["rewards"])
    assert 0 <= lost <= 8 * 4  # what was under way in each of 8 environments
    numbers = set(whole["observations"][:, 0, 0].tolist())
    assert set(after["observations"][:, 0, 0].tolist()) <= numbers


def test_pausing_keeps_what_was_recorded(recorded, tmp_path):
    """Recorded, then not, then again: the vault grows, and an episode on a seam is lost."""
    shutil.copytree(run_folder(recorded), tmp_path / "run")
    before = find_vault(tmp_path / "run").num_steps
    for number, record_it in ((8, "false"), (12, "true")):
        options = (f"system.num_updates={number}", f"logger.vault.record={record_it}")
        experiment.resume(tmp_path / "run", "ff_ippo", [*QUIET[:1], *options])
    steps = read(tmp_path / "run")
    check_counted(steps)
    assert len(steps["rewards"]) > before
    np.testing.assert_array_equal(steps["observations"][:before], read(recorded)["observations"])


def test_without_a_checkpoint_the_vault_starts_anew(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_before(patch, 0)
        with pytest.raises(Killed):
            record(tmp_path)
    killed = read(tmp_path)
    experiment.resume(run_folder(tmp_path), "ff_ippo", list(QUIET))
    check_counted(read(tmp_path))
    assert len(read(tmp_path)["rewards"]) > len(killed["rewards"])


def test_a_relative_path_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = make_run("ff_ippo", "logger.vault.path=vaults")
    assert run.logger.vault.path == str(tmp_path / "vaults")
    assert run.composed.logger.vault.path == str(tmp_path / "vaults")


@pytest.mark.parametrize("system", ["rec_mappo", "ff_maac"])
def test_other_systems(system, tmp_path):
    record(tmp_path, system=system)
    check_counted(read(tmp_path))


def test_continuous_actions_have_no_legal_ones(tmp_path):
    record(tmp_path, probe="RightPlace")
    vault = find_vault(tmp_path)
    assert "infos/legals" not in vault.shapes
    assert vault.shapes["actions"] == (2, 2)
    assert vault.dtypes["actions"] == "float32"


def test_runs_that_start_in_the_same_second(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda *_: "20260101-000000")
    for run in ("first", "second"):
        record(tmp_path / run, f"logger.vault.path={tmp_path / 'vaults'}")
    vaults = [open_vault(file.parent) for file in tmp_path.rglob("metadata.json")]
    assert len(vaults) == 2
    for vault in vaults:
        check_counted(read_steps(vault))


def test_a_vault_is_not_written_twice(tmp_path):
    options = (f"logger.vault.path={tmp_path / 'vaults'}", "logger.vault.uid=mine")
    record(tmp_path / "first", *options)
    steps = read(tmp_path / "vaults")
    with pytest.raises(UserError, match=r"Counter\.vlt/mine is there already"):
        record(tmp_path / "second", *options)
    assert len(read(tmp_path / "vaults")["rewards"]) == len(steps["rewards"])


def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    def full(*_args, **_kwargs):
        raise ValueError("RESOURCE_EXHAUSTED: No space left on device")

    monkeypatch.setattr(recorder, "WRITE_BYTES", 1)
    monkeypatch.setattr(Vault, "write", full)
    with pytest.raises(UserError, match=r"Can't write to the vault .*No space left.* are complete"):
        record(tmp_path)


def test_not_recorded_costs_nothing():
    """What a vault would keep is removed from the compiled program, not only not used."""
    run = make_run("ff_ippo", *tiny("ff_ippo"), probe="Counter")
    _, system, plan = experiment.build(system_module("ff_ippo"), run)
    texts = []
    for update in (system.update, lambda *states: (*system.update(*states)[:3], None)):
        init, reset, traced = programs.trace_system(system._replace(update=update), plan)
        axes = (None, 0, None, None)
        block = jax.vmap(programs.make_block(traced, 1), axes, axis_name="device")
        states = (init.shapes, programs.actor_state_shapes(reset.shapes, plan), np.int32(1), ())
        lowered = jax.jit(block).lower(*states)
        texts.append(lowered.as_text())
    assert texts[0] == texts[1]
