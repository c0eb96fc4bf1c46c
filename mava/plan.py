"""How much of what a run does, decided before anything is compiled."""

import dataclasses
import math
from pathlib import Path
from typing import NamedTuple

import jax

from mava.config import RunConfig, UserError
from mava.types import System

DEBUG_UPDATES = 2
DEBUG_EPISODES = 4


class Schedule(NamedTuple):
    """The length of a block, updates / evaluations, and the update and block it counts from.

    Blocks are equal but for rounding. It outlives a change of the budget: a longer run has more
    blocks, not longer ones, and the last is shorter if need be.
    """

    updates: int
    evaluations: int
    first_update: int = 0
    first_block: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How much of what a run does."""

    devices: list[jax.Device]
    num_seeds: int  # S; all other numbers are those of one seed
    num_replicas: int  # U
    num_envs: int  # E
    steps_per_update: int  # over all devices and replicas
    num_updates: int
    offline: bool  # no environment steps are taken: an update counts as steps of learning
    asked_steps: int | None  # the budget, before it was rounded up to whole updates
    schedule: Schedule
    num_episodes: int  # of an evaluation
    num_absolute_episodes: int  # of the last one; 0: none

    @property
    def unit(self) -> str:
        """What is counted as steps."""
        return unit_of(self.offline)

    @property
    def total_steps(self) -> int:
        return self.num_updates * self.steps_per_update

    @property
    def num_evaluations(self) -> int:
        updates, evaluations, first_update, first_block = self.schedule
        return first_block - (first_update - self.num_updates) * evaluations // updates

    def block_end(self, block: int) -> int:
        """Returns the number of updates done after a block."""
        updates, evaluations, first_update, first_block = self.schedule
        end = first_update + updates * (block + 1 - first_block) // evaluations
        return min(end, self.num_updates)


def unit_of(offline: bool) -> str:
    return "gradient steps" if offline else "environment steps"


def make_plan(
    run: RunConfig,
    system: System,
    devices: list[jax.Device],
    schedule: Schedule | None = None,
) -> Plan:
    """Returns the plan of a run; raises UserError.

    Args:
        run: what the user asked for.
        system: what is trained.
        devices: those to use.
        schedule: that of the run that is resumed.
    """
    config, arch = run.system, run.arch
    replicas = 1 if arch.debug else config.update_batch_size
    steps_per_update = system.steps_per_update
    if not system.offline:  # there the streams share one step of learning
        steps_per_update *= len(devices) * replicas
    num_updates, num_evaluations = config.num_updates, arch.num_evaluation
    asked_steps = None
    budget = getattr(config, "total_timesteps", None)
    if budget is not None:
        if not 1 <= budget < math.inf:
            raise UserError(f"system.total_timesteps={budget} must be finite and at least 1.")
        asked_steps = math.ceil(budget)
        num_updates = math.ceil(asked_steps / steps_per_update)
    if arch.debug:
        num_updates, num_evaluations, asked_steps = DEBUG_UPDATES, DEBUG_UPDATES, None
    if schedule is None and num_updates < num_evaluations:
        unit = unit_of(system.offline)
        raise UserError(
            f"{num_updates} updates of {steps_per_update:,} {unit} are fewer than "
            f"arch.num_evaluation={num_evaluations}: each evaluation needs an update before it."
        )
    schedule = schedule or Schedule(num_updates, num_evaluations)
    absolute = arch.num_absolute_metric_eval_episodes if arch.absolute_metric else 0
    plan = Plan(
        devices=devices,
        num_seeds=1 if arch.debug else arch.num_seeds,
        num_replicas=replicas,
        num_envs=arch.num_envs,
        steps_per_update=steps_per_update,
        num_updates=num_updates,
        offline=system.offline,
        asked_steps=asked_steps,
        schedule=schedule,
        num_episodes=DEBUG_EPISODES if arch.debug else arch.num_eval_episodes,
        num_absolute_episodes=min(absolute, DEBUG_EPISODES) if arch.debug else absolute,
    )
    if run.logger.profile is not None and not 0 <= run.logger.profile < plan.num_evaluations:
        last = plan.num_evaluations - 1
        raise UserError(f"logger.profile={run.logger.profile} must be a block from 0 to {last}.")
    return plan


def announce(config: RunConfig, plan: Plan, folders: list[Path], is_new: bool) -> None:
    """Prints what will run, before anything is compiled.

    Args:
        config: what the user asked for.
        plan: of the run.
        folders: of each seed's run.
        is_new: whether it starts now.
    """
    if not config.logger.use_console:
        return
    platform = plan.devices[0].platform
    print(
        f"{config.system_name} on {config.env_name} {config.task_name}: "
        f"{len(plan.devices)} {platform} device(s) x {plan.num_replicas} replica(s) x "
        f"{plan.num_envs} environments, {plan.num_updates:,} updates of "
        f"{plan.steps_per_update:,} steps = {plan.total_steps:,} {plan.unit}, "
        f"{plan.num_evaluations} evaluations of {plan.num_episodes} episodes."
    )
    if plan.num_seeds > 1:
        last = config.system.seed + plan.num_seeds - 1
        print(f"All of it for each of {plan.num_seeds} seeds, {config.system.seed} to {last}.")
    if plan.asked_steps is not None and plan.asked_steps != plan.total_steps:
        print(
            f"system.total_timesteps={plan.asked_steps:,} is rounded up to whole updates: "
            f"{plan.total_steps:,}."
        )
    free = jax.local_device_count() - len(plan.devices)
    chosen = config.arch.debug or config.arch.num_devices is not None
    if platform == "cpu" and free > 0 and is_new and not chosen:
        print(f"{free} more CPU cores are free: arch.num_devices={free + len(plan.devices)}.")
    print("\n".join(f"Results: {folder}" for folder in folders))
    print("Compiling...", flush=True)
