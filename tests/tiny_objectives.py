"""Batches of given tokens, and objectives of a debug run on them; no model."""

import dataclasses

import numpy as np

from bwsft import config as c
from bwsft import presets
from bwsft.data.packing import CanvasLayout, Example, pack
from bwsft.models.backbone import Family
from bwsft.training.setup import OBJECTIVES


def family_of(mask_id, vocab_size=100):
    """[MASK] is `mask_id`, and the only end token stands before it."""
    end = mask_id - 1
    return Family(
        mask_id=mask_id, eos_id=end, end_ids=(end,), vocab_size=vocab_size, max_positions=512
    )


def packed(family, texts, *, ids=None, visits=0, canvas="response", **layout):
    """A batch of (prompt, response) pairs of token sequences; one number of visits, or one each."""
    ids, visits = ids or range(len(texts)), np.broadcast_to(visits, len(texts)).tolist()
    examples = [
        Example(np.asarray(prompt), np.asarray(response), i, visit)
        for (prompt, response), i, visit in zip(texts, ids, visits, strict=True)
    ]
    fixed = {"mask_id": family.mask_id, "eos_id": family.eos_id, "canvas": canvas}
    return pack(examples, CanvasLayout(**fixed, **layout))


def objective_of(name, family, group, texts=(), run=None, **fields):
    """The objective of a debug run with its own group of options; `run` are fields of Config."""
    objective = c.ObjectiveConfig(name=name, **{name: group}, **fields)
    config = dataclasses.replace(presets.debug(), objective=objective, **(run or {}))
    c.validate(config)
    return OBJECTIVES[name].of(config, family, texts)
