"""Hyperparameter search: Optuna's samplers, and a run of a training script as a trial.

    python protein_sweep.py --env-id breakout --num-trials 60 --max-cost-seconds 60 --workers 2
    python protein_sweep.py --env-id breakout --num-trials 90 ...  # goes on, after Ctrl-C too
    python protein_sweep.py --env-id pong -- --config configs/pong.yaml  # around a preset
    python protein_sweep.py --script ppo_lstm_puffer_ddp.py --launcher "torchrun --nproc-per-node 2"
    python ppo_lstm_puffer.py --config sweeps/breakout__ppo_lstm_puffer/best.yaml  # what it found

Optuna keeps the study: trials, database, sampling, pruning. Here a trial is a run on cores and a
GPU of its own, read while it goes on, stopped when it looks hopeless, told as infinitely bad when
it fails. At the end the three best run again on fresh seeds. (Protein is PufferLib's search.)
"""

import ast
import contextlib
import json
import math
import os
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
from itertools import pairwise
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
from optuna.exceptions import OptunaError
from optuna.trial import FrozenTrial, TrialState
from pufferlib import APIUsageError as UsageError  # its text is printed, exit code 2
from pufferlib import adapters

warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
warnings.filterwarnings("ignore", message="Clip non-finite")  # the GP, of failures
say = partial(adapters.say, file=sys.stdout)  # whoever reads may be gone: the sweep goes on


@dataclass
class Args:
    script: str = "ppo_lstm_puffer.py"  # or a sister, or a fork: docs/sweeps.md has what it needs
    launcher: str = shlex.quote(sys.executable)  # what starts it: "torchrun ..."
    env_id: str | None = None  # as the script takes it; None: the preset's, or the script's
    space: str | None = None  # a YAML file; None: SPACE in this file, which explains the form
    metric: str = "env/score"  # any key of metrics.jsonl (Gymnasium: episodic_return)
    direction: Literal["maximize", "minimize"] = "maximize"  # of the metric
    num_trials: int = 60  # in the study, those before a restart and on other machines included
    timeout: float = math.inf  # after so many seconds only fresh seeds of the best start
    max_cost_seconds: float = 300.0  # of training in a trial: the script's --time-limit
    workers: int = 1  # trials at once; cores and GPUs are divided among them
    confirm_seeds: int = 3  # fresh seeds for the three best at the end: the best mean wins
    pruning: bool = True  # from 0.3 of the cost on, stop what is in the last quarter
    sampler: Literal["gp", "tpe", "random"] = "gp"  # of Optuna's
    seed: int = 1  # trial n trains with seed + n
    hang_seconds: float = 600.0  # without a new line in metrics.jsonl; compiling counts
    study_name: str | None = None  # of the study and its folder; None: <env>__<script>
    output_dir: str = "sweeps"  # the study's folder goes here
    storage: str | None = None  # for many machines: postgresql://...; or OPTUNA_STORAGE, unseen
    fixed: tyro.conf.Positional[tuple[str, ...]] = ()  # after --: for the script, in every trial


@contextlib.contextmanager
def from_user(what: str):
    """What fails in here is bad input."""
    try:
        yield
    except Exception as error:  # of the file system, YAML, SQLAlchemy, a database's driver
        raise UsageError(f"{what}: {' '.join(str(error).split())[:200]}") from error


# THE SEARCH SPACE ---------------------------------------------------------------------------------

SPACE = """
# An argument of the script (of its environment: env.KEY): a list of choices, or
# {distribution, min, max}:
#   uniform, int_uniform   evenly between min and max
#   uniform_pow2           powers of two between min and max, evenly in their exponent
#   log_normal             evenly in the logarithm (whole numbers if min and max or the default are)
#   logit_normal           evenly in the logarithm of 1 - x: from 0.9 to 0.99 as to 0.999
# Each new combination of sizes compiles. No minibatch may be larger than num_envs * num_steps.
total_timesteps: {distribution: log_normal, min: 1_000_000, max: 60_000_000}
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
    """An argument of the script, as samplers and plots see it: "1 - gamma", "log2(num_envs)"."""

    argument: str
    name: str
    distribution: CategoricalDistribution | FloatDistribution | IntDistribution
    to_argument: Callable[[Any], Any] = lambda value: value
    to_scale: Callable[[Any], Any] = lambda value: value

    def nearest(self, value: Any) -> Any:
        """What the study has for a value of the argument, moved into the space. None: nothing."""
        one = self.distribution
        if isinstance(one, CategoricalDistribution):
            return value if value in one.choices else None
        if type(value) not in (int, float):
            return None
        bounded = min(max(self.to_scale(value), one.low), one.high)
        return round(bounded) if isinstance(one, IntDistribution) else float(bounded)


def parse_parameter(key: str, entry: Any, default: Any = None) -> Parameter:
    """A line of a space; default: the script's value. Raises ValueError, TypeError, KeyError."""
    match entry:
        case list():
            return Parameter(key, key, CategoricalDistribution(entry))
        case {"distribution": kind, "min": low, "max": high, **more} if math.isfinite(high - low):
            whole = low % 1 == high % 1 == 0  # 1e2 is a whole number
        case _:
            raise ValueError("neither a list of choices nor {distribution, min, max}")
    if more:
        raise ValueError(f"there is no {', '.join(more)}")
    if kind == "uniform_pow2":
        scale = IntDistribution(math.ceil(math.log2(low)), math.floor(math.log2(high)))
        return Parameter(key, f"log2({key})", scale, lambda n: 2**n, np.log2)
    if kind == "logit_normal":
        scale = FloatDistribution(round(1 - high, 9), round(1 - low, 9), log=True)
        return Parameter(key, f"1 - {key}", scale, lambda x: round(1 - x, 6), lambda x: 1 - x)
    log = {"uniform": False, "int_uniform": False, "log_normal": True}[kind]
    if kind == "int_uniform" or type(default) is int or (log and type(low) is type(high) is int):
        if not whole:
            raise ValueError("min and max should be whole numbers")
        return Parameter(key, key, IntDistribution(int(low), int(high), log))
    return Parameter(key, key, FloatDistribution(low, high, log), lambda x: float(f"{x:.4g}"))


# A TRIAL: a run of the script, watched through its metrics.jsonl ----------------------------------

MILESTONES = 20  # costs, evenly spaced up to the largest, at which trials are compared for pruning
GRACE = 40.0  # seconds between SIGTERM and SIGKILL; torchrun kills its ranks after 30


class RunFailed(Exception):
    """A run crashed, diverged, hung or left no score. Its text says how."""


class Run:
    """The script in a session of its own, and its metrics.jsonl, read as it grows."""

    def __init__(self, command: list[str], folder: Path, metric: str):
        self.folder = folder
        self.metric = metric
        self.position = 0  # what is before it in metrics.jsonl has been read
        self.cost = 0.0  # the newest line's "time"
        self.points = []  # (cost, score) of each line that has the metric
        self.latest = {}  # the newest value of each key
        self.seen = time.monotonic()  # when the newest line was
        shutil.rmtree(folder, ignore_errors=True)  # of a study that a wrong command began
        folder.mkdir(parents=True)
        self.log = folder / "log.txt"
        with self.log.open("wb") as log:
            options = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL}
            self.process = subprocess.Popen(command, start_new_session=True, **options)

    def end(self):
        """Leaves nothing of what it started."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def read(self):
        """What is new in metrics.jsonl."""
        lines = []
        for path in self.folder.glob("*/metrics.jsonl"):  # one, once the run has begun
            if path.stat().st_size < self.position:  # torchrun began again, from a checkpoint
                self.position = 0
                self.points.clear()
            with path.open("rb") as file:
                file.seek(self.position)
                lines = [line for line in file if line.endswith(b"\n")]
        for line in lines:
            self.position += len(line)
            self.seen = time.monotonic()
            try:
                row = json.loads(line)
                self.latest |= row
                self.cost = float(row.get("time", self.cost))
                if self.metric in row:
                    self.points.append((self.cost, float(row[self.metric])))
            except (ValueError, TypeError, AttributeError) as error:  # a script of your own
                raise RunFailed(f"metrics.jsonl, {line[:100]}: {error!r}") from error

    def score(self, until: float = np.inf) -> float:
        """The mean in the last tenth of the seconds up to this cost, or the last score before."""
        points = [point for point in self.points if point[0] <= until]
        since = min(0.9 * min(self.cost, until), points[-1][0])
        return float(np.mean([score for cost, score in points if cost >= since]))

    def watch(self, trial: optuna.Trial, sweep: "Sweep") -> str | None:
        """Until it is over or to be pruned; returns how it ended. Raises RunFailed, UsageError."""
        args = sweep.args
        milestones = [args.max_cost_seconds * n / MILESTONES for n in range(1, MILESTONES + 1)]
        while True:
            code = self.process.poll()
            time.sleep(1 if code else 0.1)  # a signal to all may reach it first
            if sweep.stopping:
                adapters.say_once(say, f"ending the trials, within {GRACE:.0f} s")
                raise InterruptedError  # the trial goes back into the queue
            self.read()
            if code is not None:
                break
            if time.monotonic() - self.seen > args.hang_seconds:
                if self.latest.get("exit_reason") in ("completed", "time_limit"):
                    break  # its process waits for a thread of its environment's
                raise RunFailed(f"no new line in metrics.jsonl for {args.hang_seconds:g} seconds")
            while milestones and self.cost >= milestones[0]:
                due = milestones.pop(0)
                if self.points and self.points[0][0] <= due:
                    trial.report(self.score(due), MILESTONES - len(milestones))
                    if args.pruning and "again" not in trial.user_attrs and trial.should_prune():
                        return "pruned"
        tail = self.log.read_text(errors="replace").strip()[-4000:]
        refused = code in (2, 126, 127) or re.search(r"exitcode +: 2 ", tail)  # of env; of torchrun
        if refused and not self.latest:
            raise UsageError(f"the script refused its arguments:\n{tail}")
        if code:
            said = [*tail.rstrip("=\n ").splitlines(), *re.findall(r"\w+Error: .+", tail)]
            crash = f"exit code {code}: " + "".join(said[-1:])  # torchrun's own words come last
            raise RunFailed(self.latest.get("exit_reason") or crash)
        if not self.points:
            have = ", ".join(sorted(self.latest)) or "nothing"
            raise UsageError(f"--metric: no {self.metric} in metrics.jsonl, which has {have}")
        return self.latest.get("exit_reason")


def run_trial(trial: optuna.Trial, sweep: "Sweep") -> float:
    """Optuna's objective: runs the script with what the study suggests, and returns its score.

    Samplers leave out what failed or was pruned, and would try the like again. So a crash, a hang,
    a divergence is told as infinitely bad, and a pruned trial with the score that it had.
    """
    sweep.began.append(trial.number)
    trial.set_user_attr("began", trial.number)
    arguments = {one.argument: one.to_argument(trial.params[one.name]) for one in sweep.space}
    folder = sweep.folder / "trials" / f"{trial.number:04d}"
    slot = sweep.slots.pop()
    run = Run(slot + sweep.command(trial, arguments, folder), folder, sweep.args.metric)
    try:
        end = run.watch(trial, sweep)
        if not math.isfinite(run.score()):
            raise RunFailed(f"{run.metric} is not finite")
        with from_user("the script must write a config.yaml"):
            (path,) = folder.glob("*/config.yaml")
            config = dict(yaml.safe_load(path.read_text()))
    except (RunFailed, UsageError) as error:
        first = trial.number == sweep.began[0]
        if first and isinstance(error, UsageError) and not sweep.worked():
            sweep.stopping.append(error)  # all other trials would be refused too
            raise InterruptedError from error
        trial.set_user_attr("failure", str(error))
        return -math.inf if sweep.args.direction == "maximize" else math.inf
    finally:
        run.end()
        sweep.slots.append(slot)
    trial.set_user_attr("config", {key: config[key] for key in config if key not in OURS})
    trial.set_user_attr("cost", run.cost)
    last = run.points[-1][0]
    seen = f"; {run.metric} was last there at {last:.1f} s" if last < 0.9 * run.cost else ""
    trial.set_user_attr("end", f"{end}{seen}")
    return run.score()


# THE STUDY: which trials there are, and which of them run again -----------------------------------

SAMPLERS = {
    "gp": optuna.samplers.GPSampler,
    "tpe": partial(optuna.samplers.TPESampler, multivariate=True, constant_liar=True),
    "random": optuna.samplers.RandomSampler,
}
UNTOLD = "Cannot tell|updated_state|Should not reach"  # Optuna, of an end that it cannot store
BEST = 3  # trials that run again at the end
RETRY = optuna.storages.RetryHeartbeatStaleTrialCallback(max_retry=10)  # back into the queue


@contextlib.contextmanager
def one_at_a_time(folder: Path):
    """Else two would make SQLite's tables, take the same trial, or write the same best.yaml."""
    with (folder / "lock").open("w") as file:
        adapters.lock(file, wait=True)
        yield


def open_storage(args: Args, folder: Path) -> optuna.storages.RDBStorage:
    """The database; a trial whose machine is gone for a minute goes back into the queue."""
    name = (folder / "study.db").absolute().as_uri()  # quoted: a folder may have any name
    file = sqlalchemy.URL.create("sqlite", database=name, query={"uri": "true"})
    url = args.storage or os.environ.get("OPTUNA_STORAGE") or file.render_as_string()
    url = re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", url)  # as in requirements.txt
    wait = {"pool_pre_ping": True}
    if url.startswith("sqlite"):
        wait = {"connect_args": {"timeout": 60}}
    beat = {"heartbeat_interval": 10, "grace_period": 60, "heartbeat_stale_trial_callback": RETRY}
    connect = partial(optuna.storages.RDBStorage, url, engine_kwargs=wait, **beat)
    with from_user("--storage"):
        with contextlib.suppress(sqlalchemy.exc.DBAPIError):
            return connect()
        time.sleep(1)  # two that make the tables at once: one fails, but not twice
        return connect()


def open_study(args: Args, space: list[Parameter], first: dict, folder: Path) -> optuna.Study:
    """The study, new or as it was left. first: the arguments of its first trial."""
    sampler = SAMPLERS[args.sampler]()  # seeded anew: two processes, or a restart, draw otherwise
    pruner = optuna.pruners.PercentilePruner(75, 10, round(0.3 * MILESTONES), n_min_trials=10)
    keys = ("env_id", "metric", "direction", "max_cost_seconds", "fixed")
    same = {key: str(getattr(args, key)) for key in keys} | {"script": Path(args.script).stem}
    same["space"] = str(sorted((one.name, str(one.distribution)) for one in space))
    same["preset, or default of the script"] = str(sorted(first.items()))
    params = {one.name: one.nearest(first.get(one.argument)) for one in space}
    params = {name: value for name, value in params.items() if value is not None}
    with one_at_a_time(folder):
        storage = open_storage(args, folder)
        names = {"study_name": args.study_name, "storage": storage, "load_if_exists": True}
        options = {"direction": args.direction, "sampler": sampler, "pruner": pruner}
        study = optuna.create_study(**names, **options)
        for key, value in same.items():
            if study.user_attrs.get(key, value) != value:
                name = f"--study-name {args.study_name}"
                raise UsageError(f"{name}: exists with another {key}; take another, or delete it")
            study.set_user_attr(key, value)
        if not study.trials and (folder / "trials").exists():  # of a study that is gone
            (folder / "trials").rename(folder / f"trials_before_{time.time():.0f}")
        study.enqueue_trial(params, skip_if_exists=True)
    distributions = {one.name: one.distribution for one in space}
    study.ask = one_at_a_time(folder)(partial(study.ask, distributions))  # knowing what runs
    return study


# THE SWEEP ----------------------------------------------------------------------------------------


def fresh_mean(trials: list[FrozenTrial]) -> float:
    """The mean score without the first run's, which chose them: the best of many is lucky too."""
    return float(np.mean([trial.value for trial in trials[1:] or trials]))


def divide(things: list, workers: int) -> list[str]:
    """For each worker its neighbouring ones; where there are too few, workers share them."""
    parts = np.array_split(things, min(workers, len(things)))
    return [",".join(map(str, parts[n % len(parts)])) for n in range(workers)]


class Sweep:
    def __init__(self, args: Args, space: list[Parameter], study: optuna.Study, folder: Path):
        self.args = args
        self.space = space
        self.study = study
        self.folder = folder
        self.began = []  # the numbers of this process's trials
        queued = self.trials(TrialState.WAITING) + self.trials(TrialState.RUNNING)
        again = ["again" in one.user_attrs for one in self.trials() + queued]
        self.target = args.num_trials + sum(again)
        self.deadline = time.monotonic() + args.timeout
        self.better = max if args.direction == "maximize" else min
        self.stopping = []  # what said so: signals' numbers, the UsageError of a first trial
        every_gpu = ",".join(map(str, range(torch.cuda.device_count())))
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", every_gpu).replace(" ", "").split(",")
        cores = divide(sorted(os.sched_getaffinity(0)), args.workers)
        pairs = zip(cores, divide(gpus, args.workers))
        pin = "setpriv --pdeathsig TERM taskset -c {} env CUDA_VISIBLE_DEVICES={}"
        self.slots = [pin.format(*pair).split() for pair in pairs]  # that no trial has

    def command(self, trial: optuna.Trial, arguments: dict[str, Any], folder: Path) -> list[str]:
        """The words that run the script. Those of the trial win over a preset's."""
        args = self.args
        words = [*shlex.split(args.launcher), args.script, *args.fixed, f"--env-id={args.env_id}"]
        words += [f"--seed={args.seed + trial.number}", f"--output-dir={folder}"]
        for key, value in arguments.items():
            if value is None and not key.startswith("env."):  # a preset may have another
                arguments = arguments | {key: "None"}
        return [*words, f"--time-limit={args.max_cost_seconds}", *adapters.as_words(arguments)]

    def run(self) -> int:
        """Trials until there are enough, then the best again. Returns the exit code."""
        for signum in adapters.ENDING:
            signal.signal(signum, lambda number, _: self.stopping.append(number))
        say(f"{self.folder}: {len(self.trials())} of {self.target} trials; logs are in its trials/")
        options = {"n_jobs": self.args.workers, "catch": InterruptedError}
        options |= {"callbacks": [self.after_trial]}
        while not self.stopping:
            try:
                if self.enough() and not self.queue_best_again():
                    break
                missing = self.target - len(self.trials())
                self.study.optimize(partial(run_trial, sweep=self), n_trials=missing, **options)
            except (OptunaError, ValueError, UnboundLocalError, AssertionError) as error:
                if not isinstance(error, OptunaError) and not re.search(UNTOLD, str(error)):
                    raise
                while error.__context__:  # the driver's own words
                    error = error.__context__
                reason = str(error).split("\n")[0]
                say(f"warning: the database was away: {reason}; on in ten seconds")
                time.sleep(10)  # a trial that was lost is run again
        cause = self.stopping[0] if self.stopping else None
        if isinstance(cause, UsageError):
            if not self.worked() and not self.trials(TrialState.RUNNING):
                storage = open_storage(self.args, self.folder)  # a corrected command begins anew
                optuna.delete_study(study_name=self.args.study_name, storage=storage)
            raise cause
        scored = True
        with contextlib.suppress(OptunaError if cause else ()):  # the database is away
            scored = self.report()
        if cause:
            say("interrupted; the same command goes on")
            return 128 + cause
        return 0 if scored else 1

    def enough(self) -> bool:
        late = time.monotonic() > self.deadline
        return self.stopping or late or len(self.trials()) >= self.target

    def trials(self, state: TrialState = TrialState.COMPLETE) -> list[FrozenTrial]:
        """Trials that are over, well or not (interrupted ones are FAIL), or in another state."""
        return self.study.get_trials(deepcopy=False, states=[state])

    def worked(self) -> list[FrozenTrial]:
        return [trial for trial in self.trials() if "failure" not in trial.user_attrs]

    def running(self) -> list[FrozenTrial]:
        """Optuna sees that a process is gone if it has begun to run its trial."""
        running = self.trials(TrialState.RUNNING)
        return [trial for trial in running if trial.user_attrs.get("began") == trial.number]

    def same_params(self) -> list[list[FrozenTrial]]:
        """Trials, those of the same hyperparameters together, the best first run first."""
        groups = {}
        for trial in self.trials():
            if "failure" not in trial.user_attrs or str(trial.params) in groups:
                groups.setdefault(str(trial.params), []).append(trial)
        return sorted(groups.values(), key=lambda one: one[0].value, reverse=self.better is max)

    def queue_best_again(self) -> bool:
        """Queues the best, on fresh seeds, once all else is done. Whether there are any."""
        if self.running():
            say("waiting for the trials of other processes; then the best run again")
        while self.running() and not self.stopping:
            optuna.storages.fail_stale_trials(self.study)  # of a machine that is gone
            time.sleep(1)
        with one_at_a_time(self.folder):  # or another process queues them too
            done = not self.running() and not self.trials(TrialState.WAITING)
            if done and not self.stopping:
                for trials in self.same_params()[:BEST]:
                    for _ in range(1 + self.args.confirm_seeds - len(trials)):
                        self.study.enqueue_trial(trials[0].params, user_attrs={"again": True})
            self.target = len(self.trials()) + len(self.trials(TrialState.WAITING))
        self.deadline = math.inf
        return not self.enough()

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
            line += self.write_best()
        say(f"trial {trial.number}: {line}; {len(self.trials())} of {self.target}")
        if self.enough():
            study.stop()

    def write_best(self) -> str:
        """best.yaml, anew after every trial: of what has run again if anything has. In words."""
        groups = self.same_params()
        if not groups:
            return ""
        confirmed = [trials for trials in groups if len(trials) > self.args.confirm_seeds]
        trials = self.better(confirmed or groups, key=fresh_mean)
        score = f"{self.args.metric} {fresh_mean(trials):.6g}"
        how = f"mean of {len(trials) - 1} fresh seeds" if trials[1:] else "one run, so partly luck"
        text = f"# Trial {trials[0].number} of study {self.args.study_name}: {score} ({how}).\n"
        text += yaml.safe_dump(trials[0].user_attrs["config"], sort_keys=False)
        adapters.write_whole(self.folder / "best.yaml", text.encode())
        return f"; best {fresh_mean(trials):.5g} (trial {trials[0].number})"

    def report(self) -> bool:
        """pareto.png, importances.png, and a table of the front. Whether there is any."""
        trials = self.worked()
        if not trials:
            say(f"no trial has a score; the logs are in {self.folder / 'trials'}")
            return False
        with one_at_a_time(self.folder):
            self.write_best()  # another machine's trial may have ended last
        matplotlib.use("Agg")
        plots = optuna.visualization.matplotlib
        both = optuna.create_study(directions=["minimize", self.args.direction])
        for one in trials:
            both.add_trial(optuna.create_trial(values=[one.user_attrs["cost"], one.value]))
        axes = plots.plot_pareto_front(both, target_names=["seconds of training", self.args.metric])
        axes.figure.savefig(self.folder / "pareto.png", dpi=150, bbox_inches="tight")
        with contextlib.suppress(ValueError, RuntimeError):  # fewer than two, or all alike
            axes = plots.plot_param_importances(self.study)
            axes.figure.savefig(self.folder / "importances.png", dpi=150, bbox_inches="tight")
        say(f"no trial beats these in both: trial, cost in seconds, {self.args.metric}")
        for one in sorted(both.best_trials, key=lambda one: one.values):
            say("{:>6} {:>10.1f} {:>18.5g}".format(trials[one.number].number, *one.values))
        return True


# PLUMBING: command line ---------------------------------------------------------------------------

OURS = {"seed", "output_dir", "time_limit", "resume"}  # not for a space, nor after --


def script_defaults(path: str) -> dict[str, Any]:
    """The constants in the script's `class Args`, which is read, not run."""
    with from_user(f"--script {path}"):
        tree = ast.parse(Path(path).read_text())
    defaults = {}
    for node in tree.body:
        for field in node.body if getattr(node, "name", "") == "Args" else []:
            with contextlib.suppress(AttributeError, ValueError):  # no field, or no constant
                defaults[field.target.id] = ast.literal_eval(field.value)
    return defaults


def read_yaml(path: str, flag: str) -> dict[str, Any]:
    with from_user(f"{flag} {path}"):
        return adapters.read_arguments(path)


def prepare(argv: list[str]) -> Sweep:
    """Everything that can be wrong is found here. Raises UsageError."""
    args = tyro.cli(Args, args=argv, description=__doc__)
    joined = re.compile("--[^=]+=[^-]")  # a value of "-x" alone would be a flag
    split = (word.split("=", 1) if joined.match(word) else [word] for word in args.fixed)
    args.fixed = tuple(part for parts in split for part in parts)
    for name in "num_trials", "workers", "max_cost_seconds", "hang_seconds":
        if not getattr(args, name) > 0:  # nor NaN
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be above 0")
    content = read_yaml(args.space, "--space") if args.space else yaml.load(SPACE, adapters.Loader)
    flags = [word[2:].partition("=")[0] for word in args.fixed if word.startswith("--")]
    given = {flag.replace("-", "_") for flag in flags}
    given |= {name.removeprefix("no_") for name in given}
    taken = sorted((OURS | {"env_id"}) & (given | set(content)))
    if taken:
        raise UsageError(f"{', '.join(taken)}: the sweep gives this itself; leave it out")
    first = script_defaults(args.script)
    space = []
    for argument, entry in content.items():
        if argument not in given:
            with from_user(f"--space, {argument}: {entry}, not as in SPACE"):
                space.append(parse_parameter(argument, entry, first.get(argument)))
    following = dict(pairwise(args.fixed))
    if "--config" in following:
        first |= read_yaml(following["--config"], "-- --config")
    first |= {f"env.{key}": value for key, value in (first.get("env") or {}).items()}
    args.env_id = args.env_id or first.get("env_id", "breakout")
    name = re.sub(r"[^\w.-]+", "-", f"{args.env_id}__{Path(args.script).stem}")
    args.study_name = args.study_name or name
    folder = Path(os.path.expanduser(args.output_dir), args.study_name)
    with from_user(f"--output-dir {args.output_dir}"):
        folder.mkdir(parents=True, exist_ok=True)
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
