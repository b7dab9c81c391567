"""Credit over 128 steps with segments of 64: what learns that the first action decides a reward 128 steps later.

    python benchmark/credit.py             # every setting, seeds 1 2 3: credit.json, credit.md in reports/learning
    python benchmark/credit.py --only visible --seeds 4 5    # settings whose name contains this word, other seeds
    python benchmark/credit.py --quick     # one seed, a third of the steps, in runs/credit-quick: that everything runs
    python benchmark/credit.py --report    # the table in credit.md again, from credit.json

The environment is FarReward-v0 of tests/environments.py. One process at a time, on one core; a finished cell (the same
command) is not run again. PuffeRL's cells need .peers/pufferl (make benchmark-peers) and are left out without it.
"""

import argparse
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
PEER = ROOT / ".peers/pufferl/bin/python"
OURS = (
    "--env-id envs.probes:FarReward-v0 --num-envs 64 --hidden-size 32 --no-compile --precision float32 "
    "--log-interval 4 --update-epochs 2 --optimizer muon --learning-rate 0.02 --adam-learning-rate 0.001 "
    "--momentum 0.95 --anneal linear --clip-coef 0.2 --vf-clip-coef 0.2 --vf-coef 2 --ent-coef 0.001 "
    "--max-grad-norm 1.5 --prio-alpha 0 --prio-beta0 0.2"
)


def ours(
    shown: int, steps: int, segment: int = 64, gamma: float = 0.999, gae_lambda: float = 0.95
) -> dict:
    flags = f"--num-steps {segment} --minibatch-size {16 * segment} --gamma {gamma} --gae-lambda {gae_lambda}"
    return {"program": "ours", "shown": shown, "steps": steps, "flags": f"{OURS} {flags}"}


def pufferl(shown: int, steps: int, **changes) -> dict:
    """Its default.ini (segments of 64) with the same environments, network and minibatch; `changes` beyond that."""
    return {"program": "pufferl", "shown": shown, "steps": steps, "flags": json.dumps(changes)}


FAIR = {
    "gamma": 0.999,
    "gae_lambda": 0.95,
    "learning_rate": 0.02,
    "ent_coef": 0.001,
    "update_epochs": 2,
}
FAIR |= {"prio_alpha": 0}
SETTINGS = {
    "visible, segments of 64, lambda 0.9": ours(128, 250_000, gae_lambda=0.9),
    "visible, segments of 64, lambda 0.95": ours(128, 250_000),
    "visible, segments of 64, lambda 0.99": ours(128, 250_000, gae_lambda=0.99),
    "visible, segments of 64, lambda 1": ours(128, 250_000, gae_lambda=1),
    "visible, segments of 64, lambda 0.95, gamma 0.99": ours(128, 250_000, gamma=0.99),
    "visible, segments of 64, lambda 0.95, gamma 0.98": ours(128, 250_000, gamma=0.98),
    "visible, PuffeRL, its defaults": pufferl(128, 250_000),
    "visible, PuffeRL, the same settings": pufferl(128, 250_000, **FAIR),
    "episodes of two segments, segments of 64, lambda 0.95": ours(127, 250_000) | {"program": "native"},
    "episodes of two segments, PuffeRL, its defaults": pufferl(127, 250_000, native=True),
    "episodes of two segments, PuffeRL, the same settings": pufferl(127, 250_000, native=True, **FAIR),
    "seen once, segments of 64, lambda 1": ours(1, 500_000, gae_lambda=1),
    "seen once, segments of 160, lambda 1": ours(1, 500_000, segment=160, gae_lambda=1),
    "seen once, PuffeRL, its defaults": pufferl(1, 500_000),
    "seen once, PuffeRL, the same settings": pufferl(1, 500_000, **FAIR),
}  # fmt: skip


# One cell -------------------------------------------------------------------------------------------------------------


def command(setting: dict, seed: int) -> list[str]:
    """The command of a cell, run in the repository's folder; DIR stands for a temporary folder."""
    common = f"--seed {seed} --total-timesteps {setting['steps']} --env.shown {setting['shown']}"
    if setting["program"] == "pufferl":
        row = [
            "--pufferl",
            str(seed),
            str(setting["steps"]),
            str(setting["shown"]),
            setting["flags"],
        ]
        return [".peers/pufferl/bin/python", "benchmark/credit.py", *row]
    train = [
        "python",
        "ppo_lstm_puffer.py",
        *setting["flags"].split(),
        *common.split(),
        "--output-dir",
        "DIR",
    ]
    if setting["program"] == "native":
        train[1:4] = ["benchmark/credit.py", "--ours", "--env-id", "far_rewards"]
    return train


def native():
    """FarReward as PufferLib's C environments do it: 128 steps (two segments of 64), reset in the last one."""
    import gymnasium as gym
    import pufferlib

    class FarRewards(pufferlib.PufferEnv):
        def __init__(self, num_envs=64, shown=127, buf=None, seed=0):
            self.single_observation_space = gym.spaces.Box(0, 1, (4,), np.float32)
            self.single_action_space, self.num_agents, self.shown = (
                gym.spaces.Discrete(2),
                num_envs,
                shown,
            )
            super().__init__(buf)

        def begin(self):
            self.t, self.cue = 0, self.random.integers(2, size=self.num_agents)

        def observe(self):
            self.observations[:] = 0
            if self.t <= self.shown:
                self.observations[:, :2] = np.eye(2)[self.cue]
                if self.t > 0:
                    self.observations[:, 2:] = np.eye(2)[self.choice]
            return self.observations

        def reset(self, seed=0):
            self.random = np.random.default_rng(seed)
            self.begin()
            return self.observe(), []

        def step(self, actions):
            if self.t == 0:
                self.choice = np.array(actions).reshape(-1)
            over, infos = self.t == 127, []
            self.rewards[:], self.terminals[:], self.truncations[:] = (
                over * (self.choice == self.cue),
                over,
                False,
            )
            self.t += 1
            if over:
                infos = [{"episode_return": float(self.rewards.mean())}]
                self.begin()
            return self.observe(), self.rewards, self.terminals, self.truncations, infos

        def close(self):
            pass

    return FarRewards


def train_ours(flags: list[str]):
    """The script, with `native` among the environments of Ocean."""
    sys.path.insert(0, str(ROOT))
    import pufferlib.ocean.environment

    import ppo_lstm_puffer as ppo

    pufferlib.ocean.environment.MAKE_FUNCTIONS["far_rewards"] = native()
    sys.exit(ppo.main(*ppo.parse_args(flags)))


def train_pufferl(seed: int, steps: int, shown: int, changes: str):
    """PuffeRL through its own API, in its own environment. Prints a JSON line per iteration."""
    sys.argv = sys.argv[:1]
    sys.path.insert(0, str(ROOT / "tests"))
    import environments  # noqa: F401
    import gymnasium as gym
    import pufferlib.emulation
    import pufferlib.models
    import pufferlib.pufferl
    import pufferlib.vector
    import torch

    def make(buf=None, seed=0):
        env = pufferlib.EpisodeStats(gym.make("FarReward-v0", shown=shown))
        return pufferlib.emulation.GymnasiumPufferEnv(env=env, buf=buf, seed=seed)

    torch.manual_seed(seed)  # its own seeding is commented out
    np.random.seed(seed)
    config = pufferlib.pufferl.load_config("default")["train"]
    config |= {
        "device": "cpu",
        "total_timesteps": steps,
        "seed": seed,
        "env": "far",
        "use_rnn": True,
    }
    config |= {
        "minibatch_size": 1024,
        "data_dir": tempfile.gettempdir(),
        "checkpoint_interval": 10**9,
    }
    config |= json.loads(changes)
    makes, copies = (native(), 1) if config.pop("native", False) else (make, 64)
    vecenv = pufferlib.vector.make(
        makes, backend=pufferlib.vector.Serial, num_envs=copies, seed=seed
    )
    policy = pufferlib.models.Default(vecenv.driver_env, hidden_size=32)
    policy = pufferlib.models.LSTMWrapper(vecenv.driver_env, policy, input_size=32, hidden_size=32)
    trainer = pufferlib.pufferl.PuffeRL(config, vecenv, policy)
    trainer.print_dashboard = lambda *args, **kwargs: None
    trainer.save_checkpoint = lambda *args, **kwargs: None
    while trainer.global_step < steps:
        trainer.stats.clear()
        returns = list(trainer.evaluate().get("episode_return", []))
        print(json.dumps({"step": trainer.global_step, "returns": returns}), flush=True)
        trainer.train()
    os._exit(0)


def curve(program: str, folder: pathlib.Path, output: str) -> list[tuple[int, float]]:
    """(steps, share of episodes since the last point whose first action was right), about every four iterations."""
    if program != "pufferl":
        (file,) = folder.glob("*/metrics.jsonl")
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        return [
            (row["step"], round(row["episodic_return"], 4))
            for row in rows
            if "episodic_return" in row
        ]
    rows = [json.loads(line) for line in output.splitlines() if line.startswith('{"step"')]
    groups = [rows[i : i + 4] for i in range(0, len(rows), 4)]
    points = [
        (group[-1]["step"], [value for row in group for value in row["returns"]])
        for group in groups
    ]
    return [(step, round(float(np.mean(values)), 4)) for step, values in points if values]


def run(setting: dict, seed: int) -> dict:
    """Runs a cell on one core, and returns what is stored of it."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests")}
    words = command(setting, seed)
    start = time.time()
    with tempfile.TemporaryDirectory() as folder:
        actual = [word.replace("DIR", folder) for word in words]
        actual[0] = sys.executable if actual[0] == "python" else str(ROOT / actual[0])
        result = subprocess.run(actual, cwd=ROOT, env=environment, capture_output=True, text=True)
        if result.returncode:
            sys.exit(f"{shlex.join(words)}\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
        points = curve(setting["program"], pathlib.Path(folder), result.stdout)
    return {"command": shlex.join(words), "seconds": round(time.time() - start, 1), "curve": points}


# The report -----------------------------------------------------------------------------------------------------------


def final(points: list) -> float:
    """Share of right first actions over the last tenth of the steps."""
    return float(np.mean([value for step, value in points if step > 0.9 * points[-1][0]]))


def steps_to(points: list, level: float = 0.95) -> int | None:
    """Steps until three points in a row have at least this mean."""
    for i in range(2, len(points)):
        if np.mean([value for _, value in points[i - 2 : i + 1]]) >= level:
            return points[i][0]
    return None


def table(cells: dict) -> str:
    lines = [
        "| | seeds | right in the end, by seed | steps to 0.95, by seed |",
        "|---|---|---|---|",
    ]
    for name in SETTINGS:
        runs = [cell for cell in cells.values() if cell["setting"] == name]
        if runs:
            runs.sort(key=lambda cell: cell["seed"])
            seeds = ", ".join(str(cell["seed"]) for cell in runs)
            ends = ", ".join(f"{final(cell['curve']):.2f}" for cell in runs)
            reached = [steps_to(cell["curve"]) for cell in runs]
            reached = ", ".join(
                "no" if steps is None else f"{steps / 1000:.0f} k" for steps in reached
            )
            total = round(runs[0]["curve"][-1][0] / 10_000) * 10
            lines.append(f"| {name} ({total} k steps) | {seeds} | {ends} | {reached} |")
    return "\n".join(lines)


def report(out: pathlib.Path, cells: dict):
    """Writes credit.md: the table, between the text before and after its two marks if the file is there already."""
    path = out / "credit.md"
    begin, end = "<!-- table: benchmark/credit.py -->\n", "<!-- end of table -->\n"
    before, _, rest = (
        path.read_text().partition(begin)
        if path.exists()
        else ("# Credit over 128 steps\n\n", "", "")
    )
    after = rest.partition(end)[2]
    path.write_text(f"{before}{begin}\n{table(cells)}\n\n{end}{after}")


def main():
    if sys.argv[1:2] == ["--ours"]:
        return train_ours(sys.argv[2:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument("--out", type=pathlib.Path, help="where credit.json and credit.md go")
    parser.add_argument(
        "--quick", action="store_true", help="one seed, a third of the steps, in runs/credit-quick"
    )
    parser.add_argument(
        "--report", action="store_true", help="only make credit.md from credit.json"
    )
    parser.add_argument("--pufferl", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.pufferl:
        return train_pufferl(*map(int, args.pufferl[:3]), args.pufferl[3])
    out = args.out or ROOT / ("runs/credit-quick" if args.quick else "benchmark/reports/learning")
    out.mkdir(parents=True, exist_ok=True)
    file = out / "credit.json"
    cells = json.loads(file.read_text()) if file.exists() else {}
    for seed in [] if args.report else args.seeds[:1] if args.quick else args.seeds:
        for name, setting in SETTINGS.items():
            if args.quick:
                setting = setting | {"steps": setting["steps"] // 3}
            key = f"{name}, seed {seed}"
            done = cells.get(key, {}).get("command") == shlex.join(command(setting, seed))
            if args.only not in name or done:
                continue
            if setting["program"] == "pufferl" and not PEER.exists():
                print(f"{key}: left out, no .peers/pufferl (make benchmark-peers)", flush=True)
                continue
            cells[key] = {"setting": name, "seed": seed} | run(setting, seed)
            file.write_text(
                "{\n"
                + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in cells.items())
                + "\n}\n"
            )
            points = cells[key]["curve"]
            print(
                f"{key}: {final(points):.2f}, 0.95 at {steps_to(points)}, {cells[key]['seconds']:.0f} s",
                flush=True,
            )
    report(out, cells)


if __name__ == "__main__":
    main()
