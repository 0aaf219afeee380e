"""Where LLaDA's repository has its model: a plain one of the same tensors, for the tests."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_llada import LLaDAConfig


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        size, inner = config.d_model, config.mlp_hidden_size
        self.heads, self.theta = config.n_heads, config.rope_theta
        keys = size // config.n_heads * (config.n_kv_heads or config.n_heads)
        self.attn_norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.ff_norm = nn.RMSNorm(size, config.rms_norm_eps)
        shapes = {"q_proj": (size, size), "k_proj": (size, keys), "v_proj": (size, keys),
                  "attn_out": (size, size), "ff_proj": (size, inner), "up_proj": (size, inner),
                  "ff_out": (inner, size)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Linear(*shape, bias=False))

    def turn(self, x):
        half = x.shape[-1] // 2
        rate = self.theta ** (-torch.arange(half) / half)
        angle = torch.arange(x.shape[-2])[:, None] * rate
        cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    def forward(self, x):
        n = self.attn_norm(x)
        width = n.shape[-1] // self.heads
        q, k, v = (p(n).unflatten(-1, (-1, width)).transpose(1, 2)
                   for p in (self.q_proj, self.k_proj, self.v_proj))
        out = F.scaled_dot_product_attention(self.turn(q), self.turn(k), v, enable_gqa=True)
        x = x + self.attn_out(out.transpose(1, 2).flatten(2))
        n = self.ff_norm(x)
        return x + self.ff_out(F.silu(self.ff_proj(n)) * self.up_proj(n))


class Inner(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(config.vocab_size, config.d_model),
            "blocks": nn.ModuleList(Block(config) for _ in range(config.n_layers)),
            "ln_f": nn.RMSNorm(config.d_model, config.rms_norm_eps),
            "ff_out": nn.Linear(config.d_model, config.vocab_size, bias=False),
        })


class LLaDAModelLM(PreTrainedModel):
    config_class = LLaDAConfig
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        self.model = Inner(config)

    def forward(self, input_ids, attention_mask=None):
        parts = self.model.transformer
        x = parts["wte"](input_ids)
        for block in parts["blocks"]:
            x = block(x)
        return CausalLMOutput(logits=parts["ff_out"](parts["ln_f"](x)))
