"""Operators of torch.library whose body is called directly where nobody is watching.

torch.compile, export and fake tensors see one operator with its fake, its gradient
and a clear refusal of vmap. In plain eager mode the dispatcher would cost a Python operator 10 us a
call, and 18 us with gradients, several times what its kernel takes; so there the same body and the
same gradient run without it.
"""

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import Parameter

from ._ops import add_op_namespace_prefix, ops

BODIES: dict[OpOverload, Callable] = {}  # operator -> what it runs


def operator(
    name: str,
    schema: str,  # "(Tensor x, ...) -> (Tensor, ...)", the tensors before all else
    body: Callable, fake: Callable,
    setup_context: Callable | None = None, backward: Callable | None = None,
    eager: Callable | None = None,
) -> Callable:
    """Register an operator and return the function that calls it.

    body and fake take its arguments and return a tensor, or a tuple in which None stands for an
    output that isn't wanted: the operator then returns an empty tensor. setup_context and backward
    are as in torch.library.register_autograd; without them a derivative is refused. eager: a body
    for plain eager mode, where it may write to its arguments.
    """
    if backward is None:
        setup_context, backward = _ignore, _refuse_derivative(name)
    refuse_vmap = _refuse_vmap(name)
    whole = _apart(_filled(body))
    registered = torch.library.custom_op(
        add_op_namespace_prefix(name), whole, mutates_args=(), schema=schema)
    registered.register_fake(_filled(fake))
    registered.register_autograd(backward, setup_context=setup_context)
    registered.register_vmap(refuse_vmap)
    op = getattr(ops, name).default
    BODIES[op] = whole

    def forward(ctx, *args):
        out = body(*args)
        setup_context(ctx, args, out)
        return out

    # The second one is torch's form for func.grad, and 13 us slower. What Function.apply does
    # before its base class's is for func.grad too, and takes a third of its time.
    function = _function(name, forward=forward, backward=backward)
    apply = super(torch.autograd.Function, function).apply
    transformed = _function(
        name, forward=lambda *args: op(*args), setup_context=setup_context, backward=backward,
        vmap=refuse_vmap)

    plain = eager or body
    tensors = schema.partition("->")[0].count("Tensor")

    def call(*args):
        if torch.compiler.is_compiling():
            return op(*args)
        if torch._C._are_functorch_transforms_active():
            return transformed.apply(*args)
        if torch._C._len_torch_dispatch_stack() and recorded():
            return op(*args)
        wanted = False
        for arg in args[:tensors]:
            if arg is None:
                continue
            kind = type(arg)
            if kind is not Tensor and kind is not Parameter:
                return op(*args)
            wanted = wanted or arg.requires_grad
        return apply(*args) if wanted and torch.is_grad_enabled() else plain(*args)

    return call


def recorded() -> bool:
    """Whether a mode is active that must see an operator whole: a tracer's, or fake tensors'.
    Counters of FLOPs or operators see what its body does."""
    keys = torch._C._TorchDispatchModeKey.__members__.values()
    return any(torch._C._get_dispatch_mode(key) is not None for key in keys)


def _function(name: str, **methods: Callable) -> type[torch.autograd.Function]:
    methods = {key: staticmethod(method) for key, method in methods.items()}
    return type(name, (torch.autograd.Function,), methods)


def _filled(function: Callable) -> Callable:
    """The function with an empty tensor for each None that it returns."""

    def call(*args):
        out = function(*args)
        if isinstance(out, Tensor):
            return out
        like = next(arg for arg in args if isinstance(arg, Tensor))
        return tuple(like.new_empty(0) if value is None else value for value in out)

    return call


def _apart(function: Callable) -> Callable:
    """The function with a copy of each part of a tensor that it returns: an operator's outputs
    share no memory."""

    def call(*args):
        out = function(*args)
        if isinstance(out, Tensor):
            return out
        return tuple(t.clone() if t.nbytes < t.untyped_storage().nbytes() else t for t in out)

    return call


# What has a second derivative, of functions that have none with impl="torch" either.
INSTEAD = {"linear_cross_entropy": "torch.nn.functional.cross_entropy of all logits"}


def _ignore(ctx: object, inputs: tuple, output: object) -> None:
    """The setup_context of what has no gradient."""


def _refuse_derivative(name: str) -> Callable:
    public = name.removesuffix("_bwd").removesuffix("_none")
    if public != name:
        instead = INSTEAD.get(public, f'{public} with impl="torch"')
        text = (f"{public} has no second derivative (double backward): where one is needed, take "
                f"{instead}")
    else:
        text = f"{name} has no derivative: detach its inputs"

    def backward(ctx: object, *grads: Tensor) -> NoReturn:
        raise RuntimeError(text)

    return backward


def _refuse_vmap(name: str) -> Callable:
    def vmap(info: object, in_dims: tuple, *args: object) -> NoReturn:
        raise NotImplementedError(
            f"{name} does not run under torch.vmap: it takes any leading dimensions, so give it "
            "the whole batch at once")

    return vmap
