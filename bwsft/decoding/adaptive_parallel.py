"""Adaptive Parallel Decoding (arXiv:2506.00413): left to right, as many tokens a step as a small
autoregressive model agrees with.

A step drafts every [MASK] of a window by the diffusion model's marginals, scores the draft by the
verifier, and chooses again from the product of both, p^R q^(1 - R), with the same noise. What
agrees up to the first difference is committed, and of the first [MASK] the second choice in any
case: at least one token a step. The noise of a position does not depend on the step, so R = 0 is
sampling from the verifier alone, token for token, and R = 1 takes the whole window.

S rows, B slots of the windows, N masked slots, D hidden size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from bwsft_kernels import LinearArgmax
from torch import Tensor

from bwsft.decoding.canvas import Active, Canvas, Row, upload
from bwsft.decoding.context import DecodeContext, show
from bwsft.decoding.plan import DecodeConfig, PlannedStep
from bwsft.decoding.rules import Head, choose, head_of
from bwsft.models.backbone import Backbone
from bwsft.models.kv_cache import ContextCache, Span

if TYPE_CHECKING:  # it needs transformers
    from bwsft.models.verifier import Verifier


class WindowRow(Row):
    """A row whose plan holds the window at every number of committed tokens."""

    def following(
        self, turn: PlannedStep, step: int, committed: int | None, edited: bool = False
    ) -> PlannedStep | None:
        number = turn.number + committed
        return self.plan[number] if number < len(self.plan) else None

    def last_committed(self, turn: PlannedStep) -> int:
        """Position of the newest token before a turn; all before it are as they were drafted."""
        return self.plan[turn.number - 1].start if turn.number else 0


def windows(
    prompt_length: int, config: DecodeConfig, given: Sequence[int] = ()
) -> list[PlannedStep]:
    """The window that begins at each open position; `number` counts the open positions before."""
    end, taken = prompt_length + config.gen_length, set(given)
    places = [prompt_length + p for p in range(config.gen_length) if p not in taken]
    plan = []
    for number, start in enumerate(places):
        stop = min(start + config.option("lookahead"), end)
        masked = bisect_left(places, stop) - number
        plan.append(PlannedStep(start, stop, masked, 0, number))
    return plan


def joint_head(own: Head, verifier: Head, mixture: float) -> Head:
    """The head of [R h, (1 - R) h'], whose logits are R times the model's and 1 - R times the
    verifier's: a copy of both weights [V, D + D']."""
    size = min(own.size, verifier.size)
    weight = torch.cat([own.weight[:size], verifier.weight[:size].to(own.weight)], 1)
    terms = [
        share * head.bias[:size].to(weight)
        for share, head in ((mixture, own), (1 - mixture, verifier))
        if head.bias is not None
    ]
    return Head(weight, sum(terms) if terms else None, size)


@dataclass
class VerifiedContext(DecodeContext):
    """The decode context of rule apd: the window's hidden states and the verifier's cache."""

    verifier: Verifier | None = None  # None: the mixture is 1, and every draft is taken
    draft_head: Head | None = None
    joint: Head | None = None
    read: ContextCache | None = None  # the verifier's keys and values
    read_to: list[int] = field(default_factory=list)  # where each row's end
    drafted_from: list[int] = field(default_factory=list)  # start of each row's last window

    @classmethod
    def begin_with(
        cls, verifier: Verifier | None, model: Backbone, config: DecodeConfig, canvas: Canvas
    ) -> VerifiedContext:
        size, longest = len(canvas.rows), max(row.length for row in canvas.rows)
        cache = None if config.kv_window is None else model.new_cache(size, longest)
        context = cls(model, model, config, cache, [0] * size)
        context.draft_head = head_of(model)
        if config.option("mixture") < 1:
            second = Head(*verifier.decoder.head(), verifier.vocab_size)
            context.verifier = verifier
            context.joint = joint_head(context.draft_head, second, config.option("mixture"))
            # Ids that the verifier doesn't know are drafted no more than they are chosen.
            context.draft_head = context.draft_head._replace(size=context.joint.size)
            context.read = verifier.decoder.new_cache(size, longest)
            context.read_to = [0] * size
        return context

    def keep(self, kept: list[int]) -> None:
        super().keep(kept)
        if self.read is not None:
            index = torch.tensor(kept, dtype=torch.long)  # an empty list names no dtype
            self.read = self.read.keep(index.to(self.read.visible.device))
            self.read_to = [self.read_to[i] for i in kept]
        if self.drafted_from:
            self.drafted_from = [self.drafted_from[i] for i in kept]

    def hidden(self, canvas: Canvas, turns: list[PlannedStep], block: Span) -> Tensor:
        """The rows that predict the tokens of the windows, [S * W, D]."""
        if self.cache is None:
            return self.exact(canvas, turns, block)
        lengths, before = self.lengths(canvas, turns), self.drafted_from
        self.drafted_from = [turn.start for turn in turns]
        everyone = list(range(len(turns)))
        if not before:
            return self.context_pass(canvas, everyone, lengths, block)
        # What was drafted is new, and `kv_window` - 1 positions before it are computed anew.
        shift = self.model.family.logit_shift
        starts = [max(start - shift - self.config.kv_window + 1, 0) for start in before]
        span = span_of(starts, lengths, block.start.device)
        self.count(everyone)
        show(self.cache, lengths)
        first = torch.arange(len(turns), device=span.start.device)[:, None] * span.width
        wanted = first + block.positions() - shift - span.start[:, None]
        ids = canvas.ids[span.flat(canvas.cu_seqlens)]
        return self.model.active_hidden_states(ids, span, self.cache, wanted)

    def verify(
        self, canvas: Canvas, active: Active, hidden: Tensor, early: Tensor | None
    ) -> tuple[LinearArgmax, Tensor]:
        """Tokens of the N masked slots, from hidden states [N, D], and which slots [S, B] of the
        windows they are committed to."""
        family, config, mixture = self.model.family, self.config, self.config.option("mixture")
        draft = choose(family, self.draft_head, hidden, config, active.key, early)
        if self.verifier is None:
            return draft, active.masked
        causal = self.causal_states(canvas, active, draft.token)
        both = torch.cat([mixture * hidden, (1 - mixture) * causal.to(hidden.dtype)], 1)
        best = choose(family, self.joint, both, config, active.key, early)
        agrees = active.rectangle((best.token == draft.token).long(), 1)  # as given tokens do
        first = active.masked & (active.masked.cumsum(1) == 1)
        return best, active.masked & (agrees.cumprod(1).bool() | first)

    def causal_states(self, canvas: Canvas, active: Active, token: Tensor) -> Tensor:
        """The verifier's hidden states that predict the N drafted tokens [N]."""
        turns, rows = active.turns, canvas.rows
        known = [row.last_committed(turn) for row, turn in zip(rows, turns, strict=True)]
        starts = [min(pair) for pair in zip(self.read_to, known, strict=True)]
        self.read_to = [turn.stop - 1 for turn in turns]  # the last drafted token is not read
        span = span_of(starts, self.read_to, token.device)
        show(self.read, self.read_to)
        text = canvas.ids.index_copy(0, active.rows, token)
        hidden = self.verifier.causal_states(text[span.flat(canvas.cu_seqlens)], span, self.read)
        row = active.slots // active.block.width
        return hidden[row * span.width + active.key[2] - 1 - span.start[row]]


def span_of(starts: list[int], stops: list[int], device: torch.device) -> Span:
    """The rows' positions from their start to before their stop."""
    sizes = [stop - start for start, stop in zip(starts, stops, strict=True)]
    start, length = upload([*zip(starts, sizes, strict=True)], device).unbind(1)
    return Span(start, length, max(sizes), even=min(sizes) == max(sizes))


def check_verifier(
    verifier: Verifier | None, rows: Sequence[Row], model: Backbone, config: DecodeConfig
) -> None:
    """ValueError for a verifier that is missing, not wanted, or does not fit model and rows."""
    if config.rule != "apd":
        if verifier is not None:
            raise ValueError(f"a verifier belongs to rule apd, and the rule is {config.rule}")
        return
    if config.option("mixture") == 1:
        return  # it would not be asked
    if verifier is None:
        raise ValueError("rule apd needs a verifier: a causal LM with the model's vocabulary")
    family, known = model.family, verifier.vocab_size
    if family.softcap is not None:
        raise ValueError("rule apd needs linear heads, and this model caps its logits")
    special = {family.mask_id, *family.end_ids, *config.banned_ids}
    if max(special) >= known:
        raise ValueError(
            f"the verifier has {known} token ids, too few for id {max(special)} of the model: "
            "take one with the model's vocabulary"
        )
    for row in rows:
        check_verified_row(row, verifier)


def check_verified_row(row: Row, verifier: Verifier) -> None:
    name, known = f"prompt {row.index}", verifier.vocab_size
    if not row.prompt:
        raise ValueError(f"{name} is empty, but a verifier predicts from the token before")
    if max(*row.prompt, *row.response) >= known:
        raise ValueError(f"{name} or its canvas has a token id that the verifier does not know")
    if row.length > verifier.max_positions:
        raise ValueError(
            f"{name} needs {row.length} positions with its canvas, more than the verifier's "
            f"{verifier.max_positions}"
        )
