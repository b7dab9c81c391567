"""Runs a matrix of (program, environment, seed), each cell in a process of its own, and leaves one JSON per cell.

    python benchmark/run.py benchmark/plans/cpu.yaml --out auto     # goes on where it stopped
    python benchmark/run.py benchmark/plans/cpu.yaml --out DIR --only speed ceiling_first --cores 0,1
    python benchmark/run.py --programs ours pufferl --envs breakout --seeds 1 2 3 --duration 40 --interleave --out runs/speed

A plan is a YAML list of groups:

    - name: speed
      kind: speed              # what the report makes of it: speed, learning, ranks, scaling, startup, ceiling, or (warm_up) nothing
      programs:                # name: what it is (ours, pufferl, sb3, sample_factory, ceiling), and what is special about it
        ours: {program: ours}
        one thread: {program: ours, args: [--num-envs, 512], env: {OMP_NUM_THREADS: 1}, cores: [0], x: 512}
        preset: {program: ours, args: [--config, "benchmark/configs/{env}.yaml"], seeds: [1]}   # {env} is the environment; seeds of its own
        two processes: {program: ours, script: ppo_lstm_puffer_ddp.py, launcher: [-m, torch.distributed.run, --nproc-per-node, 2]}
      envs: [breakout]
      seeds: [1, 2, 3]
      duration: 40             # seconds of each run after its first update, or steps: N, or both; neither: the program's own default
      interleave: true         # A B A B ...: a machine that drifts hurts both alike
      cold: true               # each run starts with an empty compile cache
      timeout: 600             # seconds after which a cell is ended and has failed
      x_label: environments    # kind scaling: what x is

--out auto is the folder of this kind of CPU in benchmark/reports: cpu-bf16, cpu-avx512, cpu-avx2, cpu-arm. A finished cell (its JSON
is there, with the same command, environment variables and cores) is not run again, unless --fresh. A failed one is recorded with the
end of its output, the others run, and the exit code is 1. Then: python benchmark/report.py DIR
"""

import argparse
import contextlib
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
from collections.abc import Callable

import psutil
import yaml
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

ROOT = pathlib.Path(__file__).resolve().parent.parent
CPUINFO = pathlib.Path("/proc/cpuinfo")
PROGRAMS = {"ours": "ppo_lstm_puffer.py", "ceiling": "benchmark/ceiling.py"} | {
    peer: f"benchmark/peers/{peer}.py" for peer in ("pufferl", "sb3", "sample_factory")
}
KINDS = ("speed", "learning", "ranks", "scaling", "startup", "ceiling", "warm_up")
GROUP_KEYS = {"name", "kind", "programs", "envs", "seeds", "duration", "steps", "interleave", "cold", "timeout", "x_label"}
PROGRAM_KEYS = {"program", "args", "env", "cores", "x", "script", "launcher", "seeds"}
CPUS = {  # flag in /proc/cpuinfo: instruction set, kind of CPU; the first that is there
    "amx_bf16": ("AMX-BF16", "cpu-bf16"), "avx512_bf16": ("AVX512-BF16", "cpu-bf16"), "avx512f": ("AVX512", "cpu-avx512"),
    "avx2": ("AVX2", "cpu-avx2"), "bf16": ("Arm BF16", "cpu-arm"), "asimd": ("Arm NEON", "cpu-arm"),
}  # fmt: skip
SAME = ("command", "environment", "cores", "cold")  # a stored cell that agrees in these is the same measurement


# From a plan to cells -----------------------------------------------------------------------------------------------------


def check_keys(where: str, given: dict, known: set[str]):
    if unknown := set(given) - known:
        raise ValueError(f"{where}: unknown {', '.join(sorted(unknown))}; known are {', '.join(sorted(known))}")


def expand(group: dict, cores: list[int]) -> list[dict]:
    """The cells of a group in the order in which they run. Raises ValueError if the plan is wrong."""
    check_keys(group["name"], group, GROUP_KEYS)
    if group["kind"] not in KINDS:
        raise ValueError(f"{group['name']}: kind {group['kind']}: must be one of {', '.join(KINDS)}")
    cells = []
    for (name, program), env_id in itertools.product(group["programs"].items(), group.get("envs", ["breakout"])):
        check_keys(f"{group['name']}, {name}", program, PROGRAM_KEYS)
        if program["program"] not in PROGRAMS:
            raise ValueError(f"{group['name']}, {name}: program {program['program']}: must be one of {', '.join(PROGRAMS)}")
        cell = {
            "group": group["name"], "kind": group["kind"], "name": str(name), "program": program["program"], "env_id": env_id,
            "x": program.get("x"), "x_label": group.get("x_label"), "duration": group.get("duration"), "cold": group.get("cold", False),
            "environment": {key: str(value) for key, value in program.get("env", {}).items()},
            "cores": program.get("cores", cores), "timeout": group.get("timeout", group.get("duration", 3000) + 600),
        }  # fmt: skip
        if not set(cell["cores"]) <= set(range(os.cpu_count())):
            raise ValueError(f"cores {cell['cores']}: this machine has {os.cpu_count()}")
        for seed in program.get("seeds", group.get("seeds", [1])):
            cells.append(
                cell | {"seed": seed, "command": command(program, env_id, seed, group.get("steps"), group.get("duration"))}
            )
    return sorted(cells, key=lambda cell: cell["seed"]) if group.get("interleave") else cells


def command(program: dict, env_id: str, seed: int, steps: int | None, duration: float | None) -> list[str]:
    """The command as it is run in the repository's folder; DIR stands for the temporary folder that the program writes to."""
    kind, executable = program["program"], pathlib.Path(sys.executable)
    if kind not in ("ours", "ceiling"):
        executable = ROOT / ".peers" / kind / "bin/python"
    python = str(executable.relative_to(ROOT)) if executable.is_relative_to(ROOT) else "python"
    words = [python, *program.get("launcher", []), program.get("script", PROGRAMS[kind]), "--env-id", env_id, "--seed", seed]
    flags = ("--total-timesteps", "--time-limit", "--output-dir") if kind == "ours" else ("--steps", "--seconds", "--folder")
    for flag, value in zip(flags, (steps, duration, "DIR")):
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


# One cell: run it, watch it, read what it left ----------------------------------------------------------------------------


def start(cell: dict, folder: str, log) -> subprocess.Popen:
    """Starts the cell's process in a group of its own, on its cores: a child inherits the affinity of who starts it."""
    environment = os.environ | cell["environment"]
    if cell["cold"]:
        environment["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}-cache"
    words = [folder if word == "DIR" else word for word in cell["command"]]
    words[0] = interpreter(words[0])
    ours = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cell["cores"])
    try:
        return subprocess.Popen(
            words, cwd=ROOT, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
    finally:
        os.sched_setaffinity(0, ours)


def read_lines(folder: str) -> list[dict]:
    """The lines of the metrics.jsonl somewhere under folder, those with steps; a line that is being written is left out."""
    lines = []
    for path in pathlib.Path(folder).rglob("metrics.jsonl"):
        for text in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                lines.append(json.loads(text))
    return [line for line in lines if line.get("step", 0) > 0]


def watch(
    process: subprocess.Popen, folder: str, since: float, timeout: float, family: set[psutil.Process], tick: Callable
) -> dict:
    """Until the process ends: the seconds to its first update, and the peak resident memory of it and its children, its family.

    Looks for the first line 20 times a second, at the memory twice a second, so that watching costs the watched nothing.
    """
    seen, sampled = {"seconds_to_first_update": None, "peak_rss_mib": 0.0}, 0.0
    while process.poll() is None:
        now = time.perf_counter() - since
        if now > timeout:
            raise TimeoutError(f"ended after the timeout of {timeout:g} seconds")
        if seen["seconds_to_first_update"] is None and read_lines(folder):
            seen["seconds_to_first_update"] = now
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
    """Ends the process, its group, and its children that have left the group, so that nothing goes on burning a core."""
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
    result = cell | {
        "status": "ok",
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "load_before": os.getloadavg()[0],
    }
    with tempfile.TemporaryDirectory() as temporary, open(f"{temporary}/log", "w+", errors="replace") as log:
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
        if cell["kind"] == "learning" and cell["program"] == "ours" and not error and process.returncode == 0:
            tick(result["wall_seconds"])
            if played := play(cell, folder):
                result["played"] = played
        metrics = next((json.loads(path.read_text()) for path in pathlib.Path(folder).rglob("metrics.json")), None)
        if (
            error := error
            or (process.returncode and f"exit code {process.returncode}")
            or (metrics is None and "it left no metrics.json")
        ):
            log.seek(0)
            result |= {"status": "failed", "error": error, "output_tail": log.read()[-2000:]}
        result = (metrics or {}) | result | from_lines(read_lines(folder)) | repository()
        if result["status"] == "ok" and cell["kind"] in ("speed", "ranks", "scaling") and not result["sps_steady"]:
            result |= {
                "status": "failed",
                "error": "it ended before there was a steady speed; was it still compiling?",
                "output_tail": "",
            }
        result["hardware"] = result.get("hardware", {}) | hardware()
        # No paths of this machine: the repository's become relative, of any other only the last part is kept.
        text = json.dumps(result).replace(folder, "DIR").replace(f"{ROOT}/", "")
        return json.loads(re.sub(r"(?<![\w.:/-])/(?:[\w.+@~-]+/)+", "", text))


def second_half(times: list[float]) -> int:
    """Of two points or more, the first in the second half of the seconds since the first update; what compiles is before that."""
    return min(next(index for index, seconds in enumerate(times) if seconds >= (times[0] + times[-1]) / 2), len(times) - 2)


def play(cell: dict, folder: str) -> dict | None:
    """What --evaluate prints of 128 games that the trained agent plays with its most likely actions; None if none ends in ten minutes."""
    (run,) = pathlib.Path(folder).iterdir()
    words = [cell["command"][0], "ppo_lstm_puffer.py", "--evaluate", str(run), "--eval-episodes", "128", "--deterministic"]
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


def steady_speed(curve: dict) -> float | None:
    """Steps per second in the second half, if there are two points."""
    times, steps = curve["time"], curve["step"]
    if len(times) < 2:
        return None
    first = second_half(times)
    return (steps[-1] - steps[first]) / (times[-1] - times[first])


def as_curve(lines: list[dict]) -> dict[str, list]:
    """Columns step, time, score (the mean score logged, or the mean return where there is no score), sps."""
    scores = [line.get("env/score", line.get("episodic_return")) for line in lines]
    return {key: [line.get(key) for line in lines] for key in ("step", "time", "sps")} | {"score": scores}


def from_lines(lines: list[dict], points: int = 400) -> dict:
    """What is computed in the same way for every program: steady speed, share of each phase in the second half, thinned curve."""
    if not lines:
        return {"sps_steady": None, "phase_shares": {}, "curve": {"step": [], "time": [], "sps": [], "score": []}}
    curve, shares = as_curve(lines), {}
    half = lines[second_half(curve["time"]) :] if len(lines) > 1 else []
    late = [(line, line["time"] - before["time"]) for before, line in itertools.pairwise(half)]
    for line, seconds in late:
        for key in line:
            if key.startswith("time/") and key.endswith("_share"):
                phase = key.removeprefix("time/").removesuffix("_share")
                shares[phase] = shares.get(phase, 0) + line[key] * seconds / sum(seconds for _, seconds in late)
    every = -(-len(lines) // points)
    keep = sorted({*range(0, len(lines), every), len(lines) - 1})
    thin = {key: [column[i] and round(column[i], 3) for i in keep] for key, column in curve.items()}
    return {"sps_steady": steady_speed(curve), "phase_shares": shares, "curve": thin}


def kind_of_cpu(info: str) -> tuple[str, str]:
    """Instruction set and kind, from what /proc/cpuinfo says."""
    flags = set(info.split())
    return next((both for flag, both in CPUS.items() if flag in flags), (platform.machine(), f"cpu-{platform.machine()}"))


def report_folder(text: str) -> pathlib.Path:
    return pathlib.Path(text) if text != "auto" else ROOT / "benchmark/reports" / kind_of_cpu(CPUINFO.read_text())[1]


def hardware() -> dict:
    info = CPUINFO.read_text()
    name = re.search(r"^model name\s*: (.*)", info, re.MULTILINE)
    facts = {"cpu": name[1] if name else platform.processor(), "instruction_set": kind_of_cpu(info)[0]}
    return facts | {"cores": os.cpu_count(), "memory_gib": round(psutil.virtual_memory().total / 2**30, 1)}


def repository() -> dict:
    """The commit, and whether a tracked file outside the reports differs from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True).stdout.strip()

    changes = git("status", "--porcelain", "-uno", "--", ".", ":!benchmark/reports")
    return {"git_commit": git("rev-parse", "HEAD"), "git_dirty": bool(changes)}


def store(cell: dict, path: pathlib.Path):
    """Indented, but for the curve, whose columns take a line each."""
    head = json.dumps({key: value for key, value in cell.items() if key != "curve"}, indent=1).removesuffix("\n}")
    columns = ",\n".join(f'  "{key}": {json.dumps(column)}' for key, column in cell["curve"].items())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".tmp").write_text(f'{head},\n "curve": {{\n{columns}\n }}\n}}\n')
    path.with_suffix(".tmp").replace(path)


# All cells ----------------------------------------------------------------------------------------------------------------


def run_all(cells: list[dict], out: pathlib.Path) -> int:
    """Runs the cells that are not finished, one after another. Returns how many failed."""
    failed, walls = 0, {}

    def expected(cell: dict) -> float:
        """Seconds: as long as the last of its kind; at first a guess."""
        guess = (cell["duration"] or (300 if cell["kind"] == "learning" else 15)) + 15
        return walls.get((cell["group"], cell["name"]), guess)

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}")
    with Progress(*columns, refresh_per_second=1, transient=True) as progress:
        task = progress.add_task("", total=len(cells), left="")
        for number, cell in enumerate(cells):
            label = f"{cell['group']} / {cell['name']} / {cell['env_id']} / seed {cell['seed']}"

            def tick(seconds: float, cell=cell, label=label, number=number):
                left = max(expected(cell) - seconds, 0) + sum(map(expected, cells[number + 1 :]))
                progress.update(task, description=f"{label}, {seconds:.0f} s", left=f"about {left / 60:.0f} min left")

            tick(0)
            result = measure(cell, tick)
            store(result, path_of(cell, out))
            walls[cell["group"], cell["name"]] = result["wall_seconds"]
            failed += result["status"] == "failed"
            facts = [f"{result['wall_seconds']:.0f} s"]
            if result["status"] == "failed":
                facts.append(f"FAILED, {result['error']}: {(result['output_tail'].strip().splitlines() or [''])[-1]}")
            if result["sps_steady"]:
                facts.append(f"{result['sps_steady']:,.0f} steps/s")
            if scores := [score for score in result["curve"]["score"] if score is not None]:
                facts.append(f"score {scores[-1]:.1f}")
            progress.console.print(f"{label}: {', '.join(facts)}", markup=False, highlight=False, soft_wrap=True)
            progress.advance(task)
    return failed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", nargs="?", type=pathlib.Path, help="a YAML file; or give the matrix by the flags below")
    parser.add_argument("--out", type=report_folder, required=True, help="results go to its cells/GROUP/NAME__ENV__SEED.json")
    parser.add_argument("--only", nargs="+", metavar="GROUP", help="of the plan, only these groups")
    parser.add_argument("--fresh", action="store_true", help="forget the stored cells first; with --only, those of its groups")
    parser.add_argument("--cores", help="pin every process to these, such as 0,1 (a program's own in the plan win)")
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
            keys = {"envs", "seeds", "steps", "duration", "interleave"}
            matrix = {key: value for key, value in vars(args).items() if key in keys and value is not None}
            matrix |= {"name": "matrix", "kind": "speed" if args.duration else "learning"}
            groups = [matrix | {"programs": {name: {"program": name} for name in args.programs}}]
        names = [group["name"] for group in groups]
        if unknown := set(args.only or []) - set(names):
            raise ValueError(f"--only {' '.join(sorted(unknown))}: the plan's groups are {', '.join(names)}")
        cores = sorted(map(int, args.cores.split(","))) if args.cores else sorted(os.sched_getaffinity(0))
        groups = [group for group in groups if not args.only or group["name"] in args.only]
        cells = [cell for group in groups for cell in expand(group, cores)]
    except KeyError as error:
        parser.error(f"{args.plan}: {error} is missing")
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        parser.error(f"{args.plan}: {error}")
    if args.fresh:
        for name in args.only or [""]:  # without --only those of groups that are no longer in the plan, too
            shutil.rmtree(args.out / "cells" / name, ignore_errors=True)
    missing = {cell["program"] for cell in cells if not os.path.exists(interpreter(cell["command"][0]))}
    for peer in sorted(missing):
        print(f"skipped: {peer}, which is not installed (no .peers/{peer}); `make benchmark-peers` installs it")
    cells = [cell for cell in cells if cell["program"] not in missing]
    todo = [cell for cell in cells if not is_finished(cell, args.out)]
    print(f"{len(cells) - len(todo)} of {len(cells)} cells are finished, {len(todo)} to run; results in {args.out}")
    try:
        failed = run_all(todo, args.out)
    except KeyboardInterrupt:
        again = [word for word in sys.argv if word != "--fresh"]
        print(f"interrupted; to go on: {shlex.join([sys.executable, *again])}", file=sys.stderr)
        return 130
    if failed:
        print(f'{failed} of {len(todo)} cells failed; see "error" and "output_tail" in their JSON', file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # a polite kill cleans up as Ctrl-C does; a shell's background job ignores both
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
