"""The XLA script on PJRT's CPU device, in the environment that has torch_xla: `make test-xla`.

The reference script runs here too, under the same torch; it is what this one is compared with.
"""

import functools
import pathlib
import signal
import subprocess
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import PYTHON, ROOT, SMALL, environment, run_script, start_script, succeed
from reading import checkpoint, end_of, newest_run, read_metrics

import ppo_lstm_puffer as ppo
import ppo_lstm_puffer_xla as xla

XLA = ROOT / "ppo_lstm_puffer_xla.py"
ON_CPU = ["--device", "cpu", *(argument for argument in SMALL if argument != "--no-compile")]
STEPS = 16 * 16  # of an iteration with the small arguments
QUICK_TO_COMPILE = "--xla_backend_optimization_level=0"  # in a third of the time; slow to run


def launcher(devices: int = 1, flags: str = QUICK_TO_COMPILE) -> tuple[str, ...]:
    # -u: what this process told its own runtime
    settings = f"CPU_NUM_DEVICES={devices}", f"XLA_FLAGS={flags}"
    return "env", "-u", "XLA_USE_SPMD", *settings, *PYTHON


def run_xla(*arguments, cwd, devices: int = 1, flags: str = QUICK_TO_COMPILE, timeout: float = 300):
    how = {"launcher": launcher(devices, flags), "small": False, "script": XLA}
    return run_script(*ON_CPU, *arguments, cwd=cwd, timeout=timeout, **how)


def run_reference(*arguments, cwd):
    return run_script("--device", "cpu", *arguments, cwd=cwd)


train = functools.partial(succeed, runner=run_xla)


def weights(run: pathlib.Path) -> list[dict]:
    """By iteration."""
    return [torch.load(path) for path in sorted(run.glob("model_*.pt"))]


def compiled(run: pathlib.Path) -> list[int]:
    """How many graphs there were, by log interval."""
    return [row["xla/compiled"] for row in read_metrics(run)]


def close(ours, theirs, **tolerances):
    """Asserts that nested tensors are equal but for rounding, wherever they are."""
    ours = torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.detach().cpu(), ours)
    torch.testing.assert_close(ours, theirs, **{"atol": 1e-5, "rtol": 1e-5} | tolerances)


@pytest.fixture(scope="module")
def device():
    xla.start_devices(xla.Args(device="cpu"))
    xla.set_up_torch(1)
    return xla.torch_xla.device()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished small run, with checkpoints after 4 and 8 iterations."""
    return train("--checkpoint-interval", "4", cwd=tmp_path_factory.mktemp("finished"))


@pytest.fixture(scope="module")
def three_iterations(tmp_path_factory):
    """The folder of a run of three iterations on one device, each with a checkpoint."""
    return train(*THREE_ITERATIONS, cwd=tmp_path_factory.mktemp("three"))


THREE_ITERATIONS = ["--total-timesteps", 3 * STEPS, "--checkpoint-interval", "1"]


# The mathematics, piece by piece.


def test_the_recurrence_is_the_references_in_values_and_gradients(device):
    torch.manual_seed(1)
    T = 9
    N = 5
    H = 8
    dones = (torch.rand(T, N) < 0.3).float()
    dones[0, 0] = 1
    h = torch.randn(N, H)
    c = torch.randn(N, H)
    learned = torch.randn(T, N, H), torch.randn(4 * H, 2 * H) / 2, torch.randn(4 * H)
    outer = torch.randn(T, N, H)

    def of(script, device):
        x, weight, bias = (tensor.to(device).requires_grad_() for tensor in learned)
        state = (tensor.to(device) for tensor in (h, c, dones))
        outputs = script.lstm_outputs(x, *state, weight, bias)
        (outputs * outer.to(device)).sum().backward()
        return [outputs.detach(), x.grad, weight.grad, bias.grad]

    close(of(xla, device), of(ppo, "cpu"))


# I12, and what training must keep.


@pytest.mark.parametrize(
    "arguments",
    [
        ["--learning-rate", "0.03"],
        ["--learning-rate", "0.001", "--optimizer", "adam"],
        ["--env-id", "CartPole-v1", "--norm-obs", "--norm-rewards"],
    ],
    ids=["muon", "adam", "normalized"],
)
def test_first_update_is_the_references(tmp_path, arguments):
    """I12. With one seed both scripts draw the same numbers in the same order."""
    arguments += ["--total-timesteps", STEPS, "--update-epochs", "0.5"]
    (tmp_path / "ours").mkdir()
    ours = train(*arguments, cwd=tmp_path / "ours")
    theirs = train(*arguments, cwd=tmp_path, runner=run_reference)
    (model,) = weights(ours)
    (expected,) = weights(theirs)
    close(model, expected, atol=1e-4, rtol=1e-4)
    (row,) = read_metrics(ours)
    (expected,) = read_metrics(theirs)
    assert abs(expected["losses/grad_norm"]) > 1e-3
    assert "losses/explained_variance" in row
    for name in (key for key in expected if key.startswith(("losses/", "env/", "episodic"))):
        assert row[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), name


@pytest.mark.parametrize(
    "arguments",
    [
        ["--env-id", "cartpole", "--learning-rate", "0.05"],
        ["--env-id", "envs.probes:CueRecall-v0", "--num-workers", "2"],
        ["--env-id", "environments:TwoDials-v0", "--learning-rate", "0.05"],
        ["--env-id", "environments:Continuous-v0", "--learning-rate", "0.05", "--norm-obs"],
    ],
    ids=["cartpole", "two workers", "MultiDiscrete", "Box"],
)
def test_ratio_is_one_before_the_first_update(tmp_path, arguments):
    """I1. One update per iteration sees the policy that acted; episodes end inside its segments."""
    whole = ["--minibatch-size", STEPS, "--prio-alpha", "0"]
    rows = read_metrics(train(*arguments, *whole, cwd=tmp_path))
    assert len(rows) == 8
    for row in rows:
        assert row["losses/clipfrac"] == 0
        assert abs(row["losses/approx_kl"]) < 1e-7
    assert any("episodic_return" in row for row in rows)


@pytest.mark.parametrize(
    ("arguments", "devices"),
    [([], 4), (["--max-minibatch-size", "64"], 1)],
    ids=["devices", "chunks"],
)
def test_parts_train_as_the_whole(three_iterations, tmp_path, arguments, devices):
    parts = train(*THREE_ITERATIONS, *arguments, cwd=tmp_path, devices=devices)
    assert compiled(parts)[1] == compiled(parts)[-1]
    assert len(weights(parts)) == 3
    close(weights(parts), weights(three_iterations), atol=1e-4, rtol=0)


def test_nothing_is_compiled_late_on_four_devices(tmp_path):
    """Nor with two groups of agents, several updates, norms, or after a resume."""
    norms = ["--env-id", "CartPole-v1", "--norm-obs", "--norm-rewards"]
    more = ["--num-workers", "2", "--update-epochs", "2", "--checkpoint-interval", "3"]
    run = train(*norms, *more, cwd=tmp_path, devices=4)
    assert compiled(run)[1] == compiled(run)[-1]
    train("--resume", "latest", "--total-timesteps", 14 * STEPS, cwd=tmp_path, devices=4)
    assert end_of(run)["iteration"] == 14
    assert compiled(run)[9] == compiled(run)[-1]


def run_program(program: str, *arguments, cwd, devices: int = 1, **variables):
    """Runs Python code that has `xla` and the script's arguments, as a process of its own."""
    program = f"import sys\nimport ppo_lstm_puffer_xla as xla\n{program}"
    command = [*launcher(devices=devices), "-c", program, *map(str, arguments)]
    env = environment() | variables
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def test_every_agent_gets_its_own_row_back_whatever_the_order_of_the_devices(tmp_path):
    program = """
import numpy as np, torch
from ppo_lstm_puffer_xla import spmd, xm
xla.start_devices(xla.Args(device="cpu"))
device = xla.torch_xla.device()
spmd.set_global_mesh(spmd.Mesh(np.array([2, 0, 3, 1]), (4,), ("data",)))
rows = torch.arange(8.0)
stored = torch.zeros(3, 8, device=device)
xla.share(1, stored)
how = spmd.ShardingSpec(spmd.get_global_mesh(), ("data",), minibatch=True)
at = torch.tensor([1]).to(device)
stored[at, slice(0, 8)] = xm.send_cpu_data_to_device([rows], device, how)[0] + 1
result = xla.rows_of_this_host(stored[at, slice(0, 8)][0])
assert result.tolist() == (rows + 1).tolist(), result
"""
    result = run_program(program, cwd=tmp_path, devices=4)
    assert result.returncode == 0, result.stderr


MAIN = "sys.exit(xla.main(*xla.parse_args(sys.argv[1:])))"


def test_a_signal_of_another_host_ends_this_one_too(tmp_path):
    fifth = "xla.Run.wish = property(lambda run: 15.0 if run.iteration == 5 else 0.0)\n"
    result = run_program(fifth + MAIN, *ON_CPU, cwd=tmp_path)
    assert result.returncode == 128 + signal.SIGTERM, result.stderr
    end = end_of(newest_run(tmp_path))
    assert (end["exit_reason"], end["iteration"]) == ("sigterm", 5)


def test_a_host_that_is_not_the_first_trains_and_leaves_nothing(tmp_path):
    (tmp_path / "tmp").mkdir()
    second = "xla.xr.process_index = lambda: 1\n"
    few = "--total-timesteps", STEPS
    result = run_program(second + MAIN, *ON_CPU, *few, cwd=tmp_path, TMPDIR=str(tmp_path / "tmp"))
    assert result.returncode == 0, result.stderr
    assert f"completed: {STEPS} steps" in result.stderr
    assert result.stdout == ""
    assert not (tmp_path / "runs").exists()
    run = train(*few, cwd=tmp_path)  # the first host's
    before = {path: path.stat().st_mtime_ns for path in run.iterdir()}
    more = "--resume", "latest", "--total-timesteps", 2 * STEPS
    result = run_program(second + MAIN, *more, cwd=tmp_path, TMPDIR=str(tmp_path / "tmp"))
    assert result.returncode == 0, result.stderr
    assert f"completed: {2 * STEPS} steps" in result.stderr
    assert {path: path.stat().st_mtime_ns for path in run.iterdir()} == before
    assert not list((tmp_path / "tmp").glob("*/model_*"))


def test_breakout_learns_to_keep_the_ball(tmp_path):
    # The reference's own test at three quarters of its length. A random policy scores below 1.
    sizes = "--num-envs 256 --minibatch-size 2048 --num-steps 32 --total-timesteps 750000"
    more = "--hidden-size 64 --log-interval 10 --precision auto"
    run = train(*sizes.split(), *more.split(), cwd=tmp_path, timeout=900, flags="")
    rows = [row for row in read_metrics(run) if "env/score" in row][-3:]
    assert sum(row["env/score"] for row in rows) / 3 >= 5
    assert compiled(run)[0] == compiled(run)[-1]


def test_bfloat16_acts_and_recomputes_the_same_policy(three_iterations, tmp_path):
    """XLA's CPU device emulates it. The policy is float32's but for rounding."""
    whole = ["--total-timesteps", STEPS, "--minibatch-size", STEPS, "--prio-alpha", "0"]
    (row,) = read_metrics(train("--precision", "bfloat16", *whole, cwd=tmp_path))
    entropy = read_metrics(three_iterations)[0]["losses/entropy"]
    assert row["losses/entropy"] == pytest.approx(entropy, rel=0.01)
    assert abs(row["losses/approx_kl"]) < 1e-4
    assert row["losses/clipfrac"] == 0
    assert row["losses/grad_norm"] > 0


def test_same_seed_gives_the_same_run_and_nothing_is_compiled_late(finished, tmp_path):
    """After two iterations by nothing: torch_xla counts."""
    again = train("--checkpoint-interval", "4", cwd=tmp_path)
    assert len(weights(again)) == 2
    close(weights(again), weights(finished), atol=0, rtol=0)
    assert compiled(finished)[1] == compiled(finished)[-1] > 3


# Checkpoints and files.


@pytest.mark.parametrize(
    ("first", "second"),
    [(run_xla, run_xla), (run_xla, run_reference), (run_reference, run_xla)],
    ids=["xla", "xla then reference", "reference then xla"],
)
def test_runs_resume_in_each_other(tmp_path, first, second):
    run = train("--total-timesteps", 4 * STEPS, cwd=tmp_path, runner=first)
    before = checkpoint(run)
    more = "--resume", "latest", "--total-timesteps", 6 * STEPS
    assert train(*more, cwd=tmp_path, runner=second) == run
    after = checkpoint(run)
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == [STEPS * i for i in range(1, 7)]
    for state, iterations in (before, 4), (after, 6):
        adam = state["optimizers"][1].values()
        assert {int(entry["step"]) for entry in adam} == {2 * iterations}  # two updates each
    assert rows[4]["learning_rate"] == pytest.approx(0.06 * 64 ** (-4 / 6))


def test_sigterm_saves_and_kill_leaves_a_resumable_run(tmp_path):
    def start(*arguments) -> SimpleNamespace:
        how = {"launcher": launcher(), "script": XLA, "small": False, "cwd": tmp_path}
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        return start_script("--device", "cpu", *arguments, **how, **output)

    def wait_for_lines(process, lines: int):
        for _ in range(lines):
            assert process.stdout.readline().startswith("step="), "it ended"

    endless = "--total-timesteps", "100_000_000", "--checkpoint-interval", "1"
    process = start(*ON_CPU, *endless)
    wait_for_lines(process, 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    run = newest_run(tmp_path)
    end = end_of(run)
    assert end["exit_reason"] == "sigterm"
    assert checkpoint(run)["iteration"] == end["iteration"]
    process = start("--resume", "latest")
    wait_for_lines(process, 5)
    process.kill()
    process.wait()
    last = checkpoint(run)["iteration"]
    assert last >= end["iteration"] + 4
    train("--resume", "latest", "--total-timesteps", (last + 2) * STEPS, cwd=tmp_path)
    end = end_of(run)
    assert (end["iteration"], end["exit_reason"]) == (last + 2, "completed")
    assert not [one for one in psutil.process_iter(["cwd"]) if one.info["cwd"] == str(tmp_path)]


def test_profile_is_a_trace_of_the_run(tmp_path):
    run = train("--profile", "--total-timesteps", 10 * STEPS, cwd=tmp_path)
    (trace,) = run.glob("plugins/profile/*/*.xplane.pb")
    assert b"while" in trace.read_bytes(), "the scan's loop"


# Wrong arguments.


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--device", "tpu"], "--device tpu: there is none here; use --device cpu"),
        (["--num-envs", "18", "--minibatch-size", "128"], "--num-envs 18: "),
        (["--minibatch-size", "96"], "--minibatch-size: its 6 segments"),
    ],
)
def test_wrong_argument_is_one_line(tmp_path, arguments, says):
    result = run_xla(*arguments, cwd=tmp_path, devices=4)
    assert result.returncode == 2, result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert says in errors[0]
    assert "Traceback" not in result.stderr
