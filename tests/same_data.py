"""Runs a script on environments and random numbers that do not depend on how many ranks share them.

    python same_data.py MODULE OUT ARGUMENTS...       (or under torchrun)

Agent i of all sees the same whichever rank has it, and one process draws its segments in two halves, as two ranks do. Leaves
every rank's parameters after training, the gradients of its first update, and how many chunks an update had, in
OUT/rank<k>.pt. With DRIFT in the environment, the last rank's parameters are changed a little after the first update.
"""

import importlib
import os
import sys
from collections import defaultdict

import gymnasium as gym
import numpy as np
import torch

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
name, out, *arguments = sys.argv[1:]
script = importlib.import_module(name)
num_envs = int(arguments[arguments.index("--num-envs") + 1])
seen = {"chunks": torch.zeros(()), "updates": torch.zeros(())}


def share(array):
    """This rank's part of what all agents have, along the first dimension."""
    n = len(array) // WORLD_SIZE
    return array[RANK * n : (RANK + 1) * n]


class SameEnvs:
    """Agents that see random numbers; their episodes end and their actions are ignored at random; one action of three is
    right. What it is worth grows from agent to agent, so that the statistics of a rank are not those of all."""

    def __init__(self, *_, **__):
        self.single_observation_space = gym.spaces.Box(-5, 5, (6,), np.float32)
        self.single_action_space = gym.spaces.Discrete(3)
        self.num_agents, self.num_groups, self.num_actions = num_envs // WORLD_SIZE, 1, 1
        self.torch_dtype = torch.float32
        self.actions, self.time = np.zeros(self.num_agents, int), 0
        self.episodes, self.logs = [], defaultdict(list)

    def reset(self):
        pass

    def receive(self):
        numbers = share(np.random.default_rng(self.time).random((num_envs, 9), np.float32))
        rewards = (self.actions == (3 * numbers[:, 6]).astype(int)) * share(
            np.linspace(0.1, 1, num_envs)
        )
        dones, valid = numbers[:, 7] < 0.1, numbers[:, 8] < 0.9
        if self.time == 0:
            dones[:] = True
        self.time += 1
        return (
            slice(0, self.num_agents),
            numbers[:, :6],
            *(x.astype(np.float32) for x in (rewards, dones, valid)),
        )

    def send(self, actions):
        self.actions = actions[:, 0]

    def means(self):
        return {}

    def close(self):
        pass


generator = torch.Generator().manual_seed(0)


def same_noise(self, steps, agents, **_):
    noise = torch.empty(agents * WORLD_SIZE, steps, self.num_logits).exponential_(
        generator=generator
    )
    return share(noise).transpose(0, 1)


def sample_halves(advantages, _, k, alpha, beta, sample=script.sample_segments):
    """Of each half of all segments half of the minibatch; a rank of two has one of them."""
    n, draws = num_envs // 2, []
    for half in range(2):
        uniform = torch.rand(n + 1, generator=generator)
        if WORLD_SIZE == 1:
            index, weights = sample(
                advantages[:, half * n : (half + 1) * n], uniform, k // 2, alpha, beta
            )
            draws.append((index + half * n, weights))
        elif half == RANK:
            draws.append(sample(advantages, uniform, k, alpha, beta))
    return tuple(map(torch.cat, zip(*draws)))


def count_chunks(*args, loss=script.minibatch_loss, **kwargs):
    seen["chunks"] += 1
    return loss(*args, **kwargs)


def clip_grad_norm_(parameters, max_norm, clip=torch.nn.utils.clip_grad_norm_):
    parameters = [*parameters]
    if "DRIFT" in os.environ and seen["updates"] == 0 and RANK == WORLD_SIZE - 1:
        with torch.no_grad():
            parameters[0].mul_(1.01)
    seen["updates"] += 1
    seen.setdefault("gradients", [parameter.grad.clone() for parameter in parameters])
    seen["parameters"] = parameters  # the same objects to the end
    return clip(parameters, max_norm)


script.make_envs, script.Agent.sampling_noise = SameEnvs, same_noise
script.sample_segments, script.minibatch_loss = sample_halves, count_chunks
script.nn.utils.clip_grad_norm_ = clip_grad_norm_
sys.argv = [f"{name}.py", *arguments]
code = script.main()
torch.save({key: [x.detach() for x in value] if isinstance(value, list) else value for key, value in seen.items()},
           f"{out}/rank{RANK}.pt")  # fmt: skip
os._exit(code)  # as the script does, and for its reason
