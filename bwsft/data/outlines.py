"""Renders conversations by a chat template without running it for each.

The template runs once with stand-ins for the contents of messages, which note what it asks of them
and what it makes of them. So its output is known as pieces of its own and expressions of the
contents, and any conversation of the same roles whose contents give the same answers is rendered by
putting its contents in: on them the template would take the same way. A template that does to a
content what a stand-in cannot follow is run for every conversation.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Texts = Sequence[str]  # the contents of a conversation's messages
Expression = Callable[[Texts], Any]

MOST = 64  # outlines of one template; conversations beyond them are rendered by running it
# Filters that look at the outside of a list alone, and tests of what kind a value is.
OUTER_FILTERS = {"length", "count", "first", "last", "list"}
KIND_TESTS = {
    "string", "defined", "undefined", "none", "mapping", "iterable", "sequence", "number",
    "integer", "float", "boolean", "callable", "true", "false",
}  # fmt: skip
# Tests that are Python's operators, which stand-ins answer themselves.
OPERATOR_TESTS = {"in", "eq", "equalto", "==", "ne", "!="}


class _Unknown(Exception):
    """A template does what stand-ins cannot follow. No kind of error that jinja catches."""


@dataclass
class _Run:
    """One run of a template on stand-ins for `texts`."""

    texts: Texts
    answers: list[tuple[Expression, Any]] = field(default_factory=list)

    def made(self, value: Expression) -> Any:
        """What an expression of the contents is to the template: another text, a list of texts, or
        an answer. That it can be computed is an answer too."""
        try:
            found = value(self.texts)
        except Exception as error:
            raise _Unknown from error
        if type(found) is str:
            self.answers.append((lambda texts: type(value(texts)), str))
            return _Text(self, [value])
        if type(found) in (list, tuple) and all(type(item) is str for item in found):
            self.answers.append((lambda texts: len(value(texts)), len(found)))
            items = range(len(found))
            return type(found)(_Text(self, [lambda t, i=i: value(t)[i]]) for i in items)
        if type(found) not in (bool, int):
            raise _Unknown
        self.answers.append((value, found))
        return found


class _Text:
    """Stands for a text made of the contents: pieces, each a str or an expression. It passes for a
    str with all that asks for its class; Python code asks by the methods below, C code fails."""

    def __init__(self, run: _Run, pieces: list[str | Expression]):
        self._run, self._pieces = run, pieces

    __class__ = property(lambda self: str)

    def _value(self, texts: Texts) -> str:
        return _filled(self._pieces, texts)

    def _apply(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """A function of this text; arguments may be stand-ins too."""
        lifted = [a._value if type(a) is _Text else None for a in args]
        pairs = list(zip(lifted, args, strict=True))
        if not all(f or _plain(a) for f, a in pairs) or not _plain(named):
            raise _Unknown
        return self._run.made(
            lambda t: function(self._value(t), *(f(t) if f else a for f, a in pairs), **named)
        )

    def __getattr__(self, name: str) -> Any:
        if not hasattr(str, name):
            raise AttributeError(name)
        if name in ("format", "format_map", "join"):
            raise _Unknown
        return functools.partial(self._apply, getattr(str, name))

    def __str__(self) -> str:
        return _Shown(self)

    def __add__(self, other: Any) -> Any:
        return _Text(self._run, self._pieces + _pieces(other))

    def __radd__(self, other: Any) -> Any:
        return _Text(self._run, _pieces(other) + self._pieces)

    def __eq__(self, other: Any) -> Any:
        return self._apply(operator.eq, other)

    def __ne__(self, other: Any) -> Any:
        return self._apply(operator.ne, other)

    def __contains__(self, part: Any) -> bool:
        return self._apply(operator.contains, part)

    def __getitem__(self, key: Any) -> Any:
        if type(key) is str:
            raise TypeError("a text has no fields")  # as any text's; jinja catches it
        return self._apply(operator.getitem, key)

    def __bool__(self) -> bool:
        return self._apply(bool)

    def __len__(self) -> int:
        return self._apply(len)

    def _unknown(self, *args: Any) -> Any:
        raise _Unknown

    __hash__ = __iter__ = __repr__ = __format__ = __index__ = __int__ = __float__ = _unknown
    __lt__ = __le__ = __gt__ = __ge__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _unknown


def _pieces(text: Any) -> list[str | Expression]:
    """The pieces of a str or a stand-in."""
    if type(text) is _Text:
        return text._pieces
    if type(text) is not str:
        raise _Unknown
    return [text]


class _Shown(str):
    """What str() makes of a stand-in, for `_concat`. Its characters are nobody's."""

    def __new__(cls, text: _Text) -> _Shown:
        shown = super().__new__(cls, "\U0010fffe")
        shown.text = text
        return shown


def _concat(parts: Iterable[str]) -> Any:
    """What a template has printed: a str, or a stand-in where one is among the parts."""
    parts = [part.text if type(part) is _Shown else part for part in parts]
    run = next((part._run for part in parts if type(part) is _Text), None)
    if run is None:
        return "".join(parts)
    return _Text(run, [piece for part in parts for piece in _pieces(part)])


def _filled(pieces: Sequence[str | Expression], texts: Texts) -> str:
    return "".join([piece if type(piece) is str else piece(texts) for piece in pieces])


def _plain(value: Any) -> bool:
    """Whether no stand-in is within a value. Iterators and jinja's own objects may hold one."""
    if type(value) is dict:
        return all(type(key) is str and _plain(item) for key, item in value.items())
    if type(value) in (list, tuple):
        return all(map(_plain, value))
    return value is None or type(value) in (str, bool, int, float, slice)


def _filter(name: str, original: Callable[..., Any], undefined: type) -> Callable[..., Any]:
    @functools.wraps(original)  # with the mark of those that are given jinja's context first
    def guarded(*args: Any, **named: Any) -> Any:
        own = args[1:] if hasattr(original, "jinja_pass_arg") else args
        value, *more = own
        if _plain(named) and all(_plain(a) for a in more):
            if isinstance(value, undefined) or _plain(value):
                return original(*args, **named)
            if type(value) is _Text and name == "trim" and not named:
                return value._apply(str.strip, *more)
            if type(value) is _Text and name in ("length", "count", "default", "d"):
                return original(*args)
            if type(value) is _Text and name == "string":
                return value
            if type(value) in (list, tuple, dict) and name in OUTER_FILTERS:
                return original(*args)
        raise _Unknown

    return guarded


def _test(name: str, original: Callable[..., Any], undefined: type) -> Callable[..., Any]:
    @functools.wraps(original)
    def guarded(*args: Any) -> Any:
        own = args[1:] if hasattr(original, "jinja_pass_arg") else args
        if all(isinstance(a, undefined) or _plain(a) for a in own) or name in OPERATOR_TESTS:
            return original(*args)
        if name in KIND_TESTS and type(own[0]) in (_Text, list, tuple, dict):
            return original("" if type(own[0]) is _Text else own[0])
        raise _Unknown

    return guarded


def _modulo(left: Any, right: Any) -> Any:
    if not (_plain(left) and _plain(right)):  # str % anything prints by C code
        raise _Unknown
    return left % right


def _compiled(source: str, environment: Any) -> Any:
    """The template, for stand-ins; None where what it does escapes them."""
    own = environment.overlay()
    own.concat = _concat
    own.filters = {n: _filter(n, f, own.undefined) for n, f in own.filters.items()}
    own.tests = {n: _test(n, f, own.undefined) for n, f in own.tests.items()}
    own.intercepted_binops = frozenset("%")
    own.binop_table = own.binop_table | {"%": _modulo}
    nodes = own.parse(source).find_all(object)
    if own.autoescape or any(type(node).__name__ == "Concat" for node in nodes):
        return None  # `~` prints by C code
    return own.from_string(source)


@dataclass(frozen=True)
class _Outline:
    answers: list[tuple[Expression, Any]]
    pieces: list[str | Expression]

    def text(self, texts: Texts) -> str | None:
        """What the template prints, None if these contents do not answer as those of its run."""
        try:
            for ask, answer in self.answers:
                if ask(texts) != answer:
                    return None
            return _filled(self.pieces, texts)
        except Exception:  # of a method of str, which the run did not raise
            return None


class Outlines:
    """The outlines of one chat template. `environment`: jinja's, that it is rendered in, None for
    no outlines; `variables`: what it is given beside messages and add_generation_prompt."""

    def __init__(self, source: str, environment: Any, variables: Mapping[str, Any]):
        self._variables = dict(variables)
        self._known: dict[Any, list[_Outline]] = {}
        self._tried = 0
        try:
            self._template = environment and _compiled(source, environment)
        except Exception:  # of a version of jinja that does not have what this needs
            self._template = None

    def text(self, messages: Sequence[Mapping[str, Any]], prompt: bool) -> str | None:
        """What the template prints, None where only running it tells."""
        known = self._known.get((_shape(messages), prompt), ())
        texts = [turn["content"] for turn in messages] if known else []
        found = (outline.text(texts) for outline in known)
        return next((text for text in found if text is not None), None)

    def learn(self, messages: Sequence[Mapping[str, Any]], prompt: bool, printed: str) -> None:
        """Take the outline of messages for which the template has printed `printed`."""
        shape = _shape(messages)
        if not self._template or shape is None or self._tried == MOST:
            return
        self._tried += 1
        run = _Run([turn["content"] for turn in messages])
        turns = [
            {"role": role, "content": _Text(run, [operator.itemgetter(i)])}
            for i, role in enumerate(shape)
        ]
        try:
            given = {"messages": turns, "add_generation_prompt": prompt}
            outline = _Outline(
                run.answers, _pieces(self._template.render(given, **self._variables))
            )
        except Exception:  # _Unknown, and what C code raises on a stand-in
            return
        if outline.text(run.texts) == printed:
            self._known.setdefault((shape, prompt), []).append(outline)


def _shape(messages: Sequence[Mapping[str, Any]]) -> tuple[str, ...] | None:
    """The roles of messages that have a role and a content, texts, and nothing else."""
    kinds = ({"role", "content"}, {str})
    for turn in messages:
        if (turn.keys(), set(map(type, turn.values()))) != kinds:
            return None
    return tuple(turn["role"] for turn in messages)
