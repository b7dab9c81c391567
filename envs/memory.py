"""Tasks that need a memory, as Gymnasium ids for every program of the reports.

    python ppo_lstm_puffer.py --config configs/popgym.yaml --env-id envs.memory:CountRecallEasy-v0

POPGym's (Morad et al. 2023) are wrapped as in its paper, by its own wrappers: the last action, and a flag for an episode's
first step, stand in the observation. MiniGrid's memory environments show the 7 x 7 cells in front of the agent, one-hot by
its own wrapper, without the mission's text, which is always the same. Each observation is one flat float32 vector.

Gymnasium's CartPole, Pendulum, MountainCarContinuous, HalfCheetah and Hopper lack their velocities here, the usual memory
variant of control (Ni et al. 2022): --env-id envs.memory:PendulumNoVel-v1. CliffWalking ends after 500 steps: without a limit a
policy that walks in a circle never ends.
"""

import gymnasium as gym
import minigrid.wrappers
import numpy as np
import popgym.wrappers


class Flat(gym.ObservationWrapper):
    """The observation as one float32 vector, numbers of discrete spaces one-hot."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.space = env.observation_space
        shape = gym.spaces.flatten_space(self.space).shape
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, shape, np.float32)

    def observation(self, observation) -> np.ndarray:
        return gym.spaces.flatten(self.space, observation).astype(np.float32)


def make_popgym(task: type, **kwargs) -> gym.Env:
    return Flat(popgym.wrappers.Antialias(popgym.wrappers.PreviousAction(task())))


def make_minigrid(task: str, **kwargs) -> gym.Env:
    env = gym.make(task, disable_env_checker=True)
    return Flat(minigrid.wrappers.ImgObsWrapper(minigrid.wrappers.OneHotPartialObsWrapper(env)))


class Positions(gym.ObservationWrapper):
    """Some numbers of the observation alone: those that are no velocities."""

    def __init__(self, env: gym.Env, positions: list[int]):
        super().__init__(env)
        self.positions = positions
        shape = (len(positions),)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, shape, np.float32)

    def observation(self, observation) -> np.ndarray:
        return observation[self.positions].astype(np.float32)


def make_without_velocities(task: str, positions: list[int], **kwargs) -> gym.Env:
    return Positions(gym.make(task, disable_env_checker=True), positions)


bare = {"disable_env_checker": True, "order_enforce": False}  # they cost time at every step
for task, facts in popgym.envs.ALL.items():
    gym.register(facts["id"].removeprefix("popgym-"), make_popgym, kwargs={"task": task}, **bare)
for size in 7, 9, 11, 13:
    gym.register(
        f"MemoryS{size}-v0", make_minigrid, kwargs={"task": f"MiniGrid-MemoryS{size}-v0"}, **bare
    )
POSITIONS = {
    "CartPole-v1": [0, 2],
    "Pendulum-v1": [0, 1],
    "MountainCarContinuous-v0": [0],
    "HalfCheetah-v4": list(range(8)),
    "Hopper-v4": list(range(5)),
}
for task, positions in POSITIONS.items():
    gym.register(
        task.replace("-", "NoVel-"),
        make_without_velocities,
        kwargs={"task": task, "positions": positions},
        **bare,
    )
gym.register(
    "CliffWalkingShort-v1",
    lambda **kwargs: gym.make("CliffWalking-v1", disable_env_checker=True),
    max_episode_steps=500,
    **bare,
)
