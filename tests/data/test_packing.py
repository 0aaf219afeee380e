"""Canvas policies by hand, and the order of visits."""

import numpy as np
import pytest
import torch
from bwsft_kernels.philox import Stream, philox_words

from bwsft.data.packing import CanvasLayout, Example, order, pack, samples, split_holdout

M, E = 99, 7  # [MASK], EOS


def example(prompt, response, sample_id=0, visit=0):
    arrays = (np.array(tokens, dtype=np.int32) for tokens in (prompt, response))
    return Example(*arrays, sample_id, visit)


def row(prompt, response, **options):
    """(ids, response length) of one packed example."""
    defaults = {"block_size": 4, "gen_length": 8, "max_length": 12, "mask_id": M, "eos_id": E}
    batch = pack([example(prompt, response)], CanvasLayout(**(defaults | options)))
    assert batch.prompt_lengths.tolist() == [len(prompt)]
    return batch.ids.tolist(), batch.response_lengths.item()


@pytest.mark.parametrize(("response", "ids", "length"), [
    ([4], [1, 2, 3, 4, E, E, E, M, M, M, M], 4),
    ([4, 4, 4, 4], [1, 2, 3, 4, 4, 4, 4, M, M, M, M], 4),
    ([4] * 5, [1, 2, 3, 4, 4, 4, 4, 4, E, E, E], 8),
    ([4] * 8, [1, 2, 3] + [4] * 8, 8),
    ([4] * 9, [1, 2, 3] + [4] * 9 + [E, E, E], 12),  # extends its own canvas
])
def test_fixed_canvas(response, ids, length):
    assert row([1, 2, 3], response) == (ids, length)


@pytest.mark.parametrize(("response", "ids", "length"), [
    # Blocks of 4 from position 0: the response's first block is position 3 alone.
    # The last one holds position 10, the last of 3 + 8, and is whole.
    ([4], [1, 2, 3, 4] + [M] * 8, 1),
    ([4, 4], [1, 2, 3, 4, 4, E, E, E] + [M] * 4, 5),
    ([4] * 9, [1, 2, 3] + [4] * 9, 9),
    ([4] * 10, [1, 2, 3] + [4] * 10 + [E, E, E], 13),
])
def test_absolute_grid(response, ids, length):
    assert row([1, 2, 3], response, block_origin="absolute") == (ids, length)


def test_response_canvas_ends_with_the_response():
    assert row([1, 2, 3], [4, 4], canvas="response") == ([1, 2, 3, 4, 4], 2)


def test_padded_canvas_shows_its_pads():
    assert row([1, 2, 3], [4, 4], canvas="padded") == ([1, 2, 3, 4, 4] + [E] * 7, 2)
    assert row([1, 2, 3], [4] * 9, canvas="padded") == ([1, 2, 3] + [4] * 9, 9)
    with pytest.raises(ValueError, match="13 tokens exceeds max_length 12"):
        row([1, 2, 3], [4] * 10, canvas="padded")


@pytest.mark.parametrize(("options", "complaint"), [
    ({"canvas": "tight"}, "unknown canvas 'tight'; known are fixed"),
    ({"block_size": 3}, "block_size 3 doesn't divide gen_length 8"),
    ({"block_size": 0}, "at least 1"),
    ({"block_origin": "left"}, "block_origin must be one of .*, not 'left'"),
])
def test_layout_complaints(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        row([1], [4], **options)


def test_pack_many_rows():
    examples = [example([1], [4, 5], 12, 1), example([1, 2], [4, 5, 6, 7, 8], 2**40, 3)]
    layout = CanvasLayout(mask_id=M, eos_id=E, block_size=2, gen_length=4)
    batch = pack(examples, layout)
    assert batch.ids.tolist() == [1, 4, 5, M, M, 1, 2, 4, 5, 6, 7, 8, E]
    assert batch.cu_seqlens.tolist() == [0, 5, 13]
    assert batch.position_ids.tolist() == [*range(5), *range(8)]
    assert batch.prompt_lengths.tolist() == [1, 2]
    assert batch.response_lengths.tolist() == [2, 6]
    assert batch.sample_ids.tolist() == [12, 2**40]
    assert batch.visits.tolist() == [1, 3]
    assert (batch.num_sequences, batch.max_length) == (2, 8)
    assert batch.cu_seqlens.dtype == torch.int32
    for name in ("ids", "position_ids", "prompt_lengths", "response_lengths", "sample_ids"):
        assert getattr(batch, name).dtype == torch.int64
    moved = batch.to("meta")
    assert moved.ids.device.type == moved.visits.device.type == "meta"
    assert moved.max_length == 8
    with pytest.raises(ValueError, match="without examples"):
        pack([], layout)


def test_order_is_a_pure_permutation():
    first = order(1000, 0, seed=5)
    assert sorted(first) == list(range(1000))
    order.cache_clear()
    assert (order(1000, 0, seed=5) == first).all()
    for other in (order(1000, 1, seed=5), order(1000, 0, seed=6)):
        assert sorted(other) == list(range(1000))
        assert (other == first).mean() < 0.02  # expected 1 fixed point in 1000
    assert not first.flags.writeable
    # Pinned: a change would reorder every resumed run.
    assert order(8, 3, seed=2**40 + 1).tolist() == PINNED


PINNED = [4, 6, 3, 0, 7, 2, 1, 5]


def test_order_sorts_philox_words():
    seed, epoch = 2**33 + 5, 3
    counters = torch.tensor([[0, epoch, i, Stream.ORDER << 24] for i in range(50)])
    words = philox_words(counters.unbind(-1), (seed & 0xFFFFFFFF, seed >> 32))[0].tolist()
    assert order(50, epoch, seed).tolist() == sorted(range(50), key=lambda i: (words[i], i))


def test_samples_run_through_epochs_without_a_gap():
    stream = [sample for step in range(5) for sample in samples(step, 4, 10, seed=1)]
    assert stream[:10] == [(int(i), 0) for i in order(10, 0, 1)]
    assert stream[10:] == [(int(i), 1) for i in order(10, 1, 1)]


def test_a_set_smaller_than_the_batch_comes_round():
    batch = samples(1, 7, 3, seed=1)  # samples 7 to 13 of epochs of 3
    assert [visit for _, visit in batch] == [2, 2, 3, 3, 3, 4, 4]
    assert sorted(index for index, visit in batch if visit == 3) == [0, 1, 2]
    with pytest.raises(ValueError, match="no examples"):
        samples(0, 4, 0, seed=1)


def test_split_holdout():
    each = np.arange(100) * 7
    train, held = split_holdout(each, 20, seed=3)
    assert (len(train), len(held)) == (80, 20)
    assert sorted([*train, *held]) == list(range(100))
    assert (np.diff(train) > 0).all() and (np.diff(held) > 0).all()
    assert (split_holdout(each, 20, seed=4)[1] != held).any()
    assert [len(part) for part in split_holdout(each[:5], 0, seed=3)] == [5, 0]
    # Not simply the head of the first epoch.
    assert set(held.tolist()) != set(order(100, 0, 3)[:20].tolist())
    for holdout in (100, -1):
        with pytest.raises(ValueError, match="can't hold out"):
            split_holdout(each, holdout, seed=3)


def test_turns_of_a_record_are_held_out_together():
    owner = np.repeat(np.arange(30), np.arange(30) % 4 + 1)
    for holdout in range(0, 40, 3):
        train, held = split_holdout(owner, holdout, seed=5)
        assert not set(owner[train]) & set(owner[held])
        assert holdout <= len(held) < holdout + 4
        assert len(train) + len(held) == len(owner)
