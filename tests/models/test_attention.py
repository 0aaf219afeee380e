"""One model in several layouts: alone, packed, padded, masked, and on a varlen kernel."""

import inspect
import math
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from bwsft_kernels import torch_ops
from tiny_llada import LENGTHS, SMALL, backbone, packed

from bwsft.models import attention
from bwsft.models.llada_layers import LladaRMSNorm


def layouts(b, ids, positions, boundaries):
    """Hidden states [T, D] of the same sequences: one by one, packed, and right-padded."""
    spans = list(zip(boundaries[:-1].tolist(), boundaries[1:].tolist(), strict=True))
    alone = torch.cat(
        [b.hidden_states(ids[i:j], positions[i:j], torch.tensor([0, j - i])) for i, j in spans]
    )
    grid = torch.zeros(len(spans), max(j - i for i, j in spans), dtype=torch.long)
    keep = torch.zeros_like(grid)
    for row, (i, j) in enumerate(spans):
        grid[row, : j - i] = ids[i:j]
        keep[row, : j - i] = 1
    logits = b.model(grid, attention_mask=keep).logits[keep.bool()]
    return alone, b.hidden_states(ids, positions, boundaries), logits


def test_a_sequence_is_the_same_alone_packed_and_padded():
    b = backbone(n_kv_heads=2)
    alone, together, logits = layouts(b, *packed())
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logits, alone @ b.head()[0].T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sequence_is_the_same_in_low_precision(dtype):
    """Packed may err from float64 by no more than twice what one sequence alone errs."""
    exact, rough = backbone(), backbone(dtype)
    exact.model.load_state_dict(rough.model.state_dict())
    batch = packed((5, 9, 17, 7, 33))
    truth = exact.hidden_states(*batch)
    alone, together, _ = layouts(rough, *batch)
    assert together.dtype == dtype
    floor = (alone.double() - truth).abs().max()
    assert (together.double() - truth).abs().max() <= 2 * floor
    assert floor <= 64 * torch.finfo(dtype).eps * truth.abs().max()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_invisible(side):
    b = backbone()
    ids = torch.arange(2, 10)[None]
    bare = b.model(ids).logits
    outs = []
    for pad in (1, 7):
        width = (3, 0) if side == "left" else (0, 3)
        padded = F.pad(ids, width, value=pad)
        mask = F.pad(torch.ones_like(ids), width)
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        logits = b.model(padded, attention_mask=mask, position_ids=positions).logits
        outs.append(logits[mask.bool()])
    assert torch.equal(*outs)
    torch.testing.assert_close(outs[0], bare[0], rtol=1e-12, atol=1e-12)


def test_four_dimensional_mask_separates_sequences():
    b = backbone(n_kv_heads=2)
    ids, positions, boundaries = packed((4, 6))
    owner = torch.tensor([0] * 4 + [1] * 6)
    mask = (owner[:, None] == owner)[None, None]
    joint = b.model(ids[None], attention_mask=mask, position_ids=positions[None]).logits[0]
    apart = b.hidden_states(ids, positions, boundaries) @ b.head()[0].T
    torch.testing.assert_close(joint, apart, rtol=1e-12, atol=1e-12)


def test_inputs_embeds_and_masks_are_checked():
    model = backbone().model
    ids = torch.arange(6)[None]
    embedded = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
    assert torch.equal(embedded, model(ids).logits)
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="attention_mask"):
        model(ids, attention_mask=torch.ones(1, 1, 6, 6))
    with pytest.raises(ValueError, match="attention_mask"):
        model(ids, attention_mask=torch.ones(1, 5))
    model(ids, use_cache=False, output_attentions=None, return_dict=True)
    for option in ({"use_cache": True}, {"labels": ids}, {"return_dict": False}):
        with pytest.raises(ValueError, match=next(iter(option))):
            model(ids, **option)


def test_norm_and_rotation_round_where_the_official_code_does():
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16() * 3
    norm = LladaRMSNorm(32, 1e-5).bfloat16()
    torch.nn.init.uniform_(norm.weight)
    wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(norm(x), norm.weight * wide.bfloat16())
    # At position 4000 an angle in bfloat16 is off by up to 8 rad, in float32 by 1.2e-4, and again
    # as much for each rounding of the frequency. The result is rounded to bfloat16 once (2^-8).
    positions = torch.arange(4000, 4064)
    heads = x.view(64, 2, 16)
    rough = torch_ops.rotated(heads, *attention.rope_tables(positions, 16, 5e5, torch.bfloat16))
    exact = torch_ops.rotated(
        heads.double(), *attention.rope_tables(positions, 16, 5e5, torch.float64)
    )
    bound = 2**-8 * exact.abs() + 5e-4 * heads.double().norm(dim=-1, keepdim=True)
    assert rough.dtype == torch.bfloat16
    assert ((rough.double() - exact).abs() <= bound).all()


def loop_kernel(q, k, v, cu_q, cu_k, max_q, max_k):
    """A varlen function by definition; checks that the longest length is not understated."""
    assert torch.equal(cu_q, cu_k) and cu_q.dtype == torch.int32
    assert max_q == max_k >= int(cu_q.diff().max())
    out = []
    for a, b in zip(cu_q[:-1], cu_q[1:], strict=True):
        scores = torch.einsum("qhe,khe->hqk", q[a:b], k[a:b]) / math.sqrt(q.shape[-1])
        out.append(torch.einsum("hqk,khe->qhe", scores.softmax(-1), v[a:b]))
    return torch.cat(out)


@pytest.mark.parametrize("max_length", [None, 9, 64])
def test_varlen_kernels_get_packed_rows(monkeypatch, max_length):
    b = backbone(n_kv_heads=2)
    expected = b.hidden_states(*packed())
    told = []

    def kernel(*args):
        told.append(args[-1])
        return loop_kernel(*args)

    monkeypatch.setattr("bwsft.models.backbone.varlen_kernel", lambda *a: kernel)
    got = b.hidden_states(*packed(), max_length=max_length)
    assert told == [max_length or max(LENGTHS)] * SMALL["n_layers"]
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_choice_of_the_varlen_kernel(monkeypatch):
    from torch.nn.attention.varlen import varlen_attn

    cuda, cpu, bf16 = torch.device("cuda"), torch.device("cpu"), torch.bfloat16
    assert attention.varlen_kernel(cuda, bf16, 128) is varlen_attn
    assert attention.varlen_kernel(cuda, torch.float16, 64, "sdpa") is varlen_attn
    unfit = [(cpu, bf16, 128), (cuda, torch.float32, 128), (cuda, bf16, 12), (cuda, bf16, 264)]
    for device, dtype, size in unfit:
        assert attention.varlen_kernel(device, dtype, size) is None
    package = types.SimpleNamespace(flash_attn_varlen_func=loop_kernel)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    assert attention.varlen_kernel(cuda, bf16, 128, "flash_attention_2") is loop_kernel
    # Called by position: the order has to be the one that attend() relies on.
    names = list(inspect.signature(varlen_attn).parameters)[:7]
    assert names == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
