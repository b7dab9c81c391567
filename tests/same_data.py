"""Runs a script on environments and random numbers that do not depend on how many ranks share them.

    python same_data.py MODULE OUT ARGUMENTS...       (or under torchrun)

Agent i of all sees the same whichever rank has it. Leaves every rank's parameters after training, and the gradients of its
first update, in OUT/rank<k>.pt.
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
seen = {}


def share(array):
    """This rank's part of what all agents have, along the first dimension."""
    n = len(array) // WORLD_SIZE
    return array[RANK * n : (RANK + 1) * n]


class SameEnvs:
    """Agents that see random numbers; their episodes end and their actions are ignored at random; one action of three is right.

    What it is worth grows from agent to agent, so that the statistics of a rank are not those of all.
    """

    def __init__(self, *_, **__):
        self.single_observation_space, self.single_action_space = gym.spaces.Box(-5, 5, (6,), np.float32), gym.spaces.Discrete(3)
        self.num_agents, self.num_groups, self.action_shape, self.torch_dtype = num_envs // WORLD_SIZE, 1, (1,), torch.float32
        self.actions, self.time = np.zeros(self.num_agents, int), 0
        self.episodes, self.logs = [], defaultdict(list)

    def reset(self):
        pass

    def receive(self):
        numbers = share(np.random.default_rng(self.time).random((num_envs, 9), np.float32))
        rewards = (self.actions == (3 * numbers[:, 6]).astype(int)) * share(np.linspace(0.1, 1, num_envs))
        dones, valid = numbers[:, 7] < 0.1, numbers[:, 8] < 0.9
        if self.time == 0:
            dones[:] = True
        self.time += 1
        flags = (array.astype(np.float32) for array in (rewards, dones, valid))
        return script.Step(slice(0, self.num_agents), numbers[:, :6], *flags)

    def send(self, actions):
        self.actions = actions[:, 0]

    def close(self):
        pass


generator = torch.Generator().manual_seed(0)


def same_noise(self, steps, agents, **_):
    return share(torch.empty(agents * WORLD_SIZE, steps, *self.logit_index.shape).exponential_(generator=generator)).transpose(0, 1)


def same_uniform(size, **_):
    return share(torch.rand_like(torch.empty(size * WORLD_SIZE), generator=generator))


def clip_grad_norm_(parameters, max_norm, clip=torch.nn.utils.clip_grad_norm_):
    seen.setdefault("gradients", [parameter.grad.clone() for parameter in parameters])
    seen["parameters"] = parameters  # the same objects to the end
    return clip(parameters, max_norm)


script.make_envs, script.Agent.sampling_noise = SameEnvs, same_noise
script.torch.rand, script.nn.utils.clip_grad_norm_ = same_uniform, clip_grad_norm_
sys.argv = [f"{name}.py", *arguments]
code = script.main()
torch.save({key: [tensor.detach() for tensor in tensors] for key, tensors in seen.items()}, f"{out}/rank{RANK}.pt")
os._exit(code)  # as the script does, and for its reason
