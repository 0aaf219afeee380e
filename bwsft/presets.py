"""Named starting points of a training run: functions that return a Config.

The presets of published models are sized for one 80 GB card and were not run on one yet.
"""

from __future__ import annotations

import dataclasses

from bwsft.config import Config, DataConfig, EvalConfig, LoraConfig, OptimConfig
from bwsft.objectives.config import ObjectiveConfig


def debug() -> Config:
    """A minute on a laptop CPU, no network: tiny model, generated problems, full fine-tuning."""
    return Config(
        preset="debug", data="wordproblems-9-seed2", steps=300, block_size=8, gen_length=40,
        max_length=72, batch_size=32, micro_batch_size=32, save_every=100,
        dataset=DataConfig(template="chat", holdout=16), lora=LoraConfig(rank=0),
        optim=OptimConfig(lr=3e-4), eval=EvalConfig(every=75),
    )  # fmt: skip


def llada_8b_lora() -> Config:
    """LLaDA-8B-Instruct with LoRA r 256 in bf16 on one 80 GB card; the `aligned` choices."""
    return Config(preset="llada-8b-lora", model="GSAI-ML/LLaDA-8B-Instruct", micro_batch_size=4)


def llada_8b_dense() -> Config:
    """As llada-8b-lora, but --context block_causal with a complementary pair of noisy copies: every
    response token is supervised once, and decoding has an exact cache."""
    return dataclasses.replace(
        llada_8b_lora(), preset="llada-8b-dense", context="block_causal", draws_per_context=2,
        objective=ObjectiveConfig(pairs=True), micro_batch_size=2,
    )  # fmt: skip


def paper() -> Config:
    """The paper's text: as llada-8b-lora, but the canvas ends with the response, the loss is a sum
    over masked tokens, and a draw without a mask masks the block's last token."""
    base = llada_8b_lora()
    data = dataclasses.replace(base.dataset, canvas="response")
    return dataclasses.replace(
        base, preset="paper", data="meta-math/MetaMathQA", dataset=data,
        objective=ObjectiveConfig(weight="sum", empty="last"),
    )  # fmt: skip


def released() -> Config:
    """The paper's released code: visible padding, four adapted matrices, log warm-up,
    0.9/0.95, floor 0.01, GSM records dropped, draws without a mask weigh nothing."""
    base = paper()
    return dataclasses.replace(
        base,
        preset="released",
        dataset=dataclasses.replace(
            base.dataset, canvas="padded", exclude_type="GSM", limit=6400, holdout=0
        ),
        objective=ObjectiveConfig(blocks="traversal", empty="skip"),
        lora=LoraConfig(targets="released"),
        optim=OptimConfig(beta1=0.9, beta2=0.95, warmup_shape="log", floor=0.01),
        eval=EvalConfig(every=0),
    )


def dream_7b_lora() -> Config:
    """Dream-v0-Instruct-7B with LoRA r 256 in bf16 on one 80 GB card, by its chat template."""
    return dataclasses.replace(
        llada_8b_lora(), preset="dream-7b-lora", model="Dream-org/Dream-v0-Instruct-7B",
        dataset=DataConfig(template="chat"),
    )  # fmt: skip


def sdar_4b_lora() -> Config:
    """SDAR-4B-Chat with LoRA r 256 in bf16 on one 80 GB card: block-causal, blocks of 4."""
    return dataclasses.replace(
        llada_8b_lora(), preset="sdar-4b-lora", model="JetLM/SDAR-4B-Chat",
        context="block_causal", block_size=4, dataset=DataConfig(template="chat"),
    )  # fmt: skip


def qwen3_4b_lora() -> Config:
    """Qwen3-4B made a masked-diffusion model with LoRA r 256 in bf16 on one 80 GB card: [MASK] is a
    token that its vocabulary reserves, and a position predicts the next token as before."""
    return dataclasses.replace(
        llada_8b_lora(), preset="qwen3-4b-lora", model="Qwen/Qwen3-4B",
        mask_token="<|vision_pad|>", logit_shift=1, context="cached", draws_per_context=2,
        dataset=DataConfig(template="chat"),
    )  # fmt: skip


def sdar_30b_a3b_lora() -> Config:
    """SDAR-30B-A3B-Chat with LoRA r 64 on attention, in bf16 on one 80 GB card: block-causal,
    blocks of 4. Its decoder is --recipe sdar-dynamic."""
    return dataclasses.replace(
        sdar_4b_lora(), preset="sdar-30b-a3b-lora", model="JetLM/SDAR-30B-A3B-Chat",
        lora=LoraConfig(rank=64, alpha=128.0), micro_batch_size=2,
    )  # fmt: skip


def llada_moe_7b_lora() -> Config:
    """LLaDA-MoE-7B-A1B-Instruct with LoRA r 256 on attention, in bf16 on one 80 GB card, by its
    chat template."""
    return dataclasses.replace(
        llada_8b_lora(), preset="llada-moe-7b-lora",
        model="inclusionAI/LLaDA-MoE-7B-A1B-Instruct", dataset=DataConfig(template="chat"),
    )  # fmt: skip


def llada2_mini_lora() -> Config:
    """LLaDA2.0-mini with LoRA r 256 on attention, the dense layer and shared experts, in bf16 on
    one 80 GB card: block-causal, blocks of 32. Its decoder is --recipe llada2."""
    return dataclasses.replace(
        sdar_4b_lora(), preset="llada2-mini-lora", model="inclusionAI/LLaDA2.0-mini",
        block_size=32,
    )  # fmt: skip


def fast_dllm_v2_7b_lora() -> Config:
    """Fast_dLLM_v2_7B with LoRA r 256 in bf16 on one 80 GB card: block-causal, blocks of 32, a
    complementary pair of noisy copies as in its paper. Its decoder is --recipe fast-dllm-v2."""
    return dataclasses.replace(
        llada_8b_dense(), preset="fast-dllm-v2-7b-lora",
        model="Efficient-Large-Model/Fast_dLLM_v2_7B", dataset=DataConfig(template="chat"),
    )  # fmt: skip


def diffusiongemma_26b_lora() -> Config:
    """diffusiongemma-26B-A4B-it with LoRA r 64 on attention and dense MLPs in bf16 on one 80 GB
    card, by its chat template: all canvases of 256 random tokens of a response in one pass."""
    return dataclasses.replace(
        llada_8b_lora(), preset="diffusiongemma-26b-lora", model="google/diffusiongemma-26B-A4B-it",
        objective=ObjectiveConfig(name="uniform"), context="block_causal", clean_attention="causal",
        block_size=256, gen_length=256, max_length=1024, micro_batch_size=1,
        grad_checkpointing=True, lora=LoraConfig(rank=64, alpha=128.0),
        dataset=DataConfig(template="chat"),
    )  # fmt: skip


PRESETS = {
    "debug": debug, "llada-8b-lora": llada_8b_lora, "llada-8b-dense": llada_8b_dense,
    "dream-7b-lora": dream_7b_lora, "sdar-4b-lora": sdar_4b_lora, "qwen3-4b-lora": qwen3_4b_lora,
    "fast-dllm-v2-7b-lora": fast_dllm_v2_7b_lora, "llada-moe-7b-lora": llada_moe_7b_lora,
    "llada2-mini-lora": llada2_mini_lora, "sdar-30b-a3b-lora": sdar_30b_a3b_lora,
    "diffusiongemma-26b-lora": diffusiongemma_26b_lora,
    "paper": paper, "released": released,
}  # fmt: skip
EXACT = ("paper", "released")  # what they reproduce has lengths of its own


def for_own_data(config: Config) -> Config:
    """A preset where the data is the user's: lengths and hold-out are left to follow the data."""
    if config.preset in EXACT:
        return config
    data = dataclasses.replace(config.dataset, holdout=None)
    return dataclasses.replace(config, gen_length=None, max_length=None, dataset=data)


def is_for_a_gpu(config: Config) -> bool:
    """Whether a preset's own model is too large for a CPU."""
    return config.preset in PRESETS and PRESETS[config.preset]().model is not None
