"""What a user may say of decoding. Imports nothing heavy, so that --help answers at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RuleName = Literal[
    "quota", "dream", "threshold", "factor", "entropy", "first_hitting", "routed", "rcr", "edit",
    "speculative", "apd", "renoise",
]  # fmt: skip
RecipeName = Literal[
    "llada-instruct-gsm8k", "llada-instruct-math", "llada-1.5-gsm8k", "dream", "sdar-dynamic",
    "fast-dllm", "fast-dllm-v2", "llada2", "llada2.1",
]  # fmt: skip
ContextMode = Literal["exact", "cached", "prefix", "block_causal"]
Schedule = Literal["linear", "cosine"]
Revise = Literal["never", "cond", "uncond"]
Confidence = Literal["raw", "tempered"]
Ends = Literal["free", "last", "no_eos"]
Order = Literal["confidence", "margin", "entropy", "random", "left"]


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """What a user may say of decoding; the options of a rule (bwsft/decoding/rules.py and those
    after it) are None where the rule's default holds."""

    gen_length: int | None = None
    """Response positions of the canvas; default: the model's training, else 128."""
    block_size: int | None = None
    """Tokens in a block; default: the model's training, else 32."""
    context: ContextMode | None = None
    """Context mode; default: the one the model was trained in, exact for a foreign model."""
    refresh: int = 0
    """Recompute the context of a block every so many steps (cached, prefix); 0: on entering it."""
    steps: int | None = None
    """Denoising steps for the whole canvas; default: one per token. Rules with planned steps; under
    threshold and edit the most steps: each commits an even share at least, default one token."""
    rule: RuleName | None = None
    """Which tokens a step commits (docs/decoders.md): an even share, all that the model is sure
    of, ...; default quota."""
    threshold: float | None = None
    """Rules threshold, edit, speculative: least confidence, under speculative of a draft, where it
    is 0 unless it is given; default 0.9."""
    factor: float | None = None
    """Rule factor: the n most confident while the n-th has 1 - factor / (n + 1); default 1."""
    entropy_bound: float | None = None
    """Rules entropy, renoise: sum of the committed tokens' entropies in nats, under renoise the
    model's own unless it is given; default 0.35."""
    clip: tuple[float, float] | None = None
    """Rule first_hitting: mask rates that the model was trained with; default: one token a step."""
    schedule: Schedule | None = None
    """Rule routed: share of [MASK]s after each step; default linear."""
    revise: Revise | None = None
    """Rule routed: whether committed tokens may become [MASK] again; default never."""
    order_noise: float | None = None
    """Rule routed: Gumbel noise on the order of the tokens, times this; default 0."""
    edit_threshold: float | None = None
    """Rule edit: least confidence for replacing a token; default 0.9."""
    post_steps: int | None = None
    """Rule edit: most steps of a block after its last [MASK]; default 16."""
    drafts: int | None = None
    """Rule speculative: most tokens that a pass drafts and tries; default 3."""
    mixture: float | None = None
    """Rule apd: weight R of the model's logits, the verifier has the rest; default 0.7."""
    lookahead: int | None = None
    """Rule apd: positions M that are drafted in a step; default 100."""
    kv_window: int | None = None
    """Rule apd: a step computes the last draft and W - 1 positions before it anew; default: all."""
    active_blocks: int | None = None
    """Blocks that are decoded at a time (exact, block_causal; rules threshold, factor, entropy): of
    those after the first one only tokens that the model is sure of; default 1."""
    open_share: float | None = None
    """Of a block's tokens the share after which the next one opens, with several active blocks;
    default 0.5. 0: all at once, also of blocks that one step may fill."""
    order: Order | None = None
    """Which tokens go first; default: confidence, under rule entropy entropy."""
    cfg_scale: float = 0.0
    """Classifier-free guidance away from the answer without a prompt (exact); twice the cost."""
    min_length: int = 0
    """No end token before so many tokens."""
    suffix: int | Literal["all", "absent"] = "all"
    """[MASK] positions after the active block that the model sees (exact, prefix)."""
    temperature: float | None = None
    """0: the most probable token at every step; above: samples; default 0."""
    top_p: float | None = None
    """Sample from the likeliest tokens that have more than this probability together; default 1,
    all."""
    top_k: int | None = None
    """Sample from so many likeliest tokens; default 0, all."""
    confidence: Confidence | None = None
    """Probability of a token by the model's softmax, raw (LLaDA), or in the distribution that it is
    drawn from, tempered by temperature, top-p and top-k (Dream, SDAR); default raw."""
    ends: Ends | None = None
    """End tokens: free; last, after all others, without confidence; or no_eos, without the model's
    end-of-text token, which is never produced; default free."""
    seed: int = 0
    """Seed of the samples; an answer does not depend on batch size or on the other prompts."""
    batch_size: int = 8
    """Prompts decoded together."""
    graphs: bool = False
    """CUDA: launch each forward of a step as one recorded graph."""


@dataclass(frozen=True)
class DecoderOptions(DecodeSettings):
    """How a model decodes; what is left out comes from the recipe, else from its training."""

    recipe: RecipeName | None = None
    """Published settings (docs/decoders.md); other options replace those of the recipe."""
    tokenizer: str | None = None
    """Tokenizer folder or Hub id; default: the model's own."""
    mask_token: str | None = None
    """[MASK] of a model that names none: a special token, or a new one."""
    logit_shift: Literal[0, 1] | None = None
    """Of such a model: 1 if a row predicts the next token, 0 if its own."""
    template: Literal["metamath", "chat", "none"] | None = None
    """Text around a prompt; default: what the model was trained with, else metamath."""
    template_args: str | None = None
    """Arguments of the chat template, as name=value,...; default: those of the training."""
    verifier: str | None = None
    """Rule apd: folder or Hub id of a causal LM with the model's vocabulary."""
    fused_ops: Literal["auto", "on", "off"] = "auto"
    """Norms, rotary embedding and SwiGLU of the native LLaDA in one kernel each; auto: on CUDA."""
    device: str = "auto"
    """auto: a CUDA device if there is one, else the CPU."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Dtype of the weights; auto: bfloat16 on CUDA, float32 on the CPU."""
