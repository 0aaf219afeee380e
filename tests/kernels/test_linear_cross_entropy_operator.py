"""linear_cross_entropy as an operator: compiled, exported, faked and under torch.func."""

import contextlib

import pytest
import torch
from bwsft_kernels import linear_cross_entropy
from thinning import thinned
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import checkpoint

T, D, V = 12, 6, 37
OPS = torch.ops.bwsft_kernels
REDUCTIONS = ("mean", "sum", "none")


def problem(head=True, bias=True):
    generator = torch.Generator().manual_seed(0)
    x, weight, b = (torch.randn(*s, generator=generator) for s in ((T, D), (V, D), (V,)))
    target = torch.randint(V, (T,), generator=generator)
    target[9:], target[2] = -100, -100
    tensors = [x.requires_grad_(), weight.requires_grad_(head)]
    return *tensors, target, b.requires_grad_(head) if bias else None


def loss_and_grads(function, x, weight, target, bias, **options):
    loss = function(x, weight, target, linear_bias=bias, **options)
    leaves = [t for t in (x, weight, bias) if t is not None and t.requires_grad]
    return loss, *torch.autograd.grad(loss.sum(), leaves)


def assert_same(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("reduction, num_rows, chunk_bytes", thinned([
    (reduction, rows, size) for size in (None, 4 * V * 4) for rows in (None, 9)
    for reduction in REDUCTIONS
], 5))
def test_opcheck(reduction, num_rows, chunk_bytes):
    x, weight, target, bias = problem()
    row_weight = torch.rand(T, generator=torch.manual_seed(1))
    choice = (target, row_weight, None, V, -100, None, reduction == "mean", num_rows,
              torch.float32, "torch")
    torch.library.opcheck(OPS.linear_cross_entropy_rows.default, choice)
    arguments = (x, weight, bias, target.clamp(min=0), row_weight, None, reduction == "none", 0.1,
                 20.0, None, chunk_bytes, "torch", torch.float32, 0.5, [True, True, True])
    torch.library.opcheck(OPS.linear_cross_entropy.default, arguments)


@pytest.mark.parametrize("reduction, num_rows, chunk_bytes", thinned([
    (reduction, *sizes) for sizes in ((None, None), (9, None), (9, 4 * V * 4))
    for reduction in REDUCTIONS
], 4))
def test_compiles_into_one_graph(reduction, num_rows, chunk_bytes):
    """Whether the rows are counted on the device or given, in one chunk or in several."""

    def step(x, weight, target, linear_bias, **options):
        return 3 * linear_cross_entropy(x * 2, weight, target, linear_bias=linear_bias, **options)

    options = dict(reduction=reduction, num_rows=num_rows, chunk_bytes=chunk_bytes)
    options["row_weight"] = torch.rand(T, generator=torch.manual_seed(1))
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for head in (False, True):
        tensors = problem(head)
        assert_same(loss_and_grads(compiled, *tensors, **options),
                    loss_and_grads(step, *tensors, **options))


def test_compiles_inside_autocast_and_without_gradients():
    x, weight, target, bias = problem()

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            return linear_cross_entropy(x, weight, target, linear_bias=bias)

    with torch.no_grad():
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")()
        torch.testing.assert_close(compiled, step(), rtol=0, atol=0)
    assert_same(torch.autograd.grad(torch.compile(step, fullgraph=True, backend="aot_eager")(), x),
                torch.autograd.grad(step(), x))


def test_exports():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(D, V)

        def forward(self, x, target):
            return linear_cross_entropy(x, self.head.weight, target, linear_bias=self.head.bias)

    model, (x, _, target, _) = Model(), problem()
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(
        model, (x.detach(), target), dynamic_shapes=({0: rows}, {0: rows}))
    longer = torch.cat([x.detach(), x.detach()]), torch.cat([target, target])
    torch.testing.assert_close(program.module()(*longer), model(*longer))


@pytest.mark.parametrize("num_rows", [None, 9])
def test_fake_tensors_have_the_shapes_of_real_ones(num_rows):
    tensors = problem()
    real = loss_and_grads(linear_cross_entropy, *tensors, num_rows=num_rows)
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=False) as mode:
        fakes = [mode.from_tensor(t) for t in tensors]
        faked = loss_and_grads(linear_cross_entropy, *fakes, num_rows=num_rows)
    assert [(t.shape, t.dtype) for t in faked] == [(t.shape, t.dtype) for t in real]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_functional_gradient(reduction):
    x, weight, target, bias = problem()

    def loss(x, weight, bias):
        return linear_cross_entropy(x, weight, target, linear_bias=bias, reduction=reduction).sum()

    tensors = [t.detach() for t in (x, weight, bias)]
    grads, value = torch.func.grad_and_value(loss, argnums=(0, 1, 2))(*tensors)
    expected = loss_and_grads(linear_cross_entropy, x, weight, target, bias, reduction=reduction)
    assert_same((value, *grads), (expected[0].sum(), *expected[1:]))


def test_vmap_and_second_derivatives_are_refused():
    x, weight, target, bias = problem()
    with pytest.raises(RuntimeError, match="does not run under torch.vmap"):
        torch.vmap(linear_cross_entropy, in_dims=(0, None, 0))(x[None], weight, target[None])

    def gradient(x):
        return torch.func.grad(linear_cross_entropy)(x, weight, target).sum()

    with pytest.raises(RuntimeError, match="take torch.nn.functional.cross_entropy of all logits"):
        torch.func.grad(gradient)(x.detach())


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("head", [True, False])
def test_checkpoints_recompute_it(reduction, head):
    """Which give every saved tensor once."""
    x, weight, target, bias = problem(head)

    def checkpointed(*args, linear_bias, **options):
        return checkpoint(
            lambda x, b: linear_cross_entropy(x, *args[1:], linear_bias=b, **options), args[0],
            linear_bias, use_reentrant=False)  # fmt: skip

    found, expected = (
        loss_and_grads(f, x, weight, target, bias, reduction=reduction)
        for f in (checkpointed, linear_cross_entropy)
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("enabled", [True, False])
def test_tensors_that_need_no_gradient_cost_none(enabled):
    """A frozen head in a graph: nothing of the size of the head is made for it."""
    x, weight, target, bias = problem(head=False)
    context = contextlib.nullcontext() if enabled else torch.no_grad()
    with context, torch.profiler.profile(record_shapes=True) as profile:
        linear_cross_entropy(x, weight, target)
    products = [e for e in profile.events() if e.name in ("aten::mm", "aten::addmm")]
    assert len(products) == 1 + enabled
