"""Matrax's games of two players and a table (github.com/instadeepai/matrax)."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import matrax  # noqa: F401  registers its games
from jumanji.registration import make, registered_environments

from mava.types import LAST, MID, Discrete, Observation, TimeStep
from mava.wrappers.base import agents_in_turn, check_time_limit, first_timestep, view_spec

GAMES = ("Climbing", "Penalty", "NoConflict", "Conflict")  # what the names of tasks begin with


class MatraxEnv:
    """Two players choose a row and a column at once, and tables say what each gets; then again.

    Individual reward: the player's payoff, in Matrax's units. The return is the mean over players
    of their sums: `time_limit` times the mean payoff of a round. Nothing ends an episode but the
    time limit, a truncation, which Matrax calls a termination.

    A view is the actions of the last round, one-hot, the player's own before the other's; Matrax
    shows both players the same two numbers. It is zeros in the first round, and in stateless games
    always: only their ids tell the players apart.
    """

    def __init__(self, task: str, time_limit: int | None = None) -> None:
        """Args:
        task: Climbing, Penalty-0, -25, -50, -75 or -100, NoConflict-0 to -20 or Conflict-0 to -56,
            and then -stateless-v0 or -stateful-v0, as Matrax registers them.
        time_limit: rounds after which an episode is cut; by default Matrax's, 500 in stateless
            games, 1000 in stateful ones.
        """
        if str(task).split("-")[0] not in GAMES or task not in registered_environments():
            raise ValueError(
                f"task={task} must be Climbing, Penalty-0, -25, -50, -75 or -100, NoConflict-0 to "
                "-20 or Conflict-0 to -56, and then -stateless-v0 or -stateful-v0."
            )
        options = {} if time_limit is None else {"time_limit": time_limit}
        self._env = cast(Any, make(task, **options))
        self.time_limit: int = self._env.time_limit
        check_time_limit(self.time_limit)
        self.num_agents: int = self._env.num_agents
        self.action_spec = Discrete(self._env.num_actions)

    @property
    def observation_spec(self) -> Observation:
        num_actions = self.action_spec.num_actions
        return view_spec(self, (self.num_agents * num_actions,))

    def reset(self, key: jax.Array) -> tuple[Any, TimeStep]:
        state, timestep = self._env.reset(key)
        return state, first_timestep(self._observation(timestep.observation), {})

    def step(self, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        state, timestep = self._env.step(state, action)
        return state, TimeStep(
            step_type=jnp.where(timestep.last(), LAST, MID).astype(jnp.int8),
            reward=timestep.reward.astype(jnp.float32),
            discount=jnp.ones(self.num_agents),
            observation=self._observation(timestep.observation),
            extras={},
        )

    def _observation(self, observation: Any) -> Observation:
        num_agents, num_actions = self.num_agents, self.action_spec.num_actions
        own_first = agents_in_turn(num_agents)
        last_actions = jnp.take_along_axis(observation.agent_obs, own_first, axis=1)
        views = jax.nn.one_hot(last_actions, num_actions)  # zeros where there is none, -1
        views = views.reshape(num_agents, -1) * self._env.keep_state
        return Observation(
            agents_view=views,
            action_mask=jnp.ones((num_agents, num_actions), bool),
            agent_mask=jnp.ones(num_agents, bool),
            step_count=jnp.asarray(observation.step_count, jnp.int32),
        )
