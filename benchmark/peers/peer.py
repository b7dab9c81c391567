"""What every peer does alike: the command line, the metrics, and an end without processes left.

    PYTHON benchmark/peers/NAME.py --env-id breakout --seed 1 --steps 4_000_000 --folder DIR

DIR/metrics.jsonl gets a row per iteration: {"step", "time" (seconds since training began: compiling
and starting workers count), "sps" (since the last row), "env/score", "episodic_return"}, and at the
end, at SIGTERM too, a last one: {"step", "time", "exit_reason", "versions", "config", "note"}.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import sys
import time
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

sys.path.append(str(Path(__file__).resolve().parent.parent.parent))  # envs.memory and others


def arguments(description: str) -> argparse.ArgumentParser:
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=formatter)
    add = parser.add_argument
    add("--env-id", default="breakout", help="a PufferLib Ocean environment")
    add("--seed", type=int, default=1)
    add("--steps", type=int, default=40_000_000, help="stop after so many environment steps")
    add("--seconds", type=float, default=float("inf"), help="to go on after the first iteration")
    add("--total-timesteps", type=int, default=40_000_000, help="to anneal the learning rate over")
    add("--folder", type=Path, required=True, help="where the metrics go")
    return parser


class Metrics:
    """Writes metrics.jsonl. `finish` is the only way out of a peer."""

    def __init__(self, args: argparse.Namespace, library: str, config: dict[str, Any], note: str):
        args.folder.mkdir(parents=True, exist_ok=True)
        self.args = args
        self.note = note
        self.config = {key: config[key] for key in config if not key.endswith("_dir")}
        self.versions = {name: version(name) for name in ("torch", "pufferlib", library)}
        self.versions["python"] = platform.python_version()
        self.scratch = args.folder / "scratch"  # what the library writes; removed at the end
        self.file = (args.folder / "metrics.jsonl").open("w")
        self.start = time.time()
        self.last_time = self.start
        self.first = None  # when the first iteration was over: --seconds count from then on
        self.step = 0
        self.played = None  # {"episodes", "episodic_return": {"mean"}} of games after training
        pid = os.getpid()

        def end(signum, frame):
            if os.getpid() != pid:  # a child, which has inherited this
                os._exit(143)
            self.finish(128 + signum)

        def fail(*error):
            traceback.print_exception(*error)
            self.finish(1)

        signal.signal(signal.SIGTERM, end)
        sys.excepthook = fail

    def line(self, step: int, **values: float) -> bool:
        """Writes a row (names with __ for a slash); returns whether training should stop."""
        now = time.time()
        self.first = self.first or now
        sps = (step - self.step) / max(now - self.last_time, 1e-9)
        row = {"step": step, "time": now - self.start, "sps": sps}
        self.step = step
        self.last_time = now
        self.write(row | {name.replace("__", "/"): float(value) for name, value in values.items()})
        return step >= self.args.steps or self.late(now)

    def late(self, now: float) -> bool:
        """Whether --seconds are over."""
        return self.first is not None and now - self.first >= self.args.seconds

    def write(self, row: dict):
        text = json.dumps(row, default=str)
        print(text, file=self.file, flush=True)
        print(text, flush=True)

    def finish(self, code: int = 0):
        """Writes the last row, and ends this process and what the library has left running."""
        row = {"step": self.step, "time": self.last_time - self.start, "versions": self.versions}
        row |= {"note": self.note, "config": self.config}
        row["exit_reason"] = f"exit code {code}" if code else "completed"
        if self.played:
            row["played"] = self.played
        self.write(row)
        # These two remove the shared memory that the others leave, and end by themselves.
        cleaners = ("torch_shm_manager", "multiprocessing.resource_tracker")
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if not any(name in " ".join(child.cmdline()) for name in cleaners):
                    child.kill()
        shutil.rmtree(self.scratch, ignore_errors=True)
        os._exit(code)
