"""Block-causal decoding of models of transformers: what a step computes while it stores finished
blocks is, in float64, what a plain forward over prompt, finished blocks and active block gives."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import tiny_hf
import torch
from block_masks import block_causal_mask, clean_numbers
from bwsft_kernels.block_grid import BlockGrid
from tiny_hf import float64  # noqa: F401 - every test here runs in float64
from tiny_modes import EOS, MASK, mode_of

from bwsft.data.packing import CanvasLayout, Example, pack
from bwsft.decoding.config import DecodeConfig
from bwsft.decoding.generate import generate
from bwsft.objectives.base import Draw

PROMPTS = [[7, 9, 11, 4, 30], [12], [5, 6, 7, 8, 40, 41, 42, 43], [9, 33, 20]]
RULES = {"quota": {"steps": 8}, "threshold": {"rule": "threshold", "threshold": 0.08}}
CUT = {"block_origin": "absolute", "attention": "block_causal"}  # the grid cuts the prompt too
MODELS = {
    "qwen2": ("qwen2", 0, {}), "shifted": ("qwen2", 1, {}), "dream": ("dream", 1, {}),
    "sdar": ("sdar", 0, CUT), "shifted grid": ("qwen2", 1, CUT), "bert": ("bert", 0, {}),
    "causal": ("qwen2", 1, {"clean_attention": "causal"}),
}  # fmt: skip


def model_of(name):
    kind, shift, changes = MODELS[name]
    net = tiny_hf.backbone(kind, shift)
    net.family = dataclasses.replace(net.family, **changes)
    return net, tiny_hf.plain(kind)


@torch.no_grad()
def assert_plain(slow, family, prompt, canvas, result, config):
    """Every token that was committed is the most probable one of a plain forward over the state
    before its step, and was as sure. In a last block that reaches beyond gen_length the trace
    tells of the state before the first step alone."""
    grid, cut = BlockGrid(config.block_size, family.block_origin), family.attention != "full"
    length = grid.filled(len(prompt), config.gen_length)
    numbers = clean_numbers(grid, len(prompt), length, cut)
    canvas = [*canvas, *[None] * (length - len(canvas))]
    ids = torch.tensor([*prompt, *(family.mask_id if token is None else token for token in canvas)])
    untold, before = length - len(prompt) - config.gen_length, -1
    for step, commits in itertools.groupby(result.trace, key=lambda commit: commit.step):
        commits = list(commits)
        if len(prompt) + commits[0].position < length - config.block_size:
            before = step
        elif untold and step > before + 1:
            break
        active = numbers[len(prompt) + commits[0].position]
        stop = int((numbers <= active).sum())
        assert (ids[:stop][numbers[:stop] < active] != family.mask_id).all()
        mask = block_causal_mask(numbers[:stop])[None, None]
        if family.clean_attention == "causal":
            clean = numbers[:stop] < active
            mask[..., clean, :] = mask[..., clean, :] & (torch.arange(stop) <= clean.nonzero())
        options = {"attention_mask": mask, "position_ids": torch.arange(stop)[None]}
        p = slow(input_ids=ids[None, :stop], **options).logits[0].softmax(-1)
        for _, position, token, confidence in commits:
            row = p[len(prompt) + position - family.logit_shift]
            assert confidence == pytest.approx(float(row[token]), abs=1e-11)
            row[family.mask_id] = -1
            assert token == int(row.argmax())
        for _, position, token, _ in commits:
            ids[len(prompt) + position] = token


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_one_forward_and_that_of_a_plain_model(name, rule):
    """Ragged prompts; rows end early, reach their last block, and enter blocks at other steps."""
    net, slow = model_of(name)
    config = DecodeConfig(16, 4, context="block_causal", batch_size=3, **RULES[rule])
    found = generate(net, PROMPTS, config, trace=True)
    for prompt, result in zip(PROMPTS, found, strict=True):
        assert result.passes == result.steps >= 4
        assert_plain(slow, net.family, prompt, [None] * 16, result, config)


@pytest.mark.parametrize("name", ["shifted", "shifted grid", "causal"])
def test_given_tokens_may_fill_a_block_before_the_next_one(name):
    """Two finished blocks are stored at once, and the last token of the second predicts."""
    net, slow = model_of(name)
    config = DecodeConfig(16, 4, context="block_causal", stop_at_end=False)
    canvas = [None, 3, None, None, 4, 5, 6, 7, None, 8, *[None] * 6]
    (found,) = generate(net, PROMPTS[3:], config, trace=True, canvases=[canvas])
    assert sorted(c.position for c in found.trace) == [0, 2, 3, 8, 10, 11, 12, 13, 14, 15]
    assert_plain(slow, net.family, PROMPTS[3], canvas, found, config)


@pytest.mark.parametrize("name", ["sdar", "shifted grid"])
def test_the_last_block_is_decoded_as_it_is_trained(name):
    """With two places of the answer in a block of four: the state is that of a training row whose
    fill is masked too, and the confidences are what the loss takes the logarithm of."""
    net, _ = model_of(name)
    mode = dataclasses.replace(mode_of("block_causal", net, block_origin="absolute"),
                               prompt_blocks=True, shift=net.family.logit_shift)  # fmt: skip
    prompt, given = [7, 9, 11, 4, 30, 2], [12, 8, 41, 6, 5, 33]
    config = DecodeConfig(8, 4, steps=2, context="block_causal", stop_at_end=False)
    (found,) = generate(net, [prompt], config, trace=True, canvases=[given])
    assert [commit.position for commit in found.trace] == [6, 7]
    tokens = [commit.token for commit in found.trace]
    expected = -sum(math.log(commit.confidence) for commit in found.trace)
    layout = CanvasLayout(mask_id=MASK, eos_id=EOS, block_size=4, gen_length=8,
                          block_origin="absolute")  # fmt: skip
    example = Example(np.array(prompt), np.array([*given, *tokens]), 0)
    batch = pack([example], layout)
    assert batch.response_lengths.tolist() == [10] and len(batch.ids) == 16
    ids = batch.ids.clone()
    ids[12:] = MASK
    draw = Draw(dataclasses.replace(batch, ids=ids), torch.tensor([12, 13]), torch.tensor(tokens),
                torch.ones(2), torch.tensor(2), torch.tensor(4))  # fmt: skip
    assert float(mode.score(draw)) == pytest.approx(expected, rel=1e-12)
    cut = dataclasses.replace(batch, ids=ids[:14], cu_seqlens=torch.tensor([0, 14]).int(),
                              position_ids=torch.arange(14), response_lengths=torch.tensor([8]),
                              max_length=14)  # fmt: skip
    shorter = float(mode.score(dataclasses.replace(draw, noisy=cut)))
    assert abs(shorter - expected) > 1e-4
