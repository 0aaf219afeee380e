"""Expected times of the LM head and its loss on GPUs, by arithmetic alone: results/roofline.md.

python benchmarks/roofline.py [--out FILE]

A phase takes the longer of its FLOPs and its bytes at the rates of a card; phases come in turn.
Each counts what it must read and write once, in bf16 unless said; launches (5 us each), the rows of
the input and what fits L2 are left out. One function per quantity, in the units of its name.
Letters: T rows of the batch, N supervised ones, V vocabulary, D hidden size.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bwsft_kernels._matmul import plan_chunks

V, D, T = 126_464, 4096, 8192  # LLaDA-8B's head; a batch of 32 sequences of 256 tokens
ROWS = (64, 128, 256, 512, 1024, 2048)
BUDGET = 512 << 20  # bytes of logits at a time: chunk_bytes of linear_cross_entropy
WANTED = 1.3  # times compact's speed


@dataclass(frozen=True)
class Rates:
    """What a card does in a second."""

    name: str
    flops: float  # bf16 with fp32 sums
    bytes: float


RATES = (
    Rates("A100, realistic", 250e12, 1.75e12),
    Rates("A100, peak", 312e12, 2.04e12),
    Rates("H100, realistic", 620e12, 2.7e12),
    Rates("H100, peak", 989e12, 3.35e12),
)


def product_flops(n: int) -> float:
    """Of one product of n rows with the head, in any of the three directions."""
    return 2 * n * V * D


def head_bytes() -> float:
    """Of one pass over the head."""
    return 2 * V * D


def phase_s(rates: Rates, flops: float, traffic: float) -> float:
    return max(flops / rates.flops, traffic / rates.bytes)


def product_s(rates: Rates, n: int, logit_bytes: float) -> float:
    """One product that reads or writes `logit_bytes` for each of its n * V logits."""
    return phase_s(rates, product_flops(n), head_bytes() + logit_bytes * n * V)


def head_gradient_s(rates: Rates, n: int, chunks: int) -> float:
    """dW, written once in bf16; added up in fp32 (read and written) where there are chunks."""
    per_weight = 2 if chunks == 1 else 8 * chunks + 2
    return chunks * phase_s(
        rates, product_flops(n) / chunks, (2 * n * V + per_weight * V * D) / chunks)


def torch_s(rates: Rates, n: int, mode: str) -> float:
    """linear, .float() and cross_entropy over n rows, in eager mode.

    Bytes for each logit: .float() 2 + 4, log_softmax 4 + 4, the gradient of nll 4 (zeros), that of
    log_softmax 8 + 4, that of .float() 4 + 2. Forward alone ends after log_softmax.
    """
    forward = product_s(rates, n, 2) + phase_s(rates, 0, (6 + 8) * n * V)
    if mode == "no-grad":
        return forward
    backward = phase_s(rates, 0, (4 + 12 + 6) * n * V) + product_s(rates, n, 2)
    return forward + backward + (head_gradient_s(rates, n, 1) if mode == "trainable" else 0)


def cce_s(rates: Rates, n: int, mode: str) -> float:
    """No logits in memory: backward makes them again. Without its filter, which skips tiles of
    small probabilities, and without its locks."""
    forward = product_s(rates, n, 0)
    if mode == "no-grad":
        return forward
    products = 3 if mode == "trainable" else 2
    written = head_bytes() if mode == "trainable" else 0
    return forward + phase_s(rates, products * product_flops(n), head_bytes() + written)


def ours_s(rates: Rates, n: int, mode: str, road: str) -> float:
    """linear_cross_entropy: by cuBLAS the logits are fp32 and a row kernel reads them twice and
    writes 2 bytes; by Triton the product stores 2-byte exponentials and 12 bytes of sums for each
    128 of them, which one pass turns into the gradient."""
    if mode == "no-grad":
        if road == "triton":
            return product_s(rates, n, 12 / 128)
        return product_s(rates, n, 4) + phase_s(rates, 0, 4 * n * V)
    logit = 4 if road == "cublas" else 2 + 12 / 128
    row_pass = 4 + 4 + 2 if road == "cublas" else 2 + 2 + 12 / 128
    chunks = plan_chunks(n, int(logit * V), BUDGET)
    total = sum(
        product_s(rates, stop - start, logit) + phase_s(rates, 0, row_pass * (stop - start) * V)
        + product_s(rates, stop - start, 2)
        for start, stop in chunks
    )
    return total + (head_gradient_s(rates, n, len(chunks)) if mode == "trainable" else 0)


def times_s(rates: Rates, n: int, mode: str) -> dict[str, float]:
    """Every variant's seconds."""
    return {
        "naive": torch_s(rates, T, mode),
        "compact": torch_s(rates, n, mode),
        "cce": cce_s(rates, n, mode),
        "ours, cuBLAS": ours_s(rates, n, mode, "cublas"),
        "ours, Triton": ours_s(rates, n, mode, "triton"),
    }


def speedup(times: dict[str, float]) -> float:
    """Of our faster road over compact."""
    return times["compact"] / min(times["ours, cuBLAS"], times["ours, Triton"])


def table(rates: Rates, mode: str) -> list[str]:
    names = list(times_s(rates, ROWS[0], mode))
    lines = [f"| N | {' | '.join(names)} | best of ours over compact | compact over naive |",
             "|---:" * (len(names) + 3) + "|"]
    for n in ROWS:
        times = times_s(rates, n, mode)
        cells = [f"{1e3 * seconds:.2f}" for seconds in times.values()]
        kernel, compaction = speedup(times), times["naive"] / times["compact"]
        lines.append(f"| {n} | {' | '.join(cells)} | {kernel:.2f}x | {compaction:.1f}x |")
    return lines


def misses(rates: Rates) -> list[str]:
    """Where our faster road isn't WANTED times as fast as compact, by mode."""
    found = []
    for mode in ("frozen", "trainable", "no-grad"):
        short = [n for n in ROWS if speedup(times_s(rates, n, mode)) < WANTED]
        rows = "no N" if not short else f"N {', '.join(map(str, short))}"
        found.append(f"- {rates.name}, {mode}: {rows}")
    return found


def page() -> str:
    half = ROWS[3]
    a100, h100 = RATES[0], RATES[2]
    shares = [product_flops(half) / rates.flops for rates in (a100, h100)]
    elementwise = [phase_s(rates, 0, 36 * half * V) for rates in (a100, h100)]
    ridges = [rates.flops / rates.bytes for rates in (a100, h100)]
    parts = [
        "# Roofline of the LM head and its loss", "",
        "Written by `python benchmarks/roofline.py`, whose functions are the formulas. "
        "**Nothing here was timed on a GPU**: these are expectations to hold measurements against, "
        "in milliseconds.", "",
        f"V {V}, D {D}, bf16, T {T} tokens of which N are supervised. *naive*: full logits of all "
        "T. *compact*: select the N rows, then the same torch operators. *cce*: "
        "cut-cross-entropy's recomputation without its filter. Ours by both roads of "
        "`_tuning.ROADS`. Measured times, and memory, are in [the other tables](README.md).", "",
        f"## Where ours is less than {WANTED} times as fast as compact, and why", "",
        *(line for rates in (a100, h100) for line in misses(rates)), "",
        "Compaction does most of the work (last column). What is left to a kernel is compact's "
        "elementwise traffic, 36 bytes for each logit, against 4 (Triton) or 14 (cuBLAS) of ours: "
        f"at N {half} that is {1e3 * elementwise[0]:.2f} ms beside two products of "
        f"{1e3 * shares[0]:.2f} ms on an A100, {1e3 * elementwise[1]:.2f} beside two of "
        f"{1e3 * shares[1]:.2f} on an H100. The products are the same for both, so:", "",
        f"- few rows (below {ridges[0]:.0f} on an A100, {ridges[1]:.0f} on an H100) wait for the "
        "head's bytes, which both read twice; there the gain is small, and cce, which reads the "
        "head as often, is as fast;",
        "- on an A100 the products weigh more than on an H100, where bandwidth is scarcer;",
        "- a trainable head adds a third product, the same for both;",
        "- with fp32 logits, chunks begin at half the rows: each reads the head twice, and a "
        "trainable head's gradient is then added up in fp32.", "",
        "A Triton product must come near cuBLAS's rate for its road to keep this lead: the tables "
        "give both roads the same rate. Compact under `torch.compile` fuses most of its 36 bytes "
        "away, and is then as near to ours as the products are to all.",
    ]
    for rates in RATES:
        parts += ["", f"## {rates.name}: {rates.flops / 1e12:.0f} TFLOP/s, "
                  f"{rates.bytes / 1e12:.2f} TB/s"]
        for mode in ("frozen", "trainable", "no-grad"):
            parts += ["", f"{mode.capitalize()}{' head' if mode != 'no-grad' else ''}:", "",
                      *table(rates, mode)]
    return "\n".join(parts) + "\n"


def write_page(page: Callable[[], str], about: str, name: str, argv: list[str] | None) -> None:
    """The command of a computed page: write it to --out, benchmarks/results/NAME if not given."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--out", type=Path,
                        default=Path(__file__).resolve().parent / "results" / name)
    out = parser.parse_args(argv).out
    out.write_text(page(), encoding="utf-8")
    print(out)


def main(argv: list[str] | None = None) -> None:
    write_page(page, __doc__, "roofline.md", argv)


if __name__ == "__main__":
    main()
