"""The presets of benchmark/configs: each names an environment that can be made, with arguments and sizes that fit it."""

import pytest
import yaml
from conftest import ROOT

import ppo_lstm_puffer as ppo

PRESETS = sorted((ROOT / "benchmark/configs").glob("*.yaml"))


def test_there_are_presets():
    assert len(PRESETS) >= 16


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_preset_fits_its_environment(path):
    args, _ = ppo.parse_args(["--config", str(path)])
    assert args.env_id.rpartition(":")[2] == path.stem
    assert path.read_text().startswith("# "), "where its numbers come from"
    assert all(value != getattr(ppo.Args(), key) for key, value in yaml.safe_load(path.read_text()).items() if key != "env_id")
    envs = ppo.make_envs(args, 1)
    try:
        ppo.check_sizes(args, envs.num_agents)
    finally:
        envs.close()


def test_an_environment_with_a_preset_gets_a_hint_unless_it_is_used():
    assert "--config" in (hint := ppo.preset_hint(ppo.Args(env_id="pong"))) and "pong.yaml" in hint
    for args in (ppo.Args(env_id="pong", config="mine.yaml"), ppo.Args(env_id="blastar"), ppo.Args()):
        assert ppo.preset_hint(args) == ""
