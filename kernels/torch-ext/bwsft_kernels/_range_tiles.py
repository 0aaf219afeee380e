"""Tile sizes of `range_attention` by kernel, architecture, element size and head width.

NO ENTRY WAS MEASURED: each is the largest of those that compile for its architecture without a
spilled register, for powers of two and for 3/4 of them, which are masked (benchmarks/gates); a head
of 192 spills a few. fp32 multiplies exactly, without tensor cores, and spills with wide heads: for
debugging, not for speed.
"""

from dataclasses import dataclass

from torch import Tensor

from . import _tuning
from ._tuning import SAFE


@dataclass(frozen=True)
class RangeTile:
    """rows: what a program keeps, a divisor of the plan's TILE; cols: what it goes through at a
    time, queries' keys or keys' queries."""

    rows: int
    cols: int
    warps: int
    stages: int


WIDTHS = (64, 128, 256)  # a tile for heads of up to as many entries
_T = RangeTile
TABLE = {
    # 128 rows read keys and values half as often as 64, where 8 warps share their registers.
    ("fwd", 80, 2): (_T(64, 64, 4, 3), _T(128, 32, 8, 3), _T(64, 32, 8, 2)),
    ("fwd", 90, 2): (_T(128, 64, 4, 3), _T(128, 64, 8, 3), _T(128, 32, 8, 2)),
    ("fwd", SAFE, 2): (_T(64, 32, 4, 2), _T(64, 32, 8, 2), _T(32, 32, 4, 2)),
    # A tile of dO beside q, and a second product with each tile of keys.
    ("dq", 80, 2): (_T(64, 64, 4, 2), _T(64, 64, 8, 2), _T(32, 32, 8, 2)),
    ("dq", 90, 2): (_T(64, 64, 4, 2), _T(128, 64, 8, 2), _T(64, 32, 8, 2)),
    ("dq", SAFE, 2): (_T(64, 64, 8, 2), _T(64, 32, 8, 2), _T(32, 32, 8, 2)),
    # Two sums to keep. WGMMA needs 64 rows, which spill with 256 wide heads: there mma.sync.
    ("dkv", 80, 2): (_T(64, 64, 4, 2), _T(64, 64, 8, 2), _T(32, 32, 8, 2)),
    ("dkv", 90, 2): (_T(64, 64, 4, 2), _T(64, 32, 8, 2), _T(32, 32, 8, 2)),
    ("dkv", SAFE, 2): (_T(64, 32, 4, 2), _T(64, 32, 8, 2), _T(32, 32, 8, 2)),
}
for _arch in (80, 90, SAFE):
    for _kernel in ("fwd", "dq", "dkv"):
        TABLE[_kernel, _arch, 4] = (_T(32, 32, 8, 1), _T(16, 16, 8, 1), _T(16, 16, 8, 1))


def head_width(width: int) -> int:
    """The power of two that holds a head's entries, at least 16: what tensor cores multiply."""
    return max(16, 1 << (width - 1).bit_length())


def range_tile(kernel: str, q: Tensor) -> RangeTile:
    tiles = TABLE[kernel, _tuning.architecture(q.device), q.element_size()]
    return next(t for most, t in zip(WIDTHS, tiles, strict=True) if q.size(-1) <= most)
