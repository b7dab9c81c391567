"""Runs from the outside, each a process: what they leave, repeating, resuming, signals, bad days."""

import contextlib
import json
import math
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
import yaml
from conftest import (
    SCRIPT,
    SMALL,
    environment,
    run_script,
    start_script,
    succeed,
    train_here,
    wait_for,
)
from reading import alive, checkpoint, end_of, newest_run, read_metrics, without_clock
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

import ppo_lstm_puffer as ppo

STEPS = 16 * 16  # of an iteration with the small arguments
ITERATIONS = 8
LOSSES = {*ppo.LOSSES, "explained_variance"}
WORKERS = ["--num-workers", "2"]
LONG = ["--total-timesteps", "100_000_000", "--checkpoint-interval", "1_000_000"]


def logged(cwd) -> int:
    """How many lines of metrics the newest run in cwd has."""
    with contextlib.suppress(OSError, ValueError):
        return len((newest_run(cwd) / "metrics.jsonl").read_text().splitlines())
    return 0


@pytest.fixture
def started():
    """Starts the script and waits until it trains and has logged. Whatever is left is killed."""
    processes = []

    def start(*arguments, cwd, **options):
        processes.append(start_script(*arguments, cwd=cwd, **options))
        wait_for(lambda: logged(cwd), processes[-1])
        return processes[-1], newest_run(cwd)

    yield start
    for process in processes:
        process.kill()


# What a run leaves.


def test_run_has_its_name_script_end_weights_state_and_every_argument_as_resolved(finished):
    assert finished.run.name.split("__")[:3] == ["breakout", "ppo_lstm_puffer", "1"]
    assert (finished.run / SCRIPT.name).read_text() == SCRIPT.read_text()
    end = end_of(finished.run)
    assert end["exit_reason"] == "completed"
    assert (end["step"], end["iteration"]) == (STEPS * ITERATIONS, ITERATIONS)
    names = sorted(path.name for path in finished.run.iterdir() if ".pt" in path.name)
    assert names == ["model_breakout_000004.pt", "model_breakout_000008.pt", "trainer_state.pt"]
    weights = torch.load(finished.run / names[1])
    torch.testing.assert_close(weights, checkpoint(finished.run)["model"], rtol=0, atol=0)
    config = yaml.safe_load((finished.run / "config.yaml").read_text())
    assert set(config) == set(vars(ppo.Args())) | {"auto"}
    assert (config["num_envs"], config["env_id"], config["compile"]) == (16, "breakout", False)
    assert config["num_workers"] is not None
    args, _ = ppo.parse_args(["--env-id", "cartpole"])
    assert args.device == ("cuda" if torch.cuda.is_available() else "cpu")


def test_every_interval_has_its_values_in_metrics_and_a_parseable_line_on_stdout(finished):
    rows = read_metrics(finished.run)
    assert [row["step"] for row in rows] == [STEPS * (i + 1) for i in range(ITERATIONS)]
    stdout = finished.stdout.splitlines()
    lines = [dict(word.split("=") for word in line.split(" ")) for line in stdout]
    assert [int(line["step"]) for line in lines] == [row["step"] for row in rows]
    assert all(math.isfinite(float(value)) for line in lines for value in line.values())
    for row in rows:
        assert {"step", "iteration", "time", "learning_rate"} <= set(row)
        assert {f"losses/{name}" for name in LOSSES} <= set(row)
    assert ["sps" in row for row in rows] == [False, *[True] * (ITERATIONS - 1)]  # it has compiled
    for row in rows[1:]:
        shares = sum(row[f"time/{phase}"] for phase in ("env", "policy", "update"))
        assert shares == pytest.approx(1)
    times = [row["time"] for row in rows]
    assert times == sorted(set(times))
    ended = [row for row in rows if "episodic_return" in row]
    assert ended and {"episodic_length", "episodic_return_min", "env/score"} <= set(ended[0])


def test_tensorboard_has_the_charts(finished):
    events = EventAccumulator(str(finished.run)).Reload()
    tags = set(events.Tags()["scalars"])
    assert {"charts/SPS", "charts/episodic_return", "charts/learning_rate", "env/score"} <= tags
    assert {f"losses/{name}" for name in LOSSES} <= tags
    shown = [(event.step, event.value) for event in events.Scalars("losses/entropy")]
    rows = read_metrics(finished.run)
    for pair, row in zip(shown, rows, strict=True):
        assert pair == pytest.approx((row["step"], row["losses/entropy"]))


def test_profile_is_a_trace_and_a_line_is_logged_every_interval_and_at_the_end(tmp_path):
    run = train_here(tmp_path, profile=True, total_timesteps=14 * 64, log_interval=6)
    (trace,) = run.glob("*.pt.trace.json")
    assert json.loads(trace.read_text())["traceEvents"]
    assert [row["iteration"] for row in read_metrics(run)] == [6, 12, 14]


def test_a_profile_that_is_cut_short_is_closed(tmp_path):
    run = train_here(tmp_path, profile=True, total_timesteps=6 * 64)
    assert not torch.autograd._profiler_enabled()
    assert read_metrics(run)[-1]["iteration"] == 6


# I6: repeating. That a configuration repeats its run is in test_tools.py.


def test_a_seed_gives_the_same_to_the_bit_with_worker_processes_and_another_does_not(tmp_path):
    sizes = {"env_id": "CartPole-v1", "num_workers": 2, "total_timesteps": 4 * 64}
    rows = []
    for number, seed in enumerate((1, 1, 2)):
        rows.append(without_clock(train_here(tmp_path / str(number), seed=seed, **sizes)))
    assert rows[0] == rows[1] != rows[2]


# I6: resuming.


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of a run of 40 iterations killed some lines after its checkpoint at 20."""
    folder = tmp_path_factory.mktemp("killed")
    arguments = ["--total-timesteps", 40 * STEPS, "--checkpoint-interval", "20"]
    written = "        self.write(row)\n"
    killed = f"{written}        if self.iteration == 23:\n            os.kill(os.getpid(), 9)\n"
    (folder / SCRIPT.name).write_text(SCRIPT.read_text().replace(written, killed))
    process = start_script(*arguments, cwd=folder, script=folder / SCRIPT.name)
    assert process.wait() == -signal.SIGKILL
    run = newest_run(folder)
    assert checkpoint(run)["iteration"] == 20
    return run


def test_resumed_run_goes_on_as_if_uninterrupted(killed, tmp_path):
    copy = pathlib.Path(shutil.copytree(killed, tmp_path / "runs" / killed.name))
    resumed = succeed("--resume", "latest", cwd=tmp_path, small=False)
    assert resumed == copy and end_of(resumed)["exit_reason"] == "completed"
    rows = read_metrics(resumed)
    assert rows[:20] == read_metrics(killed)[:20]
    assert [row["iteration"] for row in rows] == [*range(1, 41)]
    assert [row["step"] for row in rows] == [*range(STEPS, 40 * STEPS + 1, STEPS)]
    rates = [0.06 * 64 ** (-n / 40) for n in range(40)]
    assert [row["learning_rate"] for row in rows] == pytest.approx(rates)
    assert checkpoint(resumed)["step"] == rows[-1]["step"] == 40 * STEPS
    assert not list(resumed.glob("*.tmp"))
    times = [row["time"] for row in rows]
    assert times == sorted(times), "time counts on"


def test_an_environment_may_change_the_folder(tmp_path):
    (tmp_path / "wanders.py").write_text("""
import os, gymnasium, tests.environments
class Wanders(tests.environments.TwoDials):
    def __init__(self):
        super().__init__()
        os.chdir(os.path.dirname(__file__) + "/elsewhere")
gymnasium.register("Wanders-v0", Wanders)
""")
    (tmp_path / "elsewhere").mkdir()
    run = succeed("--env-id", "wanders:Wanders-v0", cwd=tmp_path)
    again = ["--resume", run.relative_to(tmp_path), "--total-timesteps", 11 * STEPS]
    assert succeed(*again, cwd=tmp_path, small=False) == run
    assert read_metrics(run)[-1]["step"] == 11 * STEPS
    assert not [*(tmp_path / "elsewhere").iterdir()]


@pytest.mark.parametrize(("times", "whole"), [(3, True), (0.5, False)])
def test_a_run_or_its_checkpoint_alone_goes_on_to_its_total_with_another_batch_size(
    killed, tmp_path, times, whole
):
    copied = tmp_path / "runs/copied"
    shutil.copytree(killed, copied)
    for path in copied.iterdir():
        if not whole and path.name != "trainer_state.pt":
            path.unlink()
    arguments = ["--resume", "latest", "--num-envs", int(16 * times)]
    assert succeed(*arguments, cwd=tmp_path, small=False) == copied
    assert 40 * STEPS <= checkpoint(copied)["step"] < 40 * STEPS + times * STEPS
    before = read_metrics(killed)[:20]
    rows = read_metrics(copied)
    rows = rows if whole else before + rows
    assert rows[:20] == before
    assert [row["iteration"] for row in rows[20:]] == [*range(21, 21 + math.ceil(20 / times))]
    rates = [row["learning_rate"] for row in rows]
    assert rates == sorted(rates, reverse=True), "the schedule goes on where it was"


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_resumed_state_is_the_saved_one_but_for_what_flags_say(tmp_path, optimizer):
    run = train_here(tmp_path, optimizer=optimizer, total_timesteps=2 * 64)
    flags = ["--momentum", "0.5", "--learning-rate", "0.125"]
    args, resumed = ppo.parse_args(["--resume", str(run), *flags])
    with contextlib.closing(ppo.make_envs(args, 1)) as envs:
        agent = ppo.Agent(envs.observation_space, envs.action_space, args)
        optimizers = ppo.make_optimizers(agent, args)
        ppo.Run(args, envs, resumed).begin(agent, optimizers)
    states = [one.state_dict()["state"] for one in optimizers]
    saved = (resumed["model"], resumed["optimizers"])
    torch.testing.assert_close((agent.state_dict(), states), saved, rtol=0, atol=0)
    group = optimizers[0].param_groups[0]
    assert float(group["lr"]) == 0.125
    assert (group["momentum"] if optimizer == "muon" else group["betas"][0]) == 0.5
    assert (resumed["iteration"], resumed["step"]) == (2, 2 * 64)


def test_time_limit_counts_from_each_start(tmp_path):
    resumed = None
    for _ in range(2):
        run = train_here(tmp_path, resumed, time_limit=0.5, total_timesteps=10**8)
        assert end_of(run)["exit_reason"] == "time_limit"
        assert checkpoint(run)["step"] == end_of(run)["step"] > 0
        resumed = ppo.load_checkpoint(str(run), "")
    assert end_of(run)["time"] >= 1


# One folder, one run.


def test_runs_that_start_in_one_second_have_a_folder_each(tmp_path):
    processes = [start_script("--total-timesteps", STEPS, cwd=tmp_path) for _ in range(3)]
    assert [process.wait(timeout=200) for process in processes] == [0, 0, 0]
    runs = list((tmp_path / "runs").iterdir())
    assert len(runs) == 3
    assert all([row["step"] for row in read_metrics(run)] == [STEPS] for run in runs)


def test_run_that_is_still_on_cannot_be_resumed(started, tmp_path):
    process, run = started("--checkpoint-interval", "1", *LONG[:2], cwd=tmp_path)
    wait_for((run / "trainer_state.pt").exists, process)
    result = run_script("--resume", "latest", cwd=tmp_path, small=False)
    line = result.stderr.splitlines()[-1]
    assert result.returncode == 2 and line.startswith("error: ") and run.name in line
    process.terminate()
    assert process.wait(60) == 143
    steps = [row["step"] for row in read_metrics(run)]
    assert steps == list(range(STEPS, steps[-1] + 1, STEPS))


def test_a_run_that_has_saved_since_it_was_read_is_not_set_back(tmp_path, capfd):
    run = train_here(tmp_path, total_timesteps=64)
    resumed = ppo.load_checkpoint(run, "")
    newer = checkpoint(run) | {"iteration": resumed["iteration"] + 1}
    torch.save(newer, run / "trainer_state.pt")
    before = (run / "metrics.jsonl").read_text()
    with pytest.raises(SystemExit):
        train_here(tmp_path, resumed, total_timesteps=128)
    assert "newer checkpoint" in capfd.readouterr().err
    assert (run / "metrics.jsonl").read_text() == before


def test_a_run_that_is_complete_keeps_what_trained_it(tmp_path):
    run = train_here(tmp_path, total_timesteps=64)
    before = (run / "config.yaml").read_text()
    (run / "ppo_lstm_puffer.py").write_text("# the one that trained")
    train_here(tmp_path, ppo.load_checkpoint(run, ""), total_timesteps=64, learning_rate=0.5)
    assert (run / "config.yaml").read_text() == before
    assert (run / "ppo_lstm_puffer.py").read_text() == "# the one that trained"


def test_a_forks_buffer_may_be_infinite(tmp_path, monkeypatch):
    def make_agent(*arguments, original=ppo.Agent):
        agent = original(*arguments)
        agent.register_buffer("mask", torch.tensor(-math.inf))
        return agent

    monkeypatch.setattr(ppo, "Agent", make_agent)
    run = train_here(tmp_path, total_timesteps=64)
    assert checkpoint(run)["model"]["mask"] == -math.inf


# Signals and what is gone.


def children_of(process) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
def test_signal_to_all_processes_writes_a_checkpoint_and_leaves_none(started, tmp_path, name):
    process, run = started(*LONG, *WORKERS, cwd=tmp_path, start_new_session=True)
    children = children_of(process)
    assert len(children) >= 2
    os.killpg(process.pid, signal.Signals[name])
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.Signals[name] and not alive(children)
    assert "Traceback" not in stderr
    end = end_of(run)
    assert end["exit_reason"] == name.lower()
    assert checkpoint(run)["iteration"] == end["iteration"] > 0


def test_nohup_is_respected_and_signals_that_an_environment_takes_are_taken_back(started, tmp_path):
    (tmp_path / "takes.py").write_text("""
import signal, gymnasium, tests.environments
class Takes(tests.environments.TwoDials):
    steps = 0
    def step(self, action):
        self.steps += 1
        if self.steps == 40:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return super().step(action)
gymnasium.register("Takes-v0", Takes)
""")
    nohup = {"launcher": ("nohup", sys.executable)}
    process, run = started(*LONG, "--env-id", "takes:Takes-v0", cwd=tmp_path, **nohup)
    wait_for(lambda: logged(tmp_path) > 4, process)  # of 16 steps each
    process.send_signal(signal.SIGHUP)
    before = logged(tmp_path)
    wait_for(lambda: logged(tmp_path) > before + 3, process)
    process.terminate()
    assert process.wait(60) == 143 and end_of(run)["exit_reason"] == "sigterm"


def test_an_environment_that_does_not_close_ends_by_a_second_signal(started, tmp_path):
    (tmp_path / "open.py").write_text("""
import time, gymnasium, tests.environments
class Open(tests.environments.TwoDials):
    def close(self):
        open("closing", "w")
        time.sleep(1000)
gymnasium.register("Open-v0", Open)
""")
    process, run = started(*LONG, "--env-id", "open:Open-v0", cwd=tmp_path)
    process.terminate()
    wait_for((tmp_path / "closing").exists, process)
    assert end_of(run)["exit_reason"] == "sigterm" and checkpoint(run)["step"] > 0
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM


def test_a_signal_in_the_last_iteration_is_no_failure_and_a_run_gives_the_signals_back(
    tmp_path, monkeypatch
):
    log = ppo.Run.log

    def stop_and_log(self, *arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        log(self, *arguments)

    monkeypatch.setattr(ppo.Run, "log", stop_and_log)  # after it is asked whether all is over
    before = signal.getsignal(signal.SIGTERM)
    run = train_here(tmp_path, total_timesteps=2 * 64)
    assert end_of(run)["exit_reason"] == "completed"
    assert signal.getsignal(signal.SIGTERM) is before


def test_signal_before_the_first_update_ends_at_once_and_leaves_no_worker(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    arguments = ["--env-id", "slow:Slow-v0", *WORKERS]
    process = start_script(*arguments, cwd=tmp_path, start_new_session=True)
    wait_for(lambda: len(list(tmp_path.glob("worker*"))) == 2, process)
    children = children_of(process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=50) == -signal.SIGINT  # of the 60 that it sleeps
    assert len(children) >= 2 and not alive(children)


SLOW = """
import os, time
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

class Slow(CartPoleEnv):
    def reset(self, **arguments):
        open(f"worker{os.getpid()}", "w")
        time.sleep(60)
        return super().reset(**arguments)

gym.register("Slow-v0", Slow)
"""


@pytest.mark.parametrize("how", ["reader", "disk"])
def test_output_that_cannot_be_written_does_not_end_training(started, tmp_path, how):
    reader, writer = os.pipe()
    with open("/dev/full" if how == "disk" else writer, "w") as file:
        process, run = started(*LONG, cwd=tmp_path, stdout=file, stderr=file)
    os.close(reader)  # as when `head`, or tee, has ended
    before = logged(tmp_path)
    wait_for(lambda: logged(tmp_path) > before + 5, process)
    process.terminate()
    assert process.wait(timeout=60) == 143 and end_of(run)["exit_reason"] == "sigterm"
    assert checkpoint(run)["step"] == end_of(run)["step"]


def test_workers_of_a_killed_run_end(started, tmp_path):
    process, _ = started(*LONG, *WORKERS, cwd=tmp_path)
    workers = children_of(process)
    assert len(workers) >= 2
    process.kill()
    process.wait()
    assert not alive(workers)


def test_killed_worker_ends_the_run_with_its_reason_and_a_checkpoint(started, tmp_path):
    process, run = started(*LONG, *WORKERS, cwd=tmp_path)
    workers = children_of(process)
    workers[-1].kill()
    _, stderr = process.communicate(timeout=10)
    assert process.returncode == 1 and not alive(workers)
    assert stderr.splitlines()[-1].startswith("error: environment worker")
    assert "-9" in stderr.splitlines()[-1] and "Traceback" not in stderr
    assert "worker" in end_of(run)["exit_reason"] and checkpoint(run)["iteration"] > 0


FAILING = """
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

class Failing(CartPoleEnv):
    steps = 0

    def step(self, action):
        self.steps += 1
        observation, reward, *rest = super().step(action)
        if self.steps == 40:
            ACT
        return observation, reward, *rest

gym.register("Failing-v0", Failing)
"""


def run_failing(act: str, cwd, *arguments):
    """A run whose environments do this at step 40, in the third iteration; and its folder."""
    (cwd / "failing.py").write_text(FAILING.replace("ACT", act))
    result = run_script("--env-id", "failing:Failing-v0", *LONG, *arguments, cwd=cwd, timeout=100)
    return result, newest_run(cwd)


@pytest.mark.parametrize("workers", [[], WORKERS], ids=["here", "in a worker"])
def test_environment_that_raises_ends_the_run_with_its_reason_and_a_checkpoint(tmp_path, workers):
    result, run = run_failing("raise ValueError('not today')", tmp_path, *workers)
    assert result.returncode == 1 and checkpoint(run)["iteration"] == 2
    assert 'failing.py", line' in result.stderr and "ValueError: not today" in result.stderr
    if workers:
        assert "worker" in result.stderr.splitlines()[-1]
    else:
        assert end_of(run)["exit_reason"] == "ValueError: not today"


def test_an_error_in_a_forks_network_is_not_hidden_by_another(monkeypatch, tmp_path):
    monkeypatch.setattr(ppo, "layer_init", lambda layer: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train_here(tmp_path)
    (run,) = tmp_path.iterdir()
    assert end_of(run)["exit_reason"] == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("reward", "named", "last", "scaled"),
    [
        ("float('nan')", "reward 40", 2, "--no-clip-rewards"),
        ("1e30", "1e+30", 3, "--no-clip-rewards"),
        ("1e30", "1e+30", 2, "--norm-rewards"),  # whose losses are finite in that iteration
    ],
)
def test_number_not_finite_is_named_and_what_was_before_is_kept(
    tmp_path, reward, named, last, scaled
):
    interval = 2 if "clip" in scaled else 1
    arguments = [scaled, "--checkpoint-interval", interval]
    result, run = run_failing(f"reward = {reward}", tmp_path, *arguments)
    line = result.stderr.splitlines()[-1]
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert line.startswith("error: ") and all(word in line for word in named.split())
    assert checkpoint(run)["iteration"] == last
    for path in run.glob("*.pt"):
        state = torch.load(path)
        assert all(torch.isfinite(value).all() for value in state.get("model", state).values())


# A full disk.


@pytest.fixture
def disk(tmp_path):
    """A file system of a megabyte, in tmp_path/runs."""
    folder = tmp_path / "runs"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs needs root: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize(
    ("every", "total"),
    [("1", LONG[1]), ("1_000_000", LONG[1]), ("1_000_000", 9 * STEPS)],
    ids=["checkpoints", "logs", "at the end"],
)
def test_full_disk_ends_the_run_and_leaves_its_last_checkpoint_whole(
    disk, finished, tmp_path, every, total
):
    run = pathlib.Path(shutil.copytree(finished.run, disk / finished.run.name))
    room = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    filler = disk / "filler"
    filler.write_bytes(bytes(max(0, room - (2**18 if every == "1" else 2**16))))
    arguments = ["--resume", run, "--total-timesteps", total, "--checkpoint-interval", every]
    result = run_script(*arguments, cwd=tmp_path, timeout=100)
    assert result.returncode == 1 and "error: [Errno 28] No space left" in result.stderr
    last = checkpoint(run)["iteration"]
    assert last > ITERATIONS if every == "1" else last == ITERATIONS
    filler.unlink()
    total = (last + 2) * STEPS
    succeed("--resume", run, "--total-timesteps", total, cwd=tmp_path, small=False)
    assert checkpoint(run)["step"] == total
    assert [row["iteration"] for row in read_metrics(run)] == list(range(1, last + 3))


# Weights and Biases.


def test_wandb_offline_is_one_run_after_a_resume_too(tmp_path):
    succeed("--track", "--total-timesteps", STEPS, cwd=tmp_path)
    time.sleep(1)  # its folders are named after the second
    arguments = ["--resume", "latest", "--total-timesteps", 2 * STEPS]
    run = succeed(*arguments, cwd=tmp_path, small=False)
    names = [path.parent.name for path in run.glob("wandb/offline-run-*/*.wandb")]
    assert len(names) == 2
    assert len({name.split("-", maxsplit=3)[3] for name in names}) == 1


def test_control_c_under_tee_writes_a_checkpoint(tmp_path):
    """A terminal sends it to `tee` too, which ends first."""
    command = shlex.join([sys.executable, str(SCRIPT), *SMALL, *LONG])
    words = ["bash", "-c", f"{command} 2>&1 | tee log.txt"]
    options = {"stdout": subprocess.DEVNULL, "start_new_session": True}
    options["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # as in a terminal
    process = subprocess.Popen(words, cwd=tmp_path, env=environment(), **options)
    log = tmp_path / "log.txt"
    wait_for(lambda: logged(tmp_path) >= 3 and log.read_text().count("step=") >= 2, process)
    children = children_of(process)
    os.killpg(process.pid, signal.SIGINT)
    process.wait(60)
    assert len(children) >= 2 and not alive(children, within=60)
    run = newest_run(tmp_path)
    assert end_of(run)["exit_reason"] == "sigint"
    assert checkpoint(run)["step"] == end_of(run)["step"] > 0


# In this process


def test_a_finished_run_that_is_resumed_takes_no_step(tmp_path):
    sizes = {"env_id": "CartPole-v1", "total_timesteps": 64}
    run = train_here(tmp_path, **sizes)
    train_here(tmp_path, ppo.load_checkpoint(str(run), ""), **sizes)
    assert end_of(run)["step"] == checkpoint(run)["step"] == 64
    assert len(read_metrics(run)) == 1


def test_a_resumed_run_has_other_episodes_and_tensorboard_each_step_once(
    tmp_path, monkeypatch, listen
):
    counter = event_file_writer.AtomicCounter(100)  # names are read as texts
    monkeypatch.setattr(event_file_writer, "_global_uid", counter)
    seeds = listen(ppo, "make_envs", lambda _, args, seed: seed)
    sizes = {"env_id": "CartPole-v1", "checkpoint_interval": 2}
    run = train_here(tmp_path, total_timesteps=2 * 64, **sizes)
    resumed = ppo.load_checkpoint(str(run), "")
    saved = (run / "trainer_state.pt").read_bytes()
    for _ in range(2):  # the second time as after a kill: what came after the checkpoint, anew
        (run / "trainer_state.pt").write_bytes(saved)
        train_here(tmp_path, resumed, total_timesteps=4 * 64, **sizes)
    assert seeds[0] != seeds[1] == seeds[2]
    scalars = EventAccumulator(str(run)).Reload().Scalars("losses/entropy")
    assert [event.step for event in scalars] == [64, 128, 192, 256]


def test_latest_is_the_run_that_was_saved_last(tmp_path, capfd):
    for time_, name in enumerate(("b", "a"), 1):
        (tmp_path / name).mkdir()
        torch.save({"config": {}}, tmp_path / name / "trainer_state.pt")
        os.utime(tmp_path / name / "trainer_state.pt", (time_, time_))
    (tmp_path / "c").mkdir()
    (tmp_path / "c/config.yaml").touch()
    assert ppo.load_checkpoint("latest", str(tmp_path))["folder"].name == "a"
    assert f"the latest run, {tmp_path / 'c'}, has no checkpoint" in capfd.readouterr().err


def test_metrics_are_json_whatever_is_no_number(tmp_path, monkeypatch):
    monkeypatch.setattr(ppo.Envs, "means", lambda self: {"env/x": math.nan, "env/y": math.inf})
    run = train_here(tmp_path, env_id="CartPole-v1", total_timesteps=64)
    assert not {"env/x", "env/y"} & set(read_metrics(run)[0])
