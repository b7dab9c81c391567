"""recipes/*.patch: each applies to the script, runs, resumes, and does what its three lines say. I1
holds for each."""

import contextlib
import functools
import importlib.util
import pathlib
import shlex
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT, SCRIPT, SMALL
from environments import Task
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from parallel_game import ParallelGame
from reading import final, newest_run, read_metrics
from torch import nn

from envs.probes import Episode

NAMES = sorted(path.stem for path in (ROOT / "recipes").glob("*.patch"))
RUNS = {  # an environment on which the recipe has something to do
    "action_masks": "--env-id RecipeDoors-v0",
    "curriculum": "--env-id RecipeRepeat-v0 --curriculum length=1,2,4 --curriculum-return 0.9",
    "custom_encoder": "--env-id RecipeTile-v0",
    "dict_image": "--env-id RecipeScene-v0",
    "gru": "--env-id cartpole",
    "mingru": "--env-id cartpole",
    "multitask": "--env-id cartpole+RecipeZero-v0",
    "reward_shaping": "--env-id cartpole",
    "self_play": "--env-id test_recipes --num-envs 8 --opponent-interval 2",
    "stages": "--env-id cartpole --stages '{1000: {ent_coef: 0.05}}'",
}
# 16 agents x 16 steps, each segment once: its first update is also its last.
FIRST_UPDATES = "--minibatch-size 256 --update-epochs 1 --prio-alpha 0"
LEARN = "--optimizer adam --learning-rate 0.005 --momentum 0.9 --gamma 0.95 --update-epochs 2 "
LEARN += "--vf-clip-coef 10 --vf-coef 0.5 --prio-alpha 0 --ent-coef 0.005 --anneal linear "
LEARN += "--log-interval 4"


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


class Name(Task):
    """Reward 1 for taking action `right`, four times. The observation is `width` zeros."""

    def __init__(self, right: int = 0, width: int = 2, actions: int = 2):
        super().__init__()
        self.right = right
        self.observation_space = Box(-1, 1, (width,), np.float32)
        self.action_space = Discrete(actions)

    def reward(self, action):
        assert action in self.action_space
        return action == self.right


class Tile(Task):
    """A 3 x 3 grid, empty but for a tile of 0 to 7 in the middle: reward 1 for its parity."""

    observation_space = Box(0, 7, (3, 3), np.int8)
    action_space = Discrete(2)

    def observe(self):
        self.grid = np.zeros((3, 3), np.int8)
        self.grid[1, 1] = self.np_random.integers(8)
        return self.grid

    def reward(self, action):
        return action == self.grid[1, 1] % 2


class Doors(Episode):
    """Of four doors two are open, says the mask, and one of them is named: reward 1 for taking it.

    Four steps. A closed door ends the episode with -1.
    """

    observation_space = Dict(observation=Box(0, 1, (4,)), action_mask=Box(0, 1, (4,)))
    action_space = Discrete(4)

    def observe(self):
        self.open = self.np_random.permutation(4)[:2]
        flags = np.eye(4, dtype=np.float32)[self.open]
        return {"observation": flags[0], "action_mask": flags.sum(0)}

    def step(self, action):
        closed = action not in self.open
        reward = -1.0 if closed else float(action == self.open[0])
        self.t += 1
        return self.observe(), reward, closed or self.t == 4, False, {}


class Scene(Task):
    """An image, bright on one side, among other numbers; `lamp` swaps the side asked for."""

    observation_space = Dict(
        clock=Box(0, 2000, (2,)), picture=Box(0, 255, (36, 40, 3), np.uint8), zlamp=Discrete(2)
    )
    action_space = Discrete(2)

    def observe(self):
        side = self.np_random.integers(2)
        lamp = self.np_random.integers(2)
        self.right = side ^ lamp
        picture = self.np_random.integers(64, size=(36, 40, 3)).astype(np.uint8)
        picture[:, 20 * side : 20 * (side + 1)] += 150
        clock = np.array([1000 + self.t, 0.5], np.float32)
        return {"clock": clock, "picture": picture, "zlamp": lamp}

    def reward(self, action):
        return action == self.right


class Duel(ParallelGame):
    """Two agents name one of three numbers; the higher gets 1, the lower -1; four rounds."""

    def __init__(self):
        super().__init__(shortest=4, longest=4)
        self.possible_agents = ["a", "b"]

    def action_space(self, agent):
        return Discrete(3)

    def step(self, actions):
        observations, _, *rest = super().step(actions)
        won = float(np.sign(int(actions["a"]) - int(actions["b"])))
        return observations, {"a": won, "b": -won}, *rest


parallel_env = Duel  # of --env-id test_recipes
for environment in (Repeat, Name, Tile, Doors, Scene):
    gym.register(f"Recipe{environment.__name__}-v0", entry_point=environment)
gym.register("RecipeZero-v0", entry_point=functools.partial(Name, 0, 2))
gym.register("RecipeThree-v0", entry_point=functools.partial(Name, 3, 5, 4))


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

    def train(module, *flags: str) -> list[dict]:
        words = shlex.split(" ".join(flags))
        args, resumed = module.parse_args([*([] if "--resume" in words else SMALL), *words])
        assert module.main(args, resumed) == 0
        return read_metrics(newest_run(tmp_path))

    return train


def agent_of(module, observation_space, action_space):
    args = module.Args(hidden_size=8, precision="float32")
    return module.Agent(observation_space, action_space, args)


@pytest.mark.parametrize(
    ("names", "flags"),
    [
        *(pytest.param([name], RUNS[name], id=name) for name in NAMES),
        pytest.param(["mingru", "action_masks"], RUNS["action_masks"], id="masks and mingru"),
    ],
)
def test_ratio_is_one_in_a_first_update_and_after_a_resume(names, flags, fork, train, listen):
    """I1, with episode ends inside eight segments and states carried from one to the next."""

    def ratio(result, *arguments):
        minibatch = arguments[-2]
        return result[1][minibatch.weight > 0]  # of the steps that are trained on

    ratios = listen(fork(*names), "ppo_loss", ratio)
    rows = train(fork(*names), FIRST_UPDATES, flags)
    assert len(rows) == len(ratios) == 8
    assert any("episodic_return" in row for row in rows)
    rows = train(fork(*names), "--resume latest --total-timesteps 2560")
    assert [row["step"] for row in rows] == list(range(256, 2561, 256))
    for ratio in ratios:
        torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-5)


@pytest.mark.parametrize("other", ["gru", "mingru"])
@pytest.mark.parametrize("order", ["forwards", "backwards", "core first"])
def test_all_recipes_with_one_core_apply_one_after_the_other(order, other, fork):
    names = [name for name in NAMES if name != other][:: -1 if order == "backwards" else 1]
    if order == "core first":
        names.sort(key=lambda name: "gru" not in name)
    text = pathlib.Path(fork(*names).__file__).read_text().splitlines()
    for name in names:
        lines = (ROOT / "recipes" / f"{name}.patch").read_text().splitlines()[6:]
        assert {line[1:] for line in lines if line.startswith("+")} <= set(text)


# What each one says of itself ---------------------------------------------------------------------


def test_curriculum_rises_with_success_and_only_then(fork, train):
    rows = train(fork("curriculum"), LEARN, RUNS["curriculum"], "--total-timesteps 30000")
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
    config = yaml.safe_load((newest_run(pathlib.Path()) / "config.yaml").read_text())
    assert config["env"] == {"length": 4}  # tools/play.py plays what was reached
    with pytest.raises(SystemExit):
        train(
            fork("curriculum"),
            "--env-id RecipeName-v0 --curriculum width=2,3 --curriculum-return 0",
        )


def test_multitask_learns_what_only_the_task_tells(fork, train):
    # Both show zeros and want different actions: without the task, returns add up to 4 at best.
    flags = "--env-id RecipeZero-v0+RecipeThree-v0 --total-timesteps 12000"
    rows = train(fork("multitask"), LEARN, flags)
    assert final(rows, "env/RecipeZero-v0/episodic_return") >= 3
    assert final(rows, "env/RecipeThree-v0/episodic_return") >= 3
    args, _ = fork("multitask").parse_args([*SMALL, *shlex.split(flags)])
    with contextlib.closing(fork("multitask").make_envs(args, 1)) as envs:
        assert len(envs.ended) == len(envs.returns) == len(envs.lengths) == envs.num_agents


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


def test_shaped_rewards_are_not_clipped(fork, train, listen):
    module = fork("reward_shaping")
    seen = listen(module, "draw_minibatch", lambda _, values, rewards, *rest: rewards.abs().max())
    train(module, "--env-id cartpole --shaping-coef 9")
    assert max(seen) > 1


def test_stages_switch_where_they_should_and_a_resumed_run_is_in_its_stage(fork, train, listen):
    # Segments of 256 steps: the one from 512 on is the first that begins at or after 500.
    module = fork("stages")
    entropies = listen(module, "ppo_loss", lambda result, *arguments: arguments[-1].ent_coef)
    flags = "--env-id cartpole --learning-rate 0.125 --ent-coef 0.25 --anneal constant "
    stages = "{1024: {learning_rate: 0}, 500: {ent_coef: 0.5}}"
    rows = train(module, FIRST_UPDATES, flags, f"--total-timesteps 1280 --stages '{stages}'")
    assert entropies == [0.25] * 2 + [0.5] * 3
    assert [row["learning_rate"] for row in rows] == [0.125] * 4 + [0]
    assert module.load_checkpoint("latest", "runs")["config"]["learning_rate"] == 0.125
    rows = train(module, "--resume latest --total-timesteps 1536")
    assert (entropies[5:], rows[-1]["learning_rate"]) == ([0.5], 0)


def gru_step(core, x, h):
    return torch.gru_cell(x, h, *core.parameters())


def mingru_step(core, x, h):
    z, n = core(x).chunk(2, dim=1)
    z = z.sigmoid()
    return (1 - z) * h + z * n


@pytest.mark.parametrize(("name", "step"), [("gru", gru_step), ("mingru", mingru_step)])
def test_another_core_with_resets_equals_a_loop_over_its_step(name, step, fork):
    torch.manual_seed(1)
    module = fork(name)
    agent = agent_of(module, Box(-1, 1, (4,), np.float32), Discrete(3))
    core = agent.lstm
    for parameter in core.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(13, 5, 8, requires_grad=True)
    h = torch.randn(5, 8, requires_grad=True)
    dones = (torch.rand(13, 5) < 0.3).float()
    outputs, last, _ = module.lstm_forward(x, h, h, dones, *agent.lstm_weights())
    expected = []
    state = h
    for t in range(13):
        state = step(core, x[t], state * (1 - dones[t]).unsqueeze(1))
        expected.append(state)
    expected = torch.stack(expected)
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(last, state)
    inputs = (x, h, *core.parameters())
    ours, theirs = (torch.autograd.grad(one.square().sum(), inputs) for one in (outputs, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_masked_actions_are_never_taken_and_the_rest_is_learned(fork, train):
    # Open doors at random: 2.
    flags = f"{LEARN} {RUNS['action_masks']} --total-timesteps"
    rows = train(fork("action_masks"), flags, "16000")
    assert {row["episodic_length"] for row in rows} == {4}
    assert min(row["episodic_return_min"] for row in rows) >= 0
    assert final(rows, "episodic_return") >= 3.6
    assert train(fork(), flags, "1024")[0]["episodic_return_min"] == -1


def test_probabilities_are_those_of_the_allowed_actions_and_a_mask_of_zeros_allows_all(fork):
    torch.manual_seed(1)
    space = Box(-1, 1, (7,), np.float32)
    space.mask_columns = slice(2, 7)
    agent = agent_of(fork("action_masks"), space, MultiDiscrete([3, 2]))
    logits = torch.randn(5, requires_grad=True)
    observations = torch.tensor([0.3, -0.2, 1, 0, 1, 0, 1])
    allowed = agent.mask(logits, observations)
    first = torch.distributions.Categorical(logits=logits[[0, 2]])
    for action, place in ((0, 0), (2, 1)):
        logprob, entropy = agent.evaluate_actions(allowed, torch.tensor([action, 1]))
        torch.testing.assert_close(logprob, first.log_prob(torch.tensor(place)))
        torch.testing.assert_close(entropy, first.entropy())
    (grad,) = torch.autograd.grad(logprob + entropy, logits)
    assert (grad != 0).tolist() == [True, False, True, False, False]
    nothing = agent.mask(logits, torch.zeros(7))  # as where it is nobody's turn
    logprob, _ = agent.evaluate_actions(nothing, torch.tensor([1, 1]))
    assert logprob.exp().item() == pytest.approx(1 / 6)


@pytest.mark.parametrize(
    ("name", "env_id", "named"),
    [
        ("action_masks", "CartPole-v1", "action_mask"),
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


def test_encoder_learns_what_tiles_mean(fork, train):
    flags = f"{LEARN} {RUNS['custom_encoder']} --total-timesteps 16000"
    assert final(train(fork("custom_encoder"), flags), "episodic_return") >= 3.6
    assert final(train(fork(), flags), "episodic_return") <= 3  # a flat layer needs longer


def test_convolutions_see_the_image_of_a_dict_and_the_linear_layer_the_rest(fork):
    module = fork("dict_image")
    args = module.Args(env_id="RecipeScene-v0", num_envs=3, num_workers=0)
    envs = module.make_envs(args, 1)
    agent = agent_of(module, envs.observation_space, envs.action_space)
    envs.reset()
    _, observations, *_ = envs.receive()
    observations = torch.as_tensor(observations)
    layers = agent.policy.encoder[0]
    seen = []
    for layer in layers.convolutions[0], layers.linear:
        layer.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
    assert agent.encode(observations[None]).shape == (1, 3, 8)
    pictures = observations[:, 2:-2].view(3, 36, 40, 3)
    torch.testing.assert_close(seen[0], pictures.permute(0, 3, 1, 2), rtol=0, atol=0)
    assert 0.5 < seen[0].max() <= 1
    others = torch.cat((seen[1][:, :2], seen[1][:, -2:]), dim=1)
    torch.testing.assert_close(others, torch.cat((observations[:, :2], observations[:, -2:]), 1))


def test_self_play_beats_what_stands_still_and_not_what_learns(fork, train):
    # The highest number is best. Against random play it wins two of four rounds and loses none.
    flags = f"{LEARN} {RUNS['self_play']} --total-timesteps 16000 --opponent-interval"
    still = train(fork("self_play"), flags, "1000000")
    assert final(still, "episodic_return") >= 2
    learning = train(fork("self_play"), flags, "1")
    assert abs(final(learning, "episodic_return")) <= 0.5


def test_self_play_lets_the_opponent_play_every_second_agent_and_does_not_train_on_it(
    fork, train, listen
):
    def player_of(result, player, observations, *_):
        return player, len(observations)

    def valid_of(result, values, rewards, dones, valid, *_):
        return valid.clone()

    module = fork("self_play")
    players = listen(module, "act", player_of)
    seen = listen(module, "draw_minibatch", valid_of)
    train(module, RUNS["self_play"], "--total-timesteps 512")
    learner = players[0][0]
    opponent = players[1][0]
    assert players == [(learner, 8), (opponent, 8)] * (len(players) // 2)
    opponents = module.load_checkpoint("latest", "runs")["model"]["opponent"]
    torch.testing.assert_close(opponent.vector(), opponents, rtol=0, atol=0)
    assert not torch.equal(opponent.vector(), learner.vector())
    for valid in seen:
        games = valid.view(len(valid), -1, 4)
        assert games[..., 0].any() and games[..., 3].any()
        assert not games[..., [1, 2]].any()
