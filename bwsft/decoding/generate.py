"""Semi-autoregressive decoding: fill the canvas block by block.

A denoising step finds the hidden states of the active blocks under the context mode (context.py),
projects those of their masked slots to logits, without keeping them, and commits what the transfer
rule takes (rules.py). In exact mode at temperature 0 in float64 the text up to the end token equals
that of LLaDA's published decoder with [MASK] banned, token for token.

T packed tokens, S sequences, B block size, N slots that are projected to logits, D hidden size.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from bwsft.decoding.canvas import Canvas, Row
from bwsft.decoding.config import DecodeConfig
from bwsft.decoding.context import DecodeContext
from bwsft.decoding.plan import Planned, PlannedStep
from bwsft.decoding.random_canvases import write_stream
from bwsft.decoding.request import Given, make_rows
from bwsft.decoding.result import Generation, History, OnCommit, Outcome, harvest, report
from bwsft.models.backbone import Backbone

if TYPE_CHECKING:  # it needs transformers
    from bwsft.models.verifier import Verifier


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

    Prompts of a batch do not see each other and have no padding: one alone gives the same tokens
    (up to the summation order of the kernels). `requests` are the numbers that the noise of each
    prompt depends on, by default 0, 1, ... `canvases` hold the given tokens of each response, None
    where a token is wanted (and after the last one). `on_commit(index of the prompt, commits)` is
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
    """As `generate`, but yields (index of the prompt, Generation) as responses finish.

    Batches are taken in the order given and planned one by one. Bad input raises here, not at the
    first result.
    """
    config = config or DecodeConfig()
    requests = range(len(prompts)) if requests is None else requests
    if model.family.noise != "mask":
        if canvases is not None or verifier is not None:
            raise ValueError("canvases and verifier are for models with a [MASK]: leave them out")
        return write_stream(model, prompts, config, requests, trace, on_commit)
    asked = (prompts, canvases, requests, model.family, config)
    config.method.check_verifier(verifier, make_rows(*asked), model)
    rows = make_rows(*asked)
    batches = iter(lambda: list(itertools.islice(rows, config.batch_size)), [])
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
    weight, rule = model.head()[0], config.method
    canvas = Canvas.begin(rows, model.family, weight, rule.dynamic)
    with decoding(model, weight):  # the cache's dtype is that of the passes
        context = rule.context_type.begin(model, config, canvas, verifier)
    # The canvas remembers the last commit at a position, which is all there is unless it revises.
    history: History | None = defaultdict(list) if trace and rule.revising else None
    telling = on_commit is not None or history is not None
    planned = [rule.first(row.plan) for row in rows]
    final = canvas.final(config.gen_length).tolist()
    step, broken = 0, torch.zeros((), dtype=torch.bool, device=weight.device)
    while True:
        # Before a forward: what is given may leave nothing to do.
        done = [p is None or f and config.stop_at_end for p, f in zip(planned, final, strict=True)]
        if any(done):
            yield from harvest(canvas, done, step, context, trace, history)
            if not (kept := [i for i, d in enumerate(done) if not d]):
                return
            canvas, planned = canvas.keep(kept), [planned[i] for i in kept]
            context.keep(kept)
        with decoding(model, weight):
            outcome = denoise(context, canvas, planned, step)
        step += 1
        broken |= outcome.nan
        seen = Seen.nothing(len(planned))
        if telling or poll_is_due(canvas, planned, step, config):
            seen = poll(canvas, outcome, broken, step, config)
        ahead = following(canvas, planned, step, config, seen)
        final = seen.final
        if rule.revising:
            final = [f and ended(*two) for f, *two in zip(final, planned, ahead, strict=True)]
        planned = ahead
        for index, commits in (
            report(canvas, outcome, config.gen_length) if telling else ()
        ):
            if history is not None:
                history[index] += commits
            if on_commit:
                on_commit(index, commits)


def following(
    canvas: Canvas, planned: Planned, step: int, config: DecodeConfig, seen: Seen
) -> list[PlannedStep | None]:
    """Step number `step` of every row, after the planned ones, given what was seen of these."""
    news = zip(canvas.rows, planned, seen.filled, seen.replaced, seen.drafted, strict=True)
    return [config.method.following(row.plan, p, step, *found) for row, p, *found in news]


def ended(planned: PlannedStep, following: PlannedStep | None) -> bool:
    """A block is finished with this step."""
    return following is None or following.start != planned.start


def poll_is_due(canvas: Canvas, planned: Planned, step: int, config: DecodeConfig) -> bool:
    """The host must look at what the step before `step` did."""
    if config.method.dynamic:
        return True
    ahead = following(canvas, planned, step, config, Seen.nothing(len(planned)))
    if config.method.revising:
        return any(ended(*two) for two in zip(planned, ahead, strict=True))
    return step % config.poll == 0 or None in ahead


@contextlib.contextmanager
def decoding(model: Backbone, weight: Tensor) -> Iterator[None]:
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


def denoise(context: DecodeContext, canvas: Canvas, planned: Planned, step: int) -> Outcome:
    """One step: forward, a token for every slot that is asked for, commit what the rule takes.
    Writes the canvas.

    Reads nothing back from the device: the host knows the number of slots that it asks for.
    """
    rule = context.config.method

    # 1. The active blocks [S, B], the N slots in them that are asked for (those that are masked,
    #    under a revising rule all that were not given), and their places in the packed canvas.
    active = canvas.look(planned, step, rule)

    # 2. Tokens of the N slots, from their hidden states under the context mode, and which of them
    #    the rule commits.
    best, change = rule.decide(context, canvas, active)
    canvas.write(active, best, change, step)
    return Outcome(best.nan_flag, change, active)


class Seen(NamedTuple):
    """What a poll found in each row of the batch."""

    # Of each active block how many [MASK]s got a token; empty: the plan says so.
    filled: list[Sequence[int]]
    replaced: list[bool]  # a token was replaced by another (rule edit)
    drafted: list[int]  # tokens that the next pass tries (rule speculative)
    final: list[bool]  # no [MASK] stands before an end token

    @classmethod
    def nothing(cls, size: int) -> Seen:
        return cls([()] * size, [False] * size, [0] * size, [False] * size)


def poll(canvas: Canvas, outcome: Outcome, nan: Tensor, step: int, config: DecodeConfig) -> Seen:
    """After `step` steps: what the last one did. The one read from the device."""
    size, columns, rule = len(canvas.rows), {}, config.method
    if rule.dynamic:
        columns["filled"] = outcome.filled()
    if rule.dynamic and rule.revising:
        columns["replaced"] = (outcome.change.taken & ~outcome.active.masked).any(1).long()
    if outcome.change.drafted is not None:
        columns["drafted"] = outcome.change.drafted
    if config.stop_at_end:
        columns["final"] = canvas.final(config.gen_length).long()
    flat = [nan[None].long(), *(column.flatten() for column in columns.values())]
    broken, *found = torch.cat(flat).tolist()
    if broken:
        raise FloatingPointError(
            f"the model's logits are NaN at denoising step {step}: decode in float32, or check "
            "the checkpoint"
        )
    parts = {}
    for name, column in columns.items():
        parts[name], found = found[: column.numel()], found[column.numel() :]
    if "filled" in parts:
        counts, several = parts["filled"], len(parts["filled"]) // size
        parts["filled"] = [counts[i : i + several] for i in range(0, len(counts), several)]
    return Seen.nothing(size)._replace(**parts)
