"""Steps per second in turn: of the programs of a group, one runs while the others are stopped.

    python benchmark/turns.py benchmark/plans/turns.yaml before --out runs/turns
    python benchmark/report.py runs/turns

On a machine that wavers within a minute, two runs one after another are runs on two machines. Here
each program starts and compiles, alone, and is stopped (SIGSTOP). Then in every round each has a
window of some seconds; every second round has them in the opposite order. Nothing else should run.

The group is one of kind speed in a plan as benchmark/run.py takes it; each program has its first
environment and seed. Runs must be longer than all windows (steps) and log often (of ours:
--log-interval 1). DIR/cells.jsonl gets a line for each program, with the speeds in its windows.
"""

import argparse
import contextlib
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
import run

PATIENCE = 600  # seconds until a program has compiled and logs


class Program:
    """A process that is stopped but in its windows."""

    def __init__(self, cell: dict, folder: Path):
        self.cell = cell
        self.folder = folder
        self.windows = []  # steps per second
        folder.mkdir()
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = run.start(cell, str(folder / "run"), log)
        self.family = [self.process]

    def send(self, signum: int):
        self.family = [self.process, *self.process.children(recursive=True)]
        for member in self.family:
            member.send_signal(signum)

    def pause(self):
        self.send(signal.SIGSTOP)
        for member in self.family:
            while member.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                time.sleep(0.001)

    def rows(self) -> list[dict]:
        if self.process.poll() is not None:
            tail = self.log.read_text(errors="replace")[-2000:]
            raise SystemExit(f"{self.cell['name']} ended before its last window:\n{tail}")
        return run.read_rows(self.folder)[0]

    def warm_up(self):
        since = time.monotonic()
        while len(self.rows()) < 3:
            if time.monotonic() - since > PATIENCE:
                raise SystemExit(f"{self.cell['name']}: no three log lines in {PATIENCE} seconds")
            time.sleep(0.1)
        self.pause()

    def window(self, seconds: float):
        """Measures from its first log line, since the stop fell into the iteration before it."""
        before = len(self.rows())
        self.send(signal.SIGCONT)
        time.sleep(seconds)
        self.pause()
        rows = self.rows()[before:]
        if len(rows) < 2:
            raise SystemExit(f"{self.cell['name']}: no two log lines in {seconds:g} seconds")
        steps = rows[-1]["step"] - rows[0]["step"]
        self.windows.append(round(steps / (rows[-1]["time"] - rows[0]["time"])))

    def end(self):
        with contextlib.suppress(psutil.Error):  # it has ended by itself
            self.send(signal.SIGKILL)  # what is stopped does not see another
        run.stop(self.process, set(self.family))


def take_turns(cells: list[dict], windows: int, seconds: float) -> list[dict]:
    """The cells, with what was measured."""
    known = run.circumstances() | {"hardware": run.hardware(), "versions": run.VERSIONS}
    known |= {"status": "ok", "peak_rss_mib": None, "window_seconds": seconds}
    programs = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number, cell in enumerate(cells):
                print(f"{cell['name']} starts", flush=True)
                programs.append(Program(cell, Path(folder, str(number))))
                programs[-1].warm_up()
            for number in range(windows):
                for one in programs if number % 2 == 0 else programs[::-1]:
                    one.window(seconds)
                speeds = [f"{one.cell['name']} {one.windows[-1]:,}" for one in programs]
                print(f"{number + 1} of {windows}: {', '.join(speeds)} steps/s", flush=True)
        finally:
            for one in programs:
                one.end()
    for one in programs:
        one.cell |= known | {"windows": one.windows, "sps_steady": statistics.median(one.windows)}
    return cells


def main(argv: list[str] | None = None):
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("plan", type=Path)
    parser.add_argument("group", help="of the plan")
    parser.add_argument("--out", type=run.report_folder, required=True, help="gets cells.jsonl")
    parser.add_argument("--windows", type=int, default=10, help="of each program")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a window")
    args = parser.parse_args(argv)
    groups = run.read_plan(args.plan)
    if args.group not in groups:
        parser.error(f"{args.plan} has no group {args.group}, but {', '.join(groups)}")
    first = {}
    for cell in run.expand(groups[args.group], sorted(os.sched_getaffinity(0))):
        first.setdefault(cell["name"], cell)
    for cell in take_turns(list(first.values()), args.windows, args.seconds):
        run.store(cell, args.out)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # which a shell's background job would ignore
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
