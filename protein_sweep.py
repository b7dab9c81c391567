"""Hyperparameter search: Optuna's samplers, and a run of a training script as a trial.

    python protein_sweep.py --env-id breakout --num-trials 60 --max-cost-seconds 60 --workers 2
    python protein_sweep.py --env-id breakout --num-trials 90 ...  # goes on, after Ctrl-C too
    python protein_sweep.py --env-id pong -- --config configs/pong.yaml  # around a preset
    python protein_sweep.py --script ppo_lstm_puffer_ddp.py --launcher "torchrun --nproc-per-node 2"
    python ppo_lstm_puffer.py --config sweeps/breakout__ppo_lstm_puffer/best.yaml  # what it found

Optuna keeps the study: trials, database, sampling, pruning. This file makes a trial of a run: on
cores and a GPU of its own, its score and cost read while it goes on, stopped when it looks
hopeless, told to the sampler when it fails. At the end the three best run again on fresh seeds.
Read it from the top: arguments, search space, a trial, the study, the sweep, the command line.
"""

import ast
import contextlib
import fcntl
import json
import math
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib
import numpy as np
import optuna
import sqlalchemy
import torch
import tyro
import yaml
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


@dataclass
class Args:
    script: str = "ppo_lstm_puffer.py"
    """takes --env-id, --seed, --output-dir, --time-limit; writes config.yaml and metrics.jsonl"""
    launcher: str = sys.executable  # what starts it, with its own arguments: "torchrun ..."
    env_id: str = "breakout"  # the environment, as the script takes it
    space: str | None = None  # a YAML file; None: SPACE in this file, which explains the form
    metric: str = "env/score"  # any key of metrics.jsonl (Gymnasium: episodic_return)
    direction: Literal["maximize", "minimize"] = "maximize"  # of the metric
    num_trials: int = 60  # in the study, those before a restart and on other machines included
    timeout: float = math.inf  # start no trial after so many seconds
    max_cost_seconds: float = 300.0  # of training in a trial: the script's --time-limit
    workers: int = 1  # trials at once; cores and GPUs are divided among them
    confirm_seeds: int = 3  # fresh seeds for the three best at the end: the best mean wins
    pruning: bool = True  # stop a trial that is, at its cost, worse than three quarters of others
    sampler: Literal["gp", "tpe", "random"] = "gp"  # of Optuna's
    seed: int = 1  # the sampler's; trial n trains with seed + n
    hang_seconds: float = 600.0  # without a new line in metrics.jsonl; compiling counts
    study_name: str | None = None  # of the study and its folder; None: <env>__<script>
    output_dir: str = "sweeps"  # the study's folder goes here
    storage: str | None = None
    """a database for many machines, postgresql://user@host/name; better in OPTUNA_STORAGE, an
    environment variable, where nobody sees its password. None: study.db in the study's folder"""
    fixed: tyro.conf.Suppress[tuple[str, ...]] = ()  # after --: for the script, in every trial


class UsageError(Exception):
    """Bad input: its text is printed, exit code 2."""


# THE SEARCH SPACE ---------------------------------------------------------------------------------

SPACE = """
# An argument of the script (of its environment: env.KEY): a list of choices, or
# {distribution, min, max}:
#   uniform        evenly between min and max
#   int_uniform    the same, whole numbers
#   uniform_pow2   powers of two between min and max, evenly in their exponent
#   log_normal     evenly in the logarithm (whole numbers if min and max are)
#   logit_normal   evenly in the logarithm of 1 - x: 0.9 to 0.99 is as far as 0.99 to 0.999
# The last two are PufferLib's names for what, there and here, is bounded and not normal.
total_timesteps: {distribution: log_normal, min: 1_000_000, max: 60_000_000}
# Each new combination of these sizes compiles, for half a minute that is no cost.
# A minibatch is never larger than num_envs * num_steps.
num_envs: {distribution: uniform_pow2, min: 256, max: 1024}
num_steps: {distribution: uniform_pow2, min: 16, max: 64}
minibatch_size: {distribution: uniform_pow2, min: 1024, max: 4096}
learning_rate: {distribution: log_normal, min: 0.003, max: 0.3}
adam_learning_rate: {distribution: log_normal, min: 0.0001, max: 0.01}
anneal: [exponential, linear]
momentum: {distribution: logit_normal, min: 0.8, max: 0.99}
max_grad_norm: {distribution: log_normal, min: 0.3, max: 5.0}
gamma: {distribution: logit_normal, min: 0.95, max: 0.9995}
gae_lambda: {distribution: logit_normal, min: 0.6, max: 0.99}
prio_alpha: {distribution: uniform, min: 0.0, max: 1.0}
clip_coef: {distribution: log_normal, min: 0.05, max: 0.5}
vf_clip_coef: {distribution: log_normal, min: 0.05, max: 5.0}
vf_coef: {distribution: log_normal, min: 0.3, max: 8.0}
ent_coef: {distribution: log_normal, min: 0.00001, max: 0.03}
"""


class Parameter(NamedTuple):
    """An argument of the script, on the scale on which a step is as large everywhere.

    gamma from 0.9 to 0.999 becomes "1 - gamma", logarithmic; num_envs in powers of two becomes
    "log2(num_envs)", an integer. So every sampler, and every plot of Optuna's, sees that scale.
    """

    argument: str
    name: str
    distribution: CategoricalDistribution | FloatDistribution | IntDistribution
    to_argument: Callable[[Any], Any] = lambda value: value
    to_scale: Callable[[Any], Any] = lambda value: value

    def suggest(self, trial: optuna.Trial) -> Any:
        """The argument's value in a trial."""
        one = self.distribution
        if isinstance(one, CategoricalDistribution):
            return trial.suggest_categorical(self.name, one.choices)
        method = trial.suggest_int if isinstance(one, IntDistribution) else trial.suggest_float
        return self.to_argument(method(self.name, one.low, one.high, log=one.log))

    def nearest(self, value: Any) -> Any:
        """What the study has for a value of the argument, moved into the space. None: nothing."""
        one = self.distribution
        if isinstance(one, CategoricalDistribution):
            return value if value in one.choices else None
        if type(value) not in (int, float):
            return None
        bounded = min(max(self.to_scale(value), one.low), one.high)
        return round(bounded) if isinstance(one, IntDistribution) else float(bounded)


def parse_parameter(argument: str, entry: Any) -> Parameter:
    """A line of a space. Raises ValueError, TypeError or KeyError."""
    if isinstance(entry, list):
        return Parameter(argument, argument, CategoricalDistribution(entry))
    low = entry["min"]
    high = entry["max"]
    whole = type(low) is type(high) is int
    match entry["distribution"]:
        case "uniform_pow2":
            scale = IntDistribution(math.ceil(math.log2(low)), math.floor(math.log2(high)))
            return Parameter(
                argument, f"log2({argument})", scale, lambda n: 2**n, lambda x: math.log2(max(x, 1))
            )
        case "logit_normal":
            scale = FloatDistribution(round(1 - high, 9), round(1 - low, 9), log=True)
            return Parameter(
                argument, f"1 - {argument}", scale, lambda x: round(1 - x, 6), lambda x: 1 - x
            )
        case "int_uniform" | "log_normal" as kind if whole:
            return Parameter(argument, argument, IntDistribution(low, high, kind == "log_normal"))
        case "uniform" | "log_normal" as kind:
            scale = FloatDistribution(low, high, kind == "log_normal")
            return Parameter(argument, argument, scale, lambda value: float(f"{value:.4g}"))
        case kind:
            raise ValueError(f"distribution {kind}, min {low}, max {high}")


def parse_space(content: dict[str, Any]) -> list[Parameter]:
    """Raises UsageError."""
    space = []
    for argument, entry in content.items():
        try:
            space.append(parse_parameter(argument, entry))
        except (ValueError, TypeError, KeyError) as error:
            form = "a list of choices, or {distribution, min, max} as in this file's SPACE"
            raise UsageError(f"--space, {argument}: {entry}: must be {form} ({error})") from error
    return space


# A TRIAL: a run of the script, watched through its metrics.jsonl ----------------------------------

MILESTONES = 20  # costs, evenly spaced up to the largest, at which trials are compared for pruning
GRACE = 20.0  # seconds between SIGTERM, at which the script writes a checkpoint, and SIGKILL


class RunFailed(Exception):
    """A run crashed, diverged, hung or left no score. Its text says how."""


class Interrupted(Exception):
    """The sweep was stopped, and the run with it: it goes back into the queue."""


class Metrics:
    """A run's metrics.jsonl, read as it grows. Cost is its "time": seconds of training."""

    def __init__(self, runs: Path, metric: str):
        self.runs = runs
        self.metric = metric
        self.file = None
        self.rest = ""  # the beginning of a line that is being written
        self.points = []  # (cost, score) of each line that has the metric
        self.latest = {}  # the newest value of each key

    def read(self) -> bool:
        """Whether there was anything new."""
        for path in self.runs.glob("*/metrics.jsonl"):
            self.file = self.file or path.open()
        if self.file is None:
            return False
        *lines, self.rest = (self.rest + self.file.read()).split("\n")
        for line in lines:
            try:
                self.latest |= (row := json.loads(line))
                if self.metric in row:
                    self.points.append((row["time"], float(row[self.metric])))
            except (ValueError, TypeError, KeyError) as error:  # a script of your own
                raise RunFailed(f"metrics.jsonl, {line[:100]}: {error!r}") from error
        return bool(lines)

    def score_at(self, cost: float) -> float:
        """The mean of the lines of the last tenth before a cost; NaN if there are none yet."""
        before = [point for point in self.points if point[0] <= cost]
        if not before:
            return math.nan
        since = min(0.9 * cost, before[-1][0])
        return float(np.mean([score for time, score in before if time >= since]))


def run_trial(trial: optuna.Trial, sweep: "Sweep") -> float:
    """Runs the script with what the study suggests; returns its score. Optuna's objective.

    Optuna's samplers leave failed and pruned trials out, and would try the like again and again.
    So a failed one is told as the worst score so far, and a pruned one with the score that it had.
    """
    arguments = {one.argument: one.suggest(trial) for one in sweep.space}
    folder = sweep.folder / "trials" / f"{trial.number:04d}"
    shutil.rmtree(folder, ignore_errors=True)  # of a study that was deleted
    folder.mkdir(parents=True)
    metrics = Metrics(folder / "runs", sweep.args.metric)
    slot = sweep.slots.get()
    try:
        process = start(sweep.command(trial, arguments, metrics.runs), folder / "log.txt", *slot)
        try:
            ending = watch(process, metrics, trial, sweep)
        finally:
            end(process)
        metrics.read()
        score = score_of(process, metrics, ending, folder / "log.txt")
    except RunFailed as error:
        trial.set_user_attr("failure", str(error))
        scores = [one.value for one in worked(sweep.study)]
        if scores:
            return min(scores) if sweep.args.direction == "maximize" else max(scores)
        if isinstance(error.__cause__, UsageError):
            sweep.stopping = True  # what the script was given is wrong in all other trials too
            raise error.__cause__ from error
        raise
    finally:
        sweep.slots.put(slot)
    config = next(metrics.runs.glob("*/config.yaml"))
    trial.set_user_attr("config", yaml.safe_load(config.read_text()))
    trial.set_user_attr("cost", max(metrics.latest["time"], 1e-3))
    trial.set_user_attr("step", metrics.latest.get("step"))
    trial.set_user_attr("end", ending or metrics.latest.get("exit_reason"))
    return score


def start(command: list[str], log: Path, cores: list[int], gpu: dict) -> subprocess.Popen:
    """In a session of its own, which `end` ends; if the sweep is killed, the script is told so."""
    prefix = ["setpriv", "--pdeathsig", "TERM", "taskset", "-c", ",".join(map(str, cores))]
    options = {"env": os.environ | gpu, "start_new_session": True, "stdin": subprocess.DEVNULL}
    with log.open("wb") as file:
        return subprocess.Popen(prefix + command, stdout=file, stderr=file, **options)


def end(process: subprocess.Popen):
    """The script with SIGTERM, then all that it started with SIGKILL."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def score_of(process: subprocess.Popen, metrics: Metrics, ending: str, log: Path) -> float:
    """Of a run that is over. Raises RunFailed, from a UsageError where the command is wrong."""
    tail = log.read_bytes()[-2000:].decode(errors="replace").strip()
    if process.returncode == 2 and not metrics.latest:
        raise RunFailed(tail[-200:]) from UsageError(f"the script refused its arguments:\n{tail}")
    if process.returncode and not ending:
        reason = f"exit code {process.returncode}: " + tail.rpartition("\n")[2]
        raise RunFailed(metrics.latest.get("exit_reason") or reason)
    if not metrics.points:
        have = ", ".join(sorted(metrics.latest)) or "nothing"
        reason = f"no {metrics.metric} in metrics.jsonl, which has {have}"
        raise RunFailed(reason) from UsageError(f"--metric: {reason}")
    if not all(math.isfinite(score) for _, score in metrics.points):
        raise RunFailed(f"{metrics.metric} is not finite")
    return metrics.score_at(metrics.points[-1][0])


def watch(process: subprocess.Popen, metrics: Metrics, trial: optuna.Trial, sweep: "Sweep") -> str:
    """Until the run is over: "", or is to be ended: "pruned". Raises RunFailed and Interrupted."""
    args = sweep.args
    seen = time.monotonic()
    reported = 0
    while process.poll() is None:
        time.sleep(0.1)
        if metrics.read():
            seen = time.monotonic()
        if sweep.stopping:
            raise Interrupted
        if time.monotonic() - seen > args.hang_seconds:
            raise RunFailed(f"no new line in metrics.jsonl for {args.hang_seconds:g} seconds")
        cost = metrics.points[-1][0] if metrics.points else 0.0
        milestone = min(int(MILESTONES * cost / args.max_cost_seconds), MILESTONES)
        score = metrics.score_at(milestone / MILESTONES * args.max_cost_seconds)
        if milestone > reported and math.isfinite(score):
            reported = milestone
            trial.report(score, milestone)
            if args.pruning and trial.should_prune():
                return "pruned"
    return ""


# THE STUDY: which trials there are, and which of them run again -----------------------------------

SAMPLERS = {
    "gp": optuna.samplers.GPSampler,
    "tpe": partial(optuna.samplers.TPESampler, multivariate=True, constant_liar=True),
    "random": optuna.samplers.RandomSampler,
}
BEST = 3  # trials that run again at the end
RETRY = optuna.storages.RetryHeartbeatStaleTrialCallback(max_retry=10)  # back into the queue


@contextlib.contextmanager
def one_at_a_time(folder: Path):
    """Else two would make SQLite's tables, take the same trial, or write the same best.yaml."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def open_storage(args: Args, folder: Path) -> optuna.storages.RDBStorage:
    """The database; a trial whose machine is gone for a minute goes back into the queue."""
    file = sqlalchemy.URL.create("sqlite", database=str(folder / "study.db"))
    url = args.storage or os.environ.get("OPTUNA_STORAGE") or file.render_as_string()
    url = re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", url)  # as in requirements.txt
    wait = {"connect_args": {"timeout": 60}} if "sqlite" in url else {"pool_pre_ping": True}
    beat = {"heartbeat_interval": 10, "grace_period": 60, "heartbeat_stale_trial_callback": RETRY}
    for _ in range(3):
        try:
            return optuna.storages.RDBStorage(url, engine_kwargs=wait, **beat)
        except Exception as error:  # SQLAlchemy's, a driver's, the operating system's
            reason = " ".join(str(error).split())[:200]
            time.sleep(0.5)  # two that make the tables at once: one fails, but not twice
    raise UsageError(f"--storage: {reason}")


def open_study(args: Args, space: list[Parameter], first: dict, folder: Path) -> optuna.Study:
    """The study, new or as it was left. first: the arguments of its first trial, if it is new."""
    seed = args.seed + os.getpid() * 1000  # lest two processes, or a restart, draw the same
    keys = ("env_id", "metric", "direction", "max_cost_seconds", "fixed")
    same = {key: str(getattr(args, key)) for key in keys}
    same["space"] = str([(one.name, one.distribution) for one in space])
    with one_at_a_time(folder):
        study = optuna.create_study(
            storage=open_storage(args, folder),
            study_name=args.study_name,
            direction=args.direction,
            sampler=SAMPLERS[args.sampler](seed=seed),
            pruner=optuna.pruners.PercentilePruner(75, n_startup_trials=10, n_min_trials=10),
            load_if_exists=True,
        )
        before = study.user_attrs.get("same")
        if before is None:  # it is new
            study.set_user_attr("same", same)
            params = {one.name: one.nearest(first.get(one.argument)) for one in space}
            params = {name: x for name, x in params.items() if x is not None}
            study.enqueue_trial(params, skip_if_exists=True)  # another machine may have come first
            before = same
    changed = [key for key in same if before[key] != same[key]]
    if changed:
        reason = f"exists with another {', '.join(changed)}; take another, or delete it"
        raise UsageError(f"--study-name {args.study_name}: {reason}")
    ask = study.ask

    def ask_alone() -> optuna.Trial:
        with one_at_a_time(folder):
            return ask()

    study.ask = ask_alone
    return study


def counted(study: optuna.Study) -> list[FrozenTrial]:
    """Trials that are over, well or not; not those that were interrupted."""
    trials = study.get_trials(deepcopy=False)
    return [one for one in trials if one.state.name == "COMPLETE" or "failure" in one.user_attrs]


def worked(study: optuna.Study) -> list[FrozenTrial]:
    return [trial for trial in counted(study) if "failure" not in trial.user_attrs]


def same_params(study: optuna.Study) -> list[list[FrozenTrial]]:
    """Trials, those of the same hyperparameters together, the best first run first."""
    groups = {}
    for trial in worked(study):
        groups.setdefault(str(trial.params), []).append(trial)
    down = study.direction.name == "MAXIMIZE"
    return sorted(groups.values(), key=lambda trials: trials[0].value, reverse=down)


def fresh_mean(trials: list[FrozenTrial]) -> float:
    """The mean score without the first run's, which chose them: the best of many is lucky too."""
    return float(np.mean([trial.value for trial in trials[1:] or trials]))


def best_of(study: optuna.Study, confirm_seeds: int) -> list[FrozenTrial]:
    """The trials of the best hyperparameters, of those that have run again if there are any."""
    groups = same_params(study)
    confirmed = [trials for trials in groups if len(trials) > confirm_seeds]
    better = max if study.direction.name == "MAXIMIZE" else min
    return better(confirmed or groups, key=fresh_mean, default=[])


# THE SWEEP ----------------------------------------------------------------------------------------


@dataclass
class Sweep:
    args: Args
    space: list[Parameter]
    study: optuna.Study
    folder: Path
    stopping: bool = False
    signal: int = 0

    def __post_init__(self):
        self.target = self.args.num_trials  # so many are to be over
        self.deadline = time.monotonic() + self.args.timeout
        self.slots = queue.SimpleQueue()  # cores, and variables that choose a GPU, that are free
        for slot in divide(self.args.workers):
            self.slots.put(slot)

    def command(self, trial: optuna.Trial, arguments: dict[str, Any], runs: Path) -> list[str]:
        """The words that run the script. Those of the trial win over a preset's."""
        seed = self.args.seed + trial.number
        words = [*shlex.split(self.args.launcher), self.args.script, *self.args.fixed]
        words += ["--env-id", self.args.env_id, f"--seed={seed}", f"--output-dir={runs}"]
        words.append(f"--time-limit={self.args.max_cost_seconds}")
        for key, value in arguments.items():
            flag = key if key.startswith("env.") else key.replace("_", "-")
            if isinstance(value, bool) and not key.startswith("env."):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                words.append(f"--{flag}={value}")
        return words

    def run(self) -> int:
        """Trials until there are enough, then the best again. Returns the exit code."""
        for signum in signal.SIGINT, signal.SIGTERM:
            signal.signal(signum, self.stop)
        print(f"{self.folder}: {len(counted(self.study))} of {self.target} trials")
        try:
            while not self.enough():
                self.optimize()
        except UsageError:  # the first trial was refused; a corrected command begins anew
            if not worked(self.study) and not self.trials_in(TrialState.RUNNING):
                storage = open_storage(self.args, self.folder)
                optuna.delete_study(study_name=self.args.study_name, storage=storage)
            raise
        while not self.stopping and self.trials_in(TrialState.RUNNING):  # elsewhere, or of the dead
            optuna.storages.fail_stale_trials(self.study)
            time.sleep(1)
        self.deadline = math.inf
        self.queue_best_again()
        while not self.enough():
            self.optimize()
        self.report()
        if self.signal:
            print("interrupted; the same command goes on")
        return 128 + self.signal if self.signal else 0

    def stop(self, signum: int, frame):
        self.stopping = True
        self.signal = signum

    def enough(self) -> bool:
        late = time.monotonic() > self.deadline
        return self.stopping or late or len(counted(self.study)) >= self.target

    def trials_in(self, *states: TrialState) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=states)

    def queue_best_again(self):
        """The best, each on as many fresh seeds, unless another process has queued them."""
        with one_at_a_time(self.folder):
            if not self.trials_in(TrialState.RUNNING, TrialState.WAITING) and not self.stopping:
                for trials in same_params(self.study)[:BEST]:
                    for _ in range(1 + self.args.confirm_seeds - len(trials)):
                        self.study.enqueue_trial(trials[0].params)
            self.target = len(counted(self.study)) + len(self.trials_in(TrialState.WAITING))

    def optimize(self):
        """Trials up to the target. What was lost while the database was away is run again."""
        options = {"n_jobs": self.args.workers, "catch": (RunFailed, Interrupted)}
        options |= {"n_trials": self.target - len(counted(self.study))}
        try:
            objective = partial(run_trial, sweep=self)
            self.study.optimize(objective, callbacks=[self.after_trial], **options)
        except (optuna.exceptions.OptunaError, ValueError) as error:
            if isinstance(error, ValueError) and "Cannot tell" not in str(error):
                raise
            print(f"warning: the database was away ({error}); going on in ten seconds")
            time.sleep(10)

    def after_trial(self, study: optuna.Study, trial: FrozenTrial):
        """Optuna's callback: a line for people, best.yaml, and whether that was enough."""
        facts = trial.user_attrs
        if "failure" in facts:
            line = f"failed: {facts['failure']}"
        elif trial.state == TrialState.FAIL:
            line = "interrupted"
            RETRY(study, trial)
        else:
            line = f"{trial.value:.5g} in {facts['cost']:.1f} s ({facts['end']})"
        with one_at_a_time(self.folder):
            best = best_of(study, self.args.confirm_seeds)
            if best:
                line += f"; best {fresh_mean(best):.5g} (trial {best[0].number})"
                self.write_best(best)
        print(f"trial {trial.number}: {line}; {len(counted(study))} of {self.target}", flush=True)
        if self.enough():
            study.stop()

    def write_best(self, trials: list[FrozenTrial]):
        """best.yaml, anew after every trial: the configuration of the best trial's run."""
        number = trials[0].number
        facts = trials[0].user_attrs
        score = f"{self.args.metric} {fresh_mean(trials):.6g}"
        how = f"mean of {len(trials) - 1} fresh seeds" if trials[1:] else "one run, so partly luck"
        head = f"""# python {self.args.script} --config best.yaml
# Trial {number} of study {self.args.study_name}, made by protein_sweep.py.
# {score} ({how}) after {facts["cost"]:.1f} seconds and {facts["step"]} steps ({facts["end"]}).
"""
        ours = ("seed", "output_dir", "time_limit")
        config = {key: value for key, value in facts["config"].items() if key not in ours}
        temporary = self.folder / "best.yaml.tmp"
        temporary.write_text(head + yaml.safe_dump(config, sort_keys=False))
        temporary.replace(self.folder / "best.yaml")

    def report(self):
        """pareto.png, importances.png, and a table of the front."""
        trials = worked(self.study)
        if not trials:
            print(f"no trial has a score; the logs are in {self.folder / 'trials'}")
            return
        matplotlib.use("Agg")
        plots = optuna.visualization.matplotlib
        both = optuna.create_study(directions=["minimize", self.args.direction])
        for trial in trials:
            facts = {"params": trial.params, "distributions": trial.distributions}
            facts["user_attrs"] = {"number": trial.number}
            values = [trial.user_attrs["cost"], trial.value]
            both.add_trial(optuna.create_trial(values=values, **facts))
        names = ["cost: seconds of training", self.args.metric]
        axes = plots.plot_pareto_front(both, target_names=names)
        axes.figure.savefig(self.folder / "pareto.png", dpi=150, bbox_inches="tight")
        with contextlib.suppress(ValueError, RuntimeError):  # fewer than two, or all alike
            axes = plots.plot_param_importances(self.study)
            axes.figure.savefig(self.folder / "importances.png", dpi=150, bbox_inches="tight")
        print(f"no trial beats these in both:\n trial    cost, s {self.args.metric:>18}")
        for trial in sorted(both.best_trials, key=lambda trial: trial.values):
            cost, score = trial.values
            print(f"{trial.user_attrs['number']:>6} {cost:>10.1f} {score:>18.5g}")


def divide(workers: int) -> list[tuple[list[int], dict[str, str]]]:
    """Each worker's cores, neighbours; a GPU for each, in turn, where there are several."""
    cores = sorted(os.sched_getaffinity(0))
    parts = np.array_split(cores, min(workers, len(cores)))
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = names.split(",") if names else [str(n) for n in range(torch.cuda.device_count())]
    slots = []
    for n in range(workers):
        gpu = {"CUDA_VISIBLE_DEVICES": gpus[n % len(gpus)]} if len(gpus) > 1 else {}
        slots.append((parts[n % len(parts)].tolist(), gpu))
    return slots


# PLUMBING: command line ---------------------------------------------------------------------------


def script_defaults(path: str) -> dict[str, Any]:
    """The defaults of the script's `class Args`, read without running it. Raises UsageError."""
    try:
        tree = ast.parse(Path(path).read_text())
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"--script {path}: cannot be read ({error})") from error
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args"]
    defaults = {}
    for field in classes[0].body if classes else []:
        if isinstance(field, ast.AnnAssign):
            try:
                defaults[field.target.id] = ast.literal_eval(field.value)
            except (ValueError, TypeError):  # no constant
                defaults[field.target.id] = None
    return defaults


def read_mapping(path: str, flag: str) -> dict[str, Any]:
    """A YAML file. Raises UsageError."""
    try:
        content = yaml.safe_load(Path(path).read_text())
        return {str(key).replace("-", "_"): value for key, value in content.items()}
    except Exception as error:  # no file, no YAML, no mapping
        raise UsageError(f"{flag} {path}: {' '.join(str(error).split())[:150]}") from error


def prepare(argv: list[str]) -> Sweep:
    """Everything that can be wrong is found here. Raises UsageError."""
    cut = argv.index("--") if "--" in argv else len(argv)
    args = tyro.cli(Args, args=argv[:cut], description=__doc__)
    args.fixed = tuple(word for given in argv[cut + 1 :] for word in given.split("=", 1))
    for name in "num_trials", "workers", "max_cost_seconds", "hang_seconds":
        if getattr(args, name) <= 0:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} {getattr(args, name)}: must be above 0")
    content = read_mapping(args.space, "--space") if args.space else yaml.safe_load(SPACE)
    given = {word[2:].replace("-", "_") for word in args.fixed if word.startswith("--")}
    for key in "env_id", "seed", "output_dir", "time_limit", "resume":
        if key in given or key in content:
            raise UsageError(f"-- --{key.replace('_', '-')}: is the sweep's to give; leave it out")
    first = script_defaults(args.script)
    unknown = {key for key in content if not key.startswith("env.")} - set(first)
    if unknown and first:
        raise UsageError(f"--space: {args.script} has no argument {', '.join(sorted(unknown))}")
    space = parse_space({key: entry for key, entry in content.items() if key not in given})
    if not space:
        raise UsageError("--space: nothing to search: every argument in it is given after --")
    if "config" in given:
        first |= read_mapping(args.fixed[args.fixed.index("--config") + 1], "-- --config")
    first |= {f"env.{key}": value for key, value in (first.get("env") or {}).items()}
    stem = Path(args.script).stem
    args.study_name = args.study_name or re.sub(r"[^\w.-]+", "-", f"{args.env_id}__{stem}")
    folder = Path(args.output_dir, args.study_name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output-dir {args.output_dir}: {error}") from error
    return Sweep(args, space, open_study(args, space, first, folder), folder)


def main() -> int:
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # a failed trial is a line of ours
    try:
        return prepare(sys.argv[1:]).run()
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing to save yet: no traceback
    sys.exit(main())
