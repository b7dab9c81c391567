"""Compares hyperparameter samplers on three synthetic problems whose trials cost something; makes benchmark/reports/sweep/.

    python benchmark/sweep.py                                # runs what is missing, then writes report.md and its figures
    python benchmark/sweep.py --methods gp tpe --problems wide --seeds 3 --out DIR
    python benchmark/sweep.py --report-only

A problem has a space, a cost and a learning curve. u(x) is a hyperparameter x as 0 to 1 on its own scale (logarithmic, ...); t is the step
at which the curve is read, T = total_timesteps; a trial is stopped at the problem's largest cost, and counts with what it reached.

smooth (4 hyperparameters, no noise). Cost: T / (20000 sqrt(num_envs / 512)) seconds, 600 at most.
    Score: 100 S (1 - exp(-t / tau)), S = exp(-((u(lr) - 0.6) / 0.25)^2 / 2 - ((u(gamma) - 0.7) / 0.3)^2 / 2),
    tau = 3e6 (num_envs / 512)^0.6 exp(((u(lr) - 0.75) / 0.3)^2): more environments are faster but learn less from a step.
wide (10 hyperparameters, noise). Cost: T / (30000 (minibatch / 4096)^0.3), 300 at most.
    Score: 100 S h(t) (0.8 + 0.2 t / T), S = exp(-sum_i w_i (u_i - o_i)^2 / 2) over eight of them with w = (12, 8, 6, 4, 2, 1, 0, 0),
    h(t) = (t / tau)^2 / (1 + (t / tau)^2), tau = 2e6 exp(u(minibatch)); the last factor is an annealed learning rate's gain at the end.
    Noise: each run's factor h is off by a normal of 5 %, each line by one of 1 point.
ridge (6 hyperparameters, noise, failures). Cost: T / 40000, 300 at most. What matters is the effective rate e = lr / (1 - momentum): above
    1.2 (max_grad_norm)^-0.5 the run diverges after a tenth of its cost, a failure. The best e is 0.4, near the cliff. Nothing is learned
    for a while, then all at once: score 100 S (0.85 + 0.15 t / T) / (1 + exp(-6 (t / tau - 1))), tau = 4e6 (1 + 2 |log10(e / 0.4)|),
    S = exp(-2 log10(e / 0.4)^2 - ((u(gamma) - 0.5) / 0.3)^2 / 2 - ((u(ent) - 0.4) / 0.35)^2 / 2). Noise: tau is off by 10 %, each line by 2 points.

Every method gets 60 trials, one after another, and begins with the middle of the space. A trial's score is its last line's.
PufferLib's Protein is told points of the curve besides. A failure costs what it cost, and is told as one: to Optuna's as protein_sweep.py
does, as the worst score so far; to PufferLib's, which takes it for a success, with the score 0.
"""

import argparse
import itertools
import json
import os
import pathlib
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import matplotlib

matplotlib.use("Agg")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import matplotlib.pyplot as plt
import numpy as np
import optuna
import scipy.stats

from protein_sweep import SAMPLERS, parse_space

ROOT = pathlib.Path(__file__).resolve().parent.parent
PEER = ROOT / ".peers/protein/bin/python"
TRIALS = 60
NAMES = {
    "gp": "Optuna's GP (the default)",
    "tpe": "Optuna's TPE",
    "random": "random",
    "pufferlib": "PufferLib's Protein",
    "protein": "our own sampler of before",
    "gp, failures dropped": "Optuna's GP, not told of failures",
}
RUN = ("gp", "tpe", "random", "pufferlib")  # the others are only stored
COLORS = ("#0072B2", "#009E73", "#999999", "#D55E00", "#CC79A7", "#56B4E9")


# Problems -----------------------------------------------------------------------------------------------------------------


def log(low: float, high: float) -> dict:
    return {"distribution": "log_normal", "min": low, "max": high}


def logit(low: float, high: float) -> dict:
    return {"distribution": "logit_normal", "min": low, "max": high}


def pow2(low: int, high: int) -> dict:
    return {"distribution": "uniform_pow2", "min": low, "max": high}


def uniform(low: float, high: float) -> dict:
    return {"distribution": "uniform", "min": low, "max": high}


@dataclass
class Problem:
    """`quality(arguments, u, rng)` returns steps per second, score(t, progress) without the noise of lines, that noise, and whether it fails.

    u: argument -> 0 to 1. rng: None for the truth, the score without any noise.
    """

    name: str
    content: dict
    max_cost: float
    quality: Callable

    def __post_init__(self):
        self.space = parse_space(self.content)

    def unit(self, arguments: dict) -> dict[str, float]:
        """0 to 1, growing with the argument, on its own scale."""
        result = {}
        for parameter in self.space:
            scale = parameter.distribution
            value = parameter.to_scale(arguments[parameter.argument])
            ends = np.array([scale.low, scale.high, value], float)
            low, high, value = np.log(ends) if scale.log else ends
            u = (value - low) / (high - low)
            result[parameter.argument] = 1 - u if parameter.name.startswith("1 - ") else u
        return result

    def params(self, x: np.ndarray) -> dict:
        """The study's parameters at x, each coordinate 0 to 1."""
        params = {}
        for parameter, u in zip(self.space, x, strict=True):
            scale = parameter.distribution
            low, high = np.log([scale.low, scale.high]) if scale.log else (scale.low, scale.high)
            value = low + u * (high - low)
            value = np.exp(value) if scale.log else value
            whole = isinstance(scale, optuna.distributions.IntDistribution)
            value = round(value) if whole else float(np.clip(value, scale.low, scale.high))
            params[parameter.name] = value
        return params

    def arguments(self, params: dict) -> dict:
        return {one.argument: one.to_argument(params[one.name]) for one in self.space}

    def run(
        self, arguments: dict, rng: np.random.Generator | None = None, points: int = 5
    ) -> tuple[list, bool]:
        """The points [progress, cost, score] of a run's curve, and whether it failed. Without rng: the truth."""
        sps, score, noise, fails = self.quality(arguments, self.unit(arguments), rng)
        total = arguments["total_timesteps"] / sps
        end = min(total, self.max_cost)
        if fails:
            return [[0.1 * end / total, 0.1 * end, 0.0]], True
        shares = end / total * np.arange(1, points + 1) / points
        lines = [[p, p * total, float(score(p * arguments["total_timesteps"], p))] for p in shares]
        if rng is not None:
            lines = [
                [p, cost, value + noise * float(rng.standard_normal())] for p, cost, value in lines
            ]
        return lines, False

    def truth(self, arguments: dict) -> float:
        curve, failed = self.run(arguments, points=1)
        return 0.0 if failed else curve[-1][2]

    def optimum(self, cost: float) -> float:
        """The best true score of a trial that ends at a cost of at most `cost`: random search, then hill climbing."""
        rng = np.random.default_rng(0)

        def value(x):
            arguments = self.arguments(self.params(x))
            curve, failed = self.run(arguments, points=1)
            return 0.0 if failed or curve[-1][1] > cost * 1.0001 else curve[-1][2]

        points = list(rng.random((3000, len(self.space))))
        tops = sorted(((value(x), tuple(x)) for x in points), reverse=True)[:3]
        best = 0.0
        for top, x in tops:
            x = np.array(x)
            size = 0.2
            for _ in range(1500):
                other = np.clip(
                    x + size * rng.standard_normal(len(x)) * (rng.random(len(x)) < 0.4), 0, 1
                )
                if (found := value(other)) > top:
                    x = other
                    top = found
                    size *= 1.5
                else:
                    size = max(size * 0.97, 1e-3)
            best = max(best, top)
        return best


def smooth(arguments, u, rng):
    sps = 20_000 * (arguments["num_envs"] / 512) ** 0.5
    S = np.exp(
        -(((u["learning_rate"] - 0.6) / 0.25) ** 2) / 2 - ((u["gamma"] - 0.7) / 0.3) ** 2 / 2
    )
    tau = (
        3e6
        * (arguments["num_envs"] / 512) ** 0.6
        * np.exp(((u["learning_rate"] - 0.75) / 0.3) ** 2)
    )
    return sps, lambda t, progress: 100 * S * (1 - np.exp(-t / tau)), 0.0, False


WIDE = {  # hyperparameter: (weight, optimum)
    "learning_rate": (12, 0.62), "gamma": (8, 0.35), "ent_coef": (6, 0.7), "clip_coef": (4, 0.3), "gae_lambda": (2, 0.8),
    "vf_coef": (1, 0.4), "prio_alpha": (0, 0.5), "max_grad_norm": (0, 0.5),
}  # fmt: skip


def wide(arguments, u, rng):
    sps = 30_000 * (arguments["minibatch_size"] / 4096) ** 0.3
    S = np.exp(-sum(weight * (u[name] - best) ** 2 for name, (weight, best) in WIDE.items()) / 2)
    tau = 2e6 * np.exp(u["minibatch_size"])
    luck = 1 + 0.05 * rng.standard_normal() if rng is not None else 1.0

    def score(t, progress):
        return 100 * S * luck * (t / tau) ** 2 / (1 + (t / tau) ** 2) * (0.8 + 0.2 * progress)

    return sps, score, 1.0, False


def ridge(arguments, u, rng):
    effective = arguments["learning_rate"] / (1 - arguments["momentum"])
    off = np.log10(effective / 0.4)
    S = np.exp(
        -2 * off**2 - ((u["gamma"] - 0.5) / 0.3) ** 2 / 2 - ((u["ent_coef"] - 0.4) / 0.35) ** 2 / 2
    )
    luck = np.exp(0.1 * rng.standard_normal()) if rng is not None else 1.0
    tau = 4e6 * (1 + 2 * abs(off)) * luck

    def score(t, progress):
        return 100 * S * (0.85 + 0.15 * progress) / (1 + np.exp(-6 * (t / tau - 1)))

    return 40_000, score, 2.0, effective > 1.2 * arguments["max_grad_norm"] ** -0.5


PROBLEMS = {
    problem.name: problem
    for problem in (
        Problem(
            "smooth",
            {"learning_rate": log(1e-4, 1e-1), "gamma": logit(0.9, 0.999), "num_envs": pow2(64, 4096), "total_timesteps": log(100_000, 100_000_000)},
            600.0,
            smooth,
        ),
        Problem(
            "wide",
            {
                "learning_rate": log(1e-4, 1e-1), "gamma": logit(0.9, 0.9995), "ent_coef": log(1e-4, 1e-1), "clip_coef": uniform(0.05, 0.5),
                "gae_lambda": logit(0.6, 0.99), "vf_coef": log(0.1, 10.0), "prio_alpha": uniform(0.0, 1.0), "max_grad_norm": log(0.1, 10.0),
                "minibatch_size": pow2(1024, 32768), "total_timesteps": log(300_000, 50_000_000),
            },
            300.0,
            wide,
        ),
        Problem(
            "ridge",
            {
                "learning_rate": log(1e-3, 1.0), "momentum": logit(0.5, 0.99), "max_grad_norm": log(0.1, 10.0), "gamma": logit(0.9, 0.999),
                "ent_coef": log(1e-4, 1e-1), "total_timesteps": log(500_000, 50_000_000),
            },
            300.0,
            ridge,
        ),
    )
}  # fmt: skip


# Methods ------------------------------------------------------------------------------------------------------------------


class Optuna:
    """A sampler as protein_sweep.py uses it: ask, tell."""

    def __init__(self, problem: Problem, method: str, seed: int):
        self.problem = problem
        self.study = optuna.create_study(direction="maximize", sampler=SAMPLERS[method](seed=seed))
        self.study.enqueue_trial(problem.params(np.full(len(problem.space), 0.5)))
        self.distributions = {one.name: one.distribution for one in problem.space}
        self.scores = []

    def suggest(self) -> tuple[dict, float]:
        start = time.perf_counter()
        self.trial = self.study.ask(self.distributions)
        return self.problem.arguments(self.trial.params), time.perf_counter() - start

    def observe(self, arguments: dict, curve: list, failed: bool):
        if not failed:
            self.scores.append(curve[-1][2])
            self.study.tell(self.trial, self.scores[-1])
        elif self.scores:
            self.study.tell(self.trial, min(self.scores))
        else:
            self.study.tell(self.trial, state=optuna.trial.TrialState.FAIL)

    def close(self):
        pass


class PufferLib:
    """PufferLib's Protein in its own virtual environment; see benchmark/peers/protein.py."""

    def __init__(self, problem: Problem, method: str, seed: int):
        self.problem = problem
        middle = problem.arguments(problem.params(np.full(len(problem.space), 0.5)))
        space = {
            name: entry
            | {"mean": middle[name], "scale": "time" if name == "total_timesteps" else "auto"}
            for name, entry in problem.content.items()
        }
        self.process = subprocess.Popen(
            [PEER, ROOT / "benchmark/peers/protein.py"], env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT / ".peers",
        )  # fmt: skip
        self.send({"space": space, "max_cost": problem.max_cost, "seed": seed})

    def send(self, message: dict) -> dict:
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def suggest(self) -> tuple[dict, float]:
        answer = self.send({"suggest": True})
        whole = {
            name for name, entry in self.problem.content.items() if isinstance(entry["min"], int)
        }
        return {
            name: round(value) if name in whole else value
            for name, value in answer["params"].items()
        }, answer["seconds"]

    def observe(self, arguments: dict, curve: list, failed: bool):
        """Each point is told as a run with as many steps in all, as PufferLib's own sweep does."""
        for progress, cost, score in curve:
            steps = {"total_timesteps": max(1, round(progress * arguments["total_timesteps"]))}
            self.send(
                {"observe": arguments | steps, "score": score, "cost": cost, "failure": failed}
            )

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def run(problem: Problem, method: str, seed: int, trials: int) -> dict:
    """One study: of each trial its cost, observed and true score (null: failed), and the seconds its suggestion took."""
    rng = np.random.default_rng([seed, 7])
    study = (PufferLib if method == "pufferlib" else Optuna)(problem, method, seed)
    columns = {"cost": [], "score": [], "truth": [], "seconds": []}
    try:
        for _ in range(trials):
            arguments, seconds = study.suggest()
            curve, failed = problem.run(arguments, rng)
            study.observe(arguments, curve, failed)
            row = (
                curve[-1][1],
                None if failed else curve[-1][2],
                None if failed else problem.truth(arguments),
                seconds,
            )
            for column, value in zip(columns.values(), row):
                column.append(None if value is None else float(f"{value:.5g}"))
    finally:
        study.close()
    return {"method": method, "problem": problem.name, "seed": seed, **columns}


# Numbers ------------------------------------------------------------------------------------------------------------------

LEVELS = 40  # costs between a hundredth of the largest and the largest, evenly in logarithms


def regret(cell: dict, problem: Problem, optimum: float) -> np.ndarray:
    """After each trial: the optimum minus the true score of the trial whose observed score is the best so far."""
    scores = np.array([-np.inf if score is None else score for score in cell["score"]])
    truths = np.array([0.0 if truth is None else truth for truth in cell["truth"]])
    best = [int(np.argmax(scores[: k + 1])) for k in range(len(scores))]
    return optimum - truths[best]


def hypervolume(cell: dict, problem: Problem, optimum: float) -> np.ndarray:
    """After each trial: the area under the front of true score against log cost, 1 if the optimum were had at every cost."""
    levels = problem.max_cost * np.logspace(-2, 0, LEVELS)
    best = np.zeros(LEVELS)
    areas = []
    for cost, truth in zip(cell["cost"], cell["truth"]):
        if truth is not None:
            best = np.where(levels * 1.0001 >= cost, np.maximum(best, truth), best)
        areas.append(best.mean() / optimum)
    return np.array(areas)


def at_cost(cell: dict, values: np.ndarray, budget: float) -> float:
    """The value after the last trial that was over within the summed cost."""
    return float(
        values[max(0, int(np.searchsorted(np.cumsum(cell["cost"]), budget, side="right")) - 1)]
    )


def interval(values: list[float]) -> str:
    """Mean and its 95 % bootstrap confidence interval."""
    if len(values) < 3 or np.ptp(values) == 0:
        return f"{np.mean(values):.3g}"
    ci = scipy.stats.bootstrap(
        (values,), np.mean, method="percentile", rng=np.random.default_rng(0)
    ).confidence_interval
    return f"{np.mean(values):.3g} ({ci.low:.3g} to {ci.high:.3g})"


BUDGET = 12  # of the largest cost: what the columns "at equal cost" have spent


HEAD = """# Samplers compared on synthetic problems

Made by `python benchmark/sweep.py` (stored cells are not run again), from trials.jsonl and facts.json in this folder. `benchmark/sweep.py` states the problems.

Mean over seeds and 95 % bootstrap interval. Regret: best possible score (about 100) minus the true score of the trial that looked best; less is better.
Hypervolume: the area under the front of true score against the logarithm of the cost, from a hundredth of the largest cost to the largest, as a share of what
the best score at every cost would have; more is better. "At equal cost": when the trials have cost 12 times the largest cost of one; "60 trials": after 60,
whatever they cost.
"""
COLUMNS = [
    "method",
    "seeds",
    "regret after 60 trials",
    "regret at equal cost",
    "hypervolume after 60 trials",
    "hypervolume at equal cost",
    "cost of 60 trials",
    "failures",
    "seconds per suggestion",
]


def row_of(cells: list[dict], problem: Problem, optimum: float) -> list[str]:
    """A line of the table: one method on one problem."""
    budget = BUDGET * problem.max_cost
    row = [NAMES[cells[0]["method"]], str(len(cells))]
    for measure in regret, hypervolume:
        curves = [measure(cell, problem, optimum) for cell in cells]
        row.append(interval([curve[-1] for curve in curves]))
        row.append(interval([at_cost(*pair, budget) for pair in zip(cells, curves)]))
    row.append(f"{np.mean([sum(cell['cost']) for cell in cells]) / problem.max_cost:.1f}")
    row.append(f"{np.mean([cell['score'].count(None) for cell in cells]):.1f}")
    row.append(f"{np.median([second for cell in cells for second in cell['seconds'][20:]]):.2g}")
    return row


def draw(groups: dict[str, list[dict]], problem: Problem, optimum: float, path: pathlib.Path):
    """Regret and hypervolume against trials and against summed cost, the mean over seeds."""
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    spent = np.linspace(0.5, 50, 100)
    for (method, cells), color in zip(groups.items(), COLORS):
        for line, measure in enumerate((regret, hypervolume)):
            curves = [measure(cell, problem, optimum) for cell in cells]
            style = {"color": color, "label": NAMES[method]}
            axes[line, 0].plot(np.arange(1, TRIALS + 1), np.mean(curves, axis=0), **style)
            by_cost = [
                [at_cost(cell, curve, x * problem.max_cost) for x in spent]
                for cell, curve in zip(cells, curves)
            ]
            until = spent <= max(sum(cell["cost"]) for cell in cells) / problem.max_cost
            axes[line, 1].plot(spent[until], np.mean(by_cost, axis=0)[until], **style)
    for line, label in enumerate(("regret", "hypervolume")):
        axes[line, 0].set(xlabel="trials", ylabel=label)
        axes[line, 1].set(xlabel="summed cost, in largest costs of a trial", ylabel=label)
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.suptitle(f"{problem.name}: mean over seeds")
    figure.savefig(path, dpi=80)
    plt.close(figure)


def report(cells: list[dict], facts: dict, out: pathlib.Path):
    """report.md and a figure for each problem."""
    text = [HEAD]
    for name, problem in PROBLEMS.items():
        groups = {}
        for method in NAMES:
            some = [cell for cell in cells if (cell["problem"], cell["method"]) == (name, method)]
            if some:
                groups[method] = some
        optimum = facts["optimum"][name]
        rows = [COLUMNS, ["---"] * len(COLUMNS)]
        rows += [row_of(some, problem, optimum) for some in groups.values()]
        draw(groups, problem, optimum, out / f"{name}.png")
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        text += [f"## {name}\n", *lines, f"\n![{name}]({name}.png)\n"]
    text.append((out / "notes.md").read_text())
    (out / "report.md").write_text("\n".join(text))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", choices=RUN, default=list(RUN))
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmark/reports/sweep")
    parser.add_argument(
        "--report-only", action="store_true", help="make the report again from what is stored"
    )
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", category=optuna.exceptions.ExperimentalWarning)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "notes.md").touch()
    store = args.out / "trials.jsonl"
    facts_file = args.out / "facts.json"
    cells = [json.loads(line) for line in store.read_text().splitlines()] if store.exists() else []
    if facts_file.exists():
        facts = json.loads(facts_file.read_text())
    else:
        best = {name: problem.optimum(problem.max_cost) for name, problem in PROBLEMS.items()}
        facts = {"optimum": best}
        facts_file.write_text(json.dumps(facts, indent=1) + "\n")
    if "pufferlib" in args.methods and not PEER.exists() and not args.report_only:
        print("skipped: PufferLib's Protein; `make benchmark-peers` installs it", file=sys.stderr)
        args.methods.remove("pufferlib")
    done = {(cell["method"], cell["problem"], cell["seed"]) for cell in cells}
    todo = itertools.product(args.methods, args.problems, range(1, args.seeds + 1))
    for method, name, seed in [] if args.report_only else todo:
        if (method, name, seed) not in done:
            print(f"{NAMES[method]}, {name}, seed {seed}", file=sys.stderr, flush=True)
            cells.append(run(PROBLEMS[name], method, seed, TRIALS))
            with store.open("a") as file:
                file.write(json.dumps(cells[-1]) + "\n")
    report(cells, facts, args.out)
    print(args.out / "report.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
