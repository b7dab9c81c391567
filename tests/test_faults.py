"""benchmark/faults.py: a few kills without a loss, and that a loss would be seen."""

import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, environment

sys.path.insert(0, str(ROOT / "benchmark"))

import faults

ITERATION = faults.ITERATION


def test_three_kills_have_no_losses(tmp_path):
    command = [sys.executable, str(ROOT / "benchmark/faults.py"), "script", "--count", "3"]
    command += ["--seed", "312"]  # as it starts, then twice as it trains
    env = environment() | {"TMPDIR": str(tmp_path)}
    result = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.returncode == 0, result.stdout + result.stderr
    assert [record["n"] for record in records] == [0, 1, 2]
    assert [record["signal"] for record in records] == ["SIGINT", "SIGKILL", "SIGKILL"]
    steps = [record["step"] for record in records]
    assert steps[0] < steps[1] < steps[2], "each went on from the checkpoint before"
    assert not list(tmp_path.glob("faults-*")), "the working folder is removed"


@pytest.fixture
def chain(tmp_path):
    """Killed after three iterations, of which it had found two."""
    chain = faults.Script(tmp_path / "chain")
    folder = chain.work / "out/run"
    folder.mkdir(parents=True)
    chain.step = 2 * ITERATION
    chain.mark = "no process has this mark"
    chain.output = chain.work / "output"
    chain.output.write_text(f"run: out/run\nstep={3 * ITERATION} time=1\n")
    torch.save({"step": 3 * ITERATION}, folder / "trainer_state.pt")
    rows = [json.dumps({"step": number * ITERATION}) + "\n" for number in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(rows))
    return chain


def test_what_went_on_as_it_should_is_no_loss(chain):
    assert chain.check() == []
    assert chain.step == 3 * ITERATION


def test_each_thing_that_went_wrong_is_a_loss(chain):
    chain.output.write_text(f"run: out/run\nstep={5 * ITERATION} time=1\n")
    torch.save({"step": ITERATION}, chain.work / "out/run/trainer_state.pt")
    (chain.work / "out/run/metrics.jsonl").write_text(json.dumps({"step": 3 * ITERATION}))
    elsewhere, older, missing = chain.check()
    assert "went on at step" in elsewhere
    assert "checkpoint at" in older
    assert "every step once" in missing
    (chain.work / "out/run/trainer_state.pt").unlink()
    assert chain.check()[-1] == "no checkpoint"


@pytest.mark.parametrize(
    "said, code, early, losses",
    [
        ("sigint: 512 steps", 130, False, []),
        ("", 0, False, ["exit code 0"]),
        ("Traceback (most recent call last):\nKeyboardInterrupt", 130, False, ["a traceback"]),
        ("Traceback (most recent call last):\nKeyboardInterrupt", 130, True, []),
    ],
)
def test_end_other_than_it_should_be_is_a_loss(chain, said, code, early, losses):
    chain.output.write_text(said)
    chain.process = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"])
    assert chain.settle({130}, early) == losses


def test_process_that_is_left_behind_is_a_loss(chain, monkeypatch):
    monkeypatch.setattr(faults, "GRACE", 0.5)
    left = subprocess.Popen(["sleep", "100"], env=environment() | {faults.MARK: chain.mark})
    chain.process = subprocess.Popen(["true"])
    [loss] = chain.settle({0})
    assert f"pid={left.pid}" in loss
    left.kill()
