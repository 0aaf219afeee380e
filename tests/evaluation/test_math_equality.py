"""When two LaTeX answers are the same, and what becomes of a comparison that hangs."""

import shutil
import subprocess
import sys
import threading

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bwsft.evaluation import math_equality, math_verify_child
from bwsft.evaluation.answer_parts import take_apart
from bwsft.evaluation.math_equality import (
    MathVerifier,
    normalize_math,
    same_spelling,
    same_value,
)

latex = st.lists(st.sampled_from([
    "\\frac", "\\dfrac", "\\sqrt", "{", "}", "1", "23", "x", " ", ".", ",", "\\text{ cm}",
    "\\left(", "\\right)", "\\!", "\\,", "^\\circ", "\\%", "\\$", "/", "=", "(", ")", "^{2}",
    "\\\\", "\\(", "\\)", "\\mbox{a}", "-", "000", "\\le", "ft"]), max_size=14).map("".join)


@settings(max_examples=300, deadline=None)
@given(latex)
@example("\\le\\leftft(")
@example("1,000,000")
@example(".5.")
def test_normalizing_twice_changes_nothing(text):
    once = normalize_math(text)
    assert normalize_math(once) == once


@settings(max_examples=300, deadline=None)
@given(latex)
@example("5 m")
@example("2_3 ft")
def test_every_answer_equals_itself(text):
    something = bool(normalize_math(take_apart(text, letters=False).body))
    assert same_spelling(text, text) == something
    assert same_value(text, text) in ({None, True} if something else {None, False})


@pytest.mark.parametrize("reference, answer, equal", [
    ("\\dfrac{17}{50}", "\\frac{17}{50}", True),
    ("\\frac43", "4/3", True),
    ("\\frac 59", "\\frac{5}{9}", True),
    ("\\frac9{19}", "\\tfrac{9}{19}", True),
    ("11\\sqrt2", "11 \\sqrt{2}", True),
    ("10,\\!080", "10080", True),
    ("\\$32,\\!348", "32,348", True),
    ("(1,000)", "(1000)", False),
    ("90^\\circ", "90", True),
    ("90^{\\circ}", "90\u00b0", True),
    ("\\text{(C)}", "C", True),
    ("\\text{Evelyn}", "Evelyn", True),
    ("864 \\mbox{ inches}^2", "864", True),
    ("5.4 \\text{ cents}", "5.4", True),
    (".35625", "0.35625", True),
    ("x=5", "5", True),
    ("x \\in [-2,7]", "[-2,7]", True),
    ("y = 2x + 3", "z = 2x + 3", False),
    ("4210_{5}", "4210_5", True),
    ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\frac{\\pi}{2})", True),
    ("\\begin{pmatrix} -7 \\\\ 16 \\end{pmatrix}", "\\begin{pmatrix}-7\\\\16\\end{pmatrix}", True),
    ("\\begin{pmatrix} -7 \\\\ 16 \\end{pmatrix}", "\\begin{pmatrix}-7 & 16\\end{pmatrix}", False),
    ("p - q", "q - p", False),
    ("10\\%", "10", True),
    ("2", "", False),
    ("", "", False),
    ("341_5", "341_{5}", True),
    ("341_5", "(341)_{\\text{five}}", True),
    ("341_5", "341\\text{ (base 5)}", True),
    ("341_5", "341\u2085", True),
    ("341_5", "341", True),  # the question names the base
    ("341_5", "341_6", False),
    ("341_5", "341 \\text{ base } 7", False),
    ("341", "341_5", False),
    ("96", "96_{10}", True),
    ("-3{,}041_5", "-3041_5", True),
    ("1, 2_3", "12_3", False),
    ("x_1", "x_2", False),
    ("6, 250", "6250", False),
    ("6,250", "6250", True),
    ("8\\mathrm{j}", "8", False),
    ("40\\text{ cm}", "40\\mathrm{~m}", False),
    ("\\sqrt{7}", "\u221a7", True),
    ("3\\sqrt{x+1}", "3\u221a(x + 1)", True),
    ("(-\\infty, 4] \\cup (5, 6)", "(\u2212\u221e, 4] \u222a (5, 6)", True),
    ("y^2 \\le 2\\pi", "y\u00b2 \u2264 2\u03c0", True),
    ("2 \\pm \\sqrt{3}", "2 \u00b1 sqrt(3)", True),
    ("\\frac{3}{4}", "\u00be", True),
    ("40", "40 km^2", True),
    ("40", "40 m/s", True),
    ("40", "40 \\mathrm{m}/\\mathrm{s}^2", True),
    ("40", "40 cubic feet", True),
    ("40", "40 peaches", True),
    ("8\\pi", "8\\pi\\text{ cm}", True),
    ("40 \\text{ cm}^2", "40 square centimeters", True),
    ("40 \\text{ cm}^2", "40 \\text{ m}^2", False),
    ("40 \\text{ cm}^2", "40 \\text{ cm}", False),
    ("40 \\text{ miles per hour}", "40 mph", True),
    ("\\$4", "4 \\text{ cents}", False),
    ("70^\\circ", "70 degrees", True),
    ("70^\\circ", "70\\text{ radians}", False),
    ("40", "40 or more", False),
    ("40", "40 \\text{ and } x", False),
    ("5k", "5", False),
    ("6", "6\\mathrm{e}", False),
    ("6\\mathrm{e}", "6e", True),
    ("1 + 2i", "1 + 2\\text{i}", True),
    ("1 + 2", "1 + 2\\mathrm{i}", False),
    ("72", "7 2", False),
    ("\\frac{72}{5}", "7 2/5", False),
    ("7\\frac{2}{5}", "7 2/5", True),
    ("72", "7[MASK]2", False),
    ("\\text{no solution}", "no solution", True),
])
def test_spellings(reference, answer, equal):
    assert same_spelling(reference, answer) is equal


@pytest.mark.parametrize("reference, answer", [
    ("#### 5" + " " * 32_000 + "!", "5"), ("5" + "\\," * 32_000 + "!", "5"), ("1e400", "5"),
    ("1\\%", "10^{999}"), ("9" * 4301, "5"), ("5", "9" * 4301), ("5", "\\overline{9}" * 2000)])
def test_the_longest_and_largest_cost_no_more_than_a_verdict(reference, answer):
    # What is quadratic in a long reference needs more than the time that a test may take.
    assert not same_spelling(reference, answer)
    assert not same_value(reference, answer)


@pytest.mark.parametrize("reference, answer, equal", [
    ("\\frac{37}{5}", "7 2/5", True),
    ("7", "7 2/5", False),
    ("7 \\frac25", "7.4", True),
    ("4000000", "4 \\text{ million}", True),
    ("4", "4 million", False),
    ("65000", "6.5 \\times 10^4", True),
    ("65000", "65 000", True),
    ("750000", "7,50,000", True),
    ("0.0000031", "3.1 \\times 10^{-6}", True),
    ("0.0000031", "0.0000032", False),
    ("0.25", "0.2500001", False),
    ("25\\%", "\\frac{1}{4}", True),
    ("25\\%", "25 percent", True),
    ("25\\%", "2.5", False),
    ("\\frac{4}{33}", "0.\\overline{12}", True),
    ("\\frac{2}{3}", "0.67", False),
    ("\\frac{2}{3}", "0.666667", None),  # six right digits: math-verify decides
    ("x = 9", "9.0", True),
    ("9", "> 9", False),
    ("9", "3^2", None),
    ("(1, 2)", "1.2", False),
    ("8, 9", "8 \\text{ and } 9", None),
])
def test_plain_numbers_are_compared_exactly(reference, answer, equal):
    assert same_value(reference, answer) is equal


@pytest.fixture(scope="module")
def verifier():
    pytest.importorskip("math_verify", reason="math-verify comes with bwsft[eval]")
    with MathVerifier() as running:
        yield running


@pytest.mark.parametrize("reference, answer, equal", [
    ("\\frac{639}{40}", "15.975", True),
    ("\\frac14", "0.25", True),
    ("\\frac{1}{8}", "\\frac{3}{24}", True),
    ("11\\sqrt2", "\\sqrt{242}", True),
    ("2k+2", "2(k+1)", True),
    ("6+9i", "9i+6", True),
    ("-2,1", "1,-2", True),
    ("\\frac{1}{3}", "0.33", False),
    ("p - q", "q - p", False),
    ("(3,4]", "[3,4]", False),
    ("3, 5, 7", "5", False),
    ("(a+5)(b+2)", "(a+5)(b+3)", False),
    ("5", "}{\\frac{", False),
    ("\\frac{2}{3}", "0.666667", True),
    ("\\frac{1}{3^{50}}", "3^{-50}", True),
    ("\\frac{1}{3^{50}}", "\\frac{1}{3^{51}}", False),
    ("\\frac{\\pi}{10^8}", "\\frac{\\pi}{10^9}", False),
    ("(0, 0.0000031)", "(0, 0.0000032)", False),
    ("\\{2^{-80}, 1\\}", "\\{1, 2^{-81}\\}", False),
    ("\\begin{pmatrix} 2^{-40} \\\\ 1 \\end{pmatrix}",
     "\\begin{pmatrix} 3^{-40} \\\\ 1 \\end{pmatrix}", False),
    ("\\frac{1}{30!}", "\\frac{1}{31!}", False),
    ("7!", "5040", True),
    ("7!", "7", False),
    ("\\mathrm{e}^{-40}", "\\mathrm{e}^{-41}", False),
    ("4", "4\\mathrm{i}", False),
    ("\\{2, 3\\}", "(2, 3)", False),
    ("2x \\cdot 3", "6x", True),
    ("50\\%", "\\frac{2}{4}", True),
    ("341_5", "96", False),
    ("72", "7[MASK]2", False),
])
def test_math_verify_decides_what_spelling_cannot(verifier, reference, answer, equal):
    assert verifier.equal(reference, answer) is equal


def test_math_verify_works_from_a_thread(verifier):
    # math-verify called directly raises here: its time limit needs the main thread's signals.
    verdicts = []
    thread = threading.Thread(target=lambda: verdicts.append(verifier.equal("2x", "x + x")))
    thread.start()
    thread.join()
    assert verdicts == [True]


def test_a_hanging_comparison_is_no_verdict_and_the_next_one_works():
    pytest.importorskip("math_verify", reason="math-verify comes with bwsft[eval]")
    with MathVerifier(seconds=1.0) as running:
        assert running.equal("9", "9^{9^{9}}") is None
        running.seconds = math_equality.HARD_SECONDS
        assert running.equal("2x", "x + x") is True
        running.child.kill()
        running.child.wait()
        assert running.equal("2x", "x + x") is True


def test_the_child_does_not_import_its_neighbors(tmp_path):
    pytest.importorskip("math_verify", reason="math-verify comes with bwsft[eval]")
    script = shutil.copy(math_verify_child.__file__, tmp_path)
    (tmp_path / "sympy.py").write_text("raise SystemExit('the wrong sympy')")
    asked = subprocess.run([sys.executable, script], input='["0.5", "1/2"]\n', text=True,
                           capture_output=True, timeout=120)
    assert asked.stdout == "true\n"


def test_without_math_verify_the_message_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match=r"bwsft\[eval\]"):
        MathVerifier()


def test_sympy_stays_out_of_this_process():
    code = ("import sys, bwsft.evaluation.pass_at_1\n"
            "assert not {'sympy', 'math_verify'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], check=True)
