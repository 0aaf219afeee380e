"""The peak that `bwsft train --dry-run` predicts against what an update takes; --fit."""

import dataclasses
import itertools

import pytest
import torch
import yaml
from lib.memory import tensor_bytes
from thinning import thinned
from tiny_experts import CONFIGS as EXPERTS
from transformers import Qwen3Config

from bwsft import config as c
from bwsft import presets
from bwsft.cli import main
from bwsft.commands import card_memory, dry_run, hollow_run
from bwsft.models.backbone import trainable
from bwsft.models.experts import LLaDA2MoeConfig
from bwsft.models.hollow import with_layers
from bwsft.models.llada_config import LladaConfig
from bwsft.models.loading import new_backbone
from bwsft.models.lora import add_lora
from bwsft.objectives.config import ObjectiveConfig
from bwsft.training.context_modes import make_mode
from bwsft.training.guards import SpikeGuard
from bwsft.training.optim import make_optimizer
from bwsft.training.trainer import Run, train_step

SIZES = dict(vocab_size=3000, mask_token_id=2999, eos_token_id=1, pad_token_id=0)
LLADA = LladaConfig(
    d_model=96, n_layers=2, n_heads=4, mlp_hidden_size=256, max_sequence_length=256, **SIZES
)
QWEN3 = Qwen3Config(
    hidden_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=24,
    intermediate_size=256, max_position_embeddings=256, tie_word_embeddings=True, logit_shift=1,
    **SIZES,
)  # fmt: skip
MIXTURE = LLaDA2MoeConfig.from_dict(EXPERTS["llada2_moe"].to_dict() | SIZES
                                    | {"max_position_embeddings": 256})  # fmt: skip
LORA = {"lora": c.LoraConfig(rank=32)}
PAIR = {"draws_per_context": 2, "objective": ObjectiveConfig(pairs=True)}
CASES = {
    "llada, exact, all weights": (with_layers(LLADA, 6 * [""]), {"micro_batch_size": 2}),
    "llada, cached, adapters": (LLADA, {"context": "cached", "draws_per_context": 2} | LORA),
    "llada, block-causal, recomputed": (
        LLADA, {"context": "block_causal", "grad_checkpointing": True} | PAIR
    ),
    "qwen3, exact, adapters, recomputed": (QWEN3, {"grad_checkpointing": True} | LORA),
    "qwen3, cached, all weights": (QWEN3, {"context": "cached"}),
    "qwen3, block-causal, adapters": (QWEN3, {"context": "block_causal"} | PAIR | LORA),
    "a mixture, adapters on experts": (
        MIXTURE,
        {"context": "block_causal", "lora": c.LoraConfig(rank=8, targets="experts", dropout=0.0)},
    ),
}  # fmt: skip


def case(changes):
    return dataclasses.replace(
        presets.debug(), device="cpu", batch_size=4, **{"micro_batch_size": 4} | changes,
        block_size=16, gen_length=64, max_length=128,
    )  # fmt: skip


class NominalData:
    """Batches of the sequences that --dry-run thinks of."""

    train_index = range(4)

    def __init__(self, config, backbone):
        self.config, self.backbone = config, backbone

    def samples(self, step, size, seed):
        return [(number, 0) for number in range(size)]

    def response_tokens(self, samples):
        return 1

    def sample_ids(self, samples):
        return samples

    def pack(self, samples):
        return hollow_run.nominal_batch(self.config, self.backbone, len(samples))


def measured(config, shape):
    """Bytes of a real second update at its peak."""
    backbone = new_backbone(shape)
    if config.lora.rank:
        add_lora(backbone, config.lora, seed=0)
    backbone.set_gradient_checkpointing(config.grad_checkpointing)
    backbone.train()
    optimizer = make_optimizer(backbone, config.optim)
    objective = hollow_run.OBJECTIVES["blockwise"].of(config, backbone.family)
    device = torch.device("cpu")
    run = Run(
        config=config, folder=None, first=0, device=device, backbone=backbone,
        optimizer=optimizer, data=NominalData(config, backbone), held_out=None, files=None,
        mode=make_mode(config, backbone.family, backbone, objective, device),
        guard=SpikeGuard(config.watch, {"loss": [], "grad_norm": []}, 3000, 4),
    )  # fmt: skip
    train_step(run, 0)
    optimizer.zero_grad(set_to_none=True)
    before = sum(p.nbytes for p in backbone.parameters())
    before += sum(2 * p.nbytes for p in trainable(backbone).values())
    return before + tensor_bytes(lambda: train_step(run, 1))


@pytest.mark.parametrize("name", thinned(CASES, 3))
def test_the_predicted_peak_is_a_real_updates(name):
    """What is inside of torch's own operators is not predicted: some percent here."""
    shape, changes = CASES[name]
    config = case(changes)
    peak = sum(card_memory.peak_of(config, shape).values())
    assert peak == pytest.approx(measured(config, shape), rel=0.05)


WORDS = ["train", "debug", "--device", "cpu", "--block-size", "16", "--gen-length", "64",
         "--max-length", "128", "--batch-size", "8", "--micro-batch-size", "8"]  # fmt: skip


@pytest.mark.slow
def test_fit_takes_fewer_sequences_at_a_time(tmp_path, capsys):
    """Eight take 22 MiB and one 15: a tenth of 20 stays free."""
    LLADA.save_pretrained(tmp_path)
    words = [*WORDS, "--model", str(tmp_path), "--memory", "20MiB", "--fit", "--print-config"]
    with pytest.raises(SystemExit, match="0"):
        main(words)
    said, _, file = capsys.readouterr().out.partition("\n")
    taken = yaml.safe_load(file)
    assert 1 <= taken["micro_batch_size"] < 8 and not taken["grad_checkpointing"]
    assert taken["max_length"] == 128 and f"--micro-batch-size {taken['micro_batch_size']}" in said


def pretended(config, shape):
    """A peak that is easily told: 16 of weights or 4 in nf4, rank / 32 of adapters, 4 a sequence
    or 1 recomputed."""
    lora = config.lora
    parts = {
        "weights": 4 if lora.quantize else 16, "moments": lora.rank / 32,
        "activations": config.micro_batch_size * (1 if config.grad_checkpointing else 4),
    }  # fmt: skip
    return {name: size * 2**30 for name, size in parts.items()}


@pytest.fixture
def pretend(monkeypatch):
    monkeypatch.setattr(card_memory, "peak_of", pretended)
    monkeypatch.setattr(dry_run, "peak_of", pretended)
    monkeypatch.setattr(dry_run, "count", lambda *_: dry_run.Counted(1, 1))


@pytest.mark.parametrize(("memory", "ways"), [  # a tenth of it stays free
    (80, None),  # 16 + 8 + 4 * 4 = 40
    (40, [{"micro": 2}, {"again": True}, {"nf4": "nf4"}]),
    (32, [{"micro": 1}, {"again": True}, {"nf4": "nf4", "micro": 4}]),
    (28, [{"micro": 1, "again": True}, {"nf4": "nf4", "micro": 2},
          {"nf4": "nf4", "again": True}]),
    (16, [{"micro": 2, "again": True, "nf4": "nf4"},
          {"micro": 4, "again": True, "nf4": "nf4", "rank": 128}]),
    (8, [{"micro": 1, "again": True, "nf4": "nf4", "rank": 64}]),
])  # fmt: skip
def test_what_changes_least_comes_first(pretend, memory, ways):
    before = presets.llada_8b_lora()
    found = card_memory.settings_that_fit(before, None, memory * 2**30)
    if ways is None:
        assert card_memory.fits(pretended(before, None), memory * 2**30)
        return
    named = {"micro": 4, "again": False, "nf4": None, "rank": 256}
    for (way, peak), wanted in zip(itertools.islice(found, len(ways)), ways, strict=True):
        taken = (way.micro_batch_size, way.grad_checkpointing, way.lora.quantize, way.lora.rank)
        assert taken == tuple((named | wanted).values())
        assert way.lora.alpha / way.lora.rank == 2 and peak == pretended(way, None)


def test_a_card_is_told_what_fits_it(pretend, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["train", "llada-8b-lora", "--dry-run", "--memory", "40GiB"])
    out = capsys.readouterr().out
    assert "40.00 GiB at most: weights 16.00 GiB, moments 8.00 GiB, activations 16.00 GiB" in out
    assert "  --micro-batch-size 2: 32.00 GiB at most" in out
    assert "  --grad-checkpointing: 28.00 GiB at most" in out


@pytest.mark.parametrize(("words", "message"), [
    (["--fit", "--memory", "5GiB"], "one sequence at a time takes 5.25 GiB at most"),
    (["--dry-run", "--memory", "5GiB"], "--lora.rank 8 --lora.alpha 16 --lora.quantize nf4"),
    (["--dry-run", "--memory", "24"], "say it as 24GiB"),
    (["--fit"], "no CUDA device is here"),
    (["--memory", "24GiB"], "--memory is for --fit"),
])
def test_what_it_cannot_fit(pretend, words, message, capsys):
    assert main(["train", "llada-8b-lora", *words]) == 2
    assert message in capsys.readouterr().err
