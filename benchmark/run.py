"""Runs a plan: each cell (program, environment, seed) in a process of its own, one after another.

    python benchmark/run.py benchmark/plans/cpu.yaml --out auto    # goes on where it stopped
    python benchmark/run.py benchmark/plans/cpu.yaml --out DIR --only speed ranks --cores 0 1

A plan is a YAML list of groups:

    - name: speed
      kind: speed              # what the report makes of it: one of KINDS; warm_up is nothing
      programs:                # name: what it is (one of PROGRAMS), and what is special about it
        ours: {program: ours}
        one thread: {program: ours, args: [--num-envs, 512], env: {OMP_NUM_THREADS: 1}, cores: [0]}
        preset: {program: ours, args: [--config, "configs/{env}.yaml"], seeds: [1]}
        two ranks: {program: ours, script: ppo_lstm_puffer_ddp.py, launcher: [-m, ...]}
        a recipe: {program: ours, script: recipes/gru.patch}    # the reference with this recipe
      envs: [breakout]
      seeds: [1, 2, 3]
      duration: 40             # seconds of each run after its first update, or steps: N, or neither
      interleave: true         # A B A B ...: a machine that drifts hurts both alike
      cold: true               # each run starts with an empty compile cache
      timeout: 600             # seconds after which a cell is ended and has failed
      solved: 850              # kind learning: find the first checkpoint that plays this score
      games: 32                # kind learning: this many are played at the end instead of 128

Every program leaves a metrics.jsonl with a row now and then ("step", "time", and what it likes)
and a last one, with "exit_reason". The time of ours counts from the first update on, that of the
others from their start.

DIR/cells.jsonl gets a line for each cell; the last line of a cell counts. Two processes may add to
it at once, each on cores of its own. --out auto is the folder of this kind of CPU in
benchmark/reports. A finished cell (stored with the same command, environment variables and cores)
is not run again, unless --fresh. A failed one is stored with the end of its output, the others
run, and the exit code is 1. Then: python benchmark/report.py DIR
"""

import argparse
import bisect
import contextlib
import fcntl
import itertools
import json
import math
import operator
import os
import pathlib
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version

import psutil
import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent
CPUINFO = pathlib.Path("/proc/cpuinfo")
PROGRAMS = {
    "ours": "ppo_lstm_puffer.py",
    "random": "benchmark/peers/random_policy.py",
    "pufferl": "benchmark/peers/pufferl.py",
    "sb3": "benchmark/peers/sb3.py",
}
PEERS = ("pufferl", "sb3")  # each has a virtual environment in .peers
KINDS = ("speed", "learning", "startup", "warm_up")
OPTIONAL = ("duration", "solved", "games")  # what a cell has of its group
GROUP_KEYS = ("name", "kind", "programs", "envs", "seeds", "steps", "interleave", "cold", "timeout")
GROUP_KEYS += OPTIONAL
PROGRAM_KEYS = ("program", "args", "env", "cores", "script", "launcher", "seeds")
CPUS = {  # flag in /proc/cpuinfo: instruction set, kind of CPU; the first that is there
    "amx_bf16": ("AMX-BF16", "cpu-amx"),
    "avx512_bf16": ("AVX512-BF16", "cpu-bf16"),
    "avx512f": ("AVX512", "cpu-avx512"),
    "avx2": ("AVX2", "cpu-avx2"),
    "bf16": ("Arm BF16", "cpu-arm"),
    "asimd": ("Arm NEON", "cpu-arm"),
}
# Of this environment, in which ours runs; the peers note their own.
VERSIONS = {name: version(name) for name in ("torch", "numpy", "gymnasium", "pufferlib")}
VERSIONS["python"] = platform.python_version()
WHICH = operator.itemgetter("group", "name", "env_id", "seed")  # what tells cells apart
SAME = operator.itemgetter("command", "environment", "cores", "cold")  # measured alike


# From a plan to cells -----------------------------------------------------------------------------


def read_plan(path: pathlib.Path) -> dict[str, dict]:
    """Its groups by their names."""
    plan = yaml.safe_load(path.read_text())
    groups = {group["name"]: group for group in plan}
    if len(groups) < len(plan):
        raise ValueError("two groups have the same name")
    return groups


def check(where: str, what: str, given, known):
    for value in given:
        if value not in known:
            raise ValueError(f"{where}: {what} {value}: must be one of {', '.join(known)}")


def expand(group: dict, cores: list[int]) -> list[dict]:
    """The cells of a group in the order in which they run. Raises ValueError if it is wrong."""
    check(group["name"], "key", group, GROUP_KEYS)
    check(group["name"], "kind", [group["kind"]], KINDS)
    environments = group.get("envs", ["breakout"])
    cells = []
    for (name, program), env_id in itertools.product(group["programs"].items(), environments):
        where = f"{group['name']}, {name}"
        check(where, "key", program, PROGRAM_KEYS)
        check(where, "program", [program["program"]], PROGRAMS)
        cell = {"group": group["name"], "kind": group["kind"], "name": str(name), "env_id": env_id}
        cell |= {key: group.get(key) for key in OPTIONAL}
        cell["timeout"] = group.get("timeout", (cell["duration"] or 3000) + 600)
        cell["cold"] = group.get("cold", False)
        cell["program"] = program["program"]
        cell["environment"] = {key: str(value) for key, value in program.get("env", {}).items()}
        cell["cores"] = program.get("cores", cores)
        if not set(cell["cores"]) <= set(range(os.cpu_count())):
            raise ValueError(f"cores {cell['cores']}: this machine has {os.cpu_count()}")
        for seed in program.get("seeds", group.get("seeds", [1])):
            words = command(group, program, env_id, seed)
            cells.append(cell | {"seed": seed, "command": words})
    if group.get("interleave"):
        cells.sort(key=lambda cell: cell["seed"])
    return cells


def command(group: dict, program: dict, env_id: str, seed: int) -> list[str]:
    """As it is run in the repository's folder; DIR is the temporary folder that it writes to."""
    kind = program["program"]
    python = ROOT / f".peers/{kind}/bin/python" if kind in PEERS else pathlib.Path(sys.executable)
    python = python.relative_to(ROOT) if python.is_relative_to(ROOT) else "python"
    words = [python, *program.get("launcher", []), program.get("script", PROGRAMS[kind])]
    words += ["--env-id", env_id, "--seed", seed]
    flags = ["--total-timesteps", "--time-limit", "--output-dir"]
    if kind != "ours":
        flags = ["--steps", "--seconds", "--folder"]
    for flag, value in zip(flags, (group.get("steps"), group.get("duration"), "DIR")):
        if value is not None:
            words += [flag, value]
    words += program.get("args", [])
    return [str(word).replace("{env}", env_id) for word in words]


# Stored cells -------------------------------------------------------------------------------------


@contextlib.contextmanager
def cells_file(folder: pathlib.Path):
    """cells.jsonl of a report's folder, while no other process has it. Writes go to its end."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "cells.jsonl", "ab+", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        yield file


def read_cells(folder: pathlib.Path) -> dict[tuple, dict]:
    """The last line of each cell, by WHICH."""
    if not (folder / "cells.jsonl").exists():
        return {}
    with cells_file(folder) as file:
        cells = [json.loads(line) for line in whole_lines(file)]
    return {WHICH(cell): cell for cell in cells}


def whole_lines(file) -> list[bytes]:
    """Without a last one of which a full disk or a kill left a part."""
    return [line for line in file.readall().splitlines(keepends=True) if line.endswith(b"\n")]


def store(cell: dict, folder: pathlib.Path):
    with cells_file(folder) as file:
        file.truncate(sum(map(len, whole_lines(file))))
        file.write(f"{json.dumps(cell)}\n".encode())


def forget(cells: list[dict], folder: pathlib.Path):
    """Drops what is stored of the same groups and programs."""
    of = operator.itemgetter("group", "program")
    dropped = {of(cell) for cell in cells}
    with cells_file(folder) as file:
        kept = [line for line in whole_lines(file) if of(json.loads(line)) not in dropped]
        file.truncate(0)
        file.write(b"".join(kept))


def is_finished(cell: dict, stored: dict[tuple, dict]) -> bool:
    same = stored.get(WHICH(cell), {"status": "missing"})
    return same["status"] == "ok" and SAME(same) == SAME(cell)


# One cell: run it, watch it, read what it left ----------------------------------------------------


def start(cell: dict, folder: str, log) -> psutil.Popen:
    """Starts the cell's process in a group of its own, on its cores."""
    environment = os.environ | cell["environment"]
    if cell["cold"]:
        environment["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}-cache"
    words = [folder if word == "DIR" else word for word in cell["command"]]
    words[0] = sys.executable if words[0] == "python" else str(ROOT / words[0])
    if words[1].endswith(".patch"):
        copy = f"{folder}-{pathlib.Path(words[1]).stem}.py"
        patch = ["patch", "-s", "-o", copy, ROOT / PROGRAMS["ours"], ROOT / words[1]]
        subprocess.run(patch, check=True, stdout=log, stderr=log)
        words[1] = copy
    options = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL, "start_new_session": True}
    ours = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cell["cores"])  # a child has the affinity of who starts it
    try:
        return psutil.Popen(words, cwd=ROOT, env=environment, **options)
    finally:
        os.sched_setaffinity(0, ours)


def read_rows(folder: str | pathlib.Path) -> tuple[list[dict], dict]:
    """The rows of the metrics.jsonl somewhere in a folder, and the last one, which says how it
    ended ({}: not yet). Before what ours has logged stands a row of its first update, at which its
    time begins."""
    rows = []
    for path in pathlib.Path(folder).rglob("metrics.jsonl"):
        for text in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # one that is being written
                rows.append(json.loads(text))
    last = next((row for row in rows if "exit_reason" in row), {})
    rows = [row for row in rows if "exit_reason" not in row]
    if rows and rows[0].get("iteration", 1) > 1:  # ours logs every tenth
        step = rows[0]["step"] // rows[0]["iteration"]
        rows.insert(0, {"step": step, "iteration": 1, "time": 0.0})
    return rows, last


def watch(process: psutil.Popen, folder: str, since: float, timeout: float, family: set) -> dict:
    """Until the process ends: the seconds to its first update, and the peak resident memory of it
    and its children, which `family` gets. So seldom that the watched does not notice."""
    first_update = None
    peak = 0
    sampled = 0.0
    while process.poll() is None:
        now = time.perf_counter() - since
        if now > timeout:
            raise TimeoutError(f"ended after the timeout of {timeout:g} seconds")
        if first_update is None and (rows := read_rows(folder)[0]):
            since_then = rows[-1]["time"] if "iteration" in rows[0] else 0.0
            first_update = now - since_then
        if now - sampled > 0.5:
            sampled = now
            with contextlib.suppress(psutil.Error):  # it, or one of them, has just ended
                members = [process, *process.children(recursive=True)]
                family.update(members)
                peak = max(peak, sum(member.memory_info().rss for member in members))
        time.sleep(0.05)
    return {"seconds_to_first_update": first_update, "peak_rss_mib": peak / 2**20}


def stop(process: psutil.Popen, family: set[psutil.Process]):
    """Ends the process, its group, and its children outside of it: nothing goes on using a core."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        for member in family:
            with contextlib.suppress(psutil.Error):
                member.send_signal(number)
        psutil.wait_procs({process, *family}, timeout=5)


def measure(cell: dict) -> dict:
    """Runs a cell and returns all that is known about it; "status" is ok or failed."""
    result = {"status": "ok"} | circumstances()
    error = None
    with tempfile.TemporaryDirectory() as temporary, open(f"{temporary}/log", "w") as log:
        folder = f"{temporary}/run"
        os.mkdir(folder)
        since = time.perf_counter()
        family = set()
        process = None
        try:
            process = start(cell, folder, log)
            result |= watch(process, folder, since, cell["timeout"], family)
        except (TimeoutError, OSError, subprocess.CalledProcessError) as failure:
            error = str(failure)
        finally:
            if process:
                stop(process, family)
        result["wall_seconds"] = time.perf_counter() - since
        output = pathlib.Path(log.name).read_text(errors="replace")
        rows, last = read_rows(folder)
        result = {"versions": VERSIONS} | last | result | from_rows(rows)
        result["hardware"] = hardware(output)
        if process and process.returncode:
            error = error or f"exit code {process.returncode}"
        elif not last:
            error = error or "its metrics.jsonl has no last row"
        elif cell["kind"] == "speed" and not result["sps_steady"]:
            error = error or "it ended before there was a steady speed; was it still compiling?"
        for config in pathlib.Path(folder).glob("*/config.yaml"):  # ours
            result["arguments"] = yaml.safe_load(config.read_text())
            if cell["kind"] == "learning" and not error:
                result |= games_of(cell, folder, config.parent, rows, result)
        if "--nproc-per-node" in cell["command"]:
            ranks = cell["command"][cell["command"].index("--nproc-per-node") + 1]
            result["ranks"] = {"world_size": int(ranks)}
        if error:
            result |= {"status": "failed", "error": error, "output_tail": output[-2000:]}
        # No path of this machine: those in the repository become relative, others the last part.
        text = json.dumps(result).replace(folder, "DIR").replace(f"{ROOT}/", "")
        return json.loads(re.sub(r"(?<![\w.:/-])/(?:[\w.+@~-]+/)+", "", text)) | cell


def games_of(cell: dict, folder: str, run: pathlib.Path, rows: list[dict], result: dict) -> dict:
    """What games after training say of the run, and of its first checkpoint whose games have the
    mean score `solved`, with the seconds from the start of the process until it was written."""
    found = {"played": play(cell, folder, run)}
    logged = {row["iteration"]: row for row in rows}  # --log-interval divides --checkpoint-interval
    for model in sorted(run.glob("model_*.pt")) if cell["solved"] is not None else []:
        row = logged.get(int(model.stem.rpartition("_")[2]))
        score = row and play(cell, folder, model)
        if score and score["episodic_return"]["mean"] >= cell["solved"]:
            seconds = row["time"] + result["seconds_to_first_update"]
            found["first_solved"] = {"step": row["step"], "seconds": seconds}
            break
    return {key: value for key, value in found.items() if value}


def play(cell: dict, folder: str, what: pathlib.Path) -> dict | None:
    """What tools/play.py says of a run's or a checkpoint's games with the most likely actions;
    None if none ends in ten minutes."""
    words = [cell["command"][0], "tools/play.py", str(what), "--deterministic"]
    words += ["--episodes", str(cell["games"] or 128)]
    with open(f"{folder}-played", "w+") as output:
        process = start(cell | {"command": words}, folder, output)
        try:
            process.wait(600)
            output.seek(0)
            played = json.loads(output.read().splitlines()[-1])
        except (psutil.TimeoutExpired, ValueError, IndexError):
            return None
        finally:
            stop(process, set())
    return played if "episodic_return" in played else None


def steady_speed(times: list[float], steps: list[int]) -> float | None:
    """Steps per second from half of the seconds on, before which it compiles; None of one point."""
    if len(times) < 2:
        return None
    first = bisect.bisect_left(times, (times[0] + times[-1]) / 2)
    first = min(first, len(times) - 2)
    return (steps[-1] - steps[first]) / (times[-1] - times[first])


def from_rows(rows: list[dict], points: int = 400) -> dict:
    """What is computed alike for every program: its speed, and its curve, the first row and about
    so many points, each with the mean of the scores (or else returns) since the one before."""
    times = [row["time"] for row in rows]
    result = {"sps_steady": steady_speed(times, [row["step"] for row in rows])}
    every = math.ceil(len(rows) / points) or 1
    parts = [rows[:1], *(rows[i : i + every] for i in range(1, len(rows), every))]
    kept = []
    for part in filter(None, parts):
        scores = [row.get("env/score", row.get("episodic_return")) for row in part]
        scores = [score for score in scores if score is not None]
        kept.append(part[-1] | {"score": statistics.fmean(scores) if scores else None})
    result["curve"] = {}
    for key in ("step", "time", "sps", "score"):
        result["curve"][key] = [row.get(key) and round(row[key], 3) for row in kept]
    return result


# The machine --------------------------------------------------------------------------------------


def kind_of_cpu(info: str) -> tuple[str, str]:
    """Instruction set and kind, from what /proc/cpuinfo says."""
    flags = set(info.split())
    unknown = (platform.machine(), f"cpu-{platform.machine()}")
    return next((both for flag, both in CPUS.items() if flag in flags), unknown)


def report_folder(text: str) -> pathlib.Path:
    if text == "auto":
        return ROOT / "benchmark/reports" / kind_of_cpu(CPUINFO.read_text())[1]
    return pathlib.Path(text)


def hardware(output: str = "") -> dict:
    """Of this machine, and what a script of ours says that it uses: "cpu, 2 threads, bfloat16"."""
    info = CPUINFO.read_text()
    name = re.search(r"^model name\s*: (.*)", info, re.MULTILINE)
    memory = psutil.virtual_memory().total / 2**30
    facts = {"cpu": name[1] if name else platform.processor(), "cores": os.cpu_count()}
    facts |= {"instruction_set": kind_of_cpu(info)[0], "memory_gib": round(memory, 1)}
    said = re.search(r"^(\w+), (\d+) threads, ", output, re.MULTILINE)
    if said and said[1] == "cuda":
        names = output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
        facts["gpu"] = names.partition("\n")[0] or "a GPU"
    elif said:
        facts["threads"] = int(said[2])
    return facts


def output_of(*words: str) -> str:
    """What a program prints; nothing where it is missing or fails."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.check_output(words, cwd=ROOT, text=True, stderr=subprocess.DEVNULL)
    return ""


def repository() -> dict:
    """The commit, and whether a tracked file outside the reports differs from it."""
    commit = output_of("git", "rev-parse", "HEAD").strip()
    changes = output_of("git", "status", "--porcelain", "-uno", "--", ".", ":!benchmark/reports")
    return {"git_commit": commit, "git_dirty": bool(changes)}


def circumstances() -> dict:
    """In which a run starts: when, beside what, and of which commit."""
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"started": started, "load_before": os.getloadavg()[0]} | repository()


# All cells ----------------------------------------------------------------------------------------


def run_all(cells: list[dict], out: pathlib.Path) -> int:
    """Runs and stores cells, one after another. Returns how many failed."""
    failed = 0
    for number, cell in enumerate(cells, 1):
        label = f"{cell['group']} / {cell['name']} / {cell['env_id']} / seed {cell['seed']}"
        print(f"{number} of {len(cells)}: {label}", end="", flush=True)
        result = measure(cell)
        store(result, out)
        facts = [f"{result['wall_seconds']:.0f} s"]
        if result["sps_steady"]:
            facts.append(f"{result['sps_steady']:,.0f} steps/s")
        if scores := [score for score in result["curve"]["score"] if score is not None]:
            facts.append(f"score {scores[-1]:.1f}")
        if result["status"] == "failed":
            failed += 1
            *_, said = ["", *result["output_tail"].strip().splitlines()]
            facts.append(f"FAILED, {result['error']}: {said}")
        print(f": {', '.join(facts)}", flush=True)
    return failed


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("plan", type=pathlib.Path)
    parser.add_argument("--out", type=report_folder, required=True, help="gets cells.jsonl")
    parser.add_argument("--only", nargs="+", metavar="GROUP", help="of the plan, only these groups")
    parser.add_argument("--fresh", action="store_true", help="forget the groups' stored cells")
    parser.add_argument("--cores", nargs="+", type=int, help="of programs without any in the plan")
    args = parser.parse_args(argv)
    cores = sorted(args.cores or os.sched_getaffinity(0))
    try:
        groups = read_plan(args.plan)
        names = args.only or list(groups)
        check("--only", "group", names, groups)
        cells = [cell for name in groups if name in names for cell in expand(groups[name], cores)]
    except KeyError as error:
        parser.error(f"{args.plan}: {error} is missing")
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        parser.error(f"{args.plan}: {error}")
    for peer in PEERS:
        others = [cell for cell in cells if cell["program"] != peer]
        if len(others) < len(cells) and not (ROOT / f".peers/{peer}").exists():
            print(f"skipped: {peer}, which is not installed; `make benchmark-peers` installs it")
            cells = others
    if args.fresh:
        forget(cells, args.out)
    stored = read_cells(args.out)
    todo = [cell for cell in cells if not is_finished(cell, stored)]
    print(f"{len(cells) - len(todo)} of {len(cells)} cells are finished, {len(todo)} to run")
    try:
        failed = run_all(todo, args.out)
    except KeyboardInterrupt:
        print("\ninterrupted; the same command without --fresh goes on", file=sys.stderr)
        return 130
    if failed:
        where = args.out / "cells.jsonl"
        print(f'{failed} failed; see "error" and "output_tail" in {where}', file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # which a shell's background job would ignore
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
