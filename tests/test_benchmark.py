"""The benchmark's runner and report: tiny real runs of the script, and hand-made curves."""

import argparse
import importlib.metadata
import json
import os
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
import ceiling
import kernels as kernel_table
import peer
import report
import run

import ppo_lstm_puffer as ppo

TINY = "--num-envs 16 --num-steps 16 --minibatch-size 128 --hidden-size 32 --log-interval 1 --no-compile"
TINY += " --checkpoint-interval 2"
STEPS = 5 * 256


def plan(folder, ours_args=()):
    """A plan of a cell that fails and one that runs, and the words that run it."""
    ours, bad = (
        {"program": "ours", "args": words}
        for words in ([*TINY.split(), *ours_args], ["--no-such-flag"])
    )
    group = {
        "name": "tiny",
        "kind": "learning",
        "seeds": [1],
        "steps": STEPS,
        "interleave": True,
        "solved": 0,
    }
    groups = [
        group | {"name": "broken", "programs": {"bad": bad}},
        group | {"programs": {"ours": ours}},
    ]
    (folder / "plan.yaml").write_text(yaml.safe_dump(groups))
    return [str(folder / "plan.yaml"), "--out", str(folder / "out")]


def stored(folder) -> dict:
    return {path.stem: json.loads(path.read_text()) for path in (folder / "out").rglob("*.json")}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder of a plan that was run: out/cells has its results, which no test changes."""
    folder = tmp_path_factory.mktemp("benchmark")
    assert run.main(plan(folder)) == 1, "a cell failed"
    return folder


def hand_made(**curve) -> dict:
    return {"seconds_to_first_update": None, "curve": curve}


# The runner.


def test_plan_leaves_a_json_per_cell(ran):
    cells = stored(ran)
    assert set(cells) == {"ours__breakout__1", "bad__breakout__1"}
    cell = cells["ours__breakout__1"]
    assert cell["status"] == "ok" and cell["seed"] == 1 and cell["arguments"]["hidden_size"] == 32
    assert (
        cell["command"][1:4] == ["ppo_lstm_puffer.py", "--env-id", "breakout"]
        and "DIR" in cell["command"]
    )
    assert cell["curve"]["step"] == [256 * n for n in range(1, 6)] and cell["timesteps"] == STEPS
    assert cell["exit_reason"] == "completed" and cell["sps"] == STEPS / cell["seconds"]
    assert 0 < cell["seconds_to_first_update"] < cell["wall_seconds"] and cell["peak_rss_mib"] > 50
    assert cell["sps_steady"] > 0 and min(cell["phase_shares"].values()) > 0
    assert set(cell["phases"]) == set(cell["phase_shares"]) == {"env", "policy", "update"}
    assert sum(cell["phase_shares"].values()) == pytest.approx(1, abs=0.1)
    assert (
        cell["versions"]["torch"] == importlib.metadata.version("torch")
        and len(cell["git_commit"]) == 40
    )
    assert cell["hardware"]["cpu"] and cell["hardware"]["threads"] >= 1 and cell["cores"]
    assert cell["played"]["episodes"] == 128 and cell["played"]["deterministic"]
    solved = cell["first_solved"]  # every score is 0 or more, so by the first checkpoint
    assert (
        solved["step"] == 512
        and cell["seconds_to_first_update"] < solved["seconds"] < cell["wall_seconds"]
    )


def test_no_path_of_the_machine_is_stored(ran):
    for path in (ran / "out").rglob("*.json"):
        assert str(ROOT) not in path.read_text() and "/tmp" not in path.read_text()


def test_failing_cell_is_recorded_and_the_rest_run(ran):
    cells = stored(ran)
    bad = cells["bad__breakout__1"]
    assert (
        bad["status"] == "failed"
        and bad["error"] == "exit code 2"
        and "--no-such-flag" in bad["output_tail"]
    )
    assert cells["ours__breakout__1"]["status"] == "ok"


def test_finished_cells_are_not_run_again_and_changed_ones_are(ran, monkeypatch):
    run_cells = []

    def measure(cell, tick):
        run_cells.append((cell["group"], cell["seed"]))
        return cell | {
            "status": "ok",
            "wall_seconds": 1,
            "sps_steady": None,
            "curve": {"score": []},
        }

    monkeypatch.setattr(run, "measure", measure)
    monkeypatch.setattr(run, "store", lambda cell, path: None)
    assert run.main([*plan(ran), "--only", "tiny"]) == 0 and run_cells == []
    assert run.main(plan(ran)) == 0 and run_cells == [("broken", 1)], "what failed is tried again"
    run_cells.clear()
    run.main([*plan(ran, ["--gamma", "0.9"]), "--only", "tiny"])
    assert run_cells == [("tiny", 1)]


def test_interleaved_programs_take_turns():
    group = {"name": "g", "kind": "speed", "seeds": [1, 2]}
    group["programs"] = {"a": {"program": "ours"}, "b": {"program": "sb3"}}
    assert [cell["name"] for cell in run.expand(group, [0])] == ["a", "a", "b", "b"]
    assert [cell["name"] for cell in run.expand(group | {"interleave": True}, [0])] == [
        "a",
        "b",
        "a",
        "b",
    ]


def test_timeout_ends_the_whole_process_group(tmp_path, monkeypatch):
    monkeypatch.setattr(
        run, "command", lambda *_: ["python", "-c", "import os, time; os.fork(); time.sleep(77)"]
    )
    cell = run.expand(
        {"name": "g", "kind": "speed", "programs": {"a": {"program": "ours"}}, "timeout": 1}, [0]
    )[0]
    result = run.measure(cell, lambda seconds: None)
    assert result["status"] == "failed" and "timeout of 1 seconds" in result["error"]
    those = [
        one
        for one in psutil.process_iter(["cmdline"])
        if "time.sleep(77)" in " ".join(one.info["cmdline"] or [])
    ]
    assert not any(map(run.running, those))


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "- {name: a, kind: speed, programs: {x: {program: nonsense}}}",
            "program nonsense: must be one of ours",
        ),
        ("- {name: a, kind: speed, sedes: [1], programs: {}}", "unknown sedes"),
        ("- {kind: speed}", "'name' is missing"),
        (
            "- {name: a, kind: speed, programs: {x: {program: ours, cores: [999]}}}",
            "this machine has",
        ),
    ],
)
def test_wrong_plan_is_one_clear_line(tmp_path, capsys, text, message):
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(SystemExit) as exit_:
        run.main([str(tmp_path / "plan.yaml"), "--out", str(tmp_path)])
    assert exit_.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    "plan", sorted((ROOT / "benchmark/plans").glob("*.yaml")), ids=lambda path: path.stem
)
def test_stored_plans_are_valid(plan):
    groups = yaml.safe_load(plan.read_text())
    cells = [cell for group in groups for cell in run.expand(group, [0])]
    assert len({run.path_of(cell, ROOT) for cell in cells}) == len(cells)


def test_tasks_of_the_memory_report_are_flat_and_show_the_last_action():
    plan = yaml.safe_load((ROOT / "benchmark/plans/memory.yaml").read_text())
    for env_id in {env_id for group in plan for env_id in group["envs"]}:
        env = gym.make(env_id)
        first, _ = env.reset(seed=1)
        env.action_space.seed(1)
        action = env.action_space.sample()
        now, *_ = env.step(action)
        assert first in env.observation_space and now in env.observation_space and now.ndim == 1, (
            env_id
        )
    env = gym.make(
        "envs.memory:RepeatPreviousEasy-v0"
    )  # one of 4 suits, the last action, whether this is the first step
    assert env.reset(seed=1)[0][4:].tolist() == [1, 0, 0, 0, 0, 1] and env.step(2)[0][
        4:
    ].tolist() == [0, 0, 1, 0, 1, 0]


@pytest.mark.parametrize(
    "flags, both",
    [
        ("fpu avx avx2 avx512f avx512_bf16 amx_bf16", ("AMX-BF16", "cpu-amx")),
        ("fpu avx avx2 avx512f avx512_bf16", ("AVX512-BF16", "cpu-bf16")),
        ("fpu avx avx2 avx512f", ("AVX512", "cpu-avx512")),
        ("fpu avx avx2", ("AVX2", "cpu-avx2")),
        ("fp asimd bf16", ("Arm BF16", "cpu-arm")),
    ],
)
def test_reports_have_a_folder_for_each_kind_of_cpu(flags, both, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(f"model name\t: Some CPU\nflags\t\t: {flags}\n")
    monkeypatch.setattr(run, "CPUINFO", tmp_path / "cpuinfo")
    assert run.report_folder("auto").name == both[1]
    assert run.hardware()["instruction_set"] == both[0] and run.hardware()["cpu"] == "Some CPU"


def test_seconds_of_a_peer_count_from_its_first_iteration(tmp_path, monkeypatch):
    args = argparse.Namespace(folder=tmp_path, seconds=10, steps=1000)
    for where, name in ((peer.signal, "signal"), (sys, "excepthook")):
        monkeypatch.setattr(where, name, lambda *_: None)
    clock = iter([0.0, 60.0, 69.0, 70.0])
    monkeypatch.setattr(peer, "time", argparse.Namespace(time=lambda: next(clock)))
    metrics = peer.Metrics(args, "numpy", {}, "a note")
    assert [metrics.line(step, env__score=5) for step in (1, 2, 3)] == [False, False, True]
    monkeypatch.setattr(peer.os, "_exit", lambda code: None)
    monkeypatch.setattr(
        peer,
        "psutil",
        argparse.Namespace(Process=lambda: argparse.Namespace(children=lambda **_: [])),
    )
    metrics.finish()
    rows, last = run.read_rows(tmp_path)
    assert [row["env/score"] for row in rows] == [5, 5, 5] and rows[1] == {
        "step": 2,
        "time": 69,
        "sps": 1 / 9,
    } | rows[1]
    assert (last["exit_reason"], last["step"], last["note"]) == ("completed", 3, "a note") and last[
        "versions"
    ]["torch"]


# The figures, on curves written by hand.


def test_steady_speed_is_that_of_the_second_half_after_the_first_update():
    curve = {"time": [60.0, 75.0, 80.0, 100.0], "step": [10, 1000, 2000, 6000]}
    assert run.steady_speed(curve) == (6000 - 2000) / (100 - 80)
    assert run.steady_speed({"time": [60.0, 100.0], "step": [10, 4010]}) == 100, (
        "two points are enough"
    )
    assert run.steady_speed({"time": [30.0], "step": [10]}) is None


def test_curve_is_thinned_and_keeps_its_end():
    rows = [{"step": 2 * n, "time": float(n), "time/env": 0.25} for n in range(1, 1002)]
    result = run.from_rows(rows)
    assert len(result["curve"]["step"]) <= 401 and result["curve"]["step"][-1] == 2002
    assert result["sps"] == result["sps_steady"] == 2 and result["seconds"] == 1001
    assert result["phases"] == {"env": 1000 / 4} and result["phase_shares"] == {"env": 0.25}


def test_rows_and_the_last_one(tmp_path):
    (tmp_path / "run").mkdir()
    lines = '{"step": 1, "time": 2.0}\n{"step": 1, "exit_reason": "sigint"}\n{"step": 2, "ti'
    (tmp_path / "run/metrics.jsonl").write_text(lines)
    assert run.read_rows(tmp_path) == (
        [{"step": 1, "time": 2.0}],
        {"step": 1, "exit_reason": "sigint"},
    )
    assert (
        run.read_rows(tmp_path / "nothing") == ([], {}) and run.from_rows([])["curve"]["step"] == []
    )


def test_the_first_update_of_ours_stands_before_what_it_logged(tmp_path):
    lines = '{"step": 100, "iteration": 10, "time": 9.0}\n{"step": 200, "iteration": 20, "time": 20.0}\n'
    (tmp_path / "metrics.jsonl").write_text(lines)
    rows, _ = run.read_rows(tmp_path)
    assert rows[0] == {"step": 10, "iteration": 1, "time": 0.0} and len(rows) == 3


@pytest.mark.parametrize(
    "row", ({"iteration": 10, "time": 1e6}, {"time": 1e6}), ids=("ours", "a peer")
)
def test_the_seconds_to_the_first_update_are_those_before_the_time_of_ours(tmp_path, row):
    """A peer's time counts from its start, and its first row is of its first update."""
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 10} | row))
    process = subprocess.Popen(["sleep", "0.3"])
    since = run.time.perf_counter() - 100
    seen = run.watch(process, str(tmp_path), since, 200, set(), lambda seconds: None)
    expected = 100 - 1e6 if "iteration" in row else 100
    assert seen["seconds_to_first_update"] == pytest.approx(expected, abs=5)


def test_threads_are_those_that_the_script_names_and_a_gpu_is_asked_for(monkeypatch):
    assert run.hardware("warning: x\ncpu, 2 threads, bfloat16\nrun: x")["threads"] == 2
    monkeypatch.setattr(run, "gpu", lambda: "some GPU")
    facts = run.hardware("cuda, 8 threads, bfloat16\nrun: x")
    assert facts["gpu"] == "some GPU" and "threads" not in facts


def test_time_to_score_takes_the_mean_of_three():
    cell = hand_made(
        time=[1, 2, 3, 4, 5], step=[10, 20, 30, 40, 50], score=[None, 0, 300, 300, 300]
    )
    assert report.time_to_score(cell, 200) == (4, 40), "one lucky line is not enough"
    assert report.time_to_score(cell, 301) == (np.inf, np.inf)


def test_times_count_from_the_start_of_the_process():
    cell = hand_made(time=[1, 2, 3], step=[1, 2, 3], score=[5, 5, 5]) | {
        "seconds_to_first_update": 11.0
    }
    assert report.time_to_score(cell, 5) == (13, 3)


def test_ratios_pair_runs_of_the_same_round():
    runs = [
        ("ours", 1, 30.0),
        ("sb3", 1, 10.0),
        ("sb3", 2, 1.0),
        ("ours", 2, None),
        ("ours", 3, 8.0),
        ("sb3", 3, 2.0),
    ]
    same = {"group": "g", "env_id": "e"}
    cells = [same | {"seed": seed, "name": name, "sps_steady": speed} for name, seed, speed in runs]
    assert report.ratios(cells, "ours", "sb3") == [3, 4]
    assert (
        report.interval(np.median, [2.0, 2.0, 2.0]) == "2 to 2"
        and report.interval(np.median, [2.0]) == "-"
    )


def test_flops_per_step_is_that_of_the_layers():
    arguments = {"hidden_size": 128, "num_steps": 16, "update_epochs": 1.0}
    weights = 118 * 128 + 4 * 128 * 256 + 128 * 3 + 128
    assert (
        report.flops_per_step(arguments, "breakout")
        == 2 * weights * (1 + 1 / 16 + 3) - 2 * 118 * 128
    )


# The report.


def variant(cell: dict, **changes) -> dict:
    """A stored cell as that of another group or program, with a made-up speed, score and memory."""
    curve = cell["curve"] | {"score": [changes.pop("score", 10.0)] * len(cell["curve"]["step"])}
    return cell | {"curve": curve} | changes


def test_efficiency_of_ranks_is_their_speed_by_their_number_times_that_of_one():
    cells = []
    rounds = (
        ("small", 1, (100, 190, 160)),
        ("small", 2, (80, 160, 120)),
        ("large", 1, (200, 400, 220)),
    )
    for group, seed, speeds in rounds:
        for (name, x), speed in zip({"one": 1, "two ranks": 2, "threads": None}.items(), speeds):
            cell = {"group": group, "env_id": "breakout", "seed": seed, "name": name, "x": x}
            cell |= {
                "sps_steady": float(speed),
                "arguments": {"num_envs": 512, "minibatch_size": 4096},
            }
            cells.append(cell | {"phase_shares": {"reduce": 0.05 * (x or 0)}})
    small, large = report.ranks_section(cells).split("**small**")[1].split("**large**")
    row = "| two ranks | 512 / 4,096 | 175 (160 to 190, n = 2) | 1.95 (1.9 to 2, n = 2) | 0.975 (0.95 to 1, n = 2) | "
    assert f"{row}10 % (10 to 10, n = 2) |" in small
    assert "| 1.55 (1.5 to 1.6, n = 2) | - | - |" in small
    assert "| two ranks | 512 / 4,096 | 400 | 2 | 1 | 10 % |" in large


def test_every_environment_is_compared_with_pufferl():
    def cells(env_id: str, ours: list[float], theirs: list[float]) -> list[dict]:
        curves = {
            name: {
                "time": [10, 20, 30, 40, 50, 60],
                "step": [1, 2, 3, 4, 5, 6],
                "score": [0.0, *scores],
            }
            for name, scores in (("ours", ours), ("pufferl", theirs))
        }
        return [
            hand_made(**curve) | {"env_id": env_id, "name": name} for name, curve in curves.items()
        ]

    # 40 at 30 s, the mean of three; PuffeRL is at 30 after 60 s
    quick = cells("quick", [60, 60, 60, 60, 60], [6, 12, 30, 30, 30])
    slow = cells("slow", [0, 0, 10, 10, 10], [0, 20, 20, 20, 20])
    text = report.against_pufferl({"quick": quick, "slow": slow})
    assert "| quick | 0 | 60 | 30 | - | 30 | 60 | 0.5 |" in text
    assert "| slow | 0 | 10 | 20 | - | never | 50 | never |" in text
    assert "Worse: slow." in text and "0 of 2." in text
    assert report.normalized_scores({"quick": quick, "slow": slow}, "ours").tolist() == [[1, 0.5]]
    assert report.normalized_scores({"quick": quick, "slow": slow}, "pufferl").tolist() == [
        [0.5, 1]
    ]
    assert "| ours | 0.75 | - | 1 |" in text


def test_tasks_are_compared_with_what_others_published(tmp_path):
    def cells(env_id: str, **scores: float) -> list[dict]:
        curves = {
            name: {
                "time": [1, 2, 3, 4],
                "step": [9_000, 50_000, 90_000, 100_000],
                "score": [0, 0, score, score],
            }
            for name, score in scores.items()
        }
        return [
            hand_made(**curve) | {"env_id": env_id, "name": name} for name, curve in curves.items()
        ]

    runs = cells("envs.memory:Recall-v0", ours=0.5, sb3=0.1) + cells(
        "envs.memory:Maze-v0", ours=0.1, sb3=0.4
    )
    text = report.tasks_section(runs, {"envs.memory:Recall-v0": {"GRU": 1.0}})
    assert (
        "| task | untrained | ours | RecurrentPPO (SB3-contrib) | GRU | million steps of ours |"
        in text
    )
    assert (
        "| Recall | 0 | **0.5** | 0.1 | 1 | 0.1 |" in text
        and "| Maze | 0 | 0.1 | **0.4** | - | 0.1 |" in text
    )
    assert (
        "| ours | 0.375 | - | 1 |" in text
        and "| RecurrentPPO (SB3-contrib) | 0.55 | - | 1 |" in text
    )
    report.plot_tasks(runs, tmp_path / "tasks.png", {"envs.memory:Recall-v0": {"GRU": 1.0}})
    report.plot_many(runs, tmp_path / "learning.png")
    assert {path.name for path in tmp_path.iterdir()} == {"tasks.png", "learning.png"}


def test_tasks_are_compared_by_games_where_the_plan_counts_them():
    def cell(name: str, mean: float, score: list) -> dict:
        curve = {"time": [1, 2], "step": [50_000, 100_000], "score": score}
        games = {"games": 32, "played": {"episodic_return": {"mean": mean}}}
        return hand_made(**curve) | games | {"env_id": "envs.memory:Hill-v3", "name": name}

    runs = [cell("ours", 0.25, [0, 9]), cell("sb3", 0.5, [None, None])]  # no episode ended
    text = report.tasks_section(runs, {})
    assert "The mean of 32 games after training" in text
    assert "| Hill | 0 | 0.25 | **0.5** | 0.1 |" in text


def test_the_best_score_is_over_equal_steps_however_often_a_program_logs():
    lucky = {
        "step": [10_000, 20_000, 30_000, 40_000, 50_000, 60_000],
        "score": [9, 0, None, 0, 1, 3],
    }
    assert (
        report.best_score({"curve": lucky}) == 2.5
    )  # of the steps to 50,000; the last four have a mean of 1
    assert (
        report.best_score({"curve": {"step": [30_000, 70_000, 110_000], "score": [9, 1, 2]}}) == 5
    )


def test_interquartile_mean_and_its_interval():
    runs = np.array([[0.0, 0.2, 0.4, 9.0], [0.1, 0.3, 0.5, 0.6]])
    assert report.iqm(*runs.T) == pytest.approx(
        (0.2 + 0.3 + 0.4 + 0.5) / 4
    )  # without 0, 0.1, 0.6 and 9
    low, high = map(float, report.interval(report.iqm, *runs.T).split(" to "))
    assert 0.2 < low < 0.35 < high < 0.6  # each environment's runs are drawn from its own


def test_report_has_the_sections_of_what_was_measured(ran, tmp_path):
    base, cells = stored(ran)["ours__breakout__1"], [stored(ran)["bad__breakout__1"]]
    speed, peer = {"group": "speed", "kind": "speed"}, {"name": "pufferl", "program": "pufferl"}
    sb3 = {"name": "sb3", "program": "sb3"}
    for seed in (1, 2):
        cells += [
            variant(base, **speed, seed=seed, sps_steady=100e3, peak_rss_mib=400),
            variant(base, **speed, **peer, seed=seed, sps_steady=20e3, peak_rss_mib=900),
            variant(base, group="breakout_ours", kind="learning", seed=seed, score=860.0),
            variant(base, group="sb3", kind="learning", **sb3, seed=seed, duration=9, score=5.0),
            variant(
                base,
                group="envs",
                kind="scaling",
                seed=seed,
                name=str(seed),
                x=seed,
                x_label="environments",
            ),
            variant(
                base, group="startup_warm", kind="startup", seed=seed, seconds_to_first_update=9.0
            ),
        ]
    for cell in cells:
        if cell["name"] == "sb3":  # thirty times as slow
            cell["seconds_to_first_update"] *= 30
            cell["curve"]["time"] = [30 * seconds for seconds in cell["curve"]["time"]]
    speeds = {str(base["hardware"]["threads"]): {"bfloat16": 200.0, "float32": 50.0}}
    ceiling = dict.fromkeys(("group", "kind", "name", "program"), "ceiling")
    cells.append(variant(base, **ceiling, env_id="machine", ceiling=speeds))
    for cell in cells:
        run.store(cell, run.path_of(cell, tmp_path))
    (tmp_path / "notes.md").write_text("A thing that lost.")
    report.main([str(tmp_path)])
    text = (tmp_path / "report.md").read_text()
    titles = ["Targets", "Steps per second", "Learning", "Speed against sizes", "Start-up"]
    titles += [
        "Share of the matrix-product ceiling",
        "What was tried",
        "Failed",
        "Hardware, versions, commands",
    ]
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == titles
    for name in ("speed", "learning", "scaling"):
        assert f"({name}.png)" in text and (tmp_path / f"{name}.png").stat().st_size > 5000
    rows = {line.split(" | ")[0][2:]: line for line in text.splitlines() if line.startswith("| ")}
    assert "5 times" in rows["steady steps/s against PuffeRL 3.0.0, paired (ours)"]
    assert "**met**" in rows["peak resident memory"]
    assert "**met**" in rows["mean score of the last games in training, actions sampled"]
    assert (
        "30 times"
        in rows["seconds to the score that RecurrentPPO (SB3-contrib) ends at, its by ours"]
    )
    assert "not met" in rows["time to the first update, second start"]
    assert any(
        "2 of 2 in time" in row for what, row in rows.items() if "the first checkpoint" in what
    )
    cpu, commit = base["hardware"], base["git_commit"][:7]
    assert (
        f"CPU: {cpu['cpu']}, {cpu['instruction_set']}, {cpu['cores']} cores. Commit: {commit}."
        in text
    )
    assert (
        "ppo_lstm_puffer.py --env-id breakout" in text
        and "A thing that lost." in text
        and "exit code 2" in text
    )


def test_report_of_little_says_little(ran, tmp_path):
    cell = stored(ran)["ours__breakout__1"]
    run.store(cell, run.path_of(cell, tmp_path))
    report.main([str(tmp_path)])
    text = (tmp_path / "report.md").read_text()
    assert (
        "## Steps per second" not in text
        and "## Start-up" not in text
        and "## Hardware, versions, commands" in text
    )
    with pytest.raises(SystemExit, match="no finished cell"):
        report.main([str(tmp_path / "nothing")])


def test_ceiling_measures_products(tmp_path, monkeypatch):
    monkeypatch.setattr(ceiling, "SHAPES", [(64, 64, 64), (32, 64, 128)])
    monkeypatch.setattr(
        sys,
        "argv",
        ["ceiling.py", "--seconds", "0.1", "--folder", str(tmp_path), "--device", "cpu"],
    )
    ceiling.main()
    row = run.read_rows(tmp_path)[1]
    assert all(
        speeds["bfloat16"] > 0 and speeds["float32"] > 0 for speeds in row["ceiling"].values()
    )
    assert {tuple(product["shape"]) for product in row["products"]} == {(64, 64, 64), (32, 64, 128)}


# Ablations: what is taken out is out, and nothing else (`carry` executes the module anew: in tests/test_learning.py, in a process of its own).


@pytest.fixture
def without(monkeypatch):
    """Takes a part out, until the end of the test."""
    for name in ("lstm_forward", "compute_advantages", "draw_minibatch"):
        monkeypatch.setattr(ppo, name, getattr(ppo, name))
    return lambda part: ablate.PARTS[part]()


def advantages(ratio: float = 0.5, next_value: float = 7.0) -> torch.Tensor:
    values = torch.cat((torch.arange(8.0).view(4, 2), torch.full((1, 2), next_value)))
    rewards, valid, ratios = torch.ones(4, 2), torch.ones(4, 2), torch.full((4, 2), ratio)
    args = ppo.Args(gamma=0.9, gae_lambda=0.8)
    return ppo.compute_advantages(values, rewards, torch.zeros(5, 2), valid, ratios, args)


def test_without_bootstrap_the_last_advantage_is_zero_and_the_next_value_is_not_seen(without):
    assert (advantages()[-1] != 0).all() and not torch.equal(
        advantages(next_value=7.0), advantages(next_value=8.0)
    )
    without("bootstrap")
    assert (advantages()[-1] == 0).all() and (advantages()[:-1] != 0).any()
    assert torch.equal(advantages(next_value=7.0), advantages(next_value=8.0))


def test_without_vtrace_the_ratio_is_not_seen(without):
    on_policy = advantages(ratio=1.0)
    assert not torch.equal(advantages(ratio=0.5), on_policy)
    without("vtrace")
    assert torch.equal(advantages(ratio=0.5), on_policy)


def test_without_reset_the_lstm_runs_on_across_the_ends_of_episodes_in_both_directions(without):
    torch.manual_seed(0)
    x, h, c, weight = (torch.randn(*shape) for shape in ((3, 2, 4), (2, 4), (2, 4), (16, 8)))
    ends = torch.tensor([0.0, 1.0, 0.0]).unsqueeze(1).expand(3, 2)

    def gradients(dones: torch.Tensor) -> list[torch.Tensor]:
        given = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        outputs = ppo.lstm_outputs(given[0], h, c, dones, given[1], torch.zeros(16))
        return [outputs.detach(), *torch.autograd.grad(outputs.sum(), given)]

    uninterrupted = gradients(torch.zeros(3, 2))
    assert not any(map(torch.equal, gradients(ends), uninterrupted))
    without("reset")
    assert all(map(torch.equal, gradients(ends), uninterrupted))


def drawn(alpha: float, beta: float, first_ratio=1.0, valid_share=0.8) -> ppo.Minibatch:
    """4 of 16 segments of 8 steps, of which some do not count."""
    generator = torch.Generator().manual_seed(3)
    values, rewards = (torch.randn(T, 16, generator=generator) for T in (9, 8))
    valid = (torch.rand(9, 16, generator=generator) < valid_share).float()
    ratio = torch.ones(8, 16)
    ratio[0] = first_ratio
    uniform = torch.rand(17, generator=generator)
    args = ppo.Args(prio_alpha=alpha, minibatch_size=32, num_steps=8)
    dones = torch.zeros(9, 16)
    inputs = values, rewards, dones, valid, ratio, uniform, torch.tensor(beta), args
    return ppo.draw_minibatch(*inputs)[0]


def test_without_rho_a_steps_own_ratio_is_not_in_its_advantage(without):
    expected = drawn(alpha=0, beta=0).advantages
    assert not torch.allclose(drawn(alpha=0, beta=0, first_ratio=0.5).advantages, expected)
    without("rho")
    changed = drawn(alpha=0, beta=0, first_ratio=0.5)
    torch.testing.assert_close(changed.advantages, expected)
    torch.testing.assert_close(drawn(alpha=0, beta=0).advantages, expected)


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
    """A group of a plan with its first program alone, at sizes that a test has time for, on the CPU."""
    programs = dict([*group["programs"].items()][:1])
    for program in programs.values():
        after = (
            program.get("args", [])[2:]
            if "--config" in program.get("args", [])
            else program.get("args", [])
        )
        program["args"] = [*after, *TINY.split(), "--device", "cpu", "--num-workers", "0"]
    return group | {"programs": programs, "seeds": [1], "steps": STEPS, "duration": None}


def test_the_benchmark_of_a_gpu_runs_through_on_a_cpu_at_tiny_sizes(tmp_path):
    groups = yaml.safe_load((ROOT / "benchmark/plans/gpu.yaml").read_text())
    named = {
        program["args"][1]
        for group in groups
        for program in group["programs"].values()
        if "--config" in program.get("args", [])
    }
    assert named == {"configs/cuda.yaml"} and (ROOT / "configs/cuda.yaml").exists()
    groups = [tiny(group) for group in groups if group["kind"] != "ceiling"]
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(groups))
    environment = os.environ | {"PLAN": str(tmp_path / "plan.yaml"), "OUT": str(tmp_path / "out")}
    environment["PY"] = f"{sys.executable} tests/forks.py"  # which imports torch once for all cells
    arguments = f"{TINY} --device cpu --total-timesteps 4096"
    result = subprocess.run(
        ["bash", ROOT / "benchmark/gpu.sh"], env=environment | {"ARGS": arguments}, capture_output=True, text=True, timeout=300
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    cells = [json.loads(path.read_text()) for path in (tmp_path / "out").rglob("*.json")]
    assert len(cells) == sum(len(group["programs"]) for group in groups)
    assert {cell["status"] for cell in cells} == {"ok"}
    assert "no GPU here" in (tmp_path / "out/tests.txt").read_text()
    assert "| nothing ran |" in (tmp_path / "out/kernels.md").read_text()
    assert "Breakout" in (tmp_path / "out/report.md").read_text()


def test_kernels_are_summed_by_name_and_idle_time_is_what_none_covers(tmp_path):
    kernels = [("mm", 0, 10), ("mm", 5, 10), ("add", 30, 10)]  # name, begin, microseconds
    events = [
        {"ph": "X", "cat": "kernel", "tid": 1, "name": name, "ts": ts, "dur": dur}
        for name, ts, dur in kernels
    ]
    events.append({"ph": "X", "cat": "cpu_op", "tid": 2, "name": "aten::mm", "ts": 0, "dur": 100})
    (tmp_path / "x.pt.trace.json").write_text(json.dumps({"traceEvents": events}))
    rows = kernel_table.table(tmp_path / "x.pt.trace.json", rows=9).splitlines()[2:]
    assert rows == [
        "| `mm` | 2 | 0.02 | 50.0% | 10.0 |", "| `add` | 1 | 0.01 | 25.0% | 10.0 |", "| nothing ran | | 0.01 | 37.5% | |"
    ]  # fmt: skip


def test_an_operation_of_a_cpu_has_its_own_time_only(tmp_path):
    operations = [
        ("LSTM", 0, 100),
        ("mm", 10, 40),
        ("copy", 20, 10),
        ("mm", 60, 40),
        ("add", 100, 100),
    ]
    events = [
        {"ph": "X", "cat": "cpu_op", "tid": 1, "name": name, "ts": ts, "dur": dur}
        for name, ts, dur in operations
    ]
    (tmp_path / "x.pt.trace.json").write_text(json.dumps({"traceEvents": events}))
    rows = kernel_table.table(tmp_path / "x.pt.trace.json", rows=9).splitlines()[2:]
    assert {row.split(" | ")[0]: row.split(" | ")[-2] for row in rows[:-1]} == {
        "| `add`": "50.0%", "| `mm`": "35.0%", "| `LSTM`": "10.0%", "| `copy`": "5.0%"
    }  # fmt: skip
    assert rows[-1] == "| nothing ran | | 0.00 | 0.0% | |"
