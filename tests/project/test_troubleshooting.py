"""The messages that docs/troubleshooting.md explains are those that the program writes."""

import ast
import errno
import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def messages():
    """Every text in the sources, with a NUL where a value stands, and the system's own."""
    for path in (ROOT / "bwsft").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(getattr(v, "value", "\0") if isinstance(v, ast.Constant) else "\0"
                              for v in node.values)  # fmt: skip
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
    yield from map(os.strerror, errno.errorcode)


def symptoms():
    """Messages in the first column of the table, cut where a value stands."""
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    for line in text.splitlines():
        for span in re.findall(r"`([^`]*)`", line.split("|")[1]) if line.startswith("| ") else ():
            yield span, re.split(r"\.\.\.|\b(?:RUN|FILE|N)\b|\d[\d,]*|'[^']*'|[(;:]", span)


def test_the_table_quotes_real_messages():
    known = "\n".join(messages())
    found = list(symptoms())
    assert len(found) > 35
    for span, pieces in found:
        long = [piece.strip() for piece in pieces if len(piece.strip()) > 7]
        assert any(piece in known for piece in long), span
    assert "a message that nobody writes" not in known
