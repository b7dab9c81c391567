"""Hyperparameter search that knows what a trial costs: PufferLib's Protein as an Optuna sampler, over training scripts.

    python protein_sweep.py --env-id breakout --num-trials 60 --max-cost-seconds 60 --workers 2
    python protein_sweep.py --env-id breakout --num-trials 90 ...  # the same study goes on, after Ctrl-C too
    python protein_sweep.py --env-id pong -- --num-envs 512 --hidden-size 64      # after --: always for the script
    python protein_sweep.py --storage postgresql://user@host/sweeps ...           # the same on many machines: one study
    python ppo_lstm_puffer.py --config sweeps/breakout__ppo_lstm_puffer/best.yaml # train with what it found
    optuna-dashboard sqlite:///sweeps/breakout__ppo_lstm_puffer/study.db          # look at it in a browser

Optuna keeps the study (trials, storage, resuming, pruning). This file adds ProteinSampler, and trials as processes: on
cores and a GPU of their own, read while they run, stopped when they cost too much or look hopeless, recorded as
failures when they crash. At the end the three best run again on fresh seeds, and their means decide.
Read it from the top: arguments, search space, the sampler (which any Optuna study can use), a trial, the sweep.
"""

import ast
import contextlib
import csv
import ctypes
import difflib
import functools
import io
import json
import math
import os
import pathlib
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is something to save, Ctrl-C just ends it: no traceback

import numpy as np
import optuna
import scipy.optimize
import scipy.stats
import sqlalchemy.exc
import threadpoolctl
import tyro
import yaml
from optuna._transform import _SearchSpaceTransform
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor, kernels


@dataclass
class Args:
    """Cost-aware hyperparameter search over a training script."""

    script: str = "ppo_lstm_puffer.py"
    """the training script: it takes --env-id, --seed and --output-dir, and writes metrics.jsonl with step and time"""
    env_id: str = "breakout"
    """the environment, as the script takes it"""
    space: str = str(pathlib.Path(__file__).parent / "benchmark/sweeps/default.yaml")
    """the search space, a YAML file: argument: [choices] or {distribution, min, max}"""
    metric: str = "env/score"
    """what is optimized: any key of metrics.jsonl"""
    direction: Literal["maximize", "minimize"] = "maximize"
    """which way the metric is better"""
    num_trials: int = 60
    """finished trials in the study, those before a restart and those of other processes included"""
    max_cost_seconds: float = 300.0
    """a run is stopped after so many seconds of training (compilation not counted), and counts with what it reached"""
    workers: int = 1
    """trials at once; this process's cores are divided among them, and each has one GPU where there are several"""
    seeds: int = 1
    """runs per trial, each with a seed of its own; the trial's score and cost are their means"""
    confirm_seeds: int = 3
    """fresh seeds on which the three best trials run again at the end: the best mean wins (0: as it was)"""
    pruning: bool = True
    """stop a trial when, at the same cost, it is worse than three quarters of the complete ones (of ten at least)"""
    sampler: Literal["protein", "gp", "tpe", "random", "grid"] = "protein"
    """protein: the one below; the others are Optuna's own, which see the score only"""
    seed: int = 1
    """seed of the sampler; run k of trial n trains with seed + n * seeds + k"""
    hang_seconds: float = 600.0
    """a run without a new line in metrics.jsonl for so long has failed (compilation, before the first, included)"""
    study_name: str | None = None
    """name of the study and of its folder; default: <env>__<script>"""
    output_dir: str = "sweeps"
    """the study's folder goes here"""
    storage: str | None = None
    """an SQL database for Optuna, as postgresql://user@host/name; default: study.db (SQLite) in the study's folder"""
    fixed: tyro.conf.Suppress[tuple[str, ...]] = ()
    """after --: arguments for the script that stay as they are; they win over the space"""


class UsageError(Exception):
    """Bad input: main prints it as one line and exits with code 2."""

    def __str__(self):  # what it quotes may have newlines and escape sequences
        return "".join(character if character.isprintable() else " " for character in super().__str__())


# THE SEARCH SPACE: what a line of the YAML file is to the sampler -----------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    """An argument of the script as a parameter of the study, on the scale on which a step is as large everywhere.

    gamma from 0.9 to 0.999 becomes "1 - gamma", logarithmic; num_envs in powers of two becomes "log2(num_envs)", an
    integer. So every sampler, and every plot of Optuna's, sees the natural scale.
    """

    argument: str
    name: str
    distribution: BaseDistribution
    to_argument: Callable[[Any], Any] = lambda value: value
    to_parameter: Callable[[Any], Any] = lambda value: value


def significant(value: float) -> float:
    """Rounded to four digits, for files that people read."""
    return float(f"{value:.4g}")


def parse_space(content: Any, source: str) -> list[Parameter]:
    """Parameters from the content of a space file. Raises UsageError."""
    if not isinstance(content, dict) or not content:
        raise UsageError(f"--space {source}: not a mapping of arguments to distributions or lists")
    return [parse_parameter(str(key).replace("-", "_"), content[key], f"--space {source}: {key}") for key in content]


def parse_parameter(argument: str, entry: Any, where: str) -> Parameter:
    """A line of a space file. Raises UsageError."""
    if isinstance(entry, list) and entry and all(isinstance(choice, (bool, int, float, str)) for choice in entry):
        return Parameter(argument, argument, CategoricalDistribution(entry))
    if not isinstance(entry, dict) or set(entry) != {"distribution", "min", "max"}:
        raise UsageError(f"{where}: {entry}: must be a list of choices, or have exactly distribution, min and max")
    kind, low, high = entry["distribution"], entry["min"], entry["max"]
    numbers = {type(low), type(high)} <= {int, float} and -math.inf < low < high < math.inf
    whole = numbers and type(low) is type(high) is int
    powers = whole and low > 0 and low & (low - 1) == high & (high - 1) == 0
    kinds = {
        "uniform": (numbers, "numbers"),
        "int_uniform": (whole, "whole numbers"),
        "uniform_pow2": (powers, "powers of two, as 64 and 1024"),
        "log_normal": (numbers and low > 0, "numbers above 0"),
        "logit_normal": (numbers and high < 1, "numbers below 1"),
    }
    fits, wanted = kinds.get(str(kind), (False, f"and distribution one of {', '.join(kinds)}"))
    if not fits:
        note = "the first smaller (YAML wants 1.0e-5 for 1e-5)"
        raise UsageError(f"{where}: distribution {kind}, min {low}, max {high}: must be {wanted}, {note}")
    if kind == "uniform_pow2":
        distribution = IntDistribution(low.bit_length() - 1, high.bit_length() - 1)
        exponent_of = lambda value: round(np.log2(max(value, 1)))  # noqa: E731
        return Parameter(argument, f"log2({argument})", distribution, lambda exponent: 2**exponent, exponent_of)
    if kind == "logit_normal":
        distribution = FloatDistribution(round(1 - high, 12), round(1 - low, 12), log=True)
        value_of = lambda rest: round(1 - significant(rest), 12)  # noqa: E731
        return Parameter(argument, f"1 - {argument}", distribution, value_of, lambda value: 1 - value)
    if kind == "int_uniform" or (kind == "log_normal" and whole):
        return Parameter(argument, argument, IntDistribution(low, high, log=kind == "log_normal"))
    return Parameter(argument, argument, FloatDistribution(low, high, log=kind == "log_normal"), significant)


def to_arguments(space: list[Parameter], params: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The script's arguments of a trial. A minibatch larger than the batch is lowered, lest it refuses."""
    arguments = {parameter.argument: parameter.to_argument(params[parameter.name]) for parameter in space}
    sizes = given | arguments
    if "minibatch_size" in arguments and {"num_envs", "num_steps"} <= set(sizes):
        arguments["minibatch_size"] = min(arguments["minibatch_size"], sizes["num_envs"] * sizes["num_steps"])
    return arguments


def to_params(space: list[Parameter], arguments: dict[str, Any]) -> dict[str, Any]:
    """The other way, for the trial that starts a study: values outside the space are moved to its border."""
    params = {}
    for parameter in space:
        distribution, value = parameter.distribution, arguments.get(parameter.argument)
        if isinstance(distribution, CategoricalDistribution):
            params |= {parameter.name: value} if value in distribution.choices else {}
        elif value is not None:
            value = min(max(parameter.to_parameter(value), distribution.low), distribution.high)
            params[parameter.name] = int(value) if isinstance(distribution, IntDistribution) else float(value)
    return params


# ALGO LOGIC: the sampler ----------------------------------------------------------------------------------------------


class Cube(_SearchSpaceTransform):
    """A search space as the unit cube, by Optuna: one coordinate per number (of its logarithm where the distribution is
    logarithmic; a whole number is as wide as its rounding), one per choice of a categorical parameter (1: chosen)."""

    def __init__(self, space: dict[str, BaseDistribution]):
        super().__init__(space, transform_0_1=True)
        self.space, self.dim = space, len(self.bounds)
        self.encode, self.decode, self.owner = self.transform, self.untransform, self.encoded_column_to_column

    def ends(self, name: str) -> np.ndarray:
        """What 0 and 1 stand for: a number, or its logarithm."""
        return self._raw_bounds[self.column_to_encoded_columns[list(self.space).index(name)][0]]

    def scale(self, x: np.ndarray, name: str, factors: np.ndarray) -> np.ndarray:
        """Coordinates (n, dim) where the number called `name` is multiplied by factors (n), beyond its range too."""
        column, x = self.column_to_encoded_columns[list(self.space).index(name)][0], x.copy()
        low, high = self.ends(name)
        value = low + x[:, column] * (high - low)
        value = value + np.log(factors) if self.space[name].log else value * factors
        x[:, column] = (value - low) / (high - low)
        return x


def pareto_front(costs: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Indices, by rising cost, of the points that no other beats: better than everything that costs as much or less."""
    order = np.lexsort((-scores, costs))
    best = np.maximum.accumulate(scores[order])
    return order[np.concatenate(([True], best[1:] > best[:-1]))]


class SameRun(kernels.StationaryKernelMixin, kernels.Kernel):
    """1 for two points of one run, else 0: times a variance, the luck that all points of a run share."""

    def __init__(self):  # scikit-learn reads the parameters off this
        pass

    def __call__(self, X, Y=None, eval_gradient=False):
        same = np.equal.outer(X[:, -1], (X if Y is None else Y)[:, -1]).astype(float)
        return (same, np.empty((*same.shape, 0))) if eval_gradient else same

    def diag(self, X):
        return np.ones(len(X))


class Process:
    """A Gaussian process (Rasmussen & Williams 2006) through y (n) at x (n, d), points of runs (n).

    The linear kernel is the trend: a cost, in logarithms, is close to linear in the sizes. Matern 3/2 is what a plane
    cannot follow, with a length scale per coordinate, long where a hyperparameter does not matter. Two seeds differ by
    what all points of a run share, and by the white noise of each: luck, which a prediction leaves out.
    The kernel's parameters are maximum a posteriori: with as many length scales as observations, the likelihood alone
    overfits, so a log-normal prior, wider in more dimensions, holds them (Hvarfner et al. 2024). They are fitted to
    `most` observations at most, since each of some 50 steps costs n^3; the process itself then takes all.
    """

    def __init__(self, x: np.ndarray, y: np.ndarray, runs: np.ndarray, rng: np.random.Generator, most: int = 128):
        d = x.shape[1] + 1
        bumps = kernels.Matern(np.full(d, 0.7 * np.sqrt(d - 1)), (0.05, 1e3), nu=1.5)
        kernel = kernels.ConstantKernel(1.0, (1e-2, 1e2)) * bumps
        kernel += kernels.ConstantKernel(0.3, (1e-3, 1e2)) * kernels.DotProduct(1.0, "fixed")
        kernel += kernels.ConstantKernel(0.03, (1e-5, 1.0)) * SameRun() + kernels.WhiteKernel(0.03, (1e-5, 1.0))
        # theta: variance, d length scales, linear variance, luck, noise, in logarithms; the prior is around the start.
        mean, deviation = kernel.theta, np.array([1.0, *np.ones(d), 1.5, 1.5, 1.5])

        def maximum_a_posteriori(negative_likelihood, theta, bounds):
            def objective(theta):
                value, gradient = negative_likelihood(theta)
                z = (theta - mean) / deviation
                return value + 0.5 * z @ z, gradient + z / deviation

            options = {"jac": True, "bounds": bounds, "method": "L-BFGS-B", "options": {"maxiter": 30}}
            result = scipy.optimize.minimize(objective, theta, **options)
            return result.x, result.fun

        self.x, self.y = self.points(x, runs), y
        some = rng.choice(len(y), most, replace=False) if len(y) > most else slice(None)
        with warnings.catch_warnings():  # a parameter at its bound, which the prior seldom allows, is no news
            warnings.simplefilter("ignore", ConvergenceWarning)
            gp = GaussianProcessRegressor(kernel, optimizer=maximum_a_posteriori, normalize_y=True)
            self.kernel = gp.fit(self.x[some], y[some]).kernel_
        self.luck = self.kernel.k2.k1.k1.constant_value + self.kernel.k2.k2.noise_level
        self.fit(1e-10)

    @staticmethod
    def points(x: np.ndarray, runs: np.ndarray) -> np.ndarray:
        """The kernels' input (n, d + 1): the number of the run is last, so small that none but SameRun sees it."""
        return np.column_stack((x, 1e-9 * runs))

    def fit(self, alpha: float | np.ndarray):
        gp = GaussianProcessRegressor(self.kernel, alpha=alpha, optimizer=None, normalize_y=True)
        self.gp = gp.fit(self.x, self.y)

    def predict(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation (n) at x (n, d) over all seeds: without the luck of any run."""
        mean, deviation = self.gp.predict(self.points(x, np.full(len(x), -1)), return_std=True)
        return mean, np.sqrt(np.maximum(deviation**2 - self.luck * self.gp._y_train_std**2, 1e-12))

    def imagine(self, x: np.ndarray) -> np.ndarray:
        """Takes the predictions at x (n, d) for what was observed there, without luck; returns them."""
        mean, _ = self.predict(x)
        alpha = np.repeat((1e-10, 1e-4 - self.luck), (len(self.x), len(x)))  # takes off what the kernel adds for luck
        self.x = np.concatenate((self.x, self.points(x, -2 - np.arange(len(x)))))
        self.y = np.concatenate((self.y, mean))
        self.fit(alpha)
        return mean


class ProteinSampler(optuna.samplers.BaseSampler):
    """Suggests hyperparameters by what they are predicted to score and to cost, after PufferLib's Protein (sweep.py).

    1. Every finished trial is seen at several points of its learning curve: (hyperparameters, with total_timesteps the
       steps made by then; progress) -> (cost, score). A trial that was stopped early is seen as far as it came.
    2. One Gaussian process is fitted to the score, one to the logarithm of the cost, a third to 0 or 1, failed or not
       (least-squares classification). Trials that are running stand at their prediction (the kriging believer).
    3. Candidates are drawn around the Pareto front, the trials that no other beats in both cost and score: steps of
       every size, in some of the coordinates; then nearer and nearer around the best candidates.
    4. A limit on the cost is drawn: three times in four the largest that is allowed or a quarter more than the best
       trial's, else one from the front's range. Of the candidates predicted to cost no more, the one with the largest
       expected improvement on what was reached at that cost, times its chance not to fail, is suggested.
       So every cost level is improved, and what is learned from cheap trials helps the dear ones.
    The first trials, before there is anything to fit, are a scrambled Sobol sequence. The sampler keeps nothing: a
    suggestion is a function of the seed, the trial's number, and the trials in the storage, so a restart goes on.

    It works with any Optuna study of one objective. Of a trial it reads the user attribute "curve", [[progress, cost,
    score], ...] with progress in (0, 1] and cost in seconds; without it, value and duration. A failed trial counts as
    failure if it has the user attribute "failure": an interrupted one is nobody's fault.

    Unlike Protein in PufferLib 3.0.0: kernels' parameters are fitted; the points of a run share its luck; a partial run
    is told from a complete one, as its learning rate was not annealed; failures are no successes; repeated trials are
    kept, since their difference is the noise; expected improvement instead of the mean; choices and minimization work.
    Sources: PufferLib (Suarez 2025); CARBS (Fetterman et al. 2023); Rasmussen & Williams (2006), 5.4 and 6.5; Lizotte,
    "Practical Bayesian optimization" (2008); Ginsbourger et al., "Kriging is well-suited to parallelize" (2010).
    """

    def __init__(self, space: dict | None = None, seed: int = 1, max_cost: float = np.inf, num_random: int = 5):
        """space: if None, what the trials have in common. max_cost: where a trial will be stopped, in seconds."""
        self.space, self.seed, self.max_cost, self.num_random = space, seed, max_cost, num_random

    def infer_relative_search_space(self, study, trial) -> dict[str, BaseDistribution]:
        return self.space or optuna.search_space.intersection_search_space(study.get_trials(deepcopy=False))

    def sample_independent(self, study, trial, name: str, distribution: BaseDistribution) -> Any:
        """For parameters outside the space: evenly random."""
        rng = np.random.default_rng([self.seed, trial.number, zlib.crc32(name.encode())])
        cube = Cube({name: distribution})
        return cube.decode(rng.random(cube.dim))[name]

    def sample_relative(self, study, trial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        if not search_space:
            return {}
        cube, rng = Cube(search_space), np.random.default_rng([self.seed, trial.number])
        trials = [one for one in study.get_trials(deepcopy=False) if set(search_space) <= set(one.params)]
        encoded = [(one, cube.encode(one.params)) for one in trials]
        curves = [(x, curve) for one, x in encoded if (curve := curve_of(one))]
        if len(curves) < self.num_random:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Sobol is balanced after 2^k points, and says so
                return cube.decode(scipy.stats.qmc.Sobol(cube.dim, seed=self.seed).random(trial.number + 1)[-1])
        failures = [x for one, x in encoded if "failure" in one.user_attrs]
        pending = [x for one, x in encoded if one.state == TrialState.RUNNING and one.number != trial.number]
        sign = 1 if study.direction.name == "MAXIMIZE" else -1
        return cube.decode(self.suggest(cube, curves, failures, pending, sign, rng))

    def suggest(self, cube: Cube, curves: list, failures: list, pending: list, sign: int, rng) -> np.ndarray:
        """curves: (coordinates, [(progress, cost, score), ...]) per trial; the others, and the result: coordinates."""
        x = np.array([coordinates for coordinates, curve in curves for _ in curve])
        progress, costs, scores = np.array([point for _, curve in curves for point in curve], float).T
        runs = np.repeat(np.arange(len(curves)), [len(curve) for _, curve in curves])
        costs, scores = np.maximum(costs, 1e-3), sign * scores
        score_gp = Process(with_progress(cube, x, progress), scores, runs, rng)
        cost_gp = Process(with_progress(cube, x, progress), np.log(costs), runs, rng)
        ends = np.cumsum([len(curve) for _, curve in curves]) - 1  # each trial's last point
        failed = np.repeat((0.0, 1.0), (len(ends), len(failures)))
        kernel = kernels.Matern(0.3 * np.sqrt(cube.dim), nu=1.5) + kernels.WhiteKernel(0.1)
        failure_gp = GaussianProcessRegressor(kernel, optimizer=None).fit(np.array([*x[ends], *failures]), failed)

        def where_it_ends(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            """Costs in full (n), and the score's input: a trial that would be stopped is judged by how far it comes."""
            cost = np.exp(cost_gp.predict(with_progress(cube, x, np.ones(len(x))))[0])
            return cost, with_progress(cube, x, np.minimum(1, self.max_cost / cost))

        reached, _ = score_gp.predict(with_progress(cube, x[ends], progress[ends]))
        spent = costs[ends]
        if pending:
            cost, points = where_it_ends(np.array(pending))
            reached = np.concatenate((reached, score_gp.imagine(points)))
            spent = np.concatenate((spent, np.minimum(cost, self.max_cost)))

        # The limit: the largest cost there is, or one from the front's range. The record: the best at that cost, but
        # for luck, and a margin (Lizotte): a study that counts the last digit tries its best trial again and again.
        front = ends[pareto_front(costs[ends], scores[ends])]
        low, high = np.log(costs[front[0]]), np.log(min(self.max_cost, 1.25 * costs[front[-1]]))
        limit = np.exp(high if rng.random() < 0.75 else rng.uniform(min(low, high), high))
        record = reached[spent <= max(limit, costs[front[0]])].max() + 0.03 * scores.std()

        def rate(candidates: np.ndarray) -> np.ndarray:
            """Expected improvement on the record (0 at the least) times the chance not to fail; minus the cost where
            that or the risk is too large."""
            cost, points = where_it_ends(candidates)
            mean, deviation = score_gp.predict(points)
            # Half the deviation, nearer to the highest mean: a study is short (measured by benchmark/sweep.py).
            z = (mean - record) / (0.5 * deviation)
            improvement = 0.5 * deviation * (z * scipy.stats.norm.cdf(z) + scipy.stats.norm.pdf(z))
            failure = failure_gp.predict(candidates).clip(0, 1)
            cost = np.minimum(cost, self.max_cost)
            # What would be stopped at the largest cost is suggested only where hardly anything would not be.
            allowed = (cost <= limit) & (cost < self.max_cost) | (cost <= np.quantile(cost, 0.05))
            # Once little is left to gain where trials succeed, any chance of more would do: so only where most will.
            return np.where(allowed & (failure < 0.3), improvement * (1 - failure), -cost)

        # The front's trials, with a random part of the hyperparameters moved by a step of random size, or drawn anew:
        # so no valley is too wide. Then around the best so far, three times, by half the step, nothing drawn anew:
        # the prediction's summit in ten dimensions is not found by chance, but far from all trials it is none.
        centers, pool, ratings = x[front], np.empty((0, cube.dim)), np.empty(0)
        for scale in (1, 1 / 2, 1 / 4, 1 / 8):
            chosen = centers[rng.integers(len(centers), size=1024)]
            size, share = scale * 10 ** rng.uniform(-2, -0.3, (len(chosen), 1)), rng.random((len(chosen), 1))
            which = len(chosen), len(cube.space)  # whole hyperparameters: all coordinates of a choice, or none
            moved = np.clip(chosen + size * rng.standard_normal(chosen.shape), 0, 1)
            anew = 0.2 if scale == 1 else 0.0
            moved = np.where((rng.random(which) < anew)[:, cube.owner], rng.random(chosen.shape), moved)
            moved = np.where((rng.random(which) < share)[:, cube.owner], moved, chosen)
            # What is rated is what would be run: whole numbers rounded, one choice of each list.
            candidates = np.array([cube.encode(cube.decode(candidate)) for candidate in moved])
            pool, ratings = np.concatenate((pool, candidates)), np.concatenate((ratings, rate(candidates)))
            centers = pool[np.argsort(-ratings)[:16]]
        return centers[0]


def with_progress(cube: Cube, x: np.ndarray, progress: np.ndarray) -> np.ndarray:
    """Coordinates (n, d) and progress (n) to (n, d + 1): what had been run by then, and how far it was.

    total_timesteps becomes the steps made by then, on which a score depends first; that the learning rate would have
    been annealed over more is the last coordinate, a unit less for a tenth. So long runs tell what short ones will do.
    """
    progress, total = np.maximum(progress, 1e-3), cube.space.get("total_timesteps")
    if isinstance(total, (FloatDistribution, IntDistribution)) and not total.single():
        x = cube.scale(x, "total_timesteps", progress)
    return np.column_stack((x, 1 + np.log10(progress)))


def curve_of(trial: FrozenTrial) -> list[list[float]]:
    """[[progress, cost, score], ...] of a finished trial, by rising cost; empty for one that left nothing."""
    if trial.state not in (TrialState.COMPLETE, TrialState.PRUNED):
        return []
    if "curve" not in trial.user_attrs and trial.value is not None:
        return [[1.0, trial.duration.total_seconds(), trial.value]]
    return trial.user_attrs.get("curve", [])


# A TRIAL: runs of the script, one after another, watched through their metrics.jsonl ----------------------------------

POINTS = 5  # of a learning curve that the sampler sees
MILESTONES = 20  # costs, evenly spaced up to the largest, at which trials are compared for pruning
GRACE = 20.0  # seconds between SIGTERM, at which the script writes a checkpoint, and SIGKILL
TAIL = 2000  # characters of the log that a failed trial keeps
LIBC = ctypes.CDLL(None)
LOCK = threading.RLock()  # one suggestion at a time, so that the next knows of it; one writer of the study's files


class RunFailed(Exception):
    """A run crashed, diverged, hung or left no score: its trial has failed."""


class Interrupted(Exception):
    """A run was ended by a signal to the sweep: its trial is queued again."""


def score_at(rows: np.ndarray, cost: float) -> float:
    """The score at a cost, from rows (n, 3) of step, cost, score: the mean of the lines of the last tenth before it."""
    before = rows[rows[:, 1] <= cost]
    return float(before[before[:, 1] >= min(0.9 * cost, before[-1, 1]), 2].mean())


def learning_curve(rows: np.ndarray, total_timesteps: int | None) -> list[list[float]]:
    """POINTS times [progress, cost, score] at even parts of the cost reached. Progress: part of total_timesteps."""
    points = []
    for cost in rows[-1, 1] * (np.arange(1, POINTS + 1) / POINTS):  # the last is exactly the last row's
        step = np.interp(cost, rows[:, 1], rows[:, 0])
        if len(rows[rows[:, 1] <= cost]):
            points.append([min(1.0, step / (total_timesteps or rows[-1, 0])), cost, score_at(rows, cost)])
    return points


class Run:
    """A run of the script as a process in a group of its own, watched through its metrics.jsonl."""

    def __init__(self, command: list[str], folder: pathlib.Path, log: pathlib.Path, args: Args, slot: tuple):
        """folder: its --output-dir. slot: the cores that it may use, the environment variables that choose its GPU."""
        self.args, self.folder, self.log, (cores, gpu) = args, folder, log, slot
        self.rows, self.lines, self.keys, self.step = np.empty((0, 3)), 0, [], 0  # rows: step, cost, score
        self.first, self.reason, self.seen = None, None, time.monotonic()
        threads = {f"{library}_NUM_THREADS": str(len(cores)) for library in ("OMP", "OPENBLAS", "MKL")}
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command,
                env=os.environ | threads | gpu,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                preexec_fn=functools.partial(prepare_child, cores),
            )

    def read(self):
        """New lines of metrics.jsonl. Cost is the seconds since the first: before it is compilation."""
        path = next(self.folder.glob("*/metrics.jsonl"), None)
        lines = path.read_bytes().split(b"\n")[:-1] if path else []
        for text in lines[self.lines :]:
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):  # of a user's own script
                line = json.loads(text)
                self.reason = line.get("exit_reason", self.reason)
                self.first = self.first if self.first is not None else line["time"]
                self.latest, self.step = line["time"] - self.first, line["step"]
                self.keys = self.keys if self.reason else sorted(line)
                if self.args.metric in line:
                    row = self.step, max(self.latest, 1e-3), float(line[self.args.metric])
                    self.rows = np.vstack((self.rows, row))
        if len(lines) > self.lines:
            self.lines, self.seen = len(lines), time.monotonic()

    def wait(self, signals: list, hopeless: Callable[[np.ndarray], bool]) -> str | None:
        """Until the run is over, by itself (None) or by one of the reasons that are returned. Raises RunFailed."""
        ending, kill_at, flags = None, math.inf, os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            while (
                not os.waitid(os.P_PID, self.process.pid, flags) and len(signals) < 2
            ):  # a second Ctrl-C does not wait
                time.sleep(0.1)
                self.read()
                now, why = time.monotonic(), None
                if now > kill_at:
                    raise RunFailed(f"hangs: does not end within {GRACE:g} seconds of SIGTERM ({ending})")
                if not ending and now - self.seen > self.args.hang_seconds:
                    raise RunFailed(f"hangs: no new line in metrics.jsonl for {self.args.hang_seconds:g} seconds")
                if signals:
                    why = "interrupted"
                elif self.first is not None and self.latest + now - self.seen >= self.args.max_cost_seconds:
                    why = "max cost"
                elif hopeless(self.rows):
                    why = "pruned"
                if why and not ending:  # the script, not its group: whoever compiles ends it at once, and its compilers
                    ending, kill_at = why, now + GRACE
                    os.kill(self.process.pid, signal.SIGTERM)
        finally:
            self.kill()
        self.read()
        return ending

    def kill(self):
        """Ends the whole group, before the process is reaped: after that its number may be another's."""
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def result(self, ending: str | None) -> np.ndarray:
        """The rows of a run that is over. Raises RunFailed."""
        if not ending and self.process.returncode:
            raise RunFailed(self.reason or f"exit code {self.process.returncode}: {self.tail().rpartition(chr(10))[2]}")
        if not len(self.rows):
            have = ", ".join(self.keys) if self.lines else "nothing"
            raise RunFailed(f"no {self.args.metric} in metrics.jsonl, which has {have}")
        if not np.isfinite(self.rows[:, 2]).all():
            raise RunFailed(f"{self.args.metric} is not finite")
        if ending == "max cost":  # it had all the time there is, however long ago its last score was
            end = self.step, max(self.args.max_cost_seconds, self.rows[-1, 1]), self.rows[-1, 2]
            return np.vstack((self.rows, end))
        return self.rows

    def tail(self) -> str:
        return self.log.read_bytes()[-TAIL:].decode(errors="replace").strip()


def prepare_child(cores: list[int]):
    """In the new process: its cores, SIGTERM if this one is killed, SIGINT, which a shell's background job ignores."""
    os.sched_setaffinity(0, cores)
    LIBC.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def flag(key: str, value: Any) -> str:
    """An argument as the script takes it."""
    name = key.replace("_", "-")
    return f"--{name}={value}" if not isinstance(value, bool) else f"--{name}" if value else f"--no-{name}"


def run_trial(trial: optuna.Trial, sweep: "Sweep", slot: tuple) -> float:
    """Runs the script with what the study suggests, on every seed; returns the mean score. Optuna's objective."""
    args, facts = sweep.args, trial.user_attrs
    with LOCK:
        params = {one.name: trial._suggest(one.name, one.distribution) for one in sweep.space}
    arguments = to_arguments(sweep.space, params, sweep.given)
    trial.set_user_attr("arguments", arguments)
    trial.set_user_attr("process", f"{socket.gethostname()}:{os.getpid()}")
    folder = sweep.folder / "trials" / f"{trial.number:04d}"
    shutil.rmtree(folder, ignore_errors=True)  # of a study that was deleted
    folder.mkdir(parents=True)
    first, reported, curves, steps = args.seed + trial.number * args.seeds, 0, [], []

    def hopeless(rows: np.ndarray) -> bool:
        """Reports the first run's score at each new milestone; whether the pruner then says stop."""
        nonlocal reported
        if "again" in facts or curves or not len(rows) or not np.isfinite(rows[:, 2]).all():
            return False
        before, reported = reported, min(int(MILESTONES * rows[-1, 1] / args.max_cost_seconds), MILESTONES)
        for milestone in range(before + 1, reported + 1):
            cost = milestone / MILESTONES * args.max_cost_seconds
            if (rows[:, 1] <= cost).any():
                trial.report(score_at(rows, cost), milestone)
        return reported > before and args.pruning and trial.should_prune()

    for number, seed in enumerate([facts["seed"]] if "again" in facts else range(first, first + args.seeds)):
        output = folder / f"run{number}"
        command = [sys.executable, args.script, "--env-id", args.env_id, f"--seed={seed}", f"--output-dir={output}"]
        command += [flag(key, value) for key, value in arguments.items()] + list(args.fixed)
        run = Run(command, output, folder / "log.txt", args, slot)
        try:
            ending = run.wait(sweep.signals, hopeless)
            if sweep.signals and ending != "max cost" and (ending or run.process.returncode):
                raise Interrupted
            rows = run.result(ending)
        except RunFailed as error:
            if run.process.returncode == 2 and not sweep.any_worked():
                sweep.signals.append(0)  # the others' arguments are as bad
                raise UsageError(
                    f"{args.script} refuses its arguments: {run.tail().rpartition('error: ')[2]}"
                ) from error
            trial.set_user_attr("failure", str(error))
            trial.set_user_attr("log_tail", run.tail())
            raise
        curves.append(learning_curve(rows, (sweep.given | arguments).get("total_timesteps")))
        steps.append(rows[-1, 0])
        if ending == "pruned":
            break
    # Seeds are averaged point by point, the last points with each other.
    shortest = min(map(len, curves))
    curve = np.mean([points[-shortest:] for points in curves], axis=0).tolist()
    scores = [points[-1][2] for points in curves]
    result = {
        "curve": curve,
        "cost": curve[-1][1],
        "step": float(np.mean(steps)),
        "runs": len(scores),
        "scores": scores,
    }
    for key, value in (result | {"end": ending or run.reason or "completed"}).items():
        trial.set_user_attr(key, value)
    if ending == "pruned":
        raise optuna.TrialPruned
    return curve[-1][2]


# THE STUDY: which trials there are, and which of them run again -------------------------------------------------------

BEST = 3  # trials that run again at the end
FRESH = 1_000_000  # the first of their seeds, which no trial had
REQUEUES = 3  # a trial whose process was lost more often is the reason, and has failed


def make_sampler(args: Args, space: list[Parameter], number: int) -> optuna.samplers.BaseSampler:
    """The sampler by name. number: of trials so far, in the seed of Optuna's own, lest a restart repeats its draws."""
    seed, distributions = 1000 * args.seed + number, {one.name: one.distribution for one in space}
    return {
        "protein": lambda: ProteinSampler(distributions, args.seed, args.max_cost_seconds),
        "gp": lambda: optuna.samplers.GPSampler(seed=seed, deterministic_objective=False),
        "tpe": lambda: optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True),
        "random": lambda: optuna.samplers.RandomSampler(seed=seed),
        "grid": lambda: optuna.samplers.BruteForceSampler(seed=seed),
    }[args.sampler]()


def grid_points(space: list[Parameter], most: int = 1000) -> int:
    """How many combinations there are. Raises UsageError for too many, or where a range has no steps."""
    for one in space:
        if isinstance(one.distribution, FloatDistribution):
            raise UsageError(f"--sampler grid: {one.argument} is a range; give a list in --space, or fix it after --")
    sizes = [
        len(getattr(one.distribution, "choices", [])) or one.distribution.high - one.distribution.low + 1
        for one in space
    ]
    if (points := math.prod(sizes)) > most:
        raise UsageError(
            f"--sampler grid: {points:,} points in this space; give lists in --space, or fix arguments after --"
        )
    return points


def open_study(args: Args, space: list[Parameter], defaults: dict, folder: pathlib.Path) -> optuna.Study:
    """The study, new or as it was left. Raises UsageError if it is another one's, or the storage cannot be reached."""
    url = args.storage or f"sqlite:///{folder / 'study.db'}"
    url = re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", url)  # the driver in requirements.txt
    waits = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {"pool_pre_ping": True}
    beats = {"heartbeat_interval": 10, "grace_period": 60, "heartbeat_stale_trial_callback": requeue_lost}
    for attempt in range(5):
        try:
            storage = optuna.storages.RDBStorage(url, engine_kwargs=waits, **beats)
            break
        except Exception as error:  # SQLAlchemy's, a driver's, the operating system's
            # Of two processes that make the tables at once, the second fails, and finds them made a moment later.
            if attempt == 4 or not isinstance(error, sqlalchemy.exc.DBAPIError):
                raise UsageError(f"--storage {args.storage or url}: {' '.join(str(error).split())[:200]}") from error
            time.sleep(0.5)
    pruner = optuna.pruners.PercentilePruner(75, n_startup_trials=10, n_warmup_steps=MILESTONES // 3, n_min_trials=10)
    this = {key: getattr(args, key) for key in ("env_id", "metric", "direction", "seeds", "max_cost_seconds")}
    this |= {"script": os.path.basename(args.script), "fixed": list(args.fixed)}
    this["space"] = {one.name: optuna.distributions.distribution_to_json(one.distribution) for one in space}
    made = {"study_name": args.study_name, "storage": storage, "pruner": pruner}
    try:
        study = optuna.create_study(direction=args.direction, **made)
        if args.sampler != "grid":  # first the script's defaults: a sweep should not end with less than it starts with
            study.enqueue_trial(to_params(space, defaults))
    except optuna.exceptions.DuplicatedStudyError:  # as it was left, or made just now by a process beside this one
        study = optuna.load_study(**made)
    trials = study.get_trials(deepcopy=False)
    study.sampler = make_sampler(args, space, len(trials))
    if not any(map(curve_of, trials)):  # nothing has worked yet: no other study either
        study.set_user_attr("sweep", this)
    before = study.user_attrs.get("sweep", {})
    if changed := [key for key in this if before.get(key) != this[key]]:
        other = f"exists with another {', '.join(changed)}; give this one another --study-name, or delete it"
        raise UsageError(f"--study-name {args.study_name}: {other}")
    return study


def requeue(study: optuna.Study, trial: FrozenTrial, lost: int = 0):
    """Queues the hyperparameters of a trial that was interrupted. lost: 1 if its process has gone without a word."""
    attributes = {key: trial.user_attrs[key] for key in ("again", "seed", "lost") if key in trial.user_attrs}
    attributes["lost"] = attributes.get("lost", 0) + lost
    if attributes["lost"] <= REQUEUES:
        study.enqueue_trial(trial.params, user_attrs=attributes)
    else:
        attributes["failure"] = f"lost {attributes['lost']} times: its process, or the machine, ended without a word"
        facts = {"params": trial.params, "distributions": trial.distributions, "user_attrs": attributes}
        study.add_trial(optuna.create_trial(state=TrialState.FAIL, **facts))


requeue_lost = functools.partial(requeue, lost=1)  # Optuna calls it when a trial's heartbeat stops, here or elsewhere


def counted(study: optuna.Study, again: bool = False) -> list[FrozenTrial]:
    """What --num-trials counts: running, finished, failed; not interrupted, nor queued. again: those that run again."""
    trials = [trial for trial in study.get_trials(deepcopy=False) if ("again" in trial.user_attrs) == again]
    lost = TrialState.WAITING, TrialState.FAIL
    return [trial for trial in trials if trial.state not in lost or "failure" in trial.user_attrs]


def ranked(study: optuna.Study) -> list[FrozenTrial]:
    """Complete trials, the best first, by the score that was seen: the first of many is lucky too."""
    complete = [trial for trial in counted(study) if trial.state == TrialState.COMPLETE]
    return sorted(complete, key=lambda trial: trial.value, reverse=study.direction.name == "MAXIMIZE")


def queue_best_again(study: optuna.Study, seeds: int) -> int:
    """Queues the best trials on fresh seeds, the same for each, none twice. Returns how many runs are in the queue."""
    waiting = study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
    known = [(trial.user_attrs.get("again"), trial.user_attrs.get("seed")) for trial in waiting]
    known += [(trial.user_attrs["again"], trial.user_attrs["seed"]) for trial in counted(study, again=True)]
    pairs = [(trial, seed) for trial in ranked(study)[:BEST] for seed in range(FRESH, FRESH + seeds)]
    for trial, seed in [(trial, seed) for trial, seed in pairs if (trial.number, seed) not in known]:
        study.enqueue_trial(trial.params, user_attrs={"again": trial.number, "seed": seed})
    return len(study.get_trials(deepcopy=False, states=(TrialState.WAITING,)))


def best_of(study: optuna.Study) -> tuple[FrozenTrial | None, list[float]]:
    """The best trial, and its scores on fresh seeds: their means decide, among trials where all are over and well."""
    fresh, trials, sign = {}, ranked(study), 1 if study.direction.name == "MAXIMIZE" else -1
    waiting = study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
    for trial in counted(study, again=True) + [trial for trial in waiting if "again" in trial.user_attrs]:
        score = trial.value if trial.state == TrialState.COMPLETE else math.nan
        fresh.setdefault(trial.user_attrs["again"], []).append(score)
    means = {
        one.number: np.mean(fresh[one.number]) for one in trials if np.isfinite(fresh.get(one.number, math.nan)).all()
    }
    if not means:
        return (trials[0] if trials else None), []
    number = max(means, key=lambda number: sign * means[number])
    return study.trials[number], fresh[number]


# THE SWEEP ------------------------------------------------------------------------------------------------------------


@dataclass
class Sweep:
    """given: the script's arguments that no trial changes. signals: those that came, 0 for an error."""

    args: Args
    space: list[Parameter]
    given: dict[str, Any]
    study: optuna.Study
    folder: pathlib.Path
    signals: list[int] = field(default_factory=list)

    def any_worked(self) -> bool:
        return any(map(curve_of, self.study.get_trials(deepcopy=False)))

    def run(self) -> int:
        """Runs trials until the study has --num-trials, or a signal; then the best again. Returns the exit code."""
        args, study = self.args, self.study
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, lambda number, _: self.signals.append(number))
        slots = queue.SimpleQueue()
        for slot in divide(sorted(os.sched_getaffinity(0)), visible_gpus(), args.workers):
            slots.put(slot)

        def objective(trial: optuna.Trial) -> float:
            slot = slots.get()
            try:
                return run_trial(trial, self, slot)
            except (Interrupted, UsageError):
                requeue(study, study.trials[trial.number])
                raise
            finally:
                slots.put(slot)

        def ask_alone(*arguments, ask=study.ask) -> optuna.Trial:
            with LOCK:
                return ask(*arguments)

        study.ask = ask_alone  # with SQLite two threads might take the same trial from the queue
        options = {"n_jobs": args.workers, "catch": (RunFailed, Interrupted), "callbacks": [self.after_trial]}
        self.show(f"study {args.study_name}: {self.summary()}")
        while not self.signals and (left := args.num_trials - len(counted(study))) > 0:
            study.optimize(objective, n_trials=left, **options)
        running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))  # elsewhere: the last to end does this
        if not self.signals and not running and (left := queue_best_again(study, args.confirm_seeds)):
            study.optimize(objective, n_trials=left, **options)
        self.write_tables()
        self.report()
        if self.signals:
            self.show(f"interrupted; the same command goes on with study {args.study_name}")
        return 128 + self.signals[0] if self.signals else 0

    def after_trial(self, study: optuna.Study, trial: FrozenTrial):
        """Optuna's callback: a line for people, the study's files, and whether that was enough."""
        facts, name = trial.user_attrs, f"trial {trial.number}"
        name += f" (trial {facts['again']} on a fresh seed)" if "again" in facts else ""
        if curve := curve_of(trial):
            score = f"{self.args.metric} {curve[-1][2]:.5g} for {curve[-1][1]:.1f} s ({facts['end']})"
            self.show(f"{name}: {trial.state.name.lower()}, {score}; {self.summary()}")
        elif "failure" in facts:
            self.show(f"{name}: failed: {facts['failure']}; {self.summary()}")
        self.write_tables()
        if self.signals or ("again" not in facts and len(counted(study)) >= self.args.num_trials):
            study.stop()

    def show(self, line: str):
        print(line, file=sys.stderr, flush=True)

    def summary(self) -> str:
        done = [trial for trial in counted(self.study) if trial.state.is_finished()]
        words = [f"{len(done)} of {self.args.num_trials} trials"]
        for state, word in ((TrialState.PRUNED, "pruned"), (TrialState.FAIL, "failed")):
            words += [f"{number} {word}"] if (number := sum(trial.state == state for trial in done)) else []
        best, fresh = best_of(self.study)
        if best:
            score = f"{np.mean(fresh):.5g} on {len(fresh)} fresh seeds" if fresh else f"{best.value:.5g}"
            words.append(f"best {self.args.metric} {score} for {best.user_attrs['cost']:.0f} s (trial {best.number})")
        return ", ".join(words)

    def write_tables(self):
        """trials.csv and best.yaml, anew after every trial."""
        columns = ["number", "state", "score", "cost", "step", "runs", "end", "failure", "seconds", "again"]
        text, args = io.StringIO(), self.args
        writer = csv.DictWriter(text, columns + [one.argument for one in self.space], extrasaction="ignore")
        writer.writeheader()
        for trial in self.study.get_trials(deepcopy=False):
            if trial.state.is_finished() and "arguments" in trial.user_attrs:
                facts = trial.user_attrs | {"number": trial.number, "state": trial.state.name.lower()}
                facts |= {"seconds": round(trial.duration.total_seconds(), 1)}
                facts |= {"score": curve[-1][2]} if (curve := curve_of(trial)) else {}
                writer.writerow(trial.user_attrs["arguments"] | facts)
        self.write("trials.csv", text.getvalue())
        best, fresh = best_of(self.study)
        if not best:
            return
        facts, scores = best.user_attrs, fresh or best.user_attrs["scores"]
        how = f"the mean of {', '.join(f'{score:.5g}' for score in scores)}" + (" on fresh seeds" if fresh else "")
        how = how if fresh or len(scores) > 1 else "one run: the best of many is lucky too"
        end = f"after {facts['cost']:.1f} seconds of training and {facts['step']:,.0f} steps"
        end += ", stopped there before its schedule's end" if facts["end"] == "max cost" else ""
        of = f"the best of {len(counted(self.study))}, study {args.study_name}, sampler {args.sampler}"
        comment = (
            f"# python {args.script} --config best.yaml\n# Found by protein_sweep.py: trial {best.number}, {of}.\n"
        )
        comment += f"# {args.metric} {np.mean(scores):.6g}, {end}; {how}.\n"
        config = {"env_id": args.env_id} | given_arguments(args.fixed) | facts["arguments"]
        self.write("best.yaml", comment + yaml.safe_dump(config, sort_keys=False))

    def write(self, name: str, text: str):
        with LOCK:
            temporary = self.folder / f"{name}.{os.getpid()}.tmp"
            temporary.write_text(text)
            temporary.replace(self.folder / name)

    def report(self):
        """Plots and tables, by tools/sweep_report.py, and one line of JSON on stdout."""
        best, fresh = best_of(self.study)
        states = [trial.state.name for trial in counted(self.study)]
        result = {"study": self.args.study_name, "folder": str(self.folder), "metric": self.args.metric}
        result |= {"trials": len(states), "complete": states.count("COMPLETE"), "pruned": states.count("PRUNED")}
        result |= {"failed": states.count("FAIL"), "best": None}
        if best:
            facts = {
                "trial": best.number,
                "score": float(np.mean(fresh or best.value)),
                "cost": best.user_attrs["cost"],
            }
            result["best"] = facts | best.user_attrs["arguments"]
            tool = pathlib.Path(__file__).parent / "tools/sweep_report.py"
            storage = ["--storage", self.args.storage] if self.args.storage else []
            subprocess.run([sys.executable, tool, self.folder, *storage], stdout=sys.stderr, check=False)
        self.show(f"{self.summary()}; {self.folder}")
        print(json.dumps(result), flush=True)


def divide(cores: list[int], gpus: list[str], workers: int) -> list[tuple[list[int], dict[str, str]]]:
    """Each worker's cores, neighbours and no core twice unless there are more workers than cores; and the variables
    that choose its GPU: one each, in turn, where there are several."""
    parts = (
        np.array_split(cores, workers) if workers < len(cores) else [[cores[n % len(cores)]] for n in range(workers)]
    )
    chosen = [{"CUDA_VISIBLE_DEVICES": gpus[n % len(gpus)]} if len(gpus) > 1 else {} for n in range(workers)]
    return [([int(core) for core in part], gpu) for part, gpu in zip(parts, chosen)]


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    if (names := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in names.split(",") if name.strip()]
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # no NVIDIA driver
        query = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    return []


# PLUMBING: command line -----------------------------------------------------------------------------------------------


def script_defaults(path: str) -> dict[str, Any] | None:
    """The defaults of the script's `class Args`, read without running it; None if it has none. Raises UsageError."""
    try:
        tree = ast.parse(pathlib.Path(path).read_text())
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"--script {path}: cannot be read ({error})") from error
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args"]
    defaults = {}
    for item in [item for node in classes for item in node.body if isinstance(item, ast.AnnAssign)]:
        defaults[item.target.id] = None
        with contextlib.suppress(ValueError, TypeError):  # no constant
            defaults[item.target.id] = ast.literal_eval(item.value)
    return defaults if classes else None


def given_arguments(words: tuple[str, ...]) -> dict[str, Any]:
    """Flags of the script as --config takes them: --x 1, --x=1, --x, --no-x, --env.KEY 1. Raises UsageError."""
    given, words = {}, [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for word, value in zip(words, [*words[1:], "--"]):
        if not word.startswith("--"):
            continue  # a value; the script refuses one that belongs to no flag
        key = word[2:].replace("-", "_")
        if value.startswith("--"):
            key, value = key.removeprefix("no_"), str(not key.startswith("no_"))
        try:
            value = yaml.safe_load(value.replace("_", "") if re.fullmatch(r"[\d_]+", value) else value)
        except Exception as error:  # not only YAMLError: 2001-99-99 is a ValueError, !!bool x a KeyError
            raise UsageError(f"-- {word} {value}: not a YAML value") from error
        target = given.setdefault("env", {}) if key.startswith("env.") else given
        target[key.removeprefix("env.")] = value
    return given


def parse_args(argv: list[str]) -> Args:
    """Raises UsageError."""
    cut, messages = argv.index("--") if "--" in argv else len(argv), io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            args = tyro.cli(Args, args=argv[:cut], description=__doc__)
    except SystemExit as error:
        if error.code == 0:
            raise
        lines = [line.strip("╭╮╰╯│─ ") for line in messages.getvalue().splitlines()[1:]]
        words = " ".join(line for line in lines if line and not line.startswith("For full"))
        raise UsageError(f"{words} (see --help)") from error
    args.fixed = tuple(argv[cut + 1 :])
    least = {"num_trials": 1, "workers": 1, "seeds": 1, "confirm_seeds": 0, "seed": 0}
    for name, low in (least | {"max_cost_seconds": 1e-3, "hang_seconds": 1e-3}).items():
        if not low <= getattr(args, name) < math.inf:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {low}")
    return args


def prepare(argv: list[str]) -> tuple[Args, list[Parameter], dict, optuna.Study, pathlib.Path]:
    """Everything that can be wrong is found here. Raises UsageError."""
    args = parse_args(argv)
    try:
        content = yaml.safe_load(pathlib.Path(args.space).read_text())
    except Exception as error:  # not only OSError and YAMLError: 2001-99-99 is a ValueError
        raise UsageError(f"--space {args.space}: cannot be read ({' '.join(str(error).split())[:120]})") from error
    space, defaults, given = parse_space(content, args.space), script_defaults(args.script), given_arguments(args.fixed)
    names = [parameter.argument for parameter in space]
    for key in ("env_id", "seed", "output_dir", "config", "resume"):
        if key in given or key in names:
            raise UsageError(f"-- --{key.replace('_', '-')}: is the sweep's to give (see its own --help); leave it out")
    for name in names if defaults is not None else []:
        if name not in defaults:
            near = "".join(f"; did you mean {one}?" for one in difflib.get_close_matches(name, defaults, n=1))
            raise UsageError(f"--space {args.space}: {args.script} has no argument {name}{near}")
    space = [parameter for parameter in space if parameter.argument not in given]
    if not space:
        raise UsageError(f"--space {args.space}: nothing to search, since every argument in it is given after --")
    if args.sampler == "grid":
        args.num_trials = min(args.num_trials, grid_points(space))
    args.study_name = args.study_name or re.sub(r"[^\w.-]+", "-", f"{args.env_id}__{pathlib.Path(args.script).stem}")
    folder = pathlib.Path(args.output_dir, args.study_name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output-dir {args.output_dir}: cannot be written ({error})") from error
    given = (defaults or {}) | given
    return args, space, given, open_study(args, space, given, folder), folder


def main() -> int:
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # a failed trial is a line of ours
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    try:
        with threadpoolctl.threadpool_limits(1):  # the processes are small, and the cores belong to the trials
            return Sweep(*prepare(sys.argv[1:])).run()
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
