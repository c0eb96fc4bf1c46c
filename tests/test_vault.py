"""Vaults on disk: read, described, cut into parts, merged."""

import numpy as np
import pytest

from mava.config import UserError
from mava.vault import (
    VaultWriter,
    find_episodes,
    find_vault,
    main,
    read_steps,
)


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


@pytest.fixture
def vault(tmp_path):
    """Three episodes with returns 6, 2, 4."""
    folder = tmp_path / "vault" / "mava" / "x.vlt" / "first"
    VaultWriter(folder, {"note": "kept"}).write(make_steps([3, 2, 1], [2, 1, 4]))
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
    writer = VaultWriter(vault, {}, keep=5)
    writer.write(make_steps([1], [7]))
    assert read_steps(find_vault(vault))["infos/state"][:, 0].tolist() == [0, 1, 2, 3, 4, 0]
    VaultWriter(vault, {}, keep=100)
    assert find_vault(vault).num_steps == 6
    VaultWriter(vault, {}, keep=3)
    assert find_vault(vault).num_steps == 3


def test_describe(vault, capsys):
    main(["describe", str(vault)])
    output = capsys.readouterr().out
    assert "6 steps in 3 episodes: 2 ended, 1 were cut by the time limit" in output
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
    VaultWriter(tmp_path / "second", {}).write(make_steps([2], [9]))
    main(["merge", str(vault), str(tmp_path / "second"), "--to", str(tmp_path / "both")])
    episodes = find_episodes(read_steps(find_vault(tmp_path / "both")))
    assert episodes.episode_return.tolist() == [6, 2, 4, 18]


def test_merge_of_unlike_vaults(vault, tmp_path):
    steps = make_steps([2], [9])
    del steps["infos/state"]
    VaultWriter(tmp_path / "second", {}).write(steps)
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
    ],
)
def test_bad_input(vault, arguments, message):
    VaultWriter(vault.parent / "other", {}).write(make_steps([1], [1]))
    names = {"vault": vault, "folder": vault.parents[2]}
    with pytest.raises(UserError, match=message):
        main([x.format(**names) for x in arguments])


def test_several_streams_are_refused(vault):
    text = (vault / "metadata.json").read_text()
    (vault / "metadata.json").write_text(text.replace("(1, 6, 2)", "(4, 6, 2)"))
    with pytest.raises(UserError, match="more than one stream"):
        find_vault(vault)
