"""The XLA script on PJRT's CPU device, in the virtual environment that has torch_xla: `make test-xla`.

The reference script runs here too, under the same torch; it is what this one is compared with.
"""

import pathlib
import signal
import subprocess

import psutil
import pytest
import test_runs
import torch
from conftest import (
    PYTHON,
    ROOT,
    SMALL,
    end_of,
    environment,
    read_metrics,
    run_script,
    start_script,
)
from test_algorithm import loop_over_cells, recurrence, trajectory
from test_runs import equal, started, wait_for

import ppo_lstm_puffer as ppo
import ppo_lstm_puffer_xla as xla

XLA = ROOT / "ppo_lstm_puffer_xla.py"
ON_CPU = ["--device", "cpu", *(argument for argument in SMALL if argument != "--no-compile")]
STEPS = 16 * 16  # of an iteration with the small arguments
QUICK_TO_COMPILE = "--xla_backend_optimization_level=0"  # in a third of the time; slow to run


def launcher(devices: int = 1, flags: str = QUICK_TO_COMPILE) -> tuple[str, ...]:
    # -u: what this process told its own runtime
    return (
        "env",
        "-u",
        "XLA_USE_SPMD",
        f"CPU_NUM_DEVICES={devices}",
        f"XLA_FLAGS={flags}",
        *PYTHON,
    )


def run_xla(
    *arguments, cwd, devices: int = 1, flags: str = QUICK_TO_COMPILE, **kwargs
) -> subprocess.CompletedProcess:
    return run_script(
        *ON_CPU,
        *arguments,
        cwd=cwd,
        launcher=launcher(devices, flags),
        **{"small": False, "script": XLA, "timeout": 300} | kwargs,
    )


def succeed(*arguments, runner=run_xla, **kwargs) -> pathlib.Path:
    return test_runs.succeed(*arguments, runner=runner, **kwargs)


def by_iteration(run: pathlib.Path, kind: str = "model_*") -> list[dict]:
    return [torch.load(path, weights_only=True) for path in sorted(run.glob(f"{kind}_[0-9]*.pt"))]


def compiled(run: pathlib.Path) -> list[int]:
    """How many graphs there were, by log interval."""
    return [row["xla/compiled"] for row in read_metrics(run)]


@pytest.fixture(scope="module")
def device():
    return xla.start_devices(xla.Args(device="cpu"))[0]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished small run, with checkpoints after 4 and 8 iterations. No test changes it."""
    return succeed("--checkpoint-interval", "4", cwd=tmp_path_factory.mktemp("finished"))


# The mathematics, piece by piece.


def test_lstm_equals_a_loop_over_cells_that_zeroes_its_state_in_values_and_gradients(device):
    agent, cell, x, h, c, dones = recurrence()
    theirs = x.clone().requires_grad_()
    expected, last_h, last_c = loop_over_cells(cell, theirs, h, c, dones)
    outer = torch.randn_like(expected)
    (expected * outer).sum().backward()

    agent.to(device)
    ours = x.to(device).requires_grad_()
    inputs = h.to(device), c.to(device), dones.to(device), *agent.lstm_weights()
    outputs = xla.LSTM.apply(ours, *inputs)
    (outputs * outer.to(device)).sum().backward()
    _, h, c, *_ = xla.lstm_forward(ours.detach(), *inputs)
    torch.testing.assert_close(
        [t.detach().cpu() for t in (outputs, h, c)],
        [expected, last_h, last_c],
        atol=1e-5,
        rtol=1e-5,
    )
    torch.testing.assert_close(ours.grad.cpu(), theirs.grad, atol=1e-5, rtol=1e-5)
    for name, parameter in cell.named_parameters():
        gradient = getattr(agent.lstm, f"{name}_l0").grad.cpu()
        torch.testing.assert_close(gradient, parameter.grad, atol=1e-5, rtol=1e-5, msg=name)


def test_policy_steps_go_through_the_states_of_the_scan(device):
    agent, _, x, h, c, dones = recurrence()
    agent.to(device)
    with torch.no_grad():
        weights = agent.lstm_weights()
        _, last_h, last_c, *_ = xla.lstm_forward(
            x.to(device), h.to(device), c.to(device), dones.to(device), *weights
        )
        h, c = h.to(device), c.to(device)
        for t in range(len(x)):
            _, h, c, *_ = xla.lstm_forward(
                x[t : t + 1].to(device), h, c, dones[t : t + 1].to(device), *weights
            )
    torch.testing.assert_close(
        (h.cpu(), c.cpu()), (last_h.cpu(), last_c.cpu()), atol=1e-5, rtol=1e-5
    )


def test_advantages_and_draws_are_those_of_the_reference(device):
    values, rewards, dones, ratio = (
        torch.tensor(x, dtype=torch.float32) for x in trajectory(T=12, N=64)
    )
    uniform, valid = torch.rand(65), (torch.rand(13, 64) < 0.9).float()
    beta, args = torch.tensor(0.4), ppo.Args(gamma=0.97, num_steps=12, minibatch_size=12 * 16)
    expected = ppo.draw_minibatch(values, rewards, dones, valid, ratio, uniform, beta, args)
    inputs = (x.to(device) for x in (values, rewards, dones, valid, ratio, uniform, beta))
    results = xla.draw_minibatch(*inputs, args)
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, atol=1e-5, rtol=1e-5)
    assert len(set(expected[0].tolist())) == 16


def test_image_encoder_and_gaussian_head_are_those_of_the_reference(device):
    import gymnasium as gym

    torch.manual_seed(1)
    spaces = gym.spaces.Box(0, 255, (36, 36, 3), "uint8"), gym.spaces.Box(-1, 1, (2,), "float32")
    agent = ppo.Agent(*spaces, 16)
    ours = xla.Agent(*spaces, 16)
    ours.load_state_dict(agent.state_dict())
    observations = torch.randint(0, 256, (5, 36, 36, 3), dtype=torch.uint8)
    with torch.no_grad():
        weights, noise = agent.lstm_weights(), agent.sampling_noise(5)
        inputs = (
            observations,
            torch.zeros(5),
            torch.zeros(5, 16),
            torch.zeros(5, 16),
            *weights,
            noise,
        )
        expected = ppo.act(agent, *inputs)
        results = xla.act(ours.to(device), *(tensor.to(device) for tensor in inputs))
    for result, value in zip(results, expected, strict=True):
        torch.testing.assert_close(result.cpu(), value, atol=1e-5, rtol=1e-4)


# I12, and what training must keep.


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_first_update_is_the_references(tmp_path, optimizer):
    """From the same weights and data: with one seed both scripts draw the same numbers in the same order."""
    arguments = [
        "--total-timesteps",
        STEPS,
        "--update-epochs",
        "0.5",
        "--checkpoint-interval",
        "1",
        "--optimizer",
        optimizer,
    ]
    arguments += ["--learning-rate", "0.03" if optimizer == "muon" else "0.001"]
    (tmp_path / "ours").mkdir()
    ours = succeed(*arguments, cwd=tmp_path / "ours")
    theirs = succeed("--device", "cpu", *arguments, cwd=tmp_path, runner=run_script)
    (model,), (expected,) = by_iteration(ours), by_iteration(theirs)
    assert model.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(model[name], expected[name], atol=1e-4, rtol=0, msg=name)
    (row,), (expected_row,) = read_metrics(ours), read_metrics(theirs)
    assert abs(expected_row["losses/grad_norm"]) > 1e-3
    for name in (key for key in expected_row if key.startswith(("losses/", "env/", "episodic"))):
        assert row[name] == pytest.approx(expected_row[name], rel=1e-3, abs=1e-6), name


@pytest.mark.parametrize(
    "arguments",
    [
        ["--env-id", "cartpole", "--learning-rate", "0.05"],
        ["--env-id", "environments:CueRecall-v0", "--num-workers", "2"],
        ["--env-id", "environments:TwoDials-v0", "--learning-rate", "0.05"],
        ["--env-id", "environments:Continuous-v0", "--learning-rate", "0.05"],
    ],
    ids=["cartpole", "two workers", "MultiDiscrete", "Box"],
)
def test_ratio_is_one_before_the_first_update(tmp_path, arguments):
    """One update per iteration: each sees the policy that acted, over episodes that end inside segments."""
    rows = read_metrics(
        succeed(*arguments, "--minibatch-size", STEPS, "--prio-alpha", "0", cwd=tmp_path)
    )
    assert len(rows) == 8
    for row in rows:
        assert row["losses/clipfrac"] == 0
        assert abs(row["losses/importance"] - 1) < 1e-5
        assert abs(row["losses/approx_kl"]) < 1e-7
    assert any(row.get("episodes", 0) > 0 for row in rows)


@pytest.fixture(scope="module")
def three_iterations(tmp_path_factory):
    """The folder of a run of three iterations on one device, each with a checkpoint."""
    return succeed(*THREE_ITERATIONS, cwd=tmp_path_factory.mktemp("three"))


THREE_ITERATIONS = ["--total-timesteps", 3 * STEPS, "--checkpoint-interval", "1"]


def test_four_devices_train_as_one(three_iterations, tmp_path):
    four = succeed(*THREE_ITERATIONS, cwd=tmp_path, devices=4)
    assert compiled(four)[1] == compiled(four)[-1]
    for one_device, devices in zip(by_iteration(three_iterations), by_iteration(four), strict=True):
        for name, value in one_device.items():
            torch.testing.assert_close(devices[name], value, atol=1e-4, rtol=0, msg=name)


def test_accumulated_gradients_equal_those_of_the_whole_minibatch(three_iterations, tmp_path):
    split = succeed(*THREE_ITERATIONS, "--max-minibatch-size", "64", cwd=tmp_path)
    for name, value in by_iteration(three_iterations)[0].items():
        torch.testing.assert_close(by_iteration(split)[0][name], value, atol=1e-4, rtol=0, msg=name)


def test_nothing_is_compiled_after_two_iterations(finished):
    """Neither by the updates, nor by a log line, nor by a checkpoint: torch_xla counts its compilations."""
    assert compiled(finished)[1] == compiled(finished)[-1] > 3


def test_nothing_is_compiled_late_on_four_devices(tmp_path):
    """Nor with two groups of agents, nor after a resume."""
    workers = ["--num-workers", "2", "--update-epochs", "2"]
    run = succeed(*workers, cwd=tmp_path, devices=4)
    assert compiled(run)[1] == compiled(run)[-1]
    succeed("--resume", "latest", "--total-timesteps", 14 * STEPS, cwd=tmp_path, devices=4)
    assert end_of(run)["iteration"] == 14 and compiled(run)[9] == compiled(run)[-1]


def test_every_agent_gets_its_own_row_back_whatever_the_order_of_the_devices(tmp_path):
    program = """
import numpy as np, torch, torch_xla
import ppo_lstm_puffer_xla as xla
from ppo_lstm_puffer_xla import spmd, xm
device, *_ = xla.start_devices(xla.Args(device="cpu"))
spmd.set_global_mesh(spmd.Mesh(np.array([2, 0, 3, 1]), (4,), ("data",)))
rows, stored = torch.arange(8.0), torch.zeros(3, 8, device=device)
xla.share(1, stored)
how = spmd.ShardingSpec(spmd.get_global_mesh(), ("data",), minibatch=True)
at = torch.tensor([1]).to(device)
stored[at, slice(0, 8)] = xm.send_cpu_data_to_device([rows], device, how)[0] + 1
result = xla.rows_of_this_host(stored[at, slice(0, 8)][0])
assert result.tolist() == (rows + 1).tolist(), result
"""
    words = [*launcher(devices=4), "-c", program]
    result = subprocess.run(
        words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr


def test_breakout_learns_to_keep_the_ball(tmp_path):
    # The reference's own test at three quarters of its length. A random policy scores below 1.
    run = succeed(
        "--num-envs", "256", "--minibatch-size", "2048", "--num-steps", "32", "--total-timesteps", "750000", "--hidden-size", "64",
        "--log-interval", "10", "--precision", "auto", cwd=tmp_path, timeout=400, flags="",
    )  # fmt: skip
    rows = [row for row in read_metrics(run) if "env/score" in row][-3:]
    assert sum(row["env/score"] for row in rows) / 3 >= 5
    assert compiled(run)[1] == compiled(run)[-1]


def test_bfloat16_acts_and_recomputes_the_same_policy(three_iterations, tmp_path):
    """XLA's CPU device emulates it. The policy is that of float32 but for rounding, and so is its ratio before an update."""
    arguments = [
        "--total-timesteps",
        STEPS,
        "--precision",
        "bfloat16",
        "--minibatch-size",
        STEPS,
        "--prio-alpha",
        "0",
    ]
    (row,) = read_metrics(succeed(*arguments, cwd=tmp_path))
    assert row["losses/entropy"] == pytest.approx(
        read_metrics(three_iterations)[0]["losses/entropy"], rel=0.01
    )
    assert (
        abs(row["losses/importance"] - 1) < 0.01
        and row["losses/clipfrac"] == 0
        and row["losses/grad_norm"] > 0
    )


def test_same_seed_gives_the_same_run(finished, tmp_path):
    again = succeed("--checkpoint-interval", "4", cwd=tmp_path)
    assert equal(by_iteration(again), by_iteration(finished))


# Checkpoints and files.


@pytest.mark.parametrize(
    ("first", "second"), [("xla", "xla"), ("xla", "reference"), ("reference", "xla")]
)
def test_runs_resume_in_each_other(tmp_path, first, second):
    runners = {"xla": run_xla, "reference": run_script}
    run = succeed("--total-timesteps", 4 * STEPS, cwd=tmp_path, runner=runners[first])
    resumed = succeed(
        "--resume", "latest", "--total-timesteps", 6 * STEPS, cwd=tmp_path, runner=runners[second]
    )
    assert resumed == run
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == [STEPS * i for i in range(1, 7)]
    before, after = by_iteration(run, "trainer")
    updates = 2  # minibatches of an iteration
    for state, iterations in (before, 4), (after, 6):
        assert all(
            int(entry["step"]) == iterations * updates for entry in state["optimizers"][1].values()
        )
    assert rows[4]["learning_rate"] == pytest.approx(0.06 * 64 ** (-4 / 6))


def test_resumed_parameters_and_momenta_are_the_saved_ones(finished, device):
    saved = xla.load_checkpoint(str(finished), "")
    envs = xla.make_envs(xla.Args(num_envs=1), 1)
    envs.close()
    agent = xla.Agent(envs.single_observation_space, envs.single_action_space, 32).to(device)
    optimizers = xla.make_optimizers(agent, xla.Args(learning_rate=0.015))
    xla.load_state(agent, optimizers, xla.Args(), saved)
    on_cpu = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.detach().cpu(), agent.state_dict()
    )
    assert equal(dict(on_cpu), saved["model"])
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    assert equal(
        torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, states),
        saved["optimizers"],
    )


def test_sigterm_saves_and_kill_leaves_a_resumable_run(tmp_path):
    options = {"launcher": launcher(), "script": XLA, "small": False, "cwd": tmp_path}
    process, run = started(
        *ON_CPU, "--total-timesteps", "100_000_000", "--checkpoint-interval", "5", **options
    )
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    assert end_of(run)["exit_reason"] == "sigterm"
    saved = by_iteration(run, "trainer")[-1]["iteration"]
    process = start_script("--device", "cpu", "--resume", "latest", **options)
    wait_for(
        lambda: by_iteration(run, "trainer")[-1]["iteration"] >= saved + 5, process, timeout=120
    )
    process.kill()
    process.wait()
    last = by_iteration(run, "trainer")[-1]["iteration"]
    succeed("--resume", "latest", "--total-timesteps", (last + 2) * STEPS, cwd=tmp_path)
    assert end_of(run)["iteration"] == last + 2 and end_of(run)["exit_reason"] == "completed"
    assert not [one for one in psutil.process_iter(["cwd"]) if one.info["cwd"] == str(tmp_path)]


def test_profile_is_a_trace_of_the_run(tmp_path):
    run = succeed("--profile", "--total-timesteps", 10 * STEPS, cwd=tmp_path)
    (trace,) = run.glob("plugins/profile/*/*.xplane.pb")
    assert b"while" in trace.read_bytes(), "the scan's loop"


# Wrong arguments.


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--device", "tpu"], "--device tpu: there is none here; use --device cpu"),
        (["--num-envs", "18", "--minibatch-size", "128"], "--num-envs 18: the agents"),
        (["--resume", "latest"], "--resume latest: no whole trainer_*.pt"),
    ],
)
def test_wrong_argument_is_one_line(tmp_path, arguments, says):
    result = run_xla(*arguments, cwd=tmp_path, devices=4)
    assert result.returncode == 2, result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and says in errors[0]
    assert "Traceback" not in result.stderr


def test_a_runtime_that_does_not_start_is_one_line(tmp_path):
    result = run_script(
        "--device", "cpu", cwd=tmp_path, launcher=launcher(devices=0), small=False, script=XLA
    )
    assert result.returncode == 2, result.stderr
    assert (
        "error: --device cpu: does not start" in result.stderr and "Traceback" not in result.stderr
    )
