"""What the backbones' tests run: a packed batch of three rows of 50 tokens, a block of each, the
rows of the blocks with targets and weights, two training steps, and a plain decoder."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import torch
from bwsft_kernels import MaskSpec

from bwsft.data.packing import CanvasLayout, Example, pack
from bwsft.models.kv_cache import Span
from bwsft.objectives import blockwise

LENGTHS = (13, 9, 17)
STARTS, SIZES = (5, 4, 9), (4, 3, 4)  # active blocks; the second is short
MASK, EOS = 49, 1


def packed(lengths=LENGTHS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return SimpleNamespace(
        ids=torch.randint(0, MASK, (sum(lengths),), generator=generator),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        max_length=max(lengths),
    )


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


def loss_rows(batch, where):
    """Rows of the span without repeats, other targets, uneven weights."""
    keep = torch.ones(len(where.start), where.width, dtype=torch.bool)
    if where.repeats() is not None:
        keep = ~where.repeats()
    rows = where.flat(batch.cu_seqlens)[keep]
    return rows, (batch.ids[rows] * 7 + 3) % MASK, torch.linspace(0.5, 1.5, len(rows))


def two_steps(model, mode, rate):
    """Losses of a batch before and after a step along its gradients, all of which are finite."""
    layout = CanvasLayout(mask_id=MASK, eos_id=EOS, block_size=4, gen_length=16, max_length=32)
    spec, rng = MaskSpec(block_size=4, mask_id=MASK, seed=5), np.random.default_rng(0)
    batch = pack(
        [Example(rng.integers(2, 49, p), rng.integers(2, 49, r), i, 0)
         for i, (p, r) in enumerate(((5, 9), (3, 12), (4, 6)))],
        layout,
    )  # fmt: skip
    run = SimpleNamespace(backbone=model.train(), spec=spec, autocast=nullcontext)
    run.device = torch.device("cpu")
    run.corrupt = lambda b, draw: blockwise.corrupt(b, spec, "uniform", draw, mode.draws)
    totals = []
    for _ in range(2):
        total = 0.0
        for loss, *_ in mode.losses(run, batch):
            loss.backward()
            total += loss.item()
        totals.append(total)
        with torch.no_grad():
            for p in model.parameters():
                assert torch.isfinite(p.grad).all()
                p -= rate * p.grad
    return totals


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
