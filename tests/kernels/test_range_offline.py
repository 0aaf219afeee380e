"""Code quality of range_attention's kernels, compiled for GPUs that aren't there."""

import os
from pathlib import Path

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1 replaces the compiler", allow_module_level=True)

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(BENCHMARKS))
    import offline_table as table
    from offline_cases import range_cases

KERNELS = ["range_attention_fwd", "range_attention_dq", "range_attention_dkv"]
# The rest, and fp16, are in the slow builds of test_compile_offline.py.
BUILDS = [(80, (128,)), (90, (128,)), (120, (64,))]


@pytest.mark.parametrize("arch, widths", BUILDS)
def test_no_spills_tensor_cores_and_wide_loads(arch, widths):
    rows = table.build(arch, torch.bfloat16, cases=range_cases, widths=widths)
    assert [row.kernel for row in rows] == [name for name in KERNELS for _ in widths]
    wrong = [text for row in rows for text in table.complaints(row)]
    assert not wrong, "\n".join(wrong)
    for row in rows:
        assert row.matrix == ("wgmma" if arch == 90 else "mma.sync"), row
        # 4 bytes: the log-sum-exp and the products of rows, one number each.
        assert 16 in row.widths and set(row.widths) <= {4, 16} and row.stores, row
