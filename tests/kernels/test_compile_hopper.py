"""Code quality of the products with TMA, compiled for sm_90 without a GPU.

The interpreter can't compile, so this file runs without TRITON_INTERPRET; what the kernels compute
is tested in triton/test_matmul_hopper.py.
"""

import os
from pathlib import Path

import pytest
import torch
from bwsft_kernels import _linear_cross_entropy_bwd_triton as bwd
from bwsft_kernels import _linear_cross_entropy_fwd_triton as fwd
from bwsft_kernels import _tuning

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1 replaces the compiler", allow_module_level=True)

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    import offline_table as table

ROWS, HIDDEN = 509, 4096
empty = lambda *shape, dtype=torch.bfloat16: torch.empty(*shape, dtype=dtype, device="meta")  # noqa: E731


def product(vocabulary, kernel, full, row_stride=HIDDEN):
    """The launch of one of the table's products; `full`: bias, smoothing and an excluded column."""
    x = empty(ROWS, row_stride)[:, :HIDDEN]
    head, width = empty(vocabulary, HIDDEN), -(-vocabulary // 64) * 64
    if kernel == "grad_input":
        return lambda: bwd.split_product(empty(ROWS, width), head)
    numbers = empty(ROWS, dtype=torch.float32)
    softcap = 30.0 if kernel == "capped" else None
    return lambda: fwd.by_triton(
        x, head, empty(width) if full else None, empty(ROWS, dtype=torch.int64),
        None if kernel == "loss" else numbers, numbers if full and softcap is None else None,
        softcap, 7 if full else None, empty(ROWS, width * 8, dtype=torch.uint8),
    )


def compiled(monkeypatch, kernel, tile, *case, **options):
    """The kernels that a launch on an H100 would start while the table holds `tile` alone."""
    key = (kernel, 90, 2)
    entries = ((_tuning.ANY_ROWS, tile), *_tuning.TABLE[key])
    monkeypatch.setitem(_tuning.TABLE, key, entries)
    return table.compile_launch(product(*case, kernel, **options), 90)


@pytest.mark.parametrize("vocabulary, full", [(126_464, False), (50_257, True)])
@pytest.mark.parametrize("kernel", ["grad_input", "logits", "capped", "loss"])
def test_tma_feeds_wgmma_and_nothing_spills(kernel, vocabulary, full, monkeypatch):
    for _, tile in _tuning.CANDIDATES[kernel, 90, 2]:
        compiled_kernel = compiled(monkeypatch, kernel, tile, vocabulary, full=full)[0]
        shape = f"{tile.rows}x{tile.cols}x{tile.depth}"
        row = table.inspect(compiled_kernel, 90, kernel, shape)
        assert not table.complaints(row) and row.kernel.endswith("_hopper"), row
        ptx = compiled_kernel.asm["ptx"]
        assert row.matrix == "wgmma" and row.copies == 0, row  # nothing but TMA brings operands
        # A load of either operand before the loop for all stages but one, and one in it.
        loads = ptx.count("cp.async.bulk.tensor.2d.shared")
        assert loads >= 2 * tile.stages, (row, loads)
        stores = ptx.count("cp.async.bulk.tensor.2d.global.shared")
        assert (stores > 0) == (kernel in ("logits", "capped")), row
        # Scratch in global memory would need the user's allocator.
        assert compiled_kernel.metadata.global_scratch_size == 0


def test_operands_that_tma_cannot_read_take_the_other_kernel(monkeypatch):
    """Rows 8,198 bytes apart: no multiple of 16."""
    tile = _tuning.CANDIDATES["logits", 90, 2][-1][1]
    kernels = compiled(monkeypatch, "logits", tile, 50_257, full=False, row_stride=HIDDEN + 3)
    assert [k.metadata.name for k in kernels][0] == "_logits_fwd_kernel"


def test_the_committed_table_has_every_candidate():
    page = Path(table.__file__).parents[1] / "results/offline_table_triton-3.9.0.md"
    rows = [line.split(" | ") for line in page.read_text(encoding="utf-8").splitlines()]
    present = {(row[0], *row[3:6]) for row in rows if len(row) > 5 and row[2] == "sm_90"}
    for (kernel, *_), entries in _tuning.CANDIDATES.items():
        name = "grad_input_hopper" if kernel == "grad_input" else "logits_hopper"
        for _, tile in entries:
            shape = f"{tile.rows}x{tile.cols}x{tile.depth}"
            assert (f"| {name}", shape, str(tile.warps), str(tile.stages)) in present
