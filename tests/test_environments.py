"""Every kind of environment trains for two iterations: Ocean's, Gymnasium's, PettingZoo's; every space; every vectorization."""

import pathlib

import environments
import gymnasium as gym
import numpy as np
import pufferlib
import pytest
from conftest import SCRIPT, end_of, newest_run, output_of, read_metrics
from gymnasium.spaces import Box, Discrete, MultiDiscrete

import ppo_lstm_puffer as ppo

TINY = "--num-steps 8 --minibatch-size 16 --update-epochs 0 --hidden-size 16 --precision float32 --no-compile --log-interval 1"


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Trains two iterations in a process of its own (a C environment may crash it) and returns the last line of its metrics."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "resources").symlink_to(
        pathlib.Path(pufferlib.__path__[0], "resources")
    )  # as `import pufferlib` would here

    def train(env_id: str, arguments: str = "", agents: int = 4, timeout: float = 60) -> dict:
        command = [
            "--env-id",
            env_id,
            "--num-envs",
            "4",
            *TINY.split(),
            "--total-timesteps",
            str(2 * agents * 8),
            *arguments.split(),
        ]
        output = output_of(SCRIPT, command, tmp_path, timeout)
        run = newest_run(tmp_path)
        end = end_of(run)
        expected = ("completed", 2, 2 * agents * 8)
        assert (end["exit_reason"], end["iteration"], end["step"]) == expected, output
        assert [row["step"] for row in read_metrics(run)] == [agents * 8, 2 * agents * 8]
        return read_metrics(run)[-1]

    return train


# Name, its arguments (to make the big ones small), and how many agents 4 environments have.
OCEAN = [
    ("breakout", "", 4),
    ("blastar", "", 4),
    ("convert", "--env.num_agents 8", 32),
    ("pong", "", 4),
    ("freeway", "", 4),
    ("enduro", "", 4),
    ("tetris", "", 4),
    ("cartpole", "", 4),
    ("moba", "--num-envs 1", 5),
    ("boids", "--env.num_boids 4", 16),
    ("drone", "", 4),
    (
        "nmmo3",
        "--num-envs 1 --env.width [64] --env.height [64] --env.num_players 8 --env.num_enemies 8"
        " --env.num_resources 8 --env.num_weapons 8 --env.num_gems 8",
        8,
    ),
    ("snake", "--env.num_snakes 4 --env.num_food 16 --env.width 64 --env.height 64", 16),
    ("squared", "", 4),
    ("pysquared", "", 4),
    ("terraform", "", 32),
    ("template", "", 4),
    ("tripletriad", "", 4),
    ("target", "", 32),
    ("go", "", 4),
    ("rware", "", 16),
    ("trash_pickup", "", 12),
    ("tower_climb", "--env.num_maps 2", 4),
    ("grid", "--env.num_maps 4", 4),
    ("cpr", "", 32),
    ("pacman", "", 4),
    ("checkers", "", 4),
    ("multiagent", "", 8),
    ("password", "", 4),
    ("stochastic", "", 4),
    ("puffer_pong", "", 4),
]


@pytest.mark.parametrize("env_id, arguments, agents", OCEAN, ids=[name for name, *_ in OCEAN])
def test_ocean_environment_trains(train, env_id, arguments, agents):
    train(env_id, arguments, agents)


KINDS = [
    ("CartPole-v1", 4),
    ("Acrobot-v1", 4),
    ("MountainCar-v0", 4),
    ("Pendulum-v1", 4),  # Box action
    ("environments:Continuous-v0", 4),  # Box action
    ("environments:DictObs-v0", 4),  # Dict observation of three dtypes
    ("environments:Image-v0", 4),  # convolutional encoder
    ("environments:Truncating-v0", 4),
    ("tests.parallel_game", 12),  # PettingZoo
]


@pytest.mark.parametrize("env_id, agents", KINDS, ids=[name for name, _ in KINDS])
def test_emulated_environment_trains(train, env_id, agents):
    train(env_id, agents=agents)


WORKERS = [
    ("breakout", "--num-workers 2", 4),
    ("target", "--num-workers 2", 32),  # MultiDiscrete, several agents
    ("drone", "--num-workers 2", 4),  # Box action
    ("environments:DictObs-v0", "--num-workers 2", 4),
    ("environments:Image-v0", "--num-workers 2", 4),
    ("tests.parallel_game", "--num-workers 2", 12),
    ("CartPole-v1", "--num-workers 4", 4),
    ("CartPole-v1", "--num-workers 1", 4),
]


@pytest.mark.parametrize("env_id, arguments, agents", WORKERS)
def test_environment_trains_in_worker_processes(train, env_id, arguments, agents):
    train(env_id, arguments, agents)


@pytest.mark.parametrize(
    "space", [Discrete(3, start=-1), MultiDiscrete([3, 2], start=[-1, 5])], ids=["one", "several"]
)
def test_actions_that_do_not_begin_at_zero_reach_the_environment(space, monkeypatch):
    taken = []

    class FromStart(environments.Episode):
        observation_space, action_space, observe = (
            Box(0, 1, (1,), np.float32),
            space,
            lambda self: np.zeros(1, np.float32),
        )

        def step(self, action):
            taken.append(np.ravel(action).tolist())
            return self.observe(), 0.0, False, False, {}

    monkeypatch.setitem(
        gym.registry, "FromStart-v0", gym.envs.registration.EnvSpec("FromStart-v0", FromStart)
    )
    envs = ppo.make_envs(ppo.Args(env_id="FromStart-v0", num_envs=2), seed=1)
    envs.reset(), envs.receive()
    last = np.atleast_1d(getattr(space, "nvec", getattr(space, "n", None))) - 1
    envs.send(np.stack([0 * last, last]))
    start = np.ravel(space.start)
    assert taken == [start.tolist(), (start + last).tolist()]


def test_optimizers_and_precisions_train_every_action_space(train):
    train("drone", "--optimizer adam --precision bfloat16")
    train("target", "--optimizer adam --precision bfloat16", 32)


@pytest.mark.parametrize("num_workers, groups", [(1, 1), (2, 2), (4, 2)])
def test_even_workers_are_double_buffered(num_workers, groups):
    """Two halves of the agents: one is stepped by its workers while the policy acts on the other."""
    args = ppo.Args(env_id="CartPole-v1", num_envs=8, num_workers=num_workers)
    envs = ppo.make_envs(args, seed=1)
    try:
        assert envs.num_groups == groups
        envs.reset()
        received = [envs.receive() for _ in range(groups)]
        covered = sorted((agents.start, agents.stop) for agents, *_ in received)
        assert covered == [(8 // groups * i, 8 // groups * (i + 1)) for i in range(groups)]
        assert all(observations.shape == (8 // groups, 4) for _, observations, *_ in received)
    finally:
        envs.close()
    assert not any(process.is_alive() for process in envs.processes)


@pytest.mark.parametrize(
    ("device", "cores", "ranks", "copies", "workers"),
    [("cuda", 16, 1, 4096, 8), ("cuda", 16, 1, 4200, 14), ("cuda", 16, 2, 4096, 4), ("cuda", 3, 1, 4096, 0), ("cpu", 16, 1, 4096, 0)],
)  # fmt: skip
def test_on_a_gpu_workers_are_many_even_and_divide_the_environments(
    monkeypatch, device, cores, ranks, copies, workers
):
    made = []
    monkeypatch.setattr(ppo.joblib, "cpu_count", lambda only_physical_cores: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(ppo, "Envs", lambda *_: None)
    monkeypatch.setattr(ppo.pufferlib.vector, "make", lambda _, **how: made.append(how))
    args = ppo.Args(env_id="breakout", num_envs=copies, device=device)
    ppo.make_envs(args, seed=1)
    assert args.num_workers == workers == made[0].get("num_workers", 0)


def test_environment_arguments_are_read_as_people_write_them():
    words = [
        "--env.rate",
        "1e-3",
        "--env.size",
        "3",
        "--env.name",
        "hard",
        "--env.walls",
        "false",
        "--env.sizes=[1, 2]",
    ]
    args, _ = ppo.parse_args(words)
    assert args.env == {"rate": 1e-3, "size": 3, "name": "hard", "walls": False, "sizes": [1, 2]}
