"""Tiny random BERT and ModernBERT: packed, recorded and active passes against plain Hugging Face
runs of one sequence at a time, in float64."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tiny_packed import (
    EOS,
    LENGTHS,
    MASK,
    SIZES,
    full,
    loss_rows,
    masked,
    packed,
    plain_decode,
    span,
    two_steps,
)
from transformers import BertConfig, BertForMaskedLM, ModernBertConfig, ModernBertForMaskedLM
from transformers.models.modernbert import modeling_modernbert

from bwsft.decoding.generate import generate
from bwsft.decoding.plan import DecodeConfig
from bwsft.models.backbone import Family
from bwsft.models.hf_encoder import new_encoder
from bwsft.models.kv_cache import Context
from bwsft.training.context_modes import Mode

FAMILY = Family(mask_id=MASK, eos_id=EOS, end_ids=(EOS,), vocab_size=50, max_positions=64)
SHAPE = dict(
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    vocab_size=50,
    max_position_embeddings=64,
    pad_token_id=0,
    initializer_range=0.15,
)
TIGHT = {"rtol": 1e-11, "atol": 1e-12}
WINDOW = 3  # positions that a local layer sees to either side: less than the sequences have


@pytest.fixture(autouse=True)
def float64_rope(monkeypatch):
    """transformers rotates in float32 even in a float64 model, which would hide all behind 1e-7
    and spoil the comparison of gradients."""

    def rotate(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        half = modeling_modernbert.rotate_half
        return tuple((x * cos + half(x) * sin).to(x.dtype) for x in (q, k))

    monkeypatch.setattr(modeling_modernbert, "apply_rotary_pos_emb", rotate)


def plain(name):
    """The model as transformers runs it; ModernBERT with layers full, local, local."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        if name == "bert":
            model = BertForMaskedLM(BertConfig(**SHAPE, num_hidden_layers=2))
        else:
            tokens = dict(bos_token_id=1, cls_token_id=1, eos_token_id=1, sep_token_id=1)
            model = ModernBertForMaskedLM(
                ModernBertConfig(**SHAPE, **tokens, num_hidden_layers=3, local_attention=2 * WINDOW)
            )
        for key, p in model.double().named_parameters():
            if p.ndim == 1:  # biases start at 0 and norms at 1
                torch.nn.init.normal_(p, mean=float("norm" in key.lower()), std=0.3)
    return model.eval()


def backbone(name):
    return new_encoder(plain(name), FAMILY)


@pytest.fixture(params=["bert", "modernbert"])
def name(request):
    return request.param


def logits(model, hidden):
    weight, bias = model.head()
    return F.linear(hidden, weight, bias)


def alone(model, batch):
    """Logits [T, V] of transformers' own forward, one sequence at a time."""
    sequences = batch.ids.tensor_split(batch.cu_seqlens[1:-1].long())
    return torch.cat([model(input_ids=ids[None]).logits[0] for ids in sequences])


def gradients(model):
    """By name; transformers ties BERT's spare bias to the decoder's."""
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(a, b, **tolerance):
    assert a.keys() == b.keys() and a
    for key in a:
        torch.testing.assert_close(a[key], b[key], msg=key, **tolerance)


@torch.no_grad()
def test_packed_rows_equal_the_plain_model_on_each_sequence(name):
    model, batch = backbone(name), packed()
    expected = alone(plain(name), batch)
    torch.testing.assert_close(logits(model, full(model, batch)), expected, **TIGHT)
    torch.testing.assert_close(
        logits(model, full(model, packed((13, 13)))), alone(plain(name), packed((13, 13))), **TIGHT
    )


@torch.no_grad()
def test_wanted_rows_alone_meet_the_transform(name):
    model, batch = backbone(name), packed()
    wanted = torch.tensor([[0, 12], [13, 20], [38, 22]])
    calls = []
    transform = model.model.head if name == "modernbert" else model.model.cls.predictions.transform
    transform.register_forward_hook(lambda module, args, out: calls.append(len(out)))
    some = full(model, batch, wanted=wanted)
    torch.testing.assert_close(some, full(model, batch)[wanted.flatten()], **TIGHT)
    model(batch, *loss_rows(batch, span()))
    assert calls == [6, 39, sum(SIZES)]


@torch.no_grad()
def test_a_mask_is_met_by_the_local_windows_too(name):
    """Against a plain run under the mask that says both, per kind of layer; the noisy copy of a
    block stands at its block's positions, not where it lies in the row."""
    model, reference = backbone(name), plain(name)
    length, block = 13, torch.arange(13) // 4
    ids = packed((length + 4,)).ids
    positions = torch.cat([torch.arange(length), torch.arange(4, 8)])
    number = torch.cat([block, torch.tensor([-1] * 4)])
    clean = (number[:, None] >= number) & (number >= 0) & (number[:, None] >= 0)
    noisy = (number[:, None] < 0) & ((number < 0) | (number == 0))
    mask = (clean | noisy)[None, None]
    near = (positions[:, None] - positions).abs() <= WINDOW
    kinds = {"full_attention": mask, "sliding_attention": mask & near}
    expected = reference(
        input_ids=ids[None],
        position_ids=positions[None],
        attention_mask=mask if name == "bert" else kinds,
    ).logits[0]
    batch = SimpleNamespace(
        ids=ids, position_ids=positions, cu_seqlens=torch.tensor([0, length + 4]), mask=mask
    )
    torch.testing.assert_close(logits(model, full(model, batch, mask=mask)), expected, **TIGHT)
    rows, target, weight = torch.tensor([14, 16]), torch.tensor([3, 9]), torch.tensor([0.5, 2.0])
    loss = F.cross_entropy(expected[rows], target, reduction="none") @ weight.double()
    assert model(batch, rows, target, weight).item() == pytest.approx(loss.item(), rel=1e-6)


def test_exact_loss_and_gradients_are_plain_ones_with_and_without_a_span(name):
    batch, where = packed(), span()
    rows, target, weight = loss_rows(batch, where)
    slow = plain(name)
    expected = F.cross_entropy(alone(slow, batch)[rows], target, reduction="none")
    expected = (expected * weight).sum()
    expected.backward()
    for context, checkpointing in ((None, False), (Context(where), False), (None, True)):
        model = backbone(name).train()
        model.set_gradient_checkpointing(checkpointing)
        loss = model(batch, rows, target, weight, context)
        loss.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)  # the loss is fp32
        assert_same(gradients(model.model), gradients(slow), rtol=1e-6, atol=1e-8)


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


@pytest.mark.parametrize("lengths", [LENGTHS, (13, 13, 13)])
@torch.no_grad()
def test_active_rows_of_the_state_that_was_cached_equal_the_whole_forward(name, lengths):
    even = len(set(lengths)) == 1
    where = span(sizes=(4, 4, 4)) if even else span()
    model, batch = backbone(name), masked(packed(lengths), where)
    flat = where.flat(batch.cu_seqlens)
    cache = model.new_cache(3, max(lengths))
    first = model.fill(batch, cache, wanted=flat)
    active = model.active_hidden_states(batch.ids[flat], where, cache)
    some = model.active_hidden_states(
        batch.ids[flat], where, cache, wanted=torch.tensor([[2], [4], [11]])
    )
    assert (cache.even is not None) == even
    expected = alone(plain(name), batch)[flat.flatten()]
    for got in (first, active):
        torch.testing.assert_close(logits(model, got), expected, **TIGHT)
    torch.testing.assert_close(logits(model, some), expected[[2, 4, 11]], **TIGHT)


@torch.no_grad()
def test_what_is_hidden_or_too_far_does_not_reach_active_rows(name):
    """Slots behind `visible`, and for local layers those beyond the window."""
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
    rows, target, weight = loss_rows(clean, where)
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


MODES = [
    Mode("exact", even=True),
    Mode("exact", context_grad=False),
    Mode("cached", draws=2, even=True),
    Mode("block_causal"),
]


@pytest.mark.parametrize("mode", MODES, ids=lambda m: f"{m.name}-{m.context_grad}")
def test_modes_train(name, mode):
    """Finite gradients, and one step along them lowers the loss."""
    before, after = two_steps(backbone(name), mode, 1e-3)
    assert after < before


def test_generate_equals_a_plain_loop(name):
    config = DecodeConfig(gen_length=12, block_size=4, banned_ids=(EOS,))
    prompts = [[5, 9, 3], [7, 2, 30, 41, 8, 11], [4, 4, 17, 20]]
    model = plain(name)

    def logits(x, entered, start, stop):
        return model(input_ids=x[None]).logits[0, start:stop]

    for prompt, found in zip(prompts, generate(backbone(name), prompts, config), strict=True):
        assert found.tokens == plain_decode(logits, prompt, config)


@pytest.mark.parametrize("context", ["cached", "prefix", "block_causal"])
def test_generate_in_the_other_modes_does_not_depend_on_the_batch(name, context):
    model = backbone(name)
    config = DecodeConfig(gen_length=8, block_size=4, context=context)
    prompts = [[5, 9, 3], [7, 2, 30, 41, 8, 11]]
    together = [g.tokens for g in generate(model, prompts, config)]
    assert together == [generate(model, [p], config)[0].tokens for p in prompts]


def test_bfloat16_autocast_reaches_the_cache(name):
    model, where = backbone(name).float(), span()
    batch = masked(packed(), where)
    with torch.autocast("cpu", torch.bfloat16):
        context = Context(where, model.new_cache(3, max(LENGTHS)))
        model(batch, None, None, None, context)
        loss = model(batch, *loss_rows(batch, where), context)
    loss.backward()
    exact = backbone(name)(batch, *loss_rows(batch, where)).item()
    assert context.cache.keys[0].dtype == torch.bfloat16
    assert loss.item() == pytest.approx(exact, rel=2**-6)  # bf16 keeps 8 bits


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
