"""LoRA on routed experts: against matrices W + scale * B A in float64, in plain peft, in files."""

import copy
import shutil

import peft
import pytest
import torch
from block_masks import block_causal_mask
from safetensors.torch import load_file, save_file
from tiny_experts import CONFIGS
from tiny_folders import WEIGHTS, edit, saved
from torch.func import functional_call
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from bwsft import config as c
from bwsft.checkpoints.resolve import load_trained
from bwsft.commands.export import run_export
from bwsft.commands.options import ExportOptions
from bwsft.models.backbone import trainable
from bwsft.models.expert_lora import ExpertLora
from bwsft.models.families import model_class, read_config
from bwsft.models.grouped_experts import grouped_linear
from bwsft.models.loading import as_backbone, load_backbone, new_backbone
from bwsft.models.lora import ADAPTER, add_lora

kinds = pytest.mark.parametrize("kind", CONFIGS)
LORA = c.LoraConfig(rank=3, alpha=7.0, dropout=0.0, targets="experts")
IDS = (torch.arange(22) * 5 % 60).view(2, 11)
SEES = {"attention_mask": block_causal_mask(torch.arange(11) // 4).expand(2, 1, 11, 11)}


def adapted(net):
    """With adapters that change what it computes."""
    add_lora(net, LORA, 0)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in net.model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3, generator=generator)
    return net


def logits(model, weights=None):
    """[2, 11, V], with other weights if given."""
    getattr(model, "get_base_model", lambda: model)().set_attn_implementation("sdpa")
    return functional_call(model, weights or {}, (IDS,), SEES).logits


def dense(net):
    """Name of each adapted weight in the plain model -> W + scale * B A."""
    found = {}
    for name, layer in net.model.named_modules():
        if not hasattr(layer, "lora_A"):
            continue
        a, b, scale = (x["default"] for x in (layer.lora_A, layer.lora_B, layer.scaling))
        place = name.removeprefix("base_model.model.")
        if not isinstance(layer, ExpertLora):
            found[f"{place}.weight"] = layer.weight + scale * b.weight @ a.weight
            continue
        weight = getattr(layer.get_base_layer(), layer.parameter_name)
        experts, rank = len(weight), len(a.weight) // len(weight)
        place = f"{place.replace('.base_layer', '')}.{layer.parameter_name}"
        found[place] = torch.stack([  # as peft has them: A one after another, B in turn
            w + scale * b.weight[:, e::experts] @ a.weight[e * rank : (e + 1) * rank]
            for e, w in enumerate(weight)
        ])  # fmt: skip
    return found


@kinds
def test_gradients_are_those_of_dense_matrices(kind):
    net, plain = (new_backbone(CONFIGS[kind], 1, dtype=torch.float64) for _ in range(2))
    weights = trainable(adapted(net))
    assert {n.split(".lora_")[0].split(".")[-1] for n in weights} >= {"experts", "base_layer"}
    assert not any(".gate." in name for name in weights)
    up = torch.randn(2, 11, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    own, expected = logits(net.model), logits(plain.model, dense(net))
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-11)
    found, wanted = (
        torch.autograd.grad((x * up).sum(), list(weights.values())) for x in (own, expected)
    )
    for name, a, b in zip(weights, found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
        assert b.abs().max() > 1e-6, name


def test_bf16_takes_one_grouped_product():
    """Rows that are short of 16 bytes do not; all are products of bf16 rounded to it, of a few
    numbers each. Matrices as peft's B has them: not one after another."""
    generator = torch.Generator().manual_seed(0)
    ends = torch.tensor([3, 3, 11, 20, 20], dtype=torch.int32)
    owner = torch.repeat_interleave(torch.arange(5), ends.diff(prepend=ends.new_zeros(1)))
    for width in (16, 12):
        sizes = ((20, width), (24, width, 5), (20, 24))
        x, w, up = (torch.randn(*s, generator=generator).bfloat16() for s in sizes)
        ours, theirs = ([x.to(t).requires_grad_(), w.to(t).requires_grad_()]
                        for t in (x.dtype, torch.float64))  # fmt: skip
        with torch.profiler.profile() as watched:
            found = grouped_linear(ours[0], ours[1].movedim(-1, 0), ends)
        called = any(event.name == "aten::_grouped_mm" for event in watched.events())
        assert called == (width == 16)
        expected = torch.einsum("si,ois->so", theirs[0], theirs[1][..., owner])
        pairs = [(found, expected)]
        pairs += zip(torch.autograd.grad(found, ours, up),
                     torch.autograd.grad(expected, theirs, up.double()), strict=True)  # fmt: skip
        for a, b in pairs:
            torch.testing.assert_close(a.double(), b, rtol=2**-8, atol=2**-6)


def test_layers_of_transformers_and_peft_compute_the_same(tmp_path):
    """An adapter that was made here, on transformers' own model of these layers in plain peft."""
    net = adapted(new_backbone(CONFIGS["sdar_moe"], 1, dtype=torch.float64))
    net.model.save_pretrained(tmp_path)
    fields = CONFIGS["sdar_moe"].to_dict() | {"model_type": "qwen3_moe"}
    theirs = Qwen3MoeForCausalLM(Qwen3MoeConfig.from_dict(fields)).double()
    theirs.load_state_dict(new_backbone(CONFIGS["sdar_moe"], 1).model.state_dict())
    theirs.set_experts_implementation("eager")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path)
    generator = torch.Generator().manual_seed(2)
    x, weights = (torch.randn(40, n, dtype=torch.float64, generator=generator) for n in (32, 3))
    routed = x, torch.rand(40, 8, generator=generator).topk(3).indices, weights
    layers = theirs.get_base_model().model.layers
    for mine, other in zip(net.base_model.model.layers, layers, strict=True):
        found, expected = (layer.mlp.experts(*routed) for layer in (mine, other))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


@pytest.fixture
def trained(tmp_path, tokenizer_folder):
    """Makes (base folder, folder of an adapter on it, the float64 logits of both)."""

    def make(kind):
        config = copy.deepcopy(CONFIGS[kind])
        config.vocab_size, config.mask_token_id, config.eos_token_id = 320, 257, 256
        base = saved(tmp_path / "base", new_backbone(config, 1).model)
        shutil.copytree(tokenizer_folder, base, dirs_exist_ok=True)
        net = adapted(load_backbone(base, dtype=torch.float64))
        net.model.save_pretrained(tmp_path / "adapter")
        with torch.no_grad():
            return base, tmp_path / "adapter", logits(net.model.eval())

    return make


@kinds
@torch.no_grad()
def test_files_hold_what_was_trained(kind, trained, tmp_path):
    """The adapter in bwsft, and in plain peft; its export in the published layout, where each sum
    is rounded to float32 once: 2^-24 of logits below ten, a few times over."""
    base, folder, expected = trained(kind)
    assert torch.equal(logits(load_trained(str(folder), dtype=torch.float64).backbone.model),
                       expected)  # fmt: skip
    config = read_config(base)  # LLaDA-MoE's says that it is a LLaDA
    plain = model_class(config).from_pretrained(base, config=config, dtype=torch.float64)
    theirs = peft.PeftModel.from_pretrained(plain, folder).eval()
    torch.testing.assert_close(logits(theirs), expected, rtol=0, atol=1e-11)
    torch.testing.assert_close(logits(as_backbone(theirs).model), expected, rtol=0, atol=1e-11)
    assert any(isinstance(module, ExpertLora) for module in theirs.modules())
    run_export(ExportOptions(str(folder), tmp_path / "out"))
    again = load_backbone(tmp_path / "out", dtype=torch.float64)
    torch.testing.assert_close(logits(again.model), expected, rtol=0, atol=1e-5)
    before, after = (load_file(place / WEIGHTS) for place in (base, tmp_path / "out"))
    same = {name for name, tensor in before.items() if torch.equal(tensor, after[name])}
    assert before.keys() == after.keys()
    assert not any(".experts." in name for name in same)
    assert {name for name in before if ".gate." in name} <= same


@pytest.mark.parametrize(("change", "message"), [
    ({"target_parameters": ["mlp.gate.weight"]}, "target_parameters has mlp.gate.weight"),
    ({"target_parameters": None}, "mlp.experts.base_layer, which is no inner matrix"),
    ({"r": 4}, "says r = 4, but .* has rank 3"),
    ({"lora_dropout": 0.1}, "lora_dropout"),
    (torch.zeros(25, 32), "has shape .25, 32., which does not fit"),
])  # fmt: skip
def test_an_adapter_that_does_not_fit_is_refused(change, message, trained):
    _, folder, _ = trained("sdar_moe")
    if isinstance(change, dict):
        edit(folder / "adapter_config.json", **change)
    else:
        tensors = load_file(folder / ADAPTER)
        (name, *_) = (name for name in tensors if name.endswith("base_layer.lora_A.weight"))
        save_file(tensors | {name: change}, folder / ADAPTER)
    with pytest.raises(ValueError, match=message):
        load_trained(str(folder))


def test_models_without_experts_are_refused(model_folder):
    with pytest.raises(ValueError, match="--lora.targets experts: this model has no routed"):
        add_lora(load_backbone(model_folder()), LORA, 0)
    with pytest.raises(ValueError, match="needs --lora.dropout 0"):
        c.validate(c.Config(lora=c.LoraConfig(targets="experts")))
