"""recipes/*.patch: each applies to the script as it is, runs, and does what its three lines say."""

import functools
import importlib.util
import itertools
import pathlib
import re
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pettingzoo
import pytest
import torch
from conftest import ROOT, SCRIPT, SMALL, newest_run, read_metrics, signals_kept
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from parallel_game import ParallelGame
from torch import nn

from envs.probes import Episode

NAMES = sorted(path.stem for path in (ROOT / "recipes").glob("*.patch"))
# 16 agents x 16 steps, each segment once: its first update is also its last.
FIRST_UPDATES = ["--minibatch-size", "256", "--update-epochs", "1", "--prio-alpha", "0"]
LEARN = [
    "--optimizer",
    "adam",
    "--learning-rate",
    "0.005",
    "--momentum",
    "0.9",
    "--gamma",
    "0.95",
    "--vf-clip-coef",
    "10",
    "--vf-coef",
    "0.5",
    "--update-epochs",
    "2",
    "--prio-alpha",
    "0",
    "--ent-coef",
    "0.005",
    "--gae-lambda",
    "0.9",
    "--max-grad-norm",
    "1.5",
    "--anneal",
    "linear",
    "--log-interval",
    "4",
]


# Environments, small enough to be learned in a second ---------------------------------------------


class Repeat(Episode):
    """Action 1 `length` times is worth 1; another one ends the episode. Shown is the share done."""

    observation_space = Box(0, 1, (1,), np.float32)
    action_space = Discrete(2)

    def __init__(self, length: int = 1):
        self.length = length

    def observe(self):
        return np.full(1, self.t / self.length, np.float32)

    def step(self, action):
        self.t += 1
        won = bool(action == 1 and self.t == self.length)
        return self.observe(), float(won), won or action != 1, False, {}


class Name(Episode):
    """Reward 1 for taking action `right`, four times. The observation is `width` zeros."""

    def __init__(self, right: int = 0, width: int = 2, actions: int = 2):
        self.right = right
        self.observation_space = Box(-1, 1, (width,), np.float32)
        self.action_space = Discrete(actions)

    def step(self, action):
        assert action in self.action_space
        self.t += 1
        return self.observe(), float(action == self.right), self.t == 4, False, {}


class Corridor(Episode):
    """From the middle to the right or left; reward 1 for the 8th step outwards, within 40.

    Shown is the place / 8; where it left is env/place.
    """

    observation_space = Box(-1, 1, (1,), np.float32)
    action_space = Discrete(2)

    def begin(self):
        self.place = 0

    def observe(self):
        return np.full(1, self.place / 8, np.float32)

    def step(self, action):
        self.t += 1
        self.place += 1 if action else -1
        left = abs(self.place) == 8
        info = {"place": self.place} if left else {}
        return self.observe(), float(left), left, self.t == 40, info


class Tile(Episode):
    """A 3 x 3 grid, empty but for a tile of 0 to 7 in the middle: reward 1 for its parity."""

    observation_space = Box(0, 7, (3, 3), np.int8)
    action_space = Discrete(2)

    def observe(self):
        self.grid = np.zeros((3, 3), np.int8)
        self.grid[1, 1] = self.np_random.integers(8)
        return self.grid

    def step(self, action):
        reward = float(action == self.grid[1, 1] % 2)
        self.t += 1
        return self.observe(), reward, self.t == 4, False, {}


class Doors(Episode):
    """In each of len(nvec) walls half of the doors are open, says the mask; one of them is named.

    The reward is the share of walls where that one is taken; four steps. A closed door ends it
    with -1.
    """

    def __init__(self, nvec=(4,)):
        self.nvec = nvec
        shape = (sum(nvec),)
        parts = ("observation", Box(0, 1, shape, np.float32)), ("action_mask", Box(0, 1, shape))
        self.observation_space = Dict(parts)  # in this order: the mask is not in front
        self.action_space = MultiDiscrete(nvec) if len(nvec) > 1 else Discrete(*nvec)

    def observe(self):
        self.open = [self.np_random.permutation(n)[: n // 2] for n in self.nvec]

        def flags(many):
            walls = [np.isin(np.arange(n), doors[:many]) for n, doors in zip(self.nvec, self.open)]
            return np.concatenate(walls).astype(np.float32)

        return {"observation": flags(1), "action_mask": flags(None)}

    def step(self, action):
        taken = list(zip(np.ravel(action), self.open))
        closed = not all(door in doors for door, doors in taken)
        reward = -1.0 if closed else float(np.mean([door == doors[0] for door, doors in taken]))
        self.t += 1
        return self.observe(), reward, closed or self.t == 4, False, {}


class Scene(Episode):
    """An image, bright on one side, among other numbers; `lamp` swaps the side that is asked for."""

    def __init__(self, shape=(36, 40, 3)):
        self.observation_space = Dict(
            {
                "clock": Box(0, 2000, (2,), np.float32),
                "picture": Box(0, 255, shape, np.uint8),
                "zlamp": Discrete(2),
            }
        )
        self.action_space = Discrete(2)
        self.shape = shape

    def observe(self):
        side = self.np_random.integers(2)
        lamp = self.np_random.integers(2)
        self.right = side ^ lamp
        picture = (np.arange(np.prod(self.shape)) % 64).astype(np.uint8).reshape(self.shape)
        wide = np.argsort(self.shape)[-1]
        half = np.split(np.moveaxis(picture, wide, 0), 2)[side]
        half += 150
        clock = np.array([1000 + self.t, 0.5], np.float32)
        return {"clock": clock, "picture": picture, "zlamp": lamp}

    def step(self, action):
        reward = float(action == self.right)
        self.t += 1
        return self.observe(), reward, self.t == 4, False, {}


class Turns(ParallelGame):
    """The mask forbids action 2 and, at every third step, all: nobody's turn."""

    def observation_space(self, agent):
        mask = Box(0, 1, (3,), np.int8)
        return Dict({"observation": super().observation_space(agent), "action_mask": mask})

    def action_space(self, agent):
        return Discrete(3)

    def observe(self):
        mask = np.array([1, 1, 0], np.int8) * (self.t % 3 < 2)
        observations = super().observe().items()
        return {agent: {"observation": seen, "action_mask": mask} for agent, seen in observations}


class Duel(pettingzoo.ParallelEnv):
    """Two agents name one of three numbers; the higher gets 1, the lower -1; four rounds."""

    metadata = {"name": "duel", "render_modes": []}  # noqa: RUF012
    render_mode = None

    def __init__(self):
        self.possible_agents = ["a", "b"]
        self.agents = []

    def observation_space(self, agent):
        return Box(0, 1, (1,), np.float32)

    def action_space(self, agent):
        return Discrete(3)

    def observe(self):
        return {agent: np.zeros(1, np.float32) for agent in self.possible_agents}

    def reset(self, seed=None, options=None):
        self.t = 0
        self.agents = list(self.possible_agents)
        return self.observe(), {agent: {} for agent in self.agents}

    def step(self, actions):
        self.t += 1
        agents = self.agents
        over = self.t == 4
        won = float(np.sign(int(actions["a"]) - int(actions["b"])))
        self.agents = [] if over else agents
        ends = dict.fromkeys(agents, over), dict.fromkeys(agents, False)
        return self.observe(), {"a": won, "b": -won}, *ends, {agent: {} for agent in agents}


def parallel_env(turns: bool = False):
    """So that `--env-id test_recipes` is the duel, with `--env.turns true` the other game."""
    return Turns() if turns else Duel()


for environment in (Repeat, Corridor, Tile, Doors, Scene):
    gym.register(f"Recipe{environment.__name__}-v0", entry_point=environment)
gym.register("RecipeZero-v0", entry_point=functools.partial(Name, 0, 2))
gym.register("RecipeThree-v0", entry_point=functools.partial(Name, 3, 5, 4))
gym.register("RecipeDials-v0", entry_point=functools.partial(Doors, (6, 4)))
gym.register("RecipeUnscaled-v0", entry_point=functools.partial(Scene, (1, 38, 36)))

RUNS = {  # an environment on which the recipe has something to do
    "action_masks": ["--env-id", "RecipeDoors-v0"],
    "curriculum": [
        "--env-id",
        "RecipeRepeat-v0",
        "--curriculum",
        "length=1,2,4",
        "--curriculum-return",
        "0.9",
    ],
    "custom_encoder": ["--env-id", "RecipeTile-v0"],
    "dict_image": ["--env-id", "RecipeScene-v0"],
    "gru": ["--env-id", "cartpole"],
    "mingru": ["--env-id", "cartpole"],
    "multitask": ["--env-id", "cartpole+RecipeZero-v0"],
    "reward_shaping": ["--env-id", "RecipeCorridor-v0"],
    "self_play": ["--env-id", "test_recipes", "--num-envs", "8", "--opponent-interval", "2"],
    "stages": ["--env-id", "cartpole", "--stages", "{1000: {ent_coef: 0.05}}"],
}
TURNS = [
    "--env-id",
    "test_recipes",
    "--env.turns",
    "true",
    "--num-envs",
    "6",
    "--minibatch-size",
    "288",
]


# Applying and running -----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def fork(tmp_path_factory):
    """The script with these patches, as a module."""

    @functools.cache
    def fork(*names):
        folder = tmp_path_factory.mktemp("-".join(names) or "unpatched")
        (folder / SCRIPT.name).write_text(SCRIPT.read_text())
        for name in names:  # the first must fit as it is; later ones may find changed neighbours
            words = ["patch", f"--fuzz={2 * (name != names[0])}", SCRIPT.name]
            words.append(str(ROOT / "recipes" / f"{name}.patch"))
            result = subprocess.run(words, cwd=folder, capture_output=True, text=True)
            assert result.returncode == 0, f"{name}: {result.stdout}"
        name = folder.name.replace("-", "_")
        spec = importlib.util.spec_from_file_location(name, folder / SCRIPT.name)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and tyro look there
        spec.loader.exec_module(module)
        return module

    return fork


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Trains in this process, eagerly, and returns the lines of metrics.jsonl."""
    monkeypatch.chdir(tmp_path)

    def train(module, *flags) -> list[dict]:
        small = [] if "--resume" in flags else SMALL
        args, resumed = module.parse_args([*small, *map(str, flags)])
        with signals_kept():
            assert module.main(args, resumed) == 0
        return read_metrics(newest_run(tmp_path))

    return train


@pytest.fixture
def record(monkeypatch):
    """The function of that name works as before, and of each call a note is added to a list.

    A note is `note(result, *arguments)`.
    """

    def record(owner, name, note) -> list:
        notes = []
        original = getattr(owner, name)

        def recorded(*arguments, **named):
            result = original(*arguments, **named)
            notes.append(note(result, *arguments))
            return result

        monkeypatch.setattr(owner, name, recorded)
        return notes

    return record


def agent_of(module, observation_space, action_space, hidden_size=8):
    """An agent in float32."""
    args = module.Args(hidden_size=hidden_size, precision="float32")
    return module.Agent(observation_space, action_space, args)


def vector_of(agent) -> torch.Tensor:
    return nn.utils.parameters_to_vector(agent.parameters()).detach()


def last_checkpoint() -> dict[str, torch.Tensor]:
    """The newest model in the working folder."""
    return torch.load(max(newest_run(".").glob("model_*.pt")))


def final(rows: list[dict], key: str) -> float:
    return float(np.mean([row[key] for row in rows if key in row][-3:]))


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_gives_three_lines_of_why_and_then_the_diff(name):
    lines = (ROOT / "recipes" / f"{name}.patch").read_text().splitlines()
    assert all(lines[:3])
    assert lines[3:6] == ["", "--- a/ppo_lstm_puffer.py", "+++ b/ppo_lstm_puffer.py"]


@pytest.mark.parametrize(
    ("names", "flags"),
    [
        *(pytest.param([name], RUNS[name], id=name) for name in NAMES),
        pytest.param(["action_masks"], ["--env-id", "RecipeDials-v0"], id="masks of MultiDiscrete"),
        pytest.param(["action_masks"], TURNS, id="masks of nothing but zeros"),
        pytest.param(["action_masks", "gru"], RUNS["action_masks"], id="masks and gru"),
        pytest.param(["mingru", "action_masks"], RUNS["action_masks"], id="masks and mingru"),
    ],
)
def test_ratio_is_one_before_a_segments_first_update(names, flags, fork, train, record):
    # Eight segments, with episode ends inside them and states carried from one to the next.
    def ratio(result, *arguments):
        minibatch = arguments[-2]
        return result[1][minibatch.weight > 0].exp()  # of the steps that are trained on

    ratios = record(fork(*names), "ppo_loss", ratio)
    rows = train(fork(*names), *FIRST_UPDATES, *flags)
    assert len(rows) == len(ratios) == 8
    assert any("episodic_return" in row for row in rows)
    for ratio in ratios:
        torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipes_run_resumes(name, fork, train):
    module = fork(name)
    assert train(module, *RUNS[name])[-1]["step"] == 2048
    more = train(module, "--resume", "latest", "--total-timesteps", 4096)
    assert more[-1]["step"] == 4096


@pytest.mark.parametrize("other", ["gru", "mingru"])
@pytest.mark.parametrize("order", [1, -1], ids=["forwards", "backwards"])
def test_all_recipes_with_one_core_apply_one_after_the_other(order, other, fork):
    names = [name for name in NAMES if name != other][::order]
    text = pathlib.Path(fork(*names).__file__).read_text().splitlines()
    for name in names:
        lines = (ROOT / "recipes" / f"{name}.patch").read_text().splitlines()[6:]
        assert {line[1:] for line in lines if line.startswith("+")} <= set(text)


def test_recipes_combine(fork, train):
    module = fork("gru", "stages", "multitask")
    stages = ["--stages", "{1000: {learning_rate: 0}}"]
    rows = train(module, *RUNS["multitask"], "--norm-obs", "--no-clip-rewards", *stages)
    state = last_checkpoint()
    assert state["lstm.weight_hh_l0"].shape == (3 * 32, 32)
    task = state["observation_norm.0.running_mean"][-2:]  # one-hot
    assert task.tolist() == pytest.approx([0.5, 0.5], abs=0.1)
    assert rows[-1]["learning_rate"] == 0 < rows[0]["learning_rate"]
    assert "env/RecipeZero-v0/episodic_return" in rows[-1]


def test_the_readme_lists_every_recipe():
    text = (ROOT / "recipes/README.md").read_text()
    assert sorted(re.findall(r"^\| \[(\w+)\]\(\1\.patch\) \|", text, re.M)) == NAMES


# What each one says of itself ---------------------------------------------------------------------


def test_curriculum_rises_with_success_and_only_then(fork, train):
    rows = train(fork("curriculum"), *LEARN, *RUNS["curriculum"], "--total-timesteps", 30_000)
    levels = [row["env/level"] for row in rows]
    successes = [row.get("episodic_return", 0) >= 0.9 for row in rows]
    assert levels[0] == 0 and levels[-1] == 2
    for level, success, following in zip(levels, successes, levels[1:]):
        assert following == min(2, level + success)
    lengths = {}
    for row, success in zip(rows, successes):
        if success:
            lengths[row["env/level"]] = row["episodic_length"]
    assert lengths == pytest.approx({0: 1, 1: 2, 2: 4}, rel=0.1)  # the environments are the level's


def test_curriculum_stays_where_success_fails(fork, train):
    rows = train(fork("curriculum"), *RUNS["curriculum"], "--curriculum-return", "1.01")
    assert {row["env/level"] for row in rows} == {0}


def test_curriculum_waits_for_episodes_of_the_new_level_which_begins_with_the_segment(
    fork, train, record
):
    # Episodes of 20 steps and more in segments of 16: some log lines have none.
    def begins(result, values, rewards, dones, *_):
        return bool(dones[0].all())

    beginnings = record(fork("curriculum"), "draw_minibatch", begins)
    words = ["--env-id", "environments:Truncating-v0", "--curriculum", "length=20,24,28"]
    rows = train(fork("curriculum"), *words, *FIRST_UPDATES)
    successes = ["episodic_return" in row for row in rows]
    assert successes == [False, True] * 2 + [False, True, False, True]
    assert [row["env/level"] for row in rows] == [0, 0, 1, 1, 2, 2, 2, 2]
    assert beginnings == [True, False, True, False, True, False, False, False]


def test_curriculum_resumes_at_its_level(fork, train):
    flags = [*RUNS["curriculum"], "--curriculum-return", "0", "--total-timesteps", 256]
    assert [row["env/level"] for row in train(fork("curriculum"), *flags)] == [0]
    words = ["--resume", "latest", "--total-timesteps", 1024, "--curriculum-return", "1.01"]
    rows = train(fork("curriculum"), *words)
    assert [row["env/level"] for row in rows] == [0, 1, 1, 1]


def test_multitask_reports_every_task(fork, train):
    names = ["RecipeZero-v0", "RecipeThree-v0", "cartpole"]
    words = ["--env-id", "+".join(names), "--num-envs", 24, "--log-interval", 8]
    row = train(fork("multitask"), *words)[-1]
    returns = [row[f"env/{name}/episodic_return"] for name in names]
    assert 0 < returns[0] < 4 and 0 < returns[1] < 4 and returns[2] > 8
    assert row["env/cartpole/score"] == pytest.approx(returns[2], rel=0.5)
    assert min(returns) < row["episodic_return"] < max(returns)
    assert 0 < row["time/env"] < 1


def test_multitask_learns_what_only_the_task_tells(fork, train):
    # Both show zeros and want different actions: without the task, returns add up to 4 at best.
    words = ["--env-id", "RecipeZero-v0+RecipeThree-v0", "--total-timesteps", 12_000]
    rows = train(fork("multitask"), *LEARN, *words)
    assert final(rows, "env/RecipeZero-v0/episodic_return") >= 3
    assert final(rows, "env/RecipeThree-v0/episodic_return") >= 3


def test_multitask_pads_observations_and_names_the_task(fork):
    module = fork("multitask")
    env_id = "RecipeZero-v0+cartpole+RecipeThree-v0"
    envs = module.make_envs(module.Args(env_id=env_id, num_envs=6, num_workers=0), 1)
    envs.reset()
    agents, observations, *columns = envs.receive()
    envs.close()
    assert (envs.num_agents, agents, observations.shape) == (6, slice(0, 6), (6, 5 + 3))
    assert [column.shape for column in columns] == [(6,)] * 3
    np.testing.assert_array_equal(observations[:, 5:], np.eye(3).repeat(2, axis=0))
    assert observations[2:4, :4].all()  # cartpole starts near zero, never at it
    assert not observations[:, 4].any()


def test_shaped_rewards_of_an_episode_add_up_to_the_potential_it_began_with(fork):
    # Along an episode the discounted potentials cancel, whatever the actions.
    module = fork("reward_shaping")
    args = module.Args(gamma=0.9, shaping_coef=3.0)
    torch.manual_seed(1)
    observations = torch.randn(6, 2, 3)
    dones = torch.zeros(6, 2)
    dones[3] = 1  # o_3 begins another episode
    shaped = module.shape_rewards(torch.zeros(5, 2), observations, dones, args)
    discount = 0.9 ** torch.arange(5.0).unsqueeze(1)
    potentials = 3.0 * module.potential(observations)
    torch.testing.assert_close((discount * shaped)[:3].sum(0), -potentials[0])
    rest = (discount[:2] * shaped[3:]).sum(0)
    torch.testing.assert_close(rest, 0.9**2 * potentials[5] - potentials[3])
    more = module.shape_rewards(torch.ones(5, 2), observations, dones, args)
    torch.testing.assert_close(more, shaped + 1)


@pytest.mark.parametrize("sign", [1, -1])
def test_shaped_rewards_change_behaviour(sign, fork, train, monkeypatch):
    # Both exits are worth the same; the potential, higher on one side, decides.
    module = fork("reward_shaping")
    monkeypatch.setattr(module, "potential", lambda observations: sign * observations[..., 0])
    flags = ["--shaping-coef", 4, "--total-timesteps", 6000]
    rows = train(module, *LEARN, *RUNS["reward_shaping"], *flags)
    assert final(rows, "env/place") * sign >= 6


def test_stages_switch_where_they_should(fork, train, record):
    # Segments of 256 steps: the one from 512 on is the first that begins at or after 500.
    module = fork("stages")
    entropies = record(module, "ppo_loss", lambda result, *arguments: arguments[-1].ent_coef)
    first = "{1024: {adam_learning_rate: 0, learning_rate: 0}"
    stages = first + ", 500: {ent_coef: 0.5, learning_rate: 25e-2}}"
    flags = [
        "--env-id",
        "cartpole",
        "--learning-rate",
        "0.125",
        "--ent-coef",
        "0.25",
        "--anneal",
        "constant",
    ]
    flags += ["--total-timesteps", 1280, "--stages", stages]
    rows = train(module, *FIRST_UPDATES, *flags)
    assert entropies == [0.25] * 2 + [0.5] * 3
    assert [row["learning_rate"] for row in rows] == [0.125] * 2 + [0.25] * 2 + [0]
    before = last_checkpoint()
    assert module.load_checkpoint("latest", "runs")["config"]["learning_rate"] == 0.125
    # A resumed run is in its step's stage, and rates of zero leave all as it was.
    rows = train(module, "--resume", "latest", "--total-timesteps", 1536)
    assert (entropies[5:], rows[-1]["learning_rate"]) == ([0.5], 0)
    torch.testing.assert_close(last_checkpoint(), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("stages", "named"),
    [
        ("{0: {num_steps: 8}}", "num_steps"),
        ("{0: {gamma: 2}}", "gamma"),
        ("{0: {gamma: much}}", "gamma"),
        ("[1]", "must be"),
    ],
)
def test_stages_refuse_a_wrong_one_at_once(fork, capsys, stages, named):
    with pytest.raises(SystemExit) as end:
        fork("stages").parse_args(["--stages", stages])
    assert end.value.code == 2
    assert named in capsys.readouterr().err


def test_gru_with_resets_equals_a_loop_over_grucell(fork):
    torch.manual_seed(1)
    module = fork("gru")
    T = 12
    N = 5
    H = 8
    agent = agent_of(module, Box(-1, 1, (4,), np.float32), Discrete(3), H)
    cell = nn.GRUCell(H, H)
    pairs = []
    for name, parameter in agent.lstm.named_parameters():
        pairs.append((parameter, getattr(cell, name.removesuffix("_l0"))))
        nn.init.normal_(parameter, std=0.5)
        pairs[-1][1].data.copy_(parameter.data)
    x = torch.randn(T, N, H)
    h = torch.randn(N, H)
    dones = (torch.rand(T, N) < 0.3).float()
    outputs, last, _ = module.lstm_forward(x, h, h, dones, *agent.lstm_weights())
    expected = []
    for t in range(T):
        h = cell(x[t], h * (1 - dones[t]).unsqueeze(1))
        expected.append(h)
    torch.testing.assert_close(outputs, torch.stack(expected))
    torch.testing.assert_close(last, h)
    outputs.square().sum().backward()
    torch.stack(expected).square().sum().backward()
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_mingru_with_resets_equals_a_loop_over_its_definition(fork):
    torch.manual_seed(1)
    module = fork("mingru")
    T = 13
    N = 5
    H = 8
    agent = agent_of(module, Box(-1, 1, (4,), np.float32), Discrete(3), H)
    x = torch.randn(T, N, H, requires_grad=True)
    h = torch.randn(N, H, requires_grad=True)
    dones = (torch.rand(T, N) < 0.3).float()
    outputs, last, _ = module.lstm_forward(x, h, h, dones, *agent.lstm_weights())
    state = h
    expected = []
    for t in range(T):
        z, n = agent.lstm(x[t]).chunk(2, dim=1)
        z = z.sigmoid()
        state = (1 - z) * state * (1 - dones[t]).unsqueeze(1) + z * n
        expected.append(state)
    expected = torch.stack(expected)
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(last, state)
    inputs = (x, h, *agent.lstm.parameters())
    ours, theirs = (torch.autograd.grad(one.square().sum(), inputs) for one in (outputs, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "gates"), [("gru", 3), ("mingru", 2)])
def test_another_core_is_all_that_remembers_and_it_is_trained(name, gates, fork, train):
    train(fork(name), *RUNS[name], "--total-timesteps", 256)
    before = last_checkpoint()
    train(fork(name), "--resume", "latest", "--total-timesteps", 512)
    after = last_checkpoint()
    core = {name for name in after if "lstm" in name or "cell" in name}
    assert core and core == {name for name in after if len(after[name]) == gates * 32}
    assert not any(torch.equal(after[name], before[name]) for name in core)


@pytest.mark.parametrize(("env_id", "least"), [("RecipeDoors-v0", 3.6), ("RecipeDials-v0", 2.6)])
def test_masked_actions_are_never_taken_and_the_rest_is_learned(env_id, least, fork, train):
    # Open doors at random: 2 on one wall of four, 1.67 on walls of six and four.
    flags = [*LEARN, "--env-id", env_id, "--total-timesteps", 16_000]
    rows = train(fork("action_masks"), *flags)
    assert {row["episodic_length"] for row in rows} == {4}
    assert min(row["episodic_return_min"] for row in rows) >= 0
    assert final(rows, "episodic_return") >= least
    rows = train(fork(), *flags, "--total-timesteps", 1024)
    assert rows[0]["episodic_return_min"] == -1


def masked(module, width: int):
    """An agent for MultiDiscrete([3, 2]) and `width` numbers, the last five of them the mask."""
    space = Box(-1, 1, (width,), np.float32)
    space.mask_columns = slice(width - 5, width)
    return agent_of(module, space, MultiDiscrete([3, 2]))


def test_probabilities_are_those_of_the_allowed_actions_alone(fork):
    torch.manual_seed(1)
    agent = masked(fork("action_masks"), 7)
    logits = torch.randn(5, requires_grad=True)
    observations = torch.cat((torch.randn(2), torch.tensor([1.0, 0, 1, 0, 1])))
    allowed = agent.mask(logits, observations)
    first = torch.distributions.Categorical(logits=logits[[0, 2]])
    for action, place in ((0, 0), (2, 1)):
        logprob, entropy = agent.evaluate_actions(allowed, torch.tensor([action, 1]))
        torch.testing.assert_close(logprob, first.log_prob(torch.tensor(place)))
        torch.testing.assert_close(entropy, first.entropy())
    actions, _ = agent.sample(allowed.expand(10_000, 5), agent.sampling_noise(10_000))
    shares = nn.functional.one_hot(actions[:, 0], 3).float().mean(0)
    torch.testing.assert_close(shares[[0, 2]], first.probs, rtol=0, atol=0.03)
    assert shares[1] == 0 and actions[:, 1].all()
    (grad,) = torch.autograd.grad(logprob + entropy, logits)
    assert grad.isfinite().all() and (grad != 0).tolist() == [True, False, True, False, False]


def test_a_mask_of_zeros_gives_numbers_and_no_gradient(fork):
    agent = masked(fork("action_masks"), 5)
    logits = torch.randn(5, requires_grad=True)
    allowed = agent.mask(logits, torch.zeros(5))
    actions, logprob = agent.sample(allowed, agent.sampling_noise())
    _, entropy = agent.evaluate_actions(allowed, actions)
    torch.testing.assert_close(torch.stack((-logprob, entropy)), torch.tensor([6.0, 6.0]).log())
    (grad,) = torch.autograd.grad(logprob + entropy, logits)
    assert not grad.any()


@pytest.mark.parametrize(
    ("name", "env_id", "named"),
    [
        ("action_masks", "cartpole", "action_mask"),
        ("action_masks", "CartPole-v1", "action_mask"),
        ("action_masks", "environments:DictObs-v0", "action_mask"),
        ("dict_image", "breakout", "image"),
        ("dict_image", "environments:DictObs-v0", "image"),
        ("multitask", "RecipeZero-v0+Pendulum-v1", "Discrete"),
    ],
)
def test_environments_without_what_the_recipe_needs_are_refused(name, env_id, named, fork, capfd):
    module = fork(name)
    with pytest.raises(SystemExit) as end:
        module.make_envs(module.Args(env_id=env_id, num_envs=2, num_workers=0), 1)
    assert end.value.code == 2
    assert named in capfd.readouterr().err


def test_encoder_takes_a_tiles_number_for_a_name(fork):
    # Other numbers for the same tiles, and the convolution's channels in that order: the same.
    torch.manual_seed(1)
    agent = agent_of(fork("custom_encoder"), Box(0, 7, (5, 6), np.int8), Discrete(2), 16)
    grids = torch.randint(0, 8, (2, 3, 5, 6), dtype=torch.int8)
    names = torch.randperm(8)
    renamed = names[grids.long()].to(torch.int8)
    features = agent.encode(grids)
    assert features.shape == (2, 3, 16)
    assert not torch.allclose(features, agent.encode(renamed), atol=0.01)
    layers = agent.policy.encoder.modules()
    convolution = next(layer for layer in layers if isinstance(layer, nn.Conv2d))
    convolution.weight.data = convolution.weight.data[:, names.argsort()]
    torch.testing.assert_close(agent.encode(renamed), features)


def test_encoder_learns_what_tiles_mean(fork, train):
    flags = [*LEARN, *RUNS["custom_encoder"], "--total-timesteps", 16_000]
    assert final(train(fork("custom_encoder"), *flags), "episodic_return") >= 3.6
    assert final(train(fork(), *flags), "episodic_return") <= 3  # a flat layer needs longer


@pytest.mark.parametrize("env_id", ["RecipeScene-v0", "RecipeUnscaled-v0"])
def test_convolutions_see_the_image_of_a_dict_and_the_linear_layer_the_rest(env_id, fork, record):
    module = fork("dict_image")
    envs = module.make_envs(module.Args(env_id=env_id, num_envs=3, num_workers=0), 1)
    agent = agent_of(module, envs.observation_space, envs.action_space)
    agent.dtype = torch.bfloat16
    envs.reset()
    _, observations, *_ = envs.receive()
    envs.close()
    made = gym.make(env_id).unwrapped
    made.reset(seed=0)
    shape = made.observation_space["picture"].shape
    pictures = torch.as_tensor(observations)[:, 2:-2].view(3, *shape)
    layers = agent.policy.encoder[0]
    seen = []
    for layer in layers.convolutions[0], layers.linear:
        layer.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
    assert agent.encode(torch.as_tensor(observations)[None]).shape == (1, 3, 8)
    expected = pictures.permute(0, 3, 1, 2) if shape[2] == 3 else pictures
    torch.testing.assert_close(seen[0], expected, rtol=0, atol=0)
    assert 0.5 < seen[0].max() <= 1
    assert seen[1].dtype == torch.float32
    numbers = torch.cat((seen[1][:, :2], seen[1][:, -2:]), dim=1)
    assert numbers[:, :3].tolist() == [[1000, 0.5, one[2]] for one in numbers.tolist()]
    assert numbers[:, 2:].sum(1).tolist() == [1, 1, 1]  # the lamp, one-hot


def test_self_play_beats_what_stands_still_and_not_what_learns(fork, train):
    # The highest number is best. Against random play it wins two of four rounds and loses none.
    flags = [*LEARN, *RUNS["self_play"], "--total-timesteps", 16_000, "--opponent-interval"]
    still = train(fork("self_play"), *flags, 1_000_000)
    assert final(still, "episodic_return") >= 2
    learning = train(fork("self_play"), *flags, 1)
    assert abs(final(learning, "episodic_return")) <= 0.5


def test_self_play_renews_the_opponent_every_interval_and_keeps_it_in_the_checkpoint(fork, train):
    # A checkpoint after every segment; the opponent is the learner of before segments 0, 2, 4, 6.
    module = fork("self_play")
    train(module, *RUNS["self_play"], "--checkpoint-interval", 1, "--total-timesteps", 1280)
    train(module, "--resume", "latest", "--total-timesteps", 2048)
    models = [torch.load(path) for path in sorted(newest_run(".").glob("model_*.pt"))]
    agent = agent_of(module, Box(0, 1, (1,), np.float32), Discrete(3), 32)
    learners = []
    for model in models:
        agent.load_state_dict(model)
        learners.append(vector_of(agent))
    assert len(models) == 8
    for i, model in enumerate(models[2:], 2):  # models[i] was written after segment i
        torch.testing.assert_close(model["opponent"], learners[i // 2 * 2 - 1], rtol=0, atol=0)
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(learners))


def test_self_play_lets_the_opponent_play_every_second_agent_and_does_not_train_on_it(
    fork, train, record
):
    def player_of(result, player, observations, *_):
        return player, len(observations)

    def valid_of(result, values, rewards, dones, valid, *_):
        return valid[:-1].clone()

    module = fork("self_play")
    players = record(module, "act", player_of)
    seen = record(module, "draw_minibatch", valid_of)
    train(module, *RUNS["self_play"], "--total-timesteps", 512)
    learner = players[0][0]
    opponent = players[1][0]
    assert players == [(learner, 8), (opponent, 8)] * (len(players) // 2)
    opponents = last_checkpoint()["opponent"]
    torch.testing.assert_close(vector_of(opponent), opponents, rtol=0, atol=0)
    assert not torch.equal(vector_of(opponent), vector_of(learner))
    assert all(valid[:, ::2].any() and not valid[:, 1::2].any() for valid in seen)
