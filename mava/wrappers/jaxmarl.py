"""JaxMARL's environments (Rutherford et al. 2024, arXiv:2311.10090)."""

import functools
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

from mava.drawing import Disc, draw_discs
from mava.types import (
    LAST,
    MID,
    ActionSpec,
    Continuous,
    Discrete,
    Observation,
    TimeStep,
    array_spec,
)
from mava.wrappers.base import check_time_limit, first_timestep


@functools.cache
def import_suite(name: str) -> Any:
    """Imports one suite, jaxmarl.environments.<name>, without the others.

    `import jaxmarl` imports all of them: it takes 3.3 s instead of 0.6, prints to the terminal and
    leaves sys.stdout changed. So the parent packages, which do that, are stood in for meanwhile.
    Afterwards nothing of it is left in sys.modules; whoever imports jaxmarl gets it whole.
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
        for module in [x for x in sys.modules if x.split(".")[0] == parents[0]]:
            del sys.modules[module]


class JaxMarlState(PyTreeNode, kw_only=True):
    key: jax.Array  # of the steps to come: JaxMARL's take one each
    env_state: Any


class SmaxEnv:
    """SMAX: a team of units fights one that JaxMARL's heuristic commands, without StarCraft II.

    Team reward: the health that enemies lost, the mean of their fractions, and 1 for winning; the
    return is at most 2. Units that died stay in the arrays: their `agent_mask` is false and they
    can only stop. A battle ends when a team is dead (termination, also when that coincides with the
    limit) and is cut at the time limit (truncation; JaxMARL itself plays one step more). JaxMARL's
    `step`, which starts the next battle at once and hides the last observation, is not used.
    """

    def __init__(
        self,
        scenario: str,
        time_limit: int = 100,
        attack_mode: str = "closest",
        see_enemy_actions: bool = True,
        walls_cause_death: bool = True,
    ) -> None:
        """Args:
        scenario: one of JaxMARL's maps.
        time_limit: steps after which a battle is cut.
        attack_mode: which unit an enemy shoots at, the "closest" or a "random" one in range.
        see_enemy_actions: show the last moves and targets of visible enemies.
        walls_cause_death: of units that touch the edge of the map.
        """
        check_time_limit(time_limit)
        if attack_mode not in ("closest", "random"):
            raise ValueError(f"attack_mode={attack_mode} must be closest or random.")
        switches = {"see_enemy_actions": see_enemy_actions, "walls_cause_death": walls_cause_death}
        for name, value in switches.items():
            if not isinstance(value, bool):
                raise ValueError(f"{name}={value} must be true or false.")
        smax = import_suite("smax")
        scenarios = smax.smax_env.MAP_NAME_TO_SCENARIO
        if scenario not in scenarios:
            raise ValueError(f"scenario={scenario} must be one of {', '.join(scenarios)}.")
        self._env = smax.HeuristicEnemySMAX(
            scenario=scenarios[scenario],
            max_steps=time_limit,
            attack_mode=attack_mode,
            **switches,
        )
        self.num_agents: int = self._env.num_allies
        # Four moves, stop, an enemy to shoot at.
        self.action_spec = Discrete(self._env.num_ally_actions)
        self.time_limit = time_limit

    @property
    def observation_spec(self) -> Observation:
        return Observation(
            agents_view=array_spec((self.num_agents, self._env.obs_size), jnp.float32),
            action_mask=array_spec((self.num_agents, self.action_spec.num_actions), bool),
            agent_mask=array_spec((self.num_agents,), bool),
            step_count=array_spec((), jnp.int32),
            global_state=array_spec((self._env.state_size,), jnp.float32),
        )

    def reset(self, key: jax.Array) -> tuple[JaxMarlState, TimeStep]:
        key, reset_key = jax.random.split(key)
        views, env_state = self._env.reset(reset_key)
        first = first_timestep(
            self._observation(views, env_state), {"won_episode": jnp.bool_(False)}
        )
        return JaxMarlState(key=key, env_state=env_state), first

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
        env = self._env
        radii, full_health = np.array(env.unit_type_radiuses), np.array(env.unit_type_health)

        def living_units(state: JaxMarlState) -> Iterator[Disc]:
            units = state.env_state.state
            for i in np.flatnonzero(units.unit_alive):
                kind = int(units.unit_types[i])
                x, y = (float(z) for z in units.unit_positions[i])
                color = "tab:blue" if i < self.num_agents else "tab:red"
                health = float(units.unit_health[i] / full_health[kind])
                name = env.unit_type_shorthands[kind]
                yield Disc(x, y, float(radii[kind]), color, 0.25 + 0.75 * health, name)

        limits = (0.0, float(env.map_width), 0.0, float(env.map_height))
        return draw_discs(map(living_units, states), limits)

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


MPE_TASKS = {  # JaxMARL's name without "MPE_" -> its class
    "simple_v3": "SimpleMPE",
    "simple_adversary_v3": "SimpleAdversaryMPE",
    "simple_crypto_v3": "SimpleCryptoMPE",
    "simple_push_v3": "SimplePushMPE",
    "simple_reference_v3": "SimpleReferenceMPE",
    "simple_speaker_listener_v4": "SimpleSpeakerListenerMPE",
    "simple_spread_v3": "SimpleSpreadMPE",
    "simple_tag_v3": "SimpleTagMPE",
    "simple_world_comm_v3": "SimpleWorldCommMPE",
}


class MpeEnv:
    """MPE: particles that move, push, speak and chase (Lowe et al. 2017, arXiv:1706.02275).

    Every agent has a reward of its own; the episode return is the mean over agents of their sums
    (JaxMARL's logs show the sum over agents, N times as much). Nothing ends an episode but the time
    limit, a truncation. JaxMARL's max_steps=25 gives episodes of 26 steps; `time_limit` is what it
    says, and 26 for the same episodes.

    Agents differ in some tasks. Shorter views are padded with zeros at the end, and an action that
    an agent does not have is never legal.
    """

    def __init__(
        self, task: str, time_limit: int = 26, action_type: str = "discrete", **options: Any
    ) -> None:
        """Args:
        task: one of MPE_TASKS.
        time_limit: steps after which an episode is cut.
        action_type: "discrete" or "continuous".
        options: of JaxMARL's environment, such as num_agents and num_landmarks.
        """
        check_time_limit(time_limit)
        if task not in MPE_TASKS:
            raise ValueError(f"task={task} must be one of {', '.join(MPE_TASKS)}.")
        if action_type not in ("discrete", "continuous"):
            raise ValueError(f"action_type={action_type} must be discrete or continuous.")
        make = getattr(import_suite("mpe"), MPE_TASKS[task])
        self._env = make(action_type=action_type.title(), max_steps=time_limit, **options)
        self._agents: list[str] = self._env.agents
        spaces = [self._env.action_space(agent) for agent in self._agents]
        self._continuous = action_type == "continuous"
        sizes = [space.shape[0] if self._continuous else space.n for space in spaces]
        self.num_agents = len(self._agents)
        self.action_spec: ActionSpec = (Continuous if self._continuous else Discrete)(max(sizes))
        self.time_limit = time_limit
        self._view_size = max(self._env.observation_space(a).shape[0] for a in self._agents)
        self._sizes = sizes
        self._action_mask = np.arange(max(sizes)) < np.array(sizes)[:, None]  # (N, A) or (N, D)

    @property
    def observation_spec(self) -> Observation:
        return Observation(
            agents_view=array_spec((self.num_agents, self._view_size), jnp.float32),
            action_mask=array_spec(self._action_mask.shape, bool),
            agent_mask=array_spec((self.num_agents,), bool),
            step_count=array_spec((), jnp.int32),
        )

    def reset(self, key: jax.Array) -> tuple[JaxMarlState, TimeStep]:
        key, reset_key = jax.random.split(key)
        views, env_state = self._env.reset(reset_key)
        first = first_timestep(self._observation(views, env_state), {})
        return JaxMarlState(key=key, env_state=env_state), first

    def step(self, state: JaxMarlState, action: jax.Array) -> tuple[JaxMarlState, TimeStep]:
        key, step_key = jax.random.split(state.key)
        chosen = list(action)
        if self._continuous:  # JaxMARL's are in [0, 1]
            chosen = [(x[:size] + 1) / 2 for x, size in zip(action, self._sizes, strict=True)]
        actions = dict(zip(self._agents, chosen, strict=True))
        views, env_state, rewards, _, _ = self._env.step_env(step_key, state.env_state, actions)
        last = env_state.step >= self.time_limit
        return JaxMarlState(key=key, env_state=env_state), TimeStep(
            step_type=jnp.where(last, LAST, MID).astype(jnp.int8),
            reward=jnp.stack([rewards[agent] for agent in self._agents]).astype(jnp.float32),
            discount=jnp.ones(self.num_agents),
            observation=self._observation(views, env_state),
            extras={},
        )

    def draw(self, states: Sequence[JaxMarlState]) -> Iterator[np.ndarray]:
        """Yields an image (height, width, 3), uint8, of each state."""
        radii, names = np.array(self._env.rad), [*self._agents, *self._env.landmarks]
        colors = np.array(self._env.colour, float) / 255.0

        def particles(state: JaxMarlState) -> Iterator[Disc]:
            for i, (x, y) in enumerate(np.array(state.env_state.p_pos)):
                yield Disc(float(x), float(y), float(radii[i]), colors[i], 0.8, names[i])

        return draw_discs(map(particles, states), (-2.0, 2.0, -2.0, 2.0))

    def _observation(self, views: dict[str, jax.Array], env_state: Any) -> Observation:
        padded = [
            jnp.pad(views[agent], (0, self._view_size - views[agent].size))
            for agent in self._agents
        ]
        return Observation(
            agents_view=jnp.stack(padded).astype(jnp.float32),
            action_mask=jnp.asarray(self._action_mask),
            agent_mask=jnp.ones(self.num_agents, bool),
            step_count=env_state.step.astype(jnp.int32),
        )
