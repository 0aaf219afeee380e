"""Semi-autoregressive decoding: fill the canvas block by block.

A denoising step finds the hidden states of the active blocks under the context mode
(bwsft/decode_context.py), runs the head on their masked rows only, without keeping logits, and
commits what the transfer rule takes (bwsft/rules.py). In exact mode at temperature 0 in float64 the
text up to the end token equals that of LLaDA's published decoder with [MASK] banned, token for
token.

T packed tokens, S rows, B block size, N masked rows of the active blocks, D hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from bwsft.backbones.base import Backbone
from bwsft.canvas import Canvas, Row
from bwsft.decode_context import DecodeContext
from bwsft.decoding import DecodeConfig, PlannedStep
from bwsft.request import Given, make_rows
from bwsft.rules import choose, commit_quota, commit_sure, priority


class Commit(NamedTuple):
    """A token that became final: denoising step and response position, both from 0."""

    step: int
    position: int
    token: int
    confidence: float


@dataclass(frozen=True)
class Generation:
    """One decoded response."""

    tokens: list[int]
    """Committed tokens before the end token."""
    ended: bool
    """An end token was produced; otherwise the canvas was too short."""
    steps: int
    """Denoising steps of this row."""
    trace: list[Commit] = field(default_factory=list)
    """On request, everything that was committed, in order, also from the end token on."""
    passes: int = 0
    """Forward passes that this row took part in: as many as steps, and those of block_causal
    context or of guidance."""


OnCommit = Callable[[int, list[Commit]], None]


def generate(
    model: Backbone,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig | None = None,
    *,
    trace: bool = False,
    requests: Sequence[int] | None = None,
    canvases: Sequence[Given] | None = None,
    on_commit: OnCommit | None = None,
) -> list[Generation]:
    """Decode one response per prompt (a list of token ids), in the order given.

    Rows of a batch do not see each other and have no padding: a prompt alone gives the same tokens
    (up to the summation order of the kernels). `requests` are the numbers that the noise of each
    prompt depends on, by default 0, 1, ... `canvases` hold the given tokens of each response, None
    where a token is wanted (and behind the last one). `on_commit(index of the prompt, commits)` is
    called after every step that committed something. Raises ValueError for a prompt that cannot be
    decoded and FloatingPointError if the model produces NaN.
    """
    options = {"trace": trace, "requests": requests, "canvases": canvases, "on_commit": on_commit}
    found = dict(decode_stream(model, prompts, config, **options))
    return [found[index] for index in range(len(prompts))]


def decode_stream(
    model: Backbone,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig | None = None,
    *,
    trace: bool = False,
    requests: Sequence[int] | None = None,
    canvases: Sequence[Given] | None = None,
    on_commit: OnCommit | None = None,
) -> Iterator[tuple[int, Generation]]:
    """As `generate`, but yields (index of the prompt, Generation) as rows finish.

    Batches are taken in the order given. Bad input raises here, not at the first result.
    """
    config = config or DecodeConfig()
    requests = range(len(prompts)) if requests is None else requests
    rows = make_rows(prompts, canvases, requests, model.family, config)
    size = config.batch_size
    batches = (rows[start : start + size] for start in range(0, len(rows), size))
    return (result for batch in batches for result in fill(model, batch, config, trace, on_commit))


def fill(
    model: Backbone,
    rows: list[Row],
    config: DecodeConfig,
    trace: bool = False,
    on_commit: OnCommit | None = None,
) -> Iterator[tuple[int, Generation]]:
    """Decode one batch; yields (row.index, Generation) and drops the row as soon as it is final."""
    family, weight = model.family, model.head()[0]
    canvas = Canvas.begin(rows, family, weight, config.dynamic)
    with decoding(model, weight):  # the cache's dtype is that of the passes
        context = DecodeContext.begin(model, config, canvas)
    turns = [row.plan[0] if row.plan else None for row in rows]
    final = canvas.final(config.gen_length).tolist()
    step, broken = 0, torch.zeros((), dtype=torch.bool, device=weight.device)
    while True:
        # Before a forward: what is given may leave nothing to do.
        done = [t is None or f and config.stop_at_end for t, f in zip(turns, final, strict=True)]
        if any(done):
            yield from harvest(canvas, done, step, context, trace)
            kept = [i for i, d in enumerate(done) if not d]
            canvas, turns = canvas.keep(kept), [turns[i] for i in kept]
            context.keep(kept)
        if not canvas.rows:
            return
        with decoding(model, weight):
            outcome = denoise(model, context, canvas, turns, step)
        step += 1
        broken |= outcome.nan
        counts, final = [None] * len(turns), [False] * len(turns)
        last = any(step == len(row.plan) for row in canvas.rows)
        if step % config.poll == 0 or last or config.dynamic or on_commit:
            counts, final = poll(canvas, outcome, broken, step, config)
        turns = [
            row.following(turn, step, count)
            for row, turn, count in zip(canvas.rows, turns, counts, strict=True)
        ]
        if on_commit:
            report(canvas, outcome, step - 1, on_commit)


@contextlib.contextmanager
def decoding(model: Backbone, weight: Tensor):
    """Without dropout and gradients; fp32 adapters on a half-precision CUDA model multiply in its
    dtype, as they did in training."""
    training = model.training
    half = weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16)
    autocast = torch.autocast("cuda", weight.dtype) if half else contextlib.nullcontext()
    if training:
        model.eval()
    try:
        with torch.no_grad(), autocast:
            yield
    finally:
        if training:
            model.train()


@dataclass(frozen=True)
class Outcome:
    """What a step did."""

    nan: Tensor  # 0-dim bool
    taken: Tensor  # [S, B] bool: slots of the active blocks that got their token
    flat: Tensor  # [S, B] their places in the canvas


def denoise(
    model: Backbone, context: DecodeContext, canvas: Canvas, turns: list[PlannedStep], step: int
) -> Outcome:
    """One step: forward, a token for every [MASK] of the active blocks, commit what the rule takes.
    Writes the canvas.

    Reads nothing back from the device: the host knows the number of [MASK]s.
    """
    config, mask_id = context.config, model.family.mask_id

    # 1. The active blocks [S, B], the slots in them that are masked, and those rows [N] of the
    #    packed canvas. A short block repeats its last position.
    block, quota = canvas.active(turns, step)
    flat = block.flat(canvas.cu_seqlens)
    masked = canvas.ids[flat] == mask_id
    if not block.even:
        masked = masked & ~block.repeats()
    slots = masked.flatten().nonzero_static(size=sum(turn.masked for turn in turns)).squeeze(1)
    rows = flat.flatten()[slots]

    # 2. Hidden states under the context mode, then the head on the N rows.
    hidden = context.hidden(canvas, turns, block).index_select(0, slots)
    position = block.positions().flatten()[slots]
    key = (canvas.requests[slots // block.width], torch.full_like(rows, step), position)
    early = None
    if config.min_length:
        prompt = canvas.cu_seqlens.diff() - config.gen_length
        early = position - prompt[slots // block.width] < config.min_length
    best = choose(model, hidden, config, key, early)

    # 3. Commit: each of the N rows gets its token or stays [MASK].
    def rectangle(values: Tensor) -> Tensor:
        return values.new_full((masked.numel(),), -torch.inf).index_copy_(0, slots, values)

    confidence = rectangle(best.confidence).view_as(masked)
    goes_first = rectangle(priority(config, best, key)).view_as(masked)
    if quota is None:
        taken = commit_sure(config, goes_first, confidence, masked)
    else:
        taken = commit_quota(goes_first, masked, quota)
    got = taken.flatten()[slots]
    canvas.ids[rows] = torch.where(got, best.token, mask_id)
    canvas.committed_at[rows] = torch.where(got, step, -1)
    canvas.confidence[rows] = best.confidence
    return Outcome(best.nan_flag, taken, flat)


def poll(
    canvas: Canvas, outcome: Outcome, nan: Tensor, step: int, config: DecodeConfig
) -> tuple[list[int | None], list[bool]]:
    """After `step` steps: what the last one committed in each row (None where the plan says so),
    and the rows whose text is final. The one read from the device."""
    size = len(canvas.rows)
    flags = [nan[None].long()]
    if config.dynamic:
        flags.append(outcome.taken.sum(1))
    if config.stop_at_end:
        flags.append(canvas.final(config.gen_length).long())
    broken, *found = torch.cat(flags).tolist()
    if broken:
        raise FloatingPointError(
            f"the model's logits are NaN at denoising step {step}: decode in float32, or check "
            "the checkpoint"
        )
    counts = found[:size] if config.dynamic else [None] * size
    return counts, [bool(f) for f in found[-size:]] if config.stop_at_end else [False] * size


def report(canvas: Canvas, outcome: Outcome, step: int, on_commit: OnCommit) -> None:
    """Tell the callback what the step committed."""
    taken, flat = outcome.taken.tolist(), outcome.flat
    edges = canvas.cu_seqlens.tolist()
    columns = [x.tolist() for x in (flat, canvas.ids[flat], canvas.confidence[flat])]
    for row, start, marks, *values in zip(canvas.rows, edges[:-1], taken, *columns, strict=True):
        first = start + len(row.prompt)
        on_commit(row.index, [
            Commit(step, place - first, token, confidence)
            for mark, place, token, confidence in zip(marks, *values, strict=True) if mark
        ])  # fmt: skip


def harvest(
    canvas: Canvas, done: list[bool], steps: int, context: DecodeContext, trace: bool
) -> Iterator[tuple[int, Generation]]:
    """The results of the rows that are done."""
    lengths, config = [row.length for row in canvas.rows], context.config
    columns = [c.split(lengths) for c in (canvas.ids, canvas.committed_at, canvas.confidence)]
    for row, is_done, passes, *values in zip(
        canvas.rows, done, context.passes, *columns, strict=True
    ):
        if not is_done:
            continue
        ids, at, confidence = (c[-config.gen_length :].tolist() for c in values)
        end = next((i for i, token in enumerate(ids) if token in canvas.family.end_ids), None)
        own = steps
        if config.stop_at_end and end is not None:  # it may have been final before the last poll
            own = 1 + max(at[: end + 1])
        commits = []
        if trace:
            places = zip(at, range(config.gen_length), ids, confidence, strict=True)
            commits = sorted(Commit(*place) for place in places if 0 <= place[0] < own)
        yield row.index, Generation(ids[:end], end is not None, own, commits, passes)
