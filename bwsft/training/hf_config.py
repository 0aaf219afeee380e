"""BlockwiseConfig: transformers' TrainingArguments with the settings of Blockwise SFT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from transformers import TrainingArguments

from bwsft import config as c
from bwsft.objectives.config import ObjectiveConfig


@dataclass
class BlockwiseConfig(TrainingArguments):
    """TrainingArguments with the settings of Blockwise SFT, for BlockwiseTrainer.

    What the Trainer has settings for (updates, batches, optimizer, schedule, precision, saving) is
    called as there; learning rate and betas are the paper's. `seed` is that of masks and order too.

        args = BlockwiseConfig("out", block_size=32, gen_length=128, context="cached",
                               draws_per_context=4, max_steps=200, bf16=True)
    """

    learning_rate: float = 1e-5
    """Peak learning rate."""
    adam_beta1: float = 0.95
    """Decay of the first moment."""
    adam_beta2: float = 0.99
    """Decay of the second moment."""
    logging_steps: float = 10
    """Updates between two logs."""

    block_size: int = c.Config.block_size
    """Tokens in a block."""
    gen_length: int | None = None
    """Response positions on the decoder's canvas; none: what holds 99 % of the responses."""
    max_length: int | None = None
    """Longest prompt + response; longer examples are dropped and counted. None: the longest of the
    data, up to the model's positions."""
    context: Literal["exact", "cached", "block_causal"] = "exact"
    """How the active block's context is computed, in training and then in decoding."""
    draws_per_context: int = 1
    """Masks of the same block drawn per visit, which trains on their mean; in block_causal noisy
    copies of every block beside one clean row."""
    active_blocks: int = c.Config.active_blocks
    """Blocks in a row that are masked at once, each at a higher rate than the one before it, for a
    decoder that fills several blocks at a time; not cached."""
    block_size_schedule: float = c.Config.block_size_schedule
    """block_causal: share of the updates, the first ones, in which blocks shrink to block_size, by
    halves from the whole response; 0 for none."""
    clean_attention: Literal["block", "causal"] = "block"
    """What clean tokens see in block_causal: their block and all before it, or, causal, nothing
    after themselves. Of a model that predicts the next token."""
    ar_weight: float = c.Config.ar_weight
    """With clean_attention causal: weight of the autoregressive loss of the clean response."""
    mask_token: str | None = None
    """[MASK] of a model that is loaded by name and has none: a special token, or a new one."""
    logit_shift: Literal[0, 1] | None = None
    """Of such a model: 1 if a row predicts the next token, 0 if its own."""

    template: Literal["chat", "metamath", "none"] = "chat"
    """Prompt text: the tokenizer's chat template, the paper's instruction, or raw text."""
    template_args: str | None = None
    """Arguments of the chat template, such as enable_thinking=false."""
    subset: str | None = None
    """Of a train_dataset by name: configuration of a Hub data set, such as openai/gsm8k's main."""
    split: str | None = None
    """Of a train_dataset by name: its split, or a slice such as train[:1000]."""
    columns: str | None = None
    """What other columns are, as prompt=q,response=a,ignore=url."""
    turns: Literal["last", "all"] = "last"
    """Assistant turns of a conversation that are trained on, each as an example of its own."""
    on_bad: Literal["stop", "skip"] = "stop"
    """A malformed record stops the training, or is skipped, counted and listed."""
    canvas: Literal["fixed", "response", "padded"] = "fixed"
    """What comes after the response: end tokens and [MASK]; nothing; or visible padding."""
    holdout: float = 0
    """Examples of train_dataset kept out for evaluation; below 1: a share of them."""
    eval_draws: int = 4
    """Masked states per held-out example, spread over its blocks; each costs one forward."""

    objective: Literal["blockwise", "classical"] = "blockwise"
    """Blockwise SFT, or classical SFT: masks over the whole response."""
    blocks: Literal["uniform", "length", "rising", "falling", "traversal", "sequential"] = "uniform"
    """Which block of a response a visit makes the active one."""
    weight: Literal["count", "rate", "flat", "sum"] = "count"
    """Row weight: 1 / masked tokens, 1 / (mask rate x block length), 1 / block length, or 1."""
    empty: Literal["redraw", "last", "skip"] = ObjectiveConfig.empty
    """A draw that masks nothing becomes one that does, or masks the block's last token (the paper),
    which then has twice the weight of any other, or weighs nothing."""
    low: float = ObjectiveConfig.low
    """Lowest mask rate."""
    high: float = ObjectiveConfig.high
    """Highest mask rate."""
    pairs: bool = False
    """Draws of one context come in complementary pairs: together they mask every token once."""
    suffix_weight: float = 0.0
    """Supervise the hidden suffix too, in exact mode alone: its tokens together weigh so many times
    what the block's do."""
    confidence: float = 0.0
    """Add so many times the entropy of every supervised token that the model has right."""
    context_grad: bool = True
    """False takes the context as a constant, in exact and block_causal mode."""

    sample_prompts: list[str] | None = None
    """Prompts that are answered during training, greedily and in the context mode of training."""
    sample_steps: int | None = None
    """Updates between two rounds of samples; default: at every evaluation and checkpoint."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sample_steps is not None and (self.sample_steps < 1 or not self.sample_prompts):
            raise ValueError("sample_steps must be at least 1, and needs sample_prompts")
        if self.holdout < 0 or (self.holdout > 1 and self.holdout != int(self.holdout)):
            raise ValueError("holdout must be a number of examples, or a share below 1")

    def run_config(self) -> c.Config:
        """The same settings as a bwsft Config."""
        flat = ("seed", "block_size", "gen_length", "max_length", "context", "draws_per_context",
                "active_blocks", "block_size_schedule", "clean_attention", "ar_weight",
                "mask_token", "logit_shift")  # fmt: skip
        data = ("template", "template_args", "subset", "split", "columns", "turns", "on_bad",
                "canvas")  # fmt: skip
        objective = ("blocks", "weight", "empty", "low", "high", "pairs", "suffix_weight",
                     "confidence", "context_grad")  # fmt: skip

        def take(names: tuple[str, ...]) -> dict:
            return {name: getattr(self, name) for name in names}

        return c.Config(
            **take(flat),
            dataset=c.DataConfig(**take(data), holdout=0),
            objective=ObjectiveConfig(name=self.objective, **take(objective)),
            lora=c.LoraConfig(rank=0),
            eval=c.EvalConfig(draws=self.eval_draws),
        )


OWN = frozenset(vars(BlockwiseConfig)["__annotations__"])
"""Fields that BlockwiseConfig declares."""


def own_config(args: TrainingArguments | None, config: c.Config | None) -> c.Config:
    """The settings of Blockwise SFT, from a BlockwiseConfig or from a Config beside other
    TrainingArguments. ValueError where there are none, or two."""
    if isinstance(args, BlockwiseConfig):
        if config is not None:
            raise ValueError("args is a BlockwiseConfig: leave config out, it says the same")
        return args.run_config()
    if config is None:
        raise ValueError(
            "the settings of Blockwise SFT are missing: pass args=BlockwiseConfig(...), or config= "
            "beside TrainingArguments"
        )
    return config
