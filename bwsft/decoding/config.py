"""How a canvas is filled: checked settings of decoding, and the list of the transfer rules."""

from __future__ import annotations

import functools
import math
from dataclasses import KW_ONLY, dataclass
from typing import get_args

from bwsft.decoding.adaptive_parallel import AdaptiveParallel
from bwsft.decoding.dynamic import Entropy, Factor, Threshold
from bwsft.decoding.revising import Edit, Rcr, Renoise, Routed
from bwsft.decoding.rules import Dream, FirstHitting, Quota, Rule
from bwsft.decoding.settings import (
    Confidence,
    ContextMode,
    DecodeSettings,
    Ends,
    Order,
    Revise,
    RuleName,
    Schedule,
)
from bwsft.decoding.speculative import Speculative

RULES: dict[str, type[Rule]] = {
    rule.name: rule
    for rule in (
        Quota, Dream, Threshold, Factor, Entropy, FirstHitting, Routed, Rcr, Edit,
        Speculative, AdaptiveParallel, Renoise,
    )
}  # fmt: skip


@dataclass(frozen=True)
class DecodeConfig(DecodeSettings):
    """How a canvas is filled. ValueError, naming the field, for values that fill no canvas."""

    gen_length: int = 128
    block_size: int = 32  # must divide gen_length
    _: KW_ONLY
    context: ContextMode = "exact"
    rule: RuleName = "quota"
    active_blocks: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    confidence: Confidence = "raw"
    ends: Ends = "free"
    banned_ids: tuple[int, ...] = ()
    """Token ids that are never produced; they leave the confidence's softmax too."""
    stop_at_end: bool = True
    """A sequence is done once an end token is committed with no [MASK] before it."""
    poll: int = 1
    """Steps between two looks at which sequences are done, each of which waits for the device.
    Rules with planned steps; the dynamic ones look in every step, those that revise at the end of
    every block. No result depends on it."""

    def __post_init__(self) -> None:
        for name in ("clip", "banned_ids"):  # as YAML and JSON have them
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("gen_length", "block_size", "batch_size", "poll", "active_blocks"):
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
        for name in ("temperature", "refresh", "cfg_scale", "top_k"):
            self._check_positive(name)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        for name, choices in (("confidence", Confidence), ("ends", Ends)):
            self._check_choice(name, choices)
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be in [0, 2^63), not {self.seed}")
        if not 0 <= self.min_length <= self.gen_length:
            raise ValueError(f"min_length must be in [0, gen_length], not {self.min_length}")
        self._check_rule()
        self._check_context()
        self._check_active_blocks()

    def _check_rule(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"rule must be one of {', '.join(RULES)}, not {self.rule!r}")
        for name in dict.fromkeys(name for rule in RULES.values() for name in rule.options()):
            rules = [rule.name for rule in RULES.values() if name in rule.options()]
            if getattr(self, name) is not None and self.rule not in rules:
                raise ValueError(
                    f"{name} belongs to rule {' or '.join(rules)}, and the rule is {self.rule}"
                )
            self._check_positive(name)
        if self.threshold is not None and self.threshold > 1:
            raise ValueError(f"threshold is a probability, from 0 to 1, not {self.threshold}")
        for name, choices in (("schedule", Schedule), ("revise", Revise), ("order", Order)):
            self._check_choice(name, choices)
        self.method.check()

    def _check_positive(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, int | float) and not 0 <= value < math.inf:
            raise ValueError(f"{name} must be 0 or positive, not {value}")

    def _check_choice(self, name: str, choices: object) -> None:
        value = getattr(self, name)
        if value not in (None, *get_args(choices)):
            raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}, not {value!r}")

    def _check_context(self) -> None:
        self._check_choice("context", ContextMode)
        if self.refresh and self.context not in ("cached", "prefix"):
            raise ValueError(f"refresh is for context cached and prefix, not {self.context}")
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

    def _check_active_blocks(self) -> None:
        several = f"active_blocks {self.active_blocks}"
        if self.active_blocks == 1:
            if self.open_share is not None:
                raise ValueError("open_share is for active_blocks above 1: give both or neither")
            return
        if not self.method.windowed:
            able = ", ".join(name for name, rule in RULES.items() if rule.windowed)
            raise ValueError(f"{several} is for the rules {able}, and the rule is {self.rule}")
        if self.context not in ("exact", "block_causal"):
            raise ValueError(
                f"{several} needs context exact or block_causal: the cache of {self.context} is "
                "made for one block"
            )
        if not 0 <= self.opening_share <= 1:
            raise ValueError(f"open_share must be in [0, 1], not {self.open_share}")

    @property
    def opening_share(self) -> float:
        """Of a block's open places the share that is filled when the next block opens."""
        return 0.5 if self.open_share is None else self.open_share

    @functools.cached_property
    def method(self) -> Rule:
        """The rule, with its options."""
        return RULES[self.rule].of(self)

    @property
    def whole_logits(self) -> bool:
        """Tokens are chosen from rows of logits that are kept: the fused head is not enough."""
        tempered = self.confidence == "tempered" and self.temperature not in (0, 1)
        return tempered or self.top_p < 1 or self.top_k > 0

    @property
    def suffix_window(self) -> int:
        """Present positions after the active block."""
        return {"all": self.gen_length, "absent": 0}.get(self.suffix, self.suffix)
