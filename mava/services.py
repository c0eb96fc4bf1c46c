"""Loggers that are asked for by name: Weights & Biases, MLflow, Neptune, and a user's own.

Each is a class with the methods of `Logger`, made as `MyLogger(folder, config)`. Its package is
imported when a run asks for it. An error at the start ends the run, a later one only the logger.
"""

import importlib
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock
from hydra.utils import get_object
from omegaconf import OmegaConf

from mava.config import LoggerConfig, RunConfig, UserError, flat_names
from mava.logger import Event, Logger

MakeLogger = Callable[[Path, RunConfig], Logger]  # from the run's folder and config


def find_loggers(options: LoggerConfig) -> dict[str, MakeLogger]:
    """Returns what makes the loggers that are asked for, by the option; raises UserError."""
    found: dict[str, MakeLogger] = {}
    for package, make in SERVICES.items():
        option = f"logger.use_{package}=true"
        if getattr(options, f"use_{package}"):
            try:
                importlib.import_module(package)
            except ImportError as error:
                raise UserError(
                    f"{option} needs the package {package}, which can't be imported ({error}): "
                    f"pip install -e '.[{package}]'"
                ) from error
            found[option] = make
    for path in options.custom:
        option = f"logger.custom=[{path}]"
        try:
            found[option] = get_object(path)
        except Exception as error:
            raise UserError(f"{option} can't be imported: {_reason(error)}") from error
    return found


def start_loggers(
    found: dict[str, MakeLogger], folder: Path, config: RunConfig, stack: ExitStack
) -> list[Logger]:
    """Returns running loggers, which the stack closes; raises UserError.

    Args:
        found: what makes them, by the option.
        folder: of the run.
        config: of the run.
        stack: which closes them.
    """
    loggers: list[Logger] = []
    for option, make in found.items():
        try:
            logger = make(folder, config)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"{option} can't start: {_reason(error)}") from error
        for method in ("write", "close"):
            if not callable(getattr(logger, method, None)):
                raise UserError(f"{option} can't start: it has no method {method}.")
        loggers.append(Guarded(option, logger))
        stack.callback(loggers[-1].close)
    return loggers


class Guarded:
    """A logger that can't stop a run: if it fails, that is said once and it gets nothing more."""

    def __init__(self, option: str, logger: Logger) -> None:
        self._option, self._logger = option, logger
        self._failed = False

    def write(self, event: Event) -> None:
        if not self._failed:
            self._try(lambda: self._logger.write(event))

    def close(self) -> None:
        self._try(self._logger.close)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            if not self._failed:
                print(
                    f"{self._option} failed and logs nothing more; the run goes on: "
                    f"{_reason(error)}",
                    file=sys.stderr,
                )
            self._failed = True


class WandbLogger:
    """A run of Weights & Biases, written to `wandb` in the run's folder and, online, sent there.

    A run that goes on is the same one there.
    """

    def __init__(self, folder: Path, config: RunConfig) -> None:
        import wandb

        options = config.logger.wandb
        is_online = options.mode == "online"
        # After the last event, at most a minute is spent on what was not sent yet.
        settings = wandb.Settings(console="off", silent=True, init_timeout=30, finish_timeout=60)
        try:
            self._run = wandb.init(
                project=options.project,
                entity=options.entity,
                mode=options.mode,
                id=_run_id(folder, config),
                name=_run_name(config),
                dir=folder,
                config=_config_of(config),
                resume="allow" if is_online else None,
                reinit="create_new",
                settings=settings,
            )
        except wandb.Error as error:
            raise UserError(
                f"logger.use_wandb=true can't start: {_reason(error)} (logger.wandb.mode=offline "
                "needs no connection.)"
            ) from error
        self._run.define_metric("env_step", hidden=True)
        self._run.define_metric("*", step_metric="env_step")
        if is_online and config.logger.use_console:
            print(f"Weights & Biases: {self._run.url}", flush=True)

    def write(self, event: Event) -> None:
        self._run.log({"env_step": event.env_step, **_named(event)})

    def close(self) -> None:
        self._run.finish(exit_code=int(is_failing()))


class MlflowLogger:
    """A run of MLflow: in a database beside the results, or on a server.

    A run that goes on is the same one there; the parameters stay those it started with.
    """

    def __init__(self, folder: Path, config: RunConfig) -> None:
        # A server that is away is given up in seconds: training waits for every write.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        options = config.logger.mlflow
        results = folder.resolve().parents[4]  # logger.base_exp_path
        with FileLock(results / ".mlflow.lock"):  # of two that make the database one would fail
            uri = options.tracking_uri or f"sqlite:///{results / 'mlflow.db'}"
            self._client = MlflowClient(uri)
            experiment = self._experiment_id(options.experiment)
        run_id = _run_id(folder, config)
        runs = self._client.search_runs([experiment], f"tags.mava_run = '{run_id}'")
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        tags = {"mava_run": run_id, "folder": str(folder.resolve())}
        run = self._client.create_run(experiment, tags=tags, run_name=_run_name(config))
        self._id = run.info.run_id
        self._log_params(_config_of(config))

    def _experiment_id(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is None:
            with suppress(MlflowException):  # another run may be first
                return self._client.create_experiment(name)
            found = self._client.get_experiment_by_name(name)
        return found.experiment_id

    def _log_params(self, config: dict[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(name, str(value)[:6000]) for name, value in flat_names(config).items()]
        for start in range(0, len(params), 100):  # more at a time are refused
            self._client.log_batch(self._id, params=params[start : start + 100])

    def write(self, event: Event) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, x, now, event.env_step) for name, x in _named(event).items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id, "FAILED" if is_failing() else "FINISHED")


class NeptuneLogger:
    """Writes with the Neptune client in offline mode to `neptune` in the run's folder.

    A run that goes on writes another record, with the same custom_run_id.
    """

    def __init__(self, folder: Path, config: RunConfig) -> None:
        import neptune

        print(
            "logger.use_neptune=true: Neptune's hosted service closed in March 2026; the run is "
            f"recorded offline, in {folder / 'neptune'}, and can't be sent there.",
            file=sys.stderr,
        )
        logging.getLogger("neptune").setLevel(logging.WARNING)
        before = os.environ.get("NEPTUNE_DATA_DIRECTORY")
        os.environ["NEPTUNE_DATA_DIRECTORY"] = str(folder / "neptune")
        try:
            self._run = neptune.init_run(
                mode="offline",
                name=_run_name(config),
                custom_run_id=_run_id(folder, config),
                source_files=[],
                git_ref=False,
                capture_stdout=False,
                capture_stderr=False,
                capture_traceback=False,
                capture_hardware_metrics=False,
            )
        finally:
            del os.environ["NEPTUNE_DATA_DIRECTORY"]
            if before is not None:
                os.environ["NEPTUNE_DATA_DIRECTORY"] = before
        self._run["config"] = {
            name: str(x) for name, x in flat_names(_config_of(config), "/").items()
        }

    def write(self, event: Event) -> None:
        for name, value in _named(event).items():
            self._run[name].append(value, step=event.env_step)

    def close(self) -> None:
        self._run.stop()


SERVICES: dict[str, MakeLogger] = {  # by package: the option is use_<package>, the extra <package>
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
    "neptune": NeptuneLogger,
}


def _named(event: Event) -> dict[str, float]:
    """Returns the values under the names that TensorBoard shows."""
    return {f"{event.kind}/{name}": float(value) for name, value in event.values.items()}


def _run_id(folder: Path, config: RunConfig) -> str:
    """Returns what tells a run from all others; the same when it goes on."""
    return f"{folder.name}-{config.system.seed}"


def _run_name(config: RunConfig) -> str:
    return f"{config.system_name} {config.task_name} seed {config.system.seed}"


def _config_of(config: RunConfig) -> dict[str, Any]:
    """Returns what config.yaml holds."""
    container: Any = OmegaConf.to_container(config.composed, resolve=True)
    return container


def is_failing() -> bool:
    """Whether an error is what closes the loggers."""
    return sys.exc_info()[0] is not None


def _reason(error: Exception) -> str:
    """Returns an error in one line."""
    text = " ".join(str(error).split())
    text = text if len(text) <= 300 else f"{text[:297]}..."
    return f"{type(error).__name__}: {text}"
