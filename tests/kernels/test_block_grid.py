"""The block grid against an enumeration of positions, for ints and for tensors."""

import pytest
import torch
from bwsft_kernels.block_grid import BlockGrid
from hypothesis import given, settings
from hypothesis import strategies as st

GRIDS = st.builds(BlockGrid, st.integers(1, 9), st.sampled_from(["response", "absolute"]))
LENGTHS = st.tuples(st.integers(0, 20), st.integers(0, 30))


def enumerated(grid, prompt, response):
    """[(start, stop)] of the blocks: response positions that share a cell of the grid."""
    first = prompt if grid.origin == "response" else 0
    cells = {}
    for position in range(prompt, prompt + response):
        cells.setdefault((position - first) // grid.size, []).append(position)
    return [(cell[0], cell[-1] + 1) for cell in cells.values()]


@settings(max_examples=100, deadline=None)
@given(GRIDS, LENGTHS)
def test_ints(grid, lengths):
    prompt, response = lengths
    blocks = enumerated(grid, prompt, response)
    assert grid.blocks(prompt, response) == blocks
    assert grid.num_blocks(prompt, response) == len(blocks)
    for number, (start, stop) in enumerate(blocks):
        assert grid.bounds(number, prompt, response) == (start, stop)
        assert {grid.index_of(p, prompt) for p in range(start, stop)} == {number}
    if response:
        filled = grid.filled(prompt, response)
        assert enumerated(grid, prompt, filled)[:-1] == blocks[:-1]
        assert len(enumerated(grid, prompt, filled)) == len(blocks)
        assert len(enumerated(grid, prompt, filled + 1)) == len(blocks) + 1
        assert grid.start(prompt) <= prompt < grid.start(prompt) + grid.size
    else:  # nothing of the only index that one may ask for
        assert grid.bounds(0, prompt, 0) == (prompt, prompt)


@settings(max_examples=50, deadline=None)
@given(GRIDS, st.lists(LENGTHS, min_size=1, max_size=5))
def test_tensors_of_shapes_that_broadcast_are_the_ints(grid, lengths):
    prompt, response = torch.tensor(lengths).unbind(1)
    counts = [grid.num_blocks(*pair) for pair in lengths]
    assert grid.num_blocks(prompt, response).tolist() == counts
    index = torch.arange(max(counts) + 1)[:, None]  # [M, 1] against [S]
    start, stop = grid.bounds(index, prompt, response)
    assert start.shape == stop.shape == (len(index), len(lengths))
    for number in range(len(index)):
        expected = [grid.bounds(number, *pair) for pair in lengths]
        assert list(zip(start[number].tolist(), stop[number].tolist(), strict=True)) == expected
    filled = [grid.filled(*pair) for pair in lengths]
    assert grid.filled(prompt, response).tolist() == filled
    # An int among tensors.
    expected = [grid.bounds(1, 3, r) for _, r in lengths]
    start, stop = (torch.as_tensor(t).expand(len(lengths)) for t in grid.bounds(1, 3, response))
    assert list(zip(start.tolist(), stop.tolist(), strict=True)) == expected
    expected = [grid.index_of(p + 4, p) for p, _ in lengths]
    assert grid.index_of(prompt + 4, prompt).tolist() == expected


@pytest.mark.parametrize("arguments, message", [((0,), "block_size"), ((4, "prompt"), "origin")])
def test_bad_grids_say_what_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=message):
        BlockGrid(*arguments)
