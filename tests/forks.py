"""Starts `python script arguments` and `python -m module arguments` in forks of one process.

That process has imported torch, which takes most of a small run's time. A fork is a process of its
own in all else: its signals, its exit code, what it prints, what a crash does. Run as a program,
this file is the process that forks; `python tests/forks.py benchmark/run.py ...` runs the benchmark
with its cells as forks, and anything else as Python would.
"""

import atexit
import ctypes
import gc
import json
import os
import pathlib
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback

# What a script imports, at once and later.
IMPORTED = "torch.distributed.run torch.utils.tensorboard torch.profiler torch._dynamo "
IMPORTED += "torch._inductor.cpp_builder matplotlib.pyplot"


class Fork:
    """What the tests use of subprocess.Popen."""

    def __init__(
        self,
        command: list[str],
        cwd,
        env: dict[str, str],
        start_new_session=False,
        stdout=None,
        stderr=None,
    ):
        self.args = command
        self.returncode = None
        self.stdout = stdout or tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.stderr = stderr or tempfile.TemporaryFile("w+")  # noqa: SIM115
        request = {
            "words": command[1:],
            "cwd": os.path.abspath(cwd),
            "env": env,
            "session": start_new_session,
        }
        self.pid = ask(request, self.stdout, self.stderr)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout or 1e9)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.01)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        texts = []
        for file in (self.stdout, self.stderr):
            file.seek(0)
            texts.append(file.read())
        return tuple(texts)

    def send_signal(self, signum: int):
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


server: list = []  # the socket to the process that forks, once there is one


def ask(request: dict, *files):
    """What the process that forks answers."""
    if not server:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        server.append(ours)
        atexit.register(ours.close)  # which ends it
    socket.send_fds(server[0], [json.dumps(request).encode()], [file.fileno() for file in files])
    return json.loads(server[0].recv(1000))


def serve(channel: socket.socket) -> dict:
    """Answers requests for as long as the tests run. Returns in each fork what was asked for."""
    while True:
        data, files, *_ = socket.recv_fds(channel, 2**20, 2)
        if not data:
            os._exit(0)
        request = json.loads(data)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif not (answer := os.fork()):
            channel.close()
            for number, file in enumerate(files, 1):
                os.dup2(file, number)
                os.close(file)
            return request
        else:
            for file in files:
                os.close(file)
        channel.send(json.dumps(answer).encode())


class Child(Fork):
    """A fork of this process, for benchmark/run.py, which starts one cell after another."""

    def __init__(
        self,
        words: list[str],
        cwd,
        env: dict[str, str],
        stdout,
        stderr,
        stdin,
        start_new_session: bool,
    ):
        self.args = words
        self.returncode = None
        self.pid = os.fork()
        if not self.pid:
            try:
                os.dup2(stdout.fileno(), 1)
                os.dup2(stderr.fileno(), 2)
                atexit._clear()
                become(words[1:], cwd, env, start_new_session)
            except BaseException:
                traceback.print_exc()
            os._exit(1)

    def poll(self) -> int | None:
        if self.returncode is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(ended[1])
        return self.returncode


def popen(words: list, *others, original=subprocess.Popen, **options):
    if words[0] == sys.executable:
        return Child(words, **options)
    return original(words, *others, **options)


def become(words: list[str], cwd: str, env: dict[str, str], session: bool):
    """Does in this process what `python *words` would do, but for taking the interpreter down,
    which takes a second."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # with whoever interrupts the tests
    if session:
        os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if words[0].endswith("benchmark/run.py"):
        subprocess.Popen = popen
    module = words[0] == "-m"
    sys.argv = words[module:]
    sys.path[0] = cwd if module else str(pathlib.Path(cwd, words[0]).parent)
    sys.path[1:1] = env.get("PYTHONPATH", "").split(os.pathsep)
    try:
        if module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        code = end.code or 0
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    if not sys.argv[1].isdigit() and sys.argv[1] != "benchmark/run.py":
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    sys.path[0] = str(pathlib.Path(__file__).parent.parent)
    for name in IMPORTED.split():
        __import__(name)
    import ppo_lstm_puffer  # noqa: F401  (and with it all that it imports)
    import protein_sweep  # noqa: F401

    del sys.modules["ppo_lstm_puffer"], sys.modules["protein_sweep"]
    gc.freeze()
    if not sys.argv[1].isdigit():
        become(sys.argv[1:], os.getcwd(), dict(os.environ), session=False)
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    become(**request)
