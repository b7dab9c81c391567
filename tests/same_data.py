"""Runs a script on environments and random numbers that do not depend on how many ranks share them.

    python same_data.py MODULE OUT ARGUMENTS...       (or under torchrun)

Agent i of all sees the same whichever rank has it, and one process draws its segments in two
halves, as two ranks do. Leaves every rank's parameters and buffers after training, the gradients
of its first update, and how many chunks and updates there were, in OUT/rank<k>.pt. With DRIFT in
the environment, the last rank's parameters are changed a little before its first update.
On a GPU with --no-cuda-graphs: a graph would repeat what is drawn here.
"""

import importlib
import os
import sys
from collections import defaultdict

import gymnasium as gym
import numpy as np
import torch

RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
name, out, *arguments = sys.argv[1:]
script = importlib.import_module(name)
num_envs = int(arguments[arguments.index("--num-envs") + 1])
seen = {"chunks": 0, "updates": 0}


def share(array):
    """This rank's part of what all agents have, along the first dimension."""
    n = len(array) // WORLD_SIZE
    return array[RANK * n : (RANK + 1) * n]


class SameEnvs:
    """Agents that see random numbers. Episodes end and actions are ignored at random, and one
    action of three is right. What that is worth, and what is seen, grows from agent to agent: so a
    rank's statistics are not those of all."""

    num_groups = 1
    next_step_reset = True
    means = script.Envs.means

    def __init__(self, *_):
        self.observation_space = gym.spaces.Box(-5, 5, (6,), np.float32)
        self.action_space = gym.spaces.Discrete(3)
        self.num_agents = num_envs // WORLD_SIZE
        self.actions = np.zeros(self.num_agents, int)
        self.time = 0
        self.episodes = []
        self.logs = defaultdict(list)

    def reset(self):
        pass

    def receive(self):
        worth = np.linspace(0.1, 1, num_envs, dtype=np.float32)
        numbers = np.random.default_rng(self.time).random((num_envs, 9), np.float32)
        numbers[:, :6] += worth[:, None]
        numbers = share(numbers)
        rewards = (self.actions == (3 * numbers[:, 6]).astype(int)) * share(worth)
        dones = (numbers[:, 7] < 0.1) | (self.time == 0)
        valid = numbers[:, 8] < 0.9
        self.time += 1
        self.logs["rank"].append((RANK, 1))
        return slice(0, self.num_agents), numbers[:, :6], rewards, *np.float32((dones, valid))

    def send(self, actions):
        self.actions = actions[:, 0]

    def close(self):
        pass


generator = torch.Generator().manual_seed(0)


def same_noise(self, steps, agents, device=None):
    noise = torch.empty(agents * WORLD_SIZE, steps, self.num_logits)
    return share(noise.exponential_(generator=generator)).transpose(0, 1).to(device)


def sample_halves(advantages, valid, _, k, alpha, beta, sample=script.sample_segments):
    """Of each half of all segments half of the minibatch; a rank of two has one of them."""
    n = num_envs // 2
    draws = []
    for half in range(2):
        uniform = torch.rand(n + 1, generator=generator).to(advantages.device)
        if WORLD_SIZE == 1:
            its = slice(half * n, (half + 1) * n)
            given = advantages[:, its], valid[:, its], uniform
            index, weights = sample(*given, k // 2, alpha, beta)
            draws.append((index + half * n, weights))
        elif half == RANK:
            draws.append(sample(advantages, valid, uniform, k, alpha, beta))
    return tuple(map(torch.cat, zip(*draws)))


def count_chunks(*args, loss=script.ppo_loss):
    seen["chunks"] += 1
    return loss(*args)


def clip_grad_norm_(parameters, max_norm, clip=torch.nn.utils.clip_grad_norm_):
    parameters = list(parameters)
    if "DRIFT" in os.environ and seen["updates"] == 0 and RANK == WORLD_SIZE - 1:
        with torch.no_grad():
            parameters[0].mul_(1.01)
    seen["updates"] += 1
    seen.setdefault("gradients", [parameter.grad.clone() for parameter in parameters])
    return clip(parameters, max_norm)


def begin(self, agent, optimizers, begin=script.Run.begin):
    seen["state"] = agent.state_dict()  # the same tensors to the end
    return begin(self, agent, optimizers)


script.make_envs = SameEnvs
script.Agent.sampling_noise = same_noise
script.sample_segments = sample_halves
script.ppo_loss = count_chunks
script.nn.utils.clip_grad_norm_ = clip_grad_norm_
script.Run.begin = begin
sys.argv = [f"{name}.py", *arguments]
if name == "ppo_lstm_puffer":
    code = script.main(*script.parse_args(arguments))
else:
    code = script.main(arguments)
torch.save(seen, f"{out}/rank{RANK}.pt")
os._exit(code)  # as the script does, and for its reason
