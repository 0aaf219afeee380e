"""Which runs can train which models."""

from __future__ import annotations

from bwsft.config import Config
from bwsft.models.backbone import Family, check_context


def check_trainable(family: Family, config: Config) -> None:
    """ValueError for a context mode in which a model of this family cannot be trained."""
    check_noise(family, config)
    check_context(family, config.context)
    if config.block_size_schedule and family.attention == "block_causal":
        raise ValueError(
            "--block-size-schedule leads a bidirectional model to blocks: leave it out, this one "
            "attends from block to block already"
        )
    causal = config.clean_attention == "causal" and family.noise == "mask"
    if causal and (family.attention == "block_causal" or not family.logit_shift):
        raise ValueError(
            "--clean-attention causal is for a bidirectional model that predicts the next token "
            "(Dream, or a decoder with --logit-shift 1): leave it out"
        )
    frozen = config.context == "block_causal" and not config.objective.context_grad
    if frozen and family.logit_shift:
        raise ValueError(
            "--objective.no-context-grad: this model predicts the first token of a block from the "
            "clean row, which would be a constant; leave it out in --context block_causal"
        )


def check_noise(family: Family, config: Config) -> None:
    """ValueError for an objective whose noise is not that of the model, and for what cannot train
    a model of random tokens."""
    name, of_masks = config.objective.name, family.noise == "mask"
    if name == "uniform" and of_masks:
        raise ValueError(
            "--objective.name uniform is for models whose undecided tokens are random ones "
            "(DiffusionGemma), and this one has a [MASK]: take --objective.name blockwise"
        )
    if of_masks:
        return
    if name != "uniform":
        raise ValueError(
            f"--objective.name {name} masks tokens, and this model has no [MASK]: its undecided "
            "tokens are random ones. Take --objective.name uniform --context block_causal "
            "--clean-attention causal"
        )
    if config.parallel == "fsdp":
        raise ValueError(
            "--parallel fsdp splits layers, which the two halves of this model share: leave it out"
        )
