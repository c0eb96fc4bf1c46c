"""Which agents the shipped environments call teams, and their returns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mava.environments.rover_tower import RoverTower
from mava.environments.treasure_collection import TreasureCollection
from mava.wrappers.base import teams
from mava.wrappers.episode_metrics import EpisodeMetrics
from mava.wrappers.jaxmarl import MpeEnv
from mava.wrappers.observation import AgentIds, GlobalState
from mava.wrappers.vector import VectorEnv
from tests.environments import RightAction, Teams


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (lambda: MpeEnv("simple_tag_v3"), {"adversary": (0, 1, 2), "agent": (3,)}),
        (lambda: MpeEnv("simple_spread_v3"), {"agent": (0, 1, 2)}),
        (lambda: RoverTower(num_pairs=2), {"rovers": (0, 1), "towers": (2, 3)}),
        (lambda: TreasureCollection(num_hunters=3), {"hunters": (0, 1, 2), "banks": (3, 4)}),
        (RightAction, {"all": (0, 1)}),
    ],
)
def test_teams_are_found_through_all_wrappers(env, expected):
    wrapped = EpisodeMetrics(AgentIds(GlobalState(env())))
    assert teams(wrapped) == expected
    assert VectorEnv(wrapped, 2).teams == expected


def test_returns_of_teams_are_means_over_their_agents():
    env = EpisodeMetrics(Teams(scale=4.0))
    state, timestep = env.reset(jax.random.key(0))
    assert "episode_return/left" in timestep.extras
    _, timestep = env.step(state, jnp.array([0, 1, 0, 1, 1]))
    left, right, both = (
        float(timestep.extras[f"episode_return{team}"]) for team in ("/left", "/right", "")
    )
    np.testing.assert_allclose([left, right, both], [2.0, 2 / 3, (4 + 2) / 5])
    extras = EpisodeMetrics(RightAction()).reset(jax.random.key(0))[1].extras
    assert not [name for name in extras if "/" in name]
