"""The live dashboard of a run, in another terminal: of one that is on, or the end of one that was.

    python tools/watch.py                    # the newest run in runs/
    python tools/watch.py runs/RUN --once    # print it once and leave
    python tools/watch.py runs/RUN --svg dashboard.svg

It reads config.yaml and metrics.jsonl, and leaves on Ctrl-C or when the run ends. CPU, memory and
GPU are this machine's.
"""

import contextlib
import fcntl
import io
import itertools
import math
import pathlib
import sys
import time
from dataclasses import dataclass

import numpy as np
import psutil
import tyro
from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from run_folder import fail, find_run, main, read_config, read_rows


@dataclass
class Options:
    run: tyro.conf.Positional[str] = "latest"
    """a run's folder, or latest"""
    once: bool = False
    """print it once, as where stdout is no terminal"""
    svg: str | None = None
    """write it to this file, as a picture"""
    output_dir: str = "runs"
    """where latest looks"""


LONG = 60.0  # seconds without a line


def silence(folder: pathlib.Path) -> float:
    """Seconds since its last line."""
    return time.time() - (folder / "metrics.jsonl").stat().st_mtime


def read(folder: pathlib.Path) -> list[dict]:
    """What a run has logged. First comes that it is not running, where nobody has its lock.

    Some file systems of clusters lock for one host alone: there it must be silent too.
    """
    first = []
    with contextlib.suppress(OSError), (folder / "metrics.jsonl").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # OSError: it runs, or there are no locks
        if silence(folder) > 5 * LONG:
            first = [{"exit_reason": "not running (killed?)"}]
    return first + read_rows(folder)  # read after it: a run says how it ended, then unlocks


def plot(values: list[float], width: int, height: int) -> Text:
    """Bars of block characters from the least to the most, each the mean of a part of `values`."""
    edges = np.arange(width + 1) * len(values) // width
    parts = [np.mean(values[low : max(high, low + 1)]) for low, high in itertools.pairwise(edges)]
    parts = np.array(parts) - min(parts)
    eighths = 1 + np.round((8 * height - 1) * parts / max(parts.max(), 1e-12)).astype(int)
    lines = []
    for row in reversed(range(height)):
        lines.append("".join(" ▁▂▃▄▅▆▇█"[n] for n in (eighths - 8 * row).clip(0, 8)))
    return Text("\n".join(lines), style="green", no_wrap=True)


def number(value) -> str:
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


def machine() -> dict[str, str]:
    """What is busy here, whoever's it is."""
    memory = psutil.virtual_memory()
    used = {
        "CPU": f"{psutil.cpu_percent():.0f} %",
        "RAM": f"{memory.used / 2**30:.1f} of {memory.total / 2**30:.0f} GiB",
    }
    with contextlib.suppress(Exception):  # no GPU, or no NVIDIA driver
        import pynvml

        pynvml.nvmlInit()
        for i in range(pynvml.nvmlDeviceGetCount()):
            gpu = pynvml.nvmlDeviceGetHandleByIndex(i)
            busy = pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu
            taken = pynvml.nvmlDeviceGetMemoryInfo(gpu).used
            used[f"GPU {i}"] = f"{busy} %, {taken / 2**30:.1f} GiB"
    return used


def state_of(config: dict, row: dict, folder: pathlib.Path) -> str:
    """Why it ended, or how long it goes on, and whether it has stopped to write."""
    if "exit_reason" in row:
        return row["exit_reason"]
    if not row.get("sps", 0) > 0:  # nor NaN
        return "just begun"
    left = max(config["total_timesteps"] - row["step"], 0) / row["sps"]
    limit = config["time_limit"] - row["time"]
    if limit > 0:  # else it is counted from a resume
        left = min(left, limit)
    silent = silence(folder)
    return f"{clock(left)} left" + (f"\nsilent for {clock(silent)}" if silent > LONG else "")


def plots(rows: list[dict], score: str, width: int, height: int) -> list[Text]:
    """The score so high, and steps per second in a line."""
    parts = []
    for name, lines in (score, height), ("sps", 1):
        values = [one[name] for one in rows if math.isfinite(one.get(name, math.nan))]
        if values:
            label = name.removeprefix("env/").replace("sps", "steps/s")
            label = f"{label}: {number(min(values))} to {number(max(values))}"
            parts += [Text(label, style="bold cyan"), plot(values, width, lines)]
    return parts


def tables(sections: dict[str, dict]) -> Group:
    """One below the other."""
    parts = []
    for name, values in sections.items():
        if not values:
            continue
        table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
        table.add_row(f"[bold cyan]{name}")
        for key, value in values.items():
            table.add_row(Text(key), Text(number(value)))  # no markup
        parts.append(table)
    return Group(*parts)


def dashboard(
    config: dict, rows: list[dict], folder: pathlib.Path, console: Console, height: float = math.inf
) -> Panel:
    """In at most `height` lines: with a smaller plot, or without its last column, if need be."""
    row = {key: value for one in rows for key, value in one.items()}  # the newest of each
    title = f"{config['exp_name']} · {config['env_id']}"
    subtitle = Text(folder.name)  # Text: no markup
    if "learning_rate" not in row:
        reason = Text(row.get("exit_reason", "nothing logged yet"))
        return Panel(reason, title=Text(title), subtitle=subtitle)

    def of(prefix: str) -> dict:
        return {key.removeprefix(prefix): row[key] for key in row if key.startswith(prefix)}

    total = config["total_timesteps"]
    episodes = {key: row[key] for key in row if key.startswith("episodic")} | of("env/")
    run = {
        "steps": f"{row['step']:,} of {total:,.0f}",
        "time": clock(row["time"]),
        "state": state_of(config, row, folder),
        "steps/s": row.get("sps", "none yet"),
        "learning rate": row["learning_rate"],
    }
    shares = {name: f"{100 * share:.0f} %" for name, share in of("time/").items()}
    columns = [
        tables({"run": run, "losses": of("losses/")}),
        tables({"episodes": dict(itertools.islice(episodes.items(), 12))}),
        tables({"this machine": machine(), "time": shares}),
    ]
    # Padded: alone, a bar ends no line.
    bar = Padding(ProgressBar(total=total, completed=min(row["step"], total)), 0)
    score = "env/score" if "env/score" in row else "episodic_return"
    for shown, plot_height in (3, 4), (3, 1), (2, 4), (2, 1):
        drawn = plots(rows, score, console.width - 4, plot_height)
        parts = Group(bar, *drawn, Columns(columns[:shown], padding=(0, 2)))
        left_out = " · no room for this machine, time" if shown == 2 else ""
        panel = Panel(parts, title=Text(title + left_out), subtitle=subtitle)
        if len(console.render_lines(panel)) <= height:
            break
    return panel


def watch(options: Options) -> int:
    folder = find_run(options.run, options.output_dir, "config.yaml")
    if not folder.is_dir():
        folder = folder.parent
    config = {"exp_name": "", "env_id": "", "total_timesteps": 1, "time_limit": math.inf}
    config |= read_config(folder)
    for name in "total_timesteps", "time_limit":
        config[name] = float(config[name])  # 1e8 is a text to YAML
    console = Console()
    if options.svg:
        console = Console(record=True, width=112, file=io.StringIO())
        console.print(dashboard(config, read(folder), folder, console))
        try:
            console.save_svg(options.svg, title=f"tools/watch.py {folder.name}")
        except OSError as error:
            fail(f"--svg {options.svg}: {error.strerror}")
        return 0
    if options.once or not console.is_terminal:
        if not console.is_terminal:
            console = Console(width=100)
        console.print(dashboard(config, read(folder), folder, console))
        return 0
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            rows = read(folder)
            ended = any("exit_reason" in row for row in rows)
            height = math.inf if ended else console.height  # the last frame may scroll
            live.update(dashboard(config, rows, folder, console, height), refresh=True)
            if ended:
                break
            time.sleep(1)
    return 0


if __name__ == "__main__":
    sys.exit(main(watch, Options, __doc__))
