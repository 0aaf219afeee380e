"""Every context mode, rule and option of the decoder against one slow decoder, in float64.

The slow decoder takes one row at a time and no batch, no cache object, no span: keys and values lie
in dicts by position, and each mode says in a line which positions run and which are seen.
"""

import dataclasses
import itertools
import math

import pytest
import tiny_decoding
import torch
from bwsft_kernels.philox import Stream, gumbel, gumbel_key, gumbel_u24, philox_u24
from thinning import thinned
from tiny_decoding import ENDS, HEADS, KV_HEADS, MASK, MODES, VOCABULARY, model_of, prompts_of

from bwsft.decoding.config import DecodeConfig
from bwsft.decoding.generate import generate

SIZE = 8  # of a head


def turn(t, positions):
    angle = torch.tensor(positions).double()[:, None] / 500000.0 ** (
        torch.arange(0, SIZE, 2).double() / SIZE
    )
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = t[..., : SIZE // 2], t[..., SIZE // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@torch.no_grad()
def run(model, store, ids, positions, seen):
    """Hidden states of these positions; they leave their keys and values in `store`, layer by
    layer, and attend to what `store` holds at the positions `seen`."""
    core = model.base_model.model
    x = core.transformer["wte"](torch.tensor([ids[p] for p in positions]))
    for layer, block in enumerate(core.transformer["blocks"]):
        normed = block.attn_norm(x)
        q = turn(block.q_proj(normed).view(-1, HEADS, SIZE), positions)
        k = turn(block.k_proj(normed).view(-1, KV_HEADS, SIZE), positions)
        v = block.v_proj(normed).view(-1, KV_HEADS, SIZE)
        for i, p in enumerate(positions):
            store[layer, p] = k[i], v[i]
        keys, values = (
            torch.stack([store[layer, p][j] for p in seen]).repeat_interleave(HEADS // KV_HEADS, 1)
            for j in (0, 1)
        )
        weight = (torch.einsum("qhe,khe->hqk", q, keys) / SIZE**0.5).softmax(-1)
        x = x + block.attn_out(torch.einsum("hqk,khe->qhe", weight, values).flatten(1))
        x = x + block.mlp(block.ff_norm(x))
    return core.transformer["ln_f"](x)


def block_states(model, store, x, config, first, start, stop, number):
    """Hidden states of the positions start .. stop - 1, and how many forwards they took."""
    window = {"all": len(x), "absent": 0}.get(config.suffix, config.suffix)
    shift = model.family.logit_shift  # row i predicts token i + shift
    active = list(range(start - shift, stop - shift))
    everything = list(range(min(len(x), stop + window)))
    fresh = number == 0 or config.refresh and number % config.refresh == 0
    if config.context == "block_causal":
        if first and not store:
            run(model, store, x, list(range(first)), list(range(first)))  # the prompt
        done = store.setdefault("done", [first])
        while done[-1] < start:  # finished blocks, one by one
            grid = 0 if model.family.block_origin == "absolute" else first
            b = min(len(x), grid + ((done[-1] - grid) // config.block_size + 1) * config.block_size)
            run(model, store, x, list(range(done[-1], b)), list(range(b)))
            done.append(b)
        block = run(model, store, x, list(range(start, stop)), list(range(stop)))
        if shift:  # the last finished token, which predicts the block's first, sees no later one
            before = run(model, store, x, [start - 1], list(range(start)))
            block = torch.cat([before, block[:-1]])
        return block, 1  # what the decoder stores it stores in the same forward
    if config.context == "exact" or fresh:
        return run(model, store, x, everything, everything)[active[0] : active[-1] + 1], 1
    if config.context == "cached":
        return run(model, store, x, active, everything), 1
    rows = list(range(start - shift, len(everything) - shift))
    return run(model, store, x, rows, everything)[: len(active)], 1


def choose(config, logits, position, step, request, first):
    """(token, confidence, entropy, margin) of one position by plain softmax."""
    banned = {*config.banned_ids, *(ENDS if position - first < config.min_length else ())}
    logits = logits.clone()
    logits[list(banned)] = -torch.inf
    p = logits.softmax(-1)
    open_ids = [i for i in range(VOCABULARY) if i not in banned and i != MASK]
    noisy = logits
    if config.temperature:
        r = torch.tensor([request])
        numbers = [torch.tensor([n]) for n in (position, step)]
        u24 = gumbel_u24(VOCABULARY, *numbers, r, gumbel_key(config.seed, r))
        noisy = logits / config.temperature + gumbel(u24, logits.dtype)[0]
    token = max(open_ids, key=lambda i: float(noisy[i]))
    ranked = sorted((float(p[i]) for i in open_ids), reverse=True)
    entropy = -sum(float(x) * math.log(float(x)) for x in p if x > 0)
    return token, float(p[token]), entropy, ranked[0] - ranked[1]


def commits_of(config, found, quota, step, request):
    """Positions to commit; found: position -> (token, confidence, entropy, margin)."""
    order = config.order or ("entropy" if config.rule == "entropy" else "confidence")
    draw = {
        p: int(philox_u24(p, step, request, seed=config.seed, stream=Stream.ORDER)) for p in found
    }
    key = {
        "confidence": lambda p: -found[p][1], "entropy": lambda p: found[p][2],
        "margin": lambda p: -found[p][3], "left": lambda p: p, "random": lambda p: -draw[p],
    }[order]  # fmt: skip
    ordered = sorted(found, key=lambda p: (key(p), p))
    if config.rule == "quota":
        return ordered[:quota]
    if config.rule == "threshold":
        limit = 0.9 if config.threshold is None else config.threshold
        return [p for p in ordered if found[p][1] > limit] or ordered[:1]
    taken, total = [], 0.0
    for n, p in enumerate(ordered, 1):
        if config.rule == "factor":
            enough = found[p][1] >= 1 - (1.0 if config.factor is None else config.factor) / (n + 1)
        else:
            total += found[p][2]
            enough = total < (0.35 if config.entropy_bound is None else config.entropy_bound)
        if n > 1 and not enough:
            break
        taken.append(p)
    return taken


@torch.no_grad()
def slow_decode(model, prompt, config, request=0, canvas=()):
    """(response, [(step, position, token, confidence)], forwards after each step)."""
    first, size = len(prompt), config.block_size
    x = tiny_decoding.open_canvas(model, prompt, config, canvas)
    grid = 0 if model.family.block_origin == "absolute" else first
    head, store, commits, step, forwards = model.head()[0], {}, [], 0, []
    blocks = itertools.groupby(range(first, len(x)), key=lambda p: (p - grid) // size)
    for block in [list(group) for _, group in blocks]:
        start, stop, number = block[0], block[-1] + 1, 0
        total = sum(x[p] == MASK for p in block)
        steps = size if config.steps is None else config.steps * size // config.gen_length
        while any(x[p] == MASK for p in block):
            quota = total // steps + (number < total % steps)
            place = (config, first, start, stop, number)
            hidden, count = block_states(model, store, x, *place)
            logits = hidden @ head.T
            if config.cfg_scale:
                blind = [MASK] * first + x[first:]
                un = block_states(model, {}, blind, *place)[0] @ head.T
                logits, count = un + (config.cfg_scale + 1) * (logits - un), count + 1
            found = {
                p: choose(config, logits[p - start], p, step, request, first)
                for p in block if x[p] == MASK
            }  # fmt: skip
            taken = sorted(commits_of(config, found, quota, step, request))
            for p in taken:
                x[p] = found[p][0]
                commits.append((step, p - first, *found[p][:2]))
            forwards.append(sum(forwards[-1:]) + count)
            step, number = step + 1, number + 1
    commits = [commit for commit in commits if commit[1] < config.gen_length]
    return x[first:][: config.gen_length], commits, forwards


def assert_equals_slow(model, prompts, config, requests=None, canvases=None):
    """Tokens, steps, commits, forwards of the decoder are those of the slow one; returns results
    and the steps a full canvas takes."""
    requests = requests or range(len(prompts))
    results = generate(model, prompts, config, trace=True, requests=requests, canvases=canvases)
    full = []
    for i, (prompt, request, result) in enumerate(zip(prompts, requests, results, strict=True)):
        canvas = canvases[i] if canvases else ()
        response, commits, forwards = slow_decode(model, prompt, config, request, canvas or ())
        assert (result.tokens, result.ended) == tiny_decoding.until_end(response)
        expected = [c for c in commits if c[0] < result.steps]
        assert [c[:3] for c in result.trace] == [c[:3] for c in expected]
        confidences = [c.confidence for c in result.trace]
        assert confidences == pytest.approx([c[3] for c in expected], rel=1e-9)
        assert result.passes == (forwards[result.steps - 1] if result.steps else 0)
        full.append(len(forwards))
    return results, full


RULES = [
    {},
    {"steps_per_block": 3},
    {"rule": "threshold", "threshold": 0.6},
    {"rule": "factor", "factor": 1.2},
    {"rule": "entropy", "entropy_bound": 1.5},
]


def config_of(size, blocks, steps_per_block=None, **fields):
    steps = None if steps_per_block is None else steps_per_block * blocks
    return DecodeConfig(size * blocks, size, steps=steps, **fields)


@pytest.mark.parametrize(
    ("context", "origin", "rule"),
    thinned(itertools.product(MODES, ["response", "absolute"], RULES), 4),
    ids=lambda value: value.get("rule", f"quota{len(value)}") if isinstance(value, dict) else value,
)
def test_every_mode_and_rule_equals_the_slow_decoder(context, origin, rule):
    early = total = 0
    for seed in range(3):
        model = model_of(seed, block_origin=origin)
        size, blocks = ((4, 4), (6, 2), (8, 3))[seed]
        config = config_of(size, blocks, **rule, context=context, batch_size=3)
        prompts = prompts_of(seed, (5, 1, 9, 6))
        results, full = assert_equals_slow(model, prompts, config)
        early += sum(r.steps < n for r, n in zip(results, full, strict=True))
        total += len(results)
    assert 0 < early < total  # some rows end early, others fill their canvas


OPTIONS = {
    "shifted": ({"logit_shift": 1}, {}),
    "shifted absolute": ({"logit_shift": 1, "block_origin": "absolute"}, {"rule": "threshold"}),
    "warm": ({}, {"temperature": 1.1, "seed": 2**40 + 3}),
    "warm steps": ({"block_origin": "absolute"}, {"temperature": 0.8, "steps_per_block": 2}),
    "warm threshold": ({}, {"temperature": 0.8, "rule": "threshold", "threshold": 0.5}),
    "margin": ({}, {"order": "margin", "steps_per_block": 2}),
    "by entropy": ({}, {"order": "entropy", "steps_per_block": 2}),
    "random": ({}, {"order": "random", "seed": 5}),
    "left": ({}, {"order": "left", "steps_per_block": 2}),
    "left threshold": ({}, {"order": "left", "rule": "threshold", "threshold": 0.97}),
    "banned": ({}, {"banned_ids": (5, 7, 9, 1)}),
    "min length": ({}, {"min_length": 6}),
    "min length warm": ({}, {"min_length": 9, "temperature": 1.5, "rule": "threshold"}),
    "all": (
        {"block_origin": "absolute"},
        {"rule": "factor", "temperature": 0.7, "min_length": 3, "banned_ids": (4,)},
    ),
}
PER_MODE = {
    "guided": ("exact", {"cfg_scale": 0.7}),
    "guided, no suffix": ("exact", {"cfg_scale": 1.5, "suffix": "absent", "rule": "threshold"}),
    "absent": ("exact", {"suffix": "absent"}),
    "window": ("exact", {"suffix": 3, "rule": "entropy"}),
    "prefix absent": ("prefix", {"suffix": "absent"}),
    "prefix window": ("prefix", {"suffix": 5, "rule": "factor"}),
    "prefix refresh": ("prefix", {"refresh": 2}),
    "cached refresh": ("cached", {"refresh": 2}),
    "cached refresh dynamic": ("cached", {"refresh": 3, "rule": "threshold"}),
}
CASES = {f"{name} {mode}": (mode, *OPTIONS[name]) for name in OPTIONS for mode in MODES}
CASES |= {name: (mode, {}, options) for name, (mode, options) in PER_MODE.items()}


@pytest.mark.filterwarnings("ignore:refresh")
@pytest.mark.parametrize("case", thinned(CASES, 5))
def test_every_option_equals_the_slow_decoder(case):
    context, family, options = CASES[case]
    seen = set()
    for seed in range(2):
        model = model_of(seed, **family)
        size, blocks = ((4, 3), (6, 2))[seed]
        config = config_of(size, blocks, **options, context=context, batch_size=2)
        prompts = prompts_of(seed, (5, 1, 8))
        results, _ = assert_equals_slow(model, prompts, config, requests=[2**34 + 5, 0, 7])
        seen |= {c.token for r in results for c in r.trace}
        for result in results:
            assert not result.ended or len(result.tokens) >= config.min_length
    assert not seen & {MASK, *config.banned_ids} and len(seen) > 3


@pytest.mark.parametrize("rule", [{}, {"rule": "threshold"}], ids=["quota", "threshold"])
@pytest.mark.parametrize("context", MODES)
def test_given_tokens_stay_and_shape_the_answer(context, rule):
    canvases = [
        [None, 4, None, None, 5, 6, 7, 8, None, 9],  # the second block is full
        None,
        [3] * 12,  # nothing to do
        [None, None, 1],  # ends at the third position
        [4, 2],  # has ended
        (),
    ]
    for seed, origin in enumerate(("response", "absolute")):
        model = model_of(seed, block_origin=origin)
        prompts = prompts_of(seed, (3, 5, 2, 4, 6, 1))
        config = config_of(4, 3, **rule, context=context, batch_size=4)
        results, _ = assert_equals_slow(model, prompts, config, canvases=canvases)
        for canvas, result in zip(canvases, results, strict=True):
            committed = {commit.position for commit in result.trace}
            for position, token in enumerate(canvas or ()):
                assert token is None or position not in committed
                if token is not None and position < len(result.tokens):
                    assert result.tokens[position] == token
        assert [r.steps for r in results[2::2]][:2] == [0, 0] and not results[2].ended
        assert results[3].ended and len(results[3].tokens) <= 2
        assert results[4].tokens == [4]
        open_ended = generate(
            model, prompts, dataclasses.replace(config, stop_at_end=False), trace=True,
            canvases=canvases,
        )  # fmt: skip
        counts = [12 - sum(token is not None for token in canvas or ()) for canvas in canvases]
        assert [len(result.trace) for result in open_ended] == counts
