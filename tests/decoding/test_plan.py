"""The decoder's policies one by one: quotas, block grid, plan, commitment, finality, settings."""

import dataclasses
import inspect
import itertools
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_decoding import bounds_of

from bwsft.decoding.canvas import final_rows
from bwsft.decoding.config import RULES, DecodeConfig
from bwsft.decoding.plan import quotas
from bwsft.decoding.rules import commit_quota
from bwsft.decoding.settings import DecodeSettings

ORIGINS = st.sampled_from(["response", "absolute"])


@st.composite
def configs(draw):
    size, blocks = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    per_block = draw(st.one_of(st.none(), st.integers(1, 2 * size)))
    steps = None if per_block is None else per_block * blocks
    return DecodeConfig(gen_length=size * blocks, block_size=size, steps=steps)


@given(st.integers(0, 300), st.integers(1, 300))
def test_quotas_are_even_and_spend_everything(masked, steps):
    found = quotas(masked, steps)
    assert len(found) == steps and sum(found) == masked
    assert max(found) - min(found) <= 1
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize(
    "masked, steps, expected",
    [(32, 32, [1] * 32), (10, 4, [3, 3, 2, 2]), (2, 5, [1, 1, 0, 0, 0]), (8, 1, [8])],
)
def test_quotas_by_hand(masked, steps, expected):
    assert quotas(masked, steps) == expected


@given(st.integers(0, 60), configs(), ORIGINS)
def test_blocks_tile_the_canvas_on_their_grid(prompt, config, origin):
    bounds = bounds_of(prompt, config, origin)
    covered = [i for start, stop in bounds for i in range(start, stop)]
    assert covered == list(range(prompt, prompt + len(covered)))
    assert 0 <= len(covered) - config.gen_length < config.block_size
    assert all(0 < stop - start <= config.block_size for start, stop in bounds)
    grid = 0 if origin == "absolute" else prompt
    assert all((stop - grid) % config.block_size == 0 for _, stop in bounds)


def test_blocks_by_hand():
    config = DecodeConfig(gen_length=8, block_size=4)
    assert bounds_of(5, config, "response") == [(5, 9), (9, 13)]
    assert bounds_of(5, config, "absolute") == [(5, 8), (8, 12), (12, 16)]
    assert bounds_of(8, config, "absolute") == [(8, 12), (12, 16)]


@given(st.integers(0, 60), configs(), ORIGINS, st.data())
def test_a_plan_commits_every_open_position_once_block_by_block(prompt, config, origin, data):
    given_places = data.draw(st.sets(st.integers(0, config.gen_length - 1)))
    plan = config.method.plan(prompt, origin, sorted(given_places))
    decoded = bounds_of(prompt, config, origin)[-1][1] - prompt
    assert sum(step.quota for step in plan) == decoded - len(given_places)
    assert [step.start for step in plan] == sorted(step.start for step in plan)
    for start, stop in bounds_of(prompt, config, origin):
        steps = [step for step in plan if (step.start, step.stop) == (start, stop)]
        total = stop - start - sum(start <= prompt + place < stop for place in given_places)
        shares = quotas(total, config.method.steps_per_block)
        assert [step.quota for step in steps] == [share for share in shares if share]
        assert [step.number for step in steps] == list(range(len(steps)))
        left = [step.masked for step in steps] + [0]
        assert left[0] == total
        assert [a - b for a, b in itertools.pairwise(left)] == [step.quota for step in steps]
    dynamic = dataclasses.replace(config, rule="threshold", steps=None)
    openings = [dataclasses.replace(turn, quota=0) for turn in plan if turn.number == 0]
    assert dynamic.method.plan(prompt, origin, sorted(given_places)) == openings


def test_steps_are_one_per_token_unless_given():
    # More steps than tokens: the empty ones are left out.
    for steps, expected in ((None, 12), (6, 6), (30, 12)):
        config = DecodeConfig(gen_length=12, block_size=4, steps=steps)
        assert len(config.method.plan(3, "response")) == expected


@given(st.data())
def test_commit_takes_the_most_confident_masked_slots(data):
    rows, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    values = st.sampled_from([0.1, 0.2, 0.5, 1.0])  # few, so that ties are the rule
    confidence = [data.draw(st.lists(values, min_size=width, max_size=width)) for _ in range(rows)]
    masked = [
        data.draw(st.lists(st.booleans(), min_size=width, max_size=width)) for _ in range(rows)
    ]
    quota = [data.draw(st.integers(0, width + 1)) for _ in range(rows)]
    found = commit_quota(torch.tensor(confidence), torch.tensor(masked), torch.tensor(quota))
    for row in range(rows):
        slots = [i for i in range(width) if masked[row][i]]
        best = sorted(slots, key=lambda i: (-confidence[row][i], i))[: quota[row]]
        assert found[row].nonzero()[:, 0].tolist() == sorted(best)


@pytest.mark.parametrize("canvas, final", [
    ([5, 1, 9, 9], True),
    ([5, 2, 9, 9], True),  # any of the end ids
    ([5, 9, 1, 9], False),  # a [MASK] before the end
    ([5, 9, 1, 1], False),
    ([5, 6, 7, 8], True),  # full, though without an end
    ([1, 9, 9, 9], True),
    ([9, 9, 9, 1], False),
])
def test_text_is_final_without_mask_before_its_end(canvas, final):
    found = final_rows(torch.tensor([canvas, [9] * 4]), 9, torch.tensor([1, 2]))
    assert found.tolist() == [final, False]


@pytest.mark.parametrize("fields, message", [
    ({"gen_length": 0}, "gen_length must be at least 1, not 0"),
    ({"block_size": 0}, "block_size must be at least 1"),
    ({"batch_size": 0}, "batch_size must be at least 1"),
    ({"poll": 0}, "poll must be at least 1"),
    ({"gen_length": 100, "block_size": 32}, "must divide gen_length 100; try gen_length 128"),
    ({"steps": 3}, "steps 3 must be a multiple of the number of blocks, 4"),
    ({"steps": 6}, "steps 6 must be a multiple"),
    ({"steps": 0}, "steps 0 must be a multiple"),
    ({"temperature": -0.1}, "temperature must be 0 or positive"),
    ({"temperature": float("nan")}, "temperature must be 0 or positive"),
    ({"temperature": float("inf")}, "temperature must be 0 or positive"),
    ({"seed": -1}, "seed must be in"),
    ({"seed": 2**63}, "seed must be in"),
    ({"min_length": 129}, "min_length must be in .0, gen_length., not 129"),
    ({"rule": "best"}, "rule must be one of quota, dream, .* renoise, not 'best'"),
    ({"threshold": 0.8}, "threshold belongs to rule threshold or edit or speculative, and the"),
    ({"rule": "factor", "entropy_bound": 1.0}, "entropy_bound belongs to rule entropy"),
    ({"rule": "threshold", "threshold": -0.1}, "threshold must be 0 or positive"),
    ({"rule": "threshold", "threshold": 90}, "threshold is a probability, from 0 to 1, not 90"),
    ({"rule": "factor", "steps": 8}, "steps belongs to rule quota or .* is factor"),
    ({"rule": "apd", "steps": 8}, "steps belongs to rule quota or dream or threshold or first_"),
    ({"top_p": 0.0}, "top_p must be above 0 and at most 1, not 0.0"),
    ({"top_k": -1}, "top_k must be 0 or positive, not -1"),
    ({"confidence": "cold"}, "confidence must be one of raw, tempered, not 'cold'"),
    ({"ends": "first"}, "ends must be one of free, last, no_eos, not 'first'"),
    ({"clip": (0.1, 0.9)}, "clip belongs to rule first_hitting, and the rule is quota"),
    ({"rule": "first_hitting", "clip": (0.9, 0.1)}, "clip must be two rising numbers in .0,"),
    ({"rule": "first_hitting", "clip": (0.2, 1.1)}, "clip must be two rising numbers"),
    ({"rule": "first_hitting", "clip": 0.5}, "clip must be two rising numbers"),
    ({"rule": "first_hitting", "clip": (0.1, 0.9), "steps": 4}, "clip and steps both say"),
    ({"rule": "first_hitting", "order": "left"}, "first_hitting goes by hitting times: leave"),
    ({"rule": "rcr", "order": "margin"}, "rule rcr goes by confidence: leave order out"),
    ({"rule": "rcr", "revise": "cond"}, "revise belongs to rule routed, and the rule is rcr"),
    ({"rule": "routed", "schedule": "sine"}, "schedule must be one of linear, cosine, not 'si"),
    ({"rule": "routed", "revise": "always"}, "revise must be one of never, cond, uncond, not"),
    ({"rule": "routed", "order_noise": -1.0}, "order_noise must be 0 or positive, not -1.0"),
    ({"rule": "edit", "post_steps": -1}, "post_steps must be 0 or positive, not -1"),
    ({"rule": "edit", "edit_threshold": float("nan")}, "edit_threshold must be 0 or positive"),
    ({"rule": "threshold", "edit_threshold": 0.5}, "edit_threshold belongs to rule edit"),
    ({"rule": "apd", "mixture": 1.5}, "mixture must be in .0, 1., not 1.5"),
    ({"rule": "apd", "lookahead": 0}, "lookahead must be at least 1, not 0"),
    ({"rule": "apd", "kv_window": 0}, "kv_window must be at least 1, not 0"),
    ({"rule": "apd", "context": "cached"}, "rule apd needs context exact, not cached: its own"),
    ({"rule": "apd", "graphs": True}, "other shapes in every step"),
    ({"rule": "apd", "cfg_scale": 1.0}, "rule apd mixes the logits of two models already"),
    ({"rule": "apd", "order": "left"}, "rule apd goes by position: leave order out"),
    ({"rule": "speculative", "drafts": 0}, "drafts must be at least 1: rule quota commits a token"),
    ({"rule": "speculative", "context": "cached"}, "speculative needs context exact or block_"),
    ({"rule": "speculative", "graphs": True}, "speculative runs ever new shapes: leave graphs"),
    ({"rule": "speculative", "steps": 8}, "steps belongs to rule quota"),
    ({"drafts": 2}, "drafts belongs to rule speculative, and the rule is quota"),
    ({"rule": "entropy", "order": "left"}, "rule entropy goes by entropy: leave order out"),
    ({"rule": "factor", "order": "margin"}, "rule factor goes by confidence"),
    ({"order": "right"}, "order must be one of confidence, margin, entropy, random, left"),
    ({"context": "warm"}, "context must be one of exact, cached, prefix, block_causal"),
    ({"refresh": 4}, "refresh is for context cached and prefix, not exact"),
    ({"context": "cached", "refresh": -1}, "refresh must be 0 or positive"),
    ({"context": "cached", "cfg_scale": 1.0}, "cfg_scale needs context exact, not cached"),
    ({"cfg_scale": -1.0}, "cfg_scale must be 0 or positive"),
    ({"suffix": "some"}, "suffix must be all, absent or a number, not 'some'"),
    ({"suffix": -1}, "suffix must be all, absent or a number from 0"),
    ({"context": "cached", "suffix": 3}, "suffix is for context exact and prefix: cached"),
    ({"context": "block_causal", "suffix": "absent"}, "block_causal decodes as it was trained"),
])
def test_bad_settings_name_the_field(fields, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        DecodeConfig(**fields)


def test_the_documentation_names_every_rule_with_its_options():
    text = (Path(__file__).parents[2] / "docs" / "decoders.md").read_text()
    table = text.partition("What each guarantees")[0]
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|", table, re.MULTILINE)
    documented = {name: set(re.findall(r"--([a-z-]+)", options)) for name, options in rows}
    assert list(documented) == list(RULES)
    for name, rule in RULES.items():
        options = {option.replace("_", "-") for option in rule.options()}
        options |= set() if rule.own_order else {"order"}
        options |= {"verifier"} if rule.takes_verifier else set()
        assert documented[name] == options, name


def test_help_texts_name_the_rules_of_an_option_and_its_default():
    source = inspect.getsource(DecodeSettings)
    for option in {option for rule in RULES.values() for option in rule.options()} - {"steps"}:
        owners = [rule for rule in RULES.values() if option in rule.options()]
        (text,) = re.findall(rf'    {option}: .*\n    """([^"]*)"""', source)
        assert re.match(r"Rules? (.*?):", text)[1] == ", ".join(rule.name for rule in owners)
        default = getattr(owners[0](DecodeConfig(8, 4)), option)
        if default is not None:
            shown = re.search(r"default ([\w.]+?)\.$", text)[1]
            assert shown == (default if isinstance(default, str) else f"{default:g}")
