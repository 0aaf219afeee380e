"""The reference implementations: each function of this package again, plain and slow, for tests
and benchmarks. Shapes and options as in the public functions.

Loss and head statistics use full logits in the dtype of their input (float64 for a test's truth)
and ordinary autograd. The mask is a Python loop over tokens, which on purpose shares nothing with
block_grid.py and the other implementations.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from ._block_mask_torch import IGNORE
from ._block_mask_types import MaskedBatch, MaskSpec
from ._linear_argmax import GumbelKey
from .philox import MASK32, Stream, gumbel, gumbel_key, gumbel_u24, philox_words, split_seed


def linear_cross_entropy(
    input: Tensor,  # [..., D]
    linear_weight: Tensor,  # [V, D]
    target: Tensor,  # [...]
    *,
    linear_bias: Tensor | None = None,  # [V]
    reduction: str = "mean", ignore_index: int = -100,
    label_smoothing: float | Tensor = 0.0,  # [...]
    row_weight: Tensor | None = None,  # [...]
    softcap: float | None = None, excluded_id: int | None = None, confidence: float = 0.0,
) -> Tensor:
    """Full logits, loss and gradient by autograd, in the dtype of the input."""
    keep = target != ignore_index
    if row_weight is None:
        row_weight = torch.ones(target.shape, dtype=input.dtype, device=input.device)
    row_weight = torch.where(keep, row_weight.to(input.dtype), 0)
    target = torch.where(keep, target, 1 if excluded_id == 0 else 0).long()
    logits = _logits(input, linear_weight, linear_bias, softcap)
    allowed = torch.ones(len(linear_weight), dtype=torch.bool, device=input.device)
    if excluded_id is not None:
        allowed[excluded_id] = False
    lse = logits.masked_fill(~allowed, float("-inf")).logsumexp(-1)
    mean = logits.masked_fill(~allowed, 0).sum(-1) / allowed.sum()
    plain = lse - logits.gather(-1, target[..., None])[..., 0]
    loss = (1 - label_smoothing) * plain + label_smoothing * (lse - mean)
    if confidence:
        log_p = (logits - lse[..., None]).masked_fill(~allowed, float("-inf"))
        p = log_p.exp()
        others = p.scatter(-1, target[..., None], -1.0).amax(-1)
        right = p.gather(-1, target[..., None])[..., 0] >= others
        entropy = -(p * torch.where(p > 0, log_p, 0)).sum(-1)
        loss = loss + confidence * torch.where(right, entropy, 0)
    loss = row_weight * loss
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    total = row_weight.sum()
    return loss.sum() / torch.where(total == 0, 1, total)


def linear_argmax(
    input: Tensor,  # [..., D]
    linear_weight: Tensor,  # [V, D]
    *,
    linear_bias: Tensor | None = None,  # [V]
    banned_ids: Collection[int] = (), mask_id: int | None = None, subs: bool = False,
    temperature: float = 0.0, gumbel_from: GumbelKey | None = None,
    softcap: float | None = None, round_logits: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # each [...]
    """(token, confidence, entropy, margin)."""
    logits = _logits(input, linear_weight, linear_bias, softcap)
    if round_logits == "bf16":
        logits = logits.bfloat16().to(logits.dtype)
    logits[..., list(banned_ids) + ([mask_id] if subs else [])] = float("-inf")
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    entropy = -torch.where(p > 0, p * log_p, 0).sum(-1)
    choice = logits.clone()
    if mask_id is not None:
        choice[..., mask_id] = float("-inf")
    best = choice.sort(dim=-1, descending=True, stable=True).indices[..., :2]
    margin = p.gather(-1, best[..., :1]) - p.gather(-1, best[..., 1:])
    if temperature > 0:
        key, words = gumbel_from, gumbel_key(gumbel_from.seed, gumbel_from.request)
        u24 = gumbel_u24(len(linear_weight), key.position, key.step, key.request, words)
        choice = choice / temperature + gumbel(u24, choice.dtype)
    token = choice.argmax(-1)
    confidence = p.gather(-1, token[..., None])[..., 0]
    return token, confidence, entropy, margin[..., 0]


def _logits(
    input: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None
) -> Tensor:  # [..., V]
    logits = torch.nn.functional.linear(input, weight, bias)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def block_mask(
    ids: Tensor,  # [T] or [S, L]
    prompt_lengths: Tensor | Sequence[int],  # [S], as the others but cu_seqlens
    response_lengths: Tensor | Sequence[int],
    spec: MaskSpec,
    *,
    cu_seqlens: Tensor | None = None,  # [S + 1]
    sample_ids: Tensor | None = None, draw: int | Tensor = 0, block: Tensor | None = None,
    block_weights: Tensor | None = None,  # [S, M]
    block_draw: int | Tensor | None = None, rate: Tensor | None = None,
    factor: Tensor | None = None,
) -> MaskedBatch:
    """One sequence and one token at a time, with Python integers."""
    size = len(prompt_lengths)
    flat = ids.reshape(-1).tolist()
    starts = [ids.shape[1] * s for s in range(size)] if cu_seqlens is None else cu_seqlens.tolist()
    sample_ids = range(size) if sample_ids is None else sample_ids.tolist()
    draws, block_draws = (
        [number] * size if isinstance(number, int) else number.tolist()
        for number in (draw, draw if block_draw is None else block_draw)
    )
    noisy, labels, rows, facts = list(flat), [IGNORE] * len(flat), [], []
    for s in range(size):
        prompt, response = int(prompt_lengths[s]), int(response_lengths[s])
        dice = _Dice(spec, draws[s], sample_ids[s], None if rate is None else int(rate[s]))
        given = None if block is None else int(block[s])
        chances = None if block_weights is None else block_weights[s].tolist()
        number = dice.u24(Stream.BLOCK, 0, block_draws[s] & ~1 if spec.pairs else block_draws[s])
        index, start, length, scale = _choose(spec, prompt, response, number, given, chances)
        scale = scale if factor is None else scale * float(factor[s])
        rate24, marked = dice.marks(start, length)
        for position in range(prompt, prompt + response):
            token = starts[s] + position
            if position in marked or dice.hides(position, start, start + length):
                noisy[token] = spec.mask_id
            if position in marked:
                labels[token] = flat[token]
        per = {"count": len(marked), "flat": length, "sum": 1,
               "rate": rate24 * length * 2.0**-24}  # fmt: skip
        weight = scale / per[spec.weight] if marked else 0.0
        if spec.pairs and spec.empty != "skip" and len(marked) == length:
            weight *= 2  # the other half is empty
        rows += [(starts[s] + position, weight) for position in sorted(marked)]
        facts.append((index, start, length, rate24 / 2**24, len(marked)))
    return _assemble(ids, noisy, labels, rows, facts, min(size * spec.block_size, len(flat)))


class _Dice:
    """The random numbers of one draw of one example; `rate24`: a given mask rate."""

    def __init__(self, spec: MaskSpec, draw: int, sample_id: int, rate24: int | None):
        self.spec, self.draw, self.sample_id, self.rate24 = spec, draw, sample_id, rate24

    def u24(self, stream: Stream, position: int, draw: int | None = None) -> int:
        draw = self.draw if draw is None else draw
        high = (self.sample_id >> 32) | (stream << 24)
        counter = (position, draw, self.sample_id & MASK32, high)
        return philox_words(counter, split_seed(self.spec.seed))[0] >> 8

    def _own_marks(self, draw: int, start: int, length: int) -> tuple[int, set[int]]:
        low, high = round(self.spec.low * 2**24), round(self.spec.high * 2**24)
        rate24 = low + ((high - low) * self.u24(Stream.RATE, 0, draw) >> 24)
        rate24 = rate24 if self.rate24 is None else self.rate24
        positions = range(start, start + length)
        return rate24, {p for p in positions if self.u24(Stream.MARKS, p, draw) < rate24}

    def marks(self, start: int, length: int) -> tuple[int, set[int]]:
        """(rate in units of 2^-24, set of marked positions)."""
        draw = self.draw - self.draw % 2 if self.spec.pairs else self.draw
        rate24, marked = self._own_marks(draw, start, length)
        if not marked and length and self.spec.empty == "last":
            marked = {start + length - 1}
        if not marked and length and self.spec.empty == "redraw":
            rate24, marked = self._redrawn(draw, rate24, start, length)
        if draw < self.draw:
            marked = set(range(start, start + length)) - marked
        return rate24, marked

    def _redrawn(self, draw: int, rate24: int, start: int, length: int) -> tuple[int, set[int]]:
        """An empty draw's rate takes the number of one token, which is marked."""
        token = start + (self.u24(Stream.RATE, 1, draw) * length >> 24)
        high = round(self.spec.high * 2**24) if self.rate24 is None else rate24
        rate24 = min(self.u24(Stream.MARKS, token, draw), high)
        positions = range(start, start + length)
        return rate24, {p for p in positions if self.u24(Stream.MARKS, p, draw) < rate24} | {token}

    def hides(self, position: int, start: int, end: int) -> bool:
        """Whether a response token outside the active block [start, end) is masked."""
        if position < start:
            noise24 = round(self.spec.prefix_noise * 2**24)
            return self.u24(Stream.PREFIX, position) < noise24
        leak24 = round(self.spec.suffix_leak * 2**24)
        return position >= end and self.u24(Stream.SUFFIX, position) >= leak24


def _choose(
    spec: MaskSpec, prompt: int, response: int, number: int,
    given: int | None, chances: list[int] | None,
) -> tuple[int, int, int, float]:
    """(index, start, length, importance factor) of the active block; number: its u24."""
    origin = prompt if spec.block_origin == "response" else prompt - prompt % spec.block_size
    bounds = range(origin, prompt + response, spec.block_size) if response else ()
    blocks = [
        (max(edge, prompt), min(edge + spec.block_size, prompt + response)) for edge in bounds
    ]
    if not blocks:
        return 0, prompt, 0, 1.0
    index, inverse_rho = number * len(blocks) >> 24, float(len(blocks))
    if given is not None:
        index = given
    elif chances is not None:
        chances = chances[: len(blocks)]
        left = number * sum(chances) >> 24
        index = 0
        while left >= chances[index]:
            left -= chances[index]
            index += 1
        inverse_rho = sum(chances) / chances[index]
    start, end = blocks[index]
    factor = inverse_rho if spec.block_factor == "sum" else inverse_rho / len(blocks)
    return index, start, end - start, factor




def _assemble(
    ids: Tensor,
    noisy: list[int], labels: list[int],  # [T]
    rows: list[tuple[int, float]],  # index and weight of each supervised token
    facts: list[tuple[int, int, int, float, int]],  # [S]
    bound: int,
) -> MaskedBatch:
    flat, tail = ids.reshape(-1).tolist(), bound - len(rows)
    block, start, length, rate, count = zip(*facts, strict=True) if facts else [()] * 5
    return MaskedBatch(
        noisy_ids=torch.tensor(noisy, dtype=ids.dtype).view(ids.shape),
        labels=torch.tensor(labels, dtype=ids.dtype).view(ids.shape),
        rows=torch.tensor([row for row, _ in rows] + [0] * tail, dtype=torch.int64),
        row_target=torch.tensor([flat[row] for row, _ in rows] + [IGNORE] * tail).long(),
        row_weight=torch.tensor([w for _, w in rows] + [0.0] * tail, dtype=torch.float32),
        num_rows=torch.tensor(len(rows)),
        block=torch.tensor(block).long(), block_start=torch.tensor(start).long(),
        block_length=torch.tensor(length).long(), rate=torch.tensor(rate).float(),
        count=torch.tensor(count).long(),
    )
