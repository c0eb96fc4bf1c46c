"""Vaults on disk: read, described, cut into parts, merged."""

import shutil
from contextlib import closing

import numpy as np
import pytest

from mava.config import UserError
from mava.stored_vault import VaultWriter, find_episodes, find_vault, read_steps
from mava.vault import main


def make_steps(lengths, rewards):
    """Episodes of these lengths, each agent paid so much a step; the last one is cut."""
    ends = np.cumsum(lengths) - 1
    steps = {
        "rewards": np.repeat(np.array(rewards, np.float32), lengths)[:, None]
        * np.ones((1, 2), "f4"),
        "terminals": np.zeros((ends[-1] + 1, 2), bool),
        "truncations": np.zeros((ends[-1] + 1, 2), bool),
        "infos/state": np.arange(ends[-1] + 1, dtype=np.float32)[:, None],
    }
    steps["terminals"][ends[:-1]] = True
    steps["truncations"][ends[-1]] = True
    return steps


def make_vault(folder, steps, metadata=None, keep=None):
    with closing(VaultWriter(folder, metadata or {}, keep)) as writer:
        if steps:
            writer.write(steps)


@pytest.fixture
def vault(tmp_path):
    """Three episodes with returns 6, 2, 4."""
    folder = tmp_path / "vault" / "mava" / "x.vlt" / "first"
    make_vault(folder, make_steps([3, 2, 1], [2, 1, 4]), {"note": "kept"})
    return folder


def test_what_was_written_is_read(vault):
    wanted = make_steps([3, 2, 1], [2, 1, 4])
    steps = read_steps(find_vault(vault.parents[3]))
    assert steps.keys() == wanted.keys()
    for name, x in wanted.items():
        np.testing.assert_array_equal(steps[name], x)
        assert steps[name].dtype == x.dtype
    assert read_steps(find_vault(vault), ("rewards",)).keys() == {"rewards"}


def test_episodes(vault):
    episodes = find_episodes(read_steps(find_vault(vault)))
    assert episodes.start.tolist() == [0, 3, 5]
    assert episodes.end.tolist() == [3, 5, 6]
    assert episodes.episode_return.tolist() == [6, 2, 4]


def test_appending_and_going_back(vault):
    make_vault(vault, make_steps([1], [7]), keep=5)
    assert read_steps(find_vault(vault))["infos/state"][:, 0].tolist() == [0, 1, 2, 3, 4, 0]
    make_vault(vault, None, keep=100)
    assert find_vault(vault).num_steps == 6
    make_vault(vault, None, keep=3)
    assert find_vault(vault).num_steps == 3


def test_describe(vault, capsys):
    main(["describe", str(vault)])
    output = capsys.readouterr().out
    assert "6 steps in 3 episodes; really ended: 2, cut by the time limit: 1" in output
    assert "episode return 4 ± 1.63" in output


def test_subsets(vault):
    main(["convert", str(vault), "--subsets"])
    states = {
        name: read_steps(find_vault(vault.parent / name))["infos/state"][:, 0].tolist()
        for name in ("Poor", "Medium", "Good")
    }
    assert states == {"Poor": [3, 4], "Medium": [5], "Good": [0, 1, 2]}
    assert find_vault(vault.parent / "Good").metadata["note"] == "kept"


def test_percentiles_keep_the_order(vault):
    main(["convert", str(vault), "--to", "part", "--percentiles", "30", "100"])
    assert read_steps(find_vault(vault.parent / "part"))["infos/state"][:, 0].tolist() == [
        0,
        1,
        2,
        5,
    ]


def test_ends_as_terminals(vault):
    main(["convert", str(vault), "--to", "ends", "--ends-as-terminals"])
    steps = read_steps(find_vault(vault.parent / "ends"))
    assert steps["terminals"][:, 0].tolist() == [False, False, True, False, True, True]
    assert steps["truncations"][:, 0].tolist() == [False] * 5 + [True]


def test_merge(vault, tmp_path):
    make_vault(tmp_path / "second", make_steps([2], [9]), {})
    main(["merge", str(vault), str(tmp_path / "second"), "--to", str(tmp_path / "both")])
    episodes = find_episodes(read_steps(find_vault(tmp_path / "both")))
    assert episodes.episode_return.tolist() == [6, 2, 4, 18]


def test_merge_of_unlike_vaults(vault, tmp_path):
    steps = make_steps([2], [9])
    del steps["infos/state"]
    make_vault(tmp_path / "second", steps, {})
    with pytest.raises(UserError, match="can't be merged"):
        main(["merge", str(vault), str(tmp_path / "second"), "--to", str(tmp_path / "both")])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["describe", "{folder}"], "holds 2 vaults, name one"),
        (["describe", "{folder}/nothing"], "holds no vault"),
        (["convert", "{vault}", "--to", "x", "--percentiles", "50", "20"], "lower one first"),
        (["convert", "{vault}", "--to", "x", "--percentiles", "50", "51"], "no episodes between"),
        (["convert", "{vault}", "--to", "other"], "is there already"),
        (["convert", "{vault}", "--subsets", "--percentiles", "0", "9"], "leave out --percentiles"),
    ],
)
def test_bad_input(vault, arguments, message):
    make_vault(vault.parent / "other", make_steps([1], [1]), {})
    names = {"vault": vault, "folder": vault.parents[2]}
    with pytest.raises(UserError, match=message):
        main([x.format(**names) for x in arguments])


def test_several_streams_are_refused(vault):
    text = (vault / "metadata.json").read_text()
    (vault / "metadata.json").write_text(text.replace("(1, 6, 2)", "(4, 6, 2)"))
    with pytest.raises(UserError, match="more than one stream"):
        find_vault(vault)


def test_nobody_else_writes_meanwhile(vault):
    writing = pytest.raises(UserError, match="another process is writing this vault")
    with closing(VaultWriter(vault, {}, keep=6)), writing:
        VaultWriter(vault, {}, keep=6)
    make_vault(vault, make_steps([1], [7]), keep=6)
    assert find_vault(vault).num_steps == 7


def test_steps_that_were_never_written_are_told(vault, capsys):
    make_vault(vault, None, keep=9)
    assert "has 6 of the 9 steps that the checkpoint knows" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["empty", "half"])
def test_a_damaged_vault_is_moved_away(damage, vault, capsys):
    """As a kill leaves it that comes while it is being made."""
    if damage == "empty":
        shutil.rmtree(vault)
        vault.mkdir()
    else:
        (vault / "metadata.json").write_text("{")
    make_vault(vault, make_steps([1], [7]), keep=6)
    assert find_vault(vault.parent).num_steps == 1
    assert "can't be read and is moved to" in capsys.readouterr().err


def test_a_folder_that_can_not_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"Can't write the vault .*/file/x"):
        VaultWriter(tmp_path / "file" / "x", {})


def test_a_vault_without_truncations(tmp_path):
    steps = make_steps([1], [1])
    del steps["truncations"]
    make_vault(tmp_path / "foreign", steps)
    with pytest.raises(UserError, match="lacks truncations"):
        main(["describe", str(tmp_path)])


def test_merge_leaves_out_unfinished_episodes(tmp_path):
    whole = make_steps([2], [1])
    open_end = {name: np.concatenate([x, x[:1]]) for name, x in whole.items()}
    make_vault(tmp_path / "a", open_end)
    make_vault(tmp_path / "b", whole)
    main(["merge", *(str(tmp_path / x) for x in "ab"), "--to", str(tmp_path / "both")])
    episodes = find_episodes(read_steps(find_vault(tmp_path / "both")))
    assert episodes.episode_return.tolist() == [2, 2]
