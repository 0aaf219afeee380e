"""Blockwise SFT: the paper's method in one file.

A response r of Lr tokens is cut in M = ceil(Lr / B) blocks. One step of one example:

1. Choose the active block a, uniformly over 1..M (paper, Algorithm 1), or with chances rho that
   the weight 1/rho undoes, or each block once per traversal, or in turn, or all of them.
2. Draw the mask rate pi ~ U(low, high): the diffusion time of an absorbing process. Or one of the
   times t/T with weights omega_t (paper, Theorem 3.3): `Levels`.
3. Keep prompt and earlier blocks clean, mask every token of block a with probability pi, hide
   everything behind it behind [MASK]: what semi-autoregressive decoding sees.
4. If nothing was masked, mask the block's last token (paper, section 4).
5. Loss: cross-entropy on the masked tokens of block a alone, each weighed 1 / (their number).
   With pi uniform this has the expectation of the 1/pi-weighted bound and less variance: the
   number of masked tokens is then uniform on 0..n and the set uniform given its size.

With complementary pairs two draws mask every token of the block once. At weight "flat" their
average weighs each token exactly 1/|I_a|: no variance from the count, no empty draw.

Every choice is a pure function of (seed, example, visit): see bwsft_kernels.philox. The ablations
(noisy prefix, leaky suffix) and the other weights are arguments, not other files.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch
from bwsft_kernels import MaskedBatch, MaskSpec, block_mask
from bwsft_kernels.philox import Stream, philox_u24
from torch import Tensor

ONE24 = 1 << 24


@dataclass(frozen=True)
class Levels:
    """Times t = 1..T with mask rate t/T and weight omega_t: 1/t ("elbo", the bound of a linear
    schedule) or 1 ("one"). One t per draw estimates sum_t omega_t E[masked CE at t] without bias,
    whether t is drawn uniformly (weight T omega_t) or by "omega" (weight Z = sum_t omega_t).

    A chance is a whole number of 2^-24, and the weight is omega_t over that very chance: T omega_t
    and Z to 3 digits at least, and exactly unbiased.
    """

    steps: int  # T, at most 2^16
    omega: str = "elbo"
    sample: str = "uniform"

    def draw(self, u24: Tensor) -> tuple[Tensor, Tensor]:
        """u24 -> (mask rates in units of 2^-24, weights in fp64), all of one shape."""
        edges, rates, weights = level_tables(self, u24.device)
        index = torch.searchsorted(edges, u24, right=True)
        return rates[index], weights[index]


@functools.lru_cache(maxsize=8)
def level_tables(levels: Levels, device) -> tuple[Tensor, Tensor, Tensor]:
    """Of t = 1..T: where its share of [0, 2^24) ends, its rate, its weight. [T] each."""
    t = torch.arange(1, levels.steps + 1)
    omega = 1 / t.double() if levels.omega == "elbo" else torch.ones(levels.steps).double()
    chance = omega if levels.sample == "omega" else torch.ones_like(omega)
    edges = (chance.cumsum(0) / chance.sum() * ONE24).round().long()
    share = edges.diff(prepend=edges.new_zeros(1))
    rates = (t * ONE24 + levels.steps // 2) // levels.steps
    return tuple(x.to(device) for x in (edges, rates, omega * ONE24 / share))


def levels_of(objective) -> Levels | None:
    """The times of an ObjectiveConfig with weight "discrete"; None for the others."""
    if objective.weight != "discrete":
        return None
    return Levels(**vars(objective.discrete))


def mask_spec(config, family) -> MaskSpec:
    """The kernel's options for a run `config` on a model `family`."""
    o = config.objective
    return MaskSpec(
        block_size=config.block_size,
        mask_id=family.mask_id,
        seed=config.seed,
        low=o.low,
        high=o.high,
        weight="flat" if o.weight == "discrete" else o.weight,  # omega_t comes with each draw
        empty=o.empty,
        block_factor=o.block_factor,
        prefix_noise=o.prefix_noise,
        suffix_leak=o.suffix_leak,
        block_origin=family.block_origin,
        pairs=o.pairs,
    )


CHANCES = ("length", "rising", "falling")


def chances(batch, spec: MaskSpec, order: str) -> Tensor | None:
    """Block distribution rho as integers [S, most blocks]: proportional to a block's tokens, or to
    its number from the left or from the right. None: uniform."""
    if order not in CHANCES:
        return None
    index = _block_index(batch, spec)
    if order == "rising":
        return (index + 1).expand(batch.num_sequences, -1)
    if order == "falling":
        return (num_blocks(batch, spec)[:, None] - index).clamp(min=0)
    edges = torch.arange(len(index) + 1, device=index.device) * spec.block_size
    edges = edges - _before(batch, spec)[:, None]
    return edges.clamp(min=0).minimum(batch.response_lengths[:, None]).diff(dim=1)


def _block_index(batch, spec: MaskSpec) -> Tensor:
    # A bound that the host knows: reading the largest M would wait for the device.
    width = batch.max_length // spec.block_size + 1
    return torch.arange(width, device=batch.prompt_lengths.device)


def choose_blocks(batch, spec: MaskSpec, order: str) -> Tensor | None:
    """Active block of each sequence [S], one for all draws of a visit; None: block_mask draws it.

    A traversal is M visits; its order sorts the blocks by the words of (block, traversal).
    """
    if order in ("uniform", *CHANCES):
        return None
    blocks = num_blocks(batch, spec)
    turn = batch.visits % blocks
    if order == "sequential":
        return turn
    traversal = batch.visits // blocks
    index = _block_index(batch, spec)
    words = philox_u24(
        index[None],
        traversal[:, None],
        batch.sample_ids[:, None],
        seed=spec.seed,
        stream=Stream.BLOCK,
    )
    words = words.masked_fill(index[None] >= blocks[:, None], ONE24)  # absent blocks last
    ranked = words.argsort(dim=1, stable=True)
    return ranked.gather(1, turn[:, None]).squeeze(1)


def num_blocks(batch, spec: MaskSpec) -> Tensor:
    """Blocks of each response [S], at least 1."""
    size = spec.block_size
    length = _before(batch, spec) + batch.response_lengths
    return ((length + size - 1) // size).clamp(min=1)


def _before(batch, spec: MaskSpec) -> Tensor:
    """Prompt tokens in the block where the response starts [S]."""
    absolute = spec.block_origin == "absolute"
    return batch.prompt_lengths % (spec.block_size if absolute else 1)


def corrupt(
    batch,
    spec: MaskSpec,
    order: str = "uniform",
    draw: int = 0,
    draws: int = 1,
    *,
    block: int | None = None,
    levels: Levels | None = None,
):
    """(noisy batch, MaskedBatch with loss rows and row weights) for one visit of each example:
    `draw` of `draws` masks of the same active block.

    The weights sum to 1 per sequence (0 where nothing bears loss): a step divides the summed
    loss once by its number of sequences. With `block` the visit masks this block of each example,
    and all blocks together sum to 1.
    """
    visit, factor, rate = batch.visits, 1.0, None
    if block is None:
        chosen, weights = choose_blocks(batch, spec, order), chances(batch, spec, order)
    else:
        blocks = num_blocks(batch, spec)
        chosen, weights = torch.full_like(blocks, block), None
        visit, factor = visit * blocks + block, 1 / blocks.double()
    number = visit * draws + draw
    if levels is not None:
        u24 = philox_u24(0, number, batch.sample_ids, seed=spec.seed, stream=Stream.RATE)
        rate, omega = levels.draw(u24)
        factor = factor * omega
    if spec.pairs and spec.weight == "flat":
        factor = 2.0 * factor  # a token bears loss in one half only
    if isinstance(factor, float):
        factor = None if factor == 1 else torch.full_like(number, factor, dtype=torch.float64)
    masked: MaskedBatch = block_mask(
        batch.ids,
        batch.prompt_lengths,
        batch.response_lengths,
        spec,
        cu_seqlens=batch.cu_seqlens,
        sample_ids=batch.sample_ids,
        draw=number,
        block=chosen,
        block_weights=weights,
        block_draw=None if draws == 1 else visit * draws,
        rate=rate,
        factor=factor,
    )
    return dataclasses.replace(batch, ids=masked.noisy_ids), masked


def every_block(batch, spec: MaskSpec):
    """Yield (sequences that have it, block) for every block; `batch` is on the host."""
    blocks = num_blocks(batch, spec)
    for block in range(int(blocks.max())):
        yield batch.select((blocks > block).nonzero()[:, 0].tolist()), block
