"""What a call of the small operators costs the host: its time with the launches left out.

On a GPU the host must be faster than the kernels that it launches, some 5 to 50 us each. Tensors of
the CPU go through the same checks, allocations and autograd as those of a GPU; what Triton does to
launch is not in it.
"""

import time
import timeit
from collections.abc import Callable
from functools import partial
from unittest import mock

import bwsft_kernels
import torch
from bwsft_kernels import _dispatch, torch_ops
from lib import harness, output
from lib.launches import left_out
from torch import Tensor

ROWS, WIDTH, HEADS, HEAD = 64, 256, 8, 32  # of no influence


def calls() -> dict[str, tuple[Callable, tuple, list[Tensor]]]:
    """Name -> (function, arguments, those with a gradient)."""

    def rows(*shape: int) -> Tensor:
        return torch.randn(ROWS, *shape).bfloat16().requires_grad_()

    x, residual, gate, up = (rows(WIDTH) for _ in range(4))
    q, k = rows(HEADS, HEAD), rows(HEADS // 2, HEAD)
    weight, tables = torch.ones(WIDTH).bfloat16(), torch.rand(2, ROWS, 1, HEAD // 2).unbind()
    return {
        "rms_norm": (bwsft_kernels.rms_norm, (x, weight, 1e-5), [x]),
        "rms_norm of a sum": (
            bwsft_kernels.rms_norm, (x, weight, 1e-5, residual), [x, residual]),
        "rotary": (bwsft_kernels.rotary, (q, k, *tables), [q, k]),
        "swiglu": (bwsft_kernels.swiglu, (gate, up), [gate, up]),
    }


def microseconds(run: Callable[[], object], rounds: int) -> float:
    """The fastest of `rounds` bursts, in this thread's own time: what other processes take from it
    isn't its cost."""
    timeit.timeit(run, number=100)
    return min(timeit.repeat(run, timer=time.thread_time, number=100, repeat=rounds)) * 1e4


def host_cost(rounds: int) -> output.Point:
    results = []
    free = mock.patch.object(_dispatch, "obstacle", lambda tensor: None)
    with free, left_out():
        for name, (function, arguments, leaves) in calls().items():
            run = partial(function, *arguments, impl="triton")
            out = run()
            out = out if isinstance(out, tuple) else (out,)
            upstream = [torch.ones_like(t) for t in out]
            back = partial(torch.autograd.grad, out, leaves, upstream, retain_graph=True)
            with torch.no_grad():
                alone = microseconds(run, rounds)
            plain = partial(getattr(torch_ops, function.__name__), *arguments)
            extra = {"us without gradients": alone, "us with gradients": microseconds(run, rounds),
                     "us of backward": microseconds(back, rounds),
                     "us with gradients in torch": microseconds(plain, rounds)}
            results.append(harness.Result(name, extra=extra))
    return {"part": "host time of a call"}, results
