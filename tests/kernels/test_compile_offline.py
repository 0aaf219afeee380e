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
from bwsft_kernels._cross_entropy_triton import BLOCK_V, cross_entropy_rows

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1 replaces the compiler", allow_module_level=True)

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(BENCHMARKS))
    import offline_table as table
    from offline_cases import _philox as philox_launch

PRODUCTS = {"logits_fwd", "head_stats_fwd", "grad_input_bwd"}
# They read and write rows: 16 bytes at a time, or they'd waste the bandwidth that they live on.
STREAMS = {
    "cross_entropy_rows": 2, "rms_norm_fwd": 3, "rms_norm_bwd": 3, "rotary_heads": 1,
}  # and swiglu's two, one in each variant
UNFUSED = {"block_mask_fwd", "rotary_heads"}  # to have the bits of torch
# "all options" has the most registers; the rest is slow.
BUILDS = [(80, torch.bfloat16), (90, torch.bfloat16)]
SLOW_BUILDS = [
    (arch, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for arch in table.CHIPS
]


def wide_copies(row, itemsize):
    """How many 16-byte copies a thread makes if both operands of every stage are read so wide."""
    rows, cols, depth = map(int, row.tile.split("x"))
    return row.stages * (rows + cols) * depth * itemsize // (16 * 32 * row.warps)


def wide_stores(row, itemsize):
    """How many 16-byte stores a thread makes of its share of the result."""
    if "loss alone" in row.variant or row.kernel == "head_stats_fwd":
        return 0  # a few numbers for each row, one at a time
    if row.kernel in ("cross_entropy_rows", "merge_rows"):  # the gradient, or zeros in its place
        return 2 * BLOCK_V * itemsize // (16 * 32 * row.warps)
    rows, cols, _ = map(int, row.tile.split("x"))
    return rows * cols * (4 if row.kernel == "grad_input_bwd" else itemsize) // (512 * row.warps)


def check(arch, dtype, variants):
    rows = table.build(arch, dtype, variants=variants)
    wrong = [text for row in rows for text in table.complaints(row)]
    assert not wrong, "\n".join(wrong)
    products = [row for row in rows if row.kernel in PRODUCTS]
    # Each entry in each of its variants, and none twice: every vocabulary has the same code.
    entries = [
        (name, tile) for (name, key, size), tiles in _tuning.TABLE.items()
        if key == table.CHIPS[arch].table and size == dtype.itemsize for _, tile in tiles
    ]
    times = {"grad_input": 1, "capped": 2 * len(variants)}  # with and without a gradient
    assert len(products) == sum(times.get(name, len(variants)) for name, _ in entries)
    for row in products:
        if dtype == torch.float32:
            assert row.matrix == "-", row  # exact products, no TF32
        else:
            assert row.matrix == ("wgmma" if arch == 90 else "mma.sync"), row
        assert row.widths == (16,) and row.copies == wide_copies(row, dtype.itemsize), row
    streams = [row for row in rows if row.kernel in STREAMS]
    assert Counter(row.kernel for row in streams) == {
        name: count * len(variants) for name, count in STREAMS.items()
    }
    streams += [row for row in rows if row.kernel.startswith("swiglu")]
    assert all(row.widths == (16,) for row in streams)
    rows_of_logits = [row for row in rows if row.kernel in ("cross_entropy_rows", "merge_rows")]
    for row in products + rows_of_logits:
        assert row.stores == wide_stores(row, dtype.itemsize), row
    assert all(row.widths == (16,) for row in rows_of_logits if row.stores)
    assert all(row.fp_fusion == (row.kernel not in UNFUSED) for row in rows)


@pytest.mark.parametrize("arch, dtype", BUILDS)
def test_no_spills_and_tensor_cores(arch, dtype):
    check(arch, dtype, ("all options",))


@pytest.mark.slow
@pytest.mark.parametrize("arch, dtype", SLOW_BUILDS)
def test_no_spills_and_tensor_cores_elsewhere(arch, dtype):
    check(arch, dtype, ("plain", "all options"))


@pytest.mark.parametrize("arch", [80, 90])
def test_a_narrow_gradient_waits_until_all_threads_have_read(arch):
    """It is written over logits that other threads of the program read in the same iteration."""
    logits = torch.empty(5, 50_304, device="meta")
    grad = logits.view(torch.bfloat16)[:, :50_304]
    target, weight = logits.new_empty(5, dtype=torch.int64), logits.new_empty(5)
    (kernel,) = table.compile_launch(lambda: cross_entropy_rows(
        logits, None, grad, 50_257, target, weight, None, None, None), arch)
    steps = re.findall(r"ld\.global\S*|bar\.sync|st\.global\S*", kernel.asm["ptx"])
    last = len(steps) - 1 - steps[::-1].index("bar.sync")
    assert steps[last - 4 : last] == ["ld.global.v4.b32"] * 4
    assert steps[last + 1 :] == ["st.global.v4.b32"] * 2


def test_a_spill_a_narrow_load_and_too_much_memory_would_be_seen(monkeypatch):
    """The check itself: 256 x 256 tiles spill and need 192 KB; an odd D, or an odd number of
    logits, is read 2 bytes wide."""
    large = ((1 << 40, _tuning.Tile(256, 256, 64, 4, 4)),)
    monkeypatch.setitem(_tuning.TABLE, ("grad_input", 80, 2), large)
    options = dict(device="meta", dtype=torch.bfloat16)
    head = torch.empty(50_257, table.D, **options)

    def launch(weight, width=50_304):
        g = torch.empty(500, width, **options)
        _linear_cross_entropy_bwd_triton.split_product(g, weight)

    kernel = table.compile_launch(lambda: launch(head), 80)[0]
    row = table.inspect(kernel, 80, "", "")
    assert row.spilled > 0 and row.shared > 163 << 10
    assert len(table.complaints(row)) >= 2
    small = ((1 << 40, _tuning.Tile(64, 64, 64, 4, 3)),)
    monkeypatch.setitem(_tuning.TABLE, ("grad_input", 80, 2), small)
    kernel = table.compile_launch(lambda: launch(head[:, :4093].clone()), 80)[0]
    row = table.inspect(kernel, 80, "", "64x64x64")
    assert row.copies == wide_copies(row, 2) // 2  # the other half isn't asynchronous at all
    kernel = table.compile_launch(lambda: launch(head, 50_257), 80)[0]
    row = table.inspect(kernel, 80, "", "64x64x64")
    assert row.copies == wide_copies(row, 2) // 2  # rows of logits that aren't padded


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
    # Nothing spills, but a few numbers of range attention where Triton is as old as 3.6.
    spilled = {row[0]: int(row[7]) for row in rows if row[7] != "0"}
    old = version == "3.6.0" and all("range_attention" in name for name in spilled)
    assert max(spilled.values(), default=0) <= (48 if old else 0), spilled
    for arch in ("sm_80", "sm_86", "sm_90", "sm_120"):
        assert STREAMS.keys() <= {row[0] for row in rows if row[2] == arch}
    present = {(row[0], row[2], row[3], row[4], row[5]) for row in rows}
    kernels = dict(loss="logits_fwd", logits="logits_fwd", capped="logits_fwd",
                   stats="head_stats_fwd", noise="head_stats_fwd", grad_input="grad_input_bwd")
    for (name, key, _), entries in _tuning.TABLE.items():
        arch = "sm_86" if key == _tuning.SAFE else f"sm_{key}"
        for _, tile in entries:
            shape = f"{tile.rows}x{tile.cols}x{tile.depth}"
            assert (kernels[name], arch, shape, str(tile.warps), str(tile.stages)) in present
