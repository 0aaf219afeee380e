"""A MATH answer taken apart before it is compared: LaTeX, unit, and the base of its digits."""

from __future__ import annotations

import re
from typing import NamedTuple

from bwsft.evaluation.numerals import fold

_SYMBOLS = {
    "∞": "infty", "×": "times", "·": "cdot", "⋅": "cdot", "∙": "cdot", "÷": "div", "±": "pm",
    "∓": "mp", "≤": "le", "≥": "ge", "≠": "ne", "≈": "approx", "∪": "cup", "∩": "cap", "∈": "in",
    "∅": "emptyset", "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "θ": "theta",
    "λ": "lambda", "μ": "mu", "π": "pi", "ρ": "rho", "σ": "sigma", "φ": "phi", "ω": "omega",
    "Δ": "Delta", "Ω": "Omega", "∠": "angle", "⌊": "lfloor", "⌋": "rfloor", "⌈": "lceil",
    "⌉": "rceil", "ℝ": "mathbb{R}", "⟨": "langle", "⟩": "rangle"}
_SYMBOL = re.compile("|".join(_SYMBOLS))
_LETTER = r"\\(?:mathrm|text|textrm|textit|mathit|rm|operatorname)\s?\{\s?"
_REWRITES = [(re.compile(pattern), by) for pattern, by in (
    (r"~", " "),
    # The number e, the imaginary unit and unit vectors are no units of measurement.
    (_LETTER + r"([eidjk])\s?\}", r" \1"),
    (_LETTER + r"(sin|cos|tan|cot|sec|csc|log|ln|exp)\s?\}", r"\\\1 "),
    (r"(?<![\\a-zA-Z])(sin|cos|tan|cot|csc|log|ln)(?![a-zA-Z])", r"\\\1 "),
    (r"√\s?(?=\{)|(?<![\\a-zA-Z])sqrt\s?(?=\{)", r"\\sqrt"),
    (r"(?:√\s?|(?<![\\a-zA-Z])sqrt\s?)\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"√\s?([0-9]+|\\?[a-zA-Z]+)", r"\\sqrt{\1}"),
    (r"∛\s?(?:\(([^()]*)\)|([0-9]+|[a-zA-Z]))", r"\\sqrt[3]{\1\2}"),
    (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
    (r"(?<![\\a-zA-Z])infinity(?![a-zA-Z])", r"\\infty "),
    (r"<=", r"\\le "), (r">=", r"\\ge "), (r"\*\*", "^"),
    (r"°|º|\\degree(?![a-zA-Z])|\\textdegree(?![a-zA-Z])", r"^\\circ "),
    (r"(?:\\text\s?\{\s?)?\bper[ ]?cent\b\s?\}?", r"\\%"),
    # A mixed number, before the space in it goes: 11 5/6 is not 115/6.
    (r"(?<![0-9.,/^_])([0-9]{1,9})(?: |\\[,;:! ])+([0-9]{1,9})/([0-9]{1,9})(?![0-9])",
     r"\1\\frac{\2}{\3}"),
)]


def latex(answer: str) -> str:
    """An answer's LaTeX: Unicode signs, sqrt(2) and pi as commands, e and i as letters."""
    text = fold(answer)
    for pattern, by in _REWRITES:
        text = pattern.sub(by, text)
    return _SYMBOL.sub(lambda m: f"\\{_SYMBOLS[m[0]]} ", text)


_UNITS = {spelling: name for name, spellings in {
    "mm": "mm millimeter millimetre", "cm": "cm centimeter centimetre", "m": "m meter metre",
    "km": "km kilometer kilometre", "in": "in inch inches", "ft": "ft foot feet", "yd": "yd yard",
    "mi": "mi mile", "mg": "mg milligram", "g": "g gram", "kg": "kg kilogram", "lb": "lb pound",
    "oz": "oz ounce", "ton": "ton tonne", "s": "s sec second", "min": "min minute",
    "h": "h hr hour", "day": "day", "week": "week", "month": "month", "year": "year yr",
    "mL": "mL ml milliliter millilitre", "L": "L liter litre", "gal": "gal gallon", "N": "newton",
    "J": "joule", "W": "watt", "Hz": "Hz hertz", "mph": "mph", "dollar": "dollar buck USD",
    "cent": "cent penny pennies", "euro": "euro EUR", "degree": "degree deg",
    "radian": "radian rad", "": "unit",
}.items() for spelling in spellings.split()}
_SIGNS = {"\\$": "dollar", "€": "euro", "£": "pound sterling", "¥": "yen", "₹": "rupee"}
# Words after a number that change its value or make it one of several.
_NO_UNIT = set(
    "and or to of mod modulo base plus minus times over if for where less more than at not is "
    "hundred thousand million billion trillion lakh crore remainder pi sqrt sin cos tan log ln e i "
    "d binary octal decimal hexadecimal".split())
_TEXT = re.compile(r"\\(?:text|textbf|textrm|textit|mbox|mathrm|mathbf|hbox)\s?\{([^{}]*)\}")
_POWER = r"(?:\s?\^\s?\{?\s?-?[0-9]\s?\}?)"
_WORDED_UNIT = re.compile(
    rf"(?:(?<=[0-9a-zA-Z}})\]!])|(?<=\\%))(?:\s|\\[,;:! ]){{0,4}}"
    rf"((?:{_TEXT.pattern}{_POWER}?(?:\s?/\s?)?){{1,4}})\s?\.?\s?\Z")
_PLAIN_UNIT = re.compile(
    r"(?:(?<=[0-9})\]])|(?<=\\%)|(?<=\\pi)(?=\s))(?P<space>(?:[ ~]|\\[,;:! ]){1,4})?"
    rf"(?P<unit>[A-Za-z][A-Za-z. -]{{0,60}}{_POWER}?(?:\s?/\s?[A-Za-z]{{1,15}}{_POWER}?)?)"
    r"\s?\.?\s?\Z")
_DEGREE = re.compile(r"\s*\^\s?\{?\s?\\circ\s?\}?\s*(?:\\(?:text|mathrm)\{\s?)?([CF]?)\s?\}?\s*\Z")
_CURRENCY = re.compile(r"^\s*(-?)\s*(\\\$|[€£¥₹])|\s*(\\\$|[€£¥₹])\s*\Z")
_NUMERALS = {name: str(value) for value, name in enumerate(
    "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen".split(), 2)}
_BASE = re.compile(
    r"(?:[a-z]=)?\(?(-?[0-9A-F]+(?:,[0-9A-F]{3})*(?:\.[0-9A-F]+)?)\)?(?:_\{?\(?(?:base)?([0-9]{1,2}|[a-z]+)\)?\}?"
    r"|\(?(?:in)?base-?([0-9]{1,2}|[a-z]+)\)?)")


class Parts(NamedTuple):
    """`body` is LaTeX without the unit; `unit` its name, "" where there is none that is known;
    `base` that of the digits in `body`, None for every other answer."""

    body: str
    unit: str
    base: int | None


def take_apart(answer: str, letters: bool) -> Parts:
    """The parts of an answer. `letters`: a spaced letter is a unit, as in "10 m", no unknown."""
    text = latex(answer).strip()
    if based := _based(text):
        return Parts(based[0], "", based[1])
    if degree := _DEGREE.search(text):
        return Parts(text[: degree.start()], f"degree {degree[1]}".strip(), None)
    if sign := _CURRENCY.search(text):
        body = text[: sign.start()] + (sign[1] or "") + text[sign.end() :]
        return Parts(body, _SIGNS[sign[2] or sign[3]], None)
    return Parts(*_split_unit(text, letters), None)


def _based(text: str) -> tuple[str, int] | None:
    """The digits and their base of 2516_8, 2516_{\\text{eight}}, "2516 base 8"."""
    match = _BASE.fullmatch(re.sub(r"\s|\\[,;:! ]|\{,\}", "", _TEXT.sub(r"\1", text)))
    if match is None:
        return None
    base = _NUMERALS.get(match[2] or match[3], match[2] or match[3])
    if not base.isdigit() or not 2 <= int(base) <= 36:
        return None
    digits = match[1].replace(",", "")
    fits = all(int(digit, 36) < int(base) for digit in re.sub("[-.]", "", digits))
    return (digits, int(base)) if fits and re.search("[0-9]", digits) else None


def _split_unit(text: str, letters: bool) -> tuple[str, str]:
    """The text before a unit, and the unit's name; words that are the answer stay."""
    if worded := _WORDED_UNIT.search(text):
        unit = _TEXT.sub(r"\1", worded[1])
        if not _NO_UNIT & set(re.findall(r"[A-Za-z]+", unit.lower())):
            return text[: worded.start()], _unit_name(unit) or ""
    plain = _PLAIN_UNIT.search(text)
    if plain is None:
        return text, ""
    name = _unit_name(plain["unit"])
    if name is None:  # words unknown here: "10 apples"
        words = re.findall(r"[A-Za-z]+", plain["unit"])
        named = not _NO_UNIT & {word.lower() for word in words} and min(map(len, words)) > 2
    else:  # one letter is a unit after a space only: "10 m", but "10m" is a product
        named = letters and plain["space"] or re.match(r"[A-Za-z]{2}", plain["unit"])
    named = named and (name is not None or plain["space"])
    return (text[: plain.start()], name or "") if named else (text, "")


def _unit_name(unit: str) -> str | None:
    """One name for the spellings of a unit: "square feet" is "ft^2"; None for words unknown here.

    "miles per hour" and "mi/h" are "mi/h".
    """
    parts = []
    for side in re.split(r"\s*/\s*|\s+per\s+", unit.strip()):
        power = re.search(r"\^\s?\{?\s?(-?[0-9])", side)
        words = re.sub(r"\^.*", "", side).replace(".", " ").split()
        exponent = power[1] if power else "1"
        for index, name in ((0, {"square": "2", "sq": "2", "cubic": "3"}),
                            (-1, {"squared": "2", "cubed": "3"})):
            if words and words[index].lower() in name:
                exponent = name[words.pop(index).lower()]
        if len(words) != 1:
            return None
        word = words[0] if words[0] in _UNITS else words[0].lower()
        found = _UNITS.get(word, _UNITS.get(word.removesuffix("s") if len(word) > 3 else word))
        if found is None:
            return None
        parts.append(found + ("" if exponent == "1" or not found else f"^{exponent}"))
    return "/".join(parts).replace("mi/h", "mph")
