"""What offline_table.py compiles: each launcher on empty tensors of LLaDA-8B's shape, those of the
head at several vocabularies. Meta tensors where nothing looks at values: a head is 1 GB."""

from functools import partial
from unittest import mock

import torch
from bwsft_kernels import (
    _block_mask_triton,
    _cross_entropy_triton,
    _linear_argmax_triton,
    _linear_cross_entropy_bwd_triton,
    _linear_cross_entropy_fwd_triton,
    _philox_triton,
    _range_attention_bwd_triton,
    _range_attention_fwd_triton,
    _range_tiles,
    _rms_norm,
    _rms_norm_triton,
    _rotary_triton,
    _select_rows_triton,
    _swiglu_triton,
    _tuning,
    range_plan,
)
from bwsft_kernels._block_mask_types import MaskInputs, MaskSpec
from bwsft_kernels._linear_argmax import ArgmaxOptions

V, D, HEAD, MLP = 126_464, 4096, 128, 12_288  # LLaDA-8B
SEQUENCES, LENGTH = 32, 256
ROWS = SEQUENCES * LENGTH
# LLaDA, BERT, GPT-2 with and without a mask token, Llama 3 with one, Qwen, Gemma.
VOCABULARIES = (V, 30_522, 49_153, 50_257, 128_257, 151_936, 262_144)
_empty = partial(torch.empty, device="meta")


def _mask(full: bool, block_size: int):
    count = torch.full((SEQUENCES,), LENGTH // 2)
    weights = torch.ones(SEQUENCES, 8, dtype=torch.int64) if full else None
    inputs = MaskInputs(
        torch.empty(SEQUENCES * LENGTH, dtype=torch.int64), *[count] * 6, block_weights=weights
    )
    more = dict(pairs=True, prefix_noise=0.1, suffix_leak=0.1, block_origin="absolute")
    spec = MaskSpec(block_size=block_size, mask_id=V - 1, seed=1 << 40, **(more if full else {}))
    _block_mask_triton.block_mask_triton(inputs, spec)


def _numbers(rows: int):
    """Target, weight and smoothing of some rows."""
    return _empty(rows, dtype=torch.int64), _empty(rows), _empty(rows)


def _rows(dtype, vocabulary: int, full: bool, grad: bool):
    width, (target, weight, smoothing) = -(-vocabulary // 64) * 64, _numbers(512)
    logits, bias = _empty(512, width), _empty(width, dtype=dtype)
    _cross_entropy_triton.cross_entropy_rows(
        logits, bias if full else None, logits.view(dtype)[:, :width] if grad else None, vocabulary,
        target, weight if grad else None,
        *((smoothing, 30.0, 7, 0.5) if full else (None, None, None)),
    )  # fmt: skip


def _grad_input(dtype, rows: int, vocabulary: int):
    g = _empty(rows, -(-vocabulary // 64) * 64, dtype=dtype)
    _linear_cross_entropy_bwd_triton.split_product(g, _empty(vocabulary, D, dtype=dtype))


def _product(dtype, rows: int, vocabulary: int, full: bool, grad: bool, softcap: bool):
    """The Triton road of loss and gradient, or of the loss alone."""
    x, head = _empty(rows, D, dtype=dtype), _empty(vocabulary, D, dtype=dtype)
    bias = _empty(-(-vocabulary // 64) * 64, dtype=dtype) if full else None
    target, weight, smoothing = _numbers(rows)
    both = full and not (grad and softcap)  # which takes the other road
    forward = _linear_cross_entropy_fwd_triton
    row_bytes = forward._row_bytes(vocabulary, dtype, x.device, _tuning.TRITON, grad)
    forward.by_triton(
        x, head, bias, target, weight if grad else None, smoothing if both else None,
        30.0 if softcap else None, 7 if full else None, _empty(rows, row_bytes, dtype=torch.uint8),
    )


def _stats(dtype, rows: int, vocabulary: int, full: bool, noise: bool):
    x, head = _empty(rows, D, dtype=dtype), _empty(vocabulary, D, dtype=dtype)
    options = ArgmaxOptions(
        banned=(11,) if full else (), hidden_id=7, entropy=full, margin=full,
        softcap=30.0 if full else 0.0, round_bf16=full,
    )  # fmt: skip
    key = _empty(5, rows, dtype=torch.int64) if noise else None
    bias = _empty(vocabulary, dtype=dtype) if full else None
    _linear_argmax_triton.head_argmax(x, head, bias, options, key, float(noise))


def _rms_norm_fwd(dtype, full: bool, hidden: int):
    x, weight = torch.empty(ROWS, hidden, dtype=dtype), torch.empty(hidden, dtype=dtype)
    _rms_norm_triton.rms_norm_fwd(x, weight, torch.empty_like(x) if full else None, 1e-5)


def _rms_norm_bwd(dtype, full: bool, hidden: int):
    x, weight = torch.empty(ROWS, hidden, dtype=dtype), torch.empty(hidden, dtype=dtype)
    more = torch.empty_like(x) if full else None
    _rms_norm_triton.rms_norm_bwd(x, more, x, weight, 1e-5, full)


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


def _philox(full: bool):
    place = torch.arange(ROWS)
    sample = place[:LENGTH, None] if full else 7
    shape = torch.broadcast_shapes(place.shape, sample.shape if full else ())
    dtype = torch.float32 if full else torch.int64
    _philox_triton.u24(place, 0, sample, shape, place.device, 3, (1 << 31, 5), dtype)


def _gumbel_rows():
    place = torch.arange(ROWS)
    _philox_triton.gumbel_rows(place, place, place, 7, (1 << 31, 5))


def _select_rows(full: bool):
    target, weight = torch.zeros(ROWS, dtype=torch.int64), torch.empty(ROWS) if full else None
    excluded = V - 1 if full else None
    _select_rows_triton.launch(
        target, weight, -100, V, excluded, full, ROWS, ROWS, compact=not full)


def _small(dtype, full: bool):
    """The operations between the matmuls, which have one tile each."""
    for hidden in (HEAD, D, _rms_norm.MOST_D):
        shape = f"{hidden} columns"
        yield "rms_norm_fwd", shape, partial(_rms_norm_fwd, dtype, full, hidden)
        yield "rms_norm_bwd", shape, partial(_rms_norm_bwd, dtype, full, hidden)
    yield "rotary", f"{_rotary_triton.PAIRS} pairs", partial(_rotary, dtype, full)
    yield "swiglu", f"{_swiglu_triton.BLOCK_M} columns", partial(_swiglu, dtype, full)


def _heads(dtype, vocabulary: int, full: bool):
    """(name in _tuning.TABLE, variant, launch of some rows) of what multiplies by the head."""
    variant = "all options" if full else "plain"
    for grad in (True, False):
        more = variant if grad else f"loss alone, {variant}"
        launch = partial(_product, dtype, vocabulary=vocabulary, full=full, grad=grad)
        yield "logits" if grad else "loss", more, partial(launch, softcap=False)
        yield "capped", more, partial(launch, softcap=True)
    for name in ("stats", "noise"):
        launch = partial(_stats, dtype, vocabulary=vocabulary, full=full, noise=name == "noise")
        yield name, variant, launch
    if full:
        yield "grad_input", variant, partial(_grad_input, dtype, vocabulary=vocabulary)


def _range_attention(dtype, width: int, kernel: str):
    """Grouped heads. Widths of 3/4 of a power of two are masked, which takes registers."""
    lengths = torch.tensor([LENGTH])
    plan = range_plan(lengths, lengths, 32, copies=2)[0].to("meta")
    rows = plan.query_ranges.size(1)
    q, k = _empty(rows, 8, width, dtype=dtype), _empty(rows, 2, width, dtype=dtype)
    lse, of = _empty(8, rows), (plan.query_ranges, plan.query_tiles)
    if kernel == "fwd":
        _range_attention_fwd_triton.range_attention_fwd(q, k, k, *of, 0.1)
    elif kernel == "dq":
        _range_attention_bwd_triton.query_gradient(q, q, k, k, q, lse, *of, 0.1)
    else:
        of = plan.key_ranges, plan.key_tiles
        _range_attention_bwd_triton.key_gradients(q, q, k, k, lse, lse, *of, 0.1)


def range_cases(table, dtype, widths=(48, 64, 96, 128, 256)):
    """range_attention, which has no options, at some widths of heads; in 16 bits."""
    for kernel in ("fwd", "dq", "dkv"):
        tiles = _range_tiles.TABLE[kernel, table, dtype.itemsize]
        for width in widths:
            tile = next(t for most, t in zip(_range_tiles.WIDTHS, tiles, strict=True)
                        if width <= most)
            shape = f"{tile.rows}x{tile.cols}"
            yield ("range_attention", f"heads of {width}", shape,
                   partial(_range_attention, dtype, width, kernel))


def _with_tile(key: tuple, tile: _tuning.Tile, launch):
    with mock.patch.dict(_tuning.TABLE, {key: ((_tuning.ANY_ROWS, tile),)}):
        launch()


def cases(table, dtype=torch.bfloat16, variants=("plain", "all options")):
    """(name, variant, tile, launch) of everything shipped for a chip; `table`: its key in TABLE."""
    if dtype == torch.bfloat16:
        yield "gumbel_rows", "plain", f"{_philox_triton.BLOCK} rows", _gumbel_rows
    if "plain" in variants and dtype.itemsize == 2:
        yield from range_cases(table, dtype)
    for variant in variants:
        full = variant == "all options"
        if dtype == torch.bfloat16:
            for size in (32, 4096):  # one tile and many
                yield "block_mask", variant, f"blocks of {size}", partial(_mask, full, size)
            yield "philox", variant, f"{_philox_triton.BLOCK} numbers", partial(_philox, full)
            rows = f"{_select_rows_triton.BLOCK_T} rows"
            yield "select_rows", variant, rows, partial(_select_rows, full)
        for name, shape, launch in _small(dtype, full):
            yield name, variant, shape, launch
        for vocabulary in VOCABULARIES:
            block = f"{_cross_entropy_triton.BLOCK_V} columns"
            for grad, more in ((True, ""), (False, "loss alone, ")):
                launch = partial(_rows, dtype, vocabulary, full, grad)
                yield "cross_entropy_rows", more + variant, block, launch
            for name, more, launch in _heads(dtype, vocabulary, full):
                key = (name, table, dtype.itemsize)
                for most, tile in (*_tuning.TABLE[key], *_tuning.CANDIDATES.get(key, ())):
                    shape = f"{tile.rows}x{tile.cols}x{tile.depth}"
                    rows = min(most, 512) - 3  # not a multiple of 16, as real row counts
                    run = partial(_with_tile, key, tile, partial(launch, rows=rows))
                    yield name, more, shape, run
