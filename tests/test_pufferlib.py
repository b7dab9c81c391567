"""What pufferlib.patch does to PufferLib, with real worker processes and tiny environments."""

import ast
import ctypes
import hashlib
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pufferlib.ocean.environment as ocean
import pufferlib.vector
import pytest
import torch
from conftest import environment
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from pufferlib.vector import env_seed

LIBC = ctypes.CDLL(None)
SERIAL = {"backend": "Serial", "num_envs": 4}
WORKERS = {"backend": "Multiprocessing", "num_envs": 4, "num_workers": 4, "overwork": True}
HALVES = WORKERS | {"batch_size": 2}
SHARED = WORKERS | {"num_workers": 2}  # two environments in each
OCEAN = (
    "breakout blastar convert pong freeway enduro tetris cartpole moba boids drone snake squared "
    "pysquared terraform template tripletriad target go rware trash_pickup tower_climb grid cpr "
    "pacman checkers nmmo3"
)
MADE, PYTHON, NUMPY, TORCH, C, RESET, ACTION = range(7)  # what a Witness sees


class Witness(pufferlib.PufferEnv):
    """Observes its seed, a number of each generator then, its reset's seed, and its last action."""

    def __init__(self, buf=None, seed=0):
        self.single_observation_space = Box(-1, 2**31, (7,), np.float64)
        self.single_action_space = Discrete(100)
        self.num_agents = 1
        super().__init__(buf)
        self.made = [seed, random.getrandbits(31), np.random.randint(2**31 - 1)]
        self.made += [torch.randint(2**31 - 1, ()).item(), LIBC.rand()]

    def reset(self, seed=None):
        self.observations[0] = [*self.made, seed, -1]
        return self.observations, []

    def step(self, actions):
        self.observations[0, ACTION] = actions[0]
        return self.observations, self.rewards, self.terminals, self.truncations, [{"n": 1}]

    def close(self):
        pass


@pytest.fixture(autouse=True)
def a_hang_is_a_failure():
    def fail(*_):
        raise TimeoutError

    signal.signal(signal.SIGALRM, fail)
    signal.alarm(120)
    yield
    signal.alarm(0)


@pytest.fixture
def make():
    """vector.make, whose workers end with the test."""
    made = []

    def make(maker=Witness, **how):
        made.append(pufferlib.vector.make(maker, **how))
        return made[-1]

    yield make
    for vecenv in made:
        vecenv.close()


# Workers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [WORKERS, HALVES, SHARED])
def test_killed_worker_is_an_error_at_recv_with_its_number_and_exit_code(make, how):
    vecenv = make(**how)
    vecenv.async_reset(1)
    groups = vecenv.num_agents // vecenv.agents_per_batch
    for _ in range(groups):
        vecenv.recv()
    process = vecenv.processes[-1]
    process.kill()
    process.join()
    for _ in range(groups):
        vecenv.send(np.zeros(vecenv.agents_per_batch, int))
    ended = rf"worker {how['num_workers'] - 1} \(pid {process.pid}\) ended: exit code -9"
    with pytest.raises(pufferlib.vector.WorkerEnded, match=ended):
        for _ in range(groups):
            vecenv.recv()


# Seeds --------------------------------------------------------------------------------------------


def test_env_seed_has_31_bits_and_those_of_neighbouring_seeds_are_far_apart():
    seeds = np.sort([env_seed(seed, number) for seed in range(20) for number in range(20)])
    assert seeds[0] >= 0
    assert seeds[-1] < 2**31
    assert np.diff(seeds).min() > 10


@pytest.mark.parametrize("how", [SERIAL, WORKERS, HALVES, SHARED], ids=str)
def test_environment_gets_the_same_seeds_in_every_backend_and_neighbouring_runs_share_none(
    make, how
):
    """I6: neighbouring seeds share no environment."""
    seen = set()
    for seed in (1, 2, 3):
        vecenv = make(seed=seed, **how)
        vecenv.async_reset(seed + 10)
        groups = [vecenv.recv()[0].copy() for _ in range(2 if "batch_size" in how else 1)]
        observations = np.concatenate(groups)
        assert observations[:, MADE].tolist() == [env_seed(seed, k) for k in range(4)]
        assert observations[:, RESET].tolist() == [env_seed(seed + 10, k) for k in range(4)]
        for number, observation in enumerate(observations):
            own = env_seed(seed, number)
            LIBC.srand(own)
            assert observation[C] == LIBC.rand()
            if how != SERIAL:
                assert observation[PYTHON] == random.Random(own).getrandbits(31)
                assert observation[NUMPY] == np.random.RandomState(own).randint(2**31 - 1)
                drawn = torch.Generator().manual_seed(own)
                assert observation[TORCH] == torch.randint(2**31 - 1, (), generator=drawn).item()
        seen |= set(observations[:, [MADE, C, RESET]].flatten())
    assert len(seen) == 3 * 4 * 3


def numbers_of(name, seed):
    """A hash of what an environment of Ocean shows in 80 steps of the same random actions."""
    np.random.seed(seed)  # as a program would: pysquared draws from it
    kwargs = {} if name in ("pysquared", "nmmo3") else {"num_envs": 16}
    if name == "tower_climb":
        kwargs["num_maps"] = 1  # a map takes 0.1 s
    vecenv = pufferlib.vector.make(
        ocean.env_creator(f"puffer_{name}"), env_kwargs=kwargs, seed=seed
    )
    vecenv.async_reset(seed)
    space = vecenv.single_action_space
    rng = np.random.default_rng(0)
    digest = hashlib.sha256()
    for _ in range(80):
        for array in vecenv.recv()[:2]:
            assert np.isfinite(array).all()
            digest.update(array)
        shape = vecenv.actions.shape
        if isinstance(space, Box):
            actions = rng.uniform(-1, 1, shape)
        elif isinstance(space, MultiDiscrete):
            actions = rng.integers(0, space.nvec, shape)
        else:
            actions = rng.integers(0, space.n, shape)
        vecenv.send(actions.astype(vecenv.actions.dtype))
    return digest.hexdigest()


def test_oceans_environments_depend_on_the_seed_and_on_nothing_else():
    first = {name: numbers_of(name, 1) for name in OCEAN.split()}
    time.sleep(1.1)  # five of them took their seed from the clock
    again = "from test_pufferlib import *; print({n: numbers_of(n, 1) for n in OCEAN.split()})"
    words = [sys.executable, "-c", again]  # another process: other addresses, other memory
    printed = subprocess.check_output(words, env=environment(), text=True)
    assert ast.literal_eval(printed.splitlines()[-1]) == first
    other = {name: numbers_of(name, 2) for name in OCEAN.split()}
    assert [name for name in first if first[name] == other[name]] == []


# Import -------------------------------------------------------------------------------------------


def test_import_in_a_folder_that_cannot_be_written_to():
    with pytest.raises(OSError):
        os.symlink("here", "/sys/there")  # not even by root, which these tests may run as
    subprocess.run([sys.executable, "-c", "import pufferlib"], cwd="/sys", check=True)
