"""Adaptive Parallel Decoding on tiny models: its facts, a slow decoder, and what it refuses."""

import copy
import dataclasses
import random
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import tiny_decoding
import torch
from bwsft_kernels.philox import gumbel, gumbel_key, gumbel_u24
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from thinning import thinned
from tiny_decoding import ENDS, MASK, VOCABULARY, history, prompts_of
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from bwsft.decoding import pipeline as decoder
from bwsft.decoding.adaptive_parallel import joint_head
from bwsft.decoding.choice import Head
from bwsft.decoding.config import DecodeConfig
from bwsft.decoding.generate import generate
from bwsft.decoding.settings import DecoderOptions
from bwsft.models.verifier import load_verifier, new_verifier

SMALL = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.4)  # fmt: skip


model_of = partial(tiny_decoding.model_of, ends=1.0)


def causal_lm(seed=0, rows=VOCABULARY, kind=LlamaForCausalLM, config=LlamaConfig):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind(config(**SMALL, vocab_size=rows)).double().eval()


def noise_at(config, position, request):
    if not config.temperature:
        return 0.0
    numbers = [torch.tensor([n]) for n in (position, 0, request)]
    u24 = gumbel_u24(VOCABULARY, *numbers, gumbel_key(config.seed, numbers[2]))
    return config.temperature * gumbel(u24, torch.float64)[0]


def choice(logits, config, position, request, allowed):
    noisy = logits[:VOCABULARY] + noise_at(config, position, request)
    return max(allowed, key=lambda token: float(noisy[token]))


@torch.no_grad()
def slow(model, lm, prompt, config, canvas, request):
    """(response, steps) of one row, with whole forwards of both models."""
    mixture, lookahead = config.method.mixture, config.method.lookahead
    rows = lm.get_input_embeddings().num_embeddings
    allowed = [t for t in range(min(rows, VOCABULARY)) if t not in (MASK, *config.banned_ids)]
    x = [*prompt, *(MASK if t is None else t for t in canvas)]
    steps = 0
    while MASK in x:
        start = x.index(MASK)
        stop = min(start + lookahead, len(x))
        present = min(stop + config.suffix_window, len(x))
        own = model.model(torch.tensor([x[:present]])).logits[0]
        if model.family.logit_shift:
            own = torch.cat([own[:1], own[:-1]])
        masked = [p for p in range(start, stop) if x[p] == MASK]
        draft = list(x)
        for p in masked:
            draft[p] = choice(own[p], config, p, request, allowed)
        theirs = lm(torch.tensor([draft[:stop]])).logits[0]
        for p in masked:
            size = min(rows, VOCABULARY)
            both = mixture * own[p, :size] + (1 - mixture) * theirs[p - 1, :size]
            both = torch.cat([both, torch.zeros(VOCABULARY - size)])
            best = choice(both, config, p, request, allowed)
            agrees = best == draft[p]
            if agrees or p == start:
                x[p] = best
            if not agrees:
                break
        steps += 1
    return x[len(prompt) :], steps


SETTINGS = {
    "default": {},
    "even": {"mixture": 0.5, "lookahead": 5},
    "verifier first": {"mixture": 0.2, "lookahead": 3, "suffix": "absent"},
    "hot": {"mixture": 0.6, "temperature": 1.2, "lookahead": 6, "suffix": 2},
    "banned": {"mixture": 0.4, "banned_ids": (5, 9)},
}


@pytest.mark.parametrize(
    ("fields", "shift"), thinned([(fields, shift) for fields in SETTINGS for shift in (0, 1)])
)
def test_tokens_are_those_of_a_slow_decoder(fields, shift):
    config = DecodeConfig(12, 4, rule="apd", stop_at_end=False, seed=5, **SETTINGS[fields])
    canvases = [[None] * 12, [None, 7, None, None, 3, 4, None, 8, None, None, None, 6], [None] * 12]
    fewer = 0
    for seed in range(3):
        model, lm = model_of(seed, logit_shift=shift), causal_lm(seed)
        prompts = prompts_of(seed, (4, 1, 9))
        found = generate(
            model, prompts, config, canvases=canvases, trace=True,
            verifier=new_verifier(copy.deepcopy(lm)),
        )
        for request, (prompt, canvas, result) in enumerate(
            zip(prompts, canvases, found, strict=True)
        ):
            response, steps = slow(model, lm, prompt, config, canvas, request)
            places = {c.position: c.token for c in result.trace}
            assert [places.get(p, canvas[p]) for p in range(12)] == response
            assert result.steps == steps == result.passes
            fewer += steps < canvas.count(None)
    assert fewer  # several tokens a step, now and then


@pytest.mark.parametrize("fields", [{}, {"suffix": "absent"}, {"kv_window": 2}])
def test_the_whole_window_is_taken_if_the_verifier_has_no_say(fields):
    model, prompts = model_of(1), prompts_of(1, (3, 7))
    config = DecodeConfig(20, 4, rule="apd", mixture=1.0, lookahead=6, stop_at_end=False, **fields)
    alone = generate(model, prompts, config, trace=True)  # nobody has to verify
    for result in alone:
        counts = [sum(c.step == step for c in result.trace) for step in range(result.steps)]
        assert counts == [6, 6, 6, 2]
    with_one = generate(model, prompts, config, trace=True, verifier=new_verifier(causal_lm()))
    assert with_one == alone


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kv_window", [None, 3])
def test_without_the_model_it_is_sampling_from_the_verifier(temperature, kv_window):
    config = DecodeConfig(
        12, 4, rule="apd", mixture=0.0, temperature=temperature, kv_window=kv_window, seed=3,
        stop_at_end=False,
    )  # fmt: skip
    several = 0
    for seed in range(3):
        lm, prompts = causal_lm(seed, kind=Qwen2ForCausalLM, config=Qwen2Config), [[3, 4], [7]]
        results = generate(
            model_of(seed), prompts, config, requests=[6, 2**35], trace=True,
            verifier=new_verifier(copy.deepcopy(lm)),
        )  # fmt: skip
        for prompt, request, result in zip(prompts, (6, 2**35), results, strict=True):
            text = list(prompt)
            for _ in range(12):
                with torch.no_grad():
                    logits = lm(torch.tensor([text])).logits[0, -1]
                text.append(choice(logits, config, len(text), request, range(MASK)))
            assert [c.token for c in result.trace] == text[len(prompt) :]
            several += result.steps < 12
    assert several or not temperature  # the same noise makes the two models agree by chance


def test_a_lookahead_of_one_goes_from_left_to_right():
    model, prompts = model_of(2), prompts_of(2, (3, 5))
    left = DecodeConfig(8, 8, order="left", stop_at_end=False)
    one = DecodeConfig(8, 8, rule="apd", mixture=1.0, lookahead=1, stop_at_end=False)
    assert history(generate(model, prompts, one, trace=True)) == history(
        generate(model, prompts, left, trace=True)
    )
    mixed = dataclasses.replace(one, mixture=0.5)
    for result in generate(model, prompts, mixed, verifier=new_verifier(causal_lm()), trace=True):
        assert [c[:2] for c in result.trace] == [(i, i) for i in range(8)]


@pytest.mark.parametrize("shift", thinned([1, 0]))
def test_a_window_over_everything_is_no_cache(shift):
    verifier, differ = new_verifier(causal_lm(1)), 0
    for seed in range(4):
        model, prompts = model_of(seed, logit_shift=shift), prompts_of(seed, (3, 8, 5))
        config = DecodeConfig(15, 5, rule="apd", mixture=0.8, lookahead=4, stop_at_end=False)
        for suffix in ("all", "absent"):
            base = dataclasses.replace(config, suffix=suffix)
            exact = generate(model, prompts, base, trace=True, verifier=verifier)
            wide, narrow = (
                generate(
                    model, prompts, dataclasses.replace(base, kv_window=window), trace=True,
                    verifier=verifier,
                )
                for window in (64, 1)
            )  # fmt: skip
            assert history(wide) == history(exact)
            differ += history(narrow) != history(exact)
            assert all(len(result.trace) == 15 for result in narrow)
    assert differ  # freezing older positions does change answers


@pytest.mark.parametrize("own_bias", [True, False])
@pytest.mark.parametrize("other_bias", [True, False])
def test_the_joint_head_gives_the_product_of_both(own_bias, other_bias):
    draw = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    own = Head(random(7, 3), random(7) if own_bias else None, 6)
    other = Head(random(5, 4), random(5) if other_bias else None, 5)
    joint = joint_head(own, other, 0.3)
    hidden, causal = random(2, 3), random(2, 4)
    expected = 0.3 * torch.nn.functional.linear(hidden, own.weight, own.bias)[:, :5]
    expected += 0.7 * torch.nn.functional.linear(causal, other.weight, other.bias)
    both = torch.cat([0.3 * hidden, 0.7 * causal], 1)
    found = torch.nn.functional.linear(both, joint.weight, joint.bias)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert joint.size == 5 and (joint.bias is None) == (not (own_bias or other_bias))


def test_only_new_positions_are_computed(monkeypatch):
    """The model runs the last draft and W - 1 positions before it, up to the window's end; the
    verifier reads from the newest token on, up to the last drafted one."""
    model, verifier = model_of(3), new_verifier(causal_lm(3))
    ran, read = [], []
    active, causal = model.active_hidden_states, verifier.decoder.run_layers

    def run_model(ids, span, *args):
        ran.append((int(span.start), int(span.start + span.length)))
        return active(ids, span, *args)

    def run_verifier(ids, positions, *args):
        read.append((int(positions[0]), int(positions[-1]) + 1))
        return causal(ids, positions, *args)

    monkeypatch.setattr(model, "active_hidden_states", run_model)
    monkeypatch.setattr(verifier.decoder, "run_layers", run_verifier)
    config = DecodeConfig(
        20, 4, rule="apd", mixture=0.8, lookahead=6, kv_window=3, suffix=1, stop_at_end=False
    )
    (result,) = generate(model, [[3, 4, 5]], config, trace=True, verifier=verifier)
    starts = [min(c.position for c in result.trace if c.step == s) for s in range(result.steps)]
    newest = [max(c.position for c in result.trace if c.step == s) for s in range(result.steps)]
    stops = [min(3 + start + 6, 23) for start in starts]
    assert max(b - a for a, b in zip(starts, starts[1:], strict=False)) > 1
    assert ran == [
        (3 + before - 2, min(stop + 1, 23)) for before, stop in zip(starts, stops[1:], strict=False)
    ]
    froms = [0, *(3 + position for position in newest[:-1])]
    assert read == [(a, stop - 1) for a, stop in zip(froms, stops, strict=True)]


@st.composite
def configs(draw):
    return DecodeConfig(
        10, 5, rule="apd", mixture=draw(st.sampled_from([0.0, 0.3, 0.8, 1.0])),
        lookahead=draw(st.sampled_from([1, 3, 100])),
        kv_window=draw(st.sampled_from([None, 1, 4])),
        suffix=draw(st.sampled_from(["all", "absent"])), min_length=draw(st.sampled_from([0, 4])),
        temperature=draw(st.sampled_from([0.0, 0.9])), batch_size=draw(st.integers(1, 3)),
    )  # fmt: skip


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(configs(), st.integers(0, 2**30))
def test_what_always_holds(config, seed):
    draw = random.Random(seed)
    model, verifier = model_of(draw.randrange(3)), new_verifier(causal_lm(draw.randrange(3)))
    prompts = prompts_of(seed, [draw.randrange(1, 8) for _ in range(3)])
    canvases = [
        [draw.choice([None, None, draw.randrange(3, MASK)]) for _ in range(10)] for _ in prompts
    ]
    options = {"trace": True, "verifier": verifier}
    whole = dataclasses.replace(config, stop_at_end=False)
    results = generate(model, prompts, whole, canvases=canvases, **options)
    for canvas, result in zip(canvases, results, strict=True):
        places = [p for p, token in enumerate(canvas) if token is None]
        assert [c.position for c in result.trace] == places  # from left to right
        counts = [sum(c.step == step for c in result.trace) for step in range(result.steps)]
        assert not counts or min(counts) >= 1
        assert not any(c.token == MASK for c in result.trace)
        early = [c.token for c in result.trace if c.position < config.min_length]
        assert not set(early) & set(ENDS)
    alone = [
        generate(model, [p], whole, canvases=[canvas], requests=[i], **options)[0]
        for i, (p, canvas) in enumerate(zip(prompts, canvases, strict=True))
    ]
    assert history(alone) == history(results)
    short = generate(model, prompts, config, canvases=canvases, **options)
    for a, b in zip(short, results, strict=True):
        assert (a.tokens, a.ended) == (b.tokens, b.ended) and a.steps <= b.steps
        assert history([a])[0] == [c for c in history([b])[0] if c[0] < a.steps]


def test_ids_that_the_verifier_does_not_know_are_never_produced():
    """Dream's vocabulary is longer than that of the published verifier; here ids 12 to 14 are."""
    model = model_of(1, mask_id=3)
    with torch.no_grad():
        model.head()[0][12:] *= 9
    config = DecodeConfig(12, 4, rule="apd", mixture=0.9, stop_at_end=False)
    prompts = [[4, 5], [6]]
    found = generate(model, prompts, config, trace=True, verifier=new_verifier(causal_lm(0, 12)))
    assert max(c.token for r in found for c in r.trace) < 12
    free = dataclasses.replace(config, mixture=1.0)
    assert max(c.token for r in generate(model, prompts, free, trace=True) for c in r.trace) >= 12
    with pytest.raises(ValueError, match="prompt 0 or its canvas has a token id that the verifier"):
        generate(model, [[13]], config, verifier=new_verifier(causal_lm(0, 12)))


@pytest.mark.parametrize("family, fields, prompt, rows, message", [
    ({}, {}, [3], None, "rule apd needs a verifier: a causal LM with the model's vocabulary"),
    ({}, {"rule": "quota", "mixture": None}, [3], 16, "a verifier belongs to rule apd"),
    ({}, {}, [3], 12, "the verifier has 12 token ids, too few for id 15 of the model"),
    ({}, {}, [], 16, "prompt 0 is empty, but a verifier predicts from the token before"),
    ({}, {}, [3] * 57, 16, "prompt 0 needs 65 positions with its canvas, more than the ver"),
    ({"softcap": 4.0}, {}, [3], 16, "rule apd needs linear heads"),
])
def test_bad_verifiers_are_refused(family, fields, prompt, rows, message):
    config = DecodeConfig(8, 4, **{"rule": "apd", "mixture": 0.5, **fields})
    verifier = rows and new_verifier(causal_lm(0, rows))
    with pytest.raises(ValueError, match=message):
        generate(model_of(0, **family), [prompt], config, verifier=verifier)


class Words:
    def __init__(self, vocabulary, added):
        self.get_vocab, self.get_added_vocab = lambda: vocabulary | added, lambda: added


@pytest.mark.parametrize("theirs, message", [
    ({"a": 0, "b": 1, "<end>": 2}, None),
    ({"a": 0, "b": 1, "more": 3}, None),
    ({"a": 0, "b": 2, "<end>": 1}, "'b' is 2 there and 1 in"),
    ({"a": 0, "<end>": 2}, "'b' is None there"),
    ({"a": 0, "b": 1, "<end>": 5}, "'<end>' is 5 there and 2 in"),
])
def test_token_ids_must_mean_the_same_to_both(theirs, message, tmp_path, monkeypatch):
    """An added token such as [MASK] or an end token may be missing, but not stand elsewhere."""
    causal_lm().save_pretrained(tmp_path)
    ours = Words({"a": 0, "b": 1}, {"<end>": 2, "[MASK]": 15})
    trained = SimpleNamespace(tokenizer=ours, backbone=model_of(0))
    monkeypatch.setattr(decoder, "load_tokenizer", lambda path: Words(theirs, {}))
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        decoder.load_verifier_for(trained, str(tmp_path))


def test_a_digest_knows_a_verifier_by_its_place(tmp_path, monkeypatch):
    trained = SimpleNamespace(folder="hub/id", backbone=model_of(0))
    digests = []
    for folder, name in (("a", "lm"), ("a", "../a/lm"), ("b", "lm"), ("b", "org/name")):
        (tmp_path / folder / "lm").mkdir(parents=True, exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        verifier = new_verifier(causal_lm(), name)
        template = SimpleNamespace(name="none", args=None)
        made = decoder.Decoder(trained, template, DecodeConfig(), verifier)
        digests.append(made.digest())
    assert digests[0] == digests[1] and len(set(digests)) == 3


@pytest.mark.parametrize("fields, message", [
    ({"threshold": 0.5}, "threshold belongs to rule threshold or edit or sp"),
    ({"rule": "entropy", "steps": 24, "min_length": 9}, "steps belongs to rule quota"),
    ({"rule": "apd", "mixture": 1.0, "lookahead": 0}, "lookahead must be at least 1"),
    ({"rule": "rcr", "gen_length": 8, "order": "left"}, "rule rcr goes by confidence"),
])
def test_wrong_options_are_found_without_the_model(fields, message):
    with pytest.raises(ValueError, match=message):
        decoder.chosen_settings(DecoderOptions(**fields))
    decoder.chosen_settings(DecoderOptions(steps=24, min_length=30, refresh=4, cfg_scale=1.0))


def test_a_verifier_is_loaded_from_a_folder(tmp_path):
    causal_lm(4).save_pretrained(tmp_path / "lm")
    loaded = load_verifier(tmp_path / "lm", dtype=torch.float64)
    config = DecodeConfig(8, 4, rule="apd", mixture=0.4)
    model, prompts = model_of(0), [[3, 4]]
    assert generate(model, prompts, config, verifier=loaded) == generate(
        model, prompts, config, verifier=new_verifier(causal_lm(4))
    )
    assert loaded.name == str(tmp_path / "lm")
    tied = LlamaForCausalLM(LlamaConfig(**SMALL, vocab_size=16, tie_word_embeddings=True))
    tied.save_pretrained(tmp_path / "tied")  # without a head of its own
    weight = load_verifier(tmp_path / "tied").decoder.head()[0]
    assert torch.equal(weight, tied.get_input_embeddings().weight)
    weights = tmp_path / "lm" / "model.safetensors"
    tensors = load_file(weights)
    headless = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(headless, weights, {"format": "pt"})
    with pytest.raises(ValueError, match="lm lacks lm_head.weight: take a complete checkpoint"):
        load_verifier(tmp_path / "lm")
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(ValueError, match="model.safetensors is damaged or cut short"):
        load_verifier(tmp_path / "lm")
    save_file(tensors, weights, {"format": "pt"})
    (tmp_path / "lm" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="can't load a causal LM from .*lm: "):
        load_verifier(tmp_path / "lm")
    (tmp_path / "lm" / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="lm holds an adapter: merge it"):
        load_verifier(tmp_path / "lm")
    with pytest.raises(FileNotFoundError, match="gone"):
        load_verifier(tmp_path / "gone")
