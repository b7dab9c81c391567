"""What people bring: every kind of space, reward, info and environment arrives as it is, or is
refused in one line; Ocean's, Gymnasium's and PettingZoo's, in this process and in workers."""

import argparse
import contextlib
import operator
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import partial
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pufferlib
import pytest
import torch
from conftest import ROOT, train_here, wait_for
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from pettingzoo import ParallelEnv
from pufferlib import adapters

import ppo_lstm_puffer as ppo
from envs.probes import Episode

UNIT = Box(-1, 1, (1,))
BYTES = Box(0, 255, (8, 8), np.uint8)


class Scripted(gym.Env):
    """Shows, rewards and tells what it is given, for episodes of so many steps; keeps actions."""

    def __init__(self, observation=0.0, space=UNIT, acts=None, reward=0.0, info=None, length=2):
        self.observation = observation
        self.observation_space = space
        self.action_space = acts or Discrete(2)
        self.reward = reward
        self.info = info
        self.length = length
        self.actions = []

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observation, {}

    def step(self, action):
        self.actions.append(action)
        self.t += 1
        unclear = {"never": "False", "unclear": np.nan}
        over = unclear.get(self.length, self.t == self.length)
        return self.observation, self.reward, over, False, self.info


def register_once(monkeypatch, entry_point, **spec):
    """As Its-v0, for this test alone."""
    made = gym.envs.registration.EnvSpec("Its-v0", entry_point, **spec)
    monkeypatch.setitem(gym.registry, "Its-v0", made)


def adapted(num_envs: int = 1, **script) -> adapters.GymnasiumEnvs:
    return adapters.GymnasiumEnvs(lambda: Scripted(**script), num_envs)


def step(envs: pufferlib.PufferEnv, times: int = 1):
    """What comes after so many steps of the first action of all."""
    for _ in range(times):
        result = envs.step(np.zeros(envs.action_space.shape, np.int64))
    return result


OBSERVATIONS = {
    "float64": (Box(-1, 1, (2,)), np.array([0.25, -1.0]), [0.25, -1]),
    "list": (Box(-1, 1, (2,)), [0.25, -1], [0.25, -1]),
    "no shape": (Box(-1, 1, ()), np.float64(0.25), [0.25]),
    "int64": (Box(-9, 9, (2,), np.int64), np.array([7, -9]), [7, -9]),
    "bool": (Box(0, 1, (2,), bool), np.array([True, False]), [1, 0]),
    "small grid": (Box(0, 255, (1, 2), np.uint8), np.uint8([[7, 255]]), [[7, 255]]),
    "pixels": (BYTES, np.full((8, 8), 7, np.uint8), np.full((8, 8), 7)),
    "board": (Box(0, 1, (8, 9), np.uint8), np.eye(8, 9), np.eye(8, 9)),
    "Discrete": (Discrete(3, start=-1), np.int64(-1), [1, 0, 0]),
    "MultiDiscrete": (MultiDiscrete([2, 2], start=[5, -1]), [6, -1], [0, 1, 1, 0]),
    "MultiBinary": (MultiBinary((2, 2)), np.int8([[1, 0], [0, 1]]), [1, 0, 0, 1]),
    "Dict, sorted": (Dict({"b": UNIT, "a": Discrete(2)}), {"b": [0.25], "a": 1}, [0, 1, 0.25]),
    "nested": (
        Dict(a=Tuple((Discrete(2), Dict(z=UNIT, y=Box(0, 2, ())))), b=Box(0, 1, (1, 2))),
        {"a": (0, {"z": [0.5], "y": 1.5}), "b": [[0.25, 1]]},
        [1, 0, 0.5, 1.5, 0.25, 1],
    ),
    "bytes in a Dict": (
        Dict(a=Box(0, 255, (2,), np.uint8), b=Box(0, 9, (1,), np.uint8), c=Box(-255, 255, (1,))),
        {"a": np.uint8([255, 51]), "b": np.uint8([9]), "c": [51]},
        [1, 0.2, 9, 51],
    ),
}


@pytest.mark.parametrize(("space", "shown", "seen"), OBSERVATIONS.values(), ids=OBSERVATIONS)
def test_observation_arrives(space, shown, seen):
    envs = adapted(num_envs=2, observation=shown, space=space)
    for observations in envs.reset(seed=1)[0], step(envs)[0]:
        assert observations.shape == (2, *envs.single_observation_space.shape)
        np.testing.assert_array_equal(observations, np.float32([seen, seen]))
    pixels = np.shape(seen) == (8, 8)  # the encoder scales bytes
    assert observations.dtype == (np.uint8 if pixels else np.float32)


def test_a_choice_is_shown_alone():
    for space, first, then in (Discrete(3), 0, 2), (MultiDiscrete([3]), [0], [2]):
        envs = adapted(observation=first, space=space)
        envs.reset(seed=1)
        envs.envs[0].observation = then
        assert step(envs)[0].tolist() == [[0, 0, 1]]


def test_clipped_rewards_are_said_to_be_once(tmp_path, capfd):
    for given, times in ({}, 1), ({"clip_rewards": False}, 0), ({"norm_rewards": True}, 0):
        adapters.say_once.cache_clear()
        train_here(tmp_path, env_id="Pendulum-v1", total_timesteps=256, **given)
        assert capfd.readouterr().err.count("rewards beyond [-1, 1] are clipped") == times


def test_what_would_mislead_without_a_word_is_said(capfd):
    text = Tuple((gym.spaces.Text(9), Dict(a=UNIT, mission=gym.spaces.Text(9))))
    envs = adapted(num_envs=2, observation=("go", {"a": [0.5], "mission": "on"}), space=text)
    np.testing.assert_array_equal(envs.reset(seed=1)[0], [[0.5], [0.5]])
    large = Box(0, 2**40, (1,), np.int64)
    adapted(space=large)
    adapted(space=Dict(a=UNIT, stamp=large))
    adapted(space=Box(-9, 9, (1,), np.int64))
    screen = Dict(screen=Box(0, 255, (64, 64, 3), np.uint8), health=UNIT)
    assert adapted(space=screen).single_observation_space.shape == (64 * 64 * 3 + 1,)
    adapted(space=Dict(seen=UNIT, action_mask=Box(0, 1, (2,), np.int8)))
    adapted(space=Box(0, 255, (4, 84, 84, 1), np.uint8))
    adapters.GymnasiumEnvs(lambda: gym.wrappers.NormalizeObservation(Scripted()), 2).reset()
    adapters.GymnasiumEnvs(lambda: gym.wrappers.NormalizeReward(Scripted()))
    limited = partial(gym.wrappers.TimeLimit, max_episode_steps=9)
    adapters.GymnasiumEnvs(lambda: gym.wrappers.TimeLimit(limited(Scripted()), 5))
    said = capfd.readouterr().err.splitlines()
    expected = [
        "0 is text, and left out",
        "mission is text, and left out",
        "rounded to float32$",
        "rounded to float32: stamp$",
        "screen is an image, and flattened",
        "action_mask forbids no",
        "no image but .* 2 or 3 sides",
        "--norm-obs",
        "--norm-rew",
        r"TimeLimits of \[5, 9\]",
    ]
    assert len(said) == len(expected) and all(map(re.search, expected, said))


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ({"info": {"final_observation": np.ones(1)}}, "final_observation it resets itself"),
        ({"info": {"terminal_observation": [1.0]}}, "terminal_observation it resets itself"),
        (
            {"observation": {"a": [0.0]}, "space": Dict(a=UNIT), "info": {"final_obs": {"a": [1]}}},
            "final_obs it resets itself",
        ),
        (
            {"info": {"final_obs": np.array([np.ones(1), None], object)}},
            "final_obs it resets itself",
        ),
        ({"observation": [1.0], "info": {"final_obs": torch.ones(1)}}, None),
        ({"info": {"final_obs": None, "final_observation": {}}}, None),
        ({"observation": np.zeros(1), "info": {"final_observation": np.zeros(1)}}, None),
        ({"info": {"TimeLimit.truncated": np.zeros(2)}}, None),
        ({"info": {"TimeLimit.truncated": True}}, "an end was a time limit"),
        ({"observation": {"a": [0.0], "b": 1}, "space": Dict(a=UNIT)}, "2 parts, and its space 1"),
        (
            {"observation": ({"a": [0.0], "b": 1},), "space": Tuple([Dict(a=UNIT)])},
            "2 parts, and its space 1",
        ),
        ({"info": {"TimeLimit.truncated": False, "final": 1}}, None),
    ],
)
def test_what_step_returns_and_its_info_or_space_denies_is_said_once(script, said, capfd):
    adapters.say_once.cache_clear()
    envs = adapted(num_envs=2, **script)
    envs.reset(seed=1)
    step(envs, 5)
    err = capfd.readouterr().err
    assert err.count("warning") == (said is not None) and (said or "") in err


def test_a_number_below_those_of_float32_is_0_whatever_an_environment_sets_for_itself():
    envs = adapted(observation=[1e-60], reward=np.float64(1e-60))
    with np.errstate(all="raise"):
        assert envs.reset(seed=1)[0].tolist() == [[0]]
        observations, rewards, *_ = step(envs)
    assert observations.tolist() == [[0]] and rewards.tolist() == [0]


class Draws(Scripted):
    """Shows what its own generator draws; how: as it seeds that."""

    def __init__(self, how):
        super().__init__(length=1)
        self.how = how
        self.rng = np.random.default_rng(42)
        self.episodes = 0

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.kept = seed if seed is not None else self.kept
        self.episodes += 1
        if self.how == "anew":
            self.rng = np.random.default_rng(self.kept)
        if self.how == "a default" or (self.how == "right" and seed is not None):
            self.rng = np.random.default_rng(42 if seed is None else seed)
        seldom = self.episodes == 1 and self.kept % 2  # two starts, of which one comes seldom
        self.observation = [self.rng.uniform()]
        if self.how in ("never", "seldom"):
            self.observation = [float(self.how == "seldom" and seldom)]
        return self.observation, {}


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("once", "8 copies begin their second episode alike"),
        ("a default", "8 copies begin their second episode alike"),
        ("anew", "each copy begins its second episode as its first"),
        ("right", None),
        ("never", None),
        ("seldom", None),
    ],
)
@pytest.mark.parametrize("num_envs", [1, 9])
def test_episodes_that_are_not_drawn_anew_are_said_to_be_once(how, said, num_envs, capfd):
    envs = adapters.GymnasiumEnvs(lambda: Draws(how), num_envs)
    envs.reset(seed=1)
    step(envs, 9)
    err = capfd.readouterr().err
    assert err.count("warning") == (said is not None and num_envs > 1)
    assert num_envs == 1 or (said or "") in err


@pytest.mark.parametrize("draw", ["np_random.uniform", "observation_space.sample"])
def test_who_forgets_to_seed_is_seeded(draw):
    class Forgets(Scripted):
        def reset(self, seed=None, options=None):
            self.t = 0
            return np.reshape(operator.attrgetter(draw)(self)(), 1), {}

    def seen(seed: int) -> list:
        make_one = partial(Forgets, space=Box(0, 1, (1,)))
        return adapters.GymnasiumEnvs(make_one, 3).reset(seed=seed)[0].tolist()

    assert seen(1) == seen(1)
    assert len({number for [number] in seen(1) + seen(2)}) == 6


def test_a_generator_of_another_kind_stays():
    class Old(Scripted):
        def reset(self, seed=None, options=None):
            self.np_random.seed(seed)
            self.t = 0
            return [self.np_random.rand()], {}

    env = Old()
    env.np_random = np.random.RandomState(0)
    [[seen]] = adapters.GymnasiumEnvs(lambda: env).reset(seed=1)[0].tolist()
    drawn = np.random.RandomState(pufferlib.env_seed(1, 0)).rand()
    assert seen == np.float32(drawn)


@pytest.mark.parametrize("length", [9, 10, 11])
def test_that_no_episode_ends_is_said_once(length, monkeypatch, capfd):
    monkeypatch.setattr(adapters, "LONG", 10)
    envs = adapted(num_envs=2, length=length)
    envs.reset(seed=1)
    step(envs, 30)
    assert capfd.readouterr().err.count("no episode has ended in 10 steps") == (length > 10)


@pytest.mark.parametrize(
    ("spaces", "named"),
    [
        ({"space": gym.spaces.Text(9)}, "Text"),
        ({"space": gym.spaces.OneOf((UNIT, Discrete(2)))}, "OneOf"),
        ({"space": Dict(a=UNIT, b=gym.spaces.Graph(UNIT, None))}, "Graph"),
        ({"space": Dict(mission=gym.spaces.Text(9))}, "number"),
        ({"acts": gym.spaces.Sequence(Discrete(2))}, "an action of Sequence is not supported"),
        ({"acts": Dict(a=Discrete(2), b=UNIT)}, "Box"),
        ({"acts": Dict(a=UNIT, b=Box(0, 1, (0,)))}, "an action without any number"),
        ({"acts": Tuple((Dict({}),))}, "an action without any number"),
    ],
)
def test_space_that_cannot_be_is_refused_at_once(spaces, named):
    with pytest.raises(pufferlib.APIUsageError, match=named):
        adapted(**spaces)


ACTIONS = {
    "Discrete": (Discrete(3, start=-1), [2], 1),
    "Discrete, unsigned": (Discrete(3, dtype=np.uint64), [2], 2),
    "MultiDiscrete": (MultiDiscrete([3, 2], start=[-1, 5]), [0, 1], [-1, 6]),
    "MultiDiscrete, matrix": (MultiDiscrete([[2, 3], [4, 5]]), [1, 2, 3, 4], [[1, 2], [3, 4]]),
    "MultiBinary": (MultiBinary((2, 2)), [1, 0, 0, 1], [[1, 0], [0, 1]]),
    "Tuple": (Tuple((Discrete(2, start=5), MultiBinary(2))), [1, 0, 1], (6, [0, 1])),
    "Tuple, an empty part": (Tuple((Discrete(2), Dict({}))), [1], (1, {})),
    "nested": (Tuple((Dict(a=Discrete(2)), Discrete(3))), [1, 2], ({"a": 1}, 2)),
    "Box": (Box(-1, 1, (2, 3)), [0, 0.5, 1, 0, -0.5, 9], [[0, 0.5, 1], [0, -0.5, 1]]),
    "Box, no shape": (Box(-1, 1, ()), [0.5], 0.5),
    "Box, unbounded": (Box(-np.inf, np.inf, (1,)), [99], [99]),
    "Box, float64": (Box(-0.1, 0.1, (2,), np.float64), [0.125, -0.125], [0.1, -0.1]),
    "Dict of Boxes": (Dict(gas=Box(0, 1, ()), steer=UNIT), [0.5, 2], {"gas": 0.5, "steer": [1]}),
    "Box, integers": (Box(-2, 2, (3,), np.int32), [0.7, -1.6, 5], [1, -2, 2]),
    "Tuple, integers": (
        Tuple((UNIT, Box(0, 9, (1,), np.int32), Dict({}))),
        [0.75, 2.6],
        ([0.75], [3], {}),
    ),
}


@pytest.mark.parametrize(("space", "numbers", "taken"), ACTIONS.values(), ids=ACTIONS)
def test_action_reaches_the_environment(space, numbers, taken):
    vecenv = adapted(num_envs=2, acts=space, length=9)
    envs = ppo.Envs(vecenv, 1)
    agent = ppo.Agent(envs.observation_space, envs.action_space, ppo.Args(precision="float32"))
    assert agent.num_logits == (len(numbers) if agent.continuous else sum(agent.nvec))
    envs.reset()
    envs.receive()
    sent = np.array([numbers, numbers], envs.action_space.dtype)  # MultiDiscrete: int32 in workers
    sent = sent if agent.continuous else sent.astype(np.int32)
    envs.send(sent)
    envs.receive()
    for env in vecenv.envs:
        own = env.actions[0]
        assert own in space
        assert not isinstance(space, Box) or (type(own), own.dtype) == (np.ndarray, space.dtype)
        assert not isinstance(space, Discrete) or type(own) is space.dtype.type  # as it samples
        as_lists = torch.utils._pytree.tree_map(lambda part: np.asarray(part).tolist(), own)
        assert as_lists == taken


@pytest.mark.parametrize(
    ("space", "said"),
    [
        (Box(50, 100, (1,)), "from 50 to 100.*RescaleAction"),
        (Box(-40, 40, (2,)), "from -40 to 40.*RescaleAction"),
        (Box(-0.01, 0.01, (1,)), "from -0.01 to 0.01.*RescaleAction"),
        (Box(0, 255, (1,), np.uint8), "from 0 to 255.*TransformAction"),
        (Dict(a=UNIT, b=Box(50, 100, (1,))), "from 50 to 100.*TransformAction"),
        (Box(np.array([-1, 2.0]), np.array([1, np.inf])), "from 2 to inf.*TransformAction"),
        (Box(-2, 2, (1,)), None),
        (Box(0, 1, (1,)), None),
        (Box(0, 0, (1,)), None),
        (Box(-np.inf, np.inf, (1,)), None),
        (Box(-1e300, 1e300, (1,), np.float64), None),
    ],
)
def test_a_box_of_actions_that_the_policy_does_not_begin_in_is_named(space, said, capfd):
    adapted(num_envs=2, acts=space).reset(seed=1)
    err = capfd.readouterr().err
    assert len(re.findall(said, err)) == 1 if said else "gymnasium.wrappers" not in err


def test_an_action_that_the_environment_keeps_stays_as_it_is():
    envs = adapted(acts=Box(-1, 1, (2,)))
    envs.reset(seed=1)
    buffer = np.full((1, 2), 0.5, np.float32)  # a worker's, shared and written to again
    envs.step(buffer)
    buffer[:] = 0
    assert envs.envs[0].actions[0].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    "reward",
    [
        *(1.5, np.float32(1.5), np.array([1.5]), [[1.5]], Decimal("1.5")),
        torch.tensor([1.5]),
        torch.tensor(1.5, requires_grad=True),
        torch.tensor(1.5, dtype=torch.bfloat16),
    ],
    ids=repr,
)
def test_reward_that_holds_one_number_is_that_number(reward):
    envs = adapted(reward=reward)
    envs.reset(seed=1)
    assert step(envs)[1].tolist() == [1.5]


@pytest.mark.parametrize(
    ("script", "named"),
    [
        ({"reward": None}, "reward of environment 0 is None"),
        ({"reward": 10**400}, "reward of environment 0 is 1000"),
        ({"observation": torch.ones(1, requires_grad=True)}, "grad"),
        ({"reward": np.complex64(1j)}, "reward .*1j"),
        ({"reward": np.ones(2)}, r"reward .*\[1., 1.\].*LinearReward"),
        ({"reward": np.nan}, "step 1 the reward of environment 0 is not finite"),
        ({"observation": [np.nan]}, "step 0 the observation of environment 0 is not finite"),
        ({"observation": [1, 2]}, r"environment 0 .*\(2,\).*\(1,\)"),
        ({"observation": 3, "space": Discrete(3)}, "3.*Discrete"),
        ({"observation": 1.5, "space": Discrete(3)}, "1.5.*Discrete"),
        ({"observation": [0.5], "space": MultiDiscrete([2])}, "0.5"),
        ({"observation": [2, 1], "space": MultiBinary(2)}, "Binary"),
        ({"observation": [1j]}, "complex128 is no real number"),
        ({"observation": np.ma.array([0.0], mask=[True])}, "some of its numbers are masked"),
        ({"length": "never"}, "end .* is 'False', "),
        ({"length": "unclear"}, "end .* is nan, "),
        ({"observation": {}, "space": Dict(a=UNIT)}, "KeyError.*a"),
        ({"observation": np.eye(8) / 2, "space": BYTES}, "no bytes"),
        ({"observation": {"a": np.eye(8) / 2}, "space": Dict(a=BYTES)}, "no bytes"),
        ({"observation": {"a": 300 * np.eye(8, dtype=int)}, "space": Dict(a=BYTES)}, "no bytes"),
    ],
)
def test_what_is_no_number_or_does_not_fit_is_named(script, named):
    envs = adapted(**script)
    with pytest.raises(pufferlib.APIUsageError, match=named) as error:
        envs.reset(seed=1)
        step(envs)
    assert (error.type is adapters.NotFinite) == ("is not finite" in str(error.value))


class Own(pufferlib.PufferEnv):
    """In the place of one in C; kind: what it does otherwise."""

    def __init__(self, buf=None, seed=0, kind=""):
        self.single_observation_space = UNIT
        if kind.startswith("bytes"):
            self.single_observation_space = Box(0, 255, (1,), np.uint8)
        starts = {"start": Discrete(2, start=1), "whole": Box(0, 2, (1,), np.int32)}
        self.single_action_space = starts.get(kind, Discrete(2))
        self.num_agents = 1
        self.kind = kind
        super().__init__(buf)
        if kind == "bound at first":
            self.rewards = self.kept = np.zeros(1, np.float32)
        if kind == "resets itself":
            self.reset(only=1)

    def reset(self, seed=None, only=None):
        if self.kind == "alone":
            return self.observations
        return self.observations, []

    def step(self, actions):
        self.rewards[:] = np.inf if self.kind == "infinite" else 1
        if self.kind == "bound at first":  # and written where it was, as C does
            self.kept += self.kept
        if self.kind == "bound":
            self.rewards = np.full(1, 0.1)  # float64
        if self.kind == "bound, beyond float32":
            self.rewards = np.full(1, 1e39)
        if self.kind == "column":
            self.rewards = np.full((1, 1), 0.1)
        if self.kind == "takes the actions":
            actions[:] = 7
        if self.kind == "floats for truth":
            self.terminals = np.zeros(1)
        if self.kind.startswith("bytes"):
            self.observations = np.full((1, 1), {"bytes, -1": -1, "bytes, 0.7": 0.7}[self.kind])
        if self.kind == "shape":
            self.rewards = np.zeros(3)
        rewards = np.full(1, 5.0) if self.kind == "apart" else self.rewards
        infos = {"some": [None, {"score": 3}], "one": {"score": 3}, "no": None}
        infos["words"] = [{"score": 3, "n": "x", "names": ["a", "b"], "a function": lambda: 1}]
        infos = infos.get(self.kind, [])
        return self.observations, rewards, None, [False], infos

    def check(self):  # a name that means nothing here
        raise NotImplementedError


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("start", "actions of a PufferEnv begin at 0.*start=1"),
        ("whole", "whole ones in no Box"),
        ("apart", r"rewards that are not in its buffer.*self.rewards\[:\] = "),
        ("infinite", "a reward is not finite"),
        ("bound, beyond float32", "a reward is not finite"),
        ("bytes, 0.7", "binds float64 to self.observations: no uint8"),
        ("bytes, -1", "binds int64 to self.observations: no uint8"),
        ("shape", r"binds to self.rewards: could not broadcast"),
        ("alone", "reset returned ndarray"),
    ],
)
def test_what_a_pufferenv_of_ones_own_gets_wrong_is_named(kind, named):
    with pytest.raises(pufferlib.APIUsageError, match=named):
        envs = adapters.make("tests.test_environments:Own", {"kind": kind}, 1, 0, 1)
        envs.async_reset(1)
        envs.send(np.zeros(1, np.int64))


@pytest.mark.parametrize(
    ("kind", "reward", "scores"),
    [
        ("some", 1, [3]),
        ("one", 1, [3]),
        ("no", 1, []),
        ("bound", 0.1, []),
        ("bound at first", 2, []),
        ("column", 0.1, []),
        ("floats for truth", 1, []),
        ("resets itself", 1, []),
        ("words", 1, [3]),
        ("takes the actions", 1, []),
        ("", 1, []),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_pufferenv_of_ones_own_may_bind_its_buffers_names_and_tell_little(
    kind, reward, scores, num_workers
):
    vecenv = adapters.make("tests.test_environments:Own", {"kind": kind}, 1, num_workers, 1)
    rows, envs = rollout(vecenv, 2)
    assert rows[1, 0].tolist() == pytest.approx([0, reward, 0, 1])
    assert [value for value, _ in envs.logs["score"]] == scores
    envs.close()


class Duel(pufferlib.PufferEnv):
    """Games of four steps. Agent 1 is away in steps 2 and 3: its episode has ended, or it waits."""

    def __init__(self, buf=None, seed=0, ends=True):
        self.single_observation_space = Box(0, np.inf, (1,), np.float32)
        self.single_action_space = Discrete(2)
        self.num_agents = 2
        self.t = 0
        self.ends = ends
        super().__init__(buf)

    def reset(self, seed=None):
        return self.observations, []

    def step(self, actions):
        self.t += 1
        self.observations[:] = self.t
        self.rewards[:] = 1
        self.terminals[:] = self.t % 4 == 0
        self.terminals[1] |= self.ends and self.t % 4 == 2
        self.masks[1] = self.t % 4 < 2
        return self.observations, self.rewards, self.terminals, self.truncations, []


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("ends", [True, False])
def test_an_agent_that_comes_back_after_its_end_begins_anew_and_one_that_waited_does_not(
    ends, num_workers
):
    module = "tests.test_environments:Duel"
    vecenv = adapters.make(module, {"ends": ends}, 1, num_workers, 1)
    rows, envs = rollout(vecenv, 9)
    valid = [1, 1, 0, 0, 1, 1, 0, 0, 1] if ends else [1] * 9
    dones = [1, 0, 1, 1, 1, 0, 1, 1, 1] if ends else [1, 0, 0, 0, 1, 0, 0, 0, 1]
    assert rows[:, 1, 2:].tolist() == np.stack((dones, valid), -1).tolist()
    assert rows[:, 0, 2:].tolist() == [[t % 4 == 0, 1] for t in range(9)]
    of_one = [(total, length) for agent, total, length in envs.episodes if agent == 1]
    assert of_one == ([(2, 2)] * 2 if ends else [(4, 4)] * 2)
    envs.close()


class Uneven(Own):
    def __init__(self, buf=None, seed=0):
        super().__init__(buf, seed)
        self.num_agents = 1 if buf is None else 2


class Seedless(Own):
    def __init__(self, buf=None):
        super().__init__(buf)


@pytest.mark.parametrize(
    ("name", "named"),
    [("Uneven", "different num_agents: 1, 2"), ("Seedless", "should take seed: buf=None, seed=0")],
)
def test_a_pufferenv_of_ones_own_that_cannot_be_copied_is_refused(name, named):
    with pytest.raises(pufferlib.APIUsageError, match=named):
        adapters.make(f"tests.test_environments:{name}", {}, 2, 0, 1)


def test_copies_of_a_pufferenv_share_no_argument():
    vecenv = adapters.make("tests.test_environments:Takes", {"levels": [1, 2]}, 3, 0, 1)
    assert [env.level for env in vecenv.envs] == [2, 2, 2]


class Takes(Own):
    def __init__(self, levels, buf=None, seed=0):
        super().__init__(buf, seed)
        self.level = levels.pop()


def test_a_module_here_with_the_name_of_a_game_of_oceans_is_not_taken_for_it(tmp_path, monkeypatch):
    (tmp_path / "squared.py").write_text("def parallel_env(): pass\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pufferlib.APIUsageError, match=r"squared.py is here.*puffer_squared"):
        adapters.make("squared", {}, 1, 0, 1)
    adapters.make("puffer_squared", {}, 1, 0, 1).close()


def test_an_entry_point_that_is_none_is_named(monkeypatch):
    register_once(monkeypatch, None, vector_entry_point="somewhere:Vector")
    with pytest.raises(pufferlib.APIUsageError, match="give it an entry_point"):
        adapters.make("Its-v0", {}, 1, 0, 1)
    register_once(monkeypatch, "tests.environments.Task")
    with pytest.raises(pufferlib.APIUsageError, match="Task should be module:name"):
        adapters.make("Its-v0", {}, 1, 0, 1)


def test_the_api_before_gymnasium_is_named():
    envs = adapted()
    envs.envs[0].reset = lambda **seed: np.zeros(2)
    with pytest.raises(pufferlib.APIUsageError, match="reset returned ndarray"):
        envs.reset(seed=1)


class OldStep(Scripted):
    def step(self, action):
        return np.zeros(1), 0.0, False, {}


class NoOptions(Scripted):
    def reset(self, seed=None):
        return super().reset()


class NoDefault(Scripted):
    def reset(self, seed, options):
        return super().reset()


class Slip(Scripted):
    def step(self, action):
        return int("not")


def test_what_gymnasium_itself_finds_is_a_line_and_a_slip_is_its_own_error(monkeypatch, capfd):
    register = partial(register_once, monkeypatch, max_episode_steps=9)
    for slip, named in (OldStep, "expected 5, got 4.*terminated"), (NoOptions, "'options'.*seed="):
        register(slip)
        envs = adapters.make("Its-v0", {}, 2, 0, 1).driver_env
        with pytest.raises(pufferlib.APIUsageError, match=named):
            envs.reset(seed=1)
            step(envs)
    with pytest.raises(pufferlib.APIUsageError, match=r"missing.*'options'.*should be"):
        adapters.GymnasiumEnvs(NoDefault).reset(seed=1)  # not by Gymnasium's wrappers
    register(object)
    with pytest.raises(pufferlib.APIUsageError, match="must inherit"):
        adapters.make("Its-v0", {}, 2, 0, 1)
    register(Slip)
    envs = adapters.make("Its-v0", {}, 2, 0, 1).driver_env
    envs.reset(seed=1)
    with pytest.raises(ValueError, match="invalid literal"):
        step(envs)
    adapters.say(f"error: {np.eye(30)}")
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_environments_that_are_one_or_unlike_are_refused():
    one = Scripted()
    for objects in [one, one], [Scripted(), one, one]:
        with pytest.raises(pufferlib.APIUsageError, match="one object is given as several"):
            adapters.GymnasiumEnvs(partial(next, iter(objects)), len(objects)).reset()
    two = (Discrete(2), Discrete(3)), (UNIT, Box(-2, 2, (1,))), (Discrete(2), Discrete(2, start=5))
    for kinds in two:
        make_one = partial(lambda some: Scripted(acts=next(some)), iter(kinds))
        with pytest.raises(pufferlib.APIUsageError, match="different spaces"):
            adapters.GymnasiumEnvs(make_one, 2).reset()


@pytest.mark.parametrize("number", [1, 2])
def test_actions_that_change_at_a_reset_are_refused(number):
    class Changes(Scripted):
        resets = 0

        def reset(self, seed=None, options=None):
            self.resets += 1
            if self.resets == number:
                self.action_space = Discrete(5)
            return super().reset(seed=seed)

    envs = adapters.GymnasiumEnvs(Changes)
    with pytest.raises(pufferlib.APIUsageError, match="changes its action_space"):
        envs.reset()
        step(envs, 3)


def test_actions_that_change_in_an_episode_or_of_several_agents_are_refused():
    class Changes(Scripted):
        def step(self, action):
            self.action_space = Discrete(5)
            return super().step(action)

    class Grows(Played):
        def reset(self, seed=None, options=None):
            self.action_space = lambda agent: Discrete(5)
            return super().reset()

    for envs in adapters.GymnasiumEnvs(Changes), adapters.PettingZooEnvs(lambda: Grows(DIES)):
        with pytest.raises(pufferlib.APIUsageError, match="changes its action_space"):
            envs.reset()
            step(envs, 2)


@pytest.mark.parametrize("name", ["observation_space", "action_space", "possible_agents"])
def test_an_error_in_a_property_is_its_own(name):
    def slip(self):
        return self.config

    base, several = (Played, [DIES]) if name == "possible_agents" else (Scripted, [])
    envs = adapters.PettingZooEnvs if several else adapters.GymnasiumEnvs
    broken = type("Broken", (base,), {name: property(slip, lambda self, value: None)})
    with pytest.raises(AttributeError, match="config"):
        envs(lambda: broken(*several))


@pytest.mark.parametrize("where", ["__init__", "reset", "step"])
def test_sys_exit_in_an_environment_is_an_error_with_its_line(monkeypatch, where):
    register_once(monkeypatch, type("Exits", (Scripted,), {where: lambda *_, **__: sys.exit()}))
    with pytest.raises(pufferlib.APIUsageError, match=rf"sys.exit, in {__file__}, line \d+"):
        envs = adapters.make("Its-v0", {}, 2, 0, 1).driver_env
        envs.reset(seed=1)
        step(envs)


ENDS = {
    "it has gone": ("sys.exit", lambda *_, **__: sys.exit("it has gone")),
    "exit()": ("line", lambda *_, **__: exit()),
    "argparse": ("line", lambda *_, **__: argparse.ArgumentParser().parse_args(["--x"])),
}


@pytest.mark.parametrize("kind", ENDS)
def test_an_exit_by_the_standard_library_is_told_by_the_environments_line_and_words(kind):
    envs = adapters.GymnasiumEnvs(type("Exits", (Scripted,), {"step": ENDS[kind][1]}))
    envs.reset(seed=1)
    with pytest.raises(pufferlib.APIUsageError) as error:
        step(envs)
    words = ": it has gone" if kind == "it has gone" else ""
    assert re.search(rf"sys.exit, in {__file__}, line \d+{words}$", str(error.value))


@pytest.mark.parametrize("name", ["observation_space", "action_space", "possible_agents"])
def test_a_space_that_is_not_there_is_named(name):
    """Set in reset, or forgotten; Gymnasium only declares them, and PettingZoo too."""
    several = name == "possible_agents"
    envs = adapters.PettingZooEnvs if several else adapters.GymnasiumEnvs
    known = {"observation_space": UNIT, "action_space": Discrete(2)}
    known.pop(name, None)
    kind = type("Late", (ParallelEnv,) if several else (gym.Env,), known)
    for wrap in (None,) if several else (None, gym.Wrapper):
        with pytest.raises(pufferlib.APIUsageError, match=f"it has no {name}"):
            envs((lambda wrap=wrap: wrap(kind())) if wrap else kind)


def test_a_slip_within_reset_is_not_taken_for_its_arguments():
    class Simulates(Scripted):
        def reset(self, seed=None, options=None):
            return NoSeed().reset(seed=seed)

    class NoSeed:
        def reset(self):
            return 0

    with pytest.raises(TypeError, match="unexpected keyword argument 'seed'"):
        adapters.GymnasiumEnvs(Simulates).reset(seed=1)


@pytest.mark.parametrize("slow", ["__init__", "reset"])
def test_a_first_reset_that_takes_long_says_once_how_far_it_is(monkeypatch, capfd, slow):
    clock = iter(range(0, 1000, 2))  # two seconds between two looks
    monkeypatch.setattr(adapters, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    made = adapters.GymnasiumEnvs(Scripted, 3)
    if slow == "reset":
        while len(made.envs) < 3:
            made.add_one()
    made.reset(seed=1)
    said = {"__init__": "environments: made 2 of 3 after 4 s\n"}
    assert capfd.readouterr().err == said.get(slow, "environments: reset 1 of 3 after 4 s\n")


def test_a_thread_that_close_leaves_is_named(capfd):
    class Threads(Scripted):
        def __init__(self):
            super().__init__()
            self.thread = threading.Thread(target=ended.wait, name="the simulator")
            self.thread.start()

    class Ends(Threads):
        def close(self):
            ended.set()

    class Pools(Scripted):
        def __init__(self):
            super().__init__()
            self.pool = ThreadPoolExecutor(1)  # which Python ends by itself
            self.pool.submit(int).result()

    for kind, left in (Threads, True), (Ends, False), (Pools, False):
        ended = threading.Event()
        try:
            adapters.GymnasiumEnvs(kind).close()
            assert ("still on, 1, such as the simulator" in capfd.readouterr().err) == left
        finally:
            ended.set()


def test_an_error_of_an_environments_process_is_its_own(monkeypatch, tmp_path):
    class Waits(Scripted):
        def step(self, action):
            os.waitpid(2**22 - 3, 0)

    register_once(monkeypatch, Waits)
    with pytest.raises(ChildProcessError):
        train_here(tmp_path, env_id="Its-v0")


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["forked", "program"])
def test_a_process_of_an_environments_own_can_be_ended(monkeypatch, num_workers, kind, capfd):
    class Owns(Scripted):
        def __init__(self):
            super().__init__()
            ready, child = os.pipe()
            self.pid = os.fork() if kind == "forked" else subprocess.Popen(["sleep", "99"]).pid
            while self.pid == 0:
                os.write(child, b"1")  # a signal that comes before this is lost
                signal.pause()
            if kind == "forked":
                os.read(ready, 1)

        def close(self):
            if kind == "program":  # a Ctrl-C in the terminal is not for those of workers
                status = pathlib.Path(f"/proc/{self.pid}/status").read_text()
                ignored = int(re.search(r"SigIgn:\s*(\w+)", status)[1], 16)
                assert ignored >> (signal.SIGINT - 1) & 1 == pufferlib.vector.in_worker
            os.kill(self.pid, signal.SIGTERM)
            try:
                wait_for(lambda: os.waitpid(self.pid, os.WNOHANG)[0], timeout=3)
            except AssertionError:
                os.kill(self.pid, signal.SIGKILL)
                raise

    adapters.say_once.cache_clear()
    register_once(monkeypatch, Owns)
    with adapters.signals_kept():
        if num_workers == 0:
            signal.signal(signal.SIGTERM, lambda *_: None)  # as a run's; workers have their own
        envs = adapters.make("Its-v0", {}, 2, num_workers, 1)
        envs.async_reset(1)
        envs.recv()
        envs.close()
    assert "close fails" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        partial(torch.set_default_dtype, torch.float64),
        partial(torch.set_grad_enabled, False),
        partial(torch.set_default_device, "meta"),
    ],
    ids=lambda change: change.func.__name__ if hasattr(change.func, "__name__") else "grad",
)
@pytest.mark.parametrize("number", [1, 2])
def test_what_an_environment_changes_in_torch_for_all_is_refused(monkeypatch, change, number):
    def make_one():
        numbers.append(len(numbers))
        if len(numbers) == number:  # the second is made when they are reset
            change()
        return Scripted()

    numbers = []
    register_once(monkeypatch, make_one)
    before = adapters.torch_settings()
    with pytest.raises(pufferlib.APIUsageError, match="changes torch for all"):
        adapters.make("Its-v0", {}, 2, 0, 1).reset()
    assert adapters.torch_settings() == before


def test_in_workers_an_environment_may_change_torch(monkeypatch):
    def make_one():
        torch.set_default_dtype(torch.float64)
        return Scripted(observation=[torch.tensor([0.5]).dtype == torch.float64])

    register_once(monkeypatch, make_one)
    envs = ppo.Envs(adapters.make("Its-v0", {}, 2, 2, 1), 1)
    with contextlib.closing(envs):
        envs.reset()
        assert envs.receive()[1].tolist() == [[1]]
    assert torch.get_default_dtype() == torch.float32


def test_an_environment_that_seeds_torch_leaves_training_its_own_numbers():
    class Seeds(Scripted):
        def step(self, action):
            torch.manual_seed(0)
            return super().step(action)

        def reset(self, seed=None, options=None):
            torch.manual_seed(0)
            return super().reset()

    envs = adapters.GymnasiumEnvs(Seeds)
    torch.manual_seed(1)
    expected = torch.rand(9)
    torch.manual_seed(1)
    envs.reset()
    drawn = []
    for _ in range(9):
        step(envs)
        drawn.append(torch.rand(1).item())
    assert drawn == expected.tolist()


def test_what_is_refused_or_fails_to_close_leaves_no_environment_open(capfd):
    class Closes(Scripted):
        def close(self):
            closed.append(self)
            raise OSError("is gone")

    closed = []
    adapters.say_once.cache_clear()
    with pytest.raises(pufferlib.APIUsageError, match="Text is not supported"):
        adapters.GymnasiumEnvs(lambda: Closes(space=gym.spaces.Text(3)))
    envs = adapters.GymnasiumEnvs(Closes, 3)
    envs.reset()
    envs.close()  # it costs nobody a finished run
    assert len(closed) == 4
    assert capfd.readouterr().err.count("close fails: OSError('is gone')") == 1


def test_an_end_in_a_list_is_that_end():
    envs = adapted(length=3)
    play = envs.envs[0].step
    envs.envs[0].step = lambda action: [[x] if isinstance(x, bool) else x for x in play(action)]
    envs.reset(seed=1)
    ends = [step(envs)[2].item() for _ in range(3)]
    assert ends == [False, False, True]


def test_numbers_of_an_info_are_logged_and_nothing_else():
    numbers = {
        "tensor": torch.ones(1),
        "score": 80,
        "is_success": np.True_,
        "length": np.array([8]),
        3: 0.5,
    }
    others = {"list": [1], "many": np.arange(3), "none": None, "text": "go", "complex": 1j}
    others |= {"thing": SimpleNamespace(item="sword"), "never": np.nan, "huge": 10**400}
    endless = {}
    endless["itself"] = endless
    others |= {
        "endless": endless,
        "space": UNIT,
        "choices": Discrete(3),
        "dtype": np.float32,
        "class": torch.Tensor,
    }
    told = numbers | others | {"episode": {"r": np.float32(1.5), "who": "me"}}
    _, envs = rollout(adapted(num_envs=2, info=told), 4)
    logged = {"tensor": 1, "score": 80, "is_success": 1, "length": 8, "3": 0.5, "episode/r": 1.5}
    means = envs.means()
    assert {name.removeprefix("env/") for name in means if "env/" in name} == logged.keys()
    assert all(means[f"env/{name}"] == value for name, value in logged.items())
    for nothing in None, {}:
        envs = adapted(info=nothing)
        envs.reset(seed=1)
        assert not any(step(envs, 2)[4])


def test_an_info_is_that_of_the_last_step_and_is_not_summed():
    class Counts(Episode):
        observation_space = UNIT
        action_space = Discrete(2)

        def step(self, action):
            self.t += 1
            return self.observe(), 0.0, self.t == 3, False, {"steps": self.t, f"at {self.t}": 1}

    envs = adapters.GymnasiumEnvs(Counts, 1)
    envs.reset(seed=1)
    infos = [step(envs)[4] for _ in range(8)]
    last = [{"steps": 3, "at 3": 1}]
    assert infos == [[], [], last, [], [], [], last, []]


# Episodes -----------------------------------------------------------------------------------------


def rollout(vecenv, steps: int) -> tuple[np.ndarray, ppo.Envs]:
    """Of each step and agent: observation, reward, done and valid as ppo.Envs tells them."""
    envs = ppo.Envs(vecenv, 1)
    envs.reset()
    rows = []
    actions = np.zeros((envs.num_agents, 1), int)
    for t in range(steps):
        _, observations, rewards, dones, valid = envs.receive()
        first = observations.reshape(len(observations), -1)[:, 0]
        rows.append(np.stack((first, rewards, dones, valid), -1))
        if t < steps - 1:
            envs.send(actions)
    assert not actions.any(), "an environment writes into what it is given"
    return np.array(rows), envs


class Played(ParallelEnv):
    """Plays a script: of each step, the agents that are there after it, and those that end in it,
    terminated (a) or truncated (A). A step's observation is its number, a reward 1.
    """

    metadata = {"name": "played"}  # noqa: RUF012
    possible_agents = ["a", "b"]  # noqa: RUF012

    def __init__(self, script, first=("a", "b"), seen=None):
        self.script = script
        self.first = first
        self.seen = seen  # the agents that are shown; by default those that play or begin
        self.sent = []

    def observation_space(self, agent):
        return Box(0, 99, (1,))

    def action_space(self, agent):
        return dict.fromkeys(self.possible_agents, Discrete(2))[agent]  # KeyError: of no other

    def reset(self, seed=None, options=None):
        self.t = 0
        self.agents = list(self.first)
        return {agent: [0] for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions):
        self.sent.append(sorted(actions))
        playing = self.agents
        after, ends = self.script[self.t]
        self.t += 1
        self.agents = list(after)
        seen = self.seen or {*playing, *self.agents}
        return (
            {agent: [self.t] for agent in seen},
            dict.fromkeys(playing, 1.0),
            {agent: agent in ends for agent in playing},
            {agent: agent.upper() in ends for agent in playing},
            {agent: {"at": self.t} for agent in playing},
        )


FIRST = [0, 0, 1, 1]  # observation, reward, done, valid
GONE = [0, 1, 0]  # reward, done, valid of one that is not there; what it saw is of before
DIES = [("b", "a"), ("b", ""), ("", "B")]
BACK = [("b", "a"), ("ab", ""), ("", "ab")]
DEAD = [FIRST, [1, 1, 1, 0], [1, *GONE], [1, *GONE], FIRST]
ALIVE = [FIRST, [1, 1, 0, 1], [2, 1, 0, 1], [3, 1, 0, 0], FIRST]
AGAIN = [FIRST, [1, 1, 1, 0], [2, 0, 1, 1], [3, 1, 1, 0], FIRST]
ON = [FIRST, [1, 1, 1, 0], [2, 1, 1, 1], [3, 1, 1, 0], FIRST]  # an end's next reward is not learned
LATER = [FIRST, [1, 1, 1, 0], [2, 1, 1, 0], [2, *GONE]]
LATE = [[0, 0, 1, 0], [1, 0, 1, 1], [2, 1, 1, 0], [2, *GONE], [1, 0, 1, 1]]
SCRIPTS = {
    "all end at once": ([("", "ab")], {}, "a", [FIRST, [1, 1, 1, 0], FIRST], [1, 1]),
    "one dies": (DIES, {}, "a", DEAD, [1, 3]),
    "the other lives": (DIES, {}, "b", ALIVE, [1, 3]),
    "it comes back": (BACK, {}, "a", AGAIN, [1, 1, 3]),
    "it is late": ([("ab", ""), ("", "ab")], {"first": "b"}, "a", LATE, [1, 2]),
    "it vanishes": ([("b", ""), ("", "b")], {}, "a", [FIRST, [1, 1, 0, 0], [1, *GONE]], [1, 2]),
    "all vanish": ([("", "")], {}, "a", [FIRST, [1, 1, 0, 0], FIRST], [1, 1]),
    "it plays on": ([("ab", "a"), ("ab", ""), ("", "ab")], {}, "a", ON, [1, 1, 3]),
    "it leaves a step later": ([("ab", "a"), ("b", ""), ("", "b")], {}, "a", LATER, [1, 3]),
    "it is not shown": ([("ab", "")], {"seen": "b"}, "a", [FIRST, [0, 1, 1, 0]], [1]),
}


class Restarts(Scripted):
    def step(self, action):
        result = super().step(action)
        if self.t == self.length:
            self.reset()
        return result


class AllRestart(Played):
    def step(self, actions):
        result = super().step(actions)
        if not self.agents:
            self.reset()
        return result


def test_a_step_that_calls_its_reset_is_warned_of_at_an_end(capfd):
    both_end = [("ab", ""), ("", "ab")]
    for make_one, warned in (
        (Scripted, False),
        (Restarts, True),
        (partial(Played, both_end), False),
        (partial(AllRestart, both_end), True),
    ):
        adapters.say_once.cache_clear()
        kind = adapters.GymnasiumEnvs
        if isinstance(make_one, partial):
            kind = adapters.PettingZooEnvs
        envs = kind(make_one)
        envs.reset(seed=1)
        step(envs)
        assert capfd.readouterr().err == ""
        step(envs, 4)
        assert ("its step has a self.reset()" in capfd.readouterr().err) == warned


@pytest.mark.parametrize(
    ("script", "how", "agent", "expected", "lengths"), SCRIPTS.values(), ids=SCRIPTS
)
def test_agents_come_and_go(script, how, agent, expected, lengths, capfd):
    vecenv = adapters.PettingZooEnvs(lambda: Played(script, **how))
    rows, envs = rollout(vecenv, len(expected))
    assert rows[:, "ab".index(agent)].tolist() == expected
    assert [length for _, _, length in envs.episodes] == lengths
    assert all(returned == length for _, returned, length in envs.episodes)
    unsaid = script[0][1] == "" and "first" not in how
    plays_on = script[:2] == [("ab", "a"), ("ab", "")]
    assert capfd.readouterr().err.count("warning") == unsaid + plays_on


def test_a_game_without_a_list_of_agents_is_named():
    class Unlisted(Played):
        def reset(self, seed=None, options=None):
            result = super().reset()
            del self.agents
            return result

    with pytest.raises(pufferlib.APIUsageError, match="no list of agents"):
        adapters.PettingZooEnvs(lambda: Unlisted(DIES)).reset()


def test_an_end_that_is_not_said_is_an_end(monkeypatch, capfd):
    monkeypatch.setattr(adapters, "LONG", 3)
    vecenv = adapters.PettingZooEnvs(lambda: Played([("", "")]))
    rollout(vecenv, 5)
    assert "no episode has ended" not in capfd.readouterr().err


def test_agents_of_several_environments_have_rows_of_their_own_in_the_first_ones_order():
    orders = iter([["a", "b"], ["b", "a"]])

    def make_one():
        game = Played(DIES)
        game.possible_agents = next(orders)
        return game

    rows, _ = rollout(adapters.PettingZooEnvs(make_one, 2), 5)
    assert rows[:, 0].tolist() == rows[:, 2].tolist() == DEAD
    assert rows[:, 1].tolist() == rows[:, 3].tolist() == ALIVE


def test_a_row_has_the_means_of_its_own_interval():
    _, envs = rollout(adapted(info={"score": 80}), 4)
    envs.episodes = [(0, 1.0, 2), (1, 4.0, 6)]
    found = {"return": 2.5, "return_min": 1.0, "return_max": 4.0, "length": 4.0}
    assert envs.means() == {f"episodic_{key}": found[key] for key in found} | {"env/score": 80}
    assert envs.means() == {}


def test_oceans_means_weigh_by_their_episodes():
    vecenv = adapters.make("breakout", {}, 1, 0, 1)
    envs = ppo.Envs(vecenv, 1)
    envs.reset()
    *result, _, ids, mask = vecenv.recv()
    infos = [{"n": 1, "score": 0.0, "who": "me"}, {"n": 3, "score": 8.0, "more": {"x": 1}}]
    vecenv.recv = lambda: (*result, infos, ids, mask)
    envs.receive()
    means = envs.means()
    assert means["env/score"] == pytest.approx(6) and means["env/more/x"] == 1


def test_only_agents_that_play_act_and_their_infos_are_logged():
    vecenv = adapters.PettingZooEnvs(lambda: Played(BACK))
    _, envs = rollout(vecenv, 4)
    assert vecenv.envs[0].sent == [["a", "b"], ["b"], ["a", "b"]]
    assert envs.means()["env/at"] == (1 + 3 + 3) / 3
    ended_and_stays = [("ab", "a"), ("ab", "a"), ("", "ab")]
    _, envs = rollout(adapters.PettingZooEnvs(lambda: Played(ended_and_stays)), 4)
    assert envs.means()["env/at"] == (1 + 3) / 2
    _, envs = rollout(adapters.PettingZooEnvs(lambda: Played([("", "ab")])), 6)
    assert len(envs.episodes) == len(envs.logs["at"]) == 6  # of every episode of one step


UNNAMED = {
    "no agents": ("reset", lambda result, env: env.agents.clear() or result, "are no agents"),
    "none": ("reset", lambda result, env: setattr(env, "agents", None) or result, "are no agents"),
    "others": ("step", lambda result, env: ({0: [0]}, *result[1:]), "observations name no agent a"),
    "list": ("reset", lambda result, env: ([0], {}), "observations name no agent a"),
    "reward": ("step", lambda result, env: (result[0], {}, *result[2:]), "rewards name no agent a"),
    "number": ("step", lambda result, env: (result[0], 1.0, *result[2:]), "rewards name no agent"),
    "stranger": ("reset", lambda result, env: env.agents.append("c") or result, "c is none of its"),
    "__all__": (
        "step",
        lambda result, env: (*result[:2], {"__all__": True}, {"__all__": False}, {}),
        "terminations name no agent a",
    ),
}


@pytest.mark.parametrize(("method", "change", "named"), UNNAMED.values(), ids=UNNAMED)
def test_dictionaries_that_do_not_name_the_agents_are_refused(method, change, named):
    class Unnamed(Played):
        pass

    play = getattr(Played, method)
    changed = lambda env, *args, **kwargs: change(play(env, *args, **kwargs), env)  # noqa: E731
    setattr(Unnamed, method, changed)
    with pytest.raises(pufferlib.APIUsageError, match=named):
        rollout(adapters.PettingZooEnvs(lambda: Unnamed([("ab", "")])), 2)


def test_a_step_may_have_nothing_once_all_agents_are_gone(capfd):
    class Nothing(Played):
        def step(self, actions):
            super().step(actions)
            self.agents = None
            return {}, None, None, None, {}

    _, envs = rollout(adapters.PettingZooEnvs(lambda: Nothing([("ab", "")])), 2)
    assert [length for _, _, length in envs.episodes] == [1, 1]
    assert "is gone, so its episode ends" in capfd.readouterr().err


def test_an_agent_that_is_shown_later_plays_on_when_the_others_have_ended(capfd):
    class Later(Played):  # b is among env.agents from the start
        def reset(self, seed=None, options=None):
            observations, infos = super().reset()
            return {"a": observations["a"]}, infos

        def step(self, actions):
            observations, *rest = super().step(actions)
            if self.t < 3:
                del observations["b"]
            return observations, *rest

    script = [
        ("b", "a"),
        ("b", ""),
        ("b", ""),
        ("b", ""),
        ("", "b"),
    ]  # after 2 steps nobody is shown
    rows, envs = rollout(adapters.PettingZooEnvs(lambda: Later(script)), 6)
    assert rows[3:, 1].tolist() == [[3, 1, 1, 1], [4, 1, 0, 1], [5, 1, 1, 0]]
    assert [length for _, _, length in envs.episodes] == [1, 2]
    never = [("ab", ""), ("ab", "ab")]  # b's end is said, and it was never shown; it stays listed
    rows, envs = rollout(adapters.PettingZooEnvs(lambda: Later(never)), 6)
    assert [length for _, _, length in envs.episodes] == [2, 2]
    lines = capfd.readouterr().err.splitlines()  # one of each: before b was shown
    assert len(lines) == 2
    assert all("agent b has a reward in a step in which it does not act" in line for line in lines)


def test_agents_may_be_an_array_and_a_reward_of_one_that_is_away_is_said_to_be_lost(capfd):
    class Arrays(Played):
        def reset(self, seed=None, options=None):
            result = super().reset()
            self.agents = np.array(self.agents)
            return result

        def step(self, actions):
            self.agents = list(self.agents)
            observations, _, *rest = super().step(actions)
            self.agents = np.array(self.agents)
            return observations, {"a": 1.0, "b": 1.0}, *rest

    rows, _ = rollout(adapters.PettingZooEnvs(lambda: Arrays(DIES)), 5)
    assert rows[:, 0].tolist() == DEAD and rows[:, 1].tolist() == ALIVE
    said = "warning: agent a has a reward in a step in which it does not act: that is lost\n"
    assert capfd.readouterr().err == said


def test_agents_with_unlike_spaces_or_names_are_refused():
    class Unlike(Played):
        def action_space(self, agent):
            return Discrete(3 if agent == "b" else 2)

    class Named(Played):
        def __init__(self):
            super().__init__([])
            self.possible_agents = next(names)

    names = iter([["a", "b"], ["a", "c"], ["a", "a"]])
    with pytest.raises(pufferlib.APIUsageError, match="different agents"):
        adapters.PettingZooEnvs(Named, 2).reset(1)
    with pytest.raises(pufferlib.APIUsageError, match="have one twice"):
        adapters.PettingZooEnvs(Named)

    with pytest.raises(pufferlib.APIUsageError, match=r"a and b .*action_space.*pad_action_space"):
        adapters.PettingZooEnvs(lambda: Unlike([]))


# By name ------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, and an empty one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_a_module_of_the_current_folder_is_found(folder):
    pathlib.Path("this.py").write_text("its = 1")  # Python has a module of this name too
    assert adapters.make("CartPole-v1", {}, 1, 0, 1) and adapters.module_of("this").its == 1
    text = "import environments, gymnasium, parallel_game\n"
    text += "gymnasium.register('Here-v0', environments.TwoDials)\n"
    text += "parallel_env = parallel_game.parallel_env\n"
    pathlib.Path("games_of_this_folder.py").write_text(text)
    assert adapters.make("games_of_this_folder:Here-v0", {"length": 6}, 2, 0, 1).num_agents == 2
    assert adapters.make("games_of_this_folder", {}, 2, 0, 1).num_agents == 6
    text = "import parallel_game\ndef parallel_env(some):\n    some.append(1)\n"
    pathlib.Path("changes_it.py").write_text(text + "    return parallel_game.parallel_env()\n")
    some = []
    assert adapters.make("changes_it", {"some": some}, 2, 0, 1).num_agents == 6 and some == []
    text = "from pufferlib.ocean.squared.squared import Squared\nclass Mine(Squared): pass"
    pathlib.Path("in_c.py").write_text(text)
    assert adapters.make("in_c:Mine", {"size": 5}, 4, 0, 1).single_observation_space.shape == (25,)
    with pytest.raises(pufferlib.APIUsageError, match=r"--env\.colour"):
        adapters.make("in_c:Mine", {"colour": 5}, 4, 0, 1)
    pathlib.Path("in_turn.py").write_text(
        "from pettingzoo.classic.rps.rps import env as parallel_env"
    )
    with pytest.raises(pufferlib.APIUsageError, match="aec_to_parallel"):
        adapters.make("in_turn", {}, 2, 0, 1)
    pathlib.Path("package").mkdir()  # as gymnasium_robotics has its mamujoco_v1
    pathlib.Path("package/__init__.py").write_text("import parallel_game as game_v1")
    assert adapters.make("package.game_v1", {}, 2, 0, 1).num_agents == 6
    assert adapters.module_of("package.game_v2") is None
    pathlib.Path("broken_game.py").write_text("import no_such_package")
    with pytest.raises(ModuleNotFoundError):  # with its traceback
        adapters.make("broken_game:Here-v0", {}, 2, 0, 1)
    pathlib.Path("slip.py").write_text("""
import gymnasium
def make():
    return {}["slip"]
gymnasium.register("Slip-v0", make)
""")
    with pytest.raises(KeyError) as caught:
        adapters.make("slip:Slip-v0", {}, 2, 0, 1)
    assert caught.traceback[-1].path.name == "slip.py"


def test_every_environment_is_made_once_and_reset_once_with_its_seed():
    seeds = []

    class Counted(Scripted):
        def reset(self, seed=None, options=None):
            seeds.append(seed)
            return super().reset()

    made = []
    envs = adapters.GymnasiumEnvs(lambda: made.append(Counted()) or made[-1], 4, seed=3)
    envs.reset(3)
    step(envs, 3)  # an episode ends, and another begins
    assert len(made) == 4 and len(set(seeds[:4])) == 4 and None not in seeds[:4]
    assert seeds[4:] == [None] * 4


class Drawn(Scripted):
    def __init__(self):
        drawn = [np.random.random(), random.random(), torch.rand(1).item(), self.np_random.random()]
        super().__init__(observation=drawn, space=Box(0, 1, (4,)))


def test_what_an_environment_draws_while_it_is_made_is_seeded(monkeypatch):
    register_once(monkeypatch, Drawn)
    made = [adapters.make("Its-v0", {}, 2, 0, seed).reset()[0].copy() for seed in (1, 1, 2)]
    np.testing.assert_array_equal(made[0], made[1])
    assert len({*made[0][:, 3], *made[2][:, 3]}) == 4


def test_arguments_reach_the_environment_or_are_refused(monkeypatch):
    register = partial(register_once, monkeypatch)

    def its_own(num_envs=0, seed=0, buf=0):  # names that PufferLib uses too
        return Scripted(observation=[num_envs, seed, buf], space=Box(0, 9, (3,)))

    register(its_own)
    envs = adapters.make("Its-v0", {"num_envs": 3, "seed": 5, "buf": 7}, 2, 0, 1)
    assert envs.reset()[0].tolist() == [[3, 5, 7], [3, 5, 7]]
    assert adapters.make("breakout", {"frameskip": 2}, 3, 0, 1).num_agents == 3
    for env_id, name in ("Its-v0", "sizes"), ("breakout", "frameskp"), ("parallel_game", "longst"):
        with pytest.raises(pufferlib.APIUsageError, match=name):
            adapters.make(env_id, {name: 1}, 2, 0, 1)
    register(lambda size: Scripted())
    with pytest.raises(pufferlib.APIUsageError, match=r"--env\.size: the environment needs it"):
        adapters.make("Its-v0", {}, 1, 0, 1)
    register(lambda id, max_episode_steps: Scripted([id, max_episode_steps], Box(0, 9, (2,))))
    envs = adapters.make("Its-v0", {"id": 3, "max_episode_steps": 2}, 1, 0, 1).driver_env
    assert envs.reset()[0].tolist() == [[3, 2]]
    assert not step(envs)[3] and step(envs)[3]  # it is Gymnasium's limit too


# Seeds, workers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_seed_gives_the_same_and_every_environment_has_its_own(num_workers):
    """I6: neighbouring seeds share no environment."""
    starts = []
    for seed in 1, 1, 2:
        vecenv = adapters.make("CartPole-v1", {}, 4, num_workers, seed)
        with contextlib.closing(ppo.Envs(vecenv, seed)) as envs:
            envs.reset()
            groups = [envs.receive()[1][:, 0].copy() for _ in range(envs.num_groups)]
        starts.append(sorted(np.concatenate(groups)))
    assert starts[0] == starts[1]
    assert len({*starts[0], *starts[2]}) == 8


@pytest.mark.parametrize(("num_workers", "groups"), [(1, 1), (2, 2), (4, 2)])
def test_even_workers_are_double_buffered(num_workers, groups):
    """One half of the agents is stepped by its workers while the policy acts on the other."""
    args = ppo.Args(env_id="CartPole-v1", num_envs=8, num_workers=num_workers)
    with contextlib.closing(ppo.make_envs(args, seed=1)) as envs:
        assert envs.num_groups == groups
        envs.reset()
        received = [envs.receive() for _ in range(groups)]
        covered = sorted((agents.start, agents.stop) for agents, *_ in received)
        assert covered == [(8 // groups * i, 8 // groups * (i + 1)) for i in range(groups)]
        assert all(observations.shape == (8 // groups, 4) for _, observations, *_ in received)
    assert not any(process.is_alive() for process in envs.vecenv.processes)


def test_what_is_wrong_in_a_worker_is_a_line(capfd):
    gym.register("Nan-v0", lambda: Scripted(reward=np.nan))
    envs = ppo.Envs(adapters.make("Nan-v0", {}, 2, 1, 1), 1)
    envs.reset()
    envs.receive()
    envs.send(np.zeros((2, 1), int))
    with pytest.raises(pufferlib.vector.WorkerEnded, match="exit code 1"):
        envs.receive()
    envs.close()
    said = "error: at step 1 the reward of environment 0 is not finite in float32; "
    said += "gymnasium.wrappers.TransformReward can replace it\n"
    assert capfd.readouterr().err == said


def test_workers_close_their_environments(tmp_path):
    class Closes(Scripted):
        def close(self):
            (tmp_path / str(os.getpid())).touch()

    gym.register("Closes-v0", Closes)
    envs = adapters.make("Closes-v0", {}, 2, 2, 1)
    envs.async_reset(1)
    envs.close()
    assert len(list(tmp_path.iterdir())) == 3  # that of this process too


@pytest.mark.parametrize(
    ("device", "cores", "num_envs", "num_workers"),
    [("cuda", 16, 4096, 8), ("cuda", 3, 4096, 0), ("cpu", 16, 4096, 0)],
)
def test_on_a_gpu_workers_are_many_even_and_divide_the_environments(
    monkeypatch, device, cores, num_envs, num_workers
):
    monkeypatch.setattr(ppo.os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    args = ppo.Args(num_envs=num_envs, device=device, precision="float32")
    ppo.resolve(args)
    assert args.num_workers == num_workers


# Examples ---------------------------------------------------------------------------------------


def test_the_wrapper_of_the_docs_does_what_it_says(folder):
    page = ROOT / "docs" / "environments.md"
    (grid,) = re.findall(r"^```py\n([^`]*ImgObsWrapper[^`]*)^```", page.read_text(), re.M)
    pathlib.Path("my_grid.py").write_text(grid)
    for kwargs in {}, {"name": "MiniGrid-MemoryS11-v0"}:
        envs = adapters.make("my_grid:Grid-v0", kwargs, 2, 0, 1)
        assert envs.reset()[0].shape == (2, 7, 7, 20)


def test_atari_a_life_is_an_episode_and_the_score_is_the_games():
    env = gym.make("envs.atari:Atari-v0", game="Breakout", disable_env_checker=True)
    lives = 0
    rewards = 0.0
    info = {}
    env.reset(seed=3)
    while "episode" not in info:
        observation, reward, terminated, truncated, info = env.step(lives % 4)
        assert observation.shape == (84, 84)
        rewards += reward
        if terminated or truncated:
            lives += 1
            env.reset()
    assert lives == 5
    assert info["episode"]["r"] == rewards
    assert env.unwrapped.ale.lives() == 5, "a new game has begun"


PRESETS = sorted(ROOT.glob("configs/*.yaml"))


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_preset_fits_its_environment(path):
    args, _ = ppo.parse_args(["--config", str(path)])
    with contextlib.closing(ppo.make_envs(args, 1)) as envs:
        assert args.minibatch_size <= envs.num_agents * args.num_steps
