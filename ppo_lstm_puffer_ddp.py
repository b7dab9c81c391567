"""PPO with an LSTM under torchrun: many GPUs, many hosts (docs/many-gpus.md).

    torchrun --nproc-per-node=2 --max-restarts=3 ppo_lstm_puffer_ddp.py --env-id breakout

This is ppo_lstm_puffer.py with what several ranks change: each has its share of the environments
and of every minibatch. Arguments are of all together, --max-minibatch-size and --num-workers of
one. Gradients and losses are one flat sum (DistributedDataParallel takes means of gradients).
"""

import contextlib
import ctypes
import io
import json
import math
import os
import re
import signal
import sys
import time
import warnings
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

# How long OpenMP's threads wait awake; with the default, 30 times as long, other programs starve.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

if "TORCHELASTIC_RUN_ID" in os.environ:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # is sent to this rank if torchrun dies
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // int(os.environ["LOCAL_WORLD_SIZE"])  # a rank's own, for its threads
    if share and {*cores} == os.sched_getaffinity(os.getppid()):  # else by --numa-binding
        first = share * int(os.environ["LOCAL_RANK"])
        os.sched_setaffinity(0, cores[first : first + share])
        if b"OMP_NUM_THREADS=" not in Path(f"/proc/{os.getppid()}/environ").read_bytes():
            os.environ.pop("OMP_NUM_THREADS", None)  # it is 1 by torchrun, not by the user

import gymnasium as gym
import numpy as np
import pufferlib
import torch
import torch.distributed as dist
import tyro
import yaml
from pufferlib import adapters  # it is install_pufferlib.sh that puts this there
from torch import nn
from torch.utils.tensorboard import SummaryWriter

RANK = int(os.getenv("RANK", "0"))
LOCAL_RANK = int(os.getenv("LOCAL_RANK", "0"))
WORLD_SIZE = int(os.getenv("WORLD_SIZE", "1"))


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of this experiment
    dist_timeout: int = 600  # seconds to wait for others, or of a GPU's iteration; not in config
    seed: int = 1  # of Python, numpy, torch, every environment and every worker
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA where there is a GPU
    output_dir: str = "runs"  # the folder that runs are written to
    track: bool = False  # log to Weights and Biases too; it reads WANDB_PROJECT and WANDB_ENTITY
    # Environment
    env_id: str = "breakout"  # of Ocean, Gymnasium (CartPole-v1), or a module with parallel_env
    env: dict[str, Any] = field(default_factory=dict)  # its own arguments, each as --env.KEY VALUE
    num_envs: int = 512  # environments in parallel; one may hold several agents
    num_workers: int | None = None  # None: 0, on a GPU most cores; even: half act, half step
    clip_rewards: bool = True  # to [-1, 1] for learning, unless norm_rewards; logs are unclipped
    norm_rewards: bool = False  # divide by the discounted returns' standard deviation; clip to 10
    norm_obs: bool = False  # observations to mean 0, standard deviation 1 (images: never)
    # Algorithm
    total_timesteps: int = 20_000_000  # over all agents; the learning rate falls over them
    learning_rate: float = 0.06  # Muon's; with --optimizer adam 0.00025 (Atari) to 0.01 (Breakout)
    adam_learning_rate: float = 5e-4  # with Muon: of Adam, for whatever is not a matrix
    optimizer: Literal["muon", "adam"] = "muon"  # Muon for matrices and Adam for the rest, or Adam
    momentum: float = 0.8  # Muon's; Adam's beta1 where Adam trains all
    anneal: Literal["exponential", "linear", "constant"] = "exponential"  # to 1/64, to 0, or not
    num_steps: int = 32  # segment length T, and of backpropagation through time
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.9  # lambda of the advantages
    minibatch_size: int = 2048  # steps per update: minibatch_size / num_steps segments
    max_minibatch_size: int = 32768  # more steps are split, and their gradients accumulated
    update_epochs: float = 1.0  # batches' worth of minibatches, each drawn anew: some steps never
    norm_adv: bool = True  # advantages to mean 0, standard deviation 1 over the batch
    clip_coef: float = 0.15  # PPO's clip range of the ratio
    vf_clip_coef: float = 2.0  # clip range of the value loss; inf: not clipped
    vf_coef: float = 4.0  # weight of the value loss
    ent_coef: float = 0.00002  # weight of the entropy bonus
    max_grad_norm: float = 1.5  # clip the gradient's norm to this
    vtrace_rho_clip: float = 1.0  # V-trace's clip of the ratio in the temporal difference
    vtrace_c_clip: float = 1.0  # V-trace's clip of the ratio in the trace
    prio_alpha: float = 0.3  # exponent of the segments' priorities; 0: uniform
    prio_beta0: float = 0.2  # first exponent of the importance weights; the last is 1
    # Network and speed
    hidden_size: int = 128  # width of the encoder and of the LSTM
    chrono_init: int = 1  # for memory: at first, gates keep the state for up to so many steps
    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 where it is faster
    compile: bool = True  # torch.compile; needs a C++ compiler
    cuda_graphs: bool = True  # on a GPU: record the policy step and the update, and replay them
    # Run
    time_limit: float = math.inf  # stop after so many seconds of training; schedules do not follow
    log_interval: int = 10  # iterations between two log lines
    checkpoint_interval: int = 100  # iterations between two checkpoints
    config: str | None = None  # a YAML file of arguments, such as a run's config.yaml; flags win
    resume: str | None = None  # go on with a run: its folder, or latest
    profile: bool = False  # write a trace of iterations 6 to 8 to the run's folder, for Perfetto
    auto: tyro.conf.Suppress[list[str]] = field(default_factory=list, init=False)  # by resolve


# ALGO LOGIC: the network --------------------------------------------------------------------------


def layer_init(layer: nn.Module, std: float = 2**0.5) -> nn.Module:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """PufferLib's default network: encoder, LSTM of the same width, linear policy and value heads.

    Discrete is one categorical, MultiDiscrete several, Box a Gaussian with a learned,
    state-independent standard deviation. Parameters have PufferLib's names (tools/export.py).
    """

    def __init__(self, observation_space: gym.Space, action_space: gym.Space, args: Args):
        super().__init__()
        hidden = args.hidden_size
        shape = observation_space.shape
        self.pixels = adapters.is_pixels(observation_space)  # bytes, divided by 255
        self.image = adapters.is_image(observation_space)  # pixels with sides for convolutions
        self.channels_last = len(shape) == 3 and (shape[2] < shape[0] or shape[0] == shape[1])
        self.observation_norm = None
        if args.norm_obs and not self.pixels:  # by the mean and deviation of all seen so far
            self.observation_norm = nn.BatchNorm1d(math.prod(shape), affine=False)
        if args.norm_rewards:
            self.return_norm = nn.BatchNorm1d(1, affine=False)
        self.policy = nn.Module()
        layers = []
        x = self.flatten(torch.zeros(1, *shape))  # a dummy, for the layers' input sizes
        if self.image:  # the encoder of Mnih et al. 2015
            for channels, size, stride in (32, 8, 4), (64, 4, 2), (64, 3, 1):
                layer = layer_init(nn.Conv2d(x.shape[1], channels, size, stride))
                layers += [layer.to(memory_format=torch.channels_last), nn.ReLU()]  # CPU: faster
                x = layer(x)
            layers.append(nn.Flatten())
        layers += [layer_init(nn.Linear(x[0].numel(), hidden)), nn.GELU()]
        self.policy.encoder = nn.Sequential(*layers)  # a fork's too; ends with (batch, hidden)
        self.continuous = isinstance(action_space, gym.spaces.Box)
        if self.continuous:
            self.num_logits = math.prod(action_space.shape)
            self.policy.decoder_mean = layer_init(nn.Linear(hidden, self.num_logits), std=0.01)
            self.policy.decoder_logstd = nn.Parameter(torch.zeros(1, self.num_logits))
        else:
            nvec = getattr(action_space, "nvec", None)
            self.nvec = [int(action_space.n)] if nvec is None else nvec.ravel().tolist()
            self.num_logits = sum(self.nvec)
            self.policy.decoder = layer_init(nn.Linear(hidden, self.num_logits), std=0.01)
        self.policy.value = layer_init(nn.Linear(hidden, 1), std=1.0)
        self.lstm = nn.LSTM(hidden, hidden)  # (F, H): its parameters; `lstm_forward` computes
        for name, parameter in self.lstm.named_parameters():
            if "weight" in name:
                nn.init.orthogonal_(parameter)
            else:
                nn.init.zeros_(parameter)
        forget = torch.linspace(1, args.chrono_init, hidden).log()  # Tallec and Ollivier 2018
        self.lstm.bias_hh_l0.data[: 2 * hidden] = torch.cat((-forget, forget))  # input, forget
        self.dtype = getattr(torch, args.precision)  # the compute dtype

    def flatten(self, x: torch.Tensor) -> torch.Tensor:
        """Observations (batch, *obs) to float32 (batch, features), images to (batch, C, H, W)."""
        if self.pixels:
            x = x / 255
        if not self.image:
            x = x.flatten(1).float()
            norm = self.observation_norm
            if norm is not None:  # norm(x) would take the batch's own, if a fork calls train()
                normalize = nn.functional.batch_norm
                x = normalize(x, norm.running_mean, norm.running_var, eps=1e-8).clamp(-10, 10)
            return x
        if self.channels_last:
            x = x.permute(0, 3, 1, 2)
        return x.view(x.shape[0], -1, *x.shape[-2:])  # len(x) would be a constant in ONNX

    def encode(self, observations: torch.Tensor) -> torch.Tensor:
        """Observations (T, N, *obs) of any dtype to features (T, N, F) in the compute dtype."""
        x = self.flatten(observations.flatten(0, 1))
        layers = self.policy.encoder
        if not self.image:  # the first layer in float32: in bfloat16's 8 bits 1001 is 1000
            x = layers[0](x)
            layers = layers[1:]  # the GELU, and what a fork appends
        # Cast by hand: with torch.autocast inside, functions are compiled anew in every process.
        weights = {name: weight.to(self.dtype) for name, weight in layers.named_parameters()}
        x = torch.func.functional_call(layers, weights, x.to(self.dtype))
        return x.view(*observations.shape[:2], -1)

    def lstm_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[W_ih | W_hh] (4H, F + H) in the compute dtype, b_ih + b_hh (4H) float32: one product."""
        weight = torch.cat((self.lstm.weight_ih_l0, self.lstm.weight_hh_l0), dim=1)
        bias = self.lstm.bias_ih_l0 + self.lstm.bias_hh_l0
        return weight.to(self.dtype), bias

    def heads(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """LSTM outputs (..., H) to logits or means (..., num_logits) and values (...), float32."""
        hidden = hidden.float()
        actor = self.policy.decoder_mean if self.continuous else self.policy.decoder
        return actor(hidden), self.policy.value(hidden).squeeze(-1)

    def sampling_noise(self, *shape: int, device=None) -> torch.Tensor:
        """(*shape, num_logits) for `sample`, once for all steps: normal, or Exponential(1)."""
        noise = torch.empty((*shape, self.num_logits), device=device)
        return noise.normal_() if self.continuous else noise.exponential_()

    def sample(self, logits: torch.Tensor, noise: torch.Tensor):
        """Actions (..., actions) and their log-probabilities (...), by noise (..., num_logits)."""
        if self.continuous:
            actions = logits + self.policy.decoder_logstd.exp() * noise
        else:  # the Gumbel-max trick: -log(Exponential) is a Gumbel
            scores = logits - noise.clamp_min(1e-20).log()
            actions = torch.stack([part.argmax(-1) for part in scores.split(self.nvec, -1)], -1)
        logprobs, _ = self.evaluate_actions(logits, actions)
        return actions, logprobs

    def evaluate_actions(self, logits: torch.Tensor, actions: torch.Tensor):
        """Log-probability (...) of the joint action (..., actions), and the entropy (...)."""
        if self.continuous:
            deviation = self.policy.decoder_logstd.exp()
            normal = torch.distributions.Normal(logits, deviation, validate_args=False)
            return normal.log_prob(actions).sum(-1), normal.entropy().sum(-1)
        logprob = 0.0
        entropy = 0.0
        for part, action in zip(logits.split(self.nvec, -1), actions.unbind(-1)):
            log_p = part.log_softmax(-1)
            logprob = logprob + log_p.gather(-1, action.unsqueeze(-1)).squeeze(-1)
            entropy = entropy - (log_p.exp() * log_p).sum(-1)
        return logprob, entropy


# ALGO LOGIC: the recurrence, with resets ----------------------------------------------------------

UNROLL = 8  # steps compiled as one function; 32 compiled four times as long and ran no faster


def tanh(x: torch.Tensor) -> torch.Tensor:
    """By the sigmoid, whose vectorized exponential is three times faster on a CPU."""
    return 2 * torch.sigmoid(2 * x) - 1


def lstm_forward(x, h, c, dones, weight, bias):
    """The LSTM over T steps, its state set to zero wherever dones is 1.

    x (T, N, F); h, c (N, H) float32, the state before; dones (T, N); weight (4H, F + H);
    bias (4H). Returns the outputs (T, N, H) and the state after.
    """
    outputs = []
    for t in range(len(x)):
        keep = (1 - dones[t]).unsqueeze(1)
        inputs = torch.cat((x[t], (h * keep).to(x.dtype)), dim=1)
        gates = torch.mm(inputs, weight.t()).float() + bias
        i, f, g, o = gates.chunk(4, dim=1)
        c = torch.sigmoid(f) * (c * keep) + torch.sigmoid(i) * tanh(g)
        h = torch.sigmoid(o) * tanh(c)
        outputs.append(h.to(x.dtype))
    return torch.stack(outputs), h, c


def lstm_outputs(x, h, c, dones, weight, bias):
    """`lstm_forward`'s outputs (T, N, H), for training: backpropagation ends at the first state."""
    h = h.detach().requires_grad_()  # as in later chunks: one compiled function for all
    c = c.detach().requires_grad_()
    outputs = []
    for steps, resets in zip(x.split(UNROLL), dones.split(UNROLL)):
        output, h, c = lstm_forward(steps, h, c, resets, weight, bias)
        outputs.append(output)
    return torch.cat(outputs)


# ALGO LOGIC: advantages, priorities, loss ---------------------------------------------------------


def compute_advantages(values, rewards, dones, valid, ratio, args):
    """V-trace's temporal differences (Espeholt et al. 2018), summed as GAE (Schulman et al. 2016).

    values, dones (T + 1, N): index T is the observation after the segment, its value the
    bootstrap. dones[t + 1] = 1: v_{t+1} is not bootstrapped from, and the sum starts anew.
    rewards, valid, ratio (T, N). valid[t] is 0, and so A_t, where the agent is away or o_t its
    episode's last (C environments show none): dones is 1 if it terminated, 0 if it was truncated.
    ratio: pi(a_t) of the segment's last draw by that of acting. With ratio 1, and clips of 1 or
    more, this is GAE; with lambda 1, A + v are V-trace's targets. Returns (T, N).
    """
    discount = args.gamma * (1 - dones[1:])
    rho = ratio.clamp(max=args.vtrace_rho_clip)
    trace = args.gae_lambda * discount * ratio.clamp(max=args.vtrace_c_clip) * valid
    delta = rho * (rewards + discount * values[1:] - values[:-1]) * valid
    advantage = torch.zeros_like(delta[0])
    advantages = []  # the last first
    for delta_t, trace_t in zip(delta.unbind()[::-1], trace.unbind()[::-1]):
        advantage = delta_t + trace_t * advantage
        advantages.append(advantage)
    return torch.stack(advantages[::-1])


def sample_segments(advantages, valid, uniform, k, alpha, beta):
    """k segments, drawn with priorities (sum_t |A_ti|)^alpha + 1e-6 (Schaul et al. 2016).

    Systematic sampling (Madow 1949): the segments lie in random order on a line from 0 to 1, each
    as long as its probability p_i. k points at equal distances, the first at random, draw the
    segments they fall on: segment i on average k * p_i times, twice only if p_i > 1 / k. Its weight
    is (1 / (n p_i))^beta n / k, n the segments with a valid step: a weighted sum is unbiased at
    beta 1. advantages, valid (T, N); uniform (N + 1) in [0, 1): N for the order, one for the first
    point. Returns indices (k) int64 and weights (k) float32.
    """
    present = valid.any(0)
    n = present.sum().clamp_min(1)
    priorities = (advantages.abs().sum(0) ** alpha + 1e-6) * present + 1e-12  # none valid: uniform
    p = priorities / priorities.sum()
    order = uniform[:-1].argsort()
    line = p[order].double().cumsum(0)
    points = (torch.arange(k, device=p.device) + uniform[-1]) / k
    index = order[(line <= points[:, None]).sum(1).clamp(max=len(p) - 1)]
    return index, (1 / (n * p[index])) ** beta * n / k


class Minibatch(NamedTuple):
    """The last dimension of every field is B: `update` splits all of them there."""

    segments: torch.Tensor  # (B) indices into the batch
    advantages: torch.Tensor  # (T, B), normalized
    returns: torch.Tensor  # (T, B), the value's target
    values: torch.Tensor  # (T, B), of their last draw, or of the rollout: clipped around
    weight: torch.Tensor  # (T, B), of a step in each term of the loss; 0 where valid is 0


def draw_minibatch(values, rewards, dones, valid, ratio, uniform, beta, args):
    """A rank's share of a minibatch, drawn by the newest advantages: normalized by all ranks'."""
    advantages = compute_advantages(values, rewards, dones, valid, ratio, args)
    k = args.minibatch_size // args.num_steps // WORLD_SIZE
    segments, weight = sample_segments(advantages, valid, uniform, k, args.prio_alpha, beta)
    values = values[:-1, segments]
    returns = advantages[:, segments] + values
    count, mean, variance = moments(advantages, valid)
    normalized = advantages
    if args.norm_adv:
        normalized = (advantages - mean) / (variance.clamp_min(0) + 1e-16).sqrt()
    weight = valid[:, segments] * weight / count.clamp_min(1)
    return Minibatch(segments, normalized[:, segments], returns, values, weight)


@torch.compiler.disable  # a sum over ranks is no part of a compiled function
def moments(x: torch.Tensor, counted: torch.Tensor):
    """Of x (T, N, ...) where counted (T, N) is 1, on all ranks: how many, mean, variance (...)."""
    counted = counted.double().view(*counted.shape, *[1] * (x.ndim - 2)).expand_as(x)
    x = torch.where(counted > 0, x, 0).double()  # lest square - mean**2 be noise
    totals = torch.stack([terms.sum((0, 1)) for terms in (counted, x, x**2)])
    dist.all_reduce(totals)
    _, mean, square = totals / totals[0].clamp_min(1)
    return totals[0], mean, square - mean**2


def fit_norm(norm: nn.BatchNorm1d, x: torch.Tensor, counted: torch.Tensor):
    """Adds x (T, N, features) where counted is 1 to the statistics of all rows ever seen."""
    rows, mean, variance = moments(x, counted)
    norm.num_batches_tracked += rows[0].long()  # here: rows
    share = (rows[0] / norm.num_batches_tracked.clamp_min(1)).float()  # 0: who acts was reset
    change = mean.float() - norm.running_mean
    norm.running_mean += share * change
    norm.running_var.lerp_(variance.float() + (1 - share) * change**2, share)
    norm.running_var.clamp_(min=1e-10 * norm.running_mean**2)  # else its rounding would be seen


def ppo_loss(agent, hidden, actions, old_logprobs, minibatch, args):
    """PPO's clipped surrogate (Schulman et al. 2017), clipped value loss, entropy bonus.

    hidden (T, B, H): LSTM outputs; actions (T, B, actions); old_logprobs (T, B). Every mean is a
    sum weighted by minibatch.weight, so the losses of a minibatch's parts add up to its own.
    Returns the loss; detached, the ratio and values (T, B), and the terms LOSSES[1:].
    """
    _, advantages, returns, old_values, weight = minibatch  # each (T, B)
    logits, values = agent.heads(hidden)
    logprobs, entropy = agent.evaluate_actions(logits, actions)
    logratio = logprobs - old_logprobs
    ratio = logratio.exp()
    surrogate = ratio * advantages
    clipped_surrogate = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef) * advantages
    policy_loss = -(weight * torch.min(surrogate, clipped_surrogate)).sum()
    change = (values - old_values).clamp(-args.vf_clip_coef, args.vf_clip_coef)
    error = (values - returns) ** 2
    clipped_error = (old_values + change - returns) ** 2
    value_loss = 0.5 * (weight * torch.max(error, clipped_error)).sum()
    entropy = (weight * entropy).sum()
    approx_kl = (weight * (ratio - 1 - logratio)).sum()
    clipfrac = (weight * ((ratio - 1).abs() > args.clip_coef)).sum()
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
    # In the order of LOSSES[1:].
    terms = torch.stack((policy_loss, value_loss, entropy, approx_kl, clipfrac))
    return loss, ratio.detach(), values.detach(), terms.detach()


def act(agent, observations, dones, h, c, weight, bias, noise):
    """Acts on observations (N, *obs), also for tools/play.py and export.py. Returns h, c too."""
    features = agent.encode(observations[None])
    hidden, h, c = lstm_forward(features, h, c, dones[None], weight, bias)
    logits, values = agent.heads(hidden[0])
    actions, logprobs = agent.sample(logits, noise)
    return actions, logprobs, values, h, c


LOSSES = ["grad_norm", "policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac"]
COMPILED = ["act", "lstm_forward", "draw_minibatch", "ppo_loss"]  # by `set_up_torch`; add yours


# ALGO LOGIC: Muon, the environments, training -----------------------------------------------------


def newton_schulz(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sets the singular values of matrices (batch, rows, columns) to about 1: Muon's quintic
    iteration (Jordan et al. 2024), x <- (a + b G + c G^2) x with G = x x'. Returns this dtype."""
    a = 3.4445
    b = -4.7750
    c = 2.0315
    tall = x.shape[1] > x.shape[2]
    x = (x.mT if tall else x).to(dtype)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalized. (torch.optim.Muon's bfloat16 is slow on most CPUs.)"""

    def __init__(self, parameters, lr: torch.Tensor, momentum: float, dtype: torch.dtype):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})
        self.dtype = dtype  # of the iteration
        for parameter in parameters:
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self):
        group = self.param_groups[0]
        same_shape = defaultdict(list)
        trained = [one for one in group["params"] if one.grad is not None]  # not what a fork froze
        for parameter in trained:
            buffer = self.state[parameter]["momentum_buffer"]
            buffer.lerp_(parameter.grad, 1 - group["momentum"])
            update = parameter.grad.lerp(buffer, group["momentum"])
            same_shape[parameter.shape].append((parameter, update))
        for (rows, columns), pairs in same_shape.items():  # the LSTM's two, if F = H: one product
            stacked = torch.stack([update for _, update in pairs])
            updates = newton_schulz(stacked, self.dtype).float()
            updates *= group["lr"] * max(1, rows / columns) ** 0.5
            for (parameter, _), update in zip(pairs, updates):
                parameter.sub_(update)


def make_optimizers(agent: Agent, args: Args) -> list[torch.optim.Optimizer]:
    """Muon for matrices and Adam for the rest, or Adam. CUDA graphs want rates as tensors."""
    device = agent.policy.value.weight.device
    lr = torch.tensor(args.learning_rate, device=device)
    adam = partial(torch.optim.Adam, eps=1e-8, fused=True, capturable=device.type == "cuda")
    if args.optimizer == "adam":
        return [adam(agent.parameters(), lr=lr, betas=(args.momentum, 0.999))]
    matrices = []
    rest = []
    for name, parameter in agent.named_parameters():
        is_matrix = parameter.ndim == 2 and "logstd" not in name
        (matrices if is_matrix else rest).append(parameter)
    muon = Muon(matrices, lr, args.momentum, agent.dtype)
    return [muon, adam(rest, lr=torch.tensor(args.adam_learning_rate, device=device))]


class Envs:
    """PufferLib's vectorized environments: receive(), then send() actions."""

    def __init__(self, vecenv, seed: int):
        self.vecenv = vecenv
        self.reset = partial(vecenv.async_reset, seed)
        self.close = vecenv.close
        self.num_agents = vecenv.num_agents
        self.num_groups = self.num_agents // getattr(vecenv, "agents_per_batch", self.num_agents)
        self.observation_space = vecenv.single_observation_space
        self.action_space = vecenv.single_action_space
        self.next_step_reset = isinstance(vecenv.driver_env, adapters.AdaptedEnvs)
        self.ended = np.ones(self.num_agents, bool)  # the next observation begins an episode
        self.returns = np.zeros(self.num_agents)
        self.lengths = np.zeros(self.num_agents, int)
        self.episodes = []  # (agent, return, length) of each that finished
        self.logs = defaultdict(list)  # what environments log, or you: (value, weight), to env/...
        self.seconds = 0.0  # spent in them

    def receive(self) -> tuple[slice, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Which agents, their observations (n, *obs), raw rewards, dones and valid (n) float32.

        dones: 1 where the state is zeroed before this observation and its value bootstraps nothing.
        valid: 0 where an agent is away, or its episode over. Gymnasium's and PettingZoo's show its
        last observation (valid 0, dones 1 if terminated). C's do not: any end is a termination.
        """
        began = time.perf_counter()
        observations, rewards, terminals, truncations, infos, ids, mask = self.vecenv.recv()
        self.seconds += time.perf_counter() - began
        agents = slice(int(ids[0]), int(ids[-1]) + 1)
        ended = terminals | truncations
        acted = ~self.ended[agents]  # not where the environment has just been reset
        self.returns[agents] += rewards * acted
        self.lengths[agents] += acted
        over = np.flatnonzero(ended & acted) + agents.start
        self.episodes += zip(over, self.returns[over], self.lengths[over])
        self.returns[over] = 0
        self.lengths[over] = 0
        if self.next_step_reset:
            dones = self.ended[agents] | terminals
            valid = mask & ~ended
            self.ended[agents] = ended | ~mask  # an agent that was gone begins anew
        else:
            dones = self.ended[agents] | ended
            self.ended[agents] = dones & ~mask  # until an agent that ended is there again
            valid = ~self.ended[agents]  # masked without an end it waits: its rewards count
        for info in infos:
            weight = 1 if self.next_step_reset else info.get("n", 1)  # Ocean: means of n episodes
            for key, value in adapters.numbers_in(info):
                self.logs[key].append((value, weight))
        return agents, observations, rewards, np.float32(dones), np.float32(valid)

    def send(self, actions: np.ndarray):
        """Actions (n, actions), as the agent chose them; a Gaussian's are clipped to their Box."""
        space = self.action_space
        actions = actions.reshape(-1, *space.shape)
        if isinstance(space, gym.spaces.Box):
            actions = actions.clip(space.low, space.high).astype(space.dtype)
        began = time.perf_counter()
        self.vecenv.send(actions)
        self.seconds += time.perf_counter() - began

    def means(self) -> dict[str, float]:
        """Of all ranks' episodes that finished since the last call, and of what they logged."""
        ranks = [None] * WORLD_SIZE
        dist.gather_object((self.episodes, self.logs), ranks if RANK == 0 else None)
        for episodes, logs in filter(None, ranks[1:]):
            self.episodes += episodes
            for key, pairs in logs.items():
                self.logs[key] += pairs
        means = {}
        if self.episodes:
            _, returns, lengths = zip(*self.episodes)
            means["episodic_return"] = np.mean(returns)
            means["episodic_return_min"] = min(returns)
            means["episodic_return_max"] = max(returns)
            means["episodic_length"] = np.mean(lengths)
        for key, pairs in self.logs.items():
            values, weights = np.array(pairs, float).T
            means[f"env/{key}"] = np.average(values, weights=weights + 1e-9)
        self.episodes.clear()
        self.logs.clear()
        return means


def train(args: Args, envs: Envs, run: "Run"):
    """From `envs.reset()` on, until --total-timesteps, --time-limit or a signal."""
    device = torch.device(args.device)
    T = args.num_steps
    N = envs.num_agents  # of this rank
    batch_size = T * N * WORLD_SIZE
    num_minibatches = max(1, round(args.update_epochs * batch_size / args.minibatch_size))
    agent = Agent(envs.observation_space, envs.action_space, args).to(device)
    optimizers = make_optimizers(agent, args)
    run.begin(agent, optimizers)

    # STORAGE: time first. Index T is what follows the segment: its observations, dones and valid
    # become index 0 of the next, its values are the bootstrap.
    zeros = partial(torch.zeros, device=device)
    space = envs.observation_space
    obs_dtype = torch.as_tensor(np.zeros(1, space.dtype)).dtype
    observations = zeros(T + 1, N, *space.shape, dtype=obs_dtype)
    adapters.tell_of_size(observations, say)
    action_dtype = torch.float32 if agent.continuous else torch.int64
    actions = zeros(T, N, math.prod(envs.action_space.shape), dtype=action_dtype)
    # What arrives with o_t is one tensor, so that receive() copies once; these are views of it.
    arrived = zeros(3, T + 1, N)
    dones, valid, last_rewards = arrived  # last_rewards[t] is for a_{t-1}, rewards[t] for a_t
    values = zeros(T + 1, N)
    logprobs, rewards, ratio, discounted = zeros(4, T, N)
    h, c, start_h, start_c = zeros(4, N, args.hidden_size)
    # Filled in place: a new Python number would be compiled anew, a CUDA graph reads this memory.
    noise = agent.sampling_noise(T + 1, N, device=device)
    acting_weights = [weight.detach().clone() for weight in agent.lstm_weights()]  # cast once
    beta = zeros(())
    # What is summed over the ranks: gradients, losses, and the weights of the losses.
    trained = [parameter for parameter in agent.parameters() if parameter.requires_grad]
    sizes = [*(parameter.numel() for parameter in trained), len(LOSSES)]
    flat = zeros((sum(sizes),))
    *gradients, sums = flat.split(sizes)
    for parameter, gradient in zip(trained, gradients):
        parameter.grad = gradient.as_strided(parameter.shape, parameter.stride())  # in its layout

    def receive(t: int) -> slice:
        """Stores what came from the environments: o_t, d_t, and the reward of step t - 1."""
        agents, observation, reward, done, is_valid = envs.receive()
        observations[t, agents].copy_(torch.as_tensor(observation), non_blocking=True)
        numbers = torch.as_tensor(np.stack((done, is_valid, reward)))  # one copy, not three
        arrived[:, t, agents].copy_(numbers, non_blocking=True)
        return agents

    @torch.no_grad()
    def act_at(t: int, group: slice):
        """Step t for these agents. Step T is for its value only: h, c stay as they are."""
        inputs = observations[t, group], dones[t, group], h[group], c[group]
        action, logprob, value, new_h, new_c = act(agent, *inputs, *acting_weights, noise[t, group])
        values[t, group] = value
        if t < T:
            actions[t, group] = action
            logprobs[t, group] = logprob
            h[group] = new_h
            c[group] = new_c

    def update() -> torch.Tensor:
        """Draws a minibatch and takes an optimizer step. Returns LOSSES."""
        uniform = torch.rand(N + 1, device=device)
        minibatch = draw_minibatch(values, rewards, dones, valid[:T], ratio, uniform, beta, args)
        flat.zero_()  # zero_grad would take the gradients out of it
        at_once = args.max_minibatch_size // T  # segments; their gradients add up
        for first in range(0, len(minibatch.segments), at_once):
            part = Minibatch(*(tensor[..., first : first + at_once] for tensor in minibatch))
            segments = part.segments
            features = agent.encode(observations[:T].index_select(1, segments))
            first_h = start_h[segments]
            first_c = start_c[segments]
            resets = dones[:T, segments]
            hidden = lstm_outputs(features, first_h, first_c, resets, *agent.lstm_weights())
            loss, new_ratio, new_values, terms = ppo_loss(
                agent, hidden, actions[:, segments], logprobs[:, segments], part, args
            )
            loss.backward()
            ratio[:, segments] = new_ratio  # of the policy before this optimizer step
            values[:T, segments] = new_values
            sums.add_(torch.cat((terms, part.weight.sum()[None])))
        dist.all_reduce(flat)
        grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
        means = sums[:-1] / sums[-1].clamp_min(1e-12)
        return torch.cat((grad_norm[None], means))

    groups = [receive(0) for _ in range(envs.num_groups)]  # act together: all agents, or halves
    adapters.tell_of_scale(observations[0], agent, say)
    if args.cuda_graphs and args.device == "cuda":
        act_at = CudaGraphs(act_at)
        update = CudaGraphs(update)
    over = run.exit_reason is not None  # asked once an iteration: signals come at any time
    while not over:
        if args.device == "cuda" and WORLD_SIZE > 1:  # nccl may wait for ever: kills who waits
            signal.alarm(args.dist_timeout)
        # ROLLOUT: T steps of every agent. The state that the segment starts from is kept.
        for tensor in agent.state_dict().values():  # unlike machines round updates differently
            dist.broadcast(tensor, src=0)
        start_h.copy_(h)
        start_c.copy_(c)
        noise.copy_(agent.sampling_noise(T + 1, N, device=device))
        for stored, weight in zip(acting_weights, agent.lstm_weights()):
            stored.copy_(weight.detach())
        for t in range(T + 1):  # step T is for v_T alone: the next segment acts on o_T
            for group in groups:
                if t > 0:  # row 0 is row T of the segment before
                    receive(t)  # of these agents: groups arrive in the order in which they acted
                act_at(t, group)
                if t < T:
                    envs.send(actions[t, group].cpu().numpy())
        rewards.copy_(last_rewards[1:])
        if args.clip_rewards and not args.norm_rewards:
            adapters.tell_of_clipping(rewards, say)
            rewards.clip_(-1, 1)
        if args.norm_rewards:  # by the deviation of discounted returns (Engstrom et al. 2020)
            for t in range(T):  # at t = 0, discounted[-1] is the last of the segment before
                discounted[t] = rewards[t] + args.gamma * (1 - dones[t]) * discounted[t - 1]
            fit_norm(agent.return_norm, discounted.unsqueeze(-1), valid[:T])
            rewards.div_((agent.return_norm.running_var + 1e-8).sqrt()).clamp_(-10, 10)

        # UPDATE: minibatches of segments by priority; advantages follow the values and ratios.
        update_began = time.perf_counter()
        progress = run.step / args.total_timesteps
        decay = {"exponential": 64**-progress, "linear": 1 - progress, "constant": 1}[args.anneal]
        for optimizer, rate in zip(optimizers, (args.learning_rate, args.adam_learning_rate)):
            optimizer.param_groups[0]["lr"].fill_(rate * decay)
        beta.fill_(args.prio_beta0 + (1 - args.prio_beta0) * progress)
        ratio.fill_(1)
        rollout_values = values.clone()
        statistics = zeros(len(LOSSES))
        for _ in range(num_minibatches):
            statistics += update()
        losses = dict(zip(LOSSES, (statistics / num_minibatches).tolist()))  # waits for the device
        if agent.observation_norm is not None:  # not before: ratios start at 1
            fit_norm(agent.observation_norm, observations[:T].flatten(2), valid[:T])

        # LOGGING, CHECKPOINT
        run.update_done(batch_size, update_began)
        norms = [statistic.sum() for statistic in adapters.running_statistics(agent)]
        if not all(map(math.isfinite, (*losses.values(), *norms))):
            seen = f"{observations.abs().max():.2g}, {last_rewards.abs().max():.2g}"
            raise adapters.NotFinite(f"{losses}; observation, reward up to {seen}; docs/trouble.md")
        over = run.exit_reason is not None
        if run.iteration % args.log_interval == 0 or over:
            ones = torch.ones_like(ratio)  # of the policy that acted
            advantages = compute_advantages(rollout_values, rewards, dones, valid[:T], ones, args)
            returns = advantages + rollout_values[:T]
            *_, variances = moments(torch.stack((advantages, returns), -1), valid[:T])
            unexplained = variances[0] / variances[1].clamp_min(1e-12)
            losses["explained_variance"] = 1 - unexplained.item()
            run.log(losses, args.learning_rate * decay)
        signal.alarm(0)
        if RANK == 0 and run.iteration % args.checkpoint_interval == 0:
            run.save()
        # The next segment begins where this one ended: row T of what `act` is given.
        observations[0] = observations[T]
        arrived[:, 0] = arrived[:, T]


# ==================================================================================================
# PLUMBING: not needed to understand the algorithm.


def say(text: str, file=None):
    """Prints a line for people. Who reads it may be gone, or its disk full: training goes on."""
    if RANK == 0 or text.startswith("error"):
        time.sleep(3 * (RANK > 0))  # rank 0 says most of them first, and torchrun ends the others
        adapters.say(text, file)


def fail(message: str):
    """Ends the program for a wrong argument: one line, exit code 2."""
    say(f"error: {message}")
    sys.exit(2)


def set_up_torch(args: Args, envs: Envs, seed: int):
    """Seed, threads, memory, what is compiled, a GPU's stream. Before the first weights."""
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = True
    # So many GFLOP of an update are worth a thread. Convolutions take all that there are.
    if "OMP_NUM_THREADS" not in os.environ and not adapters.is_image(envs.observation_space):
        worth = 0.5 if args.precision == "float32" else 1
        steps = min(args.minibatch_size, args.max_minibatch_size)
        width = math.prod(envs.observation_space.shape) + 8 * args.hidden_size
        wanted = round(6e-9 * steps * args.hidden_size * width / worth)
        torch.set_num_threads(max(1, min(wanted, torch.get_num_threads())))
    adapters.keep_freed_memory()
    if args.device == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # the default one cannot be recorded
        adapters.pin_observations(envs.vecenv)
    say(f"{args.device}, {torch.get_num_threads()} threads, {args.precision}")
    if args.compile:
        say("compiling: up to a minute at the first start, later some seconds")
        warnings.filterwarnings("ignore", module="torch._inductor")  # that there is no Python.h
        try:
            adapters.write_libraries_whole()  # a start that is killed must not break the next
            torch.compile(lambda x: x + 1)(torch.zeros(8, device=args.device))
        except Exception as error:  # no g++, no Python.h, a cache that cannot be used
            return say(f"warning: compiling fails here, so --no-compile: {error!r:.200}")
        for name in COMPILED:  # decorators would cost --help and the tools two seconds
            globals()[name] = torch.compile(globals()[name], dynamic=False)


def fast_bfloat16(device: str) -> str | None:
    """What here multiplies bfloat16 faster than float32; None if nothing does."""
    if device == "cuda":
        return "CUDA" if torch.cuda.get_device_capability() >= (8, 0) else None
    able = torch.cpu.get_capabilities()  # bf16: Arm's
    return next((key for key in ("amx_bf16", "avx512_bf16", "bf16") if able.get(key)), None)


class CudaGraphs:
    """A function that works in place, recorded at its fourth call with the same arguments."""

    pool = cache(torch.cuda.graph_pool_handle)  # one for all graphs: they are replayed in turn

    def __init__(self, function):
        self.function = function
        self.calls = defaultdict(int)
        self.graphs = defaultdict(torch.cuda.CUDAGraph)
        self.results = {}

    def __call__(self, *which):
        key = str(which)  # before Python 3.12 a slice is no key
        self.calls[key] += 1
        if self.calls[key] < 4:  # what it compiles and allocates once is no part of the graph
            return self.function(*which)
        if self.calls[key] == 4:
            stream = torch.cuda.current_stream()
            with torch.cuda.graph(self.graphs[key], CudaGraphs.pool(), stream, "thread_local"):
                self.results[key] = self.function(*which)
        self.graphs[key].replay()
        return self.results[key]


def make_envs(args: Args, seed: int, num_envs: int | None = None) -> Envs:
    """--num-envs environments (or so many), in this process or in --num-workers of their own."""
    try:
        many = num_envs or args.num_envs
        vecenv = adapters.make(args.env_id, args.env, many, args.num_workers, seed)
    except pufferlib.APIUsageError as error:
        fail(f"--env-id {args.env_id}: {error}")
    return Envs(vecenv, seed)


def join_ranks(words: list[str]) -> tuple[Args, dict | None]:
    """Makes the process group. Returns the arguments and the checkpoint, which rank 0 has read."""
    found = re.findall(r"--dist.timeout[ =](\d[\d_]*(?:\.\d*)?(?:e\+?\d)?)", " ".join(words))
    timeout = timedelta(seconds=float(found[-1]) if found else Args.dist_timeout)
    read = [parse_job(words) if RANK == 0 or {"-h", "--help"} & {*words} else None]
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "3"  # with torchrun's 1 recorded sums hang
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store = fresh_store(timeout) if WORLD_SIZE > 1 else dist.HashStore()
    dist.init_process_group(backend, store=store, rank=RANK, world_size=WORLD_SIZE, timeout=timeout)
    dist.broadcast_object_list(read)
    args, resumed = read[0]
    args.dist_timeout = round(timeout.total_seconds())  # not a configuration's
    if args.device == "cuda":
        if torch.cuda.device_count() <= LOCAL_RANK:
            fail(f"--device cuda: {torch.cuda.device_count()} GPUs here; each rank needs one")
        torch.cuda.set_device(LOCAL_RANK)
    return args, resumed


def fresh_store(timeout: timedelta) -> dist.Store:
    """torchrun's store under a name that no earlier start had: all ranks' words, once all saw."""
    store = next(dist.rendezvous("env://", RANK, WORLD_SIZE, timeout=timeout))[0]
    here = [f"here {rank}" for rank in range(WORLD_SIZE)]
    seen = [f"seen {rank}" for rank in range(WORLD_SIZE)]
    store.set(here[RANK], os.urandom(8).hex())
    for _ in range(int(50 * timeout.total_seconds())):
        words = b" ".join(store.multi_get(here))
        store.set(seen[RANK], words)
        if {*store.multi_get(seen)} == {words}:
            return dist.PrefixStore(words.decode(), store)
        time.sleep(0.02)
    raise dist.DistStoreError(f"not all came within {timeout} (--dist-timeout)")


def parse_job(words: list[str]) -> tuple[Args, dict | None]:
    """`parse_args`, and the checkpoint of a job that torchrun starts again: never from zero."""
    args, resumed = parse_args(words)
    folder = job_folder(args)
    if resumed is None and (folder / "trainer_state.pt").exists():
        resumed = load_checkpoint(str(folder), "")
        free = {"config", "resume", "output_dir", "auto", *args.auto}
        before = asdict(Args()) | resumed["config"]  # which may lack a flag of today's
        other = {name for name, value in asdict(args).items() if value != before[name]} - free
        if other:
            fail(f"--rdzv-id: {folder} has another {sorted(other)}; --resume it if that is meant")
    return args, resumed


def job_folder(args: Args) -> Path:
    """Named by torchrun's run id, which stays when it starts the ranks again; else by the time."""
    job = os.getenv("TORCHELASTIC_RUN_ID", str(int(time.time())))
    if job == "none":
        fail("torchrun needs --rdzv-id with these flags: it names the run's folder")
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{job}".replace("/", "-").replace(":", "-")
    return Path(os.path.expanduser(args.output_dir), name)


def load_checkpoint(path: str, output_dir: str) -> dict:
    """The trainer_state.pt of a run's folder, or of the newest in output_dir."""
    try:
        file = Path(os.path.expanduser(path), "trainer_state.pt")
        if path == "latest":
            file = adapters.latest_checkpoint(output_dir)
        state = torch.load(file, map_location="cpu")
        return state | {"folder": file.parent, "config": state["config"]}  # or KeyError
    except Exception as error:
        fail(f"--resume {path}: no folder with a whole trainer_state.pt ({error!r:.200})")


def open_folder(args: Args, resumed: dict | None):
    """A new run's folder, or that of --resume, and its metrics.jsonl, locked while it is on."""
    folder = adapters.started_in / (resumed["folder"] if resumed else job_folder(args))
    try:
        folder.mkdir(parents=True, exist_ok=resumed is not None or "RANK" in os.environ)
        jsonl = (folder / "metrics.jsonl").open("a", buffering=1)  # a line at once
        adapters.lock(jsonl)
        if resumed and load_checkpoint(folder, "")["iteration"] != resumed["iteration"]:
            fail(f"--resume {folder}: it was still on, and has a newer checkpoint now; once more")
    except BlockingIOError:
        fail(f"--resume {folder}: this run is still on")
    except OSError as error:
        if isinstance(error, FileExistsError) and folder.is_dir():
            time.sleep(1)  # another start in this second
            return open_folder(args, resumed)
        flag = f"--resume {folder}" if resumed else f"--output-dir {args.output_dir}"
        fail(f"{flag}: {error}")
    return folder, jsonl


class Run(contextlib.AbstractContextManager):
    """A run's folder and what rank 0 writes to it; its clock; the signals that end it."""

    def __init__(self, args: Args, envs: Envs, resumed: dict | None):
        self.args = args
        self.envs = envs
        self.resumed = resumed or {"iteration": 0, "step": 0, "seconds": 0.0, "metrics_size": 0}
        self.iteration = self.resumed["iteration"]
        self.step = self.resumed["step"]
        self.signals = []
        self.told = [0, 0]  # by any rank: a signal; that its time is over
        self.compiled = False  # from the first update on; then there is something to save
        self.began = time.perf_counter()
        self.profiler = None
        if RANK > 0:
            return
        self.folder, self.jsonl = open_folder(args, resumed)
        self.config = asdict(args) | {"config": None, "resume": None}
        if args.track:
            import wandb

            os.environ.setdefault("WANDB_PROJECT", "ppo-lstm-puffer")
            name = self.folder.name  # an id too: after --resume it is the same run
            same = {"name": name, "id": name, "resume": "allow", "dir": self.folder}
            wandb.init(**same, config=self.config, sync_tensorboard=True)
        self.writer = SummaryWriter(self.folder, purge_step=self.step + 1)
        say(f"run: {self.folder}")

    def begin(self, agent: Agent, optimizers: list):
        """Gives them their states of --resume, if it was given. Writes only from then on."""
        self.agent = agent
        self.optimizers = optimizers
        try:
            if "model" in self.resumed:
                agent.load_state_dict(self.resumed["model"])
                for optimizer, state in zip(optimizers, self.resumed["optimizers"], strict=True):
                    # Learning rates and momenta are not taken: flags win.
                    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
        except Exception as error:
            folder = self.resumed["folder"]
            hint = "another --env-id, --env, network, --optimizer?"
            fail(f"--resume {folder}: {hint} {error!r:.200}")
        if RANK > 0:
            return
        size = min(self.jsonl.tell(), self.resumed["metrics_size"])  # it may be a new file
        self.jsonl.truncate(size)  # the lines after it will come again
        if self.step >= self.args.total_timesteps:  # complete: what trained it stays there
            return
        config = yaml.safe_dump(self.config, sort_keys=False)
        adapters.write_whole(self.folder / "config.yaml", config.encode())
        adapters.write_whole(self.folder / Path(__file__).name, Path(__file__).read_bytes())

    @property
    def seconds(self) -> float:
        """Of training, those before a resume included, compiling not."""
        return self.resumed["seconds"] + self.compiled * (time.perf_counter() - self.began)

    @property
    def exit_reason(self) -> str | None:
        """Why all ranks end after this iteration; None: they go on."""
        if self.step >= self.args.total_timesteps:
            return "completed"
        if self.told[0]:
            return signal.Signals(self.told[0]).name.lower()
        return "time_limit" if self.told[1] else None

    def update_done(self, steps: int, began: float):
        """Counts an iteration. The first has compiled all: only then clock and signals begin."""
        over = self.seconds - self.resumed["seconds"] >= self.args.time_limit
        told = torch.tensor([max(self.signals, default=0), over])
        dist.all_reduce(told, dist.ReduceOp.MAX)  # what one is told, all do after this iteration
        self.told = told.tolist()
        self.iteration += 1
        self.step += steps
        if self.compiled:
            self.update_seconds += time.perf_counter() - began
        else:
            self.compiled = True
            self.began = time.perf_counter()
            self.start_interval()
            if self.args.profile and RANK == 0:
                schedule = torch.profiler.schedule(wait=4, warmup=1, active=3, repeat=1)
                trace = torch.profiler.tensorboard_trace_handler(str(self.folder))
                self.profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=trace)
                self.profiler.start()
        if self.profiler:
            self.profiler.step()
        for signum in adapters.ENDING:  # in every iteration: environments take them
            signal.signal(signum, lambda number, _: self.signals.append(number))

    def start_interval(self):
        self.last_log = time.perf_counter()
        self.last_step = self.step
        self.update_seconds = 0.0
        self.envs.seconds = 0.0

    def write(self, row: dict):
        row = {"step": self.step, "iteration": self.iteration, "time": self.seconds} | row
        self.jsonl.write(json.dumps(row) + "\n")

    def log(self, losses: dict[str, float], learning_rate: float):
        """A line of metrics.jsonl and of stdout, and TensorBoard's scalars."""
        seconds = time.perf_counter() - self.last_log if self.step > self.last_step else math.nan
        row = {"sps": (self.step - self.last_step) / seconds, "learning_rate": learning_rate}
        row |= self.envs.means() | {f"losses/{name}": loss for name, loss in losses.items()}
        if RANK > 0:  # it took part in the means
            return
        row["time/env"] = self.envs.seconds / seconds  # these three are shares
        row["time/update"] = self.update_seconds / seconds
        row["time/policy"] = 1 - row["time/env"] - row["time/update"]
        row = {name: value for name, value in row.items() if np.isfinite(value)}  # JSON has no NaN
        self.start_interval()
        self.write(row)
        for name, value in row.items():
            chart = f"charts/{name.replace('sps', 'SPS')}"
            self.writer.add_scalar(name if "/" in name else chart, value, self.step)
        row |= {"step": self.step, "time": self.seconds}
        names = ["step", "time", "sps", "env/score", "episodic_return", "losses/entropy"]
        shown = [f"{name.rpartition('/')[2]}={row[name]:.6g}" for name in names if name in row]
        say(" ".join(shown), sys.stdout)

    def save(self):
        """model_*.pt is the weights alone; trainer_state.pt all that --resume needs."""
        model = self.agent.state_dict()
        state = {"iteration": self.iteration, "step": self.step, "seconds": self.seconds}
        state |= {"model": model, "config": asdict(self.args)}
        state["optimizers"] = [optimizer.state_dict()["state"] for optimizer in self.optimizers]
        state["metrics_size"] = os.path.getsize(self.jsonl.name)
        env_name = self.args.env_id.replace("/", "-").replace(":", "-")
        files = {f"model_{env_name}_{self.iteration:06d}.pt": model, "trainer_state.pt": state}
        for name, content in files.items():
            file = io.BytesIO()  # of a full disk torch.save itself would say "unexpected pos"
            torch.save(content, file)
            adapters.write_whole(self.folder / name, file.getbuffer())

    def __exit__(self, kind, error, traceback):
        """Whatever the end is, what was learned is saved, and the last line says why it ended."""
        if RANK > 0 or (kind is SystemExit and not self.compiled):
            return  # rank 0 alone writes, and not where `begin` refused
        if self.profiler:
            self.profiler.stop()
        reason = f"{kind.__name__}: {error}" if kind else self.exit_reason
        finite = False
        if self.compiled:  # else there may be no agent: a fork's failed as it was made
            learned = [*self.agent.parameters(), *adapters.running_statistics(self.agent)]
            finite = all(value.isfinite().all() for value in learned)
        try:
            if finite:
                self.save()
            self.write({"exit_reason": reason})
            self.writer.close()
            self.jsonl.close()
        except OSError as full:  # the checkpoint before is whole
            if kind is None:
                raise
            say(f"warning: {full}")
        if self.args.track:
            sys.modules["wandb"].finish()
        ending = kind.__name__ if kind else reason  # what the error says is said by whoever gets it
        say(f"{ending}: {self.step} steps in {self.seconds:.1f} s; {self.folder}")


def parse_args(words: list[str]) -> tuple[Args, dict | None]:
    """Defaults, then --config or the run of --resume, then the command line: the last one wins."""

    def parse(**options):  # words: as they are by then
        return tyro.cli(Args, args=adapters.whole_numbers(words, Args), **options)

    parse_known = partial(parse, add_help=False, return_unknown_args=True)
    given, _ = parse_known()
    resumed = None
    if given.config is not None:
        try:
            words = [*adapters.as_words(adapters.read_arguments(given.config)), *words]
        except Exception as error:  # no file, no YAML, no mapping
            fail(f"--config {given.config}: {' '.join(str(error).split())}")
        given, _ = parse_known()  # the file may have a resume or an output_dir
    if given.resume is not None:
        resumed = load_checkpoint(given.resume, given.output_dir)
        words = [*adapters.as_words(resumed["config"]), *words]
    # tyro takes the keys of a dictionary from its default.
    keys = [word[6:].partition("=")[0] for word in words if word.startswith("--env.")]
    default = Args(env=dict.fromkeys((key.replace("-", "_") for key in keys), ""))
    args = parse(default=default, description=__doc__)
    args.env = {key: adapters.parse_value(text) for key, text in args.env.items()}
    resolve(args)
    return args, resumed


def resolve(args: Args):
    """Replaces what is "auto" or None by what it means here, and checks what numbers may be."""
    lowest = {"seed": 0, "num_workers": 0, "update_epochs": 0.001}
    highest = {"momentum": 0.999, "gamma": 1, "gae_lambda": 1, "prio_beta0": 1}
    for name, value in asdict(args).items():
        if type(value) in (int, float):
            least = lowest.get(name, 1 if type(value) is int else 0)
            most = highest.get(name, math.inf)
            if not least <= value <= most:
                fail(f"--{name.replace('_', '-')} {value}: must be from {least} to {most}")
    if args.num_envs % WORLD_SIZE or args.minibatch_size % (args.num_steps * WORLD_SIZE):
        sizes = f"--num-envs {args.num_envs}, --minibatch-size {args.minibatch_size}"
        fail(f"{sizes}: must split over {WORLD_SIZE} ranks, into --num-steps {args.num_steps}")
    minibatch = args.minibatch_size // WORLD_SIZE
    most = args.max_minibatch_size
    if minibatch > most and (minibatch % most or most % args.num_steps):
        fail(f"--max-minibatch-size {most}: must divide --minibatch-size into whole segments")
    args.auto = [name for name in ("device", "precision") if getattr(args, name) == "auto"]
    args.auto.append("dist_timeout")  # the reference, which resumes these runs too, has none
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda: torch sees no GPU here; use --device cpu")
    if args.precision == "auto":
        args.precision = "bfloat16" if fast_bfloat16(args.device) else "float32"
    elif args.precision == "bfloat16" and not fast_bfloat16(args.device):
        say("warning: --precision bfloat16: float32 is up to 50 times faster on this hardware")
    if args.num_workers is None:  # on a GPU all cores but two, or fewer: even, and a divisor
        most = len(os.sched_getaffinity(0)) - 2 if args.device == "cuda" else 0
        fitting = [n for n in range(2, most + 1, 2) if args.num_envs // WORLD_SIZE % n == 0]
        args.num_workers = max(fitting, default=0)
        args.auto.append("num_workers")


def main(words: list[str]) -> int:
    """Trains, with environments and a run's folder that are closed whatever happens."""
    try:
        args, resumed = join_ranks(words)
        number = resumed["iteration"] if resumed else 0
        seed = pufferlib.env_seed(args.seed, number + (RANK << 32))  # each rank's own
        with contextlib.closing(make_envs(args, seed, args.num_envs // WORLD_SIZE)) as envs:
            batch = envs.num_agents * args.num_steps * WORLD_SIZE
            if args.minibatch_size > batch:
                fail(f"--minibatch-size {args.minibatch_size}: more than a batch, {batch} steps")
            envs.reset()  # here, so that one that fails here (not in a worker) leaves no folder
            set_up_torch(args, envs, seed)  # after it: an environment may seed torch
            with adapters.full_disk(), Run(args, envs, resumed) as run:
                train(args, envs, run)
    except RuntimeError as error:
        expected = pufferlib.APIUsageError, dist.DistError
        if not isinstance(error, expected) and "/gloo/" not in str(error):  # which has no class
            raise
        say(f"error: rank {RANK}: {error}")
        return 1
    return 128 + run.told[0] if run.told[0] and run.step < args.total_timesteps else 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # there is nothing to save yet: ends at once
    os._exit(main(sys.argv[1:]))  # gloo's threads may not outlive the interpreter
