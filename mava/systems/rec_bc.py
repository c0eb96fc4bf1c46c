"""Behaviour cloning: the baseline of what is learnt offline (Pomerleau 1989).

Learns from a vault alone: recurrent policies that imitate its actions, whatever they were worth.
All agents share the network. Run it with `python mava/systems/rec_bc.py vault=<path>`; to change
the algorithm, copy this file and run the copy.

Axis letters: T steps of the vault, L steps of a sequence, B sequences, E environments, N agents,
A actions.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.struct import PyTreeNode

from mava import experiment
from mava.networks import CategoricalHead, RecurrentActor, RecurrentTorso
from mava.ops.chunks import sample_sequences
from mava.types import Discrete, Experience, Metrics, Observation, System
from mava.utils.parallel import pmean
from mava.wrappers.vector import VectorEnv


@dataclass(frozen=True, kw_only=True)
class Config:
    seed: int = 42
    num_updates: int = 20_000  # gradient steps
    update_batch_size: int = 1  # replicas per device; a batch is shared out among all of them
    batch_size: int = 64  # sequences in a batch, over devices and replicas
    sequence_length: int = 20  # L, steps of a sequence
    actor_lr: float = 5e-4  # of Adam, > 0
    max_grad_norm: float = 10.0  # > 0
    add_agent_id: bool = True  # append a one-hot agent id to each view

    def __post_init__(self) -> None:
        for name in ("num_updates", "update_batch_size", "batch_size", "sequence_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        for name in ("actor_lr", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must be between 0 and 2**32 - 1.")


class Params(NamedTuple):
    actor: Any


class LearnerState(PyTreeNode, kw_only=True):
    params: Params
    optim_state: optax.OptState


class ActorState(PyTreeNode, kw_only=True):
    key: jax.Array  # of the sequences drawn


class Algorithm(NamedTuple):
    """The fixed parts that every function below works with."""

    config: Config
    env: VectorEnv
    actor: Any  # RecurrentActor
    optim: optax.GradientTransformation


def actor_loss(
    actor_params: Any, algo: Algorithm, batch: Experience
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the cross entropy to the data's actions, and metrics; `batch` is (L, B, ...)."""
    memory = algo.actor.torso.init_memory(batch.last.shape[1], algo.env.num_agents)
    _, policy = algo.actor.apply(actor_params, memory, batch.observation)
    loss = -jnp.mean(policy.log_prob(batch.action))
    return loss, {"actor_loss": loss, "entropy": jnp.mean(policy.entropy())}


def update(
    algo: Algorithm, learner_state: LearnerState, actor_state: ActorState, experience: Experience
) -> tuple[LearnerState, ActorState, Metrics, None]:
    """One gradient step on sequences of the vault."""
    config, params = algo.config, learner_state.params
    key, sample_key = jax.random.split(actor_state.key)
    num_sequences = config.batch_size // algo.env.num_streams
    batch = sample_sequences(sample_key, experience, num_sequences, config.sequence_length)
    (_, metrics), grads = jax.value_and_grad(actor_loss, has_aux=True)(params.actor, algo, batch)
    grads = pmean(grads)
    updates, optim_state = algo.optim.update(grads, learner_state.optim_state)
    metrics = pmean({**metrics, "actor_grad_norm": optax.tree.norm(grads)})
    learner_state = LearnerState(
        params=Params(actor=optax.apply_updates(params.actor, updates)), optim_state=optim_state
    )
    learn = {name: (x, jnp.float32(1)) for name, x in metrics.items()}
    return learner_state, ActorState(key=key), Metrics(episodes={}, learn=learn), None


def init(algo: Algorithm, key: jax.Array) -> LearnerState:
    """Returns fresh parameters and optimiser state."""
    spec = algo.env.observation_spec
    observation = jax.tree.map(lambda x: jnp.zeros((1, 1, *x.shape), x.dtype), spec)  # L, B = 1
    memory = algo.actor.torso.init_memory(1, algo.env.num_agents)
    params = Params(actor=algo.actor.init(key, memory, observation))
    return LearnerState(params=params, optim_state=algo.optim.init(params.actor))


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


def make_system(
    env: VectorEnv, networks: dict[str, Any], config: Config
) -> System[LearnerState, ActorState]:
    """Returns the system; raises ValueError where the config does not fit the environment."""
    if not isinstance(env.action_spec, Discrete):
        raise ValueError("rec_bc needs an environment with one discrete action for each agent.")
    if config.batch_size % env.num_streams:
        raise ValueError(
            f"batch_size={config.batch_size} must be divisible by the number of devices and "
            f"replicas, {env.num_streams}."
        )
    clip = optax.clip_by_global_norm(config.max_grad_norm)
    network = networks["actor_network"]
    torso = RecurrentTorso(
        pre_torso=network["pre_torso"], cell=network["cell"], post_torso=network["post_torso"]
    )
    algo = Algorithm(
        config=config,
        env=env,
        actor=RecurrentActor(torso=torso, head=CategoricalHead(env.action_spec.num_actions)),
        # As one vector: less to compile than with an Adam for each of the parameters' arrays.
        optim=optax.flatten(optax.chain(clip, optax.adam(config.actor_lr))),
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
    experiment.main(__file__, network="rnn_actor")
