"""The live dashboard of a run, in another terminal: of one that is on, or the end of one that was.

    python tools/watch.py                    # the newest run in runs/
    python tools/watch.py runs/RUN --once    # print it once and leave
    python tools/watch.py runs/RUN --svg dashboard.svg

It reads config.yaml and metrics.jsonl, and leaves on Ctrl-C or when the run ends. CPU, memory and
GPU are this machine's.
"""

import contextlib
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
    if "sps" not in row:
        return "just begun"
    left = max(config["total_timesteps"] - row["step"], 0) / max(row["sps"], 1e-9)
    limit = config["time_limit"] - row["time"]
    if limit > 0:  # else it is counted from a resume
        left = min(left, limit)
    silent = time.time() - (folder / "metrics.jsonl").stat().st_mtime
    return f"{clock(left)} left" + (f", silent for {clock(silent)}" if silent > 60 else "")


def dashboard(config: dict, rows: list[dict], folder: pathlib.Path, width: int) -> Panel:
    row = {key: value for one in rows for key, value in one.items()}  # the newest of each
    titles = {
        "title": Text(f"{config['exp_name']} · {config['env_id']}"),  # Text: no markup
        "subtitle": Text(folder.name),
    }
    if "learning_rate" not in row:
        return Panel(Text(row.get("exit_reason", "nothing logged yet")), **titles)

    def of(prefix: str) -> dict:
        return {key.removeprefix(prefix): row[key] for key in row if key.startswith(prefix)}

    total = config["total_timesteps"]
    episodes = {key: row[key] for key in row if key.startswith("episodic")} | of("env/")
    sections = {
        "run": {
            "steps": f"{row['step']:,} of {total:,.0f}",
            "time": clock(row["time"]),
            "state": state_of(config, row, folder),
            "steps/s": row.get("sps", "none yet"),
            "learning rate": row["learning_rate"],
        },
        "this machine": machine(),
        "ranks": of("ranks/"),
        "time": {name: f"{100 * share:.0f} %" for name, share in of("time/").items()},
        "episodes": dict(itertools.islice(episodes.items(), 12)),
        "losses": of("losses/"),
    }
    tables = []
    for name, values in sections.items():
        if not values:
            continue
        table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
        table.add_row(f"[bold cyan]{name}")
        for key, value in values.items():
            table.add_row(Text(key), Text(number(value)))  # no markup
        tables.append(table)
    # Padded: alone, a bar ends no line.
    parts = [Padding(ProgressBar(total=total, completed=min(row["step"], total)), 0)]
    score = "env/score" if "env/score" in row else "episodic_return"
    for name, height in (score, 4), ("sps", 1):
        values = [one[name] for one in rows if name in one]
        if values:
            label = name.removeprefix("env/").replace("sps", "steps/s")
            label = f"{label}: {number(min(values))} to {number(max(values))}"
            parts += [Text(label, style="bold cyan"), plot(values, width - 4, height)]
    return Panel(Group(*parts, Columns(tables, padding=(0, 2))), **titles)


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
        console.print(dashboard(config, read_rows(folder), folder, console.width))
        try:
            console.save_svg(options.svg, title=f"tools/watch.py {folder.name}")
        except OSError as error:
            fail(f"--svg {options.svg}: {error.strerror}")
        return 0
    if options.once or not console.is_terminal:
        if not console.is_terminal:
            console = Console(width=100)
        console.print(dashboard(config, read_rows(folder), folder, console.width))
        return 0
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            rows = read_rows(folder)
            live.update(dashboard(config, rows, folder, console.width), refresh=True)
            if rows and "exit_reason" in rows[-1]:
                break
            time.sleep(1)
    return 0


if __name__ == "__main__":
    sys.exit(main(watch, Options, __doc__))
