"""Which way to spend a budget of FLOPs on a model near convergence: the decisive comparison.

A model that solves about half of its own problems is fine-tuned on other stories with another form
of answer. Every way gets the FLOPs of so many updates of Classical SFT, at two budgets with a
schedule each, and the learning rate that its pilot chose. block_causal starts from the same model,
which has never seen its mask: what that adaptation costs is part of its budget.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from bwsft import config as c
from bwsft import presets
from bwsft.experiments.arms import Arm, Plan, Primary, at_budget, with_objective
from bwsft.experiments.scales import Scale
from bwsft.objectives.config import ObjectiveConfig

PAPER = {"weight": "sum", "empty": "last"}  # Eq. 8 and 9; an empty draw masks the last token
COUNT = {"weight": "count", "empty": "redraw"}
CLASSICAL, ONE = "classical", "one copy"
# (changes of the objective, changes of the config)
EXACT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "paper": (PAPER, {}),
    "count-uniform": (COUNT, {}),
    "suffix": (COUNT | {"suffix_weight": 1.0}, {}),
    "live + cheap, k 4": (COUNT, {"draws_per_context": 4, "shared_context": True}),
}
CACHED = {
    f"cached, k {k}": (COUNT, {"context": "cached", "draws_per_context": k}) for k in (4, 8)
}
COPIES = {
    ONE: (COUNT, {"context": "block_causal"}),
    "one pair": (COUNT | {"pairs": True}, {"context": "block_causal", "draws_per_context": 2}),
    "four copies": (COUNT, {"context": "block_causal", "draws_per_context": 4}),
}
DENSE = ("suffix", "live + cheap, k 4", *CACHED, "one pair", "four copies")
FACTORS = (0.5, 1.0, 2.0, 4.0, 8.0)  # of the scale's learning rate
LONGER = 4  # times the scale's updates: the second budget

PRIMARY = (
    Primary(
        "some way that is decoded exactly ends lower than Classical at equal FLOPs",
        tuple(EXACT), CLASSICAL,
    ),
    Primary(
        "some dense way reaches the final quality of the paper's recipe with at most half its "
        "FLOPs", DENSE, "paper", multiplier=2.0,
    ),
    Primary(
        "block_causal with several copies ends lower than with one",
        ("one pair", "four copies"), ONE,
    ),
)  # fmt: skip


def start(scale: Scale) -> c.Config | None:
    """The embedded base trained on, classically and on problems like those it knows, until it
    solves about half of the test problems; None at a scale that names a model."""
    if scale.base.model is not None:
        return None
    return dataclasses.replace(
        presets.debug(),
        data="wordproblems-9-seed4", steps=START_UPDATES, save_every=START_UPDATES, seed=7,
        dataset=c.DataConfig(template="chat"),
        objective=ObjectiveConfig(name="classical"),
        optim=c.OptimConfig(lr=1e-3), eval=c.EvalConfig(every=0),
    )  # fmt: skip


START_UPDATES = 1000


def configs(scale: Scale) -> dict[str, c.Config]:
    """Every way to train, with the updates of the scale."""
    plain = {
        "optim": dataclasses.replace(scale.base.optim, clip=0),  # no way is clipped
        "eval": dataclasses.replace(scale.base.eval, every=0),
    }
    found = {CLASSICAL: with_objective(scale, CLASSICAL, **plain)}
    for name, (objective, changes) in (EXACT | CACHED | COPIES).items():
        found[name] = with_objective(scale, "blockwise", objective, **plain, **changes)
    return found


def decisive(scale: Scale) -> Plan:
    """Ways to fine-tune at equal FLOPs, two budgets, and what is claimed about them."""
    base, nelbo = scale.base, f"nelbo@{scale.block_size}"
    measures = (nelbo, *(f"{task}@{scale.block_size}" for task in scale.tasks))
    arms = []
    for mode in ("exact", "cached", "block_causal"):
        config = with_objective(scale, "blockwise", COUNT, context=mode, seed=0)
        name = "untouched" if mode == "exact" else f"untouched, {mode}"
        arms.append(Arm(name, config, measures, trained=False))
    budgets = (base.steps, LONGER * base.steps)
    rates = tuple(factor * base.optim.lr for factor in FACTORS)
    for budget in budgets:
        for way, config in configs(scale).items():
            config = dataclasses.replace(config, steps=budget, save_every=budget)
            same = None if way == CLASSICAL else at_budget(CLASSICAL, budget)
            arms.append(
                Arm(
                    at_budget(way, budget), config, measures, equal_flops_of=same,
                    rates=rates if budget == budgets[0] else (),
                    rate_of=at_budget(way, budgets[0]),
                )
            )  # fmt: skip
    question = (
        "A model near convergence is fine-tuned on other stories with another form of answer: "
        "which way to mask, weigh and attend ends lowest for the same FLOPs?"
    )
    title = "The decisive experiment: ways to fine-tune at equal FLOPs"
    return Plan("decisive", title, question, arms, (), PRIMARY, budgets, start(scale))
