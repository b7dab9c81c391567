"""Hyperparameter search that knows what a trial costs: PufferLib's Protein as an Optuna sampler, over any of the training scripts.

    python protein_sweep.py --env-id breakout --num-trials 60 --max-cost-seconds 60 --workers 2   # to sweeps/breakout__ppo_lstm_puffer/
    python protein_sweep.py --env-id breakout --num-trials 90 ...    # the same study goes on, after Ctrl-C too, up to 90 trials
    python protein_sweep.py --env-id pong -- --num-envs 512 --hidden-size 64         # after --: fixed arguments of the script
    python protein_sweep.py --storage postgresql://user@host/sweeps ...              # the same on many machines: one study
    python ppo_lstm_puffer.py --config sweeps/breakout__ppo_lstm_puffer/best.yaml    # train with what it found
    optuna-dashboard sqlite:///sweeps/breakout__ppo_lstm_puffer/study.db             # look at it in a browser

Optuna keeps the study (trials, storage, resuming, pruning). This file adds ProteinSampler, and trials that are processes: pinned to
their cores, read while they run, stopped when they cost too much or look hopeless, recorded as failures when they crash.
Read it from the top: arguments, search space, the sampler (which any Optuna study can use), a trial, the sweep. Below is plumbing.
"""

import ast
import contextlib
import csv
import ctypes
import datetime
import difflib
import functools
import io
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
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
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct, Matern, WhiteKernel


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
    """a run is stopped after this many seconds of training, and counts with what it reached; compilation is not counted"""
    workers: int = 1
    """trials at once; the cores that this process may use are divided among them"""
    seeds: int = 1
    """runs per trial, each with a seed of its own; the trial's score and cost are their means"""
    pruning: bool = True
    """stop a trial when, at the same cost, it is worse than three quarters of the complete ones (ten at least; not before 30 % of the cost)"""
    sampler: Literal["protein", "gp", "tpe", "random", "grid"] = "protein"
    """protein: the one below; the others are Optuna's own, which see the score only"""
    seed: int = 1
    """seed of the sampler; run k of trial n trains with seed + n * seeds + k"""
    hang_seconds: float = 600.0
    """a run without a new line in metrics.jsonl for so long has failed (compilation, before the first line, included)"""
    study_name: str | None = None
    """name of the study and of its folder; default: <env>__<script>"""
    output_dir: str = "sweeps"
    """the study's folder goes here"""
    storage: str | None = None
    """an SQL database for Optuna, such as postgresql://user@host/name; default: study.db (SQLite) in the study's folder"""
    fixed: tyro.conf.Suppress[tuple[str, ...]] = ()
    """after --: arguments for the script that stay as they are; they win over the space"""


# THE SEARCH SPACE: what a line of the YAML file is to the sampler ---------------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    """An argument of the script as a parameter of the study, on the scale on which a step is as large everywhere.

    gamma from 0.9 to 0.999 becomes "1 - gamma", logarithmic; num_envs in powers of two becomes "log2(num_envs)", an integer. So
    every sampler, and every plot of Optuna's, sees the natural scale.
    """

    argument: str
    name: str
    distribution: BaseDistribution
    to_argument: Callable[[Any], Any] = lambda value: value
    to_parameter: Callable[[Any], Any] = lambda value: value


def significant(value: float, digits: int = 4) -> float:
    """Rounded, for files that people read."""
    return float(f"{value:.{digits}g}")


def parse_space(content: Any, source: str) -> list[Parameter]:
    """Parameters from the content of a space file. Raises UsageError."""
    if not isinstance(content, dict) or not content:
        raise UsageError(f"--space {source}: not a mapping of arguments to distributions or lists")
    return [parse_parameter(str(key).replace("-", "_"), entry, f"--space {source}: {key}") for key, entry in content.items()]


def parse_parameter(argument: str, entry: Any, where: str) -> Parameter:
    if isinstance(entry, list):
        if not entry or not all(isinstance(choice, (bool, int, float, str)) for choice in entry):
            raise UsageError(f"{where}: {entry}: a list of choices must have numbers, words, true or false")
        return Parameter(argument, argument, CategoricalDistribution(entry))
    if not isinstance(entry, dict) or set(entry) != {"distribution", "min", "max"}:
        raise UsageError(f"{where}: {entry}: must be a list of choices, or have exactly distribution, min and max")
    kind, low, high = entry["distribution"], entry["min"], entry["max"]
    numbers = all(isinstance(bound, (int, float)) and not isinstance(bound, bool) for bound in (low, high))
    if not numbers or not low < high:
        raise UsageError(f"{where}: min {low}, max {high}: must be numbers, the first smaller (YAML wants 1.0e-5 for 1e-5)")
    whole = isinstance(low, int) and isinstance(high, int)
    if kind == "uniform":
        return Parameter(argument, argument, FloatDistribution(low, high), significant)
    if kind == "int_uniform":
        if not whole:
            raise UsageError(f"{where}: min {low}, max {high}: int_uniform takes whole numbers")
        return Parameter(argument, argument, IntDistribution(low, high))
    if kind == "uniform_pow2":
        exponents = [int(bound).bit_length() - 1 for bound in (low, high)]
        if not whole or [2**exponent for exponent in exponents] != [low, high]:
            raise UsageError(f"{where}: min {low}, max {high}: uniform_pow2 takes powers of two, such as 64 and 1024")
        exponent_of = lambda value: round(np.log2(max(value, 1)))  # noqa: E731
        return Parameter(argument, f"log2({argument})", IntDistribution(*exponents), lambda exponent: 2**exponent, exponent_of)
    if kind == "log_normal":
        if low <= 0:
            raise UsageError(f"{where}: min {low}: log_normal takes numbers above 0")
        if whole:
            return Parameter(argument, argument, IntDistribution(low, high, log=True))
        return Parameter(argument, argument, FloatDistribution(low, high, log=True), significant)
    if kind == "logit_normal":
        if high >= 1:
            raise UsageError(f"{where}: max {high}: logit_normal takes numbers below 1")
        distribution = FloatDistribution(round(1 - high, 12), round(1 - low, 12), log=True)
        return Parameter(
            argument, f"1 - {argument}", distribution, lambda rest: round(1 - significant(rest), 12), lambda value: 1 - value
        )
    known = "uniform, int_uniform, uniform_pow2, log_normal, logit_normal"
    raise UsageError(f"{where}: distribution {kind}: must be one of {known}")


def to_arguments(space: list[Parameter], params: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The script's arguments of a trial. A minibatch larger than the batch is lowered to it: the script would refuse."""
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


# ALGO LOGIC: the sampler --------------------------------------------------------------------------------------------------


class Cube:
    """A search space as the unit cube: one coordinate per number (of its logarithm where the distribution is logarithmic),
    one per choice of a categorical parameter (1 for the chosen one)."""

    def __init__(self, space: dict[str, BaseDistribution]):
        self.space, self.slices, self.dim = space, {}, 0
        for name, distribution in space.items():
            width = len(distribution.choices) if isinstance(distribution, CategoricalDistribution) else 1
            self.slices[name] = slice(self.dim, self.dim + width)
            self.dim += width
        self.owner = [number for number, part in enumerate(self.slices.values()) for _ in range(part.start, part.stop)]

    @staticmethod
    def ends(distribution: BaseDistribution) -> tuple[float, float]:
        """What 0 and 1 stand for. A whole number is as wide as its rounding."""
        half = 0.5 if isinstance(distribution, IntDistribution) else 0.0
        ends = np.array([distribution.low - half, distribution.high + half])
        return tuple(np.log(ends) if distribution.log else ends)

    def encode(self, params: dict[str, Any]) -> np.ndarray:
        """Parameters to coordinates (dim)."""
        x = np.zeros(self.dim)
        for name, distribution in self.space.items():
            if isinstance(distribution, CategoricalDistribution):
                x[self.slices[name].start + distribution.choices.index(params[name])] = 1
            else:
                low, high = self.ends(distribution)
                value = np.log(params[name]) if distribution.log else params[name]
                x[self.slices[name]] = (value - low) / (high - low) if high > low else 0.5
        return x

    def scale(self, x: np.ndarray, name: str, factors: np.ndarray) -> np.ndarray:
        """Coordinates (n, dim) where the number called `name` is multiplied by factors (n), beyond its range too."""
        (low, high), x, column = self.ends(self.space[name]), x.copy(), self.slices[name].start
        value = low + x[:, column] * (high - low)
        value = value + np.log(factors) if self.space[name].log else value * factors
        x[:, column] = (value - low) / (high - low)
        return x

    def decode(self, x: np.ndarray) -> dict[str, Any]:
        """Coordinates (dim) to the nearest parameters."""
        params = {}
        for name, distribution in self.space.items():
            u = x[self.slices[name]]
            if isinstance(distribution, CategoricalDistribution):
                params[name] = distribution.choices[int(np.argmax(u))]
                continue
            low, high = self.ends(distribution)
            value = low + float(u[0]) * (high - low)
            value = np.exp(value) if distribution.log else value
            if distribution.step:
                value = distribution.low + distribution.step * round((value - distribution.low) / distribution.step)
            value = min(max(value, distribution.low), distribution.high)
            params[name] = int(value) if isinstance(distribution, IntDistribution) else float(value)
        return params


def pareto_front(costs: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Indices, by rising cost, of the points that no other one beats: better than everything that costs as much or less."""
    order = np.lexsort((-scores, costs))
    best = np.maximum.accumulate(scores[order])
    return order[np.concatenate(([True], best[1:] > best[:-1]))]


def fit_gp(x: np.ndarray, y: np.ndarray, rng: np.random.Generator, most: int = 128) -> GaussianProcessRegressor:
    """A Gaussian process (Rasmussen & Williams 2006) through y (n) at x (n, d): trend, plus bumps, plus noise.

    The linear kernel is the trend: a cost, in logarithms, is close to linear in the sizes. Matern 3/2 is what a plane cannot
    follow, with a length scale per coordinate, long where a hyperparameter does not matter. The white kernel is the noise between seeds.
    The kernel's parameters are maximum a posteriori: with as many length scales as observations, the likelihood alone overfits,
    so a log-normal prior, wider in more dimensions, holds them (Hvarfner et al. 2024). They are fitted to `most` observations at
    most, since each of some 50 steps costs n^3; the process itself then takes all.
    """
    d = x.shape[1]
    matern = ConstantKernel(1.0, (1e-2, 1e2)) * Matern(np.full(d, 0.7 * np.sqrt(d)), (0.05, 1e3), nu=1.5)
    kernel = matern + ConstantKernel(0.3, (1e-3, 1e2)) * DotProduct(1.0, "fixed") + WhiteKernel(0.03, (1e-5, 1.0))
    # theta is (variance, d length scales, linear variance, noise), in logarithms: prior means and standard deviations.
    mean = np.log(np.array([1.0, *np.full(d, 0.7 * np.sqrt(d)), 0.3, 0.03]))
    deviation = np.array([1.0, *np.ones(d), 1.5, 1.5])

    def maximum_a_posteriori(negative_likelihood, theta, bounds):
        def objective(theta):
            value, gradient = negative_likelihood(theta)
            z = (theta - mean) / deviation
            return value + 0.5 * z @ z, gradient + z / deviation

        result = scipy.optimize.minimize(objective, theta, jac=True, bounds=bounds, method="L-BFGS-B", options={"maxiter": 30})
        return result.x, result.fun

    some = rng.choice(len(y), most, replace=False) if len(y) > most else slice(None)
    with warnings.catch_warnings():  # a parameter at its bound, which the prior seldom allows, is no news
        warnings.simplefilter("ignore", ConvergenceWarning)
        fitted = GaussianProcessRegressor(kernel, optimizer=maximum_a_posteriori, normalize_y=True).fit(x[some], y[some])
    return GaussianProcessRegressor(fitted.kernel_, optimizer=None, normalize_y=True).fit(x, y)


class ProteinSampler(optuna.samplers.BaseSampler):
    """Suggests hyperparameters by what they are predicted to score and to cost, after PufferLib's Protein.

    1. Every finished trial is seen at several points of its learning curve: (hyperparameters, with total_timesteps the steps made by then;
       progress) -> (cost, score). A trial that was stopped early is seen as far as it came.
    2. One Gaussian process is fitted to the score, one to the logarithm of the cost, a third to 0 or 1, failed or not (least-squares
       classification, Rasmussen & Williams 2006, section 6.5).
    3. Candidates are drawn around the Pareto front, the trials that no other one beats in both cost and score: steps of every size, in
       some of the coordinates, so that a good trial is changed a little in one respect, or much in all. Then nearer and
       nearer around the best candidates.
    4. A limit on the cost is drawn: three times in four the largest that is allowed or a quarter more than the best trial's, else one from the front's range, in logarithms. Of the candidates
       predicted to cost no more, the one with the largest expected improvement on what was reached at that cost, and 3 % of the scores' deviation more, is
       suggested, times its chance not to fail, and none that fails in three cases of ten. So every cost level is improved, and what is learned from cheap trials helps the dear ones.

    The first trials, before there is anything to fit, are a scrambled Sobol sequence.

    The sampler keeps nothing: a suggestion is a function of the seed, the trial's number, and the finished trials in the storage. So
    a new process on the same storage goes on as the old one would have, and parallel workers draw different candidates and costs.

    It works with any Optuna study of one objective. Of a trial it reads the user attribute "curve", [[progress, cost, score], ...] with progress in (0, 1]
    and cost in seconds; without it, value and duration. A failed trial counts as failure if it has the user attribute "failure":
    an interrupted one is nobody's fault.

    What is different from PufferLib 3.0.0's `sweep.py`: kernels' parameters are fitted (there, 1000 steps of Adam at 1e-4 leave
    them almost where they start, at ten times the price); a partial run is one with fewer total steps there as here, but told from a complete
    one by its progress, since its learning rate was not annealed; failures are not successes; repeated
    trials are kept, since their difference is the noise; expected improvement (as in CARBS) instead of the mean, since the highest mean is where
    one has just been; choices and minimization work; random trials come first; it is seeded.

    Sources: PufferLib (Suarez 2025), pufferlib/sweep.py; CARBS, "Cost-aware hyperparameter search" (Fetterman et al. 2023), from which it
    comes; Rasmussen & Williams, "Gaussian processes for machine learning" (2006), for 5.4 and 6.5; Lizotte, "Practical Bayesian optimization" (2008).
    """

    def __init__(
        self, space: dict[str, BaseDistribution] | None = None, seed: int = 1, max_cost: float = np.inf, num_random: int = 5
    ):
        """space: if None, what the finished trials have in common. max_cost: where a trial will be stopped, in seconds."""
        self.space, self.seed, self.max_cost, self.num_random = space, seed, max_cost, num_random

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self.space or optuna.search_space.intersection_search_space(study.get_trials(deepcopy=False))

    def sample_independent(self, study: optuna.Study, trial: FrozenTrial, name: str, distribution: BaseDistribution) -> Any:
        """For parameters outside the space: evenly random."""
        rng = np.random.default_rng([self.seed, trial.number, zlib.crc32(name.encode())])
        cube = Cube({name: distribution})
        return cube.decode(rng.random(cube.dim))[name]

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        if not search_space:
            return {}
        cube, rng = Cube(search_space), np.random.default_rng([self.seed, trial.number])
        trials = [one for one in study.get_trials(deepcopy=False) if set(search_space) <= set(one.params)]
        trials = [one for one in trials if one.state.is_finished()]
        curves = [(cube.encode(one.params), curve) for one in trials if len(curve := curve_of(one))]
        if len(curves) < self.num_random:
            with warnings.catch_warnings():  # Sobol is balanced after 2^k points, and would rather not be asked for fewer
                warnings.simplefilter("ignore")
                return cube.decode(scipy.stats.qmc.Sobol(cube.dim, seed=self.seed).random(trial.number + 1)[-1])
        failures = [cube.encode(one.params) for one in trials if "failure" in one.user_attrs]
        sign = 1 if study.direction == optuna.study.StudyDirection.MAXIMIZE else -1
        return cube.decode(self.suggest(cube, curves, np.array(failures).reshape(-1, cube.dim), sign, rng))

    def suggest(self, cube: Cube, curves: list, failures: np.ndarray, sign: int, rng: np.random.Generator) -> np.ndarray:
        """curves: (coordinates (dim), [(progress, cost, score), ...]) per trial; failures (n, dim). Returns coordinates (dim)."""
        x = np.array([coordinates for coordinates, curve in curves for _ in curve])
        progress, costs, scores = np.array([point for _, curve in curves for point in curve], float).T
        costs, scores = np.maximum(costs, 1e-3), sign * scores
        score_gp = fit_gp(with_progress(cube, x, progress), scores, rng)
        cost_gp = fit_gp(with_progress(cube, x, progress), np.log(costs), rng)
        ends = np.cumsum([len(curve) for _, curve in curves]) - 1  # each trial's last point
        failed = np.repeat((0.0, 1.0), (len(ends), len(failures)))
        kernel = Matern(0.3 * np.sqrt(cube.dim), nu=1.5) + WhiteKernel(0.1)
        failure_gp = GaussianProcessRegressor(kernel, optimizer=None).fit(np.concatenate((x[ends], failures)), failed)

        # The limit: the largest cost there is, or one from the front's range. The record: the best at that cost, but for its luck, and a
        # margin (Lizotte 2008): a study that counts improvements in the last digit tries its best trial again and again.
        front = ends[pareto_front(costs[ends], scores[ends])]
        low, high = np.log(costs[front[0]]), np.log(min(self.max_cost, 1.25 * costs[front[-1]]))
        limit = np.exp(high if rng.random() < 0.75 else rng.uniform(min(low, high), high))
        within = ends[costs[ends] <= max(limit, costs[front[0]])]
        record = score_gp.predict(with_progress(cube, x[within], progress[within])).max() + 0.03 * scores.std()

        def rate(candidates: np.ndarray) -> np.ndarray:
            """Expected improvement on the record (0 at the least) times the chance not to fail; minus the cost where that or the risk is too large."""
            cost = np.exp(cost_gp.predict(with_progress(cube, candidates, np.ones(len(candidates)))))
            # A trial that would be stopped at the largest cost is only suggested where hardly any would not be (a space without total_timesteps,
            # say), and is judged by how far it will have come.
            reached = np.minimum(1, self.max_cost / cost)
            mean, deviation = score_gp.predict(with_progress(cube, candidates, reached), return_std=True)
            # Half the deviation, nearer to the highest mean: a study is short (on the problems of benchmark/sweep.py better than all of it).
            deviation = 0.5 * np.sqrt(np.maximum(deviation**2 - noise_variance(score_gp), 1e-12))
            z = (mean - record) / deviation
            improvement = deviation * (z * scipy.stats.norm.cdf(z) + scipy.stats.norm.pdf(z))
            failure = failure_gp.predict(candidates).clip(0, 1)
            cost = np.minimum(cost, self.max_cost)
            allowed = (cost <= limit) & (cost < self.max_cost) | (cost <= np.quantile(cost, 0.05))
            # Once little is left to gain where trials succeed, any chance of more would do: so only where most will.
            return np.where(allowed & (failure < 0.3), improvement * (1 - failure), -cost)

        # Candidates: the front's trials, with a random part of the hyperparameters moved by a step of random size, or drawn anew,
        # so that no valley is too wide. Then around the best so far, three times, by half the step and with nothing drawn anew: the summit
        # of the prediction in ten dimensions is not found by chance, but far from all trials it is none.
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


def noise_variance(gp: GaussianProcessRegressor) -> float:
    """Of the white kernel: predictions include it, but a lucky run is no better set of hyperparameters."""
    return float(gp.kernel_.k2.noise_level * gp._y_train_std**2)


def with_progress(cube: Cube, x: np.ndarray, progress: np.ndarray) -> np.ndarray:
    """Coordinates (n, d) and progress (n) to the input of the processes (n, d + 1): what had been run by then, and how far it was.

    total_timesteps becomes the steps made by then, on which a score depends first; that the learning rate would have been annealed over
    more of them is the last coordinate, a unit less for a tenth of the training. So long runs tell what short ones will do.
    """
    progress, total = np.maximum(progress, 1e-3), cube.space.get("total_timesteps")
    if isinstance(total, (FloatDistribution, IntDistribution)) and not total.single():
        x = cube.scale(x, "total_timesteps", progress)
    return np.column_stack((x, 1 + np.log10(progress)))


def curve_of(trial: FrozenTrial) -> list[list[float]]:
    """[[progress, cost, score], ...] of a finished trial, by rising cost; empty for one that left nothing."""
    if trial.state == TrialState.FAIL:
        return []
    if "curve" not in trial.user_attrs and trial.value is not None:
        return [[1.0, trial.duration.total_seconds(), trial.value]]
    return trial.user_attrs.get("curve", [])


# A TRIAL: runs of the script, one after another, watched through their metrics.jsonl --------------------------------------

POINTS = 5  # of a learning curve that the sampler sees
MILESTONES = 20  # costs, evenly spaced up to the largest, at which trials are compared for pruning
GRACE = 20.0  # seconds between SIGTERM, at which the script writes a checkpoint, and SIGKILL
TAIL = 2000  # characters of the log that a failed trial keeps


def score_at(rows: np.ndarray, cost: float) -> float:
    """The score at a cost, from rows (n, 3) of step, cost, score: the mean of the lines of the last tenth before it."""
    before = rows[rows[:, 1] <= cost]
    return float(before[before[:, 1] >= min(0.9 * cost, before[-1, 1]), 2].mean())


def learning_curve(rows: np.ndarray, total_timesteps: int | None) -> list[list[float]]:
    """POINTS times [progress, cost, score] at even parts of the cost that a run has reached. Progress is its share of total_timesteps."""
    points = []
    for cost in rows[-1, 1] * (np.arange(1, POINTS + 1) / POINTS):  # the last is exactly the last row's
        step = np.interp(cost, rows[:, 1], rows[:, 0])
        progress = min(1.0, step / (total_timesteps or rows[-1, 0]))
        if len(rows[rows[:, 1] <= cost]):
            points.append([progress, cost, score_at(rows, cost)])
    return points


class Job:
    """A trial that is being run. `poll` watches it, and returns True once it is over; then `state`, `attributes` and `score` say how."""

    def __init__(self, trial: optuna.Trial, arguments: dict, given: dict, args: Args, folder: pathlib.Path, cores: list[int]):
        self.trial, self.arguments, self.args, self.cores = trial, arguments, args, cores
        self.caches = folder / "compile_cache"
        self.total_timesteps = (given | arguments).get("total_timesteps")
        self.folder = folder / "trials" / f"{trial.number:04d}"
        shutil.rmtree(self.folder, ignore_errors=True)  # of a study that was deleted
        self.folder.mkdir(parents=True)
        self.state, self.score, self.attributes = TrialState.FAIL, None, {"arguments": arguments}
        self.curves, self.steps, self.milestone = [], [], 0
        self.start()

    def start(self):
        """Starts the next run, in a process group of its own, on this trial's cores."""
        self.rows, self.first, self.lines, self.ending, self.failure, self.keys = np.empty((0, 3)), None, 0, None, None, []
        self.seen = time.monotonic()
        number = len(self.curves)
        self.run_folder = self.folder / f"run{number}"
        seed = self.args.seed + self.trial.number * self.args.seeds + number
        command = [
            sys.executable,
            self.args.script,
            "--env-id",
            self.args.env_id,
            f"--seed={seed}",
            f"--output-dir={self.run_folder}",
        ]
        command += [flag(key, value) for key, value in self.arguments.items()] + list(self.args.fixed)
        threads = {f"{library}_NUM_THREADS": str(len(self.cores)) for library in ("OMP", "OPENBLAS", "MKL")}
        self.cache = usable_cache(self.caches)
        environment = os.environ | threads | {"TORCHINDUCTOR_CACHE_DIR": str(self.cache)}
        self.log = (self.folder / "log.txt").open("ab")
        self.process = subprocess.Popen(
            command, env=environment, stdout=self.log, stderr=self.log, stdin=subprocess.DEVNULL,
            start_new_session=True, preexec_fn=functools.partial(prepare_child, self.cores),
        )  # fmt: skip

    def poll(self) -> bool:
        over = self.process.poll() is not None
        if not self.ending:  # what it still does while it is being stopped is not counted
            self.read()
        now = time.monotonic()
        if not over:
            if self.ending:
                if now > self.kill_at:
                    self.kill()
            elif now - self.seen > self.patience:
                self.failure = f"hangs: no new line in metrics.jsonl for {self.patience:g} seconds"
                self.ending, self.kill_at = "hangs", now
            elif self.cost >= self.args.max_cost_seconds:
                self.stop("max cost")
            elif self.hopeless():
                self.stop("pruned")
            return False
        self.kill()  # what the script may have left in its group
        self.log.close()
        return self.conclude()

    def read(self):
        """New lines of metrics.jsonl to rows of step, cost, score. Cost is the seconds since the first line: before it is compilation."""
        path = next(self.run_folder.glob("*/metrics.jsonl"), None)
        lines = path.read_bytes().split(b"\n")[:-1] if path else []
        for text in lines[self.lines :]:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                line = json.loads(text)
                self.first = self.first if self.first is not None else line["time"]
                self.latest = line["time"] - self.first
                self.keys = sorted(line)
                if self.args.metric in line:
                    self.rows = np.vstack((self.rows, (line["step"], max(self.latest, 1e-3), float(line[self.args.metric]))))
        if len(lines) > self.lines:
            self.lines, self.seen = len(lines), time.monotonic()

    @property
    def patience(self) -> float:
        """Seconds without a new line. Once there are lines, half of the largest cost at the most, else a hang would look like its end."""
        return min(self.args.hang_seconds, self.args.max_cost_seconds / 2 if self.lines else np.inf)

    @property
    def cost(self) -> float:
        """Seconds of training, those since the last line included."""
        return 0.0 if self.first is None else self.latest + time.monotonic() - self.seen

    def hopeless(self) -> bool:
        """Reports the score at each new milestone of the first run; whether the pruner then says stop."""
        if self.curves or not len(self.rows) or not np.isfinite(self.rows[:, 2]).all():
            return False
        passed = int(MILESTONES * self.rows[-1, 1] / self.args.max_cost_seconds)
        for milestone in range(self.milestone + 1, min(passed, MILESTONES) + 1):
            cost = milestone / MILESTONES * self.args.max_cost_seconds
            if (self.rows[:, 1] <= cost).any():
                self.trial.report(score_at(self.rows, cost), milestone)
        new, self.milestone = passed > self.milestone, max(passed, self.milestone)
        return new and self.args.pruning and self.trial.should_prune()

    def stop(self, why: str):
        """Asks the script to end; poll sees to it that it does. Not its group: whoever compiles ends it at once, and its compilers."""
        self.ending, self.kill_at = why, time.monotonic() + GRACE
        self.process.terminate()

    def kill(self):
        """Ends the run's whole group. One that is killed before its first line may leave half a compiled file, if the script does not take care as ours do."""
        if not self.lines and (self.process.poll() is None or self.process.returncode < 0):
            (self.cache / "broken").touch()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def conclude(self) -> bool:
        """What a run that is over means: the trial is over too (True), or the next seed's run has started (False)."""
        summary = next(self.run_folder.glob("*/metrics.json"), None)
        reason = f"exit code {self.process.returncode}"
        with contextlib.suppress(
            ValueError, KeyError, TypeError, AttributeError
        ):  # a script of the user's own may leave another file
            reason = json.loads(summary.read_text())["exit_reason"]
        if not self.failure and not self.ending and self.process.returncode:
            self.failure = reason if summary else f"{reason}: {(self.tail().strip().splitlines() or ['no output'])[-1]}"
        if not self.failure and not len(self.rows):
            have = ", ".join(self.keys) if self.lines else "nothing"
            self.failure = f"no {self.args.metric} in metrics.jsonl, which has {have}"
        if not self.failure and not np.isfinite(self.rows[:, 2]).all():
            self.failure = f"{self.args.metric} is not finite"
        if self.failure:
            self.attributes |= {"failure": self.failure, "log_tail": self.tail()}
            return True
        self.curves.append(learning_curve(self.rows, self.total_timesteps))
        self.steps.append(self.rows[-1, 0])
        if self.ending in (None, "max cost") and len(self.curves) < self.args.seeds:
            self.start()
            return False
        # Seeds are averaged point by point, the last points with each other.
        shortest = min(map(len, self.curves))
        curve = np.mean([points[-shortest:] for points in self.curves], axis=0).tolist()
        self.state = TrialState.PRUNED if self.ending == "pruned" else TrialState.COMPLETE
        self.score = curve[-1][2]
        self.attributes |= {
            "curve": curve, "cost": curve[-1][1], "step": float(np.mean(self.steps)), "runs": len(self.curves),
            "scores": [points[-1][2] for points in self.curves], "end": self.ending or reason,
        }  # fmt: skip
        return True

    def tail(self) -> str:
        return (self.folder / "log.txt").read_bytes()[-TAIL:].decode(errors="replace")


def flag(key: str, value: Any) -> str:
    """An argument as the script takes it."""
    name = key.replace("_", "-")
    return f"--{name}={value}" if not isinstance(value, bool) else f"--{name}" if value else f"--no-{name}"


def usable_cache(caches: pathlib.Path) -> pathlib.Path:
    """The folder of torch.compile's cache that the trials share: a kill in the middle of compiling spoils it for all that follow."""
    number = 0
    while (caches / str(number) / "broken").exists():
        number += 1
    (caches / str(number)).mkdir(parents=True, exist_ok=True)
    return (caches / str(number)).absolute()


LIBC = ctypes.CDLL(None)


def prepare_child(cores: list[int]):
    """In the new process: its cores, SIGTERM if this one is killed, and the signals that a shell's background job ignores."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
        LIBC.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.SIG_DFL)


# THE SWEEP ----------------------------------------------------------------------------------------------------------------


def make_sampler(args: Args, space: list[Parameter], number: int) -> optuna.samplers.BaseSampler:
    """The sampler by name, for a study with this number of trials: in the seed of Optuna's own, lest a restart repeats its draws."""
    distributions = {parameter.name: parameter.distribution for parameter in space}
    if args.sampler == "protein":
        return ProteinSampler(distributions, args.seed, args.max_cost_seconds)
    return {
        "gp": functools.partial(optuna.samplers.GPSampler, deterministic_objective=False),
        "tpe": functools.partial(optuna.samplers.TPESampler, multivariate=True, constant_liar=True),
        "random": optuna.samplers.RandomSampler,
        "grid": optuna.samplers.RandomSampler,  # never asked: the points are queued when the study is new
    }[args.sampler](seed=1000 * args.seed + number)


def grid(space: list[Parameter], most: int = 1000) -> list[dict[str, Any]]:
    """Every choice, every whole number where there are few, else both ends and the middle. Raises UsageError."""
    values = {}
    for name, distribution in ((parameter.name, parameter.distribution) for parameter in space):
        cube = Cube({name: distribution})
        if isinstance(distribution, CategoricalDistribution):
            values[name] = list(distribution.choices)
        elif isinstance(distribution, IntDistribution) and distribution.high - distribution.low < 10:
            values[name] = list(range(distribution.low, distribution.high + 1))
        else:
            values[name] = [cube.decode(np.array([u]))[name] for u in (0.0, 0.5, 1.0)]
    points = int(np.prod([float(len(some)) for some in values.values()]))
    if points > most:
        raise UsageError(f"--sampler grid: {points:,} points in this space; give lists in --space, or fix arguments after --")
    return [dict(zip(values, point)) for point in itertools.product(*values.values())]


def open_study(args: Args, space: list[Parameter], defaults: dict, folder: pathlib.Path) -> optuna.Study:
    """The study, new or as it was left. Raises UsageError if it is another one's, or if the storage cannot be reached."""
    url = args.storage or f"sqlite:///{folder / 'study.db'}"
    url = re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", url)  # the driver in requirements.txt
    waits = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {"pool_pre_ping": True}
    beats = {"heartbeat_interval": 10, "grace_period": 60, "heartbeat_stale_trial_callback": try_again}
    for attempt in range(5):
        try:
            storage = optuna.storages.RDBStorage(url, engine_kwargs=waits, **beats)
            break
        except Exception as error:  # SQLAlchemy's, a driver's, the operating system's
            # Of two processes that make the tables at once, the second fails, and finds them made a moment later.
            if attempt == 4 or not isinstance(error, sqlalchemy.exc.DBAPIError):
                raise UsageError(f"--storage {args.storage or url}: {' '.join(str(error).split())[:200]}") from error
            time.sleep(0.5)
    sampler = make_sampler(args, space, 0)
    pruner = optuna.pruners.PercentilePruner(75, n_startup_trials=10, n_warmup_steps=MILESTONES // 3, n_min_trials=10)
    made = {"storage": storage, "sampler": sampler, "pruner": pruner}
    try:
        study, new = optuna.create_study(study_name=args.study_name, direction=args.direction, **made), True
    except optuna.exceptions.DuplicatedStudyError:  # as it was left, or made just now by a process beside this one
        study, new = optuna.load_study(study_name=args.study_name, **made), False
    shape = {parameter.name: optuna.distributions.distribution_to_json(parameter.distribution) for parameter in space}
    this = {"script": os.path.basename(args.script), "env_id": args.env_id, "metric": args.metric, "direction": args.direction}
    this |= {"seeds": args.seeds, "max_cost_seconds": args.max_cost_seconds, "fixed": list(args.fixed), "space": shape}
    before = study.user_attrs.get("sweep", this)
    if new or not any(
        curve_of(trial) for trial in study.get_trials(deepcopy=False)
    ):  # nothing has worked yet: no other study either
        study.set_user_attr("sweep", this)
        before = this
    if new:
        # The first trial is the script's defaults: a sweep should not end with less than one starts with.
        for params in grid(space) if args.sampler == "grid" else [to_params(space, defaults)]:
            study.enqueue_trial(params)
    if changed := [key for key in this if before.get(key) != this[key]]:
        raise UsageError(
            f"--study-name {args.study_name}: exists with another {', '.join(changed)}; give this one another --study-name, or delete it"
        )
    return study


def try_again(study: optuna.Study, trial: FrozenTrial):
    """Queues the hyperparameters of a trial that was interrupted, here or on a machine that has gone."""
    study.enqueue_trial(trial.params)


def forget_unborn(study: optuna.Study):
    """Trials whose process ended while it was asking for hyperparameters: nothing runs, and no heartbeat will ever be missed."""
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if "process" not in trial.user_attrs and (datetime.datetime.now() - trial.datetime_start).total_seconds() > 60:
            study.tell(trial.number, state=TrialState.FAIL)


def counted(study: optuna.Study) -> list[FrozenTrial]:
    """The trials that --num-trials counts: running, finished, failed, but not interrupted or queued."""
    trials = study.get_trials(deepcopy=False)
    return [
        trial
        for trial in trials
        if trial.state != TrialState.WAITING and (trial.state != TrialState.FAIL or "failure" in trial.user_attrs)
    ]


def sweep(args: Args, space: list[Parameter], given: dict, study: optuna.Study, folder: pathlib.Path) -> int:
    """Runs trials until the study has --num-trials, or a signal. Returns the exit code."""
    stop, screen = StopSignals(), Screen(args, study)
    slots = divide(sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count())], args.workers)
    jobs: dict[int, Job] = {}
    beat, refused = 0.0, None
    try:
        with screen:
            while not stop.signum and not refused:
                for slot, job in list(jobs.items()):
                    try:
                        if not job.poll():
                            continue
                        refused = finish(study, job) or refused
                        if not refused:
                            screen.finished(study.trials[job.trial.number])
                    except optuna.exceptions.UpdateFinishedTrialError:  # after a long pause others took it for lost, and queued it
                        job.kill()
                    del jobs[slot]
                    write_tables(args, space, study, folder)
                if time.monotonic() - beat > 10:  # what is alive says so; what has not for a minute is queued again
                    beat = time.monotonic()
                    for job in jobs.values():
                        study._storage.record_heartbeat(job.trial._trial_id)
                    optuna.storages.fail_stale_trials(study)
                    forget_unborn(study)
                free = [slot for slot in range(args.workers) if slot not in jobs]
                if free and len(counted(study)) < args.num_trials:
                    if args.sampler in ("gp", "tpe", "random"):
                        study.sampler = make_sampler(args, space, len(study.get_trials(deepcopy=False)))
                    trial = study.ask({parameter.name: parameter.distribution for parameter in space})
                    study._storage.record_heartbeat(trial._trial_id)
                    trial.set_user_attr("process", f"{socket.gethostname()}:{os.getpid()}")
                    arguments = to_arguments(space, trial.params, given)
                    jobs[free[0]] = Job(trial, arguments, given, args, folder, slots[free[0]])
                elif jobs:
                    screen.show(jobs)
                    time.sleep(0.1)
                elif any(trial.state == TrialState.RUNNING for trial in counted(study)):  # of others, who may be lost
                    time.sleep(1)
                else:
                    break
    finally:  # whatever the reason: no process is left behind
        for job in jobs.values():
            job.stop("interrupted")
        for job in jobs.values():
            while stop.count < 2 and not job.poll():  # a second Ctrl-C does not wait
                time.sleep(0.05)
            job.kill()
    for job in jobs.values():
        study.tell(job.trial, state=TrialState.FAIL)
        try_again(study, study.trials[job.trial.number])
    write_tables(args, space, study, folder)
    if refused:
        raise UsageError(f"{args.script} refuses its arguments: {refused}")
    report(args, space, study, folder)
    if stop.signum:
        print(f"interrupted; the same command goes on with study {args.study_name}", file=sys.stderr)
    return 128 + stop.signum if stop.signum else 0


def finish(study: optuna.Study, job: Job) -> str | None:
    """Tells the study. Returns the script's error if it refused its arguments (exit code 2) and nothing has worked yet."""
    if job.process.returncode == 2 and not any(curve_of(trial) for trial in study.get_trials(deepcopy=False)):
        study.tell(job.trial, state=TrialState.FAIL)
        try_again(study, study.trials[job.trial.number])
        return (job.tail().strip().splitlines() or ["exit code 2"])[-1].removeprefix("error: ")
    for key, value in job.attributes.items():
        job.trial.set_user_attr(key, value)
    study.tell(job.trial, job.score if job.state == TrialState.COMPLETE else None, state=job.state)
    return None


def divide(cores: list[int], workers: int) -> list[list[int]]:
    """The cores of each worker: neighbours, no core twice unless there are more workers than cores."""
    if workers >= len(cores):
        return [[cores[worker % len(cores)]] for worker in range(workers)]
    return [[int(core) for core in part] for part in np.array_split(cores, workers)]


# PLUMBING: results --------------------------------------------------------------------------------------------------------


def best_trial(study: optuna.Study) -> FrozenTrial | None:
    with contextlib.suppress(ValueError):
        return study.best_trial
    return None


def front_trials(study: optuna.Study) -> list[FrozenTrial]:
    """The trials that no other one beats in both cost and score, by rising cost."""
    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if not trials:
        return []
    sign = 1 if study.direction == optuna.study.StudyDirection.MAXIMIZE else -1
    costs, scores = np.array([(trial.user_attrs["cost"], sign * trial.value) for trial in trials]).T
    return [trials[index] for index in pareto_front(costs, scores)]


def write_atomically(path: pathlib.Path, text: str):
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


def write_tables(args: Args, space: list[Parameter], study: optuna.Study, folder: pathlib.Path):
    """trials.csv and best.yaml, anew after every trial."""
    columns = ["number", "state", "score", "cost", "step", "runs", "end", "failure", "seconds"]
    names = [parameter.argument for parameter in space]
    rows = []
    for trial in study.get_trials(deepcopy=False):
        if "arguments" in trial.user_attrs:
            seconds = round(trial.duration.total_seconds(), 1) if trial.duration else None
            score = trial.user_attrs["curve"][-1][2] if "curve" in trial.user_attrs else None
            facts = trial.user_attrs | {
                "number": trial.number,
                "state": trial.state.name.lower(),
                "score": score,
                "seconds": seconds,
            }
            arguments = trial.user_attrs["arguments"]
            rows.append([facts.get(key, "") for key in columns] + [arguments[name] for name in names])
    text = io.StringIO()
    csv.writer(text).writerows([columns + names, *rows])
    write_atomically(folder / "trials.csv", text.getvalue())
    if best := best_trial(study):
        facts, finished = best.user_attrs, sum(trial.state.is_finished() for trial in counted(study))
        script = f"python {args.script} --config best.yaml"
        what = f"{args.metric} {best.value:.6g}, after {facts['cost']:.1f} seconds of training and {facts['step']:,.0f} steps"
        many = f"the mean of {facts['runs']} runs ({', '.join(f'{score:.5g}' for score in facts['scores'])})"
        lines = [
            f"# {script}",
            f"# Found by protein_sweep.py: trial {best.number}, the best of {finished}, study {args.study_name}, sampler {args.sampler}.",
            f"# {what}; {many if facts['runs'] > 1 else 'one run: the best of many is lucky too'}.",
        ]
        if facts["end"] == "max cost":
            lines.append(
                f"# It was stopped there, at --max-cost-seconds {args.max_cost_seconds:g}: its schedule was not at its end."
            )
        config = {"env_id": args.env_id} | given_arguments(args.fixed) | facts["arguments"]
        write_atomically(folder / "best.yaml", "\n".join(lines) + "\n" + yaml.safe_dump(config, sort_keys=False))


def report(args: Args, space: list[Parameter], study: optuna.Study, folder: pathlib.Path):
    """The plots, a summary on stderr, and one line of JSON on stdout."""
    from rich.console import Console
    from rich.table import Table

    best, front, trials = best_trial(study), front_trials(study), counted(study)
    states = {state.name.lower(): sum(trial.state == state for trial in trials) for state in TrialState}
    result = {"study": args.study_name, "folder": str(folder), "metric": args.metric, "trials": len(trials)}
    result |= {"complete": states["complete"], "pruned": states["pruned"], "failed": states["fail"], "best": None}
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    if best:
        result["best"] = {"trial": best.number, "score": best.value, "cost": best.user_attrs["cost"]} | best.user_attrs["arguments"]
        importances = plot(args, study, folder)
        console.print(front_table(front, args.metric))
        table = Table(title="best trial", title_justify="left", box=None)
        for column in ("argument", "value", "importance"):
            table.add_column(column, justify="left" if column == "argument" else "right")
        names = {parameter.name: parameter.argument for parameter in space}
        for name in sorted(names, key=lambda name: -importances.get(name, 0)):
            table.add_row(names[name], f"{best.user_attrs['arguments'][names[name]]}", f"{importances.get(name, 0):.0%}")
        console.print(table)
    for trial in [trial for trial in trials if trial.state == TrialState.FAIL][-5:]:
        console.print(f"trial {trial.number} failed: {trial.user_attrs['failure']}", markup=False)
    console.print(f"{summary_line(study, args)}; {folder}", markup=False)
    print(json.dumps(result), flush=True)


def plot(args: Args, study: optuna.Study, folder: pathlib.Path) -> dict[str, float]:
    """pareto.png and importances.png. Returns the importances (fANOVA: the share of the score's variance; needs some trials)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    trials, front = study.get_trials(deepcopy=False), front_trials(study)
    for trial in trials:
        if curve := curve_of(trial):
            axes.plot(*np.array(curve).T[1:], color="0.85", lw=0.8, zorder=1)
    for state, color in ((TrialState.PRUNED, "#E69F00"), (TrialState.COMPLETE, "#0072B2")):
        points = [trial.user_attrs["curve"][-1][1:] for trial in trials if trial.state == state]
        if points:
            axes.scatter(*np.array(points).T, s=14, color=color, label=f"{state.name.lower()} ({len(points)})", zorder=2)
    points = np.array([(trial.user_attrs["cost"], trial.value) for trial in front])
    axes.step(*points.T, where="post", color="#D55E00", label="front", zorder=3)
    for trial, point in zip(front, points):
        axes.annotate(str(trial.number), point, fontsize=7, xytext=(2, 3), textcoords="offset points")
    axes.set(xscale="log", xlabel="cost: seconds of training", ylabel=args.metric, title=args.study_name)
    axes.legend(frameon=False)
    figure.savefig(folder / "pareto.png", dpi=150)
    plt.close(figure)

    importances = {}
    with contextlib.suppress(ValueError, RuntimeError):  # fewer than two trials, or all alike
        importances = optuna.importance.get_param_importances(
            study, evaluator=optuna.importance.FanovaImportanceEvaluator(seed=args.seed)
        )
        figure, axes = plt.subplots(figsize=(6, 0.5 + 0.25 * len(importances)), layout="constrained")
        axes.barh(list(importances)[::-1], list(importances.values())[::-1], color="#0072B2")
        axes.set(xlabel=f"share of the variance of {args.metric} (fANOVA)")
        figure.savefig(folder / "importances.png", dpi=150)
        plt.close(figure)
    return importances


# PLUMBING: terminal, command line -----------------------------------------------------------------------------------------


class UsageError(Exception):
    """Bad input: main prints it as one line and exits with code 2."""

    def __str__(self):  # what it quotes may have newlines and escape sequences
        return "".join(character if character.isprintable() else " " for character in super().__str__())


class StopSignals:
    """Notes SIGINT and SIGTERM, so that the trials can be ended and queued again."""

    def __init__(self):
        self.signum, self.count = 0, 0
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self.note)

    def note(self, signum, _):
        self.signum, self.count = signum, self.count + 1


def summary_line(study: optuna.Study, args: Args) -> str:
    trials, best = counted(study), best_trial(study)
    done = [trial for trial in trials if trial.state.is_finished()]
    words = [f"{len(done)} of {args.num_trials} trials"]
    for state, word in ((TrialState.PRUNED, "pruned"), (TrialState.FAIL, "failed")):
        words += [f"{number} {word}"] if (number := sum(trial.state == state for trial in done)) else []
    if best:
        words.append(f"best {args.metric} {best.value:.5g} for {best.user_attrs['cost']:.0f} s (trial {best.number})")
    return ", ".join(words)


def front_table(front: list[FrozenTrial], metric: str):
    from rich.table import Table

    table = Table(title="the front: no other trial beats these in both", title_justify="left", box=None)
    for column in ("trial", "cost, s", metric):
        table.add_column(column, justify="right")
    for trial in front:
        table.add_row(str(trial.number), f"{trial.user_attrs['cost']:.1f}", f"{trial.value:.5g}")
    return table


class Screen:
    """On a terminal a live view; else a line on stderr for each finished trial."""

    def __init__(self, args: Args, study: optuna.Study):
        self.args, self.study, self.live, self.updated = args, study, None, 0.0
        self.start, self.before = time.monotonic(), sum(trial.state.is_finished() for trial in counted(study))

    def __enter__(self):
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self.live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
            self.live.start()
        print(f"study {self.args.study_name}: {summary_line(self.study, self.args)}", file=sys.stderr, flush=True)

    def __exit__(self, *_):
        if self.live:
            self.live.stop()

    def left(self) -> str:
        """The time left, at the pace of this process and those beside it since the start."""
        done = sum(trial.state.is_finished() for trial in counted(self.study))
        if done <= self.before:
            return "time left unknown"
        seconds = (time.monotonic() - self.start) / (done - self.before) * max(self.args.num_trials - done, 0)
        return f"about {int(seconds) // 3600}:{int(seconds) % 3600 // 60:02d}:{int(seconds) % 60:02d} left"

    def finished(self, trial: FrozenTrial):
        facts = trial.user_attrs
        if trial.state == TrialState.FAIL:
            what = f"failed: {facts['failure']}"
        else:
            what = f"{trial.state.name.lower()}, {self.args.metric} {facts['curve'][-1][2]:.5g} for {facts['cost']:.1f} s ({facts['end']})"
        line = f"trial {trial.number}: {what}; {summary_line(self.study, self.args)}; {self.left()}"
        if self.live:
            self.live.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def show(self, jobs: dict[int, Job]):
        if not self.live or time.monotonic() - self.updated < 1:
            return
        from rich.console import Group
        from rich.table import Table

        table = Table(title="running", title_justify="left", box=None)
        for column in ("trial", "seconds", "of", "step", self.args.metric):
            table.add_column(column, justify="right")
        for job in jobs.values():
            step, _, score = job.rows[-1] if len(job.rows) else (0, 0, np.nan)
            cost = f"{job.cost:.0f}" if job.lines else "starts"
            table.add_row(str(job.trial.number), cost, f"{self.args.max_cost_seconds:.0f}", f"{step:,.0f}", f"{score:.5g}")
        text = f"{summary_line(self.study, self.args)}; {self.left()}"
        self.live.update(Group(text, table, front_table(front_trials(self.study), self.args.metric)), refresh=True)
        self.updated = time.monotonic()


def script_defaults(path: str) -> dict[str, Any] | None:
    """The defaults of the script's `class Args`, read without running it; None if it has no such class. Raises UsageError."""
    try:
        tree = ast.parse(pathlib.Path(path).read_text())
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise UsageError(f"--script {path}: cannot be read ({error})") from error
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            defaults = {}
            for item in node.body:
                if isinstance(item, ast.AnnAssign):
                    defaults[item.target.id] = None
                    with contextlib.suppress(ValueError, TypeError):
                        defaults[item.target.id] = ast.literal_eval(item.value)
            return defaults
    return None


def given_arguments(words: tuple[str, ...]) -> dict[str, Any]:
    """Flags of the script as the mapping that --config takes: --x 1, --x=1, --x, --no-x, --env.KEY 1. Raises UsageError."""
    given, rest = {}, list(words)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if not name.startswith("--") or len(name) < 3:
            raise UsageError(f"-- {name}: the script's fixed arguments are --NAME VALUE, --NAME=VALUE, --NAME or --no-NAME")
        key = name[2:].replace("-", "_")
        if equals or (rest and not rest[0].startswith("--")):
            text = value if equals else rest.pop(0)
            try:
                value = yaml.safe_load(text.replace("_", "") if re.fullmatch(r"[\d_]+", text) else text)
            except Exception as error:  # not only YAMLError: 2001-99-99 is a ValueError, !!bool x a KeyError
                raise UsageError(f"-- {name} {text}: not a YAML value") from error
        else:
            value, key = not key.startswith("no_"), key.removeprefix("no_")
        if key.startswith("env."):
            given.setdefault("env", {})[key[4:]] = value
        else:
            given[key] = value
    return given


def prepare(argv: list[str]) -> tuple[Args, list[Parameter], dict, optuna.Study, pathlib.Path]:
    """Everything that can be wrong is found here. Raises UsageError."""
    cut = argv.index("--") if "--" in argv else len(argv)
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            args = tyro.cli(Args, args=argv[:cut], description=__doc__)
    except SystemExit as error:
        if error.code == 0:
            raise
        lines = [line.strip("╭╮╰╯│─ ") for line in messages.getvalue().splitlines()[1:]]
        raise UsageError(f"{' '.join(line for line in lines if line and not line.startswith('For full'))} (see --help)") from error
    args.fixed = tuple(argv[cut + 1 :])
    for name, least in (("num_trials", 1), ("workers", 1), ("seeds", 1), ("seed", 0)):
        if getattr(args, name) < least:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {least}")
    for name in ("max_cost_seconds", "hang_seconds"):
        if not 0 < getattr(args, name) < float("inf"):
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be a number of seconds above 0")
    try:
        content = yaml.safe_load(pathlib.Path(args.space).read_text())
    except Exception as error:  # not only OSError and YAMLError: 2001-99-99 is a ValueError
        raise UsageError(f"--space {args.space}: cannot be read ({' '.join(str(error).split())[:120]})") from error
    space = parse_space(content, args.space)
    defaults, given = script_defaults(args.script), given_arguments(args.fixed)
    for key in ("env_id", "seed", "output_dir", "config", "resume", "evaluate"):
        if key in given or any(parameter.argument == key for parameter in space):
            hint = {"env_id": "it has --env-id", "seed": "it has --seed", "config": "give the values themselves"}.get(
                key, "leave it out"
            )
            raise UsageError(f"-- --{key.replace('_', '-')}: is the sweep's to give; {hint}")
    for name in [parameter.argument for parameter in space]:
        if defaults is not None and name not in defaults:
            near = difflib.get_close_matches(name, defaults, n=1)
            raise UsageError(
                f"--space {args.space}: {args.script} has no argument {name}" + (f"; did you mean {near[0]}?" if near else "")
            )
    space = [parameter for parameter in space if parameter.argument not in given]
    if not space:
        raise UsageError(f"--space {args.space}: nothing to search, since every argument in it is given after --")
    stem = pathlib.Path(args.script).stem
    args.study_name = args.study_name or re.sub(r"[^\w.-]+", "-", f"{args.env_id}__{stem}")
    folder = pathlib.Path(args.output_dir, args.study_name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output-dir {args.output_dir}: cannot be written ({error})") from error
    if args.sampler == "grid":
        args.num_trials = min(args.num_trials, len(grid(space)))
    defaults = (defaults or {}) | given
    return args, space, defaults, open_study(args, space, defaults, folder), folder


def main() -> int:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    warnings.filterwarnings("ignore", message="Heartbeat of storage")  # sweep() sends them itself
    try:
        with threadpoolctl.threadpool_limits(1):  # the processes are small, and the cores belong to the trials
            return sweep(*prepare(sys.argv[1:]))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
