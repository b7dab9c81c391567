"""The reference script with one part of the algorithm taken out: what is that part worth?

    python benchmark/ablate.py --without reset --env-id breakout --seed 1    # the rest goes to ppo_lstm_puffer.py
    python benchmark/run.py benchmark/plans/ablations.yaml --out benchmark/reports/ablations

reset: the LSTM's state runs on across the ends of episodes, in rollout and in training
carry: it is set to zero at the start of every segment, in rollout and in training
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
    forward = ppo.lstm_forward

    def lstm_forward(x, h, c, dones, *rest):
        return forward(x, h, c, torch.zeros_like(dones), *rest)

    ppo.lstm_forward = lstm_forward


def without_carry():
    source = pathlib.Path(ppo.__file__).read_text()
    for state in "h", "c":
        line = f"start_{state}.copy_({state})"
        assert source.count(line) == 1, f"the script no longer has: {line}"
        source = source.replace(line, f"start_{state}.copy_({state}.zero_())")
    exec(source, vars(ppo))


def without_bootstrap():
    compute = ppo.compute_advantages

    def compute_advantages(values, rewards, dones, valid, *rest):
        return compute(
            values, rewards, dones, torch.cat((valid[:-1], torch.zeros_like(valid[:1]))), *rest
        )

    ppo.compute_advantages = compute_advantages


def without_vtrace():
    compute = ppo.compute_advantages

    def compute_advantages(values, rewards, dones, valid, ratio, *rest):
        return compute(values, rewards, dones, valid, torch.ones_like(ratio), *rest)

    ppo.compute_advantages = compute_advantages


PARTS = {
    "reset": without_reset,
    "carry": without_carry,
    "bootstrap": without_bootstrap,
    "vtrace": without_vtrace,
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
