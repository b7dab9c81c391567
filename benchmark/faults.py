"""Faults on purpose: training is killed at random moments and must go on.

    python benchmark/faults.py script --count 20
    python benchmark/faults.py workers ddp
    python benchmark/faults.py first --count 10  # killed while they compile; a minute each

Kills are chained: each start goes on where the last one was killed. Afterwards

- the exit code is the signal's, there is no traceback, and no process is left;
- the checkpoint loads, and is at most an iteration older than the last line that was logged;
- this start went on at the checkpoint of the last one, and metrics.jsonl has every step once;
- a job of which a rank was killed goes on by itself.

A line of JSON is printed for every kill. What did not hold is in its "losses", and the next kill
has a new folder. Exit code 1: there were losses.
"""

import argparse
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM, Signals, default_int_handler, signal

import psutil
import torch

ROOT = Path(__file__).resolve().parent.parent
MARK = "FAULTS_MARK"  # an environment variable that all processes of a start have
ITERATION = 64 * 16
SIZES = "--num-envs 64 --num-steps 16 --minibatch-size 256 --hidden-size 32 --precision float32 "
SIZES += "--no-compile --device cpu --log-interval 1 --checkpoint-interval 1"
ANY = (SIGKILL, SIGTERM, SIGINT)
START_TIMEOUT = 300.0  # seconds until a start trains, or a job goes on
END_TIMEOUT = 60.0  # seconds from the signal to the end, ...
GRACE = 10.0  # ... and from then until no process is left


def wait_until(condition: Callable[[], bool], seconds: float = START_TIMEOUT) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def with_mark(mark: str) -> list[psutil.Process]:
    """The processes of a start that are still there."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and process.environ().get(MARK) == mark:
                found.append(process)
    return found


class Script:
    """The script in a folder, where each start goes on."""

    launcher = ""
    script = "ppo_lstm_puffer.py"
    words = f"--env-id cartpole {SIZES}"
    environment = {}  # noqa: RUF012
    victims = (("script", ANY),)  # and the signals that they get
    traceback = r"Traceback \(most recent call last\)"  # one of ours

    def __init__(self, work: Path):
        work.mkdir(parents=True)
        self.work = work
        self.starts = 0
        self.startup = 5.0  # seconds until it trains, as the last start had it
        self.step = 0  # of the newest checkpoint

    def command(self) -> list[str]:
        resume = "--resume latest" if self.step else ""
        words = f"{self.words} --total-timesteps 1_000_000_000 --output-dir out {resume}"
        return [*self.launcher.split(), str(ROOT / self.script), *words.split()]

    def start(self):
        self.mark = uuid.uuid4().hex
        self.starts += 1
        self.began = time.time()
        self.output = self.work / f"output{self.starts}"
        env = os.environ | {MARK: self.mark, "OMP_NUM_THREADS": "1"} | self.environment
        options = {"cwd": self.work, "env": env, "start_new_session": True}
        with self.output.open("w") as file:
            options |= {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
            self.process = subprocess.Popen([sys.executable, *self.command()], **options)

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def parts(self) -> list[str]:
        """What it says after each `run: ` and has steps; torchrun starts its ranks again itself."""
        parts = re.split(r"^run: .*$", self.text(), flags=re.MULTILINE)[1:]
        return [part for part in parts if "\nstep=" in part]

    def over(self) -> bool:
        return self.process.poll() is not None

    def processes(self, target: str) -> list[psutil.Process]:
        return [psutil.Process(self.process.pid)]

    def fault(self, rng: random.Random) -> dict:
        return self.start_and_kill(rng, early=rng.random() < 0.3)

    def start_and_kill(self, rng: random.Random, early: bool) -> dict:
        """early: while it starts; else while it trains."""
        target, signals = rng.choice(self.victims)
        signum = rng.choice(signals)
        record = {"target": target, "signal": Signals(signum).name}
        self.start()
        try:
            if early:
                time.sleep(rng.random() * self.startup)
            else:
                wait_until(lambda: self.parts() or self.over())
                self.startup = time.time() - self.began
                time.sleep(2.0 * rng.random())
            wait_until(lambda: self.over() or bool(self.processes(target)))
            self.trained = len(self.parts())
            record["trains"] = self.trained > 0
            record["after"] = round(time.time() - self.began, 1)
            sent = time.monotonic()
            self.processes(target)[-1].send_signal(signum)
            losses = self.after(target, signum, early=not record["trains"])
            record["seconds"] = round(time.monotonic() - sent, 2)
            losses += self.check()
        except (psutil.Error, IndexError) as error:
            losses = [f"no {target} to kill: {error!r}"]
        finally:
            for process in with_mark(self.mark):
                with contextlib.suppress(psutil.Error):
                    process.kill()
            self.process.wait()
        record |= {"code": self.process.returncode, "step": self.step, "losses": losses}
        return record | ({"output": self.text()[-3000:]} if losses else {})

    def after(self, target: str, signum: int, early: bool) -> list[str]:
        """Waits for what must follow a kill. Returns what does not. early: before it trained."""
        if signum == SIGKILL:
            return self.settle({-SIGKILL}, early)
        # Before the script is read Python answers: by the signal, Ctrl-C by an exception.
        return self.settle({128 + signum, -signum, 1} if early else {128 + signum}, early)

    def settle(self, codes: set[int], early: bool = False) -> list[str]:
        losses = []
        if not wait_until(self.over, END_TIMEOUT):
            losses.append(f"still running {END_TIMEOUT:.0f} s after the signal")
        elif self.process.returncode not in codes:
            losses.append(f"exit code {self.process.returncode}")
        if not wait_until(lambda: not with_mark(self.mark), GRACE):
            losses.append(f"left running: {with_mark(self.mark)}")
        interrupted = early and "KeyboardInterrupt" in self.text()
        if re.search(self.traceback, self.text()) and not interrupted:
            losses.append("a traceback")
        return losses

    def check(self) -> list[str]:
        """What does not hold of the folder. Reads the new checkpoint's step."""
        losses = []
        steps = [int(step) for step in re.findall(r"^step=(\d+) ", self.text(), re.MULTILINE)]
        last = steps[-1] if steps else self.step
        if steps and steps[0] != self.step + ITERATION:
            losses.append(f"went on at step {steps[0]}, the checkpoint was at {self.step}")
        files = list(self.work.glob("out/*/trainer_state.pt"))
        if not files:  # killed before the first: the next start is a new one
            return ["no checkpoint"] if last > ITERATION else []
        newest = max(files, key=os.path.getmtime)
        step = torch.load(newest)["step"]
        if step < max(self.step, last - ITERATION):
            losses.append(f"checkpoint at {step}, after {self.step}; {last} was logged")
        self.step = step
        rows = map(json.loads, (newest.parent / "metrics.jsonl").read_text().splitlines())
        logged = [row["step"] for row in rows if "exit_reason" not in row]
        if logged != [ITERATION * (i + 1) for i in range(len(logged))]:
            losses.append("metrics.jsonl does not have every step once")
        return losses


class First(Script):
    """A first start, which has everything to compile, and a second, which finds what that left."""

    words = Script.words.replace("--no-compile", "--compile")
    traceback = Script.traceback + "|compiling fails here"

    def fault(self, rng: random.Random) -> dict:
        cache = self.work / f"cache{self.starts}"  # of torch, and of what g++ makes for it
        cache.mkdir()
        self.environment = {"TMPDIR": str(cache)}
        self.startup = 25.0
        first = self.start_and_kill(rng, early=True)
        again = self.start_and_kill(rng, early=False)
        return again | {"first": first, "losses": first["losses"] + again["losses"]}


class Workers(Script):
    """With two environment workers, which leave signals to their parent."""

    words = f"--env-id CartPole-v1 {SIZES} --num-workers 2"
    victims = (("script", ANY), ("worker", (SIGKILL,)))

    def processes(self, target: str) -> list[psutil.Process]:
        parent = psutil.Process(self.process.pid)
        return parent.children() if target == "worker" else [parent]

    def after(self, target: str, signum: int, early: bool) -> list[str]:
        if target == "script":
            return super().after(target, signum, early)
        losses = self.settle({1})
        said = re.search(r"^error: .*worker", self.text(), re.MULTILINE)
        return losses if said else [*losses, "no line that gives the reason"]


class Ranks(Script):
    """Two ranks under torchrun."""

    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 9"
    script = "ppo_lstm_puffer_ddp.py"
    words = f"--env-id cartpole {SIZES} --dist-timeout 60"
    victims = (("rank 0", (SIGKILL,)), ("rank 1", (SIGKILL,)), ("torchrun", ANY))
    traceback = r'ppo_lstm_puffer_ddp\.py", line'  # torchrun has tracebacks of its own

    def processes(self, target: str) -> list[psutil.Process]:
        job = psutil.Process(self.process.pid)
        if target == "torchrun":
            return [job]
        return [one for one in job.children() if one.environ().get("RANK") == target[-1]]

    def after(self, target: str, signum: int, early: bool) -> list[str]:
        if target == "torchrun":
            errors = set(range(-64, 256)) - {0}
            return self.settle({-SIGKILL} if signum == SIGKILL else errors, early)
        wait_until(lambda: len(self.parts()) > self.trained or self.over())
        if len(self.parts()) == self.trained:
            return [f"the job did not go on; torchrun's exit code: {self.process.poll()}"]
        self.process.kill()
        return self.settle({-SIGKILL})


KINDS = {"script": Script, "first": First, "workers": Workers, "ddp": Ranks}


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("kinds", nargs="+", choices=KINDS)
    parser.add_argument("--count", type=int, default=10, help="kills of each kind; of first, pairs")
    parser.add_argument("--seed", type=int, default=1, help="of victims, signals and moments")
    args = parser.parse_args()
    signal(SIGINT, default_int_handler)  # started with &, it would be ignored, by children too
    failed = 0
    with tempfile.TemporaryDirectory(prefix="faults-") as work:
        for kind in args.kinds:
            chain = None
            for number in range(args.count):
                chain = chain or KINDS[kind](Path(work, f"{kind}{number}"))
                record = chain.fault(random.Random(f"{args.seed} {kind} {number}"))
                print(json.dumps({"kind": kind, "n": number} | record), flush=True)
                if record["losses"]:
                    failed += 1
                    chain = None
    print(f"{len(args.kinds) * args.count} kills, losses: {failed}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
