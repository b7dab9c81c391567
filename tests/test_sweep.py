"""protein_sweep.py: the search space, the sampler, and sweeps from the outside over a script that can misbehave on demand."""

import csv
import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import wsgiref.util

import numpy as np
import optuna
import psutil
import pytest
import yaml
from conftest import ROOT, SCRIPT, SMALL, environment, run_on_a_terminal, run_script, start_script
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

import protein_sweep
from protein_sweep import (
    Cube,
    ProteinSampler,
    UsageError,
    parse_space,
    to_arguments,
    to_params,
    with_progress,
)

optuna.logging.set_verbosity(optuna.logging.WARNING)

# A script that a sweep can run: a line of metrics every 20 ms whose score is x times the step, until --total-timesteps. What --mode says
# goes wrong goes wrong. While the file `endless` is there, it does not end.
TRAINER = """
import dataclasses, json, os, pathlib, signal, subprocess, sys, time

@dataclasses.dataclass
class Args:
    env_id: str = "toy"
    seed: int = 1
    output_dir: str = "runs"
    x: float = 0.5
    mode: str = "good"
    total_timesteps: int = 10
    lucky: int = -1

words = [part for word in sys.argv[1:] for part in word.split("=", 1)]
args, given = Args(), dict(zip(words[::2], words[1::2]))  # tyro would cost every trial a second
for field in dataclasses.fields(Args):
    name = "--" + field.name.replace("_", "-")
    setattr(args, field.name, field.type(given.pop(name, field.default)))
if given:
    print("error: unknown", *given, file=sys.stderr)
    sys.exit(2)
print("GPU", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
folder = pathlib.Path(args.output_dir, "run")
folder.mkdir(parents=True)
if args.mode == "refuses":
    print("error: --env-id toy: unknown", file=sys.stderr)
    sys.exit(2)
subprocess.Popen(["sleep", "1000"])  # such as an environment's worker, that nobody ends
with (folder / "metrics.jsonl").open("w") as file:
    step = 0
    while step < args.total_timesteps or os.path.exists("endless"):
        step += 1
        score = args.x * step + args.seed / 1000 + 100 * (args.seed == args.lucky)
        if step == 5:
            if args.mode.endswith("crash"):
                raise RuntimeError("the environment broke")
            if args.mode == "diverge":
                print(json.dumps({"step": step, "time": 0.1, "exit_reason": "diverged: losses not finite"}), file=file, flush=True)
                sys.exit(1)
            if args.mode == "nan":
                score = float("nan")
            if args.mode == "hang":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(1000)
        if args.mode != "rare" or step in (1, 60):
            key = "episodic_return" if args.mode.startswith("episodes") else "env/score"
            print(json.dumps({"step": step, "time": 0.02 * step, key: score}), file=file, flush=True)
        time.sleep(0.02)
    if args.mode != "old":
        print(json.dumps({"step": step, "time": 0.02 * step, "exit_reason": "completed"}), file=file)
"""


@pytest.fixture
def toy(tmp_path):
    """A folder with the script and a space of x."""
    (tmp_path / "toy.py").write_text(TRAINER)
    (tmp_path / "x.yaml").write_text("x: {distribution: uniform, min: 0.0, max: 1.0}")
    return tmp_path


def command(*arguments) -> list[str]:
    return [sys.executable, str(ROOT / "protein_sweep.py"), *map(str, arguments)]


def toy_command(*arguments) -> list[str]:
    first = (
        "--script",
        "toy.py",
        "--env-id",
        "toy",
        "--space",
        "x.yaml",
        "--max-cost-seconds",
        30,
        "--confirm-seeds",
        0,
    )
    return command(*first, *arguments)


def finish(words: list[str], cwd, code: int = 0) -> subprocess.CompletedProcess:
    result = run_script(*words[2:], cwd=cwd, small=False, script=words[1])
    assert result.returncode == code, result.stderr
    return result


def load(cwd, name: str = "toy__toy") -> optuna.Study:
    return optuna.load_study(study_name=name, storage=f"sqlite:///{cwd}/sweeps/{name}/study.db")


def processes_in(folder) -> list[psutil.Process]:
    """Living processes whose working folder is this one: the sweep's trials, and what they started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            pass
    return found


def wait_until(condition, timeout: float = 30):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.05)


# The space ----------------------------------------------------------------------------------------------------------------

SPACE = yaml.safe_load("""
lr: {distribution: log_normal, min: 0.001, max: 0.1}
steps: {distribution: log_normal, min: 1000, max: 100_000}
gamma: {distribution: logit_normal, min: 0.9, max: 0.999}
alpha: {distribution: uniform, min: -1.0, max: 1.0}
epochs: {distribution: int_uniform, min: 1, max: 4}
num_envs: {distribution: uniform_pow2, min: 64, max: 1024}
optimizer: [muon, adam]
norm: [true, false]
""")


def middle_of(name: str):
    (parameter,) = parse_space({name: SPACE[name]}, "test")
    cube = Cube({parameter.name: parameter.distribution})
    return to_arguments([parameter], cube.decode(np.full(cube.dim, 0.5)), {})[name]


def test_the_middle_of_each_distribution_is_where_its_name_says():
    assert middle_of("lr") == pytest.approx(0.01)  # the geometric mean
    assert middle_of("steps") == pytest.approx(10_000, rel=0.01)
    assert middle_of("gamma") == pytest.approx(0.99)  # as far from 0.9 as from 0.999
    assert middle_of("alpha") == pytest.approx(0, abs=1e-9)
    assert middle_of("num_envs") == 256


@pytest.mark.parametrize("kind", ["log_normal", "int_uniform"])
def test_half_of_a_run_is_seen_as_a_run_of_half_the_steps_but_for_its_progress(kind):
    content = {
        "total_timesteps": {"distribution": kind, "min": 1000, "max": 100_000},
        "learning_rate": SPACE["lr"],
    }
    cube = Cube(
        {parameter.name: parameter.distribution for parameter in parse_space(content, "test")}
    )
    long, short = (
        cube.encode({"total_timesteps": steps, "learning_rate": 0.01})[None]
        for steps in (40_000, 20_000)
    )
    half, whole = (with_progress(cube, x, np.array([p]))[0] for x, p in ((long, 0.5), (short, 1.0)))
    np.testing.assert_allclose(half[:-1], whole[:-1], atol=1e-4)
    assert half[-1] < whole[-1]
    np.testing.assert_array_equal(with_progress(cube, long, np.ones(1))[0, :-1], long[0])


def test_arguments_stay_in_bounds_have_their_type_and_survive_the_round_trip():
    space, rng = parse_space(SPACE, "test"), np.random.default_rng(0)
    cube = Cube({parameter.name: parameter.distribution for parameter in space})
    seen = {name: set() for name in SPACE}
    corners = [np.zeros(cube.dim), np.ones(cube.dim)]
    for x in [*corners, *rng.random((200, cube.dim))]:
        params = cube.decode(x)
        for parameter in space:
            assert parameter.distribution._contains(
                parameter.distribution.to_internal_repr(params[parameter.name])
            )
        np.testing.assert_allclose(
            cube.encode(cube.decode(cube.encode(params))), cube.encode(params), atol=1e-9
        )
        arguments = to_arguments(space, params, {})
        for name, value in arguments.items():
            if isinstance(SPACE[name], list):
                assert value in SPACE[name] and type(value) is type(SPACE[name][0])
            else:
                assert SPACE[name]["min"] <= value <= SPACE[name]["max"], name
                assert isinstance(value, type(SPACE[name]["min"]))
            seen[name].add(value)
        again = to_arguments(space, to_params(space, arguments), {})
        assert all(
            again[name] == pytest.approx(value, rel=1e-3)
            for name, value in arguments.items()
            if name not in ("optimizer",)
        )
    assert seen["num_envs"] == {64, 128, 256, 512, 1024} and seen["epochs"] == {1, 2, 3, 4}
    assert seen["optimizer"] == {"muon", "adam"} and seen["norm"] == {True, False}


def test_a_minibatch_is_never_larger_than_the_batch():
    space = parse_space(
        {
            name: {"distribution": "uniform_pow2", "min": 16, "max": 4096}
            for name in ("num_envs", "minibatch_size")
        },
        "test",
    )
    params = {"log2(num_envs)": 4, "log2(minibatch_size)": 12}
    assert to_arguments(space, params, {"num_steps": 32})["minibatch_size"] == 16 * 32
    assert to_arguments(space, params, {"num_steps": 512})["minibatch_size"] == 4096


@pytest.mark.parametrize(
    "content, message",
    [
        ("[1, 2]", "not a mapping"),
        ("lr: {distribution: normal, min: 0.1, max: 1.0}", "log_normal"),
        ("lr: {distribution: uniform, min: 1.0, max: 0.5}", "the first smaller"),
        ("lr: {distribution: [1], min: 1.0, max: 2.0}", "log_normal"),
        (
            "lr: {distribution: log_normal, min: 1e-5, max: 0.5}",
            "1.0e-5",
        ),  # YAML reads 1e-5 as a word
        ("lr: {distribution: log_normal, min: 0.0, max: 0.5}", "above 0"),
        ("gamma: {distribution: logit_normal, min: 0.9, max: 1.0}", "below 1"),
        ("n: {distribution: uniform_pow2, min: 48, max: 64}", "powers of two"),
        ("n: {distribution: int_uniform, min: 1.5, max: 3}", "whole numbers"),
        ("n: {distribution: uniform, min: 1.5}", "exactly distribution, min and max"),
        ("n: []", "list of choices"),
    ],
)
def test_a_wrong_space_is_one_line_that_says_what_is_right(content, message):
    with pytest.raises(UsageError) as error:
        parse_space(yaml.safe_load(content), "test.yaml")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_default_space_has_arguments_of_the_scripts_and_their_defaults_inside():
    content = yaml.safe_load((ROOT / "benchmark/sweeps/default.yaml").read_text())
    for script in ("ppo_lstm_puffer.py", "ppo_lstm_puffer_ddp.py"):
        defaults = protein_sweep.script_defaults(ROOT / script)
        for name, entry in content.items():
            if isinstance(entry, list):
                assert defaults[name] in entry, name
            else:
                assert entry["min"] <= defaults[name] <= entry["max"], name
                assert isinstance(defaults[name], type(entry["min"])), name


def test_fixed_arguments_are_read_as_the_script_reads_them():
    words = [
        "--num-envs",
        "16",
        "--lr=1.0e-3",
        "--no-compile",
        "--track",
        "--env.frame-skip",
        "2",
        "--total-timesteps",
        "30_000_000",
    ]
    expected = {
        "num_envs": 16,
        "lr": 1e-3,
        "compile": False,
        "track": True,
        "env": {"frame_skip": 2},
        "total_timesteps": 30_000_000,
    }
    assert protein_sweep.given_arguments(words) == expected


# The sampler --------------------------------------------------------------------------------------------------------------

CUBE = {
    "lr": FloatDistribution(1e-4, 1e-1, log=True), "alpha": FloatDistribution(0, 1), "beta": FloatDistribution(0, 1),
    "size": IntDistribution(1, 8), "kind": CategoricalDistribution(["a", "b"]), "steps": IntDistribution(10, 1000, log=True),
}  # fmt: skip


def test_what_is_rated_is_what_optuna_would_run():
    cube, x = Cube(CUBE), np.random.default_rng(1).random((500, Cube(CUBE).dim))
    x[:100] = x[:100].round()  # the ends
    expected = np.array([cube.encode(cube.decode(one)) for one in x])
    assert np.abs(cube.rounded(x) - expected).max() < 1e-12 and np.abs(x - expected).max() > 0.1


def quality(params: dict, noise: float = 0.0) -> float:
    """Best with lr 0.01, alpha 0.3, beta 0.7, size 6, kind b; 1 at the most."""
    off = (
        (math.log10(params["lr"]) + 2) ** 2
        + 6 * (params["alpha"] - 0.3) ** 2
        + 6 * (params["beta"] - 0.7) ** 2
    )
    off += ((params["size"] - 6) / 4) ** 2 + 0.3 * (params["kind"] == "a")
    return math.exp(-off) + noise


def observe(study: optuna.Study, trial: optuna.Trial, sign: int = 1):
    """A trial whose score grows with the steps, at a cost of a second for ten; seen at three points."""
    rng = np.random.default_rng(trial.number)
    curve = [[p, 0.1 * p * trial.params["steps"]] for p in (0.3, 0.6, 1.0)]
    for point in curve:
        score = (
            quality(trial.params) * (1 - math.exp(-point[1] / 20)) + 0.01 * rng.standard_normal()
        )
        point.append(sign * score)
    trial.set_user_attr("curve", curve)
    study.tell(trial, curve[-1][2])


def make_study(seed: int = 1, storage=None, sampler=None, direction="maximize") -> optuna.Study:
    sampler = sampler or ProteinSampler(CUBE, seed, max_cost=100)
    return optuna.create_study(
        storage=storage, study_name="s", sampler=sampler, load_if_exists=True, direction=direction
    )


def go_on(study: optuna.Study, trials: int, sign: int = 1) -> list[dict]:
    for _ in range(trials):
        observe(study, study.ask(CUBE), sign)
    return [trial.params for trial in study.trials]


def test_pareto_front_is_what_nothing_beats():
    rng = np.random.default_rng(0)
    costs, scores = rng.integers(1, 30, 200).astype(float), rng.integers(0, 50, 200).astype(float)
    costs[50], scores[50] = costs[51], scores[51]  # twins: one of them is enough
    front = protein_sweep.pareto_front(costs, scores)
    beaten = [
        ((costs <= c) & (scores >= s) & ((costs < c) | (scores > s))).any()
        for c, s in zip(costs, scores)
    ]
    assert {(costs[i], scores[i]) for i in front} == {
        (c, s) for c, s, b in zip(costs, scores, beaten) if not b
    }
    assert (np.diff(costs[front]) > 0).all() and (np.diff(scores[front]) > 0).all()


def test_a_sampler_started_anew_on_the_same_storage_goes_on_as_the_old_one_would_have(tmp_path):
    uninterrupted = go_on(make_study(), 14)
    storage = f"sqlite:///{tmp_path}/study.db"
    go_on(make_study(storage=storage), 12)
    assert go_on(make_study(storage=storage), 2) == uninterrupted
    assert go_on(make_study(seed=2), 12) != uninterrupted[:12]


def test_the_sampler_finds_more_than_chance_and_than_it_began_with():
    found, chance = [], []
    for seed in (1, 2, 3):
        ours, other = make_study(seed), make_study(sampler=optuna.samplers.RandomSampler(seed=seed))
        go_on(ours, 30), go_on(other, 30)
        found.append(quality(ours.best_params))
        chance.append(quality(other.best_params))
        assert found[-1] > max(quality(trial.params) for trial in ours.trials[:5])
    assert np.mean(found) > np.mean(chance) + 0.1


def test_minimizing_is_maximizing_the_negative():
    assert go_on(make_study(direction="minimize"), 13, sign=-1) == go_on(make_study(), 13)


def test_a_trial_that_would_be_stopped_is_judged_by_how_far_it_will_come():
    """No trial here ends within the cost, and in full all would score the same: the faster comes farther."""
    space = {"speed": FloatDistribution(0.1, 1), "nothing": FloatDistribution(0, 1)}
    study = optuna.create_study(
        sampler=ProteinSampler(space, 1, max_cost=100), direction="maximize"
    )
    for _ in range(20):
        trial = study.ask(space)
        share = 0.5 * trial.params["speed"]
        curve = [[p * share, p * 100, p * share] for p in (0.3, 0.6, 1.0)]
        trial.set_user_attr("curve", curve)
        study.tell(trial, curve[-1][2])
    assert np.mean([trial.params["speed"] for trial in study.trials[10:]]) > 0.9


def test_a_trial_that_would_be_stopped_is_left_where_others_would_not_be():
    """More steps are better without an end, but those that the cost cuts short have no bonus for their end."""
    space = {"steps": IntDistribution(10, 100_000, log=True)}
    study = optuna.create_study(
        sampler=ProteinSampler(space, 1, max_cost=100), direction="maximize"
    )
    for _ in range(20):
        trial = study.ask(space)
        full = trial.params["steps"] / 10
        cost = min(full, 100)
        curve = [
            [p * cost / full, p * cost, math.log(p * cost) + (p * cost == full)]
            for p in (0.3, 0.6, 1.0)
        ]
        trial.set_user_attr("curve", curve)
        study.tell(trial, curve[-1][2])
    assert np.mean([trial.params["steps"] <= 1050 for trial in study.trials[8:]]) > 0.9


def test_costs_above_the_largest_do_not_stop_the_sampler():
    study = optuna.create_study(
        sampler=ProteinSampler(CUBE, 1, max_cost=0.01), direction="maximize"
    )
    assert len(go_on(study, 14)) == 14


def test_a_curve_ends_with_the_last_line_whatever_its_cost():
    for cost in np.random.default_rng(0).uniform(0.1, 300, 500):
        curve = protein_sweep.learning_curve(np.array([[1.0, cost, 5.0]]), 2)
        assert curve[-1] == [0.5, cost, 5.0]


def test_what_is_running_stands_at_its_prediction_when_the_next_is_suggested():
    study, calls = make_study(), []
    go_on(study, 12)
    suggest = study.sampler.suggest
    study.sampler.suggest = lambda *words: calls.append(words) or suggest(*words)
    first, _ = study.ask(CUBE), study.ask(CUBE)
    (cube, curves, failures, none, sign, _), (*_, pending, _, _) = calls
    assert none == []
    np.testing.assert_array_equal(pending, [cube.encode(first.params)])
    for seed in (
        1,
        2,
        3,
    ):  # with the same draws: where one would be suggested that runs already, another is
        alone = suggest(cube, curves, failures, [], sign, np.random.default_rng(seed))
        beside = suggest(cube, curves, failures, [alone], sign, np.random.default_rng(seed))
        assert np.linalg.norm(alone - beside) > 0.03


def test_the_luck_of_a_run_is_shared_by_its_points_and_left_out_of_predictions():
    """Two points of the space, 5 runs each, of 5 points: runs differ by 1, points of a run by 0.1, means by nothing."""
    rng = np.random.default_rng(0)
    x, runs = np.repeat([[0.3], [0.7]], 25, axis=0), np.repeat(np.arange(10), 5)
    luck = np.repeat(rng.standard_normal(10), 5)
    process = protein_sweep.Process(x, luck + 0.1 * rng.standard_normal(50), runs, rng)
    _, deviations = process.predict(np.array([[0.3], [0.7]]))
    # The mean of five runs is known to 1 / sqrt(5), not, as of 25 independent points, to 1 / sqrt(25).
    assert (deviations > 0.2).all()
    again = protein_sweep.Process(x, luck + 0.1 * rng.standard_normal(50), np.arange(50), rng)
    assert (again.predict(np.array([[0.3], [0.7]]))[1] < 0.7 * deviations).all()
    kernel = process.kernel
    assert kernel.k2.k1.k1.constant_value > 10 * kernel.k2.k2.noise_level


def test_failures_are_kept_away_from():
    study = make_study()
    failed = []
    for _ in range(40):
        trial = study.ask(CUBE)
        failed.append(trial.params["lr"] > 0.01)  # the best lies at the edge of the cliff
        if failed[-1]:
            trial.set_user_attr("failure", "diverged")
            study.tell(trial, state=TrialState.FAIL)
        else:
            observe(study, trial)
    later = failed[20:]
    assert sum(later) < 0.35 * len(later)
    interrupted = (
        make_study()
    )  # what was interrupted has not failed: the next suggestion is as if it had not been
    others = make_study()
    go_on(others, 12), go_on(interrupted, 12)
    for study, attribute in ((interrupted, "note"), (others, "failure")):
        trial = study.ask(CUBE)
        trial.set_user_attr(attribute, "x")
        study.tell(trial, state=TrialState.FAIL)
    assert interrupted.trials[12].params == others.trials[12].params
    suggestions = [study.ask(CUBE).params for study in (interrupted, others)]
    assert suggestions[0] != suggestions[1]


def test_it_is_an_optuna_sampler_like_any_other():
    """Without a space, without curves: study.optimize, the space that the trials have, the duration as cost."""
    study = optuna.create_study(sampler=ProteinSampler(seed=1), direction="maximize")

    def objective(trial):
        a = trial.suggest_float("a", 0, 1)
        if trial.number % 5 == 4:
            raise optuna.TrialPruned
        return -((a - 0.3) ** 2)

    study.optimize(objective, n_trials=18)
    assert abs(study.best_params["a"] - 0.3) < 0.1


# Sweeps -------------------------------------------------------------------------------------------------------------------


def test_a_crash_a_divergence_a_nan_and_a_hang_are_recorded_failures_and_the_rest_goes_on(toy):
    (toy / "x.yaml").write_text("mode: [good, crash, diverge, nan, hang]")
    finish(toy_command("--num-trials", 1), toy)  # the default: good
    for mode in ("crash", "diverge", "nan", "hang"):
        load(toy).enqueue_trial({"mode": mode})
    result = finish(toy_command("--num-trials", 5, "--workers", 2, "--hang-seconds", 8), toy)
    trials = {trial.params["mode"]: trial for trial in load(toy).trials}
    assert {mode for mode, trial in trials.items() if trial.state == TrialState.COMPLETE} == {
        "good"
    }
    failures = {
        mode: trial.user_attrs["failure"] for mode, trial in trials.items() if mode != "good"
    }
    assert "the environment broke" in failures["crash"]
    assert failures["diverge"] == "diverged: losses not finite"
    assert "not finite" in failures["nan"]
    assert "no new line in metrics.jsonl for" in failures["hang"]
    assert "RuntimeError: the environment broke" in trials["crash"].user_attrs["log_tail"]
    assert not processes_in(toy)
    summary = json.loads(result.stdout)
    assert (summary["complete"], summary["failed"], summary["best"]["mode"]) == (1, 4, "good")


def test_a_hang_in_the_middle_is_a_failure_not_the_end_of_the_budget(toy):
    (toy / "x.yaml").write_text("mode: [hang]")
    (toy / "impatient.py").write_text(
        "import protein_sweep\nprotein_sweep.GRACE = 2.0\nraise SystemExit(protein_sweep.main())"
    )
    words = [
        "--script",
        "toy.py",
        "--env-id",
        "toy",
        "--space",
        "x.yaml",
        "--max-cost-seconds",
        3,
        "--num-trials",
        1,
    ]
    finish([sys.executable, toy / "impatient.py", *map(str, words)], toy)
    (trial,) = load(toy).trials
    assert (
        trial.state == TrialState.FAIL
        and "does not end within 2 seconds of SIGTERM" in trial.user_attrs["failure"]
    )
    assert protein_sweep.GRACE == 20


def test_a_trial_over_its_cost_is_stopped_and_counts_with_what_it_reached(toy):
    (toy / "endless").touch()
    words = command(
        "--script",
        "toy.py",
        "--env-id",
        "toy",
        "--space",
        "x.yaml",
        "--max-cost-seconds",
        0.5,
        "--num-trials",
        1,
    )
    finish([*words, "--confirm-seeds", "0"], toy)
    (trial,) = load(toy).trials
    assert trial.state == TrialState.COMPLETE and trial.user_attrs["end"] == "max cost"
    assert trial.user_attrs["cost"] > 0
    assert trial.user_attrs["curve"][-1][2] == trial.value > trial.user_attrs["curve"][0][2]
    assert (
        "stopped there before its schedule's end" in (toy / "sweeps/toy__toy/best.yaml").read_text()
    )
    assert not processes_in(toy)


def test_hopeless_trials_are_pruned_and_the_best_is_not(toy):
    choices = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0.1, 11, 0.2, 12]
    (toy / "x.yaml").write_text(f"x: {choices}")
    words = [
        "--script",
        "toy.py",
        "--env-id",
        "toy",
        "--space",
        "x.yaml",
        "--max-cost-seconds",
        "1.5",
        "--sampler",
        "random",
    ]
    words += ["--confirm-seeds", "0"]
    study_words = command(*words, "--num-trials", 30, "--workers", 2)  # in no certain order
    finish([*study_words, "--", "--total-timesteps", "60"], toy, 0)
    trials = load(toy).trials
    pruned = [trial for trial in trials if trial.state == TrialState.PRUNED]
    finished = sorted(trial.params["x"] for trial in trials if trial.state == TrialState.COMPLETE)
    assert pruned
    for trial in pruned:  # worse than three quarters of those that were finished by then
        assert trial.params["x"] <= np.quantile(finished, 0.4)
    # Not in full; on a busy machine one may have got there.
    assert min(trial.user_attrs["step"] for trial in pruned) < 60
    assert max(finished) == max(trial.params["x"] for trial in trials)


def test_two_workers_run_at_once_each_on_its_own_cores(toy):
    finish(toy_command("--num-trials", 4, "--workers", 2, "--", "--total-timesteps", 40), toy)
    first, second, *_ = load(toy).trials
    assert (
        first.datetime_start < second.datetime_complete
        and second.datetime_start < first.datetime_complete
    )
    for cores, workers, parts in (
        ([0, 1, 2, 3], 2, [[0, 1], [2, 3]]),
        ([0, 1, 2], 2, [[0, 1], [2]]),
        ([4, 7], 3, [[4], [7], [4]]),
    ):
        assert [part for part, _ in protein_sweep.divide(cores, [], workers)] == parts


def test_a_healthy_trial_with_rare_lines_is_out_of_budget_not_hung(toy):
    (toy / "endless").touch()
    finish(toy_command("--max-cost-seconds", 2, "--num-trials", 1, "--", "--mode", "rare"), toy)
    (trial,) = load(toy).trials
    assert trial.state == TrialState.COMPLETE and trial.user_attrs["end"] == "max cost"
    assert trial.user_attrs["cost"] == 2  # all its time, though the last of its two lines is older
    assert trial.value == pytest.approx(30, abs=0.1)


def test_a_trial_that_is_lost_again_and_again_is_a_failure():
    study = make_study(sampler=optuna.samplers.RandomSampler(seed=1))
    params = study.ask(CUBE).params
    for _ in range(protein_sweep.REQUEUES + 1):
        trial = study.trials[-1]
        protein_sweep.requeue(study, trial)  # a signal to the sweep is not the trial's fault
        assert study.ask(CUBE).params == params
        protein_sweep.requeue(study, study.trials[-1], lost=1)
        if study.trials[-1].state == TrialState.WAITING:
            assert study.ask(CUBE).params == params
    assert study.trials[-1].state == TrialState.FAIL and study.trials[-1].params == params
    assert "lost 4 times" in study.trials[-1].user_attrs["failure"]


def test_a_process_that_has_been_reaped_is_not_killed_by_its_number(monkeypatch):
    killed = []
    monkeypatch.setattr(os, "killpg", lambda *words: killed.append(words))
    run = object.__new__(protein_sweep.Run)
    run.process = subprocess.Popen(["true"], start_new_session=True)
    run.kill()  # still ours, though it may be over: not yet reaped
    run.kill()
    assert killed == [(run.process.pid, signal.SIGKILL)]


def test_the_three_best_run_again_on_fresh_seeds_and_their_means_decide(toy):
    """Trial 1 has 100 points of luck that its seed gave it."""
    words = toy_command(
        "--num-trials",
        5,
        "--confirm-seeds",
        2,
        "--workers",
        2,
        "--sampler",
        "random",
        "--",
        "--lucky",
        2,
    )
    result = finish(words, toy)
    trials = load(toy).trials
    first, again = trials[:5], trials[5:]
    best = sorted(first, key=lambda trial: -trial.value)[:3]
    assert best[0].number == 1 and best[0].value > 100
    runs = {(trial.user_attrs["again"], trial.user_attrs["seed"]) for trial in again}
    assert len(again) == 6 and runs == {
        (trial.number, seed) for trial in best for seed in (1_000_000, 1_000_001)
    }
    summary, right = json.loads(result.stdout), max(best, key=lambda trial: trial.params["x"])
    assert summary["trials"] == 5 and summary["best"]["trial"] == right.number
    assert "on fresh seeds" in (toy / "sweeps/toy__toy/best.yaml").read_text()
    finish(words, toy)
    assert len(load(toy).trials) == 11  # all is done


def test_each_worker_has_a_gpu_of_its_own_where_there_are_several(toy, monkeypatch):
    def gpus(names, workers):
        return [
            environment.get("CUDA_VISIBLE_DEVICES")
            for _, environment in protein_sweep.divide([0, 1], names, workers)
        ]

    assert gpus(["a", "b", "c"], 2) == ["a", "b"] and gpus(["a", "b"], 3) == ["a", "b", "a"]
    assert gpus(["a"], 2) == gpus([], 2) == [None, None]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 6")
    assert protein_sweep.visible_gpus() == ["4", "6"]
    finish(toy_command("--num-trials", 2, "--workers", 2, "--", "--total-timesteps", 40), toy)
    assert {path.read_text().split("\n")[0] for path in toy.glob("sweeps/*/trials/*/log.txt")} == {
        "GPU 4",
        "GPU 6",
    }


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


def share_a_study(toy, *arguments):
    """Two processes at once on one study of 8 trials; asserts that both finish well."""
    (toy / "hesitant.py").write_text(HESITANT)
    words = toy_command("--num-trials", 8, *arguments)[2:]
    both = [start_script(*words, cwd=toy, small=False, script=toy / "hesitant.py") for _ in "ab"]
    for process in both:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors


def assert_shared(trials: list[optuna.trial.FrozenTrial]):
    done = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    assert len(done) in (8, 9)  # each may have started the last one
    assert len({trial.user_attrs["process"] for trial in done}) == 2
    assert [trial.params["x"] for trial in done].count(
        0.5
    ) == 1  # the defaults were queued by one of them


def test_two_processes_share_one_sqlite_study(toy):
    share_a_study(toy)
    assert_shared(load(toy).trials)


def test_two_processes_share_one_postgresql_study(toy):
    """A server of its own, in a temporary folder, on a socket there."""
    binaries = sorted(pathlib.Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    initdb = shutil.which("initdb") or (str(binaries[-1]) if binaries else None)
    if not initdb:
        pytest.skip("no PostgreSQL here; on Debian or Ubuntu: sudo apt-get install postgresql")
    bin_folder = pathlib.Path(initdb).resolve().parent
    folder = pathlib.Path(tempfile.mkdtemp())  # pytest's own may be closed to its user again
    as_user = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []  # root it refuses
    folder.chmod(0o777)
    pg_ctl = [*as_user, bin_folder / "pg_ctl", "-D", folder / "data", "-w"]
    subprocess.run(
        [*as_user, initdb, "-D", folder / "data", "-U", "sweep", "-A", "trust"],
        check=True,
        cwd="/",
        capture_output=True,
    )
    options = f"-c listen_addresses= -c unix_socket_directories={folder} -c fsync=off"
    subprocess.run(
        [*pg_ctl, "-o", options, "-l", folder / "log", "start"],
        check=True,
        cwd="/",
        capture_output=True,
    )
    try:
        url = f"postgresql://sweep@/postgres?host={folder}"
        share_a_study(toy, "--storage", url)
        study = optuna.load_study(
            study_name="toy__toy", storage=url.replace("postgresql:", "postgresql+psycopg:")
        )
        assert_shared(study.trials)
        study._storage._backend.engine.dispose()
    finally:
        subprocess.run(
            [*pg_ctl, "-m", "immediate", "stop"], check=True, cwd="/", capture_output=True
        )
        shutil.rmtree(folder)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_no_process_and_a_study_that_goes_on(toy, signum):
    (toy / "endless").touch()
    process = subprocess.Popen(
        toy_command("--num-trials", 3, "--workers", 2),
        cwd=toy,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: len(list(toy.glob("sweeps/toy__toy/trials/*/*/*/metrics.jsonl"))) == 2)
    trainers = [one for one in processes_in(toy) if "--output-dir" in " ".join(one.cmdline())]
    process.send_signal(signum)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == (-9 if signum == signal.SIGKILL else 128 + signum)
    if (
        signum == signal.SIGKILL
    ):  # nobody is left to clean up: the kernel tells the trials, which end themselves
        wait_until(lambda: not any(one in processes_in(toy) for one in trainers))
        for one in processes_in(toy):  # what a trial of this sort leaves behind
            one.kill()
        return
    assert "the same command goes on" in errors
    assert not processes_in(toy)
    trials = load(toy).trials
    assert [trial.state for trial in trials[:2]] == [
        TrialState.FAIL
    ] * 2 and "failure" not in trials[0].user_attrs
    assert [trial.state for trial in trials[2:]] == [TrialState.WAITING] * 2
    (toy / "endless").unlink()
    finish(toy_command("--num-trials", 3, "--workers", 2), toy)
    done = [trial for trial in load(toy).trials if trial.state == TrialState.COMPLETE]
    assert len(done) == 3
    assert {trial.params["x"] for trial in trials[:2]} <= {trial.params["x"] for trial in done}


def test_a_finished_study_goes_on_with_more_trials_and_refuses_to_become_another(toy):
    finish(toy_command("--num-trials", 2), toy)
    finish(toy_command("--num-trials", 3), toy)
    assert len(load(toy).trials) == 3
    result = finish(toy_command("--num-trials", 3, "--metric", "env/other"), toy, 2)
    assert (
        result.stderr.strip()
        == "error: --study-name toy__toy: exists with another metric; give this one another --study-name, or delete it"
    )


def test_a_metric_that_no_line_has_ends_the_sweep_at_its_first_trial_and_another_goes_on(toy):
    result = finish(toy_command("--num-trials", 3, "--", "--mode", "episodes"), toy, 2)
    assert (
        "error: toy.py: no env/score in metrics.jsonl, which has episodic_return, " in result.stderr
    )
    assert "; try --metric episodic_return" in result.stderr
    finish(
        toy_command("--num-trials", 2, "--metric", "episodic_return", "--", "--mode", "episodes"),
        toy,
    )
    assert len(load(toy).get_trials(states=[TrialState.COMPLETE])) == 2


def test_a_crash_before_the_first_score_is_a_failure_as_any_other(toy):
    finish(toy_command("--num-trials", 2, "--", "--mode", "episodes, then a crash"), toy)
    assert ["environment broke" in trial.user_attrs["failure"] for trial in load(toy).trials] == [
        True,
        True,
    ]


def test_a_script_that_refuses_its_arguments_ends_the_sweep_with_its_reason(toy):
    result = finish(toy_command("--", "--mode", "refuses"), toy, 2)
    assert (
        "error: toy.py: --env-id toy: unknown" in result.stderr and "Traceback" not in result.stderr
    )
    finish(
        toy_command("--num-trials", 2, "--", "--mode", "good"), toy
    )  # nothing had worked, so this is no other study
    assert [trial.state for trial in load(toy).trials].count(TrialState.COMPLETE) == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--script", "none.py"], "--script none.py: cannot be read"),
        (["--space", "none.yaml"], "--space none.yaml: cannot be read"),
        (["--workers", "0"], "--workers 0: must be at least 1"),
        (["--max-cost-seconds", "-1"], "--max-cost-seconds -1.0: must be at least 0.001"),
        (["--sampler", "best"], "--sampler"),
        (["--storage", "mysterysql://x"], "--storage mysterysql://x"),
        (["--", "--output-dir", "x"], "-- --output-dir"),
        (["--", "--config", "x.yaml"], "-- --config"),
        (["--", "--seed", "3"], "-- --seed"),
        (["--", "--x", "["], "-- --x ["),
        (["--", "--x", "!!bool x"], "-- --x !!bool x"),
        (["--space", "odd.yaml"], "--space odd.yaml: cannot be read"),
        (["--space", "lines.yaml"], "--space lines.yaml: x  y"),
        (["--", "--x", "0.5"], "nothing to search"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(toy, arguments, message, monkeypatch, capsys):
    monkeypatch.chdir(toy)
    (toy / "odd.yaml").write_text("x: !!bool x")  # no YAMLError, but a KeyError
    (toy / "lines.yaml").write_text('"x\\n\\ny": 1')
    first = ["--script", "toy.py", "--env-id", "toy", "--space", "x.yaml"]
    monkeypatch.setattr(sys, "argv", ["protein_sweep.py", *first, *arguments])
    assert protein_sweep.main() == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and message in errors and errors.count("\n") == 1


def test_what_tyro_says_in_a_box_is_a_line():
    box = """
╭─ Unrecognized options ──────────────╮
│ Unrecognized options: --num-env, 8  │
│ ─────────────────────────────────── │
│ For full helptext, run x.py --help  │
╰─────────────────────────────────────╯"""
    assert protein_sweep.unboxed(box) == "Unrecognized options: --num-env, 8"
    assert protein_sweep.unboxed("--gamma 2: must be") == "--gamma 2: must be"


def test_an_unknown_argument_in_the_space_is_named_with_the_nearest(toy):
    (toy / "x.yaml").write_text("learning_rat: [1, 2]")
    result = finish(command("--script", SCRIPT, "--space", "x.yaml"), toy, 2)
    assert "has no argument learning_rat; did you mean learning_rate?" in result.stderr


def test_a_sweep_of_the_trainer_ends_with_a_configuration_that_the_trainer_takes(tmp_path):
    """The real script: three trials by two workers; best.yaml, trials.csv, plots, one JSON line, optuna-dashboard."""
    (tmp_path / "space.yaml").write_text(
        "learning_rate: {distribution: log_normal, min: 0.001, max: 0.1}\nclip_coef: {distribution: uniform, min: 0.1, max: 0.5}\n"
    )
    fixed = [word for word in SMALL if word != "2048"]
    fixed.insert(fixed.index("--total-timesteps") + 1, "16384")
    words = command(
        "--script",
        SCRIPT,
        "--space",
        "space.yaml",
        "--num-trials",
        3,
        "--workers",
        2,
        "--confirm-seeds",
        0,
        "--",
        *fixed,
    )
    result = finish(words, tmp_path)
    folder = tmp_path / "sweeps/breakout__ppo_lstm_puffer"
    summary = json.loads(result.stdout)
    assert summary["complete"] == 3 and summary["failed"] == 0
    rows = list(csv.DictReader((folder / "trials.csv").open()))
    assert [row["number"] for row in rows] == ["0", "1", "2"]
    assert (
        float(max(rows, key=lambda row: float(row["score"]))["learning_rate"])
        == summary["best"]["learning_rate"]
    )
    assert rows[0]["clip_coef"] == "0.15"  # the first trial is the script's defaults
    for name in ("pareto.png", "importances.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")

    text = (folder / "best.yaml").read_text()
    assert f"trial {summary['best']['trial']}, the best of 3" in text
    best = run_script(
        "--config", str(folder / "best.yaml"), "--total-timesteps", "512", cwd=tmp_path, small=False
    )
    assert best.returncode == 0, best.stderr
    config = yaml.safe_load(next(tmp_path.glob("runs/*/config.yaml")).read_text())
    assert (
        config["learning_rate"] == summary["best"]["learning_rate"]
        and config["hidden_size"] == 32
        and not config["compile"]
    )

    from optuna_dashboard import wsgi

    seen, request = [], {"PATH_INFO": "/api/studies"}
    wsgiref.util.setup_testing_defaults(request)
    answer = b"".join(
        wsgi(f"sqlite:///{folder}/study.db")(
            request, lambda status, headers, error=None: seen.append(status)
        )
    )
    assert (
        seen == ["200 OK"]
        and json.loads(answer)["study_summaries"][0]["study_name"] == "breakout__ppo_lstm_puffer"
    )


def test_a_terminal_shows_each_trial_the_best_and_the_front(toy):
    out, shown = run_on_a_terminal(
        toy_command("--num-trials", 3, "--", "--total-timesteps", 80), toy
    )
    assert json.loads(out)["complete"] == 3
    for word in ("trial 2: complete", "3 of 3 trials", "best env/score", "the front"):
        assert word in shown
