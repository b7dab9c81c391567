"""Hyperparameter search that knows what a trial costs: PufferLib's Protein as an Optuna sampler, over training scripts.

    python protein_sweep.py --env-id breakout --num-trials 60 --max-cost-seconds 60 --workers 2
    python protein_sweep.py --env-id breakout --num-trials 90 ...  # the same study goes on, after Ctrl-C too
    python protein_sweep.py --env-id pong -- --num-envs 512 --hidden-size 64  # after --: always for the script
    python protein_sweep.py --storage postgresql://user@host/sweeps ...  # the same on many machines: one study
    python ppo_lstm_puffer.py --config sweeps/breakout__ppo_lstm_puffer/best.yaml # train with what it found

Optuna keeps the study (trials, storage, resuming, pruning). This file adds ProteinSampler, and trials as processes: on
cores and a GPU of their own, read while they run, stopped when they cost too much or look hopeless, recorded as
failures when they crash. At the end the three best run again on fresh seeds, and their means decide.
Read it from the top: arguments, search space, the sampler, a trial, the sweep.
"""

import ast
import contextlib
import ctypes
import difflib
import fcntl
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
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

if __name__ == "__main__":
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # until there is something to save, Ctrl-C just ends it: no traceback

import numpy as np
import optuna
import scipy.optimize
import scipy.stats
import threadpoolctl
import tyro
import yaml
from optuna._transform import _SearchSpaceTransform
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import FrozenTrial, TrialState
from sklearn.gaussian_process import GaussianProcessRegressor, kernels


@dataclass
class Args:
    """Cost-aware hyperparameter search over a training script."""

    script: str = (
        "ppo_lstm_puffer.py"  # it takes --env-id, --seed and --output-dir, and writes metrics.jsonl
    )
    env_id: str = "breakout"  # the environment, as the script takes it
    space: str = str(pathlib.Path(__file__).parent / "benchmark/sweeps/default.yaml")
    """the search space, a YAML file: argument: [choices] or {distribution, min, max}"""
    metric: str = "env/score"  # any key of metrics.jsonl (Gymnasium: episodic_return)
    direction: Literal["maximize", "minimize"] = "maximize"  # of the metric
    num_trials: int = (
        60  # finished trials in the study, those of other processes and before a restart included
    )
    max_cost_seconds: float = (
        300.0  # a run is stopped after so many seconds of training, and counts as far as it came
    )
    workers: int = 1  # trials at once; cores and GPUs are divided among them
    confirm_seeds: int = (
        3  # fresh seeds for the three best trials at the end: the best mean wins (0: as it was)
    )
    pruning: bool = True  # stop a trial that is worse, at the same cost, than three quarters of ten complete or more
    sampler: Literal["protein", "gp", "tpe", "random"] = "protein"
    """protein: the one below; the others are Optuna's, which see the score only"""
    seed: int = 1  # the sampler's; trial n trains with seed + n
    hang_seconds: float = (
        600.0  # a run without a new line in metrics.jsonl for so long has failed; compiling counts
    )
    study_name: str | None = None  # of the study and its folder; default: <env>__<script>
    output_dir: str = "sweeps"  # the study's folder goes here
    storage: str | None = (
        None  # an SQL database, postgresql://user@host/name; default: study.db in the study's folder
    )
    fixed: tyro.conf.Suppress[
        tuple[str, ...]
    ] = ()  # after --: for the script; they win over the space


class UsageError(Exception):
    """Bad input: printed as one line, exit code 2."""


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


def parse_space(content: Any, source: str) -> list[Parameter]:
    """Parameters from the content of a space file. Raises UsageError."""
    if not isinstance(content, dict) or not content:
        raise UsageError(f"--space {source}: not a mapping of arguments to distributions or lists")
    return [
        parse_parameter(str(key).replace("-", "_"), content[key], f"--space {source}: {key}")
        for key in content
    ]


def parse_parameter(argument: str, entry: Any, where: str) -> Parameter:
    """A line of a space file. Raises UsageError."""
    if (
        isinstance(entry, list)
        and entry
        and all(isinstance(choice, (bool, int, float, str)) for choice in entry)
    ):
        return Parameter(argument, argument, CategoricalDistribution(entry))
    if not isinstance(entry, dict) or set(entry) != {"distribution", "min", "max"}:
        raise UsageError(
            f"{where}: {entry}: must be a list of choices, or have exactly distribution, min and max"
        )
    kind, low, high = str(entry["distribution"]), entry["min"], entry["max"]
    numbers = {type(low), type(high)} <= {int, float} and -math.inf < low < high < math.inf
    whole = numbers and type(low) is type(high) is int
    log = kind == "log_normal"
    if kind == "uniform_pow2" and whole and low > 0 and low & (low - 1) == high & (high - 1) == 0:
        distribution = IntDistribution(low.bit_length() - 1, high.bit_length() - 1)
        scale = lambda n: 2**n, lambda value: round(np.log2(max(value, 1)))
        return Parameter(argument, f"log2({argument})", distribution, *scale)
    if kind == "logit_normal" and numbers and high < 1:
        distribution = FloatDistribution(round(1 - high, 12), round(1 - low, 12), log=True)
        scale = lambda rest: round(1 - float(f"{rest:.4g}"), 12), lambda value: 1 - value
        return Parameter(argument, f"1 - {argument}", distribution, *scale)
    if whole and (kind == "int_uniform" or (log and low > 0)):
        return Parameter(argument, argument, IntDistribution(low, high, log=log))
    if numbers and (kind == "uniform" or (log and low > 0)):
        return Parameter(
            argument,
            argument,
            FloatDistribution(low, high, log=log),
            lambda value: float(f"{value:.4g}"),
        )
    wanted = {
        "uniform": "numbers",
        "int_uniform": "whole numbers",
        "uniform_pow2": "powers of two, as 64 and 1024",
    }
    wanted |= {"log_normal": "numbers above 0", "logit_normal": "numbers below 1"}
    wanted = wanted.get(kind, f"and distribution one of {', '.join(wanted)}")
    note = "the first smaller (YAML wants 1.0e-5 for 1e-5)"
    raise UsageError(
        f"{where}: distribution {kind}, min {low}, max {high}: must be {wanted}, {note}"
    )


def to_arguments(
    space: list[Parameter], params: dict[str, Any], given: dict[str, Any]
) -> dict[str, Any]:
    """The script's arguments of a trial. A minibatch larger than the batch is lowered, lest it refuses."""
    arguments = {
        parameter.argument: parameter.to_argument(params[parameter.name]) for parameter in space
    }
    sizes = given | arguments
    if "minibatch_size" in arguments and {"num_envs", "num_steps"} <= set(sizes):
        arguments["minibatch_size"] = min(
            arguments["minibatch_size"], sizes["num_envs"] * sizes["num_steps"]
        )
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
            params[parameter.name] = (
                int(value) if isinstance(distribution, IntDistribution) else float(value)
            )
    return params


# ALGO LOGIC: the sampler ----------------------------------------------------------------------------------------------


class Cube(_SearchSpaceTransform):
    """A search space as the unit cube, by Optuna: one coordinate per number (of its logarithm where the distribution is
    logarithmic; a whole number is as wide as its rounding), one per choice of a categorical parameter (1: chosen)."""

    def __init__(self, space: dict[str, BaseDistribution]):
        super().__init__(space, transform_0_1=True)
        self.space, self.dim = space, len(self.bounds)
        self.encode, self.decode, self.owner = (
            self.transform,
            self.untransform,
            self.encoded_column_to_column,
        )

    def rounded(self, x: np.ndarray) -> np.ndarray:
        """Coordinates (n, dim) of what would be run at x (n, dim): whole numbers, one choice of each list."""
        x = x.copy()
        for index, (name, distribution) in enumerate(self.space.items()):
            columns = self.owner == index
            if isinstance(distribution, CategoricalDistribution):
                x[:, columns] = np.eye(columns.sum())[x[:, columns].argmax(1)]
            elif isinstance(distribution, IntDistribution):
                scale, back = (np.exp, np.log) if distribution.log else (np.positive, np.positive)
                low, high = self.ends(name)
                numbers = np.rint(scale(low + x[:, columns] * (high - low)))
                x[:, columns] = (
                    back(np.clip(numbers, distribution.low, distribution.high)) - low
                ) / (high - low)
        return x

    def ends(self, name: str) -> np.ndarray:
        """What 0 and 1 stand for: a number, or its logarithm."""
        return self._raw_bounds[self.owner == list(self.space).index(name)][0]


def with_progress(cube: Cube, x: np.ndarray, progress: np.ndarray) -> np.ndarray:
    """Coordinates (n, d) and progress (n) to (n, d + 1): what had been run by then, and how far it was.

    total_timesteps becomes the steps made by then, on which a score depends first; that the learning rate would have
    been annealed over more is the last coordinate, a unit less for a tenth. So long runs tell what short ones will do.
    """
    x, progress, total = x.copy(), np.maximum(progress, 1e-3), cube.space.get("total_timesteps")
    if isinstance(total, (FloatDistribution, IntDistribution)) and not total.single():
        column = list(cube.owner).index(list(cube.space).index("total_timesteps"))
        low, high = cube.ends("total_timesteps")
        steps = low + x[:, column] * (high - low)  # or their logarithm
        x[:, column] = ((steps + np.log(progress) if total.log else steps * progress) - low) / (
            high - low
        )
    return np.column_stack((x, 1 + np.log10(progress)))


def curve_of(trial: FrozenTrial) -> list[list[float]]:
    """[[progress, cost, score], ...] of a finished trial, by rising cost; empty for one that left nothing."""
    if trial.state not in (TrialState.COMPLETE, TrialState.PRUNED):
        return []
    if "curve" not in trial.user_attrs and trial.value is not None:
        return [[1.0, trial.duration.total_seconds(), trial.value]]
    return trial.user_attrs.get("curve", [])


def pareto_front(costs: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Indices, by rising cost, of the points that no other beats: better than everything that costs as much or less."""
    order = np.lexsort((-scores, costs))
    best = np.maximum.accumulate(scores[order])
    return order[np.concatenate(([True], best[1:] > best[:-1]))]


class Process:
    """A Gaussian process (Rasmussen & Williams 2006) through y (n) at x (n, d), points of runs (n).

    The linear kernel is the trend: a cost, in logarithms, is close to linear in the sizes. Matern 3/2 is what a plane
    cannot follow, with a length scale per coordinate, long where a hyperparameter does not matter. Two seeds differ by
    what all points of a run share, and by the white noise of each: luck, which a prediction leaves out.
    The kernel's parameters are maximum a posteriori: with as many length scales as observations, the likelihood alone
    overfits, so a log-normal prior, wider in more dimensions, holds them (Hvarfner et al. 2024). They are fitted to
    `most` observations at most, since each of some 50 steps costs n^3; the process itself then takes all.
    """

    def __init__(
        self,
        x: np.ndarray,
        y: np.ndarray,
        runs: np.ndarray,
        rng: np.random.Generator,
        most: int = 128,
    ):
        d = x.shape[1] + 1
        bumps = kernels.Matern(np.full(d, 0.7 * np.sqrt(d - 1)), (0.05, 1e3), nu=1.5)
        same_run = kernels.RBF(
            [1e9] * (d - 1) + [1e-10], "fixed"
        )  # 1 for two points of one run, else 0
        kernel = kernels.ConstantKernel(1.0, (1e-2, 1e2)) * bumps
        kernel += kernels.ConstantKernel(0.3, (1e-3, 1e2)) * kernels.DotProduct(1.0, "fixed")
        kernel += kernels.ConstantKernel(0.03, (1e-5, 1.0)) * same_run + kernels.WhiteKernel(
            0.03, (1e-5, 1.0)
        )
        # theta: variance, d length scales, linear variance, luck, noise, in logarithms; the prior is around the start.
        mean, deviation = kernel.theta, np.array([1.0, *np.ones(d), 1.5, 1.5, 1.5])

        def maximum_a_posteriori(negative_likelihood, theta, bounds):
            def objective(theta):
                value, gradient = negative_likelihood(theta)
                z = (theta - mean) / deviation
                return value + 0.5 * z @ z, gradient + z / deviation

            options = {
                "jac": True,
                "bounds": bounds,
                "method": "L-BFGS-B",
                "options": {"maxiter": 30},
            }
            result = scipy.optimize.minimize(objective, theta, **options)
            return result.x, result.fun

        # A run's number, the last coordinate, is so small that only same_run sees it.
        self.x, self.y = np.column_stack((x, 1e-9 * runs)), y
        some = rng.choice(len(y), most, replace=False) if len(y) > most else slice(None)
        with (
            warnings.catch_warnings()
        ):  # a parameter at its bound, which the prior seldom allows, is no news
            warnings.simplefilter("ignore")
            gp = GaussianProcessRegressor(kernel, optimizer=maximum_a_posteriori, normalize_y=True)
            self.kernel = gp.fit(self.x[some], y[some]).kernel_
        self.luck = self.kernel.k2.k1.k1.constant_value + self.kernel.k2.k2.noise_level
        self.fit(1e-10)

    def fit(self, alpha: float | np.ndarray):
        gp = GaussianProcessRegressor(self.kernel, alpha=alpha, optimizer=None, normalize_y=True)
        self.gp = gp.fit(self.x, self.y)

    def predict(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation (n) at x (n, d) over all seeds: without the luck of any run."""
        mean, deviation = self.gp.predict(
            np.column_stack((x, np.full(len(x), -1e-9))), return_std=True
        )
        return mean, np.sqrt(np.maximum(deviation**2 - self.luck * self.gp._y_train_std**2, 1e-12))

    def imagine(self, x: np.ndarray) -> np.ndarray:
        """Takes the predictions at x (n, d) for what was observed there, without luck; returns them."""
        mean, _ = self.predict(x)
        alpha = np.repeat(
            (1e-10, 1e-4 - self.luck), (len(self.x), len(x))
        )  # takes off what the kernel adds for luck
        self.x = np.concatenate((self.x, np.column_stack((x, -1e-9 * (2 + np.arange(len(x)))))))
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
    4. A limit on the cost is drawn. Of the candidates predicted to cost no more, the one with the largest expected
       improvement on what was reached at that cost, times its chance not to fail, is suggested.
    The first trials are a scrambled Sobol sequence. A suggestion is a function of the seed, the trial's number, and the
    trials in the storage, so a restart goes on.

    It works with any Optuna study of one objective. Of a trial it reads the user attribute "curve", [[progress, cost,
    score], ...] with progress in (0, 1] and cost in seconds; without it, value and duration. A failed trial counts as
    failure if it has the user attribute "failure": an interrupted one is nobody's fault.

    Unlike Protein in PufferLib 3.0.0: kernels' parameters are fitted; the points of a run share its luck; a partial run
    is told from a complete one, as its learning rate was not annealed; failures are no successes; repeated trials are
    kept, since their difference is the noise; expected improvement instead of the mean; choices and minimization work.
    Sources: PufferLib (Suarez 2025); CARBS (Fetterman et al. 2023); Rasmussen & Williams (2006), 5.4 and 6.5; Lizotte,
    "Practical Bayesian optimization" (2008); Ginsbourger et al., "Kriging is well-suited to parallelize" (2010).
    """

    def __init__(
        self,
        space: dict | None = None,
        seed: int = 1,
        max_cost: float = np.inf,
        num_random: int = 5,
    ):
        """space: if None, what the trials have in common. max_cost: where a trial will be stopped, in seconds."""
        self.space, self.seed, self.max_cost, self.num_random = space, seed, max_cost, num_random
        self.independent = optuna.samplers.RandomSampler(seed)  # for parameters outside the space

    def infer_relative_search_space(self, study, trial) -> dict[str, BaseDistribution]:
        return self.space or optuna.search_space.intersection_search_space(
            study.get_trials(deepcopy=False)
        )

    def sample_independent(self, *where) -> Any:
        return self.independent.sample_independent(*where)

    def sample_relative(
        self, study, trial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        if not search_space:
            return {}
        cube, rng = Cube(search_space), np.random.default_rng([self.seed, trial.number])
        trials = [
            one for one in study.get_trials(deepcopy=False) if set(search_space) <= set(one.params)
        ]
        encoded = [(one, cube.encode(one.params)) for one in trials]
        curves = [(x, curve) for one, x in encoded if (curve := curve_of(one))]
        if len(curves) < self.num_random:
            return cube.decode(
                scipy.stats.qmc.Sobol(cube.dim, seed=self.seed).random_base2(10)[
                    trial.number % 1024
                ]
            )
        failures = [x for one, x in encoded if "failure" in one.user_attrs]
        pending = [
            x
            for one, x in encoded
            if one.state == TrialState.RUNNING and one.number != trial.number
        ]
        sign = 1 if study.direction.name == "MAXIMIZE" else -1
        return cube.decode(self.suggest(cube, curves, failures, pending, sign, rng))

    def suggest(
        self, cube: Cube, curves: list, failures: list, pending: list, sign: int, rng
    ) -> np.ndarray:
        """curves: (coordinates, [(progress, cost, score), ...]) per trial; the others, and the result: coordinates."""
        x = np.array([coordinates for coordinates, curve in curves for _ in curve])
        progress, costs, scores = np.array(
            [point for _, curve in curves for point in curve], float
        ).T
        runs = np.repeat(np.arange(len(curves)), [len(curve) for _, curve in curves])
        costs, scores = np.maximum(costs, 1e-3), sign * scores
        score_gp = Process(with_progress(cube, x, progress), scores, runs, rng)
        cost_gp = Process(with_progress(cube, x, progress), np.log(costs), runs, rng)
        ends = np.cumsum([len(curve) for _, curve in curves]) - 1  # each trial's last point
        failed = np.repeat((0.0, 1.0), (len(ends), len(failures)))
        kernel = kernels.Matern(0.3 * np.sqrt(cube.dim), nu=1.5) + kernels.WhiteKernel(0.1)
        failure_gp = GaussianProcessRegressor(kernel, optimizer=None).fit(
            np.array([*x[ends], *failures]), failed
        )

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

        # The limit: three times in four the largest cost that is allowed, or a quarter more than the best trial's; else
        # one from the front's range, so that every cost level is improved. The record: the best at that cost, but for
        # luck, and a margin (Lizotte): a study that counts the last digit tries its best trial again and again.
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
            size, share = (
                scale * 10 ** rng.uniform(-2, -0.3, (len(chosen), 1)),
                rng.random((len(chosen), 1)),
            )
            which = (
                len(chosen),
                len(cube.space),
            )  # whole hyperparameters: all coordinates of a choice, or none
            moved = np.clip(chosen + size * rng.standard_normal(chosen.shape), 0, 1)
            anew = 0.2 if scale == 1 else 0.0
            moved = np.where(
                (rng.random(which) < anew)[:, cube.owner], rng.random(chosen.shape), moved
            )
            moved = np.where((rng.random(which) < share)[:, cube.owner], moved, chosen)
            candidates = cube.rounded(moved)  # what is rated is what would be run
            pool, ratings = (
                np.concatenate((pool, candidates)),
                np.concatenate((ratings, rate(candidates))),
            )
            centers = pool[np.argsort(-ratings)[:16]]
        return centers[0]


# A TRIAL: a run of the script, watched through its metrics.jsonl ------------------------------------------------------

POINTS = 5  # of a learning curve that the sampler sees
MILESTONES = 20  # costs, evenly spaced up to the largest, at which trials are compared for pruning
GRACE = 20.0  # seconds between SIGTERM, at which the script writes a checkpoint, and SIGKILL
LIBC = ctypes.CDLL(None)


class RunFailed(Exception):
    """A run crashed, diverged, hung or left no score: its trial has failed."""


def score_at(rows: np.ndarray, cost: float) -> float:
    """The score at a cost, from rows (n, 3) of step, cost, score: the mean of the lines of the last tenth before it."""
    before = rows[rows[:, 1] <= cost]
    return float(before[before[:, 1] >= min(0.9 * cost, before[-1, 1]), 2].mean())


def learning_curve(rows: np.ndarray, total_timesteps: int | None) -> list[list[float]]:
    """POINTS times [progress, cost, score] at even parts of the cost reached. Progress: part of total_timesteps."""
    points = []
    for cost in rows[-1, 1] * (
        np.arange(1, POINTS + 1) / POINTS
    ):  # the last is exactly the last row's
        if rows[0, 1] <= cost:
            progress = np.interp(cost, rows[:, 1], rows[:, 0]) / (total_timesteps or rows[-1, 0])
            points.append([min(1.0, progress), cost, score_at(rows, cost)])
    return points


class Run:
    """A run of the script as a process in a group of its own, watched through its metrics.jsonl."""

    def __init__(
        self,
        command: list[str],
        folder: pathlib.Path,
        args: Args,
        slot: tuple[list[int], dict[str, str]],
    ):
        """folder: the trial's. slot: the cores that it may use, the environment variables that choose its GPU."""
        self.args, self.folder, self.log = args, folder, folder / "log.txt"
        self.rows = np.empty((0, 3))  # step, cost and score of each line that has the metric
        self.lines, self.latest = (
            0,
            {},
        )  # how many lines there are, and the latest value of each of their keys
        self.cost, self.seen = 0.0, time.monotonic()  # seen: when the last was found
        cores, gpu = slot
        threads = {
            f"{library}_NUM_THREADS": str(len(cores)) for library in ("OMP", "OPENBLAS", "MKL")
        }

        def prepare():  # in the new process
            os.setsid()
            os.sched_setaffinity(0, cores)
            LIBC.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: if the sweep is killed, this ends too
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # which a shell's background job ignores

        with self.log.open("wb") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self.process = subprocess.Popen(
                command, env=os.environ | threads | gpu, preexec_fn=prepare, **streams
            )

    def read(self):
        """New lines of metrics.jsonl. Cost is their time: seconds of training, compiling not among them."""
        path = next(self.folder.glob("runs/*/metrics.jsonl"), None)
        lines = path.read_bytes().split(b"\n")[:-1] if path else []
        for text in lines[self.lines :]:
            with contextlib.suppress(
                ValueError, KeyError, TypeError, AttributeError
            ):  # of a user's own script
                line = json.loads(text)
                self.cost = max(line["time"], 1e-3)
                self.latest |= line
                if self.args.metric in line:
                    self.rows = np.vstack(
                        (self.rows, (line["step"], self.cost, float(line[self.args.metric])))
                    )
        if len(lines) > self.lines:
            self.lines, self.seen = len(lines), time.monotonic()

    def wait(self, signals: list[int], hopeless: Callable[[np.ndarray], bool]) -> str | None:
        """Until the run is over, by itself (None) or by one of the reasons that are returned. Raises RunFailed."""
        ending, kill_at, over = None, math.inf, os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            while (
                not os.waitid(os.P_PID, self.process.pid, over) and len(signals) < 2
            ):  # a second Ctrl-C does not wait
                time.sleep(0.1)
                self.read()
                now = time.monotonic()
                if now > kill_at:
                    raise RunFailed(
                        f"hangs: does not end within {GRACE:g} seconds of SIGTERM ({ending})"
                    )
                if ending:
                    continue
                if now - self.seen > self.args.hang_seconds:
                    raise RunFailed(
                        f"hangs: no new line in metrics.jsonl for {self.args.hang_seconds:g} seconds"
                    )
                if signals:
                    ending = "interrupted"
                elif self.lines and self.cost + now - self.seen >= self.args.max_cost_seconds:
                    ending = "max cost"
                elif hopeless(self.rows):
                    ending = "pruned"
                if (
                    ending
                ):  # the script, not its group: whoever compiles ends it at once, and its compilers
                    kill_at = now + GRACE
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
            last_line = self.log_tail().rpartition("\n")[2]
            raise RunFailed(
                self.latest.get("exit_reason")
                or f"exit code {self.process.returncode}: {last_line}"
            )
        if not len(self.rows):
            have = ", ".join(sorted(self.latest)) or "nothing"
            raise RunFailed(
                f"no {self.args.metric} in metrics.jsonl, which has {have}"
            ) from KeyError(self.args.metric)
        if not np.isfinite(self.rows[:, 2]).all():
            raise RunFailed(f"{self.args.metric} is not finite")
        if (
            ending == "max cost"
        ):  # it had all the time there is, however long ago its last score was
            end = (
                self.latest["step"],
                max(self.args.max_cost_seconds, self.rows[-1, 1]),
                self.rows[-1, 2],
            )
            return np.vstack((self.rows, end))
        return self.rows

    def log_tail(self) -> str:
        return self.log.read_bytes()[-2000:].decode(errors="replace").strip()


def unboxed(text: str) -> str:
    """What a box of tyro's says, in a line."""
    lines = [line.strip("╰╯│─ ") for line in text.splitlines() if line[:1] != "╭"]  # its title
    return " ".join(" ".join(lines).split()).partition(" For full helptext")[0]


def run_trial(trial: optuna.Trial, sweep: "Sweep") -> float:
    """Runs the script with what the study suggests; returns its score. Optuna's objective."""
    args, facts, reported = sweep.args, trial.user_attrs, 0
    arguments = to_arguments(sweep.space, trial.params, sweep.given)
    trial.set_user_attr("arguments", arguments)
    trial.set_user_attr("process", f"{os.uname().nodename}:{os.getpid()}")
    folder = sweep.folder / "trials" / f"{trial.number:04d}"
    shutil.rmtree(folder, ignore_errors=True)  # of a study that was deleted
    folder.mkdir(parents=True)

    def hopeless(rows: np.ndarray) -> bool:
        """Reports the score at each new milestone; whether the pruner then says stop."""
        nonlocal reported
        if "again" in facts or not len(rows) or not np.isfinite(rows[:, 2]).all():
            return False
        before, reported = (
            reported,
            min(int(MILESTONES * rows[-1, 1] / args.max_cost_seconds), MILESTONES),
        )
        for milestone in range(before + 1, reported + 1):
            cost = milestone / MILESTONES * args.max_cost_seconds
            if rows[0, 1] <= cost:
                trial.report(score_at(rows, cost), milestone)
        return reported > before and args.pruning and trial.should_prune()

    seed = facts.get("seed", args.seed + trial.number)
    command = [
        sys.executable,
        args.script,
        "--env-id",
        args.env_id,
        f"--seed={seed}",
        f"--output-dir={folder}/runs",
    ]
    for key, value in arguments.items():
        name = key.replace("_", "-") if value is not False else f"no-{key.replace('_', '-')}"
        command.append(f"--{name}" if isinstance(value, bool) else f"--{name}={value}")
    slot = sweep.slots.get()
    run = Run(command + list(args.fixed), folder, args, slot)
    try:
        ending = run.wait(sweep.signals, hopeless)
        interrupted = sweep.signals and ending != "max cost" and (ending or run.process.returncode)
        rows = None if interrupted else run.result(ending)
    except RunFailed as error:
        unscored = isinstance(error.__cause__, KeyError) and "episodic_return" in run.latest
        if (unscored or run.process.returncode == 2) and not any(
            map(curve_of, sweep.study.get_trials(deepcopy=False))
        ):
            sweep.signals.append(0)  # the others' arguments are as bad
            requeue(sweep.study, trial)
            reason = (
                f"{error}; try --metric episodic_return"
                if unscored
                else unboxed(run.log_tail().rpartition("error: ")[2])
            )
            raise UsageError(f"{args.script}: {reason}") from error
        trial.set_user_attr("failure", str(error))
        trial.set_user_attr("log_tail", run.log_tail())
        raise
    finally:
        sweep.slots.put(slot)
    if interrupted:
        requeue(sweep.study, trial)
        raise RunFailed("by a signal to the sweep")
    curve = learning_curve(rows, (sweep.given | arguments).get("total_timesteps"))
    end = ending or run.latest.get("exit_reason", "completed")
    for key, value in {
        "curve": curve,
        "cost": curve[-1][1],
        "step": rows[-1, 0],
        "end": end,
    }.items():
        trial.set_user_attr(key, value)
    if ending == "pruned":
        raise optuna.TrialPruned
    return curve[-1][2]


# THE STUDY: which trials there are, and which of them run again -------------------------------------------------------

BEST = 3  # trials that run again at the end
FRESH = 1_000_000  # the first of their seeds, which no trial had
REQUEUES = 3  # a trial whose process was lost more often is the reason, and has failed


def open_study(
    args: Args, space: list[Parameter], defaults: dict, folder: pathlib.Path
) -> optuna.Study:
    """The study, new or as it was left. Raises UsageError if it is another one's, or the storage cannot be reached."""
    url = args.storage or f"sqlite:///{folder / 'study.db'}"
    url = re.sub(
        r"^postgres(ql)?://", "postgresql+psycopg://", url
    )  # the driver in requirements.txt
    waits = (
        {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {"pool_pre_ping": True}
    )
    lost = functools.partial(requeue, lost=1)
    heartbeat = {
        "heartbeat_interval": 10,
        "grace_period": 60,
        "heartbeat_stale_trial_callback": lost,
    }
    for attempt in range(
        4
    ):  # of two processes that make the tables at once, the second fails, but not twice
        try:
            storage = optuna.storages.RDBStorage(url, engine_kwargs=waits, **heartbeat)
            break
        except Exception as error:  # SQLAlchemy's, a driver's, the operating system's
            if attempt == 3:
                raise UsageError(
                    f"--storage {args.storage or url}: {' '.join(str(error).split())[:200]}"
                ) from error
            time.sleep(0.5)
    distributions = {one.name: one.distribution for one in space}
    pruner = optuna.pruners.PercentilePruner(
        75, n_startup_trials=10, n_warmup_steps=MILESTONES // 3, n_min_trials=10
    )
    made = {"study_name": args.study_name, "storage": storage, "pruner": pruner}
    try:
        study = optuna.create_study(direction=args.direction, **made)
        study.enqueue_trial(
            to_params(space, defaults)
        )  # a sweep should not end with less than it starts with
    except (
        optuna.exceptions.DuplicatedStudyError
    ):  # as it was left, or made just now by a process beside this one
        study = optuna.load_study(**made)
    trials = study.get_trials(deepcopy=False)
    seed = 1000 * args.seed + len(trials)  # of Optuna's own, lest a restart repeats its draws
    study.sampler = {
        "protein": lambda: ProteinSampler(distributions, args.seed, args.max_cost_seconds),
        "gp": lambda: optuna.samplers.GPSampler(seed=seed, deterministic_objective=False),
        "tpe": lambda: optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True),
        "random": lambda: optuna.samplers.RandomSampler(seed=seed),
    }[args.sampler]()
    this = {
        key: getattr(args, key) for key in ("env_id", "metric", "direction", "max_cost_seconds")
    }
    this |= {"script": os.path.basename(args.script), "fixed": list(args.fixed)}
    this["space"] = {
        name: optuna.distributions.distribution_to_json(one) for name, one in distributions.items()
    }
    if not any(map(curve_of, trials)):  # nothing has worked yet: no other study either
        study.set_user_attr("sweep", this)
    before = study.user_attrs.get("sweep", {})
    if changed := [key for key in this if before.get(key) != this[key]]:
        other = f"exists with another {', '.join(changed)}; give this one another --study-name, or delete it"
        raise UsageError(f"--study-name {args.study_name}: {other}")
    return study


def requeue(study: optuna.Study, trial: optuna.Trial | FrozenTrial, lost: int = 0):
    """Queues the hyperparameters of a trial that was interrupted. lost: 1 if its heartbeat stopped."""
    facts = {
        key: trial.user_attrs[key] for key in ("again", "seed", "lost") if key in trial.user_attrs
    }
    facts["lost"] = facts.get("lost", 0) + lost
    if facts["lost"] <= REQUEUES:
        return study.enqueue_trial(trial.params, user_attrs=facts)
    facts["failure"] = (
        f"lost {facts['lost']} times: its process, or the machine, ended without a word"
    )
    failed = {
        "state": TrialState.FAIL,
        "params": trial.params,
        "distributions": trial.distributions,
    }
    study.add_trial(optuna.create_trial(user_attrs=facts, **failed))


def counted(study: optuna.Study) -> list[FrozenTrial]:
    """What --num-trials counts: running, finished, failed; not interrupted, nor queued, nor what runs again."""
    trials = [
        trial for trial in study.get_trials(deepcopy=False) if "again" not in trial.user_attrs
    ]
    lost = TrialState.WAITING, TrialState.FAIL
    return [trial for trial in trials if trial.state not in lost or "failure" in trial.user_attrs]


def ranked(study: optuna.Study) -> list[FrozenTrial]:
    """Complete trials, the best first, by the score that was seen: the first of many is lucky too."""
    complete = [trial for trial in counted(study) if trial.state == TrialState.COMPLETE]
    return sorted(
        complete, key=lambda trial: trial.value, reverse=study.direction.name == "MAXIMIZE"
    )


def fresh_scores(study: optuna.Study) -> dict[int, dict[int, float]]:
    """By trial and fresh seed, the score; NaN where the run is still to come, or has failed."""
    scores = {}
    for trial in study.get_trials(deepcopy=False):  # in order: what was interrupted comes again
        if "again" in trial.user_attrs:
            of_trial = scores.setdefault(trial.user_attrs["again"], {})
            of_trial[trial.user_attrs["seed"]] = math.nan if trial.value is None else trial.value
    return scores


def queue_best_again(study: optuna.Study, seeds: int) -> int:
    """Queues the best trials on fresh seeds, the same for each, none twice. Returns how many runs are in the queue."""
    known = fresh_scores(study)
    for trial in ranked(study)[:BEST]:
        for seed in range(FRESH, FRESH + seeds):
            if seed not in known.get(trial.number, {}):
                study.enqueue_trial(trial.params, user_attrs={"again": trial.number, "seed": seed})
    return len(study.get_trials(deepcopy=False, states=(TrialState.WAITING,)))


def best_of(study: optuna.Study) -> tuple[FrozenTrial | None, list[float]]:
    """The best trial, and its scores on fresh seeds: their means decide, among trials where all are over and well."""
    fresh = {number: list(scores.values()) for number, scores in fresh_scores(study).items()}
    fresh = {number: scores for number, scores in fresh.items() if np.isfinite(scores).all()}
    if not fresh:
        return next(iter(ranked(study)), None), []
    number = (max if study.direction.name == "MAXIMIZE" else min)(
        fresh, key=lambda number: np.mean(fresh[number])
    )
    return study.trials[number], fresh[number]


# THE SWEEP ------------------------------------------------------------------------------------------------------------


class Sweep:
    def __init__(
        self,
        args: Args,
        space: list[Parameter],
        given: dict,
        study: optuna.Study,
        folder: pathlib.Path,
    ):
        """given: the script's arguments that no trial changes."""
        self.args, self.space, self.given, self.study, self.folder = (
            args,
            space,
            given,
            study,
            folder,
        )
        self.slots = queue.SimpleQueue()  # the cores and GPUs that are free, as divide makes them
        self.signals = []  # those that came, 0 for an error

    def run(self) -> int:
        """Runs trials until the study has --num-trials, or a signal; then the best again. Returns the exit code."""
        args, study = self.args, self.study
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, lambda number, _: self.signals.append(number))
        for slot in divide(sorted(os.sched_getaffinity(0)), visible_gpus(), args.workers):
            self.slots.put(slot)

        def ask_alone(
            ask=study.ask,
        ) -> optuna.Trial:  # one suggestion at a time, so that the next knows of it
            with (self.folder / "asking").open(
                "w"
            ) as file:  # with SQLite two would take the same trial from the queue
                fcntl.flock(file, fcntl.LOCK_EX)
                return ask({one.name: one.distribution for one in self.space})

        study.ask = ask_alone
        options = {"n_jobs": args.workers, "catch": RunFailed, "callbacks": [self.after_trial]}
        print(f"{self.folder}: {len(counted(study))} of {args.num_trials} trials", file=sys.stderr)
        while not self.signals and (left := args.num_trials - len(counted(study))) > 0:
            study.optimize(lambda trial: run_trial(trial, self), n_trials=left, **options)
        running = study.get_trials(
            deepcopy=False, states=(TrialState.RUNNING,)
        )  # elsewhere: the last to end does this
        if (
            not self.signals
            and not running
            and (left := queue_best_again(study, args.confirm_seeds))
        ):
            study.optimize(lambda trial: run_trial(trial, self), n_trials=left, **options)
        self.report()
        if self.signals:
            print(
                f"interrupted; the same command goes on with study {args.study_name}",
                file=sys.stderr,
            )
        return 128 + self.signals[0] if self.signals else 0

    def after_trial(self, study: optuna.Study, trial: FrozenTrial):
        """Optuna's callback: a line for people, best.yaml, and whether that was enough."""
        metric, facts, (best, fresh) = self.args.metric, trial.user_attrs, best_of(study)
        line = f"trial {trial.number}: {trial.state.name.lower()}"
        if curve := curve_of(trial):
            line += f", {metric} {curve[-1][2]:.5g} for {curve[-1][1]:.1f} s ({facts['end']})"
            line += f", trial {facts['again']} on a fresh seed" if "again" in facts else ""
        elif trial.state == TrialState.FAIL:
            line += f": {facts.get('failure', 'interrupted')}"
        line += f"; {sum(one.state.is_finished() for one in counted(study))} of {self.args.num_trials} trials"
        if best:
            line += f", best {metric} {np.mean(fresh or best.value):.5g} (trial {best.number})"
            self.write_best(best, fresh)
        print(line, file=sys.stderr)
        if self.signals or ("again" not in facts and len(counted(study)) >= self.args.num_trials):
            study.stop()

    def write_best(self, best: FrozenTrial, fresh: list[float]):
        """best.yaml, anew after every trial."""
        args, facts, number, score = (
            self.args,
            best.user_attrs,
            best.number,
            np.mean(fresh or best.value),
        )
        how = (
            f"the mean of {len(fresh)} runs on fresh seeds"
            if fresh
            else "one run: the best of many is lucky too"
        )
        end = ", stopped there before its schedule's end" if facts["end"] == "max cost" else ""
        comment = f"""# python {args.script} --config best.yaml
# Found by protein_sweep.py: trial {number}, the best of {len(counted(self.study))}, study {args.study_name}.
# {args.metric} {score:.6g} after {facts["cost"]:.1f} seconds and {facts["step"]:,.0f} steps{end}; {how}.
"""
        config = {"env_id": args.env_id} | given_arguments(args.fixed) | facts["arguments"]
        temporary = self.folder / f"best.yaml.{threading.get_native_id()}.tmp"
        temporary.write_text(comment + yaml.safe_dump(config, sort_keys=False))
        temporary.replace(self.folder / "best.yaml")

    def report(self):
        """trials.csv, plots and tables, by tools/sweep_report.py, and one line of JSON on stdout."""
        tool = pathlib.Path(__file__).parent / "tools/sweep_report.py"
        storage = ["--storage", self.args.storage] if self.args.storage else []
        subprocess.run(
            [sys.executable, tool, self.folder, *storage], stdout=sys.stderr, check=False
        )
        states, (best, fresh) = [trial.state for trial in counted(self.study)], best_of(self.study)
        result = {
            "study": self.args.study_name,
            "folder": str(self.folder),
            "metric": self.args.metric,
        }
        result |= {"trials": len(states), "complete": states.count(TrialState.COMPLETE)}
        result |= {
            "pruned": states.count(TrialState.PRUNED),
            "failed": states.count(TrialState.FAIL),
            "best": None,
        }
        if best:
            score = {"score": float(np.mean(fresh or best.value)), "cost": best.user_attrs["cost"]}
            result["best"] = {"trial": best.number} | score | best.user_attrs["arguments"]
        print(json.dumps(result), flush=True)


def divide(
    cores: list[int], gpus: list[str], workers: int
) -> list[tuple[list[int], dict[str, str]]]:
    """Each worker's cores, neighbours and no core twice unless there are more workers than cores; and the variables
    that choose its GPU: one each, in turn, where there are several."""
    parts = np.array_split(cores, min(workers, len(cores)))
    cores_of = [parts[n % len(parts)].tolist() for n in range(workers)]
    gpu_of = [
        {"CUDA_VISIBLE_DEVICES": gpus[n % len(gpus)]} if len(gpus) > 1 else {}
        for n in range(workers)
    ]
    return list(zip(cores_of, gpu_of))


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    if (names := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in names.split(",") if name.strip()]
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # no NVIDIA driver
        query = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
        return subprocess.run(
            query, capture_output=True, text=True, check=True, timeout=60
        ).stdout.split()
    return []


# PLUMBING: command line -----------------------------------------------------------------------------------------------


def script_defaults(path: str) -> dict[str, Any]:
    """The defaults of the script's `class Args`, read without running it; empty if it has none. Raises UsageError."""
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
    return defaults


def given_arguments(words: tuple[str, ...]) -> dict[str, Any]:
    """Flags of the script as --config takes them: --x 1, --x=1, --x, --no-x, --env.KEY 1. Raises UsageError."""
    given, words = (
        {},
        [
            part
            for word in words
            for part in (word.split("=", 1) if word.startswith("--") else [word])
        ],
    )
    for word, value in zip(words, [*words[1:], "--"]):
        if not word.startswith("--"):
            continue  # a value; the script refuses one that belongs to no flag
        key = word[2:].replace("-", "_")
        if value.startswith("--"):
            key, value = key.removeprefix("no_"), str(not key.startswith("no_"))
        try:
            value = yaml.safe_load(value)
        except Exception as error:  # not only YAMLError: !!bool x is a KeyError
            raise UsageError(f"-- {word} {value}: not a YAML value") from error
        target = given.setdefault("env", {}) if key.startswith("env.") else given
        target[key.removeprefix("env.")] = value
    return given


def prepare(argv: list[str]) -> tuple[Args, list[Parameter], dict, optuna.Study, pathlib.Path]:
    """Everything that can be wrong is found here. Raises UsageError."""
    cut, messages = argv.index("--") if "--" in argv else len(argv), io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            args = tyro.cli(Args, args=argv[:cut], description=__doc__)
    except SystemExit as error:
        if error.code == 0:
            raise
        raise UsageError(f"{unboxed(messages.getvalue())} (see --help)") from error
    args.fixed = tuple(argv[cut + 1 :])
    least = {"num_trials": 1, "workers": 1, "confirm_seeds": 0, "seed": 0, "max_cost_seconds": 1e-3}
    for name, low in (least | {"hang_seconds": 1e-3}).items():
        if not low <= getattr(args, name) < math.inf:
            raise UsageError(
                f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {low}"
            )
    try:
        content = yaml.safe_load(pathlib.Path(args.space).read_text())
    except Exception as error:  # not only OSError and YAMLError: !!bool x is a KeyError
        raise UsageError(
            f"--space {args.space}: cannot be read ({' '.join(str(error).split())[:120]})"
        ) from error
    space, defaults, given = (
        parse_space(content, args.space),
        script_defaults(args.script),
        given_arguments(args.fixed),
    )
    names = [parameter.argument for parameter in space]
    for key in ("env_id", "seed", "output_dir", "config", "resume"):
        if key in given or key in names:
            raise UsageError(
                f"-- --{key.replace('_', '-')}: is the sweep's to give (see its own --help); leave it out"
            )
    for name in names if defaults else []:
        if name not in defaults:
            near = "".join(
                f"; did you mean {one}?" for one in difflib.get_close_matches(name, defaults, n=1)
            )
            raise UsageError(f"--space {args.space}: {args.script} has no argument {name}{near}")
    space = [parameter for parameter in space if parameter.argument not in given]
    if not space:
        raise UsageError(
            f"--space {args.space}: nothing to search, since every argument in it is given after --"
        )
    args.study_name = args.study_name or re.sub(
        r"[^\w.-]+", "-", f"{args.env_id}__{pathlib.Path(args.script).stem}"
    )
    folder = pathlib.Path(args.output_dir, args.study_name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output-dir {args.output_dir}: cannot be written ({error})") from error
    return args, space, defaults | given, open_study(args, space, defaults | given, folder), folder


def main() -> int:
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # a failed trial is a line of ours
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    try:
        with threadpoolctl.threadpool_limits(
            1
        ):  # the processes are small, and the cores belong to the trials
            return Sweep(*prepare(sys.argv[1:])).run()
    except UsageError as error:
        line = "".join(
            letter if letter.isprintable() else " " for letter in str(error)
        )  # what it quotes may have any
        print(f"error: {line}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
