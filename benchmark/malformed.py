"""Malformed input for the scripts, drawn by Hypothesis: `python benchmark/faults.py inputs`.

Arguments, YAML files, and checkpoints with flipped bytes, foreign tensors, wrong types or a program inside. The examples are the
same ones in every run. Each is given to a script's `main` in a fork of this process, which has imported the scripts once, in a
folder of its own. `judge` says what is a violation: a traceback, a hang, an exit code or words that are not documented, code that
was executed, a process left behind.
"""

import atexit
import contextlib
import copy
import dataclasses
import io
import json
import os
import pathlib
import pickle
import re
import resource
import shutil
import signal
import sys
import time
import traceback
import uuid

import hypothesis
import matplotlib.pyplot  # noqa: F401  (what the scripts import late is imported here, once)
import psutil
import torch
import torch._dynamo
import torch.utils.tensorboard
import yaml
from hypothesis import strategies as st
from processes import MARK, ROOT, clean, left_behind

import ppo_lstm_puffer as ppo
import protein_sweep

EXECUTED = "executed"  # the file that code smuggled into an input would make
NUMBERS = (
    "0 -0 -1 1 2 3 0.5 -1e-300 1e308 1e400 nan inf -inf 0x10 1_000 1e3 1,5 65536 1000000 2147483647 2147483648 9223372036854775808"
)
WORDS = [
    "", " ", "-", "--", "---", "=", "-h", "true", "None", "~", "[]", "{", "}", "&a", "*a", "- a", "a: b", "a\nb", "\x1b[31mred", "é", "日本",
    "💥", "\u202eabc", "%s%n", "$(touch executed)", "; touch executed", "2001-99-99", "12:61:61", "!!binary x", "!!python/name:os.system",
    "!!python/object/apply:os.system ['touch executed']", "nosuch://x", "memory://x", "file://", "s3://bucket/x", "http://127.0.0.1:9/x",
    "latest", ".", "..", "/dev/null", "nothing.pt", "nothing.bin", "nothing.yaml", "breakot", "puffer_", "CartPole-v9", "CartPole-v1:", ":", "a:b:c",
    "os", "os.path", "no.such.thing", "tactical", "ALE/Pong-v5", "__main__", ".x", "[/red]", "\udcff", "x" * 5000, "9" * 5000,
]  # fmt: skip
SMALL = {
    "env_id": "cartpole", "num_envs": 8, "num_steps": 8, "minibatch_size": 64, "total_timesteps": 128, "hidden_size": 16,
    "precision": "float32", "log_interval": 1, "checkpoint_interval": 1,
}  # fmt: skip
FLAGS = [f"--{key.replace('_', '-')}={value}" for key, value in SMALL.items()]
LIMITS = ["--no-compile", "--time-limit", "2"]  # so that what is right after all ends soon
SWEEP = ["--script", "toy.py", "--env-id", "toy", "--num-trials", "1", "--max-cost-seconds", "2", "--hang-seconds", "5"]
TOY = """
import json, pathlib, sys
class Args:
    x: float = 0.5
    y: int = 2
    total_timesteps: int = 10
folder = pathlib.Path(next(word.partition("=")[2] for word in sys.argv if word.startswith("--output-dir=")), "run")
folder.mkdir(parents=True)
with open(folder / "metrics.jsonl", "w") as file:
    for step in range(1, 4):
        print(json.dumps({"step": step, "time": step / 10, "env/score": step}), file=file, flush=True)
"""
SPACE = {"x": {"distribution": "uniform", "min": 0.0, "max": 1.0}, "y": {"distribution": "int_uniform", "min": 1, "max": 5}}
TAGGED = [  # KEY stands for an argument's name
    "KEY: !!python/object/apply:os.system ['touch executed']", "KEY: !!python/object/new:os.system ['touch executed']",
    "KEY: !!python/name:os.system", "KEY: !!python/module:os", "KEY: &a [*a]", "? [KEY]\n: 1", "KEY: 1\nKEY: 2", "KEY: 2001-99-99", "KEY: !!int x",
    "KEY: !!binary '=='", "KEY: |\n  a\n  b", "KEY: [", "\tKEY: 1", "--- KEY\n--- 2", "%YAML 9.9\n---\nKEY: 1", "KEY: .nan", "KEY: 1e999", "<<: KEY",
    "KEY: !!set {a, b}", "a: &a [x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c]\nKEY: [*d,*d,*d,*d]",
]  # fmt: skip


def if_tensor(change, other):
    return lambda old: change(old) if isinstance(old, torch.Tensor) else other


JUNK = {  # what an item of a checkpoint is replaced by, given the item
    "None": lambda old: None, "negative": lambda old: -1, "huge": lambda old: 10**30, "nan": lambda old: float("nan"),
    "word": lambda old: "word\x1b[31m\n", "list": lambda old: [], "dict": lambda old: {}, "nested": lambda old: [[[1]], {"a": (2,)}],
    "empty tensor": lambda old: torch.zeros(0), "scalar tensor": lambda old: torch.zeros(()),
    "nan tensor": if_tensor(lambda old: torch.full(old.shape, float("nan")), True), "one more dimension": if_tensor(lambda old: old[None], 2.5),
    "cut": lambda old: old[:-1] if isinstance(old, (str, list, tuple)) or getattr(old, "ndim", 0) else [old],
    "integers": if_tensor(lambda old: old.long(), 2**62), "complex": if_tensor(lambda old: old.to(torch.complex64), 1j),
}  # fmt: skip


class Payload:
    """Unpickled without care, it runs a command."""

    def __reduce__(self):
        return os.system, (f"touch {EXECUTED}",)


# What is drawn ------------------------------------------------------------------------------------------------------------

text = st.text(st.characters(exclude_characters="\0/", exclude_categories=("Cs",)), max_size=12)
number = st.one_of(st.sampled_from(NUMBERS.split()), st.integers(-(10**20), 10**20).map(str), st.floats().map(str))
value = st.one_of(number, st.sampled_from(WORDS), text)
place = st.integers(0, 99).map(lambda percent: percent / 100)  # somewhere in a file, a list or a word, as a share of it


def names(args_class) -> list[str]:
    """Arguments, but for those that take minutes if they are right."""
    return [field.name for field in dataclasses.fields(args_class) if field.name not in ("compile", "fixed")]


def arguments(args_class):
    """Lists of words, some of which look like arguments."""
    right = st.sampled_from([f"--{name.replace('_', '-')}" for name in names(args_class)])
    misspelt = st.builds(lambda name, at: name[: 2 + int(at * len(name))] + name[3 + int(at * len(name)) :], right, place)
    env = st.one_of(st.sampled_from(["continuous", "report_interval", "num-envs", "render_mode", "", "buf", "seed"]), text)
    name = st.one_of(right, right, right, misspelt, text.map("--{}".format), env.map("--env.{}".format))
    pair, likely = st.tuples(name, value), st.tuples(right, st.sampled_from(NUMBERS.split()) | number)
    words = st.one_of(likely, likely, likely, pair, pair.map(lambda pair: ("=".join(pair),)), st.tuples(name), st.tuples(value))
    several = st.lists(words, min_size=1, max_size=3).map(lambda parts: [word for part in parts for word in part])
    return st.one_of(likely.map(list), likely.map(list), pair.map(list), several)  # more than one, and the first hides the rest


def yaml_files(names: list[str], right: dict):
    """Bytes, most of them YAML: something that is right with some entries changed, any structure, tags, deep nesting, junk."""
    key = st.one_of(st.sampled_from(names), text, st.integers(), st.sampled_from(WORDS[:20]))
    leaf = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), value)
    tree = st.recursive(leaf, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(key, inner, max_size=4), max_leaves=8)
    kinds = st.sampled_from(["uniform", "int_uniform", "uniform_pow2", "log_normal", "logit_normal"])
    entry = st.fixed_dictionaries({"distribution": kinds, "min": leaf, "max": leaf})
    changed = st.dictionaries(st.sampled_from(names), st.one_of(leaf, tree, entry), min_size=1, max_size=3).map(right.__or__)
    dumped = st.one_of(changed, changed, st.dictionaries(key, tree, max_size=4), tree)
    dumped = dumped.map(lambda content: yaml.safe_dump(content, allow_unicode=True).encode(errors="surrogateescape"))
    tagged = st.builds(lambda some, name: some.replace("KEY", name).encode(), st.sampled_from(TAGGED), st.sampled_from(names))
    deep = st.builds(lambda opening, times: opening * times, st.sampled_from([b"[", b"{a: ", b"- ", b"? "]), st.integers(1, 3000))
    whole = yaml.safe_dump(right).encode()
    broken = st.builds(
        lambda junk, at: whole[: int(at * len(whole))] + junk + whole[int(at * len(whole)) :], st.binary(max_size=20), place
    )
    return st.one_of(dumped, dumped, dumped, tagged, tagged, deep, broken, st.binary(max_size=200))


def checkpoints():
    """(file, arguments, how it is damaged and details)"""
    model, state, flat = "run/model_cartpole_000002.pt", "run/trainer_state.pt", "flat.bin"
    uses = [(state, "--resume run"), (state, "--resume run"), (state, f"--resume {state}"), (state, "--evaluate run")]
    uses += [(model, "--resume run"), (model, "--evaluate run"), (model, f"--evaluate {model}"), (model, f"--load-weights {model}")]
    uses += [(flat, f"--evaluate {flat}"), (flat, f"--load-weights {flat}")]
    edit = st.tuples(st.just("edit"), st.lists(place, max_size=4), st.sampled_from([*JUNK, "removed"]))
    flip = st.tuples(st.just("flip"), st.lists(st.tuples(place, st.integers(1, 255)), min_size=1, max_size=20))
    zeros, cut = st.tuples(st.just("zeros"), st.tuples(place, place)), st.tuples(st.just("cut"), place)
    payload = st.tuples(st.just("payload"), st.sampled_from(["pickle", "zip", "legacy"]), st.booleans())
    junk = st.tuples(st.just("bytes"), st.binary(max_size=400))
    return st.tuples(st.sampled_from(uses), st.one_of(edit, edit, edit, edit, flip, zeros, cut, payload, junk))


def draw(strategy, count: int) -> list:
    examples = []

    @hypothesis.settings(
        max_examples=count, derandomize=True, database=None, deadline=None, phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(strategy)
    def collect(example):
        examples.append(copy.deepcopy(example))

    collect()
    return examples


def drawn_inputs(only: str | None) -> dict[str, list]:
    """Examples by kind (or of only one kind), the same in every process."""
    after = st.one_of(st.just([]), st.lists(st.one_of(value, value.map("--{}".format)), max_size=3).map(["--"].__add__))
    kinds = {
        "arguments": (arguments(ppo.Args), 260),
        "configuration": (yaml_files(names(ppo.Args), SMALL), 130),
        "checkpoint": (checkpoints(), 190),
        "sweep arguments": (st.builds(list.__add__, arguments(protein_sweep.Args), after), 80),
        "sweep space": (yaml_files(["x", "y", "z", "total_timesteps"], SPACE), 60),
    }
    return {kind: draw(*what) for kind, what in kinds.items() if only in (None, kind)}


# What is done with it -----------------------------------------------------------------------------------------------------


def make_base(folder: pathlib.Path) -> pathlib.Path:
    """A folder with a small finished run, whose checkpoints are damaged, and weights in PufferLib's flat format."""
    torch.set_num_threads(1)
    ppo.parse_args([]), ppo.environment_class("cartpole")  # what they import, every fork has then
    folder.mkdir()
    result = in_fork("ppo_lstm_puffer", [*FLAGS, *LIMITS, "--output-dir", "."], folder)
    if result["code"]:
        raise RuntimeError(f"the run whose checkpoints shall be damaged: {result['stderr']}")
    next(folder.glob("cartpole__*")).rename(folder / "run")
    spaces = ppo.gym.spaces.Box(-1, 1, (4,)), ppo.gym.spaces.Discrete(2)
    flat = torch.nn.utils.parameters_to_vector(ppo.Agent(*spaces, hidden_size=SMALL["hidden_size"]).parameters())
    (folder / "flat.bin").write_bytes(flat.detach().numpy().tobytes())
    for name in ("stdout", "stderr"):
        (folder / name).unlink()
    return folder


def edited(content, path: list[float], junk: str):
    """content with one item replaced or removed. path: at each level, which of the items, as a share of them."""
    if not path or not isinstance(content, (dict, list, tuple)) or not content:
        return JUNK[junk](content) if junk != "removed" else None
    items = dict(content) if isinstance(content, dict) else dict(enumerate(content))
    key = list(items)[int(path[0] * len(items))]
    if junk == "removed" and len(path) == 1:
        del items[key]
    else:
        items[key] = edited(items[key], path[1:], junk)
    return items if isinstance(content, dict) else type(content)(items.values())


def damage(path: pathlib.Path, how: str, *what):
    """Damages a file as a drawn example says."""
    data = bytearray(path.read_bytes())
    if how == "flip":
        for at, bits in what[0]:
            data[int(at * len(data))] ^= bits
    elif how == "zeros":
        first, last = sorted(int(at * len(data)) for at in what[0])
        data[first:last] = bytes(last - first)
    elif how == "cut":
        del data[int(what[0] * len(data)) :]
    elif how == "bytes":
        data = what[0]
    else:
        buffer = io.BytesIO()
        if how == "payload":
            content = {"iteration": Payload(), "encoder.0.weight": Payload()} if what[1] else Payload()
        else:
            content = edited(torch.load(path, weights_only=True) if path.suffix == ".pt" else {"flat": 1}, *what)
        if how == "payload" and what[0] == "pickle":
            pickle.dump(content, buffer)
        else:
            torch.save(content, buffer, _use_new_zipfile_serialization=what[0] != "legacy")
        data = buffer.getvalue()
    path.write_bytes(data)


def prepared(kind: str, example, folder: pathlib.Path, base: pathlib.Path) -> tuple[str, list[str]]:
    """Writes an example's files to the folder. Returns the script and its arguments."""
    if kind == "arguments":
        return "ppo_lstm_puffer", [*FLAGS, *LIMITS, *example]
    if kind == "configuration":
        (folder / "given.yaml").write_bytes(example)
        return "ppo_lstm_puffer", ["--config", "given.yaml", *LIMITS]
    if kind == "checkpoint":
        (file, words), harm = example
        shutil.copytree(base, folder, dirs_exist_ok=True)
        damage(folder / file, *harm)
        more = ["--total-timesteps", "256"] if "--resume" in words else [*FLAGS, "--eval-episodes", "4"]
        return "ppo_lstm_puffer", [*words.split(), *more, *LIMITS]
    (folder / "toy.py").write_text(TOY)
    (folder / "space.yaml").write_bytes(example if kind == "sweep space" else json.dumps(SPACE).encode())
    return "protein_sweep", [*SWEEP, "--space", "space.yaml", *(example if kind == "sweep arguments" else [])]


def in_fork(script: str, argv: list[str], folder: pathlib.Path) -> dict:
    """Calls the script's main in a fork: exit code (or "hang"), stderr, seconds, what it left running, whether it was told to end."""
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
            os.environ |= {MARK: mark, "HOME": str(folder), "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
            os.environ.pop("DISPLAY", None)
            sys.argv = [f"{script}.py", *argv]
            code = sys.modules[script].main()
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
            os.kill(child, signal.SIGTERM)  # what is right after all may be long: it has its time, and must end when asked to
            told = seconds
    left = left_behind(mark, 5, child)
    stderr = (folder / "stderr").read_text(errors="replace")
    return {"code": code, "stderr": stderr, "seconds": round(seconds, 2), "left": left, "told": told}


def judge(result: dict, folder: pathlib.Path) -> str | None:
    """What is wrong with how an input was answered: the exception and its place, or a sentence. None if nothing is."""
    errors, code = result["stderr"], result["code"]
    lines = [line for line in errors.splitlines() if line.strip()]
    reasons = [line for line in lines if line.startswith("error: ")]
    if (folder / EXECUTED).exists():
        return "code was executed"
    if code == "hang":
        return "hangs"
    if "Traceback (most recent call last)" in errors:
        last = errors.rpartition("Traceback (most recent call last)")[2]
        places = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', last)
        ours = [one for one in places if pathlib.Path(one[0]).parent == ROOT] or places
        kind = next((line.partition(":")[0] for line in last.splitlines() if re.match(r"[\w.]+(:|$)", line)), "exception")
        return f"{kind} in {os.path.basename(ours[-1][0])}, {ours[-1][2]}, line {ours[-1][1]}" if ours else kind
    if code < 0:
        early = "neither ended nor training within 30 s of the processor" if result["told"] else "ended by a signal"
        return f"{early}: {signal.Signals(-code).name}"
    if result["left"]:
        return f"left running: {result['left']}"
    if code == 1 and not (reasons and lines[-1] == reasons[-1]):
        return "exit code 1 without a last line that says why"
    if code == 2 and not (len(reasons) == 1 and lines[-1] == reasons[0]):
        return "exit code 2 without one last line that says why"
    if code == 2 and not all(line.startswith(("error: ", "warning: ", "hint: ", "run: ", "study ")) for line in lines):
        return "exit code 2 with more than the one line"
    return None if code in (0, 1, 2, 130, 143) else f"exit code {code}"


def give(kind: str, example, folder: pathlib.Path, base: pathlib.Path) -> dict:
    """One input, in a folder that is removed. Returns its record."""
    folder.mkdir()
    script, argv = prepared(kind, example, folder, base)
    result = in_fork(script, argv, folder)
    wrong = judge(result, folder)
    shutil.rmtree(folder, ignore_errors=True)
    record = {"code": result["code"], "seconds": result["seconds"], "violation": wrong}
    record["input"] = repr(example)[: 3000 if wrong else 150]
    return record | ({"stderr": clean(result["stderr"][-2500:])} if wrong else {})
