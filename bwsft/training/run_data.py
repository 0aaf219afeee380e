"""The examples of a run: which are trained on, which are held out, and how a batch is laid out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from bwsft import config as c
from bwsft.data import packing, word_problems
from bwsft.data.dataset import TokenizedSet, load_set
from bwsft.data.examples import DataOptions
from bwsft.data.file_formats import Row, places
from bwsft.data.packing import Batch, CanvasLayout, pack, split_holdout
from bwsft.data.selection import lengths_of
from bwsft.data.sources import Source
from bwsft.data.traces import Traces
from bwsft.models.backbone import Family
from bwsft.objectives import blockwise
from bwsft.objectives.nelbo import HeldOut
from bwsft.objectives.uniform import HeldOutUniform, Uniform
from bwsft.utils.lines import say

HOLDOUT = 64  # most examples that are held out where the config leaves it open
GENERATED = 20_000  # word problems of a run without a file, those held out included
# Held-out examples and their masks don't follow --seed, nor do generated problems: what differs
# between two seeds is then the training alone.
FIXED_SEED = 0


@dataclass(frozen=True)
class TrainingData:
    """A tokenized set, its held-out part, and how a batch is laid out."""

    examples: TokenizedSet
    train_index: np.ndarray
    holdout_index: np.ndarray
    layout: CanvasLayout
    each: np.ndarray | None = None
    """[R, 3] (example, block, blocks of the example): an epoch is these rows in random order, not
    the examples (--objective.blocks each)."""
    traces: Traces | None = None
    """How each response was decoded (--objective.name distill)."""

    @property
    def epoch(self) -> int:
        """Sequences of one epoch."""
        return len(self.train_index if self.each is None else self.each)

    def samples(self, step: int, batch_size: int, seed: int) -> list[tuple[int, int]]:
        """(example index, earlier visits) of every sequence of optimizer update `step`."""
        samples = packing.samples(step, batch_size, self.epoch, seed)
        if self.each is None:
            return [(int(self.train_index[i]), visit) for i, visit in samples]
        # A traversal is M visits: the objective finds block and traversal in the visit's number.
        rows = [(self.each[i].tolist(), epoch) for i, epoch in samples]
        return [(example, epoch * blocks + block) for (example, block, blocks), epoch in rows]

    def pack(self, samples: list[tuple[int, int]]) -> Batch:
        batch = pack([self.examples.example(i, visit) for i, visit in samples], self.layout)
        if self.traces is None:
            return batch
        return self.traces.onto(batch, [int(self.examples.record_numbers[i]) for i, _ in samples])

    def sample_ids(self, samples: list[tuple[int, int]]) -> list[int]:
        return [int(self.examples.sample_ids[i]) for i, _ in samples]

    def response_tokens(self, samples: list[tuple[int, int]]) -> int:
        """Response tokens of these sequences, end tokens and fill included."""
        pairs = (self.examples.lengths(i) for i, _ in samples)
        return sum(self.layout.lengths(*pair)[0] for pair in pairs)

    def responses(self) -> Iterator[np.ndarray]:
        """Token ids of the training responses as the loss sees them, with their fill."""
        for i in self.train_index.tolist():
            response = self.examples.response(i)
            fill = self.layout.lengths(*self.examples.lengths(i))[0] - len(response)
            yield np.pad(response, (0, fill), constant_values=self.layout.eos_id)

    def holdout_batches(self, size: int) -> Iterator[Batch]:
        for start in range(0, len(self.holdout_index), size):
            yield self.pack([(int(i), 0) for i in self.holdout_index[start : start + size]])


def layout_of(config: c.Config, family: Family) -> CanvasLayout:
    """What comes after a response of a run `config` on a model `family`."""
    if None in (config.gen_length, config.max_length):
        raise ValueError("gen_length and max_length must be numbers here, such as 128 and 256")
    return CanvasLayout(
        canvas=config.dataset.canvas, block_size=config.block_size, gen_length=config.gen_length,
        max_length=config.max_length, mask_id=family.mask_id, eos_id=family.eos_id,
        block_origin=family.block_origin,
    )  # fmt: skip


def held_out(config: c.Config, family: Family) -> HeldOut:
    """The draws of the held-out NELBO, or of what takes its place."""
    spec = dataclasses.replace(blockwise.mask_spec(config, family), seed=FIXED_SEED)
    if family.noise == "mask":
        return HeldOut(spec=spec, count=config.eval.draws)
    objective = Uniform.of(dataclasses.replace(config, seed=FIXED_SEED), family)
    return HeldOutUniform(spec=spec, count=config.eval.draws, objective=objective)


def data_options(config: c.Config, family: Family) -> DataOptions:
    """How the records of a run become examples for a model of this family."""
    return DataOptions(
        template=config.dataset.template, template_args=config.dataset.template_args,
        columns=config.dataset.columns, turns=config.dataset.turns, on_bad=config.dataset.on_bad,
        exclude_type=config.dataset.exclude_type, subset=config.dataset.subset,
        split=config.dataset.split, max_length=config.max_length,
        gen_length=config.gen_length, vocab_size=family.vocab_size,
        mask_id=family.mask_id if family.noise == "mask" else None,
        layout=layout_of(config, family), max_positions=family.max_positions,
    )  # fmt: skip


def follow_data(
    config: c.Config, tokenizer: Any, family: Family, records: Any = None
) -> c.Config:
    """The config with numbers for the lengths that it leaves open; `records` as in plan_data.

    gen_length is the least multiple of the block size that holds 99 % of the responses and leaves
    room for 90 % of the prompts, max_length the longest example, up to the model's positions.
    ValueError for options that such lengths do not fit.
    """
    size, positions = config.block_size, family.max_positions
    if None not in (config.gen_length, config.max_length):
        return config
    longest = positions if config.max_length is None else config.max_length
    options = data_options(
        dataclasses.replace(config, gen_length=size, max_length=longest), family
    )
    source = source_of(config)[0] if records is None else records
    whole = load_set(source, tokenizer, options, config.dataset.cache_dir)
    first = slice(config.dataset.limit)
    lengths = whole.prompt_lengths[first], whole.response_lengths[first]
    prompts, responses, both = lengths_of(*lengths)
    needed, room = responses.quantile(0.99), prompts.quantile(0.1, below=positions)
    fitted = max(min(-(-needed // size), room // size), 1) * size
    found = dataclasses.replace(
        config,
        gen_length=fitted if config.gen_length is None else config.gen_length,
        max_length=min(longest, both.quantile(1.0)),
    )
    say(f"lengths of the data: --gen-length {found.gen_length} --max-length {found.max_length}")
    c.validate(found)  # as a run that goes on from what is stored has to be
    return found


def hold_out(config: c.Config, count: int, holdout: float | None = None) -> int:
    """How many of `count` examples to hold out: config.dataset.holdout, or in its place `holdout`,
    a number or below 1 a share. ValueError if nothing would be left."""
    tenth = max(count // 10, 1) if count > 1 else 0
    asked = config.dataset.holdout if holdout is None else holdout
    if asked is None:
        asked = min(HOLDOUT, tenth)
    held = math.ceil(asked * count) if asked < 1 else int(asked)
    if held >= count:
        raise ValueError(
            f"--dataset.holdout {held} leaves nothing of {count} examples to train on; give "
            f"--dataset.holdout {tenth}"
        )
    return held


def source_of(config: c.Config) -> tuple[Any, int]:
    """(a file, a Hub id or generated problems; how many records at its end are to be held out).

    Where the data has a seed of its own these are test problems: no training problem has their
    numbers. Elsewhere the hold-out is a random part, and the second value is 0.
    """
    generated = word_problems.named(config.data)
    if generated is None:
        return config.data, 0
    if generated.seed is None:
        return source_of_problems(generated, GENERATED, 0), 0
    count = min(config.dataset.limit or GENERATED, GENERATED)
    tests = hold_out(config, count)
    return source_of_problems(generated, count, tests), tests


def source_of_problems(generated: word_problems.Generated, count: int, tests: int) -> Source:
    """So many generated problems, the last ones of the test split; tokenized once, as a file is."""
    seed = FIXED_SEED if generated.seed is None else generated.seed

    def rows() -> Iterator[Row]:
        problems = generated.problems(count - tests, seed)
        return places(problems + generated.problems(tests, seed, "test"), "the list")

    return Source("the list", f"{generated} {count} {tests}", count, rows)


def plan_data(
    config: c.Config, tokenizer: Any, family: Family, records: Any = None,
    holdout: float | None = None,
) -> TrainingData:  # fmt: skip
    """Tokenize, report what was dropped, check lengths against the model, hold some out.

    `records`: in place of config.data, anything that data.sources.open_source takes; `holdout`: a
    number in place of config.dataset.holdout, or below 1 a share of the examples.
    """
    source, tests = source_of(config) if records is None else (records, 0)
    examples = load_set(source, tokenizer, data_options(config, family), config.dataset.cache_dir)
    traces = None
    if config.objective.name == "distill":
        traces = Traces.read(source, config.dataset.subset, config.dataset.split)
        examples = traces.of_examples(examples)
    say(examples.summary())
    if config.dataset.limit is not None:
        examples = examples.select(np.arange(min(config.dataset.limit, len(examples))))
        say(f"  using the first {len(examples):,} (--dataset.limit)")
    layout = layout_of(config, family)
    count = hold_out(config, len(examples), holdout)
    if tests:
        is_test = examples.record_numbers >= source.total - tests
        split = np.flatnonzero(~is_test), np.flatnonzero(is_test)
    else:
        split = split_holdout(examples.record_numbers, count, FIXED_SEED)
    each = every_block(examples, split[0], layout) if config.objective.blocks == "each" else None
    return TrainingData(examples, *split, layout, each, traces)


def every_block(examples: TokenizedSet, index: np.ndarray, layout: CanvasLayout) -> np.ndarray:
    """Rows (example, block, blocks of the example) of one traversal of the examples at `index`."""
    rows = []
    for i in index.tolist():
        prompt, response = examples.lengths(i)
        filled, _ = layout.lengths(prompt, response)
        blocks = layout.grid.num_blocks(prompt, filled)
        rows += [(i, block, blocks) for block in range(blocks)]
    return np.array(rows)
