"""The reference script with one part of the algorithm taken out: what is that part worth?

    python benchmark/ablate.py --without reset --env-id breakout --seed 1          # everything else goes to ppo_lstm_puffer.py
    python benchmark/run.py benchmark/plans/ablations.yaml --out benchmark/reports/ablations

reset: the LSTM's state runs on across the ends of episodes, in rollout and in training
bootstrap: the advantage of a segment's last step is 0, as in PuffeRL: no value of the observation after the segment
vtrace: advantages take the ratio as 1 (generalized advantage estimation); values are still the newest

What a flag takes out needs no help from here: --prio-alpha 0, --optimizer adam, --precision float32.
"""

import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import ppo_lstm_puffer as ppo


def without_reset():
    forward, backward = ppo.lstm_forward, ppo.lstm_backward
    ppo.lstm_forward = lambda x, h, c, dones, *rest: forward(x, h, c, torch.zeros_like(dones), *rest)
    ppo.lstm_backward = lambda doutputs, dh, dc, gates, cells, dones, weight: backward(
        doutputs, dh, dc, gates, cells, torch.zeros_like(dones), weight
    )


def without_bootstrap():
    compute = ppo.compute_advantages

    def compute_advantages(values, next_value, rewards, dones, valid, *rest):
        return compute(values, next_value, rewards, dones, torch.cat((valid[:-1], torch.zeros_like(valid[:1]))), *rest)

    ppo.compute_advantages = compute_advantages


def without_vtrace():
    compute = ppo.compute_advantages
    ppo.compute_advantages = lambda values, next_value, rewards, dones, valid, ratio, *rest: compute(
        values, next_value, rewards, dones, valid, torch.ones_like(ratio), *rest
    )


PARTS = {"reset": without_reset, "bootstrap": without_bootstrap, "vtrace": without_vtrace}


def main() -> int:
    at = sys.argv.index("--without") if "--without" in sys.argv else len(sys.argv)
    part = "".join(sys.argv[at + 1 : at + 2])
    if part not in PARTS:
        print(f"error: --without {part}: must be one of {', '.join(PARTS)}; the rest goes to ppo_lstm_puffer.py", file=sys.stderr)
        return 2
    del sys.argv[at : at + 2]
    PARTS[part]()
    return ppo.main()


if __name__ == "__main__":
    sys.exit(main())
