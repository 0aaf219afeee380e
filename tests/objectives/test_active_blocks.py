"""Several active blocks: every bit of the draws against a plain reference, the chances of states
against their integrals, and what the loss estimates."""

import collections
import itertools
import math

import numpy as np
import pytest
import torch
from bwsft_kernels import MaskSpec
from bwsft_kernels.philox import Stream, philox_words
from tiny_modes import MASK, PLACE, corrupt
from tiny_theory import EOS, gradient, log_p, model
from tiny_theory import MASK as TOY_MASK

from bwsft.data.packing import CanvasLayout, Example, pack
from bwsft.objectives.active_blocks import groups_of, number_of
from bwsft.objectives.blockwise import Blockwise
from bwsft.objectives.nelbo import FIRST_DRAW
from bwsft.utils.flops import active_groups

LENGTHS = [(3, 16), (5, 1), (2, 6), (7, 13), (1, 21)] * 12
SEED, ONE24 = 5, 1 << 24


def u24(stream, position, draw, sample):
    return philox_words((position, draw, sample, stream << 24), (SEED, 0))[0] >> 8


def plain_block(start, stop, draw, sample, rate, empty):
    """Which tokens of a block are masked at a rate, in units of 2^-24, that it cannot change."""
    marks = [p for p in range(start, stop) if u24(Stream.MARKS, p, draw, sample) < rate]
    if not marks and empty != "skip":
        place = u24(Stream.RATE, 1, draw, sample) * (stop - start) >> 24
        marks = [stop - 1 if empty == "last" else start + place]
    return marks


def plain_first(start, stop, draw, sample, spec):
    """(masked tokens, rate) of a block whose rate is its own."""
    low, high = spec.bounds24
    rate = low + ((high - low) * u24(Stream.RATE, 0, draw, sample) >> 24)
    marks = plain_block(start, stop, draw, sample, rate, "skip")
    if not marks and spec.empty == "redraw":  # rate and number of one token change places
        token = start + (u24(Stream.RATE, 1, draw, sample) * (stop - start) >> 24)
        rate = min(u24(Stream.MARKS, token, draw, sample), high)
        marks = sorted({token, *plain_block(start, stop, draw, sample, rate, "skip")})
    return marks or plain_block(start, stop, draw, sample, rate, spec.empty), rate


def rows_of(some, draw):
    """[(noisy ids, {position: (target, weight)})] of every sequence."""
    n = int(draw.num_rows)
    listed = list(zip(draw.rows.tolist(), draw.target.tolist(), draw.weight.tolist(), strict=True))
    assert all(row[1:] == (-100, 0.0) for row in listed[n:])
    assert [row[0] for row in listed[:n]] == sorted({row[0] for row in listed[:n]})
    edges = some.cu_seqlens.tolist()
    for first, last in itertools.pairwise(edges):
        own = {r - first: (t, w) for r, t, w in listed[:n] if first <= r < last}
        yield draw.noisy.ids[first:last].tolist(), own


OPTIONS = {
    "as the paper": {"empty": "last"},
    "absolute, two draws": {"block_origin": "absolute", "draws": 2},
    "a band": {"low": 0.2, "high": 0.6, "order": "traversal", "block_factor": "sum"},
    "flat": {"weight": "flat", "empty": "skip", "order": "rising", "block_origin": "absolute"},
    "sums": {"weight": "sum", "order": "length", "block_factor": "sum"},
    "all": {"order": "all", "draws": 2, "block_factor": "sum"},
}


def objective_of(active, order="uniform", draws=1, one_pass=False, **options):
    spec = MaskSpec(4, MASK, seed=SEED, **options)
    return Blockwise(
        spec=spec, order=order, draws_per_visit=draws, active_blocks=active, one_pass=one_pass
    )


@pytest.mark.parametrize("active", [2, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_group_of_blocks_against_a_plain_reference(active, name, batch_of):
    """The group of the visit's cut that holds the chosen block. Its first block is masked as if it
    were active alone; the others have rates between that of the block before and the highest, from
    words of their own."""
    options = OPTIONS[name]
    origin = options.get("block_origin", "response")
    some = batch_of(LENGTHS, visit=range(60), canvas="fixed", origin=origin)
    group, sizes = objective_of(active, **options), collections.Counter()
    spec, weights, high = group.spec, torch.zeros(60).double(), group.spec.bounds24[1]
    for number, draw in enumerate(group.draws(some, PLACE, None)):
        part, whole = draw.noisy, some.select(draw.noisy.sample_ids.tolist())
        place = number // group.draws_per_visit if group.order == "all" else None
        how = group.order, draw.number, group.draws_per_visit
        _, masked = corrupt(whole, spec, *how, block=place)
        region = 0
        for s, (noisy, own) in enumerate(rows_of(part, draw)):
            prompt, response = int(part.prompt_lengths[s]), int(part.response_lengths[s])
            clean = whole.ids[part.cu_seqlens[s] : part.cu_seqlens[s + 1]].tolist()
            blocks = spec.grid.blocks(prompt, response)
            a, sample, visit = int(masked.block[s]), int(part.sample_ids[s]), int(part.visits[s])
            offset = u24(Stream.BLOCK, 2**32 - 1, visit, sample) * active >> 24
            cell = (a + offset) // active
            taken = [x for b, x in enumerate(blocks) if (b + offset) // active == cell]
            sizes[len(taken), taken[0] == blocks[0]] += 1
            factor = {"mean": 1, "sum": len(blocks)}[spec.block_factor]
            if place is not None:
                visit, factor = visit * len(blocks) + a, factor / len(blocks)
            chances = {"rising": range(1, len(blocks) + 1), "length": [j - i for i, j in blocks]}
            if of := chances.get(group.order):
                factor *= sum(of) / of[a] / len(blocks)
            drawn, expected = visit * group.draws_per_visit + draw.number, {}
            for later, (start, stop) in enumerate(taken):
                if later == 0:
                    marks, rate = plain_first(start, stop, drawn, sample, spec)
                else:
                    own_number = 2**32 - 1 - (drawn * (active - 1) + later - 1)
                    rate += (high - rate) * u24(Stream.RATE, 0, own_number, sample) >> 24
                    marks = plain_block(start, stop, own_number, sample, rate, spec.empty)
                weight = {"count": len(marks), "flat": stop - start, "sum": 1}[spec.weight]
                expected |= {p: (clean[p], factor / weight) for p in marks}
            assert own.keys() == expected.keys()
            for p, (target, weight) in own.items():
                assert target == expected[p][0]
                assert weight == pytest.approx(expected[p][1] / len(taken), rel=3e-7)
            hidden = range(taken[-1][1], prompt + response)
            assert noisy == [MASK if p in own or p in hidden else c for p, c in enumerate(clean)]
            length = taken[-1][1] - taken[0][0]
            assert (draw.block_start[s], draw.block_length[s]) == (taken[0][0], length)
            region += length
            weights[sample] += sum(w for _, w in own.values()) / draw.of
        assert int(draw.region) == region
    assert set(sizes) >= {(n, first) for n in range(1, active + 1) for first in (False, True)}
    if spec.weight == "count" and group.order in ("uniform", "all"):
        blocks = spec.grid.num_blocks(some.prompt_lengths, some.response_lengths)
        total = blocks if spec.block_factor == "sum" else torch.ones(60)
        torch.testing.assert_close(weights, total.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("active", "options"), [
    (2, {}), (3, {"block_origin": "absolute", "draws": 2, "empty": "last", "low": 0.1}),
    (4, {"weight": "flat", "empty": "skip", "block_factor": "sum", "high": 0.7}),
], ids=str)  # fmt: skip
def test_groups_of_all_blocks_against_a_plain_reference(active, options, batch_of):
    """Groups begin anywhere, in all draws of a visit at the same blocks."""
    some = batch_of(LENGTHS, visit=range(60), origin=options.get("block_origin", "response"))
    objective, firsts = objective_of(active, one_pass=True, **options), collections.Counter()
    spec, high = objective.spec, objective.spec.bounds24[1]
    edges = some.cu_seqlens.tolist()
    for draw in objective.draws(some, PLACE, None):
        assert draw.groups.size == active and draw.block_start is None
        for s, (noisy, own) in enumerate(rows_of(some, draw)):
            blocks = spec.grid.blocks(int(some.prompt_lengths[s]), int(some.response_lengths[s]))
            visit, sample = int(some.visits[s]), int(some.sample_ids[s])
            offset = u24(Stream.BLOCK, 0, visit, sample) * active >> 24
            assert draw.groups.offset[s] == offset
            firsts[offset] += 1
            clean, expected = some.ids[edges[s] : edges[s + 1]].tolist(), {}
            for b, (start, stop) in enumerate(blocks):
                number = (visit * len(blocks) + b) * draw.of + draw.number
                size = stop - start  # words are those of positions in the block
                if b == 0 or (b + offset) % active == 0:
                    marks, rate = plain_first(0, size, number, sample, spec)
                else:
                    rate += (high - rate) * u24(Stream.RATE, 0, number, sample) >> 24
                    marks = plain_block(0, size, number, sample, rate, spec.empty)
                marks = [start + p for p in marks]
                weight = {"count": len(marks), "flat": stop - start}[spec.weight]
                weight *= {"mean": len(blocks), "sum": 1}[spec.block_factor]
                expected |= {p: (clean[p], pytest.approx(1 / weight, rel=3e-7)) for p in marks}
            assert own == expected
            assert noisy == [MASK if p in own else c for p, c in enumerate(clean)]
    assert set(firsts) == set(range(active))


@pytest.mark.parametrize("order", ["uniform", "rising", "traversal", "all"])
@pytest.mark.parametrize(("active", "blocks"), [(2, 4), (4, 4), (2, 5), (4, 5)])
def test_every_block_weighs_the_same(active, blocks, order, batch_of):
    """1/M on average over 2,000 visits, within five standard errors, as in block_causal; and the
    visit's cut is independent of its block, by chi-squared."""
    size = 2000
    for origin, shape in (("response", (3, 4 * blocks)), ("absolute", (3, 4 * blocks - 5))):
        some = batch_of([shape] * size, visit=range(size), origin=origin)
        objective = objective_of(active, order, block_origin=origin)
        edges = torch.tensor([stop for _, stop in objective.spec.grid.blocks(*shape)])
        assert len(edges) == blocks
        found = torch.zeros(size, blocks).double()
        for draw in objective.draws(some, PLACE, None):  # of all sequences, which are alike
            place = torch.searchsorted(edges, draw.noisy.position_ids[draw.rows], right=True)
            owner = draw.rows // sum(shape)
            found.index_put_((owner, place.clamp(max=blocks - 1)), draw.weight.double(), True)
        error = 5 * found.std(0) / math.sqrt(size) + 1e-6
        assert ((found.mean(0) - 1 / blocks).abs() <= error).all()
        if order in ("uniform", "traversal"):
            chosen = corrupt(some, objective.spec, order)[1].block
            both = chosen * active + groups_of(some, SEED, active, 2**32 - 1).offset
            mean, free = size / blocks / active, blocks * active - 1
            squares = ((both.bincount(minlength=free + 1) - mean) ** 2 / mean).sum()
            assert squares < free + 5 * math.sqrt(2 * free)


@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize("active", [1, 3])
def test_what_the_formulas_count(active, one_pass, batch_of):
    """Masked tokens of a draw, and tokens of the last group, on average over 600 responses of 5
    blocks, within five standard errors."""
    some = batch_of([(3, 20)] * 600, canvas="response")
    objective = objective_of(active, one_pass=one_pass, weight="flat", empty="skip")
    (draw,) = objective.draws(some, PLACE, None)
    found = active_groups(5, active, one_pass)
    masked = (draw.rows[: draw.num_rows] // 23).bincount(minlength=600).float()
    last = torch.full((600,), 4)
    if active > 1:
        last = 4 * ((4 + draw.groups.offset) % active + 1) if one_pass else draw.block_length
    for counts, mean in ((masked, found.masked), (last.float(), found.last)):
        error = 5 * float(counts.std()) / math.sqrt(600)
        assert float(counts.mean()) == pytest.approx(4 * mean, abs=error)


def test_every_block_has_words_of_its_own():
    """Numbers of draws that neither the first blocks have nor the held-out ones."""
    first = torch.arange(1000)
    for active in (2, 3, 8):
        own = torch.cat([number_of(first, later, active) for later in range(1, active)])
        assert len(own.unique()) == 1000 * (active - 1)
        assert own.min() > FIRST_DRAW + 2**30 and own.max() == 2**32 - 1


# --- the chances of states, and what the loss estimates: a prompt and blocks of 3 and 2 tokens ---

PROMPT, RESPONSE, BLOCKS = [0, 2], [1, 3, 0, 2, 2], [(0, 3), (3, 5)]
NODES, MASSES = (torch.from_numpy(x) for x in np.polynomial.legendre.leggauss(12))
NODES, MASSES = (NODES + 1) / 2, MASSES / 2  # exact for polynomials of degree 23 on (0, 1)


def subsets(block):
    inside = range(*block)
    return [s for k in range(1, len(inside) + 1) for s in itertools.combinations(inside, k)]


def chances():
    """{masked tokens of each active block: chance}, rates on (0, 1). Half of the cuts have both
    blocks in one group, and half of the rest is each one's alone.

    A first block that masks something has the density x^k (1 - x)^(n - k) (n + 1) / n of its rate
    x; the second one's is y = x + (1 - x) u.
    """
    x, y = NODES[:, None], NODES[:, None] + (1 - NODES[:, None]) * NODES
    mass, found = MASSES[:, None] * MASSES, {}
    for one, other in itertools.product(*map(subsets, BLOCKS)):
        k, n, m, size = len(one), 3, len(other), 2
        first = x**k * (1 - x) ** (n - k) * (n + 1) / n
        second = y**m * (1 - y) ** (size - m) + (m == 1) * (1 - y) ** size / size
        found[one, other] = float((mass * first * second).sum()) / 2
    for n, alone in zip((3, 2), map(subsets, BLOCKS), strict=True):
        found |= {(s,): 1 / (4 * n * math.comb(n, len(s))) for s in alone}
    return found


def states(size=6000):
    """[(masked tokens of each active block, weights [5])] of the project's own draws."""
    layout = CanvasLayout(mask_id=TOY_MASK, eos_id=EOS, canvas="response", block_size=3)
    example = (np.array(PROMPT), np.array(RESPONSE), 0)
    some = pack([Example(*example, visit) for visit in range(size)], layout)
    objective = Blockwise(spec=MaskSpec(3, TOY_MASK, seed=1, low=0.0), active_blocks=2)
    (draw,) = objective.draws(some, PLACE, None)
    weight = torch.zeros(size * 7).index_add_(0, draw.rows, draw.weight).view(size, 7)[:, 2:]
    seen = []
    bounds = (draw.block_start - 2).tolist(), draw.block_length.tolist()
    for start, length, own in zip(*bounds, weight, strict=True):
        marks, inside = own.nonzero()[:, 0].tolist(), range(start, start + length)
        parts = [tuple(p for p in marks if p in range(*b)) for b in BLOCKS if b[0] in inside]
        seen.append((tuple(parts), own.double()))
    return seen


def test_chances_of_states_and_what_the_loss_estimates():
    """Chi-squared of the states; and the expected loss and gradient are the mean over groups of the
    mean over their blocks of the mean cross-entropy of the masked tokens."""
    of, drawn = chances(), states()
    assert sum(of.values()) == pytest.approx(1, abs=1e-12)
    counts, total = collections.Counter(s for s, _ in drawn), len(drawn)
    squares = sum((counts[s] - total * p) ** 2 / (total * p) for s, p in of.items())
    assert len(of) == 31 and set(counts) == set(of) and squares < 30 + 5 * math.sqrt(60)
    weights = dict(drawn)
    net, expected, integral = model(5), 0.0, 0.0
    for state, p in of.items():
        masked = [i for part in state for i in part]
        after = 5 if masked[-1] > 2 else 3  # the hidden suffix
        seen = (TOY_MASK if i in masked or i >= after else x for i, x in enumerate(RESPONSE))
        log = log_p(net, [[*PROMPT, *seen]])[0, 2:]
        cost = -log.gather(1, torch.tensor(RESPONSE)[:, None])[:, 0]
        expected += p * (weights[state] * cost).sum()
        integral += p * torch.stack([cost[list(part)].mean() for part in state]).mean()
    truth = gradient(net, integral)
    assert truth.abs().max() > 1e-3 and expected.item() == pytest.approx(integral.item(), rel=3e-7)
    torch.testing.assert_close(
        gradient(net, expected), truth, rtol=3e-7, atol=3e-7 * float(truth.abs().max()))
