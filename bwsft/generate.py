"""Semi-autoregressive decoding: fill the canvas block by block, most confident tokens first.

Exact mode: every denoising step runs the model on the whole canvas, the head on the masked rows
of the active block only, and no logits are kept. At temperature 0 in float64 the text up to the
end token equals that of LLaDA's published decoder with [MASK] banned, token for token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from bwsft_kernels import linear_argmax
from bwsft_kernels.linear_argmax import GumbelKey
from torch import Tensor

from bwsft.decoding import (
    DecodeConfig,
    block_bounds,
    commit_quota,
    final_rows,
    quotas,
    validate,
)


@dataclass
class Generation:
    """One decoded response."""

    tokens: list[int]
    """Committed tokens before the end token."""
    ended: bool
    """An end token was produced; otherwise the canvas was too short (truncated)."""
    steps: int
    """Denoising steps this row took part in, each one forward pass."""
    trace: list[tuple[int, int, int, float]] = field(default_factory=list)
    """(step, position in the response, token, confidence) in the order of commitment."""


def generate(
    model,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig | None = None,
    *,
    trace: bool = False,
    first_request: int = 0,
) -> list[Generation]:
    """Decode one response per prompt (lists of token ids), in the order given.

    model: a bwsft backbone. Rows of a batch do not see each other and have no padding: a prompt
    alone gives the same tokens. Raises ValueError for prompts that cannot be decoded and
    RuntimeError if the model produced NaN.
    """
    config = config or DecodeConfig()
    validate(config)
    check_prompts(prompts, model.family, config)
    results: list[Generation | None] = [None] * len(prompts)
    for index, generation in decode_stream(model, prompts, config, trace, first_request):
        results[index] = generation
    return results


def check_prompts(prompts, family, config: DecodeConfig) -> None:
    """Raise ValueError naming the first prompt that the model cannot take."""
    for i, prompt in enumerate(prompts):
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
            raise ValueError(f"prompt {i} is empty, and this model predicts from the token before")


def decode_stream(
    model, prompts, config: DecodeConfig, trace: bool = False, first_request: int = 0
) -> Iterator[tuple[int, Generation]]:
    """Yield (prompt index, Generation) as batches finish; longest prompts first, so that rows of
    a batch are alike and the largest batch fails, if any, at once."""
    by_length = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    for start in range(0, len(prompts), config.batch_size):
        chosen = by_length[start : start + config.batch_size]
        batch = Canvas.build(model, [prompts[i] for i in chosen], config, chosen, first_request)
        yield from zip(chosen, fill(model, batch, config, trace), strict=True)


@dataclass
class Canvas:
    """Rows that are being decoded, packed: row s holds its prompt and gen_length positions."""

    ids: Tensor  # [T]
    cu_seqlens: Tensor  # [S+1] int32
    position_ids: Tensor  # [T]
    prompt_lengths: Tensor  # [S]
    requests: Tensor  # [S] number of the request, part of its noise's key
    slot: Tensor  # [S] place of the row in the batch as it was given

    @classmethod
    def build(cls, model, prompts, config: DecodeConfig, numbers, first_request: int) -> Canvas:
        device = model.head()[0].device
        tail = [model.family.mask_id] * config.gen_length
        rows = [torch.tensor([*p, *tail], dtype=torch.long) for p in prompts]
        requests = torch.tensor(list(numbers), dtype=torch.long) + first_request
        return cls.pack(rows, [len(p) for p in prompts], requests, range(len(rows)), device)

    @classmethod
    def pack(cls, rows, prompt_lengths, requests, slot, device) -> Canvas:
        lengths = torch.tensor([0, *(len(r) for r in rows)])
        return cls(
            ids=torch.cat(rows).to(device),
            cu_seqlens=lengths.cumsum(0).to(device, torch.int32),
            position_ids=torch.cat([torch.arange(len(r)) for r in rows]).to(device),
            prompt_lengths=torch.as_tensor(prompt_lengths).to(device),
            requests=requests.to(device),
            slot=torch.as_tensor(list(slot)).to(device),
        )

    def starts(self) -> Tensor:
        return self.cu_seqlens[:-1].long()

    def response_index(self, gen_length: int) -> Tensor:
        """Flat indices [S, G] of the response canvas."""
        first = self.starts() + self.prompt_lengths
        return first[:, None] + torch.arange(gen_length, device=first.device)

    def keep(self, rows: Tensor) -> Canvas:
        """The canvas with only the rows [S] bool: retired rows cost nothing any more."""
        lengths = self.cu_seqlens.diff().long()
        of_row = torch.repeat_interleave(rows, lengths)
        cu = torch.cat([lengths.new_zeros(1), lengths[rows].cumsum(0)]).int()
        return dataclasses.replace(
            self,
            ids=self.ids[of_row],
            cu_seqlens=cu,
            position_ids=self.position_ids[of_row],
            prompt_lengths=self.prompt_lengths[rows],
            requests=self.requests[rows],
            slot=self.slot[rows],
        )


@torch.no_grad()
def fill(model, canvas: Canvas, config: DecodeConfig, trace: bool) -> list[Generation]:
    """Decode every block of a batch; returns one Generation per row, in the order given."""
    family = model.family
    end_ids = torch.tensor(family.end_ids, device=canvas.ids.device)
    results: list = [None] * len(canvas.requests)
    commits: list = []
    steps = 0
    bounds = block_bounds(canvas.prompt_lengths, config, family.block_origin)
    for block in range(bounds.shape[1]):
        at = bounds[:, block]
        plan = quotas(at[:, 1] - at[:, 0], config.steps_per_block())
        for step in range(plan.shape[1]):
            if not bool(plan[:, step].any()):
                continue
            commits += denoise(model, canvas, at, plan[:, step], config, steps, trace)
            steps += 1
            response = canvas.ids[canvas.response_index(config.gen_length)]
            done = final_rows(response, family.mask_id, end_ids)
            if not config.stop_at_end or not bool(done.any()):
                continue
            retire(canvas, response, done, steps, family.end_ids, results)
            canvas, bounds, at, plan = canvas.keep(~done), bounds[~done], at[~done], plan[~done]
            if not len(canvas.requests):
                return with_traces(results, commits)
    response = canvas.ids[canvas.response_index(config.gen_length)]
    retire(canvas, response, torch.ones_like(canvas.slot, dtype=bool), steps, family.end_ids,
           results)
    return with_traces(results, commits)


def denoise(model, canvas: Canvas, at: Tensor, quota: Tensor, config, step: int, trace: bool):
    """One step: forward, choose a token for every masked row of the active blocks, commit the
    most confident `quota` [S]. Writes canvas.ids; returns the commitments if `trace`."""
    family = model.family
    width = int((at[:, 1] - at[:, 0]).max())
    position = at[:, :1] + torch.arange(width, device=at.device)  # [S, B]
    flat = (canvas.starts()[:, None] + position).clamp(max=len(canvas.ids) - 1)
    open_slots = (position < at[:, 1:]) & (canvas.ids[flat] == family.mask_id)
    rows = flat[open_slots]
    owner = open_slots.nonzero()[:, 0]

    hidden = model.hidden_states(canvas.ids, canvas.position_ids, canvas.cu_seqlens)
    weight, bias = model.head()
    key = None
    if config.temperature > 0:
        key = GumbelKey(
            seed=config.seed,
            request=canvas.requests[owner],
            step=torch.full_like(rows, step),
            position=position[open_slots],
        )
    best = linear_argmax(
        hidden[rows - family.logit_shift],
        weight,
        linear_bias=bias,
        banned_ids=config.banned_ids,
        mask_id=family.mask_id,
        temperature=config.temperature,
        gumbel=key,
        softcap=family.softcap,
    )
    if bool(best.nan_flag):
        raise RuntimeError(
            f"the model's logits are NaN at denoising step {step + 1}; decode in float32 "
            "(--dtype float32) or check the checkpoint"
        )
    confidence = torch.full(open_slots.shape, -torch.inf, device=at.device,
                            dtype=best.confidence.dtype)
    confidence[open_slots] = best.confidence
    chosen = commit_quota(confidence, open_slots, quota)
    token = torch.zeros_like(flat)
    token[open_slots] = best.token
    canvas.ids[flat[chosen]] = token[chosen]
    if not trace:
        return []
    where = position - canvas.prompt_lengths[:, None]
    columns = (canvas.slot[:, None].expand_as(flat), where, token, confidence)
    return [(step, *(c[chosen].tolist() for c in columns))]


def retire(canvas: Canvas, response: Tensor, done: Tensor, steps: int, end_ids, results) -> None:
    """Write the results of the rows `done` [S]."""
    for slot, row in zip(canvas.slot[done].tolist(), response[done].tolist(), strict=True):
        end = next((i for i, t in enumerate(row) if t in end_ids), None)
        results[slot] = Generation(row[:end], end is not None, steps)


def with_traces(results: list[Generation], commits: list) -> list[Generation]:
    for step, slots, positions, tokens, confidences in commits:
        for slot, *entry in zip(slots, positions, tokens, confidences, strict=True):
            results[slot].trace.append((step, *entry))
    return results
