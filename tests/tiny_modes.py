"""A tiny LLaDA, batches for it, and the context modes of training around any model."""

import dataclasses
from contextlib import nullcontext

import numpy as np
import tiny_llada
import torch
from bwsft_kernels import MaskSpec

from bwsft.data.packing import CanvasLayout, Example, pack
from bwsft.objectives.base import Place
from bwsft.objectives.blockwise import Blockwise
from bwsft.objectives.nelbo import HeldOut
from bwsft.training.context_modes import (
    BlockCausal,
    Cached,
    Exact,
    FrozenContext,
    SharedContext,
)

MASK, EOS = 49, 1
PLACE = Place(0, 0, 1, 1)  # the masks of blocks don't depend on it
KINDS = {"exact": Exact, "frozen": FrozenContext, "shared": SharedContext, "cached": Cached,
         "block_causal": BlockCausal}  # fmt: skip


def model(seed=3):
    return tiny_llada.backbone(seed=seed, n_kv_heads=2)


def batch(lengths=((5, 9), (3, 12), (4, 6)), canvas="fixed", visit=0, mask_id=MASK):
    layout = CanvasLayout(
        mask_id=mask_id, eos_id=EOS, canvas=canvas, block_size=4, gen_length=16, max_length=32
    )
    rng = np.random.default_rng(0)
    examples = [
        Example(rng.integers(2, mask_id, p), rng.integers(2, mask_id, r), i, visit)
        for i, (p, r) in enumerate(lengths)
    ]
    return pack(examples, layout)


def mode_of(
    name, backbone=None, *, draws=1, active=1, even=False, order="uniform", objective=None, **spec
):
    """A context mode around a model, with blocks of 4 tokens and the options of MaskSpec."""
    spec = MaskSpec(**{"block_size": 4, "mask_id": MASK, "seed": 5, **spec})
    objective = objective or Blockwise(
        spec=spec, order=order, draws_per_visit=draws, one_pass=name == "block_causal",
        active_blocks=active,
    )  # fmt: skip
    backbone = model() if backbone is None else backbone
    more = {"mask_id": spec.mask_id} if name == "cached" else {}
    place = (spec.grid, torch.device("cpu"), nullcontext, even)
    return KINDS[name](backbone, objective, *place, active_blocks=active, **more)


def held_out(mode, count):
    return HeldOut(spec=mode.objective.spec, count=count)


def losses(mode, some):
    """The losses of a batch, each with its backward done: [(value, supervised tokens, region)]."""
    found = []
    for loss in mode.losses(some, PLACE):
        loss.total.backward()
        found.append((loss.total.item(), int(loss.rows), int(loss.region)))
    return found


def gradients(mode, some):
    """(total loss, gradients) of a batch."""
    total = sum(value for value, *_ in losses(mode, some))
    return total, [p.grad.clone() for p in mode.backbone.parameters()]


def two_steps(mode, some, rate):
    """Losses of a batch before and after a step along its gradients, all of which are finite."""
    totals, parameters = [], list(mode.backbone.train().parameters())
    for _ in range(2):
        totals.append(sum(value for value, *_ in losses(mode, some)))
        with torch.no_grad():
            for p in parameters:
                assert torch.isfinite(p.grad).all()
                p -= rate * p.grad
    return totals


def corrupt(some, spec, order="uniform", draw=0, draws=1, *, block=None, levels=None):
    """(noisy batch, MaskedBatch) of draw number `draw` of a visit."""
    objective = Blockwise(spec=spec, order=order, levels=levels, draws_per_visit=draws)
    masked = objective.mask(some, draw, block)
    return dataclasses.replace(some, ids=masked.noisy_ids), masked
