"""What dense Blockwise SFT is worth: noisy copies of --context block_causal at equal FLOPs."""

from __future__ import annotations

import dataclasses
from typing import Any

from bwsft import config as c
from bwsft.experiments.arms import Arm, Claim, Plan, with_objective
from bwsft.experiments.scales import Scale
from bwsft.objectives.config import ObjectiveConfig

ONE = "one copy"
PAIR = {"draws_per_context": 2, "objective": {"pairs": True}}
COPIES: dict[str, dict[str, Any]] = {
    ONE: {},
    "one pair": PAIR,
    "two copies": {"draws_per_context": 2},
    "four copies": {"draws_per_context": 4},
    "one pair, frozen context": PAIR | {"objective": {"pairs": True, "context_grad": False}},
    "one copy, blocks shrink": {"block_size_schedule": 0.25},
}
RATES = (5e-4, 1e-3, 2e-3, 4e-3)
# The best of RATES for each arm by one seed (experiment `copies-pilot`); the last was not tried.
COPIES_RATES = {
    ONE: 2e-3, "one pair": 1e-3, "two copies": 2e-3, "four copies": 1e-3,
    "one pair, frozen context": 2e-3, "one copy, blocks shrink": 2e-3,
}  # fmt: skip
BATCH = 16
LIBRARY = {"empty": ObjectiveConfig.empty}  # the paper's empty draws favor a block's last token


def small_updates(scale: Scale) -> dict[str, Any]:
    """16 sequences an update, and no evaluations on the way."""
    base = scale.base
    return {
        "batch_size": BATCH,
        "micro_batch_size": min(BATCH, base.micro_batch_size),
        "eval": dataclasses.replace(base.eval, every=0),
    }


def one_pass(scale: Scale, name: str, lr: float | None = None) -> c.Config:
    """An arm of COPIES. lr: peak learning rate; none: the scale's."""
    changes = dict(COPIES[name])
    draws = LIBRARY | changes.pop("objective", {})
    config = with_objective(scale, "blockwise", draws, context="block_causal", **changes)
    optim = config.optim if lr is None else dataclasses.replace(config.optim, lr=lr)
    return dataclasses.replace(config, optim=optim, **small_updates(scale))


def copies_pilot(scale: Scale) -> Plan:
    """Learning rates of the arms of `copies`, at the FLOPs of that experiment, on another seed and
    on problems that it does not use."""
    measures, arms = (f"pilot@{scale.block_size}",), []
    for name in COPIES:
        for lr in RATES:
            same = None if name == ONE else f"{ONE}, lr {COPIES_RATES[ONE]:g}"
            config = one_pass(scale, name, lr)
            arms.append(Arm(f"{name}, lr {lr:g}", config, measures, equal_flops_of=same))
    question = "Which peak learning rate suits each way to make noisy copies, at equal FLOPs?"
    return Plan("copies-pilot", "Pilot: learning rates of noisy copies", question, arms, ())


def copies(scale: Scale) -> Plan:
    """Noisy copies at the FLOPs of as many updates of one copy as the scale has."""
    measures, arms, claims = (f"nelbo@{scale.block_size}", "cpu_seconds"), [], []
    for name, lr in COPIES_RATES.items():
        # The rates were chosen for a model of a million parameters.
        config = one_pass(scale, name, None if scale.name == "8b" else lr)
        arms.append(Arm(name, config, measures, equal_flops_of=None if name == ONE else ONE))
    for what, measure in zip(("a lower NELBO", "fewer CPU seconds"), measures, strict=True):
        claims += [
            Claim(f"{name} has {what} than {ONE}", ((name, measure),), ((ONE, measure),))
            for name in COPIES
            if name != ONE
        ]
    question = (
        "Every response as one clean row and noisy copies (--context block_causal): which copies "
        "reach the lowest held-out NELBO at the same FLOPs?"
    )
    return Plan("copies", "Noisy copies at equal FLOPs", question, arms, claims)


def gradients(scale: Scale) -> Plan:
    """Noise and direction of an update's gradient: the modes, and noisy copies with a live and with
    a frozen context."""
    configs = {
        "classical": with_objective(scale, "classical"),
        "exact": with_objective(scale, "blockwise", LIBRARY),
        "cached, k 4": with_objective(
            scale, "blockwise", LIBRARY, context="cached", draws_per_context=4
        ),
    }
    for name in (ONE, "two copies", "one pair", "four copies"):
        live = one_pass(scale, name)
        objective = dataclasses.replace(live.objective, context_grad=False)
        configs |= {name: live, f"{name}, frozen": dataclasses.replace(live, objective=objective)}
    measures, small = (f"gradient@{scale.block_size}",), small_updates(scale)
    arms = [
        Arm(name, dataclasses.replace(config, **small), measures, trained=False)
        for name, config in configs.items()
    ]
    question = (
        "How noisy is the gradient of one update, the same sequences masked again and again, and "
        "how far does it point along the exact blockwise gradient?"
    )
    return Plan("gradients", "Noise and direction of the gradient", question, arms, ())
