"""What is done with a trained policy: `python -m mava.evaluate` and `python -m mava.render`."""

import json

import imageio.v3 as iio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageSequence
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mava import evaluate, render
from mava.checkpoints import Checkpoints, read_checkpoint
from mava.config import UserError
from mava.evaluate import interval
from tests.running import TINY, read_metrics, run_folder, system_module, train

LBF = (*TINY, "env=lbf", "logger.use_console=false", "env.kwargs.time_limit=20")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two devices, with animations of every second evaluation."""
    results = tmp_path_factory.mktemp("trained")
    train(
        "ff_mappo", *LBF, f"logger.base_exp_path={results}", "system.num_updates=4",
        "arch.num_evaluation=4", "logger.render_every=2",
        "arch.num_absolute_metric_eval_episodes=12",
    )  # fmt: skip
    return results


@pytest.fixture(scope="module")
def with_wins(tmp_path_factory):
    """A run in an environment whose episodes differ, and which can't be drawn."""
    results = tmp_path_factory.mktemp("with_wins")
    train("ff_ippo", *TINY, f"logger.base_exp_path={results}", "logger.use_console=false",
          "arch.num_absolute_metric_eval_episodes=20", probe="RandomLength")  # fmt: skip
    return results


def evaluated(results, tmp_path, *options):
    file = tmp_path / "result.json"
    evaluate.main([f"run={run_folder(results)}", f"json={file}", *options])
    return json.loads(file.read_text())


def means(result):
    return {name: metric["mean"] for name, metric in result["metrics"].items()}


def test_it_gives_the_absolute_metric_again(with_wins, tmp_path, capsys):
    result = evaluated(with_wins, tmp_path)
    absolute = read_metrics(with_wins)["absolute_metrics"]
    for name in ("mean_episode_return", "win_rate"):
        assert means(result)[name] == absolute[name][0]
        assert result["metrics"][name]["low"] < absolute[name][0] < result["metrics"][name]["high"]
    assert 0 < absolute["win_rate"][0] < 100  # or the test would show nothing
    output = capsys.readouterr().out
    assert "best checkpoint, saved after 128 environment steps, on Probe RandomLength" in output
    assert "20 episodes (mean, 95 % interval)" in output
    assert "win_rate" in output


def test_devices_and_copies_do_not_matter(with_wins, tmp_path):
    both = [
        evaluated(with_wins, tmp_path, "checkpoint=last", "num_episodes=9", *options)
        for options in (["num_devices=1", "num_envs=2"], ["num_devices=2", "num_envs=16"])
    ]
    assert both[0] == both[1]
    assert both[0]["num_episodes"] == len(both[0]["metrics"]["win_rate"]["episodes"]) == 9
    other = evaluated(with_wins, tmp_path, "checkpoint=last", "num_episodes=9", "seed=1")
    assert other["metrics"] != both[0]["metrics"]


def test_checkpoints_and_greedy_actions(tmp_path, monkeypatch):
    """Action 1 pays; after the first block it is likelier than 0, after the second less likely."""
    module = system_module("ff_ippo")
    learn = module.learn

    def overwritten(algo, learner_state, samples, key):
        bias = jnp.where(learner_state.optim_states.actor[1][0].count == 0, 0.5, -0.5)
        learner_state, metrics = learn(algo, learner_state, samples, key)
        actor = jax.tree.map(jnp.zeros_like, learner_state.params.actor)
        actor["params"]["head"]["Dense_0"]["bias"] = bias * jnp.array([0.0, 1.0])
        params = learner_state.params._replace(actor=actor)
        return learner_state.replace(params=params), metrics

    monkeypatch.setattr(module, "learn", overwritten)
    monkeypatch.setattr(Checkpoints, "save_if_due", Checkpoints.save_now)
    train("ff_ippo", *TINY, f"logger.base_exp_path={tmp_path}", "arch.num_eval_episodes=64",
          probe="RewardOfAction")  # fmt: skip
    options = ("num_episodes=400", "seed=0")
    returns = {
        (checkpoint, greedy): means(
            evaluated(tmp_path, tmp_path, f"checkpoint={checkpoint}", f"greedy={greedy}", *options)
        )["mean_episode_return"]
        for checkpoint in ("best", "64", "last")
        for greedy in ("false", "true")
    }
    probability = 1 / (1 + np.exp(-0.5))
    for checkpoint in ("best", "64"):
        assert abs(returns[checkpoint, "false"] - probability) < 0.07
        assert returns[checkpoint, "true"] == 1.0
    assert abs(returns["last", "false"] - (1 - probability)) < 0.07
    assert returns["last", "true"] == 0.0


def test_another_scenario_and_other_options(trained, tmp_path, capsys):
    result = evaluated(trained, tmp_path, "env/scenario=8x8-2p-2f-coop", "env.kwargs.time_limit=7")
    assert result["task"] == "8x8-2p-2f-coop"
    assert result["metrics"]["mean_episode_length"]["high"] <= 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["env/scenario=15x15-4p-5f"],
            r"policy of .* does not fit: best_params/params/torso/Dense_0/kernel is float32 "
            r"\(14, 16\) in the checkpoint, float32 \(31, 16\) here",
        ),
        (["env/scenario=huge"], "env/scenario=huge: LevelBasedForaging has 10x10-3p-3f"),
        (["env/scenario=tiny-2ag"], "tiny-2ag is a scenario of RobotWarehouse"),
        (["checkpoint=7"], r"checkpoint=7 must be best, last or one of the steps"),
        (["num_episodes=0"], "num_episodes=0 must be at least 1"),
        (["num_devices=3"], r"^num_devices=3, but there are 2"),
        (["num_episodes=x"], "could not be converted to Integer"),
        (["episodes=3"], "episodes=3: unknown. The options are run, checkpoint, num_episodes"),
        (["env.kwargs.limit=3"], "Key 'limit' is not in struct"),
        (["env.kwargs.time_limit=["], "no viable alternative|token recognition|missing|mismatched"),
        (["env.kwargs.time_limit=3,4"], "env.kwargs.time_limit=3,4: one value, not several"),
        (["seed=99999999999999"], "seed=99999999999999 must be between 0 and"),
        (["json=/nowhere/x.json"], "json=/nowhere/x.json: can't write it"),
    ],
)
def test_what_evaluate_refuses(options, message, trained):
    with pytest.raises(UserError, match=message):
        evaluate.main([f"run={run_folder(trained)}", *options])


def test_it_needs_a_run(tmp_path):
    with pytest.raises(UserError, match="run=<folder of a run> is missing"):
        evaluate.main([])
    (tmp_path / "config.yaml").write_text("")
    (tmp_path / "x.py").write_text("Config = None")
    with pytest.raises(UserError, match="There are no checkpoints in"):
        read_checkpoint(tmp_path, "best")


def test_intervals():
    low, high = 2 - 4.302653 * 1 / 3**0.5, 2 + 4.302653 * 1 / 3**0.5  # t of 2 degrees, 97.5 %
    np.testing.assert_allclose(interval("x", np.array([1.0, 2.0, 3.0])), (2, low, high), rtol=1e-6)
    # Wilson, 3 of 3: lower bound n / (n + z^2)
    np.testing.assert_allclose(
        interval("win_rate", np.full(3, 100.0)), (100, 100 * 3 / (3 + 1.959964**2), 100), rtol=1e-6
    )
    assert np.isnan(interval("x", np.array([1.0])).low)


def rendered(results, tmp_path, capsys, *options, out="episode.gif"):
    """Returns the images of a file and what was said of the episodes."""
    file = tmp_path / out
    render.main([f"run={run_folder(results)}", f"out={file}", *options])
    return iio.imread(file, plugin="pyav" if out.endswith("mp4") else None), capsys.readouterr().out


def test_an_animation_of_complete_episodes(trained, tmp_path, capsys):
    images, output = rendered(trained, tmp_path, capsys, "episodes=2", "fps=2")
    assert images.shape[1:] == (500, 500, 3)
    assert output.count("length 20") == 2
    assert len(images) > 10  # agents move; equal images in a row are one
    with Image.open(tmp_path / "episode.gif") as gif:
        seconds = [frame.info["duration"] / 1000 for frame in ImageSequence.Iterator(gif)]
        assert gif.info["loop"] == 0
    # The first state and those after each of 20 steps, half a second each; then a second's pause.
    np.testing.assert_allclose(sum(seconds), 2 * (21 * 0.5 + 1), atol=0.05)
    assert [path.name for path in tmp_path.iterdir()] == ["episode.gif"]


def test_the_episodes_are_those_that_are_evaluated(trained, tmp_path, capsys):
    """Also after another number of steps than the limit: those of a policy that is not trained."""
    result = evaluated(trained, tmp_path, "num_episodes=3")["metrics"]
    _, output = rendered(trained, tmp_path, capsys, "episodes=3", "fps=60")
    for number in range(3):
        episode_return, length = (
            result[f"mean_episode_{name}"]["episodes"][number] for name in ("return", "length")
        )
        assert f"episode {number}: return {episode_return:.4g}, length {length:.0f}\n" in output


def test_a_film(trained, tmp_path, capsys):
    images, _ = rendered(trained, tmp_path, capsys, "fps=5", out="episode.mp4")
    assert images.shape == (26, 500, 500, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["out=x.png"], "out=x.png must end in .gif or .mp4"),
        (["episodes=0"], "must be above 0"),
        (["fps=0"], "must be above 0"),
        (["out=/nowhere/x.gif"], "out=/nowhere/x.gif: can't write it"),
    ],
)
def test_what_render_refuses(options, message, trained):
    with pytest.raises(UserError, match=message):
        render.main([f"run={run_folder(trained)}", *options])


def test_an_environment_without_pictures(with_wins, tmp_path):
    with pytest.raises(UserError, match="RandomLength can't be rendered: it has no `draw"):
        render.main([f"run={run_folder(with_wins)}"])
    with pytest.raises(UserError, match="RandomLength can't be rendered"):
        train("ff_ippo", *TINY, "logger.render_every=1", f"logger.base_exp_path={tmp_path}",
              probe="RandomLength")  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_animations_during_training(trained):
    folder = run_folder(trained) / "animations"
    steps = [x["step_count"] for x in read_metrics(trained).values() if "step_count" in x]
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"step_{step}.gif" for step in (steps[1], steps[3])
    )
    accumulator = EventAccumulator(str(run_folder(trained) / "tensorboard"))
    accumulator.Reload()
    images = accumulator.Images("evaluation/episode")
    assert [image.step for image in images] == [steps[1], steps[3]]
    assert (images[0].width, images[0].height) == (500, 500)
    assert images[0].encoded_image_string == (folder / f"step_{steps[1]}.gif").read_bytes()
