"""`bwsft generate`: from prompt texts to answers, printed or in a JSONL that can be resumed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

from bwsft import config as c
from bwsft.answer_files import QUESTION_FIELDS, read_records
from bwsft.decoding import DecodeConfig
from bwsft.evaluate import Decode, Decoded
from bwsft.generate import Generation, check_request, decode_stream
from bwsft.models import Trained, load_trained
from bwsft.result_file import ResultFile
from bwsft.templates import Template

RECORDS = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True)
class GenerateOptions:
    """Answer one prompt, or every prompt of a file."""

    model: str | None = None
    """Run folder, checkpoint, model folder or Hub id; default: the embedded tiny LLaDA."""
    tokenizer: str | None = None
    """Tokenizer folder or Hub id; default: the model's own."""
    prompt: str | None = None
    """One prompt; its answer is printed."""
    prompts: Path | None = None
    """JSONL or JSON file of records with a question, query, problem or prompt; any other file is
    read as text with one prompt per line."""
    out: Path | None = None
    """JSONL of answers, one line per prompt in the order of the prompts, written as they come."""
    resume: bool = False
    """Go on with an --out file that an earlier, interrupted call began."""
    template: Literal["metamath", "chat", "none"] | None = None
    """Text around a prompt; default: what the model was trained with, else metamath."""
    gen_length: int | None = None
    """Response positions of the canvas; default: the model's training, else 128."""
    block_size: int | None = None
    """Tokens in a block; default: the model's training, else 32."""
    steps: int | None = None
    """Denoising steps for the whole canvas; default: one per token."""
    temperature: float = 0.0
    """0: the most probable token at every step; above: samples."""
    seed: int = 0
    """Seed of the samples; an answer does not depend on batch size or on the other prompts."""
    batch_size: int = 8
    """Prompts decoded together."""
    device: str = "auto"
    """auto: a CUDA device if there is one, else the CPU."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Dtype of the weights; auto: bfloat16 on CUDA, float32 on the CPU."""
    trace: Path | None = None
    """JSONL with step, position, token and confidence of every commitment, a line per prompt."""


def run_generate(options: GenerateOptions) -> int:
    """Run `bwsft generate` and return the exit status; ValueError or OSError for bad input."""
    questions = read_questions(options)
    for path in filter(None, (options.out, options.trace)):
        refuse_existing(path, options.resume)
    decoder = Decoder.load(options)
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
            print(summary(generation), file=sys.stderr)
    if out:
        print(f"{len(questions)} answers: {options.out}", file=sys.stderr)
    return 0


def make_decoder(options: GenerateOptions) -> Decode:
    """What `bwsft.evaluate.evaluate` decodes with: a function from questions to `Decoded`, in
    order. The model is loaded here; prompt, prompts, out, resume and trace are not read."""
    decoder = Decoder.load(options)

    def decode(questions: list[str]) -> Sequence[Decoded]:
        return [
            Decoded(decoder.text(found.tokens), len(found.tokens), found.ended)
            for found in decoder.answers(decoder.encode(questions))
        ]

    return decode


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


@dataclass(frozen=True)
class Decoder:
    """A loaded model with everything that turns a question into an answer."""

    trained: Trained
    template: Template
    config: DecodeConfig

    @classmethod
    def load(cls, options: GenerateOptions) -> Decoder:
        # Checked before a large model is read, as far as no default comes from the checkpoint.
        sizes = {"gen_length": options.gen_length, "block_size": options.block_size}
        own = {name: getattr(options, name) for name in ("temperature", "seed", "batch_size")}
        if None not in sizes.values():
            DecodeConfig(**sizes, **own, steps=options.steps)
        dtype = None if options.dtype == "auto" else getattr(torch, options.dtype)
        trained = load_trained(
            options.model, tokenizer=options.tokenizer, device=options.device, dtype=dtype
        )
        training = training_config(options.model, trained)
        for name in sizes:
            if sizes[name] is None:
                sizes[name] = training.get(name, getattr(DecodeConfig, name))
        name = options.template or training.get("dataset", {}).get("template", "metamath")
        config = DecodeConfig(**sizes, **own, steps=options.steps)
        return cls(trained, Template(trained.tokenizer, name), config)

    def encode(self, questions: list[str]) -> list[list[int]]:
        """Token ids of the prompts; ValueError for one that the model cannot take."""
        prompts = self.template.encode_prompts(questions)
        family = self.trained.backbone.family
        check_request(prompts, range(len(prompts)), family, self.config)
        return prompts

    def answers(
        self, prompts: list[list[int]], skip: int = 0, trace: bool = False
    ) -> Iterator[Generation]:
        """Decode the prompts behind the first `skip`, in order, with a progress bar. ValueError if
        the model produces NaN."""
        numbers = range(len(prompts))
        found = decode_stream(
            self.trained.backbone, prompts[skip:], self.config, trace=trace, requests=numbers[skip:]
        )
        options = {"total": len(prompts), "initial": skip, "disable": len(prompts) == 1}
        bar = tqdm(found, "decoding", unit=" prompts", smoothing=0, **options)
        try:
            yield from in_order(bar)
        except FloatingPointError as error:
            raise ValueError(f"{error} (--dtype float32)") from error

    def text(self, tokens: list[int]) -> str:
        return self.trained.tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def trace_record(self, generation: Generation) -> dict:
        """A generation's history as JSON: `commits` are [step, position, token, confidence]."""
        pieces = {commit.token: self.trained.tokenizer.decode([commit.token])
                  for commit in generation.trace}  # fmt: skip
        return {
            "gen_length": self.config.gen_length,
            "block_size": self.config.block_size,
            "tokens": pieces,
            "commits": [list(commit) for commit in generation.trace],
        }

    def digest(self) -> str:
        """12 hex digits that change with whatever decides an answer."""
        folder = Path(self.trained.folder)
        settings = dataclasses.asdict(self.config) | {
            "model": str(folder.resolve() if folder.exists() else folder),
            "template": self.template.name,
            "dtype": str(self.trained.backbone.head()[0].dtype),
            "end_ids": self.trained.backbone.family.end_ids,
        }
        del settings["batch_size"]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def training_config(model: str | None, trained: Trained) -> dict:
    """The config that the model was trained with; {} if it does not say. The embedded base is
    made for the debug preset."""
    if trained.state:
        return trained.state["config"]
    return dataclasses.asdict(c.debug()) if model is None else {}


def in_order(results: Iterator[tuple[int, Generation]]) -> Iterator[Generation]:
    """Results by index, each as soon as those before it are there."""
    waiting: dict[int, Generation] = {}
    following = 0
    for index, result in results:
        waiting[index] = result
        while following in waiting:
            yield waiting.pop(following)
            following += 1


def answer_record(text: str, generation: Generation) -> dict:
    """The fields that `bwsft evaluate --outputs` reads, and the steps."""
    return {
        "output": text,
        "tokens": len(generation.tokens),
        "truncated": not generation.ended,
        "steps": generation.steps,
    }


def summary(generation: Generation) -> str:
    ending = "" if generation.ended else "; no end token, so --gen-length may be too short"
    return f"[{len(generation.tokens)} tokens in {generation.steps} steps{ending}]"
