"""Code quality of every shipped Triton configuration, compiled for GPUs that aren't there.

The interpreter can't compile, so this file runs without TRITON_INTERPRET.
"""

import os
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from bwsft_kernels import _linear_cross_entropy_bwd_triton, _tuning

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1 replaces the compiler", allow_module_level=True)

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(BENCHMARKS))
    import offline_table as table
    from offline_cases import _philox as philox_launch

PRODUCTS = {"head_loss_fwd", "head_stats_fwd", "grad_input_bwd"}
# They read and write rows: 16 bytes at a time, or they'd waste the bandwidth that they live on.
STREAMS = {
    "cross_entropy_rows": 2, "rms_norm_fwd": 6, "rms_norm_bwd": 6, "rotary_heads": 2,
    "swiglu_fwd": 1, "swiglu_bwd": 1,
}
UNFUSED = {"block_mask_fwd", "rotary_heads"}  # to have the bits of torch
BUILDS = [(80, torch.bfloat16), (90, torch.bfloat16)]
SLOW_BUILDS = [
    (86, torch.bfloat16), (80, torch.float16), (90, torch.float16),
    (80, torch.float32), (86, torch.float32), (90, torch.float32),
]


def wide_copies(row, itemsize):
    """How many 16-byte copies a thread makes if both operands of every stage are read so wide."""
    rows, cols, depth = map(int, row.tile.split("x"))
    return row.stages * (rows + cols) * depth * itemsize // (16 * 32 * row.warps)


def check(arch, dtype):
    rows = table.build(arch, dtype)
    wrong = [text for row in rows for text in table.complaints(row)]
    assert not wrong, "\n".join(wrong)
    products = [row for row in rows if row.kernel in PRODUCTS]
    # Each entry in each of its variants, and none twice.
    entries = [
        (name, tile) for (name, key, size), tiles in _tuning.TABLE.items()
        if key == table.CHIPS[arch].table and size == dtype.itemsize for _, tile in tiles
    ]
    assert len(products) == sum(1 if name == "grad_input" else 2 for name, _ in entries)
    for row in products:
        if dtype == torch.float32:
            assert row.matrix == "-", row  # exact products, no TF32
        else:
            assert row.matrix == ("wgmma" if arch == 90 else "mma.sync"), row
        assert row.widths == (16,) and row.copies == wide_copies(row, dtype.itemsize), row
    streams = [row for row in rows if row.kernel in STREAMS]
    assert Counter(row.kernel for row in streams) == STREAMS
    assert all(row.widths == (16,) for row in streams)
    assert all(row.fp_fusion == (row.kernel not in UNFUSED) for row in rows)


@pytest.mark.parametrize("arch, dtype", BUILDS)
def test_no_spills_and_tensor_cores(arch, dtype):
    check(arch, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("arch, dtype", SLOW_BUILDS)
def test_no_spills_and_tensor_cores_elsewhere(arch, dtype):
    check(arch, dtype)


def test_a_spill_a_narrow_load_and_too_much_memory_would_be_seen(monkeypatch):
    """The check itself: 256 x 256 tiles spill and need 192 KB; an odd D is read 2 bytes wide."""
    large = ((1 << 40, _tuning.Tile(256, 256, 64, 4, 4)),)
    monkeypatch.setitem(_tuning.TABLE, ("grad_input", 80, 2), large)
    head = torch.empty(table.V, table.D, dtype=torch.bfloat16)

    def launch(weight):
        g = torch.empty(500, table.V, dtype=torch.bfloat16)
        _linear_cross_entropy_bwd_triton.grad_input(g, weight)

    kernel = table.compile_launch(lambda: launch(head), 80)[0]
    row = table.inspect(kernel, 80, "", "")
    assert row.spilled > 0 and row.shared > 163 << 10
    assert len(table.complaints(row)) >= 2
    small = ((1 << 40, _tuning.Tile(64, 64, 64, 4, 3)),)
    monkeypatch.setitem(_tuning.TABLE, ("grad_input", 80, 2), small)
    kernel = table.compile_launch(lambda: launch(head[:, :4093].clone()), 80)[0]
    row = table.inspect(kernel, 80, "", "64x64x64")
    assert row.copies == wide_copies(row, 2) // 2  # the other half isn't asynchronous at all


def test_philox_asserts_on_the_device():
    """sample_id out of range; Triton leaves device_assert out unless a launch asks for it."""
    (kernel,) = table.compile_launch(lambda: philox_launch(False), 80)
    assert "__assertfail" in kernel.asm["ptx"]


@pytest.mark.parametrize("version", ["3.6.0", "3.9.0"])
def test_the_committed_table_has_every_entry(version):
    """README quotes benchmarks/results: rerun benchmarks/gates/offline_table.py --write on it."""
    text = (BENCHMARKS / f"results/offline_table_triton-{version}.md").read_text(encoding="utf-8")
    assert f"Triton {version}" in text
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines() if re.match(r"\| \w+_\w+ ", line)
    ]
    assert all(row[7] == "0" for row in rows)  # nothing spills
    for arch in ("sm_80", "sm_86", "sm_90"):
        assert STREAMS.keys() <= {row[0] for row in rows if row[2] == arch}
    present = {(row[0], row[2], row[3], row[4], row[5]) for row in rows}
    kernels = dict(loss="head_loss_fwd", stats="head_stats_fwd", noise="head_stats_fwd",
                   grad_input="grad_input_bwd")
    for (name, key, _), entries in _tuning.TABLE.items():
        arch = "sm_86" if key == _tuning.SAFE else f"sm_{key}"
        for _, tile in entries:
            shape = f"{tile.rows}x{tile.cols}x{tile.depth}"
            assert (kernels[name], arch, shape, str(tile.warps), str(tile.stages)) in present
