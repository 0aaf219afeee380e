"""Bugs that users reported of other fused heads, replayed on the Triton path in the interpreter.

Each entry of REPORTS: `repository#number: what happened` -> a function that gives (ours, right), on
kernels' own ground; fused_loss_bugs.py has those of any path.
"""

from functools import partial

import fused_loss_bugs
import pytest
import torch
import torch.nn.functional as F
from bwsft_kernels import linear_argmax, linear_cross_entropy
from fused_loss_bugs import full, problem

loss_of = partial(linear_cross_entropy, impl="triton")


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


def banned_end_token_leaves_the_softmax():
    x, weight, _ = (t.detach() for t in problem())
    own = linear_argmax(x, weight, banned_ids=(130,), impl="triton")
    best = F.linear(x, weight[:130]).softmax(-1).max(-1)
    return [own.token.float(), own.confidence], [best.indices.float(), best.values]


REPORTS = {
    "verl#2899, #2656: V 63 and the tile": partial(vocabulary, 63),
    "verl#2899: V 129": partial(vocabulary, 129),
    "verl#2899: V 507": partial(vocabulary, 507),
    "ml-cross-entropy#59: sentinel for an absent target": sure_loss_is_never_negative,
    "Liger-Kernel#512: fp16 diverges with large logits": fp16_and_large_logits,
    "ml-cross-entropy#14: dX far from torch's": split_sum_over_the_vocabulary,
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


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in SLOW_REPORTS]


@pytest.mark.parametrize("report", [*REPORTS, *SLOW])
def test_reported_bug(report):
    own, right = (REPORTS | SLOW_REPORTS)[report]()
    for one, other in zip(own, right, strict=True):
        # fp32 sums of at most V terms of size 1
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6)
