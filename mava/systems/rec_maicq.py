"""MAICQ: implicit constraint Q-learning for many agents, offline (Yang et al. 2021,
arXiv:2106.03400).

Learns from a vault alone. A critic values each agent's actions; a mixer makes the team's value of
them, a sum with weights that the global state decides. Values learn from the actions that the data
took next, weighted towards the better ones: never from an action that is not in the data. Policies
imitate the data's actions, weighted by how much better they are than what the policy would do. All
agents share the networks. Run it with `python mava/systems/rec_maicq.py vault=<path>`; to change
the algorithm, copy this file and run the copy.

Axis letters: T steps of the vault, L steps of a sequence, B sequences, E environments, N agents,
O observation features, S state features, A actions. H stands for whatever the state of a cell is:
one array (GRU) or two (LSTM).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.struct import PyTreeNode

from mava import experiment
from mava.networks import (
    CategoricalHead,
    RecurrentActor,
    RecurrentCritic,
    RecurrentTorso,
    ValueHead,
)
from mava.ops.chunks import sample_sequences
from mava.types import Discrete, Experience, Metrics, Observation, System
from mava.utils.parallel import pmax, pmean
from mava.wrappers.vector import VectorEnv


@dataclass(frozen=True, kw_only=True)
class Config:
    seed: int = 42
    num_updates: int = 20_000  # gradient steps
    update_batch_size: int = 1  # replicas per device; a batch is shared out among all of them
    batch_size: int = 64  # sequences in a batch, over devices and replicas
    sequence_length: int = 20  # L, steps of a sequence; the last one is only a successor
    actor_lr: float = 5e-4  # of Adam, > 0
    critic_lr: float = 1e-3
    gamma: float = 0.99  # discount factor, [0, 1]
    td_lambda: float = 0.8  # lambda of the targets, [0, 1]; 0: from one step to the next
    tau: float = 0.005  # by which the targets move towards critic and mixer, (0, 1]
    policy_temperature: float = 0.02  # alpha of the policies' weights, > 0; large: all are 1
    value_temperature: float = 1000.0  # alpha of the targets' weights, > 0
    max_grad_norm: float = 10.0  # of policies, and of critic and mixer, > 0
    add_agent_id: bool = True  # append a one-hot agent id to each view

    def __post_init__(self) -> None:
        for name in ("num_updates", "update_batch_size", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.sequence_length < 2:
            raise ValueError(f"sequence_length={self.sequence_length} must be at least 2.")
        for name in ("actor_lr", "critic_lr", "policy_temperature", "value_temperature",
                     "max_grad_norm"):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0.")
        for name in ("gamma", "td_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be between 0 and 1.")
        if not 0 < self.tau <= 1:
            raise ValueError(f"tau={self.tau} must be above 0 and at most 1.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must be between 0 and 2**32 - 1.")


class CriticParams(NamedTuple):
    critic: Any
    mixer: Any


class Params(NamedTuple):
    actor: Any
    critic: CriticParams
    target: CriticParams


class OptimStates(NamedTuple):
    actor: optax.OptState
    critic: optax.OptState


class LearnerState(PyTreeNode, kw_only=True):
    params: Params
    optim_states: OptimStates


class ActorState(PyTreeNode, kw_only=True):
    key: jax.Array  # of the sequences drawn


class Algorithm(NamedTuple):
    """The fixed parts that every function below works with."""

    config: Config
    env: VectorEnv
    actor: Any  # RecurrentActor
    critic: Any  # RecurrentCritic
    mixer: Any  # LinearMixer
    actor_optim: optax.GradientTransformation
    critic_optim: optax.GradientTransformation


def values(
    algo: Algorithm, params: CriticParams, batch: Experience
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns Q of every agent's actions (L, B, N, A), of the team (L, B), and the mixer's weights
    (L, B, N), for the actions taken.
    """
    observation = batch.observation
    memory = algo.critic.torso.init_memory(batch.last.shape[1], algo.env.num_agents)
    start = observation.step_count == 0
    _, value = algo.critic.apply(params.critic, memory, observation.agents_view, start)
    assert observation.global_state is not None
    state = observation.global_state.reshape(*batch.last.shape, -1)
    team_value, weights = algo.mixer.apply(params.mixer, taken(value, batch.action), state)
    return value, team_value, weights


def taken(x: jax.Array, action: jax.Array) -> jax.Array:
    """Returns the entries of x (..., A) at the actions (...)."""
    return jnp.take_along_axis(x, action[..., None], axis=-1)[..., 0]


def softmax_weights(x: jax.Array) -> jax.Array:
    """Returns exp(x), scaled to 1 on average over the batch on all devices and replicas.

    Args:
        x: (L, B, ...); further axes are scaled each for themselves.
    """
    x = jax.lax.stop_gradient(x)
    exp = jnp.exp(x - pmax(jnp.max(x, axis=(0, 1))))
    return exp / pmean(jnp.mean(exp, axis=(0, 1)))


def targets(algo: Algorithm, params: Params, batch: Experience) -> tuple[jax.Array, jax.Array]:
    """Returns what the team's values are to become (L - 1, B), and where that is known: TD(lambda).

    The value of the next step is that of the action which the data took there; its weight stands
    for the policy that the data allows. Where an episode was cut, no successor is known.
    """
    config = algo.config
    _, team_value, _ = values(algo, params.target, batch)
    next_value = team_value[1:] * softmax_weights(team_value[1:] / config.value_temperature)
    discount = config.gamma * jnp.max(batch.discount[:-1], axis=-1)  # 0 where all have ended
    reward = jnp.mean(batch.reward[:-1], axis=-1)
    known = ~batch.last[:-1] | (jnp.max(batch.discount[:-1], axis=-1) == 0)

    def backwards(after: jax.Array, step: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        reward, discount, next_value, value, known = step
        mixed = (1 - config.td_lambda) * next_value + config.td_lambda * after
        target = reward + discount * mixed
        return jnp.where(known, target, value), target

    own_value = jnp.concatenate([team_value[:1], next_value[:-1]])
    steps = (reward, discount, next_value, own_value, known)
    _, target = jax.lax.scan(backwards, next_value[-1], steps, reverse=True)
    return target, known.astype(reward.dtype)


def critic_loss(
    critic_params: CriticParams,
    algo: Algorithm,
    batch: Experience,
    target: jax.Array,
    known: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns the mean squared error of the team's values, and every agent's (L, B, N, A) with the
    mixer's weights (L, B, N).
    """
    value, team_value, weights = values(algo, critic_params, batch)
    weight = known / jnp.maximum(pmean(jnp.mean(known)), 1e-6)
    return jnp.mean(weight * (team_value[:-1] - target) ** 2), (value, weights)


def actor_loss(
    actor_params: Any, algo: Algorithm, batch: Experience, value: jax.Array, weights: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the weighted cross entropy to the data's actions, and metrics.

    Args:
        actor_params: to learn.
        algo: the fixed parts.
        batch: (L, B, ...).
        value: Q of each agent's actions, (L, B, N, A).
        weights: the mixer's, (L, B, N).
    """
    memory = algo.actor.torso.init_memory(batch.last.shape[1], algo.env.num_agents)
    _, policy = algo.actor.apply(actor_params, memory, batch.observation)
    log_prob = policy.log_prob(batch.action)
    expected = jnp.sum(jnp.exp(policy.log_probs) * value, axis=-1)
    advantage = weights * (taken(value, batch.action) - expected)  # in units of the team's value
    imitate = softmax_weights(advantage / algo.config.policy_temperature)
    loss = -jnp.mean(imitate * log_prob)
    metrics = {
        "actor_loss": loss,
        "log_prob": jnp.mean(log_prob),
        "entropy": jnp.mean(policy.entropy()),
        "max_weight": jnp.max(imitate),
    }
    return loss, metrics


def update(
    algo: Algorithm, learner_state: LearnerState, actor_state: ActorState, experience: Experience
) -> tuple[LearnerState, ActorState, Metrics, None]:
    """One gradient step of critic and mixer, then of the policies, on sequences of the vault."""
    config, params = algo.config, learner_state.params
    key, sample_key = jax.random.split(actor_state.key)
    num_sequences = config.batch_size // algo.env.num_streams
    batch = sample_sequences(sample_key, experience, num_sequences, config.sequence_length)

    target, known = targets(algo, params, batch)
    (value_loss, (value, weights)), critic_grads = jax.value_and_grad(critic_loss, has_aux=True)(
        params.critic, algo, batch, target, known
    )
    (_, metrics), actor_grads = jax.value_and_grad(actor_loss, has_aux=True)(
        params.actor, algo, batch, value, weights
    )
    actor_grads, critic_grads = pmean((actor_grads, critic_grads))
    actor_updates, actor_optim_state = algo.actor_optim.update(
        actor_grads, learner_state.optim_states.actor
    )
    critic_updates, critic_optim_state = algo.critic_optim.update(
        critic_grads, learner_state.optim_states.critic
    )
    critic = optax.apply_updates(params.critic, critic_updates)
    params = Params(
        actor=optax.apply_updates(params.actor, actor_updates),
        critic=critic,
        target=optax.incremental_update(critic, params.target, config.tau),
    )
    metrics = pmean(
        {
            **metrics,
            "value_loss": value_loss,
            "value": jnp.mean(taken(value, batch.action)),
            "target": jnp.mean(known * target) / jnp.maximum(pmean(jnp.mean(known)), 1e-6),
            "actor_grad_norm": optax.tree.norm(actor_grads),
            "critic_grad_norm": optax.tree.norm(critic_grads),
        }
    )
    learner_state = LearnerState(
        params=params,
        optim_states=OptimStates(actor=actor_optim_state, critic=critic_optim_state),
    )
    learn = {name: (x, jnp.float32(1)) for name, x in metrics.items()}
    return learner_state, ActorState(key=key), Metrics(episodes={}, learn=learn), None


def init(algo: Algorithm, key: jax.Array) -> LearnerState:
    """Returns fresh parameters and optimiser states."""
    actor_key, critic_key, mixer_key = jax.random.split(key, 3)
    spec = algo.env.observation_spec
    observation = jax.tree.map(lambda x: jnp.zeros((1, 1, *x.shape), x.dtype), spec)  # L, B = 1
    memory = algo.critic.torso.init_memory(1, algo.env.num_agents)
    start = observation.step_count == 0
    critic = CriticParams(
        critic=algo.critic.init(critic_key, memory, observation.agents_view, start),
        mixer=algo.mixer.init(
            mixer_key,
            jnp.zeros((1, 1, algo.env.num_agents)),
            observation.global_state.reshape(1, 1, -1),
        ),
    )
    memory = algo.actor.torso.init_memory(1, algo.env.num_agents)
    params = Params(
        actor=algo.actor.init(actor_key, memory, observation), critic=critic, target=critic
    )
    optim_states = OptimStates(
        actor=algo.actor_optim.init(params.actor), critic=algo.critic_optim.init(critic)
    )
    return LearnerState(params=params, optim_states=optim_states)


def act(
    algo: Algorithm,
    actor_params: Any,
    observation: Observation,
    memory: Any,
    key: jax.Array,
    greedy: bool,
) -> tuple[jax.Array, Any]:
    """Returns actions (E, N), the likeliest if greedy, else sampled, and the memory after."""
    observations = jax.tree.map(lambda x: x[None], observation)  # L = 1
    memories, policy = algo.actor.apply(actor_params, memory, observations)
    memory, policy = jax.tree.map(lambda x: x[0], (memories, policy))
    return (policy.mode() if greedy else policy.sample(key)), memory


def make_optim(config: Config, learning_rate: float) -> optax.GradientTransformation:
    """Returns Adam after clipping."""
    clip = optax.clip_by_global_norm(config.max_grad_norm)
    # As one vector: less to compile than with an Adam for each of the parameters' arrays.
    return optax.flatten(optax.chain(clip, optax.adam(learning_rate)))


def make_torso(network: dict[str, Any]) -> RecurrentTorso:
    """Returns the torso that a network config describes."""
    return RecurrentTorso(
        pre_torso=network["pre_torso"], cell=network["cell"], post_torso=network["post_torso"]
    )


def make_system(
    env: VectorEnv, networks: dict[str, Any], config: Config
) -> System[LearnerState, ActorState]:
    """Returns the system; raises ValueError where the config does not fit the environment."""
    if not isinstance(env.action_spec, Discrete):
        raise ValueError("rec_maicq needs an environment with one discrete action for each agent.")
    if config.batch_size % env.num_streams:
        raise ValueError(
            f"batch_size={config.batch_size} must be divisible by the number of devices and "
            f"replicas, {env.num_streams}."
        )
    num_actions = env.action_spec.num_actions
    algo = Algorithm(
        config=config,
        env=env,
        actor=RecurrentActor(
            torso=make_torso(networks["actor_network"]), head=CategoricalHead(num_actions)
        ),
        critic=RecurrentCritic(
            torso=make_torso(networks["critic_network"]), head=ValueHead(num_actions)
        ),
        mixer=networks["mixing_network"]["mixer"],
        actor_optim=make_optim(config, config.actor_lr),
        critic_optim=make_optim(config, config.critic_lr),
    )
    return System(
        init=partial(init, algo),
        reset=lambda key: ActorState(key=key),
        update=partial(update, algo),
        act=partial(act, algo),
        init_memory=lambda num_envs: algo.actor.torso.init_memory(num_envs, env.num_agents),
        act_params=lambda learner_state: learner_state.params.actor,
        steps_per_update=1,
        offline=True,
    )


if __name__ == "__main__":
    experiment.main(__file__, network="maicq")
