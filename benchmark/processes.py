"""What faults.py and malformed.py share: texts without this machine's paths, and processes that were left behind."""

import contextlib
import os
import pathlib
import shlex
import sys
import tempfile
import time

import psutil

ROOT = pathlib.Path(__file__).resolve().parent.parent
MARK = "FAULTS_MARK"  # an environment variable that all processes of a start have, by which those left behind are found


def clean(text: str) -> str:
    """Without the paths of this machine."""
    names = {
        ROOT: "REPOSITORY",
        sys.prefix: "VENV",
        sys.base_prefix: "PYTHON",
        tempfile.gettempdir(): "TMP",
    }
    for path, name in names.items():
        text = text.replace(str(path), name)
    return text


def left_behind(mark: str, within: float, session: int | None = None) -> list[str]:
    """The processes with this mark, or of this session, that are still there after so many seconds. They are killed."""
    deadline = time.monotonic() + within
    while True:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                ours = os.getsid(process.pid) == session or process.environ().get(MARK) == mark
                found += [process] if ours and process.status() != psutil.STATUS_ZOMBIE else []
        if not found or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    names = []
    for process in found:
        with contextlib.suppress(psutil.Error):
            names.append(clean(shlex.join(process.cmdline()))[:200])
            process.kill()
    return names
