"""Bugs that users reported of other fused heads, replayed on the Triton path in the interpreter.

Each entry of REPORTS: `repository#number: what happened` -> a function that gives (ours, right).
test_linear_cross_entropy_bugs.py holds those that don't depend on the kernels.
"""

import math
import os
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from bwsft_kernels import linear_argmax, linear_cross_entropy

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs TRITON_INTERPRET=1 in a process of its own, see the Makefile",
)

loss_of = partial(linear_cross_entropy, impl="triton")
argmax_of = partial(linear_argmax, impl="triton")


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty is filled with NaN, so an output that nobody wrote fails loudly."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def problem(n=12, v=131, d=5, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(n, d, generator=generator) * scale).requires_grad_()
    weight = torch.randn(v, d, generator=generator).requires_grad_()
    target = torch.randint(v, (n,), generator=generator)
    target[::3] = -100
    return x, weight, target


def full(x, weight, target, **options):
    return F.cross_entropy(F.linear(x, weight), target, **options)


def loss_and_grads(function, x, weight, target, upstream=None, **options):
    loss = function(x, weight, target, **options)
    upstream = torch.ones_like(loss) if upstream is None else upstream
    return [loss.detach(), *torch.autograd.grad(loss, (x, weight), upstream)]


def against_full(**options):
    x, weight, target = problem(**options.pop("problem", {}))
    return [loss_and_grads(f, x, weight, target, **options) for f in (loss_of, full)]


def nothing_counts(rows, reduction):
    x, weight, target = problem()
    x, target = x[:rows], torch.full((rows,), -100)
    own = loss_and_grads(loss_of, x, weight, target, reduction=reduction)
    return own, [torch.zeros_like(t) for t in own]


def second_backward():
    x, weight, target = problem()
    loss = loss_of(x, weight, target)
    loss.backward(torch.tensor(2.0), retain_graph=True)
    first = x.grad.clone()
    loss.backward(torch.tensor(2.0))
    return [x.grad - first], [first]


def in_place_on_the_loss():
    x, weight, target = problem()
    loss = loss_of(x, weight, target, reduction="none")
    loss *= 3
    own = torch.autograd.grad(loss.sum(), x)
    return own, torch.autograd.grad(3 * full(x, weight, target, reduction="none").sum(), x)


def micro_batches():
    x, weight, target = problem(30)
    whole = loss_and_grads(loss_of, x, weight, target, reduction="sum")
    parts = [
        loss_and_grads(loss_of, x, weight, torch.where(torch.arange(30) % 4 == k, target, -100),
                       reduction="sum")
        for k in range(4)
    ]
    return [sum(values) for values in zip(*parts, strict=True)], whole


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
    "Liger-Kernel#177, torchtune#2341: all ignored, mean": partial(nothing_counts, 12, "mean"),
    "ml-cross-entropy#49, unsloth#1417: no valid row, backward": partial(nothing_counts, 12, "sum"),
    "trl#6859: empty batch without a graph": partial(nothing_counts, 0, "none"),
    "Liger-Kernel#968, #678: upstream of row 0 for all": partial(
        against_full, reduction="none", upstream=torch.linspace(-1, 2, 12)
    ),
    "TransformerEngine#623: expanded upstream, stride 0": partial(
        against_full, reduction="none", upstream=torch.tensor(2.0).expand(12)
    ),
    "verl#6960, VeOmni#1017: strided upstream": partial(
        against_full, reduction="none", upstream=torch.randn(12, 2)[:, 1]
    ),
    "unsloth-zoo#434: upstream scaled by DDP": partial(against_full, upstream=torch.tensor(0.25)),
    "quack#209, and Liger: the second backward": second_backward,
    "unsloth#3769: loss *= k": in_place_on_the_loss,
    "flash-linear-attention#539, ms-swift#10165: micro-batches": micro_batches,
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
