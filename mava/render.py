"""Animations of complete episodes, drawn by the environments' own suites without a display.

`python -m mava.render run=<run folder> out=episode.gif` draws the policy of a run.
"""

import math
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mava.config import UserError, run_command
from mava.evaluator import Evaluation, act, start
from mava.logger import TensorBoardLogger
from mava.types import MarlEnv, Observation, System
from mava.wrappers.vector import strongly_typed

DEFAULT_FPS = 6.0
PAUSE_SECONDS = 1.0  # on the last image of an episode


def make_play(
    env: MarlEnv, system: System, greedy: bool
) -> Callable[[Any, jax.Array, jax.Array], tuple[Any, jax.Array, jax.Array]]:
    """Returns a function to be compiled, play(act_params, key, episode): an evaluator's episode.

    Its results are the states (time_limit + 1, ...), how many of them belong to the episode, and
    the return.
    """
    evaluation = Evaluation(env, system, 1, 1, 1, greedy)

    def step(
        act_params: Any,
        key: jax.Array,
        episode: jax.Array,
        carry: tuple[Any, Observation, Any],
        t: jax.Array,
    ) -> tuple[tuple[Any, Observation, Any], tuple[Any, jax.Array, jax.Array]]:
        state, observation, memory = carry
        action, memory = act(evaluation, act_params, key, episode, t, observation, memory)
        state, timestep = env.step(state, action)
        carry = strongly_typed((state, timestep.observation, memory))
        return carry, (carry[0], timestep.last(), timestep.extras["episode_return"])

    def play_episode(
        act_params: Any, key: jax.Array, episode: jax.Array
    ) -> tuple[Any, jax.Array, jax.Array]:
        first, timestep = strongly_typed(start(evaluation, key, episode))
        memory = jax.tree.map(lambda x: x[0], system.init_memory(1))
        _, (states, last, episode_return) = jax.lax.scan(
            partial(step, act_params, key, episode),
            (first, timestep.observation, memory),
            jnp.arange(env.time_limit),
        )
        end = jnp.argmax(last)
        states = jax.tree.map(lambda x, rest: jnp.concatenate([x[None], rest]), first, states)
        return states, end + 2, episode_return[end]

    return play_episode


def draw(env: MarlEnv, states: Any, num_states: int) -> Iterator[np.ndarray]:
    """Yields an image (height, width, 3), uint8, of each of the first states (T, ...)."""
    import matplotlib as mpl

    mpl.use("Agg")
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        states = jax.device_get(states)
        listed = [jax.tree.map(lambda x, t=t: x[t], states) for t in range(num_states)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the suites' plotting
            yield from env.draw(listed)  # type: ignore[attr-defined]


def check_drawable(env: MarlEnv) -> None:
    """Raises UserError if there are no pictures of this environment."""
    if not hasattr(env, "draw"):
        while hasattr(env, "env"):
            env = env.env
        raise UserError(
            f"{type(env).__name__} can't be rendered: it has no `draw(states)`, which gives an "
            "image (height, width, 3) of each state."
        )


def with_pauses(episodes: Iterable[Iterable[np.ndarray]], fps: float) -> Iterator[np.ndarray]:
    """Yields the images of all episodes; the last of each stays for a while."""
    for images in episodes:
        for image in images:
            yield image
        for _ in range(round(PAUSE_SECONDS * fps)):
            yield image


def write(path: Path, images: Iterable[np.ndarray], fps: float) -> None:
    """Writes a .gif or .mp4 file image by image; it appears when it is complete.

    Raises ImportError if PyAV, which an .mp4 needs, is not installed.
    """
    unfinished = path.with_name(f".unfinished_{path.name}")
    try:
        if path.suffix == ".gif":
            _write_gif(unfinished, images, fps)
        else:
            _write_mp4(unfinished, images, fps)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _write_gif(path: Path, images: Iterable[np.ndarray], fps: float) -> None:
    import imageio.v2 as iio

    writer: Any = iio.get_writer(path, mode="I", duration=1000 / fps, loop=0)
    with writer:
        for image in images:
            writer.append_data(image)


def _write_mp4(path: Path, images: Iterable[np.ndarray], fps: float) -> None:
    """With PyAV, inside this process: imageio's other way forks, which JAX's threads forbid."""
    import imageio.v3 as iio

    file: Any = iio.imopen(path, "w", plugin="pyav")
    with file:
        file.init_video_stream("libx264", fps=fps)
        for image in images:
            height, width = (size // 2 * 2 for size in image.shape[:2])  # the codec asks for even
            file.write_frame(image[:height, :width])


class _GivenUp(Exception):  # noqa: N818  no error
    """The run stops: the rest of an episode is not drawn."""


class Renderer:
    """Draws an episode after some evaluations of a run, in a thread of its own."""

    def __init__(
        self,
        env: MarlEnv,
        system: System,
        greedy: bool,
        key: jax.Array,
        every: int,
        folder: Path,
        tensorboard: TensorBoardLogger | None,
    ) -> None:
        """Args:
        env: one environment, with EpisodeMetrics; see `check_drawable`.
        system: whose policy is shown.
        greedy: passed to `system.act`.
        key: of the evaluations.
        every: evaluations from one animation to the next.
        folder: gets step_<environment steps>.gif.
        tensorboard: shows them as well, if given.
        """
        self._env = env
        self._play = jax.jit(make_play(env, system, greedy))
        self._key = key
        self._every = every
        self._folder = folder
        self._tensorboard = tensorboard
        self._pool = ThreadPoolExecutor(1)
        self._jobs: list[Future] = []
        self._stop = threading.Event()

    def render_if_due(self, evaluation: int, act_params: Any, env_step: int) -> None:
        """Starts drawing the first episode of this evaluation, if it is its turn."""
        if (evaluation + 1) % self._every == 0:
            self._jobs.append(self._pool.submit(self._render, evaluation, act_params, env_step))

    def _render(self, evaluation: int, act_params: Any, env_step: int) -> None:
        key = jax.random.fold_in(self._key, evaluation)
        states, num_states, _ = self._play(act_params, key, jnp.int32(0))
        episode = draw(self._env, states, int(num_states))
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"step_{env_step}.gif"
        try:
            write(path, self._until_stopped(with_pauses([episode], DEFAULT_FPS)), DEFAULT_FPS)
        except _GivenUp:
            return
        if self._tensorboard is not None:
            self._tensorboard.write_gif(path.read_bytes(), env_step)

    def _until_stopped(self, images: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        for image in images:
            if self._stop.is_set():
                raise _GivenUp
            yield image

    def is_done(self) -> bool:
        """Returns whether all that was asked for is drawn."""
        return all(job.done() for job in self._jobs)

    def raise_errors(self) -> None:
        """Raises what went wrong while drawing."""
        for job in [job for job in self._jobs if job.done()]:
            self._jobs.remove(job)
            job.result()

    def close(self) -> None:
        """Gives up what is not drawn yet."""
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)


@dataclass
class Options:
    """Of the command line; anything else on it changes the stored config."""

    run: str = "???"  # folder
    checkpoint: str = "best"  # best, last, or a number of environment steps
    episodes: int = 1
    out: str = "episode.gif"  # or .mp4
    fps: float = DEFAULT_FPS  # states shown per second
    greedy: bool | None = None  # null: as in the run's evaluations
    seed: int | None = None  # null: the episodes of the run's absolute metric


USAGE = """Draws complete episodes of a trained policy.

  python -m mava.render run=<folder> [checkpoint=best|last|<step>] [episodes=1]
      [out=episode.gif|.mp4] [fps=6] [greedy=true|false] [seed=<n>]
      [env/scenario=<another>] [env.kwargs.<name>=<value>]

Without a seed the episodes are the first of the run's absolute metric."""


def main(arguments: list[str]) -> None:
    """The command line."""
    from mava.policy import load_policy, parse_options

    options, overrides = parse_options(Options, arguments, USAGE)
    out = Path(options.out)
    if out.suffix not in (".gif", ".mp4"):
        raise UserError(f"out={out} must end in .gif or .mp4.")
    if options.episodes < 1 or not 0 < options.fps < math.inf:
        raise UserError(f"episodes={options.episodes} and fps={options.fps} must be above 0.")
    policy = load_policy(
        Path(options.run), options.checkpoint, overrides, options.greedy, options.seed
    )
    check_drawable(policy.env)
    run_episode = jax.jit(make_play(policy.env, policy.system, policy.greedy))

    def episodes() -> Iterator[Iterator[np.ndarray]]:
        for number in range(options.episodes):
            states, count, episode_return = run_episode(
                policy.act_params, policy.key, jnp.int32(number)
            )
            print(f"episode {number}: return {episode_return:.4g}, length {count - 1}", flush=True)
            yield draw(policy.env, states, int(count))

    try:
        write(out, with_pauses(episodes(), options.fps), options.fps)
    except ImportError as error:
        raise UserError(f"{out}: {error}") from error
    except OSError as error:
        raise UserError(f"out={out}: can't write it: {error.strerror or error}.") from error
    print(f"{out}: {out.stat().st_size:,} bytes")


if __name__ == "__main__":
    run_command(main)
