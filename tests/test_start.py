"""What a start finds out: precision, threads, whether compiling works, what was compiled."""

import contextlib
import json
import pathlib
from types import SimpleNamespace

import gymnasium as gym
import pytest
import torch
from conftest import environment, run_script
from pufferlib import adapters
from reading import end_of, newest_run, read_metrics
from test_ddp import train
from torch._inductor import cpp_builder

import ppo_lstm_puffer as ppo


@pytest.mark.parametrize(
    ("device", "capabilities", "precision"),
    [
        ("cpu", {"avx512_f": True, "avx512_bf16": False}, "float32"),
        ("cpu", {"avx512_bf16": True}, "bfloat16"),
        ("cpu", {"neon": True, "bf16": True}, "bfloat16"),
        ("cuda", (7, 5), "float32"),
        ("cuda", (8, 0), "bfloat16"),
    ],
)
def test_precision_auto_is_bfloat16_where_the_device_multiplies_it(
    monkeypatch, device, capabilities, precision
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capabilities)
    args = ppo.Args(device=device)
    ppo.resolve(args)
    assert args.precision == precision


@pytest.mark.parametrize(
    ("given", "kind", "steps", "cores", "threads"),
    [
        (None, None, 256, 16, [1]),
        (None, None, 4096, 16, [7]),
        (None, None, 32768, 2, [2]),
        (None, "avx512_bf16", 4096, 16, [4]),
        (None, "amx_bf16", 4096, 16, [4]),
        ("3", None, 32768, 16, []),
    ],
)
def test_threads_follow_the_work_of_an_update_and_the_cores_unless_omp_num_threads_is_given(
    monkeypatch, given, kind, steps, cores, threads
):
    monkeypatch.delenv("OMP_NUM_THREADS")
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    monkeypatch.setattr(ppo, "fast_bfloat16", lambda device: kind)
    envs = SimpleNamespace(observation_space=gym.spaces.Box(-1, 1, (118,)), num_agents=512)
    precision = "bfloat16" if kind else "float32"
    args = ppo.Args(minibatch_size=steps, precision=precision, device="cpu", compile=False)
    ppo.set_up_torch(args, envs, seed=1)
    assert chosen == threads


def test_convolutions_take_all_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(torch, "set_num_threads", lambda number: pytest.fail(f"{number} threads"))
    image = SimpleNamespace(observation_space=gym.spaces.Box(0, 255, (84, 84), "uint8"))
    ppo.set_up_torch(ppo.Args(device="cpu", precision="float32", compile=False), image, seed=1)


# A compiler that is not there, or cannot.


@pytest.mark.parametrize(("name", "folder"), [("TORCHINDUCTOR_CACHE_DIR", "a b"), ("PATH", ".")])
def test_compiler_that_cannot_be_used_is_one_warning_and_training_is_eager(tmp_path, name, folder):
    # g++ is called without quotes; g++ is not there.
    flags = ["--num-steps", "4", "--minibatch-size", "16", "--total-timesteps", "256", "--compile"]
    env = environment() | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    env |= {name: str(tmp_path / folder)}
    result = run_script(*flags, cwd=tmp_path, env=env, timeout=200)
    assert result.returncode == 0, result.stderr
    assert read_metrics(newest_run(tmp_path))[-1]["step"] == 256
    warnings = [line for line in result.stderr.splitlines() if "warning: " in line]
    assert len(warnings) == 1 and "compil" in warnings[0], result.stderr
    assert "Traceback" not in result.stderr and len(result.stderr.splitlines()) < 12


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
def test_a_large_batch_of_images_is_announced(num_agents, said, capsys):
    observations = torch.empty(33, num_agents, 210, 160, 3, dtype=torch.uint8, device="meta")
    adapters.tell_of_size(observations, adapters.say)
    text = capsys.readouterr().err
    assert said in text
    assert ("a batch of observations" in text) == bool(said)


@pytest.mark.parametrize(
    ("norm", "largest", "said"), [(None, 5000, True), (None, 50, False), (object(), 5000, False)]
)
def test_large_observations_that_nothing_normalizes_are_announced(norm, largest, said, capsys):
    agent = SimpleNamespace(observation_norm=norm)
    adapters.tell_of_scale(torch.full((8, 3), -float(largest)), agent, adapters.say)
    assert ("observations of up to 5000: --norm-obs" in capsys.readouterr().err) == said


# torch's cache of compiled functions.

RUN = """
import json, sys
import torch._dynamo.utils
import ppo_lstm_puffer as ppo

factor = FACTOR
original = ppo.ppo_loss
if factor != 1:  # what a fork may change
    def ppo_loss(*arguments):
        loss, *rest = original(*arguments)
        return factor * loss, *rest
    ppo.ppo_loss = ppo_loss
code = ppo.main(*ppo.parse_args(sys.argv[1:]))
print(json.dumps(torch._dynamo.utils.counters["aot_autograd"]))
sys.exit(code)
"""


GAME = ["--env-id", "tests.parallel_game", "--num-workers", "2", "--num-steps", "2", "--compile"]


def compiled_run(factor: float, folder) -> tuple[dict, float]:
    """The cache's counters, and the last gradient's norm, of a small run with a cache in folder."""
    (folder / "run.py").write_text(RUN.replace("FACTOR", str(factor)))
    sizes = ["--num-envs", "4", "--minibatch-size", "12", "--total-timesteps", "48"]
    env = environment() | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    options = {"script": folder / "run.py", "env": env, "timeout": 1200}
    result = run_script(*GAME, *sizes, cwd=folder, **options)
    assert result.returncode == 0, result.stderr
    norm = read_metrics(newest_run(folder))[-1]["losses/grad_norm"]
    return json.loads(result.stdout.splitlines()[-1]), norm


def test_second_start_finds_every_function_and_a_changed_loss_is_compiled_anew(tmp_path):
    """And two ranks, each of these sizes, train with what was compiled."""
    first, norm = compiled_run(1, tmp_path)
    assert first["autograd_cache_miss"] == first["total"] >= 4
    changed, other = compiled_run(3, tmp_path)
    assert changed["autograd_cache_miss"] == 1
    assert changed["autograd_cache_hit"] == first["total"] - 1
    assert other != pytest.approx(norm, rel=1e-3)
    (tmp_path / "ranks").mkdir()
    sizes = ["--num-envs", "8", "--minibatch-size", "24"]
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    run = train(*GAME, *sizes, cwd=tmp_path / "ranks", env=cache)
    assert end_of(run)["exit_reason"] == "completed"
    assert read_metrics(run)[0]["step"] == 8 * 3 * 2  # environments, agents, steps
    last = [row for row in read_metrics(run) if "episodic_return" in row][-10:]
    returns = sum(row["episodic_return"] for row in last)
    assert 0.3 < returns / sum(row["episodic_length"] for row in last) <= 1
