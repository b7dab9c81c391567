"""The presets of benchmark/configs: each names an environment that can be made, with arguments and sizes for it."""

import sys

import pytest
import yaml
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmark"))  # for tasks:..., which popgym.yaml names

import ppo_lstm_puffer as ppo

PRESETS = sorted((ROOT / "benchmark/configs").glob("*.yaml"))


def test_there_are_presets():
    assert len(PRESETS) >= 16


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_preset_fits_its_environment(path):
    args, _ = ppo.parse_args(["--config", str(path)])
    assert path.stem in (
        args.env_id.rpartition(":")[2],
        "popgym",
        "control",
        "cuda",
    )  # for many tasks; for GPUs
    assert path.read_text().startswith("# "), "where its numbers come from"
    changed = {
        key: value for key, value in yaml.safe_load(path.read_text()).items() if key != "env_id"
    }
    assert all(value != getattr(ppo.Args(), key) for key, value in changed.items())
    envs = ppo.make_envs(args, 1)
    try:
        assert args.minibatch_size <= envs.num_agents * args.num_steps
    finally:
        envs.close()
