"""Context modes in training: what each loss and gradient must equal, in float64 where it can be."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from block_masks import masked_states
from tiny_modes import MASK, PLACE, batch, gradients, held_out, mode_of, model
from tiny_packed import batch_of

from bwsft.objectives.base import response_rows
from bwsft.training import context_modes
from bwsft.training.block_causal import one_pass


def assert_same(a, b, **tolerance):
    tolerance = {"rtol": 1e-6, "atol": 1e-9, **tolerance}
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, **tolerance)


def test_exact_equals_plain_full_logits():
    b, mode = batch(), mode_of("exact", even=True)
    total, grads = gradients(mode, b)
    plain = model()
    (draw,) = mode.objective.draws(b, PLACE, None)
    noisy, n = draw.noisy, int(draw.num_rows)
    hidden = plain.hidden_states(noisy.ids, noisy.position_ids, noisy.cu_seqlens)
    logits = hidden @ plain.head()[0].T
    each = F.cross_entropy(logits[draw.rows[:n]], draw.target[:n], reduction="none")
    expected = (each * draw.weight[:n]).sum()
    expected.backward()
    assert total == pytest.approx(expected.item(), rel=1e-6)
    assert_same(grads, [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("name", ["exact", "cached", "block_causal"])
def test_confidence_adds_the_entropy_of_tokens_that_are_right(name):
    """With each token's own weight, in training and not in what is held out."""
    b, net, found = batch(), model(), []
    sharp = dataclasses.replace(mode_of(name, net), confidence=0.7)
    (draw,) = sharp.objective.draws(b, PLACE, None)
    with torch.no_grad():
        # The likeliest classes are the truth for every second token.
        choice = sharp.predict(draw.noisy, draw.rows).token
        target = torch.where(torch.arange(len(choice)) % 2 == 0, choice, draw.target)
        draw = dataclasses.replace(draw, target=torch.where(draw.weight > 0, target, -100))
        for mode in (sharp, dataclasses.replace(sharp, confidence=0.0)):
            one = mode.laid_out(b, [draw]) if name == "block_causal" else draw
            context = mode.live(one) if name == "block_causal" else mode.context_of(one, None)
            found.append([mode.loss_of(one, context, training) for training in (True, False)])
        noisy = draw.noisy
        hidden = net.hidden_states(noisy.ids, noisy.position_ids, noisy.cu_seqlens)
        logits = hidden[draw.rows] @ net.head()[0].T
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    right = log_p.argmax(-1) == draw.target
    assert found[0][1] == found[1][1] and right.any() and not right.all()
    expected = 0.7 * (draw.weight * entropy * right)[draw.weight > 0].sum()
    if name == "exact":
        torch.testing.assert_close(found[0][0] - found[1][0], expected.to(found[0][0].dtype))
    else:  # the same in kind, from the mode's own states
        assert 0 < float(found[0][0] - found[1][0]) < 2 * float(expected)


@pytest.mark.parametrize("canvas", ["fixed", "response"])
def test_cached_draws_share_block_and_context_and_average(canvas):
    """k draws give the mean of k single draws against the same frozen context."""
    b = batch(canvas=canvas)
    mode = mode_of("cached", draws=4, even=canvas == "fixed")
    total, grads = gradients(mode, b)
    one_by_one, sums = model(), []
    single = dataclasses.replace(mode, backbone=one_by_one)
    blocks = set()
    for draw in mode.objective.draws(b, PLACE, None):
        blocks.add(tuple(draw.block_start.tolist()))
        context = single.context_pass(draw)
        loss = one_by_one(draw.noisy, draw.rows, draw.target, draw.weight, context) / 4
        loss.backward()
        sums.append(loss.item())
    assert len(blocks) == 1 and len(sums) == 4
    assert total == pytest.approx(sum(sums), rel=1e-6)
    assert_same(grads, [p.grad for p in one_by_one.parameters()])


def test_draws_differ_and_pairs_are_complementary():
    b = batch()
    objective = mode_of("cached", draws=4, pairs=True).objective
    masks = [objective.mask(b, draw) for draw in range(4)]
    marks = [masked.noisy_ids == MASK for masked in masks]
    assert not torch.equal(marks[0], marks[2])
    for s in range(3):
        a = int(b.cu_seqlens[s]) + int(masks[0].block_start[s])
        block = slice(a, a + int(masks[0].block_length[s]))
        assert (marks[0][block] ^ marks[1][block]).all()


@pytest.mark.parametrize("active", [1, 2])
def test_context_grad_off_cuts_the_gradient_through_the_context_and_keeps_the_loss(active):
    b, options = batch(), {"active": active, "even": active == 1}
    on, g_on = gradients(mode_of("exact", **options), b)
    off, g_off = gradients(mode_of("frozen", **options), b)
    assert off == pytest.approx(on, rel=1e-6)  # same state, same numbers forward
    assert any(not torch.allclose(x, y, rtol=1e-3) for x, y in zip(g_on, g_off, strict=True))


def test_block_causal_rows_equal_separate_forwards():
    """Logits of noisy block k equal those of a forward on [prompt, clean < k, noisy k] alone."""
    b, net = batch(), model()
    inside = response_rows(b).inside
    noisy = torch.where(inside & (torch.arange(len(b.ids)) % 3 == 0), MASK, b.ids)
    one = one_pass(b, noisy[None], mode_of("block_causal", net).grid)
    with torch.no_grad():
        hidden = net.hidden_states(one.ids, one.position_ids, one.cu_seqlens, plan=one.plan)
        for s in range(3):
            prompt, length = int(b.prompt_lengths[s]), int(b.response_lengths[s])
            a = int(b.cu_seqlens[s])
            for start in range(prompt, prompt + length, 4):
                stop = min(start + 4, prompt + length)
                ids = torch.cat([b.ids[a : a + start], noisy[a + start : a + stop]])
                blocks = torch.tensor([0] * prompt + [i // 4 + 1 for i in range(stop - prompt)])
                alone = masked_states(net, ids, blocks[:, None] >= blocks)
                got = hidden[one.copy_of[0, a + start : a + stop]]
                torch.testing.assert_close(got, alone[start:], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("lengths", [[(5, 9), (3, 12), (4, 6)], [(2, 3), (0, 9)], [(0, 3), (0, 4)]])
@pytest.mark.parametrize("grad", [True, False])
def test_clean_tokens_that_no_copy_sees_are_left_out(lengths, grad, monkeypatch):
    """Those of the last blocks, unless there are no others; and that changes nothing."""
    b, clean = batch(lengths, canvas="response"), []

    def run(**options):
        def spy(batch, noisy, grid, *_):
            one = one_pass(batch, noisy, grid, **options)
            clean.append(len(one.clean_rows))
            return one

        monkeypatch.setattr(context_modes, "one_pass", spy)
        mode = dataclasses.replace(mode_of("block_causal", draws=2), context_grad=grad)
        return gradients(mode, b)

    (loss, found), (same, expected) = run(), run(supervised=True)
    unseen = sum((response - 1) % 4 + 1 for _, response in lengths)
    assert clean == [clean[1] - unseen or unseen, sum(sum(pair) for pair in lengths)]
    assert loss == pytest.approx(same, rel=1e-6)
    assert_same(found, expected)


def test_block_causal_rows_ignore_later_blocks_and_other_copies():
    b, net = batch(), model()
    grid, response = mode_of("block_causal", net).grid, response_rows(b).inside.nonzero()[:, 0]
    noisy = b.ids.clone()
    one = one_pass(b, noisy[None], grid)
    first_block = one.copy_of[0, response[:4]]
    with torch.no_grad():
        before = net.hidden_states(one.ids, one.position_ids, one.cu_seqlens, plan=one.plan)
        changed = b.ids.clone()
        changed[response[:12]] = 7  # clean copy of the first response, its first block included
        noisy[response[4:12]] = 9  # its later noisy blocks
        two = one_pass(dataclasses.replace(b, ids=changed), noisy[None], grid)
        after = net.hidden_states(two.ids, two.position_ids, two.cu_seqlens, plan=two.plan)
    torch.testing.assert_close(before[first_block], after[first_block], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("factor", ["mean", "sum"])
def test_block_causal_weights_sum_to_one_or_to_the_blocks(factor):
    b = batch(canvas="response")
    mode = mode_of("block_causal", block_factor=factor)
    seen = {}
    forward = mode.backbone.forward

    def spy(one, rows, target, weight, *more):
        seen["weight"], seen["rows"], seen["one"] = weight, rows, one
        return forward(one, rows, target, weight, *more)

    mode.backbone.forward = spy
    total, grads = gradients(mode, b)
    owner = torch.searchsorted(seen["one"].cu_seqlens[1:], seen["rows"], right=True)
    sums = torch.zeros(3).index_add_(0, owner, seen["weight"])
    blocks = torch.tensor([3.0, 3.0, 2.0])
    torch.testing.assert_close(sums, blocks if factor == "sum" else torch.ones(3))
    assert all(torch.isfinite(g).all() for g in grads) and total > 0


@pytest.mark.parametrize("name", ["exact", "cached", "block_causal"])
def test_held_out_score_is_the_modes_own_loss(name):
    """The score of a draw equals -log p at that state, computed the slow way for the mode."""
    b, net = batch(), model()
    mode = mode_of(name, net)
    for draw in held_out(mode, 3).draws(b):
        with torch.no_grad():
            got = mode.score(draw)
            expected = slow_score(net, name, draw)
        assert got.item() == pytest.approx(expected, rel=1e-6)


def slow_score(net, name, draw):
    total, head = 0.0, net.head()[0]
    noisy = draw.noisy
    for row, target, weight in zip(draw.rows, draw.target, draw.weight, strict=True):
        s = int(torch.searchsorted(noisy.cu_seqlens[1:], row, right=True))
        a, end = int(noisy.cu_seqlens[s]), int(noisy.cu_seqlens[s + 1])
        start, prompt = int(draw.block_start[s]), int(noisy.prompt_lengths[s])
        stop = start + int(draw.block_length[s])
        ids, place = noisy.ids[a:end], int(row) - a
        if name == "block_causal":
            ids = ids[:stop]
            blocks = torch.tensor([0] * prompt + [i // 4 + 1 for i in range(stop - prompt)])
            hidden = masked_states(net, ids, blocks[:, None] >= blocks)[place]
        elif name == "exact":
            hidden = net.hidden_states(ids, torch.arange(len(ids)), torch.tensor([0, len(ids)]))
            hidden = hidden[place]
        else:
            hidden = cached_row(net, ids, start, stop, place)
        logp = (head @ hidden).log_softmax(0)[target]
        total -= float(weight) * float(logp)
    return total


def cached_row(net, ids, start, stop, place):
    from bwsft.models.kv_cache import Span

    blank = ids.clone()
    blank[start:stop] = MASK
    cache = net.new_cache(1, len(ids))
    net.fill(batch_of(blank), cache)
    where = Span(torch.tensor([start]), torch.tensor([stop - start]), stop - start, True)
    return net.active_hidden_states(ids[None, start:stop], where, cache)[place - start]


def test_modes_depend_on_the_visit_alone():
    """Order and split of the batch change nothing: each sequence's loss is its own."""
    for name, draws in (("exact", 1), ("cached", 2), ("block_causal", 1)):
        mode, b = mode_of(name, draws=draws), batch()
        whole, _ = gradients(mode, b)
        parts = sum(gradients(mode, b.select([s]))[0] for s in (2, 0, 1))
        assert parts == pytest.approx(whole, rel=1e-6), name
