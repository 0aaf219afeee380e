"""Model folders of every family: what is read, grown and written, and what is refused and how."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_folders import QWEN, SHAPE, WEIGHTS, edit, qwen, same, saved
from torch import nn
from transformers import (
    BertConfig,
    BertForPreTraining,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    ModernBertConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from bwsft import config as c
from bwsft.cli import main
from bwsft.models.dream_sdar import DreamConfig, DreamModel, SdarConfig, SDARForCausalLM
from bwsft.models.families import Facts
from bwsft.models.llada_config import LladaConfig
from bwsft.models.loading import load_backbone, new_backbone, read_family
from bwsft.models.lora import add_lora
from bwsft.utils import hub

FACTS = Facts(mask_id=257, logit_shift=1)


# --- files ---


def test_a_tied_head_that_is_stored_must_be_the_embedding(tmp_path):
    folder = saved(tmp_path / "m", qwen(tie_word_embeddings=True))
    weights = load_file(folder / WEIGHTS)
    assert "lm_head.weight" not in weights
    head = weights["model.embed_tokens.weight"].clone()
    save_file({**weights, "lm_head.weight": head}, folder / WEIGHTS, {"format": "pt"})
    model = load_backbone(folder, facts=FACTS).model
    assert torch.equal(model.lm_head.weight, head)
    head[3, 3] += 1
    save_file({**weights, "lm_head.weight": head}, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(ValueError, match="ties lm_head.weight to model.embed_tokens.weight, but"):
        load_backbone(folder, facts=FACTS)


def test_the_first_berts_files_are_read(tmp_path, tokenizer_folder):
    """Other heads, whole-number buffers and TensorFlow's names of the norms."""
    torch.manual_seed(2)
    model = BertForPreTraining(BertConfig(vocab_size=320, **SHAPE))
    folder = saved(tmp_path / "bert", model)
    shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    weights = {}
    for name, tensor in load_file(folder / WEIGHTS).items():
        for new, former in old.items():
            name = name.replace(new, former)
        weights[name] = tensor + 0.25 if "Norm" in name else tensor
    assert sum("gamma" in name for name in weights) == 6
    weights["bert.embeddings.position_ids"] = torch.arange(96)[None]
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    found = load_backbone(folder)
    assert (found.family.mask_id, found.family.eos_id) == (257, 256)
    norm = found.model.bert.encoder.layer[1].output.LayerNorm
    assert torch.equal(norm.weight, weights["bert.encoder.layer.1.output.LayerNorm.gamma"])
    assert torch.equal(norm.bias, weights["bert.encoder.layer.1.output.LayerNorm.beta"])


# What the published configs hold, in small sizes; layout as of transformers 4.46 and 4.52.
COMMON = {
    "attention_dropout": 0.0, "bos_token_id": 3, "eos_token_id": 3, "hidden_act": "silu",
    "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 48,
    "max_position_embeddings": 96, "max_window_layers": 2, "num_attention_heads": 4,
    "num_hidden_layers": 2, "num_key_value_heads": 2, "pad_token_id": 3, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 64,
}  # fmt: skip
PUBLISHED = {
    "Dream": COMMON | {
        "architectures": ["DreamModel"], "model_type": "Dream", "mask_token_id": 60,
        "auto_map": {
            "AutoConfig": "configuration_dream.DreamConfig",
            "AutoModel": "modeling_dream.DreamModel",
        },
        "use_mrope": False,
    },
    "sdar": COMMON | {
        "architectures": ["SDARForCausalLM"], "model_type": "sdar", "mask_token_id": 60,
        "attention_bias": False, "head_dim": 8, "block_size": 4, "debug": False, "ep_size": 1,
        "fuse_cross_entropy": True, "micro_forward": False, "skip_checkpoint": False,
        "use_deepep": False,
        "auto_map": {
            "AutoConfig": "configuration_sdar.SDARConfig",
            "AutoModel": "modeling_sdar.SDARForCausalLM",
            "AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM",
        },
    },
    "Fast_dLLM_Qwen": COMMON | {
        "architectures": ["Fast_dLLM_QwenForCausalLM"], "model_type": "Fast_dLLM_Qwen",
        "mask_token_id": 60, "bd_size": 32,
        "auto_map": {
            "AutoConfig": "configuration.Fast_dLLM_QwenConfig",
            "AutoModelForCausalLM": "modeling.Fast_dLLM_QwenForCausalLM",
        },
    },
    "a2d-qwen3": COMMON | {
        "architectures": ["A2DQwen3LMHeadModel"], "model_type": "a2d-qwen3", "mask_token_id": 60,
        "attention_bias": False, "head_dim": 8,
        "auto_map": {
            "AutoConfig": "modeling_qwen3.A2DQwen3Config",
            "AutoModel": "modeling_qwen3.A2DQwen3LMHeadModel",
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize(
    "rope", [None, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}]
)
def test_published_configs_are_written_as_they_were(tmp_path, name, rope):
    """Their own code runs on older releases of transformers."""
    official = PUBLISHED[name] | {"rope_scaling": rope}
    kind = CONFIG_MAPPING[name]
    copy = json.loads(json.dumps(official))  # transformers writes into it
    model = new_backbone(kind.from_dict(copy), dtype=torch.bfloat16).model
    folder = saved(tmp_path / "first", model)
    (folder / "config.json").write_text(json.dumps(official))
    found = load_backbone(folder)
    assert found.model.model.rotary_emb.config.rope_parameters["rope_theta"] == 1e6
    found.model.save_pretrained(tmp_path / "second")
    written = json.loads((tmp_path / "second" / "config.json").read_text())
    assert written.pop("transformers_version")
    assert written == official
    again = load_backbone(tmp_path / "second")
    assert same(again.model.state_dict(), model.state_dict()) and again.family == found.family


def test_dreams_own_option_that_changes_numbers_is_refused(tmp_path):
    with pytest.raises(ValueError, match="use_mrope=True is not implemented"):
        DreamConfig(use_mrope=True)


HF = {
    "qwen2": Qwen2Config(**QWEN, mask_token_id=257, logit_shift=0),
    "bert": BertConfig(vocab_size=320, **SHAPE, mask_token_id=257, eos_token_id=256),
    "sdar": SdarConfig(head_dim=8, mask_token_id=257, **QWEN),
}
WEIRD = ["5", True, None, 1.5, -1, 0, 10**9, 10**30, [1], {"a": 1}]


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", HF)
def test_wrong_values_in_a_config_are_refused_in_a_sentence(tmp_path, name, every):
    folder = saved(tmp_path / "m", new_backbone(HF[name]).model)
    good = json.loads((folder / "config.json").read_text())
    refused = 0
    for number, field in enumerate(good):
        for value in WEIRD[number % every :: every]:
            (folder / "config.json").write_text(json.dumps(good | {field: value}))
            try:
                load_backbone(folder)
            except (ValueError, OSError) as error:
                refused += 1
                assert str(folder) in str(error) and len(str(error)) < 500, (field, value, error)
    assert refused > 80 / every


POISON = {
    "attn_implementation": "evil/kernel", "_attn_implementation": [1], "attribute_map": 3,
    "__class__": "x", "forward": 1, "to_dict": {}, "sub_configs": 1, "id2label": [1],
    "transformers_weights": "../other.safetensors", "experts_implementation": "evil/kernel",
    "per_layer_config": {"0": {"hidden_size": 1}}, "name_or_path": "evil/model",
}  # fmt: skip


@pytest.mark.parametrize("name", HF)
def test_only_fields_of_the_model_reach_transformers(tmp_path, name):
    folder = saved(tmp_path / "m", new_backbone(HF[name]).model)
    expected = load_backbone(folder).model.config.to_dict()
    edit(folder / "config.json", **POISON)
    assert load_backbone(folder).model.config.to_dict() == expected


def test_other_models_are_refused_with_those_that_are_known(tmp_path):
    folder = saved(tmp_path / "m", GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1)))
    for refuse in (load_backbone, read_family):
        with pytest.raises(ValueError, match="'gpt2': bwsft loads llada, Dream, sdar, a2d"):
            refuse(folder)


# What the published config.json of each says; a llada's model_type is that of two models.
NAMED = {
    "a sdar with num_experts": {"model_type": "sdar", "num_experts": 128},
    "a qwen3 with num_experts": {"model_type": "qwen3", "num_experts": 8},
}


@pytest.mark.parametrize(("model", "config"), NAMED.items())
def test_a_model_of_the_hub_is_refused_by_name_after_its_config(
    monkeypatch, tmp_path, capsys, model, config
):
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = []
    monkeypatch.setattr(hub, "snapshot", lambda name, files: asked.append(set(files)) or tmp_path)
    said = []
    for command in ("generate --prompt 1", f"train debug --out {tmp_path}/run"):
        assert main([*command.split(), "--model", "some/model"]) == 2
        said.append(capsys.readouterr().err)
    for call in (load_backbone, read_family):
        with pytest.raises(ValueError) as refused:
            call("some/model")
        said.append(str(refused.value))
    for line in said:
        assert f"is of {model}" in line and "not supported" in line
    assert asked == [{"config.json"}] * 4


# --- models ---


def test_dream_runs_without_a_causal_mask():
    torch.manual_seed(3)
    model = DreamModel(DreamConfig(**QWEN, mask_token_id=257)).double().eval()
    ids = torch.arange(10)[None]
    changed = ids.clone()
    changed[0, 9] = 99
    with torch.no_grad():
        plain, other = model(ids).logits, model(changed).logits
        assert (plain - other)[0, 0].abs().max() > 1e-6
        padded = model(torch.cat([ids, changed[:, :4]], 1), (torch.arange(14) < 10)[None].long())
    torch.testing.assert_close(padded.logits[:, :10], plain, rtol=1e-5, atol=1e-6)


def test_sdar_needs_to_be_told_its_blocks():
    model = SDARForCausalLM(SdarConfig(head_dim=8, mask_token_id=257, **QWEN))
    with pytest.raises(ValueError, match="which block sees which"):
        model(torch.arange(8)[None])


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_a_decoders_own_dropout_is_off(config_class):
    backbone = new_backbone(
        config_class(**QWEN, attention_dropout=0.5, mask_token_id=257, logit_shift=0)
    ).train()
    ids = torch.arange(8)
    passes = [backbone.hidden_states(ids, ids, torch.tensor([0, 8])) for _ in range(2)]
    torch.testing.assert_close(*passes, rtol=0, atol=0)
    assert backbone.model.config.attention_dropout == 0.5


@pytest.mark.parametrize("config_class", [LlamaConfig, ModernBertConfig])
def test_an_end_token_that_is_left_out_is_the_tokenizers(config_class, tmp_path, tokenizer_folder):
    config = config_class(
        vocab_size=320, **SHAPE, mask_token_id=257, logit_shift=0, pad_token_id=0, eos_token_id=9
    )
    folder = saved(tmp_path / "m", new_backbone(config).model)
    assert read_family(folder).eos_id == 9
    edit(folder / "config.json", eos_token_id=None)
    with pytest.raises(ValueError, match="config.json lacks eos_token_id: add the id"):
        read_family(folder)
    assert read_family(folder, Facts(eos_id=7)).eos_id == 7
    (folder / "generation_config.json").unlink(missing_ok=True)
    shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
    assert read_family(folder).end_ids == (256,)


def test_rope_that_depends_on_the_batch_is_refused():
    rope = {"rope_type": "longrope", "factor": 2.0, "rope_theta": 1e4,
            "short_factor": [1.0] * 4, "long_factor": [3.0] * 4,
            "original_max_position_embeddings": 48}  # fmt: skip
    config = LlamaConfig(**QWEN, rope_parameters=rope, mask_token_id=257, logit_shift=0)
    with pytest.raises(ValueError, match="rope_type longrope makes keys depend on the batch"):
        new_backbone(config)


@pytest.mark.parametrize(("config", "per_layer", "released"), [
    (LladaConfig(d_model=32, n_layers=2, n_heads=4, mlp_hidden_size=48, vocab_size=320,
                 max_sequence_length=96, mask_token_id=257, eos_token_id=256), 7, 4),
    (HF["qwen2"], 7, 4),
    (Qwen3Config(**QWEN, head_dim=8, mask_token_id=257, logit_shift=0), 7, 4),
    (LlamaConfig(**QWEN, mask_token_id=257, logit_shift=0, tie_word_embeddings=True), 7, 4),
    (DreamConfig(**QWEN, mask_token_id=257), 7, 4),
    (HF["sdar"], 7, 4),
    (HF["bert"], 6, 4),
    (ModernBertConfig(vocab_size=320, **SHAPE, pad_token_id=0, eos_token_id=256,
                      mask_token_id=257), 4, 2),
], ids=lambda x: getattr(x, "model_type", ""))  # fmt: skip
def test_adapters_are_on_the_matrices_of_the_layers_and_not_on_the_head(
    config, per_layer, released
):
    backbone = new_backbone(config)
    linear = {n for n, m in backbone.model.named_modules() if isinstance(m, nn.Linear)}
    layers = {n for n in linear if any(f".{i}." in n for i in range(2))}
    for targets, count in (("all", per_layer), ("released", released)):
        backbone = new_backbone(config)
        add_lora(backbone, c.LoraConfig(rank=2, targets=targets), 0)
        adapted = {
            n.removeprefix("base_model.model.")
            for n, m in backbone.model.named_modules()
            if hasattr(m, "lora_A")
        }
        assert len(adapted) == 2 * count and adapted <= layers
        assert targets == "released" or adapted == layers
        backbone.head()
