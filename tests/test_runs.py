"""Runs from the outside, each in a process of its own: what they leave, repeating, resuming, signals, kills, bad days."""

import json
import math
import os
import pathlib
import random
import shutil
import signal
import subprocess
import time

import psutil
import pytest
import torch
import yaml
from conftest import (
    SCRIPT,
    command_of,
    end_of,
    environment,
    newest_run,
    read_metrics,
    run_on_a_terminal,
    run_script,
    start_script,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppo_lstm_puffer as ppo

STEPS = 16 * 16  # of an iteration with the small arguments
ITERATIONS = 8
LOSSES = {
    "policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "explained_variance", "importance", "grad_norm",
}  # fmt: skip
WORKERS = ["--num-workers", "2"]
LONG = ["--total-timesteps", "100_000_000"]


def succeed(*arguments, cwd, runner=run_script, **kwargs) -> pathlib.Path:
    """Runs the script, asserts success, returns the run's folder."""
    result = runner(*arguments, cwd=cwd, **kwargs)
    assert result.returncode == 0, result.stderr
    return newest_run(cwd)


def wait_for(condition, process: subprocess.Popen, timeout: float = 60):
    """Until condition() is true; fails if the process ends first."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.002)


def started(*arguments, cwd, **kwargs) -> tuple[subprocess.Popen, pathlib.Path]:
    """A process that trains and has logged, and its run's folder."""
    process = start_script(*arguments, cwd=cwd, **kwargs)
    wait_for(
        lambda: (
            list(pathlib.Path(cwd, "runs").glob("*/metrics.jsonl"))
            and newest_run(cwd).joinpath("metrics.jsonl").read_text()
        ),
        process,
    )
    return process, newest_run(cwd)


def without_clock(run: pathlib.Path) -> list[dict]:
    """The metrics of a run but for what a clock says."""
    return [
        {
            key: value
            for key, value in row.items()
            if key not in ("time", "startup", "sps") and not key.startswith("time/")
        }
        for row in read_metrics(run)
    ]


def exit_reason(run: pathlib.Path) -> str:
    return end_of(run)["exit_reason"]


def checkpoint(run: pathlib.Path) -> dict:
    return ppo.load_checkpoint(str(run), "runs")


def schedule(run: pathlib.Path) -> list[tuple]:
    return [(row["iteration"], row["step"], row["learning_rate"]) for row in read_metrics(run)]


def equal(a, b) -> bool:
    """Whether two nested structures are equal, tensors to the bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished small run with checkpoints after 4 and 8 iterations; `run` is its folder. No test changes it."""
    folder = tmp_path_factory.mktemp("finished")
    result = run_script("--checkpoint-interval", "4", cwd=folder)
    assert result.returncode == 0, result.stderr
    result.run = newest_run(folder)
    return result


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the finished run, in tmp_path/runs, to damage."""
    return pathlib.Path(shutil.copytree(finished.run, tmp_path / "runs" / finished.run.name))


# What a run leaves.


def test_run_is_named_after_environment_experiment_seed_and_time(finished):
    env_id, exp_name, seed, started = finished.run.name.split("__")
    assert (env_id, exp_name, seed) == ("breakout", "ppo_lstm_puffer", "1") and abs(
        int(started) - time.time()
    ) < 3600


def test_config_holds_every_argument_as_resolved(finished):
    config = yaml.safe_load((finished.run / "config.yaml").read_text())
    assert set(config) == set(vars(ppo.Args()))
    assert (
        config["num_envs"],
        config["env_id"],
        config["compile"],
        config["device"] in ("cpu", "cuda"),
    ) == (16, "breakout", False, True)


def test_metrics_lines_have_the_values_of_every_interval(finished):
    rows = read_metrics(finished.run)
    assert [row["step"] for row in rows] == [STEPS * (i + 1) for i in range(ITERATIONS)]
    for row in rows:
        assert {"step", "time", "sps", "learning_rate"} | {
            f"losses/{name}" for name in LOSSES
        } <= set(row)
        assert {f"time/{phase}" for phase in ("env", "policy", "update")} <= set(row)
    times = [row["time"] for row in rows]
    assert times == sorted(set(times))
    assert any(
        "episodic_return" in row and "episodic_length" in row and "env/score" in row for row in rows
    )


def test_a_narrow_terminal_cuts_the_numbers_and_not_the_bar(tmp_path):
    _, shown = run_on_a_terminal(command_of(), tmp_path, columns=80)
    assert "step=2048" in shown and "━" * 20 in shown  # complete


def test_last_line_of_the_metrics_says_how_it_ended(finished):
    end = end_of(finished.run)
    assert end["exit_reason"] == "completed"
    assert (end["step"], end["iteration"]) == (STEPS * ITERATIONS, ITERATIONS)
    assert end["time"] > end["startup"] > 0 and end["peak_rss_mb"] > 50


def test_run_has_a_copy_of_its_script(finished):
    assert (finished.run / SCRIPT.name).read_text() == SCRIPT.read_text()


def test_tensorboard_has_the_charts(finished):
    events = EventAccumulator(str(finished.run)).Reload()
    tags = set(events.Tags()["scalars"])
    charts = (
        "SPS",
        "episodic_return",
        "episodic_return_min",
        "episodic_return_max",
        "episodic_length",
        "learning_rate",
    )
    assert {f"charts/{name}" for name in charts} | {f"losses/{name}" for name in LOSSES} <= tags
    assert any(tag.startswith("env/") for tag in tags) and any(
        tag.startswith("time/") for tag in tags
    )
    logged, rows = events.Scalars("losses/entropy"), read_metrics(finished.run)
    assert [event.step for event in logged] == [row["step"] for row in rows]
    assert [event.value for event in logged] == pytest.approx(
        [row["losses/entropy"] for row in rows]
    )


def test_checkpoints_are_named_after_their_iteration(finished):
    assert sorted(path.name for path in finished.run.glob("*.pt")) == [
        "model_breakout_000004.pt", "model_breakout_000008.pt", "trainer_000004.pt", "trainer_000008.pt",
    ]  # fmt: skip
    assert not list(finished.run.glob("*.tmp"))


def test_only_the_last_checkpoints_are_kept(tmp_path):
    run = succeed("--checkpoint-interval", "1", "--keep-checkpoints", "3", cwd=tmp_path)
    for kind in ("model_breakout", "trainer"):
        assert sorted(path.name for path in run.glob(f"{kind}_*.pt")) == [
            f"{kind}_{i:06d}.pt" for i in (6, 7, 8)
        ]


def test_stdout_is_parseable_without_a_terminal(finished):
    lines = [
        dict(word.split("=") for word in line.split(" ")) for line in finished.stdout.splitlines()
    ]
    assert [int(line["step"]) for line in lines] == [STEPS * (i + 1) for i in range(ITERATIONS)]
    assert all(float(value) == float(value) for line in lines for value in line.values())


def test_time_limit_ends_a_run(tmp_path):
    run = succeed(*LONG, "--time-limit", "1", cwd=tmp_path)
    end = end_of(run)
    assert end["exit_reason"] == "time_limit" and end["time"] - end["startup"] >= 1
    assert checkpoint(run)["step"] == end["step"] > 0


def test_profile_writes_a_trace(tmp_path):
    run = succeed("--profile", "--total-timesteps", "4096", cwd=tmp_path)
    (trace,) = run.glob("*.pt.trace.json")
    assert json.loads(trace.read_text())["traceEvents"]


# Repeating.


def test_same_seed_gives_the_same_metrics_to_the_bit(finished, tmp_path):
    assert without_clock(succeed(cwd=tmp_path)) == without_clock(finished.run)


def test_another_seed_gives_other_metrics(finished, tmp_path):
    assert without_clock(succeed("--seed", "2", cwd=tmp_path)) != without_clock(finished.run)


def test_same_seed_gives_the_same_metrics_with_worker_processes(tmp_path):
    runs = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        runs.append(
            succeed(
                *WORKERS,
                "--env-id",
                "CartPole-v1",
                "--total-timesteps",
                2 * STEPS,
                cwd=tmp_path / name,
            )
        )
    assert without_clock(runs[0]) == without_clock(runs[1])


def test_config_repeats_a_run_to_the_bit(finished, tmp_path):
    run = succeed("--config", finished.run / "config.yaml", cwd=tmp_path, small=False)
    assert without_clock(run) == without_clock(finished.run)


def test_command_line_beats_config_and_env_arguments_reach_the_environment(finished, tmp_path):
    run = succeed(
        "--config",
        finished.run / "config.yaml",
        "--gamma",
        "0.9",
        "--env.frameskip",
        "8",
        cwd=tmp_path,
        small=False,
    )
    config, before = (
        yaml.safe_load((folder / "config.yaml").read_text()) for folder in (run, finished.run)
    )
    assert config == before | {"gamma": 0.9, "env": {"frameskip": 8}, "config": config["config"]}
    first, first_before = (
        next(row for row in read_metrics(folder) if "episodic_length" in row)
        for folder in (run, finished.run)
    )
    assert (
        first["episodic_length"] < first_before["episodic_length"]
    )  # 8 frames a step, not 4: the ball falls in fewer steps


# Resuming.


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of a run of 40 iterations that was killed with SIGKILL after its checkpoint at 20."""
    folder = tmp_path_factory.mktemp("killed")
    process, run = started(
        "--total-timesteps", 40 * STEPS, "--checkpoint-interval", "20", cwd=folder
    )
    wait_for(lambda: list(run.glob("trainer_*.pt")), process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    return run


def test_resumed_run_goes_on_as_if_uninterrupted(killed, tmp_path):
    (tmp_path / "straight").mkdir()
    straight = succeed("--total-timesteps", 40 * STEPS, cwd=tmp_path / "straight")
    copy = pathlib.Path(shutil.copytree(killed, tmp_path / "runs" / killed.name))
    resumed = succeed("--resume", "latest", cwd=tmp_path, small=False)
    assert resumed == copy and exit_reason(resumed) == "completed"
    assert schedule(resumed) == schedule(straight) and len(schedule(straight)) == 40
    assert read_metrics(resumed)[:20] == read_metrics(killed)[:20]
    ends = [checkpoint(run) for run in (resumed, straight)]
    assert [(end["iteration"], end["step"]) for end in ends] == [(40, 40 * STEPS)] * 2
    times = [row["time"] for row in read_metrics(resumed)]
    assert times == sorted(times), "time counts on"


@pytest.mark.parametrize("times", [3, 0.5])
def test_run_resumed_with_another_batch_size_goes_on_to_its_total(killed, tmp_path, times):
    shutil.copytree(killed, tmp_path / "runs" / killed.name)
    num_envs = int(times * yaml.safe_load((killed / "config.yaml").read_text())["num_envs"])
    resumed = succeed("--resume", "latest", "--num-envs", num_envs, cwd=tmp_path, small=False)
    assert 40 * STEPS <= checkpoint(resumed)["step"] < 40 * STEPS + times * STEPS
    assert checkpoint(resumed)["iteration"] == 20 + math.ceil(20 / times)
    rates = [row["learning_rate"] for row in read_metrics(resumed) if "learning_rate" in row]
    assert rates == sorted(rates, reverse=True), "the schedule goes on where it was"


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_resumed_state_is_the_saved_one_but_for_what_flags_say(tmp_path, optimizer):
    run = succeed("--optimizer", optimizer, "--total-timesteps", 2 * STEPS, cwd=tmp_path)
    args, resumed = ppo.parse_args(
        ["--resume", str(run), "--momentum", "0.5", "--learning-rate", "0.125"]
    )
    envs = ppo.make_envs(args, 1)
    agent = ppo.Agent(envs.single_observation_space, envs.single_action_space, args.hidden_size)
    envs.close()
    optimizers = ppo.make_optimizers(agent, args)
    ppo.load_state(agent, optimizers, args, resumed)
    assert equal(dict(agent.state_dict()), resumed["model"])
    assert equal([one.state_dict()["state"] for one in optimizers], resumed["optimizers"])
    group = optimizers[0].param_groups[0]
    assert float(group["lr"]) == 0.125
    assert (group["momentum"] if optimizer == "muon" else group["betas"][0]) == 0.5
    assert (resumed["iteration"], resumed["step"]) == (2, 2 * STEPS)


def test_kill_at_any_moment_leaves_a_resumable_run(tmp_path):
    moments = random.Random(1)
    arguments = ["--checkpoint-interval", "1", *LONG]
    process, run = started(*arguments, cwd=tmp_path)
    wait_for(lambda: list(run.glob("trainer_*.pt")), process)
    last = 0
    for _ in range(4):
        time.sleep(moments.uniform(0, 0.3))
        process.kill()
        process.communicate()
        state = checkpoint(run)
        assert state["iteration"] >= last and state["step"] == state["iteration"] * STEPS
        last = state["iteration"]
        process = start_script("--resume", "latest", cwd=tmp_path, small=False)
        wait_for(lambda last=last: (run / f"trainer_{last + 1:06d}.pt").exists(), process)
    process.kill()
    process.communicate()
    last = checkpoint(run)["iteration"]
    succeed(
        "--resume", "latest", "--total-timesteps", (last + 3) * STEPS, cwd=tmp_path, small=False
    )
    assert exit_reason(run) == "completed"
    assert [row["iteration"] for row in read_metrics(run)] == list(range(1, last + 4))
    assert not list(run.glob("*.tmp")) and len(list(run.glob("model_*.pt"))) <= 3


def truncate(path: pathlib.Path):
    os.truncate(path, path.stat().st_size // 2)


def test_truncated_checkpoint_is_skipped_for_the_one_before_it(copied, capsys):
    truncate(copied / "trainer_000008.pt")
    assert checkpoint(copied)["iteration"] == 4
    warning = capsys.readouterr().err
    assert warning.startswith("warning: ") and "trainer_000008.pt" in warning


def test_run_with_a_truncated_checkpoint_resumes(copied, tmp_path):
    truncate(copied / "trainer_000008.pt")
    result = run_script("--resume", "latest", cwd=tmp_path, small=False)
    assert result.returncode == 0, result.stderr
    assert "warning: " in result.stderr and "trainer_000008.pt" in result.stderr
    assert [row["iteration"] for row in read_metrics(copied)] == list(range(1, ITERATIONS + 1))
    assert checkpoint(copied)["iteration"] == ITERATIONS


def test_run_without_a_whole_checkpoint_is_refused(copied):
    for trainer in copied.glob("trainer_*.pt"):
        truncate(trainer)
    with pytest.raises(ppo.UsageError, match="no whole trainer"):
        checkpoint(copied)


# Signals, kills, failures.


def children_of(process: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def alive(processes: list[psutil.Process], within: float = 5) -> list[psutil.Process]:
    return psutil.wait_procs(processes, timeout=within)[1]


@pytest.mark.parametrize("backend", [[], WORKERS], ids=["native", "workers"])
def test_sigterm_writes_a_checkpoint_and_leaves_no_process(tmp_path, backend):
    process, run = started(*LONG, *backend, cwd=tmp_path)
    children = children_of(process)
    assert len(children) >= (2 if backend else 0)
    process.terminate()
    process.communicate(timeout=100)
    assert process.returncode == 143 and not alive(children)
    end = end_of(run)
    assert end["exit_reason"] == "sigterm"
    assert checkpoint(run)["iteration"] == end["iteration"] > 0


@pytest.mark.parametrize("backend", [[], WORKERS], ids=["native", "workers"])
def test_control_c_writes_a_checkpoint_and_leaves_no_process(tmp_path, backend):
    """A terminal sends SIGINT to the whole process group."""
    process, run = started(*LONG, *backend, cwd=tmp_path, start_new_session=True)
    children = children_of(process)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 130 and not alive(children)
    assert "Traceback" not in stderr and exit_reason(run) == "sigint"
    assert checkpoint(run)["iteration"] > 0


@pytest.mark.parametrize(
    "script", ["ppo_lstm_puffer.py", "ppo_lstm_puffer_ddp.py", "protein_sweep.py"]
)
def test_control_c_while_importing_ends_without_a_traceback(tmp_path, script):
    process = start_script(cwd=tmp_path, small=False, script=SCRIPT.parent / script, fork=False)
    wait_for(lambda: "numpy" in pathlib.Path(f"/proc/{process.pid}/maps").read_text(), process)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=100)
    if script == "protein_sweep.py":
        assert process.returncode == -signal.SIGINT and stderr == ""
    else:
        assert process.returncode == 130 and stderr == "ended while starting: nothing is lost\n"


def test_workers_of_a_killed_run_end(tmp_path):
    process, _ = started(*LONG, *WORKERS, cwd=tmp_path)
    workers = children_of(process)
    assert len(workers) >= 2
    process.kill()
    process.communicate()
    assert not alive(workers)


def test_killed_worker_ends_the_run_with_its_reason(tmp_path):
    process, run = started(*LONG, *WORKERS, cwd=tmp_path)
    workers = children_of(process)
    workers[-1].kill()
    _, stderr = process.communicate(timeout=10)
    assert process.returncode == 1 and not alive(workers)
    assert (
        "error: environment worker" in stderr
        and "ended: -9" in stderr
        and "Traceback" not in stderr
    )
    assert "worker" in exit_reason(run)


def test_environment_that_raises_in_a_worker_ends_the_run(tmp_path):
    result = run_script(
        *WORKERS, "--env-id", "memory", cwd=tmp_path, timeout=60
    )  # raises at reset, as PufferLib released it
    assert result.returncode == 1 and "worker" in result.stderr.splitlines()[-1]
    assert "not in space" in result.stderr, "the environment's own words"


def test_nan_stops_training_and_keeps_the_last_good_checkpoint(tmp_path):
    result = run_script(
        "--env-id",
        "environments:NaNReward-v0",
        "--no-clip-rewards",
        "--checkpoint-interval",
        "1",
        cwd=tmp_path,
    )
    assert result.returncode == 1
    assert (
        result.stderr.splitlines()[-1].startswith("error: ")
        and "not finite" in result.stderr
        and "Traceback" not in result.stderr
    )
    run = newest_run(tmp_path)
    state = checkpoint(run)
    assert state["iteration"] == 3  # 50 healthy steps are three segments of 16
    assert all(torch.isfinite(value).all() for value in state["model"].values())
    assert "not finite" in exit_reason(run)


@pytest.fixture
def almost_full_disk(tmp_path, request):
    """A file system with room for the logs but not for a checkpoint."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs needs root: {mounted.stderr.strip()}")
    room = 1024 * getattr(request, "param", 60)
    (folder / "filler").write_bytes(bytes(2**20 - room - SCRIPT.stat().st_size))
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize(
    "almost_full_disk", [60, 16], indirect=True, ids=["for a checkpoint", "for the logs too"]
)
def test_full_disk_does_not_stop_training(almost_full_disk, tmp_path):
    result = run_script(
        "--output-dir", almost_full_disk, "--checkpoint-interval", "2", cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert "warning: checkpoint failed" in result.stderr and "No space left" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(almost_full_disk.rglob("*.tmp")), (
        "what did not fit is not left to fill the disk"
    )
    assert result.stdout.splitlines()[-1].startswith(f"step={STEPS * ITERATIONS} ")


# Weights and Biases.


def test_wandb_offline_leaves_an_offline_run(tmp_path):
    run = succeed("--track", "--total-timesteps", STEPS, cwd=tmp_path)
    assert list(run.glob("wandb/offline-run-*/*.wandb"))


def test_unreachable_wandb_does_not_stop_training(tmp_path):
    unreachable = {
        "WANDB_MODE": "online",
        "WANDB_BASE_URL": "http://127.0.0.1:9",
        "WANDB_API_KEY": "0" * 40,
        "WANDB_INIT_TIMEOUT": "5",
    }
    result = run_script(
        "--track", "--total-timesteps", STEPS, cwd=tmp_path, env=environment() | unreachable
    )
    assert result.returncode == 0, result.stderr
    assert exit_reason(newest_run(tmp_path)) == "completed" and "warning: W&B" in result.stderr
