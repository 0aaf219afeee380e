"""A training step of the native LLaDA in one graph of torch.compile: masks, layers and loss."""

import pytest
import torch
from bwsft_kernels import MaskSpec, block_mask, linear_cross_entropy

from bwsft.models.attention import padded_layout
from bwsft.models.llada import LladaForMaskedDiffusion
from bwsft.models.llada_config import LladaConfig

S, L, V = 3, 24, 97


def llada():
    config = LladaConfig(
        d_model=32, n_layers=2, n_heads=4, mlp_hidden_size=48, vocab_size=V, mask_token_id=V - 1,
        eos_token_id=0, pad_token_id=0, max_sequence_length=64, weight_tying=False)
    torch.manual_seed(0)
    return LladaForMaskedDiffusion(config)


def step(model, ids, prompt, response):
    """The loss of Blockwise SFT, whose rows are counted on the device."""
    masked = block_mask(ids, prompt, response, MaskSpec(block_size=8, mask_id=V - 1, seed=3))
    embedded = model.model.transformer["wte"](masked.noisy_ids.flatten())
    positions = torch.arange(L).expand(S, L).flatten()
    hidden = model.model(embedded, positions, padded_layout(S, L, None))
    return linear_cross_entropy(
        hidden[masked.rows], model.get_output_embeddings().weight, masked.row_target,
        row_weight=masked.row_weight, reduction="sum")


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_graph_gives_the_same_loss_and_gradients(backend):
    model, results = llada(), []
    ids = torch.randint(1, V - 1, (S, L), generator=torch.manual_seed(1))
    lengths = torch.tensor([4, 6, 8]), torch.tensor([16, 9, 16])
    for run in (step, torch.compile(step, fullgraph=True, backend=backend)):
        loss = run(model, ids, *lengths)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        results.append([loss.detach(), *grads])
    assert results[0][0] > 1  # about ln V
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
