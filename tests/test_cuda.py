"""With a GPU: CUDA graphs against eager, CUDA against the CPU, no waiting, resuming. `make benchmark-gpu` runs this first."""

import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT, end_of, newest_run, run_script

import ppo_lstm_puffer as ppo

if not torch.cuda.is_available():
    pytest.skip("no GPU here, so what needs one is not tested", allow_module_level=True)


class Unsynchronized(ppo.Recorded):
    """Not recorded, and an error if it waits for the GPU. Its first calls may: they compile and allocate."""

    def __call__(self):
        self.calls += 1
        torch.cuda.set_sync_debug_mode("error" if self.calls > 2 else "default")
        try:
            return self.function()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("arguments", [
    {}, {"compile": True}, {"optimizer": "adam"}, {"max_minibatch_size": 16}, {"env_id": "drone"},
    {"env_id": "CartPole-v1", "num_workers": 2}, {"precision": "bfloat16"},
], ids=str)  # fmt: skip
def test_cuda_graphs_train_as_the_functions_do(losses_of, arguments):
    eager, recorded = (
        losses_of(device="cuda", **arguments),
        losses_of(ppo.Recorded, device="cuda", **arguments),
    )
    assert [row.get("episodic_return") for row in recorded] == [
        row.get("episodic_return") for row in eager
    ]
    for expected, row in zip(eager, recorded, strict=True):
        assert row == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    "arguments", [{}, {"compile": True}, {"optimizer": "adam"}, {"env_id": "drone"}], ids=str
)
def test_update_and_policy_step_never_wait_for_the_gpu(losses_of, arguments):
    assert len(losses_of(Unsynchronized, device="cuda", **arguments)) == 12


def test_first_update_is_that_of_the_cpu():
    torch.set_float32_matmul_precision("highest")
    args = ppo.Args(num_steps=8, minibatch_size=128, precision="float32")
    torch.manual_seed(1)
    T, N, space = 8, 16, gym.spaces.Box(-1, 1, (6,), np.float32)
    batch = (
        torch.randn(T, N, 6),
        torch.randn(N, 128),
        torch.randn(N, 128),
        (torch.rand(T, N) < 0.2).float(),
    )
    batch = *batch, torch.randint(3, (T, N, 1)), torch.full((T, N), -1.1), torch.randperm(N)
    drawn = *torch.randn(3, T, N), torch.full((T, N), 1 / (T * N))
    after = []
    for device in "cpu", "cuda":
        torch.manual_seed(2)
        agent = ppo.Agent(space, gym.spaces.Discrete(3), 128).to(device)
        loss, *_ = ppo.minibatch_loss(agent, *(x.to(device) for x in (*batch, *drawn)), args=args)
        loss.backward()
        gradients = [parameter.grad.cpu() for parameter in agent.parameters()]
        for optimizer in ppo.make_optimizers(agent, args):
            optimizer.step()
        after.append(
            [
                loss.detach().cpu(),
                *gradients,
                *(parameter.detach().cpu() for parameter in agent.parameters()),
            ]
        )
    torch.testing.assert_close(*after, atol=1e-4, rtol=1e-3)


def test_ratio_is_about_one_in_bfloat16(losses_of):
    for row in losses_of(
        ppo.Recorded, device="cuda", precision="bfloat16", minibatch_size=64, hidden_size=128
    ):
        assert abs(row["losses/importance"] - 1) < 0.01 and row["losses/clipfrac"] < 0.01


@pytest.mark.parametrize("first, then", [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_a_checkpoint_of_one_device_is_resumed_on_another(tmp_path, first, then):
    for device, arguments in (first, []), (then, ["--resume", "latest", "--total-timesteps", 4096]):
        result = run_script("--device", device, *arguments, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
    assert end_of(newest_run(tmp_path))["step"] == 4096


def test_two_ranks_train_under_nccl(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU here: two ranks need two")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    result = run_script(
        "--device", "cuda", cwd=tmp_path, launcher=torchrun, script=ROOT / "ppo_lstm_puffer_ddp.py"
    )
    assert result.returncode == 0, result.stderr
