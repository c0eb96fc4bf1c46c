"""Small environments whose right answers are known."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax.struct import PyTreeNode

from mava.types import (
    FIRST,
    LAST,
    MID,
    ActionSpec,
    Continuous,
    Discrete,
    MultiDiscrete,
    Observation,
    TimeStep,
    array_spec,
)


class ProbeState(PyTreeNode, kw_only=True):
    key: jax.Array
    step_count: jax.Array  # (), int32
    cue: jax.Array  # (N,): what the observation shows


class Probe:
    """N agents see a random cue in {-1, 1} and choose one of two actions; subclasses say the rest.

    `reward(state, action)` is (N,); `terminated(state)` a bool, after the step; the step that
    reaches `time_limit` is the last.
    """

    action_spec: ActionSpec = Discrete(2)
    num_agents = 2
    time_limit = 1

    @property
    def num_choices(self) -> int:
        return self.action_spec[0]

    @property
    def observation_spec(self) -> Observation:
        return Observation(
            agents_view=array_spec((self.num_agents, 1), jnp.float32),
            action_mask=array_spec((self.num_agents, self.num_choices), bool),
            agent_mask=array_spec((self.num_agents,), bool),
            step_count=array_spec((), jnp.int32),
        )

    def _observe(self, state: ProbeState) -> Observation:
        return Observation(
            agents_view=state.cue[:, None],
            action_mask=jnp.ones((self.num_agents, self.num_choices), bool),
            agent_mask=jnp.ones(self.num_agents, bool),
            step_count=state.step_count,
        )

    def _cue(self, key: jax.Array, step_count: jax.Array) -> jax.Array:
        return jax.random.rademacher(key, (self.num_agents,), jnp.float32)

    def reset(self, key: jax.Array) -> tuple[Any, TimeStep]:
        key, cue_key = jax.random.split(key)
        step_count = jnp.int32(0)
        state = ProbeState(key=key, step_count=step_count, cue=self._cue(cue_key, step_count))
        return state, TimeStep(
            step_type=jnp.int8(FIRST),
            reward=jnp.zeros(self.num_agents),
            discount=jnp.ones(self.num_agents),
            observation=self._observe(state),
            extras=self._extras(state, jnp.zeros(self.num_agents)),
        )

    def step(self, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        reward = jnp.broadcast_to(self.reward(state, action), (self.num_agents,))
        key, cue_key = jax.random.split(state.key)
        step_count = state.step_count + 1
        state = ProbeState(key=key, step_count=step_count, cue=self._cue(cue_key, step_count))
        terminated = self.terminated(state)
        last = terminated | (step_count >= self.time_limit)
        return state, TimeStep(
            step_type=jnp.where(last, LAST, MID).astype(jnp.int8),
            reward=reward.astype(jnp.float32),
            discount=jnp.full(self.num_agents, 1.0 - terminated),
            observation=self._observe(state),
            extras=self._extras(state, reward),
        )

    def _extras(self, state: ProbeState, reward: jax.Array) -> dict[str, Any]:
        return {}

    def reward(self, state: ProbeState, action: jax.Array) -> jax.Array:
        return jnp.ones(self.num_agents)

    def terminated(self, state: ProbeState) -> jax.Array:
        return state.step_count >= 1


class ConstantReward(Probe):
    """One step, reward 1: V = 1."""


class RewardFromObservation(Probe):
    """One step, the reward is the cue of the agent's own view: V = cue."""

    def reward(self, state: ProbeState, action: jax.Array) -> jax.Array:
        return state.cue


class DelayedReward(Probe):
    """Two steps, reward 1 after the second: V = gamma, then 1. The cue is the step."""

    time_limit = 2

    def _cue(self, key: jax.Array, step_count: jax.Array) -> jax.Array:
        return jnp.full(self.num_agents, 1.0) * step_count

    def reward(self, state: ProbeState, action: jax.Array) -> jax.Array:
        return jnp.full(self.num_agents, 1.0) * (state.step_count == 1)

    def terminated(self, state: ProbeState) -> jax.Array:
        return state.step_count >= 2


class RightAction(Probe):
    """One step, reward 1 to an agent whose action matches its cue (-1: 0, 1: 1)."""

    def reward(self, state: ProbeState, action: jax.Array) -> jax.Array:
        return (action == (state.cue > 0)).astype(jnp.float32)


class RewardOfAction(Probe):
    """One step, reward 1 to an agent that takes action 1."""

    def reward(self, state: ProbeState, action: jax.Array) -> jax.Array:
        return action.astype(jnp.float32)


class RightJointAction(Probe):
    """One step, reward 1 to all if every action matches the agent's cue."""

    def reward(self, state: ProbeState, action: jax.Array) -> jax.Array:
        return jnp.all(action == (state.cue > 0)).astype(jnp.float32)


class Ended(Probe):
    """Reward 1 in each of 4 steps, then the end: V is the sum of what is left.

    The cue is the step, so that the values can be told apart.
    """

    time_limit = 4

    def _cue(self, key: jax.Array, step_count: jax.Array) -> jax.Array:
        return jnp.full(self.num_agents, 0.25) * step_count

    def terminated(self, state: ProbeState) -> jax.Array:
        return state.step_count >= 4


class Cut(Probe):
    """The first step costs 3, every later one pays 1 for ever; the 4th is only cut.

    V is 1 / (1 - gamma) after the first step (cue 1), -3 + gamma / (1 - gamma) before (cue -1):
    a target that bootstraps from the next episode's first observation, or not at all, misses it.
    """

    time_limit = 4

    def _cue(self, key: jax.Array, step_count: jax.Array) -> jax.Array:
        return jnp.full(self.num_agents, 1.0) * jnp.where(step_count == 0, -1.0, 1.0)

    def reward(self, state: ProbeState, action: jax.Array) -> jax.Array:
        return jnp.full(self.num_agents, 1.0) * jnp.where(state.step_count == 0, -3.0, 1.0)

    def terminated(self, state: ProbeState) -> jax.Array:
        return jnp.bool_(False)


class RandomLength(Probe):
    """Episodes of 1 or of 100 steps, an even chance, reward 1 a step; the long ones are won."""

    time_limit = 100

    def _cue(self, key: jax.Array, step_count: jax.Array) -> jax.Array:
        return jnp.full(self.num_agents, 1.0)

    def reset(self, key: jax.Array) -> tuple[Any, TimeStep]:
        state, timestep = super().reset(key)
        state = state.replace(cue=jnp.where(jax.random.bernoulli(key), 1.0, -1.0) * state.cue)
        return state, timestep.replace(observation=self._observe(state))

    def step(self, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        cue = state.cue
        state, timestep = super().step(state, action)
        state = state.replace(cue=cue)
        last = (cue[0] < 0) | (state.step_count >= 100)
        return state, timestep.replace(
            step_type=jnp.where(last, LAST, MID).astype(jnp.int8),
            discount=jnp.full(self.num_agents, 1.0 - last),
            observation=self._observe(state),
            extras={"won_episode": last & (cue[0] > 0)},
        )

    def _extras(self, state: ProbeState, reward: jax.Array) -> dict[str, Any]:
        return {"won_episode": jnp.bool_(False)}

    def terminated(self, state: ProbeState) -> jax.Array:
        return jnp.bool_(False)


class RightPair(Probe):
    """One step, two choices of two; pays 1 if the first matches the cue and the second does not."""

    action_spec = MultiDiscrete((2, 2))

    num_choices = 4

    def reward(self, state: ProbeState, action: jax.Array) -> jax.Array:
        cue = (state.cue > 0).astype(jnp.int32)
        return ((action[:, 0] == cue) & (action[:, 1] == 1 - cue)).astype(jnp.float32)


class RightPlace(Probe):
    """One step, two numbers, of which the second agent has one; minus the squared distance of all
    from half the cue. A number that an agent does not have must be 0.
    """

    action_spec = Continuous(2)

    def _observe(self, state: ProbeState) -> Observation:
        mask = jnp.array([[True, True], [True, False]])
        return super()._observe(state).replace(action_mask=mask)

    def reward(self, state: ProbeState, action: jax.Array) -> jax.Array:
        goal = 0.5 * state.cue[:, None] * jnp.array([[1, 1], [1, 0]])
        return -jnp.sum((action - goal) ** 2, axis=-1)


class Recall(Probe):
    """The cue shows in the first observation alone; the 4th action pays 1 if it matches it."""

    time_limit = 4

    def _observe(self, state: ProbeState) -> Observation:
        shown = state.cue * (state.step_count == 0)
        return super()._observe(state).replace(agents_view=shown[:, None])

    def step(self, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        cue = state.cue
        state, timestep = super().step(state, action)
        state = state.replace(cue=cue)
        return state, timestep.replace(observation=self._observe(state))

    def reward(self, state: ProbeState, action: jax.Array) -> jax.Array:
        right = (action == (state.cue > 0)).astype(jnp.float32)
        return right * (state.step_count == 3)

    def terminated(self, state: ProbeState) -> jax.Array:
        return state.step_count >= 4


class JointRecall(Recall):
    """As Recall, and it pays only if the actions of all match their cues."""

    def reward(self, state: ProbeState, action: jax.Array) -> jax.Array:
        return jnp.min(super().reward(state, action))


class RandomEnds(Probe):
    """Episodes of 1 to 5 steps, that end or are cut, with noise to see."""

    time_limit = 100

    def _cue(self, key: jax.Array, step_count: jax.Array) -> jax.Array:
        return jax.random.normal(key, (self.num_agents,))

    def reward(self, state: ProbeState, action: jax.Array) -> jax.Array:
        return state.cue

    def step(self, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        state, timestep = super().step(state, action)
        end = jax.random.uniform(jax.random.fold_in(state.key, 0))
        last = (end < 0.3) | (state.step_count >= 5)
        return state, timestep.replace(
            step_type=jnp.where(last, LAST, MID).astype(jnp.int8),
            discount=jnp.full(self.num_agents, 1.0 - (end < 0.15)),
        )

    def terminated(self, state: ProbeState) -> jax.Array:
        return jnp.bool_(False)


class StateOfMemory(RandomEnds):
    """Pays 1 for an action that is the number of steps since the episode began."""

    action_spec = Discrete(6)

    def reward(self, state: ProbeState, action: jax.Array) -> jax.Array:
        return (action == state.step_count).astype(jnp.float32)


class LeftEarly(Probe):
    """Three steps, the team is paid 1 after the third; the second agent leaves after the first.

    V = gamma^2, gamma, 1 for either agent: what the team earns counts for who left, too.
    """

    time_limit = 3

    def _cue(self, key: jax.Array, step_count: jax.Array) -> jax.Array:
        return jnp.full(self.num_agents, 0.5) * step_count

    def _observe(self, state: ProbeState) -> Observation:
        in_game = jnp.array([True, False]) | (state.step_count == 0)
        return super()._observe(state).replace(agent_mask=in_game)

    def reward(self, state: ProbeState, action: jax.Array) -> jax.Array:
        return jnp.full(self.num_agents, 1.0) * (state.step_count == 2)

    def terminated(self, state: ProbeState) -> jax.Array:
        return state.step_count >= 3


class OneOut(Probe):
    """The second agent is out of the game; its reward is `junk`."""

    def __init__(self, junk: float = 0.0) -> None:
        self.junk = junk

    def _observe(self, state: ProbeState) -> Observation:
        return super()._observe(state).replace(agent_mask=jnp.array([True, False]))

    def reward(self, state: ProbeState, action: jax.Array) -> jax.Array:
        return jnp.array([action[0], self.junk], jnp.float32)


class KeyProbe(Probe):
    """Shows the key of its reset, as four floats of 16 bits each; every episode is one step."""

    @property
    def observation_spec(self) -> Observation:
        spec = super().observation_spec
        return spec.replace(agents_view=array_spec((self.num_agents, 4), jnp.float32))

    def reset(self, key: jax.Array) -> tuple[Any, TimeStep]:
        state, timestep = super().reset(key)
        data = jax.random.key_data(key)
        mark = jnp.concatenate([data >> 16, data & 0xFFFF]).astype(jnp.float32)
        view = jnp.broadcast_to(mark, (self.num_agents, 4))
        return state, timestep.replace(observation=timestep.observation.replace(agents_view=view))

    def step(self, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        state, timestep = super().step(state, action)
        view = jnp.zeros((self.num_agents, 4))
        return state, timestep.replace(observation=timestep.observation.replace(agents_view=view))


class Counter(Probe):
    """Shows a number drawn for the episode and the step in it, which is also the reward. Ends by
    chance, is cut after 4 steps, or both at once; only action step % 2 is legal.
    """

    time_limit = 4

    @property
    def observation_spec(self) -> Observation:
        spec = super().observation_spec
        return spec.replace(
            agents_view=array_spec((self.num_agents, 2), jnp.float32),
            global_state=array_spec((2,), jnp.float32),
        )

    def _cue(self, key: jax.Array, step_count: jax.Array) -> jax.Array:
        return jnp.zeros(self.num_agents)

    def reset(self, key: jax.Array) -> tuple[Any, TimeStep]:
        number = jax.random.uniform(key, (self.num_agents,))
        state, timestep = super().reset(key)
        state = state.replace(cue=number)
        return state, timestep.replace(observation=self._observe(state))

    def step(self, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        number = state.cue
        state, timestep = super().step(state, action)
        state = state.replace(cue=number)
        return state, timestep.replace(observation=self._observe(state))

    def _observe(self, state: ProbeState) -> Observation:
        observation = super()._observe(state)
        step = state.step_count.astype(jnp.float32)
        legal = jnp.arange(self.num_choices) == state.step_count % self.num_choices
        return observation.replace(
            agents_view=jnp.stack([state.cue, jnp.full(self.num_agents, step)], axis=-1),
            action_mask=jnp.broadcast_to(legal, observation.action_mask.shape),
            global_state=jnp.stack([state.cue[0], step]),
        )

    def reward(self, state: ProbeState, action: jax.Array) -> jax.Array:
        return state.step_count * jnp.arange(1.0, self.num_agents + 1)

    def terminated(self, state: ProbeState) -> jax.Array:
        return jax.random.bernoulli(state.key, 0.3)


class Teams(Probe):
    """One step, five agents who all see the same. Those of the team left, 0 and 3, get `scale` for
    action 0; those of the team right get 1 for action 1.
    """

    num_agents = 5

    teams: ClassVar = {"left": (0, 3), "right": (1, 2, 4)}

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def _cue(self, key: jax.Array, step_count: jax.Array) -> jax.Array:
        return jnp.ones(self.num_agents)

    def reward(self, state: ProbeState, action: jax.Array) -> jax.Array:
        is_left = jnp.zeros(self.num_agents, bool).at[jnp.array([0, 3])].set(True)
        return jnp.where(is_left, self.scale * (action == 0), action == 1).astype(jnp.float32)
