"""PPO with an LSTM on PufferLib's C environments, on many GPUs and hosts: `ppo_lstm_puffer.py` under torchrun.

    torchrun --standalone --nproc-per-node=2 ppo_lstm_puffer_ddp.py --env-id breakout          # two processes on this machine
    torchrun --standalone --nproc-per-node=8 --max-restarts=3 ppo_lstm_puffer_ddp.py           # restarts and resumes by itself
    torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 ppo_lstm_puffer_ddp.py   # on each of two hosts
    python ppo_lstm_puffer_ddp.py --env-id breakout                                            # one process, no torchrun

Each rank steps its share of the environments and trains on its share of every minibatch; gradients are summed. Every number
on the command line is that of all ranks together, so training does not depend on how many there are. Rank 0 writes and logs.
Hosts must share --output-dir if a run is to be resumed there. `diff ppo_lstm_puffer.py ppo_lstm_puffer_ddp.py` shows all that is different.
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
import pickle
import platform
import random
import resource
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
import warnings
from collections import defaultdict
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import timedelta
from typing import Any, Literal

if __name__ == "__main__":
    # OpenMP's threads wait for each other awake for some microseconds, then asleep: with its default, milliseconds, one other
    # program on the same cores takes nine tenths of the speed.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    main_pid = os.getpid()

    def end_at_once(signum, _):
        """SIGINT and SIGTERM until the first update is done: there is nothing to save, and what compiles would take its time."""
        try:
            if os.getpid() == main_pid:  # not a worker that was just forked
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                with contextlib.suppress(NameError):  # psutil is not there yet: nor are children
                    for child in psutil.Process().children(recursive=True):  # compilers, environment workers
                        with contextlib.suppress(psutil.Error):
                            child.kill()
                show_cursor = "\033[?25h\n" if os.isatty(2) else ""  # the spinner hid it
                os.write(2, f"{show_cursor}{signal.Signals(signum).name}: ended while starting, nothing is lost\n".encode())
        finally:
            os._exit(128 + signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, end_at_once)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: if torchrun is killed, save and end

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

RANK, WORLD_SIZE, LOCAL_RANK = (
    int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
)


@dataclass
class Args:
    """PPO + LSTM on PufferLib, Gymnasium and PettingZoo environments."""

    exp_name: str = "ppo_lstm_puffer_ddp"
    """the name of this experiment"""
    seed: int = 1
    """seed of everything: Python, numpy, torch, the C environments, and the workers"""
    torch_deterministic: bool = True
    """deterministic cuDNN kernels (the image encoder on CUDA); runs on a CPU repeat to the bit either way"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to train; auto takes CUDA where there is a GPU"""
    track: bool = False
    """send metrics to Weights and Biases too"""
    wandb_project_name: str = "ppo-lstm-puffer"
    """the W&B project"""
    wandb_entity: str | None = None
    """the W&B entity (team)"""

    dist_timeout: float = 600.0
    """seconds that a rank waits for the others before it gives up: more than compiling takes, less than a night"""

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
    """stop the update early when approx_kl passes this (reads one number per minibatch: slower on a GPU)"""
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
    """of the matrix products, Muon's too; auto takes bfloat16 where the hardware multiplies it faster than float32. Parameters, LSTM cell state, heads and losses stay float32 (on CUDA float32 means TF32)"""
    compile: bool = True
    """torch.compile the policy step and the update (needs a C++ compiler); eager always works"""
    compile_mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """torch.compile's mode; the second tries more kernels, on CUDA"""
    cuda_graphs: bool = False
    """record each step of the policy as a CUDA graph, and replay it (experimental)"""

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
    """write a torch.profiler trace of a few iterations to the run's folder (for Perfetto or TensorBoard)"""
    detect_anomaly: bool = False
    """torch's anomaly detection: slow, names the operation that made a NaN"""


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


def tanh(x: torch.Tensor) -> torch.Tensor:
    """tanh through the sigmoid, whose vectorized exponential is three times faster on a CPU; absolute error below 1e-7."""
    return 2 * torch.sigmoid(2 * x) - 1


UNROLL = 8  # steps of the recurrence that are compiled as one function; 32 took four times as long to compile and ran hardly faster


def lstm_forward(x, h, c, dones, weight, bias):
    """The LSTM over T steps, its state set to zero wherever dones is 1.

    x (T, N, F); h, c (N, H) float32: the state before the first step; dones (T, N); weight (4H, F + H); bias (4H).
    Returns the outputs (T, N, H), the state after the last step, and per step what the backward pass needs: lists of
    the inputs [x | h] (N, F + H), the gates' activations i, f, g, o (N, 4H) and the cell states before it (N, H).
    """
    keep = (1 - dones).unsqueeze(-1)
    outputs, inputs, gates, cells = [], [], [], []
    for t in range(len(x)):
        inputs.append(torch.cat((x[t], (h * keep[t]).to(x.dtype)), dim=1))
        i, f, g, o = (torch.mm(inputs[t], weight.t()).float() + bias).chunk(4, dim=1)
        i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), tanh(g), torch.sigmoid(o)
        gates.append(torch.cat((i, f, g, o), dim=1).to(x.dtype))
        cells.append(c)
        c = f * (c * keep[t]) + i * g
        h = o * tanh(c)
        outputs.append(h.to(x.dtype))
    return torch.stack(outputs), h, c, (inputs, gates, cells)


def lstm_backward(doutputs, dh, dc, gates, cells, dones, weight_hh):
    """The chain rule through `lstm_forward`, its weights' gradients aside.

    doutputs (T, N, H): gradients of the outputs; dh, dc (N, H): of the last state; gates, cells: its lists, the last cell
    state appended. Returns the gradients of the gates' pre-activations (T, N, 4H), and of the first state.
    """
    keep, dgates = (1 - dones).unsqueeze(-1), [None] * len(doutputs)
    for t in reversed(range(len(doutputs))):
        i, f, g, o = gates[t].float().chunk(4, dim=1)
        tanh_c = tanh(cells[t + 1])
        dh = dh + doutputs[t].float()
        dc = dc + dh * o * (1 - tanh_c * tanh_c)
        di, df, dg, do = (
            dc * g * i * (1 - i),
            dc * (cells[t] * keep[t]) * f * (1 - f),
            dc * i * (1 - g * g),
            dh * tanh_c * o * (1 - o),
        )
        dgates[t] = torch.cat((di, df, dg, do), dim=1).to(doutputs.dtype)
        dc = dc * f * keep[t]
        dh = torch.mm(dgates[t], weight_hh).float() * keep[t]
    return torch.stack(dgates), dh, dc


class LSTM(torch.autograd.Function):
    """`lstm_forward` with its gradient for x, weight and bias; the initial state gets none (truncated backpropagation).

    The input's and the weights' gradients are one product over all steps each; only W_hh is left inside the loop.
    """

    @staticmethod
    def forward(ctx, x, h, c, dones, weight, bias):
        outputs, inputs, gates, cells = [], [], [], []
        for x_part, dones_part in zip(x.split(UNROLL), dones.split(UNROLL)):
            output, h, c, saved = lstm_forward(x_part, h, c, dones_part, weight, bias)
            outputs.append(output)
            for steps, part in zip((inputs, gates, cells), saved):
                steps.extend(part)
        ctx.save_for_backward(dones, weight, *inputs, *gates, *cells, c)
        return torch.cat(outputs)

    @staticmethod
    def backward(ctx, doutputs):
        dones, weight, *saved = ctx.saved_tensors
        T = len(doutputs)
        inputs, gates, cells = saved[:T], saved[T : 2 * T], saved[2 * T :]
        N, H = cells[0].shape
        weight_ih, weight_hh = weight[:, :-H], weight[:, -H:].contiguous()
        dh, dc, parts = torch.zeros_like(cells[0]), torch.zeros_like(cells[0]), []
        for t in reversed(range(0, T, UNROLL)):
            part, up_to = slice(t, t + UNROLL), slice(t, t + UNROLL + 1)
            dgates, dh, dc = lstm_backward(doutputs[part], dh, dc, gates[part], cells[up_to], dones[part], weight_hh)
            parts.insert(0, dgates)
        dgates = torch.cat(parts).flatten(0, 1)
        dx = torch.mm(dgates, weight_ih).view(T, N, -1)
        dbias = torch.mm(dgates.new_ones(1, len(dgates)), dgates).squeeze(0)  # a product sums bfloat16 ten times faster than sum()
        return dx, None, None, None, torch.mm(dgates.t(), torch.cat(inputs)), dbias.float()


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
    advantages = torch.empty_like(delta)
    advantage = torch.zeros_like(next_value)
    for t in reversed(range(len(delta))):
        advantage = torch.addcmul(delta[t], trace[t], advantage, out=advantages[t])
    return advantages


def sample_segments(advantages, uniform, alpha):
    """Prioritized segments (Schaul et al. 2016, proportional variant), from those of this rank: p_i ~ (sum_t |A_ti|)^alpha.

    Draws B indices by stratified sampling (their appendix B.2.1: one draw from each of B equal slices of the total
    probability), so with alpha = 0 no segment comes twice in a minibatch. uniform (B): random numbers in [0, 1).
    Returns the indices (B) int64, their priorities (B) and the sum of all priorities of this rank.
    """
    priorities = advantages.abs().sum(0) ** alpha
    priorities = priorities + 1e-6 * priorities.mean() + 1e-12  # all advantages zero: uniform
    probabilities = priorities / priorities.sum()
    points = (torch.arange(len(uniform), device=uniform.device) + uniform) / len(uniform)
    index = torch.searchsorted(probabilities.double().cumsum(0), points.double()).clamp_(max=len(probabilities) - 1)
    return index, priorities[index], priorities.sum()


def draw_minibatch(values, rewards, dones, valid, ratio, uniform, args):
    """Advantages from the newest values and ratios, and this rank's share of a minibatch of segments drawn by them.

    values, dones, valid (T + 1, N), rewards, ratio (T, N): see `compute_advantages`; uniform (B): see `sample_segments`.
    Returns what `weigh_minibatch` needs, the summary (4) that it needs of every rank, and the advantages of all segments (T, N).
    """
    values, next_value, valid = values[:-1], values[-1], valid[:-1]
    all_advantages = compute_advantages(
        values, next_value, rewards, dones, valid, ratio, args.gamma, args.gae_lambda, args.vtrace_rho_clip, args.vtrace_c_clip
    )
    segments, priorities, total = sample_segments(all_advantages, uniform, args.prio_alpha)
    advantages, values, weight = all_advantages[:, segments], values[:, segments], valid[:, segments]
    count = weight.sum()
    mean = (weight * advantages).sum() / count.clamp_min(1)
    variance = (weight * (advantages - mean) ** 2).sum() / count.clamp_min(1)
    summary = torch.stack((total, count, mean, variance))
    return segments, priorities, total, advantages, advantages + values, values, weight, summary, all_advantages


def weigh_minibatch(segments, priorities, total, advantages, returns, values, weight, summaries, num_segments, beta, args):
    """Makes one minibatch of the ranks' shares: priorities, weights and the advantages' normalization are those of all together.

    summaries (ranks, 4); num_segments: how many segments of all ranks the minibatch was drawn from. Drawing from all of them would
    take from each rank in proportion to its priorities. Each takes an equal number instead, and its steps weigh in proportion.
    Returns, of this rank's segments, what `ppo_loss` needs; weight sums to 1 over all ranks, so losses and gradients are summed.
    """
    totals, counts, means, variances = summaries.unbind(1)
    share = totals * counts
    share = share / share.sum().clamp_min(1e-30)
    mean = (share * means).sum()
    variance = (share * (variances + (means - mean) ** 2)).sum()
    if args.norm_adv:
        advantages = (advantages - mean) / (variance.sqrt() + 1e-8)
    importance = (num_segments * priorities / totals.sum()) ** -beta
    weight = weight * total / (totals * counts).sum().clamp_min(1e-30)
    return segments, advantages * importance, returns, values, weight


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


LOSSES = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "importance", "stopping", "grad_norm")


def policy_step(agent, observations, dones, h, c, weight, bias, noise):
    """Act on observations (N, *obs), resetting the LSTM where dones (N) is 1. Returns actions, log-probabilities, values, h, c."""
    hidden, h, c, _ = lstm_forward(agent.encode(observations[None]), h, c, dones[None], weight, bias)
    logits, values = agent.heads(hidden[0])
    actions, logprobs = agent.sample(logits, noise)
    return actions, logprobs, values, h, c


def act(agent, observations, dones, h, c, weight, bias, noise, actions, logprobs, values):
    """`policy_step` in place: writes actions, logprobs, values and the next h and c."""
    for stored, result in zip(
        (actions, logprobs, values, h, c), policy_step(agent, observations, dones, h, c, weight, bias, noise)
    ):
        stored.copy_(result)


def minibatch_loss(agent, observations, h, c, dones, actions, logprobs, segments, advantages, returns, values, weight, args):
    """`ppo_loss` of these segments (B) of the batch: observations (T, N, *obs), h and c (N, H) before them, dones, actions, logprobs."""
    features = agent.encode(observations[:, segments])
    hidden = LSTM.apply(features, h[segments], c[segments], dones[:, segments], *agent.lstm_weights())
    # Values are clipped around the newest ones, as PuffeRL does.
    return ppo_loss(agent, hidden, actions[:, segments], logprobs[:, segments], advantages, returns, values, weight, args)


def newton_schulz(updates: torch.Tensor, dtype: torch.dtype, steps: int = 5) -> torch.Tensor:
    """Replaces the singular values of matrices (batch, rows, columns) by ones, roughly: the quintic iteration of Muon
    (Jordan et al. 2024), x <- (a + b G + c G^2) x with G = x x'. In float32 the factors are multiplied up on the small matrix G,
    and x comes last: half the work. bfloat16 has not the digits for that. Returns the same shape, of this dtype.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = updates.shape[1] > updates.shape[2]
    x = (updates.mT if tall else updates).to(dtype)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    if dtype == torch.float32 and x.device.type == "cpu":  # on CUDA float32 may be TF32, which has not the digits either
        gram = x @ x.mT
        identity = torch.eye(gram.shape[1], device=x.device).expand_as(gram)
        product = identity
        for _ in range(steps):
            factor = torch.baddbmm(a * identity + b * gram, gram, gram, alpha=c)
            product, gram = factor @ product, factor @ gram @ factor
        x = product @ x
    else:
        for _ in range(steps):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
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
    adam = functools.partial(torch.optim.Adam, eps=1e-8, fused=True, capturable=device.type == "cuda")
    # Learning rates are tensors: a CUDA graph has no other way to see them change.
    lr, adam_lr = (torch.tensor(rate, device=device) for rate in (args.learning_rate, args.adam_learning_rate))
    if args.optimizer == "adam":
        return [adam(agent.parameters(), lr=lr, betas=(args.momentum, 0.999))]
    matrices = [p for p in agent.parameters() if p.ndim == 2 and p is not getattr(agent, "actor_logstd", None)]
    rest = [p for p in agent.parameters() if not any(p is m for m in matrices)]
    return [Muon(matrices, lr, args.momentum, agent.dtype), adam(rest, lr=adam_lr)]


class Recorded:
    """A function that works in place, on the same tensors at every call: recorded as a CUDA graph at the fourth, then replayed."""

    def __init__(self, function):
        self.function, self.calls, self.graph, self.results = function, 0, torch.cuda.CUDAGraph(), None

    def __call__(self):
        self.calls += 1
        if self.calls < 4:  # what it compiles and allocates once is no part of the graph
            return self.function()
        if self.calls == 4:
            with torch.cuda.graph(self.graph):
                self.results = self.function()
        self.graph.replay()
        return self.results


def anneal(schedule: str, progress: float) -> float:
    """The factor on the learning rate after this share (0 to 1) of training."""
    progress = min(progress, 1.0)
    return {"none": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + np.cos(np.pi * progress))}[schedule]


# TRAINING -----------------------------------------------------------------------------------------------------------------


def train(args: Args, job: dist.Store, resumed: dict | None = None) -> int:
    """Trains until --total-timesteps, --time-limit or a signal. Returns the exit code."""
    device = torch.device(args.device)
    seed = args.seed + (resumed["iteration"] if resumed else 0) + 1_000_003 * RANK
    seed_everything(seed, args.torch_deterministic)
    if device.type == "cpu":
        keep_freed_memory()
    all_args, args = args, share_of(args)
    envs = make_envs(args, seed)
    T, N = args.num_steps, envs.num_agents
    check_sizes(all_args, N * WORLD_SIZE)
    num_segments = args.minibatch_size // T
    num_chunks = -(-args.minibatch_size // args.max_minibatch_size)
    num_minibatches = max(1, round(args.update_epochs * N * T / args.minibatch_size))

    agent = Agent(envs.single_observation_space, envs.single_action_space, args.hidden_size, args.precision).to(device)
    if args.load_weights and not resumed:
        load_weights(agent, args.load_weights, "--load-weights")
    parameters = list(agent.parameters())
    with other_ranks():
        for parameter in parameters:
            dist.broadcast(parameter.data, src=0)
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(choose_threads(args, sum(p.numel() for p in parameters)))
    optimizers = make_optimizers(agent, args)
    learning_rates = [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    if args.compile:
        compile_hot_functions(args.compile_mode)

    # STORAGE: time first. Row T is what follows the segment: its observations, dones and valid become row 0 of the next, its
    # values are the bootstrap, its actions and logprobs count for nothing.
    observations = torch.zeros((T + 1, N, *envs.single_observation_space.shape), dtype=envs.torch_dtype, device=device)
    dones = torch.ones((T + 1, N), device=device)
    valid = torch.ones((T + 1, N), device=device)
    actions = torch.zeros((T + 1, N, *envs.action_shape), dtype=torch.float32 if agent.continuous else torch.int64, device=device)
    logprobs, values = (torch.zeros((T + 1, N), device=device) for _ in range(2))
    rewards, ratio = (torch.zeros((T, N), device=device) for _ in range(2))
    h, c, start_h, start_c = (torch.zeros((N, args.hidden_size), device=device) for _ in range(4))
    # What else changes from one iteration to the next is written in place too, so that CUDA graphs find it.
    noise = agent.sampling_noise(T + 1, N, device=device)
    lstm_weights = [weight.detach() for weight in agent.lstm_weights()]
    beta, statistics = torch.zeros((), device=device), torch.zeros(len(LOSSES), device=device)
    stopping = torch.zeros(1, device=device)  # 1 if this rank was told to stop

    def put(array: np.ndarray) -> torch.Tensor:
        """To the device; to a GPU from pinned memory, without waiting."""
        tensor = torch.as_tensor(array)
        return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

    def receive(t: int) -> slice:
        """Stores what the environments sent: the observation and done flags of step t, and the reward of step t - 1."""
        received = envs.receive()
        agents = received.agents
        observations[t, agents] = put(received.observations)
        dones[t, agents] = put(received.dones)
        valid[t, agents] = put(received.valid)
        if t > 0:
            rewards[t - 1, agents] = put(received.rewards.clip(-1, 1) if args.clip_rewards else received.rewards)
        return agents

    @torch.no_grad()
    def act_at(t: int, rows: slice):
        """Step t of the segment for some agents. Step T is for its value only and leaves h and c as they are."""
        state = (h[rows], c[rows]) if t < T else (h[rows].clone(), c[rows].clone())
        stored = actions[t, rows], logprobs[t, rows], values[t, rows]
        act(agent, observations[t, rows], dones[t, rows], *state, *lstm_weights, noise[t, rows], *stored)

    @functools.cache
    def step_of(t: int, first: int, last: int):
        """`act_at` as a function without arguments, on a GPU recorded if so told."""
        function = functools.partial(act_at, t, slice(first, last))
        return Recorded(function) if args.cuda_graphs else function

    def learn(*minibatch):
        """The gradients of the parameters on a chunk of a minibatch, and what else `minibatch_loss` returns."""
        batch = (observations[:T], start_h, start_c, dones[:T], actions[:T], logprobs[:T])
        loss, *results = minibatch_loss(agent, *batch, *minibatch, args)
        return torch.autograd.grad(loss, parameters), *results

    def draw():
        """This rank's share of a minibatch for `weigh_minibatch`, the ranks' summaries with only its own filled in, and the advantages."""
        uniform = torch.rand(num_segments, device=device)
        *drawn, summary, advantages = draw_minibatch(values, rewards, dones, valid, ratio, uniform, args)
        summaries = torch.zeros((WORLD_SIZE, len(summary)), device=device)
        summaries[RANK] = summary
        return drawn, summaries, advantages

    def update(drawn, summaries, last: bool):
        """Takes an optimizer step on a minibatch. Returns the next one, as `draw` does, unless it was the last; and statistics."""
        minibatch = weigh_minibatch(*drawn, summaries, N * WORLD_SIZE, beta, args)
        chunks = map(learn, *(tensor.chunk(num_chunks, dim=-1) for tensor in minibatch))
        gradients, logratios, newvalues, losses = zip(*chunks)
        segments = minibatch[0]
        ratio[:, segments], values[:T, segments] = torch.cat(logratios, 1).exp(), torch.cat(newvalues, 1)
        # The next minibatch needs the new values and ratios but not the new parameters. So one sum over ranks does for all:
        # the gradients, the losses, whether to stop, and the next minibatch's summaries.
        drawn, summaries, _ = (None, torch.zeros_like(summaries), None) if last else draw()
        flat = torch.cat([sum(parts).flatten() for parts in zip(*gradients)] + [sum(losses), stopping, summaries.flatten()])
        with phase("reduce"):
            sum_over_ranks(flat)
        *gradients, losses, summaries = flat.split([*(p.numel() for p in parameters), len(LOSSES) - 1, summaries.numel()])
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient.view_as(parameter)
        grad_norm = nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
        return drawn, summaries.view(WORLD_SIZE, -1), torch.cat((losses, grad_norm[None]))

    iteration, step = (resumed["iteration"], resumed["step"]) if resumed else (0, 0)
    if resumed:
        load_state_dict(agent, resumed["model"], "--resume")
        restore_optimizers(optimizers, resumed["optimizers"], args.optimizer)
        states = [resumed["rng"], *resumed["rng"].get("other_ranks", [])]
        if len(states) > RANK:  # a rank that the checkpoint does not know keeps the seed it has
            restore_rng(states[RANK])
    num_iterations = -(-args.total_timesteps // (N * T * WORLD_SIZE))
    if iteration >= num_iterations:
        raise UsageError(
            f"--resume: this run is complete at {step} steps; give a larger --total-timesteps than {args.total_timesteps}"
        )
    run = (Run if RANK == 0 else SilentRun)(all_args, agent, envs, resumed)
    phase = run.phase
    if RANK == 0:
        job.set("run", run.folder)  # where the ranks go on if torchrun restarts them
    stop, stopped = StopSignals(), False

    try:
        envs.reset()
        groups = [receive(0) for _ in range(envs.num_groups)]  # which agents act together; two groups are double-buffered
        while iteration < num_iterations and not stopped:
            # ROLLOUT: T steps of every agent with the current policy. The state that the segment starts from is kept.
            run.profiler_step(iteration)
            start_h.copy_(h), start_c.copy_(c)
            noise.copy_(agent.sampling_noise(T + 1, N, device=device))
            with torch.no_grad():
                for stored, weight in zip(lstm_weights, agent.lstm_weights()):
                    stored.copy_(weight)
            for t in range(T + 1):  # T steps, and v_T: the carried state sees the next observation
                for rows in groups:
                    if t > 0:
                        with phase("env"):
                            receive(t)
                    with phase("policy"):
                        step_of(t, rows.start, rows.stop)()
                        chosen = actions[t, rows].cpu().numpy()
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
                ratio.fill_(1)
                stopping.fill_(bool(stop.signum) or run.out_of_time)
                statistics.zero_()
                rollout_values = values[:T].clone()
                drawn, summaries, rollout_advantages = draw()  # ratio 1, the rollout's values
                rollout_returns = rollout_advantages + rollout_values
                with phase("reduce"):
                    sum_over_ranks(summaries)
                for updates in range(1, num_minibatches + 1):
                    drawn, summaries, losses = update(drawn, summaries, last=updates == num_minibatches)
                    statistics += losses
                    if args.target_kl is not None and losses[4] > args.target_kl:
                        break
                losses = dict(zip(LOSSES, (statistics / updates).tolist()))  # the one read of the update: waits for the device
                stopped = losses.pop("stopping") > 0  # some rank was told to: all stop after the same iteration

            if iteration == run.first_iteration:  # all is compiled, and there is something to save
                run.started(), stop.listen()
            iteration, step = iteration + 1, step + N * T * WORLD_SIZE

            # LOGGING, CHECKPOINT
            with phase("log"):
                if broken := [name for name, value in losses.items() if not np.isfinite(value)]:
                    raise TrainingDiverged(
                        f"{', '.join(broken)} not finite at step {step}; the last good checkpoint is kept; "
                        "try a lower --learning-rate, or --detect-anomaly"
                    )
                last = iteration == num_iterations
                if iteration == 1 or iteration % args.log_interval == 0 or last:
                    counted = valid[:T] > 0
                    variances = variance_over_ranks(rollout_advantages[counted]), variance_over_ranks(rollout_returns[counted])
                    losses["explained_variance"] = float(1 - variances[0] / variances[1])
                    gather_logs(envs, run)
                    run.log(iteration, step, losses, float(optimizers[0].param_groups[0]["lr"]))
                if iteration % args.checkpoint_interval == 0 or last:
                    run.save_checkpoint(iteration, step, optimizers, rng_of_all_ranks())
            # The next segment begins where this one ended.
            observations[0], dones[0], valid[0] = observations[T], dones[T], valid[T]
        exit_reason = "completed"
        if stopped and iteration < num_iterations:
            exit_reason = stop.name or ("time_limit" if run.out_of_time else "sigterm")  # which another rank got
        if exit_reason != "completed":
            run.save_checkpoint(iteration, step, optimizers, rng_of_all_ranks())
    except TrainingDiverged as error:
        exit_reason = f"diverged: {error}"
    except WorkerDied as error:
        exit_reason = f"worker died: {error}"
    except RankLost as error:
        exit_reason = f"rank lost: {error}"
    except BaseException as error:
        exit_reason = f"{type(error).__name__}: {error}"
        raise
    finally:
        try:
            envs.close()
        finally:
            run.close(exit_reason, iteration, step)
    if exit_reason.startswith(("diverged", "worker", "rank lost")):
        return 1
    return 128 + stop.signum if stop.signum else 0


# PLUMBING: ranks ----------------------------------------------------------------------------------------------------------


def share_of(args: Args) -> Args:
    """One rank's share of what the arguments say of all. Raises UsageError for a number that does not split."""
    names = ["num_envs", "minibatch_size"] + ["num_workers"] * (args.vec_backend == "multiprocessing")
    for name in names:
        flag, value, unit = "--" + name.replace("_", "-"), getattr(args, name), args.num_steps if name == "minibatch_size" else 1
        if value % (WORLD_SIZE * unit):
            of = f" x --num-steps {unit}" if unit > 1 else ""  # whole segments
            raise UsageError(f"{flag} {value}: does not split over the ranks; must be a multiple of {WORLD_SIZE} ranks{of}")
    if "num_envs" in args.env:
        raise UsageError("--env.num-envs: use --num-envs, which is split over the ranks")
    return replace(args, **{name: getattr(args, name) // WORLD_SIZE for name in [*names, "max_minibatch_size"]})


@contextlib.contextmanager
def other_ranks():
    """Around whatever waits for all ranks: turns what is raised when one does not come into RankLost."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost(f"{str(error).splitlines()[0]} (see --dist-timeout, and what the other ranks say)") from error


def sum_over_ranks(tensor: torch.Tensor):
    """In place; the same to the bit on every rank."""
    with other_ranks():
        dist.all_reduce(tensor)


def variance_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The variance of all ranks' values (n) together; two passes, since one loses digits."""
    sums = torch.stack((torch.ones_like(values).sum(), values.sum())).double()
    sum_over_ranks(sums)
    squares = ((values - sums[1] / sums[0]) ** 2).sum()
    sum_over_ranks(squares)
    return squares / (sums[0] - 1)


def gather_logs(envs, run):
    """Rank 0 gets what the environments of all ranks reported since the last time, and how busy each rank was."""
    busy = sum(run.phases[name] for name in ("env", "policy", "update"))
    peak_rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    ranks = [None] * WORLD_SIZE if RANK == 0 else None
    with other_ranks():
        dist.gather_object((envs.episodes, dict(envs.logs), busy - run.busy, platform.node(), peak_rss_mb), ranks)
    run.busy = busy
    envs.episodes.clear()
    envs.logs.clear()
    if RANK == 0:
        for episodes, logs, *_ in ranks:
            envs.episodes.extend(episodes)
            for key, pairs in logs.items():
                envs.logs[key].extend(pairs)
        run.ranks |= zip(("busy", "hosts", "peak_rss_mb"), map(list, list(zip(*ranks))[2:]))


def rng_of_all_ranks() -> dict:
    """Rank 0's random states, as a run of one process has them, with those of the others."""
    states = [None] * WORLD_SIZE
    with other_ranks():
        dist.all_gather_object(states, rng_state())
    return states[0] | {"other_ranks": states[1:]}


# PLUMBING: environments ---------------------------------------------------------------------------------------------------


class UsageError(Exception):
    """A wrong argument: printed as one line, exit code 2."""

    def __str__(self):  # what it quotes may have newlines and escape sequences
        return "".join(character if character.isprintable() else " " for character in super().__str__())


class TrainingDiverged(Exception):
    """A loss or a gradient is not finite."""


class RankLost(Exception):
    """Another rank has ended, or did not answer in time."""


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


def seed_everything(seed: int, deterministic: bool = True):
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = deterministic
    torch.set_float32_matmul_precision("high")


def choose_threads(args: Args, num_parameters: int) -> int:
    """One thread for each half GFLOP of an update, since threads with less to do wait for each other; at most one for each core
    that this process may use. An update is three products (forward, and two backward) of 2 FLOP per parameter and step."""
    cores = min(len(os.sched_getaffinity(0)), psutil.cpu_count(logical=False) or 2**20)
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/cpu.max") as file:  # a container's quota; "max" is none
        quota, period = map(int, file.read().split())
        cores = min(cores, -(-quota // period))
    work = 6 * num_parameters * min(args.minibatch_size, args.max_minibatch_size)
    return max(1, min(cores, round(work / 0.5e9)))


def keep_freed_memory():
    """glibc returns freed blocks of some megabytes to the system, and clearing them anew cost a fifth of the time of an update."""
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, the most that it takes


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


def compile_whole_files(cpp_builder):
    """Has the C++ compiler write to a temporary name: a start killed meanwhile would leave half a library in torch's cache, and no later one would start."""
    compile = cpp_builder._run_compile_cmd

    def compile_then_rename(command: str, cwd: str):
        words = shlex.split(command)
        output = words.index("-o") + 1
        target, words[output] = words[output], f"{words[output]}.{os.getpid()}"
        compile(shlex.join(words), cwd)
        os.replace(words[output], target)

    cpp_builder._run_compile_cmd = compile_then_rename


def compile_hot_functions(mode: str):
    """Compiles what runs often. Without a C++ compiler, says so and stays eager."""
    from torch._inductor import cpp_builder

    try:
        cpp_builder.get_cpp_compiler()
    except Exception:
        warn("no C++ compiler, so --no-compile; on Debian or Ubuntu: sudo apt-get install g++")
        return
    compile_whole_files(cpp_builder)
    for function in (act, lstm_forward, lstm_backward, draw_minibatch, weigh_minibatch, ppo_loss):
        globals()[function.__name__] = torch.compile(function, mode=mode, dynamic=False)


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
        self.failed, self.live, self.profiler = set(), None, None
        self.busy, self.ranks = 0.0, {"world_size": WORLD_SIZE, "backend": "nccl" if args.device == "cuda" else "gloo"}
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
        threads, fast = torch.get_num_threads(), fast_bfloat16(args.device)
        why = "as told" if fast and args.precision == "float32" else fast or "no fast bfloat16 here"
        machine = f"{args.device}, {threads} thread{'s' * (threads > 1)}, {args.precision} ({why})"
        print(f"{'' if resumed else preset_hint(args)}on: {machine}\nrun: {self.folder}", file=sys.stderr, flush=True)
        starting = "compiling: about half a minute at the first start with these sizes, some seconds at later ones"
        if args.dashboard and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
            self.live = Progress(*columns, console=Console(stderr=True), transient=True)
            self.live.add_task(starting if args.compile else "starting")
            self.live.start()
        elif args.compile:
            print(starting, file=sys.stderr, flush=True)

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
            self.profiler = torch.profiler.profile()
            self.profiler.start()
        elif iteration == self.first_iteration + 8:
            self.export_trace()

    def export_trace(self):
        if self.profiler:
            self.profiler.stop()
            self.profiler.export_chrome_trace(f"{self.local_folder}/trace.json")
            self.profiler = None
            print(f"trace: {self.local_folder}/trace.json (open in https://ui.perfetto.dev)", file=sys.stderr)

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
        busiest = int(np.argmax(self.ranks["busy"]))
        row |= {"ranks/slowest": busiest, "ranks/slowest_share": self.ranks["busy"][busiest] / max(now - self.last_time, 1e-9)}
        elapsed = {name: seconds - self.logged_phases.get(name, 0) for name, seconds in self.phases.items()}
        row |= {f"time/{name}": seconds for name, seconds in elapsed.items()}
        row |= {f"time/{name}_share": seconds / max(now - self.last_time, 1e-9) for name, seconds in elapsed.items()}
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
        cuda = self.args.device == "cuda"
        metrics = {
            "script": os.path.basename(__file__), "arguments": asdict(self.args), "command": sys.argv, "git_commit": git_commit(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__, "gymnasium": gym.__version__, "pufferlib": importlib.metadata.version("pufferlib")},
            "hardware": {"cpu": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "gpu": torch.cuda.get_device_name() if cuda else None},
            "seed": self.args.seed, "iterations": iteration, "timesteps": step, "seconds": seconds,
            "sps": trained / max(seconds - self.before, 1e-9), "sps_steady": (step - steady_step) / max(seconds - steady_time, 1e-9),
            "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "peak_vram_mb": torch.cuda.max_memory_allocated() / 2**20 if cuda else None,
            "ranks": self.ranks, "phases": dict(self.phases), "final": {key: value for key, value in self.row.items() if key.startswith(("episodic", "env/", "losses/"))},
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


class SilentRun(Run):
    """A Run on the ranks that write and show nothing."""

    def __init__(self, args: Args, agent: Agent, envs: Envs, resumed: dict | None):
        self.args, self.start, self.live = args, time.perf_counter(), None
        self.before, self.first_iteration = (resumed["seconds"], resumed["iteration"]) if resumed else (0.0, 0)
        self.trained_before, self.started_at = resumed.get("trained", self.before) if resumed else 0.0, None
        self.phases, self.busy = defaultdict(float), 0.0

    def nothing(self, *_):
        pass

    profiler_step = log = save_checkpoint = close = nothing

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
    torch.save(content, buffer)
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
        "ranks": f"{WORLD_SIZE}",
        "slowest rank": f"{row['ranks/slowest']}, busy {100 * row['ranks/slowest_share']:.0f} %",
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
    device = torch.device(args.device)
    seed_everything(args.seed, args.torch_deterministic)
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
            noise = agent.sampling_noise(envs.num_agents, device=device, deterministic=args.deterministic)
            observations, dones = torch.as_tensor(step.observations, device=device), torch.as_tensor(step.dones, device=device)
            actions, _, _, h, c = policy_step(agent, observations, dones, h, c, weight, bias, noise)
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
    "eval_episodes": (1, 2**31 - 1), "dist_timeout": (1, None), "time_limit": (0, None), "learning_rate": (0, None), "adam_learning_rate": (0, None), "momentum": (0, 0.9999), "gamma": (0, 1),
    "gae_lambda": (0, 1), "update_epochs": (0, 1000), "clip_coef": (0, None), "vf_clip_coef": (0, None), "vf_coef": (0, None), "ent_coef": (0, None),
    "max_grad_norm": (0, None), "target_kl": (0, None), "vtrace_rho_clip": (0, None), "vtrace_c_clip": (0, None), "prio_alpha": (0, None), "prio_beta0": (0, 1),
}  # fmt: skip


def fast_bfloat16(device: str) -> str | None:
    """What here multiplies bfloat16 faster than float32; None if nothing does."""
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        return f"compute capability {major}.{minor}" if major >= 8 else None
    able = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.9 has none
    names = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "bf16": "Arm's bfloat16"}
    return next((name for key, name in names.items() if able.get(key)), None)


def seconds_of_product(dtype: torch.dtype, device: str) -> float:
    """Of two 256 x 256 matrices: what a layer of this size costs."""
    x = torch.ones(256, 256, dtype=dtype, device=device)
    float((x @ x).sum())  # the first one loads libraries
    start = time.perf_counter()
    float((x @ x).sum())
    return time.perf_counter() - start


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
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here; use --device cpu")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.precision == "auto":
        args.precision = "bfloat16" if fast_bfloat16(args.device) else "float32"
    elif args.precision == "bfloat16" and not fast_bfloat16(args.device):
        times = seconds_of_product(torch.bfloat16, args.device) / seconds_of_product(torch.float32, args.device)
        warn(f"--precision bfloat16: products take {times:.0f} times as long as in float32 on this hardware")
    if args.learning_rate is None:  # bfloat16 rounds Muon's steps; on Breakout float32 wants longer ones for the same score
        args.learning_rate = 0.015 if args.precision == "bfloat16" else 0.025
    if args.cuda_graphs and args.device != "cuda" and not args.evaluate:
        raise UsageError(f"--cuda-graphs: needs a GPU, and this runs with --device {args.device}")


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


def job_store() -> dist.Store:
    """What ranks find each other by. torchrun's lives as long as its job; without torchrun this process is alone."""
    if "RANK" not in os.environ:
        return dist.HashStore()
    has_host = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(*address, WORLD_SIZE, is_master=RANK == 0 and not has_host)


def meet(store: dist.Store) -> dist.Store:
    """A part of the store for this start of the ranks alone: torchrun's still has what the ranks before a restart left there.

    The hosts do not even agree on how many restarts there were. So each rank asks by a name that was never used before, and
    rank 0 answers until all have thanked.
    """
    if RANK > 0:
        question = uuid.uuid4().hex
        store.set(f"question of rank {RANK}", question)
        start = store.get(f"answer to {question}").decode()  # waits
        store.set(f"{start}: thanks of rank {RANK}", "")
        return dist.PrefixStore(start, store)
    start, missing = uuid.uuid4().hex, set(range(1, WORLD_SIZE))
    while missing:
        for rank in missing.copy():
            if store.check([f"question of rank {rank}"]):
                store.set(f"answer to {store.get(f'question of rank {rank}').decode()}", start)
            if store.check([f"{start}: thanks of rank {rank}"]):
                missing.remove(rank)
        time.sleep(0.01)
    return dist.PrefixStore(start, store)


def parse_on_rank_0(argv: list[str], job: dist.Store, store: dist.Store) -> tuple[Args, dict | None]:
    """Rank 0 reads the command line and the files that it names, the others hear of it. Raises what `parse_args` raises.

    When torchrun has restarted the ranks, the job's own run is resumed. The checkpoint is rank 0's; the others get it later.
    """
    resumed = None
    if RANK == 0:
        try:
            outcome, resumed = parse_args(argv)
            if job.check(["run"]):
                with contextlib.suppress(UsageError):  # it had no checkpoint yet: from the beginning
                    resumed = load_checkpoint(job.get("run").decode(), "--resume")
                    outcome.precision = resumed["config"].get("precision", outcome.precision)  # this host may be of another kind
        except (UsageError, SystemExit) as error:  # SystemExit: --help
            outcome = error
        store.set("arguments", pickle.dumps(outcome))
    else:
        outcome = pickle.loads(store.get("arguments"))
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome, resumed


def keep_to_own_cores():
    """Each rank of a host computes on its share of the cores; left to the scheduler, ranks of a CPU were 8 % slower."""
    ranks, cores = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), sorted(os.sched_getaffinity(0))
    if share := len(cores) // ranks:
        os.sched_setaffinity(0, cores[LOCAL_RANK * share : (LOCAL_RANK + 1) * share])


def main() -> int:
    try:
        job = job_store()
        store = meet(job)
        args, resumed = parse_on_rank_0(sys.argv[1:], job, store)
        torch.autograd.set_detect_anomaly(args.detect_anomaly)
        if args.evaluate:
            return evaluate(args) if RANK == 0 else 0
        if args.device == "cuda":
            gpus, ranks = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            if ranks > gpus:
                raise UsageError(
                    f"--nproc-per-node {ranks}: more than the {gpus} GPUs of this host; each rank needs one, or --device cpu"
                )
            torch.cuda.set_device(LOCAL_RANK)
        else:
            keep_to_own_cores()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo",
            store=store,
            rank=RANK,
            world_size=WORLD_SIZE,
            timeout=timedelta(seconds=args.dist_timeout),
        )
        resumed = [resumed]
        with other_ranks():
            dist.broadcast_object_list(resumed)
        code = train(args, job, resumed[0])
        if code == 0:
            dist.destroy_process_group()
        return code
    except UsageError as error:
        if LOCAL_RANK == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2
    except RankLost as error:
        print(f"error: rank {RANK}: {error}", file=sys.stderr)
        return 1
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
    code = main()
    with contextlib.suppress(OSError):
        sys.stdout.flush(), sys.stderr.flush()
    # Not sys.exit: gloo's threads may still hold Python objects, and one that lets go of them in a dying interpreter aborts it.
    os._exit(code) if WORLD_SIZE > 1 else sys.exit(code)
