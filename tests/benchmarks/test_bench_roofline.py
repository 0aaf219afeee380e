"""The roofline page is what its code computes, and the code what a hand computes."""

from pathlib import Path

import pytest
import roofline

PAGE = Path(roofline.__file__).parent / "results/roofline.md"
A100 = roofline.RATES[0]


def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == roofline.page(), "rerun benchmarks/roofline.py"


def test_numbers_by_hand():
    """N 512 on an A100 at 250 TFLOP/s and 1.75 TB/s, in ms: a product is 2.1217, a byte for each
    logit 0.0370; 64 rows wait 0.5920 for the head."""
    found = {mode: roofline.times_s(A100, 512, mode) for mode in ("frozen", "trainable", "no-grad")}
    product, byte = 2.12174, 0.037000
    expected = {
        "frozen": [2 * product + 36 * byte, 3 * product, 2 * product + 10 * byte,
                   2 * product + (4 + 12 / 128) * byte],
        "trainable": [3 * product + 36 * byte, 4 * product, 3 * product + 10 * byte,
                      3 * product + (4 + 12 / 128) * byte],
        "no-grad": [product + 14 * byte, product, product + 4 * byte, product],
    }
    for mode, times in found.items():
        _, *others = (1e3 * seconds for seconds in times.values())
        assert others == pytest.approx(expected[mode], rel=1e-4)
    assert 1e3 * roofline.cce_s(A100, 64, "no-grad") == pytest.approx(0.5920, rel=1e-3)


def test_chunks_read_the_head_again():
    """fp32 logits of 2,048 rows are two chunks; a trainable head's gradient is then added up."""
    parts = [roofline.ours_s(A100, 2048, mode, "cublas") for mode in ("frozen", "trainable")]
    assert parts[0] == pytest.approx(2 * roofline.ours_s(A100, 1024, "frozen", "cublas"))
    wide = roofline.Rates("all bytes", 1e30, 1.0)
    halves, whole = roofline.head_gradient_s(wide, 8, 2), roofline.head_gradient_s(wide, 8, 1)
    # 4 written; 4 read and 4 written; 4 read and 2 written: 18 bytes a weight, where one needs 2.
    assert halves - whole == 16 * roofline.V * roofline.D
