"""Times roads, and tiles around those in _tuning.py, and proposes entries to paste there.

python benchmarks/gates/tile_search.py [--seconds 60] [--out FILE] [--dry]

At LLaDA-8B's head in bf16. First cuBLAS against Triton, for ROADS. Then, for each kernel and number
of rows, for TABLE: the present tile, its neighbors
(one number doubled, halved or one more or less) that fit the chip, each checked against the present
tile's result before it is timed. The most valuable cases come first; what was found is written
after each. Paste only what tests/kernels/test_compile_offline.py then finds free of spills. --dry
walks the same candidates of sm_80 and sm_90 without a GPU, by a made-up clock.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
from bwsft_kernels import _tuning
from bwsft_kernels._tuning import Tile

from bwsft.utils.files import write_atomic

VOCAB, HIDDEN = 126_464, 4096
# Training first (the gradient of 512 supervised rows), then the sampler's rows, then evaluation.
CASES = (("logits", 512), ("grad_input", 512), ("stats", 32), ("stats", 16), ("loss", 512),
         ("grad_input", 1024), ("stats", 256), ("grad_input", 64), ("noise", 32))  # fmt: skip
ROAD_CASES = (("logits", 512), ("grad_input", 512), ("loss", 512), ("loss", 128), ("loss", 2048),
              ("logits", 128), ("grad_input", 128), ("grad_input", 1024))  # fmt: skip
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, _tuning.SAFE: 64 << 10}


def present(kernel: str, arch, rows: int) -> Tile:
    return next(tile for most, tile in _tuning.TABLE[kernel, arch, 2] if rows <= most)


def fits(tile: Tile, arch) -> bool:
    """Both operands of every stage in shared memory, at most 128 results a thread, and no less
    than tl.dot takes."""
    shared = 2 * tile.stages * tile.depth * (tile.rows + tile.cols)
    results = tile.rows * tile.cols // (32 * tile.warps)
    sizes = min(tile.rows, tile.cols) >= 16 and tile.depth >= 32
    return shared <= SHARED_BYTES[arch] and 4 <= results <= 128 and sizes and tile.warps in (4, 8)


def neighbors(tile: Tile, arch) -> list[Tile]:
    """Tiles one step away, the likeliest to help first, all of which fit."""
    found = []
    for field in ("warps", "cols", "rows", "depth"):
        value = getattr(tile, field)
        found += [replace(tile, **{field: new}) for new in (value * 2, value // 2)]
    for stages in (tile.stages + 1, tile.stages - 1):
        if stages > 1:
            found.append(replace(tile, stages=stages))
    # More columns need more warps, or the results don't fit the registers.
    found.append(replace(tile, cols=tile.cols * 2, warps=tile.warps * 2))
    found.append(replace(tile, rows=tile.rows * 2, warps=tile.warps * 2))
    return [t for t in dict.fromkeys(found) if t != tile and fits(t, arch)]


def launcher(kernel: str, rows: int, road: str = _tuning.TRITON):
    """A function that runs the kernel once, by the tile that the table holds, and its result."""
    from bwsft_kernels import (
        _linear_argmax_triton,
        _linear_cross_entropy_bwd_triton,
        _linear_cross_entropy_fwd_triton,
        _wide_product,
    )
    from bwsft_kernels._linear_argmax import ArgmaxOptions

    options = dict(device="cuda", dtype=torch.bfloat16)
    by_triton = road == _tuning.TRITON
    torch.manual_seed(0)
    head = torch.randn(VOCAB, HIDDEN, **options) * 0.02
    if kernel == "grad_input":
        grad = torch.randn(rows, VOCAB, **options)
        multiply = _wide_product.wide_product
        if by_triton:
            multiply = _linear_cross_entropy_bwd_triton.split_product
        return lambda: multiply(grad, head)
    x = torch.randn(rows, HIDDEN, **options)
    if kernel in ("logits", "loss"):
        target = torch.randint(VOCAB, (rows,), device="cuda")
        weight = torch.ones(rows, device="cuda") if kernel == "logits" else None
        scratch = torch.empty(rows * VOCAB * 4, dtype=torch.uint8, device="cuda")
        module = _linear_cross_entropy_fwd_triton
        run = module.by_triton if by_triton else module.by_cublas
        return lambda: run(x, head, None, target, weight, None, None, None, scratch)[0]
    noise = torch.zeros(5, rows, dtype=torch.int64, device="cuda") if kernel == "noise" else None
    plan = ArgmaxOptions(banned=(), hidden_id=126_336, entropy=False, margin=False, softcap=0.0,
                         round_bf16=False)
    return lambda: _linear_argmax_triton.head_argmax(x, head, None, plan, noise, 1.0)[1]


def with_tile(key, tile: Tile, run):
    """run() while the table holds this tile alone."""
    kept = _tuning.TABLE[key]
    _tuning.TABLE[key] = ((_tuning.ANY_ROWS, tile),)
    try:
        return run()
    finally:
        _tuning.TABLE[key] = kept


def search(key, rows: int, run, clock, deadline: float) -> dict:
    """Milliseconds of the present tile and of its neighbors, and an entry if one is faster."""
    kernel, arch, _ = key
    now = present(kernel, arch, rows)
    truth = with_tile(key, now, run)
    times, failed = {now: with_tile(key, now, lambda: clock(run))}, []
    for tile in neighbors(now, arch):
        if time.monotonic() > deadline:
            break
        try:
            # fp32 sums in another order; a wrong tile is off by far more.
            torch.testing.assert_close(with_tile(key, tile, run), truth, rtol=1e-3, atol=1e-3)
            times[tile] = with_tile(key, tile, lambda: clock(run))
        except Exception as error:  # the compiler may refuse a tile in any way
            failed.append(f"{tile}: {str(error).splitlines()[0][:120]}")
    best = min(times, key=times.get)
    gain = times[now] / times[best]
    return {
        "key": [str(part) for part in key], "rows": rows, "present": asdict(now),
        "ms": {str(tile): round(ms, 4) for tile, ms in times.items()}, "failed": failed,
        # Below 3 % a second run may reverse it.
        "proposed": f"TABLE[{kernel!r}, {arch!r}, 2]: ({rows}, {best})," if gain > 1.03 else None,
        "gain": round(gain, 3),
    }


def compare_roads(operation: str, arch, rows: int, runs: dict, clock) -> dict:
    """Milliseconds of each of `runs`, road -> function, and an entry if ROADS says another."""
    cublas = _tuning.CUBLAS
    truth = runs[cublas]()
    for run in runs.values():
        torch.testing.assert_close(run(), truth, rtol=1e-3, atol=1e-3)
    times = {road: clock(run) for road, run in runs.items()}
    best = min(times, key=times.get)
    entries = _tuning.ROADS.get((operation, arch, 2), ((_tuning.ANY_ROWS, cublas),))
    now = next(road for most, road in entries if rows <= most)
    gain = times[now] / times[best]
    return {
        "key": [operation, str(arch), "2"], "rows": rows, "present": now,
        "ms": {road: round(ms, 4) for road, ms in times.items()},
        "proposed": f"ROADS[{operation!r}, {arch!r}, 2]: ({rows}, {best!r})," if gain > 1.03
        else None,
        "gain": round(gain, 3),
    }


def walk(dry: bool, deadline: float):
    """What is found for each case, the roads of an architecture first, until the time is up."""
    device = torch.device("cpu" if dry else "cuda")
    still = (lambda: torch.zeros(1)) if dry else None
    for arch in (80, 90) if dry else (_tuning.architecture(device),):
        for operation, rows in ROAD_CASES:
            if time.monotonic() > deadline:
                break
            runs = {road: still or launcher(operation, rows, road)
                    for road in (_tuning.CUBLAS, _tuning.TRITON)}
            clock = (lambda run: 1.0) if dry else _tuning.milliseconds
            yield compare_roads(operation, arch, rows, runs, clock)
        for kernel, rows in CASES:
            if time.monotonic() > deadline:
                break
            key = (kernel, arch, 2)
            clock = made_up(key) if dry else _tuning.milliseconds
            yield search(key, rows, still or launcher(kernel, rows), clock, deadline)


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="stop after this")
    parser.add_argument("--out", type=Path, help="write what was found to this JSON file")
    parser.add_argument("--dry", action="store_true", help="without a GPU, by a made-up clock")
    args = parser.parse_args(argv)
    if not args.dry and not torch.cuda.is_available():
        sys.exit("no CUDA device is available: --dry walks the candidates without one")
    found = []
    for one in walk(args.dry, time.monotonic() + args.seconds):
        found.append(one)
        print(f"{' '.join(one['key'][:2])}, {one['rows']} rows: {len(one['ms'])} candidates, gain "
              f"{one['gain']}, {one['proposed'] or 'the table stays'}", flush=True)
        if args.out:
            write_atomic(args.out, json.dumps(found, indent=1) + "\n")
    print(json.dumps({"bench": "tiles", "dry": args.dry, "found": found}))


def made_up(key):
    """A clock by which fewer rows and more stages are faster."""

    def clock(run) -> float:
        run()
        ((_, tile),) = _tuning.TABLE[key]
        return tile.rows / tile.stages

    return clock


if __name__ == "__main__":
    main()
