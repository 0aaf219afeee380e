"""A [MASK] in a spare row of a padded vocabulary: never left untrained in silence."""

import warnings

import pytest
import torch
from safetensors.torch import load_file
from tiny_tokenizer import byte_tokenizer
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from bwsft import config as c
from bwsft.checkpoints.resolve import load_trained
from bwsft.commands.export import run_export
from bwsft.commands.options import ExportOptions
from bwsft.models.families import Facts
from bwsft.models.loading import as_backbone, load_backbone, set_mask
from bwsft.training.setup import train

KNOWN = 258  # byte tokens, end of text, end of turn; [MASK] will be the next
SHAPE = dict(
    vocab_size=320, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, eos_token_id=256,
)  # fmt: skip
SPARE = {
    "zero": lambda rows: torch.zeros_like(rows),
    "all alike": lambda rows: rows[:1].expand_as(rows),
    "decayed": lambda rows: rows * 1e-3,
    "all but alike": lambda rows: rows[:1] + 1e-3 * rows,
}


@pytest.fixture
def folder(tmp_path):
    def make(spare=None, tied=True, head=None):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=tied))
        with torch.no_grad():
            for matrix, change in ((model.get_input_embeddings().weight, spare),
                                   (model.get_output_embeddings().weight, head)):  # fmt: skip
                if change:
                    matrix[KNOWN:] = SPARE[change](matrix[KNOWN:].clone())
        model.save_pretrained(tmp_path / "model")
        byte_tokenizer(
            eos_token="<|endoftext|>", additional_special_tokens=["<|end|>"]
        ).save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return make


def loaded(folder):
    return load_backbone(folder, facts=Facts(KNOWN, 1, 256))


@pytest.mark.parametrize("spare", SPARE)
def test_an_untrained_row_is_the_mean_of_the_trained_ones(folder, spare):
    path = folder(spare)
    before = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    for _ in range(2):  # the file stays as it is, so every load says so
        with pytest.warns(UserWarning, match=r"\[MASK\], id 258, is a spare row .*never trained"):
            backbone = loaded(path)
        rows = backbone.base_model.get_input_embeddings().weight
        torch.testing.assert_close(rows[KNOWN], before[:KNOWN].mean(0), rtol=1e-6, atol=1e-8)
        assert torch.equal(rows[:KNOWN], before[:KNOWN])
        assert torch.equal(rows[KNOWN + 1 :], before[KNOWN + 1 :])
        assert backbone.head()[0] is rows


@pytest.mark.parametrize("head", [None, "zero"])
def test_a_head_of_its_own_is_judged_by_itself(folder, head):
    path = folder("all alike", tied=False, head=head)
    before = load_file(path / "model.safetensors")["lm_head.weight"]
    with pytest.warns(UserWarning, match="spare row"):
        row = loaded(path).head()[0][KNOWN]
    expected = before[KNOWN] if head is None else before[:KNOWN].mean(0)
    torch.testing.assert_close(row, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("head", [None, "zero"])
def test_a_row_that_may_be_trained_is_left_alone(folder, head):
    path = folder(tied=False, head=head)
    before = load_file(path / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backbone = loaded(path)
    assert torch.equal(backbone.model.get_input_embeddings().weight,
                       before["model.embed_tokens.weight"])  # fmt: skip
    assert torch.equal(backbone.head()[0], before["lm_head.weight"])


@pytest.mark.filterwarnings("ignore:.*spare row")
def test_training_decoding_and_export_have_the_same_row(folder, tiny, tmp_path):
    """Nothing of it is stored, so a base that is loaded again must give the same numbers."""
    base = folder("zero")
    shared = dict(
        model=str(base), tokenizer=None, mask_token="<|hole|>", logit_shift=1, steps=4,
        lora=c.LoraConfig(rank=2, alpha=4, dropout=0.0), out=str(tmp_path / "run"), save_every=2,
        dataset=c.DataConfig(template="none", holdout=6, cache_dir=str(tmp_path / "cache")),
    )  # fmt: skip
    assert train(tiny(**shared)) == 0
    run = load_trained(str(tmp_path / "run"), device="cpu")
    expected = loaded(base).base_model.get_input_embeddings().weight
    assert torch.equal(run.backbone.base_model.get_input_embeddings().weight, expected)
    assert run.backbone.family.mask_id == KNOWN and expected[KNOWN].any()
    run_export(ExportOptions(str(tmp_path / "run"), tmp_path / "out"))
    stored = load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(stored, expected)
    again = load_trained(str(tmp_path / "out"), device="cpu").backbone
    ids = torch.tensor([[5, KNOWN, 70, KNOWN]])
    models = [backbone.model for backbone in (again, run.backbone)]
    for model in models:  # called without their backbones
        model.set_attn_implementation("sdpa")
    with torch.no_grad():
        torch.testing.assert_close(*[model(ids).logits for model in models])


def test_a_model_of_transformers_gets_it_too(folder):
    path = folder("zero")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), byte_tokenizer(
        eos_token="<|endoftext|>", additional_special_tokens=["<|end|>"]
    )
    set_mask(model, tokenizer, "<|hole|>", 1)
    with pytest.warns(UserWarning, match="spare row"):
        as_backbone(model)
    assert model.get_input_embeddings().weight[KNOWN].any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        as_backbone(model)
