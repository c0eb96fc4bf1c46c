"""JaxMARL's games, wrapped: scripted episodes to their ends and to their time limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mava.config import scenarios_of
from mava.types import LAST, MID
from mava.wrappers.episode_metrics import EpisodeMetrics
from mava.wrappers.jaxmarl import import_suite
from mava.wrappers.jaxmarl_games import (
    CoinGameEnv,
    HanabiEnv,
    OvercookedEnv,
    OvercookedV2Env,
    StormEnv,
    SwitchRiddleEnv,
)

COOK = {
    OvercookedEnv: {"up": 0, "down": 1, "right": 2, "left": 3, "stay": 4, "interact": 5},
    OvercookedV2Env: {"right": 0, "down": 1, "left": 2, "up": 3, "stay": 4, "interact": 5},
}
ONION = ["left", "interact", "right", "up", "interact"]
SERVE = ["interact", "down", "right", "down", "interact"]
SOUP = [
    *ONION * 3,
    *["left", "down", "down", "interact", "right", "up", "up"],
    *["stay"] * 20,
    *SERVE,
]


def change(state, **changes):
    """Returns the state with some arrays of JaxMARL's changed."""
    return state.replace(env_state=state.env_state.replace(**changes))


@pytest.mark.parametrize(("kind", "cook"), [(OvercookedEnv, 0), (OvercookedV2Env, 1)])
@pytest.mark.parametrize("shaped_reward", [0.0, 1.0])
def test_a_soup_is_cooked_and_served(kind, cook, shaped_reward):
    """3 onions, a plate, a soup taken up (shaped: 3 each, 3, 5), and 20 for all; then it is cut."""
    env = EpisodeMetrics(kind("cramped_room", time_limit=len(SOUP), shaped_reward=shaped_reward))
    state, first = env.reset(jax.random.key(0))
    assert first.observation.agents_view.shape[:3] == (2, 4, 5)
    step, total = jax.jit(env.step), np.zeros(2)
    for i, name in enumerate(SOUP):
        action = np.full(2, COOK[kind]["stay"])
        action[cook] = COOK[kind][name]
        state, timestep = step(state, jnp.asarray(action))
        total += timestep.reward
        assert timestep.step_type == (LAST if i == len(SOUP) - 1 else MID)
    expected = np.full(2, 20.0)
    expected[cook] += 17 * shaped_reward
    np.testing.assert_allclose(total, expected)
    np.testing.assert_allclose(timestep.extras["episode_return"], expected.mean())
    np.testing.assert_allclose(timestep.extras["env_metrics"]["delivery_return"], 20.0)
    np.testing.assert_array_equal(timestep.discount, 1.0)


def test_every_kitchen_has_a_scenario():
    assert sorted(scenarios_of("Overcooked")) == sorted(
        import_suite("overcooked").overcooked_layouts
    )
    layouts = import_suite("overcooked_v2").overcooked_v2_layouts
    assert sorted(scenarios_of("OvercookedV2")) == sorted(f"v2-{name}" for name in layouts)
    with pytest.raises(ValueError, match="layout=cramped_rom must be one of cramped_room"):
        OvercookedEnv("cramped_rom")


@pytest.fixture(scope="module")
def hanabi():
    env = HanabiEnv()
    return env, jax.jit(env.step)


NUM_CARDS = (3, 2, 2, 2, 1)  # of each rank
PLAY_FIRST, NOTHING = 5, 20


def perfect_deck():
    """Returns a deck where playing the first card, in turn, is right 25 times."""
    right = [(color, rank) for color in range(5) for rank in range(5)]
    others = [card for card in right for _ in range(NUM_CARDS[card[1]] - 1)]
    deck = [*right, *others]
    dealt = [turn // 2 + 5 * (turn % 2) for turn in range(10)]  # five to each, then one by one
    for turn, place in enumerate(dealt):
        deck[place] = right[turn]
    return jnp.array(deck)


@pytest.mark.parametrize("perfect", [True, False])
def test_hanabi_scores(hanabi, perfect):
    """25 for all cards; nothing, whatever was played, after the third that is wrong."""
    env, step = hanabi
    state, first = env.reset(jax.random.key(0))
    deck = perfect_deck()
    if not perfect:
        deck = deck.at[jnp.array([6, 2, 7])].set(jnp.array([0, 0]))  # after three right ones
    state = state.replace(env_state=env._env.reset_from_deck_of_pairs(deck)[1])
    total, mask = 0.0, first.observation.action_mask
    for turn in range(25):
        np.testing.assert_array_equal(mask[1 - turn % 2], np.arange(21) == NOTHING)
        assert mask[turn % 2, PLAY_FIRST]
        action = [PLAY_FIRST, NOTHING] if turn % 2 == 0 else [NOTHING, PLAY_FIRST]
        state, timestep = step(state, jnp.array(action))
        total += float(timestep.reward[0])
        mask = timestep.observation.action_mask
        if timestep.last():
            break
    assert turn == (24 if perfect else 5)
    assert total == (25 if perfect else 0)
    assert bool(timestep.extras["won_episode"]) == perfect
    np.testing.assert_array_equal(timestep.discount, 0.0)


def test_hanabi_is_cut_at_its_limit():
    env = HanabiEnv(time_limit=1)
    _, timestep = env.step(env.reset(jax.random.key(0))[0], jnp.array([PLAY_FIRST, NOTHING]))
    assert timestep.step_type == LAST
    np.testing.assert_array_equal(timestep.discount, 1.0)


@pytest.fixture(scope="module")
def storm():
    """An environment of two agents, its compiled step, and a state where they face each other."""
    env = StormEnv(num_agents=2, time_limit=3)
    state, _ = jax.jit(env.reset)(jax.random.key(0))
    inner = state.env_state
    grid = jnp.where(inner.grid <= 2, 0, inner.grid).at[3, 3:5].set(jnp.array([1, 2], jnp.int8))
    places = jnp.array([[3, 3, 0], [3, 4, 2]], inner.agent_positions.dtype)
    coins = jnp.array([[3.0, 1.0], [1.0, 1.0]])
    state = change(state, grid=grid, agent_positions=places, agent_inventories=coins)
    return env, jax.jit(env.step), state


ZAP, STAY = 3, 4


@pytest.mark.parametrize(
    ("actions", "payoffs"),
    # 3/4 of the one against 1/2 of both: 3/4 * 1/2 * 3 + 1/4 * (1/2 * 5 + 1/2 * 1), and back.
    [((ZAP, ZAP), (1.875, 3.125)), ((ZAP, STAY), (0, 0)), ((STAY, ZAP), (0, 0))],
)
def test_storm_pays_those_that_meet(storm, actions, payoffs):
    _, step, state = storm
    state, timestep = step(state, jnp.array(actions))
    np.testing.assert_allclose(timestep.reward, payoffs)
    view = timestep.observation.agents_view[:, 2, 2]
    shown = [[1, 1], [3, 1]] if payoffs[0] else [[0, 0], [0, 0]]
    np.testing.assert_array_equal(view[:, 16:], [[3, 1, 1, *shown[0]], [1, 1, 1, *shown[1]]])
    _, timestep = step(state, jnp.array([ZAP, ZAP]))
    assert bool(timestep.reward.any()) == (not payoffs[0])  # not while they are frozen


def test_storm_is_cut_and_pays_to_the_end(storm):
    _, step, state = storm
    for i in range(3):
        state, timestep = step(state, jnp.array([ZAP, ZAP] if i == 2 else [STAY, STAY]))
        assert timestep.step_type == (LAST if i == 2 else MID)
        assert timestep.observation.step_count == i + 1
    np.testing.assert_allclose(timestep.reward, (1.875, 3.125))
    np.testing.assert_array_equal(timestep.discount, 1.0)
    np.testing.assert_array_equal(state.env_state.agent_positions[:, :2], [[3, 3], [3, 4]])


@pytest.mark.parametrize(
    ("red_coin", "blue_coin", "rewards"), [((0, 1), (2, 2), (1, 0)), ((2, 2), (0, 1), (1, -2))]
)
@pytest.mark.parametrize("shared_rewards", [False, True])
def test_coins_are_paid_to_the_last_step(red_coin, blue_coin, rewards, shared_rewards):
    env = CoinGameEnv(time_limit=1, shared_rewards=shared_rewards)
    state, _ = env.reset(jax.random.key(0))
    places = {"red_pos": (0, 0), "blue_pos": (1, 1), "red_coin_pos": red_coin,
              "blue_coin_pos": blue_coin}  # fmt: skip
    state = change(state, **{name: jnp.array(place) for name, place in places.items()})
    _, timestep = env.step(state, jnp.array([0, 4]))  # to the right; stay
    np.testing.assert_array_equal(
        timestep.reward, [sum(rewards)] * 2 if shared_rewards else rewards
    )
    assert timestep.step_type == LAST
    np.testing.assert_array_equal(timestep.discount, 1.0)
    view = timestep.observation.agents_view
    assert view[0, 0, 1, 0] == view[0, 1, 1, 1] == view[1, 1, 1, 0] == view[1, 0, 1, 1] == 1
    assert timestep.observation.step_count == 1


def test_switch_riddle_ends_when_someone_speaks():
    env = SwitchRiddleEnv(num_agents=4)
    assert env.time_limit == 10
    start, _ = env.reset(jax.random.key(0))
    step = jax.jit(env.step)
    for has_been, reward in ((0, -1), (1, 1)):
        state = change(start, has_been=jnp.full(4, has_been))
        _, timestep = step(state, jnp.full(4, 2))
        np.testing.assert_array_equal(timestep.reward, reward)
        np.testing.assert_array_equal(timestep.discount, 0.0)
        assert timestep.step_type == LAST
        assert bool(timestep.extras["won_episode"]) == (reward == 1)
    state = start
    for i in range(10):
        state, timestep = step(state, jnp.zeros(4, jnp.int32))
        assert timestep.step_type == (LAST if i == 9 else MID)
    np.testing.assert_array_equal(timestep.discount, 1.0)
    assert not timestep.extras["won_episode"]
    _, timestep = step(change(start, step=jnp.int32(9)), jnp.full(4, 2))  # both at once
    np.testing.assert_array_equal(timestep.discount, 0.0)


@pytest.mark.parametrize(
    ("make", "options"),
    [(HanabiEnv, {"num_agents": 6}), (StormEnv, {"num_agents": 1}),
     (SwitchRiddleEnv, {"num_agents": 2}), (CoinGameEnv, {"time_limit": 0})],
)  # fmt: skip
def test_bad_numbers_are_refused(make, options):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name}=. must be"):
        make(**options)
