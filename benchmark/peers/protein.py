"""PufferLib 3.0.0's own Protein, for benchmark/sweep.py: a line of JSON in, a line of JSON out.

    {"space": {name: {"distribution", "min", "max", "mean", "scale"}}, "max_cost": 60, "seed": 1}
    {"suggest": true}                        the answer is the suggestion; it is {} otherwise
    {"observe": {...}, "score": 1.0, "cost": 2.0, "failure": false}

It draws from the global generators of random, numpy and torch, which PufferLib never seeds.
"""

import contextlib
import json
import random
import sys

import numpy as np
import torch

SETTINGS = {"metric": "score", "goal": "maximize", "method": "Protein", "downsample": 1}

pipe = sys.stdout
with contextlib.redirect_stdout(sys.stderr):
    import pufferlib.sweep

    for text in sys.stdin:
        line = json.loads(text)
        answer = {}
        if "space" in line:
            torch.set_num_threads(1)
            random.seed(line["seed"])
            np.random.seed(line["seed"])
            torch.manual_seed(line["seed"])
            config = line["space"] | SETTINGS
            protein = pufferlib.sweep.Protein(config, max_suggestion_cost=line["max_cost"])
        elif "suggest" in line:
            suggestion, _ = protein.suggest(None)
            answer = {name: float(value) for name, value in suggestion.items()}
        else:
            protein.observe(line["observe"], line["score"], line["cost"], line["failure"])
        print(json.dumps(answer), file=pipe, flush=True)
