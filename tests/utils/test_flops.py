"""Counted FLOPs against the formula, also where torch alone counts nothing."""

import pytest
import torch
import torch.nn.functional as F

from bwsft.utils.flops import flop_counter


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_on_a_cpu_is_counted(dtype, masked):
    q, k = (torch.randn(2, 3, n, 16, dtype=dtype, requires_grad=True) for n in (8, 100))
    mask = torch.ones(2, 1, 1, 100, dtype=torch.bool) if masked else None
    once = 2 * (2 * 3 * 8 * 100 * 16)  # one of the matmuls, two FLOPs a multiply-add
    with flop_counter() as counter, torch.no_grad():
        F.scaled_dot_product_attention(q, k, k, attn_mask=mask)
    assert counter.get_total_flops() == 2 * once
    with flop_counter() as counter:
        F.scaled_dot_product_attention(q, k, k, attn_mask=mask).sum().backward()
    # The fused kernel computes the scores again in backward: 5 matmuls. Without it there are 4.
    assert counter.get_total_flops() in (2 * once + 5 * once, 2 * once + 4 * once)


def test_matmuls_are_counted():
    with flop_counter() as counter:
        torch.randn(3, 4) @ torch.randn(4, 5)
    assert counter.get_total_flops() == 2 * 3 * 4 * 5
