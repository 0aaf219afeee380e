"""Reads JSON so that any content ends in a value or in one clear sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# No config, manifest or index comes near: that of an 8B model has 30 kB.
LARGEST_OBJECT = 64 << 20


def parse(text: str | bytes, **hooks: Any) -> Any:
    """`json.loads` (to which `hooks` go) for text that nobody vouches for.

    ValueError, phrased to follow the name of the place, for bytes that aren't UTF-8, broken JSON,
    a key that stands twice in one object, nesting beyond Python's stack, or an integer of more
    than 4300 digits; its cause is a JSONDecodeError where the fault has a line and a column.
    """
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        return json.loads(text, object_pairs_hook=_unique, **hooks)
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (byte {error.start + 1})") from error
    except json.JSONDecodeError as error:
        line = error.doc.split("\n")[error.lineno - 1].rstrip()
        place = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(
            f"is not valid JSON ({error.msg}: {place}column {error.colno} of {len(line)};"
            " was it cut in half?)"
        ) from error
    except RecursionError as error:
        raise ValueError("is not valid JSON (brackets nested too deeply)") from error
    except ValueError as error:
        reason = str(error).partition(": value has")[0]  # Python's hint is for programmers
        raise ValueError(f"is not valid JSON ({reason})") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {twice[:40]!r} stands twice in one object")
    return found


def read_text(path: Path | str) -> str:
    """The text of a file. FileNotFoundError if there is none; ValueError for what is no regular
    file (reading a pipe would wait forever) or not UTF-8; OSError if it can't be read."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing")
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start + 1})") from error
    except OSError as error:
        raise OSError(f"{path} cannot be read ({error.strerror})") from error


def check_regular(folder: Path) -> None:
    """ValueError if the folder of a model or tokenizer holds a pipe, device or folder by the name
    of a file that a library would open: reading a pipe waits forever."""
    for pattern in ("*.json", "*.jinja", "*.safetensors"):
        for path in folder.glob(pattern):
            if path.exists() and not path.is_file():
                raise ValueError(f"{path} is not a file: remove it, or copy the folder again")


def read_object(path: Path | str) -> dict[str, Any]:
    """The JSON object in a file; errors as `read_text` and `parse`, naming the file."""
    path = Path(path)
    if path.is_file() and path.stat().st_size > LARGEST_OBJECT:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes: that is no such file of ours")
    text = read_text(path)
    try:
        content = parse(text)
    except ValueError as error:
        raise ValueError(f"{path} {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return content
