"""The loop around every system: train a block, evaluate, log, save."""

import dataclasses
import math
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mava.checkpoints import Checkpoints, Stored, read_checkpoint
from mava.config import RunConfig, UserError
from mava.debugging import profiled
from mava.evaluator import in_order
from mava.logger import Console, Event, Logger
from mava.plan import Plan
from mava.programs import Programs, setup_keys, stack_seeds
from mava.recorder import Recorder
from mava.render import Renderer
from mava.signals import Stopped, StopSignals
from mava.snapshot import Progress, Snapshot, fill, first_misfit, named_leaves
from mava.summary import return_of_learners, summarise_episodes, summarise_training
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


@dataclasses.dataclass(kw_only=True)
class SeedRun:
    """What each seed has for itself: where its results go, and how far it is."""

    seed: int
    folder: Path
    loggers: list[Logger]
    checkpoints: Checkpoints
    renderer: Renderer | None
    recorder: Recorder | None
    stack: ExitStack  # closes these
    progress: Progress

    @property
    def keys(self) -> RunKeys:
        return run_keys(self.seed)


class Training:
    """Runs in progress, of one seed or of several at once.

    `states` moves from block to block. With several seeds its arrays have a seed axis; `runs` are
    those of the seeds that have not failed, by their place there.
    """

    def __init__(
        self,
        system: System,
        programs: Programs,
        data: tuple[Any, ...],
        plan: Plan,
        config: RunConfig,
        runs: list[SeedRun],
        console: Console | None,
        signals: StopSignals,
    ) -> None:
        self.system = system
        self.programs = programs
        self.data = data
        self.plan = plan
        self.config = config
        self.runs = dict(enumerate(runs))
        self.keys = [run.keys for run in runs]
        self.console = console
        self.signals = signals
        self.devices = np.arange(len(plan.devices), dtype=np.int32)
        self.warned = False
        self.failures: list[str] = []

    def run(self, resumed: Stored | None, pretrained: Stored | None) -> float:
        """Runs all blocks that are left; returns the mean return of the last evaluation made, over
        the seeds.

        Args:
            resumed: the checkpoint from which the run goes on; of a single seed.
            pretrained: the checkpoint of another run whose parameters all seeds start from.
        """
        self.start(resumed, pretrained)
        self.stop_if_asked()
        while self.progress.num_evaluations < self.plan.num_evaluations:
            if self.progress.num_blocks == self.progress.num_evaluations:
                self.train_block()
                self.stop_if_asked()
            self.evaluate_block()
            for place, run in self.runs.items():
                run.checkpoints.save_if_due(self.snapshot(place))
            self.stop_if_asked()
        for place, run in self.runs.items():
            run.checkpoints.save_now(self.snapshot(place))
        returns = [run.progress.mean_return for run in self.runs.values()]
        if self.plan.num_absolute_episodes:
            returns = self.evaluate_best()
        for run in self.runs.values():
            self.finish_rendering(run)
        if self.signals.received is not None:
            raise Stopped(self.signals.received, f"Stopped; {self.where} is complete.")
        if self.failures:
            for run in self.runs.values():  # now, while no error is on its way: they are complete
                run.stack.close()
            raise TrainingError("\n".join(self.failures))
        return float(np.mean(returns))

    @property
    def progress(self) -> Progress:
        """How far all seeds are; what they measured is in their own."""
        return next(iter(self.runs.values())).progress

    @property
    def where(self) -> str:
        """The folders, as a message has them."""
        folders = [str(run.folder) for run in self.runs.values()]
        return f"the run in {folders[0]}" if len(folders) == 1 else f"all in {', '.join(folders)}"

    def snapshot(self, place: int) -> Snapshot:
        """Returns all of one seed's run."""
        seed = place if self.plan.num_seeds > 1 else None
        return Snapshot(*self.states, self.best_params, self.runs[place].progress, seed)

    def of_seed(self, tree: Any, place: int) -> Any:
        """Returns what belongs to one seed of arrays whose first axis is that of the seeds."""
        return jax.tree.map(lambda x: x[place], tree) if self.plan.num_seeds > 1 else tree

    def start(self, resumed: Stored | None, pretrained: Stored | None) -> None:
        """Sets the states and the clock: at the beginning, or where the checkpoint was taken."""
        keys = setup_keys([x.init for x in self.keys], [x.reset for x in self.keys], self.plan)
        setup = self.programs.setup.result()
        learner_state, actor_state, self.data = setup(*keys, self.data)
        if pretrained is not None:
            wanted = params_of(learner_state)
            arrays = {
                name: np.broadcast_to(pretrained.arrays[name], leaf.shape)
                for name, leaf in named_leaves(wanted).items()
            }
            (params,) = fill(arrays, wanted).values()
            learner_state = learner_state.replace(params=params)
        self.states = (learner_state, actor_state)
        self.best_params = self.act_params()
        if resumed is not None:
            filled = fill(resumed.arrays, self.snapshot(0).trees())
            self.states = (filled["learner_state"], filled["actor_state"])
            self.best_params = filled["best_params"]
        self.block = self.programs.block.result()
        self.record = self.programs.record.result() if self.programs.record else None
        self.start_time = time.perf_counter() - self.progress.elapsed

    def act_params(self) -> Any:
        """Returns what the policies of all seeds need."""
        of_one = self.system.act_params
        return (jax.vmap(of_one) if self.plan.num_seeds > 1 else of_one)(self.states[0])

    def train_block(self) -> None:
        """Trains one block and logs what it measured."""
        before, index = self.progress, self.progress.num_blocks
        num_updates = self.plan.block_end(index) - before.num_updates
        block_steps = num_updates * self.plan.steps_per_update
        start = time.perf_counter()
        with profiled(self.config.logger.profile == index, self.runs[min(self.runs)].folder):
            metrics = jax.device_get(self.run_updates(num_updates))
        now = time.perf_counter()
        if index == 0:
            self.start_time = now
        trained = {}
        for place, run in self.runs.items():
            values = summarise_training(self.of_seed(metrics, place), now - start)
            trained[place] = values | {"steps_per_second": block_steps / (now - start)}
            run.progress = dataclasses.replace(
                run.progress,
                num_blocks=index + 1,
                num_updates=before.num_updates + num_updates,
                env_step=before.env_step + block_steps,
                train_seconds=before.train_seconds + now - start,
                steps_per_second=block_steps / (now - start),
                elapsed=now - self.start_time,
                trained=trained[place],
                evaluated={},
            )
            if run.recorder is not None:
                recorded_steps = run.recorder.num_steps
                run.progress = dataclasses.replace(run.progress, recorded_steps=recorded_steps)
        self.log("train", index, trained)
        self.warn_of_long_blocks(now - start)

    def run_updates(self, num_updates: int) -> Metrics:
        """Does some updates of `states` and returns their Metrics.

        Recorded updates leave the devices a few at a time; while the recorders cut their steps
        into episodes, the next ones run.
        """
        num_blocks, recorders = self.progress.num_blocks, {}
        for place, run in self.runs.items():
            if run.recorder is not None and run.recorder.records(num_blocks):
                recorders[place] = run.recorder
        program, at_once = self.block, num_updates
        if recorders:
            program, at_once = self.record, self.programs.num_recorded
        metrics = None
        for start in range(0, num_updates, at_once):
            count = min(at_once, num_updates - start)
            *states, new, first_bad, steps = program(*self.states, np.int32(count), self.data)
            self.states = tuple(states)
            self.wait(first_bad.is_ready, count * self.plan.steps_per_update)
            for place, update in enumerate(np.atleast_1d(first_bad)):
                if update >= 0 and place in self.runs:
                    update += self.progress.num_updates + start
                    self.fail(place, diverged(self.of_seed(new, place), update, self.plan))
            metrics = new if metrics is None else merge_metrics(metrics, new)
            for place, recorder in recorders.items():
                if place in self.runs:
                    recorder.add(steps, count, place if self.plan.num_seeds > 1 else None)
        for place, recorder in recorders.items():
            if place in self.runs:
                recorder.settle()
        assert metrics is not None
        return metrics

    def evaluate_block(self) -> None:
        """Evaluates and logs the parameters of the last block; keeps them if they are the best."""
        index = self.progress.num_evaluations
        act_params = self.act_params()
        evaluated = self.evaluate(index, act_params, self.plan.num_episodes)
        is_best = np.zeros(self.plan.num_seeds, bool)
        for place, values in list(evaluated.items()):
            mean_return = return_of_learners(values, self.config)
            if not math.isfinite(mean_return):
                del evaluated[place]
                error = TrainingError(f"The return of evaluation {index} is {mean_return}.")
                self.fail(place, error)
                continue
            run = self.runs[place]
            values["steps_per_second"] = run.progress.steps_per_second
            # Of equals the latest: where returns have a maximum, luck reaches it in some evaluation
            # long before the parameters are any good.
            is_best[place] = mean_return >= run.progress.best_return
            run.progress = dataclasses.replace(
                run.progress,
                num_evaluations=index + 1,
                mean_return=mean_return,
                best_return=max(mean_return, run.progress.best_return),
                evaluated=values,
            )
        if is_best.all():
            self.best_params = act_params
        elif is_best.any():
            self.best_params = of_chosen_seeds(is_best, act_params, self.best_params)
        self.log("evaluation", index, evaluated)
        for place, run in self.runs.items():
            if run.renderer is not None:
                run.renderer.raise_errors()
                params = self.of_seed(act_params, place)
                run.renderer.render_if_due(index, params, self.progress.env_step)

    def evaluate_best(self) -> list[float]:
        """Returns the mean return of each seed's best parameters over many episodes: the absolute
        metric (Gorsane et al. 2022, arXiv:2209.10485).
        """
        index, progress = self.plan.num_evaluations, self.progress
        evaluated = self.evaluate(index, self.best_params, self.plan.num_absolute_episodes)
        for values in evaluated.values():
            values["steps_per_second"] = progress.env_step / progress.train_seconds
        self.log("absolute", index, evaluated)
        return [return_of_learners(values, self.config) for values in evaluated.values()]

    def evaluate(
        self, index: int, act_params: Any, num_episodes: int
    ) -> dict[int, dict[str, float]]:
        """Returns what each seed's complete episodes gave; asked to stop, does so before."""
        program: Future = self.programs.evaluate
        self.wait(lambda: program.done() or self.signals.received is not None)
        self.stop_if_asked()
        keys = stack_seeds([jax.random.fold_in(x.evaluation, index) for x in self.keys])
        results = program.result()(act_params, keys, np.int32(num_episodes), self.devices)
        leaves = jax.tree.leaves(results)
        self.wait(lambda: all(x.is_ready() for x in leaves) or self.signals.received is not None)
        self.stop_if_asked()
        by_seed = jax.tree.map(np.asarray, results)  # (D, S, c, rounds)
        if self.plan.num_seeds > 1:
            by_seed = jax.tree.map(lambda x: x.swapaxes(0, 1), by_seed)
        return {
            place: summarise_episodes(in_order(self.of_seed(by_seed, place), num_episodes))
            for place in self.runs
        }

    def log(self, kind: Any, index: int, values: dict[int, dict[str, float]]) -> None:
        """Gives each seed's loggers its own values, and the console those of all."""
        events = {
            place: Event(kind, index, self.progress.env_step, self.progress.elapsed, x)
            for place, x in values.items()
        }
        if self.console is not None:
            self.console.write(list(events.values()))
        for place, event in events.items():
            for logger in self.runs[place].loggers:
                logger.write(event)

    def fail(self, place: int, error: TrainingError) -> None:
        """Ends the run of one seed; the others go on. Raises TrainingError if it was the last."""
        run = self.runs.pop(place)
        several = self.plan.num_seeds > 1
        self.failures.append(f"Seed {run.seed}: {error}" if several else str(error))
        try:
            raise error
        except TrainingError:  # its loggers see that it failed
            run.stack.close()
        if not self.runs:
            raise TrainingError("\n".join(self.failures))
        print(f"{self.failures[-1]} The other seeds go on.", file=sys.stderr)

    def wait(self, is_over: Callable[[], bool], block_steps: int = 0) -> None:
        """Waits without blocking signals, moving the live line meanwhile."""
        start = time.perf_counter()
        while not is_over():
            time.sleep(POLL_SECONDS)
            if self.console is not None:
                self.console.tick(time.perf_counter() - start, block_steps)

    def finish_rendering(self, run: SeedRun) -> None:
        renderer = run.renderer
        if renderer is not None:
            self.wait(lambda: renderer.is_done() or self.signals.received is not None)
            renderer.raise_errors()

    def stop_if_asked(self) -> None:
        """Saves and raises Stopped if a signal was received."""
        signum, env_step = self.signals.received, self.progress.env_step
        if signum is None:
            return
        message = f"Stopped by signal {signum} after {env_step:,} {self.plan.unit}"
        if self.config.logger.checkpointing.save_model:
            for place, run in self.runs.items():
                if env_step:
                    run.checkpoints.save_now(self.snapshot(place))
            folders = ",".join(str(run.folder) for run in self.runs.values())
            message += f"; to go on: {'-m ' if len(self.runs) > 1 else ''}resume={folders}"
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


@jax.jit
def of_chosen_seeds(chosen: jax.Array, new: Any, old: Any) -> Any:
    """Returns the arrays of `new` for the seeds chosen, bool (S,), and of `old` for the others."""

    def choose(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(chosen.reshape(-1, *[1] * (x.ndim - 1)), x, y)

    return jax.tree.map(choose, new, old)


def diverged(metrics: Metrics, update: int, plan: Plan) -> TrainingError:
    bad = [name for name, (total, _) in metrics.learn.items() if not np.isfinite(total)]
    return TrainingError(
        f"NaN or infinity in {', '.join(bad)}, first in update {update}, after "
        f"{(update + 1) * plan.steps_per_update:,} {plan.unit}. Training stopped; the parameters "
        "of this block are not kept. arch.debug=true stops at the operation that made the first "
        "NaN."
    )
