"""The benchmark's runner and report: tiny real runs of the script, and hand-made curves."""

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys

import gymnasium as gym
import numpy as np
import psutil
import pytest
import torch
import yaml
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmark"))
sys.path.append(str(ROOT / "benchmark/peers"))

import ablate
import peer
import report
import run
import turns

import ppo_lstm_puffer as ppo

TINY = "--num-envs 16 --num-steps 16 --minibatch-size 128 --hidden-size 32 --log-interval 1 "
TINY += "--no-compile --checkpoint-interval 2"
STEPS = 5 * 256


def plan(folder, ours_args=()):
    """A plan of a cell that fails and one that runs, and the words that run it."""
    group = {"kind": "learning", "seeds": [1], "steps": STEPS, "solved": 0, "games": 16}
    bad = {"program": "ours", "args": ["--no-such-flag"]}
    ours = {"program": "ours", "args": [*TINY.split(), *ours_args]}
    groups = [
        group | {"name": "broken", "programs": {"bad": bad}},
        group | {"name": "tiny", "programs": {"ours": ours}},
    ]
    (folder / "plan.yaml").write_text(yaml.safe_dump(groups))
    return [str(folder / "plan.yaml"), "--out", str(folder / "out")]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder of a plan that was run: out has its cells, which no test changes."""
    folder = tmp_path_factory.mktemp("benchmark")
    assert run.main(plan(folder)) == 1, "a cell failed"
    return folder


@pytest.fixture
def cells(ran):
    """Its cells by name: ours, and bad."""
    return {cell["name"]: cell for cell in run.read_cells(ran / "out").values()}


def hand_made(name="ours", env_id="breakout", **curve) -> dict:
    cell = {"name": name, "env_id": env_id, "program": name, "seconds_to_first_update": None}
    return cell | {"curve": curve}


# The runner.


def test_a_cell_has_what_was_measured(ran, cells):
    cell = cells["ours"]
    assert cell["status"] == "ok"
    assert cell["arguments"]["hidden_size"] == 32
    assert cell["curve"]["step"] == [256 * n for n in range(1, 6)]
    assert 0 < cell["seconds_to_first_update"] < cell["wall_seconds"]
    assert cell["peak_rss_mib"] > 50
    assert cell["sps_steady"] > 0
    assert len(cell["git_commit"]) == 40
    assert cell["hardware"]["threads"] >= 1
    assert cell["played"]["episodes"] == 16
    solved = cell["first_solved"]  # every score is 0 or more, so by the first checkpoint
    assert solved["step"] == 512
    assert cell["seconds_to_first_update"] < solved["seconds"] < cell["wall_seconds"]
    text = (ran / "out/cells.jsonl").read_text()
    assert str(ROOT) not in text
    assert "/tmp" not in text


def test_programs_take_turns_within_a_run(tmp_path, monkeypatch):
    """One runs, the other is stopped; both end with the last window; the report has all windows."""
    group = {"name": "tiny", "kind": "speed", "steps": 500_000_000}
    one = {"program": "ours", "args": TINY.split()}
    two = {"program": "ours", "args": [*TINY.split(), "--gamma", "0.9"]}
    plan = yaml.safe_dump([group | {"programs": {"one": one, "two": two}}])
    (tmp_path / "plan.yaml").write_text(plan)
    states = []
    before = set(psutil.Process().children())

    def window(program, seconds, original=turns.Program.window):
        children = set(psutil.Process().children()) - before
        running = [child for child in children if child.status() != psutil.STATUS_STOPPED]
        original(program, seconds)
        states.append((program.cell["name"], len(children), len(running)))

    monkeypatch.setattr(turns.Program, "window", window)
    words = ["--out", str(tmp_path / "out"), "--windows", "2", "--seconds", "1"]
    turns.main([str(tmp_path / "plan.yaml"), "tiny", *words])
    assert states == [(name, 2, 0) for name in ("one", "two", "two", "one")]
    assert set(psutil.Process().children()) <= before
    cells = run.read_cells(tmp_path / "out").values()
    assert [len(cell["windows"]) for cell in cells] == [2, 2]
    text = report.make_report(tmp_path / "out").read_text()
    assert "in turn by SIGSTOP, windows of 1 s" in text
    ratios = [a / b for a, b in zip(*(cell["windows"] for cell in reversed(cells)))]
    assert f"| {report.spread(ratios)} |" in text
    (tmp_path / "plan.yaml").write_text(plan.replace("'0.9'", "'9'"))
    with pytest.raises(SystemExit, match=r"(?s)two ended before its last window:.*--gamma"):
        turns.main([str(tmp_path / "plan.yaml"), "tiny", *words])
    assert set(psutil.Process().children()) <= before


def test_what_is_finished_is_not_run_again_and_what_failed_or_changed_is(ran, cells, monkeypatch):
    assert cells["bad"]["error"] == "exit code 2"
    assert "--no-such-flag" in cells["bad"]["output_tail"]
    again = []
    monkeypatch.setattr(run, "run_all", lambda todo, out: again.extend(todo))
    run.main(plan(ran))
    assert [cell["name"] for cell in again] == ["bad"]
    run.main([*plan(ran, ["--gamma", "0.9"]), "--only", "tiny"])
    assert [cell["name"] for cell in again] == ["bad", "ours"]


def test_fresh_forgets_its_groups_alone(ran, tmp_path, monkeypatch):
    folder = shutil.copytree(ran / "out", tmp_path / "out")
    monkeypatch.setattr(run, "run_all", lambda todo, out: 0)
    run.main([plan(ran)[0], "--out", str(folder), "--fresh", "--only", "broken"])
    assert [cell["group"] for cell in run.read_cells(folder).values()] == ["tiny"]
    run.forget([{"group": "tiny", "program": "pufferl"}], folder)  # another program's stay
    assert len(run.read_cells(folder)) == 1


def test_half_a_line_that_a_kill_left_is_no_cell(ran, cells, tmp_path):
    folder = shutil.copytree(ran / "out", tmp_path / "out")
    with (folder / "cells.jsonl").open("a") as file:
        file.write('{"group": "ti')
    assert len(run.read_cells(folder)) == 2
    run.store(cells["ours"] | {"seed": 2}, folder)
    assert len(run.read_cells(folder)) == 3


def test_what_does_not_start_is_a_failed_cell():
    programs = {"fork": {"program": "ours", "script": "recipes/no-such.patch"}}
    (cell,) = run.expand({"name": "a", "kind": "speed", "programs": programs}, [0])
    cell = run.measure(cell)
    assert cell["status"] == "failed" and "no-such.patch" in cell["output_tail"]


def store_many(process: int, folder):
    for seed in range(50):
        text = str(process) * 100_000
        run.store({"group": "g", "name": "n", "env_id": process, "seed": seed, "x": text}, folder)


def test_two_processes_store_at_once_and_the_last_line_of_a_cell_counts(tmp_path):
    processes = [multiprocessing.Process(target=store_many, args=(i, tmp_path)) for i in (1, 2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    run.store({"group": "g", "name": "n", "env_id": 1, "seed": 7, "x": "again"}, tmp_path)
    cells = run.read_cells(tmp_path)
    assert len(cells) == 100
    assert cells["g", "n", 2, 49]["x"] == "2" * 100_000
    assert cells["g", "n", 1, 7]["x"] == "again"


def test_interleaved_programs_take_turns():
    group = {"name": "g", "kind": "speed", "seeds": [1, 2]}
    group["programs"] = {"a": {"program": "ours"}, "b": {"program": "sb3"}}
    assert [cell["name"] for cell in run.expand(group, [0])] == ["a", "a", "b", "b"]
    group["interleave"] = True
    assert [cell["name"] for cell in run.expand(group, [0])] == ["a", "b", "a", "b"]


def test_timeout_ends_the_whole_process_group(monkeypatch):
    words = ["python", "-c", "import os, time; os.fork(); time.sleep(77)"]
    monkeypatch.setattr(run, "command", lambda *_: words)
    group = {"name": "g", "kind": "speed", "programs": {"a": {"program": "ours"}}, "timeout": 1}
    result = run.measure(run.expand(group, [0])[0])
    assert result["status"] == "failed"
    assert "timeout of 1 seconds" in result["error"]
    for process in psutil.process_iter(["cmdline"]):
        if "time.sleep(77)" in " ".join(process.info["cmdline"] or []):
            assert process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    "text, message",
    [
        ("- {name: a, kind: speed, programs: {x: {program: odd}}}", "program odd: must be one"),
        ("- {name: a, kind: speed, sedes: [1], programs: {}}", "key sedes"),
        ("- {kind: speed}", "'name' is missing"),
        ("- {name: a, kind: speed, programs: {x: {program: ours, cores: [999]}}}", "this machine"),
        ("[{name: a, kind: speed, programs: {}}, {name: a}]", "two groups have the same name"),
    ],
)
def test_wrong_plan_is_one_clear_line(tmp_path, capsys, text, message):
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(SystemExit) as exit_:
        run.main([str(tmp_path / "plan.yaml"), "--out", str(tmp_path)])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


PLANS = sorted((ROOT / "benchmark/plans").glob("*.yaml"))


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_stored_plans_are_valid(path):
    cells = [cell for group in yaml.safe_load(path.read_text()) for cell in run.expand(group, [0])]
    assert len({run.WHICH(cell) for cell in cells}) == len(cells)


def test_tasks_of_the_memory_report_are_flat_and_show_the_last_action():
    plan = yaml.safe_load((ROOT / "benchmark/plans/memory.yaml").read_text())
    for env_id in {env_id for group in plan for env_id in group["envs"]}:
        env = gym.make(env_id)
        first, _ = env.reset(seed=1)
        env.action_space.seed(1)
        now, *_ = env.step(env.action_space.sample())
        assert first in env.observation_space
        assert now in env.observation_space
        assert now.ndim == 1
    env = gym.make("envs.memory:RepeatPreviousEasy-v0")
    # One of 4 suits, the last action, whether this is the first step.
    assert env.reset(seed=1)[0][4:].tolist() == [1, 0, 0, 0, 0, 1]
    assert env.step(2)[0][4:].tolist() == [0, 0, 1, 0, 1, 0]


def test_hardware_is_what_the_machine_and_the_script_say(tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text("flags\t\t: fpu avx avx2 avx512f avx512_bf16\n")
    monkeypatch.setattr(run, "CPUINFO", tmp_path / "cpuinfo")
    assert run.report_folder("auto").name == "cpu-bf16"
    assert run.hardware("warning: x\ncpu, 2 threads, bfloat16\nrun: x")["threads"] == 2
    monkeypatch.setattr(run, "output_of", lambda *words: "some GPU\nanother\n")
    assert run.hardware("cuda, 8 threads, bfloat16\nrun: x")["gpu"] == "some GPU"


def test_seconds_of_a_peer_count_from_its_first_iteration(tmp_path, monkeypatch):
    monkeypatch.setattr(peer.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "excepthook", None)
    clock = iter([0.0, 60.0, 69.0, 70.0])
    monkeypatch.setattr(peer, "time", argparse.Namespace(time=lambda: next(clock)))
    args = argparse.Namespace(folder=tmp_path, seconds=10, steps=1000)
    metrics = peer.Metrics(args, "numpy", {}, "a note")
    assert [metrics.line(step, env__score=5) for step in (1, 2, 3)] == [False, False, True]
    rows, _ = run.read_rows(tmp_path)
    assert [row["time"] for row in rows] == [60, 69, 70]
    assert rows[1]["sps"] == 1 / 9
    assert rows[1]["env/score"] == 5


# Numbers of a cell.


def test_steady_speed_is_that_of_the_second_half_after_the_first_update():
    steps = [10, 1000, 2000, 6000]
    assert run.steady_speed([60.0, 75.0, 80.0, 100.0], steps) == (6000 - 2000) / (100 - 80)
    assert run.steady_speed([60.0, 100.0], [10, 4010]) == 100, "two points are enough"
    assert run.steady_speed([30.0], [10]) is None


def test_the_first_update_of_ours_stands_before_what_it_logged(tmp_path):
    row = {"step": 100, "iteration": 10, "time": 9.0}
    last = {"step": 100, "exit_reason": "sigint"}
    cut_off = '{"step": 2, "ti'
    lines = [json.dumps(row), json.dumps(last), cut_off]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    rows = [{"step": 10, "iteration": 1, "time": 0.0}, row]
    assert run.read_rows(tmp_path) == (rows, last)
    assert run.read_rows(tmp_path / "nothing") == ([], {})


@pytest.mark.parametrize("ours", [True, False])
def test_seconds_to_the_first_update_are_those_before_the_time_of_ours(tmp_path, ours):
    """A peer's time counts from its start, and its first row is of its first update."""
    row = {"step": 10, "time": 1e6} | ({"iteration": 10} if ours else {})
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row))
    process = psutil.Process()
    process.poll = iter([None, 0]).__next__  # it ends after the first look
    seen = run.watch(process, str(tmp_path), run.time.perf_counter() - 100, 200, set())
    expected = 100 - 1e6 if ours else 100
    assert seen["seconds_to_first_update"] == pytest.approx(expected, abs=5)


def test_time_to_score_takes_the_mean_of_three_and_counts_from_the_start_of_the_process():
    cell = hand_made(time=[1, 2, 3, 4, 5], step=[1e6, 2e6, 3e6, 4e6, 5e6])
    cell["curve"]["score"] = [None, 0, 300, 300, 300]
    assert report.time_to_score(cell, 200) == 4, "one lucky line is not enough"
    assert report.time_to_score(cell, 200, column=0) == 4
    assert report.time_to_score(cell, 301) == np.inf
    cell["seconds_to_first_update"] = 11.0
    assert report.time_to_score(cell, 200) == 14


def test_the_best_score_is_over_equal_steps_however_often_a_program_logs():
    steps = [10_000, 20_000, 30_000, 40_000, 50_000, 60_000]
    lucky = hand_made(step=steps, score=[9, 0, None, 0, 1, 3])
    assert report.best_score(lucky) == 2.5  # to 50,000; the last four have a mean of 1
    assert report.best_score(hand_made(step=[30_000, 70_000, 110_000], score=[9, 1, 2])) == 5
    assert report.best_score(hand_made(step=[4_000, 8_000], score=[1, 3])) == 2  # a short run


def test_a_thinned_curve_has_the_means_of_all_scores():
    """Else the best of a long curve would be the luckiest of single rows."""
    rows = [{"step": 100 * i, "time": i, "sps": 100} for i in range(1, 1002)]
    rows = [row | {"env/score": 5 * (row["step"] % 500 == 0)} for row in rows]
    curve = run.from_rows(rows, points=200)["curve"]
    assert curve["step"][:2] == [100, 700] and curve["step"][-1] == 100_100
    assert set(curve["score"][1:-1]) == {0.833, 1.667}
    assert report.best_score({"curve": curve}) == pytest.approx(1, abs=0.02)


def test_interquartile_mean_and_its_interval():
    runs = np.array([[0.0, 0.2, 0.4, 9.0], [0.1, 0.3, 0.5, 0.6]])
    mean = (0.2 + 0.3 + 0.4 + 0.5) / 4  # without 0, 0.1, 0.6 and 9
    assert report.iqm(*runs.T) == pytest.approx(mean)
    low, high = map(float, report.interval(report.iqm, *runs.T).split(" to "))
    assert 0.2 < low < mean < high < 0.6  # each environment's runs are drawn from its own
    assert report.interval(np.median, [2.0]) == "-"


# The report.


def test_speeds_are_compared_within_a_round():
    speeds = {"one": (100, 80, 70), "two": (190, 160, None)}  # the last one failed
    same = {"group": "g", "env_id": "e", "peak_rss_mib": 9}
    cells = []
    for name, each in speeds.items():
        for seed, speed in enumerate(each):
            cells.append(same | {"name": name, "seed": seed, "sps_steady": speed})
    assert "| 1.95 (1.9 to 2, n = 2) |" in report.speed_section(cells)


def two_programs(env_id: str, **scores: list[float]) -> list[dict]:
    times = {"time": [10, 20, 30, 40, 50, 60], "step": [1, 2, 3, 4, 5, 6]}
    return [hand_made(name, env_id, **times, score=[0.0, *own]) for name, own in scores.items()]


def test_every_environment_is_compared_with_pufferl():
    # 40 at 30 s, the mean of three; PuffeRL is at 30 after 60 s
    quick = two_programs("quick", ours=[60, 60, 60, 60, 60], pufferl=[6, 12, 30, 30, 30])
    slow = two_programs("slow", ours=[0, 0, 10, 10, 10], pufferl=[0, 20, 20, 20, 20])
    text = report.against_pufferl({"quick": quick, "slow": slow, "alone": quick[:1]})
    assert "| quick | 0 | 60 | 30 | - | 30 | 60 | 0.5 |" in text
    assert "| slow | 0 | 10 | 20 | - | never | 50 | never |" in text
    assert "| ours | 0.75 | - | 1 |" in text
    assert "alone" not in text


def test_tasks_are_compared_with_what_others_published_and_by_games_where_these_are_counted():
    scores = {"Recall": {"ours": 0.5, "sb3": 0.1}, "Maze": {"ours": 0.1, "sb3": 0.4}}
    runs = []
    for task, each in scores.items():
        for name, score in each.items():
            curve = {"step": [9_000, 50_000, 90_000], "score": [0, 0, score], "time": [1, 2, 3]}
            cell = hand_made(name, f"envs.memory:{task}-v0", **curve)
            runs.append(cell | {"played": {"episodic_return": {"mean": 2 * score}}})
    published = {"envs.memory:Recall-v0": {"GRU": 1.0}}
    text = report.tasks_section(runs, published)
    assert "| Recall | 0 | **0.25** | 0.05 | 1 | 0.09 |" in text
    assert "| Maze | 0 | 0.05 | **0.2** | - | 0.09 |" in text
    assert "| RecurrentPPO (SB3-contrib) | 0.525 | - | 1 |" in text
    text = report.tasks_section([cell | {"games": 32} for cell in runs], published)
    assert "The mean of 32 games after training" in text
    runs.append({key: value for key, value in runs[1].items() if key != "played"})
    assert report.tasks_section([cell | {"games": 32} for cell in runs], published) == text
    assert "| Maze | 0 | 0.2 | **0.8** | - | 0.09 |" in text


def test_a_report_says_how_many_games_were_played_and_each_run_as_it_was(cells):
    text = report.learning_section([cells["ours"]])
    assert "return with its most likely actions, 16 games" in text and "plays 0 in" not in text
    other = cells["ours"] | {"seed": 2, "cores": [7], "command": ["x", "--seed", "2", "y"]}
    text = report.provenance([cells["ours"], other])
    cores = ", ".join(map(str, cells["ours"]["cores"]))
    assert f"seeds 1; cores {cores}" in text and "seeds 2; cores 7\nx --seed 2 y" in text


def test_report_of_little_says_little(ran, cells, tmp_path):
    folder = shutil.copytree(ran / "out", tmp_path / "out")
    run.store(cells["ours"] | {"kind": "speed", "git_dirty": True}, folder)
    report.main([str(folder)])
    text = (folder / "report.md").read_text()
    titles = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    assert titles == ["Steps per second", "Failed", "Hardware, versions, commands"]
    assert (folder / "speed.png").stat().st_size > 5000
    assert f"Commit: {cells['ours']['git_commit'][:7]} with changes" in text
    assert "exit code 2" in text
    with pytest.raises(SystemExit, match="no finished cell"):
        report.main([str(tmp_path / "nothing")])


REPORTS = sorted(path.parent for path in (ROOT / "benchmark/reports").glob("*/cells.jsonl"))


@pytest.mark.parametrize("folder", REPORTS, ids=lambda folder: folder.name)
def test_stored_reports_are_those_of_their_cells(folder, tmp_path, monkeypatch):
    """What `make report` writes, without its figures."""
    monkeypatch.setattr(report, "save", lambda figure, path: report.plt.close(figure))
    copy = shutil.copytree(folder, tmp_path / folder.name)
    report.make_report(copy)
    assert (copy / "report.md").read_text() == (folder / "report.md").read_text()


# Ablations: what is taken out is out, and nothing else. `carry` is in tests/test_learning.py.


@pytest.fixture
def without(monkeypatch):
    """Takes a part out, until the end of the test."""
    for name in ("lstm_forward", "compute_advantages", "draw_minibatch"):
        monkeypatch.setattr(ppo, name, getattr(ppo, name))
    return lambda part: ablate.PARTS[part]()


def advantages(ratio: float = 0.5, next_value: float = 7.0) -> torch.Tensor:
    values = torch.cat((torch.arange(8.0).view(4, 2), torch.full((1, 2), next_value)))
    ones = torch.ones(4, 2)
    args = ppo.Args(gamma=0.9, gae_lambda=0.8)
    return ppo.compute_advantages(values, ones, torch.zeros(5, 2), ones, ratio * ones, args)


def test_without_bootstrap_the_next_value_is_not_seen(without):
    assert not torch.equal(advantages(next_value=7.0), advantages(next_value=8.0))
    without("bootstrap")
    assert torch.equal(advantages(next_value=7.0), advantages(next_value=8.0))
    assert (advantages()[-1] == 0).all()
    assert (advantages()[:-1] != 0).any()


def test_without_vtrace_the_ratio_is_not_seen(without):
    on_policy = advantages(ratio=1.0)
    assert not torch.equal(advantages(ratio=0.5), on_policy)
    without("vtrace")
    assert torch.equal(advantages(ratio=0.5), on_policy)


def drawn(alpha: float, beta: float, valid_share=0.8) -> ppo.Minibatch:
    """4 of 16 segments of 8 steps, of which some do not count."""
    generator = torch.Generator().manual_seed(3)
    values, rewards = (torch.randn(T, 16, generator=generator) for T in (9, 8))
    valid = (torch.rand(9, 16, generator=generator) < valid_share).float()[:8]
    ratio = torch.ones(8, 16)
    uniform = torch.rand(17, generator=generator)
    args = ppo.Args(prio_alpha=alpha, minibatch_size=32, num_steps=8)
    dones = torch.zeros(9, 16)
    inputs = values, rewards, dones, valid, ratio, uniform, torch.tensor(beta), args
    return ppo.draw_minibatch(*inputs)


def test_without_weights_those_of_the_draw_are_with_the_advantages_alone(without):
    before = drawn(alpha=0.8, beta=1.0)
    without("weights")
    after = drawn(alpha=0.8, beta=1.0)
    torch.testing.assert_close(after.weight * after.advantages, before.weight * before.advantages)
    counted = before.weight > 0
    assert 0 < counted.sum() < counted.numel()
    torch.testing.assert_close(after.weight, counted / counted.sum())
    assert not torch.allclose(before.weight, after.weight)


def test_without_batch_statistics_advantages_are_normalized_over_the_minibatch(without):
    def statistics(minibatch) -> tuple[float, float]:
        advantages = minibatch.advantages[minibatch.weight > 0]
        return advantages.mean().item(), advantages.std(correction=0).item()

    everything = {"alpha": 0.8, "beta": 0.0, "valid_share": 1.0}
    assert statistics(drawn(**everything)) != pytest.approx((0, 1), abs=1e-2)
    without("batch_statistics")
    assert statistics(drawn(**everything)) == pytest.approx((0, 1), abs=1e-5)


# The benchmark of a GPU, without one.


def tiny(group: dict) -> dict:
    """A group with its first program alone, on the CPU, at sizes that a test has time for."""
    name, program = next(iter(group["programs"].items()))
    args = program.get("args", [])
    if args[:1] == ["--config"]:
        args = args[2:]
    args = [*args, *TINY.split(), "--device", "cpu", "--num-workers", "0"]
    changes = {"programs": {name: program | {"args": args}}, "steps": STEPS, "duration": None}
    return group | changes | {"seeds": [1], "solved": None, "games": 2}


def test_the_benchmark_of_a_gpu_runs_through_on_a_cpu_at_tiny_sizes(tmp_path):
    groups = yaml.safe_load((ROOT / "benchmark/plans/gpu.yaml").read_text())
    groups = list({group["kind"]: tiny(group) for group in groups}.values())  # one of each
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(groups))
    environment = os.environ | {"PLAN": str(tmp_path / "plan.yaml"), "OUT": str(tmp_path / "out")}
    environment["PY"] = sys.executable
    environment["ARGS"] = f"{TINY} --device cpu --total-timesteps 4096"
    options = {"env": environment, "capture_output": True, "text": True, "timeout": 300}
    result = subprocess.run(["bash", ROOT / "benchmark/gpu.sh"], **options)
    assert result.returncode == 0, result.stdout + result.stderr
    cells = run.read_cells(tmp_path / "out").values()
    assert [cell["status"] for cell in cells] == ["ok"] * len(groups)
    assert "no GPU here" in (tmp_path / "out/tests.txt").read_text()
    assert (tmp_path / "out/trace.json.gz").stat().st_size > 5000
    assert "Steps per second" in (tmp_path / "out/report.md").read_text()
