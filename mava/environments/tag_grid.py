"""Tag on a grid: taggers hunt one runner.

The game of WarpDrive (Lan et al. 2021, arXiv:2108.13976), by the rules of its CPU environment:
moves, views, rewards and ends are that environment's number for number. What differs: a reset
draws the taggers' start, evenly from the cells off the edge.

Axis letters: N agents, G taggers, O observation features.
"""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax.struct import PyTreeNode

from mava.drawing import Disc, draw_discs
from mava.types import LAST, MID, Discrete, Observation, TimeStep, array_spec
from mava.wrappers.base import check_counts, check_switches, first_timestep, view_spec

NUM_MOVES = 5  # stay, x + 1, x - 1, y + 1, y - 1


class TagGridState(PyTreeNode, kw_only=True):
    x: jax.Array  # (N,), int32, 0 to grid_length
    y: jax.Array  # (N,), int32
    step_count: jax.Array  # (), int32


class TagGrid:
    """G taggers, agents 0 to G - 1, and a runner, agent G, on (grid_length + 1)^2 cells.

    All move at once; any number can be in a cell. When after the moves a tagger is in the runner's
    cell (changing places is not enough), all taggers are paid and the runner loses. In other
    steps a tagger pays a little, which the runner gets. A move into a wall costs. The return is the
    mean over agents of their individual rewards.

    The catch ends the episode, and so does the time limit. Both are terminations: the clock is
    seen, and with it that nothing comes after.

    A full view (O = 4 N + 1), in order: x of all agents, y of all, whether each is the runner,
    which is the own one, one-hot, and the share of the time limit that is over. A partial view
    (O = 6): own x and y, x and y of the runner (the runner's: of the nearest tagger), whether it
    is the runner itself, the clock. The global state: x of all, y of all, the clock (2 N + 1).
    """

    def __init__(
        self,
        num_taggers: int = 4,
        grid_length: int = 10,
        time_limit: int = 100,
        full_observation: bool = True,
        wall_hit_penalty: float = 0.1,
        tag_reward_for_tagger: float = 10.0,
        tag_penalty_for_runner: float = 2.0,
        step_cost_for_tagger: float = 0.01,
        start: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Args:
        num_taggers: G.
        grid_length: the largest coordinate, at least 2.
        time_limit: steps after which an episode ends.
        full_observation: all agents are seen; else a tagger sees the runner, and that the nearest
            tagger.
        wall_hit_penalty: for a move into a wall, at least 0.
        tag_reward_for_tagger: of every tagger, for the catch, at least 0.
        tag_penalty_for_runner: when it is caught, at least 0.
        step_cost_for_tagger: in every other step, at least 0; the runner gets as much.
        start: x and y of each agent (2, N) after every reset; None: taggers anywhere off the edge,
            the runner at (0, 0). WarpDrive's own: all taggers at half of grid_length.
        """
        check_counts(num_taggers=num_taggers, grid_length=grid_length, time_limit=time_limit)
        check_switches(full_observation=full_observation)
        if grid_length < 2:
            raise ValueError(f"grid_length={grid_length} must be at least 2.")
        for name, value in (
            ("wall_hit_penalty", wall_hit_penalty),
            ("tag_reward_for_tagger", tag_reward_for_tagger),
            ("tag_penalty_for_runner", tag_penalty_for_runner),
            ("step_cost_for_tagger", step_cost_for_tagger),
        ):
            if not value >= 0:
                raise ValueError(f"{name}={value} must be at least 0.")
        self.num_taggers = num_taggers
        self.num_agents = num_taggers + 1
        self.grid_length = grid_length
        self.time_limit = time_limit
        self.action_spec = Discrete(NUM_MOVES)
        self.teams = {"taggers": tuple(range(num_taggers)), "runners": (num_taggers,)}
        self._full_observation = full_observation
        self._start = None if start is None else np.array(start, np.int32)
        if self._start is not None and self._start.shape != (2, self.num_agents):
            raise ValueError(f"start is {self._start.shape} and must be (2, {self.num_agents}).")
        self._wall_hit_penalty = wall_hit_penalty
        self._is_runner = np.arange(self.num_agents) == num_taggers
        self._catch_rewards = np.float32(
            np.where(self._is_runner, -tag_penalty_for_runner, tag_reward_for_tagger)
        )
        self._step_rewards = np.float32(step_cost_for_tagger * np.where(self._is_runner, 1, -1))

    @property
    def observation_spec(self) -> Observation:
        num_features = 4 * self.num_agents + 1 if self._full_observation else 6
        global_state = array_spec((2 * self.num_agents + 1,), jnp.float32)
        return view_spec(self, (num_features,)).replace(global_state=global_state)

    def reset(self, key: jax.Array) -> tuple[TagGridState, TimeStep]:
        if self._start is None:
            places = jax.random.randint(key, (2, self.num_taggers), 1, self.grid_length)
            x, y = jnp.pad(places, ((0, 0), (0, 1)))
        else:
            x, y = jnp.array(self._start)
        state = TagGridState(x=x, y=y, step_count=jnp.int32(0))
        return state, first_timestep(self._observation(state), extras_of(jnp.bool_(False)))

    def step(self, state: TagGridState, action: jax.Array) -> tuple[TagGridState, TimeStep]:
        x = state.x + (action == 1) - (action == 2)
        y = state.y + (action == 3) - (action == 4)
        inside_x, inside_y = (jnp.clip(z, 0, self.grid_length) for z in (x, y))
        hit_wall = (x != inside_x) | (y != inside_y)
        state = state.replace(x=inside_x, y=inside_y, step_count=state.step_count + 1)
        caught = jnp.any((state.x[:-1] == state.x[-1]) & (state.y[:-1] == state.y[-1]))
        reward = jnp.where(caught, self._catch_rewards, self._step_rewards)
        last = caught | (state.step_count >= self.time_limit)
        return state, TimeStep(
            step_type=jnp.where(last, LAST, MID).astype(jnp.int8),
            reward=reward - self._wall_hit_penalty * hit_wall,
            discount=jnp.broadcast_to(1.0 - last, (self.num_agents,)),
            observation=self._observation(state),
            extras=extras_of(caught),
        )

    def draw(self, states: Sequence[TagGridState]) -> Iterator[np.ndarray]:
        """Yields an image (height, width, 3), uint8, of each state: taggers red, the runner
        blue.
        """
        size = max(0.4, self.grid_length / 60)

        def discs(state: TagGridState) -> Iterator[Disc]:
            x, y = np.array(state.x, float), np.array(state.y, float)
            yield Disc(x[-1], y[-1], size, "C0", 0.9, "runner")
            for agent in range(self.num_taggers):
                yield Disc(x[agent], y[agent], size, "red", 0.5, "")

        margin = 0.5 + size
        limits = (-margin, self.grid_length + margin) * 2
        return draw_discs(map(discs, states), limits)

    def _observation(self, state: TagGridState) -> Observation:
        x, y = state.x / self.grid_length, state.y / self.grid_length
        clock = (state.step_count / self.time_limit)[None]
        is_runner = jnp.array(self._is_runner, jnp.float32)
        if self._full_observation:
            common = jnp.concatenate([x, y, is_runner])
            parts: list[jax.Array] = [
                jnp.broadcast_to(common, (self.num_agents, 3 * self.num_agents)),
                jnp.eye(self.num_agents),
            ]
        else:
            squares = (state.x[:-1] - state.x[-1]) ** 2 + (state.y[:-1] - state.y[-1]) ** 2
            target = jnp.where(self._is_runner, jnp.argmin(squares), self.num_taggers)
            parts = [jnp.stack([x, y, x[target], y[target], is_runner], axis=-1)]
        clocks = jnp.broadcast_to(clock, (self.num_agents, 1))
        return Observation(
            agents_view=jnp.concatenate([*parts, clocks], axis=-1),
            action_mask=jnp.ones((self.num_agents, NUM_MOVES), bool),
            agent_mask=jnp.ones(self.num_agents, bool),
            step_count=state.step_count,
            global_state=jnp.concatenate([x, y, clock]),
        )


def extras_of(caught: jax.Array) -> dict[str, dict[str, jax.Array]]:
    return {"env_metrics": {"runners_caught": caught.astype(jnp.float32)}}
