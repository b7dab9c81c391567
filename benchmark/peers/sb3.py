"""Stable-Baselines3-contrib's RecurrentPPO on PufferLib's C environments and on Gymnasium's.

    .peers/sb3/bin/python benchmark/peers/sb3.py --seed 1 --seconds 600 --folder DIR
    .peers/sb3/bin/python benchmark/peers/sb3.py --env-id envs.memory:CountRecallEasy-v0 --folder DIR

Its settings are those of the task in rl_zoo.yaml beside this file; what is said neither there nor
here is its default. A task that is not there has "ocean" or, as a Gymnasium id (module:Id-v0),
"gymnasium", and an encoder as ours. The reasons stand there.
"""

import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import yaml
from peer import Metrics, arguments
from pufferlib.ocean.environment import env_creator
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

SETTINGS = yaml.safe_load(Path(__file__).with_name("rl_zoo.yaml").read_text())
NOTE = "its settings in benchmark/peers/rl_zoo.yaml, which are rl-zoo's where it has any"


class Encoder(BaseFeaturesExtractor):
    """Linear and GELU, as in our network."""

    def __init__(self, observation_space: gym.Space, features_dim: int = 128):
        super().__init__(observation_space, features_dim)
        self.net = torch.nn.Sequential(
            torch.nn.Flatten(),
            torch.nn.Linear(int(np.prod(observation_space.shape)), features_dim),
            torch.nn.GELU(),
        )

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return self.net(observations)


class NativeVecEnv(VecEnv):
    """PufferLib's C vector as a VecEnv. Rewards are clipped to [-1, 1]."""

    def __init__(self, env_id: str, num_envs: int, seed: int):
        self.env = env_creator(f"puffer_{env_id}")(num_envs=num_envs, seed=seed)
        self.first_seed = seed
        super().__init__(num_envs, self.env.single_observation_space, self.env.single_action_space)
        self.infos = [{} for _ in range(num_envs)]
        self.returns = np.zeros(num_envs)
        self.episodic_returns: list[float] = []
        self.scores: list[float] = []

    def reset(self) -> np.ndarray:
        return self.env.reset(self.first_seed)[0].copy()

    def step_async(self, actions: np.ndarray):
        self.actions = actions

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict]]:
        observations, rewards, terminals, truncations, logs = self.env.step(self.actions)
        dones = terminals | truncations
        self.scores += [log["score"] for log in logs if "score" in log]
        self.returns += rewards
        if dones.any():
            self.episodic_returns += self.returns[dones].tolist()
            self.returns[dones] = 0
        # A copy: the C environments write in place.
        return observations.copy(), rewards.clip(-1, 1), dones, self.infos

    def close(self):
        self.env.close()

    def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs

    def get_attr(self, attr_name: str, indices: Any = None) -> list:
        return [getattr(self.env, attr_name, None)] * self.num_envs

    def set_attr(self, *args: Any, **kwargs: Any):
        raise NotImplementedError

    env_method = set_attr


class Lines(BaseCallback):
    """A line per iteration, written when the next begins; ends training at the limits."""

    def __init__(self, metrics: Metrics):
        super().__init__()
        self.metrics = metrics
        self.stop = False

    def finished(self) -> dict[str, list[float]]:
        """The scores and returns of episodes that ended since the last call."""
        if isinstance(self.training_env, NativeVecEnv):
            env = self.training_env
            finished = {"env__score": env.scores, "episodic_return": env.episodic_returns}
            env.scores = []
            env.episodic_returns = []
        else:
            finished = {"episodic_return": [episode["r"] for episode in self.model.ep_info_buffer]}
            self.model.ep_info_buffer.clear()
        return finished

    def _on_rollout_start(self):
        if self.num_timesteps:
            means = {key: np.mean(values) for key, values in self.finished().items() if values}
            self.stop = self.metrics.line(self.num_timesteps, **means)

    def _on_step(self) -> bool:
        return not (self.stop or self.metrics.late(time.time()))


def shaped(env: gym.Env) -> gym.Env:
    """As its networks take it: a grey image with a channel; what is no Box as one vector."""
    space = env.observation_space
    if not isinstance(space, gym.spaces.Box):
        return gym.wrappers.FlattenObservation(env)
    flat = len(space.shape) == 2
    return gym.wrappers.ReshapeObservation(env, (*space.shape, 1)) if flat else env


def main():
    parser = arguments(__doc__.split("\n")[0])
    parser.add_argument("--episodes", type=int, default=0, help="to play when training is over")
    args = parser.parse_args()
    tuned = args.env_id in SETTINGS
    gymnasium = ":" in args.env_id
    others = "gymnasium" if gymnasium else "ocean"
    config = dict(SETTINGS[args.env_id if tuned else others])
    note = config.pop("note", NOTE)
    n_envs = config.pop("n_envs")
    if gymnasium:
        env = make_vec_env(args.env_id, n_envs, args.seed, wrapper_class=shaped)
    else:
        env = NativeVecEnv(args.env_id, n_envs, args.seed)
    if config.pop("normalize", False):
        env = VecNormalize(env, gamma=config["gamma"])
    total = config.pop("n_timesteps", args.total_timesteps)
    network = config.pop("policy_kwargs", {})
    policy = dict(network)
    if "activation_fn" in policy:
        policy["activation_fn"] = getattr(torch.nn, policy["activation_fn"])
    if not tuned:
        policy["features_extractor_class"] = Encoder
    linear = config.pop("linear", [])
    falling = {name: (lambda left, first=config[name]: left * first) for name in linear}
    options = {"policy": "MlpLstmPolicy", "policy_kwargs": policy, "seed": args.seed}
    model = RecurrentPPO(env=env, device="cpu", **(options | config | falling))
    said = config | network | {"n_envs": n_envs, "linear": linear}
    metrics = Metrics(args, "sb3-contrib", said, note)
    if tuned:
        metrics.first = metrics.start  # nothing is compiled, and an iteration may take a minute
    model.learn(total, callback=Lines(metrics))
    if args.episodes:  # with the most likely actions, as tools/play.py plays ours
        if isinstance(env, VecNormalize):
            env.training = False
            env.norm_reward = False
        returns, _ = evaluate_policy(model, env, args.episodes, return_episode_rewards=True)
        metrics.played = {"episodes": len(returns), "episodic_return": {"mean": np.mean(returns)}}
    metrics.finish()


if __name__ == "__main__":
    main()
