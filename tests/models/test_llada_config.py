"""What a LLaDA config builds: official tensors, refusals, initial weights, family, LoRA targets."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from tiny_llada import SMALL, backbone, config

from bwsft.models.families import family_of
from bwsft.models.llada import LladaForMaskedDiffusion
from bwsft.models.llada_config import LladaConfig
from bwsft.models.lora import LLADA_TARGETS


def test_official_names_shapes_and_parameter_count():
    folder = Path(os.environ.get("BWSFT_DATA_DIR", "/nonexistent")) / "llada_8b_instruct"
    if not folder.is_dir():
        pytest.skip("BWSFT_DATA_DIR has no llada_8b_instruct")
    with torch.device("meta"):
        model = LladaForMaskedDiffusion(LladaConfig.from_pretrained(folder))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(model.state_dict()) == set(index["weight_map"])
    assert len(model.state_dict()) == 291
    count = sum(p.numel() for p in model.parameters())
    assert count == 8_015_581_184
    assert 2 * count == index["metadata"]["total_size"]


@pytest.mark.parametrize("field, value", [
    ("block_type", "sequential"), ("block_group_size", 4), ("activation_type", "swiglu"),
    ("layer_norm_type", "default"), ("layer_norm_with_affine", False),
    ("bias_for_layer_norm", True), ("attention_layer_norm", True), ("multi_query_attention", True),
    ("alibi", True), ("rope", False), ("rope_full_precision", False),
    ("rope_scaling", {"rope_type": "linear", "factor": 2.0}), ("include_bias", True),
    ("include_qkv_bias", True), ("input_emb_norm", True), ("scale_logits", True),
    ("attention_dropout", 0.1), ("residual_dropout", 0.1), ("embedding_dropout", 0.1),
    ("init_fn", "full_megatron"), ("n_layers", 0), ("n_heads", 5), ("n_heads", 32),
    ("n_kv_heads", 3), ("embedding_size", 49), ("mlp_hidden_size", 0),
])
def test_unsupported_config_is_refused_by_name(field, value):
    config()
    with pytest.raises(ValueError, match=field):
        config(**{field: value})


def test_new_backbone_depends_on_the_seed_alone():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = backbone(torch.float32, seed=3).model.state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    again = backbone(torch.float32, seed=3).model.state_dict()
    other = backbone(torch.float32, seed=4).model.state_dict()
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert not any(torch.equal(first[n], other[n]) for n in first if "proj" in n)


@pytest.mark.parametrize("init_fn, name, std", [
    ("normal", "blocks.1.attn_out", 0.02),
    ("normal", "wte", 0.02),
    ("mitchell", "blocks.0.q_proj", 1 / 8),
    ("mitchell", "blocks.1.attn_out", 1 / 8 / 2),
    ("mitchell", "blocks.0.ff_out", 1 / 16 / math.sqrt(2)),
    ("mitchell", "ff_out", 1 / 8),
])
def test_initial_scale(init_fn, name, std):
    sizes = dict(d_model=64, mlp_hidden_size=256, vocab_size=500, init_fn=init_fn)
    weight = backbone(torch.float32, **sizes).model.get_parameter(
        f"model.transformer.{name}.weight"
    )
    assert weight.std().item() == pytest.approx(std, rel=0.06)  # 4 sigma of 4,096 draws is 4.4 %
    assert (weight.abs().max() <= 3 * std) == (init_fn == "mitchell")


def test_family_names_the_end_of_turn_of_the_published_vocabulary():
    assert family_of(config()).end_ids == (1,)
    family = family_of(LladaConfig())
    assert (family.mask_id, family.eos_id) == (126336, 126081)
    assert family.end_ids == (126081, 126348)
    assert (family.max_positions, family.logit_shift, family.attention) == (4096, 0, "full")
    for field in ("mask_token_id", "eos_token_id"):
        for value in (None, 50):
            with pytest.raises(ValueError, match=field):
                family_of(config(**{field: value}))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_wraps_seven_matrices_per_layer_and_leaves_the_head_alone(checkpointing):
    import peft

    b = backbone(torch.float32).train()
    ids, edges = torch.arange(12), torch.tensor([0, 5, 12])
    plain = b.hidden_states(ids, ids, edges)
    head = b.head()[0]
    b.model = peft.get_peft_model(
        b.model, peft.LoraConfig(r=4, target_modules=LLADA_TARGETS["all"])
    )
    layers = [m for m in b.model.modules() if isinstance(m, peft.tuners.lora.LoraLayer)]
    assert len(layers) == 7 * SMALL["n_layers"]
    assert b.head()[0] is head
    assert torch.equal(b.hidden_states(ids, ids, edges), plain)  # B starts at zero
    b.set_gradient_checkpointing(checkpointing)
    b.hidden_states(ids, ids, edges).square().sum().backward()
    with_gradient = {n for n, p in b.named_parameters() if p.grad is not None}
    assert with_gradient == {n for n, _ in b.named_parameters() if "lora_" in n}


@pytest.mark.parametrize("tied, target", [(False, "ff_out"), (True, "wte")])
def test_an_adapter_on_the_head_is_refused(tied, target):
    import peft

    b = backbone(weight_tying=tied)
    b.model = peft.get_peft_model(b.model, peft.LoraConfig(r=4, target_modules=[target]))
    with pytest.raises(ValueError, match="LM head.*anchor target_modules"):
        b.head()


def test_peft_all_linear_leaves_the_head_alone():
    import peft

    b = backbone()
    b.model = peft.get_peft_model(b.model, peft.LoraConfig(r=4, target_modules="all-linear"))
    assert isinstance(b.head()[0], torch.nn.Parameter)
