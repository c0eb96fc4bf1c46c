"""Multi-Actor-Attention-Critic (Iqbal & Sha 2019, arXiv:1810.02912), off-policy.

Each agent has a policy of its own on its own view. They learn from one critic in which every agent
attends to what the others see and do, and that gives the values of all of an agent's actions, from
transitions replayed from a buffer on the device. Run it with
`python mava/systems/ff_maac.py env=rover_tower`; to change the algorithm, copy this file and run
the copy. Where the paper's code and the paper differ, this is the code.

Axis letters: T rollout steps, E environments, N agents, O observation features, A actions,
G gradient steps, B sampled transitions, P policies (N or 1), H heads, K rollouts in the buffer.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import flashbax
import jax
import jax.numpy as jnp
import optax
from flax.struct import PyTreeNode

from mava import experiment
from mava.networks.distributions import Categorical
from mava.types import Discrete, Experience, Metrics, Observation, System
from mava.utils.parallel import everywhere, pmean, reduce_metrics
from mava.wrappers.base import action_sizes, view_sizes
from mava.wrappers.vector import VectorEnv


@dataclass(frozen=True, kw_only=True)
class Config:
    seed: int = 42
    total_timesteps: int | float | None = None  # environment steps in all; overrides num_updates
    num_updates: int = 13_000  # rollouts followed by learning
    update_batch_size: int = 1  # replicas per device, each with environments of its own
    rollout_length: int = 8  # T
    num_gradient_steps: int = 4  # G: in an update, once the buffer holds a batch
    batch_size: int = 1024  # transitions of a gradient step, over all devices and replicas
    # Parts of a batch that go through the critic one after the other: what is between its layers
    # stays in the cache of a CPU. With 1, on an accelerator, a lagged critic's work is shared.
    num_chunks: int = 4
    # Transitions kept, over all devices and replicas; whole rollouts, so it may be a bit fewer.
    buffer_size: int = 1_000_000
    actor_lr: float = 1e-3  # of Adam, > 0
    critic_lr: float = 1e-3
    critic_weight_decay: float = 1e-3  # added to Adam's gradients, times the parameters
    gamma: float = 0.99  # discount factor, [0, 1]
    tau: float = 1e-3  # step of the target networks towards the learnt ones, (0, 1]
    reward_scale: float = 100.0  # 1 / temperature of the entropy, 1 / alpha (eq. 7), > 0
    attention_coef: float = 1e-3  # of the squared logits of the attention
    logit_coef: float = 1e-3  # of the squared logits of the policies
    actor_max_grad_norm: float = 0.5  # of each policy, > 0
    critic_max_grad_norm: float = 10.0  # times N, > 0
    # The policies learn from the critic as it was before the gradient step, not after it: the two
    # don't wait for each other and share part of the work.
    lagged_critic: bool = False
    # An update learns from the buffer as it was before its own rollout: likewise.
    overlap_collection: bool = False
    add_agent_id: bool = False  # append a one-hot agent id to each view

    def __post_init__(self) -> None:
        for name in ("num_updates", "update_batch_size", "rollout_length", "num_gradient_steps",
                     "batch_size", "num_chunks", "buffer_size"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        for name in ("actor_lr", "critic_lr", "tau", "reward_scale", "actor_max_grad_norm",
                     "critic_max_grad_norm"):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0.")
        for name in ("gamma", "tau"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be between 0 and 1.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must be between 0 and 2**32 - 1.")
        for name in ("critic_weight_decay", "attention_coef", "logit_coef"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative.")


class Statistics(NamedTuple):
    """Of the features of views or actions."""

    mean: jax.Array  # (N, O); of views that a single policy sees, (1, O)
    variance: jax.Array


class Networks(NamedTuple):
    actor: Any  # of P policies
    critic: Any


class Params(NamedTuple):
    online: Networks
    target: Networks
    statistics: Statistics  # running, of the views that the policies act on


class OptimStates(NamedTuple):
    actor: optax.OptState
    critic: optax.OptState


class LearnerState(PyTreeNode, kw_only=True):
    params: Params
    optim_states: OptimStates


class Sample(PyTreeNode, kw_only=True):
    """What learning needs of a step, and all that the buffer holds."""

    view: jax.Array  # (N, O)
    next_view: jax.Array  # (N, O): of the true successor, also where the episode was over
    action: jax.Array  # (N,), int32
    action_mask: jax.Array  # (N, A), bool
    next_action_mask: jax.Array  # (N, A), bool
    agent_mask: jax.Array  # (N,), bool
    reward: jax.Array  # (N,)
    discount: jax.Array  # (N,): 0 = terminated


class Replay(PyTreeNode, kw_only=True):
    samples: Any  # Flashbax's state
    reward_mean: jax.Array  # (K, N): over each rollout
    reward_variance: jax.Array  # (K, N): over each rollout
    num_rollouts: jax.Array  # (), int32: that are in it


class ActorState(PyTreeNode, kw_only=True):
    key: jax.Array
    env_state: Any  # (E, ...)
    observation: Observation  # (E, ...)
    buffer: Replay


class Transition(PyTreeNode, kw_only=True):
    observation: Observation
    action: jax.Array  # (N,), int32
    reward: jax.Array  # (N,)
    discount: jax.Array  # (N,): 0 = terminated
    last: jax.Array  # (), bool: terminated or truncated
    next_observation: Observation  # the true successor, also where the episode was over
    extras: dict[str, Any]


class Algorithm(NamedTuple):
    """The fixed parts that every function below works with."""

    config: Config
    env: VectorEnv
    actor: Any  # StackedMLP
    critic: Any  # AttentionCritic
    actor_optim: optax.GradientTransformation
    critic_optim: optax.GradientTransformation
    buffer: Any  # Flashbax's


def statistics(x: jax.Array, num_networks: int) -> Statistics:
    """Returns mean and variance over the batch of features (B, N, F), on all devices and replicas;
    over the agents too if they share one network.
    """
    axes = 0 if num_networks > 1 else (0, 1)
    mean = pmean(jnp.mean(x, axis=axes))
    variance = pmean(jnp.mean((x - mean) ** 2, axis=axes))
    return Statistics(*(y.reshape(num_networks, -1) for y in (mean, variance)))


def normalise(x: jax.Array, of: Statistics) -> jax.Array:
    """Returns features (..., N, F) less their mean, over their standard deviation. What never
    changes becomes 0, such as padding.
    """
    return (x - of.mean) * jax.lax.rsqrt(of.variance + 1e-5)


def policies(
    algo: Algorithm, actor_params: Any, views: jax.Array, action_mask: jax.Array
) -> tuple[Categorical, jax.Array]:
    """Returns the policies and their logits (..., N, A) for normalised views (..., N, O)."""
    logits = algo.actor.apply(actor_params, views)
    return Categorical.masked(logits, action_mask), logits


def one_hot(algo: Algorithm, action: jax.Array) -> jax.Array:
    """Returns actions (B, N) as the critic sees them: one-hot and normalised, (B, N, A)."""
    actions = jax.nn.one_hot(action, algo.actor.num_actions)
    return normalise(actions, statistics(actions, algo.env.num_agents))


def in_chunks(algo: Algorithm, batch: Any) -> Any:
    """Returns arrays (B, ...) as (num_chunks, B / num_chunks, ...)."""
    num_chunks = algo.config.num_chunks
    return jax.tree.map(lambda x: x.reshape(num_chunks, -1, *x.shape[1:]), batch)


def values(algo: Algorithm, critic_params: Any, views: jax.Array, action: jax.Array) -> jax.Array:
    """Returns Q of all that each agent could do (B, N, A), given the others' actions (B, N) and
    normalised views (B, N, O).
    """
    chunks = in_chunks(algo, (views, one_hot(algo, action)))
    of_chunks = jax.lax.map(lambda x: algo.critic.apply(critic_params, *x)[0], chunks)
    return of_chunks.reshape(*action.shape, -1)


def of_action(values: jax.Array, action: jax.Array) -> jax.Array:
    """Returns those of the values (B, N, A) that belong to actions (B, N)."""
    return jnp.take_along_axis(values, action[..., None], axis=-1)[..., 0]


def rollout(
    algo: Algorithm, params: Params, actor_state: ActorState, key: jax.Array
) -> tuple[ActorState, Transition]:
    """Returns the advanced actor state and a trajectory (T, E, ...)."""

    def step(carry: tuple[Any, Observation], keys: jax.Array) -> tuple[Any, Transition]:
        env_state, observation = carry
        action_key, env_key = keys
        views = normalise(observation.agents_view, params.statistics)
        policy, _ = policies(algo, params.online.actor, views, observation.action_mask)
        action = policy.sample(action_key)
        env_state, timestep = algo.env.step(env_state, action, env_key)
        extras = dict(timestep.extras)
        transition = Transition(
            observation=observation,
            action=action,
            reward=timestep.reward,
            discount=timestep.discount,
            last=timestep.last(),
            next_observation=extras.pop("next_observation"),
            extras=extras,
        )
        return (env_state, timestep.observation), transition

    (env_state, observation), trajectory = jax.lax.scan(
        step,
        (actor_state.env_state, actor_state.observation),
        jax.random.split(key, (algo.config.rollout_length, 2)),
    )
    return actor_state.replace(env_state=env_state, observation=observation), trajectory


def store(algo: Algorithm, replay: Replay, trajectory: Transition) -> Replay:
    """Returns the buffer with a trajectory (T, E, ...) in it, in place of the oldest if it is full.
    Mean and variance of the rewards are kept for each rollout: nothing is summed up and taken away
    again for ever, and nobody has to read the whole buffer.
    """
    samples = Sample(
        view=trajectory.observation.agents_view,
        next_view=trajectory.next_observation.agents_view,
        action=trajectory.action,
        action_mask=trajectory.observation.action_mask,
        next_action_mask=trajectory.next_observation.action_mask,
        agent_mask=trajectory.observation.agent_mask,
        reward=trajectory.reward,
        discount=trajectory.discount,
    )
    reward = trajectory.reward  # (T, E, N)
    capacity = len(replay.reward_mean)
    row = replay.samples.current_index // (algo.config.rollout_length * algo.env.num_envs)
    return Replay(
        samples=algo.buffer.add(replay.samples, samples),
        reward_mean=replay.reward_mean.at[row].set(jnp.mean(reward, axis=(0, 1))),
        reward_variance=replay.reward_variance.at[row].set(jnp.var(reward, axis=(0, 1))),
        num_rollouts=jnp.minimum(replay.num_rollouts + 1, capacity),
    )


def reward_statistics(replay: Replay) -> Statistics:
    """Returns mean and variance (N,) of the rewards in the buffers of all devices and replicas."""
    weight = jnp.arange(len(replay.reward_mean)) < replay.num_rollouts
    weight = (weight / jnp.maximum(replay.num_rollouts, 1))[:, None]  # (K, 1)
    mean = pmean(jnp.sum(weight * replay.reward_mean, axis=0))
    squares = replay.reward_variance + (replay.reward_mean - mean) ** 2
    return Statistics(mean=mean, variance=pmean(jnp.sum(weight * squares, axis=0)))


def draw(algo: Algorithm, replay: Replay, key: jax.Array) -> Sample:
    """Returns samples (G, B, ...) with rewards of mean 0 and variance 1 over the whole buffer."""
    keys = jax.random.split(key, algo.config.num_gradient_steps)
    samples = jax.vmap(algo.buffer.sample, (None, 0))(replay.samples, keys).experience
    mean, variance = reward_statistics(replay)
    # Equal rewards become 0, not their rounding errors blown up.
    scale = jnp.maximum(jnp.sqrt(variance), 1e-6 * jnp.maximum(1.0, jnp.abs(mean)))
    return samples.replace(reward=(samples.reward - mean) / scale)


def targets(
    algo: Algorithm, target: Networks, sample: Sample, views: Networks, key: jax.Array
) -> jax.Array:
    """Returns what Q of the actions taken should be, y (B, N) (eq. 7).

    The bonus for entropy is neither discounted nor left out at the end, as in the paper's code.

    Args:
        algo: the fixed parts.
        target: parameters of the target networks.
        sample: (B, ...).
        views: the successors' (B, N, O), normalised as each network sees them.
        key: of the next actions.
    """
    policy, _ = policies(algo, target.actor, views.actor, sample.next_action_mask)
    action = policy.sample(key)
    value = of_action(values(algo, target.critic, views.critic, action), action)
    bonus = -policy.log_prob(action) / algo.config.reward_scale
    return sample.reward + algo.config.gamma * sample.discount * value + bonus


def critic_loss(
    critic_params: Any,
    algo: Algorithm,
    views: jax.Array,
    actions: jax.Array,
    action: jax.Array,
    target: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the sum over agents of the squared errors (eq. 6) and the penalty of large logits,
    and metrics. An agent out of the game counts, too: the values from before it left bootstrap from
    those after.

    Args:
        critic_params: parameters of the critic.
        algo: the fixed parts.
        views: (B, N, O), normalised.
        actions: (B, N, A), as `one_hot` makes them of
        action: (B, N), int32.
        target: (B, N): what their values should be.
    """
    of_all, attention = algo.critic.apply(critic_params, views, actions)
    value = of_action(of_all, action)
    num_agents = algo.env.num_agents
    others = ~jnp.eye(num_agents, dtype=bool)[:, :, None, None]  # (N, N, 1, 1)
    squares = jnp.mean(jnp.where(others, attention.logits**2, 0.0), axis=-1)  # (N, N, H)
    penalty = jnp.sum(squares) / (num_agents - 1)
    error = jnp.sum(jnp.mean((value - target) ** 2, axis=0))
    of_agents = jnp.exp(attention.log_weights) * attention.log_weights  # (N, N, H, B)
    entropy = -jnp.sum(jnp.mean(of_agents, axis=(0, 3)), axis=0)  # (H,)
    loss = error + algo.config.attention_coef * penalty
    metrics = {
        "critic_loss": loss,
        "q_mean": jnp.mean(value),
        **{f"attention_entropy_{head}": x for head, x in enumerate(entropy)},
    }
    return loss, metrics


def actor_loss(
    actor_params: Any,
    algo: Algorithm,
    critic_params: Any,
    sample: Sample,
    views: Networks,
    key: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the sum over agents of their losses (eq. 8), whose gradient is that of the policies,
    and the penalty of large logits, and metrics. Agents out of the game are left out.
    """
    policy, logits = policies(algo, actor_params, views.actor, sample.action_mask)
    action = policy.sample(key)
    log_prob = policy.log_prob(action)  # (B, N)
    of_all = values(algo, critic_params, views.critic, action)
    # What the agent can expect of its policy while the others do as they did (eq. 9).
    baseline = jnp.sum(jnp.exp(policy.log_probs) * of_all, axis=-1)
    advantage = of_action(of_all, action) - baseline
    cost = jax.lax.stop_gradient(log_prob / algo.config.reward_scale - advantage)
    in_game = sample.agent_mask.astype(log_prob.dtype)
    weight = in_game / jnp.maximum(pmean(jnp.mean(in_game, axis=0)), 1e-6)
    legal = sample.action_mask
    squares = jnp.sum(jnp.where(legal, logits**2, 0.0), axis=-1)
    penalty = squares / jnp.sum(legal, axis=-1)
    losses = jnp.mean(weight * (log_prob * cost + algo.config.logit_coef * penalty), axis=0)
    entropy = jnp.mean(weight * policy.entropy())
    return jnp.sum(losses), {"actor_loss": jnp.mean(losses), "entropy": entropy}


def learn_critic(
    algo: Algorithm,
    state: LearnerState,
    sample: Sample,
    views: jax.Array,
    target: jax.Array,
) -> tuple[Any, optax.OptState, dict[str, jax.Array]]:
    """Returns the critic's parameters and optimiser state after a gradient step, and metrics."""
    inputs = (views, one_hot(algo, sample.action), sample.action, target)
    gradient = jax.value_and_grad(critic_loss, has_aux=True)
    of_chunks = jax.lax.map(
        lambda x: gradient(state.params.online.critic, algo, *x), in_chunks(algo, inputs)
    )
    (_, metrics), grads = jax.tree.map(lambda x: jnp.mean(x, axis=0), of_chunks)
    # What all agents' losses flow into has its gradient divided by their number, as in the paper's
    # code. Each value depends on the other agents' encoders, and on its own agent's no more.
    layers = pmean(grads["params"])
    for name in ("encoder", "query", "key", "value"):
        layers = {**layers, name: jax.tree.map(lambda x: x / algo.env.num_agents, layers[name])}
    grads = {"params": layers}
    params = state.params.online.critic
    updates, optim_state = algo.critic_optim.update(grads, state.optim_states.critic, params)
    metrics["critic_grad_norm"] = optax.tree.norm(grads)
    return optax.apply_updates(params, updates), optim_state, metrics


def learn_actor(
    algo: Algorithm,
    state: LearnerState,
    critic_params: Any,
    sample: Sample,
    views: Networks,
    key: jax.Array,
) -> tuple[Any, optax.OptState, dict[str, jax.Array]]:
    """Returns the policies' parameters and optimiser state after a gradient step, and metrics."""
    params = state.params.online.actor
    grads, metrics = jax.grad(actor_loss, has_aux=True)(
        params, algo, critic_params, sample, views, key
    )
    grads = pmean(grads)
    norms = jax.vmap(optax.tree.norm)(grads)  # (P,): of each policy
    factors = jnp.minimum(1.0, algo.config.actor_max_grad_norm / (norms + 1e-6))
    grads = jax.vmap(lambda factor, x: jax.tree.map(lambda leaf: factor * leaf, x))(factors, grads)
    updates, optim_state = algo.actor_optim.update(grads, state.optim_states.actor)
    metrics["actor_grad_norm"] = jnp.mean(norms)
    return optax.apply_updates(params, updates), optim_state, metrics


def gradient_step(
    algo: Algorithm, state: LearnerState, xs: tuple[Sample, jax.Array]
) -> tuple[LearnerState, dict[str, jax.Array]]:
    """Returns the state after a step of critic, policies and targets on one batch, and metrics."""
    sample, key = xs
    target_key, actor_key = jax.random.split(key)
    num_policies = len(algo.actor.fan_in)

    def normalised(view: jax.Array) -> tuple[Networks, Statistics]:
        of_critic, of_actor = (statistics(view, n) for n in (algo.env.num_agents, num_policies))
        views = Networks(actor=normalise(view, of_actor), critic=normalise(view, of_critic))
        return views, of_actor

    views, seen = normalised(sample.view)
    next_views, _ = normalised(sample.next_view)
    online, target, running = state.params
    y = targets(algo, target, sample, next_views, target_key)
    critic, critic_optim_state, critic_metrics = learn_critic(algo, state, sample, views.critic, y)
    learnt_from = online.critic if algo.config.lagged_critic else critic
    actor, actor_optim_state, actor_metrics = learn_actor(
        algo, state, learnt_from, sample, views, actor_key
    )
    online = Networks(actor=actor, critic=critic)

    # As PyTorch's batch normalisation: momentum 0.1, and the variance of a sample of the batch.
    count = algo.config.batch_size * algo.env.num_agents // num_policies
    seen = seen._replace(variance=seen.variance * count / max(count - 1, 1))
    params = Params(
        online=online,
        target=optax.incremental_update(online, target, algo.config.tau),
        statistics=optax.incremental_update(seen, running, 0.1),
    )
    optim_states = OptimStates(actor=actor_optim_state, critic=critic_optim_state)
    return LearnerState(params=params, optim_states=optim_states), critic_metrics | actor_metrics


def learn(
    algo: Algorithm, learner_state: LearnerState, samples: Sample, key: jax.Array
) -> tuple[LearnerState, dict[str, tuple[jax.Array, jax.Array]]]:
    """Returns the state after all gradient steps on samples (G, B, ...), and metrics."""
    num_steps = algo.config.num_gradient_steps
    learner_state, metrics = jax.lax.scan(
        partial(gradient_step, algo), learner_state, (samples, jax.random.split(key, num_steps))
    )
    sums = {name: (jnp.sum(x), jnp.float32(num_steps)) for name, x in metrics.items()}
    # A step teaches every agent once, on however many devices and replicas.
    taught = jnp.float32(num_steps * algo.env.num_agents / algo.env.num_streams)
    return learner_state, {**sums, "agent_updates_per_second": (taught, jnp.float32(1.0))}


def update(
    algo: Algorithm, learner_state: LearnerState, actor_state: ActorState
) -> tuple[LearnerState, ActorState, Metrics, Experience]:
    """One rollout, then gradient steps on what the buffer holds."""
    key, rollout_key, draw_key, learn_key = jax.random.split(actor_state.key, 4)
    replay = actor_state.buffer
    actor_state, trajectory = rollout(algo, learner_state.params, actor_state, rollout_key)
    if algo.config.overlap_collection:
        samples, filled = draw(algo, replay, draw_key), replay.num_rollouts
        # Read before it is written to: else XLA copies the buffer.
        samples, replay = jax.lax.optimization_barrier((samples, replay))
        replay = store(algo, replay, trajectory)
    else:
        replay = store(algo, replay, trajectory)
        samples, filled = draw(algo, replay, draw_key), replay.num_rollouts
    num_samples = filled * (algo.config.rollout_length * algo.env.num_envs)
    can_learn = everywhere(num_samples * algo.env.num_streams >= algo.config.batch_size)

    def skip(
        learner_state: LearnerState, samples: Sample, key: jax.Array
    ) -> tuple[LearnerState, dict[str, tuple[jax.Array, jax.Array]]]:
        shapes = jax.eval_shape(partial(learn, algo), learner_state, samples, key)[1]
        return learner_state, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    learner_state, learn_metrics = jax.lax.cond(
        can_learn, partial(learn, algo), skip, learner_state, samples, learn_key
    )
    metrics = reduce_metrics(trajectory.extras, trajectory.last, learn_metrics)
    experience = Experience(
        observation=trajectory.observation,
        action=trajectory.action,
        reward=trajectory.reward,
        discount=trajectory.discount,
        last=trajectory.last,
    )
    return learner_state, actor_state.replace(key=key, buffer=replay), metrics, experience


def init(algo: Algorithm, key: jax.Array) -> LearnerState:
    """Returns fresh parameters, targets equal to them, and optimiser states."""
    actor_key, critic_key = jax.random.split(key)
    spec = algo.env.observation_spec
    views = jnp.zeros((1, *spec.agents_view.shape))  # B = 1
    actions = jnp.zeros((1, *spec.action_mask.shape))
    online = Networks(
        actor=algo.actor.init(actor_key, views),
        critic=algo.critic.init(critic_key, views, actions),
    )
    shape = (len(algo.actor.fan_in), views.shape[-1])
    params = Params(
        online=online,
        target=online,
        statistics=Statistics(mean=jnp.zeros(shape), variance=jnp.ones(shape)),
    )
    optim_states = OptimStates(
        actor=algo.actor_optim.init(online.actor), critic=algo.critic_optim.init(online.critic)
    )
    return LearnerState(params=params, optim_states=optim_states)


def reset(algo: Algorithm, key: jax.Array) -> ActorState:
    """Returns a stream of experience at its start, with an empty buffer."""
    key, env_key = jax.random.split(key)
    env_state, timestep = algo.env.reset(env_key)
    spec, num_agents = algo.env.observation_spec, algo.env.num_agents
    view, action_mask = (jnp.zeros(x.shape, x.dtype) for x in (spec.agents_view, spec.action_mask))
    sample = Sample(
        view=view,
        next_view=view,
        action=jnp.zeros(num_agents, jnp.int32),
        action_mask=action_mask,
        next_action_mask=action_mask,
        agent_mask=jnp.zeros(num_agents, bool),
        reward=jnp.zeros(num_agents),
        discount=jnp.zeros(num_agents),
    )
    num_rollouts = capacity(algo.config, algo.env)
    replay = Replay(
        samples=algo.buffer.init(sample),
        reward_mean=jnp.zeros((num_rollouts, num_agents)),
        reward_variance=jnp.zeros((num_rollouts, num_agents)),
        num_rollouts=jnp.int32(0),
    )
    return ActorState(key=key, env_state=env_state, observation=timestep.observation, buffer=replay)


def act(
    algo: Algorithm,
    act_params: tuple[Any, Statistics],
    observation: Observation,
    memory: tuple[()],
    key: jax.Array,
    greedy: bool,
) -> tuple[jax.Array, tuple[()]]:
    """Returns actions (E, N): the likeliest if greedy, else sampled."""
    actor_params, running = act_params
    views = normalise(observation.agents_view, running)
    policy, _ = policies(algo, actor_params, views, observation.action_mask)
    return (policy.mode() if greedy else policy.sample(key)), memory


def capacity(config: Config, env: VectorEnv) -> int:
    """Returns how many rollouts the buffer of one device and replica holds, K."""
    return config.buffer_size // env.num_streams // (config.rollout_length * env.num_envs)


def make_system(
    env: VectorEnv, networks: dict[str, Any], config: Config
) -> System[LearnerState, ActorState]:
    """Returns the system; raises ValueError where the config does not fit the environment."""
    num_agents, steps_per_update = env.num_agents, config.rollout_length * env.num_envs
    if not isinstance(env.action_spec, Discrete):
        raise ValueError("ff_maac needs an environment with one discrete action for each agent.")
    if num_agents < 2:
        raise ValueError("ff_maac needs at least two agents: each attends to the others.")
    if config.batch_size % (env.num_streams * config.num_chunks):
        raise ValueError(
            f"batch_size={config.batch_size} must be divisible by num_chunks={config.num_chunks} "
            f"times the number of devices and replicas, {env.num_streams}."
        )
    num_samples = capacity(config, env) * steps_per_update
    if num_samples * env.num_streams < config.batch_size or num_samples < steps_per_update:
        raise ValueError(
            f"buffer_size={config.buffer_size} must hold a batch_size={config.batch_size}, and on "
            f"each of {env.num_streams} devices and replicas whole rollouts of {steps_per_update}."
        )
    if networks["policies"] not in ("per_agent", "shared"):
        raise ValueError(f"network.policies={networks['policies']} must be per_agent or shared.")
    sizes = view_sizes(env)
    num_actions = env.action_spec.num_actions
    adam_of_critic = optax.chain(
        optax.clip_by_global_norm(config.critic_max_grad_norm * num_agents),
        optax.add_decayed_weights(config.critic_weight_decay),  # not AdamW's
        optax.adam(config.critic_lr),
    )
    algo = Algorithm(
        config=config,
        env=env,
        actor=networks["actor_network"]["policy"].clone(
            fan_in=sizes if networks["policies"] == "per_agent" else (max(sizes),),
            num_actions=num_actions,
        ),
        critic=networks["critic_network"]["attention"].clone(
            view_sizes=sizes, action_sizes=action_sizes(env)
        ),
        # As one vector: less to compile than with an Adam for each of the parameters' arrays.
        actor_optim=optax.flatten(optax.adam(config.actor_lr)),
        critic_optim=optax.flatten(adam_of_critic),
        buffer=flashbax.make_item_buffer(
            max_length=num_samples,
            min_length=1,
            sample_batch_size=config.batch_size // env.num_streams,
            add_sequences=True,
            add_batches=True,
        ),
    )
    return System(
        init=partial(init, algo),
        reset=partial(reset, algo),
        update=partial(update, algo),
        act=partial(act, algo),
        init_memory=lambda num_envs: (),
        act_params=lambda state: (state.params.online.actor, state.params.statistics),
        steps_per_update=steps_per_update,
    )


if __name__ == "__main__":
    experiment.main(__file__, network="maac", arch="anakin_12")
