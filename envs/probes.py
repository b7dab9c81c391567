"""Probe environments: small tasks, each of which asks one thing of a recurrent trainer.

    python ppo_lstm_puffer.py --config configs/CueRecall-v0.yaml --env-id envs.probes:HiddenStart-v0

CueRecall: a memory over a few steps. FarReward: credit over 128 steps. HiddenStart: a state that
begins anew with every episode. The tests and the reports of the algorithm's parts train on them.
"""

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete


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
