"""Answers found and compared: every rung by hand-written cases, the number format by hypothesis."""

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bwsft.evaluation import answers as scoring
from bwsft.evaluation.answer_scope import boxed_contents
from bwsft.evaluation.answers import (
    extract_gsm8k,
    extract_math,
    numbers_equal,
    split_end,
    strict_gsm8k,
    strict_math,
)
from bwsft.evaluation.numerals import format_number, numbers_in, single_number


@pytest.mark.parametrize("text, expected, ended", [
    ("18<|eot_id|><|endoftext|>", "18", True),
    ("18", "18", False),
    ("<|startoftext|>18<|im_end|>junk 19", "18", True),
    ("", "", False),
    ("a</s>b", "a", True),
    ("x <|eot|> y", "x  y", False),
])
def test_text_is_cut_at_the_first_end_token(text, expected, ended):
    assert split_end(text) == (expected, ended)


@pytest.mark.parametrize("text, expected", [
    ("Tom, who had 3, bought 4,000 more, i.e. 4,003.", ["3", "4000", "4003"]),
    ("1,234.50", ["1234.5"]),
    ("12,345,678", ["12345678"]),
    ("3,45 and 1,2,3", ["3", "45", "1", "2", "3"]),
    ("16-3 = 13, 16 - 3 and (16)-3", ["16", "3", "13", "16", "3", "16", "3"]),
    ("it fell to -3 and (-4) = -5", ["-3", "-4", "-5"]),
    ("\u22127 degrees", ["-7"]),
    ("-$10, $-10, \\$18.", ["-10", "-10", "18"]),
    ("3/4 or 1 1/2 or 1\\frac{1}{2} or \\dfrac{3}{4} or -\\frac12", ["0.75", "1.5", "1.5", "0.75",
                                                                     "-0.5"]),
    ("3\u00bd cups", ["3.5"]),
    ("1{,}234 and 385\\,000 and 1,\\!080", ["1234", "385000", "1080"]),
    ("7/0 stays 7 and 0", ["7", "0", "7", "0"]),
    (".5 and 0.5. and 0{.}25", ["0.5", "0.5", "0.25"]),
    ("60\\% or 60%", ["60", "60"]),
    ("none, no numbers at all", []),
])
def test_numbers_of_a_text(text, expected):
    assert [format_number(value) for value in numbers_in(text)] == expected


@pytest.mark.parametrize("fragment, expected", [
    ("120\\text{ minutes}", 120),
    ("7,000{ feet}", 7000),
    ("x = 5", 5),
    ("3 + 4 = 7", 7),
    ("2:00 pm", 2),
    ("2:30 pm", None),
    ("4, 6", None),
    ("48 - 10 + 48 - 6", None),
    ("5 hours and 30 minutes", None),
    ("10^6", None),
    ("2^n", None),
    ("x^2", None),
    ("5\\pi", None),
    ("3\\sqrt{x}", None),
    ("72 \\text{ cm}^2", 72),
    ("45 m^{3}", 45),
    ("30^\\circ", 30),
    ("...", None),
    ("", None),
])
def test_a_fragment_states_one_number_or_none(fragment, expected):
    assert single_number(fragment) == expected


@pytest.mark.parametrize("first, second, equal", [
    ("18", "18.0", True),
    ("$18", "18 dollars", True),
    ("18.", "18", True),
    ("60%", "60", True),
    ("1,000", "1000", True),
    ("0.1", "1/10", True),
    ("0.30000000000000004", "0.3", False),  # equal to 0.1 + 0.2 as floats only
    ("12345678901234567890", "12345678901234567891", False),  # equal as floats
    ("0.33", "1/3", False),
    ("-18", "18", False),
    (None, "18", False),
    ("18", None, False),
    ("", "", False),
])
def test_numbers_are_equal_as_exact_values(first, second, equal):
    assert numbers_equal(first, second) is equal


@pytest.mark.parametrize("text, answer, rung", [
    ("6 * 3 = 18\n#### 18\nThe answer is: 18", "18", "statement"),
    ("The answer is: $1,234.50.", "1234.5", "statement"),
    ("\\boxed{7}. The answer is: 8", "8", "statement"),
    ("The answer is: 5. Wait.\nThe answer is: 6", "6", "statement"),
    ("The answer is: 9 + 9 = 18 eggs for 2 people", "18", "statement"),
    ("the final answer is: \\(\\boxed{-3}\\)", "-3", "statement"),
    ("The answer is:\n\\boxed{4}", "4", "boxed"),
    ("\\boxed{18}", "18", "boxed"),
    ("first \\boxed{3}, then \\boxed{4}", "4", "boxed"),
    ("so boxed{27} it is, not 28", "27", "boxed"),
    ("will be \\boxed{13} years old in 3 years.", "13", "boxed"),
    ("\\boxed{\\text{about } \\frac{3}{4} \\text{ of it}}", "0.75", "boxed"),
    ("\\boxed{20\nand 30 more", "20", "boxed"),
    ("\\boxed 18 of 20", "18", "boxed"),
    ("\\boxed{4, 6}", "4, 6", "boxed"),
    ("10 in total.\n\\boxed{...}", "10", "last_number"),
    ("she boxed 12 cookies and kept 3", "3", "last_number"),
    ("It is 5. \\boxed{5} or \\boxed{x}", "5", "boxed"),
    ("#### 1,600", "1600", "hashes"),
    ("#### $-4 #### no number", "-4", "hashes"),
    ("#### Step 1: count\nThere are 9", "9", "last_number"),
    ("#### 3. Count\nThere are 9", "9", "last_number"),
    ("200 of 300\n<answer>\n130 dollars\n</answer> 7", "130", "tag"),
    ("<answer>\n\\boxed{}101\n</answer>", "101", "tag"),
    ("<answer>3</answer> no, <answer>4", "4", "tag"),
    ("So the answer is 5 days, which is 2 less", "5", "prose"),
    ("the answer is **$18**, from 20", "18", "prose"),
    ("the answer is the sum of 5 and 6, so 11.", "11", "last_number"),
    ("16 - 3 - 4 = 9, and 9 * 2 = 18.", "18", "last_number"),
    ("no idea", None, "none"),
    ("", None, "none"),
    ("\\boxed{", None, "none"),
])
def test_gsm8k_ladder(text, answer, rung):
    assert extract_gsm8k(text) == (answer, rung)


@pytest.mark.parametrize("text, answer, rung", [
    ("The answer is: \\frac{1}{2}.", "\\frac{1}{2}", "statement"),
    ("\\boxed{1}\nThe answer is: $x^2$", "x^2", "statement"),
    ("The answer is: \\boxed{\\{1, 2\\}}", "\\{1, 2\\}", "statement"),
    ("The answer is: 3.5", "3.5", "statement"),
    ("The answer is: .\n\\boxed{2}", "2", "boxed"),
    ("\\boxed{1}, \\boxed{\\frac{\\sqrt{3}}{2}}", "\\frac{\\sqrt{3}}{2}", "boxed"),
    ("\\boxed{\\left\\{ x \\right\\}} and more}", "\\left\\{ x \\right\\}", "boxed"),
    ("\\boxed{5} then \\boxed{...}", "5", "boxed"),
    ("\\boxed{\\text{(C)}}", "\\text{(C)}", "boxed"),
    ("\\fbox{3}", "3", "boxed"),
    ("\\boxed{(2, \\infty)\n</answer>", "(2, \\infty)", "boxed"),
    ("<answer>\n\\[ \\frac{1}{4} \\]\n</answer>", "\\frac{1}{4}", "tag"),
    ("<answer>\n\\boxed{...}\n</answer>", None, "none"),
    ("The final answer is $\\frac{2}{3}$. I hope it is correct.", "\\frac{2}{3}", "prose"),
    ("the answer is obvious", None, "none"),
    ("7", None, "none"),
    ("", None, "none"),
])
def test_math_ladder(text, answer, rung):
    assert extract_math(text) == (answer, rung)


def test_boxes_keep_nested_and_escaped_braces():
    text = "\\boxed{a{b{c}}d} \\boxed{\\{} \\boxed{\\\\{x}} \\boxed{open"
    assert boxed_contents(text) == ["a{b{c}}d", "\\{", "\\\\{x}", "open"]


@pytest.mark.parametrize("text, task, answer", [
    ("work\n#### 2,125", "gsm8k", "2,125"),
    ("#### 72\nThe answer is: 72", "gsm8k", "72"),
    ("7.50", "gsm8k", "7.50"),
    ("so $\\boxed{\\frac{1}{2}}$ holds", "math", "\\frac{1}{2}"),
    ("work\nThe answer is: x+1", "math", "x+1"),
    ("\\left( 3, \\frac{\\pi}{2} \\right)", "math", "\\left( 3, \\frac{\\pi}{2} \\right)"),
])
def test_reference_of_a_worked_solution(text, task, answer):
    assert scoring.reference_answer(text, task) == answer


@pytest.mark.parametrize("text, reference, correct", [
    ("\\boxed{18}", "18", True),
    ("\\boxed{18.00}", "18", False),
    ("\\boxed{13} years old in 3 years", "13", False),
    ("$1,600 it is", "1600", True),
    ("1600", "1,600", True),
    ("it costs 18.", "18", True),
    ("-3", "3", False),
    ("none", "0", False),
])
def test_strict_gsm8k_is_the_last_number_as_a_string(text, reference, correct):
    assert strict_gsm8k(text, reference) is correct


def test_strict_math_is_the_whole_output():
    assert strict_math(" \\frac12\n", "\\frac12")
    assert not strict_math("\\boxed{\\frac12}", "\\frac12")
    assert not strict_math("0.5", "\\frac12")


rationals = st.fractions(min_value=-10**9, max_value=10**9, max_denominator=10**6)


@settings(deadline=None)
@given(rationals)
def test_a_formatted_number_reads_back(value):
    assert single_number(format_number(value)) == value
    assert extract_gsm8k(f"so \\boxed{{{format_number(value)}}} it is") == (
        format_number(value), "boxed")


@settings(deadline=None)
@given(st.decimals(min_value=-10**12, max_value=10**12, places=3, allow_nan=False))
def test_thousands_separators_change_nothing(value):
    assert numbers_in(f"about {value:,f} in all") == [Fraction(value)]


@settings(deadline=None)
@given(st.text(alphabet="0123456789 .,-+$%/={}\\abcdefrx#:<>\n", max_size=80))
def test_extraction_never_fails_and_settles(text):
    for answer, rung in (extract_gsm8k(text), extract_math(text)):
        assert (answer is None) == (rung == "none")
        assert rung in scoring.RUNGS
        assert answer is None or answer.strip()


@pytest.mark.parametrize("rate, count, low, high", [
    # Closed forms: at 0 the upper end is z^2 / (n + z^2); at 1/2 the interval is symmetric.
    (0.0, 10, 0.0, 1.959964**2 / (10 + 1.959964**2)),
    (1.0, 10, 10 / (10 + 1.959964**2), 1.0),
    (0.5, 100, 0.5 - 1.959964 / (2 * math.sqrt(100 + 1.959964**2)),
     0.5 + 1.959964 / (2 * math.sqrt(100 + 1.959964**2))),
])
def test_wilson_interval(rate, count, low, high):
    assert scoring.wilson(rate, count) == pytest.approx((low, high), abs=1e-12)


def test_wilson_needs_a_question():
    with pytest.raises(ValueError, match="at least one"):
        scoring.wilson(0.5, 0)
