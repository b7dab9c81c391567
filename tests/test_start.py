"""What a start finds out: precision, threads, whether compiling works here."""

import contextlib
import os
import pathlib
import shutil
import sys
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import environment, newest_run, read_metrics, run_script
from pufferlib import adapters
from torch._inductor import cpp_builder

import ppo_lstm_puffer as ppo


@pytest.mark.parametrize(
    ("capabilities", "precision"),
    [
        ({"avx512_f": True, "avx512_bf16": False}, "float32"),
        ({"avx512_bf16": True}, "bfloat16"),
        ({"neon": True, "bf16": True}, "bfloat16"),
    ],
)
def test_precision_auto_is_bfloat16_where_the_cpu_multiplies_it(
    monkeypatch, capabilities, precision
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    args = ppo.Args(device="cpu")
    ppo.resolve(args)
    assert args.precision == precision


@pytest.mark.parametrize(("capability", "precision"), [((7, 5), "float32"), ((8, 0), "bfloat16")])
def test_precision_auto_is_bfloat16_from_compute_capability_8_on(
    monkeypatch, capability, precision
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    args = ppo.Args(device="cuda")
    ppo.resolve(args)
    assert args.precision == precision


@pytest.fixture
def chosen_threads(monkeypatch):
    """For an update of so many steps of Breakout's default network, on so many cores."""
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    space = gym.spaces.Box(-1, 1, (118,))
    envs = SimpleNamespace(observation_space=space, num_agents=512)

    def choose(steps: int, cores: int, kind: str | None = None) -> int | None:
        chosen.clear()
        monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
        monkeypatch.setattr(ppo, "fast_bfloat16", lambda device: kind)
        precision = "bfloat16" if kind else "float32"
        args = ppo.Args(minibatch_size=steps, precision=precision, device="cpu", compile=False)
        ppo.set_up_torch(args, envs, seed=1)
        return chosen[0] if chosen else None

    return choose


@pytest.mark.parametrize(
    ("kind", "steps", "cores", "threads"),
    [
        (None, 256, 16, 1),
        (None, 4096, 16, 7),
        (None, 32768, 2, 2),
        ("avx512_bf16", 4096, 16, 4),
        ("amx_bf16", 4096, 16, 2),
    ],
)
def test_threads_follow_the_work_of_an_update_and_the_cores(
    monkeypatch, chosen_threads, kind, steps, cores, threads
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert chosen_threads(steps, cores, kind) == threads


def test_omp_num_threads_wins(monkeypatch, chosen_threads):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert chosen_threads(32768, 16) is None


# A compiler that is not there, or cannot.


def eager(tmp_path, **variables) -> str:
    """What a run with --compile says that must end in one warning and eager training."""
    flags = ["--num-steps", "4", "--minibatch-size", "16", "--total-timesteps", "256", "--compile"]
    launcher = variables.pop("launcher", (sys.executable,))
    env = environment() | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")} | variables
    result = run_script(*flags, cwd=tmp_path, env=env, launcher=launcher, timeout=200)
    assert result.returncode == 0, result.stderr
    assert read_metrics(newest_run(tmp_path))[-1]["step"] == 256
    warnings = [line for line in result.stderr.splitlines() if "warning: " in line]
    assert len(warnings) == 1 and "compil" in warnings[0], result.stderr
    assert "Traceback" not in result.stderr and len(result.stderr.splitlines()) < 12
    return result.stderr


def test_compile_cache_that_cannot_be_used_is_one_warning(tmp_path):
    """g++ is called without quotes."""
    eager(tmp_path, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "a b"))


def test_no_compiler_is_one_warning(tmp_path):
    eager(tmp_path, PATH=str(tmp_path))


def test_no_header_of_python_is_one_warning(tmp_path):
    """As where python3-dev is not installed."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("hiding Python.h needs root, and util-linux")
    hide = 'mount -t tmpfs tmpfs "$(python -c '
    hide += "'import sysconfig; print(sysconfig.get_path(\"include\"))'" + ')" && exec "$@"'
    bash = shutil.which("bash")
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    launcher = ("unshare", "-m", bash, "-c", hide, "bash", sys.executable)
    eager(tmp_path, launcher=launcher, PATH=path)


def test_compiler_that_is_killed_leaves_no_library_that_looks_whole(monkeypatch, tmp_path):
    """Torch would take it in every later start."""
    target = tmp_path / "kernel.so"

    def killed(command: str, folder: str):
        pathlib.Path(command.split()[-1]).write_text("half")
        raise KeyboardInterrupt

    def whole(command: str, folder: str):
        pathlib.Path(command.split()[-1]).write_text("whole")

    for compiler in killed, whole:
        monkeypatch.setattr(cpp_builder, "_run_compile_cmd", compiler)
        adapters.write_libraries_whole()
        with contextlib.suppress(KeyboardInterrupt):
            cpp_builder._run_compile_cmd(f"g++ kernel.cpp -o {target}", str(tmp_path))
        assert target.exists() == (compiler is whole)
    assert target.read_text() == "whole"


def test_torchs_compiler_is_called_the_way_that_is_taken_over():
    options = cpp_builder.CppTorchOptions(vec_isa=cpp_builder.invalid_vec_isa)
    builder = cpp_builder.CppBuilder("kernel", "kernel.cpp", options, output_dir="folder")
    words = builder.get_command_line().split()
    assert words.count("-o") == 1
    assert words[words.index("-o") + 1] == builder.get_target_file_path()


@pytest.mark.parametrize(
    ("num_agents", "said"), [(512, "a batch of observations takes 1.7 GB"), (8, "")]
)
def test_a_large_batch_of_images_is_announced(num_agents, said, capsys, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    space = gym.spaces.Box(0, 255, (210, 160, 3), np.uint8)
    envs = SimpleNamespace(observation_space=space, num_agents=num_agents)
    args = ppo.Args(compile=False, device="cpu", precision="float32")
    ppo.set_up_torch(args, envs, seed=1)
    text = capsys.readouterr().err
    assert said in text
    assert ("a batch of observations" in text) == bool(said)
