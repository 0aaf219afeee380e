"""A limit on the time that a piece of Python may take, a regular expression included."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """TimeoutError in the block after `seconds`, by SIGALRM.

    No limit outside the main thread and on systems without this signal.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or not hasattr(signal, "setitimer"):
        yield
        return

    def over(*_: object) -> None:
        raise TimeoutError(f"took more than {seconds:g} s")

    handler, began = signal.signal(signal.SIGALRM, over), time.monotonic()
    left, again = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # a timer that ran before goes on
            left = max(left - (time.monotonic() - began), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, left, again)
