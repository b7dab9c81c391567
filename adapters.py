"""Gymnasium and PettingZoo environments as PufferLib's: install_pufferlib.sh puts this file beside
PufferLib's own, as pufferlib/adapters.py, in place of what pufferlib/emulation.py is for.

An environment is reset in the step after an episode's end, whose action it ignores: so its last
observation is seen, and a truncated episode can be bootstrapped from it.
"""

import importlib
import importlib.util
import inspect
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import gymnasium as gym
import numpy as np
import pufferlib
import pufferlib.vector
from gymnasium.vector import AutoresetMode
from pufferlib.ocean import environment as ocean
from pufferlib.vector import env_seed


def note(text: str):
    print(text, file=sys.stderr, flush=True)


def is_pixels(space: gym.Space) -> bool:
    """Bytes with two sides of 8 or more. Smaller grids hold names, as MiniGrid's 7 x 7 x 3."""
    shape = space.shape or ()
    return space.dtype == np.uint8 and len(shape) in (2, 3) and sorted(shape)[-2] >= 8


def flat_observations(space: gym.Space, quiet: bool) -> tuple[gym.spaces.Box, Callable]:
    """The Box that the network sees of a space, and the function from an observation to its array.

    A Box stays as it is, in float32 unless it is pixels. All else becomes one vector in the order
    of Gymnasium's FlattenObservation: numbers one-hot, what goes from 0 to 255 in [0, 1].
    """
    if isinstance(space, gym.spaces.Box) and space.shape:
        if is_pixels(space):
            return space, np.asarray
        return gym.spaces.Box(-np.inf, np.inf, space.shape, np.float32), np.asarray
    if isinstance(space, gym.spaces.Dict):
        kept = OrderedDict(space.spaces)
        for key, part in space.spaces.items():
            if is_text(part):
                del kept[key]
                remark = f"observation: {key} is text, and left out"
            elif is_pixels(part):
                remark = f"observation: {key} is an image in a Dict, and flattened: see recipes/"
            else:
                continue
            if not quiet:
                note(remark)
        space = gym.spaces.Dict(kept)
    flat = None
    if not is_text(space) and space.is_np_flattenable:
        flat = gym.spaces.flatten_space(space)
    if not isinstance(flat, gym.spaces.Box) or flat.shape == (0,):
        raise pufferlib.APIUsageError(
            f"an observation space of {name_of(space)} is not supported; wrap the environment "
            "(docs/environments.md)"
        )
    scale = np.where((flat.low == 0) & (flat.high == 255), 1 / 255, 1.0)
    seen = gym.spaces.Box(-np.inf, np.inf, flat.shape, np.float32)
    return seen, lambda observation: gym.spaces.flatten(space, observation) * scale


def is_text(space: gym.Space) -> bool:
    """Text, or another space of strings, as MiniGrid's MissionSpace."""
    return space.dtype is not None and np.dtype(space.dtype).kind == "U"


def name_of(space: gym.Space) -> str:
    """Its type, and those of its parts: Dict(a: Box, b: Graph)."""
    if isinstance(space, gym.spaces.Dict):
        parts = [f"{key}: {name_of(part)}" for key, part in space.spaces.items()]
    elif isinstance(space, gym.spaces.Tuple):
        parts = [name_of(part) for part in space.spaces]
    else:
        return type(space).__name__
    return f"{type(space).__name__}({', '.join(parts)})"


def flat_actions(space: gym.Space) -> tuple[gym.Space, Callable]:
    """The Box or MultiDiscrete that the policy acts in, and the function to the space's own action.

    Supported are Box, Discrete, MultiDiscrete, MultiBinary, and a Dict or Tuple of the last three.
    """
    if isinstance(space, gym.spaces.Box):
        low = np.ravel(space.low).astype(np.float32)
        high = np.ravel(space.high).astype(np.float32)
        flat = gym.spaces.Box(low, high, dtype=np.float32)
        return flat, lambda numbers: np.asarray(numbers, space.dtype).reshape(space.shape)
    if isinstance(space, gym.spaces.Discrete):
        return gym.spaces.MultiDiscrete([space.n]), lambda numbers: space.start + int(numbers[0])
    if isinstance(space, gym.spaces.Dict):
        parts = space.spaces
    elif isinstance(space, gym.spaces.Tuple):
        parts = dict(enumerate(space.spaces))
    else:
        parts = {0: space}
    nvec = []
    slots = []  # of each part: its key, where its numbers are, their shape, the first one's name
    for key, part in parts.items():
        if isinstance(part, gym.spaces.Discrete):
            counts = np.asarray(part.n)
        elif isinstance(part, gym.spaces.MultiDiscrete):
            counts = part.nvec
        elif isinstance(part, gym.spaces.MultiBinary):
            counts = np.full(part.shape, 2)
        else:
            raise pufferlib.APIUsageError(
                f"an action space of {name_of(space)} is not supported; wrap the environment "
                "(docs/environments.md)"
            )
        rows = slice(len(nvec), len(nvec) + counts.size)
        start = np.asarray(getattr(part, "start", 0), part.dtype)
        slots.append((key, rows, counts.shape, start))
        nvec += counts.ravel().tolist()

    def action(numbers: np.ndarray):
        own = {}
        for key, rows, shape, start in slots:
            own[key] = start + numbers[rows].reshape(shape).astype(start.dtype)
        if isinstance(space, gym.spaces.Dict):
            return own
        if isinstance(space, gym.spaces.Tuple):
            return tuple(own.values())
        return own[0]

    return gym.spaces.MultiDiscrete(nvec), action


def numbers_in(info: Mapping, prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of an info by their names, those of a dictionary in it as outer/inner."""
    for key, value in info.items():
        if isinstance(value, Mapping):
            yield from numbers_in(value, f"{prefix}{key}/")
        elif isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "biuf":
            yield f"{prefix}{key}", float(value.item())
        elif isinstance(value, bool | int | float | np.number | np.bool_) and np.isrealobj(value):
            yield f"{prefix}{key}", float(value)


class OneAgent:
    """A Gymnasium environment with PettingZoo's interface. Its one agent is called 0."""

    possible_agents = (0,)

    def __init__(self, gym_id: str, **kwargs):
        self.env = gym.make(gym_id, **kwargs)
        self.agents = []

    def observation_space(self, _):
        return self.env.observation_space

    def action_space(self, _):
        return self.env.action_space

    def reset(self, seed: int | None = None):
        observation, info = self.env.reset(seed=seed)
        self.agents = [0]
        return {0: observation}, {0: info}

    def step(self, actions: dict):
        observation, reward, terminated, truncated, info = self.env.step(actions[0])
        if terminated or truncated:
            self.agents = []
        return {0: observation}, {0: reward}, {0: terminated}, {0: truncated}, {0: info}

    def render(self):
        return self.env.render()

    def close(self):
        self.env.close()


class AdaptedEnvs(pufferlib.PufferEnv):
    """So many environments that `make` makes, stepped one after the other into PufferLib's buffers.

    make: a Gymnasium id, or a callable that returns an object with PettingZoo's parallel interface;
    it gets kwargs. Rows of the buffers are environments times agents. An agent that is gone while
    others play on has mask False.
    Raises pufferlib.APIUsageError.
    """

    autoreset_mode = AutoresetMode.NEXT_STEP

    def __init__(self, make: Callable | str, num_envs: int = 1, buf=None, seed: int = 0, **kwargs):
        self.make = partial(OneAgent, make) if isinstance(make, str) else make
        self.make = partial(self.make, **kwargs)
        self.num_envs = num_envs
        self.envs = [
            self.make()
        ]  # the others at the first reset: to know the spaces, one is enough
        self.agents = list(self.envs[0].possible_agents)
        self.warned = False
        self.steps = np.zeros(num_envs, int)  # of each environment since the start
        observation_space = self.common(self.envs[0].observation_space, "observations")
        action_space = self.common(self.envs[0].action_space, "actions")
        flat = flat_observations(observation_space, quiet=buf is not None)
        self.single_observation_space, self.flatten = flat
        self.single_action_space, self.action = flat_actions(action_space)
        self.num_agents = num_envs * len(self.agents)
        super().__init__(buf)

    def common(self, space_of: Callable, what: str) -> gym.Space:
        """The space of every agent."""
        first = self.agents[0]
        for agent in self.agents:
            if space_of(agent) != space_of(first):
                raise pufferlib.APIUsageError(
                    f"agents {first} and {agent} have different spaces of {what}; pad them: "
                    f"supersuit.pad_{'observations' if what == 'observations' else 'action_space'}_v0"
                )
        return space_of(first)

    def reset(self, seed: int = 0):
        while len(self.envs) < self.num_envs:
            self.envs.append(self.make())
        for number, env in enumerate(self.envs):
            observations, _ = env.reset(seed=env_seed(seed, number))
            self.begin(number, observations)
        self.check_finite()
        return self.observations, []

    def step(self, actions: np.ndarray):
        infos = []
        for number, env in enumerate(self.envs):
            first = number * len(self.agents)
            self.steps[number] += 1
            playing = list(env.agents)
            if not playing:
                observations, _ = env.reset()
                self.begin(number, observations)
                continue
            own = {agent: self.action(actions[self.row(first, agent)]) for agent in playing}
            observations, rewards, terminations, truncations, agents_infos = env.step(own)
            self.clear(first)
            for agent in playing:
                row = self.row(first, agent)
                self.masks[row] = agent in observations
                if agent in observations:
                    self.observe(row, observations[agent])
                    self.rewards[row] = self.number(rewards[agent], number)
                    self.terminals[row] = terminations[agent]
                    self.truncations[row] = truncations[agent]
                elif not self.warned:
                    self.warned = True
                    note(f"warning: agent {agent} is gone, but its episode has not ended")
                if self.terminals[row] or self.truncations[row]:
                    infos.append(dict(numbers_in(agents_infos.get(agent, {}))))
        self.check_finite()
        return self.observations, self.rewards, self.terminals, self.truncations, infos

    def check_finite(self):
        for what, numbers in ("observation", self.observations), ("reward", self.rewards):
            if not np.isfinite(numbers).all():
                row = int(np.argwhere(~np.isfinite(numbers))[0][0])
                number = row // len(self.agents)
                raise FloatingPointError(
                    f"the {what} of environment {number} is not finite in step {self.steps[number]}"
                )

    def row(self, first: int, agent) -> int:
        return first + self.agents.index(agent) if len(self.agents) > 1 else first

    def clear(self, first: int):
        """No agent of an environment is there, until it is seen."""
        rows = slice(first, first + len(self.agents))
        self.rewards[rows] = 0
        self.terminals[rows] = False
        self.truncations[rows] = False
        self.masks[rows] = False

    def begin(self, number: int, observations: Mapping):
        """The first observations of an episode."""
        first = number * len(self.agents)
        self.clear(first)
        for agent, observation in observations.items():
            self.masks[self.row(first, agent)] = True
            self.observe(self.row(first, agent), observation)

    def observe(self, row: int, observation):
        array = self.flatten(observation)
        if array.shape != self.observations.shape[1:]:
            raise ValueError(
                f"environment {row // len(self.agents)}: an observation of shape {array.shape}, "
                f"where its observation_space says {self.observations.shape[1:]}"
            )
        self.observations[row] = array

    def number(self, reward, number: int) -> float:
        """A reward as a float; an array of one number is one too."""
        if isinstance(reward, float | int):
            return reward
        array = np.asarray(reward)
        if array.size != 1 or array.dtype.kind not in "biuf":
            raise ValueError(
                f"environment {number}: the reward is {reward!r}, where one number is expected "
                "(mo_gymnasium.wrappers.LinearReward makes one of a vector)"
            )
        return array.item()

    def render(self):
        return self.envs[0].render()

    def close(self):
        while self.envs:
            self.envs.pop().close()


def environment_maker(env_id: str) -> Callable:
    """What makes a PufferEnv: a name of Ocean's, a Gymnasium id, or a module with parallel_env."""
    name = env_id.removeprefix("puffer_")
    if name in ocean.MAKE_FUNCTIONS:
        return ocean.env_creator(f"puffer_{name}")
    sys.path.append(os.getcwd())  # one's own modules
    module, _, gym_id = env_id.rpartition(":")
    if module:
        importlib.import_module(module)  # it registers its environments
    elif "/" not in env_id and env_id not in gym.registry and find_module(env_id):
        return partial(AdaptedEnvs, importlib.import_module(env_id).parallel_env)
    try:
        gym.spec(gym_id)
    except gym.error.Error as error:
        known = ", ".join(sorted(ocean.MAKE_FUNCTIONS))
        raise pufferlib.APIUsageError(
            f"{error} An id of another package needs its module: ale_py:ALE/Pong-v5. A module needs "
            f"parallel_env (PettingZoo). Ocean has {known}"
        ) from error
    return partial(AdaptedEnvs, gym_id)


def find_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def make(env_id: str, kwargs: dict, num_envs: int, num_workers: int, seed: int):
    """num_envs environments, each made with kwargs, vectorized by PufferLib.

    In this process, or in num_workers of their own: in two halves if they are even, so that one
    steps while the policy acts on the other. Raises pufferlib.APIUsageError.
    """
    maker = environment_maker(env_id)
    copies = max(num_workers, 1)
    if num_envs % copies:
        raise pufferlib.APIUsageError(
            f"--num-envs {num_envs}: must be a multiple of --num-workers {num_workers}"
        )
    backend = {"backend": "PufferEnv"}
    kwargs = dict(kwargs)
    parameters = inspect.signature(maker).parameters
    for key in kwargs:
        if key not in parameters and "kwargs" not in parameters:
            known = ", ".join(parameters.keys() - {"buf", "seed", "num_envs"})
            raise pufferlib.APIUsageError(f"--env.{key}: there is no such argument; it has {known}")
    if "num_envs" in parameters:  # one object steps many
        kwargs["num_envs"] = num_envs // copies
    else:
        copies = num_envs
        backend = {"backend": "Serial"}
    if num_workers:
        half = copies // 2 if num_workers % 2 == 0 else copies
        backend = {"backend": "Multiprocessing", "num_workers": num_workers, "batch_size": half}
        backend["overwork"] = True  # more workers than cores is the user's decision
    return pufferlib.vector.make(maker, env_kwargs=kwargs, num_envs=copies, seed=seed, **backend)
