"""From a vault to a run that learns from it: its experience, its environment, its budget."""

import shutil
from contextlib import closing

import numpy as np
import pytest
from omegaconf import OmegaConf

from mava import experiment, offline
from mava.checkpoints import read_newest
from mava.config import UserError
from mava.stored_vault import VaultWriter, find_vault, read_steps
from tests.running import make_run, read_metrics, run_folder, system_module, tiny, train

QUIET = ("logger.use_console=false", "arch.absolute_metric=false", "logger.use_tb=false")


def make_vault(folder, steps, about):
    with closing(VaultWriter(folder, about)) as writer:
        writer.write(steps)


def random_steps(num_steps):
    """What two agents of RightAction that choose at random would leave: episodes of one step."""
    rng = np.random.default_rng(0)
    cue = rng.choice([-1.0, 1.0], (num_steps, 2))
    action = rng.integers(0, 2, (num_steps, 2))
    return {
        "observations": cue[..., None].astype(np.float32),
        "actions": action.astype(np.int32),
        "rewards": (action == (cue > 0)).astype(np.float32),
        "terminals": np.ones((num_steps, 2), bool),
        "truncations": np.zeros((num_steps, 2), bool),
        "infos/state": cue.astype(np.float32),
        "infos/legals": np.ones((num_steps, 2, 2), np.float32),
    }


@pytest.fixture(scope="module")
def vault(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vaults") / "mava" / "Probe" / "RightAction.vlt" / "random"
    make_vault(folder, random_steps(2000), {})
    return folder


def learn(system, results, vault, *overrides, probe="RightAction"):
    return train(system, *tiny(system), *QUIET, f"vault={vault}", f"logger.base_exp_path={results}",
                 *overrides, probe=probe)  # fmt: skip


@pytest.mark.parametrize(
    ("system", "lowest", "highest"), [("rec_maicq", 0.9, 1), ("rec_bc", 0.3, 0.7)]
)
def test_learns_what_the_data_does_not_do(system, lowest, highest, vault, tmp_path):
    """The data is right by chance; what is cloned, too; values tell which actions were right."""
    returned = learn(
        system, tmp_path, vault, "system.num_updates=300", "arch.num_eval_episodes=128",
        "system.batch_size=32", "system.actor_lr=0.003",
        *["system.critic_lr=0.003"] * (system == "rec_maicq"),
    )  # fmt: skip
    assert lowest <= returned <= highest


@pytest.fixture(scope="module")
def finished(vault, tmp_path_factory):
    results = tmp_path_factory.mktemp("finished")
    learn("rec_bc", results, vault, "system.num_updates=6", "arch.num_devices=2")
    return results


def test_what_counts_is_gradient_steps(finished):
    record = read_metrics(finished)
    assert [record[f"step_{i}"]["step_count"] for i in range(2)] == [3, 6]


def test_going_on(finished, tmp_path, vault, capsys):
    folder = run_folder(finished)
    experiment.resume(folder, "rec_bc", ["system.num_updates=9", "logger.use_console=true"])
    output = capsys.readouterr().out
    assert "Going on after 6 of 9 gradient steps." in output
    assert "Learning from" in output
    assert "2,000 steps, 2,000 episodes, mean return 0.5" in output
    learn("rec_bc", tmp_path, vault, "system.num_updates=9", "arch.num_devices=2",
          "arch.num_evaluation=3")  # fmt: skip
    ends = [read_newest(run_folder(x) / "checkpoints") for x in (finished, tmp_path)]
    for name, x in ends[0].arrays.items():
        if not name.startswith("best"):
            np.testing.assert_array_equal(x, ends[1].arrays[name], err_msg=name)


def test_a_vault_that_has_moved(finished, vault, tmp_path):
    shutil.copytree(vault, tmp_path / "moved")
    folder = run_folder(finished)
    experiment.resume(folder, "rec_bc", [f"vault={tmp_path / 'moved'}", "system.num_updates=10"])
    assert f"vault: {tmp_path}/moved" in (folder / "config.yaml").read_text()


def test_experience_is_what_the_environment_showed(tmp_path):
    """A recorded run, made experience again: views with ids, states and masks as they were."""
    train("ff_ippo", *tiny("ff_ippo"), *QUIET, "logger.vault.record=true",
          f"logger.base_exp_path={tmp_path}", probe="Counter")  # fmt: skip
    steps = read_steps(find_vault(tmp_path))
    env, _, _ = experiment.build(
        system_module("rec_bc"), make_run("rec_bc", *tiny("rec_bc"), "vault=x", probe="Counter")
    )
    got = offline.make_experience(steps, env, add_agent_id=True)
    count = got.observation.step_count
    assert got.observation.agents_view.shape[1:] == env.observation_spec.agents_view.shape
    assert (got.observation.agents_view[..., 1] == count[:, None]).all()
    assert (got.observation.agents_view[..., 2:] == np.eye(2)).all()
    assert (got.observation.global_state[:, 1] == count).all()
    assert (got.observation.action_mask == (np.arange(2) == count[:, None] % 2)[:, None]).all()
    assert (got.last == np.append(count[1:] == 0, True)).all()
    assert (got.discount == 1 - steps["terminals"]).all()
    assert got.observation.action_mask.dtype == bool


def cut_out(steps, name):
    return {key: x for key, x in steps.items() if key != name}


def with_array(name, x):
    return lambda steps: {**steps, name: x}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda steps: cut_out(steps, "infos/state"), r"lacks infos/state\."),
        (lambda steps: cut_out(cut_out(steps, "actions"), "rewards"), r"lacks actions, rewards\."),
        (with_array("observations", np.zeros((5, 2, 3), "f4")),
         r"does not fit Probe RightAction: observations of a .* has shape \(2, 3\), not \(2, 1\)"),
        (with_array("infos/legals", np.zeros((5, 2, 3), "f4")), r"infos/legals of a step"),
    ],
)  # fmt: skip
def test_vaults_that_do_not_fit(change, message, tmp_path):
    make_vault(tmp_path / "vault", change(random_steps(5)), {})
    with pytest.raises(UserError, match=message):
        learn("rec_bc", tmp_path / "results", tmp_path / "vault")


@pytest.mark.parametrize(
    ("system", "overrides", "message"),
    [
        ("rec_bc", (), r"rec_bc learns from a vault: add vault="),
        ("ff_ippo", ("vault=x",), r"ff_ippo does not learn from a vault: leave out vault="),
        ("rec_bc", ("vault=x", "logger.vault.record=true"), r"rec_bc has nothing to record"),
        ("rec_bc", ("vault=nowhere",), r"nowhere holds no vault"),
    ],
)
def test_the_wrong_source(system, overrides, message, tmp_path):
    with pytest.raises(UserError, match=message):
        train(system, *tiny(system), *QUIET, f"logger.base_exp_path={tmp_path}", *overrides,
              probe="RightAction")  # fmt: skip


def test_sequences_longer_than_the_vault(tmp_path):
    make_vault(tmp_path / "vault", random_steps(3), {})
    with pytest.raises(UserError, match="sequence_length=4"):
        learn("rec_bc", tmp_path / "results", tmp_path / "vault")


STORED = {"env_name": "Stored", "kwargs": {"time_limit": 7}}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], STORED),
        (["env.kwargs.time_limit=9"], {"env_name": "Stored", "kwargs": {"time_limit": 9}}),
        (["env=lbf"], {"env_name": "Composed", "kwargs": {"time_limit": 9}}),
        (["env/scenario=x"], {"env_name": "Composed", "kwargs": {"time_limit": 9}}),
    ],
)
def test_the_environment_is_that_of_the_vault(overrides, expected, tmp_path):
    about = {"mava": {"system_name": "x", "config": {"env": STORED}}}
    make_vault(tmp_path / "vault", random_steps(5), about)
    cfg = OmegaConf.create(
        {"vault": str(tmp_path), "env": {"env_name": "Composed", "kwargs": {"time_limit": 9}}}
    )
    offline.use_vault(cfg, overrides)
    assert cfg.env == expected
    assert cfg.vault == str(tmp_path / "vault")


def test_a_vault_that_names_no_environment(vault):
    cfg = OmegaConf.create({"vault": str(vault), "env": {"env_name": "Composed"}})
    with pytest.raises(UserError, match="does not say what it was recorded in: add env="):
        offline.use_vault(cfg, [])
