"""What offline_table.py compiles: each launcher on empty CPU tensors of LLaDA-8B's shape."""

from functools import partial

import torch
from bwsft_kernels import (
    _block_mask_triton,
    _cross_entropy_triton,
    _linear_argmax_triton,
    _linear_cross_entropy_bwd_triton,
    _linear_cross_entropy_fwd_triton,
    _rms_norm_triton,
    _rotary_triton,
    _swiglu_triton,
    _tuning,
)
from bwsft_kernels._block_mask_types import MaskInputs, MaskSpec
from bwsft_kernels._linear_argmax import ArgmaxOptions

V, D, HEAD, MLP = 126_464, 4096, 128, 12_288  # LLaDA-8B
SEQUENCES, LENGTH = 32, 256
ROWS = SEQUENCES * LENGTH


def _mask(full: bool, block_size: int):
    count = torch.full((SEQUENCES,), LENGTH // 2)
    weights = torch.ones(SEQUENCES, 8, dtype=torch.int64) if full else None
    inputs = MaskInputs(
        torch.empty(SEQUENCES * LENGTH, dtype=torch.int64), *[count] * 6, block_weights=weights
    )
    more = dict(pairs=True, prefix_noise=0.1, suffix_leak=0.1, block_origin="absolute")
    spec = MaskSpec(block_size=block_size, mask_id=V - 1, seed=1 << 40, **(more if full else {}))
    _block_mask_triton.block_mask_triton(inputs, spec)


def _rows(dtype, full: bool):
    options = (0.1, 30.0, V - 1) if full else (0.0, None, None)
    logits, target = torch.empty(512, V, dtype=dtype), torch.zeros(512, dtype=torch.int64)
    _cross_entropy_triton.cross_entropy_rows_(logits, target, torch.empty(512), *options, True)


def _grad_input(dtype, rows: int, full: bool):
    assert full
    head = torch.empty(V, D, dtype=dtype)
    _linear_cross_entropy_bwd_triton.grad_input(torch.empty(rows, V, dtype=dtype), head)


def _loss(dtype, rows: int, full: bool):
    x, head = torch.empty(rows, D, dtype=dtype), torch.empty(V, D, dtype=dtype)
    options = (0.1, 30.0, V - 1) if full else (0.0, None, None)
    bias = torch.empty(V, dtype=dtype) if full else None
    target = torch.zeros(rows, dtype=torch.int64)
    _linear_cross_entropy_fwd_triton.head_loss(x, head, bias, target, *options)


def _stats(dtype, rows: int, full: bool, noise: bool):
    x, head = torch.empty(rows, D, dtype=dtype), torch.empty(V, D, dtype=dtype)
    options = ArgmaxOptions(
        banned=(126_081,) if full else (), hidden_id=V - 128, entropy=full, margin=full,
        softcap=30.0 if full else 0.0, round_bf16=full,
    )  # fmt: skip
    key = torch.zeros(5, rows, dtype=torch.int64) if noise else None
    bias = torch.empty(V, dtype=dtype) if full else None
    _linear_argmax_triton.head_argmax(x, head, bias, options, key, float(noise))


def _rms_norm_fwd(dtype, full: bool, hidden: int):
    x, weight = torch.empty(ROWS, hidden, dtype=dtype), torch.empty(hidden, dtype=dtype)
    _rms_norm_triton.rms_norm_fwd(x, weight, 1e-5, torch.empty_like(x) if full else None)


def _rms_norm_bwd(dtype, full: bool, hidden: int):
    x, weight = torch.empty(ROWS, hidden, dtype=dtype), torch.empty(hidden, dtype=dtype)
    more = torch.empty_like(x) if full else None
    _rms_norm_triton.rms_norm_bwd(x, more, x, weight, torch.empty(ROWS, 1), full)


def _rotary(dtype, full: bool):
    q, table = torch.empty(ROWS, D // HEAD, HEAD, dtype=dtype), torch.empty(ROWS, HEAD // 2)
    # All options: the gradient, of grouped heads that lie apart.
    k = torch.empty(ROWS, 8, 2 * HEAD, dtype=dtype)[..., :HEAD] if full else None
    _rotary_triton.rotate(q, k, table, table, full)


def _swiglu(dtype, full: bool):
    gate = torch.empty(ROWS, MLP, dtype=dtype)
    if full:
        _swiglu_triton.swiglu_bwd(gate, gate, gate)
    else:
        _swiglu_triton.swiglu_fwd(gate, gate)


def _small(dtype, full: bool):
    """The operations between the matmuls, which have one tile each."""
    for hidden in (D, _rms_norm_triton.MOST_D):
        shape = f"{hidden} columns"
        yield "rms_norm_fwd", shape, partial(_rms_norm_fwd, dtype, full, hidden)
        yield "rms_norm_bwd", shape, partial(_rms_norm_bwd, dtype, full, hidden)
    yield "rotary", f"{_rotary_triton.PAIRS} pairs", partial(_rotary, dtype, full)
    yield "swiglu", f"{_swiglu_triton.BLOCK_M} columns", partial(_swiglu, dtype, full)


def cases(table, dtype=torch.bfloat16):
    """(name, variant, tile, launch) of everything shipped for a chip; `table`: its key in TABLE."""
    for full in (False, True):
        variant = "all options" if full else "plain"
        if dtype == torch.bfloat16:
            for size in (32, 4096):  # one tile and many
                yield "block_mask", variant, f"blocks of {size}", partial(_mask, full, size)
        block = f"{_cross_entropy_triton.BLOCK_V} columns"
        yield "cross_entropy_rows", variant, block, partial(_rows, dtype, full)
        for name, shape, launch in _small(dtype, full):
            yield name, variant, shape, launch
        stats, noise = (partial(_stats, noise=wanted) for wanted in (False, True))
        launches = {"loss": _loss, "stats": stats, "noise": noise}
        if full:
            launches["grad_input"] = _grad_input
        for name, launch in launches.items():
            for most, tile in _tuning.TABLE[name, table, dtype.itemsize]:
                shape = f"{tile.rows}x{tile.cols}x{tile.depth}"
                rows = min(most, 512) - 3  # not a multiple of 16, as real row counts
                yield name, variant, shape, partial(launch, dtype, rows, full=full)
