"""Each preset names an environment that can be made, with arguments and sizes for it."""

import contextlib

import pytest
from conftest import ROOT

import ppo_lstm_puffer as ppo

PRESETS = sorted(ROOT.glob("configs/*.yaml"))


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_preset_fits_its_environment(path):
    args, _ = ppo.parse_args(["--config", str(path)])
    with contextlib.closing(ppo.make_envs(args, 1)) as envs:
        assert args.minibatch_size <= envs.num_agents * args.num_steps
