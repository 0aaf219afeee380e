"""The block grid: where the blocks of a response start and end."""

from dataclasses import dataclass

from torch import Tensor

ORIGINS = ("response", "absolute")
Ints = int | Tensor  # integers, of any shape that broadcasts


@dataclass(frozen=True)
class BlockGrid:
    """Cuts the positions of a row into blocks of `size` tokens.

    origin: the grid starts at the "response"'s first token (LLaDA, Dream), or at position 0 of the
    row, "absolute" (SDAR, LLaDA2), where a response's first and last block may be short. Positions
    count from the row's first token; `prompt` and `response` are lengths in tokens.
    """

    size: int
    origin: str = "response"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"block_size must be at least 1, not {self.size}")
        if self.origin not in ORIGINS:
            raise ValueError(f"block_origin must be one of {ORIGINS}, not {self.origin!r}")


    @property
    def at_response(self) -> bool:
        """The first block of a response is whole: the grid starts at its first token."""
        return self.origin == "response"

    def start(self, prompt: Ints) -> Ints:
        """Position where the block begins that holds the response's first token; before it where
        that block holds the prompt's tail too."""
        return prompt if self.at_response else prompt - prompt % self.size

    def num_blocks(self, prompt: Ints, response: Ints) -> Ints:
        """Number M of blocks that hold tokens of the response; 0 for an empty response."""
        return self._cover(prompt, response) * (response > 0)

    def bounds(self, index: Ints, prompt: Ints, response: Ints) -> tuple[Ints, Ints]:
        """(start, stop) of the response's block number `index`, clipped to the response."""
        first = self.start(prompt) + index * self.size
        return _max(first, prompt), _min(first + self.size, prompt + response)

    def index_of(self, position: Ints, prompt: Ints) -> Ints:
        """Number of the block that holds a response position, from 0."""
        return (position - self.start(prompt)) // self.size

    def filled(self, prompt: Ints, response: Ints) -> Ints:
        """Response length once the last block is filled to its full width."""
        return self.start(prompt) + self._cover(prompt, response) * self.size - prompt

    def blocks(self, prompt: int, response: int) -> list[tuple[int, int]]:
        """[(start, stop)] of every block of a response."""
        indices = range(self.num_blocks(prompt, response))
        return [self.bounds(i, prompt, response) for i in indices]

    def _cover(self, prompt: Ints, response: Ints) -> Ints:
        return (prompt + response - self.start(prompt) + self.size - 1) // self.size


def _max(a: Ints, b: Ints) -> Ints:
    return a + (b - a) * (b > a)


def _min(a: Ints, b: Ints) -> Ints:
    return a + (b - a) * (b < a)
