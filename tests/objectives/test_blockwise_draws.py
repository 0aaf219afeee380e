"""Several forwards per visit: every block of an example, several draws of one block, complementary
pairs; in the loss, its gradients and a training step."""

import dataclasses
import math

import pytest
import torch
from bwsft_kernels import MaskSpec, block_mask
from tiny_modes import MASK, PLACE, corrupt, losses, mode_of

from bwsft import config as c
from bwsft.models.kv_cache import Context
from bwsft.objectives import block_choice
from bwsft.objectives.base import Draw
from bwsft.objectives.config import DiscreteConfig
from bwsft.training.trainer import train_step

LENGTHS = [(3, 16), (5, 1), (2, 6), (7, 13), (1, 21)]


# --- all blocks of a visit ---


@pytest.mark.parametrize("origin", ["response", "absolute"])
@pytest.mark.parametrize("factor", ["mean", "sum"])
def test_every_block_of_every_example_once(origin, factor, batch_of, sums):
    batch = batch_of(LENGTHS, visit=2, origin=origin)
    spec = MaskSpec(4, MASK, seed=5, block_factor=factor, block_origin=origin)
    seen, rates, totals = [], [], torch.zeros(5).double()
    for part, block in block_choice.every_block(batch, spec):
        _, masked = corrupt(part, spec, "all", block=block)
        seen += [(int(s), block) for s in part.sample_ids]
        rates += masked.rate.tolist()
        assert (masked.block == block).all() and (masked.count > 0).all()
        totals.index_add_(0, part.sample_ids, sums(part, masked))
    blocks = block_choice.num_blocks(batch, spec)
    assert sorted(seen) == [(s, a) for s in range(5) for a in range(int(blocks[s]))]
    assert len(set(rates)) == len(rates)  # own rates
    expected = torch.ones(5) if factor == "mean" else blocks
    torch.testing.assert_close(totals, expected.double(), rtol=1e-6, atol=0)
    again = [corrupt(p, spec, "all", block=a)[1].rate
             for p, a in block_choice.every_block(batch_of(LENGTHS, visit=3, origin=origin), spec)]
    assert not set(torch.cat(again).tolist()) & set(rates)  # and others at the next visit


def step(mode, batch):
    """(loss, gradients, supervised tokens, region) of a batch."""
    totals, rows, regions = map(sum, zip(*losses(mode, batch), strict=True))
    return totals, [p.grad.clone() for p in mode.backbone.parameters()], rows, regions


def assert_close(one, other):
    torch.testing.assert_close(one[0], other[0], rtol=1e-6, atol=0)
    for x, y in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("name", "draws"), [("exact", 1), ("cached", 2), ("exact", 2)])
@pytest.mark.parametrize("canvas", ["response", "fixed"])
def test_all_blocks_are_the_average_of_the_single_ones(name, draws, canvas, batch_of):
    """Sequences of 1, 2 and 4 blocks: no forward has a sequence without loss."""
    batch = batch_of([(3, 14), (5, 1), (2, 6)], visit=1, canvas=canvas)
    mode, one = mode_of(name, draws=draws, order="all"), mode_of(name, draws=draws)
    sizes, forward = [], mode.backbone.forward

    def spy(noisy, *args):
        sizes.append(noisy.num_sequences)
        return forward(noisy, *args)

    mode.backbone.forward = spy
    total, grads, _, region = step(mode, batch)
    spec = mode.objective.spec
    blocks = block_choice.num_blocks(batch, spec)
    assert sum(sizes) == (draws + (name == "cached")) * int(blocks.sum())
    assert region == draws * int(batch.response_lengths.sum())
    loss = 0.0
    for s, m in enumerate(blocks.tolist()):
        alone = batch.select([s])
        for a in range(m):
            # A single-block visit: the draws that belong to block a of this visit.
            visit = dataclasses.replace(alone, visits=alone.visits * m + a)
            single = dataclasses.replace(one, objective=OneBlock(spec, draws, a))
            for part in single.losses(visit, PLACE):
                (part.total / m).backward()
                loss += part.total.item() / m
    assert_close((total, grads), (loss, [p.grad for p in one.backbone.parameters()]))


@dataclasses.dataclass
class OneBlock:
    """The masks of one block, by the kernel alone."""

    spec: MaskSpec
    count: int
    block: int
    excluded_id = None

    def draws(self, batch, place, predict):
        for number in range(self.count):
            masked = block_mask(
                batch.ids, batch.prompt_lengths, batch.response_lengths, self.spec,
                cu_seqlens=batch.cu_seqlens, sample_ids=batch.sample_ids,
                draw=batch.visits * self.count + number,
                block=torch.full_like(batch.visits, self.block),
            )
            yield Draw(
                dataclasses.replace(batch, ids=masked.noisy_ids), masked.rows, masked.row_target,
                masked.row_weight, masked.num_rows, masked.block_length.sum(), masked.block_start,
                masked.block_length, number=number, of=self.count,
            )


# --- several draws and pairs of one block ---


def test_exact_draws_share_the_block_and_average(batch_of):
    batch, mode = batch_of([(3, 14), (5, 9)], canvas="fixed"), mode_of("exact", draws=4)
    single = mode_of("exact")
    total, grads, rows, region = step(mode, batch)
    loss, count, blocks = 0.0, 0, set()
    for draw in mode.objective.draws(batch, PLACE, None):
        blocks.add(tuple(draw.block_start.tolist()))
        count += int(draw.num_rows)
        part = single.loss_of(draw, Context(single.span(draw))) / 4
        part.backward()
        loss += part.item()
    assert len(blocks) == 1 and (rows, region) == (count, 4 * 2 * 4)
    assert_close((total, grads), (loss, [p.grad for p in single.backbone.parameters()]))


@pytest.mark.parametrize("name", ["exact", "cached"])
def test_a_flat_pair_weighs_every_token_exactly_once(name, batch_of):
    """m and not-m at 1/|I_a| each. A constant loss comes out exact, whatever
    was masked; 200 visits of blocks of 4 and 2 tokens, pairs with an empty half among them."""
    batch = batch_of([(3, 6)] * 200, visit=range(200))
    spec = MaskSpec(4, MASK, seed=2, weight="flat", empty="skip", pairs=True)
    weight = torch.zeros(len(batch.ids), dtype=torch.float64)
    empty = 0
    for draw in range(4):
        _, masked = corrupt(batch, spec, "uniform", draw, 4)
        weight.index_add_(0, masked.rows, masked.row_weight.double() / 4)
        empty += int((masked.count == 0).sum())
    row = torch.repeat_interleave(torch.arange(200), batch.cu_seqlens.diff().long())
    offset = batch.position_ids - masked.block_start[row]
    length = masked.block_length[row]
    inside = (offset >= 0) & (offset < length)
    assert torch.equal(weight, torch.where(inside, 1 / length.double(), 0.0))
    assert empty > 20 and set(masked.block_length.tolist()) == {2, 4}

    mode = mode_of(name, draws=2, weight="flat", empty="skip", pairs=True)
    mode.backbone.head()[0].data.zero_()  # uniform: every cross-entropy is log 50
    total, *_, rows, region = step(mode, batch.select(range(8)))
    assert total == pytest.approx(8 * math.log(50), rel=1e-6)
    assert 2 * rows == region


RUNS = {
    "all": dict(blocks="all"),
    "flat pairs": dict(name="classical", weight="flat", empty="skip", pairs=True),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_training_step_in_any_micro_batches(tiny, make_run, name, tmp_path):
    """Uniform predictions: the loss is log V, whatever was masked, and nothing else."""
    results, draws = [], 2 if "pairs" in name else 1
    for micro in (1, 4):
        config = tiny(
            objective=c.ObjectiveConfig(**RUNS[name]), draws_per_context=draws,
            micro_batch_size=micro, out=str(tmp_path / f"{micro}"), block_size=2,
        )
        c.validate(config)
        run = make_run(config, torch.float64)
        head = run.backbone.head()[0]
        head.data.zero_()
        results.append(train_step(run, 0))
        assert results[-1].loss == pytest.approx(math.log(len(head)), rel=1e-6)
    counts = {(step.supervised_tokens, step.region_tokens) for step in results}
    assert len(counts) == 1
    supervised, region = counts.pop()
    # Four responses of 3 to 14 tokens and their fill, whole; a single block has 2.
    assert region >= 4 * 4 * draws and supervised < region


def test_the_run_hands_over_times_and_block_distribution(tiny, make_run, batch_of, sums):
    objective = c.ObjectiveConfig(
        weight="discrete", empty="skip", discrete=DiscreteConfig(8, "one", "omega"),
        blocks="rising", block_factor="sum",
    )
    run = make_run(tiny(objective=objective))
    batch = batch_of([(3, 8)] * 200, visit=range(200))
    masked = run.mode.objective.mask(batch)
    assert set((masked.rate * 8).tolist()) == set(range(1, 9))
    weight = torch.tensor([3.0, 1.5])[masked.block] * 8 / 4  # 1 / rho, Z = 8, |I_a| = 4
    torch.testing.assert_close(sums(batch, masked).float(), weight * masked.count)
