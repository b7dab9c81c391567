"""benchmark/tryout.py and by_hand.py: environments of other packages, and their returns by hand."""

import json
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmark"))

import by_hand
import tryout


@pytest.mark.parametrize("env_id", ["Taxi-v4", "tests.environments:DictObs-v0"])
def test_returns_by_hand_are_those_of_the_adapters(env_id):
    assert by_hand.main([env_id]) == 0


def test_agents_that_end_one_after_another_are_counted_by_hand(capsys):
    assert by_hand.main(["tests.parallel_game"]) == 0
    assert capsys.readouterr().out == "338 in 300 steps, 171 ends\n"


@pytest.mark.parametrize("wrong", ["number", "as_shape"])
def test_a_wrong_reward_and_a_wrong_observation_are_seen(wrong, monkeypatch, capsys):
    right = getattr(by_hand.adapters, wrong)
    monkeypatch.setattr(by_hand.adapters, wrong, lambda *values: 2 * right(*values))
    assert by_hand.main(["CartPole-v1"]) == 1
    assert capsys.readouterr().out.startswith("unlike in row")


def test_every_environment_of_the_list_was_well():
    entries, _, _ = tryout.read_list()
    assert len(entries) >= 40
    lines = (ROOT / "benchmark/reports/tryout/results.jsonl").read_text().splitlines()
    results = {record["env"]: record["well"] for record in map(json.loads, lines)}
    assert results == {entry["words"]: True for entry in entries}


def test_a_refusal_and_a_failure_are_recorded(monkeypatch, tmp_path):
    monkeypatch.setattr(tryout, "VENVS", tmp_path)
    (tmp_path / "gymnasium").symlink_to(sys.prefix)  # the environment that runs this
    wrong = {"package": "gymnasium", "words": "NoSuch-v0"}
    assert tryout.try_out({**wrong, "refused": "no such|doesn't exist"}, {})["well"]
    failed = tryout.try_out(wrong, {})
    assert not failed["well"]
    assert "NoSuch" in failed["start"]
