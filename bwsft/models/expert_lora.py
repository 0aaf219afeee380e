"""LoRA on routed experts: peft's adapters of parameters, with products in another order.

peft adds the update s B A to the whole stack of experts in every forward: a second stack, and a
gradient of its size, for each layer. Here rows pass A and then B, as in LoRA on a matrix.
Parameters, files and merging are peft's.
"""

from __future__ import annotations

from typing import Any

from peft.tuners.lora import ParamWrapper
from torch import Tensor, nn

from bwsft.models.grouped_experts import GroupedExperts, by_expert, grouped_linear


class ExpertLora(ParamWrapper):
    """The adapter of one parameter of GroupedExperts, around that of another one or around them."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As that of GroupedExperts; as peft's where not one adapter is active."""
        if self.disable_adapters or self.merged or len(self.active()) != 1:
            return super().forward(x, *args, **kwargs)
        adapters, layer = {}, self
        while isinstance(layer, ExpertLora):
            adapters[layer.parameter_name] = layer.update
            layer = layer.base_layer
        return layer.routed(x, *args, **kwargs, adapters=adapters)

    def active(self) -> list[str]:
        """Names of the adapters that this one has and that are switched on."""
        return [name for name in self.active_adapters if name in self.lora_A]

    def update(self, rows: Tensor, ends: Tensor) -> Tensor:
        """scale * B A of sorted rows [S, I] -> [S, O]; each expert has its own A and B."""
        (name,) = self.active()
        down, up = self.lora_A[name].weight, self.lora_B[name].weight
        down, up = by_expert(down, up, self.num_experts)
        return grouped_linear(grouped_linear(rows, down, ends), up, ends) * self.scaling[name]


def multiply_in_turn(model: nn.Module) -> None:
    """Let the adapters of experts that peft has put on a model be an ExpertLora, in place."""
    for module in model.modules():
        if type(module) is ParamWrapper and isinstance(module.get_base_layer(), GroupedExperts):
            module.__class__ = ExpertLora
