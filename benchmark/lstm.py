"""The LSTM with resets against the library's without: steps per second, forward and backward, in turn.

OMP_NUM_THREADS=2 .venv/bin/python benchmark/lstm.py --out benchmark/reports/cpu-bf16/lstm.json
"""

import argparse
import json
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import torch

import ppo_lstm_puffer as ppo

HIDDEN = 128


def make_ours(T: int, N: int, precision: str):
    lstm = torch.nn.LSTM(HIDDEN, HIDDEN)
    dtype = getattr(torch, precision)
    x = torch.randn(T, N, HIDDEN, dtype=dtype, requires_grad=True)
    h = torch.zeros(N, HIDDEN)
    c = torch.zeros(N, HIDDEN)
    dones = (torch.rand(T, N) < 0.01).float()

    def step():
        weight = torch.cat((lstm.weight_ih_l0, lstm.weight_hh_l0), dim=1).to(dtype)
        bias = lstm.bias_ih_l0 + lstm.bias_hh_l0
        ppo.lstm_outputs(x, h, c, dones, weight, bias).sum().backward()

    return step


def make_library(T: int, N: int, precision: str):
    dtype = getattr(torch, precision)
    lstm = torch.nn.LSTM(HIDDEN, HIDDEN).to(dtype)
    x = torch.randn(T, N, HIDDEN, dtype=dtype, requires_grad=True)
    return lambda: lstm(x)[0].sum().backward()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    ppo.lstm_forward = torch.compile(ppo.lstm_forward, dynamic=False)
    rows = []
    for precision in ("float32", "bfloat16"):
        for T, N in ((16, 256), (32, 128), (64, 64), (64, 256)):
            ours, library = make_ours(T, N, precision), make_library(T, N, precision)
            times = {"ours": [], "library": []}
            for repeat in range(args.repeats + 3):
                for name, step in (("ours", ours), ("library", library)):
                    start = time.perf_counter()
                    step()
                    if repeat >= 3:
                        times[name].append(time.perf_counter() - start)
            speed = {name: T * N / statistics.median(values) for name, values in times.items()}
            row = {
                "precision": precision,
                "T": T,
                "N": N,
                "threads": torch.get_num_threads(),
            } | speed
            rows.append(row | {"ratio": speed["ours"] / speed["library"]})
            print(json.dumps(rows[-1]), flush=True)  # steps per second, and the first by the second
    if args.out:
        args.out.write_text(json.dumps({"command": sys.argv, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
