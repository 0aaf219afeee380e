"""A file of results that grows line by line and can be resumed."""

from __future__ import annotations

import json
from pathlib import Path


class ResultFile:
    """A JSONL with a line per prompt, in their order, appended to and flushed line by line.

    Opening one that exists checks that it came from the same prompts and settings (ValueError), and
    cuts off a last line that a killed writer left without its end.
    """

    def __init__(self, path: Path, run: str, questions: list[str]):
        self.path, self.run, self.questions = path, run, questions
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is not a file: name another one")
        content = path.read_bytes() if path.exists() else b""
        self.lines = content.splitlines(keepends=True)
        if self.lines and not self.lines[-1].endswith(b"\n"):
            self.lines.pop()
        for number, line in enumerate(self.lines):
            if number >= len(questions) or not self._fits(line, questions[number]):
                raise ValueError(
                    f"{path}, line {number + 1} is not the answer to prompt {number + 1} under "
                    "these settings: name another file, or delete it first"
                )
        self.keep(len(self.lines))

    def _fits(self, line: bytes, question: str) -> bool:
        try:
            record = json.loads(line)
            return (record["run"], record["question"]) == (self.run, question)
        except (ValueError, KeyError, TypeError, RecursionError):
            return False

    def keep(self, count: int) -> None:
        """Drop all but the first `count` lines; ValueError if there are fewer."""
        if len(self.lines) < count:
            raise ValueError(
                f"{self.path} has {len(self.lines)} lines for {count} answers: go on without "
                "--trace, or start again with new files"
            )
        self.lines = self.lines[:count]
        with open(self.path, "ab") as file:
            file.truncate(sum(map(len, self.lines)))

    def append(self, index: int, record: dict) -> None:
        line = {"run": self.run, "question": self.questions[index], **record}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
