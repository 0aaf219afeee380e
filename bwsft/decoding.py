"""How a canvas is filled: the settings, the block grid, the quotas and the plan of a row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# Rule -> the field that holds its number, and the number if none is given. Sources: threshold and
# factor, Fast-dLLM (arXiv:2505.22618); entropy, SDAR's bound with the full entropy.
DYNAMIC_RULES = {
    "threshold": ("threshold", 0.9),
    "factor": ("factor", 1.0),
    "entropy": ("entropy_bound", 0.35),
}


@dataclass(frozen=True)
class DecodeConfig:
    """How a canvas is filled. ValueError, naming the field, for values that fill no canvas."""

    gen_length: int = 128
    """Response positions of the canvas."""
    block_size: int = 32
    """Tokens in a block, B; it must divide gen_length."""
    steps: int | None = None
    """Denoising steps for the whole canvas, split evenly over its blocks; default: one per
    token. Fewer steps commit several tokens at a time. Rule quota only."""
    temperature: float = 0.0
    """0: the most probable token; above: Gumbel noise on the choice, never on the confidence."""
    seed: int = 0
    """Seed of the noise; a prompt's noise depends on this and on its request number only."""
    banned_ids: tuple[int, ...] = ()
    """Token ids that are never produced; they leave the confidence's softmax too."""
    stop_at_end: bool = True
    """A row is done once an end token is committed with no [MASK] before it."""
    batch_size: int = 8
    """Prompts decoded together; no result depends on it."""
    poll: int = 1
    """Steps between two looks at which rows are done, each of which waits for the device. Rule
    quota; the others look in every step. No result depends on it."""
    context: Literal["exact", "cached", "prefix", "block_causal"] = "exact"
    """How the context of the active block is computed (bwsft/decode_context.py)."""
    refresh: int = 0
    """Recompute the context of a block every so many steps; 0: on entering it only."""
    rule: Literal["quota", "threshold", "factor", "entropy"] = "quota"
    """How many tokens a step commits (bwsft/rules.py): an even share, or as many as are sure."""
    threshold: float | None = None
    """Rule threshold: tokens with a confidence above it; default 0.9."""
    factor: float | None = None
    """Rule factor: the n most confident while the n-th has 1 - factor / (n + 1); default 1."""
    entropy_bound: float | None = None
    """Rule entropy: in order of entropy, while their sum in nats is below it; default 0.35."""
    order: Literal["confidence", "margin", "entropy", "random", "left"] | None = None
    """Which tokens go first; default: entropy under rule entropy, else confidence."""
    cfg_scale: float = 0.0
    """Classifier-free guidance: logits (1 + s) l - s l', l' with the prompt masked. 0: none."""
    min_length: int = 0
    """End tokens are never produced at the first so many response positions."""
    suffix: int | Literal["all", "absent"] = "all"
    """[MASK] positions behind the active block that are present."""

    def __post_init__(self) -> None:
        for name in ("gen_length", "block_size", "batch_size", "poll"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.gen_length % self.block_size:
            raise ValueError(
                f"block_size {self.block_size} must divide gen_length {self.gen_length}; try "
                f"gen_length {math.ceil(self.gen_length / self.block_size) * self.block_size}"
            )
        blocks = self.gen_length // self.block_size
        if self.steps is not None and (self.steps < blocks or self.steps % blocks):
            raise ValueError(
                f"steps {self.steps} must be a multiple of the number of blocks, {blocks} "
                "(gen_length / block_size): every block gets the same number"
            )
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be 0 or positive, not {self.temperature}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must lie in [0, 2^63), not {self.seed}")
        if not 0 <= self.min_length <= self.gen_length:
            raise ValueError(f"min_length must lie in [0, gen_length], not {self.min_length}")
        self._check_rule()
        self._check_context()

    def _check_rule(self) -> None:
        if self.rule not in ("quota", *DYNAMIC_RULES):
            raise ValueError(f"rule must be quota, {', '.join(DYNAMIC_RULES)}, not {self.rule!r}")
        for rule, (name, _) in DYNAMIC_RULES.items():
            value = getattr(self, name)
            if value is not None and rule != self.rule:
                raise ValueError(f"{name} belongs to rule {rule}, and the rule is {self.rule}")
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} must be 0 or positive, not {value}")
        if self.dynamic and self.steps is not None:
            raise ValueError(f"steps belongs to rule quota; rule {self.rule} takes what it needs")
        orders = (None, "confidence", "margin", "entropy", "random", "left")
        if self.order not in orders:
            raise ValueError(f"order must be one of {', '.join(orders[1:])}, not {self.order!r}")
        own = {"factor": "confidence", "entropy": "entropy"}.get(self.rule, self.order)
        if self.order not in (None, own):
            raise ValueError(f"rule {self.rule} goes by {own}: leave order out")

    def _check_context(self) -> None:
        modes = ("exact", "cached", "prefix", "block_causal")
        if self.context not in modes:
            raise ValueError(f"context must be one of {', '.join(modes)}, not {self.context!r}")
        if self.refresh < 0:
            raise ValueError(f"refresh must be 0 or positive, not {self.refresh}")
        if self.refresh and self.context not in ("cached", "prefix"):
            raise ValueError(f"refresh is for context cached and prefix, not {self.context}")
        if not 0 <= self.cfg_scale < math.inf:
            raise ValueError(f"cfg_scale must be 0 or positive, not {self.cfg_scale}")
        if self.cfg_scale and self.context != "exact":
            raise ValueError(f"cfg_scale needs context exact, not {self.context}")
        whole = self.suffix == "all"
        if not (whole or self.suffix == "absent" or isinstance(self.suffix, int)):
            raise ValueError(f"suffix must be all, absent or a number, not {self.suffix!r}")
        if isinstance(self.suffix, int) and self.suffix < 0:
            raise ValueError(f"suffix must be all, absent or a number from 0, not {self.suffix}")
        if not whole and self.context not in ("exact", "prefix"):
            raise ValueError(
                f"suffix is for context exact and prefix: {self.context} decodes as it was trained"
            )

    @property
    def steps_per_block(self) -> int:
        if self.steps is None:
            return self.block_size
        return self.steps // (self.gen_length // self.block_size)

    @property
    def dynamic(self) -> bool:
        """How many tokens a step commits depends on the model."""
        return self.rule in DYNAMIC_RULES

    @property
    def bound(self) -> float:
        """The number of a dynamic rule."""
        name, default = DYNAMIC_RULES[self.rule]
        value = getattr(self, name)
        return default if value is None else value

    @property
    def ordered_by(self) -> str:
        return self.order or ("entropy" if self.rule == "entropy" else "confidence")

    @property
    def suffix_window(self) -> int:
        """Present positions behind the active block."""
        return {"all": self.gen_length, "absent": 0}.get(self.suffix, self.suffix)


@dataclass(frozen=True)
class PlannedStep:
    """One denoising step of one row; positions are counted from the row's first token."""

    start: int  # of the active block
    stop: int
    masked: int  # [MASK]s of the active block before the step
    quota: int  # tokens that it commits, at least 1; under a dynamic rule 0, for unknown
    number: int  # of the step in its block, from 0


def quotas(masked: int, steps: int) -> list[int]:
    """Tokens to commit in each of `steps` steps: as even as can be, the remainder on the first
    steps (LLaDA's rule). Steps beyond one per token get 0."""
    base, extra = divmod(masked, steps)
    return [base + (step < extra) for step in range(steps)]


def block_bounds(prompt_length: int, config: DecodeConfig, origin: str) -> list[tuple[int, int]]:
    """[start, stop) of every block of a row's canvas, counted from the row's first token.

    origin "response": the grid starts at the canvas' first position. "absolute": it starts at
    position 0 of the row, so that the first and the last block may be short.
    """
    size, end = config.block_size, prompt_length + config.gen_length
    start = prompt_length // size * size if origin == "absolute" else prompt_length
    return [(max(s, prompt_length), min(s + size, end)) for s in range(start, end, size)]


def plan_row(
    prompt_length: int, config: DecodeConfig, origin: str, given: Sequence[int] = ()
) -> list[PlannedStep]:
    """All steps of a row. With quotas they are known beforehand, so that nobody has to ask the
    device how many [MASK]s are left; steps that would commit nothing are left out. Under a dynamic
    rule: the first step of every block.

    Every block gets the same number of steps, a short one of an absolute grid included. `given`
    are the response positions that hold a token from the start; a block without open positions
    has no step.
    """
    plan, taken = [], {prompt_length + position for position in given}
    for start, stop in block_bounds(prompt_length, config, origin):
        masked = sum(position not in taken for position in range(start, stop))
        shares = [0] if config.dynamic else quotas(masked, config.steps_per_block)
        for number, quota in enumerate(shares):
            if masked and (quota or config.dynamic):
                plan.append(PlannedStep(start, stop, masked, quota, number))
                masked -= quota
    return plan


def final_rows(canvas: Tensor, mask_id: int, end_ids: Tensor) -> Tensor:
    """Rows [S] of a response canvas [S, G] whose text is final: an end token stands in it with no
    [MASK] before it. Committed tokens never change, so what follows cannot matter."""
    mask_before = (canvas == mask_id).cumsum(1) > 0
    return (torch.isin(canvas, end_ids) & ~mask_before).any(1)
