"""Adapters that plain peft made, loaded here: the same logits as in peft on the same class."""

import shutil
import warnings

import peft
import pytest
import torch
from thinning import thinned
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, BertConfig, Qwen2Config

from bwsft.checkpoints.resolve import load_trained
from bwsft.commands.export import run_export
from bwsft.commands.options import ExportOptions
from bwsft.models.backbone import active_module
from bwsft.models.loading import as_backbone, new_backbone

SHAPE = dict(
    vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=64, mask_token_id=257, eos_token_id=256,
)  # fmt: skip
CONFIGS = {
    "qwen2": Qwen2Config(**SHAPE, num_key_value_heads=2, logit_shift=1, tie_word_embeddings=True),
    "bert": BertConfig(**SHAPE),
}
RELEASED = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
QV = ["q_proj", "v_proj"]
BLOCKS = r".*\.blocks\.\d+\.(q_proj|ff_proj)"
CASES = {
    "the released list": ("llada", dict(target_modules=RELEASED, task_type="CAUSAL_LM")),
    "a pattern": ("llada", dict(target_modules=r"model\.transformer\.blocks\.1\..*_(proj|out)")),
    "all-linear": ("llada", dict(target_modules="all-linear", task_type="FEATURE_EXTRACTION")),
    "ranks and scales by pattern": (
        "llada",
        dict(
            target_modules=BLOCKS, rank_pattern={r"blocks\.0\..*": 5},
            alpha_pattern={"^never": 1, r"blocks\.1\.(q|k)_proj": 40, "ff_proj": 3},
        ),
    ),
    "rslora, one layer": (
        "llada", dict(target_modules=QV, use_rslora=True, layers_to_transform=[1],
                      layers_pattern="blocks"),
    ),
    "DoRA, one excluded": (
        "llada", dict(target_modules=[*QV, "up_proj"], exclude_modules=["up_proj"], use_dora=True)
    ),
    "an embedding": ("llada", dict(target_modules=["wte", "q_proj"])),
    "biases of B": ("llada", dict(target_modules=QV, lora_bias=True)),
    "whole head, embedding and norm": (
        "llada", dict(target_modules=BLOCKS, modules_to_save=["wte", "transformer.ff_out", "ln_f"])
    ),
    "rows of an embedding": (
        "llada", dict(target_modules=QV, trainable_token_indices={"wte": [257, 3, 40]})
    ),
    "rows of a tied embedding": ("qwen2", dict(target_modules=QV, trainable_token_indices=[9])),
    "whole embedding beside a tied head": (
        "qwen2", dict(target_modules=QV, modules_to_save=["embed_tokens"], task_type="CAUSAL_LM")
    ),
    "both, kept tied": (
        "qwen2", dict(target_modules=QV, modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    ),
    "all biases": ("qwen2", dict(target_modules=QV, bias="all")),
    "biases of the adapted": ("qwen2", dict(target_modules="all-linear", bias="lora_only")),
    "biases and a transform": (
        "bert", dict(target_modules=["query", "dense"], bias="all", modules_to_save=["transform"])
    ),
    "no biases to train": ("llada", dict(target_modules=QV, bias="all")),
}  # fmt: skip


@pytest.fixture
def base(model_folder, tokenizer_folder, tmp_path):
    def make(kind):
        if kind == "llada":
            return model_folder()
        new_backbone(CONFIGS[kind], seed=1).model.save_pretrained(tmp_path / kind)
        return shutil.copytree(tokenizer_folder, tmp_path / kind, dirs_exist_ok=True)

    return make


def plain(folder):
    auto = AutoModelForMaskedLM if folder.name == "bert" else AutoModelForCausalLM
    return auto.from_pretrained(folder).eval()


def logits(model):
    ids = (torch.arange(40).view(2, 20) * 7) % 256
    with torch.no_grad():
        return model(ids).logits


def trained_by_peft(folder, out, **options):
    """An adapter of random weights, as peft saves it."""
    model = peft.get_peft_model(plain(folder), peft.LoraConfig(r=3, lora_alpha=6, **options))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += 0.2 * torch.randn(p.shape, generator=generator)
    model.save_pretrained(out)
    return model


@pytest.mark.parametrize("case", thinned(CASES))
@pytest.mark.filterwarnings("ignore:.*(save_embedding_layers|tie_word_embeddings|tied|biases)")
def test_what_peft_loads_loads_here(base, tmp_path, case):
    """Bit for bit: the same modules run with the same weights."""
    kind, options = CASES[case]
    folder, out = base(kind), tmp_path / "adapter"
    trained_by_peft(folder, out, **options)
    theirs = peft.PeftModel.from_pretrained(plain(folder), out).eval()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        backbone = load_trained(str(out)).backbone
    notes = [str(w.message) for w in said if "has no module" in str(w.message)]
    if case == "the released list":
        assert "no module down_proj, gate_proj, o_proj" in notes[0] and len(notes) == 1
    else:
        assert not notes
    backbone.base_model.set_attn_implementation("sdpa")
    expected = logits(theirs)
    assert torch.equal(logits(backbone.model), expected)
    assert not torch.allclose(expected, logits(plain(folder)), atol=1e-2)
    head = active_module(theirs.get_base_model().get_output_embeddings())
    if not options.get("trainable_token_indices"):
        assert torch.equal(backbone.head()[0], head.weight)
    assert not any(p.requires_grad for p in backbone.parameters())
    exported(out, tmp_path / "merged", expected, case)


MERGED = {"the released list", "a pattern", "all-linear", "ranks and scales by pattern",
          "rslora, one layer", "no biases to train"}  # fmt: skip


def exported(adapter, out, expected, case):
    """Merged, or refused: nothing that the adapter holds may get lost. Rounding: an update is added
    to the weights instead of the result, each 1e-7 of numbers below ten."""
    if case not in MERGED:
        with pytest.raises(ValueError, match="merge it with peft"):
            run_export(ExportOptions(str(adapter), out))
        return
    run_export(ExportOptions(str(adapter), out))
    torch.testing.assert_close(logits(plain(out)), expected, rtol=1e-4, atol=1e-5)


def test_adapters_that_are_not_in_the_layers_are_refused(base):
    model = plain(base("llada"))
    soft = peft.PromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=2, num_layers=2, token_dim=32,
        num_attention_heads=2,
    )  # fmt: skip
    with pytest.raises(ValueError, match="peft_type PROMPT_TUNING.*take LoRA"):
        as_backbone(peft.get_peft_model(model, soft))


def test_an_adapter_on_the_head_is_refused_by_its_field(base, tmp_path):
    folder = base("llada")
    trained_by_peft(folder, tmp_path / "adapter", target_modules=["ff_out"])
    with pytest.raises(ValueError, match="target_modules has model.transformer.ff_out, the LM"):
        load_trained(str(tmp_path / "adapter"))
