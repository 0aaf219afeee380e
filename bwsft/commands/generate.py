"""`bwsft generate`: from prompt texts to answers, printed or in a JSONL that can be resumed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from bwsft.commands.result_file import ResultFile
from bwsft.decoding.pipeline import Decoder, DecoderOptions
from bwsft.decoding.result import Generation
from bwsft.evaluation.answer_files import QUESTION_FIELDS, read_records

RECORDS = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True)
class GenerateOptions(DecoderOptions):
    """Answer one prompt, or every prompt of a file."""

    model: str | None = None
    """Run folder, checkpoint, model folder or Hub id; default: the embedded tiny LLaDA."""
    prompt: str | None = None
    """One prompt; its answer is printed."""
    prompts: Path | None = None
    """JSONL or JSON file of records with a question, query, problem or prompt; any other file is
    read as text with one prompt per line."""
    out: Path | None = None
    """JSONL of answers, one line per prompt in the order of the prompts, written as they come."""
    resume: bool = False
    """Go on with an --out file that an earlier, interrupted call began."""
    trace: Path | None = None
    """JSONL with step, position, token and confidence of every commitment, a line per prompt."""


def run_generate(options: GenerateOptions) -> int:
    """Run `bwsft generate` and return the exit status; ValueError or OSError for bad input."""
    questions = read_questions(options)
    for path in filter(None, (options.out, options.trace)):
        refuse_existing(path, options.resume)
    decoder = Decoder.load(options.model, options)
    prompts = decoder.encode(questions)  # before any file is made: it may refuse one
    run = decoder.digest()
    out = options.out and ResultFile(options.out, run, questions)
    trace = options.trace and ResultFile(options.trace, run, questions)
    done = len(out.lines) if out else 0
    if trace:
        trace.keep(done)
    for index, generation in enumerate(decoder.answers(prompts, done, bool(trace)), done):
        text = decoder.text(generation.tokens)
        # The trace first: a killed run then has a trace for every answer.
        if trace:
            trace.append(index, decoder.trace_record(generation))
        if out:
            out.append(index, answer_record(text, generation))
        if options.prompt is not None:
            print(text)
            print(generation.summary(), file=sys.stderr)
    if out:
        print(f"{len(questions)} answers: {options.out}", file=sys.stderr)
    return 0


def read_questions(options: GenerateOptions) -> list[str]:
    """The prompt texts of --prompt or --prompts."""
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
        questions = _read_file(options.prompts)
    for number, question in enumerate(questions, 1):
        if not isinstance(question, str) or not question.strip():
            raise ValueError(f"{options.prompts or '--prompt'}: prompt {number} has no text")
        if any("\ud800" <= character <= "\udfff" for character in question):
            raise ValueError(f"{options.prompts or '--prompt'}: prompt {number} is not valid text")
    return questions


def _read_file(path: Path) -> list:
    if path.suffix.lower() not in RECORDS:
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file")
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 text (byte {error.start})") from error
        if not any(line.strip() for line in lines):
            raise ValueError(f"{path}: holds no prompts")
        return [line for line in lines if line.strip()]
    found = []
    for number, record in enumerate(read_records(path)[0], 1):
        field = next((f for f in QUESTION_FIELDS if record.get(f) is not None), None)
        if field is None:
            raise ValueError(
                f"{path}: record {number} has no prompt: it needs one of "
                f"{', '.join(QUESTION_FIELDS)} and has {', '.join(record) or 'nothing'}"
            )
        found.append(record[field])
    return found


def refuse_existing(path: Path, resume: bool) -> None:
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file")
    if path.exists() and not resume:
        raise ValueError(f"{path} exists: name another file, or go on with it by --resume")


def answer_record(text: str, generation: Generation) -> dict:
    """The fields that `bwsft evaluate --outputs` reads, and the steps."""
    return {
        "output": text,
        "tokens": len(generation.tokens),
        "truncated": not generation.ended,
        "steps": generation.steps,
    }
