"""One-pass training of a model whose noise is random tokens (DiffusionGemma).

It is the mode block_causal with clean rows that see no later token: the encoder runs them once, and
the decoder every canvas of the batch at once. What is added is the pass in which some canvases get
the model's own prediction to see.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from bwsft_kernels import MaskSpec
from bwsft_kernels.block_grid import BlockGrid
from torch import Tensor

from bwsft.objectives.base import Draw, response_rows
from bwsft.objectives.uniform import Uniform
from bwsft.training.block_causal import OnePass
from bwsft.training.context_modes import BlockCausal

if TYPE_CHECKING:
    from bwsft.data.packing import Batch
    from bwsft.models.diffusion_gemma import DiffusionGemmaBackbone


@dataclass(frozen=True)
class Canvas(OnePass):
    """Clean rows and canvases, of which some see the model's own prediction."""

    conditioned: Tensor = dataclasses.field(kw_only=True)  # [T] bool


@dataclass(frozen=True)
class Canvases(BlockCausal):
    """Every canvas of every response, each with the loss of all its tokens; :func:`canvas_mode`
    makes it."""

    def laid_out(self, clean: Batch, draws: list[Draw]) -> Draw:
        draw, inside = super().laid_out(clean, draws), response_rows(clean).inside
        one = draw.noisy
        seeing = torch.zeros(len(one.ids), dtype=torch.bool)
        for copy, each in zip(one.copy_of.cpu(), draws, strict=True):
            seeing[copy[inside]] = self.objective.conditioned(clean, each.number)[inside]
        canvas = Canvas(**vars(one), conditioned=seeing.to(one.ids.device))
        return dataclasses.replace(draw, noisy=canvas)


def canvas_mode(
    backbone: DiffusionGemmaBackbone, *, canvas_length: int | None = None, seed: int = 0,
    low: float = 1e-3, high: float = 1.0, self_conditioning: float = 0.5, ar_weight: float = 0.0,
    copies: int = 1,
) -> Canvases:  # fmt: skip
    """How to train a DiffusionGemma: `losses(batch, place)` of the result yields one loss for one
    backward, whose sum a step divides by its sequences.

    Rates are uniform in [low, high); `self_conditioning` is the chance that a canvas sees the
    model's own prediction; `ar_weight` weighs the encoder's loss of the next token over the
    response; `copies` are noisy versions of each canvas. `canvas_length` defaults to the model's:
    the block size of the batches (bwsft.data.packing.CanvasLayout fills their last canvas).
    """
    size, family = canvas_length or backbone.base_model.config.canvas_length, backbone.family
    spec = MaskSpec(
        block_size=size, mask_id=family.mask_id, seed=seed, low=low, high=high, empty="skip",
        weight="flat",
    )  # fmt: skip
    objective = Uniform(
        spec=spec, vocab_size=family.vocab_size, self_conditioning=self_conditioning,
        draws_per_visit=copies,
    )  # fmt: skip
    device = backbone.head()[0].device
    grid = BlockGrid(size, family.block_origin)
    return Canvases(backbone, objective, grid, device, causal=True, ar_weight=ar_weight)
