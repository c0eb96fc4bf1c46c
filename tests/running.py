"""Runs of systems inside the test process."""

import json
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

import mava
from mava import config as configuration
from mava import experiment
from mava.config import RunConfig

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


def system_module(name: str) -> Any:
    return configuration.load_system(str(SYSTEMS / f"{name}.py"))


def make_run(system: str, *overrides: str, probe: str | None = None, **kwargs: Any) -> RunConfig:
    """Composes a run as the command line would; `probe` names a class of tests.environments."""
    module = system_module(system)
    configuration.register(module.Config, system, "mlp")
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
