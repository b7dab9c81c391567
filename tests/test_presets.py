"""Each preset names an environment that can be made, with arguments and sizes for it."""

import sys

import pytest
import yaml
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmark"))  # for tasks:..., which popgym.yaml names

import ppo_lstm_puffer as ppo

PRESETS = sorted([*ROOT.glob("configs/*.yaml"), *ROOT.glob("benchmark/configs/*.yaml")])
MANY = {"popgym", "control", "gymnasium", "cuda"}  # for many tasks; for GPUs


def test_there_are_presets():
    assert PRESETS


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_preset_fits_its_environment(path):
    args, _ = ppo.parse_args(["--config", str(path)])
    assert path.stem in MANY | {args.env_id.rpartition(":")[2]}
    assert path.read_text().startswith("# "), "where its numbers come from"
    for key, value in yaml.safe_load(path.read_text()).items():
        assert key == "env_id" or value != getattr(ppo.Args(), key), "a default is left out"
    envs = ppo.make_envs(args, 1)
    try:
        assert args.minibatch_size <= envs.num_agents * args.num_steps
    finally:
        envs.close()
