"""Atari as CleanRL and Stable-Baselines3 prepare it: frames of 84 x 84 in grey, four to a step, up to
30 steps of nothing at the start of a game, FIRE where a game waits for it, and a life is an episode.

    python ppo_lstm_puffer.py --config configs/atari.yaml
    python tools/play.py latest --env.episodic_life false    # whole games

--env.game Breakout is another. episodic_return is of a life, env/episode/r of a whole game. Frames
are not stacked: the LSTM has seen those before.
"""

import ale_py  # noqa: F401  registers ALE/...
import gymnasium as gym


class EpisodicLife(gym.Wrapper):
    """A lost life ends the episode; the game goes on with the next."""

    game_over = True

    def step(self, action):
        lives = self.unwrapped.ale.lives()
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.game_over = terminated or truncated
        terminated = terminated or 0 < self.unwrapped.ale.lives() < lives
        return observation, reward, terminated, truncated, info

    def reset(self, **kwargs):
        if self.game_over:
            return self.env.reset(**kwargs)
        observation, _, _, _, info = self.env.step(0)
        return observation, info


class FireReset(gym.Wrapper):
    def reset(self, **kwargs):
        self.env.reset(**kwargs)
        observation, _, _, _, info = self.env.step(1)  # a game over here ends in the next step
        return observation, info


def make(game="Pong", episodic_life=True, **kwargs):
    env = gym.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.0, **kwargs)
    env = gym.wrappers.AtariPreprocessing(gym.wrappers.RecordEpisodeStatistics(env))
    if episodic_life:
        env = EpisodicLife(env)
    return FireReset(env) if env.unwrapped.get_action_meanings()[1] == "FIRE" else env


gym.register("Atari-v0", make)
