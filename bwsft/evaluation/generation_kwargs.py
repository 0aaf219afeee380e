"""The generation arguments of lm-evaluation-harness tasks, which are those of transformers' and
vLLM's decoders, as a DecodeConfig."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

from bwsft.decoding.config import DecodeConfig

logger = logging.getLogger(__name__)
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
SHORTEST = ("min_new_tokens", "min_tokens")
DECODING = {field.name for field in dataclasses.fields(DecodeConfig)}

# Name -> the values that ask for nothing; None never does.
_OFF = (False, 0)
SAMPLING = {  # they cut the distribution that is sampled from: without sampling any value will do
    "min_p": (0,), "typical_p": (1,), "epsilon_cutoff": (0,), "eta_cutoff": (0,),
}  # fmt: skip
NEUTRAL = {
    "num_beams": (1,), "num_beam_groups": (1,), "best_of": (1,), "n": (1,),
    "num_return_sequences": (1,), "penalty_alpha": (0,), "repetition_penalty": (1,),
    "encoder_repetition_penalty": (1,), "presence_penalty": (0,), "frequency_penalty": (0,),
    "no_repeat_ngram_size": (0,), "encoder_no_repeat_ngram_size": (0,), "guidance_scale": (1,),
    "diversity_penalty": (0,), "ignore_eos": _OFF, "renormalize_logits": _OFF,
    "remove_invalid_values": _OFF, "output_scores": _OFF, "output_logits": _OFF,
    "output_attentions": _OFF, "output_hidden_states": _OFF, "return_dict_in_generate": _OFF,
    "logprobs": _OFF, "max_length": (),
}  # fmt: skip
# Of beams, of a cache that changes no result, and of padding: whatever they say.
IRRELEVANT = {
    "length_penalty", "early_stopping", "use_cache", "cache_implementation", "pad_token_id",
    "skip_special_tokens", "spaces_between_special_tokens",
}  # fmt: skip


def decoding_of(
    gen_kwargs: dict[str, Any], base: DecodeConfig
) -> tuple[DecodeConfig, int, tuple[str, ...]]:
    """(how to decode, most tokens of the answer, strings that end it) of a request's gen_kwargs.

    until, do_sample, temperature and the token limits mean what they do elsewhere in the harness;
    the canvas is the limit rounded up to whole blocks. do_sample without a temperature samples at
    1, where the model's options name none. The other names are fields of DecodeConfig, or options
    of other decoders at a value without effect; ValueError for any else.
    """
    wishes = {name: value for name, value in gen_kwargs.items() if value is not None}
    until = wishes.pop("until", [])
    limits = [wishes.pop(name) for name in LENGTHS if name in wishes]
    shortest = [wishes.pop(name) for name in SHORTEST if name in wishes]
    if shortest:
        wishes["min_length"] = int(shortest[0])
    _set_temperature(wishes, base)
    if wishes["temperature"] == 0:  # the likeliest token is always among those that are kept
        wishes = {name: wish for name, wish in wishes.items() if name not in ("top_p", "top_k")}
    elif wishes.get("top_k") == -1:
        wishes["top_k"] = 0
    foreign = {name: wishes.pop(name) for name in list(wishes) if name not in DECODING}
    _check(foreign, sampled=wishes["temperature"] > 0)
    size = wishes.get("block_size", base.block_size)
    limit = int(limits[0]) if limits else wishes.get("gen_length", base.gen_length)
    config = dataclasses.replace(base, **{**wishes, "gen_length": -(-limit // size) * size})
    return config, limit, tuple([until] if isinstance(until, str) else until)


def _set_temperature(wishes: dict[str, Any], base: DecodeConfig) -> None:
    """What do_sample and temperature say together, as in the harness: do_sample False wins."""
    sample = wishes.pop("do_sample", None)
    if sample is False:
        wishes["temperature"] = 0.0
    elif "temperature" not in wishes:
        wishes["temperature"] = base.temperature or float(bool(sample))
    elif sample and not wishes["temperature"]:
        _warn_once("gen_kwargs do_sample at temperature 0 takes the most probable tokens")


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning(text)


def _check(foreign: dict[str, Any], sampled: bool) -> None:
    """``ValueError`` naming an option of another decoder that asks for something."""
    for name, value in foreign.items():
        if name in IRRELEVANT or (name in SAMPLING and not sampled):
            continue
        neutral = (SAMPLING | NEUTRAL).get(name)
        if neutral is None:
            names = ", ".join(sorted({"until", "do_sample", *LENGTHS, *SHORTEST, *DECODING}))
            raise ValueError(f"gen_kwargs {name} is unknown to bwsft; known are {names}")
        if value not in neutral:
            leave = f"leave it out or at {neutral[0]!r}" if neutral else "leave it out"
            greedy = ", or decode at temperature 0" if name in SAMPLING else ""
            raise ValueError(
                f"gen_kwargs {name}={value!r} is not supported: bwsft fills a canvas, sampling "
                f"by temperature, top_p and top_k; {leave}{greedy}"
            )
