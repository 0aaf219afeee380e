"""The goals of DiffusionGemma's one-pass training, on a small model and by formula."""

import diffusion_gemma as d
import pytest

CANVAS = 16


def test_beyond_the_window_only_one_pass_is_inference():
    ours, example, largest = d.parity(CANVAS)
    assert ours < 1e-5 and example > 1e-3 and largest > 1


def test_flops_are_a_third_at_most_as_counted_and_by_formula():
    """The formula leaves out norms' and routers' small change."""
    counted = d.counted(CANVAS)
    formula = d.by_formula(d.SMALL, CANVAS, d.SMALL["sliding_window"])
    assert counted == pytest.approx(formula, rel=0.1)
    for example, ours in (counted, d.by_formula(d.LARGE, 256, 512)):
        assert ours <= example / 3
