"""Rules that take tokens back: against slow decoders, their reductions, and what always holds."""

import dataclasses
import random
from collections import Counter

import pytest
import torch
from bwsft_kernels.philox import Stream, gumbel, philox_u24
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_decoding import (
    MASK,
    MODES,
    VOCABULARY,
    bounds_of,
    history,
    model_of,
    open_canvas,
    prompts_of,
)

from bwsft.decoding.config import DecodeConfig
from bwsft.decoding.generate import generate
from bwsft.decoding.plan import masked_share, routed_shares
from bwsft.decoding.revising import Block
from bwsft.decoding.rules import hitting_times


def best_tokens(model, x):
    """Token and confidence of every position by a whole forward."""
    with torch.no_grad():
        p = model.model(torch.tensor([x])).logits[0].softmax(-1)
    choice = p.clone()
    choice[:, MASK] = -1
    token = choice.argmax(-1)
    return token.tolist(), p.gather(1, token[:, None])[:, 0].tolist()


def slow(model, prompt, config, given=(), request=0):
    """(response, commits) of one row in exact mode at temperature 0, slot by slot."""
    x = open_canvas(model, prompt, config, given)
    first, step, commits = len(prompt), 0, []
    for start, stop in bounds_of(first, config, model.family.block_origin):
        own = [i for i in range(start, stop) if x[i] == MASK]
        sure, number, after = {}, 0, 0
        while own:
            token, confidence = best_tokens(model, x)
            masked = [i for i in own if x[i] == MASK]
            put, back = RULES[config.rule](
                config, own, masked, x, token, confidence, sure, number, request, step
            )
            for i in back:
                x[i] = MASK
            for i in sorted(put):
                x[i], sure[i] = token[i], confidence[i]
                if i - first < config.gen_length:
                    commits.append((step, i - first, token[i]))
            step, number = step + 1, number + 1
            if config.rule != "edit" and sum(shares(config, len(own))[:number]) == len(own):
                break
            if config.rule != "edit" or any(x[i] == MASK for i in own):
                continue
            if not masked:
                after += 1
                if not put:
                    break
            if config.edit_threshold >= 1 or after == config.method.post_steps:
                break
    return x[first:][: config.gen_length], commits


def shares(config, n):
    """[MASK]s that each step of a block takes."""
    steps = config.method.steps_per_block
    if config.rule == "routed":
        return routed_shares(n, steps, config.method.schedule)
    return [n // steps + (i < n % steps) for i in range(steps)]


def slow_rcr(config, own, masked, x, token, confidence, sure, number, request, step):
    running = {i: confidence[i] if i in masked else sure[i] for i in own}
    stand = sum(shares(config, len(own))[: number + 1])
    stays = sorted(own, key=lambda i: (-running[i], i))[:stand]
    return [i for i in stays if i in masked], [i for i in own if i not in stays]


def slow_routed(config, own, masked, x, token, confidence, sure, number, request, step):
    steps, schedule = config.method.steps_per_block, config.method.schedule
    n, score = len(own), dict(zip(own, (confidence[i] for i in own), strict=True))
    if config.order_noise:
        for i in own:
            key = {"seed": config.seed, "stream": Stream.ORDER}
            u24 = philox_u24(torch.tensor([i]), step, request, **key)
            noise = gumbel(u24, torch.float64).item()
            share = masked_share(number, steps, schedule)
            score[i] = torch.tensor(score[i], dtype=torch.float64).log().item()
            score[i] += config.order_noise * share * noise
    keep = n - sum(shares(config, n)[: number + 1])
    pool = own if config.method.revising else masked
    low = sorted(pool, key=lambda i: (-score[i], i))[len(pool) - keep :] if keep else []
    back = []
    for i in low:
        if i in masked or config.revise == "uncond":
            back.append(i)
        elif config.revise == "cond" and token[i] == x[i] and confidence[i] < sure[i]:
            back.append(i)
    return [i for i in masked if i not in low], back


def slow_edit(config, own, masked, x, token, confidence, sure, number, request, step):
    put = [i for i in masked if confidence[i] > config.method.threshold]
    if masked and not put:
        put = [max(masked, key=lambda i: (confidence[i], -i))]
    visible = [i for i in own if i not in masked]
    edited = [
        i for i in visible if token[i] != x[i] and confidence[i] > config.method.edit_threshold
    ]
    return put + edited, []


RULES = {"rcr": slow_rcr, "routed": slow_routed, "edit": slow_edit}
VARIANTS = {
    "rcr": {"rule": "rcr"},
    "rcr in 4 steps": {"rule": "rcr", "steps": 12},
    "uncond": {"rule": "routed", "revise": "uncond", "steps": 9},
    "cond": {"rule": "routed", "revise": "cond", "schedule": "cosine"},
    "noise": {"rule": "routed", "order_noise": 1.0, "steps": 6},
    "noise, uncond": {"rule": "routed", "revise": "uncond", "order_noise": 0.7},
    "edit": {"rule": "edit", "threshold": 0.3, "edit_threshold": 0.3},
    "edit at will": {"rule": "edit", "threshold": 0.5, "edit_threshold": 0.0, "post_steps": 3},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_commits_are_those_of_a_slow_decoder(variant):
    revised = 0
    for seed in range(3):
        model = model_of(seed, block_origin=("response", "absolute")[seed % 2])
        config = DecodeConfig(15, 5, **{"steps": None, **VARIANTS[variant]}, stop_at_end=False)
        prompts, given = prompts_of(seed, (4, 7)), [None, 3, None, None, None, None, 8]
        found = generate(model, prompts, config, trace=True, canvases=[None, given])
        for request, (prompt, result) in enumerate(zip(prompts, found, strict=True)):
            response, commits = slow(model, prompt, config, given if request else (), request)
            assert history([result])[0] == commits
            assert result.tokens == response[: len(result.tokens)]
            revised += len(commits) - len({position for _, position, _ in commits})
    assert (revised > 0) == (variant != "noise")  # the comparison means something


@pytest.mark.parametrize("context", MODES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_routing_by_the_linear_schedule_is_lladas_rule(context, temperature):
    """RDM, deterministic, linear, restricted to [MASK]s, where the steps divide the block."""
    for seed, (size, steps) in enumerate(((4, 4), (6, 3), (8, 2))):
        model, prompts = model_of(seed), prompts_of(seed, (3, 6))
        quota = DecodeConfig(
            2 * size, size, steps=2 * steps, context=context, temperature=temperature
        )
        routed = dataclasses.replace(quota, rule="routed")
        assert generate(model, prompts, routed, trace=True) == generate(
            model, prompts, quota, trace=True
        )


def test_confidences_that_vanish_leave_no_mask_behind():
    """Their logarithm is -inf, as the priority of slots that can't be chosen."""
    model = model_of(1, dtype=torch.float32)
    with torch.no_grad():
        model.head()[0].mul_(500)
    for revise in ("never", "cond", "uncond"):
        config = DecodeConfig(
            8, 4, rule="routed", revise=revise, order_noise=1.0, temperature=900.0,
            stop_at_end=False,
        )  # fmt: skip
        (result,) = generate(model, [[3, 4]], config, trace=True, canvases=[[3]])
        assert {c.position for c in result.trace} == set(range(1, 8))
        assert MASK not in result.tokens and min(c.confidence for c in result.trace) == 0


@pytest.mark.parametrize("context", MODES)
def test_editing_at_no_price_is_threshold_decoding(context):
    for threshold in (0.2, 0.5):
        model, prompts = model_of(1), prompts_of(1, (3, 6, 2))
        plain = DecodeConfig(16, 4, rule="threshold", threshold=threshold, context=context)
        plain = dataclasses.replace(plain, stop_at_end=False)
        edits = dataclasses.replace(plain, rule="edit", edit_threshold=1.5)
        found = generate(model, prompts, edits, trace=True)
        expected = generate(model, prompts, plain, trace=True)
        assert history(found) == history(expected)  # the head sees other rows: confidences round
        for a, b in zip(found, expected, strict=True):
            assert dataclasses.replace(a, trace=[]) == dataclasses.replace(b, trace=[])


def test_monotone_confidence_makes_rcr_the_quota_rule():
    """Where what a step adds is never surer than what stands, nothing is ever taken back."""
    same = total = 0
    for seed in range(4):
        model, prompts = model_of(seed), prompts_of(seed, range(1, 13))
        quota = DecodeConfig(3, 3, batch_size=12, stop_at_end=False)
        plain = generate(model, prompts, quota, trace=True)
        found = generate(model, prompts, dataclasses.replace(quota, rule="rcr"), trace=True)
        for a, b in zip(plain, found, strict=True):
            monotone = all(
                max(c.confidence for c in turn) <= min(c.confidence for c in earlier)
                for turn, earlier in turns_of(a.trace)
            )
            if monotone:
                assert history([b]) == history([a])
            total, same = total + 1, same + monotone
    assert 0 < same < total


def turns_of(trace):
    """(the commits of a step, all before), of one block."""
    for step in range(1, 1 + max(c.step for c in trace)):
        yield [c for c in trace if c.step == step], [c for c in trace if c.step < step]


def block_of(masked, given, confidence, new, token=None, new_token=None):
    masked, size = torch.tensor([masked]).bool(), len(masked)
    tokens = [torch.tensor([t or [0] * size]) for t in (token, new_token)]
    confidences = [torch.tensor([c]) for c in (confidence, new)]
    return Block(
        masked, ~torch.tensor([given]).bool(), tokens[0], confidences[0], tokens[1], confidences[1]
    )


def test_rcr_by_hand():
    # Slot 0 was sure and slot 1 was not; 2 and 3 are [MASK]; 4 is given.
    block = block_of([0, 0, 1, 1, 0], [0, 0, 0, 0, 1], [0.9, 0.2, 0, 0, 0], [0, 0, 0.3, 0.8, 9])
    rule = DecodeConfig(8, 4, rule="rcr").method
    taken, masked = rule.remask(block, torch.tensor([3]))[:2]
    assert taken.tolist() == [[False, False, True, True, False]]
    assert masked.tolist() == [[False, True, False, False, False]]
    taken, masked = rule.remask(block, torch.tensor([4]))[:2]
    assert taken.tolist() == [[False, False, True, True, False]] and not masked.any()


def test_routing_by_hand():
    block = block_of(
        [0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1], [0.5, 0.5, 0.5, 0, 0, 0],
        [0.1, 0.2, 0.3, 0.4, 0.05, 9], [7, 7, 7, 0, 0, 3], [7, 8, 7, 6, 6, 6],
    )  # fmt: skip
    score, standing = block.new_confidence, torch.tensor([1])
    uncond, cond = (DecodeConfig(8, 4, rule="routed", revise=r).method for r in ("uncond", "cond"))
    taken, masked = uncond.route(block, score, standing)[:2]
    assert taken.tolist() == [[False, False, False, True, False, False]]
    assert masked.tolist() == [[True, True, True, False, True, False]]
    # cond: slot 1 wants another token, and is left alone.
    masked = cond.route(block, score, standing).cleared
    assert masked.tolist() == [[True, False, True, False, True, False]]
    sure = block._replace(confidence=torch.full((1, 6), 0.15))
    masked = cond.route(sure, score, standing).cleared  # slot 2 is surer than it was
    assert masked.tolist() == [[True, False, False, False, True, False]]


def test_editing_by_hand():
    config = DecodeConfig(8, 4, rule="edit", threshold=0.5, edit_threshold=0.6)
    block = block_of(
        [0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1], [0.5] * 6,
        [0.9, 0.9, 0.55, 0.7, 0.2, 0.99], [7, 7, 7, 0, 0, 3], [7, 8, 8, 6, 6, 6],
    )  # fmt: skip
    taken, masked = config.method.edit(block, block.new_confidence)[:2]
    assert taken.tolist() == [[False, True, False, True, False, False]]
    assert masked.tolist() == [[False, False, False, False, True, False]]


@st.composite
def configs(draw):
    size, blocks = draw(st.sampled_from([(1, 3), (3, 3), (4, 2), (5, 2)]))
    rule = draw(st.sampled_from(["rcr", "routed", "edit"]))
    fields = {"rule": rule}
    if rule == "edit":
        fields["threshold"] = draw(st.sampled_from([0.0, 0.3, 1.0]))
        fields["edit_threshold"] = draw(st.sampled_from([0.0, 0.2, 0.5, 1.0, 2.0]))
        fields["post_steps"] = draw(st.sampled_from([None, 0, 2]))
    else:
        per_block = draw(st.one_of(st.none(), st.integers(1, size + 2)))
        fields["steps"] = None if per_block is None else per_block * blocks
    if rule == "routed":
        fields["revise"] = draw(st.sampled_from(["cond", "uncond"]))
        fields["schedule"] = draw(st.sampled_from(["linear", "cosine"]))
        fields["order_noise"] = draw(st.sampled_from([None, 1.0]))
    return DecodeConfig(
        size * blocks, size, **fields, context=draw(st.sampled_from(MODES)),
        temperature=draw(st.sampled_from([0.0, 0.9])), seed=draw(st.integers(0, 2**60)),
        batch_size=draw(st.integers(1, 4)),
    )  # fmt: skip


def replayed(trace, response):
    """The response after all commits, later ones over earlier ones."""
    response = list(response)
    for commit in trace:
        response[commit.position] = commit.token
    return response


def canvas_of(draw, length):
    if not draw.randrange(2):
        return [None] * length
    return [draw.choice([None, None, draw.randrange(VOCABULARY - 1)]) for _ in range(length)]


@settings(max_examples=15, deadline=None)
@given(configs(), st.sampled_from(["response", "absolute"]), st.integers(0, 2**30))
def test_what_holds_for_every_revising_rule(config, origin, seed):
    draw = random.Random(seed)
    model = model_of(draw.randrange(4), block_origin=origin)
    prompts = prompts_of(seed, [draw.randrange(1, 8) for _ in range(draw.randrange(1, 4))])
    given = [canvas_of(draw, config.gen_length) for _ in prompts]
    whole = dataclasses.replace(config, stop_at_end=False)
    results = generate(model, prompts, whole, trace=True, canvases=given)
    for prompt, canvas, result in zip(prompts, given, results, strict=True):
        response = replayed(result.trace, canvas)
        assert None not in response and MASK not in response
        open_places = {p for p, token in enumerate(canvas) if token is None}
        assert {c.position for c in result.trace} == open_places
        end = next((i for i, t in enumerate(response) if t in model.family.end_ids), None)
        assert (result.tokens, result.ended) == (response[:end], end is not None)
        bounds = bounds_of(len(prompt), config, origin)
        block = {p - len(prompt): b for b, s in enumerate(bounds) for p in range(*s)}
        order = [block[c.position] for c in result.trace]
        assert order == sorted(order) and [c.step for c in result.trace] == sorted(
            c.step for c in result.trace
        )
        beyond = {p for p in block if p >= config.gen_length}
        limit = Counter(block[p] for p in open_places | beyond)
        if config.rule == "edit":
            assert result.steps <= sum(n + config.method.post_steps for n in limit.values())
        else:
            assert result.steps == len(config.method.plan(len(prompt), origin, [
                p for p in range(config.gen_length) if p not in open_places]))  # fmt: skip
    alone = [
        generate(model, [p], whole, trace=True, requests=[i], canvases=[given[i]])[0]
        for i, p in enumerate(prompts)
    ]
    assert history(alone) == history(results)
    short = generate(model, prompts, config, trace=True, canvases=given)
    for a, b in zip(short, results, strict=True):  # the exit at a block's end changes no text
        assert (a.tokens, a.ended) == (b.tokens, b.ended) and a.steps <= b.steps
        assert history([a])[0] == [c for c in history([b])[0] if c[0] < a.steps]


@pytest.mark.parametrize("rule", ["rcr", "edit"])
def test_rows_leave_at_the_end_of_a_block_and_polls_do_not_matter(rule):
    model, prompts = model_of(12), prompts_of(12, (2, 5, 9, 12))
    config = DecodeConfig(24, 8, rule=rule, batch_size=4)
    results = generate(model, prompts, config, trace=True)
    full = generate(model, prompts, dataclasses.replace(config, stop_at_end=False))
    assert sum(r.steps for r in results) < sum(r.steps for r in full)
    told = {i: [] for i in range(4)}
    lazy = dataclasses.replace(config, poll=100)
    again = generate(
        model, prompts, lazy, trace=True, on_commit=lambda i, commits: told[i].extend(commits)
    )
    assert again == results and [told[i] for i in range(4)] == [r.trace for r in results]
    assert generate(model, prompts, lazy) == [dataclasses.replace(r, trace=[]) for r in results]
    if rule == "rcr":
        assert {r.steps for r in results} <= {8, 16, 24}


@pytest.mark.parametrize("fields", [{}, {"clip": (0.3, 0.8)}, {"steps": 6}])
def test_first_hitting_reveals_the_latest_times_first(fields):
    config = DecodeConfig(12, 4, rule="first_hitting", seed=9, stop_at_end=False, **fields)
    model, prompts, requests = model_of(2), prompts_of(2, (3, 5)), [4, 2**40]
    results = generate(model, prompts, config, trace=True, requests=requests)
    for prompt, request, result in zip(prompts, requests, results, strict=True):
        first = len(prompt)
        times = hitting_times(torch.arange(first, first + 12), request, 9).tolist()
        for start in range(0, 12, 4):
            block = [c for c in result.trace if start <= c.position < start + 4]
            steps = {c.position: c.step for c in block}
            latest = sorted(steps, key=lambda p: -times[p])
            assert [steps[p] for p in latest] == sorted(steps.values())
        plan = config.method.plan(first, "response", request=request)
        counts = [sum(c.step == step for c in result.trace) for step in range(result.steps)]
        assert counts == [turn.quota for turn in plan]
