"""The Triton kernels on a GPU, in bf16: values, graph capture, no stalls, determinism, memory.

Written without a GPU at hand and skipped where there is none.
"""

import os

import kernel_cases as cases
import pytest
import range_cases
import torch
from bwsft_kernels import (
    GumbelKey,
    MaskSpec,
    _tuning,
    block_mask,
    linear_argmax,
    linear_cross_entropy,
    range_attention,
    range_plan,
    reference,
    rms_norm,
    rotary,
    swiglu,
    torch_ops,
)
from bwsft_kernels import _linear_cross_entropy_bwd_triton as grad_triton
from bwsft_kernels import _linear_cross_entropy_fwd_triton as loss_triton
from kernel_cases import DTYPES, ROADS, taking
from kernel_cases import assert_same_fields as assert_same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 replaces the compiler"
    ),
]

MASK = 99
SHAPES = [(1, 64, 16), (33, 507, 40), (513, 4096, 256), (100, 50257, 64), (16, 126464, 512)]


def normal(*shape, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def grads(function, x, head, bias, target, **options):
    leaves = [t.detach().clone().requires_grad_() for t in (x, head, bias)]
    loss = function(leaves[0], leaves[1], target, linear_bias=leaves[2], **options)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("road", ROADS)
def test_linear_cross_entropy(shape, dtype, road, assert_no_worse):
    n, v, d = shape
    x, head, bias = normal(n, d, dtype=dtype), normal(v, d, seed=1, dtype=dtype) / d**0.5, normal(v)
    target = torch.randint(v, (n,), device="cuda")
    target[::4] = -100
    weight = torch.rand(n).cuda()
    for options in ({}, dict(label_smoothing=0.1, row_weight=weight), dict(softcap=20.0),
                    dict(label_smoothing=0.1, softcap=20.0)):
        case = x, head, bias.to(dtype), target
        with taking(road):
            own = grads(linear_cross_entropy, *case, impl="triton", **options)
        expected = grads(linear_cross_entropy, *case, impl="torch", **options)
        wide = [t.double() for t in case[:3]]
        truth = grads(reference.linear_cross_entropy, *wide, target, **options)
        eps = torch.finfo(torch.float32).eps
        for one, two, three in zip(own, expected, truth, strict=True):
            assert_no_worse(one, two, three, 64 * eps * float(three.abs().max()) + 1e-7)
        with torch.no_grad(), taking(road):
            loss = linear_cross_entropy(*case[:2], target, linear_bias=case[2], **options)
        assert_no_worse(loss, expected[0], truth[0], 64 * eps * float(truth[0].abs()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_linear_argmax(shape, dtype, temperature):
    n, v, d = shape
    x, head = normal(n, d, dtype=dtype), normal(v, d, seed=1, dtype=dtype)
    count = torch.arange(n, device="cuda")
    key = GumbelKey(2**40 + 1, count * 2**31, count % 5, count)
    options = dict(want=("confidence", "entropy", "margin"), banned_ids=(3,), mask_id=v - 1)
    options.update(temperature=temperature, gumbel=key)
    own, expected = (linear_argmax(x, head, impl=impl, **options) for impl in ("triton", "torch"))
    # Two orders of the same fp32 sum may swap candidates that are 1e-5 apart.
    agree = own.token == expected.token
    assert agree.float().mean() > 0.99
    for name in options["want"]:
        one, two = getattr(own, name)[agree], getattr(expected, name)[agree]
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)
    assert not own.nan_flag
    x[0] = float("nan")
    assert linear_argmax(x, head, impl="triton", **options).nan_flag


def batch(sequences=32, length=256):
    ids = torch.randint(90, (sequences, length), device="cuda")
    prompts = torch.randint(10, 90, (sequences,), device="cuda")
    responses = torch.randint(0, length - 90, (sequences,), device="cuda")
    return ids, prompts, responses


@pytest.mark.parametrize("more", [{}, dict(pairs=True, prefix_noise=0.2, suffix_leak=0.2)])
def test_block_mask_has_the_bits_of_the_cpu(more):
    ids, prompts, responses = batch()
    spec = MaskSpec(32, MASK, seed=2**63 + 5, **more)
    for draw in range(4):
        own = block_mask(ids, prompts, responses, spec, draw=draw, impl="triton")
        expected = block_mask(ids.cpu(), prompts.cpu(), responses.cpu(), spec, draw=draw)
        assert_same(own, expected)
    given = {"rate": torch.randint(2**24 + 1, (32,)), "factor": torch.rand(32)}
    on_gpu = {name: value.cuda() for name, value in given.items()}
    own = block_mask(ids, prompts, responses, spec, block_draw=3, impl="triton", **on_gpu)
    expected = block_mask(ids.cpu(), prompts.cpu(), responses.cpu(), spec, block_draw=3, **given)
    assert_same(own, expected)


def test_block_mask_in_a_graph():
    """Captured once, replayed with other ids and draws: the draw is data and not a constant."""
    ids, prompts, responses = batch()
    draw, spec = torch.zeros(32, dtype=torch.int64, device="cuda"), MaskSpec(32, MASK)

    def run():
        return block_mask(ids, prompts, responses, spec, draw=draw, impl="triton")

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for visit in range(1, 4):
        draw.fill_(visit)
        ids.copy_(torch.randint_like(ids, 90))
        graph.replay()
        assert_same(captured, run())


def test_a_step_of_the_loss_does_not_stall():
    """With a host count, mask, loss and backward queue up without one synchronization."""
    ids, prompts, responses = batch()
    head, hidden = normal(1000, 64), normal(ids.numel(), 64).requires_grad_()
    spec = MaskSpec(32, MASK)

    def step(count):
        masked = block_mask(ids, prompts, responses, spec, impl="triton")
        rows = [t[:count] for t in (masked.rows, masked.row_target, masked.row_weight)]
        x = hidden.index_select(0, rows[0])
        loss = linear_cross_entropy(
            x, head, rows[1], row_weight=rows[2], num_rows=count, reduction="sum", impl="triton"
        )
        loss.backward()
        return masked.num_rows

    count = -(-int(step(1024)) // 8) * 8
    step(count)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(count)
        linear_argmax(hidden[:40], head, impl="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_ten_runs_give_the_same_bits():
    x, head, bias = normal(300, 512), normal(50257, 512, seed=1), normal(50257, seed=2)
    target = torch.randint(50257, (300,), device="cuda")
    runs = []
    for _ in range(10):
        run = grads(linear_cross_entropy, x, head, bias, target, impl="triton")
        with torch.no_grad():
            run.append(linear_cross_entropy(x, head, target, impl="triton"))
        own = linear_argmax(x, head, want=("entropy", "margin"), impl="triton")
        runs.append([*run, own.token, own.confidence, own.entropy, own.margin])
    for run in runs[1:]:
        assert all(torch.equal(one, two) for one, two in zip(run, runs[0], strict=True))


def test_memory_of_the_loss_head():
    """At most 0.25 GiB over what was held, for 512 rows of LLaDA-8B's head."""
    if torch.cuda.get_device_properties(0).total_memory < 4 << 30:
        pytest.skip("needs 4 GB")
    x, head = normal(512, 4096).requires_grad_(), normal(126464, 4096)
    target = torch.randint(126464, (512,), device="cuda")
    linear_cross_entropy(x, head, target, num_rows=512).backward()
    x.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(x, head, target, num_rows=512).backward()
    assert torch.cuda.max_memory_allocated() - before <= 0.25 * 2**30


def test_past_2_31_logits():
    """17,000 rows of 126,464 logits are more than an int32 can number."""
    if torch.cuda.get_device_properties(0).total_memory < 16 << 30:
        pytest.skip("needs 16 GB")
    x, head = normal(17000, 16).requires_grad_(), normal(126464, 16)
    target = torch.randint(126464, (17000,), device="cuda")
    target[:16900] = target[16900]
    x.data[:16900] = x.data[16900]
    whole = linear_cross_entropy(x, head, target, chunk_bytes=8 << 30, reduction="none")
    whole.sum().backward()
    assert torch.equal(whole[:16900], whole[16900].expand(16900))
    assert torch.equal(x.grad[:16900], x.grad[16900].expand(16900, 16))


def test_the_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    x, head = normal(5, 32).to("cuda:1").requires_grad_(), normal(300, 32).to("cuda:1")
    target = torch.arange(5, device="cuda:1")
    with torch.cuda.device(0):
        linear_cross_entropy(x, head, target, impl="triton").backward()
        own = linear_argmax(x.detach(), head, impl="triton")
    assert torch.equal(own.token, torch.nn.functional.linear(x, head).float().argmax(-1))
    assert x.grad.isfinite().all() and x.grad.any()


WIDE = {  # at LLaDA-8B's widths
    rms_norm: dict(shape=(300, 4096)),
    rotary: dict(rows=(300,), heads=(32, 8), width=128),
    swiglu: dict(shape=(300, 12288)),
}


def small_case(function, dtype):
    case = cases.SMALL[function](dtype, **WIDE[function])
    return [t.cuda() if isinstance(t, torch.Tensor) else t for t in case]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", WIDE)
def test_small_operations(function, dtype, assert_no_worse):
    case, trained = small_case(function, dtype), cases.TRAINED[function]
    own = cases.check_values(assert_no_worse, function, case, impl="triton")
    if function is rotary:
        expected = cases.outputs_and_grads(torch_ops.rotary, case, trained)
        assert all(torch.equal(one, two) for one, two in zip(own, expected, strict=True))
    for _ in range(3):
        again = cases.outputs_and_grads(function, case, trained, impl="triton")
        assert all(torch.equal(one, two) for one, two in zip(own, again, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 96, 128, 256])
def test_range_attention(dtype, width):
    """Values against float64, the same bits again, and a plan that is made without a stall."""
    lengths = [torch.tensor(n, device="cuda") for n in ([100, 33, 260], [200, 0, 70])]
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan, _ = range_plan(*lengths, 32, copies=2, rows=393 + 3 * 270)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    case = [x.cuda() for x in range_cases.tensors(plan, dtype, (4, 2), width)]
    range_cases.check_against_dense(plan, case, "triton")
    one, other = (
        range_cases.with_gradients(lambda *x: range_attention(*x, plan, impl="triton"), *case)
        for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_small_operations_in_a_graph():
    given = {function: small_case(function, torch.bfloat16) for function in WIDE}

    def run():
        return [t for f, case in given.items() for t in torch.utils._pytree.tree_leaves(f(*case))]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for case in given.values():
        case[0].normal_()
    graph.replay()
    assert all(torch.equal(one, two) for one, two in zip(captured, run(), strict=True))


def test_search_for_tiles_prints_and_keeps_the_result(monkeypatch, capsys):
    monkeypatch.setenv("BWSFT_AUTOTUNE", "1")
    x, head = normal(200, 512), normal(4096, 512)
    first = linear_argmax(x, head, impl="triton")
    assert "TABLE['stats'" in capsys.readouterr().out
    again = linear_argmax(x, head, impl="triton")
    assert not capsys.readouterr().out
    assert torch.equal(first.token, again.token)


def test_doctor_finds_the_kernels_in_use_and_right(capsys):
    from bwsft.cli import main

    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.count("Triton: cuda and triton are there") == 6 and out.count(": right") == 2


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)
@pytest.mark.parametrize("n, v", [(33, 507), (513, 50257)])
def test_products_with_tma_equal_those_without(n, v, monkeypatch):
    """The search's tiles against the table's: fp32 sums in another order, the same bits twice."""
    x, head = normal(n, 256), normal(v, 256, seed=1) / 16
    width, target = -(-v // 64) * 64, torch.randint(v, (n,), device="cuda")
    g = torch.nn.functional.pad(normal(n, v, seed=2), (0, width - v))
    scratch = torch.empty(n, width * 4, dtype=torch.uint8, device="cuda")
    weight = torch.rand(n, device="cuda")

    def products():
        loss, grad = loss_triton.by_triton(
            x, head, None, target, weight, None, None, None, scratch)
        return loss, grad.float().clone(), grad_triton.split_product(g, head)

    plain = products()
    for index in range(2):
        for kernel in ("logits", "grad_input"):
            tile = _tuning.CANDIDATES[kernel, 90, 2][index][1]
            monkeypatch.setitem(_tuning.TABLE, (kernel, 90, 2), ((_tuning.ANY_ROWS, tile),))
        first, second = products(), products()
        assert all(map(torch.equal, first, second))
        for one, other in zip(first, plain, strict=True):
            scale = float(other.abs().max())
            torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-5 * scale)
