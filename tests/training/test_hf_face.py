"""BlockwiseTrainer with names, records, peft_config and BlockwiseConfig, as TRL's users call it."""

import dataclasses
import json
import types

import pandas
import peft
import pytest
import torch
from datasets import Dataset, DatasetDict
from tiny_folders import qwen
from tiny_trainer import Losses
from transformers import AutoModelForCausalLM, HfArgumentParser, TrainingArguments

import bwsft
from bwsft import BlockwiseConfig, BlockwiseTrainer
from bwsft import config as c
from bwsft.data.tokenizer import load_tokenizer
from bwsft.models.loading import load_backbone
from bwsft.models.lora import add_lora
from bwsft.training import trainer as t
from bwsft.training.hf_config import OWN
from bwsft.utils.lines import one_line

SIZES = {"block_size": 4, "gen_length": 16, "max_length": 40, "seed": 3}
QUIET = {"save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True}


@pytest.fixture
def records(data_file):
    return [json.loads(line) for line in data_file.read_text().splitlines()]


@pytest.fixture
def start(model_folder, records, tmp_path):
    """start(**arguments of BlockwiseConfig) -> a trainer of a model's folder; `trainer` holds other
    arguments of BlockwiseTrainer."""
    folder = str(model_folder())

    def make(trainer=None, **options):
        options = {"per_device_train_batch_size": 4, "max_steps": 3, "logging_steps": 1} | options
        args = BlockwiseConfig(str(tmp_path / "out"), **(SIZES | QUIET | options))
        given = {"model": folder, "train_dataset": records, "callbacks": [Losses()]}
        return BlockwiseTrainer(args=args, **(given | (trainer or {})))

    make.folder = folder
    return make


def losses(trainer):
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


MODES = {
    "exact": {"objective": "blockwise", "weight": "rate", "empty": "skip", "blocks": "traversal",
              "active_blocks": 2},
    "cached": {"draws_per_context": 2, "low": 0.2, "high": 0.9},
    "block_causal": {
        "canvas": "response", "draws_per_context": 2, "pairs": True, "context_grad": False,
        "block_size_schedule": 0.5,
    },
}


@pytest.mark.parametrize("context", MODES)
def test_records_train_as_in_a_run(start, tiny, make_run, records, context):
    """The same records, held-out examples and losses, in every context mode and over two epochs.
    Both sum the same float32 numbers, in another order at most: 1e-6 relative."""
    options = MODES[context]
    names = {field.name for field in dataclasses.fields(c.ObjectiveConfig)}
    own = {name: value for name, value in options.items() if name in names}
    canvas = options.get("canvas", "fixed")
    config = tiny(
        model=start.folder, tokenizer=None, steps=10, context=context,
        draws_per_context=options.get("draws_per_context", 1),
        active_blocks=options.get("active_blocks", 1),
        block_size_schedule=options.get("block_size_schedule", 0.0),
        dataset=dataclasses.replace(tiny().dataset, holdout=8, canvas=canvas),
        objective=c.ObjectiveConfig(**own), eval=c.EvalConfig(draws=3),
        optim=c.OptimConfig(lr=3e-3, warmup=0.0, floor=1.0),
    )  # fmt: skip
    run = make_run(config)
    trainer = start(
        {"train_dataset": Dataset.from_list(records)}, context=context, max_steps=10, holdout=0.2,
        learning_rate=3e-3, lr_scheduler_type="constant", eval_draws=3,
        per_device_eval_batch_size=2, **options,
    )  # fmt: skip
    assert len(trainer.train_dataset) == 32 and len(trainer.eval_dataset) == 8
    assert trainer.evaluate()["eval_loss"] == pytest.approx(t.evaluate(run), rel=1e-6)
    ours = [t.train_step(run, step).loss for step in range(10)]
    assert losses(trainer) == pytest.approx(ours, rel=1e-6) and len(set(ours)) == 10


def test_every_setting_reaches_the_config(tmp_path):
    """Set to another value than its default, each own field changes what it says."""
    plain = BlockwiseConfig(str(tmp_path), **QUIET)
    assert plain.run_config() == c.Config(
        gen_length=None, max_length=None, dataset=c.DataConfig(template="chat", holdout=0),
        lora=c.LoraConfig(rank=0),
    )  # fmt: skip
    other = dict(
        block_size=8, gen_length=64, max_length=99, context="cached", draws_per_context=2,
        active_blocks=2, block_size_schedule=0.5, clean_attention="causal", ar_weight=0.5,
        mask_token="[M]", logit_shift=1, template="none", template_args="a=1", columns="prompt=q",
        subset="main", split="train[:9]", turns="all", on_bad="skip", canvas="response",
        eval_draws=2, objective="classical",
        blocks="length", weight="flat", empty="skip", low=0.1, high=0.9, pairs=True,
        suffix_weight=0.5, confidence=0.5, context_grad=False,
    )  # fmt: skip
    used = {"holdout", "sample_prompts", "sample_steps"}  # by the Trainer itself
    renamed = {"learning_rate", "adam_beta1", "adam_beta2", "logging_steps"}
    assert OWN == other.keys() | used | renamed
    for name, value in other.items():
        found = dataclasses.replace(plain, **{name: value}).run_config()
        (difference,) = c.differences(plain.run_config(), found)
        assert difference.endswith(f" -> {value}"), difference
    words = "--output_dir out --block_size 8 --context cached --logit_shift 1 --sample_prompts a b"
    (parsed,) = HfArgumentParser(BlockwiseConfig).parse_args_into_dataclasses(words.split())
    assert (parsed.block_size, parsed.context, parsed.logit_shift) == (8, "cached", 1)
    assert parsed.sample_prompts == ["a", "b"] and parsed.adam_beta1 == 0.95


def turn(role, content):
    return {"role": role, "content": content}


SHAPES = {
    "DataFrame": lambda rows: pandas.DataFrame(rows),
    "prompt, completion": lambda rows: Dataset.from_list(
        [{"prompt": r["query"], "completion": r["response"]} for r in rows]
    ),
    "turns": lambda rows: [
        {"prompt": [turn("user", r["query"])], "completion": [turn("assistant", r["response"])]}
        for r in rows
    ],
    "messages": lambda rows: DatasetDict(train=Dataset.from_list([
        {"messages": [turn("user", r["query"]), turn("assistant", r["response"])]} for r in rows
    ])),
}  # fmt: skip


def ids(dataset):
    return [(row["prompt"].tolist(), row["response"].tolist(), row["sample_id"]) for row in dataset]


def test_records_of_every_shape_are_the_same_examples(start, records, data_file, capsys):
    expected = ids(start().train_dataset)
    assert len(expected) == 40 and "kept 40 of 40 records" in capsys.readouterr().out
    for make in SHAPES.values():
        data = {"train_dataset": make(records), "eval_dataset": make(records[:6])}
        trainer = start(data)
        assert ids(trainer.train_dataset) == expected
        found = trainer.eval_dataset
        assert ids(found if isinstance(found, list) else found["train"]) == expected[:6]
    assert ids(start({"train_dataset": str(data_file)}).train_dataset) == expected
    names = ("prompt", "response", "sample_id")
    made = Dataset.from_list([dict(zip(names, row, strict=True)) for row in expected])
    trainer = start({"train_dataset": made, "eval_dataset": records[:2]})
    assert trainer.train_dataset is made and len(trainer.eval_dataset) == 2
    assert losses(trainer) == losses(start())  # no column got lost
    with pytest.raises(ValueError, match="record 1 .*response is missing"):
        start({"train_dataset": [{"prompt": "1+1"}]})


def test_peft_config(start, tmp_path):
    """LoRA without targets is the adapter of `bwsft train`; base in bf16 if args say so."""
    lora = peft.LoraConfig(r=3, lora_alpha=6, lora_dropout=0.0)
    trainer = start({"peft_config": lora}, learning_rate=1e-2)
    ours = load_backbone(start.folder)
    add_lora(ours, c.LoraConfig(rank=3, alpha=6, dropout=0.0), SIZES["seed"])
    expected = ours.model.state_dict()
    found = trainer.model.state_dict()
    assert found.keys() == expected.keys() and lora.target_modules is None
    assert all(torch.equal(found[name], expected[name]) for name in found)
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    stored = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert stored["base_model_name_or_path"] == start.folder
    decoder = bwsft.load(tmp_path / "adapter")
    trained = peft.get_peft_model_state_dict(trainer.model)
    loaded = peft.get_peft_model_state_dict(decoder.backbone.model)
    assert all(torch.equal(loaded[name], trained[name]) for name in trained)
    half = start({"peft_config": lora}, bf16=True)
    kinds = {"lora" in n: p.dtype for n, p in half.model.named_parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}
    assert {p.dtype for p in start(bf16=True).model.parameters()} == {torch.float32}
    assert len(losses(half)) == 3


def test_adapters_it_cannot_take(start):
    for config, match in (
        (peft.LoraConfig(target_modules=["q_proj", "o_proj"]), "no module .* called o_proj"),
        (peft.LoraConfig(target_modules=["ff_out"]), "LM head"),
        (peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"), "take LoRA"),
    ):
        with pytest.raises(ValueError, match=match):
            start({"peft_config": config})
    lora = peft.LoraConfig(target_modules=["q_proj"])
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(start.folder), lora)
    with pytest.raises(ValueError, match="has an adapter already"):
        start({"peft_config": lora, "model": model})


def test_a_loaded_model_and_its_tokenizer(start, tokenizer_folder):
    """The tokenizer is that of the folder that the model names, or the one that is given."""
    model = AutoModelForCausalLM.from_pretrained(start.folder)
    expected = losses(start())
    assert losses(start({"model": model})) == expected
    model = AutoModelForCausalLM.from_pretrained(start.folder)
    model.name_or_path = ""
    with pytest.raises(ValueError, match="pass processing_class=tokenizer"):
        start({"model": model})
    words = load_tokenizer(tokenizer_folder)
    assert losses(start({"model": model, "processing_class": words})) == expected
    with pytest.raises(ValueError, match="set_mask first"):
        start({"model": model}, mask_token="<|mask|>")
    with pytest.raises(FileNotFoundError, match="neither a folder here"):
        start({"model": "nobody/nothing", "processing_class": words})


def test_a_causal_model_by_its_name(start, tokenizer_folder, tmp_path):
    """mask_token and logit_shift make it one that unmasks."""
    qwen().save_pretrained(tmp_path / "qwen")
    load_tokenizer(tokenizer_folder).save_pretrained(tmp_path / "qwen")
    named = {"model": tmp_path / "qwen"}
    for shift, context in ((0, "exact"), (1, "exact"), (1, "block_causal")):
        options = {"logit_shift": shift, "context": context, "max_steps": 1}
        trainer = start(named, mask_token="[MASK]", **options)
        assert trainer.backbone.family.logit_shift == shift and len(losses(trainer)) == 1


def test_arguments_it_cannot_take(start, records, tmp_path, recwarn):
    model = start.folder
    plain = TrainingArguments(str(tmp_path), **QUIET)
    for match, given in (
        (r"pass args=BlockwiseConfig\(...\), or config=", {"args": plain}),
        ("leave config out", {"args": BlockwiseConfig(str(tmp_path)), "config": c.Config()}),
    ):
        with pytest.raises(ValueError, match=match):
            BlockwiseTrainer(model, train_dataset=records, **given)
    with pytest.raises(ValueError, match="sample_steps must be at least 1, and needs"):
        start(sample_steps=2)
    for wrong in (-1, 1.5):
        with pytest.raises(ValueError, match="holdout must be"):
            start(holdout=wrong)
    with pytest.raises(ValueError, match="holdout is for a train_dataset of records"):
        start({"eval_dataset": records}, holdout=4)
    with pytest.raises(ValueError, match="must divide"):
        start(gen_length=18)
    with pytest.raises(ValueError, match="prompt 0 has 61 tokens"):
        start(sample_prompts=["1" * 60])
    start(context="cached", holdout=3, sample_prompts=["1+1"])
    assert not [w for w in recwarn if "does not know" in str(w.message)]


def test_samples(start, records, tmp_path, capsys):
    """At evaluations and checkpoints: what the checkpoint answers, and no loss changes."""
    lora = {"peft_config": peft.LoraConfig(r=2, lora_dropout=0.3)}
    options = dict(context="cached", max_steps=4, learning_rate=1e-2, holdout=4)
    expected = losses(start(lora, **options))
    capsys.readouterr()
    told = types.SimpleNamespace(texts=[], tables=[])
    prompts = ["7+1", "14\x1b[2J+2"]
    trainer = start(lora, **options, sample_prompts=prompts, save_strategy="steps", save_steps=2,
                    eval_strategy="steps", eval_steps=4)  # fmt: skip
    wandb = types.SimpleNamespace(
        run=1, log=told.tables.append, Table=lambda columns, data: (columns, data)
    )
    losses_callback = trainer.callback_handler.callbacks[-2]
    losses_callback.tb_writer = types.SimpleNamespace(add_text=lambda *a: told.texts.append(a))
    losses_callback._wandb = wandb
    assert losses(trainer) == expected
    assert list(trainer.samples.answers) == [2, 4]
    for step, answers in trainer.samples.answers.items():
        again = bwsft.load(tmp_path / f"out/checkpoint-{step}", batch_size=1)
        assert [answer.text for answer in answers] == again.generate(prompts)
    lines = [line for line in capsys.readouterr().out.split("\n") if line.startswith("step ")]
    assert len(lines) == 4 and "\x1b" not in "".join(lines)
    first = trainer.samples.answers[2]
    assert lines[0].startswith(f"step 2: 7+1 -> {one_line(first[0].text)} [{first[0].tokens} tok")
    assert [a[0::2] for a in told.texts] == [(f"samples/{i}", s) for s in (2, 4) for i in (0, 1)]
    rows = [[prompt, a.text] for prompt, a in zip(prompts, first, strict=True)]
    assert told.tables[0] == {"samples": (["prompt", "answer"], rows)}


def test_lengths_follow_the_records(start, records):
    trainer = start(gen_length=None, max_length=None)
    examples = ids(trainer.train_dataset)
    longest = max(len(prompt) + len(response) for prompt, response, _ in examples)
    assert len(examples) == 40 and trainer.config.max_length == longest
    most = sorted(len(response) for _, response, _ in examples)[-1]  # 99 % of 40 are all of them
    assert trainer.layout.gen_length == -(-most // 4) * 4 == 16
    with pytest.raises(ValueError, match="give the config gen_length and max_length"):
        start({"train_dataset": trainer.train_dataset}, gen_length=None)


def test_one_process_saves(start, monkeypatch, tmp_path):
    trainer = start()
    monkeypatch.setattr(TrainingArguments, "should_save", False)
    trainer._save(str(tmp_path / "saved"))  # as transformers does in every process
    assert not (tmp_path / "saved").exists()


def test_samples_by_steps_outlive_a_broken_model(start, capsys):
    trainer = start(sample_prompts=["1"], sample_steps=2, max_steps=4)
    trainer.train()
    assert list(trainer.samples.answers) == [2, 4]
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(torch.nan)
    trainer.state.global_step = 5
    trainer.samples.take(trainer.state)
    assert "step 5: no samples: " in capsys.readouterr().out and 5 not in trainer.samples.answers
