"""Jumanji's multi-agent environments (Bonnet et al. 2024, arXiv:2306.09884)."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jumanji.environments.routing.cleaner import Cleaner
from jumanji.environments.routing.cleaner.constants import CLEAN, DIRTY, WALL
from jumanji.environments.routing.cleaner.generator import RandomGenerator as CleanerGenerator
from jumanji.environments.routing.connector import Connector
from jumanji.environments.routing.connector.constants import PATH, POSITION, TARGET
from jumanji.environments.routing.connector.generator import RandomWalkGenerator
from jumanji.environments.routing.connector.utils import connected_or_blocked
from jumanji.environments.routing.lbf import LevelBasedForaging
from jumanji.environments.routing.lbf.generator import RandomGenerator as ForagingGenerator
from jumanji.environments.routing.robot_warehouse import RobotWarehouse
from jumanji.environments.routing.robot_warehouse.generator import (
    RandomGenerator as WarehouseGenerator,
)
from jumanji.environments.routing.robot_warehouse.utils import is_collision
from jumanji.environments.swarms.search_and_rescue import SearchAndRescue
from jumanji.environments.swarms.search_and_rescue.generator import (
    RandomGenerator as SearchGenerator,
)

from mava.types import FIRST, LAST, MID, Continuous, Discrete, Observation, TimeStep
from mava.wrappers.base import (
    check_counts,
    check_switches,
    check_time_limit,
    first_timestep,
    view_spec,
)

FIGURE_SIZE = (5.0, 5.0)  # inches of 100 pixels; Jumanji's 10 take five times as long to draw


class RobotWarehouseEnv:
    """RobotWarehouse (RWARE): robots fetch requested shelves to the goal.

    Team reward: every agent gets +1 for each delivery, so the episode return is the number of
    deliveries. An episode ends when robots collide (termination) and is cut at the time limit
    (truncation). Jumanji calls both a termination; a collision is read from the grid instead.
    """

    def __init__(self, time_limit: int = 500, **generator: int) -> None:
        """Args:
        time_limit: steps after which an episode is cut.
        generator: column_height, shelf_rows, shelf_columns, num_agents, sensor_range,
            request_queue_size.
        """
        check_counts(time_limit=time_limit, **generator)
        self._env = RobotWarehouse(WarehouseGenerator(**generator), time_limit)
        self.num_agents: int = self._env.num_agents
        self.action_spec = Discrete(5)  # no-op, forward, left, right, toggle load
        self.time_limit = time_limit

    @property
    def observation_spec(self) -> Observation:
        num_features = int(self._env.num_obs_features)
        return view_spec(self, (num_features,))

    def reset(self, key: jax.Array) -> tuple[Any, TimeStep]:
        state, timestep = self._env.reset(key)
        return state, _first(timestep.observation, self.num_agents, {})

    def step(self, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        state, timestep = self._env.step(state, action)
        is_collision_of: Any = is_collision  # typed for one Python int
        agent_ids = jnp.arange(self.num_agents)
        collided = jax.vmap(is_collision_of, (None, 0, 0))(state.grid, state.agents, agent_ids)
        discount = jnp.where(jnp.any(collided), 0.0, 1.0)
        return state, TimeStep(
            step_type=jnp.where(timestep.last(), LAST, MID).astype(jnp.int8),
            reward=jnp.full(self.num_agents, timestep.reward, jnp.float32),
            discount=jnp.full(self.num_agents, discount, jnp.float32),
            observation=_observation(timestep.observation, self.num_agents),
            extras={},
        )

    def draw(self, states: Sequence[Any]) -> Iterator[np.ndarray]:
        """Yields an image (height, width, 3), uint8, of each state."""
        from jumanji.environments.routing.robot_warehouse.viewer import RobotWarehouseViewer

        env = self._env
        return draw_states(
            RobotWarehouseViewer(env.grid_size, env.goals, render_mode="rgb_array"), states
        )


class LevelBasedForagingEnv:
    """Level-based foraging (LBF): agents stand around food and load it together.

    Jumanji normalises rewards so that all food together is worth 1, shared among the agents that
    loaded it. With `team_reward` (default) every agent gets the sum over the agents: the episode
    return is the fraction of the food's total level eaten, at most 1. Without it every agent
    keeps its own share and the episode return, the mean over agents, is at most 1 / N.
    An episode ends when all food is eaten and is cut at the time limit.

    A view is a list of places and levels; with `grid_observation` the cells in sight, each with the
    level of an agent, the level of food, and whether it can be walked on.
    """

    def __init__(
        self,
        time_limit: int = 100,
        team_reward: bool = True,
        grid_observation: bool = False,
        **generator: Any,
    ) -> None:
        """Args:
        time_limit: steps after which an episode is cut.
        team_reward: give every agent the sum of all rewards instead of its own.
        grid_observation: show a grid around each agent instead of a list.
        generator: grid_size, fov, num_agents, num_food, max_agent_level, force_coop.
        """
        check_time_limit(time_limit)
        check_switches(team_reward=team_reward, grid_observation=grid_observation)
        self._env = LevelBasedForaging(
            ForagingGenerator(**generator),
            time_limit=time_limit,
            grid_observation=grid_observation,
        )
        self._team_reward = team_reward
        self._grid_observation = grid_observation
        self.num_agents = self._env.num_agents
        self.action_spec = Discrete(6)  # no-op, up, down, left, right, load
        self.time_limit = time_limit

    @property
    def observation_spec(self) -> Observation:
        side = 2 * self._env.fov + 1
        num_features = 3 * (self._env.num_food + self.num_agents)
        shape = (side, side, 3) if self._grid_observation else (num_features,)
        return view_spec(self, shape)

    def reset(self, key: jax.Array) -> tuple[Any, TimeStep]:
        state, timestep = self._env.reset(key)
        observation = self._observation(timestep.observation)
        return state, first_timestep(observation, self._extras(timestep))

    def step(self, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        state, timestep = self._env.step(state, action)
        reward = timestep.reward.astype(jnp.float32)
        if self._team_reward:
            reward = jnp.full(self.num_agents, jnp.sum(reward))
        return state, TimeStep(
            step_type=jnp.where(timestep.last(), LAST, MID).astype(jnp.int8),
            reward=reward,
            discount=timestep.discount.astype(jnp.float32),
            observation=self._observation(timestep.observation),
            extras=self._extras(timestep),
        )

    def draw(self, states: Sequence[Any]) -> Iterator[np.ndarray]:
        """Yields an image (height, width, 3), uint8, of each state."""
        from jumanji.environments.routing.lbf.viewer import LevelBasedForagingViewer

        viewer = LevelBasedForagingViewer(self._env.grid_size, render_mode="rgb_array")
        return draw_states(viewer, states)

    def _observation(self, observation: Any) -> Observation:
        if self._grid_observation:  # Jumanji's have the features first
            view = jnp.moveaxis(observation.agents_view, 1, -1)
            observation = observation._replace(agents_view=view)
        return _observation(observation, self.num_agents)

    @staticmethod
    def _extras(timestep: Any) -> dict[str, Any]:
        percent_eaten = jnp.asarray(timestep.extras["percent_eaten"], jnp.float32)
        return {"env_metrics": {"percent_eaten": percent_eaten}}


class ConnectorEnv:
    """Connector: every agent lays a path from its start to its target and must not cross another's.

    Individual reward: 1 for connecting, -0.03 for every step until then; the return is the mean
    over agents. An agent that is connected or has no way to go is out of the game. The episode ends
    when all are (termination, also when that coincides with the limit) and is cut at the time
    limit. It is won if all are connected.

    A view is a grid of five features: own end, own target, the others' ends, the others' targets,
    and paths of whomever.
    """

    def __init__(self, time_limit: int = 50, **generator: int) -> None:
        """Args:
        time_limit: steps after which an episode is cut.
        generator: grid_size, num_agents.
        """
        check_counts(time_limit=time_limit, **generator)
        self._env = Connector(RandomWalkGenerator(**generator), time_limit=time_limit)
        self.num_agents: int = self._env.num_agents
        self.action_spec = Discrete(5)  # no-op, up, right, down, left
        self.time_limit = time_limit

    @property
    def observation_spec(self) -> Observation:
        size = self._env.grid_size
        return view_spec(self, (size, size, 5))

    def reset(self, key: jax.Array) -> tuple[Any, TimeStep]:
        state, timestep = self._env.reset(key)
        return state, self._timestep(state, timestep, jnp.int8(FIRST), jnp.bool_(False))

    def step(self, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        state, timestep = self._env.step(state, action)
        terminated = ~jnp.any(self._in_game(state))
        step_type = jnp.where(timestep.last(), LAST, MID).astype(jnp.int8)
        return state, self._timestep(state, timestep, step_type, terminated)

    def draw(self, states: Sequence[Any]) -> Iterator[np.ndarray]:
        """Yields an image (height, width, 3), uint8, of each state."""
        from jumanji.environments.routing.connector.viewer import ConnectorViewer

        viewer = ConnectorViewer("Connector", self.num_agents, render_mode="rgb_array")
        return draw_states(viewer, [state.grid for state in states])

    def _in_game(self, state: Any) -> jax.Array:
        return ~jax.vmap(connected_or_blocked)(state.agents, state.action_mask)  # (N,)

    def _timestep(
        self, state: Any, timestep: Any, step_type: jax.Array, terminated: jax.Array
    ) -> TimeStep:
        owner, kind = (state.grid - 1) // 3, jnp.where(state.grid > 0, (state.grid - 1) % 3 + 1, 0)
        own = owner == jnp.arange(self.num_agents)[:, None, None]  # (N, rows, columns)
        channels = [
            own & (kind == POSITION),
            own & (kind == TARGET),
            ~own & (kind == POSITION),
            ~own & (kind == TARGET),
            jnp.broadcast_to(kind == PATH, own.shape),
        ]
        views = jnp.stack(channels, axis=-1)
        connected = timestep.extras["ratio_connections"]
        return TimeStep(
            step_type=step_type,
            reward=jnp.broadcast_to(timestep.reward, self.num_agents).astype(jnp.float32),
            discount=jnp.full(self.num_agents, 1.0 - terminated, jnp.float32),
            observation=Observation(
                agents_view=views.astype(jnp.float32),
                action_mask=state.action_mask,
                agent_mask=self._in_game(state),
                step_count=jnp.asarray(state.step_count, jnp.int32),
            ),
            extras={
                "won_episode": jnp.all(state.agents.connected),
                "env_metrics": {"ratio_connected": jnp.asarray(connected, jnp.float32)},
            },
        )


class CleanerEnv:
    """Cleaner: agents walk through a maze and clean every tile that they step on.

    Team reward: the tiles cleaned in a step, less a penalty; the return is that of the team. The
    episode ends when no tile is dirty (termination, also when that coincides with the limit), and
    it is won then; it is cut at the time limit, which Jumanji calls a termination.

    A view is a grid of five features: dirty, clean, wall, own place, the others' places.
    """

    def __init__(
        self, time_limit: int = 100, penalty_per_timestep: float = 0.5, **generator: int
    ) -> None:
        """Args:
        time_limit: steps after which an episode is cut.
        penalty_per_timestep: taken from the reward of every step.
        generator: num_rows, num_cols, num_agents.
        """
        check_counts(time_limit=time_limit, **generator)
        self._env = Cleaner(CleanerGenerator(**generator), time_limit, penalty_per_timestep)
        self.num_agents: int = self._env.num_agents
        self.action_spec = Discrete(4)  # up, right, down, left
        self.time_limit = time_limit

    @property
    def observation_spec(self) -> Observation:
        shape = (self._env.num_rows, self._env.num_cols, 5)
        return view_spec(self, shape)

    def reset(self, key: jax.Array) -> tuple[Any, TimeStep]:
        state, _ = self._env.reset(key)
        return state, self._timestep(state, jnp.int8(FIRST), jnp.float32(0.0), jnp.bool_(False))

    def step(self, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        state, timestep = self._env.step(state, action)
        is_clean = ~jnp.any(state.grid == DIRTY)
        last = is_clean | (state.step_count >= self.time_limit)
        step_type = jnp.where(last, LAST, MID).astype(jnp.int8)
        return state, self._timestep(state, step_type, timestep.reward, is_clean)

    def draw(self, states: Sequence[Any]) -> Iterator[np.ndarray]:
        """Yields an image (height, width, 3), uint8, of each state."""
        from jumanji.environments.routing.cleaner.viewer import CleanerViewer

        return draw_states(CleanerViewer("Cleaner", render_mode="rgb_array"), states)

    def _timestep(
        self, state: Any, step_type: jax.Array, reward: jax.Array, is_clean: jax.Array
    ) -> TimeStep:
        rows, columns = state.agents_locations.T
        places = jnp.zeros((self.num_agents, *state.grid.shape))
        places = places.at[jnp.arange(self.num_agents), rows, columns].set(1.0)
        others = jnp.minimum(jnp.sum(places, axis=0) - places, 1.0)
        kinds = [
            jnp.broadcast_to(state.grid == kind, places.shape) for kind in (DIRTY, CLEAN, WALL)
        ]
        views = jnp.stack([*kinds, places, others], axis=-1)
        walkable = jnp.sum(state.grid != WALL, dtype=jnp.float32)
        return TimeStep(
            step_type=step_type,
            reward=jnp.full(self.num_agents, reward, jnp.float32),
            discount=jnp.full(self.num_agents, 1.0 - is_clean, jnp.float32),
            observation=Observation(
                agents_view=views.astype(jnp.float32),
                action_mask=state.action_mask,
                agent_mask=jnp.ones(self.num_agents, bool),
                step_count=jnp.asarray(state.step_count, jnp.int32),
            ),
            extras={
                "won_episode": is_clean,
                "env_metrics": {"ratio_cleaned": jnp.sum(state.grid == CLEAN) / walkable},
            },
        )


class SearchAndRescueEnv:
    """SearchAndRescue: searchers fly over a torus and find targets that drift.

    Individual reward: for every target found first, shared among those that find it at once, and
    less the later it is: from 1 at the start to 0 at the time limit. The return is the mean over
    agents. The episode ends when all targets are found (termination, also when that coincides with
    the limit), and is won then; it is cut at the time limit, which Jumanji calls a termination.

    Actions are turning and accelerating. A view is what the searcher sees along its rays, its own
    place, and the fraction of targets that are left.
    """

    def __init__(self, time_limit: int = 400, **generator: int) -> None:
        """Args:
        time_limit: steps after which an episode is cut.
        generator: num_searchers, num_targets.
        """
        check_counts(time_limit=time_limit, **generator)
        self._env = SearchAndRescue(time_limit=time_limit, generator=SearchGenerator(**generator))
        self.num_agents: int = self._env.num_agents
        self.action_spec = Continuous(2)
        self.time_limit = time_limit

    @property
    def observation_spec(self) -> Observation:
        spec: Any = self._env.observation_spec
        _, num_channels, num_rays = spec.searcher_views.shape
        num_features = num_channels * num_rays + 3
        return view_spec(self, (num_features,))

    def reset(self, key: jax.Array) -> tuple[Any, TimeStep]:
        state, timestep = self._env.reset(key)
        return state, self._timestep(state, timestep, jnp.int8(FIRST), jnp.bool_(False))

    def step(self, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        state, timestep = self._env.step(state, action)
        all_found = jnp.all(state.targets.found)
        step_type = jnp.where(timestep.last(), LAST, MID).astype(jnp.int8)
        return state, self._timestep(state, timestep, step_type, all_found)

    def draw(self, states: Sequence[Any]) -> Iterator[np.ndarray]:
        """Yields an image (height, width, 3), uint8, of each state."""
        from jumanji.environments.swarms.search_and_rescue.viewer import SearchAndRescueViewer

        return draw_states(SearchAndRescueViewer(render_mode="rgb_array"), states)

    def _timestep(
        self, state: Any, timestep: Any, step_type: jax.Array, all_found: jax.Array
    ) -> TimeStep:
        seen = timestep.observation
        left = jnp.full((self.num_agents, 1), seen.targets_remaining)
        rays = seen.searcher_views.reshape(self.num_agents, -1)
        views = jnp.concatenate([rays, seen.positions, left], axis=-1)
        found = jnp.mean(state.targets.found, dtype=jnp.float32)
        return TimeStep(
            step_type=step_type,
            reward=jnp.broadcast_to(timestep.reward, self.num_agents).astype(jnp.float32),
            discount=jnp.full(self.num_agents, 1.0 - all_found, jnp.float32),
            observation=Observation(
                agents_view=views.astype(jnp.float32),
                action_mask=jnp.ones((self.num_agents, 2), bool),
                agent_mask=jnp.ones(self.num_agents, bool),
                step_count=jnp.asarray(state.step, jnp.int32),
            ),
            extras={"won_episode": all_found, "env_metrics": {"ratio_found": found}},
        )


def _observation(observation: Any, num_agents: int) -> Observation:
    """Returns our Observation from one of Jumanji's with agents_view, action_mask, step_count."""
    return Observation(
        agents_view=observation.agents_view.astype(jnp.float32),
        action_mask=observation.action_mask,
        agent_mask=jnp.ones(num_agents, bool),
        step_count=jnp.asarray(observation.step_count, jnp.int32),
    )


def draw_states(viewer: Any, states: Sequence[Any]) -> Iterator[np.ndarray]:
    """Yields what one of Jumanji's viewers shows."""
    viewer.figure_size = FIGURE_SIZE
    try:
        for _ in range(2):  # until matplotlib's layout has settled
            viewer.render(states[0])
        for state in states:
            yield np.array(viewer.render(state)[..., :3])
    finally:
        viewer.close()


def _first(observation: Any, num_agents: int, extras: dict[str, Any]) -> TimeStep:
    return first_timestep(_observation(observation, num_agents), extras)
