"""Pairs, tiles and expected times of one-pass attention on GPUs: results/attention.md.

python benchmarks/attention_roofline.py [--out FILE]

By arithmetic alone, for one layer in bf16. A kernel takes the longer of the FLOPs of the tiles that
it issues and of its bytes, each tensor once, at the rates of a card; softmax, launches and
the masks' making are left out. Letters: T packed rows, L rows of the longest sequence, H heads, E
head width.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from bwsft_kernels import RangePlan, range_plan
from bwsft_kernels._range_plan import TILE
from bwsft_kernels._range_tiles import TABLE, WIDTHS
from roofline import RATES, Rates, phase_s, write_page

H, E = 32, 128  # LLaDA-8B
FLEX = 128  # FlexAttention's default block
CARDS = {80: RATES[0], 90: RATES[2]}


@dataclass(frozen=True)
class Layout:
    """A batch of one-pass training."""

    prompts: tuple[int, ...]
    responses: tuple[int, ...]
    copies: int
    block: int = 32

    @property
    def name(self) -> str:
        pairs = Counter(zip(self.prompts, self.responses, strict=True))
        shapes = ", ".join(f"{f'{count} x ' * (count > 1)}({prompt:,} + {response:,})"
                           for (prompt, response), count in pairs.items())
        return f"{shapes}; {self.copies} {'copy' if self.copies == 1 else 'copies'}"

    def plan(self) -> RangePlan:
        lengths = torch.tensor(self.prompts), torch.tensor(self.responses)
        return range_plan(*lengths, self.block, copies=self.copies)[0]

    @property
    def dense(self) -> int:
        """Pairs of a mask [S, L, L]."""
        lengths = (p + r + self.copies * r
                   for p, r in zip(self.prompts, self.responses, strict=True))
        return len(self.prompts) * max(lengths) ** 2


LAYOUTS = (
    Layout((128,) * 8, (128,) * 8, 1),
    Layout((128,) * 8, (512,) * 8, 2),
    Layout((61, 130, 45, 88), (97, 214, 160, 75), 2),  # as word problems have them
    Layout((1024,), (8192,), 2),
)


def allowed_pairs(plan: RangePlan) -> int:
    start, stop, own_start, own_stop = plan.query_ranges.long()
    return int(((stop - start).clamp(min=0) + (own_stop - own_start).clamp(min=0)).sum())


def intervals(ranges: torch.Tensor, tiles: torch.Tensor, rows: int) -> torch.Tensor:
    """[n, 4]: first row and one past the last, low and high, of what the kernels go through: two
    intervals for each part of `rows` rows of a tile."""
    found = []
    for start, stop in tiles.tolist():
        for begin in range(start, stop, rows):
            end = min(begin + rows, stop)
            for first, last in ranges[:, begin:end].split(2):
                filled = last > first
                if filled.any():
                    found.append((begin, end, int(first[filled].min()), int(last[filled].max())))
    return torch.tensor(found).reshape(-1, 4)


def issued_pairs(plan: RangePlan, kernel: str, arch: int) -> int:
    """Pairs of the tiles that a kernel of range_attention multiplies on a card."""
    tile = TABLE[kernel, arch, 2][WIDTHS.index(E)]
    ranges, tiles = ((plan.key_ranges, plan.key_tiles) if kernel == "dkv"
                     else (plan.query_ranges, plan.query_tiles))
    _, _, low, high = intervals(ranges, tiles, tile.rows).T
    return int(((high - low + tile.cols - 1) // tile.cols).sum()) * tile.rows * tile.cols


def flex_pairs(plan: RangePlan) -> int:
    """Pairs of the 128 x 128 blocks, counted from row 0, that hold an allowed pair."""
    rows = plan.query_ranges.size(1)
    blocks = -(-rows // FLEX)
    edges = torch.zeros(blocks, blocks + 1, dtype=torch.int64)
    for first, last in plan.query_ranges.long().split(2):
        (row,) = (last > first).nonzero(as_tuple=True)
        one = torch.ones_like(row)
        edges.index_put_((row // FLEX, first[row] // FLEX), one, accumulate=True)
        edges.index_put_((row // FLEX, (last[row] - 1) // FLEX + 1), -one, accumulate=True)
    return int((edges.cumsum(1)[:, :-1] > 0).sum()) * FLEX**2


def product_flops(pairs: int, products: int) -> float:
    return 2.0 * E * H * pairs * products


def tensor_bytes(rows: int, tensors: int) -> float:
    return 2.0 * rows * H * E * tensors


def times_s(layout: Layout, arch: int, rates: Rates) -> dict[str, tuple[float, float]]:
    """Variant -> (forward, backward) seconds.

    Forward: two products, four tensors. Backward of ours and of FlexAttention is two kernels: three
    products for dQ and four for dK and dV, twelve tensors; of torch's attention with a mask one:
    five products, eight tensors. The mask is read in 2 bytes, once for all heads.
    """
    plan = layout.plan()
    rows = plan.query_ranges.size(1)
    forward, backward = tensor_bytes(rows, 4), tensor_bytes(rows, 12) / 2
    flex, dense = flex_pairs(plan), layout.dense
    padded = len(layout.prompts) * (dense // len(layout.prompts)) ** 0.5
    own = {kernel: issued_pairs(plan, kernel, arch) for kernel in ("fwd", "dq", "dkv")}

    def ranged(pairs: dict[str, int]) -> tuple[float, float]:
        return (phase_s(rates, product_flops(pairs["fwd"], 2), forward),
                phase_s(rates, product_flops(pairs["dq"], 3), backward)
                + phase_s(rates, product_flops(pairs["dkv"], 4), backward))

    return {
        "range_attention": ranged(own),
        "FlexAttention": ranged(dict.fromkeys(own, flex)),
        "dense mask": (
            phase_s(rates, product_flops(dense, 2), tensor_bytes(padded, 4) + 2 * dense),
            phase_s(rates, product_flops(dense, 5), tensor_bytes(padded, 8) + 2 * dense),
        ),
    }


def pairs_table() -> list[str]:
    lines = ["| layout | rows | allowed pairs | of the mask's | dense mask | FlexAttention | ours, "
             "A100 | ours, H100 |", "|---" + "|---:" * 7 + "|"]
    for layout in LAYOUTS:
        plan = layout.plan()
        allowed = allowed_pairs(plan)
        issued = [layout.dense, flex_pairs(plan), *(issued_pairs(plan, "fwd", a) for a in CARDS)]
        cells = " | ".join(f"{pairs / allowed:.2f}" for pairs in issued)
        lines.append(f"| {layout.name} | {plan.query_ranges.size(1):,} | {allowed:,} | "
                     f"{allowed / layout.dense:.0%} | {cells} |")
    return lines


def times_table(arch: int, rates: Rates) -> list[str]:
    names = list(times_s(LAYOUTS[0], arch, rates))
    titles = " | ".join(f"{name}, forward | backward" for name in names)
    lines = [f"| layout | {titles} | FlexAttention over ours | dense over ours |",
             "|---" + "|---:" * (2 * len(names) + 2) + "|"]
    for layout in LAYOUTS:
        times = times_s(layout, arch, rates)
        cells = [f"{1e3 * seconds:.3f}" for pair in times.values() for seconds in pair]
        own, *others = (sum(pair) for pair in times.values())
        cells += [f"{other / own:.2f}x" for other in others]
        lines.append(f"| {layout.name} | {' | '.join(cells)} |")
    return lines


def page() -> str:
    parts = [
        "# One-pass attention: pairs, tiles, rooflines", "",
        "Written by `python benchmarks/attention_roofline.py`, whose functions are the formulas. "
        "**Nothing here was timed**: these are expectations to hold measurements against "
        "(`bench_attention.py` measures).", "",
        f"One layer, H {H}, E {E}, bf16, blocks of {LAYOUTS[0].block}. *Dense mask*: torch's "
        "scaled_dot_product_attention on [S, L, L] pairs. *FlexAttention*: its block mask of "
        f"{FLEX} x {FLEX} blocks over the same packed rows. Ours goes through what its tiles' rows "
        f"see; tiles, at most {TILE} rows, never cross a sequence or its clean part's end.", "",
        "## Pairs multiplied in forward, for each allowed one", "",
        *pairs_table(),
    ]
    for arch, rates in CARDS.items():
        parts += ["", f"## {rates.name}: {rates.flops / 1e12:.0f} TFLOP/s, "
                  f"{rates.bytes / 1e12:.2f} TB/s, ms", "", *times_table(arch, rates)]
    parts += ["", "All are given the same rate, so the ratios count work alone: a kernel earns "
              "them only as far as it reaches that rate. Ours and FlexAttention's make the scores "
              "twice in backward, in exchange for sums without atomics."]
    return "\n".join(parts) + "\n"


def main(argv: list[str] | None = None) -> None:
    write_page(page, __doc__, "attention.md", argv)


if __name__ == "__main__":
    main()
