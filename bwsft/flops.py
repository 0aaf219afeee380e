"""FLOPs as torch counts them, with the attention of a CPU, which torch leaves out."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count


def flop_counter() -> FlopCounterMode:
    """A context manager; get_total_flops() afterwards. Matmuls and attention, two per
    multiply-add. Triton kernels are not seen: on CUDA the head of the sampler is missing."""
    aten = torch.ops.aten
    return FlopCounterMode(
        display=False,
        custom_mapping={
            aten._scaled_dot_product_flash_attention_for_cpu: _forward,
            aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
        },
    )


def _forward(query, key, value, *args, out_shape=None, **kwargs) -> int:
    """Shapes [S, H, W, E] -> FLOPs; a mask saves nothing."""
    return sdpa_flop_count(query, key, value)


def _backward(grad, query, key, value, *args, out_shape=None, **kwargs) -> int:
    return sdpa_backward_flop_count(grad, query, key, value)
