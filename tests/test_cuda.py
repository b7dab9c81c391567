"""I14, with a GPU: CUDA graphs against eager, CUDA against the CPU, no waiting, resuming.

`make benchmark-gpu` runs this first.
"""

import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT, run_script, succeed
from reading import end_of, newest_run, without_clock

import ppo_lstm_puffer as ppo

if not torch.cuda.is_available():
    pytest.skip("no GPU here, so what needs one is not tested", allow_module_level=True)


class Unsynchronized(ppo.CudaGraphs):
    """Not recorded, and an error if it waits for the GPU. Its first calls may: they compile and
    allocate."""

    def __call__(self, *which):
        self.calls[str(which)] += 1
        torch.cuda.set_sync_debug_mode("error" if self.calls[str(which)] > 2 else "default")
        try:
            return self.function(*which)
        finally:
            torch.cuda.set_sync_debug_mode("default")


CASES = [
    {},
    {"compile": True},
    {"optimizer": "adam"},
    {"max_minibatch_size": 16},
    {"env_id": "drone"},
    {"env_id": "CartPole-v1", "num_workers": 2},
    {"env_id": "cartpole", "norm_obs": True, "norm_rewards": True},
    {"precision": "bfloat16"},
]


@pytest.mark.parametrize("arguments", CASES, ids=str)
def test_cuda_graphs_train_as_the_functions_do(losses_of, arguments):
    eager = losses_of(device="cuda", **arguments)
    replayed = losses_of(ppo.CudaGraphs, device="cuda", **arguments)
    for expected, row in zip(eager, replayed, strict=True):
        assert row.get("episodic_return") == expected.get("episodic_return")
        assert row == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("arguments", CASES[:5], ids=str)
def test_update_and_policy_step_never_wait_for_the_gpu(losses_of, arguments):
    assert len(losses_of(Unsynchronized, device="cuda", **arguments)) == 12


def test_first_update_is_that_of_the_cpu():
    args = ppo.Args(num_steps=8, minibatch_size=128, precision="float32")
    space = gym.spaces.Box(-1, 1, (6,), np.float32)
    T = 8
    N = 16
    torch.manual_seed(1)
    observations = torch.randn(T, N, 6)
    state = torch.randn(2, N, 128)
    dones = (torch.rand(T + 1, N) < 0.2).float()
    actions = torch.randint(3, (T, N, 1))
    values = torch.randn(T + 1, N)
    logprobs, rewards, ratio = torch.randn(3, T, N) / 10 + torch.tensor([-1.1, 0, 1])[:, None, None]
    batch = (values, rewards, dones, torch.ones(T, N), ratio, torch.rand(N + 1))
    after = []
    for device in "cpu", "cuda":
        torch.manual_seed(2)
        agent = ppo.Agent(space, gym.spaces.Discrete(3), args).to(device)
        minibatch = ppo.draw_minibatch(*(x.to(device) for x in batch), 0.5, args)
        drawn = minibatch.segments.cpu()
        inputs = agent.encode(observations[:, drawn].to(device))
        start = state[:, drawn].to(device)
        resets = dones[:T, drawn].to(device)
        hidden = ppo.lstm_outputs(inputs, *start, resets, *agent.lstm_weights())
        taken = actions[:, drawn].to(device), logprobs[:, drawn].to(device)
        loss, *_ = ppo.ppo_loss(agent, hidden, *taken, minibatch, args)
        loss.backward()
        gradients = [parameter.grad.cpu() for parameter in agent.parameters()]
        for optimizer in ppo.make_optimizers(agent, args):
            optimizer.step()
        parameters = [parameter.detach().cpu() for parameter in agent.parameters()]
        after.append([drawn, loss.detach().cpu(), *gradients, *parameters])
    torch.testing.assert_close(*after, atol=1e-4, rtol=1e-3)


def test_ratio_is_about_one_in_bfloat16(losses_of):
    sizes = {"minibatch_size": 64, "hidden_size": 128, "precision": "bfloat16"}
    for row in losses_of(ppo.CudaGraphs, device="cuda", **sizes):
        assert abs(row["losses/approx_kl"]) < 1e-4
        assert row["losses/clipfrac"] < 0.01


@pytest.mark.parametrize("first, then", [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_a_checkpoint_of_one_device_is_resumed_on_another(tmp_path, first, then):
    again = ["--resume", "latest", "--total-timesteps", 4096]
    for device, arguments in (first, []), (then, again):
        result = run_script("--device", device, *arguments, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
    assert end_of(newest_run(tmp_path))["step"] == 4096


def test_ranks_train_under_nccl_recorded_as_eagerly(tmp_path):
    count = min(8, 1 << torch.cuda.device_count().bit_length() - 1)  # one GPU: nccl's sums of one
    ranks = f"--nproc-per-node={count}"
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", ranks)
    script = ROOT / "ppo_lstm_puffer_ddp.py"
    rows = []
    for graphs in "--cuda-graphs", "--no-cuda-graphs":
        words = ("--device", "cuda", graphs)
        rows.append(without_clock(succeed(*words, cwd=tmp_path, launcher=torchrun, script=script)))
    for recorded, eager in zip(*rows, strict=True):
        assert recorded == pytest.approx(eager, rel=1e-3, abs=1e-5)
