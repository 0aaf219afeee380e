"""BlockwiseTrainer against bwsft's own loop: the same losses, weights and adapters."""

import copy
import dataclasses
import json
import os
import subprocess
import sys

import peft
import pytest
import torch
from safetensors.torch import load_file
from thinning import thinned
from tiny_trainer import arguments, trainer_of
from transformers import AutoModelForCausalLM

from bwsft import config as c
from bwsft.checkpoints.generation_config import DecodingContract, read_contract
from bwsft.checkpoints.resolve import load_trained
from bwsft.data.tokenizer import load_tokenizer
from bwsft.models.lora import LLADA_TARGETS
from bwsft.training import trainer as t
from bwsft.training.hf_trainer import BlockwiseCollator, BlockwiseTrainer
from bwsft.training.run_data import layout_of
from bwsft.training.setup import train

HOLDOUT = {"dataset": c.DataConfig(template="chat", holdout=8)}  # 32 examples, 8 updates an epoch


@pytest.fixture
def flat(tiny):
    """A config whose learning rate never moves, as the Trainer's constant schedule has it."""
    optim = dataclasses.replace(tiny().optim, warmup=0.0, floor=1.0)
    return lambda **changes: tiny(**{"optim": optim, **HOLDOUT, **changes})


LORA = c.LoraConfig(rank=3, alpha=6, dropout=0.0)
CASES = {
    "exact": {},
    "exact, three draws": {"draws_per_context": 3},
    "cached, two draws, LoRA": {"context": "cached", "draws_per_context": 2, "lora": LORA},
    "block_causal, a pair, LoRA": {
        "context": "block_causal", "draws_per_context": 2, "lora": LORA,
        "objective": c.ObjectiveConfig(pairs=True),
    },
    "classical, LoRA": {"objective": c.ObjectiveConfig(name="classical"), "lora": LORA},
    "traversal, 1/rate": {
        "objective": c.ObjectiveConfig(blocks="traversal", weight="rate", empty="skip"),
    },
}


@pytest.mark.parametrize("case", thinned(CASES))
def test_same_losses_and_weights_as_our_loop(flat, make_run, tmp_path, case):
    """Ten updates over two epochs. Both sum the same float32 numbers, in another order at most:
    what remains is rounding, 1e-6 relative in a loss and what Adam makes of it in a weight."""
    run = make_run(flat(**CASES[case]))
    model = copy.deepcopy(run.backbone.model)
    ours = [t.train_step(run, step).loss for step in range(10)]
    trainer, recorder = trainer_of(model, run.config, run.files.tokenizer, tmp_path / "hf")
    trainer.train()
    assert recorder.losses == pytest.approx(ours, rel=1e-6)
    theirs = dict(model.named_parameters())
    moved = 0.0
    for name, p in run.backbone.model.named_parameters():
        torch.testing.assert_close(theirs[name], p, rtol=1e-4, atol=1e-6)
        moved += p.requires_grad
    assert moved and len(set(ours)) == 10


def test_accumulation_changes_nothing(flat, make_run, tmp_path):
    """1 x 4, 2 x 2 and 4 x 1, also where the epoch's last update has two sequences of 10. In
    float64, or Adam would blow up the rounding of small gradients; the Trainer logs float32."""
    data = dataclasses.replace(HOLDOUT["dataset"], limit=18)
    config = flat(dataset=data, context="cached", draws_per_context=2, steps=4)
    run = make_run(config)
    losses = []
    for size in (4, 2, 1):
        model, where = copy.deepcopy(run.backbone.model).double(), tmp_path / "hf"
        split = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 4 // size}
        trainer, recorder = trainer_of(model, config, run.files.tokenizer, where, **split)
        assert len(trainer.train_dataset) == 10
        trainer.train()
        losses.append(recorder.losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[2] == pytest.approx(losses[0], rel=1e-6)


def test_resume_goes_on_as_if_nothing_had_happened(flat, make_run, tmp_path):
    """Dropout included, from the middle of the first epoch into the second, bit for bit."""
    lora = dataclasses.replace(LORA, dropout=0.2)
    run = make_run(flat(lora=lora, context="cached", draws_per_context=2))
    fresh = [copy.deepcopy(run.backbone.model) for _ in range(3)]

    def start(model, **changes):
        save = {"save_strategy": "steps", "save_steps": 5, "gradient_accumulation_steps": 2}
        save["per_device_train_batch_size"] = 2
        tokenizer = run.files.tokenizer
        return trainer_of(model, run.config, tokenizer, tmp_path / "hf", **save, **changes)

    whole, recorder = start(fresh[0])
    whole.train()
    checkpoint = tmp_path / "hf/checkpoint-5"
    assert (checkpoint / "adapter_model.safetensors").exists()
    resumed, second = start(fresh[1])
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert second.losses == recorder.losses[5:]
    for a, b in zip(fresh[0].parameters(), fresh[1].parameters(), strict=True):
        assert torch.equal(a, b)
    assert second.events == ["step_end"] * 5
    other, third = start(fresh[2], seed=1)  # the dropout of another seed
    other.train()
    assert third.losses != recorder.losses


def test_resume_of_a_whole_model(flat, make_run, tmp_path):
    run = make_run(flat(steps=4))
    fresh = [copy.deepcopy(run.backbone.model) for _ in range(2)]
    save = {"save_strategy": "steps", "save_steps": 2}
    whole, recorder = trainer_of(fresh[0], run.config, run.files.tokenizer, tmp_path / "hf", **save)
    whole.train()
    larger = dataclasses.replace(run.config, block_size=8)
    other, _ = trainer_of(fresh[1], larger, run.files.tokenizer, tmp_path / "hf", **save)
    with pytest.raises(ValueError, match="was trained with block_size 4, and this is 8"):
        other.train(resume_from_checkpoint=str(tmp_path / "hf/checkpoint-2"))
    resumed, second = trainer_of(fresh[1], run.config, run.files.tokenizer, tmp_path / "hf", **save)
    resumed.train(resume_from_checkpoint=str(tmp_path / "hf/checkpoint-2"))
    assert second.losses == recorder.losses[2:]
    loaded = load_trained(str(tmp_path / "hf/checkpoint-4"))
    assert not loaded.assumed
    assert loaded.contract == DecodingContract.of(run.config, run.backbone.family)
    whole.processing_class.chat_template = None  # with examples of one's own it need have none
    whole.save_model(str(tmp_path / "own"))
    assert read_contract(tmp_path / "own") == dataclasses.replace(loaded.contract, end_ids=(256,))
    for name, p in loaded.backbone.base_model.named_parameters():
        assert torch.equal(p, fresh[0].get_parameter(name))


def test_evaluate_is_the_held_out_nelbo(flat, make_run, tmp_path):
    run = make_run(flat(context="cached"))
    trainer, _ = trainer_of(run.backbone.model, run.config, run.files.tokenizer, tmp_path / "hf")
    expected = t.evaluate(run)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < expected


def logits(model):
    ids = torch.arange(40).view(2, 20) + 60
    with torch.no_grad():
        return model.eval()(ids).logits


def test_adapters_are_interchangeable(flat, model_folder, tmp_path):
    """Ten lines of a user; what either trains loads in the other, and in peft alone."""
    base = str(model_folder())
    config = flat(model=base, tokenizer=None, lora=LORA, steps=3, out=str(tmp_path / "run"))
    tokenizer = load_tokenizer(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    lora = peft.LoraConfig(r=3, lora_alpha=6, target_modules=LLADA_TARGETS["all"])
    trainer, _ = trainer_of(peft.get_peft_model(model, lora), config, tokenizer, tmp_path / "hf")
    trainer.train()
    trainer.save_model(tmp_path / "adapter")
    ours = load_trained(str(tmp_path / "adapter"))
    plain = AutoModelForCausalLM.from_pretrained(base)
    expected = logits(trainer.model)
    assert not torch.allclose(expected, logits(plain), atol=1e-4)
    assert torch.equal(logits(ours.backbone.model), expected)
    again = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
    assert torch.equal(logits(again), expected)

    assert train(config) == 0
    newest = tmp_path / "run/checkpoints/step-3"
    expected = logits(load_trained(str(newest)).backbone.model)
    plain = AutoModelForCausalLM.from_pretrained(base)
    loaded = peft.PeftModel.from_pretrained(plain, newest, is_trainable=True)
    assert torch.equal(logits(loaded), expected)
    trainer, recorder = trainer_of(loaded, config, tokenizer, tmp_path / "hf2", max_steps=1)
    before = load_file(newest / "adapter_model.safetensors")
    trainer.train()
    after = peft.get_peft_model_state_dict(loaded, save_embedding_layers=False)
    assert before.keys() == after.keys() and len(recorder.losses) == 1
    assert not all(torch.equal(after[name], before[name]) for name in before)


def test_bf16_and_gradient_checkpointing(flat, make_run, tmp_path):
    """Autocast reaches the cache's dtype too; recomputation changes no loss."""
    run = make_run(flat(context="cached", steps=2))
    plain, bf16 = (copy.deepcopy(run.backbone.model) for _ in range(2))
    losses = []
    for model, changes in ((plain, {"gradient_checkpointing": True}), (bf16, {"bf16": True})):
        where = tmp_path / "hf"
        trainer, recorder = trainer_of(model, run.config, run.files.tokenizer, where, **changes)
        trainer.train()
        losses.append(recorder.losses)
        assert trainer.backbone.base_model.model.gradient_checkpointing == (model is plain)
    exact, rounded = losses
    assert exact == pytest.approx([t.train_step(run, step).loss for step in range(2)], rel=1e-6)
    assert rounded != exact and rounded == pytest.approx(exact, rel=2e-2)  # bf16 has 8 bits


def config_errors():
    objective = c.ObjectiveConfig
    return {
        "objective mdlm": {"objective": objective(name="mdlm")},
        "objective.blocks 'all'": {"objective": objective(blocks="all")},
        "objective.blocks 'each'": {"objective": objective(blocks="each")},
        "must divide": {"gen_length": 15},
        "give the config gen_length": {"gen_length": None},
    }


@pytest.mark.parametrize("message", config_errors())
def test_a_config_it_cannot_follow(flat, make_run, tmp_path, message):
    model = make_run(flat()).backbone.model
    config = flat(**config_errors()[message])
    with pytest.raises(ValueError, match=message):
        BlockwiseTrainer(model, arguments(tmp_path / "hf", config), config=config)


def test_options_and_models_it_cannot_take(flat, make_run, tmp_path):
    run = make_run(flat())
    model, config = run.backbone.model, run.config
    plain = arguments(tmp_path / "hf", config)

    def refuse(match, model=model, args=plain, **options):
        with pytest.raises(ValueError, match=match):
            BlockwiseTrainer(model, args, config=config, **options)

    refuse("Linear is not a LLaDA", torch.nn.Linear(2, 2))
    refuse("takes no compute_metrics", compute_metrics=print)
    smooth = arguments(tmp_path / "hf", config, label_smoothing_factor=0.1)
    refuse("label_smoothing_factor", args=smooth)
    lora = peft.LoraConfig(r=2, target_modules=["ff_out"])
    refuse("LM head", peft.get_peft_model(copy.deepcopy(model), lora))
    trainer = BlockwiseTrainer(model, plain, config=config, train_dataset=iter([1]))
    with pytest.raises(ValueError, match="length"):
        trainer.train()
    with pytest.raises(ValueError, match="no outputs"):
        trainer.compute_loss(model, {}, return_outputs=True)


def test_features_it_cannot_take(flat, make_run):
    run = make_run(flat())
    collate = BlockwiseCollator(layout_of(run.config, run.backbone.family))
    good = {"prompt": [1, 2], "response": [3, 256], "sample_id": 5}
    batch = collate([good, {**good, "visit": 2}])
    assert batch["visits"].tolist() == [0, 2] and batch["response_lengths"].tolist() == [4, 4]
    for bad, message in (
        ({"prompt": [1], "sample_id": 0}, "no response"),
        ({**good, "response": []}, "empty response"),
        ({**good, "prompt": [257]}, r"contains \[MASK\]"),
    ):
        with pytest.raises(ValueError, match=message):
            collate([bad])


TWO = """
import dataclasses, json, sys
import torch
from transformers import AutoModelForCausalLM
sys.path.insert(0, {tests!r})
from tiny_trainer import trainer_of
from bwsft import config as c
from bwsft.data.tokenizer import load_tokenizer
config = c.from_json(open({config!r}).read())
model = AutoModelForCausalLM.from_pretrained(config.model)
trainer, recorder = trainer_of(
    model, config, load_tokenizer(config.model), {out!r}, per_device_train_batch_size=2,
    save_strategy="steps", save_steps=5,
)
trainer.train()
if trainer.args.process_index == 0:
    print(json.dumps(recorder.losses))
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", [("cached", 2), ("block_causal", 2)])
def test_two_processes_give_the_losses_of_one(flat, model_folder, tmp_path, mode):
    base, names = str(model_folder()), ("context", "draws_per_context")
    config = flat(model=base, tokenizer=None, steps=10, **dict(zip(names, mode, strict=True)))
    (tmp_path / "config.json").write_text(c.to_json(config))
    model = AutoModelForCausalLM.from_pretrained(base)
    trainer, recorder = trainer_of(model, config, load_tokenizer(base), tmp_path / "one")
    trainer.train()
    script = tmp_path / "two.py"
    tests = os.path.dirname(os.path.dirname(__file__))
    names = {"tests": tests, "config": str(tmp_path / "config.json")}
    script.write_text(TWO.format(**names, out=str(tmp_path / "two")))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("["))
    assert json.loads(line) == pytest.approx(recorder.losses, rel=1e-5)
    assert read_contract(tmp_path / "two/checkpoint-5").context == config.context
