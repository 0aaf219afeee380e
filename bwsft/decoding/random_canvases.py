"""Decoding of models whose undecided tokens are random ones, by the sampler of transformers.

A canvas starts as random tokens. Each denoising step (rule renoise) draws a token at every place,
keeps those of the least entropy while their sum stays below a bound and makes the others random
again. It ends when the most probable tokens no longer change and are sure, and these are what is
written; the encoder then reads the canvas, and the next one starts. `entropy_bound` and `steps`
replace the model's own settings, all others are those of its generation_config.json.

Prompts run one by one, each with random numbers of its own: no answer depends on the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from bwsft_kernels import Stream
from bwsft_kernels.philox import philox_u24
from torch import Tensor

from bwsft.decoding.config import DecodeConfig
from bwsft.decoding.request import check_request
from bwsft.decoding.result import Commit, Generation, OnCommit
from bwsft.models.backbone import Backbone

TAKEN = "gen_length block_size context steps rule entropy_bound seed batch_size poll".split()


@dataclass
class Drafts:
    """What transformers' sampler tells of its steps: a streamer of its `generate`."""

    takes_logits: bool
    steps: int = 0
    canvases: int = 0
    commits: list[Commit] = field(default_factory=list)
    last: list[int] = field(default_factory=list)  # tokens of the canvas after the last step

    @property
    def _takes_logits(self) -> bool:  # the name by which transformers asks
        return self.takes_logits

    def put_draft(self, value: Tensor | None = None, logits: Tensor | None = None) -> None:
        """A step has chosen tokens [1, B], or given logits [1, B, V]: those that are new are
        commits, whose confidence is that of the tempered softmax."""
        if logits is not None:
            best = logits[0].float().softmax(-1).max(-1)
            self.commit(best.indices.tolist(), best.values.tolist(), self.steps)
        self.steps += 1

    def put(self, tokens: Tensor) -> None:
        """The prompt, then each canvas as it is written."""
        if self.steps and self.last:  # in half precision a tie may have gone otherwise
            written = tokens.flatten().tolist()
            self.commit(written, [0.0] * len(written), self.steps - 1)
        self.canvases, self.last = self.canvases + 1, []

    def commit(self, tokens: list[int], confidence: list[float], step: int) -> None:
        first, before = (self.canvases - 1) * len(tokens), self.last or [-1] * len(tokens)
        self.commits += [
            Commit(step, first + i, *pair)
            for i, (old, *pair) in enumerate(zip(before, tokens, confidence, strict=True))
            if pair[0] != old
        ]
        self.last = tokens

    def end(self) -> None:
        """All is written."""


def check_settings(config: DecodeConfig) -> None:
    """``ValueError`` for a setting that this sampler does not have."""
    taken = DecodeConfig(**{name: getattr(config, name) for name in TAKEN})
    names = [f.name for f in dataclasses.fields(config)]
    if odd := [name for name in names if getattr(config, name) != getattr(taken, name)]:
        raise ValueError(
            f"{odd[0]} is no setting of this model's sampler, which is that of transformers: "
            f"leave it out ({', '.join(TAKEN)} are; temperatures are in generation_config.json)"
        )


def write_stream(
    model: Backbone, prompts: Sequence[Sequence[int]], config: DecodeConfig,
    requests: Sequence[int], trace: bool = False, on_commit: OnCommit | None = None,
) -> Iterator[tuple[int, Generation]]:  # fmt: skip
    """(index of the prompt, Generation) of each prompt in turn; errors as `decode_stream`'s."""
    check_request(prompts, requests, model.family, config)
    check_settings(config)
    telling = trace or on_commit is not None
    asked = zip(prompts, requests, strict=True)
    return ((i, write(model, i, *one, config, telling, on_commit)) for i, one in enumerate(asked))


def write(
    model: Backbone, index: int, prompt: Sequence[int], request: int, config: DecodeConfig,
    telling: bool, on_commit: OnCommit | None,
) -> Generation:  # fmt: skip
    """The answer to a prompt. `passes` are its denoising steps, and those of the encoder: one for
    the prompt and one for each canvas that another follows."""
    drafts, settings = Drafts(telling), {}
    if config.steps is not None:
        settings["max_denoising_steps"] = config.steps * config.block_size // config.gen_length
    if config.entropy_bound is not None:
        settings["entropy_bound"] = config.entropy_bound
    high, low = philox_u24(torch.arange(2), 0, request, seed=config.seed, stream=Stream.GUMBEL)
    found = written(
        model, prompt, int(high) << 24 | int(low), canvas=config.block_size, streamer=drafts,
        max_new_tokens=config.gen_length, eos_token_id=list(model.family.end_ids), **settings,
    )  # fmt: skip
    if on_commit is not None and drafts.commits:
        on_commit(index, drafts.commits)
    ends = model.family.end_ids
    end = next((i for i, token in enumerate(found) if token in ends), None)
    canvases = drafts.canvases - 1  # the first that it was told of is the prompt
    return Generation(
        found[:end], end is not None, drafts.steps, drafts.commits, drafts.steps + canvases
    )


def written(model: Backbone, *arguments: Any, **settings: Any) -> list[int]:
    """What the model writes, without dropout. FloatingPointError if its logits are NaN."""
    training = model.training
    model.eval()
    try:
        return model.write_canvases(*arguments, **settings)
    except RuntimeError as error:
        if "probability tensor" not in str(error):
            raise
        raise FloatingPointError(
            "the model's logits are NaN: decode in float32, or check the checkpoint"
        ) from error
    finally:
        model.train(training)
