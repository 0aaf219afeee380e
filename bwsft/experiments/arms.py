"""An experiment as data: its arms, and the claims written down before it runs.

An `Arm` is one way to train: a config and what is measured on its result. A `Claim` is one sentence
as a contrast of measures: two sets of (arm, measure), and which should be smaller.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bwsft import config as c
from bwsft.experiments.scales import Scale
from bwsft.objectives.config import ObjectiveConfig


@dataclass(frozen=True)
class Arm:
    """One training that is compared; its cells are its seeds."""

    name: str
    config: c.Config
    """Without seed and folder."""
    measures: tuple[str, ...]
    """"nelbo@B" and "solved@B" / "gsm8k@B" / "math@B": decoded in blocks of B."""
    trained: bool = True
    """False: the untouched base, decoded as this config says."""
    equal_flops_of: str | None = None
    """Updates are scaled so that the FLOPs equal this arm's."""
    traversals: int | None = None
    """Updates are those of so many traversals of the data."""
    cpu_seconds: float | None = None
    """Updates are as many as take this time."""
    rates: tuple[float, ...] = ()
    """Peak learning rates that its pilot chooses from."""
    rate_of: str | None = None
    """The learning rate is what this arm's pilot chose."""


@dataclass(frozen=True)
class Claim:
    """The mean of `smaller`, times a factor, is below the mean of `larger`, each a tuple of (arm,
    measure)."""

    text: str
    smaller: tuple[tuple[str, str], ...]
    larger: tuple[tuple[str, str], ...]
    factor: float = 1.0


@dataclass(frozen=True)
class Primary:
    """Of some ways to train at least one is better than another way, at several budgets of FLOPs
    (primary.py). Ways are named without their budget."""

    text: str
    variants: tuple[str, ...]
    other: str
    multiplier: float | None = None
    """It reaches the other's final quality with so many times fewer FLOPs; None: it ends lower."""


@dataclass(frozen=True)
class Plan:
    name: str
    title: str
    question: str
    arms: Sequence[Arm]
    claims: Sequence[Claim]
    primary: Sequence[Primary] = ()
    """Claims about arms that are named "WAY, BUDGET"; they are judged by the first measure."""
    budgets: tuple[int, ...] = ()
    """Updates of the cheapest way to spend each budget, in rising order."""
    start: c.Config | None = None
    """Training of the model that all arms start from, where none is named."""
    traces: int = 0
    """Training problems whose careful decodings by that model the arms are trained on (fewer.py);
    0: the arms name their data."""


def at_budget(way: str, budget: int) -> str:
    """Name of the arm that trains this way for so many updates' FLOPs."""
    return f"{way}, {budget}"


def way_of(arm: str) -> str:
    """The way that an arm of this name trains."""
    return arm.rpartition(", ")[0]


def only(plan: Plan, names: Sequence[str]) -> Plan:
    """The plan with these arms, those whose FLOPs they equal and whose pilots they follow, and the
    claims about no others. ValueError for a name that it does not have."""
    if unknown := [name for name in names if name not in {arm.name for arm in plan.arms}]:
        known = ", ".join(repr(arm.name) for arm in plan.arms)
        raise ValueError(f"--arms {unknown[0]!r}: {plan.name} has {known}")
    named = [arm for arm in plan.arms if arm.name in names]
    kept = {*names} | {x for arm in named for x in (arm.equal_flops_of, arm.rate_of) if x}
    kept |= {x for arm in plan.arms if arm.name in kept and (x := arm.equal_flops_of)}
    arms = [arm for arm in plan.arms if arm.name in kept]
    about = [({name for name, _ in (*x.smaller, *x.larger)}, x) for x in plan.claims]
    claims = [claim for names, claim in about if names <= kept]
    ways = {way for way in map(way_of, kept) if {at_budget(way, b) for b in plan.budgets} <= kept}
    primary = [claim for claim in plan.primary if {*claim.variants, claim.other} <= ways]
    return dataclasses.replace(plan, arms=arms, claims=claims, primary=primary)


def with_objective(
    scale: Scale, name: str, options: Mapping[str, Any] | None = None, **changes: Any
) -> c.Config:
    """The scale's config with an objective, these options of it, and without those of others."""
    config = dataclasses.replace(scale.base, **changes)
    objective = dataclasses.replace(config.objective, name=name)
    if name != "blockwise":  # what belongs to blocks, as the `released` preset sets it
        plain = ObjectiveConfig(name=name)
        kept = ("weight", "empty") if name == "classical" else ()
        shared = {field: getattr(objective, field) for field in kept}
        objective = dataclasses.replace(plain, **shared)
    elif config.context == "block_causal":  # every block of a visit is trained
        objective = dataclasses.replace(objective, blocks="uniform")
    objective = dataclasses.replace(objective, **(options or {}))
    return dataclasses.replace(config, objective=objective)


def all_at(scale: Scale, block: int) -> tuple[str, ...]:
    """NELBO and exact match at one block size."""
    return tuple(f"{kind}@{block}" for kind in ("nelbo", *scale.tasks))


def better(scale: Scale, name: str, other: str) -> list[Claim]:
    """`name` beats `other` in NELBO, and in exact match where the scale claims about it."""
    nelbo, *matches = all_at(scale, scale.block_size)
    matches = matches if scale.claims_matches else []
    out = [Claim(f"{name} has a lower NELBO than {other}", ((name, nelbo),), ((other, nelbo),))]
    for match in matches:
        text = f"{name} has more exact matches ({match.split('@')[0]}) than {other}"
        out.append(Claim(text, ((other, match),), ((name, match),)))
    return out
