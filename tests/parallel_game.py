"""A PettingZoo environment for the tests, --env-id tests.parallel_game: three agents."""

import numpy as np
from gymnasium.spaces import Box, Discrete
from pettingzoo import ParallelEnv


class ParallelGame(ParallelEnv):
    """Each agent sees a bit and its own number; reward 1 for naming the bit.

    An agent ends after `shortest` to `longest` steps, drawn at every reset: at the longest it is
    truncated, before that terminated. The last `absent` agents are never there.
    """

    metadata = {"name": "parallel_game", "render_modes": []}  # noqa: RUF012
    render_mode = None

    def __init__(self, shortest: int = 2, longest: int = 6, absent: int = 0):
        self.absent = absent
        self.shortest = shortest
        self.longest = longest
        self.possible_agents = ["a", "b", "c"]
        self.agents = []
        self.rng = np.random.default_rng()

    def observation_space(self, agent):
        return Box(0, 2, (2,), np.float32)

    def action_space(self, agent):
        return Discrete(2)

    def observe(self):
        self.bits = {agent: int(self.rng.integers(2)) for agent in self.agents}
        return {
            agent: np.array([self.bits[agent], self.possible_agents.index(agent)], np.float32)
            for agent in self.agents
        }

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.t = 0
        self.agents = self.possible_agents[: 3 - self.absent]
        lengths = self.rng.integers(self.shortest, self.longest + 1, len(self.agents)).tolist()
        self.lengths = dict(zip(self.agents, lengths))
        return self.observe(), {agent: {} for agent in self.agents}

    def step(self, actions):
        self.t += 1
        rewards = {agent: float(actions[agent] == self.bits[agent]) for agent in self.agents}
        over = {agent: self.t == self.lengths[agent] for agent in self.agents}
        truncations = {agent: over[agent] and self.t == self.longest for agent in self.agents}
        terminations = {agent: over[agent] and self.t < self.longest for agent in self.agents}
        infos = {agent: {"n": 500} for agent in self.agents}  # which is Ocean's, and nothing here
        observations = self.observe()  # of agents that end here, too: their last
        self.agents = [agent for agent in self.agents if self.t < self.lengths[agent]]
        return observations, rewards, terminations, truncations, infos


def parallel_env(**kwargs):
    return ParallelGame(**kwargs)
