"""LLaDA with fused small operations: the same numbers, in every way that the model runs.

On a CPU they run in torch; kernels/triton/test_small_ops.py runs them in Triton's interpreter.
"""

import types

import bwsft_kernels
import pytest
import tiny_llada
import torch
from bwsft_kernels import torch_ops

from bwsft.config import LoraConfig
from bwsft.decoding.config import DecodeConfig
from bwsft.decoding.generate import generate
from bwsft.decoding.pipeline import Decoder
from bwsft.decoding.settings import DecoderOptions
from bwsft.models import llada_layers
from bwsft.models.kv_cache import Context, Span
from bwsft.models.lora import add_lora

LENGTHS, WIDTH = [11, 14], 6


class Batch:
    """Two packed sequences, the last 6 tokens of each masked in part."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.cu_seqlens = torch.tensor([0, LENGTHS[0], sum(LENGTHS)])
        self.position_ids = torch.cat([torch.arange(n) for n in LENGTHS])
        self.max_length = max(LENGTHS)
        self.ids = torch.randint(2, 89, (sum(LENGTHS),), generator=generator)
        self.rows = torch.tensor([6, 8, 20, 21, 24])
        self.target = self.ids[self.rows].clone()
        self.ids[self.rows] = 89
        start = torch.tensor([n - WIDTH for n in LENGTHS])
        self.span = Span(start, torch.tensor([WIDTH, WIDTH]), WIDTH)


def plain_model():
    fields = {"n_layers": 3, "n_kv_heads": 2, "vocab_size": 90, "mask_token_id": 89}
    return tiny_llada.backbone(torch.float32, **fields)


def model(fused, dtype=torch.float32, lora=False):
    backbone = plain_model().to(dtype)
    if lora:
        add_lora(backbone, LoraConfig(rank=4, alpha=8.0, dropout=0.0), seed=1)
        for name, parameter in backbone.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.manual_seed(len(name)))
    backbone.set_fused_ops({True: "on", False: "off"}.get(fused, fused))
    return backbone.train()


def loss_of(backbone, batch, mode):
    """The loss of the masked rows: all rows forward, the span alone, or the span on a cache."""
    context = None
    if mode != "whole":
        context = Context(batch.span, None)
    if mode == "cached":
        context = Context(batch.span, backbone.new_cache(2, max(LENGTHS)))
        backbone(batch, None, None, None, context)
    weight = torch.ones(len(batch.rows))
    return backbone(batch, batch.rows, batch.target, weight, context)


def loss_and_grads(backbone, mode, dtype=torch.float32):
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = loss_of(backbone, Batch(), mode)
    loss.backward()
    grads = [p.grad for p in backbone.parameters() if p.grad is not None]
    backbone.zero_grad()
    return [loss.detach(), *grads]


MODES = ("whole", "span", "cached")


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_losses_and_gradients(assert_no_worse, mode, lora):
    """The forward pass has the bits of the plain model; a gradient is no further from float64 than
    3x the plain one's, with a band of 8 roundings of its largest entry."""
    own, same = (loss_and_grads(model(fused, lora=lora), mode) for fused in (True, False))
    truth = loss_and_grads(model(False, torch.float64, lora), mode)
    assert torch.equal(own[0], same[0])
    assert len(own) == (3 * 7 * 2 if lora else len(list(model(False).parameters()))) + 1
    for one, two, three in zip(own, same, truth, strict=True):
        band = 8 * torch.finfo(torch.float32).eps * float(three.abs().max())
        assert_no_worse(one, two, three.double(), band)


@pytest.mark.parametrize("mode", MODES)
def test_in_float64_and_under_autocast(mode):
    own, same = (loss_and_grads(model(fused, torch.float64), mode) for fused in (True, False))
    for one, other in zip(own, same, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    own, same = (loss_and_grads(model(fused), mode, torch.bfloat16) for fused in (True, False))
    assert torch.equal(own[0], same[0])
    for one, other in zip(own[1:], same[1:], strict=True):
        # Gradients meet some ten bf16 matmuls, each with a relative rounding of 2^-8.
        error = (one - other).norm() / other.norm()
        assert error < 10 * 2**-8, float(error)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_checkpointing_changes_no_bit(mode, fused):
    backbone = model(fused)
    before = loss_and_grads(backbone, mode)
    backbone.set_gradient_checkpointing(True)
    after = loss_and_grads(backbone, mode)
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))


def test_checkpointing_keeps_one_tensor_a_layer():
    """x and what the MLP adds to it are added before the next layer keeps them."""
    backbone, batch, kept = model(False), Batch(), []
    backbone.set_gradient_checkpointing(True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        backbone.hidden_states(batch.ids, batch.position_ids, batch.cu_seqlens)
    rows = {t.data_ptr() for t in kept if t.shape == (25, 32)}
    # Three inputs of layers; the last norm keeps its input and the normed rows beside.
    assert len(rows) == 3 + 2


@pytest.mark.parametrize("fused", [False, True])
def test_wanted_rows_are_those_of_the_whole(fused):
    backbone, batch = model(fused, torch.float64), Batch()
    packed = batch.ids, batch.position_ids, batch.cu_seqlens
    wanted = torch.tensor([[1, 4, 10], [11, 12, 24]])
    whole = backbone.hidden_states(*packed)
    some = backbone.hidden_states(*packed, wanted=wanted)
    torch.testing.assert_close(some, whole[wanted.flatten()], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("context", ["exact", "cached", "prefix", "block_causal"])
def test_tokens(context):
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]
    config = DecodeConfig(12, 4, context=context)
    own, same = (
        [r.tokens for r in generate(model(fused).eval(), prompts, config)]
        for fused in (True, False)
    )
    assert own == same


def test_padded_entry():
    ids = Batch().ids[:22].view(2, 11)
    own, same = (model(fused).model(input_ids=ids).logits for fused in (True, False))
    assert torch.equal(own, same)


def calls_of(monkeypatch, backbone, **options):
    """Names of the fused functions called by a forward."""
    called = []
    for name in ("rms_norm", "rotary", "swiglu"):
        function = getattr(bwsft_kernels, name)
        monkeypatch.setattr(
            bwsft_kernels, name,
            lambda *a, _f=function, _n=name, **k: called.append(_n) or _f(*a, **k),
        )
    batch = Batch()
    backbone.hidden_states(batch.ids, batch.position_ids, batch.cu_seqlens, **options)
    return {name: called.count(name) for name in called}


def test_what_is_called(monkeypatch):
    assert calls_of(monkeypatch, model(True)) == {"rms_norm": 7, "rotary": 3, "swiglu": 3}
    assert calls_of(monkeypatch, model(False)) == {}
    assert calls_of(monkeypatch, model("auto")) == {}  # on a CPU


def test_auto_is_cuda_with_triton(monkeypatch):
    on_gpu = types.SimpleNamespace(is_cuda=True)
    for there, expected in ((True, bwsft_kernels), (False, torch_ops)):
        monkeypatch.setattr(llada_layers, "_triton_is_there", lambda there=there: there)
        assert llada_layers.small_ops("auto", on_gpu) is expected
        assert llada_layers.small_ops("auto", torch.ones(1)) is torch_ops
        assert llada_layers.small_ops("on", torch.ones(1)) is bwsft_kernels
        assert llada_layers.small_ops("off", on_gpu) is torch_ops


def test_auto_leaves_compiled_code_whole(monkeypatch):
    monkeypatch.setattr(llada_layers, "_triton_is_there", lambda: True)
    on_gpu = types.SimpleNamespace(is_cuda=True)

    def norm(x):
        return llada_layers.small_ops("auto", on_gpu).rms_norm(x, torch.ones(8), 1e-5)

    x = torch.randn(3, 8)
    compiled = torch.compile(norm, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), norm(x))
    assert llada_layers.small_ops("auto", on_gpu) is bwsft_kernels


def test_the_switch(tmp_path):
    backbone = plain_model()
    norms = [m for m in backbone.modules() if hasattr(m, "fused_ops")]
    assert len(norms) == 3 * 3 + 1 and {m.fused_ops for m in norms} == {"auto"}
    names = list(backbone.state_dict())
    backbone.set_fused_ops("on")
    assert all(m.fused_ops == "on" for m in norms) and list(backbone.state_dict()) == names
    backbone.model.save_pretrained(tmp_path)
    assert "fused" not in (tmp_path / "config.json").read_text()
    with pytest.raises(ValueError, match="on, off or auto"):
        backbone.set_fused_ops("yes")


def test_the_option_reaches_the_model_in_training_and_decoding(tiny, make_run):
    def choices(backbone):
        return {m.fused_ops for m in backbone.modules() if hasattr(m, "fused_ops")}

    assert choices(make_run(tiny(fused_ops="on")).backbone) == {"on"}
    for choice in ("off", "on"):
        options = DecoderOptions(fused_ops=choice)
        assert choices(Decoder.load(None, options).trained.backbone) == {choice}
