"""JaxMARL's robots (Rutherford et al. 2024, arXiv:2311.10090)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mava.types import ActionSpec, Continuous, Discrete, Observation, array_spec
from mava.wrappers.base import check_counts, check_fractions, check_known, check_time_limit
from mava.wrappers.jaxmarl import JaxMarlEnv, import_suite, quiet


class MabraxEnv(JaxMarlEnv):
    """MABrax: the joints of one of Brax's robots are shared out among agents (as in Peng et al.
    2021, arXiv:2003.06709).

    Team reward: Brax's for the robot; the return is the robot's. Falling ends an episode
    (termination, also when that coincides with the limit) where Brax says so; it is cut at the
    time limit.

    Shorter views are padded with zeros at the end, and so are the actions of agents with fewer
    joints. The global state is what Brax shows of the whole robot.
    """

    def __init__(self, task: str, time_limit: int = 1000, backend: str = "positional") -> None:
        """Args:
        task: robot and agents, such as ant_4x2.
        time_limit: steps after which an episode is cut.
        backend: Brax's physics: positional, generalized or spring.
        """
        check_time_limit(time_limit)
        if backend not in ("positional", "generalized", "spring"):
            raise ValueError(f"backend={backend} must be positional, generalized or spring.")
        try:
            suite = import_suite("mabrax")
        except ImportError as error:
            raise ImportError(f'MABrax needs Brax: pip install "mava[brax]" ({error})') from error
        known = suite.mabrax_env._agent_action_mapping
        check_known("task", task, known)
        import mujoco  # what reads Brax's robots: it writes its warnings to a file beside the user

        mujoco.set_mju_user_warning(lambda message: None)
        try:
            with quiet():
                env = suite.MABraxEnv(
                    task, episode_length=time_limit, auto_reset=False, backend=backend
                )
        finally:
            mujoco.set_mju_user_warning(None)
        # Of each agent, without padding.
        self.view_sizes = tuple(env.observation_space(agent).shape[0] for agent in env.agents)
        self._sizes = [env.action_space(agent).shape[0] for agent in env.agents]
        self._action_mask = np.arange(max(self._sizes)) < np.array(self._sizes)[:, None]  # (N, D)
        super().__init__(env, (max(self.view_sizes),), Continuous(max(self._sizes)), time_limit)

    @property
    def observation_spec(self) -> Observation:
        global_state = array_spec((self._env.env.observation_size,), jnp.float32)
        return super().observation_spec.replace(global_state=global_state)

    def _actions(self, action: jax.Array) -> dict[Any, jax.Array]:
        joints = [x[:size] for x, size in zip(action, self._sizes, strict=True)]
        return dict(zip(self._agents, joints, strict=True))

    def _observation(self, views: Any, env_state: Any) -> Observation:
        return Observation(
            agents_view=self._stacked(views),
            action_mask=jnp.asarray(self._action_mask),
            agent_mask=jnp.ones(self.num_agents, bool),
            step_count=env_state.info["steps"].astype(jnp.int32),
            global_state=env_state.obs,
        )

    def _terminated(self, env_state: Any) -> jax.Array:
        # Brax counts an end at the limit as no truncation.
        return (env_state.done > 0) & (env_state.info["truncation"] == 0)


class JaxNavEnv(JaxMarlEnv):
    """JaxNav: robots with a lidar drive to their goals past walls and each other (Rutherford et al.
    2024, arXiv:2408.15099).

    Reward: for coming nearer to the goal, 4 for reaching it, -4 for a collision, -0.01 for every
    step until then and -0.1 for every step close to something, also after a crash;
    `individual_reward` of it is the robot's own, the rest the team's mean. The return is the mean
    over robots. One that crashed stands still: its `agent_mask` is false. One that arrived can
    still drive, and crash. The episode ends when all have arrived or crashed (termination, also
    when that coincides with the limit), is won if all arrived, and is cut at the time limit.

    A view is the lidar, the own speeds, the goal's distance and direction, and `individual_reward`.
    """

    def __init__(
        self,
        num_agents: int = 2,
        time_limit: int = 500,
        action_type: str = "continuous",
        map_size: tuple[int, int] = (11, 11),
        fill: float = 0.3,
        num_beams: int = 200,
        individual_reward: float = 0.5,
    ) -> None:
        """Args:
        num_agents: robots.
        time_limit: steps of 0.1 s after which an episode is cut.
        action_type: "continuous", the two speeds, or "discrete", 15 pairs of them.
        map_size: columns and rows of cells, 1 m each.
        fill: the largest fraction of walls, [0, 1].
        num_beams: of the lidar.
        individual_reward: weight of the own reward against the team's mean, [0, 1].
        """
        check_counts(num_agents=num_agents, time_limit=time_limit, num_beams=num_beams)
        check_fractions(fill=fill, individual_reward=individual_reward)
        if action_type not in ("discrete", "continuous"):
            raise ValueError(f"action_type={action_type} must be discrete or continuous.")
        suite = import_suite("jaxnav")
        with quiet():
            env = suite.JaxNav(
                num_agents,
                map_id="Grid-Rand-Poly",  # the only one that works for several robots
                map_params={"map_size": tuple(map_size), "fill": fill},
                lidar_num_beams=num_beams,
                max_steps=time_limit,
                rew_lambda=individual_reward,
            )
        self._pairs = suite.jaxnav_env.DISCRETE_ACTS  # (15, 2): speed, turning speed
        is_discrete = action_type == "discrete"
        spec: ActionSpec = Discrete(len(self._pairs)) if is_discrete else Continuous(2)
        super().__init__(env, (num_beams + 5,), spec, time_limit)

    def _actions(self, action: jax.Array) -> dict[Any, jax.Array]:
        if isinstance(self.action_spec, Discrete):  # not by JaxMARL, which prints while tracing
            speeds = self._pairs[action]
        else:
            low = jnp.array([self._env.min_v, -self._env.max_w])
            high = jnp.array([self._env.max_v, self._env.max_w])
            speeds = low + (action + 1) / 2 * (high - low)
        return dict(zip(self._agents, speeds, strict=True))

    def _observation(self, views: Any, env_state: Any) -> Observation:
        return super()._observation(views, env_state).replace(agent_mask=~env_state.move_term)

    def _terminated(self, env_state: Any) -> jax.Array:
        return jnp.all(env_state.goal_reached | env_state.move_term)

    def _extras(self, env_state: Any) -> dict[str, Any]:
        arrived, crashed = env_state.goal_reached, env_state.move_term
        return {
            "won_episode": jnp.all(arrived),
            "env_metrics": {
                "ratio_arrived": jnp.mean(arrived.astype(jnp.float32)),
                "ratio_crashed": jnp.mean(crashed.astype(jnp.float32)),
            },
        }
