"""FLOPs of DiffusionGemma by formula, from the sizes of its text config."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Forward FLOPs by the sizes of a text config; a multiply-add is two."""

    text: Mapping[str, int]

    def layers(self, tokens: int, keys: int, window: int | None = None) -> tuple[float, float]:
        """(matrices, attention) of all layers: every sixth is full and sees `keys`, the others
        hold the last `window` of them, or all."""
        t, products, pairs = self.text, 0.0, 0.0
        d, heads = t["hidden_size"], t["num_attention_heads"]
        mlp = 3 * d * (t["intermediate_size"] + t["top_k_experts"] * t["moe_intermediate_size"])
        for number in range(1, t["num_hidden_layers"] + 1):
            full = number % 6 == 0
            width = t["global_head_dim"] if full else t["head_dim"]
            kv = t["num_global_key_value_heads"] if full else t["num_key_value_heads"]
            attention = d * width * (2 * heads + (1 if full else 2) * kv)
            products += 2 * tokens * (attention + mlp + d * t["num_experts"])
            pairs += 4 * tokens * heads * width * (keys if full or window is None else window)
        return products, pairs

    def decoder(self, tokens: int, keys: int, window: int | None = None) -> tuple[float, float]:
        """The layers, and self-conditioning's MLP."""
        products, pairs = self.layers(tokens, keys, window)
        sizes = self.text["hidden_size"] * self.text["intermediate_size"]
        return products + 6 * tokens * sizes, pairs

    def head(self, tokens: float) -> float:
        return 2 * tokens * self.text["hidden_size"] * self.text["vocab_size"]


def trained(cost: tuple[float, float]) -> float:
    """Forward and backward with frozen matrices; attention's backward is two and a half forwards,
    as torch counts it."""
    products, pairs = cost
    return 2 * products + 3.5 * pairs
