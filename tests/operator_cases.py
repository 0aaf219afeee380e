"""Calls of the public functions that are operators, and what every operator must stand: in torch on
a CPU (tests/kernels/test_operators.py) and in Triton's interpreter (tests/kernels/triton).
"""

import kernel_cases as cases
import pytest
import range_cases
import torch
from bwsft_kernels import (
    RangePlan,
    linear_argmax,
    philox_uniform,
    range_attention,
    range_plan,
    rms_norm,
    rotary,
    swiglu,
)
from torch._subclasses.fake_tensor import FakeTensorMode

FP32 = torch.float32
OPS = torch.ops.bwsft_kernels
SMALL = range_plan(torch.tensor([2]), torch.tensor([3]), 2)[0]
PLAN, HEADS = tuple(vars(SMALL).values()), range_cases.tensors(SMALL, FP32, (2, 1))


def attend(q, k, v, *plan, impl="auto"):
    """range_attention with tensors alone, which is what export takes."""
    return range_attention(q, k, v, RangePlan(*plan), impl=impl)


attend.__name__ = "range_attention"
CALLS = {  # function -> (arguments, options, which arguments have a gradient)
    "rms_norm": (rms_norm, cases.norm_case(FP32)[:3], {}, (0, 1)),
    "rms_norm of a sum": (rms_norm, cases.norm_case(FP32), {}, (0, 1, 3)),
    "rotary": (rotary, cases.rotary_case(FP32), {}, (0, 1)),
    "rotary of one": (rotary, (cases.rotary_case(FP32)[0], None, *cases.rotary_case(FP32)[2:]), {},
                      (0,)),
    "swiglu": (swiglu, cases.swiglu_case(FP32), {}, (0, 1)),
    "linear_argmax": (
        linear_argmax, cases.head_problem(6, 40, 16, 1)[:2],
        dict(want=("confidence", "entropy", "margin"), temperature=0.7, gumbel=cases.key_of(6),
             banned_ids=(3,), mask_id=39), ()),
    "range_attention": (attend, (*HEADS[:3], *PLAN), {}, (0, 1, 2)),
    "plain linear_argmax": (linear_argmax, cases.head_problem(6, 40, 16, 1)[:2], {}, ()),
    "philox_uniform": (
        philox_uniform, (torch.arange(9), torch.arange(4)[:, None], 7), dict(seed=5, stream=2), ()),
}


def operators(impl):
    """(operator, arguments) for torch.library.opcheck: with and without each option."""
    def leaf(tensor):
        return tensor.clone().requires_grad_()

    x, weight, eps, residual = cases.norm_case(FP32)
    q, k, *tables = cases.rotary_case(FP32)
    gate, up = cases.swiglu_case(FP32)
    hidden, head = cases.head_problem(6, 40, 16, 1)[:2]
    key, place = cases.key_of(6), torch.arange(9)
    noise = key.position, key.step, key.request
    *heads, upstream = HEADS
    lse = torch.zeros(2, len(upstream))
    return [
        (OPS.range_attention, (*map(leaf, heads), *PLAN, 0.3, impl)),
        (OPS.range_attention, (heads[0], leaf(heads[1]), heads[2], *PLAN, 0.3, impl)),
        (OPS.range_attention_bwd, (upstream, *heads, upstream, lse, *PLAN, 0.3, impl)),
        (OPS.rms_norm, (leaf(x), leaf(weight), None, eps, impl)),
        (OPS.rms_norm, (x, leaf(weight), leaf(residual), eps, impl)),
        (OPS.rms_norm, (x, leaf(weight), residual, eps, impl)),
        (OPS.rms_norm_bwd, (x, None, x, weight, eps, True, impl)),
        (OPS.rms_norm_bwd, (x, residual, x, weight, eps, False, impl)),
        (OPS.rotary, (leaf(q), leaf(k), *tables, impl)),
        (OPS.rotary, (leaf(q), None, *tables, impl)),
        (OPS.rotary, (q, leaf(k), *tables, impl)),
        (OPS.rotary_bwd, (None, k, *tables, impl)),
        (OPS.swiglu, (leaf(gate), leaf(up), impl)),
        (OPS.swiglu_bwd, (gate, gate, up, impl)),
        (OPS.philox_uniform, (place, None, place[:3, None], [0, 4, 0], 1, 2, 3, True, impl)),
        (OPS.philox_uniform, (None, None, place, [5, 4, 0], 1, 2, 3, False, impl)),
        (OPS.linear_argmax, (hidden, head, None, *noise, 5, 0, 0.7, [3], 39, True, True, 0.0, False,
                             impl)),
        (OPS.linear_argmax, (hidden, head, None, None, None, None, 0, 0, 0.0, [], -1, False, False,
                             2.0, True, impl)),
    ]


def outputs(function, arguments, options):
    """The tensors that a call returns, in a tuple."""
    out = function(*arguments, **options)
    if function is linear_argmax:
        out = (out.token, out.confidence, out.entropy, out.margin, out.nan_flag)
    out = out if isinstance(out, tuple) else (out,)
    return tuple(t for t in out if t is not None)


def loss_of(name, **options):
    """(loss as a function of the tensors with a gradient, those tensors)."""
    function, arguments, own, trained = CALLS[name]
    upstream = [cases.normal(*t.shape, seed=20 + i).to(t)
                for i, t in enumerate(outputs(function, arguments, own | options))]

    def loss(*leaves):
        full = list(arguments)
        for i, leaf in zip(trained, leaves, strict=True):
            full[i] = leaf
        found = outputs(function, full, own | options)
        return sum((t * factor).sum() for t, factor in zip(found, upstream, strict=True))

    return loss, [arguments[i].detach().clone().requires_grad_() for i in trained]


def check_compiled(name, backend, **options):
    """One graph, eager's numbers, and eager's gradients."""
    torch._dynamo.reset()
    function, arguments, own, trained = CALLS[name]
    compiled = torch.compile(outputs, fullgraph=True, backend=backend)
    expected = outputs(function, arguments, own | options)
    torch.testing.assert_close(compiled(function, arguments, own | options), expected)
    if trained:
        loss, leaves = loss_of(name, **options)
        grads = torch.autograd.grad(loss(*leaves), leaves)
        compiled = torch.compile(loss, fullgraph=True, backend=backend)
        torch.testing.assert_close(torch.autograd.grad(compiled(*leaves), leaves), grads)


def check_exported(name, **options):
    """The exported program has eager's numbers; returns what its graphs call."""
    function, arguments, own, _ = CALLS[name]

    class Module(torch.nn.Module):
        def forward(self, *tensors):
            return outputs(function, tensors, own | options)

    program = torch.export.export(Module(), tuple(arguments))
    expected = outputs(function, arguments, own | options)
    torch.testing.assert_close(program.module()(*arguments), expected)
    graphs = [m for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    return {str(node.target) for graph in graphs for node in graph.graph.nodes}


def check_fake(name, **options):
    """Shapes, dtypes and strides without a value."""
    function, arguments, own, _ = CALLS[name]
    expected = outputs(function, arguments, own | options)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in arguments]
        for one, other in zip(outputs(function, fakes, own | options), expected, strict=True):
            assert one.shape == other.shape and one.dtype == other.dtype
            assert one.stride() == other.stride()


def check_func_grad(name, **options):
    loss, leaves = loss_of(name, **options)
    expected = torch.autograd.grad(loss(*leaves), leaves)
    order = tuple(range(len(leaves)))
    plain = [leaf.detach() for leaf in leaves]
    torch.testing.assert_close(torch.func.grad(loss, order)(*plain), expected)


def check_refusals(name, match_vmap, **options):
    """Under vmap, and in a second derivative of what has a first, the operator says what to do."""
    function, arguments, own, trained = CALLS[name]
    first = next(i for i, value in enumerate(arguments) if isinstance(value, torch.Tensor))

    def call(value):
        full = [value if i == first else t for i, t in enumerate(arguments)]
        return outputs(function, full, own | options)

    with pytest.raises(NotImplementedError, match=match_vmap):
        torch.func.vmap(call)(torch.stack([arguments[first]] * 2))
    if not trained:
        return
    loss, leaves = loss_of(name, **options)
    (grad,) = torch.autograd.grad(loss(*leaves).sin(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative .* where one is needed"):
        grad.square().sum().backward()

    def slope(leaf):
        rest = [t.detach() for t in leaves[1:]]
        return torch.func.grad(lambda x: loss(x, *rest).sin())(leaf).square().sum()

    with pytest.raises(RuntimeError, match="no second derivative .* where one is needed"):
        torch.func.grad(slope)(leaves[0].detach())
