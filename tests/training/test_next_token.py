"""Models that predict the next token, trained block-causally: float64 losses and gradients are
those of plain forwards of transformers, a block of a copy at a time, whole logits and all."""

import dataclasses

import pytest
import tiny_hf
import torch
import torch.nn.functional as F
from tiny_hf import float64  # noqa: F401 - every test here runs in float64
from tiny_modes import PLACE, batch, mode_of

from bwsft.models.block_masks import block_causal_mask
from bwsft.training.block_causal import clean_numbers

CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def plain_loss(model, mode, some):
    total, seen = 0.0, []
    for draw in mode.objective.draws(some, PLACE, None):
        weights = torch.zeros(len(some.ids)).index_add_(0, draw.rows, draw.weight / draw.of)
        shapes = zip(some.prompt_lengths.tolist(), some.response_lengths.tolist(), strict=True)
        for edge, (prompt, response) in zip(some.cu_seqlens.tolist(), shapes, strict=False):
            numbers = clean_numbers(mode.grid, prompt, response, mode.prompt_blocks)
            for start, stop in mode.grid.blocks(prompt, response):
                clean = some.ids[edge : edge + stop]
                row = torch.cat([clean[:start], draw.noisy.ids[edge + start : edge + stop]])
                mask = block_causal_mask(numbers[None, :stop])
                logits = model(input_ids=row[None], attention_mask=mask).logits[0]
                each = F.cross_entropy(logits[start - 1 : -1], clean[start:], reduction="none")
                weight = weights[edge + start : edge + stop]
                total = total + (each * weight).sum()
                seen.append(bool(weight[0]))
    assert 0 < sum(seen) < len(seen)  # first tokens of blocks, masked and not
    return total


@pytest.mark.parametrize("copies", [{"draws": 1}, {"draws": 4, "pairs": True}], ids=["1", "pairs"])
@pytest.mark.parametrize("grid", ["response", "absolute", "prompt_blocks"])
@pytest.mark.parametrize("name", ["qwen2", "dream"])
def test_a_block_is_predicted_from_the_token_before_it(name, grid, copies):
    """In ragged batches with short blocks; with the prompt as a block and cut on the grid."""
    some = batch(((5, 9), (3, 12), (6, 2), (8, 7)), canvas="response")
    net, slow = tiny_hf.backbone(name, shift=1), tiny_hf.plain(name)
    origin = "response" if grid == "response" else "absolute"
    mode = mode_of("block_causal", net, block_origin=origin, mask_id=net.family.mask_id, **copies)
    mode = dataclasses.replace(mode, shift=1, prompt_blocks=grid == "prompt_blocks")
    (loss,) = mode.losses(some, PLACE)
    expected = plain_loss(slow, mode, some)
    torch.testing.assert_close(loss.total.double(), expected, **CLOSE)
    loss.total.backward()
    expected.backward()
    tiny_hf.assert_same_gradients(net.model, slow, **CLOSE)
