"""Answers found and compared: every rung by hand-written cases, the number format by hypothesis."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinning import thinned

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


@pytest.mark.parametrize("text, expected, ended", [
    ("18<|eot_id|><|endoftext|>", "18", True),
    ("18", "18", False),
    ("<|startoftext|>18<|im_end|>junk 19", "18", True),
    ("", "", False),
    ("a</s>b", "a", True),
    ("x <|eot|> y", "x  y", False),
    ("7<|start_header_id|>user<|end_header_id|>8", "7", False),
    ("<|start_header_id|>assistant<|end_header_id|>7<|eom_id|>", "assistant7", True),
    ("7 [INST] 8 [/INST]</s>", "7 ", False),
    ("4<|mdm_mask|><|mdm_mask|>2 and <mask>", "4[MASK]2 and [MASK]", False),
    ("4<|reserved_7|>2", "4[MASK]2", False),  # gone without a trace, it would glue two digits
])
def test_text_is_cut_at_the_first_end_token(text, expected, ended):
    assert split_end(text) == (expected, ended)


@pytest.mark.parametrize("first, second, equal", [
    ("18", "18.0", True),
    ("$18", "18 dollars", True),
    ("18.", "18", True),
    ("4 thousand", "4000", True),
    ("7 \\times 10^4", "70,000", True),
    ("7 \\times 10^4", "7", False),
    ("6[MASK]2", "62", False),
    ("6[MASK]2", "6", False),
    ("2 or 3", "2", False),
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
    ("The answer is: **21**!", "21", "statement"),
    ("The answer is： ４２", "42", "statement"),
    ("The answer is: 4 to 6", "4 to 6", "statement"),
    ("The answer is: 2 hours and 40 minutes", "2 hours and 40 minutes", "statement"),
    ("2 * 7 = 14\nThe answer is: 1[MASK]4", "1[MASK]4", "statement"),
    ("\\boxed{14[MASK]}", "14", "boxed"),
    ("\\boxed{[MASK]}\nThe answer is 14.", "14", "prose"),
    ("7 * 2 = 1[MASK]4", None, "none"),
    ("\\boxed{30} or \\boxed{31}", "30, 31", "boxed"),
    ("#### 52\n\nQuestion: Kim has 2 pens and buys 6.\nAnswer: 2 + 6 = 8\n#### 8", "52", "hashes"),
    ("#### 52Q: Kim has 2 pens.\nA: 2\n#### 2", "52", "hashes"),
    ("#### 52\nKim has 2 pens and buys 6. How many is that?\n#### 8", "52", "hashes"),
    ("####52 dollars for 2 people", "52", "hashes"),
    ("####\n52", "52", "hashes"),
    ("#### 1. Are there many?\nWhat is 2 + 3?\n#### 5", "5", "hashes"),
    ("so 52.\n### Instruction:\nAdd 3 and 4\n### Response:\n#### 7", "52", "last_number"),
    ("so 52.\nUser: thanks, and 3 + 4?\nAssistant: The answer is: 7", "52", "last_number"),
    ("Problem: Kim has 2 pens and buys 6.\nAnswer: 2 + 6 = 8", "8", "answer_line"),
    ("<think>The answer is: 3, no</think>It is 9.", "9", "last_number"),
    ("<thinking>one</thinking>9<thinking>the answer is: 8", "9", "last_number"),
    ("<think>The answer is: 3", None, "none"),
    ("7 * 6 = 42\nAnswer: 42\nThat took 5 minutes.", "42", "answer_line"),
    ("**Answer:** 42 km in 3 hours", "42", "answer_line"),
    ("ANSWER - 42\n(7 days)", "42", "answer_line"),
    ("Final answer: Kim walks 42 km.\nIt took 5 days.", "42", "answer_line"),
    ("So:\nAnswer (in km): 7 * 6 = 42\nThat took 5 minutes.", "42", "answer_line"),
    ("Answer: 7 * 5 = 35\n35 + 7 = 42", "42", "last_number"),
    ("Answer: Kim walks 7 km for 6 days.\nSo 42.", "42", "last_number"),
    ("### Final Answer\n\n42 km\nThat took 5 minutes.", "42", "display"),
    ("The answer is:\n\\[\n7 \\times 6 = 42\n\\]\nfor 5 days", "42", "display"),
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
    ("\\boxed{1}. Better: \\boxed{\\frac{\\sqrt{3}}{2}}", "\\frac{\\sqrt{3}}{2}", "boxed"),
    ("$y = \\boxed{2}$ or $y = \\boxed{-6}$.", "2, -6", "boxed"),
    ("\\boxed{2}, \\boxed{4}, \\text{ and } \\boxed{8}", "2, 4, 8", "boxed"),
    ("\\boxed{0.25}, or \\boxed{\\frac14}", "\\frac14", "boxed"),
    ("\\boxed{60}: see below.\n\n**Final Answer**\n\\boxed{60}", "60", "boxed"),
    ("<think>or \\boxed{4}?</think>Yes, \\boxed{9}", "9", "boxed"),
    ("<think>\\boxed{4}</think>", None, "none"),
    ("\\boxed{9}\n\n## Problem 2\nFind it: \\boxed{4}", "9", "boxed"),
    ("**Answer:** $\\sqrt{7}$", "\\sqrt{7}", "answer_line"),
    ("Final Answer: The final answer is $\\sqrt{7}$. I hope it is correct.", "\\sqrt{7}",
     "answer_line"),
    ("Answer: We first find the roots. So the answer is $8$.", "8", "answer_line"),
    ("Answer: We first find the roots of it.\nSo the answer is $8$.", "8", "prose"),
    ("Thus the final answer is\n$$\nx + 1\n$$\nas claimed", "x + 1", "display"),
    ("The answer is given by\n\\[6\\]", "6", "display"),
    ("The answer is 12 cm.", "12 cm", "prose"),
    ("the answer is **12**, as 3 * 4 = 12", "12", "prose"),
    ("\\boxed{\\left\\{ x \\right\\}} and more}", "\\left\\{ x \\right\\}", "boxed"),
    ("\\boxed{5} then \\boxed{...}", "5", "boxed"),
    ("\\boxed{\\text{(C)}}", "\\text{(C)}", "boxed"),
    ("\\fbox{3}", "3", "boxed"),
    ("\\boxed{.125}.", ".125", "boxed"),
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


@pytest.mark.parametrize("unit", thinned(["\\boxed{", "#", "answer is:", "1,25,", "[MASK]1"]))
def test_no_output_takes_more_than_linear_time(unit):
    # A quadratic rule needs more than the time that a test may take.
    text = unit * (200_000 // len(unit))
    for extract in (extract_gsm8k, extract_math):
        assert extract(split_end(text)[0]).rung in scoring.RUNGS
