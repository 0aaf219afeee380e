"""Which token a [MASK] would get, and how sure the model is of it.

Plain settings go to the fused `linear_argmax`, which keeps no logits. Top-p, top-k and a tempered
confidence need a row of logits as a whole, sorted: they take the torch path here, on the masked
rows of the active blocks alone, CHUNK of them at a time.

N rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

import torch
from bwsft_kernels import GumbelKey, LinearArgmax, linear_argmax
from bwsft_kernels.philox import gumbel, gumbel_key, gumbel_u24
from torch import Tensor

from bwsft.models.backbone import Backbone, Family

if TYPE_CHECKING:
    from bwsft.decoding.config import DecodeConfig

CHUNK = 32  # rows: of 150,000 tokens each, 40 MB of noise


class Head(NamedTuple):
    """What turns hidden states into logits of the token ids below `size`."""

    weight: Tensor  # [V, D], V >= size
    bias: Tensor | None
    size: int


def head_of(model: Backbone) -> Head:
    return Head(*model.head(), model.family.vocab_size)  # it may have spare rows at its end


def choose_tokens(
    config: DecodeConfig,
    family: Family,
    head: Head,
    hidden: Tensor,  # [N, D]
    key: tuple[Tensor, Tensor, Tensor],  # request, step and position [N]
    want: Collection[str],
    banned: tuple[int, ...],
) -> LinearArgmax:
    """Tokens of the N rows, never [MASK] or one of `banned`, with what `want` names: confidence,
    margin, entropy."""
    weight, bias = head.weight[: head.size], None if head.bias is None else head.bias[: head.size]
    noise = GumbelKey(config.seed, *key) if config.temperature > 0 else None
    if not config.whole_logits:
        return linear_argmax(
            hidden, weight, linear_bias=bias, banned_ids=banned, mask_id=family.mask_id,
            temperature=config.temperature, gumbel=noise, want=want, softcap=family.softcap,
        )  # fmt: skip
    parts = []
    for start in range(0, len(hidden), CHUNK):
        rows = slice(start, start + CHUNK)
        logits = torch.nn.functional.linear(hidden[rows], weight, bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if family.softcap is not None:
            logits = family.softcap * torch.tanh(logits / family.softcap)
        parts.append(choose_whole(config, logits, family.mask_id, banned, [n[rows] for n in key]))
    token, confidence, entropy, margin = map(torch.cat, zip(*parts, strict=True))
    return LinearArgmax(token, confidence, entropy, margin, confidence.isnan().any())


def choose_whole(
    config: DecodeConfig,
    logits: Tensor,  # [n, V] fp32 or fp64
    mask_id: int,
    banned: tuple[int, ...],
    key: list[Tensor],  # request, step and position [n]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # each [n]
    """(token, confidence, entropy, margin) from whole rows of logits.

    A token is drawn from softmax(logits / temperature), of which top_p and then top_k keep the
    likeliest tokens, [MASK] and `banned` out of it; at temperature 0 it is the likeliest. The other
    three are of that softmax where the confidence is "tempered", else of the one at temperature 1
    and of all tokens; both without `banned` and with [MASK], as in `linear_argmax`.
    """
    for token in banned:
        logits[:, token] = -torch.inf
    allowed = logits.clone()
    allowed[:, mask_id] = -torch.inf
    warm = config.temperature or 1.0
    drawn = keep_likeliest(allowed / warm, config.top_p, config.top_k)
    noisy = drawn
    if config.temperature > 0:
        request, step, position = key
        words = gumbel_key(config.seed, request)
        u24 = gumbel_u24(logits.shape[1], position, step, request, words)
        noisy = drawn + gumbel(u24, logits.dtype)
    token = noisy.argmax(1, keepdim=True)
    if config.confidence == "tempered":
        drawn[:, mask_id] = logits[:, mask_id] / warm
        logits = drawn
    logs = logits.log_softmax(1)
    p = logs.exp()
    entropy = -torch.where(p > 0, p * logs, 0).sum(1)
    choices = p.clone()
    choices[:, mask_id] = 0
    first, second = choices.topk(2, 1).values.unbind(1)
    return token[:, 0], p.gather(1, token)[:, 0], entropy, first - second


def keep_likeliest(logits: Tensor, top_p: float, top_k: int) -> Tensor:
    """Logits [n, V] with -inf but for the smallest set of likeliest tokens with more than `top_p`
    of the probability (1: all), and of them the `top_k` likeliest, ties included (0: all)."""
    if top_p < 1:
        ordered, order = logits.sort(dim=1, descending=True, stable=True)
        p = ordered.softmax(1)
        before = p.cumsum(1).roll(1, 1)
        before[:, 0] = 0  # the likeliest stays in any case
        gone = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, before > top_p)
        logits = logits.masked_fill(gone, -torch.inf)
    if top_k > 0:
        least = logits.topk(min(top_k, logits.shape[1]), 1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return logits
