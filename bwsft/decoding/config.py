"""The transfer rules of the decoder, and which options belong to which of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from bwsft.decoding.plan import DecodeConfig

Rule = Literal[
    "quota", "threshold", "factor", "entropy", "first_hitting", "routed", "rcr", "edit", "apd"
]
RULES = get_args(Rule)
# How many tokens a step commits depends on the model.
DYNAMIC_RULES = ("threshold", "factor", "entropy", "edit", "apd")
# Field -> the rules that it belongs to, and its value there if none is given. Sources: threshold
# and factor, Fast-dLLM (arXiv:2505.22618); entropy, SDAR's bound with the full entropy; mixture and
# lookahead, the released scripts of Adaptive Parallel Decoding; post_steps, LLaDA2.1's.
OPTIONS = {
    "steps": (("quota", "first_hitting", "routed", "rcr"), None),
    "threshold": (("threshold", "edit"), 0.9),
    "factor": (("factor",), 1.0),
    "entropy_bound": (("entropy",), 0.35),
    "clip": (("first_hitting",), None),
    "schedule": (("routed",), "linear"),
    "revise": (("routed",), "never"),
    "order_noise": (("routed",), 0.0),
    "edit_threshold": (("edit",), 0.9),
    "post_steps": (("edit",), 16),
    "mixture": (("apd",), 0.7),
    "lookahead": (("apd",), 100),
    "kv_window": (("apd",), None),
}
BOUNDS = {"threshold": "threshold", "factor": "factor", "entropy": "entropy_bound",
          "edit": "threshold"}  # fmt: skip
# Rules that have an order of their own.
ORDERS = {
    "factor": "confidence", "entropy": "entropy", "first_hitting": "hitting times",
    "routed": "confidence", "rcr": "confidence", "apd": "position",
}  # fmt: skip
CHOICES = {
    "schedule": ("linear", "cosine"),
    "revise": ("never", "cond", "uncond"),
    "order": ("confidence", "margin", "entropy", "random", "left"),
}


def check_rule(config: DecodeConfig) -> None:
    """ValueError, naming the field, for a rule or an option of a rule that can't be."""
    if config.rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}, not {config.rule!r}")
    for name, (rules, _) in OPTIONS.items():
        value = getattr(config, name)
        if value is not None and config.rule not in rules:
            raise ValueError(
                f"{name} belongs to rule {' or '.join(rules)}, and the rule is {config.rule}"
            )
        if isinstance(value, int | float) and not 0 <= value < math.inf:
            raise ValueError(f"{name} must be 0 or positive, not {value}")
    for name, choices in CHOICES.items():
        value = getattr(config, name)
        if value not in (None, *choices):
            raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
    own = ORDERS.get(config.rule, config.order)
    if config.order not in (None, own):
        raise ValueError(f"rule {config.rule} goes by {own}: leave order out")
    if config.clip is not None:
        check_clip(config)
    if config.rule == "apd":
        check_apd(config)


def check_clip(config: DecodeConfig) -> None:
    pair = isinstance(config.clip, tuple | list) and len(config.clip) == 2
    if not pair or not 0 <= config.clip[0] < config.clip[1] <= 1:
        raise ValueError(f"clip must be two rising numbers in [0, 1], not {config.clip}")
    if config.steps is not None:
        raise ValueError("clip and steps both say which tokens share a step: give one")


def check_apd(config: DecodeConfig) -> None:
    for name in ("lookahead", "kv_window"):
        if getattr(config, name) == 0:
            raise ValueError(f"{name} must be at least 1, not 0")
    if config.option("mixture") > 1:
        raise ValueError(f"mixture must lie in [0, 1], not {config.mixture}")
    if config.context != "exact":
        raise ValueError(
            f"rule apd needs context exact, not {config.context}: its own cache is kv_window"
        )
    if config.graphs:
        raise ValueError("rule apd runs other shapes in every step: leave graphs out")
    if config.cfg_scale:
        raise ValueError("rule apd mixes the logits of two models already: leave cfg_scale out")
