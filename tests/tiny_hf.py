"""Tiny random models of transformers as backbones, and their plain forwards, all in float64."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from tiny_packed import EOS, MASK
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.modernbert import modeling_modernbert
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from bwsft.models.backbone import Family
from bwsft.models.dream_sdar import DreamConfig, DreamModel, SdarConfig, SDARForCausalLM
from bwsft.models.hf_decoder import new_decoder
from bwsft.models.hf_encoder import new_encoder

FAMILY = Family(mask_id=MASK, eos_id=EOS, end_ids=(EOS,), vocab_size=50, max_positions=64)
SHAPE = dict(
    hidden_size=32, intermediate_size=48, num_attention_heads=4, vocab_size=50,
    max_position_embeddings=64, initializer_range=0.15,
)  # fmt: skip
DECODER = dict(SHAPE, num_hidden_layers=2, num_key_value_heads=2, tie_word_embeddings=False)
ENCODERS = ["bert", "modernbert"]
TIGHT = {"rtol": 1e-11, "atol": 1e-12}
WINDOW = 3  # positions that a local layer sees to either side: less than the sequences have


@pytest.fixture(autouse=True)
def float64(monkeypatch):
    """transformers normalizes and rotates in float32 even in a float64 model, which would hide all
    below 1e-7 and spoil the comparison of gradients."""

    def norm(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, True) + self.variance_epsilon)

    def rotate(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        half = modeling_modernbert.rotate_half
        return tuple((x * cos + half(x) * sin).to(x.dtype) for x in (q, k))

    for kind in (Qwen2RMSNorm, Qwen3RMSNorm, LlamaRMSNorm):
        monkeypatch.setattr(kind, "forward", norm)
    monkeypatch.setattr(modeling_modernbert, "apply_rotary_pos_emb", rotate)


def plain(name):
    """The model as transformers runs it; ModernBERT with layers full, local, local."""
    tokens = dict(pad_token_id=0, bos_token_id=1, cls_token_id=1, eos_token_id=1, sep_token_id=1)
    local = dict(tokens, num_hidden_layers=3, local_attention=2 * WINDOW)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        if name == "bert":
            model = BertForMaskedLM(BertConfig(**SHAPE, pad_token_id=0, num_hidden_layers=2))
        elif name == "modernbert":
            model = ModernBertForMaskedLM(ModernBertConfig(**SHAPE, **local))
        elif name == "llama":
            model = LlamaForCausalLM(LlamaConfig(**DECODER))
        elif name == "dream":
            model = DreamModel(DreamConfig(**DECODER))
        elif name == "sdar":
            model = SDARForCausalLM(SdarConfig(**DECODER, head_dim=8))
        else:
            model = Qwen2ForCausalLM(Qwen2Config(**DECODER))
        for key, p in model.double().named_parameters():  # biases start at 0 and norms at 1
            if "bias" in key or p.ndim == 1 and name in ENCODERS:
                torch.nn.init.normal_(p, mean=float("norm" in key.lower()), std=0.3)
    return model.eval()


def backbone(name, shift=0):
    if name in ENCODERS:
        return new_encoder(plain(name), FAMILY)
    return new_decoder(plain(name), dataclasses.replace(FAMILY, logit_shift=shift))


def logits(model, hidden):
    weight, bias = model.head()
    return F.linear(hidden, weight, bias)


def alone(name, batch):
    """(logits [T, V] of plain forwards, one sequence at a time; the model that made them)."""
    sequences = batch.ids.tensor_split(batch.cu_seqlens[1:-1].long())
    if name in ENCODERS:
        model = plain(name)
        return torch.cat([model(input_ids=ids[None]).logits[0] for ids in sequences]), model
    slow = backbone(name)
    return logits(slow, torch.cat([reference(slow, ids) for ids in sequences])), slow.model


def assert_same_gradients(a, b, **tolerance):
    """By name; transformers ties BERT's spare bias to the decoder's."""
    a, b = ({n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (a, b))
    assert a.keys() == b.keys() and a
    for key in a:
        torch.testing.assert_close(a[key], b[key], msg=key, **tolerance)


def reference(model, ids, mask=None, frozen=None):
    """A bidirectional Qwen2 forward in plain operations, one sequence. With `frozen` = (start,
    other ids): the rows of `ids`, which start there, against the constant rest of `other`."""
    core, turned = model.decoder, model.decoder.rotary_emb
    start, other = frozen or (0, ids)
    stop = start + len(ids)
    streams = [(core.embed_tokens(other), 0), (core.embed_tokens(ids), start)]

    def turn(x, first):
        cos, sin = turned(x, torch.arange(first, first + len(x))[None])
        a, b = x.chunk(2, -1)
        return x * cos[0][:, None] + torch.cat([-b, a], -1) * sin[0][:, None]

    for layer in core.layers:
        a, found = layer.self_attn, []
        for x, first in streams:
            n = layer.input_layernorm(x)
            q, k, v = (p(n).unflatten(-1, (-1, 8)) for p in (a.q_proj, a.k_proj, a.v_proj))
            found.append((turn(q, first), turn(k, first), v))
        (q0, k0, v0), (q1, k1, v1) = found
        k2, v2 = (
            torch.cat([c[:start].detach(), x, c[stop:].detach()]) for c, x in ((k0, k1), (v0, v1))
        )
        after = []
        for (x, first), q, k, v in zip(streams, (q0, q1), (k0, k2), (v0, v2), strict=True):
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
            score = torch.einsum("qhe,khe->hqk", q, k) / 8**0.5
            if mask is not None:
                score = score.masked_fill(~mask, -torch.inf)
            x = x + a.o_proj(torch.einsum("hqk,khe->qhe", score.softmax(-1), v).flatten(1))
            after.append((x + layer.mlp(layer.post_attention_layernorm(x)), first))
        streams = after
    return core.norm(streams[1][0])
