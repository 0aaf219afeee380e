"""Settings of a dataclass tree as a YAML or JSON file: read over defaults, written with docs."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import re
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import yaml

from bwsft.utils import config_check, strict_json

T = TypeVar("T")
LARGEST = 1 << 20  # bytes; a file of every setting has 10,000
WIDTH = 98  # of a comment


class _Loader(yaml.SafeLoader):
    """YAML 1.2's scalars: 1e-4 is a number; on, yes, 010, 1:30 and dates are text. No aliases."""

    yaml_implicit_resolvers: dict = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "aliases are not read", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            problem = f"{twice:.80} is set twice"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", list("-+0123456789")),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", list("-+.0123456789")),
):
    _pattern = re.compile(rf"(?:{_pattern})\Z")
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, _first)


class _Dumper(yaml.SafeDumper):
    """Quotes what the loader would take for something else."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def read(path: Path) -> dict[str, Any]:
    """The settings in a file, as nested tables. FileNotFoundError, or ValueError naming the file
    and the place for what is no YAML or JSON table."""
    if path.suffix.lower() not in (".yaml", ".yml", ".json"):
        raise ValueError(f"{path}: settings are read from a .yaml, .yml or .json file")
    if path.is_file() and path.stat().st_size > LARGEST:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes: that is no file of settings")
    if path.suffix.lower() == ".json":
        return strict_json.read_object(path)
    content = strict_json.read_text(path)
    try:
        found = _Loader(content).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "it"
        raise ValueError(f"{path}: {place} is not valid YAML ({error.problem})") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an integer of 5000 digits
        reason = str(error).partition("\n")[0].partition(": value has")[0]
        raise ValueError(f"{path} is not valid YAML ({reason})") from error
    except RecursionError as error:
        raise ValueError(f"{path} is not valid YAML (nested too deeply)") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold settings, as lines of name: value")
    return found


def update(base: T, values: dict[str, Any], where: str) -> T:
    """`base` with the settings of a file named `where`: nested tables or names with dots, with _
    or -. ValueError for an unknown name (and what it may mean), one set twice, or a wrong type."""
    known, done = dict(_settings(base)), set()
    for path, value in _paths(values, where):
        if any(name.startswith(f"{path}.") for name in known):
            if value is None:
                continue  # a group of which no line is left
            raise ValueError(f"{where}: {path} is a group of settings, not one")
        if path not in known:
            raise ValueError(f"{where}: unknown setting {path:.80}{_meant(path, list(known))}")
        now, hint = known[path]
        if now in done:
            raise ValueError(f"{where}: {now} is set twice")
        done.add(now)
        base = _replaced(base, now.split("."), config_check.convert(hint, value, where, path))
    return base


def text(config: Any, indent: str = "") -> str:
    """The settings as YAML that `read` and `update` take back, each with its docstring."""
    docs, lines = _docs(type(config)), []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        group = dataclasses.is_dataclass(value)
        comment = (inspect.getdoc(type(value)) or "") if group else docs.get(field.name, "")
        lines += textwrap.wrap(
            " ".join(comment.split()), WIDTH, initial_indent=f"{indent}# ",
            subsequent_indent=f"{indent}# ",
        )  # fmt: skip
        lines.append(f"{indent}{field.name}:" + ("" if group else f" {_scalar(value)}"))
        lines += [text(value, f"{indent}  ").rstrip("\n")] if group else []
    return "\n".join(lines) + "\n"


def described(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """(name with dots, annotation, docstring) of every setting."""
    hints, docs = typing.get_type_hints(type(config)), _docs(type(config))
    for field in dataclasses.fields(config):
        value, path = getattr(config, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from described(value, f"{path}.")
        else:
            yield path, hints[field.name], docs.get(field.name, "")


def _paths(tree: dict, where: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if not isinstance(key, str):
            raise ValueError(f"{where}: {prefix}{str(key)[:80]} is no name of a setting")
        path = prefix + key.replace("-", "_")
        if isinstance(value, dict):
            yield from _paths(value, where, f"{path}.")
        else:
            yield path, value


def _settings(base: Any, prefix: str = "") -> Iterator[tuple[str, tuple[str, Any]]]:
    """(name with dots, its name of today and its annotation) of every setting."""
    hints = typing.get_type_hints(type(base))
    names = {field.name: field.name for field in dataclasses.fields(base)}
    for name, now in (names | getattr(base, "RENAMED", {})).items():
        inner = getattr(base, now)
        if dataclasses.is_dataclass(inner):
            yield from _settings(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", (f"{prefix}{now}", hints[now])


def _replaced(base: T, path: list[str], value: Any) -> T:
    name, *rest = path
    inner = _replaced(getattr(base, name), rest, value) if rest else value
    return dataclasses.replace(base, **{name: inner})


def _meant(path: str, known: list[str]) -> str:
    """A question for the settings that an unknown name may mean: those whose last part is the same,
    or similar."""
    ends = [name.rpartition(".")[2] for name in known]
    end = path.rpartition(".")[2]
    for similar in ([end], difflib.get_close_matches(end, ends, 1)):
        if close := [name for name, last in zip(known, ends, strict=True) if last in similar]:
            best = difflib.get_close_matches(path, close, 3, cutoff=0)
            return f"; did you mean {' or '.join(best)}?"
    return ""


def _scalar(value: Any) -> str:
    plain = not isinstance(value, str) or value.isprintable()
    style = None if plain else '"'  # line ends and the like as escapes
    dumped = yaml.dump(
        value, Dumper=_Dumper, default_style=style, default_flow_style=True, allow_unicode=True,
        width=float("inf"),
    )  # fmt: skip
    return dumped.removesuffix("...\n").strip()


def _docs(cls: type) -> dict[str, str]:
    """The docstrings below the fields of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
    return {
        field.target.id: doc.value.value
        for field, doc in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(doc, ast.Expr)
        and isinstance(doc.value, ast.Constant)
    }
