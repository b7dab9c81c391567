"""The live dashboard of a run, in another terminal: of one that is on, or the end of one that was.

    python tools/watch.py                    # the newest run in runs/
    python tools/watch.py runs/RUN --once    # print it once and leave
    python tools/watch.py runs/RUN --svg dashboard.svg

It reads config.yaml and metrics.jsonl, and leaves on Ctrl-C or when the run ends. CPU, memory and GPU are this machine's.
"""

import contextlib
import io
import itertools
import pathlib
import sys
import time
from dataclasses import dataclass

import numpy as np
import psutil
import tyro
from common import UsageError, find_run, main, read_config, read_rows
from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text


@dataclass
class Options:
    run: tyro.conf.Positional[str]
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
    parts = np.array(
        [np.mean(values[low : max(high, low + 1)]) for low, high in itertools.pairwise(edges)]
    )
    eighths = 1 + np.round(
        (8 * height - 1) * (parts - parts.min()) / max(np.ptp(parts), 1e-12)
    ).astype(int)
    lines = [
        "".join(" ▁▂▃▄▅▆▇█"[n] for n in (eighths - 8 * row).clip(0, 8))
        for row in reversed(range(height))
    ]
    return Text("\n".join(lines), style="green", no_wrap=True)


def number(value) -> str:
    return (
        str(value)
        if not isinstance(value, (int, float))
        else f"{value:{',.0f' if abs(value) >= 1000 else '.4g'}}"
    )


def clock(seconds: float) -> str:
    return f"{int(seconds) // 3600}:{int(seconds) % 3600 // 60:02d}:{int(seconds) % 60:02d}"


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
            busy, taken = (
                pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
                pynvml.nvmlDeviceGetMemoryInfo(gpu).used,
            )
            used[f"GPU {i}"] = f"{busy} %, {taken / 2**30:.1f} GiB"
    return used


def dashboard(config: dict, rows: list[dict], folder: pathlib.Path, width: int) -> Panel:
    row = {key: value for one in rows for key, value in one.items()}  # the newest of each
    title, total = (
        f"{config.get('exp_name')} · {config.get('env_id')}",
        config.get("total_timesteps") or 1,
    )
    if "sps" not in row:
        return Panel(
            row.get("exit_reason", "nothing logged yet"), title=title, subtitle=folder.name
        )
    left = max(total - row["step"], 0) / max(row["sps"], 1e-9)
    if config.get("time_limit"):
        left = min(left, max(config["time_limit"] - row["time"] + row["startup"], 0))
    silent = time.time() - (folder / "metrics.jsonl").stat().st_mtime
    state = row.get("exit_reason") or f"{clock(left)} left" + f", silent for {clock(silent)}" * (
        silent > 60
    )

    def of(prefix: str, suffix: str = "") -> dict:
        names = [key for key in row if key.startswith(prefix) and key.endswith(suffix)]
        return {key[len(prefix) : len(key) - len(suffix)]: row[key] for key in names}

    sections = {
        "run": {
            "steps": f"{row['step']:,} of {total:,}",
            "time": clock(row["time"]),
            "state": state,
        }
        | {"steps/s": row["sps"], "learning rate": row["learning_rate"]},
        "this machine": machine(),
        "ranks": of("ranks/"),
        "time": {name: f"{100 * share:.0f} %" for name, share in of("time/", "_share").items()},
        "episodes": dict(
            [*((key, row[key]) for key in row if key.startswith("episodic")), *of("env/").items()][
                :12
            ]
        ),
        "losses": of("losses/"),
    }
    tables = []
    for name, values in sections.items():
        table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
        table.add_row(f"[bold cyan]{name}")
        for key, value in values.items():
            table.add_row(Text(key), Text(number(value)))  # no markup
        tables += [table] * bool(values)
    plots = []
    for name, height in ("env/score" if "env/score" in row else "episodic_return", 4), ("sps", 1):
        if values := [one[name] for one in rows if name in one]:
            what = "steps/s" if name == "sps" else name.removeprefix("env/")
            label = f"{what}: {number(min(values))} to {number(max(values))}"
            plots += [Text(label, style="bold cyan"), plot(values, width - 4, height)]
    bar = Padding(
        ProgressBar(total=total, completed=min(row["step"], total)), 0
    )  # padded: alone it ends no line
    return Panel(
        Group(bar, *plots, Columns(tables, padding=(0, 2))), title=title, subtitle=folder.name
    )


def watch(options: Options, flags: list[str]) -> int:
    if flags:
        raise UsageError(f"unknown: {' '.join(flags)} (see --help)")
    folder = find_run(options.run, options.output_dir, "config.yaml")
    folder = folder if folder.is_dir() else folder.parent
    config, console = read_config(folder), Console()
    if options.svg:
        console = Console(record=True, width=112, file=io.StringIO())
        console.print(dashboard(config, read_rows(folder), folder, console.width))
        console.save_svg(options.svg, title=f"tools/watch.py {folder.name}")
        return 0
    if not console.is_terminal:
        console = Console(width=100)
    if options.once or not console.is_terminal:
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
    sys.exit(main(Options, watch, __doc__))
