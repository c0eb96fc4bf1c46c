"""Jumanji's multi-agent environments on graphs (Bonnet et al. 2024, arXiv:2306.09884)."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jumanji.environments.routing.mmst import MMST
from jumanji.environments.routing.mmst.constants import EMPTY_NODE, UTILITY_NODE
from jumanji.environments.routing.mmst.generator import SplitRandomGenerator
from jumanji.environments.routing.multi_cvrp import MultiCVRP
from jumanji.environments.routing.multi_cvrp.constants import DEPOT_IDX
from jumanji.environments.routing.multi_cvrp.generator import UniformRandomGenerator
from jumanji.environments.routing.multi_cvrp.utils import worst_case_remaining_reward

from mava.types import FIRST, LAST, MID, Discrete, Observation, TimeStep
from mava.wrappers.base import agents_in_turn, check_time_limit, view_spec
from mava.wrappers.jumanji import FIGURE_SIZE, draw_states


class MultiCvrpEnv:
    """MultiCVRP: vehicles drive from a depot to customers, who want their goods at some time.

    Team reward: minus the distance that all vehicles drive in a step, and minus the penalties for
    being early or late; the return is that of the team. The episode ends when all customers are
    served and all vehicles are back (termination, also when that coincides with the limit). At the
    time limit the customers left cost what serving them one by one at the end would, which stands
    for all that is to come (termination); if only a vehicle is not back, it is cut (truncation).
    It is won if all are served.

    An action is the next node, the depot first. Where several vehicles choose a customer the first
    of them goes there, the others to the depot. A vehicle that is back when all are served is out
    of the game.

    A view has the vehicle's own place, free capacity, clock, whether it is in the depot, and the
    steps left; of every other vehicle the way there and the same three; of every node that is to be
    visited the way there, its length, the demand, how long after the vehicle's arrival the time
    window opens and closes, what early and late cost, and whether it may go there.
    """

    def __init__(self, time_limit: int | None = None, **generator: int) -> None:
        """Args:
        time_limit: steps after which an episode is cut, at most and by default Jumanji's, twice
            the number of customers: enough for one vehicle to serve them one by one.
        generator: num_customers, num_vehicles.
        """
        self._env = MultiCVRP(UniformRandomGenerator(**generator))
        spec: Any = self._env.observation_spec
        self.num_agents, self._num_nodes = spec.action_mask.shape
        longest = 2 * (self._num_nodes - 1)
        self.time_limit = longest if time_limit is None else time_limit
        check_time_limit(self.time_limit)
        if self.time_limit > longest:
            raise ValueError(
                f"time_limit={time_limit} must be at most 2 * num_customers = {longest}."
            )
        self.action_spec = Discrete(self._num_nodes)
        self._map_size = float(spec.nodes.coordinates.maximum)
        self._max_capacity = float(spec.vehicles.capacities.maximum)
        self._max_window_end = float(spec.windows.end.maximum)

    @property
    def observation_spec(self) -> Observation:
        num_features = 6 + 5 * (self.num_agents - 1) + 9 * self._num_nodes
        return view_spec(self, (num_features,))

    def reset(self, key: jax.Array) -> tuple[Any, TimeStep]:
        state, _ = self._env.reset(key)
        return state, self._timestep(state, jnp.int8(FIRST), jnp.float32(0.0), jnp.bool_(False))

    def step(self, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        new_state, _ = self._env.step(state, action)
        cost = _cost(new_state) - _cost(state)
        to_serve, away = _to_serve(new_state), new_state.vehicles.positions != DEPOT_IDX
        terminated = ~jnp.any(to_serve) & ~jnp.any(away)
        at_limit = _num_steps(new_state) >= self.time_limit
        # Jumanji's own reward at its limit leaves out what the last step cost. Without the charge
        # for the customers left nothing would be better than to stay in the depot; as it stands for
        # all that is to come, nothing comes after it.
        reward = at_limit * worst_case_remaining_reward(new_state) - cost
        charged = at_limit & jnp.any(to_serve)
        step_type = jnp.where(terminated | at_limit, LAST, MID).astype(jnp.int8)
        return new_state, self._timestep(new_state, step_type, reward, terminated | charged)

    def draw(self, states: Sequence[Any]) -> Iterator[np.ndarray]:
        """Yields an image (height, width, 3), uint8, of each state."""
        from jumanji.environments.routing.multi_cvrp.viewer import MultiCVRPViewer

        sizes = (self.num_agents, self._num_nodes - 1, int(self._map_size))
        return draw_states(MultiCVRPViewer("MultiCVRP", *sizes, render_mode="rgb_array"), states)

    def _timestep(
        self, state: Any, step_type: jax.Array, reward: jax.Array, terminated: jax.Array
    ) -> TimeStep:
        to_serve, vehicles = _to_serve(state), state.vehicles
        metrics = {
            "distance": jnp.sum(vehicles.distances),
            "time_penalty": jnp.sum(vehicles.time_penalties),
            "customers_left": jnp.sum(to_serve, dtype=jnp.float32),
        }
        return TimeStep(
            step_type=step_type,
            reward=jnp.full(self.num_agents, reward, jnp.float32),
            discount=jnp.full(self.num_agents, 1.0 - terminated, jnp.float32),
            observation=Observation(
                agents_view=self._views(state),
                action_mask=state.action_mask,
                agent_mask=jnp.any(to_serve) | (vehicles.positions != DEPOT_IDX),
                step_count=_num_steps(state),
            ),
            extras={"won_episode": ~jnp.any(to_serve), "env_metrics": metrics},
        )

    def _views(self, state: Any) -> jax.Array:
        """Returns (N, O)."""
        nodes, windows, vehicles = state.nodes, state.windows, state.vehicles
        coordinates = nodes.coordinates / self._map_size  # (nodes, 2)
        places = coordinates[vehicles.positions]  # (N, 2)
        capacities = vehicles.capacities / self._max_capacity
        times = vehicles.local_times
        clocks = times / (times + self._max_window_end)  # below 1 however long a tour is
        in_depot = vehicles.positions == DEPOT_IDX
        of_vehicles = jnp.stack([capacities, clocks, in_depot], axis=-1)  # (N, 3)

        left = jnp.full((self.num_agents, 1), 1.0 - _num_steps(state) / self.time_limit)
        own = jnp.concatenate([places, of_vehicles, left], axis=-1)

        following = agents_in_turn(self.num_agents)[:, 1:]
        to_others = places[following] - places[:, None]
        others = jnp.concatenate([to_others, of_vehicles[following]], axis=-1)

        ways = coordinates - places[:, None]  # (N, nodes, 2)
        lengths = jnp.linalg.norm(ways, axis=-1)
        arrivals = times[:, None] + lengths * self._map_size
        opens, closes = (
            jnp.clip((time - arrivals) / self._max_window_end, -1.0, 1.0)
            for time in (windows.start, windows.end)
        )
        demands, early, late = (
            jnp.broadcast_to(x, lengths.shape)
            for x in (nodes.demands / self._max_capacity, state.coeffs.early, state.coeffs.late)
        )
        facts = [lengths, demands, opens, closes, early, late, state.action_mask]
        of_nodes = jnp.concatenate([ways, jnp.stack(facts, axis=-1)], axis=-1)
        to_visit = _to_serve(state).at[DEPOT_IDX].set(True)
        of_nodes = of_nodes * to_visit[:, None]

        parts = [x.reshape(self.num_agents, -1) for x in (own, others, of_nodes)]
        return jnp.concatenate(parts, axis=-1).astype(jnp.float32)


def _num_steps(state: Any) -> jax.Array:
    """Returns MultiCVRP's steps since the reset; its own count, int16, begins at 1."""
    return state.step_count.astype(jnp.int32) - 1


def _to_serve(state: Any) -> jax.Array:
    """Returns which of MultiCVRP's nodes still want something: (nodes,), bool."""
    return state.nodes.demands > 0


def _cost(state: Any) -> jax.Array:
    """Returns what all of MultiCVRP's vehicles have cost so far."""
    return jnp.sum(state.vehicles.distances) + jnp.sum(state.vehicles.time_penalties)


class MmstEnv:
    """MMST: every agent walks along the edges of a graph and connects the nodes that are its own.

    Team reward: in every step each agent that has not yet been to all its nodes adds 10 for coming
    to one of them for the first time, 0 if another agent took the node that it chose, else -1 (-2
    if it has nowhere to go). The return is that of the team. The episode ends when all agents have
    all their nodes (termination, also when that coincides with the limit), and is won then; it is
    cut at the time limit, which Jumanji calls a termination.

    An action is the next node, a neighbour. Nodes that are nobody's belong to the first who comes.
    An agent that is finished, or has nowhere to go, is out of the game: it can only stay.

    A view has for every node whether the agent is there, has yet to get there, has been there, may
    go there, whether another agent is there, has yet to get there, and whether another has taken
    it; then, for every pair of nodes, whether an edge joins them.
    """

    def __init__(self, time_limit: int = 70, **generator: int) -> None:
        """Args:
        time_limit: steps after which an episode is cut.
        generator: num_nodes, num_edges, max_degree, num_agents, num_nodes_per_agent.
        """
        check_time_limit(time_limit)
        # Jumanji remembers as many nodes as max_step: with time_limit it would forget the last.
        graphs = SplitRandomGenerator(**generator, max_step=time_limit + 1)
        num_nodes, num_edges = generator["num_nodes"], generator["num_edges"]
        max_edges = num_nodes * generator["max_degree"] // 2  # it would look for more for ever
        if not num_nodes - 1 <= num_edges <= max_edges:
            raise ValueError(
                f"num_edges={num_edges} must be from num_nodes - 1 = {num_nodes - 1} to "
                f"num_nodes * max_degree / 2 = {max_edges}."
            )
        if graphs.num_nodes_per_agent < 2:
            raise ValueError(
                f"num_nodes_per_agent={graphs.num_nodes_per_agent} must be at least 2."
            )
        viewer: Any = object()  # of its own Jumanji makes one that seeds NumPy
        self._env = MMST(graphs, time_limit=time_limit, viewer=viewer)
        self.num_agents = graphs.num_agents
        self.action_spec = Discrete(num_nodes)
        self.time_limit = time_limit
        self._pairs = np.triu_indices(num_nodes, k=1)

    @property
    def observation_spec(self) -> Observation:
        num_features = 7 * self.action_spec.num_actions + len(self._pairs[0])
        return view_spec(self, (num_features,))

    def reset(self, key: jax.Array) -> tuple[Any, TimeStep]:
        state, timestep = self._env.reset(key)
        return state, self._timestep(state, timestep, jnp.int8(FIRST))

    def step(self, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        state, timestep = self._env.step(state, action)
        step_type = jnp.where(timestep.last(), LAST, MID).astype(jnp.int8)
        return state, self._timestep(state, timestep, step_type)

    def draw(self, states: Sequence[Any]) -> Iterator[np.ndarray]:
        """Yields an image (height, width, 3), uint8, of each state: an agent's nodes and its way in
        its colour, a ring where it is. Jumanji's viewer takes seconds and shows a node or two.
        """
        from matplotlib import pyplot as plt

        figure: Any = plt.figure(figsize=FIGURE_SIZE, layout="constrained")
        axes = figure.add_subplot()
        colors = np.array([(0.6, 0.6, 0.6, 1.0), *plt.get_cmap("tab10")(range(self.num_agents))])
        try:
            for state in states:
                axes.clear()
                axes.set(xlim=(-0.05, 1.05), ylim=(-0.05, 1.05), xticks=[], yticks=[])
                adjacency = np.array(state.adj_matrix)
                places = _layout(adjacency)
                for pair in np.argwhere(np.triu(adjacency)):
                    axes.plot(*places[pair].T, color=colors[0], linewidth=0.5)
                for agent in range(self.num_agents):
                    way = np.array(state.connected_nodes[agent, : state.position_index[agent] + 1])
                    axes.plot(*places[way].T, color=colors[1 + agent], linewidth=3.0)
                axes.scatter(*places.T, s=80.0, c=colors[1 + np.array(state.node_types)], zorder=2)
                there = places[np.array(state.positions)].T
                axes.scatter(*there, s=250.0, facecolors="none", edgecolors=colors[1:], zorder=3)
                figure.canvas.draw()
                yield np.array(figure.canvas.buffer_rgba())[..., :3]
        finally:
            plt.close(figure)

    def _timestep(self, state: Any, timestep: Any, step_type: jax.Array) -> TimeStep:
        # Jumanji masks only what is known before a step: it leaves finished agents a move.
        may_move = state.action_mask & ~state.finished_agents[:, None]
        in_game = jnp.any(may_move, axis=-1)
        there = jax.nn.one_hot(state.positions, self.action_spec.num_actions, dtype=bool)
        all_finished = jnp.all(state.finished_agents)
        connected = timestep.extras["ratio_connections"]
        return TimeStep(
            step_type=step_type,
            reward=jnp.full(self.num_agents, timestep.reward, jnp.float32),
            discount=jnp.full(self.num_agents, 1.0 - all_finished, jnp.float32),
            observation=Observation(
                agents_view=self._views(state, there, may_move),
                action_mask=jnp.where(in_game[:, None], may_move, there),
                agent_mask=in_game,
                step_count=jnp.asarray(state.step_count, jnp.int32),
            ),
            extras={
                "won_episode": all_finished,
                "env_metrics": {"ratio_connected": jnp.asarray(connected, jnp.float32)},
            },
        )

    def _views(self, state: Any, there: jax.Array, may_move: jax.Array) -> jax.Array:
        """Returns (N, O) from masks (N, nodes)."""
        visited = state.connected_nodes_index != EMPTY_NODE
        own = state.node_types == jnp.arange(self.num_agents)[:, None]
        wanted = own & ~visited
        taken = _by_others(visited) & (state.node_types == UTILITY_NODE)
        of_nodes = [there, wanted, visited, may_move, _by_others(there), _by_others(wanted), taken]
        edges = jnp.tile(state.adj_matrix[self._pairs], (self.num_agents, 1))
        return jnp.concatenate([*of_nodes, edges], axis=-1).astype(jnp.float32)


def _by_others(mask: jax.Array) -> jax.Array:
    """Returns for each agent what holds for any other: (N, nodes), bool."""
    return jnp.sum(mask, axis=0) - mask > 0


def _layout(adjacency: np.ndarray) -> np.ndarray:
    """Returns places for the nodes of a graph, neighbours near each other: (nodes, 2) in [0, 1].

    The columns, each 0, 1, ... in some order, keep nodes apart: they are ranks along the graph's
    slowest modes, the eigenvectors of its Laplacian.
    """
    laplacian = np.diag(adjacency.sum(axis=0)) - adjacency
    modes = np.linalg.eigh(laplacian)[1][:, 1:3]
    return np.argsort(np.argsort(modes, axis=0), axis=0) / (len(adjacency) - 1)
