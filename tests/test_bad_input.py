"""A wrong argument is one line that names the flag, the value and what would be right; exit code 2; no traceback."""

import pickle
import shutil
import signal
import sys
import warnings

import numpy as np
import pytest
import torch
from conftest import ROOT, SMALL, newest_run, run_script

import ppo_lstm_puffer as ppo


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a small finished run, which no test changes."""
    folder = tmp_path_factory.mktemp("finished")
    assert call("--total-timesteps", "256", "--output-dir", folder / "runs") == 0
    return newest_run(folder)


@pytest.fixture
def refused(tmp_path, monkeypatch, capfd):
    """Calls the script, in this process and in an empty folder; asserts one line on stderr and exit code 2; returns the line."""
    monkeypatch.chdir(tmp_path)

    def refused(*arguments) -> str:
        capfd.readouterr()
        code = call(*arguments)
        return the_line(code, capfd.readouterr().err)

    return refused


def call(*arguments) -> int:
    """The script's exit code, called with these arguments on top of the small ones. Warnings go to stderr, as in a process."""
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(sys, "argv", ["ppo_lstm_puffer.py", *SMALL, *map(str, arguments)])
        patch.setattr(warnings, "showwarning", lambda message, *_: print(f"UserWarning: {message}", file=sys.stderr))
        warnings.simplefilter("always", UserWarning)
        try:
            return ppo.main()
        except SystemExit as end:
            return end.code
        finally:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)


def the_line(code: int, stderr: str) -> str:
    """stderr if it is one error line and the exit code says usage."""
    assert code == 2, stderr
    assert stderr.startswith("error: ") and stderr.count("\n") == 1 and stderr.endswith("\n"), stderr
    assert stderr[:-1].isprintable(), "escape sequences"
    return stderr


# What is on the command line: arguments, and what the line must name.


@pytest.mark.parametrize(
    "arguments, named",
    [
        ("--env-id breakot", "--env-id breakot breakout"),
        ("--env-id CartPole-v9", "--env-id CartPole-v9 CartPole-v1"),
        ("--env-id no_such_module:Thing-v0", "--env-id no_such_module"),
        ("--env-id no_such_package.thing", "--env-id no_such_package.thing"),
        ("--env-id os.path", "--env-id os.path parallel_env"),
        ("--env-id tactical", "--env-id tactical"),  # PufferLib's release of it does not import
        ("--num-steps 16 --minibatch-size 100", "--minibatch-size 100 --num-steps 16"),
        ("--num-envs 16 --num-steps 16 --minibatch-size 512", "--minibatch-size 512 256"),
        ("--minibatch-size 128 --max-minibatch-size 48", "--max-minibatch-size 48 128"),
        ("--num-envs 0", "--num-envs 0"),
        ("--num-envs abc", "--num-envs abc"),
        ("--num-envs 1.5", "--num-envs 1.5"),
        ("--gamma 1.5", "--gamma 1.5 1"),
        ("--learning-rate nan", "--learning-rate nan"),
        ("--total-timesteps -5", "--total-timesteps -5"),
        ("--seed 99999999999999999999", "--seed 99999999999999999999"),
        ("--env-id CartPole-v1 --seed -1", "--seed -1"),  # Gymnasium's seeds are not negative
        ("--gama 0.9", "--gama --gamma"),
        ("--no-such-flag 3", "--no-such-flag"),
        ("--device tpu", "--device tpu cpu cuda"),
        ("--optimizer sgd", "--optimizer sgd muon adam"),
        ("--compile --compile-mode fastest", "--compile-mode fastest default"),
        ("--env.nonsense 3", "--env.nonsense breakout frameskip"),
        ("--env.frameskip", "--env.frameskip value"),
        ("--env.frameskip often", "frameskip"),
        ("--env-id puffer_cartpole --env.continuous 1e99", "cartpole OverflowError"),
        ("--env.frameskip 2001-99-99", "--env.frameskip 2001-99-99 YAML"),  # no YAMLError, but a ValueError
        ("--num-envs 9223372036854775808", "--num-envs 9223372036854775808 2147483647"),
        ("--update-epochs inf", "--update-epochs inf 1000"),
        ("--output-dir=", "--output-dir empty"),  # it would have been /
        ("--env-id CartPole-v1 --env.nonsense 3", "CartPole-v1 nonsense"),
        ("--env-id CartPole-v1 --vec-backend native", "--vec-backend native CartPole-v1 serial"),
        ("--num-envs 15 --num-workers 2 --vec-backend multiprocessing", "--num-envs 15 --num-workers 2"),
        ("--env-id CartPole-v1 --num-envs 15 --num-workers 2 --vec-backend multiprocessing", "--num-envs 15 --num-workers 2"),
        ("--resume latest", "--resume latest runs"),
        ("--evaluate latest", "--evaluate latest runs"),
        ("--output-dir nosuch://place", "--output-dir nosuch"),
    ],
)
def test_wrong_argument_is_one_line_that_names_it(refused, arguments, named):
    line = refused(*arguments.split())
    assert all(name in line for name in named.split()), line


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_graphs_without_cuda(refused):
    assert "--cuda-graphs" in refused("--cuda-graphs")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_without_cuda(refused):
    line = refused("--device", "cuda")
    assert "--device cuda" in line and "cpu" in line


def test_more_than_the_memory_is_one_line_that_says_what_to_lower(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert call("--env-id", "puffer_cartpole", "--hidden-size", 2**20) == 1  # 16 TB
    line = capfd.readouterr().err
    assert line.startswith("error: out of memory") and "--hidden-size" in line and line.count("\n") == 1


def test_render_without_a_display(refused, run, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    line = refused("--evaluate", run, "--render")
    assert "--render" in line and "display" in line


def test_output_dir_that_is_a_file(refused, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    assert "--output-dir file" in refused("--output-dir", "file")


# Checkpoints and weights.


class TouchesAFile:
    """What a hostile pickle does: loading it calls open("touched", "w")."""

    def __reduce__(self):
        return open, ("touched", "w")


def random_bytes(path):
    path.write_bytes(np.random.default_rng(1).bytes(5000))


def empty(path):
    path.write_bytes(b"")


def hostile_pickle(path):
    path.write_bytes(pickle.dumps(TouchesAFile()))


def hostile_torch_file(path):
    torch.save({"encoder.0.weight": TouchesAFile()}, path)


def other_tensors(path):
    torch.save({"layer.weight": torch.zeros(3, 3)}, path)


def list_of_numbers(path):
    torch.save([1, 2, 3], path)


def absent(path):
    pass


FOREIGN = [absent, empty, random_bytes, other_tensors, list_of_numbers, hostile_pickle, hostile_torch_file]


@pytest.mark.parametrize("write", FOREIGN)
@pytest.mark.parametrize("flag", ["--load-weights", "--evaluate"])
def test_foreign_weights_are_refused(refused, tmp_path, flag, write):
    write(tmp_path / "given.pt")
    assert f"{flag} given.pt" in refused(flag, "given.pt")
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("write", FOREIGN)
def test_foreign_trainer_state_is_refused(refused, tmp_path, write):
    folder = tmp_path / "given"
    folder.mkdir()
    write(folder / "trainer_state.pt")
    assert "--resume given" in refused("--resume", "given")
    assert "--resume given" in refused("--resume", "given/trainer_state.pt")
    assert "--evaluate given" in refused("--evaluate", "given")
    assert not (tmp_path / "touched").exists()


def test_file_that_is_not_a_trainer_state_is_named(refused, tmp_path):
    random_bytes(tmp_path / "given.pt")
    assert "given.pt" in refused("--resume", "given.pt")


def edit(run, tmp_path, change):
    """A copy of a run as tmp_path/given, with its trainer state changed."""
    shutil.copytree(run, tmp_path / "given")
    state = torch.load(tmp_path / "given/trainer_state.pt", weights_only=True)
    change(state)
    torch.save(state, tmp_path / "given/trainer_state.pt")


@pytest.mark.parametrize(
    "key, junk",
    [
        ("iteration", "1"), ("iteration", -1), ("iteration", 10**30), ("seconds", None), ("model_file", 3), ("optimizers", []),
        ("optimizers", [{}, {}]), ("optimizers", [1, 2]), ("rng", {}), ("rng", {"python": 1}), ("config", [1]),
    ],
    ids=str,
)  # fmt: skip
def test_trainer_state_with_a_foreign_item_is_refused(refused, run, tmp_path, key, junk):
    edit(run, tmp_path, lambda state: state.update({key: junk}))
    assert "--resume" in refused("--resume", "given", "--total-timesteps", "512")


def smaller(values: dict):
    values["momentum_buffer"] = values["momentum_buffer"][:1]


@pytest.mark.parametrize("change", [smaller, dict.clear], ids=["smaller", "nothing"])
def test_optimizer_state_of_other_parameters_is_refused(refused, run, tmp_path, change):
    edit(run, tmp_path, lambda state: change(state["optimizers"][0]["state"][0]))
    assert "--optimizer muon" in refused("--resume", "given", "--total-timesteps", "512")


def test_model_of_a_run_that_holds_no_tensors_is_refused(refused, run, tmp_path):
    edit(run, tmp_path, lambda state: list_of_numbers(tmp_path / "given" / state["model_file"]))
    assert "--resume" in refused("--resume", "given", "--total-timesteps", "512")


@pytest.mark.parametrize("size", [400, 401, 0])
@pytest.mark.parametrize("flag", ["--load-weights", "--evaluate"])
def test_bin_of_the_wrong_size(refused, tmp_path, flag, size):
    (tmp_path / "given.bin").write_bytes(bytes(size))
    line = refused(flag, "given.bin")
    assert f"{flag} given.bin" in line and f"{size} bytes" in line and "--hidden-size" in line


def test_weights_of_another_hidden_size(refused, run):
    model = next(run.glob("model_*.pt"))
    line = refused("--load-weights", model, "--hidden-size", "64")
    assert "--load-weights" in line and "--hidden-size" in line and "(64, 118)" in line and "(32, 118)" in line


@pytest.mark.parametrize(
    "changed, named", [("--hidden-size 64", "--hidden-size"), ("--env-id pong", "environment"), ("--optimizer adam", "--optimizer")]
)
def test_resuming_with_what_the_checkpoint_does_not_fit(refused, run, changed, named):
    line = refused("--resume", run, "--total-timesteps", "512", *changed.split())
    assert "--resume" in line and named in line


# Configuration files.


@pytest.mark.parametrize(
    "text, named",
    [
        ("gamma: [0.9\nseed: {", "YAML"),
        ("- gamma\n- seed\n", "mapping"),
        ("", "mapping"),
        ("gama: 0.9", "gama gamma"),
        ("zzzzzz: 1", "zzzzzz"),
        ("update_epochs: many", "update-epochs many"),
        ("clip_rewards: 3", "clip_rewards 3"),
        ("device: tpu", "device tpu"),
        ("optimizer: true", "optimizer"),
        ("gae_lambda: 1.5", "gae-lambda 1.5"),
        ("env: 3", "env mapping"),
        ("seed: 2001-99-99", "YAML"),
        ("clip_rewards: !!bool x", "YAML"),
        ("[" * 3000, "YAML"),  # deeper than Python's stack
        ('env: {"a\\nb\\e[31m": 1}', "--env.a takes"),  # a new line and an escape sequence, which are not printed
        ("env: {nonsense: 3}", "nonsense frameskip"),
    ],
)
def test_wrong_configuration_is_one_line_that_names_it(refused, tmp_path, text, named):
    (tmp_path / "given.yaml").write_text(text)
    line = refused("--config", "given.yaml")
    assert all(name in line for name in named.split()), line
    assert "----" not in line, "a frame"


@pytest.mark.parametrize("write", [absent, random_bytes])
def test_configuration_that_cannot_be_read(refused, tmp_path, write):
    write(tmp_path / "given.yaml")
    assert "--config given.yaml" in refused("--config", "given.yaml")


def test_configuration_and_resume_together(refused, run):
    line = refused("--config", run / "config.yaml", "--resume", run)
    assert "--config" in line and "--resume" in line


# The same from the outside, in processes of their own.


def test_process_prints_one_line_and_exits_with_2(tmp_path):
    result = run_script("--env-id", "breakot", cwd=tmp_path)
    assert "breakout" in the_line(result.returncode, result.stderr) and result.stdout == ""
    assert not (tmp_path / "runs").exists()


def test_process_refuses_a_pickle_that_would_run_code(tmp_path):
    hostile_pickle(tmp_path / "given.pt")
    result = run_script("--evaluate", "given.pt", cwd=tmp_path)
    assert "--evaluate given.pt" in the_line(result.returncode, result.stderr)
    assert not (tmp_path / "touched").exists()


def test_process_leaves_no_workers_when_an_argument_is_wrong(tmp_path):
    result = run_script("--vec-backend", "multiprocessing", "--minibatch-size", "4096", cwd=tmp_path, timeout=60)
    assert "--minibatch-size 4096" in the_line(result.returncode, result.stderr)


def test_xla_script_without_torch_xla_says_what_installs_it(tmp_path):
    # torch_xla has a virtual environment of its own, so here it is really missing.
    result = run_script(cwd=tmp_path, small=False, script=ROOT / "ppo_lstm_puffer_xla.py")
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: torch_xla does not load (No module named 'torch_xla')")
    assert "make train-xla" in line and "pip install torch==2.9.0 'torch_xla[tpu]==2.9.0'" in line
