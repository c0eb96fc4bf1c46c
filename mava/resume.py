"""Going on from a checkpoint: what has to be as it was, and how much is left to do."""

import re
import sys
from typing import Any

import jax
from omegaconf import OmegaConf

from mava.checkpoints import Stored
from mava.config import RunConfig, UserError
from mava.devices import choose_devices
from mava.plan import Plan, Schedule, make_plan
from mava.programs import actor_state_shapes
from mava.snapshot import first_misfit
from mava.types import System

FIXED = {
    "arch.debug": "a run to debug is short",
    "arch.num_evaluation": "blocks stay as long as they were",
    "env/scenario": "a run has one task",
    "logger.base_exp_path": "a run has one folder",
    "logger.checkpointing.load_args": "only a new run starts from other parameters",
    "logger.checkpointing.load_model": "only a new run starts from other parameters",
    "logger.system_name": "a run has one folder",
    "arch.num_seeds": "a run has one seed",
    "system.frozen_teams": "the best parameters are those best for the teams that learn",
    "system.seed": "a run has one seed",
}


class Misfit(UserError):  # noqa: N818
    """Options with which the checkpoint can't be used."""


def check_overrides(overrides: list[str], run: RunConfig) -> None:
    """Raises UserError if one would make another run of it, or none would be read."""
    budget = getattr(run.system, "total_timesteps", None)
    for text in overrides:
        for name, reason in FIXED.items():
            if re.match(rf"\+*{re.escape(name)}\b", text):
                raise UserError(f"{text}: can't be changed in a run that goes on: {reason}.")
        if text.startswith("system.num_updates=") and budget is not None:
            raise UserError(f"{text}: the run has a budget in system.total_timesteps; change that.")


def plan_rest(run: RunConfig, system: System, stored: Stored) -> Plan:
    """Returns the plan of a run that goes on: the stored blocks, perhaps more or fewer of them.

    Args:
        run: what the user asked for.
        system: what is trained.
        stored: the checkpoint.

    Raises UserError.
    """
    about, progress = stored.about, stored.progress
    asked_for = None if run.arch.debug else run.arch.num_devices
    num_devices = asked_for or about["num_devices"]
    if num_devices > jax.local_device_count():
        raise UserError(
            f"The run used {num_devices} devices, here are {jax.local_device_count()}: it can't go "
            "on as it was. A new one can start from its parameters: logger.checkpointing."
            f"load_model=true logger.checkpointing.load_args.run={stored.folder.parent.parent}."
        )
    schedule = Schedule(*about["schedule"])
    if progress.num_updates == about["num_updates"]:  # complete: its last block may be a short one
        schedule = schedule._replace(
            first_update=progress.num_updates, first_block=progress.num_blocks
        )
    plan = make_plan(run, system, choose_devices(num_devices), schedule)
    if plan.steps_per_update != about["steps_per_update"]:
        raise Misfit(
            f"an update would be {plan.steps_per_update:,} {plan.unit}, but is "
            f"{about['steps_per_update']:,} in the checkpoint"
        )
    if plan.num_updates < progress.num_updates:
        raise UserError(
            f"The run has done {progress.env_step:,} {plan.unit}, more than the "
            f"{plan.total_steps:,} it is asked for."
        )
    return plan


def check_fits(system: System, plan: Plan, stored: Stored) -> None:
    """Raises Misfit if the states of the system are not like those in the checkpoint."""
    key = jax.random.key(0)
    learner_state = jax.eval_shape(system.init, key)
    trees: dict[str, Any] = {
        "learner_state": learner_state,
        "actor_state": actor_state_shapes(jax.eval_shape(system.reset, key), plan),
        "best_params": jax.eval_shape(system.act_params, learner_state),
    }
    misfit = first_misfit(stored.arrays, trees)
    if misfit:
        raise Misfit(misfit)


def about_run(run: RunConfig, plan: Plan, versions: dict[str, Any]) -> dict[str, Any]:
    """Returns what every checkpoint of a run says of it, as JSON."""
    return {
        "config": OmegaConf.to_container(run.composed, resolve=True),
        "versions": versions,
        "schedule": list(plan.schedule),
        "num_updates": plan.num_updates,
        "num_evaluations": plan.num_evaluations,
        "num_devices": len(plan.devices),
        "steps_per_update": plan.steps_per_update,
    }


def announce_resumed(run: RunConfig, plan: Plan, stored: Stored, versions: dict[str, Any]) -> None:
    """Prints from where the run goes on and what is not as it was."""
    before, progress = stored.about, stored.progress
    packages = before["versions"]["packages"]
    changed = [
        f"{name} {packages[name]} -> {version}"
        for name, version in versions["packages"].items()
        if packages.get(name, version) != version
    ]
    if changed:
        print(f"Packages are not those of the checkpoint: {', '.join(changed)}.", file=sys.stderr)
    if not run.logger.use_console:
        return
    print(f"Going on after {progress.env_step:,} of {plan.total_steps:,} {plan.unit}.")
    if plan.num_updates != before["num_updates"]:
        decay = getattr(run.system, "decay_learning_rates", False)
        print(
            f"The budget was {before['num_updates'] * plan.steps_per_update:,} steps. Blocks stay "
            f"as long as they were: {plan.num_evaluations} evaluations in all."
            + (" The learning rates now fall to 0 at the new end." if decay else "")
        )
