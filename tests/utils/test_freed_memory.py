"""Memory that was freed goes back to the system."""

import sys
from pathlib import Path

import pytest

from bwsft.utils.freed_memory import give_back


def resident() -> int:
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in x)
    return int(line.split()[1]) << 10


@pytest.mark.skipif(sys.platform != "linux", reason="where there is /proc")
def test_freed_blocks_are_given_back():
    blocks = [bytes(2000) for _ in range(50_000)]
    last = bytes(2000)  # after them: the heap cannot shrink by itself
    full = resident()
    del blocks
    give_back()
    assert resident() < full - 50_000_000 and last
