"""How numbers are written: every convention by hand-written cases, the rest by hypothesis."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bwsft.evaluation.answers import extract_gsm8k
from bwsft.evaluation.numerals import format_number, numbers_in, single_number, whole_number


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
    ("7,50,000 or 1,23,45,678", ["750000", "12345678"]),
    ("45\u202f600 45\u00a0600 45\u2009600 45 600.5", ["45600", "45600", "45600", "45600.5"]),
    ("45'600 45\u2019600 45_600", ["45600", "45600", "45600"]),
    ("9.876.543 but 9.876; 9.876,54", ["9876543", "9.876", "9876.54"]),
    ("7{,}50{,}000", ["750000"]),
    ("3 125/250", ["3.5"]),
    ("= - 4, is \u2212 4, 9 - 4, x - 4", ["-4", "-4", "9", "4", "4"]),
    ("6.5e3, 6.5E-1, 6e", ["6500", "0.65", "6"]),
    ("6 \\times 10^{3}, 6 \\cdot 10^3, 6 x 10^3, 6\u00d710\u00b3, 6*10**3", ["6000"] * 5),
    ("10^4 and 10^{-1}", ["10000", "0.1"]),
    ("4 million, 2.5 hundred thousand, 1/4 billion", ["4000000", "250000", "250000000"]),
    ("\u20ac 4k, $1.5M, 4k", ["4000", "1500000", "4"]),
    ("2 hundred-dollar notes", ["2"]),
    ("\uff14\uff12, \u0664\u0662, \u096a\u0968, \u0661\u066c\u0662\u0663\u0664\u066b\u0665",
     ["42", "42", "42", "1234.5"]),
    ("4[MASK]2 4[MASK] 2 4,[MASK]00, [MASK]7 8[MASK]", ["7", "8"]),
    ("9" * 5000, []),  # more digits than Python reads
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
    ("10^6", 10**6),
    ("4 \\text{ million}", 4 * 10**6),
    ("4[MASK]2", None),
    ("\\mathbf{12}", 12),
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


@pytest.mark.parametrize("text, value", [
    ("-3\\tfrac{1}{4}", Fraction(-13, 4)),
    ("7 2/5", Fraction(37, 5)),
    ("0.4\\overline{6}", Fraction(7, 15)),
    ("-1.\\overline{36}", Fraction(-15, 11)),
    ("3 cm", None),
    ("3x", None),
    ("3, 4", None),
    ("2^5", None),
])
def test_a_whole_text_is_one_number(text, value):
    assert whole_number(text) == value


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
    for separator in ",_' \u202f":
        text = f"{value:,f}".replace(",", separator)
        assert numbers_in(f"about {text} in all") == [Fraction(value)]
