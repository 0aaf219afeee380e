"""How a canvas is filled: the settings, the block grid, the quotas and the plan of a row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bwsft.decoding.config import BOUNDS, DYNAMIC_RULES, OPTIONS, Rule, check_rule
from bwsft.decoding.schedules import hitting_shares, hitting_times, routed_shares


@dataclass(frozen=True)
class DecodeConfig:
    """How a canvas is filled. ValueError, naming the field, for values that fill no canvas."""

    gen_length: int = 128
    """Response positions of the canvas."""
    block_size: int = 32
    """Tokens in a block, B; it must divide gen_length."""
    steps: int | None = None
    """Denoising steps for the whole canvas, split evenly over its blocks; default: one per
    token. Fewer steps commit several tokens at a time. Rules quota, first_hitting, routed, rcr."""
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
    """Steps between two looks at which rows are done, each of which waits for the device. Rules
    with planned steps; the dynamic ones look in every step, rcr and routed with revise at the end
    of every block. No result depends on it."""
    context: Literal["exact", "cached", "prefix", "block_causal"] = "exact"
    """How the context of the active block is computed (bwsft/decoding/context.py)."""
    graphs: bool = False
    """CUDA: record the forwards of a step and launch each as one graph (cuda_graphs.py)."""
    refresh: int = 0
    """Recompute the context of a block every so many steps; 0: on entering it only."""
    rule: Rule = "quota"
    """Which tokens a step commits, docs/decoders.md: an even share, as many as are sure, ..."""
    threshold: float | None = None
    """Rules threshold and edit: tokens with a confidence above it; default 0.9."""
    factor: float | None = None
    """Rule factor: the n most confident while the n-th has 1 - factor / (n + 1); default 1."""
    entropy_bound: float | None = None
    """Rule entropy: in order of entropy, while their sum in nats is below it; default 0.35."""
    clip: tuple[float, float] | None = None
    """Rule first_hitting: times above the second share the block's first step, and those below the
    first its last; for a model trained with such mask rates. Default: one token a step."""
    schedule: Literal["linear", "cosine"] | None = None
    """Rule routed: share of [MASK]s after each step; default linear."""
    revise: Literal["never", "cond", "uncond"] | None = None
    """Rule routed: low tokens of the block become [MASK] again, always or if the model still wants
    the same and is less sure; default never."""
    order_noise: float | None = None
    """Rule routed: times Gumbel noise on the order, which fades with the [MASK]s; default 0."""
    edit_threshold: float | None = None
    """Rule edit: tokens are replaced by others with a confidence above it; default 0.9."""
    post_steps: int | None = None
    """Rule edit: most steps of a block after its last [MASK]; default 16."""
    mixture: float | None = None
    """Rule apd, R: weight of the model's logits, the verifier has the rest; default 0.7."""
    lookahead: int | None = None
    """Rule apd, M: positions that are drafted in a step; default 100."""
    kv_window: int | None = None
    """Rule apd, W: keys and values of the last step's draft and of W - 1 positions before it are
    computed anew, older ones are frozen; default: all are computed anew."""
    order: Literal["confidence", "margin", "entropy", "random", "left"] | None = None
    """Which tokens go first; default: entropy under rule entropy, else confidence."""
    cfg_scale: float = 0.0
    """Classifier-free guidance: logits (1 + s) l - s l', l' with the prompt masked. 0: none."""
    min_length: int = 0
    """End tokens are never produced at the first so many response positions."""
    suffix: int | Literal["all", "absent"] = "all"
    """[MASK] positions behind the active block that are present."""

    def __post_init__(self) -> None:
        for name in ("clip", "banned_ids"):  # as YAML and JSON have them
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
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
        check_rule(self)
        self._check_context()

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
    def revising(self) -> bool:
        """Tokens of the active block may change until it is finished (revising.py)."""
        return self.rule in ("rcr", "edit") or self.revise in ("cond", "uncond")

    def option(self, name: str) -> Any:
        """An option of the rule: what was given, or the default."""
        value = getattr(self, name)
        return OPTIONS[name][1] if value is None else value

    @property
    def bound(self) -> float:
        """The number of a dynamic rule."""
        return self.option(BOUNDS[self.rule])

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
    masked: int  # [MASK]s of the active block before the step (revise cond: at most)
    quota: int  # tokens that it commits, at least 1; under a dynamic rule 0, for unknown; under a
    # planned rule that revises the tokens that stand in the block after it
    number: int  # of the step in its block, from 0
    open: int = 0  # slots of the block that a revising rule may change, 0 under other rules
    spare: int = 0  # rule edit: steps that may follow once no [MASK] is left

    @property
    def asked(self) -> int:
        """Slots that meet the head."""
        return self.open or self.masked


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
    prompt_length: int,
    config: DecodeConfig,
    origin: str,
    given: Sequence[int] = (),
    request: int = 0,
) -> list[PlannedStep]:
    """All steps of a row. Where they are known beforehand nobody has to ask the device how many
    [MASK]s are left; steps that would change nothing are left out. Under a dynamic rule: the first
    step of every block.

    Every block gets the same number of steps, a short one of an absolute grid included. `given`
    are the response positions that hold a token from the start; a block without open positions
    has no step. `request` decides hitting times.
    """
    plan, taken = [], {prompt_length + position for position in given}
    for start, stop in block_bounds(prompt_length, config, origin):
        places = [position for position in range(start, stop) if position not in taken]
        left = total = len(places)
        count, spare = (total, spare_steps(config)) if config.revising else (0, 0)
        for number, share in enumerate(step_shares(places, config, request)):
            if left and (share or config.dynamic or config.revising):
                quota = total - left + share if config.revising and not config.dynamic else share
                plan.append(PlannedStep(start, stop, left, quota, number, count, spare))
                left -= share
    return plan


def step_shares(places: Sequence[int], config: DecodeConfig, request: int) -> list[int]:
    """[MASK]s that each step of a block takes; `places` are the block's open positions."""
    if config.dynamic:
        return [0]
    if config.rule == "first_hitting":
        times = hitting_times(torch.tensor(places, dtype=torch.long), request, config.seed)
        intervals = None if config.steps is None else config.steps_per_block
        return hitting_shares(times.tolist(), intervals, config.clip)
    if config.rule == "routed":
        return routed_shares(len(places), config.steps_per_block, config.option("schedule"))
    return quotas(len(places), config.steps_per_block)


def spare_steps(config: DecodeConfig) -> int:
    """Steps of a block that may follow its last [MASK]; no confidence is above 1."""
    can_edit = config.rule == "edit" and config.option("edit_threshold") < 1
    return config.option("post_steps") if can_edit else 0


def final_rows(canvas: Tensor, mask_id: int, end_ids: Tensor) -> Tensor:
    """Rows [S] of a response canvas [S, G] whose text is final: an end token stands in it with no
    [MASK] before it. Committed tokens never change, so what follows cannot matter."""
    mask_before = (canvas == mask_id).cumsum(1) > 0
    return (torch.isin(canvas, end_ids) & ~mask_before).any(1)
