"""JaxMARL's environments (Rutherford et al. 2024, arXiv:2311.10090)."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.struct import PyTreeNode

from mava.types import FIRST, LAST, MID, Observation, TimeStep, array_spec


def import_suite(name: str) -> Any:
    """Imports one suite, jaxmarl.environments.<name>, without the others.

    `import jaxmarl` imports all of them: it takes 3.3 s instead of 0.6, prints to the terminal and
    leaves sys.stdout changed. So the parent packages, which do that, are stood in for meanwhile.
    """
    parents = ("jaxmarl", "jaxmarl.environments")
    spec = importlib.util.find_spec(parents[0])
    if parents[1] in sys.modules or spec is None or spec.origin is None:
        return importlib.import_module(f"{parents[1]}.{name}")
    folder = Path(spec.origin).parent
    for parent, path in zip(parents, (folder, folder / "environments"), strict=True):
        sys.modules[parent] = ModuleType(parent)
        sys.modules[parent].__path__ = [str(path)]
    try:
        return importlib.import_module(f"{parents[1]}.{name}")
    finally:
        for parent in parents:
            del sys.modules[parent]


smax = import_suite("smax")


class JaxMarlState(PyTreeNode, kw_only=True):
    key: jax.Array  # of the steps to come: JaxMARL's take one each
    env_state: Any


class SmaxEnv:
    """SMAX: a team of units fights one that JaxMARL's heuristic commands, without StarCraft II.

    Team reward: the damage done, as a fraction of all enemies' health, and 1 for winning; the
    return is at most 2. Units that died stay in the arrays: their `agent_mask` is false and they
    can only stop. A battle ends when a team is dead (termination, also when that coincides with the
    limit) and is cut at the time limit (truncation; JaxMARL itself plays one step more). JaxMARL's
    `step`, which starts the next battle at once and hides the last observation, is not used.
    """

    def __init__(
        self, scenario: str, time_limit: int = 100, attack_mode: str = "closest", **options: Any
    ) -> None:
        """Args:
        scenario: one of JaxMARL's maps.
        time_limit: steps after which a battle is cut.
        attack_mode: which unit an enemy shoots at, the "closest" or a "random" one in range.
        options: of JaxMARL's SMAX, such as see_enemy_actions and walls_cause_death.
        """
        if time_limit < 1:
            raise ValueError(f"time_limit={time_limit} must be at least 1.")
        if attack_mode not in ("closest", "random"):
            raise ValueError(f"attack_mode={attack_mode} must be closest or random.")
        scenarios = smax.smax_env.MAP_NAME_TO_SCENARIO
        if scenario not in scenarios:
            raise ValueError(f"scenario={scenario} must be one of {', '.join(scenarios)}.")
        self._env = smax.HeuristicEnemySMAX(
            scenario=scenarios[scenario],
            max_steps=time_limit,
            attack_mode=attack_mode,
            **options,
        )
        self.num_agents: int = self._env.num_allies
        self.num_actions: int = self._env.num_ally_actions  # four moves, stop, an enemy to shoot
        self.time_limit = time_limit

    @property
    def observation_spec(self) -> Observation:
        return Observation(
            agents_view=array_spec((self.num_agents, self._env.obs_size), jnp.float32),
            action_mask=array_spec((self.num_agents, self.num_actions), bool),
            agent_mask=array_spec((self.num_agents,), bool),
            step_count=array_spec((), jnp.int32),
            global_state=array_spec((self._env.state_size,), jnp.float32),
        )

    def reset(self, key: jax.Array) -> tuple[JaxMarlState, TimeStep]:
        key, reset_key = jax.random.split(key)
        views, env_state = self._env.reset(reset_key)
        return JaxMarlState(key=key, env_state=env_state), TimeStep(
            step_type=jnp.int8(FIRST),
            reward=jnp.zeros(self.num_agents),
            discount=jnp.ones(self.num_agents),
            observation=self._observation(views, env_state),
            extras={"won_episode": jnp.bool_(False)},
        )

    def step(self, state: JaxMarlState, action: jax.Array) -> tuple[JaxMarlState, TimeStep]:
        key, step_key = jax.random.split(state.key)
        actions = dict(zip(self._env.agents, action, strict=True))
        views, env_state, rewards, _, _ = self._env.step_env(step_key, state.env_state, actions)
        alive, enemies_alive = self._alive(env_state)
        terminated = ~jnp.any(alive) | ~jnp.any(enemies_alive)
        last = terminated | (env_state.state.step >= self.time_limit)
        return JaxMarlState(key=key, env_state=env_state), TimeStep(
            step_type=jnp.where(last, LAST, MID).astype(jnp.int8),
            reward=jnp.stack([rewards[agent] for agent in self._env.agents]),
            discount=jnp.full(self.num_agents, 1.0 - terminated),
            observation=self._observation(views, env_state),
            extras={"won_episode": jnp.any(alive) & ~jnp.any(enemies_alive)},
        )

    def draw(self, states: Sequence[JaxMarlState]) -> Iterator[np.ndarray]:
        """Yields an image (height, width, 3), uint8, of each state: units as large as they are,
        fainter with less health, allies blue.
        """
        from matplotlib import pyplot as plt
        from matplotlib.patches import Circle

        env = self._env
        radii, full_health = np.array(env.unit_type_radiuses), np.array(env.unit_type_health)
        figure, axes = plt.subplots(figsize=(4.0, 4.0), layout="constrained")
        try:
            for state in states:
                units = state.env_state.state
                axes.clear()
                axes.set(xlim=(0, env.map_width), ylim=(0, env.map_height), aspect="equal")
                axes.set(xticks=[], yticks=[], title=f"step {int(units.step)}")
                for i in np.flatnonzero(units.unit_alive):
                    kind = int(units.unit_types[i])
                    color = "tab:blue" if i < self.num_agents else "tab:red"
                    health = float(units.unit_health[i] / full_health[kind])
                    x, y = (float(z) for z in units.unit_positions[i])
                    radius = float(radii[kind])
                    axes.add_patch(Circle((x, y), radius, color=color, alpha=0.25 + 0.75 * health))
                    name = env.unit_type_shorthands[kind]
                    axes.text(x + radius, y + radius, name, fontsize="x-small", color=color)
                figure.canvas.draw()
                canvas: Any = figure.canvas
                yield np.array(canvas.buffer_rgba())[..., :3]
        finally:
            plt.close(figure)

    def _observation(self, views: dict[str, jax.Array], env_state: Any) -> Observation:
        legal = self._env.get_avail_actions(env_state)
        agents = self._env.agents
        return Observation(
            agents_view=jnp.stack([views[agent] for agent in agents]),
            action_mask=jnp.stack([legal[agent] for agent in agents]).astype(bool),
            agent_mask=self._alive(env_state)[0],
            step_count=env_state.state.step.astype(jnp.int32),
            global_state=views["world_state"].astype(jnp.float32),
        )

    def _alive(self, env_state: Any) -> tuple[jax.Array, jax.Array]:
        """Returns which of the agents and which of their enemies live, bool."""
        alive = env_state.state.unit_alive
        return alive[: self.num_agents], alive[self.num_agents :]
