"""`bwsft distill`: traces of a model's own careful decodings, to train it for fewer passes.

The prompts of a training set are decoded one token a step (or as the options say). Kept are answers
that the scorer accepts, each with the denoising step of every token: records to train on with
`--objective.name distill`. They are written in shards, whole or not at all; the same command goes
on where it was.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext

from bwsft.commands.options import DistillOptions
from bwsft.data.chat_template import Prompt
from bwsft.data.records import normalize
from bwsft.data.traces import FIELD, NEVER
from bwsft.decoding.pipeline import Decoder
from bwsft.decoding.result import Generation
from bwsft.evaluation.answer_files import Output, join, read_references
from bwsft.evaluation.math_equality import MathVerifier
from bwsft.evaluation.pass_at_1 import score
from bwsft.utils import strict_json
from bwsft.utils.claims import lock_folder, new_folder
from bwsft.utils.files import write_atomic
from bwsft.utils.identity import short
from bwsft.utils.lines import say

FACTS = ".distill.json"  # what the shards of a folder were made with

Asked = tuple[Prompt, str]  # a question and its reference answer


def run_distill(options: DistillOptions) -> int:
    """Run `bwsft distill` and return the exit status; ValueError or OSError for bad input."""
    source = (options.data, options.task, options.subset, options.split, options.columns)
    asked = list(read_references(*source, usual_split="train").values())[: options.limit]
    decoder = Decoder.load(options.model, options)
    if decoder.config.method.revising:
        raise ValueError(f"rule {decoder.config.rule} revises tokens: a trace commits each once")
    if decoder.config.active_blocks > 1:
        raise ValueError("--active-blocks: the objective distill trains on blocks whose prefix is "
                         "finished, so decode one at a time")
    prompts = decoder.encode([question for question, _ in asked])
    facts = {
        "run": decoder.digest(), **decoder.identity(), "data": short(asked), "task": options.task,
        "shard": options.shard,
    }  # fmt: skip
    began = (options.out / FACTS).exists()
    with lock_folder(options.out) if began else new_folder(options.out):
        if not began:
            write_atomic(options.out / FACTS, json.dumps(facts) + "\n")
        check_facts(options, facts)
        kept, left_out = write_shards(options, decoder, prompts, asked)
    if not kept:
        raise ValueError(f"none of {len(asked)} answers can be trained on: {told(left_out)}")
    say(f"{kept} of {len(asked)} traces: {options.out}{told(left_out, ' (', ')')}")
    say(f"train on them: bwsft train PRESET --data {options.out} --objective.name distill")
    return 0


def check_facts(options: DistillOptions, facts: dict) -> None:
    """ValueError, saying what is another one, for a folder of other traces."""
    found = strict_json.read_object(options.out / FACTS)
    if changed := [name for name in facts if found.get(name) != facts[name]]:
        names = {"run": "settings", "data": "questions or answers"}
        what = " and ".join(names.get(name, name) for name in changed)
        raise ValueError(f"{options.out} was begun with other {what}: name another folder by --out")


def write_shards(
    options: DistillOptions, decoder: Decoder, prompts: Sequence[Sequence[int]],
    asked: Sequence[Asked],
) -> tuple[int, Counter[str]]:  # fmt: skip
    """Decode what has no shard yet; (traces in all shards, why answers of new ones were left out).
    """
    kept, left_out = 0, Counter()
    for start in range(0, len(asked), options.shard):
        path = options.out / f"traces-{start // options.shard:05}.jsonl"
        if not path.exists():
            some = slice(start, start + options.shard)
            found = list(decoder.answers(prompts[: some.stop], start, trace=True))
            lines = accepted(decoder, prompts[some], asked[some], found, options.task, left_out)
            write_atomic(path, "".join(json.dumps(record) + "\n" for record in lines))
        kept += path.read_bytes().count(b"\n")
    return kept, left_out


def accepted(
    decoder: Decoder, prompts: Sequence[Sequence[int]], asked: Sequence[Asked],
    found: Sequence[Generation], task: str, left_out: Counter[str],
) -> Iterator[dict]:  # fmt: skip
    """The records to train on of some answers; counts why others are none."""
    texts = [decoder.text(generation.tokens) for generation in found]
    outputs = [
        Output(question, text, reference)
        for (question, reference), text in zip(asked, texts, strict=True)
    ]
    with MathVerifier() if task == "math" else nullcontext() as verifier:
        scored = score(join(outputs, None)[0], task, verifier)
    each = zip(prompts, asked, texts, found, scored, strict=True)
    for prompt, (question, _), text, generation, judged in each:
        record = conversation(question, text)
        if not generation.ended:
            left_out["without an end token"] += 1
        elif not judged["correct"]:
            left_out["wrong"] += 1
        elif not text.strip() or not retold(decoder, record, prompt, generation):
            left_out["other tokens when read again as text"] += 1
        else:
            yield {**record, FIELD: steps_of(decoder, prompt, generation)}


def conversation(question: Prompt, text: str) -> dict:
    """A question and its answer as a record to train on."""
    if isinstance(question, str):
        return {"query": question, "response": text}
    return {"messages": [*question, {"role": "assistant", "content": text}]}


def retold(
    decoder: Decoder, record: dict, prompt: Sequence[int], generation: Generation
) -> bool:
    """Whether training reads the tokens that were decoded: a text may have several encodings."""
    template = decoder.template
    ((asked, answer),) = template.tokenize([template.prepare(normalize(record))])
    return (asked, answer[:-1]) == (list(prompt), generation.tokens)


def steps_of(decoder: Decoder, prompt: Sequence[int], generation: Generation) -> list[int]:
    """The denoising step of every response position, to the end of the end token's block."""
    from bwsft_kernels.block_grid import BlockGrid

    config, family = decoder.config, decoder.backbone.family
    grid = BlockGrid(config.block_size, family.block_origin)
    steps = [NEVER] * grid.filled(len(prompt), len(generation.tokens) + 1)
    for commit in generation.trace:
        if commit.position < len(steps):
            steps[commit.position] = commit.step
    return steps


def told(left_out: Counter[str], before: str = "", after: str = "") -> str:
    """Why answers were left out, as a text."""
    listed: Iterable[str] = (f"{count} {reason}" for reason, count in left_out.items())
    return before + ", ".join(listed) + after if left_out else ""
