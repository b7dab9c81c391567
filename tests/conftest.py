"""What the tests share: running the script as a user would, in a process of its own, and reading what it left."""

import json
import os
import pathlib
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
    return os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "WANDB_MODE": "offline", "WANDB_SILENT": "true"}


PYTHON = (sys.executable,)  # what a script is launched by; torchrun is another


def command_of(*arguments, launcher=PYTHON, small: bool = True, script=SCRIPT) -> list[str]:
    return [*launcher, str(script), *(SMALL if small else []), *map(str, arguments)]


def run_script(*arguments: str, cwd, timeout: float = 120, **kwargs) -> subprocess.CompletedProcess:
    """Runs the script in cwd (its runs/ goes there) and returns the finished process with its output as text."""
    return subprocess.run(
        command_of(*arguments, **kwargs), cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout
    )


def start_script(*arguments: str, cwd, launcher=PYTHON, small: bool = True, script=SCRIPT, **kwargs) -> subprocess.Popen:
    """Starts the script and returns at once: for tests that kill it."""
    options = {"env": environment(), "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | kwargs
    return subprocess.Popen(command_of(*arguments, launcher=launcher, small=small, script=script), cwd=cwd, **options)


def newest_run(cwd) -> pathlib.Path:
    return max(pathlib.Path(cwd, "runs").iterdir(), key=lambda path: path.stat().st_mtime)


def read_metrics(run: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def metrics(run: pathlib.Path) -> dict:
    """What the run left at its end."""
    return json.loads((run / "metrics.json").read_text())


@pytest.fixture
def trained(tmp_path):
    """The folder of a small finished Breakout run."""
    result = run_script(cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    return newest_run(tmp_path)
