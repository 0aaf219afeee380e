"""The mask benchmark at a toy size: its last line, and a gate that sees a wrong batch."""

import dataclasses
import json

import bench_mask
import pytest
import torch

CPU = torch.device("cpu")


def test_last_line(capsys):
    bench_mask.main("--sequences 2 3 --lengths 64 --block 8 --rounds 2 --no-memory".split())
    out = capsys.readouterr().out
    last = json.loads(out.splitlines()[-1])
    assert set(last) == {"bench", "device", "commit", "variants", "speedup"}
    assert last["bench"] == "mask" and set(last["variants"]) >= {"naive", "block_mask_torch"}
    assert last["speedup"]["naive"] == 1 and out.count("block_mask_torch ") == 2
    if not torch.cuda.is_available():
        assert "block_mask_triton: needs a CUDA device" in out


def test_the_loop_draws_what_its_source_says():
    """A sequence of 3 + 10 in blocks of 4; block 1 is active, half of its tokens marked."""

    class Source:
        def block(self, row, count):
            assert count == 3
            return 1

        def rate(self, row):
            return 0.5

        def mark(self, row, position, rate):
            return position % 2 == 0

    ids = list(range(100, 115))
    problem = bench_mask.Problem([ids], [3], [10], 4)
    (noisy,), (labels,) = bench_mask.collate(problem, Source())
    mask = bench_mask.MASK
    assert noisy == [100, 101, 102, 103, 104, 105, 106, 107, mask, 109, mask, mask, mask, 113, 114]
    assert {i: label for i, label in enumerate(labels) if label != -100} == {8: 108, 10: 110}
    Source.mark = lambda self, row, position, rate: False
    (noisy,), (labels,) = bench_mask.collate(problem, Source())
    assert noisy[7:11] == [107, 108, 109, mask] and labels[10] == 110 and labels.count(-100) == 14


@pytest.mark.parametrize("field", ["noisy_ids", "labels", "count"])
def test_gate_sees_a_wrong_batch(monkeypatch, field):
    problem = bench_mask.make_problem(4, 64, 8)
    spec = bench_mask.MaskSpec(block_size=8, mask_id=bench_mask.MASK)
    assert bench_mask.check(problem, CPU, spec) == ""
    right = bench_mask.block_mask

    def wrong(*args, **options):
        batch = right(*args, **options)
        value = getattr(batch, field).clone()
        value.view(-1)[-1] += 1
        return dataclasses.replace(batch, **{field: value})

    monkeypatch.setattr(bench_mask, "block_mask", wrong)
    assert bench_mask.check(problem, CPU, spec).startswith(f"{field} of block_mask (torch)")
    with pytest.raises(SystemExit, match="nothing was timed"):
        bench_mask.main("--sequences 2 --lengths 64 --block 8 --rounds 1 --no-memory".split())
