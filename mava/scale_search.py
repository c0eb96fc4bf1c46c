"""The search of `python -m mava.autoscale`: which sizes to try next, and when to stop."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

ROUNDS = 2  # over all axes, at most
NOISE = 0.03  # a trial must be faster by more, else the sizes stay as they are


class Setting(NamedTuple):
    """Sizes that are tried."""

    num_envs: int  # per device and replica
    num_replicas: int  # per device
    num_parts: int  # minibatches, or another number of parts that the system learns a batch in


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is known of a setting."""

    setting: Setting
    status: Literal["measured", "too large", "refused", "failed"] = "measured"
    reason: str = ""  # why it was not measured
    steps_per_second: float = 0.0  # environment steps, on all devices
    agent_updates_per_second: float | None = None  # of a system that counts them
    compile_seconds: float = 0.0  # tracing included
    predicted_bytes: int = 0  # on a device
    peak_bytes: int = 0  # on a device; on a CPU of the whole process
    steps_per_update: int = 0  # environment steps, on all devices

    @property
    def rate(self) -> float:
        """What is to be large; 0 if it was not measured."""
        updates = self.agent_updates_per_second
        return self.steps_per_second if updates is None else updates

    @property
    def is_measured(self) -> bool:
        return self.status == "measured"


Move = Callable[[Setting], Setting | None]  # to the next setting on an axis; None: there is none


def more_envs(setting: Setting) -> Setting | None:
    return setting._replace(num_envs=2 * setting.num_envs)


def fewer_envs(setting: Setting) -> Setting | None:
    half, rest = divmod(setting.num_envs, 2)
    return None if rest else setting._replace(num_envs=half)


def more_replicas(setting: Setting) -> Setting | None:
    """As many environments in all, in twice the replicas."""
    half, rest = divmod(setting.num_envs, 2)
    replicas = 2 * setting.num_replicas
    return None if rest else setting._replace(num_envs=half, num_replicas=replicas)


def fewer_replicas(setting: Setting) -> Setting | None:
    half, rest = divmod(setting.num_replicas, 2)
    envs = 2 * setting.num_envs
    return None if rest else setting._replace(num_envs=envs, num_replicas=half)


def more_parts(setting: Setting) -> Setting | None:
    return setting._replace(num_parts=2 * setting.num_parts)


def fewer_parts(setting: Setting) -> Setting | None:
    half, rest = divmod(setting.num_parts, 2)
    return None if rest else setting._replace(num_parts=half)


def climb(
    start: Trial, moves: tuple[Move, ...], attempt: Callable[[Setting], Trial], min_gain: float
) -> Trial:
    """Returns the fastest trial on one axis. The second move is made where the first is in vain."""
    best = start
    for move in moves:
        here, setting = start, move(start.setting)
        while setting is not None:
            trial = attempt(setting)
            if trial.rate > best.rate * (1 + NOISE):
                best = trial
            if trial.rate < here.rate * (1 + min_gain):
                break
            here, setting = trial, move(setting)
        if best is not start:
            break
    return best


def search(
    start: Setting, measure: Callable[[Setting], Trial], has_parts: bool, min_gain: float
) -> tuple[Trial, list[Trial]]:
    """Returns the chosen trial and all, in their order.

    One size is changed at a time, by a factor of two, while that makes training faster by
    `min_gain`: as many trials as there are doublings on the axes together, not their product.

    Args:
        start: sizes to begin with.
        measure: makes a trial.
        has_parts: whether the system has a number of parts to choose.
        min_gain: as a fraction.
    """
    known: dict[Setting, Trial] = {}

    def attempt(setting: Setting) -> Trial:
        if setting not in known:
            known[setting] = measure(setting)
        return known[setting]

    axes: list[tuple[Move, ...]] = [(more_envs, fewer_envs), (more_replicas, fewer_replicas)]
    if has_parts:
        axes.append((more_parts, fewer_parts))
    best = attempt(start)
    last_moved = None
    for moves in axes * ROUNDS if best.rate else []:
        if moves is last_moved:  # nothing else has changed since
            break
        found = climb(best, moves, attempt, min_gain)
        if found is not best:
            best, last_moved = found, moves
    return best, list(known.values())
