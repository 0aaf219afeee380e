"""Accuracy under parallelism, by hand."""

import math

import pytest

from bwsft.utils.parallelism import aup


def test_an_equal_accuracy_is_the_plain_area():
    assert aup([(1.0, 80.0), (4.0, 80.0), (2.0, 80.0)]) == pytest.approx(4 * 80)
    assert aup([(1.5, 40.0)]) == pytest.approx(60)


def test_lost_accuracy_weighs_less_and_too_much_nothing():
    worth = 76 * math.exp(-3 * (1 - 76 / 80))
    expected = 80 + 2 * (80 + worth) / 2
    assert aup([(1, 80), (3, 76)]) == pytest.approx(expected)
    assert aup([(1, 80), (3, 76), (9, 74.9)]) == pytest.approx(expected)
    # What is left out does not cut the curve: the next one is joined to the last that counts.
    joined = expected + 2 * (worth + 75 * math.exp(-3 * (1 - 75 / 80))) / 2
    assert aup([(1, 80), (3, 76), (4, 20), (5, 75)]) == pytest.approx(joined)


def test_the_best_of_other_methods_lowers_the_weights():
    alone, beside = (aup([(1, 60), (2, 60)], best) for best in (None, 75))
    assert alone == pytest.approx(120)
    assert beside == pytest.approx(60 + 60 * math.exp(-3 * (1 - 60 / 75)))
    assert aup([(1, 60), (2, 62)], best=60) == pytest.approx(60 + 61)  # a weight is at most 1


def test_of_one_tpf_the_better_counts_and_nothing_right_is_worth_nothing():
    assert aup([(1, 70), (1, 74), (2, 74)]) == pytest.approx(2 * 74)
    assert aup([(1, 0), (2, 0)]) == 0


@pytest.mark.parametrize("points", [[], [(0, 50)], [(1, 101)], [(math.nan, 50)]])
def test_what_is_no_curve_is_refused(points):
    with pytest.raises(ValueError, match="point"):
        aup(points)
