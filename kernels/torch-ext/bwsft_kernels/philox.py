"""Counter-based random numbers: Philox4x32-10, the same bits on every device.

A number is a pure function of (seed, stream, example, draw, position), so nothing depends on batch
order, on workers or on ranks, and a resumed run needs no generator state. Algorithm and known
answers: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".

Words are uint32 values held in int64 tensors: torch has no uint32 arithmetic on every device.
"""

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from ._dispatch import checking, require, triton_implementation
from ._operator import operator

MASK32 = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
Ints = int | Tensor  # int64, of any shape that broadcasts


class Stream(IntEnum):
    """What a number is for. Part of the file format of a run: never renumber."""

    BLOCK = 0
    RATE = 1
    MARKS = 2
    PREFIX = 3
    SUFFIX = 4
    DROPOUT = 5
    ORDER = 6
    GUMBEL = 7
    TIME = 8  # a second time of a visit
    MIX = 9  # whether a sequence sees its own predictions
    REPLACE = 10  # which visible tokens are replaced, and by what


def philox_words(
    counter: Sequence[Ints],  # 4 words
    key: Sequence[Ints],  # 2 words
) -> tuple[Ints, Ints, Ints, Ints]:
    """Philox4x32-10."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    m0, m1 = MULTIPLIERS
    for _ in range(ROUNDS):
        # The product of two uint32 may pass 2^63; int64 wraps, and both halves survive the masks.
        p0, p1 = c0 * m0, c2 * m1
        c0, c1 = ((p1 >> 32) & MASK32) ^ c1 ^ k0, p1 & MASK32
        c2, c3 = ((p0 >> 32) & MASK32) ^ c3 ^ k1, p0 & MASK32
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK32, (k1 + KEY_STEPS[1]) & MASK32
    return c0, c1, c2, c3


def split_seed(seed: int) -> tuple[int, int]:
    """The key words of a 64-bit seed; a negative seed counts as its two's complement."""
    return seed & MASK32, (seed >> 32) & MASK32



def philox_u24(
    position: Ints,  # broadcasts with the next two
    draw: Ints,
    sample_id: Ints,  # the example's number in its source, in [0, 2^56), else ValueError
    *,
    seed: int,
    stream: int,
    impl: str = "auto",
) -> Tensor:  # int64, of the common shape
    """Uniform integers in [0, 2^24).

    Counter = (position, draw, id & 0xffffffff, id >> 32 | stream << 24), key = seed. On a GPU a
    sample_id out of range is a device-side assertion, or ValueError with BWSFT_DEBUG=1.
    """
    return _numbers((position, draw, sample_id), seed, stream, False, impl)


def philox_uniform(
    position: Ints, draw: Ints, sample_id: Ints, *, seed: int, stream: int, impl: str = "auto"
) -> Tensor:  # fp32
    """Uniform fp32 numbers in [0, 1), multiples of 2^-24; arguments as in `philox_u24`."""
    return _numbers((position, draw, sample_id), seed, stream, True, impl)


def _numbers(
    counter: tuple[Ints, Ints, Ints], seed: int, stream: int, uniform: bool, impl: str
) -> Tensor:
    device = next((n.device for n in counter if isinstance(n, Tensor)), None)
    if device is None:  # an operator needs a tensor to know its device
        counter, device = (torch.as_tensor(counter[0]), *counter[1:]), torch.device("cpu")
    tensors = [n.to(device, torch.int64) if isinstance(n, Tensor) else None for n in counter]
    integers = [0 if isinstance(n, Tensor) else int(n) for n in counter]
    return _philox(*tensors, integers, *split_seed(seed), int(stream), uniform, impl)


def _philox_body(
    position: Tensor | None, draw: Tensor | None, sample_id: Tensor | None,
    integers: list[int],  # what stands in the place of each None
    key_low: int, key_high: int, stream: int, uniform: bool, impl: str,
) -> Tensor:
    tensors = position, draw, sample_id
    counter = [n if t is None else t for t, n in zip(tensors, integers, strict=True)]
    like = next(t for t in tensors if t is not None)
    kernels = triton_implementation(impl, like, "_philox_triton")
    if kernels is None or checking(like):
        high = torch.as_tensor(counter[2] >> 32, device=like.device)
        require(((high >= 0) & (high < 1 << 24)).all(), lambda: "sample_id must lie in [0, 2^56)")
    if kernels:
        dtype = torch.float32 if uniform else torch.int64
        key = key_low, key_high
        return kernels.u24(*counter, _shape(*tensors), like.device, stream, key, dtype)
    position, draw, sample_id = counter
    counter = (position & MASK32, draw & MASK32, sample_id & MASK32, sample_id >> 32 | stream << 24)
    u24 = philox_words(counter, (key_low, key_high))[0] >> 8
    return u24.float() * 2.0**-24 if uniform else u24


def _philox_fake(
    position: Tensor | None, draw: Tensor | None, sample_id: Tensor | None, integers: list[int],
    key_low: int, key_high: int, stream: int, uniform: bool, impl: str,
) -> Tensor:
    like = next(t for t in (position, draw, sample_id) if t is not None)
    dtype = torch.float32 if uniform else torch.int64
    return like.new_empty(_shape(position, draw, sample_id), dtype=dtype)


def _shape(*tensors: Tensor | None) -> torch.Size:
    return torch.broadcast_shapes(*[t.shape for t in tensors if t is not None])


_philox = operator(
    "philox_uniform",
    "(Tensor? position, Tensor? draw, Tensor? sample_id, int[] integers, int key_low, "
    "int key_high, int stream, bool uniform, str impl) -> Tensor",
    _philox_body, _philox_fake,
)


def gumbel_key(
    seed: int,
    request: Tensor,  # [N] int64
) -> tuple[Tensor, Tensor]:  # both [N]
    """Key words of the Gumbel noise of requests.

    They are words 0 and 1 of the block with counter (0, 0, request >> 32, GUMBEL << 24) under the
    key `seed`; the low half of the request goes into the noise's own counter.
    """
    low, high = gumbel_rows(request, request, request, split_seed(seed))[3:]
    return low, high


def gumbel_rows(
    position: Tensor, step: Tensor, request: Tensor,  # [N] int64
    key: tuple[int, int],
    impl: str = "auto",
) -> Tensor:  # [5, N] int64
    """What the Gumbel noise of each row is made of: position, step, request, `gumbel_key`."""
    if kernels := triton_implementation(impl, request, "_philox_triton"):
        return kernels.gumbel_rows(position, step, request, Stream.GUMBEL, key)
    zero = torch.zeros_like(request)
    counter = (zero, zero, (request >> 32) & MASK32, zero | (Stream.GUMBEL << 24))
    return torch.stack((position, step, request, *philox_words(counter, key)[:2]))


def gumbel_u24(
    num_ids: int,
    position: Tensor, step: Tensor, request: Tensor,  # [N] int64
    key: Sequence[Tensor],  # 2 words, each [N]
) -> Tensor:  # [N, num_ids]
    """u24 of every vocabulary id.

    Counter = (id // 4, position, step, request & 0xffffffff), word = id % 4.
    """
    group = torch.arange((num_ids + 3) // 4, device=request.device)  # [G]
    counter = [group] + [value[:, None] & MASK32 for value in (position, step, request)]
    words = philox_words(counter, [k[:, None] for k in key])
    return torch.stack(words, dim=-1).flatten(1)[:, :num_ids] >> 8  # [N, G, 4] -> [N, V]


def gumbel(u24: Tensor, dtype: torch.dtype) -> Tensor:
    """-log(-log u) for u = (u24 + 1/2) / 2^24, in `dtype`.

    In fp32, u24 + 1/2 isn't exact above 2^23: the largest would round to u = 1 and give +inf, which
    wins any argmax. At V = 126,464 that is 1 row in 130. So the upper half goes through 1 - u.
    """
    low = (u24.to(dtype) + 0.5) * 2.0**-24
    high = ((2**24 - u24).to(dtype) - 0.5) * 2.0**-24  # 1 - u
    upper = u24 >= 2**23
    return -torch.where(upper, -torch.log1p(-high), -torch.log(low)).log()
