"""From the cells that run.py stored to report.md and its figures, in the same folder.

    python benchmark/report.py benchmark/reports/cpu-bf16      # or auto, as run.py's --out

A report says what was measured and nothing else: a kind without cells has no section. DIR/notes.md,
if there is one, is included as "What was tried". With DIR/published.yaml tasks are compared with
what others published. Times count from the start of the process, for every program: with imports,
with compiling.
"""

import argparse
import functools
import io
import itertools
import math
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
from PIL import Image
from run import read_cells, report_folder

NAMES = {
    "pufferl": "PuffeRL 3.0.0",
    "sb3": "RecurrentPPO (SB3-contrib)",
    "sample_factory": "Sample Factory",
}
# Okabe and Ito's
COLORS = {"ours": "#0072B2", "pufferl": "#D55E00", "sb3": "#009E73"}
COLORS["sample_factory"] = "#CC79A7"
MORE_COLORS = ("#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#000000", "#D55E00")
SCORES = {"breakout": (100, 200, 380, 400, 850)}
for task in ("CueRecall", "HiddenStart", "ShownStart", "FarReward"):
    SCORES[f"envs.probes:{task}-v0"] = (0.5, 0.95)
for size in 7, 9, 11, 13:
    SCORES[f"envs.memory:MemoryS{size}-v0"] = (0.9,)
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True})
plt.rcParams.update({"grid.alpha": 0.3, "legend.frameon": False})
plt.rcParams["figure.constrained_layout.use"] = True


# Numbers of cells ---------------------------------------------------------------------------------


def group_by(cells: list[dict], *keys: str) -> dict:
    """Cells by the value of a key, or by the tuple of several keys' values, in their order."""
    groups = defaultdict(list)
    for cell in cells:
        values = tuple(cell[key] for key in keys)
        groups[values if len(keys) > 1 else values[0]].append(cell)
    return groups


def learning_curve(cell: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Million steps, seconds from the start of the process, and the mean of the last three scores,
    from the third that was logged on."""
    times = np.array(cell["curve"]["time"], float)
    times += (cell["seconds_to_first_update"] or times[0]) - times[0]
    scores = np.array(cell["curve"]["score"], float)
    logged = np.flatnonzero(~np.isnan(scores))
    scores = scores[logged]
    means = np.array([scores[end - 3 : end].mean() for end in range(3, len(scores) + 1)])
    return np.array(cell["curve"]["step"])[logged[2:]] / 1e6, times[logged[2:]], means


def last_score(cell: dict) -> float:
    means = learning_curve(cell)[2]
    return float(means[-1]) if len(means) else math.nan


def first_score(cells: list[dict]) -> float:
    """The mean of the first scores logged, before anything is learned."""
    logged = [[score for score in cell["curve"]["score"] if score is not None] for cell in cells]
    return float(np.mean([scores[0] for scores in logged if scores]))


def time_to_score(cell: dict, score: float, column: int = 1) -> float:
    """Seconds, or of column 0 million steps, until the mean of three scores is that, or never."""
    curve = learning_curve(cell)
    reached = np.flatnonzero(curve[2] >= score)
    return float(curve[column][reached[0]]) if len(reached) else math.inf


def best_score(cell: dict, window: int = 50_000) -> float:
    """The highest mean of the scores logged within so many steps, since programs log differently
    often: POPGym's maximum mean episodic reward (its epochs have 65,536 steps). Of a run with
    fewer steps the mean of all."""
    scores = np.array(cell["curve"]["score"], float)
    steps = np.array(cell["curve"]["step"])[~np.isnan(scores)]
    scores = scores[~np.isnan(scores)]
    ends = [*steps[steps >= window]] or steps[-1:]
    means = [scores[(steps > end - window) & (steps <= end)].mean() for end in ends]
    return float(max(means, default=-math.inf))


def played_return(cell: dict) -> float | None:
    """The mean of its games with the most likely actions, if they were played."""
    return cell["played"]["episodic_return"]["mean"] if "played" in cell else None


def solved_after(cell: dict, key: str) -> float | None:
    """Seconds or steps ("step"); None of a run whose checkpoints were not played."""
    if cell["program"] != "ours" or not cell.get("solved"):
        return None
    return (cell.get("first_solved") or {}).get(key, math.inf)


def ratios(cells: list[dict], name: str, reference: str) -> list[float]:
    """Steady speed by that of the reference, for each pair of the same group, environment, seed."""
    found = []
    for runs in group_by(cells, "group", "env_id", "seed").values():
        speeds = {cell["name"]: cell["sps_steady"] for cell in runs}
        if speeds.get(name) and speeds.get(reference):
            found.append(speeds[name] / speeds[reference])
    return found


def each_window(cells: list[dict]) -> list[dict]:
    """A cell for each window of what benchmark/turns.py measured; the others as they are."""
    found = []
    for cell in cells:
        for number, speed in enumerate(cell.get("windows", [cell["sps_steady"]])):
            found.append(cell | {"sps_steady": speed, "seed": (cell["seed"], number)})
    return found


def interval(statistic: Callable, *samples: list[float]) -> str:
    """95 % bootstrap interval (percentiles of 9999 resamplings, a fixed seed), if it exists."""
    if min(map(len, samples)) < 2 or not np.isfinite(np.concatenate(samples)).all():
        return "-"
    rng = np.random.default_rng(0)
    ci = scipy.stats.bootstrap(samples, statistic, method="percentile", rng=rng).confidence_interval
    return f"{number(ci.low)} to {number(ci.high)}"


def iqm(*samples: np.ndarray, axis: int = -1) -> np.ndarray:
    """Interquartile mean of all runs of all environments: without the highest and lowest quarter."""
    return scipy.stats.trim_mean(np.concatenate(samples, axis), 0.25, axis)


# Words --------------------------------------------------------------------------------------------


def number(value: float) -> str:
    if np.isnan(value):
        return "-"
    if np.isinf(value):
        return "never"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread(values: list[float | None], unit: str = "") -> str:
    """Median, least and most, number of runs. Infinite is never."""
    values = [value for value in values if value is not None]
    if not values:
        return "-"
    if np.isinf(min(values)):
        return "never"
    middle = number(float(np.median(values)))
    if np.isfinite(np.median(values)):
        middle += unit
    if len(values) == 1:
        return middle
    return f"{middle} ({number(min(values))} to {number(max(values))}, n = {len(values)})"


def label(name: str) -> str:
    return NAMES.get(name, name)


def task_name(env_id: str) -> str:
    return re.sub(r"-v\d+$", "", env_id.rpartition(":")[2])


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)) + "\n"


# Sections -----------------------------------------------------------------------------------------


def speed_section(cells: list[dict]) -> str:
    text = "Pairs are runs of the same round.\n"
    if any("window_seconds" not in cell for cell in cells):
        text = f"From half of each run's seconds to its end, so compilation does not count. {text}"
    for (group, env_id), runs in group_by(cells, "group", "env_id").items():
        names = group_by(runs, "name")
        reference = next((peer for peer in ("pufferl", "sb3") if peer in names), next(iter(names)))
        head = ["program", "steps/s", "peak memory of all its processes, MiB"]
        head.append(f"times {label(reference)}, paired")
        rows = []
        for name, some in names.items():
            paired = ratios(runs, name, reference) if name != reference else []
            row = [label(name)]
            row += [spread([cell[key] for cell in some]) for key in ("sps_steady", "peak_rss_mib")]
            rows.append([*row, spread(paired)])
        seconds = runs[0].get("window_seconds")
        turns = f", in turn by SIGSTOP, windows of {seconds:g} s" if seconds else ""
        text += f"\n**{group}**, {env_id}{turns}\n\n{table(head, rows)}"
    return text


def learning_section(cells: list[dict]) -> str:
    text = "A score is reached when the mean of three logged scores reaches it. "
    text += "Seconds count from the start of the process.\n"
    environments = group_by(cells, "env_id")
    if len(environments) > 1 and {"ours", "pufferl"} <= {cell["name"] for cell in cells}:
        text += f"\n{against_pufferl(environments)}"
    for env_id, runs in environments.items():
        games = runs[0].get("games") or 128
        measures = {
            "score at the end": last_score,
            "million steps": lambda cell: cell["curve"]["step"][-1] / 1e6,
            f"return with its most likely actions, {games} games": played_return,
            "seconds from the command to its end": lambda cell: cell["wall_seconds"],
        }
        if solved := max(cell.get("solved") or 0 for cell in runs):
            what = f"to the first checkpoint that plays {solved} in {games} games"
            measures[f"seconds {what}"] = functools.partial(solved_after, key="seconds")
            measures[f"steps {what}"] = functools.partial(solved_after, key="step")
        for score in SCORES.get(env_id, ()):
            after = functools.partial(time_to_score, score=score)
            measures[f"seconds to {score}"] = after
            measures[f"million steps to {score}"] = functools.partial(after, column=0)
        names = group_by(runs, "name")
        rows = []
        for what, measure in measures.items():
            row = [spread([measure(cell) for cell in some]) for some in names.values()]
            if set(row) - {"-", "never"}:
                rows.append([what, *row])
        text += f"\n{table([env_id, *map(label, names)], rows)}"
    return text


def against_pufferl(environments: dict[str, list[dict]]) -> str:
    """Final scores where both have some, the time to PuffeRL's, and the interquartile mean."""
    rows = []
    scores = {}
    bounds = {}
    for env_id, runs in environments.items():
        names = group_by(runs, "name")
        if not names["ours"] or not names["pufferl"]:
            continue
        low = first_score(runs)
        ours, theirs = ([last_score(cell) for cell in names[name]] for name in ("ours", "pufferl"))
        marks = low + 0.99 * (np.array(theirs) - low)
        of_ours = np.median([time_to_score(cell, np.median(marks)) for cell in names["ours"]])
        # Each of PuffeRL's runs to its own end: the luckier ones are no mark that the others miss.
        pairs = zip(names["pufferl"], marks)
        of_theirs = np.median([time_to_score(cell, mark) for cell, mark in pairs])
        lead = interval(lambda a, b, axis: a.mean(axis) - b.mean(axis), ours, theirs)
        times = map(number, (of_ours, of_theirs, of_ours / of_theirs))
        rows.append([env_id, number(low), spread(ours), spread(theirs), lead, *times])
        scores[env_id] = {"ours": ours, "pufferl": theirs}
        bounds[env_id] = (low, max(map(last_score, runs)))
    head = ["environment", "untrained", "ours", "PuffeRL", "ours - PuffeRL"]
    head += ["seconds to PuffeRL's final score: ours", "PuffeRL", "ours / PuffeRL"]
    programs = ["ours", "pufferl"]
    return f"""Final scores: median (least to most, number of runs); ours - PuffeRL: 95 % bootstrap \
interval of the difference of the means. A final
score counts as reached 1 % below it, of the way from the untrained.

{table(head, rows)}
{iqm_table(programs, scores, bounds, "the best final score of any run here")}"""


def iqm_table(programs: list[str], scores: dict, bounds: dict, one: str) -> str:
    """Of each program the interquartile mean of its scores in each environment, on a scale on which
    its two bounds are 0 and 1; of as many runs as every environment has."""
    rows = []
    for name in programs:
        some = [np.array(each[name]) for each in scores.values()]
        if runs := min(map(len, some)):
            pairs = zip(some, bounds.values())
            some = [(own[:runs] - low) / (high - low) for own, (low, high) in pairs]
            rows.append([label(name), number(iqm(*some)), interval(iqm, *some), str(runs)])
    if not rows:  # no program was run on all of them
        return ""
    head = ["", "interquartile mean", "95 % interval", "runs per environment"]
    return f"""The interquartile mean over all environments and runs, with a stratified bootstrap \
interval (Agarwal et al. 2021).
0 is the score of the untrained, 1 {one}.

{table(head, rows)}"""


def task_scores(cells: list[dict], published: dict) -> tuple[dict, dict]:
    """Of each environment, of each program and of who published: the scores of the runs, after
    training where the plan says of how many games, otherwise the best while training. And of each
    environment the bounds: the untrained score, and the highest of these means."""
    score = played_return if cells[0].get("games") else best_score
    programs = sorted(
        dict.fromkeys(cell["name"] for cell in cells), key=lambda name: name != "ours"
    )
    others = dict.fromkeys(key for row in published.values() for key in row)
    scores = {}
    bounds = {}
    for env_id, runs in group_by(cells, "env_id").items():
        names = group_by(runs, "name")
        row = {}
        for name in programs:
            played = map(score, names[name])  # None: its games did not end
            row[name] = [one for one in played if one is not None]
        known = published.get(env_id, {})
        scores[env_id] = row | {who: [known[who]] if who in known else [] for who in others}
        best = max(np.mean(some) for some in scores[env_id].values() if some)
        bounds[env_id] = (first_score(runs), best)
    return scores, bounds


def tasks_section(cells: list[dict], published: dict) -> str:
    """A row for each environment, a column for each program, and what others published."""
    scores, bounds = task_scores(cells, published)
    environments = group_by(cells, "env_id")
    programs = list(group_by(cells, "name"))
    rows = []
    for env_id, each in scores.items():
        low, _ = bounds[env_id]
        words = {name: spread(some) for name, some in each.items()}
        best = max(np.mean(each[name]) for name in programs if each[name])
        for name in programs:
            if each[name] and np.mean(each[name]) >= best - 0.01 * abs(best - low):
                words[name] = f"**{words[name]}**"
        ours = [cell for cell in environments[env_id] if cell["name"] == "ours"]
        steps = spread([cell["curve"]["step"][-1] / 1e6 for cell in ours])
        rows.append([task_name(env_id), number(low), *words.values(), steps])
    head = ["task", "untrained", *map(label, words), "million steps of ours"]
    text = "The highest mean of the scores logged within 50,000 steps, of the returns of all "
    text += "episodes while training (POPGym's measure)."
    if games := cells[0].get("games"):
        text = f"The mean of {games} games after training, with the most likely actions."
    text += "\nIn the table median, least and most; bold: by its mean the best of the programs, or "
    text += f"within 1 % of the way to it.\n\n{table(head, rows)}\n"
    one = "the highest\nin the row, what others published included"
    return text + iqm_table(programs, scores, bounds, one)


def startup_section(cells: list[dict]) -> str:
    rows = []
    for name, some in group_by(cells, "name").items():
        row = [label(name)]
        for cold in (True, False):
            these = [cell for cell in some if cell["cold"] == cold]
            row.append(spread([cell["seconds_to_first_update"] for cell in these], " s"))
        rows.append(row)
    text = "From the start of the process to the first line of metrics after an update.\n\n"
    return text + table(["program", "cold: an empty compile cache", "warm"], rows)


def machine(cells: list[dict]) -> str:
    """CPU, instruction set and commits, in a line."""
    machines = [cell["hardware"] for cell in cells]
    cpus = {f"{one['cpu']}, {one['instruction_set']}, {one['cores']} cores" for one in machines}
    commits = [cell["git_commit"][:7] + " with changes" * cell["git_dirty"] for cell in cells]
    return f"CPU: {'; '.join(sorted(cpus))}. Commit: {', '.join(dict.fromkeys(commits))}.\n"


def provenance(cells: list[dict]) -> str:
    """Where the figures come from: machine, versions, exact commands."""

    def distinct(texts) -> str:
        return "; ".join(sorted(set(texts)))

    def listed(mapping: dict) -> str:
        return ", ".join(f"{key} {mapping[key]}" for key in sorted(mapping) if mapping[key])

    def of(cell: dict, text: str) -> str:
        return f"{label(cell['program'])}: {text}"

    rows = [
        ["hardware", distinct(listed(cell["hardware"]) for cell in cells)],
        ["versions", distinct(of(cell, listed(cell["versions"])) for cell in cells)],
        ["peers' settings", distinct(of(cell, cell["note"]) for cell in cells if "note" in cell)],
        ["first and last start", f"{cells[0]['started']}, {cells[-1]['started']}"],
        ["load average before a cell", spread([cell["load_before"] for cell in cells])],
    ]
    text = f"{table(['', ''], rows)}\nThe commands, in the repository's folder; "
    text += "DIR is where the metrics go.\n\n```\n"
    alike = []
    for cell in cells:
        but_seed = shlex.join(cell["command"]).replace(f"--seed {cell['seed']} ", "")
        on = ", ".join(map(str, cell["cores"]))
        alike.append(cell | {"on": on, "but_seed": but_seed})
    keys = ("group", "name", "env_id", "on", "but_seed")
    for (group, name, env_id, on, _), some in group_by(alike, *keys).items():
        one = some[0]
        seeds = ", ".join(map(str, sorted(cell["seed"] for cell in some)))
        cores = on + "; empty compile cache" * one["cold"]
        words = [f"{key}={value}" for key, value in one["environment"].items()]
        text += f"# {group}: {name}, {env_id}; seeds {seeds}; cores {cores}\n"
        text += f"{' '.join([*words, shlex.join(one['command'])])}\n"
    return text + "```\n"


# Figures ------------------------------------------------------------------------------------------


def color(name: str, index: int) -> str:
    return COLORS.get(name, MORE_COLORS[index % len(MORE_COLORS)])


def save(figure, path: pathlib.Path):
    """In 256 colours, which take a third of the bytes."""
    png = io.BytesIO()
    figure.savefig(png, dpi=130, bbox_inches="tight")
    plt.close(figure)
    Image.open(png).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def plot_speed(cells: list[dict], path: pathlib.Path):
    groups = group_by([cell for cell in cells if cell["sps_steady"]], "group", "env_id")
    columns = min(2, len(groups))
    rows = math.ceil(len(groups) / columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5.5 * columns, 2.6 * rows), squeeze=False)
    for axis in axes.flat[len(groups) :]:
        axis.axis("off")
    several = len(groups) > len({group for group, _ in groups})
    for axis, ((group, env_id), runs) in zip(axes.flat, groups.items()):
        names = group_by(runs, "name")
        for row, (name, some) in enumerate(names.items()):
            speeds = np.array([cell["sps_steady"] / 1000 for cell in some])
            axis.barh(row, np.median(speeds), color=color(name, row), alpha=0.5, height=0.6)
            heights = np.linspace(row - 0.15, row + 0.15, len(speeds))
            axis.plot(speeds, heights, "o", color=color(name, row), markersize=4)
            axis.text(speeds.max(), row, f"   {np.median(speeds):,.1f}", va="center")
        axis.set(yticks=range(len(names)), yticklabels=[*map(label, names)])
        axis.set_title(f"{group}: {task_name(env_id)}" if several else group)
        axis.set_xlabel("thousand steps/s (bar: median; dots: runs)")
        axis.set_xlim(0, 1.2 * axis.get_xlim()[1])
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
    save(figure, path)


def plot_curves(axis, runs: list[dict], x_column: int):
    """Of each program the median over seeds, and the range between the worst and the best, as far
    as all of them go."""
    for index, (name, some) in enumerate(group_by(runs, "name").items()):
        columns = [learning_curve(cell) for cell in some]
        curves = [(column[x_column], column[2]) for column in columns]
        x = np.linspace(max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves), 300)
        y = np.array([np.interp(x, *curve) for curve in curves])
        hue = color(name, index)
        axis.plot(x, np.median(y, axis=0), color=hue, label=f"{label(name)}, runs: {len(some)}")
        axis.fill_between(x, y.min(axis=0), y.max(axis=0), color=hue, alpha=0.2, linewidth=0)


def plot_learning(cells: list[dict], path: pathlib.Path):
    """Scores of each environment against steps and seconds; of many, against seconds alone."""
    environments = group_by(cells, "env_id")
    x_labels = ["million steps", "seconds from the start of the process"]
    many = len(environments) > 9
    panels = list(itertools.product(environments.items(), [1] if many else [0, 1]))
    columns = 4 if many else 2
    rows = math.ceil(len(panels) / columns)
    size = (4 + 3 * columns, rows * (4.6 - columns / 2))
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False)
    for axis, ((env_id, runs), x_column) in zip(axes.flat, panels):
        plot_curves(axis, runs, x_column)
        axis.set_title(f"{task_name(env_id)}: mean score", fontsize=10)
        axis.set(xlabel=x_labels[x_column], xlim=(0, None), ylim=(min(0, axis.dataLim.y0), None))
        if x_column == 0 or axis is axes[0, 0]:
            axis.legend(loc="best")
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    save(figure, path)


def plot_tasks(cells: list[dict], path: pathlib.Path, published: dict):
    """A heat map: a row for each environment, a column for each program and who published."""
    scores, bounds = task_scores(cells, published)
    lows, highs = np.transpose(list(bounds.values()))
    rows = [each.values() for each in scores.values()]
    means = np.array([[np.mean(some) if some else np.nan for some in row] for row in rows])
    shade = ((means.T - lows) / (highs - lows)).T
    figure, axis = plt.subplots(figsize=(2.4 + 1.25 * means.shape[1], 1 + 0.33 * len(means)))
    axis.imshow(shade, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    for row, column in np.argwhere(np.isfinite(means)):
        hue = "white" if shade[row, column] < 0.6 else "black"
        axis.text(column, row, f"{means[row, column]:.2f}", ha="center", va="center", color=hue)
    columns = [label(name).replace(" (", "\n(") for name in next(iter(scores.values()))]
    axis.set_xticks(range(len(columns)), columns)
    axis.set_yticks(range(len(scores)), map(task_name, scores))
    axis.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, left=False)
    axis.grid(visible=False)
    save(figure, path)


# The report ---------------------------------------------------------------------------------------


def make_report(folder: pathlib.Path) -> pathlib.Path:
    stored = sorted(read_cells(folder).values(), key=lambda cell: cell["started"])
    cells = [cell for cell in stored if cell["status"] == "ok"]
    failed = [cell for cell in stored if cell["status"] == "failed"]
    if not cells:
        raise SystemExit(f"error: {folder}: no finished cell; benchmark/run.py --out makes some")
    made = f"`python benchmark/report.py` made this of {len(cells)} runs, a line each in "
    made += "[cells.jsonl](cells.jsonl)."
    parts = [f"# Benchmark {folder.resolve().name}\n\n{made}\n", machine(cells)]

    def section(title: str, text: str, figure: str = ""):
        if figure:
            text += f"\n![{title}]({figure}.png)\n"
        parts.append(f"## {title}\n\n{text}")

    kinds = group_by(cells, "kind")
    if kinds["speed"]:
        speed = each_window(kinds["speed"])
        plot_speed(speed, folder / "speed.png")
        section("Steps per second", speed_section(speed), "speed")
    trained = kinds["learning"]
    learning = [cell for cell in trained if not np.isnan(last_score(cell))]
    if learning and (folder / "published.yaml").exists():
        published = yaml.safe_load((folder / "published.yaml").read_text())
        plot_tasks(trained, folder / "tasks.png", published["scores"])
        section("Scores", tasks_section(trained, published["scores"]), "tasks")
        plot_learning(learning, folder / "learning.png")
        section("Learning", f"{published['source']}\n", "learning")
    elif learning:
        plot_learning(learning, folder / "learning.png")
        section("Learning", learning_section(learning), "learning")
    if kinds["startup"]:
        section("Start-up", startup_section(kinds["startup"]))
    if (folder / "notes.md").exists():
        section("What was tried", (folder / "notes.md").read_text())
    if failed:
        keys = ("group", "name", "env_id", "seed", "error")
        rows = [[str(cell[key]) for key in keys] for cell in failed]
        section("Failed", table(["group", "run", "environment", "seed", "error"], rows))
    section("Hardware, versions, commands", provenance(cells))
    (folder / "report.md").write_text("\n".join(parts))
    return folder / "report.md"


def main(argv: list[str]):
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("folders", nargs="+", type=report_folder, help="what was --out of run.py")
    for folder in parser.parse_args(argv).folders:
        print(make_report(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
