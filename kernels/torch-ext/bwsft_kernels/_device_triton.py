"""Device helpers that several kernels share: Philox words, rounding to bf16, one tile of logits.

Letters: N rows, D hidden size, V vocabulary.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

_HERE = nullcontext()


def on_device(tensor: Tensor) -> AbstractContextManager:
    """Make the tensor's GPU the current one: Triton launches on the current device whatever the
    tensors say, and a kernel on cuda:0 that gets pointers of cuda:1 fails or corrupts."""
    if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return _HERE  # switching would cost as much as all else that a wrapper does


def close(tensor: Tensor) -> Tensor:
    """The same values with neighboring entries along the last dimension; the others may have any
    strides, so that a slice of a joint projection isn't copied."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def empty_like(tensor: Tensor) -> Tensor:
    """Contiguous and of the tensor's shape, dtype and device."""
    if tensor.is_contiguous():
        return torch.empty_like(tensor)
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def rows_of(tensor: Tensor) -> tuple[Tensor, int]:
    """(the same values, elements from one row along the last dimension to the next): a view where
    all rows have one distance, else a copy."""
    if tensor.is_contiguous():
        return tensor, tensor.shape[-1]
    tensor = close(tensor.reshape(-1, tensor.shape[-1]))
    return tensor, tensor.stride(0)


@triton.jit
def philox_words(position, draw, low, high, key_low, key_high):
    """The four words of Philox4x32-10 as uint32; of each argument the low 32 bits count."""
    return tl.philox_impl(
        position.to(tl.uint32), draw.to(tl.uint32), low.to(tl.uint32), high.to(tl.uint32),
        key_low.to(tl.uint32), key_high.to(tl.uint32),
    )


@triton.jit
def _gumbel_word(word):
    """-log(-log u), u = (word >> 8 + 1/2) / 2^24, as `philox.gumbel` defines it."""
    u24 = word >> 8
    # Above 1/2 the exact number is 1 - u (philox.gumbel says why), and Kahan's
    # log1p(-h) = log(w) * h / (1 - w), w = 1 - h rounded, replaces the missing log1p.
    upper = u24 >= 8388608
    rest = (16777216 - u24).to(tl.float32) - 0.5
    h = tl.where(upper, rest, 0.0) * 5.9604644775390625e-8
    w = tl.where(upper, 1.0 - h, (u24.to(tl.float32) + 0.5) * 5.9604644775390625e-8)
    slope = tl.where(upper, h / tl.maximum(1.0 - w, 1e-30), 1.0)
    return -tl.log(tl.where(w == 1.0, h, -tl.log(w) * slope))


@triton.jit
def gumbel_tile(noise_ptr, rows, tile, N, BLOCK_V: tl.constexpr):
    """Gumbel noise [rows, BLOCK_V] of the vocabulary ids of `tile`.

    noise [5, N] int64 holds position, step, request low, and the key's low and high word.
    """
    inside = rows < N
    position = tl.load(noise_ptr + rows, mask=inside, other=0)[:, None]
    step = tl.load(noise_ptr + N + rows, mask=inside, other=0)[:, None]
    request = tl.load(noise_ptr + 2 * N + rows, mask=inside, other=0)[:, None]
    key_low = tl.load(noise_ptr + 3 * N + rows, mask=inside, other=0)[:, None]
    key_high = tl.load(noise_ptr + 4 * N + rows, mask=inside, other=0)[:, None]
    group = tile * (BLOCK_V // 4) + tl.arange(0, BLOCK_V // 4)[None, :]
    a, b, c, d = philox_words(group, position, step, request, key_low, key_high)
    # One block of four words serves four neighboring ids: interleave a b c d along the row.
    even = tl.join(_gumbel_word(a), _gumbel_word(c))
    odd = tl.join(_gumbel_word(b), _gumbel_word(d))
    return tl.reshape(tl.join(even, odd), (rows.shape[0], BLOCK_V))


@triton.jit
def _rounded_bits(x):
    """The bits of fp32 x rounded to bf16, ties to even, low half 0; a NaN stays one."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return tl.where(x == x, rounded, 0x7FC00000)


@triton.jit
def round_bf16(x):
    """fp32 values rounded to the nearest bf16, still stored as fp32."""
    return _rounded_bits(x).to(tl.float32, bitcast=True)


@triton.jit
def down_cast(x, dtype: tl.constexpr):
    """fp32 to the dtype of a buffer, rounded to nearest even.

    By integers for bf16: the interpreter's own cast truncates and loses subnormal numbers.
    """
    if dtype == tl.bfloat16:
        return (_rounded_bits(x) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def soft_cap(x, CAP: tl.constexpr):
    """CAP * tanh(x / CAP); CAP 0 leaves x alone."""
    if CAP > 0.0:
        y = x * (1.0 / CAP)
        s = y * y
        # 1 - 2 / (exp(2y) + 1) cancels for small y; this series is exact to 1e-7 below 1/2.
        series = 62 / 2835 + s * (-1382 / 155925 + s * (21844 / 6081075))
        series = 1.0 + s * (-1 / 3 + s * (2 / 15 + s * (-17 / 315 + s * series)))
        x = tl.where(s < 0.25, x * series, CAP - 2.0 * CAP / (tl.exp(2.0 * y) + 1.0))
    return x


@triton.jit
def logits_tile(
    x_ptr, w_ptr, bias_ptr, N, V, D, stride_x, stride_w,
    CAP: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """(tile, rows, cols, fp32 logits [rows, cols]) of this program, of x [N, D] and w [V, D].

    Rows and columns past the end repeat the last one (no masks along D, so the loads stay 16 bytes
    wide) and are dropped later.
    """
    # The row block runs fastest: its neighbors find the 1 MB tile of w in L2.
    row_blocks = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0) // row_blocks
    rows = tl.program_id(0) % row_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    cols = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    offs_d = tl.arange(0, BLOCK_D)
    x_rows = x_ptr + tl.minimum(rows, N - 1).to(tl.int64)[:, None] * stride_x
    w_cols = w_ptr + tl.minimum(cols, V - 1).to(tl.int64)[None, :] * stride_w
    logits = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + offs_d
        if EVEN_D:
            x = tl.load(x_rows + d[None, :])
            w = tl.load(w_cols + d[:, None])
        else:
            x = tl.load(x_rows + d[None, :], mask=d[None, :] < D, other=0.0)
            w = tl.load(w_cols + d[:, None], mask=d[:, None] < D, other=0.0)
        logits = tl.dot(x, w, logits, input_precision="ieee")
    if HAS_BIAS:
        bias = tl.load(bias_ptr + tl.minimum(cols, V - 1))
        logits += bias.to(tl.float32)[None, :]
    return tile, rows, cols, soft_cap(logits, CAP)


@triton.jit
def join_sums(top, total, mean, tops, sums, means):
    """Fold the softmax parts [P, N] of some tiles into the running (top, total, mean) [N].

    top is the largest logit z, total = sum exp(z - top), mean = sum exp(z - top) (z - top).
    """
    new_top = tl.maximum(top, tl.max(tops, axis=0))
    # exp(-200) is 0 in fp32: an empty tile, whose top is -3e38, must not add 0 * inf.
    drop = tl.maximum(top - new_top, -200.0)
    drops = tl.maximum(tops - new_top[None, :], -200.0)
    shrink, shrinks = tl.exp(drop), tl.exp(drops)
    mean = shrink * (mean + drop * total) + tl.sum(shrinks * (means + drops * sums), axis=0)
    total = shrink * total + tl.sum(shrinks * sums, axis=0)
    return new_top, total, mean
