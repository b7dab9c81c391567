"""Each preset names an environment that can be made, with arguments and sizes for it."""

import pytest
from conftest import ROOT

import ppo_lstm_puffer as ppo

PRESETS = sorted(ROOT.glob("configs/*.yaml"))
MANY = {"popgym", "control", "gymnasium", "atari", "cuda"}  # for many tasks; for GPUs


def test_there_are_presets():
    assert PRESETS


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_preset_fits_its_environment(path):
    args, _ = ppo.parse_args(["--config", str(path)])
    assert path.stem in MANY | {args.env_id.rpartition(":")[2]}
    assert path.read_text().startswith("# "), "where its numbers come from"
    envs = ppo.make_envs(args, 1)
    try:
        assert args.minibatch_size <= envs.num_agents * args.num_steps
    finally:
        envs.close()
