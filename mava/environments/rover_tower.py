"""Rover-Tower: rovers that can't see are guided by towers that can't move.

The world of Iqbal & Sha 2019, "Actor-Attention-Critic for Multi-Agent Reinforcement Learning",
arXiv:1810.02912, section 4.1, with the constants of its code: reset, motion, observations and
rewards are that code's number for number (which tests the squared distance to a goal where a
distance seems to be meant). What differs: an episode that is cut says so, the shorter views of
the towers are padded with zeros, and the number of landmarks can be set.

Axis letters: N agents, P pairs, L landmarks, O observation features.
"""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax.struct import PyTreeNode

from mava.drawing import Disc, draw_discs
from mava.environments.particles import NUM_MOVES, advance, push
from mava.types import LAST, MID, Discrete, Observation, TimeStep
from mava.wrappers.base import check_counts, first_timestep, view_spec

AGENT_RADIUS, LANDMARK_RADIUS = 0.075, 0.04
NUM_SYMBOLS = NUM_MOVES  # a tower has as many things to say as a rover has moves
# A rover is at its goal if the square of its distance is below this.
GOAL_ZONE = 1.5 * (AGENT_RADIUS + LANDMARK_RADIUS)
GOAL_REWARD = 10.0


class RoverTowerState(PyTreeNode, kw_only=True):
    """Rover i is agent i, tower k is agent P + k."""

    rover_positions: jax.Array  # (P, 2)
    rover_velocities: jax.Array  # (P, 2)
    tower_positions: jax.Array  # (P, 2): for the picture; nothing depends on them
    landmark_positions: jax.Array  # (L, 2)
    tower_of: jax.Array  # (P,), int32: each rover's tower
    rover_of: jax.Array  # (P,), int32: each tower's rover, the inverse of tower_of
    goal_of: jax.Array  # (P,), int32: each tower's landmark; two towers may have the same
    message: jax.Array  # (P,), int32: what each tower said last; -1 before its first
    step_count: jax.Array  # (), int32


class RoverTower:
    """P rovers, agents 0 to P - 1, and P towers, each the guide of one rover to its goal.

    Pairs, goals and places are random and stay for the episode. A rover moves; a tower says one of
    5 symbols, which its rover hears in the same step. Nothing collides. Individual reward, the
    same for both of a pair: minus the squared distance of rover and goal, plus 10 at the goal. The
    return is the mean over agents. Nothing ends an episode but the time limit, a truncation.

    A rover's view (O = P + 9), in order:
        which tower is its own, one-hot (P); what that said last, one-hot, zeros after a reset (5);
        own position (2); own velocity (2).
    A tower's view (P + 4), then 5 zeros:
        which rover is its own, one-hot (P); that one's position (2); the goal's position (2).
    All have 5 actions: a rover stays, goes right, left, up or down.
    """

    def __init__(self, num_pairs: int = 4, num_landmarks: int = 6, time_limit: int = 25) -> None:
        """Args:
        num_pairs: of a rover and a tower; half of the number of agents.
        num_landmarks: of which the goals are drawn.
        time_limit: steps after which an episode is cut.
        """
        check_counts(num_pairs=num_pairs, num_landmarks=num_landmarks, time_limit=time_limit)
        self.num_pairs = num_pairs
        self.num_landmarks = num_landmarks
        self.num_agents = 2 * num_pairs
        self.action_spec = Discrete(NUM_MOVES)
        self.time_limit = time_limit
        self.teams = {
            "rovers": tuple(range(num_pairs)),
            "towers": tuple(range(num_pairs, self.num_agents)),
        }
        # Features of each agent's view; what follows is padding.
        self.view_sizes = (num_pairs + 9,) * num_pairs + (num_pairs + 4,) * num_pairs

    @property
    def observation_spec(self) -> Observation:
        return view_spec(self, (max(self.view_sizes),))

    def reset(self, key: jax.Array) -> tuple[RoverTowerState, TimeStep]:
        agents_key, landmarks_key, pairs_key, goals_key = jax.random.split(key, 4)
        places = jax.random.uniform(agents_key, (2, self.num_pairs, 2), minval=-1.0)
        tower_of = jax.random.permutation(pairs_key, self.num_pairs)
        state = RoverTowerState(
            rover_positions=places[0],
            rover_velocities=jnp.zeros((self.num_pairs, 2)),
            tower_positions=places[1],
            landmark_positions=jax.random.uniform(
                landmarks_key, (self.num_landmarks, 2), minval=-1.0
            ),
            tower_of=tower_of,
            rover_of=jnp.argsort(tower_of),
            goal_of=jax.random.randint(goals_key, (self.num_pairs,), 0, self.num_landmarks),
            message=jnp.full(self.num_pairs, -1),
            step_count=jnp.int32(0),
        )
        return state, first_timestep(self._observation(state), {})

    def step(self, state: RoverTowerState, action: jax.Array) -> tuple[RoverTowerState, TimeStep]:
        moves, symbols = action[: self.num_pairs], action[self.num_pairs :]
        positions, velocities = advance(state.rover_positions, state.rover_velocities, push(moves))
        state = state.replace(
            rover_positions=positions,
            rover_velocities=velocities,
            message=symbols,
            step_count=state.step_count + 1,
        )
        last = state.step_count >= self.time_limit
        return state, TimeStep(
            step_type=jnp.where(last, LAST, MID).astype(jnp.int8),
            reward=self._reward(state),
            discount=jnp.ones(self.num_agents),
            observation=self._observation(state),
            extras={},
        )

    def draw(self, states: Sequence[RoverTowerState]) -> Iterator[np.ndarray]:
        """Yields an image (height, width, 3), uint8, of each state: each pair in its colour, around
        its goal the zone that pays, beside the tower its symbol.
        """

        def discs(state: RoverTowerState) -> Iterator[Disc]:
            for x, y in np.array(state.landmark_positions):
                yield Disc(float(x), float(y), LANDMARK_RADIUS, "black", 0.8, "")
            for tower, (rover, goal, symbol) in enumerate(
                zip(*map(np.array, (state.rover_of, state.goal_of, state.message)), strict=True)
            ):
                color = f"C{rover % 10}"
                said = "" if symbol < 0 else f": {symbol}"
                for (x, y), radius, alpha, name in (
                    (state.landmark_positions[goal], GOAL_ZONE**0.5, 0.15, ""),
                    (state.tower_positions[tower], AGENT_RADIUS, 0.4, f"tower {tower}{said}"),
                    (state.rover_positions[rover], AGENT_RADIUS, 0.8, f"rover {rover}"),
                ):
                    yield Disc(float(x), float(y), radius, color, alpha, name)

        return draw_discs(map(discs, states), (-2.0, 2.0, -2.0, 2.0))

    def _reward(self, state: RoverTowerState) -> jax.Array:
        """Returns the reward (N,) for what the state is."""
        goals = state.landmark_positions[state.goal_of]  # (P, 2), by tower
        squares = jnp.sum((state.rover_positions[state.rover_of] - goals) ** 2, axis=-1)
        reward = GOAL_REWARD * (squares < GOAL_ZONE) - squares
        return jnp.concatenate([reward[state.tower_of], reward])

    def _observation(self, state: RoverTowerState) -> Observation:
        rovers = [
            jax.nn.one_hot(state.tower_of, self.num_pairs),
            jax.nn.one_hot(state.message[state.tower_of], NUM_SYMBOLS),  # zeros for -1
            state.rover_positions,
            state.rover_velocities,
        ]
        towers = [
            jax.nn.one_hot(state.rover_of, self.num_pairs),
            state.rover_positions[state.rover_of],
            state.landmark_positions[state.goal_of],
            jnp.zeros((self.num_pairs, 5)),
        ]
        views = [jnp.concatenate(parts, axis=-1) for parts in (rovers, towers)]
        return Observation(
            agents_view=jnp.concatenate(views),
            action_mask=jnp.ones((self.num_agents, NUM_MOVES), bool),
            agent_mask=jnp.ones(self.num_agents, bool),
            step_count=state.step_count,
        )
