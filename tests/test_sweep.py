"""protein_sweep.py: the search space, and sweeps over a script that misbehaves on demand."""

import contextlib
import functools
import json
import os
import pathlib
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import wsgiref.util
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import optuna
import psutil
import pytest
import yaml
from conftest import ROOT, SCRIPT, SMALL, environment, run_script, start_script, wait_for
from optuna.trial import TrialState
from pufferlib import adapters
from reading import alive

import protein_sweep
from protein_sweep import parse_parameter

optuna.logging.set_verbosity(optuna.logging.WARNING)

# A script for sweeps: a line of metrics every 20 ms whose score is x times the step. What --mode
# says goes wrong goes wrong. While the file `endless` is there, it does not end.
TRAINER = """
import dataclasses, json, os, pathlib, signal, subprocess, sys, time

@dataclasses.dataclass
class Args:
    env_id: str = "toy"
    seed: int = 1
    output_dir: str = "runs"
    time_limit: float = 1e9
    x: float = 0.5
    mode: str = "good"
    total_timesteps: int = 10
    lucky: int = -1

words = [part for word in sys.argv[1:] for part in word.split("=", 1)]
args, given = Args(), dict(zip(words[::2], words[1::2]))  # tyro would cost every trial a second
if "--config" in given:
    vars(args).update(json.load(open(given.pop("--config"))))
for field in dataclasses.fields(Args):
    name = "--" + field.name.replace("_", "-")
    if name in given:
        setattr(args, field.name, field.type(given.pop(name)))
if given:
    print("error: unknown", *given, file=sys.stderr)
    sys.exit(2)
print("GPU", os.environ.get("CUDA_VISIBLE_DEVICES"), os.sched_getaffinity(0), flush=True)
folder = pathlib.Path(args.output_dir, "run")
folder.mkdir(parents=True)
(folder / "config.yaml").write_text(json.dumps(vars(args)))
if args.mode == "refuses":
    print("error: --mode refuses: wrong", file=sys.stderr)
    sys.exit(2)
subprocess.Popen(["sleep", "1000"])  # such as an environment's worker, that nobody ends
with (folder / "metrics.jsonl").open("w") as file:
    def write(**row):
        print(json.dumps({"step": step, "time": 0.02 * step, **row}), file=file, flush=True)

    step = 0
    while 0.02 * step < args.time_limit and (step < args.total_timesteps or os.path.exists("endless")):
        step += 1
        score = args.x * step + args.seed / 1000 + 100 * (args.seed == args.lucky)
        if args.mode == "nan" and step >= 5:
            score = float("nan")
        if step == 5:
            if args.mode == "crash":
                raise RuntimeError("the environment broke")
            if args.mode == "diverge":
                write(exit_reason="diverged: losses not finite")
                sys.exit(1)
            if args.mode == "hang":
                time.sleep(1000)
            if args.mode == "stays":  # for a thread of its environment's
                write(**{"env/score": score, "exit_reason": "completed"})
                time.sleep(1000)
            if args.mode == "no more":  # episodes that end
                args.mode = "episodes"
            if args.mode == "garbage":
                print("no JSON", file=file, flush=True)
        write(**{"episodic_return" if args.mode == "episodes" else "env/score": score})
        time.sleep(0.02)
    write(exit_reason="time_limit" if 0.02 * step >= args.time_limit else "completed")
"""


@pytest.fixture
def toy(tmp_path):
    """A folder with the script and a space of x."""
    (tmp_path / "toy.py").write_text(TRAINER)
    (tmp_path / "x.yaml").write_text("x: {distribution: uniform, min: 0.0, max: 1.0}")
    return tmp_path


def toy_command(*arguments) -> list[str]:
    first = "--script toy.py --env-id toy --space x.yaml --max-cost-seconds 30 --confirm-seeds 0"
    words = [*first.split(), "--sampler", "random", *map(str, arguments)]
    return [sys.executable, str(ROOT / "protein_sweep.py"), *words]


def finish(words: list[str], cwd, code: int = 0, **options) -> str:
    """What it printed."""
    result = run_script(*words[2:], cwd=cwd, small=False, script=words[1], **options)
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout + result.stderr


def load(cwd, name: str = "toy__toy") -> optuna.Study:
    return optuna.load_study(study_name=name, storage=f"sqlite:///{cwd}/sweeps/{name}/study.db")


def processes_in(folder) -> list[psutil.Process]:
    """Living processes in this working folder: the sweep's trials, and what they started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            pass
    return found


# The space ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entry, low, middle, high",
    [
        ({"distribution": "log_normal", "min": 0.001, "max": 0.1}, 0.001, 0.01, 0.1),
        ({"distribution": "log_normal", "min": 1000, "max": 100_000}, 1000, 10_000, 100_000),
        ({"distribution": "logit_normal", "min": 0.9, "max": 0.999}, 0.9, 0.99, 0.999),
        ({"distribution": "uniform", "min": -1.0, "max": 2.0}, -1, 0.5, 2),
        ({"distribution": "int_uniform", "min": 1, "max": 5}, 1, 3, 5),
        ({"distribution": "uniform_pow2", "min": 64, "max": 1024}, 64, 256, 1024),
    ],
)
def test_a_distribution_is_even_on_the_scale_of_its_name(entry, low, middle, high):
    parameter = parse_parameter("p", entry)
    scale = parameter.distribution
    half = np.sqrt(scale.low * scale.high) if scale.log else (scale.low + scale.high) / 2
    if isinstance(scale, optuna.distributions.IntDistribution):
        half = round(half)
    ends = sorted(parameter.to_argument(end) for end in (scale.low, scale.high))
    assert ends == pytest.approx([low, high])
    assert parameter.to_argument(half) == pytest.approx(middle, rel=0.01)
    for value in low, middle, high:
        assert parameter.to_argument(parameter.nearest(value)) == pytest.approx(value)
    assert parameter.to_argument(parameter.nearest(10 * high)) == pytest.approx(high)
    assert type(parameter.to_argument(scale.low)) is type(entry["min"])


def test_choices_stay_what_they_are_and_another_value_is_none_of_them():
    parameter = parse_parameter("p", [True, "adam", 3])
    assert [parameter.nearest(one) for one in (True, "adam", 3, "sgd")] == [True, "adam", 3, None]


@pytest.mark.parametrize(
    "entry",
    [
        [],
        5,
        {"distribution": "uniform", "min": 1},
        {"distribution": "normal", "min": 0, "max": 1},
        {"distribution": "uniform", "min": 2, "max": 1},
        {"distribution": "log_normal", "min": 0, "max": 1},
        {"distribution": "log_normal", "min": "1e-5", "max": 1},
        {"distribution": "logit_normal", "min": 0.5, "max": 1},
        {"distribution": "uniform_pow2", "min": 0, "max": 8},
        {"distribution": "uniform", "min": 0, "max": float("inf")},
        {"distribution": "int_uniform", "min": 0, "max": 8, "step": 2},
        {"distribution": "int_uniform", "min": 0, "max": 8.5},
    ],
)
def test_a_wrong_line_of_a_space_is_refused(entry):
    with pytest.raises((ValueError, TypeError, KeyError)):
        parse_parameter("p", entry)


@pytest.mark.parametrize("kind", ["log_normal", "uniform", "int_uniform"])
def test_an_argument_of_whole_numbers_has_whole_ones(kind):
    parameter = parse_parameter("p", {"distribution": kind, "min": 1e1, "max": 1e2}, default=32)
    assert isinstance(parameter.distribution, optuna.distributions.IntDistribution)
    assert str(parameter.to_argument(parameter.nearest(40))) == "40"


def test_the_default_space_has_the_scripts_arguments_and_their_defaults_and_no_batch_too_small():
    content = yaml.safe_load(protein_sweep.SPACE)
    for script in ROOT.glob("ppo_lstm_puffer*.py"):
        defaults = protein_sweep.script_defaults(str(script))
        for argument, entry in content.items():
            parameter = parse_parameter(argument, entry)
            value = defaults[argument]
            nearest = parameter.to_argument(parameter.nearest(value))
            assert nearest == value or nearest == pytest.approx(value, rel=1e-3)
    smallest = content["num_envs"]["min"] * content["num_steps"]["min"]
    assert content["minibatch_size"]["max"] <= smallest
    assert content["num_steps"]["max"] <= content["minibatch_size"]["min"]


@pytest.mark.parametrize("path", ROOT.glob("configs/spaces/*.yaml"), ids=lambda path: path.stem)
def test_each_space_is_of_the_scripts_arguments(path):
    space = protein_sweep.read_yaml(str(path), "--space")
    assert all(parse_parameter(*item) for item in space.items())
    assert set(space) <= set(protein_sweep.script_defaults(str(SCRIPT)))


# Trials -------------------------------------------------------------------------------------------


def test_what_goes_wrong_is_a_failure_that_is_told_and_the_rest_goes_on(toy):
    modes = ["good", "crash", "diverge", "nan", "hang", "garbage", "episodes", "refuses"]
    (toy / "x.yaml").write_text(f"mode: {[*modes, 'stays']}\nx: [0.5, 1.0]")
    finish(toy_command("--num-trials", 1), toy)  # the defaults: good
    for mode in [mode for mode in modes[1:] if mode != "hang"]:
        load(toy).enqueue_trial({"mode": mode, "x": 1.0})
    printed = finish(toy_command("--num-trials", 7, "--workers", 2), toy)
    load(toy).enqueue_trial({"mode": "hang", "x": 1.0})
    load(toy).enqueue_trial({"mode": "stays", "x": 0.5})
    finish(toy_command("--num-trials", 9, "--hang-seconds", 4), toy)
    trials = {trial.params["mode"]: trial for trial in load(toy).trials}
    failures = {mode: trials[mode].user_attrs["failure"] for mode in modes[1:]}
    assert "failure" not in trials["good"].user_attrs
    assert trials["stays"].user_attrs["end"] == "completed", "its process did not end, its run did"
    assert "RuntimeError: the environment broke" in failures["crash"]
    assert failures["diverge"] == "diverged: losses not finite"
    assert "env/score is not finite" in failures["nan"]
    assert "no new line in metrics.jsonl for 4 seconds" in failures["hang"]
    assert "no JSON" in failures["garbage"]
    assert "which has episodic_return" in failures["episodes"]
    assert "--mode refuses: wrong" in failures["refuses"]
    assert {trials[mode].value for mode in modes[1:]} == {-np.inf}
    assert "failed: diverged: losses not finite; best" in printed
    assert "mode: good" in (toy / "sweeps/toy__toy/best.yaml").read_text()
    assert not alive(processes_in(toy))


def test_a_crash_under_torchrun_is_told_by_its_error(toy):
    launcher = f"{sys.executable} -m torch.distributed.run --local-addr 127.0.0.1"
    words = ["--launcher", launcher, "--", "--mode", "crash"]
    printed = finish(toy_command("--num-trials", 1, *words), toy, 1)
    assert "trial 0: failed: exit code 1: RuntimeError: the environment broke" in printed


def test_failures_alone_count_too_and_a_script_that_then_refuses_ends_their_sweep(toy):
    words = "--", "--mode", "crash"
    printed = finish(toy_command("--num-trials", 2, *words), toy, 1)
    assert "no trial has a score" in printed
    assert [trial.value for trial in load(toy).trials] == [-np.inf] * 2
    refuses = TRAINER.replace("words = ", "raise SystemExit(2)\nwords = ", 1)
    (toy / "toy.py").write_text(refuses)
    printed = finish(toy_command("--num-trials", 3, *words), toy, 2)
    assert "the script refused its arguments" in printed


def test_sizes_that_do_not_fit_end_no_sweep_while_its_first_trial_is_on(toy):
    (toy / "x.yaml").write_text("mode: [good, refuses]")
    finish(toy_command("--num-trials", 1), toy)
    storage = load(toy)._storage
    optuna.delete_study(study_name="toy__toy", storage=storage)
    shutil.rmtree(toy / "sweeps/toy__toy/trials")
    study = optuna.create_study(study_name="toy__toy", storage=storage, direction="maximize")
    for mode in "good", "refuses":
        study.enqueue_trial({"mode": mode})
    (toy / "endless").touch()
    words = toy_command("--num-trials", 2, "--workers", 2)[1:]
    process = start_script(*words[1:], cwd=toy, small=False, script=words[0])
    wait_for(lambda: "failure" in study.get_trials()[-1].user_attrs, process)
    (toy / "endless").unlink()
    assert process.wait(60) == 0
    assert len(study.get_trials()) == 2


def test_a_trial_has_so_many_seconds_and_counts_with_what_it_reached(toy):
    (toy / "endless").touch()
    finish(toy_command("--max-cost-seconds", 0.5, "--num-trials", 1), toy)
    (trial,) = load(toy).trials
    assert (trial.user_attrs["end"], trial.user_attrs["cost"]) == ("time_limit", 0.5)
    assert 0.5 * 22 < trial.value < 0.5 * 26  # the mean of the last tenth
    assert not alive(processes_in(toy))


def test_what_a_run_cost_is_its_own_also_where_the_metric_ends_before(toy):
    printed = finish(toy_command("--num-trials", 1, "--", "--mode", "no more", "--x", 1), toy)
    (trial,) = load(toy).trials
    assert trial.value == pytest.approx(4.001)  # in the fourth line
    assert trial.user_attrs["cost"] == pytest.approx(0.2)
    assert "in 0.2 s (completed; env/score was last there at 0.1 s)" in printed


def test_no_study_goes_on_with_another_preset_or_takes_another_ones_runs(toy):
    words = toy_command("--num-trials", 1, "--", "--config=preset.yaml")
    preset = toy / "preset.yaml"
    preset.write_text('{"x": 0.1}')
    finish(words, toy)
    preset.write_text('{"x": 0.2}')
    assert "exists with another preset" in finish(words, toy, 2)
    (toy / "sweeps/toy__toy/study.db").unlink()
    finish(words, toy)
    configs = (toy / "sweeps/toy__toy").glob("trials*/0000/run/config.yaml")
    assert sorted(json.loads(config.read_text())["x"] for config in configs) == [0.1, 0.2]


def test_hopeless_trials_are_pruned_and_count_with_what_they_had(toy):
    (toy / "x.yaml").write_text("x: {distribution: uniform, min: 0.1, max: 1.2}")
    (toy / "preset.yaml").write_text('{"x": 0.1, "total_timesteps": 60}')
    words = ["--workers", 4, "--max-cost-seconds", 1.5, "--confirm-seeds"]
    lucky = ["--", "--config=preset.yaml", "--lucky=1"]  # the first trial
    finish(toy_command("--num-trials", 1, *words, 0, *lucky), toy)
    for x in *np.linspace(1, 1.2, 14), 0.15, 0.2:  # ten have ended when the last two begin
        load(toy).enqueue_trial({"x": x})
    finish(toy_command("--num-trials", 17, *words, 1, *lucky), toy)
    trials = load(toy).trials[:17]
    again = load(toy).trials[17:]
    assert min(trial.params["x"] for trial in again) == 0.1
    assert all(trial.user_attrs["end"] == "completed" for trial in again), "these are not pruned"
    pruned = [trial for trial in trials if trial.user_attrs["end"] == "pruned"]
    assert {0.15, 0.2} == {trial.params["x"] for trial in pruned}
    assert all(trial.state == TrialState.COMPLETE for trial in pruned)
    assert 1.5 * 6 / 20 <= min(trial.user_attrs["cost"] for trial in pruned) < 60 * 0.02


def test_a_sweep_ends_after_its_seconds(toy):
    finish(toy_command("--num-trials", 1000, "--timeout", 2), toy)
    assert 1 <= len(load(toy).trials) < 100


def test_two_workers_search_around_a_preset_each_on_cores_and_a_gpu_of_its_own(toy, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 6")
    (toy / "preset.yaml").write_text('{"x": 25e-2, "total_timesteps": 40}')
    finish(toy_command("--num-trials", 4, "--workers", 2, "--", "--config=preset.yaml"), toy)
    first, second, *_ = load(toy).trials
    assert first.params["x"] == 0.25 != second.params["x"], "the preset, and then a search"
    best = yaml.safe_load((toy / "sweeps/toy__toy/best.yaml").read_text())
    assert best["total_timesteps"] == 40 and "seed" not in best
    assert first.datetime_start < second.datetime_complete
    assert second.datetime_start < first.datetime_complete
    logs = [path.read_text().split("\n")[0] for path in toy.glob("sweeps/*/trials/*/log.txt")]
    cores = protein_sweep.divide(sorted(os.sched_getaffinity(0)), 2)
    shares = [set(map(int, own.split(","))) for own in cores]
    assert set(logs) == {f"GPU 4 {shares[0]}", f"GPU 6 {shares[1]}"}
    assert protein_sweep.divide([4, 5, 7], 2) == ["4,5", "7"]  # several GPUs: for torchrun
    assert protein_sweep.divide([4, 5, 7], 4) == ["4", "5", "7", "4"]


def test_what_stands_after_the_dashes_is_fixed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("space.yaml").write_text("norm_adv: [true, false]\ngamma: [0.9, 1e-1]")
    pathlib.Path("preset.yaml").write_text("env_id: pong")
    words = ["--script", str(SCRIPT), "--space", "space.yaml", "--", "--config=preset.yaml"]
    more = ["--no-norm-adv", "--env.query", "a=b", "--env.goal=-1"]
    sweep = protein_sweep.prepare([*words, *more])
    assert [(one.argument, one.distribution.choices) for one in sweep.space] == [
        ("gamma", (0.9, 0.1))
    ]
    assert sweep.args.env_id == "pong"
    fixed = "--config preset.yaml --no-norm-adv --env.query a=b --env.goal=-1"
    assert sweep.args.fixed == tuple(fixed.split())
    trial = sweep.study.ask()  # others see what it tries from its beginning on
    assert trial.study.get_trials()[-1].params == trial.params
    assert trial.params["gamma"] in (0.9, 0.1)


@pytest.mark.parametrize("sampler", ["gp", "tpe"])
def test_samplers_learn_and_minimizing_is_maximizing_the_negative(toy, sampler):
    words = toy_command("--num-trials", 14, "--sampler", sampler, "--direction", "minimize")
    finish([*words, "--", "--total-timesteps", "2"], toy)
    trials = load(toy).trials
    best = yaml.safe_load((toy / "sweeps/toy__toy/best.yaml").read_text())["x"]
    first = min(trials, key=lambda trial: trial.value)  # x, and 0.001 for a seed
    assert best == pytest.approx(first.params["x"], abs=1e-3)
    assert best == pytest.approx(min(trial.params["x"] for trial in trials), abs=0.013)
    assert best < 0.1


# The study ----------------------------------------------------------------------------------------


def test_the_three_best_run_again_on_fresh_seeds_and_their_means_decide(toy):
    """Trial 1 has 100 points of luck that its seed gave it."""
    words = toy_command("--num-trials", 5, "--confirm-seeds", 2, "--workers", 2, "--", "--lucky=2")
    finish(words, toy)
    trials = load(toy).trials
    first = trials[:5]
    again = trials[5:]
    best = sorted(first, key=lambda trial: -trial.value)[:3]
    assert best[0].number == 1 and best[0].value > 100
    xs = [trial.params["x"] for trial in best]
    assert sorted(trial.params["x"] for trial in again) == sorted(xs * 2)
    text = (toy / "sweeps/toy__toy/best.yaml").read_text()
    assert "mean of 2 fresh seeds" in text
    assert yaml.safe_load(text)["x"] == pytest.approx(max(xs), abs=1e-3)
    finish(words, toy)
    assert len(load(toy).trials) == 11  # all is done
    load(toy).enqueue_trial({"x": 1.0})  # as what a machine had that is gone
    finish(words, toy)
    xs = [trial.params["x"] for trial in load(toy).trials[11:]]
    assert xs == [1.0] * 3  # and it is confirmed
    words[words.index("5")] = "8"
    best_of_all = load(toy).trials[11].params
    load(toy).enqueue_trial(best_of_all, user_attrs={"again": True})  # one that was interrupted
    finish(words, toy)  # two more: of the 14, 8 are of the search
    again = [trial for trial in load(toy).trials if "again" in trial.user_attrs]
    assert len(load(toy).trials) - len(again) == 8


# A sweep that waits between seeing that a trial is in the queue and taking it.
HESITANT = """
import time
from optuna.storages._rdb.models import TrialModel
import protein_sweep

def find_and_wait(*where, for_update=False, original=TrialModel.find_or_raise_by_id):
    trial = original(*where, for_update=for_update)
    if for_update and trial.state.name == "WAITING":
        time.sleep(1)
    return trial

TrialModel.find_or_raise_by_id = find_and_wait
raise SystemExit(protein_sweep.main())
"""


# A sweep that takes a trial for lost after three seconds without a heartbeat, not sixty, and comes
# back to a database that was away after one second, not ten.
HASTY = """
import optuna, time
import protein_sweep

sleep = time.sleep
time.sleep = lambda seconds: sleep(min(seconds, 1))

class Hasty(optuna.storages.RDBStorage):
    def __init__(self, *given, **how):
        super().__init__(*given, **how | {"heartbeat_interval": 1, "grace_period": 3})

optuna.storages.RDBStorage = Hasty
raise SystemExit(protein_sweep.main())
"""


def share_a_study(toy, storage: str | None = None):
    """Two processes at once on one study of 8 trials: both finish well, and each did some."""
    (toy / "hesitant.py").write_text(HESITANT)
    env = environment() | ({"OPTUNA_STORAGE": storage} if storage else {})
    both = []
    (toy / "endless").touch()
    for folder in "ab" if storage else "..":  # of two machines, or of one
        (toy / folder).mkdir(exist_ok=True)
        words = toy_command("--num-trials", 8, "--output-dir", f"{folder}/sweeps")[2:]
        options = {"cwd": toy, "small": False, "script": toy / "hesitant.py", "env": env}
        both.append(start_script(*words, **options))
    wait_for(lambda: len([*toy.rglob("metrics.jsonl")]) == 2)  # each has a trial
    (toy / "endless").unlink()
    printed = []
    for process in both:
        printed.append(process.communicate(timeout=120)[0])
        assert process.returncode == 0, printed[-1]
    assert all("\ntrial " in text for text in printed)


def assert_shared(trials: list[optuna.trial.FrozenTrial], queued=(1,)):
    done = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    assert len(done) in (8, 9)  # each may have started the last one
    xs = [trial.params["x"] for trial in done]
    assert xs.count(0.5) in queued  # the defaults, by one of them


def test_two_processes_share_one_sqlite_study(toy):
    share_a_study(toy)
    assert_shared(load(toy).trials)


@pytest.fixture
def postgresql():
    """A server of its own, in a temporary folder, on a socket there: its URL, and its pg_ctl."""
    binaries = sorted(pathlib.Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    initdb = shutil.which("initdb") or (str(binaries[-1]) if binaries else None)
    if not initdb:
        pytest.skip("no PostgreSQL here; on Debian or Ubuntu: sudo apt-get install postgresql")
    bin_folder = pathlib.Path(initdb).resolve().parent
    folder = pathlib.Path(tempfile.mkdtemp())  # pytest's own may be closed to its user again
    as_user = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []  # root it refuses
    folder.chmod(0o777)
    options = f"-c listen_addresses= -c unix_socket_directories={folder} -c fsync=off"
    words = [*as_user, bin_folder / "pg_ctl", "-D", folder / "data", "-w"]
    words += ["-o", options, "-l", folder / "log"]
    run = functools.partial(subprocess.run, check=True, cwd="/", capture_output=True)
    run([*as_user, initdb, "-D", folder / "data", "-U", "sweep", "-A", "trust"])
    run([*words, "start"])
    yield f"postgresql://sweep@/postgres?host={folder}", lambda *more: run([*words, *more])
    run([*words, "-m", "immediate", "stop"])
    shutil.rmtree(folder)


def test_two_machines_share_one_postgresql_study_and_that_it_is_away_is_no_end(toy, postgresql):
    url, control = postgresql
    share_a_study(toy, url)
    psycopg = url.replace("postgresql:", "postgresql+psycopg:")
    study = optuna.load_study(study_name="toy__toy", storage=psycopg)
    assert_shared(study.trials, queued=(1, 2))  # they have no lock in common
    study._storage._backend.engine.dispose()
    output = toy / "output"
    (toy / "hasty.py").write_text(HASTY)
    options = {"env": environment() | {"OPTUNA_STORAGE": url}, "script": toy / "hasty.py"}
    with output.open("w") as file:
        process = start_endless(toy, "--study-name", "away", stdout=file, **options)
    control("-m", "fast", "stop")
    (toy / "endless").unlink()
    wait_for(lambda: "warning: the database was away" in output.read_text())
    control("start")
    assert process.wait(timeout=300) == 0, output.read_text()


def start_endless(toy, *arguments, **options):
    """A sweep whose trials do not end by themselves, once they have begun."""
    (toy / "endless").touch()
    _, script, *words = toy_command("--num-trials", 3, "--workers", 2, *arguments)
    options = {"cwd": toy, "small": False, "script": script} | options
    process = start_script(*words, **options)
    wait_for(lambda: len(list(toy.glob("sweeps/*/trials/*/*/metrics.jsonl"))) == 2, process)
    return process


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_process_and_a_study_that_goes_on(toy, signum):
    process = start_endless(toy)
    process.send_signal(signum)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    assert "the same command goes on" in printed
    assert not alive(processes_in(toy))
    trials = load(toy).trials
    states = [trial.state.name for trial in trials]
    assert states == ["FAIL", "FAIL", "WAITING", "WAITING"]
    (toy / "endless").unlink()
    finish(toy_command("--num-trials", 3, "--workers", 2), toy)
    done = [trial for trial in load(toy).trials if trial.state == TrialState.COMPLETE]
    assert len(done) == 3
    assert {trial.params["x"] for trial in trials[:2]} <= {trial.params["x"] for trial in done}


def test_a_trial_may_be_of_several_ranks_and_none_outlives_the_sweep(tmp_path):
    (tmp_path / "space.yaml").write_text("gamma: [0.9, 0.99]")
    assert protein_sweep.GRACE > 30  # after which torchrun kills its ranks, by default
    torchrun = f"{sys.executable} -m torch.distributed.run --nproc-per-node 2 --shutdown-timeout 4"
    words = ["--space", "space.yaml", "--script", str(ROOT / "ppo_lstm_puffer_ddp.py")]
    words += ["--launcher", f"{torchrun} --local-addr 127.0.0.1", "--", *SMALL]
    words += ["--total-timesteps", "1000000000"]
    script = ROOT / "protein_sweep.py"
    process = start_script(*words, cwd=tmp_path, small=False, script=script)
    runs = "sweeps/*/trials/0000/*/metrics.jsonl"
    wait_for(lambda: any(path.read_text() for path in tmp_path.glob(runs)))
    (rank,) = [one for one in processes_in(tmp_path) if one.environ().get("RANK") == "1"]
    rank.suspend()  # it hears nothing: torchrun kills it
    process.send_signal(signal.SIGINT)
    assert process.wait(90) == 130 and not alive(processes_in(tmp_path))


def test_a_sweep_that_was_killed_takes_its_trials_with_it_and_a_later_one_runs_them(toy):
    process = start_endless(toy)
    trainers = [one for one in processes_in(toy) if "--output-dir=" in " ".join(one.cmdline())]
    heartbeats = "select count(*) from trial_heartbeats"
    with contextlib.closing(sqlite3.connect(toy / "sweeps/toy__toy/study.db")) as database:
        wait_for(lambda: database.execute(heartbeats).fetchone() == (2,))
    process.kill()
    process.communicate()
    wait_for(lambda: not any(one in processes_in(toy) for one in trainers))
    for one in processes_in(toy):  # what a trial of this sort leaves behind
        one.kill()
    with sqlite3.connect(toy / "sweeps/toy__toy/study.db") as database:
        database.execute("update trial_heartbeats set heartbeat = datetime('now', '-2 minutes')")
    (toy / "endless").unlink()
    lost = [trial.params["x"] for trial in load(toy).trials]
    finish(toy_command("--num-trials", 2, "--confirm-seeds", 1), toy)
    done = [trial.params["x"] for trial in load(toy).trials if trial.state == TrialState.COMPLETE]
    assert sorted(done) == sorted(lost * 2)  # and they were confirmed


def test_a_trial_that_the_database_has_lost_is_no_end_of_the_sweep(toy):
    """It was away for longer than a heartbeat's grace, and another machine gave the trial up."""
    (toy / "hasty.py").write_text(HASTY)
    process = start_endless(toy, "--num-trials", 4, script=toy / "hasty.py")
    study = load(toy)
    for trial in study.trials:
        study._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
    (toy / "endless").unlink()
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0, printed
    assert "warning: the database was away" in printed
    assert len(load(toy).get_trials(states=(TrialState.COMPLETE,))) == 4


def test_whoever_reads_may_be_gone(toy):
    reader, writer = os.pipe()
    with open(writer, "w") as file:
        process = start_endless(toy, "--num-trials", 2, stdout=file)
    os.close(reader)
    (toy / "endless").unlink()
    assert process.wait(120) == 0
    assert len(load(toy).get_trials(states=(TrialState.COMPLETE,))) == 2


def test_a_file_of_metrics_that_begins_again_is_read_anew(toy):
    run = protein_sweep.Run(["true"], toy / "run", "x")
    metrics = toy / "run/one/metrics.jsonl"
    metrics.parent.mkdir()
    for times in (1, 2, 3), (1, 2):
        metrics.write_text("".join(f'{{"time": {time}, "x": {time}}}\n' for time in times))
        seen = run.seen
        run.read()
        assert run.seen > seen and run.points == [(time, time) for time in times]


def test_texts_for_the_environment_stay_texts(toy, monkeypatch):
    monkeypatch.chdir(toy)
    sweep = protein_sweep.prepare(toy_command("--num-trials", 1)[2:])
    trial = optuna.trial.FixedTrial({}, number=3)
    for value in "off", 5, 0.5, False, [1, "2"], "0x_":
        word = sweep.command(trial, {"env.mode": value}, toy)[-1]
        assert adapters.parse_value(word.removeprefix("--env.mode=")) == value and "\n" not in word
    assert adapters.parse_value("0x_") == "0x_"
    assert sweep.command(trial, {"num_workers": None}, toy)[-2:] == ["--num-workers", "None"]


def test_trials_that_end_at_once_write_one_best_yaml(toy, monkeypatch):
    finish(toy_command("--num-trials", 1), toy)
    monkeypatch.chdir(toy)
    sweep = protein_sweep.prepare(toy_command("--num-trials", 2)[2:])
    (trial,) = sweep.study.trials
    with ThreadPoolExecutor(4) as pool:
        ends = [pool.submit(sweep.after_trial, sweep.study, trial) for _ in range(100)]
    for one in ends:
        one.result()
    assert yaml.safe_load((sweep.folder / "best.yaml").read_text())["x"] == trial.params["x"]


def test_a_finished_study_goes_on_with_more_trials_and_refuses_to_become_another(toy):
    finish(toy_command("--num-trials", 2), toy)
    finish(toy_command("--num-trials", 3, "--script", "./toy.py"), toy)  # another way to it
    assert len(load(toy).trials) == 3
    printed = finish(toy_command("--num-trials", 3, "--metric", "env/other"), toy, 2)
    assert "--study-name toy__toy: exists with another metric; take another" in printed


@pytest.mark.parametrize(
    "wrong, right, message",
    [
        (["--", "--mode", "refuses"], ["--", "--mode", "good"], "error: --mode refuses: wrong"),
        (["--space", "wrong.yaml"], [], "error: --mode refuses: wrong"),
        (
            ["--", "--mode", "episodes"],
            ["--metric", "episodic_return", "--", "--mode", "episodes"],
            "no env/score in metrics.jsonl, which has episodic_return",
        ),
    ],
)
def test_a_command_that_is_wrong_ends_at_its_first_trial_and_goes_on_corrected(
    toy, wrong, right, message
):
    (toy / "wrong.yaml").write_text("mode: [refuses]")
    printed = finish(toy_command("--num-trials", 2, "--workers", 2, *wrong), toy, 2)
    assert message in printed and "Traceback" not in printed
    finish(toy_command("--num-trials", 2, *right), toy)
    assert len(load(toy).get_trials(states=(TrialState.COMPLETE,))) == 2


def test_a_refused_trial_takes_no_study_with_it_on_which_another_machine_works(toy, monkeypatch):
    monkeypatch.chdir(toy)
    command = toy_command("--num-trials", 3, "--", "--mode", "refuses")
    protein_sweep.prepare(command[2:])
    elsewhere = load(toy).ask()
    finish(command, toy, 2)
    assert elsewhere.number in [trial.number for trial in load(toy).trials]


def test_a_password_is_not_told(toy, monkeypatch):
    monkeypatch.setenv("OPTUNA_STORAGE", "postgresql://user:secret@/x?host=/nowhere")
    printed = finish(toy_command("--num-trials", 1), toy, 2)
    assert printed.startswith("error: --storage: ") and "secret" not in printed


def test_a_copy_of_the_script_runs_alone_and_in_a_folder_of_any_name(toy):
    name = "q?x=1/p%20q/b#c d"
    python, script, *words = toy_command("--num-trials", 1, "--output-dir", name)
    words = [python, shutil.copy(script, toy), *words]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run(words, cwd=toy, env=env, check=True, capture_output=True)
    assert (toy / name / "toy__toy/study.db").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--script", "none.py"], "--script none.py: "),
        (["--space", "none.yaml"], "--space none.yaml: "),
        (["--space", "odd.yaml"], "--space odd.yaml: "),
        (["--space", "list.yaml"], "--space list.yaml: "),
        (["--space", "wrong.yaml"], "--space, x: 5, not as in SPACE: "),
        (["--workers", "0"], "--workers 0: must be above 0"),
        (["--max-cost-seconds", "-1"], "--max-cost-seconds -1.0: must be above 0"),
        (["--hang-seconds", "nan"], "--hang-seconds nan: must be above 0"),
        (["--storage", "mysterysql://x"], "--storage: Can't load plugin"),
        (["--", "--output-dir", "x"], "output_dir: the sweep gives this itself"),
        (["--", "--config", "none.yaml"], "-- --config none.yaml: "),
        (["--", "--seed=3"], "seed: the sweep gives this itself"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(toy, arguments, message, monkeypatch, capsys):
    monkeypatch.chdir(toy)
    (toy / "odd.yaml").write_text("x: !!bool x")  # no YAMLError, but a KeyError
    (toy / "list.yaml").write_text("[x]")
    (toy / "wrong.yaml").write_text("x: 5")
    monkeypatch.setattr(sys, "argv", toy_command(*arguments)[1:])
    assert protein_sweep.main() == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"error: {message}") and errors.count("\n") == 1


def test_a_sweep_of_the_trainer_ends_with_a_configuration_that_the_trainer_takes(tmp_path):
    """The real script, an argument of its environment, and what optuna-dashboard shows of it."""
    space = "learning_rate: {distribution: log_normal, min: 0.001, max: 0.1}\nenv.frameskip: [2, 4]"
    (tmp_path / "space.yaml").write_text(space)
    fixed = [word if word != "2048" else "8192" for word in SMALL]
    options = "--space space.yaml --num-trials 2 --workers 2 --confirm-seeds 0"
    words = [sys.executable, str(ROOT / "protein_sweep.py"), "--script", str(SCRIPT)]
    words += options.split()
    printed = finish([*words, "--", *fixed], tmp_path)
    assert "no trial beats these in both" in printed
    folder = tmp_path / "sweeps/breakout__ppo_lstm_puffer"
    for name in "pareto.png", "importances.png":
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    study = load(tmp_path, "breakout__ppo_lstm_puffer")
    assert study.trials[0].params["learning_rate"] == 0.06  # the script's default
    best = yaml.safe_load((folder / "best.yaml").read_text())
    shown = study.best_trial.params
    assert best["learning_rate"] == pytest.approx(shown["learning_rate"], rel=1e-3)
    assert best["env"] == {"frameskip": shown["env.frameskip"]}
    again = ("--config", str(folder / "best.yaml"), "--total-timesteps", "512")
    result = run_script(*again, cwd=tmp_path, small=False)
    assert result.returncode == 0, result.stderr
    config = yaml.safe_load(next(tmp_path.glob("runs/*/config.yaml")).read_text())
    assert config["learning_rate"] == best["learning_rate"] and config["hidden_size"] == 32

    from optuna_dashboard import wsgi

    request = {"PATH_INFO": "/api/studies"}
    wsgiref.util.setup_testing_defaults(request)
    dashboard = wsgi(f"sqlite:///{folder}/study.db")
    answer = b"".join(dashboard(request, lambda status, headers, error=None: None))
    (summary,) = json.loads(answer)["study_summaries"]
    assert summary["study_name"] == "breakout__ppo_lstm_puffer"
