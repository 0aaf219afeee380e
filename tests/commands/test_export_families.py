"""Exports of adapters on other families: other names, tied heads, a [MASK] that is new."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_folders import run_of
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    ModernBertConfig,
    Qwen2Config,
)

from bwsft import config as c
from bwsft import presets
from bwsft.checkpoints.resolve import load_trained
from bwsft.commands.export import run_export
from bwsft.commands.options import ExportOptions
from bwsft.models.loading import load_backbone

LORA = c.LoraConfig(rank=3, alpha=7.0, dropout=0.1)
HF = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    vocab_size=320, max_position_embeddings=64, pad_token_id=0, eos_token_id=256,
)
BERTS = dict(bos_token_id=256, cls_token_id=256, sep_token_id=256, mask_token_id=257)
FOREIGN = {
    # [MASK] is one row more than the embedding has, which is tied to the head.
    "grown": (
        Qwen2Config,
        dict(num_key_value_heads=2, tie_word_embeddings=True, mask_token_id=320, logit_shift=1),
    ),
    "untied": (
        Qwen2Config,
        dict(num_key_value_heads=2, tie_word_embeddings=False, mask_token_id=320, logit_shift=0),
    ),
    "bert": (BertConfig, BERTS),
    "modernbert": (ModernBertConfig, BERTS),
}


def foreign(root, tokenizer, kind, config):
    """A checkpoint folder of an adapter on a random model of another family."""
    model = kind(**HF, **config)
    masked = kind is not Qwen2Config
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = (AutoModelForMaskedLM if masked else AutoModelForCausalLM).from_config(model)
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.1)
    model.bfloat16().save_pretrained(root / "base")
    described = json.loads((root / "base" / "config.json").read_text())
    del described["architectures"]
    (root / "base" / "config.json").write_text(json.dumps(described))
    file = root / "base" / "model.safetensors"
    if kind is BertConfig:  # as the first BERTs were stored
        older = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        weights = load_file(file)
        for new, old in older.items():
            weights = {n.replace(new, old): w for n, w in weights.items()}
        weights["bert.pooler.dense.bias"] = torch.zeros(32)
        save_file(weights, file, metadata={"format": "pt"})
    settings = dataclasses.replace(presets.debug(), model=str(root / "base"), lora=LORA)
    return run_of(root, load_backbone(root / "base"), settings, tokenizer)


@pytest.mark.parametrize("name", FOREIGN)
def test_other_families(tmp_path, tokenizer_folder, name):
    checkpoint = foreign(tmp_path, tokenizer_folder, *FOREIGN[name])
    assert run_export(ExportOptions(str(checkpoint), tmp_path / "out")) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    trained = load_trained(str(checkpoint), dtype=torch.bfloat16).backbone
    expected = trained.model.merge_and_unload().state_dict()
    base = load_backbone(tmp_path / "base").model.state_dict()
    again = load_backbone(tmp_path / "out")
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert described["architectures"] == [type(again.model).__name__]
    changed = 0
    for key, weight in again.model.state_dict().items():
        # peft rounds the update before it adds it: one or two bf16 ulps.
        torch.testing.assert_close(weight, expected[key], rtol=2**-6, atol=2**-9)
        changed += not torch.equal(weight, base[key])
        assert key not in found or torch.equal(weight, found[key])
    update = load_file(checkpoint / "adapter_model.safetensors")
    assert changed == len(update) / 2 > 0
    assert len(found) == len({id(weight) for weight in again.model.parameters()})
    if name in ("grown", "untied"):
        assert len(again.base_model.get_input_embeddings().weight) == 321
