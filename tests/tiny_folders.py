"""Model folders of transformers' own models, for the tests of loading and of [MASK]."""

import json

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

WEIGHTS = "model.safetensors"
# initializer_range makes random models that are sure of something.
SHAPE = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=96, initializer_range=0.2,
)  # fmt: skip
QWEN = dict(**SHAPE, num_key_value_heads=2, vocab_size=320, eos_token_id=256)


def saved(folder, model):
    model.save_pretrained(folder)
    return folder


def qwen(**changes):
    torch.manual_seed(1)
    return Qwen2ForCausalLM(Qwen2Config(**(QWEN | changes)))


def edit(file, **changes):
    """Change entries of a JSON object; None removes one."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
