"""What the tests share: running the script as a user would, in a process of its own, and reading what it left."""

import io
import json
import os
import pathlib
import pty
import shlex
import signal
import subprocess
import sys

os.environ["OMP_NUM_THREADS"] = "1"  # two test workers on two cores

import pytest
from forks import Fork

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "ppo_lstm_puffer.py"
# Small and eager, so that a run takes seconds: 8 iterations of 16 environments x 16 steps.
SMALL = [
    "--num-envs",
    "16",
    "--num-steps",
    "16",
    "--minibatch-size",
    "128",
    "--total-timesteps",
    "2048",
    "--hidden-size",
    "32",
    "--precision",
    "float32",
    "--no-compile",
    "--log-interval",
    "1",
]


def environment() -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
    }


PYTHON = (sys.executable,)  # what a script is launched by; torchrun is another


def command_of(*arguments, launcher=PYTHON, small: bool = True, script=SCRIPT) -> list[str]:
    return [*launcher, str(script), *(SMALL if small else []), *map(str, arguments)]


def start_script(
    *arguments,
    cwd,
    launcher=PYTHON,
    small: bool = True,
    script=SCRIPT,
    fork: bool = True,
    **options,
):
    """Starts the script in cwd (its runs/ goes there) and returns at once: a `Fork`, or a Popen if it is not to be one."""
    command, options = (
        command_of(*arguments, launcher=launcher, small=small, script=script),
        {"env": environment()} | options,
    )
    if fork and command[0] == sys.executable:
        return Fork(command, cwd, **options)
    return subprocess.Popen(
        command,
        cwd=cwd,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options,
    )


def run_script(*arguments, cwd, timeout: float = 300, **options) -> subprocess.CompletedProcess:
    """Runs the script in cwd and returns the finished process with its output as text."""
    process = start_script(*arguments, cwd=cwd, **options)
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def output_of(script, arguments: list[str], cwd, timeout: float = 300) -> str:
    """What a script prints. Asserts that it succeeds."""
    result = run_script(*arguments, cwd=cwd, timeout=timeout, script=script, small=False)
    assert result.returncode == 0, (
        f"{shlex.join(result.args)}: exit code {result.returncode}\n{result.stderr}"
    )
    return result.stdout + result.stderr


def run_on_a_terminal(command: list[str], cwd, columns: int = 120) -> tuple[str, str]:
    """Standard output, and what a terminal of so many columns got by standard error."""
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        command, cwd=cwd, env=environment() | {"TERM": "xterm", "COLUMNS": str(columns)}, stdout=subprocess.PIPE, stderr=end, text=True
    )  # fmt: skip
    os.close(end)
    shown = io.BytesIO()
    while True:
        try:
            shown.write(os.read(terminal, 65536))
        except OSError:  # the other end is closed
            break
    os.close(terminal)
    return process.communicate()[0], shown.getvalue().decode(errors="replace")


def newest_run(cwd) -> pathlib.Path:
    return max(pathlib.Path(cwd, "runs").iterdir(), key=lambda path: path.stat().st_mtime)


def read_metrics(run: pathlib.Path) -> list[dict]:
    """The lines of a run's log intervals."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "exit_reason" not in row]


def end_of(run: pathlib.Path) -> dict:
    """The last line of a run's metrics: how it ended."""
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])


# The longest first, so that both test workers end together.
LONGEST = (
    "test_cache",
    "test_learning",
    "survive_a_killed_rank",
    "restarts_the_job",
    "of_a_torchrun",
    "test_sweep",
    "test_ddp",
)


def pytest_collection_modifyitems(items):
    items.sort(
        key=lambda item: next(
            (i for i, name in enumerate(LONGEST) if name in item.nodeid), len(LONGEST)
        )
    )


# In process, as arguments of Args: runs that take a second.
SIZES = {
    "num_envs": 8,
    "num_steps": 8,
    "minibatch_size": 32,
    "hidden_size": 16,
    "compile": False,
    "num_workers": 0,
}


@pytest.fixture
def losses_of(monkeypatch, tmp_path):
    """What twelve iterations of two updates each log as losses, with or without something in the place of Recorded."""
    import ppo_lstm_puffer as ppo

    def run(
        recorded=None, device="cpu:0", **arguments
    ):  # by this name train() does not know a CPU, and records
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        sizes = (
            SIZES
            | {"total_timesteps": 12 * 64, "log_interval": 1, "output_dir": str(folder)}
            | arguments
        )
        args = ppo.Args(
            **{"precision": "float32"} | sizes, device=device, cuda_graphs=recorded is not None
        )
        if recorded:
            monkeypatch.setattr(ppo, "Recorded", recorded)
        for name in ppo.COMPILED:  # which compiling replaces
            monkeypatch.setattr(ppo, name, getattr(ppo, name))
        handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
        try:
            assert ppo.train(args) == 0
        finally:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
        return [
            {name: value for name, value in row.items() if name.startswith(("losses", "episod"))}
            for row in read_metrics(next(folder.iterdir()))
        ]

    return run
