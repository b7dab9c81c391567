"""Malformed input for the script, drawn by Hypothesis: `python benchmark/faults.py inputs`.

Arguments, YAML files, and checkpoints with flipped bytes, cut off, or with a program inside: the same in every run.
Each is given to the script's `main` in a fork of this process, which has imported it, in a folder of its own.
Any error will do, but nothing may be lost: `judge` says what is a violation.
"""

import atexit
import contextlib
import copy
import dataclasses
import io
import os
import pathlib
import pickle
import resource
import shutil
import signal
import sys
import time
import traceback
import uuid

import hypothesis
import psutil
import torch
import yaml
from hypothesis import strategies as st
from processes import MARK, ROOT, clean, left_behind

sys.path.insert(0, str(ROOT))

import ppo_lstm_puffer as ppo

EXECUTED = "executed"  # the file that code smuggled into an input would make
NUMBERS = "0 -0 -1 1 2 3 0.5 -1e-300 1e308 1e400 nan inf -inf 0x10 1_000 1e3 1,5 65536 2147483648 9223372036854775808"
WORDS = [
    *("", " ", "-", "--", "=", "-h", "true", "None", "~", "[]", "{", "a: b", "a\nb", "\x1b[31mred", "é", "💥", "\udcff"),
    *("$(touch executed)", "; touch executed", "!!python/object/apply:os.system ['touch executed']", "2001-99-99", ":"),
    *("latest", ".", "..", "/dev/null", "nothing.pt", "nothing.yaml", "breakot", "puffer_", "CartPole-v9", "a:b:c"),
    *("os", "os.path", "no.such.thing", "ALE/Pong-v5", "__main__", "x" * 5000, "9" * 5000),
]  # fmt: skip
SMALL = {
    "env_id": "cartpole",
    "num_envs": 8,
    "num_steps": 8,
    "minibatch_size": 64,
    "total_timesteps": 128,
}
SMALL |= {"hidden_size": 16, "precision": "float32", "log_interval": 1, "checkpoint_interval": 1}
NAMES = [
    field.name for field in dataclasses.fields(ppo.Args) if field.name != "compile"
]  # it takes minutes
FLAGS = [f"--{key.replace('_', '-')}={value}" for key, value in SMALL.items()]
LIMITS = ["--no-compile", "--time-limit", "2"]  # so that what is right after all ends soon
TAGGED = [  # KEY stands for an argument's name
    *("KEY: !!python/object/apply:os.system ['touch executed']", "KEY: !!python/module:os", "KEY: &a [*a]", "<<: KEY"),
    *("KEY: !!python/object/new:os.system ['touch executed']", "? [KEY]\n: 1", "KEY: 1\nKEY: 2", "KEY: 2001-99-99"),
    *("KEY: !!binary '=='", "KEY: [", "\tKEY: 1", "--- KEY\n--- 2", "%YAML 9\n---\nKEY: 1", "KEY: .nan", "KEY: 1e999"),
]  # fmt: skip


class Payload:
    """Unpickled without care, it runs a command."""

    def __reduce__(self):
        return os.system, (f"touch {EXECUTED}",)


# What is drawn --------------------------------------------------------------------------------------------------------

text = st.text(st.characters(exclude_characters="\0/", exclude_categories=("Cs",)), max_size=12)
number = st.one_of(
    st.sampled_from(NUMBERS.split()), st.integers(-(10**20), 10**20).map(str), st.floats().map(str)
)
value = st.one_of(number, st.sampled_from(WORDS), text)
place = st.integers(0, 99).map(
    lambda percent: percent / 100
)  # somewhere in a file, as a share of it


def arguments():
    """Lists of words, some of which look like arguments."""
    right = st.sampled_from(["--" + name.replace("_", "-") for name in NAMES])
    env = (
        st.sampled_from(
            ["continuous", "report_interval", "num-envs", "render_mode", "", "buf", "seed"]
        )
        | text
    )
    wrong = st.one_of(
        right.map(lambda word: word[:-2]), text.map("--{}".format), env.map("--env.{}".format)
    )
    name = st.one_of(right, wrong)
    pair, likely = st.tuples(name, value), st.tuples(right, number)
    words = st.one_of(
        likely, pair, pair.map(lambda pair: ("=".join(pair),)), st.tuples(name), st.tuples(value)
    )
    several = st.lists(words, min_size=1, max_size=3).map(
        lambda parts: [word for part in parts for word in part]
    )
    return st.one_of(
        likely.map(list), likely.map(list), pair.map(list), several
    )  # the first may hide the rest


def yaml_files():
    """Bytes, most of them YAML: what is right with some entries changed, any structure, tags, nesting, junk."""
    key = st.one_of(st.sampled_from(NAMES), text, st.integers())
    leaf = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), value)
    tree = st.recursive(
        leaf, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(key, inner, max_size=4)
    )
    changed = st.dictionaries(st.sampled_from(NAMES), leaf | tree, min_size=1, max_size=3).map(
        SMALL.__or__
    )
    dumped = st.one_of(changed, changed, tree).map(
        lambda content: yaml.safe_dump(content, allow_unicode=True)
    )
    tagged = st.builds(
        lambda some, name: some.replace("KEY", name),
        st.sampled_from(TAGGED),
        st.sampled_from(NAMES),
    )
    deep = st.builds(str.__mul__, st.sampled_from(["[", "{a: ", "- ", "? "]), st.integers(1, 3000))
    encoded = st.one_of(dumped, dumped, tagged, deep).map(
        lambda some: some.encode(errors="surrogateescape")
    )
    return encoded | encoded | encoded | st.binary(max_size=200)


def checkpoints():
    """(file, arguments, how it is damaged and details)"""
    model, state = "run/model_cartpole_000002.pt", "run/trainer_000002.pt"
    uses = [
        (state, "--resume run"),
        (state, f"--resume {state}"),
        (model, f"--load-weights {model}"),
    ]
    flip = st.tuples(
        st.just("flip"), st.lists(st.tuples(place, st.integers(1, 255)), min_size=1, max_size=20)
    )
    cut = st.tuples(st.just("cut"), place)
    payload = st.tuples(
        st.just("payload"), st.sampled_from(["pickle", "zip", "legacy"]), st.booleans()
    )
    junk = st.tuples(st.just("bytes"), st.binary(max_size=400))
    return st.tuples(st.sampled_from(uses), st.one_of(flip, cut, payload, junk))


def draw(strategy, count: int) -> list:
    examples = []
    options = {
        "derandomize": True,
        "database": None,
        "deadline": None,
        "phases": [hypothesis.Phase.generate],
    }

    @hypothesis.settings(
        max_examples=count, suppress_health_check=list(hypothesis.HealthCheck), **options
    )
    @hypothesis.given(strategy)
    def collect(example):
        examples.append(copy.deepcopy(example))

    collect()
    return examples


def drawn_inputs(only: str | None) -> dict[str, list]:
    """Examples by kind (or of only one kind), the same in every process."""
    kinds = {
        "arguments": (arguments(), 260),
        "configuration": (yaml_files(), 130),
        "checkpoint": (checkpoints(), 190),
    }
    return {kind: draw(*what) for kind, what in kinds.items() if only in (None, kind)}


# What is done with it -------------------------------------------------------------------------------------------------


def make_base(folder: pathlib.Path) -> pathlib.Path:
    """A folder with a small finished run, whose checkpoints are damaged."""
    torch.set_num_threads(1)
    ppo.environment_class("cartpole")  # what it imports, every fork has then
    folder.mkdir()
    result = in_fork([*FLAGS, *LIMITS, "--output-dir", "."], folder)
    if result["code"]:
        raise RuntimeError(f"the run whose checkpoints shall be damaged: {result['stderr']}")
    next(folder.glob("cartpole__*")).rename(folder / "run")
    for name in ("stdout", "stderr"):
        (folder / name).unlink()
    return folder


def damage(path: pathlib.Path, how: str, *what):
    """Damages a file as a drawn example says."""
    data = bytearray(path.read_bytes())
    if how == "flip":
        for at, bits in what[0]:
            data[int(at * len(data))] ^= bits
    elif how == "cut":
        del data[int(what[0] * len(data)) :]
    elif how == "bytes":
        data = what[0]
    else:
        buffer, content = (
            io.BytesIO(),
            {"iteration": Payload(), "encoder.0.weight": Payload()} if what[1] else Payload(),
        )
        if what[0] == "pickle":
            pickle.dump(content, buffer)
        else:
            torch.save(content, buffer, _use_new_zipfile_serialization=what[0] != "legacy")
        data = buffer.getvalue()
    path.write_bytes(data)


def prepared(kind: str, example, folder: pathlib.Path, base: pathlib.Path) -> list[str]:
    """Writes an example's files to the folder. Returns the script's arguments."""
    if kind == "arguments":
        return [*FLAGS, *LIMITS, *example]
    if kind == "configuration":
        (folder / "given.yaml").write_bytes(example)
        return ["--config", "given.yaml", *LIMITS]
    (file, words), harm = example
    shutil.copytree(base, folder, dirs_exist_ok=True)
    damage(folder / file, *harm)
    return [*words.split(), *(["--total-timesteps=256"] if "--resume" in words else FLAGS), *LIMITS]


def in_fork(argv: list[str], folder: pathlib.Path) -> dict:
    """Calls `main` in a fork: exit code (or "hang"), stderr, seconds, what it left, whether told to end."""
    mark, start = uuid.uuid4().hex, time.monotonic()
    sys.stdout.flush(), sys.stderr.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            os.chdir(folder)
            for fd, name in enumerate((os.devnull, "stdout", "stderr")):
                os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND), fd)
            resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
            os.environ |= {
                MARK: mark,
                "HOME": str(folder),
                "WANDB_MODE": "offline",
                "WANDB_SILENT": "true",
            }
            sys.argv = ["ppo_lstm_puffer.py", *argv]
            code = ppo.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                atexit._run_exitfuncs()
                sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    told, code = 0.0, None
    while code is None:
        time.sleep(0.005)
        pid, status = os.waitpid(child, os.WNOHANG)
        seconds = time.monotonic() - start
        if pid:
            code = os.waitstatus_to_exitcode(status)
        elif told and seconds > told + 60:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            code = "hang"
        elif not told and (seconds > 120 or sum(psutil.Process(child).cpu_times()[:2]) > 30):
            os.kill(
                child, signal.SIGTERM
            )  # what is right after all may be long: it must end when asked to
            told = seconds
    left = left_behind(mark, 5, child)
    stderr = (folder / "stderr").read_text(errors="replace")
    return {
        "code": code,
        "stderr": stderr,
        "seconds": round(seconds, 2),
        "left": left,
        "told": told,
    }


def judge(result: dict, folder: pathlib.Path, before: dict[pathlib.Path, bytes]) -> str | None:
    """What is wrong with how an input was answered, or None. before: the checkpoints that were there."""
    code = result["code"]
    if (folder / EXECUTED).exists():
        return "code was executed"
    if code == "hang":
        return "hangs"
    if result["left"]:
        return f"left running: {result['left']}"
    if code < 0 and not result["told"]:
        return f"ended by {signal.Signals(-code).name}"
    if code > 0 and not result["stderr"].strip():
        return f"exit code {code} without a word"
    lost = [
        path.name
        for path, data in before.items()
        if code and (not path.exists() or path.read_bytes() != data)
    ]
    return f"lost: {', '.join(lost)}" if lost else None


def give(kind: str, example, folder: pathlib.Path, base: pathlib.Path) -> dict:
    """One input, in a folder that is removed. Returns its record."""
    folder.mkdir()
    argv = prepared(kind, example, folder, base)
    before = {path: path.read_bytes() for path in folder.glob("run/*.pt")}
    result = in_fork(argv, folder)
    wrong = judge(result, folder, before)
    shutil.rmtree(folder, ignore_errors=True)
    record = {"code": result["code"], "seconds": result["seconds"], "violation": wrong}
    record["input"] = repr(example)[: 3000 if wrong else 150]
    return record | ({"stderr": clean(result["stderr"][-2500:])} if wrong else {})
