"""The loop around every system: train a block, evaluate, log, save."""

import dataclasses
import math
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from mava.checkpoints import Checkpoints, Stored, read_checkpoint
from mava.config import RunConfig, UserError
from mava.debugging import profiled
from mava.evaluator import in_order
from mava.logger import ConsoleLogger, Event, Logger
from mava.plan import Plan
from mava.programs import Programs, split_keys
from mava.recorder import Recorder
from mava.render import Renderer
from mava.signals import Stopped, StopSignals
from mava.snapshot import Progress, Snapshot, fill, first_misfit
from mava.summary import summarise_episodes, summarise_training
from mava.types import Metrics, System
from mava.utils.parallel import merge_metrics

POLL_SECONDS = 0.005


class TrainingError(UserError):
    """Training can't go on; the message says where it stopped."""


class RunKeys(NamedTuple):
    """The keys of a run, each for one use."""

    init: jax.Array
    reset: jax.Array
    evaluation: jax.Array  # folded with the number of the evaluation


def run_keys(seed: int) -> RunKeys:
    return RunKeys(*jax.random.split(jax.random.key(seed), 3))


class Training:
    """A run in progress: what is fixed, and `snapshot`, which moves from block to block."""

    def __init__(
        self,
        system: System,
        programs: Programs,
        data: tuple[Any, ...],
        plan: Plan,
        config: RunConfig,
        folder: Path,
        loggers: list[Logger],
        checkpoints: Checkpoints,
        renderer: Renderer | None,
        recorder: Recorder | None,
        signals: StopSignals,
    ) -> None:
        self.system = system
        self.programs = programs
        self.data = data
        self.plan = plan
        self.config = config
        self.folder = folder
        self.loggers = loggers
        self.checkpoints = checkpoints
        self.renderer = renderer
        self.recorder = recorder
        self.signals = signals
        self.keys = run_keys(config.system.seed)
        self.devices = np.arange(len(plan.devices), dtype=np.int32)
        self.warned = False

    def run(self, resumed: Stored | None, pretrained: Stored | None) -> float:
        """Runs all blocks that are left; returns the mean return of the last evaluation made.

        Args:
            resumed: the checkpoint from which the run goes on.
            pretrained: the checkpoint of another run whose parameters it starts from.
        """
        self.start(resumed, pretrained)
        self.stop_if_asked()
        while self.progress.num_evaluations < self.plan.num_evaluations:
            if self.progress.num_blocks == self.progress.num_evaluations:
                self.train_block()
                self.stop_if_asked()
            self.evaluate_block()
            self.checkpoints.save_if_due(self.snapshot)
            self.stop_if_asked()
        self.checkpoints.save_now(self.snapshot)
        mean_return = self.progress.mean_return
        if self.plan.num_absolute_episodes:
            mean_return = self.evaluate_best()
        renderer = self.renderer
        if renderer is not None:
            self.wait(lambda: renderer.is_done() or self.signals.received is not None)
            renderer.raise_errors()
        if self.signals.received is not None:
            raise Stopped(self.signals.received, f"Stopped; the run in {self.folder} is complete.")
        return mean_return

    @property
    def progress(self) -> Progress:
        return self.snapshot.progress

    def start(self, resumed: Stored | None, pretrained: Stored | None) -> None:
        """Sets `snapshot` and the clock: at the beginning, or where the checkpoint was taken."""
        keys = split_keys(self.keys.reset, self.plan)
        setup = self.programs.setup.result()
        learner_state, actor_state, self.data = setup(self.keys.init, keys, self.data)
        progress = Progress()
        if pretrained is not None:
            (params,) = fill(pretrained.arrays, params_of(learner_state)).values()
            learner_state = learner_state.replace(params=params)
        best_params = self.system.act_params(learner_state)
        self.snapshot = Snapshot(learner_state, actor_state, best_params, progress)
        if resumed is not None:
            filled = fill(resumed.arrays, self.snapshot.trees())
            self.snapshot = Snapshot(progress=resumed.progress, **filled)
        self.block = self.programs.block.result()
        self.record = self.programs.record.result() if self.programs.record else None
        self.start_time = time.perf_counter() - self.progress.elapsed

    def train_block(self) -> None:
        """Trains one block and logs what it measured."""
        before, index = self.progress, self.progress.num_blocks
        num_updates = self.plan.block_end(index) - before.num_updates
        block_steps = num_updates * self.plan.steps_per_update
        start = time.perf_counter()
        with profiled(self.config.logger.profile == index, self.folder):
            learner_state, actor_state, metrics = self.run_updates(num_updates)
        now = time.perf_counter()
        if index == 0:
            self.start_time = now
        progress = dataclasses.replace(
            before,
            num_blocks=index + 1,
            num_updates=before.num_updates + num_updates,
            env_step=before.env_step + block_steps,
            recorded_steps=(self.recorder.num_steps if self.recorder else before.recorded_steps),
            train_seconds=before.train_seconds + now - start,
            steps_per_second=block_steps / (now - start),
            elapsed=now - self.start_time,
        )
        trained = summarise_training(jax.device_get(metrics), now - start)
        trained["steps_per_second"] = progress.steps_per_second
        progress = dataclasses.replace(progress, trained=trained, evaluated={})
        self.snapshot = Snapshot(learner_state, actor_state, self.snapshot.best_params, progress)
        self.log("train", index, trained)
        self.warn_of_long_blocks(now - start)

    def run_updates(self, num_updates: int) -> tuple[Any, Any, Metrics]:
        """Returns the two states after some updates, and their Metrics.

        Recorded updates leave the devices a few at a time; while the recorder cuts their steps
        into episodes, the next ones run.
        """
        learner_state, actor_state = self.snapshot.learner_state, self.snapshot.actor_state
        recorder, program, at_once = self.recorder, self.block, num_updates
        if recorder is not None:
            recorder = recorder if recorder.records(self.progress.num_blocks) else None
        if recorder is not None:
            program, at_once = self.record, self.programs.num_recorded
        metrics = None
        for start in range(0, num_updates, at_once):
            count = min(at_once, num_updates - start)
            learner_state, actor_state, new, first_bad, steps = program(
                learner_state, actor_state, np.int32(count), self.data
            )
            self.wait(first_bad.is_ready, count * self.plan.steps_per_update)
            if int(first_bad) >= 0:
                update = self.progress.num_updates + start + int(first_bad)
                raise diverged(new, update, self.plan)
            metrics = new if metrics is None else merge_metrics(metrics, new)
            if recorder is not None:
                recorder.add(steps, count)
        if recorder is not None:
            recorder.settle()
        assert metrics is not None
        return learner_state, actor_state, metrics

    def evaluate_block(self) -> None:
        """Evaluates and logs the parameters of the last block; keeps them if they are the best."""
        index, before = self.progress.num_evaluations, self.progress
        act_params = self.system.act_params(self.snapshot.learner_state)
        values = self.evaluate(index, act_params, self.plan.num_episodes)
        mean_return = values["mean_episode_return"]
        if not math.isfinite(mean_return):
            raise TrainingError(f"The return of evaluation {index} is {mean_return}.")
        values["steps_per_second"] = before.steps_per_second
        progress = dataclasses.replace(
            before, num_evaluations=index + 1, mean_return=mean_return, evaluated=values
        )
        best_params = self.snapshot.best_params
        if mean_return >= before.best_return:  # of equals the latest: where returns have a maximum,
            # luck reaches it in some evaluation long before the parameters are any good
            progress = dataclasses.replace(progress, best_return=mean_return)
            best_params = act_params
        self.snapshot = self.snapshot._replace(best_params=best_params, progress=progress)
        self.log("evaluation", index, values)
        if self.renderer is not None:
            self.renderer.raise_errors()
            self.renderer.render_if_due(index, act_params, progress.env_step)

    def evaluate_best(self) -> float:
        """Returns the mean return of the best parameters over many episodes: the absolute metric
        (Gorsane et al. 2022, arXiv:2209.10485).
        """
        index, progress = self.plan.num_evaluations, self.progress
        values = self.evaluate(index, self.snapshot.best_params, self.plan.num_absolute_episodes)
        values["steps_per_second"] = progress.env_step / progress.train_seconds
        self.log("absolute", index, values)
        return values["mean_episode_return"]

    def evaluate(self, index: int, act_params: Any, num_episodes: int) -> dict[str, float]:
        """Returns what complete episodes gave; a request to stop is met without them."""
        program: Future = self.programs.evaluate
        self.wait(lambda: program.done() or self.signals.received is not None)
        self.stop_if_asked()
        key = jax.random.fold_in(self.keys.evaluation, index)
        results = program.result()(act_params, key, np.int32(num_episodes), self.devices)
        leaves = jax.tree.leaves(results)
        self.wait(lambda: all(x.is_ready() for x in leaves) or self.signals.received is not None)
        self.stop_if_asked()
        return summarise_episodes(in_order(results, num_episodes))

    def log(self, kind: Any, index: int, values: dict[str, float]) -> None:
        event = Event(kind, index, self.progress.env_step, self.progress.elapsed, values)
        for logger in self.loggers:
            logger.write(event)

    def wait(self, is_over: Callable[[], bool], block_steps: int = 0) -> None:
        """Waits without blocking signals, moving the live line meanwhile."""
        start = time.perf_counter()
        while not is_over():
            time.sleep(POLL_SECONDS)
            for logger in self.loggers:
                if isinstance(logger, ConsoleLogger):
                    logger.tick(time.perf_counter() - start, block_steps)

    def stop_if_asked(self) -> None:
        """Saves and raises Stopped if a signal was received."""
        signum, env_step = self.signals.received, self.progress.env_step
        if signum is None:
            return
        message = f"Stopped by signal {signum} after {env_step:,} {self.plan.unit}"
        if self.config.logger.checkpointing.save_model:
            if env_step:
                self.checkpoints.save_now(self.snapshot)
            message += f"; to go on: resume={self.folder}"
        raise Stopped(signum, f"{message}.")

    def warn_of_long_blocks(self, seconds: float) -> None:
        """Warns once: who gives notice of a preemption does not wait for ever."""
        options = self.config.logger.checkpointing
        if options.save_model and seconds > options.max_block_seconds and not self.warned:
            self.warned = True
            print(
                f"A block takes {seconds:.0f} s, and the run can't stop and save within one: more "
                "than logger.checkpointing.max_block_seconds="
                f"{options.max_block_seconds:g}. A larger arch.num_evaluation makes it shorter.",
                file=sys.stderr,
            )


def read_pretrained(config: RunConfig, system: System) -> Stored | None:
    """Returns the checkpoint whose parameters a run starts from, if any; raises UserError."""
    options = config.logger.checkpointing
    if not options.load_model or options.load_args.run is None:
        return None
    folder = Path(options.load_args.run)
    stored = read_checkpoint(folder, options.load_args.checkpoint, with_buffer=False)
    learner_state = jax.eval_shape(system.init, jax.random.key(0))
    if not hasattr(learner_state, "params"):
        raise UserError(
            f"{config.system_name} can't start from other parameters: its LearnerState has no "
            "field `params`."
        )
    misfit = first_misfit(stored.arrays, params_of(learner_state))
    if misfit:
        raise UserError(f"The parameters in {stored.folder} don't fit: {misfit}.")
    return stored


def params_of(learner_state: Any) -> dict[str, Any]:
    """Returns what a run that starts from another's parameters takes from it."""
    return {"learner_state/params": learner_state.params}


def diverged(metrics: Metrics, update: int, plan: Plan) -> TrainingError:
    bad = [name for name, (total, _) in metrics.learn.items() if not np.isfinite(total)]
    return TrainingError(
        f"NaN or infinity in {', '.join(bad)}, first in update {update}, after "
        f"{(update + 1) * plan.steps_per_update:,} {plan.unit}. Training stopped; the parameters "
        "of this block are not kept. arch.debug=true stops at the operation that made the first "
        "NaN."
    )
