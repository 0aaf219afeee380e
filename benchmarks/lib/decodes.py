"""One decoding in every variant of bench_generate.py, the published decoder among them."""

import functools
from dataclasses import dataclass, replace

import torch
from lib import harness, models, shapes
from transformers import LlamaConfig, LlamaForCausalLM

from bwsft.decoding.canvas import Canvas
from bwsft.decoding.config import RULES, DecodeConfig
from bwsft.decoding.context import DecodeContext
from bwsft.decoding.generate import decoding, denoise, generate
from bwsft.decoding.request import make_rows
from bwsft.models.backbone import Backbone
from bwsft.models.verifier import Verifier, new_verifier

VARIANTS = {
    "naive": None,
    "exact": dict(context="exact"),
    "prefix": dict(context="prefix"),
    "cached": dict(context="cached"),
    "block_causal": dict(context="block_causal"),
    "threshold": dict(context="exact", rule="threshold"),
    "cached_threshold": dict(context="cached", rule="threshold"),
}
# The related work's rules, on request.
RELATED = {
    "first_hitting": dict(context="exact", rule="first_hitting"),
    "routed": dict(context="exact", rule="routed", revise="uncond"),
    "rcr": dict(context="exact", rule="rcr"),
    "edit": dict(context="exact", rule="edit"),
    "apd": dict(context="exact", rule="apd"),
}
EVERY = VARIANTS | RELATED


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

    @functools.cached_property
    def verifier(self) -> Verifier:
        """A random Llama of a quarter of the model's width and half of its layers: 1/32 of the
        layers' FLOPs for a token, and 1/4 of the head's. Its logits drown the model's, so that they
        agree by chance only: near-uniform ones would agree to everything."""
        core, family = self.model.base_model.config, self.model.family
        heads = max(1, core.n_heads // 4)
        config = LlamaConfig(
            hidden_size=heads * (core.d_model // core.n_heads), num_attention_heads=heads,
            intermediate_size=core.mlp_hidden_size // 4, vocab_size=family.vocab_size,
            num_hidden_layers=max(1, core.n_layers // 2),
            max_position_embeddings=family.max_positions,
        )  # fmt: skip
        weight = self.model.head()[0]
        with torch.random.fork_rng(), torch.device(weight.device):
            torch.manual_seed(0)
            verifier = LlamaForCausalLM(config)
        with torch.no_grad():
            verifier.lm_head.weight.mul_(1000)
        return new_verifier(verifier.to(weight.dtype))

    def config(self, options: dict) -> DecodeConfig:
        return DecodeConfig(
            gen_length=len(self.canvases[0]), block_size=self.block, stop_at_end=False,
            batch_size=len(self.prompts), **options,
        )  # fmt: skip


@dataclass
class Decoded:
    tokens: torch.Tensor  # [S, wanted]
    passes: int  # forwards that a sequence took part in
    steps: int  # denoising steps


def make_problem(model: Backbone, shape: tuple[int, int, int], block: int, blocks: int) -> Problem:
    """Random ids; shape: prompt, gen and batch; the first `blocks` blocks are open."""
    prompt, gen, batch = shape
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> list[list[int]]:
        most = min(model.family.mask_id, model.family.eos_id)
        return torch.randint(0, most, (batch, count), generator=generator).tolist()

    wanted = min(blocks * block, gen)
    given = [[None] * wanted + row for row in draw(gen - wanted)]
    return Problem(model, draw(prompt), given, block)


def trained_problem(device: torch.device, batch: int = 8) -> Problem:
    """Test problems for the embedded model, whole responses open."""
    from bwsft.data.word_problems import generate as word_problems
    from bwsft.decoding.pipeline import Decoder
    from bwsft.decoding.settings import DecoderOptions

    decoder = Decoder.load(None, DecoderOptions(device=device.type, dtype="float32"))
    questions = [record["query"] for record in word_problems(8 * batch, split="test")]
    prompts = [list(ids) for ids in decoder.encode(questions)]
    # The published decoder takes prompts of one length.
    groups = [[p for p in prompts if len(p) == n] for n in {len(p) for p in prompts}]
    chosen = max(groups, key=len)[:batch]
    return Problem(decoder.trained.backbone, chosen, [[None] * 40] * len(chosen), 8)


@torch.no_grad()
def published(problem: Problem) -> Decoded:
    """LLaDA's decoder as published: full logits and softmax of every position, top-1 per step,
    block by block. [MASK] is banned as in ours."""
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


def published_step(model: Backbone, ids: torch.Tensor, stop: int) -> None:
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
    return published(problem) if EVERY[name] is None else decode_by(problem, EVERY[name])


def decode_by(problem: Problem, options: dict) -> Decoded:
    """Decode with these options of DecodeConfig."""
    config = problem.config(options)
    found = generate(
        problem.model, problem.prompts, config, canvases=problem.canvases, trace=True,
        verifier=problem.verifier if config.method.needs_verifier else None,
    )  # fmt: skip
    tokens = torch.full((len(found), problem.wanted), -1)
    for row, result in enumerate(found):
        for commit in result.trace:  # a later one replaces an earlier one
            tokens[row, commit.position] = commit.token
    return Decoded(tokens, max(r.passes for r in found), max(r.steps for r in found))


def facts(problem: Problem, name: str) -> tuple[dict, dict] | None:
    """Two sets of options under which a rule must commit the same tokens: its own, and those of a
    simpler rule. With a step for each block a rule has nothing to choose but the tokens."""
    blocks = len(problem.canvases[0]) // problem.block
    whole = {"steps": blocks}
    return {
        "first_hitting": ({"rule": "first_hitting", **whole}, whole),
        "routed": ({"rule": "routed", "revise": "never"}, {}),
        "rcr": ({"rule": "rcr", **whole}, whole),
        "edit": ({"rule": "edit", "edit_threshold": 1.0}, {"rule": "threshold"}),
        "apd": ({"rule": "apd", "mixture": 1.0, "lookahead": problem.block}, whole),
    }.get(name)


def step_of(problem: Problem, name: str, found: dict[str, Decoded]) -> harness.Step:
    """A whole decoding; what it found goes to found[name]."""

    def step():
        found[name] = decode(problem, name)
        yield "decode"

    return step


@torch.no_grad()
def hollow_step(problem: Problem, options: tuple | None):
    """One row of the batch with weights that are hollow, by options of DecodeConfig as pairs, or
    (None) the published loop. Nothing can be read back: a token a step."""
    row = replace(problem, prompts=problem.prompts[:1], canvases=problem.canvases[:1])
    if options is None:
        mask = row.model.family.mask_id
        ids = [mask if token is None else token for token in row.canvases[0]]
        ids = torch.tensor([row.prompts[0] + ids])
        for _ in range(row.wanted):
            row.model.model(input_ids=ids)
        yield "decode"
        return
    config, weight = row.config(dict(options)), row.model.head()[0]
    rows = list(make_rows(row.prompts, row.canvases, [0], row.model.family, config))
    canvas = Canvas.begin(rows, row.model.family, weight)
    with decoding(row.model, weight):
        context = DecodeContext.begin(row.model, config, canvas)
        for step, planned in enumerate(rows[0].plan):
            before = canvas.ids.clone()
            denoise(context, canvas, [planned], step)
            canvas.ids.copy_(before)  # what it committed has no value; the plan counts its rows
    yield "decode"


@functools.cache
def hollow_flops(
    size: str, shape: tuple[int, int, int], block: int, blocks: int, options: tuple | None
) -> int:
    """FLOPs of a decoding, counted on one sequence without values."""

    def count(layers: int) -> int:
        problem = make_problem(models.hollow_backbone(size, layers), shape, block, blocks)
        return harness.count_flops(lambda: hollow_step(problem, options))

    return shape[2] * harness.of_layers(shapes.SIZES[size]["n_layers"], count)


def planned(name: str) -> tuple | None:
    """A variant's options as pairs, to be counted: those of a rule whose steps are known
    beforehand, else its context alone. None: the published loop."""
    options = EVERY[name]
    if options is None:
        return None
    dynamic = RULES[options.get("rule", "quota")].dynamic
    return tuple((k, v) for k, v in options.items() if k == "context" or not dynamic)
