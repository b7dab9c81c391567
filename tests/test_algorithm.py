"""What the algorithm must do, said with the plain functions of the reference script, in float32 and eager."""

import ctypes
import functools
import itertools
import pathlib
import re
import signal
import subprocess
from types import SimpleNamespace

import environments  # noqa: F401  (registers the tests' own Gymnasium environments)
import gymnasium as gym
import numpy as np
import pufferlib
import pufferlib.models
import pytest
import scipy.stats
import torch
from conftest import newest_run, read_metrics, run_script
from torch import nn

import ppo_lstm_puffer as ppo

BOX = gym.spaces.Box(-1, 1, (4,), np.float32)


def make_agent(action_space=None, hidden_size=8, precision="float32") -> ppo.Agent:
    """A small agent whose policy depends on its state: the trainer's own starts almost uniform."""
    torch.manual_seed(1)
    agent = ppo.Agent(BOX, action_space or gym.spaces.Discrete(3), hidden_size, precision)
    ppo.layer_init(actor_of(agent), 1.0)
    return agent


def actor_of(agent) -> nn.Linear:
    return agent.policy.decoder_mean if agent.continuous else agent.policy.decoder


# I1: the ratio before the first update ------------------------------------------------------------------------------------


@functools.cache
def roll_out(
    env_id: str, num_steps: int = 16, num_envs: int = 4, segments: int = 2, **arguments
) -> SimpleNamespace:
    """Some segments rolled out as train() does, with one policy. Lists have one entry per segment."""
    env = {
        name: arguments.pop(name)
        for name in list(arguments)
        if name in ("frameskip", "continuous", "terminate")
    }
    args = ppo.Args(
        env_id=env_id,
        num_envs=num_envs,
        num_steps=num_steps,
        hidden_size=16,
        precision="float32",
        env=env,
        **arguments,
    )
    ppo.seed_everything(args.seed)
    envs = ppo.make_envs(args, args.seed)
    T, N = num_steps, envs.num_agents
    agent = ppo.Agent(
        envs.single_observation_space, envs.single_action_space, args.hidden_size, args.precision
    )
    ppo.layer_init(actor_of(agent), 1.0)
    observations = torch.zeros(
        (T + 1, N, *envs.single_observation_space.shape), dtype=envs.torch_dtype
    )
    dones, valid = torch.ones((2, T + 1, N)).unbind()
    actions = torch.zeros((T, N, envs.num_actions), dtype=agent.action_dtype)
    logprobs, values, rewards = torch.zeros((3, T, N)).unbind()
    h, c = torch.zeros((2, N, args.hidden_size)).unbind()

    def receive(t):
        agents, observation, reward, done, counts = envs.receive()
        observations[t, agents], dones[t, agents] = (
            torch.as_tensor(observation),
            torch.as_tensor(done),
        )
        valid[t, agents] = torch.as_tensor(counts)
        if t > 0:
            rewards[t - 1, agents] = torch.as_tensor(reward)
        return agents

    names = (
        "observations",
        "dones",
        "valid",
        "actions",
        "logprobs",
        "values",
        "rewards",
        "start_h",
        "start_c",
        "next_value",
    )
    stored = {name: [] for name in names}
    try:
        envs.reset()
        groups = [receive(0) for _ in range(envs.num_groups)]
        for _ in range(segments):
            start_h, start_c = h.clone(), c.clone()
            with torch.no_grad():
                weight, bias = agent.lstm_weights()
                noise = agent.sampling_noise(T, N)
                for t in range(T):
                    for agents in groups:
                        if t > 0:
                            receive(t)
                        (
                            actions[t, agents],
                            logprobs[t, agents],
                            values[t, agents],
                            h[agents],
                            c[agents],
                        ) = ppo.act(
                            agent,
                            observations[t, agents],
                            dones[t, agents],
                            h[agents],
                            c[agents],
                            weight,
                            bias,
                            noise[t, agents],
                        )
                        envs.send(actions[t, agents].numpy())
                for _ in groups:
                    receive(T)
                next_value = ppo.act(
                    agent, observations[T], dones[T], h, c, weight, bias, noise[0]
                )[2]
            for name in names:
                stored[name].append(locals()[name].clone())
            observations[0], dones[0], valid[0] = observations[T], dones[T], valid[T]
    finally:
        envs.close()
    return SimpleNamespace(**stored, T=T, N=N, agent=agent, groups=groups, episodes=envs.episodes)


def recompute(data: SimpleNamespace, segment: int, reset: bool = True, carry: bool = True):
    """Ratio and values of a stored segment (T, N), computed as the update does, its columns shuffled and put back."""
    index = torch.randperm(data.N)
    dones = data.dones[segment][: data.T, index] * reset
    hidden = ppo.LSTM.apply(
        data.agent.encode(data.observations[segment][: data.T, index]),
        data.start_h[segment][index] * carry,
        data.start_c[segment][index] * carry,
        dones,
        *data.agent.lstm_weights(),
    )
    logits, values = data.agent.heads(hidden)
    logprobs = data.agent.evaluate_actions(logits, data.actions[segment][:, index])[0]
    ratio = torch.empty(data.T, data.N)
    ratio[:, index] = (logprobs - data.logprobs[segment][:, index]).exp().detach()
    return ratio, values.detach()[:, index.argsort()]


CASES = {
    "Discrete": (
        "breakout",
        {"frameskip": 40},
    ),  # a random player loses its five balls within some twenty steps
    "native Box": ("cartpole", {"continuous": True}),
    "Box": ("Continuous-v0", {}),
    "MultiDiscrete": ("TwoDials-v0", {}),
    "Gymnasium": ("CartPole-v1", {"num_envs": 8, "num_steps": 24}),
    "Dict observations": ("DictObs-v0", {}),
    "images": ("Image-v0", {"num_steps": 8, "num_envs": 2}),
    "PettingZoo": ("tests.parallel_game", {}),
    "multiprocessing": ("CueRecall-v0", {"num_workers": 2}),
    "native multiprocessing": ("breakout", {"frameskip": 40, "num_workers": 2}),
    "native MultiDiscrete": ("target", {"num_envs": 1}),  # its episodes never end
}


@pytest.mark.parametrize("case", CASES)
def test_ratio_is_one_before_first_update(case):
    env_id, arguments = CASES[case]
    data = roll_out(env_id, **arguments)
    for segment in range(2):
        ratio, values = recompute(data, segment)
        torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)
        torch.testing.assert_close(values, data.values[segment], atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", [case for case in CASES if case != "native MultiDiscrete"])
def test_ratio_is_not_one_if_the_resets_are_ignored(case):
    env_id, arguments = CASES[case]
    data = roll_out(env_id, **arguments)
    assert data.dones[1][1 : data.T].any(), "an episode must end inside the segment"
    assert (recompute(data, 1, reset=False)[0] - 1).abs().max() > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_ratio_is_not_one_if_the_state_is_not_carried_from_the_segment_before(case):
    env_id, arguments = CASES[case]
    data = roll_out(env_id, **arguments)
    assert not data.dones[1][0].all(), "an episode must go on from one segment to the next"
    assert (recompute(data, 1, carry=False)[0] - 1).abs().max() > 1e-3


def test_multiprocessing_is_double_buffered():
    data = roll_out("CueRecall-v0", num_workers=2)
    assert data.groups == [slice(0, 2), slice(2, 4)]


CARTPOLE = [
    "--env-id",
    "CartPole-v1",
    "--learning-rate",
    0.01,
    "--minibatch-size",
    256,
    "--checkpoint-interval",
    1,
    "--keep-checkpoints",
    8,
]


@pytest.mark.parametrize(
    "arguments",
    [{}, {"num_workers": 2}, {"num_workers": 4}],
    ids=["serial", "two workers", "four workers"],
)
def test_every_agent_gets_its_own_action_and_its_own_reward(arguments):
    data = roll_out("Continuous-v0", **arguments)
    for segment in range(2):
        targets, acted = data.observations[segment][: data.T], data.valid[segment][: data.T]
        expected = -((data.actions[segment].clamp(-1, 1) - targets) ** 2).sum(-1) * acted
        torch.testing.assert_close(data.rewards[segment], expected, atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def whole_batch_run(tmp_path_factory):
    """Eight iterations of one update each, so that every update sees the policy that acted."""
    folder = tmp_path_factory.mktemp("whole")
    result = run_script(*CARTPOLE, cwd=folder)
    assert result.returncode == 0, result.stderr
    return newest_run(folder)


def test_the_trainer_finds_ratio_one_in_the_first_update_of_every_iteration(whole_batch_run):
    rows = read_metrics(whole_batch_run)
    assert len(rows) == 8
    for row in rows:
        assert row["losses/clipfrac"] == 0
        assert abs(row["losses/importance"] - 1) < 1e-5
        assert abs(row["losses/approx_kl"]) < 1e-7


# I2: the recurrence -------------------------------------------------------------------------------------------------------


def loop_over_cells(cell: nn.LSTMCell, x, h, c, dones):
    outputs = []
    for t in range(len(x)):
        keep = (1 - dones[t]).unsqueeze(-1)
        h, c = cell(x[t], (h * keep, c * keep))
        outputs.append(h)
    return torch.stack(outputs), h, c


def recurrence(T=9, N=5, H=8):
    """An agent's LSTM, the same as a cell, and data: inputs, a state, episode ends (at the first and the last step, too)."""
    agent = make_agent(hidden_size=H)
    for parameter in agent.lstm.parameters():
        nn.init.normal_(parameter, std=0.5)
    cell = nn.LSTMCell(H, H)
    cell.load_state_dict(
        {name.removesuffix("_l0"): value for name, value in agent.lstm.state_dict().items()}
    )
    x, h, c = torch.randn(T, N, H), torch.randn(N, H), torch.randn(N, H)
    dones = (torch.rand(T, N) < 0.3).float()
    dones[0, 0] = dones[-1, 1] = 1
    return agent, cell, x, h, c, dones


def test_lstm_equals_a_loop_over_cells_that_zeroes_its_state_in_values_and_gradients():
    agent, cell, x, h, c, dones = recurrence()
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    outputs = ppo.LSTM.apply(ours, h, c, dones, *agent.lstm_weights())
    expected, _, _ = loop_over_cells(cell, theirs, h, c, dones)
    torch.testing.assert_close(outputs, expected, atol=1e-5, rtol=1e-5)
    outer = torch.randn_like(outputs)
    (outputs * outer).sum().backward()
    (expected * outer).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-5)
    for name, parameter in cell.named_parameters():
        torch.testing.assert_close(
            getattr(agent.lstm, f"{name}_l0").grad, parameter.grad, atol=1e-5, rtol=1e-5, msg=name
        )


def test_lstm_ends_in_the_state_of_the_loop_over_cells_and_policy_steps_go_through_the_same_states():
    agent, cell, x, h, c, dones = recurrence()
    with torch.no_grad():
        weight, bias = agent.lstm_weights()
        _, expected_h, expected_c = loop_over_cells(cell, x, h, c, dones)
        _, last_h, last_c, *_ = ppo.lstm_forward(x, h, c, dones, weight, bias)
        torch.testing.assert_close((last_h, last_c), (expected_h, expected_c), atol=1e-5, rtol=1e-5)
        agent.encode = lambda features: features  # the features themselves are the observations
        noise = torch.ones(5, 3)
        for t in range(len(x)):
            _, _, _, h, c = ppo.act(agent, x[t], dones[t], h, c, weight, bias, noise)
        torch.testing.assert_close((h, c), (expected_h, expected_c), atol=1e-5, rtol=1e-5)


def test_no_gradient_flows_over_the_end_of_an_episode():
    agent, _, x, h, c, _ = recurrence()
    dones = torch.zeros(9, 5)
    dones[4] = 1
    x.requires_grad_()
    ppo.LSTM.apply(x, h, c, dones, *agent.lstm_weights())[4:].sum().backward()
    assert (x.grad[:4] == 0).all()
    assert (x.grad[4:] != 0).any(-1).all()


def test_lstm_in_bfloat16_is_close_to_float32():
    agent, _, x, h, c, dones = recurrence()
    gradients, outputs = [], []
    for dtype in (torch.float32, torch.bfloat16):
        agent.dtype = dtype
        agent.zero_grad()
        inputs = x.detach().clone().to(dtype).requires_grad_()
        hidden = ppo.LSTM.apply(inputs, h, c, dones, *agent.lstm_weights())
        assert hidden.dtype == dtype
        hidden.float().pow(2).sum().backward()
        outputs.append(hidden.float())
        gradients.append(
            torch.cat(
                [p.grad.flatten() for p in agent.lstm.parameters()]
                + [inputs.grad.float().flatten()]
            )
        )
    torch.testing.assert_close(outputs[1], outputs[0], atol=0.03, rtol=0)
    assert torch.cosine_similarity(*gradients, dim=0) > 0.999
    assert abs(gradients[1].norm() / gradients[0].norm() - 1) < 0.02


# I3: advantages -----------------------------------------------------------------------------------------------------------


def trajectory(T=12, N=6, seed=1):
    """Random values (T + 1, N), rewards, episode ends and ratios."""
    rng = np.random.default_rng(seed)
    values, rewards = rng.normal(size=(T + 1, N)), rng.normal(size=(T, N))
    dones, ratio = (
        (rng.random((T + 1, N)) < 0.2).astype(float),
        np.exp(rng.normal(scale=0.5, size=(T, N))),
    )
    return values, rewards, dones, ratio


def advantages_of(
    values, rewards, dones, ratio, gamma, gae_lambda, rho_clip=1.0, c_clip=1.0, valid=None
) -> np.ndarray:
    values, rewards, dones, ratio = (
        torch.tensor(x, dtype=torch.float32) for x in (values, rewards, dones, ratio)
    )
    valid = torch.ones_like(rewards) if valid is None else torch.tensor(valid, dtype=torch.float32)
    return ppo.compute_advantages(
        values, rewards, dones, valid, ratio, gamma, gae_lambda, rho_clip, c_clip
    ).numpy()


@pytest.mark.parametrize(("rho_clip", "c_clip"), [(1.0, 1.0), (1.3, 0.8), (0.7, 1.5), (1e9, 1e9)])
@pytest.mark.parametrize("gae_lambda", [0.0, 0.9, 1.0])
def test_advantages_equal_the_definition_evaluated_in_float64(gae_lambda, rho_clip, c_clip):
    v, r, d, ratio = trajectory()
    gamma = 0.97

    def advantage(t, i):
        if t == len(r):
            return 0.0
        rho, c = min(ratio[t, i], rho_clip), min(ratio[t, i], c_clip)
        delta = rho * (r[t, i] + gamma * v[t + 1, i] * (1 - d[t + 1, i]) - v[t, i])
        return delta + gamma * gae_lambda * c * (1 - d[t + 1, i]) * advantage(t + 1, i)

    expected = [[advantage(t, i) for i in range(r.shape[1])] for t in range(len(r))]
    np.testing.assert_allclose(
        advantages_of(v, r, d, ratio, gamma, gae_lambda, rho_clip, c_clip), expected, atol=1e-5
    )


def test_with_ratio_one_advantages_are_the_lambda_weighted_mean_of_n_step_advantages():
    """Generalized advantage estimation as Schulman et al. 2016 define it (equation 16), not as it is computed."""
    v, r, d, _ = trajectory()
    gamma, gae_lambda, (T, N) = 0.97, 0.8, r.shape
    expected = np.zeros((T, N))
    for i in range(N):
        for t in range(T):
            end = next(
                (k for k in range(t + 1, T + 1) if d[k, i]), T
            )  # the episode, or else the segment, goes on until here
            last_value = 0.0 if d[end, i] else v[end, i]
            steps = range(1, end - t + 1)
            n_step = [
                sum(gamma**k * r[t + k, i] for k in range(n))
                + gamma**n * (last_value if t + n == end else v[t + n, i])
                - v[t, i]
                for n in steps
            ]
            weights = [(1 - gae_lambda) * gae_lambda ** (n - 1) for n in steps[:-1]] + [
                gae_lambda ** (len(steps) - 1)
            ]
            expected[t, i] = np.dot(weights, n_step)
    np.testing.assert_allclose(
        advantages_of(v, r, d, np.ones_like(r), gamma, gae_lambda), expected, atol=1e-5
    )


@pytest.mark.parametrize(("rho_clip", "c_clip"), [(1.0, 1.0), (1.5, 0.9)])
def test_with_lambda_one_advantages_plus_values_are_vtrace_targets(rho_clip, c_clip):
    """Espeholt et al. 2018, equation 1; an episode's end is a discount of 0."""
    v, r, d, ratio = trajectory()
    T, N = r.shape
    discount = 0.97 * (1 - d[1:])
    rho, c = np.minimum(ratio, rho_clip), np.minimum(ratio, c_clip)
    targets = np.zeros((T, N))
    for i in range(N):
        for s in range(T):
            targets[s, i] = v[s, i] + sum(
                np.prod(discount[s:t, i])
                * np.prod(c[s:t, i])
                * rho[t, i]
                * (r[t, i] + discount[t, i] * v[t + 1, i] - v[t, i])
                for t in range(s, T)
            )
    np.testing.assert_allclose(
        advantages_of(v, r, d, ratio, 0.97, 1.0, rho_clip, c_clip) + v[:-1], targets, atol=1e-5
    )


@pytest.mark.parametrize("gae_lambda", [0.9, 1.0])
def test_advantages_equal_those_of_pufferlibs_compiled_kernel_where_it_defines_them(
    gae_lambda, tmp_path
):
    """PufferLib's C function, cut out of its installed source and compiled: its torch extension is not built here.

    Its rewards are those that came with the observation (ours, shifted by one), and it has no advantage for the last step of a
    segment, so its segment of T + 1 steps is ours of T with the value that follows.
    """
    source = pathlib.Path(pufferlib.__file__).parent / "extensions" / "pufferlib.cpp"
    function = re.search(r"void puff_advantage_row\(.*?\n}\n", source.read_text(), re.DOTALL)[0]
    (tmp_path / "kernel.c").write_text(f"#include <math.h>\n{function}")
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", tmp_path / "kernel.so", tmp_path / "kernel.c", "-lm"],
        check=True,
    )
    kernel = ctypes.CDLL(str(tmp_path / "kernel.so")).puff_advantage_row
    array, number = np.ctypeslib.ndpointer(np.float32), ctypes.c_float
    kernel.argtypes, kernel.restype = [array] * 5 + [number] * 4 + [ctypes.c_int], None

    v, r, d, ratio = trajectory()
    T, N = r.shape
    expected = np.zeros((T, N))
    for i in range(N):
        rewards, ratios, advantages = (
            np.append(7, r[:, i]),
            np.append(ratio[:, i], 7),
            np.zeros(T + 1, np.float32),
        )
        columns = [x.astype(np.float32) for x in (v[:, i], rewards, d[:, i], ratios)]
        kernel(*columns, advantages, 0.97, gae_lambda, 1.2, 0.9, T + 1)
        assert advantages[T] == 0
        expected[:, i] = advantages[:T]
    np.testing.assert_allclose(
        advantages_of(v, r, d, ratio, 0.97, gae_lambda, 1.2, 0.9), expected, atol=1e-5
    )


# I4: where values bootstrap -----------------------------------------------------------------------------------------------


def one_agent(values, rewards, dones, valid):
    """Advantages of one agent with gamma = lambda = 1/2 and ratio 1, from written-out columns."""
    columns = [np.array(x, float)[:, None] for x in (values, rewards, dones, np.ones(len(rewards)))]
    return advantages_of(*columns, 0.5, 0.5, valid=np.array(valid, float)[:, None])[:, 0].tolist()


def test_a_value_bootstraps_across_the_end_of_a_segment():
    # delta = (1 + 0.5 * 4 - 2, 1 + 0.5 * 8 - 4) = (1, 1)
    assert one_agent(values=[2, 4, 8], rewards=[1, 1], dones=[0, 0, 0], valid=[1, 1]) == [1.25, 1]


def test_a_value_does_not_bootstrap_through_a_termination():
    assert one_agent(values=[2, 4, 8], rewards=[1, 1], dones=[0, 0, 1], valid=[1, 1]) == [
        1 + 0.25 * -3 + 0,
        -3,
    ]
    assert one_agent(values=[2, 4, 8], rewards=[1, 1], dones=[0, 1, 0], valid=[1, 1]) == [-1, 1]


def test_a_truncated_episode_bootstraps_from_its_last_observation_and_no_further():
    # Step 1 saw the last observation (value 4), its action was ignored (valid 0); step 2 is a new episode (dones 1).
    for reward_of_the_ignored_action, value_of_the_next_episode in ((0, 8), (100, -100)):
        values, rewards = [2, 4, value_of_the_next_episode, 0], [1, reward_of_the_ignored_action, 0]
        assert one_agent(values, rewards, dones=[0, 0, 1, 0], valid=[1, 0, 1])[:2] == [
            1 + 0.5 * 4 - 2,
            0,
        ]


def test_an_ignored_step_has_no_advantage_whatever_follows():
    assert one_agent(
        values=[2, 4, 8, 0], rewards=[1, 5, 9], dones=[0, 0, 0, 0], valid=[1, 0, 1]
    ) == [1, 0, 1]


def test_one_step_advantages_do_not_depend_on_where_segments_are_cut():
    v, r, d, ratio = trajectory(T=12)
    whole = advantages_of(v, r, d, ratio, 0.97, 0.0)
    halves = [
        advantages_of(v[a : b + 1], r[a:b], d[a : b + 1], ratio[a:b], 0.97, 0.0)
        for a, b in ((0, 6), (6, 12))
    ]
    np.testing.assert_array_equal(whole, np.concatenate(halves))


@pytest.mark.parametrize("case", CASES)
def test_the_value_after_a_segment_is_the_first_value_of_the_next(case):
    env_id, arguments = CASES[case]
    data = roll_out(env_id, **arguments)
    torch.testing.assert_close(data.next_value[0], data.values[1][0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_step_after_a_truncation_is_not_valid_and_the_one_after_that_begins_an_episode(
    num_workers,
):
    data = roll_out("Truncating-v0", num_steps=8, segments=1, num_workers=num_workers)
    for i in range(
        data.N
    ):  # episodes of three steps: observations 0 1 2, then the last, 3, on which no action counts
        assert data.observations[0][:, i, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0]
        assert data.dones[0][:, i].tolist() == [1, 0, 0, 0, 1, 0, 0, 0, 1]
        assert data.valid[0][:, i].tolist() == [1, 1, 1, 0, 1, 1, 1, 0, 1]
        assert data.rewards[0][:, i].tolist() == [1, 1, 1, 0, 1, 1, 1, 0]
    assert sorted(data.episodes) == [(i, 3.0, 3) for i in range(data.N) for _ in range(2)]


def test_a_termination_marks_the_last_observation_as_done():
    data = roll_out("Truncating-v0", num_steps=8, segments=1, terminate=True)
    assert data.observations[0][:, 0, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert data.dones[0][:, 0].tolist() == [1, 0, 0, 1, 1, 0, 0, 1, 1]
    assert data.valid[0][:, 0].tolist() == [1, 1, 1, 0, 1, 1, 1, 0, 1]


@pytest.mark.parametrize("terminate", [False, True])
def test_advantages_of_a_rollout_bootstrap_through_truncations_only(terminate):
    data = roll_out("Truncating-v0", num_steps=8, segments=1, terminate=terminate)
    v, ones = data.values[0], torch.ones_like(data.values[0])
    values = torch.cat((v, data.next_value[0][None]))
    advantages = ppo.compute_advantages(
        values, data.rewards[0], data.dones[0], data.valid[0][:8], ones, 0.9, 0.5, 1.0, 1.0
    )
    torch.testing.assert_close(advantages[2], 1 + (0 if terminate else 0.9 * v[3]) - v[2])
    torch.testing.assert_close(advantages[1], 1 + 0.9 * v[2] - v[1] + 0.45 * advantages[2])
    assert (advantages[3] == 0).all()


def test_c_environments_have_no_invalid_steps():
    data = roll_out("breakout", frameskip=40)
    assert all((valid == 1).all() for valid in data.valid)


def test_an_agent_that_is_gone_is_not_valid_until_its_next_episode_begins():
    data = roll_out("tests.parallel_game", num_steps=40, segments=1)
    dones, valid, observations = data.dones[0], data.valid[0], data.observations[0]
    for i in range(data.N):
        begins = [t for t in range(41) if dones[t, i] and valid[t, i]]
        assert len(begins) > 4
        for begin, end in itertools.pairwise(begins):
            flags = valid[begin:end, i].tolist()
            length = int(sum(flags))
            assert flags == [1.0] * length + [0.0] * (end - begin - length), (
                "valid steps, then none"
            )
            assert 2 <= length <= 6
            assert not dones[begin + 1 : begin + length, i].any()
            assert dones[begin + length, i] == (length < 6), (
                "at its last observation: done if terminated, not if truncated"
            )
            assert (observations[begin + length + 1 : end, i] == 0).all()
            assert (data.rewards[0][begin + length : end, i] == 0).all()


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """What train() hands to the pieces of mathematics, one record per iteration, from `Truncating` with learning rate 0.

    Every iteration is one minibatch of all segments, in order, in two chunks. The policy depends on its state.
    """
    folder = tmp_path_factory.mktemp("training")
    agent = ppo.Agent(gym.spaces.Box(0, np.inf, (1,), np.float32), gym.spaces.Discrete(2), 8)
    torch.manual_seed(1)
    for parameter in agent.parameters():
        nn.init.normal_(parameter, std=0.5)
    torch.save(agent.state_dict(), folder / "weights.pt")
    args = ppo.Args(
        env_id="Truncating-v0", num_envs=4, num_steps=7, minibatch_size=28, max_minibatch_size=14, total_timesteps=140, hidden_size=8,
        precision="float32", compile=False, device="cpu", prio_alpha=0.0, learning_rate=0.0, adam_learning_rate=0.0,
        load_weights=str(folder / "weights.pt"), output_dir=str(folder / "runs"),
    )  # fmt: skip
    records, original = (
        [],
        {
            name: getattr(ppo, name)
            for name in ("compute_advantages", "minibatch_loss", "lstm_forward", "ppo_loss")
        },
    )

    def compute_advantages(values, *rest):
        *rows, last = values.clone()
        records.append(
            SimpleNamespace(
                values=torch.stack(rows),
                next_value=last,
                observations=[],
                dones=[],
                h=[],
                chunks=[],
            )
        )
        return original["compute_advantages"](values, *rest)

    def sample_segments(advantages, uniform, k, alpha, beta):
        return torch.arange(k), torch.ones(k)  # all of them, in order

    def minibatch_loss(agent, observations, h, c, dones, actions, logprobs, segments, *rest, args):
        records[-1].observations.append(observations[:, segments, 0])
        return original["minibatch_loss"](
            agent, observations, h, c, dones, actions, logprobs, segments, *rest, args=args
        )

    def lstm_forward(x, h, c, dones, weight, bias):
        if len(x) > 1:  # the update, not a step of the policy
            records[-1].dones.append(dones)
            records[-1].h.append(h)
        return original["lstm_forward"](x, h, c, dones, weight, bias)

    def ppo_loss(*arguments):
        result = original["ppo_loss"](*arguments)
        records[-1].chunks.append(torch.stack((arguments[7], result[1])))  # weight and log-ratio
        return result

    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.MonkeyPatch.context() as patch:
            for listener in (
                compute_advantages,
                sample_segments,
                minibatch_loss,
                lstm_forward,
                ppo_loss,
            ):
                patch.setattr(ppo, listener.__name__, listener)
            assert ppo.train(args) == 0
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    for record in records:
        assert len(record.chunks) == 2
        record.observations, record.dones = (
            torch.cat(record.observations, 1),
            torch.cat(record.dones, 1),
        )
        (record.weight, record.logratio), record.h = (
            torch.cat(record.chunks, 2),
            torch.cat(record.h),
        )
    assert len(records) == 5
    return records


def test_training_gives_the_ignored_steps_no_weight(training):
    for record in training:
        counts = record.observations != 3  # the last observation of an episode
        assert 0 < counts.sum() < 28
        torch.testing.assert_close(record.weight, counts / counts.sum())


def test_training_resets_the_lstm_where_episodes_begin(training):
    for record in training:
        torch.testing.assert_close(record.dones, (record.observations == 0).float())


def test_training_starts_from_the_carried_state_and_finds_ratio_one(training):
    for number, record in enumerate(training):
        assert bool((record.h != 0).any()) == (number > 0)
        torch.testing.assert_close(record.logratio.exp(), torch.ones(7, 4), atol=1e-5, rtol=0)


def test_training_bootstraps_from_the_first_value_of_the_next_segment(training):
    for record, following in itertools.pairwise(training):
        torch.testing.assert_close(record.next_value, following.values[0], atol=1e-5, rtol=0)


# I5: prioritized segments -------------------------------------------------------------------------------------------------

ADVANTAGES = torch.tensor(
    [[0.1, -1.0, 2.0, 0.0, -0.5, 3.0], [-0.1, 1.0, 0.5, 0.4, 0.0, -0.5]]
)  # (T, N) = (2, 6)
SUMS = np.array([0.2, 2.0, 2.5, 0.4, 0.5, 3.5])


def sample(advantages, k: int, alpha: float, beta: float, draws: int = 1):
    """Indices and weights (draws, k) of independent draws."""
    torch.manual_seed(1)
    uniform = torch.rand(draws, advantages.shape[1] + 1)
    return torch.vmap(
        lambda one: ppo.sample_segments(advantages, one, k, alpha, torch.tensor(beta))
    )(uniform)


def none_twice(draws) -> bool:
    return all(len(set(draw)) == len(draw) for draw in draws.tolist())


def inclusion_probabilities(priorities: np.ndarray, k: int) -> np.ndarray:
    """min(1, c p_i) with the c that makes their sum k, by bisection."""
    low, high = 0.0, k / priorities.min()
    for _ in range(200):
        c = (low + high) / 2
        low, high = (c, high) if np.minimum(1, c * priorities).sum() < k else (low, c)
    return np.minimum(1, c * priorities)


@pytest.mark.parametrize("k", [1, 2, 4, 5])
@pytest.mark.parametrize("alpha", [0.0, 0.8, 1.5])
def test_segments_are_drawn_with_their_probabilities_and_none_twice(alpha, k):
    draws, _ = sample(ADVANTAGES, k, alpha, 1.0, 4000)
    assert none_twice(draws)
    expected = inclusion_probabilities(SUMS**alpha, k)
    frequencies = draws.flatten().bincount(minlength=6).numpy() / 4000
    assert (
        np.abs(frequencies - expected) <= 4 * (expected * (1 - expected) / 4000) ** 0.5 + 1e-9
    ).all()


@pytest.mark.parametrize("k", [1, 2, 4, 5, 6])
def test_weights_are_one_over_the_probability_of_being_drawn_to_the_power_beta(k):
    index, weights = sample(ADVANTAGES, k, 0.8, 0.7, 10)
    expected = (k / (6 * inclusion_probabilities(SUMS**0.8, k)[index])) ** 0.7
    np.testing.assert_allclose(weights, expected, rtol=1e-4)


def test_a_segment_of_overwhelming_priority_comes_once():
    advantages = torch.full((2, 16), 0.01)
    advantages[:, 5] = 1000.0
    draws, _ = sample(advantages, 8, 1.0, 1.0, 50)
    assert (draws == 5).any(1).all() and none_twice(draws)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 6])
def test_importance_weighting_is_unbiased_with_beta_one(k):
    quantity = torch.tensor([3.0, -1.0, 4.0, 1.0, -5.0, 9.0])
    index, importance = sample(ADVANTAGES, k, 0.8, 1.0, 5000)
    means = (importance * quantity[index]).mean(1)
    error = means.std() / len(means) ** 0.5
    assert abs(means.mean() - quantity.mean()) < 3.5 * error + 1e-6
    assert error < 0.5


@pytest.mark.parametrize("k", [3, 16, 64])
def test_alpha_zero_is_uniform_and_takes_no_segment_twice(k):
    torch.manual_seed(2)
    index, importance = sample(torch.randn(4, 64), k, 0.0, 0.7, 200)
    assert none_twice(index)
    assert (importance == importance[:, :1]).all()
    assert scipy.stats.chisquare(index.flatten().bincount(minlength=64)).pvalue > 1e-3


def test_segments_without_any_advantage_are_sampled_uniformly():
    index, importance = sample(torch.zeros(4, 8), 8, 0.8, 1.0)
    assert sorted(index[0].tolist()) == list(range(8))
    torch.testing.assert_close(importance[0], torch.ones(8))


# I8: gradient accumulation ------------------------------------------------------------------------------------------------


def test_accumulated_gradients_equal_those_of_the_whole_minibatch(whole_batch_run, tmp_path):
    result = run_script(
        *CARTPOLE, "--max-minibatch-size", 64, "--total-timesteps", 2048, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    split_run = newest_run(tmp_path)
    whole, split = read_metrics(whole_batch_run)[0], read_metrics(split_run)[0]
    losses = [name for name in whole if name.startswith("losses/")]
    assert "losses/grad_norm" in losses
    for name in losses:
        assert split[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6), name
    models = [
        torch.load(run / "model_CartPole-v1_000001.pt", weights_only=True)
        for run in (whole_batch_run, split_run)
    ]
    torch.testing.assert_close(
        models[1], models[0], atol=2e-5, rtol=0
    )  # of steps of 0.01: Muon magnifies roundings


# Muon ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(32, 32), (64, 16), (16, 64), (512, 128), (1, 128)])
def test_newton_schulz_brings_singular_values_near_one(shape, dtype):
    torch.manual_seed(1)
    left, _, right = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    matrix = left * torch.linspace(0.1, 3, min(shape)) @ right  # a condition number of 30
    other, result = ppo.newton_schulz(torch.stack((torch.randn(shape), matrix)), dtype)
    assert other.shape == result.shape == shape
    assert result.dtype == dtype
    values = torch.linalg.svdvals(result.float())
    assert values.min() > 0.6
    assert values.max() < 1.3
    assert (result.float() * matrix).sum() > 0, "and keeps the direction"


@pytest.mark.parametrize("shape", [(64, 16), (16, 64), (128, 128)])
def test_newton_schulz_in_float32_is_the_plain_iteration(shape):
    torch.manual_seed(1)
    matrix = torch.randn(shape)
    expected = matrix.double() / matrix.double().norm()
    for _ in range(5):
        gram = expected @ expected.T
        expected = 3.4445 * expected + (-4.7750 * gram + 2.0315 * gram @ gram) @ expected
    torch.testing.assert_close(
        ppo.newton_schulz(matrix[None], torch.float32)[0], expected.float(), atol=2e-5, rtol=0
    )


@pytest.mark.parametrize("shape", [(32, 16), (16, 32), (8, 8)])
def test_muon_steps_as_torchs_own_does(shape):
    torch.manual_seed(1)
    start = torch.randn(shape)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = (
        ppo.Muon([ours], lr=torch.tensor(0.1), momentum=0.9, dtype=torch.bfloat16),
        torch.optim.Muon([theirs], lr=0.1, momentum=0.9, weight_decay=0.0),
    )
    for _ in range(3):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(
        ours, theirs, atol=0.005, rtol=0
    )  # bfloat16 rounding: 0.4 % of three steps of 0.1
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


def test_learning_rate_falls_exponentially_to_a_64th(whole_batch_run):
    rates = [row["learning_rate"] for row in read_metrics(whole_batch_run)]
    assert rates == pytest.approx([0.01 * 64 ** (-i / 8) for i in range(8)])


# The loss -----------------------------------------------------------------------------------------------------------------


def loss_of(
    *,
    ratio=1.0,
    advantage=0.0,
    value_change=0.0,
    value_error=0.0,
    hidden=None,
    agent=None,
    weight=None,
    **arguments,
):
    """One minibatch (T, B) = (2, 3) in which every step has this ratio, advantage, value - old value, return - value."""
    agent = agent or make_agent()
    hidden = torch.randn(2, 3, 8) if hidden is None else hidden
    hidden = hidden.detach().requires_grad_()
    with torch.no_grad():
        logits, values = agent.heads(hidden)
        actions = agent.sample(logits, torch.ones(2, 3, 3))[0]
        logprobs = agent.evaluate_actions(logits, actions)[0]
    args = ppo.Args(**({"vf_coef": 0.0, "ent_coef": 0.0} | arguments))
    weight = torch.full((2, 3), 1 / 6) if weight is None else weight
    loss, logratio, newvalues, statistics = ppo.ppo_loss(
        agent, hidden, actions, logprobs - np.log(ratio), torch.as_tensor(advantage) * torch.ones(2, 3),
        values + value_error, values - value_change, weight, args,
    )  # fmt: skip
    loss.backward()
    return SimpleNamespace(
        loss=float(loss.detach()), grad=hidden.grad, agent=agent, hidden=hidden.detach(), actions=actions, ratio=logratio.exp(),
        values=newvalues, statistics=dict(zip(ppo.LOSSES, statistics.tolist())),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [
        (1.5, 1.0, True),
        (1.5, -1.0, False),
        (0.5, -1.0, True),
        (0.5, 1.0, False),
        (1.1, 1.0, False),
        (0.9, -1.0, False),
    ],
)
def test_the_surrogate_is_clipped_only_where_the_ratio_already_moved_the_way_of_the_advantage(
    ratio, advantage, clipped
):
    result = loss_of(ratio=ratio, advantage=advantage, clip_coef=0.2)
    assert bool((result.grad == 0).all()) == clipped
    bounded = np.clip(ratio, 0.8, 1.2) if clipped else ratio
    assert result.loss == pytest.approx(-bounded * advantage, rel=1e-5)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_descent_makes_an_action_likelier_if_and_only_if_its_advantage_is_positive(advantage):
    result = loss_of(advantage=advantage)
    moved = result.hidden - 0.1 * result.grad
    before, after = (
        result.agent.evaluate_actions(result.agent.heads(h)[0], result.actions)[0]
        for h in (result.hidden, moved)
    )
    assert ((after - before) * advantage > 0).all()


def test_descent_raises_the_entropy():
    result = loss_of(ent_coef=1.0)
    moved = result.hidden - 0.1 * result.grad
    before, after = (
        result.agent.evaluate_actions(result.agent.heads(h)[0], result.actions)[1]
        for h in (result.hidden, moved)
    )
    assert (after > before).all()
    assert result.loss == pytest.approx(-before.mean().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "clipped"),
    [
        (0.5, 0.5, True),
        (0.5, -0.5, False),
        (-0.5, -0.5, True),
        (-0.5, 0.5, False),
        (0.1, 0.5, False),
    ],
)
def test_the_value_loss_is_clipped_where_the_value_already_moved_towards_the_return(
    change, error, clipped
):
    result = loss_of(value_change=change, value_error=error, vf_coef=2.0, vf_clip_coef=0.2)
    assert bool((result.grad == 0).all()) == clipped
    distance = (
        error + change - np.clip(change, -0.2, 0.2) if clipped else error
    )  # from the clipped value, the farther one
    assert result.loss == pytest.approx(2.0 * 0.5 * distance**2, rel=1e-4)
    assert loss_of(
        value_change=change, value_error=error, vf_coef=2.0, vf_clip_coef=np.inf
    ).loss == pytest.approx(error**2, rel=1e-4)


def test_descent_moves_values_towards_returns():
    for error in (1.0, -1.0):
        result = loss_of(value_error=error, vf_coef=1.0)
        after = result.agent.heads(result.hidden - 0.1 * result.grad)[1]
        assert ((after - result.values) * error > 0).all()


def test_statistics_are_what_their_names_say():
    result = loss_of(ratio=1.5, advantage=1.0, value_error=2.0, clip_coef=0.2, vf_coef=1.0)
    assert result.statistics == pytest.approx(
        {
            "policy_loss": -1.2,
            "value_loss": 0.5 * 4,
            "entropy": result.statistics["entropy"],
            "old_approx_kl": -np.log(1.5),
            "approx_kl": 0.5 - np.log(1.5),
            "clipfrac": 1.0,
            "importance": 1.5,
        },
        rel=1e-4,
    )
    torch.testing.assert_close(result.ratio, torch.full((2, 3), 1.5))


def test_a_step_without_weight_changes_neither_loss_nor_gradient():
    torch.manual_seed(1)
    agent, hidden, weight = make_agent(), torch.randn(2, 3, 8), torch.full((2, 3), 0.2)
    weight[1, 2] = 0
    results = []
    for other_action, other_logprob, other_advantage, other_return in (
        (0, -0.1, 0.0, 0.0),
        (2, -3.0, 50.0, -9.0),
    ):
        agent.zero_grad()
        actions, logprobs, advantages, returns = (
            torch.ones(2, 3, 1, dtype=torch.int64),
            *torch.full((3, 2, 3), -1.0),
        )
        actions[1, 2], logprobs[1, 2], advantages[1, 2], returns[1, 2] = (
            other_action,
            other_logprob,
            other_advantage,
            other_return,
        )
        advantages = (advantages + torch.arange(3)) * (weight > 0)
        x = hidden.clone().requires_grad_()
        loss, _, _, statistics = ppo.ppo_loss(
            agent, x, actions, logprobs, advantages, returns, returns, weight, ppo.Args()
        )
        loss.backward()
        results.append(
            [
                loss.detach(),
                statistics,
                x.grad,
                *(p.grad.clone() for p in agent.policy.parameters() if p.grad is not None),
            ]
        )
    torch.testing.assert_close(results[0], results[1], atol=0, rtol=0)
    assert (results[0][2][1, 2] == 0).all()


def test_normalized_advantages_have_mean_zero_and_variance_one_over_the_steps_that_count():
    rewards, valid = (
        torch.tensor([[1.0, 2.0, 300.0], [3.0, 6.0, -50.0]]),
        torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 1.0]]),
    )
    args = ppo.Args(
        gamma=0.0, prio_alpha=0.0, minibatch_size=6, num_steps=2
    )  # advantages are rewards, all are drawn
    zeros, beta = torch.zeros(3, 3), torch.tensor(1.0)
    drawn = ppo.draw_minibatch(
        zeros, rewards, zeros, valid, torch.ones(2, 3), torch.rand(4), beta, args
    )
    segments, advantages, returns, values, weight, everything = drawn
    order = segments.argsort()
    expected = torch.tensor([[-2.0, -1.0], [0.0, 3.0]]) / 3.5**0.5
    torch.testing.assert_close(advantages[:, order][:, :2], expected)
    torch.testing.assert_close(weight[:, order], valid[:2] / 4)
    torch.testing.assert_close(everything, rewards * valid[:2])
    torch.testing.assert_close(returns, everything[:, segments] + values)


# The policy ---------------------------------------------------------------------------------------------------------------


def test_actions_are_sampled_with_the_probabilities_of_the_logits():
    torch.manual_seed(1)
    agent = make_agent(gym.spaces.MultiDiscrete([3, 2]))
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5, -0.5])
    actions, logprobs = agent.sample(logits.expand(20000, 5), agent.sampling_noise(20000))
    first, second = logits[:3].softmax(0), logits[3:].softmax(0)
    joint = torch.outer(first, second)
    counts = (actions[:, 0] * 2 + actions[:, 1]).bincount(minlength=6).double().numpy()
    expected = joint.flatten().double().numpy()
    assert scipy.stats.chisquare(counts, expected / expected.sum() * 20000).pvalue > 1e-3
    torch.testing.assert_close(logprobs, joint[actions[:, 0], actions[:, 1]].log())


def test_log_probability_and_entropy_of_several_choices_are_sums_over_categoricals():
    agent = make_agent(gym.spaces.MultiDiscrete([3, 2, 4]))
    logits, actions = (
        torch.randn(7, 5, 9),
        torch.stack([torch.randint(n, (7, 5)) for n in (3, 2, 4)], -1),
    )
    parts = [
        torch.distributions.Categorical(logits=part) for part in logits.split((3, 2, 4), dim=-1)
    ]
    logprobs, entropy = agent.evaluate_actions(logits, actions)
    torch.testing.assert_close(
        logprobs, sum(part.log_prob(actions[..., i]) for i, part in enumerate(parts))
    )
    torch.testing.assert_close(entropy, sum(part.entropy() for part in parts))


def test_continuous_actions_are_gaussian_with_the_learned_deviation():
    agent = make_agent(gym.spaces.Box(-1, 1, (2,), np.float32))
    agent.policy.decoder_logstd.data = torch.tensor([[0.5, -1.0]])
    with torch.no_grad():
        actions, logprobs = agent.sample(
            torch.tensor([3.0, -2.0]).expand(20000, 2), agent.sampling_noise(20000)
        )
    normal = torch.distributions.Normal(torch.tensor([3.0, -2.0]), torch.tensor([0.5, -1.0]).exp())
    torch.testing.assert_close(actions.mean(0), normal.mean, atol=0.05, rtol=0)
    torch.testing.assert_close(actions.std(0), normal.stddev, atol=0, rtol=0.03)
    torch.testing.assert_close(logprobs, normal.log_prob(actions).sum(-1))
    torch.testing.assert_close(
        agent.evaluate_actions(torch.zeros(1, 2), torch.zeros(1, 2))[1],
        normal.entropy().sum()[None],
    )


def test_deterministic_actions_are_the_most_likely():
    agent, box = (
        make_agent(gym.spaces.MultiDiscrete([3, 2])),
        make_agent(gym.spaces.Box(-1, 1, (2,), np.float32)),
    )
    assert agent.sample(
        torch.tensor([0.0, 1.0, -1.0, 0.5, -0.5]), agent.sampling_noise(deterministic=True)
    )[0].tolist() == [1, 0]
    assert box.sample(torch.tensor([[0.3, -7.0]]), box.sampling_noise(1, deterministic=True))[
        0
    ].tolist() == [[pytest.approx(0.3), -7]]


# Weights in PufferLib's format --------------------------------------------------------------------------------------------

SPACES = {
    "Discrete": gym.spaces.Discrete(3),
    "MultiDiscrete": gym.spaces.MultiDiscrete([3, 2]),
    "Box": gym.spaces.Box(-1, 1, (2,), np.float32),
}


def pufferlibs_network(observation_space, action_space):
    env = SimpleNamespace(
        single_observation_space=observation_space,
        single_action_space=action_space,
        observation_space=None,
    )
    return pufferlib.models.LSTMWrapper(env, pufferlib.models.Default(env, 128), 128, 128)


@pytest.mark.parametrize("kind", SPACES)
def test_weights_load_strictly_into_pufferlibs_network_and_its_load_into_ours(kind):
    agent, network = (
        make_agent(SPACES[kind], hidden_size=128),
        pufferlibs_network(BOX, SPACES[kind]),
    )
    for parameter in agent.parameters():
        nn.init.normal_(parameter)
    network.load_state_dict(agent.state_dict(), strict=True)
    other = pufferlibs_network(BOX, SPACES[kind])
    agent.load_state_dict(other.state_dict(), strict=True)
    torch.testing.assert_close(dict(agent.state_dict()), dict(other.state_dict()), atol=0, rtol=0)


@pytest.mark.parametrize("kind", SPACES)
def test_flat_weights_have_pufferlibs_parameter_order(kind):
    agent, network = (
        make_agent(SPACES[kind], hidden_size=128),
        pufferlibs_network(BOX, SPACES[kind]),
    )
    for parameter in network.parameters():
        nn.init.normal_(parameter)
    flat = torch.cat(
        [parameter.detach().flatten() for parameter in network.parameters()]
    )  # how PufferLib writes its .bin
    nn.utils.vector_to_parameters(flat, agent.parameters())
    torch.testing.assert_close(dict(agent.state_dict()), dict(network.state_dict()), atol=0, rtol=0)


def test_pufferlibs_network_gives_the_same_logits_and_values_on_breakout():
    data = roll_out("breakout", frameskip=40)
    envs = ppo.make_envs(ppo.Args(env_id="breakout", num_envs=1), seed=1)
    torch.manual_seed(1)
    agent = ppo.Agent(envs.single_observation_space, envs.single_action_space, 128)
    ppo.layer_init(actor_of(agent), 1.0)
    network = pufferlib.models.LSTMWrapper(
        envs.vecenv, pufferlib.models.Default(envs.vecenv, 128), 128, 128
    )
    envs.close()
    network.load_state_dict(agent.state_dict(), strict=True)
    observations = data.observations[0][:3]
    state = {"lstm_h": torch.zeros(data.N, 128), "lstm_c": torch.zeros(data.N, 128)}
    with torch.no_grad():
        start = torch.zeros(2, data.N, 128)
        logits, values = agent.heads(
            ppo.LSTM.apply(
                agent.encode(observations), *start, torch.zeros(3, data.N), *agent.lstm_weights()
            )
        )
        for t in range(3):
            expected_logits, expected_values = network.forward_eval(observations[t], state)
            torch.testing.assert_close(logits[t], expected_logits, atol=1e-5, rtol=0)
            torch.testing.assert_close(values[t], expected_values.squeeze(-1), atol=1e-5, rtol=0)
    assert logits.std() > 0.01
