"""Faults on purpose: runs, jobs and sweeps are killed at random moments, and must go on.

    python benchmark/faults.py script --count 20    # or workers, ddp, sweep: kills and resumes
    python benchmark/faults.py starts --count 10    # first starts, killed while they compile

Kills are chained: each start goes on where the last was killed, so that the survivor of one kill is
the victim of the next. What must hold then is in `Chain.settle`, `Chain.check` and each kind's
`after`; what does not is a loss, and the next kill has a new folder. A line of JSON per kill is
printed. Exit code 1: a loss.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil
import torch

ROOT = Path(__file__).resolve().parent.parent
MARK = "FAULTS_MARK"  # an environment variable that all processes of a start have
KILL = signal.SIGKILL
ANY = (KILL, signal.SIGTERM, signal.SIGINT)
SIZES = "--num-envs 64 --num-steps 16 --minibatch-size 256 --hidden-size 32 --precision float32 "
SIZES += "--no-compile --device cpu --log-interval 1 --checkpoint-interval 1"
LONGEST = 900.0  # seconds for anything


class Loss(Exception):
    """Something that must hold does not, and there is nothing more to be said of this kill."""


def wait_until(condition, seconds: float = LONGEST) -> bool:
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(met)


def left_behind(mark: str, within: float) -> list[str]:
    """Processes with this mark that are still there after so many seconds. They are killed."""

    def find() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                alive = process.status() != psutil.STATUS_ZOMBIE
                found += [process] if alive and process.environ().get(MARK) == mark else []
        return found

    wait_until(lambda: not find(), within)
    found = find()
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return [str(process) for process in found]


def handles_signals(pid: int) -> bool:
    """Whether the process answers SIGTERM itself by now."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16) & 1 << (signal.SIGTERM - 1))


class Chain:
    """Started, killed, and started again in the same folder, where it must go on: the script."""

    words = f"ppo_lstm_puffer.py --env-id cartpole {SIZES}"
    iteration = 64 * 16
    victims = (("script", ANY),)  # and their signals
    limit = 30.0  # seconds from the signal to the end
    grace = 10.0  # and from then until no process is left
    trace = r"Traceback \(most recent call last\)"  # of ours
    process = None

    def __init__(self, work: Path):
        self.work = work
        self.starts = 0
        self.startup = 5.0  # seconds to the first iteration
        self.step = 0  # of the newest checkpoint
        work.mkdir(parents=True)

    def command(self) -> list[str]:
        words = f"{self.words} --total-timesteps 1_000_000_000 --output-dir out"
        return words.split() + (["--resume", "latest"] if self.step else [])

    def start(self, **variables):
        self.mark = uuid.uuid4().hex
        self.starts += 1
        self.began = time.time()
        self.output = self.work / f"output{self.starts}"
        paths = [str(ROOT / word) if (ROOT / word).is_file() else word for word in self.command()]
        env = os.environ | {MARK: self.mark, "OMP_NUM_THREADS": "1"} | variables
        with self.output.open("w") as file:
            options = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file, "env": env}
            command = [sys.executable, *paths]
            self.process = subprocess.Popen(
                command, cwd=self.work, start_new_session=True, **options
            )

    def end(self):
        if self.process:
            left_behind(self.mark, 0)
            self.process.wait()
            self.process = None

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def steps(self) -> list[list[int]]:
        """The steps logged since each `run: `; torchrun starts its ranks again by itself."""
        parts = re.split(r"^run: .*$", self.text(), flags=re.MULTILINE)[1:]
        return [[int(step) for step in re.findall(r"^step=(\d+) ", part, re.M)] for part in parts]

    def over(self) -> bool:
        return self.process.poll() is not None

    def ready(self) -> bool:
        """Whether the first iteration is over."""
        return any(self.steps())

    def processes(self, target: str) -> list[psutil.Process]:
        return [psutil.Process(self.process.pid)]

    def fault(self, rng: random.Random) -> dict:
        """A kill, while it starts or within two seconds of training. `losses` did not hold."""
        if self.process is None:
            self.start()
        target, signals = rng.choice(self.victims)
        signum = rng.choice(signals)
        record = {"target": target, "signal": signal.Signals(signum).name, "losses": []}
        try:
            if rng.random() < 0.3:
                time.sleep(max(0, self.began + rng.random() * self.startup - time.time()))
            else:
                wait_until(lambda: self.ready() or self.over())
                self.startup = time.time() - self.began
                time.sleep(2 * rng.random())
            wait_until(lambda: self.over() or self.processes(target))
            if self.over():
                raise Loss(f"ended by itself with exit code {self.process.returncode}")
            victim = self.processes(target)[-1]
            victim.suspend()
            handles = handles_signals(victim.pid)
            record["ready"] = self.ready()
            self.runs = len(self.steps())
            sent = time.monotonic()
            victim.send_signal(signum)
            with contextlib.suppress(psutil.Error):
                victim.resume()
            record |= self.after(target, signum, handles)
            record["seconds"] = round(time.monotonic() - sent, 2)
        except (Loss, psutil.Error, OSError, IndexError) as error:
            record["losses"] = [*record["losses"], f"{type(error).__name__}: {error}"]
        return record | ({"output": self.text()[-3000:]} if record["losses"] else {})

    def after(self, target: str, signum: int, handles: bool) -> dict:
        """Waits for what must follow. Returns what else is recorded."""
        saves = handles and signum != KILL
        return self.settle(128 + signum if saves else -signum, early=not handles)

    def settle(self, expected: int | None, early: bool = False) -> dict:
        """After the end: the exit code (None: any error), no process, no traceback, `check`."""
        losses = []
        process = self.process
        self.process = None
        if not wait_until(lambda: process.poll() is not None, self.limit):
            losses.append(f"still running {self.limit:.0f} s after the signal")
        code = process.poll()
        left = left_behind(self.mark, self.grace)
        process.wait()
        # Python's own answer to Ctrl-C, before a line of ours has run or while it imports.
        pythons = early and "KeyboardInterrupt" in self.text() and code in (-2, 1, 130)
        right = code not in (0, None) if expected is None else code == expected
        if not right and not pythons:
            losses.append(f"exit code {code}, not {expected or 'an error'}")
        if left:
            losses.append(f"left running: {left}")
        if re.search(self.trace, self.text()) and not pythons:
            losses.append("a traceback")
        losses += self.check()
        return {"code": code, "step": self.step, "losses": losses}

    def check(self) -> list[str]:
        """The checkpoint loads and is the newest, and every start went on right from the last."""
        losses = []
        last = self.step
        for steps in self.steps():
            # After a restart by torchrun the last line may come again: it was not yet saved.
            if steps and steps[0] not in (last, last + self.iteration):
                losses.append(f"went on at step {steps[0]}, the checkpoint was at {last}")
            last = steps[-1] if steps else last
        files = list(self.work.glob("out/*/trainer_state.pt"))
        if not files:  # killed before the first: the next start is a new one
            return [*losses, "no checkpoint"] if last > self.iteration else losses
        newest = max(files, key=os.path.getmtime)
        state = torch.load(newest)
        if state["step"] < max(self.step, last - self.iteration):
            losses.append(f"checkpoint at {state['step']}, after {self.step}; {last} was logged")
        self.step = state["step"]
        rows = map(json.loads, (newest.parent / "metrics.jsonl").read_text().splitlines())
        logged = [row["step"] for row in rows if "exit_reason" not in row]
        if logged != [self.iteration * (i + 1) for i in range(len(logged))]:
            losses.append("metrics.jsonl does not have every step once")
        return losses


class Workers(Chain):
    """The script with two environment workers, which leave signals to their parent."""

    words = f"ppo_lstm_puffer.py --env-id CartPole-v1 {SIZES} --num-workers 2"
    victims = (("script", ANY), ("worker", (KILL,)))

    def processes(self, target: str) -> list[psutil.Process]:
        parent = psutil.Process(self.process.pid)
        return parent.children() if target == "worker" else [parent]

    def after(self, target: str, signum: int, handles: bool) -> dict:
        if target != "worker":
            return super().after(target, signum, handles)
        record = self.settle(1)
        if not re.search(r"^error: .*worker", self.text(), re.M):
            record["losses"].append("no line that gives the reason")
        return record


class Ranks(Chain):
    """Two ranks under torchrun: after the kill of a rank the job goes on by itself."""

    words = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 100 "
    words += f"ppo_lstm_puffer_ddp.py --env-id cartpole {SIZES} --dist-timeout 60"
    victims = (("rank 0", (KILL,)), ("rank 1", (KILL,)), ("torchrun", ANY))
    limit = 60.0
    trace = r'ppo_lstm_puffer_ddp\.py", line'  # torchrun has tracebacks of its own

    def processes(self, target: str) -> list[psutil.Process]:
        job = psutil.Process(self.process.pid)
        ranks = [one for one in job.children() if one.environ().get("RANK") == target[-1]]
        return [job] if target == "torchrun" else ranks

    def after(self, target: str, signum: int, handles: bool) -> dict:
        if target == "torchrun":
            return self.settle(-KILL if signum == KILL else None, early=True)
        wait_until(lambda: any(self.steps()[self.runs :]) or self.over())
        if self.over() or not any(self.steps()[self.runs :]):
            raise Loss(f"the job did not go on; torchrun's exit code: {self.process.poll()}")
        return {}


class Sweep(Chain):
    """A sweep with two workers. `step` is the number of complete trials."""

    victims = (("sweep", ANY),)
    limit = 60.0
    complete = ()  # their numbers and values

    def command(self) -> list[str]:
        (self.work / "space.yaml").write_text("gamma: [0.9, 0.99]\nmomentum: [0.8, 0.9]\n")
        words = "protein_sweep.py --script ppo_lstm_puffer.py --env-id cartpole --workers 2 "
        words += "--space space.yaml --num-trials 100000 --max-cost-seconds 60"
        return f"{words} -- {SIZES} --total-timesteps 32768".split()

    def ready(self) -> bool:
        """Whether a trial has logged since this start."""
        paths = self.work.glob("sweeps/**/metrics.jsonl")
        return any(path.stat().st_mtime > self.began for path in paths)

    def check(self) -> list[str]:
        """The study loads, and of its complete trials none is lost or changed."""
        import optuna

        trials = []
        for path in self.work.glob("sweeps/*/study.db"):
            study = optuna.load_study(study_name=None, storage=f"sqlite:///{path}")
            trials = study.get_trials(states=[optuna.trial.TrialState.COMPLETE])
        done = [(trial.number, trial.value) for trial in trials]
        lost = set(self.complete) - set(done)
        self.complete = done
        self.step = len(done)
        return [f"complete trials lost or changed: {lost}"] if lost else []


class Starts(Chain):
    """A first start with an empty compile cache, its group killed; the next one must train."""

    words = "ppo_lstm_puffer.py --num-envs 64 --num-steps 8 --minibatch-size 128 --hidden-size 32 "
    words += "--precision float32 --total-timesteps 20000 --output-dir out"
    cold = 30.0  # seconds that a first start compiles: as the last one did

    def command(self) -> list[str]:
        return self.words.split()

    def fault(self, rng: random.Random) -> dict:
        record = {"target": "group", "signal": "SIGKILL", "losses": []}
        folder = self.work / f"cache{self.starts}"
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(folder)}

        def half_written() -> bool:
            with contextlib.suppress(OSError):
                return any(path.stat().st_size == 0 for path in folder.glob("*/*.so*"))

        self.start(**cache)
        wait_until(lambda: "compiling" in self.text() or self.over())
        record["after_s"] = round(rng.random() * Starts.cold, 2)
        wait_until(self.ready, record["after_s"])
        if rng.random() < 0.5:  # in the moment when a library is being written
            wait_until(lambda: self.ready() or half_written())
        record["ready"] = self.ready()
        os.killpg(self.process.pid, KILL)
        self.process.wait()
        record["losses"] += left_behind(self.mark, 5)
        self.start(**cache)
        wait_until(lambda: "compiling" in self.text() or self.over())
        compiling = time.time()
        wait_until(lambda: self.ready() or self.over())
        Starts.cold = time.time() - compiling
        wait_until(self.over)
        record["code"] = self.process.poll()
        record["seconds"] = round(time.time() - self.began, 2)
        if record["code"] != 0 or not self.ready() or "warning" in self.text():
            record["losses"].append(f"the next start: {self.text()[-3000:]}")
        self.end()
        return record


KINDS = {"script": Chain, "workers": Workers, "ddp": Ranks, "sweep": Sweep, "starts": Starts}


def main(words: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("kinds", nargs="+", choices=KINDS)
    parser.add_argument("--count", type=int, default=10, help="of each kind")
    parser.add_argument("--seed", type=int, default=1, help="of victims, signals and moments")
    args = parser.parse_args(words)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="faults-") as work, contextlib.ExitStack() as last:
        for kind in args.kinds:
            chain = None
            for number in range(args.count):
                if chain is None:
                    chain = KINDS[kind](Path(work, f"{kind}{number}"))
                    last.callback(chain.end)  # after Ctrl-C too
                record = chain.fault(random.Random(f"{args.seed} {kind} {number}"))
                print(json.dumps({"kind": kind, "n": number} | record), flush=True)
                if record["losses"]:
                    failed += 1
                    chain.end()
                    chain = None
    print(f"{len(args.kinds) * args.count} kills, losses: {failed}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
