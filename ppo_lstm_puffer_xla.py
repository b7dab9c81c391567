"""PPO with an LSTM on PufferLib's C environments, on TPUs: `ppo_lstm_puffer.py` through torch_xla.

    python ppo_lstm_puffer_xla.py --env-id breakout               # on all TPU chips; of several hosts: run it on each
    python ppo_lstm_puffer_xla.py --env-id breakout --device cpu  # XLA's CPU device; CPU_NUM_DEVICES=4 makes four of it

One process per host, the agents spread over all devices (SPMD). sync() ends a graph; after two iterations none is new.

The algorithm is PufferLib's PuffeRL (PPO + LSTM, V-trace, prioritized segments, Muon) with what it leaves out: the LSTM
is reset where an episode ends and carried from segment to segment, and the value after a segment is bootstrapped.
Read it from the top: arguments, network, recurrence, advantage, priorities, loss, the training loop.
"""

import atexit
import contextlib
import ctypes
import difflib
import functools
import importlib.util
import inspect
import io
import json
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil

if __name__ == "__main__":
    # How long OpenMP's threads wait awake: by default 30 times as long, and beside another program that stops it.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

    def end_at_once(signum, _):
        """SIGINT and SIGTERM until the first update: there is nothing to save, and the compiler would go on."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for child in psutil.Process().children(recursive=True):  # compilers, environment workers
            with contextlib.suppress(psutil.Error):
                child.kill()
        os.write(2, b"ended while starting: nothing is lost\n")
        os._exit(128 + signum)

    signal.signal(signal.SIGINT, end_at_once), signal.signal(signal.SIGTERM, end_at_once)

import gymnasium as gym
import joblib
import numpy as np
import pufferlib.vector
import torch
import torch.nn as nn
import torch.utils.benchmark
import torch.utils.tensorboard
import torch_xla  # needs a torch of its own: make setup-xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as spmd
import torch_xla.runtime as xr
import tyro
import yaml
from numpy.lib.recfunctions import structured_to_unstructured
from pufferlib.ocean import environment as ocean
from pydantic import Field, TypeAdapter, ValidationError
from rich.progress import BarColumn, Console, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from torch_xla.experimental.scan import scan

Count, Natural = Annotated[int, Field(ge=1)], Annotated[int, Field(ge=0)]
Amount, Fraction = Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0, le=1)]


@dataclass
class Args:
    """PPO + LSTM on PufferLib, Gymnasium and PettingZoo environments."""

    exp_name: str = "ppo_lstm_puffer"  # name of this experiment
    seed: Natural = 1  # of everything: Python, numpy, torch, the C environments, the workers
    device: Literal["auto", "cpu", "tpu"] = (
        "auto"  # where to train; auto: a TPU, which must be there
    )
    output_dir: str = "runs"  # the folder that runs are written to
    track: bool = (
        False  # send metrics to Weights and Biases too; it reads WANDB_PROJECT and WANDB_ENTITY
    )
    # Environment
    env_id: str = "breakout"  # of PufferLib's Ocean (breakout), Gymnasium (CartPole-v1), or a module with parallel_env
    env: dict[str, Any] = field(default_factory=dict)  # its own arguments, each as --env.KEY VALUE
    num_envs: Count = (
        512  # environments stepped in parallel (an environment may hold several agents)
    )
    num_workers: Natural | None = (
        None  # worker processes; None: 0, on a GPU most cores; even: double-buffered
    )
    clip_rewards: bool = (
        True  # clip rewards to [-1, 1] for learning (reported returns are never clipped)
    )
    # Algorithm
    total_timesteps: Count = (
        20_000_000  # steps over all agents; the learning rate is annealed over them
    )
    learning_rate: Amount = 0.06  # of --optimizer (with adam, try 0.01)
    adam_learning_rate: Amount = 5e-4  # with Muon: of Adam, which trains whatever is not a matrix
    optimizer: Literal["muon", "adam"] = (
        "muon"  # Muon for matrices with Adam for the rest, or Adam for all
    )
    momentum: Fraction = 0.8  # Muon's momentum, Adam's beta1 where Adam trains all
    anneal: Literal["exponential", "linear", "constant"] = (
        "exponential"  # learning rates fall: to 1/64, to 0, or not
    )
    num_steps: Count = 32  # segment length T: steps per agent between two updates, and of backpropagation through time
    gamma: Fraction = 0.99  # discount factor
    gae_lambda: Fraction = 0.9  # lambda of the advantage estimate
    minibatch_size: Count = (
        2048  # steps per gradient update: minibatch_size / num_steps whole segments
    )
    max_minibatch_size: Count = (
        32768  # above this many steps a minibatch is split, and gradients are accumulated
    )
    update_epochs: Amount = (
        1.0  # updates per batch, in passes over it (0.5: half as many); one alone clips nothing
    )
    norm_adv: bool = True  # normalize advantages over each minibatch
    clip_coef: Amount = 0.15  # PPO's clip range of the ratio
    vf_clip_coef: Amount = 2.0  # clip range of the value loss; inf: not clipped
    vf_coef: Amount = 4.0  # weight of the value loss
    ent_coef: Amount = 0.00002  # weight of the entropy bonus
    max_grad_norm: Amount = 1.5  # clip the gradient's global norm to this
    vtrace_rho_clip: Amount = 1.0  # V-trace's clip of the ratio in the temporal difference
    vtrace_c_clip: Amount = 1.0  # V-trace's clip of the ratio in the trace
    prio_alpha: Amount = 0.3  # exponent of the segment priorities; 0 samples uniformly
    prio_beta0: Fraction = 0.2  # first exponent of the importance weights, annealed to 1
    # Network and speed
    hidden_size: Count = 128  # width of the encoder and of the LSTM
    precision: Literal["auto", "float32", "bfloat16"] = (
        "auto"  # of products; auto: bfloat16 where it is the faster
    )
    # Run
    time_limit: Amount | None = (
        None  # stop after so many seconds of training, resumes included, compiling not
    )
    log_interval: Count = 10  # iterations between two log lines
    checkpoint_interval: Count = 100  # iterations between two checkpoints
    keep_checkpoints: Count = 3  # how many of the last checkpoints to keep
    config: str | None = (
        None  # a YAML file of arguments, such as a run's config.yaml; flags on the command line win
    )
    resume: str | None = None  # go on with a run: its folder, or latest
    load_weights: str | None = (
        None  # start from these weights: a model_*.pt of ours, or a .pt of PufferLib's
    )
    profile: bool = (
        False  # write a trace of some iterations to the run's folder (for Perfetto or TensorBoard)
    )


# ALGO LOGIC: the network ----------------------------------------------------------------------------------------------


def layer_init(layer: nn.Module, std: float = 2**0.5) -> nn.Module:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """PufferLib's default network: encoder, LSTM of the same width, linear policy and value heads.

    The action space decides the policy head: Discrete is one categorical, MultiDiscrete several, Box a Gaussian with a
    learned, state-independent standard deviation. Parameters have PufferLib's names: files fit both ways.
    """

    def __init__(
        self,
        observation_space: gym.Space,
        action_space: gym.Space,
        hidden_size: int,
        precision="float32",
    ):
        super().__init__()
        shape, self.dtype = observation_space.shape, getattr(torch, precision)
        # An image is uint8, of 36 x 36 pixels or more: the smallest that the convolutions take.
        self.image = (
            observation_space.dtype == np.uint8 and len(shape) in (2, 3) and sorted(shape)[-2] >= 36
        )
        self.channels_last = self.image and len(shape) == 3 and shape[2] <= 4
        self.continuous = isinstance(action_space, gym.spaces.Box)
        self.action_dtype = torch.float32 if self.continuous else torch.int64
        self.policy, layers = nn.Module(), []
        x = self.flatten(torch.zeros(1, *shape))  # goes through the layers for their sizes
        if self.image:  # the convolutional encoder of Mnih et al. 2015
            for channels, size, stride in (32, 8, 4), (64, 4, 2), (64, 3, 1):
                layers += [layer_init(nn.Conv2d(x.shape[1], channels, size, stride)), nn.ReLU()]
                x = layers[-2](x)
            x, layers = x.flatten(1), [*layers, nn.Flatten()]
        self.policy.encoder = nn.Sequential(
            *layers, layer_init(nn.Linear(x.shape[1], hidden_size)), nn.GELU()
        )
        if self.continuous:
            self.num_logits = int(np.prod(action_space.shape))
            self.policy.decoder_mean = layer_init(nn.Linear(hidden_size, self.num_logits), std=0.01)
            self.policy.decoder_logstd = nn.Parameter(torch.zeros(1, self.num_logits))
        else:
            self.nvec = np.ravel(
                getattr(action_space, "nvec", getattr(action_space, "n", None))
            ).tolist()
            self.num_logits = sum(self.nvec)
            self.policy.decoder = layer_init(nn.Linear(hidden_size, self.num_logits), std=0.01)
        self.policy.value = layer_init(nn.Linear(hidden_size, 1), std=1.0)
        # The parameters of nn.LSTM; lstm_forward() does the computing. PufferLib's files list them as a cell's too.
        self.lstm = nn.ParameterDict(list(nn.LSTM(hidden_size, hidden_size).named_parameters()))
        for name, parameter in self.lstm.items():
            nn.init.orthogonal_(parameter, 1.0) if "weight" in name else nn.init.zeros_(parameter)
        self.cell = nn.ParameterDict(
            {name.removesuffix("_l0"): parameter for name, parameter in self.lstm.items()}
        )

    def flatten(self, x: torch.Tensor) -> torch.Tensor:
        """Observations (batch, *obs) to (batch, features), or images to (batch, C, H, W) in [0, 1]."""
        if not self.image:
            return x.flatten(1)
        x = (x / 255).permute(0, 3, 1, 2) if self.channels_last else x / 255
        return x if x.ndim == 4 else x.unsqueeze(1)

    def encode(self, observations: torch.Tensor) -> torch.Tensor:
        """Observations (T, N, *obs) of any dtype to features (T, N, hidden) in the compute dtype."""
        x = self.flatten(observations.flatten(0, 1)).to(self.dtype)
        # Parameters are cast by hand: with torch.autocast inside, a function would be compiled anew in every process.
        weights = {
            name: weight.to(self.dtype) for name, weight in self.policy.encoder.named_parameters()
        }
        return torch.func.functional_call(self.policy.encoder, weights, x).view(
            *observations.shape[:2], -1
        )

    def lstm_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[W_ih | W_hh] (4H, 2H) in the compute dtype, b_ih + b_hh (4H) float32: one product per step, not two."""
        weight = torch.cat((self.lstm.weight_ih_l0, self.lstm.weight_hh_l0), dim=1).to(self.dtype)
        return weight, self.lstm.bias_ih_l0 + self.lstm.bias_hh_l0

    def heads(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """LSTM outputs (..., H) to logits or Gaussian means (..., num_logits) and values (...), float32."""
        hidden = hidden.float()
        actor = self.policy.decoder_mean if self.continuous else self.policy.decoder
        return actor(hidden), self.policy.value(hidden).squeeze(-1)

    def sampling_noise(self, *shape: int, device=None, deterministic: bool = False) -> torch.Tensor:
        """(*shape, num_logits) for `sample`: standard normal or Exponential(1); a constant if deterministic."""
        noise = torch.full(
            (*shape, self.num_logits), 0.0 if self.continuous else 1.0, device=device
        )
        return (
            noise if deterministic else noise.normal_() if self.continuous else noise.exponential_()
        )

    def sample(
        self, logits: torch.Tensor, noise: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions (..., actions) and their log-probabilities (...), by noise (..., num_logits)."""
        if self.continuous:
            actions = logits + self.policy.decoder_logstd.exp() * noise
        else:  # the Gumbel-max trick: argmax(log p + Gumbel) is a sample of p, and -log(Exponential) is a Gumbel
            scores = (logits - noise.clamp_min(1e-20).log()).split(self.nvec, -1)
            actions = torch.stack([score.argmax(-1) for score in scores], -1)
        return actions, self.evaluate_actions(logits, actions)[0]

    def evaluate_actions(
        self, logits: torch.Tensor, actions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability (...) of the joint action (..., actions), and the policy's entropy (...)."""
        if self.continuous:
            normal = torch.distributions.Normal(
                logits, self.policy.decoder_logstd.exp(), validate_args=False
            )
            return normal.log_prob(actions).sum(-1), normal.entropy().sum(-1)
        logprob, entropy = 0.0, 0.0
        for part, action in zip(logits.split(self.nvec, -1), actions.unbind(-1)):
            log_p = part.log_softmax(-1)
            logprob = logprob + log_p.gather(-1, action.unsqueeze(-1)).squeeze(-1)
            entropy = entropy - (log_p.exp() * log_p).sum(-1)
        return logprob, entropy


# ALGO LOGIC: the recurrence, with resets ------------------------------------------------------------------------------


def forward_step(state, step):
    """`lstm_forward` of one step, for the scan."""
    outputs, h, c, inputs, gates, cells = lstm_forward(
        step[0][None], *state[:2], step[1][None], *state[2:]
    )
    return (h, c, *state[2:]), (outputs[0], inputs[0], gates[0], cells)


def backward_step(state, step):
    """`lstm_backward` of one step."""
    (dh, dc, weight_hh), (doutputs, dones, gates, cells) = state, step
    dgates, dh, dc = lstm_backward(
        doutputs[None], dh, dc, gates[None], cells, dones[None], weight_hh
    )
    return (dh, dc, weight_hh), dgates[0]


def tanh(x: torch.Tensor) -> torch.Tensor:
    """Through the sigmoid, whose vectorized exponential is three times faster on a CPU; absolute error below 1e-7."""
    return 2 * torch.sigmoid(2 * x) - 1


def lstm_forward(x, h, c, dones, weight, bias):
    """The LSTM over T steps, its state set to zero wherever dones is 1.

    x (T, N, F); h, c (N, H) float32: the state before the first step; dones (T, N); weight (4H, F + H); bias (4H).
    Returns the outputs (T, N, H), the state after the last step, and what the backward pass needs: the inputs [x | h],
    h after the reset (T, N, F + H), the gates' activations (T, N, 4H), the cell states (T + 1, N, H) before resets.
    """
    keep = (1 - dones).unsqueeze(-1)
    outputs, inputs, gates, cells = [], [], [], [c]
    for t in range(len(x)):
        inputs.append(torch.cat((x[t], (h * keep[t]).to(x.dtype)), dim=1))
        i, f, g, o = (torch.mm(inputs[t], weight.t()).float() + bias).chunk(4, dim=1)
        i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), tanh(g), torch.sigmoid(o)
        gates.append(torch.cat((i, f, g, o), dim=1).to(x.dtype))
        c = f * (c * keep[t]) + i * g
        h = o * tanh(c)
        outputs.append(h.to(x.dtype)), cells.append(c)
    return torch.stack(outputs), h, c, torch.stack(inputs), torch.stack(gates), torch.stack(cells)


def lstm_backward(doutputs, dh, dc, gates, cells, dones, weight_hh):
    """The chain rule through `lstm_forward`, from the gradients of its outputs (T, N, H) and last state (N, H).
    Returns those of the gates before activation (T, N, 4H), and of the first state."""
    keep, dgates = (1 - dones).unsqueeze(-1), [None] * len(doutputs)
    for t in reversed(range(len(doutputs))):
        i, f, g, o = gates[t].float().chunk(4, dim=1)
        tanh_c = tanh(cells[t + 1])
        dh = dh + doutputs[t].float()
        dc = dc + dh * o * (1 - tanh_c * tanh_c)
        di, df = dc * g * i * (1 - i), dc * (cells[t] * keep[t]) * f * (1 - f)
        dg, do = dc * i * (1 - g * g), dh * tanh_c * o * (1 - o)
        dgates[t] = torch.cat((di, df, dg, do), dim=1).to(doutputs.dtype)
        dc = dc * f * keep[t]
        dh = torch.mm(dgates[t], weight_hh).float() * keep[t]
    return torch.stack(dgates), dh, dc


class LSTM(torch.autograd.Function):
    """`lstm_forward`'s outputs, with their gradient for x, weight and bias; the first state gets none (truncated
    backpropagation). Autograd's own would take a small product per step for each weight; here only W_hh is inside the
    loop, and the input's and the weights' gradients are one product each."""

    @staticmethod
    def forward(ctx, x, h, c, dones, weight, bias):
        outputs, *saved = scan(forward_step, (h, c, weight, bias), (x, dones), is_fn_pure=True)[1]
        ctx.save_for_backward(dones, weight, *saved)
        return outputs

    @staticmethod
    def backward(ctx, doutputs):
        dones, weight, inputs, *saved = ctx.saved_tensors
        T, N, H = doutputs.shape
        weight_ih, weight_hh = weight[:, :-H], weight[:, -H:].contiguous()
        start = torch.zeros_like(saved[-1][0, 0]), torch.zeros_like(saved[-1][0, 0]), weight_hh
        steps = tuple(step.flip(0) for step in (doutputs, dones, *saved))
        dgates = scan(backward_step, start, steps, is_fn_pure=True)[1].flip(0).flatten(0, 1)
        dbias = torch.mm(dgates.new_ones(1, T * N), dgates).squeeze(
            0
        )  # sums bfloat16 ten times faster than sum()
        dx = torch.mm(dgates, weight_ih).view(T, N, -1)
        return dx, None, None, None, torch.mm(dgates.t(), inputs.flatten(0, 1)), dbias.float()


# ALGO LOGIC: advantages, priorities, loss -----------------------------------------------------------------------------


def compute_advantages(values, rewards, dones, valid, ratio, gamma, gae_lambda, rho_clip, c_clip):
    """V-trace's temporal differences (Espeholt et al. 2018) summed as in GAE (Schulman et al. 2016); float32, (T, N).

    values, dones (T + 1, N): row T is of the observation after the segment, its value the bootstrap; dones[t] = 1 if
    the episode ended just before o_t; rewards, valid, ratio (T, N). With ratio 1 this is GAE; with lambda 1, A + v are
    V-trace's targets. Where valid is 0 the environment ignores the action, and the sum starts anew. So a truncation
    bootstraps: its last observation has valid 0 and dones 0, and dones is 1 in the row after it.
    """
    discount = gamma * (1 - dones[1:])
    delta = ratio.clamp(max=rho_clip) * (rewards + discount * values[1:] - values[:-1]) * valid
    trace = gae_lambda * discount * ratio.clamp(max=c_clip) * valid
    advantages, advantage = torch.empty_like(delta), torch.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        advantage = torch.addcmul(delta[t], trace[t], advantage, out=advantages[t])
    return advantages


def sample_segments(advantages, uniform, k, alpha, beta):
    """k prioritized segments (Schaul et al. 2016), p_i ~ (sum_t |A_ti|)^alpha, by systematic sampling (Madow 1949).

    Segments lie in random order on a line, each as long as its probability q_i = min(1, c p_i) of being drawn, and k
    points at equal distances hit k of them, none twice. c is such that the q_i add up to k: the largest are certain,
    the rest share what is left. With beta = 1 the weights k / (N q_i) make the minibatch's mean an unbiased one of all
    segments (Horvitz and Thompson 1952). Returns indices (k) int64 and weights^beta (k) float32.

    advantages (T, N); uniform (N + 1): random numbers in [0, 1), N for the order and one for the first point.
    """
    N = advantages.shape[1]
    priorities = advantages.abs().sum(0) ** alpha
    priorities = priorities + 1e-6 * priorities.mean() + 1e-12  # all advantages zero: uniform
    largest = priorities.sort(descending=True).values
    rest = largest.flip(0).cumsum(0).flip(0)  # the sum of each and all smaller ones
    certain = (
        (k - torch.arange(N, device=rest.device)) * largest > rest
    ).sum()  # so many have q = 1
    inclusion = (priorities * (k - certain) / rest[certain[None]]).clamp(max=1)
    order = uniform[:N].argsort()
    line = inclusion[order].double().cumsum(0)
    points = (torch.arange(k, device=line.device) + uniform[N]) * (line[-1] / k)
    index = order[(line <= points[:, None]).sum(1).clamp(max=N - 1)]
    return index, (k / (N * inclusion[index])) ** beta


def draw_minibatch(values, rewards, dones, valid, ratio, uniform, beta, args):
    """Advantages from the newest values and ratios, and a minibatch of segments drawn by them.

    values, dones, valid (T + 1, N), rewards, ratio (T, N), uniform (N + 1), beta: see the two functions above.
    Returns the segments' indices (B); of these, (T, B) each (B last: there a large minibatch is cut), what `ppo_loss`
    needs: advantages (normalized, times the importance weight), returns, values, weight; and all advantages (T, N).
    """
    discounts = args.gamma, args.gae_lambda, args.vtrace_rho_clip, args.vtrace_c_clip
    all_advantages = compute_advantages(values, rewards, dones, valid[:-1], ratio, *discounts)
    k = args.minibatch_size // args.num_steps
    segments, importance = sample_segments(all_advantages, uniform, k, args.prio_alpha, beta)
    advantages, values, weight = (
        all_advantages[:, segments],
        values[:-1, segments],
        valid[:-1, segments],
    )
    returns = advantages + values
    weight = weight / weight.sum().clamp_min(1)
    if args.norm_adv:
        advantages = advantages - (weight * advantages).sum()
        advantages = advantages / ((weight * advantages**2).sum().sqrt() + 1e-8)
    return segments, advantages * importance, returns, values, weight, all_advantages


# PuffeRL's names: old_approx_kl is the mean of -log ratio, importance the mean ratio.
LOSSES = (
    "policy_loss",
    "value_loss",
    "entropy",
    "old_approx_kl",
    "approx_kl",
    "clipfrac",
    "importance",
    "grad_norm",
)


def ppo_loss(agent, hidden, actions, old_logprobs, advantages, returns, old_values, weight, args):
    """PPO's clipped surrogate (Schulman et al. 2017), clipped value loss, entropy bonus, as sums weighted by `weight`.

    hidden (T, B, H): LSTM outputs; actions (T, B, actions); the rest (T, B) float32. weight: 0, or 1 / the steps that
    count in the whole minibatch; its parts are added, so every term is a weighted sum. Importance weights are in the
    advantages, nowhere else. Returns the loss, the detached log-ratio and values (T, B), and LOSSES but grad_norm.
    """
    logits, values = agent.heads(hidden)
    logprobs, entropy = agent.evaluate_actions(logits, actions)
    logratio = logprobs - old_logprobs
    ratio = logratio.exp()
    surrogate = torch.min(
        ratio * advantages, ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef) * advantages
    )
    policy_loss = -(weight * surrogate).sum()
    clipped = old_values + (values - old_values).clamp(-args.vf_clip_coef, args.vf_clip_coef)
    value_error = torch.max((values - returns) ** 2, (clipped - returns) ** 2)
    value_loss = 0.5 * (weight * value_error).sum()
    entropy = (weight * entropy).sum()
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
    with torch.no_grad():  # for the log
        approx_kl = (weight * (ratio - 1 - logratio)).sum()
        clipfrac = (weight * ((ratio - 1).abs() > args.clip_coef)).sum()
        old_approx_kl, mean_ratio = -(weight * logratio).sum(), (weight * ratio).sum()
        losses = torch.stack(
            (policy_loss, value_loss, entropy, old_approx_kl, approx_kl, clipfrac, mean_ratio)
        )
    return loss, logratio.detach(), values.detach(), losses


def minibatch_loss(agent, observations, h, c, dones, actions, logprobs, segments, *drawn, args):
    """`ppo_loss` of these segments (B) of the batch: observations (T, N, *obs), h and c (N, H) before them, dones,
    actions, logprobs. drawn: what else `draw_minibatch` gave. Values are clipped around the newest, as in PuffeRL."""
    features = agent.encode(
        observations[:, segments]
    )  # torch_xla does not survive index_select on a shared tensor
    hidden = LSTM.apply(
        features, h[segments], c[segments], dones[:, segments], *agent.lstm_weights()
    )
    return ppo_loss(agent, hidden, actions[:, segments], logprobs[:, segments], *drawn, args)


def act(agent, observations, dones, h, c, weight, bias, noise):
    """Acts on observations (N, *obs), the LSTM reset where dones (N) is 1. Returns actions, logprobs, values, h, c."""
    hidden, h, c, *_ = lstm_forward(
        agent.encode(observations[None]), h, c, dones[None], weight, bias
    )
    logits, values = agent.heads(hidden[0])
    return *agent.sample(logits, noise), values, h, c


def newton_schulz(updates: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sets the singular values of matrices (batch, rows, columns) to about 1: Muon's quintic iteration (Jordan et al.
    2024), x <- (a + b G + c G^2) x with G = x x'. In float32 the factors are multiplied up on the small G, and x comes
    last: half the work. bfloat16 has not the digits for that. Returns the same shape, of this dtype."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = updates.shape[1] > updates.shape[2]
    x = (updates.mT if tall else updates).to(dtype)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    if (
        dtype == torch.float32 and x.device.type == "cpu"
    ):  # on CUDA it may be TF32, which has not the digits either
        gram = x @ x.mT
        product = identity = torch.eye(gram.shape[1], device=x.device).expand_as(gram)
        for _ in range(5):
            factor = torch.baddbmm(a * identity + b * gram, gram, gram, alpha=c)
            product, gram = factor @ product, factor @ gram @ factor
        x = product @ x
    else:
        for _ in range(5):
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x  # torch_xla leaves the device for baddbmm
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalized: W -= lr sqrt(max(1, rows / columns)) newton_schulz(update)."""

    def __init__(self, parameters, lr: torch.Tensor, momentum: float, dtype: torch.dtype):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})
        self.dtype = dtype  # of the iteration

    @torch.no_grad()
    def step(self):
        group, same_shape = self.param_groups[0], defaultdict(list)
        for parameter in group["params"]:
            buffer = self.state[parameter].setdefault(
                "momentum_buffer", torch.zeros_like(parameter)
            )
            buffer.lerp_(parameter.grad, 1 - group["momentum"])
            update = parameter.grad.lerp(buffer, group["momentum"])
            same_shape[parameter.shape].append((parameter, update))
        for (
            rows,
            columns,
        ), pairs in same_shape.items():  # one batched product: the LSTM's two matrices
            updates = newton_schulz(
                torch.stack([update for _, update in pairs]), self.dtype
            ).float()
            for (parameter, _), update in zip(
                pairs, updates * (group["lr"] * max(1, rows / columns) ** 0.5)
            ):
                parameter.sub_(update)


def make_optimizers(agent: Agent, args: Args) -> list[torch.optim.Optimizer]:
    """Muon for matrices with Adam for the rest, or Adam for all. Learning rates are tensors, for CUDA graphs."""
    parameters, device = dict(agent.named_parameters()), agent.policy.value.weight.device
    lr, adam_lr = (
        torch.tensor(rate, device=device) for rate in (args.learning_rate, args.adam_learning_rate)
    )
    adam = functools.partial(torch.optim.Adam, eps=1e-8, foreach=False, capturable=True)
    if args.optimizer == "adam":
        return [adam(parameters.values(), lr=lr, betas=(args.momentum, 0.999))]
    matrices = [
        name
        for name, parameter in parameters.items()
        if parameter.ndim == 2 and "logstd" not in name
    ]
    muon = Muon([parameters.pop(name) for name in matrices], lr, args.momentum, agent.dtype)
    return [muon, adam(parameters.values(), lr=adam_lr)]


# TRAINING -------------------------------------------------------------------------------------------------------------


def train(args: Args, resumed: dict | None = None) -> int:
    """Trains until --total-timesteps, --time-limit or a signal. Returns the exit code."""
    device, devices, hosts, host = start_devices(args)
    iteration, step = (resumed["iteration"], resumed["step"]) if resumed else (0, 0)
    # A resumed run draws other numbers. torch's are the same on all hosts: what all devices have must be.
    envs = make_envs(
        args, seed_everything(args.seed + iteration) + 1_000_003 * host, args.num_envs // hosts
    )
    T, N = args.num_steps, envs.num_agents * hosts
    if args.num_envs % hosts or envs.num_agents % (envs.num_groups * devices):
        raise UsageError(
            f"--num-envs {args.num_envs}: the agents that act at once do not split over the devices"
        )
    batch_size = N * T
    total_steps = step - (step - args.total_timesteps) // batch_size * batch_size  # rounded up
    if args.minibatch_size > batch_size:
        raise UsageError(
            f"--minibatch-size {args.minibatch_size}: more than the {N} agents x {T} steps of a batch"
        )
    if step >= args.total_timesteps:
        raise UsageError(f"--resume: complete, at {step} steps; give a larger --total-timesteps")
    num_minibatches = max(1, round(args.update_epochs * batch_size / args.minibatch_size))

    set_up_device(
        args, envs
    )  # before the first weights: they differ in bits by the number of threads
    agent = Agent(
        envs.single_observation_space, envs.single_action_space, args.hidden_size, args.precision
    ).to(device)
    optimizers = make_optimizers(agent, args)
    load_state(agent, optimizers, args, resumed)

    # STORAGE: time first. Row T is what follows the segment: its observations, dones and valid become row 0 of the
    # next, its values are the bootstrap, its actions and logprobs count for nothing.
    observations = torch.zeros(
        (T + 1, N, *envs.single_observation_space.shape), dtype=envs.torch_dtype, device=device
    )
    actions = torch.zeros((T + 1, N, envs.num_actions), dtype=agent.action_dtype, device=device)
    dones, valid, logprobs, values = (torch.zeros((T + 1, N), device=device) for _ in range(4))
    rewards, ratio = (torch.zeros((T, N), device=device) for _ in range(2))
    h, c, start_h, start_c = (torch.zeros((N, args.hidden_size), device=device) for _ in range(4))
    # No views of one tensor: a write to one would be a write to all. Numbers as indices would make each step a graph.
    (
        share(1, observations, actions, dones, valid, logprobs, values, rewards, ratio),
        share(0, h, c, start_h, start_c),
    )
    indices = [torch.tensor([t]).to(device) for t in range(T + 1)]
    noise = agent.sampling_noise(T + 1, N).to(device)  # the numbers that the reference draws
    lstm_weights = [weight.detach().clone() for weight in agent.lstm_weights()]
    beta, statistics = torch.zeros((), device=device), torch.zeros(len(LOSSES), device=device)

    def put(array: np.ndarray) -> torch.Tensor:
        """To the devices, without waiting: each host brings its own agents (n, ...), and what is there is (N, ...)."""
        how = spmd.ShardingSpec(
            spmd.get_global_mesh(), ("data", *[None] * (array.ndim - 1)), minibatch=True
        )
        return xm.send_cpu_data_to_device([torch.tensor(array)], device, how)[0]

    def receive(t: int) -> slice:
        """Stores what the environments sent: the observation and done flags of step t, and the reward of step t - 1."""
        agents, observation, reward, done, counts = envs.receive()
        agents, at = slice(agents.start * hosts, agents.stop * hosts), indices[t]
        observations[at, agents], dones[at, agents], valid[at, agents] = (
            put(observation),
            put(done),
            put(counts),
        )
        if t > 0:
            rewards[indices[t - 1], agents] = put(
                reward.clip(-1, 1) if args.clip_rewards else reward
            )
        return agents

    @torch.no_grad()
    def act_at(t: int, first: int, last: int):
        """Step t of the segment for some agents. Step T is for its value only and leaves h and c as they are."""
        rows, at = slice(first, last), indices[t]
        observation, done, noise_t = (
            tensor[at, rows][0] for tensor in (observations, dones, noise)
        )
        results = act(agent, observation, done, h[rows], c[rows], *lstm_weights, noise_t)
        actions[at, rows], logprobs[at, rows], values[at, rows], *state = results
        if t < T:
            h[rows], c[rows] = state

    def update() -> tuple[torch.Tensor, torch.Tensor]:
        """Draws a minibatch and takes an optimizer step. Returns the advantages of all segments, and LOSSES."""
        uniform = torch.rand(N + 1).to(device)  # the numbers that the reference draws
        *drawn, advantages = draw_minibatch(
            values, rewards, dones, valid, ratio, uniform, beta, args
        )
        share(0, drawn[0]), share(1, *drawn[1:])  # and with it all that follows
        batch, sums = (observations[:T], start_h, start_c, dones[:T], actions[:T], logprobs[:T]), 0
        agent.zero_grad()
        for segments, *chunk in zip(
            *(tensor.split(args.max_minibatch_size // T, dim=-1) for tensor in drawn)
        ):
            loss, logratio, newvalues, losses = minibatch_loss(
                agent, *batch, segments, *chunk, args=args
            )
            loss.backward()
            ratio[:, segments], values[:T, segments] = logratio.exp(), newvalues
            sums += losses
        grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
        return advantages, torch.cat((sums, grad_norm[None]))

    update, act_of = (
        torch_xla.compile(update, full_graph=True),
        functools.partial(functools.partial, act_at),
    )
    if host > 0:  # the first one's folder and output are the run's
        args.output_dir, args.track, sys.stdout = tempfile.mkdtemp(), False, None
        resumed = resumed and resumed | {"folder": args.output_dir}
    with contextlib.closing(envs), Run(args, agent, optimizers, envs, resumed) as run:
        envs.reset()
        groups = [
            receive(0) for _ in range(envs.num_groups)
        ]  # which agents act together; two are double-buffered
        while (
            step < total_steps and not put(np.ones(devices) * run.stopping).max()
        ):  # hosts stop together
            # ROLLOUT: T steps of every agent with the current policy. The state that the segment starts from is kept.
            start_h.copy_(h), start_c.copy_(c)
            noise.copy_(agent.sampling_noise(T + 1, N))
            for stored, weight in zip(lstm_weights, agent.lstm_weights()):
                stored.copy_(weight.detach())
            for t in range(T + 1):  # the last for v_T alone
                for rows in groups:
                    if t > 0:
                        receive(t)
                        run.lap("env")
                    act_of(t, rows.start, rows.stop)()
                    if t < T:
                        chosen = rows_of_this_host(actions[indices[t], rows][0]).numpy()
                        run.lap("policy")
                        envs.send(chosen)
                        run.lap("env")
            torch_xla.sync()
            run.lap("policy")

            # UPDATE: minibatches of segments, drawn by priority. Advantages follow the newest values and ratios.
            progress = step / total_steps
            factor = {"exponential": 64**-progress, "linear": 1 - progress, "constant": 1.0}[
                args.anneal
            ]
            for optimizer, learning_rate in zip(
                optimizers, (args.learning_rate, args.adam_learning_rate)
            ):
                optimizer.param_groups[0]["lr"].fill_(learning_rate * factor)
            beta.fill_(args.prio_beta0 + (1 - args.prio_beta0) * progress)
            ratio.fill_(1), statistics.zero_()
            rollout_values = values[:T].clone()
            for minibatch in range(num_minibatches):
                advantages, losses = update()
                if (
                    minibatch == 0
                ):  # those of the policy that acted; a CUDA graph writes there again
                    rollout_advantages, rollout_returns = (
                        advantages.clone(),
                        advantages + rollout_values,
                    )
                statistics += losses
            losses = dict(
                zip(LOSSES, (statistics / num_minibatches).tolist())
            )  # the one read: waits for the device
            iteration, step = iteration + 1, step + batch_size
            run.lap("update")

            # LOGGING, CHECKPOINT
            run.updated(iteration, step)
            if broken := [name for name, value in losses.items() if not np.isfinite(value)]:
                raise FloatingPointError(
                    f"{', '.join(broken)} not finite at step {step}; try a lower --learning-rate"
                )
            last = step >= total_steps
            if (
                iteration == 1 or iteration % args.log_interval == 0 or last
            ):  # losses of this iteration alone
                counted = valid[:T] > 0
                wanted = counted, rollout_advantages, rollout_returns
                counted, rollout_advantages, rollout_returns = (
                    rows_of_this_host(tensor.t()) for tensor in wanted
                )
                unexplained, variance = (
                    rollout_advantages[counted].var(),
                    rollout_returns[counted].var(),
                )
                losses["explained_variance"] = (
                    float(1 - unexplained / variance) if variance > 0 else 0.0
                )
                run.log(losses, args.learning_rate * factor)
            if iteration % args.checkpoint_interval == 0 or last:
                run.save_checkpoint()
            # The next segment begins where this one ended.
            observations[0], dones[0], valid[0] = observations[T], dones[T], valid[T]
            torch_xla.sync()
            run.lap("log")
        if step < total_steps:
            run.exit_reason = run.signum.name.lower() if run.signum else "time_limit"
            run.save_checkpoint()
    return 128 + run.signum if run.signum else 0


# ======================================================================================================================
# PLUMBING: not needed to understand the algorithm, but for what `Envs.receive` says of dones and valid.


class UsageError(Exception):
    """A wrong argument: printed as one line, exit code 2."""


@contextlib.contextmanager
def blame(flag: str):
    """Whatever goes wrong inside is the fault of this flag: a UsageError that says so."""
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())[:400]
        raise UsageError(f"{flag}: {type(error).__name__}: {text!r}") from error


def warn(message: str):
    print(f"warning: {message}", file=sys.stderr)


def seed_everything(seed: int) -> int:
    random.seed(seed), np.random.seed(seed % 2**32), torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = True  # the image encoder on CUDA
    torch.set_float32_matmul_precision("high")
    return seed


def set_up_device(args: Args, envs: "Envs"):
    """A GPU's stream and pinned memory; a CPU's threads: one per core, or fewer, so that each has its share of an
    update's GFLOP (6 FLOP per parameter and step): less is not worth waiting for."""
    if args.device == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # the default one cannot be recorded
        buffer = envs.vecenv.buf["observations"] if envs.processes else envs.vecenv.observations
        torch.cuda.cudart().cudaHostRegister(
            buffer.ctypes.data, buffer.nbytes, 0
        )  # pinned: copies do not wait
    steps = min(args.minibatch_size, args.max_minibatch_size)
    gflop = (
        6e-9
        * steps
        * args.hidden_size
        * (np.prod(envs.single_observation_space.shape) + 8 * args.hidden_size)
    )
    share = 0.5 if args.precision == "float32" else 2 if fast_bfloat16(args.device) == "AMX" else 1
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(
            max(1, min(round(gflop / share), joblib.cpu_count(only_physical_cores=True)))
        )
    # glibc returns freed blocks of some megabytes to the system, and clearing them anew took a fifth of an update.
    ctypes.CDLL(None).mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    ctypes.CDLL(None).mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, the most that it takes


def fast_bfloat16(device: str) -> str | None:
    """What here multiplies bfloat16 faster than float32; None if nothing does."""
    return "a TPU" if device == "tpu" else None


# PLUMBING: devices and hosts ------------------------------------------------------------------------------------------


def start_devices(args: Args) -> tuple[torch.device, int, int, int]:
    """Starts XLA's runtime, one process per host: all devices of all hosts are a mesh with one axis, "data", that the
    agents are spread over. Returns what stands for all devices, how many are here, of how many hosts, and which."""
    for signum in signal.SIGINT, signal.SIGTERM:  # a handler would wait for XLA's compiler
        signal.signal(signum, signal.SIG_DFL)
    # Autograd's own thread lets go of its last tensors late: at times they would be part of the next graph.
    torch.autograd.set_multithreading_enabled(False)
    torch.__future__.set_swap_module_params_on_conversion(
        True
    )  # `Agent.to`: lstm and cell keep the same parameters
    with blame(f"--device {args.device}: does not start"):
        xr.set_device_type(args.device.upper())
        xr.use_spmd()
        devices = np.arange(xr.global_runtime_device_count())
        spmd.set_global_mesh(spmd.Mesh(devices, devices.shape, ("data",)))
        return (
            torch_xla.device(),
            xr.addressable_runtime_device_count(),
            xr.process_count(),
            xr.process_index(),
        )


def share(dim: int, *tensors: torch.Tensor):
    """Tells XLA to spread this dimension over the devices."""
    for tensor in tensors:
        spmd.mark_sharding(
            tensor,
            spmd.get_global_mesh(),
            (*[None] * dim, "data", *[None] * (tensor.ndim - dim - 1)),
        )


def rows_of_this_host(tensor: torch.Tensor) -> torch.Tensor:
    """Computes a tensor (N, ...) of all agents; those of this host (n, ...), on the CPU. `.cpu()` would gather all."""
    torch_xla.sync(wait=True)
    shards = spmd.XLAShardedTensor(tensor).local_shards
    if shards[0].indices is Ellipsis:  # every device has all
        return shards[0].data
    return torch.cat([shard.data for shard in shards])  # in the order in which `put` gave them out


# PLUMBING: environments -----------------------------------------------------------------------------------------------


class Envs:
    """PufferLib's vectorized environments: receive(), then send() actions. Collects finished episodes and logs."""

    def __init__(self, vecenv, seed: int):
        self.vecenv, self.seed, self.num_agents = vecenv, seed, vecenv.num_agents
        vecenv.initialized = True  # no check of the first actions: it takes all to begin at 0
        self.processes, self.received = getattr(vecenv, "processes", []), []
        if self.processes:
            atexit.register(
                self.close
            )  # before multiprocessing's own handler, which would wait for the workers
            signal.signal(signal.SIGCHLD, self.check_workers)
        self.num_groups = vecenv.num_agents // getattr(
            vecenv, "agents_per_batch", vecenv.num_agents
        )
        self.single_action_space, space = (
            vecenv.single_action_space,
            vecenv.single_observation_space,
        )
        self.emulated, self.structure, shape = bool(vecenv.emulated), None, space.shape
        if (
            self.emulated and (dtype := vecenv.driver_env.obs_dtype).names
        ):  # Dict and Tuple arrive as packed bytes
            self.structure = dtype
            shape = structured_to_unstructured(np.zeros(1, dtype)).shape[1:]
        if self.structure or space.dtype == np.float64:
            space = gym.spaces.Box(-np.inf, np.inf, shape, np.float32)
        self.single_observation_space, self.torch_dtype = (
            space,
            torch.as_tensor(np.zeros(1, space.dtype)).dtype,
        )
        self.num_actions = int(
            np.prod(self.single_action_space.shape)
        )  # a Discrete space has shape (), and one action
        self.ended = np.ones(
            self.num_agents, bool
        )  # the episode is over: the next observation begins another
        self.returns, self.lengths = np.zeros(self.num_agents), np.zeros(self.num_agents, int)
        self.episodes = []  # (agent, return, length) of each that finished
        self.logs = defaultdict(list)  # what environments log, or you: (value, weight), to env/...

    def check_workers(self, *_):
        for i, process in enumerate(self.processes):
            if process.exitcode is not None:
                raise SystemExit(
                    f"error: environment worker {i} (pid {process.pid}) ended: {process.exitcode}"
                )

    def reset(self):
        self.check_workers()
        self.vecenv.async_reset(self.seed)

    def receive(self) -> tuple[slice, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Which agents, their observations (n, *obs), raw rewards, dones and valid (n) float32.

        dones: the episode ended just before this observation. valid: 0 where the environment will ignore the next
        action (PufferLib's emulation resets on the step after the end, and pads agents that are gone).
        """
        if self.processes:  # PufferLib wants recv and send in turn; two groups are received before either is sent to
            self.vecenv.flag = pufferlib.vector.RECV
        observations, rewards, terminals, truncations, infos, ids, mask = self.vecenv.recv()
        if self.processes:
            self.received.append(self.vecenv.w_slice)
        agents = slice(int(ids[0]), int(ids[-1]) + 1)
        ended = np.logical_or(terminals, truncations)
        acted = ~self.ended[
            agents
        ]  # False at the first observation of all, and after an end that `send` reset
        self.returns[agents] += rewards * acted
        self.lengths[agents] += acted
        over = np.flatnonzero(ended & acted) + agents.start
        self.episodes += zip(
            over.tolist(), self.returns[over].tolist(), self.lengths[over].tolist()
        )
        self.returns[over], self.lengths[over] = 0, 0
        # An emulated environment shows the last observation, and the next `send` resets. C environments reset in the
        # same step: this observation is the next episode's first, and a truncation has none to bootstrap from.
        dones = self.ended[agents] | (terminals if self.emulated else ended)
        self.ended[agents] = ended if self.emulated else False
        valid = mask & ~ended if self.emulated else mask
        for info in infos:
            for key, value in pufferlib.unroll_nested_dict(info):
                if np.isscalar(value) and not isinstance(value, str):
                    self.logs[key].append((float(value), info.get("n", 1)))
        if self.structure is not None:
            observations = structured_to_unstructured(
                observations.reshape(len(ids), -1).view(self.structure)[:, 0]
            )
        observations = observations.astype(self.single_observation_space.dtype, copy=False)
        return agents, observations, rewards, dones.astype(np.float32), valid.astype(np.float32)

    def send(self, actions: np.ndarray):
        """Actions (n, actions), as the agent chose them; a Gaussian's are clipped to their Box."""
        space = self.single_action_space
        if isinstance(space, gym.spaces.Box):
            actions = np.clip(actions.reshape(-1, *space.shape), space.low, space.high).astype(
                space.dtype
            )
        else:
            actions = (actions.reshape(-1, *space.shape) + space.start).astype(np.int32)
        if self.processes:
            self.vecenv.flag, self.vecenv.w_slice = pufferlib.vector.SEND, self.received.pop(0)
        self.vecenv.send(actions)

    def means(self) -> dict[str, float]:
        """What the environments logged, each value weighted by the number of episodes that it is of."""
        pairs = {key: np.array(values).T for key, values in self.logs.items()}
        return {
            key: np.average(values, weights=weights + 1e-9)
            for key, (values, weights) in pairs.items()
        }

    def close(self):
        atexit.unregister(self.close)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for process in self.processes:
            (
                process.kill(),
                process.join(),
            )  # nothing of theirs is worth a wait, and they ignore SIGTERM
        self.vecenv.close()


def environment_class(env_id: str):
    """The callable that makes one environment for PufferLib: takes buf, seed and the environment's own arguments.

    Tried in this order: a name of Ocean's, a module with parallel_env (PettingZoo), a Gymnasium id.
    """
    name, (module, _, gym_id) = env_id.removeprefix("puffer_"), env_id.rpartition(":")
    makers = {
        key.removeprefix("make_"): value
        for key, value in vars(ocean).items()
        if key.startswith("make_")
    }
    makers |= ocean.MAKE_FUNCTIONS
    try:
        if callable(makers.get(name)):
            return makers[name]
        if name in makers:
            return getattr(importlib.import_module(f"pufferlib.ocean.{name}.{name}"), makers[name])
        if module:
            importlib.import_module(module)  # it registers its environments
        elif gym_id not in gym.registry and "/" not in env_id and importlib.util.find_spec(env_id):
            return functools.partial(make_pettingzoo, importlib.import_module(env_id).parallel_env)
        gym.spec(gym_id)
        return functools.partial(make_gymnasium, gym_id)
    except Exception as error:
        near = ", ".join(
            difflib.get_close_matches(env_id, [*makers, *gym.registry], cutoff=0.5)
            or sorted(makers)
        )
        raise UsageError(
            f"--env-id {env_id}: unknown, or does not load ({error!r}); known: {near}"
        ) from error


def make_gymnasium(gym_id: str, buf=None, seed=0, **kwargs):
    env = gym.make(gym_id, **kwargs)
    if isinstance(
        env.observation_space, gym.spaces.Discrete
    ):  # PufferLib packs a lone Discrete into nothing
        env = gym.wrappers.FlattenObservation(env)  # one-hot
    return pufferlib.emulation.GymnasiumPufferEnv(
        env=pufferlib.EpisodeStats(env), buf=buf, seed=seed
    )


def make_pettingzoo(parallel_env, buf=None, seed=0, **kwargs):
    env = pufferlib.MeanOverAgents(pufferlib.MultiagentEpisodeStats(parallel_env(**kwargs)))
    return pufferlib.emulation.PettingZooPufferEnv(env=env, buf=buf, seed=seed)


def make_one(make, base_seed: int, parent: int, kwargs: dict, buf=None, seed: int = 0):
    """Makes one environment, in this process or in a worker; `seed` is its number as PufferLib counts them.

    PufferLib gives environments of different workers the same seeds, and its workers outlive a killed parent.
    """
    own = base_seed + seed
    if os.getpid() != parent:  # a worker
        for signum in (
            signal.SIGINT,
            signal.SIGTERM,
        ):  # they may reach the whole process group; the parent decides
            signal.signal(signum, signal.SIG_IGN)
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the parent
        if os.getppid() != parent:
            os._exit(1)
        random.seed(own), np.random.seed(own % 2**32)
    ctypes.CDLL(None).srand(own)  # the C environments' rand()
    env = make(buf=buf, seed=seed, **kwargs)
    if not isinstance(env, pufferlib.PufferEnv):
        reset = env.reset
        env.reset = lambda seed=None: reset(seed=None if seed is None else own)
    return env


def make_envs(args: Args, seed: int, num_envs: int | None = None) -> Envs:
    """Vectorized environments as the arguments say. Raises UsageError."""
    make, kwargs, copies = environment_class(args.env_id), dict(args.env), num_envs or args.num_envs
    if args.num_workers is None:  # on a GPU all cores but two, or fewer: even, and a divisor
        cores = joblib.cpu_count(only_physical_cores=True) if args.device == "cuda" else 0
        most = cores // int(os.getenv("LOCAL_WORLD_SIZE", 1)) - 2
        args.num_workers = max((n for n in range(2, most + 1, 2) if copies % n == 0), default=0)
    if args.num_workers and copies % args.num_workers:
        raise UsageError(
            f"--num-envs {copies}: must be a multiple of --num-workers {args.num_workers}"
        )
    if (
        native := "num_envs" in inspect.signature(make).parameters
    ):  # one object steps many environments
        kwargs["num_envs"], copies = copies // max(args.num_workers, 1), max(args.num_workers, 1)
    how = {"num_envs": copies, "backend": "PufferEnv" if native else "Serial"}
    if args.num_workers:  # in halves if they are even: one steps while the policy acts on the other
        how |= {"backend": "Multiprocessing", "num_workers": args.num_workers, "overwork": True}
        how["batch_size"] = copies // (2 if args.num_workers % 2 == 0 else 1)
    with blame(f"--env-id {args.env_id}: cannot be made with {args.env}"):
        return Envs(
            pufferlib.vector.make(
                functools.partial(make_one, make, seed, os.getpid(), kwargs), **how
            ),
            seed,
        )


# PLUMBING: a run's folder: checkpoints, logging -----------------------------------------------------------------------


def write_atomically(path: Path, content):
    """A text, or what torch.save takes. Whoever reads sees the old file or the new one, whole."""
    temporary, data = path.with_name(path.name + ".tmp"), io.BytesIO()
    data.write(content.encode()) if isinstance(content, str) else xm.save(content, data)
    try:
        temporary.write_bytes(data.getvalue())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # a full disk: do not keep what did not fit


def checkpoints(folder: Path, kind: str) -> list[Path]:
    """By iteration, the newest last."""
    return sorted(folder.glob(f"{kind}_[0-9]*.pt"), key=lambda path: (len(path.name), path.name))


def load_checkpoint(path: str, output_dir: str) -> dict:
    """The newest whole checkpoint of a run: its folder, a file in it, or "latest" of output_dir. Raises UsageError."""
    folder = Path(path).parent if path.endswith(".pt") else Path(path)
    if path == "latest":
        newest = max(Path(output_dir).glob("*/trainer_*.pt"), key=os.path.getmtime, default=None)
        folder = newest.parent if newest else Path(output_dir)
    for file in reversed(checkpoints(folder, "trainer")):
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
            return state | {"folder": str(folder), "config": dict(state["config"])}
        except Exception as error:
            warn(f"{file}: damaged ({type(error).__name__}), so the checkpoint before it is taken")
    raise UsageError(
        f"--resume {path}: no whole trainer_*.pt in {folder}; --load-weights takes a model_*.pt"
    )


def load_state(
    agent: Agent, optimizers: list[torch.optim.Optimizer], args: Args, resumed: dict | None
):
    """A checkpoint's weights and optimizers' states, or the weights of --load-weights. Raises UsageError."""
    source = "--resume" if resumed else f"--load-weights {args.load_weights}"
    with blame(
        f"{source}: does the network fit (--env-id, --hidden-size, the script), and --optimizer?"
    ):
        if resumed:
            agent.load_state_dict(resumed["model"])
            for optimizer, state in zip(optimizers, resumed["optimizers"], strict=True):
                optimizer.load_state_dict(
                    optimizer.state_dict() | {"state": state}
                )  # rates and momenta: flags win
        elif args.load_weights:
            weights = torch.load(args.load_weights, map_location="cpu", weights_only=True)
            agent.load_state_dict(
                {name.removeprefix("module."): weight for name, weight in weights.items()}
            )


class Run(contextlib.AbstractContextManager):
    """A run's folder: config.yaml, the script, metrics.jsonl, TensorBoard events, checkpoints; and the terminal."""

    def __init__(
        self, args: Args, agent: Agent, optimizers: list, envs: Envs, resumed: dict | None
    ):
        self.args, self.agent, self.optimizers, self.envs = args, agent, optimizers, envs
        before = resumed or dict.fromkeys(("iteration", "step", "seconds", "startup"), 0)
        self.iteration, self.step, self.startup = (
            before["iteration"],
            before["step"],
            before["startup"],
        )
        self.began = self.last_lap = time.perf_counter()
        self.zero, self.last_step = self.began - before["seconds"], self.step
        self.phases, self.shown, self.failed = defaultdict(float), {}, set()
        self.started, self.signum, self.exit_reason = False, 0, "completed"
        self.env_name = args.env_id.replace("/", "-").replace(":", "-")
        name = f"{self.env_name}__{args.exp_name}__{args.seed}__{int(time.time())}"
        self.folder = Path(resumed["folder"]) if resumed else Path(args.output_dir, name)
        with blame(f"--output-dir {args.output_dir}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(
                self.folder / "config.yaml", yaml.safe_dump(vars(args), sort_keys=False)
            )
            write_atomically(self.folder / Path(__file__).name, Path(__file__).read_text())
            self.jsonl = (self.folder / "metrics.jsonl").open("a")
            # Back to where the checkpoint was written: the lines after it would come twice.
            self.jsonl.truncate(resumed["metrics_size"] if resumed else 0)
        if args.track:
            with self.tolerate("W&B"):
                os.environ.setdefault(
                    "WANDB_INIT_TIMEOUT", "20"
                )  # seconds that an unreachable server costs
                os.environ.setdefault("WANDB_PROJECT", "ppo-lstm-puffer")
                import wandb

                wandb.init(
                    name=self.folder.name, config=vars(args), dir=self.folder, sync_tensorboard=True
                )
        threading.excepthook = lambda failed: warn(
            f"TensorBoard failed, training goes on: {failed.exc_value}"
        )
        self.writer = torch.utils.tensorboard.SummaryWriter(self.folder, purge_step=self.step + 1)
        self.traced = range(self.iteration + 5, self.iteration + 8) if args.profile else range(0)
        print(
            f"on: {machine(args)}\nrun: {self.folder}\ncompiling: about half a minute",
            file=sys.stderr,
        )
        text = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True))
        columns = text, BarColumn(20), TimeRemainingColumn()
        self.live = Progress(
            *columns, expand=True, console=Console(stderr=True), disable=not sys.stderr.isatty()
        )

    @property
    def seconds(self) -> float:
        """Since the start, those before a resume included; `startup` are those of them before a first update."""
        return time.perf_counter() - self.zero

    @property
    def stopping(self) -> bool:
        limit = self.args.time_limit
        return bool(self.signum) or (
            limit is not None and self.started and self.seconds - self.startup >= limit
        )

    def note_signal(self, signum, _):
        """SIGINT and SIGTERM: the loop finishes its step and saves. A second SIGINT interrupts at once."""
        if self.signum == signal.SIGINT == signum:
            raise KeyboardInterrupt
        self.signum = signal.Signals(signum)
        os.write(
            2, b"stopping: finishing this step, writing a checkpoint\n"
        )  # print is not for signal handlers

    @contextlib.contextmanager
    def tolerate(self, what: str):
        """A full disk or an unreachable service does not stop training: warns once, goes on."""
        try:
            yield
        except Exception as error:
            if what not in self.failed:
                warn(f"{what} failed, training goes on: {type(error).__name__}: {error}")
            self.failed.add(what)

    def lap(self, phase: str):
        """The seconds since the last lap were this phase's."""
        before, self.last_lap = self.last_lap, time.perf_counter()
        self.phases[phase] += self.last_lap - before

    def updated(self, iteration: int, step: int):
        """After each update. At the first one all is compiled, and from then on there is something to save."""
        self.iteration, self.step = iteration, step
        if not self.started:
            self.started, self.startup = True, self.startup + time.perf_counter() - self.began
            (
                signal.signal(signal.SIGINT, self.note_signal),
                signal.signal(signal.SIGTERM, self.note_signal),
            )
            self.task = self.live.add_task("", total=self.args.total_timesteps)
            self.live.start()
        trace = torch_xla.debug.profiler
        if self.traced and iteration in (self.traced.start, self.traced.stop):
            trace.stop_trace() if iteration == self.traced.stop else trace.start_trace(
                str(self.folder)
            )

    def write(self, row: dict) -> dict:
        row = {
            "step": self.step,
            "iteration": self.iteration,
            "time": self.seconds,
            "startup": self.startup,
        } | row
        with self.tolerate("metrics.jsonl"):
            print(json.dumps(row), file=self.jsonl, flush=True)
        return row

    def log(self, losses: dict[str, float], learning_rate: float):
        """A line of metrics.jsonl, TensorBoard's scalars, and a line or the living one on the terminal."""
        seconds = sum(self.phases.values())
        row = {"sps": (self.step - self.last_step) / seconds, "learning_rate": learning_rate}
        if self.envs.episodes:
            _, returns, lengths = zip(*self.envs.episodes)
            row |= {
                "episodes": len(returns),
                "episodic_return": np.mean(returns),
                "episodic_length": np.mean(lengths),
            }
            row |= {"episodic_return_min": min(returns), "episodic_return_max": max(returns)}
        row |= {f"env/{key}": mean for key, mean in self.envs.means().items()}
        row |= {f"losses/{name}": value for name, value in losses.items()}
        row |= {f"time/{name}": value for name, value in self.phases.items()}
        row |= {f"time/{name}_share": value / seconds for name, value in self.phases.items()}
        row["xla/compiled"] = torch_xla.debug.metrics.metric_data("CompileTime")[
            0
        ]  # so many graphs until now
        self.last_step = self.step
        self.envs.episodes.clear(), self.envs.logs.clear(), self.phases.clear()
        row = self.write(
            {name: value for name, value in row.items() if np.isfinite(value)}
        )  # JSON has no NaN
        with self.tolerate("TensorBoard"):
            for name, value in row.items():
                name = name if "/" in name else f"charts/{'SPS' if name == 'sps' else name}"
                self.writer.add_scalar(name, value, self.step)
        names = "step time sps env/score episodic_return episodic_length losses/approx_kl losses/entropy"
        self.shown |= row  # some have no new value in every interval
        shown = (
            (name.rpartition("/")[2], self.shown[name])
            for name in names.split()
            if name in self.shown
        )
        line = " ".join(
            f"{name}={value:{'.0f' if value >= 1000 else '.4g'}}" for name, value in shown
        )
        self.live.update(self.task, completed=self.step, description=line)
        if self.live.disable:
            print(line, flush=True)

    def save_checkpoint(self):
        """model_*.pt is the weights alone; trainer_*.pt all that --resume needs."""
        model = {
            name: value.detach().cpu().clone() for name, value in self.agent.state_dict().items()
        }
        state = {
            "iteration": self.iteration,
            "step": self.step,
            "seconds": self.seconds,
            "startup": self.startup,
        }
        state |= {
            "optimizers": [optimizer.state_dict()["state"] for optimizer in self.optimizers],
            "model": model,
        }
        state |= {"config": vars(self.args), "metrics_size": os.path.getsize(self.jsonl.name)}
        with self.tolerate("checkpoint"):
            for kind, content in (f"model_{self.env_name}", model), ("trainer", state):
                write_atomically(self.folder / f"{kind}_{self.iteration:06d}.pt", content)
                for old in checkpoints(self.folder, kind)[: -self.args.keep_checkpoints]:
                    old.unlink()

    def __exit__(self, kind, error, traceback):
        """The last line of metrics.jsonl, whatever the end is."""
        if error is not None:
            name = {FloatingPointError: "diverged", SystemExit: "worker died"}.get(
                kind, kind.__name__
            )
            self.exit_reason = f"{name}: {error}"
        rss, vram = (
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            torch.cuda.max_memory_allocated(),
        )  # KiB, bytes
        self.write(
            {
                "exit_reason": self.exit_reason,
                "peak_rss_mb": rss / 1024,
                "peak_vram_mb": vram / 2**20,
            }
        )
        self.live.stop()
        with self.tolerate("TensorBoard"):
            self.writer.close()
        if self.args.track and "W&B" not in self.failed:
            sys.modules["wandb"].finish()
        print(
            f"{self.exit_reason}: {self.step} steps in {self.seconds:.1f} s; {self.folder}",
            file=sys.stderr,
        )


def machine(args: Args) -> str:
    """What this runs on and in which precision, and why."""
    fast = fast_bfloat16(args.device)
    why = "as told" if fast and args.precision == "float32" else fast or "no fast bfloat16 here"
    where = f"{xr.global_runtime_device_count()} x {args.device}, {xr.process_count()} hosts"
    return f"{where}, {args.precision} ({why})"


# PLUMBING: the command line -------------------------------------------------------------------------------------------


def check_args(args: Args):
    """Resolves what is "auto", and raises UsageError for what cannot be right."""
    checked(vars(args))
    minibatch, most = args.minibatch_size, args.max_minibatch_size
    if minibatch % args.num_steps:
        raise UsageError(
            f"--minibatch-size {minibatch}: must be a multiple of --num-steps {args.num_steps}"
        )
    if minibatch > most and (minibatch % most or most % args.num_steps):
        raise UsageError(
            f"--max-minibatch-size {most}: must divide --minibatch-size, and be a multiple of --num-steps"
        )
    if args.device == "auto":
        args.device = "tpu"
    if args.device == "tpu" and not torch_xla._internal.tpu.num_available_chips():
        raise UsageError("--device tpu: there is none here; use --device cpu")
    if args.precision == "auto":
        args.precision = "bfloat16" if fast_bfloat16(args.device) else "float32"
    elif args.precision == "bfloat16" and not fast_bfloat16(args.device):
        products = (
            torch.ones(256, 256, dtype=dtype, device=args.device)
            for dtype in (torch.bfloat16, torch.float32)
        )
        slow, fast = (
            torch.utils.benchmark.Timer("x @ x", globals={"x": x}).timeit(3).mean for x in products
        )
        warn(
            f"--precision bfloat16: products take {slow / fast:.0f} times as long as in float32 on this hardware"
        )


def checked(values: dict[str, Any]) -> Args:
    """Arguments by their names, of the types and within the bounds that Args says. Raises UsageError."""
    for key in values.keys() - Args.__annotations__:
        near = difflib.get_close_matches(key, Args.__annotations__, cutoff=0)
        raise UsageError(f"--{key}: there is no such argument; near it: {', '.join(near)}")
    try:
        return TypeAdapter(Args).validate_python(values)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise UsageError(
            f"--{wrong['loc'][0].replace('_', '-')} {wrong['input']}: {wrong['msg']}"
        ) from error


def parse_value(text: Any) -> Any:
    """A YAML value; 1e-3 is a number too, which YAML 1.1 writes 1.0e-3."""
    value = yaml.safe_load(text) if isinstance(text, str) else text
    with contextlib.suppress(ValueError):
        value = float(value) if isinstance(value, str) else value
    return value


def parse_args(argv: list[str]) -> tuple[Args, dict | None]:
    """Defaults, then --config or the run of --resume, then the command line. Raises UsageError."""
    given, others = tyro.cli(Args, args=argv, add_help=False, return_unknown_args=True)
    default, resumed = Args(), None
    if given.config and given.resume:
        raise UsageError(
            "--resume: cannot be combined with --config; the run's own configuration is used"
        )
    if given.config:
        with blame(f"--config {given.config}"):
            config = yaml.safe_load(Path(given.config).read_text())
            default = checked({key.replace("-", "_"): value for key, value in config.items()})
    elif given.resume:
        resumed = load_checkpoint(given.resume, given.output_dir)
        config = resumed["config"] | {"device": "auto"}
        for key in config.keys() - Args.__annotations__:
            warn(f"--resume {given.resume}: unknown here, so ignored: {key}={config.pop(key)}")
        default = checked(config)
    for word in others:  # so that tyro knows them
        if word.startswith("--env."):
            default.env[word[6:].partition("=")[0].replace("-", "_")] = ""
    args = tyro.cli(Args, args=argv, default=default, description=__doc__)
    args.env = {key: parse_value(value) for key, value in args.env.items()}
    check_args(args)
    return args, resumed


def main() -> int:
    try:
        return train(*parse_args(sys.argv[1:]))
    except (UsageError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
