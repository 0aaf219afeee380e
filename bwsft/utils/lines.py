"""What a line is, for every text of the user's: it ends at a line feed and at nothing else.

str.splitlines also cuts at U+2028, form feeds and lone carriage returns, which may stand inside a
prompt or a JSON string.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import IO, AnyStr

BOM = "\ufeff"


def split(text: str) -> list[str]:
    """The lines of a text without their ends (LF or CR LF) and without a byte order mark."""
    parts = text.removeprefix(BOM).split("\n")
    if not parts[-1]:
        parts.pop()
    return [part.removesuffix("\r") for part in parts]


def numbered(file: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line with its end) of a file opened for bytes, without a byte order mark and
    without blank lines."""
    for number, line in enumerate(file, start=1):
        if number == 1:
            line = line.removeprefix(BOM.encode())
        if line.strip():
            yield number, line


def finished(content: AnyStr) -> list[AnyStr]:
    """Lines with their line feed. A last one that has none, as a killed writer leaves it, is left
    out."""
    end = "\n" if isinstance(content, str) else b"\n"
    return [part + end for part in content.split(end)[:-1]]


def one_line(text: str) -> str:
    """Somebody's text as a terminal may print it: one line, nothing that moves the cursor."""
    return re.sub(r"[\n\t]", " ", printable(text, " "))


def printable(text: str, by: str = "\ufffd") -> str:
    """Somebody's text with `by` for each character that a terminal would obey. Line feeds and tabs
    stay."""
    return _OBEYED.sub(by, text)


def say(text: object = "", file: IO[str] | None = None, end: str = "\n") -> None:
    """`print`, at once, of a text that may hold somebody's."""
    print(printable(str(text)), file=file, end=end, flush=True)


# Control characters, line and paragraph separators, changes of direction, half surrogate pairs.
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
