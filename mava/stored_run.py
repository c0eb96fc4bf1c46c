"""What a run folder knows of its run: the system file and the config, with changes to it."""

import hashlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from mava import config as configuration
from mava.config import Arch, LoggerConfig, RunConfig, UserError

CONFIGS = Path(__file__).parent / "configs"


def find_system_file(folder: Path) -> Path:
    """Returns the copy of the system file in a run folder; raises UserError."""
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder.")
    files = sorted(folder.glob("*.py"))
    if not (folder / "config.yaml").exists() or len(files) != 1:
        raise UserError(
            f"{folder} is no run folder: it needs config.yaml and one system file. A run's folder "
            "is printed when it starts."
        )
    return files[0]


def load_run(folder: Path, overrides: list[str]) -> tuple[ModuleType, RunConfig]:
    """Returns the stored system file as a module, and the stored config with overrides.

    Args:
        folder: of the run.
        overrides: such as "system.actor_lr=1e-4" or "env/scenario=tiny-4ag", in Hydra's grammar.

    Raises UserError.
    """
    file = find_system_file(folder).resolve()
    _find_neighbours(folder)
    path_hash = hashlib.sha256(str(file).encode()).hexdigest()[:8]  # many runs have one stem
    module = configuration.load_system(str(file), f"{file.stem}@{path_hash}")
    try:
        stored: Any = OmegaConf.load(folder / "config.yaml")
        cfg: Any = OmegaConf.create(
            {
                "arch": _defaults(Arch, "arch/anakin.yaml"),
                "system": configuration.schema_of(module.Config),
                "logger": _defaults(LoggerConfig, "logger/default.yaml"),
            }
        )
        cfg = OmegaConf.merge(cfg, stored)
        OmegaConf.set_struct(cfg, True)
        for override in overrides:
            _apply(cfg, override)
    except UserError:
        raise
    except (OmegaConfBaseException, HydraException, YAMLError) as error:
        raise UserError(f"{folder}: {error}") from error
    return module, configuration.parse(cfg, file)


def _find_neighbours(folder: Path) -> None:
    """Lets the copy of a system file import the modules that stood beside the original."""
    file = folder / "versions.json"
    original = json.loads(file.read_text()).get("system_file") if file.exists() else None
    if original is not None and str(Path(original).parent) not in sys.path:
        sys.path.append(str(Path(original).parent))


def _defaults(schema: type, file: str) -> DictConfig:
    """Returns the shipped values: what a config from before an option existed lacks."""
    values: Any = OmegaConf.load(CONFIGS / file)
    del values["defaults"]
    merged: Any = OmegaConf.merge(configuration.schema_of(schema), values)
    return merged


def _apply(cfg: DictConfig, text: str) -> None:
    override = OverridesParser.create().parse_override(text)
    key = override.key_or_group
    if key == "env/scenario":
        file = CONFIGS / "env" / "scenario" / f"{override.value()}.yaml"
        if not file.exists():
            names = ", ".join(configuration.scenarios_of(cfg.env.env_name))
            raise UserError(f"{text}: {cfg.env.env_name} has {names}.")
        cfg.env.scenario = OmegaConf.load(file)
        return
    if override.is_sweep_override():
        raise UserError(f"{text}: one value, not several.")
    if key == "vault":
        cfg.vault = configuration.absolute_path(str(override.value()))
        return
    if override.is_delete() or "." not in key or "/" in key:
        raise UserError(f"{text}: of a stored run only single options can be changed.")
    OmegaConf.update(cfg, key, override.value(), merge=True, force_add=override.is_add())
