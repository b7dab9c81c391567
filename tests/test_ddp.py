"""The data-parallel script: equal to one process; files, resuming, signals, ranks that hang.

What torchrun does is tested under a real one; the rest has ranks that are started as it would.
"""

import contextlib
import functools
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from types import SimpleNamespace

import gymnasium as gym
import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import (
    PYTHON,
    ROOT,
    SCRIPT,
    SMALL,
    environment,
    run_script,
    start_script,
    succeed,
    wait_for,
)
from reading import alive, checkpoint, end_of, newest_run, read_metrics, without_clock

import ppo_lstm_puffer as ppo
import ppo_lstm_puffer_ddp as ddp

DDP = ROOT / "ppo_lstm_puffer_ddp.py"
SAME_DATA = ROOT / "tests" / "same_data.py"
CPU = ["--device", "cpu"]
END = 8192
LONG = ["--total-timesteps", "100_000_000", "--checkpoint-interval", "8"]


@contextlib.contextmanager
def started_ranks(*arguments, cwd, ranks: int = 2, job=None, script=DDP, env=None, **options):
    """Ranks with the variables and the store that torchrun gives them, but started in no time."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": job or uuid.uuid4().hex,
        "LOCAL_WORLD_SIZE": str(ranks),
        "WORLD_SIZE": str(ranks),
    }
    processes = []
    for rank in range(ranks):
        variables = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        options["env"] = environment() | (env or {}) | variables
        processes.append(start_script(*arguments, *CPU, cwd=cwd, script=script, **options))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()


def run_ranks(*arguments, cwd, **options) -> SimpleNamespace:
    """Runs ranks to their end. If one fails, the others are ended, as torchrun does it."""
    deadline = time.monotonic() + 300
    with started_ranks(*arguments, cwd=cwd, **options) as processes:
        while any(process.poll() is None for process in processes):
            assert time.monotonic() < deadline, "timeout"
            if any(process.poll() for process in processes):
                for process in processes:
                    process.terminate()
            time.sleep(0.02)
        outputs = [process.communicate() for process in processes]
    code = max(abs(process.returncode) for process in processes)
    stdout, stderr = map("".join, zip(*outputs))
    return SimpleNamespace(returncode=code, stdout=stdout, stderr=stderr)


train = functools.partial(succeed, runner=run_ranks)


def errors(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("error:")]


def steps_of(run: pathlib.Path) -> list[int]:
    return [row["step"] for row in read_metrics(run)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished small run of two ranks. No test changes it."""
    return train("--checkpoint-interval", "4", cwd=tmp_path_factory.mktemp("finished"))


# I11: the algorithm.

SAME = "--num-envs 32 --num-steps 8 --minibatch-size 128 --max-minibatch-size 64 --hidden-size 16 "
SAME += "--total-timesteps 768 --precision float32 --no-compile --learning-rate 0.005 "
SAME += "--log-interval 1 --norm-obs --norm-rewards"


def train_on_same_data(name: str, runner, out: pathlib.Path, **options) -> SimpleNamespace:
    """What tests/same_data.py leaves: of each rank, and the run's metrics."""
    arguments = [name, out, *SAME.split(), *CPU]
    result = runner(*arguments, cwd=out, small=False, script=SAME_DATA, **options)
    assert result.returncode == 0, result.stderr
    ranks = [torch.load(path) for path in sorted(out.glob("rank*.pt"))]
    return SimpleNamespace(ranks=ranks, metrics=read_metrics(newest_run(out)))


@pytest.fixture(scope="module")
def same_data(tmp_path_factory):
    """The reference, one process of the data-parallel script, and two ranks, on the same data."""

    def folder():
        return tmp_path_factory.mktemp("same_data")

    return {
        "reference": train_on_same_data("ppo_lstm_puffer", run_script, folder()),
        "one": train_on_same_data("ppo_lstm_puffer_ddp", run_script, folder()),
        "two": train_on_same_data("ppo_lstm_puffer_ddp", run_ranks, folder()),
    }


def test_gradients_and_parameters_are_those_of_the_reference(same_data):
    """I11"""
    (reference,) = same_data["reference"].ranks
    others = *same_data["one"].ranks, *same_data["two"].ranks
    assert len(others) == 3
    for other in others:
        assert other["updates"] == reference["updates"] == 6
        for expected, gradient in zip(reference["gradients"], other["gradients"], strict=True):
            assert expected.abs().max() > 1e-3
            torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)
        for name, expected in reference["state"].items():  # statistics of --norm-* too
            torch.testing.assert_close(other["state"][name], expected, rtol=1e-4, atol=2e-5)


def test_two_ranks_log_what_the_reference_does_and_each_has_its_own_max_minibatch_size(same_data):
    two = same_data["two"]
    for row, expected in zip(two.metrics, same_data["reference"].metrics, strict=True):
        for key in (key for key in expected if key.startswith(("losses/", "step", "learning"))):
            assert row[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-6), key
        assert row["env/rank"] == 0.5  # logged by each rank's environments as its number
    # 128 steps are two chunks of 64 for one process, and one for each of two ranks.
    assert [rank["chunks"] for rank in same_data["one"].ranks] == [12]
    assert [rank["chunks"] for rank in two.ranks] == [6, 6]


def test_ranks_have_the_same_parameters_to_the_bit_even_if_one_errs(same_data, tmp_path):
    drifted = train_on_same_data("ppo_lstm_puffer_ddp", run_ranks, tmp_path, env={"DRIFT": "1"})
    for result in same_data["two"], drifted:
        first, second = (rank["state"] for rank in result.ranks)
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_statistics_far_from_zero_are_not_lost_to_rounding(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda _: None)
    torch.manual_seed(0)
    x = 100 + 0.02 * torch.randn(4, 400, 2)
    counted = (torch.rand(4, 400) < 0.9).float()
    rows, means, variances = ddp.moments(x, counted)
    seen = x[counted > 0].double()
    assert rows.tolist() == [len(seen)] * 2
    torch.testing.assert_close(means, seen.mean(0), rtol=1e-9, atol=0)
    torch.testing.assert_close(variances, seen.var(0, correction=0), rtol=1e-6, atol=0)


def test_draws_of_unequal_ranks_stand_for_all_segments(monkeypatch):
    """With beta 1 a weighted sum over the minibatch is an unbiased mean of all ranks' segments, of
    which those of one have ten times the rewards."""
    torch.manual_seed(0)
    args = ddp.Args(norm_adv=False, num_steps=4, minibatch_size=16)
    batches = []
    advantages = []
    for scale in 0.3, 3.0:
        values = torch.randn(5, 12)
        rewards = scale * torch.randn(4, 12)
        dones = (torch.rand(5, 12) < 0.2).float()
        batches.append((values, rewards, dones, torch.ones(4, 12), torch.rand(4, 12) + 0.5))
        _, _, _, valid, ratio = batches[-1]
        advantages.append(ddp.compute_advantages(values, rewards, dones, valid, ratio, args))
    advantages = torch.cat(advantages, 1)
    monkeypatch.setattr(ddp, "moments", lambda *_: (torch.tensor(96), None, None))

    def estimate():
        more = torch.tensor(1.0), args
        shares = [ddp.draw_minibatch(*batch, torch.rand(13), *more) for batch in batches]
        return sum((share.weight * share.advantages).sum() for share in shares)

    estimates = torch.stack([estimate() for _ in range(1000)])
    error = estimates.std() / len(estimates) ** 0.5
    assert abs(estimates.mean() - advantages.mean()) < 4 * error < 0.3 * advantages.std()


# Runs.


@pytest.mark.parametrize("script", [ppo, ddp])
def test_a_feature_that_never_changes_is_zero_however_large_it_is(script, monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda _: None)
    agent = ppo.Agent(
        gym.spaces.Box(-1e9, 1e9, (3,)),
        gym.spaces.Discrete(2),
        ppo.Args(norm_obs=True, precision="float32"),
    )
    x = torch.tensor([10000.3, 101325.0, -0.7]).expand(9999, 3)
    for _ in range(3):
        if script is ddp:
            ddp.fit_norm(agent.observation_norm, x[None], torch.ones(1, len(x)))
        else:
            ppo.fit_norm(agent.observation_norm, x)
    norm = agent.observation_norm
    by_definition = (x[:1] - norm.running_mean) / (norm.running_var + 1e-8).sqrt()
    assert agent.flatten(x[:1]).abs().max() < 0.05 and by_definition.abs().max() < 0.05


def test_norm_obs_leaves_images_as_they_are(tmp_path):
    image = ["--env-id", "tests.environments:Image-v0", "--norm-obs"]
    run = succeed(*image, "--total-timesteps", "2048", cwd=tmp_path, script=DDP)
    assert end_of(run)["exit_reason"] == "completed"


def test_rank_0_alone_writes(finished):
    assert [path.name for path in finished.parent.iterdir()] == [finished.name]
    assert len(list(finished.glob("events*"))) == 1
    assert steps_of(finished) == list(range(256, 2049, 256))


def test_rank_0_has_the_environments_of_one_process_and_the_others_have_others(tmp_path):
    # Episodes of the first iteration, on eight environments a rank.
    arguments = ["--env-id", "CartPole-v1", "--num-steps", "64", "--minibatch-size", "512"]
    returns = []
    for script, ranks in (SCRIPT, 1), (DDP, 1), (DDP, 2):
        sizes = ["--num-envs", 8 * ranks, "--total-timesteps", 512 * ranks]
        run = train(*arguments, *sizes, cwd=tmp_path, script=script, ranks=ranks)
        returns.append(read_metrics(run)[0]["episodic_return"])
    assert returns[0] == returns[1] != returns[2]


def test_checkpoint_of_two_ranks_resumes_on_three_on_one_and_in_the_reference(finished, tmp_path):
    copy = pathlib.Path(shutil.copytree(finished, tmp_path / "runs" / finished.name))
    sizes = ["--num-envs", "24", "--minibatch-size", "192"]
    for ranks, script in (3, DDP), (1, DDP), (1, SCRIPT):
        step = steps_of(copy)[-1]
        arguments = ["--resume", "latest", "--total-timesteps", step + 384, *sizes]
        options = {"ranks": ranks, "script": script, "small": False}
        assert train(*arguments, cwd=tmp_path, **options) == copy
        assert steps_of(copy)[-1] == checkpoint(copy)["step"] == step + 384


def test_what_a_fork_freezes_stays_as_it_is_whatever_its_momentum_was(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "runs" / finished.name)
    made = "envs.action_space, args).to(device)\n"
    before, _, after = DDP.read_text().partition(made)
    fork = tmp_path / DDP.name
    fork.write_text(f"{before}{made}    agent.policy.encoder.requires_grad_(False)\n{after}")
    train("--resume", run, "--total-timesteps", "2560", cwd=tmp_path, script=fork)
    first, last = (torch.load(run / f"model_breakout_{n:06d}.pt") for n in (8, 10))
    frozen = {name for name in first if torch.equal(first[name], last[name])}
    assert frozen == {"policy.encoder.0.weight", "policy.encoder.0.bias"}


def test_time_limit_ends_all_ranks_and_the_job_given_again_goes_on(tmp_path):
    arguments = [*LONG, "--time-limit", "0.3", "--log-interval", "1"]
    run = train(*arguments, cwd=tmp_path, job="again")
    assert run.name == "breakout__ppo_lstm_puffer_ddp__1__again"
    assert end_of(run)["exit_reason"] == "time_limit"
    before = steps_of(run)
    assert train(*arguments, cwd=tmp_path, job="again") == run
    after = steps_of(run)
    assert end_of(run)["exit_reason"] == "time_limit"
    assert len(after) > len(before) and after == list(range(256, after[-1] + 1, 256))
    assert list(tmp_path.glob("runs/*")) == [run]


# Wrong arguments.


@pytest.fixture
def job(finished, tmp_path, monkeypatch):
    """Words of the command line of torchrun's job "again", which has a copy of the finished run."""
    folder = tmp_path / "breakout__ppo_lstm_puffer_ddp__1__again"
    shutil.copytree(finished, folder)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "again")
    words = [*SMALL, "--checkpoint-interval", "4", "--output-dir", str(tmp_path), *CPU]
    return SimpleNamespace(folder=folder, words=words)


def refused(words: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as end:
        ddp.parse_job(words)
    assert end.value.code == 2
    (line,) = errors(capsys.readouterr().err)
    return line


def test_job_goes_on_by_itself_with_the_same_settings_alone(job, capsys):
    args, resumed = ddp.parse_job(job.words)
    assert resumed["step"] == 2048 and resumed["folder"] == job.folder
    line = refused([*job.words, "--learning-rate", "0.01"], capsys)
    assert "learning_rate" in line and "gamma" not in line
    args, resumed = ddp.parse_job([*job.words, "--resume", str(job.folder), "--gamma", "0.5"])
    assert resumed["step"] == 2048 and args.gamma == 0.5
    state = torch.load(job.folder / "trainer_state.pt")
    del state["config"]["chrono_init"]  # a script of before this flag
    torch.save(state, job.folder / "trainer_state.pt")
    assert ddp.parse_job(job.words)[1]["step"] == 2048


def test_job_whose_checkpoint_is_damaged_or_that_has_no_name_is_refused(job, capsys, monkeypatch):
    os.truncate(job.folder / "trainer_state.pt", 100)
    assert "trainer_state.pt" in refused(job.words, capsys)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert "--rdzv-id" in refused(job.words, capsys)


@pytest.mark.parametrize("sizes", [["--num-envs", "15"], ["--minibatch-size", "16"]], ids=" ".join)
def test_sizes_must_split_over_the_ranks(job, capsys, monkeypatch, sizes):
    ddp.parse_job([*job.words, *sizes, "--resume", str(job.folder)])  # on one they may
    monkeypatch.setattr(ddp, "WORLD_SIZE", 2)
    assert " ".join(sizes) in refused([*job.words, *sizes], capsys)


@pytest.mark.parametrize("arguments", [["--gamma", "2"], ["--env-id", "nothing"]], ids=" ".join)
def test_wrong_argument_is_one_line_on_all_ranks(tmp_path, arguments):
    result = run_ranks(*arguments, cwd=tmp_path)
    (line,) = set(errors(result.stderr))
    assert result.returncode != 0 and " ".join(arguments) in line
    assert not list(tmp_path.glob("runs/*"))


# Threads.


@pytest.mark.parametrize(("by_user", "bound"), [(False, False), (True, False), (False, True)])
def test_rank_has_its_share_of_the_cores_and_threads_unless_the_user_set_them(by_user, bound):
    # What starts the rank sets OMP_NUM_THREADS itself, as torchrun does.
    rank = "text = open('ppo_lstm_puffer_ddp.py').read(); "
    rank += "exec(text[: text.index('import gymnasium')]); "  # before torch asks for them
    rank += "print(os.environ.get('OMP_NUM_THREADS'), *sorted(os.sched_getaffinity(0)))"
    parent = "import os, subprocess, sys; os.environ['OMP_NUM_THREADS'] = '1'; "
    parent += "subprocess.run([*sys.argv[2:], sys.executable, '-c', sys.argv[1]])"
    variables = environment() | {"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "0"}
    variables |= {"LOCAL_WORLD_SIZE": "2"}
    if not by_user:
        del variables["OMP_NUM_THREADS"]
    cores = sorted(os.sched_getaffinity(0))
    bind = ["taskset", "-c", str(cores[-1])] if bound else []  # as torchrun's --numa-binding
    command = [sys.executable, "-c", parent, rank, *bind]
    result = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    own = cores[-1:] if bound else cores[: max(1, len(cores) // 2)]
    threads = "1" if by_user or bound else "None"
    assert result.stdout.split() == [threads, *map(str, own)], result.stderr


# Signals, lost ranks.


def ranks_of(job) -> dict[int, psutil.Process]:
    """The processes that torchrun has started, by rank."""
    found = {}
    for process in psutil.Process(job.pid).children():
        with contextlib.suppress(psutil.Error):
            if "RANK" in process.environ():
                found[int(process.environ()["RANK"])] = process
    return found


@pytest.fixture
def start(tmp_path):
    """Starts torchrun in tmp_path, its output in a file there; kills what is left at the end."""
    started = []

    def start_job(*arguments, options=(), ranks=2, output="output", script=DDP):
        with open(tmp_path / output, "w") as file:
            pipes = {"stdout": file, "stderr": file, "env": environment()}
            torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
            launcher = [*PYTHON, *torchrun, "--local-addr=127.0.0.1", *options]
            where = {"cwd": tmp_path, "script": script, "launcher": launcher}
            job = start_script(*arguments, *CPU, start_new_session=True, **where, **pipes)
        started.append(job)
        return job

    yield start_job
    for output in tmp_path.glob("output*"):
        print(output.read_text())
    for job in started:
        with contextlib.suppress(psutil.Error):
            left = [*ranks_of(job).values(), psutil.Process(job.pid)]
            for process in left:
                process.kill()


def first_checkpoint(folder: pathlib.Path, job) -> pathlib.Path:
    """Waits for a checkpoint. Returns the run's folder."""
    return wait_for(lambda: [*folder.glob("runs/*/trainer_state.pt")], job)[0].parent


VOTE = "        dist.all_reduce(told"  # after it an iteration counts


def before_the_vote(tmp_path, lines: str) -> pathlib.Path:
    """The script with these lines there."""
    fork = tmp_path / DDP.name
    fork.write_text(DDP.read_text().replace(VOTE, lines + VOTE))
    return fork


def until_go(tmp_path) -> pathlib.Path:
    """The script, which waits before it counts the sixth iteration until the file `go` is there."""
    there = f"Path({str(tmp_path / 'go')!r}).exists()"
    waits = f"        while self.step == 1280 and not {there}:\n            time.sleep(0.02)\n"
    return before_the_vote(tmp_path, waits)


@pytest.mark.parametrize("hosts", [1, 2])
def test_killed_rank_restarts_the_job_from_its_last_checkpoint(start, tmp_path, hosts):
    # The host whose rank was killed counts a restart; the other may not.
    common = [f"--nnodes={hosts}", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=test"]
    common.append(endpoint())
    arguments = ["--total-timesteps", END, "--checkpoint-interval", "4"]
    more = {"ranks": 2 // hosts, "script": until_go(tmp_path)}
    jobs = []
    for i in range(hosts):
        options = [*common, f"--rdzv-conf=is_host={int(i == 0)}"]
        jobs.append(start(*arguments, options=options, output=f"output{i}", **more))
    run = first_checkpoint(tmp_path, jobs[0])
    ranks = {number: rank for job in jobs for number, rank in ranks_of(job).items()}
    assert ranks.keys() == {0, 1}
    step = checkpoint(run)["step"]
    ranks[hosts - 1].kill()
    (tmp_path / "go").touch()
    assert [job.wait(300) for job in jobs] == [0] * hosts
    assert end_of(run)["exit_reason"] == "completed"
    assert list(tmp_path.glob("runs/*")) == [run] and run.name.endswith("__test")
    assert steps_of(run) == list(range(256, END + 1, 256))
    outputs = [(tmp_path / f"output{i}").read_text() for i in range(hosts)]
    restarted = "".join(outputs).split(f"run: {run}")[-1]  # rank 0 may have changed its host
    assert int(restarted.partition("\nstep=")[2].split()[0]) > step
    assert not alive(ranks.values(), 10)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_what_one_rank_is_told_all_do(tmp_path, signum):
    with started_ranks(*LONG, cwd=tmp_path) as ranks:
        run = first_checkpoint(tmp_path, ranks[0])
        ranks[1].send_signal(signum)
        stderr = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [128 + signum] * 2
    end = end_of(run)
    assert end["exit_reason"] == signum.name.lower()
    assert checkpoint(run)["step"] == end["step"] == steps_of(run)[-1]
    assert not errors("".join(stderr))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_torchrun_that_ends_leaves_a_checkpoint_and_no_process(start, tmp_path, signum):
    job = start(*LONG, options=["--max-restarts=2"])
    run = first_checkpoint(tmp_path, job)
    ranks = ranks_of(job)
    job.send_signal(signum)
    assert job.wait(60) != 0
    assert not alive(ranks.values(), 30)
    end = end_of(run)
    assert end["exit_reason"] == ("sighup" if signum == signal.SIGHUP else "sigterm")
    assert checkpoint(run)["step"] == end["step"]
    output = (tmp_path / "output").read_text()
    assert output.count(f"run: {tmp_path}/runs/") == 1  # told to stop, it stays so


def importing(job) -> dict[int, psutil.Process]:
    """Both ranks, once they are importing."""
    ranks = ranks_of(job)
    maps = [str(rank.memory_maps()) for rank in ranks.values()]
    return ranks if len(ranks) == 2 and all("numpy" in files for files in maps) else {}


def test_ranks_of_a_torchrun_that_is_killed_while_they_import_end(start, tmp_path):
    job = start(*LONG)
    ranks = wait_for(lambda: importing(job), job)
    job.kill()
    assert not alive(ranks.values(), 15)


def test_rank_that_hangs_while_it_imports_is_noticed(start, tmp_path):
    job = start(*LONG, "--dist-timeout", "4")
    ranks = wait_for(lambda: importing(job), job)
    ranks[0].suspend()
    assert not alive([ranks[1]], 60)
    ranks[0].resume()  # or torchrun kills it 30 s later
    assert job.wait(60) != 0 and not alive(ranks.values(), 1)
    assert errors((tmp_path / "output").read_text())


def test_rank_that_hangs_while_it_trains_is_noticed(tmp_path):
    with started_ranks(*LONG, "--dist-timeout", "10", cwd=tmp_path) as (first, second):
        run = first_checkpoint(tmp_path, first)
        second.send_signal(signal.SIGSTOP)
        _, stderr = first.communicate(timeout=60)
        second.send_signal(signal.SIGCONT)
        assert (first.returncode, second.wait(60)) == (1, 1)
    assert errors(stderr) and "gloo" in end_of(run)["exit_reason"]


def test_steps_of_a_checkpoint_have_their_line_if_a_rank_dies_at_the_end_of_an_iteration(tmp_path):
    dies = "        if RANK == 1 and self.step >= 768:\n            os._exit(1)\n"
    fork = before_the_vote(tmp_path, dies)
    assert run_ranks(*LONG, cwd=tmp_path, script=fork).returncode != 0
    run = newest_run(tmp_path)
    assert checkpoint(run)["step"] == steps_of(run)[-1]


def test_a_seed_repeats_to_the_bit_though_a_rank_is_slow(finished, tmp_path):
    with started_ranks(cwd=tmp_path) as (first, second):
        while second.poll() is None:
            second.send_signal(signal.SIGSTOP)
            time.sleep(0.2)
            second.send_signal(signal.SIGCONT)
            time.sleep(0.1)
        assert (first.wait(60), second.returncode) == (0, 0)
    assert without_clock(newest_run(tmp_path)) == without_clock(finished)


def test_diverged_job_ends_on_every_rank(tmp_path):
    result = run_ranks("--learning-rate", "1e30", cwd=tmp_path)
    assert result.returncode != 0 and errors(result.stderr)
    assert end_of(newest_run(tmp_path))["exit_reason"].startswith("NotFinite")


# Hosts.


def endpoint() -> str:
    """torchrun's words for a place to meet on this machine: no port that others get unasked."""
    for port in range(20000 + 37 * os.getpid() % 10000, 32768):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("localhost", port))
            return f"--rdzv-endpoint=localhost:{port}"
    raise OSError("no port is free")


def test_host_that_joins_trains_along(start, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # docs/many-gpus.md
    common = ["--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-id=test", endpoint()]

    def host(number: int):
        conf = f"--rdzv-conf=is_host={int(number == 0)},last_call_timeout=1"
        return start(*LONG, options=[*common, conf], ranks=1, output=f"output{number}")

    jobs = [host(0)]
    run = first_checkpoint(tmp_path, jobs[0])
    before = ranks_of(jobs[0])
    jobs.append(host(1))
    ranks = wait_for(lambda: ranks_of(jobs[1]), jobs[1])
    first = wait_for(lambda: ranks_of(jobs[0]), jobs[0])
    assert (first | ranks).keys() == {0, 1} and first != before
    step = checkpoint(run)["step"]
    wait_for(lambda: checkpoint(run)["step"] > step, jobs[0])
    jobs[0].send_signal(signal.SIGTERM)
    assert all(job.wait(60) for job in jobs)
    assert list(tmp_path.glob("runs/*")) == [run]
    assert end_of(run)["exit_reason"] == "sigterm"
