"""The reference script with one part of the algorithm taken out: what is that part worth?

    python benchmark/ablate.py --without reset --env-id breakout    # the rest is the script's
    python benchmark/run.py benchmark/plans/ablations.yaml --out benchmark/reports/ablations

What a flag takes out needs no help: --prio-alpha 0, --optimizer adam, --precision float32.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ppo_lstm_puffer as ppo


def without_reset():
    """The LSTM's state runs on across the ends of episodes, in rollout and in training."""
    forward = ppo.lstm_forward

    def lstm_forward(x, h, c, dones, *rest):
        return forward(x, h, c, torch.zeros_like(dones), *rest)

    ppo.lstm_forward = lstm_forward


def without_carry():
    """It is set to zero at the start of every segment, in rollout and in training."""
    source = Path(ppo.__file__).read_text()
    for state in "h", "c":
        line = f"start_{state}.copy_({state})"
        assert source.count(line) == 1, f"the script no longer has: {line}"
        source = source.replace(line, f"start_{state}.copy_({state}.zero_())")
    exec(source, vars(ppo))


def without_bootstrap():
    """The advantage of a segment's last step is 0, as in PuffeRL: what follows it is not valued."""
    compute = ppo.compute_advantages

    def compute_advantages(values, rewards, dones, valid, *rest):
        all_but_last = torch.cat((valid[:-1], torch.zeros_like(valid[:1])))
        return compute(values, rewards, dones, all_but_last, *rest)

    ppo.compute_advantages = compute_advantages


def without_vtrace():
    """Advantages take the ratio as 1 (generalized advantage estimation); values are the newest."""
    compute = ppo.compute_advantages

    def compute_advantages(values, rewards, dones, valid, ratio, *rest):
        return compute(values, rewards, dones, valid, torch.ones_like(ratio), *rest)

    ppo.compute_advantages = compute_advantages


def without_weights():
    """The importance weights of the draw are in the policy's loss alone."""
    draw = ppo.draw_minibatch

    def draw_minibatch(*inputs):
        minibatch = draw(*inputs)
        counted = (minibatch.weight > 0).float()
        same = counted / counted.sum().clamp_min(1)
        weighted = minibatch.advantages * minibatch.weight / same.clamp_min(1e-9)  # the policy's
        return minibatch._replace(advantages=weighted, weight=same)

    ppo.draw_minibatch = draw_minibatch


def without_batch_statistics():
    """That, and advantages are normalized by the minibatch's mean and deviation."""
    draw = ppo.draw_minibatch

    def draw_minibatch(*inputs):
        minibatch = draw(*inputs)
        counted = minibatch.weight > 0
        drawn = minibatch.returns - minibatch.values
        mean = drawn[counted].mean()
        deviation = drawn[counted].std(correction=0) + 1e-8
        drawn = (drawn - mean) / deviation * counted
        return minibatch._replace(advantages=drawn)

    ppo.draw_minibatch = draw_minibatch
    without_weights()


PARTS = {
    "reset": without_reset,
    "carry": without_carry,
    "bootstrap": without_bootstrap,
    "vtrace": without_vtrace,
    "weights": without_weights,
    "batch_statistics": without_batch_statistics,
}


def main() -> int:
    at = sys.argv.index("--without") if "--without" in sys.argv else len(sys.argv)
    part = "".join(sys.argv[at + 1 : at + 2])
    if part not in PARTS:
        print(f"error: --without {part}: must be one of {', '.join(PARTS)}", file=sys.stderr)
        return 2
    del sys.argv[at : at + 2]
    PARTS[part]()
    return ppo.main(*ppo.parse_args(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
