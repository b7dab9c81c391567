"""A wrong argument is one line that names the flag, the value and what is right; exit code 2."""

import shutil

import pytest
import torch
import yaml
from conftest import FOREIGN, ROOT, SMALL, run_script
from pufferlib import adapters

import ppo_lstm_puffer as ppo


def call(*arguments) -> int:
    """The script's exit code, called in this process with these after the small arguments."""
    try:
        return ppo.main(*ppo.parse_args([*SMALL, *map(str, arguments)]))
    except SystemExit as end:
        return end.code


@pytest.fixture
def refused(tmp_path, monkeypatch, capfd):
    """Calls the script in an empty folder, asserts exit code 2, returns the line or tyro's box."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def refused(*arguments) -> str:
        capfd.readouterr()
        code = call(*arguments)
        stderr = capfd.readouterr().err
        assert code == 2 and "Traceback" not in stderr, stderr
        if "╭" in stderr:
            return stderr
        line = stderr.splitlines()[-1]
        assert line.startswith("error: ") and stderr.count("error: ") == 1, stderr
        assert line.isprintable()
        return line

    return refused


# What is on the command line: arguments, and what the line must name.


@pytest.mark.parametrize(
    "arguments, named",
    [
        ("--env-id breakot", "--env-id breakot breakout"),
        ("--env-id os.path", "--env-id os.path parallel_env"),
        ("--env-id CartPole", "--env-id CartPole CartPole-v1"),
        ("--env-id CartPole-v9", "--env-id CartPole-v9 v1"),
        ("--env-id ALE/Pong-v5", "ale_py:ALE/Pong-v5"),
        ("--env-id no_such_module:Game-v0", "no_such_module"),
        ("--num-steps 16 --minibatch-size 100", "--minibatch-size 100 --num-steps 16"),
        ("--num-envs 16 --num-steps 16 --minibatch-size 512", "--minibatch-size 512 256"),
        ("--max-minibatch-size 48", "--max-minibatch-size 48 --minibatch-size"),
        ("--num-envs 0", "--num-envs 0 1"),
        ("--update-epochs 0", "--update-epochs 0"),
        ("--resume=", "--resume"),
        ("--config=", "--config"),
        ("--env-id CartPole-v1 --env.max_episode_steps 0", "--env-id CartPole-v1 positive"),
        ("--gamma 1.5", "--gamma 1.5 1"),
        ("--learning-rate nan", "--learning-rate nan"),
        ("--seed -1", "--seed -1"),
        ("--env.nonsense 3", "nonsense breakout"),
        ("--env-id CartPole-v1 --num-envs 15 --num-workers 2", "--num-envs 15 --num-workers 2"),
        ("--num-envs abc", "--num-envs abc"),
        ("--gama 0.9", "--gama --gamma"),
        ("--auto foo", "--auto"),
        ("--device tpu", "--device tpu cpu cuda"),
        ("--device cuda", "--device cuda cpu"),
        ("--optimizer adam --momentum 1", "--momentum 1 0.999"),
        ("--resume latest", "--resume latest"),
        ("--resume run/trainer_000008.pt", "--resume run/trainer_000008.pt folder"),
        ("--config nowhere.yaml", "--config nowhere.yaml"),
        ("--output-dir /sys", "--output-dir /sys"),  # where nobody may write
    ],
)
def test_wrong_argument_is_refused_by_name(refused, monkeypatch, arguments, named):
    monkeypatch.delitem(ppo.gym.registry, "ALE/Pong-v5", raising=False)  # another test's
    line = refused(*arguments.split())
    assert all(name in line for name in named.split()), line


def test_an_output_dir_that_is_a_link_to_nowhere_is_refused(refused, tmp_path):
    (tmp_path / "runs").symlink_to("gone")
    assert "--output-dir runs" in refused()


def test_numbers_may_be_written_as_people_write_them():
    words = "--total-timesteps 1e6 --minibatch-size=2.048e+3 --seed 18446744073709551616"
    args, _ = ppo.parse_args(words.split())
    assert (args.total_timesteps, args.minibatch_size, args.seed) == (10**6, 2048, 2**64)
    args, _ = ppo.parse_args(
        ["--exp-name", "12e5678", "--env.rate", "1e6", "--learning-rate", "3e0"]
    )
    assert (args.exp_name, args.env, args.learning_rate) == ("12e5678", {"rate": 1e6}, 3)
    assert isinstance(args.env["rate"], float)


def test_a_text_that_begins_with_a_dash_is_repeated(tmp_path):
    (tmp_path / "config.yaml").write_text("exp_name: -x\nseed: 2\n")
    args, _ = ppo.parse_args(["--config", str(tmp_path / "config.yaml")])
    assert (args.exp_name, args.seed) == ("-x", 2)


def test_the_device_of_a_run_of_a_sister_is_not_taken():
    config = {"device": "tpu", "seed": 2, "exp_name": "tpu", "auto": []}
    assert adapters.as_words(config) == ["--seed", "2", "--exp-name", "tpu"]


# Checkpoints.


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_trainer_state_is_refused_and_runs_no_code(refused, tmp_path, name):
    (tmp_path / "given").mkdir()
    FOREIGN[name](tmp_path / "given/trainer_state.pt")
    assert "--resume given" in refused("--resume", "given")
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("changed", ["--hidden-size 64", "--optimizer adam"])
def test_run_that_does_not_fit_is_refused_and_stays_as_it_is(refused, finished, changed):
    run = finished.run
    files = [path for path in run.iterdir() if "tfevents" not in path.name]
    before = [path.read_bytes() for path in files]
    line = refused("--resume", run, "--total-timesteps", "512", *changed.split())
    assert f"--resume {run}" in line
    assert [path.read_bytes() for path in files] == before


# Configuration files.


@pytest.mark.parametrize(
    "text, named",
    [
        ("gamma: [0.9\nseed: {", "--config given.yaml"),
        ("- gamma\n- seed\n", "--config given.yaml list"),
        ("gae_lambda: 1.5", "--gae-lambda 1.5"),
        ("env: {nonsense: 3}", "nonsense"),
        ("gama: 0.9", "--gama --gamma"),
        ("gamma: 0.9\nseed: 2\ngamma: 0.8", "gamma twice"),
        ("config: configs/pong.yaml", "config: configs/pong.yaml"),
        ("update_epochs: many", "--update-epochs many"),
    ],
)
def test_wrong_configuration_is_refused_by_name(refused, tmp_path, text, named):
    (tmp_path / "given.yaml").write_text(text)
    said = refused("--config", "given.yaml")
    assert all(name in said for name in named.split()), said


def test_configuration_may_be_written_as_people_write_it(tmp_path):
    text = "learning_rate: 1e-3\ntotal-timesteps: 2e4\nenv: {frameskip: 2, since: 2021-03-04}\n"
    (tmp_path / "given.yaml").write_text(f"{text}time_limit: null\n")
    flags = ["--env.num_balls", "2", "--env.num-balls=3", "--num_envs=64", "--env.frameskip", "5"]
    flags.append("--total-timesteps=30_000")
    args, _ = ppo.parse_args(["--config", str(tmp_path / "given.yaml"), *flags])
    assert (args.learning_rate, args.total_timesteps, args.num_envs) == (1e-3, 30_000, 64)
    assert args.env == {"frameskip": 5, "num_balls": 3, "since": "2021-03-04"}
    (tmp_path / "given.yaml").write_text("# nothing yet\n")
    assert ppo.parse_args(["--config", str(tmp_path / "given.yaml")])[0].seed == 1


def test_a_configuration_may_say_which_run_goes_on_and_a_home_may_be_a_tilde(
    finished, tmp_path, monkeypatch
):
    run = finished.run
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(run, tmp_path / "runs" / run.name)
    latest = "resume: latest\noutput-dir: ~/runs\ntotal_timesteps: 512\n"
    for text in latest, f"resume: ~/runs/{run.name}\n":
        (tmp_path / "again.yaml").write_text(text)
        args, resumed = ppo.parse_args(["--config", "~/again.yaml"])
        assert resumed["step"] == 2048 and args.hidden_size == 32
        assert resumed["folder"] == tmp_path / "runs" / run.name
    assert call("--output-dir", "~/mine", "--total-timesteps", "256") == 0
    assert len(list((tmp_path / "mine").iterdir())) == 1


def test_what_was_auto_is_resolved_anew(tmp_path, monkeypatch):
    args, _ = ppo.parse_args(["--precision", "auto"])
    config = vars(args) | {"device": "cuda", "precision": "none", "num_workers": 14}
    assert sorted(args.auto) == ["device", "num_workers", "precision"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    again, _ = ppo.parse_args(["--config", str(tmp_path / "config.yaml")])
    assert vars(again) == vars(args) | {"config": again.config}
    told, _ = ppo.parse_args(["--num-workers", "0", "--precision", "float32", "--device", "cpu"])
    assert told.auto == []


VALUES = {
    "None": None,
    "1.2.3e4": "1.2.3e4",
    "2021-03-04": "2021-03-04",
    "[2021-03-04, 1e-3, '1e-3', 'x']": ["2021-03-04", 1e-3, "1e-3", "x"],
    "{1: 2, a: {b: 2021-03-04}}": {1: 2, "a": {"b": "2021-03-04"}},
    "1e-3": 1e-3,
    "true": True,
    "'true'": "true",
    "null": None,
    "#f00": "#f00",
    "16:9": "16:9",
    "''": "",
    "{a": "{a",
    "grün 🌱": "grün 🌱",
}


@pytest.mark.parametrize("text", VALUES)
def test_value_for_the_environment_keeps_its_type_in_config_and_checkpoint(tmp_path, text):
    args, _ = ppo.parse_args(["--env.some-key", text])
    assert repr(args.env) == repr({"some_key": VALUES[text]})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(vars(args), sort_keys=False))
    again, _ = ppo.parse_args(["--config", str(tmp_path / "config.yaml")])
    torch.save({"config": vars(args)}, tmp_path / "trainer_state.pt")
    resumed, _ = ppo.parse_args(["--resume", str(tmp_path)])
    assert repr(again.env) == repr(resumed.env) == repr(args.env)
    other, _ = ppo.parse_args(["--resume", str(tmp_path), "--env.some_key", "7"])
    assert other.env == {"some_key": 7}, "flags win"


def test_xla_script_without_torch_xla_says_what_installs_it(tmp_path):
    # torch_xla has a virtual environment of its own, so here it is really missing.
    result = run_script(cwd=tmp_path, small=False, script=ROOT / "ppo_lstm_puffer_xla.py")
    assert result.returncode != 0
    assert "No module named 'torch_xla'" in result.stderr and "make setup-xla" in result.stderr
