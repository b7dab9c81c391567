"""The tools around a run: tools/play.py, tools/watch.py, tools/export.py, tools/repeat.py."""

import functools
import itertools
import json
import math
import os
import pathlib
import shutil
import signal
import sys

import gymnasium as gym
import numpy as np
import psutil
import pufferlib
import pytest
import torch
import yaml
from conftest import FOREIGN, ROOT, SCRIPT, run_script, start_script, succeed, wait_for
from forks import Fork
from PIL import Image
from reading import read_metrics

from envs.probes import Episode

sys.path.insert(0, str(ROOT / "tools"))

import environments
import export
import parallel_game
import play
import repeat
import run_folder
import watch

BREAKOUT = pathlib.Path(pufferlib.__path__[0], "resources", "breakout", "breakout_weights.bin")
BREAKOUT = [str(BREAKOUT), "--env-id", "breakout", "--hidden-size", "128"]
LONE = ["--env-id", "cartpole", "--hidden-size", "32"]  # what a file of weights does not say


class Painted(Episode):
    """Five steps, a picture that grows lighter, and the seeds of resets written to `file`."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    lengths = itertools.repeat(5)  # of the episodes of the environments that are made

    def __init__(self, render_mode=None, file=os.devnull):
        self.render_mode = render_mode
        self.file = file
        self.length = next(self.lengths)

    def reset(self, seed=None, options=None):
        if seed is not None:
            with open(self.file, "a") as file:
                print(seed, file=file)
        return super().reset(seed=seed)

    def step(self, action):
        self.t += 1
        return self.observe(), 1.0, self.t == self.length, False, {}

    def render(self):
        assert self.render_mode == "rgb_array"
        return np.full((40, 60 + self.t, 3), 50 * self.t, np.uint8)


class Unpainted(Painted):
    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        if render_mode:
            import no_such_package  # noqa: F401


gym.register("Painted-v0", entry_point=Painted)
gym.register("Unpainted-v0", entry_point=Unpainted)
PAINTED = ["painted.pt", "--env-id", "test_tools:Painted-v0", "--hidden-size", 8]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of cartpole, which no test changes."""
    words = ["--env-id", "cartpole", "--checkpoint-interval", "4"]
    return succeed(*words, cwd=tmp_path_factory.mktemp("cartpole"))


@pytest.fixture(scope="module")
def normalized(tmp_path_factory):
    words = ["--env-id", "cartpole", "--norm-obs", "--norm-rewards"]
    return succeed(*words, cwd=tmp_path_factory.mktemp("normalized"))


@pytest.fixture
def call(tmp_path, monkeypatch, capfd):
    """Calls a tool in this process and an empty folder; returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    functions = {play: play.run, watch: watch.watch, export: export.export, repeat: repeat.repeat}

    def call(tool, *arguments) -> tuple[int, str, str]:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", [tool.__file__, *map(str, arguments)])
        try:
            code = run_folder.main(functions[tool], tool.Options, tool.__doc__)
        except SystemExit as end:
            code = end.code
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
    """What is on stderr of a call that ends with exit code 2: one line, or tyro's box."""

    def refused(*arguments) -> str:
        code, out, err = call(*arguments)
        assert code == 2 and out == "", err
        if not err.startswith("╭"):
            assert err.startswith("error: ") and err.count("\n") == 1, err
        return err

    return refused


def trained_of(run) -> run_folder.Trained:
    """With its agent, its environments closed."""
    trained = run_folder.Trained(play.Options(str(run)), [])
    trained.make(1)
    trained.envs.close()
    return trained


def weights_of(observation_space, action_space, path):
    """Of a new agent, 8 wide."""
    script = run_folder.import_script(SCRIPT)
    args = script.Args(hidden_size=8, precision="float32")
    torch.save(script.Agent(observation_space, action_space, args).state_dict(), path)


# tools/play.py


def test_process_plays_the_newest_run_and_prints_json(run):
    before = sorted(run.iterdir())
    words = ["latest", "--episodes", "20", "--num-envs", "8"]
    command = {"cwd": run.parent.parent, "small": False, "script": ROOT / "tools/play.py"}
    closed = ("bash", "-c", 'exec "$0" "$@" >&-', sys.executable)  # nobody reads the JSON
    result = run_script(*words, **command, launcher=closed)
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.stderr
    result = run_script(*words, **command)
    assert result.returncode == 0, result.stderr
    scores = json.loads(result.stdout)
    assert scores["episodes"] == 20
    assert scores["env_id"] == "cartpole"
    assert scores["checkpoint"].endswith("08.pt")
    statistics = scores["episodic_return"]
    assert 0 < statistics["min"] <= statistics["mean"] <= statistics["max"]
    assert f"episodic_return: {statistics['mean']:.2f} ± " in result.stderr
    assert scores["env"]["score"] > 0
    assert sorted(run.iterdir()) == before and list(run.parent.iterdir()) == [run]


def test_environment_of_the_current_folder_may_be_called_common_print_and_change_the_folder(
    tmp_path, painted
):
    (tmp_path / "common.py").write_text("""
import os, sys, gymnasium, test_tools

class Here(test_tools.Painted):
    metadata = {"render_modes": ["rgb_array"], "render_fps": None}

    def step(self, action):
        print("a step")
        print("to the first stdout", file=sys.__stdout__)
        os.system("echo a program")
        os.chdir("/")
        return super().step(action)

gymnasium.register("Here-v0", Here)
""")
    words = [PAINTED[0], "--env-id", "common:Here-v0", *PAINTED[3:], "--gif", "here.gif"]
    result = run_script(*words, cwd=tmp_path, small=False, script=ROOT / "tools/play.py")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["episodes"] == 1
    for printed in "a step", "to the first stdout", "a program":
        assert printed in result.stderr
    assert (tmp_path / "here.gif").exists()


@pytest.fixture
def painted(tmp_path):
    """An agent of Painted's, in painted.pt."""
    weights_of(Painted.observation_space, Painted.action_space, tmp_path / "painted.pt")


def test_each_agent_plays_its_first_episodes(painted, played, monkeypatch):
    """Of three agents whose episodes last 1, 2 and 4 steps the first would end nearly all."""
    monkeypatch.setattr(Painted, "lengths", itertools.cycle((1, 2, 4)))
    lengths = played(*PAINTED, "--episodes", 7, "--num-envs", 3)["episodic_length"]
    assert lengths["mean"] == pytest.approx((1 + 1 + 1 + 2 + 2 + 4 + 4) / 7)


class Team(pufferlib.PufferEnv):
    """In the place of one in C: agent 0 never comes, 1 and 2 play episodes of 3 and 6 steps."""

    metadata = {"render_fps": 10}  # noqa: RUF012

    def __init__(self, num_envs=1, buf=None, seed=0):
        self.single_observation_space = Painted.observation_space
        self.single_action_space = Painted.action_space
        self.num_agents = 3 * num_envs
        super().__init__(buf)

    def reset(self, seed=None):
        self.t = 0
        self.masks[::3] = False
        return self.observations, []

    def step(self, actions):
        self.t += 1
        self.terminals[1::3] = self.t % 3 == 0
        self.terminals[2::3] = self.t % 6 == 0
        return self.observations, self.rewards, self.terminals, self.truncations, []

    def render(self):
        return np.full((40, 60, 3), 40 * self.t, np.uint8)


TEAM = [PAINTED[0], "--env-id", "test_tools:Team", *PAINTED[3:]]


def test_each_agent_that_comes_plays_and_few_environments_are_made(painted, played, monkeypatch):
    def note(trained, many, make=play.Trained.make):
        made.append(many)
        return make(trained, many)

    made = []
    monkeypatch.setattr(play.Trained, "make", note)
    assert played(*TEAM, "--episodes", 1)["episodic_length"]["mean"] == (3 + 6) / 2
    assert played(*TEAM, "--episodes", 100, "--num-envs", 99)["episodes"] == 68
    assert made == [1, 99, 34]


def test_gif_of_several_agents_goes_on_until_all_have_ended(painted, played):
    assert played(*TEAM, "--gif", "team.gif")["episodes"] == 2
    with Image.open("team.gif") as film:
        assert film.n_frames == 6 and film.info["duration"] == 100


def test_a_line_says_how_far_it_is_where_it_takes_long(painted, call, monkeypatch):
    monkeypatch.setattr(play.adapters, "PATIENCE", 0)
    assert "episodes: 0 of 5 after 0 steps, 0 s\n" in call(play, *PAINTED, "--episodes", 5)[2]


def test_the_newest_run_may_be_below_the_home(run, played, monkeypatch):
    monkeypatch.setenv("HOME", str(run.parent.parent))
    assert played("latest", "--output-dir", "~/runs", "--episodes", 2)["episodes"] == 2


def test_most_likely_actions_and_seeds_repeat(run, played):
    scores = [played(run, "--episodes", 5, "--deterministic", "--seed", seed) for seed in (1, 1, 2)]
    assert scores[0] == scores[1] and scores[0]["deterministic"]
    assert scores[0]["episodic_return"] != scores[2]["episodic_return"]


def test_no_environment_of_training_is_played_in(played, tmp_path):
    run = succeed(*PAINTED[1:3], "--env.file", tmp_path / "trained", cwd=tmp_path)
    assert played(run, "--episodes", 16, "--env.file", tmp_path / "played")["episodes"] == 16
    trained_in, played_in = (
        set((tmp_path / name).read_text().split()) for name in ("trained", "played")
    )
    assert len(trained_in) == len(played_in) == 16
    assert not trained_in & played_in


def test_pufferlibs_own_breakout_weights_play_as_well_here(played):
    """I7"""
    scores = played(*BREAKOUT, "--episodes", 32)
    assert scores["episodes"] == 32 and scores["episodic_return"]["mean"] >= 850  # of 864
    assert scores["episodic_length"]["min"] > 101


def test_a_normalized_agent_plays_with_its_statistics(normalized, played):
    assert played(normalized, "--episodes", 5)["episodes"] == 5
    state = trained_of(normalized).agent.state_dict()
    assert state["observation_norm.num_batches_tracked"] == 2048  # rows
    assert state["observation_norm.running_var"].min() < 0.5


def test_a_run_of_several_ranks_is_played_though_its_sizes_need_them(run, played, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    config = yaml.safe_load((copy / "config.yaml").read_text())
    sizes = {"num_steps": 32, "minibatch_size": 40960}  # two of 20,480: below the most of a rank
    (copy / "config.yaml").write_text(yaml.safe_dump(config | sizes))
    assert played(copy, "--episodes", 4)["episodes"] == 4


def test_run_of_a_fork_is_played_by_its_own_copy(tmp_path, played, refused):
    change = "class Agent(Agent):\n    def __init__(self, *arguments):\n"
    change += (
        "        super().__init__(*arguments)\n        self.more = nn.Parameter(torch.ones(3))"
    )
    before, _, after = SCRIPT.read_text().rpartition("if __name__ ==")
    fork = tmp_path / "my_fork.py"
    fork.write_text(f"{before}{change}\n\n\nif __name__ =={after}")
    forked = succeed("--env-id", "cartpole", cwd=tmp_path, script=fork)
    assert played(forked, "--episodes", 3)["episodes"] == 3
    assert played(forked, "--episodes", 3, "--script", fork)["episodes"] == 3
    line = refused(play, forked, "--script", SCRIPT)
    assert "model_cartpole_000008.pt" in line and "more" in line


def test_an_episode_that_would_not_end_is_cut_and_counts_as_it_stands(played):
    cut = played(*BREAKOUT, "--episodes", 16, "--max-steps", 100)
    assert cut["episodic_length"]["min"] == cut["episodic_length"]["max"] == 100
    assert cut["episodes"] == cut["cut"] == 16 and cut["episodic_return"]["mean"] > 0


def test_an_agent_that_never_comes_is_not_waited_for(played, call, tmp_path):
    game = parallel_game.ParallelGame()
    weights_of(game.observation_space("a"), game.action_space("a"), tmp_path / "game.pt")
    words = ["game.pt", "--env-id", "tests.parallel_game", "--hidden-size", 8]
    words += ["--env.absent", 1, "--num-envs", 1]
    assert played(*words, "--episodes", 1)["episodes"] == 2  # one of each that comes
    code, out, err = call(play, *words, "--episodes", 6)
    assert code == 0 and json.loads(out)["episodes"] == 4  # those of two agents
    assert err.startswith("4 of 6 episodes: an agent that did not come")


def test_the_newest_checkpoint_and_copy_play_with_the_numbers_that_training_reads(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    older = copy / "model_cartpole_000004.pt"
    shutil.copy(older, copy / "model_cartpole-before-a-resume_000004.pt")
    shutil.copy(older, copy / "model_best.pt")
    (copy / "a.py").write_text("raise SystemExit('of an older start')")
    os.utime(copy / "a.py", (0, 0))
    config = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(config.replace("env: {}", "env: {level: 010, size: 1e1}"))
    trained = run_folder.Trained(play.Options(str(copy)), [])
    assert trained.path.name == "model_cartpole_000008.pt"
    assert trained.args.env == {"level": "010", "size": 10.0}


def test_gif_of_breakout_and_of_a_gymnasium_environment(painted, played, tmp_path):
    size = pathlib.Path(BREAKOUT[0]).stat().st_size
    (tmp_path / "zeros.bin").write_bytes(bytes(size))  # it stands still, and the balls are lost
    words = ["zeros.bin", *BREAKOUT[1:], "--deterministic", "--gif", "game.gif"]
    assert played(*words)["episodes"] == 1
    with Image.open("game.gif") as film:
        assert film.n_frames > 30
        assert len(film.convert("RGB").getcolors(10000)) > 20, "bricks, ball, paddle and text"
    trained_so = ["--env.render_mode", "null"]
    film = played(*PAINTED, *trained_so, "--gif", "painted.gif")
    assert film["episodic_length"]["mean"] == 5
    with Image.open("painted.gif") as film:  # as wide as the widest picture
        assert film.size == (64, 40) and film.n_frames == 5 and film.info["duration"] == 100


def test_what_an_environment_lacks_for_drawing_is_named(painted, refused):
    words = [PAINTED[0], "--env-id", "test_tools:Unpainted-v0", *PAINTED[3:]]
    assert "no_such_package" in refused(play, *words, "--gif", "unpainted.gif")


# tools/watch.py


def screen(folder, rows: list[dict], tail: str = "") -> pathlib.Path:
    """A run's folder with these rows of metrics.jsonl, and a beginning of another."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("exp_name: mine\nenv_id: breakout\ntotal_timesteps: 1000\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return folder


def locked(run):
    """Its metrics.jsonl, held as by a training process."""
    file = (run / "metrics.jsonl").open("a")
    pufferlib.adapters.lock(file)
    return file


ROW = {"step": 500, "iteration": 5, "time": 9.0, "sps": 50.0, "learning_rate": 0.01}
TERMINAL = functools.partial(watch.Console, force_terminal=True, width=100)


def test_watch_shows_the_end_of_a_finished_run_and_draws_it(run, call, tmp_path):
    code, out, err = call(watch, run, "--once")
    assert code == 0 and err == ""
    row = [row for row in read_metrics(run) if "sps" in row][-1]
    words = ["2,048 of 2,048", "completed", "score", "policy_loss", "CPU", "RAM", "█", run.name]
    words += [f"{100 * row['time/update']:.0f} %", watch.number(row["losses/entropy"])]
    assert [word for word in words if word not in out] == []
    assert call(watch, run, "--svg", tmp_path / "dashboard.svg")[0] == 0
    shown = (tmp_path / "dashboard.svg").read_text()
    assert "<svg" in shown and "entropy" in shown and "steps/s" in shown


def test_watch_shows_a_run_that_is_on_on_this_host_or_another(tmp_path, call, monkeypatch):
    rows = [ROW | {"step": 100, "env/score": 3.0}, ROW]
    run = screen(tmp_path / "half", rows, tail='{"step": 600, "iter')
    with locked(run):
        code, out, _ = call(watch, run)  # stdout is no terminal: once
    assert code == 0 and "500 of 1,000" in out and "0:00:10 left" in out
    assert "score: 3 to 3" in out, "the newest value, though its row is not the last"

    assert "0:00:10 left" in call(watch, run)[1], "its lock may be another host's"

    def no_locks(*_):
        raise OSError

    os.utime(run / "metrics.jsonl", (0, 0))
    monkeypatch.setattr(watch.fcntl, "flock", no_locks)
    assert "silent for" in call(watch, run)[1]


@pytest.mark.parametrize("rows", [[], [ROW]])
def test_watch_leaves_a_run_that_was_killed(tmp_path, call, monkeypatch, rows):
    monkeypatch.setattr(watch, "Console", TERMINAL)
    monkeypatch.setattr(watch.time, "sleep", None)  # it does not wait
    run = screen(tmp_path / "dead", rows)
    os.utime(run / "metrics.jsonl", (0, 0))
    code, out, _ = call(watch, run)
    assert code == 0 and "not running (killed?)" in out


def test_watch_draws_what_is_finite(tmp_path, call):
    rows = [ROW | {"env/score": score} for score in (math.nan, 0.0, 8.0, math.inf)]
    out = call(watch, screen(tmp_path / "odd", rows))[1]
    assert "score: 0 to 8" in out and "  █" in out


@pytest.mark.parametrize("height", [24, 40])
def test_watch_shows_the_losses_whatever_the_height(tmp_path, height):
    run = screen(tmp_path / "small", [])
    names = [f"name_of_some_length_{i}" for i in range(7)]
    row = ROW | {f"{kind}/{name}": 0.5 for kind in ("env", "losses") for name in names}
    row |= {"episodic_return": 0.5, "time/update": 0.5}
    config = watch.read_config(run) | {"time_limit": math.inf}
    console = watch.Console(width=80)
    with console.capture() as shown:
        console.print(watch.dashboard(config, [row], run, console, height))
    shown = shown.get()
    assert shown.count("\n") <= height and [name for name in names if shown.count(name) != 2] == []
    assert "update" in shown if height == 40 else "no room for this machine, time" in shown


def test_watch_shows_an_error_as_it_is(tmp_path, call):
    error = "RuntimeError: no [wall], nor [/wall]"
    assert error in call(watch, screen(tmp_path / "[/x]", [{"exit_reason": error}]))[1]


def test_watch_follows_a_run_until_it_ends(tmp_path, call, monkeypatch):
    run = screen(tmp_path / "live", [ROW])
    end = 'ation": 10, "time": 20, "exit_reason": "time_limit"}\n'
    ends = iter(["", '{"step": 1000, "iter', end])

    def write(seconds):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(next(ends))

    monkeypatch.setattr(watch.time, "sleep", write)
    monkeypatch.setattr(watch, "Console", TERMINAL)
    with locked(run):
        code, out, _ = call(watch, run)
    assert code == 0 and next(ends, None) is None
    assert out.index("0:00:10 left") < out.index("time_limit") and "1,000 of 1,000" in out


# tools/export.py


def test_bin_and_pufferlibs_pt_play_the_same(run, call, played):
    for out in "flat.bin", "weights.pt":
        code, _, err = call(export, run, "--out", out)
        assert code == 0, err
    assert os.path.getsize("flat.bin") == 4 * 8707
    words = [*LONE, "--episodes", 5, "--num-envs", 5]
    paths = run / "model_cartpole_000008.pt", "flat.bin", "weights.pt"
    scores = [played(path, *words)["episodic_return"] for path in paths]
    assert scores[0] == scores[1] == scores[2]


def test_bin_of_convolutions_has_their_weights_in_order(call, tmp_path):
    weights_of(environments.Image.observation_space, gym.spaces.Discrete(2), tmp_path / "a.pt")
    words = ["--env-id", "tests.environments:Image-v0", "--hidden-size", 8, "--out"]
    for source, out in ("a.pt", "b.bin"), ("b.bin", "c.pt"):
        code, _, err = call(export, source, *words, out)
        assert code == 0, err
    before, after = (torch.load(tmp_path / name) for name in ("a.pt", "c.pt"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_image_policys_onnx_takes_any_batch_and_no_normalization_stands_in_its_bin(
    call, tmp_path
):
    import onnxruntime

    weights_of(environments.Image.observation_space, gym.spaces.Discrete(2), tmp_path / "a.pt")
    words = ["a.pt", "--env-id", "tests.environments:Image-v0", "--hidden-size", 8, "--norm-obs"]
    for out in "policy.onnx", "policy.bin":
        code, _, err = call(export, *words, "--out", out)
        assert code == 0, err
    session = onnxruntime.InferenceSession("policy.onnx")
    assert [item.shape[0] for item in session.get_inputs()] == ["batch"] * 4
    fork = SCRIPT.read_text().replace("x.view(x.shape[0], -1", "x.view(len(x), -1")
    (tmp_path / "fork.py").write_text(fork)
    code, _, err = call(export, *words, "--out", "policy.onnx", "--script", "fork.py")
    assert code == 2 and "for a batch of 3 alone" in err and "x.shape[0]" in err


def test_onnx_gives_the_logits_of_torch(normalized, call, refused):
    import onnxruntime

    code, out, err = call(export, normalized, "--out", "policy.onnx")
    assert code == 0 and "differs from torch by at most" in out, err
    session = onnxruntime.InferenceSession("policy.onnx")
    names = ["observation", "done", "h", "c"]
    assert [item.name for item in session.get_inputs()] == names
    assert [item.name for item in session.get_outputs()] == ["logits", "value", "next_h", "next_c"]
    agent = trained_of(normalized).agent
    torch.manual_seed(1)
    done = torch.tensor([0.0, 1, 0, 0, 1, 0])
    x, h, c = (torch.randn(6, width) for width in (4, 32, 32))
    inputs = dict(zip(names, (x.numpy(), done.numpy(), h.numpy(), c.numpy())))
    logits, value, next_h, _ = map(torch.as_tensor, session.run(None, inputs))
    cell = torch.nn.LSTMCell(32, 32)
    state = agent.lstm.state_dict()
    cell.load_state_dict({name.removesuffix("_l0"): weight for name, weight in state.items()})
    keep = (1 - done)[:, None]
    norm = agent.observation_norm
    with torch.no_grad():
        x = (x - norm.running_mean) / (norm.running_var + 1e-8).sqrt()
        expected, _ = cell(agent.policy.encoder(x.clamp(-10, 10)), (h * keep, c * keep))
        expected = (*agent.heads(expected), expected)
    torch.testing.assert_close((logits, value, next_h), expected, rtol=1e-4, atol=1e-5)
    assert "--norm-obs" in refused(export, normalized, "--out", "policy.bin")


# Wrong arguments are named; exit code 2.


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("suffix", [".pt", ".bin"])
def test_foreign_weights_are_refused(refused, tmp_path, name, suffix):
    FOREIGN[name](tmp_path / f"given{suffix}")
    assert f"given{suffix}" in refused(play, f"given{suffix}", *LONE)
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    "tool, arguments, named",
    [
        (play, "latest", "latest model_*.pt --output-dir runs"),
        (play, "RUN --episodes 0", "--episodes 0"),
        (play, "--seed 3 RUN", "RUN comes first"),
        (play, "RUN --gif game.png", "--gif game.png .gif"),
        (play, "RUN --script broken.py", "broken.py nothing_of_this_name --script"),
        (play, "RUN --hidden-size 31", "--hidden-size"),
        (play, "RUN --env.nonsense 3", "nonsense"),
        (play, "RUN --gif game.gif", "--gif game.gif cartpole xvfb-run --render"),
        (play, "RUN --render", "--render display xvfb-run"),
        (watch, "", "latest config.yaml runs"),
        (watch, "RUN --svg no/such/folder.svg", "--svg no/such/folder.svg"),
        (export, "RUN --out policy.zip", "--out policy.zip .bin .onnx .pt"),
        (export, "RUN --out no/such/folder.bin", "--out no/such/folder.bin"),
        (export, "RUN --out folder.bin", "--out folder.bin: directory"),
        (repeat, ".", "no logged row"),
    ],
)
def test_wrong_argument_is_named(run, refused, monkeypatch, tmp_path, tool, arguments, named):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    (tmp_path / "folder.bin").mkdir()
    line = refused(tool, *(run if word == "RUN" else word for word in arguments.split()))
    assert [name for name in named.split() if name not in line] == [], line


def test_damaged_configuration_is_one_line(run, refused, tmp_path):
    shutil.copytree(run, tmp_path / "given")
    for content in ("- a\n- list\n", "x: ["):
        (tmp_path / "given/config.yaml").write_text(content)
        assert all("given/config.yaml" in refused(tool, "given") for tool in (play, watch))


# tools/repeat.py


def test_run_repeats_to_the_bit_and_a_changed_one_does_not(run, call, tmp_path, monkeypatch):
    again = functools.partial(Fork, cwd=tmp_path)  # a process, but in no time
    monkeypatch.setattr(
        repeat.subprocess, "Popen", lambda words, env, stdout: again(words, env=env)
    )
    code, out, err = call(repeat, run)
    assert code == 0 and "8 of 8 rows are the same to the bit" in out, err
    changed = shutil.copytree(run, tmp_path / "changed")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[3]["losses/entropy"] = np.nextafter(rows[3]["losses/entropy"], 1)
    (changed / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    code, out, _ = call(repeat, changed, "--steps", 1100)  # of 256 steps each
    assert code == 1 and "3 of 4 rows" in out and "different at step 1024: losses/entropy" in out
    started = start_script(run, cwd=tmp_path, small=False, script=ROOT / "tools/repeat.py")
    wait_for(lambda: psutil.Process(started.pid).children(), started)
    (child,) = psutil.Process(started.pid).children()
    words = wait_for(lambda: "--output-dir" in child.cmdline() and child.cmdline())
    started.send_signal(signal.SIGHUP)  # a closed terminal
    started.communicate()
    assert not child.is_running()
    assert not os.path.exists(words[words.index("--output-dir") + 1])
    ended = shutil.copytree(run, tmp_path / "ended")
    rows = [*rows[:2], rows[2] | {"step": 700}, {"step": 700, "exit_reason": "sigint"}]
    (ended / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    code, out, _ = call(repeat, ended)
    assert code == 0 and "2 of 2 rows are the same to the bit" in out
    (ended / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows[2:]))
    assert "ended before its first regular row" in call(repeat, ended)[2]
