"""What a run left: its folder, its files, its processes."""

import json
import pathlib

import psutil
import torch


def newest_run(cwd) -> pathlib.Path:
    return max(pathlib.Path(cwd, "runs").iterdir(), key=lambda path: path.stat().st_mtime)


def read_metrics(run: pathlib.Path) -> list[dict]:
    """The lines of a run's log intervals."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "exit_reason" not in row]


def without_clock(run: pathlib.Path) -> list[dict]:
    """The metrics of a run but for what a clock says."""
    clocked = ("time", "sps")
    return [
        {name: value for name, value in row.items() if not name.startswith(clocked)}
        for row in read_metrics(run)
    ]


def end_of(run: pathlib.Path) -> dict:
    """The last line of a run's metrics: how it ended."""
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])


def checkpoint(run: pathlib.Path) -> dict:
    """What --resume takes, whole."""
    return torch.load(run / "trainer_state.pt")


def final(rows: list[dict], key: str) -> float:
    """Mean of a metric over the last three log lines that have it."""
    values = [row[key] for row in rows if key in row][-3:]
    return sum(values) / len(values)


def alive(processes, within: float = 5) -> list[psutil.Process]:
    """Those that still live after so many seconds."""
    return psutil.wait_procs(list(processes), timeout=within)[1]
