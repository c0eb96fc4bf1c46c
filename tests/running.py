"""Runs of systems inside the test process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

import mava
from mava import config as configuration
from mava import experiment
from mava.config import RunConfig
from mava.types import System
from mava.utils.parallel import AXES

SYSTEMS = Path(mava.__file__).parent / "systems"
TINY = (  # seconds to compile, milliseconds to run
    "arch.num_envs=4",
    "arch.num_eval_episodes=4",
    "arch.num_absolute_metric_eval_episodes=4",
    "system.rollout_length=8",
    "system.num_updates=2",
    "arch.num_evaluation=2",
    "network.actor_network.pre_torso.layer_sizes=[16]",
    "network.critic_network.pre_torso.layer_sizes=[16]",
)
TINY_RNN = (
    *TINY,
    "network.hidden_state_dim=16",
    "network.actor_network.post_torso.layer_sizes=[16]",
    "network.critic_network.post_torso.layer_sizes=[16]",
)


TINY_MAAC = (
    *TINY[:6],
    "system.batch_size=32",
    "system.buffer_size=256",
    "system.num_gradient_steps=2",
    "network.actor_network.policy.layer_sizes=[16]",
    "network.critic_network.attention.hidden_dim=16",
)


TINY_BC = (
    *TINY[:3],
    *TINY[4:6],
    "system.batch_size=8",
    "system.sequence_length=4",
    "network.hidden_state_dim=16",
    "network.actor_network.pre_torso.layer_sizes=[16]",
    "network.actor_network.post_torso.layer_sizes=[16]",
)
TINY_MAICQ = (
    *TINY_BC,
    "network.critic_network.pre_torso.layer_sizes=[16]",
    "network.critic_network.post_torso.layer_sizes=[16]",
    "network.mixing_network.mixer.layer_sizes=[16]",
)
OTHERS = {  # network and options of systems that are not PPO's
    "ff_maac": ("maac", TINY_MAAC),
    "rec_bc": ("rnn_actor", TINY_BC),
    "rec_maicq": ("maicq", TINY_MAICQ),
}


def tiny(system: str) -> tuple[str, ...]:
    if system in OTHERS:
        return OTHERS[system][1]
    return TINY_RNN if is_recurrent(system) else TINY


def network_of(system: str) -> str:
    if system in OTHERS:
        return OTHERS[system][0]
    return "rnn" if is_recurrent(system) else "mlp"


def is_recurrent(system: str) -> bool:
    return system.startswith("rec_")


def system_module(name: str) -> Any:
    return configuration.load_system(str(SYSTEMS / f"{name}.py"))


def make_run(system: str, *overrides: str, probe: str | None = None, **kwargs: Any) -> RunConfig:
    """Composes a run as the command line would; `probe` names a class of tests.environments."""
    module = system_module(system)
    configuration.register(module.Config, system, network_of(system))
    with initialize_config_module("mava.configs", version_base=None):
        cfg = compose("mava", list(overrides))
    if probe is not None:
        OmegaConf.set_struct(cfg, False)
        cfg.env = {
            "env_name": "Probe",
            "factory": f"tests.environments.{probe}",
            "scenario": {"env_name": "Probe", "task_name": probe, "task_config": {}},
            "kwargs": kwargs,
        }
    return configuration.parse(cfg, SYSTEMS / f"{system}.py")


def build(name: str, *overrides: str, probe: str = "RightAction", **kwargs: Any) -> Any:
    """Returns the environments, the system and the plan of a tiny run."""
    run = make_run(name, *tiny(name), *overrides, probe=probe, **kwargs)
    return experiment.build(system_module(name), run)


def over_axes(function: Callable, num_devices: int = 1, num_replicas: int = 1) -> Callable:
    """Maps update over both axes, all outputs with leading axes (D, U)."""
    inner = jax.vmap(function, (None, 0), axis_name=AXES[1], axis_size=num_replicas)
    return jax.jit(jax.vmap(inner, (None, 0), axis_name=AXES[0], axis_size=num_devices))


def streams(system: System, key: jax.Array, num_devices: int = 1, num_replicas: int = 1) -> Any:
    reset = jax.jit(jax.vmap(jax.vmap(system.reset)))
    return reset(jax.random.split(key, (num_devices, num_replicas)))


def trained(name: str, num_updates: int, *overrides: str, **kwargs: Any) -> tuple[Any, Any]:
    """Returns the algorithm's parts and the learner state after some updates."""
    _, system, _ = build(name, *overrides, **kwargs)
    update = over_axes(lambda *states: system.update(*states)[:3])

    def body(i, carry):
        learner_state, actor_state = carry
        learner_state, actor_state, _ = update(learner_state, actor_state)
        return jax.tree.map(lambda x: x[0, 0], learner_state), actor_state

    start = (jax.jit(system.init)(jax.random.key(0)), streams(system, jax.random.key(1)))
    learner_state, _ = jax.jit(lambda *c: jax.lax.fori_loop(0, num_updates, body, c))(*start)
    return system.update.args[0], learner_state


def mean_return(name: str, num_updates: int, *overrides: str, **kwargs: Any) -> float:
    """Returns the mean return of the episodes in the last of some updates."""
    _, system, _ = build(name, *overrides, **kwargs)
    update = over_axes(system.update)

    def body(i, carry):
        learner_state, actor_state, metrics, _ = update(*carry[:2])
        return jax.tree.map(lambda x: x[0, 0], learner_state), actor_state, metrics.episodes

    def run(learner_state, actor_state):
        metrics = jax.eval_shape(update, learner_state, actor_state)[2].episodes
        metrics = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), metrics)
        carry = (learner_state, actor_state, metrics)
        return jax.lax.fori_loop(0, num_updates, body, carry)

    start = (jax.jit(system.init)(jax.random.key(0)), streams(system, jax.random.key(1)))
    stats = jax.jit(run)(*start)[2]["episode_return"]
    return float((stats.sum / stats.count)[0, 0])


def train(system: str, *overrides: str, probe: str | None = None, **kwargs: Any) -> float:
    return experiment.run(
        system_module(system), make_run(system, *overrides, probe=probe, **kwargs)
    )


def run_folder(results: Path) -> Path:
    """Returns the only run folder below a results folder."""
    (folder,) = (file.parent for file in results.rglob("config.yaml"))
    return folder


def read_metrics(results: Path) -> dict[str, Any]:
    """Returns the record of the only run below a results folder."""
    record: Any = json.loads((run_folder(results) / "metrics.json").read_text())
    for _ in range(4):  # environment, task, system, seed
        (record,) = record.values()
    return record


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    """The record, less what depends on the clock."""
    times = ("elapsed_time", "steps_per_second")
    return {
        step: {name: value for name, value in values.items() if name not in times}
        for step, values in record.items()
    }
