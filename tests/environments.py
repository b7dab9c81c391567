"""Gymnasium environments of the tests alone, registered on import: environments:Image-v0."""

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete

from envs.probes import Episode


class Task(Episode):
    """Steps that are worth what reward(action) says, so many an episode."""

    def __init__(self, length: int = 4):
        self.length = length

    def step(self, action):
        reward = float(self.reward(action))
        self.t += 1
        return self.observe(), reward, self.t == self.length, False, {}


class Continuous(Task):
    """Reward -|action - target|^2, a new target every step. The best return is 0."""

    observation_space = Box(-1, 1, (2,), np.float32)
    action_space = Box(-1, 1, (2,), np.float32)

    def observe(self):
        self.target = self.np_random.uniform(-0.8, 0.8, 2).astype(np.float32)
        return self.target.copy()

    def reward(self, action):
        return -float(((np.asarray(action) - self.target) ** 2).sum())


class DictObs(Task):
    """A Dict of three dtypes. Reward 1 for the action that `colour` names."""

    observation_space = Dict(
        colour=Discrete(3),
        pixels=Box(0, 255, (5,), np.uint8),
        position=Box(-np.inf, np.inf, (2,), np.float32),
    )
    action_space = Discrete(3)

    def observe(self):
        self.colour = int(self.np_random.integers(3))
        pixels = self.np_random.integers(256, size=5).astype(np.uint8)
        position = self.np_random.normal(size=2).astype(np.float32)
        return {"colour": self.colour, "pixels": pixels, "position": position}

    def reward(self, action):
        return action == self.colour


class TwoDials(Task):
    """Two choices at once: half a point for each dial set as shown (one-hot, 3 + 2)."""

    observation_space = Box(0, 1, (5,), np.float32)
    action_space = MultiDiscrete([3, 2])

    def observe(self):
        self.shown = self.np_random.integers([3, 2])
        return np.concatenate((np.eye(3)[self.shown[0]], np.eye(2)[self.shown[1]]))

    def reward(self, action):
        return (np.asarray(action) == self.shown).mean()


class Image(Task):
    """84 x 84 x 3 bytes, bright on one side. Reward 1 for naming the side."""

    observation_space = Box(0, 255, (84, 84, 3), np.uint8)
    action_space = Discrete(2)

    def observe(self):
        self.side = int(self.np_random.integers(2))
        image = np.zeros((84, 84, 3), np.uint8)
        image[:, 42 * self.side : 42 * (self.side + 1)] = 255
        return image

    def reward(self, action):
        return action == self.side


class Truncating(Episode):
    """Shows the step's number. Reward 1 per step; truncated (or terminated) after `length`."""

    observation_space = Box(0, np.inf, (1,), np.float32)
    action_space = Discrete(2)

    def __init__(self, length: int = 3, terminate: bool = False):
        self.length = length
        self.terminate = terminate

    def step(self, action):
        self.t += 1
        over = self.t == self.length
        observation = np.full(1, self.t, np.float32)
        return observation, 1.0, over and self.terminate, over and not self.terminate, {}


for environment in (Continuous, DictObs, TwoDials, Image, Truncating):
    gym.register(f"{environment.__name__}-v0", entry_point=environment)
