"""Model folders of transformers' own models, and checkpoints of runs on any backbone."""

import json

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from bwsft import config as c
from bwsft.checkpoints.folders import save_checkpoint
from bwsft.data.tokenizer import load_tokenizer
from bwsft.models.lora import add_lora
from bwsft.training.optim import make_optimizer

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


def run_of(root, backbone, config, tokenizer):
    """root/run's checkpoint of a run on `backbone`, whose model is stored in root/base; with an
    adapter that changes it if the config asks for one."""
    if config.lora.rank:
        add_lora(backbone, config.lora, seed=1)
        for name, weight in backbone.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.02, generator=torch.manual_seed(len(name)))
    state = {"config": json.loads(c.to_json(config)), "data": "", "base": str(root / "base")}
    optimizer = make_optimizer(backbone, config.optim)
    words = load_tokenizer(tokenizer)
    return save_checkpoint(root / "run", 1, backbone, words, optimizer, state)
