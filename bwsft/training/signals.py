"""Signals that end or save a run, noted until the loop looks."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType

from bwsft.training.distributed import World


class Signals:
    """What was asked of this process since it last looked."""

    stop = False
    save = False

    def agreed(self, world: World) -> tuple[bool, bool]:
        """(stop, save) if any rank was asked to. Every rank must call it."""
        save, self.save = self.save, False
        stop, save = world.sum([self.stop, save])
        return bool(stop), bool(save)


@contextlib.contextmanager
def signals(several: bool = False) -> Iterator[Signals]:
    """Note SIGINT, SIGTERM and SIGHUP (the loop saves after the running step and ends) and SIGUSR1
    (it saves and goes on). SIGHUP stays ignored under nohup.

    A second one of the three takes its usual course; with `several` processes not within five
    seconds of the first, since a launcher hands on the signal that the terminal sent to all.
    """
    asked, previous, first = Signals(), {}, []

    def stop(number: int, frame: FrameType | None) -> None:
        if first and several and time.monotonic() - first[0] < 5:
            return
        if first:
            restore()
            os.kill(os.getpid(), number)
            return
        first.append(time.monotonic())
        asked.stop = True
        # Not print: a handler may interrupt one, and output buffers refuse to be re-entered.
        said = f"\nsignal {number}: saving after this step (again: at once)\n"
        with contextlib.suppress(OSError):  # the terminal may be what went away
            os.write(2, said.encode())
        if not several:
            restore()

    def save(number: int, frame: FrameType | None) -> None:
        asked.save = True

    def restore() -> None:
        for number, handler in handlers.items():
            if handler is stop:
                signal.signal(number, previous[number])

    handlers = {signal.SIGINT: stop, signal.SIGTERM: stop}
    if hasattr(signal, "SIGUSR1"):  # not on Windows
        handlers[signal.SIGUSR1] = save
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            handlers[signal.SIGHUP] = stop
    for number, handler in handlers.items():
        previous[number] = signal.signal(number, handler)
    try:
        yield asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
