"""A wrong argument is one line that names the flag, the value and what would be right; exit code 2; no traceback."""

import pickle
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
        patch.setattr(
            warnings,
            "showwarning",
            lambda message, *_: print(f"UserWarning: {message}", file=sys.stderr),
        )
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
    assert stderr.startswith("error: ") and stderr.count("\n") == 1 and stderr.endswith("\n"), (
        stderr
    )
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
        ("--num-envs 16 --num-steps 16 --minibatch-size 512", "--minibatch-size 512 16"),
        (
            "--minibatch-size 128 --max-minibatch-size 48",
            "--max-minibatch-size 48 --minibatch-size",
        ),
        ("--num-envs 0", "--num-envs 0"),
        ("--gamma 1.5", "--gamma 1.5 1"),
        ("--learning-rate nan", "--learning-rate nan"),
        ("--total-timesteps -5", "--total-timesteps -5"),
        ("--env-id CartPole-v1 --seed -1", "--seed -1"),  # Gymnasium's seeds are not negative
        ("--env.nonsense 3", "nonsense breakout"),
        ("--env.frameskip often", "frameskip often"),
        ("--env-id CartPole-v1 --env.nonsense 3", "CartPole-v1 nonsense"),
        ("--num-envs 15 --num-workers 2", "--num-envs 15 --num-workers 2"),
        ("--resume latest", "--resume latest runs"),
        ("--resume nowhere", "--resume nowhere"),
    ],
)
def test_wrong_argument_is_one_line_that_names_it(refused, arguments, named):
    line = refused(*arguments.split())
    assert all(name in line for name in named.split()), line


@pytest.mark.parametrize(
    "arguments, named",
    [
        ("--num-envs abc", "--num-envs abc"),
        ("--num-envs 1.5", "--num-envs 1.5"),
        ("--gama 0.9", "--gama --gamma"),
        ("--no-such-flag 3", "--no-such-flag"),
        ("--device tpu", "--device tpu cpu cuda"),
        ("--optimizer sgd", "--optimizer sgd muon adam"),
        ("--env.frameskip", "--env.frameskip"),
    ],
)
def test_what_tyro_refuses_is_framed_and_names_it(capfd, arguments, named):
    assert call(*arguments.split()) == 2
    stderr = capfd.readouterr().err
    assert stderr.startswith("╭─") and all(name in stderr for name in named.split()), stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_without_cuda(refused):
    line = refused("--device", "cuda")
    assert "--device cuda" in line and "cpu" in line


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


FOREIGN = [
    absent,
    empty,
    random_bytes,
    other_tensors,
    list_of_numbers,
    hostile_pickle,
    hostile_torch_file,
]


@pytest.mark.parametrize("write", FOREIGN)
def test_foreign_weights_are_refused(tmp_path, monkeypatch, capfd, write):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "given.pt")
    code = call("--load-weights", "given.pt")
    line = capfd.readouterr().err.splitlines()[-1]  # torch may warn before
    assert "--load-weights given.pt" in the_line(code, f"{line}\n")
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("write", FOREIGN)
@pytest.mark.parametrize("path", ["given", "given/trainer_000001.pt"])
def test_foreign_trainer_state_is_refused(tmp_path, monkeypatch, capfd, path, write):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "given").mkdir()
    write(tmp_path / "given/trainer_000001.pt")
    code = call("--resume", path)
    *warnings, line = capfd.readouterr().err.splitlines()
    assert f"--resume {path}" in the_line(code, f"{line}\n")
    ours = [
        warning for warning in warnings if "UserWarning" not in warning
    ]  # torch has something to say of pickles
    assert all(
        warning.startswith("warning: ") and "trainer_000001.pt" in warning for warning in ours
    )
    assert not (tmp_path / "touched").exists()


def test_run_of_an_older_version_is_told_what_it_can_do(refused, tmp_path):
    (tmp_path / "given").mkdir()
    (tmp_path / "given/trainer_state.pt").touch()
    assert "--load-weights takes a model_*.pt" in refused("--resume", "given")


def test_weights_of_another_hidden_size(refused, run):
    model = next(run.glob("model_*.pt"))
    line = refused("--load-weights", model, "--hidden-size", "64")
    assert (
        "--load-weights" in line
        and "--hidden-size" in line
        and "[64, 118]" in line
        and "[32, 118]" in line
    )


@pytest.mark.parametrize(
    "changed, named",
    [
        ("--hidden-size 64", "--hidden-size"),
        ("--env-id pong", "--env-id"),
        ("--optimizer adam", "--optimizer"),
    ],
)
def test_resuming_with_what_the_checkpoint_does_not_fit(refused, run, changed, named):
    line = refused("--resume", run, "--total-timesteps", "512", *changed.split())
    assert "--resume" in line and named in line


# Configuration files.


@pytest.mark.parametrize(
    "text, named",
    [
        ("gamma: [0.9\nseed: {", "ParserError"),
        ("- gamma\n- seed\n", "list"),
        ("", "NoneType"),
        ("gama: 0.9", "gama gamma"),
        ("zzzzzz: 1", "zzzzzz"),
        ("update_epochs: many", "--update-epochs many"),
        ("clip_rewards: 3", "--clip-rewards 3"),
        ("device: tpu", "device tpu"),
        ("optimizer: true", "optimizer"),
        ("env: {nonsense: 3}", "nonsense"),
    ],
)
def test_wrong_configuration_is_one_line_that_names_it(refused, tmp_path, text, named):
    (tmp_path / "given.yaml").write_text(text)
    line = refused("--config", "given.yaml")
    assert all(name in line for name in named.split()), line


def test_value_out_of_bounds_in_a_configuration_is_named_as_its_flag(refused, tmp_path):
    (tmp_path / "given.yaml").write_text("gae_lambda: 1.5")
    line = refused("--config", "given.yaml")
    assert "--config given.yaml" in line and "--gae-lambda 1.5" in line


def test_numbers_of_a_configuration_may_be_written_as_people_write_them(tmp_path):
    (tmp_path / "given.yaml").write_text(
        "learning_rate: 1e-3\ntotal-timesteps: 20_000\nenv: {frameskip: 2}\ntime_limit: null"
    )
    args, _ = ppo.parse_args(
        ["--config", str(tmp_path / "given.yaml"), "--env.num_balls", "3", "--num_envs=64"]
    )
    assert (args.learning_rate, args.total_timesteps, args.time_limit, args.num_envs) == (
        1e-3,
        20_000,
        None,
        64,
    )
    assert args.env == {"frameskip": 2, "num_balls": 3}


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
    result = run_script("--load-weights", "given.pt", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith(
        "error: --load-weights given.pt"
    )  # after a warning of torch's
    assert not (tmp_path / "touched").exists()


def test_process_leaves_no_workers_when_an_argument_is_wrong(tmp_path):
    result = run_script("--num-workers", "2", "--minibatch-size", "4096", cwd=tmp_path, timeout=60)
    assert "--minibatch-size 4096" in the_line(result.returncode, result.stderr)


def test_xla_script_without_torch_xla_says_what_installs_it(tmp_path):
    # torch_xla has a virtual environment of its own, so here it is really missing.
    result = run_script(cwd=tmp_path, small=False, script=ROOT / "ppo_lstm_puffer_xla.py")
    assert result.returncode != 0
    assert "No module named 'torch_xla'" in result.stderr and "make setup-xla" in result.stderr
