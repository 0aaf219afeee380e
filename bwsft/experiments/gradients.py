"""How noisy an update's gradient is and where it points: a screen for objectives and modes.

The sequences of one update are masked again and again, at the same weights. Of the gradients g with
mean m, and of the gradient r that they are compared with:

noise    E|g - m|^2 / |m|^2, so that n updates' mean has 1/n of it
cosine   of m and r: what no number of draws improves
squared  E cos^2(g, r): of a plain step along one g, the share of the step along r

r is estimated from draws of its own, once as the exact blockwise gradient and once as the live one
of the arm's own context mode. Squares of estimated means are taken over pairs of different draws,
so that they hold no noise. The intervals are a bootstrap's over the draws of both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load, save
from torch import Tensor

from bwsft import config as c
from bwsft.objectives.config import ObjectiveConfig
from bwsft.utils.files import write_atomic
from bwsft.utils.flops import flop_counter

if TYPE_CHECKING:
    from bwsft.training.trainer import Run

PARTS = {
    "noise": "noise",
    "cosine_exact": "cosine with exact",
    "squared_exact": "squared cosine",
    "cosine_own": "cosine with own mode",
    "squared_own": "squared cosine, own",
}
PER_FLOP = ("noise x TFLOP", "squared / TFLOP", "own squared / TFLOP")
DRAWS = 48  # gradients of an arm
GROUPS, EACH = 16, 12  # of a reference: so many means of so many draws
COUNTED = 4  # draws under the FLOP counter
APART = 1 << 20  # visits of the references begin here, so that they share no draw with an arm
RESAMPLES = 1000


HOW = (
    f"The same sequences are masked {DRAWS} times at the same weights. `noise`: variance of the "
    "gradient over its squared mean; n updates averaged have 1/n of it. `cosine`: of the mean with "
    f"the mean of {GROUPS * EACH} other draws of the exact blockwise gradient; `own mode`: of live "
    "gradients, one draw a block, in the arm's own context mode. `squared cosine`: of one "
    "gradient, on average. Squares of means are without bias. In brackets 95 % bootstrap intervals "
    "over the draws of both; the sequences are the same in all. TFLOP: counted, of one update."
)


def per_flop(found: dict[str, list[float]], tflop: float) -> tuple[float, float, float]:
    """PER_FLOP of an arm's parts: at equal FLOPs little noise is good, and a large square."""
    noise, *squares = (found[part][0] for part in ("noise", "squared_exact", "squared_own"))
    return noise * tflop, *(square / tflop for square in squares)


def measure(config: c.Config, folder: Path) -> dict:
    """{"flops": of an update, "value": its noise, and of noise, cosines and expected squared
    cosines [value, low, high]}, of the model that config.model names; references are kept in the
    folder."""
    with opened(config) as run:
        drawn = torch.stack([gradient(run, visit) for visit in range(DRAWS)])
        with flop_counter() as flops:
            for visit in range(COUNTED):
                gradient(run, visit)
    out: dict = {"flops": flops.get_total_flops() / COUNTED}
    for name, other in references(config).items():
        for part, value in compare(drawn, reference(other, folder)).items():
            out["noise" if part == "noise" else f"{part}_{name}"] = value
    return {**out, "value": out["noise"][0]}


def references(config: c.Config) -> dict[str, c.Config]:
    """What an arm's gradients are compared with: single draws of Blockwise SFT with gradients
    through the context, in exact mode and in the arm's own."""
    plain = dataclasses.replace(
        config, draws_per_context=1, block_size_schedule=0.0, ar_weight=0.0,
        objective=ObjectiveConfig(),
    )  # fmt: skip
    exact = dataclasses.replace(plain, context="exact", clean_attention="block")
    return {"exact": exact, "own": plain}


@contextlib.contextmanager
def opened(config: c.Config) -> Iterator[Run]:
    """The run of a config before its first update, in a folder that is thrown away."""
    from bwsft.training.run_files import open_run
    from bwsft.training.setup import setup

    with tempfile.TemporaryDirectory() as scratch:
        config = dataclasses.replace(config, out=str(Path(scratch) / "run"))
        yield setup(config, *open_run(config))


def gradient(run: Run, visit: int) -> Tensor:
    """Of the loss of the run's first update, masked as in this visit: [trained weights] in fp32."""
    from bwsft.models.backbone import trainable

    config = run.config
    samples = [(i, visit) for i, _ in run.data.samples(0, config.batch_size, config.seed)]
    place, weights = run.place(visit, samples), trainable(run.backbone).values()
    run.optimizer.zero_grad(set_to_none=True)
    for first in range(0, len(samples), config.micro_batch_size):
        batch = run.data.pack(samples[first : first + config.micro_batch_size])
        for loss in run.mode.losses(batch, place._replace(first=first)):
            (loss.total / len(samples)).backward()
    flat = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
    return torch.cat([grad.float().flatten() for grad in flat]).cpu()


def reference(config: c.Config, folder: Path) -> Tensor:
    """Means of the config's gradients [GROUPS, trained weights], from a file if they are known."""
    from bwsft.experiments.cells import digest

    path = folder / f"reference-{config.context}-{digest(config)}.safetensors"
    if not path.exists():
        visits = iter(range(APART, APART + GROUPS * EACH))
        with opened(config) as run:
            means = [sum(gradient(run, next(visits)) for _ in range(EACH)) for _ in range(GROUPS)]
        write_atomic(path, save({"means": torch.stack(means) / EACH}))
    return load(path.read_bytes())["means"]


def compare(drawn: Tensor, means: Tensor) -> dict[str, list[float]]:
    """noise, cosine and squared, each [value, low, high] with a 95 % bootstrap interval, of
    gradients [N, P] and independent estimates of another one [M, P]."""
    own, cross, other = drawn @ drawn.T, drawn @ means.T, means @ means.T
    products = [x.double() for x in (own, cross, other)]
    count, groups = len(drawn), len(means)
    chance = torch.Generator().manual_seed(0)
    value = statistics(*products, torch.ones(count), torch.ones(groups))
    again = [
        statistics(*products, resampled(count, chance), resampled(groups, chance))
        for _ in range(RESAMPLES)
    ]
    low, high = torch.stack(again).nanquantile(torch.tensor([0.025, 0.975]).double(), dim=0)
    names, triples = ("noise", "cosine", "squared"), torch.stack([value, low, high], dim=1)
    return dict(zip(names, triples.tolist(), strict=True))


def resampled(count: int, chance: torch.Generator) -> Tensor:
    """How often each of so many was taken, out of as many with replacement."""
    return torch.randint(count, (count,), generator=chance).bincount(minlength=count)


def statistics(own: Tensor, cross: Tensor, other: Tensor, taken: Tensor, groups: Tensor) -> Tensor:
    """[noise, cosine, squared] from the inner products of gradients [N, N], of them and the other's
    means [N, M], and of those [M, M], each taken so many times [N], [M]. NaN where the mean cannot
    be told from 0."""
    taken, groups = taken.double(), groups.double()
    mean = square_of_mean(own, taken)
    size = own.diagonal() @ taken / taken.sum()
    reference = square_of_mean(other, groups)
    along = cross @ groups / groups.sum()
    noise = (size - mean) / mean.clamp(min=0)
    cosine = (along @ taken / taken.sum()) / (mean * reference).sqrt()
    squared = (along.square() / own.diagonal()) @ taken / taken.sum() / reference
    return torch.stack([noise, cosine, squared])


def square_of_mean(products: Tensor, taken: Tensor) -> Tensor:
    """|mean|^2 of vectors with these inner products, without bias: from pairs of different ones."""
    pairs = taken[:, None] * taken
    pairs.fill_diagonal_(0)
    return (pairs * products).sum() / pairs.sum()
