"""`bwsft train --dry-run` against a real step of the same run."""

import copy
import dataclasses
import json
import re

import pytest
import torch
from thinning import thinned
from tiny_experts import CONFIGS as EXPERTS

from bwsft import config as c
from bwsft import presets
from bwsft.checkpoints.resolve import TINY
from bwsft.cli import main
from bwsft.commands import card_memory, dry_run, hollow_run
from bwsft.decoding.recipes import RECIPES
from bwsft.models.families import family_of, model_class, wrap
from bwsft.models.loading import load_backbone, new_backbone
from bwsft.models.lora import add_lora
from bwsft.objectives.config import ObjectiveConfig

MODES = {
    "exact": {},
    "suffix": {"objective": ObjectiveConfig(suffix_weight=1.0)},
    "shared": {"draws_per_context": 4, "shared_context": True},
    "cached": {"context": "cached", "draws_per_context": 2},
    "groups": {"context": "block_causal", "active_blocks": 2},
    "pair": {
        "context": "block_causal", "draws_per_context": 2,
        "objective": ObjectiveConfig(pairs=True, weight="flat", empty="skip"),
    },
    "frozen": {
        "context": "block_causal", "draws_per_context": 2,
        "objective": ObjectiveConfig(pairs=True, context_grad=False, weight="flat", empty="skip"),
    },
}


def test_groups_cost_what_they_do_on_average_and_take_the_most_that_they_may(monkeypatch):
    """Of several active blocks, whatever the seed: a group may end, and the clean row with it, at
    every block."""
    config = dataclasses.replace(
        presets.debug(), context="block_causal", active_blocks=3, batch_size=1, micro_batch_size=1
    )
    assert config.gen_length == 5 * config.block_size
    shape = hollow_run.shape_of(config)
    # The clean row ends before the last group, of 3, 1 or 2 blocks.
    tokens = config.max_length - 8 * (3 + 1 + 2) // 3 + config.gen_length
    for seed in range(2):
        assert dry_run.count(dataclasses.replace(config, seed=seed), shape).tokens == tokens
    most, peaks = sum(card_memory.peak_of(config, shape).values()), []
    for offset in range(3):
        monkeypatch.setattr(card_memory, "worst_offset", lambda *_, offset=offset: offset)
        peaks.append(sum(card_memory.peak_of(config, shape).values()))
    assert most == max(peaks) > min(peaks)


@pytest.mark.parametrize("name", thinned(MODES, 2))
def test_it_counts_what_a_real_step_takes(name):
    config = dataclasses.replace(presets.debug(), **MODES[name])
    shape = hollow_run.shape_of(config)
    found = dry_run.count(config, shape)
    real = dry_run.step_of(config, load_backbone(TINY, dtype=torch.float32).train())
    assert shape.n_layers == 4 and dataclasses.astuple(found) == tuple(real)


KINDS = {
    "exact": ["qwen2", "bert", "modernbert"], "cached": ["dream", "qwen3", "bert"],
    "pair": ["sdar", "dream", "modernbert"], "frozen": ["llama", "sdar"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), [
    pytest.param(n, k, marks=() if k in ("modernbert", "llama") else pytest.mark.slow)
    for n, kinds in KINDS.items() for k in kinds
])
def test_other_layouts_from_config_json_alone(name, kind, tmp_path):
    """Five layers, of ModernBERT's every third sees everything; [MASK] and the shift are not in
    config.json."""
    sizes = dict(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_hidden_layers=5,
        vocab_size=90, max_position_embeddings=128, pad_token_id=0,
    )  # fmt: skip
    if kind in ("dream", "sdar"):  # whose classes have an id of [MASK]
        sizes["mask_token_id"] = 80
    kinds = {"dream": "Dream"}
    few = {} if kind in ("bert", "modernbert") else {"num_key_value_heads": 2, "head_dim": 8}
    content = {"model_type": kinds.get(kind, kind), **sizes, **few}
    (tmp_path / "config.json").write_text(json.dumps(content))
    shift = 0 if kind == "llama" else 1
    config = dataclasses.replace(
        presets.debug(), **MODES[name], model=str(tmp_path), logit_shift=shift,
        lora=c.LoraConfig(rank=4 if name == "cached" else 0),
    )  # fmt: skip
    shape = hollow_run.shape_of(config)
    found = dry_run.count(config, shape)
    real = wrap(model_class(shape)(shape), family_of(shape))
    if config.lora.rank:
        add_lora(real, config.lora, seed=0)
    assert dataclasses.astuple(found) == tuple(dry_run.step_of(config, real.train()))
    assert found.tokens and found.flops


@pytest.mark.parametrize("kind", thinned(["llada2_moe", "lladamoe", "sdar_moe"]))
def test_mixtures_of_experts(kind):
    """Three layers, the first one dense in two of the families; adapters are on experts. On a card
    one product takes the place of those of a layer's experts."""
    shape = copy.deepcopy(EXPERTS[kind])
    shape.num_hidden_layers, shape.moe_intermediate_size = 3, 16
    config = dataclasses.replace(
        presets.debug(), context="block_causal", block_size=8, gen_length=32, max_length=64,
        lora=c.LoraConfig(rank=8, targets="experts", dropout=0.0),
    )  # fmt: skip
    real = new_backbone(shape)
    add_lora(real, config.lora, seed=0)
    found = dry_run.count(dataclasses.replace(config, device="cuda"), shape)
    assert dataclasses.astuple(found) == tuple(dry_run.step_of(config, real.train()))


# What the published config.json of each preset's model says of its sizes.
HEADS = {"num_attention_heads": 16, "head_dim": 128, "hidden_size": 2048}
TOP8 = {"num_experts_per_tok": 8, "max_position_embeddings": 32768, "eos_token_id": 151645}
PUBLISHED = {
    "llada-moe-7b-lora": {
        "model_type": "llada", "architectures": ["LLaDAMoEModelLM"], "hidden_size": 2048,
        "dense_intermediate_size": 8192, "expert_intermediate_size": 1024, "num_experts": 64,
        "num_hidden_layers": 16, "num_attention_heads": 16, "vocab_size": 157184,
    },
    "sdar-30b-a3b-lora": {
        **HEADS, "model_type": "sdar_moe", "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
        "moe_intermediate_size": 768, "vocab_size": 151936, "tie_word_embeddings": False,
    },
    "llada2-mini-lora": {
        **HEADS, "model_type": "llada2_moe", "intermediate_size": 5120, "num_hidden_layers": 20,
        "num_key_value_heads": 4, "num_experts": 256, "moe_intermediate_size": 512, "n_group": 8,
        "topk_group": 4, "routed_scaling_factor": 2.5, "partial_rotary_factor": 0.5,
        "vocab_size": 157184, "tie_word_embeddings": False, "first_k_dense_replace": 1,
    },
    "fast-dllm-v2-7b-lora": {
        "model_type": "Fast_dLLM_Qwen", "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "vocab_size": 152064, "tie_word_embeddings": False, "bd_size": 32,
    },
}  # fmt: skip
WEIGHTS = {  # GiB of bfloat16: 7.4, 30.5, 16.3 and 7.6 G, and of fp32 adapters
    "llada-moe-7b-lora": 14.0, "sdar-30b-a3b-lora": 57.1, "llada2-mini-lora": 30.7,
    "fast-dllm-v2-7b-lora": 16.6,
}  # fmt: skip


@pytest.mark.parametrize("preset", thinned(PUBLISHED, 4))
def test_a_preset_fits_its_card(preset, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(TOP8 | PUBLISHED[preset]))
    words = ["--model", str(tmp_path), "--dry-run", "--memory", "80GB"]
    with pytest.raises(SystemExit, match="0"):
        main(["train", preset, *words])
    out = capsys.readouterr().out
    assert "card: it fits 74.51 GiB, with a tenth to spare" in out
    assert float(re.search(r"weights ([\d.]+) GiB", out)[1]) == pytest.approx(WEIGHTS[preset], 0.01)


@pytest.mark.parametrize(("preset", "recipe"), [
    ("sdar-30b-a3b-lora", "sdar-dynamic"), ("llada2-mini-lora", "llada2"),
    ("fast-dllm-v2-7b-lora", "fast-dllm-v2"),
])  # fmt: skip
def test_a_preset_trains_what_its_recipe_decodes(preset, recipe):
    config, settings = presets.PRESETS[preset](), RECIPES[recipe].settings
    assert f"--recipe {recipe}." in presets.PRESETS[preset].__doc__.replace("\n    ", " ")
    assert (config.block_size, config.context) == (settings["block_size"], settings["context"])


def test_what_it_prints(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["train", "llada-8b-dense", "--dry-run"])
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["tokens through the layers"] == "15,360 an update, 3,072,000 in all"
    assert lines["supervised tokens"] == "4,096 an update, 819,200 in all"
    assert "G per supervised token" in lines["FLOPs"]
    # 8.02 G weights in bfloat16; 671 M adapters in float32 with gradient and two moments.
    weights = "weights 17.43 GiB, gradients 2.50 GiB, moments 5.00 GiB, activations "
    assert lines["memory"].partition(" at most: ")[2].startswith(weights)


@pytest.mark.parametrize(("words", "message"), [
    (["debug", "--objective.name", "mdlm"], "counts blockwise, classical, uniform SFT"),
    (["llada-moe-7b-lora"], "hf download inclusionAI/LLaDA-MoE-7B-A1B-Instruct config.json"),
    (["sdar-4b-lora"], "hf download JetLM/SDAR-4B-Chat config.json --local-dir DIR"),
])
def test_what_it_cannot_count(words, message, capsys):
    assert main(["train", *words, "--dry-run"]) == 2
    assert message in capsys.readouterr().err
