"""The reference script with one part of the algorithm taken out: what is that part worth?

    python benchmark/ablate.py --without reset --env-id breakout --seed 1    # the rest goes to ppo_lstm_puffer.py
    python benchmark/run.py benchmark/plans/ablations.yaml --out benchmark/reports/ablations

reset: the LSTM's state runs on across the ends of episodes, in rollout and in training
carry: it is set to zero at the start of every segment, in rollout and in training
bootstrap: the advantage of a segment's last step is 0, as in PuffeRL: no value of the observation after the segment
vtrace: advantages take the ratio as 1 (generalized advantage estimation); values are still the newest
rho: advantages have no rho of their own step, whose ratio the loss multiplies them by too; the values' targets keep it
weights: the importance weights of the draw are in the policy's loss alone
batch_statistics: that, and advantages are normalized by the minibatch's mean and deviation

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


def rewrite(*pairs: tuple[str, str]):
    """The script anew, with each of these texts, which it has once, replaced."""
    source = pathlib.Path(ppo.__file__).read_text()
    for old, new in pairs:
        assert source.count(old) == 1, f"the script no longer has: {old}"
        source = source.replace(old, new)
    exec(source, vars(ppo))


def without_carry():
    rewrite(
        ("start_h.copy_(h)", "start_h.copy_(h.zero_())"),
        ("start_c.copy_(c)", "start_c.copy_(c.zero_())"),
    )


def without_rho():
    rewrite(
        (
            "    values = values[:-1, segments]\n",
            "    without = without_own_rho(values, rewards, dones, valid, advantages, args)\n"
            "    values = values[:-1, segments]\n",
        ),
        ("    normalized = advantages\n", "    normalized = without\n"),
        ("(advantages - advantages.sum() / count)", "(without - without.sum() / count)"),
    )

    def without_own_rho(values, rewards, dones, valid, advantages, args):
        after = torch.cat((advantages[1:], torch.zeros_like(advantages[:1])))
        after = values[1:] + args.gae_lambda * after
        return (rewards + args.gamma * (1 - dones[1:]) * after - values[:-1]) * valid

    ppo.without_own_rho = without_own_rho


UNWEIGHTED = (
    (
        "value_loss = 0.5 * (weight * ",
        "same = (weight > 0) / (weight > 0).sum().clamp_min(1)\n    value_loss = 0.5 * (same * ",
    ),
    ("entropy = (weight * entropy)", "entropy = (same * entropy)"),
)


def without_weights():
    rewrite(*UNWEIGHTED)


def without_batch_statistics():
    rewrite(
        *UNWEIGHTED,
        ("advantages - advantages.sum() / count", "advantages - drawn.sum() / count"),
        ("(centered**2).sum()", "(((drawn - drawn.sum() / count) * mask) ** 2).sum()"),
        (
            "    if args.norm_adv:\n",
            "    every = count\n    mask = valid[:, segments]\n    drawn = advantages[:, segments] * mask\n"
            "    count = mask.sum().clamp_min(1)\n    if args.norm_adv:\n",
        ),
        ("/ (k * count)", "/ (k * every)"),
    )


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
    "rho": without_rho,
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
