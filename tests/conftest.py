"""What the tests share: running the script as a user would, in a process of its own, and reading what it left."""

import json
import multiprocessing
import os
import pathlib
import runpy
import shlex
import subprocess
import sys

os.environ["OMP_NUM_THREADS"] = "1"  # two test workers on two cores

import pytest
import torch

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

torch.set_num_threads(1)


def environment() -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
    }


PYTHON = (sys.executable,)  # what a script is launched by; torchrun is another


def command_of(*arguments, launcher=PYTHON, small: bool = True, script=SCRIPT) -> list[str]:
    return [*launcher, str(script), *(SMALL if small else []), *map(str, arguments)]


def run_script(*arguments: str, cwd, timeout: float = 120, **kwargs) -> subprocess.CompletedProcess:
    """Runs the script in cwd (its runs/ goes there) and returns the finished process with its output as text."""
    return subprocess.run(
        command_of(*arguments, **kwargs), cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout
    )


def start_script(
    *arguments: str, cwd, launcher=PYTHON, small: bool = True, script=SCRIPT, **kwargs
) -> subprocess.Popen:
    """Starts the script and returns at once: for tests that kill it."""
    options = {"env": environment(), "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | kwargs
    return subprocess.Popen(command_of(*arguments, launcher=launcher, small=small, script=script), cwd=cwd, **options)


def run_in_a_fork(script, arguments: list[str], folder, timeout: float = 60) -> str:
    """Runs a script as `python script arguments` in folder, and returns what it printed: quick, and a C environment may
    crash it. Asserts that it succeeds."""
    import torch._dynamo  # what the script imports late and slowly: here once, so that the forks need not
    import torch.utils.tensorboard  # noqa: F401

    output = pathlib.Path(folder, "output")

    def target():
        os.chdir(folder)
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            sys.stdout = sys.stderr = file
            sys.argv = [str(script), *arguments]
            runpy.run_path(str(script), run_name="__main__")

    process = multiprocessing.get_context("fork").Process(target=target)
    process.start()
    process.join(timeout)
    process.kill()
    assert process.exitcode == 0, (
        f"{script} {shlex.join(arguments)}: exit code {process.exitcode}\n{output.read_text()}"
    )
    return output.read_text()


def newest_run(cwd) -> pathlib.Path:
    return max(pathlib.Path(cwd, "runs").iterdir(), key=lambda path: path.stat().st_mtime)


def read_metrics(run: pathlib.Path) -> list[dict]:
    """The lines of a run's log intervals."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "exit_reason" not in row]


def end_of(run: pathlib.Path) -> dict:
    """The last line of a run's metrics: how it ended."""
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.fixture
def trained(tmp_path):
    """The folder of a small finished Breakout run."""
    result = run_script(cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    return newest_run(tmp_path)
