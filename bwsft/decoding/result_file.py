"""A JSONL of answers that are kept as they come, and that an interrupted command goes on with."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

from bwsft.data.chat_template import Prompt
from bwsft.utils import lines
from bwsft.utils.claims import claimed
from bwsft.utils.files import naming
from bwsft.utils.identity import others
from bwsft.utils.lines import say


@contextlib.contextmanager
def result_file(path: Path | None, resume: bool) -> Iterator[IO[bytes] | None]:
    """The file of a ResultFile, claimed before a model is loaded; None for no path."""
    if path is None:
        yield None
        return
    otherwise = "exists: name another file, or go on with it by --resume"
    with claimed(path, lambda head: resume, otherwise) as file:
        yield file


@contextlib.contextmanager
def kept_answers(
    path: Path, run: str, questions: Sequence[Prompt], identity: dict[str, str]
) -> Iterator[ResultFile]:
    """A ResultFile beside a command's own result: the command goes on with it when it is given
    again, and it goes when the block, in which that result is written, succeeds."""
    with result_file(path, resume=True) as file:
        yield ResultFile(path, file, run, questions, identity)
        path.unlink()


class ResultFile:
    """A JSONL with a line per prompt, in their order, appended to and flushed line by line.

    Opening one checks that it came from the same prompts, settings and contents of the model
    (ValueError), and cuts off a last line that a killed writer left without its end.
    """

    def __init__(
        self, path: Path, file: IO[bytes], run: str, questions: Sequence[Prompt],
        identity: dict[str, str],
    ):  # fmt: skip
        """file: what `claimed` yields."""
        self.path, self.file, self.run, self.questions = path, file, run, questions
        self.identity = identity
        file.seek(0)
        content = file.read()
        self.lines = lines.finished(content)
        for number, line in enumerate(self.lines):
            if number >= len(questions) or not self._fits(line, questions[number]):
                raise self._foreign(number)
        torn = content[sum(map(len, self.lines)) :]
        if torn and not self._begins(torn, len(self.lines)):
            raise self._foreign(len(self.lines))
        self._check_identity()
        self.keep(len(self.lines))

    def _foreign(self, number: int) -> ValueError:
        return ValueError(
            f"{self.path}, line {number + 1} is not the answer to prompt {number + 1} under "
            "these settings: name another file, or delete it first"
        )

    def _fits(self, line: bytes, asked: Prompt) -> bool:
        try:
            record = json.loads(line)
            return (record["run"], record["question"]) == (self.run, asked)
        except (ValueError, KeyError, TypeError, RecursionError):
            return False

    def _begins(self, torn: bytes, number: int) -> bool:
        """Whether half a line can be what `append` was writing as line `number`."""
        if number >= len(self.questions):
            return False
        plain = {"run": self.run, "question": self.questions[number]}  # of an earlier release
        starts = [json.dumps(asked).encode()[:-1] for asked in (self._asked(number), plain)]
        return any(torn.startswith(start) or start.startswith(torn) for start in starts)

    def _asked(self, number: int) -> dict:
        return {"run": self.run, "identity": self.identity, "question": self.questions[number]}

    def _check_identity(self) -> None:
        """ValueError if a line was written with another content of the model under its name."""
        found = [json.loads(line).get("identity") for line in self.lines]
        for number, before in enumerate(found, 1):
            if isinstance(before, dict) and (other := others(before, self.identity)):
                raise ValueError(
                    f"{self.path}, line {number} was written with other {' and '.join(other)} under"
                    " the name of this model: name another file by --out, or delete it first"
                )
        if None in found:
            say(f"{self.path} was begun by an earlier release, without digests of the model: it "
                "is taken to be the same", file=sys.stderr)  # fmt: skip

    def keep(self, count: int) -> None:
        """Drop all but the first `count` lines; ValueError if there are fewer."""
        if len(self.lines) < count:
            raise ValueError(
                f"{self.path} has {len(self.lines)} lines for {count} answers: go on without "
                "--trace, or start again with new files"
            )
        self.lines = self.lines[:count]
        self.file.truncate(sum(map(len, self.lines)))

    def answers(self, decode: Callable[[int], Iterable[dict]]) -> Iterator[dict]:
        """The records of all prompts in order: the lines that are here, then what `decode` gives
        for those after the first so many, each kept as it comes. ValueError for too few."""
        done, following = len(self.lines), []
        yield from map(json.loads, self.lines)
        if done < len(self.questions):
            following = decode(done)
        for record in itertools.islice(following, len(self.questions) - done):
            self.append(done, record)
            done += 1
            yield record
        if done < len(self.questions):
            count = len(self.questions)
            raise ValueError(f"the decoder gave {done} answers to {count} questions")

    def append(self, index: int, record: dict) -> None:
        rest = memoryview(json.dumps(self._asked(index) | record).encode() + b"\n")
        with naming(self.path):
            while rest:  # a disk that gets full takes a part, and then nothing
                rest = rest[self.file.write(rest) :]
