"""The data-parallel script: equal to one process, files, resuming, lost ranks; and under a real torchrun restarts, signals, two hosts.

Where torchrun itself is not what a test is about, the ranks are started here, with the environment that torchrun gives them.
"""

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
from conftest import (
    PYTHON,
    ROOT,
    SCRIPT,
    end_of,
    environment,
    newest_run,
    read_metrics,
    run_script,
    start_script,
)
from forks import Fork
from test_learning import CARTPOLE, final
from test_runs import LONG, alive, checkpoint, equal, exit_reason, without_clock

import ppo_lstm_puffer as ppo
import ppo_lstm_puffer_ddp as ddp

DDP = ROOT / "ppo_lstm_puffer_ddp.py"
SAME_DATA = ROOT / "tests" / "same_data.py"


def torchrun(*options) -> list[str]:
    return [
        *PYTHON,
        "-m",
        "torch.distributed.run",
        *(options or ("--standalone", "--nproc-per-node=2")),
    ]


def start_ranks(
    *arguments,
    cwd,
    job: str | None = None,
    restarts: int = 0,
    variables=None,
    script=DDP,
    **options,
) -> list[Fork]:
    """Two ranks of a job of that name, as torchrun starts them: the store where they meet is not one of theirs."""
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    shared = environment() | {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
    }
    shared |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {
        "TORCHELASTIC_RUN_ID": job or uuid.uuid4().hex,
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
    } | (variables or {})
    each = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    ranks = [
        start_script(*arguments, cwd=cwd, script=script, env=variables, **options)
        for variables in each
    ]
    ranks[0].store = store  # for as long as they are there
    return ranks


def finish(ranks: list[Fork], timeout: float = 300) -> subprocess.CompletedProcess:
    """Both ranks as one process that has finished. None is left running."""
    try:
        outputs = [rank.communicate(timeout) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    stdout, stderr = map("".join, zip(*outputs))
    return subprocess.CompletedProcess(
        ranks[0].args, max(abs(rank.returncode) for rank in ranks), stdout, stderr
    )


RESTARTS = torchrun("--standalone", "--nproc-per-node=2", "--max-restarts=2")


def run_ranks(*arguments, **options) -> subprocess.CompletedProcess:
    return finish(start_ranks(*arguments, **options))


def succeed(*arguments, cwd, runner=run_ranks, **options) -> pathlib.Path:
    """Runs the script on two ranks, or with `run_script` in one process, asserts success, returns the run's folder."""
    return test_runs.succeed(*arguments, cwd=cwd, runner=runner, script=DDP, **options)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def errors(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("error:")]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished small run of two ranks, with checkpoints after 4 and 8 iterations. No test changes it."""
    return succeed("--checkpoint-interval", "4", cwd=tmp_path_factory.mktemp("finished"))


# The algorithm.

SAME = [
    "--num-envs", "32", "--num-steps", "8", "--minibatch-size", "128", "--max-minibatch-size", "64", "--total-timesteps", "768",
    "--hidden-size", "16", "--precision", "float32", "--no-compile", "--device", "cpu", "--learning-rate", "0.005",
]  # fmt: skip


@pytest.fixture(scope="module")
def same_data(tmp_path_factory):
    """What tests/same_data.py leaves: the reference, one process of ours, and two ranks, on the same data."""
    results = {}
    for name, runner, script in (
        ("reference", run_script, "ppo_lstm_puffer"),
        ("one", run_script, "ppo_lstm_puffer_ddp"),
        ("two", run_ranks, "ppo_lstm_puffer_ddp"),
    ):
        out = tmp_path_factory.mktemp(name)
        result = runner(script, out, *SAME, cwd=out, small=False, script=SAME_DATA)
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
        assert other["updates"] == 6
        for expected, parameter in zip(reference, other["parameters"], strict=True):
            torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=2e-5)


def test_ranks_keep_the_same_parameters_to_the_bit(same_data):
    assert equal(*(rank["parameters"] for rank in same_data["two"]))


def test_max_minibatch_size_is_of_one_rank(same_data):
    # 128 steps are two chunks of 64 for one process, and one for each of two ranks.
    assert [rank["chunks"] / rank["updates"] for rank in same_data["one"] + same_data["two"]] == [
        2,
        1,
        1,
    ]


def shares_of_a_minibatch(beta: float, k: int, norm_adv: bool, valid_share: float = 0.9):
    """A function that draws a minibatch, k of n segments on each of two ranks, one with ten times the rewards. It returns
    the two shares, and the advantages (T, 2 n) of all segments."""
    torch.manual_seed(0)
    T, n = 4, 12
    args = ddp.Args(norm_adv=norm_adv, num_steps=T, minibatch_size=ddp.WORLD_SIZE * k * T)
    batches = []
    for scale in (0.3, 3.0):
        values, rewards, ratio = (
            torch.randn(T + 1, n),
            scale * torch.randn(T, n),
            torch.rand(T, n) + 0.5,
        )
        dones, valid = (
            (torch.rand(T + 1, n) < 0.2).float(),
            (torch.rand(T + 1, n) < valid_share).float(),
        )
        batches.append((values, rewards, dones, valid, ratio))

    def draw():
        drawn = [
            ddp.draw_minibatch(*batch, torch.rand(n + 1), torch.tensor(beta), args)
            for batch in batches
        ]
        summaries = torch.stack([summary for *_, summary, _ in drawn])
        shares = [ddp.weigh_minibatch(*parts, summaries, args) for *parts, _, _ in drawn]
        return shares, torch.cat([advantages for *_, advantages in drawn], 1)

    return draw


def test_advantages_are_normalized_over_all_ranks():
    shares, _ = shares_of_a_minibatch(0.0, 6, norm_adv=True)()
    advantages, weight = (torch.cat([share[i] for share in shares], 1) for i in (1, 4))
    assert weight.sum() == pytest.approx(1, abs=1e-5)
    assert (weight * advantages).sum() == pytest.approx(0, abs=1e-5)
    assert (weight * advantages**2).sum() == pytest.approx(1, abs=1e-4)


def test_equal_draws_of_unequal_ranks_stand_for_all_segments():
    # With beta 1 a minibatch's weighted mean of anything is an unbiased estimate of its mean over all ranks' segments.
    draw, estimates = shares_of_a_minibatch(1.0, 4, norm_adv=False, valid_share=1.0), []
    for _ in range(1000):
        shares, advantages = draw()
        estimates.append(sum((weight * weighted).sum() for _, weighted, _, _, weight in shares))
    estimates = torch.stack(estimates)
    error = estimates.std() / len(estimates) ** 0.5
    assert abs(estimates.mean() - advantages.mean()) < 4 * error < 0.3 * advantages.std()


def test_two_ranks_learn(tmp_path):
    # A random player keeps the pole up for some 13 steps. That two ranks learn what one process learns, see above.
    run = succeed(*CARTPOLE, "--total-timesteps", "60000", cwd=tmp_path, small=False)
    assert final(run, "env/score", lines=1) >= 40


# Ranks: seeds, files, sizes.


def clockless(run: pathlib.Path) -> list[dict]:
    rows = [row for row in without_clock(run) if "exit_reason" not in row]
    return [
        {key: value for key, value in row.items() if not key.startswith("ranks/")} for row in rows
    ]


def test_same_seed_gives_the_same_metrics_to_the_bit(finished, tmp_path):
    again = succeed("--checkpoint-interval", "4", cwd=tmp_path)
    assert clockless(again) == clockless(finished)


def test_rank_0_alone_writes_and_the_metrics_name_the_slowest(finished):
    assert [path.name for path in finished.parent.iterdir()] == [finished.name]
    assert end_of(finished)["step"] == read_metrics(finished)[-1]["step"] == 2048
    row = read_metrics(finished)[-1]
    assert (
        row["ranks/slowest"] in (0, 1)
        and 0 < row["ranks/slowest_share"] < 1.1
        and row["time/reduce"] > 0
    )


def test_episodes_of_all_ranks_are_counted(tmp_path):
    # cartpole's episodes are 200 steps at most: of 16 environments stepped 320 times each, every one ends, on either rank.
    arguments = ["--env-id", "cartpole", "--total-timesteps", "5120", "--log-interval", "1000"]
    two, one = (
        read_metrics(succeed(*arguments, cwd=tmp_path, runner=x))[-1]
        for x in (run_ranks, run_script)
    )
    assert two["episodes"] == pytest.approx(one["episodes"], rel=0.3)


def test_script_without_torchrun_is_one_process(tmp_path):
    run = succeed("--total-timesteps", "256", cwd=tmp_path, runner=run_script)
    expected = read_metrics(test_runs.succeed("--total-timesteps", "256", cwd=tmp_path))[0]
    # The same seed, network and data; only the normalization is summed in another order.
    for key in ("policy_loss", "value_loss", "entropy", "grad_norm", "explained_variance"):
        assert read_metrics(run)[0][f"losses/{key}"] == pytest.approx(
            expected[f"losses/{key}"], rel=1e-3, abs=1e-6
        )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--num-envs", "15"],
        ["--minibatch-size", "16"],  # half a segment each
        ["--minibatch-size", "512"],  # more than a batch
    ],
    ids=" ".join,
)
def test_wrong_argument_is_one_line_and_said_once(tmp_path, arguments):
    for restarts in range(2):  # torchrun tries again
        result = run_ranks(*arguments, cwd=tmp_path, restarts=restarts)
        lines = errors(result.stderr)
        assert result.returncode == 2 and "Traceback" not in result.stderr
        assert len(lines) == (restarts == 0) and all(
            " ".join(arguments) in line for line in lines
        ), result.stderr


# Resuming.

MORE = ["--total-timesteps", "2560"]


@pytest.mark.parametrize("runner", [run_ranks, run_script], ids=["two ranks", "one process"])
def test_checkpoint_of_two_ranks_resumes_on(finished, tmp_path, runner):
    copy = pathlib.Path(shutil.copytree(finished, tmp_path / "runs" / finished.name))
    run = succeed("--resume", "latest", *MORE, cwd=tmp_path, runner=runner)
    assert run == copy and [row["step"] for row in read_metrics(run)] == list(range(256, 2561, 256))


def test_runs_of_this_script_and_of_the_reference_resume_in_each_other(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "runs" / finished.name)
    for script in (SCRIPT, DDP, SCRIPT):
        steps = read_metrics(newest_run(tmp_path))[-1]["step"]
        arguments = ["--resume", "latest", "--total-timesteps", steps + 256]
        result = run_script(*arguments, cwd=tmp_path, small=False, script=script)
        assert result.returncode == 0, result.stderr
        assert read_metrics(newest_run(tmp_path))[-1]["step"] == steps + 256


def named(finished: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """A copy of the finished run as that of torchrun's job "again"."""
    return pathlib.Path(
        shutil.copytree(finished, folder / "runs" / "breakout__ppo_lstm_puffer_ddp__1__again")
    )


def test_job_that_is_given_again_goes_on(finished, tmp_path):
    copy = named(finished, tmp_path)
    assert succeed(*MORE, cwd=tmp_path, job="again") == copy
    assert [row["step"] for row in read_metrics(copy)] == list(range(256, 2561, 256))


def test_job_whose_checkpoints_are_damaged_never_starts_from_zero(finished, tmp_path):
    copy = named(finished, tmp_path)
    for file in copy.glob("trainer_*.pt"):
        os.truncate(file, 100)
    before = (copy / "metrics.jsonl").read_text()
    os.utime(copy / "metrics.jsonl", (1, 1))  # it ended before this torchrun began
    for restarts in range(2):
        result = run_ranks(*MORE, cwd=tmp_path, job="again", restarts=restarts)
        assert result.returncode == 2 and "no whole trainer_*.pt" in result.stderr
    assert (
        list(tmp_path.glob("runs/*")) == [copy] and (copy / "metrics.jsonl").read_text() == before
    )


# Lost ranks.

CHECKPOINTS = ["--checkpoint-interval", "8"]
END = 16384
STEPS = ["--total-timesteps", END, *CHECKPOINTS]  # some seconds


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

    def start_job(
        *arguments, launcher, output="output", script=DDP, small=True, **variables
    ) -> subprocess.Popen:
        with open(tmp_path / output, "w") as file:
            options = {
                "stdout": file,
                "stderr": file,
                "start_new_session": True,
                "env": environment() | variables,
            }
            options |= {"cwd": tmp_path, "script": script, "launcher": launcher, "small": small}
            started.append(start_script(*arguments, **options))
        return started[-1]

    yield start_job
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def first_checkpoint(folder: pathlib.Path, *jobs: subprocess.Popen) -> pathlib.Path:
    """Waits for a checkpoint. Returns the run's folder."""
    deadline = time.monotonic() + 90
    while not (states := list(folder.glob("runs/*/trainer_*.pt"))):
        outputs = [path.read_text() for path in folder.iterdir() if path.is_file()]
        assert time.monotonic() < deadline and all(job.poll() is None for job in jobs), "\n".join(
            outputs
        )
        time.sleep(0.01)
    return states[0].parent


def starts(folder: pathlib.Path) -> int:
    """How often the job of this folder began to train."""
    return (folder / "output").read_text().count("\nrun: runs/")


def test_killed_rank_restarts_the_job_from_its_last_checkpoint(start, tmp_path):
    job = start(*STEPS, launcher=torchrun("--standalone", "--nproc-per-node=2", "--max-restarts=1"))
    run, first = first_checkpoint(tmp_path, job), ranks_of(job)
    first[1].kill()
    assert job.wait(120) == 0, (tmp_path / "output").read_text()
    assert exit_reason(run) == "completed" and end_of(run)["step"] == END
    assert list(tmp_path.glob("runs/*")) == [run] and starts(tmp_path) == 2
    assert [row["step"] for row in read_metrics(run)] == list(range(256, END + 1, 256))
    assert not alive(first.values(), 10)
    (line,) = errors((tmp_path / "output").read_text())
    assert "rank 0 lost another" in line


def test_rank_that_hangs_is_noticed(tmp_path):
    first, second = start_ranks(*LONG, *CHECKPOINTS, "--dist-timeout", "3", cwd=tmp_path)
    run = first_checkpoint(tmp_path, first, second)
    second.send_signal(signal.SIGSTOP)
    _, stderr = first.communicate(120)
    second.kill()
    (line,) = errors(stderr)
    assert (
        first.returncode == 1
        and "rank 0 lost another" in line
        and "rank 0 lost another" in exit_reason(run)
    )


@pytest.mark.parametrize("victim", ["torchrun", "killed torchrun"])
def test_sigterm_writes_a_checkpoint_and_leaves_no_process(start, tmp_path, victim):
    job = start(*LONG, *CHECKPOINTS, launcher=RESTARTS)
    run, ranks = first_checkpoint(tmp_path, job), ranks_of(job)
    if victim == "torchrun":
        job.terminate()
    else:
        job.kill()
    assert job.wait(90) != 0
    assert not alive(ranks.values(), 30)
    assert (
        exit_reason(run) == "sigterm" and starts(tmp_path) == 1
    )  # a job that was told to stop stays stopped
    assert checkpoint(run)["step"] == read_metrics(run)[-1]["step"] == end_of(run)["step"]


def test_sigterm_to_one_rank_ends_all_with_a_checkpoint(tmp_path):
    ranks = start_ranks(*LONG, *CHECKPOINTS, cwd=tmp_path)
    run = first_checkpoint(tmp_path, *ranks)
    ranks[1].terminate()
    assert finish(ranks).returncode == 143
    assert exit_reason(run) == "sigterm" and checkpoint(run)["step"] == end_of(run)["step"]


def test_diverged_job_ends_on_every_rank(tmp_path):
    result = run_ranks("--learning-rate", "1e30", cwd=tmp_path)
    assert result.returncode == 1 and len(errors(result.stderr)) == 2  # one line of each rank
    assert exit_reason(newest_run(tmp_path)).startswith("diverged")


def test_ranks_that_drifted_apart_end_the_run(tmp_path):
    arguments = ["ppo_lstm_puffer_ddp", tmp_path, *SAME, "--total-timesteps", "7680"]
    result = run_ranks(
        *arguments, cwd=tmp_path, script=SAME_DATA, small=False, variables={"DRIFT": "1"}
    )
    assert "parameters have drifted apart" in result.stderr
    assert end_of(newest_run(tmp_path))["iteration"] <= 2 and exit_reason(
        newest_run(tmp_path)
    ).startswith("diverged")


def test_ranks_of_a_torchrun_that_is_killed_while_they_import_end(start, tmp_path):
    job = start(*LONG, launcher=torchrun())
    deadline = time.monotonic() + 60
    while not (ranks := ranks_of(job)) or not all(
        "numpy" in str(rank.memory_maps()) for rank in ranks.values()
    ):
        assert time.monotonic() < deadline and job.poll() is None
    job.kill()
    assert not alive(ranks.values(), 15)


# Hosts.


def test_job_that_ended_ends_again_and_one_that_was_lost_goes_on(finished, tmp_path, monkeypatch):
    resumed = ppo.load_checkpoint(str(finished), "")
    assert ddp.last_of_job(finished, restarted=False)["step"] == resumed["step"]
    assert ddp.last_of_job(finished / "nothing", restarted=True) is None
    copy = pathlib.Path(shutil.copytree(finished, tmp_path / finished.name))
    metrics = copy / "metrics.jsonl"
    codes = {"completed": 0, "time_limit": 0, "sigint": 130, "sigterm": 143, "diverged": 1}
    for reason, code in codes.items():  # only a lost rank is a reason to start again
        metrics.write_text(json.dumps({"step": 1, "exit_reason": f"{reason}: more"}) + "\n")
        with pytest.raises(SystemExit, match=f"^{code}$"):
            ddp.last_of_job(copy, restarted=True)
    # A rank that is lost before its first update leaves the last line of the start before: that one is no reason.
    os.utime(metrics, (time.time() - 0.02,) * 2)
    with subprocess.Popen(["sleep", "60"]) as torchrun:  # started right after that line
        monkeypatch.setattr(os, "getppid", lambda: torchrun.pid)
        assert ddp.last_of_job(copy, restarted=True)["step"] == resumed["step"]
        torchrun.kill()
    os.utime(metrics, (1, 1))
    for file in copy.glob(
        "trainer_*.pt"
    ):  # lost before the first checkpoint: from zero, and so do its metrics
        file.unlink()
    assert ddp.last_of_job(copy, restarted=True) is None and not metrics.exists()


def test_jobs_have_a_folder_of_their_own(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a/job")
    assert ddp.job_folder(ddp.Args()).name == "breakout__ppo_lstm_puffer_ddp__1__a-job"
    monkeypatch.setenv(
        "TORCHELASTIC_RUN_ID", "none"
    )  # torchrun was given none: on one host, when it started is a name
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    assert (
        ddp.job_folder(ddp.Args()) == ddp.job_folder(ddp.Args())
        and "none" not in ddp.job_folder(ddp.Args()).name
    )
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    with pytest.raises(ddp.UsageError, match="--rdzv-id"):
        ddp.job_folder(ddp.Args())


def two_torchruns(start, hosts: list[dict], **options) -> list[subprocess.Popen]:
    return [
        start(
            *STEPS,
            launcher=[*host["inside"], *torchrun(
                "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=test",
                f"--rdzv-conf=is_host={int(i == 0)}", *host["options"],
            )],
            output=f"host{i}", **host["variables"],
        )
        for i, host in enumerate(hosts)
    ]  # fmt: skip


@pytest.fixture
def two_hosts():
    """Two network namespaces joined by a cable, (name, address, device) of each; none where these are not permitted."""
    tag = uuid.uuid4().hex[:6]
    hosts = [(f"ppo{tag}{i}", f"10.77.0.{i + 1}") for i in range(2)]

    def ip(*arguments):
        return subprocess.run(["ip", *arguments], capture_output=True, text=True)

    if shutil.which("ip") is None or any(ip("netns", "add", name).returncode for name, _ in hosts):
        yield []
        return
    try:
        for arguments in (
            ["link", "add", f"v{tag}0", "netns", hosts[0][0], "type", "veth", "peer", "name", f"v{tag}1", "netns", hosts[1][0]],
            *(["-n", name, "addr", "add", f"{address}/24", "dev", f"v{tag}{i}"] for i, (name, address) in enumerate(hosts)),
            *(["-n", name, "link", "set", device, "up"] for i, (name, _) in enumerate(hosts) for device in ("lo", f"v{tag}{i}")),
        ):  # fmt: skip
            assert (done := ip(*arguments)).returncode == 0, done.stderr
        yield [(name, address, f"v{tag}{i}") for i, (name, address) in enumerate(hosts)]
    finally:
        for name, _ in hosts:
            ip("netns", "delete", name)


def test_two_hosts_train_together_and_survive_a_killed_rank(two_hosts, start, tmp_path):
    """Two torchruns, in network namespaces where it may be. The one whose rank was killed counts a restart; the other may not."""
    local = {"inside": [], "options": [f"--rdzv-endpoint=localhost:{free_port()}"], "variables": {}}
    hosts = [
        {
            "inside": ["ip", "netns", "exec", name],
            "options": [f"--rdzv-endpoint={two_hosts[0][1]}:29500", f"--local-addr={address}"],
            "variables": {"GLOO_SOCKET_IFNAME": device},
        }
        for name, address, device in two_hosts
    ] or [local, local]
    jobs = two_torchruns(start, hosts)
    run = first_checkpoint(tmp_path, *jobs)
    ranks = {number: rank for job in jobs for number, rank in ranks_of(job).items()}
    assert ranks.keys() == {0, 1}
    ranks[1].kill()
    outputs = [tmp_path / f"host{i}" for i in range(2)]
    assert [job.wait(300) for job in jobs] == [0, 0], "\n".join(
        output.read_text() for output in outputs
    )
    assert list(tmp_path.glob("runs/*")) == [run] and run.name.endswith("__test")
    assert exit_reason(run) == "completed"
    assert [row["step"] for row in read_metrics(run)] == list(range(256, END + 1, 256))
