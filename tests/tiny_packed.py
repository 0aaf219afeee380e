"""What the backbones' tests run: a packed batch of three rows of 50 tokens, a block of each, the
rows of the blocks with targets and weights, and a plain decoder."""

from types import SimpleNamespace

import torch

from bwsft.models.kv_cache import Span

LENGTHS = (13, 9, 17)
STARTS, SIZES = (5, 4, 9), (4, 3, 4)  # active blocks; the second is short
MASK, EOS = 49, 1


def batch_of(ids, lengths=None):
    """A batch of these ids [T]: one sequence, or sequences of these lengths."""
    lengths = lengths or (len(ids),)
    return SimpleNamespace(
        ids=ids, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        position_ids=torch.cat([torch.arange(n) for n in lengths]), max_length=max(lengths),
    )


def packed(lengths=LENGTHS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return batch_of(torch.randint(0, MASK, (sum(lengths),), generator=generator), lengths)


def span(starts=STARTS, sizes=SIZES, even=None):
    even = len(set(sizes)) == 1 if even is None else even
    return Span(torch.tensor(starts), torch.tensor(sizes), max(sizes), even)


def masked(batch, where):
    """The batch with the rows of the span masked."""
    ids = batch.ids.index_fill(0, where.flat(batch.cu_seqlens).flatten(), MASK)
    return SimpleNamespace(**{**vars(batch), "ids": ids})


def full(model, batch, **options):
    """Hidden states of all rows."""
    return model.hidden_states(batch.ids, batch.position_ids, batch.cu_seqlens, **options)


def supervised_rows(batch, where):
    """Rows of the span without repeats, other targets, uneven weights."""
    keep = torch.ones(len(where.start), where.width, dtype=torch.bool)
    if where.repeats() is not None:
        keep = ~where.repeats()
    rows = where.flat(batch.cu_seqlens)[keep]
    return rows, (batch.ids[rows] * 7 + 3) % MASK, torch.linspace(0.5, 1.5, len(rows))


@torch.no_grad()
def plain_decode(logits, prompt, config):
    """One token a step, the most probable first. logits(canvas, the canvas on entering the block,
    start, stop) are those of the block's positions."""
    x = torch.tensor(list(prompt) + [MASK] * config.gen_length)
    for start in range(len(prompt), len(x), config.block_size):
        entered, stop = x.clone(), start + config.block_size
        for _ in range(config.block_size):
            scores = logits(x, entered, start, stop)
            scores[:, EOS] = -torch.inf
            confidence = scores.softmax(-1)
            confidence[:, MASK] = -1
            best, token = confidence.max(-1)
            best[x[start:stop] != MASK] = -2
            at = best.argmax()
            x[start + at] = token[at]
    return x[len(prompt) :].tolist()
