"""Semi-autoregressive decoding: fill the canvas block by block, most confident tokens first.

Exact mode: every denoising step runs the model on the whole canvas, its last layer on the active
blocks and the head on their masked rows only, and no logits are kept. At temperature 0 in float64
the text up to the end token equals that of LLaDA's published decoder with [MASK] banned, token for
token.

T packed tokens, S rows, B block size, N masked rows of the active blocks, D hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from bwsft_kernels import linear_argmax
from bwsft_kernels.linear_argmax import GumbelKey
from torch import Tensor

from bwsft.backbones.base import Backbone, Family
from bwsft.canvas import Canvas, Row
from bwsft.decoding import DecodeConfig, commit_quota, final_rows, plan_row


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
    """Denoising steps of this row, each one forward pass."""
    trace: list[Commit] = field(default_factory=list)
    """On request, everything that was committed, in order, also from the end token on."""


def generate(
    model: Backbone,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig | None = None,
    *,
    trace: bool = False,
    requests: Sequence[int] | None = None,
) -> list[Generation]:
    """Decode one response per prompt (a list of token ids), in the order given.

    Rows of a batch do not see each other and have no padding: a prompt alone gives the same tokens
    (up to the summation order of the kernels). `requests` are the numbers that the noise of each
    prompt depends on, by default 0, 1, ... Raises ValueError for a prompt that cannot be decoded
    and FloatingPointError if the model produces NaN.
    """
    found = dict(decode_stream(model, prompts, config, trace=trace, requests=requests))
    return [found[index] for index in range(len(prompts))]


def decode_stream(
    model: Backbone,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig | None = None,
    *,
    trace: bool = False,
    requests: Sequence[int] | None = None,
) -> Iterator[tuple[int, Generation]]:
    """As `generate`, but yields (index of the prompt, Generation) as rows finish.

    Batches are taken in the order given. Bad input raises here, not at the first result.
    """
    config = config or DecodeConfig()
    requests = range(len(prompts)) if requests is None else requests
    check_request(prompts, requests, model.family, config)
    origin = model.family.block_origin
    rows = [
        Row(index, request, list(map(int, prompt)), plan_row(len(prompt), config, origin))
        for index, (request, prompt) in enumerate(zip(requests, prompts, strict=True))
    ]
    size = config.batch_size
    batches = (rows[start : start + size] for start in range(0, len(rows), size))
    return (result for batch in batches for result in fill(model, batch, config, trace))


def check_request(prompts, requests, family: Family, config: DecodeConfig) -> None:
    """Raise ValueError naming the first prompt, or the setting, that the model cannot take."""
    if len(requests) != len(prompts):
        raise ValueError(f"{len(requests)} request numbers for {len(prompts)} prompts")
    for token in config.banned_ids:
        if not 0 <= token < family.vocab_size:
            raise ValueError(f"banned_ids has {token}, outside [0, {family.vocab_size})")
    if len({*config.banned_ids, family.mask_id}) >= family.vocab_size:
        raise ValueError("banned_ids leave no token to produce")
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str) or not hasattr(prompt, "__len__"):
            raise ValueError(f"prompt {i} is {type(prompt).__name__}: give lists of token ids")
        total = len(prompt) + config.gen_length
        if total > family.max_positions:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens: with gen_length {config.gen_length} that "
                f"is {total}, more than the model's {family.max_positions} positions"
            )
        if family.mask_id in prompt:
            raise ValueError(f"prompt {i} contains the [MASK] id {family.mask_id}")
        if len(prompt) and not 0 <= min(prompt) <= max(prompt) < family.vocab_size:
            raise ValueError(f"prompt {i} has a token id outside [0, {family.vocab_size})")
        if len(prompt) < family.logit_shift:
            raise ValueError(f"prompt {i} is empty, but this model predicts from the token before")


def fill(
    model: Backbone, rows: list[Row], config: DecodeConfig, trace: bool = False
) -> Iterator[tuple[int, Generation]]:
    """Decode one batch; yields (row.index, Generation) and drops the row as soon as it is final."""
    family = model.family
    weight = model.head()[0]
    canvas = Canvas.begin(rows, family, weight)
    end_ids = torch.tensor(family.end_ids, device=weight.device)
    step = 0
    while canvas.rows:
        with decoding(model, weight):
            nan = denoise(model, canvas, config, step)
        step += 1
        done = finished(canvas, nan, step, config, family.mask_id, end_ids)
        if any(done):
            yield from harvest(canvas, done, step, config.gen_length, family.end_ids, trace)
            canvas = canvas.keep([i for i, d in enumerate(done) if not d])


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


def denoise(model: Backbone, canvas: Canvas, config: DecodeConfig, step: int) -> Tensor:
    """One step: forward, a token for every [MASK] of the active blocks, commit the most confident
    quota of each row. Writes the canvas; returns linear_argmax's NaN flag.

    Reads nothing back from the device: the number of [MASK]s is in the plan.
    """
    mask_id = model.family.mask_id
    turns = [row.plan[step] for row in canvas.rows]
    width = max(turn.stop - turn.start for turn in turns)
    start, stop, quota = canvas.plan[:, step].unbind(1)

    # 1. The active blocks [S, B], the slots in them that are masked, and those rows [N] of the
    #    packed canvas. A short block repeats its last position.
    position = start[:, None] + torch.arange(width, device=start.device)
    inside = position < stop[:, None]
    position = torch.minimum(position, stop[:, None] - 1)
    flat = canvas.cu_seqlens[:-1, None] + position
    masked = inside & (canvas.ids[flat] == mask_id)
    slots = masked.flatten().nonzero_static(size=sum(turn.masked for turn in turns)).squeeze(1)
    rows = flat.flatten()[slots]

    # 2. Forward on the whole canvas, last layer on the active blocks, head on the N rows.
    hidden = model.hidden_states(
        canvas.ids,
        canvas.position_ids,
        canvas.cu_seqlens,
        max_length=max(row.length for row in canvas.rows),
        wanted=model.predicting_rows(flat),
    )
    request = canvas.requests[slots // width]
    key = (request, torch.full_like(rows, step), position.flatten()[slots])
    best = choose(model, hidden.index_select(0, slots), config, key)

    # 3. Commit: each of the N rows gets its token or stays [MASK].
    confidence = best.confidence.new_full((masked.numel(),), -torch.inf)
    confidence[slots] = best.confidence
    taken = commit_quota(confidence.view_as(masked), masked, quota).flatten()[slots]
    canvas.ids[rows] = torch.where(taken, best.token, mask_id)
    canvas.committed_at[rows] = torch.where(taken, step, -1)
    canvas.confidence[rows] = best.confidence
    return best.nan_flag


def choose(model: Backbone, hidden: Tensor, config: DecodeConfig, key: tuple[Tensor, ...]):
    """linear_argmax of hidden rows [N, D] with the model's head; key: request, step, position."""
    family = model.family
    weight, bias = model.head()
    size = family.vocab_size  # a head may have spare rows behind the vocabulary
    return linear_argmax(
        hidden,
        weight[:size],
        linear_bias=None if bias is None else bias[:size],
        banned_ids=config.banned_ids,
        mask_id=family.mask_id,
        temperature=config.temperature,
        gumbel=GumbelKey(config.seed, *key) if config.temperature > 0 else None,
        softcap=family.softcap,
    )


def finished(canvas: Canvas, nan: Tensor, step: int, config, mask_id, end_ids) -> list[bool]:
    """Rows whose text is final after `step` steps. The one read from the device per step."""
    flags = nan[None]
    if config.stop_at_end:
        final = final_rows(canvas.responses(config.gen_length), mask_id, end_ids)
        flags = torch.cat([flags, final])
    broken, *final = flags.tolist()
    if broken:
        raise FloatingPointError(
            f"the model's logits are NaN at denoising step {step}: decode in float32, or check "
            "the checkpoint"
        )
    over = [len(row.plan) == step for row in canvas.rows]
    return [a or b for a, b in zip(over, final, strict=True)] if final else over


def harvest(
    canvas: Canvas,
    done: list[bool],
    steps: int,
    gen_length: int,
    end_ids: tuple[int, ...],
    trace: bool,
) -> Iterator[tuple[int, Generation]]:
    """The results of the rows that are done."""
    lengths = [row.length for row in canvas.rows]
    columns = [c.split(lengths) for c in (canvas.ids, canvas.committed_at, canvas.confidence)]
    for row, is_done, ids, at, confidence in zip(canvas.rows, done, *columns, strict=True):
        if not is_done:
            continue
        ids, at, confidence = (c[-gen_length:].tolist() for c in (ids, at, confidence))
        end = next((i for i, token in enumerate(ids) if token in end_ids), None)
        commits = []
        if trace:
            places = zip(at, range(gen_length), ids, confidence, strict=True)
            commits = sorted(Commit(*place) for place in places if place[0] >= 0)
        yield row.index, Generation(ids[:end], end is not None, steps, commits)
