"""`bwsft generate`: from prompt texts to answers, printed or in a JSONL that can be resumed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bwsft.commands.options import GenerateOptions
from bwsft.data.chat_template import Prompt
from bwsft.data.columns import Columns
from bwsft.data.file_formats import FORMATS, format_of
from bwsft.data.records import question
from bwsft.decoding.pipeline import Decoder
from bwsft.evaluation.answer_files import read_records, read_text
from bwsft.utils import lines
from bwsft.utils.identity import others


def run_generate(options: GenerateOptions) -> int:
    """Run `bwsft generate` and return the exit status; ValueError or OSError for bad input."""
    questions = read_questions(options)
    for path in filter(None, (options.out, options.trace)):
        refuse_existing(path, options.resume)
    decoder = Decoder.load(options.model, options)
    prompts = decoder.encode(questions)  # before any file is made: it may refuse one
    made = (decoder.digest(), questions)
    if options.out or options.trace:
        made = (*made, decoder.identity())
    out = options.out and ResultFile(options.out, *made)
    trace = options.trace and ResultFile(options.trace, *made)
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
        if options.prompt is not None:
            print(text)
            print(generation.summary(), file=sys.stderr)
    if out:
        print(f"{len(questions)} answers: {options.out}", file=sys.stderr)
    return 0


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


def refuse_existing(path: Path, resume: bool) -> None:
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file")
    if path.exists() and not resume:
        raise ValueError(f"{path} exists: name another file, or go on with it by --resume")


class ResultFile:
    """A JSONL with a line per prompt, in their order, appended to and flushed line by line.

    Opening one that exists checks that it came from the same prompts, settings and contents of the
    model (ValueError), and cuts off a last line that a killed writer left without its end.
    """

    def __init__(self, path: Path, run: str, questions: list[Prompt], identity: dict[str, str]):
        self.path, self.run, self.questions, self.identity = path, run, questions, identity
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is not a file: name another one")
        content = path.read_bytes() if path.exists() else b""
        self.lines = lines.finished(content)
        for number, line in enumerate(self.lines):
            if number >= len(questions) or not self._fits(line, questions[number]):
                raise ValueError(
                    f"{path}, line {number + 1} is not the answer to prompt {number + 1} under "
                    "these settings: name another file, or delete it first"
                )
        self._check_identity()
        self.keep(len(self.lines))

    def _fits(self, line: bytes, asked: Prompt) -> bool:
        try:
            record = json.loads(line)
            return (record["run"], record["question"]) == (self.run, asked)
        except (ValueError, KeyError, TypeError, RecursionError):
            return False

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
            print(f"{self.path} was begun by an earlier release, without digests of the model: it "
                  "is taken to be the same", file=sys.stderr)  # fmt: skip

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
        line = {"run": self.run, "identity": self.identity}
        line |= {"question": self.questions[index], **record}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
