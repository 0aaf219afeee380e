"""Tile sizes of `range_attention` by kernel, architecture, element size and head width."""

from dataclasses import dataclass

from torch import Tensor

from ._tuning import SAFE, architecture


@dataclass(frozen=True)
class RangeTile:
    """rows: what a program keeps, of TILE of the plan; cols: what it goes through at a time."""

    rows: int
    cols: int
    warps: int
    stages: int


WIDTHS = (32, 64, 128, 256)
_T = RangeTile
TABLE = {
    (kernel, arch, size): (_T(64, 32, 4, 2),) * 4 if size == 2 else (_T(32, 16, 4, 2),) * 4
    for kernel in ("fwd", "dq", "dkv") for arch in (80, 90, SAFE) for size in (2, 4)
}


def head_width(width: int) -> int:
    """The power of two that holds a head's entries, at least 16: what tensor cores multiply."""
    return max(16, 1 << (width - 1).bit_length())


def range_tile(kernel: str, q: Tensor) -> RangeTile:
    tiles = TABLE[kernel, architecture(q.device), q.element_size()]
    return next(t for most, t in zip(WIDTHS, tiles, strict=True) if q.size(-1) <= most)
