"""Sample Factory 2's APPO with an LSTM on PufferLib's C environments.

    .peers/sample_factory/bin/python benchmark/peers/sample_factory.py --seconds 600 --folder DIR

Its defaults (rollouts of 32, minibatches of 1024, one epoch, Adam 1e-4, normalized observations and
returns), with rewards clipped to [-1, 1] and an LSTM in place of its GRU. Environments are stepped
in batches, asynchronously, as it recommends: a learner, a sampler and a rollout worker in processes
of their own, and two groups of 512 environments in turn. All on one core that made 29 thousand
steps a second; with everything in one process (serial_mode) it made 35 there.
"""

import sys

sys.path.append(sys.path.pop(0))  # this folder last: this file has the package's name

import gymnasium as gym
import numpy as np
import torch
from peer import Metrics, arguments
from pufferlib.ocean.environment import env_creator
from sample_factory.algo.runners.runner import AlgoObserver, Runner
from sample_factory.algo.utils.context import global_model_factory
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.model.encoder import Encoder
from sample_factory.train import make_runner

NOTE = "asynchronous, batched, one rollout worker with two groups of 512 environments; "
NOTE += "else its defaults, with an LSTM"
GROUPS = 2  # while one is stepped, actions are chosen for the other
GROUP_SIZE = 512
BATCH_SIZE = 1024


class LinearEncoder(Encoder):
    """Linear and GELU, as in our network."""

    def __init__(self, cfg, obs_space: gym.spaces.Dict):
        super().__init__(cfg)
        inputs = int(np.prod(obs_space["obs"].shape))
        self.net = torch.nn.Sequential(torch.nn.Linear(inputs, 128), torch.nn.GELU())

    def forward(self, obs_dict: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.net(obs_dict["obs"].flatten(1))

    def get_out_size(self) -> int:
        return 128


class NativeEnv(gym.Env):
    """PufferLib's C vector as a batched environment of Sample Factory's."""

    is_multiagent = True
    num_agents = GROUP_SIZE

    def __init__(self, full_env_name: str, cfg, env_config, render_mode: str | None = None):
        # Without env_config it is made only to be asked for its spaces.
        self.first_seed = cfg.seed + 1000 * (env_config.env_id if env_config else 0)
        self.env = env_creator(full_env_name)(num_envs=GROUP_SIZE, seed=self.first_seed)
        self.observation_space = self.env.single_observation_space
        self.action_space = self.env.single_action_space

    def reset(self, **kwargs):
        return self.env.reset(self.first_seed)[0], {}

    def step(self, actions: np.ndarray):
        *result, logs = self.env.step(actions)
        # Numbers in this dictionary reach the runner's policy_avg_stats.
        return *result, {"score": logs[0]["score"]} if logs and logs[0] else {}

    def close(self):
        self.env.close()


class Lines(AlgoObserver):
    """A line per training iteration; ends the program at the limits."""

    def __init__(self, metrics: Metrics):
        self.metrics = metrics

    def on_training_step(self, runner: Runner, training_iteration_since_resume: int):
        step = sum(runner.env_steps.values())
        if step > self.metrics.step:
            values = {}
            for ours, theirs in ("env__score", "score"), ("episodic_return", "reward"):
                found = list(runner.policy_avg_stats.pop(theirs, [[]])[0])
                if found:
                    values[ours] = np.mean(found)
            if self.metrics.line(step, **values):
                self.metrics.finish()


def main():
    args = arguments(__doc__.split("\n")[0]).parse_args()
    name = f"puffer_{args.env_id}"
    register_env(name, NativeEnv)
    global_model_factory().register_encoder_factory(LinearEncoder)
    ours = {
        "env": name,
        "seed": args.seed,
        "device": "cpu",
        "train_dir": args.folder / "scratch",
        "restart_behavior": "overwrite",
        "serial_mode": False,
        "async_rl": True,
        "batched_sampling": True,
        "num_workers": 1,
        "num_envs_per_worker": GROUPS,
        "worker_num_splits": GROUPS,
        "batch_size": BATCH_SIZE,
        # An iteration is one rollout, 32 steps, of all.
        "num_batches_per_epoch": GROUPS * GROUP_SIZE * 32 // BATCH_SIZE,
        "reward_clip": 1.0,
        "rnn_type": "lstm",
        "rnn_size": 128,
        "train_for_env_steps": 10**12,  # Lines ends it
    }
    argv = [f"--{key}={value}" for key, value in ours.items()]
    sf_parser, _ = parse_sf_args(argv)
    cfg, runner = make_runner(parse_full_cfg(sf_parser, argv))
    chosen = ["rollout", "num_epochs", "learning_rate", "gamma", "gae_lambda", "ppo_clip_ratio"]
    chosen.append("exploration_loss_coeff")
    config = ours | {key: getattr(cfg, key) for key in chosen}
    metrics = Metrics(args, "sample-factory", config, NOTE)
    runner.register_observer(Lines(metrics))
    runner.init()
    runner.run()
    metrics.finish(1)  # it has failed or was interrupted: Lines would have ended it


if __name__ == "__main__":
    main()
