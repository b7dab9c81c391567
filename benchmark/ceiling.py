"""How many floating-point operations per second this machine's matrix products reach: the ceiling
of any trainer on it.

    python benchmark/ceiling.py --seconds 20 --folder DIR

For bfloat16 and float32 (on a GPU: TF32), for every number of threads, the fastest of several
shapes: square ones, and those of the LSTM of width 128. DIR/metrics.jsonl gets a row whose
"ceiling" is {threads or "cuda": {dtype: GFLOP/s}}.
"""

import argparse
import json
import time
from pathlib import Path

import torch

# (m, k, n): (m, k) by (k, n)
SHAPES = [(256,) * 3, (512,) * 3, (1024,) * 3, (2048,) * 3, (1024, 256, 512), (4096, 256, 512)]
GPU_SHAPES = [(2048,) * 3, (4096,) * 3, (8192,) * 3, (65536, 256, 512)]


def gflops(m: int, k: int, n: int, dtype: torch.dtype, device: str, seconds: float) -> float:
    """Of the fastest five products in a row within the seconds; of one, where it takes longer, as
    bfloat16 may on a CPU."""
    a = torch.randn(m, k, device=device).to(dtype)
    b = torch.randn(k, n, device=device).to(dtype)
    out = torch.empty(m, n, device=device, dtype=dtype)
    best = float("inf")
    end = time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        count = 0
        while count == 0 or (count < 5 and time.perf_counter() < end):
            torch.mm(a, b, out=out)
            count += 1
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) / count)
    return 2 * m * k * n / best / 1e9


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--folder", type=Path, required=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=device)
    parser.add_argument("--env-id", help="of no use here: the runner gives it to every program")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    start = time.perf_counter()
    on_cpu = args.device == "cpu"
    shapes = SHAPES if on_cpu else GPU_SHAPES
    threads = range(1, torch.get_num_threads() + 1) if on_cpu else ["cuda"]
    seconds = args.seconds / (len(threads) * 2 * len(shapes))
    ceiling = {}
    products = []
    for count in threads:
        if on_cpu:
            torch.set_num_threads(count)
        of_these = ceiling[str(count)] = {}
        for name in "bfloat16", "float32":
            for shape in shapes:
                speed = round(gflops(*shape, getattr(torch, name), args.device, seconds), 1)
                of_these[name] = max(of_these.get(name, 0.0), speed)
                product = {"threads": str(count), "dtype": name, "shape": shape, "gflops": speed}
                products.append(product)
    row = {"versions": {"torch": torch.__version__}, "ceiling": ceiling, "products": products}
    row |= {"seconds": time.perf_counter() - start, "exit_reason": "completed"}
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    print(json.dumps(ceiling))


if __name__ == "__main__":
    main()
