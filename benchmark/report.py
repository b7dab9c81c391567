"""From the cells that run.py left to report.md and its figures, in the same folder.

    python benchmark/report.py benchmark/reports/cpu-bf16      # or auto, as run.py's --out

The report says what was measured and nothing else: a group without cells has no section. DIR/notes.md, if there is one,
is included as "What was tried". Times count from the start of the process, for every program: with imports, compiling.
"""

import argparse
import functools
import json
import pathlib
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import scipy.stats
import yaml
from run import ROOT, report_folder

NAMES = {
    "two_ranks": "ours, two ranks",
    "large minibatches": "ours, large minibatches",
    "two ranks, large minibatches": "ours, two ranks, large minibatches",
    "PuffeRL's sizes": "ours, PuffeRL's sizes",
    "PuffeRL's sizes, two ranks": "ours, two ranks, PuffeRL's sizes",
    "pufferl": "PuffeRL 3.0.0",
    "sb3": "RecurrentPPO (SB3-contrib)",
    "sample_factory": "Sample Factory",
}
# Okabe and Ito's
COLORS = {"ours": "#0072B2", "two_ranks": "#56B4E9", "pufferl": "#D55E00", "sb3": "#009E73"}
COLORS |= {"sample_factory": "#CC79A7"}
MORE_COLORS = ("#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#000000", "#D55E00")
SCORES = {"breakout": (100, 200, 380, 400, 850)}
SCORES |= {
    f"envs.probes:{task}-v0": (0.5, 0.95) for task in ("CueRecall", "HiddenStart", "ShownStart")
}
# What is promised, by instruction set: the defaults' steady speed by PuffeRL's, that of PuffeRL's sizes, percent of the
# ceiling, the share of PuffeRL's seconds to a score of 380, seconds to solve Breakout.
PROMISED = {"AVX2": (1.3, 2, 50, 0.3, 300)}
PROMISED_BF16 = (2, 3, 40, 0.2, 100)
SHAPES = {"breakout": (118, 3)}  # observation and logits, for the arithmetic of a step
plt.rcParams |= {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
}
plt.rcParams |= {"legend.frameon": False, "figure.constrained_layout.use": True}


# Numbers: pure functions of cells -------------------------------------------------------------------------------------


def from_start(cell: dict) -> np.ndarray:
    """The curve's times (seconds) from the start of the process, instead of from where the program begins to count."""
    times = np.array(cell["curve"]["time"], float)
    return (
        times + (cell.get("seconds_to_first_update") or times[0]) - times[0]
        if len(times)
        else times
    )


def smooth(scores: list[float | None], window: int = 3) -> np.ndarray:
    """Each score's mean with the two logged before it; NaN where nothing, or too little, was logged."""
    result, seen = np.full(len(scores), np.nan), []
    for index, score in enumerate(scores):
        if score is not None:
            seen.append(score)
            if len(seen) >= window:
                result[index] = np.mean(seen[-window:])
    return result


def last_score(cell: dict) -> float:
    scores = smooth(cell["curve"]["score"])
    return float(np.array([np.nan, *scores[~np.isnan(scores)]])[-1])


def time_to_score(cell: dict, score: float) -> tuple[float, float]:
    """Seconds and steps until the mean of three logged scores reaches score; infinite if it never did."""
    reached = np.flatnonzero(smooth(cell["curve"]["score"]) >= score)
    if not len(reached):
        return np.inf, np.inf
    return float(from_start(cell)[reached[0]]), float(cell["curve"]["step"][reached[0]])


def flops_per_step(arguments: dict, env_id: str) -> float:
    """Floating-point operations of our trainer's matrix products per environment step; the formula is in the report."""
    (observation, logits), width = SHAPES[env_id], arguments["hidden_size"]
    forward = 2 * (observation * width + 8 * width**2 + width * (logits + 1))
    backward = 2 * forward - 2 * observation * width  # no gradient of the observation
    return forward * (1 + 1 / arguments["num_steps"]) + arguments["update_epochs"] * (
        forward + backward
    )


def ratio_of_medians(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
    return np.median(a, axis=axis) / np.median(b, axis=axis)


def interval(statistic: Callable, *samples: list[float]) -> str:
    """95 % bootstrap confidence interval (percentiles of 9999 resamplings, a fixed seed), if that many can be drawn."""
    if min(map(len, samples)) < 2 or not np.isfinite(np.concatenate(samples)).all():
        return "-"
    rng = np.random.default_rng(0)
    ci = scipy.stats.bootstrap(samples, statistic, method="percentile", rng=rng).confidence_interval
    return f"{number(ci.low)} to {number(ci.high)}"


def ratios(cells: list[dict], reference: str, other: str) -> list[float]:
    """Steady speed of reference by that of other, for each pair from the same group, environment and round (seed)."""
    pairs = defaultdict(dict)
    for cell in cells:
        if cell["sps_steady"]:
            pairs[cell["group"], cell["env_id"], cell["seed"]][cell["name"]] = cell["sps_steady"]
    return [
        pair[reference] / pair[other]
        for pair in pairs.values()
        if reference in pair and other in pair
    ]


def group_by(cells: list[dict], *keys: str) -> dict:
    """Cells by the value of a key, or by the tuple of several keys' values, in the order in which these come."""
    groups = defaultdict(list)
    for cell in cells:
        values = tuple(cell[key] for key in keys)
        groups[values if len(keys) > 1 else values[0]].append(cell)
    return groups


def ceiling_share(cell: dict, cells: list[dict]) -> float | None:
    """Percent of its precision's (median) ceiling, at as many threads as all its ranks have, that a run reaches."""
    if cell["program"] != "ours" or cell["env_id"] not in SHAPES or not cell["sps_steady"]:
        return None
    ranks = cell.get("ranks", {}).get("world_size", 1)
    key = (
        "cuda"
        if cell["arguments"]["device"] == "cuda"
        else str(cell["hardware"]["threads"] * ranks)
    )
    ceilings = [
        one["ceiling"][key][cell["arguments"]["precision"]]
        for one in cells
        if key in one.get("ceiling", {})
    ]
    flops = cell["sps_steady"] * flops_per_step(cell["arguments"], cell["env_id"])
    return 100 * flops / (float(np.median(ceilings)) * 1e9) if ceilings else None


# Words ----------------------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    if np.isinf(value) or np.isnan(value):
        return "never" if np.isinf(value) else "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread(values: list[float | None], unit: str = "") -> str:
    """Median, least and most, number of runs. Infinite is never."""
    values = [value for value in values if value is not None]
    if not values or np.isinf(min(values)):
        return "never" if values else "-"
    middle = number(float(np.median(values))) + (unit if np.isfinite(np.median(values)) else "")
    most = f" ({number(min(values))} to {number(max(values))}, n = {len(values)})"
    return middle + most * (len(values) > 1)


def spread_of(cells: list[dict], key: str, unit: str = "") -> str:
    return spread([cell[key] for cell in cells], unit)


def label(name: str) -> str:
    return NAMES.get(name, name)


def played(cells: list[dict]) -> list[float]:
    """Scores with the most likely actions, of those that were played."""
    return [cell["played"]["episodic_return"]["mean"] for cell in cells if "played" in cell]


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)) + "\n"


def targets(cells: list[dict]) -> str:
    """The table of what the trainer promises, for the rows of which something was measured."""
    kinds, rows = group_by(cells, "kind"), []
    instructions = cells[0]["hardware"].get("instruction_set")
    faster, same_sizes, percent, part, within = PROMISED.get(instructions, PROMISED_BF16)

    def add(what: str, target: str, measured: str, met: bool):
        rows.append([what, target, measured, "**met**" if met else "not met"])

    for name, least in (("ours", faster), ("PuffeRL's sizes", same_sizes)):
        if paired := ratios(kinds["speed"], name, "pufferl"):
            measured = f"{spread(paired, ' times')}, 95 % interval {interval(np.median, paired)}"
            what = f"steady steps/s against {label('pufferl')}, paired ({label(name)})"
            add(what, f"at least {least:g} times", measured, np.median(paired) >= least)
    shares = [ceiling_share(cell, cells) for cell in kinds["speed"] if cell["name"] == "ours"]
    if shares := [share for share in shares if share]:
        what = f"share of the {precisions(kinds['speed'])} matrix-product ceiling"
        add(what, f"at least {percent} %", spread(shares, " %"), np.median(shares) >= percent)

    breakout = [cell for cell in kinds["learning"] if cell["env_id"] == "breakout"]
    runs = group_by([cell for cell in breakout if not cell["duration"]], "name")
    ours, peers = (
        [time_to_score(cell, 380)[0] for cell in runs[name]] for name in ("ours", "pufferl")
    )
    if ours and peers:
        share = np.median(ours) / np.median(peers) if np.isfinite(np.median(ours)) else np.inf
        measured = f"{spread(ours, ' s')} against {spread(peers, ' s')}: {share:.2f}"
        measured += f", 95 % interval {interval(ratio_of_medians, ours, peers)}"
        add(
            "seconds to a mean score of 380 against PuffeRL's",
            f"at most {part:g} of them",
            measured,
            share <= part,
        )
    slower = [cell for cell in breakout if cell["name"] == "sb3"]
    if runs["ours"] and slower:
        ends = [last_score(cell) for cell in slower]
        theirs = [time_to_score(cell, end)[0] for cell, end in zip(slower, ends)]
        ours = [np.median([time_to_score(cell, end)[0] for cell in runs["ours"]]) for end in ends]
        times = np.divide(theirs, ours)
        measured = (
            f"{spread(times, ' times')}: a score of {spread(ends)} after {spread(theirs, ' s')}"
        )
        measured += f" and {spread(ours, ' s')}"
        what = f"seconds to the score that {label('sb3')} ends at, its by ours"
        add(what, "at least 20 times", measured, np.median(times) >= 20)
    if done := [cell for cell in runs["ours"] if "played" in cell]:
        what = "Breakout solved: 850 with its most likely actions, mean of 128 games; seconds from the command to "
        if any("first_solved" in cell for cell in done):
            what += "the first checkpoint that does"
            seconds = [(cell.get("first_solved") or {}).get("seconds", np.inf) for cell in done]
        else:
            what += "the end of the run"
            seconds = [
                cell["wall_seconds"] if min(played([cell])) >= 850 else np.inf for cell in done
            ]
        solved = sum(second < within for second in seconds)
        measured = f"{spread(seconds, ' s')}; {solved} of {len(done)} in time; at their ends {spread(played(done))}"
        add(what, f"under {within} s, every seed", measured, solved == len(done))
    if sampled := [last_score(cell) for cell in runs["ours"]]:
        what = "mean score of the last games in training, actions sampled"
        add(what, "850", spread(sampled), np.median(sampled) >= 850)
    warm = [
        cell["seconds_to_first_update"]
        for cell in kinds["startup"]
        if cell["name"] == "ours" and not cell["cold"]
    ]
    if warm:
        add(
            "time to the first update, second start",
            "under 4 s",
            spread(warm, " s"),
            np.median(warm) < 4,
        )
    memory = group_by(kinds["speed"], "name")
    if memory["ours"] and memory["pufferl"]:
        ours, peer = (
            [cell["peak_rss_mib"] for cell in memory[name]] for name in ("ours", "pufferl")
        )
        measured = f"{spread(ours, ' MiB')} against {spread(peer, ' MiB')}"
        add(
            "peak resident memory",
            "no more than PuffeRL's",
            measured,
            np.median(ours) <= np.median(peer),
        )
    return (
        table(["what", "target", "measured: median (least to most, number of runs)", ""], rows)
        if rows
        else ""
    )


def speed_section(cells: list[dict]) -> str:
    text = "From half of each run's seconds to its end, so compilation does not count. "
    text += "Pairs are runs of the same round.\n"
    for (group, env_id), runs in group_by(cells, "group", "env_id").items():
        names, rows = group_by(runs, "name"), []
        reference = next((peer for peer in ("pufferl", "sb3") if peer in names), next(iter(names)))
        for name, some in names.items():
            paired = ratios(runs, name, reference) if name != reference else []
            columns = [spread_of(some, key) for key in ("sps_steady", "peak_rss_mib")]
            within = interval(np.median, paired) if paired else "-"
            rows.append([label(name), *columns, spread(paired), within])
        head = ["program", "steps/s", "peak memory of all its processes, MiB"]
        head += [f"times {label(reference)}, paired", "95 % interval"]
        text += f"\n**{group}**, {env_id}\n\n{table(head, rows)}"
    return text


def learning_section(cells: list[dict]) -> str:
    text = "A score is reached when the mean of three logged scores reaches it. "
    text += "Seconds count from the start of the process.\n"
    environments = group_by(cells, "env_id")
    if len(environments) > 1 and "pufferl" in {cell["name"] for cell in cells}:
        text += f"\n{against_pufferl(environments)}"
    for env_id, runs in environments.items():
        names = group_by(runs, "name")
        each = list(names.values())
        rows = [["score at the end", *(spread(list(map(last_score, some))) for some in each)]]
        rows.append(
            [
                "million steps",
                *(spread([cell["curve"]["step"][-1] / 1e6 for cell in some]) for some in each),
            ]
        )
        if any(map(played, each)):
            rows.append(
                [
                    "score with its most likely actions, 128 games",
                    *(spread(played(some)) for some in each),
                ]
            )
        rows.append(
            [
                "seconds from the command to its end",
                *(spread_of(some, "wall_seconds") for some in each),
            ]
        )
        for score in SCORES.get(env_id, ()):
            reached = [
                np.array([time_to_score(cell, score) for cell in some]).T / [[1], [1e6]]
                for some in each
            ]
            if not all(np.isinf(one).all() for one in reached):
                rows.append(
                    [f"seconds to {score}", *(spread(seconds.tolist()) for seconds, _ in reached)]
                )
                rows.append(
                    [f"million steps to {score}", *(spread(steps.tolist()) for _, steps in reached)]
                )
        text += f"\n{table([env_id, *map(label, names)], rows)}"
    return text


def against_pufferl(environments: dict[str, list[dict]]) -> str:
    """Final scores on every environment, the time to PuffeRL's, and the interquartile mean over all of them."""
    rows, worse, quick = [], [], []
    pair = {"ours", "pufferl"}
    both = {
        env_id: runs
        for env_id, runs in environments.items()
        if pair <= {cell["name"] for cell in runs}
    }
    for env_id, runs in both.items():
        ours, theirs = (group_by(runs, "name")[name] for name in ("ours", "pufferl"))
        low, high = first_score(runs), float(np.median(list(map(last_score, theirs))))
        target = low + 0.99 * (high - low)
        seconds = float(np.median([time_to_score(cell, target)[0] for cell in ours]))
        # Each of PuffeRL's runs to its own end, so that the luckier ones are not a mark that the others miss.
        of_theirs = float(
            np.median(
                [time_to_score(cell, low + 0.99 * (last_score(cell) - low))[0] for cell in theirs]
            )
        )
        worse += [env_id] if np.median(list(map(last_score, ours))) < target else []
        quick += [env_id] if seconds <= of_theirs / 3 else []
        finals = [list(map(last_score, some)) for some in (ours, theirs)]
        lead = interval(lambda a, b, axis: a.mean(axis) - b.mean(axis), *finals)
        times = map(number, (seconds, of_theirs, seconds / of_theirs))
        rows.append([env_id, number(low), *map(spread, finals), lead, *times])
    head = ["environment", "untrained", "ours", "PuffeRL", "ours - PuffeRL"]
    head += ["seconds to PuffeRL's final score: ours", "PuffeRL", "ours / PuffeRL"]
    scores = {name: normalized_scores(both, name) for name in ("ours", "pufferl")}
    left = ", ".join(env_id for env_id in environments if env_id not in both)
    return f"""Final scores: median (least to most, number of runs); ours - PuffeRL: 95 % bootstrap interval of the \
difference of the means. A final
score counts as reached 1 % below it, of the way from the untrained.

{table(head, rows)}
The target: no environment worse, and half of PuffeRL's final scores reached in a third of its time. \
Worse: {", ".join(worse) or "none"}.
In a third of the time or less: {len(quick)} of {len(rows)}{": " if quick else ""}{", ".join(quick)}.
{left and f"Not compared, because one of the two logged no score in that time: {left}."}

The interquartile mean of the final scores over all environments and runs, with a stratified bootstrap interval \
(Agarwal et al. 2021).
0 is the score of the untrained, 1 the best final score of any run here.

{iqm_table(scores)}"""


def first_score(runs: list[dict]) -> float:
    """The mean of the first scores logged, before anything is learned."""
    logged = [[score for score in cell["curve"]["score"] if score is not None] for cell in runs]
    return float(np.mean([scores[0] for scores in logged if scores]))


def iqm(*environments: np.ndarray, axis: int = -1) -> np.ndarray:
    """Interquartile mean of all runs of all environments: without the highest and the lowest quarter."""
    return scipy.stats.trim_mean(np.concatenate(environments, axis), 0.25, axis)


def iqm_table(scores: dict[str, np.ndarray]) -> str:
    """A row for each program, of its normalized scores (runs, environments)."""
    rows = [
        [label(name), number(iqm(*some.T)), interval(iqm, *some.T), str(len(some))]
        for name, some in scores.items()
    ]
    return table(["", "interquartile mean", "95 % interval", "runs per environment"], rows)


def normalized_scores(environments: dict[str, list[dict]], name: str) -> np.ndarray:
    """(runs, environments): final scores, 0: untrained, 1: the best of all; as many runs as every environment has."""
    columns = []
    for runs in environments.values():
        low, high = first_score(runs), max(map(last_score, runs))
        columns.append(
            [(last_score(cell) - low) / (high - low) for cell in runs if cell["name"] == name]
        )
    fewest = min(map(len, columns))
    return np.array([column[:fewest] for column in columns]).T


def best_score(cell: dict, window: int = 50_000) -> float:
    """The highest mean of the scores logged within so many steps, which programs log differently often: POPGym's
    maximum mean episodic reward (its epochs have 65,536 steps)."""
    logged = [
        (step, score)
        for step, score in zip(cell["curve"]["step"], cell["curve"]["score"])
        if score is not None
    ]
    steps, scores = np.array(logged).T
    means = [
        scores[(steps > end - window) & (steps <= end)].mean() for end in steps[steps >= window]
    ]
    return float(np.max(means, initial=-np.inf))


def run_scores(cells: list[dict]) -> list[float]:
    """Of each run: of its games after training where the plan says how many, otherwise the best while training."""
    return played(cells) if compares_games(cells) else [*map(best_score, cells)]


def compares_games(cells: list[dict]) -> bool:
    return any(cell.get("games") for cell in cells)


def task_scores(
    cells: list[dict], published: dict
) -> tuple[list[str], dict[str, list[list[float]]], dict]:
    """Programs and published columns; of each environment, the best scores of each column's runs (published: one, or
    none); and for each environment what is 0 and what is 1: the untrained score and the highest one of any column."""
    programs = [*dict.fromkeys(cell["name"] for cell in cells)]
    columns, scores, scale = (
        [*programs, *dict.fromkeys(key for row in published.values() for key in row)],
        {},
        {},
    )
    for env_id, runs in group_by(cells, "env_id").items():
        row = published.get(env_id, {})
        scores[env_id] = [
            run_scores([cell for cell in runs if cell["name"] == name]) for name in programs
        ]
        scores[env_id] += [[row[name]] if name in row else [] for name in columns[len(programs) :]]
        scale[env_id] = first_score(runs), max(np.mean(some) for some in scores[env_id] if some)
    return columns, scores, scale


def tasks_section(cells: list[dict], published: dict) -> str:
    """A row for each environment, a column for each program, and what others published."""
    columns, scores, scale = task_scores(cells, published)
    programs, environments = (
        [*dict.fromkeys(cell["name"] for cell in cells)],
        group_by(cells, "env_id"),
    )
    rows = []
    for env_id, each in scores.items():
        steps = [
            cell["curve"]["step"][-1] / 1e6
            for cell in environments[env_id]
            if cell["name"] == "ours"
        ]
        best = max(np.mean(some) for some in each[: len(programs)] if some)
        words = [spread(some) for some in each]
        for index, some in enumerate(each[: len(programs)]):
            if some and np.mean(some) >= best - 0.01 * abs(best - scale[env_id][0]):
                words[index] = f"**{words[index]}**"
        rows.append([task_name(env_id), number(scale[env_id][0]), *words, spread(steps)])
    head = ["task", "untrained", *map(label, columns), "million steps of ours"]
    normal, (low, high) = {}, np.array([*scale.values()]).T
    for name, each in zip(programs, zip(*scores.values())):
        if fewest := min(map(len, each)):
            normal[name] = (np.array([runs[:fewest] for runs in each]).T - low) / (high - low)
    measure = "The highest mean of the scores logged within 50,000 steps, of the returns of all episodes while training (POPGym's measure)."
    if compares_games(cells):
        measure = (
            f"The mean of {cells[0]['games']} games after training, with the most likely actions."
        )
    return f"""{measure}
In the table median, least and most; bold: by its mean the best of the programs, or within 1 % of the way to it.

{table(head, rows)}
The interquartile mean over all tasks and runs, with a stratified bootstrap interval (Agarwal et al. 2021). 0 is the \
score of the untrained, 1 the highest
in the row, what others published included.

{iqm_table(normal)}"""


def task_name(env_id: str) -> str:
    return re.sub(r"-v\d+$", "", env_id.rpartition(":")[2])


def ranks_section(cells: list[dict]) -> str:
    """The first program of a group is one rank on a core; another's efficiency: its speed by x ranks times that."""
    parts = ["Two cores; in turn, so that the machine's drift hurts all alike.\n"]
    for group, runs in group_by(cells, "group").items():
        names, rows = group_by(runs, "name"), []
        base = next(iter(names))
        timed = any("reduce" in cell["phase_shares"] for cell in runs)
        for name, some in names.items():
            paired, x = ratios(runs, name, base), some[0]["x"]
            share = (
                spread([100 * cell["phase_shares"].get("reduce", 0) for cell in some], " %")
                if x and timed
                else "-"
            )
            efficiency = spread([ratio / x for ratio in paired]) if x and name != base else "-"
            sizes = " / ".join(
                f"{some[0]['arguments'][key]:,}" for key in ("num_envs", "minibatch_size")
            )
            rows.append(
                [
                    name,
                    sizes,
                    spread_of(some, "sps_steady"),
                    spread(paired) if name != base else "-",
                    efficiency,
                    share,
                ]
            )
        head = [
            "",
            "environments / minibatch",
            "steps/s",
            f"times {base}, paired",
            "of ideal scaling from it",
        ]
        head.append("waiting for sums over ranks")
        parts.append(f"**{group}**\n\n{table(head, rows)}")
    return "\n".join(parts)


def startup_section(cells: list[dict]) -> str:
    rows = []
    for name, some in group_by(cells, "name").items():
        both = group_by(some, "cold")
        rows.append(
            [
                label(name),
                *(spread_of(both[cold], "seconds_to_first_update", " s") for cold in (True, False)),
            ]
        )
    text = "From the start of the process to the first line of metrics after an update.\n\n"
    return text + table(["program", "cold: an empty compile cache", "warm"], rows)


def ceiling_section(cells: list[dict]) -> str:
    rows, shares, dtypes = [], [], ["bfloat16", "float32"]
    ceilings = [cell["ceiling"] for cell in cells if "ceiling" in cell]
    for threads in sorted({key for ceiling in ceilings for key in ceiling}):
        some = [ceiling[threads] for ceiling in ceilings if threads in ceiling]
        rows.append([threads, *(spread_of(some, dtype) for dtype in dtypes)])
    text = f"The fastest of several shapes of matrix product, GFLOP/s:\n\n{table(['threads', *dtypes], rows)}"
    known = [cell for cell in cells if ceiling_share(cell, cells)]
    for (group, name, env_id), some in group_by(known, "group", "name", "env_id").items():
        if some[0]["kind"] != "startup":
            mflop = flops_per_step(some[0]["arguments"], env_id) / 1e6
            shares.append(
                [
                    group,
                    name,
                    f"{mflop:.2f}",
                    spread([ceiling_share(cell, cells) for cell in some], " %"),
                ]
            )
    if not shares:
        return text
    return f"""{text}
Training's share of the {precisions(cells)} ceiling at the same number of threads. With observations of width D, \
L logits, hidden width H, segments
of T steps and E epochs, a forward pass costs F = 2 (D H + 8 H² + H (L + 1)) operations per step: encoder, LSTM, \
two heads. The rollout
takes F (1 + 1/T), with the value after the segment; the update E (3 F - 2 D H): forward, the gradients of weights \
and of inputs, but for
that of the observation. Pointwise functions, environments, and Muon's own products are not counted, though they \
take time.

{table(["group", "run", "MFLOP per environment step", "share of the ceiling"], shares)}"""


def precisions(cells: list[dict]) -> str:
    return " or ".join(
        sorted({cell["arguments"]["precision"] for cell in cells if cell["program"] == "ours"})
    )


def machine(cells: list[dict], folder: pathlib.Path) -> str:
    """CPU, instruction set (what is stored here without one is all of one machine) and commits, in a line."""
    unknown = (
        "AVX512-BF16"
        if folder.resolve().parent == ROOT / "benchmark/reports"
        else "instruction set not noted"
    )
    found = [cell["hardware"] for cell in cells]
    cpus = {
        (one["cpu"], one.get("instruction_set", unknown), f"{one['cores']} cores") for one in found
    }
    commits = dict.fromkeys(cell["git_commit"][:7] for cell in cells)
    return (
        f"CPU: {'; '.join(', '.join(cpu) for cpu in sorted(cpus))}. Commit: {', '.join(commits)}.\n"
    )


def provenance(cells: list[dict]) -> str:
    """Where the figures come from: machine, versions, commits, exact commands."""

    def distinct(texts) -> str:
        return "; ".join(sorted(set(texts)))

    def listed(mapping: dict) -> str:
        return ", ".join(
            f"{key} {value}" for key, value in sorted(mapping.items()) if value is not None
        )

    versions = (f"{label(cell['program'])}: {listed(cell.get('versions', {}))}" for cell in cells)
    notes = (f"{label(cell['program'])}: {cell['note']}" for cell in cells if cell.get("note"))
    rows = [
        ["hardware", distinct(listed(cell["hardware"]) for cell in cells)],
        ["versions", distinct(versions)],
        ["peers' settings", distinct(notes)],
        [
            "commit",
            distinct(
                f"{cell['git_commit'][:12]}{' with changes' * cell['git_dirty']}" for cell in cells
            ),
        ],
        ["first and last start", f"{cells[0]['started']}, {cells[-1]['started']}"],
        ["load average before a cell", spread_of(cells, "load_before")],
    ]
    text = f"{table(['', ''], rows)}\nThe commands, in the repository's folder; DIR is where the metrics go.\n\n```\n"
    for (group, name, env_id), some in group_by(cells, "group", "name", "env_id").items():
        one, seeds = some[0], ", ".join(map(str, sorted(cell["seed"] for cell in some)))
        cores = ", ".join(map(str, one["cores"])) + "; empty compile cache" * one["cold"]
        words = [
            *(f"{key}={value}" for key, value in one["environment"].items()),
            shlex.join(one["command"]),
        ]
        text += f"# {group}: {name}, {env_id}; seeds {seeds}; cores {cores}\n{' '.join(words)}\n"
    return text + "```\n"


# Figures --------------------------------------------------------------------------------------------------------------


def color(name: str, index: int = 0) -> str:
    return COLORS.get(name, MORE_COLORS[index % len(MORE_COLORS)])


def save(figure, path: pathlib.Path):
    figure.savefig(path, dpi=130, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)


def plot_speed(cells: list[dict], path: pathlib.Path):
    groups = group_by([cell for cell in cells if cell["sps_steady"]], "group")
    figure, axes = plt.subplots(1, len(groups), figsize=(5.5 * len(groups), 2.6), squeeze=False)
    for axis, (group, runs) in zip(axes[0], groups.items()):
        names = group_by(runs, "name")
        for row, (name, some) in enumerate(names.items()):
            speeds = np.array([cell["sps_steady"] / 1000 for cell in some])
            axis.barh(row, np.median(speeds), color=color(name, row), alpha=0.5, height=0.6)
            heights = np.linspace(row - 0.15, row + 0.15, len(speeds))
            axis.plot(speeds, heights, "o", color=color(name, row), markersize=4)
            axis.text(speeds.max(), row, f"   {np.median(speeds):,.1f}", va="center")
        axis.set(yticks=range(len(names)), yticklabels=[*map(label, names)], title=group)
        axis.set(
            xlabel="thousand steps/s (bar: median; dots: runs)", xlim=(0, 1.2 * axis.get_xlim()[1])
        )
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
    save(figure, path)


def plot_curves(axis, runs: list[dict], x_of: Callable) -> float:
    """Of each program the median over seeds, and the range between the worst and the best, as far as all of them go.
    Returns the lowest score."""
    lowest = np.inf
    for index, (name, some) in enumerate(group_by(runs, "name").items()):
        curves = [(x_of(cell), smooth(cell["curve"]["score"])) for cell in some]
        curves = [(x[~np.isnan(y)], y[~np.isnan(y)]) for x, y in curves]
        x = np.linspace(max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves), 300)
        y = np.array([np.interp(x, *curve) for curve in curves])
        lowest = min(lowest, y.min())
        hue, what = color(name, index), f"{label(name)}, runs: {len(some)}"
        axis.plot(x, np.median(y, axis=0), color=hue, label=what)
        axis.fill_between(x, y.min(axis=0), y.max(axis=0), color=hue, alpha=0.2, linewidth=0)
    return lowest


def plot_learning(cells: list[dict], path: pathlib.Path):
    """A row for each environment: scores against steps, and against seconds."""
    environments = group_by(cells, "env_id")
    rows = len(environments)
    figure, axes = plt.subplots(rows, 2, figsize=(11, 3.8 * rows), squeeze=False, sharey="row")
    x_axes = {
        "million environment steps": lambda cell: np.array(cell["curve"]["step"]) / 1e6,
        "seconds from the start of the process": from_start,
    }
    for row, (env_id, runs) in zip(axes, environments.items()):
        lowest = 0.0
        for axis, (x_label, x_of) in zip(row, x_axes.items()):
            lowest = min(lowest, plot_curves(axis, runs, x_of))
            for score in (380, 850) if env_id == "breakout" else ():
                axis.axhline(score, color="gray", linestyle=":", linewidth=1)
            axis.set(xlabel=x_label, xlim=(0, None))
        row[0].set(ylabel=f"{env_id}: mean score", ylim=(lowest, None))
        row[0].legend(loc="best")
    save(figure, path)


def plot_tasks(cells: list[dict], path: pathlib.Path, published: dict):
    """A heat map: a row for each environment, a column for each program and for what others published."""
    columns, scores, scale = task_scores(cells, published)
    figure, axis = plt.subplots(figsize=(2.4 + 1.25 * len(columns), 1 + 0.33 * len(scores)))
    means = np.array(
        [[np.mean(some) if some else np.nan for some in row] for row in scores.values()]
    )
    low, high = np.array([*scale.values()]).T[:, :, None]
    shade = (means - low) / (high - low)
    axis.imshow(shade, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    for row, column in np.argwhere(np.isfinite(means)):
        hue = "white" if shade[row, column] < 0.6 else "black"
        axis.text(column, row, f"{means[row, column]:.2f}", ha="center", va="center", color=hue)
    words = [label(name).replace(" (", "\n(") for name in columns]
    axis.set(xticks=range(len(columns)), xticklabels=words, yticks=range(len(scores)))
    axis.set_yticklabels([task_name(env_id) for env_id in scores])
    axis.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, left=False)
    axis.grid(visible=False)
    save(figure, path)


def plot_many(cells: list[dict], path: pathlib.Path):
    """A small panel for each environment: scores against seconds of training, as they are limited."""
    seconds = lambda cell: np.array(cell["curve"]["time"], float) - cell["curve"]["time"][0]  # noqa: E731
    environments = group_by(cells, "env_id")
    rows = -(-len(environments) // 4)
    figure, axes = plt.subplots(rows, 4, figsize=(14, 2.6 * rows), squeeze=False)
    for axis, (env_id, runs) in zip(axes.flat, environments.items()):
        plot_curves(axis, runs, seconds)
        axis.set_title(task_name(env_id), fontsize=10)
    for axis in axes.flat[len(environments) :]:
        axis.axis("off")
    axes[-1, 0].set_xlabel("seconds from the first update on")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower right", ncols=3)
    save(figure, path)


def plot_scaling(cells: list[dict], path: pathlib.Path):
    groups = group_by(cells, "group")
    figure, axes = plt.subplots(1, len(groups), figsize=(4 * len(groups), 3.2), squeeze=False)
    for axis, (group, runs) in zip(axes[0], groups.items()):
        for program, some in group_by(runs, "program").items():
            values = group_by(sorted(some, key=lambda cell: cell["x"]), "x")
            medians = [
                np.median([cell["sps_steady"] / 1000 for cell in same]) for same in values.values()
            ]
            axis.plot(list(values), medians, "-", color=color(program), label=label(program))
            points = [cell["x"] for cell in some], [cell["sps_steady"] / 1000 for cell in some]
            axis.plot(*points, "o", color=color(program))
        ticks = sorted({cell["x"] for cell in runs})
        axis.set(xscale="log", xticks=ticks, xticklabels=ticks, xlabel=runs[0]["x_label"] or group)
        axis.set_ylabel("thousand steps/s")
        axis.set_ylim(0, 1.25 * axis.get_ylim()[1])
        axis.minorticks_off()
        axis.legend(loc="upper right", ncols=2)
    save(figure, path)


# The report ---------------------------------------------------------------------------------------


def make_report(folder: pathlib.Path) -> pathlib.Path:
    stored = [json.loads(path.read_text()) for path in sorted(folder.glob("cells/*/*.json"))]
    stored.sort(key=lambda cell: cell["started"])
    cells, failed = (
        [cell for cell in stored if cell["status"] == status] for status in ("ok", "failed")
    )
    if not cells:
        raise SystemExit(
            f"error: {folder}: no finished cell in cells/; benchmark/run.py --out {folder} makes some"
        )
    kinds = group_by(cells, "kind")
    learning = [cell for cell in kinds["learning"] if not np.isnan(last_score(cell))]
    scaling = [cell for cell in kinds["scaling"] if cell["sps_steady"]]
    scaling.sort(key=lambda cell: (cell["group"], cell["program"], cell["x"]))
    made = f"`python benchmark/report.py` made this of {len(cells)} runs, a JSON each in [cells](cells)."
    parts = [f"# Benchmark {folder.resolve().name}\n\n{made}\n", machine(cells, folder)]

    def section(
        title: str,
        text: str,
        name: str = "",
        plot: Callable | None = None,
        data: list[dict] | None = None,
    ):
        if plot:
            plot(data, folder / f"{name}.png")
            text += f"\n![{title}]({name}.png)\n"
        parts.append(f"## {title}\n\n{text}")

    if kinds["speed"] and (promised := targets(cells)):
        section("Targets", promised)
    if kinds["speed"]:
        section(
            "Steps per second", speed_section(kinds["speed"]), "speed", plot_speed, kinds["speed"]
        )
    if kinds["ranks"]:
        section("Ranks", ranks_section(kinds["ranks"]), "ranks", plot_speed, kinds["ranks"])
    if (
        learning and (folder / "published.yaml").exists()
    ):  # many tasks, and what others published of them
        published = yaml.safe_load((folder / "published.yaml").read_text())
        plot = functools.partial(plot_tasks, published=published["scores"])
        scored = kinds["learning"] if compares_games(learning) else learning
        section("Scores", tasks_section(scored, published["scores"]), "tasks", plot, scored)
        section("Learning", f"{published['source']}\n", "learning", plot_many, learning)
    elif learning:
        section("Learning", learning_section(learning), "learning", plot_learning, learning)
    if scaling:
        sizes = group_by(scaling, "group", "name", "x_label", "x").items()
        rows = [[*map(str, key), spread_of(some, "sps_steady")] for key, some in sizes]
        text = table(["group", "run", "size", "", "steps/s"], rows)
        section("Speed against sizes", text, "scaling", plot_scaling, scaling)
    if kinds["startup"]:
        section("Start-up", startup_section(kinds["startup"]))
    if kinds["ceiling"]:
        section("Share of the matrix-product ceiling", ceiling_section(cells))
    if (folder / "notes.md").exists():
        section("What was tried", (folder / "notes.md").read_text())
    if failed:
        rows = [
            [*(str(cell[key]) for key in ("group", "name", "env_id", "seed", "error"))]
            for cell in failed
        ]
        section("Failed", table(["group", "run", "environment", "seed", "error"], rows))
    section("Hardware, versions, commands", provenance(cells))
    (folder / "report.md").write_text("\n".join(parts))
    return folder / "report.md"


def main(argv: list[str]):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=report_folder, help="what was --out of run.py")
    print(make_report(parser.parse_args(argv).folder))


if __name__ == "__main__":
    main(sys.argv[1:])
