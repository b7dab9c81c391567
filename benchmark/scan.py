"""What the scan saves: compiling and running a training step of the XLA script's LSTM, with it and with steps unrolled.

    .venv-xla/bin/python benchmark/scan.py                    # a Markdown table; minutes, most of them compiling
    .venv-xla/bin/python benchmark/scan.py --steps 32 --precision float32

Each row is a process of its own. A step: the outputs, and the gradients of input and weights.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent


def measure(steps: int, scanned: bool, args) -> dict[str, float]:
    """Seconds to compile, milliseconds of a later step (median), and how many graphs were compiled."""
    sys.path.insert(0, str(ROOT))
    sys.argv = sys.argv[:1]
    import numpy as np
    import torch
    import torch_xla

    import ppo_lstm_puffer_xla as script

    def unrolled(x, h, c, dones, weight, bias):
        return script.lstm_forward(x, h, c, dones, weight, bias)[0]

    outputs_of = script.lstm_outputs if scanned else unrolled
    script.start_devices(script.Args(device=args.device))
    device = torch_xla.device()
    N, H, dtype = args.segments, args.hidden_size, getattr(torch, args.precision)
    x = torch.randn(steps, N, H).to(dtype).to(device).requires_grad_()
    weight = (torch.randn(4 * H, 2 * H) / H**0.5).to(dtype).to(device).requires_grad_()
    h, c, bias = (torch.zeros(shape).to(device) for shape in ((N, H), (N, H), 4 * H))
    dones = (torch.rand(steps, N) < 0.05).float().to(device)

    @torch_xla.compile
    def step():
        outputs = outputs_of(x, h, c, dones, weight, bias)
        return torch.autograd.grad(outputs.float().pow(2).sum(), (x, weight))

    times = []
    for _ in range(2 + args.repeats):
        start = time.perf_counter()
        gradients = step()
        torch_xla.sync(wait=True)
        assert bool(gradients[1].float().cpu().isfinite().all())
        times.append(time.perf_counter() - start)
    compiled, nanoseconds, _ = torch_xla.debug.metrics.metric_data("CompileTime")
    step_ms = 1000 * float(np.median(times[2:]))
    return {
        "compile_s": nanoseconds / 1e9,
        "first_s": times[0],
        "step_ms": step_ms,
        "graphs": compiled,
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, nargs="+", default=[16, 32, 64], help="segment lengths"
    )
    parser.add_argument("--segments", type=int, default=128, help="segments of a minibatch")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--device", choices=("tpu", "cpu"), default="cpu")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        print(json.dumps(measure(int(args.row[0]), args.row[1] == "scan", args)))
        return
    print(f"{args.segments} segments, hidden {args.hidden_size}, {args.precision}, {args.device}\n")
    print("| steps | | compiling, s | a step, ms |\n|---|---|---|---|", flush=True)
    for steps in args.steps:
        for kind in ("scan", "unrolled"):
            command = [sys.executable, __file__, *sys.argv[1:], "--row", str(steps), kind]
            result = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            row = json.loads(result.stdout.splitlines()[-1])
            print(
                f"| {steps} | {kind} | {row['compile_s']:.1f} | {row['step_ms']:.1f} |", flush=True
            )


if __name__ == "__main__":
    main()
