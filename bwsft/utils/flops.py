"""FLOPs: as torch counts them while code runs, and by formula before anything runs.

A multiply-add is two. In the formulas half of the tokens that can be masked are supervised.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import bwsft_kernels  # noqa: F401 its operators
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count


def flop_counter() -> FlopCounterMode:
    """Count the FLOPs of matmuls and attention inside a `with`; get_total_flops() afterwards.

    Attention on a CPU, which torch leaves out, is counted too; a mask saves nothing, a plan of
    ranges what it leaves out. Triton kernels are not seen: on CUDA the head is missing. Of fake
    tensors, whose supervised rows nobody can count, all rows of the head are.
    """
    ops = torch.ops.bwsft_kernels
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    formulas = {
        forward: _flash_flops(sdpa_flop_count, 3),
        backward: _flash_flops(sdpa_backward_flop_count, 4),
        ops.range_attention: _range_flops(2),
        ops.range_attention_bwd: _range_flops(5),
        ops.linear_argmax: lambda x, weight, *_, **__: 2 * x[0] * weight.numel(),
        ops.linear_cross_entropy: _loss_flops,
        ops.linear_cross_entropy_bwd: _loss_bwd_flops,
        torch.ops.aten._grouped_mm: _grouped_flops,
    }
    return FlopCounterMode(display=False, custom_mapping=formulas)


def _flash_flops(whole: Callable[..., int], tensors: int) -> Callable[..., int]:
    """Of torch's attention on a CPU. A mask [rows, keys] of its own is one that range_attention
    made of a plan's ranges for a short sequence: it saves what it leaves out."""

    def count(*args: Any, attn_mask: Tensor | None = None, **_: Any) -> int:
        flops = whole(*(x.shape for x in args[:tensors]))
        if attn_mask is None or attn_mask.dim() != 2:
            return flops
        return flops * int((attn_mask == 0).sum()) // attn_mask.numel()

    count._get_raw = True  # torch's word for tensors in place of their shapes
    return count


def _range_flops(products: int) -> Callable[..., int]:
    """Of range_attention: so many products of every query with the keys that it sees."""

    def count(q: Tensor, *args: Any, **_: Any) -> int:
        ranges = next(x for x in args if x.dtype == torch.int32)  # of queries
        pairs = (ranges[1::2] - ranges[::2]).clamp(min=0).sum()
        return 2 * products * int(pairs) * q.size(1) * q.size(2)

    count._get_raw = True  # torch's word for tensors in place of their shapes
    return count


def _grouped_flops(a: torch.Size, b: torch.Size, *_: object, **__: object) -> int:
    """Of a product of sorted rows [S, I] with [E, I, O], or its gradients: [S, O] with [E, O, I],
    and [I, S] with [S, O], whose columns and rows belong to E matrices."""
    return 2 * a[-2] * a[-1] * b[-1]


def _loss_flops(
    x: torch.Size, weight: torch.Size, *_: object, out_shape: tuple, **__: object
) -> int:
    """Of linear_cross_entropy, from shapes: logits, and x's gradient where forward makes it."""
    made = out_shape[1].numel() > 0
    return 2 * x[0] * weight.numel() * (1 + made)


def _loss_bwd_flops(
    upstream: object, x: torch.Size, weight: torch.Size, *rest: object, **_: object
) -> int:
    """Of its backward: the gradient of the head."""
    return 2 * x[0] * weight.numel() * rest[-1][1]


@dataclass(frozen=True)
class Cost:
    """Forward FLOPs of the parts of a LLaDA model, from its sizes.

    `tokens` run through the layers, each attending to `keys` positions.
    """

    d: int
    layers: int
    mlp: int
    vocab: int

    def layer(self, tokens: float, keys: float) -> float:
        """One layer: q, k, v, out, three MLP matrices, scores and mix."""
        return tokens * (2 * (4 * self.d**2 + 3 * self.d * self.mlp) + 4 * self.d * keys)

    def last(self, tokens: float, wanted: float, keys: float) -> float:
        """The last layer where only `wanted` tokens come out: the others give keys and values."""
        return self.layer(wanted, keys) + (tokens - wanted) * 4 * self.d**2

    def head(self, tokens: float) -> float:
        """Logits of so many tokens."""
        return tokens * 2 * self.d * self.vocab

    def whole(self, length: float, wanted: float | None = None) -> float:
        """All layers on a whole canvas, the last one pruned to `wanted` tokens if given."""
        wanted = length if wanted is None else wanted
        return (self.layers - 1) * self.layer(length, length) + self.last(length, wanted, length)

    def active(self, tokens: float, keys: float) -> float:
        """All layers on tokens that attend to stored keys."""
        return self.layers * self.layer(tokens, keys)

    def adapters(self, rank: int, square: int, mlp: int) -> float:
        """LoRA adapters per token, on `square` d x d and `mlp` d x mlp matrices of each layer."""
        return 2 * self.layers * rank * (square * 2 * self.d + mlp * (self.d + self.mlp))


@dataclass(frozen=True)
class TrainingCost:
    """FLOPs of training on one sequence, forward and backward (without an optimizer's)."""

    model: Cost
    passes: int = 2
    """Forward and backward in forwards: 2 with frozen matrices, 3 with trained ones. Attention's
    scores are counted like the matrices."""
    adapter: float = 0.0
    """Forward FLOPs of the adapters per token; trained, they cost three."""
    dense: bool = False
    """Count without two savings: the last layer of a `cached` context pass runs for every token,
    and a block_causal token attends to every other (else to a canvas of them)."""

    def full(self, length: float, supervised: float, wanted: float | None = None) -> float:
        """The whole sequence forward and backward, the last layer pruned to `wanted` tokens."""
        forward = self.model.whole(length, wanted) + self.model.head(supervised)
        return self.passes * forward + 3 * self.adapter * length

    def blockwise(
        self, context: str, prompt: float, canvas: float, block: float, draws: int = 1,
        context_grad: bool = True, suffix: bool = False, shared: bool = False, active: int = 1,
    ) -> float:  # fmt: skip
        """Blockwise SFT under a context mode: `draws` masks of one block; block_causal: of every
        block, on a clean canvas and as many noisy copies of the response. Without context_grad
        the clean canvas runs forward only there. suffix: the hidden suffix, on average half of the
        canvas less half a block, is supervised too. shared: the first draw's keys and values serve
        the others. active: blocks of a group."""
        model, length = self.model, prompt + canvas
        groups = active_groups(canvas / block, active, tiled=context == "block_causal")
        supervised = groups.masked * block
        if context == "block_causal":
            copies = draws * canvas
            keys = length + copies if self.dense else length
            trained = model.active(copies, keys) + model.head(draws * supervised)
            total = self.passes * trained + 3 * self.adapter * copies
            seen = length - groups.last * block  # no copy sees the last group's clean tokens
            clean = (model.layers - 1) * model.layer(seen, keys) + model.last(seen, 0, keys)
            if context_grad:
                return total + self.passes * clean + 3 * self.adapter * seen
            return total + clean + self.adapter * seen
        draw = self.passes * (model.active(block, length) + model.head(block / 2))
        draw += 3 * self.adapter * block  # against stored keys
        if shared:
            return self.full(length, block / 2, block) + (draws - 1) * draw
        if context == "cached":
            return model.whole(length, None if self.dense else block) + draws * draw
        if suffix:
            return draws * self.full(length, canvas / 2)
        return draws * self.full(length, supervised, active * block)


class GroupMeans(NamedTuple):
    """What groups of active blocks hold on average, in blocks."""

    masked: float  # masked tokens of a draw
    last: float  # tokens of its last group


def active_groups(blocks: float, active: int, tiled: bool) -> GroupMeans:
    """What a draw's groups of up to `active` blocks hold on average, in a response of so many
    blocks: the group of a block that is chosen uniformly or, tiled, all of the response. The mask
    rates of a group, between 0 and 1, are 1 - 1/2, 1 - 1/4, ... on average."""
    if active == 1:
        return GroupMeans(blocks / 2 if tiled else 0.5, 1.0)
    whole, masked, last = math.ceil(blocks), 0.0, 0.0
    for offset in range(active):
        edges = sorted({0, whole, *range(active - offset, whole, active)})
        sizes = [stop - start for start, stop in itertools.pairwise(edges)]
        chances = [1.0 if tiled else size / whole for size in sizes]  # that a draw masks the group
        masked += sum(p * (n - 1 + 2.0**-n) for p, n in zip(chances, sizes, strict=True)) / active
        last += (sizes[-1] if tiled else sum(n * n for n in sizes) / whole) / active
    return GroupMeans(masked, last)


def step_flops(cost: Cost, prompt: int, gen: int, block: int, draws: int) -> dict[str, float]:
    """FLOPs per supervised token of a training step by context mode: frozen matrices, adapters left
    out. `naive` projects every token to logits."""
    training, length, supervised = TrainingCost(cost), prompt + gen, block / 2
    sizes = (prompt, gen, block)
    return {
        "naive": training.full(length, length) / supervised,
        "exact": training.blockwise("exact", *sizes) / supervised,
        "exact_suffix": training.blockwise("exact", *sizes, suffix=True) / (gen / 2),
        f"exact_shared_k{draws}": (
            training.blockwise("exact", *sizes, draws, shared=True) / (draws * supervised)
        ),
        f"cached_k{draws}": training.blockwise("cached", *sizes, draws) / (draws * supervised),
        "block_causal": training.blockwise("block_causal", *sizes) / (gen / 2),
        "block_causal_pair": training.blockwise("block_causal", *sizes, 2) / gen,
        f"block_causal_k{draws}": (
            training.blockwise("block_causal", *sizes, draws) / (draws * gen / 2)
        ),
    }


def decode_flops(cost: Cost, prompt: int, gen: int, block: int) -> dict[str, float]:
    """Mean FLOPs of a denoising step by context mode, one token a step, no early exit."""
    length, head = prompt + gen, cost.head((block + 1) / 2)  # masked tokens, on average
    entering = cost.whole(length, block)
    middle = prompt + gen // 2  # block_causal: keys on average
    return {
        "naive": cost.whole(length) + cost.head(length),
        "exact": entering + head,
        "cached": (entering + (block - 1) * cost.active(block, length)) / block + head,
        "block_causal": (block + 1) / block * cost.active(block, middle) + head,
    }
