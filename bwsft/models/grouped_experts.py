"""The experts of a layer: every token through those that its router chose, a product an expert.

S = T * K rows, one for each token and expert that it takes, sorted by expert; E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bwsft.models.attention import compute_dtype


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows [S, I], the first ends[0] by weight[0], those up to ends[1] by weight[1], and so on, of
    weights [E, O, I] -> [S, O], in the dtype that a linear layer would compute in.

    In bf16, with rows of whole 16 bytes, one call of torch's grouped product; else a product for
    each expert, which reads `ends` [E] on the host.
    """
    dtype = compute_dtype(weight)
    x, weight = x.to(dtype), weight.to(dtype).contiguous()
    if dtype == torch.bfloat16 and not any(size % 8 for size in weight.shape[1:]):
        return F.grouped_mm(x, weight.mT, offs=ends)
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    products = zip(x.split(sizes), weight.unbind(), strict=True)
    return torch.cat([F.linear(rows, matrix) for rows, matrix in products])


class GroupedExperts(nn.Module):
    """Experts of transformers, whose own loop over them would wait for the device at each layer:
    gate_up_proj [E, 2 M, D], down_proj [E, D, M], act_fn."""

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """Tokens [T, D], the experts of each [T, K] and their weights [T, K] -> [T, D]."""
        return self.routed(hidden_states, top_k_index, top_k_weights)

    def routed(
        self, x: Tensor, chosen: Tensor, weights: Tensor,
        adapters: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType({}),
    ) -> Tensor:  # fmt: skip
        """As forward. adapters: name of a parameter -> what gives, of rows [S, I] and their ends as
        in grouped_linear, what is added to their product."""
        top_k = chosen.shape[1]
        experts, order = chosen.flatten().sort(stable=True)
        numbers = torch.arange(len(self.down_proj), device=experts.device)
        ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)

        def product(rows: Tensor, name: str) -> Tensor:
            out = grouped_linear(rows, getattr(self, name), ends)
            return out + adapters[name](rows, ends) if name in adapters else out

        gate, up = product(x[order // top_k], "gate_up_proj").chunk(2, -1)
        out = product(self.act_fn(gate) * up, "down_proj") * weights.flatten()[order, None]
        return out[order.argsort()].unflatten(0, (-1, top_k)).sum(1).to(x.dtype)


def by_expert(down: Tensor, up: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The matrices of adapters as peft stores them, A [E * r, I] and B [O, r * E] -> [E, r, I] and
    [E, O, r]."""
    return down.unflatten(0, (experts, -1)), up.unflatten(1, (-1, experts)).movedim(-1, 0)
