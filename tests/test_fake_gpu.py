"""I14: without a GPU, policy step and update on a device without numbers, and as operations that
are recorded and replayed. tests/test_cuda.py is for where there is one."""

import pytest
import torch
from conftest import Recording, train_here
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
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
    """In the place of CudaGraph: the first policy step, then the update, and that is all."""

    functions = ()

    def __init__(self, function):
        Once.functions = (*Once.functions, function)

    def __call__(self):
        with OnOneDevice():
            self.functions[-1]()  # the policy step, which is made when it is first needed
            self.functions[0]()  # the update
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
    monkeypatch.setattr(ppo, "CudaGraph", Once)
    monkeypatch.setattr(ppo, "Agent", agent_on_meta)
    monkeypatch.setattr(ppo, "make_optimizers", optimizers_on_meta)
    monkeypatch.setattr(ppo, "train", train)
    with pytest.raises(Done):
        train_here(tmp_path, **arguments)


class Replayed:
    """CudaGraph, on a CPU: from the fifth call on, the operations that the fourth one did are done
    again on the tensors that it had, and what they return lies where its results lay.

    So it is with a CUDA graph: a Python number that changes, or a tensor that is made anew outside,
    stays as it was.
    """

    def __init__(self, function):
        self.function = function
        self.calls = 0

    def __call__(self):
        self.calls += 1
        if self.calls < 4:
            return self.function()
        if self.calls == 4:
            self.graph = make_fx(lambda: self.traced())()
        else:
            with torch.no_grad():
                for result, new in zip(self.results, self.graph() or ()):
                    result.copy_(new)
        return self.results

    def traced(self):
        self.results = self.function() or ()
        return self.results


CASES = [
    {"optimizer": "adam", "max_minibatch_size": 16},
    {"env_id": "drone", "update_epochs": 2},
    {"env_id": "cartpole", "norm_obs": True, "norm_rewards": True},
]


@pytest.mark.parametrize("arguments", CASES, ids=str)
def test_replayed_graphs_train_as_the_functions_do(losses_of, arguments):
    expected = losses_of(**arguments)
    assert len(expected) == 12
    assert expected == losses_of(Replayed, **arguments)
