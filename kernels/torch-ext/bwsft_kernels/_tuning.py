"""Tile sizes: a static table by kernel, architecture, element size and number of rows.

Nothing is timed at run time unless BWSFT_AUTOTUNE=1: then every new key times the tiles of its
architecture once and prints the best as a line for TABLE. Each tile here compiles for its
architecture without a spilled register, which tests/kernels/test_compile_offline.py checks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ._dispatch import flag


@dataclass(frozen=True)
class Tile:
    """A program's share: rows x cols of the result, `depth` of the summed axis per step."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int


# What anything but sm_80 and sm_90 gets: below 64 KB of shared memory, where consumer cards have
# 100 KB and a T4 64 KB.
SAFE = "safe"
ANY_ROWS = 1 << 40

# (kernel, architecture, bytes per element) -> (most rows, tile), ascending. sm_90 has no small row
# tiles: WGMMA needs 64 rows, and with few rows the head's bandwidth sets the time anyway.
# "noise" keeps 32 results a thread: with 64, Philox and two logarithms spill 50 to 340 bytes.
TABLE = {
    ("loss", 80, 2): (
        (16, Tile(16, 128, 128, 4, 4)), (32, Tile(32, 128, 128, 4, 3)),
        (64, Tile(64, 128, 64, 4, 4)), (ANY_ROWS, Tile(128, 128, 64, 4, 3)),
    ),
    ("loss", 90, 2): ((64, Tile(64, 128, 64, 4, 4)), (ANY_ROWS, Tile(128, 128, 64, 8, 4))),
    ("loss", SAFE, 2): ((16, Tile(16, 128, 64, 4, 3)), (ANY_ROWS, Tile(64, 128, 32, 4, 4))),
    ("noise", 80, 2): (
        (16, Tile(16, 128, 128, 4, 4)), (32, Tile(32, 128, 128, 4, 3)),
        (ANY_ROWS, Tile(64, 128, 64, 8, 4)),
    ),
    ("noise", 90, 2): ((ANY_ROWS, Tile(64, 128, 64, 8, 4)),),
    ("noise", SAFE, 2): ((16, Tile(16, 128, 64, 4, 3)), (ANY_ROWS, Tile(64, 64, 32, 4, 4))),
    ("grad_input", 80, 2): (
        (32, Tile(32, 128, 64, 4, 4)), (64, Tile(64, 128, 64, 4, 3)),
        (ANY_ROWS, Tile(128, 128, 64, 8, 3)),
    ),
    ("grad_input", 90, 2): ((64, Tile(64, 128, 64, 4, 4)), (ANY_ROWS, Tile(128, 256, 64, 8, 3))),
    ("grad_input", SAFE, 2): ((ANY_ROWS, Tile(64, 64, 64, 4, 3)),),
}
# As "loss", but softcap and entropy together spill 750 bytes with 4 warps at 128 x 128 on sm_80.
TABLE["stats", 80, 2] = (*TABLE["loss", 80, 2][:-1], (ANY_ROWS, Tile(128, 128, 64, 8, 3)))
TABLE["stats", 90, 2] = TABLE["loss", 90, 2]
TABLE["stats", SAFE, 2] = TABLE["loss", SAFE, 2]
for _arch in (80, 90, SAFE):
    # fp32 multiplies exactly, without tensor cores: for debugging, not for speed.
    for _kernel in ("loss", "stats", "noise", "grad_input"):
        TABLE[_kernel, _arch, 4] = ((ANY_ROWS, Tile(32, 64, 32, 4, 3)),)

_found = {}


def architecture(device: torch.device) -> int | str:
    """80, 90 or SAFE; the interpreter's CPU is SAFE."""
    if device.type != "cuda":
        return SAFE
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor if (major, minor) in ((8, 0), (9, 0)) else SAFE


def tuned(kernel: str, tensor: Tensor, rows: int, launch: Callable[[Tile], object]) -> Tile:
    """The tile for `rows` rows of `tensor`'s dtype; launch(tile) runs it once, for the search."""
    arch = architecture(tensor.device)
    entries = TABLE[kernel, arch, tensor.element_size()]
    if flag("BWSFT_AUTOTUNE"):
        bucket = next(most for most in (16, 32, 64, 128, 256, 512, 1024, ANY_ROWS) if rows <= most)
        key = (kernel, arch, tensor.element_size(), bucket)
        if key not in _found:
            tiles = list(dict.fromkeys(tile for _, tile in entries))
            _found[key] = min(tiles, key=lambda tile: milliseconds(lambda: launch(tile)))
            name = ", ".join(map(repr, key[:3]))
            print(f"TABLE[{name}]: ({bucket}, {_found[key]}),", flush=True)
        return _found[key]
    return next(tile for most, tile in entries if rows <= most)


def milliseconds(run: Callable[[], object], repeats: int = 10) -> float:
    """Median time of `run` on the current GPU, after two calls that compile and warm up.

    `repeats` runs are one CUDA graph: launched one by one, a kernel shorter than its launch would
    be timed as the host's time between two launches.
    """
    run(), run()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(repeats):
            run()
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # untimed: the timed one is queued behind it, so nothing waits for the host
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / repeats)
    return sorted(times)[len(times) // 2]


def processors(device: torch.device) -> int:
    """Streaming multiprocessors; 4 for the interpreter's CPU, so that tests get splits."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def choose_splits(tile: Tile, tiles: int, steps: int, device: torch.device) -> int:
    """Over how many programs to spread a sum of `steps` steps when the result has `tiles` tiles.

    The fewest, up to 16, that fill 95 % of the last wave of programs, else the fullest.
    """
    slots = processors(device) * max(1, 8 // tile.warps)

    def fill(splits: int) -> float:
        waves = -(-tiles * splits // slots)
        return tiles * splits / (waves * slots)

    options = range(1, min(16, steps) + 1)
    return next((splits for splits in options if fill(splits) >= 0.95), max(options, key=fill))
