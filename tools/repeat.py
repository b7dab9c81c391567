"""Runs a run again, with the script and the configuration in its folder, and compares its numbers.

    python tools/repeat.py runs/RUN                    # exit code 0: the same to the bit, 1: not
    python tools/repeat.py latest --steps 500_000      # its first 500,000 steps are enough
    python tools/repeat.py runs/RUN --launcher="-m torch.distributed.run --nproc-per-node=2"

Every logged number counts but seconds and steps per second. A CPU of the same kind, the same
versions and as many threads give the same bits; another machine need not, nor does a GPU. After a
--resume random numbers are others: say with --steps how far to compare. A --resume with other
arguments has changed the run's configuration, and so all of what is run here.
"""

import contextlib
import math
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import tyro
from run_folder import ROOT, fail, find_run, main, read_rows, script_of


@dataclass
class Options:
    run: tyro.conf.Positional[str] = "latest"
    """a run's folder, or latest"""
    steps: int | None = None
    """compare no more than so many steps; default: all of the run"""
    launcher: str = ""
    """what stands between python and the script"""
    output_dir: str = "runs"
    """where latest looks"""


def rows_of(folder: pathlib.Path) -> list[dict]:
    """What a run has logged."""
    return [row for row in read_rows(folder) if "exit_reason" not in row]


def difference(before: dict, now: dict) -> str:
    """What differs in two rows, or nothing, but for what a clock had a part in."""
    different = []
    for key in before | now:
        clocked = key.partition("/")[0] in ("time", "sps")
        if not clocked and before.get(key) != now.get(key):
            different.append(f"{key} {before.get(key)} and now {now.get(key)}")
    return f"at step {before['step']}: {', '.join(different)}" if different else ""


def repeat(options: Options) -> int:
    from pufferlib import adapters  # here: --help does without torch

    folder = find_run(options.run, options.output_dir, "metrics.jsonl")
    script = script_of(folder)
    rows = rows_of(folder)
    if not script or not rows:
        what = "logged row" if script else "copy of the script"
        fail(f"{folder}: no {what} here, so nothing to repeat")
    if read_rows(folder)[-1].get("exit_reason", "completed") != "completed":
        rows.pop()  # logged where it was ended: one that goes on has no such row
    if not rows:
        fail(f"{folder}: it was ended before its first regular row, so nothing to repeat")
    last = math.inf if options.steps is None else options.steps
    before = [row for row in rows if row["step"] <= last] or rows[:1]
    # Modules of environments.
    paths = [os.getcwd(), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    # An exception of a handler in the midst of Popen would leave the child behind.
    signals = []
    with adapters.signals_kept(), tempfile.TemporaryDirectory() as temporary:
        for signum in adapters.ENDING:
            signal.signal(signum, lambda number, _: signals.append(number))
        words = [sys.executable, *shlex.split(options.launcher), str(script)]
        words += ["--config", f"{folder}/config.yaml", "--output-dir", temporary, "--no-track"]
        words += ["--time-limit", "inf"]  # it ends with the rows
        process = subprocess.Popen(words, env=environment, stdout=sys.stderr)
        try:
            ended = False
            differences = []
            while not ended and not any(differences) and len(differences) < len(before):
                time.sleep(0.2)
                if signals:
                    sys.exit(128 + signals[0])
                ended = process.poll() is not None  # before its rows are read: these are all
                now = [row for run in pathlib.Path(temporary).glob("*") for row in rows_of(run)]
                differences = [difference(*pair) for pair in zip(before, now)]
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(40)
            process.kill()  # its environment may hang
            process.wait()
    different = next(filter(None, differences), None)
    compared = differences.index(different) if different else len(differences)
    text = f"{folder}: {compared} of {len(before)} rows are the same to the bit"
    if compared:
        text += f", to step {before[compared - 1]['step']}"
    if different:
        text += f"; different {different}"
    print(text)
    return 0 if compared == len(before) else 1


if __name__ == "__main__":
    sys.exit(main(repeat, Options, __doc__))
