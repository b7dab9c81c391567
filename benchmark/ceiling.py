"""How many floating-point operations per second this machine's matrix products reach: the ceiling of any trainer on it.

    python benchmark/ceiling.py --seconds 20 --folder DIR

For bfloat16 and float32 (on a GPU: TF32), for every number of threads, the fastest of several shapes, each timed many
times: square ones, and those of the LSTM of width 128. Writes DIR/metrics.jsonl, a row whose "ceiling" is {threads or
"cuda": {dtype: GFLOP/s}}.
"""

import argparse
import json
import pathlib
import time

import torch

# (m, k, n): (m, k) by (k, n)
SHAPES = [(256,) * 3, (512,) * 3, (1024,) * 3, (2048,) * 3, (1024, 256, 512), (4096, 256, 512)]
GPU_SHAPES = [(2048,) * 3, (4096,) * 3, (8192,) * 3, (65536, 256, 512)]


def gflops(m: int, k: int, n: int, dtype: torch.dtype, device: str, seconds: float) -> float:
    """Billions of floating-point operations per second of the fastest of the products that fit into the seconds."""
    a, b, out = (torch.randn(shape, device=device).to(dtype) for shape in ((m, k), (k, n), (m, n)))
    best, start = float("inf"), time.perf_counter()
    while best == float("inf") or time.perf_counter() - start < seconds:
        before, count = time.perf_counter(), 0
        while count < 5 and (
            count == 0 or time.perf_counter() - start < seconds
        ):  # bfloat16 may take 13 s a product
            torch.mm(a, b, out=out)
            count += 1
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - before) / count)
    return 2 * m * k * n / best / 1e9


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--env-id", help="of no use here: the runner gives it to every program")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    start, all_threads = time.perf_counter(), torch.get_num_threads()
    threads = range(1, all_threads + 1) if args.device == "cpu" else [all_threads]
    shapes, dtypes = SHAPES if args.device == "cpu" else GPU_SHAPES, (torch.bfloat16, torch.float32)
    seconds = args.seconds / (len(threads) * len(dtypes) * len(shapes))
    ceiling, every = {}, []
    for count in threads:
        torch.set_num_threads(count)
        key = str(count) if args.device == "cpu" else "cuda"
        ceiling[key] = {}
        for dtype in dtypes:
            name = str(dtype).removeprefix("torch.")
            speeds = [gflops(*shape, dtype, args.device, seconds) for shape in shapes]
            for shape, speed in zip(shapes, speeds):
                every.append(
                    {"threads": key, "dtype": name, "shape": shape, "gflops": round(speed, 1)}
                )
            ceiling[key][name] = round(max(speeds), 1)
    row = {"versions": {"torch": torch.__version__}, "ceiling": ceiling, "products": every}
    row |= {"seconds": time.perf_counter() - start, "exit_reason": "completed"}
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    print(json.dumps(ceiling))


if __name__ == "__main__":
    main()
