"""What a step of an environment in Python costs, and what its adapter adds: a table in Markdown, 40 seconds.

    taskset -c 0 python benchmark/overhead.py                  # one core; the tasks below
    taskset -c 0 python benchmark/overhead.py CartPole-v1 my_package:MyEnv-v0

Microseconds per step of one environment among 64. Random actions, the least of five rounds: Gymnasium's own loop, and
adapters.py, which writes observations into PufferLib's buffers. In training: all that a real run spent in environments.
"""

import contextlib
import pathlib
import sys
import tempfile
import time

import gymnasium as gym
import numpy as np
from run import from_rows, read_rows

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import ppo_lstm_puffer as ppo  # noqa: E402

TASKS = (
    "FrozenLake-v1",
    "CartPole-v1",
    "Pendulum-v1",
    "tasks:RepeatPreviousEasy-v0",
    "tasks:MemoryS7-v0",
)
NUM_ENVS = 64
STEPS = 128
ROUNDS = 5


def microseconds(step) -> float:
    """The least of some rounds, per step of one environment. step(t): a step of all."""
    seconds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for t in range(STEPS):
            step(t)
        seconds.append(time.perf_counter() - begin)
    return 1e6 * min(seconds) / STEPS / NUM_ENVS


def measure(env_id: str) -> list[float]:
    envs = ppo.make_envs(ppo.Args(env_id=env_id, num_envs=NUM_ENVS, num_workers=0), seed=1)
    adapted = envs.vecenv
    adapted.reset(1)
    space = envs.action_space
    rows = np.array([[space.sample() for _ in range(NUM_ENVS)] for _ in range(STEPS)])
    actions = [adapted.own_actions(step) for step in rows]
    singles = [gym.make(env_id) for _ in range(NUM_ENVS)]
    for env in singles:
        env.reset(seed=1)

    def gymnasium_step(t: int):
        for env, action in zip(singles, actions[t]):
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()

    alone = microseconds(gymnasium_step)
    return [alone, microseconds(lambda t: adapted.step(rows[t])), in_training(env_id)]


def in_training(env_id: str) -> float:
    """Per step of a real run, in `send` and `recv`."""
    words = f"--env-id {env_id} --num-envs {NUM_ENVS} --num-steps 64 --log-interval 1"
    words += f" --minibatch-size {16 * NUM_ENVS} --total-timesteps {15 * 64 * NUM_ENVS}"
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        words += f" --no-compile --device cpu --output-dir {folder}"
        ppo.main(*ppo.parse_args(words.split()))
        rows, _ = read_rows(folder)
    return 1e6 * from_rows(rows)["phases"]["env"] / (rows[-1]["step"] - rows[0]["step"])


def main():
    print("| environment | Gymnasium | adapters.py | in training |")
    print("| --- | --- | --- | --- |")
    for env_id in sys.argv[1:] or TASKS:
        times = " | ".join(f"{one:.1f}" for one in measure(env_id))
        print(f"| {env_id} | {times} |", flush=True)


if __name__ == "__main__":
    main()
