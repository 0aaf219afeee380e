"""Classical SFT of a masked-diffusion model (LLaDA): Bernoulli masks over the whole response.

It is Blockwise SFT with one block that holds the response, so the masks, the three weights
(1/count: the paper's baseline; 1/rate: LLaDA's bound; flat) and the supervised rows are the same
code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bwsft.objectives.blockwise import Blockwise, mask_spec


@dataclass(frozen=True, kw_only=True)
class Classical(Blockwise):
    """Masks tokens anywhere in the response at one rate."""

    @classmethod
    def of(cls, config: Any, family: Any, responses: Iterable = ()) -> Classical:
        widest = config.max_length + config.gen_length + config.block_size
        spec = dataclasses.replace(
            mask_spec(config, family), block_size=widest, block_origin="response"
        )
        blockwise = Blockwise.of(config, family)
        return cls(**{**vars(blockwise), "spec": spec, "order": "uniform"})
