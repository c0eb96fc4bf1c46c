"""Continuous Tag: in a walled square taggers hunt runners, hundreds of agents or a thousand.

The game of WarpDrive (Lan et al. 2021, arXiv:2108.13976), by the rules of its CPU environment:
motion, views, rewards and ends are that environment's number for number. What differs: a reset
draws a new start, by default the first agents are the taggers, and directions are summed in
float32, so that one that is a whole turn but for rounding may be seen as 0 or as 1 of it.

Axis letters: N agents, G taggers, R runners, K neighbours seen, O observation features.
"""

import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax.struct import PyTreeNode

from mava.drawing import Disc, draw_discs
from mava.types import LAST, MID, MultiDiscrete, Observation, TimeStep, array_spec
from mava.wrappers.base import check_counts, check_fractions, check_switches, first_timestep

NUM_FEATURES = 7  # seen of another agent
WHOLE_TURN = 2 * math.pi


class TagContinuousState(PyTreeNode, kw_only=True):
    """Of all agents, at the end of a step."""

    x: jax.Array  # (N,), in [0, grid_length]
    y: jax.Array  # (N,)
    direction: jax.Array  # (N,): radians in [0, 2 pi)
    speed: jax.Array  # (N,), at least 0
    acceleration: jax.Array  # (N,): kept for the next step
    in_game: jax.Array  # (N,), bool: false for a runner that was caught and left
    num_catches: jax.Array  # (), int32: in this episode
    step_count: jax.Array  # (), int32


class TagContinuous:
    """G taggers and R runners move in a square with walls, all at once.

    An action is two choices: a change of the acceleration and a turn; 0 is none, the others are
    evenly spaced from the smallest to the largest. Agents pass through each other; a wall stops
    them, but changes neither speed nor direction.

    A runner closer than the tagging distance to its nearest tagger is caught: it loses, that tagger
    wins, once for each runner it catches. A caught runner leaves the game, or stays and can be
    caught again. Runners that are left after the last step get a bonus. The return is the mean over
    agents of their individual rewards.

    The episode ends when no runner is left and at the time limit. Both are terminations: surviving
    until then is what runners are paid for, and the clock is seen, so that nothing comes after.

    A view, in order: of each agent seen its x, then of each its y, its speed, acceleration and
    direction, all less the own ones, whether it is a tagger, whether it is in the game; last the
    share of the time limit that is over. Agents seen are the K nearest in the game, nearest first
    (O = 7 K + 1; zeros where there are fewer), or all others by id (O = 7 (N - 1) + 1). A runner
    that is caught is seen in the game until the step after. Who left sees zeros, but, where all
    are seen, who is a tagger and who in the game.

    The global state: x, y, the direction's cosine and sine, speed, acceleration and whether it is
    in the game, each of all agents, and the clock (7 N + 1).
    """

    def __init__(
        self,
        num_taggers: int = 5,
        num_runners: int = 20,
        time_limit: int = 100,
        grid_length: float = 10.0,
        num_other_agents_observed: int | None = 10,
        chunk_size: int | None = 128,
        max_speed: float = 1.0,
        skill_level_tagger: float = 1.0,
        skill_level_runner: float = 1.0,
        min_acceleration: float = -1.0,
        max_acceleration: float = 1.0,
        num_acceleration_levels: int = 10,
        min_turn: float = -math.pi / 2,
        max_turn: float = math.pi / 2,
        num_turn_levels: int = 10,
        tagging_distance: float = 0.02,
        tag_reward_for_tagger: float = 1.0,
        tag_penalty_for_runner: float = -1.0,
        step_penalty_for_tagger: float = 0.0,
        step_reward_for_runner: float = 0.0,
        edge_hit_penalty: float = 0.0,
        end_of_game_reward_for_runner: float = 1.0,
        runner_exits_game_after_tagged: bool = True,
        is_tagger: Sequence[bool] | None = None,
        start: Sequence[Sequence[float]] | None = None,
    ) -> None:
        """Args:
        num_taggers: G.
        num_runners: R.
        time_limit: steps after which an episode ends.
        grid_length: side of the square.
        num_other_agents_observed: K, at most N; None: all others are seen.
        chunk_size: observers whose neighbours are looked for at a time, a matter of memory: the
            distances of that many to all agents are held; None: half of all agents.
        max_speed: distance per step.
        skill_level_tagger: times which max_speed is a tagger's; views are divided by max_speed.
        skill_level_runner: the same of a runner.
        min_acceleration: smallest change of the acceleration in a step.
        max_acceleration: largest.
        num_acceleration_levels: actions from the one to the other.
        min_turn: smallest turn in a step, in radians.
        max_turn: largest.
        num_turn_levels: actions from the one to the other.
        tagging_distance: as a share of grid_length.
        tag_reward_for_tagger: for each catch, at least 0.
        tag_penalty_for_runner: when it is caught, at most 0.
        step_penalty_for_tagger: in every step, at most 0.
        step_reward_for_runner: in every step in the game, at least 0.
        edge_hit_penalty: for a step that a wall cut short, at most 0.
        end_of_game_reward_for_runner: in the game after the last step, at least 0.
        runner_exits_game_after_tagged: else it stays.
        is_tagger: of each agent (N,); None: agents 0 to G - 1.
        start: x, y and direction of each agent (3, N) after every reset; None: drawn evenly, the
            direction along an axis.
        """
        check_counts(
            num_taggers=num_taggers,
            num_runners=num_runners,
            time_limit=time_limit,
            num_acceleration_levels=num_acceleration_levels,
            num_turn_levels=num_turn_levels,
            chunk_size=1 if chunk_size is None else chunk_size,
        )
        check_fractions(tagging_distance=tagging_distance)
        check_switches(runner_exits_game_after_tagged=runner_exits_game_after_tagged)
        for name, value in (
            ("tag_reward_for_tagger", tag_reward_for_tagger),
            ("step_reward_for_runner", step_reward_for_runner),
            ("end_of_game_reward_for_runner", end_of_game_reward_for_runner),
        ):
            if not value >= 0:
                raise ValueError(f"{name}={value} must be at least 0.")
        for name, value in (
            ("tag_penalty_for_runner", tag_penalty_for_runner),
            ("step_penalty_for_tagger", step_penalty_for_tagger),
            ("edge_hit_penalty", edge_hit_penalty),
        ):
            if not value <= 0:
                raise ValueError(f"{name}={value} must be at most 0.")
        for name, value in (
            ("grid_length", grid_length),
            ("max_speed", max_speed),
            ("skill_level_tagger", skill_level_tagger),
            ("skill_level_runner", skill_level_runner),
        ):
            if not value > 0:
                raise ValueError(f"{name}={value} must be above 0.")
        self.num_agents = num_agents = num_taggers + num_runners
        if num_other_agents_observed is not None:
            check_counts(num_other_agents_observed=num_other_agents_observed)
            if num_other_agents_observed > num_agents:
                raise ValueError(
                    f"num_other_agents_observed={num_other_agents_observed} must be at most the "
                    f"number of agents, {num_agents}."
                )
        if is_tagger is None:
            is_tagger = [agent < num_taggers for agent in range(num_agents)]
        roles = np.array(is_tagger, bool)
        if roles.shape != (num_agents,) or roles.sum() != num_taggers:
            raise ValueError(
                f"is_tagger={is_tagger} must have {num_agents} entries, {num_taggers} of them true."
            )
        self._start = None if start is None else np.array(start, np.float32)
        if self._start is not None and self._start.shape != (3, num_agents):
            raise ValueError(f"start is {self._start.shape} and must be (3, {num_agents}).")

        self.num_taggers = num_taggers
        self.num_runners = num_runners
        self.time_limit = time_limit
        self.grid_length = grid_length
        self.action_spec = MultiDiscrete((num_acceleration_levels + 1, num_turn_levels + 1))
        self._is_tagger = roles
        self._taggers, self._runners = np.flatnonzero(roles), np.flatnonzero(~roles)
        self.teams = {
            "taggers": tuple(self._taggers.tolist()),
            "runners": tuple(self._runners.tolist()),
        }
        self._num_observed = num_other_agents_observed
        self._chunk_size = chunk_size
        self._speed_unit = max_speed + 1e-10
        self._speed_limits = np.float32(
            max_speed * np.where(roles, skill_level_tagger, skill_level_runner)
        )
        self._acceleration_changes = choices(
            min_acceleration, max_acceleration, num_acceleration_levels
        )
        self._turns = choices(min_turn, max_turn, num_turn_levels)
        self._tagging_radius = tagging_distance * grid_length
        self._step_rewards = np.float32(
            np.where(roles, step_penalty_for_tagger, step_reward_for_runner)
        )
        self._catch_reward, self._catch_penalty = tag_reward_for_tagger, tag_penalty_for_runner
        self._edge_penalty = edge_hit_penalty
        self._bonus = end_of_game_reward_for_runner
        self._caught_exit = runner_exits_game_after_tagged

    @property
    def observation_spec(self) -> Observation:
        num_agents = self.num_agents
        num_seen = num_agents - 1 if self._num_observed is None else self._num_observed
        return Observation(
            agents_view=array_spec((num_agents, NUM_FEATURES * num_seen + 1), jnp.float32),
            action_mask=array_spec((num_agents, sum(self.action_spec.num_actions)), bool),
            agent_mask=array_spec((num_agents,), bool),
            step_count=array_spec((), jnp.int32),
            global_state=array_spec((7 * num_agents + 1,), jnp.float32),
        )

    def reset(self, key: jax.Array) -> tuple[TagContinuousState, TimeStep]:
        if self._start is None:
            places_key, directions_key = jax.random.split(key)
            x, y = self.grid_length * jax.random.uniform(places_key, (2, self.num_agents))
            quarters = jax.random.randint(directions_key, (self.num_agents,), 0, 4)
            direction = WHOLE_TURN / 4 * quarters
        else:
            x, y, direction = jnp.array(self._start)
        state = TagContinuousState(
            x=x,
            y=y,
            direction=direction,
            speed=jnp.zeros(self.num_agents),
            acceleration=jnp.zeros(self.num_agents),
            in_game=jnp.ones(self.num_agents, bool),
            num_catches=jnp.int32(0),
            step_count=jnp.int32(0),
        )
        return state, first_timestep(self._observation(state, state.in_game), self._extras(state))

    def step(
        self, state: TagContinuousState, action: jax.Array
    ) -> tuple[TagContinuousState, TimeStep]:
        was_in_game = state.in_game
        state, hit_wall = self._move(state, action)
        caught, catches = self._catch(state)
        if self._caught_exit:
            state = state.replace(in_game=was_in_game & ~caught)
        state = state.replace(num_catches=state.num_catches + jnp.sum(caught, dtype=jnp.int32))
        reward = was_in_game * (self._step_rewards + self._edge_penalty * hit_wall)
        reward += self._catch_reward * catches + self._catch_penalty * caught
        out_of_time = state.step_count >= self.time_limit
        reward += out_of_time * self._bonus * (state.in_game & ~self._is_tagger)
        last = out_of_time | (self._num_left(state) == 0)
        return state, TimeStep(
            step_type=jnp.where(last, LAST, MID).astype(jnp.int8),
            reward=reward,
            discount=jnp.broadcast_to(1.0 - last, (self.num_agents,)),
            observation=self._observation(state, was_in_game),
            extras=self._extras(state),
        )

    def draw(self, states: Sequence[TagContinuousState]) -> Iterator[np.ndarray]:
        """Yields an image (height, width, 3), uint8, of each state: runners blue, those that left
        faint, taggers red with the circle in which they catch, a white dot where each is headed.
        """
        size = self.grid_length / max(50.0, 4 * self.num_agents**0.5)

        def discs(state: TagContinuousState) -> Iterator[Disc]:
            x, y, direction = np.array([state.x, state.y, state.direction], float)
            for agent in (*self._runners, *self._taggers):
                color = "red" if self._is_tagger[agent] else "C0"
                if not state.in_game[agent]:
                    yield Disc(x[agent], y[agent], size, "grey", 0.3, "")
                    continue
                if self._is_tagger[agent]:
                    yield Disc(x[agent], y[agent], self._tagging_radius, color, 0.25, "")
                yield Disc(x[agent], y[agent], size, color, 0.9, "")
                ahead_x, ahead_y = 0.6 * size * np.array([np.cos(direction), np.sin(direction)])
                center = x[agent] + ahead_x[agent], y[agent] + ahead_y[agent]
                yield Disc(*center, size / 3, "white", 0.9, "")

        margin = 0.03 * self.grid_length
        limits = (-margin, self.grid_length + margin) * 2
        return draw_discs(map(discs, states), limits)

    def _extras(self, state: TagContinuousState) -> dict[str, dict[str, jax.Array]]:
        return {
            "env_metrics": {
                "runners_caught": state.num_catches.astype(jnp.float32),
                "runners_left_percent": 100.0 * self._num_left(state) / self.num_runners,
            }
        }

    def _num_left(self, state: TagContinuousState) -> jax.Array:
        """Returns the number of runners in the game, int32."""
        return jnp.sum(state.in_game & ~self._is_tagger, dtype=jnp.int32)

    def _move(
        self, state: TagContinuousState, action: jax.Array
    ) -> tuple[TagContinuousState, jax.Array]:
        """Returns the state after all moved, and who hit a wall (N,), bool."""
        acceleration = state.acceleration + jnp.array(self._acceleration_changes)[action[:, 0]]
        direction = state.direction + jnp.array(self._turns)[action[:, 1]]
        direction = jnp.mod(direction, WHOLE_TURN) * state.in_game
        speed = jnp.clip(state.speed + acceleration, 0.0, self._speed_limits) * state.in_game
        # Who stands or is as fast as can be starts to accelerate from 0.
        is_free = (speed > 0.0) & (speed < self._speed_limits)
        x = state.x + speed * jnp.cos(direction)
        y = state.y + speed * jnp.sin(direction)
        inside_x, inside_y = (jnp.clip(z, 0.0, self.grid_length) for z in (x, y))
        state = state.replace(
            x=inside_x,
            y=inside_y,
            direction=direction,
            speed=speed,
            acceleration=jnp.where(is_free, acceleration, 0.0),
            step_count=state.step_count + 1,
        )
        return state, (x != inside_x) | (y != inside_y)

    def _catch(self, state: TagContinuousState) -> tuple[jax.Array, jax.Array]:
        """Returns which agents are caught, (N,), bool, and how many each catches, (N,), int32."""
        x, y, taggers, runners = state.x, state.y, self._taggers, self._runners
        squares = (x[runners, None] - x[taggers]) ** 2 + (y[runners, None] - y[taggers]) ** 2
        nearest = jnp.argmin(squares, axis=1)  # (R,): of equal ones the first
        is_near = jnp.sqrt(jnp.min(squares, axis=1)) < self._tagging_radius
        caught = state.in_game[runners] & is_near
        by_tagger = caught[:, None] & (nearest[:, None] == np.arange(self.num_taggers))  # (R, G)
        catches = jnp.sum(by_tagger, axis=0, dtype=jnp.int32)
        return (
            jnp.zeros(self.num_agents, bool).at[runners].set(caught),
            jnp.zeros(self.num_agents, jnp.int32).at[taggers].set(catches),
        )

    def _observation(self, state: TagContinuousState, was_in_game: jax.Array) -> Observation:
        """Returns what is seen; was_in_game (N,), bool, is from before this step's catches."""
        clock = state.step_count / self.time_limit
        everything = [
            state.x / self.grid_length,
            state.y / self.grid_length,
            jnp.cos(state.direction),
            jnp.sin(state.direction),
            state.speed / self._speed_unit,
            state.acceleration / self._speed_unit,
            state.in_game,
            clock[None],
        ]
        num_choices = sum(self.action_spec.num_actions)
        return Observation(
            agents_view=self._views(state, was_in_game, clock),
            action_mask=jnp.ones((self.num_agents, num_choices), bool),
            agent_mask=state.in_game,
            step_count=state.step_count,
            global_state=jnp.concatenate(everything),
        )

    def _views(
        self, state: TagContinuousState, was_in_game: jax.Array, clock: jax.Array
    ) -> jax.Array:
        """Returns what each agent sees (N, O)."""
        parts = (state.x, state.y, state.speed, state.acceleration, state.direction)
        length, speed_unit = math.sqrt(2) * self.grid_length, self._speed_unit
        units = jnp.array([length, length, speed_unit, speed_unit, WHOLE_TURN])
        # In a loop, since XLA computes once what a loop reads and makes: else it would compute
        # everything anew for every two agents, sines and all.
        features = jax.lax.map(lambda x: x[0] / x[1], (jnp.stack(parts), units))
        flags = jnp.stack([jnp.array(self._is_tagger), was_in_game]).astype(jnp.float32)
        if self._num_observed is None:
            others = [others_of(x) for x in (*features, *flags)]
            is_shown, is_known = was_in_game[:, None], jnp.bool_(True)
        else:
            ids, is_there = self._nearest(state.x, state.y, was_in_game, self._num_observed)
            others = [x[ids] for x in (*features, *flags)]
            is_shown = is_known = is_there & was_in_game[:, None]
        # One block (N, seen) for each feature: as one array they would be transposed, slowly.
        pairs = zip(others, features, strict=False)
        blocks = [jnp.where(is_shown, other - own[:, None], 0.0) for other, own in pairs]
        blocks += [jnp.where(is_known, other, 0.0) for other in others[len(features) :]]
        return jnp.concatenate([*blocks, (clock * was_in_game)[:, None]], axis=-1)

    def _nearest(
        self, x: jax.Array, y: jax.Array, in_game: jax.Array, count: int
    ) -> tuple[jax.Array, jax.Array]:
        """Returns for each agent the `count` nearest others in the game, nearest first, of equally
        near ones those with lower ids: ids (N, K), int32, and which of them exist (N, K), bool.
        """
        agents = jnp.arange(self.num_agents)

        def of_one(observer: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            agent, own_x, own_y = observer
            squares = (own_x - x) ** 2 + (own_y - y) ** 2
            nearness = jnp.where(in_game & (agents != agent), -squares, -jnp.inf)
            nearness, ids = jax.lax.top_k(nearness, count)
            return ids, nearness > -jnp.inf

        # Even chunks, and at least two, for a loop, as above.
        num_chunks = max(2, -(-self.num_agents // (self._chunk_size or self.num_agents)))
        return jax.lax.map(of_one, (agents, x, y), batch_size=self.num_agents // num_chunks)


def others_of(feature: jax.Array) -> jax.Array:
    """Returns a feature (N,) as each agent sees it of the others, by id: (N, N - 1)."""
    agents = np.arange(len(feature))
    is_after = agents[:-1] >= agents[:, None]  # from the own place on it is the next one's
    return jnp.where(is_after, feature[1:], feature[:-1])


def choices(smallest: float, largest: float, num_levels: int) -> np.ndarray:
    """Returns what each action changes, (1 + num_levels,): the first nothing."""
    return np.append(0.0, np.linspace(smallest, largest, num_levels)).astype(np.float32)
