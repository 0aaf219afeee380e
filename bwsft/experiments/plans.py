"""What each experiment compares, and what would count as reproducing the paper."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from bwsft.experiments.arms import Arm, Claim, Plan, all_at, better, with_objective
from bwsft.experiments.decisive import decisive
from bwsft.experiments.dense_plans import copies, copies_pilot, gradients
from bwsft.experiments.fewer import STUDIES, fewer
from bwsft.experiments.scales import Scale

OBJECTIVES = ("classical", "mdlm", "soft_masked", "rdm", "two_step", "blockwise")
MODES = {
    "cached, k 1": {"context": "cached"},
    "cached, k 4": {"context": "cached", "draws_per_context": 4},
    "block_causal": {"context": "block_causal"},
}
SUFFIX = {"blockwise + suffix": {"suffix_weight": 1.0}}
SHARES = (0.0, 0.1, 0.25, 0.5, 1.0)
PILOT_RATES = (1e-3, 3e-3, 1e-2)
PILOT_SEED = 1000


def usual(scale: Scale) -> tuple[str, ...]:
    """NELBO at every block size of the grid, exact match at the scale's own."""
    matches = all_at(scale, scale.block_size)[1:]
    return (*(f"nelbo@{b}" for b in scale.grid), *matches)


def base_arm(scale: Scale, measures: tuple[str, ...] | None = None, **changes: Any) -> Arm:
    mode = changes.get("context", "exact")
    name = "base" if mode == "exact" else f"base, {mode}"
    config = with_objective(scale, "blockwise", **changes)
    return Arm(name, config, measures or usual(scale), trained=False)


def at_equal_flops(scale: Scale) -> tuple[list[Arm], list[Claim]]:
    """Blockwise in every context mode, with as many updates as cost what Classical's cost: in
    `exact` mode the last layer runs for the active block alone, so an update costs less. Modes
    are claimed to beat `exact`, and all of them Classical."""
    name = "blockwise, equal FLOPs"
    config = with_objective(scale, "blockwise")
    arms = [Arm(name, config, usual(scale), equal_flops_of="classical")]
    claims = better(scale, name, "classical")
    for mode, changes in MODES.items():
        config = with_objective(scale, "blockwise", **changes)
        own = all_at(scale, scale.block_size)
        arms.append(Arm(mode, config, own, equal_flops_of="classical"))
        claims += better(scale, mode, name) + better(scale, mode, "classical")
    return arms, claims


def table(scale: Scale) -> Plan:
    """The paper's main table under EQUAL-FLOPS, with arms at strictly equal FLOPs and the context
    modes."""
    measures = usual(scale)
    arms = [base_arm(scale)]
    arms += [Arm(name, with_objective(scale, name), measures) for name in OBJECTIVES]
    for name in ("rdm", "two_step"):  # their updates cost more: fewer of them
        config = with_objective(scale, name)
        arms.append(Arm(f"{name}, equal FLOPs", config, measures, equal_flops_of="classical"))
    equal, more_claims = at_equal_flops(scale)
    arms += equal
    claims = []
    for other in ("base", *OBJECTIVES[:-1]):
        claims += better(scale, "blockwise", other)
    claims += more_claims
    question = (
        "Does Blockwise SFT beat the other objectives at the same number of updates (EQUAL-FLOPS), "
        "decoded in blocks? Do the context modes change the order?"
    )
    return Plan("table", "The paper's table: base and six objectives", question, arms, claims)


def equal_flops(scale: Scale) -> Plan:
    """Base, classical, blockwise and the context modes: the core of the table."""
    names = ("classical", "blockwise")
    arms = [Arm(name, with_objective(scale, name), usual(scale)) for name in names]
    equal, more_claims = at_equal_flops(scale)
    claims = better(scale, "blockwise", "classical") + more_claims
    question = (
        "Blockwise against Classical at the same number of updates of the same size (what the "
        "paper calls EQUAL-FLOPS), and at the same FLOPs, in every context mode."
    )
    return Plan("equal-flops", "EQUAL-FLOPS", question, [base_arm(scale), *arms, *equal], claims)


def suffix(scale: Scale) -> Plan:
    """The hidden suffix supervised in the same forward, at the FLOPs of Classical's updates."""
    nelbo, names = (f"nelbo@{scale.block_size}",), ("classical", "blockwise, equal FLOPs")
    arms = [Arm(names[0], with_objective(scale, names[0]), nelbo)]
    claims = []
    for arm, options in {names[1]: {}, **SUFFIX}.items():
        config = with_objective(scale, "blockwise", options)
        arms.append(Arm(arm, config, nelbo, equal_flops_of=names[0]))
        others = names if options else ()
        claims += [
            Claim(f"{arm} has a lower NELBO than {other}", ((arm, nelbo[0]),), ((other, nelbo[0]),))
            for other in others
        ]
    question = (
        "Does supervising the hidden suffix close the gap to Classical? Its tokens together weigh "
        "what the masked tokens of the block do."
    )
    return Plan("suffix", "A supervised suffix at equal FLOPs", question, arms, claims)


def equal_tokens(scale: Scale) -> Plan:
    """Equal supervised region: tau traversals, each block of each example once per traversal."""
    arms, claims = [base_arm(scale)], []
    # Ninety cells would take the mini scale an hour: the claim is about these two.
    names = OBJECTIVES if scale.name == "8b" else ("classical", "blockwise")
    for tau in (1, 2, 3):
        for name in names:
            config = with_objective(scale, name, {"blocks": "each"} if name == "blockwise" else {})
            if scale.traversal_examples is not None:
                limit = scale.traversal_examples + config.dataset.holdout
                data = dataclasses.replace(config.dataset, limit=limit)
                config = dataclasses.replace(config, dataset=data)
            arms.append(Arm(f"{name}, tau {tau}", config, usual(scale), traversals=tau))
        claims += better(scale, f"blockwise, tau {tau}", f"classical, tau {tau}")
    question = "Blockwise against the others at the same number of supervised region tokens."
    return Plan("equal-tokens", "EQUAL-TOKENS", question, arms, claims)


def block_grid(scale: Scale) -> Plan:
    """Training block size x decoding block size, at equal updates."""
    kinds = ("nelbo", *scale.tasks)
    claimed = kinds if scale.claims_matches else kinds[:1]
    measures = tuple(f"{kind}@{b}" for kind in kinds for b in scale.grid)
    arms = [base_arm(scale, measures)]
    for b in scale.grid:
        config = with_objective(scale, "blockwise", block_size=b)
        arms.append(Arm(f"B {b}", config, measures))
    claims = []
    for kind in claimed:
        matched = tuple((f"B {b}", f"{kind}@{b}") for b in scale.grid)
        crossed = tuple((f"B {a}", f"{kind}@{b}") for a in scale.grid for b in scale.grid if a != b)
        small, large = (matched, crossed) if kind == "nelbo" else (crossed, matched)
        text = f"trained and decoded at the same block size is better than crossed ({kind})"
        claims.append(Claim(text, small, large))
    question = "Is a model best at the block size it was trained at?"
    return Plan("block-grid", "Block size of training and of decoding", question, arms, claims)


def ablation(field: str, title: str, question: str, scale: Scale) -> Plan:
    """Noise in the context (a field of the objective), from none to all, at the grid's smallest
    block size."""
    b = scale.grid[0]  # the paper's A.7: B 8
    measures = all_at(scale, b)
    arms = []
    for share in SHARES:
        config = with_objective(scale, "blockwise", {field: share}, block_size=b)
        arms.append(Arm(f"{share:.0%}", config, measures))
    none, claims = arms[0].name, []
    for arm in arms[1:]:
        text = f"{arm.name} is worse than none (NELBO)"
        claims.append(Claim(text, ((none, measures[0]),), ((arm.name, measures[0]),)))
    for match in measures[1:] if scale.claims_matches else ():
        task = match.split("@")[0]
        text = f"{arms[-1].name} is worse than none ({task})"
        claims.append(Claim(text, ((arms[-1].name, match),), ((none, match),)))
    arms.insert(0, base_arm(scale, measures))
    return Plan(field.replace("_", "-"), title, question, arms, claims)


def context_modes(scale: Scale) -> Plan:
    """The context modes at equal time on a CPU, each scored and decoded in its own way."""
    measures = all_at(scale, scale.block_size)
    contexts = ("exact", "cached", "block_causal")
    arms = [base_arm(scale, measures, context=context) for context in contexts]
    two = {"cached, k 2": {"context": "cached", "draws_per_context": 2}}
    for name, changes in {"exact": {}, **dict(sorted({**MODES, **two}.items()))}.items():
        config = with_objective(scale, "blockwise", **changes)
        arms.append(Arm(name, config, measures, cpu_seconds=scale.cpu_seconds))
    question = (
        "Which context mode learns most in the same CPU seconds? Every mode is scored and decoded "
        "in its own way."
    )
    return Plan("context-modes", "Context modes at equal time", question, arms, ())


def dynamics(scale: Scale) -> Plan:
    """Curves over the updates; the cells are the table's."""
    names = ("classical", "blockwise", "blockwise, equal FLOPs")
    other, *own = (
        tuple((name, f"curve@{share}") for share in (25, 50, 75, 100)) for name in names
    )
    claims = [
        Claim(f"{name} has a lower held-out NELBO than classical along the run", curve, other)
        for name, curve in zip(names[1:], own, strict=True)
    ]
    arms = [arm for arm in equal_flops(scale).arms if arm.name in names]
    question = (
        "Held-out blockwise NELBO along the run: the one curve on which two objectives compare "
        "(their training losses are of different tasks)."
    )
    return Plan("dynamics", "Training dynamics", question, arms, claims)


def pilot(scale: Scale) -> Plan:
    """Learning rates, on a seed and on problems that the study does not use."""
    tried = {name: (name, {}) for name in OBJECTIVES}
    tried |= {mode: ("blockwise", changes) for mode, changes in MODES.items()}
    arms = []
    for label, (name, changes) in tried.items():
        for lr in PILOT_RATES:
            config = with_objective(scale, name, **changes)
            config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=lr))
            arms.append(Arm(f"{label}, lr {lr:g}", config, (f"pilot@{scale.block_size}",)))
    question = "Which peak learning rate suits each arm?"
    return Plan("pilot", "Pilot: learning rates", question, arms, ())


PLANS: dict[str, Callable[[Scale], Plan]] = {
    "table": table,
    "equal-flops": equal_flops,
    "suffix": suffix,
    "equal-tokens": equal_tokens,
    "block-grid": block_grid,
    "prefix-noise": partial(
        ablation, "prefix_noise", "Noise in the prefix",
        "How much does training suffer if earlier response tokens are masked too?",
    ),
    "suffix-leak": partial(
        ablation, "suffix_leak", "A suffix that leaks",
        "How much does training suffer if later response tokens stay visible?",
    ),
    "context-modes": context_modes,
    "dynamics": dynamics,
    "pilot": pilot,
    "copies": copies,
    "copies-pilot": copies_pilot,
    "gradients": gradients,
    "decisive": decisive,
    **{name: partial(fewer, name) for name in STUDIES},
}
