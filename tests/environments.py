"""Gymnasium environments for the tests, registered on import: environments:CueRecall-v0."""

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete


class Episode(gym.Env):
    """Counts its steps in t, from 0 at each reset, and shows what observe() says: zeros."""

    def begin(self):
        """Draws what one episode is about."""

    def observe(self):
        return np.zeros(self.observation_space.shape, np.float32)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.begin()
        return self.observe(), {}


class CueRecall(Episode):
    """The first observation shows a cue, the next `delay` are blank, the last says go.

    Then the reward is 1 for the action that the cue named. Observation (cues + 1): the cue,
    one-hot, then the go flag. Without memory the best expected return is 1 / cues.
    """

    def __init__(self, cues: int = 4, delay: int = 4):
        self.cues = cues
        self.delay = delay
        self.observation_space = Box(0, 1, (cues + 1,), np.float32)
        self.action_space = Discrete(cues)

    def begin(self):
        self.cue = int(self.np_random.integers(self.cues))

    def observe(self):
        observation = super().observe()
        if self.t == 0:
            observation[self.cue] = 1
        observation[-1] = self.t == self.delay + 1
        return observation

    def step(self, action):
        go = self.t == self.delay + 1
        reward = float(go and action == self.cue)
        self.t += 1
        return self.observe(), reward, go, False, {}


class Continuous(Episode):
    """Reward -|action - target|^2, a new target every step, four steps. The best return is 0."""

    observation_space = Box(-1, 1, (2,), np.float32)
    action_space = Box(-1, 1, (2,), np.float32)

    def __init__(self, length: int = 4):
        self.length = length

    def observe(self):
        self.target = self.np_random.uniform(-0.8, 0.8, 2).astype(np.float32)
        return self.target.copy()

    def step(self, action):
        reward = -float(((np.asarray(action) - self.target) ** 2).sum())
        self.t += 1
        return self.observe(), reward, self.t == self.length, False, {}


class DictObs(Episode):
    """A Dict of three dtypes. Reward 1 for the action that `colour` names; six steps."""

    observation_space = Dict(
        colour=Discrete(3),
        pixels=Box(0, 255, (5,), np.uint8),
        position=Box(-np.inf, np.inf, (2,), np.float32),
    )
    action_space = Discrete(3)

    def __init__(self, length: int = 6):
        self.length = length

    def observe(self):
        self.colour = int(self.np_random.integers(3))
        pixels = self.np_random.integers(256, size=5).astype(np.uint8)
        position = self.np_random.normal(size=2).astype(np.float32)
        return {"colour": self.colour, "pixels": pixels, "position": position}

    def step(self, action):
        reward = float(action == self.colour)
        self.t += 1
        return self.observe(), reward, self.t == self.length, False, {}


class TwoDials(Episode):
    """Two choices at once: half a point for each dial set as shown (one-hot, 3 + 2); four steps."""

    observation_space = Box(0, 1, (5,), np.float32)
    action_space = MultiDiscrete([3, 2])

    def __init__(self, length: int = 4):
        self.length = length

    def observe(self):
        self.shown = self.np_random.integers([3, 2])
        return np.concatenate((np.eye(3)[self.shown[0]], np.eye(2)[self.shown[1]]))

    def step(self, action):
        reward = float((np.asarray(action) == self.shown).mean())
        self.t += 1
        return self.observe(), reward, self.t == self.length, False, {}


class Image(Episode):
    """84 x 84 x 3 bytes, bright on one side. Reward 1 for naming the side; five steps."""

    observation_space = Box(0, 255, (84, 84, 3), np.uint8)
    action_space = Discrete(2)

    def __init__(self, length: int = 5):
        self.length = length

    def observe(self):
        self.side = int(self.np_random.integers(2))
        image = np.zeros((84, 84, 3), np.uint8)
        image[:, 42 * self.side : 42 * (self.side + 1)] = 255
        return image

    def step(self, action):
        reward = float(action == self.side)
        self.t += 1
        return self.observe(), reward, self.t == self.length, False, {}


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


class NaNReward(Episode):
    """The reward is 0 for `healthy` steps over all episodes of ten steps, then NaN."""

    observation_space = Box(-1, 1, (2,), np.float32)
    action_space = Discrete(2)

    def __init__(self, healthy: int = 50):
        self.healthy = healthy
        self.steps = 0

    def step(self, action):
        self.t += 1
        self.steps += 1
        reward = 0.0 if self.steps <= self.healthy else float("nan")
        return np.full(2, self.t / 10, np.float32), reward, self.t == 10, False, {}


class FarReward(Episode):
    """The first observation shows a cue; the first action, `delay` steps before the only reward,
    decides it: 1 if it names the cue.

    Observation (4): the cue and the action taken, both one-hot, until `shown` steps after that
    action; then zeros, with no clock. Later actions do nothing. 0.5 is chance, 1 perfect. With
    `shown` = delay the present observation tells all (only credit has to travel); with 1 the value
    must remember the choice too; with 0 nothing but the reward ever tells what was chosen.
    """

    observation_space = Box(0, 1, (4,), np.float32)
    action_space = Discrete(2)

    def __init__(self, delay: int = 128, shown: int = 1):
        self.delay = delay
        self.shown = shown

    def begin(self):
        self.cue = int(self.np_random.integers(2))

    def observe(self):
        observation = super().observe()
        if self.t <= self.shown:
            observation[self.cue] = 1
            if self.t > 0:
                observation[2 + self.choice] = 1
        return observation

    def step(self, action):
        if self.t == 0:
            self.choice = int(action)
        over = self.t == self.delay
        self.t += 1
        return self.observe(), float(over and self.choice == self.cue), over, False, {}


class HiddenStart(Episode):
    """The first press (action 1) of an episode is worth 1 in its step number `when`, counted from
    0, and nothing in any other.

    The observation is zero, and an episode ends after `when` + 1 to 16 steps, drawn anew: only a
    state that begins with the episode can count its steps. 1 is perfect. Who does not know where
    episodes begin gets 1 / (`when` + 1) at best, by pressing in every step of that number. With
    `shown` the first observation is 1.
    """

    observation_space = Box(0, 1, (1,), np.float32)
    action_space = Discrete(2)

    def __init__(self, when: int = 3, shown: bool = False):
        self.when = when
        self.shown = shown

    def begin(self):
        self.pressed = False
        self.length = int(self.np_random.integers(self.when + 1, 17))

    def observe(self):
        return np.full(1, self.shown and self.t == 0, np.float32)

    def step(self, action):
        reward = float(action == 1 and not self.pressed and self.t == self.when)
        self.pressed |= action == 1
        self.t += 1
        return self.observe(), reward, self.t == self.length, False, {}


for environment in Episode.__subclasses__():
    gym.register(f"{environment.__name__}-v0", entry_point=environment)
gym.register("ShownStart-v0", entry_point=HiddenStart, kwargs={"shown": True})
