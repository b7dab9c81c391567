"""Sample Factory 2's APPO with an LSTM on PufferLib's C environments.

    .peers/sample_factory/bin/python benchmark/peers/sample_factory.py --seed 1 --seconds 600 --folder DIR

Hyperparameters are Sample Factory's defaults (rollouts of 32, minibatches of 1024, one epoch, Adam 1e-4, normalized
observations and returns), with rewards clipped to [-1, 1] and an LSTM in place of its GRU. The environments are stepped
in batches (`--batched_sampling`), asynchronously, as it recommends: a learner, a sampler and a rollout worker in
processes of their own, and two groups of 512 environments in turn. All on one core that made 29 thousand steps a
second, the learner using 70 % of it; `--serial 1`, everything in one process, made 35 there, with minibatches of 1024
as with 8192 and with 1024 environments as with 2048.
"""

import sys

sys.path.append(
    sys.path.pop(0)
)  # this folder last, or this file would be taken for the package of its name

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

NOTE = "asynchronous, batched, one rollout worker with two groups of 512 environments; else its defaults, with an LSTM"


class LinearEncoder(Encoder):
    """Linear and GELU, as in our network."""

    def __init__(self, cfg, obs_space: gym.spaces.Dict):
        super().__init__(cfg)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(int(np.prod(obs_space["obs"].shape)), 128), torch.nn.GELU()
        )

    def forward(self, obs_dict: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.net(obs_dict["obs"].flatten(1))

    def get_out_size(self) -> int:
        return 128


class NativeEnv(gym.Env):
    """PufferLib's C vector, which steps all environments in one call, as a batched environment of Sample Factory's."""

    is_multiagent = True

    def __init__(self, full_env_name: str, cfg, env_config, render_mode: str | None = None):
        self.num_agents = cfg.env_agents
        # Without env_config it is made only to be asked for its spaces.
        self.first_seed = cfg.seed + 1000 * (env_config.env_id if env_config else 0)
        self.env = env_creator(full_env_name)(num_envs=self.num_agents, seed=self.first_seed)
        self.observation_space, self.action_space = (
            self.env.single_observation_space,
            self.env.single_action_space,
        )

    def reset(self, **kwargs):
        return self.env.reset(self.first_seed)[0], {}

    def step(self, actions: np.ndarray):
        observations, rewards, terminals, truncations, logs = self.env.step(actions)
        # Numbers in this dictionary reach the runner's policy_avg_stats.
        return (
            observations,
            rewards,
            terminals,
            truncations,
            {"score": logs[0]["score"]} if logs and logs[0] else {},
        )

    def close(self):
        self.env.close()


class Lines(AlgoObserver):
    """A line per training iteration; ends the program at the limits."""

    def __init__(self, metrics: Metrics):
        self.metrics = metrics

    def on_training_step(self, runner: Runner, training_iteration_since_resume: int):
        step = sum(runner.env_steps.values())
        if step > self.metrics.step:
            stats = {"env__score": "score", "episodic_return": "reward"}
            values = {
                ours: runner.policy_avg_stats.pop(theirs, [[]])[0] for ours, theirs in stats.items()
            }
            if self.metrics.line(
                step, **{name: np.mean(list(value)) for name, value in values.items() if len(value)}
            ):
                self.metrics.finish()


def main():
    parser = arguments(__doc__.split("\n")[0])
    parser.add_argument("--agents", type=int, default=1024, help="environments in all")
    parser.add_argument("--batch-size", type=int, default=1024, help="steps per minibatch")
    parser.add_argument(
        "--serial", type=int, default=0, help="1: everything in one process, synchronously"
    )
    args = parser.parse_args()
    name = f"puffer_{args.env_id}"
    register_env(name, NativeEnv)
    global_model_factory().register_encoder_factory(LinearEncoder)
    groups = 1 if args.serial else 2  # while one is stepped, actions are chosen for the other
    ours = {
        "env": name,
        "seed": args.seed,
        "device": "cpu",
        "train_dir": args.folder / "scratch",
        "restart_behavior": "overwrite",
        "serial_mode": bool(args.serial),
        "async_rl": not args.serial,
        "batched_sampling": True,
        "num_workers": 1,
        "num_envs_per_worker": groups,
        "worker_num_splits": groups,
        "batch_size": args.batch_size,
        "num_batches_per_epoch": args.agents
        * 32
        // args.batch_size,  # an iteration is one rollout, 32 steps, of all
        "reward_clip": 1.0,
        "rnn_type": "lstm",
        "rnn_size": 128,
        "train_for_env_steps": 10**12,  # Lines ends it
    }
    argv = [f"--{key}={value}" for key, value in ours.items()]
    sf_parser, _ = parse_sf_args(argv)
    cfg = parse_full_cfg(sf_parser, argv)
    cfg.env_agents = args.agents // groups
    cfg, runner = make_runner(cfg)
    chosen = ["rollout", "num_epochs", "learning_rate", "gamma", "gae_lambda", "ppo_clip_ratio"]
    metrics = Metrics(
        args,
        "sample-factory",
        ours | {key: getattr(cfg, key) for key in [*chosen, "exploration_loss_coeff"]},
        NOTE,
    )
    runner.register_observer(Lines(metrics))
    runner.init()
    runner.run()
    metrics.finish(1)  # it has failed or was interrupted: Lines would have ended it


if __name__ == "__main__":
    main()
