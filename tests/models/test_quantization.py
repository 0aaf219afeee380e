"""QLoRA's guards, and what is quantized; with a stand-in for bitsandbytes, which needs a GPU."""

import dataclasses
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from tiny_packed import batch_of
from torch import nn

from bwsft import config as c
from bwsft import presets
from bwsft.checkpoints.resolve import plan_model
from bwsft.data.tokenizer import load_tokenizer
from bwsft.models.llada_config import LladaConfig
from bwsft.models.loading import new_backbone
from bwsft.models.lora import LLADA_TARGETS, add_lora
from bwsft.models.quantization import quantize, require_bitsandbytes

CPU = torch.device("cpu")


class Params4bit(nn.Parameter):
    """Rounds when it moves, as the real one does: here to tenths."""

    def __new__(cls, data, requires_grad=False, module=None, **options):
        found = torch.Tensor._make_subclass(cls, data, requires_grad)
        found.module, found.options = module, options
        return found


class Linear4bit(nn.Linear):
    def __init__(self, inputs, outputs, bias, compute_dtype, device, **options):
        super().__init__(inputs, outputs, bias, device=device)
        self.compute_dtype, self.options = compute_dtype, options

    def to(self, device):
        assert self.weight.module is self and self.weight.options == self.options
        self.weight = nn.Parameter((self.weight.data * 10).round() / 10, requires_grad=False)
        return super().to(device)


@pytest.fixture
def library(monkeypatch):
    fake = SimpleNamespace(nn=SimpleNamespace(Linear4bit=Linear4bit, Params4bit=Params4bit))
    monkeypatch.setitem(sys.modules, "bitsandbytes", fake)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return fake


def backbone(**fields):
    shape = dict(d_model=32, n_layers=2, n_heads=2, mlp_hidden_size=48, vocab_size=320)
    ids = dict(mask_token_id=257, eos_token_id=256, pad_token_id=256, max_sequence_length=64)
    return new_backbone(LladaConfig(**(shape | ids | fields)), 5, dtype=torch.bfloat16)


def test_without_bitsandbytes_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # what a missing module raises too
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="CUDA device and bitsandbytes: pip install bitsandbytes"):
        require_bitsandbytes()


def test_without_a_cuda_device_it_says_so(library, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device is available"):
        quantize(backbone(), CPU)


def test_the_module_is_imported_only_when_asked_for(library):
    assert require_bitsandbytes() is library


@pytest.mark.parametrize("tied", [False, True])
def test_the_matrices_of_the_blocks_and_nothing_else(library, tied):
    model, before = backbone(weight_tying=tied), backbone(weight_tying=tied)
    quantize(model, CPU)
    quantized = {n: m for n, m in model.model.named_modules() if isinstance(m, Linear4bit)}
    wanted = re.compile(LLADA_TARGETS["all"])
    assert set(quantized) == {n for n, _ in before.model.named_modules() if wanted.fullmatch(n)}
    assert len(quantized) == 14
    for module in quantized.values():
        assert module.options == {"compress_statistics": True, "quant_type": "nf4"}
        assert module.compute_dtype == torch.bfloat16 and not module.weight.requires_grad
    old = before.model.state_dict()
    for name, weight in model.model.state_dict().items():
        rounded = name.removesuffix(".weight") in quantized
        assert torch.equal(weight, (old[name] * 10).round() / 10 if rounded else old[name]), name
    assert type(model.base_model.model.head_module) is (nn.Embedding if tied else nn.Linear)
    assert model.model.is_loaded_in_4bit


def test_adapters_train_on_it_and_the_base_stays(library, monkeypatch):
    model = backbone()
    quantize(model, CPU)
    monkeypatch.undo()  # peft would look for its layers in the stand-in
    add_lora(model, c.LoraConfig(rank=2, alpha=4.0, dropout=0.0), seed=1)
    before = {n: p.clone() for n, p in model.named_parameters()}
    batch, rows = batch_of(torch.arange(2, 12), (4, 6)), torch.tensor([1, 3, 8])
    model.train()(batch, rows, batch.ids[rows], torch.ones(3)).backward()
    grown = [n for n, p in model.named_parameters() if p.grad is not None]
    assert len(grown) == 2 * 14 and all("lora_" in n for n in grown)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_the_real_library(monkeypatch):
    """Where it is installed, its CPU code stands in for a GPU."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    before, model = backbone(d_model=128), backbone(d_model=128)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        quantize(model, CPU)
    add_lora(model, c.LoraConfig(rank=2, alpha=4.0, dropout=0.0), seed=1)
    name = "model.transformer.blocks.0.ff_proj"
    layer = model.base_model.get_submodule(name)
    assert type(layer).__module__ == "peft.tuners.lora.bnb"
    x = torch.randn(5, 128, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    exact = before.model.get_submodule(name)(x)
    # 16 levels for N(0, 1): an rms error of about 9 % of a weight's, so of their sum.
    assert 0.03 < (layer(x) - exact).norm() / exact.norm() < 0.15
    layer(x).sum().backward()
    assert layer.lora_B["default"].weight.grad is not None


def test_the_option_reaches_the_model(library, monkeypatch, tmp_path, tokenizer_folder):
    backbone().model.save_pretrained(tmp_path)
    words = load_tokenizer(tokenizer_folder)
    lora = c.LoraConfig(rank=2, alpha=4.0, quantize="nf4")
    config = dataclasses.replace(presets.debug(), model=str(tmp_path), lora=lora)
    c.validate(config)
    model = plan_model(config, words, tmp_path).build(CPU).model
    assert sum(isinstance(m, Linear4bit) for m in model.modules()) == 14
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device"):  # before anything is built
        plan_model(config, words, tmp_path)


@pytest.mark.parametrize("changes", [{"model": None}, {"parallel": "fsdp"}, {"rank": 0}])
def test_settings_that_exclude_each_other(changes):
    lora = c.LoraConfig(rank=changes.pop("rank", 2), quantize="nf4")
    config = dataclasses.replace(presets.debug(), model="m", lora=lora)
    with pytest.raises(ValueError, match="--lora.quantize needs --model, --lora.rank above 0"):
        c.validate(dataclasses.replace(config, **changes))
