"""Named starting points of a training run: functions that return a Config."""

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


def paper() -> Config:
    """The paper's text: as llada-8b-lora, but the canvas ends with the response."""
    base = llada_8b_lora()
    data = dataclasses.replace(base.dataset, canvas="response")
    return dataclasses.replace(base, preset="paper", data="meta-math/MetaMathQA", dataset=data)


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


PRESETS = {"debug": debug, "llada-8b-lora": llada_8b_lora, "paper": paper, "released": released}
