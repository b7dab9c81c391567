"""Learning is the proof: each trains for real on one core, within two minutes."""

import pytest
import torch
from conftest import ROOT, succeed
from reading import final, newest_run, read_metrics

import ppo_lstm_puffer as ppo

TRAIN = """--no-compile --hidden-size 32 --precision float32 --log-interval 20 --momentum 0.95
    --clip-coef 0.2 --anneal linear --prio-alpha 0 --update-epochs 2 --num-workers 0 """
CARTPOLE = f"""{TRAIN} --env-id cartpole --num-envs 128 --num-steps 16 --minibatch-size 1024
    --total-timesteps 200000 --gamma 0.98 --learning-rate 0.02 --momentum 0.8 --norm-rewards
    --vf-coef 2 --ent-coef 0.01 --log-interval 10""".split()
RECALL = f"""{TRAIN} --num-envs 32 --num-steps 12 --minibatch-size 192 --gamma 0.95
    --learning-rate 0.03 --ent-coef 0.01 --vf-coef 2"""
CUE_RECALL = f"{RECALL} --env-id envs.probes:CueRecall-v0 --total-timesteps 35000".split()
# Nothing shows where an episode begins: one task for the state's reset and for its carry.
HIDDEN_START = f"{RECALL} --env-id envs.probes:HiddenStart-v0 --total-timesteps 50000".split()
# The first action decides the reward 128 steps later: credit goes through two bootstrapped values.
FAR_REWARD = f"""{TRAIN} --env-id envs.probes:FarReward-v0 --env.shown 128 --num-envs 64
    --num-steps 64 --minibatch-size 1024 --total-timesteps 200000 --gamma 0.999 --gae-lambda 0.95
    --learning-rate 0.02 --adam-learning-rate 0.001 --vf-clip-coef 0.2 --vf-coef 2 --ent-coef 0.001
    --log-interval 4""".split()
BREAKOUT = """--env-id breakout --num-envs 256 --total-timesteps 700000 --hidden-size 64
    --no-compile --learning-rate 0.015 --anneal linear"""


def learn(*arguments, cwd, **options) -> list[dict]:
    return read_metrics(succeed(*arguments, cwd=cwd, small=False, **options))


def test_cartpole_is_solved(tmp_path):
    # As Gym has always said it: a mean of 195, of 200 steps at most, over a hundred episodes in a
    # row. A log line has a hundred.
    rows = learn(*CARTPOLE, cwd=tmp_path)
    assert max(row["env/score"] for row in rows if "env/score" in row) >= 195


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_cue_recall_is_solved_with_memory_in_either_precision(tmp_path, precision):
    """I9: bfloat16 learns what float32 learns. Four cues: 1 is perfect, 0.25 the best expectation
    without memory."""
    rows = learn(*CUE_RECALL, "--precision", precision, cwd=tmp_path)
    assert final(rows, "episodic_return") >= 0.95


def test_cue_recall_is_not_solved_when_the_state_is_zeroed_at_every_step(tmp_path, monkeypatch):
    def lstm_forward(x, h, c, dones, *weights, original=ppo.lstm_forward):
        return original(x, h, c, torch.ones_like(dones), *weights)

    monkeypatch.setattr(ppo, "lstm_forward", lstm_forward)
    monkeypatch.chdir(tmp_path)
    assert ppo.main(*ppo.parse_args(CUE_RECALL)) == 0
    assert final(read_metrics(newest_run(tmp_path)), "episodic_return") <= 0.4


def test_hidden_start_is_solved(tmp_path):
    assert final(learn(*HIDDEN_START, cwd=tmp_path), "episodic_return") >= 0.95


@pytest.mark.parametrize("part, least, most", [("reset", 0.05, 0.3), ("carry", 0.6, 0.82)])
def test_hidden_start_is_not_solved_without_reset_or_carry(tmp_path, part, least, most):
    # At best 0.25 without knowing where episodes begin, and 0.75 where a segment's end, each 12
    # steps, falls before the fourth step.
    script = ROOT / "benchmark/ablate.py"
    rows = learn("--without", part, *HIDDEN_START, cwd=tmp_path, script=script)
    assert least <= final(rows, "episodic_return") <= most


def test_a_reward_128_steps_later_is_credited_with_segments_of_64(tmp_path):
    # Half of the first actions are right by chance.
    assert final(learn(*FAR_REWARD, cwd=tmp_path), "episodic_return") >= 0.95


def test_breakout_learns_to_keep_the_ball_in_the_fastest_precision(tmp_path):
    # A random policy scores below 1.
    assert final(learn(*BREAKOUT.split(), cwd=tmp_path), "env/score") >= 5
