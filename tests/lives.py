"""Commands as processes of their own, forked from this one after its imports."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import sys
import termios
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from kills import Failed
from tqdm import tqdm

from bwsft.cli import main

PATIENCE = 90  # seconds after which a command hangs


class Life:
    """One command as a process. `said` is what it printed, as far as somebody listened."""

    def __init__(
        self, words: Sequence[str], output: Path, env: dict[str, str] | None = None,
        limit: int | None = None, terminal: int | None = None,
    ):  # fmt: skip
        """limit: bytes that a file may have; terminal: a pipe or pty in place of `output`."""
        self.output, self.status = output, None
        self.pid = os.fork()
        if not self.pid:
            status = 1
            try:
                self._enter(env or {}, limit, terminal)
                status = main(list(map(str, words)))
            except SystemExit as end:
                status = end.code or 0
            except BaseException:
                traceback.print_exc()
            finally:
                for stream in (sys.stdout, sys.stderr):
                    try:
                        stream.flush()
                    except (OSError, ValueError):
                        pass
                os._exit(status)

    def _enter(self, env: dict[str, str], limit: int | None, terminal: int | None) -> None:
        os.setsid()
        if terminal is None:
            terminal = os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        elif os.isatty(terminal):
            fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
        for stream in (1, 2):
            os.dup2(terminal, stream)
        os.closerange(3, 256)
        sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))
        # tqdm's lock is a semaphore that all forks share: who is killed with it stops the others.
        tqdm.set_lock(threading.RLock())
        os.environ.update(env)
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    def ended(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is not None

    def wait(self, seconds: float = PATIENCE) -> int:
        """The status; Failed for a traceback or for none in time."""
        deadline = time.monotonic() + seconds
        while not self.ended():
            if time.monotonic() > deadline:
                self.send(signal.SIGKILL)
                raise Failed(f"no end in {seconds} s: {self.said()[-2000:]}")
            time.sleep(0.005)
        if "Traceback" in self.said():
            raise Failed(f"a traceback:\n{self.said()[-3000:]}")
        return self.status

    def send(self, number: int) -> None:
        if not self.ended():
            os.kill(self.pid, number)

    def said(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""
