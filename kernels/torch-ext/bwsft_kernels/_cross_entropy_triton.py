"""Cross-entropy of rows of logits that become their own gradient, in Triton.

The Triton implementation of _cross_entropy_torch.py: one program per row, two passes over it. A
row of LLaDA is 253 KB and doesn't fit in shared memory, so the second pass reads it again, from L2
if it is lucky.
Letters: N rows, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device_triton import down_cast, on_device, soft_cap

# 8 warps hold 16 elements a thread: two 16-byte loads of bf16, 3 fp32 registers for each element.
BLOCK_V = 4096
WARPS = 8


@triton.jit
def _cross_entropy_rows_kernel(
    logits_ptr,  # [N, V]
    target_ptr, weight_ptr, smoothing_ptr, loss_ptr,  # [N]
    V, stride_n,
    EXCLUDED: tl.constexpr, CAP: tl.constexpr, HAS_SMOOTHING: tl.constexpr,
    WANT_GRAD: tl.constexpr, BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_n
    dtype: tl.constexpr = logits_ptr.dtype.element_ty
    target = tl.load(target_ptr + row)
    weight = tl.load(weight_ptr + row)
    offs_v = tl.arange(0, BLOCK_V)
    if weight == 0.0:
        # A row that doesn't count, e.g. the tail of a batch: exact zeros, whatever its logits are.
        tl.store(loss_ptr + row, 0.0)
        if WANT_GRAD:
            for start in range(0, V, BLOCK_V):
                zeros = tl.zeros((BLOCK_V,), tl.float32).to(dtype)
                tl.store(logits_ptr + start + offs_v, zeros, mask=start + offs_v < V)
        return

    # Every lane keeps its own maximum and sum: one reduction in the end instead of one per tile.
    # They leave the target out, so that 1 - p of a sure row is a sum and not a cancellation.
    top = tl.full((BLOCK_V,), -3.0e38, tl.float32)
    total = tl.zeros((BLOCK_V,), tl.float32)
    plain_sum = tl.zeros((BLOCK_V,), tl.float32)
    for start in range(0, V, BLOCK_V):
        cols = start + offs_v
        values = tl.load(logits_ptr + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
        values = soft_cap(values, CAP)
        others = tl.where((cols < V) & (cols != EXCLUDED) & (cols != target), values, float("-inf"))
        new_top = tl.maximum(top, others)
        total = total * tl.exp(top - new_top) + tl.exp(others - new_top)
        top = new_top
        if HAS_SMOOTHING:
            plain_sum += tl.where((cols < V) & (cols != EXCLUDED), values, 0.0)
    picked = soft_cap(tl.load(logits_ptr + target).to(tl.float32), CAP)
    row_top = tl.maximum(tl.max(top, axis=0), picked)
    rest = tl.sum(total * tl.exp(top - row_top), axis=0)
    norm = rest + tl.exp(picked - row_top)
    loss = tl.log(norm) - (picked - row_top)
    share = 0.0
    at_target = -rest / norm
    if HAS_SMOOTHING:
        smoothing = tl.load(smoothing_ptr + row)
        classes = V * 1.0
        if EXCLUDED >= 0:
            classes -= 1.0
        share = smoothing / classes
        loss += smoothing * (picked - tl.sum(plain_sum, axis=0) / classes)
        at_target += smoothing - share
    tl.store(loss_ptr + row, loss)

    if WANT_GRAD:
        scale = weight / norm
        share *= weight
        at_target *= weight
        for start in range(0, V, BLOCK_V):
            cols = start + offs_v
            raw = tl.load(logits_ptr + cols, mask=cols < V, other=0.0).to(tl.float32)
            grad = tl.exp(soft_cap(raw, CAP) - row_top) * scale - share
            grad = tl.where(cols == target, at_target, grad)
            grad = tl.where(cols == EXCLUDED, 0.0, grad)
            if CAP > 0.0:
                # 1 - tanh^2 without its cancellation
                decay = tl.exp(tl.abs(raw) * (-2.0 / CAP))
                grad *= 4.0 * decay / ((1.0 + decay) * (1.0 + decay))
            tl.store(logits_ptr + cols, down_cast(grad, dtype), mask=cols < V)


def cross_entropy_rows_(
    logits: Tensor,  # [N, V], contiguous along V, scratch
    target: Tensor, row_weight: Tensor, smoothing: Tensor | float,  # [N]
    softcap: float | None, excluded_id: int | None, want_grad: bool,
) -> Tensor:  # [N] fp32
    """As in _cross_entropy_torch.py; the loss is 0 where row_weight is 0."""
    size, vocabulary = logits.shape
    assert logits.stride(1) == 1, "the rows of logits must be contiguous"
    loss = torch.empty(size, dtype=torch.float32, device=logits.device)
    has_smoothing = isinstance(smoothing, Tensor) or smoothing != 0
    if has_smoothing and not isinstance(smoothing, Tensor):
        smoothing = torch.full_like(loss, smoothing)
    if size == 0:
        return loss
    with on_device(logits):
        _cross_entropy_rows_kernel[(size,)](
            logits, target.contiguous(), row_weight.contiguous(),
            smoothing.contiguous() if has_smoothing else loss, loss,
            vocabulary, logits.stride(0),
            EXCLUDED=-1 if excluded_id is None else excluded_id,
            CAP=0.0 if softcap is None else softcap,
            HAS_SMOOTHING=has_smoothing, WANT_GRAD=want_grad, BLOCK_V=BLOCK_V,
            num_warps=WARPS, enable_fp_fusion=True,
        )
    return loss
