"""The contracts between environments, systems and the experiment. Imports no suite.

Axis letters: D devices, U replicas, T rollout steps, E environments, N agents, O observation
features, S state features, A actions.
"""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
from flax.struct import PyTreeNode

FIRST, MID, LAST = 0, 1, 2  # TimeStep.step_type


class Observation(PyTreeNode, kw_only=True):
    """What one environment shows; a batch of environments adds leading axes to every field."""

    # (N, O), float32: each agent's own view; or a grid each, (N, rows, columns, O).
    agents_view: jax.Array
    action_mask: jax.Array  # (N, A), bool; see the action specs
    agent_mask: jax.Array  # (N,), bool: false for an agent whose actions do nothing any more
    step_count: jax.Array  # (), int32: steps since the episode began
    # (S,) or (rows, columns, S), float32: what a centralised critic sees.
    global_state: jax.Array | None = None


class Discrete(NamedTuple):
    """Every agent chooses one of A actions: (N,), int32. The mask (N, A) shows the legal ones."""

    num_actions: int  # A


class MultiDiscrete(NamedTuple):
    """Every agent makes K choices at a time: (N, K), int32. The mask (N, A_1 + ... + A_K) shows the
    legal ones, of the first choice, then of the second, ...
    """

    num_actions: tuple[int, ...]  # (A_1, ..., A_K)


class Continuous(NamedTuple):
    """Every agent sets D numbers in [-1, 1]: (N, D). The mask (N, D) shows which it has."""

    num_dims: int  # D


ActionSpec = Discrete | MultiDiscrete | Continuous


class TimeStep(PyTreeNode, kw_only=True):
    """The result of a reset or a step.

    `discount` is 0 only where the episode really ended (terminated). Where only the time limit
    cut it (truncated) `step_type` is LAST and `discount` 1: a value target still bootstraps.
    """

    step_type: jax.Array  # (), int8: FIRST, MID or LAST
    reward: jax.Array  # (N,)
    discount: jax.Array  # (N,): 0 = terminated, 1 = goes on
    observation: Observation
    extras: dict[str, Any]

    def last(self) -> jax.Array:
        return self.step_type == LAST


class MarlEnv(Protocol):
    """Jumanji's API for many agents: pure `reset` and `step`, and sizes known beforehand.

    One with teams has `teams`, a dict of team name -> ids of its agents, a tuple.

    One that can be drawn has `draw(states)`: it takes a list of states and yields an image
    (height, width, 3), uint8, of each.

    `extras` of every TimeStep have the same keys. The bool `won_episode` is logged as the win rate;
    the floats in the dict `env_metrics` are logged as they are at the end of an episode.
    """

    num_agents: int
    action_spec: ActionSpec
    time_limit: int  # steps after which an episode is cut

    @property
    def observation_spec(self) -> Observation:
        """An Observation of `jax.ShapeDtypeStruct`, as `reset` and `step` give it."""
        ...

    def reset(self, key: jax.Array) -> tuple[Any, TimeStep]:
        """Returns the state and the first timestep of a new episode."""
        ...

    def step(self, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        """Returns the next state and timestep; `action` is as `action_spec` says."""
        ...


class EpisodeStats(PyTreeNode, kw_only=True):
    """Sufficient statistics of one quantity over finished episodes; all scalars."""

    count: jax.Array  # number of episodes
    sum: jax.Array
    sum_squares: jax.Array
    min: jax.Array  # +inf without episodes
    max: jax.Array  # -inf without episodes


class Metrics(PyTreeNode, kw_only=True):
    """What one update reports, already the same on every device and replica.

    Every floating-point `learn` entry is watched: a NaN or an infinity in one stops the run.
    It is logged as sum / count, but for a name that ends in `_per_second`, as sum / seconds; not
    at all while the count is 0.
    """

    episodes: dict[str, EpisodeStats]
    learn: dict[str, tuple[jax.Array, jax.Array]]  # name -> (sum, count), both scalars


class Experience(PyTreeNode, kw_only=True):
    """The rollout just taken, time first, as the environments passed to the system gave it."""

    observation: Observation  # (T, E, ...): before the action
    action: jax.Array  # (T, E, N, ...)
    reward: jax.Array  # (T, E, N)
    discount: jax.Array  # (T, E, N)
    last: jax.Array  # (T, E), bool: the episode ended or was cut with this step


LearnerState = TypeVar("LearnerState")
ActorState = TypeVar("ActorState")


class System(NamedTuple, Generic[LearnerState, ActorState]):
    """What `make_system` returns: all that the experiment knows of an algorithm.

    LearnerState is what is learnt, the same on every device and replica; its field `params` is what
    a run takes over that starts from another's parameters. ActorState is one stream of experience,
    another on each; its field `buffer`, if it has one, is kept in the newest checkpoint only.
    """

    init: Callable[[jax.Array], LearnerState]
    """init(key): what is learnt, at the start."""
    reset: Callable[[jax.Array], ActorState]
    """reset(key): a stream of experience, at the start."""
    update: Callable[..., tuple[LearnerState, ActorState, Metrics, Experience | None]]
    """update(learner_state, actor_state): one rollout and one round of learning. Averages what it
    learns with `mava.utils.parallel`; LearnerState and Metrics leave it equal everywhere."""
    act: Callable[[Any, Observation, Any, jax.Array, bool], tuple[jax.Array, Any]]
    """act(act_params, observation, memory, key, greedy): actions (E, N) for observations with a
    leading axis E, and the memory after them."""
    init_memory: Callable[[int], Any]
    """init_memory(num_envs): memory at the start of an episode, leading axis E; () if none."""
    act_params: Callable[[LearnerState], Any]
    """act_params(learner_state): what `act` needs."""
    steps_per_update: int
    """Environment steps in one update of one replica; if offline, steps of learning in an update.
    """
    offline: bool = False
    """Whether it learns from a vault. Then `update` takes the vault's Experience, (T, ...) in one
    stream of episodes, as its third argument, and returns None in place of one."""


def array_spec(shape: tuple[int, ...], dtype: Any) -> Any:
    """An entry of an observation spec."""
    return jax.ShapeDtypeStruct(shape, dtype)
