"""Evaluates the policy of a run: `python -m mava.evaluate run=<run folder>`."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mava.config import UserError, run_command
from mava.devices import choose_devices
from mava.evaluator import in_order
from mava.policy import Policy, load_policy, parse_options
from mava.programs import compile_evaluate
from mava.summary import half_interval, mean_name

CONFIDENCE = 0.95


@dataclass
class Options:
    """Of the command line; anything else on it changes the stored config."""

    run: str = "???"  # folder
    checkpoint: str = "best"  # best, last, or a number of environment steps
    num_episodes: int | None = None  # null: as for the run's absolute metric
    greedy: bool | None = None  # null: as in the run
    num_envs: int | None = None  # episodes played at once on a device; null: as in the run
    num_devices: int | None = None  # null: all accelerators; on a CPU at most 2
    seed: int | None = None  # null: the episodes of the run's absolute metric
    json: str | None = None  # file for the results and every episode's values; - prints them


USAGE = """Evaluates a trained policy over complete episodes; prints means with 95 % intervals.

  python -m mava.evaluate run=<folder> [checkpoint=best|last|<step>] [num_episodes=320]
      [greedy=true|false] [seed=<n>] [num_envs=<n>] [num_devices=<n>] [json=<file>|-]
      [env/scenario=<another>] [env.kwargs.<name>=<value>]

Without a seed the episodes are those of the run's absolute metric."""


class Interval(NamedTuple):
    """A mean and the bounds between which it lies with 95 % confidence."""

    mean: float
    low: float
    high: float


def interval(name: str, values: np.ndarray) -> Interval:
    """Returns the mean of a metric over independent episodes (num_episodes,).

    Student's t; for the win rate, of values 0 or 100, Wilson's interval (1927), which has a width
    also where all episodes are won.
    """
    from scipy import stats

    count, mean = len(values), float(np.mean(values, dtype=np.float64))
    if name == "win_rate":
        wins = int(np.sum(values > 0))
        bounds = stats.binomtest(wins, count).proportion_ci(CONFIDENCE, method="wilson")
        return Interval(mean, 100 * float(bounds.low), 100 * float(bounds.high))
    if count < 2:
        return Interval(mean, math.nan, math.nan)
    half = half_interval(values, CONFIDENCE)
    return Interval(mean, mean - half, mean + half)


def _strict(values: dict[str, float]) -> dict[str, float | None]:
    """Returns values for JSON, which knows no NaN."""
    return {name: None if math.isnan(x) else x for name, x in values.items()}


def evaluate(policy: Policy, options: Options) -> dict[str, np.ndarray]:
    """Returns the values (num_episodes,) of every metric."""
    arch = policy.config.arch
    num_episodes = options.num_episodes or arch.num_absolute_metric_eval_episodes
    devices = choose_devices(options.num_devices, "num_devices")
    program = compile_evaluate(
        policy.env,
        policy.system,
        policy.act_params,
        devices,
        num_envs=options.num_envs or arch.num_envs * policy.config.system.update_batch_size,
        num_episodes=num_episodes,
        max_episodes=num_episodes,
        greedy=policy.greedy,
    )
    indices = np.arange(len(devices), dtype=np.int32)
    results = program(policy.act_params, policy.key, np.int32(num_episodes), indices)
    return in_order(results, num_episodes)


def main(arguments: list[str]) -> None:
    """The command line."""
    options, overrides = parse_options(Options, arguments, USAGE)
    for name in ("num_episodes", "num_envs", "num_devices"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"{name}={value} must be at least 1.")
    policy = load_policy(
        Path(options.run), options.checkpoint, overrides, options.greedy, options.seed
    )
    values = evaluate(policy, options)
    intervals = {mean_name(name): interval(name, x) for name, x in values.items()}
    result = {
        "run": options.run,
        "checkpoint": options.checkpoint,
        "env_step": policy.env_step,
        "environment": policy.config.env_name,
        "task": policy.config.task_name,
        "num_episodes": len(values["episode_return"]),
        "metrics": {
            name: {**_strict(x._asdict()), "episodes": values_of.tolist()}
            for (name, x), values_of in zip(intervals.items(), values.values(), strict=True)
        },
    }
    if options.json == "-":
        print(json.dumps(result))
        return
    print(
        f"{options.run}, {options.checkpoint} checkpoint, saved after {policy.env_step:,} "
        f"environment steps, on {policy.config.env_name} {policy.config.task_name}, "
        f"{result['num_episodes']} episodes (mean, 95 % interval):"
    )
    for name, (mean, low, high) in intervals.items():
        print(f"  {name:<24} {mean:>10.4g}   [{low:.4g}, {high:.4g}]")
    if options.json is not None:
        try:
            Path(options.json).write_text(json.dumps(result))
        except OSError as error:
            raise UserError(f"json={options.json}: can't write it: {error.strerror}.") from error


if __name__ == "__main__":
    run_command(main)
