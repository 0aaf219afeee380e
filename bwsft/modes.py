"""How a training step meets the context mode: each mode yields losses, one backward each.

A mode takes a packed batch (on the host) and yields (weighted sum of CE, number of loss rows). The
sums of one batch add up to the sum over its sequences, so that a step divides by sequences alone,
whatever the mode. No graph outlives its backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from bwsft_kernels.block_mask import MaskedBatch, block_mask
from torch import Tensor

from bwsft.context import Context, Span

Losses = Iterator[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Mode:
    """One context mode with its options; `losses` dispatches on the name.

    corrupt(batch, draw) -> (noisy batch, MaskedBatch) is the objective's, draw 0..draws - 1 of one
    visit; all draws of a visit have the same active block.
    """

    name: str
    draws: int
    context_grad: bool
    even: bool  # every active block is full, as the `fixed` canvas makes it
    prune: bool  # the span of the loss rows is worth naming: it is much shorter than the row

    def losses(self, backbone, batch, corrupt: Callable, spec) -> Losses:
        if self.name == "block_causal":
            return block_causal(backbone, batch, spec)
        if self.name == "cached" or not self.context_grad:
            return self.frozen(backbone, batch, corrupt, spec)
        return self.exact(backbone, batch, corrupt, spec)

    def span(self, masked: MaskedBatch, spec) -> Span:
        length = masked.block_length.clamp(min=1)
        return Span(masked.block_start, length, spec.block_size, self.even)

    def exact(self, backbone, batch, corrupt, spec) -> Losses:
        """One forward and backward over the whole canvas; the last layer for the block alone."""
        noisy, masked = corrupt(batch, 0)
        context = Context(self.span(masked, spec)) if self.prune else None
        rows = (masked.rows, masked.row_target, masked.row_weight)
        yield backbone(noisy, *rows, context), masked.num_rows

    def frozen(self, backbone, batch, corrupt, spec) -> Losses:
        """A context pass without autograd, then `draws` passes over the active rows against it.

        `cached` hides the whole active block from the context, as the cached decoder does on
        entering a block; `exact` with context_grad=False shows it the noisy block.
        """
        cache = None
        for draw in range(self.draws):
            noisy, masked = corrupt(batch, draw)
            if cache is None:
                span = self.span(masked, spec)
                cache = backbone_of(backbone).new_cache(batch.num_sequences, batch.max_length)
                seen = noisy
                if self.name == "cached":
                    hidden = span.flat(noisy.cu_seqlens).flatten()
                    ids = noisy.ids.index_fill(0, hidden, spec.mask_id)
                    seen = dataclasses.replace(noisy, ids=ids)
                with torch.no_grad():
                    backbone(seen, None, None, None, Context(span, cache))
            rows = (masked.rows, masked.row_target, masked.row_weight)
            total = backbone(noisy, *rows, Context(span, cache))
            yield total / self.draws, masked.num_rows


def backbone_of(module):
    """The backbone inside a DDP or FSDP wrapper."""
    return getattr(module, "module", module)


@dataclass(frozen=True)
class OnePass:
    """All blocks of a batch in one packed batch: per sequence a clean row [prompt + response] and
    a noisy copy of the response at the same positions. `mask` [S, 1, L, L] is block-causal."""

    ids: Tensor
    cu_seqlens: Tensor
    position_ids: Tensor
    max_length: int
    mask: Tensor
    noisy: Tensor  # [sum of response lengths] where each response token's noisy copy stands


def block_causal(backbone, batch, spec) -> Losses:
    """Every block of every response supervised by one forward and backward.

    Block k of a visit has its own rate and marks (draw = visit * M + k) and weight 1 / (M * count),
    so that a sequence's weights sum to 1 as in the other modes.
    """
    clean = response_rows(batch)
    blocks = block_lengths(batch, spec)
    owner = torch.repeat_interleave(torch.arange(len(blocks)), torch.tensor(list(map(len, blocks))))
    number = torch.tensor([k for sizes in blocks for k in range(len(sizes))])
    sizes = torch.tensor([n for row in blocks for n in row])
    per_row = torch.tensor([len(b) for b in blocks])
    masked = block_mask(
        batch.ids[clean],
        torch.zeros_like(sizes),
        sizes,
        spec,
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)]).int(),
        sample_ids=batch.sample_ids[owner],
        draw=(batch.visits * per_row)[owner] + number,
        block=torch.zeros_like(sizes),
    )
    one = one_pass(batch, spec, masked.noisy_ids)
    block_of = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    weight = masked.row_weight / per_row[owner][block_of[masked.rows]]
    rows = one.noisy[masked.rows]
    yield backbone(one, rows, masked.row_target, weight), masked.num_rows


def response_rows(batch) -> Tensor:
    """Flat indices of all response tokens of a batch, in order."""
    start = batch.cu_seqlens[:-1].long() + batch.prompt_lengths
    return torch.cat(
        [torch.arange(a, a + n) for a, n in zip(start.tolist(), batch.response_lengths.tolist(),
                                                strict=True)]
    )


def block_lengths(batch, spec) -> list[list[int]]:
    """Sizes of the blocks of every response, on the family's grid."""
    out, size = [], spec.block_size
    for prompt, length in zip(
        batch.prompt_lengths.tolist(), batch.response_lengths.tolist(), strict=True
    ):
        into = prompt % size if spec.block_origin == "absolute" else 0
        first = min(size - into, length)
        rest = length - first
        out.append([first] + [size] * (rest // size) + ([rest % size] if rest % size else []))
    return out


def one_pass(batch, spec, noisy_response: Tensor) -> OnePass:
    """Lay out clean rows and noisy copies, and the mask that keeps them apart."""
    ids, positions, numbers, copies, lengths = [], [], [], [], []
    noisy_parts = noisy_response.split(batch.response_lengths.tolist())
    total = 0
    for s, blocks in enumerate(block_lengths(batch, spec)):
        a, prompt = int(batch.cu_seqlens[s]), int(batch.prompt_lengths[s])
        length = sum(blocks)
        block = torch.repeat_interleave(torch.arange(1, len(blocks) + 1), torch.tensor(blocks))
        ids += [batch.ids[a : a + prompt + length], noisy_parts[s]]
        positions += [torch.arange(prompt + length), torch.arange(prompt, prompt + length)]
        # Clean blocks are 0 (the prompt), 1, 2, ...; noisy ones -1, -2, ...
        numbers.append(torch.cat([torch.zeros(prompt, dtype=torch.long), block, -block]))
        copies.append(torch.arange(total + prompt + length, total + prompt + 2 * length))
        lengths.append(prompt + 2 * length)
        total += lengths[-1]
    padded = torch.nn.utils.rnn.pad_sequence(numbers, batch_first=True, padding_value=PAD)
    return OnePass(
        ids=torch.cat(ids),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        position_ids=torch.cat(positions),
        max_length=max(lengths),
        mask=block_causal_mask(padded),
        noisy=torch.cat(copies),
    )


PAD = 1 << 30


def block_causal_mask(numbers: Tensor) -> Tensor:
    """Boolean [S, 1, L, L], True where query (third) may see key (fourth), from block numbers
    [S, L]: 0 prompt, k clean block k, -k its noisy copy, PAD.

    Clean k sees the prompt and clean <= k; noisy k sees the prompt, clean < k and itself. Allowed
    pairs of one sequence: P^2 + 2 sum_k b_k (P + sum_{j <= k} b_j).
    """
    q, k = numbers[:, :, None], numbers[:, None, :]
    clean = (q >= 0) & (k >= 0) & (k <= q)
    noisy = (q < 0) & ((k == q) | ((k >= 0) & (k < -q)))
    allowed = (clean | noisy) & (k != PAD) & (q != PAD)
    # A padded query sees one key: a row without any would give NaN, and NaN gradients to others.
    first = torch.arange(numbers.shape[1], device=numbers.device) == 0
    return (allowed | ((q == PAD) & first))[:, None]
