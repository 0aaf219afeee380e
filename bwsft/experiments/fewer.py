"""Fewer passes at the same answers: what trains a model for decoding by threshold.

A model is trained with noisy copies until it solves much of a kind of problems, and its own careful
decodings of training problems that came out right are what every arm trains on: by plain Blockwise
SFT, which is the control, with the confidence term, by trace distillation, with both. Measured is
what a decoder of each threshold makes of test problems, in tokens per forward pass (thresholds.py).
"""

from __future__ import annotations

import dataclasses

from bwsft import config as c
from bwsft import presets
from bwsft.experiments.arms import Arm, Claim, Plan
from bwsft.experiments.scales import Scale
from bwsft.objectives.config import ObjectiveConfig

BEFORE, PLAIN = "before", "blockwise"
DISTILL, CONFIDENCE, BOTH = "distill", "confidence", "distill + confidence"
WITHIN = 0.01  # of the exact match of one token a step
GAIN = 2.0  # times the TPF of the model before
UPDATES = 60
TRACES = 1000  # training problems that are decoded
WEIGHT = 1.0  # of the confidence term
# Of each kind of problems: response positions, longest example, updates of the start.
SIZES = {"wordproblems-9-seed4": (32, 64, 800), "chains-6-seed4": (48, 80, 1200)}


def start(data: str) -> c.Config:
    """The model that all arms start from: the embedded base, trained on with noisy copies."""
    gen_length, max_length, steps = SIZES[data]
    return dataclasses.replace(
        presets.debug(), data=data, context="block_causal", block_size=16, gen_length=gen_length,
        max_length=max_length, batch_size=16, micro_batch_size=16, seed=7, steps=steps,
        save_every=steps, keep_last=1, dataset=c.DataConfig(template="chat", holdout=16),
        optim=c.OptimConfig(lr=2e-3), eval=c.EvalConfig(every=0),
    )  # fmt: skip


def fewer(data: str, scale: Scale) -> Plan:
    """The arms on one kind of problems. Of the scale it takes the number of seeds alone."""
    base = dataclasses.replace(
        start(data), steps=UPDATES, save_every=UPDATES, seed=42, optim=c.OptimConfig(lr=5e-4),
        dataset=c.DataConfig(template="chat", holdout=0),
    )  # fmt: skip
    ways = {
        PLAIN: ObjectiveConfig(),
        CONFIDENCE: ObjectiveConfig(confidence=WEIGHT),
        DISTILL: ObjectiveConfig(name="distill"),
        BOTH: ObjectiveConfig(name="distill", confidence=WEIGHT),
    }
    measures = ("tpf@16", "aup@16", "careful@16")
    arms = [Arm(BEFORE, base, measures, trained=False)]
    arms += [
        Arm(name, dataclasses.replace(base, objective=way), measures) for name, way in ways.items()
    ]
    claims = []
    for name in (DISTILL, CONFIDENCE, BOTH):
        text = f"{name}: at least {GAIN:g} times the TPF of the model before"
        claims.append(Claim(text, ((BEFORE, "tpf@16"),), ((name, "tpf@16"),), GAIN))
        for measure, title in (("tpf@16", "TPF"), ("aup@16", "AUP")):
            for other in (BEFORE, PLAIN):
                text = f"{name} has a higher {title} than {other}"
                claims.append(Claim(text, ((other, measure),), ((name, measure),)))
    kind = data.partition("-")[0]
    question = (
        "Does training on a model's own careful decodings let it commit more tokens a pass at the "
        "same answers? TPF is that of the threshold with the most among those whose exact match is "
        f"within {100 * WITHIN:g} point of one token a step (careful). AUP is of all thresholds, "
        "with a best accuracy of 100 %."
    )
    name = "fewer" if kind == "wordproblems" else f"fewer-{kind}"
    title = f"Fewer passes at the same answers: {kind}"
    return Plan(name, title, question, arms, claims, start=start(data), traces=TRACES)
