"""Cases and comparisons that the kernels' tests share: in torch on a CPU (tests/kernels), in
Triton's interpreter (tests/kernels/triton) and on a GPU (tests/gpu).
"""

import contextlib
import dataclasses

import pytest
import torch
from bwsft_kernels import GumbelKey, MaskSpec, _tuning, rms_norm, rotary, swiglu, torch_ops
from hypothesis import strategies as st

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = torch.finfo(torch.float32).eps


ONES = 0xFFFFFFFF
PHILOX = [  # counter, key, words: the published vectors of Philox4x32-10 (Salmon et al. 2011)
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def normal(*shape, seed=0, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def assert_same_fields(own, expected):
    """Of two dataclasses of tensors: the same dtypes and bits."""
    for field in dataclasses.fields(own):
        one, other = getattr(own, field.name), getattr(expected, field.name)
        assert one.dtype == other.dtype and torch.equal(one, other.to(one.device)), field.name


@st.composite
def mask_specs(draw):
    weight = draw(st.sampled_from(["count", "rate", "flat", "sum"]))
    bounds = [(0.0, 0.0), (0.0, 0.3), (0.0, 1.0), (1e-3, 1.0), (0.4, 0.4), (0.5, 1.0), (1.0, 1.0)]
    low, high = draw(st.sampled_from(bounds))
    return MaskSpec(
        block_size=draw(st.integers(1, 9) | st.just(32)), mask_id=99, low=low, high=high,
        seed=draw(st.integers(0, 2**64 - 1)), weight=weight,
        empty=draw(st.sampled_from(
            ["redraw", "last", "skip"] if weight in ("count", "sum") else ["skip"]
        )),
        block_factor=draw(st.sampled_from(["mean", "sum"])),
        prefix_noise=draw(st.sampled_from([0.0, 0.3, 1.0])),
        suffix_leak=draw(st.sampled_from([0.0, 0.2, 0.6, 1.0])),
        block_origin=draw(st.sampled_from(["response", "absolute"])),
        pairs=weight != "rate" and draw(st.booleans()),
    )


def key_of(n, seed=2**63 + 1):
    """Noise of n rows, each of another request, step and position."""
    count = torch.arange(n)
    return GumbelKey(seed, request=count * 2**31, step=count % 5, position=count + 100)


def head_problem(n, v, d, seed, dtype="fp32", scale=1.0):
    """x [n, d], weight [v, d], bias [v], target [n]; "bf16" numbers are stored as fp32, since
    Triton's interpreter multiplies bf16 wrongly."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(*shape, generator=generator) for shape in ((n, d), (v, d), (v,))]
    tensors[0] *= scale
    if dtype == "bf16":
        tensors = [t.bfloat16().float() for t in tensors]
    if dtype == "fp16":
        tensors = [t.half() for t in tensors]
    target = torch.randint(v, (n,), generator=generator)
    target[: n // 3] = torch.tensor([0, v - 1])[torch.arange(n // 3) % 2]  # first and last class
    return *tensors, target


ROADS = ["cublas", "triton"]


@contextlib.contextmanager
def taking(road):
    """Inside, every product of the fused loss takes this road, whatever the card."""
    keys = [(name, arch, size) for name in ("logits", "loss", "grad_input")
            for arch in (80, 90, _tuning.SAFE) for size in (2, 4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_tuning, "ROADS", {key: ((_tuning.ANY_ROWS, road),) for key in keys})
        yield


def past_2_31():
    """far(values) -> the same fp16 values, row 4 of them 2^31 elements after row 0: an int32 offset
    would wrap, to a place that exists and holds something else. Memory that nobody touches costs
    nothing."""
    torch.use_deterministic_algorithms(False)  # don't fill 8 GB
    buffer = torch.empty(2**32 + 100, dtype=torch.float16)
    buffer[:100] = 0

    def far(values):
        strides = (2**29, *values.stride()[1:])
        return buffer.as_strided(values.shape, strides, 2**31).copy_(values)

    return far


# The small operations: arguments, which of them have a gradient, and the comparison with torch.


def norm_case(dtype, shape=(3, 5, 40), scale=1.0):
    x, residual = normal(*shape, dtype=dtype, scale=scale), normal(*shape, seed=1, dtype=dtype)
    return x, normal(shape[-1], seed=2, dtype=dtype), 1e-5, residual


def rotary_case(dtype, rows=(3, 5), heads=(4, 2), width=6):
    q, k = (normal(*rows, h, width, seed=h, dtype=dtype) for h in heads)
    angle = normal(*rows, 1, width // 2, seed=9, scale=50.0)
    wide = torch.promote_types(dtype, torch.float32)
    return q, k, angle.cos().to(wide), angle.sin().to(wide)


def swiglu_case(dtype, shape=(3, 5, 41), scale=3.0):
    gate = normal(*shape, dtype=dtype, scale=scale)
    gate.view(-1)[:2] = torch.tensor([-200.0, 200.0])  # exp(200) is inf in fp32
    return gate, normal(*shape, seed=1, dtype=dtype)


SMALL = {rms_norm: norm_case, rotary: rotary_case, swiglu: swiglu_case}
TRAINED = {rms_norm: (0, 1, 3), rotary: (0, 1), swiglu: (0, 1)}  # arguments with a gradient
LAYOUTS = {
    "transposed": lambda x: x.detach().transpose(0, -1).contiguous().transpose(0, -1),
    "every second row": lambda x: torch.stack([x.detach()] * 2, dim=1)[:, 0],
    "half of a wider tensor": lambda x: torch.cat([x.detach()] * 2, dim=-1)[..., : x.shape[-1]],
}


def in_torch(function):
    """The reference implementation of a small operation."""
    return getattr(torch_ops, function.__name__)


def outputs_and_grads(function, case, trained, **options):
    """Outputs, then gradients of an uneven sum of them."""
    case = [t.detach().requires_grad_() if i in trained else t for i, t in enumerate(case)]
    out = function(*case, **options)
    out = [t for t in (out if isinstance(out, tuple) else (out,)) if t is not None]
    upstream = [normal(*t.shape, seed=20 + i).to(t) for i, t in enumerate(out)]
    paths = [pair for pair in zip(out, upstream, strict=True) if pair[0].requires_grad]
    ends, upstream = zip(*paths, strict=True)
    grads = torch.autograd.grad(ends, [case[i] for i in trained], upstream)
    return [t.detach() for t in (*out, *grads)]


def check_values(assert_no_worse, function, case, trained=None, **options):
    """Error at most 3x that of autograd through plain torch in the same dtype; returns outputs and
    gradients. A band of two roundings of the largest number, for values that torch gets exactly."""
    trained = TRAINED[function] if trained is None else trained
    own = outputs_and_grads(function, case, trained, **options)
    same = outputs_and_grads(in_torch(function), case, trained)
    wide = [t.double() if isinstance(t, torch.Tensor) else t for t in case]
    truths = outputs_and_grads(in_torch(function), wide, trained)
    for one, two, truth in zip(own, same, truths, strict=True):
        assert one.dtype == two.dtype
        band = 2 * torch.finfo(one.dtype).eps * float(truth.abs().max() if truth.numel() else 0)
        assert_no_worse(one, two, truth, band)
    return own
