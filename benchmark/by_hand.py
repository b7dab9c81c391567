"""Returns by hand: an environment is stepped with random actions, by its own package alone, and
once more through the adapters, with the same seed and the same actions.

    python benchmark/by_hand.py minigrid:MiniGrid-Empty-5x5-v0    # the words after --env-id

What is seen must be alike in every step, and the rewards, and the returns and lengths of episodes. A
line says what they are. Exit code 1: they are not alike. An environment that differs from run to run
by itself is compared as far as it does not. benchmark/tryout.py asks this of every environment.
"""

import importlib
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


class OneAgent:
    """A Gymnasium environment as PettingZoo would have it."""

    possible_agents = (0,)

    def __init__(self, env: gym.Env):
        self.env = env
        self.close = env.close

    def observation_space(self, agent: int) -> gym.Space:
        return self.env.observation_space

    def action_space(self, agent: int) -> gym.Space:
        return self.env.action_space

    def reset(self, **seed) -> list[dict]:
        self.agents = [0]
        return [{0: part} for part in self.env.reset(**seed)]

    def step(self, actions: dict) -> list[dict]:
        observation, reward, terminated, truncated, info = self.env.step(actions[0])
        self.agents = [] if terminated or truncated else [0]
        return [{0: part} for part in (observation, reward, terminated, truncated, info)]


def make_alone(env_id: str, kwargs: dict):
    """The environment without the adapters."""
    module, _, name = env_id.rpartition(":")
    if module:
        importlib.import_module(module)
    elif "/" not in name and name not in gym.registry:
        return importlib.import_module(name).parallel_env(**kwargs)
    return OneAgent(gym.make(name, disable_env_checker=True, **kwargs))


def draw(space: gym.Space):
    """A random action. A Box's is one that float32 holds, as the policy's are."""
    action = space.sample()
    if isinstance(space, gym.spaces.Box):
        action = np.float32(action).astype(space.dtype).clip(space.low, space.high)
    return action


def parts_of(space: gym.Space, value) -> list[tuple] | None:
    """The spaces in a Dict or a Tuple, each with its value."""
    if isinstance(space, gym.spaces.Dict):
        return [(part, value[key]) for key, part in space.items()]
    return list(zip(space, value)) if isinstance(space, gym.spaces.Tuple) else None


def as_policy_sends(space: gym.Space, action) -> list[float]:
    """Choices counted from 0, or the numbers of a Box."""
    parts = parts_of(space, action)
    if parts is not None:
        return [number for part in parts for number in as_policy_sends(*part)]
    return (np.asarray(action) - getattr(space, "start", 0)).ravel().tolist()


def as_network_sees(space: gym.Space, observation, inner: bool = False) -> list[float]:
    """Choices one-hot, no text, and what goes from 0 to 255 as 0 to 1 if it is in a Dict."""
    parts = parts_of(space, observation)
    if parts is not None:
        return [number for part in parts for number in as_network_sees(*part, inner=True)]
    if adapters.is_text(space):
        return []
    if not isinstance(space, gym.spaces.Box):
        return gym.spaces.flatten(space, observation).tolist()
    scaled = inner & (space.low == 0) & (space.high == 255)
    return (np.asarray(observation).ravel() / np.where(scaled, 255, 1).ravel()).tolist()


def digest(numbers) -> float:
    """The sum of their sizes, each weighted by its place."""
    sizes = np.abs(np.float32(numbers).ravel().astype(np.float64))
    return float(sizes @ np.linspace(1, 2, sizes.size))


def step_alone(env_id: str, kwargs: dict, seed: int) -> tuple[list, list]:
    """What happens, and the actions that were given.

    Of a reset [what is seen], of a step [what is seen, rewards], and of each episode that ends with
    it three more: agent, return, length.
    """
    env = make_alone(env_id, kwargs)
    agents = list(env.possible_agents)
    spaces = {agent: env.action_space(agent) for agent in agents}
    for i, agent in enumerate(agents):
        spaces[agent].seed(SEED + i)
    episodes = {}  # agent: return, length so far
    happened = []
    actions = []

    def see(observations: dict, there: list) -> float:
        shown = [agent for agent in agents if agent in there and agent in observations]
        rows = [as_network_sees(env.observation_space(one), observations[one]) for one in shown]
        return sum(map(digest, rows))

    observations, _ = env.reset(seed=seed)
    happened.append([see(observations, env.agents)])
    for _ in range(STEPS):
        if not env.agents:
            observations, _ = env.reset()
            happened.append([see(observations, env.agents)])
        drawn = {agent: draw(spaces[agent]) for agent in agents}
        actions.append([as_policy_sends(spaces[agent], drawn[agent]) for agent in agents])
        playing = [agent for agent in agents if agent in env.agents]
        given = {agent: drawn[agent] for agent in playing}
        observations, rewards, terminations, truncations, _ = env.step(given)
        row = [see(observations, [*playing, *env.agents]), 0.0]
        for agent in playing:
            reward = float(np.squeeze(rewards[agent]))
            total, length = episodes.pop(agent, (0.0, 0))
            episode = (total + reward, length + 1)
            row[1] += reward
            if terminations[agent] or truncations[agent]:
                row += [agents.index(agent), *episode]
            else:
                episodes[agent] = episode
        happened.append(row)
    env.close()
    return happened, actions


def step_adapted(env_id: str, kwargs: dict, actions: list) -> list:
    """The same through the adapters, counted as the training script counts."""
    envs = ppo_lstm_puffer.Envs(adapters.make(env_id, kwargs, 1, 0, SEED), SEED)
    adapted = envs.vecenv.driver_env
    left = [np.array(action, np.float64) for action in actions]
    nothing = np.zeros_like(left[0])
    happened = []
    resets = True
    envs.reset()
    while True:
        _, observations, rewards, _, _ = envs.receive()
        row = [sum(map(digest, observations[adapted.masks]))]
        if not resets:
            row.append(float(rewards.sum()))
            row += [float(number) for episode in envs.episodes for number in episode]
        envs.episodes.clear()
        happened.append(row)
        if not left:
            break
        resets = adapted.over[0]  # whatever the action
        action = nothing if resets else left.pop(0)
        envs.send(action.astype(adapted.single_action_space.dtype))
    envs.close()
    return happened


def alone(function, *values, generators: int = SEED):
    """What it returns, in a process of its own, with this seed of Python's and numpy's own."""
    with multiprocessing.get_context("fork").Pool(1, seed_generators, [generators]) as pool:
        return pool.apply(function, values)


def seed_generators(seed: int):
    random.seed(seed)
    np.random.seed(seed)


def same_until(rows: list, others: list) -> int:
    """How many are alike, up to the first that is not. Rewards go through float32."""
    for n, (row, other) in enumerate(zip(rows, others)):
        if len(row) != len(other) or not np.allclose(row, other, rtol=1e-5, atol=1e-4):
            return n
    return min(len(rows), len(others))


def main(words: list[str]) -> int:
    sys.path.append(os.getcwd())  # modules of the current folder, as the adapters have them
    args, _ = ppo_lstm_puffer.parse_args(["--env-id", *words])
    seed = pufferlib.env_seed(pufferlib.env_seed(SEED, 0), 0)  # of the first environment
    ours, actions = alone(step_alone, args.env_id, args.env, seed)
    theirs = alone(step_adapted, args.env_id, args.env, actions)
    until = same_until(ours, theirs)
    steps = [row for row in ours[:until] if len(row) > 1]
    total = sum(row[1] for row in steps)
    if until == len(ours) == len(theirs):
        print(f"{total:.6g} in {STEPS} steps, {sum(len(row) // 3 for row in steps)} ends")
        return 0
    given = args.env_id, args.env, seed  # some draw from numpy's own generator, not from theirs
    again = [alone(step_alone, *given, generators=n)[0] for n in range(3)]
    if min(same_until(ours, other) for other in again) > until:
        print(f"unlike in row {until}: by hand {ours[until:][:1]}, adapters {theirs[until:][:1]}")
        return 1
    if steps:
        print(f"{total:.6g} in the first {len(steps)} steps; then it differs from run to run")
    else:
        print("not counted: with the same seed it differs from run to run")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
