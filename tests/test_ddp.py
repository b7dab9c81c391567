"""The data-parallel script under a real torchrun: equal to one process, seeds, files, resuming, lost ranks, two hosts."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import time
import uuid

import psutil
import pytest
import test_runs
import torch
from conftest import PYTHON, ROOT, SCRIPT, environment, metrics, newest_run, read_metrics, run_script, start_script
from test_learning import CARTPOLE, final
from test_runs import LONG, alive, equal, exit_reason, without_clock

import ppo_lstm_puffer_ddp as ddp

DDP = ROOT / "ppo_lstm_puffer_ddp.py"


def torchrun(*options) -> list[str]:
    return [*PYTHON, "-m", "torch.distributed.run", *(options or ("--standalone", "--nproc-per-node=2"))]


RANKS = {"launcher": torchrun(), "script": DDP}


def run_ranks(*arguments, **kwargs) -> subprocess.CompletedProcess:
    """`run_script` with this script on two ranks."""
    return run_script(*arguments, **RANKS | kwargs)


def succeed(*arguments, **kwargs) -> pathlib.Path:
    return test_runs.succeed(*arguments, **RANKS | kwargs)


def state(run: pathlib.Path) -> dict:
    return torch.load(run / "trainer_state.pt", weights_only=True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished small run of two ranks, with checkpoints after 4 and 8 iterations. No test changes it."""
    return succeed("--checkpoint-interval", "4", cwd=tmp_path_factory.mktemp("finished"))


# The algorithm.


@pytest.fixture(scope="module")
def same_data(tmp_path_factory):
    """What tests/same_data.py leaves: the reference, one process of ours, and two ranks, on the same data."""
    arguments = [
        "--num-envs", "32", "--num-steps", "8", "--minibatch-size", "128", "--total-timesteps", "768", "--hidden-size", "16",
        "--precision", "float32", "--no-compile", "--prio-alpha", "0", "--device", "cpu", "--learning-rate", "0.005",
    ]  # fmt: skip
    results = {}
    for name, launcher, script in (
        ("reference", PYTHON, "ppo_lstm_puffer"),
        ("one", PYTHON, "ppo_lstm_puffer_ddp"),
        ("two", torchrun(), "ppo_lstm_puffer_ddp"),
    ):
        out = tmp_path_factory.mktemp(name)
        result = run_ranks(script, out, *arguments, cwd=out, launcher=launcher, small=False, script=ROOT / "tests" / "same_data.py")
        assert result.returncode == 0, result.stderr
        results[name] = [torch.load(path) for path in sorted(out.glob("rank*.pt"))]
    return results


def test_gradients_of_two_ranks_are_those_of_one_process(same_data):
    reference = same_data["reference"][0]["gradients"]
    assert len(same_data["two"]) == 2
    for other in (*same_data["one"], *same_data["two"]):
        for expected, gradient in zip(reference, other["gradients"], strict=True):
            assert expected.abs().max() > 1e-3
            torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


def test_parameters_after_six_updates_are_those_of_one_process(same_data):
    reference = same_data["reference"][0]["parameters"]
    for other in (*same_data["one"], *same_data["two"]):
        for expected, parameter in zip(reference, other["parameters"], strict=True):
            torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=2e-5)


def test_ranks_keep_the_same_parameters_to_the_bit(same_data):
    assert equal(*(rank["parameters"] for rank in same_data["two"]))


def shares_of_a_minibatch(beta: float, draws: int, norm_adv: bool, valid_share: float = 0.9):
    """A minibatch drawn by two ranks of n segments, one with ten times the rewards. Its two shares, all segments' advantages, and n."""
    torch.manual_seed(0)
    T, n, args = 4, 12, ddp.Args(norm_adv=norm_adv)
    batches = []
    for scale in (0.3, 3.0):
        values, rewards, ratio = torch.randn(T + 1, n), scale * torch.randn(T, n), torch.rand(T, n) + 0.5
        dones, valid = (torch.rand(T + 1, n) < 0.2).float(), (torch.rand(T + 1, n) < valid_share).float()
        batches.append((values, rewards, dones, valid, ratio))
    drawn = [ddp.draw_minibatch(*batch, torch.rand(draws), args) for batch in batches]
    summaries = torch.stack([summary for *_, summary, _ in drawn])
    shares = [ddp.weigh_minibatch(*parts, summaries, 2 * n, torch.tensor(beta), args) for *parts, _, _ in drawn]
    return shares, torch.cat([advantages for *_, advantages in drawn], 1), n


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_importance_weights_are_those_of_all_ranks_segments(beta):
    shares, advantages, n = shares_of_a_minibatch(beta, 6, norm_adv=False)
    priorities = advantages.abs().sum(0) ** ddp.Args.prio_alpha
    importance = (2 * n * priorities / priorities.sum()) ** -beta
    for rank, (segments, weighted, *_) in enumerate(shares):
        index = segments + rank * n
        torch.testing.assert_close(weighted, advantages[:, index] * importance[index], rtol=1e-4, atol=1e-5)


def test_advantages_are_normalized_over_all_ranks():
    shares, *_ = shares_of_a_minibatch(0.0, 6, norm_adv=True)
    advantages, weight = (torch.cat([share[i] for share in shares], 1) for i in (1, 4))
    assert weight.sum() == pytest.approx(1, abs=1e-5)
    assert (weight * advantages).sum() == pytest.approx(0, abs=1e-5)
    assert (weight * advantages**2).sum() == pytest.approx(1, abs=1e-4)


def test_equal_draws_of_unequal_ranks_stand_for_draws_from_all():
    # With beta 1 a minibatch's weighted mean of anything is an unbiased estimate of its mean over all segments: here, their number.
    shares, advantages, n = shares_of_a_minibatch(1.0, 5000, norm_adv=False, valid_share=1.0)
    estimate = 0
    for rank, (segments, weighted, _, _, weight) in enumerate(shares):
        importance = weighted / advantages[:, segments + rank * n]
        estimate += float((weight * importance * (segments + rank * n)).sum())
    assert estimate == pytest.approx((2 * n - 1) / 2, rel=0.01)


def test_cartpole_is_solved_by_two_ranks(tmp_path):
    run = succeed(*CARTPOLE, cwd=tmp_path, small=False)
    assert final(run, "env/score") >= 195


# Ranks: seeds, files, sizes.


def test_same_seed_gives_the_same_metrics_to_the_bit(finished, tmp_path):
    again = succeed("--checkpoint-interval", "4", cwd=tmp_path)
    assert clockless(again) == clockless(finished)


def clockless(run: pathlib.Path) -> list[dict]:
    return [{key: value for key, value in row.items() if not key.startswith("ranks/")} for row in without_clock(run)]


def test_ranks_have_random_numbers_of_their_own(finished):
    rng = state(finished)["rng"]
    assert len(rng["other_ranks"]) == 1
    assert not torch.equal(rng["torch"], rng["other_ranks"][0]["torch"])


def test_rank_0_alone_writes_and_the_metrics_name_the_ranks(finished):
    assert [path.name for path in finished.parent.iterdir()] == [finished.name]
    written = metrics(finished)
    assert written["timesteps"] == read_metrics(finished)[-1]["step"] == 2048
    ranks = written["ranks"]
    assert (ranks["world_size"], ranks["backend"], ranks["hosts"]) == (2, "gloo", [socket.gethostname()] * 2)
    assert len(ranks["peak_rss_mb"]) == 2 and min(ranks["peak_rss_mb"]) > 50
    assert {"ranks/slowest", "ranks/slowest_share", "time/reduce"} <= read_metrics(finished)[-1].keys()


def test_episodes_of_all_ranks_are_counted(tmp_path):
    # cartpole's episodes are 200 steps at most: of 16 environments stepped 320 times each, every one ends, on either rank.
    arguments = ["--env-id", "cartpole", "--total-timesteps", "5120", "--log-interval", "1000"]
    two, one = (read_metrics(succeed(*arguments, cwd=tmp_path, launcher=launcher))[-1] for launcher in (torchrun(), PYTHON))
    assert two["episodes"] == pytest.approx(one["episodes"], rel=0.3)


def test_script_without_torchrun_is_one_process(tmp_path):
    run = succeed(cwd=tmp_path, launcher=PYTHON)
    assert metrics(run)["ranks"]["world_size"] == 1
    reference = run_script(cwd=tmp_path)
    assert reference.returncode == 0
    first, expected = read_metrics(run)[0], read_metrics(newest_run(tmp_path))[0]
    # The same seed, network and data; only the normalization is summed in another order.
    for key in ("losses/policy_loss", "losses/value_loss", "losses/entropy", "losses/grad_norm", "losses/explained_variance"):
        assert first[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--num-envs", "15"], "--num-envs 15: does not split"),
        (["--minibatch-size", "48", "--num-steps", "16"], "--minibatch-size 48: does not split"),
        (["--vec-backend", "multiprocessing", "--num-workers", "3"], "--num-workers 3: does not split"),
        (["--env.num-envs", "16"], "--env.num-envs: use --num-envs"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_number_that_does_not_split_is_named(monkeypatch, arguments, named):
    monkeypatch.setattr(ddp, "WORLD_SIZE", 2)
    with pytest.raises(ddp.UsageError, match=named):
        ddp.share_of(ddp.parse_args(arguments)[0])


@pytest.mark.parametrize("arguments", [["--dist-timeout", "0"], ["--minibatch-size", "512"]], ids=lambda value: value[0])
def test_wrong_argument_is_one_line_of_one_rank(tmp_path, arguments):
    result = run_ranks(*arguments, cwd=tmp_path)
    lines = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert result.returncode != 0 and len(lines) == 1 and " ".join(arguments) in lines[0], result.stderr
    assert DDP.name + '", line' not in result.stderr  # torchrun's own traceback names other files


def test_evaluation_plays_once(finished, tmp_path):
    result = run_ranks("--evaluate", finished, "--eval-episodes", "4", cwd=tmp_path, small=False)
    assert result.returncode == 0 and len([line for line in result.stdout.splitlines() if line.startswith("{")]) == 1


# Resuming.

MORE = ["--total-timesteps", "4096"]


@pytest.mark.parametrize("launcher", [torchrun(), PYTHON], ids=["two ranks", "one process"])
def test_checkpoint_of_two_ranks_resumes_on(finished, tmp_path, launcher):
    copy = pathlib.Path(shutil.copytree(finished, tmp_path / "runs" / finished.name))
    run = succeed("--resume", "latest", *MORE, cwd=tmp_path, launcher=launcher)
    assert run == copy and [row["step"] for row in read_metrics(run)] == list(range(256, 4097, 256))
    assert len(state(run)["rng"]["other_ranks"]) == (1 if launcher != PYTHON else 0)


def test_runs_of_this_script_and_of_the_reference_resume_in_each_other(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "runs" / finished.name)
    for script in (SCRIPT, DDP, SCRIPT):
        steps = read_metrics(newest_run(tmp_path))[-1]["step"]
        result = run_script("--resume", "latest", "--total-timesteps", steps + 1024, cwd=tmp_path, small=False, script=script)
        assert result.returncode == 0, result.stderr
        assert read_metrics(newest_run(tmp_path))[-1]["step"] == steps + 1024


def test_run_of_this_script_is_evaluated_by_the_reference(finished, tmp_path):
    result = run_script("--evaluate", finished, "--eval-episodes", "4", cwd=tmp_path, small=False)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["episodes"] == 4


# Lost ranks.

CHECKPOINTS = ["--checkpoint-interval", "8"]
STEPS = ["--total-timesteps", "65536", *CHECKPOINTS]  # some seconds


def ranks_of(job: subprocess.Popen) -> dict[int, psutil.Process]:
    """The processes that torchrun has started, by rank."""
    found = {}
    for process in psutil.Process(job.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "RANK" in process.environ() and process.ppid() == job.pid:
                found[int(process.environ()["RANK"])] = process
    return found


@pytest.fixture
def start(tmp_path):
    """Starts torchrun in tmp_path with its output in a file there; kills what is left at the end."""
    started = []

    def start_job(*arguments, launcher, output="output", **variables) -> subprocess.Popen:
        with open(tmp_path / output, "w") as file:
            options = {"stdout": file, "stderr": file, "start_new_session": True, "env": environment() | variables}
            started.append(start_script(*arguments, cwd=tmp_path, script=DDP, launcher=launcher, **options))
        return started[-1]

    yield start_job
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def first_checkpoint(folder: pathlib.Path, *jobs: subprocess.Popen) -> pathlib.Path:
    """Waits for a checkpoint. Returns the run's folder."""
    deadline = time.monotonic() + 90
    while not (states := list(folder.glob("runs/*/trainer_state.pt"))):
        outputs = [path.read_text() for path in folder.iterdir() if path.is_file()]
        assert time.monotonic() < deadline and all(job.poll() is None for job in jobs), "\n".join(outputs)
        time.sleep(0.01)
    return states[0].parent


def test_killed_rank_restarts_the_job_from_its_last_checkpoint(start, tmp_path):
    job = start(*STEPS, launcher=torchrun("--standalone", "--nproc-per-node=2", "--max-restarts=3"))
    run, first = first_checkpoint(tmp_path, job), ranks_of(job)
    first[1].kill()
    assert job.wait(120) == 0, (tmp_path / "output").read_text()
    assert exit_reason(run) == "completed" and metrics(run)["timesteps"] == 65536
    assert list(tmp_path.glob("runs/*")) == [run]
    assert [row["step"] for row in read_metrics(run)] == list(range(256, 65537, 256))
    assert not alive(first.values(), 10)


def test_rank_that_hangs_is_noticed(start, tmp_path):
    job = start(*LONG, *CHECKPOINTS, "--dist-timeout", "3", launcher=torchrun())
    run, ranks = first_checkpoint(tmp_path, job), ranks_of(job)
    ranks[1].suspend()
    assert job.wait(90) != 0
    assert "error: rank lost" in (tmp_path / "output").read_text() and "--dist-timeout" in exit_reason(run)
    assert not alive(ranks.values(), 10)


@pytest.mark.parametrize("victim", ["torchrun", "killed torchrun", "one rank"])
def test_sigterm_writes_a_checkpoint_and_leaves_no_process(start, tmp_path, victim):
    job = start(*LONG, *CHECKPOINTS, launcher=torchrun())
    run, ranks = first_checkpoint(tmp_path, job), ranks_of(job)
    if victim == "torchrun":
        job.terminate()
    elif victim == "killed torchrun":
        job.kill()
    else:
        ranks[1].terminate()
    job.wait(60)
    assert not alive(ranks.values(), 30)
    assert exit_reason(run) == "sigterm"
    assert state(run)["step"] == read_metrics(run)[-1]["step"]


def test_ranks_of_a_torchrun_that_is_killed_while_they_import_end(start, tmp_path):
    job = start(*LONG, launcher=torchrun())
    deadline = time.monotonic() + 60
    while not (ranks := ranks_of(job)) or not all("numpy" in str(rank.memory_maps()) for rank in ranks.values()):
        assert time.monotonic() < deadline and job.poll() is None
    job.kill()
    assert not alive(ranks.values(), 15)


# Hosts.


@pytest.fixture
def two_hosts():
    """Two network namespaces joined by a cable: (name, address) of each."""
    tag = uuid.uuid4().hex[:6]
    hosts = [(f"ppo{tag}{i}", f"10.77.0.{i + 1}") for i in range(2)]

    def ip(*arguments):
        return subprocess.run(["ip", *arguments], capture_output=True, text=True)

    if shutil.which("ip") is None:
        pytest.skip("needs `ip` (iproute2) to make network namespaces")
    for name, _ in hosts:
        if (made := ip("netns", "add", name)).returncode:
            pytest.skip(f"network namespaces are not permitted here: {made.stderr.strip()}")
    try:
        for arguments in (
            ["link", "add", f"v{tag}0", "netns", hosts[0][0], "type", "veth", "peer", "name", f"v{tag}1", "netns", hosts[1][0]],
            *(["-n", name, "addr", "add", f"{address}/24", "dev", f"v{tag}{i}"] for i, (name, address) in enumerate(hosts)),
            *(["-n", name, "link", "set", device, "up"] for i, (name, _) in enumerate(hosts) for device in ("lo", f"v{tag}{i}")),
        ):
            assert (done := ip(*arguments)).returncode == 0, done.stderr
        yield [(name, address, f"v{tag}{i}") for i, (name, address) in enumerate(hosts)]
    finally:
        for name, _ in hosts:
            ip("netns", "delete", name)


def test_two_hosts_train_together_and_survive_a_killed_rank(two_hosts, start, tmp_path):
    jobs = []
    for i, (name, address, device) in enumerate(two_hosts):
        launcher = torchrun(
            "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=test",
            f"--rdzv-endpoint={two_hosts[0][1]}:29500", f"--local-addr={address}", f"--rdzv-conf=is_host={int(i == 0)}",
        )  # fmt: skip
        namespace = ["ip", "netns", "exec", name]
        jobs.append(start(*STEPS, launcher=[*namespace, *launcher], output=name, GLOO_SOCKET_IFNAME=device))
    run = first_checkpoint(tmp_path, *jobs)
    ranks = [rank for job in jobs for rank in ranks_of(job).values()]
    assert len(ranks) == 2
    ranks[1].kill()
    assert [job.wait(120) for job in jobs] == [0, 0], "\n".join((tmp_path / name).read_text() for name, *_ in two_hosts)
    assert list(tmp_path.glob("runs/*")) == [run]
    assert exit_reason(run) == "completed" and metrics(run)["ranks"]["world_size"] == 2
    assert [row["step"] for row in read_metrics(run)] == list(range(256, 65537, 256))
