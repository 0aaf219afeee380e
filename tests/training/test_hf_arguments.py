"""Every field of TrainingArguments: classified, and those that touch the loss arrive there."""

import dataclasses

import peft
import pytest
import torch
from thinning import thinned
from tiny_trainer import trainer_of
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    TrainingArguments,
)

from bwsft import config as c
from bwsft.data.tokenizer import load_tokenizer
from bwsft.models.loading import set_mask
from bwsft.training.hf_arguments import HONOURED, NO_EFFECT, REFUSED, check_arguments

SHAPE = dict(
    vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
    num_attention_heads=2, max_position_embeddings=64,
)  # fmt: skip


def test_every_field_is_classified_once():
    """A new transformers with a new field fails here until somebody reads what it does."""
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    groups = [set(HONOURED), set(NO_EFFECT), set(REFUSED)]
    assert sum(map(len, groups)) == len(set.union(*groups))
    assert not fields - set.union(*groups), "read their documentation, then add them to a group"
    # Older and newer releases may lack some, but no field may be made up.
    newer = {"activation_checkpointing", "activation_checkpointing_kwargs"}
    assert set.union(*groups) - fields <= newer


ASKED = {
    "label_smoothing_factor": 0.1, "neftune_noise_alpha": 5.0, "use_liger_kernel": True,
    "data_seed": 3, "include_for_metrics": ["inputs"], "batch_eval_metrics": True,
    "fsdp": "full_shard", "deepspeed": {"zero": 2}, "parallelism_config": object(),
    "train_sampling_strategy": "batch_rebalance", "accelerator_config": {"split_batches": True},
}  # fmt: skip


@pytest.mark.parametrize("name", sorted({*REFUSED, *ASKED}))
def test_what_is_refused_is_named(tmp_path, name):
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    check_arguments(args)
    if name == "accelerator_config":
        args = TrainingArguments(str(tmp_path), use_cpu=True, **{name: ASKED[name]})
    else:
        setattr(args, name, ASKED[name])  # some need libraries before they can be asked for
    remedy = "leave|use bwsft|there are no|start it|has random"
    with pytest.raises(ValueError, match=f"{name}.*({remedy})"):
        check_arguments(args)


@dataclasses.dataclass
class Own(TrainingArguments):
    packing: bool = False
    columns: list = dataclasses.field(default_factory=list)
    untouched: int = 3


def test_fields_of_a_subclass_are_named(tmp_path):
    with pytest.warns(UserWarning, match="does not know packing, columns of Own"):
        check_arguments(Own(str(tmp_path), use_cpu=True, packing=True, columns=["a"]))


@pytest.fixture
def start(tiny, model_folder, tmp_path):
    """start(kind, config changes, **TrainingArguments) -> a trainer and its recorder."""
    optim = c.OptimConfig(lr=3e-3, warmup=0.0, floor=1.0)
    dataset = dataclasses.replace(tiny().dataset, holdout=8)

    def make(kind="llada", changes=None, wrap=None, **options):
        folder = str(model_folder(n_layers=3))
        tokenizer = load_tokenizer(folder)
        base = {"model": folder, "tokenizer": None, "steps": 2, "optim": optim, "dataset": dataset}
        config = tiny(**(base | (changes or {})))
        torch.manual_seed(0)
        if kind == "llada":
            model = AutoModelForCausalLM.from_pretrained(folder)
        elif kind == "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, num_key_value_heads=2, eos_token_id=256))
        else:
            model = BertForMaskedLM(BertConfig(**SHAPE))
        if kind != "llada":
            set_mask(model, tokenizer, tokenizer.mask_token, int(kind == "qwen2"))
        model = wrap(model) if wrap else model
        return trainer_of(model, config, tokenizer, tmp_path / "hf", **options)

    return make


MLP = {"llada": "LladaBlock", "qwen2": "Qwen2MLP", "bert": "BertIntermediate"}


OLD_NAMES = pytest.mark.filterwarnings("ignore:.*deprecated")  # which every release knows


@pytest.mark.parametrize("kind", thinned(MLP))
@OLD_NAMES
def test_gradient_checkpointing_recomputes_layers(start, kind):
    """Of three layers each runs once more in backward, or every second one; no loss changes."""
    losses = []
    for keywords, again in ((None, 0), ({}, 3), ({"every_n_layers": 2}, 2),
                            ({"use_reentrant": True}, 3)):  # fmt: skip
        asked = {"gradient_checkpointing": keywords is not None, "max_steps": 1}
        trainer, recorder = start(kind, **asked, gradient_checkpointing_kwargs=keywords or None)
        calls = []
        for module in trainer.model.modules():
            if type(module).__name__ == MLP[kind]:
                module.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        trainer.train()
        assert len(calls) == 3 + again
        losses += recorder.losses
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)


@OLD_NAMES
def test_checkpointed_adapters_learn(start):
    """Whose base has no gradient of its own: transformers makes the embeddings' output have one."""
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "ff_out"], task_type="CAUSAL_LM",
                           exclude_modules=r".*transformer\.ff_out")  # fmt: skip
    found = []
    for keywords in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        asked = {"gradient_checkpointing": keywords is not None}
        asked["gradient_checkpointing_kwargs"] = keywords
        trainer, recorder = start(wrap=lambda m: peft.get_peft_model(m, lora), **asked)
        trainer.train()
        found.append(recorder.losses)
    assert found[1] == pytest.approx(found[0], rel=1e-6) == found[2]
    assert found[0][0] != found[0][1]


def test_a_head_and_an_embedding_that_are_trained_whole(start):
    """modules_to_save: peft's copies are what the loss sees and what trains; the rest is frozen."""
    lora = peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["wte", "transformer.ff_out"],
        task_type="CAUSAL_LM",
    )  # fmt: skip
    trainer, _ = start(wrap=lambda model: peft.get_peft_model(model, lora))
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    moved = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    saved = {n for n in before if "modules_to_save" in n}
    assert len(saved) == 2 and saved < moved and all("lora" in n for n in moved - saved)


def test_tokens_seen_are_those_of_the_batches(start):
    """No padding is in them, so both ways to count agree."""
    for way in ("all", "non_padding"):
        trainer, _ = start(include_num_input_tokens_seen=way)
        trainer.train()
        order = list(trainer.get_train_dataloader())[:2]
        assert trainer.state.num_input_tokens_seen == sum(len(batch["ids"]) for batch in order) > 0


def test_examples_of_like_length_come_together(start):
    trainer, _ = start(train_sampling_strategy="group_by_length", gradient_accumulation_steps=2,
                       per_device_train_batch_size=2)  # fmt: skip
    lengths = trainer.lengths(trainer.train_dataset)
    batches = list(trainer.get_train_dataloader())
    assert sorted(n for b in batches for n in b["cu_seqlens"].diff().tolist()) == sorted(lengths)
    visited = [int(i) for batch in batches for i in batch["sample_ids"]]
    assert visited == [int(i) for b in trainer.get_train_dataloader() for i in b["sample_ids"]]
    trainer.state.epoch = 1.0
    assert visited != [int(i) for b in trainer.get_train_dataloader() for i in b["sample_ids"]]
    for row, length in zip(trainer.train_dataset, range(32, 0, -1), strict=True):
        row["length"] = length  # a column of the user's: the first update has the longest
    first = [int(i) for b in list(trainer.get_train_dataloader())[:2] for i in b["sample_ids"]]
    assert int(trainer.train_dataset[0]["sample_id"]) in first


def test_the_other_orders_and_batches(start):
    trainer, _ = start(train_sampling_strategy="sequential", remove_unused_columns=False,
                       per_device_train_batch_size=5, dataloader_drop_last=True)  # fmt: skip
    seen = [int(i) for batch in trainer.get_train_dataloader() for i in batch["sample_ids"]]
    assert seen == [int(row["sample_id"]) for row in trainer.train_dataset][:30]  # of 32


def test_an_average_of_each_process_or_of_all(start, monkeypatch):
    for everywhere, count in ((True, 7), (False, 4)):
        trainer, _ = start(average_tokens_across_devices=everywhere)
        # Older releases switch it off where there is one process.
        trainer.args.average_tokens_across_devices = everywhere
        other = torch.tensor(3)
        monkeypatch.setattr(trainer.accelerator, "gather", lambda n, o=other: torch.stack([n, o]))
        batches = iter(trainer.get_train_dataloader())
        assert trainer.get_batch_samples(batches, 1, torch.device("cpu"))[1] == count


@pytest.mark.slow
def test_a_batch_size_is_found(start, monkeypatch):
    trainer, recorder = start(auto_find_batch_size=True, per_device_train_batch_size=3)
    sizes, forward = [], trainer.compute_loss

    def small_memory(model, inputs, *args, **options):
        sizes.append(len(inputs["sample_ids"]))
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(model, inputs, *args, **options)

    monkeypatch.setattr(trainer, "compute_loss", small_memory)
    trainer.train()
    assert sizes[0] == 3 and sizes[-2:] == [2, 2] and len(recorder.losses) == 2


@pytest.mark.slow
def test_compiled_the_losses_are_the_same(start):
    """The eager backend of torch.compile: the graph is taken, nothing is generated."""
    cached = {"context": "cached", "draws_per_context": 2}
    (plain, expected), (compiled, found) = start(changes=cached), start(
        changes=cached, torch_compile=True, torch_compile_backend="eager"
    )
    for trainer in (plain, compiled):
        trainer.train()
    assert type(compiled.model_wrapped).__name__ == "OptimizedModule"
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)


def test_evaluation_before_training_and_in_half_precision(start):
    trainer, _ = start(eval_on_start=True, eval_strategy="steps", eval_steps=1, max_steps=1,
                       prediction_loss_only=True, load_best_model_at_end=True, save_steps=1,
                       save_strategy="steps")  # fmt: skip
    trainer.train()
    losses = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    assert len(losses) == 2 and losses[1] < losses[0]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[1], rel=1e-6)
    trainer.args.bf16_full_eval = True
    rounded = trainer.evaluate()["eval_loss"]
    assert rounded != losses[1] and rounded == pytest.approx(losses[1], rel=2e-2)  # 8 bits
