"""When two LaTeX answers are the same, and what becomes of a comparison that hangs."""

import shutil
import subprocess
import sys
import threading

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bwsft.evaluation import math_equality
from bwsft.evaluation.math_equality import MathVerifier, normalize_math, same_spelling

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
])
def test_spellings(reference, answer, equal):
    assert same_spelling(reference, answer) is equal


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
])
def test_math_verify_decides_what_spelling_cannot(verifier, reference, answer, equal):
    assert verifier.equal(reference, answer) is equal


def test_math_verify_works_from_a_thread(verifier):
    # math-verify called directly raises here: its time limit needs the main thread's signals.
    verdicts = []
    thread = threading.Thread(target=lambda: verdicts.append(verifier.equal("0.5", "\\frac12")))
    thread.start()
    thread.join()
    assert verdicts == [True]


def test_a_hanging_comparison_is_no_verdict_and_the_next_one_works():
    pytest.importorskip("math_verify", reason="math-verify comes with bwsft[eval]")
    with MathVerifier(seconds=1.0) as running:
        assert running.equal("9", "9^{9^{9}}") is None
        running.seconds = math_equality.HARD_SECONDS
        assert running.equal("0.5", "\\frac12") is True
        running.child.kill()
        running.child.wait()
        assert running.equal("0.5", "\\frac12") is True


def test_the_child_does_not_import_its_neighbors(tmp_path):
    pytest.importorskip("math_verify", reason="math-verify comes with bwsft[eval]")
    script = shutil.copy(math_equality.__file__, tmp_path)
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
