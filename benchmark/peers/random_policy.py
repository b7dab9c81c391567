"""Actions drawn at random on a Gymnasium id: what a score is without learning.

python benchmark/peers/random_policy.py --env-id envs.memory:CartPole-v1 --folder DIR
"""

import gymnasium as gym
import numpy as np
from peer import Metrics, arguments


def main():
    parser = arguments(__doc__.split("\n")[0])
    parser.add_argument("--episodes", type=int, default=128)
    args = parser.parse_args()
    metrics = Metrics(args, "gymnasium", {}, "actions drawn at random")
    env = gym.make(args.env_id)
    env.action_space.seed(args.seed)
    returns = []
    steps = 0
    for episode in range(args.episodes):
        env.reset(seed=args.seed if episode == 0 else None)
        over = False
        total = 0.0
        while not over:
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            over = terminated or truncated
            total += float(reward)
            steps += 1
        returns.append(total)
        metrics.line(steps, episodic_return=total)
    metrics.played = {"episodes": len(returns), "episodic_return": {"mean": np.mean(returns)}}
    metrics.finish()


if __name__ == "__main__":
    main()
