"""Which agents share parameters: all of them, those of a team, or none.

To a system the networks and optimisers of several groups look like those of one. The parameters
are then a tuple with an entry for each number of agents that groups have; its arrays have the
groups of that size as first axis (G', ...), and these groups are one batched product. Gradients are
clipped, and Adam's moments kept, for each group alone.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from mava.types import Observation

POLICIES = ("shared", "per_team", "per_agent")


class Groups(NamedTuple):
    """G groups of N agents; every agent is in one."""

    names: tuple[str, ...]  # (G,)
    teams: tuple[str, ...]  # (G,): under which each group's options stand
    ids: tuple[tuple[int, ...], ...]  # (G,): of each one's agents

    @property
    def of_agent(self) -> np.ndarray:
        """The group of each agent, (N,)."""
        of_agent = np.zeros(sum(map(len, self.ids)), np.int32)
        for group, ids in enumerate(self.ids):
            of_agent[list(ids)] = group
        return of_agent

    @property
    def weights(self) -> np.ndarray:
        """(N,), 1 on average: with them a mean over the agents is one over the groups' means."""
        sizes = np.bincount(self.of_agent)
        return (len(self.of_agent) / (len(sizes) * sizes))[self.of_agent].astype(np.float32)

    def mean(self, x: jax.Array) -> jax.Array:
        """Returns for each agent the mean of x (..., N) over its group and the other axes, (N,)."""
        if len(self.ids) == 1:
            return jnp.broadcast_to(jnp.mean(x), x.shape[-1:])
        of_agents = jnp.mean(x, axis=tuple(range(x.ndim - 1)))
        sums = jax.ops.segment_sum(of_agents, self.of_agent, len(self.ids))
        return (sums / np.bincount(self.of_agent))[self.of_agent]

    @property
    def by_size(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each size m: the groups of that size (G',), and their agents (G', m)."""
        sizes = np.array([len(ids) for ids in self.ids])
        groups = [np.flatnonzero(sizes == size) for size in np.unique(sizes)]
        return [(which, np.array([self.ids[group] for group in which])) for which in groups]


def make_groups(
    policies: str | Mapping[str, Any], teams: Mapping[str, tuple[int, ...]], num_agents: int
) -> Groups:
    """Returns the groups that `network.policies` asks for; raises ValueError.

    Args:
        policies: shared, per_team or per_agent, or the agents of each group by its name.
        teams: the environment's: the agents of each by its name.
        num_agents: N.
    """
    everyone = tuple(range(num_agents))
    if sorted(i for ids in teams.values() for i in ids) != list(everyone):
        raise ValueError(
            f"The environment's teams, {teams}, must have each of its {num_agents} agents once."
        )
    if policies == "shared":
        return Groups(("all",), ("all",), (everyone,))
    if policies == "per_team":
        return Groups(tuple(teams), tuple(teams), tuple(map(tuple, teams.values())))
    if policies == "per_agent":
        team_of = {i: team for team, ids in teams.items() for i in ids}
        names = tuple(f"agent_{i}" for i in everyone)
        return Groups(names, tuple(team_of[i] for i in everyone), tuple((i,) for i in everyone))
    if not isinstance(policies, Mapping):
        raise ValueError(
            f"network.policies={policies} must be {', '.join(POLICIES)}, or the agents of each "
            "group: {left: [0, 1], right: [2, 3]}."
        )
    given = [policies[name] for name in policies]
    if not all(isinstance(x, list | tuple) and all(type(i) is int for i in x) for x in given):
        raise ValueError(
            f"network.policies={dict(policies)}: a group is a list of agents' numbers."
        )
    ids = tuple(map(tuple, given))
    if sorted(i for group in ids for i in group) != list(everyone) or not all(ids):
        raise ValueError(
            f"network.policies={dict(zip(policies, ids, strict=True))} must name each of the "
            f"{num_agents} agents, 0 to {num_agents - 1}, once, and leave no group empty."
        )
    return Groups(tuple(policies), tuple(policies), ids)


def learning_rates(
    groups: Groups, default: float, by_team: Mapping[str, float], frozen_teams: list[str]
) -> list[float]:
    """Returns the learning rate of each group, 0 of a frozen one; raises ValueError.

    Args:
        groups: of the agents.
        default: of a team that is not named.
        by_team: system.actor_lr_by_team.
        frozen_teams: system.frozen_teams.
    """
    for name in (*by_team, *frozen_teams):
        if name not in groups.teams:
            raise ValueError(
                f"There is no team {name} with parameters of its own (actor_lr_by_team, "
                f"frozen_teams): with this network.policies there is "
                f"{', '.join(dict.fromkeys(groups.teams))}."
            )
    for name, rate in by_team.items():
        if not rate > 0:
            raise ValueError(f"actor_lr_by_team={{{name}: {rate}}} must be above 0.")
    rates = [by_team.get(team, default) for team in groups.teams]
    return [0.0 if team in frozen_teams else x for team, x in zip(groups.teams, rates, strict=True)]


def axes_of_observation(observation: Observation) -> tuple[Observation]:
    """Where the agents are in what a feed-forward actor takes."""
    axis = observation.step_count.ndim
    axes: dict[str, Any] = {"agents_view": axis, "action_mask": axis, "agent_mask": axis}
    return (Observation(**axes, step_count=None),)  # type: ignore[arg-type]


def axes_of_memory_and_observation(memory: Any, observation: Observation) -> tuple:
    """In what a recurrent actor takes: memories (E, N, H), observations (T, E, N, ...)."""
    return (jax.tree.map(lambda x: 1, memory), *axes_of_observation(observation))


def axes_of_views(view_spec: Any) -> Callable[[jax.Array], tuple[int]]:
    """In what a feed-forward critic of each agent's own view takes: (..., N, O), or grids."""
    return lambda view: (view.ndim - len(view_spec.shape),)


def axes_of_memory_and_views(memory: Any, view: jax.Array, start: jax.Array) -> tuple:
    """In what a recurrent critic of each agent's own view takes: (E, N, H), (T, E, N, ...)."""
    return (jax.tree.map(lambda x: 1, memory), 2, None)


class Grouped(NamedTuple):
    """A network of each group, for its agents; it has the interface of a Flax module."""

    network: nn.Module
    groups: Groups
    in_axes: Callable[..., tuple]  # of the inputs, the axes of the agents; None where there is none

    @property
    def members(self) -> list[np.ndarray]:
        """The groups whose parameters are in each entry of the tuple."""
        return [which for which, _ in self.groups.by_size]

    def init(self, key: jax.Array, *inputs: Any) -> Any:
        if len(self.groups.ids) == 1:
            return self.network.init(key, *inputs)
        keys = jax.random.split(key, len(self.groups.ids))
        return tuple(
            self._of_size(self.network.init, keys[which], ids, inputs)
            for which, ids in self.groups.by_size
        )

    def apply(self, params: Any, *inputs: Any) -> Any:
        """Returns arrays with the agents' axis where the last input that has one has it."""
        if len(self.groups.ids) == 1:
            return self.network.apply(params, *inputs)
        by_size = self.groups.by_size
        results = [
            self._of_size(self.network.apply, of_size, ids, inputs)
            for of_size, (_, ids) in zip(params, by_size, strict=True)
        ]
        axis = jax.tree.leaves(self.in_axes(*inputs))[-1]
        order = np.argsort(np.concatenate([ids.reshape(-1) for _, ids in by_size]))

        def join(*parts: jax.Array) -> jax.Array:
            moved = [jnp.moveaxis(x, 0, axis) for x in parts]  # (..., G', m, ...)
            flat = [x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :]) for x in moved]
            return jnp.take(jnp.concatenate(flat, axis), order, axis)

        return jax.tree.map(join, *results)

    def _of_size(self, function: Callable, of_groups: Any, ids: np.ndarray, inputs: tuple) -> Any:
        """Returns function(of_group, *inputs) of all groups with m agents (G', m): (G', ...)."""
        axes = self.in_axes(*inputs)

        def take(axis: int | None, x: Any) -> Any:
            return x if axis is None else jnp.moveaxis(jnp.take(x, ids, axis), axis, 0)

        def is_none(axis: Any) -> bool:
            return axis is None

        inputs = jax.tree.map(take, axes, inputs, is_leaf=is_none)
        if len(ids) > 1:
            return jax.vmap(function, (0, *jax.tree.map(lambda x: 0, axes)))(of_groups, *inputs)
        inputs = jax.tree.map(lambda axis, x: x if axis is None else x[0], axes, inputs,
                              is_leaf=is_none)  # fmt: skip
        result = function(jax.tree.map(lambda x: x[0], of_groups), *inputs)
        return jax.tree.map(lambda x: x[None], result)


class GroupedCentral(NamedTuple):
    """A network of each group that sees the global state, and gives values of its own agents.

    With a memory it is one for each group: (E, G, H), without the axis G if there is but one.
    """

    network: nn.Module
    groups: Groups

    @property
    def members(self) -> list[np.ndarray]:
        """The groups whose parameters are in each entry of the tuple."""
        return [np.arange(len(self.groups.ids))]

    @property
    def memory_axes(self) -> tuple[int, ...]:
        """(G,), or () if there is one group."""
        return () if len(self.groups.ids) == 1 else (len(self.groups.ids),)

    def init(self, key: jax.Array, *inputs: Any) -> Any:
        if len(self.groups.ids) == 1:
            return self.network.init(key, *inputs)
        keys = jax.random.split(key, len(self.groups.ids))
        return (jax.vmap(self.network.init, (0, *self._in_axes(inputs)))(keys, *inputs),)

    def apply(self, params: Any, *inputs: Any) -> Any:
        """Returns values (..., N), each of the network of the agent's group."""
        if len(self.groups.ids) == 1:
            return self.network.apply(params, *inputs)
        axes, out_axes = (0, *self._in_axes(inputs)), 0 if len(inputs) == 1 else (2, 0)
        result: Any = jax.vmap(self.network.apply, axes, out_axes)(params[0], *inputs)
        memories, values = ((), result) if len(inputs) == 1 else result
        of_agent = self.groups.of_agent.reshape(*[1] * (values.ndim - 1), -1)
        values = jnp.take_along_axis(values, of_agent, axis=0)[0]  # of (G, ..., N)
        return values if len(inputs) == 1 else (memories, values)

    @staticmethod
    def _in_axes(inputs: tuple) -> tuple:
        return (None,) if len(inputs) == 1 else (1, None, None)


def grouped_optim(
    make_optim: Callable[[float], optax.GradientTransformation],
    learning_rates: list[float],
    network: Grouped | GroupedCentral,
) -> optax.GradientTransformation:
    """Returns the optimiser of all groups, each with its learning rate, for the gradient of a loss
    that is the mean over the groups' own.

    Args:
        make_optim: returns an optimiser, whose steps are proportional to the learning rate.
        learning_rates: (G,). With 0 parameters stay exactly as they are.
        network: whose parameters are optimised.
    """
    if len(learning_rates) == 1:
        return make_optim(learning_rates[0])
    optim = make_optim(1.0)

    def update(grads: Any, states: Any, params: Any = None) -> tuple[Any, Any]:
        grads = jax.tree.map(lambda x: len(learning_rates) * x, grads)
        results = [jax.vmap(optim.update)(*pair) for pair in zip(grads, states, strict=True)]
        updates, states = zip(*results, strict=True)
        rates = [np.array(learning_rates, np.float32)[which] for which in network.members]

        def scale(rate: np.ndarray, of_groups: Any) -> Any:
            return jax.tree.map(lambda x: rate.reshape(-1, *[1] * (x.ndim - 1)) * x, of_groups)

        return tuple(map(scale, rates, updates)), states

    return optax.GradientTransformation(
        lambda params: tuple(jax.vmap(optim.init)(of_size) for of_size in params), update
    )
