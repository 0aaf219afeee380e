"""bwsft_kernels.patch: loss and gradients of a Hugging Face model are its own."""

import copy

import bwsft_kernels
import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    DistilBertConfig,
    DistilBertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    Trainer,
    TrainingArguments,
)

V, D = 96, 32
SHAPE = dict(vocab_size=V, hidden_size=D, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=4, pad_token_id=0)
TOKENS = dict(bos_token_id=1, eos_token_id=2)
DECODER = dict(SHAPE, **TOKENS, num_key_value_heads=2)
ENDS = dict(TOKENS, cls_token_id=1, sep_token_id=2)
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig(**DECODER)),
    "llama-tied": (LlamaForCausalLM, LlamaConfig(**DECODER, tie_word_embeddings=True)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**DECODER)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**DECODER, head_dim=8)),
    "gemma": (GemmaForCausalLM, GemmaConfig(**DECODER, head_dim=8)),
    "gemma2": (Gemma2ForCausalLM,
               Gemma2Config(**DECODER, head_dim=8, final_logit_softcapping=3.0)),
    "gemma3": (Gemma3ForCausalLM,
               Gemma3TextConfig(**DECODER, head_dim=8, final_logit_softcapping=2.0)),
    "granite": (GraniteForCausalLM, GraniteConfig(**DECODER, logits_scaling=3.0)),
    "gpt2": (GPT2LMHeadModel, GPT2Config(vocab_size=V, n_embd=D, n_layer=2, n_head=4, **TOKENS)),
    "bert": (BertForMaskedLM, BertConfig(**SHAPE)),
    "modernbert": (ModernBertForMaskedLM, ModernBertConfig(**SHAPE, **ENDS)),
    "modernbert-sparse": (ModernBertForMaskedLM,
                          ModernBertConfig(**SHAPE, **ENDS, sparse_prediction=True)),
    "roberta": (RobertaForMaskedLM, RobertaConfig(**SHAPE)),
    "distilbert": (DistilBertForMaskedLM,
                   DistilBertConfig(vocab_size=V, dim=D, hidden_dim=48, n_layers=2, n_heads=4)),
}  # fmt: skip
# Two orders of a sum over the hidden size or the vocabulary differ by less than this.
BAND = (V + D) * torch.finfo(torch.float32).eps


def made(name="llama"):
    """A random model in eval mode; no parameter is zero or one, head's bias included."""
    cls, config = FAMILIES[name]
    generator = torch.manual_seed(5)
    model = cls(copy.deepcopy(config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture
def batch():
    torch.manual_seed(2)
    ids = torch.randint(3, V, (3, 14))
    return {"input_ids": ids, "labels": torch.where(torch.rand(3, 14) < 0.4, ids, -100)}


def loss_and_gradients(model, batch, **more):
    model.zero_grad()
    loss = model(**batch, **more).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


def assert_same(found, expected):
    """Losses and gradients within rounding; a gradient that is zero in theory, as that of the
    keys' bias, is compared on the scale of the others."""
    (loss, grads), (true_loss, true_grads) = found, expected
    torch.testing.assert_close(loss, true_loss, rtol=BAND, atol=0)
    largest = max(grad.abs().max() for grad in true_grads.values() if grad is not None)
    assert largest > 1e-3 and grads.keys() == true_grads.keys()
    for name, grad in true_grads.items():
        assert (grads[name] is None) == (grad is None), name
        if grad is not None:
            torch.testing.assert_close(grads[name], grad, rtol=0, atol=float(BAND * largest))


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_the_models_own(name, batch):
    model = made(name)
    inputs = {"input_ids": batch["input_ids"]}
    before, logits = loss_and_gradients(model, batch), model(**inputs).logits
    assert bwsft_kernels.patch(model) is model
    assert_same(loss_and_gradients(model, batch), before)
    assert torch.equal(model(**inputs).logits, logits)
    output = model(**batch)
    assert output.logits is None and "logits" not in output
    assert len(model(**batch, return_dict=False)) == len(output.to_tuple())
    if "sparse" not in name:  # transformers' own code fails there: no row is left
        nothing, grads = loss_and_gradients(model, batch | {"labels": batch["labels"] * 0 - 100})
        assert nothing == 0 and all(not g.any() for g in grads.values() if g is not None)
    bwsft_kernels.unpatch(model)
    assert type(model) is FAMILIES[name][0]
    assert type(model.get_output_embeddings()) is nn.Linear
    assert torch.equal(loss_and_gradients(model, batch)[0], before[0])


@pytest.mark.parametrize("more", [
    {"num_items_in_batch": 7}, {"num_items_in_batch": torch.tensor(7)}, {"ignore_index": 5},
    {"shift_labels": torch.arange(3, 45).view(3, 14)}, {"logits_to_keep": 5},
    {"output_hidden_states": True},
])  # fmt: skip
def test_the_models_options(more, batch):
    model = made()
    batch["labels"][0, 5] = 5
    if "logits_to_keep" in more:
        batch["labels"] = batch["labels"][:, -5:]
    if "ignore_index" in more:
        batch["labels"] = batch["labels"].clamp(min=0)
    before = loss_and_gradients(model, batch, **more)
    assert_same(loss_and_gradients(bwsft_kernels.patch(model), batch, **more), before)


def test_frozen_head_and_positional_labels(batch):
    model = bwsft_kernels.patch(made())
    model.lm_head.requires_grad_(False)
    ids, labels = batch["input_ids"], batch["labels"]
    loss = model(ids, None, None, None, None, labels).loss
    assert torch.equal(loss, model(**batch).loss)
    loss.backward()
    assert model.lm_head.weight.grad is None and model.model.embed_tokens.weight.grad.any()


def test_copies_keep_the_patch(batch):
    """Their logits are their own, too: a copy doesn't call the model it was made from."""
    model = bwsft_kernels.patch(bwsft_kernels.patch(made()))
    loss = model(**batch).loss
    other = copy.deepcopy(model)
    assert torch.equal(other(**batch).loss, loss) and other(**batch).logits is None
    with torch.no_grad():
        other.model.norm.weight.zero_()
    torch.testing.assert_close(other(**batch).loss, torch.tensor(float(V)).log())
    assert torch.equal(model(**batch).loss, loss)
    # A file names the class that can be imported.
    assert model.__reduce_ex__(4)[1] == (LlamaForCausalLM,)


@pytest.mark.parametrize("first", ["patch", "peft"])
@pytest.mark.parametrize("trained_head", [False, True])
def test_under_peft(first, trained_head, batch):
    peft = pytest.importorskip("peft")
    more = {"modules_to_save": ["lm_head"]} if trained_head else {}
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, **more)
    model = made()
    if first == "patch":
        bwsft_kernels.patch(model)
    torch.manual_seed(8)
    model = peft.get_peft_model(model, config)
    if first == "peft":
        assert bwsft_kernels.patch(model) is model
    fused = loss_and_gradients(model, batch)
    assert model(**batch).logits is None
    assert_same(fused, loss_and_gradients(bwsft_kernels.unpatch(model), batch))
    assert (len(fused[1]) == 5) == trained_head  # two LoRA matrices of each of two layers


def test_a_step_of_the_trainer(batch, tmp_path):
    """Two micro-batches, their labels counted together by the Trainer."""
    rows = [{name: value[i] for name, value in batch.items()} for i in (0, 1, 2, 0)]
    steps = {}
    for name in ("own", "fused"):
        model = made() if name == "own" else bwsft_kernels.patch(made())
        arguments = TrainingArguments(
            tmp_path / name, max_steps=1, per_device_train_batch_size=2, use_cpu=True, seed=1,
            gradient_accumulation_steps=2, optim="sgd", learning_rate=1.0, max_grad_norm=0,
            report_to=[], save_strategy="no", prediction_loss_only=True)
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
        steps[name] = (torch.tensor(trainer.train().training_loss),
                       {n: p.detach() for n, p in model.named_parameters()})
        steps[name][1]["eval_loss"] = torch.tensor(trainer.evaluate()["eval_loss"])
    assert_same(steps["fused"], steps["own"])


def test_what_it_refuses(batch):
    for model in (nn.Linear(2, 2), BertModel(BertConfig(**SHAPE))):
        with pytest.raises(ValueError, match=f"Llama, Qwen and Gemma.*not {type(model).__name__}"):
            bwsft_kernels.patch(model)
    model = made()
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(ValueError, match=r"is a torch.nn.*Sequential, not a plain nn\.Linear"):
        bwsft_kernels.patch(model)
    for place, said in (("lm_head", "on one device"), (".", "before that")):
        model = made()
        module = model.lm_head if place == "lm_head" else model
        module.forward = module.forward  # as accelerate's hooks do
        with pytest.raises(ValueError, match=said):
            bwsft_kernels.patch(model)


def test_what_happens_to_the_head_after_the_patch(batch):
    peft = pytest.importorskip("peft")
    model = bwsft_kernels.patch(made())
    model.resize_token_embeddings(V + 4)
    with pytest.raises(ValueError, match="patch it again"):
        model(**batch)
    loss = bwsft_kernels.patch(model)(**batch).loss
    torch.testing.assert_close(loss, bwsft_kernels.unpatch(model)(**batch).loss, rtol=BAND, atol=0)

    config = peft.LoraConfig(target_modules=["lm_head"])
    with pytest.raises(ValueError, match="is a peft.*adapters"):
        bwsft_kernels.patch(peft.get_peft_model(made(), config))
    adapted = peft.get_peft_model(bwsft_kernels.patch(made()), config)
    with pytest.raises(ValueError, match=r"unpatch\(model\)"):
        adapted(**batch)
    assert bwsft_kernels.unpatch(adapted)(**batch).logits is not None


def test_sharded(batch):
    """In the root's group the head is whole while forward runs; alone it is not, which is said."""
    dist = pytest.importorskip("torch.distributed")
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    before = loss_and_gradients(made("llama-tied"), batch)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = fsdp.fully_shard(bwsft_kernels.patch(made("llama-tied")))
        loss, grads = loss_and_gradients(model, batch)
        assert_same((loss, {name: grad.full_tensor() for name, grad in grads.items()}), before)
        with pytest.raises(ValueError, match="before fully_shard"):
            bwsft_kernels.unpatch(model)
        model = bwsft_kernels.patch(made())
        fsdp.fully_shard(model.lm_head)
        with pytest.raises(ValueError, match="with the model's root"):
            fsdp.fully_shard(model)(**batch)
    finally:
        dist.destroy_process_group()


def test_compiled(batch):
    """Dynamo takes the deferred logits through the model's loss code."""
    model = bwsft_kernels.patch(made("gemma2"))
    loss = model(**batch).loss
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(**batch)
    torch.testing.assert_close(compiled.loss, loss, rtol=BAND, atol=0)
    assert compiled.logits is None


@pytest.mark.parametrize("use", [
    lambda logits: logits + 1, lambda logits: logits.argmax(-1), lambda logits: logits[..., :-1],
    lambda logits: torch.softmax(logits, -1), lambda logits: logits.view(-1),
    lambda logits: logits * torch.ones(V), lambda logits: logits.tanh().tanh(),
    lambda logits: logits.to(torch.int32), lambda logits: torch.ones(V) + logits,
    lambda logits: 1 / logits, lambda logits: torch.ones(V) * logits,
])  # fmt: skip
def test_unknown_uses_of_logits_raise(use, batch, monkeypatch):
    """Never a silent wrong loss: what a model's code does to logits is known, or an error."""
    model = bwsft_kernels.patch(made())
    own = model.loss_function
    model.loss_function = lambda logits, labels, **more: own(use(logits), labels, **more)
    with pytest.raises((ValueError, AttributeError), match=r"unpatch\(model\)"):
        model(**batch)
