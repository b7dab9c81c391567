"""Environments that people bring, tried out: the evidence for docs/environments.md.

    python benchmark/tryout.py                    # all of tryout.yaml
    python benchmark/tryout.py --only minigrid    # those of a package, or one by its id
    python benchmark/tryout.py --fresh            # also those that went well before

Each package is installed into a virtual environment of its own, .tryout/PACKAGE, which sees the
packages of the one that runs this. Then for each environment: 2,000 steps of training, more of
them with --resume, two games with tools/play.py, tools/export.py to ONNX, and its returns by hand
(benchmark/by_hand.py). benchmark/reports/tryout has the results. Exit code 1: something is not as
it should be.
"""

import argparse
import datetime
import json
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path

import yaml
from run import repository

ROOT = Path(__file__).resolve().parent.parent
BENCHMARK = ROOT / "benchmark"
REPORT = BENCHMARK / "reports" / "tryout"
VENVS = ROOT / ".tryout"
SIZES = "--num-envs 8 --num-steps 16 --minibatch-size 128 --hidden-size 32 --total-timesteps 2048 "
SIZES += "--no-compile --precision float32 --device cpu --num-workers 0"
VARIABLES = {"OMP_NUM_THREADS": "1", "SDL_VIDEODRIVER": "dummy"}
TIMEOUT = 1200  # seconds
MORE_STEPS = 1024  # of --resume
STAGES = {
    "start": "2,000 steps",
    "by_hand": "return by hand",
    "resume": "--resume",
    "play": "play.py",
    "export": "export.py",
}
SHARED = ("gymnasium", "numpy", "pettingzoo", "mujoco")  # a package may bring another version
VERSIONS = "import json; from importlib.metadata import version; import sys; "
VERSIONS += "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"


def read_list() -> tuple[list[dict], dict, dict]:
    """Environments, what pip installs for each package, and packages that are left out, with why.

    An environment is the words after --env-id, or a mapping: words; refused, a pattern of the line
    that refuses it; remark.
    """
    content = yaml.safe_load((BENCHMARK / "tryout.yaml").read_text())
    entries = []
    installs = {}
    for package, item in content["packages"].items():
        installs[package] = item.get("install", package)
        for entry in item["environments"]:
            entry = {"words": entry} if isinstance(entry, str) else entry
            entries.append({"package": package, **entry})
    return entries, installs, content["left_out"]


def execute(command: list, folder: Path) -> tuple[int, str]:
    """Its exit code, and what it prints, errors last."""
    options = {"cwd": folder, "env": os.environ | VARIABLES, "stdin": subprocess.DEVNULL}
    options |= {"capture_output": True, "text": True, "errors": "replace", "timeout": TIMEOUT}
    try:
        done = subprocess.run([*map(str, command)], **options)
    except subprocess.TimeoutExpired:
        return -1, f"not over after {TIMEOUT} s"
    return done.returncode, done.stdout + done.stderr


def last_line(text: str, folder: Path) -> str:
    """The line that gives the reason, without the paths of this machine."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no output"]
    line = next((line for line in lines if line.startswith("error: ")), lines[-1])
    for path in (folder, ROOT, Path.home()):
        line = line.replace(f"{path}/", "").replace(str(path), "")
    line = re.sub(r"(?<!\w)/[\w.+/-]*/", "", line)
    return re.sub(r"https?://\S+", "...", line)[:300]


# Installing ---------------------------------------------------------------------------------------


def install(package: str, words: str) -> str:
    """Empty, or the line by which it failed."""
    folder = VENVS / package
    done = folder / "installed"
    if done.exists() and done.read_text() == words:
        return ""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--quiet"]
    make = [sys.executable, "-m", "venv", "--without-pip", folder]
    for command in make, [*pip, *shlex.split(words)]:
        code, text = execute(command, folder)
        if code:
            return last_line(text, folder)
        for packages in folder.glob("lib/*/site-packages"):  # after its own: those come first
            Path(packages, "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    done.write_text(words)
    return ""


def versions_of(package: str) -> dict[str, str]:
    """The package's, and those of what it brings in another version than this environment has."""
    names = [package, *SHARED]
    command = [VENVS / package / "bin/python", "-c", VERSIONS, *names]
    found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    others = {name: found[name] for name in SHARED if found[name] != version(name)}
    return {package: found[package], **others}


# Trying -------------------------------------------------------------------------------------------


class Trial:
    """One environment, in a folder of its own. A stage returns its text and whether it is well."""

    def __init__(self, entry: dict, folder: Path):
        self.entry = entry
        self.folder = folder
        self.remarks = [entry["remark"]] if "remark" in entry else []
        shutil.copytree(ROOT / "envs", folder / "envs")  # modules of the current folder

    def python(self, script: str, *words) -> tuple[int, str]:
        python = VENVS / self.entry["package"] / "bin/python"
        return execute([python, ROOT / script, *words], self.folder)

    def judge(self, code: int, text: str, well: bool) -> tuple[str, bool]:
        if code == 0 and well:
            return "ok", True
        reason = last_line(text, self.folder)
        return f"exit code {code}: {reason}" if code > 1 or code < 0 else reason, False

    def trained(self, code: int, text: str, steps: int) -> tuple[str, bool]:
        """Whether metrics.jsonl says that it has come so far."""
        if code:
            return self.judge(code, text, False)
        [self.run] = self.folder.glob("runs/*")
        rows = [json.loads(line) for line in (self.run / "metrics.jsonl").open()]
        losses = [value for row in rows for name, value in row.items() if name.startswith("losses")]
        self.step = rows[-1]["step"]
        well = rows[-1].get("exit_reason") == "completed" and self.step >= steps
        return self.judge(code, text, well and len(losses) > 0 and all(map(math.isfinite, losses)))

    def start(self) -> tuple[str, bool]:
        words = [*shlex.split(self.entry["words"]), *SIZES.split()]
        code, text = self.python("ppo_lstm_puffer.py", "--env-id", *words)
        remarks = re.findall(r"^(?:observation|warning): .*", text, re.MULTILINE)
        remarks = [last_line(line, self.folder) for line in dict.fromkeys(remarks)]
        self.remarks += remarks[:2]
        if "refused" not in self.entry:
            return self.trained(code, text, 2048)
        line = last_line(text, self.folder)
        well = code in (1, 2) and re.search(self.entry["refused"], line)
        return f"refused: {line.removeprefix('error: ')}", bool(well)

    def by_hand(self) -> tuple[str, bool]:
        code, text = self.python("benchmark/by_hand.py", *shlex.split(self.entry["words"]))
        lines = [line for line in text.splitlines() if re.search("in .* steps|not counted", line)]
        return (lines[-1], True) if code == 0 and lines else self.judge(code, text, False)

    def resume(self) -> tuple[str, bool]:
        steps = self.step + MORE_STEPS
        words = ["--resume", self.run, "--total-timesteps", steps]
        return self.trained(*self.python("ppo_lstm_puffer.py", *words), steps)

    def play(self) -> tuple[str, bool]:
        words = ["--episodes", 2, "--max-steps", 200]
        code, text = self.python("tools/play.py", self.run, *words)
        well = '"episodes": 2' in text and not re.search("NaN|Infinity", text)
        return self.judge(code, text, well)

    def export(self) -> tuple[str, bool]:
        path = self.folder / "policy.onnx"
        code, text = self.python("tools/export.py", self.run, "--out", path)
        return self.judge(code, text, path.exists())


def try_out(entry: dict, versions: dict | str) -> dict:
    """All stages. The first one decides whether there are others."""
    today = datetime.date.today().isoformat()
    state = repository()
    commit = state["git_commit"][:7] + " with changes" * state["git_dirty"]
    record = {"package": entry["package"], "env": entry["words"], "date": today, "commit": commit}
    if isinstance(versions, str):
        return record | {"start": f"not installed: {versions}", "well": False}
    record["versions"] = versions
    with tempfile.TemporaryDirectory(prefix="tryout-") as folder:
        trial = Trial(entry, Path(folder))
        well = True
        for stage in STAGES:
            record[stage], fine = getattr(trial, stage)()
            well = well and fine
            if stage == "start" and (not fine or "refused" in entry):
                break
    return record | {"remarks": trial.remarks, "well": well}


# The report ---------------------------------------------------------------------------------------


HEAD = """# Environments that people bring

{count} environments of {packages} packages: {well} as they should be, of which {refused} are \
refused with a line. Of {counted} the return was counted by hand.

{dates}, commit {commits}, Python {python}, {shared}, unless a package brings another.

Made by `python benchmark/tryout.py`, which says more; benchmark/tryout.yaml has what pip is asked \
for. Each environment is trained by

    python ppo_lstm_puffer.py --env-id ENVIRONMENT {sizes}

and {more_steps} steps more with --resume. *Return by hand* is benchmark/by_hand.py's: the sum of \
the rewards (of all agents) and the ends of episodes, alike without the adapters and with them. \
Environments that differ from run to run are compared as far as they do not, or not at all.

| package | environment | {stages} | remarks |
|---|---|{lines}---|
"""


def report(records: list[dict], left_out: dict) -> str:
    versions = {record["package"]: record.get("versions", {}) for record in records}
    text = HEAD.format(
        count=len(records),
        packages=sum(map(bool, versions.values())),
        well=sum(record["well"] for record in records),
        refused=sum(record["start"].startswith("refused") for record in records),
        counted=sum("steps" in record.get("by_hand", "") for record in records if record["well"]),
        dates=", ".join(sorted({record["date"] for record in records})),
        commits=", ".join(sorted({record["commit"] for record in records})),
        python=platform.python_version(),
        shared=", ".join(f"{name} {version(name)}" for name in ("torch", *SHARED)),
        sizes=SIZES,
        more_steps=MORE_STEPS,
        stages=" | ".join(STAGES.values()),
        lines="---|" * len(STAGES),
    )
    for record in records:
        package = record["package"]
        cells = [f"{package} {versions[package].get(package, '')}", f"`{record['env']}`"]
        cells += [record.get(stage, "") for stage in STAGES]
        others = [f"{name} {number}" for name, number in versions[package].items()][1:]
        brings = [f"brings {', '.join(others)}"] if others else []
        cells.append("; ".join([*brings, *record.get("remarks", [])]))
        cells = [text.replace("|", "\\|").replace("<", "&lt;") for text in cells]
        text += f"| {' | '.join(cells)} |\n"
    text += "\nLeft out:\n\n"
    return text + "".join(f"- {package}: {why}\n" for package, why in left_out.items())


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--only", nargs="+", default=[], help="packages, or ids of environments")
    parser.add_argument("--fresh", action="store_true", help="also what went well before")
    args = parser.parse_args()
    entries, installs, left_out = read_list()
    stored = REPORT / "results.jsonl"
    before = {record["env"]: record for record in map(json.loads, stored.open())}
    done = {entry["words"]: before.get(entry["words"]) for entry in entries}
    for entry in entries:
        package = entry["package"]
        words = entry["words"]
        if args.only and not {package, words.split()[0]} & {*args.only}:
            continue
        if done[words] and done[words]["well"] and not args.fresh:
            continue
        done[words] = try_out(entry, install(package, installs[package]) or versions_of(package))
        print(json.dumps(done[words]), flush=True)
        stored.write_text("".join(json.dumps(one) + "\n" for one in done.values() if one))
    records = [record for record in done.values() if record]
    (REPORT / "report.md").write_text(report(records, left_out))
    bad = [words for words, record in done.items() if not (record and record["well"])]
    print(f"{len(entries)} environments, not as they should be: {bad or 'none'}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
