"""benchmark/faults.py: a few kills without a loss, and that a loss would be seen."""

import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, environment

sys.path.insert(0, str(ROOT / "benchmark"))

import faults

ITERATION = faults.Chain.iteration


def test_three_kills_have_no_losses(tmp_path):
    command = [sys.executable, str(ROOT / "benchmark/faults.py"), "script", "--count", "3"]
    env = environment() | {"TMPDIR": str(tmp_path)}
    result = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.returncode == 0, result.stderr
    assert [record["n"] for record in records] == [0, 1, 2]
    assert {record["code"] for record in records} <= {-9, 143, 130, -15, -2}
    assert records[-1]["step"] > 0, "the second got to a checkpoint"
    assert not list(tmp_path.glob("faults-*")), "the working folder is removed"


@pytest.fixture
def chain(tmp_path):
    """A run with a checkpoint after three iterations, that a start just went on with from two."""
    chain = faults.Chain(tmp_path / "chain")
    folder = chain.work / "out/x"
    folder.mkdir(parents=True)
    chain.step = 2 * ITERATION
    chain.mark = "no process has this mark"
    chain.output = chain.work / "output"
    chain.output.write_text(f"run: out/x\nstep={3 * ITERATION} time=1\n")
    chain.state = folder / "trainer_state.pt"
    torch.save({"step": 3 * ITERATION}, chain.state)
    chain.metrics = folder / "metrics.jsonl"
    rows = [{"step": number * ITERATION} for number in (1, 2, 3)]
    chain.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return chain


def test_what_went_on_as_it_should_is_no_loss(chain):
    assert chain.check() == [] and chain.step == 3 * ITERATION


def test_run_that_goes_on_elsewhere_is_a_loss(chain):
    chain.output.write_text(f"run: out/x\nstep={5 * ITERATION} time=1\n")
    assert any("went on at step" in loss for loss in chain.check())


def test_line_that_is_missing_is_a_loss(chain):
    first, _, last = chain.metrics.read_text().splitlines()
    chain.metrics.write_text(f"{first}\n{last}\n")
    assert len(chain.check()) == 1


def test_older_checkpoint_is_a_loss(chain):
    torch.save({"step": ITERATION}, chain.state)
    assert len(chain.check()) == 1


def test_lost_checkpoint_is_a_loss(chain):
    chain.state.unlink()
    assert chain.check() == ["no checkpoint"]


@pytest.mark.parametrize(
    "said, code, early, losses",
    [
        ("sigint: 512 steps", 130, False, []),
        ("", 0, False, ["exit code 0, not 130"]),
        ("Traceback (most recent call last):\nKeyboardInterrupt", 130, False, ["a traceback"]),
        ("Traceback (most recent call last):\nKeyboardInterrupt", 1, True, []),
    ],
)
def test_end_other_than_it_should_be_is_a_loss(chain, said, code, early, losses):
    chain.output.write_text(f"{chain.text()}{said}\n")
    chain.process = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"])
    assert chain.settle(130, early)["losses"] == losses


def test_process_that_is_left_behind_is_a_loss_and_killed(chain):
    env = environment() | {faults.MARK: chain.mark}
    left = subprocess.Popen(["sleep", "100"], env=env)
    chain.process = subprocess.Popen(["true"])
    chain.grace = 0.5
    assert any("left running" in loss for loss in chain.settle(0)["losses"])
    assert left.wait(10) == -9
