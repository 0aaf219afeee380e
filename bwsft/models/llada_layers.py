"""LLaDA's layers, under the tensor names of the official checkpoints, on packed tokens.

T packed tokens, S sequences, D hidden size, V head rows, H heads, K key/value heads, E head width.
"""

from __future__ import annotations

import importlib.util
import math
from functools import cache, partial
from types import ModuleType

import bwsft_kernels
import torch
import torch.nn.functional as F
from bwsft_kernels import torch_ops
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bwsft.models.attention import Layout, rope_tables
from bwsft.models.backbone import active_module
from bwsft.models.llada_config import LladaConfig


@cache
def _triton_is_there() -> bool:
    return importlib.util.find_spec("triton") is not None


def small_ops(choice: str | ModuleType, x: Tensor) -> ModuleType:
    """The module to take rms_norm, rotary and swiglu from, itself or by a word: ``bwsft_kernels``
    fuses them ("on"), its ``torch_ops`` do not ("off"). "auto" fuses on CUDA where triton is
    installed, but not under torch.compile and export, which fuse plain torch themselves, with what
    stands around it; an operator of ours they would take whole."""
    if isinstance(choice, ModuleType):
        return choice
    if choice == "auto":
        fuse = not torch.compiler.is_compiling() and x.is_cuda and _triton_is_there()
    else:
        fuse = choice == "on"
    return bwsft_kernels if fuse else torch_ops


class LladaRMSNorm(nn.Module):
    """Normalize in at least float32, cast back, then scale: the official rounding points."""

    fused_ops: str | ModuleType = "auto"

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, delta: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Normed tokens [T, D]; with ``delta``, those of x + delta and that sum itself."""
        norm = partial(small_ops(self.fused_ops, x).rms_norm, weight=self.weight, eps=self.eps)
        return norm(x) if delta is None else norm(delta, residual=x)


def _normed(norm: nn.Module, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
    """(norm(x + delta), x + delta); ``delta`` None adds nothing."""
    return (norm(x), x) if delta is None else norm(x, delta)


class LladaBlock(nn.Module):
    """One layer: x + attention(norm(x)), then x + SwiGLU(norm(x)), on tokens [T, D].

    What the MLP adds goes to the next layer beside x, so that its norm can add it in one pass.
    """

    fused_ops: str | ModuleType = "auto"

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

    def heads(self, proj: nn.Module, normed: Tensor) -> Tensor:
        """[T, D] -> [T, H or K, E]."""
        return proj(normed).unflatten(-1, (-1, self.head_dim))

    def mlp(self, normed: Tensor) -> Tensor:
        gate, up = self.ff_proj(normed), self.up_proj(normed)
        return self.ff_out(small_ops(self.fused_ops, gate).swiglu(gate, up))

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], layout: Layout, wanted: Tensor | None = None,
        delta: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Tokens x + ``delta`` [T, D] -> the layer's output as two summands [T, D], or with
        ``wanted`` [S, W] (indices) [S * W, D]: keys and values of all tokens, everything
        else of the wanted ones."""
        rotary = small_ops(self.fused_ops, x).rotary
        normed, x = _normed(self.attn_norm, x, delta)
        k, v = self.heads(self.k_proj, normed), self.heads(self.v_proj, normed)
        width = None
        if wanted is None:
            q, k = rotary(self.heads(self.q_proj, normed), k, *rope)
        else:
            width, layout = wanted.size(1), layout.asked(wanted)
            k, _ = rotary(k, None, *rope)
            x, normed, *rope = (t.index_select(0, wanted.flatten()) for t in (x, normed, *rope))
            q, _ = rotary(self.heads(self.q_proj, normed), None, *rope)
        attended = self.attn_out(layout.attend(self.layer, q, k, v, width).flatten(1))
        normed, x = _normed(self.ff_norm, x, attended)
        return x, self.mlp(normed)


class LladaModel(nn.Module):
    """Embedding, layers, final norm and head under the official names (``transformer.*``)."""

    # transformers switches these; the default spares callers the reentrant variant.
    gradient_checkpointing = False
    checkpoint_every = 1  # of so many layers one is recomputed
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

    def set_fused_ops(self, choice: str) -> None:
        """Norms, rotary embedding and SwiGLU in one kernel each: "on", "off", or "auto" (the
        default: on CUDA with triton). ``ValueError`` for anything else."""
        if choice not in ("on", "off", "auto"):
            raise ValueError(f"fused_ops must be on, off or auto, not {choice!r}")
        for module in self.modules():
            if isinstance(module, (LladaBlock, LladaRMSNorm)):
                module.fused_ops = choice

    @property
    def head_module(self) -> nn.Module:
        """The LM head: ``ff_out``, or the embedding itself where the weights are tied."""
        return self.transformer["ff_out" if "ff_out" in self.transformer else "wte"]

    def forward(
        self, x: Tensor, position_ids: Tensor, layout: Layout, wanted: Tensor | None = None
    ) -> Tensor:
        """Embedded tokens [T, D], positions [T] -> the same after the final norm [T, D].

        With ``wanted`` [S, W] only those come out, [S * W, D]: the last layer then runs its
        queries, output projection and MLP for them alone, which changes no number.
        """
        rope = rope_tables(position_ids, self.head_dim, self.rope_theta, x.dtype)
        blocks, delta = self.transformer["blocks"], None
        recompute = self.gradient_checkpointing and torch.is_grad_enabled()
        for block in blocks:
            rows = wanted if block is blocks[-1] else None
            if recompute and block.layer % self.checkpoint_every == 0:
                x = x if delta is None else x + delta
                x, delta = self._gradient_checkpointing_func(block, x, rope, layout, rows)
                # Added here, so that one tensor per layer stays for backward and not two.
                x, delta = x + delta, None
            else:
                x, delta = block(x, rope, layout, rows, delta)
        return _normed(self.transformer["ln_f"], x, delta)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        head = active_module(self.head_module)
        return F.linear(hidden, head.weight) if isinstance(head, nn.Embedding) else head(hidden)
