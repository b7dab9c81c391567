"""Tables and plots of a study of protein_sweep.py, while it goes on or when it is over; a sweep ends with them.

    python tools/sweep_report.py sweeps/breakout__ppo_lstm_puffer
    python tools/sweep_report.py sweeps/breakout__ppo_lstm_puffer --storage postgresql://user@host/sweeps

Prints the Pareto front (trials that no other beats in both cost and score), the best trial with its hyperparameters'
importances (fANOVA: the share of the score's variance), and the last failures; writes trials.csv, pareto.png and
importances.png to the study's folder.
"""

import contextlib
import csv
import pathlib
import re
import sys
import warnings
from dataclasses import dataclass

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import optuna
import tyro
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.table import Table

from protein_sweep import best_of, counted, curve_of, pareto_front, ranked


@dataclass
class Args:
    folder: tyro.conf.Positional[pathlib.Path]
    """the study's folder; its name is the study's"""
    storage: str | None = None
    """the SQL database that the sweep was given; default: study.db in the folder"""


def front_trials(study: optuna.Study) -> list[FrozenTrial]:
    """The trials that no other one beats in both cost and score, by rising cost."""
    trials = ranked(study)
    sign = 1 if study.direction.name == "MAXIMIZE" else -1
    costs, scores = np.array([(trial.user_attrs["cost"], sign * trial.value) for trial in trials]).T
    return [trials[index] for index in pareto_front(costs, scores)]


def plot_front(study: optuna.Study, front: list[FrozenTrial], metric: str, path: pathlib.Path):
    """Learning curves in grey, the ends of trials as dots, and the front."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    trials = counted(study)
    for curve in filter(None, map(curve_of, trials)):
        axes.plot(*np.array(curve).T[1:], color="0.85", lw=0.8, zorder=1)
    for state, color in ((TrialState.PRUNED, "#E69F00"), (TrialState.COMPLETE, "#0072B2")):
        points = [curve_of(trial)[-1][1:] for trial in trials if trial.state == state]
        if points:
            axes.scatter(
                *np.array(points).T,
                s=14,
                color=color,
                label=f"{state.name.lower()} ({len(points)})",
                zorder=2,
            )
    points = np.array([(trial.user_attrs["cost"], trial.value) for trial in front])
    axes.step(*points.T, where="post", color="#D55E00", label="front", zorder=3)
    for trial, point in zip(front, points):
        axes.annotate(
            str(trial.number), point, fontsize=7, xytext=(2, 3), textcoords="offset points"
        )
    axes.set(
        xscale="log", xlabel="cost: seconds of training", ylabel=metric, title=study.study_name
    )
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_importances(importances: dict[str, float], metric: str, path: pathlib.Path):
    figure, axes = plt.subplots(figsize=(6, 0.5 + 0.25 * len(importances)), layout="constrained")
    axes.barh(list(importances)[::-1], list(importances.values())[::-1], color="#0072B2")
    axes.set(xlabel=f"share of the variance of {metric} (fANOVA)")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def write_csv(study: optuna.Study, path: pathlib.Path):
    """A row for each trial that was run."""
    trials = [
        trial for trial in study.get_trials(deepcopy=False) if "arguments" in trial.user_attrs
    ]
    names = list(dict.fromkeys(name for trial in trials for name in trial.user_attrs["arguments"]))
    with path.open("w", newline="") as file:
        columns = ["number", "state", "score", "cost", "step", "end", "failure", "again", *names]
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        for trial in trials:
            facts = {
                "number": trial.number,
                "state": trial.state.name.lower(),
                "score": trial.value,
            }
            writer.writerow(facts | trial.user_attrs | trial.user_attrs["arguments"])


def table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    made = Table(title=title, title_justify="left", box=None)
    for column in columns:
        made.add_column(column, justify="left" if column == "argument" else "right")
    for row in rows:
        made.add_row(*row)
    return made


def main() -> int:
    args = tyro.cli(Args, description=__doc__)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    storage = args.storage or f"sqlite:///{args.folder / 'study.db'}"
    storage = re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", storage)
    console = Console(soft_wrap=True, highlight=False)
    if not args.storage and not (args.folder / "study.db").exists():
        print(
            f"error: {args.folder}: has no study.db; give the study's folder, or --storage too",
            file=sys.stderr,
        )
        return 2
    try:
        study = optuna.load_study(study_name=args.folder.resolve().name, storage=storage)
    except Exception as error:  # Optuna's, SQLAlchemy's, a driver's
        print(f"error: {args.folder}: {' '.join(str(error).split())[:200]}", file=sys.stderr)
        return 2
    write_csv(study, args.folder / "trials.csv")
    metric = study.user_attrs["sweep"]["metric"]
    best, fresh = best_of(study)
    if best:
        front = front_trials(study)
        importances = {}
        plot_front(study, front, metric, args.folder / "pareto.png")
        with contextlib.suppress(ValueError, RuntimeError):  # fewer than two trials, or all alike
            evaluator = optuna.importance.FanovaImportanceEvaluator(seed=1)
            importances = optuna.importance.get_param_importances(study, evaluator=evaluator)
            plot_importances(importances, metric, args.folder / "importances.png")
        rows = [
            (str(one.number), f"{one.user_attrs['cost']:.1f}", f"{one.value:.5g}") for one in front
        ]
        console.print(
            table(
                "the front: no other trial beats these in both", ("trial", "cost, s", metric), rows
            )
        )
        shares = {
            re.sub(r"^log2\((.*)\)$|^1 - ", r"\1", name): share
            for name, share in importances.items()
        }
        arguments = best.user_attrs["arguments"]
        names = sorted(arguments, key=lambda name: -shares.get(name, 0))
        rows = [(name, str(arguments[name]), f"{shares.get(name, 0):.0%}") for name in names]
        score = (
            f"{np.mean(fresh):.5g} on {len(fresh)} fresh seeds" if fresh else f"{best.value:.5g}"
        )
        title = f"best trial: {best.number}, {metric} {score}"
        console.print(table(title, ("argument", "value", "importance"), rows))
    for trial in [trial for trial in counted(study) if trial.state == TrialState.FAIL][-5:]:
        console.print(f"trial {trial.number} failed: {trial.user_attrs['failure']}", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
