"""In which order BlockwiseTrainer visits examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import get_length_grouped_indices

from bwsft.data.packing import order


class VisitOrder(Sampler):
    """The order in which `bwsft train` visits examples in the epoch that `visit` names."""

    def __init__(self, count: int, seed: int, visit: Callable[[], int]):
        self.count, self.seed, self.visit = count, seed, visit

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(order(self.count, self.visit(), self.seed).tolist())


class LengthOrder(VisitOrder):
    """Examples of like length in the `together` of an update, in an order that the visit names."""

    def __init__(self, lengths: list[int], together: int, seed: int, visit: Callable[[], int]):
        super().__init__(len(lengths), seed, visit)
        self.lengths, self.together = lengths, together

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed((self.seed << 20) + self.visit())
        return iter(get_length_grouped_indices(self.lengths, self.together, generator=generator))
