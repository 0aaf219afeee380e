"""`range_attention` in torch, by slices, with memory for the rows alone.

Neighboring rows that see the same keys are one call of torch's flash attention, and so is a run of
rows of which each sees one key more (a causal square). A row that sees a prefix and its own block
is in two calls, merged by their log-sum-exp; backward gives each call the merged one, so that it
makes its share of the gradients. Short sequences would be many tiny calls: neighboring rows that
see few keys are one call with a mask. Letters: T query rows, N key rows, H and K heads, E head
width.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BWD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
KNOWN = WeakTensorKeyDictionary()  # a plan's ranges -> (their version, their calls)
MOST_ROWS = 256  # of own blocks in one call: its gradients are apart until they are added up
# Of one masked call, whose masks are together no more than MOST_KEYS numbers a row. A pair that no
# row sees costs its FLOPs, and a call some time of its own: sequences of 105 rows in blocks of 8,
# of which 12 calls become one, take a quarter of the time with 4 heads of 32.
MOST_PAIRS, MOST_KEYS = 1 << 15, 256


@dataclass(frozen=True)
class _Part:
    """`count` neighboring slices of `rows` queries, each against its slice of `keys` keys."""

    row: int
    rows: int
    key: int
    keys: int
    count: int = 1
    causal: bool = False
    first: bool = False  # no other part has written to its rows yet
    mask: Tensor | None = field(default=None, compare=False)  # fp32 [rows, keys], 0 or -inf

    def continues(self, other: "_Part") -> bool:
        """Whether the other is the next slice, and one call may have both."""
        few = self.mask is None and self.rows * (self.count + 1) <= MOST_ROWS
        return few and other == replace(
            self, count=1, row=self.row + self.rows * self.count,
            key=self.key + self.keys * self.count)

    def seen(self, x: Tensor) -> Tensor:
        """Its keys of [N, K, E] as [count, K, keys, E]."""
        keys = x[self.key : self.key + self.keys * self.count]
        return keys.unflatten(0, (self.count, -1)).transpose(1, 2)

    def head_groups(self, q: Tensor, k: Tensor) -> Iterator["_Heads"]:
        """All heads of a key head as rows of one call; for a causal square one after another."""
        group = q.size(1) // k.size(1)
        step = 1 if self.causal else group
        for start in range(0, group, step):
            yield _Heads(self, k.size(1), slice(start, start + step), step)


@dataclass(frozen=True)
class _Heads:
    """Of a part's queries the heads `taken` of each key head."""

    part: _Part
    key_heads: int
    taken: slice
    number: int

    def of(self, x: Tensor) -> Tensor:
        """View [count, rows, K, number, E] of [T, H, E]."""
        rows = x[self.part.row : self.part.row + self.part.rows * self.part.count]
        rows = rows.unflatten(1, (self.key_heads, -1))[:, :, self.taken]
        return rows.unflatten(0, (self.part.count, -1))

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """Of the rows as `fold` has them."""
        mask = self.part.mask
        return None if mask is None else mask.to(dtype).repeat_interleave(self.number, 0)

    def fold(self, x: Tensor) -> Tensor:
        """[count, K, rows * number, E] of [T, H, E]."""
        return self.of(x).transpose(1, 2).flatten(2, 3)

    def unfold(self, x: Tensor) -> Tensor:
        """As `of`, from what `fold` gives."""
        return x.unflatten(2, (-1, self.number)).transpose(1, 2)


def range_attention_fwd(
    q: Tensor, k: Tensor, v: Tensor,  # [T, H, E], [N, K, E] twice
    query_ranges: Tensor,  # [4, T]
    scale: float,
) -> tuple[Tensor, Tensor]:  # [T, H, E], log-sum-exp [H, T]
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_full((q.size(1), len(q)), -math.inf, dtype=wide)
    for part in _known_parts(query_ranges):
        for heads in part.head_groups(q, k):
            fresh, fresh_lse = _forward(
                heads.fold(q), part.seen(k), part.seen(v), scale, part.causal, heads.mask(q.dtype))
            fresh, fresh_lse = heads.unfold(fresh), heads.unfold(fresh_lse[..., None])
            own, own_lse = heads.of(out), heads.of(lse.t()[..., None])
            if part.first:
                own.copy_(fresh)
                own_lse.copy_(fresh_lse)
                continue
            both = torch.logaddexp(own_lse, fresh_lse)
            merged = own * (own_lse - both).exp() + fresh * (fresh_lse - both).exp()
            own.copy_(merged)
            own_lse.copy_(both)
    return out, lse


def range_attention_bwd(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    query_ranges: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, summed over the calls in at least fp32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q_grad, k_grad, v_grad = (x.new_zeros(x.shape, dtype=wide) for x in (q, k, v))
    # Prefixes grow: from the longest on, each call's gradients fit where the last one's were.
    for part in reversed(_known_parts(query_ranges)):
        for heads in part.head_groups(q, k):
            grads = _backward(
                heads.fold(grad), heads.fold(q), part.seen(k), part.seen(v), heads.fold(out),
                heads.fold(lse.t()[..., None])[..., 0], scale, part.causal, heads.mask(q.dtype))
            heads.of(q_grad).add_(heads.unfold(grads[0]))
            part.seen(k_grad).add_(grads[1])
            part.seen(v_grad).add_(grads[2])
            del grads  # before the next call makes its own
    return q_grad.to(q.dtype), k_grad.to(k.dtype), v_grad.to(v.dtype)


def _known_parts(query_ranges: Tensor) -> list[_Part]:
    """The calls, found once for a plan: all layers have the same. Of one that was made in inference
    mode nobody knows whether it has changed."""
    if query_ranges.is_inference():
        return list(_parts(query_ranges))
    version, parts = KNOWN.get(query_ranges, (None, []))
    if version != query_ranges._version:
        parts = list(_parts(query_ranges))
        KNOWN[query_ranges] = query_ranges._version, parts
    return parts


def _parts(query_ranges: Tensor) -> Iterator[_Part]:
    """The calls, by neighboring rows."""
    ranges, done = query_ranges.cpu(), 0
    for begin, end, key, until in _few_keys(ranges):
        yield from _slices(ranges[:, done:begin], done)
        keys = torch.arange(key, until)[:, None]
        (a, b, c, d), done = ranges[:, begin:end], end
        seen = ((keys >= a) & (keys < b) | (keys >= c) & (keys < d)).t()
        mask = torch.zeros(seen.shape).masked_fill_(~seen, -math.inf)
        yield _Part(begin, end - begin, key, until - key, first=True, mask=mask)
    yield from _slices(ranges[:, done:], done)


def _few_keys(ranges: Tensor) -> Iterator[tuple[int, int, int, int]]:
    """(first row, end, first key, end) of neighboring rows that a masked call serves: each sees a
    key, what they see overlaps and is little, and without it they are three calls or more."""
    if not ranges.size(1):
        return
    kinds, counts = torch.unique_consecutive(ranges, dim=1, return_counts=True)
    prefix, own = (kinds[i + 1] > kinds[i] for i in (0, 2))
    low = torch.minimum(kinds[0].where(prefix, kinds[2]), kinds[2].where(own, kinds[0]))
    high = torch.maximum(kinds[1].where(prefix, kinds[3]), kinds[3].where(own, kinds[1]))
    calls = prefix.int() + own.int()
    begin = end = key = until = made = 0
    columns = (counts, low, high, calls)
    for rows, first, last, more in zip(*(x.tolist() for x in columns), strict=True):
        wider = min(key, first), max(until, last)
        near = made and more and first < until  # not the next sequence
        if not (near and _fits(end + rows - begin, *wider)):
            if made > 2:
                yield begin, end, key, until
            begin, made, wider = end, 0, (first, last)
        (key, until), end = wider, end + rows
        made += more if _fits(end - begin, key, until) else 0
    if made > 2:
        yield begin, end, key, until


def _fits(rows: int, key: int, until: int) -> bool:
    return until - key <= MOST_KEYS and rows * (until - key) <= MOST_PAIRS


def _slices(ranges: Tensor, row: int) -> Iterator[_Part]:
    """Calls without a mask of the rows from `row` on: those of the prefixes, then those of the own
    ranges, in which equal neighbors are one."""
    prefix_start, prefix_stop, own_start, own_stop = ranges
    yield from _runs(prefix_start, prefix_stop, row, True)
    last = None
    for part in _runs(own_start, own_stop, row, False):
        if last is not None and last.continues(part):
            last = replace(last, count=last.count + 1)
            continue
        if last is not None:
            yield last
        last = part
    if last is not None:
        yield last


def _runs(start: Tensor, stop: Tensor, row: int, first: bool) -> Iterator[_Part]:
    """Runs of rows, from `row` on, of which each has the range of the one before, or one key more
    at its end."""
    if not len(start):
        return
    step, same = stop.diff(), start.diff() == 0
    hard = ~same | (step < 0) | (step > 1)  # between rows i and i + 1
    turned = torch.zeros_like(hard)
    turned[1:] = ~hard[1:] & ~hard[:-1] & (step[1:] != step[:-1])
    begins = torch.cat((hard.new_ones(1), hard | turned)).nonzero()[:, 0]
    ends = torch.cat((begins[1:], begins.new_tensor([len(start)])))
    rising = torch.cat((step, step.new_zeros(1)))[begins] == 1
    rising &= ends - begins > 1
    rows = (begins, ends, start[begins], stop[begins], rising)
    for begin, end, key, until, causal in zip(*(x.tolist() for x in rows), strict=True):
        yield from _run(row + begin, end - begin, key, until, causal, first)


def _run(
    row: int, rows: int, key: int, until: int, causal: bool, first: bool
) -> Iterator[_Part]:
    """The parts of one run, whose first row sees keys [key, until)."""
    if not causal:
        if until > key:
            yield _Part(row, rows, key, until - key, first=first)
        return
    until = max(until, key)
    square = max(until - 1, key)  # the first row sees one key of the square, or none
    skipped = square - until + 1
    if square > key:
        yield _Part(row, rows, key, square - key, first=first)
    yield _Part(row + skipped, rows - skipped, square, rows - skipped, causal=True,
                first=first and square == key)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool,  # [count, K, rows or keys, E]
    mask: Tensor | None,  # [rows, keys]
) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp [count, K, rows])."""
    if q.device.type == "cpu":
        return FLASH(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    scores = _scores(q, k, scale, causal, mask)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(v.dtype) @ v, lse


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float,
    causal: bool, mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """This call's share of the gradients of q, k and v."""
    if q.device.type == "cpu":
        return FLASH_BWD(
            grad, q, k, v, out, lse.contiguous(), 0.0, causal, attn_mask=mask, scale=scale)
    weight = (_scores(q, k, scale, causal, mask) - lse[..., None]).exp()
    wide = (x.to(weight.dtype) for x in (grad, q, k, v, out))
    grad, q, k, v, out = wide
    score_grad = weight * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
    return score_grad @ k, score_grad.mT @ q, weight.mT @ grad


def _scores(
    q: Tensor, k: Tensor, scale: float, causal: bool, mask: Tensor | None
) -> Tensor:  # [count, K, rows, keys]
    """In at least fp32: what a GPU without Triton and float64 on a GPU take."""
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores if mask is None else scores + mask
