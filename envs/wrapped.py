"""Environments that need a wrapper, as docs/environments.md says: an id for a function each.

python ppo_lstm_puffer.py --env-id envs.wrapped:Grid-v0 --env.name MiniGrid-MemoryS11-v0
python ppo_lstm_puffer.py --env-id envs.wrapped        # parallel_env, agents of unlike spaces
"""

import gymnasium as gym
import numpy as np


def grid(name, **kwargs):
    """MiniGrid's cells one-hot, without the mission and the direction."""
    from minigrid.wrappers import ImgObsWrapper, OneHotPartialObsWrapper

    env = ImgObsWrapper(OneHotPartialObsWrapper(gym.make(name, **kwargs)))
    shape = env.observation_space.shape
    env.observation_space = gym.spaces.Box(0, 1, shape, np.uint8)  # 255 would be pixels
    return env


def minatar(game="breakout"):
    """MinAtar's, which registers no ids by itself."""
    from minatar.gym import BaseEnv

    return BaseEnv(game)


def network_attack(name="Tiny-v0"):
    """NASim's actions must be of Python's int."""
    import nasim  # noqa: F401  registers them

    env = gym.make(name)
    return gym.wrappers.TransformAction(env, int, env.action_space)


def objectives(name, **kwargs):
    """MO-Gymnasium with one reward, the weighted sum of its vector."""
    import mo_gymnasium

    env = mo_gymnasium.make(name, **kwargs)
    return mo_gymnasium.wrappers.LinearReward(env)


def trading(bars=300):
    """Gym Trading Env with the prices of a random walk."""
    import gym_trading_env  # noqa: F401  registers TradingEnv
    import pandas

    walk = np.random.default_rng(1).normal(0, 0.01, bars).cumsum()
    prices = pandas.DataFrame({"close": 100 * np.exp(walk)})
    for column in ("open", "high", "low"):
        prices[column] = prices["close"]
    prices["feature_change"] = prices["close"].pct_change().fillna(0)
    prices.index = pandas.date_range("2020-01-01", periods=bars, freq="h")
    return gym.make("TradingEnv", df=prices, positions=[-1, 0, 1], verbose=0)


class Crafter(gym.Env):
    """Crafter's, which is as old as gym: it has another reset and step, and a seed when made."""

    observation_space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
    action_space = gym.spaces.Discrete(17)

    def reset(self, seed=None, options=None):
        import crafter

        super().reset(seed=seed)
        self.env = crafter.Env(seed=int(self.np_random.integers(2**31)))
        return self.env.reset(), {}

    def step(self, action):
        observation, reward, done, info = self.env.step(action)
        dead = info["discount"] == 0
        return observation, reward, dead, done and not dead, info


def parallel_env(**kwargs):
    """MPE's tag, whose agents have unlike spaces."""
    import supersuit
    from mpe2 import simple_tag_v3

    env = simple_tag_v3.parallel_env(**kwargs)
    return supersuit.pad_action_space_v0(supersuit.pad_observations_v0(env))


gym.register("Grid-v0", grid, kwargs={"name": "MiniGrid-MemoryS7-v0"})
gym.register("MinAtar-v0", minatar)
gym.register("NetworkAttack-v0", network_attack)
gym.register("Objectives-v0", objectives)
gym.register("Trading-v0", trading)
gym.register("Crafter-v0", Crafter)
