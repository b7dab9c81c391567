"""I1 to I5 and I8: what the algorithm must do, said with the plain functions of the reference
script and with what `train` does with them, in float32 and eager."""

import ctypes
import functools
import itertools
import math
import pathlib
import re
import subprocess
from types import SimpleNamespace

import environments
import gymnasium as gym
import numpy as np
import pufferlib
import pufferlib.models
import pytest
import scipy.stats
import torch
from conftest import train_here
from reading import read_metrics
from torch import nn

import ppo_lstm_puffer as ppo

BOX = gym.spaces.Box(-1, 1, (4,), np.float32)


def make_agent(action_space=None, hidden_size=8, space=BOX, **arguments) -> ppo.Agent:
    """A small agent whose policy depends on its state: the trainer's own starts almost uniform."""
    torch.manual_seed(1)
    args = ppo.Args(**{"precision": "float32", "hidden_size": hidden_size} | arguments)
    agent = ppo.Agent(space, action_space or gym.spaces.Discrete(3), args)
    ppo.layer_init(agent.policy.decoder_mean if agent.continuous else agent.policy.decoder, 1.0)
    return agent


# What `train` does ------------------------------------------------------------------------------


def record_training(folder, env_id, segments=3, **arguments) -> list[SimpleNamespace]:
    """What `train` computes in each iteration: one update of all segments, in two parts.

    Tensors (T, N, ...) have their columns in the order of the agents; h, c (N, H) are the state
    that the update starts from. The learning rate is 0, unless it is given.
    """
    T = arguments.setdefault("num_steps", 16)
    records = []

    def train(args, envs, run, original=ppo.train):
        args.minibatch_size = T * envs.num_agents
        args.max_minibatch_size = T * math.ceil(envs.num_agents / 2)
        args.total_timesteps = segments * args.minibatch_size
        original(args, envs, run)

    def layer_init(layer, std=2**0.5, original=ppo.layer_init):
        return original(layer, max(std, 1.0))  # a policy that depends on its state

    def draw_minibatch(*tensors, original=ppo.draw_minibatch):
        names = ("values", "rewards", "dones", "valid")
        records.append(SimpleNamespace(**{n: x.clone() for n, x in zip(names, tensors)}, parts=[]))
        drawn = original(*tensors)
        records[-1].segments = drawn.segments
        return drawn

    def encode(agent, observations, original=ppo.Agent.encode):
        if len(observations) == T:
            records[-1].parts.append({"observations": observations})
        return original(agent, observations)

    def lstm_outputs(x, h, c, dones, *weights, original=ppo.lstm_outputs):
        records[-1].parts[-1] |= {"x": x, "h": h[None], "c": c[None], "reset": dones}
        records[-1].weights = [weight.detach().clone() for weight in weights]
        return original(x, h, c, dones, *weights)

    def ppo_loss(agent, hidden, actions, logprobs, minibatch, args, original=ppo.ppo_loss):
        result = original(agent, hidden, actions, logprobs, minibatch, args)
        found = {"ratio": result[1], "new_values": result[2], "weight": minibatch.weight}
        records[-1].parts[-1] |= {"actions": actions, "logprobs": logprobs} | found
        records[-1].agent = agent
        return result

    sizes = {"num_envs": 4, "minibatch_size": T, "prio_alpha": 0.0}
    sizes |= {"learning_rate": 0.0, "adam_learning_rate": 0.0, "clip_rewards": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo.Agent, "encode", encode)
        for listener in train, layer_init, draw_minibatch, lstm_outputs, ppo_loss:
            patch.setattr(ppo, listener.__name__, listener)
        train_here(folder, env_id=env_id, **sizes | arguments)
    assert len(records) == segments
    for record in records:
        order = record.segments.argsort()
        assert record.segments[order].tolist() == list(range(len(order))), "all of them, once"
        parts = record.__dict__.pop("parts")
        assert len(parts) == 2
        for name in parts[0]:
            whole = torch.cat([part[name] for part in parts], dim=1).detach()[:, order]
            setattr(record, name, whole[0] if name in ("h", "c") else whole)
    return records


CASES = {
    "Discrete": ("breakout", {"env": {"frameskip": 40}}),  # five balls are lost in twenty steps
    "native Box": ("cartpole", {"env": {"continuous": True}}),
    "Box": ("Continuous-v0", {}),
    "MultiDiscrete": ("TwoDials-v0", {}),
    "Gymnasium": ("CartPole-v1", {"num_envs": 8, "num_steps": 24}),
    "Dict observations": ("DictObs-v0", {}),
    "Tuple": ("Blackjack-v1", {"num_envs": 16}),
    "images": ("Image-v0", {"num_steps": 8, "num_envs": 2, "num_workers": 1}),
    "PettingZoo": ("tests.parallel_game", {"num_steps": 40, "num_workers": 2}),
    "multiprocessing": ("CueRecall-v0", {"num_workers": 2}),
    "native multiprocessing": ("breakout", {"env": {"frameskip": 40}, "num_workers": 2}),
    # Its episodes never end.
    "native MultiDiscrete": ("target", {"num_envs": 2, "num_workers": 2, "optimizer": "adam"}),
}


def ratio_without(record: SimpleNamespace, reset: bool = True, carry: bool = True) -> torch.Tensor:
    """The ratio (T, N), were the update to leave out the resets, or the carried state."""
    state = record.h * carry, record.c * carry
    hidden = ppo.lstm_outputs(record.x, *state, record.reset * reset, *record.weights)
    logits, _ = record.agent.heads(hidden)
    logprobs, _ = record.agent.evaluate_actions(logits, record.actions)
    return (logprobs - record.logprobs).exp().detach()


# I1: the ratio is 1 before the first update -------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_ratio_is_one_before_first_update_but_not_without_the_resets_or_the_carried_state(
    tmp_path, case
):
    env_id, arguments = CASES[case]
    first, second, third = record_training(tmp_path, env_id, **arguments)
    for record in first, second, third:
        torch.testing.assert_close(record.ratio, torch.ones_like(record.ratio), atol=1e-5, rtol=0)
        torch.testing.assert_close(record.new_values, record.values[:-1], atol=1e-5, rtol=0)
    for record, following in (first, second), (second, third):  # I4: the bootstrap
        torch.testing.assert_close(record.values[-1], following.values[0], atol=1e-5, rtol=0)
    if case != "native MultiDiscrete":
        assert second.reset[1:].any(), "an episode must end inside the segment"
        assert (ratio_without(second, reset=False) - 1).abs().max() > 1e-3
    assert not first.h.any()
    assert not second.reset[0].all(), "an episode must go on from one segment to the next"
    assert (ratio_without(second, carry=False) - 1).abs().max() > 1e-3


@pytest.mark.parametrize("normalize", [False, True])
def test_ratio_is_one_in_the_first_update_of_every_iteration_while_it_learns(tmp_path, normalize):
    arguments = {"learning_rate": 0.01, "adam_learning_rate": 0.001}
    arguments |= {"norm_obs": normalize, "norm_rewards": normalize}
    records = record_training(tmp_path, "CartPole-v1", segments=6, **arguments)
    for record in records:
        torch.testing.assert_close(record.ratio, torch.ones_like(record.ratio), atol=1e-5, rtol=0)
    assert (records[0].weights[0] - records[-1].weights[0]).abs().max() > 1e-3


@pytest.mark.parametrize("num_workers", [0, 2, 4])
def test_every_agent_gets_its_own_action_and_its_own_reward(tmp_path, num_workers):
    for record in record_training(tmp_path, "Continuous-v0", num_workers=num_workers):
        acted = record.valid
        error = ((record.actions.clamp(-1, 1) - record.observations) ** 2).sum(-1)
        torch.testing.assert_close(record.rewards, -error * acted, atol=1e-5, rtol=0)


# Several updates in an iteration


THREE = {"env_id": "CartPole-v1", "minibatch_size": 64, "update_epochs": 3.0, "prio_alpha": 0.0}


def test_each_draw_has_the_newest_values_and_ratios_and_a_beta_that_rises(tmp_path, listen):
    def note(_, values, rewards, dones, valid, ratio, uniform, beta, args):
        return values.clone(), ratio.clone(), beta.item()

    drawn = listen(ppo, "draw_minibatch", note)
    train_here(tmp_path, total_timesteps=2 * 64, **THREE)
    assert [beta for *_, beta in drawn] == pytest.approx(3 * [0.2] + 3 * [0.6])
    for first, third in (drawn[0], drawn[2]), (drawn[3], drawn[5]):
        assert (first[1] == 1).all() and (third[1] != 1).any()
        assert (third[0] != first[0]).any() and (third[0][-1] == first[0][-1]).all()


@pytest.mark.parametrize("most", [math.inf, 0.001])
def test_a_gradient_is_of_one_update_and_no_longer_than_it_may_be(tmp_path, listen, most):
    def note(_, muon):
        return [parameter.grad.clone() for parameter in muon.param_groups[0]["params"]]

    found = listen(ppo.Muon, "step", note)
    rates = {"learning_rate": 0.0, "adam_learning_rate": 0.0}  # so that all are the same
    train_here(tmp_path, total_timesteps=64, max_grad_norm=most, **THREE, **rates)
    torch.testing.assert_close(found[0], found[2], atol=1e-5, rtol=1e-3)
    assert nn.utils.get_total_norm(found[0]) <= 1.001 * most


def test_explained_variance_is_that_of_the_rollout(tmp_path, listen):
    given = listen(ppo, "draw_minibatch", lambda _, *x: [y.clone() for y in x[:5]])
    sizes = THREE | {"num_steps": 32, "num_envs": 2}
    (row,) = read_metrics(train_here(tmp_path, total_timesteps=64, **sizes))
    values, *_, valid, _ = given[0]
    errors = ppo.compute_advantages(*given[0], ppo.Args())[valid > 0]
    unexplained = errors.var() / (errors + values[:-1][valid > 0]).var()
    assert (valid == 0).any()
    assert row["losses/explained_variance"] == pytest.approx(1 - unexplained.item(), abs=1e-5)


def test_every_step_has_noise_of_its_own(tmp_path, listen):
    seen = listen(ppo, "act", lambda _, *given: given[-1].sum().item())
    train_here(tmp_path, env_id="CartPole-v1", total_timesteps=2 * 64)
    assert len(set(seen)) == len(seen) == 2 * 9


def test_rewards_are_clipped_for_learning(tmp_path, monkeypatch):
    for record in record_training(tmp_path, "Pendulum-v1", clip_rewards=True):
        assert record.rewards.min() == -1
    rare = itertools.cycle([1] + [0] * 999)  # far from the deviation of all returns
    monkeypatch.setattr(environments.Continuous, "reward", lambda *_: -float(next(rare)))
    sizes = {"num_steps": 512, "gamma": 0.0, "segments": 1, "norm_rewards": True}
    assert record_training(tmp_path, "Continuous-v0", **sizes)[0].rewards.min() == -10


# I2: the recurrence -------------------------------------------------------------------------------


def loop_over_cells(cell: nn.LSTMCell, x, h, c, dones):
    outputs = []
    for t in range(len(x)):
        keep = (1 - dones[t]).unsqueeze(-1)
        h, c = cell(x[t], (h * keep, c * keep))
        outputs.append(h)
    return torch.stack(outputs), h, c


def test_gates_keep_their_state_for_up_to_about_chrono_init_steps_at_first():
    for steps in 1, 100:
        _, bias = make_agent(chrono_init=steps).lstm_weights()
        i, f, g, o = bias.sigmoid().chunk(4)
        kept = torch.linspace(1, steps, 8)
        torch.testing.assert_close(f, kept / (1 + kept))
        torch.testing.assert_close(i, 1 - f)
        assert (g == 0.5).all() and (o == 0.5).all()


def test_lstm_equals_a_loop_over_cells_that_zeroes_its_state_in_values_and_gradients():
    T = 2 * ppo.UNROLL + 3
    N = 5
    H = 8
    agent = make_agent(hidden_size=H)
    for parameter in agent.lstm.parameters():
        nn.init.normal_(parameter, std=0.5)
    cell = nn.LSTMCell(H, H)
    state = agent.lstm.state_dict()
    cell.load_state_dict({name.removesuffix("_l0"): value for name, value in state.items()})
    x = torch.randn(T, N, H)
    h, c = torch.randn(2, N, H)
    dones = (torch.rand(T, N) < 0.3).float()
    dones[0, 0] = 1
    dones[-1, 1] = 1
    weights = agent.lstm_weights()
    ours = x.clone().requires_grad_()
    theirs = x.clone().requires_grad_()
    outputs, *last = ppo.lstm_forward(ours, h, c, dones, *weights)
    expected, *state = loop_over_cells(cell, theirs, h, c, dones)
    torch.testing.assert_close([outputs, *last], [expected, *state], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ppo.lstm_outputs(ours, h, c, dones, *weights), outputs)
    outer = torch.randn_like(outputs)
    (ppo.lstm_outputs(ours, h, c, dones, *weights) * outer).sum().backward()
    (expected * outer).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-5)
    for name, parameter in cell.named_parameters():
        found = getattr(agent.lstm, f"{name}_l0").grad
        torch.testing.assert_close(found, parameter.grad, atol=1e-4, rtol=1e-5, msg=name)
    agent.encode = lambda features: features  # the features themselves are the observations
    with torch.no_grad():
        for t in range(len(x)):
            *_, h, c = ppo.act(agent, x[t], dones[t], h, c, *weights, torch.ones(5, 3))
    torch.testing.assert_close([h, c], state, atol=1e-5, rtol=1e-5)


# I3: advantages -----------------------------------------------------------------------------------


def trajectory(T=12, N=6, seed=1):
    """Random values (T + 1, N), rewards, episode ends and ratios."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(T + 1, N))
    rewards = rng.normal(size=(T, N))
    dones = (rng.random((T + 1, N)) < 0.2).astype(float)
    ratio = np.exp(rng.normal(scale=0.5, size=(T, N)))
    return values, rewards, dones, ratio


def advantages_of(
    values, rewards, dones, ratio, gamma, gae_lambda, rho_clip=1.0, c_clip=1.0, valid=None
) -> np.ndarray:
    valid = np.ones_like(rewards) if valid is None else valid
    args = ppo.Args(
        gamma=gamma, gae_lambda=gae_lambda, vtrace_rho_clip=rho_clip, vtrace_c_clip=c_clip
    )
    arrays = (values, rewards, dones, valid, ratio)
    tensors = [torch.tensor(array, dtype=torch.float32) for array in arrays]
    return ppo.compute_advantages(*tensors, args).numpy()


@pytest.mark.parametrize(("rho_clip", "c_clip"), [(1.0, 1.0), (1.3, 0.8), (1e9, 1e9)])
@pytest.mark.parametrize("gae_lambda", [0.0, 0.9])
def test_advantages_equal_the_definition_evaluated_in_float64(gae_lambda, rho_clip, c_clip):
    v, r, d, ratio = trajectory()
    gamma = 0.97

    def advantage(t, i):
        if t == len(r):
            return 0.0
        rho = min(ratio[t, i], rho_clip)
        c = min(ratio[t, i], c_clip)
        delta = rho * (r[t, i] + gamma * v[t + 1, i] * (1 - d[t + 1, i]) - v[t, i])
        return delta + gamma * gae_lambda * c * (1 - d[t + 1, i]) * advantage(t + 1, i)

    expected = [[advantage(t, i) for i in range(r.shape[1])] for t in range(len(r))]
    found = advantages_of(v, r, d, ratio, gamma, gae_lambda, rho_clip, c_clip)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_with_ratio_one_advantages_are_the_lambda_weighted_mean_of_n_step_advantages():
    """Generalized advantage estimation as Schulman et al. 2016 define it (equation 16), not as it
    is computed."""
    v, r, d, _ = trajectory()
    gamma = 0.97
    gae_lambda = 0.8
    T, N = r.shape
    expected = np.zeros((T, N))
    for i, t in itertools.product(range(N), range(T)):
        # The episode, or else the segment, goes on until here.
        end = next((k for k in range(t + 1, T + 1) if d[k, i]), T)
        n_step = []
        for n in range(1, end - t + 1):
            last = 0.0 if t + n == end and d[end, i] else v[t + n, i]
            rewards = sum(gamma**k * r[t + k, i] for k in range(n))
            n_step.append(rewards + gamma**n * last - v[t, i])
        weights = [(1 - gae_lambda) * gae_lambda**k for k in range(len(n_step))]
        weights[-1] = gae_lambda ** (len(n_step) - 1)
        expected[t, i] = np.dot(weights, n_step)
    found = advantages_of(v, r, d, np.ones_like(r), gamma, gae_lambda)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(("rho_clip", "c_clip"), [(1.0, 1.0), (1.5, 0.9)])
def test_with_lambda_one_advantages_plus_values_are_vtrace_targets(rho_clip, c_clip):
    """Espeholt et al. 2018, equation 1; an episode's end is a discount of 0."""
    v, r, d, ratio = trajectory()
    T, N = r.shape
    discount = 0.97 * (1 - d[1:])
    rho = np.minimum(ratio, rho_clip)
    c = np.minimum(ratio, c_clip)
    targets = v[:-1].copy()
    for i, s in itertools.product(range(N), range(T)):
        for t in range(s, T):
            delta = rho[t, i] * (r[t, i] + discount[t, i] * v[t + 1, i] - v[t, i])
            targets[s, i] += np.prod(discount[s:t, i]) * np.prod(c[s:t, i]) * delta
    found = advantages_of(v, r, d, ratio, 0.97, 1.0, rho_clip, c_clip) + v[:-1]
    np.testing.assert_allclose(found, targets, atol=1e-5)


@pytest.mark.parametrize("gae_lambda", [0.9, 1.0])
def test_advantages_equal_those_of_pufferlibs_compiled_kernel(gae_lambda, tmp_path):
    """PufferLib's C function, cut out of its installed source and compiled: its torch extension is
    not built here.

    Its rewards are those that came with the observation (ours, shifted by one), and it has no
    advantage for the last step of a segment, so its segment of T + 1 steps is ours of T with the
    value that follows.
    """
    source = pathlib.Path(pufferlib.__file__).parent / "extensions" / "pufferlib.cpp"
    function = re.search(r"void puff_advantage_row\(.*?\n}\n", source.read_text(), re.DOTALL)[0]
    c_file = tmp_path / "kernel.c"
    c_file.write_text(f"#include <math.h>\n{function}")
    library = tmp_path / "kernel.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, c_file, "-lm"], check=True)
    kernel = ctypes.CDLL(str(library)).puff_advantage_row
    array = np.ctypeslib.ndpointer(np.float32)
    kernel.argtypes = [array] * 5 + [ctypes.c_float] * 4 + [ctypes.c_int]
    kernel.restype = None

    v, r, d, ratio = trajectory()
    T, N = r.shape
    expected = np.zeros((T, N))
    for i in range(N):
        advantages = np.zeros(T + 1, np.float32)
        columns = (v[:, i], np.append(7, r[:, i]), d[:, i], np.append(ratio[:, i], 7))
        columns = [column.astype(np.float32) for column in columns]
        kernel(*columns, advantages, 0.97, gae_lambda, 1.2, 0.9, T + 1)
        assert advantages[T] == 0
        expected[:, i] = advantages[:T]
    found = advantages_of(v, r, d, ratio, 0.97, gae_lambda, 1.2, 0.9)
    np.testing.assert_allclose(found, expected, atol=1e-5)


# I4: where values bootstrap -----------------------------------------------------------------------


def one_agent(values, rewards, dones, valid):
    """Advantages of one agent with gamma = lambda = 1/2 and ratio 1, from written-out columns."""
    columns = [np.array(x, float)[:, None] for x in (values, rewards, dones, np.ones(len(rewards)))]
    return advantages_of(*columns, 0.5, 0.5, valid=np.array(valid, float)[:, None])[:, 0].tolist()


def test_a_value_bootstraps_across_the_end_of_a_segment_and_not_through_a_termination():
    columns = {"values": [2, 4, 8], "rewards": [1, 1], "valid": [1, 1]}
    # delta = (1 + 0.5 * 4 - 2, 1 + 0.5 * 8 - 4) = (1, 1)
    assert one_agent(**columns, dones=[0, 0, 0]) == [1.25, 1]
    assert one_agent(**columns, dones=[0, 0, 1]) == [1 + 0.25 * -3 + 0, -3]
    assert one_agent(**columns, dones=[0, 1, 0]) == [-1, 1]


@pytest.mark.parametrize("reward, next_value", [(0, 8), (100, -100)])
def test_a_truncated_episode_bootstraps_from_its_last_observation_only(reward, next_value):
    # Step 1 saw the last observation (value 4), its action was ignored (valid 0, whatever the
    # reward); step 2 is a new episode (dones 1).
    values = [2, 4, next_value, 0]
    found = one_agent(values, rewards=[1, reward, 0], dones=[0, 0, 1, 0], valid=[1, 0, 1])
    assert found[:2] == [1 + 0.5 * 4 - 2, 0]
    # And so without an end.
    found = one_agent(values, rewards=[1, reward, 9], dones=[0, 0, 0, 0], valid=[1, 0, 1])
    assert found[:2] == [1 + 0.5 * 4 - 2, 0]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("terminate", [False, True])
def test_the_last_observation_is_not_acted_on_and_is_done_if_terminated(
    tmp_path, num_workers, terminate
):
    # Episodes of three steps: observations 0 1 2, then the last, 3, on which no action counts.
    arguments = {"num_steps": 7, "num_workers": num_workers, "env": {"terminate": terminate}}
    records = record_training(tmp_path, "Truncating-v0", segments=2, **arguments)
    last = int(terminate)
    for i in range(4):
        shown = [observation for record in records for observation in record.observations[:, i, 0]]
        assert shown == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
        assert records[0].dones[:, i].tolist() == [1, 0, 0, last, 1, 0, 0, last]
        assert records[1].dones[:, i].tolist() == [last, 1, 0, 0, last, 1, 0, 0]
        assert records[0].valid[:, i].tolist() == [1, 1, 1, 0, 1, 1, 1]
        assert records[1].valid[:, i].tolist() == [0, 1, 1, 1, 0, 1, 1]
        assert records[0].rewards[:, i].tolist() == [1, 1, 1, 0, 1, 1, 1]
    for record in records:
        torch.testing.assert_close(record.reset, record.dones[:-1])
        torch.testing.assert_close(record.weight, record.valid / record.valid.sum())


# I5: prioritized segments -------------------------------------------------------------------------

ADVANTAGES = torch.tensor(  # (T, N) = (2, 6)
    [[0.1, -1.0, 2.0, 0.0, -0.5, 3.0], [-0.1, 1.0, 0.5, 0.4, 0.0, -0.5]]
)
SUMS = np.array([0.2, 2.0, 2.5, 0.4, 0.5, 3.5])


def sample(advantages, k: int, alpha: float, beta: float, draws: int = 1):
    """Indices and weights (draws, k) of independent draws."""
    torch.manual_seed(1)
    uniform = torch.rand(draws, advantages.shape[1] + 1)
    one = functools.partial(ppo.sample_segments, k=k, alpha=alpha, beta=torch.tensor(beta))
    valid = torch.ones_like(advantages)
    return torch.vmap(lambda numbers: one(advantages, valid, numbers))(uniform)


@pytest.mark.parametrize("k", [1, 4, 9])
@pytest.mark.parametrize("alpha", [0.0, 0.8])
def test_segments_are_drawn_with_their_probabilities_and_weigh_less_for_them(alpha, k):
    draws, weights = sample(ADVANTAGES, k, alpha, 0.7, 4000)
    p = SUMS**alpha / (SUMS**alpha).sum()
    np.testing.assert_allclose(weights, (1 / (6 * p[draws])) ** 0.7 * 6 / k, rtol=1e-4)
    expected = k * p
    counts = nn.functional.one_hot(draws, 6).sum(1).numpy()
    assert (np.abs(counts - expected) < 1 + 1e-4).all(), "as often as expected, rounded up or down"
    error = (expected % 1 * (1 - expected % 1) / 4000) ** 0.5
    assert (np.abs(counts.mean(0) - expected) <= 4 * error + 1e-4).all()


@pytest.mark.parametrize(
    ("numbers", "alpha"), [(torch.randn, 0.0), (torch.zeros, 0.8)], ids=["alpha 0", "no advantages"]
)
@pytest.mark.parametrize("k", [3, 64])
def test_without_alpha_or_advantages_sampling_is_uniform_and_takes_none_twice(numbers, alpha, k):
    torch.manual_seed(2)
    index, importance = sample(numbers(4, 64), k, alpha, 0.7, 200)
    assert all(len(set(draw)) == k for draw in index.tolist())
    torch.testing.assert_close(importance, torch.full((200, k), 64 / k))
    assert scipy.stats.chisquare(index.flatten().bincount(minlength=64)).pvalue > 1e-3


def batch(T=4, N=16, valid=None):
    """What `draw_minibatch` needs but uniform and beta, with two segments of strong advantages."""
    torch.manual_seed(1)
    values = torch.randn(T + 1, N)
    dones = (torch.rand(T + 1, N) < 0.1).float()
    rewards = 0.1 * torch.randn(T, N)
    rewards[:, 3] += 4
    rewards[:, 11] += 3
    valid = torch.ones(T, N) if valid is None else valid
    return values, rewards, dones, valid, torch.ones(T, N)


SOME_VALID = (torch.rand(4, 16, generator=torch.Generator().manual_seed(4)) < 0.7).float()
HALF = {"minibatch_size": 32, "num_steps": 4, "prio_alpha": 0.8}  # of the batch


@pytest.mark.parametrize("valid", [None, SOME_VALID], ids=["all count", "some count"])
def test_with_beta_one_policy_value_and_entropy_terms_are_unbiased(valid):
    """Their weighted means over a minibatch are the batch's, on average over the draws."""
    args = ppo.Args(**HALF)
    agent = make_agent()
    tensors = batch(valid=valid)
    hidden = torch.randn(4, 16, 8)
    with torch.no_grad():
        logits, _ = agent.heads(hidden)
        actions, logprobs = agent.sample(logits, agent.sampling_noise(4, 16))
    logprobs += 0.1 * torch.randn(4, 16)  # so that the ratio is not 1

    @torch.no_grad()
    def terms(minibatch):
        segments = minibatch.segments
        taken = hidden[:, segments], actions[:, segments], logprobs[:, segments]
        return ppo.ppo_loss(agent, *taken, minibatch, args)[3][:3].double()

    whole = ppo.Args(**HALF | {"minibatch_size": 64, "prio_alpha": 0.0})
    everything = ppo.draw_minibatch(*tensors, torch.rand(17), 1.0, whole)
    assert sorted(everything.segments.tolist()) == list(range(16))
    uniform = torch.rand(3000, 17)
    draw = functools.partial(ppo.draw_minibatch, *tensors, beta=1.0, args=args)
    found = torch.vmap(lambda numbers: terms(draw(numbers)))(uniform)
    error = found.std(0) / len(found) ** 0.5
    expected = terms(everything)
    assert ((found.mean(0) - expected).abs() < 4 * error + 1e-7).all()
    assert (error < torch.tensor([0.005, 0.02, 0.01])).all(), "so that a bias would be seen"


@pytest.mark.parametrize("alpha", [0.0, 0.8])
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_weights_sum_to_one_and_agents_that_are_away_are_not_drawn(alpha, beta):
    args = ppo.Args(minibatch_size=16, num_steps=4, prio_alpha=alpha)
    valid = torch.ones(4, 16)
    valid[:, 6:] = 0
    draw = functools.partial(ppo.draw_minibatch, *batch(valid=valid), beta=beta, args=args)
    drawn = torch.vmap(draw)(torch.rand(2000, 17))
    assert drawn.segments.max() < 6
    assert drawn.weight.sum((1, 2)).mean() == pytest.approx(1, abs=0.02)
    nobody = ppo.draw_minibatch(*batch(valid=0 * valid), torch.rand(17), beta, args)
    assert (nobody.weight == 0).all()


def test_a_minibatch_has_the_newest_values_returns_and_weights_of_its_segments():
    args = ppo.Args(gamma=0.0, prio_alpha=0.0, minibatch_size=4, num_steps=2)
    rewards = torch.tensor([[1.0, 2.0, 300.0], [3.0, 6.0, -50.0]])
    valid = torch.tensor([[1, 1, 0], [1, 1, 0.0]])
    values = torch.full((3, 3), 0.5)
    tensors = (values, rewards, torch.zeros(3, 3), valid, torch.ones(2, 3), torch.rand(4), 1.0)
    minibatch = ppo.draw_minibatch(*tensors, args)
    order = minibatch.segments.argsort()
    torch.testing.assert_close(minibatch.returns[:, order], rewards[:, :2])
    torch.testing.assert_close(minibatch.values, values[:2, :2])
    torch.testing.assert_close(minibatch.weight[:, order], valid[:, :2] / 4)
    expected = torch.tensor([[-2.0, -1.0], [0.0, 3.0]]) / 3.5**0.5
    torch.testing.assert_close(minibatch.advantages[:, order], expected)
    args.norm_adv = False
    minibatch = ppo.draw_minibatch(*tensors, args)
    torch.testing.assert_close(minibatch.advantages, minibatch.returns - minibatch.values)


# I7 is in test_tools.py: PufferLib's Breakout weights are played by tools/play.py.

# I8: gradient accumulation ------------------------------------------------------------------------


def test_accumulated_gradients_equal_those_of_the_whole_minibatch(tmp_path, monkeypatch):
    gradients = []

    def clip_grad_norm_(parameters, norm, original=nn.utils.clip_grad_norm_):
        parameters = list(parameters)
        gradients.append([parameter.grad.clone() for parameter in parameters])
        return original(parameters, norm)

    monkeypatch.setattr(nn.utils, "clip_grad_norm_", clip_grad_norm_)
    losses = []
    for most in 32768, 16:
        sizes = {"num_envs": 16, "minibatch_size": 64, "max_minibatch_size": most}
        run = train_here(tmp_path / str(most), env_id="CartPole-v1", total_timesteps=128, **sizes)
        row = read_metrics(run)[0]
        losses.append({name: row[name] for name in row if name.startswith("losses/")})
    assert len(gradients) == 4  # two updates each
    torch.testing.assert_close(gradients[2], gradients[0], atol=1e-6, rtol=1e-4)
    assert losses[1] == pytest.approx(losses[0], rel=1e-3, abs=1e-5)
    assert losses[0]["losses/grad_norm"] > 0


# Observations -------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_encoder_sees_observations_in_float32(precision):
    agent = make_agent(space=BOX, hidden_size=128, precision=precision)
    observations = torch.zeros(1, 2, 4)
    observations[0, :, 0] = torch.tensor([1000.0, 1001.0])  # the same in bfloat16
    first, second = agent.encode(observations)[0]
    assert first.dtype == getattr(torch, precision)
    assert (first != second).float().mean() > 0.1  # rounding the features makes some of them equal
    agent.policy.encoder[0].weight.data[0] = torch.tensor([1.0, -1.0, 0.0, 0.0])
    features = agent.encode(torch.tensor([[[1001.0, 1000.0, 0.0, 0.0]]]))
    assert features[0, 0, 0].item() == pytest.approx(0.841, abs=0.004)  # GELU(1)


def pixels(shape):
    space = gym.spaces.Box(0, 255, shape, np.uint8)
    torch.manual_seed(2)
    return space, torch.randint(256, (6, *shape), dtype=torch.uint8)


@pytest.mark.parametrize("shape", [(84, 84, 12), (4, 84, 84), (84, 84)])
def test_images_go_through_convolutions_whatever_their_channels_but_for_small_ones(shape):
    space, images = pixels(shape)
    agent = make_agent(space=space)
    if len(shape) == 2:
        expected = images[:, None]
    else:
        expected = images if shape[0] == 4 else images.permute(0, 3, 1, 2)
    torch.testing.assert_close(agent.flatten(images), expected / 255)
    assert any(isinstance(layer, nn.Conv2d) for layer in agent.policy.encoder)
    features = agent.encode(images.view(2, 3, *shape))
    assert features.shape == (2, 3, 8)
    assert len(features.flatten(0, 1).unique(dim=0)) == 6, "each image has features of its own"
    space, images = pixels((32, 32, 3))  # small: scaled and flattened
    torch.testing.assert_close(make_agent(space=space).flatten(images), images.flatten(1) / 255)
    space, grids = pixels((7, 7, 3))  # smaller: a grid of names
    torch.testing.assert_close(make_agent(space=space).flatten(grids), grids.flatten(1).float())


# Running statistics -------------------------------------------------------------------------------


def statistics_of(samples: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of all rows of all iterations."""
    rows = np.concatenate(samples).astype(float)
    return rows.mean(0), rows.var(0)


def saved_statistics(folder, name: str):
    (run,) = folder.iterdir()
    model = torch.load(run / "trainer_state.pt")["model"]
    return model[f"{name}.running_mean"].numpy(), model[f"{name}.running_var"].numpy()


def test_observations_are_normalized_by_the_statistics_of_all_steps_that_count(tmp_path):
    sizes = {"num_envs": 8, "segments": 5, "norm_obs": True}
    records = record_training(tmp_path, "CartPole-v1", **sizes)
    seen = [record.observations[record.valid > 0].numpy() for record in records]
    assert len({len(steps) for steps in seen}) > 1, "some steps do not count"
    mean, variance = saved_statistics(tmp_path, "observation_norm")
    np.testing.assert_allclose(mean, statistics_of(seen)[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(variance, statistics_of(seen)[1], rtol=1e-4)
    observations = records[0].observations[0]
    expected = (observations.numpy() - mean) / np.sqrt(variance + 1e-8)
    normalized = records[0].agent.flatten(observations)
    np.testing.assert_allclose(normalized, expected.clip(-10, 10), rtol=1e-4, atol=1e-5)
    assert records[0].agent.flatten(1e9 * observations).abs().max() == 10
    as_training = records[0].agent.train().flatten(observations)  # as a fork with dropout calls it
    torch.testing.assert_close(as_training, normalized)


def test_rewards_are_divided_by_the_deviation_of_discounted_returns(tmp_path, listen):
    def note(result, _):  # raw rewards, dones and valid, as they come
        return [array.copy() for array in result[2:]]

    received = listen(ppo.Envs, "receive", note)
    arguments = {"norm_rewards": True, "gamma": 0.9, "num_steps": 6}
    records = record_training(tmp_path, "Continuous-v0", **arguments)
    discounted = np.zeros(4)
    sums = []
    for step, (_, dones, valid) in enumerate(received[:-1]):
        discounted = received[step + 1][0] + 0.9 * (1 - dones) * discounted
        sums.append(discounted[valid > 0])
    sums = [np.concatenate(sums[first : first + 6]) for first in range(0, 18, 6)]
    for number, record in enumerate(records):
        variance = statistics_of(sums[: number + 1])[1]
        raw = np.stack([rewards for rewards, _, _ in received[6 * number + 1 : 6 * number + 7]])
        expected = (raw / np.sqrt(variance + 1e-8)).clip(-10, 10)
        np.testing.assert_allclose(record.rewards, expected, rtol=1e-4)
    assert saved_statistics(tmp_path, "return_norm")[1] == pytest.approx(variance, rel=1e-4)


def test_logged_losses_are_means_whatever_the_weights_of_the_segments(tmp_path):
    rates = {"learning_rate": 1e-9, "adam_learning_rate": 1e-9}  # the policy stays nearly uniform
    sizes = {"num_envs": 32, "minibatch_size": 64, "total_timesteps": 2048}
    run = train_here(tmp_path, env_id="breakout", prio_alpha=0.9, prio_beta0=0.5, **sizes, **rates)
    for row in read_metrics(run)[:-1]:
        assert row["losses/entropy"] == pytest.approx(math.log(3), rel=3e-4)


def test_minibatches_in_which_no_step_counts_do_not_end_a_run(tmp_path):
    sizes = {"num_envs": 4, "num_steps": 2, "minibatch_size": 2, "total_timesteps": 256}
    train_here(tmp_path, env_id="tests.parallel_game", prio_alpha=0.0, **sizes)  # agents wait


# Muon and the learning rate -----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(32, 16), (16, 32), (8, 8)])
def test_muon_steps_as_torchs_own_does(shape):
    torch.manual_seed(1)
    start = torch.randn(shape)
    ours = nn.Parameter(start.clone())
    theirs = nn.Parameter(start.clone())
    optimizers = (
        ppo.Muon([ours], lr=torch.tensor(0.1), momentum=0.9, dtype=torch.bfloat16),
        torch.optim.Muon([theirs], lr=0.1, momentum=0.9, weight_decay=0.0),
    )
    for _ in range(3):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    # bfloat16 rounding: 0.4 % of three steps of 0.1
    torch.testing.assert_close(ours, theirs, atol=0.005, rtol=0)
    assert (ours - start).abs().max() > 0.02


def test_muon_trains_the_matrices_and_adam_the_rest():
    agent = make_agent(gym.spaces.Box(-1, 1, (2,), np.float32))
    muon, adam = ppo.make_optimizers(agent, ppo.Args(learning_rate=0.015))
    names = {id(parameter): name for name, parameter in agent.named_parameters()}
    matrices = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    rest = {names[id(p)] for group in adam.param_groups for p in group["params"]}
    policy = {f"policy.{name}.weight" for name in ("encoder.0", "decoder_mean", "value")}
    assert matrices == policy | {"lstm.weight_ih_l0", "lstm.weight_hh_l0"}
    assert matrices | rest == set(names.values())
    assert not matrices & rest
    assert adam.param_groups[0]["betas"] == (0.9, 0.999)  # --momentum is Muon's


ANNEALED = {
    "exponential": [64 ** (-i / 4) for i in range(4)],
    "linear": [1, 0.75, 0.5, 0.25],
    "constant": [1, 1, 1, 1],
}


@pytest.mark.parametrize("anneal", ANNEALED)
def test_both_learning_rates_fall_as_they_are_told(tmp_path, listen, anneal):
    def note(_, run, *given):
        return [float(one.param_groups[0]["lr"]) for one in run.optimizers]

    rates = listen(ppo.Run, "log", note)
    arguments = {"learning_rate": 0.01, "adam_learning_rate": 0.002, "total_timesteps": 4 * 64}
    rows = read_metrics(train_here(tmp_path, env_id="CartPole-v1", anneal=anneal, **arguments))
    assert [row["learning_rate"] / 0.01 for row in rows] == pytest.approx(ANNEALED[anneal])
    np.testing.assert_allclose(rates, np.outer(ANNEALED[anneal], [0.01, 0.002]), rtol=1e-5)


# The loss -----------------------------------------------------------------------------------------


def loss_of(*, ratio=1.0, advantage=0.0, value_change=0.0, value_error=0.0, **arguments):
    """One minibatch (T, B) = (2, 3) in which every step has this ratio, advantage, value - old
    value, return - value."""
    agent = make_agent()
    hidden = torch.randn(2, 3, 8).requires_grad_()
    with torch.no_grad():
        logits, values = agent.heads(hidden)
        actions, logprobs = agent.sample(logits, torch.ones(2, 3, 3))
    args = ppo.Args(**{"vf_coef": 0.0, "ent_coef": 0.0} | arguments)
    minibatch = ppo.Minibatch(
        segments=torch.arange(3),
        advantages=torch.full((2, 3), float(advantage)),
        returns=values + value_error,
        values=values - value_change,
        weight=torch.full((2, 3), 1 / 6),
    )
    logprobs -= np.log(ratio)
    loss, new_ratio, _, terms = ppo.ppo_loss(agent, hidden, actions, logprobs, minibatch, args)
    loss.backward()
    return SimpleNamespace(
        loss=loss.item(),
        grad=hidden.grad,
        logits=logits,
        ratio=new_ratio,
        statistics=dict(zip(ppo.LOSSES[1:], terms.tolist())),
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [(1.5, 1.0, True), (1.5, -1.0, False), (0.5, -1.0, True), (0.5, 1.0, False), (1.1, 1.0, False)],
)
def test_the_surrogate_is_clipped_only_where_the_ratio_already_moved_the_way_of_the_advantage(
    ratio, advantage, clipped
):
    result = loss_of(ratio=ratio, advantage=advantage, clip_coef=0.2)
    assert bool((result.grad == 0).all()) == clipped
    bounded = np.clip(ratio, 0.8, 1.2) if clipped else ratio
    assert result.loss == pytest.approx(-bounded * advantage, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "clipped"),
    [(0.5, 0.5, True), (0.5, -0.5, False), (-0.5, -0.5, True), (0.1, 0.5, False)],
)
def test_the_value_loss_is_clipped_where_the_value_already_moved_towards_the_return(
    change, error, clipped
):
    moved = {"value_change": change, "value_error": error, "vf_coef": 2.0}
    result = loss_of(**moved, vf_clip_coef=0.2)
    assert bool((result.grad == 0).all()) == clipped
    distance = error
    if clipped:  # from the clipped value, the farther one
        distance = error + change - np.clip(change, -0.2, 0.2)
    assert result.loss == pytest.approx(2.0 * 0.5 * distance**2, rel=1e-4)
    assert loss_of(**moved, vf_clip_coef=np.inf).loss == pytest.approx(error**2, rel=1e-4)


def test_the_loss_is_the_sum_of_the_three_terms_that_are_logged():
    coefficients = {"clip_coef": 0.2, "vf_coef": 3.0, "ent_coef": 7.0}
    result = loss_of(ratio=1.5, advantage=1.0, value_error=2.0, **coefficients)
    entropy = torch.distributions.Categorical(logits=result.logits).entropy().mean().item()
    expected = {"policy_loss": -1.2, "value_loss": 0.5 * 4, "entropy": entropy, "clipfrac": 1.0}
    expected["approx_kl"] = 0.5 - np.log(1.5)
    assert result.statistics == pytest.approx(expected, rel=1e-4)
    assert result.loss == pytest.approx(-1.2 + 3 * 2 - 7 * entropy, rel=1e-4)
    torch.testing.assert_close(result.ratio, torch.full((2, 3), 1.5))


# The policy ---------------------------------------------------------------------------------------


def test_actions_are_sampled_with_the_probabilities_of_the_logits():
    agent = make_agent(gym.spaces.MultiDiscrete([3, 2]))
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5, -0.5])
    actions, logprobs = agent.sample(logits.expand(20000, 5), agent.sampling_noise(20000))
    joint = torch.outer(logits[:3].softmax(0), logits[3:].softmax(0))
    counts = (actions[:, 0] * 2 + actions[:, 1]).bincount(minlength=6).double().numpy()
    expected = joint.flatten().double().numpy()
    assert scipy.stats.chisquare(counts, expected / expected.sum() * 20000).pvalue > 1e-3
    torch.testing.assert_close(logprobs, joint[actions[:, 0], actions[:, 1]].log())


def test_log_probability_and_entropy_of_several_choices_are_sums_over_categoricals():
    agent = make_agent(gym.spaces.MultiDiscrete([3, 2, 4]))
    logits = torch.randn(7, 5, 9)
    actions = torch.stack([torch.randint(n, (7, 5)) for n in (3, 2, 4)], -1)
    parts = [torch.distributions.Categorical(logits=part) for part in logits.split((3, 2, 4), -1)]
    logprobs, entropy = agent.evaluate_actions(logits, actions)
    expected = sum(part.log_prob(actions[..., i]) for i, part in enumerate(parts))
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(entropy, sum(part.entropy() for part in parts))


def test_continuous_actions_are_gaussian_with_the_learned_deviation():
    agent = make_agent(gym.spaces.Box(-1, 1, (2,), np.float32))
    agent.policy.decoder_logstd.data = torch.tensor([[0.5, -1.0]])
    means = torch.tensor([3.0, -2.0])
    with torch.no_grad():
        actions, logprobs = agent.sample(means.expand(20000, 2), agent.sampling_noise(20000))
        _, entropy = agent.evaluate_actions(torch.zeros(1, 2), torch.zeros(1, 2))
    normal = torch.distributions.Normal(means, torch.tensor([0.5, -1.0]).exp())
    torch.testing.assert_close(actions.mean(0), normal.mean, atol=0.05, rtol=0)
    torch.testing.assert_close(actions.std(0), normal.stddev, atol=0, rtol=0.03)
    torch.testing.assert_close(logprobs, normal.log_prob(actions).sum(-1))
    torch.testing.assert_close(entropy, normal.entropy().sum()[None])


SPACES = {
    "Discrete": gym.spaces.Discrete(3),
    "MultiDiscrete": gym.spaces.MultiDiscrete([3, 2]),
    "Box": gym.spaces.Box(-1, 1, (2,), np.float32),
}


@pytest.mark.parametrize("kind", SPACES)
def test_a_new_policy_is_about_the_same_whatever_it_sees(kind):
    agent = ppo.Agent(BOX, SPACES[kind], ppo.Args(precision="float32"))
    assert agent.heads(torch.randn(100, 128))[0].abs().max() < 0.1


# Weights in PufferLib's format --------------------------------------------------------------------


@pytest.mark.parametrize("kind", SPACES)
def test_pufferlibs_network_has_our_parameters_in_our_order_and_computes_what_ours_does(kind):
    """So its flat .bin files fit; PufferLib's policy step has names of its own for the LSTM's."""
    agent = make_agent(SPACES[kind], hidden_size=128)
    env = SimpleNamespace(single_observation_space=BOX, single_action_space=SPACES[kind])
    env.observation_space = None
    network = pufferlib.models.LSTMWrapper(env, pufferlib.models.Default(env, 128), 128, 128)
    names = [name for name, _ in agent.named_parameters()]
    assert names == [name for name, _ in network.named_parameters()]
    for parameter in agent.parameters():
        nn.init.normal_(parameter, std=0.1)
    flat = nn.utils.parameters_to_vector(agent.parameters())
    nn.utils.vector_to_parameters(flat, network.parameters())
    observations = torch.randn(3, 5, 4)
    state = {"lstm_h": torch.zeros(5, 128), "lstm_c": torch.zeros(5, 128)}
    with torch.no_grad():
        features = agent.encode(observations)
        start = torch.zeros(2, 5, 128)
        hidden, *_ = ppo.lstm_forward(features, *start, torch.zeros(3, 5), *agent.lstm_weights())
        logits, values = agent.heads(hidden)
        for t in range(3):
            expected, expected_values = network.forward_eval(observations[t], state)
            if kind == "MultiDiscrete":
                expected = torch.cat(expected, dim=1)
            expected = expected.mean if kind == "Box" else expected
            torch.testing.assert_close(logits[t], expected, atol=1e-5, rtol=0)
            torch.testing.assert_close(values[t], expected_values.squeeze(-1), atol=1e-5, rtol=0)
