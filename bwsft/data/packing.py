"""Examples to packed batches: the canvas after each response, and the order of visits.

There is no padding: the T tokens of S sequences follow each other.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from bwsft_kernels.block_grid import BlockGrid
from bwsft_kernels.philox import MASK32, Stream, philox_words, split_seed

CANVASES = ("fixed", "response", "padded")


class Example(NamedTuple):
    """One visit of one tokenized example; `visit` counts earlier visits (its epoch)."""

    prompt: np.ndarray  # [Lc] int32
    response: np.ndarray  # [Lr] int32, end token included
    sample_id: int
    visit: int = 0


@dataclass(frozen=True, kw_only=True)
class CanvasLayout:
    """What follows a response on its canvas.

    `fixed`: EOS to the end of the last block, counted as response, then [MASK] to prompt +
    gen_length and the end of that block, as far as a decoder goes; a response longer than
    gen_length ends at its own next block boundary. `response`: nothing. `padded`: EOS to
    max_length, visible and not counted as response. The block grid starts where `block_origin`
    says (bwsft_kernels.block_grid).

    `fill` False (`fixed` only) puts [MASK] after the end token at once: what a decoder that has
    not come so far sees, and scores at several block sizes then count the same tokens.
    """

    mask_id: int
    eos_id: int
    canvas: str = "fixed"
    block_size: int = 32
    gen_length: int = 128
    max_length: int = 256
    block_origin: str = "response"
    fill: bool = True

    def __post_init__(self) -> None:
        if self.canvas not in CANVASES:
            raise ValueError(f"unknown canvas {self.canvas!r}; known are {', '.join(CANVASES)}")
        if self.gen_length % self.grid.size and self.canvas == "fixed":
            raise ValueError(
                f"block_size {self.block_size} doesn't divide gen_length {self.gen_length}"
            )

    @property
    def grid(self) -> BlockGrid:
        return BlockGrid(self.block_size, self.block_origin)

    def lengths(self, prompt: int, response: int) -> tuple[int, int]:
        """(response length with its fill, sequence length) of an example with these lengths."""
        if self.canvas == "response":
            return response, prompt + response
        if self.canvas == "padded":
            if prompt + response > self.max_length:
                raise ValueError(
                    f"an example of {prompt + response} tokens exceeds max_length {self.max_length}"
                )
            return response, self.max_length
        filled = self.grid.filled(prompt, response)
        whole = self.grid.filled(prompt, max(response, self.gen_length))
        return filled if self.fill else response, prompt + whole


@dataclass(frozen=True)
class Batch:
    """A packed batch. Sequence s is ids[cu_seqlens[s]:cu_seqlens[s+1]]: prompt, response (its end
    token and fill included), then the rest of its canvas."""

    ids: torch.Tensor  # [T] int64
    cu_seqlens: torch.Tensor  # [S+1] int32
    prompt_lengths: torch.Tensor  # [S] int64
    response_lengths: torch.Tensor  # [S] int64
    sample_ids: torch.Tensor  # [S] int64
    position_ids: torch.Tensor  # [T] int64, from 0 in every sequence
    visits: torch.Tensor  # [S] int64
    max_length: int | None = None  # of the longest sequence: spares CUDA attention a host read
    # [T] int64 the denoising step that committed a response token, -1 for none (data/traces.py)
    steps: torch.Tensor | None = None

    @property
    def num_sequences(self) -> int:
        return self.prompt_lengths.numel()

    def select(self, keep: Sequence[int]) -> "Batch":
        """The sequences with these numbers, in this order. Asks the device for their boundaries."""
        if list(keep) == list(range(self.num_sequences)):
            return self
        starts = self.cu_seqlens.tolist()
        lengths = [starts[s + 1] - starts[s] for s in keep]
        tokens = torch.cat([torch.arange(starts[s], starts[s + 1]) for s in keep])
        names = ("prompt_lengths", "response_lengths", "sample_ids", "visits")
        return replace(
            self, ids=self.ids[tokens], cu_seqlens=_boundaries(lengths).to(self.ids.device),
            position_ids=self.position_ids[tokens], max_length=max(lengths),
            steps=None if self.steps is None else self.steps[tokens],
            **{name: getattr(self, name)[keep] for name in names},
        )  # fmt: skip

    def to(self, device: torch.device | str) -> "Batch":
        tensors = {n: value for n, value in vars(self).items() if isinstance(value, torch.Tensor)}
        moved = {name: value.to(device, non_blocking=True) for name, value in tensors.items()}
        return replace(self, **moved)


def _boundaries(lengths: Sequence[int]) -> torch.Tensor:  # [S + 1] int32
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def pack(examples: Sequence[Example], layout: CanvasLayout) -> Batch:
    """The packed batch of `examples`, in their order. Raises ValueError if there are none."""
    if not examples:
        raise ValueError("can't pack a batch without examples")
    filled = [_fill(example, layout) for example in examples]
    rows, responses = zip(*filled, strict=True)
    lengths = [len(row) for row in rows]
    return Batch(
        ids=torch.from_numpy(np.concatenate(rows)),
        cu_seqlens=_boundaries(lengths),
        prompt_lengths=torch.tensor([len(e.prompt) for e in examples]),
        response_lengths=torch.tensor(responses),
        sample_ids=torch.tensor([int(e.sample_id) for e in examples]),
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        visits=torch.tensor([int(e.visit) for e in examples]),
        max_length=max(lengths),
    )


def _fill(example: Example, layout: CanvasLayout) -> tuple[np.ndarray, int]:
    """(the canvas of one example, its response length with the fill)."""
    prompt, response = len(example.prompt), len(example.response)
    filled, total = layout.lengths(prompt, response)
    after = layout.mask_id if layout.canvas == "fixed" else layout.eos_id
    canvas = np.full(total, after, dtype=np.int64)
    canvas[:prompt] = example.prompt
    canvas[prompt : prompt + response] = example.response
    canvas[prompt + response : prompt + filled] = layout.eos_id
    return canvas, filled


@functools.lru_cache(maxsize=4)
def order(num_examples: int, epoch: int, seed: int, position: int = 0) -> np.ndarray:
    """The order of epoch `epoch`: a permutation [num_examples] int64, a pure function.

    Examples are sorted by word 0 of Philox at counter (position, epoch, index, ORDER << 24).
    """
    index = torch.arange(num_examples)
    high = (index >> 32) | (Stream.ORDER << 24)
    fixed = (torch.full_like(index, position), torch.full_like(index, epoch & MASK32))
    word = philox_words((*fixed, index & MASK32, high), split_seed(seed))[0]
    permutation = torch.argsort(word, stable=True).numpy()
    permutation.flags.writeable = False
    return permutation


def samples(step: int, batch_size: int, num_examples: int, seed: int) -> list[tuple[int, int]]:
    """(example index, visit) of each example of optimizer step `step`, counted from 0.

    Epochs follow each other without a gap: a step may hold the end of one and the start of the
    next, and a set smaller than a batch comes round several times, each time as a new visit.
    """
    if num_examples < 1:
        raise ValueError("there are no examples to train on")
    result = []
    for sample in range(step * batch_size, (step + 1) * batch_size):
        epoch, place = divmod(sample, num_examples)
        result.append((int(order(num_examples, epoch, seed)[place]), epoch))
    return result


def split_holdout(
    record_numbers: np.ndarray, holdout: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """(training indices, held-out indices) of examples [n], each sorted: `holdout` examples, and
    more where the last record that is held out has several. All examples of a record are on one
    side. Raises ValueError if nothing would be left to train on."""
    numbers, owner, counts = np.unique(record_numbers, return_inverse=True, return_counts=True)
    # Position 1, so that the split is independent of the first epoch's order.
    shuffled = order(len(numbers), 0, seed, position=1)
    before = np.cumsum(counts[shuffled]) - counts[shuffled]
    is_held_out = np.isin(owner, shuffled[before < holdout])
    if holdout < 0 or is_held_out.all():
        raise ValueError(f"can't hold out {holdout} of {len(record_numbers)} examples")
    return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
