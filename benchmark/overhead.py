"""What a step of an environment in Python costs, and what the script adds to it: a table in Markdown, 40 seconds.

    taskset -c 0 python benchmark/overhead.py                  # one core; the tasks below
    taskset -c 0 python benchmark/overhead.py CartPole-v1 my_package:MyEnv-v0

Microseconds per step of one environment among 64. Random actions, the least of five rounds: Gymnasium's own loop, and
PufferLib's emulation of it (observations packed, episodes counted). In training, of a real run: what PufferLib's `send`
and `recv` took, and all of the phase `env`. The difference is the script's: dones, returns, logs, copies to tensors.
"""

import contextlib
import pathlib
import sys
import tempfile
import time
import unittest.mock

import gymnasium as gym
import numpy as np
import pufferlib.vector
from run import read_rows

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
NUM_ENVS, STEPS, ROUNDS = 64, 128, 5


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
    ppo.environment_class(env_id)  # imports a module that registers it
    singles = [gym.make(env_id) for _ in range(NUM_ENVS)]
    space = singles[0].action_space
    actions = np.array([[space.sample() for _ in range(NUM_ENVS)] for _ in range(STEPS)])

    def gymnasium_step(t: int):
        for env, action in zip(singles, actions[t]):
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()

    for env in singles:
        env.reset(seed=1)
    made = microseconds(gymnasium_step)

    vecenv = pufferlib.vector.make(
        ppo.environment_class(env_id), num_envs=NUM_ENVS, backend=pufferlib.vector.Serial
    )
    vecenv.reset(1)
    packed = microseconds(lambda t: vecenv.step(actions[t]))

    return [made, packed, *in_training(env_id)]


def in_training(env_id: str) -> tuple[float, float]:
    """Per step of a real run: PufferLib's part, and the whole of the phase `env`."""
    spent = 0.0

    def timed(method):
        def call(*given):
            nonlocal spent
            begin = time.perf_counter()
            result = method(*given)
            spent += time.perf_counter() - begin
            return result

        return call

    sizes = (
        f"--num-envs {NUM_ENVS} --num-steps 64 --minibatch-size {16 * NUM_ENVS} --log-interval 1"
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as patches:
        for name in ("send", "recv"):
            method = timed(getattr(pufferlib.vector.Serial, name))
            patches.enter_context(unittest.mock.patch.object(pufferlib.vector.Serial, name, method))
        patches.enter_context(contextlib.redirect_stdout(sys.stderr))
        words = f"--env-id {env_id} {sizes} --total-timesteps {15 * 64 * NUM_ENVS} --no-compile --device cpu --output-dir {folder}"
        ppo.train(*ppo.parse_args(words.split()))
        rows, last = read_rows(folder)
    seconds = spent, sum(row["time/env"] for row in rows)
    return tuple(1e6 * part / last["step"] for part in seconds)


def main():
    print(
        "| environment | Gymnasium | PufferLib | in training: PufferLib | and all of `env` | the script's, of `env` |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for env_id in sys.argv[1:] or TASKS:
        *others, whole = times = measure(env_id)
        share = (whole - others[-1]) / whole
        print(
            f"| {env_id} | {' | '.join(f'{one:.1f}' for one in times)} | {share:.0%} |", flush=True
        )


if __name__ == "__main__":
    main()
