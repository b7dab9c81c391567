"""The tools around a run: tools/play.py, tools/watch.py, tools/export.py, tools/repeat.py."""

import functools
import json
import os
import pathlib
import pickle
import shutil
import signal
import sys

import gymnasium as gym
import numpy as np
import pufferlib
import pytest
import torch
from conftest import ROOT, SCRIPT, newest_run, read_metrics, run_script

sys.path.insert(0, str(ROOT / "tools"))

import common
import export
import play
import repeat
import watch

WEIGHTS = pathlib.Path(pufferlib.__path__[0], "resources", "breakout", "breakout_weights.bin")
CARTPOLE = ["--env-id", "puffer_cartpole"]
LONE = [*CARTPOLE, "--hidden-size", 32]  # what a file of weights does not say


class Painted(gym.Env):
    """Five steps, and a picture that grows lighter."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    observation_space, action_space = (
        gym.spaces.Box(-1, 1, (2,), np.float32),
        gym.spaces.Discrete(2),
    )

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), 1.0, self.t == 5, False, {}

    def render(self):
        return np.full((40, 60, 3), 50 * self.t, np.uint8)


gym.register("Painted-v0", entry_point=Painted)


def train(folder: pathlib.Path, *arguments, script=SCRIPT) -> pathlib.Path:
    """The folder of a small finished run."""
    result = run_script(*arguments, cwd=folder, script=script)
    assert result.returncode == 0, result.stderr
    return newest_run(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of CartPole, which no test changes."""
    return train(tmp_path_factory.mktemp("cartpole"), *CARTPOLE, "--checkpoint-interval", "4")


@pytest.fixture(scope="module")
def forked(tmp_path_factory):
    """A run of a script under another name, whose network has a parameter more."""
    folder = tmp_path_factory.mktemp("fork")
    change = "class Agent(Agent):\n    def __init__(self, *arguments):\n        super().__init__(*arguments)\n"
    change += "        self.more = nn.Parameter(torch.ones(3))\n\n\nif __name__ =="
    before, _, after = SCRIPT.read_text().rpartition("if __name__ ==")
    (folder / "my_fork.py").write_text(before + change + after)
    return train(folder, *CARTPOLE, script=folder / "my_fork.py")


@pytest.fixture
def call(tmp_path, monkeypatch, capfd):
    """Calls a tool in this process and in an empty folder; returns its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    main = {play: play.run, watch: watch.watch, export: export.export, repeat: repeat.repeat}

    def call(tool, *arguments) -> tuple[int, str, str]:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", [tool.__file__, *map(str, arguments)])
        code = common.main(tool.Options, main[tool], tool.__doc__)
        return code, *capfd.readouterr()

    return call


@pytest.fixture
def played(call):
    """What tools/play.py prints on stdout."""

    def played(*arguments) -> dict:
        code, out, err = call(play, *arguments)
        assert code == 0, err
        return json.loads(out)

    return played


@pytest.fixture
def refused(call):
    """The one line on stderr of a call that ends with exit code 2."""

    def refused(*arguments) -> str:
        code, out, err = call(*arguments)
        assert code == 2 and out == "", err
        assert err.startswith("error: ") and err.count("\n") == 1 and err[:-1].isprintable(), err
        return err

    return refused


# tools/play.py


def test_process_plays_the_newest_run_and_prints_json(run):
    before = sorted(run.iterdir())
    words = ["latest", "--episodes", "20", "--num-envs", "8"]
    result = run_script(*words, cwd=run.parent.parent, small=False, script=ROOT / "tools/play.py")
    assert result.returncode == 0, result.stderr
    scores = json.loads(result.stdout)
    assert (
        scores["episodes"] == 20
        and scores["env_id"] == "puffer_cartpole"
        and scores["checkpoint"].endswith("08.pt")
    )
    for key in ("episodic_return", "episodic_length"):
        statistics = scores[key]
        assert (
            statistics["min"] <= statistics["mean"] <= statistics["max"]
            and statistics["standard_error"] > 0
        )
        assert (
            f"{key}: {statistics['mean']:.2f} ± {statistics['standard_error']:.2f}" in result.stderr
        )
    assert scores["episodic_length"]["min"] > 0 and scores["env"]["score"] > 0
    assert sorted(run.iterdir()) == before and list(run.parent.iterdir()) == [run], (
        "playing is not a run"
    )


def test_each_agent_plays_its_first_episodes(monkeypatch):
    """Three agents whose episodes last 1, 2 and 4 steps: whatever ended first would be nearly all the first agent's."""

    class Envs:
        num_agents, logs, all_lengths = 3, {}, (1, 2, 4)
        returns = lengths = np.zeros(3)  # of the episodes so far: none is near --max-steps

        def reset(self):
            self.t, self.episodes = 0, []

        def receive(self):
            ended = [
                i for i, length in enumerate(self.all_lengths) if self.t and self.t % length == 0
            ]
            self.episodes += [(i, float(self.all_lengths[i]), self.all_lengths[i]) for i in ended]
            self.t += 1
            return (
                slice(0, 3),
                np.zeros((3, 2), np.float32),
                np.zeros(3),
                np.zeros(3, np.float32),
                np.ones(3),
            )

        def send(self, actions):
            pass

    class Trained:
        envs, args = Envs(), type("Args", (), {"device": "cpu", "hidden_size": 4})
        agent = type(
            "Agent", (), {"lstm_weights": lambda: (0, 0), "sampling_noise": lambda *_, **__: None}
        )
        script = type(
            "", (), {"act": lambda agent, x, dones, h, c, *_: (torch.zeros(3, 1), None, None, h, c)}
        )

    finished = []
    play.play(Trained, play.Options("", episodes=7), finished)
    assert sorted(length for _, length in finished) == [1, 1, 1, 2, 2, 4, 4]


def test_most_likely_actions_and_seeds_repeat(run, played):
    scores = [played(run, "--episodes", 5, "--deterministic", "--seed", seed) for seed in (1, 1, 2)]
    assert scores[0] == scores[1] and scores[0]["deterministic"]
    assert scores[0]["episodic_return"] != scores[2]["episodic_return"]


def test_model_file_plays_as_its_run_does(run, played):
    one, other = (
        played(path, "--episodes", 5) for path in (run, run / "model_puffer_cartpole_000008.pt")
    )
    assert one == other


def test_pufferlibs_own_breakout_weights_play_as_well_here(played):
    scores = played(WEIGHTS, "--env-id", "breakout", "--hidden-size", 128, "--episodes", 32)
    assert scores["episodes"] == 32 and scores["episodic_return"]["mean"] >= 850  # of 864


def test_arguments_of_the_environment_and_the_script(run, played):
    assert played(run, "--episodes", 4, "--env.num_envs", 2, "--seed=7")["seed"] == 7


def test_damaged_newest_model_is_skipped_with_a_warning(run, tmp_path, call):
    shutil.copytree(run, tmp_path / "given")
    newest = tmp_path / "given/model_puffer_cartpole_000008.pt"
    newest.write_bytes(newest.read_bytes()[:-100])
    code, out, err = call(play, "given", "--episodes", 2)
    assert code == 0 and json.loads(out)["checkpoint"].endswith("model_puffer_cartpole_000004.pt")
    assert "warning: skipped given/model_puffer_cartpole_000008.pt" in err


def test_run_of_a_fork_is_played_by_its_own_copy(forked, played, refused):
    assert played(forked, "--episodes", 3)["episodes"] == 3
    assert played(forked, "--episodes", 3, "--script", forked / "my_fork.py")["episodes"] == 3
    line = refused(play, forked, "--script", SCRIPT)
    assert "model_puffer_cartpole_000008.pt" in line and "more" in line


def test_ctrl_c_ends_with_what_was_played(run, call, monkeypatch, request):
    make = common.Trained.make

    def make_impatient(self, num_envs):
        make(self, num_envs)
        receive, calls = self.envs.receive, iter(range(100))
        self.envs.receive = lambda: (
            receive() if next(calls, None) is not None else os.kill(os.getpid(), 2)
        )

    monkeypatch.setattr(common.Trained, "make", make_impatient)
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a run in this process may have set its own
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    code, out, _ = call(play, run, "--episodes", 100000)
    assert code == 130 and 0 < json.loads(out)["episodes"] < 100000


def test_an_episode_that_would_not_end_is_cut_and_counts_as_it_stands(played):
    words = [WEIGHTS, "--env-id", "breakout", "--hidden-size", 128, "--episodes", 16, "--seed", 3]
    whole = played(*words)["episodic_length"]
    cut = played(*words, "--max-steps", 100)
    assert (
        whole["min"] > 100 and cut["episodic_length"]["min"] == cut["episodic_length"]["max"] == 101
    )
    assert cut["episodes"] == 16 and cut["episodic_return"]["mean"] > 0


def test_gif_of_breakout_and_of_a_gymnasium_environment(played, tmp_path):
    from PIL import Image

    (tmp_path / "weights.bin").write_bytes(
        bytes(WEIGHTS.stat().st_size)
    )  # it stands still, and the balls are lost
    scores = played(
        "weights.bin",
        "--env-id",
        "breakout",
        "--hidden-size",
        128,
        "--deterministic",
        "--gif",
        "game.gif",
    )
    assert scores["episodes"] == 1
    with Image.open("game.gif") as film:
        assert film.format == "GIF" and film.size == (384, 220) and film.n_frames > 30
        colors = {color for _, color in film.convert("RGB").getcolors(10000)}
    assert len(colors) > 20, "bricks, ball, paddle and text"
    agent = common.import_script(SCRIPT).Agent(Painted.observation_space, Painted.action_space, 8)
    torch.save(agent.state_dict(), "painted.pt")
    words = [
        "painted.pt",
        "--env-id",
        "test_tools:Painted-v0",
        "--hidden-size",
        8,
        "--gif",
        "painted.gif",
    ]
    assert played(*words)["episodic_length"]["mean"] == 5
    with Image.open("painted.gif") as film:
        assert film.size == (60, 40) and film.n_frames == 5 and film.info["duration"] == 100


# tools/watch.py


def screen(folder, rows: list[dict], tail: str = "") -> pathlib.Path:
    """A run's folder with these rows of metrics.jsonl, and a beginning of another."""
    folder.mkdir()
    (folder / "config.yaml").write_text("exp_name: mine\nenv_id: breakout\ntotal_timesteps: 1000\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return folder


ROW = {
    "step": 500,
    "iteration": 5,
    "time": 10.0,
    "startup": 1.0,
    "sps": 50.0,
    "learning_rate": 0.01,
}


def test_watch_shows_the_end_of_a_finished_run(run, call):
    code, out, err = call(watch, run, "--once")
    assert code == 0 and err == ""
    row = [row for row in read_metrics(run) if "sps" in row][-1]
    words = (
        "2,048 of 2,048",
        "completed",
        "score",
        "policy_loss",
        "update",
        "CPU",
        "RAM",
        "█",
        run.name,
    )
    assert [word for word in words if word not in out] == []
    assert watch.number(row["losses/entropy"]) in out and watch.number(row["env/score"]) in out


def test_watch_draws_a_picture(run, call, tmp_path):
    assert call(watch, run, "--svg", tmp_path / "dashboard.svg")[0] == 0
    shown = (tmp_path / "dashboard.svg").read_text()
    assert "<svg" in shown and "entropy" in shown and "steps/s" in shown


def test_watch_shows_a_run_that_is_on(tmp_path, call):
    rows = [
        ROW | {"step": 100, "env/score": 3.0},
        ROW | {"ranks/slowest": 1, "ranks/slowest_share": 0.5},
    ]
    run = screen(tmp_path / "half", rows, tail='{"step": 600, "iter')
    code, out, _ = call(watch, run)  # stdout is no terminal: once
    assert code == 0 and "500 of 1,000" in out and "0:00:10 left" in out and "slowest_share" in out
    assert "score: 3 to 3" in out, "the newest value, though its row is not the last"
    assert "completed" not in out


def test_watch_follows_a_run_until_it_ends(tmp_path, call, monkeypatch):
    run = screen(tmp_path / "live", [ROW])
    ends = iter(
        [
            "",
            '{"step": 1000, "iter',
            'ation": 10, "time": 20, "startup": 1, "exit_reason": "time_limit"}\n',
        ]
    )

    def write(seconds):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(next(ends))

    monkeypatch.setattr(watch.time, "sleep", write)
    monkeypatch.setattr(
        watch, "Console", functools.partial(watch.Console, force_terminal=True, width=100)
    )
    code, out, _ = call(watch, run)
    assert code == 0 and next(ends, None) is None
    assert out.index("0:00:10 left") < out.index("time_limit") and "1,000 of 1,000" in out


@pytest.mark.parametrize(
    "rows", [[], [{"step": 0, "exit_reason": "sigint"}]], ids=["nothing yet", "it ended"]
)
def test_watch_shows_a_run_that_logged_nothing(tmp_path, call, rows):
    code, out, _ = call(watch, screen(tmp_path / "new", rows))
    assert code == 0 and ("sigint" if rows else "nothing logged yet") in out


def test_watch_takes_the_newest_run(tmp_path, call):
    for name, age in ("newest", 0), ("older", 100):
        (tmp_path / "runs").mkdir(exist_ok=True)
        config = screen(tmp_path / "runs" / name, [ROW]) / "config.yaml"
        os.utime(config, (config.stat().st_mtime - age,) * 2)
    assert "─ newest ─" in call(watch)[1]


def test_plot_fills_its_width():
    lines = watch.plot([0.0, 1.0, 3.0], 30, 2).plain.split("\n")
    assert [len(line) for line in lines] == [30, 30] and lines[0] == " " * 20 + "█" * 10
    assert watch.plot([5.0], 4, 1).plain == "▁▁▁▁"
    assert len(watch.plot(list(range(1000)), 30, 1).plain) == 30


# tools/export.py


def test_bin_and_back_plays_the_same(run, call, played):
    for words in ([run, "--out", "flat.bin"], ["flat.bin", *LONE, "--out", "weights.pt"]):
        code, _, err = call(export, *words)
        assert code == 0, err
    assert pathlib.Path("flat.bin").stat().st_size == 4 * 8707
    common_words = [*LONE, "--episodes", 5, "--num-envs", 5]
    paths = run / "model_puffer_cartpole_000008.pt", "flat.bin", "weights.pt"
    scores = [
        played(path, *common_words, "--precision", "float32") | {"checkpoint": ""} for path in paths
    ]
    assert scores[0] == scores[1] == scores[2]


def test_onnx_gives_the_logits_of_torch(run, call, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    code, out, err = call(export, run, "--out", "policy.onnx")
    assert code == 0 and "differs from torch by at most" in out, err
    session = onnxruntime.InferenceSession("policy.onnx")
    assert [item.name for item in session.get_inputs()] == ["observation", "done", "h", "c"]
    assert [item.name for item in session.get_outputs()] == ["logits", "value", "next_h", "next_c"]
    trained = common.Trained(export.Options(str(run)), [])
    trained.make(1)
    trained.envs.close()
    torch.manual_seed(1)
    x, done, h, c = (
        torch.randn(6, 4),
        torch.tensor([0.0, 1, 0, 0, 1, 0]),
        torch.randn(6, 32),
        torch.randn(6, 32),
    )
    logits, value, next_h, _ = session.run(
        None, dict(zip(("observation", "done", "h", "c"), map(torch.Tensor.numpy, (x, done, h, c))))
    )
    agent = trained.agent
    cell = torch.nn.LSTMCell(32, 32)
    cell.load_state_dict({name.removesuffix("_l0"): weight for name, weight in agent.lstm.items()})
    keep = (1 - done)[:, None]
    with torch.no_grad():
        expected, _ = cell(agent.encode(x[None])[0], (h * keep, c * keep))
        heads = agent.heads(expected)
    for ours, theirs in zip((expected, *heads), (next_h, logits, value)):
        torch.testing.assert_close(torch.as_tensor(theirs), ours, rtol=1e-4, atol=1e-5)


def test_onnx_without_its_packages_names_them(run, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert "pip install onnxscript onnxruntime" in refused(export, run, "--out", "policy.onnx")


# Wrong arguments are one line that names them; exit code 2.


class TouchesAFile:
    """What a hostile pickle does: loading it calls open("touched", "w")."""

    def __reduce__(self):
        return open, ("touched", "w")


FOREIGN = {
    "empty": lambda path: path.write_bytes(b""),
    "noise": lambda path: path.write_bytes(np.random.default_rng(1).bytes(5000)),
    "other_tensors": lambda path: torch.save({"layer.weight": torch.zeros(3, 3)}, path),
    "a_list": lambda path: torch.save([1, 2, 3], path),
    "hostile_pickle": lambda path: path.write_bytes(pickle.dumps(TouchesAFile())),
    "hostile_weights": lambda path: torch.save({"cell.weight_ih": TouchesAFile()}, path),
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("suffix", [".pt", ".bin"])
def test_foreign_weights_are_refused(refused, tmp_path, name, suffix):
    FOREIGN[name](tmp_path / f"given{suffix}")
    assert f"given{suffix}" in refused(play, f"given{suffix}", *LONE)
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    "tool, arguments, named",
    [
        (play, "nowhere", "nowhere"),
        (play, "latest", "latest model_*.pt --output-dir runs"),
        (play, "", "latest"),
        (play, "RUN --episodes many", "--episodes many"),
        (play, "RUN --episodes 0", "--episodes 0"),
        (play, "RUN --no-such-flag 3", "--no-such-flag"),
        (play, "RUN --script nowhere.py", "--script nowhere.py"),
        (play, "RUN --hidden-size 31", "--hidden-size"),
        (play, "RUN --env.nonsense 3", "nonsense"),
        (play, "RUN --env-id breakot", "--env-id breakot breakout"),
        (play, "RUN --gif no/such/folder.gif", "--gif no/such/folder.gif"),
        (play, "RUN --gif game.gif", "--gif game.gif puffer_cartpole xvfb-run --render"),
        (play, "RUN --render", "--render display xvfb-run"),
        (watch, "nowhere", "nowhere"),
        (watch, "RUN --no-such-flag", "--no-such-flag"),
        (watch, "", "latest config.yaml runs"),
        (export, "RUN", "--out .bin .onnx .pt"),
        (export, "RUN --out policy.zip", "--out policy.zip .bin .onnx .pt"),
        (export, "RUN --out no/such/folder.bin", "--out no/such/folder.bin"),
    ],
)
def test_wrong_argument_is_one_line_that_names_it(
    run, refused, monkeypatch, tool, arguments, named
):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    line = refused(tool, *(run if word == "RUN" else word for word in arguments.split()))
    assert [name for name in named.split() if name not in line] == [], line


def test_damaged_configuration_is_one_line(run, refused, tmp_path):
    shutil.copytree(run, tmp_path / "given")
    for content in ("- a\n- list\n", "x: [", "d: 2001-99-99"):
        (tmp_path / "given/config.yaml").write_text(content)
        assert all("given/config.yaml" in refused(tool, "given") for tool in (play, watch))


def test_script_that_does_not_load_is_named(run, refused, tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    line = refused(play, run, "--script", "broken.py")
    assert (
        "broken.py" in line
        and "nothing_of_this_name" in line
        and "--script ppo_lstm_puffer.py" in line
    )


# tools/repeat.py


def test_run_repeats_to_the_bit_and_a_changed_one_does_not(run, call, refused, tmp_path):
    code, out, err = call(repeat, run)
    rows = len(read_metrics(run))
    assert code == 0 and f"{rows} of {rows} rows are the same to the bit" in out, err
    assert call(repeat, run, "--steps", 600)[1].count("2 of 2 rows") == 1  # of 256 steps each
    changed = shutil.copytree(run, tmp_path / "changed")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[3]["losses/entropy"] = np.nextafter(rows[3]["losses/entropy"], 1)
    (changed / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    code, out, _ = call(repeat, changed)
    assert code == 1 and "3 of 8 rows" in out and "different at step 1024: losses/entropy" in out
    assert "no copy of the script" in refused(repeat, tmp_path)


def test_only_what_came_before_a_resume_is_repeated(run, tmp_path):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows[5:]:
        row["startup"] += 1
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert len(repeat.rows_of(tmp_path)) == 5
