"""What holds for every context mode and rule, and where modes and training must agree; float64."""

import dataclasses
import warnings

import pytest
import torch
from block_masks import block_causal_mask, masked_states
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_decoding import MASK, MODES, bounds_of, history, model_of, open_canvas, prompts_of
from tiny_modes import PLACE, batch, held_out, mode_of

from bwsft.decoding.canvas import Canvas, Row, span_of
from bwsft.decoding.config import DecodeConfig
from bwsft.decoding.context import DecodeContext
from bwsft.decoding.generate import generate
from bwsft.decoding.plan import PlannedStep


@st.composite
def configs(draw):
    size, blocks = draw(st.sampled_from([(1, 5), (3, 3), (4, 2), (5, 2), (8, 1)]))
    planned, dynamic = ["quota", "first_hitting", "routed"], ["threshold", "factor", "entropy"]
    rule = draw(st.sampled_from(planned + dynamic))
    fields = {"rule": rule, "context": draw(st.sampled_from(MODES))}
    if rule == "routed":
        fields["schedule"] = draw(st.sampled_from(["linear", "cosine"]))
        fields["order_noise"] = draw(st.sampled_from([None, 1.0]))
    if rule == "first_hitting" and draw(st.booleans()):
        fields["clip"] = draw(st.sampled_from([(0.0, 1.0), (0.3, 0.8)]))
    elif rule in planned:
        per_block = draw(st.one_of(st.none(), st.integers(1, size + 1)))
        fields["steps"] = None if per_block is None else per_block * blocks
    else:
        name = {"entropy": "entropy_bound"}.get(rule, rule)
        more = [] if rule == "threshold" else [2.0, 100.0]  # no confidence is above 1
        fields[name] = draw(st.sampled_from([0.0, 0.3, 0.7, 1.0, *more]))
    if rule in ("quota", "threshold"):
        orders = [None, "confidence", "margin", "entropy", "random", "left"]
        fields["order"] = draw(st.sampled_from(orders))
    return DecodeConfig(
        size * blocks, size, **fields, stop_at_end=False, seed=draw(st.integers(0, 2**60)),
        temperature=draw(st.sampled_from([0.0, 0.9])), batch_size=draw(st.integers(1, 4)),
    )  # fmt: skip


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(configs(), st.sampled_from(["response", "absolute"]), st.data())
def test_every_rule_fills_the_canvas_block_by_block(config, origin, data):
    # No empty prompt: a canvas of nothing but [MASK] gives tied confidences.
    lengths = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    model = model_of(data.draw(st.integers(0, 3)), block_origin=origin)
    prompts = prompts_of(1, lengths)
    results = generate(model, prompts, config, trace=True)
    for i, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        trace = result.trace
        assert sorted(c.position for c in trace) == list(range(config.gen_length))
        assert not {c.token for c in trace} & {MASK}
        bounds = bounds_of(len(prompt), config, origin)
        block_of = {p - len(prompt): b for b, s in enumerate(bounds) for p in range(*s)}
        blocks = [block_of[c.position] for c in trace]
        assert blocks == sorted(blocks)
        # At least one token in each step, of the last block also untold ones beyond gen_length, and
        # no step beyond the last token.
        counts = [sum(c.step == step for c in trace) for step in range(result.steps)]
        untold = bounds[-1][1] - len(prompt) - config.gen_length
        assert sum(counts) == len(trace) and counts.count(0) <= untold < config.block_size
        if not config.method.dynamic:
            plan = config.method.plan(len(prompt), origin, request=i)
            missing = [turn.quota - told for turn, told in zip(plan, counts, strict=True)]
            assert min(missing) >= 0 and sum(missing) == untold
            assert not any(missing[k] for k, t in enumerate(plan) if t.start < bounds[-1][0])
    again = generate(model, prompts, dataclasses.replace(config, batch_size=9), trace=True)
    assert history(again) == history(results)
    for i, prompt in enumerate(prompts):  # nor does it matter who is decoded beside
        alone = generate(model, [prompt], config, trace=True, requests=[i])
        assert history(alone)[0] == history(results)[i]


@pytest.mark.parametrize("rule", [{"steps": 6}, {"rule": "threshold", "threshold": 0.5}])
@pytest.mark.parametrize("context", ["cached", "prefix"])
@pytest.mark.filterwarnings("ignore:refresh")
def test_a_refresh_in_every_step_is_exact(context, rule):
    """Every step is then a pass over the whole canvas in its present state."""
    differ = 0
    for seed in range(4):
        model, prompts = model_of(seed), prompts_of(seed, (4, 7, 1))
        config = DecodeConfig(12, 4, **rule, context=context)
        exact = generate(model, prompts, dataclasses.replace(config, context="exact"), trace=True)
        fresh = generate(model, prompts, dataclasses.replace(config, refresh=1), trace=True)
        assert history(fresh) == history(exact)
        differ += history(generate(model, prompts, config, trace=True)) != history(exact)
    assert differ  # without it a frozen context does change answers


def test_cached_block_causal_decoding_equals_whole_forwards_with_the_mask():
    for seed, origin in enumerate(("response", "absolute", "response")):
        model = model_of(seed, block_origin=origin)
        config = DecodeConfig(12, 4, steps=6, context="block_causal", stop_at_end=False)
        prompts = prompts_of(seed, (5, 2))
        results = generate(model, prompts, config, trace=True)
        for prompt, result in zip(prompts, results, strict=True):
            found = {commit.position: commit.token for commit in result.trace}
            expected = uncached(model, prompt, config, origin)
            assert [found[position] for position in range(12)] == expected


@torch.no_grad()
def uncached(model, prompt, config, origin):
    """The response, with a whole block-causal forward in every step."""
    x, first = torch.tensor(open_canvas(model, prompt, config)), len(prompt)
    bounds = bounds_of(first, config, origin)
    number = torch.zeros(len(x), dtype=torch.long)
    for k, (start, stop) in enumerate(bounds, 1):
        number[start:stop] = k
    for turn in config.method.plan(first, origin):
        hidden = masked_states(model, x, block_causal_mask(number))
        p = (hidden @ model.head()[0].T).softmax(-1)
        choice = p.clone()
        choice[:, MASK] = -1
        best = choice.max(-1)
        open_slots = [i for i in range(turn.start, turn.stop) if x[i] == MASK]
        for i in sorted(open_slots, key=lambda i: -float(best.values[i]))[: turn.quota]:
            x[i] = best.indices[i]
    return x[first:].tolist()[: config.gen_length]


def test_later_blocks_do_not_reach_a_block_causal_block():
    model, prompts = model_of(3), prompts_of(3, (5, 5, 5))
    prompts = [prompts[0]] * 3
    canvases = [None, [None] * 8 + [7, 8, 9], [None] * 8 + [4, None, 12, 3]]
    for context, equal in (("block_causal", True), ("exact", False), ("cached", False)):
        config = DecodeConfig(12, 4, context=context, stop_at_end=False)
        results = generate(model, prompts, config, trace=True, canvases=canvases)
        early = [
            [(c.token, c.confidence) for c in result.trace if c.position < 8] for result in results
        ]
        same = all(a == pytest.approx(b, rel=1e-12) for a, b in zip(early[0], early[1], strict=True)
                   ) and [t for t, _ in early[0]] == [t for t, _ in early[2]]  # fmt: skip
        assert same == equal, context


def decoder_loss(model, context, noisy, start, rows, target, weight):
    """Weighted sum of -log p that the decoder's own hidden states give in a partly masked block:
    it enters the blocks all [MASK], then their visible tokens are there."""
    config, edges = DecodeConfig(16, 4, context=context), noisy.cu_seqlens.tolist()
    decoded = []
    for s, (a, b) in enumerate(zip(edges, edges[1:], strict=False)):
        ids, prompt = noisy.ids[a:b].tolist(), int(noisy.prompt_lengths[s])
        block = range(int(start[s]), int(start[s]) + 4)
        response = [MASK if p in block else ids[p] for p in range(prompt, len(ids))]
        decoded.append(Row(s, s, ids[:prompt], response, []))
    canvas = Canvas.begin(decoded, model.family, model.head()[0])
    cache = DecodeContext.begin(model, config, canvas)
    turns = [PlannedStep(int(n), int(n) + 4, 4, 0, 0) for n in start]
    span = span_of([t.start for t in turns], [t.stop for t in turns], canvas.ids.device)
    cache.hidden(canvas, turns, span)
    canvas.ids.copy_(noisy.ids)
    turns = [dataclasses.replace(turn, number=1) for turn in turns]
    hidden = cache.hidden(canvas, turns, span)
    logp = (hidden[span.index_of(rows, noisy.cu_seqlens)] @ model.head()[0].T).log_softmax(-1)
    return -float((logp[torch.arange(len(rows)), target] * weight).sum())


@pytest.mark.parametrize("name", ["exact", "cached", "block_causal"])
def test_the_held_out_score_is_what_the_decoder_computes(name):
    model = model_of(2)
    mode = mode_of(name, model, mask_id=MASK)
    with torch.no_grad():
        for draw in held_out(mode, 4).draws(batch(mask_id=MASK)):
            rows = draw.rows, draw.target, draw.weight
            found = decoder_loss(model, name, draw.noisy, draw.block_start, *rows)
            assert mode.score(draw).item() == pytest.approx(found, rel=1e-6)  # fp32 sum


@pytest.mark.parametrize("name", ["exact", "cached"])
def test_the_training_loss_is_what_the_decoder_computes(name):
    model = model_of(2)
    mode = mode_of(name, model, draws=2 if name == "cached" else 1, even=True, mask_id=MASK)
    with torch.no_grad():
        some = batch(mask_id=MASK)
        draws = mode.objective.draws(some, PLACE, None)
        for loss, draw in zip(mode.losses(some, PLACE), draws, strict=True):
            n = int(draw.num_rows)
            rows = (draw.rows[:n], draw.target[:n], draw.weight[:n])
            found = decoder_loss(model, name, draw.noisy, draw.block_start, *rows) / draw.of
            assert loss.total.item() == pytest.approx(found, rel=1e-6)
            other = "exact" if name == "cached" else "cached"
            assert found != pytest.approx(
                decoder_loss(model, other, draw.noisy, draw.block_start, *rows), rel=1e-3
            )


@pytest.mark.parametrize("rule", [{"steps": 12}, {"rule": "threshold", "threshold": 0.6}])
@pytest.mark.parametrize("context", MODES)
def test_early_ends_and_retirement_save_forwards(context, rule, monkeypatch):
    """The sequences that really ran are those that the results count, and fewer than without."""
    model = model_of(12)
    prompts = prompts_of(12, (2, 5, 9, 12))
    config = DecodeConfig(24, 8, **rule, context=context, batch_size=4)
    ran = []
    whole, active = model.hidden_states, model.active_hidden_states

    def count_whole(ids, position_ids, cu_seqlens, *args, **options):
        ran.append(len(cu_seqlens) - 1)
        return whole(ids, position_ids, cu_seqlens, *args, **options)

    def count_active(ids, *args, **options):
        ran.append(len(ids))
        return active(ids, *args, **options)

    monkeypatch.setattr(model, "hidden_states", count_whole)
    monkeypatch.setattr(model, "active_hidden_states", count_active)
    results = generate(model, prompts, config)
    assert sum(ran) == sum(result.passes for result in results)
    saving = sum(ran)
    ran.clear()
    full = generate(model, prompts, dataclasses.replace(config, stop_at_end=False))
    assert sum(ran) == sum(result.passes for result in full) > saving
    for early, late in zip(results, full, strict=True):
        assert (early.tokens, early.ended) == (late.tokens, late.ended)
        assert (early.passes, late.passes) == (early.steps, late.steps)


@pytest.mark.parametrize("rule", [{"steps": 4}, {"rule": "factor"}], ids=["quota", "factor"])
def test_the_callback_tells_every_commitment_as_it_comes(rule):
    model, prompts = model_of(1), prompts_of(1, (4, 2, 7))
    config = DecodeConfig(8, 4, **rule, batch_size=2, context="cached")
    told, calls = {0: [], 1: [], 2: []}, []

    def on_commit(index, commits):
        told[index] += commits
        calls.append((index, {c.step for c in commits}))

    results = generate(model, prompts, config, trace=True, on_commit=on_commit)
    assert [sorted(told[i]) for i in range(3)] == [result.trace for result in results]
    assert all(len(steps) == 1 for _, steps in calls)
    assert len(calls) == sum(result.steps for result in results)


@pytest.mark.parametrize("context", MODES)
def test_empty_prompts_are_decoded_beside_others(context):
    config = DecodeConfig(8, 4, context=context, stop_at_end=False, rule="factor")
    for prompts in ([[]], [[], [3, 4], []]):
        for result in generate(model_of(1), prompts, config, trace=True):
            assert sorted(c.position for c in result.trace) == list(range(8))


@pytest.mark.parametrize("context", MODES)
def test_polling_less_changes_no_result(context):
    """Final rows stay a few steps longer, and what came in those is not told."""
    model, prompts = model_of(12), prompts_of(12, (2, 5, 9, 12))
    config = DecodeConfig(24, 8, steps=12, context=context, batch_size=4)
    often = generate(model, prompts, config, trace=True)
    assert len({result.steps for result in often}) > 2
    for poll in (3, 100):
        seldom = generate(model, prompts, dataclasses.replace(config, poll=poll), trace=True)
        assert history(seldom) == history(often)
        for a, b in zip(seldom, often, strict=True):
            assert (a.tokens, a.ended, a.steps) == (b.tokens, b.ended, b.steps)
        assert sum(r.passes for r in seldom) > sum(r.passes for r in often)
    told = []
    rare = dataclasses.replace(config, poll=5)
    generate(model, prompts, rare, on_commit=lambda i, commits: told.append((i, commits)))
    assert len(told) == sum(result.steps for result in often)


def test_a_refresh_inside_a_block_warns():
    model = model_of(0)
    with pytest.warns(UserWarning, match="refresh 3 recomputes the context inside a block of 4"):
        generate(model, [[3]], DecodeConfig(8, 4, context="cached", refresh=3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(model, [[3]], DecodeConfig(8, 4, context="cached", refresh=4))
        generate(model, [[3]], DecodeConfig(8, 4, context="prefix", refresh=2))


@pytest.mark.parametrize("family, fields, canvases, message", [
    ({"softcap": 5.0}, {"cfg_scale": 1.0}, None, "cfg_scale needs a linear head"),
    ({}, {"min_length": 1, "banned_ids": (0, *range(3, 15))}, None, "leave no token"),
    ({}, {}, [None, None], "2 canvases for 1 prompts"),
    ({}, {}, [[3] * 9], "canvas 0 must be a list of token ids and None, of at most"),
    ({}, {}, ["text"], "canvas 0 must be a list"),
    ({}, {}, [[None, MASK]], "canvas 0 gives 15 at position 1"),
    ({}, {}, [[-1]], "canvas 0 gives -1 at position 0"),
    ({}, {}, [[16]], "canvas 0 gives 16"),
])
def test_bad_requests_are_refused(family, fields, canvases, message):
    with pytest.raises(ValueError, match=message):
        generate(model_of(0, **family), [[3]], DecodeConfig(8, 4, **fields), canvases=canvases)
