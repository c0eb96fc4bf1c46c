"""What a system that learns offline gets from a vault: its experience, and its environment."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from mava.config import RunConfig, UserError
from mava.stored_vault import (
    Steps,
    StoredVault,
    episode_ends,
    find_episodes,
    find_vault,
    read_steps,
)
from mava.types import Experience, Observation
from mava.wrappers.observation import with_agent_ids
from mava.wrappers.vector import VectorEnv


def use_vault(cfg: DictConfig, overrides: list[str]) -> None:
    """Makes the path of the vault absolute, and its environment that of the run, unless `env=` or
    `env/scenario=` chose one; options under `env.` are applied to it. Raises UserError.

    Args:
        cfg: composed by Hydra.
        overrides: of the command line.
    """
    vault = find_vault(Path(cfg.vault).expanduser())
    cfg.vault = str(vault.folder.absolute())
    if any(text.lstrip("+").startswith(("env=", "env/")) for text in overrides):
        return
    try:
        env = OmegaConf.create(vault.metadata["mava"]["config"]["env"])
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{vault.folder} does not say what it was recorded in: add env=."
        ) from error
    for text in overrides:
        name, _, _ = text.lstrip("+").partition("=")
        if name.startswith("env."):
            OmegaConf.update(env, name.removeprefix("env."), OmegaConf.select(cfg, name))
    cfg.env = env


def load_experience(run: RunConfig, env: VectorEnv) -> Experience:
    """Returns all of a vault as one stream, leading axis (T,), on the host; raises UserError.

    Args:
        run: what the user asked for.
        env: that will evaluate what is learnt; its views, less their agent ids, are the vault's.
    """
    assert run.vault is not None
    vault = find_vault(Path(run.vault))
    check_fits(vault, env, run)
    length = getattr(run.system, "sequence_length", 1)
    if vault.num_steps < length:
        raise UserError(
            f"The vault {vault.folder} has {vault.num_steps} steps, fewer than a sequence: "
            f"system.sequence_length={length}."
        )
    steps = read_steps(vault)
    if run.logger.use_console:
        episodes = find_episodes(steps)
        print(
            f"Learning from {vault.folder}: {vault.num_steps:,} steps, {len(episodes.end):,} "
            f"episodes, mean return {np.mean(episodes.episode_return):.4g}."
        )
    return make_experience(steps, env, run.system.add_agent_id)


def check_fits(vault: StoredVault, env: VectorEnv, run: RunConfig) -> None:
    """Raises UserError if a vault lacks an array, or one is not as the environment needs it."""
    spec, num_agents = env.observation_spec, env.num_agents
    assert spec.global_state is not None
    _, *cells, num_features = spec.agents_view.shape
    if run.system.add_agent_id:
        num_features -= num_agents
    shapes = {
        "observations": (num_agents, *cells, num_features),
        "actions": (num_agents,),
        "rewards": (num_agents,),
        "terminals": (num_agents,),
        "truncations": (num_agents,),
        "infos/state": spec.global_state.shape,
        "infos/legals": spec.action_mask.shape,
    }
    missing = [name for name in shapes if name not in vault.shapes]
    if missing:
        raise UserError(f"The vault {vault.folder} lacks {', '.join(missing)}.")
    for name, shape in shapes.items():
        if math.prod(vault.shapes[name]) != math.prod(shape):
            raise UserError(
                f"The vault {vault.folder} does not fit {run.env_name} {run.task_name}: "
                f"{name} of a step has shape {vault.shapes[name]}, not {shape}."
            )


def make_experience(steps: Steps, env: VectorEnv, add_agent_id: bool) -> Experience:
    """Returns the steps of a vault (T, ...) as the environment would have shown them.

    A vault does not tell which agents were out of the game: all are taken to be in it.

    Args:
        steps: as `check_fits` wants them.
        env: whose views and states have the same numbers, perhaps in other shapes.
        add_agent_id: whether the environment's views end in an agent id, which a vault has not.
    """
    spec, num_agents = env.observation_spec, env.num_agents
    assert spec.global_state is not None
    end: Any
    num_steps, end = len(steps["rewards"]), episode_ends(steps)
    start = np.concatenate([[0], np.flatnonzero(end) + 1])
    since = start[np.searchsorted(start, np.arange(num_steps), "right") - 1]
    view = steps["observations"]
    if add_agent_id:
        cells = spec.agents_view.shape[1:-1]
        view = view.reshape(num_steps, num_agents, *cells, -1)
        view = with_agent_ids(np, view, len(cells))
    all_in_game: Any = np.ones((num_steps, num_agents), bool)
    observation = Observation(
        agents_view=view.reshape(num_steps, *spec.agents_view.shape).astype(np.float32),
        action_mask=steps["infos/legals"].reshape(num_steps, *spec.action_mask.shape) > 0,
        agent_mask=all_in_game,
        step_count=(np.arange(num_steps) - since).astype(np.int32),
        global_state=steps["infos/state"].reshape(num_steps, *spec.global_state.shape),
    )
    terminals = steps["terminals"].astype(bool)
    return Experience(
        observation=observation,
        action=steps["actions"].astype(np.int32),
        reward=steps["rewards"].astype(np.float32),
        discount=1.0 - terminals.astype(np.float32),
        last=end,
    )
