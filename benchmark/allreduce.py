"""What the sums over ranks of an update cost, that of the gradients and that of a few statistics before it: measured here, and
on paper for machines that are not here. Markdown on stdout.

    .venv/bin/torchrun --standalone --nproc-per-node=2 benchmark/allreduce.py > benchmark/reports/cpu-bf16/allreduce.md
    .venv/bin/torchrun --standalone --nproc-per-node=2 benchmark/allreduce.py --hidden-size 512 --steps-per-second 10e6 --share 32768

The paper part is the usual model of a ring within which latencies add up like a tree's: 2 (W - 1) / W x bytes / bandwidth
+ 2 log2(W) x latency, and that latency once more. An update of a rank takes --share / --steps-per-second seconds; nothing is overlapped with it.
"""

import argparse
import math
import os
import time

import torch
import torch.distributed as dist

LINKS = {  # bytes per second of one direction, seconds; nominal figures, not measured
    "8 GPUs, NVLink": (8, 200e9, 5e-6),
    "64 GPUs, InfiniBand 400 Gbit/s": (64, 50e9, 5e-6),
    "64 GPUs, Ethernet 100 Gbit/s": (64, 12.5e9, 25e-6),
    "64 GPUs, Ethernet 10 Gbit/s": (64, 1.25e9, 40e-6),
}


def num_parameters(hidden: int, observation: int = 118, logits: int = 3) -> int:
    """Of the default network on Breakout: encoder, LSTM, two heads."""
    return (observation + 1) * hidden + 8 * hidden * (hidden + 1) + (hidden + 1) * (logits + 1)


def measure(numbers: int, repetitions: int = 300) -> tuple[float, float]:
    """Median and 90th percentile of the seconds that an all-reduce of so many float32 numbers takes."""
    tensor, times = torch.zeros(numbers), []
    for _ in range(repetitions):
        start = time.perf_counter()
        dist.all_reduce(tensor)
        times.append(time.perf_counter() - start)
    return tuple(torch.tensor(times[20:]).quantile(torch.tensor([0.5, 0.9])).tolist())


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--steps-per-second", type=float, default=10e6, help="of one GPU; assumed")
    parser.add_argument(
        "--share",
        type=int,
        default=32768,
        help="steps of a minibatch that one GPU computes; assumed",
    )
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[dist.get_rank() % len(cores)]})
    size = num_parameters(args.hidden_size) + 5  # the losses
    lines = [
        f"gloo, {dist.get_world_size()} processes of this machine, milliseconds:\n",
        "| bytes | median | 90 % below |",
        "|---|---|---|",
    ]
    names = {5: " (an update's statistics)", size: " (its gradients)"}
    for numbers in (5, 1024, size, 4 * size, 16 * size):
        median, high = measure(numbers)
        what = f"{4 * numbers:,}{names.get(numbers, '')}"
        lines.append(f"| {what} | {1e3 * median:.2f} | {1e3 * high:.2f} |")
    update = args.share / args.steps_per_second
    lines += [
        f"\nOn paper, {4 * size:,} bytes per update, which is assumed to take a GPU {1e3 * update:.2f} ms without them:\n",
        "| | the sums, ms | of ideal scaling |", "|---|---|---|",
    ]  # fmt: skip
    for name, (ranks, bandwidth, latency) in LINKS.items():
        seconds = 2 * (ranks - 1) / ranks * 4 * size / bandwidth + 4 * math.log2(ranks) * latency
        lines.append(f"| {name} | {1e3 * seconds:.3f} | {update / (update + seconds):.2f} |")
    if dist.get_rank() == 0:
        print("\n".join(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
