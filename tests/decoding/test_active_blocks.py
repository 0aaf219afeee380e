"""Decoding with several active blocks against one slow decoder, in float64: one row at a time, all
logits of a dense forward in every step, and loops that say in words what opens and what is taken.
"""

import dataclasses
import itertools

import pytest
import tiny_decoding
import torch
from bwsft_kernels.philox import gumbel, gumbel_key, gumbel_u24
from thinning import thinned
from tiny_decoding import ENDS, MASK, VOCABULARY, bounds_of, model_of, prompts_of

from bwsft.decoding.config import DecodeConfig
from bwsft.decoding.generate import generate


def seen_by(model, prompt, config, length, start, stop):
    """Which positions each one sees, bool [length, length], when the active blocks reach from
    `start` to `stop`."""
    if config.context == "exact":
        reach = {"all": length, "absent": stop}[config.suffix]
        return (torch.arange(length) < reach).expand(length, length)
    cut = model.family.attention == "block_causal"  # the prompt too, from position 0
    blocks = bounds_of(0 if cut else prompt, config, model.family.block_origin)
    if cut:
        size = config.block_size
        blocks = [(first, first + size) for first in range(0, length, size)]
    number = torch.zeros(length, dtype=torch.long)
    for n, bounds in enumerate(blocks, 1):
        number[slice(*bounds)] = n
    seen = number <= number[:, None]
    if model.family.clean_attention == "causal":
        done = number < number[start]
        seen[done] &= torch.arange(length) <= torch.arange(length)[done, None]
    return seen


@torch.no_grad()
def dense_logits(model, x, seen):
    out = model.model(input_ids=torch.tensor([x]), attention_mask=seen[None, None])
    return out.logits[0]


def choose(config, logits, position, step, request, prompt):
    """(token, confidence, entropy) of a position."""
    logits = logits.clone()
    if position - prompt < config.min_length:
        logits[list(ENDS)] = -torch.inf
    p = logits.softmax(-1)
    noisy = logits.clone()
    if config.temperature:
        row = torch.tensor([request])
        at = [torch.tensor([n]) for n in (position, step)]
        u24 = gumbel_u24(VOCABULARY, *at, row, gumbel_key(config.seed, row))
        noisy = logits / config.temperature + gumbel(u24, logits.dtype)[0]
    noisy[MASK] = -torch.inf
    token = int(noisy.argmax())
    return token, float(p[token]), float(-torch.where(p > 0, p * p.log(), 0).sum())


def taken_of(config, found, floor):
    """Positions of one block that the rule takes, at least `floor` of them; found: position ->
    (token, confidence, entropy)."""
    by_entropy = config.rule == "entropy"
    ordered = sorted(found, key=lambda p: (found[p][2] if by_entropy else -found[p][1], p))
    sure, total = [], 0.0
    for n, p in enumerate(ordered, 1):
        total += found[p][2]
        if config.rule == "threshold":
            enough = found[p][1] > config.threshold
        elif config.rule == "factor":
            enough = found[p][1] >= 1 - config.factor / (n + 1)
        else:
            enough = total < config.entropy_bound
        if not enough:
            break
        sure.append(p)
    return sure if len(sure) >= floor else ordered[:floor]


def floor_of(config, number):
    """Of the first active block, by how many steps it has been the first."""
    if config.steps is None:
        return 1
    steps = config.steps * config.block_size // config.gen_length
    base, extra = divmod(config.block_size, steps)
    return max(1, base + (number < extra)) if number < steps else 1


def slow_decode(model, prompt, config, request=0, canvas=()):
    """([(step, position, token, confidence)], the response, after which step it is final)."""
    first, shift = len(prompt), model.family.logit_shift
    x = tiny_decoding.open_canvas(model, prompt, config, canvas)
    bounds = bounds_of(first, config, model.family.block_origin)
    blocks = [range(*b) for b in bounds if MASK in x[slice(*b)]]
    masked = {block: [p for p in block if x[p] == MASK] for block in blocks}
    share = 0.5 if config.open_share is None else config.open_share
    window, commits, final, entered, leader = [], [], None, 0, None

    def is_final():
        text = x[first:][: config.gen_length]
        before = text[: text.index(MASK)] if MASK in text else text
        return len(before) == config.gen_length or any(token in ENDS for token in before)

    final = 0 if is_final() else None
    for step in itertools.count():
        while window and all(x[p] != MASK for p in window[0]):
            window.pop(0)
        while blocks and len(window) < config.active_blocks:
            if window:
                places = masked[window[-1]]
                if sum(x[p] != MASK for p in places) / len(places) < share:
                    break
            window.append(blocks.pop(0))
        if not window:
            break
        if window[0] != leader:
            leader, entered = window[0], step
        seen = seen_by(model, first, config, len(x), window[0][0], window[-1][-1] + 1)
        logits = dense_logits(model, x, seen)
        if config.cfg_scale:
            blind = dense_logits(model, [MASK] * first + x[first:], seen)
            logits = blind + (config.cfg_scale + 1) * (logits - blind)
        news = {}
        for block in window:
            found = {
                p: choose(config, logits[p - shift], p, step, request, first)
                for p in block if x[p] == MASK
            }  # fmt: skip
            floor = floor_of(config, step - entered) if block == leader else 0
            news |= {p: found[p][:2] for p in taken_of(config, found, floor)}
        for p in sorted(news):
            x[p] = news[p][0]
            commits.append((step, p - first, *news[p]))
        if final is None and is_final():
            final = step + 1
    return [c for c in commits if c[1] < config.gen_length], x[first:][: config.gen_length], final


def assert_equals_slow(model, prompts, config, canvases=None):
    """Tokens, passes and commits; returns the passes."""
    requests = [2**34 + 5, 0, 7, 3, 4, 5][: len(prompts)]
    results = generate(model, prompts, config, trace=True, requests=requests, canvases=canvases)
    for i, result in enumerate(results):
        canvas = canvases[i] if canvases else ()
        commits, response, final = slow_decode(
            model, prompts[i], config, requests[i], canvas or ()
        )
        assert (result.tokens, result.ended) == tiny_decoding.until_end(response)
        expected = [c for c in commits if c[0] < final]
        assert [c[:3] for c in result.trace] == [c[:3] for c in expected]
        sure = [c.confidence for c in result.trace]
        assert sure == pytest.approx([c[3] for c in expected], rel=1e-9)
        assert result.steps == final and result.passes == final * (2 if config.cfg_scale else 1)
    return [result.passes for result in results]


RULES = [
    {"rule": "threshold", "threshold": 0.5},
    {"rule": "factor", "factor": 1.2},
    {"rule": "threshold", "threshold": 0.8},
    {"rule": "entropy", "entropy_bound": 1.5},
]
WINDOWS = [(3, 0.0), (1, None), (2, None), (3, 0.5), (2, 0.25), (3, 0.75), (2, 1.0)]
ABSOLUTE = {"block_origin": "absolute"}
CUT = {**ABSOLUTE, "attention": "block_causal"}  # the grid cuts the prompt too
FAMILIES = [
    ("exact", {}), ("block_causal", {}), ("exact", ABSOLUTE), ("block_causal", CUT),
    ("exact", {"logit_shift": 1}), ("block_causal", {"logit_shift": 1}),
    ("block_causal", {"logit_shift": 1, "clean_attention": "causal"}),
    ("block_causal", {**CUT, "logit_shift": 1}),
]  # fmt: skip
CASES = [
    (*family, *window, RULES[(i + j) % len(RULES)])
    for i, window in enumerate(WINDOWS) for j, family in enumerate(FAMILIES)
]  # fmt: skip


@pytest.mark.parametrize(("context", "family", "several", "share", "rule"), thinned(CASES))
def test_tokens_and_passes_are_those_of_the_slow_decoder(context, family, several, share, rule):
    for seed in range(2):
        model, size = model_of(seed, **family), (4, 3)[seed]
        config = DecodeConfig(size * 4, size, context=context, batch_size=3, **rule,
                              active_blocks=several, open_share=share)  # fmt: skip
        assert_equals_slow(model, prompts_of(seed, (5, 1, 9, 6)), config)


OPTIONS = {
    "warm": {"temperature": 0.8, "seed": 2**40 + 3},
    "steps": {"steps": 12, "threshold": 0.9},
    "min length": {"min_length": 9},
    "guided": {"cfg_scale": 0.7},
    "no suffix": {"suffix": "absent", "threshold": 0.4, "active_blocks": 2, "open_share": 0.0},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_holds_with_several_active_blocks(name):
    options = {"threshold": 0.5, "active_blocks": 3, **OPTIONS[name]}
    exact = {"suffix", "cfg_scale"} & options.keys()
    for context in ("exact",) if exact else ("exact", "block_causal"):
        config = DecodeConfig(16, 4, context=context, rule="threshold", batch_size=3, **options)
        assert_equals_slow(model_of(1, **ABSOLUTE), prompts_of(1, (5, 2, 8)), config)


@pytest.mark.parametrize("context", ["exact", "block_causal"])
def test_given_tokens_and_ends_of_neighbours_change_nothing(context):
    canvases = [
        [None, 4, None, None, 5, 6, 7, 8, None, 9],  # the second block is full
        None,
        [3] * 16,  # nothing to do
        [None, None, 1],  # ends at the third position
        [*[None] * 6, 1, *[None] * 3, 4, 5, 6, 7],  # in the second block
        [4, 2],  # has ended
    ]
    config = DecodeConfig(16, 4, context=context, rule="threshold", threshold=0.6, batch_size=4,
                          active_blocks=3)  # fmt: skip
    for seed, origin in enumerate(("response", "absolute")):
        model, prompts = model_of(seed, block_origin=origin), prompts_of(seed, (3, 5, 2, 4, 6, 1))
        passes = assert_equals_slow(model, prompts, config, canvases)
        assert passes[2] == passes[5] == 0 < min(passes[i] for i in (0, 1, 3, 4))
        told = [[] for _ in prompts]
        open_ended = dataclasses.replace(config, stop_at_end=False)
        options = {"canvases": canvases, "requests": [3] * 6, "trace": True}
        found = generate(
            model, prompts, open_ended, **options,
            on_commit=lambda index, commits, told=told: told[index].extend(commits),
        )  # fmt: skip
        counts = [16 - sum(token is not None for token in canvas or ()) for canvas in canvases]
        assert [len(result.trace) for result in found] == counts
        assert told == [r.trace for r in found]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(map(str, rule.values())))
def test_a_block_that_opens_when_the_one_before_is_full_is_alone(rule):
    """Bit for bit, confidences too, what one active block gives."""
    model, prompts = model_of(2, **ABSOLUTE), prompts_of(2, (5, 2, 8))
    alone = DecodeConfig(16, 4, **rule, temperature=0.5)
    window = dataclasses.replace(alone, active_blocks=3, open_share=1.0)
    assert generate(model, prompts, alone, trace=True) == generate(
        model, prompts, window, trace=True
    )


@pytest.mark.parametrize("several, share, passes", [(1, None, 8), (2, 0.0, 4), (4, 0.0, 2)])
def test_a_pass_fills_all_blocks_of_a_model_that_is_sure(several, share, passes):
    config = DecodeConfig(32, 4, rule="threshold", threshold=0.0, stop_at_end=False,
                          active_blocks=several, open_share=share)  # fmt: skip
    found = generate(model_of(), prompts_of(0, (5, 3)), config)
    assert [result.passes for result in found] == [passes, passes]


@pytest.mark.parametrize("fields, message", [
    ({"rule": "quota"}, "active_blocks 2 is for the rules threshold, factor, entropy, and .* quo"),
    ({"rule": "edit"}, "active_blocks 2 is for the rules .* the rule is edit"),
    ({"context": "cached"}, "active_blocks 2 needs context exact or block_causal: the cache of ca"),
    ({"context": "prefix"}, "needs context exact or block_causal: the cache of prefix"),
    ({"active_blocks": 0}, "active_blocks must be at least 1, not 0"),
    ({"active_blocks": 1, "open_share": 0.5}, "open_share is for active_blocks above 1"),
    ({"open_share": 1.5}, "open_share must be in .0, 1., not 1.5"),
    ({"open_share": float("nan")}, "open_share must be in .0, 1., not nan"),
])
def test_what_has_one_active_block_says_so(fields, message):
    with pytest.raises(ValueError, match=message):
        DecodeConfig(16, 4, **{"rule": "threshold", "active_blocks": 2, **fields})
