"""Models that predict the next token, trained block-causally: float64 losses and gradients are
those of plain forwards of transformers, a block of a copy at a time, whole logits and all."""

import dataclasses

import pytest
import tiny_hf
import torch
import torch.nn.functional as F
from block_masks import block_causal_mask, clean_numbers
from tiny_hf import float64  # noqa: F401 - every test here runs in float64
from tiny_modes import PLACE, batch, mode_of

CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def mask_of(numbers, active, causal):
    """What a plain forward over clean blocks and, from `active` on, a noisy one may see."""
    mask = block_causal_mask(numbers)[None, None]
    if causal:
        mask[..., :active, :] = mask[..., :active, :].tril()
    return mask


def plain_loss(model, mode, some):
    total, seen = 0.0, []
    for draw in mode.objective.draws(some, PLACE, None):
        weights = torch.zeros(len(some.ids)).index_add_(0, draw.rows, draw.weight / draw.of)
        shapes = zip(some.prompt_lengths.tolist(), some.response_lengths.tolist(), strict=True)
        active = mode.objective.active_blocks
        offsets = draw.groups.offset.tolist() if active > 1 else [0] * some.num_sequences
        edges = some.cu_seqlens[:-1].tolist()
        for edge, offset, (prompt, response) in zip(edges, offsets, shapes, strict=True):
            numbers = clean_numbers(mode.grid, prompt, response, mode.prompt_blocks)
            blocks = mode.grid.blocks(prompt, response)
            for b, (start, stop) in enumerate(blocks):
                clean = some.ids[edge : edge + stop]
                noisy = blocks[max(b - (b + offset) % active, 0)][0]  # from here on
                row = torch.cat([clean[:noisy], draw.noisy.ids[edge + noisy : edge + stop]])
                mask = mask_of(numbers[:stop], noisy, mode.causal)
                logits = model(input_ids=row[None], attention_mask=mask).logits[0]
                each = F.cross_entropy(logits[start - 1 : -1], clean[start:], reduction="none")
                weight = weights[edge + start : edge + stop]
                total = total + (each * weight).sum()
                seen.append(bool(weight[0]))
    assert 0 < sum(seen) < len(seen)  # first tokens of blocks, masked and not
    return total


COPIES = {"1": {}, "pairs": {"draws": 4, "pairs": True}, "groups": {"draws": 2, "active": 2}}


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("grid", ["response", "absolute", "prompt_blocks"])
@pytest.mark.parametrize("name", ["qwen2", "dream"])
def test_a_block_is_predicted_from_the_token_before_it(name, grid, copies):
    """In ragged batches with short blocks; with the prompt as a block and cut on the grid."""
    some = batch(((5, 9), (3, 12), (6, 2), (8, 7)), canvas="response")
    net, slow = tiny_hf.backbone(name, shift=1), tiny_hf.plain(name)
    origin = "response" if grid == "response" else "absolute"
    mode = mode_of("block_causal", net, block_origin=origin, mask_id=net.family.mask_id,
                   **COPIES[copies])
    mode = dataclasses.replace(mode, shift=1, prompt_blocks=grid == "prompt_blocks")
    (loss,) = mode.losses(some, PLACE)
    expected = plain_loss(slow, mode, some)
    torch.testing.assert_close(loss.total.double(), expected, **CLOSE)
    loss.total.backward()
    expected.backward()
    tiny_hf.assert_same_gradients(net.model, slow, **CLOSE)


def plain_ar_loss(model, some):
    """Mean cross-entropy of each response under causal attention, as transformers has it."""
    total = 0.0
    shapes = zip(some.prompt_lengths.tolist(), some.response_lengths.tolist(), strict=True)
    for edge, (prompt, response) in zip(some.cu_seqlens.tolist(), shapes, strict=False):
        row = some.ids[edge : edge + prompt + response]
        logits = model(input_ids=row[None]).logits[0]
        each = F.cross_entropy(logits[prompt - 1 : -1], row[prompt:], reduction="sum")
        total = total + each * float(1 / torch.tensor(response).float())  # weights are float32
    return total


@pytest.mark.parametrize("weight", [0.0, 0.25])
def test_causal_clean_rows_and_their_own_loss(weight):
    some = batch(((5, 9), (3, 12), (6, 2), (8, 7)), canvas="response")
    net, slow = tiny_hf.backbone("qwen2", shift=1), tiny_hf.plain("qwen2")
    mode = mode_of("block_causal", net, mask_id=net.family.mask_id, draws=2, pairs=True)
    mode = dataclasses.replace(mode, shift=1, causal=True, ar_weight=weight)
    (loss,) = mode.losses(some, PLACE)
    expected = plain_loss(slow, mode, some) + weight * plain_ar_loss(slow, some)
    torch.testing.assert_close(loss.total.double(), expected, **CLOSE)
    loss.total.backward()
    expected.backward()
    tiny_hf.assert_same_gradients(net.model, slow, **CLOSE)
    clean = int(some.response_lengths.sum()) if weight else 0
    (plain,) = dataclasses.replace(mode, ar_weight=0.0).losses(some, PLACE)
    assert int(loss.rows) == int(plain.rows) + clean
