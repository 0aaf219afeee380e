"""Several forwards per visit: every block of an example, several draws of one block, complementary
pairs; in the loss, its gradients and a training step."""

import dataclasses
import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from bwsft_kernels import MaskSpec, block_mask

from bwsft import config as c
from bwsft.models.llada_config import LladaConfig
from bwsft.models.loading import new_backbone
from bwsft.objectives import blockwise
from bwsft.objectives.config import DiscreteConfig
from bwsft.training.context_modes import Mode
from bwsft.training.trainer import train_step

MASK, EOS = 49, 1
LENGTHS = [(3, 16), (5, 1), (2, 6), (7, 13), (1, 21)]


# --- all blocks of a visit ---


@pytest.mark.parametrize("origin", ["response", "absolute"])
@pytest.mark.parametrize("factor", ["mean", "sum"])
def test_every_block_of_every_example_once(origin, factor, batch_of, sums):
    batch = batch_of(LENGTHS, visit=2, origin=origin)
    spec = MaskSpec(4, MASK, seed=5, block_factor=factor, block_origin=origin)
    seen, rates, totals = [], [], torch.zeros(5).double()
    for part, block in blockwise.every_block(batch, spec):
        _, masked = blockwise.corrupt(part, spec, "all", block=block)
        seen += [(int(s), block) for s in part.sample_ids]
        rates += masked.rate.tolist()
        assert (masked.block == block).all() and (masked.count > 0).all()
        totals.index_add_(0, part.sample_ids, sums(part, masked))
    blocks = blockwise.num_blocks(batch, spec)
    assert sorted(seen) == [(s, a) for s in range(5) for a in range(int(blocks[s]))]
    assert len(set(rates)) == len(rates)  # own rates
    expected = torch.ones(5) if factor == "mean" else blocks
    torch.testing.assert_close(totals, expected.double(), rtol=1e-6, atol=0)
    again = [blockwise.corrupt(p, spec, "all", block=a)[1].rate
             for p, a in blockwise.every_block(batch_of(LENGTHS, visit=3, origin=origin), spec)]
    assert not set(torch.cat(again).tolist()) & set(rates)  # and others at the next visit


def model():
    config = LladaConfig(
        d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, mlp_hidden_size=48, vocab_size=50,
        max_sequence_length=64, mask_token_id=MASK, eos_token_id=EOS, pad_token_id=EOS,
    )
    return new_backbone(config, 3, dtype=torch.float64)


def run_of(mode, order="uniform", backbone=None, **spec):
    spec = MaskSpec(block_size=4, mask_id=MASK, seed=5, **spec)
    return SimpleNamespace(
        backbone=backbone or model(), spec=spec, eval_spec=spec, device=torch.device("cpu"),
        autocast=nullcontext, mode=mode,
        corrupt=lambda b, draw, block=None: blockwise.corrupt(
            b, spec, order, draw, mode.draws, block=block
        ),
    )


def step(run, batch):
    """(loss, gradients, masked tokens, region) of a batch."""
    total = rows = region = 0
    for loss in run.mode.losses(run, batch):
        loss.total.backward()
        total, rows, region = total + loss.total.item(), rows + loss.rows, region + loss.region
    return total, [p.grad.clone() for p in run.backbone.parameters()], int(rows), int(region)


def assert_close(one, other):
    torch.testing.assert_close(one[0], other[0], rtol=1e-6, atol=0)
    for x, y in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("mode", [Mode("exact"), Mode("cached", draws=2), Mode("exact", draws=2)])
@pytest.mark.parametrize("canvas", ["response", "fixed"])
def test_all_blocks_are_the_average_of_the_single_ones(mode, canvas, batch_of):
    """Sequences of 1, 2 and 4 blocks: no forward has a sequence without loss."""
    batch = batch_of([(3, 14), (5, 1), (2, 6)], visit=1, canvas=canvas)
    run, one = run_of(dataclasses.replace(mode, all_blocks=True), "all"), run_of(mode)
    sizes, forward = [], run.backbone.forward

    def spy(noisy, *args):
        sizes.append(noisy.num_sequences)
        return forward(noisy, *args)

    run.backbone.forward = spy
    total, grads, _, region = step(run, batch)
    blocks = blockwise.num_blocks(batch, run.spec)
    passes = mode.draws + (mode.name == "cached")
    assert sum(sizes) == passes * int(blocks.sum())
    assert region == mode.draws * int(batch.response_lengths.sum())
    loss = 0.0
    for s, m in enumerate(blocks.tolist()):
        alone = batch.select([s])
        for a in range(m):
            # A single-block visit: the draws that belong to block a of this visit.
            visit = dataclasses.replace(alone, visits=alone.visits * m + a)
            one.corrupt = lambda b, draw, a=a: masks_of_block(b, one.spec, draw, mode.draws, a)
            for part in mode.losses(one, visit):
                (part.total / m).backward()
                loss += part.total.item() / m
    assert_close((total, grads), (loss, [p.grad for p in one.backbone.parameters()]))


def masks_of_block(batch, spec, draw, draws, block):
    """The masks of one block, by the kernel alone."""
    masked = block_mask(
        batch.ids, batch.prompt_lengths, batch.response_lengths, spec, cu_seqlens=batch.cu_seqlens,
        sample_ids=batch.sample_ids, draw=batch.visits * draws + draw,
        block=torch.full_like(batch.visits, block),
    )
    return dataclasses.replace(batch, ids=masked.noisy_ids), masked


# --- several draws and pairs of one block ---


def test_exact_draws_share_the_block_and_average(batch_of):
    batch, mode = batch_of([(3, 14), (5, 9)], canvas="fixed"), Mode("exact", draws=4)
    run, single = run_of(mode), run_of(Mode("exact"))
    total, grads, rows, region = step(run, batch)
    loss, count, blocks = 0.0, 0, set()
    for draw in range(4):
        noisy, masked = run.corrupt(batch, draw)
        blocks.add(tuple(masked.block.tolist()))
        count += int(masked.num_rows)
        single.corrupt = lambda b, d, pair=(noisy, masked): pair
        for part in single.mode.losses(single, batch):
            (part.total / 4).backward()
            loss += part.total.item() / 4
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
        _, masked = blockwise.corrupt(batch, spec, "uniform", draw, 4)
        weight.index_add_(0, masked.rows, masked.row_weight.double() / 4)
        empty += int((masked.count == 0).sum())
    row = torch.repeat_interleave(torch.arange(200), batch.cu_seqlens.diff().long())
    offset = batch.position_ids - masked.block_start[row]
    length = masked.block_length[row]
    inside = (offset >= 0) & (offset < length)
    assert torch.equal(weight, torch.where(inside, 1 / length.double(), 0.0))
    assert empty > 20 and set(masked.block_length.tolist()) == {2, 4}

    run = run_of(Mode(name, draws=2), weight="flat", empty="skip", pairs=True)
    run.backbone.head()[0].data.zero_()  # uniform: every cross-entropy is log 50
    total, *_, rows, region = step(run, batch.select(range(8)))
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
    _, masked = run.corrupt(batch, 0)
    assert set((masked.rate * 8).tolist()) == set(range(1, 9))
    weight = torch.tensor([3.0, 1.5])[masked.block] * 8 / 4  # 1 / rho, Z = 8, |I_a| = 4
    torch.testing.assert_close(sums(batch, masked).float(), weight * masked.count)
