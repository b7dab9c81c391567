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
import contextlib
import datetime
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
BENCHMARK = ROOT / "benchmark"
REPORT = BENCHMARK / "reports" / "tryout"
VENVS = ROOT / ".tryout"
SIZES = "--num-envs 8 --num-steps 16 --minibatch-size 128 --hidden-size 32 --total-timesteps 2048 "
SIZES += "--no-compile --precision float32 --device cpu --num-workers 0"
VARIABLES = {"OMP_NUM_THREADS": "1", "SDL_VIDEODRIVER": "dummy"}
LONGEST = 900  # seconds for a command: beside other work they are slow
LONGEST_INSTALL = 1200
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


def read_list(path: Path) -> tuple[list[dict], dict, dict]:
    """Environments, what pip installs for each package, and packages that are left out, with why.

    An environment is the words after --env-id, or a mapping: words; refused, a pattern of the line
    that refuses it; remark.
    """
    content = yaml.safe_load(path.read_text())
    entries = []
    installs = {}
    for package, item in content["packages"].items():
        installs[package] = item.get("install", package)
        for entry in item["environments"]:
            entry = {"words": entry} if isinstance(entry, str) else entry
            entries.append({"package": package, **entry})
    return entries, installs, content["left_out"]


def execute(command: list, folder: Path, limit: float, **variables) -> tuple[int, str, str]:
    """Its exit code, stdout and stderr. After so many seconds it is killed with its children."""
    outputs = [folder / "stdout", folder / "stderr"]
    env = os.environ | VARIABLES | variables
    with outputs[0].open("w") as out, outputs[1].open("w") as err:
        options = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err, "env": env}
        command = [str(word) for word in command]
        process = subprocess.Popen(command, cwd=folder, start_new_session=True, **options)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = 124
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    out, err = (path.read_text(errors="replace") for path in outputs)
    return code, out, f"{err}\nnot over after {limit} s" if code == 124 else err


def last_line(text: str, folder: Path) -> str:
    """The line that gives the reason, without the paths of this machine."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no output"]
    line = next((line for line in lines if line.startswith("error: ")), lines[-1])
    for path in (folder, ROOT, Path.home()):
        line = line.replace(f"{path}/", "").replace(str(path), "")
    line = re.sub(r"(?<!\w)/[\w.+/-]*/", "", line)
    return re.sub(r"https?://\S+", "...", line)[:300]


# Installing ---------------------------------------------------------------------------------------


def python_of(package: str) -> Path:
    return VENVS / package / "bin" / "python"


def install(package: str, words: str) -> str:
    """Empty, or the line by which it failed."""
    folder = VENVS / package
    done = folder / "installed"
    if done.exists() and done.read_text() == words:
        return ""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    steps = [[sys.executable, "-m", "venv", "--without-pip", folder]]
    steps += [[sys.executable, "-m", "pip", "--python", python_of(package), "install", "--quiet"]]
    steps[1] += shlex.split(words)
    for command in steps:
        code, out, err = execute(command, folder, LONGEST_INSTALL)
        if code:
            return last_line(out + err, folder)
        for packages in folder.glob("lib/*/site-packages"):  # after its own: those come first
            Path(packages, "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    done.write_text(words)
    return ""


def versions_of(package: str) -> dict[str, str]:
    """The package's, and those of what it brings in another version than this environment has."""
    names = [package, *SHARED]
    _, out, _ = execute([python_of(package), "-c", VERSIONS, *names], VENVS / package, LONGEST)
    found = json.loads(out)
    others = {name: found[name] for name in SHARED if found[name] != version(name)}
    return {package: found[package], **others}


# Trying -------------------------------------------------------------------------------------------


class Trial:
    """One environment, in a folder of its own. A stage returns its text and whether it is well."""

    def __init__(self, entry: dict, folder: Path):
        self.entry = entry
        self.words = shlex.split(entry["words"])
        self.folder = folder
        self.remarks = [entry["remark"]] if "remark" in entry else []
        shutil.copytree(ROOT / "envs", folder / "envs")  # modules of the current folder

    def python(self, script: str, *words) -> tuple[int, str, str]:
        command = [python_of(self.entry["package"]), ROOT / script, *words]
        return execute(command, self.folder, LONGEST)

    def judge(self, code: int, out: str, err: str, well: bool, text: str = "ok") -> tuple:
        if code == 0 and well:
            return text, True
        reason = last_line(out + err, self.folder)
        return f"exit code {code}: {reason}" if code > 1 else reason, False

    def rows(self) -> list[dict]:
        """Of metrics.jsonl. The last one says how the run ended."""
        [self.run] = self.folder.glob("runs/*")
        return [json.loads(line) for line in (self.run / "metrics.jsonl").open()]

    def trained(self, result: tuple[int, str, str], steps: int) -> tuple[str, bool]:
        code, out, err = result
        if code:
            return self.judge(code, out, err, False)
        rows = self.rows()
        losses = [value for row in rows for name, value in row.items() if name.startswith("losses")]
        well = rows[-1].get("exit_reason") == "completed" and rows[-1]["step"] >= steps
        self.step = rows[-1]["step"]
        well = well and len(losses) > 0 and all(map(math.isfinite, losses))
        return self.judge(code, out, err, well)

    def start(self) -> tuple[str, bool]:
        result = self.python("ppo_lstm_puffer.py", "--env-id", *self.words, *SIZES.split())
        remarks = re.findall(r"^(?:observation|warning): .*", result[2], re.MULTILINE)
        remarks = [last_line(line, self.folder) for line in dict.fromkeys(remarks)]
        self.remarks += remarks if len(remarks) < 3 else [remarks[0], "and more like that"]
        if "refused" in self.entry:
            code, out, err = result
            line = last_line(out + err, self.folder)
            well = code in (1, 2) and re.search(self.entry["refused"], line)
            return f"refused: {line.removeprefix('error: ')}", bool(well)
        return self.trained(result, 2048)

    def by_hand(self) -> tuple[str, bool]:
        code, out, err = self.python("benchmark/by_hand.py", *self.words)
        return self.judge(code, err, out, True, out.strip().splitlines()[-1] if out else "")

    def resume(self) -> tuple[str, bool]:
        steps = self.step + MORE_STEPS
        words = ["--resume", self.run, "--total-timesteps", steps]
        return self.trained(self.python("ppo_lstm_puffer.py", *words), steps)

    def play(self) -> tuple[str, bool]:
        words = [self.run, "--episodes", 2, "--max-steps", 200]
        code, out, err = self.python("tools/play.py", *words)
        played = json.loads(out.splitlines()[-1]) if code == 0 else {}
        well = played.get("episodes") == 2 and math.isfinite(played["episodic_return"]["mean"])
        return self.judge(code, out, err, well)

    def export(self) -> tuple[str, bool]:
        path = self.folder / "policy.onnx"
        code, out, err = self.python("tools/export.py", self.run, "--out", path)
        return self.judge(code, out, err, path.exists())


def try_out(entry: dict, versions: dict | str) -> dict:
    """All stages. The first one decides whether there are others."""
    today = datetime.date.today().isoformat()
    record = {"package": entry["package"], "env": entry["words"], "date": today, "commit": commit()}
    if isinstance(versions, str):
        return record | {"start": f"not installed: {versions}", "well": False}
    record["versions"] = versions
    with tempfile.TemporaryDirectory(prefix="tryout-") as folder:
        trial = Trial(entry, Path(folder))
        well = True
        for stage in STAGES:
            try:
                record[stage], fine = getattr(trial, stage)()
            except Exception as error:  # of this program: it goes on
                record[stage] = last_line(f"tryout.py: {error!r}", Path(folder))
                fine = False
            well = well and fine
            if stage == "start" and (not fine or "refused" in entry):
                break
    return record | {"remarks": trial.remarks, "well": well}


def commit() -> str:
    """Of what is tried out, and whether it has changes."""
    git = ["git", "-C", str(ROOT)]
    files = ["ppo_lstm_puffer.py", "adapters.py", "pufferlib.patch", "tools"]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *files]).returncode
    return head.stdout.strip() + (" with changes" if changed else "")


# The report ---------------------------------------------------------------------------------------


def cell(value: str) -> str:
    return value.replace("|", "\\|").replace("<", "&lt;")


def report(records: list[dict], installs: dict, left_out: dict) -> str:
    versions = {package: {} for package in installs}
    for record in records:
        versions[record["package"]] = record.get("versions", {})
    packages = {package for package in versions if versions[package]}
    dates = sorted({record["date"] for record in records})
    commits = sorted({record["commit"] for record in records})
    refused = sum(record["start"].startswith("refused") for record in records)
    well = sum(record["well"] for record in records)
    counted = sum("steps" in record.get("by_hand", "") for record in records if record["well"])
    shared = ", ".join(f"{name} {version(name)}" for name in ("torch", *SHARED))
    lines = [
        "# Environments that people bring",
        "",
        f"{len(records)} environments of {len(packages)} packages: {well} as they should be, of "
        f"which {refused} are refused with a line. Of {counted} the return was counted by hand.",
        "",
        f"{', '.join(dates)}, commit {', '.join(commits)}, Python "
        f"{platform.python_version()}, {shared}, unless a package brings another.",
        "",
        "Made by `python benchmark/tryout.py`, which says more. Each environment is trained by",
        "",
        f"    python ppo_lstm_puffer.py --env-id ENVIRONMENT {SIZES}",
        "",
        f"and {MORE_STEPS} steps more with --resume. *Return "
        "by hand*: an environment is stepped with random actions by its package alone, then with "
        "the same ones through the adapters; the returns and lengths of all episodes were the "
        "same, and the sum of all that was observed. Some environments differ from run to run by "
        "themselves, with the same seed: those are compared as far as they do not, or not at all. "
        "The number is the sum of the returns (of "
        "all agents), the ends are those of episodes.",
        "",
        f"| package | environment | {' | '.join(STAGES.values())} | remarks |",
        f"|---|---|{'---|' * len(STAGES)}---|",
    ]
    for record in records:
        stages = [record.get(stage, "") for stage in STAGES]
        name = " ".join([record["package"], versions[record["package"]].get(record["package"], "")])
        cells = [name, f"`{record['env']}`", *stages, "; ".join(record.get("remarks", []))]
        lines.append(f"| {' | '.join(map(cell, cells))} |")
    lines += ["", "What pip was asked for, where it is not the package's name:", ""]
    for package, words in installs.items():
        others = [f"{name} {number}" for name, number in versions[package].items()]
        brings = f"; brings {', '.join(others[1:])}" if others[1:] else ""
        if words != package or brings:
            lines.append(f"- {package}: `pip install {words}`{brings}")
    lines += ["", "Left out:", ""]
    lines += [f"- {package}: {why}" for package, why in left_out.items()]
    return "\n".join(lines) + "\n"


def main(words: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--only", nargs="+", default=[], help="packages, or ids of environments")
    parser.add_argument("--fresh", action="store_true", help="also what went well before")
    parser.add_argument("--jobs", type=int, default=1, help="environments at a time")
    args = parser.parse_args(words)
    entries, installs, left_out = read_list(BENCHMARK / "tryout.yaml")
    path = REPORT / "results.jsonl"
    REPORT.mkdir(parents=True, exist_ok=True)
    done = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        record = json.loads(line)
        done[record["env"]] = record

    def wanted(entry: dict) -> bool:
        names = {entry["package"], *entry["words"].split()[:1]}
        again = args.fresh or not done.get(entry["words"], {}).get("well")
        return again and (not args.only or bool(names & {*args.only}))

    def write():
        records = [done[entry["words"]] for entry in entries if entry["words"] in done]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        if records:
            (REPORT / "report.md").write_text(report(records, installs, left_out))

    todo = [entry for entry in entries if wanted(entry)]
    versions = {}
    for package in dict.fromkeys(entry["package"] for entry in todo):
        versions[package] = install(package, installs[package]) or versions_of(package)
        print(f"{package}: {versions[package]}", flush=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        for record in pool.map(lambda entry: try_out(entry, versions[entry["package"]]), todo):
            done[record["env"]] = record
            write()
            print(json.dumps(record), flush=True)
    write()
    bad = [entry["words"] for entry in entries if not done.get(entry["words"], {}).get("well")]
    print(f"{len(entries)} environments, not as they should be: {bad or 'none'}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
