"""JaxMARL's games on boards, of cards and of wits (Rutherford et al. 2024, arXiv:2311.10090)."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mava.types import Discrete, Observation, TimeStep
from mava.wrappers.base import (
    agents_in_turn,
    check_counts,
    check_known,
    check_switches,
    check_time_limit,
)
from mava.wrappers.jaxmarl import JaxMarlEnv, JaxMarlState, import_suite, quiet


class OvercookedState(JaxMarlState, kw_only=True):
    delivery_return: jax.Array  # (): what deliveries have paid so far in the episode


class OvercookedEnv(JaxMarlEnv):
    """Overcooked: two cooks fill pots, fetch plates and serve soup (Carroll et al. 2019,
    arXiv:1910.05789).

    Team reward: 20 for each soup that is served. To that comes each cook's own reward for useful
    steps on the way, `shaped_reward` times JaxMARL's; the return is the mean over cooks of all of
    it. What serving alone paid, the return that papers report, is logged as `delivery_return`.
    Nothing ends an episode but the time limit, a truncation.

    A view is the kitchen, (rows, columns, 26): who is where and turned whither, what stands where
    and what is in it, oneself first.
    """

    def __init__(
        self,
        layout: str,
        time_limit: int = 400,
        shaped_reward: float = 1.0,
        random_reset: bool = False,
    ) -> None:
        """Args:
        layout: one of JaxMARL's kitchens.
        time_limit: steps after which an episode is cut.
        shaped_reward: weight of the reward for steps on the way; 0: for serving alone.
        random_reset: start with random places, hands and pots.
        """
        check_time_limit(time_limit)
        check_switches(random_reset=random_reset)
        suite = import_suite("overcooked")
        layouts = suite.overcooked_layouts
        check_known("layout", layout, layouts)
        with quiet():  # it says that there is a second one
            env = suite.Overcooked(layouts[layout], random_reset, time_limit)
        self._shaped_reward = float(shaped_reward)
        shape = (env.height, env.width, env.obs_shape[-1])
        super().__init__(env, shape, Discrete(env.num_actions), time_limit)

    def reset(self, key: jax.Array) -> tuple[OvercookedState, TimeStep]:
        state, first = super().reset(key)
        score = jnp.float32(0.0)
        state = OvercookedState(key=state.key, env_state=state.env_state, delivery_return=score)
        return state, first.replace(extras=_score(score))

    def step(self, state: Any, action: jax.Array) -> tuple[OvercookedState, TimeStep]:
        next_state: Any
        next_state, views, rewards, infos = self._play(state, action)
        delivery, shaped = (
            jnp.stack([jnp.asarray(x[agent], jnp.float32) for agent in self._agents])
            for x in (rewards, infos["shaped_reward"])
        )
        reward = delivery + self._shaped_reward * shaped
        timestep = self._timestep(views, next_state.env_state, reward)
        score = state.delivery_return + jnp.mean(delivery)
        return next_state.replace(delivery_return=score), timestep.replace(extras=_score(score))


class OvercookedV2Env(OvercookedEnv):
    """Overcooked-v2: several recipes, of which a lamp tells the one that is asked for, more or
    fewer cooks, views of a part of the kitchen (Gessler et al. 2025, arXiv:2503.17821).

    Rewards and episodes are those of Overcooked; serving what was not asked for can cost as much as
    serving right pays. A view is the kitchen, or what of it a cook sees, (rows, columns, O).
    """

    def __init__(
        self,
        layout: str,
        time_limit: int = 400,
        shaped_reward: float = 1.0,
        agent_view_size: int | None = None,
        **options: bool,
    ) -> None:
        """Args:
        layout: one of JaxMARL's kitchens.
        time_limit: steps after which an episode is cut.
        shaped_reward: weight of the reward for steps on the way; 0: for serving alone.
        agent_view_size: tiles that a cook sees in each direction; None: all.
        options: JaxMARL's random_reset, random_agent_positions, start_cooking_interaction,
            negative_rewards, sample_recipe_on_delivery, indicate_successful_delivery.
        """
        check_time_limit(time_limit)
        check_switches(**options)
        if agent_view_size is not None:
            check_counts(agent_view_size=agent_view_size)
        suite = import_suite("overcooked_v2")
        check_known("layout", layout, suite.overcooked_v2_layouts)
        env = suite.OvercookedV2(
            layout, max_steps=time_limit, agent_view_size=agent_view_size, **options
        )
        self._shaped_reward = float(shaped_reward)
        JaxMarlEnv.__init__(self, env, env.obs_shape, Discrete(env.num_actions), time_limit)


class HanabiEnv(JaxMarlEnv):
    """Hanabi: cards in everyone's sight but their holder's are to be played in order, with hints
    (Bard et al. 2020, arXiv:1902.00506).

    Team reward: 1 for each card played right; all of it is lost with the last life. The return is
    the score, at most 25, and it is won with all cards. The player in turn chooses; for the others
    only the last action, nothing, is legal. The game ends by itself (termination) within 100 moves.
    """

    def __init__(self, num_agents: int = 2, time_limit: int = 100) -> None:
        """Args:
        num_agents: 2 to 5.
        time_limit: moves after which a game is cut; no game has more than 100.
        """
        check_time_limit(time_limit)
        if num_agents not in range(2, 6):
            raise ValueError(f"num_agents={num_agents} must be between 2 and 5.")
        env = import_suite("hanabi").Hanabi(num_agents=num_agents)
        super().__init__(env, (int(env.obs_size),), Discrete(int(env.num_moves)), time_limit)

    def _observation(self, views: Any, env_state: Any) -> Observation:
        legal = self._env.get_legal_moves(env_state)
        mask = jnp.stack([legal[agent] for agent in self._agents]).astype(bool)
        return super()._observation(views, env_state).replace(action_mask=mask)

    def _terminated(self, env_state: Any) -> jax.Array:
        return env_state.done

    def _extras(self, env_state: Any) -> dict[str, Any]:
        all_cards = self._env.num_colors * self._env.num_ranks
        return {"won_episode": jnp.sum(env_state.fireworks) == all_cards}


PAYOFF = np.array([[3.0, 0.0], [5.0, 1.0]])  # of one's own coins against the other's
FREEZE_STEPS = 5


def draw_by_index(module: Any) -> None:
    """Makes a module draw one of many by its index. `jax.random.choice` without replacement
    shuffles all of them for it: STORM's 125,970 sets of starting places, twice in each step.
    """

    def choice(
        key: jax.Array, a: jax.Array, shape: tuple[int, ...] = (), replace: bool = True
    ) -> jax.Array:
        return jax.random.choice(key, a, shape, replace or shape == ())

    random = SimpleNamespace(**{**vars(jax.random), "choice": choice})
    module.jax = SimpleNamespace(**{**vars(jax), "random": random})


class StormEnv(JaxMarlEnv):
    """STORM: agents collect coins of two kinds and meet to play a matrix game with what they have
    (Khan et al. 2022).

    Individual reward: when two that face each other both zap, the payoff of the mix of coins that
    each holds, in a prisoner's dilemma; both are frozen then and lose their coins. The return is
    the mean over agents. Nothing ends an episode but the time limit, a truncation.

    JaxMARL itself forgets most payoffs, with two agents all: they are worked out here from who was
    frozen; who met several is paid the mean. It also pays nothing for the last step, and shows the
    next episode's start after it. Of N (N - 1) / 2 pairs it looks at only N, at random, in a step:
    with four agents two thirds of the zaps take effect, with eight one third.

    A view is the 5 x 5 tiles before the agent: who or what is there (12), how it is turned (4), and
    the same in every tile: the own coins of both kinds (2), whether they suffice to play (1), and
    the coins that the others show while they are frozen (2 each). JaxMARL draws how agent 0 is
    turned on the empty tiles.
    """

    def __init__(self, num_agents: int = 2, time_limit: int = 152) -> None:
        """Args:
        num_agents: 2 to 8.
        time_limit: steps after which an episode is cut.
        """
        check_time_limit(time_limit)
        if num_agents not in range(2, 9):
            raise ValueError(f"num_agents={num_agents} must be between 2 and 8.")
        # With one step more JaxMARL starts no new episode of its own accord.
        suite = import_suite("storm")
        draw_by_index(suite.storm_env)  # 68 ms a step without it
        env = suite.InTheGrid(
            num_agents=num_agents,
            num_inner_steps=time_limit + 1,
            payoff_matrix=jnp.array([PAYOFF, PAYOFF.T]),
            freeze_penalty=FREEZE_STEPS,
        )
        self._ahead = suite.storm_env.STEP[:, :2].astype(jnp.int32)  # (4, 2): by direction
        shape = (5, 5, 16 + 3 + 2 * (num_agents - 1))
        super().__init__(env, shape, Discrete(env.num_actions), time_limit)

    def step(self, state: Any, action: jax.Array) -> tuple[JaxMarlState, TimeStep]:
        state, views, _, _ = self._play(state, action)
        return state, self._timestep(views, state.env_state, self._payoffs(state.env_state))

    def _payoffs(self, env_state: Any) -> jax.Array:
        """Returns what those get that met in the last step, (N,); 0 for the others."""
        places, direction = jnp.split(env_state.agent_positions.astype(jnp.int32), [2], axis=1)
        direction = direction[:, 0]
        ahead = self._ahead[direction]
        sides = [self._ahead[(direction + turn) % 4] for turn in (1, -1)]
        reach = jnp.stack([ahead, 2 * ahead, *(ahead + side for side in sides)], axis=1)
        targets = places[:, None] + reach  # (N, 4, 2)
        sees = jnp.any(jnp.all(targets[:, None] == places[:, None], axis=-1), axis=-1)  # (N, N)
        froze = env_state.agent_freezes == FREEZE_STEPS
        met = sees & sees.T & froze & froze[:, None]
        coins = env_state.agent_inventories
        mix = coins / jnp.maximum(jnp.sum(coins, axis=1, keepdims=True), 1)
        payoffs = jnp.where(met, mix @ PAYOFF @ mix.T, 0.0)
        return jnp.sum(payoffs, axis=1) / jnp.maximum(jnp.sum(met, axis=1), 1)

    def _observation(self, views: Any, env_state: Any) -> Observation:
        inventory = views["inventory"].T.astype(jnp.float32)  # (N, 5): own and shown
        others = agents_in_turn(self.num_agents)[:, 1:]
        shown = inventory[others, 3:].reshape(self.num_agents, -1)
        inventory = jnp.concatenate([inventory[:, :3], shown], axis=-1)[:, None, None]
        tiles = views["observations"].astype(jnp.float32)
        planes = jnp.broadcast_to(inventory, (*tiles.shape[:3], inventory.shape[-1]))
        views = jnp.concatenate([tiles, planes], axis=-1)
        return super()._observation(dict(zip(self._agents, views, strict=True)), env_state)


class CoinGameEnv(JaxMarlEnv):
    """The coin game: two agents pick up coins of two colours on a torus of 3 x 3 (Lerer and
    Peysakhovich 2017, arXiv:1707.01068).

    Individual reward: 1 for any coin, and -2 for the one whose colour the other took. The return is
    the mean over both: taking nothing but one's own is best for both, taking all for oneself.
    Nothing ends an episode but the time limit, a truncation. (JaxMARL pays nothing for the last
    step, and shows the next episode's start after it.)

    A view is the torus, (3, 3, 4): oneself, the other, the own coin, the other's.
    """

    def __init__(
        self, time_limit: int = 50, egocentric: bool = False, shared_rewards: bool = False
    ) -> None:
        """Args:
        time_limit: steps after which an episode is cut.
        egocentric: show each agent itself in the middle.
        shared_rewards: pay both what they earned together.
        """
        check_time_limit(time_limit)
        check_switches(egocentric=egocentric, shared_rewards=shared_rewards)
        env = import_suite("coin_game").CoinGame(
            # With one step more JaxMARL starts no new episode of its own accord.
            num_inner_steps=time_limit + 1,
            num_outer_steps=1,
            cnn=True,
            egocentric=egocentric,
            shared_rewards=shared_rewards,
        )
        super().__init__(env, (3, 3, 4), Discrete(5), time_limit)


class SwitchRiddleEnv(JaxMarlEnv):
    """The switch riddle: prisoners, taken one by one to a room with a lamp, must say when all have
    been there (Foerster et al. 2016, arXiv:1605.06676).

    Team reward: 1 for saying so rightly, -1 wrongly, which ends it; it is won if rightly. It
    is cut at the time limit. Only who is in the room sees the lamp and is heard: it takes a memory.
    """

    def __init__(self, num_agents: int = 3, time_limit: int | None = None) -> None:
        """Args:
        num_agents: 3 or more.
        time_limit: days after which an episode is cut; None: 4 N - 6.
        """
        check_counts(num_agents=num_agents)
        if num_agents < 3:
            raise ValueError(f"num_agents={num_agents} must be at least 3.")
        env = import_suite("switch_riddle").SwitchRiddle(num_agents=num_agents)
        time_limit = env.max_steps if time_limit is None else time_limit
        check_time_limit(time_limit)
        env.max_steps = time_limit + 1  # so that its `done` means that someone spoke
        super().__init__(env, (2,), Discrete(3), time_limit)

    def _terminated(self, env_state: Any) -> jax.Array:
        return env_state.done

    def _extras(self, env_state: Any) -> dict[str, Any]:
        return {"won_episode": env_state.done & jnp.all(env_state.has_been == 1)}


def _score(delivery_return: jax.Array) -> dict[str, Any]:
    return {"env_metrics": {"delivery_return": delivery_return}}
