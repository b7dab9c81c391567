"""Stable-Baselines3-contrib's RecurrentPPO on PufferLib's C environments and on Gymnasium's.

    .peers/sb3/bin/python benchmark/peers/sb3.py --seed 1 --seconds 600 --folder DIR
    .peers/sb3/bin/python benchmark/peers/sb3.py --env-id envs.memory:CountRecallEasy-v0 --folder DIR

Hyperparameters are rl-zoo's for recurrent PPO on Atari games, clipped rewards included (ppo_lstm.yml: four epochs,
2.5e-4 and 0.1 decaying linearly, entropy 0.01), and sb3's own where it names none. Sizes are chosen for speed: rl-zoo's
8 x 128 in minibatches of 256 made 0.4 thousand steps a second on a shared core, 512 x 16 in minibatches of 4096 make
16 to 18; more environments, longer segments and larger minibatches make no more, smaller minibatches less. One LSTM:
`enable_critic_lstm=False`, as rl-zoo has it for some tasks, gives the critic a linear layer of its own. With
`shared_lstm=True` the value's gradient would not reach the network: a return of 3 after a million steps, against 6.

A Gymnasium id (module:Id-v0) runs in its own DummyVecEnv with GYMNASIUM below, in which what is not said is its default;
the tasks of rl_zoo.yaml with what stands there.
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

NOTE = "512 environments x 16 steps, minibatches of 4096: fastest of eleven sizes tried; otherwise rl-zoo's for Atari"
ATARI = {
    "n_epochs": 4,
    "learning_rate": 2.5e-4,
    "clip_range": 0.1,
    "ent_coef": 0.01,
    "vf_coef": 0.5,
}
ATARI |= {
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "max_grad_norm": 0.5,
    "linear": ["learning_rate", "clip_range"],
}
GYMNASIUM = {
    "n_steps": 64,
    "batch_size": 1024,
    "n_epochs": 4,
    "learning_rate": 1e-3,
    "gamma": 0.99,
    "gae_lambda": 0.95,
}
GYMNASIUM_NOTE = (
    "64 environments x 64 steps, minibatches of 1024, four epochs, 1e-3: its own defaults otherwise"
)
RL_ZOO = yaml.safe_load(Path(__file__).with_name("rl_zoo.yaml").read_text())
RL_ZOO_NOTE = "its settings in benchmark/peers/rl_zoo.yaml, which are rl-zoo's where it has any"


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
    """PufferLib's C vector, which steps all environments in one call, as a VecEnv. Rewards are clipped to [-1, 1]."""

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
        return (
            observations.copy(),
            rewards.clip(-1, 1),
            dones,
            self.infos,
        )  # the C environments write in place

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
        self.metrics, self.stop = metrics, False

    def finished(self) -> dict[str, list[float]]:
        """The scores and returns of episodes that ended since the last call."""
        if isinstance(self.training_env, NativeVecEnv):
            env = self.training_env
            finished = {"env__score": env.scores, "episodic_return": env.episodic_returns}
            env.scores, env.episodic_returns = [], []
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


def flat(env: gym.Env) -> gym.Env:
    """What is no Box as one vector, choices one-hot."""
    is_box = isinstance(env.observation_space, gym.spaces.Box)
    return env if is_box else gym.wrappers.FlattenObservation(env)


def main():
    parser = arguments(__doc__.split("\n")[0])
    parser.add_argument("--num-envs", type=int, default=512)
    parser.add_argument("--num-steps", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--episodes", type=int, default=0, help="to play when training is over")
    args = parser.parse_args()
    network = {"lstm_hidden_size": 128, "enable_critic_lstm": False, "net_arch": []}
    policy = network | {"features_extractor_class": Encoder}
    total = args.total_timesteps
    tuned = args.env_id in RL_ZOO
    if tuned:
        config = dict(RL_ZOO[args.env_id])
        note = RL_ZOO_NOTE
        env = make_vec_env(args.env_id, config.pop("n_envs"), args.seed, wrapper_class=flat)
        if config.pop("normalize", False):
            env = VecNormalize(env, gamma=config["gamma"])
        policy = dict(config.pop("policy_kwargs", {}))
        network = {key: str(value) for key, value in policy.items()}
        if "activation_fn" in policy:
            policy["activation_fn"] = getattr(torch.nn, policy["activation_fn"])
        total = config.pop("n_timesteps", total)
    elif ":" in args.env_id:
        env, config, note = (
            make_vec_env(args.env_id, 64, args.seed),
            dict(GYMNASIUM),
            GYMNASIUM_NOTE,
        )
    else:
        env = NativeVecEnv(args.env_id, args.num_envs, args.seed)
        config, note = ATARI | {"n_steps": args.num_steps, "batch_size": args.batch_size}, NOTE
    linear = {
        key: (lambda left, first=config[key]: left * first) for key in config.pop("linear", [])
    }
    model = RecurrentPPO(
        "MlpLstmPolicy",
        env,
        policy_kwargs=policy,
        seed=args.seed,
        device="cpu",
        **(config | linear),
    )
    metrics = Metrics(
        args,
        "sb3-contrib",
        config | network | {"n_envs": env.num_envs, "linear": list(linear)},
        note,
    )
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
