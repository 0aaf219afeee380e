"""Bugs that users reported of other fused heads, replayed on the Triton path in the interpreter.

Each entry of REPORTS: `repository#number: what happened` -> a function that gives (ours, right), on
kernels' own ground; fused_loss_bugs.py has those of any path.
"""

import math
from functools import partial

import fused_loss_bugs
import pytest
import torch
import torch.nn.functional as F
from bwsft_kernels import linear_argmax, linear_cross_entropy
from fused_loss_bugs import full, problem

loss_of = partial(linear_cross_entropy, impl="triton")
argmax_of = partial(linear_argmax, impl="triton")


def vocabulary(v):
    """The no-logits kernel at the edges of its tiles; a padded column would add exp(0)."""
    x, weight, target = problem(3, v, 4)
    target[0] = v - 1
    with torch.no_grad():
        own = loss_of(x, weight, target, reduction="none")
        probability = torch.exp(-own)
        right = full(x, weight, target, reduction="none")
    assert (probability <= 1).all()
    return [own], [right]


def sure_loss_is_never_negative():
    """The last column is certain and V is no multiple of the tile."""
    x, weight = torch.full((2, 3), 10.0), torch.zeros(130, 3)
    weight[129] = 10
    with torch.no_grad():
        own = loss_of(x, weight, torch.tensor([129, 129]), reduction="none")
    return [own], [torch.zeros(2)]


def fp16_and_large_logits():
    """Logits of +-2000 in fp16, whose exponentials overflow both fp16 and fp32."""
    x, weight, target = problem(scale=300.0)
    half = x.detach().half(), weight.detach().half(), target
    own = loss_of(*half, reduction="none")
    right = full(half[0].double(), half[1].double(), target, reduction="none")
    assert right.max() > 500
    return [own / 500], [right.float() / 500]


def split_sum_over_the_vocabulary():
    """dX adds V products; CCE added them in bf16, tile by tile."""
    x, weight, target = problem(4, 6000, 8)
    own = torch.autograd.grad(loss_of(x, weight, target), x)
    wide = x.detach().double().requires_grad_()
    right = torch.autograd.grad(full(wide, weight.detach().double(), target), wide)
    return own, [g.float() for g in right]


def ties_take_the_lowest_id():
    weight = torch.zeros(400, 4)
    weight[[70, 200, 399]] = 1.0
    own = argmax_of(torch.ones(3, 4), weight)
    return [own.token.float()], [torch.full((3,), 70.0)]


def nan_rows_give_a_valid_id():
    x, weight, _ = (t.detach() for t in problem())
    x[3] = math.nan
    with pytest.warns(RuntimeWarning, match="NaN"):  # numpy, in the interpreter
        own = argmax_of(x, weight)
    valid = (own.token >= 0) & (own.token < len(weight))
    return [valid.float(), own.nan_flag.float()], [torch.ones(12), torch.ones(())]


def banned_end_token_leaves_the_softmax():
    x, weight, _ = (t.detach() for t in problem())
    own = argmax_of(x, weight, banned_ids=(130,))
    best = F.linear(x, weight[:130]).softmax(-1).max(-1)
    return [own.token.float(), own.confidence], [best.indices.float(), best.values]


REPORTS = {
    "verl#2899, #2656: V 63 and the tile": partial(vocabulary, 63),
    "verl#2899: V 129": partial(vocabulary, 129),
    "verl#2899: V 507": partial(vocabulary, 507),
    "ml-cross-entropy#59: sentinel for an absent target": sure_loss_is_never_negative,
    "Liger-Kernel#512: fp16 diverges with large logits": fp16_and_large_logits,
    "ml-cross-entropy#14: dX far from torch's": split_sum_over_the_vocabulary,
    "sglang-omni#1666: NaN rows give a sentinel": nan_rows_give_a_valid_id,
    "tokenspeed#280: ties across blocks": ties_take_the_lowest_id,
    "LLaDA generate.py: banned tokens keep their share": banned_end_token_leaves_the_softmax,
}
SLOW_REPORTS = {
    "verl#2899: V 50257": partial(vocabulary, 50257),
    "verl#2899: V 129920": partial(vocabulary, 129920),
    "verl#2899: V 126463": partial(vocabulary, 126463),
    "verl#2899: V 126465": partial(vocabulary, 126465),
    "Megatron-LM#2206: V 256000": partial(vocabulary, 256000),
}


@pytest.mark.parametrize("report", fused_loss_bugs.REPORTS)
def test_reported_bug_of_any_path(report):
    fused_loss_bugs.assert_right(report, loss_of)


def assert_right(report):
    own, right = report()
    for one, other in zip(own, right, strict=True):
        # fp32 sums of at most V terms of size 1
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("report", REPORTS)
def test_reported_bug(report):
    assert_right(REPORTS[report])


@pytest.mark.slow
@pytest.mark.parametrize("report", SLOW_REPORTS)
def test_reported_bug_at_full_size(report):
    assert_right(SLOW_REPORTS[report])
