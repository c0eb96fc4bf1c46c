"""Typed configuration: what Hydra composes becomes frozen dataclasses here, checked."""

import copy
import dataclasses
import importlib.util
import sys
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.errors import CompactHydraException
from hydra.utils import get_object, instantiate
from omegaconf import MISSING, DictConfig, OmegaConf

from mava.types import MarlEnv

# All that the experiment reads of a system's Config; also "total_timesteps", "frozen_teams" and, of
# one that learns offline, "sequence_length", if it has them.
SYSTEM_FIELDS = ("seed", "num_updates", "update_batch_size", "add_agent_id")


OPTIONS = {  # at the top of the config, beside the groups
    "resume": None,  # the folder of a run to go on with
    "vault": None,  # the folder of a vault to learn from, offline
    "skip_finished": False,  # do not run again what a finished run in base_exp_path did
}


class UserError(CompactHydraException):
    """A mistake in the input: Hydra prints the sentence alone and exits with 1."""


def short_reason(error: Exception) -> str:
    """Returns the end of what tensorstore says, after all the paths."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rsplit('": ', 1)[-1].rstrip(".")


def flat_names(tree: dict[str, Any], separator: str = ".") -> dict[str, Any]:
    """Returns {"system.gamma": 0.99} for {"system": {"gamma": 0.99}}."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            inner = flat_names(value, separator)
            flat |= {f"{name}{separator}{rest}": x for rest, x in inner.items()}
        else:
            flat[name] = value
    return flat


def absolute_path(path: str) -> str:
    """Returns where a path given by the user leads from anywhere."""
    return str(Path(path).expanduser().absolute())


@dataclass(frozen=True, kw_only=True)
class Arch:
    """Values and comments stand in configs/arch/anakin.yaml."""

    num_envs: int = MISSING
    num_devices: int | None = MISSING
    num_seeds: int = MISSING
    num_evaluation: int = MISSING
    num_eval_episodes: int = MISSING
    num_absolute_metric_eval_episodes: int = MISSING
    evaluation_greedy: bool = MISSING
    absolute_metric: bool = MISSING
    compilation_cache: str | None = MISSING
    debug: bool = MISSING

    def __post_init__(self) -> None:
        for name in ("num_envs", "num_seeds", "num_evaluation", "num_eval_episodes",
                     "num_absolute_metric_eval_episodes"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"arch.{name}={getattr(self, name)} must be at least 1.")
        if self.num_devices is not None and self.num_devices < 1:
            raise ValueError(f"arch.num_devices={self.num_devices} must be at least 1 or null.")


@dataclass(frozen=True, kw_only=True)
class LoadArgs:
    """Values and comments stand in configs/logger/default.yaml, also those of the next five."""

    run: str | None = MISSING
    checkpoint: str = MISSING


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    save_model: bool = MISSING
    save_interval_steps: int = MISSING
    max_to_keep: int = MISSING
    keep_period: int | None = MISSING
    max_block_seconds: float = MISSING
    load_model: bool = MISSING
    load_args: LoadArgs = field(default_factory=LoadArgs)


@dataclass(frozen=True, kw_only=True)
class VaultConfig:
    record: bool = MISSING
    path: str | None = MISSING
    name: str | None = MISSING
    uid: str | None = MISSING
    every: int = MISSING
    max_steps: int | None = MISSING
    max_megabytes: float | None = MISSING

    @property
    def has_cap(self) -> bool:
        return self.max_steps is not None or self.max_megabytes is not None


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    project: str = MISSING
    entity: str | None = MISSING
    mode: str = MISSING


@dataclass(frozen=True, kw_only=True)
class MlflowConfig:
    tracking_uri: str | None = MISSING
    experiment: str = MISSING


@dataclass(frozen=True, kw_only=True)
class LoggerConfig:
    base_exp_path: str = MISSING
    system_name: str | None = MISSING
    use_console: bool = MISSING
    use_tb: bool = MISSING
    use_json: bool = MISSING
    use_wandb: bool = MISSING
    use_mlflow: bool = MISSING
    use_neptune: bool = MISSING
    custom: list[str] = MISSING
    profile: int | None = MISSING
    render_every: int | None = MISSING
    checkpointing: Checkpointing = field(default_factory=Checkpointing)
    vault: VaultConfig = field(default_factory=VaultConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)

    def __post_init__(self) -> None:
        if self.render_every is not None and self.render_every < 1:
            raise ValueError(f"logger.render_every={self.render_every} must be at least 1.")
        if self.wandb.mode not in ("online", "offline"):
            raise ValueError(f"logger.wandb.mode={self.wandb.mode} must be online or offline.")
        vault = self.vault
        for name in ("every", "max_steps"):
            value = getattr(vault, name)
            if value is not None and value < 1:
                raise ValueError(f"logger.vault.{name}={value} must be at least 1.")
        if vault.max_megabytes is not None and not vault.max_megabytes > 0:
            raise ValueError(f"logger.vault.max_megabytes={vault.max_megabytes} must be above 0.")
        checkpointing = self.checkpointing
        for name in ("save_interval_steps", "max_to_keep", "keep_period"):
            value = getattr(checkpointing, name)
            if value is not None and value < 1:
                raise ValueError(f"logger.checkpointing.{name}={value} must be at least 1.")
        if checkpointing.load_args.checkpoint == "best":
            raise ValueError(
                "logger.checkpointing.load_args.checkpoint=best must be last or a number of steps: "
                "of the best parameters only the policy's are kept, not the critic's."
            )
        if checkpointing.load_model and checkpointing.load_args.run is None:
            raise ValueError(
                "logger.checkpointing.load_model=true needs a run folder in "
                "logger.checkpointing.load_args.run."
            )
        if checkpointing.load_args.run is not None and not checkpointing.load_model:
            raise ValueError(
                "logger.checkpointing.load_args.run is only read with "
                "logger.checkpointing.load_model=true."
            )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything one run is told."""

    system_file: Path
    system_name: str
    system: Any  # the system file's Config
    arch: Arch
    logger: LoggerConfig
    env_name: str
    task_name: str
    vault: str | None  # that to learn from, offline
    composed: DictConfig  # by Hydra: env and network are built from it, the run folder keeps it


def run_command(main: Callable[[list[str]], None]) -> None:
    """Runs a command line; what is wrong with it ends it with one sentence."""
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def load_system(path: str, name: str | None = None) -> ModuleType:
    """Imports a system file as an ordinary module called `name`, by default its stem.

    Never as `__main__`: other processes could not unpickle its classes.
    """
    file = Path(path).resolve()
    name = name or file.stem
    known = sys.modules.get(name)
    if known is not None:
        if getattr(known, "__file__", None) == str(file):
            return known
        raise UserError(f"Rename {file}: a module called '{name}' is in use already.")
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"{file} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        del sys.modules[name]
        raise UserError(f"{file} can't be imported: {error}.") from error
    return module


def register(config_class: type, system_name: str, network: str, arch: str = "anakin") -> None:
    """Makes Hydra know the schemas, the system's Config and the defaults of the main config."""
    fields = {field.name for field in dataclasses.fields(config_class)}
    missing = [name for name in SYSTEM_FIELDS if name not in fields]
    if missing:
        raise UserError(f"Config of {system_name} lacks {', '.join(missing)}.")
    store = ConfigStore.instance()
    store.store(group="system", name="default", node=schema_of(config_class))
    for group, schema in (("arch", Arch), ("logger", LoggerConfig)):
        store.store(group=group, name="schema", node=schema_of(schema))
    defaults = [
        {"arch": arch},
        {"system": "default"},
        {"env": "rware"},
        {"network": network},
        {"logger": "default"},
        "hydra_settings",
        "_self_",
        {"override hydra/job_logging": "stdout"},  # no log file
    ]
    store.store(name="mava", node={"defaults": defaults, **OPTIONS})


def schema_of(config_class: type) -> DictConfig:
    """Returns a typed node of a frozen dataclass that takes overrides."""
    node = OmegaConf.structured(config_class)
    _make_writable(node)
    return node


def _make_writable(node: DictConfig) -> None:
    """Lifts what makes the node of a frozen dataclass, and those in it, refuse overrides; in a
    dictionary also new keys.
    """
    OmegaConf.set_readonly(node, False)
    if OmegaConf.get_type(node) is dict:
        OmegaConf.set_struct(node, False)
    for name in node:
        child = node._get_node(name)
        if isinstance(child, DictConfig):
            _make_writable(child)


def parse(cfg: DictConfig, system_file: Path) -> RunConfig:
    """Returns the checked, frozen form of a composed config; raises UserError."""
    if cfg.logger.vault.path is not None:  # a run may go on from elsewhere
        cfg.logger.vault.path = absolute_path(cfg.logger.vault.path)
    try:
        system: Any = OmegaConf.to_object(cfg.system)
        arch: Any = OmegaConf.to_object(cfg.arch)
        logger: Any = OmegaConf.to_object(cfg.logger)
    except ValueError as error:
        raise UserError(f"Bad option: {error}") from error
    env, scenario = cfg.env, cfg.env.scenario
    if scenario.env_name != env.env_name:
        raise UserError(
            f"env/scenario={scenario.task_name} is a scenario of {scenario.env_name}, not of "
            f"{env.env_name}, which has: {', '.join(scenarios_of(env.env_name))}."
        )
    return RunConfig(
        system_file=system_file,
        system_name=logger.system_name or system_file.stem,
        system=system,
        arch=arch,
        logger=logger,
        env_name=env.env_name,
        task_name=scenario.task_name,
        vault=cfg.get("vault"),
        composed=cfg,
    )


def runs_of_seeds(run: RunConfig) -> list[RunConfig]:
    """Returns for each seed what would train it alone, in the order of the seeds."""
    if run.arch.num_seeds == 1 or run.arch.debug:
        return [run]
    runs = []
    for seed in range(run.system.seed, run.system.seed + run.arch.num_seeds):
        composed = copy.deepcopy(run.composed)
        composed.system.seed, composed.arch.num_seeds = seed, 1
        if run.logger.vault.uid is not None:  # a vault of each seed's own
            composed.logger.vault.uid = f"{run.logger.vault.uid}-seed_{seed}"
        runs.append(parse(composed, run.system_file))
    return runs


def scenarios_of(env_name: str) -> list[str]:
    """Returns the names of the shipped scenarios of an environment."""
    folder = Path(__file__).parent / "configs" / "env" / "scenario"
    scenarios = {file.stem: OmegaConf.load(file) for file in sorted(folder.glob("*.yaml"))}
    return [name for name, scenario in scenarios.items() if scenario.env_name == env_name]


def make_env(env_cfg: DictConfig) -> MarlEnv:
    """Builds the environment that `env.factory` names from the scenario and `env.kwargs`."""
    task: Any = OmegaConf.to_object(env_cfg.scenario.task_config)
    kwargs: Any = OmegaConf.to_object(env_cfg.kwargs)
    kwargs = {**task, **kwargs}
    try:
        factory = get_object(env_cfg.factory)
    except Exception as error:
        raise UserError(f"env.factory={env_cfg.factory} can't be imported: {error}") from error
    try:
        return factory(**kwargs)
    except ImportError as error:
        raise UserError(str(error)) from error
    except Exception as error:
        raise UserError(f"{env_cfg.factory} refuses {kwargs}: {error}") from error


class Parts(UserDict[str, Any]):
    """What a network is made of, and which of it no system has asked for."""

    def __init__(self, parts: dict[str, Any]) -> None:
        self.unread = set(parts)
        super().__init__(parts)

    def __getitem__(self, name: str) -> Any:
        self.unread.discard(name)
        return super().__getitem__(name)


def make_networks(network_cfg: DictConfig) -> dict[str, Any]:
    """Builds the modules named in the network config: network -> Parts, and plain numbers."""
    try:
        networks = instantiate(network_cfg, _convert_="all")
        return {name: Parts(x) if isinstance(x, dict) else x for name, x in networks.items()}
    except Exception as error:
        reason = error.__cause__ or error
        raise UserError(f"The network config can't be built: {reason}") from error


def unread_parts(networks: dict[str, Any]) -> list[str]:
    """Returns the modules, as network.part, that no system has asked for."""
    return sorted(
        f"{name}.{part}"
        for name, parts in networks.items()
        if isinstance(parts, Parts)
        for part in parts.unread
    )
