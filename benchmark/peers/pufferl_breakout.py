"""PuffeRL 3.0.0 on Breakout through its own API, with its own configuration: the peer of the speed comparison.

    python benchmark/peers/pufferl_breakout.py --steps 4_000_000 --out pufferl.jsonl

Needs pufferlib built with its trainer (no NO_TRAIN) and heavyball 1.7.2 in the venv that runs it. On a CPU its best is
Serial vectorization with torch.compile; every hyperparameter is left as its breakout.ini has it. Appends one JSON line
per iteration: {"step", "time" (seconds since the trainer was made), "score", "episodic_return"}.
"""

import argparse
import json
import os
import sys
import time

import torch

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--steps", type=int, default=4_000_000)
parser.add_argument("--total-timesteps", type=int, default=40_000_000, help="what its learning-rate schedule is spread over")
parser.add_argument("--seconds", type=float, default=float("inf"))
parser.add_argument("--backend", default="Serial")
parser.add_argument("--compile", type=int, default=1)
parser.add_argument("--device", default="cpu")
parser.add_argument("--out", default="pufferl.jsonl")
cli = parser.parse_args()

sys.argv = sys.argv[:1]
import pufferlib.pufferl as pufferl  # noqa: E402  (reads sys.argv when it loads its configuration)

config = pufferl.load_config("puffer_breakout")
config["vec"].update(backend=cli.backend, num_envs=2)
if cli.backend == "Serial":
    config["vec"] = {"backend": "Serial", "num_envs": 2}
config["train"].update(device=cli.device, compile=bool(cli.compile), compile_fullgraph=False, total_timesteps=cli.total_timesteps)
vecenv = pufferl.load_env("puffer_breakout", config)
policy = pufferl.load_policy(config, vecenv)
trainer = pufferl.PuffeRL(dict(**config["train"], env="puffer_breakout"), vecenv, policy)
trainer.print_dashboard = lambda *args, **kwargs: None
start = time.time()
with open(cli.out, "a") as out:
    while trainer.global_step < cli.steps and time.time() - start < cli.seconds:
        stats = trainer.evaluate()
        line = {"step": trainer.global_step}
        for key, name in (("score", "score"), ("episode_return", "episodic_return")):
            if stats.get(key):
                line[name] = float(sum(stats[key]) / len(stats[key])) if isinstance(stats[key], list) else float(stats[key])
        trainer.train()
        line["time"] = time.time() - start
        print(json.dumps(line), file=out, flush=True)
        print(line, torch.get_num_threads(), flush=True)
vecenv.close()
os._exit(0)  # its utilization thread would keep the process alive
