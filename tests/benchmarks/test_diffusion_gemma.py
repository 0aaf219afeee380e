"""The goals of DiffusionGemma's one-pass training, on a small model and by formula."""

import diffusion_gemma as d
import pytest
import torch

CANVAS = 16


def test_beyond_the_window_only_one_pass_is_inference():
    ours, example, largest = d.parity(CANVAS, torch.float64)
    assert ours < 1e-5 and example > 1e-3 and largest > 1


def test_what_is_left_is_rounding_that_inference_has_too():
    exact, inference, ours = d.rounding(CANVAS)
    assert exact < 1e-12 and 1e-7 < ours < 2 * inference


@pytest.mark.slow
def test_the_formula_counts_what_a_step_takes():
    counted = d.counted(CANVAS)
    formula = d.by_formula(d.SMALL, CANVAS, d.SMALL["sliding_window"])
    assert counted == pytest.approx(formula, rel=0.1) and counted[1] <= counted[0] / 3


def test_flops_are_a_third_at_most_at_the_published_sizes():
    example, ours = d.by_formula(d.LARGE, 256, 512)
    assert ours <= example / 3
