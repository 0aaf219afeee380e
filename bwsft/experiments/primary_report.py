"""The part of a page that judges primary claims: verdicts, differences, learning rates, limits."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bwsft.experiments.arms import at_budget
from bwsft.experiments.pilots import chosen
from bwsft.experiments.primary import Values, Verdict, judge, multiplier, shared
from bwsft.experiments.statistics import Contrast

if TYPE_CHECKING:
    from bwsft.experiments.report import Finished

LIMITS = (
    "Nothing here is a claim but those at the top: the other differences are shown with plain 95 % "
    "intervals.",
    "Ten seeds share one starting model, one size (a million parameters) and one kind of problem. "
    "NELBOs of all arms are of the same test problems; exact match is of other ones with every "
    "seed, so that its errors speak of problems too. Test problems have numbers in common.",
    "Learning rates were chosen with one seed at the smaller budget, for both. A choice at the "
    "edge of its five values may not be the best.",
    "FLOPs are counted, not seconds: on a CPU small draws take longer than their FLOPs say.",
    "Multipliers end at the ends of the curves, which have two points each. Their p-values come "
    "from a bootstrap, which is too sure far out: at the aim itself 0.5 to 0.8 % of them, by "
    "simulation, are below 0.28 %, the level of six ways and three claims.",
)


def values_of(finished: Finished) -> Values:
    """The plan's first measure of every way to train, by budget and seed."""
    plan, arms = finished.plan, {arm.name: arm for arm in finished.arms}
    measure = finished.measures[0]
    ways = dict.fromkeys(w for claim in plan.primary for w in (*claim.variants, claim.other))
    return {
        way: [arms[at_budget(way, budget)].values(measure) or [] for budget in plan.budgets]
        for way in ways
    }


def section(finished: Finished) -> list[str]:
    """Markdown lines."""
    values = values_of(finished)
    verdicts = judge(finished.plan, values)
    known = []
    if (start := finished.start) is not None:
        known = [f"The start solves {start:.1%} of test problems like its own.", ""]
    return [
        *known, "## Verdicts", "", *verdict_table(verdicts), "",
        "## Every way against the claims' others", "", *differences(finished, values), "",
        "## Learning rates", "", *rates(finished), "",
        "## Limits", "", *(f"- {text}" for text in LIMITS), "",
    ]  # fmt: skip


def verdict_table(verdicts: list[Verdict]) -> Iterator[str]:
    heads = ("claim, written down before the run", "best variant", "found [95 % interval]")
    yield f"| {' | '.join(heads)} | p (Holm) | p of the contrary | verdict |"
    yield "|---|---|---:|---:|---:|---|"
    for v in verdicts:
        known = [name for name, found in v.found.items() if not math.isnan(found.mean)]
        best = v.best if known else None
        times = v.claim.multiplier is not None
        found = (best, shown(v.found[best], times)) if best else ("-", "-")
        cells = (v.claim.text, *found, p(v.p_for), p(v.p_against), f"**{v.verdict}**")
        yield f"| {' | '.join(cells)} |"


def shown(found: Contrast, times: bool = False) -> str:
    """A difference, or a multiplier, with its interval if there is one."""
    if math.isnan(found.mean):
        return "-"
    form = "x{:.2f}" if times else "{:+.4f}"
    interval = f" [{form.format(found.low)}, {form.format(found.high)}]" if found.n > 1 else ""
    return form.format(found.mean) + interval


def p(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3g}"


def differences(finished: Finished, values: Values) -> Iterator[str]:
    """Of the ways from the claims' first other at every budget, and multipliers."""
    plan = finished.plan
    other = plan.primary[0].other
    measured = next((claim for claim in plan.primary if claim.multiplier is not None), None)
    heads = [f"minus {other}, {budget}" for budget in plan.budgets]
    if measured:
        heads.append(f"FLOPs of {measured.other} / own")
    yield f"| way | {' | '.join(heads)} |"
    yield "|---|" + "---:|" * len(heads)
    for way, own in values.items():
        if way == other:
            continue
        cells = [shown(shared(a, b)) for a, b in zip(own, values[other], strict=True)]
        if measured:
            times = multiplier(own, values[measured.other], plan.budgets, measured.multiplier)
            cells.append("-" if way == measured.other else shown(times, True))
        yield f"| {way} | {' | '.join(cells)} |"


def rates(finished: Finished) -> Iterator[str]:
    """Every pilot with its choice in bold."""
    tried = list(dict.fromkeys(rate for found in finished.pilots.values() for rate in found))
    yield f"| pilot NELBO at a peak learning rate of | {' | '.join(f'{r:g}' for r in tried)} |"
    yield "|---|" + "---:|" * len(tried)
    for name, found in finished.pilots.items():
        best = chosen(found)
        cells = [f"{statistics.fmean(found[rate]):.4f}" for rate in tried]
        cells = [f"**{x}**" if r == best else x for r, x in zip(tried, cells, strict=True)]
        yield f"| {name} | {' | '.join(cells)} |"
