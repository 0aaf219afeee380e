"""LLaDA shapes that the benchmarks build, and the FLOPs of their steps written out.

A multiply-add is two. Rows: tokens that run through the layers; keys: what each attends to.
"""

from dataclasses import dataclass

from bwsft.backbones.llada import LladaConfig

MASK, EOS, VOCAB = 126_336, 126_081, 126_464
SIZES = {
    "cpu": dict(d_model=512, n_layers=12, n_heads=8, mlp_hidden_size=1536),
    "1b": dict(d_model=2048, n_layers=16, n_heads=16, mlp_hidden_size=5632),
    "8b": dict(d_model=4096, n_layers=32, n_heads=32, mlp_hidden_size=12288),
}


def config_of(size: str) -> LladaConfig:
    return LladaConfig(**SIZES[size], vocab_size=VOCAB)


@dataclass(frozen=True)
class Cost:
    """Forward FLOPs of one size."""

    d: int
    layers: int
    mlp: int

    @classmethod
    def of(cls, size: str) -> "Cost":
        s = SIZES[size]
        return cls(s["d_model"], s["n_layers"], s["mlp_hidden_size"])

    def layer(self, rows: int, keys: int) -> int:
        """One layer on `rows` queries: q, k, v, out, three MLP matrices, scores and mix."""
        return rows * (2 * (4 * self.d**2 + 3 * self.d * self.mlp) + 4 * self.d * keys)

    def last(self, rows: int, wanted: int, keys: int) -> int:
        """The last layer where only `wanted` rows come out: the others give keys and values."""
        return self.layer(wanted, keys) + (rows - wanted) * 4 * self.d**2

    def head(self, rows: float) -> float:
        return rows * 2 * self.d * VOCAB

    def whole(self, length: int, wanted: int | None = None) -> int:
        """All layers on a whole canvas, the last one pruned to `wanted` rows if given."""
        wanted = length if wanted is None else wanted
        return (self.layers - 1) * self.layer(length, length) + self.last(length, wanted, length)

    def active(self, rows: int, keys: int) -> int:
        return self.layers * self.layer(rows, keys)


def decode_flops(size: str, prompt: int, gen: int, block: int) -> dict[str, float]:
    """Mean FLOPs of a denoising step by context mode, one token a step, no early exit."""
    cost, length = Cost.of(size), prompt + gen
    masked = (block + 1) / 2  # rows that meet the head, on average
    entering = cost.whole(length, block)
    middle = prompt + gen // 2  # block_causal: keys on average
    return {
        "naive": cost.whole(length) + cost.head(length),
        "exact": entering + cost.head(masked),
        "cached": (entering + (block - 1) * cost.active(block, length)) / block + cost.head(masked),
        "block_causal": (block + 1) / block * cost.active(block, middle) + cost.head(masked),
    }


def step_flops(size: str, prompt: int, gen: int, block: int, draws: int) -> dict[str, float]:
    """FLOPs per supervised token of a training step (adapters left out): a frozen matrix costs as
    much backward as forward; half of a block bears loss on average."""
    cost, length, rows = Cost.of(size), prompt + gen, block / 2
    once = 2 * cost.active(block, length) + 2 * cost.head(rows)
    both = 2 * (prompt + 2 * gen)  # clean row and noisy copies, forward and backward
    layers = cost.layers * cost.layer(1, length) * both
    return {
        "naive": (2 * cost.whole(length) + 2 * cost.head(length)) / rows,
        "exact": (2 * cost.whole(length, block) + 2 * cost.head(rows)) / rows,
        f"cached_k{draws}": (cost.whole(length, block) + draws * once) / (draws * rows),
        "block_causal": (layers + 2 * cost.head(gen / 2)) / (gen / 2),
    }
