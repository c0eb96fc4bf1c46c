"""A trained policy, from the folder of its run, for the commands that evaluate and render it."""

import dataclasses
import sys
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mava import experiment
from mava.checkpoints import read_checkpoint
from mava.config import RunConfig, UserError
from mava.devices import use_compilation_cache
from mava.snapshot import fill, first_misfit
from mava.stored_run import load_run
from mava.training import run_keys
from mava.types import MarlEnv, System

Options = TypeVar("Options")


class Policy(NamedTuple):
    """A policy and what it plays in."""

    config: RunConfig
    env: MarlEnv  # one environment, wrapped as in training
    system: System
    act_params: Any
    greedy: bool  # for System.act
    env_step: int  # of training, when the checkpoint was saved
    key: jax.Array  # of the episodes


def load_policy(
    folder: Path, checkpoint: str, overrides: list[str], greedy: bool | None, seed: int | None
) -> Policy:
    """Returns the policy of a run; raises UserError.

    Args:
        folder: of the run.
        checkpoint: "best", "last", or a number of environment steps.
        overrides: changes of the stored config, such as of the environment.
        greedy: None: as in the run's evaluations.
        seed: of the episodes; None: those of the run's absolute metric.
    """
    module, config = load_run(folder, overrides)
    use_compilation_cache(config.arch.compilation_cache)
    stored = read_checkpoint(folder, checkpoint, with_buffer=False)
    with experiment.no_garbage_collection():
        env = experiment.make_vector_env(config)
        system = experiment.make_system(module, env, config, config.system)
        experiment.check_network(system, env)
        learner_state = jax.jit(system.init)(jax.random.key(0))
    name, params = "learner_state", learner_state
    if checkpoint == "best":
        name, params = "best_params", system.act_params(learner_state)
    misfit = first_misfit(stored.arrays, {name: params})
    if misfit:
        raise UserError(f"The policy of {folder} does not fit: {misfit}.")
    # On the host, to be placed as a program wants it.
    params = jax.device_get(fill(stored.arrays, {name: params})[name])
    if seed is None:
        key = run_keys(config.system.seed).evaluation
        key = jax.random.fold_in(key, stored.about["num_evaluations"])
    else:
        key = key_of(seed)
    return Policy(
        config=config,
        env=env.env,
        system=system,
        act_params=params if checkpoint == "best" else system.act_params(params),
        greedy=config.arch.evaluation_greedy if greedy is None else greedy,
        env_step=stored.progress.env_step,
        key=key,
    )


def key_of(seed: int) -> jax.Array:
    """Returns the key of a seed given by the user; raises UserError."""
    if not 0 <= seed < 2**32:
        raise UserError(f"seed={seed} must be between 0 and 2**32 - 1.")
    return jax.random.key(seed)


def parse_options(
    options_class: type[Options], arguments: list[str], usage: str
) -> tuple[Options, list[str]]:
    """Returns the options among arguments like "name=value", and the others.

    Prints the usage and exits where it is asked for; raises UserError.
    """
    if {"-h", "--help"} & set(arguments):
        print(usage)
        sys.exit(0)
    names = [field.name for field in dataclasses.fields(options_class)]  # type: ignore[arg-type]
    own = [x for x in arguments if x.partition("=")[0] in names]
    others = [x for x in arguments if x not in own]
    for text in others:
        key = text.partition("=")[0]
        if "=" not in text or ("." not in key and key != "env/scenario"):
            raise UserError(f"{text}: unknown. The options are {', '.join(names)}.\n\n{usage}")
    given = {name: None if value == "null" else value for name, _, value in map(_parts, own)}
    if not given.get("run"):
        raise UserError(f"run=<folder of a run> is missing.\n\n{usage}")
    try:
        options: Any = OmegaConf.merge(OmegaConf.structured(options_class), given)
        typed: Any = OmegaConf.to_object(options)
        return typed, others
    except OmegaConfBaseException as error:
        raise UserError(f"{str(error).splitlines()[0]}\n\n{usage}") from error


def _parts(text: str) -> tuple[str, str, str]:
    return text.partition("=")
