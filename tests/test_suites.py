"""Every environment with a system, every system with every kind of environment."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from omegaconf import OmegaConf

import mava
from mava.check_env import find_problems, random_action
from mava.config import make_env, scenarios_of
from mava.wrappers.observation import AgentIds, GlobalState
from tests.running import SYSTEMS, is_recurrent, read_metrics, tiny, train

CONFIGS = Path(mava.__file__).parent / "configs" / "env"
ENVS = sorted(file.stem for file in CONFIGS.glob("*.yaml") if file.stem != "custom")
A2C = sorted(file.stem for file in SYSTEMS.glob("*a2c.py"))
PPO = sorted(file.stem for file in SYSTEMS.glob("*ppo.py"))
SMALL = {
    "connector": ["env/scenario=con-5x5x3a"],
    "jaxnav": ["env.kwargs.num_beams=10"],
    "mmst": ["env/scenario=mmst-2ag-12n"],
    "smax": ["env/scenario=3m"],
}
WON = {"cleaner", "connector", "hanabi", "jaxnav", "mmst", "multi_cvrp", "search_and_rescue",
       "smax", "switch_riddle"}  # fmt: skip
SLOW_TO_COMPILE = {"storm", "mabrax"}


def options(env):
    return [f"env={env}", "env.kwargs.time_limit=6", *SMALL.get(env, [])]  # some episodes end


def env_of(name, scenario=None):
    cfg = OmegaConf.load(CONFIGS / f"{name}.yaml")
    scenario = scenario or cfg.defaults[0].scenario
    cfg.scenario = OmegaConf.load(CONFIGS / "scenario" / f"{scenario}.yaml")
    return make_env(cfg)


def run(system, overrides, results, probe=None):
    """Trains a little and returns the record of the last evaluation."""
    cnn = any("cnn" in x for x in overrides)
    sizes = ["channel_sizes=[4]", "kernel_sizes=[3]", "strides=[1]"] if cnn else []
    small = [f"network.{n}_network.pre_torso.{x}" for n in ("actor", "critic") for x in sizes]
    train(system, *tiny(system), *overrides, *small, "logger.use_console=false",
          "logger.use_tb=false", "arch.num_devices=1", "arch.num_evaluation=1",
          "logger.checkpointing.save_model=false", f"logger.base_exp_path={results}",
          probe=probe)  # fmt: skip
    final = read_metrics(results)["absolute_metrics"]
    assert all(np.isfinite(value).all() for value in final.values())
    return final


def often(parameters, chosen):
    """Of these only the chosen ones are not slow: each kind of each thing is among them."""
    slow = pytest.mark.slow
    values = {x: x if isinstance(x, tuple) else (x,) for x in parameters}
    return [pytest.param(*values[x], marks=() if x in chosen else slow) for x in parameters]


TRAINED_OFTEN = ("coin_game", "hanabi", "jaxnav", "matrax", "mpe", "rware", "tag_continuous")


@pytest.mark.parametrize("env", often(ENVS, TRAINED_OFTEN))
def test_every_environment_trains(env, tmp_path):
    final = run("ff_ippo", options(env), tmp_path)
    assert ("win_rate" in final) == (env in WON)
    assert 0 <= final.get("win_rate", [0])[0] <= 100


KINDS = {
    "discrete": ["env=lbf", "env.kwargs.time_limit=6"],
    "continuous": ["env=search_and_rescue", "env.kwargs.time_limit=6"],
    "multi-discrete": [],
    "unequal": ["env=mpe", "env/scenario=simple_speaker_listener_v4", "env.kwargs.time_limit=6"],
    "grid": ["env=coin_game", "env.kwargs.time_limit=6", "network=cnn"],
}


KINDS_OFTEN = [
    ("ff_ippo", "unequal"), ("ff_mappo", "continuous"), ("rec_ippo", "grid"),
    ("rec_mappo", "multi-discrete"), ("ff_maac", "unequal"), ("ff_ia2c", "multi-discrete"),
    ("ff_maa2c", "grid"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("system", "kind"),
    often(
        [(system, kind) for system in (*PPO, *A2C) for kind in KINDS]
        + [("ff_maac", kind) for kind in ("discrete", "unequal", "grid")],
        KINDS_OFTEN,
    ),
)
def test_every_system_trains_every_kind(system, kind, tmp_path):
    overrides = [x for x in KINDS[kind] if system != "ff_maac" or x != "network=cnn"]
    if is_recurrent(system):
        overrides = [x.replace("network=cnn", "network=cnn_rnn") for x in overrides]
    run(system, overrides, tmp_path, probe="RightPair" if kind == "multi-discrete" else None)


WITH_DISCRETE_ACTIONS = sorted({*ENVS} - {"mabrax", "search_and_rescue", "tag_continuous"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("system", "env"),
    [(system, env) for system in PPO for env in ENVS]
    + [("ff_maac", env) for env in WITH_DISCRETE_ACTIONS],
)
def test_every_system_trains_every_environment(system, env, tmp_path):
    discrete = ["env.kwargs.action_type=discrete"] if (system, env) == ("ff_maac", "jaxnav") else []
    run(system, [*options(env), *discrete], tmp_path)


@pytest.mark.parametrize(
    "env", [pytest.param(x, marks=pytest.mark.slow if x in SLOW_TO_COMPILE else ()) for x in ENVS]
)
def test_every_environment_keeps_the_contract(env):
    """200 random steps: shapes, dtypes, masks, ends, and equal keys, equal episodes."""
    assert find_problems(env_of(env)) == []


SCENARIOS = [
    (env, scenario)
    for env in ENVS
    for scenario in scenarios_of(OmegaConf.load(CONFIGS / f"{env}.yaml").env_name)
]


def test_no_scenario_is_without_its_environment():
    files = sorted(file.stem for file in (CONFIGS / "scenario").glob("*.yaml"))
    assert files == sorted(scenario for _, scenario in SCENARIOS)
    for name in files:
        assert OmegaConf.load(CONFIGS / "scenario" / f"{name}.yaml").task_name == name


def sizes_of(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scenario"), SCENARIOS)
def test_every_scenario_agrees_with_its_spec(name, scenario):
    """Traced, not run: observations as the spec says, with the wrappers, after reset and step."""
    env = AgentIds(GlobalState(env_of(name, scenario)))
    spec = sizes_of(env.observation_spec)
    state, first = jax.eval_shape(env.reset, jax.random.key(0))
    choose = partial(random_action, env.action_spec)
    action = jax.eval_shape(choose, first.observation.action_mask, jax.random.key(0))
    state, later = jax.eval_shape(env.step, state, action)
    for timestep in (first, later):
        assert sizes_of(timestep.observation) == spec
        assert timestep.reward.shape == timestep.discount.shape == (env.num_agents,)
        assert timestep.reward.dtype == timestep.discount.dtype == jnp.float32
    assert jax.tree.structure(first.extras) == jax.tree.structure(later.extras)
