"""What the tools share: their command line, a run's folder, and the training script in it."""

import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import pathlib
import sys
import textwrap
import types
from collections.abc import Callable
from typing import Any

import tyro
import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent


def fail(message: str):
    """Ends the program for a wrong argument: one line, exit code 2."""
    print("error:", " ".join(message.split()), file=sys.stderr)
    sys.exit(2)


def main(tool: Callable, options_class: type, description: str) -> int:
    """Calls tool(options), or tool(options, flags) if it runs a policy. Returns the exit code.

    flags are the words that options_class does not know: the training script's.
    """
    for stream in sys.stdout, sys.stderr:
        stream.reconfigure(errors="replace")  # where a terminal has ASCII alone
    words = sys.argv[1:]
    takes_flags = issubclass(options_class, Source)
    if takes_flags and (not words or words[0].startswith("-")) and not {"-h", "--help"} & {*words}:
        words.insert(0, "latest")  # else the value of a flag that is not known would be RUN
    parsed = tyro.cli(
        options_class, args=words, description=description, return_unknown_args=takes_flags
    )
    given = parsed[1] if takes_flags else []
    for before, word in zip(["", *given], given):
        is_value = before.startswith("-") and "=" not in before
        if not word.startswith("-") and not is_value:
            fail(f"{word}: RUN comes first, before all flags")
    try:
        return tool(*parsed) if takes_flags else tool(parsed)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # who read stdout has gone; the interpreter's last flush must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141


def find_run(path: str, output_dir: str, holds: str) -> pathlib.Path:
    """A run's folder, or a file. "latest": the folder with the newest file named like `holds`."""
    path = os.path.expanduser(path)
    if path == "latest":
        files = list(pathlib.Path(os.path.expanduser(output_dir)).glob(f"*/{holds}"))
        if not files:
            fail(f"latest: no run with a {holds} in --output-dir {output_dir}")
        return max(files, key=os.path.getmtime).parent
    if not os.path.exists(path):
        fail(f"{path}: no such folder or file; first comes a run's folder, a file in it, or latest")
    return pathlib.Path(path)


def read_config(folder: pathlib.Path, loader=yaml.SafeLoader) -> dict[str, Any]:
    """The arguments of a run."""
    try:
        return dict(yaml.load((folder / "config.yaml").read_bytes(), loader))
    except Exception as error:  # not only YAMLError: 2001-99-99 is a ValueError
        fail(f"{folder}/config.yaml: cannot be read ({type(error).__name__}: {error})")


def script_of(folder: pathlib.Path) -> pathlib.Path | None:
    """A run's own copy of its script: the newest, since another one may have gone on with it."""
    return max(folder.glob("*.py"), key=os.path.getmtime, default=None)


def read_rows(folder: pathlib.Path) -> list[dict]:
    """The rows of metrics.jsonl; a last line that is only half written is left out."""
    rows = []
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / "metrics.jsonl").read_bytes().splitlines():
            rows.append(json.loads(line))
    return rows


# What is known of a training script is here and in the loop of play.py. ---------------------------


@dataclasses.dataclass
class Source:
    """The arguments of a tool that runs a policy."""

    run: tyro.conf.Positional[str]
    """a run's folder, latest, or a file of weights: .pt or .bin"""
    script: str | None = None
    """the training script to use; default: the copy in the run's folder, else ppo_lstm_puffer.py"""
    output_dir: str = "runs"
    """where latest looks"""


class Trained:
    """What a run learned, or a file of weights: script, args, path; after `make` envs and agent."""

    def __init__(self, source: Source, flags: list[str]):
        """flags: the script's own, which win over the run's configuration."""
        from pufferlib import adapters  # here: the dashboard does without torch

        self.path = find_run(source.run, source.output_dir, "model_*.pt")
        folder = self.path if self.path.is_dir() else self.path.parent
        config = {"precision": "float32"}
        script = ROOT / "ppo_lstm_puffer.py"
        if self.path.is_dir() or (folder / "config.yaml").exists():
            config = read_config(folder, adapters.Loader)  # as --config reads it
            script = script_of(folder) or script
        self.script = import_script(pathlib.Path(source.script or script))
        if self.path.is_dir():
            numbers = {path: path.stem.rpartition("_")[2] for path in folder.glob("model_*.pt")}
            models = [path for path in numbers if numbers[path].isdigit()]  # no model_best.pt
            if not models:
                fail(f"{folder}: no model_*_NUMBER.pt here")
            self.path = max(models, key=lambda path: int(numbers[path]))
        config["auto"] = {"precision"} & {*(config.get("auto") or ())}  # by this machine
        config |= {"device": "cpu", "num_workers": 0, "cuda_graphs": False}
        known = {field.name for field in dataclasses.fields(self.script.Args)}
        known -= {"num_steps", "minibatch_size", "max_minibatch_size"}  # may need several ranks
        config = {name: value for name, value in config.items() if name in known}
        words = [*adapters.as_words(config), *flags]
        self.args, _ = self.script.parse_args(words)

    def make(self, num_envs: int):
        """The environments, seeded as no environment of training is, and the agent."""
        import pufferlib  # here: the dashboard does without them
        import torch

        args = self.args
        path = self.path.absolute()  # environments may change the folder
        seed = pufferlib.env_seed(args.seed, 2**40)  # training takes the iteration of its start
        torch.manual_seed(seed)
        self.envs = self.script.make_envs(args, seed, num_envs)  # seeds random, numpy and torch
        spaces = self.envs.observation_space, self.envs.action_space
        self.agent = self.script.Agent(*spaces, args).to(args.device)
        load_weights(self.agent, path)


def import_script(path: pathlib.Path) -> types.ModuleType:
    if not path.is_file():
        fail(f"--script {path}: no such file")
    # What lies beside it, or where it was started: an environment's module, say.
    sys.path[:0] = [str(path.resolve().parent), os.getcwd(), str(ROOT)]
    spec = importlib.util.spec_from_file_location("training_script", path)
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script
    before = sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # a run's folder stays as it is
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            spec.loader.exec_module(script)
    except (Exception, SystemExit) as error:  # the XLA script exits where there is no torch_xla
        why = f"does not load ({type(error).__name__}: {error})"
        fail(f"{path}: {why}; another one can be named: --script ppo_lstm_puffer.py")
    finally:
        sys.dont_write_bytecode = before
    return script


def load_weights(agent, path: pathlib.Path):
    """A .pt (ours or PufferLib's), or PufferLib's .bin: float32 of agent.parameters() in order."""
    import torch

    hint = "do --env-id, --env, --hidden-size and --norm-obs match?"
    if path.suffix == ".bin":
        data = path.read_bytes()
        total = sum(parameter.numel() for parameter in agent.parameters())
        if len(data) != 4 * total:
            fail(f"{path}: {len(data)} bytes, but this network has {total} parameters; {hint}")
        flat = torch.frombuffer(bytearray(data), dtype=torch.float32)
        flat = flat.to(next(agent.parameters()).device)
        torch.nn.utils.vector_to_parameters(flat, agent.parameters())
        return
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)  # it cannot run code
        state = state.get("model", state)
        state = {name.removeprefix("module."): value for name, value in state.items()}
    except Exception:
        fail(f"{path}: not a file of weights, or a damaged one")
    own = agent.state_dict()
    for name in list(state):
        if name.startswith(("cell.", "return_norm.")) and name not in own:
            del state[name]  # PufferLib's second name for the LSTM's; only for training
    try:
        agent.load_state_dict(state)
    except Exception as error:
        why = textwrap.shorten(str(error).partition("\n")[2], 160)
        fail(f"{path}: does not fit this network ({why}); {hint}")
