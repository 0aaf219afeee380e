"""block_mask as an operator of torch: checks by torch itself, tracing, and what it refuses."""

import subprocess
import sys

import pytest
import torch
from bwsft_kernels import MaskSpec, block_mask, reference
from bwsft_kernels import _block_mask as public
from bwsft_kernels import _block_mask_torch as module
from bwsft_kernels._block_mask_types import MaskInputs
from bwsft_kernels._ops import ops
from kernel_cases import assert_same_fields as assert_same

MASK = 99
PLAIN = MaskSpec(4, MASK, seed=2**64 - 3)
FULL = MaskSpec(
    5, MASK, low=0.2, prefix_noise=0.3, suffix_leak=0.3, block_origin="absolute", pairs=True,
    empty="redraw",
)


def padded(size=3):
    ids = torch.arange(size * 20).view(size, 20) % 97
    return ids, torch.full((size,), 4), torch.full((size,), 13)


def packed(spec):
    """Arguments with every optional tensor but `block`, which excludes the weights."""
    ids, prompt, response = padded()
    every = torch.arange(3)
    return dict(
        ids=ids.flatten(), prompt_lengths=prompt, response_lengths=response, spec=spec,
        cu_seqlens=torch.arange(4, dtype=torch.int32) * 20, sample_ids=every + 2**40, draw=every,
        block_weights=torch.ones(3, 4).long(), block_draw=every, rate=every << 22,
        factor=torch.ones(3),
    )


def test_torchs_own_check_of_the_operator():
    calls, call = [], public._block_mask
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(public, "_block_mask", lambda *a: calls.append(a) or call(*a))
        block_mask(*padded(), PLAIN)
        block_mask(*padded(), PLAIN, block=torch.tensor([0, 1, 2]))
        block_mask(**packed(FULL))
    assert len(calls) == 3
    for arguments in calls:
        found = torch.library.opcheck(ops.block_mask.default, arguments)
        assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize("spec", [PLAIN, FULL])
def test_compiles_whole(spec):
    """No graph break, whether the lengths are tensors or the draw a number."""

    def step(ids, prompt, response):
        masked = block_mask(ids, prompt, response, spec, draw=3)
        return masked.noisy_ids + 1, masked.labels, masked.rows, masked.row_weight

    torch._dynamo.reset()
    whole = torch.compile(step, backend="aot_eager", fullgraph=True)
    for size in (3, 5, 6):  # the second call makes the size a symbol
        for one, other in zip(whole(*padded(size)), step(*padded(size)), strict=True):
            assert torch.equal(one, other)


def test_exports_with_any_number_of_sequences():
    class Corrupt(torch.nn.Module):
        def forward(self, ids, prompt, response):
            masked = block_mask(ids, prompt, response, PLAIN)
            return masked.noisy_ids, masked.row_target

    size = torch.export.Dim("S", min=2, max=64)
    shapes = ({0: size}, {0: size}, {0: size})
    program = torch.export.export(Corrupt(), padded(), dynamic_shapes=shapes)
    for one, other in zip(program.module()(*padded(7)), Corrupt()(*padded(7)), strict=True):
        assert torch.equal(one, other)


def test_fake_tensors_have_the_shapes_and_dtypes_of_real_ones():
    from torch._subclasses.fake_tensor import FakeTensorMode

    arguments = packed(FULL)
    real = block_mask(**arguments)
    with FakeTensorMode() as mode:
        fake = block_mask(**{
            name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            for name, value in arguments.items()
        })
    for name, value in vars(real).items():
        other = getattr(fake, name)
        assert (other.shape, other.dtype, other.stride()) == (
            value.shape, value.dtype, value.stride()), name


def test_vmap_is_refused():
    ids, prompt, response = padded()
    with pytest.raises(NotImplementedError, match="whole batch at once"):
        torch.vmap(lambda i: block_mask(i, prompt, response, PLAIN).noisy_ids)(ids[None])


def test_no_gradient_goes_through():
    factor = torch.ones(3, requires_grad=True)
    assert not block_mask(*padded(), PLAIN, factor=factor).row_weight.requires_grad


def test_a_call_needs_no_compiler():
    """torch._dynamo takes a second to import."""
    code = (
        "import sys, torch, bwsft_kernels as k\n"
        "k.block_mask(torch.ones(1, 9).long(), [2], [7], k.MaskSpec(4, 99))\n"
        "assert not {'torch._dynamo', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_synchronizes():
    """On the meta device any read of a value raises, so this runs only if there is none."""
    one = torch.ones(4, dtype=torch.int64, device="meta")
    ids = torch.ones(48, dtype=torch.int64, device="meta")
    inputs = MaskInputs(
        ids, *[one] * 6, block_draw=one, block_weights=one.expand(3, 4).T, rate=one,
        factor=one.double(),
    )
    batch = module.block_mask_torch(module.checked(inputs, FULL), FULL)
    assert batch.rows.shape == (20,) and batch.num_rows.shape == ()


@pytest.mark.parametrize("name", ["draw", "block_draw"])
@pytest.mark.parametrize("value", [-1, 2**32, 2**62])
def test_draws_that_32_bits_do_not_hold_are_refused(name, value):
    """Draw 2^32 would be draw 0 again."""
    for bad in (value, torch.tensor([0, value, 1])):
        with pytest.raises(ValueError, match=rf"{name} must lie in \[0, 2\^32\)"):
            block_mask(*padded(), PLAIN, **{name: bad})


def test_the_last_draw_that_32_bits_hold():
    most = 2**32 - 1
    own = block_mask(*padded(), FULL, draw=most, block_draw=torch.tensor([most, 0, most]))
    expected = reference.block_mask(
        *padded(), FULL, draw=most, block_draw=torch.tensor([most, 0, most])
    )
    assert_same(own, expected)
