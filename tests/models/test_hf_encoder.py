"""Masked-LM encoders of transformers: the head's transform, local windows, frozen keys, decoding.
What they share with decoders: test_hf_models.py."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from bwsft_kernels import range_plan
from range_cases import mask_of
from tiny_hf import ENCODERS, FAMILY, TIGHT, WINDOW, backbone, logits, plain
from tiny_hf import float64 as float64  # a fixture
from tiny_packed import (
    EOS,
    LENGTHS,
    SIZES,
    full,
    masked,
    packed,
    plain_decode,
    span,
    supervised_rows,
)

from bwsft.decoding.config import DecodeConfig
from bwsft.decoding.generate import generate
from bwsft.models.hf_encoder import new_encoder
from bwsft.models.kv_cache import Context


@pytest.fixture(params=ENCODERS)
def name(request):
    return request.param


@torch.no_grad()
def test_the_transform_runs_for_the_wanted_tokens_alone(name):
    model, batch = backbone(name), packed()
    wanted = torch.tensor([[0, 12], [13, 20], [38, 22]])
    calls = []
    transform = model.model.head if name == "modernbert" else model.model.cls.predictions.transform
    transform.register_forward_hook(lambda module, args, out: calls.append(len(out)))
    some = full(model, batch, wanted=wanted)
    torch.testing.assert_close(some, full(model, batch)[wanted.flatten()], **TIGHT)
    model(batch, *supervised_rows(batch, span()))
    assert calls == [6, 39, sum(SIZES)]


@torch.no_grad()
def test_a_plan_applies_to_local_layers_too(name):
    """Against a plain run under the mask that says both, per kind of layer; the noisy copy of a
    block stands at its block's positions, not where it is in the sequence."""
    model, reference = backbone(name), plain(name)
    plan, rows = range_plan(torch.tensor([4]), torch.tensor([9]), 4)
    ids, positions = packed((22,)).ids, rows.position
    mask = mask_of(plan.query_ranges, 22)[None, None]
    near = (positions[:, None] - positions).abs() <= WINDOW
    kinds = {"full_attention": mask, "sliding_attention": mask & near}
    expected = reference(
        input_ids=ids[None],
        position_ids=positions[None],
        attention_mask=mask if name == "bert" else kinds,
    ).logits[0]
    batch = SimpleNamespace(
        ids=ids, position_ids=positions, cu_seqlens=torch.tensor([0, 22]), plan=plan
    )
    torch.testing.assert_close(logits(model, full(model, batch, plan=plan)), expected, **TIGHT)
    rows, target, weight = torch.tensor([14, 16]), torch.tensor([3, 9]), torch.tensor([0.5, 2.0])
    loss = F.cross_entropy(expected[rows], target, reduction="none") @ weight.double()
    assert model(batch, rows, target, weight).item() == pytest.approx(loss.item(), rel=1e-6)


def test_checkpointing_keeps_fewer_activations(name):
    batch, kept = packed(), []
    for enabled in (False, True):
        model = backbone(name).train()
        model.set_gradient_checkpointing(enabled)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, saved=saved: saved.append(x.numel()) or x, lambda x: x
        ):
            full(model, batch)
        kept.append(sum(saved))
    assert kept[1] < kept[0] / 2


@torch.no_grad()
def test_what_is_hidden_or_too_far_does_not_reach_active_rows(name):
    """Slots after `visible`, and for local layers those beyond the window."""
    model, batch, where = backbone(name), packed((17, 17)), span((9, 9), (4, 4))
    flat = where.flat(batch.cu_seqlens)
    cache = model.new_cache(2, 20)
    model.fill(batch, cache)
    cache.show(torch.tensor([13, 13]), 13)
    got = model.active_hidden_states(batch.ids[flat], where, cache)
    for buffer in cache.keys + cache.values:
        buffer[:, 13:] = 1e3
    if name == "modernbert":
        for buffers in (cache.keys, cache.values):
            for layer in (1, 2):
                buffers[layer][:, : 9 - WINDOW] = 1e3
    again = model.active_hidden_states(batch.ids[flat], where, cache)
    torch.testing.assert_close(again, got, rtol=0, atol=0)
    for buffer in cache.values:
        buffer[:, 9 - WINDOW] += 1.0
    assert (model.active_hidden_states(batch.ids[flat], where, cache) - got).abs().max() > 1e-3


@pytest.mark.parametrize("checkpointing", [False, True])
def test_cached_gradients_are_those_of_frozen_keys(name, checkpointing):
    """Against finite differences along a random direction, the context's keys and values held at
    what the context pass found; also when other draws come before backward."""
    where, clean = span(), packed()
    noisy = masked(clean, span(sizes=(2, 1, 3)))
    rows, target, weight = supervised_rows(clean, where)
    model = backbone(name).train()
    model.set_gradient_checkpointing(checkpointing)
    context = Context(where, model.new_cache(3, max(LENGTHS)))
    model(masked(clean, where), None, None, None, context)
    loss = model(noisy, rows, target, weight, context)
    model(clean, rows, target, weight, context)
    loss.backward()
    index = where.index_of(rows, noisy.cu_seqlens)

    @torch.no_grad()
    def value():  # in float64, which the loss is not
        ids = noisy.ids[where.flat(noisy.cu_seqlens)]
        out = logits(model, model.active_hidden_states(ids, where, context.cache))[index]
        return (F.cross_entropy(out, target, reduction="none") * weight).sum().item()

    assert loss.item() == pytest.approx(value(), rel=1e-6)
    generator = torch.Generator().manual_seed(1)
    moves = [
        (p, torch.randn(p.shape, generator=generator, dtype=p.dtype)) for p in model.parameters()
    ]
    slope = sum((p.grad * move).sum() for p, move in moves if p.grad is not None).item()
    found = []
    for step in (1e-5, -2e-5):
        with torch.no_grad():
            for p, move in moves:
                p += step * move
        found.append(value())
    assert slope == pytest.approx((found[0] - found[1]) / 2e-5, rel=1e-5)


def test_generate_equals_a_plain_loop(name):
    config = DecodeConfig(gen_length=12, block_size=4, banned_ids=(EOS,))
    prompts = [[5, 9, 3], [7, 2, 30, 41, 8, 11], [4, 4, 17, 20]]
    model = plain(name)

    def logits(x, entered, start, stop):
        return model(input_ids=x[None]).logits[0, start:stop]

    for prompt, found in zip(prompts, generate(backbone(name), prompts, config), strict=True):
        assert found.tokens == plain_decode(logits, prompt, config)


def test_own_dropouts_are_off_and_the_saved_config_is_as_it_was(tmp_path):
    model = backbone("bert").train()  # its config says 0.1
    batch = packed()
    torch.testing.assert_close(full(model, batch), full(model.eval(), batch), rtol=0, atol=0)
    model.model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["hidden_dropout_prob"] == 0.1
    assert not any("bwsft" in str(value) for value in saved.values())


def test_an_adapter_keeps_its_dropout(name):
    from peft import LoraConfig, get_peft_model

    targets = ["query"] if name == "bert" else ["Wqkv"]
    lora = LoraConfig(target_modules=targets, lora_dropout=0.5)
    wrapped = get_peft_model(plain(name), lora)
    new_encoder(wrapped.get_base_model(), FAMILY)
    found = [m.p for n, m in wrapped.named_modules() if "lora_dropout.default" in n]
    assert found and set(found) == {0.5}


def test_what_is_sharded_on_its_own_are_layers(name):
    """The embedding is tied to the head, which FSDP must gather with it."""
    model = backbone(name)
    names = model.base_model._no_split_modules
    found = [m for m in model.modules() if type(m).__name__ in names]
    assert len(found) == model.decoder.config.num_hidden_layers
    assert not any(m is model.decoder.embeddings for m in found)


def test_what_it_cannot_serve_is_refused():
    def refused(match, model):
        with pytest.raises(ValueError, match=match):
            new_encoder(model, FAMILY)

    refused("BertModel is no masked LM", plain("bert").bert)
    for field, value in (("is_decoder", True), ("chunk_size_feed_forward", 2)):
        model = plain("bert")
        setattr(model.config, field, value)
        refused(field, model)
    model = plain("modernbert")
    model.config.layer_types = ["full_attention", "chunked_attention", "full_attention"]
    refused("chunked_attention", model)
    with pytest.raises(ValueError, match="a sequence needs 65 positions"):
        full(backbone("bert"), packed((65,)))
    with pytest.raises(ValueError, match="call its Backbone"):
        backbone("bert").model(input_ids=torch.tensor([[3, 4]]))
