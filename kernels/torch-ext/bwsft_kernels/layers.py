"""The functions as layers that `kernels.kernelize` puts in the place of a model's own.

Such a layer has no state: its forward is bound to the module it replaces and reads that one's
weights, so each docstring says which attributes the module must have.
Letters: B sequences, L tokens, D hidden size, M features of an MLP, H and K heads, E head width.
"""

import torch
from torch import Tensor, nn

from ._linear_cross_entropy import linear_cross_entropy
from ._rms_norm import rms_norm
from ._rotary import rotary
from ._swiglu import swiglu


class LinearCrossEntropy(nn.Module):
    """Head and loss: mean cross-entropy of the rows whose target isn't -100.

    For a module with the weight [V, D] and bias [V] (or None) of an nn.Linear.
    """

    has_backward = True
    can_torch_compile = True
    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # [..., D], [...] -> []
        return linear_cross_entropy(input, self.weight, target, linear_bias=self.bias)


class RMSNorm(nn.Module):
    """RMSNorm of Llama, Qwen and their like: weight [D], variance_epsilon."""

    has_backward = True
    can_torch_compile = True
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:  # [..., D]
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


class SwiGLUMLP(nn.Module):
    """Gated MLP with silu: the layers gate_proj and up_proj (D -> M) and down_proj (M -> D).

    It never calls the module's act_fn, so only a model whose hidden_act is silu may be given it.
    """

    has_backward = True
    can_torch_compile = True
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:  # [..., D]
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class RotaryPosEmb(nn.Module):
    """transformers' apply_rotary_pos_emb: the tables [B, L, E] hold each angle twice, a half each.

    The rotation runs in fp32 at least, whatever the dtype of the tables.
    """

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        q: Tensor, k: Tensor,  # [B, H, L, E], [B, K, L, E]; [B, L, H, E] with unsqueeze_dim 2
        cos: Tensor, sin: Tensor,  # [B, L, E]
        unsqueeze_dim: int = 1,
    ) -> tuple[Tensor, Tensor]:  # as q, as k
        wide = torch.promote_types(q.dtype, torch.float32)
        half = q.shape[-1] // 2
        # A table row per token [B, L, 1, E / 2]; a model may give one for all sequences.
        tables = [
            t[..., :half].to(wide).unsqueeze(2).expand(len(q), -1, -1, -1) for t in (cos, sin)
        ]
        if unsqueeze_dim == 2:
            return rotary(q, k, *tables)
        q, k = rotary(q.transpose(1, 2), k.transpose(1, 2), *tables)
        return q.transpose(1, 2), k.transpose(1, 2)
