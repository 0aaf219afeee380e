"""One decoding in every variant of bench_generate.py, the published decoder among them."""

import functools
from dataclasses import dataclass, replace

import harness
import models
import shapes
import torch

from bwsft.backbones.base import Backbone
from bwsft.canvas import Canvas
from bwsft.decode_context import DecodeContext
from bwsft.decoding import DecodeConfig
from bwsft.generate import decoding, denoise, generate
from bwsft.request import make_rows

VARIANTS = {
    "naive": None,
    "exact": dict(context="exact"),
    "prefix": dict(context="prefix"),
    "cached": dict(context="cached"),
    "block_causal": dict(context="block_causal"),
    "threshold": dict(context="exact", rule="threshold"),
    "cached_threshold": dict(context="cached", rule="threshold"),
}


@dataclass
class Problem:
    """What is decoded: prompts of one length and responses with None where a token is wanted."""

    model: Backbone
    prompts: list[list[int]]
    canvases: list[list]
    block: int

    @property
    def wanted(self) -> int:
        """Open tokens of every response."""
        return sum(token is None for token in self.canvases[0])

    def config(self, options: dict) -> DecodeConfig:
        return DecodeConfig(
            gen_length=len(self.canvases[0]), block_size=self.block, stop_at_end=False,
            batch_size=len(self.prompts), **options,
        )  # fmt: skip


@dataclass
class Decoded:
    tokens: torch.Tensor  # [S, wanted]
    passes: int  # forwards that a row took part in
    steps: int  # denoising steps


def make_problem(model, shape: tuple[int, int, int], block: int, blocks: int) -> Problem:
    """Random ids; shape: prompt, gen and batch; the first `blocks` blocks are open."""
    prompt, gen, batch = shape
    generator = torch.Generator().manual_seed(0)

    def draw(count):
        most = min(model.family.mask_id, model.family.eos_id)
        return torch.randint(0, most, (batch, count), generator=generator).tolist()

    wanted = min(blocks * block, gen)
    given = [[None] * wanted + row for row in draw(gen - wanted)]
    return Problem(model, draw(prompt), given, block)


def trained_problem(device, batch: int = 8) -> Problem:
    """Test problems for the embedded model, whole responses open."""
    from bwsft.decoder import Decoder, DecoderOptions
    from bwsft.wordproblems import generate as word_problems

    decoder = Decoder.load(None, DecoderOptions(device=device.type, dtype="float32"))
    questions = [record["query"] for record in word_problems(8 * batch, split="test")]
    prompts = decoder.encode(questions)
    # The published decoder takes rows of one length.
    groups = [[p for p in prompts if len(p) == n] for n in {len(p) for p in prompts}]
    chosen = max(groups, key=len)[:batch]
    return Problem(decoder.trained.backbone, chosen, [[None] * 40] * len(chosen), 8)


@torch.no_grad()
def published(problem: Problem) -> Decoded:
    """LLaDA's decoder as published: full logits and softmax of every row, top-1 per step, block
    by block. [MASK] is banned as in ours."""
    mask, model = problem.model.family.mask_id, problem.model
    filled = [[mask if token is None else token for token in row] for row in problem.canvases]
    rows = [a + b for a, b in zip(problem.prompts, filled, strict=True)]
    ids = torch.tensor(rows, device=model.head()[0].device)
    first = len(problem.prompts[0])
    for start in range(first, first + problem.wanted, problem.block):
        stop = start + problem.block
        for _ in range(problem.block):
            published_step(model, ids, stop)
    tokens = ids[:, first : first + problem.wanted]
    return Decoded(tokens, problem.wanted, problem.wanted)


def published_step(model, ids, stop: int) -> None:
    mask = model.family.mask_id
    logits = model.model(input_ids=ids).logits
    logits[..., mask] = -torch.inf
    token = logits.argmax(-1)
    confidence = logits.softmax(-1).gather(-1, token[..., None])[..., 0]
    confidence = confidence.masked_fill(ids != mask, -torch.inf)
    confidence[:, stop:] = -torch.inf
    best = confidence.topk(1, dim=-1).indices
    ids.scatter_(1, best, token.gather(1, best))


def decode(problem: Problem, name: str) -> Decoded:
    if VARIANTS[name] is None:
        return published(problem)
    config = problem.config(VARIANTS[name])
    found = generate(
        problem.model, problem.prompts, config, canvases=problem.canvases, trace=True
    )
    tokens = torch.full((len(found), problem.wanted), -1)
    for row, result in enumerate(found):
        for commit in result.trace:
            tokens[row, commit.position] = commit.token
    return Decoded(tokens, max(r.passes for r in found), max(r.steps for r in found))


def step_of(problem: Problem, name: str, found: dict):
    """A whole decoding; what it found goes to found[name]."""

    def step():
        found[name] = decode(problem, name)
        yield "decode"

    return step


@torch.no_grad()
def hollow_step(problem: Problem, context: str | None):
    """One row of the batch with weights that are hollow, by a context mode or (None) the published
    loop. Nothing can be read back: a token a step."""
    row = replace(problem, prompts=problem.prompts[:1], canvases=problem.canvases[:1])
    if context is None:
        mask = row.model.family.mask_id
        ids = [mask if token is None else token for token in row.canvases[0]]
        ids = torch.tensor([row.prompts[0] + ids])
        for _ in range(row.wanted):
            row.model.model(input_ids=ids)
        yield "decode"
        return
    config, weight = row.config({"context": context}), row.model.head()[0]
    rows = make_rows(row.prompts, row.canvases, [0], row.model.family, config)
    canvas = Canvas.begin(rows, row.model.family, weight)
    with decoding(row.model, weight):
        context = DecodeContext.begin(row.model, config, canvas)
        for step, turn in enumerate(rows[0].plan):
            before = canvas.ids.clone()
            denoise(row.model, context, canvas, [turn], step)
            canvas.ids.copy_(before)  # what it committed has no value; the plan counts its rows
    yield "decode"


@functools.cache
def hollow_flops(
    size: str, shape: tuple[int, int, int], block: int, blocks: int, context: str | None
) -> int:
    """FLOPs of a decoding, counted on one row without values; all layers but the last cost the
    same, so two and three layers tell the cost of any number."""
    two, three = (
        harness.count_flops(
            lambda n=n: hollow_step(
                make_problem(models.hollow_backbone(size, n), shape, block, blocks), context
            )
        )
        for n in (2, 3)
    )
    return shape[2] * (two + (shapes.SIZES[size]["n_layers"] - 2) * (three - two))


def context_of(name: str) -> str | None:
    """The context mode of a variant; None: the published loop."""
    return VARIANTS[name] and VARIANTS[name]["context"]
