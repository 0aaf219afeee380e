"""Streams whose reader may go away: a closed terminal, `| head`."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterator
from typing import Any, TextIO


class Lasting:
    """A text stream that takes every text, though nobody may read it any more."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):  # gone, full, closed
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                self._stream.write(text.encode("ascii", "backslashreplace").decode())
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """What the block prints, or a library under it, cannot fail."""
    with (
        open(os.devnull, "w") as nowhere,  # Python has no stream where a shell's >&- closed it
        contextlib.redirect_stdout(Lasting(sys.stdout or nowhere)),
        contextlib.redirect_stderr(Lasting(sys.stderr or nowhere)),
    ):
        yield


def reader_gone() -> bool:
    """Whether nobody reads stdout or stderr any more."""
    if not hasattr(select, "poll"):
        return True
    asked = select.poll()
    for descriptor in (1, 2):
        asked.register(descriptor, 0)
    return any(what & (select.POLLERR | select.POLLHUP) for _, what in asked.poll(0))


def let_go() -> None:
    """Before the process ends: what a reader that is gone has not taken goes nowhere, so that the
    interpreter, which writes it once more, has nothing to report."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
