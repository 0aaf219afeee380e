"""FLOPs as torch counts them, with the attention of a CPU, which torch leaves out."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Cost:
    """Forward FLOPs of LLaDA's layers, written out; a multiply-add is two.

    Rows: tokens that run through the layers; keys: what each attends to.
    """

    d: int
    layers: int
    mlp: int
    vocab: int

    def layer(self, rows: float, keys: float) -> float:
        """One layer on `rows` queries: q, k, v, out, three MLP matrices, scores and mix."""
        return rows * (2 * (4 * self.d**2 + 3 * self.d * self.mlp) + 4 * self.d * keys)

    def last(self, rows: float, wanted: float, keys: float) -> float:
        """The last layer where only `wanted` rows come out: the others give keys and values."""
        return self.layer(wanted, keys) + (rows - wanted) * 4 * self.d**2

    def head(self, rows: float) -> float:
        return rows * 2 * self.d * self.vocab

    def whole(self, length: float, wanted: float | None = None) -> float:
        """All layers on a whole canvas, the last one pruned to `wanted` rows if given."""
        wanted = length if wanted is None else wanted
        return (self.layers - 1) * self.layer(length, length) + self.last(length, wanted, length)

    def active(self, rows: float, keys: float) -> float:
        return self.layers * self.layer(rows, keys)
