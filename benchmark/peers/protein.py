"""PufferLib 3.0.0's own Protein behind a pipe: a line of JSON in, a line of JSON out. benchmark/sweep.py talks to it.

    {"space": {name: {"distribution", "min", "max", "mean", "scale"}}, "max_cost": 60, "seed": 1}    first; answers {}
    {"suggest": true}                                           answers {"params": {...}, "seconds": ...}
    {"observe": {...}, "score": 1.0, "cost": 2.0, "failure": false}    answers {}

It draws from the global generators of random, numpy and torch, which are seeded here; on its own it is never seeded.
"""

import contextlib
import json
import random
import sys
import time
from typing import Any

import numpy as np
import torch

pipe = sys.stdout
with contextlib.redirect_stdout(sys.stderr):
    import pufferlib.sweep

    protein = None
    for text in sys.stdin:
        line: dict[str, Any] = json.loads(text)
        answer = {}
        if "space" in line:
            torch.set_num_threads(1)
            random.seed(line["seed"])
            np.random.seed(line["seed"])
            torch.manual_seed(line["seed"])
            config = line["space"] | {
                "metric": "score",
                "goal": "maximize",
                "method": "Protein",
                "downsample": 1,
            }
            protein = pufferlib.sweep.Protein(config, max_suggestion_cost=line["max_cost"])
        elif "suggest" in line:
            start = time.perf_counter()
            params, _ = protein.suggest(None)
            answer["params"] = {name: float(value) for name, value in params.items()}
            answer["seconds"] = time.perf_counter() - start
        else:
            protein.observe(line["observe"], line["score"], line["cost"], line["failure"])
        print(json.dumps(answer), file=pipe, flush=True)
