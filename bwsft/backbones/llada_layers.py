"""LLaDA's layers, under the tensor names of the official checkpoints, on packed rows.

T packed tokens, S sequences, D hidden size, V head rows, H heads, K key/value heads, E head width.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention import ActiveLayout, AttentionLayout, rope_tables, rotate
from .llada_config import LladaConfig


class LladaRMSNorm(nn.Module):
    """Normalise in at least float32, cast back, then scale: the official rounding points."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class LladaBlock(nn.Module):
    """One layer: x + attention(norm(x)), then x + SwiGLU(norm(x)), on rows [T, D]."""

    def __init__(self, config: LladaConfig, layer: int):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        width, kv_width = config.d_model, config.num_kv_heads * config.head_dim
        linear = partial(nn.Linear, bias=False)
        self.attn_norm = LladaRMSNorm(width, config.rms_norm_eps)
        self.ff_norm = LladaRMSNorm(width, config.rms_norm_eps)
        self.q_proj = linear(width, width)
        self.k_proj = linear(width, kv_width)
        self.v_proj = linear(width, kv_width)
        self.attn_out = linear(width, width)
        self.ff_proj = linear(width, config.mlp_width)  # the gate
        self.up_proj = linear(width, config.mlp_width)
        self.ff_out = linear(config.mlp_width, width)
        # Read by _init_weights, which transformers calls on modules that own parameters only.
        self.attn_out.init_shrink = self.ff_out.init_shrink = math.sqrt(2 * (layer + 1))

    def queries(self, normed: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """[T, D] -> rotated queries [T, H, E]."""
        return rotate(self.q_proj(normed).unflatten(-1, (-1, self.head_dim)), rope)

    def keys_values(self, normed: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[T, D] -> rotated keys and plain values, both [T, K, E]."""
        k, v = (
            proj(normed).unflatten(-1, (-1, self.head_dim)) for proj in (self.k_proj, self.v_proj)
        )
        return rotate(k, rope), v

    def feed_forward(self, x: Tensor) -> Tensor:
        normed = self.ff_norm(x)
        return x + self.ff_out(F.silu(self.ff_proj(normed)) * self.up_proj(normed))

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        layout: AttentionLayout | ActiveLayout,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Rows [T, D] -> [T, D], or with ``wanted`` [S, W] (indices of rows) -> [S * W, D]: keys
        and values of all rows, everything else of the wanted ones."""
        normed = self.attn_norm(x)
        k, v = self.keys_values(normed, rope)
        width = None
        if wanted is not None:
            width = wanted.size(1)
            x, normed, *rope = (t.index_select(0, wanted.flatten()) for t in (x, normed, *rope))
        q = self.queries(normed, rope)
        x = x + self.attn_out(layout.attend(self.layer, q, k, v, width).flatten(1))
        return self.feed_forward(x)


class LladaModel(nn.Module):
    """Embedding, layers, final norm and head under the official names (``transformer.*``)."""

    # transformers switches these two; the default spares callers the reentrant variant.
    gradient_checkpointing = False
    _gradient_checkpointing_func = staticmethod(partial(checkpoint, use_reentrant=False))

    def __init__(self, config: LladaConfig):
        super().__init__()
        self.head_dim, self.rope_theta = config.head_dim, config.rope_theta
        parts: dict[str, nn.Module] = {
            "wte": nn.Embedding(config.embedding_rows, config.d_model),
            "blocks": nn.ModuleList(LladaBlock(config, n) for n in range(config.n_layers)),
            "ln_f": LladaRMSNorm(config.d_model, config.rms_norm_eps),
        }
        if not config.weight_tying:
            parts["ff_out"] = nn.Linear(config.d_model, config.embedding_rows, bias=False)
        self.transformer = nn.ModuleDict(parts)

    @property
    def head_module(self) -> nn.Module:
        """The LM head: ``ff_out``, or the embedding itself where the weights are tied."""
        tied = "ff_out" not in self.transformer
        return self.transformer["wte" if tied else "ff_out"]

    def forward(
        self,
        x: Tensor,
        position_ids: Tensor,
        layout: AttentionLayout | ActiveLayout,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Embedded rows [T, D], positions [T] -> rows after the final norm [T, D].

        With ``wanted`` [S, W] only those rows come out, [S * W, D]: the last layer then runs its
        queries, output projection and MLP for them alone, which changes no number.
        """
        rope = rope_tables(position_ids, self.head_dim, self.rope_theta, x.dtype)
        blocks = self.transformer["blocks"]
        for block in blocks:
            rows = wanted if block is blocks[-1] else None
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = self._gradient_checkpointing_func(block, x, rope, layout, rows)
            else:
                x = block(x, rope, layout, rows)
        return self.transformer["ln_f"](x)

    def logits(self, hidden: Tensor) -> Tensor:
        head = self.head_module
        return F.linear(hidden, head.weight) if isinstance(head, nn.Embedding) else head(hidden)
