"""Every command in README.md and docs/ is checked: those of its code blocks, and those between backticks in its text.

The first rule of RULES that fits a command says how; a command that none fits fails, so that nothing is added without a test.
Training commands run as they are written but for one iteration and without compiling; those that another
test file runs, and those that take long, are parsed by the program itself and go no further. Names that stand for something of the
reader's are in STANDS_FOR. What cannot be run here is in ELSEWHERE with the reason.
"""

import argparse
import ast
import dataclasses
import math
import os
import pathlib
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import types
from typing import Any, Literal

import pufferlib
import pytest
import torch.distributed.run
import tyro
import yaml
from conftest import ROOT, SMALL, newest_run, output_of

import ppo_lstm_puffer as ppo
import ppo_lstm_puffer_ddp as ddp
import protein_sweep

PAGES = {
    path: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
README = "\n".join(PAGES.values())
SCRIPTS = sorted(path.name for path in ROOT.glob("ppo_lstm_puffer*.py"))
STANDS_FOR = {
    "runs/RUN": "runs/{run}",  # a small finished run
    "my_module:MyEnv-v0": "envs.probes:CueRecall-v0",
    "my_package.my_game": "parallel_game",
    "<env>__<script>": "breakout__ppo_lstm_puffer",
    "user:password@host/database": "host/database",
}
ELSEWHERE = {
    r"gcloud ": "needs an account with Google Cloud",
    r"(sudo|kill) ": "changes the machine",
    r"\S*pip install ": "needs the network",
    r"make (setup|setup-xla|benchmark-peers)$": "installs",
    r"\S*tensorboard |optuna-dashboard ": "is a server",
    r"(source|export|cd|ls) ": "is the shell's",
}
# Of gcloud and pip, in the text; torchrun's are asked of torchrun.
FOREIGN_FLAGS = {"--worker", "--command", "--accelerator-type", "--version", "--find-links"}
pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")


# README.md as commands.


def code_blocks(text: str) -> list[str]:
    """Of no language: commands, or what a run prints."""
    return [
        block
        for _, word, block in re.findall(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.M | re.S)
        if not word
    ]


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.M | re.S))


def commands_in(text: str) -> list[str]:
    """Lines of the blocks that are shell, and spans of several words that begin with a program's name; comments dropped."""
    blocks = [block for block in code_blocks(text) if not re.match(r"cpu, |@software", block)]
    blocks = [block.replace("\\\n", " ") for block in blocks]  # a command on several lines
    lines = [line.partition(" #")[0].strip() for block in blocks for line in block.splitlines()]
    programs = r"(python|make|torchrun|patch|diff|git|cp|xvfb-run|taskset|sudo|kill|source|pip|gcloud|optuna-dashboard|\.venv\S*/bin/\w+)"
    spans = [re.sub(r"^(?=\w+/\w+\.py )", "python ", span) for span in code_spans(text)]
    spans = [span for span in spans if re.match(programs + r" (-\S+ )*[^-\s]", span)]
    return list(dict.fromkeys(line for line in lines + spans if line))


def words_of(line: str) -> list[list[str]]:
    """A shell line as the words of each of its commands: comments dropped, split at && and the like."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    commands = [[]]
    for word in lexer:
        commands[-1].append(word) if not set(word) <= set(";&|") else commands.append([])
    return [command for command in commands if command]


# A clone to run them in, and how.


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A small finished run of Breakout: its folder, and what it printed."""
    folder = tmp_path_factory.mktemp("readme")
    output = output_of(ROOT / "ppo_lstm_puffer.py", [*SMALL, "--device", "cpu"], folder)
    return newest_run(folder), output


@pytest.fixture
def clone(finished, tmp_path, monkeypatch):
    """A folder with everything that a clone has, by links and copies, and a run. Commands run there."""
    for path in ROOT.iterdir():
        if path.is_file():  # a copy: patch does not take links
            shutil.copy(path, tmp_path)
        elif path.name not in ("runs", "sweeps", "wandb", "resources", ".git"):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "resources").symlink_to(
        pathlib.Path(pufferlib.__path__[0], "resources")
    )  # as `import pufferlib` would
    shutil.copy(
        ROOT / "ppo_lstm_puffer.py", tmp_path / "my_ppo.py"
    )  # a reader's own copy, and environment
    (environment,) = re.findall(r"```python\n(.*?)```", README, re.S)
    (tmp_path / "my_env.py").write_text(environment)
    monkeypatch.syspath_prepend(tmp_path)  # as for a script there
    run = shutil.copytree(finished[0], tmp_path / "runs" / finished[0].name)
    best = tmp_path / "sweeps" / "breakout__ppo_lstm_puffer" / "best.yaml"
    best.parent.mkdir(parents=True)
    best.write_text(yaml.safe_dump({"env_id": "breakout", "learning_rate": 0.01}))
    monkeypatch.chdir(tmp_path)
    return run


def parse(script: str, words: list[str]):
    """The script's arguments, read by the script itself; of the XLA script, whose torch_xla is not here, by its Args alone."""
    if script == "ppo_lstm_puffer_xla.py":
        tree = ast.parse((ROOT / script).read_text())
        node = next(
            node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args"
        )
        module = types.ModuleType("xla_args")
        module.__file__ = str(ROOT / script)  # where tyro finds the comments, which are its --help
        sys.modules[module.__name__] = module
        names = vars(module) | {"math": math, "Any": Any, "Literal": Literal}
        names |= {"dataclass": dataclasses.dataclass, "field": dataclasses.field}
        exec(compile(ast.Module([node], []), script, "exec"), names)
        return tyro.cli(names["Args"], args=words)
    return {"ppo_lstm_puffer.py": ppo, "my_ppo.py": ppo, "ppo_lstm_puffer_ddp.py": ddp}[
        script
    ].parse_args(words)[0]


# The rules: each takes the words of a command.


def train(words: list[str]):
    """As written, but for one iteration on the CPU, with few environments where the command does not say how many, and with
    minibatches no larger than that gives."""
    script, *arguments = words[1:]
    if "--help" in arguments:
        assert "--total-timesteps" in output_of(script, arguments, ".")
        return
    args = parse(script, arguments)
    if "--resume" in arguments:
        brief = ["--total-timesteps", "4096"]  # more than the finished run has
    else:
        brief = ["--total-timesteps", "1", "--no-compile"]
        if "--num-envs" not in arguments:
            brief += [
                "--num-envs",
                "64",
                "--minibatch-size",
                str(min(args.minibatch_size, 64 * args.num_steps)),
            ]
    output_of(script, [*arguments, *brief, "--device", "cpu"], ".")


def train_elsewhere(words: list[str]):
    """Parsed only: another test file runs it (--track, --profile, TPUs), or it needs a display (--render)."""
    parse(words[1], words[2:])


def torchrun(words: list[str]):
    """torchrun reads its part, the script reads its own, and the numbers split over the ranks. tests/test_ddp.py runs such."""
    start = words.index("torch.distributed.run") + 1 if "torch.distributed.run" in words else 1
    arguments = torch.distributed.run.parse_args(words[start:])
    args = parse(arguments.training_script, arguments.training_script_args)
    ranks = int(arguments.nnodes.split(":")[-1]) * int(arguments.nproc_per_node)
    assert args.num_envs % ranks == 0 and args.minibatch_size % (args.num_steps * ranks) == 0, (
        "does not split"
    )


def sbatch(words: list[str]):
    """Slurm's file is there, and the script reads what follows it."""
    script = next(word for word in words if word.endswith(".sh"))
    assert pathlib.Path(script).exists()
    parse("ppo_lstm_puffer_ddp.py", words[words.index(script) + 1 :])


def sweep(words: list[str]):
    """Parsed, and the study made. tests/test_sweep.py runs such."""
    made = protein_sweep.prepare(words[2:])
    if made.args.script in SCRIPTS:
        parse(made.args.script, ["--env-id", made.args.env_id, *made.args.fixed])
    assert (made.folder / "study.db").exists()


class Parsed(Exception):
    """A program's arguments were read."""


def read_arguments(words: list[str]):
    """Runs a program of ours up to where argparse has read its arguments: these take from minutes to hours."""
    script, *arguments = words[1:]
    read = argparse.ArgumentParser.parse_known_args

    def parse_known_args(parser, *given):
        _, unknown = read(parser, *given)
        assert not unknown, f"{script}: unknown arguments {unknown}"
        raise Parsed

    assert ".parse_args(" in pathlib.Path(script).read_text()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Parsed):
        patch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_args)
        patch.setattr(sys, "argv", [script, *arguments])
        patch.syspath_prepend(str(pathlib.Path(script).parent))
        runpy.run_path(script, run_name="__main__")
    for word in arguments:
        assert not word.startswith(("benchmark/", "recipes/")) or pathlib.Path(word).exists(), word


def tool(words: list[str]):
    """Run as written, in a process of its own; playing four episodes, and with PufferLib's format in place of ONNX, which takes
    half a minute. tests/test_tools.py says more of them."""
    brief = {
        "play.py": ["--episodes", "4", "--num-envs", "4"],
        "watch.py": ["--once"],
        "export.py": [],
        "repeat.py": ["--steps", "1"],
    }
    brief["play.py"] += ["--env.frameskip", "16"] * ("--gif" in words)  # a short film
    arguments = [word.replace(".onnx", ".bin") for word in words[2:]]
    output_of(words[1], [*arguments, *brief[pathlib.Path(words[1]).name]], ".")


def make(words: list[str]):
    """The target exists, and every program of ours in its recipe is a command as any other."""
    result = subprocess.run(
        ["make", "-n", "-o", "setup", "-o", "setup-xla", *words[1:]], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    recipe = [
        command
        for line in result.stdout.replace("\\\n", " ").splitlines()
        for command in words_of(line)
    ]
    ours = [
        command
        for command in recipe
        if re.search(
            r"^\S*/python (((benchmark|tools)/)?\w+\.py|-m (torch|pytest))|\bbash benchmark/gpu\.sh",
            " ".join(command),
        )
    ]
    assert ours, f"no program in the recipe of {words}:\n{result.stdout}"
    for command in ours:
        check(command)


def run(words: list[str], codes=(0,)):
    result = subprocess.run(words, capture_output=True, text=True)
    assert result.returncode in codes, result.stderr


def find_differences(words: list[str]):
    run(words, codes=(0, 1))


def in_a_wrapper(words: list[str]):
    """xvfb-run -s SCREEN command, taskset -c CORES [command], NAME=VALUE command."""
    start = {"xvfb-run": 3, "taskset": 3}.get(words[0], 1)
    if words[start:]:
        check(words[start:])


def not_here(words: list[str]):
    """Only a command of ours within it, such as what gcloud is to run on a TPU's machine, is checked."""
    for word in words:
        if word.startswith("--command="):
            for inner in words_of(word.partition("=")[2]):
                check(inner)


PYTHON = r"\S*python "
RULES = (
    *((pattern, not_here) for pattern in ELSEWHERE),
    (r"make help$", run),
    (r"make ", make),
    (r"(xvfb-run|taskset|\w+=\S*) ", in_a_wrapper),
    (PYTHON + r"ppo_lstm_puffer_xla\.py|" + PYTHON + r"ppo.* --(track|profile)\b", train_elsewhere),
    (PYTHON + r"tools/play\.py .*--render", not_here),  # needs a display
    (PYTHON + r"(ppo_lstm_puffer|my_ppo)\.py( |$)", train),
    (r"torchrun |" + PYTHON + r"-m torch\.distributed\.run ", torchrun),
    (r"sbatch ", sbatch),
    (r"bash benchmark/gpu\.sh", not_here),  # tests/test_benchmark.py runs it
    (PYTHON + r"-m pytest", not_here),  # this one
    (PYTHON + r"protein_sweep\.py( |$)", sweep),
    (PYTHON + r"tools/\w+\.py", tool),
    (PYTHON + r"benchmark/\w+\.py", read_arguments),
    (r"(cp|patch) ", run),
    (r"diff ", find_differences),
)


def check(words: list[str]):
    rule = next((rule for pattern, rule in RULES if re.match(pattern, " ".join(words))), None)
    assert rule, f"no rule of tests/test_readme.py fits `{shlex.join(words)}`"
    try:
        rule(words)
    except (protein_sweep.UsageError, SystemExit) as error:
        pytest.fail(f"{shlex.join(words)}: {error}")


def check_line(line: str, clone: pathlib.Path):
    for name, ours in STANDS_FOR.items():
        line = line.replace(name, ours.format(run=clone.name))
    for words in words_of(line):
        check(words)


@pytest.mark.parametrize("line", commands_in(README), ids=lambda line: line[:90])
def test_command_works(line, clone):
    check_line(line, clone)


# What else README.md says.


@pytest.mark.parametrize(
    "line",
    [
        "python ppo_lstm_puffer.py --env-idd breakout",
        "python ppo_lstm_puffer.py --env-id breakot",
        "python tools/play.py runs/NONE",
        "python ppo_lstm_puffer.py --env-id breakout --trakc",
        ".venv-xla/bin/python ppo_lstm_puffer_xla.py --precision float16",
        'gcloud ssh x --command="cd y && .venv-xla/bin/python ppo_lstm_puffer_xla.py --num-env 4096"',
        "torchrun --standalone --nproc-per-nodes=2 ppo_lstm_puffer_ddp.py",
        "torchrun --standalone --nproc-per-node=3 ppo_lstm_puffer_ddp.py",
        "python protein_sweep.py --workers 0",
        "python protein_sweep.py -- --num-env 512",
        "python benchmark/report.py",
        "python benchmark/sweep.py --seed-s 3",
        'make train ARGS="--env-idd pong"',
        "make trian",
        "patch -o my_ppo.py ppo_lstm_puffer.py recipes/none.patch",
        "frobnicate --all",
        "sbatch benchmark/slurm.sh --num-env 512",
    ],
)
def test_wrong_command_is_found(line, clone):
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check_line(line, clone)


def test_output_shown_is_what_a_run_prints(finished):
    """Line by line the same but for numbers."""

    def forms(lines: list[str]) -> set[str]:
        return {re.sub(r"[\d.]+|(float32|bfloat16)$", "0", line) for line in lines}

    (shown,) = (block for block in code_blocks(README) if block.startswith("cpu, "))
    *lines, rest = shown.splitlines()
    assert rest == "..."
    compiling = next(line for line in lines if line.startswith("compiling: "))  # not in the tests
    assert compiling in (ROOT / "ppo_lstm_puffer.py").read_text()
    printed = forms(finished[1].splitlines()) | forms([compiling])
    assert forms(lines) - printed == set()


def test_flags_in_the_text_exist():
    flags = {
        flag
        for span in code_spans(README)
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", span)
        if "gcloud" not in span
    }
    fields = {field for script in SCRIPTS for field in vars(parse(script, []))} | set(
        vars(protein_sweep.Args())
    )
    fields |= {"episodes", "deterministic", "render", "gif", "out"}  # of tools/
    known = {"--" + name.replace("_", "-") for name in fields} | {"--help"}
    known |= {"--no-" + name.removeprefix("--") for name in known} | FOREIGN_FLAGS
    known |= set(torch.distributed.run.get_args_parser()._option_string_actions)
    assert {flag for flag in flags if flag not in known and not flag.startswith("--env")} == set()


def links_of(page: pathlib.Path) -> list[str]:
    """The targets of its links to files of this repository."""
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    return [link for link in links if not link.startswith("http")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_links_lead_somewhere(page):
    text = PAGES[page]
    spans = [
        span
        for span in code_spans(text)
        if re.fullmatch(r"[\w.-]+/[\w./-]+\.(py|md|yaml|sh|patch|txt)", span)
    ]
    missing = [
        span
        for span in spans
        if not span.startswith(("runs/", "sweeps/")) and not (ROOT / span).exists()
    ]
    for target in links_of(page):
        assert "#" not in target, "pages are short: link to the page"
        missing += [target] * (not (page.parent / target).exists())
    assert missing == []


def test_links_of_the_reports_and_recipes_lead_somewhere():
    pages = [*ROOT.glob("recipes/*.md"), *ROOT.glob("benchmark/**/*.md")]
    links = [page.parent / link.partition("#")[0] for page in pages for link in links_of(page)]
    assert len(links) > 50 and [link for link in links if not link.exists()] == []


def test_every_page_is_linked_from_the_readme():
    assert [
        page.name
        for page in PAGES
        if page.parent.name == "docs" and f"docs/{page.name}" not in PAGES[ROOT / "README.md"]
    ] == []


@pytest.mark.parametrize(
    "given, sizes",
    [
        ("", True),
        ("--seed 2", True),
        ("--env-id pong", False),
        ("--config=x", False),
        ("--resume x", False),
    ],
)
def test_make_train_takes_the_sizes_of_a_gpu_unless_others_are_given(tmp_path, given, sizes):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    words = ["make", "-n", "--no-print-directory", "-o", "setup", "train", f"ARGS={given}"]
    path = f"{tmp_path}:{os.environ['PATH']}"
    line = subprocess.run(
        words, cwd=ROOT, env=os.environ | {"PATH": path}, capture_output=True, text=True
    ).stdout
    assert ("--config configs/cuda.yaml" in line) == sizes and line.rstrip().endswith(given)


def test_places_to_change_exist():
    (table,) = re.findall(r"^\| to change \|.*?\n\n", README, re.M | re.S)
    names = [
        name
        for row in table.splitlines()[2:]
        for name in re.findall(r"`([^`]+)`", row.rpartition("|")[0].rpartition("|")[2])
    ]
    assert (
        len(names) > 5
        and [name for name in names if not hasattr(ppo, name) and "(" not in name] == []
    )


@pytest.mark.parametrize("changed", ["requirements.txt", "pufferlib.patch", "adapters.py"])
def test_setup_installs_again_where_what_it_installs_has_changed(tmp_path, changed):
    (tmp_path / ".installed").touch()
    make = ["make", "-n", "--no-print-directory", "setup", f"VENV={tmp_path}"]
    for words, installs in (make, False), ([*make, "-W", changed], True):
        said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout
        assert ("install_pufferlib.sh" in said) == installs


def test_an_installation_that_does_not_fit_the_disk_is_refused_before_it_begins(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import shutil, types\nshutil.disk_usage = lambda _: types.SimpleNamespace(free=1_500_000_000)\n"
    )
    done = subprocess.run(
        ["make", "setup", f"VENV={tmp_path}/venv", f"PYTHON={sys.executable}"], timeout=60,
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(tmp_path), "MAKEFLAGS": ""},
    )  # fmt: skip
    assert done.returncode, "the installation began"
    assert f"{tmp_path}/venv needs 3 GB to be installed, this disk has 1.5 left" in done.stderr
    assert not (tmp_path / "venv").exists()
