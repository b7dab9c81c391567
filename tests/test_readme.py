"""README.md and docs/: every command of this repository's programs works, flags exist, links lead
somewhere. And what `make` does before it runs anything.

A training command runs for one iteration, without compiling, on few environments unless it says how
many; a sweep is made and not run; of benchmark/ the flags and files are looked up. Programs of
others, and what needs a display, a TPU or the network, are not run.
"""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from unittest.mock import MagicMock, patch

import pufferlib
import pytest
import torch.distributed.run
import tyro
import yaml
from conftest import ROOT, run_script

import ppo_lstm_puffer as ppo
import ppo_lstm_puffer_ddp as ddp
import protein_sweep

XLA = "torch_xla torch_xla.core torch_xla.core.xla_model torch_xla.distributed "
XLA += "torch_xla.distributed.spmd torch_xla.experimental torch_xla.experimental.scan "
XLA += "torch_xla.runtime"
with patch.dict(sys.modules, {name: MagicMock() for name in XLA.split()}):  # it is not here
    import ppo_lstm_puffer_xla as xla
sys.modules[xla.__name__] = xla  # tyro looks there

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = "\n".join(page.read_text() for page in PAGES)
STANDS_FOR = {
    "runs/RUN": "runs/{run}",  # a small finished run
    "my_ppo.py": "ppo_lstm_puffer.py",
    "my_module:MyEnv-v0": "envs.probes:CueRecall-v0",
    "my_package.my_game": "parallel_game",
    "my_package.my_c_game:MyClass": "pufferlib.ocean.squared.squared:Squared",
}
# Of gcloud, pip, tensorboard and sbatch, in the text.
FOREIGN_FLAGS = "--worker --command --accelerator-type --version --find-links --logdir --account "
FOREIGN_FLAGS += "--cpus-per-task --nodes --partition --no-build-isolation"
pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")

FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.M | re.S)
COMMAND = r"(?:make|sbatch) .+|torchrun .+\.py.*|\S*python -m torch\.distributed\.run .+"
COMMAND += r"|\S*python (?:\w+/)?\w+\.py\b[^\"]*|\w+/\w+\.py [^\"]+"


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", FENCED.sub("", text))


def commands_in(lines: list[str]) -> list[str]:
    """Those that run a program of this repository."""
    parts = [part for line in lines for part in re.split(r"&&|;|\|\|| #", line)]
    found = [re.match(COMMAND, part.strip().removeprefix("do ")) for part in parts]
    return list(dict.fromkeys(match[0].strip() for match in found if match))


BLOCKS = [block for _, language, block in FENCED.findall(TEXT) if not language]
LINES = "".join(BLOCKS).replace("\\\n", " ").splitlines() + code_spans(TEXT)


def block_with(text: str) -> str:
    """The text of the one block of a language that has this in it."""
    (found,) = [block for _, language, block in FENCED.findall(TEXT) if language and text in block]
    return found


@pytest.fixture(autouse=True)
def outside_of_make(monkeypatch):
    """make test ARGS="-k x" gives its arguments to every make below it."""
    for name in "ARGS", "MAKEFLAGS":
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def clone(finished, tmp_path, monkeypatch):
    """The current folder: what a clone has, a run, a sweep's result, README's environment."""
    for path in ROOT.iterdir():
        if path.name not in ("runs", "sweeps", "wandb", "resources", ".git"):
            (tmp_path / path.name).symlink_to(path)
    resources = pathlib.Path(pufferlib.__path__[0], "resources")
    (tmp_path / "resources").symlink_to(resources)  # as `import pufferlib` would
    (tmp_path / "my_env.py").write_text(block_with("class Recall"))
    (tmp_path / "two.yaml").write_text(block_with("log_normal"))
    monkeypatch.syspath_prepend(tmp_path)  # as for a script there
    best = tmp_path / "sweeps" / "breakout__ppo_lstm_puffer" / "best.yaml"
    best.parent.mkdir(parents=True)
    best.write_text(yaml.safe_dump({"env_id": "breakout", "learning_rate": 0.01}))
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(finished.run, tmp_path / "runs" / finished.run.name)


def output_of(script: str, words: list[str]) -> str:
    result = run_script(*words, cwd=".", script=script, small=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def train(words: list[str]):
    """Trains for one iteration."""
    if {"--track", "--profile"} & set(words):  # tests/test_runs.py trains
        ppo.parse_args(words)
        return
    total = "2304" if "--resume" in words else "1"  # the finished run has 2048
    brief = ["--total-timesteps", total, "--no-compile", "--device", "cpu"]
    if "--num-envs" not in words:
        brief += ["--num-envs", "8", "--num-steps", "8", "--minibatch-size", "64"]
    if "--help" in words:
        output_of("ppo_lstm_puffer.py", words)
    else:
        assert ppo.main(*ppo.parse_args([*words, *brief])) == 0


def torchrun(words: list[str]):
    """torchrun reads its part, the script its own, and sizes split. tests/test_ddp.py runs it."""
    given = torch.distributed.run.parse_args(words)
    args, _ = ddp.parse_args(given.training_script_args)
    ranks = int(given.nnodes.split(":")[-1]) * int(given.nproc_per_node)
    assert args.num_envs % ranks == 0 and args.minibatch_size % (args.num_steps * ranks) == 0


def tool(script: str, words: list[str]):
    """Briefly: few episodes, a short film, and not ONNX, whose exporter takes half a minute."""
    if "--render" in words:
        return
    brief = {
        "tools/play.py": ["--episodes", "4", "--num-envs", "4"],
        "tools/watch.py": ["--once"],
        "tools/export.py": [],
        "tools/repeat.py": ["--steps", "1"],
    }[script]
    brief += ["--env.frameskip", "16"] * ("--gif" in words)
    output_of(script, [*(word.replace(".onnx", ".bin") for word in words), *brief])


def make(words: list[str]):
    """The target exists, and its recipe's programs of ours are commands as any other."""
    dry = ["make", "-n", "-o", "setup", "-o", "setup-xla", *words]
    result = subprocess.run(dry, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for command in commands_in(result.stdout.replace("\\\n", " ").splitlines()):
        check(command)


def check(command: str):
    program, *words = shlex.split(command)
    if program == "make":
        return make(words)
    if program == "torchrun" or "torch.distributed.run" in words:
        return torchrun(words[2:] if "torch.distributed.run" in words else words)
    if program == "sbatch":
        start = next(i for i, word in enumerate(words) if word.endswith(".sh"))
        assert pathlib.Path(words[start]).exists()
        return ddp.parse_args(words[start + 1 :])
    script, *words = [program, *words] if program.endswith(".py") else words
    if script == "ppo_lstm_puffer.py":
        train(words)
    elif script == "ppo_lstm_puffer_xla.py":
        tyro.cli(xla.Args, args=words)
    elif script == "protein_sweep.py":
        made = protein_sweep.prepare(words)
        ppo.parse_args(["--env-id", made.args.env_id, *made.args.fixed])
    elif script.startswith("tools/"):
        tool(script, words)
    else:
        usage = output_of(script, ["--help"])
        for word in words:
            assert not word.startswith("--") or word in usage
            assert not word.startswith(("benchmark/", "recipes/")) or pathlib.Path(word).exists()


@pytest.mark.parametrize("command", commands_in(LINES), ids=lambda command: command[:90])
def test_command_works(command, clone):
    for name, ours in STANDS_FOR.items():
        command = command.replace(name, ours.format(run=clone.name))
    check(command)


def test_a_trained_policy_plays_in_a_script_of_ones_own(clone):
    words = "--env-id my_env:Recall-v0 --num-envs 32 --num-steps 20 --minibatch-size 320"
    words += " --no-compile --hidden-size 32 --ent-coef 0.01 --total-timesteps 100_000 --device cpu"
    output_of("ppo_lstm_puffer.py", words.split())
    (run,) = pathlib.Path("runs").glob("my_env-Recall*")
    pathlib.Path("my_play.py").write_text(block_with("ppo.act").replace("runs/RUN", str(run)))
    returns = [float(output_of("my_play.py", [])) for _ in range(4)]
    assert returns == [1.0] * 4  # by chance half of them


def test_flags_in_the_text_exist():
    spans = [span for span in code_spans(TEXT) if "gcloud" not in span]
    flags = {flag for span in spans for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", span)}
    programs = [*ROOT.glob("*.py"), *ROOT.glob("tools/*.py"), *ROOT.glob("benchmark/*.py")]
    words = set(re.findall(r"\w+", "\n".join(path.read_text() for path in programs)))
    known = {*FOREIGN_FLAGS.split(), "--help"}
    known |= set(torch.distributed.run.get_args_parser()._option_string_actions)
    unknown = {flag[2:].removeprefix("no-").replace("-", "_") for flag in flags - known}
    assert unknown - words == set()


def test_files_and_links_lead_somewhere():
    reports = [*ROOT.glob("recipes/*.md"), *ROOT.glob("benchmark/**/*.md")]
    missing = []
    for page in [*PAGES, *reports]:
        links = re.findall(r"\]\(([^)\s#]+)[^)]*\)", page.read_text())
        paths = [page.parent / link for link in links if not link.startswith("http")]
        if page in PAGES:
            spans = [span for span in code_spans(page.read_text()) if "<" not in span]
            named = [span for span in spans if re.fullmatch(r"[\w.-]+/[\w./-]+\.\w+", span)]
            paths += [ROOT / span for span in named if not span.startswith(("runs/", "sweeps/"))]
        missing += [path for path in paths if not path.exists()]
    assert missing == []


@pytest.mark.parametrize(("given", "sizes"), [("--seed 2", True), ("--env-id pong", False)])
def test_make_train_takes_the_sizes_of_a_gpu_unless_others_are_given(tmp_path, given, sizes):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    words = ["make", "-n", "--no-print-directory", "-o", "setup", "train", f"ARGS={given}"]
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    line = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True).stdout
    assert ("--config configs/cuda.yaml" in line) == sizes and line.rstrip().endswith(given)


@pytest.mark.parametrize("changed", ["requirements.txt", "pufferlib.patch", "adapters.py"])
def test_setup_installs_again_where_what_it_installs_has_changed(tmp_path, changed):
    (tmp_path / ".installed").touch()
    make = ["make", "-n", "--no-print-directory", "setup", f"VENV={tmp_path}"]
    for words, installs in (make, False), ([*make, "-W", changed], True):
        said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout
        assert ("install_pufferlib.sh" in said) == installs
