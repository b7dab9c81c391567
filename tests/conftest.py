"""What the tests share: running the script as a user would, in a process of its own or in that of
the test."""

import os
import pathlib
import pickle
import subprocess
import sys
import time

os.environ["OMP_NUM_THREADS"] = "1"  # two test workers on two cores

import numpy as np
import pytest
import torch
from forks import Fork
from reading import newest_run, read_metrics

import ppo_lstm_puffer as ppo

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "ppo_lstm_puffer.py"
# Small and eager, so that a run takes seconds: 8 iterations of 16 environments x 16 steps.
SMALL = "--num-envs 16 --num-steps 16 --minibatch-size 128 --total-timesteps 2048 --hidden-size 32 "
SMALL = (SMALL + "--precision float32 --no-compile --log-interval 1").split()


def pytest_collection_modifyitems(items):
    """What compiles, which takes longest, comes first: or a worker would be left with it."""
    items.sort(key=lambda item: "second_start" not in item.name)


def environment() -> dict[str, str]:
    paths = (str(ROOT), str(ROOT / "tests"), os.getenv("PYTHONPATH"))
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
    }


PYTHON = (sys.executable,)  # what a script is launched by; torchrun is another


def start_script(*arguments, cwd, launcher=PYTHON, small: bool = True, script=SCRIPT, **options):
    """Starts the script in cwd, where its runs/ goes, and returns at once: a `Fork`, or a Popen."""
    command = [*launcher, str(script), *(SMALL if small else []), *map(str, arguments)]
    options = {"env": environment()} | options
    if command[0] == sys.executable:
        return Fork(command, cwd, **options)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=cwd, **pipes | options)


def run_script(*arguments, cwd, timeout: float = 300, **options) -> subprocess.CompletedProcess:
    """Runs the script in cwd and returns the finished process with its output as text."""
    process = start_script(*arguments, cwd=cwd, **options)
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def succeed(*arguments, cwd, runner=run_script, **options) -> pathlib.Path:
    """Runs a script, asserts success, returns the run's folder."""
    result = runner(*arguments, cwd=cwd, **options)
    assert result.returncode == 0, result.stderr
    return newest_run(cwd)


def wait_for(condition, process=None, timeout: float = 120):
    """Until condition() is true, which it returns; fails if the process ends first."""
    deadline = time.monotonic() + timeout
    while not (result := condition()):
        ended = process and process.poll() is not None
        assert not ended, f"it ended with exit code {process.returncode}"
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.005)
    return result


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A small finished run, saved after 4 and 8 iterations. Its files stay as they are."""
    folder = tmp_path_factory.mktemp("finished")
    result = run_script("--device", "cpu", "--checkpoint-interval", "4", cwd=folder)
    assert result.returncode == 0, result.stderr
    result.run = newest_run(folder)
    return result


@pytest.fixture
def listen(monkeypatch):
    """Lists note(result, *arguments) of each call of a function."""

    def listen(owner, name, note) -> list:
        notes = []
        function = getattr(owner, name)

        def heard(*given):
            result = function(*given)
            notes.append(note(result, *given))
            return result

        monkeypatch.setattr(owner, name, heard)
        return notes

    return listen


class TouchesAFile:
    """What a hostile pickle does: loading it calls open("touched", "w")."""

    def __reduce__(self):
        return open, ("touched", "w")


FOREIGN = {  # files that somebody gives in place of a checkpoint
    "empty": lambda path: path.write_bytes(b""),
    "noise": lambda path: path.write_bytes(np.random.default_rng(1).bytes(5000)),
    "other_tensors": lambda path: torch.save({"layer.weight": torch.zeros(3, 3)}, path),
    "hostile_pickle": lambda path: path.write_bytes(pickle.dumps(TouchesAFile())),
    "hostile_weights": lambda path: torch.save({"cell.weight_ih": TouchesAFile()}, path),
}

# In the test's own process, as arguments of Args: runs that take a second.
SIZES = {
    "num_envs": 8,
    "num_steps": 8,
    "minibatch_size": 32,
    "hidden_size": 16,
    "device": "cpu",
    "precision": "float32",
    "compile": False,
    "num_workers": 0,
    "log_interval": 1,
}


def train_here(folder, resumed: dict | None = None, **arguments) -> pathlib.Path:
    """Trains in this process with SIZES and these arguments of Args. Returns the run's folder."""
    args = ppo.Args(**SIZES | {"output_dir": str(folder)} | arguments)
    assert ppo.main(args, resumed) == 0
    return max(pathlib.Path(folder).iterdir(), key=os.path.getmtime)


class Recording(str):
    """A device that `train` takes for one with CUDA graphs, whatever it is."""

    def __eq__(self, other):
        return other == "cuda"

    __hash__ = str.__hash__


@pytest.fixture
def losses_of(monkeypatch, tmp_path):
    """What a dozen iterations of two updates log as losses and returns.

    With something in the place of CudaGraphs, or without graphs.
    """

    def run(graph=None, **arguments):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))

        def train(args, *rest, original=ppo.train):
            args.device = Recording(args.device)
            original(args, *rest)

        with monkeypatch.context() as patch:
            if graph:
                patch.setattr(ppo, "CudaGraphs", graph)
                patch.setattr(ppo, "train", train)
            for name in ppo.COMPILED:  # which compiling replaces
                patch.setattr(ppo, name, getattr(ppo, name))
            sizes = {"total_timesteps": 12 * 64, "cuda_graphs": graph is not None}
            run = train_here(folder, **sizes | arguments)
        kept = ("losses", "episod")
        return [
            {name: value for name, value in row.items() if name.startswith(kept)}
            for row in read_metrics(run)
        ]

    return run
