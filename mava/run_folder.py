"""One folder per run, with what is needed to know later what it was."""

import json
import os
import platform
import secrets
import shutil
import subprocess
import time
from importlib import metadata
from pathlib import Path

from filelock import FileLock, Timeout
from omegaconf import OmegaConf

import mava
from mava.config import RunConfig, UserError


def new_name() -> str:
    """Returns a name for a run folder: <time>-<id>. Seeds that are trained together share one."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def create_run_folder(run: RunConfig, name: str, versions: dict[str, object]) -> Path:
    """Makes results/<system>/<environment>/<task>/seed_<n>/<name> and returns it.

    It holds config.yaml, the system file and versions.json. Raises UserError if it can't be made.
    """
    folder = Path(
        run.logger.base_exp_path,
        run.system_name,
        run.env_name,
        run.task_name,
        f"seed_{run.system.seed}",
        name,
    )
    try:
        folder.mkdir(parents=True)
        shutil.copy(run.system_file, folder)
        write_config(run, folder)
        (folder / "versions.json").write_text(json.dumps(versions, indent=2))
    except OSError as error:
        raise UserError(
            f"logger.base_exp_path={run.logger.base_exp_path}: can't write {folder}: "
            f"{error.strerror}."
        ) from error
    return folder


def lock_folder(folder: Path) -> FileLock:
    """Makes sure that one process alone trains in a run folder, as long as it lives or until the
    lock is released; raises UserError.
    """
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        raise UserError(f"{folder}: another process is training there.") from error
    except OSError as error:
        raise UserError(f"Can't write to {folder}: {error.strerror}.") from error
    return lock


def write_config(run: RunConfig, folder: Path) -> None:
    """Writes config.yaml, or replaces it as a whole."""
    temporary = folder / "config.yaml.tmp"
    temporary.write_text(OmegaConf.to_yaml(run.composed, resolve=True))
    os.replace(temporary, folder / "config.yaml")


def find_versions(system_file: Path) -> dict[str, object]:
    """Returns the Python version, the git commits of the library and system file, all packages."""
    packages = {dist.name: dist.version for dist in metadata.distributions()}
    return {
        "system_file": str(system_file),
        "python": platform.python_version(),
        "mava_git_commit": _git_commit(Path(mava.__file__).parent),
        "system_file_git_commit": _git_commit(system_file.parent),
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
    }


def _git_commit(folder: Path) -> str | None:
    """Returns the commit checked out in `folder`, "-dirty" if changed; None outside of git."""
    if not shutil.which("git"):
        return None
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    result = subprocess.run(describe, cwd=folder, capture_output=True, text=True, check=False)
    return result.stdout.strip() or None
