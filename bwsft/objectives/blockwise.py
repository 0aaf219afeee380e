"""Blockwise SFT: the paper's method in one file.

Sun, Cai, Yang and Wang, "Blockwise SFT for Diffusion Language Models: Reconciling Bidirectional
Attention and Autoregressive Decoding", arXiv:2508.19529.

A response r of Lr tokens is cut in M = ceil(Lr / B) blocks. One step of one example:

1. Choose the active block a, uniformly over 1..M (Algorithm 1), or with chances rho that the weight
   1/rho undoes, or each block once per traversal, or in turn, or all of them.
2. Draw the mask rate pi ~ U(low, high): the diffusion time of an absorbing process. Or one of the
   times t/T with weights omega_t (Theorem 3.3): `draw_level`.
3. Keep prompt and earlier blocks clean, mask every token of block a with probability pi, hide
   the suffix, everything after it, as [MASK]: what semi-autoregressive decoding sees.
4. If nothing was masked, the paper masks the block's last token (section 4, empty "last"). Here
   such a draw is distributed as one that masked something (empty "redraw").
5. Loss: cross-entropy on the masked tokens of block a alone, each weighed 1 / (their number). With
   pi uniform on (0, 1) the number k is uniform on 0..n and the set uniform given k, so the other
   draws give each token the expected weight 1 / (n + 1). "last" adds all that is missing to the
   last token: twice the weight of any other, and k = 1 twice as often as any other k. "redraw"
   exchanges pi with the number of one uniformly chosen token: of n + 1 exchangeable numbers, pi
   was the smallest and becomes any other one. So k is uniform on 1..n, each token's expected weight
   is 1 / n, and the loss estimates the NELBO per token (nelbo.py) without bias. It does so exactly
   on (0, 1); for other bounds of pi the tokens still weigh the same, and pi stays below `high`.

With suffix_weight lambda the hidden suffix is supervised in the same forward: to the mean loss of
the masked tokens it adds lambda times the mean loss of the suffix in the same state. Inputs, and so
the decoder that they match, stay as they are.

With complementary pairs two draws mask every token of the block once. If the first masks all, the
second is empty, and the first, which is the decoder's first state, weighs as both. So with "redraw"
every pair weighs 1, and each state in expectation what it weighs without pairs: the pair estimates
the same NELBO. At weight "flat" each token weighs exactly 1/|I_a| in every pair.

With g active blocks (active_blocks.py) every visit cuts the response in groups of g, of which the
first may be short. The group that holds block a is masked at once, at rates that rise: pi_{j+1} ~
U(pi_j, high). Each of its n blocks is weighed as above, over n: the loss is the mean over j = 1..n
of that of a block beside j - 1 which are masked less and n - j which are masked more. A block is in
a group of n with each of its n blocks as a, so every block weighs 1/M in expectation, as in
block_causal, where a draw masks all groups and no block sees those after its own.

The weight 1 ("sum") takes the sum over masked tokens, as the paper's Eq. 8 and 9 write it.

Every choice is a pure function of (seed, example, visit): see bwsft_kernels.philox. The ablations
(noisy prefix, leaky suffix) and the other weights are arguments, not other files.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from bwsft_kernels import MaskedBatch, MaskSpec, Stream, block_mask
from bwsft_kernels.philox import philox_u24
from torch import Tensor

from bwsft.objectives.active_blocks import groups_of, joined, mask_groups, rising_rates
from bwsft.objectives.base import (
    IGNORE,
    ONE24,
    Draw,
    Objective,
    Place,
    Predict,
    count,
    response_rows,
    supervise,
)
from bwsft.objectives.block_choice import (
    chances,
    choose_blocks,
    every_block,
    importance,
    num_blocks,
)
from bwsft.objectives.config import DiscreteConfig

if TYPE_CHECKING:
    from bwsft.data.packing import Batch


@dataclass(frozen=True, kw_only=True)
class Blockwise(Objective):
    """Masks one block of each response, or a group, or all, each with the rate of its own draw."""

    spec: MaskSpec
    order: str = "uniform"  # which block a visit masks: ObjectiveConfig.blocks
    levels: DiscreteConfig | None = None  # weight "discrete"
    draws_per_visit: int = 1  # of one block; their losses are averaged
    one_pass: bool = False  # a draw masks every block of every response, for block_causal
    active_blocks: int = 1  # in a group, at rates that rise
    suffix_weight: float = 0.0  # of the hidden suffix, in weights of the block
    suffix_steps: int | None = None  # updates over which that falls to 0; None: it stays

    @classmethod
    def of(cls, config: Any, family: Any, responses: Iterable = ()) -> Blockwise:
        return cls(
            spec=mask_spec(config, family),
            order=config.objective.blocks,
            levels=config.objective.discrete if config.objective.weight == "discrete" else None,
            draws_per_visit=config.draws_per_context,
            one_pass=config.context == "block_causal",
            active_blocks=config.active_blocks,
            suffix_weight=config.objective.suffix_weight,
            suffix_steps=config.steps if config.objective.suffix_decay else None,
        )

    def draws(self, batch: Batch, place: Place, predict: Predict) -> Iterator[Draw]:
        """`draws_per_visit` masks of one block of each example; with order "all" of every block in
        turn; with one_pass of all blocks at once."""
        if self.one_pass:
            yield from (self.one_pass_draw(batch, n) for n in range(self.draws_per_visit))
        elif self.order == "all":
            for some, block in every_block(batch, self.spec):
                yield from self.visit(some, place.step, block)
        else:
            yield from self.visit(batch, place.step)

    def visit(self, batch: Batch, step: int, block: int | None = None) -> Iterator[Draw]:
        """The draws of one visit of each example in update `step`, of this block if one is given.
        """
        suffix = self.suffix_weight
        if self.suffix_steps is not None:
            suffix *= max(0.0, 1 - step / self.suffix_steps)
        for number in range(self.draws_per_visit):
            masked = self.mask(batch, number, block)
            if self.active_blocks > 1:
                masked = self.mask_groups(batch, masked.block, number, block)
            draw = with_suffix(batch, masked, suffix) if suffix else draw_of(batch, masked)
            yield dataclasses.replace(
                draw, block_start=masked.block_start,
                block_length=masked.block_length, number=number, of=self.draws_per_visit,
            )  # fmt: skip

    def mask_groups(
        self, batch: Batch, chosen: Tensor, draw: int, block: int | None
    ) -> MaskedBatch:
        """Mask number `draw` of a visit of the groups that hold the blocks `chosen` [S]."""
        if block is None:
            factor = importance(batch, self.spec, self.order, chosen)
        else:
            factor = 1 / num_blocks(batch, self.spec).double()
        number = self.number(batch, draw, block)
        return mask_groups(batch, self.spec, chosen, number, factor, self.active_blocks)

    def number(self, batch: Batch, draw: int, block: int | None) -> Tensor:
        """What names the words of draw `draw` of a visit, or of its mask of this block, [S]."""
        visit = batch.visits
        if block is not None:
            visit = visit * num_blocks(batch, self.spec) + block
        return visit * self.draws_per_visit + draw

    def mask(self, batch: Batch, draw: int = 0, block: int | None = None) -> MaskedBatch:
        """Mask number `draw` of a visit's active blocks.

        The weights sum to 1 per sequence (0 where nothing is supervised): a step divides the summed
        loss once by its number of sequences. With `block` the visit masks this block of each
        example, and all blocks together sum to 1.
        """
        spec, draws = self.spec, self.draws_per_visit
        number, factor, rate = self.number(batch, draw, block), 1.0, None
        if block is None:
            chosen = choose_blocks(batch, spec, self.order)
            weights = chances(batch, spec, self.order)
        else:
            blocks = num_blocks(batch, spec)
            chosen, weights = torch.full_like(blocks, block), None
            factor = 1 / blocks.double()
        if self.levels is not None:
            u24 = philox_u24(0, number, batch.sample_ids, seed=spec.seed, stream=Stream.RATE)
            rate, omega = draw_level(self.levels, u24)
            factor = factor * omega
        if spec.pairs and spec.weight == "flat":
            factor = 2.0 * factor  # a token is supervised in one half only
        if isinstance(factor, float):
            factor = None if factor == 1 else torch.full_like(number, factor, dtype=torch.float64)
        return block_mask(
            batch.ids, batch.prompt_lengths, batch.response_lengths, spec,
            cu_seqlens=batch.cu_seqlens, sample_ids=batch.sample_ids,
            draw=number, block=chosen, block_weights=weights,
            block_draw=None if draws == 1 else number - draw, rate=rate, factor=factor,
        )  # fmt: skip

    def one_pass_draw(self, batch: Batch, draw: int = 0) -> Draw:
        """Draw number `draw` of a visit: every block of every response masked, each as a short
        sequence with a rate and marks of its own (number of the visit: visit * M + block). Weight
        1 / (M * count), so that a sequence's weights sum to 1 as in `visit`, or to M with
        block_factor "sum". No suffix is hidden: the context mode keeps later blocks out of sight.
        Several active blocks are groups whose rates rise. `batch` is on the host."""
        spec, draws, inside = self.spec, self.draws_per_visit, response_rows(batch).inside
        shapes = zip(batch.prompt_lengths.tolist(), batch.response_lengths.tolist(), strict=True)
        sizes = [[stop - start for start, stop in spec.grid.blocks(*shape)] for shape in shapes]
        per_row = torch.tensor([len(row) for row in sizes])
        owner = torch.repeat_interleave(torch.arange(len(sizes)), per_row)  # of each block
        index = torch.cat([torch.arange(len(row)) for row in sizes])
        lengths = torch.tensor([size for row in sizes for size in row])
        number = ((batch.visits * per_row)[owner] + index) * draws + draw
        block_of = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        places = inside.nonzero()[:, 0]  # of the response tokens in the batch
        mask = functools.partial(
            block_mask,
            batch.ids[places],
            torch.zeros_like(lengths),
            lengths,
            dataclasses.replace(spec, block_origin="response"),
            cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int(),
            sample_ids=batch.sample_ids[owner],
            draw=number,
            block=torch.zeros_like(lengths),
        )
        masked, groups = mask(), None
        if self.active_blocks > 1:
            groups = groups_of(batch, spec.seed, self.active_blocks)
            later = (index > 0) & ((index + groups.offset[owner]) % groups.size > 0)
            rate = rising_rates(masked, later, number, batch.sample_ids[owner], spec, groups.size)
            masked = joined(masked, mask(rate=rate), later[block_of])
        weight = masked.row_weight
        if spec.pairs and spec.weight == "flat":
            weight = 2 * weight  # a token is supervised in one half only
        if spec.block_factor == "mean":
            weight = weight / per_row[owner][block_of[masked.rows]]
        noisy = batch.ids.index_copy(0, places, masked.noisy_ids)
        rows = places[masked.rows]
        masked = dataclasses.replace(masked, noisy_ids=noisy, rows=rows, row_weight=weight)
        return dataclasses.replace(draw_of(batch, masked), number=draw, of=draws, groups=groups)


def draw_of(batch: Batch, masked: MaskedBatch) -> Draw:
    """What block_mask made of a batch, as a draw."""
    return Draw(
        noisy=dataclasses.replace(batch, ids=masked.noisy_ids),
        rows=masked.rows,
        target=masked.row_target,
        weight=masked.row_weight,
        num_rows=masked.num_rows,
        region=masked.block_length.sum(),
    )


def with_suffix(batch: Batch, masked: MaskedBatch, share: float) -> Draw:
    """A draw that also supervises what it hides of the response after the block: these tokens share
    evenly in `share` times the weight of the sequence's masked tokens. Its lists have T entries.
    """
    tokens = response_rows(batch)
    owner, device = tokens.owner, batch.ids.device
    stop = masked.block_start + masked.block_length
    hidden = masked.noisy_ids != batch.ids
    suffix = hidden & tokens.inside & (tokens.position >= stop[owner])
    # The masked tokens of a sequence weigh the same: a maximum, which needs no order of summation.
    each = torch.zeros(len(stop), device=device)
    each.scatter_reduce_(0, owner[masked.rows], masked.row_weight, "amax")
    total = share * (each * masked.count).double()
    of_suffix = (total / count(suffix, tokens).clamp(min=1)).float()
    weight = torch.where(suffix, of_suffix[owner], each[owner])
    noisy = dataclasses.replace(batch, ids=masked.noisy_ids)
    where = suffix | (masked.labels != IGNORE)
    draw = supervise(noisy, batch.ids, where, weight, tokens)
    return dataclasses.replace(draw, region=masked.block_length.sum() + suffix.sum())


def mask_spec(config: Any, family: Any) -> MaskSpec:
    """The kernel's options for a run `config` on a model `family`."""
    o = config.objective
    return MaskSpec(
        block_size=config.block_size, mask_id=family.mask_id, seed=config.seed,
        block_origin=family.block_origin, low=o.low, high=o.high, empty=o.empty, pairs=o.pairs,
        weight="flat" if o.weight == "discrete" else o.weight,  # omega_t comes with each draw
        block_factor=o.block_factor, prefix_noise=o.prefix_noise, suffix_leak=o.suffix_leak,
    )  # fmt: skip


def draw_level(levels: DiscreteConfig, u24: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a time t of 1..T: u24 -> (mask rates t/T in units of 2^-24, weights in fp64), all of one
    shape. One t per draw estimates sum_t omega_t E[masked CE at t] without bias, whether t is drawn
    uniformly or by "omega"."""
    edges, rates, weights = level_tables(levels, u24.device)
    index = torch.searchsorted(edges, u24, right=True)
    return rates[index], weights[index]


@functools.lru_cache(maxsize=8)
def level_tables(levels: DiscreteConfig, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Of t = 1..T: where its share of [0, 2^24) ends, its rate, its weight. [T] each.

    A chance is a whole number of 2^-24, and the weight is omega_t over that very chance: T omega_t
    and Z to 3 digits at least, and exactly unbiased.
    """
    t = torch.arange(1, levels.steps + 1)
    omega = 1 / t.double() if levels.omega == "elbo" else torch.ones(levels.steps).double()
    chance = omega if levels.sample == "omega" else torch.ones_like(omega)
    edges = (chance.cumsum(0) / chance.sum() * ONE24).round().long()
    share = edges.diff(prepend=edges.new_zeros(1))
    rates = (t * ONE24 + levels.steps // 2) // levels.steps
    return tuple(x.to(device) for x in (edges, rates, omega * ONE24 / share))
