"""The paper's theory by computation on tiny models: sums over all that can happen, in float64.

- The blockwise objective bounds the exact block NLL: that of the any-order sampler, which unmasks
  the block's tokens one at a time in a uniformly random order.
- One block a and one time t give an unbiased gradient (Theorem 3.3), for any distribution rho.
- The gradient of classical SFT is biased by at most how rarely its masks show what a decoder sees
  (Theorem 3.1; the probabilities themselves: test_blockwise_reductions.py).
"""

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from bwsft_kernels import MaskSpec
from tiny_modes import corrupt
from tiny_theory import EOS, MASK, V, gradient, log_p, model

from bwsft.data.packing import CanvasLayout, Example, pack
from bwsft.objectives import blockwise
from bwsft.objectives.config import DiscreteConfig

B = 3
STATES = list(itertools.product(range(V + 1), repeat=B))  # MASK is one of the V + 1
BLOCKS = list(itertools.product(range(V), repeat=B))
ORDERS = list(itertools.permutations(range(B)))
SETS = [s for n in range(1, B + 1) for s in itertools.combinations(range(B), n)]


def hide(block, positions):
    return tuple(MASK if i in positions else x for i, x in enumerate(block))


# --- the bound ---


def nll(table, x):
    """-log E over orders of the product of conditionals. table: state -> [B, V] log-p."""
    total = [
        sum(table[hide(x, order[j:])][order[j]][x[order[j]]] for j in range(B)) for order in ORDERS
    ]
    return -(np.logaddexp.reduce(total) - math.log(len(ORDERS)))


def set_loss(table, x, hidden):
    """Summed cross-entropy of the hidden tokens."""
    row = table[hide(x, hidden)]
    return -sum(row[i][x[i]] for i in hidden)


def nelbo(table, x):
    """Sum over l of (1/l) E over hidden sets of l tokens: what bwsft.objectives.nelbo estimates."""
    return sum(set_loss(table, x, s) / (len(s) * math.comb(B, len(s))) for s in SETS)


def over_rates(table, x):
    """The integral over the rate of (1 / rate) E over marks: weight "rate", times the length.
    A polynomial of degree B - 1 in the rate, so B nodes integrate it exactly."""
    nodes, weights = np.polynomial.legendre.leggauss(B)
    total = 0.0
    for rate, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
        for s in SETS:
            chance = rate ** len(s) * (1 - rate) ** (B - len(s))
            total += weight * chance / rate * set_loss(table, x, s)
    return total


@functools.cache
def tables():
    """{prefix of whole blocks: table of its block's states} of a response of two blocks: the
    prefix clean, the block in any state, the suffix hidden."""
    net, out = model(), {}
    with torch.no_grad():
        first = log_p(net, [(EOS, *state, *[MASK] * B) for state in STATES])[:, 1 : 1 + B]
        out[()] = dict(zip(STATES, first.numpy(), strict=True))
        rows = [(EOS, *prefix, *state) for prefix in BLOCKS for state in STATES]
        second = log_p(net, rows)[:, 1 + B :].reshape(len(BLOCKS), len(STATES), B, V)
    for prefix, part in zip(BLOCKS, second, strict=True):
        out[prefix] = dict(zip(STATES, part.numpy(), strict=True))
    return out


def test_the_blockwise_objective_bounds_the_exact_nll_of_every_response():
    """All 64 + 64 x 64 blocks of two-block responses over 4 tokens."""
    exact = {prefix: [nll(t, x) for x in BLOCKS] for prefix, t in tables().items()}
    bound = {prefix: [nelbo(t, x) for x in BLOCKS] for prefix, t in tables().items()}
    for prefix in exact:
        # The sampler is a distribution: what is bounded is a likelihood.
        assert np.exp(-np.array(exact[prefix])).sum() == pytest.approx(1, rel=1e-12)
    gaps = np.array([bound[p] for p in bound]) - np.array([exact[p] for p in exact])
    assert gaps.min() > -1e-12 and gaps.mean() > 1e-3
    # Whole responses: the sum over blocks bounds -log p of the semi-autoregressive sampler.
    likelihood = 0.0
    for i, first in enumerate(BLOCKS):
        whole = exact[()][i] + np.array(exact[first])
        assert (bound[()][i] + np.array(bound[first]) >= whole - 1e-12).all()
        likelihood += np.exp(-whole).sum()
    assert likelihood == pytest.approx(1, rel=1e-12)


def test_orders_sets_and_rates_are_three_forms_of_one_bound():
    """Jensen over orders; 1/l over set sizes (nelbo.py); 1/rate over rates (weight "rate"); and the
    mean over masked tokens given that there are any (weight "count"), times the length."""
    for x in BLOCKS[::7]:
        table = tables()[()]
        by_order = -np.mean([
            sum(table[hide(x, o[j:])][o[j]][x[o[j]]] for j in range(B)) for o in ORDERS
        ])
        assert nelbo(table, x) == pytest.approx(by_order, rel=1e-12)
        assert over_rates(table, x) == pytest.approx(by_order, rel=1e-12)
        # With a uniform rate every number of masks 0..B has chance 1 / (B + 1).
        count = sum(set_loss(table, x, s) / len(s) / math.comb(B, len(s)) for s in SETS) / (B + 1)
        assert B * count / (B / (B + 1)) == pytest.approx(by_order, rel=1e-12)


def joint_tables(noise):
    """Conditionals of one random joint distribution of the block, log-probabilities disturbed."""
    rng = np.random.default_rng(0)
    joint = rng.dirichlet(np.ones(V**B)).reshape((V,) * B)
    table = {}
    for state in STATES:
        seen = joint[tuple(slice(None) if x == MASK else slice(x, x + 1) for x in state)]
        rows = []
        for i in range(B):
            other = tuple(j for j in range(B) if j != i)
            p = seen.sum(axis=other)
            row = np.log(p / p.sum()) if len(p) == V else np.zeros(V)
            row = row + noise * rng.standard_normal(V)
            rows.append(row - np.logaddexp.reduce(row))
        table[state] = rows
    return joint, table


def test_the_bound_is_tight_iff_all_orders_agree():
    """Conditionals of one joint distribution: every order gives its likelihood, the gap is 0. A
    disturbance of size e opens a gap of e^2 (a variance over orders)."""
    joint, table = joint_tables(0.0)
    for x in BLOCKS:
        assert nll(table, x) == pytest.approx(-math.log(joint[x]), rel=1e-12)
        assert nelbo(table, x) == pytest.approx(-math.log(joint[x]), rel=1e-12)
    gaps = []
    for noise in (0.01, 0.1):
        table = joint_tables(noise)[1]
        gaps.append(np.mean([nelbo(table, x) - nll(table, x) for x in BLOCKS]))
    assert 0 < gaps[0] < 1e-3 and 80 < gaps[1] / gaps[0] < 120


# --- the gradient of one block and one time ---

PROMPT, RESPONSE, T = [0, 2], [1, 3, 0, 2, 2], 4
INTERVALS = [(0, 3), (3, 5)]  # blocks of the response


@functools.cache
def losses():
    """(net, {(block, hidden offsets): graph of the summed cross-entropy, its gradient}) of every
    nonempty set."""
    net, keys, rows = model(5), [], []
    for a, (start, stop) in enumerate(INTERVALS):
        for n in range(1, stop - start + 1):
            for s in itertools.combinations(range(start, stop), n):
                keys.append((a, s))
                hidden = [MASK if i in s or i >= stop else x for i, x in enumerate(RESPONSE)]
                rows.append([*PROMPT, *hidden])
    out = log_p(net, rows)
    sums = [-sum(out[k, 2 + i, RESPONSE[i]] for i in s) for k, (_, s) in enumerate(keys)]
    return net, {k: (x, gradient(net, x)) for k, x in zip(keys, sums, strict=True)}


def chance_of_set(a, s, rate):
    length = INTERVALS[a][1] - INTERVALS[a][0]
    return rate ** len(s) * (1 - rate) ** (length - len(s))


def found_weights(order, levels, factor, size=2500):
    """{(block, t, hidden offsets): row weight} over visits, from the project's own draws."""
    layout = CanvasLayout(mask_id=MASK, eos_id=EOS, canvas="response", block_size=B)
    example = (np.array(PROMPT), np.array(RESPONSE), 0)
    batch = pack([Example(*example, visit) for visit in range(size)], layout)
    spec = MaskSpec(B, MASK, seed=1, weight="flat", empty="skip", block_factor=factor)
    _, masked = corrupt(batch, spec, order, levels=levels)
    n = int(masked.num_rows)
    first = torch.cat([torch.zeros(1).long(), masked.count.cumsum(0)[:-1]]).tolist()
    offset, weight = (masked.rows[:n] % 7 - 2).tolist(), masked.row_weight[:n].tolist()
    t = (masked.rate * levels.steps).round().long().tolist()
    out = {}
    for s, (k, count) in enumerate(zip(first, masked.count.tolist(), strict=True)):
        if count:
            key = (int(masked.block[s]), t[s], tuple(offset[k : k + count]))
            assert out.setdefault(key, weight[k]) == weight[k]
    return out


CHOICES = "uniform mean,uniform sum,length mean,rising sum,falling mean".split(",")
TIMES = [DiscreteConfig(T), DiscreteConfig(T, "elbo", "omega"), DiscreteConfig(T, "one")]


@pytest.mark.parametrize(("order", "factor"), [choice.split() for choice in CHOICES])
@pytest.mark.parametrize("levels", TIMES, ids=str)
def test_one_block_and_one_time_give_an_unbiased_gradient(order, levels, factor):
    """Expectation over block, time and masks of weight x gradient, against the gradient of
    sum_a sum_t omega_t E[masked CE] / |I_a| (its mean over blocks, or its sum)."""
    net, sums = losses()
    rho = {"uniform": (1, 1), "length": (3, 2), "rising": (1, 2), "falling": (2, 1)}[order]
    edges, _, omega_by_chance = blockwise.level_tables(levels, torch.device("cpu"))
    chance = (edges.diff(prepend=torch.zeros(1).long()).double() / 2**24).tolist()
    objective, expected = 0.0, 0.0
    found = found_weights(order, levels, factor)
    for (a, s), (loss, grad) in sums.items():
        length = INTERVALS[a][1] - INTERVALS[a][0]
        p = rho[a] / sum(rho)
        for t in range(1, T + 1):
            omega = 1 / t if levels.omega == "elbo" else 1.0
            likely = chance_of_set(a, s, t / T)
            scale = 0.5 if factor == "mean" else 1.0
            objective = objective + scale * omega * likely * loss / length
            weight = scale / p * float(omega_by_chance[t - 1]) / length
            expected = expected + p * chance[t - 1] * likely * weight * grad
            if likely > 0:  # T = t masks everything; the rest is found in 2,500 visits
                assert found.pop((a, t, s)) == pytest.approx(weight, rel=1.2e-7)
    assert not found
    truth = gradient(net, objective)
    torch.testing.assert_close(expected, truth, rtol=1e-9, atol=1e-12 * float(truth.abs().max()))
    assert truth.abs().max() > 1e-3


# --- the bias of classical gradients ---


def test_the_bias_of_a_classical_gradient_is_within_the_bound():
    """Gradient of the middle block's loss (one token, hidden) in 2 + 2 tokens of context, summed
    over all 16 contexts of a rate: its distance from the decoder's gradient is at most
    (1 - P[clean] P[hidden]) times the largest distance, and 1 - P[clean] P[hidden] is at most
    the sum of the two failures. It is 0 only where the context is sure to be the decoder's."""
    net, response = model(7), [1, 3, 0, 2, 2]
    contexts = list(itertools.product((0, 1), repeat=4))
    rows = []
    for m in contexts:
        mask = (*m[:2], 1, *m[2:])
        rows.append([*PROMPT, *(MASK if h else x for h, x in zip(mask, response, strict=True))])
    out = log_p(net, rows)
    grads = torch.stack([gradient(net, -out[k, 4, 0]) for k in range(16)])
    ideal = contexts.index((0, 0, 1, 1))
    largest = (grads - grads[ideal]).norm(dim=1).max()
    for rate in (0.05, 0.3, 0.5, 0.9):
        chance = torch.tensor([math.prod(rate if h else 1 - rate for h in m) for m in contexts])
        bias = (chance.double() @ grads - grads[ideal]).norm()
        clean, hidden = (1 - rate) ** 2, rate**2
        assert float(chance[ideal]) == pytest.approx(clean * hidden, rel=1e-6)
        assert 0.05 * largest < bias <= (1 - clean * hidden) * largest
        assert 1 - clean * hidden <= (1 - clean) + (1 - hidden)
