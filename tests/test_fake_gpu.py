"""I14: without a GPU, policy step and update on a device without numbers, and as operations that
are recorded and replayed. tests/test_cuda.py is for where there is one."""

import pytest
import torch
from conftest import Recording, train_here
from pufferlib import adapters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ppo_lstm_puffer as ppo


class Done(Exception):
    """Everything that a GPU would compute was computed once."""


class OnOneDevice(TorchDispatchMode):
    """An error if an operation gets, or returns, a tensor of the CPU."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        results = operation(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, results))
        devices = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
        assert "cpu" not in devices, f"{operation}: a tensor of the CPU"
        return results


class Once:
    """In the place of CudaGraphs: the first policy step, then the update, and that is all."""

    functions = ()

    def __init__(self, function):
        Once.functions = (*Once.functions, function)

    def __call__(self, *which):
        act_at, update = self.functions
        with OnOneDevice():
            act_at(*which)
            update()
        raise Done


def agent_on_meta(*given, original=ppo.Agent):
    with torch.device("meta"):
        agent = original(*given)
    agent.to = lambda device: agent  # of fake tensors torch moves none
    return agent


def optimizers_on_meta(agent, args, original=ppo.make_optimizers):
    """Muon alone: torch's Adam does not know this device, nor can it be asked whether a learning
    rate is negative."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "tensor", lambda number, device: number)
        patch.setattr(torch.optim, "Adam", lambda parameters, **_: torch.optim.SGD(parameters))
        optimizers = original(agent, args)
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = torch.zeros((), device="meta")
    return optimizers[:1]


CASES = [
    {},
    {"precision": "bfloat16"},
    {"max_minibatch_size": 16},
    {"num_workers": 2},
    {"env_id": "drone"},
    {"env_id": "target", "num_envs": 1},
]


@pytest.mark.parametrize("arguments", CASES, ids=str)
def test_update_and_policy_step_stay_on_the_gpu_and_never_wait(monkeypatch, tmp_path, arguments):
    """On fake tensors of the device `meta`, which have shapes and types but no numbers, as if it
    were a GPU's."""

    def train(args, *rest, original=ppo.train):
        args.device = Recording("meta")
        with FakeTensorMode():
            original(args, *rest)

    monkeypatch.setattr(Once, "functions", ())
    monkeypatch.setattr(adapters, "tell_of_scale", lambda *_: None)  # once; it may wait
    monkeypatch.setattr(ppo, "CudaGraphs", Once)
    monkeypatch.setattr(ppo, "Agent", agent_on_meta)
    monkeypatch.setattr(ppo, "make_optimizers", optimizers_on_meta)
    monkeypatch.setattr(ppo, "train", train)
    with pytest.raises(Done):
        train_here(tmp_path, **arguments)


class Tape(TorchDispatchMode):
    """In the place of torch.cuda.CUDAGraph, on a CPU: it keeps the operations that are done within,
    and does them again on the tensors that they had; results lie where those lay.

    So it is with a CUDA graph: a Python number that changes, or a tensor that is made anew outside,
    stays as it was.
    """

    tapes = ()

    def __init__(self):
        super().__init__()
        self.done = []
        self.replays = 0
        Tape.tapes = (*Tape.tapes, self)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        results = operation(*args, **(kwargs or {}))
        self.done.append((operation, args, kwargs or {}, results))
        return results

    @torch.no_grad()
    def replay(self):
        again = self.done if self.replays else []  # on a CPU recording has done them already
        self.replays += 1
        for operation, args, kwargs, results in again:
            new = tree_leaves(operation(*args, **kwargs))
            for kept, result in zip(tree_leaves(results), new, strict=True):
                if isinstance(kept, torch.Tensor):
                    kept.copy_(result)


CASES = [
    {"optimizer": "adam", "max_minibatch_size": 16},
    {"env_id": "drone", "update_epochs": 2},
    {"env_id": "cartpole", "norm_obs": True, "norm_rewards": True},
]


@pytest.mark.parametrize("arguments", CASES, ids=str)
def test_replayed_graphs_train_as_the_functions_do(losses_of, monkeypatch, arguments):
    expected = losses_of(**arguments)
    assert len(expected) == 12
    monkeypatch.setattr(Tape, "tapes", ())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Tape)
    monkeypatch.setattr(torch.cuda, "graph", lambda tape, *_: tape)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(ppo.CudaGraphs, "pool", lambda: None)
    assert expected == losses_of(ppo.CudaGraphs, **arguments)
    assert len(Tape.tapes) > 2 and min(tape.replays for tape in Tape.tapes) == 9  # of 12 iterations
