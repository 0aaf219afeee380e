"""The decoder against a plain one, row against batch, noise against probabilities; its thrift."""

import dataclasses
import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_decoding
import torch
from thinning import thinned
from tiny_decoding import MASK, MODES, VOCABULARY, until_end
from torch.utils._python_dispatch import TorchDispatchMode

import bwsft.decoding.choice
import bwsft.decoding.generate
from bwsft.decoding.canvas import Canvas, Row
from bwsft.decoding.config import DecodeConfig
from bwsft.decoding.context import DecodeContext
from bwsft.decoding.generate import decode_stream, generate
from bwsft.decoding.request import make_rows
from bwsft.decoding.result import Commit
from bwsft.models.backbone import Backbone, Family
from bwsft.models.kv_cache import CacheShape, ContextCache
from bwsft.models.lora import add_lora

traced = partial(generate, trace=True)


prompts_of = partial(tiny_decoding.prompts_of, low=0)


def model_of(seed=0, dtype=torch.float64, ends=1.5, family=None, **changes) -> Backbone:
    return tiny_decoding.model_of(seed, ends, dtype, changes, **(family or {}))


def plain_decode(model, prompt, config: DecodeConfig):
    """LLaDA's published decoder, row by row, with [MASK] out of the choice: full logits over the
    whole canvas, softmax confidence, topk of the quota, every step of every block.

    Returns the response and (step, position, token, confidence) of every commitment.
    """
    size, first = config.block_size, len(prompt)
    grid = 0 if model.family.block_origin == "absolute" else first
    x = torch.tensor(tiny_decoding.open_canvas(model, prompt, config))
    block_of = (torch.arange(len(x)) - grid) // size
    steps = size if config.steps is None else config.steps * size // config.gen_length
    commits, step = [], 0
    for block in block_of[first:].unique().tolist():
        here = (block_of == block) & (torch.arange(len(x)) >= first)
        total = int(here.sum())
        for i in range(steps):
            quota = total // steps + (1 if i < total % steps else 0)
            with torch.no_grad():
                logits = model.model(x[None]).logits[0]
            if model.family.logit_shift:
                logits = torch.cat([logits[:1], logits[:-1]])
            choice = logits.clone()
            choice[:, MASK] = -torch.inf
            token = choice.argmax(-1)
            confidence = logits.softmax(-1).gather(1, token[:, None])[:, 0]
            confidence = torch.where(here & (x == MASK), confidence, -torch.inf)
            picked = sorted(confidence.topk(quota).indices.tolist())
            x[picked] = token[picked]
            commits += [(step, p - first, int(token[p]), float(confidence[p])) for p in picked]
            step += quota > 0
    text = x[first:].tolist()[: config.gen_length]
    return text, [commit for commit in commits if commit[1] < config.gen_length]


VARIANTS = {
    "llada": {},
    "absolute": {"family": {"block_origin": "absolute"}},
    "shifted": {"family": {"logit_shift": 1}},
    "both": {"family": {"block_origin": "absolute", "logit_shift": 1}},
    "tied": {"weight_tying": True},
}


@pytest.mark.parametrize("variant", thinned(reversed(VARIANTS)))
def test_text_equals_the_published_decoder(variant):
    """Token for token up to the end, over random models, block sizes, quotas and ragged batches."""
    early = ended = total = saved = distinct = 0
    for seed in range(14):
        draw = random.Random(seed)
        model = model_of(seed, **VARIANTS[variant])
        size, blocks = draw.choice([(1, 9), (3, 4), (4, 4), (8, 2), (8, 3), (16, 1)])
        per_block = draw.choice([1, 2, 3, size, size + 2])
        config = DecodeConfig(size * blocks, size, steps=per_block * blocks, batch_size=3)
        lengths = [draw.randint(1, 20) for _ in range(5)]
        prompts = prompts_of(seed, lengths)
        for prompt, result in zip(prompts, traced(model, prompts, config), strict=True):
            response, commits = plain_decode(model, prompt, config)
            assert (result.tokens, result.ended) == until_end(response)
            expected = [c for c in commits if c[0] < result.steps]
            assert [c[:3] for c in result.trace] == [c[:3] for c in expected]
            confidences = [c.confidence for c in result.trace]
            assert confidences == pytest.approx([c[3] for c in expected], rel=1e-9)
            steps = commits[-1][0] + 1
            total, ended, saved = total + 1, ended + result.ended, saved + steps - result.steps
            early += result.steps < steps
            distinct += len(set(response)) > 2
    # The comparison means something: rows end early, others fill their canvas, text varies.
    assert early >= total // 4 and ended < total and saved > total and distinct >= total // 3


@pytest.mark.parametrize("variant", ["llada", "absolute"])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_row_alone_is_the_row_in_a_batch(variant, temperature):
    lengths = (9, 1, 4, 15, 2)
    for seed in range(6):
        model = model_of(seed, **VARIANTS[variant])
        config = DecodeConfig(16, 4, steps=8, temperature=temperature, seed=seed, batch_size=4)
        prompts = prompts_of(seed, lengths)
        together = traced(model, prompts, config)
        backwards = traced(model, prompts[::-1], config, requests=range(4, -1, -1))[::-1]
        for i, prompt in enumerate(prompts):
            alone = traced(model, [prompt], config, requests=[i])[0]
            for other in (together[i], backwards[i]):
                assert (other.tokens, other.ended, other.steps) == (
                    alone.tokens, alone.ended, alone.steps
                )  # fmt: skip
                assert [c[:3] for c in other.trace] == [c[:3] for c in alone.trace]


class Biased(torch.nn.Module):
    """Two tokens and [MASK], the same logits everywhere."""

    family = Family(mask_id=2, eos_id=0, end_ids=(), vocab_size=3, max_positions=10**6)

    def __init__(self, logits):
        super().__init__()
        self.weight = torch.tensor(logits, dtype=torch.float64)[:, None]
        self.eval()

    def head(self):
        return self.weight, None

    def hidden_states(
        self, ids, position_ids, cu_seqlens, context=None, *, max_length, wanted, plan=None,
        slots=None,
    ):
        if context is not None:
            owner = torch.zeros_like(ids)
            self.write(context, context.slots_of(owner, position_ids))
        return torch.ones(wanted.numel(), 1, dtype=torch.float64)

    def active_hidden_states(self, ids, span, cache, wanted=None):
        cache.seen(self.write(cache, cache.slots(span.positions(), span.repeats())))
        cache.plan(span.width)
        rows = ids if wanted is None else wanted
        return torch.ones(rows.numel(), 1, dtype=torch.float64)

    def write(self, cache, slots):
        values = self.weight.new_zeros(slots.numel(), 1, 2)
        return cache.write(0, slots, values, values)[0]

    def new_cache(self, num_sequences, length):
        return ContextCache.allocate(CacheShape(1, 1, 2), num_sequences, length, self.weight)

    def predicting_rows(self, rows):
        return rows

    fill = Backbone.fill


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("block_size", [1, 20])
def test_frequencies_at_a_temperature(temperature, block_size):
    """Whole blocks are committed at once: an order by confidence would favour likely tokens."""
    gap, n = 0.9, 6000
    model = Biased([gap, 0.0, 5.0])
    config = DecodeConfig(
        60, block_size, steps=60 // block_size, temperature=temperature, seed=11, batch_size=100
    )
    rows = traced(model, [[0]] * (n // 60), config)
    tokens = torch.tensor([row.tokens for row in rows])
    p = 1 / (1 + np.exp(-gap / temperature))

    def within(count, n, p):  # 4 standard deviations, 1 in 16,000
        return abs(int(count) - n * p) < 4 * (n * p * (1 - p)) ** 0.5

    assert within((tokens == 0).sum(), n, p)
    # Neighbours in a row and in the batch are independent: they agree as often as chance has it.
    agree = p**2 + (1 - p) ** 2
    for a, b in ((tokens[:, 1:], tokens[:, :-1]), (tokens[1:], tokens[:-1])):
        assert within((a == b)[::2, ::2].sum(), (a == b)[::2, ::2].numel(), agree)
    # Confidence is the model's own: without noise, at temperature 1, [MASK] in the normalizer.
    own = torch.tensor([gap, 0.0, 5.0], dtype=torch.float64).softmax(0)
    for commit in rows[0].trace:
        assert commit.confidence == pytest.approx(float(own[commit.token]), rel=1e-12)


def test_seeds_and_requests():
    model = model_of(1)
    prompts = prompts_of(0, (5, 5, 5))
    prompts = [prompts[0]] * 3
    config = DecodeConfig(16, 8, temperature=2.0, stop_at_end=False)
    first = traced(model, prompts, config)
    assert traced(model, prompts, config) == first
    assert first[0].trace != first[1].trace != first[2].trace
    assert generate(model, prompts, dataclasses.replace(config, seed=1)) != first
    shifted = traced(model, prompts, config, requests=[1, 2, 3])
    assert [r.tokens for r in shifted[:2]] == [r.tokens for r in first[1:]]
    greedy = dataclasses.replace(config, temperature=0.0)
    same = generate(model, prompts, greedy)
    assert [r.tokens for r in same] == [same[0].tokens] * 3
    assert generate(model, prompts, dataclasses.replace(greedy, seed=9)) == same


def spy(monkeypatch, model):
    """Records of every forward: lengths of its rows, rows of its last layer, rows of the head."""
    seen, hidden_states, argmax = [], model.hidden_states, bwsft.decoding.choice.linear_argmax

    def forward(ids, position_ids, cu_seqlens, *, max_length, wanted):
        lengths = cu_seqlens.diff().tolist()
        assert max_length == max(lengths) and sum(lengths) == len(ids)
        seen.append([sorted(lengths), wanted.numel()])
        return hidden_states(ids, position_ids, cu_seqlens, max_length=max_length, wanted=wanted)

    def head(hidden, *args, **options):
        seen[-1].append(len(hidden))
        return argmax(hidden, *args, **options)

    monkeypatch.setattr(model, "hidden_states", forward)
    monkeypatch.setattr(bwsft.decoding.choice, "linear_argmax", head)
    return seen


def test_retired_rows_cost_nothing(monkeypatch):
    model = model_of(12)
    prompts = prompts_of(12, (2, 5, 9, 12))
    config = DecodeConfig(24, 8, steps=12, batch_size=4)
    seen = spy(monkeypatch, model)
    results = generate(model, prompts, config)
    steps = [result.steps for result in results]
    assert len(set(steps)) == 4  # each leaves at its own time
    assert len(seen) == max(steps)
    for step, (lengths, *_) in enumerate(seen):
        alive = [len(p) + 24 for p, n in zip(prompts, steps, strict=True) if n > step]
        assert lengths == sorted(alive)


def test_the_head_sees_masked_rows_of_the_active_block_only(monkeypatch):
    model = model_of(3)
    seen = spy(monkeypatch, model)
    config = DecodeConfig(24, 8, steps=9, batch_size=2, stop_at_end=False)
    generate(model, prompts_of(3, (2, 5)), config)
    # Quotas 3, 3, 2 of a block of 8, in two rows.
    assert [head for *_, head in seen] == [16, 10, 4] * 3
    assert [last_layer for _, last_layer, _ in seen] == [16] * 9
    assert [lengths for lengths, *_ in seen] == [[26, 29]] * 9


def test_empty_steps_run_no_forward(monkeypatch):
    model = model_of(3)
    seen = spy(monkeypatch, model)
    config = DecodeConfig(8, 4, steps=20, stop_at_end=False)
    assert generate(model, prompts_of(3, (2,)), config)[0].steps == len(seen) == 8


class Reads(TorchDispatchMode):
    """Counts the operators that make a GPU's host wait: reads, and shapes that depend on data."""

    waits = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "repeat_interleave")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            isinstance(i, torch.Tensor) and i.dtype == torch.bool
            for i in (args[1] if isinstance(args[1], (list, tuple)) else ())
        )
        if by_mask or name.startswith(self.waits) and name != "nonzero_static":
            self.found.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("context", MODES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_step_reads_nothing_back_from_the_device(temperature, context, monkeypatch):
    # On a GPU an assertion on the device.
    monkeypatch.setattr("bwsft_kernels._range_plan.require", lambda *_: None)
    model = Biased([0.9, 0.0, 5.0])
    model.family = dataclasses.replace(model.family, block_origin="absolute")
    config = DecodeConfig(8, 4, temperature=temperature, context=context)
    plans = {i: config.method.plan(i, "absolute") for i in (1, 4, 7)}
    rows = [Row(i, i, [0] * i, [2] * (plan[-1].stop - i), plan) for i, plan in plans.items()]
    assert {row.length for row in rows} == {12, 16}  # first blocks are of different widths
    canvas = Canvas.begin(rows, model.family, model.weight)
    context = DecodeContext.begin(model, config, canvas)
    with Reads() as reads:
        for step in range(8):
            turns = [row.plan[step] for row in rows]
            bwsft.decoding.generate.denoise(context, canvas, turns, step)
    assert reads.found == []
    assert canvas.final(8)[1]
    with Reads() as reads:
        canvas.ids[canvas.ids == 0].sum().item()
    assert reads.found == ["index", "_local_scalar_dense"]


def test_a_planned_step_sends_nothing_to_the_device(monkeypatch):
    """Its blocks and quotas are there already; only a dynamic rule's are not known before."""
    model, config = Biased([0.9, 0.0, 5.0]), DecodeConfig(8, 4)
    rows = [Row(i, i, [0] * i, [2] * 8, config.method.plan(i, "response")) for i in (1, 4)]
    planned, dynamic = (Canvas.begin(rows, model.family, model.weight, d) for d in (False, True))
    monkeypatch.setattr("bwsft.decoding.canvas.upload", None)
    for step in range(8):
        steps = [row.plan[step] for row in rows]
        active = planned.look(steps, step, config.method)
        assert active.block.start.tolist() == [p.start for p in steps]
        assert active.quota.tolist() == [p.quota for p in steps]
    with pytest.raises(TypeError, match="NoneType"):
        dynamic.look([row.plan[0] for row in rows], 0, config.method)


@pytest.mark.parametrize("fields", [
    {"rule": "first_hitting"},
    {"rule": "rcr"},
    {"rule": "routed", "revise": "uncond", "order_noise": 1.0},
    {"rule": "routed", "revise": "cond"},
    {"rule": "edit"},
    {"rule": "apd", "mixture": 1.0, "lookahead": 3},
    {"rule": "speculative"},
    {"rule": "speculative", "context": "block_causal"},
    {"rule": "threshold", "steps": 4, "top_p": 0.9, "ends": "last"},
], ids=lambda fields: "-".join(map(str, fields.values())))
def test_no_rule_reads_back_from_the_device(fields, monkeypatch):
    # On a GPU the noise's arguments are asserted on the device.
    for module in ("philox", "_range_plan"):
        monkeypatch.setattr(f"bwsft_kernels.{module}.require", lambda condition, message: None)
    model = Biased([0.9, 0.0, 5.0])
    config = DecodeConfig(8, 4, temperature=1.0, **fields)
    rows = list(make_rows([[0], [0] * 3], None, [0, 1], model.family, config))
    canvas = Canvas.begin(rows, model.family, model.weight, config.method.dynamic)
    context = config.method.context_type.begin(model, config, canvas)
    trying = config.rule == "speculative"
    with Reads() as reads:
        for step in range(2 if trying else 1 if config.method.dynamic else 8):
            turns = [dataclasses.replace(row.plan[step], drafts=step * trying) for row in rows]
            bwsft.decoding.generate.denoise(context, canvas, turns, step)
    assert reads.found == []
    assert (canvas.ids != model.family.mask_id).sum() > 4  # something was committed


def test_mask_spare_rows_and_banned_ids_are_never_produced():
    """Their head rows are copies of the strongest rows, doubled: without care they would win."""
    for seed in range(4):
        model = model_of(seed, embedding_size=VOCABULARY + 4, ends=1.0)
        weight = model.head()[0]
        with torch.no_grad():
            hidden = torch.ones(16, dtype=weight.dtype)
            for row in (5, MASK, *range(VOCABULARY, VOCABULARY + 4)):
                weight[row] = hidden * (-1) ** row * 9
        config = DecodeConfig(16, 4, banned_ids=(5, 1, 2), stop_at_end=False)
        prompts = prompts_of(seed, (3, 8))
        free = traced(model, prompts, dataclasses.replace(config, banned_ids=()))
        assert any(5 in result.tokens for result in free)
        for temperature in (0.0, 3.0):
            hot = dataclasses.replace(config, temperature=temperature)
            for result in traced(model, prompts, hot):
                produced = {c.token for c in result.trace}
                assert not result.ended and len(result.tokens) == 16
                assert not produced & {5, 1, 2, MASK} and max(produced) < VOCABULARY


def test_stream_yields_rows_as_they_finish():
    model = model_of(12)
    prompts = prompts_of(12, (2, 5, 9, 12))
    config = DecodeConfig(24, 8, steps=12, batch_size=3)
    results = list(decode_stream(model, prompts, config))
    steps = [result.steps for index, result in results if index < 3]
    assert len(set(steps)) > 1 and steps == sorted(steps)
    assert results[-1][0] == 3
    whole = generate(model, prompts, config)
    assert [dict(results)[i] for i in range(4)] == whole and whole[0].trace == []
    assert generate(model, []) == []


@pytest.mark.parametrize("convert", [tuple, np.array, torch.tensor])
def test_prompts_may_be_any_sequence_of_ids(convert):
    model = model_of(2)
    prompts = prompts_of(2, (4, 6))
    config = DecodeConfig(8, 4)
    assert generate(model, [convert(p) for p in prompts], config) == generate(
        model, prompts, config
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_fill_the_canvas(dtype):
    model = model_of(2, dtype)
    results = traced(model, prompts_of(2, (4, 6)), DecodeConfig(8, 4, stop_at_end=False))
    for result in results:
        assert len(result.trace) == 8 and all(0 < c.confidence <= 1 for c in result.trace)
        assert isinstance(result.trace[0], Commit)


def test_dropout_is_off_and_the_mode_is_restored():
    model = model_of(2)
    lora = SimpleNamespace(rank=2, alpha=64.0, dropout=0.5, targets="all")
    add_lora(model, lora, seed=0)
    model.model.double()
    with torch.no_grad():
        for name, weight in model.model.named_parameters():
            if "lora_B" in name:
                weight.normal_(generator=torch.Generator().manual_seed(1))
    prompts, config = prompts_of(2, (4, 6)), DecodeConfig(16, 4)
    expected = generate(model.eval(), prompts, config)
    assert not model.training
    model.train()
    assert generate(model, prompts, config) == expected
    assert model.training and all(module.training for module in model.modules())
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize("poll", [1, 3])
def test_nan_is_reported_at_the_next_poll(poll):
    model = model_of(2)
    with torch.no_grad():
        model.model.model.transformer["ln_f"].weight[3] = torch.nan
    message = f"NaN at denoising step {poll}: decode in float32"
    with pytest.raises(FloatingPointError, match=message):
        generate(model, prompts_of(2, (4, 6)), DecodeConfig(8, 4, poll=poll))


@pytest.mark.parametrize("prompts, options, message", [
    ([[3], [4] * 81], {}, "prompt 1 has 81 tokens: with gen_length 16 that is 97, more than"),
    ([[3, MASK]], {}, f"prompt 0 contains the .MASK. id {MASK}"),
    ([[3], [VOCABULARY]], {}, "prompt 1 has a token id outside .0, 16."),
    ([[-1]], {}, "prompt 0 has a token id outside"),
    ([3, 4], {}, "prompt 0 is int: give lists of token ids"),
    (["text"], {}, "prompt 0 is str"),
    ([[3]], {"banned_ids": (16,)}, "banned_ids has 16, outside"),
    ([[3]], {"banned_ids": (-1,)}, "banned_ids has -1, outside"),
    ([[3]], {"banned_ids": tuple(range(15))}, "leave no token"),
])
def test_bad_requests_are_refused_at_once(prompts, options, message):
    config = DecodeConfig(16, 4, **options)
    with pytest.raises(ValueError, match=message):
        decode_stream(model_of(), prompts, config)


@pytest.mark.parametrize("canvases, message", [
    ([None], "1 canvases for 2 prompts"), ([None, [99]], "canvas 1 gives 99 at position 0"),
    ([None, [4] * 17], "canvas 1 must be a list")])
def test_bad_canvases_are_refused_at_once(canvases, message):
    with pytest.raises(ValueError, match=message):
        decode_stream(model_of(), [[3], [4]], DecodeConfig(16, 4), canvases=canvases)


def test_prompts_are_planned_batch_by_batch(monkeypatch):
    config, planned = DecodeConfig(8, 4, batch_size=2), []
    kind = type(config.method)
    plan = kind.plan
    monkeypatch.setattr(kind, "plan", lambda *args: planned.append(args) or plan(*args))
    stream = decode_stream(model_of(), [[3], [4], [5], [6], [7]], config)
    assert len(planned) == 0
    next(stream)
    assert len(planned) == 2
    assert len(dict(stream)) == 4
    assert len(planned) == 5


def test_request_numbers_and_empty_prompts():
    model = model_of(**VARIANTS["shifted"])
    with pytest.raises(ValueError, match="1 request numbers for 2 prompts"):
        generate(model, [[3], [4]], requests=[0])
    with pytest.raises(ValueError, match="prompt 1 is empty, but this model predicts from"):
        generate(model, [[3], []], DecodeConfig(8, 4))
    assert len(generate(model_of(), [[]], DecodeConfig(8, 4, stop_at_end=False))[0].tokens) <= 8
