"""Runs a run again, with the script and the configuration that lie in its folder, and compares every logged number.

    python tools/repeat.py runs/RUN                       # exit code 0: the same to the bit, 1: not
    python tools/repeat.py latest --steps 500_000         # its first 500,000 steps are enough
    python tools/repeat.py runs/RUN --launcher "-m torch.distributed.run --standalone --nproc-per-node=2"  # two ranks

Seconds and steps per second are left out. A CPU of the same kind, the same versions and as many threads give the same
bits; another machine need not, nor does a GPU. What came after a --resume is not compared: it has other random numbers.
"""

import itertools
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import tyro
from common import ROOT, UsageError, find_run, main, read_config, read_rows


@dataclass
class Options:
    run: tyro.conf.Positional[str]
    """a run's folder, or latest"""
    steps: int | None = None
    """compare no more than so many steps; default: all of the run"""
    launcher: str = ""
    """what stands between python and the script"""
    output_dir: str = "runs"
    """where latest looks"""


def rows_of(folder: pathlib.Path) -> list[dict]:
    """What a run has logged, up to its end or its first --resume."""
    rows = read_rows(folder)
    same = lambda row: "exit_reason" not in row and row["startup"] == rows[0]["startup"]  # noqa: E731
    return [*itertools.takewhile(same, rows)]


def difference(before: dict, now: dict) -> str:
    """What differs in two rows, or nothing, but for what a clock had a part in."""
    keys = [key for key in before | now if key.partition("/")[0] not in ("time", "sps", "startup")]
    different = [
        f"{key} {before.get(key)} and now {now.get(key)}"
        for key in keys
        if before.get(key) != now.get(key)
    ]
    return f"at step {before['step']}: {', '.join(different)}" if different else ""


def repeat(options: Options, flags: list[str]) -> int:
    if flags:
        raise UsageError(f"{' '.join(flags)}: unknown; the run's own configuration is used")
    folder = find_run(options.run, options.output_dir, "metrics.jsonl")
    scripts, before = list(folder.glob("*.py")), rows_of(folder)
    if not scripts or not before:
        raise UsageError(
            f"{folder}: no {'logged row' if scripts else 'copy of the script'} here, so nothing to repeat"
        )
    config = read_config(folder)
    before = [
        row for row in before if options.steps is None or row["step"] <= options.steps
    ] or before[:1]
    paths = [
        os.getcwd(),
        str(ROOT),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]  # environments' modules
    with tempfile.TemporaryDirectory() as temporary:
        words = [
            sys.executable,
            *shlex.split(options.launcher),
            str(scripts[0]),
            "--config",
            f"{folder}/config.yaml",
        ]
        words += ["--output-dir", temporary, "--no-track"]
        words += (
            ["--time-limit", "1e9"] if config.get("time_limit") is not None else []
        )  # it ends with the rows
        process = subprocess.Popen(
            words, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, stdout=sys.stderr
        )
        try:
            while True:
                ended = (
                    process.poll() is not None
                )  # before its rows are read: there will be no more
                now = [row for run in pathlib.Path(temporary).glob("*") for row in rows_of(run)]
                differences = [difference(*pair) for pair in zip(before, now)]
                if ended or any(differences) or len(differences) == len(before):
                    break
                time.sleep(0.2)
        finally:
            process.terminate()
            process.wait()
    different = next(filter(None, differences), "")
    compared = differences.index(different) if different else len(differences)
    print(f"{folder}: {compared} of {len(before)} rows are the same to the bit", end="")
    print(
        f", to step {before[compared - 1]['step']}" * bool(compared)
        + f"; different {different}" * bool(different)
    )
    return 0 if compared == len(before) else 1


if __name__ == "__main__":
    sys.exit(main(Options, repeat, __doc__))
