"""PPO with an LSTM on PufferLib's environments, on TPUs: `ppo_lstm_puffer.py` through torch_xla.

    python ppo_lstm_puffer_xla.py --env-id breakout                # on all TPU chips of this host
    python ppo_lstm_puffer_xla.py --env-id breakout --device cpu   # on XLA's CPU device
    CPU_NUM_DEVICES=4 python ppo_lstm_puffer_xla.py --device cpu   # as if it were four

One process per host, the agents spread over all devices (SPMD); of several hosts, run it on each.
What tensors do is recorded, and a sync() compiles and runs it: after two iterations none is new.

The algorithm is PufferLib's PuffeRL (PPO + LSTM, V-trace, prioritized segments, Muon) with what it
leaves out: the LSTM is reset where an episode ends and carried from segment to segment, and the
value after a segment is bootstrapped. Below the border line is what the algorithm does not need.
"""

import contextlib
import io
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

# How long OpenMP's threads wait awake; with the default, 30 times as long, other programs starve.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import gymnasium as gym
import numpy as np
import pufferlib
import torch
import torch_xla  # needs a torch of its own: make setup-xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as spmd
import torch_xla.experimental.scan as xla_scan
import torch_xla.runtime as xr
import tyro
import yaml
from pufferlib import adapters  # it is install_pufferlib.sh that puts this there
from pufferlib.adapters import say  # prints to stderr
from torch import nn
from torch.utils.tensorboard import SummaryWriter


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of this experiment
    seed: int = 1  # of Python, numpy, torch, every environment and every worker
    device: Literal["auto", "cpu", "tpu"] = "auto"  # auto: a TPU, which must be there
    output_dir: str = "runs"  # the folder that runs are written to
    track: bool = False  # log to Weights and Biases too; it reads WANDB_PROJECT and WANDB_ENTITY
    # Environment
    env_id: str = "breakout"  # of Ocean, Gymnasium (CartPole-v1), or a module with parallel_env
    env: dict[str, Any] = field(default_factory=dict)  # its own arguments, each as --env.KEY VALUE
    num_envs: int = 512  # environments in parallel; one may hold several agents
    num_workers: int = 0  # of each host; even: half act, half step
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


def lstm_step(state, step):
    """`lstm_forward` of one step, for the scan."""
    h, c, weight, bias = state
    x, dones = step
    outputs, h, c = lstm_forward(x[None], h, c, dones[None], weight, bias)
    return (h, c, weight, bias), outputs[0]


# For this alone torch_xla's scan needs jax. Without it XLA chooses how gradients are spread.
xla_scan.shard_as = lambda inputs, gradients: (inputs, gradients)


def lstm_outputs(x, h, c, dones, weight, bias):
    """`lstm_forward`'s outputs (T, N, H), for training: backpropagation ends at the first state."""
    start = h.detach(), c.detach(), weight, bias
    _, outputs = xla_scan.scan(lstm_step, start, (x, dones), is_fn_pure=True)
    return outputs


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
    """A minibatch of segments, drawn by the advantages of the newest values and ratios.

    Arguments: of `compute_advantages` and `sample_segments`.
    """
    advantages = compute_advantages(values, rewards, dones, valid, ratio, args)
    k = args.minibatch_size // args.num_steps
    segments, weight = sample_segments(advantages, valid, uniform, k, args.prio_alpha, beta)
    values = values[:-1, segments]
    returns = advantages[:, segments] + values
    count = valid.sum().clamp_min(1)
    normalized = advantages
    if args.norm_adv:
        centered = (advantages - advantages.sum() / count) * valid
        normalized = centered / ((centered**2).sum() / count + 1e-16).sqrt()
    weight = valid[:, segments] * weight / count
    return Minibatch(segments, normalized[:, segments], returns, values, weight)


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
        x = a * x + (b * gram + c * gram @ gram) @ x  # torch_xla leaves the device for baddbmm
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
    """Muon for matrices and Adam for the rest, or Adam. Rates are tensors."""
    device = agent.policy.value.weight.device
    lr = torch.tensor(args.learning_rate, device=device)
    adam = partial(torch.optim.Adam, eps=1e-8, foreach=False, capturable=True)
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
    device = torch_xla.device()  # it stands for all devices of all hosts
    devices = xr.addressable_runtime_device_count()  # of this host
    hosts = xr.process_count()
    T = args.num_steps
    N = envs.num_agents * hosts
    batch_size = T * N
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
    action_dtype = torch.float32 if agent.continuous else torch.int64
    actions = zeros(T, N, math.prod(envs.action_space.shape), dtype=action_dtype)
    # No views of one tensor: a write to one would be a write to all.
    values, dones, valid = (zeros(T + 1, N) for _ in range(3))
    logprobs, rewards, ratio, discounted = (zeros(T, N) for _ in range(4))
    h, c, start_h, start_c = (zeros(N, args.hidden_size) for _ in range(4))
    share(1, observations, actions, dones, valid, logprobs, values, rewards, ratio, discounted)
    share(0, h, c, start_h, start_c)
    # Numbers as indices would make each step a graph.
    indices = [torch.tensor([t]).to(device) for t in range(T + 1)]
    noise = agent.sampling_noise(T + 1, N).to(device)  # drawn on the CPU, as the reference does
    acting_weights = [weight.detach().clone() for weight in agent.lstm_weights()]  # cast once
    beta = zeros(())

    def put(array: np.ndarray) -> torch.Tensor:
        """To the devices, without waiting: a host brings its agents (n, ...), all get (N, ...)."""
        axes = ("data", *[None] * (array.ndim - 1))
        how = spmd.ShardingSpec(spmd.get_global_mesh(), axes, minibatch=True)
        return xm.send_cpu_data_to_device([torch.tensor(array)], device, how)[0]

    def receive(t: int) -> slice:
        """Stores what came from the environments: o_t, d_t, and the reward of step t - 1."""
        agents, observation, reward, done, is_valid = envs.receive()
        agents = slice(agents.start * hosts, agents.stop * hosts)
        at = indices[t]
        observations[at, agents] = put(observation)
        dones[at, agents] = put(done)
        valid[at, agents] = put(is_valid)
        if t > 0:
            rewards[indices[t - 1], agents] = put(reward)
        return agents

    @torch.no_grad()
    def act_at(t: int, start: int, stop: int):
        """Step t for agents start to stop. Step T is for its value only: h, c stay as they are."""
        group = slice(start, stop)
        at = indices[t]
        inputs = observations[at, group][0], dones[at, group][0], h[group], c[group]
        step_noise = noise[at, group][0]
        action, logprob, value, new_h, new_c = act(agent, *inputs, *acting_weights, step_noise)
        values[at, group] = value
        if t < T:
            actions[at, group] = action
            logprobs[at, group] = logprob
            h[group] = new_h
            c[group] = new_c

    def update() -> torch.Tensor:
        """Draws a minibatch and takes an optimizer step. Returns LOSSES."""
        uniform = torch.rand(N + 1).to(device)  # drawn on the CPU, as the reference does
        minibatch = draw_minibatch(values, rewards, dones, valid[:T], ratio, uniform, beta, args)
        share(0, minibatch.segments)
        share(1, *minibatch[1:])  # and with these all that follows
        sums = zeros(len(LOSSES) - 1)
        agent.zero_grad()
        most = args.max_minibatch_size // T  # segments at once; their gradients add up
        for first in range(0, len(minibatch.segments), most):
            part = Minibatch(*(tensor[..., first : first + most] for tensor in minibatch))
            segments = part.segments
            features = agent.encode(observations[:T, segments])
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
            sums += terms
        grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
        means = sums / minibatch.weight.sum().clamp_min(1e-12)
        return torch.cat((grad_norm[None], means))

    update = torch_xla.compile(update, full_graph=True)

    groups = [receive(0) for _ in range(envs.num_groups)]  # act together: all agents, or halves
    over = run.exit_reason is not None  # asked once an iteration: signals come at any time
    while not over:
        # ROLLOUT: T steps of every agent. The state that the segment starts from is kept.
        start_h.copy_(h)
        start_c.copy_(c)
        noise.copy_(agent.sampling_noise(T + 1, N))
        for stored, weight in zip(acting_weights, agent.lstm_weights()):
            stored.copy_(weight.detach())
        for t in range(T + 1):  # step T is for v_T alone: the next segment acts on o_T
            for group in groups:
                if t > 0:  # row 0 is row T of the segment before
                    receive(t)
                act_at(t, group.start, group.stop)
                if t < T:
                    envs.send(rows_of_this_host(actions[indices[t], group][0]).numpy())
        counted = valid[:T]
        if args.clip_rewards and not args.norm_rewards:
            rewards.clip_(-1, 1)
        if args.norm_rewards:  # by the deviation of discounted returns (Engstrom et al. 2020)
            for t in range(T):  # at t = 0, discounted[-1] is the last of the segment before
                discounted[t] = rewards[t] + args.gamma * (1 - dones[t]) * discounted[t - 1]
            fit_norm(agent.return_norm, discounted.unsqueeze(-1), counted)
            rewards.div_((agent.return_norm.running_var + 1e-8).sqrt()).clamp_(-10, 10)
        torch_xla.sync()

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
        ones = torch.ones_like(ratio)  # of the policy that acted
        advantages = compute_advantages(rollout_values, rewards, dones, counted, ones, args)
        unexplained = moments(advantages, counted)[1]
        unexplained /= moments(advantages + rollout_values[:T], counted)[1].clamp_min(1e-12)
        statistics = torch.cat((statistics / num_minibatches, 1 - unexplained[None]))
        if agent.observation_norm is not None:  # not before: ratios start at 1
            fit_norm(agent.observation_norm, observations[:T].flatten(2).float(), counted)
        torch_xla.sync()
        losses = dict(zip([*LOSSES, "explained_variance"], statistics.tolist()))  # waits for them

        # LOGGING, CHECKPOINT
        run.update_done(batch_size, update_began)
        run.ending = put(np.full(devices, run.wish, np.float32)).max().item()  # hosts end together
        norms = [statistic.sum() for statistic in adapters.running_statistics(agent)]
        if not all(map(math.isfinite, (*losses.values(), *norms))):
            seen = f"{observations.abs().max():.2g}, {rewards.abs().max():.2g}"
            raise adapters.NotFinite(f"{losses}; observation, reward up to {seen}; docs/trouble.md")
        over = run.exit_reason is not None
        if run.iteration % args.log_interval == 0 or over:
            run.log(losses, args.learning_rate * decay)
        if run.iteration % args.checkpoint_interval == 0:
            run.save()
        # The next segment begins where this one ended: row T of what `act` is given.
        observations[0] = observations[T]
        dones[0] = dones[T]
        valid[0] = valid[T]
        torch_xla.sync()


# ==================================================================================================
# PLUMBING: not needed to understand the algorithm.


def fail(message: str):
    """Ends the program for a wrong argument: one line, exit code 2."""
    say(f"error: {message}")
    sys.exit(2)


def set_up_torch(seed: int):
    """Seeds. torch's are the same on all hosts: so is all that every device has."""
    torch.manual_seed(seed)


def fast_bfloat16(device: str) -> str | None:
    """What here multiplies bfloat16 faster than float32; None if nothing does."""
    return "a TPU" if device == "tpu" else None


def start_devices(args: Args):
    """XLA's runtime, once per host. All devices of all hosts are a mesh with one axis, "data"."""
    try:
        xr.set_device_type(args.device.upper())
        xr.use_spmd()
        devices = np.arange(xr.global_runtime_device_count())
        spmd.set_global_mesh(spmd.Mesh(devices, devices.shape, ("data",)))
    except Exception as error:
        fail(f"--device {args.device}: does not start: {error}")
    torch_xla._XLAC._xla_set_mat_mul_precision("high")  # or a TPU takes float32 for bfloat16
    # Autograd's own thread lets go of its last tensors late: they would be part of the next graph.
    torch.autograd.set_multithreading_enabled(False)
    where = f"{len(devices)} x {args.device}, {xr.process_count()} hosts, {args.precision}"
    say(where)
    say("compiling: about half a minute")


def share(dim: int, *tensors: torch.Tensor):
    """Tells XLA to spread this dimension over the devices."""
    for tensor in tensors:
        axes = tuple("data" if axis == dim else None for axis in range(tensor.ndim))
        spmd.mark_sharding(tensor, spmd.get_global_mesh(), axes)


def rows_of_this_host(tensor: torch.Tensor) -> torch.Tensor:
    """Computes a tensor (N, ...) of all agents; of it this host's (n, ...), on the CPU."""
    torch_xla.sync(wait=True)
    shards = spmd.XLAShardedTensor(tensor).local_shards  # `.cpu()` would gather all
    if shards[0].indices is Ellipsis:  # every device has all
        return shards[0].data
    return torch.cat([shard.data for shard in shards])  # in the order in which `put` gave them out


def moments(x: torch.Tensor, counted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of x[counted > 0], whose size XLA cannot know: x (T, N, ...)."""
    counted = counted.view(*counted.shape, *[1] * (x.ndim - 2))
    n = counted.sum().clamp_min(1)
    mean = (counted * x).sum((0, 1)) / n
    return mean, (counted * (x - mean) ** 2).sum((0, 1)) / n


@torch.no_grad()
def fit_norm(norm: nn.BatchNorm1d, x: torch.Tensor, counted: torch.Tensor):
    """Adds x[counted > 0] to the statistics of all rows ever seen."""
    mean, variance = moments(x, counted)
    rows = counted.sum()
    norm.num_batches_tracked += rows.long()  # here: rows
    share = rows / norm.num_batches_tracked.clamp_min(1)
    change = mean - norm.running_mean
    norm.running_mean += share * change
    norm.running_var.lerp_(variance + (1 - share) * change**2, share)
    norm.running_var.clamp_(min=1e-10 * norm.running_mean**2)  # else its rounding would be seen


def make_envs(args: Args, seed: int, num_envs: int | None = None) -> Envs:
    """--num-envs environments (or so many), in this process or in --num-workers of their own."""
    try:
        many = num_envs or args.num_envs
        vecenv = adapters.make(args.env_id, args.env, many, args.num_workers, seed)
    except pufferlib.APIUsageError as error:
        fail(f"--env-id {args.env_id}: {error}")
    return Envs(vecenv, seed)


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
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
    folder = Path(os.path.expanduser(args.output_dir), name.replace("/", "-").replace(":", "-"))
    folder = adapters.started_in / (resumed["folder"] if resumed else folder)
    try:
        folder.mkdir(parents=True, exist_ok=resumed is not None)
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
    """A run's folder and what is written to it; its clock; the signals that end it."""

    ending = 0.0  # what `wish` is for all hosts

    def __init__(self, args: Args, envs: Envs, resumed: dict | None):
        self.args = args
        self.envs = envs
        self.resumed = resumed or {"iteration": 0, "step": 0, "seconds": 0.0, "metrics_size": 0}
        self.iteration = self.resumed["iteration"]
        self.step = self.resumed["step"]
        self.signals = []
        self.compiled = False  # from the first update on; then there is something to save
        self.began = time.perf_counter()
        self.profiler = None
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
            hint = "another --env-id, --env, network, --optimizer?"
            fail(f"--resume {self.folder}: {hint} {error!r:.200}")
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
        """Why the run ends after this iteration; None: it goes on."""
        if self.step >= self.args.total_timesteps:
            return "completed"
        if self.ending >= 1:
            return signal.Signals(int(self.ending)).name.lower()
        return "time_limit" if self.ending else None

    @property
    def wish(self) -> float:
        """Of this host: the signal that ended it, 0.5 for the time limit, or 0."""
        over = self.seconds - self.resumed["seconds"] >= self.args.time_limit
        return self.signals[0] if self.signals else 0.5 * over

    def update_done(self, steps: int, began: float):
        """Counts an iteration. The first has compiled all: only then clock and signals begin."""
        self.iteration += 1
        self.step += steps
        if self.compiled:
            self.update_seconds += time.perf_counter() - began
        else:
            self.compiled = True
            self.began = time.perf_counter()
            self.start_interval()
        if self.args.profile and self.iteration == self.resumed["iteration"] + 5:
            torch_xla.debug.profiler.start_trace(str(self.folder))
        if self.args.profile and self.iteration == self.resumed["iteration"] + 8:
            torch_xla.debug.profiler.stop_trace()
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
        row["xla/compiled"] = torch_xla.debug.metrics.metric_data("CompileTime")[0]  # until now
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
            xm.save(content, file)
            adapters.write_whole(self.folder / name, file.getbuffer())

    def __exit__(self, kind, error, traceback):
        """Whatever the end is, what was learned is saved, and the last line says why it ended."""
        if kind is SystemExit and not self.compiled:
            return  # `begin` refused
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


def as_words(config: dict[str, Any]) -> list[str]:
    """Without what the reference alone has."""
    foreign = {"compile", "cuda_graphs"} | ({"device"} if config.get("device") == "cuda" else set())
    own = {name: value for name, value in config.items() if name not in foreign}
    return adapters.as_words(own)


def parse_args(words: list[str]) -> tuple[Args, dict | None]:
    """Defaults, then --config or the run of --resume, then the command line: the last one wins."""

    def parse(**options):  # words: as they are by then
        return tyro.cli(Args, args=adapters.whole_numbers(words, Args), **options)

    parse_known = partial(parse, add_help=False, return_unknown_args=True)
    given, _ = parse_known()
    resumed = None
    if given.config is not None:
        try:
            words = [*as_words(adapters.read_arguments(given.config)), *words]
        except Exception as error:  # no file, no YAML, no mapping
            fail(f"--config {given.config}: {' '.join(str(error).split())}")
        given, _ = parse_known()  # the file may have a resume or an output_dir
    if given.resume is not None:
        resumed = load_checkpoint(given.resume, given.output_dir)
        words = [*as_words(resumed["config"]), *words]
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
    minibatch = args.minibatch_size
    most = args.max_minibatch_size
    if minibatch % args.num_steps:
        fail(f"--minibatch-size {minibatch}: must be a multiple of --num-steps {args.num_steps}")
    if minibatch > most and (minibatch % most or most % args.num_steps):
        fail(f"--max-minibatch-size {most}: must divide --minibatch-size into whole segments")
    args.auto = [name for name in ("device", "precision") if getattr(args, name) == "auto"]
    if args.device == "auto":
        args.device = "tpu"
    if args.device == "tpu" and not torch_xla._internal.tpu.num_available_chips():
        fail("--device tpu: there is none here; use --device cpu")
    if args.precision == "auto":
        args.precision = "bfloat16" if fast_bfloat16(args.device) else "float32"
    elif args.precision == "bfloat16" and not fast_bfloat16(args.device):
        say("warning: --precision bfloat16: float32 is up to 50 times faster on this hardware")


def main(args: Args, resumed: dict | None = None) -> int:
    """Trains, with environments and a run's folder that are closed whatever happens."""
    start_devices(args)
    seed = pufferlib.env_seed(args.seed, resumed["iteration"] if resumed else 0)
    host = xr.process_index()
    hosts = xr.process_count()
    if host:  # the run's folder and output are the first one's; this folder goes at the end
        folder = tempfile.TemporaryDirectory()
        args.output_dir = folder.name
        args.track = False
        if resumed:
            shutil.copy(resumed["folder"] / "trainer_state.pt", folder.name)
            resumed = resumed | {"folder": Path(folder.name)}
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        with contextlib.closing(make_envs(args, seed + host, args.num_envs // hosts)) as envs:
            together = envs.num_groups * xr.addressable_runtime_device_count()
            if args.num_envs % hosts or envs.num_agents % together:
                fail(f"--num-envs {args.num_envs}: who acts together does not split over devices")
            batch = envs.num_agents * hosts * args.num_steps
            if args.minibatch_size > batch:
                fail(f"--minibatch-size {args.minibatch_size}: more than a batch, {batch} steps")
            segments = min(args.minibatch_size, args.max_minibatch_size) // args.num_steps
            if segments % xr.global_runtime_device_count():
                fail(f"--minibatch-size: its {segments} segments at once do not split over devices")
            envs.reset()  # here, so that one that fails here (not in a worker) leaves no folder
            set_up_torch(seed)  # after it: an environment may seed torch
            with adapters.signals_kept(), adapters.full_disk(), Run(args, envs, resumed) as run:
                train(args, envs, run)
    except pufferlib.APIUsageError as error:
        say(f"error: {error}")
        return 1
    stopped = run.ending >= 1 and run.step < args.total_timesteps
    return 128 + int(run.ending) if stopped else 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # there is nothing to save yet: ends at once
    sys.exit(main(*parse_args(sys.argv[1:])))
