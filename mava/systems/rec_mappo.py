"""Multi-agent PPO with recurrent networks (Yu et al. 2022, arXiv:2103.01955).

Each agent acts on all it has seen in an episode and learns with PPO (Schulman et al.
2017, arXiv:1707.06347) from a critic that sees the global state, once, and gives a value for each
agent. All agents share the actor. Both are trained on sequences in the order of time, each from the
memory with which it began. Run it with `python mava/systems/rec_mappo.py env=smax`; to change the
algorithm, copy this file and run the copy.

Axis letters: T rollout steps, E environments, N agents, O observation features, S state features,
A actions, L steps of a sequence, C sequences of a rollout (T = C L), B sequences of a minibatch.
H stands for whatever the state of a cell is: one array (GRU) or two (LSTM).
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.struct import PyTreeNode

from mava import experiment
from mava.networks import (
    RecurrentActor,
    RecurrentCritic,
    RecurrentTorso,
    ValueHead,
    make_action_head,
)
from mava.networks.groups import (
    Grouped,
    GroupedCentral,
    Groups,
    axes_of_memory_and_observation,
    grouped_optim,
    learning_rates,
    make_groups,
)
from mava.ops.chunks import to_sequences
from mava.ops.gae import gae
from mava.ops.map_where import map_where
from mava.types import Experience, Metrics, Observation, System
from mava.utils.parallel import pmean, reduce_metrics
from mava.wrappers.vector import VectorEnv


@dataclass(frozen=True, kw_only=True)
class Config:
    seed: int = 42
    total_timesteps: int | float | None = None  # environment steps in all; overrides num_updates
    num_updates: int = 1000  # rollouts followed by learning
    update_batch_size: int = 1  # replicas per device, each with environments of its own
    rollout_length: int = 128  # T
    recurrent_chunk_size: int | None = None  # L, steps of a training sequence; null: T
    ppo_epochs: int = 4  # passes over a rollout
    num_minibatches: int = 2  # per epoch; must divide the number of sequences, C * E
    actor_lr: float = 1e-3  # of Adam, > 0
    actor_lr_by_team: dict[str, float] = field(default_factory=dict)  # for teams with another one
    frozen_teams: list[str] = field(default_factory=list)  # whose parameters stay as they are
    critic_lr: float = 1e-3
    decay_learning_rates: bool = False  # linearly to 0 at the end of training
    gamma: float = 0.99  # discount factor, [0, 1]
    gae_lambda: float = 0.95  # [0, 1]
    clip_eps: float = 0.2  # epsilon of the clipped objective (eq. 7), > 0
    ent_coef: float = 0.01  # c2 (eq. 9)
    vf_coef: float = 0.5  # c1 (eq. 9)
    max_grad_norm: float = 0.5  # of actor and critic each, > 0
    add_agent_id: bool = True  # append a one-hot agent id to each view

    def __post_init__(self) -> None:
        for name in ("num_updates", "update_batch_size", "rollout_length", "ppo_epochs",
                     "num_minibatches"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        for name in ("actor_lr", "critic_lr", "clip_eps", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0.")
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be between 0 and 1.")
        if self.chunk_length < 1 or self.rollout_length % self.chunk_length:
            raise ValueError(
                f"recurrent_chunk_size={self.recurrent_chunk_size} must divide "
                f"rollout_length={self.rollout_length}."
            )
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must be between 0 and 2**32 - 1.")
        for name in ("ent_coef", "vf_coef"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative.")

    @property
    def chunk_length(self) -> int:  # L
        chunk_size = self.recurrent_chunk_size
        return self.rollout_length if chunk_size is None else chunk_size

    @property
    def num_chunks(self) -> int:  # C
        return self.rollout_length // self.chunk_length


class Params(NamedTuple):
    actor: Any
    critic: Any


class OptimStates(NamedTuple):
    actor: optax.OptState
    critic: optax.OptState


class Memory(NamedTuple):
    actor: Any
    critic: Any


class LearnerState(PyTreeNode, kw_only=True):
    params: Params
    optim_states: OptimStates


class ActorState(PyTreeNode, kw_only=True):
    key: jax.Array
    env_state: Any  # (E, ...)
    observation: Observation  # (E, ...)
    memory: Memory  # before the observation: actor (E, N, H), critic (E, H)


class Transition(PyTreeNode, kw_only=True):
    observation: Observation
    action: jax.Array  # (N, ...), as env.action_spec says
    log_prob: jax.Array  # (N,)
    reward: jax.Array  # (N,)
    discount: jax.Array  # (N,): 0 = terminated
    last: jax.Array  # (), bool: terminated or truncated
    next_observation: Observation  # the true successor, also where the episode was over
    extras: dict[str, Any]


class Sample(PyTreeNode, kw_only=True):
    observation: Observation
    action: jax.Array  # (N, ...), as env.action_spec says
    log_prob: jax.Array  # (N,)
    value: jax.Array  # (N,)
    advantage: jax.Array  # (N,), normalised
    target: jax.Array  # (N,)
    weight: jax.Array  # (N,): of its action; 0 for an agent out of the game. Each group has as much


class Algorithm(NamedTuple):
    """The fixed parts that every function below works with."""

    config: Config
    env: VectorEnv
    actor: Grouped  # of RecurrentActor
    critic: GroupedCentral  # of RecurrentCritic
    groups: Groups  # of agents that share parameters
    actor_optim: optax.GradientTransformation
    critic_optim: optax.GradientTransformation


flatten = partial(jax.tree.map, lambda x: x.reshape(-1, *x.shape[2:]))  # the first two axes


def step_policy(
    algo: Algorithm, actor_params: Any, memory: Any, observation: Observation
) -> tuple[Any, Any]:
    """Returns the memory after one step (E, N, H) and the policy of it, over (E, N)."""
    observations = jax.tree.map(lambda x: x[None], observation)  # T = 1
    result = algo.actor.apply(actor_params, memory, observations)
    return jax.tree.map(lambda x: x[0], result)


def values(
    algo: Algorithm, critic_params: Any, memory: Any, observation: Observation
) -> tuple[Any, jax.Array]:
    """Returns the memories after each step (T, E, H) and V of every agent (T, E, N), all from the
    global state.
    """
    start = observation.step_count == 0
    return algo.critic.apply(critic_params, memory, observation.global_state, start)


def rollout(
    algo: Algorithm, params: Params, actor_state: ActorState
) -> tuple[ActorState, Any, Transition]:
    """Returns the actor state after the rollout, in which the critic's memory is still the old one,
    the actor's memory at the start of each chunk (C, E, N, H), and a trajectory (T, E, ...).
    """
    key, steps_key = jax.random.split(actor_state.key)

    def step(carry: tuple[Any, Observation, Any], keys: jax.Array) -> tuple[Any, Transition]:
        env_state, observation, memory = carry
        action_key, env_key = keys
        memory, policy = step_policy(algo, params.actor, memory, observation)
        action = policy.sample(action_key)
        env_state, timestep = algo.env.step(env_state, action, env_key)
        extras = dict(timestep.extras)
        transition = Transition(
            observation=observation,
            action=action,
            log_prob=policy.log_prob(action),
            reward=timestep.reward,
            discount=timestep.discount,
            last=timestep.last(),
            next_observation=extras.pop("next_observation"),
            extras=extras,
        )
        return (env_state, timestep.observation, memory), transition

    def chunk(
        carry: tuple[Any, Observation, Any], keys: jax.Array
    ) -> tuple[Any, tuple[Any, Transition]]:
        _, _, memory = carry
        carry, transitions = jax.lax.scan(step, carry, keys)
        return carry, (memory, transitions)

    config = algo.config
    keys = jax.random.split(steps_key, (config.num_chunks, config.chunk_length, 2))
    (env_state, observation, memory), (chunk_memories, trajectory) = jax.lax.scan(
        chunk, (actor_state.env_state, actor_state.observation, actor_state.memory.actor), keys
    )
    actor_state = ActorState(
        key=key,
        env_state=env_state,
        observation=observation,
        memory=actor_state.memory._replace(actor=memory),
    )
    return actor_state, chunk_memories, flatten(trajectory)


def next_values(
    algo: Algorithm, critic_params: Any, memories: Any, value: jax.Array, trajectory: Transition
) -> jax.Array:
    """Returns V of every step's true successor (T, E, N), from the memories after each step
    (T, E, H) and V of the steps themselves (T, E, N).
    """
    # The successor's value is the next step's, but at the end of the rollout and where an episode
    # was cut by the time limit: there the memory after the step is applied to the successor.
    next_value = jnp.concatenate([value[1:], value[-1:]])  # the last ones only hold the place
    truncated = trajectory.last & jnp.any(trajectory.discount > 0, axis=-1)  # (T, E)

    def value_of_successor(rows: tuple[Any, Observation]) -> jax.Array:
        memory, observation = rows
        observations = jax.tree.map(lambda x: x[None], observation)
        return values(algo, critic_params, memory, observations)[1][0]

    return map_where(
        value_of_successor,
        truncated.at[-1].set(True).reshape(-1),
        flatten((memories, trajectory.next_observation)),
        flatten(next_value),
        chunk_size=algo.env.num_envs,
    ).reshape(value.shape)


def make_samples(
    algo: Algorithm, params: Params, memory: Any, trajectory: Transition
) -> tuple[Any, Any, Sample]:
    """Returns the critic's memory after the rollout (E, H) and at the start of each chunk
    (C, E, H), and samples (T, E, ...), advantages normalised over all of them.

    Args:
        algo: the fixed parts.
        params: with which the trajectory was made.
        memory: of the critic at the start of the rollout, (E, H).
        trajectory: (T, E, ...).
    """
    memories, value = values(algo, params.critic, memory, trajectory.observation)
    next_value = next_values(algo, params.critic, memories, value, trajectory)
    advantage, target = gae(
        trajectory.reward,
        trajectory.discount,
        trajectory.last,
        value,
        next_value,
        algo.config.gamma,
        algo.config.gae_lambda,
    )
    in_game = trajectory.observation.agent_mask.astype(value.dtype)  # (T, E, N)
    mean_of = algo.groups.mean  # over each agent's group
    weight = in_game / jnp.maximum(pmean(mean_of(in_game)), 1e-6)  # all of them may be out
    mean = pmean(mean_of(weight * advantage))  # (N,)
    variance = pmean(mean_of(weight * (advantage - mean) ** 2))
    sample = Sample(
        observation=trajectory.observation,
        action=trajectory.action,
        log_prob=trajectory.log_prob,
        value=value,
        advantage=(advantage - mean) / (jnp.sqrt(variance) + 1e-8),
        target=target,
        weight=weight * algo.groups.weights,
    )
    last_memory = jax.tree.map(lambda x: x[-1], memories)
    memories = jax.tree.map(lambda x, after: jnp.concatenate([x[None], after]), memory, memories)
    chunk_memories = jax.tree.map(lambda x: x[: -1 : algo.config.chunk_length], memories)
    return last_memory, chunk_memories, sample


def actor_loss(
    actor_params: Any, algo: Algorithm, memory: Any, sample: Sample, key: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the negated clipped objective (eq. 7) and entropy bonus (eq. 9), and metrics."""
    _, policy = algo.actor.apply(actor_params, memory, sample.observation)
    log_ratio = policy.log_prob(sample.action) - sample.log_prob  # (L, B, N)
    ratio = jnp.exp(log_ratio)
    clip_eps = algo.config.clip_eps
    clipped_ratio = jnp.clip(ratio, 1 - clip_eps, 1 + clip_eps)
    objective = jnp.minimum(ratio * sample.advantage, clipped_ratio * sample.advantage)
    entropy = jnp.mean(sample.weight * policy.entropy(key))
    loss = -jnp.mean(sample.weight * objective) - algo.config.ent_coef * entropy
    metrics = {
        "actor_loss": loss,
        "entropy": entropy,
        "approx_kl": jnp.mean(sample.weight * (ratio - 1 - log_ratio)),
        "clip_fraction": jnp.mean(sample.weight * (jnp.abs(ratio - 1) > clip_eps)),
    }
    return loss, metrics


def critic_loss(critic_params: Any, algo: Algorithm, memory: Any, sample: Sample) -> jax.Array:
    """Returns half the squared error to the targets, times vf_coef. A value that moves by more than
    clip_eps gains nothing by it (as in PPO's reference code; not in the paper). An agent out of the
    game counts, too: the values from before it left bootstrap from those after.
    """
    _, value = values(algo, critic_params, memory, sample.observation)  # (L, B, N)
    clip_eps = algo.config.clip_eps
    clipped_value = sample.value + jnp.clip(value - sample.value, -clip_eps, clip_eps)
    errors = jnp.maximum((value - sample.target) ** 2, (clipped_value - sample.target) ** 2)
    return algo.config.vf_coef * 0.5 * jnp.mean(algo.groups.weights * errors)


def learn(
    algo: Algorithm, learner_state: LearnerState, memories: Memory, samples: Sample, key: jax.Array
) -> tuple[LearnerState, dict[str, jax.Array]]:
    """Returns the state after all epochs and the metrics of each minibatch, (epochs * M,).

    Args:
        algo: the fixed parts.
        learner_state: before learning.
        memories: at the start of each sequence, (C * E, ...).
        samples: (L, C * E, ...).
        key: of the shuffles and of what is drawn to estimate entropies.
    """
    config = algo.config
    num_sequences = config.num_chunks * algo.env.num_envs
    keys = jax.random.split(key, 1 + config.ppo_epochs * config.num_minibatches)
    # One sort per epoch shuffles as well as jax.random.permutation, which sorts twice.
    order = jnp.argsort(jax.random.bits(keys[0], (config.ppo_epochs, num_sequences)), axis=-1)

    def learn_minibatch(
        state: LearnerState, xs: tuple[jax.Array, jax.Array]
    ) -> tuple[LearnerState, dict[str, jax.Array]]:
        rows, key = xs
        memory = jax.tree.map(lambda x: x[rows], memories)
        sample = jax.tree.map(lambda x: x[:, rows], samples)
        (_, metrics), actor_grads = jax.value_and_grad(actor_loss, has_aux=True)(
            state.params.actor, algo, memory.actor, sample, key
        )
        value_loss, critic_grads = jax.value_and_grad(critic_loss)(
            state.params.critic, algo, memory.critic, sample
        )
        actor_grads, critic_grads = pmean((actor_grads, critic_grads))
        actor_updates, actor_optim_state = algo.actor_optim.update(
            actor_grads, state.optim_states.actor
        )
        critic_updates, critic_optim_state = algo.critic_optim.update(
            critic_grads, state.optim_states.critic
        )
        params = Params(
            actor=optax.apply_updates(state.params.actor, actor_updates),
            critic=optax.apply_updates(state.params.critic, critic_updates),
        )
        metrics = {
            **metrics,
            "value_loss": value_loss,
            "actor_grad_norm": optax.tree.norm(actor_grads),
            "critic_grad_norm": optax.tree.norm(critic_grads),
        }
        optim_states = OptimStates(actor=actor_optim_state, critic=critic_optim_state)
        return LearnerState(params=params, optim_states=optim_states), metrics

    rows = order.reshape(config.ppo_epochs * config.num_minibatches, -1)
    return jax.lax.scan(learn_minibatch, learner_state, (rows, keys[1:]))


def update(
    algo: Algorithm, learner_state: LearnerState, actor_state: ActorState
) -> tuple[LearnerState, ActorState, Metrics, Experience]:
    """One rollout, then PPO's epochs over it."""
    params, critic_memory = learner_state.params, actor_state.memory.critic
    actor_state, actor_memories, trajectory = rollout(algo, params, actor_state)
    critic_memory, critic_memories, samples = make_samples(algo, params, critic_memory, trajectory)
    memories = flatten(Memory(actor=actor_memories, critic=critic_memories))
    samples = to_sequences(samples, algo.config.num_chunks)
    key, learn_key = jax.random.split(actor_state.key)
    learner_state, learn_metrics = learn(algo, learner_state, memories, samples, learn_key)
    actor_state = actor_state.replace(
        key=key, memory=actor_state.memory._replace(critic=critic_memory)
    )
    metrics = reduce_metrics(
        trajectory.extras,
        trajectory.last,
        {name: (jnp.sum(x), jnp.float32(x.size)) for name, x in learn_metrics.items()},
    )
    experience = Experience(
        observation=trajectory.observation,
        action=trajectory.action,
        reward=trajectory.reward,
        discount=trajectory.discount,
        last=trajectory.last,
    )
    return learner_state, actor_state, metrics, experience


def init(algo: Algorithm, key: jax.Array) -> LearnerState:
    """Returns fresh parameters and optimiser states."""
    actor_key, critic_key = jax.random.split(key)
    spec = algo.env.observation_spec
    observation = jax.tree.map(lambda x: jnp.zeros((1, 1, *x.shape), x.dtype), spec)  # T, E = 1
    memory = init_memory(algo, 1)
    start = observation.step_count == 0
    params = Params(
        actor=algo.actor.init(actor_key, memory.actor, observation),
        critic=algo.critic.init(critic_key, memory.critic, observation.global_state, start),
    )
    optim_states = OptimStates(
        actor=algo.actor_optim.init(params.actor), critic=algo.critic_optim.init(params.critic)
    )
    return LearnerState(params=params, optim_states=optim_states)


def init_memory(algo: Algorithm, num_envs: int) -> Memory:
    """Returns the memory at the start of an episode."""
    return Memory(
        actor=algo.actor.network.torso.init_memory(num_envs, algo.env.num_agents),
        critic=algo.critic.network.torso.init_memory(num_envs, *algo.critic.memory_axes),
    )


def reset(algo: Algorithm, key: jax.Array) -> ActorState:
    """Returns a stream of experience at its start."""
    key, env_key = jax.random.split(key)
    env_state, timestep = algo.env.reset(env_key)
    return ActorState(
        key=key,
        env_state=env_state,
        observation=timestep.observation,
        memory=init_memory(algo, algo.env.num_envs),
    )


def act(
    algo: Algorithm,
    actor_params: Any,
    observation: Observation,
    memory: Any,
    key: jax.Array,
    greedy: bool,
) -> tuple[jax.Array, Any]:
    """Returns actions (E, N, ...), the likeliest if greedy, else sampled, and the memory after."""
    memory, policy = step_policy(algo, actor_params, memory, observation)
    return (policy.mode() if greedy else policy.sample(key)), memory


def make_optim(config: Config, learning_rate: float) -> optax.GradientTransformation:
    """Returns Adam after clipping, with the learning rate falling to 0 if asked for."""
    steps = config.num_updates * config.ppo_epochs * config.num_minibatches
    schedule = optax.linear_schedule(learning_rate, 0.0, steps)
    adam = optax.adam(schedule if config.decay_learning_rates else learning_rate, eps=1e-5)
    # As one vector: less to compile than with an Adam for each of the parameters' arrays.
    return optax.flatten(optax.chain(optax.clip_by_global_norm(config.max_grad_norm), adam))


def make_torso(network: dict[str, Any]) -> RecurrentTorso:
    """Returns the torso that a network config describes."""
    return RecurrentTorso(
        pre_torso=network["pre_torso"], cell=network["cell"], post_torso=network["post_torso"]
    )


def make_system(
    env: VectorEnv, networks: dict[str, Any], config: Config
) -> System[LearnerState, ActorState]:
    """Returns the system; raises ValueError where the config does not fit the environment."""
    if config.num_chunks * env.num_envs % config.num_minibatches:
        raise ValueError(
            f"num_minibatches={config.num_minibatches} must divide num_envs * rollout_length / "
            f"recurrent_chunk_size = {config.num_chunks * env.num_envs}, the number of sequences."
        )
    groups = make_groups(networks.get("policies", "shared"), env.teams, env.num_agents)
    actor_lrs = learning_rates(
        groups, config.actor_lr, config.actor_lr_by_team, config.frozen_teams
    )
    critic_lrs = learning_rates(groups, config.critic_lr, {}, config.frozen_teams)
    actor = RecurrentActor(
        torso=make_torso(networks["actor_network"]), head=make_action_head(env.action_spec)
    )
    critic = RecurrentCritic(
        torso=make_torso(networks["critic_network"]), head=ValueHead(env.num_agents)
    )
    actors = Grouped(actor, groups, axes_of_memory_and_observation)
    critics = GroupedCentral(critic, groups)
    algo = Algorithm(
        config=config,
        env=env,
        actor=actors,
        critic=critics,
        groups=groups,
        actor_optim=grouped_optim(partial(make_optim, config), actor_lrs, actors),
        critic_optim=grouped_optim(partial(make_optim, config), critic_lrs, critics),
    )
    return System(
        init=partial(init, algo),
        reset=partial(reset, algo),
        update=partial(update, algo),
        act=partial(act, algo),
        init_memory=lambda num_envs: init_memory(algo, num_envs).actor,
        act_params=lambda learner_state: learner_state.params.actor,
        steps_per_update=config.rollout_length * env.num_envs,
    )


if __name__ == "__main__":
    experiment.main(__file__, network="rnn")
