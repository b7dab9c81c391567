"""PuffeRL 3.0.0, PufferLib's own trainer, through its own API: the peer to beat.

    .peers/pufferl/bin/python benchmark/peers/pufferl.py --steps 40_000_000 --folder DIR
    .peers/pufferl/bin/python benchmark/peers/pufferl.py --env-id envs.memory:CountRecallEasy-v0 ...

Hyperparameters are as the environment's .ini has them (Breakout: segments of 64, minibatches of
32768, Muon), but for the schedule, which --total-timesteps gives. On a CPU there are 2 x 1024
environments, Serial and compiled, its best on two cores: 63-72 thousand steps a second, against
11-16 Serial and eager and 30 with Multiprocessing and eager. On a GPU it is as its .ini has it:
8 x 1024, Multiprocessing, eager, float32. It needs heavyball 1.7.2, the release of its time; with
2.2.1 it hardly learns. Its seeding is commented out, so torch and numpy are seeded here.

A Gymnasium id (module:Id-v0) runs through its emulation with its default.ini, its default network
with an LSTM, and the sizes of configs/popgym.yaml instead of minibatches of 8192, of which a Python
environment would give it few.

Its Muon (heavyball's) multiplies in bfloat16, whatever the precision: on a CPU with AVX2 alone that
takes most of an update of a small minibatch. --muon-in-float32 gives it what it lacks there.
"""

import functools
import json
import sys

import gymnasium as gym
import heavyball
import numpy as np
import pufferlib.emulation
import pufferlib.models
import torch
from peer import Metrics, arguments

NUM_ENVS = 64
SIZES = {"minibatch_size": 1024, "update_epochs": 2}
FASTEST = "Serial with torch.compile"
NOTE = f"{FASTEST}, the fastest of what was tried on two cores; its own .ini otherwise"
ON_A_GPU = "its own .ini, backend and compiling included, but for the schedule"
EMULATED = f"{FASTEST}; {NUM_ENVS} environments, {SIZES}; its default.ini and network otherwise"


def make_gymnasium(env_id: str, kwargs: dict, buf=None, seed=0):
    env = pufferlib.EpisodeStats(gym.make(env_id, **kwargs))
    return pufferlib.emulation.GymnasiumPufferEnv(env=env, buf=buf, seed=seed)


def orthogonalized(matrix: torch.Tensor, steps: int = 5, eps: float = 1e-7) -> torch.Tensor:
    """Muon's iteration (Jordan et al. 2024) in the matrix's own precision, as in our script, which this
    peer's environment cannot import."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + eps)
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x


def main():
    parser = arguments(__doc__.split("\n")[0])
    backends = ("Serial", "Multiprocessing")
    parser.add_argument("--backend", choices=backends, default="Serial", help="on a CPU")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--hidden-size", type=int, default=128, help="of a Gymnasium id's network")
    parser.add_argument("--env", type=json.loads, default={}, help="its arguments, as JSON")
    parser.add_argument("--train", type=json.loads, default={}, help="other settings, as JSON")
    text = "Muon's iterations, which heavyball has in bfloat16"
    parser.add_argument("--muon-in-float32", action="store_true", help=text)
    args = parser.parse_args()
    if args.muon_in_float32:
        heavyball.utils.zeropower_via_newtonschulz5 = orthogonalized
    sys.argv = sys.argv[:1]
    import pufferlib.pufferl as pufferl  # reads sys.argv when it loads its configuration

    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    emulated = ":" in args.env_id
    name = "default" if emulated else f"puffer_{args.env_id}"
    config = pufferl.load_config(name)
    train = config["train"]
    train |= {"device": args.device, "compile_fullgraph": False, "env": name}
    if args.device == "cpu" or emulated:
        num_envs = NUM_ENVS if emulated else 2
        config["vec"] = {"backend": args.backend, "num_envs": num_envs}
        train["compile"] = True
    config["vec"]["seed"] = args.seed
    train |= {"total_timesteps": args.total_timesteps, "seed": args.seed}
    train["data_dir"] = str(args.folder / "scratch")
    if emulated:
        train |= SIZES | {"use_rnn": True}
        make = functools.partial(make_gymnasium, args.env_id, args.env)
        vecenv = pufferlib.vector.make(make, **config["vec"])
        width = args.hidden_size
        policy = pufferlib.models.Default(vecenv.driver_env, hidden_size=width)
        policy = pufferlib.models.LSTMWrapper(vecenv.driver_env, policy, width, width)
    else:
        config["env"] |= args.env
        vecenv = pufferl.load_env(name, config)
        policy = pufferl.load_policy(config, vecenv)
    train |= args.train
    note = EMULATED if emulated else NOTE if args.device == "cpu" else ON_A_GPU
    note += "; Muon's iterations in float32" if args.muon_in_float32 else ""
    trainer = pufferl.PuffeRL(train, vecenv, policy)
    trainer.print_dashboard = lambda *args, **kwargs: None
    said = dict(train)
    for part in ("vec", "env", "policy", "rnn"):
        said |= {f"{part}.{key}": value for key, value in config[part].items()}
    metrics = Metrics(args, "heavyball", said, note)
    stop = False
    while not stop:
        stats = trainer.evaluate()
        values = {}
        for theirs, ours in (("score", "env__score"), ("episode_return", "episodic_return")):
            if stats.get(theirs):
                values[ours] = np.mean(stats[theirs])
        trainer.train()
        stop = metrics.line(trainer.global_step, **values)
    metrics.finish()


if __name__ == "__main__":
    main()
