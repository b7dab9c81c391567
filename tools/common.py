"""What the tools share: a command line whose errors are one line, run folders, and the training script of a run."""

import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import pathlib
import sys
import tempfile
import textwrap
import types
from collections.abc import Callable
from typing import Any

import tyro
import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent


class UsageError(Exception):
    """A wrong argument: printed as one line, exit code 2."""


def warn(message: str):
    print(f"warning: {message}", file=sys.stderr, flush=True)


class Damaged(UsageError):
    """A file of weights that is none."""


@contextlib.contextmanager
def one_line():
    """tyro's errors, a box of many lines, as one."""
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            yield
    except SystemExit as error:
        if not error.code:  # --help
            raise
        words = " ".join(
            line.strip("╭╮╰╯│─ ") for line in messages.getvalue().splitlines()[1:]
        ).split()
        text = " ".join(words).partition(" Argument helptext")[0].partition(" For full helptext")[0]
        raise UsageError(f"{text} (see --help)") from error
    sys.stderr.write(messages.getvalue())


def main(options_class: type, function: Callable, description: str) -> int:
    """Calls function(options, flags), flags being the words that options_class does not know. Returns the exit code.

    RUN is the first word or left out: after a flag that is not known here, its value would be taken for RUN.
    """
    words = sys.argv[1:]
    if (not words or words[0].startswith("-")) and not {"-h", "--help"} & set(words):
        words.insert(0, "latest")
    try:
        with one_line():
            options, flags = tyro.cli(
                options_class, args=words, description=description, return_unknown_args=True
            )
        return function(options, flags)
    except UsageError as error:  # what it quotes may have newlines and escape sequences
        print(
            "error:",
            "".join(letter if letter.isprintable() else " " for letter in str(error)),
            file=sys.stderr,
        )
        return 2
    except (
        BrokenPipeError
    ):  # whoever read stdout has gone; the interpreter's last flush must not fail too
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141


def find_run(path: str, output_dir: str, holds: str) -> pathlib.Path:
    """A run's folder, or a file; "latest" is the folder in output_dir that has the newest file named like `holds`."""
    if path == "latest":
        files = list(pathlib.Path(output_dir).glob(f"*/{holds}"))
        if not files:
            raise UsageError(f"latest: no run with a {holds} in --output-dir {output_dir}")
        return max(files, key=lambda file: file.stat().st_mtime).parent
    if not os.path.exists(path):
        raise UsageError(
            f"{path}: no such folder or file; the first word is a run's folder, a file in it, or latest"
        )
    return pathlib.Path(path)


def read_config(folder: pathlib.Path) -> dict[str, Any]:
    """The arguments of a run."""
    try:
        return dict(yaml.safe_load((folder / "config.yaml").read_bytes()))
    except Exception as error:  # not only YAMLError: 2001-99-99 is a ValueError
        raise UsageError(
            f"{folder}/config.yaml: cannot be read ({type(error).__name__}: {error})"
        ) from error


def read_rows(folder: pathlib.Path) -> list[dict]:
    """The rows of metrics.jsonl; a last line that is only half written is left out."""
    rows = []
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / "metrics.jsonl").read_bytes().splitlines():
            rows.append(json.loads(line))
    return rows


# What is known of a training script is here and in the loop of play.py. -----------------------------------------------


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
    """What a run learned, or a file of weights: script and args; after `make` also envs, agent and path."""

    def __init__(self, source: Source, flags: list[str]):
        """flags: the script's own, which win over the run's configuration. Raises UsageError."""
        path = find_run(source.run, source.output_dir, "model_*.pt")
        folder = path if path.is_dir() else path.parent
        has_config = path.is_dir() or (folder / "config.yaml").exists()
        copies = (
            [pathlib.Path(source.script)]
            if source.script
            else list(folder.glob("*.py"))
            if has_config
            else []
        )
        self.script = import_script((copies or [ROOT / "ppo_lstm_puffer.py"])[0])
        known = [
            item.name for item in dataclasses.fields(self.script.Args)
        ]  # with --script it may be another's run
        config = read_config(folder) if has_config else {"precision": "float32"}
        config = {key: value for key, value in config.items() if key in known}
        config |= {"device": "cpu", "num_workers": 0, "cuda_graphs": False}
        with (
            tempfile.NamedTemporaryFile("w", suffix=".yaml") as file,
            self.usage_errors(),
            one_line(),
        ):
            yaml.safe_dump(config, file)
            file.flush()
            self.args, _ = self.script.parse_args(["--config", file.name, *flags])
        # Names end in the iteration; from a million on it is longer.
        models = sorted(
            folder.glob("model_*.pt"), key=lambda model: (len(model.name), model.name), reverse=True
        )
        self.candidates = models if path.is_dir() else [path]
        if not self.candidates:
            raise UsageError(f"{folder}: no model_*.pt here")

    @contextlib.contextmanager
    def usage_errors(self):
        try:
            yield
        except self.script.UsageError as error:
            raise UsageError(error) from error

    def make(self, num_envs: int):
        """The environments, and the agent with the newest whole weights. Raises UsageError."""
        args = self.args
        self.script.seed_everything(args.seed)
        with self.usage_errors():
            self.envs = self.script.make_envs(args, args.seed, num_envs=num_envs)
        spaces = self.envs.single_observation_space, self.envs.single_action_space
        self.agent = self.script.Agent(*spaces, args.hidden_size, args.precision).to(args.device)
        while True:
            self.path = self.candidates.pop(0)
            try:
                return load_weights(self.agent, self.path)
            except Damaged as error:
                if not self.candidates:
                    raise
                warn(f"skipped {error}")


def import_script(path: pathlib.Path) -> types.ModuleType:
    if not path.is_file():
        raise UsageError(f"--script {path}: no such file")
    sys.path[:0] = [
        str(path.resolve().parent),
        str(ROOT),
    ]  # what lies beside it: an environment's module, say
    spec = importlib.util.spec_from_file_location("training_script", path)
    script = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode  # a run's folder stays as it is
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            spec.loader.exec_module(script)
    except (Exception, SystemExit) as error:  # the XLA script exits where there is no torch_xla
        why = f"does not load ({type(error).__name__}: {error})"
        raise UsageError(
            f"{path}: {why}; another one can be named: --script ppo_lstm_puffer.py"
        ) from error
    finally:
        sys.dont_write_bytecode = before
    return script


def load_weights(agent, path: pathlib.Path):
    """A .pt (ours or PufferLib's), or PufferLib's flat .bin: float32 of agent.parameters() in order. Raises UsageError."""
    import torch  # here: the dashboard does without

    hint = "do --env-id, --env and --hidden-size match?"
    if path.suffix == ".bin":
        data, total = path.read_bytes(), sum(parameter.numel() for parameter in agent.parameters())
        if len(data) != 4 * total:
            raise UsageError(
                f"{path}: {len(data)} bytes, but this network has {total} float32 parameters; {hint}"
            )
        flat = torch.frombuffer(bytearray(data), dtype=torch.float32)
        return torch.nn.utils.vector_to_parameters(
            flat.to(next(agent.parameters()).device), agent.parameters()
        )
    try:
        state = torch.load(
            path, map_location="cpu", weights_only=True
        )  # so that a stranger's file cannot run code
        state = {
            name.removeprefix("module."): value for name, value in state.get("model", state).items()
        }
    except Exception as error:
        raise Damaged(f"{path}: not a file of weights, or a damaged one") from error
    try:
        agent.load_state_dict(state)
    except Exception as error:
        why = textwrap.shorten(str(error).partition("\n")[2], 160)
        raise UsageError(f"{path}: does not fit this network ({why}); {hint}") from error
