"""Where results go: terminal, TensorBoard, MARL-eval JSON. Each logger takes the same events."""

import json
import math
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from mava.config import UserError
from mava.plan import Plan
from mava.snapshot import Progress
from mava.summary import OF_TEAM, half_interval, mean_over_seeds

JSON_METRICS = ("mean_episode_return", "win_rate", "steps_per_second")


class Event(NamedTuple):
    """A set of values measured at one point of training."""

    kind: Literal["train", "evaluation", "absolute"]
    evaluation: int  # its number, from 0
    env_step: int  # environment steps taken so far, on all devices
    elapsed: float  # seconds since the first evaluation
    values: dict[str, float]


class Logger(Protocol):
    """Where the events of a run go; docs/loggers.md says how to add one."""

    def write(self, event: Event) -> None:
        """Takes an event; training waits for it."""

    def close(self) -> None:
        """Is called once, at the end or when the run stops early."""


def read_record(path: Path) -> dict[str, Any]:
    """Returns what a JsonLogger wrote of its run, by step; empty if there is no such file."""
    if not path.exists():
        return {}
    try:
        record: Any = json.loads(path.read_text())
        for _ in range(4):  # environment, task, system, seed
            (record,) = record.values()
    except (AttributeError, ValueError) as error:
        raise UserError(
            f"{path} is not what the run wrote ({error}). Move it away to go on without the "
            "evaluations in it."
        ) from error
    return record


class JsonLogger:
    """Writes metrics.json in MARL-eval's format (Gorsane et al. 2022, arXiv:2209.10485).

    {env: {task: {system: {"seed_<n>": {"step_<i>": {...}, ..., "absolute_metrics": {...}}}}}},
    metrics as lists of one number. The file is replaced as a whole, so it is valid at any moment.
    """

    def __init__(
        self, path: Path, env: str, task: str, system: str, seed: int, num_evaluations: int = 0
    ) -> None:
        """Args:
        path: of the file.
        env: the names under which the metrics stand, so with task, system and seed.
        num_evaluations: of a file that is there already; what comes after them is removed.
        """
        self._path = path
        stored = read_record(path) if num_evaluations else {}
        kept = {f"step_{index}" for index in range(num_evaluations)}
        self._run: dict[str, Any] = {name: x for name, x in stored.items() if name in kept}
        self._content = {env: {task: {system: {f"seed_{seed}": self._run}}}}
        self._save()

    def write(self, event: Event) -> None:
        if event.kind == "train":
            return
        names = [name for name in event.values if name.startswith(OF_TEAM)]
        metrics: dict[str, Any] = {
            name: [event.values[name]] for name in (*JSON_METRICS, *names) if name in event.values
        }
        if event.kind == "absolute":
            self._run["absolute_metrics"] = metrics
        else:
            counters = {"step_count": event.env_step, "elapsed_time": event.elapsed}
            self._run[f"step_{event.evaluation}"] = {**counters, **metrics}
        self._save()

    def close(self) -> None:
        pass

    def _save(self) -> None:
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self._content))
        os.replace(temporary, self._path)


class TensorBoardLogger:
    """Writes TensorBoard events; the axis is environment steps.

    Not with tensorboardX's SummaryWriter: its thread dies on a full disk, and the run would wait
    for it for ever.
    """

    def __init__(self, folder: Path, progress: Progress | None = None) -> None:
        """Args:
        folder: where the event files are.
        progress: of a run that goes on. What it wrote from there on is hidden, and of that step
            what is known is written again: nothing is lost or there twice.
        """
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog

        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(folder / "events"), f".{os.getpid()}.{time.time_ns()}")
        if progress is not None:
            step, elapsed = progress.env_step, progress.elapsed
            self._write(step=step, session_log=SessionLog(status=SessionLog.START))
            if progress.trained:
                index = progress.num_blocks - 1
                self.write(Event("train", index, step, elapsed, progress.trained))
            if progress.evaluated:
                index = progress.num_evaluations - 1
                self.write(Event("evaluation", index, step, elapsed, progress.evaluated))
        self._writer.flush()

    def write(self, event: Event) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=f"{event.kind}/{name}", simple_value=value)
            for name, value in event.values.items()
        ]
        self._write(step=event.env_step, summary=Summary(value=values))
        self._writer.flush()

    def write_gif(self, gif: bytes, env_step: int) -> None:
        """Shows an animation under Images; may be called from any thread."""
        from tensorboardX.proto.summary_pb2 import Summary

        width, height = (int.from_bytes(gif[i : i + 2], "little") for i in (6, 8))  # its header
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=gif)
        value = Summary.Value(tag="evaluation/episode", image=image)
        self._write(step=env_step, summary=Summary(value=[value]))
        self._writer.flush()

    def _write(self, **fields: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event as TensorBoardEvent

        self._writer.write_event(TensorBoardEvent(wall_time=time.time(), **fields))

    def close(self) -> None:
        with suppress(OSError):  # of a full disk `write` has told
            self._writer.close()


class Console:
    """A live line on a terminal, a plain line per evaluation elsewhere; of all seeds together."""

    def __init__(self, plan: Plan, first_step: int = 0, every_metric: bool = False) -> None:
        self._total = total_steps = plan.total_steps
        self._unit = plan.unit.replace("environment", "env")
        self._seeds = f"{plan.num_seeds} x " if plan.num_seeds > 1 else ""
        self._every_metric = every_metric
        self._steps = first_step
        self._rate = 0.0
        self._bar: Any = None
        if sys.stdout.isatty():
            from rich.progress import BarColumn, Progress, TextColumn

            self._bar = Progress(  # fits a terminal of 80 columns
                TextColumn("{task.percentage:>3.0f}%"),
                BarColumn(bar_width=10),
                TextColumn("{task.fields[status]}"),
            )
            self._task = self._bar.add_task(
                "", total=total_steps, completed=first_step, status="compiling"
            )
            self._bar.start()

    def tick(self, seconds_in_block: float, block_steps: int) -> None:
        """Moves the live line while a block runs, at the speed of the blocks before."""
        if self._bar is not None:
            ahead = min(self._rate * seconds_in_block, block_steps)
            self._bar.update(self._task, completed=self._steps + ahead)

    def write(self, events: list[Event]) -> None:
        """Takes the same event of each seed."""
        event = events[0]
        values = mean_over_seeds([x.values for x in events])
        if self._every_metric:
            for name, value in values.items():
                self._say(f"{event.kind} {event.evaluation}: {name} = {value:.6g}")
        if event.kind == "train":
            self._steps, self._rate = event.env_step, values["steps_per_second"]
            if event.evaluation == 0 and not self._every_metric:
                metrics = ", ".join(f"{name} {value:.3g}" for name, value in values.items())
                self._say(f"First block trained: {metrics}")
            return
        mean_return = values["mean_episode_return"]
        summary = f"return {mean_return:.3g} ± {values['std_episode_return']:.2g}"
        if len(events) > 1:
            half = half_interval([x.values["mean_episode_return"] for x in events])
            summary = f"return {mean_return:.3g} ({len(events)} seeds, 95 % ± {half:.2g})"
        if "win_rate" in values:
            summary += f", win rate {values['win_rate']:.3g} %"
        of_teams = [f"{name.removeprefix(OF_TEAM)} {x:.3g}" for name, x in values.items()
                    if name.startswith(OF_TEAM)]  # fmt: skip
        summary += f" ({', '.join(of_teams)})" * bool(of_teams)
        length = f", length {values['mean_episode_length']:.4g}"
        if event.kind == "absolute":
            episodes = f" ({int(values['num_episodes'])} episodes)"
            self._say(f"best parameters: {summary}{length}{episodes}")
            return
        left = (self._total - event.env_step) / max(self._rate, 1e-9)
        speed = f"{self._seeds}{self._rate:,.0f} {self._unit}/s, {_clock(left)} left"
        if self._bar is not None:
            status = f"{speed}, {summary}"
            self._bar.update(self._task, completed=event.env_step, status=status)
        else:
            done = f"[{event.env_step / self._total:4.0%}] {event.env_step:,} steps"
            self._say(f"{done}, {speed}, {summary}{length}")

    def _say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line)
        else:
            print(line, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
