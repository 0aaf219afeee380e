"""What the draws of blockwise SFT estimate: their expectation, state by state, against the integral
that the docstrings name, and its gradient, in float64.

On rates (0, 1) the number of masked tokens is uniform and the set uniform given the number
(tests/kernels/test_block_mask_distribution.py), so a state's chance is 1 / (n C(n, k)).
"""

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest
import tiny_modes
import torch
import torch.nn.functional as F
from bwsft_kernels import MaskSpec
from tiny_modes import PLACE, batch
from tiny_theory import EOS, MASK, gradient, log_p, model

from bwsft import config as c
from bwsft import presets
from bwsft.data.packing import CanvasLayout, Example, pack
from bwsft.objectives.base import response_rows
from bwsft.objectives.blockwise import Blockwise
from bwsft.training.context_modes import make_mode

PROMPT, RESPONSE = [0, 2], [1, 3, 0, 2, 2]
BLOCKS = [(0, 3), (3, 5)]
STATES = [
    (a, s)
    for a, (start, stop) in enumerate(BLOCKS)
    for k in range(1, stop - start + 1)
    for s in itertools.combinations(range(start, stop), k)
]


def chance(a, s):
    """Of a state, given its block."""
    n = BLOCKS[a][1] - BLOCKS[a][0]
    return 1 / (n * math.comb(n, len(s)))


@functools.cache
def costs():
    """(net, {state: cross-entropies [5] of the response, which are graphs})."""
    net, rows = model(5), []
    for a, s in STATES:
        hidden = [MASK if i in s or i >= BLOCKS[a][1] else x for i, x in enumerate(RESPONSE)]
        rows.append([*PROMPT, *hidden])
    cost = -log_p(net, rows)[:, 2:].gather(2, torch.tensor(RESPONSE)[None, :, None].expand(
        len(rows), -1, -1))[..., 0]  # fmt: skip
    return net, dict(zip(STATES, cost, strict=True))


def found(draws=1, size=1500, canvas="response", step=0, **options):
    """{state: weights [5] of the response's tokens}, or of pairs {(state, state): [2, 5]}, from the
    project's own draws; every state comes up, with the same weights each time."""
    layout = CanvasLayout(mask_id=MASK, eos_id=EOS, canvas=canvas, block_size=3, gen_length=9)
    example = (np.array(PROMPT), np.array(RESPONSE), 0)
    some = pack([Example(*example, visit) for visit in range(size)], layout)
    own = {k: options.pop(k) for k in ("order", "suffix_weight", "suffix_steps") if k in options}
    spec = MaskSpec(3, MASK, **{"seed": 1, "low": 0.0, **options})
    objective = Blockwise(spec=spec, draws_per_visit=draws, **own)
    width, parts = len(some.ids) // size, []
    for draw in objective.draws(some, PLACE._replace(step=step), None):
        weight = torch.zeros(size * width).index_add_(0, draw.rows, draw.weight)
        n = int(draw.num_rows)
        assert (weight > 0).sum() == n and len(draw.rows) >= n  # a token is listed once
        assert torch.equal(draw.target[:n], some.ids[draw.rows[:n]])
        assert (draw.noisy.ids[draw.rows[:n]] == MASK).all() and (draw.target[n:] == -100).all()
        noisy, weight = draw.noisy.ids.view(size, width), weight.view(size, width)
        end = 2 + int(some.response_lengths[0])
        assert not weight[:, :2].any() and not weight[:, end:].any()
        block = (draw.block_start - 2) // 3
        marked = noisy[:, 2:end] == MASK
        marked &= torch.arange(end - 2) < (draw.block_start + draw.block_length - 2)[:, None]
        parts.append([
            ((int(a), tuple(m.nonzero()[:, 0].tolist())), w)
            for a, m, w in zip(block, marked, weight[:, 2:end].double(), strict=True)
        ])  # fmt: skip
    out = {}
    for visit in zip(*parts, strict=True):
        states, weights = zip(*visit, strict=True)
        key = states if draws > 1 else states[0]
        weights = torch.stack(weights) if draws > 1 else weights[0]
        assert torch.equal(out.setdefault(key, weights), weights)
    return out


def assert_estimates(expected, integral):
    """Two graphs with one gradient, which is not 0; weights are fp32."""
    net = costs()[0]
    truth = gradient(net, integral)
    assert truth.abs().max() > 1e-3
    tolerance = dict(rtol=3e-7, atol=3e-7 * float(truth.abs().max()))
    torch.testing.assert_close(gradient(net, expected), truth, **tolerance)
    assert expected.item() == pytest.approx(integral.item(), rel=3e-7)


def bound(a):
    """(1 / n) sum over k of the mean cross-entropy of the masked tokens at k of them."""
    return sum(chance(*s) * costs()[1][s][list(s[1])].mean() for s in STATES if s[0] == a)


RHO = {"uniform": (1 / 2, 1 / 2), "rising": (1 / 3, 2 / 3), "length": (3 / 5, 2 / 5)}


@pytest.mark.parametrize("order", RHO)
@pytest.mark.parametrize("factor", ["mean", "sum"])
@pytest.mark.parametrize("share", [0.0, 0.7])
def test_a_supervised_suffix_adds_its_mean_loss_in_the_same_state(order, factor, share):
    """The mean over blocks, or their sum, of the bound per token plus share times the suffix's mean
    cross-entropy, averaged over the same states."""
    weights = found(order=order, block_factor=factor, suffix_weight=share)
    assert set(weights) == set(STATES)
    cost = costs()[1]
    expected = sum(
        RHO[order][a] * chance(a, s) * (weights[a, s] * cost[a, s]).sum() for a, s in STATES
    )
    suffix = sum(chance(*s) * cost[s][3:].mean() for s in STATES if s[0] == 0)
    integral = bound(0) + bound(1) + share * suffix
    assert_estimates(expected, integral if factor == "sum" else integral / 2)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("weight", ["count", "sum"])
def test_a_pair_estimates_what_draws_without_pairs_do(weight, pairs):
    """The mean over blocks of the bound per token; or at weight "sum" of (1 / n) sum over k of the
    sum of the cross-entropies at k masked tokens, as in the paper's Eq. 8 and 9."""
    weights, cost = found(draws=2, pairs=pairs, weight=weight), costs()[1]
    if pairs:
        assert {even for even, _ in weights} == set(STATES)
    expected = 0.0
    for states, of_state in weights.items():
        if pairs:  # the odd half follows
            a, inside = states[0][0], set(range(*BLOCKS[states[0][0]]))
            assert states[1] == (a, tuple(sorted(inside - set(states[0][1]))))
            likely = chance(*states[0])
        else:
            likely = chance(*states[0]) * chance(*states[1])
        for state, w in zip(states, of_state, strict=True):
            expected += likely / 2 * (w * cost[state]).sum() / 2 if state[1] else 0.0
    sums = sum(chance(a, s) * cost[a, s][list(s)].sum() for a, s in STATES)
    assert_estimates(expected, (bound(0) + bound(1) if weight == "count" else sums) / 2)


def test_the_weight_of_a_suffix_falls_to_nothing_over_the_run():
    key, plain = (0, (1,)), found()
    for step, share in ((0, 0.8), (3, 0.2), (4, 0.0), (9, 0.0)):
        weight = found(suffix_weight=0.8, suffix_steps=4, step=step)[key]
        assert float(weight[3:].sum()) == pytest.approx(share, rel=1e-6)
        assert torch.equal(weight[:3], plain[key][:3])


@pytest.mark.parametrize("canvas", ["response", "fixed", "padded"])
@pytest.mark.parametrize("options", [
    dict(weight="flat", empty="skip"), dict(weight="rate", empty="skip", low=0.5, high=0.5),
    dict(empty="last"),
], ids=str)  # fmt: skip
def test_a_suffix_shares_in_the_weight_of_the_block(options, canvas):
    """Also of other weights, and with the end tokens that fill the last block (fixed); the rest of
    the canvas is never supervised, see `found`."""
    for (a, s), weight in found(canvas=canvas, suffix_weight=0.7, **options).items():
        assert len(weight) == (6 if canvas == "fixed" else 5)
        if a == 0:  # an empty draw weighs nothing at all
            assert float(weight[3:].sum()) == pytest.approx(0.7 * float(weight[:3].sum()), rel=1e-6)
            assert len(set(weight[3:].tolist())) == 1 and bool(weight.any()) == bool(s)


def test_a_suffix_token_that_is_seen_is_not_supervised():
    layout = CanvasLayout(mask_id=MASK, eos_id=EOS, canvas="response", block_size=3)
    size = 300
    some = pack([Example(np.array(PROMPT), np.array(RESPONSE), i) for i in range(size)], layout)
    objective = Blockwise(spec=MaskSpec(3, MASK, suffix_leak=0.5), suffix_weight=0.7)
    (draw,) = objective.draws(some, PLACE, None)
    weight = torch.zeros(size * 7).index_add_(0, draw.rows, draw.weight).view(size, 7)
    hidden = (draw.noisy.ids == MASK).view(size, 7)
    assert torch.equal(weight > 0, hidden)
    left = hidden[:, 5:].any(1) & (draw.block_start == 2)  # some of the suffix is hidden
    assert 0 < left.sum() < (draw.block_start == 2).sum()
    torch.testing.assert_close(weight.sum(1), 1 + 0.7 * left)


@pytest.mark.parametrize(("canvas", "fields"), [
    ("response", {"active_blocks": 2}), ("fixed", {"active_blocks": 3}),
    *((canvas, {"objective": c.ObjectiveConfig(suffix_weight=0.7)})
      for canvas in ("response", "fixed", "padded")),
], ids=str)  # fmt: skip
def test_exact_mode_gives_the_loss_and_gradient_of_full_logits(canvas, fields):
    some, net = batch(canvas=canvas), tiny_modes.model()
    config = dataclasses.replace(presets.debug(), block_size=4, seed=5, **fields)
    objective = Blockwise.of(config, net.family)
    mode = make_mode(config, net.family, net, objective, torch.device("cpu"))
    (loss,) = mode.losses(some, PLACE)
    loss.total.backward()
    (draw,) = objective.draws(some, PLACE, None)
    plain = tiny_modes.model()
    noisy = draw.noisy
    hidden = plain.hidden_states(noisy.ids, noisy.position_ids, noisy.cu_seqlens)
    each = F.cross_entropy(hidden @ plain.head()[0].T, some.ids, reduction="none")
    weight = torch.zeros(len(some.ids)).index_add_(0, draw.rows, draw.weight)
    total = (each * weight).sum()
    total.backward()
    assert loss.total.item() == pytest.approx(total.item(), rel=1e-6)
    hidden = response_rows(some).inside & (noisy.ids != some.ids)
    region = some.prompt_lengths + some.response_lengths - draw.block_start
    if "active_blocks" in fields:  # and not the suffix after the group
        owner = response_rows(some).owner
        region = draw.block_length
        hidden &= some.position_ids < (draw.block_start + region)[owner]
        assert set(region.tolist()) - {1, 2, 3, 4}
    assert int(loss.rows) == int(hidden.sum()) == int((weight > 0).sum())
    assert int(loss.region) == int(region.sum())
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=1e-9)
