"""How likely a model finds a given response: its any-order bound, exactly or by sampled masks.

A masked-diffusion model has no left-to-right likelihood. What it bounds is that of decoding the
response one token at a time in random order (LLaDA's get_log_likelihood):

    sum over sets S of the response's tokens, S not empty, of
        1 / (|S| C(n, |S|)) * sum over i in S of log p(r_i | prompt, the tokens outside S)

Blockwise (block_size B) the response is decoded block after block: the sum over its blocks of the
same, with earlier blocks clean and everything after, to the end of the canvas, hidden; that is
what blockwise training optimizes and the decoder does. Responses with no more sets than `draws` are
summed exactly. For the others one even grid of `draws` points, shifted by a hash of the request,
runs over the response's tokens; the point's block is the active block, and its place in it is

count   the number l of masked tokens, uniform 1..n_b, a random set of that size, weight n / l
rate    the mask rate t in (0, 1), weight n / (n_b t) (LLaDA's pre-training loss)

Both are unbiased. With K draws, K a multiple of n, the variance of `count` is the mean over (block,
l) of the variance over sets of (n / l) sum log p, divided by K: nothing comes from l itself. `rate`
adds that of the number of masked tokens, n (1 - t) / t times a token's mean square: its mean over
t grows like log K, so that rare draws with a tiny t rule it. K S sequences are run for S requests.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from bwsft_kernels import linear_cross_entropy
from bwsft_kernels.block_grid import BlockGrid
from bwsft_kernels.philox import Stream, philox_u24
from torch import Tensor
from tqdm import tqdm

from bwsft.data.packing import CanvasLayout
from bwsft.decoding.generate import decoding
from bwsft.models.backbone import Backbone, Family

ONE24 = 1 << 24
Request = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True)
class LikelihoodConfig:
    """How likelihoods are estimated. ValueError, naming the field, for values that can't be."""

    draws: int = 128  # sampled masks per request, K
    # Masks of an exact, evenly spread count; or Bernoulli marks at an evenly spread rate.
    estimator: Literal["count", "rate"] = "count"
    block_size: int | None = None  # None: the whole response in any order, with nothing after it
    gen_length: int = 128  # with block_size: the canvas is [MASK] to prompt + so many positions
    seed: int = 0  # of the masks, which depend on it and on the request's tokens alone
    batch_size: int = 32  # sequences per forward; no result depends on it

    def __post_init__(self) -> None:
        for name in ("draws", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.estimator not in ("count", "rate"):
            raise ValueError(f"estimator must be count or rate, not {self.estimator!r}")


class Estimate(NamedTuple):
    """log p of a response in nats, and its standard error: 0 where it is exact; else that of
    independent draws, which even spreading only lowers."""

    value: float
    error: float


class Masks(NamedTuple):
    """Sets of a response's tokens to predict, and what each counts."""

    masked: Tensor  # [K, n] bool
    stop: Tensor  # [K] response tokens from here on are hidden
    weight: Tensor  # [K] fp64: the estimate is the sum of weight * sum of log p
    exact: bool


def log_likelihoods(
    backbone: Backbone, requests: Sequence[Request], config: LikelihoodConfig | None = None
) -> list[Estimate]:
    """The bound of each (prompt ids, response ids), under the `exact` context mode.

    ValueError for an empty response, [MASK] in a request, or one that the model's positions do not
    hold.
    """
    config = config or LikelihoodConfig()
    for number, request in enumerate(requests):
        check(number, request, backbone.family, config)
    found = []

    def all_sequences() -> Iterator[tuple]:
        for request in tqdm(requests, "likelihoods", unit=" requests", disable=len(requests) < 2):
            masks = masks_of(request, backbone.family, config)
            found.append((masks, scores := np.zeros(len(masks.weight))))
            for i, sequence in sequences(request, masks, backbone.family, config):
                yield scores, i, sequence

    waiting = all_sequences()
    with decoding(backbone, backbone.head()[0]):
        while batch := list(itertools.islice(waiting, config.batch_size)):
            settle(backbone, batch)
    return [estimate(*pair) for pair in found]


def check(number: int, request: Request, family: Family, config: LikelihoodConfig) -> None:
    """ValueError for a request that cannot be scored."""
    if family.attention == "block_causal":
        raise ValueError(
            "likelihoods run under context exact, which a model that attends from block to block "
            "does not have: score its answers instead (bwsft evaluate)"
        )
    prompt, response = request
    if not len(response):
        raise ValueError(f"request {number} has an empty response")
    if family.mask_id in prompt or family.mask_id in response:
        raise ValueError(f"request {number} contains [MASK], id {family.mask_id}")
    if len(prompt) < family.logit_shift:
        raise ValueError(f"request {number} has no prompt, but this model predicts from before")
    if (longest := canvas(request, family, config)) > family.max_positions:
        raise ValueError(
            f"request {number} needs {longest} positions, the model has {family.max_positions}: "
            "shorten it"
        )


def canvas(request: Request, family: Family, config: LikelihoodConfig) -> int:
    """Length of a request's sequence: prompt, response and, blockwise, the canvas after it."""
    prompt, response = map(len, request)
    if config.block_size is None:
        return prompt + response
    layout = CanvasLayout(
        mask_id=family.mask_id, eos_id=family.eos_id, block_size=config.block_size,
        gen_length=config.gen_length, block_origin=family.block_origin, fill=False,
    )  # fmt: skip
    return layout.lengths(prompt, response)[1]


def masks_of(request: Request, family: Family, config: LikelihoodConfig) -> Masks:
    """All sets of the response's blocks if they are no more than the draws, else sampled ones."""
    prompt, n = map(len, request)
    size = config.block_size
    grid = BlockGrid(n) if size is None else BlockGrid(size, family.block_origin)
    blocks = [(start - prompt, stop - prompt) for start, stop in grid.blocks(prompt, n)]
    if sum(2 ** (stop - start) - 1 for start, stop in blocks) <= config.draws:
        return all_sets(blocks, n)
    return sampled_sets(blocks, n, request_id(request), config)


def all_sets(blocks: list[tuple[int, int]], n: int) -> Masks:
    """Every set of every block, with the weight of the exact sum."""
    chosen = [
        (places, stop, 1 / (size * math.comb(stop - start, size)))
        for start, stop in blocks
        for size in range(1, stop - start + 1)
        for places in itertools.combinations(range(start, stop), size)
    ]
    masked = torch.zeros(len(chosen), n, dtype=torch.bool)
    for i, (places, _, _) in enumerate(chosen):
        masked[i, list(places)] = True
    _, stops, weights = zip(*chosen, strict=True)
    return Masks(masked, torch.tensor(stops), torch.tensor(weights, dtype=torch.float64), True)


def sampled_sets(
    blocks: list[tuple[int, int]], n: int, number: int, config: LikelihoodConfig
) -> Masks:
    """One set per draw, by Philox numbers of request `number`; integers in units of 2^-24."""
    draws, draw, place = config.draws, torch.arange(config.draws), torch.arange(n)
    key = {"seed": config.seed, "stream": Stream.RATE}
    point = (philox_u24(0, 0, number, **key) + (draw << 24) // draws) % ONE24 * n  # in 2^-24 tokens
    starts, stops = (torch.tensor(edge) for edge in zip(*blocks, strict=True))
    block = torch.searchsorted(stops, point >> 24, right=True)
    start, stop = starts[block], stops[block]
    active = (place >= start[:, None]) & (place < stop[:, None])
    word = philox_u24(place[None], draw[:, None], number, seed=config.seed, stream=Stream.MARKS)
    word = word.masked_fill(~active, ONE24)
    if config.estimator == "count":
        count = 1 + (point >> 24) - start
        rank = word.argsort(dim=1, stable=True).argsort(dim=1)
        masked, weight = active & (rank < count[:, None]), n / count.double()
    else:
        rate = (point - (start << 24)) // (stop - start)  # in 2^-24
        masked = active & (word < rate[:, None])
        weight = n * ONE24 / ((stop - start) * rate.clamp(min=1)).double()
    return Masks(masked, stop, weight / draws, False)


def request_id(request: Request) -> int:
    """56 bits of a hash of the request's tokens: its masks depend on no order and no batch."""
    ids = np.concatenate([np.asarray(part, dtype="<i8") for part in ((len(request[0]),), *request)])
    return int.from_bytes(hashlib.sha256(ids.tobytes()).digest()[:7], "little")


def sequences(
    request: Request, masks: Masks, family: Family, config: LikelihoodConfig
) -> Iterator[tuple[int, tuple[Tensor, Tensor, Tensor]]]:
    """(number of the set, (ids, places to predict, their tokens)) of every set but empty ones."""
    prompt, response = (torch.tensor(list(part), dtype=torch.long) for part in request)
    after = canvas(request, family, config) - len(prompt) - len(response)
    whole = torch.cat([prompt, response, prompt.new_full((after,), family.mask_id)])
    at = len(prompt) + torch.arange(len(response))
    for i, (masked, stop) in enumerate(zip(masks.masked, masks.stop.tolist(), strict=True)):
        if masked.any():
            hidden = masked.clone()
            hidden[stop:] = True
            yield i, (whole.index_fill(0, at[hidden], family.mask_id), at[masked], response[masked])


def settle(backbone: Backbone, waiting: list[tuple]) -> None:
    """One forward: write the sum of log p of every waiting sequence where it belongs."""
    ids, places, targets = zip(*(sequence for _, _, sequence in waiting), strict=True)
    lengths = torch.tensor([len(sequence) for sequence in ids])
    edges = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    owner = torch.repeat_interleave(torch.tensor([len(p) for p in places]))
    positions = torch.cat([torch.arange(len(sequence)) for sequence in ids])
    index = torch.cat(places) + edges[owner]
    packed = torch.cat(ids), positions, edges.int(), index, torch.cat(targets)
    weight, bias = backbone.head()
    ids, positions, edges, index, target = (tensor.to(weight.device) for tensor in packed)
    hidden = backbone.hidden_states(ids, positions, edges, max_length=int(lengths.max()))
    hidden = hidden.index_select(0, backbone.predicting_rows(index))
    softcap = backbone.family.softcap
    loss = linear_cross_entropy(
        hidden, weight, target, linear_bias=bias, softcap=softcap, reduction="none"
    )
    sums = torch.zeros(len(waiting), dtype=torch.float64)
    sums.index_add_(0, owner, -loss.double().cpu())
    for (scores, i, _), value in zip(waiting, sums.tolist(), strict=True):
        scores[i] = value


def estimate(masks: Masks, scores: np.ndarray) -> Estimate:
    """The weighted sum over the sets, and its standard error."""
    parts = masks.weight.numpy() * scores
    count = len(parts)
    if masks.exact or count == 1:
        return Estimate(float(parts.sum()), 0.0 if masks.exact else math.inf)
    return Estimate(float(parts.sum()), float(parts.std(ddof=1) * math.sqrt(count)))
