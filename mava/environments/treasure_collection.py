"""Cooperative Treasure Collection: hunters take treasures to the banks of their kind.

The world of Iqbal & Sha 2019, "Actor-Attention-Critic for Multi-Agent Reinforcement Learning",
arXiv:1810.02912, section 4.1, with the constants of its code: reset, motion, observations and
rewards are that code's number for number. What differs: an episode that is cut says so, the shorter
views of the banks are padded with zeros, and hunters, banks and treasures can be any numbers.

Axis letters: N agents, H hunters, K banks, which is also the number of kinds, M treasures,
S agents seen, O observation features.
"""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax.struct import PyTreeNode

from mava.drawing import Disc, draw_discs
from mava.environments.particles import NUM_MOVES, advance, distances, push
from mava.types import LAST, MID, Discrete, Observation, TimeStep
from mava.wrappers.base import check_counts, first_timestep, view_spec

HUNTER_RADIUS, BANK_RADIUS, TREASURE_RADIUS = 0.05, 0.075, 0.025
HUNTER_MASS, BANK_MASS = 1.0, 2.25
STIFFNESS = 100.0  # force per length that two agents overlap
SOFTNESS = 1e-3  # length over which that force sets in
MAX_SEEN = 7  # of the other agents, of the treasures, and of the hunters that a bank goes to
SPAWN_LIMIT = 0.95  # treasures appear in a square of twice this side
AWAY = -999.0  # both coordinates of a treasure that was taken, for one step
EVENT_REWARD = 5.0  # for all, for each treasure taken or brought to its bank
COLLISION_PENALTY = 5.0  # of a hunter, for each other hunter it touches
DISTANCE_PENALTY = 0.1  # per length


class TreasureCollectionState(PyTreeNode, kw_only=True):
    """Hunter i is agent i, bank k is agent H + k and takes the treasures of kind k."""

    key: jax.Array  # of the treasures to come
    positions: jax.Array  # (N, 2)
    velocities: jax.Array  # (N, 2)
    holding: jax.Array  # (H,), int32: the kind that each hunter carries, -1 for none
    treasure_positions: jax.Array  # (M, 2)
    treasure_kinds: jax.Array  # (M,), int32: one that was taken keeps its kind until it is back
    treasure_away: jax.Array  # (M,), bool: taken in the last step
    step_count: jax.Array  # (), int32


class TreasureCollection:
    """H hunters, agents 0 to H - 1, and K banks, which move too, agents H to N - 1.

    A hunter with empty hands that touches a treasure takes it, and loses it to the bank of that
    kind when it touches that. A treasure that was taken is back one step later, elsewhere, of any
    kind. Agents push each other away. Nothing ends an episode but the time limit, a truncation.

    The return is the mean over agents of their individual rewards. Everyone gets 5 for each touch
    of a treasure by a hunter with empty hands, and for each touch of a bank by a hunter that holds
    its kind. A hunter loses 5 for every other hunter that it touches, and a tenth of its distance
    to its bank or, with empty hands, to the nearest treasure. A bank loses a tenth of its distance
    to the nearest hunter that holds its kind or, if there is none, to the mean of the 7 hunters
    nearest to it.

    A view, in order:
        own position (2); own velocity (2);
        of hunters only: the kind it holds, one-hot (K), zeros for none;
        the other agents, nearest first, at most 7 of them, of each: position relative to its own
        (2); velocity (2); if a bank, its kind one-hot (K), else zeros; if a hunter, the kind it
        holds one-hot (K), else zeros;
        the treasures, nearest first, at most 7: relative position (2); kind, one-hot (K).
    A bank's view is K features shorter; there are zeros at its end. A treasure that was taken is
    seen once more, in the step after, at (-999, -999).
    All have 5 actions: stay, go right, left, up or down.
    """

    def __init__(
        self,
        num_hunters: int = 6,
        num_banks: int = 2,
        num_treasures: int | None = None,
        time_limit: int = 100,
    ) -> None:
        """Args:
        num_hunters: agents that take treasures.
        num_banks: agents that treasures are brought to; also the number of kinds.
        num_treasures: by default as many as hunters.
        time_limit: steps after which an episode is cut.
        """
        num_treasures = num_hunters if num_treasures is None else num_treasures
        check_counts(
            num_hunters=num_hunters,
            num_banks=num_banks,
            num_treasures=num_treasures,
            time_limit=time_limit,
        )
        self.num_hunters = num_hunters
        self.num_banks = num_banks
        self.num_treasures = num_treasures
        self.num_agents = num_hunters + num_banks
        self.action_spec = Discrete(NUM_MOVES)
        self.time_limit = time_limit
        self.teams = {
            "hunters": tuple(range(num_hunters)),
            "banks": tuple(range(num_hunters, self.num_agents)),
        }
        self._num_seen_agents = min(MAX_SEEN, self.num_agents - 1)
        self._num_seen_treasures = min(MAX_SEEN, num_treasures)
        bank_size = 4 + self._num_seen_agents * (4 + 2 * num_banks)
        bank_size += self._num_seen_treasures * (2 + num_banks)
        # Features of each agent's view; what follows is padding.
        self.view_sizes = (bank_size + num_banks,) * num_hunters + (bank_size,) * num_banks
        counts = (num_hunters, num_banks)
        masses = np.repeat([HUNTER_MASS, BANK_MASS], counts)
        radii = np.repeat([HUNTER_RADIUS, BANK_RADIUS], counts)
        first, second = np.triu_indices(self.num_agents, 1)
        self._pairs = first, second  # every two agents i < j
        self._reach = np.float32(radii[first] + radii[second])  # distance at which they touch
        # By the force f of a pair agent i is moved as by (m_j / m_i) f, j as by (m_i / m_j) f.
        is_first, is_second = (np.eye(self.num_agents)[:, x] for x in self._pairs)
        ratio = masses[second] / masses[first]
        shares = is_first * ratio - is_second / ratio
        self._shares = np.float32(shares / masses[:, None])  # (N, pairs): acceleration per force

    @property
    def observation_spec(self) -> Observation:
        return view_spec(self, (max(self.view_sizes),))

    def reset(self, key: jax.Array) -> tuple[TreasureCollectionState, TimeStep]:
        key, agents_key, treasures_key = jax.random.split(key, 3)
        treasure_positions, treasure_kinds = self._spawn(treasures_key)
        state = TreasureCollectionState(
            key=key,
            positions=jax.random.uniform(agents_key, (self.num_agents, 2), minval=-1.0),
            velocities=jnp.zeros((self.num_agents, 2)),
            holding=jnp.full(self.num_hunters, -1, jnp.int32),
            treasure_positions=treasure_positions,
            treasure_kinds=treasure_kinds,
            treasure_away=jnp.zeros(self.num_treasures, bool),
            step_count=jnp.int32(0),
        )
        return state, first_timestep(self._observation(state), {})

    def step(
        self, state: TreasureCollectionState, action: jax.Array
    ) -> tuple[TreasureCollectionState, TimeStep]:
        accelerations = push(action) + self._contact(state.positions)
        positions, velocities = advance(state.positions, state.velocities, accelerations)
        state = state.replace(
            positions=positions, velocities=velocities, step_count=state.step_count + 1
        )
        last = state.step_count >= self.time_limit
        timestep = TimeStep(
            step_type=jnp.where(last, LAST, MID).astype(jnp.int8),
            reward=self._reward(state),
            discount=jnp.ones(self.num_agents),
            observation=self._observation(state),
            extras={},
        )
        return self._hand_over(state), timestep  # what changes hands is seen a step later

    def draw(self, states: Sequence[TreasureCollectionState]) -> Iterator[np.ndarray]:
        """Yields an image (height, width, 3), uint8, of each state: a colour for each kind, grey
        for empty hands, banks faint.
        """

        def color(kind: int) -> str:
            return "grey" if kind < 0 else f"C{kind % 10}"

        def discs(state: TreasureCollectionState) -> Iterator[Disc]:
            positions, holding = np.array(state.positions, float), np.array(state.holding)
            kinds = np.array(state.treasure_kinds)
            for bank, (x, y) in enumerate(positions[self.num_hunters :]):
                yield Disc(x, y, BANK_RADIUS, color(bank), 0.4, f"bank {bank}")
            for hunter, (x, y) in enumerate(positions[: self.num_hunters]):
                yield Disc(x, y, HUNTER_RADIUS, color(holding[hunter]), 0.8, f"hunter {hunter}")
            for i in np.flatnonzero(~np.array(state.treasure_away)):
                x, y = np.array(state.treasure_positions[i], float)
                yield Disc(x, y, TREASURE_RADIUS, color(kinds[i]), 1.0, "")

        return draw_discs(map(discs, states), (-2.0, 2.0, -2.0, 2.0))

    def _spawn(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns positions (M, 2) and kinds (M,), int32, of treasures that appear."""
        # One draw for all, which is done in every step.
        x, y, kind = jax.random.uniform(key, (3, self.num_treasures))
        positions = SPAWN_LIMIT * (2.0 * jnp.stack([x, y], axis=-1) - 1.0)
        return positions, (kind * self.num_banks).astype(jnp.int32)

    def _contact(self, positions: jax.Array) -> jax.Array:
        """Returns the accelerations (N, 2) by which agents that overlap push each other away."""
        first, second = self._pairs
        apart = positions[first] - positions[second]  # (pairs, 2)
        distance = distances(positions[first], positions[second])
        overlap = SOFTNESS * jax.nn.softplus((self._reach - distance) / SOFTNESS)
        # Two in exactly one place have no direction to be pushed in.
        scale = jnp.where(distance > 0.0, STIFFNESS * overlap / distance, 0.0)
        return jnp.dot(self._shares, scale[:, None] * apart, precision=jax.lax.Precision.HIGHEST)

    def _owns(self, holding: jax.Array) -> jax.Array:
        """Returns which hunters hold the kind of each bank, (K, H), bool."""
        return holding == jnp.arange(self.num_banks)[:, None]

    def _reward(self, state: TreasureCollectionState) -> jax.Array:
        """Returns the reward (N,) for what the state is."""
        hunters, banks = jnp.split(state.positions, [self.num_hunters])
        between = distances(hunters[:, None], hunters)  # (H, H)
        to_banks = distances(banks[:, None], hunters)  # (K, H)
        to_treasures = distances(state.treasure_positions[:, None], hunters)  # (M, H)
        free, owns = state.holding < 0, self._owns(state.holding)
        taken = free & (to_treasures < HUNTER_RADIUS + TREASURE_RADIUS)
        brought = owns & (to_banks < HUNTER_RADIUS + BANK_RADIUS)
        common = EVENT_REWARD * (jnp.sum(taken) + jnp.sum(brought))
        touched = (between < 2 * HUNTER_RADIUS) & ~np.eye(self.num_hunters, dtype=bool)
        own_bank = jnp.sum(jnp.where(owns, to_banks, 0.0), axis=0)
        hunter_way = jnp.where(free, jnp.min(to_treasures, axis=0), own_bank)
        crowd = jnp.mean(hunters[nearest(to_banks, min(MAX_SEEN, self.num_hunters))], axis=1)
        bank_way = jnp.where(
            jnp.any(owns, axis=1),
            jnp.min(jnp.where(owns, to_banks, jnp.inf), axis=1),
            distances(crowd, banks),
        )
        own = jnp.concatenate(
            [
                -COLLISION_PENALTY * jnp.sum(touched, axis=1) - DISTANCE_PENALTY * hunter_way,
                -DISTANCE_PENALTY * bank_way,
            ]
        )
        return common + own

    def _hand_over(self, state: TreasureCollectionState) -> TreasureCollectionState:
        """Returns the state after treasures were taken, brought to banks and put back."""
        hunters, banks = jnp.split(state.positions, [self.num_hunters])
        to_treasures = distances(state.treasure_positions[:, None], hunters)  # (M, H)
        to_banks = distances(banks[:, None], hunters)  # (K, H)
        touched = to_treasures < HUNTER_RADIUS + TREASURE_RADIUS  # none of those that are away
        holding, taken = jax.lax.scan(take, state.holding, (touched, state.treasure_kinds))
        brought = self._owns(holding) & (to_banks < HUNTER_RADIUS + BANK_RADIUS)
        key, treasures_key = jax.random.split(state.key)
        new_positions, new_kinds = self._spawn(treasures_key)
        back = state.treasure_away
        treasures = jnp.where(back[:, None], new_positions, state.treasure_positions)
        return state.replace(
            key=key,
            holding=jnp.where(jnp.any(brought, axis=0), -1, holding),
            treasure_positions=jnp.where(taken[:, None], AWAY, treasures),
            treasure_kinds=jnp.where(back, new_kinds, state.treasure_kinds),
            treasure_away=taken,
        )

    def _observation(self, state: TreasureCollectionState) -> Observation:
        positions, num_hunters, num_banks = state.positions, self.num_hunters, self.num_banks
        own = jnp.concatenate([positions, state.velocities], axis=-1)
        held = jax.nn.one_hot(state.holding, num_banks)  # (H, K), zeros for none
        kinds = jnp.concatenate(
            [jnp.pad(held, ((0, 0), (num_banks, 0))), jnp.eye(num_banks, 2 * num_banks)]
        )
        itself = np.eye(self.num_agents, dtype=bool)
        to_agents = jnp.where(itself, jnp.inf, distances(positions[:, None], positions))
        agents = jnp.concatenate([own, kinds], axis=-1)
        to_treasures = distances(positions[:, None], state.treasure_positions)
        treasures = jnp.concatenate(
            [state.treasure_positions, jax.nn.one_hot(state.treasure_kinds, num_banks)], axis=-1
        )
        around = jnp.concatenate(
            [
                seen_from(positions, agents[nearest(to_agents, self._num_seen_agents)]),
                seen_from(positions, treasures[nearest(to_treasures, self._num_seen_treasures)]),
            ],
            axis=-1,
        )
        hunters = jnp.concatenate([own[:num_hunters], held, around[:num_hunters]], axis=-1)
        banks = jnp.concatenate([own[num_hunters:], around[num_hunters:]], axis=-1)
        return Observation(
            agents_view=jnp.concatenate([hunters, jnp.pad(banks, ((0, 0), (0, num_banks)))]),
            action_mask=jnp.ones((self.num_agents, NUM_MOVES), bool),
            agent_mask=jnp.ones(self.num_agents, bool),
            step_count=state.step_count,
        )


def take(holding: jax.Array, treasure: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns what hunters hold (H,) after one treasure, and whether that was taken: by the first
    of those with empty hands that touch it, (H,), bool. The treasure is that and its kind.
    """
    touched, kind = treasure
    takers = touched & (holding < 0)
    first = takers & (jnp.cumsum(takers) == 1)
    return jnp.where(first, kind, holding), jnp.any(takers)


def nearest(distance: jax.Array, count: int) -> jax.Array:
    """Returns the columns of the `count` smallest entries of each row of a matrix, smallest first;
    of equal ones the first.
    """
    # Ranks are counted: XLA sorts many short rows slowly. Sums over the middle axis are vectorised.
    columns = jnp.arange(distance.shape[1])
    other, own = distance[:, :, None], distance[:, None, :]
    before = (other < own) | ((other == own) & (columns[:, None] < columns))
    rank = jnp.sum(before, axis=1)
    return jnp.argmax(rank[:, :, None] == jnp.arange(count), axis=1)


def seen_from(positions: jax.Array, things: jax.Array) -> jax.Array:
    """Returns a row (S * F) for each agent of the things (N, S, F) that it sees, whose first two
    features, their position, become relative to its own (N, 2).
    """
    relative = things[..., :2] - positions[:, None]
    return jnp.concatenate([relative, things[..., 2:]], axis=-1).reshape(len(positions), -1)
