"""The XLA script on PJRT's CPU device, in the virtual environment that has torch_xla: `make test-xla`.

The reference script runs here too, under the same torch; it is what this one is compared with.
"""

import io
import json
import pathlib
import signal
import subprocess

import psutil
import pytest
import test_runs
import torch
from conftest import PYTHON, ROOT, SMALL, environment, metrics, read_metrics, run_script, start_script
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
    return ("env", "-u", "XLA_USE_SPMD", f"CPU_NUM_DEVICES={devices}", f"XLA_FLAGS={flags}", *PYTHON)


def run_xla(*arguments, cwd, devices: int = 1, flags: str = QUICK_TO_COMPILE, **kwargs) -> subprocess.CompletedProcess:
    return run_script(*ON_CPU, *arguments, cwd=cwd, launcher=launcher(devices, flags), **{"small": False, "script": XLA} | kwargs)


def succeed(*arguments, runner=run_xla, **kwargs) -> pathlib.Path:
    return test_runs.succeed(*arguments, runner=runner, **kwargs)


def models(run: pathlib.Path) -> list[dict]:
    return [torch.load(path, weights_only=True) for path in sorted(run.glob("model_*.pt"))]


@pytest.fixture(scope="module")
def device():
    return xla.start_devices(xla.Args(device="cpu"))


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
    _, h, c, _ = xla.lstm_forward(ours.detach(), *inputs)
    torch.testing.assert_close([t.detach().cpu() for t in (outputs, h, c)], [expected, last_h, last_c], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.grad.cpu(), theirs.grad, atol=1e-5, rtol=1e-5)
    for name, parameter in cell.named_parameters():
        gradient = getattr(agent.lstm, f"{name}_l0").grad.cpu()
        torch.testing.assert_close(gradient, parameter.grad, atol=1e-5, rtol=1e-5, msg=name)


def test_policy_steps_go_through_the_states_of_the_scan(device):
    agent, _, x, h, c, dones = recurrence()
    agent.to(device)
    with torch.no_grad():
        weights = agent.lstm_weights()
        _, last_h, last_c, _ = xla.lstm_forward(x.to(device), h.to(device), c.to(device), dones.to(device), *weights)
        h, c = h.to(device), c.to(device)
        for t in range(len(x)):
            _, h, c, _ = xla.lstm_forward(x[t : t + 1].to(device), h, c, dones[t : t + 1].to(device), *weights)
    torch.testing.assert_close((h.cpu(), c.cpu()), (last_h.cpu(), last_c.cpu()), atol=1e-5, rtol=1e-5)


def test_advantages_and_draws_are_those_of_the_reference(device):
    v, r, d, ratio = (torch.tensor(x, dtype=torch.float32) for x in trajectory(T=12, N=64))
    uniform, valid = torch.rand(16), (torch.rand(13, 64) < 0.9).float()
    beta, args = torch.tensor(0.4), ppo.Args(gamma=0.97)
    expected = ppo.draw_minibatch(v, r, d, valid, ratio, uniform, beta, args)
    inputs = (x.to(device) for x in (v, r, d, valid, ratio, uniform, beta))
    results = xla.draw_minibatch(*inputs, args)
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, atol=1e-5, rtol=1e-5)
    assert len(set(expected[0].tolist())) > 4


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
        inputs = observations, torch.zeros(5), torch.zeros(5, 16), torch.zeros(5, 16), *weights, noise
        expected = ppo.policy_step(agent, *inputs)
        results = xla.policy_step(ours.to(device), *(tensor.to(device) for tensor in inputs))
    for result, value in zip(results, expected, strict=True):
        torch.testing.assert_close(result.cpu(), value, atol=1e-5, rtol=1e-4)


# I12, and what training must keep.


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_first_update_is_the_references(tmp_path, optimizer):
    """From the same weights and data: with one seed both scripts draw the same numbers in the same order."""
    arguments = ["--total-timesteps", STEPS, "--update-epochs", "0.5", "--checkpoint-interval", "1", "--optimizer", optimizer]
    arguments += ["--learning-rate", "0.03" if optimizer == "muon" else "0.001"]
    (tmp_path / "ours").mkdir()
    ours = succeed(*arguments, cwd=tmp_path / "ours")
    theirs = succeed("--device", "cpu", *arguments, cwd=tmp_path, runner=run_script)
    (model,), (expected,) = models(ours), models(theirs)
    assert model.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(model[name], expected[name], atol=1e-4, rtol=0, msg=name)
    (row,), (expected_row,) = read_metrics(ours), read_metrics(theirs)
    assert abs(expected_row["losses/grad_norm"]) > 1e-3
    for name in (key for key in expected_row if key.startswith(("losses/", "env/", "episodic"))):
        assert row[name] == pytest.approx(expected_row[name], rel=1e-3, abs=1e-6), name


def spaces_of_breakout():
    envs = ppo.make_envs(ppo.Args(num_envs=1), 1)
    envs.close()
    return envs.single_observation_space, envs.single_action_space


@pytest.mark.parametrize(
    "arguments",
    [
        ["--env-id", "cartpole", "--learning-rate", "0.05"],
        ["--env-id", "environments:CueRecall-v0", "--vec-backend", "multiprocessing", "--num-workers", "2"],
        ["--env-id", "environments:TwoDials-v0", "--learning-rate", "0.05"],
        ["--env-id", "environments:Continuous-v0", "--learning-rate", "0.05"],
    ],
    ids=["cartpole", "two workers", "MultiDiscrete", "Box"],
)
def test_ratio_is_one_before_the_first_update(tmp_path, arguments):
    """One update per iteration: each sees the policy that acted, over episodes that end inside segments."""
    rows = read_metrics(succeed(*arguments, "--minibatch-size", STEPS, "--prio-alpha", "0", cwd=tmp_path))
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
    assert [metrics(run)["hardware"]["devices"] for run in (three_iterations, four)] == [1, 4]
    assert metrics(four)["xla"]["compiled_after_warm_up"] == 0
    for one_device, devices in zip(models(three_iterations), models(four), strict=True):
        for name, value in one_device.items():
            torch.testing.assert_close(devices[name], value, atol=1e-4, rtol=0, msg=name)


def test_accumulated_gradients_equal_those_of_the_whole_minibatch(three_iterations, tmp_path):
    split = succeed(*THREE_ITERATIONS, "--max-minibatch-size", "64", cwd=tmp_path)
    for name, value in models(three_iterations)[0].items():
        torch.testing.assert_close(models(split)[0][name], value, atol=1e-4, rtol=0, msg=name)


def test_nothing_is_compiled_after_the_warm_up(finished):
    """Neither by the updates, nor by a log line, nor by a checkpoint: torch_xla counts its compilations."""
    rows = read_metrics(finished)
    assert metrics(finished)["xla"]["compiled_after_warm_up"] == 0
    assert rows[1]["xla/compiled_graphs"] == rows[-1]["xla/compiled_graphs"] > 3
    assert metrics(finished)["xla"]["compile_seconds"] > 0


def test_nothing_is_compiled_late_when_updates_stop_early_on_four_devices(tmp_path):
    """Nor with two groups of agents, nor after a resume."""
    workers = ["--vec-backend", "multiprocessing", "--num-workers", "2", "--target-kl", "1e-5", "--update-epochs", "2"]
    run = succeed(*workers, cwd=tmp_path, devices=4)
    assert metrics(run)["xla"]["compiled_after_warm_up"] == 0
    succeed("--resume", "latest", "--total-timesteps", 14 * STEPS, cwd=tmp_path, devices=4)
    assert metrics(run)["iterations"] == 14 and metrics(run)["xla"]["compiled_after_warm_up"] == 0


def test_every_agent_gets_its_own_row_back_whatever_the_order_of_the_devices(tmp_path):
    program = """
import numpy as np, torch, torch_xla
import ppo_lstm_puffer_xla as xla
xla.start_devices(xla.Args(device="cpu"))
xla.spmd.set_global_mesh(xla.spmd.Mesh(np.array([2, 0, 3, 1]), (4,), ("data",)))
rows = torch.arange(8.0)
result = torch_xla.compile(lambda x: x + 1)(xla.put(rows))
assert xla.rows_of_this_host(result).tolist() == (rows + 1).tolist(), xla.rows_of_this_host(result)
"""
    words = [*launcher(devices=4), "-c", program]
    result = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_a_graph_that_changes_is_counted(device):
    before, _ = xla.compiled_so_far()
    for size in (3, 4):
        (torch.ones(size, device=device) * 2).cpu()
    assert xla.compiled_so_far()[0] == before + 2


def test_breakout_learns_to_keep_the_ball(tmp_path):
    # The reference's own test at three quarters of its length. A random policy scores below 1.
    run = succeed(
        "--num-envs", "256", "--minibatch-size", "2048", "--num-steps", "32", "--total-timesteps", "750000", "--hidden-size", "64",
        "--log-interval", "10", "--precision", "auto", cwd=tmp_path, timeout=400, flags="",
    )  # fmt: skip
    rows = [row for row in read_metrics(run) if "env/score" in row][-3:]
    assert sum(row["env/score"] for row in rows) / 3 >= 5
    assert metrics(run)["xla"]["compiled_after_warm_up"] == 0


def test_same_seed_gives_the_same_run(finished, tmp_path):
    again = succeed("--checkpoint-interval", "4", cwd=tmp_path)
    assert equal(models(again), models(finished))


# Checkpoints and files.


def evaluate(runner, run: pathlib.Path, cwd) -> dict:
    arguments = ["--evaluate", run, "--eval-episodes", "8", "--num-envs", "8", "--precision", "float32"]
    result = runner(*arguments, cwd=cwd)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_runs_of_either_script_play_the_same_under_both(finished, tmp_path):
    theirs = succeed(cwd=tmp_path, runner=run_script)
    for run in (finished, theirs):
        results = [evaluate(runner, run, tmp_path) for runner in (run_xla, run_script)]
        assert results[0]["episodes"] == 8
        assert results[0]["episodic_return"] == pytest.approx(results[1]["episodic_return"])
        assert results[0]["episodic_length"] == pytest.approx(results[1]["episodic_length"])


@pytest.mark.parametrize(("first", "second"), [("xla", "xla"), ("xla", "reference"), ("reference", "xla")])
def test_runs_resume_in_each_other(tmp_path, first, second):
    runners = {"xla": run_xla, "reference": run_script}
    run = succeed("--total-timesteps", 4 * STEPS, cwd=tmp_path, runner=runners[first])
    before = torch.load(run / "trainer_state.pt", weights_only=True)
    resumed = succeed("--resume", "latest", "--total-timesteps", 6 * STEPS, cwd=tmp_path, runner=runners[second])
    assert resumed == run
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == [STEPS * i for i in range(1, 7)]
    after = torch.load(run / "trainer_state.pt", weights_only=True)
    steps = [[entry["step"] for entry in state["optimizers"][1]["state"].values()] for state in (before, after)]
    updates = 2  # minibatches of an iteration
    assert all(int(step) == 4 * updates for step in steps[0]) and all(int(step) == 6 * updates for step in steps[1])
    assert rows[4]["learning_rate"] == pytest.approx(0.025 * (1 - 4 / 6))


def test_resumed_parameters_and_momenta_are_the_saved_ones(finished, device):
    saved = xla.load_checkpoint(str(finished), "--resume")
    agent = xla.Agent(*spaces_of_breakout(), 32).to(device)
    xla.load_state_dict(agent, saved["model"], "--resume")
    optimizers = xla.make_optimizers(agent, xla.Args(learning_rate=0.015))
    for optimizer, state in zip(optimizers, saved["optimizers"]):
        optimizer.load_state_dict(state)
    assert equal(xla.to_pufferlib(agent), saved["model"])
    restored = torch.load(io.BytesIO(xla.serialized([optimizer.state_dict() for optimizer in optimizers])), weights_only=True)
    for ours, theirs in zip(restored, saved["optimizers"], strict=True):
        assert equal(ours["state"], theirs["state"])


def test_sigterm_saves_and_kill_leaves_a_resumable_run(tmp_path):
    options = {"launcher": launcher(), "script": XLA, "small": False, "cwd": tmp_path}
    process, run = started(*ON_CPU, "--total-timesteps", "100_000_000", "--checkpoint-interval", "5", **options)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    assert metrics(run)["exit_reason"] == "sigterm"
    saved = torch.load(run / "trainer_state.pt", weights_only=True)["iteration"]
    process = start_script("--device", "cpu", "--resume", "latest", **options)
    wait_for(lambda: torch.load(run / "trainer_state.pt", weights_only=True)["iteration"] >= saved + 5, process)
    process.kill()
    process.wait()
    last = torch.load(run / "trainer_state.pt", weights_only=True)["iteration"]
    succeed("--resume", "latest", "--total-timesteps", (last + 2) * STEPS, cwd=tmp_path)
    assert metrics(run)["iterations"] == last + 2
    assert not [one for one in psutil.process_iter(["cwd"]) if one.info["cwd"] == str(tmp_path)]


def test_output_directory_may_be_any_url(tmp_path):
    url = f"local://{tmp_path}/elsewhere"
    result = run_xla("--output-dir", url, "--total-timesteps", 2 * STEPS, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (run,) = (tmp_path / "elsewhere").iterdir()
    assert {"config.yaml", "metrics.json", "metrics.jsonl", "trainer_state.pt"} <= {path.name for path in run.iterdir()}
    result = run_xla("--output-dir", "memory://runs", "--total-timesteps", 2 * STEPS, cwd=tmp_path)
    assert result.returncode == 0 and "warning" not in result.stderr, result.stderr


def test_profile_is_a_trace_of_the_run(tmp_path):
    run = succeed("--profile", "--total-timesteps", 10 * STEPS, cwd=tmp_path)
    (trace,) = run.glob("plugins/profile/*/*.xplane.pb")
    assert b"while" in trace.read_bytes(), "the scan's loop"


# Wrong arguments.


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--device", "tpu"], "--device tpu: this machine has no TPU; --device cpu"),
        (["--num-envs", "18", "--minibatch-size", "128"], "--num-envs 18: the 18 agents"),
        (["--num-steps", "16", "--minibatch-size", "96"], "--minibatch-size 96: 6 segments"),
        (["--no-compile"], "no-compile"),
    ],
)
def test_wrong_argument_is_one_line(tmp_path, arguments, says):
    result = run_xla(*arguments, cwd=tmp_path, devices=4)
    assert result.returncode == 2, result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and says in errors[0]
    assert "Traceback" not in result.stderr


def test_a_runtime_that_does_not_start_is_one_line(tmp_path):
    result = run_script("--device", "cpu", cwd=tmp_path, launcher=launcher(devices=0), small=False, script=XLA)
    assert result.returncode == 2, result.stderr
    assert "error: --device cpu: does not start" in result.stderr and "Traceback" not in result.stderr
