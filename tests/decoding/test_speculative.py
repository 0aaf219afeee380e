"""Rule speculative: the careful decoder's answers, and the passes and states of a naive count."""

import dataclasses

import pytest
import torch
from block_masks import block_causal_mask, masked_states
from bwsft_kernels.philox import gumbel, gumbel_key, gumbel_u24
from hypothesis import given, settings
from hypothesis import strategies as st
from thinning import thinned
from tiny_decoding import MASK, VOCABULARY, bounds_of, model_of, open_canvas, prompts_of

from bwsft.data.word_problems import generate as word_problems
from bwsft.decoding.config import DecodeConfig
from bwsft.decoding.generate import generate
from bwsft.decoding.pipeline import Decoder
from bwsft.decoding.settings import DecoderOptions


def careful(config):
    return dataclasses.replace(config, rule="quota", drafts=None, threshold=None)


def told(results):
    """All but the passes; confidences apart, which depend on the summation order of a batch."""
    histories = [[commit[:3] for commit in result.trace] for result in results]
    return [(r.tokens, r.ended, r.steps, h) for r, h in zip(results, histories, strict=True)]


@st.composite
def configs(draw):
    size, blocks = draw(st.sampled_from([(1, 4), (4, 3), (5, 2), (12, 1)]))
    context = draw(st.sampled_from(["exact", "block_causal"]))
    exact = {"suffix": draw(st.sampled_from(["all", "absent", 3]))}
    exact["cfg_scale"] = draw(st.sampled_from([0.0, 0.0, 0.7]))
    return DecodeConfig(
        size * blocks, size, rule="speculative", context=context,
        drafts=draw(st.sampled_from([1, 2, 3, 20])),
        threshold=draw(st.sampled_from([None, 0.1, 0.3, 1.0])),
        order=draw(st.sampled_from([None, "margin", "entropy", "left", "random"])),
        ends=draw(st.sampled_from(["free", "free", "last", "no_eos"])),
        banned_ids=draw(st.sampled_from([(), (), (5, 9)])),
        min_length=draw(st.sampled_from([0, 0, 3])), stop_at_end=draw(st.booleans()),
        temperature=draw(st.sampled_from([0.0, 0.0, 0.4, 1.1])), seed=draw(st.integers(0, 2**60)),
        top_k=draw(st.sampled_from([0, 0, 4])), batch_size=draw(st.integers(1, 3)),
        **(exact if context == "exact" else {}),
    )  # fmt: skip


@settings(max_examples=12, deadline=None)
@given(
    configs(), st.sampled_from(["response", "absolute"]), st.sampled_from([0, 1]),
    st.lists(st.integers(1, 7), min_size=1, max_size=4), st.randoms(use_true_random=False),
)  # fmt: skip
def test_the_answer_is_the_careful_decoders(config, origin, shift, lengths, draw):
    model = model_of(draw.randrange(3), block_origin=origin, logit_shift=shift)
    prompts = prompts_of(draw.randrange(99), lengths)
    tokens = [None, None, None, *range(3, MASK)]
    canvases = [
        draw.choice([None, draw.choices(tokens, weights=[4] * 3 + [1] * 12, k=config.gen_length)])
        for _ in prompts
    ]
    options = {"trace": True, "canvases": canvases}
    slow = generate(model, prompts, careful(config), **options)
    commits = [[] for _ in prompts]
    fast = generate(
        model, prompts, config, **options, on_commit=lambda i, new: commits[i].extend(new)
    )
    assert told(fast) == told(slow)
    for one, other, came in zip(fast, slow, commits, strict=True):
        assert [c.confidence for c in one.trace] == pytest.approx(
            [c.confidence for c in other.trace], rel=1e-9
        )
        # The last pass may bring more than the careful decoder would have.
        assert [c for c in came if c.step < one.steps] == one.trace == came[: len(one.trace)]
        assert (one.steps > 0) * (1 + (config.cfg_scale > 0)) <= one.passes <= other.passes
    for i, prompt in enumerate(prompts):
        alone = generate(
            model, [prompt], config, trace=True, requests=[i], canvases=canvases[i : i + 1]
        )
        assert (told(alone), alone[0].passes) == (told(fast)[i : i + 1], fast[i].passes)


@torch.no_grad()
def looks(model, prompt, config, request, given=()):
    """Of each step of the careful decoder its block, and what its [MASK]s would get as (position,
    token, confidence), in order; by whole forwards under a mask."""
    x, first = torch.tensor(open_canvas(model, prompt, config, given)), len(prompt)
    bounds = bounds_of(first, config, model.family.block_origin)
    number = torch.zeros(len(x), dtype=torch.long)
    for k, (start, stop) in enumerate(bounds, 1):
        number[start:stop] = k
    whole = torch.ones(len(x), len(x), dtype=torch.bool)
    mask = block_causal_mask(number) if config.context == "block_causal" else whole
    found = []
    for k, (start, stop) in enumerate(bounds, 1):
        while any(open_slots := (x[start:stop] == MASK).tolist()):
            logits = masked_states(model, x, mask) @ model.head()[0].T
            rows = []
            for p in (start + i for i, is_open in enumerate(open_slots) if is_open):
                row = logits[p - model.family.logit_shift]
                noisy = row.clone()
                if config.temperature:
                    numbers = [torch.tensor([n]) for n in (p, len(found), request)]
                    u24 = gumbel_u24(VOCABULARY, *numbers, gumbel_key(config.seed, numbers[2]))
                    noisy = row / config.temperature + gumbel(u24, row.dtype)[0]
                noisy[MASK] = -torch.inf
                token = int(noisy.argmax())
                rows.append((p, token, float(row.softmax(-1)[token])))
            rows.sort(key=lambda row: row[0] if config.order == "left" else -row[2])
            found.append((k, rows))
            x[rows[0][0]] = rows[0][1]
    return found


def naive_passes(found, config, steps):
    """The states that each pass runs until so many steps of the careful decoder are known."""
    counts, known, drafts = [], 0, []
    while known < steps:
        counts.append(1 + len(drafts))
        known += 1
        for draft in drafts:
            if found[known - 1][1][0][:2] != draft[:2]:
                break
            known += 1
        block, rows = found[known - 1]
        drafts = []
        if known < len(found) and found[known][0] == block:
            for row in rows[1:-1][: config.drafts]:
                if row[2] < (config.threshold or 0):
                    break
                drafts.append(row)
    return counts


CASES = [
    {},
    {"drafts": 1},
    {"drafts": 7},
    {"drafts": 5, "threshold": 0.3},
    {"order": "left", "threshold": 0.5, "drafts": 6},
    {"temperature": 0.5, "seed": 3},
]


@pytest.mark.parametrize(
    ("context", "family", "fields"),
    thinned([
        (context, family, fields)
        for fields in CASES
        for family in ({}, {"block_origin": "absolute"}, {"logit_shift": 1})
        for context in ("exact", "block_causal")
    ], 5),
)
def test_passes_and_states_are_those_of_a_naive_count(context, family, fields, monkeypatch):
    """Every sequence that runs is a state that is needed, in one forward a pass and kind."""
    config = DecodeConfig(16, 8, rule="speculative", context=context, **{"drafts": 3, **fields})
    given, saved = [None, None, 7, None, 4], 0
    for seed in range(2):
        model, ran = model_of(seed + 1, **family), []
        whole, active = model.hidden_states, model.active_hidden_states

        def count_whole(ids, position_ids, cu_seqlens, ran=ran, whole=whole, **options):
            ran.append(len(cu_seqlens) - 1)
            return whole(ids, position_ids, cu_seqlens, **options)

        def count_active(ids, *args, ran=ran, active=active):
            ran.append(len(ids))
            return active(ids, *args)

        monkeypatch.setattr(model, "hidden_states", count_whole)
        monkeypatch.setattr(model, "active_hidden_states", count_active)
        prompts, counts = prompts_of(seed, (5, 2, 7)), []
        results = generate(
            model, prompts, config, trace=True, requests=[4, 2**35, 0], canvases=[None, given, None]
        )
        monkeypatch.undo()
        triples = zip(prompts, (4, 2**35, 0), ((), given, ()), results, strict=True)
        for prompt, request, canvas, result in triples:
            found = looks(model, prompt, config, request, canvas)
            firsts = [rows[0] for _, rows in found[: result.steps]]
            expected = [(step, p - len(prompt), *rest) for step, (p, *rest) in enumerate(firsts)]
            assert [c[:3] for c in result.trace] == [c[:3] for c in expected if c[1] < 16]
            assert [c.confidence for c in result.trace] == pytest.approx(
                [c[3] for c in expected if c[1] < 16], rel=1e-9
            )
            counts.append(naive_passes(found, config, result.steps))
            assert result.passes == len(counts[-1])
            saved += result.steps - result.passes
        assert sum(ran) == sum(map(sum, counts))
        if context == "exact":
            assert len(ran) == max(map(len, counts))
    assert saved > 0


def test_a_model_that_is_sure_saves_passes():
    options = DecoderOptions(dtype="float64", rule="speculative", drafts=7)
    decoder = Decoder.load(None, options)
    prompts = list(decoder.encode([r["query"] for r in word_problems(4, split="test")]))
    fast, slow = (
        generate(decoder.trained.backbone, prompts, config, trace=True)
        for config in (decoder.config, careful(decoder.config))
    )
    assert told(fast) == told(slow)
    assert 2 * sum(r.passes for r in fast) < sum(r.passes for r in slow)
    assert all(result.ended and result.tokens for result in fast)
