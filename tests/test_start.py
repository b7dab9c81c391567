"""What a start finds out (precision, threads), what its compiling leaves behind, and what --time-limit counts."""

import io
import os
import pathlib
import re
import unittest.mock
from types import SimpleNamespace

import pytest
import torch
import yaml
from conftest import newest_run, run_script
from joblib.externals.loky.backend import context

import ppo_lstm_puffer as ppo

BREAKOUT = SimpleNamespace(
    single_observation_space=SimpleNamespace(shape=(118,))
)  # its environments


@pytest.mark.parametrize(
    ("capabilities", "precision"),
    [
        ({"avx2": True, "avx512_bf16": False}, "float32"),
        ({"avx512_f": True, "avx512_bf16": False}, "float32"),
        ({"avx512_bf16": True}, "bfloat16"),
        ({"amx_bf16": True}, "bfloat16"),
        ({"neon": True, "bf16": True}, "bfloat16"),
        ({}, "float32"),
    ],
)
def test_precision_auto_is_bfloat16_where_the_cpu_multiplies_it(
    monkeypatch, capabilities, precision
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    args = ppo.Args(device="cpu")
    ppo.check_args(args)
    assert args.precision == precision


@pytest.mark.parametrize(
    ("capability", "precision"), [((7, 5), "float32"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")]
)
def test_precision_auto_is_bfloat16_from_compute_capability_8_on(
    monkeypatch, capability, precision
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    args = ppo.Args(device="cuda")
    ppo.check_args(args)
    assert args.precision == precision


def test_the_first_line_says_why_a_precision_was_taken(monkeypatch):
    for capabilities, precision, why in (
        ({"avx512_bf16": True}, "bfloat16", "bfloat16 (AVX512-BF16)"),
        ({"avx512_bf16": True}, "float32", "float32 (as told)"),
        ({}, "float32", "float32 (no fast bfloat16 here)"),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capabilities: found)
        assert ppo.machine(ppo.Args(device="cpu", precision=precision)).endswith(why)


def test_bfloat16_where_it_is_slow_is_taken_with_one_line_that_says_how_slow(monkeypatch, capsys):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {})
    args = ppo.Args(device="cpu", precision="bfloat16")
    ppo.check_args(args)
    assert args.precision == "bfloat16"
    assert re.fullmatch(
        r"warning: --precision bfloat16: products take \d+ times as long .*\n",
        capsys.readouterr().err,
    )


def test_what_was_chosen_is_printed_stored_and_kept_by_a_resumed_run(tmp_path):
    chosen = "bfloat16" if ppo.fast_bfloat16("cpu") else "float32"
    other = "float32" if chosen == "bfloat16" else "bfloat16"
    result = run_script("--precision", "auto", "--total-timesteps", "256", cwd=tmp_path)
    assert f"on: cpu, threads: 1, {chosen} (" in result.stderr
    assert yaml.safe_load((newest_run(tmp_path) / "config.yaml").read_text())["precision"] == chosen
    run_script(
        "--precision", other, "--total-timesteps", "256", cwd=tmp_path
    )  # a run of a machine of the other kind
    result = run_script("--resume", "latest", "--total-timesteps", "512", cwd=tmp_path, small=False)
    assert result.returncode == 0, result.stderr
    assert f"on: cpu, threads: 1, {other} (" in result.stderr


@pytest.mark.parametrize(
    ("kind", "steps", "cores", "threads"),
    [
        ("float32", 256, 16, 1), ("float32", 1024, 1, 1), ("float32", 1024, 16, 2), ("float32", 4096, 16, 7),
        ("float32", 32768, 2, 2), ("float32", 32768, 16, 16), ("AVX512-BF16", 1024, 16, 1), ("AVX512-BF16", 2048, 16, 2),
        ("AVX512-BF16", 4096, 16, 4), ("AMX", 2048, 16, 1), ("AMX", 4096, 16, 2), (None, 2048, 16, 2),
    ],
)  # fmt: skip
def test_threads_follow_the_work_of_an_update_and_the_cores(
    monkeypatch, kind, steps, cores, threads
):
    monkeypatch.setattr(ppo.joblib, "cpu_count", lambda only_physical_cores: cores)
    monkeypatch.setattr(ppo, "fast_bfloat16", lambda device: kind)
    assert (
        chosen_threads(monkeypatch, steps, "float32" if kind == "float32" else "bfloat16")
        == threads
    )


def chosen_threads(monkeypatch, steps: int, precision: str = "float32") -> int:
    """For an update of so many steps of the default network."""
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    ppo.set_up_device(ppo.Args(minibatch_size=steps, precision=precision, device="cpu"), BREAKOUT)
    return chosen[0]


def test_omp_num_threads_wins(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: pytest.fail("told otherwise"))
    ppo.set_up_device(ppo.Args(), BREAKOUT)


def test_first_weights_do_not_depend_on_the_cores(tmp_path, monkeypatch):
    weights = []
    for folder in tmp_path / "one", tmp_path / "all":
        monkeypatch.setenv("OMP_NUM_THREADS", "1") if folder.name == "one" else monkeypatch.delenv(
            "OMP_NUM_THREADS"
        )
        folder.mkdir()
        result = run_script(
            "--total-timesteps", "256", "--hidden-size", "256", "--learning-rate", "0", "--adam-learning-rate", "0",
            cwd=folder, fork=False,
        )  # fmt: skip
        assert "threads: 1, " in result.stderr
        weights.append(torch.load(max(newest_run(folder).glob("model_*.pt"))))
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())


def test_threads_keep_to_the_cores_that_this_process_may_use(monkeypatch):
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert chosen_threads(monkeypatch, steps=32768) == 1
    finally:
        os.sched_setaffinity(0, cores)


@pytest.mark.parametrize(
    ("quota", "threads"), [("max 100000", 16), ("300000 100000", 3), ("50000 100000", 1)]
)
def test_threads_keep_to_the_quota_of_a_container(monkeypatch, quota, threads):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(context, "_count_physical_cores", lambda: (16, None))
    monkeypatch.setattr(context.os.path, "exists", lambda path: path == "/sys/fs/cgroup/cpu.max")
    monkeypatch.setattr(context, "open", lambda path: io.StringIO(quota), raising=False)
    assert chosen_threads(monkeypatch, steps=32768) == threads


def test_a_compiler_that_is_killed_leaves_no_file_that_looks_whole(monkeypatch, tmp_path):
    target = tmp_path / "kernel.so"

    def killed(command: str, cwd: str):
        pathlib.Path(command.split()[-1]).write_text("half")
        raise KeyboardInterrupt

    def whole(command: str, cwd: str):
        pathlib.Path(command.split()[-1]).write_text("whole")

    from torch._inductor import cpp_builder

    for name in (
        "act",
        "lstm_forward",
        "lstm_backward",
        "draw_minibatch",
        "ppo_loss",
    ):  # compiled in place
        monkeypatch.setattr(ppo, name, getattr(ppo, name))
    for compiler in (killed, whole):
        monkeypatch.setattr(cpp_builder, "_run_compile_cmd", compiler)
        ppo.compile_hot_functions()
        try:
            cpp_builder._run_compile_cmd(f"g++ kernel.cpp -o {target}", str(tmp_path))
        except KeyboardInterrupt:
            assert not target.exists()
    assert target.read_text() == "whole"


def test_torchs_compiler_is_called_the_way_that_is_taken_over():
    from torch._inductor import cpp_builder

    options = cpp_builder.CppTorchOptions(vec_isa=cpp_builder.invalid_vec_isa)
    command = cpp_builder.CppBuilder(
        "kernel", "kernel.cpp", options, output_dir="folder"
    ).get_command_line()
    assert command.split().count("-o") == 1
    assert cpp_builder._run_compile_cmd.__code__.co_varnames[:2] == ("cmd_line", "cwd")


def test_time_limit_counts_training_and_not_compiling(monkeypatch):
    now = 100.0
    monkeypatch.setattr(ppo.time, "perf_counter", lambda: now)
    monkeypatch.setattr(ppo.signal, "signal", lambda *_: None)
    run = ppo.Run.__new__(ppo.Run)  # resumed: 40 seconds before, 15 of them compiling
    run.args, run.live, run.profiler, run.task = (
        ppo.Args(time_limit=30),
        unittest.mock.Mock(),
        None,
        0,
    )
    run.zero, run.began, run.startup, run.started, run.signum = 60.0, 100.0, 15.0, False, 0
    assert not run.stopping
    now = 160.0  # it compiled for a minute
    run.updated(1, 1)
    assert not run.stopping
    now = 164.9
    assert not run.stopping
    now = 165.1
    assert run.stopping
