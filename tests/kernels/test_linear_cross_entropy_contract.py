"""linear_cross_entropy: which rows are multiplied, what is refused, and how it lives with torch."""

import pytest
import torch
import torch.nn.functional as F
from bwsft_kernels import _cross_entropy_torch, linear_cross_entropy
from bwsft_kernels._linear_cross_entropy_args import LossOptions
from bwsft_kernels._linear_cross_entropy_sweep import finish, sweep
from bwsft_kernels._matmul import plan_chunks
from bwsft_kernels._select_rows import select_rows
from transformers.modeling_outputs import BaseModelOutput

N, D, V = 24, 6, 37


def problem(kept=10, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    target = torch.randint(V, (N,), generator=generator)
    target[torch.randperm(N, generator=generator)[kept:]] = -100
    return x, weight, target


def value_and_grads(x, weight, target, **options):
    loss = linear_cross_entropy(x, weight, target, **options)
    return loss, *torch.autograd.grad(loss.sum(), (x, weight))


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.fixture
def kernel_calls(monkeypatch):
    """Shapes of the logits that are made."""
    shapes, kernel = [], _cross_entropy_torch.loss_and_grad

    def spy(x, weight, *rest):
        shapes.append((len(x), len(weight)))
        return kernel(x, weight, *rest)

    monkeypatch.setattr(_cross_entropy_torch, "loss_and_grad", spy)
    return shapes


def test_only_rows_that_count_are_multiplied(kernel_calls):
    x, weight, target = problem()
    linear_cross_entropy(x, weight, target)
    weights = torch.ones(N)
    weights[(target != -100).nonzero()[:4, 0]] = 0
    linear_cross_entropy(x, weight, target, row_weight=weights)
    linear_cross_entropy(x, weight, torch.full_like(target, -100))
    assert kernel_calls == [(10, V), (6, V)]


def test_chunks_keep_to_their_bytes(kernel_calls):
    x, weight, target = problem()
    linear_cross_entropy(x, weight, target, chunk_bytes=4 * V * 8)
    assert kernel_calls == [(4, V), (4, V), (2, V)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_row_blocks_change_no_bit(monkeypatch, dtype):
    x, weight, target = problem(dtype=dtype)
    options = dict(row_weight=torch.rand(N), label_smoothing=torch.rand(N), softcap=5.0)
    whole = value_and_grads(x, weight, target, **options)
    for name in ("CACHE_BYTES", "SHARED_BYTES"):
        monkeypatch.setattr(_cross_entropy_torch, name, 3 * V * 8)
    parts = value_and_grads(x, weight, target, **options)
    assert all(torch.equal(one, two) for one, two in zip(whole, parts, strict=True))


def test_ignored_rows_get_exactly_zero_and_may_hold_anything():
    x, weight, target = problem()
    dirty = x.detach().clone()
    dirty[target == -100] = float("nan")
    dirty.requires_grad_()
    loss, grad, grad_weight = value_and_grads(dirty, weight, target)
    assert not grad[target == -100].any() and grad[target != -100].all()
    assert_same((loss, grad, grad_weight), value_and_grads(x, weight, target))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("excluded", [None, 0, 5])
def test_num_rows_takes_the_head_of_the_list(reduction, excluded):
    """What block_mask returns: real rows first, then a tail of ignored ones."""
    x, weight, target = problem(kept=N)
    target[target == (-1 if excluded is None else excluded)] = 1
    target[13:], weights = -100, torch.rand(N) + 0.5
    target[4], weights[7] = -100, 0
    options = dict(reduction=reduction, row_weight=weights, excluded_id=excluded)
    expected = value_and_grads(x, weight, target, **options)
    for num_rows in (13, 16, N):
        assert_same(value_and_grads(x, weight, target, num_rows=num_rows, **options), expected)
    with pytest.raises(ValueError, match="num_rows=4"):
        linear_cross_entropy(x, weight, target, num_rows=4)
    with pytest.raises(ValueError, match="num_rows"):
        linear_cross_entropy(x, weight, target, num_rows=N + 1)


def test_rows_that_are_all_kept_are_not_copied():
    x, _, target = problem(kept=N)
    rows = select_rows(target, None, None, V, -100, None, True, None, torch.float64, "torch")
    assert rows.of(x) is x
    target[3] = -100
    rows = select_rows(target, None, None, V, -100, None, True, None, torch.float64, "torch")
    assert torch.equal(rows.of(x), x[torch.arange(N) != 3])


def test_nothing_synchronizes_when_the_count_is_known():
    """On the meta device any read of a value raises."""
    x, weight, target = (t.detach().to("meta") for t in problem())
    options = LossOptions(dtype=torch.float64)

    def select(num_rows):
        return select_rows(target, torch.ones(N, device="meta"), None, V, -100, None, True,
                           num_rows, torch.float64, "torch")

    rows = select(16)
    loss, swept = sweep(x[:16], weight, None, rows.target, rows.weight, None, options,
                        (True, True, False))
    grads = finish(loss.sum(), x[:16], weight, None, swept, options, (True, True, False), last=True)
    assert [grad.shape for grad in grads[:2]] == [(16, D), weight.shape] and grads[2] is None
    with pytest.raises((RuntimeError, NotImplementedError)):
        select(None)


LAYOUTS = {
    "transposed": lambda x: x.detach().t().contiguous().t(),
    "strided": lambda x: torch.stack([x.detach()] * 2, dim=1)[:, 0],
    "shifted view": lambda x: torch.cat([x.detach(), x.detach()[:1]])[:-1],
    "rows of a 3-d slice": lambda x: F.pad(x.detach().view(2, 12, D), (0, 0, 0, 1))[:, :-1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_input_and_weight(layout):
    x, weight, target = problem()
    expected = value_and_grads(x, weight, target)
    moved = LAYOUTS[layout](x).requires_grad_()
    columns = weight.detach().t().contiguous().t().requires_grad_()
    loss, grad, grad_weight = value_and_grads(moved, columns, target.view(moved.shape[:-1]))
    assert_same((loss, grad.reshape(N, D), grad_weight), expected)


def test_expanded_input_is_one_row_many_times():
    x, weight, target = problem(kept=N)
    row = x.detach()[:1].requires_grad_()
    loss = linear_cross_entropy(row.expand(N, D), weight, target)
    expected = F.cross_entropy((row @ weight.T).expand(N, V), target)
    assert_same(torch.autograd.grad(loss, row), torch.autograd.grad(expected, row))


def test_integer_targets_of_any_width():
    x, weight, target = problem()
    expected = linear_cross_entropy(x, weight, target)
    for dtype in (torch.int32, torch.int16, torch.int8):
        assert torch.equal(linear_cross_entropy(x, weight, target.to(dtype)), expected)
    assert torch.equal(linear_cross_entropy(x, weight, target, ignore_index=None), expected)


def test_results_are_the_same_bits_every_time():
    x, weight, target = problem(dtype=torch.float32)
    one, two = value_and_grads(x, weight, target), value_and_grads(x, weight, target)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_distributed_head_is_refused(sharded):
    """ml-cross-entropy#31, Liger-Kernel#767: a DTensor head ended in an illegal access."""
    x, weight, target = problem()
    with pytest.raises(ValueError, match="linear_weight is a DTensor"):
        linear_cross_entropy(x, sharded(weight.detach()), target)


GOOD = dict(zip(("input", "linear_weight", "target"), problem(), strict=True))
BAD_CALLS = {
    "weight .per class.": dict(weight=torch.ones(V)),
    "options": dict(options=object()),
    "linear_weight.*not Linear: pass head.weight, and linear_bias=head.bias$":
        dict(linear_weight=torch.nn.Linear(D, V)),
    "linear_weight.*not Linear: pass head.weight$":
        dict(linear_weight=torch.nn.Linear(D, V, bias=False)),
    "input.*not BaseModelOutput: pass its last_hidden_state": dict(input=BaseModelOutput()),
    "linear_bias must be a tensor, not list$": dict(linear_bias=[0.0] * V),
    "ZeRO-3": dict(linear_weight=torch.zeros(0)),
    "not empty": dict(linear_weight=torch.zeros(0, D)),
    r"must be \[V, D\]": dict(linear_weight=torch.zeros(3, 4, D)),
    "must end in the 5 columns": dict(linear_weight=torch.zeros(V, 5)),
    "linear_bias must be": dict(linear_bias=torch.zeros(V - 1)),
    "input must be floating": dict(input=torch.zeros(N, D, dtype=torch.int64)),
    "probability": dict(target=torch.rand(N, V)),
    "target must be": dict(target=torch.zeros(N - 1, dtype=torch.int64)),
    "reduction": dict(reduction="batchmean"),
    "softcap": dict(softcap=0.0),
    "excluded_id": dict(excluded_id=V),
    "chunk_bytes": dict(chunk_bytes=0),
    "confidence must be 0 or positive": dict(confidence=-0.1),
    "label_smoothing must lie": dict(label_smoothing=1.5),
    "label_smoothing must be shaped": dict(label_smoothing=torch.zeros(3)),
    "row_weight must be shaped": dict(row_weight=torch.ones(N, 1)),
    "row_weight must be a tensor, not list": dict(row_weight=[1.0] * N),
    "row_weight must be a tensor, not float": dict(row_weight=0.5),
    "row_weight is on meta, but target on cpu": dict(row_weight=torch.ones(N, device="meta")),
    "target is on meta, but input on cpu": dict(target=torch.zeros(N, device="meta").long()),
    "target must be a tensor, not list": dict(target=[0] * N),
    "label_smoothing must be a number or a tensor, not list": dict(label_smoothing=[0.1] * N),
    "softcap must be positive and finite": dict(softcap=float("inf")),
    "row_weight gets no gradient": dict(row_weight=torch.ones(N, requires_grad=True)),
    "mix torch.float32, torch.float64": dict(linear_weight=torch.zeros(V, D)),
    "impl must be": dict(impl="cuda"),
}


@pytest.mark.parametrize("message", BAD_CALLS)
def test_bad_calls_say_what_is_wrong(message):
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**{**GOOD, **BAD_CALLS[message]})


def test_triton_on_cpu_tensors_says_why_not(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x, weight, target = problem(dtype=torch.float32)
    with pytest.raises(ValueError, match="impl=\"triton\" can't be used: the tensors are on cpu"):
        linear_cross_entropy(x, weight, target, impl="triton")
    with pytest.raises(ValueError, match="float64"):
        linear_cross_entropy(**GOOD, impl="triton")


def test_chunks_of_a_trained_head_on_a_cpu():
    """All rows of few logits; else halves, of 256 rows or 8 Mi logits if those are fewer rows."""
    options, cpu = LossOptions(), torch.device("cpu")
    for rows, vocabulary, chunk in ((128, 32_000, 128), (128, 126_464, 64), (512, 32_000, 256),
                                    (2048, 126_464, 256), (20_000, 1_000, 6_667)):
        budget = options.budget(cpu, rows, torch.Size([vocabulary, 256]))
        (_, stop), *_ = plan_chunks(rows, vocabulary * 4, budget)
        assert stop == chunk
    head = torch.Size([126_464, 256])
    assert options.budget(torch.device("meta"), 128, head) == 512 << 20
    # In 16 bits a sum over chunks would be as large as 512 rows of logits.
    assert LossOptions(dtype=torch.bfloat16).budget(cpu, 128, head) == 512 * 126_464 * 2
