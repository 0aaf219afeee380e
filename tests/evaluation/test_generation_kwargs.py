"""gen_kwargs of the harness' tasks: honoured, without effect, or refused by name."""

import importlib.util
from pathlib import Path

import pytest
import yaml

from bwsft.decoding.config import DecodeConfig
from bwsft.evaluation.generation_kwargs import NEUTRAL, SAMPLING, decoding_of

BASE = DecodeConfig(gen_length=64, block_size=8)
WARM = DecodeConfig(gen_length=64, block_size=8, temperature=0.5)


def test_limits_ends_and_fields_of_the_decoder():
    wishes = {"until": "\n", "max_gen_toks": 50, "do_sample": False, "temperature": 0.7}
    config, limit, until = decoding_of(wishes, WARM)
    assert (config.gen_length, limit, until) == (56, 50, ("\n",)) and config.temperature == 0
    config, limit, until = decoding_of(
        {"until": ["a", "b"], "rule": "threshold", "threshold": 0.8, "block_size": 16}, WARM
    )
    assert (config.rule, config.threshold, config.gen_length, limit) == ("threshold", 0.8, 64, 64)
    assert until == ("a", "b") and config.temperature == 0.5
    config, *_ = decoding_of({"rule": "first_hitting", "clip": [0.2, 0.8], "banned_ids": [3]}, BASE)
    assert (config.clip, config.banned_ids) == ((0.2, 0.8), (3,)) and {config: 1}[config]
    config, limit, until = decoding_of(
        {"until": None, "max_gen_toks": None, "max_new_tokens": 9, "min_new_tokens": 4}, BASE
    )
    assert (limit, until, config.min_length, config.gen_length) == (9, (), 4, 16)


@pytest.mark.parametrize(("wishes", "base", "temperature"), [
    ({}, BASE, 0.0),
    ({}, WARM, 0.5),
    ({"do_sample": True}, BASE, 1.0),
    ({"do_sample": True, "temperature": None}, BASE, 1.0),
    ({"do_sample": True}, WARM, 0.5),
    ({"do_sample": True, "temperature": 0.2}, WARM, 0.2),
    ({"temperature": 0.2}, BASE, 0.2),
    ({"do_sample": False}, WARM, 0.0),
    ({"do_sample": False, "temperature": 1}, BASE, 0.0),
    ({"do_sample": True, "temperature": 0.0}, WARM, 0.0),
])  # fmt: skip
def test_the_temperature(wishes, base, temperature):
    assert decoding_of(wishes, base)[0].temperature == temperature


@pytest.mark.parametrize("name", [*NEUTRAL, *SAMPLING])
def test_options_of_other_decoders(name):
    """Nothing asked for changes nothing; something is refused, unless nothing is sampled that a
    cut of the distribution could change."""
    neutral, sampled = (NEUTRAL | SAMPLING)[name], {"do_sample": True}
    for value in (None, *neutral, *map(float, neutral)):
        assert decoding_of(sampled | {name: value}, BASE) == decoding_of(sampled, BASE)
    with pytest.raises(ValueError, match=f"gen_kwargs {name}=7 is not supported"):
        decoding_of(sampled | {name: 7}, BASE)
    if name in SAMPLING:
        assert decoding_of({name: 7}, BASE) == decoding_of({}, BASE)


def test_filters_are_taken_where_tokens_are_sampled():
    asked = {"top_p": 0.9, "top_k": -1}
    config = decoding_of(asked | {"do_sample": True}, BASE)[0]
    assert (config.top_p, config.top_k) == (0.9, 0)
    assert decoding_of(asked, BASE) == decoding_of({}, BASE)


def test_an_unknown_one():
    with pytest.raises(ValueError, match="gen_kwargs topp is unknown to bwsft; .*do_sample"):
        decoding_of({"topp": 0.9}, BASE)


HARNESS = importlib.util.find_spec("lm_eval")


@pytest.mark.slow
@pytest.mark.skipif(HARNESS is None, reason="lm-evaluation-harness is missing")
def test_the_harness_own_tasks():
    """Every gen_kwargs in its task files is understood; what is refused asks for beams."""
    folder, found, refused = Path(HARNESS.origin).parent / "tasks", set(), set()
    for file in folder.rglob("*y*ml"):
        text = file.read_text(errors="replace")
        if "\ngeneration_kwargs:" in text:
            part = text[text.index("\ngeneration_kwargs:") + 1 :].splitlines()
            rest = (n for n, line in enumerate(part) if n and line[:1] not in ("", " ", "#"))
            wishes = yaml.safe_load("\n".join(part[: next(rest, None)]))["generation_kwargs"]
            found.add(repr(wishes))
            try:
                decoding_of(wishes or {}, BASE)
            except ValueError as error:
                refused.add(str(error).split(" is not")[0])
    assert len(found) > 50
    assert refused == {"gen_kwargs num_beams=10"}
