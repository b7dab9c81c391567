"""PPO with an LSTM on PufferLib's C environments, on TPUs: `ppo_lstm_puffer.py` through torch_xla.

    python ppo_lstm_puffer_xla.py --env-id breakout                  # all TPU chips of this host; on a pod slice, run it on every host
    python ppo_lstm_puffer_xla.py --env-id breakout --device cpu     # XLA's CPU device; CPU_NUM_DEVICES=4 makes four of it
    python ppo_lstm_puffer_xla.py --resume latest                    # go on after a crash, a kill or Ctrl-C
    python ppo_lstm_puffer_xla.py --evaluate runs/<run>              # play episodes; JSON on stdout
    python ppo_lstm_puffer_xla.py --output-dir gs://bucket/runs      # any fsspec URL

The hosts step the environments; the devices share the agents (SPMD): the observations of N agents lie N / devices on each, the
parameters on all, and XLA adds what must be exchanged. In the first two iterations four graphs are compiled, and a few small
ones: a step of the policy, the segments put together, the draw of a minibatch by its advantages, and an update, in which the LSTM
over time is a scan. Nothing is compiled after that: shapes never change, and what changes is a tensor. --resume and --evaluate
take the reference script's runs, and the other way round. `diff ppo_lstm_puffer.py ppo_lstm_puffer_xla.py` shows all that is different.
"""

import atexit
import contextlib
import ctypes
import difflib
import functools
import importlib.metadata
import importlib.util
import inspect
import io
import json
import os
import platform
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import defaultdict
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the first update is done Ctrl-C just ends it, and XLA's compiler with it

import fsspec
import gymnasium as gym
import numpy as np
import numpy.lib.recfunctions
import psutil
import pufferlib
import pufferlib.emulation
import pufferlib.vector
import torch
import torch.distributed as dist
import torch.nn as nn
import tyro
import yaml
from torch.utils._pytree import tree_map_only

try:
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as xla_metrics
    import torch_xla.debug.profiler as xla_profiler
    import torch_xla.distributed.spmd as spmd
    import torch_xla.runtime as xr
    from torch_xla._internal import tpu
    from torch_xla.distributed.spmd.xla_sharding import wrap_as_sharded_tensor
    from torch_xla.experimental.scan import scan
except ImportError as error:
    print(
        f"error: torch_xla does not load ({error}); `make train-xla` installs it beside the torch it needs, "
        "or: pip install torch==2.9.0 'torch_xla[tpu]==2.9.0'",
        file=sys.stderr,
    )
    sys.exit(2)


@dataclass
class Args:
    """PPO + LSTM on PufferLib, Gymnasium and PettingZoo environments."""

    exp_name: str = "ppo_lstm_puffer_xla"
    """the name of this experiment"""
    seed: int = 1
    """seed of everything: Python, numpy, torch, the C environments, and the workers"""
    device: Literal["tpu", "cpu"] = "tpu"
    """where to train: tpu, or XLA's CPU device to try things out; where there is no TPU nothing else is taken unasked"""
    track: bool = False
    """send metrics to Weights and Biases too"""
    wandb_project_name: str = "ppo-lstm-puffer"
    """the W&B project"""
    wandb_entity: str | None = None
    """the W&B entity (team)"""

    # Environment
    env_id: str = "breakout"
    """a PufferLib Ocean name (breakout, pong, ...), a Gymnasium id (CartPole-v1, module:Name-v0), or a module with parallel_env (PettingZoo)"""
    env: dict[str, Any] = field(default_factory=dict)
    """arguments of the environment itself, each as --env.KEY VALUE"""
    num_envs: int = 512
    """environments stepped in parallel (an environment may hold several agents)"""
    vec_backend: Literal["auto", "native", "serial", "multiprocessing"] = "auto"
    """native: the C environment vectorizes itself; serial: copies in this process; multiprocessing: in workers, double-buffered; auto: native where possible, else serial"""
    num_workers: int = 2
    """worker processes for --vec-backend multiprocessing; an even number is double-buffered"""
    clip_rewards: bool = True
    """clip rewards to [-1, 1] for learning (reported returns are never clipped)"""

    # Algorithm
    total_timesteps: int = 20_000_000
    """environment steps over all agents; the learning rate is annealed over them"""
    learning_rate: float | None = None
    """learning rate of --optimizer: Muon's, for the matrices (with --optimizer adam, 0.01 is a start); default: 0.015 in bfloat16, 0.025 in float32"""
    adam_learning_rate: float = 1e-3
    """with Muon: learning rate of Adam, which trains whatever is not a matrix"""
    optimizer: Literal["muon", "adam"] = "muon"
    """Muon for matrices with Adam for the rest, or Adam for all"""
    momentum: float = 0.85
    """Muon's momentum, Adam's beta1 where Adam trains all"""
    anneal_lr: Literal["linear", "cosine", "none"] = "linear"
    """schedule of the learning rate, down to zero at --total-timesteps"""
    num_steps: int = 32
    """segment length T: steps per agent between two updates, and the span of backpropagation through time"""
    gamma: float = 0.98
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of the advantage estimate"""
    minibatch_size: int = 1024
    """steps per gradient update: minibatch_size / num_steps whole segments"""
    max_minibatch_size: int = 32768
    """above this many steps a minibatch is split, and gradients are accumulated"""
    update_epochs: float = 1.0
    """gradient updates per segment batch, in passes over it (0.5: half as many minibatches)"""
    norm_adv: bool = True
    """normalize advantages over each minibatch"""
    clip_coef: float = 0.3
    """PPO's clip range of the ratio"""
    clip_vloss: bool = True
    """clip the value loss"""
    vf_clip_coef: float = 0.2
    """clip range of the value"""
    vf_coef: float = 3.5
    """weight of the value loss"""
    ent_coef: float = 0.0001
    """weight of the entropy bonus"""
    max_grad_norm: float = 1.5
    """clip the gradient's global norm to this"""
    target_kl: float | None = None
    """stop the update early when approx_kl passes this (reads one number per minibatch: slower)"""
    vtrace_rho_clip: float = 1.0
    """V-trace's clip of the ratio in the temporal difference"""
    vtrace_c_clip: float = 1.0
    """V-trace's clip of the ratio in the trace"""
    prio_alpha: float = 0.9
    """exponent of the segment priorities; 0 samples uniformly"""
    prio_beta0: float = 0.2
    """first exponent of the importance weights, annealed to 1"""

    # Network and speed
    hidden_size: int = 128
    """width of the encoder and of the LSTM"""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """of the matrix products, Muon's too; auto is bfloat16 on a TPU, float32 on XLA's CPU device. Parameters, LSTM cell state, heads and losses stay float32 (a TPU's own float32 products use bfloat16 too)"""

    # Run
    time_limit: float | None = None
    """stop after this many seconds of training, those before a resume included; compiling does not count"""
    log_interval: int = 10
    """iterations between two log lines"""
    checkpoint_interval: int = 100
    """iterations between two checkpoints"""
    keep_checkpoints: int = 3
    """how many of the last models to keep"""
    output_dir: str = "runs"
    """where runs are written: a folder, or any fsspec URL"""
    config: str | None = None
    """a YAML file of arguments, such as a run's config.yaml; flags on the command line win"""
    resume: str | None = None
    """go on with a run: its folder, its trainer_state.pt, or latest"""
    load_weights: str | None = None
    """start from these weights: a .pt of ours or of PufferLib's, or PufferLib's flat .bin"""
    evaluate: str | None = None
    """do not train; play with this run folder, .pt or .bin, and print the scores as JSON"""
    eval_episodes: int = 100
    """episodes to play with --evaluate"""
    deterministic: bool = False
    """with --evaluate: take the most likely action instead of sampling"""
    render: bool = False
    """with --evaluate: show one environment in a window"""
    dashboard: bool = True
    """live dashboard on a terminal; without one, a plain line per log interval"""
    profile: bool = False
    """write a trace of a few iterations, devices included, to the run's folder (for TensorBoard with xprof)"""


# ALGO LOGIC: the network --------------------------------------------------------------------------------------------------


def layer_init(layer: nn.Module, std: float = 2**0.5) -> nn.Module:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """PufferLib's default network: encoder, LSTM of the same width, linear policy and value heads.

    The action space decides the policy head: Discrete(n) is one categorical, MultiDiscrete(nvec) several, Box a Gaussian
    with a learned, state-independent log standard deviation.
    """

    def __init__(self, observation_space: gym.Space, action_space: gym.Space, hidden_size: int = 128, precision: str = "float32"):
        super().__init__()
        shape = observation_space.shape
        self.dtype = getattr(torch, precision)
        self.continuous = isinstance(action_space, gym.spaces.Box)
        if self.continuous:
            num_logits = int(np.prod(action_space.shape))
            self.actor_logstd = nn.Parameter(torch.zeros(1, num_logits))
        else:
            nvec = [action_space.n] if isinstance(action_space, gym.spaces.Discrete) else action_space.nvec.flatten().tolist()
            num_logits = int(sum(nvec))
            # Which logit is the k-th choice of the i-th action; rows shorter than the longest are padded and masked.
            offsets = np.cumsum([0, *nvec[:-1]])
            choices = np.arange(max(nvec))[None]
            index = np.where(choices < np.array(nvec)[:, None], offsets[:, None] + choices, -1)
            self.register_buffer("logit_index", torch.as_tensor(index), persistent=False)
        self.image = observation_space.dtype == np.uint8 and len(shape) in (2, 3) and sorted(shape)[-2] >= 36
        if self.image:  # the convolutional encoder of Mnih et al. 2015
            image = torch.zeros(1, *shape)
            self.channels_last = len(shape) == 3 and shape[2] <= 4
            conv = nn.Sequential(
                layer_init(nn.Conv2d(self.as_image(image).shape[1], 32, 8, stride=4)), nn.ReLU(),
                layer_init(nn.Conv2d(32, 64, 4, stride=2)), nn.ReLU(),
                layer_init(nn.Conv2d(64, 64, 3, stride=1)), nn.ReLU(), nn.Flatten(),
            )  # fmt: skip
            features = conv(self.as_image(image)).shape[1]
            self.encoder = nn.Sequential(conv, layer_init(nn.Linear(features, hidden_size)), nn.GELU())
        else:
            self.encoder = nn.Sequential(layer_init(nn.Linear(int(np.prod(shape)), hidden_size)), nn.GELU())
        self.actor = layer_init(nn.Linear(hidden_size, num_logits), std=0.01)
        self.critic = layer_init(nn.Linear(hidden_size, 1), std=1.0)
        # The parameters of nn.LSTM; lstm_forward() below does the computing. torch.compile refuses the module itself.
        self.lstm = nn.ParameterDict(list(nn.LSTM(hidden_size, hidden_size).named_parameters()))
        for name, parameter in self.lstm.named_parameters():
            nn.init.orthogonal_(parameter, 1.0) if "weight" in name else nn.init.zeros_(parameter)

    def as_image(self, observations: torch.Tensor) -> torch.Tensor:
        """(..., H, W[, C]) or (..., C, H, W) to (batch, C, H, W) in [0, 1]."""
        x = observations.float() / 255
        return x.permute(0, 3, 1, 2) if self.channels_last else x if x.ndim == 4 else x.unsqueeze(1)

    def encode(self, observations: torch.Tensor) -> torch.Tensor:
        """Observations (T, N, *obs) of any dtype to features (T, N, hidden) in the compute dtype."""
        T, N = observations.shape[:2]
        x = observations.flatten(0, 1)
        x = (self.as_image(x) if self.image else x.flatten(1)).to(self.dtype)
        # Cast by hand: a function with torch.autocast inside is compiled anew in every process, since nothing caches it.
        for layer in self.encoder.modules():
            if isinstance(layer, nn.Linear):
                x = nn.functional.linear(x, layer.weight.to(self.dtype), layer.bias.to(self.dtype))
            elif isinstance(layer, nn.Conv2d):
                x = nn.functional.conv2d(x, layer.weight.to(self.dtype), layer.bias.to(self.dtype), layer.stride)
            elif not isinstance(layer, nn.Sequential):
                x = layer(x)
        return x.view(T, N, -1)

    def lstm_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[W_ih | W_hh] (4H, 2H) in the compute dtype, b_ih + b_hh (4H) float32: one product per step instead of two."""
        weight = torch.cat((self.lstm.weight_ih_l0, self.lstm.weight_hh_l0), dim=1).to(self.dtype)
        return weight, self.lstm.bias_ih_l0 + self.lstm.bias_hh_l0

    def heads(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """LSTM outputs (..., H) to logits or Gaussian means (..., num_logits) and values (...), float32."""
        hidden = hidden.float()
        return self.actor(hidden), self.critic(hidden).squeeze(-1)

    def log_probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits (..., num_logits) to log-probabilities (..., actions, choices), padded with a very small number."""
        logits = logits[..., self.logit_index].masked_fill(self.logit_index < 0, -1e9)
        return logits.log_softmax(-1)

    def sample(self, logits: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions (..., actions) and their log-probabilities (...). Noise: see `sampling_noise`."""
        if self.continuous:
            actions = logits + self.actor_logstd.exp() * noise
        else:  # the Gumbel-max trick: argmax(log p + Gumbel) is a sample of p
            actions = (self.log_probs(logits) - noise.clamp_min(1e-20).log()).argmax(-1)
        return actions, self.evaluate_actions(logits, actions)[0]

    def evaluate_actions(self, logits: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability (...) of the joint action (..., actions), and the policy's entropy (...)."""
        if self.continuous:
            normal = torch.distributions.Normal(logits, self.actor_logstd.exp().expand_as(logits), validate_args=False)
            return normal.log_prob(actions).sum(-1), normal.entropy().sum(-1)
        log_probs = self.log_probs(logits)
        entropy = -(log_probs.exp() * log_probs).sum((-1, -2))
        return log_probs.gather(-1, actions.unsqueeze(-1)).sum((-1, -2)), entropy

    def sampling_noise(self, *shape: int, device: torch.device | None = None, deterministic: bool = False) -> torch.Tensor:
        """Noise for `sample`: standard normal for a Gaussian, Exponential(1) for a categorical; constant if deterministic."""
        size = (*shape, self.actor.out_features) if self.continuous else (*shape, *self.logit_index.shape)
        if deterministic:
            return torch.zeros(size, device=device) if self.continuous else torch.ones(size, device=device)
        noise = torch.empty(size, device=device)
        return noise.normal_() if self.continuous else noise.exponential_()


# ALGO LOGIC: the recurrence, with resets ----------------------------------------------------------------------------------


def lstm_step(carry, inputs):
    """One step of the LSTM, its state set to zero where keep is 0.

    carry: h, c (N, H) float32, and W_hh (4H, H) in the compute dtype; inputs: the input's part of the gates with the bias
    (N, 4H) float32, and keep (N, 1), 1 - dones.
    Returns the carry; and the output, the activations of the gates i, f, g, o (N, 4H), and the cell state before the step.
    """
    h, c, weight = carry
    gates, keep = inputs
    gates = gates + torch.mm((h * keep).to(weight.dtype), weight.t()).float()
    i, f, g, o = gates.chunk(4, dim=1)
    i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
    new_c = f * (c * keep) + i * g
    new_h = o * torch.tanh(new_c)
    return (new_h, new_c, weight), (new_h.to(weight.dtype), torch.cat((i, f, g, o), dim=1).to(weight.dtype), c)


def lstm_step_backward(carry, inputs):
    """The chain rule through `lstm_step`.

    carry: the gradients of h and c after the step (N, H) float32, and W_hh; inputs: the output's gradient (N, H), the gates'
    activations, the cell states before and after the step, and keep. Returns the carry, and the gradient of the gates (N, 4H).
    """
    dh, dc, weight = carry
    doutput, gates, c, new_c, keep = inputs
    i, f, g, o = gates.float().chunk(4, dim=1)
    tanh_c = torch.tanh(new_c)
    dh = dh + doutput.float()
    dc = dc + dh * o * (1 - tanh_c * tanh_c)
    di, df, dg, do = dc * g * i * (1 - i), dc * (c * keep) * f * (1 - f), dc * i * (1 - g * g), dh * tanh_c * o * (1 - o)
    dgates = torch.cat((di, df, dg, do), dim=1).to(gates.dtype)
    return (torch.mm(dgates, weight).float() * keep, dc * f * keep, weight), dgates


def lstm_forward(x, h, c, dones, weight, bias):
    """The LSTM over T steps, its state set to zero wherever dones is 1. A scan: one step is compiled, however many there are.

    x (T, N, F); h, c (N, H) float32: the state before the first step; dones (T, N); weight (4H, F + H); bias (4H).
    Returns the outputs (T, N, H), the state after the last step, and per step what the backward pass needs: the gates'
    activations i, f, g, o (T, N, 4H) and the cell states before it (T, N, H).
    """
    H = h.shape[1]
    gates = nn.functional.linear(x, weight[:, :-H]).float() + bias  # the input's part of all steps is one product
    carry, steps = (h, c, weight[:, -H:]), (gates, (1 - dones).unsqueeze(-1))
    if len(x) == 1:  # a step of the policy
        (h, c, _), saved = lstm_step(carry, [step[0] for step in steps])
        outputs, *saved = (step.unsqueeze(0) for step in saved)
    else:
        (h, c, _), (outputs, *saved) = scan(lstm_step, carry, steps, is_fn_pure=True)
    return outputs, h, c, saved


class LSTM(torch.autograd.Function):
    """`lstm_forward` with its gradient for x, weight and bias; the initial state gets none (truncated backpropagation).

    The input's and the weights' gradients are one product over all steps each; only W_hh is left inside the loop.
    """

    @staticmethod
    def forward(ctx, x, h, c, dones, weight, bias):
        outputs, _, last_c, (gates, cells) = lstm_forward(x, h, c, dones, weight, bias)
        ctx.save_for_backward(x, h, dones, weight, outputs, gates, cells, last_c)
        return outputs

    @staticmethod
    def backward(ctx, doutputs):
        x, h, dones, weight, outputs, gates, cells, last_c = ctx.saved_tensors
        keep, H = (1 - dones).unsqueeze(-1), h.shape[1]
        steps = doutputs, gates, cells, torch.cat((cells[1:], last_c[None])), keep
        carry = torch.zeros_like(h), torch.zeros_like(h), weight[:, -H:]
        _, dgates = scan(lstm_step_backward, carry, tuple(step.flip(0) for step in steps), is_fn_pure=True)
        dgates = dgates.flip(0).flatten(0, 1)
        before = torch.cat((h[None].to(x.dtype), outputs[:-1])) * keep.to(x.dtype)
        inputs = torch.cat((x, before), dim=2).flatten(0, 1)
        dx = torch.mm(dgates, weight[:, :-H]).view_as(x)
        return dx, None, None, None, torch.mm(dgates.t(), inputs), dgates.float().sum(0)


# ALGO LOGIC: advantages, priorities, loss ---------------------------------------------------------------------------------


def compute_advantages(values, next_value, rewards, dones, valid, ratio, gamma, gae_lambda, rho_clip, c_clip):
    """V-trace's temporal differences (Espeholt et al. 2018) summed as in GAE (Schulman et al. 2016). All float32.

    values, rewards, valid, ratio (T, N); next_value (N): v_T, the value of the observation after the segment; dones (T + 1, N):
    dones[t] = 1 if the episode ended just before o_t. Where valid is 0 (an action that the environment ignored) the advantage
    is 0 and the sum starts anew, so a truncated episode bootstraps from the value of its last observation.
    With ratio 1 this is GAE; with lambda 1, A + v are V-trace's targets. Returns advantages (T, N).
    """
    next_values = torch.cat((values[1:], next_value.unsqueeze(0)))
    discount = gamma * (1 - dones[1:])
    delta = ratio.clamp(max=rho_clip) * (rewards + discount * next_values - values) * valid
    trace = gae_lambda * discount * ratio.clamp(max=c_clip) * valid
    _, advantages = scan(advantage_step, torch.zeros_like(next_value), (delta.flip(0), trace.flip(0)), is_fn_pure=True)
    return advantages.flip(0)


def advantage_step(advantage, inputs):
    """One step, backwards in time, of the sum in `compute_advantages`."""
    delta, trace = inputs
    advantage = delta + trace * advantage
    return advantage, advantage


def sample_segments(advantages, uniform, alpha, beta):
    """Prioritized segments (Schaul et al. 2016, proportional variant): p_i = (sum_t |A_ti|)^alpha / sum of the same.

    Draws B indices by stratified sampling (their appendix B.2.1: one draw from each of B equal slices of the total
    probability), so with alpha = 0 no segment comes twice in a minibatch (but for rounding, with very many). uniform (B): random numbers in [0, 1).
    Returns the indices (B) int64 and the importance weights (N p_i)^-beta (B) float32.
    """
    priorities = advantages.abs().sum(0) ** alpha
    priorities = priorities + 1e-6 * priorities.mean() + 1e-12  # all advantages zero: uniform
    probabilities = priorities / priorities.sum()
    points = (torch.arange(len(uniform), device=uniform.device) + uniform) / len(uniform)
    # The first segment at which the cumulated probability reaches the point; XLA has no searchsorted.
    index = (probabilities.cumsum(0) < points.unsqueeze(1)).sum(1).clamp(max=len(probabilities) - 1)
    return index, (len(probabilities) * probabilities[index]) ** -beta


def normalize_advantages(advantages, weight):
    """Zero mean and unit variance under weight (same shape, sums to 1)."""
    mean = (weight * advantages).sum()
    variance = (weight * (advantages - mean) ** 2).sum()
    return (advantages - mean) / (variance.sqrt() + 1e-8)


def draw_minibatch(values, rewards, dones, valid, ratio, uniform, beta, args):
    """Advantages from the newest values and ratios, and a minibatch of segments drawn by them.

    values, dones, valid (T + 1, N), rewards, ratio (T, N): see `compute_advantages`; uniform (B), beta: see `sample_segments`.
    Returns the segments' indices (B); of these segments, (T, B) each, what `ppo_loss` needs: advantages (normalized, times
    the importance weight), returns, values, weight; and the advantages of all segments (T, N).
    """
    values, next_value, valid = values[:-1], values[-1], valid[:-1]
    all_advantages = compute_advantages(
        values, next_value, rewards, dones, valid, ratio, args.gamma, args.gae_lambda, args.vtrace_rho_clip, args.vtrace_c_clip
    )
    segments, importance = sample_segments(all_advantages, uniform, args.prio_alpha, beta)
    advantages, values, weight = all_advantages[:, segments], values[:, segments], valid[:, segments]
    returns = advantages + values
    weight = weight / weight.sum().clamp_min(1)
    if args.norm_adv:
        advantages = normalize_advantages(advantages, weight)
    return segments, advantages * importance, returns, values, weight, all_advantages


def ppo_loss(agent, hidden, actions, old_logprobs, advantages, returns, old_values, weight, args):
    """PPO's clipped surrogate (Schulman et al. 2017), clipped value loss and entropy bonus, as sums weighted by `weight`.

    hidden (T, B, H): LSTM outputs; actions (T, B, actions); the rest (T, B) float32; weight is 1 / number of steps in the
    whole minibatch on each step that counts, 0 elsewhere. Returns the loss, the detached log-ratio and values (T, B), and
    statistics (7): policy_loss, value_loss, entropy, old_approx_kl, approx_kl, clipfrac, importance.
    """
    logits, values = agent.heads(hidden)
    logprobs, entropy = agent.evaluate_actions(logits, actions)
    logratio = logprobs - old_logprobs
    ratio = logratio.exp()
    surrogate = torch.min(ratio * advantages, ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef) * advantages)
    policy_loss = -(weight * surrogate).sum()
    value_error = (values - returns) ** 2
    if args.clip_vloss:
        clipped = old_values + (values - old_values).clamp(-args.vf_clip_coef, args.vf_clip_coef)
        value_error = torch.max(value_error, (clipped - returns) ** 2)
    value_loss = 0.5 * (weight * value_error).sum()
    entropy = (weight * entropy).sum()
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
    with torch.no_grad():
        old_approx_kl = -(weight * logratio).sum()
        approx_kl = (weight * (ratio - 1 - logratio)).sum()
        clipfrac = (weight * ((ratio - 1).abs() > args.clip_coef)).sum()
        statistics = torch.stack((policy_loss, value_loss, entropy, old_approx_kl, approx_kl, clipfrac, (weight * ratio).sum()))
    return loss, logratio.detach(), values.detach(), statistics


LOSSES = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "importance", "grad_norm")


def policy_step(agent, observations, dones, h, c, weight, bias, noise):
    """Act on observations (N, *obs), resetting the LSTM where dones (N) is 1. Returns actions, log-probabilities, values, h, c."""
    hidden, h, c, _ = lstm_forward(agent.encode(observations[None]), h, c, dones[None], weight, bias)
    logits, values = agent.heads(hidden[0])
    actions, logprobs = agent.sample(logits, noise)
    return actions, logprobs, values, h, c


def minibatch_loss(agent, observations, h, c, dones, actions, logprobs, segments, advantages, returns, values, weight, args):
    """`ppo_loss` of these segments (B) of the batch: observations (T, N, *obs), h and c (N, H) before them, dones, actions, logprobs."""
    features = agent.encode(share(observations[:, segments], dim=1))
    hidden = LSTM.apply(features, h[segments], c[segments], dones[:, segments], *agent.lstm_weights())
    # Values are clipped around the newest ones, as PuffeRL does.
    return ppo_loss(agent, hidden, actions[:, segments], logprobs[:, segments], advantages, returns, values, weight, args)


def newton_schulz(updates: torch.Tensor, dtype: torch.dtype, steps: int = 5) -> torch.Tensor:
    """Replaces the singular values of matrices (batch, rows, columns) by ones, roughly: the quintic iteration of Muon
    (Jordan et al. 2024), x <- (a + b G + c G^2) x with G = x x'. Returns the same shape, of this dtype.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = updates.shape[1] > updates.shape[2]
    x = (updates.mT if tall else updates).to(dtype)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x  # torch_xla would leave the device for baddbmm with beta
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized (Jordan et al. 2024), for matrices: W -= lr sqrt(max(1, rows / columns)) newton_schulz(update)."""

    def __init__(self, parameters, lr: torch.Tensor, momentum: float, dtype: torch.dtype):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})
        self.dtype = dtype  # of the iteration

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            momentum, same_shape = group["momentum"], defaultdict(list)
            for parameter in group["params"]:
                same_shape[parameter.shape].append(parameter)
            # One batched product for all of a shape: the LSTM's two matrices.
            for (rows, columns), parameters in same_shape.items():
                updates = []
                for parameter in parameters:
                    if parameter not in self.state:
                        self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
                    buffer = self.state[parameter]["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
                    updates.append(parameter.grad.lerp(buffer, momentum))  # Nesterov
                updates = newton_schulz(torch.stack(updates), self.dtype).float() * (group["lr"] * max(1, rows / columns) ** 0.5)
                for parameter, update in zip(parameters, updates):
                    parameter.sub_(update)


def make_optimizers(agent: Agent, args: Args) -> list[torch.optim.Optimizer]:
    """Muon for matrices with Adam for the rest, or Adam for all."""
    device = agent.actor.weight.device
    adam = functools.partial(torch.optim.Adam, eps=1e-8, foreach=False, capturable=True)
    # Learning rates and Adam's steps are tensors: as numbers they would be compiled into the graph, anew at each change.
    lr, adam_lr = (torch.tensor(rate, device=device) for rate in (args.learning_rate, args.adam_learning_rate))
    if args.optimizer == "adam":
        return [adam(agent.parameters(), lr=lr, betas=(args.momentum, 0.999))]
    matrices = [p for p in agent.parameters() if p.ndim == 2 and p is not getattr(agent, "actor_logstd", None)]
    rest = [p for p in agent.parameters() if not any(p is m for m in matrices)]
    return [Muon(matrices, lr, args.momentum, agent.dtype), adam(rest, lr=adam_lr)]


def anneal(schedule: str, progress: float) -> float:
    """The factor on the learning rate after this share (0 to 1) of training."""
    progress = min(progress, 1.0)
    return {"none": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + np.cos(np.pi * progress))}[schedule]


# TRAINING -----------------------------------------------------------------------------------------------------------------


def train(args: Args, resumed: dict | None = None) -> int:
    """Trains until --total-timesteps, --time-limit or a signal. Returns the exit code."""
    device = start_devices(args)
    meet_other_hosts()
    hosts, host = xr.process_count(), xr.process_index()
    seed = args.seed + (resumed["iteration"] if resumed else 0) + 1_000_003 * host
    seed_everything(seed)
    all_args, args = args, share_of_host(args, hosts)
    envs = make_envs(args, seed)
    T, N = args.num_steps, envs.num_agents
    check_sizes(all_args, N * hosts)
    check_devices(all_args, N // envs.num_groups)
    num_segments = args.minibatch_size // T
    num_chunks = -(-args.minibatch_size // args.max_minibatch_size)
    num_minibatches = max(1, round(args.update_epochs * N * hosts * T / args.minibatch_size))

    agent = Agent(envs.single_observation_space, envs.single_action_space, args.hidden_size, args.precision)
    if args.load_weights and not resumed:
        load_weights(agent, args.load_weights, "--load-weights")
    for parameter in agent.parameters():
        dist.broadcast(parameter.data, src=0)
    agent = agent.to(device)
    parameters = list(agent.parameters())
    optimizers = make_optimizers(agent, args)
    learning_rates = [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]

    # STORAGE: time first. Row T is what follows the segment: its dones and valid become row 0 of the next. Of this host's agents;
    # what the devices need goes there in groups of agents that act together (two groups are double-buffered).
    dones = torch.ones((T + 1, N))
    valid = torch.ones((T + 1, N))
    rewards = torch.zeros((T, N))
    observations = [None] * envs.num_groups  # the newest of each group, on the devices
    state = [[put(torch.zeros(N // envs.num_groups, args.hidden_size)) for _ in "hc"] for _ in observations]
    noise = agent.sampling_noise(T + 1, N)
    beta, statistics = torch.zeros((), device=device), torch.zeros(len(LOSSES), device=device)

    def receive(t: int) -> slice:
        """Stores what the environments sent: the observation and done flags of step t, and the reward of step t - 1."""
        received = envs.receive()
        agents = received.agents
        observations[agents.start * envs.num_groups // N] = put(torch.tensor(received.observations))  # a copy: theirs is reused
        dones[t, agents] = torch.as_tensor(received.dones)
        valid[t, agents] = torch.as_tensor(received.valid)
        if t > 0:
            rewards[t - 1, agents] = torch.as_tensor(received.rewards.clip(-1, 1) if args.clip_rewards else received.rewards)
        return agents

    # GRAPHS: each of these functions is traced at every call, compiled if the graph is new, and then runs while the host goes on.
    graph = functools.partial(torch_xla.compile, full_graph=True)

    @graph
    @torch.no_grad()
    def act(*inputs):
        return [share(result, dim=0) for result in policy_step(agent, *inputs)]

    @graph
    def collect(steps, start, *flags):
        """Joins the groups of agents and the steps. Returns what `minibatch_loss` and what `draw_minibatch` need of the batch.

        steps: T + 1 times, for each group, its observations, actions, log-probabilities and values; start: h and c of each group;
        flags: rewards, dones and valid of each group, (N, T) or (N, T + 1).
        """
        per_item = zip(*(zip(*groups) for groups in steps))
        observations, actions, logprobs, values = (share(torch.stack([torch.cat(step) for step in item]), 1) for item in per_item)
        h, c = (torch.cat(groups) for groups in zip(*start))
        rewards, dones, valid = (share(torch.cat(groups).t(), dim=1) for groups in flags)
        ratio = share(torch.ones_like(rewards), dim=1)
        return (observations[:T], h, c, dones[:T], actions[:T], logprobs[:T]), (values, rewards, dones, valid, ratio)

    @graph
    @torch.no_grad()
    def draw(values, rewards, dones, valid, ratio, uniform):
        """A minibatch; and how much of the returns' variance the values explain."""
        *minibatch, advantages = draw_minibatch(values, rewards, dones, valid, ratio, uniform, beta, args)
        weight = valid[:T] / valid[:T].sum()
        unexplained, whole = ((weight * (x - (weight * x).sum()) ** 2).sum() for x in (advantages, advantages + values[:T]))
        return minibatch, 1 - unexplained / whole

    @graph
    def update(batch, values, ratio, minibatch):
        """Takes an optimizer step; writes the new values and ratios of its segments. Returns the minibatch's statistics."""

        def learn(*minibatch):
            loss, *results = minibatch_loss(agent, *batch, *minibatch, args)
            return torch.autograd.grad(loss, parameters), *results

        chunks = map(learn, *(tensor.chunk(num_chunks, dim=-1) for tensor in minibatch))
        gradients, logratios, newvalues, losses = zip(*chunks)
        for parameter, *parts in zip(parameters, *gradients):
            parameter.grad = sum(parts)
        segments = minibatch[0]
        ratio[:, segments], values[:T, segments] = torch.cat(logratios, 1).exp(), torch.cat(newvalues, 1)
        share(ratio, dim=1), share(values, dim=1)  # as they came: how a tensor lies is part of the graph that takes it
        grad_norm = nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()  # kept, they would be results of the graph
        losses = torch.cat((sum(losses), grad_norm[None]))
        statistics.add_(losses)
        return losses

    iteration, step = (resumed["iteration"], resumed["step"]) if resumed else (0, 0)
    if resumed:
        load_state_dict(agent, resumed["model"], "--resume")
        restore_optimizers(optimizers, resumed["optimizers"], args.optimizer)
        states = [resumed["rng"], *resumed["rng"].get("other_ranks", [])]
        if len(states) > host:  # a host that the checkpoint does not know keeps the seed it has
            restore_rng(states[host])
    num_iterations = -(-args.total_timesteps // (N * hosts * T))
    if iteration >= num_iterations:
        raise UsageError(
            f"--resume: this run is complete at {step} steps; give a larger --total-timesteps than {args.total_timesteps}"
        )
    try:
        run, refused = (Run if host == 0 else SilentRun)(all_args, agent, envs, resumed), None
    except UsageError as error:
        refused = error
    if highest_of_hosts(refused is not None):  # all end, or the others would wait for the one that does
        raise refused or UsageError("the first host cannot write; its own line says why")
    phase = run.phase
    stop = StopSignals()

    def told_to_stop() -> int:
        """Whether any host was: the signal's number, 1 for the time limit, else 0. What one host runs all must run, so they ask together."""
        return highest_of_hosts(stop.signum or int(run.out_of_time))

    try:
        envs.reset()
        groups = [receive(0) for _ in range(envs.num_groups)]  # which agents act together; two groups are double-buffered
        while not (stopped := told_to_stop()) and iteration < num_iterations:
            # ROLLOUT: T steps of every agent with the current policy. The state that the segment starts from is kept.
            run.profiler_step(iteration)
            start, steps = list(state), []
            noise.copy_(agent.sampling_noise(T + 1, N))
            lstm_weights = [weight.detach() for weight in agent.lstm_weights()]
            for t in range(T + 1):  # T steps, and v_T: the carried state sees the next observation
                steps.append([])
                for g, rows in enumerate(groups):
                    if t > 0:
                        with phase("env"):
                            receive(t)
                    with phase("policy"):
                        inputs = observations[g], put(dones[t, rows]), *state[g], *lstm_weights, put(noise[t, rows])
                        actions, logprobs, values, *next_state = act(*inputs)
                        steps[t].append((observations[g], actions, logprobs, values))
                        if t < T:  # the actions alone are waited for
                            state[g] = next_state
                            chosen = rows_of_this_host(actions).numpy()
                    if t < T:
                        with phase("env"):
                            envs.send(chosen)

            # UPDATE: minibatches of segments, drawn by priority. Advantages follow the newest values and ratios.
            with phase("update"):
                progress = iteration / num_iterations
                factor = anneal(args.anneal_lr, progress)
                for group, lr in zip((group for optimizer in optimizers for group in optimizer.param_groups), learning_rates):
                    group["lr"].fill_(lr * factor)
                beta.fill_(args.prio_beta0 + (1 - args.prio_beta0) * progress)
                statistics.zero_()
                flags = ([put(flag[:, rows].t()) for rows in groups] for flag in (rewards, dones, valid))
                batch, targets = collect(steps, start, *flags)
                values, *_, ratio = targets
                for updates in range(1, num_minibatches + 1):
                    uniform = torch.rand(num_segments)
                    dist.broadcast(uniform, src=0)
                    minibatch, explained = draw(*targets, uniform.to(device))
                    if updates == 1:  # ratio 1, the rollout's values
                        explained_variance = explained
                    losses = update(batch, values, ratio, minibatch)
                    if args.target_kl is not None and losses[4] > args.target_kl:
                        break
                means = statistics.cpu() / updates  # the one read of the update: waits for the devices
                losses = dict(zip(LOSSES, means.tolist()))

            del batch, targets, values, ratio, minibatch, steps  # else they take memory beside the next segment
            if iteration == run.first_iteration:  # there is something to save
                stop.listen()
            if iteration == run.first_iteration + WARM_UP - 1:  # all is compiled
                run.started()
            iteration, step = iteration + 1, step + N * hosts * T

            # LOGGING, CHECKPOINT
            with phase("log"):
                if broken := [name for name, value in losses.items() if not np.isfinite(value)]:
                    raise TrainingDiverged(
                        f"{', '.join(broken)} not finite at step {step}; the last good checkpoint is kept; try a lower --learning-rate"
                    )
                last = iteration == num_iterations
                if iteration == 1 or iteration % args.log_interval == 0 or last:
                    losses["explained_variance"] = float(explained_variance)
                    gather_logs(envs)
                    run.log(iteration, step, losses, learning_rates[0] * factor)
                if iteration % args.checkpoint_interval == 0 or last:
                    run.save_checkpoint(iteration, step, optimizers, rng_of_all_hosts())
            # The next segment begins where this one ended.
            dones[0], valid[0] = dones[T], valid[T]
            if iteration == run.first_iteration + WARM_UP:
                run.warm_compiles, _ = compiled_so_far()
        exit_reason = "time_limit" if stopped and iteration < num_iterations else "completed"
        if stopped > 1:
            exit_reason = signal.Signals(stopped).name.lower()
        if exit_reason != "completed":
            run.save_checkpoint(iteration, step, optimizers, rng_of_all_hosts())
    except TrainingDiverged as error:
        exit_reason = f"diverged: {error}"
    except WorkerDied as error:
        exit_reason = f"worker died: {error}"
    except BaseException as error:
        exit_reason = f"{type(error).__name__}: {error}"
        raise
    finally:
        try:
            envs.close()
        finally:
            run.close(exit_reason, iteration, step)
    if exit_reason.startswith(("diverged", "worker")):
        return 1
    return 128 + stopped if stopped > 1 else 0


# PLUMBING: devices and hosts ----------------------------------------------------------------------------------------------


WARM_UP = 2  # iterations in which graphs may be compiled: the second is the first with an optimizer's state


def start_devices(args: Args) -> torch.device:
    """Starts the runtime; all devices of all hosts become one mesh with the axis "data". Raises UsageError if there is no TPU to be had."""
    if args.device == "tpu":
        if not tpu.num_available_chips():  # libtpu itself would look for minutes
            raise UsageError("--device tpu: this machine has no TPU; --device cpu runs on XLA's CPU device")
        if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
            raise UsageError("--device tpu: libtpu is not installed; pip install 'torch_xla[tpu]==2.9.0'")
    xr.set_device_type(args.device.upper())
    xr.use_spmd()
    torch.set_num_threads(1)  # here only small arrays are copied, which is faster than telling another thread to
    # Autograd's own thread may let go of its last tensors late: at times they would be part of the graph, and it another one.
    torch.autograd.set_multithreading_enabled(False)
    try:
        devices = xr.global_runtime_device_count()
        spmd.set_global_mesh(spmd.Mesh(np.arange(devices), (devices,), ("data",)))
    except (RuntimeError, AssertionError) as error:
        busy = "; a TPU serves one process at a time, and `sudo lsof -w /dev/accel* /dev/vfio/*` names the one that holds it"
        hint = busy if args.device == "tpu" else ""
        raise UsageError(f"--device {args.device}: does not start ({' '.join(str(error).split())[:200]}){hint}") from error
    return torch_xla.device()


def meet_other_hosts():
    """Makes the process group by which the hosts themselves talk: about when to stop, what to log, what to save."""
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    stdout = os.dup(1)
    os.dup2(2, 1)  # gloo announces itself on stdout
    dist.init_process_group("gloo", **(alone if xr.process_count() == 1 else {"init_method": "xla://"}))
    os.dup2(stdout, 1)
    os.close(stdout)


def put(tensor: torch.Tensor) -> torch.Tensor:
    """To the devices, without waiting: this host's agents (n, ...) become, with those of the other hosts, (N, ...) shared by all."""
    return xm.send_cpu_data_to_device([tensor.contiguous()], torch_xla.device(), spread_rows(tensor.ndim))[0]


@functools.cache
def spread_rows(ndim: int) -> spmd.ShardingSpec:
    """A part of the first dimension on each device; minibatch: every host brings the parts of its own devices."""
    return spmd.ShardingSpec(spmd.get_global_mesh(), ("data", *[None] * (ndim - 1)), minibatch=True)


def share(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Tells XLA to spread this dimension of a tensor over the devices. Returns the tensor."""
    spmd.mark_sharding(tensor, spmd.get_global_mesh(), tuple("data" if d == dim else None for d in range(tensor.ndim)))
    return tensor


def rows_of_this_host(tensor: torch.Tensor) -> torch.Tensor:
    """Waits for a tensor (N, ...) of all agents; those of this host, on the CPU. `.cpu()` would compile a gather of all at every call."""
    xm.wait_device_ops()
    shards = wrap_as_sharded_tensor(tensor).local_shards
    if shards[0].indices is Ellipsis:  # every device has all
        return shards[0].data
    return torch.cat([shard.data for shard in shards])  # in the order of this host's devices, in which `put` gave them out


def compiled_so_far() -> tuple[int, float]:
    """How many graphs were compiled, and the seconds that took."""
    count, nanoseconds, _ = xla_metrics.metric_data("CompileTime") or (0, 0, ())
    return count, nanoseconds / 1e9


def share_of_host(args: Args, hosts: int) -> Args:
    """One host's share of the environments. Raises UsageError for a number that does not split."""
    names = ["num_envs"] + ["num_workers"] * (args.vec_backend == "multiprocessing")
    for name in names:
        if getattr(args, name) % hosts:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be a multiple of the {hosts} hosts")
    if hosts > 1 and "num_envs" in args.env:
        raise UsageError("--env.num-envs: use --num-envs, which is split over the hosts")
    return replace(args, **{name: getattr(args, name) // hosts for name in names})


def check_devices(args: Args, num_agents: int):
    local, devices = xr.addressable_runtime_device_count(), xr.global_runtime_device_count()
    segments = min(args.minibatch_size, args.max_minibatch_size) // args.num_steps
    if num_agents % local:
        raise UsageError(
            f"--num-envs {args.num_envs}: the {num_agents} agents that act at once do not split over this host's {local} devices"
        )
    if segments % devices:
        raise UsageError(
            f"--minibatch-size {args.minibatch_size}: {segments} segments of --num-steps {args.num_steps} at a time do not split over {devices} devices"
        )


def highest_of_hosts(number: int) -> int:
    numbers = torch.tensor(number)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return int(numbers)


def gather_logs(envs):
    """Every host gets what the environments of all reported since the last time; the first one writes it."""
    hosts = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, (envs.episodes, dict(envs.logs)))
    envs.episodes = [episode for episodes, _ in hosts for episode in episodes]
    envs.logs.clear()
    for _, logs in hosts:
        for key, pairs in logs.items():
            envs.logs[key].extend(pairs)


def rng_of_all_hosts() -> dict:
    """The first host's random states, as a run of one process has them, with those of the others."""
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, rng_state())
    return states[0] | {"other_ranks": states[1:]}


# PLUMBING: environments ---------------------------------------------------------------------------------------------------


class UsageError(Exception):
    """A wrong argument: printed as one line, exit code 2."""

    def __str__(self):  # what it quotes may have newlines and escape sequences
        return "".join(character if character.isprintable() else " " for character in super().__str__())


class TrainingDiverged(Exception):
    """A loss or a gradient is not finite."""


class WorkerDied(BaseException):
    """An environment worker ended by itself. Raised from a signal handler, so no `except Exception` may swallow it."""


@dataclass
class Step:
    """What a group of n agents received: observations (n, *obs), raw rewards (n) float32, and flags (n) float32.

    dones: the episode ended just before this observation. valid: 0 where the environment will ignore the next action
    (PufferLib's emulation resets on the step after the end, and pads agents that are gone).
    """

    agents: slice
    observations: np.ndarray
    rewards: np.ndarray
    dones: np.ndarray
    valid: np.ndarray


class Envs:
    """PufferLib's vectorized environments: receive() a Step, send() actions. Collects finished episodes and logs."""

    def __init__(self, vecenv, seed: int):
        self.vecenv, self.seed, self.num_agents = vecenv, seed, vecenv.num_agents
        self.num_groups = vecenv.num_agents // getattr(vecenv, "agents_per_batch", vecenv.num_agents)
        self.single_action_space, space = vecenv.single_action_space, vecenv.single_observation_space
        self.emulated, self.structure = bool(vecenv.emulated), None
        if self.emulated and (dtype := vecenv.driver_env.obs_dtype).names:  # Dict and Tuple observations arrive as packed bytes
            self.structure = dtype
            size = np.lib.recfunctions.structured_to_unstructured(np.zeros(1, dtype)).shape[-1]
            space = gym.spaces.Box(-np.inf, np.inf, (size,), np.float32)
        elif space.dtype == np.float64:
            space = gym.spaces.Box(-np.inf, np.inf, space.shape, np.float32)
        self.single_observation_space, self.torch_dtype = space, torch.as_tensor(np.zeros(1, space.dtype)).dtype
        # Actions are kept as (n, actions); a Discrete space is sent as (n).
        box = isinstance(self.single_action_space, gym.spaces.Box)
        self.action_shape = (int(np.prod(self.single_action_space.shape)) if self.single_action_space.shape else 1,)
        self.action_dtype = self.single_action_space.dtype if box else np.int32
        self.low, self.high = (self.single_action_space.low, self.single_action_space.high) if box else (None, None)
        self.ended = np.ones(self.num_agents, bool)  # the episode is over: the next observation begins another
        self.returns, self.lengths = np.zeros(self.num_agents), np.zeros(self.num_agents, int)
        self.episodes: list[tuple[int, float, int]] = []  # (agent, return, length) of episodes that finished
        self.logs: dict[str, list] = defaultdict(list)  # what the environments log, as (value, weight)
        self.processes, self.received, self.closed = getattr(vecenv, "processes", []), [], False
        if self.processes:
            atexit.register(self.close)  # before multiprocessing's own handler, which would wait for the workers
            signal.signal(signal.SIGCHLD, self.check_workers)

    def check_workers(self, *_):
        for i, process in enumerate(self.processes):
            if process.exitcode is not None:
                how = (
                    f"signal {signal.Signals(-process.exitcode).name}" if process.exitcode < 0 else f"exit code {process.exitcode}"
                )
                raise WorkerDied(f"environment worker {i} (pid {process.pid}) ended with {how}")

    def reset(self):
        self.check_workers()
        self.vecenv.async_reset(self.seed)

    def receive(self) -> Step:
        if self.processes:  # PufferLib wants recv and send in turn; two groups are received before either is sent to
            self.vecenv.flag = pufferlib.vector.RECV
        observations, rewards, terminals, truncations, infos, ids, mask = self.vecenv.recv()
        if self.processes:
            self.received.append(self.vecenv.w_slice)
        agents = slice(int(ids[0]), int(ids[-1]) + 1)
        n = agents.stop - agents.start
        ended = np.logical_or(terminals, truncations)
        acted = ~self.ended[agents]  # False at the first observation of all, and after an end that the next `send` reset
        self.returns[agents] += rewards * acted
        self.lengths[agents] += acted
        for agent in np.flatnonzero(ended & acted) + agents.start:
            self.episodes.append((int(agent), float(self.returns[agent]), int(self.lengths[agent])))
            self.returns[agent], self.lengths[agent] = 0, 0
        # An emulated environment shows the last observation, and the next `send` resets. C environments reset in the same step: this
        # observation is the next episode's first, and a truncation cannot bootstrap, since its last observation is never shown.
        dones = self.ended[agents] | (terminals if self.emulated else ended)
        self.ended[agents] = ended if self.emulated else False
        valid = mask & ~ended if self.emulated else mask
        for info in infos:
            weight = info.get("n", 1)
            for key, value in pufferlib.unroll_nested_dict(info):
                if np.isscalar(value) and not isinstance(value, str):
                    self.logs[key].append((float(value), weight))
        if self.structure is not None:
            structured = observations.reshape(n, -1).view(self.structure).reshape(n)
            observations = np.lib.recfunctions.structured_to_unstructured(structured, dtype=np.float32)
        elif observations.dtype == np.float64:
            observations = observations.astype(np.float32)
        return Step(agents, observations, rewards, dones.astype(np.float32), valid.astype(np.float32))

    def send(self, actions: np.ndarray):
        if self.low is not None:
            actions = np.clip(actions.reshape(-1, *self.low.shape), self.low, self.high)
        elif not self.single_action_space.shape:
            actions = actions[:, 0] + getattr(self.single_action_space, "start", 0)
        if self.processes:
            self.vecenv.flag, self.vecenv.w_slice = pufferlib.vector.SEND, self.received.pop(0)
        self.vecenv.send(actions.astype(self.action_dtype))

    def close(self):
        if self.closed:
            return
        self.closed = True
        if self.processes:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for process in self.processes:
            process.kill()  # nothing of theirs is worth a wait, and they ignore SIGTERM
        self.vecenv.close()
        for process in self.processes:
            process.join()


def seed_everything(seed: int):
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def ocean_environments() -> dict[str, Any]:
    """Short name to class name or maker, for PufferLib's Ocean environments."""
    from pufferlib.ocean import environment as ocean

    makers = {name.removeprefix("make_"): maker for name, maker in vars(ocean).items() if name.startswith("make_")}
    return makers | ocean.MAKE_FUNCTIONS


def environment_class(env_id: str):
    """The callable that makes one environment for PufferLib: takes buf, seed and the environment's own arguments.

    Tried in this order: a name of Ocean's, a Gymnasium id (module:Name-v0 imports the module first), a module with parallel_env.
    """
    name, ocean = env_id.removeprefix("puffer_"), ocean_environments()
    if callable(ocean.get(name)):
        return ocean[name]
    try:
        if name in ocean:
            return getattr(importlib.import_module(f"pufferlib.ocean.{name}.{name}"), ocean[name])
        module, _, gym_id = env_id.rpartition(":")
        if module:
            importlib.import_module(module)  # it registers its environments
        if not module and gym_id not in gym.registry and "/" not in env_id and importlib.util.find_spec(env_id):
            return functools.partial(make_pettingzoo, importlib.import_module(env_id).parallel_env)
        gym.spec(gym_id)
        return functools.partial(make_gymnasium, gym_id)
    except Exception as error:
        near = difflib.get_close_matches(env_id, [*ocean, *gym.registry], n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}?" if near else f"Ocean has {', '.join(sorted(ocean))}; or give a Gymnasium id"
        reason = " ".join(str(error).split())
        raise UsageError(
            f"--env-id {env_id}: unknown environment, or it does not load ({type(error).__name__}: {reason}); {hint}"
        ) from error


def make_gymnasium(gym_id: str, buf=None, seed=0, **kwargs):
    env = gym.make(gym_id, **kwargs)
    if isinstance(env.observation_space, gym.spaces.Discrete):  # PufferLib packs a lone Discrete into nothing
        env = gym.wrappers.FlattenObservation(env)  # one-hot
    env = pufferlib.EpisodeStats(env)
    return pufferlib.emulation.GymnasiumPufferEnv(env=env, buf=buf, seed=seed)


def make_pettingzoo(parallel_env, buf=None, seed=0, **kwargs):
    env = pufferlib.MeanOverAgents(pufferlib.MultiagentEpisodeStats(parallel_env(**kwargs)))
    return pufferlib.emulation.PettingZooPufferEnv(env=env, buf=buf, seed=seed)


def make_one(make, base_seed: int, parent: int, kwargs: dict, buf=None, seed: int = 0):
    """Makes one environment, in this process or in a worker; `seed` is its number as PufferLib counts them.

    PufferLib gives environments of different workers the same seeds, and its workers outlive a killed parent.
    """
    if os.getpid() != parent:  # a worker
        for signum in (signal.SIGINT, signal.SIGTERM):  # they may reach the whole process group; the parent decides
            signal.signal(signum, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the parent
        if os.getppid() != parent:
            os._exit(1)
        random.seed(base_seed + seed)
        np.random.seed((base_seed + seed) % 2**32)
    ctypes.CDLL(None).srand(base_seed + seed)  # the C environments' rand()
    env = make(buf=buf, seed=seed, **kwargs)
    if not isinstance(env, pufferlib.PufferEnv):
        reset, own_seed = env.reset, base_seed + seed
        env.reset = lambda seed=None: reset(seed=None if seed is None else own_seed)
    return env


def make_envs(args: Args, seed: int, num_envs: int | None = None) -> Envs:
    """Vectorized environments as the arguments say. Raises UsageError."""
    num_envs = num_envs or args.num_envs
    make = environment_class(args.env_id)
    parameters = inspect.signature(make).parameters
    is_native = inspect.isclass(make) and issubclass(make, pufferlib.PufferEnv) and "num_envs" in parameters
    num_envs = args.env.get("num_envs", num_envs) if is_native else num_envs
    backend = args.vec_backend
    if backend == "auto":
        backend = "native" if is_native else "serial"
    if backend == "native" and not is_native:
        raise UsageError(f"--vec-backend native: {args.env_id} does not vectorize itself; use serial or multiprocessing")
    if unknown := [
        key for key in args.env if key not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    ]:
        known = ", ".join(key for key in parameters if key not in ("self", "buf", "seed"))
        raise UsageError(f"--env.{unknown[0]}: {args.env_id} takes no such argument; it takes {known}")
    if backend == "multiprocessing" and num_envs % args.num_workers:
        raise UsageError(f"--num-envs {num_envs}: must be a multiple of --num-workers {args.num_workers}")
    copies, kwargs = num_envs, dict(args.env)
    if is_native:  # one object steps many environments
        copies = args.num_workers if backend == "multiprocessing" else 1
        kwargs["num_envs"] = num_envs // copies
    creator = functools.partial(make_one, make, seed, os.getpid(), kwargs)
    try:
        if backend == "native":
            return Envs(creator(), seed)
        if backend == "serial":
            return Envs(pufferlib.vector.make(creator, backend="Serial", num_envs=copies), seed)
        batch = copies // 2 if args.num_workers % 2 == 0 else copies  # two halves: one steps while the policy acts on the other
        return Envs(
            pufferlib.vector.make(
                creator, backend="Multiprocessing", num_envs=copies, num_workers=args.num_workers, batch_size=batch, overwork=True
            ),
            seed,
        )
    except (
        TypeError,
        ValueError,
        KeyError,
        AssertionError,
        IndexError,
        ArithmeticError,
        gym.error.Error,
        ImportError,
        pufferlib.APIUsageError,
    ) as error:
        raise UsageError(f"--env-id {args.env_id}: the environment cannot be made: {type(error).__name__}: {error}") from error


# PLUMBING: weights, checkpoints, resuming ---------------------------------------------------------------------------------

# Our parameter names and PufferLib's (LSTMWrapper over Default). Files have PufferLib's, so each loads the other's.
PUFFERLIB_NAMES = {
    "encoder.": "policy.encoder.",
    "actor.": "policy.decoder.",
    "critic.": "policy.value.",
    "actor_logstd": "policy.decoder_logstd",
}


def to_pufferlib(agent: Agent) -> dict[str, torch.Tensor]:
    """The agent's parameters under PufferLib's names, with the copies that its LSTMCell lists."""
    names = PUFFERLIB_NAMES | ({"actor.": "policy.decoder_mean."} if agent.continuous else {})
    state = {}
    for name, value in agent.state_dict().items():
        ours = next((prefix for prefix in names if name.startswith(prefix)), "")
        state[names.get(ours, "") + name.removeprefix(ours)] = value.detach().cpu().clone()
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        state[f"cell.{name}"] = state[f"lstm.{name}_l0"]
    return state


def load_state_dict(agent: Agent, state: dict[str, torch.Tensor], flag: str):
    """Loads parameters saved under PufferLib's names (its own files, or ours). Raises UsageError if they do not fit."""
    if not isinstance(state, dict) or not all(isinstance(key, str) and isinstance(state[key], torch.Tensor) for key in state):
        raise UsageError(f"{flag}: not a file of weights (a dict of tensors)")
    expected = to_pufferlib(agent)
    state = {name.removeprefix("module."): value for name, value in state.items()}
    missing = sorted(set(expected) - set(state)) + [n for n in expected if n in state and expected[n].shape != state[n].shape]
    if missing:
        name, found = missing[0], state.get(missing[0])
        raise UsageError(
            f"{flag}: the weights do not fit this environment and --hidden-size: {name} should be {tuple(expected[name].shape)}, is {'missing' if found is None else tuple(found.shape)}"
        )
    by_ours = dict(zip(agent.state_dict(), expected))  # to_pufferlib keeps the order
    agent.load_state_dict({ours: state[theirs] for ours, theirs in by_ours.items()})


def load_weights(agent: Agent, path: str, flag: str):
    """Loads a .pt (ours or PufferLib's) or PufferLib's flat float32 .bin (parameters in its order, which is ours)."""
    data = read_bytes(path, flag)
    if path.endswith(".bin"):
        parameters = list(agent.parameters())
        flat = torch.frombuffer(bytearray(data), dtype=torch.float32) if data and len(data) % 4 == 0 else torch.empty(0)
        total = sum(p.numel() for p in parameters)
        if len(flat) != total:
            raise UsageError(
                f"{flag} {path}: {len(data)} bytes, but this network has {total} float32 parameters; do --env-id and --hidden-size match?"
            )
        nn.utils.vector_to_parameters(flat.to(parameters[0].device), parameters)
        return
    load_state_dict(agent, load_tensors(data, f"{flag} {path}"), f"{flag} {path}")


def load_tensors(data: bytes, what: str) -> Any:
    """torch.load of tensors and plain values only: a file from a stranger cannot run code. Raises UsageError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice on how to load it anyway
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise UsageError(f"{what}: not a checkpoint of tensors and plain values, or a damaged one") from error


def read_bytes(path: str, flag: str) -> bytes:
    try:
        with fsspec.open(path, "rb") as file:
            return file.read()
    except (OSError, ValueError, ImportError) as error:
        raise UsageError(f"{flag} {path}: cannot be read ({type(error).__name__}: {error})") from error


def write_atomically(path: str, data: bytes):
    """Under a temporary name first, then renamed: whoever reads sees the old file or the new one, whole."""
    fs, inner = fsspec.url_to_fs(path)
    try:
        fs.pipe_file(inner + ".tmp", data)
    except OSError:
        with contextlib.suppress(OSError):
            fs.rm_file(inner + ".tmp")  # a full disk: do not keep what did not fit
        raise
    if isinstance(fs, fsspec.implementations.local.LocalFileSystem):
        os.replace(inner + ".tmp", inner)
    else:
        fs.mv(inner + ".tmp", inner)


def rng_state() -> dict:
    kind, keys, *rest = np.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
    }
    return state | ({"cuda": torch.cuda.get_rng_state_all()} if torch.cuda.is_available() else {})


def restore_rng(state: dict):
    """Raises UsageError if this is not what `rng_state` returned."""
    try:
        random.setstate(state["python"])
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda"])
    except Exception as error:
        raise UsageError("--resume: the checkpoint's random states are damaged") from error


def restore_optimizers(optimizers: list[torch.optim.Optimizer], states: list[dict], name: str):
    """The saved states, but for what flags say of them. Raises UsageError if they are not those of --optimizer name."""
    try:
        for optimizer, state in zip(optimizers, states, strict=True):
            for group, saved in zip(optimizer.param_groups, state["param_groups"]):
                saved |= {key: value for key, value in group.items() if key not in ("params", "lr")}  # flags win
                saved["lr"] = group["lr"].clone().fill_(saved["lr"])
            optimizer.load_state_dict(state)
            names = {tuple(values) for values in optimizer.state.values()}
            shapes = [(value.shape, p.shape) for p, values in optimizer.state.items() for value in values.values()]
            if len(names) > 1 or any(shape not in ((), expected) for shape, expected in shapes):
                raise ValueError("not of these parameters")
    except Exception as error:
        raise UsageError(f"--resume: the optimizer's state is not one of --optimizer {name}") from error


def find_run(path: str, output_dir: str, flag: str) -> str:
    """The folder of a run, given itself, a file in it, or "latest" (the newest in output_dir that has a checkpoint)."""
    if flag == "--resume" and path.endswith(".pt") and path.rpartition("/")[2] != "trainer_state.pt":
        raise UsageError(f"{flag} {path}: not a trainer_state.pt, nor the folder of a run")
    if path != "latest":
        return path.rstrip("/").rpartition("/")[0] or "." if path.endswith(".pt") else path.rstrip("/")
    fs, inner = fsspec.url_to_fs(output_dir)
    states = fs.glob(f"{inner}/*/trainer_state*.pt")
    if not states:
        raise UsageError(f"{flag} latest: no run with a checkpoint in --output-dir {output_dir}")
    newest = max(states, key=lambda state: fs.modified(state)).rpartition("/")[0]
    return newest if isinstance(fs, fsspec.implementations.local.LocalFileSystem) else fs.unstrip_protocol(newest)


STATE = {"iteration": int, "step": int, "seconds": float, "optimizers": list, "rng": dict, "config": dict, "model_file": str}


def load_checkpoint(folder: str, flag: str) -> dict:
    """The newest valid trainer state in a run's folder, with its model. A damaged one is skipped with a warning."""
    problems = []
    for name in ("trainer_state.pt", "trainer_state_previous.pt"):
        try:
            state = load_tensors(read_bytes(f"{folder}/{name}", flag), name)
            whole = isinstance(state, dict) and all(isinstance(state.get(key), kind) for key, kind in STATE.items())
            if not whole or not 0 <= state["iteration"] <= min(state["step"], 2**31):
                raise UsageError(f"{name}: not a trainer state of this script")
            state["model"] = load_tensors(read_bytes(f"{folder}/{state['model_file']}", flag), state["model_file"])
            for problem in problems:
                warn(f"skipped a damaged checkpoint, going on from {state['model_file']}: {problem}")
            return state | {"folder": folder}
        except UsageError as error:
            problems.append(str(error))
    raise UsageError(f"{flag} {folder}: no valid checkpoint: {problems[0]}")


def warn(message: str):
    print(f"warning: {message}", file=sys.stderr, flush=True)


class StopSignals:
    """Notes SIGINT and SIGTERM, so that the loop can finish its step and save. A second SIGINT interrupts at once."""

    signum, name = 0, None

    def listen(self):
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self.note)

    def note(self, signum, _):
        if self.signum == signal.SIGINT == signum:
            raise KeyboardInterrupt
        self.signum, self.name = signum, signal.Signals(signum).name.lower()
        os.write(
            2, f"{signal.Signals(signum).name}: finishing this step, writing a checkpoint\n".encode()
        )  # print is not reentrant


# PLUMBING: logging --------------------------------------------------------------------------------------------------------


class Run:
    """A run's folder: config.yaml, TensorBoard events, metrics.jsonl, metrics.json, checkpoints; and what the terminal shows."""

    def __init__(self, args: Args, agent: Agent, envs: Envs, resumed: dict | None):
        self.args, self.agent, self.envs = args, agent, envs
        self.start, self.before = time.perf_counter(), resumed["seconds"] if resumed else 0.0
        self.first_step = self.last_step = resumed["step"] if resumed else 0
        self.first_iteration, self.last_time, self.steady = resumed["iteration"] if resumed else 0, self.before, None
        self.trained_before, self.started_at = resumed.get("trained", self.before) if resumed else 0.0, None
        self.phases, self.logged_phases, self.row = defaultdict(float), {}, {}
        self.failed, self.live, self.profiler, self.warm_compiles = set(), None, None, None
        self.env_name = args.env_id.replace("/", "-").replace(":", "-")
        name = f"{self.env_name}__{args.exp_name}__{args.seed}__{int(time.time())}"
        self.folder = resumed["folder"] if resumed else f"{args.output_dir.rstrip('/')}/{name}"
        try:
            fs, inner = fsspec.url_to_fs(self.folder)
            self.local = isinstance(fs, fsspec.implementations.local.LocalFileSystem)
            # TensorBoard and metrics.jsonl are written here as they come.
            self.local_folder = inner if self.local else f"runs/{name}"
            os.makedirs(self.local_folder, exist_ok=True)
            fs.makedirs(inner, exist_ok=True)
            write_atomically(f"{self.folder}/config.yaml", yaml.safe_dump(asdict(args), sort_keys=False).encode())
        except (OSError, ValueError, ImportError) as error:
            raise UsageError(f"--output-dir {args.output_dir}: cannot be written ({type(error).__name__}: {error})") from error
        history = []
        with self.tolerate("metrics.jsonl"):
            if resumed and fs.exists(f"{inner}/metrics.jsonl"):  # lines after the checkpoint would come twice
                history = [
                    line for line in fs.cat_file(f"{inner}/metrics.jsonl").splitlines() if json_step(line) <= self.first_step
                ]
            write_atomically(f"{self.local_folder}/metrics.jsonl", b"".join(line + b"\n" for line in history))
            self.jsonl = open(f"{self.local_folder}/metrics.jsonl", "ab")  # noqa: SIM115  (open as long as the run)
        # TensorBoard writes in a thread of its own: on a full disk, a line instead of its traceback.
        threading.excepthook = lambda failed: warn(f"{failed.thread.name}: {failed.exc_type.__name__}: {failed.exc_value}")
        if args.track:
            with self.tolerate("W&B"):
                os.environ.setdefault("WANDB_INIT_TIMEOUT", "20")  # seconds; an unreachable server should not cost more
                import wandb

                wandb.init(
                    project=args.wandb_project_name,
                    entity=args.wandb_entity,
                    name=name,
                    config=asdict(args),
                    dir=self.local_folder,
                    sync_tensorboard=True,
                )
        with self.tolerate("TensorBoard"):
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(self.local_folder, purge_step=self.first_step + 1 if resumed else None)
            self.writer.add_text("config", "```yaml\n" + yaml.safe_dump(asdict(args), sort_keys=False) + "```")
        psutil.cpu_percent()
        machine = f"{xr.global_runtime_device_count()} x {args.device}, {args.precision}"
        print(f"{'' if resumed else preset_hint(args)}on: {machine}\nrun: {self.folder}", file=sys.stderr, flush=True)
        print("compiling: about half a minute at every start", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def tolerate(self, what: str):
        """A full disk or an unreachable service does not stop training: warns once, goes on."""
        try:
            yield
        except Exception as error:
            if what not in self.failed:
                warn(f"{what} failed, training goes on: {type(error).__name__}: {error}")
            self.failed.add(what)

    @contextlib.contextmanager
    def phase(self, name: str):
        """Counts the seconds inside, but for those of a phase within this one."""
        start, others = time.perf_counter(), sum(self.phases.values())
        yield
        self.phases[name] += time.perf_counter() - start - (sum(self.phases.values()) - others)

    def started(self):
        """After the first update: from here on time counts for --time-limit, and the dashboard takes the spinner's place."""
        self.started_at = time.perf_counter()
        if self.args.dashboard and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            if self.live:
                self.live.stop()
            self.live = Live(console=Console(stderr=True), auto_refresh=False)
            self.live.start()

    @property
    def trained(self) -> float:
        """`seconds` without those before the first update, of this start and of all before a resume."""
        return self.trained_before + (time.perf_counter() - self.started_at if self.started_at else 0)

    @property
    def seconds(self) -> float:
        """Seconds since the start, those before a resume included."""
        return self.before + time.perf_counter() - self.start

    @property
    def out_of_time(self) -> bool:
        return self.args.time_limit is not None and self.trained >= self.args.time_limit

    def profiler_step(self, iteration: int):
        """--profile: a trace of iterations 6 to 8, after compilation."""
        if self.args.profile and iteration == self.first_iteration + 5:
            self.profiler = xla_profiler
            self.profiler.start_trace(self.local_folder)
        elif iteration == self.first_iteration + 8:
            self.export_trace()

    def export_trace(self):
        if self.profiler:
            self.profiler.stop_trace()
            self.profiler = None
            print(f"trace: tensorboard --logdir {self.local_folder} (with xprof installed)", file=sys.stderr)

    def log(self, iteration: int, step: int, losses: dict[str, float], learning_rate: float):
        now = self.seconds
        sps = (step - self.last_step) / max(now - self.last_time, 1e-9)
        row = {"step": step, "iteration": iteration, "time": now, "sps": sps, "learning_rate": learning_rate}
        row["startup"] = now - self.trained
        if episodes := self.envs.episodes:
            returns = [episode[1] for episode in episodes]
            row |= {
                "episodes": len(returns),
                "episodic_return": float(np.mean(returns)),
                "episodic_return_min": min(returns),
                "episodic_return_max": max(returns),
            }
            row["episodic_length"] = float(np.mean([episode[2] for episode in episodes]))
        for key, pairs in self.envs.logs.items():
            row[f"env/{key}"] = weighted_mean(pairs)
        row |= {f"losses/{name}": value for name, value in losses.items()}
        elapsed = {name: seconds - self.logged_phases.get(name, 0) for name, seconds in self.phases.items()}
        row |= {f"time/{name}": seconds for name, seconds in elapsed.items()}
        row |= {f"time/{name}_share": seconds / max(now - self.last_time, 1e-9) for name, seconds in elapsed.items()}
        row["xla/compiled_graphs"], row["xla/compile_seconds"] = compiled_so_far()
        self.last_time, self.last_step, self.logged_phases = now, step, dict(self.phases)
        if self.steady is None and iteration >= self.first_iteration + min(10, self.args.log_interval):
            self.steady = (now, step)
        episodes.clear()
        self.envs.logs.clear()
        self.row = {key: value for key, value in self.row.items() if key.startswith(("episodic", "env/"))} | row
        with self.tolerate("metrics.jsonl"):
            row = {key: value for key, value in row.items() if value == value}  # JSON has no NaN
            self.jsonl.write(json.dumps(row).encode() + b"\n")
            self.jsonl.flush()
        with self.tolerate("TensorBoard"):
            for key, value in row.items():
                if key not in ("step", "time", "startup", "iteration", "episodes"):
                    self.writer.add_scalar(key if "/" in key else f"charts/{'SPS' if key == 'sps' else key}", value, step)
        if self.live:
            with self.tolerate("dashboard"):
                self.live.update(dashboard(self.args, self.row, self.folder), refresh=True)
        if not self.live or not sys.stdout.isatty():
            shown = {"step": f"{step}", "time": f"{now:.1f}", "sps": f"{sps:.0f}"}
            for key in ("env/score", "episodic_return", "episodic_length", "losses/approx_kl", "losses/entropy"):
                shown |= {key.rpartition("/")[2]: f"{self.row[key]:.4g}"} if key in self.row else {}
            print(" ".join(f"{key}={value}" for key, value in shown.items()), flush=True)

    def save_checkpoint(self, iteration: int, step: int, optimizers: list[torch.optim.Optimizer], rng: dict):
        """The model first, then the trainer state that names it: at every moment a trainer state and its model are whole."""
        model_file = f"model_{self.env_name}_{iteration:06d}.pt"
        state = {
            "iteration": iteration, "step": step, "seconds": self.seconds, "trained": self.trained, "model_file": model_file, "config": asdict(self.args),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers], "rng": rng,
        }  # fmt: skip
        with self.tolerate("checkpoint"):
            fs, inner = fsspec.url_to_fs(self.folder)
            write_atomically(f"{self.folder}/{model_file}", serialized(to_pufferlib(self.agent)))
            if fs.exists(f"{inner}/trainer_state.pt"):
                write_atomically(f"{self.folder}/trainer_state_previous.pt", fs.cat_file(f"{inner}/trainer_state.pt"))
            write_atomically(f"{self.folder}/trainer_state.pt", serialized(state))
            models = sorted(fs.glob(f"{inner}/model_{self.env_name}_*.pt"), key=lambda path: (len(path), path))
            for old in models[: -self.args.keep_checkpoints]:
                fs.rm_file(old)
            self.upload_metrics()

    def upload_metrics(self):
        if not self.local:
            fs, inner = fsspec.url_to_fs(self.folder)
            fs.put_file(f"{self.local_folder}/metrics.jsonl", f"{inner}/metrics.jsonl")

    def close(self, exit_reason: str, iteration: int, step: int):
        """Writes metrics.json, whatever the end is."""
        seconds, trained = self.seconds, step - self.first_step
        steady_time, steady_step = self.steady or (self.before, self.first_step)
        count, compile_seconds = compiled_so_far()
        late = None if self.warm_compiles is None else count - self.warm_compiles
        metrics = {
            "script": os.path.basename(__file__), "arguments": asdict(self.args), "command": sys.argv, "git_commit": git_commit(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "torch_xla": torch_xla.__version__, "numpy": np.__version__, "gymnasium": gym.__version__, "pufferlib": importlib.metadata.version("pufferlib")},
            "hardware": {"cpu": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "device": xr.device_type(), "devices": xr.global_runtime_device_count(), "hosts": xr.process_count()},
            "seed": self.args.seed, "iterations": iteration, "timesteps": step, "seconds": seconds,
            "sps": trained / max(seconds - self.before, 1e-9), "sps_steady": (step - steady_step) / max(seconds - steady_time, 1e-9),
            "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "xla": {"compiled_graphs": count, "compile_seconds": compile_seconds, "compiled_after_warm_up": late},
            "phases": dict(self.phases), "final": {key: value for key, value in self.row.items() if key.startswith(("episodic", "env/", "losses/"))},
            "exit_reason": exit_reason,
        }  # fmt: skip
        with self.tolerate("profile"):
            self.export_trace()
        if self.live:
            self.live.stop()
        with self.tolerate("metrics.json"):
            write_atomically(f"{self.folder}/metrics.json", json.dumps(metrics, indent=1).encode())
        for closing in ("jsonl", "writer"):
            with self.tolerate(closing):
                getattr(self, closing).close()
        with self.tolerate("metrics.jsonl"):
            self.upload_metrics()
        if self.args.track and "W&B" not in self.failed:
            with self.tolerate("W&B"):
                import wandb

                wandb.finish()
        failed = "" if exit_reason in ("completed", "time_limit", "sigint", "sigterm") else "error: "
        speed = f"{metrics['sps']:.0f} steps/s ({metrics['sps_steady']:.0f} after the start)"
        print(f"{failed}{exit_reason}: {step} steps in {seconds:.1f} s, {speed}; {self.folder}", file=sys.stderr)
        warm = "" if late is None else f", {late} of them after the first {WARM_UP} iterations"
        print(f"{count} graphs compiled in {compile_seconds:.1f} s{warm}", file=sys.stderr)


class SilentRun(Run):
    """A Run on the hosts that write and show nothing."""

    def __init__(self, args: Args, agent: Agent, envs: Envs, resumed: dict | None):
        self.args, self.envs, self.start, self.live = args, envs, time.perf_counter(), None
        self.before, self.first_iteration = (resumed["seconds"], resumed["iteration"]) if resumed else (0.0, 0)
        self.trained_before, self.started_at = resumed.get("trained", self.before) if resumed else 0.0, None
        self.phases = defaultdict(float)

    def log(self, *_):
        self.envs.episodes.clear()
        self.envs.logs.clear()

    def nothing(self, *_):
        pass

    profiler_step = save_checkpoint = close = nothing

    def started(self):
        self.started_at = time.perf_counter()


def preset_hint(args: Args) -> str:
    """A line about tuned settings for this environment, if there are some beside this script and they were not asked for."""
    preset = os.path.join(os.path.dirname(os.path.abspath(__file__)), "benchmark", "configs", f"{args.env_id}.yaml")
    if args.config or args.env_id == Args.env_id or not os.path.exists(preset):
        return ""
    return f"hint: settings tuned for {args.env_id}: --config {os.path.relpath(preset)}\n"


def weighted_mean(pairs: list[tuple[float, float]]) -> float:
    values, weights = zip(*pairs)
    return float(np.average(values, weights=weights)) if sum(weights) else float(np.mean(values))


def serialized(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(tree_map_only(torch.Tensor, torch.Tensor.cpu, content), buffer)
    return buffer.getvalue()


def json_step(line: bytes) -> float:
    """The step of a metrics line; infinity for a line that a kill cut short."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")


def git_commit() -> str | None:
    with contextlib.suppress(OSError):
        command = ["git", "-C", os.path.dirname(os.path.abspath(__file__)), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    return None


def cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "") or platform.processor()
    return platform.processor()


def dashboard(args: Args, row: dict[str, float], folder: str):
    """What a terminal shows while training."""
    from rich.columns import Columns
    from rich.console import Group
    from rich.padding import Padding
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    def table(title: str, rows: dict[str, str]) -> Table:
        result = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
        result.add_row(f"[bold cyan]{title}")
        for key, value in rows.items():
            result.add_row(key, value)
        return result

    def number(value: float) -> str:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"

    def clock(seconds: float) -> str:
        return f"{int(seconds) // 3600}:{int(seconds) % 3600 // 60:02d}:{int(seconds) % 60:02d}"

    left = (args.total_timesteps - row["step"]) / max(row["sps"], 1e-9)
    if args.time_limit is not None:
        left = min(left, args.time_limit - row["time"] + row["startup"])
    system = {"CPU": f"{psutil.cpu_percent():.0f} %", "RAM": f"{psutil.Process().memory_info().rss / 2**30:.2f} GiB"}
    if args.device == "cuda":
        with contextlib.suppress(Exception):
            system |= {"GPU": f"{torch.cuda.utilization()} %", "VRAM": f"{torch.cuda.memory_reserved() / 2**30:.2f} GiB"}
    summary = {
        "steps": f"{row['step']:,} of {args.total_timesteps:,}",
        "steps/s": number(row["sps"]),
        "time": clock(row["time"]),
        "left": clock(max(left, 0)),
    }
    shares = {
        name[5:-6]: f"{100 * value:.0f} %" for name, value in row.items() if name.startswith("time/") and name.endswith("_share")
    }
    episodes = {key: number(row[key]) for key in row if key.startswith("episodic")}
    episodes |= {key[4:]: number(row[key]) for key in row if key.startswith("env/") and key != "env/n"}
    losses = {key[7:]: number(row[key]) for key in row if key.startswith("losses/")}
    sections = {"run": summary | system, "time": shares, "episodes": dict(list(episodes.items())[:12]), "losses": losses}
    tables = [table(title, rows) for title, rows in sections.items() if rows]
    bar = ProgressBar(total=args.total_timesteps, completed=min(row["step"], args.total_timesteps))
    # Padding ends the bar's line, which ProgressBar does not.
    return Panel(Group(Padding(bar, 0), Columns(tables, padding=(0, 2))), title=f"{args.exp_name} · {args.env_id}", subtitle=folder)


# PLUMBING: evaluation, command line ---------------------------------------------------------------------------------------


def evaluate(args: Args) -> int:
    """Plays --eval-episodes episodes and prints their statistics: a line on stderr, JSON on stdout."""
    device = start_devices(args)
    seed_everything(args.seed)
    if args.render:
        if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
            raise UsageError("--render: no display here; use xvfb-run, or leave --render out")
        if (
            "render_mode" in inspect.signature(environment_class(args.env_id)).parameters
            or args.env_id.removeprefix("puffer_") not in ocean_environments()
        ):
            args.env.setdefault("render_mode", "human")
    args.vec_backend = "auto"
    envs = make_envs(args, args.seed, num_envs=1 if args.render else min(args.eval_episodes, args.num_envs))
    agent = Agent(envs.single_observation_space, envs.single_action_space, args.hidden_size, args.precision).to(device)
    path = args.evaluate
    if not path.endswith((".pt", ".bin")):
        folder = find_run(path, args.output_dir, "--evaluate")
        path = f"{folder}/{load_checkpoint(folder, '--evaluate')['model_file']}"
    load_weights(agent, path, "--evaluate")
    h, c = torch.zeros((2, envs.num_agents, args.hidden_size), device=device).unbind()
    act = torch_xla.compile(policy_step, full_graph=True)
    # Each agent's first episodes, exactly --eval-episodes in all: taking whatever ends first would favour short episodes.
    n = envs.num_agents
    quota = args.eval_episodes // n + (np.arange(n) < args.eval_episodes % n)
    counts, finished, stop = np.zeros(n, int), [], StopSignals()
    stop.listen()

    def logged_episodes() -> float:  # some C environments log episodes without ever flagging an end
        return sum(count for count, _ in envs.logs.get("n", ()))

    envs.reset()
    with torch.no_grad():
        weight, bias = agent.lstm_weights()
        while (counts < quota).any() and not stop.signum and (finished or logged_episodes() < args.eval_episodes):
            step = envs.receive()
            noise = agent.sampling_noise(envs.num_agents, deterministic=args.deterministic).to(device)
            observations, dones = torch.as_tensor(step.observations, device=device), torch.as_tensor(step.dones, device=device)
            actions, _, _, h, c = act(agent, observations, dones, h, c, weight, bias, noise)
            for number, episodic_return, length in envs.episodes:
                if counts[number] < quota[number]:
                    counts[number] += 1
                    finished.append((episodic_return, length))
            envs.episodes.clear()
            if args.render:
                envs.vecenv.driver_env.render()
            envs.send(actions.cpu().numpy())
    envs.close()
    result = {
        "checkpoint": path,
        "env_id": args.env_id,
        "seed": args.seed,
        "deterministic": args.deterministic,
        "episodes": len(finished),
    }
    for name, data in zip(("episodic_return", "episodic_length"), np.array(finished, float).reshape(-1, 2).T):
        if len(data):
            error = float(data.std(ddof=1) / len(data) ** 0.5) if len(data) > 1 else 0.0
            result[name] = {"mean": float(data.mean()), "min": float(data.min()), "max": float(data.max()), "standard_error": error}
            print(
                f"{name}: {data.mean():.2f} ± {error:.2f} (standard error), from {data.min():g} to {data.max():g}, {len(data)} episodes",
                file=sys.stderr,
            )
    result["env"] = {key: weighted_mean(pairs) for key, pairs in envs.logs.items()}
    print(json.dumps(result))
    return 128 + stop.signum if stop.signum else 0


LIMITS = {  # argument: (least, most), so that a slip of the hand is caught before an hour of training
    "seed": (0, 2**31 - 1), "num_envs": (1, 2**31 - 1), "num_workers": (1, 2**31 - 1), "num_steps": (1, 2**31 - 1), "minibatch_size": (1, 2**31 - 1), "max_minibatch_size": (1, 2**31 - 1),
    "total_timesteps": (1, None), "hidden_size": (1, 2**20), "log_interval": (1, None), "checkpoint_interval": (1, None), "keep_checkpoints": (2, None),
    "eval_episodes": (1, 2**31 - 1), "time_limit": (0, None), "learning_rate": (0, None), "adam_learning_rate": (0, None), "momentum": (0, 0.9999), "gamma": (0, 1),
    "gae_lambda": (0, 1), "update_epochs": (0, 1000), "clip_coef": (0, None), "vf_clip_coef": (0, None), "vf_coef": (0, None), "ent_coef": (0, None),
    "max_grad_norm": (0, None), "target_kl": (0, None), "vtrace_rho_clip": (0, None), "vtrace_c_clip": (0, None), "prio_alpha": (0, None), "prio_beta0": (0, 1),
}  # fmt: skip


def check_args(args: Args):
    for name, (least, most) in LIMITS.items():
        value, flag = getattr(args, name), "--" + name.replace("_", "-")
        if value is not None and not (least <= value and (most is None or value <= most)):
            raise UsageError(f"{flag} {value}: must be {f'at least {least}' if most is None else f'between {least} and {most}'}")
    if not args.output_dir:
        raise UsageError("--output-dir: is empty; a dot is the current folder")
    if args.minibatch_size % args.num_steps:
        raise UsageError(
            f"--minibatch-size {args.minibatch_size}: must be a multiple of --num-steps {args.num_steps}, since minibatches are whole segments"
        )
    if args.minibatch_size > args.max_minibatch_size and (
        args.minibatch_size % args.max_minibatch_size or args.max_minibatch_size % args.num_steps
    ):
        raise UsageError(
            f"--max-minibatch-size {args.max_minibatch_size}: must divide --minibatch-size {args.minibatch_size} and be a multiple of --num-steps {args.num_steps}"
        )
    if args.precision == "auto":  # XLA's CPU device emulates bfloat16
        args.precision = "bfloat16" if args.device == "tpu" else "float32"
    if args.learning_rate is None:  # bfloat16 rounds Muon's steps; on Breakout float32 wants longer ones for the same score
        args.learning_rate = 0.015 if args.precision == "bfloat16" else 0.025


def check_sizes(args: Args, num_agents: int):
    if args.minibatch_size > num_agents * args.num_steps:
        raise UsageError(
            f"--minibatch-size {args.minibatch_size}: more than the {num_agents * args.num_steps} steps of a batch ({num_agents} agents x --num-steps {args.num_steps})"
        )


def config_to_flags(config: Any, source: str, strict: bool) -> tuple[list[str], dict[str, Any]]:
    """A mapping of arguments as command-line flags, and the environment's arguments.

    Not strict, the mapping is of a run, maybe of another script of this family, maybe of another machine: keys that are unknown
    here are skipped, and so is the device.
    """
    if not isinstance(config, dict):
        raise UsageError(f"{source}: not a mapping of arguments")
    defaults = {item.name: getattr(Args(), item.name) for item in fields(Args)}
    flags, env, skipped = [], {}, []
    for key, value in config.items():
        name = str(key).replace("-", "_")
        if name not in defaults:
            if strict:
                near = difflib.get_close_matches(name, defaults, n=1)
                raise UsageError(f"{source}: unknown key {key!r}" + (f"; did you mean {near[0]}?" if near else ""))
            skipped.append(str(key))
            continue
        if name == "env":
            if not isinstance(value, dict):
                raise UsageError(f"{source}: env must be a mapping of the environment's arguments")
            env |= value
        elif name in ("config", "resume", "evaluate") or value is None or (name == "device" and not strict):
            continue
        elif isinstance(defaults[name], bool):
            if not isinstance(value, bool):
                raise UsageError(f"{source}: {key} must be true or false, not {value!r}")
            flags.append(("--" if value else "--no-") + name.replace("_", "-"))
        else:
            flags.append(f"--{name.replace('_', '-')}={value}")
    if skipped:
        warn(f"{source}: unknown here, so ignored: {', '.join(skipped)}")
    return flags, env


def parse_value(flag: str, text: str) -> Any:
    """A YAML value; 1e-3 is a number too, which YAML 1.1 writes 1.0e-3. Raises UsageError."""
    try:
        value = yaml.safe_load(text)
    except Exception as error:  # not only YAMLError: 2001-99-99 is a ValueError, !!bool x a KeyError
        raise UsageError(f"{flag} {text}: not a YAML value") from error
    with contextlib.suppress(ValueError):
        return float(value) if isinstance(value, str) else value
    return value


def parse_args(argv: list[str]) -> tuple[Args, dict | None]:
    """Defaults, then --config (or the run that --resume or --evaluate names), then the command line. Raises UsageError."""
    given, env, rest = {}, {}, list(argv)
    flags = []
    while rest:  # --env.KEY VALUE is ours; tyro gets all of them as one dictionary
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name.startswith("--env."):
            if not equals and not rest:
                raise UsageError(f"{name}: needs a value")
            env[name[6:].replace("-", "_")] = parse_value(name, value if equals else rest.pop(0))
            continue
        flags.append(word)
        if name in ("--config", "--resume", "--evaluate", "--output-dir", "--output_dir"):
            given[name[2:].replace("-", "_")] = value if equals else (rest[0] if rest else "")
    base, base_env, resumed = [], {}, None
    if config := given.get("config"):
        text = read_bytes(config, "--config")
        try:
            loaded = yaml.safe_load(text)
        except Exception as error:  # not only YAMLError, see `parse_value`
            raise UsageError(f"--config {config}: not YAML ({' '.join(str(error).split())[:120]})") from error
        base, base_env = config_to_flags(loaded, f"--config {config}", strict=True)
    elif resume := given.get("resume"):
        resumed = load_checkpoint(find_run(resume, given.get("output_dir", Args.output_dir), "--resume"), "--resume")
        base, base_env = config_to_flags(resumed["config"], f"--resume {resume}", strict=False)
    elif path := given.get("evaluate"):
        with contextlib.suppress(Exception):  # a lone file has no configuration beside it
            folder = find_run(path, given.get("output_dir", Args.output_dir), "--evaluate")
            base, base_env = config_to_flags(
                yaml.safe_load(read_bytes(f"{folder}/config.yaml", "--config")), f"{folder}/config.yaml", strict=False
            )
    if given.get("resume") and resumed is None:
        raise UsageError("--resume: cannot be combined with --config; the run's own configuration is used")
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            args = tyro.cli(Args, args=base + flags, description=__doc__)
    except SystemExit as error:
        if error.code == 0:
            raise
        lines = [line.strip("╭╮╰╯│─ ") for line in messages.getvalue().splitlines()[1:]]
        text = " ".join(line for line in lines if line and not line.startswith("For full helptext"))
        raise UsageError(f"{text} (see --help)") from error
    args.env = base_env | {key: parse_value(f"--env.{key}", value) for key, value in args.env.items()} | env
    check_args(args)
    return args, resumed


def main() -> int:
    try:
        args, resumed = parse_args(sys.argv[1:])
        return evaluate(args) if args.evaluate else train(args, resumed)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read stdout has gone (`--help | head`); the interpreter's last flush must not fail too
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except WorkerDied as error:  # while starting; train() reports one that dies later
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "can't allocate memory" not in str(error):
            raise
        sizes = "--num-envs, --num-steps, --hidden-size or --max-minibatch-size"
        print(f"error: out of memory, lower {sizes}: {str(error).partition(chr(10))[0]}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
