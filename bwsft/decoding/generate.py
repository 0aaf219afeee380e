"""Semi-autoregressive decoding: fill the canvas block by block.

A denoising step finds the hidden states of the active blocks under the context mode
(context.py), runs the head on their masked rows only, without keeping logits, and commits what the
transfer rule takes (rules.py; revising.py where tokens may change again, adaptive_parallel.py with
a second model). In exact mode at temperature 0 in float64 the text up to the end token equals that
of LLaDA's published decoder with [MASK] banned, token for token.

T packed tokens, S rows, B block size, N masked rows of the active blocks, D hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from bwsft.decoding.adaptive_parallel import VerifiedContext, check_verifier
from bwsft.decoding.canvas import Canvas, Row
from bwsft.decoding.context import DecodeContext
from bwsft.decoding.plan import DecodeConfig, PlannedStep
from bwsft.decoding.request import Given, make_rows
from bwsft.decoding.result import Commit, Generation, History, OnCommit, Outcome, harvest, report
from bwsft.decoding.revising import revise
from bwsft.decoding.rules import choose, head_of, transfer
from bwsft.models.backbone import Backbone

if TYPE_CHECKING:  # it needs transformers
    from bwsft.models.verifier import Verifier

__all__ = ["Commit", "Generation", "OnCommit", "decode_stream", "generate"]


def generate(
    model: Backbone,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig | None = None,
    *,
    trace: bool = False,
    requests: Sequence[int] | None = None,
    canvases: Sequence[Given] | None = None,
    on_commit: OnCommit | None = None,
    verifier: Verifier | None = None,
) -> list[Generation]:
    """Decode one response per prompt (a list of token ids), in the order given.

    Rows of a batch do not see each other and have no padding: a prompt alone gives the same tokens
    (up to the summation order of the kernels). `requests` are the numbers that the noise of each
    prompt depends on, by default 0, 1, ... `canvases` hold the given tokens of each response, None
    where a token is wanted (and behind the last one). `on_commit(index of the prompt, commits)` is
    called after every step that committed something. `verifier`: the causal model of rule apd
    (bwsft/models/verifier.py). Raises ValueError for a prompt that cannot be decoded and
    FloatingPointError if the model produces NaN.
    """
    options = {"trace": trace, "requests": requests, "canvases": canvases, "on_commit": on_commit}
    found = dict(decode_stream(model, prompts, config, **options, verifier=verifier))
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
    verifier: Verifier | None = None,
) -> Iterator[tuple[int, Generation]]:
    """As `generate`, but yields (index of the prompt, Generation) as rows finish.

    Batches are taken in the order given. Bad input raises here, not at the first result.
    """
    config = config or DecodeConfig()
    requests = range(len(prompts)) if requests is None else requests
    rows = make_rows(prompts, canvases, requests, model.family, config)
    check_verifier(verifier, rows, model, config)
    size = config.batch_size
    batches = (rows[start : start + size] for start in range(0, len(rows), size))
    options = (config, trace, on_commit, verifier)
    return (result for batch in batches for result in fill(model, batch, *options))


def fill(
    model: Backbone,
    rows: list[Row],
    config: DecodeConfig,
    trace: bool = False,
    on_commit: OnCommit | None = None,
    verifier: Verifier | None = None,
) -> Iterator[tuple[int, Generation]]:
    """Decode one batch; yields (row.index, Generation) and drops the row as soon as it is final."""
    family, weight = model.family, model.head()[0]
    canvas = Canvas.begin(rows, family, weight, config.dynamic)
    with decoding(model, weight):  # the cache's dtype is that of the passes
        if config.rule == "apd":
            context = VerifiedContext.begin_with(verifier, model, config, canvas)
        else:
            context = DecodeContext.begin(model, config, canvas)
    # The canvas remembers the last commit at a position, which is all there is unless it revises.
    history = History(on_commit) if trace and config.revising else None
    on_commit = history.add if history else on_commit
    turns = [row.plan[0] if row.plan else None for row in rows]
    final = canvas.final(config.gen_length).tolist()
    step, broken = 0, torch.zeros((), dtype=torch.bool, device=weight.device)
    while True:
        # Before a forward: what is given may leave nothing to do.
        done = [t is None or f and config.stop_at_end for t, f in zip(turns, final, strict=True)]
        if any(done):
            yield from harvest(canvas, done, step, context, trace, history)
            kept = [i for i, d in enumerate(done) if not d]
            canvas, turns = canvas.keep(kept), [turns[i] for i in kept]
            context.keep(kept)
        if not canvas.rows:
            return
        with decoding(model, weight):
            outcome = denoise(model, context, canvas, turns, step)
        step += 1
        broken |= outcome.nan
        seen = Seen.nothing(len(turns))
        if on_commit or poll_is_due(canvas, turns, step, config):
            seen = poll(canvas, outcome, broken, step, config)
        news = zip(canvas.rows, turns, seen.filled, seen.replaced, strict=True)
        ahead = [row.following(turn, step, *found) for row, turn, *found in news]
        final = seen.final
        if config.revising:
            final = [f and ended(*two) for f, *two in zip(final, turns, ahead, strict=True)]
        turns = ahead
        if on_commit:
            report(canvas, outcome, step - 1, on_commit)


def ended(turn: PlannedStep, following: PlannedStep | None) -> bool:
    """A block is finished with this step."""
    return following is None or following.start != turn.start


def poll_is_due(canvas: Canvas, turns: list[PlannedStep], step: int, config: DecodeConfig) -> bool:
    """The host must look at what the step before `step` did."""
    if config.dynamic:
        return True
    ahead = [row.following(turn, step, None) for row, turn in zip(canvas.rows, turns, strict=True)]
    if config.revising:
        return any(ended(*two) for two in zip(turns, ahead, strict=True))
    return step % config.poll == 0 or None in ahead


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


def denoise(
    model: Backbone, context: DecodeContext, canvas: Canvas, turns: list[PlannedStep], step: int
) -> Outcome:
    """One step: forward, a token for every [MASK] of the active blocks, commit what the rule takes.
    Writes the canvas.

    Reads nothing back from the device: the host knows the number of slots that it asks for.
    """
    config = context.config

    # 1. The active blocks [S, B], the slots in them that are asked for (those that are masked,
    #    under a revising rule all that were not given), and those rows [N] of the packed canvas.
    active = canvas.look(turns, step, config)

    # 2. Hidden states under the context mode, then the head on the N rows.
    hidden = context.hidden(canvas, turns, active.block).index_select(0, active.slots)
    early = None
    if config.min_length:
        prompt = canvas.cu_seqlens.diff() - config.gen_length
        own = prompt[active.slots // active.block.width]
        early = active.key[2] - own < config.min_length
    if config.rule == "apd":
        best, taken = context.verify(canvas, active, hidden, early)
    else:
        best = choose(model.family, head_of(model), hidden, config, active.key, early)

    # 3. Commit: each of the N rows gets its token or stays what it was.
    if config.revising:
        taken, replaced = revise(config, canvas, active, best, step)
        return Outcome(best.nan_flag, taken, active.flat, replaced)
    if config.rule != "apd":
        taken = transfer(config, active, best)
    got, rows = taken.flatten()[active.slots], active.rows
    canvas.ids[rows] = torch.where(got, best.token, model.family.mask_id)
    canvas.committed_at[rows] = torch.where(got, step, -1)
    canvas.confidence[rows] = best.confidence
    return Outcome(best.nan_flag, taken, active.flat)


class Seen(NamedTuple):
    """What a poll found in each row."""

    filled: list[int | None]  # [MASK]s that got a token; None: the plan says so
    replaced: list[bool]  # a token was replaced by another (rule edit)
    final: list[bool]  # no [MASK] stands before an end token

    @classmethod
    def nothing(cls, size: int) -> Seen:
        return cls([None] * size, [False] * size, [False] * size)


def poll(canvas: Canvas, outcome: Outcome, nan: Tensor, step: int, config: DecodeConfig) -> Seen:
    """After `step` steps: what the last one did. The one read from the device."""
    size, columns = len(canvas.rows), {}
    if config.dynamic and outcome.replaced is None:
        columns["filled"] = outcome.taken.sum(1)
    elif config.dynamic:
        columns["filled"] = (outcome.taken & ~outcome.replaced).sum(1)
        columns["replaced"] = outcome.replaced.any(1).long()
    if config.stop_at_end:
        columns["final"] = canvas.final(config.gen_length).long()
    broken, *found = torch.cat([nan[None].long(), *columns.values()]).tolist()
    if broken:
        raise FloatingPointError(
            f"the model's logits are NaN at denoising step {step}: decode in float32, or check "
            "the checkpoint"
        )
    starts = range(0, len(found), size)
    parts = [found[start : start + size] for start in starts]
    return Seen.nothing(size)._replace(**dict(zip(columns, parts, strict=True)))
