"""Compares hyperparameter samplers on three synthetic problems; makes benchmark/reports/sweep/.

    python benchmark/sweep.py                # what is missing, then the report
    python benchmark/sweep.py --seeds 20

A problem has a space, a cost, and a learning curve whose end is a trial's score. A trial is stopped
at the problem's largest cost, and counts with what it reached. Every method gets 60 trials, one
after another, and begins with the middle of the space. A failure costs what it cost, and is told as
one, as protein_sweep.py does: as the worst score so far.
"""

import argparse
import itertools
import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import optuna
import yaml
from report import interval, number, save, table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from protein_sweep import SAMPLERS, Parameter, parse_parameter

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "benchmark/reports/sweep"
TRIALS = 60
METHODS = {  # their name and color; of the last three notes.md says how they were made
    "gp": ("Optuna's GP (the default)", "#0072B2"),
    "tpe": ("Optuna's TPE", "#009E73"),
    "random": ("random", "#999999"),
    "pufferlib": ("PufferLib's Protein", "#D55E00"),
    "protein": ("our own sampler of before", "#CC79A7"),
    "gp, failures dropped": ("Optuna's GP, not told of failures", "#56B4E9"),
}


# Problems -----------------------------------------------------------------------------------------


def unit(one: Parameter, argument: float) -> float:
    """Where an argument is between its ends, 0 to 1, on its own scale."""
    scale = one.distribution
    points = [one.to_scale(argument), scale.low, scale.high]
    value, low, high = np.log(points) if scale.log else points
    share = (value - low) / (high - low)
    return 1 - share if one.name.startswith("1 - ") else share


def middle(one: Parameter) -> float:
    """What the study has there."""
    scale = one.distribution
    value = (scale.low * scale.high) ** 0.5 if scale.log else (scale.low + scale.high) / 2
    return round(value) if isinstance(scale, optuna.distributions.IntDistribution) else value


@dataclass
class Problem:
    """`quality(a, u, luck)` returns steps per second, the score after t steps without the noise of
    a run's end, and whether the run fails.

    a: the arguments. u: the same as 0 to 1, each on its own scale. luck: the run's, 0 for the truth
    """

    quality: Callable
    max_cost: float
    noise: float  # of a run's end
    content: dict[str, dict]  # of its space

    def __post_init__(self):
        self.space = [parse_parameter(*item) for item in self.content.items()]
        self.middle = {one.name: middle(one) for one in self.space}

    def arguments(self, params: dict) -> dict:
        return {one.argument: one.to_argument(params[one.name]) for one in self.space}

    def run(self, arguments: dict, rng: np.random.Generator | None) -> tuple[float, float, bool]:
        """Cost, score, and whether it failed. Without rng the score has no noise: the truth."""
        u = {one.argument: unit(one, arguments[one.argument]) for one in self.space}
        luck = rng.standard_normal() if rng else 0.0
        sps, score_after, fails = self.quality(arguments, u, luck)
        cost = arguments["total_timesteps"] / sps
        end = min(cost, self.max_cost)
        if fails:
            return 0.1 * end, 0.0, True
        score = score_after(end * sps)
        if rng:
            score += self.noise * rng.standard_normal(5)[-1]  # five: so the stored studies drew
        return end, score, False

    def truth(self, arguments: dict) -> float:
        """The score without any noise, 0 of a failure."""
        return self.run(arguments, None)[1]


def bell(x: float, best: float, width: float) -> float:
    return np.exp(-(((x - best) / width) ** 2) / 2)


def smooth(a: dict, u: dict, luck: float) -> tuple:
    """No noise. More environments are faster but learn less from a step."""
    envs = a["num_envs"] / 512
    best = bell(u["learning_rate"], 0.6, 0.25) * bell(u["gamma"], 0.7, 0.3)
    tau = 3e6 * envs**0.6 * np.exp(((u["learning_rate"] - 0.75) / 0.3) ** 2)
    return 20_000 * envs**0.5, lambda t: 100 * best * (1 - np.exp(-t / tau)), False


def wide(a: dict, u: dict, luck: float) -> tuple:
    """Many hyperparameters; an annealed learning rate's gain at the end; runs differ by 5 %."""
    names = ("learning_rate", "gamma", "ent_coef", "clip_coef", "gae_lambda", "vf_coef")
    places = (0.62, 0.35, 0.7, 0.3, 0.8, 0.4)
    weights = (12, 8, 6, 4, 2, 1)  # prio_alpha and max_grad_norm do not matter
    far = sum(w * (u[name] - place) ** 2 for name, place, w in zip(names, places, weights))
    best = np.exp(-far / 2) * (1 + 0.05 * luck)
    tau = 2e6 * np.exp(u["minibatch_size"])

    def score(t: np.ndarray) -> np.ndarray:
        learned = (t / tau) ** 2 / (1 + (t / tau) ** 2)
        return 100 * best * learned * (0.8 + 0.2 * t / a["total_timesteps"])

    return 30_000 * (a["minibatch_size"] / 4096) ** 0.3, score, False


def ridge(a: dict, u: dict, luck: float) -> tuple:
    """What matters is lr / (1 - momentum), best at 0.4, near the cliff behind which a run diverges.

    That is a failure after a tenth of the cost. Nothing is learned for a while, which differs by
    10 % from run to run, then all at once.
    """
    rate = a["learning_rate"] / (1 - a["momentum"])
    off = np.log10(rate / 0.4)
    best = np.exp(-2 * off**2) * bell(u["gamma"], 0.5, 0.3) * bell(u["ent_coef"], 0.4, 0.35)
    tau = 4e6 * (1 + 2 * abs(off)) * np.exp(0.1 * luck)

    def score(t: np.ndarray) -> np.ndarray:
        learned = 1 / (1 + np.exp(-6 * (t / tau - 1)))
        return 100 * best * learned * (0.85 + 0.15 * t / a["total_timesteps"])

    return 40_000, score, rate > 1.2 * a["max_grad_norm"] ** -0.5


SPACES = yaml.safe_load((ROOT / "benchmark/sweep.yaml").read_text())
PROBLEMS = {
    "smooth": Problem(smooth, 600.0, 0.0, SPACES["smooth"]),
    "wide": Problem(wide, 300.0, 1.0, SPACES["wide"]),
    "ridge": Problem(ridge, 300.0, 2.0, SPACES["ridge"]),
}


# Studies ------------------------------------------------------------------------------------------

STORED = ("cost", "score", "truth", "seconds")


def run(name: str, method: str, seed: int) -> dict:
    """A study: of each trial its cost, its score, the true one, and the seconds to suggest it. The
    scores of a failure are null."""
    problem = PROBLEMS[name]
    distributions = {one.name: one.distribution for one in problem.space}
    rng = np.random.default_rng([seed, 7])
    study = optuna.create_study(direction="maximize", sampler=SAMPLERS[method](seed=seed))
    study.enqueue_trial(problem.middle)
    columns = {column: [] for column in STORED}
    scores = []
    for _ in range(TRIALS):
        start = time.perf_counter()
        trial = study.ask(distributions)
        seconds = time.perf_counter() - start
        arguments = problem.arguments(trial.params)
        cost, score, failed = problem.run(arguments, rng)
        if not failed:
            scores.append(score)
            study.tell(trial, score)
        elif scores:
            study.tell(trial, min(scores))
        else:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        row = (cost, score, problem.truth(arguments), seconds)
        for column, value in zip(STORED, row):
            nothing = failed and column in ("score", "truth")
            columns[column].append(None if nothing else float(f"{value:.5g}"))
    return {"method": method, "problem": name, "seed": seed, **columns}


# Numbers ------------------------------------------------------------------------------------------

BUDGET = 12  # of the largest cost: what the columns "at equal cost" have spent
LEVELS = 40  # costs between a hundredth of the largest and the largest, evenly in logarithms


def regret(study: dict, problem: Problem, optimum: float) -> np.ndarray:
    """After each trial: the optimum minus the true score of the trial that looks best so far."""
    scores = np.nan_to_num(study["score"], nan=-np.inf)
    best = [np.argmax(scores[: n + 1]) for n in range(len(scores))]
    return optimum - np.nan_to_num(study["truth"])[best]


def hypervolume(study: dict, problem: Problem, optimum: float) -> np.ndarray:
    """After each trial: the area under the front of true score against log cost, 1 if the optimum
    were had at every cost."""
    levels = problem.max_cost * np.logspace(-2, 0, LEVELS)
    within = levels * 1.0001 >= study["cost"][:, None]
    scores = np.nan_to_num(study["truth"])[:, None] * within
    return np.maximum.accumulate(scores).mean(axis=1) / optimum


def at_cost(study: dict, curve: np.ndarray, budget: float | np.ndarray) -> np.ndarray:
    """The value after the last trial that was over within the summed cost."""
    over = np.searchsorted(study["cost"].cumsum(), budget, side="right")
    return curve[np.maximum(over - 1, 0)]


# The report ---------------------------------------------------------------------------------------

HEAD = """# Samplers compared on synthetic problems

Made by `python benchmark/sweep.py`, which states the problems, from trials.jsonl and facts.json in
this folder. Stored studies are not run again.

Mean over seeds and 95 % bootstrap interval. Regret: best possible score (about 100) minus the true
score of the trial that looked best; less is better. Hypervolume: the area under the front of true
score against the logarithm of the cost, from a hundredth of the largest cost to the largest, as a
share of what the best score at every cost would have; more is better. "At equal cost": when the
trials have cost 12 times the largest cost of one; "60 trials": after 60, whatever they cost.
"""
COLUMNS = ["method", "seeds", "regret after 60 trials", "regret at equal cost"]
COLUMNS += ["hypervolume after 60 trials", "hypervolume at equal cost", "cost of 60 trials"]
COLUMNS += ["failures", "seconds per suggestion"]


def mean_and_interval(values: list[float]) -> str:
    """Mean and its 95 % bootstrap interval."""
    return f"{number(np.mean(values))} ({interval(np.mean, values)})"


def compare(name: str, groups: dict[str, list[dict]], optimum: float) -> str:
    """A table and a figure of the methods on a problem: of each method a study for each seed."""
    problem = PROBLEMS[name]
    rows = []
    figure, axes = plt.subplots(2, 2, figsize=(7.7, 6))
    for method, studies in groups.items():
        label, color = METHODS[method]
        costs = np.array([study["cost"].sum() for study in studies])
        spent = np.linspace(0.5, 50, 100) * problem.max_cost
        spent = spent[spent <= costs.max()]
        row = [label, str(len(studies))]
        for measure, (by_trial, by_cost) in zip((regret, hypervolume), axes):
            curves = [measure(study, problem, optimum) for study in studies]
            pairs = list(zip(studies, curves))
            row.append(mean_and_interval([curve[-1] for curve in curves]))
            equal = [at_cost(*pair, BUDGET * problem.max_cost) for pair in pairs]
            row.append(mean_and_interval(equal))
            mean = np.mean(curves, axis=0)
            by_trial.plot(np.arange(1, TRIALS + 1), mean, color=color, label=label)
            mean = np.mean([at_cost(*pair, spent) for pair in pairs], axis=0)
            by_cost.plot(spent / problem.max_cost, mean, color=color)
            by_trial.set(xlabel="trials", ylabel=measure.__name__)
            by_cost.set(xlabel="summed cost, in largest costs of a trial", ylabel=measure.__name__)
        row.append(f"{costs.mean() / problem.max_cost:.1f}")
        row.append(f"{np.mean([np.isnan(study['score']).sum() for study in studies]):.1f}")
        row.append(f"{np.median([study['seconds'][20:] for study in studies]):.2g}")
        rows.append(row)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(f"{name}: mean over seeds")
    save(figure, OUT / f"{name}.png")
    return f"## {name}\n\n{table(COLUMNS, rows)}\n![{name}]({name}.png)\n"


def report(cells: list[dict]):
    """report.md and a figure for each problem."""
    text = [HEAD]
    optima = json.loads((OUT / "facts.json").read_text())["optimum"]
    for name in PROBLEMS:
        groups = {method: [] for method in METHODS}
        for cell in cells:
            if cell["problem"] == name:
                study = {column: np.array(cell[column], float) for column in STORED}
                groups[cell["method"]].append(study)
        groups = {method: studies for method, studies in groups.items() if studies}
        text.append(compare(name, groups, optima[name]))
    text.append((OUT / "notes.md").read_text())
    (OUT / "report.md").write_text("\n".join(text))


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--seeds", type=int, default=10)
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", category=optuna.exceptions.ExperimentalWarning)
    store = OUT / "trials.jsonl"
    cells = [json.loads(line) for line in store.read_text().splitlines()]
    done = {(cell["problem"], cell["method"], cell["seed"]) for cell in cells}
    every = set(itertools.product(PROBLEMS, SAMPLERS, range(1, args.seeds + 1)))
    for name, method, seed in sorted(every - done):
        print(f"{METHODS[method][0]}, {name}, seed {seed}", file=sys.stderr, flush=True)
        cells.append(run(name, method, seed))
        with store.open("a") as file:
            file.write(json.dumps(cells[-1]) + "\n")
    report(cells)
    print(OUT / "report.md")


if __name__ == "__main__":
    main()
