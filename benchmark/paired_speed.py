"""Steps per second of this trainer and of PuffeRL 3.0.0 on Breakout, taken in turn (A B A B ...) in one run.

    .venv/bin/python benchmark/paired_speed.py --peer-python PEER_VENV/bin/python --rounds 3 --seconds 60 --out benchmark/reports/cpu-2core/paired_speed.json

The peer's venv needs PufferLib built with its trainer and heavyball 1.7.2 (see peers/pufferl_breakout.py). Each run is a process of its own;
its speed is read from its own metrics over the second half of its seconds, so compilation does not count. Prints each run and the paired ratios.
"""

import argparse
import json
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent


def steady_speed(lines: list[dict], seconds: float) -> float:
    """Steps per second from the first line after half of the seconds to the last line."""
    late = [line for line in lines if line["time"] >= seconds / 2]
    return (late[-1]["step"] - late[0]["step"]) / (late[-1]["time"] - late[0]["time"])


def run_ours(seconds: float, folder: str) -> list[dict]:
    command = [
        sys.executable,
        str(ROOT / "ppo_lstm_puffer.py"),
        "--env-id",
        "breakout",
        "--time-limit",
        str(seconds),
        "--output-dir",
        folder,
    ]
    subprocess.run(command, check=True, capture_output=True, cwd=folder)
    metrics = max(pathlib.Path(folder).glob("*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def run_peer(seconds: float, folder: str, python: str) -> list[dict]:
    out = pathlib.Path(folder, "peer.jsonl")
    out.unlink(missing_ok=True)
    command = [
        python,
        str(ROOT / "benchmark/peers/pufferl_breakout.py"),
        "--steps",
        "1000000000",
        "--seconds",
        str(seconds),
        "--out",
        str(out),
    ]
    subprocess.run(command, check=True, capture_output=True, cwd=folder)
    return [json.loads(line) for line in out.read_text().splitlines()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60, help="of each run; the first half is not counted")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    cpuinfo = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")), platform.processor())
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            ours = steady_speed(run_ours(args.seconds, folder), args.seconds)
            peer = steady_speed(run_peer(args.seconds, folder, args.peer_python), args.seconds)
            rounds.append({"ours": ours, "pufferl": peer, "ratio": ours / peer})
            print(
                f"round {number + 1} of {args.rounds}: ours {ours:,.0f} steps/s, PuffeRL {peer:,.0f} steps/s, ratio {ours / peer:.2f}",
                flush=True,
            )
    ratios = [one["ratio"] for one in rounds]
    result = {
        "command": [word.replace(args.peer_python, "PEER_VENV/bin/python") for word in sys.argv],
        "git_commit": commit,
        "cpu": cpu,
        "rounds": rounds,
        "median_ratio": statistics.median(ratios),
        "min_ratio": min(ratios),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"median ratio {result['median_ratio']:.2f} (from {min(ratios):.2f} to {max(ratios):.2f}); written to {args.out}")


if __name__ == "__main__":
    main()
