"""What every peer does alike: the command line, the metrics, and an end that leaves no process behind.

    PYTHON benchmark/peers/NAME.py --env-id breakout --seed 1 --steps 4_000_000 --seconds 600 --folder DIR

DIR/metrics.jsonl gets a row per iteration: {"step", "time" (seconds since training began: compiling and starting
workers count), "sps" (since the last row), "env/score", "episodic_return"}, and at the end, at SIGTERM too, a last one:
{"step", "time", "exit_reason", "versions", "config", "note"}.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import psutil

sys.path.append(str(Path(__file__).resolve().parent.parent.parent))  # envs.memory and others


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--env-id", default="breakout", help="a PufferLib Ocean environment")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--steps", type=int, default=40_000_000, help="stop after this many environment steps"
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="to go on after the first iteration"
    )
    parser.add_argument(
        "--total-timesteps", type=int, default=40_000_000, help="to anneal the learning rate over"
    )
    parser.add_argument("--folder", type=Path, required=True, help="where the metrics go")
    return parser


class Metrics:
    """Writes metrics.jsonl. `finish` is the only way out of a peer."""

    def __init__(self, args: argparse.Namespace, library: str, config: dict[str, Any], note: str):
        args.folder.mkdir(parents=True, exist_ok=True)
        self.args, self.note = args, note
        self.config = {
            key: value for key, value in config.items() if key not in ("data_dir", "train_dir")
        }  # no paths
        self.versions = {
            name: importlib.metadata.version(name) for name in ("torch", "pufferlib", library)
        }
        self.versions["python"] = platform.python_version()
        self.scratch = (
            args.folder / "scratch"
        )  # for what the library itself writes; removed at the end
        self.file = (args.folder / "metrics.jsonl").open("w")
        self.start = self.last_time = time.time()
        self.first = None  # when the first iteration was over, and with it compiling: --seconds count from then on
        self.step = 0
        self.played = None  # {"episodes", "episodic_return": {"mean"}} of games after training
        pid = os.getpid()

        def end(signum, frame):
            if os.getpid() != pid:  # a child, which has inherited this
                os._exit(143)
            self.finish(128 + signum)

        signal.signal(signal.SIGTERM, end)
        sys.excepthook = lambda *error: (traceback.print_exception(*error), self.finish(1))

    def line(self, step: int, **values: float) -> bool:
        """Writes a row (names with __ for a slash); returns whether training should stop."""
        now = time.time()
        self.first = self.first or now
        row = {
            "step": step,
            "time": now - self.start,
            "sps": (step - self.step) / max(now - self.last_time, 1e-9),
        }
        self.step, self.last_time = step, now
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
        """Writes the last row and ends this process and its children, whatever the library has left."""
        row = {
            "step": self.step,
            "time": self.last_time - self.start,
            "versions": self.versions,
            "note": self.note,
        }
        row["config"] = self.config
        row["exit_reason"] = f"exit code {code}" if code else "completed"
        if self.played:
            row["played"] = self.played
        self.write(row)
        # These two end by themselves, once they have removed the shared memory that the others leave.
        cleaners = ("torch_shm_manager", "multiprocessing.resource_tracker")
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if not any(name in " ".join(child.cmdline()) for name in cleaners):
                    child.kill()
        shutil.rmtree(self.scratch, ignore_errors=True)
        os._exit(code)
