"""Times roads and tiles around those of _tuning.py and proposes entries to paste there.

python benchmarks/gates/tile_search.py [--seconds 60] [--out FILE] [--dry]

For each operation and number of rows, at LLaDA-8B's head in bf16: cuBLAS where it is a road, the
present tile, the candidates with TMA, and neighbors of both (one number doubled, halved or one more
or less) that fit the chip, each checked against the present tile's result before it is timed. The
most valuable cases come first; what was found is written after each, and a case that fails is
written as failed. Paste only what tests/kernels/test_compile_offline.py then finds free of spills.
--dry walks the same candidates of sm_80 and sm_90 without a GPU, by a made-up clock.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from bwsft_kernels import _tuning
from bwsft_kernels._tuning import CUBLAS, TRITON, Tile

from bwsft.utils.files import write_atomic

VOCAB, HIDDEN = 126_464, 4096
# Training first (512 supervised rows), then the sampler's rows, then evaluation.
CASES = (("grad_input", 512), ("logits", 512), ("stats", 32), ("loss", 512), ("grad_input", 1024),
         ("logits", 128), ("stats", 16), ("grad_input", 128), ("loss", 128), ("loss", 2048),
         ("stats", 256), ("logits", 64), ("grad_input", 64), ("noise", 32))  # fmt: skip
LEAST_GAIN = 1.03  # below, a second run may reverse it
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


def launchers(kernel: str, rows: int, device: str = "cuda", dtype=torch.bfloat16) -> dict:
    """Road -> run: those of an operation that has two, and Triton's of the others."""
    from bwsft_kernels import _linear_argmax_triton
    from bwsft_kernels import _linear_cross_entropy_bwd_triton as bwd
    from bwsft_kernels import _linear_cross_entropy_fwd_triton as fwd
    from bwsft_kernels._linear_argmax import ArgmaxOptions

    options = dict(device=device, dtype=dtype)
    x, head = torch.randn(rows, HIDDEN, **options), torch.randn(VOCAB, HIDDEN, **options) / 64
    if kernel == "grad_input":
        g = torch.randn(rows, VOCAB, **options)  # 64 divides V: no rest
        roads = {CUBLAS: bwd.wide_product, TRITON: bwd.split_product}
        return {road: partial(product, g, head) for road, product in roads.items()}
    if kernel in ("logits", "loss"):
        target = torch.randint(VOCAB, (rows,), device=device)
        row_weight = torch.ones(rows, device=device) if kernel == "logits" else None
        scratch = torch.empty(rows, VOCAB * 4, dtype=torch.uint8, device=device)
        given = x, head, None, target, row_weight, None, None, None, scratch
        return {CUBLAS: lambda: fwd.by_cublas(*given), TRITON: lambda: fwd.by_triton(*given)}
    noise = torch.zeros(5, rows, dtype=torch.int64, device=device) if kernel == "noise" else None
    plan = ArgmaxOptions(banned=(), hidden_id=VOCAB - 128, entropy=False, margin=False, softcap=0.0,
                         round_bf16=False)
    return {TRITON: lambda: _linear_argmax_triton.head_argmax(x, head, None, plan, noise, 1.0)[1]}


def with_tile(key, tile: Tile, run):
    """run() while the table holds this tile alone."""
    with mock.patch.dict(_tuning.TABLE, {key: ((_tuning.ANY_ROWS, tile),)}):
        return run()


def copy(results) -> list:
    """The tensors of a result; the next run may overwrite them."""
    results = results if isinstance(results, tuple) else (results,)
    return [t.clone() for t in results if t is not None]


def check(found: list, truth: list) -> None:
    """Sums in another order, of numbers rounded to bf16 once; a wrong tile is off by more."""
    for one, true in zip(found, truth, strict=True):
        atol = 1e-3 * float(true.double().abs().mean())
        torch.testing.assert_close(one, true, rtol=2**-7, atol=atol)


def tiles_to_try(key, rows: int) -> list[Tile]:
    """The present tile, TMA's for these rows, then the neighbors of both."""
    first = [present(*key[:2], rows)]
    first += [tile for most, tile in _tuning.CANDIDATES.get(key, ()) if rows <= most][:1]
    return list(dict.fromkeys([*first, *(n for tile in first for n in neighbors(tile, key[1]))]))


def search(key, rows: int, runs: dict, clock, deadline: float) -> dict:
    """Milliseconds of cuBLAS, of the present tile and of others, and entries that are faster."""
    now, *others = tiles_to_try(key, rows)
    run, times, failed = runs[TRITON], {}, []
    truth = with_tile(key, now, lambda: copy(run()))
    times[now] = with_tile(key, now, lambda: clock(run))
    for tile in others:
        if time.monotonic() > deadline:
            break
        try:
            check(with_tile(key, tile, lambda: copy(run())), truth)
            times[tile] = with_tile(key, tile, lambda: clock(run))
        except Exception as error:  # the compiler may refuse a tile in any way
            failed.append(f"{tile}: {(str(error).splitlines() or [''])[0][:120]}")
    best = min(times, key=times.get)
    gain, proposed, name = times[now] / times[best], [], ", ".join(map(repr, key))
    if gain > LEAST_GAIN:
        proposed.append(f"TABLE[{name}]: ({rows}, {best}),")
    cublas = clock(runs[CUBLAS]) if CUBLAS in runs else None
    if cublas is not None:
        road = present_road(key, rows)
        ratio = cublas / times[best]
        if (ratio if road == CUBLAS else 1 / ratio) > LEAST_GAIN:
            other = TRITON if road == CUBLAS else CUBLAS
            proposed.append(f"ROADS[{name}]: ({rows}, {other!r}),")
    return {
        "key": [str(part) for part in key], "rows": rows, "present": asdict(now),
        "cublas_ms": cublas, "ms": {str(tile): round(ms, 4) for tile, ms in times.items()},
        "failed": failed, "proposed": proposed, "gain": round(gain, 3),
    }


def present_road(key, rows: int) -> str:
    entries = _tuning.ROADS.get(key, ((_tuning.ANY_ROWS, CUBLAS),))
    return next(road for most, road in entries if rows <= most)


def measure(key, rows: int, dry: bool, deadline: float) -> dict:
    """`search`, or why it failed: the cases after it are measured all the same."""
    try:
        runs = dict.fromkeys((CUBLAS, TRITON), lambda: torch.zeros(1))
        runs = runs if dry else launchers(key[0], rows)
        return search(key, rows, runs, made_up(key) if dry else _tuning.milliseconds, deadline)
    except Exception as error:
        text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        return {"key": [str(part) for part in key], "rows": rows, "ms": {}, "failed": [text],
                "proposed": [], "gain": None}


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="stop after this")
    parser.add_argument("--out", type=Path, help="write what was found to this JSON file")
    parser.add_argument("--dry", action="store_true", help="without a GPU, by a made-up clock")
    args = parser.parse_args(argv)
    if not args.dry and not torch.cuda.is_available():
        sys.exit("no CUDA device is available: --dry walks the candidates without one")
    deadline, found = time.monotonic() + args.seconds, []
    device = torch.device("cpu" if args.dry else "cuda")
    for arch in (80, 90) if args.dry else (_tuning.architecture(device),):
        for kernel, rows in CASES:
            if time.monotonic() > deadline:
                break
            found.append(measure((kernel, arch, 2), rows, args.dry, deadline))
            case = found[-1]
            lines = (case["proposed"] or ["the tables stay"]) if case["ms"] else case["failed"]
            print(f"{kernel} sm_{arch}, {rows} rows: {len(case['ms'])} tiles, gain "
                  f"{case['gain']}", *lines, sep="\n  ", flush=True)
            if args.out:
                write_atomic(args.out, json.dumps(found, indent=1) + "\n")
    print(json.dumps({"bench": "tiles", "dry": args.dry, "found": found}))
    return 0 if all(case["ms"] for case in found) else 1


def made_up(key):
    """A clock by which fewer rows and more stages are faster."""

    def clock(run) -> float:
        run()
        tile = _tuning.TABLE[key][0][1]
        return tile.rows / tile.stages

    return clock


if __name__ == "__main__":
    sys.exit(main())
