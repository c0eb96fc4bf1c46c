"""Records experience into a Flashbax Vault: whole episodes, laid end to end in one stream.

Steps leave the compiled blocks as `vault_steps` lays them out. A thread cuts each environment's
steps into whole episodes, and gives them to flashbax in large blocks: each write of a part of one
of TensorStore's chunks stores another copy of that chunk, so many small ones make a vault grow to
many times its size.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from omegaconf import OmegaConf

from mava.config import RunConfig
from mava.stored_vault import Steps, VaultWriter, episode_ends
from mava.types import Continuous, Experience
from mava.wrappers.vector import VectorEnv

WRITE_BYTES = 2**24  # of episodes that wait to be written


def vault_steps(experience: Experience, env: VectorEnv, has_agent_ids: bool) -> Steps:
    """Returns what a vault keeps of a rollout (T, E, ...), and which steps start an episode.

    The names and types are those that OG-MARL's systems read. `terminals` are 1 - discount;
    an episode cut by its time limit has `truncations` instead. No step has both.

    Args:
        experience: of one rollout.
        env: that it was made in.
        has_agent_ids: whether the views end in an agent id; vaults have none.
    """
    observation = experience.observation
    view, state = observation.agents_view, observation.global_state
    if has_agent_ids:
        view = view[..., : -env.num_agents]
    terminals = experience.discount == 0
    steps = {
        "observations": view.astype(jnp.float32),
        "actions": experience.action,
        "rewards": experience.reward.astype(jnp.float32),
        "terminals": terminals,
        "truncations": experience.last[..., None] & ~terminals,
        "start": observation.step_count == 0,
        "last": experience.last,
    }
    if state is not None:
        steps["infos/state"] = state.reshape(*experience.last.shape, -1).astype(jnp.float32)
    if not isinstance(env.action_spec, Continuous):
        steps["infos/legals"] = observation.action_mask.astype(jnp.float32)
    return steps


class Episodes:
    """Cuts the steps of many environments into whole episodes."""

    def __init__(self, num_streams: int) -> None:
        self._num_streams = num_streams
        self.interrupt()

    def interrupt(self) -> None:
        """Forgets unfinished episodes: their next steps will not come."""
        self._open: Steps = {}
        self._open_stream = np.zeros(0, np.int64)

    def add(self, steps: Steps, rows: np.ndarray) -> Steps:
        """Returns the episodes that these steps complete, one after the other.

        Steps before the first episode of an environment are left out.

        Args:
            steps: arrays (number of steps, ...), in any order.
            rows: (environments, T): where the steps of each are in the arrays, in their order.
        """
        num_open, num_new = len(self._open_stream), rows.shape[1]
        streams = np.repeat(np.arange(self._num_streams), num_new)
        stream = np.concatenate([self._open_stream, streams])
        source = np.concatenate([np.arange(num_open), num_open + rows.reshape(-1)])
        by_stream = np.argsort(stream, kind="stable")
        stream, source = stream[by_stream], source[by_stream]

        def take(name: str, which: np.ndarray) -> np.ndarray:
            new = which >= num_open
            taken = np.empty((len(which), *steps[name].shape[1:]), steps[name].dtype)
            taken[new] = steps[name][which[new] - num_open]
            if num_open:
                taken[~new] = self._open[name][which[~new]]
            return taken

        first, end = (
            np.searchsorted(stream, range(self._num_streams), s) for s in ("left", "right")
        )
        starts = np.concatenate([[0], np.cumsum(take("start", source))])
        lasts = np.concatenate([[0], np.cumsum(take("last", source))])
        begun = starts[1:] > starts[first][stream]
        complete = lasts[:-1] < lasts[end][stream]
        finished, still_open = source[begun & complete], source[begun & ~complete]
        kept = [name for name in steps if name not in ("start", "last")]
        episodes = {name: take(name, finished) for name in kept}
        self._open = {name: take(name, still_open) for name in steps}
        self._open_stream = stream[begun & ~complete]
        return episodes


class Recorder:
    """Takes the steps of a run and writes them to its vault, in a thread of its own."""

    def __init__(self, run: RunConfig, folder: Path, num_envs: int, keep: int | None) -> None:
        """Args:
        run: what the user asked for.
        folder: of the run.
        num_envs: environments on all devices and replicas.
        keep: steps recorded up to the checkpoint from which a run goes on: those after them
            make way. None for a new run.

        Raises UserError if the vault can't be written, or that of a new run is there already.
        """
        self._options = run.logger.vault
        self._num_envs = num_envs
        self._episodes = Episodes(num_envs)
        self._waiting: list[Steps] = []  # episodes that are not written yet
        self._is_full = False
        self._says_so = run.logger.use_console
        config = OmegaConf.to_container(run.composed, resolve=True)
        about = {"system_name": run.system_name, "task_name": run.task_name, "config": config}
        self._writer = VaultWriter(vault_folder(run, folder), {"mava": about}, keep)
        self.num_steps = self._writer.num_steps
        self._pool = ThreadPoolExecutor(1)
        self._job: Future = self._pool.submit(lambda: None)

    def records(self, block: int) -> bool:
        """Returns whether a block is to be recorded; if not, unfinished episodes are forgotten."""
        self.settle()
        wanted = block % self._options.every == 0 and not self._is_full
        if not wanted:
            self._episodes.interrupt()
        return wanted

    def add(self, steps: Any, num_updates: int, seed: int | None = None) -> None:
        """Takes the steps of some updates.

        Args:
            steps: what `vault_steps` gave, (D, S, k, U, T, E, ...), without S and U if they are 1.
            num_updates: how many of the k are filled.
            seed: which of the S is recorded here; None if there is no such axis.
        """
        self.settle()
        self._job = self._pool.submit(self._add, steps, num_updates, seed)

    def settle(self) -> None:
        """Waits until all steps that were added are counted; raises UserError if that failed."""
        self._job.result()

    def close(self) -> None:
        """Writes what is left of whole episodes."""
        try:
            self.settle()
            self._pool.submit(self._write).result()  # Vault can't write where an event loop runs
        finally:
            self._pool.shutdown()
            self._writer.close()
        if self._says_so:
            print(f"Recorded in {self._writer.folder}: {self.num_steps:,} steps of whole episodes.")

    def _add(self, steps: Any, num_updates: int, seed: int | None) -> None:
        arrays = {name: np.asarray(x) for name, x in steps.items()}
        if seed is not None:
            arrays = {name: np.take(x, seed, axis=1) for name, x in arrays.items()}
        shape = arrays["last"].shape  # (D, k, ..., T, E)
        rows = np.arange(np.prod(shape)).reshape(*shape[:2], -1, *shape[-2:])[:, :num_updates]
        rows = rows.transpose(0, 2, 4, 1, 3).reshape(self._num_envs, -1)  # (D U E, k T)
        arrays = {name: x.reshape(-1, *x.shape[len(shape) :]) for name, x in arrays.items()}
        episodes = self._up_to_the_cap(self._episodes.add(arrays, rows))
        self.num_steps += len(episodes["rewards"])
        self._waiting.append(episodes)
        if sum(x.nbytes for steps in self._waiting for x in steps.values()) >= WRITE_BYTES:
            self._write()

    def _up_to_the_cap(self, steps: Steps) -> Steps:
        """Returns the whole episodes for which there is room."""
        size = sum(x.nbytes for x in steps.values()) / max(len(steps["rewards"]), 1)
        limits = [np.inf if self._options.max_steps is None else self._options.max_steps]
        if self._options.max_megabytes is not None and size:
            limits.append(self._options.max_megabytes * 1e6 / size)
        ends = 1 + np.flatnonzero(episode_ends(steps))
        fitting = ends[self.num_steps + ends <= min(limits)]
        num_fitting = 0 if self._is_full or not len(fitting) else fitting[-1]
        self._is_full |= len(fitting) < len(ends)
        return {name: x[:num_fitting] for name, x in steps.items()}

    def _write(self) -> None:
        waiting, self._waiting = self._waiting, []
        if any(len(steps["rewards"]) for steps in waiting):
            self._writer.write(
                {name: np.concatenate([x[name] for x in waiting]) for name in waiting[0]}
            )


def vault_folder(run: RunConfig, folder: Path) -> Path:
    """Returns the folder of a run's vault, <path>/<name>/<uid> as OG-MARL looks for it.

    Args:
        run: what the user asked for.
        folder: of the run.
    """
    options, uid = run.logger.vault, f"seed_{run.system.seed}"
    name = options.name or f"mava/{run.env_name}/{run.task_name}.vlt"
    if options.path is None:
        return folder / "vault" / name / (options.uid or uid)
    return Path(options.path) / name / (options.uid or f"{uid}-{folder.name}")  # beside others
