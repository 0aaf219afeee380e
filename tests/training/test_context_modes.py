"""Context modes in training: what each loss and gradient must equal, in float64 where it can be."""

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from bwsft_kernels import MaskSpec

from bwsft.data.packing import CanvasLayout, Example, pack
from bwsft.models.llada_config import LladaConfig
from bwsft.models.loading import new_backbone
from bwsft.objectives import blockwise
from bwsft.objectives.nelbo import masked_states
from bwsft.training.context_modes import Mode, block_causal_mask, one_pass, response_rows

MASK, EOS = 49, 1


def model(seed=3):
    config = LladaConfig(
        d_model=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        mlp_hidden_size=48,
        vocab_size=50,
        max_sequence_length=64,
        mask_token_id=MASK,
        eos_token_id=EOS,
        pad_token_id=EOS,
    )
    return new_backbone(config, seed, dtype=torch.float64)


def batch(lengths=((5, 9), (3, 12), (4, 6)), canvas="fixed", visit=0):
    layout = CanvasLayout(
        mask_id=MASK, eos_id=EOS, canvas=canvas, block_size=4, gen_length=16, max_length=32
    )
    rng = np.random.default_rng(0)
    examples = [
        Example(rng.integers(2, 49, p), rng.integers(2, 49, r), i, visit)
        for i, (p, r) in enumerate(lengths)
    ]
    return pack(examples, layout)


def run_of(mode, backbone=None, **spec):
    spec = MaskSpec(block_size=4, mask_id=MASK, seed=5, **spec)
    run = SimpleNamespace(
        backbone=backbone or model(),
        spec=spec,
        eval_spec=spec,
        device=torch.device("cpu"),
        autocast=nullcontext,
        mode=mode,
    )
    run.corrupt = lambda b, draw: blockwise.corrupt(b, spec, "uniform", draw, mode.draws)
    return run


def gradients(run, b):
    total = sum(backward(loss) for loss, *_ in run.mode.losses(run, b))
    return total, [p.grad.clone() for p in run.backbone.parameters()]


def backward(loss):
    loss.backward()
    return loss.item()


def assert_same(a, b, **tolerance):
    tolerance = {"rtol": 1e-6, "atol": 1e-9, **tolerance}
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, **tolerance)


def test_exact_equals_plain_full_logits():
    b, mode = batch(), Mode("exact", even=True)
    run = run_of(mode)
    total, grads = gradients(run, b)
    plain = model()
    noisy, masked = run.corrupt(b, 0)
    hidden = plain.hidden_states(noisy.ids, noisy.position_ids, noisy.cu_seqlens)
    logits = hidden @ plain.head()[0].T
    n = int(masked.num_rows)
    each = F.cross_entropy(logits[masked.rows[:n]], masked.row_target[:n], reduction="none")
    expected = (each * masked.row_weight[:n]).sum()
    expected.backward()
    assert total == pytest.approx(expected.item(), rel=1e-6)
    assert_same(grads, [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("canvas", ["fixed", "response"])
def test_cached_draws_share_block_and_context_and_average(canvas):
    """k draws give the mean of k single draws against the same frozen context."""
    b = batch(canvas=canvas)
    mode = Mode("cached", draws=4, even=canvas == "fixed")
    run = run_of(mode)
    total, grads = gradients(run, b)
    one_by_one, sums = model(), []
    single = run_of(mode, one_by_one)
    blocks = set()
    for draw in range(4):
        noisy, masked = run.corrupt(b, draw)
        blocks.add(tuple(masked.block.tolist()))
        context = mode.freeze(single, noisy, mode.span(masked, run.spec))
        loss = one_by_one(noisy, masked.rows, masked.row_target, masked.row_weight, context) / 4
        loss.backward()
        sums.append(loss.item())
    assert len(blocks) == 1
    assert total == pytest.approx(sum(sums), rel=1e-6)
    assert_same(grads, [p.grad for p in one_by_one.parameters()])


def test_draws_differ_and_pairs_are_complementary():
    b = batch()
    run = run_of(Mode("cached", draws=4), pairs=True)
    marks = [run.corrupt(b, draw)[0].ids == MASK for draw in range(4)]
    assert not torch.equal(marks[0], marks[2])
    noisy, masked = run.corrupt(b, 0)
    other, theirs = run.corrupt(b, 1)
    for s in range(3):
        a = int(b.cu_seqlens[s]) + int(masked.block_start[s])
        block = slice(a, a + int(masked.block_length[s]))
        assert ((noisy.ids[block] == MASK) ^ (other.ids[block] == MASK)).all() or (
            int(masked.count[s]) == 4 or int(theirs.count[s]) == 4
        )


def test_context_grad_off_cuts_the_gradient_through_the_context_and_keeps_the_loss():
    b = batch()
    on, g_on = gradients(run_of(Mode("exact", even=True)), b)
    off, g_off = gradients(run_of(Mode("exact", context_grad=False, even=True)), b)
    assert off == pytest.approx(on, rel=1e-6)  # same state, same numbers forward
    assert any(not torch.allclose(x, y, rtol=1e-3) for x, y in zip(g_on, g_off, strict=True))


def block_numbers(prompt, sizes):
    block = [k + 1 for k, n in enumerate(sizes) for _ in range(n)]
    return torch.tensor([[0] * prompt + block + [-k for k in block]])


@pytest.mark.parametrize(("prompt", "sizes"), [(3, [4, 4, 2]), (1, [1]), (5, [2, 2, 2, 2])])
def test_block_causal_mask_in_sentences(prompt, sizes):
    numbers = block_numbers(prompt, sizes)[0]
    allowed = block_causal_mask(numbers[None])[0, 0]
    pairs = prompt**2 + 2 * sum(n * (prompt + sum(sizes[: k + 1])) for k, n in enumerate(sizes))
    assert int(allowed.sum()) == pairs
    for q, nq in enumerate(numbers.tolist()):
        for k, nk in enumerate(numbers.tolist()):
            if nq >= 0:
                right = 0 <= nk <= nq, "clean sees the prompt, earlier clean blocks and its own"
            else:
                right = nk == nq or 0 <= nk < -nq, "noisy sees clean before it, and itself"
            assert bool(allowed[q, k]) == right[0], (right[1], q, k)


def test_block_causal_rows_equal_separate_forwards():
    """Logits of noisy block k equal those of a forward on [prompt, clean < k, noisy k] alone."""
    b, net = batch(), model()
    run = run_of(Mode("block_causal"), net)
    noisy_response = torch.where(torch.arange(len(response_rows(b))) % 3 == 0, MASK,
                                 b.ids[response_rows(b)])
    one = one_pass(b, run.spec, noisy_response)
    with torch.no_grad():
        hidden = net.hidden_states(one.ids, one.position_ids, one.cu_seqlens, mask=one.mask)
        at = 0
        for s in range(3):
            prompt, length = int(b.prompt_lengths[s]), int(b.response_lengths[s])
            a = int(b.cu_seqlens[s])
            for start in range(0, length, 4):
                stop = min(start + 4, length)
                noisy = noisy_response[at + start : at + stop]
                ids = torch.cat([b.ids[a : a + prompt + start], noisy])
                blocks = torch.tensor([0] * prompt + [i // 4 + 1 for i in range(stop)])
                mask = (blocks[:, None] >= blocks[None])[None, None]
                alone = net.hidden_states(
                    ids, torch.arange(len(ids)), torch.tensor([0, len(ids)]), mask=mask
                )
                got = hidden[one.noisy[at + start : at + stop]]
                torch.testing.assert_close(got, alone[prompt + start :], rtol=1e-11, atol=1e-12)
            at += length


def test_block_causal_rows_ignore_later_blocks_and_other_copies():
    b, net = batch(), model()
    run = run_of(Mode("block_causal"), net)
    response = response_rows(b)
    noisy = b.ids[response].clone()
    one = one_pass(b, run.spec, noisy)
    first_block = one.noisy[:4]
    with torch.no_grad():
        before = net.hidden_states(one.ids, one.position_ids, one.cu_seqlens, mask=one.mask)
        changed = b.ids.clone()
        changed[response[:12]] = 7  # clean copy of the first response, its first block included
        noisy[4:12] = 9  # its later noisy blocks
        two = one_pass(dataclasses.replace(b, ids=changed), run.spec, noisy)
        after = net.hidden_states(two.ids, two.position_ids, two.cu_seqlens, mask=two.mask)
    torch.testing.assert_close(before[first_block], after[first_block], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("factor", ["mean", "sum"])
def test_block_causal_weights_sum_to_one_or_to_the_blocks(factor):
    b = batch(canvas="response")
    run = run_of(Mode("block_causal"), block_factor=factor)
    seen = {}
    forward = run.backbone.forward

    def spy(one, rows, target, weight, context=None):
        seen["weight"], seen["rows"], seen["one"] = weight, rows, one
        return forward(one, rows, target, weight, context)

    run.backbone.forward = spy
    total, grads = gradients(run, b)
    owner = torch.searchsorted(seen["one"].cu_seqlens[1:], seen["rows"], right=True)
    sums = torch.zeros(3).index_add_(0, owner, seen["weight"])
    blocks = torch.tensor([3.0, 3.0, 2.0])
    torch.testing.assert_close(sums, blocks if factor == "sum" else torch.ones(3))
    assert all(torch.isfinite(g).all() for g in grads) and total > 0


@pytest.mark.parametrize("name", ["exact", "cached", "block_causal"])
def test_held_out_score_is_the_modes_own_loss(name):
    """The score of a state equals -log p at that state, computed the slow way for the mode."""
    b, net = batch(), model()
    run = run_of(Mode(name), net)
    for state in masked_states(b, run.spec, 3):
        with torch.no_grad():
            got = run.mode.score(run, state)
            expected = slow_score(net, name, state, run.spec)
        assert got.item() == pytest.approx(expected, rel=1e-6)


def slow_score(net, name, state, spec):
    total, head = 0.0, net.head()[0]
    noisy = state.noisy
    for row, target, weight in zip(state.rows, state.target, state.weight, strict=True):
        s = int(torch.searchsorted(noisy.cu_seqlens[1:], row, right=True))
        a, end = int(noisy.cu_seqlens[s]), int(noisy.cu_seqlens[s + 1])
        start, stop, prompt = int(state.start[s]), int(state.stop[s]), int(noisy.prompt_lengths[s])
        ids, place = noisy.ids[a:end], int(row) - a
        if name == "block_causal":
            ids = ids[:stop]
            blocks = torch.tensor([0] * prompt + [i // 4 + 1 for i in range(stop - prompt)])
            mask = (blocks[:, None] >= blocks[None])[None, None]
            hidden = net.hidden_states(
                ids, torch.arange(stop), torch.tensor([0, stop]), mask=mask
            )[place]
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

    cu = torch.tensor([0, len(ids)])
    blank = ids.clone()
    blank[start:stop] = MASK
    cache = net.new_cache(1, len(ids))
    net.fill(SimpleNamespace(ids=blank, position_ids=torch.arange(len(ids)), cu_seqlens=cu), cache)
    where = Span(torch.tensor([start]), torch.tensor([stop - start]), stop - start, True)
    return net.active_hidden_states(ids[None, start:stop], where, cache)[place - start]


def test_modes_depend_on_the_visit_alone():
    """Order and split of the batch change nothing: each sequence's loss is its own."""
    for mode in (Mode("exact"), Mode("cached", draws=2), Mode("block_causal")):
        lengths = ((5, 9), (3, 12), (4, 6))
        net = model()
        whole = sum(x.item() for x, *_ in mode.losses(run_of(mode, net), batch(lengths)))
        b = batch(lengths)
        parts = 0.0
        for s in (2, 0, 1):
            a, end = int(b.cu_seqlens[s]), int(b.cu_seqlens[s + 1])
            alone = dataclasses.replace(
                b,
                ids=b.ids[a:end],
                cu_seqlens=torch.tensor([0, end - a], dtype=torch.int32),
                position_ids=b.position_ids[a:end],
                prompt_lengths=b.prompt_lengths[s : s + 1],
                response_lengths=b.response_lengths[s : s + 1],
                sample_ids=b.sample_ids[s : s + 1],
                visits=b.visits[s : s + 1],
                max_length=end - a,
            )
            parts += sum(x.item() for x, *_ in mode.losses(run_of(mode, net), alone))
        assert parts == pytest.approx(whole, rel=1e-6), mode
