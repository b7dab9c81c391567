"""Which kernels a GPU spent a run's --profile on, and how long none ran, as a table for a report.

python benchmark/kernels.py runs/RUN     # of a CPU: operations, each with those that it calls
"""

import argparse
import itertools
import json
import pathlib
from collections import defaultdict

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("run", type=pathlib.Path, help="a run's folder")
run = parser.parse_args().run
trace = max(run.glob("*.pt.trace.json"), default=None) or parser.error(f"{run}: no trace in it")
events = [event for event in json.loads(trace.read_text())["traceEvents"] if "dur" in event]
kernels = [event for event in events if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
kernels = kernels or [event for event in events if event["cat"] == "cpu_op"]
kernels.sort(key=lambda event: event["ts"])
ends = list(itertools.accumulate((event["ts"] + event["dur"] for event in kernels), max))
idle = sum(max(0, after["ts"] - end) for after, end in zip(kernels[1:], ends))
durations = defaultdict(list)
for event in kernels:
    durations[event["name"][:80]].append(event["dur"])
print("| kernel | calls | ms | share | us each |\n| --- | --- | --- | --- | --- |")
rows = sorted(durations.items(), key=lambda row: -sum(row[1]))[:25]
for name, each in [*rows, ("nothing ran", [idle])]:
    share = sum(each) / (ends[-1] - kernels[0]["ts"])
    mean = sum(each) / len(each)
    print(f"| `{name}` | {len(each)} | {sum(each) / 1e3:.2f} | {share:.1%} | {mean:.1f} |")
