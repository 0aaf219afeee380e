"""Builds dataclasses from JSON values, each checked against its field's annotation."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")
_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "text",
    type(None): "null",
}


def build(cls: type[T], values: Any, where: str, path: str = "") -> T:
    """An instance of dataclass `cls` from a parsed JSON object; nested dataclasses are objects.

    Annotations may be bool, int, float, str, None, Literal, tuple[X, ...], dict[str, X], a
    dataclass, and unions of these. Numbers stay numbers: no "1" for 1, no true for 1, no NaN;
    whole numbers fit in 64 bits. Raises ValueError naming `where` and the field, also for an
    unknown or a missing one.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{where}: {path.rstrip('.') or 'the file'} must be an object")
    renamed = getattr(cls, "RENAMED", {})  # fields of older files -> their names of today
    values = {renamed.get(name, name): value for name, value in values.items()}
    values = getattr(cls, "ABSENT", {}) | values  # what files from before a field existed mean
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    if unknown := sorted(values.keys() - fields.keys()):
        raise ValueError(f"{where}: unknown field {path}{unknown[0]:.80}")
    for name, field in fields.items():
        default = (field.default, field.default_factory)
        if name not in values and default == (dataclasses.MISSING,) * 2:
            raise ValueError(f"{where}: field {path}{name} is missing")
    hints = typing.get_type_hints(cls)
    return cls(**{k: convert(hints[k], value, where, f"{path}{k}") for k, value in values.items()})


def convert(hint: Any, value: Any, where: str, path: str) -> Any:
    """`value` as annotation `hint` wants it; ValueError naming `where` and `path` otherwise."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = typing.get_args(hint) if is_union else (hint,)
    for option in options:
        if dataclasses.is_dataclass(option) and (isinstance(value, dict) or len(options) == 1):
            return build(option, value, where, f"{path}.")
        if typing.get_origin(option) is tuple and isinstance(value, list | tuple):
            inner = typing.get_args(option)[0]
            return tuple(convert(inner, v, where, f"{path}[{i}]") for i, v in enumerate(value))
        if typing.get_origin(option) is dict and isinstance(value, dict):
            inner = typing.get_args(option)[1]
            return {k: convert(inner, v, where, f"{path}.{k:.40}") for k, v in value.items()}
        if _fits(option, value):
            return float(value) if option is float else value
    wanted = " or ".join(map(_name, options))
    raise ValueError(f"{where}: {path} must be {wanted}, not {_short(value)}")


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options as one table; keys are paths with dots."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        found |= flat(value, f"{path}.") if isinstance(value, dict) else {path: value}
    return found


def _fits(kind: Any, value: Any) -> bool:
    if typing.get_origin(kind) is typing.Literal:
        return any(type(value) is type(known) and value == known for known in typing.get_args(kind))
    if kind is float:
        # Not math.isfinite: it turns integers into floats, and some are too large for one.
        return type(value) in (int, float) and abs(value) < 2.0**1023
    if kind is int:
        return type(value) is int and -(2**63) <= value < 2**63
    if kind is str:
        return type(value) is str and not any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value)
    return type(value) is kind


def _name(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        return "a list"
    return _NAMES.get(kind, "an object")


def _short(value: Any) -> str:
    """The value as its author wrote it, or what it is if it may be long."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    if type(value) is int and abs(value) >= 2**63:
        return "a number too large"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return repr(value[:40] if isinstance(value, str) else value)


def assignments(text: str | None, where: str) -> list[tuple[str, str]]:
    """(name, value) pairs of "a=1,b=x y"; ValueError, naming `where`, for anything else."""
    pairs = [part.partition("=") for part in (text or "").split(",") if part.strip()]
    found = [(name.strip(), value.strip()) for name, _, value in pairs]
    if odd := [name for name, value in found if not name or not value]:
        raise ValueError(f"{where} takes name=value pairs with commas between, not {odd[0]!r}")
    return found
