"""`bwsft generate`: from prompt texts to answers, printed or in a JSONL that can be resumed."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from bwsft.commands.options import GenerateOptions
from bwsft.data.chat_template import Prompt
from bwsft.data.columns import Columns
from bwsft.data.file_formats import FORMATS, format_of
from bwsft.data.records import question
from bwsft.decoding.pipeline import Decoder
from bwsft.evaluation.answer_files import read_records, read_text
from bwsft.utils import lines
from bwsft.utils.claims import claimed
from bwsft.utils.files import naming
from bwsft.utils.identity import others
from bwsft.utils.lines import say


def run_generate(options: GenerateOptions) -> int:
    """Run `bwsft generate` and return the exit status; ValueError or OSError for bad input."""
    questions = read_questions(options)
    with (
        result_file(options.out, options.resume) as out_file,
        result_file(options.trace, options.resume) as trace_file,
    ):
        decoder = Decoder.load(options.model, options)
        prompts = decoder.encode(questions)
        made = (decoder.digest(), questions)
        if options.out or options.trace:
            made = (*made, decoder.identity())
        out = out_file and ResultFile(options.out, out_file, *made)
        trace = trace_file and ResultFile(options.trace, trace_file, *made)
        answer_all(decoder, prompts, out, trace, options.prompt is not None)
    if out:
        say(f"{len(questions)} answers: {options.out}", file=sys.stderr)
    return 0


def answer_all(
    decoder: Decoder, prompts: Sequence[Sequence[int]], out: ResultFile | None,
    trace: ResultFile | None, shown: bool,
) -> None:  # fmt: skip
    """Decode the prompts that have no answer in `out` yet, into the files and the terminal."""
    done = len(out.lines) if out else 0
    if trace:
        trace.keep(done)
    for index, generation in enumerate(decoder.answers(prompts, done, bool(trace)), done):
        text = decoder.text(generation.tokens)
        # The trace first: a killed run then has a trace for every answer.
        if trace:
            trace.append(index, decoder.trace_record(generation))
        if out:
            answer = {"output": text, "tokens": len(generation.tokens)}  # as evaluate reads them
            answer |= {"truncated": not generation.ended, "steps": generation.steps}
            answer["passes"] = generation.passes
            out.append(index, answer)
        if shown:
            say(text)
            say(generation.summary(), file=sys.stderr)


def read_questions(options: GenerateOptions) -> list[Prompt]:
    """What --prompt or --prompts ask: texts, or the turns of conversations."""
    if (options.prompt is None) == (options.prompts is None):
        raise ValueError("give either --prompt TEXT or --prompts FILE")
    if options.resume and options.out is None:
        raise ValueError("--resume goes on with an --out file: name it")
    if options.out and options.trace and options.out.resolve() == options.trace.resolve():
        raise ValueError("--out and --trace name the same file")
    if options.prompt is not None:
        questions = [options.prompt]
    elif options.out is None:
        raise ValueError("--prompts needs --out FILE for the answers")
    else:
        questions = _read_file(options)
    for number, asked in enumerate(questions, 1):
        text = asked if isinstance(asked, str) else asked[-1]["content"]
        if not text.strip():
            raise ValueError(f"{options.prompts or '--prompt'}: prompt {number} has no text")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError(f"{options.prompts or '--prompt'}: prompt {number} is not valid text")
    return questions


def _read_file(options: GenerateOptions) -> list[Prompt]:
    path = options.prompts
    form = format_of(path)[0]
    if form not in FORMATS and (form == ".txt" or path.is_file()):
        if options.subset or options.split:
            raise ValueError(f"{path} is a text: --subset and --split are for records")
        prompts = [line for line in lines.split(read_text(path)) if line.strip()]
        if not prompts:
            raise ValueError(f"{path}: holds no prompts")
        return prompts
    columns, found = Columns.parse(options.columns), []
    for number, record in enumerate(read_records(path, options.subset, options.split)[0], 1):
        try:
            found.append(question(record, columns))
        except ValueError as error:
            raise ValueError(f"{path}: record {number} {error}") from error
    return found


@contextlib.contextmanager
def result_file(path: Path | None, resume: bool) -> Iterator[IO[bytes] | None]:
    """The file of a ResultFile, claimed before a model is loaded; None for no path."""
    if path is None:
        yield None
        return
    otherwise = "exists: name another file, or go on with it by --resume"
    with claimed(path, lambda head: resume, otherwise) as file:
        yield file


class ResultFile:
    """A JSONL with a line per prompt, in their order, appended to and flushed line by line.

    Opening one checks that it came from the same prompts, settings and contents of the model
    (ValueError), and cuts off a last line that a killed writer left without its end.
    """

    def __init__(
        self, path: Path, file: IO[bytes], run: str, questions: list[Prompt],
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

    def append(self, index: int, record: dict) -> None:
        rest = memoryview(json.dumps(self._asked(index) | record).encode() + b"\n")
        with naming(self.path):
            while rest:  # a disk that gets full takes a part, and then nothing
                rest = rest[self.file.write(rest) :]
