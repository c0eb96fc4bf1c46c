"""JaxMARL's environments (Rutherford et al. 2024, arXiv:2311.10090)."""

import functools
import importlib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from mava.wrappers.base import (
    check_known,
    check_switches,
    check_time_limit,
    first_timestep,
    view_spec,
)


@contextmanager
def quiet() -> Iterator[None]:
    """Drops the warnings of JaxMARL and what it imports."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@functools.cache
def import_suite(name: str) -> Any:
    """Imports one suite, jaxmarl.environments.<name>, without the others.

    `import jaxmarl` imports all of them: it takes 3.3 s instead of 0.6, prints to the terminal and
    leaves sys.stdout changed. So the parent packages, which do that, are stood in for meanwhile.
    Afterwards nothing of it is left in sys.modules; whoever imports jaxmarl gets it whole.
    """
    streams = sys.stdout, sys.stderr  # two of the suites set others
    parents = ("jaxmarl", "jaxmarl.environments")
    spec = importlib.util.find_spec(parents[0])
    if parents[1] in sys.modules or spec is None or spec.origin is None:
        return importlib.import_module(f"{parents[1]}.{name}")
    folder = Path(spec.origin).parent
    for parent, path in zip(parents, (folder, folder / "environments"), strict=True):
        sys.modules[parent] = ModuleType(parent)
        sys.modules[parent].__path__ = [str(path)]
    try:
        with quiet():
            return importlib.import_module(f"{parents[1]}.{name}")
    finally:
        sys.stdout, sys.stderr = streams
        for module in [x for x in sys.modules if x.split(".")[0] == parents[0]]:
            del sys.modules[module]


class JaxMarlState(PyTreeNode, kw_only=True):
    key: jax.Array  # of the steps to come: JaxMARL's take one each
    env_state: Any


class JaxMarlEnv:
    """What JaxMARL's environments share; the subclasses say where they differ.

    JaxMARL's `step` starts the next episode at once and hides the last observation: `step_env` is
    used instead. Its `done` doesn't tell an end from a time limit: it is not used.
    """

    def __init__(
        self,
        env: Any,
        view_shape: tuple[int, ...],
        action_spec: ActionSpec,
        time_limit: int,
        agents: Sequence[Any] | None = None,
    ) -> None:
        """Args:
        env: JaxMARL's.
        view_shape: of one agent.
        action_spec: of all.
        time_limit: steps after which an episode is cut.
        agents: their names if not all of JaxMARL's are agents.
        """
        self._env = env
        self._agents = list(agents or env.agents)
        self._view_shape = view_shape
        self.num_agents = len(self._agents)
        self.action_spec = action_spec
        self.time_limit = time_limit

    @property
    def observation_spec(self) -> Observation:
        return view_spec(self, self._view_shape)

    def reset(self, key: jax.Array) -> tuple[JaxMarlState, TimeStep]:
        key, reset_key = jax.random.split(key)
        with quiet():
            views, env_state = self._env.reset(reset_key)
        env_state = jax.tree.map(jnp.asarray, env_state)  # some have Python's numbers in it
        first = first_timestep(self._observation(views, env_state), self._extras(env_state))
        return JaxMarlState(key=key, env_state=env_state), first

    def step(self, state: JaxMarlState, action: jax.Array) -> tuple[JaxMarlState, TimeStep]:
        state, views, rewards, _ = self._play(state, action)
        reward = jnp.stack([rewards[agent] for agent in self._agents]).astype(jnp.float32)
        return state, self._timestep(views, state.env_state, reward)

    def _play(self, state: JaxMarlState, action: jax.Array) -> tuple[JaxMarlState, Any, Any, Any]:
        """Returns the next state and JaxMARL's views, rewards and infos."""
        key, step_key = jax.random.split(state.key)
        with quiet():
            views, env_state, rewards, _, infos = self._env.step_env(
                step_key, state.env_state, self._actions(action)
            )
        return state.replace(key=key, env_state=env_state), views, rewards, infos

    def _timestep(self, views: Any, env_state: Any, reward: jax.Array) -> TimeStep:
        """Returns the timestep of a step, the reward of each agent (N,)."""
        observation = self._observation(views, env_state)
        terminated = self._terminated(env_state)
        last = terminated | (observation.step_count >= self.time_limit)
        return TimeStep(
            step_type=jnp.where(last, LAST, MID).astype(jnp.int8),
            reward=reward,
            discount=jnp.full(self.num_agents, 1.0 - terminated, jnp.float32),
            observation=observation,
            extras=self._extras(env_state),
        )

    def _actions(self, action: jax.Array) -> dict[Any, jax.Array]:
        """Returns the actions (N, ...) by JaxMARL's names."""
        return dict(zip(self._agents, action, strict=True))

    def _observation(self, views: Any, env_state: Any) -> Observation:
        """Returns the views, every agent in the game, and every action legal."""
        return Observation(
            agents_view=self._stacked(views),
            action_mask=jnp.ones((self.num_agents, *self.action_spec), bool),
            agent_mask=jnp.ones(self.num_agents, bool),
            step_count=jnp.asarray(env_state.step, jnp.int32),
        )

    def _stacked(self, views: dict[Any, jax.Array]) -> jax.Array:
        """Returns all agents' views, (N, ...), vectors padded with zeros at the end."""
        if len(self._view_shape) == 1:
            size = self._view_shape[0]
            views = {agent: jnp.pad(x, (0, size - x.size)) for agent, x in views.items()}
        return jnp.stack([views[agent] for agent in self._agents]).astype(jnp.float32)

    def _terminated(self, env_state: Any) -> jax.Array:
        """Returns whether the episode really ended, () bool."""
        return jnp.bool_(False)

    def _extras(self, env_state: Any) -> dict[str, Any]:
        return {}


class SmaxEnv(JaxMarlEnv):
    """SMAX: a team of units fights one that JaxMARL's heuristic commands, without StarCraft II.

    Team reward: the health that enemies lost, the mean of their fractions, and 1 for winning; the
    return is at most 2. Units that died stay in the arrays: their `agent_mask` is false and they
    can only stop. A battle ends when a team is dead (termination, also when that coincides with the
    limit) and is cut at the time limit (truncation; JaxMARL itself plays one step more).
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
        check_switches(**switches)
        smax = import_suite("smax")
        scenarios = smax.smax_env.MAP_NAME_TO_SCENARIO
        check_known("scenario", scenario, scenarios)
        env = smax.HeuristicEnemySMAX(
            scenario=scenarios[scenario],
            max_steps=time_limit,
            attack_mode=attack_mode,
            **switches,
        )
        # Four moves, stop, an enemy to shoot at.
        action_spec = Discrete(env.num_ally_actions)
        super().__init__(env, (env.obs_size,), action_spec, time_limit)

    @property
    def observation_spec(self) -> Observation:
        global_state = array_spec((self._env.state_size,), jnp.float32)
        return super().observation_spec.replace(global_state=global_state)

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

    def _observation(self, views: Any, env_state: Any) -> Observation:
        legal = self._env.get_avail_actions(env_state)
        return Observation(
            agents_view=jnp.stack([views[agent] for agent in self._agents]),
            action_mask=jnp.stack([legal[agent] for agent in self._agents]).astype(bool),
            agent_mask=self._alive(env_state)[0],
            step_count=env_state.state.step.astype(jnp.int32),
            global_state=views["world_state"].astype(jnp.float32),
        )

    def _terminated(self, env_state: Any) -> jax.Array:
        alive, enemies_alive = self._alive(env_state)
        return ~jnp.any(alive) | ~jnp.any(enemies_alive)

    def _extras(self, env_state: Any) -> dict[str, Any]:
        alive, enemies_alive = self._alive(env_state)
        return {"won_episode": jnp.any(alive) & ~jnp.any(enemies_alive)}

    def _alive(self, env_state: Any) -> tuple[jax.Array, jax.Array]:
        """Returns which of the agents and which of their enemies live, bool."""
        alive = env_state.state.unit_alive
        return alive[: self.num_agents], alive[self.num_agents :]


MPE_TASKS = {  # JaxMARL's name without "MPE_" -> its class
    "simple_v3": "SimpleMPE",
    "simple_adversary_v3": "SimpleAdversaryMPE",
    "simple_crypto_v3": "SimpleCryptoMPE",
    "simple_facmac_v1": "SimpleFacmacMPE",
    "simple_facmac_3a_v1": "SimpleFacmacMPE3a",
    "simple_facmac_6a_v1": "SimpleFacmacMPE6a",
    "simple_facmac_9a_v1": "SimpleFacmacMPE9a",
    "simple_push_v3": "SimplePushMPE",
    "simple_reference_v3": "SimpleReferenceMPE",
    "simple_speaker_listener_v4": "SimpleSpeakerListenerMPE",
    "simple_spread_v3": "SimpleSpreadMPE",
    "simple_tag_v3": "SimpleTagMPE",
    "simple_world_comm_v3": "SimpleWorldCommMPE",
}


class MpeEnv(JaxMarlEnv):
    """MPE: particles that move, push, speak and chase (Lowe et al. 2017, arXiv:1706.02275).

    Every agent has a reward of its own; the episode return is the mean over agents of their sums
    (JaxMARL's logs show the sum over agents, N times as much). Nothing ends an episode but the time
    limit, a truncation. JaxMARL's max_steps=25 gives episodes of 26 steps; `time_limit` is what it
    says, and 26 for the same episodes.

    Agents differ in some tasks. Shorter views are padded with zeros at the end, and an action that
    an agent does not have is never legal. In the simple_facmac tasks, whose actions are continuous,
    JaxMARL moves the prey: only the predators are agents. Agents of one name but for the number,
    such as adversary_0 and adversary_1, are a team.
    """

    def __init__(
        self, task: str, time_limit: int = 26, action_type: str | None = None, **options: Any
    ) -> None:
        """Args:
        task: one of MPE_TASKS.
        time_limit: steps after which an episode is cut.
        action_type: "discrete" or "continuous"; None: discrete, if the task has those.
        options: of JaxMARL's environment, such as num_agents and num_landmarks.
        """
        check_time_limit(time_limit)
        check_known("task", task, MPE_TASKS)
        scripted_prey = task.startswith("simple_facmac")
        action_type = action_type or ("continuous" if scripted_prey else "discrete")
        if action_type not in ("discrete", "continuous"):
            raise ValueError(f"action_type={action_type} must be discrete or continuous.")
        if scripted_prey and action_type == "discrete":
            raise ValueError(f"action_type=discrete: {task} has continuous actions only.")
        make = getattr(import_suite("mpe"), MPE_TASKS[task])
        # Most classes take any name and drop what they don't know.
        known = inspect.signature(make).parameters.keys() - {"kwargs", "action_type"}
        unknown = options.keys() - known
        if unknown:
            raise ValueError(
                f"{task} has no option {', '.join(sorted(unknown))}; it has "
                f"{', '.join(sorted(known)) or 'none'}."
            )
        if not scripted_prey:
            options["action_type"] = action_type.title()
        env = make(**options)
        self._prey: list[str] = env.good_agents if scripted_prey else []
        agents = [agent for agent in env.agents if agent not in self._prey]
        views, _ = jax.eval_shape(env.reset, jax.random.key(0))  # some spaces are not what comes
        spaces = [env.action_space(agent) for agent in agents]
        self._continuous = action_type == "continuous"
        sizes = [space.shape[0] if self._continuous else space.n for space in spaces]
        self._action_mask = np.arange(max(sizes)) < np.array(sizes)[:, None]  # (N, A) or (N, D)
        action_spec: ActionSpec = (Continuous if self._continuous else Discrete)(max(sizes))
        # Of each agent, without padding.
        self.view_sizes = tuple(views[agent].size for agent in agents)
        self.action_sizes = tuple(sizes)
        super().__init__(env, (max(self.view_sizes),), action_spec, time_limit, agents)

    @property
    def teams(self) -> dict[str, tuple[int, ...]]:
        """The agents by what comes before the number in their JaxMARL names."""
        kinds = [str(agent).rpartition("_")[0] for agent in self._agents]
        return {
            kind: tuple(i for i, x in enumerate(kinds) if x == kind)
            for kind in dict.fromkeys(kinds)
        }

    def draw(self, states: Sequence[JaxMarlState]) -> Iterator[np.ndarray]:
        """Yields an image (height, width, 3), uint8, of each state."""
        radii, names = np.array(self._env.rad), [*self._env.agents, *self._env.landmarks]
        colors = np.array(self._env.colour, float) / 255.0

        def particles(state: JaxMarlState) -> Iterator[Disc]:
            for i, (x, y) in enumerate(np.array(state.env_state.p_pos)):
                yield Disc(float(x), float(y), float(radii[i]), colors[i], 0.8, names[i])

        return draw_discs(map(particles, states), (-2.0, 2.0, -2.0, 2.0))

    def _actions(self, action: jax.Array) -> dict[Any, jax.Array]:
        chosen = list(action)
        if self._continuous:  # JaxMARL's are in [0, 1]
            chosen = [(x[:size] + 1) / 2 for x, size in zip(action, self.action_sizes, strict=True)]
        idle = {agent: jnp.zeros(5) for agent in self._prey}
        return {**dict(zip(self._agents, chosen, strict=True)), **idle}

    def _observation(self, views: Any, env_state: Any) -> Observation:
        mask = jnp.asarray(self._action_mask)
        return super()._observation(views, env_state).replace(action_mask=mask)
