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
from conftest import ROOT, SCRIPT, SMALL, newest_run, read_metrics
from environments import Episode
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from parallel_game import ParallelGame
from torch import nn

NAMES = sorted(path.stem for path in (ROOT / "recipes").glob("*.patch"))
# 16 agents x 16 steps, each segment in one minibatch, uniformly drawn: the first update of a segment is also its last.
FIRST_UPDATES = ["--minibatch-size", "256", "--update-epochs", "1", "--prio-alpha", "0"]
LEARN = [
    "--optimizer", "adam", "--learning-rate", "0.005", "--momentum", "0.9", "--gamma", "0.95", "--vf-clip-coef", "10", "--vf-coef", "0.5",
    "--update-epochs", "2", "--prio-alpha", "0", "--ent-coef", "0.005", "--gae-lambda", "0.9", "--max-grad-norm", "1.5", "--anneal", "linear",
    "--log-interval", "4",
]  # fmt: skip


# Environments, small enough to be learned in a second --------------------------------------------------------------------


class Repeat(Episode):
    """Take action 1 `length` times: return 1. Another action ends the episode with 0. The observation is the share done."""

    def __init__(self, length: int = 1):
        self.length = length
        self.observation_space, self.action_space = Box(0, 1, (1,), np.float32), Discrete(2)

    def step(self, action):
        self.t += 1
        won = action == 1 and self.t == self.length
        return (
            np.full(1, self.t / self.length, np.float32),
            float(won),
            bool(won or action != 1),
            False,
            {},
        )


class Name(Episode):
    """Reward 1 for taking action `right`, four times. The observation says nothing, in `width` zeros."""

    def __init__(self, right: int = 0, width: int = 2, actions: int = 2):
        self.right = right
        self.observation_space, self.action_space = (
            Box(-1, 1, (width,), np.float32),
            Discrete(actions),
        )

    def step(self, action):
        assert action in self.action_space
        self.t += 1
        return self.observe(), float(action == self.right), self.t == 4, False, {}


class Corridor(Episode):
    """Start in the middle; reward 1 for leaving, 8 steps to the right or 8 to the left, within 40. Observation: place / 8, reported as env/place."""

    def __init__(self):
        self.observation_space, self.action_space = Box(-1, 1, (1,), np.float32), Discrete(2)

    def begin(self):
        self.place = 0

    def step(self, action):
        self.t, self.place = self.t + 1, self.place + (1 if action else -1)
        left = abs(self.place) == 8
        return (
            np.full(1, self.place / 8, np.float32),
            float(left),
            left,
            self.t == 40,
            {"place": self.place} if left else {},
        )


class Units(Episode):
    """Observations around 50 and -3 with deviations 10 and 0.5; the first, if above 50, asks for action 1. Rewards are 0 or `unit`."""

    def __init__(self, unit: float = 1.0):
        self.unit = unit
        self.observation_space, self.action_space = (
            Box(-np.inf, np.inf, (2,), np.float32),
            Discrete(2),
        )

    def observe(self):
        self.shown = self.np_random.normal((50, -3), (10, 0.5)).astype(np.float32)
        return self.shown

    def step(self, action):
        reward = self.unit * float(action == (self.shown[0] > 50))
        self.t += 1
        return self.observe(), reward, self.t == 8, False, {}


class Tile(Episode):
    """A 3 x 3 grid, empty but for a tile of 0 to 7 in the middle. Reward 1 for action 1 where it is odd, else for action 0; four steps."""

    def __init__(self):
        self.observation_space, self.action_space = Box(0, 7, (3, 3), np.int8), Discrete(2)

    def observe(self):
        self.grid = np.zeros((3, 3), np.int8)
        self.grid[1, 1] = self.np_random.integers(8)
        return self.grid

    def step(self, action):
        reward = float(action == self.grid[1, 1] % 2)
        self.t += 1
        return self.observe(), reward, self.t == 4, False, {}


class Doors(Episode):
    """In each of len(nvec) walls the mask says which doors are open, half of them; the observation names an open one, one-hot. Its share of
    the reward 1 is for the walls where that one is taken; four steps. A closed door ends the episode with -1."""

    def __init__(self, nvec=(4,)):
        self.nvec, doors = nvec, sum(nvec)
        # In this order: the mask is not in front of what the environment shows.
        self.observation_space = Dict(
            [
                ("observation", Box(0, 1, (doors,), np.float32)),
                ("action_mask", Box(0, 1, (doors,), np.int8)),
            ]
        )
        self.action_space = MultiDiscrete(nvec) if len(nvec) > 1 else Discrete(*nvec)

    def observe(self):
        self.open = [self.np_random.permutation(n)[: n // 2] for n in self.nvec]
        named, mask = (
            [np.isin(np.arange(n), doors[:k]) for n, doors in zip(self.nvec, self.open)]
            for k in (1, None)
        )
        return {
            "observation": np.concatenate(named).astype(np.float32),
            "action_mask": np.concatenate(mask).astype(np.int8),
        }

    def step(self, action):
        taken = list(zip(np.ravel(action), self.open))
        closed = not all(door in doors for door, doors in taken)
        reward = -1.0 if closed else float(np.mean([door == doors[0] for door, doors in taken]))
        self.t += 1
        return self.observe(), reward, closed or self.t == 4, False, {}


class Turns(ParallelGame):
    """Three agents that end at different times. The mask forbids action 2 and, at every third step, all: nobody's turn."""

    def observation_space(self, agent):
        return Dict(
            {
                "observation": super().observation_space(agent),
                "action_mask": Box(0, 1, (3,), np.int8),
            }
        )

    def action_space(self, agent):
        return Discrete(3)

    def observe(self):
        mask = np.array([1, 1, 0], np.int8) * (self.t % 3 < 2)
        return {
            agent: {"observation": shown, "action_mask": mask}
            for agent, shown in super().observe().items()
        }


class Duel(pettingzoo.ParallelEnv):
    """Two agents name one of three numbers; the higher one gets 1, the lower one -1; four rounds."""

    metadata = {"name": "duel", "render_modes": []}  # noqa: RUF012
    render_mode = None

    def __init__(self):
        self.possible_agents, self.agents = ["a", "b"], []

    def observation_space(self, agent):
        return Box(0, 1, (1,), np.float32)

    def action_space(self, agent):
        return Discrete(3)

    def reset(self, seed=None, options=None):
        self.t, self.agents = 0, list(self.possible_agents)
        return {agent: np.zeros(1, np.float32) for agent in self.agents}, {
            agent: {} for agent in self.agents
        }

    def step(self, actions):
        self.t += 1
        agents, over = self.agents, self.t == 4
        won = float(np.sign(int(actions["a"]) - int(actions["b"])))
        self.agents = [] if over else agents
        return (
            {agent: np.zeros(1, np.float32) for agent in agents},
            {"a": won, "b": -won},
            dict.fromkeys(agents, over),
            dict.fromkeys(agents, False),
            {agent: {} for agent in agents},
        )


def parallel_env(turns: bool = False):
    """So that `--env-id test_recipes` is the duel, with `--env.turns true` the other game."""
    return Turns() if turns else Duel()


for environment in (Repeat, Corridor, Units, Tile, Doors):
    gym.register(f"Recipe{environment.__name__}-v0", entry_point=environment)
gym.register("RecipeZero-v0", entry_point=functools.partial(Name, 0, 2))
gym.register("RecipeThree-v0", entry_point=functools.partial(Name, 3, 5, 4))
gym.register("RecipeDials-v0", entry_point=functools.partial(Doors, (6, 4)))

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
    "gru": ["--env-id", "cartpole"],
    "mingru": ["--env-id", "cartpole"],
    "multitask": ["--env-id", "cartpole+RecipeZero-v0"],
    "normalize": ["--env-id", "RecipeUnits-v0", "--no-clip-rewards"],
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


# Applying and running ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def fork(tmp_path_factory):
    """The script with these patches, as a module."""

    @functools.cache
    def fork(*names):
        folder = tmp_path_factory.mktemp("-".join(names) or "unpatched")
        (folder / SCRIPT.name).write_text(SCRIPT.read_text())
        for name in (
            names
        ):  # the first must fit as it is; later ones may have a neighbour's lines around theirs
            command = [
                "patch",
                f"--fuzz={2 * (name != names[0])}",
                SCRIPT.name,
                str(ROOT / "recipes" / f"{name}.patch"),
            ]
            result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            assert result.returncode == 0, f"{name}: {result.stdout}"
        spec = importlib.util.spec_from_file_location(
            folder.name.replace("-", "_"), folder / SCRIPT.name
        )
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses and tyro look there
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
        assert module.train(args, resumed) == 0
        return read_metrics(newest_run(tmp_path))

    return train


@pytest.fixture
def record(monkeypatch):
    """The function of that name works as before, and of each call `note(result, *arguments)` is added to the list that this returns."""

    def record(owner, name, note) -> list:
        notes, original = [], getattr(owner, name)

        def recorded(*arguments, **named):
            result = original(*arguments, **named)
            notes.append(note(result, *arguments))
            return result

        monkeypatch.setattr(owner, name, recorded)
        return notes

    return record


def last_checkpoint() -> dict[str, torch.Tensor]:
    """The newest model in the working folder."""
    return torch.load(max(newest_run(".").glob("model_*.pt")), weights_only=True)


def final(rows: list[dict], key: str) -> float:
    return float(np.mean([row[key] for row in rows if key in row][-3:]))


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_gives_three_lines_of_why_and_then_the_diff(name):
    lines = (ROOT / "recipes" / f"{name}.patch").read_text().splitlines()
    assert all(lines[:3])
    assert lines[3:6:2] + lines[4:5] == ["", "+++ b/ppo_lstm_puffer.py", "--- a/ppo_lstm_puffer.py"]


@pytest.mark.parametrize(
    ("names", "flags"),
    [
        *(pytest.param([name], RUNS[name], id=name) for name in NAMES),
        pytest.param(
            ["action_masks"], ["--env-id", "RecipeDials-v0"], id="masks of a MultiDiscrete"
        ),
        pytest.param(["action_masks"], TURNS, id="masks of nothing but zeros"),
        pytest.param(["action_masks", "gru"], RUNS["action_masks"], id="masks and gru"),
        pytest.param(["mingru", "action_masks"], RUNS["action_masks"], id="masks and mingru"),
    ],
)
def test_ratio_is_one_before_a_segments_first_update(names, flags, fork, train, record):
    # Eight segments, with episode ends inside them and states carried from one to the next.
    def ratio(result, *arguments):
        _, logratio, *_ = result
        return logratio[
            arguments[-1] > 0
        ].exp()  # where the weight says that the step is trained on

    ratios = record(fork(*names), "minibatch_loss", ratio)
    rows = train(fork(*names), *FIRST_UPDATES, *flags)
    assert len(rows) == len(ratios) == 8
    assert any("episodic_return" in row for row in rows)
    for ratio in ratios:
        torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipes_run_resumes(name, fork, train):
    module = fork(name)
    assert train(module, *RUNS[name])[-1]["step"] == 2048
    assert train(module, "--resume", "latest", "--total-timesteps", 4096)[-1]["step"] == 4096


@pytest.mark.parametrize("other", ["gru", "mingru"])
@pytest.mark.parametrize("order", [1, -1], ids=["forwards", "backwards"])
def test_all_recipes_with_one_core_apply_one_after_the_other(order, other, fork):
    names = [name for name in NAMES if name != other][::order]
    text = pathlib.Path(fork(*names).__file__).read_text()
    for name in names:
        added = [
            line[1:]
            for line in (ROOT / "recipes" / f"{name}.patch").read_text().splitlines()[6:]
            if line.startswith("+")
        ]
        assert set(added) <= set(text.splitlines())


def test_recipes_combine(fork, train):
    module = fork("gru", "stages", "multitask", "normalize")
    rows = train(
        module, *RUNS["multitask"], "--no-clip-rewards", "--stages", "{1000: {learning_rate: 0}}"
    )
    assert last_checkpoint()["lstm.weight_hh_l0"].shape == (3 * 32, 32)
    assert last_checkpoint()["observation_statistics.mean"][-2:].tolist() == pytest.approx(
        [0.5, 0.5], abs=0.1
    )  # the task, one-hot
    assert rows[-1]["learning_rate"] == 0 < rows[0]["learning_rate"]
    assert "env/RecipeZero-v0/episodic_return" in rows[-1]


def test_the_readme_lists_every_recipe_with_its_diffstat():
    listed = re.findall(
        r"^\| \[(\w+)\]\((\w+)\.patch\) .*\| \+(\d+) -(\d+) \|$",
        (ROOT / "recipes/README.md").read_text(),
        re.M,
    )
    numstat = {}
    for name in NAMES:
        command = ["git", "apply", "--numstat", str(ROOT / "recipes" / f"{name}.patch")]
        plus, minus, _ = subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.split(None, 2)
        numstat[name] = (name, name, plus, minus)
    assert sorted(listed) == [numstat[name] for name in NAMES]


# What each one says of itself --------------------------------------------------------------------------------------------


def test_curriculum_rises_with_success_and_only_then(fork, train):
    rows = train(fork("curriculum"), *LEARN, *RUNS["curriculum"], "--total-timesteps", 30_000)
    levels = [row["env/level"] for row in rows]
    successes = [row.get("episodic_return", 0) >= 0.9 for row in rows]
    assert levels[0] == 0 and levels[-1] == 2
    for level, success, following in zip(levels, successes, levels[1:]):
        assert following == min(2, level + success)
    lengths = {
        row["env/level"]: row["episodic_length"]
        for row in rows
        if row.get("episodic_return", 0) >= 0.9
    }
    assert lengths == pytest.approx({0: 1, 1: 2, 2: 4}, rel=0.1)  # the environments are the level's


def test_curriculum_stays_where_success_fails(fork, train):
    rows = train(fork("curriculum"), *RUNS["curriculum"], "--curriculum-return", "1.01")
    assert {row["env/level"] for row in rows} == {0}


def test_curriculum_waits_for_episodes_of_the_new_level_which_begins_with_the_segment(
    fork, train, record
):
    # Episodes of 20 steps and more in segments of 16: some log lines have none.
    beginnings = record(
        fork("curriculum"),
        "draw_minibatch",
        lambda result, values, rewards, dones, *_: bool(dones[0].all()),
    )
    rows = train(
        fork("curriculum"),
        "--env-id",
        "environments:Truncating-v0",
        "--curriculum",
        "length=20,24,28",
        *FIRST_UPDATES,
    )
    successes = ["episodic_return" in row for row in rows]
    assert successes == [False, True] * 2 + [False, True, False, True]
    assert [row["env/level"] for row in rows] == [0, 0, 1, 1, 2, 2, 2, 2]
    assert beginnings == [True, False, True, False, True, False, False, False]


def test_curriculum_resumes_at_its_level(fork, train):
    flags = [*RUNS["curriculum"], "--curriculum-return", "0", "--total-timesteps", 256]
    assert [row["env/level"] for row in train(fork("curriculum"), *flags)] == [0]
    rows = train(
        fork("curriculum"),
        "--resume",
        "latest",
        "--total-timesteps",
        1024,
        "--curriculum-return",
        "1.01",
    )
    assert [row["env/level"] for row in rows] == [0, 1, 1, 1]


def test_multitask_reports_every_task(fork, train):
    names = ["RecipeZero-v0", "RecipeThree-v0", "cartpole"]
    rows = train(
        fork("multitask"), "--env-id", "+".join(names), "--num-envs", 24, "--log-interval", 8
    )
    returns = [rows[-1][f"env/{name}/episodic_return"] for name in names]
    assert 0 < returns[0] < 4 and 0 < returns[1] < 4 and returns[2] > 8
    assert rows[-1]["env/cartpole/score"] == pytest.approx(returns[2], rel=0.5)
    assert min(returns) < rows[-1]["episodic_return"] < max(returns)


def test_multitask_learns_what_only_the_task_tells(fork, train):
    # Both show zeros and want different actions: without the task, their returns add up to 4 at best.
    rows = train(
        fork("multitask"),
        *LEARN,
        "--env-id",
        "RecipeZero-v0+RecipeThree-v0",
        "--total-timesteps",
        12_000,
    )
    assert final(rows, "env/RecipeZero-v0/episodic_return") >= 3
    assert final(rows, "env/RecipeThree-v0/episodic_return") >= 3


def test_multitask_pads_observations_and_names_the_task(fork):
    module = fork("multitask")
    envs = module.make_envs(
        module.Args(env_id="RecipeZero-v0+cartpole+RecipeThree-v0", num_envs=6), 1
    )
    envs.reset()
    agents, observations, *columns = envs.receive()
    envs.close()
    assert (envs.num_agents, agents, observations.shape) == (6, slice(0, 6), (6, 5 + 3))
    assert [column.shape for column in columns] == [(6,)] * 3
    np.testing.assert_array_equal(observations[:, 5:], np.eye(3).repeat(2, axis=0))
    assert observations[2:4, :4].all()  # cartpole starts near zero, never at it
    assert not observations[:, 4].any()


def test_multitask_refuses_what_it_cannot_mix(fork):
    module = fork("multitask")
    with pytest.raises(module.UsageError, match="Discrete"):
        module.make_envs(module.Args(env_id="RecipeZero-v0+Pendulum-v1", num_envs=2), 1)


def test_shaped_rewards_of_an_episode_add_up_to_the_potential_it_began_with(fork):
    # Along an episode the discounted potentials cancel, whatever the actions: so the best policy is the same.
    module, gamma, coef = fork("reward_shaping"), 0.9, 3.0
    torch.manual_seed(1)
    observations, dones, zeros = torch.randn(6, 2, 3), torch.zeros(6, 2), torch.zeros(5, 2)
    dones[3] = 1  # o_3 begins another episode
    shaped = module.shape_rewards(zeros, observations, dones, gamma, coef)
    discount = gamma ** torch.arange(5.0).unsqueeze(1)
    potentials = coef * module.potential(observations)
    torch.testing.assert_close((discount * shaped)[:3].sum(0), -potentials[0])
    torch.testing.assert_close(
        (discount[:2] * shaped[3:]).sum(0), gamma**2 * potentials[5] - potentials[3]
    )
    torch.testing.assert_close(
        module.shape_rewards(zeros + 1, observations, dones, gamma, coef), shaped + 1
    )


def test_shaped_rewards_change_behaviour(fork, train):
    # Both exits are worth the same; the potential, higher on the right, decides.
    flags = [*LEARN, *RUNS["reward_shaping"], "--total-timesteps", 10_000, "--shaping-coef"]
    for coef in (1, -1):
        rows = train(fork("reward_shaping"), *flags, coef)
        assert final(rows, "env/place") * coef >= 6
        assert final(rows, "episodic_return") >= 0.9


def test_stages_switch_where_they_should(fork, train, record):
    # Segments of 256 steps: the one from 512 on is the first that begins at or after 500.
    module = fork("stages")
    entropies = record(module, "ppo_loss", lambda result, *arguments: arguments[-1].ent_coef)
    stages = "{1024: {adam_learning_rate: 0, learning_rate: 0}, 500: {ent_coef: 0.5, learning_rate: 0.25}}"
    flags = [
        "--learning-rate",
        0.125,
        "--ent-coef",
        0.25,
        "--anneal",
        "constant",
        "--total-timesteps",
        1280,
    ]
    rows = train(
        module,
        "--env-id",
        "cartpole",
        "--optimizer",
        "muon",
        *FIRST_UPDATES,
        *flags,
        "--stages",
        stages,
    )
    assert entropies == [0.25] * 2 + [0.5] * 3
    assert [row["learning_rate"] for row in rows] == [0.125] * 2 + [0.25] * 2 + [0]
    before = last_checkpoint()
    assert module.load_checkpoint("latest", "runs")["config"]["learning_rate"] == 0.125
    # A resumed run is in the stage that its step says, and a rate of zero, of both optimizers, leaves all as it was.
    rows = train(module, "--resume", "latest", "--total-timesteps", 1536)
    assert (entropies[5:], rows[-1]["learning_rate"]) == ([0.5], 0)
    torch.testing.assert_close(last_checkpoint(), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ("{0: {num_steps: 8}}", "num_steps"),
        ("{0: {gamma: 2}}", "gamma"),
        ("{0: {learning_rate: 1e-3}}", "learning_rate"),
        ("[1]", "must be"),
    ],
)
def test_stages_refuse_a_wrong_one_at_once(fork, stages, message):
    module = fork("stages")
    with pytest.raises(module.UsageError, match=message):
        module.parse_stages(module.Args(stages=stages, device="cpu"))


def test_running_statistics_are_those_of_all_rows(fork):
    torch.manual_seed(1)
    rows, statistics = 3 + 2 * torch.randn(100, 4), fork("normalize").RunningStatistics(4)
    for part in rows.split([1, 9, 60, 30]):
        statistics.update(part)
    torch.testing.assert_close(statistics.mean, rows.mean(0))
    torch.testing.assert_close(statistics.var, rows.var(0, unbiased=False))


def test_normalized_observations_have_mean_zero_and_deviation_one(fork, train, record):
    encoded = record(fork("normalize").Agent, "normalize", lambda result, *_: result)
    train(fork("normalize"), *FIRST_UPDATES, *RUNS["normalize"])
    last = encoded[-1]  # what the last update trained on
    assert last.shape == (256, 2)
    torch.testing.assert_close(last.mean(0), torch.zeros(2), rtol=0, atol=0.3)
    torch.testing.assert_close(last.std(0), torch.ones(2), rtol=0, atol=0.3)


def test_normalized_rewards_make_the_unit_of_reward_irrelevant(fork, train):
    def losses(module, unit):
        rows = train(module, *RUNS["normalize"], "--env.unit", unit, "--total-timesteps", 1024)
        return [row["losses/value_loss"] for row in rows]

    assert losses(fork("normalize"), 1000) == pytest.approx(losses(fork("normalize"), 1), rel=0.01)
    assert losses(fork(), 1000)[-1] > 1000 * losses(fork(), 1)[-1]


def test_normalized_rewards_give_returns_a_deviation_of_one(fork, train, record):
    module = fork("normalize")
    seen = record(
        module,
        "draw_minibatch",
        lambda result, values, rewards, dones, *_: (rewards.clone(), dones.clone()),
    )
    train(module, *FIRST_UPDATES, *RUNS["normalize"], "--env.unit", 1000, "--gamma", 1)
    returns, total = [], torch.zeros(16)
    for rewards, dones in seen[-4:]:
        for t in range(16):
            total = rewards[t] + (1 - dones[t]) * total
            returns.append(total)
    assert float(torch.stack(returns).std()) == pytest.approx(1, abs=0.25)


def test_normalization_goes_on_with_its_statistics(fork, train):
    train(fork("normalize"), *RUNS["normalize"])
    before = last_checkpoint()
    train(fork("normalize"), "--resume", "latest", "--total-timesteps", 2304)
    after = last_checkpoint()
    for name in ("observation_statistics.count", "return_statistics.count"):
        assert 0 < after[name] - before[name] <= 256 < 1500 < before[name]
    torch.testing.assert_close(
        after["observation_statistics.mean"], torch.tensor([50.0, -3.0]), rtol=0.05, atol=0
    )


def test_gru_with_resets_equals_a_loop_over_grucell(fork):
    torch.manual_seed(1)
    module, (T, N, H) = fork("gru"), (12, 5, 8)
    agent = module.Agent(Box(-1, 1, (4,), np.float32), Discrete(3), H)
    cell = nn.GRUCell(H, H)
    for name, parameter in agent.lstm.named_parameters():
        nn.init.normal_(parameter, std=0.5)
        getattr(cell, name.removesuffix("_l0")).data.copy_(parameter.data)
    x, h, dones = torch.randn(T, N, H), torch.randn(N, H), (torch.rand(T, N) < 0.3).float()
    outputs, last = module.gru_forward(x, h, dones, *agent.lstm_weights())
    expected = []
    for t in range(T):
        h = cell(x[t], h * (1 - dones[t]).unsqueeze(1))
        expected.append(h)
    torch.testing.assert_close(outputs, torch.stack(expected))
    torch.testing.assert_close(last, h)
    outputs.square().sum().backward()
    torch.stack(expected).square().sum().backward()
    for name, parameter in agent.lstm.named_parameters():
        torch.testing.assert_close(
            parameter.grad, getattr(cell, name.removesuffix("_l0")).grad, rtol=1e-4, atol=1e-4
        )


def test_gru_is_all_that_remembers_and_it_is_trained(fork, train):
    train(fork("gru"), *RUNS["gru"], "--total-timesteps", 256)
    before = last_checkpoint()
    train(fork("gru"), "--resume", "latest", "--total-timesteps", 512)
    after = last_checkpoint()
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        assert after[f"lstm.{name}_l0"].shape[0] == 3 * 32
        assert not torch.equal(after[f"lstm.{name}_l0"], before[f"lstm.{name}_l0"])


def test_mingru_with_resets_equals_a_loop_over_its_definition(fork):
    torch.manual_seed(1)
    module, (T, N, H) = fork("mingru"), (13, 5, 8)
    agent = module.Agent(Box(-1, 1, (4,), np.float32), Discrete(3), H)
    x, h = torch.randn(T, N, H, requires_grad=True), torch.randn(N, H, requires_grad=True)
    dones = (torch.rand(T, N) < 0.3).float()
    outputs, last = module.mingru_forward(x, h, dones, *agent.lstm_weights())
    inputs, state, expected = (x, h, *agent.lstm.values()), h, []
    for t in range(T):
        z, n = nn.functional.linear(x[t], agent.lstm.weight, agent.lstm.bias).chunk(2, dim=1)
        state = (1 - z.sigmoid()) * state * (1 - dones[t]).unsqueeze(1) + z.sigmoid() * n
        expected.append(state)
    torch.testing.assert_close(outputs, torch.stack(expected))
    torch.testing.assert_close(last, state)
    grads = (
        torch.autograd.grad(result.square().sum(), inputs)
        for result in (outputs, torch.stack(expected))
    )
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_mingru_is_all_that_remembers_and_it_is_trained(fork, train):
    train(fork("mingru"), *RUNS["mingru"], "--total-timesteps", 256)
    before = last_checkpoint()
    train(fork("mingru"), "--resume", "latest", "--total-timesteps", 512)
    after = last_checkpoint()
    assert {name for name in after if "lstm" in name or "cell" in name} == {
        f"{part}.{name}" for part in ("lstm", "cell") for name in ("weight", "bias")
    }
    for name in ("weight", "bias"):
        assert after[f"lstm.{name}"].shape[0] == 2 * 32
        assert not torch.equal(after[f"lstm.{name}"], before[f"lstm.{name}"])


@pytest.mark.parametrize(("env_id", "least"), [("RecipeDoors-v0", 3.6), ("RecipeDials-v0", 2.6)])
def test_masked_actions_are_never_taken_and_the_rest_is_learned(env_id, least, fork, train):
    # Open doors at random: 2 on one wall of four, 1.67 on walls of six and four.
    flags = [*LEARN, "--env-id", env_id, "--total-timesteps", 16_000]
    rows = train(fork("action_masks"), *flags)
    assert {row["episodic_length"] for row in rows} == {4}
    assert min(row["episodic_return_min"] for row in rows) >= 0
    assert final(rows, "episodic_return") >= least
    assert train(fork(), *flags, "--total-timesteps", 256)[0]["episodic_return_min"] == -1


def test_probabilities_are_those_of_the_allowed_actions_alone(fork):
    torch.manual_seed(1)
    agent = fork("action_masks").Agent(Box(-1, 1, (7,), np.float32), MultiDiscrete([3, 2]), 8)
    mask = torch.tensor([1.0, 0, 1, 0, 1])
    logits, observations = torch.randn(5, requires_grad=True), torch.cat((mask, torch.randn(2)))
    masked = agent.mask(logits, observations)
    for action, place in ((0, 0), (2, 1)):
        first = torch.distributions.Categorical(logits=logits[[0, 2]])
        logprob, entropy = agent.evaluate_actions(masked, torch.tensor([action, 1]))
        torch.testing.assert_close(logprob, first.log_prob(torch.tensor(place)))
        torch.testing.assert_close(entropy, first.entropy())
    actions, _ = agent.sample(masked.expand(10_000, 5), agent.sampling_noise(10_000))
    shares = nn.functional.one_hot(actions[:, 0], 3).float().mean(0)
    torch.testing.assert_close(shares[[0, 2]], first.probs, rtol=0, atol=0.03)
    assert shares[1] == 0 and actions[:, 1].all()
    (grad,) = torch.autograd.grad(logprob + entropy, logits)
    assert grad.isfinite().all() and (grad != 0).tolist() == [True, False, True, False, False]


def test_a_mask_of_zeros_gives_numbers_and_no_gradient(fork):
    agent = fork("action_masks").Agent(Box(-1, 1, (5,), np.float32), MultiDiscrete([3, 2]), 8)
    logits = torch.randn(5, requires_grad=True)
    masked = agent.mask(logits, torch.zeros(5))
    actions, logprob = agent.sample(masked, agent.sampling_noise())
    _, entropy = agent.evaluate_actions(masked, actions)
    torch.testing.assert_close(torch.stack((-logprob, entropy)), torch.tensor([6.0, 6.0]).log())
    (grad,) = torch.autograd.grad(logprob + entropy, logits)
    assert not grad.any()


@pytest.mark.parametrize("env_id", ["cartpole", "CartPole-v1", "environments:DictObs-v0"])
def test_masks_are_missed_where_the_environment_has_none(env_id, fork):
    module = fork("action_masks")
    with pytest.raises(module.UsageError, match="action_mask"):
        module.make_envs(module.Args(env_id=env_id, num_envs=2), 1)


def test_encoder_takes_a_tiles_number_for_a_name(fork):
    # Other numbers for the same tiles, with the convolution's channels in that order, make the same features.
    torch.manual_seed(1)
    module = fork("custom_encoder")
    agent = module.Agent(Box(0, 7, (5, 6), np.int8), Discrete(2), 16)
    grids, renamed = torch.randint(0, 8, (2, 3, 5, 6), dtype=torch.int8), torch.randperm(8)
    features = agent.encode(grids)
    assert features.shape == (2, 3, 16)
    other = agent.encode(renamed[grids.long()].to(torch.int8))
    assert not torch.allclose(features, other, atol=0.01)
    convolution = next(
        layer for layer in agent.policy.encoder.modules() if isinstance(layer, nn.Conv2d)
    )
    convolution.weight.data = convolution.weight.data[:, renamed.argsort()]
    torch.testing.assert_close(agent.encode(renamed[grids.long()].to(torch.int8)), features)


def test_encoder_learns_what_tiles_mean(fork, train):
    flags = [*LEARN, *RUNS["custom_encoder"], "--total-timesteps", 16_000]
    assert final(train(fork("custom_encoder"), *flags), "episodic_return") >= 3.6
    assert final(train(fork(), *flags), "episodic_return") <= 3  # a flat layer needs longer


def test_self_play_beats_what_stands_still_and_not_what_learns(fork, train):
    # The best choice is the highest number. Against a random opponent it wins two of four rounds and ties or wins the rest.
    flags = [*LEARN, *RUNS["self_play"], "--total-timesteps", 16_000]
    still = train(fork("self_play"), *flags, "--opponent-interval", 1_000_000)
    assert final(still, "episodic_return") >= 2
    learning = train(fork("self_play"), *flags, "--opponent-interval", 1)
    assert abs(final(learning, "episodic_return")) <= 0.5


def test_self_play_renews_the_opponent_every_interval_and_keeps_it_in_the_checkpoint(fork, train):
    # A checkpoint after every segment; the opponent is the learner as it was before segments 0, 2, 4 and 6.
    flags = [
        *RUNS["self_play"],
        "--checkpoint-interval",
        1,
        "--keep-checkpoints",
        99,
        "--total-timesteps",
    ]
    module = fork("self_play")
    train(module, *flags, 1280)
    train(module, "--resume", "latest", "--total-timesteps", 2048)
    models = [
        torch.load(path, weights_only=True) for path in sorted(newest_run(".").glob("model_*.pt"))
    ]
    agent = module.Agent(Box(0, 1, (1,), np.float32), Discrete(3), 32)
    learners = []
    for model in models:
        agent.load_state_dict(model)
        learners.append(nn.utils.parameters_to_vector(agent.parameters()).detach())
    assert len(models) == 8
    for i, model in enumerate(models[2:], 2):  # models[i] was written after segment i
        torch.testing.assert_close(model["opponent"], learners[i // 2 * 2 - 1], rtol=0, atol=0)
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(learners))


def test_self_play_lets_the_opponent_play_every_second_agent_and_does_not_train_on_it(
    fork, train, record
):
    module = fork("self_play")
    players = record(
        module, "act", lambda result, player, observations, *_: (player, len(observations))
    )
    seen = record(
        module,
        "draw_minibatch",
        lambda result, values, rewards, dones, valid, *_: valid[:-1].clone(),
    )
    train(module, *RUNS["self_play"], "--total-timesteps", 512)
    learner, opponent = players[0][0], players[1][0]
    assert players == [(learner, 8), (opponent, 8)] * (len(players) // 2)
    weights = nn.utils.parameters_to_vector(opponent.parameters())
    torch.testing.assert_close(weights, last_checkpoint()["opponent"], rtol=0, atol=0)
    assert not torch.equal(weights, nn.utils.parameters_to_vector(learner.parameters()))
    assert all(valid[:, ::2].any() and not valid[:, 1::2].any() for valid in seen)
