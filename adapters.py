"""Gymnasium and PettingZoo environments as PufferLib's: install_pufferlib.sh puts this file beside
PufferLib's own, as pufferlib/adapters.py, in place of what pufferlib/emulation.py is for.

An environment is reset in the step after an episode's end, whose action it ignores: so its last
observation is seen, and a truncated episode can be bootstrapped from it.
"""

import concurrent.futures.thread
import contextlib
import copy
import ctypes
import dataclasses
import errno
import fcntl
import importlib
import inspect
import itertools
import json
import math
import os
import pathlib
import random
import re
import shlex
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial, reduce, update_wrapper
from operator import getitem

import gymnasium as gym
import numpy as np
import pufferlib
import pufferlib.vector
import yaml
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from gymnasium.wrappers import NormalizeObservation, NormalizeReward, TimeLimit
from pufferlib import APIUsageError, env_seed
from pufferlib.ocean import environment as ocean

BROKEN = ("connect4", "gpudrive", "impulse_wars", "school", "tactical")  # in PufferLib 3.0.0
OCEAN = [name for name, value in ocean.MAKE_FUNCTIONS.items() if isinstance(value, str)]
OCEAN = sorted(set(OCEAN) - set(BROKEN))


for name in "stdout", "stderr":
    if getattr(sys, name) is None:  # closed, as by >&-; the next file would be in its place
        setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def say(text: str, file=None):
    """Prints a line for people. Who reads it may be gone, or its disk full: training goes on."""
    file = file or sys.stderr
    if getattr(file, "closed", False):  # by an environment
        return
    try:
        print(re.sub(r"\s*\n\s*", " ", text), file=file, flush=True)  # an array in it has several
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


@cache
def say_once(say: Callable, text: str):
    say(text)


ENDING = [  # the signals at which a run saves and ends; not those that nohup, say, has it ignore
    signum
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    if signal.getsignal(signum) != signal.SIG_IGN
]


@contextlib.contextmanager
def signals_kept():
    """A run takes the signals; after it they are the notebook's again."""
    handlers = {signum: signal.getsignal(signum) for signum in signal.valid_signals()}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            if signal.getsignal(signum) is not handler:
                signal.signal(signum, handler)


def end_at_signals():
    """A run notes the signals and goes on; a process that its environment forks does not."""
    for signum in ENDING:
        handler = signal.getsignal(signum)
        if callable(handler) and handler is not signal.default_int_handler:
            signal.signal(signum, signal.SIG_DFL)


os.register_at_fork(after_in_child=end_at_signals)


def tell_of_size(observations, say: Callable):
    """Says how many bytes a batch of them takes, from half a GB on."""
    gigabytes = observations.nbytes / 1e9
    if gigabytes > 0.5:
        say(f"a batch of observations takes {gigabytes:.1f} GB (--num-envs x --num-steps)")


def tell_of_scale(observations, agent, say: Callable):
    """That they are large numbers, which nothing brings near 1."""
    if observations.is_floating_point() and getattr(agent, "observation_norm", None) is None:
        largest = observations.abs().max().item()
        if largest > 100:
            say(f"observations of up to {largest:.4g}: --norm-obs brings them near 1")


def tell_of_clipping(rewards, say: Callable):
    """That rewards are beyond what --clip-rewards, the default, leaves of them."""
    if rewards.abs().max() > 1:
        more = "--norm-rewards scales them instead, --no-clip-rewards leaves them"
        say_once(say, f"rewards beyond [-1, 1] are clipped to that for learning; {more}")


def running_statistics(agent) -> list:
    """What --norm-obs and --norm-rewards have learned; a fork's own buffers may be infinite."""
    return [value for name, value in agent.named_buffers() if "_norm." in name]


# Observations -------------------------------------------------------------------------------------


def is_pixels(space: gym.Space) -> bool:
    """Bytes up to 255 with two sides of 8 or more. Smaller grids hold names, as MiniGrid's."""
    if not isinstance(space, Box) or space.dtype != np.uint8:
        return False
    shape = space.shape
    if len(shape) not in (2, 3) or sorted(shape)[-2] < 8 or shape[1] < 8:
        return False
    return bool((space.high == 255).all())


def is_image(space: gym.Space) -> bool:
    """Pixels with two sides of 36 or more, which the convolutions need."""
    return is_pixels(space) and sorted(space.shape)[-2] >= 36


def is_text(space: gym.Space) -> bool:
    """Text, or another space of strings, as MiniGrid's MissionSpace."""
    return space.dtype is not None and np.dtype(space.dtype).kind == "U"


def is_rounded(space: gym.Space) -> bool:
    """Whole numbers of which float32 has not all."""
    if not isinstance(space, Box) or space.dtype.kind not in "iu" or space.low.size == 0:
        return False
    return max(-int(space.low.min()), int(space.high.max())) > 2**24


def nodes(space: gym.Space, path: tuple = ()) -> Iterator[tuple[tuple, gym.Space]]:
    """A space and, of a Dict or Tuple, all in it, as FlattenObservation goes; with the keys to it."""
    yield path, space
    if isinstance(space, Dict | Tuple):
        parts = space.spaces.items() if isinstance(space, Dict) else enumerate(space.spaces)
        for key, part in parts:
            yield from nodes(part, (*path, key))


def leaves(space: gym.Space) -> list[tuple[tuple, gym.Space]]:
    """The parts of Dicts and Tuples that are neither, with the keys that lead to them."""
    return [(path, part) for path, part in nodes(space) if not isinstance(part, Dict | Tuple)]


def as_shape(observation, shape: tuple[int, ...]) -> np.ndarray:
    """Its array. Sides of 1 may be there or not."""
    if isinstance(observation, np.ma.MaskedArray) and observation.mask.any():
        raise ValueError("some of its numbers are masked")
    array = np.asarray(observation)
    if array.dtype.kind in "cmM":
        raise ValueError(f"{array.dtype} is no real number")
    if array.shape != shape:
        if np.squeeze(array).shape != tuple(side for side in shape if side != 1):
            raise ValueError(f"its shape is {array.shape}, and should be {shape}")
        array = array.reshape(shape)
    return array


def number(value) -> float:
    """Of whatever holds one: a number, an array of shape (1,), a Decimal."""
    if isinstance(value, float | int):
        return value
    one = np.squeeze(value)
    if isinstance(one, np.ndarray | np.generic) and one.dtype.kind == "c":
        raise TypeError("a complex number")
    return float(one)


def truth(value) -> bool:
    """Of whatever says yes or no: True, 1.0, [False], None."""
    one = 0 if value is None else number(value)
    if math.isnan(one):
        raise ValueError("neither yes nor no")
    return bool(one)


NO_BYTES = "that are no bytes; declare its Box so, or round"


def vector_writer(space: gym.Space) -> tuple[int, Callable]:
    """How many numbers an observation becomes, and the function that writes them into such a row.

    What goes from 0 to 255 is written as 0 to 1, and a choice as one-hot.
    """
    if isinstance(space, Box):
        scale = np.where((space.low == 0) & (space.high == 255), 1 / 255, 1).ravel()
        is_bytes = space.dtype == np.uint8

        def write(row: np.ndarray, observation):
            array = as_shape(observation, space.shape).ravel()
            if is_bytes and array.dtype != np.uint8:
                given = array[scale < 1]
                with np.errstate(invalid="ignore"):
                    as_bytes = given.astype(np.uint8)
                if (given != as_bytes).any():
                    raise ValueError(f"{array.dtype} {NO_BYTES}")
            row[:] = array * scale

        return scale.size, write
    if isinstance(space, MultiBinary):

        def write(row: np.ndarray, observation):
            given = as_shape(observation, space.shape).ravel()
            if ((given != 0) & (given != 1)).any():
                raise ValueError(f"it is {observation}, and should be in {space}")
            row[:] = given

        return int(np.prod(space.shape)), write
    if isinstance(space, Discrete):
        first = int(space.start)
        count = int(space.n)

        def write(row: np.ndarray, observation):
            value = number(observation)
            index = int(value) - first
            if not 0 <= index < count or index + first != value:
                raise ValueError(f"it is {observation}, and should be in {space}")
            row[:] = 0
            row[index] = 1

        return count, write
    if isinstance(space, MultiDiscrete):
        counts = space.nvec.ravel().astype(int)
        offsets = np.cumsum(counts) - counts

        def write(row: np.ndarray, observation):
            given = (as_shape(observation, space.shape) - space.start).ravel()
            index = given.astype(int)
            if (index < 0).any() or (index >= counts).any() or (index != given).any():
                raise ValueError(f"it is {observation}, and should be in {space}")
            row[:] = 0
            row[offsets + index] = 1

        return int(counts.sum()), write
    raise APIUsageError(
        f"an observation of {type(space).__name__} is not supported; wrap the environment, as "
        "docs/environments.md says"
    )


MOST = 10**7  # numbers of a vector, and choices of an action
ROUNDED = "observation: whole numbers beyond 16777216 are rounded to float32"


def flat_observations(space: gym.Space, remark: Callable) -> tuple[Box, Callable, dict]:
    """What the network sees of a space: its Box, the function that writes it, and its columns.

    write(row, observation): the row is an array of the Box's shape. A Box stays as it is, in
    float32 unless it is pixels. All else becomes one vector of its parts, and columns says where
    which is: outer/inner to a slice and the part's own space. Raises pufferlib.APIUsageError.
    """
    if isinstance(space, Box) and space.shape and all(space.shape):
        if is_pixels(space):
            remark(f"observation: an image, {space.shape}, divided by 255")
            seen = space
        else:
            seen = Box(-np.inf, np.inf, space.shape, np.float32)
            if len(space.shape) > 1 and sorted(space.shape)[-2] >= 36:
                remark(
                    f"observation: no image but numbers, {space.dtype} of shape {space.shape} "
                    "(an image: bytes up to 255, of 2 or 3 sides; the LSTM remembers without a stack)"
                )
            if is_rounded(space):
                remark(ROUNDED)

        def write(row: np.ndarray, observation):
            array = as_shape(observation, space.shape)
            row[...] = array
            if row.dtype != array.dtype and row.dtype == np.uint8 and not (row == array).all():
                raise ValueError(f"{array.dtype} {NO_BYTES}")

        return seen, write, {}
    columns = {}
    writers = []
    size = 0
    dicts = [(path, part) for path, part in nodes(space) if isinstance(part, Dict | Tuple)]
    counts = [(path, len(part.spaces)) for path, part in dicts]
    for path, part in leaves(space):
        name = "/".join(map(str, path))
        if path and is_text(part):
            remark(f"observation: {name} is text, and left out")
            continue
        if is_pixels(part):
            remark(f"observation: {name} is an image, and flattened; see recipes/dict_image.patch")
        if is_rounded(part):
            remark(f"{ROUNDED}: {name}")
        if path and "mask" in str(path[-1]):
            remark(f"observation: {name} forbids no action but by recipes/action_masks.patch")
        width, write_part = vector_writer(part)
        columns[name] = slice(size, size + width), part
        writers.append((path, columns[name][0], write_part))
        size += width
    if not 0 < size <= MOST:
        raise APIUsageError(f"an observation of {size} numbers is not supported")

    def write(row: np.ndarray, observation):
        for path, count in counts:
            part = reduce(getitem, path, observation)
            if len(part) > count and isinstance(part, Mapping | tuple | list):
                extra = f"an observation has {len(part)} parts, and its space {count}"
                say_once(say, f"warning: {extra}: the others are left out")
        for path, part_columns, write_part in writers:
            write_part(row[part_columns], reduce(getitem, path, observation))

    return Box(-np.inf, np.inf, (size,), np.float32), write, columns


# Actions ------------------------------------------------------------------------------------------


def remark_on_bounds(space: gym.Space, seen: Box, remark: Callable):
    """The policy begins at 0 with a deviation of 1: a Box should be there, and not much wider."""
    low = seen.low
    high = seen.high
    with np.errstate(over="ignore", invalid="ignore"):
        width = high - low
    unlike = ((width < 0.1) & (width > 0)) | ((width > 20) & np.isfinite(width))
    for i in np.flatnonzero(unlike | (low > 1) | (high < -1))[:1]:
        rescales = isinstance(space, Box) and space.dtype.kind == "f" and space.is_bounded()
        wrapper = "RescaleAction(env, -1, 1)" if rescales else "TransformAction"
        remark(
            f"action: a Box from {low[i]:g} to {high[i]:g}, but the policy begins at 0 with a "
            f"deviation of 1; gymnasium.wrappers.{wrapper} makes it fit"
        )


def choices(space: gym.Space) -> list[int]:
    """How many there are for each number of an action."""
    if isinstance(space, MultiDiscrete):
        return space.nvec.ravel().tolist()
    return [int(space.n)] if isinstance(space, Discrete) else [2] * math.prod(space.shape)


def own_actions(space: gym.Space, numbers: np.ndarray) -> list:
    """n actions of a space without parts, from the policy's numbers (n, k)."""
    own = numbers.reshape(-1, *space.shape)
    if not isinstance(space, Box):
        return list((own + getattr(space, "start", 0)).astype(space.dtype))
    if space.dtype != np.float32:  # whose bounds float32 may miss by a little
        own = own.astype(np.float64).clip(space.low, space.high)
    if space.dtype.kind != "f":
        own = own.round()
    own = own.astype(space.dtype)  # a copy: the environment may keep it, or change it
    return [own[i, ...] for i in range(len(own))]


def rebuild(space: gym.Space, own: Iterator):
    """An action of the space, from those of its `leaves`."""
    if isinstance(space, Dict):
        return {key: rebuild(part, own) for key, part in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(rebuild(part, own) for part in space.spaces)
    return next(own)


def flat_actions(space: gym.Space, remark: Callable) -> tuple[gym.Space, Callable]:
    """The Box or MultiDiscrete that the policy acts in, and the function from the numbers (n, k) of
    n actions to a list of n actions of the space. Raises pufferlib.APIUsageError."""
    parts = [part for _, part in leaves(space)]
    boxes = [part for part in parts if isinstance(part, Box)]
    for part in parts:
        known = isinstance(part, Box | Discrete | MultiDiscrete | MultiBinary)
        if not known or 0 < len(boxes) < len(parts):
            kind = "Box beside choices" if known else type(part).__name__
            hint = "wrap the environment, as docs/environments.md says"
            raise APIUsageError(f"an action of {kind} is not supported; {hint}")
    sizes = [math.prod(part.shape) for part in parts]
    if not parts or 0 in sizes:
        raise APIUsageError("an action without any number is not supported")
    if boxes:
        with np.errstate(over="ignore"):  # a float64's bound may be no float32
            low = np.concatenate([box.low.ravel() for box in boxes]).astype(np.float32)
            high = np.concatenate([box.high.ravel() for box in boxes]).astype(np.float32)
        seen = Box(low, high, dtype=np.float32)
        remark_on_bounds(space, seen, remark)
    else:
        counts = [count for part in parts for count in choices(part)]
        if sum(counts) > MOST:
            raise APIUsageError(f"an action of {sum(counts)} choices is not supported")
        seen = MultiDiscrete(counts)
    if parts == [space]:
        return seen, partial(own_actions, space)
    ends = np.cumsum(sizes)[:-1]

    def own_with_parts(numbers: np.ndarray) -> list:
        columns = np.split(numbers.reshape(len(numbers), -1), ends, axis=1)
        own = [own_actions(part, of_part) for part, of_part in zip(parts, columns)]
        return [rebuild(space, iter(values)) for values in zip(*own)]

    return seen, own_with_parts


# Environments -------------------------------------------------------------------------------------


def numbers_in(info: Mapping | None, prefix="", depth=5) -> Iterator[tuple[str, float]]:
    """The numbers of an info by their names, those of a dictionary in it as outer/inner."""
    for key, value in info.items() if isinstance(info, Mapping) else ():
        if isinstance(value, Mapping):
            if depth > 0:  # it may hold itself
                yield from numbers_in(value, f"{prefix}{key}/", depth - 1)
            continue
        is_array = hasattr(value, "dtype") and hasattr(value, "item")  # or a tensor
        if is_array and not isinstance(value, type) and math.prod(np.shape(value)) == 1:
            value = value.item()
        if isinstance(value, bool | int | float) and abs(value) < sys.float_info.max:
            yield f"{prefix}{key}", float(value)  # not NaN: the mean is of those that have it


RESET = ("reset", "observation, info")
STEP = ("step", "observation, reward, terminated, truncated, info")
UNFIT = (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError)  # of what is no number


def parts(result, method: str, names: str) -> tuple:
    """What reset or step returned, if it is so many things."""
    values = isinstance(result, tuple | list)
    if not values or len(result) != len(names.split()):
        returned = f"{len(result)} values" if values else type(result).__name__
        raise APIUsageError(
            f"its {method} returned {returned}; since Gymnasium and gym 0.26 it is {names}"
        )
    return result


def begin(env, seed: int | None) -> tuple:
    """What reset returns."""
    if seed is not None and isinstance(env, gym.Env):  # for those that forget super().reset
        if isinstance(getattr(env.unwrapped, "_np_random", 0), np.random.Generator | None):
            env.unwrapped._np_random = gym.utils.seeding.np_random(seed)[0]  # Gymnasium's
        env.action_space.seed(seed)
        env.observation_space.seed(seed)
    try:
        return parts(env.reset(seed=seed), *RESET)
    except TypeError as error:
        unfit = r"reset\(\) (got an unexpected keyword argument|missing .*) '(seed|options)'"
        if re.search(unfit, str(error)) and not environment_failed(error):
            text = f"{error}; it should be reset(self, seed=None, options=None)"
            raise APIUsageError(text) from error
        raise


GYMNASIUMS = ("gymnasium.core", "gymnasium.wrappers.", "gymnasium.envs.registration")


def places_of(error: BaseException) -> list[tuple[str, str]]:
    """The lines that it was raised through: of each its module, and its file and number."""
    lines = traceback.walk_tb(error.__traceback__)
    return [
        (frame.f_globals.get("__name__", ""), f"{frame.f_code.co_filename}, line {number}")
        for frame, number in lines
    ]


def environment_failed(error: Exception) -> bool:
    """Whether it was raised in a line of the environment's, or below one."""
    ours = ("pufferlib.", *GYMNASIUMS, "pettingzoo.utils.", "supersuit.", "minigrid.wrappers")
    return not all(module.startswith(ours) for module, _ in places_of(error))


@cache
def calls_its_reset(kind: type) -> bool:
    """Whether a step of this class calls its reset, as far as its source shows."""
    try:
        return "self.reset(" in inspect.getsource(kind.step)
    except Exception:  # no source, as of what is compiled, or one that is being written
        return False


def gymnasium_raised(error: Exception) -> bool:
    """Whether it did, of what an environment is or returned: no line of the environment's failed."""
    module, _ = places_of(error)[-1]
    in_gymnasium = module.startswith(GYMNASIUMS) and error.__cause__ is None
    return in_gymnasium and not environment_failed(error)


@contextlib.contextmanager
def refusals():
    """What is wrong with an environment is a line, and not a traceback; a worker says it itself."""
    try:
        try:
            yield
        except SystemExit as error:
            own = [
                place
                for module, place in places_of(error)
                if module.partition(".")[0] not in sys.stdlib_module_names  # exit(), argparse
            ]
            said = f": {error}" if isinstance(error.code, str) else ""
            raise APIUsageError(f"it calls sys.exit, in {own[-1]}{said}") from error
        except (TypeError, ValueError) as error:
            if "unpack" not in str(error) or not gymnasium_raised(error):
                raise
            text = f"{error}; its {RESET[0]} should return {RESET[1]}, its {STEP[0]} {STEP[1]}"
            raise APIUsageError(text) from error
    except APIUsageError as error:
        if not pufferlib.vector.in_worker:
            raise
        say(f"error: {error}")
        sys.exit(1)


def torch_settings() -> dict:
    """What holds for all of torch, by the functions that change it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    return {
        "set_default_dtype": torch.get_default_dtype(),
        "set_grad_enabled": torch.is_grad_enabled(),
        "set_default_device": torch.get_default_device(),
    }


@contextlib.contextmanager
def torch_kept(in_workers: bool = False):
    """Training's torch draws on as if no environment had seeded it. Refuses an environment that
    changes what holds for all of torch.

    in_workers: training is not in their process, and the one made here is for its spaces alone.
    """
    torch = sys.modules.get("torch")
    before = torch_settings()
    seed = torch and torch.initial_seed()
    state = torch and torch.get_rng_state()
    on_gpu = torch and torch.cuda.is_initialized()
    gpu_state = torch.cuda.get_rng_state() if on_gpu else None
    yield
    if torch and torch.initial_seed() != seed:
        torch.set_rng_state(state)
        if on_gpu:
            torch.cuda.set_rng_state(gpu_state)
    now = torch_settings()
    changed = [name for name in before if now[name] != before[name]]
    if not changed or pufferlib.vector.in_worker:
        return
    for name in changed:
        default = None if name == "set_default_device" else before[name]
        getattr(torch, name)(default)
    if not in_workers:
        raise APIUsageError(
            f"it changes torch for all (torch.{changed[0]}), training too; let it do so around its "
            "own code alone, or take --num-workers"
        )


class NotFinite(APIUsageError):
    """An observation, a reward or a loss is NaN or infinite."""


LONG = 2_000  # steps of each in which an episode should have ended
COPIES = 8  # whose episodes should not begin alike
PATIENCE = 3.0  # seconds until there is a word


class AdaptedEnvs(pufferlib.PufferEnv):
    """num_envs environments that make_one makes, stepped in turn, written into PufferLib's buffers.

    A row of the buffers is an agent; its mask is False while it is not there. workers: worker
    processes have their own of these, with a buf; the one without is for its spaces alone. columns:
    see `flat_observations`. Raises pufferlib.APIUsageError for spaces that cannot be, and, in reset
    and step, for what is not of its space; NotFinite.
    """

    env_number = 0  # PufferLib's, of this object among those of the workers
    remedy = ""  # where an observation or a reward is not finite

    def __init__(
        self, make_one: Callable, num_envs: int = 1, buf=None, seed: int = 0, workers: bool = False
    ):
        self.make_one = make_one
        self.num_envs = num_envs
        self.seed = seed
        self.envs = []
        self.threads = []  # that Python waits for, of the environments
        self.envs.append(self.make_env())  # the others at the first reset: for spaces one is enough
        self.over = [True] * num_envs  # the next step is a reset
        self.warned = set()  # what was said of agents
        self.ended = [set()] * num_envs  # of several agents, those whose end was the last step
        self.steps = 0
        self.any_ended = False
        self.starts = []  # see `compare_starts`
        self.known_spaces = {}  # the objects that `check_action_space` has compared
        self.in_first_rank = os.getenv("RANK", "0") == "0"
        try:
            said = buf is not None or not self.in_first_rank  # by the first of all
            remark = self.said_already if said else say
            observed, acted, self.own_action_space = self.flat_spaces(remark)
            self.single_observation_space, self.write, self.columns = observed
            self.single_action_space, self.own_actions = acted
            self.num_agents = num_envs * len(self.agents)
            super().__init__(buf)
        except BaseException:
            self.close()
            raise
        if workers and buf is None:
            self.close()

    def make_env(self):
        """One more. What it draws from its np_random while it is made is seeded too."""
        gym.Env._np_random = np.random.default_rng((self.seed, len(self.envs)))
        before = threading.enumerate()
        try:
            return self.make_one()
        finally:
            gym.Env._np_random = None
            begun = [thread for thread in threading.enumerate() if thread not in before]
            pools = concurrent.futures.thread._threads_queues  # Python ends these
            self.threads += [one for one in begun if not one.daemon and one not in pools]

    def said_already(self, text: str):
        pass

    def flat_spaces(self, remark: Callable) -> tuple[tuple, tuple, gym.Space]:
        """What `flat_observations` and `flat_actions` make of the newest environment's spaces, and
        its own action space."""
        try:
            observation_space, action_space = self.spaces(self.envs[-1])
        except AttributeError as error:
            if environment_failed(error):
                raise
            text = f"it has no {error.name}; it should be there from the start"
            raise APIUsageError(text) from error
        for space in observation_space, action_space:
            if not isinstance(space, gym.Space):
                raise APIUsageError(f"its space {space!r:.80} is none of Gymnasium's")
        limits = []
        wrapper = self.envs[-1]
        while isinstance(wrapper, gym.Wrapper):
            if isinstance(wrapper, TimeLimit):
                limits.append(wrapper._max_episode_steps)
            if isinstance(wrapper, NormalizeObservation | NormalizeReward):
                name = type(wrapper).__name__
                flag = "--norm-rewards" if "Reward" in name else "--norm-obs"
                remark(f"{name}: each copy has its own statistics, no checkpoint any; take {flag}")
            wrapper = wrapper.env
        if len(limits) > 1:
            remark(f"TimeLimits of {limits} steps, one in another: the shortest ends an episode")
        observed = flat_observations(observation_space, remark)
        return observed, flat_actions(action_space, remark), action_space

    def add_one(self):
        """One more environment. It must have the spaces of the first."""
        agents = self.agents
        self.envs.append(self.make_env())
        (seen, _, columns), _, own_action_space = self.flat_spaces(self.said_already)
        if {*self.agents} != {*agents}:
            raise APIUsageError(f"its environments have different agents: {agents}, {self.agents}")
        self.agents = agents  # rows are in the order of the first one's
        places = [{name: part[0] for name, part in c.items()} for c in (columns, self.columns)]
        observed = (seen, self.single_observation_space)
        for one, first in observed, places, (own_action_space, self.own_action_space):
            if one != first:
                raise APIUsageError(f"its environments have different spaces: {first}, {one}")

    def tell_of_waiting(self, done: str):
        """Says once how far the first reset is, if it takes long."""
        seconds = time.monotonic() - self.began
        if seconds > PATIENCE and self.is_first():
            say(f"environments: {done} of {self.num_envs} after {seconds:.0f} s")
            self.began = math.inf

    def reset(self, seed: int = 0):
        self.began = time.monotonic()
        with refusals(), torch_kept():
            while len(self.envs) < self.num_envs:
                self.tell_of_waiting(f"made {len(self.envs)}")
                self.add_one()
            objects = [getattr(env, "unwrapped", env) for env in self.envs]
            if len({*map(id, objects)}) < self.num_envs:
                raise APIUsageError("one object is given as several environments; make a new one")
            self.clear()
            compared = COPIES if self.num_envs >= COPIES and self.is_first() else 0
            self.starts = [[] for _ in range(compared)]
            for i in range(self.num_envs):
                self.tell_of_waiting(f"reset {i}")
                self.reset_one(i, env_seed(seed, i))
                self.compare_starts(i)
            self.check_finite()
        return self.observations, []

    def step(self, actions: np.ndarray):
        self.steps += 1
        self.clear()
        infos = []
        own_actions = self.own_actions(actions)
        with refusals(), torch_kept():
            for i in range(self.num_envs):
                if self.over[i]:
                    self.reset_one(i)
                    self.compare_starts(i)
                else:
                    self.step_one(i, own_actions, infos)
            self.check_finite()
        self.any_ended = self.any_ended or bool((self.terminals | self.truncations).any())
        if self.steps == LONG and not self.any_ended and self.is_first():
            limit = "a limit ends one (of Gymnasium's: --env.max_episode_steps 1000)"
            each = f"in {LONG} steps of each environment"
            say(f"no episode has ended {each}, so there is no return to log; {limit}")
        infos = [info for info in infos if info]
        return self.observations, self.rewards, self.terminals, self.truncations, infos

    def is_first(self) -> bool:
        """Of all ranks' and workers': it says what is true of all."""
        return self.in_first_rank and self.env_number == 0

    def check_action_space(self, i: int, agent, space: gym.Space):
        if self.known_spaces.get((i, agent)) is space:
            return
        self.known_spaces[i, agent] = space
        if space != self.own_action_space:
            raise APIUsageError(
                f"it changes its action_space from {self.own_action_space!s:.80} to {space!s:.80}; "
                "it should be there from the start, and stay"
            )

    def compare_starts(self, i: int):
        """Says once if the first copies' first two episodes begin as if reset did not draw anew."""
        if i >= len(self.starts) or len(self.starts[i]) == 2:
            return
        agents = len(self.agents)
        rows = slice(i * agents, (i + 1) * agents)
        self.starts[i].append(self.observations[rows][self.masks[rows]].tobytes())
        if any(len(starts) < 2 for starts in self.starts):
            return
        first, second = zip(*self.starts)
        again = second == first
        alike = len({*second}) == 1
        few = 1 < len({*first}) < len(first)  # of which some may come again by luck
        if again != alike and not few:  # both: all begin so; neither: they are drawn
            all_alike = f"{len(first)} copies begin their second episode alike"
            text = "each copy begins its second episode as its first" if again else all_alike
            say(f"warning: {text}; does reset seed itself where seed is None?")
        self.starts = []

    def clear(self):
        self.rewards[:] = 0
        self.terminals[:] = False
        self.truncations[:] = False

    def observe(self, row: int, observation):
        try:
            try:
                self.write(self.observations[row], observation)
            except FloatingPointError:  # by what an environment has set: here 1e-60 is 0
                with np.errstate(under="ignore"):
                    self.write(self.observations[row], observation)
        except UNFIT as error:
            problem = f"does not fit its space: {error!r:.200}"
            raise self.wrong("observation", row, problem) from error

    def reward(self, row: int, reward):
        try:
            self.rewards[row] = float(number(reward))  # numpy's own may not underflow
        except UNFIT as error:
            problem = (
                f"is {reward!r:.80}, where one number should be "
                "(mo_gymnasium.wrappers.LinearReward makes one of a vector; several agents, with a "
                "reward each, need PettingZoo's parallel_env)"
            )
            raise self.wrong("reward", row, problem) from error

    def end(self, row: int, terminated, truncated) -> bool:
        """Whether an agent's episode ends; how is in the buffers."""
        try:
            self.terminals[row] = truth(terminated)
            self.truncations[row] = truth(truncated)
        except UNFIT as error:
            problem = f"is {terminated!r:.80}, {truncated!r:.80}, where two truth values should be"
            raise self.wrong("end (terminated, truncated)", row, problem) from error
        return self.terminals[row] or self.truncations[row]

    def check_finite(self):
        for what, numbers in ("observation", self.observations), ("reward", self.rewards):
            if numbers.dtype.kind == "f" and not np.isfinite(numbers).all():
                row = int(np.argwhere(~np.isfinite(numbers))[0][0])
                problem = f"is not finite in float32{self.remedy.format(what.title())}"
                raise self.wrong(what, row, problem, NotFinite)

    def wrong(self, what: str, row: int, problem: str, kind: type = APIUsageError) -> Exception:
        """The error that says so, and of which environment, in which step."""
        i, agent = divmod(row, len(self.agents))
        whose = f"environment {self.env_number * self.num_envs + i}"
        if len(self.agents) > 1:
            whose += f", agent {self.agents[agent]},"
        return kind(f"at step {self.steps} the {what} of {whose} {problem}")

    def warn_of_own_reset(self, i: int):
        """Once, at an episode's end."""
        kind = type(getattr(self.envs[i], "unwrapped", self.envs[i]))
        if self.is_first() and calls_its_reset(kind):
            text = "its step has a self.reset(): if that is at an episode's end, step should return"
            say_once(say, f"warning: {text} the last observation, not that of a new episode")

    def render(self):
        return self.envs[0].render()

    def close(self):
        while self.envs:
            try:
                self.envs.pop().close()
            except Exception as error:  # costs nobody a finished run
                say_once(say, f"warning: an environment's close fails: {error!r:.200}")
        deadline = time.monotonic() + 1.0  # they may be about to end
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        left = [thread.name for thread in self.threads if thread.is_alive()]
        self.threads.clear()
        if left and not pufferlib.vector.in_worker:
            what = f"threads of environments are still on, {len(left)}, such as {left[0]}"
            say(f"warning: {what}; Python waits for them: close should end them")


class GymnasiumEnvs(AdaptedEnvs):
    agents = (0,)
    remedy = "; gymnasium.wrappers.Transform{} can replace it"

    def spaces(self, env) -> tuple[gym.Space, gym.Space]:
        return env.observation_space, env.action_space

    def reset_one(self, i: int, seed: int | None = None):
        observation, _ = begin(self.envs[i], seed)
        self.check_action_space(i, 0, self.envs[i].action_space)
        self.observe(i, observation)
        self.over[i] = False

    def step_one(self, i: int, own_actions: list, infos: list):
        result = self.envs[i].step(own_actions[i])
        observation, reward, terminated, truncated, info = parts(result, *STEP)
        self.observe(i, observation)
        self.reward(i, reward)
        if self.end(i, terminated, truncated):
            self.over[i] = True
            self.check_action_space(i, 0, self.envs[i].action_space)
            infos.append(dict(numbers_in(info)))
            self.warn_of_own_reset(i)
            if isinstance(info, Mapping):
                self.warn_of_end(i, info)

    def warn_of_end(self, i: int, info: Mapping):
        """Once of what an info says, and the values that step returns do not."""
        for key in {"final_observation", "final_obs", "terminal_observation"} & {*info}:
            if info[key] is None:
                continue
            last = np.empty_like(self.observations[i])
            try:
                self.write(last, info[key])
                same = np.array_equal(last, self.observations[i])
            except UNFIT:
                same = not isinstance(info[key], np.ndarray)  # such as {}
            if not same:
                text = (
                    "it resets itself, so what is taken for its last observation begins an episode"
                )
                say_once(say, f"warning: by its info's {key} {text}; let step return {key}")
        if self.terminals[i] and np.any(info.get("TimeLimit.truncated")):
            text = "by its info's TimeLimit.truncated an end was a time limit"
            say_once(say, f"warning: {text}, but step says terminated: its value is taken for 0")


TO_PARALLEL = "PettingZoo's aec_to_parallel, or turn_based_aec_to_parallel, makes AEC parallel"


class PettingZooEnvs(AdaptedEnvs):
    def spaces(self, env) -> tuple[gym.Space, gym.Space]:
        """Those of every agent. self.agents become those that are possible in env."""
        if hasattr(env, "agent_iter"):
            raise APIUsageError(f"an AEC environment; {TO_PARALLEL}")
        self.agents = list(env.possible_agents)
        if not self.agents:
            raise APIUsageError("it has no possible_agents")
        if len({*self.agents}) < len(self.agents):
            raise APIUsageError(f"its possible_agents have one twice: {self.agents}")
        first = self.agents[0]
        pads = {"observation_space": "pad_observations_v0", "action_space": "pad_action_space_v0"}
        for name, pad in pads.items():
            space_of = getattr(env, name)
            if not callable(space_of):
                raise APIUsageError(f"its {name} should be a method: def {name}(self, agent)")
            for agent in self.agents:
                if space_of(agent) != space_of(first):
                    raise APIUsageError(
                        f"agents {first} and {agent} have different spaces, {name} "
                        f"{space_of(first)!s:.80} and {space_of(agent)!s:.80}; pad them with "
                        f"supersuit.{pad} (docs/environments.md)"
                    )
        return env.observation_space(first), env.action_space(first)

    def rows(self, i: int) -> dict:
        """Of the agents of environment i."""
        return {agent: i * len(self.agents) + j for j, agent in enumerate(self.agents)}

    def agents_now(self, env) -> list:
        """None, once all are gone, is no agents."""
        if not hasattr(env, "agents"):
            raise APIUsageError("after its reset it has no list of agents, env.agents")
        agents = [] if env.agents is None else list(env.agents)
        possible = {*self.agents}
        for agent in agents:
            if agent not in possible:
                raise APIUsageError(f"agent {agent} is none of its possible_agents: {self.agents}")
        return agents

    def check_names(self, what: str, named, agents: list):
        """Raises unless it is a dictionary with a value for each of these agents."""
        values = named if isinstance(named, Mapping) else {}
        for agent in agents:
            try:
                values[agent]  # of a defaultdict too
            except LookupError as error:
                problem = f"its {what} name no agent {agent}: {named!r:.80}"
                raise APIUsageError(problem) from error

    def warn(self, agent, text: str):
        """Once, of the first agent of which it is true."""
        if text not in self.warned:
            say(f"warning: agent {agent} {text}")
        self.warned.add(text)

    def show(self, i: int, observations: dict, agents: list):
        """The observations of these agents. No other agent of the environment is there."""
        if not isinstance(observations, Mapping):
            self.check_names("observations", observations, agents)
        shown = [agent for agent in agents if agent in observations]
        if observations and not shown:
            self.check_names("observations", observations, agents)
        rows = self.rows(i)
        self.masks[list(rows.values())] = False
        for agent in shown:
            self.masks[rows[agent]] = True
            self.observe(rows[agent], observations[agent])

    def reset_one(self, i: int, seed: int | None = None):
        observations, _ = begin(self.envs[i], seed)
        agents = self.agents_now(self.envs[i])
        if not agents:
            raise APIUsageError("after its reset there are no agents; is possible_agents emptied?")
        for agent in agents:
            self.check_action_space(i, agent, self.envs[i].action_space(agent))
        self.show(i, observations, agents)
        self.ended[i] = set()
        self.over[i] = False

    def step_one(self, i: int, own_actions: list, infos: list):
        env = self.envs[i]
        rows = self.rows(i)
        playing = self.agents_now(env)
        actions = {agent: own_actions[rows[agent]] for agent in playing}
        result = [{} if part is None else part for part in parts(env.step(actions), *STEP)]
        observations, rewards, terminations, truncations, agent_infos = result
        agents = self.agents_now(env)
        begun = [agent for agent in agents if agent not in playing]
        seen_before = {agent for agent in playing if self.masks[rows[agent]]}
        self.show(i, observations, playing + begun)
        there = [agent for agent in playing if agent in observations]
        for what, named in zip(("rewards", "terminations", "truncations"), result[1:4]):
            self.check_names(what, named, there)
        absent = {*playing} - {*observations} - seen_before - self.ended[i]
        for agent in {*rewards} - ({*playing} - absent):
            if np.any(rewards[agent]):
                self.warn(agent, "has a reward in a step in which it does not act: that is lost")
        ended = set()
        for agent in playing:
            if agent in absent and not (terminations.get(agent) or truncations.get(agent)):
                continue  # it has not come yet
            row = rows[agent]
            self.reward(row, rewards.get(agent, 0.0))
            if not self.end(row, terminations.get(agent), truncations.get(agent)):
                if agent in observations and agent in agents:
                    if agent in self.ended[i]:
                        self.warn(agent, "plays on right after its end: that reward is lost")
                    continue
                self.truncations[row] = True
                if agent not in self.ended[i]:
                    what = "is not shown" if agent in agents else "is gone"
                    self.warn(agent, f"{what}, so its episode ends, which was not said")
            if agent not in observations:  # there is none to bootstrap from
                self.terminals[row] = True
            ended.add(agent)
            again = agent in self.ended[i]  # it was not taken off env.agents
            if isinstance(agent_infos, Mapping) and not again:
                infos.append(dict(numbers_in(agent_infos.get(agent))))
        self.ended[i] = ended
        self.over[i] = ended.issuperset(agents)
        if self.over[i]:
            self.warn_of_own_reset(i)


# Arguments ----------------------------------------------------------------------------------------


class Loader(yaml.SafeLoader):
    """YAML as people write it: 1e-3 is a number; a date and 16:9 are the texts that they are."""


FRACTION = re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?")
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
Loader.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, None)
yaml.SafeDumper.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, None)  # "1e-3" in quotes
NONE = re.compile("None$")  # as Python has it
Loader.add_implicit_resolver("tag:yaml.org,2002:null", NONE, ["N"])
yaml.SafeDumper.add_implicit_resolver("tag:yaml.org,2002:null", NONE, ["N"])
Loader.add_constructor("tag:yaml.org,2002:timestamp", Loader.construct_yaml_str)
TEXT = re.compile(r"[-+]?\d[\d_]*(:[0-5]?\d)+(\.[\d_]*)?$|0\d+$")  # 16:9, 010: no base 60, no octal
for sign in "+-0123456789":
    Loader.yaml_implicit_resolvers.setdefault(sign, []).insert(0, ("tag:yaml.org,2002:str", TEXT))


def parse_value(text: str):
    """An environment's argument, as --env.KEY has it: a YAML value, or a text that is none."""
    try:
        value = yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError, KeyError):  # the last two: 0x_, !!bool x
        return text
    return text if value is None and text.strip()[:1] in ("", "#") else value  # "#ff0000"


def format_value(value) -> str:
    """The text that `parse_value` makes this value of."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False)
    return text.removesuffix("...\n").rstrip("\n")


def read_arguments(path: str) -> dict:
    """Those of a YAML file, by their names. Raises OSError, yaml.YAMLError, ValueError."""
    text = pathlib.Path(os.path.expanduser(path)).read_text()
    content = yaml.load(text, Loader)
    if not isinstance(content, dict | None):
        kind = type(content).__name__
        raise ValueError(f"it holds a {kind}, where lines of argument: value should be")
    arguments = {str(key).replace("-", "_"): value for key, value in (content or {}).items()}
    lines = yaml.compose(text, Loader).value if arguments else []
    names = [key.value.replace("-", "_") for key, _ in lines]
    for name in arguments:
        if names.count(name) > 1:  # YAML would take the last
            raise ValueError(f"{name} is there twice")
    if isinstance(arguments.get("config"), str):
        raise ValueError(f"it names another, config: {arguments['config']}; one file is read")
    return arguments


def as_words(config: Mapping) -> list[str]:
    """A configuration as a command line, but for None, what "auto" replaced, and XLA's device."""
    words = []
    for name, value in config.items():
        flag = "--" + name.replace("_", "-")
        unset = value is None or (name, value) == ("device", "tpu")
        if name.startswith("env."):  # an argument of the environment
            words.append(f"--{name}={format_value(value)}")
        elif unset or name in ("auto", *config.get("auto", [])):
            continue
        elif isinstance(value, Mapping):
            words += as_words({f"{name}.{key}": item for key, item in value.items()})
        elif isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-"))
        else:  # a value of "-x" would be a flag
            words += [f"{flag}={value}"] if str(value)[:1] == "-" else [flag, str(value)]
    return words


def whole_numbers(words: list[str], kind: type) -> list[str]:
    """Words of a command line for this dataclass: where it wants a whole number, 1e6 is one."""
    fields = dataclasses.fields(kind)
    whole = {field.name for field in fields if field.type in (int, int | None)}
    result = []
    name = ""
    for word in words:
        text = word
        if word.startswith("--"):
            flag, _, text = word.partition("=")
            name = flag[2:].replace("-", "_")
        if name in whole and FRACTION.fullmatch(text) and float(text).is_integer():
            word = word.removesuffix(text) + f"{float(text):.0f}"
        result.append(word)
    return result


# By name ------------------------------------------------------------------------------------------


def module_of(name: str):
    """The module of this name, or that a package has under it, as gymnasium_robotics has
    mamujoco_v1. None if there is none. An error inside it is its own."""
    if not name or name.startswith("."):
        return None
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if f"{name}.".startswith(f"{error.name}."):
            package, _, attribute = name.rpartition(".")
            return getattr(module_of(package), attribute, None)
        raise


def parameters_of(function: Callable) -> Mapping | None:
    """By name; None for what has no signature, as some of what is compiled."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None


def takes_any(parameters: Mapping | None) -> bool:
    """Whether a function of these takes arguments of any name, as far as one can see."""
    if parameters is None:
        return True
    return any(one.kind == one.VAR_KEYWORD for one in parameters.values())


def check_arguments(kwargs: dict, function: Callable, more: tuple = (), less: tuple = ()):
    """Of the environment: those of its function, some that gym.make takes, some that are ours."""
    parameters = parameters_of(function)
    if parameters is None:
        return
    for name, parameter in parameters.items():
        named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if named and parameter.default is parameter.empty and name not in {*kwargs, *less}:
            raise APIUsageError(f"--env.{name}: the environment needs it")
    if takes_any(parameters):
        return
    known = sorted({*parameters, *more} - {*less})
    for key in kwargs:
        if key not in known:
            raise APIUsageError(
                f"--env.{key}: an unexpected keyword argument; there are {', '.join(known)}"
            )


OF_MAKE = ("max_episode_steps", "disable_env_checker")  # arguments of gym.make


def gymnasium_maker(gym_id: str, module: str, kwargs: dict) -> Callable:
    try:
        spec = gym.spec(gym_id)
    except gym.error.Error as error:
        hint = ""
        versions = [known for known in gym.registry if known.rpartition("-v")[0] == gym_id]
        if versions:
            hint = f"There is {', '.join(versions)}"
        elif module:
            hint = f'{module} does not register it: gym.register("{gym_id}", YourClass). '
            hint += f"PettingZoo's: give {module} a parallel_env(), and take --env-id {module}"
        elif "/" in gym_id:
            module = "ale_py" if gym_id.startswith("ALE/") else "MODULE"
            hint = f"Name its module: {module}:{gym_id}"
        elif not isinstance(error, gym.error.VersionNotFound | gym.error.DeprecatedEnv):
            hint = (
                "Another package's id needs its module: ale_py:ALE/Pong-v5. It is no module with "
                f"parallel_env (PettingZoo) either, nor one of Ocean's: {', '.join(OCEAN)}"
            )
        text = str(error)
        end = "" if text.endswith((".", "?", "!")) else "."
        raise APIUsageError(f"{text}{end} {hint}".strip()) from error
    function = spec.entry_point
    if function is None:
        raise APIUsageError(
            "it is registered as a vector environment alone; give it an entry_point"
        )
    if isinstance(function, str):
        try:
            function = gym.envs.registration.load_env_creator(function)
        except ValueError as error:
            raise APIUsageError(f"its entry_point {function} should be module:name") from error
    steps = kwargs.get("max_episode_steps")
    if isinstance(steps, float) and steps.is_integer():  # 1e3
        kwargs = {**kwargs, "max_episode_steps": int(steps)}
    of_make = {"disable_env_checker": True, **kwargs}
    own = {key: of_make.pop(key) for key in kwargs if key not in OF_MAKE}
    check_arguments({**spec.kwargs, **kwargs}, function, (*OF_MAKE, *spec.kwargs))
    if steps is not None and "max_episode_steps" in (parameters_of(function) or ()):
        own["max_episode_steps"] = kwargs["max_episode_steps"]  # both: it ends by either
    if own:  # among gym.make's arguments one could not be called id
        gym_id = dataclasses.replace(spec, kwargs={**spec.kwargs, **own})
    return partial(gym.make, gym_id, **of_make)


BUFFERS = ("observations", "rewards", "terminals", "truncations", "masks")  # in `pufferlibs`


def checked(own: type) -> type:
    """A PufferEnv of one's own. What it returns must be what PufferLib reads, its buffers."""

    class Checked(own):
        def __init__(self, *args, buf=None, **kwargs):
            super().__init__(*args, buf=buf, **copy.deepcopy(kwargs))  # each has its own
            with refusals():
                rows = self.num_agents if buf is None else len(buf["rewards"])
                if rows != self.num_agents:
                    both = f"{rows}, {self.num_agents}"
                    raise APIUsageError(f"its copies have different num_agents: {both}")

        def reset(self, seed: int | None = None, **options):  # options: in calls of its own
            with refusals(), torch_kept():
                observations, infos = parts(super().reset(seed=seed, **options), *RESET)
                check_buffers(self, observations)
            return observations, list_of(infos)

        def step(self, actions: np.ndarray):
            with refusals():
                result = super().step(np.array(actions))  # a copy: it may keep or change it
                *given, infos = parts(result, *STEP)
                check_buffers(self, *given)
                rewards = self.pufferlibs[BUFFERS.index("rewards")]
                if not np.isfinite(rewards).all():
                    raise NotFinite("a reward is not finite")
            return *given, list_of(infos)

        def recv(self):
            *_, infos, agents, _ = super().recv()
            *given, masks = self.pufferlibs
            return *given, infos, agents, masks

        def close(self):
            with contextlib.suppress(NotImplementedError):  # PufferEnv's: it has none
                super().close()

    return update_wrapper(Checked, own, updated=())


def check_buffers(env: pufferlib.PufferEnv, *given):
    """Copies what was bound to the buffers' names. Refuses what does not fit, and what was returned
    and is not in them."""
    for name, buffer, returned in itertools.zip_longest(BUFFERS, env.pufferlibs, given):
        bound = getattr(env, name)
        if bound is not buffer:
            try:
                values = np.asarray(bound)
                if values.size == buffer.size:
                    values = values.reshape(buffer.shape)
                buffer[:] = values
                fits = buffer.dtype.kind == "f" or (buffer == values).all()
            except UNFIT as error:
                raise APIUsageError(f"what it binds to self.{name}: {error}") from error
            if not fits:
                raise APIUsageError(f"it binds {values.dtype} to self.{name}: no {buffer.dtype}")
        if returned is None or returned is bound:
            continue
        dtype = buffer.dtype if buffer.dtype.kind == "f" else None
        if not np.array_equal(np.asarray(returned, dtype), buffer, equal_nan=dtype is not None):
            raise APIUsageError(
                f"it returns {name} that are not in its buffer, which is what PufferLib reads: "
                f"self.{name}[:] = ..."
            )


def list_of(infos) -> list:
    """The numbers of those that have some; one alone, or None, may stand for a list."""
    if infos is None or isinstance(infos, Mapping):
        infos = [infos]
    return [numbers for info in infos if (numbers := dict(numbers_in(info)))]


def environment_maker(env_id: str, kwargs: dict) -> Callable:
    """What makes a PufferEnv: by a name of Ocean's, a Gymnasium id, or a module with parallel_env.

    An id may begin with the module that registers it: ale_py:ALE/Pong-v5. MODULE:CLASS is a
    PufferEnv of one's own.
    """
    name = env_id.removeprefix("puffer_")
    if name in OCEAN:
        if name == env_id and os.path.exists(f"{name}.py"):  # one's own, or Ocean's?
            text = f"{name}.py is here, and Ocean has a {name}: rename it, or take puffer_{name}"
            raise APIUsageError(text)
        maker = ocean.env_creator(f"puffer_{name}")
        check_arguments(kwargs, maker, less=("num_envs", "buf", "seed"))
        return partial(maker, **kwargs)
    sys.path.insert(0, os.getcwd())  # one's own modules, before others of their names
    module, _, gym_id = env_id.rpartition(":")
    registers = module_of(module)
    if module and registers is None:
        raise APIUsageError(f"there is no module {module}, neither installed nor in this folder")
    own = getattr(registers, gym_id, None)
    if inspect.isclass(own) and issubclass(own, pufferlib.PufferEnv):  # of one's own, in C
        parameters = parameters_of(own)
        missing = [name for name in ("buf", "seed") if name not in (parameters or ())]
        if missing and not takes_any(parameters):
            raise APIUsageError(
                f"its __init__ should take {' and '.join(missing)}: buf=None, seed=0"
            )
        check_arguments(kwargs, own, less=("num_envs", "buf", "seed"))
        return partial(checked(own), **kwargs)
    if not module and env_id not in gym.registry and "/" not in env_id:
        found = module_of(env_id)
        if hasattr(found, "parallel_env"):
            check_arguments(kwargs, found.parallel_env)

            def make_one():
                return found.parallel_env(**copy.deepcopy(kwargs))  # as gym.make does

            return partial(PettingZooEnvs, make_one)
        if found:
            raise APIUsageError(
                "this module has no parallel_env, which PettingZoo's have; a Gymnasium id is "
                f"MODULE:Name-v0; {TO_PARALLEL}"
            )
    return partial(GymnasiumEnvs, gymnasium_maker(gym_id, module, kwargs))


started_in = pathlib.Path.cwd()  # when environments were made: they may chdir


def make(env_id: str, kwargs: dict, num_envs: int, num_workers: int, seed: int):
    """num_envs environments, each made with kwargs, vectorized by PufferLib.

    In this process, or in num_workers of their own: in two halves if they are even, so that one
    steps while the policy acts on the other. Raises pufferlib.APIUsageError.
    """
    global started_in
    started_in = pathlib.Path.cwd()
    if num_envs % max(num_workers, 1):
        raise APIUsageError(
            f"--num-envs, {num_envs} of this process: must be a multiple of --num-workers {num_workers}"
        )
    random.seed(seed)  # what an environment draws while it is made; in workers, PufferLib seeds
    np.random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
    try:
        with torch_kept(in_workers=num_workers > 0), refusals():
            vecenv = vectorize(environment_maker(env_id, kwargs), num_envs, num_workers, seed)
    except gym.error.Error as error:  # such as a package that is missing
        raise APIUsageError(str(error)) from error
    except (TypeError, ValueError, AssertionError) as error:
        if any(f"unexpected keyword argument '{key}'" in str(error) for key in kwargs):
            raise APIUsageError(f"--env: {error}") from error
        if gymnasium_raised(error):  # such as of what is no gymnasium.Env
            raise APIUsageError(str(error)) from error
        raise
    space = vecenv.single_action_space
    whole = isinstance(space, Box) and space.dtype.kind != "f"
    if whole or np.any(getattr(space, "start", 0)):  # of a PufferEnv of one's own
        vecenv.close()
        raise APIUsageError(f"actions of a PufferEnv begin at 0, whole ones in no Box: {space}")
    return vecenv


def vectorize(maker: Callable, num_envs: int, num_workers: int, seed: int):
    copies = max(num_workers, 1)
    backend = {"backend": "PufferEnv"}
    env_kwargs = {}
    if "num_envs" in inspect.signature(maker).parameters:  # one object steps many
        env_kwargs["num_envs"] = num_envs // copies
    else:
        copies = num_envs
        backend = {"backend": "Serial"}
    if num_workers:
        half = copies // 2 if num_workers % 2 == 0 else copies
        backend = {"backend": "Multiprocessing", "num_workers": num_workers, "batch_size": half}
        backend["overwork"] = True  # more workers than cores is the user's decision
        if issubclass(maker.func, AdaptedEnvs):
            env_kwargs["workers"] = True
    return pufferlib.vector.make(maker, None, env_kwargs, num_envs=copies, seed=seed, **backend)


# Files, memory, compiling --------------------------------------------------------------------------


def lock(file, wait: bool = False):
    """Makes it this process's. Where it is another's: waits, or raises BlockingIOError."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError as error:  # some file systems of clusters have no locks
        say_once(say, f"warning: {file.name}: {error}; nobody stops a second process's writing")


def latest_checkpoint(output_dir: str) -> pathlib.Path:
    """The newest trainer_state.pt of its runs. Raises IndexError."""
    folders = pathlib.Path(os.path.expanduser(output_dir))
    files = sorted(folders.glob("*/trainer_state.pt"), key=os.path.getmtime)
    begun = sorted(folders.glob("*/config.yaml"), key=os.path.getmtime)
    if begun and not (begun[-1].parent / files[-1].name).exists():
        say(f"warning: the latest run, {begun[-1].parent}, has no checkpoint yet")
    return files[-1]


@contextlib.contextmanager
def full_disk():
    """That one is full is a line, and not a traceback."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise APIUsageError(str(error)) from error


def write_whole(path: pathlib.Path, content: bytes):
    """Whoever reads it sees the old file or the new one, whole."""
    part = path.with_name(f"{path.name}.tmp")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        error.filename = str(path)
        raise


def keep_freed_memory():
    """glibc returns freed blocks of some megabytes to the system. To clear them anew took a fifth
    of an update."""
    glibc = ctypes.CDLL(None)
    glibc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    glibc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, at the most that it takes


def pin_observations(vecenv):
    """So that a GPU's copies of them do not wait."""
    import torch

    buffer = getattr(vecenv, "buf", vars(vecenv))["observations"]
    cudart = torch.cuda.cudart()
    cudart.cudaHostRegister(buffer.ctypes.data, buffer.nbytes, 0)
    weakref.finalize(vecenv, cudart.cudaHostUnregister, buffer.ctypes.data)


def write_libraries_whole():
    """g++ gives what torch.compile makes its name when it is whole.

    Torch takes whatever file is there: a start that is killed in the wrong moment would break all
    later ones.
    """
    from torch._inductor import cpp_builder

    run = getattr(cpp_builder, "_run_compile_cmd", None)  # torch's own, so it may go
    if run is None:
        return

    def run_and_rename(command: str, folder: str):
        words = shlex.split(command)
        output = words.index("-o") + 1
        target = words[output]
        words[output] = f"{target}.{os.getpid()}"
        run(shlex.join(words), folder)
        os.replace(words[output], target)

    cpp_builder._run_compile_cmd = run_and_rename
