"""A few faults of benchmark/faults.py: kills and malformed inputs without a loss, and that a loss would be seen."""

import random
import re
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, environment

sys.path.insert(0, str(ROOT / "benchmark"))

import faults


def records(folder, *words) -> list[dict]:
    """What a campaign leaves, each of which starts with the facts."""
    command = [sys.executable, str(ROOT / "benchmark/faults.py"), *words, "--out", str(folder)]
    where = environment() | {"TMPDIR": str(folder)}
    result = subprocess.run(command, env=where, capture_output=True, text=True, timeout=300)
    assert not list(folder.glob("faults-*")), "the working folder is removed"
    first, *rest = faults.read_lines(folder / f"{words[0]}.jsonl")
    assert first["kind"] == "facts" and first["versions"]["torch"]
    assert result.returncode == 0, f"{rest}\n{result.stderr}"
    return rest


def test_three_kills_have_no_losses(tmp_path):
    made = records(tmp_path, "kills", "--only", "script", "--count", "3")
    assert [record["n"] for record in made] == [0, 1, 2] and not any(
        record["losses"] for record in made
    )
    assert {record["code"] for record in made} <= {-9, 143, 130, -15, -2}
    assert made[-1]["step"] > 0, "the second got to a checkpoint"


def test_four_damaged_checkpoints_have_no_violations(tmp_path):
    made = records(tmp_path, "inputs", "--only", "checkpoint", "--count", "4")
    assert len(made) == 4 and not any(record["violation"] for record in made)
    faults.main(["report", "--out", str(tmp_path)])
    text = (tmp_path / "report.md").read_text()
    assert "4 inputs, violations: 0" in text and str(ROOT) not in text and str(tmp_path) not in text


def test_an_interrupted_start_ends_at_once_and_the_next_one_trains(tmp_path, monkeypatch):
    monkeypatch.setattr(faults.Start, "arguments", f"{faults.Start.arguments} --no-compile")
    monkeypatch.setattr(faults.Start, "cold", 0.3)  # in the imports
    monkeypatch.setattr(faults.Start, "limit", 60.0)  # the other core is busy with tests
    record = faults.Start(tmp_path / "chain").fault(random.Random(2), 1)
    assert not record["losses"] and record["phase"] == "starting", record


@pytest.mark.parametrize(
    "said, code, pythons, losses",
    [
        ("ended while starting: nothing is lost", 130, False, []),
        (
            "stopping: finishing this step, writing a checkpoint\nsigint: 512 steps in 1 s; out/x",
            130,
            False,
            [],
        ),
        ("", 130, False, ["0 lines about Ctrl-C"]),
        ("", -2, False, ["exit code -2, not 130", "0 lines about Ctrl-C"]),
        (
            "stopping: x\nTraceback (most recent call last):\nKeyboardInterrupt",
            130,
            False,
            ["a traceback"],
        ),
        ("ended while starting\nended while starting", 130, False, ["2 lines about Ctrl-C"]),
        ("Traceback (most recent call last):\nKeyboardInterrupt", 1, True, []),
    ],
)
def test_ctrl_c_while_starting_is_one_line(tmp_path, said, code, pythons, losses):
    start = faults.Start(tmp_path / "chain")
    start.signum, start.pythons = faults.INT, pythons
    start.mark, start.output = "nothing has this mark", start.work / "output"
    start.output.write_text(f"{said}\n")
    end = f"import os; os.kill(os.getpid(), {-code})" if code < 0 else f"raise SystemExit({code})"
    start.process = subprocess.Popen(
        [sys.executable, "-c", f"import signal; signal.signal(2, signal.SIG_DFL); {end}"]
    )
    assert start.settle({130, 1, -2} if pythons else {130})["losses"] == losses


@pytest.fixture
def run(tmp_path):
    """A chain whose run logged three iterations after its checkpoint at 2048, and left metrics and that output."""
    chain = faults.Chain(tmp_path / "chain")
    chain.step, chain.output = 2048, chain.work / "output1"
    return chain


def test_a_run_that_goes_on_elsewhere_is_a_loss(run):
    run.output.write_text(
        "run: out/x\nstep=4096 time=1\nstep=5120 time=2\n"
    )  # one iteration left out
    assert any("went on at step 4096" in loss for loss in run.check())


@pytest.mark.parametrize(
    "steps, ended, losses",
    [((1024, 2048, 3072), True, 0), ((1024, 3072), True, 1), ((1024, 2048, 3072), False, 0)],
)
def test_a_line_that_is_missing_is_a_loss(run, steps, ended, losses):
    run.step, folder = 0, run.work / "out/x"
    folder.mkdir(parents=True)
    for step in steps:
        faults.append_line(folder / "metrics.jsonl", {"step": step})
    if ended:
        faults.append_line(folder / "metrics.jsonl", {"step": steps[-1], "exit_reason": "sigint"})
    torch.save({"step": 3072, "config": {}}, folder / "trainer_000003.pt")
    run.output.write_text("")
    assert len(run.check()) == losses and run.step == 3072


def test_what_a_malformed_input_may_not_do(tmp_path):
    import malformed

    def judged(code=0, stderr="", left=(), told=0.0, before=b"weights"):
        result = {"code": code, "stderr": stderr, "left": left, "told": told}
        return malformed.judge(result, tmp_path, {tmp_path / "model.pt": before})

    (tmp_path / "model.pt").write_bytes(b"weights")
    assert judged() is judged(1, "Traceback") is judged(-15, told=30.0) is None
    assert (
        judged(2) == "exit code 2 without a word"
        and judged(-11) == "ended by SIGSEGV"
        and judged("hang") == "hangs"
    )
    assert (
        judged(left=["x"]) == "left running: ['x']"
        and judged(1, "x", before=b"others") == "lost: model.pt"
    )
    (tmp_path / malformed.EXECUTED).touch()
    assert judged() == "code was executed"


def test_a_lost_checkpoint_is_a_loss(run):
    run.output.write_text("run: out/x\nstep=3072 time=1\nstep=4096 time=2\n")
    assert run.check() == ["no checkpoint"]


@pytest.mark.parametrize(
    "said, losses", [("Fatal Python error: init_import_site", 0), ("error: something", 1)]
)
def test_ctrl_c_while_the_interpreter_starts_is_answered_by_python(run, said, losses):
    run.step, run.mark = 0, "nothing has this mark"
    run.process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    run.output.write_text(f"{said}\nKeyboardInterrupt\n")
    assert len(run.settle({-2, 130})["losses"]) == losses


def test_stacks_say_what_a_process_was_doing():
    where = dict((name, number) for number, name in faults.sections("ppo_lstm_puffer.py"))
    assert list(where) == ["start", "rollout", "update", "log", "end"]
    frame = {"name": "train", "filename": "ppo_lstm_puffer.py", "line": where["update"] + 1}
    assert faults.phase_of([{"name": "step", "filename": "adam.py", "line": 1}, frame]) == "update"
    saving = {"name": "Run.save_checkpoint", "filename": "ppo_lstm_puffer.py", "line": 1}
    assert faults.phase_of([saving, frame]) == "checkpoint"
    assert (
        faults.phase_of([{"name": "Sweep.run", "filename": "protein_sweep.py", "line": 1}])
        == "watch"
    )
    assert (
        faults.phase_of([{"name": "<module>", "filename": "torch/__init__.py", "line": 1}])
        == "start"
    )


def test_numbers_of_the_soak_are_slopes():
    samples = [[10.0 * i, 100 + i / 36, 5, 7, 0, 0, 0] for i in range(361)]  # 10 MiB in an hour
    slower = [2 - i / 360 for i in range(361)]  # as the machine does
    speed = [[10.0 * i, 1000 * factor, 50 * factor] for i, factor in enumerate(slower)]
    content = {"hours": 1, "code": 143, "steps": 10**6, "samples": samples, "speed": speed}
    text = "\n".join(faults.soak_lines(content))
    assert "+10.00 MiB per hour" in text and "open files: 7 to 7" in text
    slopes = [float(slope) for slope in re.findall(r"([+-][\d.]+) ±", text)]
    assert -80 < slopes[0] == slopes[1] < -60 and abs(slopes[2]) < 0.1, text
