"""Roads and tile sizes: static tables by kernel, architecture, element size and number of rows.

ROADS says whether cuBLAS or a Triton kernel makes a matrix product, TABLE the tiles of Triton's.
Nothing is timed at run time unless BWSFT_AUTOTUNE=1: then every new key times the roads, and the
tiles of its architecture, once and prints the best as a line for its table. Each tile compiles for
its architecture without a spilled register, which tests/kernels/test_compile_offline.py checks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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
    tma: bool = False  # of _matmul_hopper_triton.py

    @property
    def part_cols(self) -> int:
        """Columns of logits that share one partial sum: those kernels sum quarters of a tile."""
        return self.cols // 4 if self.tma else self.cols


CUBLAS, TRITON = "cublas", "triton"

# What anything but sm_80 and sm_90 gets: below 64 KB of shared memory, where consumer cards have
# 100 KB and a T4 64 KB.
SAFE = "safe"
ANY_ROWS = 1 << 40

# (operation, architecture, bytes per element) -> (most rows, road), ascending. Whatever isn't here,
# unknown cards and fp32, takes cuBLAS; Triton multiplies fp32 without tensor cores. "logits" makes
# loss and logits' gradient, "loss" the loss alone, "grad_input" the input's gradient.
# NO ENTRY WAS MEASURED: these are calculated for D 4096, V 126464. One measurement replaces them.
ROADS = {
    # 6 bytes of traffic for a logit and not cuBLAS's 14, 0.25 ms less at N 512: breaks even where
    # the product takes 12 % longer than cuBLAS's 2.1 ms (at 250 TFLOP/s). And half the scratch.
    ("logits", 80, 2): ((ANY_ROWS, TRITON),),
    # One pass over the head is the whole time up to 153 rows on an A100, 267 on an H100, and logits
    # aren't stored. Above, the 12 % hold again; an H100 loses more than that without TMA.
    ("loss", 80, 2): ((512, TRITON), (ANY_ROWS, CUBLAS)),
    ("loss", 90, 2): ((256, TRITON), (ANY_ROWS, CUBLAS)),
    # 128 tiles for 108 processors leave 41 % of two waves idle; split sums fill 99 % (N 640: 99 %).
    ("grad_input", 80, 2): ((640, TRITON), (ANY_ROWS, CUBLAS)),
}

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
# As "loss", but with 4 warps at 128 x 128 on sm_80 softcap and entropy together spill 750 bytes,
# softcap and its slope ("capped", which is "logits" or "loss" with a softcap) 480.
TABLE["stats", 80, 2] = (*TABLE["loss", 80, 2][:-1], (ANY_ROWS, Tile(128, 128, 64, 8, 3)))
TABLE["stats", 90, 2] = TABLE["loss", 90, 2]
TABLE["stats", SAFE, 2] = TABLE["loss", SAFE, 2]
TABLE["capped", 80, 2] = (
    *TABLE["loss", 80, 2][:2], (64, Tile(64, 128, 64, 8, 4)), TABLE["stats", 80, 2][-1],
)
TABLE["capped", 90, 2] = TABLE["loss", 90, 2]
TABLE["capped", SAFE, 2] = ((16, Tile(16, 128, 64, 4, 3)), (ANY_ROWS, Tile(64, 128, 32, 8, 4)))
for _arch in (80, 90, SAFE):
    TABLE["logits", _arch, 2] = TABLE["loss", _arch, 2]
    # fp32 multiplies exactly, without tensor cores: for debugging, not for speed.
    for _kernel in ("logits", "capped", "loss", "stats", "noise", "grad_input"):
        TABLE[_kernel, _arch, 4] = ((ANY_ROWS, Tile(32, 64, 32, 4, 3)),)
    TABLE["noise", _arch, 4] = ((ANY_ROWS, Tile(32, 32, 32, 4, 3)),)

# What the search tries besides, written as in TABLE: no card has run it yet.
CANDIDATES = {
    ("grad_input", 90, 2): (
        (64, Tile(64, 128, 64, 4, 4, True)), (ANY_ROWS, Tile(128, 256, 64, 8, 4, True)),
    ),
    **{
        (kernel, 90, 2): (
            (64, Tile(64, 128, 64, 4, 4, True)), (ANY_ROWS, Tile(128, 256, 64, 8, 4, True)),
        )
        for kernel in ("logits", "capped", "loss")
    },
}

BUCKETS = (16, 32, 64, 128, 256, 512, 1024, ANY_ROWS)
_found = {}


def architecture(device: torch.device) -> int | str:
    """80, 90 or SAFE; the interpreter's CPU is SAFE, and so are AMD's cards, whose (9, 0) is no
    Hopper."""
    if device.type != "cuda" or torch.version.hip is not None:
        return SAFE
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor if (major, minor) in ((8, 0), (9, 0)) else SAFE


def tuned(
    kernel: str, tensor: Tensor, rows: int, launch: Callable[[Tile], object], tma: bool = False
) -> Tile:
    """The tile for `rows` rows of `tensor`'s dtype; launch(tile) runs it once, for the search.
    tma: whether TMA can read the operands; otherwise its tiles are passed over."""
    key = (kernel, architecture(tensor.device), tensor.element_size())
    entries = _entries(key, tma)
    if not flag("BWSFT_AUTOTUNE"):
        return _entry(entries, rows)
    runs = {tile: partial(launch, tile) for _, tile in entries}
    return _fastest("TABLE", key, rows, runs)


def tuned_road(operation: str, tensor: Tensor, rows: int, runs: dict[str, Callable]) -> str:
    """Which of `runs`, road -> function, to call for `rows` rows of `tensor`'s dtype."""
    key = (operation, architecture(tensor.device), tensor.element_size())
    if not flag("BWSFT_AUTOTUNE"):
        return _entry(ROADS.get(key, ((ANY_ROWS, CUBLAS),)), rows)
    return _fastest("ROADS", key, rows, runs)


def possible_roads(
    operation: str, dtype: torch.dtype, rows: int, device: torch.device
) -> set[str]:
    """The roads that `tuned_road` may take for up to `rows` rows, to plan memory for any."""
    if flag("BWSFT_AUTOTUNE"):
        return {CUBLAS, TRITON}
    found, covered = set(), 0
    for most, road in ROADS.get((operation, architecture(device), dtype.itemsize),
                                ((ANY_ROWS, CUBLAS),)):
        if covered < max(rows, 1):
            found.add(road)
        covered = most
    return found


def fewest_cols(kernels: tuple[str, ...], dtype: torch.dtype, device: torch.device) -> int:
    """Columns of the narrowest tile of some kernels: it makes the most partial results."""
    keys = [(kernel, architecture(device), dtype.itemsize) for kernel in kernels]
    return min(tile.part_cols for key in keys for _, tile in _entries(key, True))


def _entries(key: tuple, tma: bool) -> list[tuple[int, Tile]]:
    tiles = TABLE[key] + (CANDIDATES.get(key, ()) if flag("BWSFT_AUTOTUNE") else ())
    return [entry for entry in tiles if tma or not entry[1].tma]


def _entry(entries: tuple, rows: int) -> object:
    return next(choice for most, choice in entries if rows <= most)


def _fastest(table: str, key: tuple, rows: int, runs: dict[object, Callable]) -> object:
    """The fastest of `runs`, timed once for each bucket of rows."""
    bucket = next(most for most in BUCKETS if rows <= most)
    if (table, key, bucket) not in _found:
        best = min(runs, key=lambda choice: milliseconds(runs[choice]))
        _found[table, key, bucket] = best
        print(f"{table}[{', '.join(map(repr, key))}]: ({bucket}, {best!r}),", flush=True)
    return _found[table, key, bucket]


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
        graph.replay()  # untimed: the timed one is queued before it ends, so no GPU waits
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
