"""A tiny random LLaDA, and packed sequences for it."""

import torch
import torch.nn.functional as F

from bwsft.models.llada import LladaBackbone
from bwsft.models.llada_config import LladaConfig
from bwsft.models.loading import new_backbone

SMALL = dict(
    d_model=32, n_layers=2, n_heads=4, mlp_hidden_size=48, vocab_size=50, max_sequence_length=64,
    mask_token_id=49, eos_token_id=1, pad_token_id=1,
)  # fmt: skip
LENGTHS = (5, 9, 1, 7)


def config(**changes) -> LladaConfig:
    return LladaConfig(**{**SMALL, **changes})


def backbone(dtype=torch.float64, seed=0, **changes) -> LladaBackbone:
    return new_backbone(config(**changes), seed, dtype=dtype)


def packed(lengths=LENGTHS, seed=0):
    """Random ids [T], positions [T] counted from each sequence's start, boundaries [S + 1]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, SMALL["vocab_size"], (sum(lengths),), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])
    boundaries = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)
    return ids, positions, boundaries
