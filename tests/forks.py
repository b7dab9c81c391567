"""Starts `python script arguments` and `python -m module arguments` in forks of one process.

That process has imported torch, which takes most of a small run's time. A fork is a process of its
own in all else: its signals, its exit code, what it prints, what a crash does.
"""

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from multiprocessing.reduction import DupFd

for signum in signal.SIGINT, signal.SIGHUP:  # nohup and a shell's & ignore them, and so would runs
    if signal.getsignal(signum) == signal.SIG_IGN:
        signal.signal(signum, signal.SIG_DFL)

CONTEXT = multiprocessing.get_context("forkserver")
IMPORTED = "torch.distributed.run torch.utils.tensorboard torch.profiler torch._dynamo tyro optuna "
IMPORTED += "torch._inductor.cpp_builder matplotlib.pyplot pufferlib.adapters pufferlib.vector"
CONTEXT.set_forkserver_preload(IMPORTED.split())


class Inherited:
    """An open file, whose descriptor a new process gets in its place."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return descriptor, (DupFd(self.file.fileno()),)


def descriptor(duplicate) -> int:
    return duplicate.detach()


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
        self.stdout = stdout or tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.stderr = stderr or tempfile.TemporaryFile("w+")  # noqa: SIM115
        files = Inherited(self.stdout), Inherited(self.stderr)
        arguments = (command[1:], os.path.abspath(cwd), env, start_new_session, *files)
        self.process = CONTEXT.Process(target=become, args=arguments)
        self.process.start()
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    returncode = property(poll)

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        self.stdout.seek(0)
        self.stderr.seek(0)
        return self.stdout.read(), self.stderr.read()

    def send_signal(self, signum: int):
        with contextlib.suppress(ProcessLookupError):  # as Popen: it has just ended
            if self.poll() is None:
                os.kill(self.pid, signum)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def become(words: list[str], cwd: str, env: dict[str, str], session: bool, *files: int):
    """Does in this process what `python *words` would do, but for taking the interpreter down,
    which takes a second."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # with whoever interrupts the tests
    for number, file in enumerate(files, 1):
        os.dup2(file, number)
        os.close(file)
    if session:
        os.setsid()
    os.chdir(cwd)
    sys.modules["pufferlib.adapters"].started_in = pathlib.Path(cwd)  # as if imported here
    os.environ.clear()
    os.environ.update(env)
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
