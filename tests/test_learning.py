"""Learning is the proof: each trains for real on one core, within a minute."""

import pytest
import torch
from conftest import ROOT, newest_run, read_metrics, run_script

import ppo_lstm_puffer as ppo

TRAIN = [
    "--no-compile", "--hidden-size", "32", "--precision", "float32", "--log-interval", "20", "--momentum", "0.95",
    "--gae-lambda", "0.9", "--clip-coef", "0.2", "--anneal", "linear",
]  # fmt: skip
CARTPOLE = [
    *TRAIN, "--env-id", "cartpole", "--num-envs", "128", "--num-steps", "16", "--minibatch-size", "1024", "--update-epochs", "2",
    "--total-timesteps", "500000", "--gamma", "0.95", "--learning-rate", "0.02", "--vf-clip-coef", "10", "--vf-coef", "0.5",
    "--ent-coef", "0.01", "--prio-alpha", "0",
]  # fmt: skip
RECALL = [
    *TRAIN, "--num-envs", "32", "--num-steps", "12", "--minibatch-size", "192", "--update-epochs", "2", "--gamma", "0.95",
    "--learning-rate", "0.03", "--ent-coef", "0.01", "--vf-coef", "2", "--prio-alpha", "0",
]  # fmt: skip
CUE_RECALL = [*RECALL, "--env-id", "environments:CueRecall-v0", "--total-timesteps", "50000"]
# Nothing shows where an episode begins: one task for the state's reset at episode ends, and for its carry between segments.
HIDDEN_START = [*RECALL, "--env-id", "environments:HiddenStart-v0", "--total-timesteps", "80000"]

# The first action decides the reward 128 steps later; segments of 64, so the credit goes through two values that were bootstrapped.
FAR_REWARD = [
    *TRAIN, "--env-id", "environments:FarReward-v0", "--env.shown", "128", "--num-envs", "64", "--num-steps", "64",
    "--minibatch-size", "1024", "--update-epochs", "2", "--total-timesteps", "200000", "--gamma", "0.999", "--gae-lambda", "0.95",
    "--optimizer", "muon", "--learning-rate", "0.02", "--adam-learning-rate", "0.001", "--vf-clip-coef", "0.2",
    "--vf-coef", "2", "--ent-coef", "0.001", "--max-grad-norm", "1.5", "--prio-alpha", "0", "--prio-beta0", "0.2", "--log-interval", "4",
]  # fmt: skip


def final(run, key: str, lines: int = 3) -> float:
    """Mean of a metric over the last log lines that have it."""
    values = [row[key] for row in read_metrics(run) if key in row][-lines:]
    return sum(values) / len(values)


def test_cartpole_is_solved(tmp_path):
    # As Gym has always said it: a mean of 195, of 200 steps at most, over a hundred episodes in a row. A log line has two hundred.
    result = run_script(*CARTPOLE, cwd=tmp_path, small=False)
    assert result.returncode == 0, result.stderr
    assert (
        max(row["env/score"] for row in read_metrics(newest_run(tmp_path)) if "env/score" in row)
        >= 195
    )


def test_cue_recall_is_solved_with_memory(tmp_path):
    # Four cues: 1.0 is perfect, 0.25 is the best expectation without memory.
    result = run_script(*CUE_RECALL, cwd=tmp_path, small=False)
    assert result.returncode == 0, result.stderr
    assert final(newest_run(tmp_path), "episodic_return") >= 0.95


def test_cue_recall_is_not_solved_when_the_state_is_zeroed_at_every_step(tmp_path, monkeypatch):
    forward = ppo.lstm_forward
    monkeypatch.setattr(
        ppo,
        "lstm_forward",
        lambda x, h, c, dones, weight, bias: forward(x, h, c, torch.ones_like(dones), weight, bias),
    )
    monkeypatch.chdir(tmp_path)
    args, _ = ppo.parse_args(CUE_RECALL)
    assert ppo.train(args) == 0
    assert final(newest_run(tmp_path), "episodic_return") <= 0.4


def test_hidden_start_is_solved(tmp_path):
    result = run_script(*HIDDEN_START, cwd=tmp_path, small=False)
    assert result.returncode == 0, result.stderr
    assert final(newest_run(tmp_path), "episodic_return") >= 0.95


@pytest.mark.parametrize("part, least, most", [("reset", 0.05, 0.3), ("carry", 0.6, 0.82)])
def test_hidden_start_is_not_solved_without_reset_or_carry(tmp_path, part, least, most):
    # At best 0.25 without knowing where episodes begin, and 0.75 where a segment's end, each 12 steps, falls before the fourth step.
    ablated = ROOT / "benchmark/ablate.py"
    result = run_script("--without", part, *HIDDEN_START, cwd=tmp_path, small=False, script=ablated)
    assert result.returncode == 0, result.stderr
    assert least <= final(newest_run(tmp_path), "episodic_return") <= most


def test_a_reward_128_steps_later_is_credited_with_segments_of_64(tmp_path):
    # Half of the first actions are right by chance.
    result = run_script(*FAR_REWARD, cwd=tmp_path, small=False)
    assert result.returncode == 0, result.stderr
    assert final(newest_run(tmp_path), "episodic_return") >= 0.95


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_breakout_learns_to_keep_the_ball_in_either_precision(tmp_path, precision):
    if precision == "bfloat16" and not ppo.fast_bfloat16("cpu"):
        pytest.skip(
            "this CPU has no fast bfloat16: a product takes fifty times as long as in float32"
        )
    # A random policy scores below 1.
    result = run_script(
        "--env-id", "breakout", "--num-envs", "256", "--minibatch-size", "2048", "--total-timesteps", "500000", "--precision", precision,
        "--hidden-size", "64", "--no-compile", "--learning-rate", "0.015", "--anneal", "linear", cwd=tmp_path, small=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert final(newest_run(tmp_path), "env/score") >= 5
