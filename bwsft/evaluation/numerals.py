"""How numbers are written: the one grammar by which both tasks read them, exact and in linear time.

Thousands separators of all conventions (1,234 1,25,000 1 234 1'234 1_234 1.234.567 1{,}234),
signs, currencies, fractions and mixed numbers, 2.5e6, 2 \\times 10^6, "3 million", digits of any
script. Values are fractions, so that nothing is lost to floating point.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left
from fractions import Fraction

MASK = "[MASK]"  # the one spelling of a position that was never decoded
DAMAGED = "\ufffd"  # stands for a number with a mask between its digits
LONGEST_NUMBER = 400  # characters; Python refuses to read integers of more than 4,300 digits

_LOOKALIKES = str.maketrans({
    **dict.fromkeys("−‐‑‒–﹣－⁃", "-"), "⁄": "/", "∕": "/", "，": ",", "٬": ",", "،": ",", "٫": ".",
    "٪": "%", **dict.fromkeys("’‘ʼ′＇", "'"),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u200e\u200f\u061c\u00ad"
                    "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")})
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_RAISED = re.compile("[⁰¹²³⁴-⁹⁺⁻]+")
_LOWERED = re.compile("[₀-₉]+")
_FOREIGN_DIGIT = re.compile(r"[^\W\D0-9]")


def fold(text: str) -> str:
    """A text's compatible spelling: ASCII digits, signs and spaces, x² as x^{2}, ½ as 1/2.

    Characters without a width go; letters of other scripts and mathematical signs stay.
    """
    if text.isascii():
        return text
    text = _VULGAR.sub(lambda m: " " + unicodedata.normalize("NFKC", m[0]), text)
    text = _RAISED.sub(lambda m: "^{" + unicodedata.normalize("NFKC", m[0]) + "}", text)
    text = _LOWERED.sub(lambda m: "_{" + unicodedata.normalize("NFKC", m[0]) + "}", text)
    text = unicodedata.normalize("NFKC", text.translate(_LOOKALIKES)).translate(_LOOKALIKES)
    return _FOREIGN_DIGIT.sub(lambda m: str(unicodedata.digit(m[0])), text)


_SPACING = r"(?:[ ~]|\\[,!:; ]|\\thinspace(?![a-z]))"
_LATEX_THOUSANDS = re.compile(
    r"(?<=[0-9])(?:\{(?:,|\\,| |\\ )\}(?:\\!)?|\\text\{,\}|~|\\thinspace |,?(?:\\[,!:; ]){1,2} ?)"
    r"(?=[0-9]{3}(?![0-9])|[0-9]{2}(?:\{,\}[0-9]{2}){0,4}\{,\}[0-9]{3}(?![0-9]))")
_LATEX_FRACTION = re.compile(
    rf"(?:([0-9]){_SPACING}{{0,4}})?\\[dtc]?frac(?![a-z])\s?(?:\{{\s?(-?[0-9]+)\s?\}}\s?"
    r"\{\s?([0-9]+)\s?\}|([0-9])\s?(?:([0-9])|\{\s?([0-9]+)\s?\}))")
_TEXT = re.compile(
    r"\\(?:text(?:bf|rm|it|sf)?|math(?:rm|bf|it|sf|ord)|mbox|hbox|num|SI|bm)\s?\{([^{}]*)\}")
_CUT_END = re.compile(r"[.,]?[0-9]+(?:[.,][0-9]+)*")
_CUT_START = re.compile(rf"(?:[0-9{DAMAGED}][.,/\s]?|-)\Z")
_MASKS = re.compile(rf"(?:{re.escape(MASK)}\s?)+")

# Groups are bounded, and so is what one start can cost: outputs are long and may be adversarial.
_THOUSANDS = (
    r"[0-9]{1,15}(?:,[0-9]{3}){1,20}(?![0-9])"  # 1,234,567, and 1234,567 with a lost comma
    r"|[0-9]{1,2}(?:,[0-9]{2}){1,20},[0-9]{3}(?![0-9])"  # 1,25,000
    r"|[1-9][0-9]{0,2}(?: [0-9]{3}){1,20}(?![0-9/])"  # 1 234 567, but 3 125/200 is a mixed number
    r"|[1-9][0-9]{0,2}(?:'[0-9]{3}){1,20}(?![0-9])"  # 1'234'567
    r"|[1-9][0-9]{0,2}(?:_[0-9]{3}){1,20}(?![0-9])")  # 1_234_567
_DECIMAL_COMMA = (
    r"[1-9][0-9]{0,2}(?:\.[0-9]{3}){1,20},[0-9]{1,2}(?![.,]?[0-9])"  # 1.234,56
    r"|[1-9][0-9]{0,2}(?: [0-9]{3}){1,20},[0-9]{1,2}(?![.,]?[0-9])"  # 1 234,56
    r"|[1-9][0-9]{0,2}(?:\.[0-9]{3}){2,20}(?![.,]?[0-9])")  # 1.234.567
_POWER = r"[ ]?(?:\^|\*\*)[ ]?\{?[ ]?(?P<%s>[-+]?[ ]?[0-9]{1,3})[ ]?\}?(?![0-9.])"
_WORDS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12, "lakh": 5,
          "crore": 7}
_SUFFIXES = {"k": 3, "m": 6, "mn": 6, "b": 9, "bn": 9}  # after a currency sign: $3k
_SCALE = "|".join(_WORDS)
# A sign counts only where no operand stands before it: "16-3" is a subtraction, "= -3" is not.
# Commas are thousands separators only in these groups: "3, 4" and "3,45" are two numbers. A
# fraction needs its bar without spaces; "3 1/2" is a mixed number.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]}%.])[-+] ?)?(?P<currency>[$€£¥₹] ?)?(?P<inner>(?<=[$€£¥₹])-)?"
    rf"(?:(?P<foreign>{_DECIMAL_COMMA})|(?P<ten>(?<![0-9])10(?={_POWER % 'ahead'}))"
    rf"|(?P<whole>(?:{_THOUSANDS}|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+))"
    r"(?:(?P<mixed> {1,2}[0-9]+)?/(?P<denominator>0*[1-9][0-9]*)(?![0-9]|[/.][0-9]))?"
    rf"(?:[eE](?P<e>[-+]?[0-9]{{1,3}})(?![0-9a-zA-Z])|(?(ten){_POWER % 'bare'}|"
    rf"{_SPACING}{{0,3}}(?:\\times|\\cdot|[×·⋅*xX]){_SPACING}{{0,3}}\{{?10\}}?{_POWER % 'times'}))?"
    rf"(?P<words>(?:(?:\s{{1,3}}|-)(?i:{_SCALE})s?){{1,3}}(?![\w-]))?"
    r"(?(currency)(?P<suffix>(?i:bn|mn|[kmb])(?![\w$^]))?)")
_RECURRING = re.compile(
    r"(-?)([0-9]{1,20})\.([0-9]{0,20})\\(?:overline|bar)\s?\{([0-9]{1,20})\}")
_UNIT_DETAIL = re.compile(r"(?<=[0-9]):00\b|(?<=[a-zA-Z}])\s?\^\s?\{?\s?[0-9]\s?\}?")
_NO_PLAIN_NUMBER = re.compile(r"\\(?:sqrt|pi)(?![a-z])|[√π]|\^(?!\s?\{?\s?\\circ)")


def plain(text: str) -> str:
    """Numbers in LaTeX as ASCII: 1{,}234 is 1,234 and 3\\frac{1}{2} is 3 1/2.

    A number with masks between its digits becomes DAMAGED: neither half of it is a number.
    """
    text = _LATEX_THOUSANDS.sub(",", fold(text)).replace("{.}", ".")
    text = text.replace(r"\$", "$").replace(r"\%", "%")

    def fraction(match: re.Match) -> str:
        whole, top, bottom, short_top, short_bottom, long_bottom = match.groups()
        joint = f"{whole} " if whole else ""
        return f"{joint}{top or short_top}/{bottom or short_bottom or long_bottom}"

    text = _TEXT.sub(r" \1 ", _LATEX_FRACTION.sub(fraction, text))
    return _without_damaged(text) if MASK in text else text


def _without_damaged(text: str) -> str:
    first, *rest = _MASKS.split(text)
    parts = [first]
    for part in rest:
        end = _CUT_END.match(part)
        if end and _CUT_START.search(parts[-1][-3:]):
            parts[-1] = parts[-1].rstrip().rstrip("0123456789.,/-")
            parts.append(DAMAGED + part[end.end() :])
        else:
            parts.append(MASK + part)
    return "".join(parts)


def _negative(match: re.Match) -> bool:
    """Whether the sign is the number's: "= - 3" and "is - 3", but not "x - 3" or a list's dash."""
    sign = match["sign"]
    if match["inner"] is not None or sign in (None, "-", "+", "+ "):
        return match["inner"] is not None or sign == "-"
    start = match.start()
    before = match.string[max(0, start - 16) : start].rstrip(" ")
    return not before or bool(re.search(r"[:=(\[{*,$≈]\Z|\b(?:is|are|be|equals)\Z", before))


def _value(match: re.Match) -> Fraction | None:
    if len(match[0]) > LONGEST_NUMBER:
        return None
    if match["ten"]:
        value = Fraction(10 if match["bare"] is None else 1)
    elif match["foreign"]:
        value = Fraction(re.sub("[. ]", "", match["foreign"]).replace(",", "."))
    else:
        value = Fraction(re.sub("[,' _]", "", match["whole"]))
    if match["denominator"]:
        bottom = int(match["denominator"])
        value = value + Fraction(int(match["mixed"]), bottom) if match["mixed"] else value / bottom
    exponent = match["e"] or match["bare"] or match["times"] or "0"
    power = int(exponent.replace(" ", "")) + _SUFFIXES.get((match["suffix"] or "").lower(), 0)
    power += sum(_WORDS[w.lower()] for w in re.findall(f"(?i){_SCALE}", match["words"] or ""))
    value *= Fraction(10) ** power
    return -value if _negative(match) else value


def find_numbers(text: str) -> list[tuple[re.Match, Fraction]]:
    """The numbers of a text that went through `plain`: where they stand and what they are worth."""
    found = ((match, _value(match)) for match in _NUMBER.finditer(text))
    return [(match, value) for match, value in found if value is not None]


def numbers_in(text: str) -> list[Fraction]:
    """All numbers of a text, in order and exact. Currency and percent signs are dropped."""
    return [value for _, value in find_numbers(plain(text))]


def single_number(fragment: str) -> Fraction | None:
    """The one number that a short answer states, units and words aside; after "=" if there is one.

    None without a number, with several ("4, 6", "48 - 10"), with masks between digits, and with a
    root, a power or pi: that is no single number. Powers of ten are (10^6), units may have powers
    (72 cm^2), and a full hour counts ("2:00 pm" is 2).
    """
    fragment = _UNIT_DETAIL.sub("", plain(fragment))
    if DAMAGED in fragment or _NO_PLAIN_NUMBER.search(_NUMBER.sub(" ", fragment)):
        return None
    found = find_numbers(re.split(r"=|\\approx|≈", fragment)[-1])
    return found[0][1] if len(found) == 1 else None


def whole_number(fragment: str) -> Fraction | None:
    """The value of a text that is one number and nothing else, a currency sign aside.

    A recurring decimal fraction counts: 0.1\\overline{6} is 1/6.
    """
    text = plain(fragment).strip()
    if recurring := _RECURRING.fullmatch(text):
        sign, whole, fixed, period = recurring.groups()
        shift, nines = 10 ** len(fixed), 10 ** len(period) - 1
        value = Fraction(int(whole + fixed) * nines + int(period), nines * shift)
        return -value if sign else value
    match = _NUMBER.fullmatch(text)
    return None if match is None else _value(match)


def format_number(value: Fraction) -> str:
    """Shortest exact text: "18", "-2.5", and "2/3" where no finite decimal exists."""
    bottom = value.denominator  # of a finite decimal it divides a power of 10
    places = range(bottom.bit_length())
    digits = bisect_left(places, True, key=lambda n: pow(10, n, bottom) == 0)
    if digits == len(places):
        return f"{value.numerator}/{bottom}"
    if digits == 0:
        return str(value.numerator)
    scaled = str(abs(value.numerator) * 10**digits // bottom).rjust(digits + 1, "0")
    return f"{'-' if value < 0 else ''}{scaled[:-digits]}.{scaled[-digits:]}"
