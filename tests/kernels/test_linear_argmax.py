"""linear_argmax against a float64 softmax over full logits, and the rules of its choice."""

import math
import sys

import pytest
import torch
from bwsft_kernels import GumbelKey, linear_argmax, reference
from bwsft_kernels.philox import gumbel, gumbel_key, gumbel_u24
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import key_of

EXACT = dict(rtol=1e-12, atol=1e-13)
ALL = ("confidence", "entropy", "margin")


def problem(n, d, v, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(k, d, generator=generator).to(dtype) for k in (n, v))
    return x, weight, torch.randn(v, generator=generator).to(dtype)


@st.composite
def cases(draw):
    n = draw(st.sampled_from([0, 1, 2, 31, 32, 33]))
    v, d = draw(st.sampled_from([2, 3, 5, 63, 128])), draw(st.sampled_from([1, 4, 9]))
    x, weight, bias = problem(n, d, v, draw(st.integers(0, 2**31)))
    options = dict(
        linear_bias=bias if draw(st.booleans()) else None,
        softcap=draw(st.sampled_from([None, 1.5])),
        round_logits=draw(st.sampled_from([None, "bf16"])),
        temperature=draw(st.sampled_from([0.0, 0.7, 2.0])),
    )
    if v > 3:
        options["banned_ids"] = draw(st.sampled_from([(), (0,), (v - 1, 1)]))
        options["mask_id"] = draw(st.sampled_from([None, 0, 2, v - 1]))
        options["subs"] = options["mask_id"] is not None and draw(st.booleans())
    return x, weight, options


@settings(max_examples=150, deadline=None)
@given(cases())
def test_equals_the_reference(case):
    x, weight, options = case
    key = key_of(len(x))
    result = linear_argmax(x, weight, want=ALL, gumbel=key, **options)
    token, confidence, entropy, margin = reference.linear_argmax(
        x, weight, gumbel_from=key, **options
    )
    assert torch.equal(result.token, token) and result.token.dtype == torch.int64
    for one, other in ((result.confidence, confidence), (result.entropy, entropy),
                       (result.margin, margin)):
        assert one.dtype == torch.float64
        torch.testing.assert_close(one, other, **EXACT)
    assert not result.nan_flag and result.nan_flag.shape == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_keeps_fp32_logits(dtype):
    """bf16 logits would tie or flip the argmax in 2 to 4 % of rows; here the products are exact."""
    x, weight, bias = problem(200, 16, 20_000, dtype=dtype)
    result = linear_argmax(x, weight, linear_bias=bias, want=ALL)
    truth = linear_argmax(x.double(), weight.double(), linear_bias=bias.double(), want=ALL)
    assert torch.equal(result.token, truth.token)
    for name in ALL:
        value = getattr(result, name)
        assert value.dtype == torch.float32
        # Logits near 20 are known to 2^-20 or so; a probability to that part of itself.
        torch.testing.assert_close(value.double(), getattr(truth, name), rtol=2e-5, atol=1e-6)
    rounded = linear_argmax(x, weight, linear_bias=bias, round_logits="bf16")
    logits = (x.float() @ weight.float().T + bias.float()).bfloat16()
    assert torch.equal(rounded.token, logits.argmax(-1))
    assert (rounded.token != truth.token).any()


def test_lowest_index_wins_ties_across_tiles():
    weight = torch.zeros(20_000, 2)
    for tied in ([5, 9_000, 19_999], [8_191, 8_192], [19_998, 19_999]):
        weight.zero_()[tied] = 1.0
        for options in ({}, dict(round_logits="bf16"), dict(banned_ids=(0,), mask_id=1)):
            result = linear_argmax(torch.ones(3, 2), weight, want=ALL, **options)
            assert (result.token == tied[0]).all() and not result.margin.any()
        gone = linear_argmax(torch.ones(3, 2), weight, banned_ids=tied[:1])
        assert (gone.token == tied[1]).all()


def test_banned_ids_leave_the_softmax_and_the_mask_only_the_choice():
    x, weight = torch.ones(1, 1).double(), torch.tensor([[4.0], [3.0], [2.0], [1.0]]).double()
    exp = torch.tensor([4.0, 3.0, 2.0, 1.0]).double().exp()

    def confidence(**options):
        result = linear_argmax(x, weight, **options)
        return int(result.token), float(result.confidence)

    assert confidence() == (0, pytest.approx(float(exp[0] / exp.sum())))
    assert confidence(banned_ids=(0,)) == (1, pytest.approx(float(exp[1] / exp[1:].sum())))
    assert confidence(mask_id=0) == (1, pytest.approx(float(exp[1] / exp.sum())))
    assert confidence(mask_id=0, subs=True) == confidence(banned_ids=(0,))
    assert confidence(mask_id=0, banned_ids=(0,)) == confidence(banned_ids=(0,))


def test_margin_and_entropy_of_known_distributions():
    p = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.25] * 4], dtype=torch.float64)
    result = linear_argmax(p.log(), torch.eye(4).double(), want=ALL)
    torch.testing.assert_close(result.margin, p[:, 0] - p[:, 1], **EXACT)
    torch.testing.assert_close(result.entropy, -(p * p.log()).sum(-1), **EXACT)
    assert result.entropy[1] == pytest.approx(math.log(4))
    only = linear_argmax(p.log(), torch.eye(4).double(), want=ALL, banned_ids=(0, 1, 2))
    assert (only.token == 3).all() and (only.margin == 1).all() and not only.entropy.any()
    bare = linear_argmax(p.log(), torch.eye(4).double())
    assert bare.entropy is None and bare.margin is None


@pytest.mark.parametrize("temperature, odds", [(1.0, 3.0), (0.5, 3.0), (2.0, 3.0), (1.0, 99.0)])
def test_temperature_samples_the_tempered_softmax(temperature, odds):
    """Two tokens with logits 0 and log(odds): P(second) = odds^(1/T) / (1 + odds^(1/T))."""
    n, weight = 20_000, torch.tensor([[0.0], [math.log(odds)]])
    result = linear_argmax(torch.ones(n, 1), weight, temperature=temperature, gumbel=key_of(n))
    p = odds ** (1 / temperature) / (1 + odds ** (1 / temperature))
    assert abs(result.token.double().mean() - p) < 4.5 * math.sqrt(p * (1 - p) / n)
    # The confidence is that of the plain softmax, whatever the noise chose.
    plain = torch.tensor([1, odds])[result.token] / (1 + odds)
    torch.testing.assert_close(result.confidence, plain.float())


def test_noise_depends_on_seed_request_step_and_position_alone():
    x, weight, _ = problem(1, 4, 500)
    x = x.expand(64, 4)
    key = key_of(64, seed=3)

    def tokens(key, rows=slice(None)):
        picked = GumbelKey(key.seed, key.request[rows], key.step[rows], key.position[rows])
        return linear_argmax(x[rows], weight, temperature=5.0, gumbel=picked).token

    base = tokens(key)
    assert base.unique().numel() > 30
    order = torch.randperm(64, generator=torch.manual_seed(0))
    assert torch.equal(tokens(key, order), base[order])
    assert torch.equal(tokens(key, slice(7, 9)), base[7:9])
    shift = torch.ones(64, dtype=torch.int64)
    for other in (
        GumbelKey(4, key.request, key.step, key.position),
        GumbelKey(3, key.request + 2**40, key.step, key.position),
        GumbelKey(3, key.request + shift, key.step, key.position),
        GumbelKey(3, key.request, key.step + shift, key.position),
        GumbelKey(3, key.request, key.step, key.position + 64),
    ):
        assert (tokens(other) == base).sum() < 8


def test_noised_choice_in_fp32_is_the_documented_one():
    x, weight, _ = problem(40, 8, 3_001, dtype=torch.float32)
    key = key_of(40)
    words = gumbel_key(key.seed, key.request)
    noise = gumbel(gumbel_u24(3_001, key.position, key.step, key.request, words), torch.float32)
    logits = x @ weight.T
    chosen = linear_argmax(x, weight, temperature=0.8, gumbel=key).token
    score = logits + 0.8 * noise
    gap = score.max(-1).values - score.gather(-1, chosen[:, None])[:, 0]
    assert gap.max() < 1e-5 and torch.equal(chosen, score.argmax(-1))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_bad_row_sets_the_flag_and_harms_no_neighbor(poison):
    """sglang-omni#1666: NaN rows gave a sentinel id outside the vocabulary."""
    x, weight, _ = problem(9, 4, 50)
    good = linear_argmax(x, weight, want=ALL)
    x[4, 2] = poison
    for options in ({}, dict(temperature=1.0, gumbel=key_of(9))):
        bad = linear_argmax(x, weight, want=ALL, **options)
        assert bad.nan_flag and bad.confidence[4].isnan()
        assert ((bad.token >= 0) & (bad.token < 50)).all()
    rest = torch.arange(9) != 4
    assert torch.equal(linear_argmax(x, weight).token[rest], good.token[rest])


def test_shapes_layouts_and_chunks(monkeypatch):
    x, weight, bias = problem(24, 6, 37)
    key, options = key_of(24, seed=3), dict(linear_bias=bias, want=ALL, temperature=3.0)
    flat = linear_argmax(x, weight, gumbel=key, **options)
    shaped = GumbelKey(3, *(v.view(2, 3, 4) for v in (key.request, key.step, key.position)))
    deep = linear_argmax(x.T.contiguous().T.reshape(2, 3, 4, 6), weight, gumbel=shaped, **options)
    assert deep.token.shape == deep.margin.shape == (2, 3, 4)
    monkeypatch.setattr(sys.modules["bwsft_kernels._linear_argmax"], "LOGITS_BYTES", 5 * 37 * 8)
    monkeypatch.setattr(sys.modules["bwsft_kernels._linear_argmax"], "ROW_BLOCK_BYTES", 2 * 37 * 8)
    small = linear_argmax(x, weight, gumbel=key, **options)
    for name in ("token", *ALL):
        torch.testing.assert_close(getattr(deep, name).flatten(), getattr(flat, name), **EXACT)
        torch.testing.assert_close(getattr(small, name), getattr(flat, name), **EXACT)
    single = linear_argmax(x[0], weight, linear_bias=bias)
    assert single.token.shape == () and single.token == (weight @ x[0] + bias).argmax()


def test_autocast_gradients_and_meta():
    x, weight, _ = problem(8, 4, 30, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = linear_argmax(x, weight)
    rounded = linear_argmax(x.bfloat16(), weight.bfloat16())
    assert torch.equal(inside.token, rounded.token)
    assert torch.equal(inside.confidence, rounded.confidence)
    result = linear_argmax(x.requires_grad_(), weight.requires_grad_())
    assert not result.confidence.requires_grad
    # On the meta device a read of any value raises: nothing here waits for a GPU.
    meta = linear_argmax(x.to("meta"), weight.to("meta"), want=ALL, mask_id=3)
    assert meta.nan_flag.device.type == "meta"


BAD_CALLS = {
    "banned_ids and mask_id must lie": dict(banned_ids=(30,)),
    "no token to choose": dict(banned_ids=tuple(range(29)), mask_id=29),
    "subs needs mask_id": dict(subs=True),
    "temperature": dict(temperature=-1.0),
    "positive with a gumbel key": dict(temperature=1.0),
    r"gumbel.position must be \[8\]": dict(temperature=1.0, gumbel=key_of(7)),
    "want may hold": dict(want=("confidence", "logits")),
    "round_logits": dict(round_logits="fp16"),
    "softcap": dict(softcap=-2.0),
    "linear_weight must be \\[V": dict(linear_weight=torch.zeros(0)),
    "pass head.weight": dict(linear_weight=torch.nn.Linear(4, 30)),
    "mix torch.float32, torch.float64": dict(linear_weight=torch.zeros(30, 4)),
    "impl": dict(impl="best"),
}


@pytest.mark.parametrize("message", BAD_CALLS)
def test_bad_calls_say_what_is_wrong(message):
    x, weight, _ = problem(8, 4, 30)
    with pytest.raises(ValueError, match=message):
        linear_argmax(**{"input": x, "linear_weight": weight, **BAD_CALLS[message]})
