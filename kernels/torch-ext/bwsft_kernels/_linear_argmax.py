"""The sampler's head: token, confidence, entropy and margin of each row, without kept logits.

Letters: N rows, D hidden size, V vocabulary.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from ._dispatch import triton_implementation
from ._linear_cross_entropy_args import check_head, matmul_dtype
from ._matmul import no_autocast, plan_chunks, wide_logits
from ._operator import operator
from .philox import gumbel, gumbel_rows, gumbel_u24, split_seed

LOGITS_BYTES = 512 << 20
ROW_BLOCK_BYTES = 16 << 20  # the Gumbel numbers of a block take about 10 times this


@dataclass(frozen=True)
class GumbelKey:
    """Where noise comes from: equal keys give equal noise, in any batch and on any device
    (`philox.gumbel_u24`)."""

    seed: int
    request: Tensor  # [...] int64, as the next two
    step: Tensor
    position: Tensor


@dataclass(frozen=True)
class LinearArgmax:
    """What `linear_argmax` returns; entropy and margin are None unless wanted."""

    token: Tensor  # [...] int64
    confidence: Tensor  # [...] fp32 (fp64 for fp64 input), as the next two
    entropy: Tensor | None
    margin: Tensor | None
    nan_flag: Tensor  # 0-dim bool: a row has a NaN confidence, and its token means nothing


@dataclass(frozen=True)
class ArgmaxOptions:
    """Validated options; the compile-time side of the Triton kernels too."""

    banned: tuple[int, ...]  # ids that leave choice and softmax
    hidden_id: int  # the id that leaves the choice only, or -1
    entropy: bool
    margin: bool
    softcap: float  # or 0
    round_bf16: bool


@torch.no_grad()
def linear_argmax(
    input: Tensor,  # [..., D] fp32, fp16, bf16 or fp64
    linear_weight: Tensor,  # [V, D]
    *,
    linear_bias: Tensor | None = None,  # [V]
    banned_ids: Collection[int] = (), mask_id: int | None = None, subs: bool = False,
    temperature: float = 0.0, gumbel: GumbelKey | None = None,
    want: Collection[str] = ("confidence",), softcap: float | None = None,
    round_logits: str | None = None, impl: str = "auto",
) -> LinearArgmax:
    """Choose a token for each row of the input under a linear head, and say how sure it is.

    Logits are accumulated in fp32 (fp64 for fp64 input); round_logits="bf16" rounds them as a bf16
    model would. banned_ids can't be chosen and leave the softmax; mask_id can't be chosen, and with
    subs leaves the softmax too. The lowest id wins a tie.
    confidence: softmax probability of the chosen token, at temperature 1 and without noise; entropy
    (nats) of that softmax; margin: between the two likeliest tokens that can be chosen.
    temperature > 0 chooses argmax(logit / temperature + Gumbel noise), i.e. samples, and needs
    `gumbel`. No gradient. ValueError for options that don't fit.
    """
    check_head(input, linear_weight, linear_bias)
    options = _options(
        banned_ids, mask_id, subs, temperature, gumbel, want, softcap, round_logits,
        len(linear_weight))
    dtype = matmul_dtype(input, linear_weight, linear_bias)
    key = (None, None, None, 0, 0)
    if temperature > 0:
        key = (*_noise_key(gumbel, input), *split_seed(gumbel.seed))
    token, confidence, entropy, margin, nan_flag = _linear_argmax(
        input.to(dtype), linear_weight.to(dtype),
        None if linear_bias is None else linear_bias.to(dtype),
        *key, float(temperature), list(options.banned), options.hidden_id, options.entropy,
        options.margin, options.softcap, options.round_bf16, impl)
    return LinearArgmax(
        token, confidence, entropy if options.entropy else None,
        margin if options.margin else None, nan_flag)


def _options(
    banned: Collection[int], mask_id: int | None, subs: bool, temperature: float,
    key: GumbelKey | None, want: Collection[str], softcap: float | None,
    round_logits: str | None, vocabulary: int,
) -> ArgmaxOptions:
    banned = {int(token) for token in banned}
    hidden = mask_id
    if mask_id is not None and (subs or mask_id in banned):
        banned, hidden = banned | {mask_id}, None
    gone = banned | ({hidden} - {None})
    if any(not 0 <= token < vocabulary for token in gone):
        raise ValueError(f"banned_ids and mask_id must lie in [0, {vocabulary})")
    if len(gone) == vocabulary:
        raise ValueError("banned_ids and mask_id leave no token to choose")
    if subs and mask_id is None:
        raise ValueError("subs needs mask_id")
    if not temperature >= 0 or (temperature > 0 and key is None):
        raise ValueError("temperature must be 0, or positive with a gumbel key")
    unknown = set(want) - {"confidence", "entropy", "margin"}
    if unknown:
        raise ValueError(f"want may hold confidence, entropy and margin, not {sorted(unknown)}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, not {softcap}")
    if round_logits not in (None, "bf16"):
        raise ValueError(f'round_logits must be None or "bf16", not {round_logits!r}')
    return ArgmaxOptions(
        tuple(sorted(banned)), -1 if hidden is None else hidden, "entropy" in want,
        "margin" in want, 0.0 if softcap is None else softcap, round_logits == "bf16",
    )


def _noise_key(key: GumbelKey, input: Tensor) -> list[Tensor]:  # [..., D] -> [...] int64
    """Position, step and request of each row."""
    shape, rows = input.shape[:-1], []
    for name in ("position", "step", "request"):
        value = torch.as_tensor(getattr(key, name), dtype=torch.int64, device=input.device)
        if value.dim() and value.shape != shape:
            raise ValueError(f"gumbel.{name} must be {list(shape)}, not {list(value.shape)}")
        rows.append(value.expand(shape))
    return rows


def _body(
    x: Tensor, weight: Tensor, bias: Tensor | None,  # [..., D], [V, D], [V]
    position: Tensor | None, step: Tensor | None, request: Tensor | None,  # [...] int64
    key_low: int, key_high: int, temperature: float, banned: list[int], hidden_id: int,
    entropy: bool, margin: bool, softcap: float, round_bf16: bool, impl: str,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:  # [...] four times, []
    options = ArgmaxOptions(tuple(banned), hidden_id, entropy, margin, softcap, round_bf16)
    kernels = triton_implementation(impl, x, "_linear_argmax_triton")
    compute, noise = kernels.head_argmax if kernels else _argmax_torch, None
    if request is not None:
        rows = (t.reshape(-1) for t in (position, step, request))
        noise = gumbel_rows(*rows, (key_low, key_high), impl)
    with no_autocast(x.device):
        numbers = compute(
            x.reshape(-1, x.shape[-1]), weight, bias, options, noise, temperature)
    shape, nan_flag = x.shape[:-1], torch.isnan(numbers[1]).any()
    return *(None if value is None else value.view(shape) for value in numbers), nan_flag


def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None,
    position: Tensor | None, step: Tensor | None, request: Tensor | None,
    key_low: int, key_high: int, temperature: float, banned: list[int], hidden_id: int,
    entropy: bool, margin: bool, softcap: float, round_bf16: bool, impl: str,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    shape, wide = x.shape[:-1], torch.promote_types(x.dtype, torch.float32)
    confidence, *wanted = (
        x.new_empty(shape, dtype=wide) if on else None for on in (True, entropy, margin))
    token = x.new_empty(shape, dtype=torch.int64)
    return token, confidence, *wanted, x.new_empty((), dtype=torch.bool)


_linear_argmax = operator(
    "linear_argmax",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? position, Tensor? step, Tensor? request, "
    "int key_low, int key_high, float temperature, int[] banned, int hidden_id, bool entropy, "
    "bool margin, float softcap, bool round_bf16, str impl) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _body, _fake,
)


def _argmax_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None,  # [N, D], [V, D], [V]
    options: ArgmaxOptions,
    noise: Tensor | None,  # [5, N]
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # each [N]
    """(token, confidence, entropy or None, margin or None)."""
    size, vocabulary = len(x), len(weight)
    wide = torch.promote_types(x.dtype, torch.float32)
    token = torch.empty(size, dtype=torch.int64, device=x.device)
    confidence = torch.empty(size, dtype=wide, device=x.device)
    entropy = torch.empty_like(confidence) if options.entropy else None
    margin = torch.empty_like(confidence) if options.margin else None
    row_bytes = vocabulary * wide.itemsize
    block = max(1, ROW_BLOCK_BYTES // row_bytes)
    for start, stop in plan_chunks(size, row_bytes, LOGITS_BYTES):
        logits = wide_logits(x[start:stop], weight, bias)
        for first in range(start, stop, block):
            rows = slice(first, min(first + block, stop))
            values = logits[first - start : rows.stop - start]
            part = None if noise is None else noise[:, rows]
            results = _block_argmax(values, options, part, temperature)
            for out, value in zip((token, confidence, entropy, margin), results, strict=True):
                if out is not None:
                    out[rows] = value
    return token, confidence, entropy, margin


def _block_argmax(
    values: Tensor,  # [n, V] fp32 or fp64, scratch
    options: ArgmaxOptions,
    noise: Tensor | None,  # [5, n]
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # each [n]
    if options.softcap > 0:
        values.div_(options.softcap).tanh_().mul_(options.softcap)
    if options.round_bf16:
        values = values.bfloat16().to(values.dtype)
    values[:, list(options.banned)] = float("-inf")
    top = values.amax(1, keepdim=True)
    values -= top
    weights = values.exp()  # [n, V], the softmax times norm
    norm = weights.sum(1)
    entropy = margin = None
    if options.entropy:
        # H = log sum e^z - sum p z, with z relative to the top.
        entropy = norm.log() - (weights * values.masked_fill(weights == 0, 0)).sum(1) / norm
    if options.hidden_id >= 0:
        values[:, options.hidden_id] = float("-inf")
    if options.margin:
        best = values.topk(min(2, values.shape[1]), dim=1).values.exp() / norm[:, None]
        margin = best[:, 0] - best[:, 1:].sum(1)
    choice = values
    if noise is not None:
        position, step, request, *key = noise
        u24 = gumbel_u24(values.shape[1], position, step, request, key)
        choice = values + temperature * gumbel(u24, values.dtype)
    token = choice.argmax(1)
    confidence = values.gather(1, token[:, None])[:, 0].exp() / norm
    return token, confidence, entropy, margin
