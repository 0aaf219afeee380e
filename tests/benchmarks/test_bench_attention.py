"""The attention page is what its code computes; tiles hold allowed pairs; the benchmark's gate."""

import json
from pathlib import Path

import attention_roofline as roofline
import bench_attention as bench
import pytest
import range_cases as cases
import torch
from bwsft_kernels import range_plan
from hypothesis import given, settings
from hypothesis import strategies as st

PAGE = Path(roofline.__file__).parent / "results/attention.md"
TINY = "--heads 2 --key-heads 1 --width 8 --prompt 6 --response 8 --block 4 --rounds 1 --no-memory"


def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == roofline.page(), "rerun attention_roofline.py"


def test_pairs_by_hand():
    """P + R = 128 + 128 in blocks of 32: P^2 + 2 sum b (P + b i), i = 1..4; rows fill 3 blocks."""
    layout = roofline.Layout((128,), (128,), 1)
    plan = layout.plan()
    blocks = sum(32 * (128 + 32 * i) for i in (1, 2, 3, 4))
    assert roofline.allowed_pairs(plan) == 128**2 + 2 * blocks
    assert layout.dense == 384**2
    # Blocks of 128: the prompt sees itself, the response 256, its copy 256 and its own block.
    assert roofline.flex_pairs(plan) == (1 + 2 + 2 + 1) * 128**2
    # 128 x 64 on an H100: 2 tiles, then 4, then 96 tokens of the prefix beyond 128, and 128 own.
    assert roofline.issued_pairs(plan, "fwd", 90) == (2 + 4 + 4 + 2) * 128 * 64


@settings(max_examples=40, deadline=None)
@given(layout=cases.layouts(longest=90), rows=st.sampled_from([16, 32, 64, 128]),
       cols=st.sampled_from([8, 32, 64]), of_keys=st.booleans())
def test_tiles_hold_allowed_pairs_and_all_of_them(layout, rows, cols, of_keys):
    """Issued tiles: at most 1.15 times those that hold an allowed pair, as the goal says."""
    plan, own = range_plan(**layout)
    seen = cases.visible(own, **layout)
    if of_keys:
        seen = seen.t()
    ranges, tiles = ((plan.key_ranges, plan.key_tiles) if of_keys
                     else (plan.query_ranges, plan.query_tiles))
    left, issued, holding = seen.clone(), 0, 0
    for begin, end, low, high in roofline.intervals(ranges, tiles, rows).tolist():
        for start in range(low, high, cols):
            tile = slice(begin, end), slice(start, min(start + cols, high))
            issued += 1
            holding += bool(seen[tile].any())
            left[tile] = False
    assert not left.any()
    assert issued <= 1.15 * holding


def test_last_line(capsys):
    bench.main(TINY.split())
    out = capsys.readouterr().out
    last = json.loads(out.splitlines()[-1])
    assert last["bench"] == "attention" and last["speedup"]["naive"] == 1
    assert set(last["variants"]) == {"naive", "range", "flex"}
    flops = {name: found["flops"] for name, found in last["variants"].items()}
    assert flops["naive"] == 14 * 2 * 8 * (6 + 3 * 8) ** 2 > flops["range"]
    bench.main([*TINY.split(), "--count-only"])
    counted = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {n: v["flops"] for n, v in counted["variants"].items()} == flops


def test_the_gate_sees_wrong_numbers(monkeypatch):
    args = bench.parse(TINY.split())
    plan = bench.make_plan(args)
    assert bench.check(plan, args) == ""
    right = bench.range_attention
    monkeypatch.setattr(bench, "range_attention", lambda q, *rest: right(q * 1.001, *rest))
    assert "is off by" in bench.check(plan, args)


def test_flex_sees_the_same_pairs():
    args = bench.parse(TINY.split())
    plan = bench.make_plan(args)
    rows = torch.arange(plan.query_ranges.size(1))
    seen = bench.visible(plan, rows[:, None], rows)
    assert torch.equal(seen, cases.mask_of(plan.query_ranges, len(rows)))


@pytest.mark.parametrize("arch", roofline.CARDS)
def test_the_goal_of_tiles_on_the_page(arch):
    """Where sequences fill tiles, little more than the allowed pairs is multiplied."""
    long = roofline.LAYOUTS[-1].plan()
    for kernel in ("fwd", "dq", "dkv"):
        assert roofline.issued_pairs(long, kernel, arch) <= 1.15 * roofline.allowed_pairs(long)
