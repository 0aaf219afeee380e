"""Published decoders' settings against plain loops written from their definitions, row by row, with
[MASK] out of the choice; and the recipes that name them."""

import dataclasses
from typing import get_args

import pytest
import torch
from bwsft_kernels.philox import gumbel, gumbel_key, gumbel_u24
from tiny_decoding import ENDS, MASK, VOCABULARY, bounds_of, model_of, prompts_of, until_end

from bwsft.decoding.config import DecodeConfig
from bwsft.decoding.generate import generate
from bwsft.decoding.pipeline import chosen_settings
from bwsft.decoding.recipes import RECIPES
from bwsft.decoding.settings import DecoderOptions, DecodeSettings, RecipeName


@torch.no_grad()
def plain(model, prompt, config, blocks, choose):
    """(response, commits): `choose(logits, number, step, request 0)` gives, of the [MASK]s of a
    block with logits {position: [V]}, the tokens that step `number` of the block commits."""
    x = torch.tensor([*prompt, *[MASK] * (blocks[-1][1] - len(prompt))])
    commits, step = [], 0
    for start, stop in blocks:
        for number in range(stop - start + 1 if config.steps is None else config.steps):
            masked = [p for p in range(start, stop) if x[p] == MASK]
            if not masked:
                break
            logits = model.model(x[None]).logits[0]
            if model.family.logit_shift:
                logits = torch.cat([logits[:1], logits[:-1]])
            taken = choose({p: logits[p].clone() for p in masked}, number, step, stop - start)
            for p, (token, confidence) in sorted(taken.items()):
                x[p] = token
                commits.append((step, p - len(prompt), token, confidence))
            step += bool(taken)
    return x[len(prompt) :].tolist(), commits


def assert_plain(model, prompts, config, blocks, choose):
    """The decoder's text and commits are those of the plain loop; returns all results."""
    results = []
    for prompt in prompts:
        (found,) = generate(model, [prompt], config, trace=True)
        response, commits = plain(model, prompt, config, blocks(prompt), choose)
        assert (found.tokens, found.ended) == until_end(response[: config.gen_length])
        expected = [c for c in commits if c[0] < found.steps and c[1] < config.gen_length]
        assert [c[:3] for c in found.trace] == [c[:3] for c in expected]
        assert [c[3] for c in found.trace] == pytest.approx([c[3] for c in expected], rel=1e-9)
        results.append(found)
    return results


def surest(confidence, count):
    """Positions of the `count` largest of {position: confidence}, the leftmost of equal ones."""
    return sorted(confidence, key=lambda p: (-confidence[p], p))[:count]


# --- LLaDA ---


@pytest.mark.parametrize("ends", ["free", "last", "no_eos"])
def test_the_switches_of_llada_against_end_tokens(ends):
    """logits_eos_inf bans one end token; confidence_eos_eot_inf chooses first, takes both out of
    the softmax, and so gives them confidence 0."""
    config = DecodeConfig(12, 12, steps=6, ends=ends, stop_at_end=False)
    produced, late = set(), []

    def choose(logits, number, step, size):
        token, confidence = {}, {}
        for p, row in logits.items():
            if ends == "no_eos":
                row[ENDS[0]] = -torch.inf
            choice = row.clone()
            choice[MASK] = -torch.inf
            token[p] = int(choice.argmax())
            if ends == "last":
                row[list(ENDS)] = -torch.inf
            confidence[p] = float(row.softmax(-1)[token[p]])
        return {p: (token[p], confidence[p]) for p in surest(confidence, 2)}

    for seed in range(6):
        model = model_of(seed, ends=2.5)
        prompts = prompts_of(seed, (3, 6))
        whole = lambda p: [(len(p), len(p) + 12)]  # noqa: E731
        for found in assert_plain(model, prompts, config, whole, choose):
            produced |= {c.token for c in found.trace}
            late += [c.confidence for c in found.trace if c.token in ENDS]
    assert (ENDS[0] in produced) == (ends != "no_eos") and ENDS[1] in produced
    assert (set(late) == {0.0}) == (ends == "last")


# --- Dream and SDAR: top-p, top-k, and a confidence that is tempered ---


def drawn(config, row, position, step):
    """(token, softmax of the tempered and filtered logits) by the published filters: top-p drops a
    token if those before it have more than top_p, top-k those below the k-th logit."""
    row = row / config.temperature if config.temperature else row
    mask_logit, row[MASK] = row[MASK].clone(), -torch.inf
    if config.top_p < 1:
        p, total = row.softmax(-1), 0.0
        for token in sorted(range(VOCABULARY), key=lambda i: -float(p[i])):
            if total > config.top_p:
                row[token] = -torch.inf
            total += float(p[token])
    if config.top_k:
        row[row < sorted(row.tolist())[-config.top_k]] = -torch.inf
    noisy = row
    if config.temperature:
        numbers = [torch.tensor([n]) for n in (position, step, 0)]
        u24 = gumbel_u24(VOCABULARY, *numbers, gumbel_key(config.seed, numbers[2]))
        noisy = row + gumbel(u24, row.dtype)[0]
    token = int(noisy.argmax())
    row[MASK] = mask_logit  # it is never chosen, and stays in the normalizer, as everywhere here
    return token, row.softmax(-1)


FILTERS = [
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.4, "top_k": 3},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 4},
    {"top_p": 0.6},
    {"temperature": 0.5},
]


@pytest.mark.parametrize(("fields", "order"), [
    *zip(FILTERS, ["entropy", "margin", "confidence", "entropy", "margin"], strict=True)
], ids=str)
def test_dreams_decoder(fields, order):
    """One canvas, logits of the position before, int(m (1 - s / t)) of the m [MASK]s that are left
    from timestep t to s in fp32; maskgit_plus, topk_margin and entropy are the orders."""
    for seed, (length, steps) in enumerate([(9, 9), (9, 4), (5, 11)]):
        config = DecodeConfig(
            length, length, rule="dream", steps=steps, order=order, confidence="tempered",
            stop_at_end=False, seed=9, **fields,
        )  # fmt: skip
        times = torch.linspace(1, 1e-3, steps + 1)

        def choose(logits, number, step, size, config=config, times=times):
            m, last = torch.tensor(len(logits)), number == len(times) - 2
            count = int(m) if last else int(m * (1 - times[number + 1] / times[number]))
            token, confidence, score = {}, {}, {}
            for p, row in logits.items():
                token[p], probability = drawn(config, row, p, step)
                confidence[p] = float(probability[token[p]])
                choices = [float(q) for i, q in enumerate(probability) if i != MASK]
                first, second = sorted(choices)[: -3 : -1]
                bits = -(probability * probability.clamp_min(1e-300).log()).sum()
                kinds = {"confidence": confidence[p], "margin": first - second}
                score[p] = (kinds | {"entropy": -float(bits)})[config.order]
            return {p: (token[p], confidence[p]) for p in surest(score, count)}

        model = model_of(seed, logit_shift=1)
        prompts = prompts_of(seed, (3 + seed,))
        assert_plain(model, prompts, config, lambda p, n=length: [(len(p), len(p) + n)], choose)


@pytest.mark.parametrize(("fields", "per_block"), [
    *zip([*FILTERS, {"temperature": 1.0}], [3, 2, 3, 1, 2, 3], strict=True)
], ids=str)
def test_sdars_dynamic_rule(fields, per_block):
    """All above the threshold, or the surest of an even share of the block where those are more,
    on the grid of the whole row."""
    size, above, floors = 8, 0, 0
    config = DecodeConfig(
        16, size, rule="threshold", threshold=0.45, steps=2 * per_block, confidence="tempered",
        stop_at_end=False, seed=4, **fields,
    )  # fmt: skip

    def choose(logits, number, step, _):
        nonlocal above, floors
        floor = size // per_block + (number < size % per_block)
        found = {p: drawn(config, row, p, step) for p, row in logits.items()}
        confidence = {p: float(q[token]) for p, (token, q) in found.items()}
        sure = [p for p in confidence if confidence[p] > 0.45]
        enough = len(sure) >= floor
        above, floors = above + enough, floors + (not enough and len(logits) > floor > 1)
        taken = sure if enough else surest(confidence, floor)
        return {p: (found[p][0], confidence[p]) for p in taken}

    for seed, length in enumerate((3, 8)):
        model = model_of(seed, block_origin="absolute")
        prompts = prompts_of(seed, (length,))
        on_grid = lambda p: bounds_of(len(p), config, "absolute")  # noqa: E731
        assert_plain(model, prompts, config, on_grid, choose)
    assert above and floors or per_block == 1


def test_filters_leave_a_raw_confidence_alone():
    """Without temper the confidence is LLaDA's, whatever the filters: top-k 1 is greedy."""
    model = model_of(1)
    prompts, shape = prompts_of(1, (4, 5, 2)), {"gen_length": 12, "block_size": 4}
    plain_config = DecodeConfig(**shape, order="entropy", steps=6, min_length=5)
    filtered = dataclasses.replace(plain_config, temperature=0.8, top_k=1)
    results = (generate(model, prompts, c, trace=True) for c in (plain_config, filtered))
    for one, two in zip(*results, strict=True):
        assert [c[:3] for c in one.trace] == [c[:3] for c in two.trace]
        assert [c[3] for c in two.trace] == pytest.approx([c[3] for c in one.trace], rel=1e-12)


# --- recipes ---


def test_a_recipe_sets_what_the_options_leave_open():
    assert set(get_args(RecipeName)) == set(RECIPES)
    fields = {field.name: field for field in dataclasses.fields(DecodeSettings)}
    for name, recipe in RECIPES.items():
        # An option that is given wins: none of them has a default of its own.
        assert all(fields[option].default is None for option in recipe.settings)
        assert recipe.source
        settings = chosen_settings(DecoderOptions(recipe=name))
        config = DecodeConfig(**settings)
        assert {o: getattr(config, o) for o in recipe.settings} == recipe.settings
        own = DecoderOptions(recipe=name, temperature=0.0, block_size=2, gen_length=4, steps=2)
        if config.steps is None:
            own = dataclasses.replace(own, steps=None)
        changed = DecodeConfig(**chosen_settings(own))
        assert (changed.temperature, changed.gen_length) == (0, 4) and changed.rule == config.rule
    # Another rule comes without what the recipe sets for its own.
    for recipe, rule, gone in (
        ("llada-instruct-gsm8k", "speculative", "steps"), ("llada2", "speculative", "threshold"),
        ("llada2.1", "threshold", "edit_threshold"),
    ):  # fmt: skip
        settings = chosen_settings(DecoderOptions(recipe=recipe, rule=rule))
        assert settings["rule"] == rule and gone not in settings
        kept = RECIPES[recipe].settings.items()
        assert all(settings[k] == v for k, v in kept if k in ("gen_length", "block_size"))
