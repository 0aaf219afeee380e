"""Three updates of a tiny LLaDA through the Triton kernels, beside the same through torch."""

import sys

import pytest
import tiny_llada
import torch
from bwsft_kernels import MaskSpec, block_mask

SPEC = MaskSpec(block_size=8, mask_id=149, seed=11)


class Batch:
    """Four packed sequences: prompts of 5 to 8 tokens, responses of 9 to 24."""

    def __init__(self):
        self.prompt_lengths = torch.tensor([5, 6, 7, 8])
        self.response_lengths = torch.tensor([24, 9, 16, 17])
        lengths = self.prompt_lengths + self.response_lengths
        self.cu_seqlens = torch.tensor([0, *lengths.cumsum(0)], dtype=torch.int32)
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(2, 149, (int(lengths.sum()),), generator=generator)
        self.position_ids = torch.cat([torch.arange(n) for n in lengths])
        self.max_length = int(lengths.max())


def train(impl, train_head, monkeypatch):
    """(losses, parameters, masks, Triton files used) of three updates with kernels of `impl`."""
    used, choose = set(), sys.modules["bwsft_kernels._dispatch"].triton_implementation

    def chosen(_, tensor, name):
        module = choose(impl, tensor, name)
        used.update([name] if module else [])
        return module

    for name in ("linear_cross_entropy_sweep", "select_rows", "block_mask"):
        monkeypatch.setattr(sys.modules[f"bwsft_kernels._{name}"], "triton_implementation", chosen)
    fields = {"n_kv_heads": 2, "vocab_size": 150, "mask_token_id": 149}
    backbone, batch = tiny_llada.backbone(torch.float32, **fields), Batch()
    weight, _ = backbone.head()
    weight.requires_grad_(train_head)
    trained = [p for p in backbone.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    tokens, losses, masks = batch.ids, [], []
    for draw in range(3):
        masked = block_mask(
            tokens, batch.prompt_lengths, batch.response_lengths, SPEC,
            cu_seqlens=batch.cu_seqlens, draw=draw,
        )
        batch.ids = masked.noisy_ids
        count = int(masked.num_rows)
        rows = (t[:count] for t in (masked.rows, masked.row_target, masked.row_weight))
        loss = backbone(batch, *rows) / 4
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        masks.append(masked.noisy_ids)
    return torch.stack(losses), [p.detach() for p in trained], masks, used


@pytest.mark.parametrize("train_head", [False, True])
def test_three_updates(train_head, monkeypatch):
    losses, weights, masks, used = train("triton", train_head, monkeypatch)
    assert used == {f"_{name}_triton" for name in (
        "block_mask", "select_rows", "linear_cross_entropy_fwd", "linear_cross_entropy_bwd")}
    expected, expected_weights, expected_masks, used = train("torch", train_head, monkeypatch)
    assert not used
    assert all(torch.equal(one, other) for one, other in zip(masks, expected_masks, strict=True))
    assert expected[0] != expected[1] != expected[2]
    # The same sums in another order: a loss is some 10 roundings off, and AdamW's first steps move
    # each weight by about lr times a quotient of gradients that lost the same few digits.
    torch.testing.assert_close(losses, expected, rtol=2e-6, atol=0)
    for one, other in zip(weights, expected_weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
