"""Softmax attention in which every query sees ranges of keys: one-pass training, cached decoding.

Letters: T query rows, N key rows, H query heads, K key and value heads, E head width.
"""

import torch
from torch import Tensor

from . import _range_attention_torch
from ._dispatch import check_float, check_impl, triton_implementation
from ._operator import operator
from ._range_plan import RangePlan

MOST_E = 256


def range_attention(
    q: Tensor,  # [T, H, E] fp32, fp16, bf16 or fp64
    k: Tensor,  # [N, K, E] as q, with H a multiple of K
    v: Tensor,  # [N, K, E]
    plan: RangePlan,  # of range_plan or cache_plan
    scale: float | None = None,  # 1 / sqrt(E)
    *,
    impl: str = "auto",
) -> Tensor:  # [T, H, E]
    """Attend to the ranges of the plan; a row without any key gives zeros. Sums are fp32 at least,
    and the same bits in every run. ValueError for tensors that don't fit together."""
    check_impl(impl)
    check_float(q=q, k=k, v=v)
    kind = q.device.type
    if torch.is_autocast_enabled(kind) and q.dtype != torch.float64:
        q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
    _check_shapes(q, k, v, plan)
    scale = q.size(-1) ** -0.5 if scale is None else float(scale)
    return _range_attention(q, k, v, plan.query_ranges, plan.key_ranges, plan.query_tiles,
                            plan.key_tiles, scale, impl)[0]


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, plan: RangePlan) -> None:
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.size(2) != k.size(2):
        raise ValueError("q must be [T, H, E], k and v [N, K, E], not "
                         f"{', '.join(str(list(x.shape)) for x in (q, k, v))}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one dtype, not {q.dtype}, {k.dtype}, {v.dtype}")
    if k.size(1) == 0 or q.size(1) % k.size(1):
        raise ValueError(f"q has {q.size(1)} heads: not a multiple of the {k.size(1)} of k and v")
    if not 1 <= q.size(2) <= MOST_E:
        raise ValueError(f"a head must have 1 to {MOST_E} entries, not {q.size(2)}")
    rows, keys = plan.query_ranges.size(1), plan.key_ranges.size(1)
    if (len(q), len(k)) != (rows, keys):
        raise ValueError(f"the plan is for {rows} queries and {keys} keys, not {len(q)} and "
                         f"{len(k)}: make one for this batch")
    if plan.query_ranges.device != q.device:
        raise ValueError(f"plan is on {plan.query_ranges.device}, but q on {q.device}: move it "
                         "with plan.to(device)")


def _fwd(
    q: Tensor, k: Tensor, v: Tensor, query_ranges: Tensor, key_ranges: Tensor,
    query_tiles: Tensor, key_tiles: Tensor, scale: float, impl: str,
) -> tuple[Tensor, Tensor]:  # [T, H, E], log-sum-exp [H, T]
    if kernels := triton_implementation(impl, q, "_range_attention_fwd_triton"):
        return kernels.range_attention_fwd(q, k, v, query_ranges, query_tiles, scale)
    return _range_attention_torch.range_attention_fwd(q, k, v, query_ranges, scale)


def _fwd_fake(
    q: Tensor, k: Tensor, v: Tensor, query_ranges: Tensor, key_ranges: Tensor,
    query_tiles: Tensor, key_tiles: Tensor, scale: float, impl: str,
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty((q.size(1), q.size(0)), dtype=wide)


def _bwd(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    query_ranges: Tensor, key_ranges: Tensor, query_tiles: Tensor, key_tiles: Tensor,
    scale: float, impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    if kernels := triton_implementation(impl, q, "_range_attention_bwd_triton"):
        return kernels.range_attention_bwd(
            grad, q, k, v, out, lse, (query_ranges, query_tiles), (key_ranges, key_tiles), scale)
    return _range_attention_torch.range_attention_bwd(
        grad, q, k, v, out, lse, query_ranges, scale)


def _bwd_fake(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: object
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _setup_context(ctx, inputs: tuple, output: tuple) -> None:
    q, k, v, *plan, ctx.scale, ctx.impl = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, *plan)


def _backward(ctx, grad: Tensor | None, _: Tensor | None) -> tuple:
    if grad is None:
        return (None,) * 9
    grads = _range_attention_bwd(grad, *ctx.saved_tensors, ctx.scale, ctx.impl)
    wanted = zip(grads, ctx.needs_input_grad, strict=False)
    return *(g if want else None for g, want in wanted), *(None,) * 6


def _setup_nothing(ctx, inputs: tuple, output: tuple) -> None:
    """The second derivative is refused: there is nothing to keep for it."""


def _refuse(ctx, *grads: Tensor) -> None:
    raise RuntimeError("range_attention has no second derivative (double backward): where one is "
                       "needed, take torch's scaled_dot_product_attention with a mask")


_PLAN = "Tensor query_ranges, Tensor key_ranges, Tensor query_tiles, Tensor key_tiles"
_range_attention_bwd = operator(
    "range_attention_bwd",
    f"(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_PLAN}, float scale, "
    "str impl) -> (Tensor, Tensor, Tensor)",
    _bwd, _bwd_fake, _setup_nothing, _refuse,
)
_range_attention = operator(
    "range_attention",
    f"(Tensor q, Tensor k, Tensor v, {_PLAN}, float scale, str impl) -> (Tensor, Tensor)",
    _fwd, _fwd_fake, _setup_context, _backward,
)
