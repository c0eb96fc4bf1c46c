"""The example of the documentation is right, and every kind of mistake is named."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from mava.check_env import find_problems
from mava.wrappers.jaxmarl import MpeEnv
from tests import environments
from tests.environments import Probe, RightAction
from tests.running import SYSTEMS, TINY

DOCUMENT = Path(__file__).parent.parent / "docs" / "custom_environment.md"


def test_the_documented_example_runs_as_written(tmp_path):
    text = DOCUMENT.read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert 30 <= len(code.splitlines()) <= 50
    (tmp_path / "meeting.py").write_text(code)
    checked = subprocess.run(
        [sys.executable, "-m", "mava.check_env", "meeting:Meeting"],
        cwd=tmp_path, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert "keeps the contract: 2 agents" in checked.stdout
    (command,) = re.findall(r"python mava/systems/(\w+\.py) (env=custom.*)", text)
    subprocess.run(
        [sys.executable, str(SYSTEMS / command[0]), *command[1].split(), *TINY,
         "logger.use_tb=false"],
        cwd=tmp_path, check=True, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert list(tmp_path.glob("results/ff_ippo/Custom/default/seed_42/*/metrics.json"))


@pytest.mark.parametrize(
    "env", [RightAction(), environments.RightPair(), environments.RightPlace(),
            environments.OneOut(), environments.RandomEnds(), MpeEnv("simple_tag_v3")],
    ids=lambda env: type(env).__name__,
)  # fmt: skip
def test_right_environments_pass(env):
    assert find_problems(env) == []


def change(**changes):
    """Returns a probe whose steps have other fields."""

    class Changed(Probe):
        time_limit = 10

        def step(self, state, action):
            state, timestep = super().step(state, action)
            timestep = timestep.replace(step_type=jnp.int8(1), discount=jnp.ones(2))
            timestep = timestep.replace(
                **{name: value(timestep) for name, value in changes.items()}
            )
            last = timestep.observation.step_count >= self.time_limit
            if "step_type" not in changes:
                timestep = timestep.replace(step_type=jnp.where(last, 2, 1).astype(jnp.int8))
            return state, timestep

    return Changed()


def observe(**changes):
    return change(
        observation=lambda timestep: timestep.observation.replace(
            **{name: value(timestep.observation) for name, value in changes.items()}
        )
    )


def numpy_noise(timestep):
    return timestep.reward + np.random.default_rng().normal()


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (change(reward=lambda t: t.reward[0]), "reward after step is () float32 and must have one"),
        (change(discount=lambda t: t.discount[:1]), "discount after step is (1,) float32"),
        (change(reward=lambda t: t.reward.astype(int)), "reward after step is (2,) int32"),
        (change(reward=numpy_noise), "Equal keys give different episodes"),
        (change(reward=lambda t: t.reward / 0), "A NaN or an infinity in the reward."),
        (change(discount=lambda t: 0.5 * t.discount), "discount must be 0 (ended) or 1"),
        (change(discount=lambda t: 0 * t.discount), "At step 1 every agent's discount is 0 and"),
        (change(step_type=lambda t: jnp.int8(1)), "An episode goes on after time_limit = 10 steps"),
        (change(step_type=lambda t: jnp.int32(1)), "step_type after step is () int32"),
        (change(extras=lambda t: {"more": t.reward}), "Not the same fields in extras of step"),
        (observe(agents_view=lambda o: o.agents_view[:, 0]), "agents_view after step is (2,) flo"),
        (observe(action_mask=lambda o: o.action_mask.astype(int)), "action_mask after step is (2,"),
        (observe(action_mask=lambda o: o.action_mask & False), "agent 0 has no legal action."),
        (observe(step_count=lambda o: o.step_count - 1), "step_count must be 0 after a reset"),
    ],
)
def test_mistakes_are_named(env, message):
    problems = find_problems(env)
    assert any(message in problem for problem in problems), problems


class NoSpec(Probe):
    action_spec, num_choices = 5, 2
    time_limit = None


class Broken(Probe):
    def step(self, state, action):
        return state, jnp.ones(3) + jnp.ones(2)


class StateOfAnotherType(Probe):
    def step(self, state, action):
        state, timestep = super().step(state, action)
        return state.replace(step_count=state.step_count.astype(jnp.float32)), timestep


class WonByEach(Probe):
    def reset(self, key):
        state, first = super().reset(key)
        extras = {"won_episode": jnp.zeros(2, bool), "env_metrics": {"found": jnp.int32(0)}}
        return state, first.replace(extras=extras)


class NoTimeStep(Probe):
    def step(self, state, action):
        return state, {"reward": 1.0}


class SpecFails(Probe):
    @property
    def observation_spec(self):
        return 1 / 0


def test_mistakes_of_the_class():
    assert find_problems(WonByEach()) == [
        'extras["won_episode"] is (2,) bool and must be () bool.',
        'extras["env_metrics"]["found"] is () int32, not a () float.',
    ]
    assert find_problems(NoTimeStep()) == ["step(state, action) must return (state, TimeStep)."]
    assert find_problems(SpecFails()) == [
        "observation_spec fails: ZeroDivisionError: division by zero"
    ]
    problems = find_problems(NoSpec())
    assert problems[0] == "time_limit is None and must be a positive int."
    assert problems[1].startswith("action_spec is 5 and must be Discrete | MultiDiscrete")
    (problem,) = find_problems(Broken())
    assert problem.startswith("step(state, action) fails: TypeError")
    (problem,) = find_problems(StateOfAnotherType())
    assert "step_count in the state after step is () float32, but () int32 in reset" in problem


@pytest.mark.parametrize(
    ("argument", "message"),
    [("nothing", "python -m mava.check_env"), ("nowhere:Env", "nowhere:Env can't be made")],
)
def test_what_the_command_refuses(argument, message):
    from mava.check_env import main
    from mava.config import UserError

    with pytest.raises(UserError, match=message):
        main([argument])
