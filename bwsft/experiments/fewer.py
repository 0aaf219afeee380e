"""Fewer passes at the same answers: what trains a model for decoding by threshold.

A model is trained with noisy copies until it solves much of a kind of problems, and is then trained
on, on its own careful decodings of training problems that came out right, or on other training
problems: by plain Blockwise SFT, which is the control, and by what is to save passes: the
confidence term, trace distillation, or groups of several active blocks, alone and together.
Measured is what a decoder of each threshold makes of test problems, in tokens per forward pass
(thresholds.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from bwsft import config as c
from bwsft import presets
from bwsft.experiments.arms import Arm, Claim, Plan
from bwsft.experiments.scales import Scale
from bwsft.objectives.config import ObjectiveConfig

BEFORE, PLAIN = "before", "blockwise"
DISTILL, CONFIDENCE, GROUPS = "distill", "confidence", "several blocks"
WITHIN = 0.01  # of the exact match of one token a step
GAIN = 2.0  # times the TPF of the model before
TRACES = 1000  # training problems that are decoded
WEIGHT = 1.0  # of the confidence term


@dataclass(frozen=True)
class Study:
    """A kind of problems, and how the model that all arms start from is trained on it."""

    data: str
    gen_length: int
    max_length: int  # of an example
    block_size: int
    steps: int
    active_blocks: int = 1
    """Above 1: groups of so many blocks are trained, in place of distillation, and every arm is
    decoded with so many active blocks too."""
    updates: int = 60
    """Of an arm, at the peak learning rate `lr`."""
    lr: float = 5e-4
    training: str | None = None
    """Problems that the arms are trained on; none: careful decodings by the model that all start
    from."""

    @property
    def start(self) -> c.Config:
        """Training of that model: the embedded base, trained on with noisy copies."""
        return dataclasses.replace(
            presets.debug(), data=self.data, context="block_causal", block_size=self.block_size,
            gen_length=self.gen_length, max_length=self.max_length, batch_size=16,
            micro_batch_size=16, seed=7, steps=self.steps, save_every=self.steps, keep_last=1,
            dataset=c.DataConfig(template="chat", holdout=16),
            optim=c.OptimConfig(lr=2e-3), eval=c.EvalConfig(every=0),
        )  # fmt: skip

    @property
    def ways(self) -> dict[str, dict]:
        """Changes of plain Blockwise SFT's config: one way, the confidence term, both. Without
        groups the term alone is an arm too."""
        sure = {"objective": ObjectiveConfig(confidence=WEIGHT)}
        if self.active_blocks > 1:
            own = {"active_blocks": self.active_blocks}
            return {GROUPS: own, f"{GROUPS} + {CONFIDENCE}": own | sure}
        own = {"objective": ObjectiveConfig(name="distill")}
        both = {"objective": ObjectiveConfig(name="distill", confidence=WEIGHT)}
        return {CONFIDENCE: sure, DISTILL: own, f"{DISTILL} + {CONFIDENCE}": both}

    @property
    def decoders(self) -> list[str]:
        """How measures name block size and active blocks: of one active block, then of several."""
        one = f"@{self.block_size}"
        return [one, f"{one}x{self.active_blocks}"] if self.active_blocks > 1 else [one]


GROUPED = {"active_blocks": 4, "updates": 1000, "lr": 2e-3}
STUDIES = {
    "fewer": Study("wordproblems-9-seed4", 32, 64, 16, 800),
    "fewer-chains": Study("chains-6-seed4", 48, 80, 16, 1200),
    "active-blocks": Study(
        "wordproblems-9-seed4", 32, 64, 4, 2000, **GROUPED, training="wordproblems-9-seed5"
    ),
    "active-blocks-chains": Study(
        "chains-6-seed4", 48, 80, 4, 2000, **GROUPED, training="chains-6-seed5"
    ),
}


def fewer(name: str, scale: Scale) -> Plan:
    """The arms of one of STUDIES. Of the scale it takes the number of seeds alone."""
    study = STUDIES[name]
    base = dataclasses.replace(
        study.start, data=study.training or study.data, steps=study.updates,
        save_every=study.updates, seed=42, optim=c.OptimConfig(lr=study.lr),
        dataset=c.DataConfig(template="chat", holdout=0),
    )  # fmt: skip
    one, last = study.decoders[0], study.decoders[-1]
    measures = tuple(f"{kind}{at}" for at in study.decoders for kind in ("tpf", "kept", "aup"))
    measures = (*measures, f"careful{one}")
    arms = [Arm(BEFORE, base, measures, trained=False)]
    arms += [
        Arm(way, dataclasses.replace(base, **changes), measures)
        for way, changes in ({PLAIN: {}} | study.ways).items()
    ]
    claims = [claim for way in study.ways for claim in claims_about(way, one, last)]
    kind = study.data.partition("-")[0]
    what = "a model's own careful decodings"
    if study.active_blocks > 1:
        what = f"groups of {study.active_blocks} active blocks"
    question = (
        f"Does training on {what} let it commit more tokens a pass at the "
        "same answers? TPF is that of the threshold with the most among those whose exact match is "
        f"within {100 * WITHIN:g} point of one token a step (careful), both of the same trained "
        "model; where no other is, that of careful itself. AUP is of all thresholds, "
        "with a best accuracy of 100 %."
    )
    title = f"Fewer passes at the same answers: {kind}"
    if study.active_blocks > 1:
        title = f"Several active blocks: {kind}"
    traces = 0 if study.training else TRACES
    return Plan(name, title, question, arms, claims, start=study.start, traces=traces)


def claims_about(way: str, one: str, last: str) -> Iterator[Claim]:
    """What is to hold of a way, decoded with several active blocks (`last`) where the study has
    them, else as the others are (`one`)."""

    def has(measure: str, other: str, at: str, text: str, factor: float = 1.0) -> Claim:
        return Claim(f"{way} {text}", ((other, at),), ((way, f"{measure}{last}"),), factor)

    yield has("tpf", BEFORE, f"tpf{one}", f"has at least {GAIN:g} times the TPF of before", GAIN)
    text = f"at that TPF solves at least {1 - WITHIN:.0%} of what before solves at a token a step"
    yield has("kept", BEFORE, f"careful{one}", text, 1 - WITHIN)
    for measure, title in (("tpf", "TPF"), ("aup", "AUP")):
        for other, at in dict.fromkeys([(BEFORE, one), (PLAIN, one), (PLAIN, last)]):
            said = " with several active blocks" if at != one else ""
            yield has(measure, other, f"{measure}{at}", f"has a higher {title} than {other}{said}")
