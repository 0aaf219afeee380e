"""What the decoder's tests decode with: random LLaDAs of 16 tokens, and prompts for them."""

import dataclasses
import random

import torch
from bwsft_kernels.block_grid import BlockGrid

from bwsft.decoding.config import DecodeConfig
from bwsft.models.backbone import Backbone
from bwsft.models.llada_config import LladaConfig
from bwsft.models.loading import new_backbone

VOCABULARY, MASK, ENDS = 16, 15, (1, 2)
HEADS, KV_HEADS = 2, 1
MODES = ["exact", "cached", "prefix", "block_causal"]


def model_of(seed=0, ends=1.5, dtype=torch.float64, changes=None, **family) -> Backbone:
    """A random model whose tokens vary with position and context and that produces end tokens
    often: the head's rows of both are stretched. `changes` are of its config."""
    shape = dict(d_model=16, n_layers=2, n_heads=HEADS, n_kv_heads=KV_HEADS, mlp_hidden_size=24)
    ids = dict(vocab_size=VOCABULARY, mask_token_id=MASK, eos_token_id=1, pad_token_id=1)
    config = LladaConfig(**{**shape, **ids, "max_sequence_length": 96, **(changes or {})})
    model = new_backbone(config, seed, dtype=dtype)
    with torch.no_grad():
        for name, weight in model.model.named_parameters():
            if "proj" in name or "_out" in name:
                weight.mul_(3)
        model.head()[0][list(ENDS)] *= ends
    model.family = dataclasses.replace(model.family, end_ids=ENDS, **family)
    return model.eval()


def prompts_of(seed, lengths, low=3):
    """Random prompts; from `low` 0 on they hold end ids too, as those of earlier turns."""
    draw = random.Random(seed)
    return [[draw.randrange(low, MASK) for _ in range(length)] for length in lengths]


def bounds_of(prompt_length: int, config: DecodeConfig, origin: str) -> list[tuple[int, int]]:
    """[start, stop) of every block that is decoded, counted from the prompt's first token: on an
    absolute grid the last one is whole and reaches beyond gen_length."""
    grid = BlockGrid(config.block_size, origin)
    return grid.blocks(prompt_length, grid.filled(prompt_length, config.gen_length))


def open_canvas(model: Backbone, prompt: list[int], config: DecodeConfig, given=()) -> list[int]:
    """The prompt and [MASK]s to the end of the last block, but for the given tokens."""
    *_, (_, stop) = bounds_of(len(prompt), config, model.family.block_origin)
    given = [MASK if token is None else token for token in given]
    return [*prompt, *given, *[MASK] * (stop - len(prompt) - len(given))]


def until_end(response):
    """(the response up to its first end token, whether it has one)."""
    end = next((i for i, token in enumerate(response) if token in ENDS), None)
    return response[:end], end is not None


def history(results):
    """Step, position and token of every commit."""
    return [[c[:3] for c in result.trace] for result in results]
