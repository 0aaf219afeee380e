"""linear_argmax with impl="triton" in the interpreter, against float64 full logits.

bf16, which the interpreter multiplies wrongly, comes as fp32 numbers that bf16 can hold. A choice
may differ from the float64 one only where the two candidates differ by rounding.
"""

import math
import sys

import pytest
import torch
from bwsft_kernels import GumbelKey, _linear_argmax_triton, linear_argmax, reference
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kernel_cases import EPS, head_problem, key_of

pytestmark = pytest.mark.filterwarnings("ignore:overflow")  # soft-cap: 1 - 2 / exp(inf) is meant

ALL = ("confidence", "entropy", "margin")


@pytest.fixture(autouse=True)
def several_rounds(monkeypatch):
    """Tiles are merged two at a time, so that small vocabularies take several rounds."""
    monkeypatch.setattr(_linear_argmax_triton, "MERGE_TILES", 2)


def problem(*shape_and_seed, **options):
    return head_problem(*shape_and_seed, **options)[:3]


def check(assert_no_worse, x, weight, bias, options):
    own, plain = (
        linear_argmax(x, weight, linear_bias=bias, want=ALL, impl=impl, **options)
        for impl in ("triton", "torch")
    )
    wide = [None if t is None else t.double() for t in (x, weight, bias)]
    more = {name: value for name, value in options.items() if name != "gumbel"}
    token, *truth = reference.linear_argmax(
        wide[0], wide[1], linear_bias=wide[2], gumbel_from=options.get("gumbel"), **more
    )
    # Rounding a logit z moves a probability by at most EPS * z, an entropy by EPS * z * log V; with
    # round_logits a logit next to a boundary may land a bf16 step, 2^-8, away from truth.
    logits = torch.nn.functional.linear(*wide)
    size = min(float(logits.abs().max()), options.get("softcap") or 1e9) if logits.numel() else 0.0
    step = 2.0**-8 if options.get("round_logits") else 4 * EPS
    near = step * (1 + size)
    same = own.token == token
    swapped = logits_of(options, wide, own.token) - logits_of(options, wide, token)
    assert (same | (swapped.abs() <= near)).all()
    for name, expected in zip(ALL, truth, strict=True):
        one, two = (getattr(result, name)[same] for result in (own, plain))
        band = near * (1 + math.log(len(weight))) if name == "entropy" else near
        assert_no_worse(one, two, expected[same], band)
    assert not own.nan_flag


def logits_of(options, wide, token):
    """What the choice compares, at `token`: the logit, with noise if there is any, in float64."""
    logits = torch.nn.functional.linear(*wide)
    if options.get("softcap"):
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    if options.get("temperature"):
        from bwsft_kernels.philox import gumbel, gumbel_key, gumbel_u24

        key = options["gumbel"]
        words = gumbel_key(key.seed, key.request)
        u24 = gumbel_u24(len(wide[1]), key.position, key.step, key.request, words)
        logits = logits + options["temperature"] * gumbel(u24, torch.float64)
    return logits.gather(1, token[:, None])[:, 0]


@st.composite
def cases(draw, sizes, vocabularies, depths):
    n, v, d = (draw(st.sampled_from(choices)) for choices in (sizes, vocabularies, depths))
    scale = draw(st.sampled_from([0.3, 1.0, 20.0]))
    dtype = draw(st.sampled_from(["fp32", "fp16", "bf16"]))
    x, weight, bias = problem(n, v, d, draw(st.integers(0, 999)), dtype, scale)
    options = dict(
        softcap=draw(st.sampled_from([None, 5.0])),
        round_logits=draw(st.sampled_from([None, None, "bf16"])),
        temperature=draw(st.sampled_from([0.0, 0.7])),
    )
    if options["temperature"] > 0:
        options["gumbel"] = key_of(n)
    if v > 3:
        options["banned_ids"] = draw(st.sampled_from([(), (0,), (v - 1, 1)]))
        options["mask_id"] = draw(st.sampled_from([None, 0, 2, v - 1]))
        options["subs"] = options["mask_id"] is not None and draw(st.booleans())
    bias = draw(st.sampled_from([None, bias, torch.stack([bias, bias], -1)[:, 0]]))
    return x, weight, bias, options


@settings(max_examples=14, deadline=None, derandomize=True, phases=[Phase.generate])
@given(case=cases([0, 1, 2, 31, 33], [2, 63, 64, 507], [1, 5, 33]))
def test_against_float64(assert_no_worse, case):
    check(assert_no_worse, *case)


@pytest.mark.slow
@settings(max_examples=120, deadline=None, phases=[Phase.generate])
@given(case=cases([0, 1, 2, 31, 32, 33], [2, 63, 64, 507, 4096], [1, 5, 33, 64, 100]))
def test_against_float64_many(assert_no_worse, case):
    check(assert_no_worse, *case)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(513, 63, 16), (3, 50257, 8), (2, 126465, 4)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_large_shapes(assert_no_worse, shape, temperature):
    options = dict(temperature=temperature, gumbel=key_of(shape[0]))
    check(assert_no_worse, *problem(*shape, 0), options)


def test_lowest_id_wins_ties_within_and_across_tiles():
    """Equal rows of the head give equal logits, in the same tile, in others, and in the last.
    tokenspeed#280: another id won across blocks."""
    x, weight, _ = problem(4, 700, 6, seed=5)
    best = weight[300] * 5
    for where in ([3, 4], [64, 63], [699, 200], [699, 650, 128], [0, 699]):
        tied = weight.clone()
        tied[where] = best
        rows = (best / best.norm()).expand(4, 6)
        own = linear_argmax(rows, tied, want=("margin",), impl="triton")
        assert own.token.tolist() == [min(where)] * 4
        assert not own.margin.any()
        below = linear_argmax(rows, tied, banned_ids=(min(where),), impl="triton")
        assert below.token.tolist() == [sorted(where)[1]] * 4


def test_rounded_logits_tie_as_a_bf16_model_would():
    """Logits 100.1 and 100.2 are one bf16 number: the lower id wins although it is smaller."""
    weight = torch.tensor([[1.0], [100.1], [100.2], [3.0]])
    x = torch.ones(2, 1)
    assert linear_argmax(x, weight, impl="triton").token.tolist() == [2, 2]
    own = linear_argmax(x, weight, round_logits="bf16", want=ALL, impl="triton")
    plain = linear_argmax(x, weight, round_logits="bf16", want=ALL, impl="torch")
    assert own.token.tolist() == plain.token.tolist() == [1, 1]
    assert not own.margin.any() and torch.allclose(own.confidence, torch.tensor(0.5))


@pytest.mark.filterwarnings("ignore:All-NaN", "ignore:invalid value")  # numpy's, of such rows
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_a_number_raises_the_flag_and_keeps_a_valid_id(bad):
    """sglang-omni#1666: NaN rows gave a sentinel id, which indexes out of the embedding."""
    x, weight, _ = problem(3, 300, 4, seed=1)
    x[1] = bad
    for options in ({}, dict(want=ALL), dict(want=ALL, temperature=1.0, gumbel=key_of(3))):
        own = linear_argmax(x, weight, impl="triton", **options)
        assert own.nan_flag.dtype == torch.bool and own.nan_flag
        assert own.confidence.isnan().tolist() == [False, True, False]
        assert ((own.token >= 0) & (own.token < 300)).all()


def test_one_logit_that_is_not_a_number_raises_the_flag():
    """It must not vanish in a maximum: hardware takes the other operand."""
    x, weight, _ = problem(3, 300, 4, seed=1)
    weight[200] = math.nan
    for options in ({}, dict(want=ALL), dict(temperature=1.0, gumbel=key_of(3))):
        assert linear_argmax(x, weight, impl="triton", **options).confidence.isnan().all()


def test_noise_is_the_same_in_any_batch():
    x, weight, _ = problem(40, 300, 8, seed=2)
    key = key_of(40)
    whole = linear_argmax(x, weight, temperature=1.0, gumbel=key, impl="triton").token
    rows = torch.tensor([39, 0, 7])
    part = GumbelKey(key.seed, key.request[rows], key.step[rows], key.position[rows])
    own = linear_argmax(x[rows], weight, temperature=1.0, gumbel=part, impl="triton").token
    assert torch.equal(own, whole[rows])
    assert len(set(whole.tolist())) > 20  # it does sample


def test_two_kernels_whatever_is_wanted(monkeypatch):
    """One pass over the head and one merge; nothing of size N x V is ever allocated."""
    module = sys.modules["bwsft_kernels._linear_argmax_triton"]
    x, weight, _ = problem(5, 900, 8, seed=2)
    launched, largest = [], []
    for name in ("_head_stats_fwd_kernel", "_head_stats_merge_kernel"):
        kernel = getattr(module, name)

        class Spy:
            def __getitem__(self, grid, kernel=kernel, name=name):
                def launch(*args, **options):
                    launched.append(name)
                    largest.append(max(a.numel() for a in args if isinstance(a, torch.Tensor)))
                    return kernel[grid](*args, **options)

                return launch

        monkeypatch.setattr(module, name, Spy())
    linear_argmax(x, weight, want=ALL, temperature=1.0, gumbel=key_of(5), impl="triton")
    assert launched == ["_head_stats_fwd_kernel", "_head_stats_merge_kernel"]
    assert max(largest) == weight.numel() > 5 * 900
