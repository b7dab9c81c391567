"""Which kernels a GPU spent its time on, and how long it had nothing to do, from the trace of a run with --profile.

    python ppo_lstm_puffer.py --profile --time-limit 10
    python benchmark/kernels.py runs/RUN

Prints a table for a report: a row per kernel, the longest in all first, then how much of the time none ran. Of a run on
a CPU, which has no kernels, the rows are operations, each without the time of those that it calls.
"""

import argparse
import json
import pathlib
from collections import defaultdict

KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")


def own_times(events: list[dict]) -> list[dict]:
    """Each with its own microseconds: without those inside it, in its thread."""
    found, around = [], defaultdict(list)
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        event, inside = event | {"own": event["dur"]}, around[event["tid"]]
        while inside and event["ts"] >= inside[-1]["ts"] + inside[-1]["dur"]:
            inside.pop()
        if inside:
            inside[-1]["own"] -= event["dur"]
        inside.append(event)
        found.append(event)
    return found


def busy(events: list[dict]) -> float:
    """The microseconds in which at least one of them was on."""
    total, until = 0.0, 0.0
    for event in sorted(events, key=lambda event: event["ts"]):
        end = event["ts"] + event["dur"]
        total += max(0.0, end - max(event["ts"], until))
        until = max(until, end)
    return total


def table(trace: pathlib.Path, rows: int) -> str:
    events = [
        event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"
    ]
    kernels = [event | {"own": event["dur"]} for event in events if event.get("cat") in KERNELS]
    kernels = kernels or own_times([event for event in events if event.get("cat") == "cpu_op"])
    span = max(event["ts"] + event["dur"] for event in kernels) - min(
        event["ts"] for event in kernels
    )
    by_name = defaultdict(list)
    for event in kernels:
        name = "compiled code" if "CompiledFxGraph" in event["name"] else event["name"][:80]
        by_name[name].append(event["own"])
    lines = ["| kernel | calls | ms | share | us each |", "| --- | --- | --- | --- | --- |"]
    for name, durations in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:rows]:
        total = sum(durations)
        each = total / len(durations)
        lines.append(
            f"| `{name}` | {len(durations)} | {total / 1e3:.2f} | {total / span:.1%} | {each:.1f} |"
        )
    idle = span - busy(kernels)
    return "\n".join([*lines, f"| nothing ran | | {idle / 1e3:.2f} | {idle / span:.1%} | |"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=pathlib.Path, help="a run's folder")
    parser.add_argument("--rows", type=int, default=25)
    args = parser.parse_args()
    traces = sorted(args.run.glob("*.pt.trace.json"))
    if not traces:
        parser.error(
            f"{args.run} has no *.pt.trace.json; run it with --profile, for eight iterations at least"
        )
    print(table(traces[-1], args.rows))


if __name__ == "__main__":
    main()
