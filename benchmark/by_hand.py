"""Returns by hand: one environment is stepped with random actions, by its own package alone, and
once more through the adapters, with the same seed and the same actions.

    python benchmark/by_hand.py minigrid:MiniGrid-Empty-5x5-v0    # the words after --env-id

Returns and lengths of all episodes must be alike, and the sum of all that was observed. A line says
what they are. Exit code 1: they are not alike. An environment that differs from run to run by
itself is compared as far as it does not. benchmark/tryout.py asks this of every environment.
"""

import importlib
import math
import multiprocessing
import os
import random
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pufferlib
from pufferlib import adapters

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ppo_lstm_puffer

SEED = 7
STEPS = 300


def numbers(space: gym.Space, action) -> list[float]:
    """An action as the policy sends it: choices counted from 0, or the numbers of a Box."""
    if isinstance(space, gym.spaces.Dict):
        return [number for key in space for number in numbers(space[key], action[key])]
    if isinstance(space, gym.spaces.Tuple):
        return [number for pair in zip(space, action) for number in numbers(*pair)]
    return (np.asarray(action) - getattr(space, "start", 0)).ravel().tolist()


def draw(space: gym.Space):
    """A random action. A Box's is one that float32 holds, as the policy's are."""
    action = space.sample()
    if isinstance(space, gym.spaces.Box):
        action = np.float32(action).astype(space.dtype).clip(space.low, space.high)
    return action


def alone(step, *values):
    """What it returns, in a process of its own and with the seeds that adapters.make sets."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(seeded, (step, *values))


def seeded(step, *values):
    random.seed(SEED)
    np.random.seed(SEED)
    return step(*values)


def sum_of(space: gym.Space, observation) -> float:
    """Sizes of the numbers of an observation; choices count from 0, and text is nothing."""
    if isinstance(space, gym.spaces.Dict):
        return sum(sum_of(part, observation[key]) for key, part in space.spaces.items())
    if isinstance(space, gym.spaces.Tuple):
        return sum(map(sum_of, space.spaces, observation))
    if adapters.is_text(space):
        return 0.0
    offset = getattr(space, "start", 0)
    return float(np.abs(np.float32(observation) - offset).sum(dtype=np.float64))


def sum_of_row(adapted: adapters.AdaptedEnvs, row: np.ndarray) -> float:
    """The same of what the network sees."""
    if not adapted.columns:
        return float(np.abs(np.float32(row)).sum(dtype=np.float64))
    total = 0.0
    for columns, part in adapted.columns.values():
        numbers = np.abs(row[columns]).astype(np.float64)
        if isinstance(part, gym.spaces.Box):
            numbers[((part.low == 0) & (part.high == 255)).ravel()] *= 255
        elif isinstance(part, gym.spaces.Discrete):
            numbers *= np.arange(part.n)
        elif isinstance(part, gym.spaces.MultiDiscrete):
            numbers *= np.concatenate([np.arange(count) for count in part.nvec.ravel()])
        total += float(numbers.sum())
    return total


class Totals:
    """Episodes as (agent, return, length), those that are not over, and the sum of what was seen:
    of all, and up to the first end."""

    def __init__(self):
        self.episodes = []
        self.open = {}
        self.seen = 0.0
        self.seen_first = None

    def ends(self):
        if self.seen_first is None:
            self.seen_first = self.seen

    def add(self, agent: int, reward, over: bool):
        total, length = self.open.pop(agent, (0.0, 0))
        episode = (total + float(np.squeeze(reward)), length + 1)
        if over:
            self.episodes.append((agent, *episode))
            self.ends()
        else:
            self.open[agent] = episode

    def rows(self) -> list[tuple]:
        return [*self.episodes, *((agent, *self.open[agent]) for agent in sorted(self.open))]


def step_gymnasium(env_id: str, kwargs: dict, seed: int) -> tuple[Totals, list]:
    """What gym.make's environment does, and the actions that it was given."""
    module, _, name = env_id.rpartition(":")
    if module:
        importlib.import_module(module)
    env = gym.make(name, disable_env_checker=True, **kwargs)
    env.action_space.seed(SEED)
    totals = Totals()
    actions = []
    observation, _ = env.reset(seed=seed)
    totals.seen += sum_of(env.observation_space, observation)
    over = False
    for _ in range(STEPS):
        if over:
            observation, _ = env.reset()
            totals.seen += sum_of(env.observation_space, observation)
        action = draw(env.action_space)
        actions.append([numbers(env.action_space, action)])
        observation, reward, terminated, truncated, _ = env.step(action)
        over = bool(terminated or truncated)
        totals.seen += sum_of(env.observation_space, observation)
        totals.add(0, reward, over)
    env.close()
    return totals, actions


def step_pettingzoo(env_id: str, kwargs: dict, seed: int) -> tuple[Totals, list]:
    env = importlib.import_module(env_id).parallel_env(**kwargs)
    agents = list(env.possible_agents)
    spaces = {agent: env.action_space(agent) for agent in agents}
    for i, agent in enumerate(agents):
        spaces[agent].seed(SEED + i)
    totals = Totals()
    actions = []

    def see(observations: dict, present):
        for agent in present:
            if agent in observations:
                totals.seen += sum_of(env.observation_space(agent), observations[agent])

    see(env.reset(seed=seed)[0], env.agents)
    for _ in range(STEPS):
        if not env.agents:
            see(env.reset()[0], env.agents)
        drawn = {agent: draw(spaces[agent]) for agent in agents}
        actions.append([numbers(spaces[agent], drawn[agent]) for agent in agents])
        playing = sorted(env.agents, key=agents.index)
        given = {agent: drawn[agent] for agent in env.agents}
        observations, rewards, terminations, truncations, _ = env.step(given)
        see(observations, {*playing, *env.agents})
        for agent in playing:
            over = bool(terminations[agent] or truncations[agent])
            totals.add(agents.index(agent), rewards[agent], over)
    env.close()
    return totals, actions


def step_adapted(env_id: str, kwargs: dict, actions: list) -> Totals:
    """The same actions through the adapters, counted as the training script counts."""
    envs = ppo_lstm_puffer.Envs(adapters.make(env_id, kwargs, 1, 0, SEED), SEED)
    adapted = envs.vecenv.driver_env
    totals = Totals()
    left = [np.array(action, np.float64) for action in actions]
    nothing = np.zeros_like(left[0])
    envs.reset()
    while True:
        observations = envs.receive()[1]
        totals.seen += sum(sum_of_row(adapted, row) for row in observations[adapted.masks])
        if envs.episodes:
            totals.ends()
        if not left:
            break
        action = nothing if adapted.over[0] else left.pop(0)  # where over, the next is a reset
        envs.send(action.astype(adapted.single_action_space.dtype))
    totals.episodes = [(int(agent), float(total), int(n)) for agent, total, n in envs.episodes]
    for agent, length in enumerate(envs.lengths):
        if length:
            totals.open[agent] = (float(envs.returns[agent]), int(length))
    envs.close()
    return totals


def alike(ours: Totals, theirs: Totals) -> bool:
    if len(ours.rows()) != len(theirs.rows()) or not all(map(same, ours.rows(), theirs.rows())):
        return False
    return math.isclose(ours.seen, theirs.seen, rel_tol=1e-6)


def begin_alike(ours: Totals, theirs: Totals) -> bool:
    """Up to the first end."""
    seen = [one.seen if one.seen_first is None else one.seen_first for one in (ours, theirs)]
    return same(ours.rows()[0], theirs.rows()[0]) and math.isclose(*seen, rel_tol=1e-6)


def same(row: tuple, other: tuple) -> bool:
    """Rewards go through float32."""
    agent, total, length = row
    return (agent, length) == other[::2] and math.isclose(
        total, other[1], rel_tol=1e-5, abs_tol=1e-4
    )


def main(words: list[str]) -> int:
    sys.path.append(os.getcwd())  # modules of the current folder, as the adapters have them
    args, _ = ppo_lstm_puffer.parse_args(["--env-id", *words])
    zoo = ":" not in args.env_id and "/" not in args.env_id and args.env_id not in gym.registry
    step = step_pettingzoo if zoo else step_gymnasium
    seed = pufferlib.env_seed(pufferlib.env_seed(SEED, 0), 0)  # of the first environment
    ours, actions = alone(step, args.env_id, args.env, seed)
    theirs = alone(step_adapted, args.env_id, args.env, actions)
    total = sum(row[1] for row in ours.rows())
    if alike(ours, theirs):
        print(f"{total:.6g} in {STEPS} steps, {len(ours.episodes)} ends")
        return 0
    again = [alone(step, args.env_id, args.env, seed)[0] for _ in range(3)]  # some differ at times
    mine = ours.rows()[0]
    begins_alike = begin_alike(ours, theirs)
    repeats = all(alike(ours, other) for other in again)
    begins_repeat = all(begin_alike(ours, other) for other in again)
    if repeats or (begins_repeat and not begins_alike):
        shown = [(len(one.episodes), one.rows()[:2], one.seen) for one in (ours, theirs)]
        print("unlike: by hand {}, adapters {}".format(*shown))
        return 1
    if begins_alike:
        print(f"{mine[1]:.6g} in the first {mine[2]} steps; then it differs from run to run")
    else:
        print("not counted: with the same seed it differs from run to run")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
