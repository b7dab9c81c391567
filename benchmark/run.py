"""Runs a matrix of (program, environment, seed), each cell in a process of its own, and leaves one JSON per cell.

    python benchmark/run.py benchmark/plans/cpu.yaml --out auto     # goes on where it stopped
    python benchmark/run.py benchmark/plans/cpu.yaml --out DIR --only speed ceiling_first --cores 0,1
    python benchmark/run.py --programs ours pufferl --seeds 1 2 3 --duration 40 --interleave --out runs/speed

A plan is a YAML list of groups:

    - name: speed
      kind: speed              # what the report makes of it: one of KINDS; warm_up is nothing
      programs:                # name: what it is (one of PROGRAMS), and what is special about it
        ours: {program: ours}
        one thread: {program: ours, args: [--num-envs, 512], env: {OMP_NUM_THREADS: 1}, cores: [0], x: 512}
        preset: {program: ours, args: [--config, "configs/{env}.yaml"], seeds: [1]}   # {env}: the environment
        two processes: {program: ours, script: ppo_lstm_puffer_ddp.py, launcher: [-m, torch.distributed.run]}
        a recipe: {program: ours, script: recipes/gru.patch}    # the reference with this recipe
      envs: [breakout]
      seeds: [1, 2, 3]
      duration: 40             # seconds of each run after its first update, or steps: N; neither: its own
      interleave: true         # A B A B ...: a machine that drifts hurts both alike
      cold: true               # each run starts with an empty compile cache
      timeout: 600             # seconds after which a cell is ended and has failed
      x_label: environments    # kind scaling: what x is
      solved: 850              # kind learning: also find the first checkpoint that plays this score
      games: 32                # kind learning: so many are played at the end (128), and a table of tasks compares them

Every program leaves a metrics.jsonl with a row now and then ("step", "time", and what it likes) and a last one, with
"exit_reason". The time of ours counts from the first update on, that of the others from their start. --out auto is the folder of this kind of CPU in benchmark/reports: cpu-amx, cpu-bf16, cpu-avx512, cpu-avx2,
cpu-arm. A finished cell (its JSON is there, with the same command, environment variables and cores) is not run again,
unless --fresh. A failed one is recorded with the end of its output, the others run, and the exit code is 1.
Then: python benchmark/report.py DIR
"""

import argparse
import contextlib
import importlib.metadata
import itertools
import json
import os
import pathlib
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable

import psutil
import yaml
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

ROOT = pathlib.Path(__file__).resolve().parent.parent
CPUINFO = pathlib.Path("/proc/cpuinfo")
PROGRAMS = {
    "ours": "ppo_lstm_puffer.py",
    "ceiling": "benchmark/ceiling.py",
    "random": "benchmark/peers/random_policy.py",
} | {peer: f"benchmark/peers/{peer}.py" for peer in ("pufferl", "sb3", "sample_factory")}
KINDS = ("speed", "learning", "ranks", "scaling", "startup", "ceiling", "warm_up")
GROUP_KEYS = {
    "name",
    "kind",
    "programs",
    "envs",
    "seeds",
    "duration",
    "steps",
    "interleave",
    "cold",
}
GROUP_KEYS |= {"timeout", "x_label", "solved", "games"}
PROGRAM_KEYS = {"program", "args", "env", "cores", "x", "script", "launcher", "seeds"}
CPUS = {  # flag in /proc/cpuinfo: instruction set, kind of CPU; the first that is there
    "amx_bf16": ("AMX-BF16", "cpu-amx"),
    "avx512_bf16": ("AVX512-BF16", "cpu-bf16"),
    "avx512f": ("AVX512", "cpu-avx512"),
    "avx2": ("AVX2", "cpu-avx2"),
    "bf16": ("Arm BF16", "cpu-arm"),
    "asimd": ("Arm NEON", "cpu-arm"),
}
SAME = (
    "command",
    "environment",
    "cores",
    "cold",
)  # a stored cell that agrees in these is the same measurement


# From a plan to cells -------------------------------------------------------------------------------------------------


def check_keys(where: str, given: dict, known: set[str]):
    if unknown := set(given) - known:
        raise ValueError(
            f"{where}: unknown {', '.join(sorted(unknown))}; known are {', '.join(sorted(known))}"
        )


def expand(group: dict, cores: list[int]) -> list[dict]:
    """The cells of a group in the order in which they run. Raises ValueError if the plan is wrong."""
    check_keys(group["name"], group, GROUP_KEYS)
    if group["kind"] not in KINDS:
        raise ValueError(
            f"{group['name']}: kind {group['kind']}: must be one of {', '.join(KINDS)}"
        )
    cells, steps, duration = [], group.get("steps"), group.get("duration")
    same = {
        "group": group["name"],
        "kind": group["kind"],
        "duration": duration,
        "cold": group.get("cold", False),
    }
    same |= {"x_label": group.get("x_label"), "solved": group.get("solved")}
    same |= {"timeout": group.get("timeout", (duration or 3000) + 600)}
    same["games"] = group.get("games")
    for (name, program), env_id in itertools.product(
        group["programs"].items(), group.get("envs", ["breakout"])
    ):
        where = f"{group['name']}, {name}"
        check_keys(where, program, PROGRAM_KEYS)
        if program["program"] not in PROGRAMS:
            raise ValueError(
                f"{where}: program {program['program']}: must be one of {', '.join(PROGRAMS)}"
            )
        cell = same | {
            "name": str(name),
            "program": program["program"],
            "env_id": env_id,
            "x": program.get("x"),
        }
        cell["environment"] = {key: str(value) for key, value in program.get("env", {}).items()}
        cell["cores"] = program.get("cores", cores)
        if not set(cell["cores"]) <= set(range(os.cpu_count())):
            raise ValueError(f"cores {cell['cores']}: this machine has {os.cpu_count()}")
        for seed in program.get("seeds", group.get("seeds", [1])):
            cells.append(
                cell | {"seed": seed, "command": command(program, env_id, seed, steps, duration)}
            )
    return sorted(cells, key=lambda cell: cell["seed"]) if group.get("interleave") else cells


def command(
    program: dict, env_id: str, seed: int, steps: int | None, duration: float | None
) -> list[str]:
    """The command as it is run in the repository's folder; DIR stands for the temporary folder that it writes to."""
    kind, executable = program["program"], pathlib.Path(sys.executable)
    if kind not in ("ours", "ceiling", "random"):
        executable = ROOT / ".peers" / kind / "bin/python"
    python = str(executable.relative_to(ROOT)) if executable.is_relative_to(ROOT) else "python"
    words = [python, *program.get("launcher", []), program.get("script", PROGRAMS[kind])]
    words += ["--env-id", env_id, "--seed", seed]
    flags = (
        "--total-timesteps --time-limit --output-dir"
        if kind == "ours"
        else "--steps --seconds --folder"
    )
    for flag, value in zip(flags.split(), (steps, duration, "DIR")):
        words += [flag, value] if value is not None else []
    return [str(word).replace("{env}", env_id) for word in (*words, *program.get("args", []))]


def interpreter(word: str) -> str:
    """The path of the Python that a command names; one outside of the repository is just called python."""
    return sys.executable if word == "python" else str(ROOT / word)


def path_of(cell: dict, out: pathlib.Path) -> pathlib.Path:
    name = re.sub(r"[^\w.-]+", "-", f"{cell['name']}__{cell['env_id']}__{cell['seed']}")
    return out / "cells" / cell["group"] / f"{name}.json"


def is_finished(cell: dict, out: pathlib.Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        stored = json.loads(path_of(cell, out).read_text())
        return stored["status"] == "ok" and all(stored[key] == cell[key] for key in SAME)
    return False


# One cell: run it, watch it, read what it left ------------------------------------------------------------------------


def start(cell: dict, folder: str, log) -> subprocess.Popen:
    """Starts the cell's process in a group of its own, on its cores: a child inherits the affinity of who starts it."""
    environment = os.environ | cell["environment"]
    if cell["cold"]:
        environment["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}-cache"
    words = [folder if word == "DIR" else word for word in cell["command"]]
    words[0] = interpreter(words[0])
    if words[1].endswith(".patch"):
        copy = f"{folder}-{pathlib.Path(words[1]).stem}.py"
        subprocess.run(
            ["patch", "-s", "-o", copy, ROOT / PROGRAMS["ours"], ROOT / words[1]], check=True
        )
        words[1] = copy
    ours = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cell["cores"])
    options = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL, "start_new_session": True}
    try:
        return subprocess.Popen(words, cwd=ROOT, env=environment, **options)
    finally:
        os.sched_setaffinity(0, ours)


def read_rows(folder: str | pathlib.Path) -> tuple[list[dict], dict]:
    """The rows of the metrics.jsonl somewhere under folder, and the last one, which says how it ended ({}: not yet).

    In front of what ours has logged stands a row of its first update, at which its time begins.
    """
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


def watch(
    process: subprocess.Popen,
    folder: str,
    since: float,
    timeout: float,
    family: set,
    tick: Callable,
) -> dict:
    """Until the process ends: the seconds to its first update, and the peak resident memory of it and its family.

    Looks for the first row 20 times a second, at the memory twice a second, so that watching costs the watched nothing.
    """
    seen, sampled = {"seconds_to_first_update": None, "peak_rss_mib": 0.0}, 0.0
    while process.poll() is None:
        now = time.perf_counter() - since
        if now > timeout:
            raise TimeoutError(f"ended after the timeout of {timeout:g} seconds")
        if seen["seconds_to_first_update"] is None and (rows := read_rows(folder)[0]):
            since_then = rows[-1]["time"] if "iteration" in rows[0] else 0.0
            seen["seconds_to_first_update"] = now - since_then
        if now - sampled > 0.5:
            sampled, size = now, 0
            with contextlib.suppress(psutil.Error):
                leader = psutil.Process(process.pid)
                family.update(children := leader.children(recursive=True))
                for member in (leader, *children):
                    with contextlib.suppress(psutil.Error):
                        size += member.memory_info().rss
            seen["peak_rss_mib"] = max(seen["peak_rss_mib"], size / 2**20)
            tick(now)
        time.sleep(0.05)
    return seen


def running(member: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return member.is_running() and member.status() != psutil.STATUS_ZOMBIE
    return False


def stop(process: subprocess.Popen, family: set[psutil.Process]):
    """Ends the process, its group, and its children that have left the group: nothing goes on burning a core."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        for member in filter(running, family):
            with contextlib.suppress(psutil.Error):
                member.send_signal(number)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and (process.poll() is None or any(map(running, family))):
            time.sleep(0.05)


def measure(cell: dict, tick: Callable[[float], None]) -> dict:
    """Runs a cell and returns all that is known about it; "status" is ok or failed."""
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    result = cell | {"status": "ok", "started": started, "load_before": os.getloadavg()[0]}
    with (
        tempfile.TemporaryDirectory() as temporary,
        open(f"{temporary}/log", "w+", errors="replace") as log,
    ):
        folder, since, family, error = f"{temporary}/run", time.perf_counter(), set(), None
        os.mkdir(folder)
        process = start(cell, folder, log)
        try:
            result |= watch(process, folder, since, cell["timeout"], family, tick)
        except TimeoutError as timeout:
            error = str(timeout)
        finally:
            stop(process, family)
        result["wall_seconds"] = time.perf_counter() - since
        log.seek(0)
        output, (rows, last) = log.read(), read_rows(folder)
        if (
            cell["kind"] == "learning"
            and cell["program"] == "ours"
            and not error
            and process.returncode == 0
        ):
            tick(result["wall_seconds"])
            (run,) = pathlib.Path(folder).iterdir()
            if played := play(cell, folder, run):
                result["played"] = played
            if cell["solved"] is not None:
                result["first_solved"] = first_solved(
                    cell, folder, run, rows, result["seconds_to_first_update"]
                )
        result = {"versions": versions()} | last | result | from_rows(rows) | repository()
        result["hardware"] = hardware(output)
        for config in pathlib.Path(folder).glob("*/config.yaml"):  # ours
            result["arguments"] = yaml.safe_load(config.read_text())
        if "--nproc-per-node" in cell["command"]:
            ranks = cell["command"][cell["command"].index("--nproc-per-node") + 1]
            result["ranks"] = {"world_size": int(ranks)}
        error = error or (process.returncode and f"exit code {process.returncode}")
        error = error or (not last and "its metrics.jsonl has no last row")
        if cell["kind"] in ("speed", "ranks", "scaling") and not result["sps_steady"]:
            error = error or "it ended before there was a steady speed; was it still compiling?"
        if error:
            result |= {"status": "failed", "error": error, "output_tail": output[-2000:]}
        # No paths of this machine: the repository's become relative, of any other only the last part is kept.
        text = json.dumps(result).replace(folder, "DIR").replace(f"{ROOT}/", "")
        return json.loads(re.sub(r"(?<![\w.:/-])/(?:[\w.+@~-]+/)+", "", text))


def play(cell: dict, folder: str, what: pathlib.Path) -> dict | None:
    """What tools/play.py says of a run's or a checkpoint's games with the most likely actions; None if none ends in
    ten minutes."""
    words = [cell["command"][0], "tools/play.py", str(what), "--deterministic"]
    words += ["--episodes", str(cell.get("games") or 128)]
    with open(f"{folder}-played", "w+") as output:
        process = start(cell | {"command": words}, folder, output)
        try:
            process.wait(600)
            output.seek(0)
            played = json.loads(output.read().splitlines()[-1])
        except (subprocess.TimeoutExpired, ValueError, IndexError):
            return None
        finally:
            stop(process, set())
    return played if "episodic_return" in played else None


def first_solved(
    cell: dict, folder: str, run: pathlib.Path, rows: list[dict], first_update: float
) -> dict | None:
    """The first of the checkpoints whose 128 games have the mean score `solved`: its step, that mean, the least of
    the games, and the seconds from the start of the process until it was written. None if there is none."""
    logged = {row["iteration"]: row for row in rows}  # --log-interval divides --checkpoint-interval
    for model in sorted(run.glob("model_*.pt")):
        row = logged.get(int(model.stem.rpartition("_")[2]))
        played = row and play(cell, folder, model)
        if played and (score := played["episodic_return"])["mean"] >= cell["solved"]:
            seconds = row["time"] + first_update
            return {
                "step": row["step"],
                "seconds": seconds,
                "score": score["mean"],
                "least": score["min"],
            }
    return None


def second_half(times: list[float]) -> int:
    """Of two points or more, the first in the second half of the seconds since the first, before which it compiles."""
    middle = (times[0] + times[-1]) / 2
    return min(
        next(index for index, seconds in enumerate(times) if seconds >= middle), len(times) - 2
    )


def steady_speed(curve: dict) -> float | None:
    """Steps per second in the second half, if there are two points."""
    times, steps = curve["time"], curve["step"]
    if len(times) < 2:
        return None
    first = second_half(times)
    return (steps[-1] - steps[first]) / (times[-1] - times[first])


def phases(rows: list[dict]) -> dict[str, float]:
    """Seconds of each phase after the first row. A row has their shares of the time since the one before."""
    seconds = defaultdict(float)
    for before, row in itertools.pairwise(rows):
        for key in row:
            if key.startswith("time/"):
                name = key.removeprefix("time/")
                seconds[name] += row[key] * (row["time"] - before["time"])
    return dict(seconds)


def from_rows(rows: list[dict], points: int = 400) -> dict:
    """What is computed in the same way for every program: speed (steady: of the second half), seconds of each phase and
    shares of the second half, and the thinned curve, whose score is the mean one logged, or else the mean return."""
    curve = {key: [row.get(key) for row in rows] for key in ("step", "time", "sps")}
    curve["score"] = [row.get("env/score", row.get("episodic_return")) for row in rows]
    result, every = (
        {"sps_steady": steady_speed(curve), "phases": phases(rows), "phase_shares": {}},
        -(-len(rows) // points),
    )
    if rows:
        result |= {
            "timesteps": rows[-1]["step"],
            "seconds": rows[-1]["time"],
            "sps": rows[-1]["step"] / rows[-1]["time"],
        }
    if len(rows) > 1:
        half = rows[second_half(curve["time"]) :]
        seconds = half[-1]["time"] - half[0]["time"]
        result["phase_shares"] = {name: spent / seconds for name, spent in phases(half).items()}
    keep = sorted({*range(0, len(rows), every or 1), *range(len(rows))[-1:]})
    thin = {key: [column[i] and round(column[i], 3) for i in keep] for key, column in curve.items()}
    return result | {"curve": thin}


def kind_of_cpu(info: str) -> tuple[str, str]:
    """Instruction set and kind, from what /proc/cpuinfo says."""
    flags = set(info.split())
    return next(
        (both for flag, both in CPUS.items() if flag in flags),
        (platform.machine(), f"cpu-{platform.machine()}"),
    )


def report_folder(text: str) -> pathlib.Path:
    return (
        pathlib.Path(text)
        if text != "auto"
        else ROOT / "benchmark/reports" / kind_of_cpu(CPUINFO.read_text())[1]
    )


def hardware(output: str = "") -> dict:
    """Of this machine, and of it what a script of ours says that it uses: "cpu, 2 threads, bfloat16"."""
    info = CPUINFO.read_text()
    name = re.search(r"^model name\s*: (.*)", info, re.MULTILINE)
    facts = {
        "cpu": name[1] if name else platform.processor(),
        "instruction_set": kind_of_cpu(info)[0],
    }
    facts |= {
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }
    if said := re.search(r"^(\w+), (\d+) threads, ", output, re.MULTILINE):
        facts |= {"gpu": gpu()} if said[1] == "cuda" else {"threads": int(said[2])}
    return facts


def gpu() -> str:
    if not shutil.which("nvidia-smi"):
        return "a GPU"
    words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(words, capture_output=True, text=True).stdout.partition("\n")[0]


def versions() -> dict:
    """Of this environment, in which ours runs; the other programs have their own."""
    packages = {
        name: importlib.metadata.version(name)
        for name in ("torch", "numpy", "gymnasium", "pufferlib")
    }
    return {"python": platform.python_version()} | packages


def repository() -> dict:
    """The commit, and whether a tracked file outside the reports differs from it."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True
        ).stdout.strip()

    changes = git("status", "--porcelain", "-uno", "--", ".", ":!benchmark/reports")
    return {"git_commit": git("rev-parse", "HEAD"), "git_dirty": bool(changes)}


def store(cell: dict, path: pathlib.Path):
    """Indented, but for the curve, whose columns take a line each."""
    head = json.dumps(
        {key: value for key, value in cell.items() if key != "curve"}, indent=1
    ).removesuffix("\n}")
    columns = ",\n".join(
        f'  "{key}": {json.dumps(column)}' for key, column in cell["curve"].items()
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".tmp").write_text(f'{head},\n "curve": {{\n{columns}\n }}\n}}\n')
    path.with_suffix(".tmp").replace(path)


# All cells ------------------------------------------------------------------------------------------------------------


def run_all(cells: list[dict], out: pathlib.Path) -> int:
    """Runs the cells that are not finished, one after another. Returns how many failed."""
    failed, walls = 0, {}

    def expected(cell: dict) -> float:
        """Seconds: as long as the last of its kind; at first a guess."""
        guess = (cell["duration"] or (300 if cell["kind"] == "learning" else 15)) + 15
        return walls.get((cell["group"], cell["name"]), guess)

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, refresh_per_second=1, transient=True) as progress:
        task = progress.add_task("", total=len(cells), left="")
        for number, cell in enumerate(cells):
            label = f"{cell['group']} / {cell['name']} / {cell['env_id']} / seed {cell['seed']}"

            def tick(seconds: float, cell=cell, label=label, number=number):
                left = max(expected(cell) - seconds, 0) + sum(map(expected, cells[number + 1 :]))
                progress.update(
                    task,
                    description=f"{label}, {seconds:.0f} s",
                    left=f"about {left / 60:.0f} min left",
                )

            tick(0)
            result = measure(cell, tick)
            store(result, path_of(cell, out))
            walls[cell["group"], cell["name"]] = result["wall_seconds"]
            failed += result["status"] == "failed"
            facts = [f"{result['wall_seconds']:.0f} s"]
            if result["status"] == "failed":
                facts.append(
                    f"FAILED, {result['error']}: {(result['output_tail'].strip().splitlines() or [''])[-1]}"
                )
            if result["sps_steady"]:
                facts.append(f"{result['sps_steady']:,.0f} steps/s")
            if scores := [score for score in result["curve"]["score"] if score is not None]:
                facts.append(f"score {scores[-1]:.1f}")
            progress.console.print(
                f"{label}: {', '.join(facts)}", markup=False, highlight=False, soft_wrap=True
            )
            progress.advance(task)
    return failed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "plan",
        nargs="?",
        type=pathlib.Path,
        help="a YAML file; or give the matrix by the flags below",
    )
    parser.add_argument(
        "--out", type=report_folder, required=True, help="gets cells/GROUP/NAME__ENV__SEED.json"
    )
    parser.add_argument("--only", nargs="+", metavar="GROUP", help="of the plan, only these groups")
    parser.add_argument(
        "--fresh", action="store_true", help="forget the stored cells (with --only: of its groups)"
    )
    parser.add_argument(
        "--cores", help="pin every process to these, such as 0,1 (a program's own in the plan win)"
    )
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS)
    parser.add_argument("--envs", nargs="+", default=["breakout"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--duration", type=float, help="seconds")
    parser.add_argument("--interleave", action="store_true")
    args = parser.parse_args(argv)
    if (args.plan is None) == (args.programs is None):
        parser.error("give either a plan or --programs")
    try:
        if args.plan:
            groups = yaml.safe_load(args.plan.read_text())
        else:
            keys = GROUP_KEYS & {key for key, value in vars(args).items() if value is not None} - {
                "programs"
            }
            matrix = {key: getattr(args, key) for key in keys}
            matrix |= {"name": "matrix", "kind": "speed" if args.duration else "learning"}
            groups = [matrix | {"programs": {name: {"program": name} for name in args.programs}}]
        names = [group["name"] for group in groups]
        if unknown := set(args.only or []) - set(names):
            raise ValueError(
                f"--only {' '.join(sorted(unknown))}: the plan's groups are {', '.join(names)}"
            )
        cores = (
            sorted(map(int, args.cores.split(",")))
            if args.cores
            else sorted(os.sched_getaffinity(0))
        )
        groups = [group for group in groups if not args.only or group["name"] in args.only]
        cells = [cell for group in groups for cell in expand(group, cores)]
    except KeyError as error:
        parser.error(f"{args.plan}: {error} is missing")
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        parser.error(f"{args.plan}: {error}")
    if args.fresh:
        for name in args.only or [
            ""
        ]:  # without --only those of groups that are no longer in the plan, too
            shutil.rmtree(args.out / "cells" / name, ignore_errors=True)
    missing = {
        cell["program"] for cell in cells if not os.path.exists(interpreter(cell["command"][0]))
    }
    for peer in sorted(missing):
        print(
            f"skipped: {peer}, which is not installed (no .peers/{peer}); `make benchmark-peers` installs it"
        )
    cells = [cell for cell in cells if cell["program"] not in missing]
    todo = [cell for cell in cells if not is_finished(cell, args.out)]
    print(
        f"{len(cells) - len(todo)} of {len(cells)} cells are finished, {len(todo)} to run; results in {args.out}"
    )
    try:
        failed = run_all(todo, args.out)
    except KeyboardInterrupt:
        again = [word for word in sys.argv if word != "--fresh"]
        print(f"interrupted; to go on: {shlex.join([sys.executable, *again])}", file=sys.stderr)
        return 130
    if failed:
        print(
            f'{failed} of {len(todo)} cells failed; see "error" and "output_tail" in their JSON',
            file=sys.stderr,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # which a shell's background job would ignore
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
