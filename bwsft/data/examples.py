"""Records to examples ready to tokenize: what is an example, what is left out, what is not read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bwsft.data import records
from bwsft.data.chat_template import Prepared, Template
from bwsft.data.columns import Columns, shown
from bwsft.data.records import Record

if TYPE_CHECKING:  # packing imports torch, which processes that only tokenize do without
    from bwsft.data.packing import CanvasLayout

TURN_BIT = 40  # a sample id is the record's number + (answers after this one << TURN_BIT)
LISTED = 20  # malformed records, or unread columns, that a report names; the rest only count
# No example of so much text fits any context, and tokenizing takes some 100 bytes a character.
MOST_CHARACTERS = 1_000_000


@dataclass(frozen=True)
class DataOptions:
    """How records become examples.

    `max_length` bounds prompt + response with its end token; longer examples are dropped.
    So are those whose canvas, as `layout` has it, is longer than `max_positions`. `gen_length`
    only serves the report. `on_bad` is "stop" or "skip". Records whose `type`
    contains `exclude_type` are dropped. `subset` and `split` choose a part of the source, `columns`
    (as Columns.parse takes it) says what its columns are, `turns` which answers of a
    conversation are examples; `template_args` goes to the chat template. With `mask_id` or
    `vocab_size` given, every id is checked against them.
    """

    template: str = "metamath"
    template_args: str | None = None
    columns: str | None = None
    turns: str = "last"
    max_length: int = 256
    gen_length: int = 128
    on_bad: str = "stop"
    exclude_type: str | None = None
    subset: str | None = None
    split: str | None = None
    mask_id: int | None = None
    vocab_size: int | None = None
    layout: CanvasLayout | None = None
    max_positions: int | None = None

    def __post_init__(self) -> None:
        if self.on_bad not in ("stop", "skip"):
            raise ValueError(f"on_bad is {self.on_bad!r}, not 'stop' or 'skip'")
        if self.max_length < 2:
            raise ValueError(f"max_length must be at least 2, not {self.max_length}")


class ExampleReader:
    """Raw records to examples ready to tokenize; counts what it leaves out."""

    def __init__(self, template: Template, options: DataOptions):
        self.template, self.options = template, options
        self.columns = Columns.parse(options.columns)
        self.dropped: Counter[str] = Counter()
        self.first: dict[str, str] = {}  # reason -> the first place that was dropped for it
        self.read: Counter[str] = Counter()
        self.unread: Counter[str] = Counter()
        self.skipped: list[dict[str, str]] = []
        self.examples_read = self.records = 0

    def facts(self) -> dict[str, Any]:
        return {
            "examples": self.examples_read, "dropped": dict(self.dropped), "first": self.first,
            "read": dict(self.read), "unread": dict(self.unread), "skipped": self.skipped,
            "records": self.records,
        }  # fmt: skip

    def examples(self, number: int, place: str, raw: Any) -> Iterator[tuple[int, Prepared]]:
        """(sample id, text) of each example of record `number`."""
        self.records += 1
        try:
            found = list(self._examples(raw))
        except ValueError as error:
            self.examples_read += 1
            if self.options.on_bad == "stop":
                hint = "fix it, or leave bad records out by --dataset.on-bad skip"
                raise ValueError(f"{place} {error}; {hint}") from error
            self.dropped["malformed"] += 1
            if len(self.skipped) < LISTED:
                self.skipped.append({"where": place, "reason": str(error)})
            return
        self.examples_read += len(found)
        for later, ready in found:
            if isinstance(ready, str):
                self.dropped[ready] += 1
                self.first.setdefault(ready, place)
            else:
                yield number | later << TURN_BIT, ready

    def _examples(self, raw: Any) -> Iterator[tuple[int, Prepared | str]]:
        """(answers after this one, text or the reason to drop it) of each example of a record."""
        record = records.normalize(raw, self.columns)
        exclude = self.options.exclude_type
        unread = [*record.unread, *self._unprinted(record)]
        unread += ["type"] if record.kind and not exclude else []
        for name in unread:
            _count(self.unread, name)
        _count(self.read, ", ".join(record.read))
        if exclude and exclude in record.kind:
            yield 0, f"type contains {exclude}"
            return
        said = [i for i, turn in enumerate(record.messages) if turn["role"] == "assistant"]
        asked = next(i for i, t in enumerate(record.messages) if t["role"] not in records.OPENERS)
        for later, at in enumerate(reversed(said)):
            if at in record.answers:
                yield later, _unfit(record, at) or self.template.prepare(record, at)
            elif at > asked:
                yield later, "weight 0"
            if self.options.turns == "last":
                return

    def _unprinted(self, record: Record) -> list[str]:
        """Fields of messages, and tools, that the chat template's text does not name."""
        names = {name for turn in record.messages for name in turn} - {"role", "content"}
        names |= {"tools"} if record.tools else set()
        return sorted(shown(name) for name in names if not self.template.reads(name))


def joined(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The facts of several readers, one after the other, as those of one."""
    whole = {"examples": 0, "dropped": Counter(), "first": {}, "read": Counter(),
             "unread": Counter(), "skipped": [], "records": 0}  # fmt: skip
    for facts in parts:
        for name in ("examples", "records"):
            whole[name] += facts[name]
        whole["dropped"].update(facts["dropped"])
        for name in ("read", "unread"):
            for column, count in facts[name].items():
                _count(whole[name], column, count)
        whole["first"] = facts["first"] | whole["first"]
        whole["skipped"] += facts["skipped"][: LISTED - len(whole["skipped"])]
    return {k: dict(value) if isinstance(value, Counter) else value for k, value in whole.items()}


def _count(counter: Counter[str], name: str, by: int = 1) -> None:
    """Count a name; names may be as many as records."""
    counter[name if name in counter or len(counter) < LISTED else "others"] += by


def _unfit(record: Record, at: int) -> str | None:
    """Why turn `at` of a record cannot be an example."""
    asked = [turn for turn in record.messages[:at] if turn["role"] != "assistant"]
    if not asked[-1]["content"].strip():
        return "empty prompt"
    if sum(len(turn["content"]) for turn in record.messages[: at + 1]) > MOST_CHARACTERS:
        return f"longer than {MOST_CHARACTERS:,} characters"
    answer = record.messages[at]
    says = answer["content"].strip() or answer.keys() - {"role", "content"}
    return None if says else "empty response"
