"""`bwsft generate`: from prompt texts to answers, printed or in a JSONL that can be resumed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from bwsft.commands.options import GenerateOptions
from bwsft.data.chat_template import Prompt
from bwsft.data.columns import Columns
from bwsft.data.file_formats import FORMATS, format_of
from bwsft.data.records import question
from bwsft.decoding.pipeline import Decoder
from bwsft.decoding.result_file import ResultFile, result_file
from bwsft.decoding.summary import line_of
from bwsft.evaluation.answer_files import read_records, read_text
from bwsft.utils import lines
from bwsft.utils.lines import say
from bwsft.utils.parallelism import per_forward


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
        totals = answer_all(decoder, prompts, out, trace, options.prompt is not None)
    if out:
        rate = per_forward(*totals)
        figures = "" if rate is None else f", {rate:.2f} tokens per forward pass (TPF)"
        say(f"{len(questions)} answers: {options.out}{figures}", file=sys.stderr)
    return 0


def answer_all(
    decoder: Decoder, prompts: Sequence[Sequence[int]], out: ResultFile | None,
    trace: ResultFile | None, shown: bool,
) -> list[int]:  # fmt: skip
    """Decode the prompts that have no answer in `out` yet, into the files and the terminal; returns
    the tokens and the forward passes of all answers that say theirs."""
    done = len(out.lines) if out else 0
    before = [json.loads(line) for line in out.lines] if out else []
    known = [record for record in before if "passes" in record]  # earlier releases had none
    totals = [sum(record[name] for record in known) for name in ("tokens", "passes")]
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
            say(line_of(generation), file=sys.stderr)
        totals[0] += len(generation.tokens)
        totals[1] += generation.passes
    return totals


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
