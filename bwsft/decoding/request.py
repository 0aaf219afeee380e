"""What a decoder is asked for: prompts and given tokens, checked and planned."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator, Sequence

from bwsft_kernels.block_grid import BlockGrid

from bwsft.decoding.canvas import Row
from bwsft.decoding.config import DecodeConfig
from bwsft.models.backbone import Family, check_context

Given = Sequence[int | None] | None


def make_rows(
    prompts: Sequence[Sequence[int]],
    canvases: Sequence[Given] | None,
    requests: Sequence[int],
    family: Family,
    config: DecodeConfig,
) -> Iterator[Row]:
    """Planned rows, one per prompt; the checks are made here, each plan when its row is taken: it
    may need a hundred times the memory of its prompt."""
    check_request(prompts, requests, family, config)
    canvases = [None] * len(prompts) if canvases is None else canvases
    if len(canvases) != len(prompts):
        raise ValueError(f"{len(canvases)} canvases for {len(prompts)} prompts")
    for i, canvas in enumerate(canvases):
        if canvas is not None:
            response_of(canvas, i, family, config)

    def row(i: int) -> Row:
        response = response_of(canvases[i] or (), i, family, config)
        added = whole_blocks(len(prompts[i]), family, config) - len(response)
        response += [family.mask_id] * added
        given = [p for p, token in enumerate(response) if token != family.mask_id]
        plan = config.method.plan(len(prompts[i]), family.block_origin, given, requests[i])
        return Row(i, requests[i], [int(token) for token in prompts[i]], response, plan)

    return map(row, range(len(prompts)))


def response_of(canvas: Given, i: int, family: Family, config: DecodeConfig) -> list[int]:
    """A response canvas with [MASK] where nothing is given; ValueError for a bad one."""
    if isinstance(canvas, str) or len(canvas) > config.gen_length:
        raise ValueError(
            f"canvas {i} must be a list of token ids and None, of at most gen_length = "
            f"{config.gen_length} positions"
        )
    response = [family.mask_id] * config.gen_length
    for position, token in enumerate(canvas):
        if token is None:
            continue
        token = operator.index(token)
        if not 0 <= token < family.vocab_size or token == family.mask_id:
            raise ValueError(f"canvas {i} gives {token} at position {position}: no token id")
        response[position] = token
    return response


def whole_blocks(prompt: int, family: Family, config: DecodeConfig) -> int:
    """Positions that are decoded after a prompt of this length: gen_length, and on an absolute grid
    those up to the end of the last block, which is decoded as it is trained. The answer is cut."""
    return BlockGrid(config.block_size, family.block_origin).filled(prompt, config.gen_length)


def check_request(
    prompts: Sequence[Sequence[int]], requests: Sequence[int], family: Family, config: DecodeConfig
) -> None:
    """Raise ValueError naming the first prompt, or the setting, that the model cannot take."""
    if len(requests) != len(prompts):
        raise ValueError(f"{len(requests)} request numbers for {len(prompts)} prompts")
    for token in config.banned_ids:
        if not 0 <= token < family.vocab_size:
            raise ValueError(f"banned_ids has {token}, outside [0, {family.vocab_size})")
    ends = family.end_ids if config.min_length or config.ends == "last" else ()
    ends += (family.eos_id,) if config.ends == "no_eos" else ()
    if len({*config.banned_ids, *ends, family.mask_id}) >= family.vocab_size:
        raise ValueError("banned_ids leave no token to produce")
    check_modes(family, config)
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str) or not hasattr(prompt, "__len__"):
            raise ValueError(f"prompt {i} is {type(prompt).__name__}: give lists of token ids")
        total = len(prompt) + whole_blocks(len(prompt), family, config)
        if total > family.max_positions:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens: with gen_length {config.gen_length} that "
                f"is {total}, more than the model's {family.max_positions} positions"
            )
        if family.noise == "mask" and family.mask_id in prompt:
            raise ValueError(f"prompt {i} contains the [MASK] id {family.mask_id}")
        if len(prompt) and not 0 <= min(prompt) <= max(prompt) < family.vocab_size:
            raise ValueError(f"prompt {i} has a token id outside [0, {family.vocab_size})")
        if len(prompt) < family.logit_shift:
            raise ValueError(f"prompt {i} is empty, but this model predicts from the token before")


def check_modes(family: Family, config: DecodeConfig) -> None:
    """Raise ValueError for a context mode or guidance that the family cannot have, and warn of a
    context that training has not seen."""
    check_context(family, config.context)
    if (family.noise == "mask") == (config.rule == "renoise"):
        what = "fills [MASK]s, and undecided tokens of this model are random ones: take renoise"
        if config.rule == "renoise":
            what = "is for models whose undecided tokens are random ones (DiffusionGemma)"
        raise ValueError(f"rule {config.rule} {what}")
    if config.cfg_scale and family.softcap is not None:
        raise ValueError("cfg_scale needs a linear head, and this model caps its logits")
    if config.context == "cached" and 0 < config.refresh < config.block_size:
        warnings.warn(
            f"refresh {config.refresh} recomputes the context inside a block of "
            f"{config.block_size}, where cached training never does",
            stacklevel=2,
        )
