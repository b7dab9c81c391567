"""Faults on purpose: runs, jobs and sweeps are killed at random moments, and the scripts are fed malformed input.

    python benchmark/faults.py kills                        # 209 kills, a quarter of an hour or more on one core
    python benchmark/faults.py kills --only ddp --count 40  # one kind: script, workers, ddp, sweep; up to 40 of it
    python benchmark/faults.py starts                       # 30 first starts, killed while they compile; under an hour
    python benchmark/faults.py inputs                       # 580 malformed inputs (malformed.py), some minutes
    python benchmark/faults.py soak --hours 1               # memory, threads, files and speed of one long run
    python benchmark/faults.py report                       # report.md and soak.png from what these left

Everything goes to benchmark/reports/faults (--out): a line of JSON per kill and per input, soak.json, report.md. What
is there already is not done again; the report includes notes.md, if there is one. Exit code 1: a loss or a violation.
Linux; py-spy, which reads the stacks, must be allowed to trace other processes (root is), else they are `unknown`.

Kills are chained: each start goes on where the last was killed, so that the survivor of one kill is the victim of the
next. The victim is stopped, its stack says what it was doing, then it gets its signal. What must hold afterwards is in
`Chain.settle`, `Chain.check` and each kind's `after`; what does not is a loss, and the next kill has a new folder.
"""

import argparse
import collections
import contextlib
import functools
import importlib.metadata
import io
import json
import os
import pathlib
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid

import psutil
from processes import MARK, ROOT, clean, left_behind

KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
PACKAGES = ("torch", "numpy", "pufferlib", "optuna", "hypothesis", "py-spy")


def facts() -> dict:
    """What the records after this one were made with."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True
        ).stdout.strip()

    changed = git("status", "--porcelain", "--", "ppo_lstm_puffer*.py", "protein_sweep.py")
    versions = {"python": sys.version.split()[0]} | {
        name: importlib.metadata.version(name) for name in PACKAGES
    }
    commit = git("rev-parse", "--short", "HEAD") + " with changes" * bool(changed)
    return {"kind": "facts", "commit": commit, "versions": versions}


def read_lines(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append_line(path: pathlib.Path, record: dict):
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def progress_bar():
    """Progress with the time left, on stderr. Refreshed by hand: a thread of its own would be in the way of forks."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(
        *columns, console=Console(stderr=True, soft_wrap=True, highlight=False), auto_refresh=False
    )


def wait_until(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(met)


# KILLS: what a process was doing --------------------------------------------------------------------------------------


def sections(script: str) -> list[tuple[int, str]]:
    """The parts of the script's `train` as (first line, name), by the comments that are its landmarks."""
    marks = {
        "def train(": "start",
        "            # ROLLOUT": "rollout",
        "            # UPDATE": "update",
    }
    marks |= {"            # LOGGING": "log", "        if step < total_steps": "end"}
    lines = (ROOT / script).read_text().splitlines()
    return [
        (n, name)
        for n, line in enumerate(lines, 1)
        for mark, name in marks.items()
        if line.startswith(mark)
    ]


def phase_of(frames: list[dict]) -> str:
    """What a stack (innermost frame first) is doing."""
    names = {
        frame["name"].rpartition(".")[2] for frame in frames
    }  # since Python 3.11 qualified names
    for name, phase in (
        ("_worker_process", "worker"),
        ("save_checkpoint", "checkpoint"),
        ("_invoke_run", "watch"),
    ):
        if name in names:
            return phase
    for frame in frames:
        script = os.path.basename(frame["filename"])
        if frame["name"] == "train" and script.startswith("ppo_lstm_puffer"):
            return [name for number, name in sections(script) if number <= frame["line"]][-1]
        if script == "protein_sweep.py" and frame["name"].endswith("run"):
            return "record" if names & {"write_best", "report"} else "watch"
    return "start"


def handles_signals(pid: int) -> bool:
    """Whether the process answers SIGTERM itself by now; until then SIGTERM is the system's, SIGINT is Python's."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return bool(int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16) & 1 << (TERM - 1))


def look(process: psutil.Process) -> tuple[str, bool]:
    """Stops a process and says what it is doing, and whether it handles signals by now."""
    process.suspend()
    py_spy = pathlib.Path(sys.executable).with_name("py-spy")
    words = [str(py_spy), "dump", "--nonblocking", "--json", "--pid", str(process.pid)]
    handles = handles_signals(process.pid)
    try:
        threads = json.loads(
            subprocess.run(words, capture_output=True, text=True, timeout=30).stdout
        )
        (main,) = [
            thread for thread in threads if thread["os_thread_id"] == process.pid
        ] or threads[-1:]
        return phase_of(main["frames"]), handles
    except (
        ValueError,
        KeyError,
        subprocess.TimeoutExpired,
    ):  # mostly an interpreter that is not up yet
        return "unknown", handles


# KILLS: the kinds -----------------------------------------------------------------------------------------------------

TINY = "--hidden-size 32 --precision float32 --no-compile --device cpu --log-interval 1 --checkpoint-interval 1"
SIZES = "--num-envs 64 --num-steps 16 --minibatch-size 256"


class Loss(Exception):
    """Something that must hold does not, and there is nothing more to be said of this kill."""


class Chain:
    """What is started, killed, and started again in the same folder, where it must go on. This one: the script."""

    script, launcher, arguments, iteration = (
        "ppo_lstm_puffer.py",
        "",
        f"--env-id cartpole {SIZES}",
        64 * 16,
    )
    victims, limit, grace = (
        ("script",),
        30.0,
        10.0,
    )  # seconds from the signal to the end, and until no process is left
    variables, new_group, pythons = (
        {},
        False,
        True,
    )  # pythons: SIGINT may have been Python's own to answer
    our_traceback = r"Traceback \(most recent call last\)"

    def __init__(self, work: pathlib.Path):
        self.work, self.process, self.starts, self.startup, self.step = work, None, 0, 5.0, 0
        work.mkdir(parents=True)

    def command(self) -> list[str]:
        words = f"{self.arguments} {TINY} --total-timesteps 1_000_000_000 --output-dir out".split()
        return [
            *self.launcher.split(),
            str(ROOT / self.script),
            *words,
            *(["--resume", "latest"] if self.step else []),
        ]

    def start(self):
        self.mark, self.starts, self.began = uuid.uuid4().hex, self.starts + 1, time.monotonic()
        self.output = self.work / f"output{self.starts}"
        environment = os.environ | {MARK: self.mark, "OMP_NUM_THREADS": "1"} | self.variables
        options = {
            "cwd": self.work,
            "stdin": subprocess.DEVNULL,
            "start_new_session": self.new_group,
        }
        with self.output.open("w") as file:
            words = [sys.executable, *self.command()]
            self.process = subprocess.Popen(
                words, env=environment, stdout=file, stderr=file, **options
            )

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def steps(self) -> list[list[int]]:
        """The steps logged since each time the script said where its run is; torchrun starts it again by itself."""
        parts = re.split(r"^run: .*$", self.text(), flags=re.MULTILINE)[1:]
        return [
            [int(step) for step in re.findall(r"^step=(\d+) ", part, re.MULTILINE)]
            for part in parts
        ]

    def over(self) -> bool:
        return self.process.poll() is not None

    def ready(self) -> bool:
        """Whether the first iteration is over."""
        return any(self.steps())

    def processes(self, target: str) -> list[psutil.Process]:
        return [psutil.Process(self.process.pid)]

    def choose(self, rng: random.Random) -> tuple[str, int]:
        return rng.choice(self.victims), rng.choice((KILL, TERM, INT))

    def fault(self, rng: random.Random, number: int) -> dict:
        """The kill of this number. Returns its record; `losses` lists what did not hold."""
        if self.process is None:
            self.start()
        target, signum = self.choose(rng)
        early, moment = rng.random() < 0.3, rng.random()
        record = {
            "target": target,
            "signal": signal.Signals(signum).name,
            "phase": "-",
            "losses": [],
        }
        try:
            victim, record["phase"], handles = self.stopped(target, early, moment)
            record["after_s"] = round(time.monotonic() - self.began, 2)
            before, sent = self.before(victim), time.monotonic()
            victim.send_signal(signum)
            with contextlib.suppress(psutil.Error):
                victim.resume()
            record |= self.after(target, signum, handles, before)
            record["seconds"] = round(time.monotonic() - sent, 2)
        except (Loss, psutil.Error, OSError, ValueError) as error:
            record["losses"].append(f"{type(error).__name__}: {clean(str(error))}")
        return record | ({"output": clean(self.text()[-3000:])} if record["losses"] else {})

    def stopped(self, target: str, early: bool, moment: float) -> tuple[psutil.Process, str, bool]:
        """The victim, stopped while it starts, or up to two seconds after the first iteration; and what `look` says."""
        if early and (pause := self.began + moment * self.startup - time.monotonic()) > 0:
            time.sleep(pause)
        else:
            if not wait_until(lambda: self.ready() or self.over(), 120):
                raise Loss("no first iteration within 120 s")
            self.startup = min(time.monotonic() - self.began, 2 * self.startup)
            time.sleep(2 * moment)
        for _ in range(5):  # a trial may end just now: then another one
            if not wait_until(lambda: self.over() or self.processes(target), 60):
                raise Loss(f"no {target} within 60 s")
            if self.over():
                raise Loss(f"ended by itself with exit code {self.process.returncode}")
            with contextlib.suppress(psutil.Error, OSError, IndexError):
                victim = self.processes(target)[-1]
                return victim, *look(victim)
        raise Loss(f"no {target} stays long enough")

    def before(self, victim: psutil.Process):
        """What `after` compares with, taken while the victim is stopped."""

    def after(self, target: str, signum: int, handles: bool, before) -> dict:
        """Waits for what must follow. Returns what else is recorded."""
        if handles and signum != KILL:
            return self.settle({128 + signum})
        return self.settle({-signum, 130} if signum == INT else {-signum})

    def settle(self, codes: set[int] | None) -> dict:
        """After the end: the exit code (None: any error), no process, no traceback, and what `check` says."""
        losses, process, self.process, sent = [], self.process, None, time.monotonic()
        if not wait_until(lambda: process.poll() is not None, self.limit):
            losses.append(f"still running {self.limit:.0f} s after the signal")
        code, end = process.poll(), time.monotonic()
        left = left_behind(self.mark, self.grace)
        process.wait()
        record, text = {"code": code, "seconds": round(end - sent, 2)}, self.text()
        record["gone_s"] = round(time.monotonic() - end, 2)
        early = (
            "Fatal Python error: init_" in text
        )  # Ctrl-C while the interpreter starts: no line of ours has run
        if code is not None and not early and (code == 0 if codes is None else code not in codes):
            losses.append(f"exit code {code}, not {' or '.join(map(str, codes or ['an error']))}")
        if left:
            losses.append(f"left running: {left}")
        if re.search(self.our_traceback, text):
            if (
                self.pythons
                and code in (-INT, 130, 1)
                and text.rstrip().endswith("KeyboardInterrupt")
            ):
                record["note"] = "Python's own KeyboardInterrupt, before the script handles signals"
            else:
                losses.append("a traceback")
        losses += self.check()
        return record | {"step": self.step, "losses": losses}

    def check(self) -> list[str]:
        """The newest checkpoint loads and is no older than the last one, and every start went on right from it."""
        import ppo_lstm_puffer as ppo

        losses, iteration, last, messages = [], self.iteration, self.step, io.StringIO()
        for number, steps in enumerate(self.steps()):
            # Restarted by torchrun, it goes on from the checkpoint of the last line, or from the one before it.
            first = (last + iteration, last) if number else (last + iteration,)
            if steps and (
                steps[0] not in first or steps != list(range(steps[0], steps[-1] + 1, iteration))
            ):
                losses.append(
                    f"went on at step {steps[0]} (lines to {steps[-1]}), the checkpoint was at {last}"
                )
            last = steps[-1] if steps else last
        if not list(
            self.work.glob("out/*/trainer_*.pt")
        ):  # killed before the first: the next start is a new one
            return [*losses, "no checkpoint"] if last > iteration else losses
        try:
            with contextlib.redirect_stderr(messages):
                state = ppo.load_checkpoint("latest", str(self.work / "out"))
        except ppo.UsageError as error:
            return [*losses, f"the checkpoint does not load: {clean(str(error))}"]
        if messages.getvalue():
            losses.append(f"a checkpoint was skipped: {clean(messages.getvalue())}")
        if not max(self.step, last - iteration) <= state["step"]:
            losses.append(
                f"the checkpoint is at step {state['step']}, after {self.step} before; {last} was logged"
            )
        rows = read_lines(pathlib.Path(state["folder"], "metrics.jsonl"))
        logged = [row["step"] for row in rows if "exit_reason" not in row]
        if (
            logged != list(range(iteration, iteration * len(logged) + 1, iteration))
            or len(rows) > len(logged) + 1
        ):
            losses.append(
                f"metrics.jsonl does not have every step once: {len(rows)} lines to {rows[-1]['step']}"
            )
        self.step = state["step"]
        return losses

    def end(self):
        if self.process:
            left_behind(self.mark, 0)
            self.process.wait()
            self.process = None


class Workers(Chain):
    """The script with two environment workers. They ignore SIGINT and SIGTERM, which are the parent's to answer."""

    arguments = (
        "--env-id CartPole-v1 --num-envs 16 --num-steps 8 --minibatch-size 64 --num-workers 2"
    )
    victims, iteration = ("script", "worker"), 16 * 8

    def processes(self, target: str) -> list[psutil.Process]:
        parent = psutil.Process(self.process.pid)
        return parent.children() if target == "worker" else [parent]

    def choose(self, rng: random.Random) -> tuple[str, int]:
        target, signum = super().choose(rng)
        return target, KILL if target == "worker" else signum

    def after(self, target: str, signum: int, handles: bool, before) -> dict:
        if target != "worker":
            return super().after(target, signum, handles, before)
        late = [] if wait_until(self.over, 10) else ["not ended within 10 s of its worker"]
        record = self.settle({1})
        last = (self.text().rstrip().splitlines() or [""])[-1]
        if not (last.startswith("error: ") and "worker" in last and last.endswith("-9")):
            late.append(f"the last line does not give the reason: {clean(last)}")
        return record | {"losses": late + record["losses"]}


class Ranks(Chain):
    """Two ranks under torchrun, which starts them again: after the kill of a rank the job must go on by itself. One of
    which a rank is asked to stop once it trains stays stopped; the next torchrun goes on with what it saved."""

    script = "ppo_lstm_puffer_ddp.py"
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 3"
    arguments = f"{Chain.arguments} --dist-timeout 60"
    victims, limit, struck = ("rank 0", "rank 1", "torchrun"), 60.0, None
    our_traceback = r'ppo_lstm_puffer_ddp\.py", line'  # torchrun has tracebacks of its own

    def choose(self, rng: random.Random) -> tuple[str, int]:
        target, signum = super().choose(rng)
        return (
            "torchrun" if self.struck == self.mark else target,
            signum,
        )  # a job that has restarted is the next to end

    def processes(self, target: str) -> list[psutil.Process]:
        job, found = psutil.Process(self.process.pid), []
        for process in job.children():
            with contextlib.suppress(psutil.Error):
                found += [process] if process.environ().get("RANK") == target[-1] else []
        return [job] if target == "torchrun" else found

    def before(self, victim: psutil.Process) -> int:
        return len(self.steps())

    def after(self, target: str, signum: int, handles: bool, before: int) -> dict:
        if target == "torchrun":
            return self.settle({-KILL} if signum == KILL else None)
        self.struck = self.mark
        if not wait_until(lambda: any(self.steps()[before:]) or self.over(), 150):
            raise Loss("the job neither went on nor ended within 150 s")
        if self.over() and signum == KILL:
            raise Loss(f"the job did not go on; torchrun's exit code: {self.process.poll()}")
        if self.over():
            return self.settle(None)
        return {}


class Sweep(Chain):
    """A sweep with two workers, and its trials, runs of the script. `step` is the number of complete trials."""

    victims, limit = ("sweep", "trial"), 60.0
    complete, known = {}, 0

    def command(self) -> list[str]:
        space = (
            "learning_rate: {distribution: log_normal, min: 0.001, max: 0.1}\ngamma: [0.9, 0.99]\n"
        )
        (self.work / "space.yaml").write_text(space)
        words = "--env-id cartpole --space space.yaml --workers 2 --num-trials 100000 --max-cost-seconds 60"
        words += f" -- {SIZES} {TINY} --total-timesteps 32768"
        return [str(ROOT / "protein_sweep.py"), "--script", str(ROOT / self.script), *words.split()]

    def trials(self) -> list:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        path = self.work / "sweeps/cartpole__ppo_lstm_puffer/study.db"
        try:
            return optuna.load_study(
                study_name=path.parent.name, storage=f"sqlite:///{path}"
            ).get_trials()
        except (
            Exception
        ) as error:  # SQLAlchemy's and Optuna's: there is no study yet, or it was spoilt
            if self.known:
                raise Loss(
                    f"the study does not load: {type(error).__name__}: {clean(str(error))[:300]}"
                ) from error
            return []

    def started(self) -> int:
        return sum("process" in trial.user_attrs for trial in self.trials())

    def ready(self) -> bool:
        """Whether a trial was started since this start of the sweep."""
        return bool(self.processes("trial")) and self.started() > self.known

    def processes(self, target: str) -> list[psutil.Process]:
        sweep, found = psutil.Process(self.process.pid), []
        for process in sweep.children():
            with contextlib.suppress(psutil.Error):
                found += (
                    [process] if re.search(r"trials/\d+/run", " ".join(process.cmdline())) else []
                )
        return found if target == "trial" else [sweep]

    def before(self, victim: psutil.Process) -> int:
        found = re.search(r"trials/(\d+)/run", " ".join(victim.cmdline()))
        return int(found[1]) if found else -1

    def after(self, target: str, signum: int, handles: bool, before: int) -> dict:
        if target == "sweep":
            return super().after(target, signum, handles, before)
        wait_until(lambda: self.trials()[before].state.is_finished(), 20)
        trial, losses = self.trials()[before], self.check()
        if not (
            trial.state.name == "COMPLETE"
            or (trial.state.name == "FAIL" and "failure" in trial.user_attrs)
        ):
            losses.append(f"trial {before} is {trial.state.name}, not a recorded failure")
        if self.over():
            raise Loss(f"the sweep ended with {self.process.returncode}")
        return {
            "trial": trial.user_attrs.get("failure", "complete")[-200:],
            "step": self.step,
            "losses": losses,
        }

    def check(self) -> list[str]:
        """The study loads, and of its complete trials none is lost or changed."""
        trials = self.trials()
        whole = [trial for trial in trials if trial.state.name == "COMPLETE"]
        done = {trial.number: (trial.value, trial.params, trial.user_attrs) for trial in whole}
        lost = [number for number, content in self.complete.items() if done.get(number) != content]
        self.known, self.complete, self.step = self.started(), done, len(done)
        return [f"complete trials lost or changed: {lost}"] if lost else []


class Start(Chain):
    """A first start with an empty compile cache: a signal to its group; a second one with that cache must train."""

    arguments = (
        "--num-envs 64 --num-steps 8 --minibatch-size 128 --hidden-size 32 --total-timesteps 20000 "
    )
    arguments += "--precision float32 --output-dir out"
    limit, grace, new_group, longest = 3.0, 3.0, True, 900.0
    cold = 0.0  # seconds that a first start takes to its first line

    def command(self) -> list[str]:
        return [str(ROOT / self.script), *self.arguments.split()]

    def first(self, moment: float):
        """Starts with an empty cache. Returns at the moment or the first line, whichever is sooner."""
        self.variables = {"TORCHINDUCTOR_CACHE_DIR": str(self.work / f"cache{self.starts}")}
        self.start()
        wait_until(lambda: self.ready() or self.over(), moment)
        if self.over():
            raise Loss(f"ended by itself with exit code {self.process.returncode}")

    def fault(self, rng: random.Random, number: int) -> dict:
        self.signum = (INT, TERM, KILL)[number % 3]
        record, text = (
            {"target": "group", "signal": self.signum.name, "phase": "-", "losses": []},
            "",
        )
        try:
            if not self.cold:
                self.first(self.longest)
                Start.cold = time.monotonic() - self.began
                self.end()
            # A quarter while it imports; the others anywhere up to just after the first line, most while it compiles.
            self.first(rng.uniform(0.2, 5 if rng.random() < 0.25 else 1.1 * self.cold))
            time.sleep(0.5 * rng.random() * self.ready())
            said = re.search("^(compiling|run: )", self.text(), re.MULTILINE)
            record["phase"] = "training" if self.ready() else "compiling" if said else "starting"
            record["after_s"] = round(time.monotonic() - self.began, 2)
            self.pythons = not handles_signals(self.process.pid)
            os.killpg(self.process.pid, self.signum)
            codes = {128 + self.signum, -self.signum} if self.pythons else {128 + self.signum}
            codes = (
                {-KILL}
                if self.signum == KILL
                else codes | {1}
                if self.pythons and self.signum == INT
                else codes
            )
            record |= self.settle(codes)
            text = self.text()
            record["next_s"], losses = self.again()
            record["losses"] += losses
        except (Loss, OSError) as error:
            record["losses"].append(clean(str(error)))
        return record | ({"output": clean(text[-3000:])} if record["losses"] else {})

    def check(self) -> list[str]:
        """Ctrl-C is answered by one line."""
        lines = re.findall("^(?:ended while starting|stopping: ).*$", self.text(), re.MULTILINE)
        wrong = self.signum == INT and not self.pythons and len(lines) != 1
        return [f"{len(lines)} lines about Ctrl-C"] * wrong

    def again(self) -> tuple[float, list[str]]:
        """The next start, with the same cache: its seconds, and what did not hold."""
        self.start()
        wait_until(self.over, self.longest)
        code, lines, last = (
            self.process.poll(),
            sum(map(len, self.steps())),
            self.text().strip().rpartition("\n")[2],
        )
        self.end()
        right = code == 0 and lines >= 2
        wrong = (
            []
            if right
            else [f"the next start: exit code {code}, {lines} lines logged: {clean(last)}"]
        )
        return round(time.monotonic() - self.began, 2), wrong


CAMPAIGNS = {
    "kills": {
        "script": (Chain, 112),
        "workers": (Workers, 35),
        "ddp": (Ranks, 31),
        "sweep": (Sweep, 31),
    },
    "starts": {"script": (Start, 30)},
}


def kills(args) -> list[dict]:
    """Goes on up to the number of kills of each kind. Returns the new records."""
    file, made, kinds = args.out / f"{args.what}.jsonl", [], CAMPAIGNS[args.what]
    wanted = {
        kind: args.count or count for kind, (_, count) in kinds.items() if args.only in (None, kind)
    }
    done = collections.Counter(record["kind"] for record in read_lines(file))
    append_line(file, facts())
    with progress_bar() as bar, contextlib.ExitStack() as last:
        for kind, count in wanted.items():
            task, chain = bar.add_task(kind, total=count, completed=min(count, done[kind])), None
            for number in range(done[kind], count):
                if chain is None:
                    chain = kinds[kind][0](args.work / f"{kind}{number}")
                    last.callback(chain.end)  # after Ctrl-C too
                rng = random.Random(f"{args.seed} {kind} {number}")
                record = {"kind": kind, "n": number} | chain.fault(rng, number)
                append_line(file, record)
                made.append(record)
                keys = ("target", "signal", "phase", "code", "seconds", "step")
                words = " ".join(str(record.get(key, "-")) for key in keys)
                bar.console.print(
                    f"{kind} {number + 1}/{count}: {words} {record['losses'] or ''}", markup=False
                )
                bar.update(task, advance=1, refresh=True)
                if record["losses"]:  # its folder stays as it is, to be looked at
                    chain.end()
                    chain = None
            last.close()
    return made


def inputs(args) -> list[dict]:
    """Goes on through the examples of each kind. Returns the new records."""
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }  # before the imports: what forks has one thread
    import malformed

    base, file, made = malformed.make_base(args.work / "base"), args.out / "inputs.jsonl", []
    done = collections.Counter(record["kind"] for record in read_lines(file))
    append_line(file, facts())
    with progress_bar() as bar:
        for kind, examples in malformed.drawn_inputs(args.only).items():
            examples = examples[: args.count]
            task = bar.add_task(kind, total=len(examples), completed=min(done[kind], len(examples)))
            for number, example in list(enumerate(examples))[done[kind] :]:
                folder = args.work / f"{kind}{number}"
                record = {"kind": kind, "n": number} | malformed.give(kind, example, folder, base)
                append_line(file, record)
                made.append(record)
                if record["violation"]:
                    bar.console.print(
                        f"{kind} {number}: {record['violation']}: {record['input'][:150]}",
                        markup=False,
                    )
                bar.update(task, advance=1, refresh=number % 10 == 0)
    return made


# SOAK -----------------------------------------------------------------------------------------------------------------


def machine_speed() -> float:
    """Fixed pieces of work (a product, a pass over memory) per second of the processor: how fast the machine is now.

    On a shared machine the same instructions take longer while neighbours are busy, by the processor's clock too.
    """
    import numpy as np

    matrix, vector = np.ones((384, 384), np.float32), np.ones(1 << 20, np.float32)
    start = time.process_time()
    for _ in range(10):
        matrix @ matrix, np.tanh(vector)
    return 10 / (time.process_time() - start)


def soak(args):
    """One run of Breakout with everything at its default, watched from outside."""
    os.environ["OMP_NUM_THREADS"] = "1"  # the run's, and here numpy's: not imported yet
    words = f"{ROOT / 'ppo_lstm_puffer.py'} --total-timesteps 1_000_000_000_000 --output-dir soak"
    command = [sys.executable, *words.split()]
    samples, seconds, step = [], 3600 * args.hours, 0
    with (args.work / "soak.log").open("w") as log, progress_bar() as bar:
        process = subprocess.Popen(command, cwd=args.work, stdout=log, stderr=log)
        task, start = bar.add_task("soak", total=int(seconds)), time.monotonic()
        try:
            while (now := time.monotonic() - start) < seconds and process.poll() is None:
                one = psutil.Process(process.pid)
                for logged in re.findall(
                    r"^step=(\d+) ", (args.work / "soak.log").read_text(), re.MULTILINE
                )[-1:]:
                    step = int(logged)
                cpu = sum(one.cpu_times()[:2])
                memory = round(one.memory_info().rss / 2**20, 2)
                samples.append(
                    [
                        round(now, 1),
                        memory,
                        one.num_threads(),
                        one.num_fds(),
                        step,
                        cpu,
                        machine_speed(),
                    ]
                )
                bar.update(task, completed=int(now), refresh=True)
                time.sleep(min(10.0, seconds / 30))
        finally:
            process.terminate()
            code = process.wait(300)  # a step is finished first
    # By seconds of the processor: another program on the same core must not look like a drift of this. Relative to the
    # fixed work: nor must one on the core beside it.
    every = max(1, len(samples) // 60)
    speed = []
    for part in (samples[i : i + every + 1] for i in range(0, len(samples) - every, every)):
        first, last = part[0], part[-1]
        if last[4] > first[4] and last[5] > first[5]:
            fixed = statistics.mean(sample[6] for sample in part)
            speed.append(
                [first[0], round((last[4] - first[4]) / (last[5] - first[5])), round(fixed, 3)]
            )
    content = facts() | {
        "hours": args.hours,
        "code": code,
        "steps": samples[-1][4],
        "samples": samples,
        "speed": speed,
    }
    (args.out / "soak.json").write_text(json.dumps(content) + "\n")
    print("\n".join(soak_lines(content)))


def soak_lines(content: dict) -> list[str]:
    """The verdict, on all but the first sixth of the time (compilation, first allocations)."""
    import numpy as np
    import scipy.stats

    samples, speed = (np.array(content[name], float) for name in ("samples", "speed"))
    samples, speed = (points[points[:, 0] >= points[-1, 0] / 6] for points in (samples, speed))
    slope = 3600 * np.polyfit(samples[:, 0], samples[:, 1], 1)[0]

    def drift(values) -> str:
        """The slope of a straight line, and its standard error, as if points were independent."""
        line = scipy.stats.linregress(speed[:, 0] / 3600, 100 * values / values.mean())
        return f"{line.slope:+.1f} ± {line.stderr:.1f} % per hour"

    threads, files = (f"{column.min():.0f} to {column.max():.0f}" for column in samples.T[2:4])
    how = f"{content['steps'] / 1e6:.1f} M steps, ended by SIGTERM with exit code {content['code']}"
    memory = f"{samples[0, 1]:.1f} MiB at first, {samples[-1, 1]:.1f} at last, {samples[:, 1].max():.1f} at most"
    return [
        f"Breakout for {60 * content['hours']:.0f} minutes, {how}. After the first sixth of the time:",
        "",
        f"- memory: {memory}; slope {slope:+.2f} MiB per hour",
        f"- speed: {speed[:, 1].mean():,.0f} steps per second of the processor; slope {drift(speed[:, 1])} (standard "
        f"error). That of a fixed piece of work done beside it, {drift(speed[:, 2])}; of the one relative to the "
        f"other, {drift(speed[:, 1] / speed[:, 2])}",
        f"- threads: {threads}; open files: {files}",
    ]


def soak_figure(content: dict, path: pathlib.Path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    samples, speed = np.array(content["samples"], float), np.array(content["speed"], float)
    figure, axes = plt.subplots(3, 1, figsize=(7, 5), sharex=True, layout="constrained")
    axes[0].plot(samples[:, 0] / 60, samples[:, 1], color="#0072B2")
    for column, name, color in ((2, "threads", "#0072B2"), (3, "open files", "#D55E00")):
        axes[1].plot(samples[:, 0] / 60, samples[:, column], color=color, label=name)
    axes[2].plot(speed[:, 0] / 60, speed[:, 1] / 1000, color="#0072B2", lw=0.8, label="training")
    fixed = speed[:, 2] * speed[:, 1].mean() / speed[:, 2].mean()
    axes[2].plot(
        speed[:, 0] / 60,
        fixed / 1000,
        color="#D55E00",
        lw=0.8,
        label="a fixed piece of work, scaled",
    )
    axes[2].legend(frameon=False)
    axes[1].legend(frameon=False)
    for ax, label in zip(axes, ("memory, MiB", "", "1000 steps per CPU s")):
        ax.set(ylabel=label, ylim=(0, None))
    axes[2].set_xlabel("minutes")
    figure.savefig(path, dpi=120)
    plt.close(figure)


# REPORT ---------------------------------------------------------------------------------------------------------------


def table(header: list[str], rows: list[list]) -> list[str]:
    return [
        "| " + " | ".join(map(str, row)) + " |" for row in (header, ["---"] * len(header), *rows)
    ] + [""]


def of_kills(killed: list[dict], what: str = "kills") -> list[str]:
    losses = [record for record in killed if record["losses"]]
    lines = [f"## {what.capitalize()}", ""]
    lines += [
        f"`python benchmark/faults.py {what}`: {len(killed)} kills, losses: {len(losses)}.",
        "",
    ]
    rows = []
    for kind, target in dict.fromkeys((record["kind"], record["target"]) for record in killed):
        some = [record for record in killed if (record["kind"], record["target"]) == (kind, target)]
        signals = collections.Counter(record["signal"] for record in some)
        seconds = sorted(record["seconds"] for record in some if "seconds" in record) or [
            float("nan")
        ]
        row = [kind, target, signals["SIGKILL"], signals["SIGTERM"], signals["SIGINT"]]
        took = f"{seconds[len(seconds) // 2]:.1f}, {seconds[-1]:.1f}"
        rows.append([*row, took, sum(bool(one["losses"]) for one in some)])
    spread = "seconds until it had ended, or gone on: median, most"
    lines += table(["kind", "victim", "SIGKILL", "SIGTERM", "SIGINT", spread, "losses"], rows)
    phases = [
        phase
        for phase, _ in collections.Counter(record["phase"] for record in killed).most_common()
    ]
    hits = {}
    for kind in CAMPAIGNS[what]:
        hits[kind] = collections.Counter(
            record["phase"] for record in killed if record["kind"] == kind
        )
    lines += [f"What the victim was doing, by its {'stack' if what == 'kills' else 'output'}:", ""]
    lines += table(
        ["kind", *phases],
        [[kind, *(hit[phase] or "" for phase in phases)] for kind, hit in hits.items()],
    )
    unknown = "`unknown`: an interpreter that py-spy could not read, most of them not up yet; "
    unknown += "`end`: after the training loop."
    lines += [unknown, ""] if what == "kills" else []
    notes = collections.Counter(record["note"] for record in killed if "note" in record)
    lines += [f"{count} times: {note}." for note, count in notes.items()] + [""] * bool(notes)
    for record in losses:
        where = f"{record['kind']} {record['n']}, {record['signal']} to {record['target']} in {record['phase']}"
        lines.append(f"- loss: {where}: {'; '.join(record['losses'])}")
    return lines + [""] * bool(losses)


def of_inputs(given: list[dict]) -> list[str]:
    wrong = [record for record in given if record["violation"]]
    lines = ["## Malformed input", ""]
    lines += [
        f"`python benchmark/faults.py inputs`: {len(given)} inputs, violations: {len(wrong)}.",
        "",
    ]
    rows = []
    for kind in dict.fromkeys(record["kind"] for record in given):
        some = [record for record in given if record["kind"] == kind]
        codes = collections.Counter(record["code"] for record in some)
        others = ", ".join(
            f"{code}: {count}" for code, count in codes.items() if code not in (0, 1, 2)
        )
        violations = sum(bool(record["violation"]) for record in some)
        rows.append([kind, len(some), codes[2], codes[1], codes[0], others, violations])
    header = [
        "kind",
        "inputs",
        "refused (exit code 2)",
        "failed with a reason (1)",
        "ran (0)",
        "other exit codes",
    ]
    header.append("violations")
    lines += table(header, rows)
    for violation, count in collections.Counter(
        record["violation"] for record in wrong
    ).most_common():
        first = next(record for record in wrong if record["violation"] == violation)
        lines.append(
            f"- {count} times {violation}; the first: {first['kind']} {first['n']}: `{first['input'][:200]}`"
        )
    return lines + [""] * bool(wrong)


def report(args):
    """report.md, from whatever there is."""
    lines = [
        "# Faults on purpose",
        "",
        "Made by `benchmark/faults.py`, which says what must hold.",
        "",
    ]
    records = {
        name: read_lines(args.out / f"{name}.jsonl") for name in ("kills", "starts", "inputs")
    }
    made = [record for some in records.values() for record in some if record["kind"] == "facts"]
    starts = functools.partial(of_kills, what="starts")
    for name, section in (("kills", of_kills), ("starts", starts), ("inputs", of_inputs)):
        if some := [record for record in records[name] if record["kind"] != "facts"]:
            lines += section(some)
    if (args.out / "soak.json").exists():
        content = json.loads((args.out / "soak.json").read_text())
        made.append(content)
        soak_figure(content, args.out / "soak.png")
        lines += [
            "## Soak",
            "",
            f"`python benchmark/faults.py soak --hours {content['hours']:g}`: ",
            "",
            *soak_lines(content),
            "",
        ]
        lines += ["![memory, threads, open files and speed over time](soak.png)", ""]
    if (args.out / "notes.md").exists():
        lines += ["## What was found", "", (args.out / "notes.md").read_text().strip(), ""]
    commits = ", ".join(dict.fromkeys(record["commit"] for record in made))
    versions = dict.fromkeys(
        f"{name} {version}" for record in made for name, version in record["versions"].items()
    )
    lines += ["## Versions", "", f"Commit {commits}; {', '.join(versions)}."]
    (args.out / "report.md").write_text("\n".join(lines) + "\n")


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["kills", "starts", "inputs", "soak", "report"])
    parser.add_argument("--only", help="one kind of kills or of inputs")
    parser.add_argument("--count", type=int, help="how many of each kind there shall be")
    parser.add_argument(
        "--seed", type=int, default=1, help="of the kills: victims, signals, moments"
    )
    parser.add_argument("--hours", type=float, default=1.0, help="of the soak")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmark/reports/faults")
    parser.add_argument(
        "--work",
        type=pathlib.Path,
        help="where the runs are written, and stay; default: a temporary folder",
    )
    args = parser.parse_args(words)
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        if not args.work:  # no TemporaryDirectory: the end of a fork would remove it
            args.work = pathlib.Path(tempfile.mkdtemp(prefix="faults-"))
            stack.callback(shutil.rmtree, args.work, ignore_errors=True)
        args.work = args.work.resolve()
        args.work.mkdir(parents=True, exist_ok=True)
        sys.path.insert(0, str(ROOT))
        os.chdir(args.work)  # importing PufferLib leaves a link in the working folder
        made = {"kills": kills, "starts": kills, "inputs": inputs, "soak": soak, "report": report}[
            args.what
        ](args)
        os.chdir(ROOT)
    return 1 if any(record.get("losses") or record.get("violation") for record in made or []) else 0


if __name__ == "__main__":
    sys.exit(main())
