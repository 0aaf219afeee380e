"""Trace distillation against loops over sequences and blocks, and its losses in float64."""

import dataclasses

import pytest
import tiny_llada
import torch
from block_masks import block_causal_mask
from bwsft_kernels import MaskSpec, Stream
from bwsft_kernels.philox import philox_u24
from tiny_modes import MASK, batch, mode_of

from bwsft.models.attention import packed_layout
from bwsft.objectives.base import Place
from bwsft.objectives.distill import Distill

SEED, SIZE, STEPS = 5, 4, 11


def traced(visit=0, **layout):
    """A batch with the order of a decoder that went block by block, at random in each; of the last
    sequence the last block was left when it had two of its tokens."""
    some = batch(visit=visit, **layout)
    steps = torch.full_like(some.ids, -1)
    generator = torch.Generator().manual_seed(visit)
    for s, edge in enumerate(some.cu_seqlens[:-1].tolist()):
        first, length = edge + int(some.prompt_lengths[s]), int(some.response_lengths[s])
        for start in range(0, length, SIZE):
            n = min(SIZE, length - start)
            order = torch.randperm(n, generator=generator)
            steps[first + start : first + start + n] = start + order
    steps[first + start : first + start + n].masked_fill_(order >= 2, -1)
    return dataclasses.replace(some, steps=steps)


def distill(one_pass=False, draws=1, origin="response", window=(0.25, 1.0)):
    spec = MaskSpec(block_size=SIZE, mask_id=MASK, seed=SEED, block_origin=origin)
    return Distill(spec=spec, steps=STEPS, window_from=window[0], window_to=window[1],
                   draws_per_visit=draws, one_pass=one_pass)  # fmt: skip


def u24(position, draw, sample, stream):
    return int(philox_u24(*map(torch.tensor, (position, draw, sample)), seed=SEED, stream=stream))


def states(objective, some, step, number):
    """[(sequence, start, stop, masked places, {place: weight})] of the blocks that one draw
    supervises, places being positions in the row."""
    window = {0: 1, 5: 2, 10: 4}[step]  # a quarter of 4 tokens, 0.625 of them, all
    for s, edge in enumerate(some.cu_seqlens[:-1].tolist()):
        shape = int(some.prompt_lengths[s]), int(some.response_lengths[s])
        sample, visit = int(some.sample_ids[s]), int(some.visits[s])
        blocks = objective.spec.grid.blocks(*shape)
        chosen = u24(0, visit, sample, Stream.BLOCK) * len(blocks) >> 24
        for index, (start, stop) in enumerate(blocks):
            if not (objective.one_pass or index == chosen):
                continue
            steps = {i: int(some.steps[edge + i]) for i in range(start, stop)}
            order = sorted((i for i in steps if steps[i] >= 0), key=steps.get)
            draw = visit * objective.draws_per_visit + number
            t = u24(index, draw, sample, Stream.TIME) * len(order) >> 24
            taught = order[t : t + window]
            share = len(taught) * (len(blocks) if objective.one_pass else 1)
            yield s, start, stop, set(steps) - set(order[:t]), dict.fromkeys(taught, 1 / share)


@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize("origin", ["response", "absolute"])
def test_states_are_those_of_a_loop(one_pass, origin):
    objective, seen = distill(one_pass, 2, origin), set()
    for step, visit in ((0, 0), (5, 1), (10, 2)):
        some = traced(visit)
        for number, draw in enumerate(objective.draws(some, Place(step, 0, 3, 1), None)):
            ids, weights = some.ids.clone(), {}
            for s, start, stop, masked, taught in states(objective, some, step, number):
                edge, end = map(int, some.cu_seqlens[s : s + 2])
                ids[[edge + i for i in masked]] = MASK
                if not one_pass:
                    ids[edge + stop : end] = MASK
                    bounds = int(draw.block_start[s]), int(draw.block_length[s])
                    assert bounds == (start, stop - start)
                weights |= {edge + i: weight for i, weight in taught.items()}
                seen.add((len(masked), len(taught)))
            n = int(draw.num_rows)
            assert torch.equal(draw.noisy.ids, ids)
            found = dict(zip(draw.rows[:n].tolist(), draw.weight[:n].tolist(), strict=True))
            assert found == pytest.approx(weights) and not draw.weight[n:].any()
            assert draw.target[:n].tolist() == some.ids[draw.rows[:n]].tolist()
            total = torch.zeros(3).index_add_(
                0, torch.searchsorted(some.cu_seqlens[1:], draw.rows[:n], right=True),
                draw.weight[:n])  # fmt: skip
            torch.testing.assert_close(total, torch.ones(3))
            assert (draw.number, draw.of) == (number, 2)
    assert (4, 4) in seen and any(taught < masked for masked, taught in seen)


def naive_loss(net, objective, some, step):
    """Float64 cross-entropy of every supervised token, from a forward on its block alone after what
    its mode lets it see."""
    total, head = 0.0, net.head()[0]
    for s, _, stop, masked, taught in states(objective, some, step, 0):
        edge, end = map(int, some.cu_seqlens[s : s + 2])
        clean = some.ids[edge:end]
        row = clean.clone()
        row[list(masked)] = MASK
        mask = None
        if objective.one_pass:
            row, first = row[:stop], int(some.prompt_lengths[s])
            place = torch.arange(stop)
            numbers = torch.where(place < first, 0, (place - first) // SIZE + 1)
            mask = block_causal_mask(numbers)[None, None]
        else:
            row[stop:] = MASK
        layout = dataclasses.replace(packed_layout(torch.tensor([0, len(row)])), mask=mask)
        hidden = net.run_layers(row, torch.arange(len(row)), layout)
        log_p = (hidden @ head.T).log_softmax(-1)
        # Row weights are fp32 by contract: the same numbers here.
        rounded = {i: torch.tensor(w, dtype=torch.float32).double() for i, w in taught.items()}
        total = total - sum(w * log_p[i, clean[i]] for i, w in rounded.items())
    return total


@pytest.mark.parametrize("context", ["exact", "block_causal"])
def test_the_loss_is_that_of_float64_full_logits(context):
    net = tiny_llada.backbone(seed=3, n_kv_heads=2).double()
    objective = distill(context == "block_causal")
    mode, some, place = mode_of(context, net, objective=objective), traced(), Place(5, 0, 3, 1)
    loss = sum(found.total for found in mode.losses(some, place))
    expected = naive_loss(net, objective, some, 5)
    pair = [torch.autograd.grad(x, list(net.parameters())) for x in (loss, expected)]
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-10)
    for x, y in zip(*pair, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-10)


def test_cached_draws_share_a_block_and_its_context():
    net = tiny_llada.backbone(seed=3, n_kv_heads=2).double()
    mode = mode_of("cached", net, objective=distill(draws=3))
    some, place, expected, starts = traced(), Place(10, 0, 3, 1), 0.0, set()
    for draw in mode.objective.draws(some, place, None):
        starts.add(tuple(draw.block_start.tolist()))
        one = dataclasses.replace(draw, number=0)  # with a context of its own
        expected += mode.loss_of(one, mode.context_of(one, None), training=True) / 3
    assert len(starts) == 1
    torch.testing.assert_close(sum(x.total for x in mode.losses(some, place)), expected)


def test_the_window_grows_over_the_run():
    objective = distill()
    assert [objective.window(step) for step in (0, 3, 5, 7, 10)] == [1, 2, 2, 3, 4]
    assert distill(window=(0.0, 0.0)).window(10) == 1


def test_what_it_cannot_train_on_is_said():
    with pytest.raises(ValueError, match="what `bwsft distill` wrote"):
        next(distill().draws(batch(), Place(0, 0, 3, 1), None))
