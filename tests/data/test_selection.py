"""Examples that fit, looked through by pieces: as if all were in memory, and mapped."""

import tracemalloc

import numpy as np
import pytest

from bwsft.data import selection, token_cache
from bwsft.data.examples import DataOptions
from bwsft.data.packing import CanvasLayout
from bwsft.data.selection import Lengths, Selection, lengths_of

LAYOUT = CanvasLayout(mask_id=1, eos_id=0, block_size=4, gen_length=8, max_length=32)


@pytest.fixture
def arrays(tmp_path):
    """Mapped columns of 1,000 examples."""
    rng = np.random.default_rng(0)
    prompts, responses = rng.integers(1, 20, (2, 1000))
    tokens = np.zeros(int((prompts + responses).sum()), np.int32)
    columns = (tokens, prompts, responses, np.arange(1000) * 3)
    folder = tmp_path / "shard"
    dtypes = token_cache.COLUMNS.values()
    part = [column.astype(dtype) for column, dtype in zip(columns, dtypes, strict=True)]
    token_cache.save_shard(folder, [part], dict)
    token_cache.save(tmp_path / "set.safetensors", [folder], {})
    return token_cache.load(tmp_path / "set.safetensors")[0]


def test_quantiles_are_those_of_numpy():
    rng = np.random.default_rng(1)
    for count in (1, 2, 10, 99, 1000):
        values = rng.integers(0, 50, count)
        lengths = Lengths()
        for part in np.array_split(values, 3):
            lengths.add(part)
        for share in (0.0, 0.1, 0.5, 0.9, 0.99, 1.0):
            expected = np.quantile(values, share, method="inverted_cdf")
            assert lengths.quantile(share) == expected
            expected = np.quantile(70 - values, share, method="inverted_cdf")
            assert lengths.quantile(share, below=70) == expected
        assert lengths.above(25) == (values > 25).sum() and len(lengths) == count


@pytest.mark.parametrize("rows", [7, 1 << 20])
def test_pieces_select_as_the_whole(arrays, tmp_path, monkeypatch, rows):
    monkeypatch.setattr(selection, "ROWS", rows)
    options = DataOptions(max_length=30, layout=LAYOUT, max_positions=26)
    prompts, responses = (np.array(arrays[f"{part}_lengths"]) for part in ("prompt", "response"))
    totals = prompts + responses
    canvases = np.array([LAYOUT.lengths(*pair)[1] for pair in zip(prompts, responses, strict=True)])
    long, wide = totals > 30, (totals <= 30) & (canvases > 26)
    keep = ~long & ~wide
    assert long.any() and wide.any()
    starts = np.cumsum(totals) - totals
    for folder in (tmp_path, None):
        found = Selection(arrays, options)
        columns = found.columns(folder)
        expected = starts, prompts, responses, arrays["sample_ids"]
        for column, whole in zip(columns, expected, strict=True):
            assert isinstance(column, np.memmap) == (folder is not None)
            assert column.tolist() == whole[keep].tolist()
        ids = arrays["sample_ids"]
        assert list(found.dropped.values()) == [
            (long.sum(), ids[long][0]), (wide.sum(), ids[wide][0])
        ]  # fmt: skip
        assert found.both.quantiles()["max"] == totals[keep].max()
    assert {path.name for path in tmp_path.iterdir()} == {"shard", "set.safetensors"}
    both = lengths_of(arrays["prompt_lengths"][:99], arrays["response_lengths"][:99])[2]
    assert both.quantile(1.0) == totals[:99].max() and len(both) == 99


def test_where_nothing_can_be_written_it_is_held(arrays, tmp_path):
    expected = Selection(arrays, DataOptions(max_length=30)).columns(None)
    found = Selection(arrays, DataOptions(max_length=30)).columns(tmp_path / "not there")
    assert all(map(np.array_equal, found, expected))


def test_memory_does_not_grow_with_the_examples(arrays, tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "ROWS", 4096)
    peaks = []
    for repeats in (20, 200):
        many = {name: np.tile(column, repeats) for name, column in arrays.items()}
        tracemalloc.start()
        assert len(Selection(many, DataOptions(max_length=30)).columns(tmp_path)[0]) > 500 * repeats
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0]
