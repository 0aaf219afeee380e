"""Bugs that users reported of other fused losses, replayed on the torch and on the Triton path.

Each entry of REPORTS: `repository#number: what happened` -> a function of the loss function under
test that gives (ours, what is right), both lists of tensors.
"""

from functools import partial

import torch
import torch.nn.functional as F

REDUCTIONS = ("mean", "sum", "none")


def problem(n=12, v=131, d=5, seed=0, scale=1.0):
    """x [n, d], weight [v, d], target [n], a third ignored; 131 is no multiple of any tile."""
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(n, d, generator=generator) * scale).requires_grad_()
    weight = torch.randn(v, d, generator=generator).requires_grad_()
    target = torch.randint(v, (n,), generator=generator)
    target[::3] = -100
    return x, weight, target


def full(x, weight, target, **options):
    return F.cross_entropy(F.linear(x, weight).float(), target, **options)


def loss_and_grads(function, x, weight, target, upstream=None, **options):
    loss = function(x, weight, target, **options)
    upstream = torch.ones_like(loss) if upstream is None else upstream
    return [loss.detach(), *torch.autograd.grad(loss, (x, weight), upstream)]


def against_full(loss_of, scale=1.0, **options):
    own, right = (loss_and_grads(f, *problem(), **options) for f in (loss_of, full))
    return tuple([loss, *(grad / scale for grad in grads)] for loss, *grads in (own, right))


def nothing_counts(loss_of, rows=12, **options):
    """The loss is 0 and part of the graph: trl#6859, a loss without graph leaves a rank without
    gradients, and DDP waits indefinitely."""
    x, weight, target = problem()
    x = x[:rows]
    target = target[:rows] if "row_weight" in options else torch.full((rows,), -100)
    own, right = [], []
    for reduction in REDUCTIONS:
        own += loss_and_grads(loss_of, x, weight, target, reduction=reduction, **options)
        shape = (rows,) if reduction == "none" else ()
        right += [torch.zeros(shape), torch.zeros_like(x), torch.zeros_like(weight)]
    assert not any(t.any() for t in own)
    return own, right


def second_backward(loss_of):
    """The saved gradients were scaled in place, so twice came 2x."""
    own, right = [], []
    for reduction in REDUCTIONS:
        x, weight, target = problem()
        loss = loss_of(x, weight, target, reduction=reduction)
        upstream = torch.full_like(loss, 3.0)
        first = torch.autograd.grad(loss, (x, weight), upstream, retain_graph=True)
        second = torch.autograd.grad(loss, (x, weight), upstream)
        assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
        own += first
        right += loss_and_grads(full, x, weight, target, upstream, reduction=reduction)[1:]
    return own, right


def in_place_on_the_loss(loss_of):
    """The loss was a view, and `loss *= k` failed."""
    own, right = [], []
    for reduction in REDUCTIONS:
        x, weight, target = problem()
        loss = loss_of(x.view(3, 4, 5), weight, target.view(3, 4), reduction=reduction)
        loss *= 0.5
        loss += 1
        own += torch.autograd.grad(loss.sum(), (x, weight))
        loss = full(x, weight, target, reduction=reduction).sum() * 0.5
        right += torch.autograd.grad(loss, (x, weight))
    return own, right


def micro_batches(loss_of):
    x, weight, target = problem(30)
    whole = loss_and_grads(loss_of, x, weight, target, reduction="sum")
    parts = [
        loss_and_grads(loss_of, x, weight, torch.where(torch.arange(30) % 4 == k, target, -100),
                       reduction="sum")
        for k in range(4)
    ]
    return [sum(values) for values in zip(*parts, strict=True)], whole


def last_column(loss_of):
    """Padded columns added exp(0), or matched the ignored label, which may be a class here."""
    own, right = [], []
    x = -20 * torch.ones(4, 1)
    for v in (1, 2, 63, 127, 128, 129, 257):
        weight = torch.ones(v, 1) + torch.arange(v)[:, None] / v
        for ignore_index in (-100, v - 1):
            target = torch.tensor([v - 1, 0, ignore_index, v - 1])
            options = dict(reduction="none", ignore_index=ignore_index)
            own.append(loss_of(x, weight, target, **options))
            assert (own[-1] >= 0).all()
            right.append(full(x, weight, target, **options))
    return own, right


REPORTS = {
    "Liger-Kernel#177, torchtune#2341, unsloth#1417: every label ignored": nothing_counts,
    "ml-cross-entropy#49: no rows, backward divides by their number": partial(
        nothing_counts, rows=0
    ),
    "Automodel#3804: every weight is 0": partial(nothing_counts, row_weight=torch.zeros(12)),
    "a host count of 0": partial(nothing_counts, num_rows=0),
    "Liger-Kernel#968, #678: upstream of row 0 for all": partial(
        against_full, reduction="none", upstream=torch.linspace(-1, 2, 12)
    ),
    "TransformerEngine#623: expanded upstream, stride 0": partial(
        against_full, reduction="none", upstream=torch.tensor(2.0).expand(12)
    ),
    "verl#6960, VeOmni#1017: strided upstream": partial(
        against_full, reduction="none", upstream=torch.linspace(-2, 2, 24).view(12, 2)[:, 1]
    ),
    "unsloth-zoo#434: upstream scaled by DDP": partial(against_full, upstream=torch.tensor(0.25)),
    "unsloth-zoo#434: upstream scaled by a loss scaler": partial(
        against_full, scale=1024.0, reduction="none", upstream=torch.full((12,), 1024.0)
    ),
    "quack#209, and Liger: the second backward": second_backward,
    "unsloth#3769, #2435: loss *= k": in_place_on_the_loss,
    "flash-linear-attention#539, ms-swift#10165: micro-batches": micro_batches,
    "verl#2899, ml-cross-entropy#59: columns beyond the vocabulary": last_column,
}


def assert_right(report, loss_of):
    own, right = REPORTS[report](loss_of)
    for one, other in zip(own, right, strict=True):
        # fp32 sums of at most V terms of size 1
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
