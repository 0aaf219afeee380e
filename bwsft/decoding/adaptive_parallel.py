"""Adaptive Parallel Decoding (arXiv:2506.00413): left to right, as many tokens a step as a small
autoregressive model agrees with.

A step drafts every [MASK] of a window by the diffusion model's marginals, scores the draft by the
verifier, and chooses again from the product of both, p^R q^(1 - R), with the same noise. What
agrees up to the first difference is committed, and of the first [MASK] the second choice in any
case: at least one token a step. The noise of a position does not depend on the step, so R = 0 is
sampling from the verifier alone, token for token, and R = 1 takes the whole window.

S sequences, B slots of the windows, N masked slots, D hidden size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from bwsft_kernels import LinearArgmax
from torch import Tensor

from bwsft.decoding.canvas import Active, Canvas, Change, Row, span_of, upload
from bwsft.decoding.choice import Head, head_of
from bwsft.decoding.context import DecodeContext, show
from bwsft.decoding.plan import Plan, Planned, PlannedStep
from bwsft.decoding.rules import Rule
from bwsft.models.backbone import Backbone
from bwsft.models.kv_cache import ContextCache, Span

if TYPE_CHECKING:
    from bwsft.decoding.config import DecodeConfig
    from bwsft.models.verifier import Verifier  # it needs transformers


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
    def begin(
        cls, model: Backbone, config: DecodeConfig, canvas: Canvas, verifier: Verifier | None = None
    ) -> VerifiedContext:
        size, longest = len(canvas.rows), max(row.length for row in canvas.rows)
        rule = config.method
        cache = None if rule.kv_window is None else model.new_cache(size, longest)
        context = cls(model, model, config, cache, [0] * size)
        context.draft_head = head_of(model)
        if rule.needs_verifier:
            second = Head(*verifier.decoder.head(), verifier.vocab_size)
            context.verifier = verifier
            context.joint = joint_head(context.draft_head, second, rule.mixture)
            # Ids that the verifier doesn't know are drafted no more than they are chosen.
            context.draft_head = context.draft_head._replace(size=context.joint.size)
            context.read = verifier.decoder.new_cache(size, longest)
            context.read_to = [0] * size
        return context

    def keep(self, kept: list[int]) -> None:
        super().keep(kept)
        if self.read is not None:
            self.read = self.read.keep(upload(kept, self.read.visible.device))
            self.read_to = [self.read_to[i] for i in kept]
        if self.drafted_from:
            self.drafted_from = [self.drafted_from[i] for i in kept]

    def hidden(self, canvas: Canvas, planned: Planned, block: Span) -> Tensor:
        """The hidden states that predict the tokens of the windows, [S * W, D]."""
        if self.cache is None:
            return self.exact(canvas, planned, block)
        lengths, before = self.lengths(canvas, planned), self.drafted_from
        self.drafted_from = [step.start for step in planned]
        everyone = list(range(len(planned)))
        if not before:
            return self.context_pass(canvas, everyone, lengths, block)
        # What was drafted is new, and `kv_window` - 1 positions before it are computed anew.
        shift, window = self.model.family.logit_shift, self.config.method.kv_window
        starts = [max(start - window + 1, shift) for start in before]
        span = span_of(starts, [length + shift for length in lengths], block.start.device)
        return self.span_pass(canvas, everyone, span, self.cache, lengths, span.places_of(block))

    def causal_states(self, canvas: Canvas, active: Active, token: Tensor) -> Tensor:
        """The verifier's hidden states that predict the N drafted tokens [N]."""
        known = [  # position of the newest token; all before it are as they were drafted
            row.plan[step.number - 1].start if step.number else 0
            for row, step in zip(canvas.rows, active.planned, strict=True)
        ]
        starts = [min(pair) for pair in zip(self.read_to, known, strict=True)]
        self.read_to = [step.stop - 1 for step in active.planned]  # the last token is not read
        span = span_of(starts, self.read_to, token.device)
        show(self.read, self.read_to)
        text = canvas.ids.index_copy(0, active.places, token)
        hidden = self.verifier.causal_states(text[span.flat(canvas.cu_seqlens)], span, self.read)
        row = active.slots // active.block.width
        return hidden[row * span.width + active.key[2] - 1 - span.start[row]]


@dataclass(frozen=True)
class AdaptiveParallel(Rule):
    """The rule. `mixture` and `lookahead` are those of the released scripts."""

    name = "apd"
    dynamic = True
    own_order = "position"
    only_context = "exact"
    step_noise = False  # a window slides: what a position draws must not depend on when
    takes_verifier = True
    context_type = VerifiedContext

    mixture: float = 0.7
    lookahead: int = 100
    kv_window: int | None = None

    @property
    def needs_verifier(self) -> bool:
        return self.mixture < 1  # else it would not be asked

    def check(self) -> None:
        super().check()
        config = self.config
        for name in ("lookahead", "kv_window"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name} must be at least 1, not 0")
        if self.mixture > 1:
            raise ValueError(f"mixture must be in [0, 1], not {self.mixture}")
        if config.context != self.only_context:
            raise ValueError(
                f"rule apd needs context exact, not {config.context}: its own cache is kv_window"
            )
        if config.graphs:
            raise ValueError("rule apd runs other shapes in every step: leave graphs out")
        if config.cfg_scale:
            raise ValueError("rule apd mixes the logits of two models already: leave cfg_scale out")

    def check_verifier(
        self, verifier: Verifier | None, rows: Iterable[Row], model: Backbone
    ) -> None:
        if not self.needs_verifier:
            return
        if verifier is None:
            raise ValueError("rule apd needs a verifier: a causal LM with the model's vocabulary")
        family, known = model.family, verifier.vocab_size
        if family.softcap is not None:
            raise ValueError("rule apd needs linear heads, and this model caps its logits")
        special = {family.mask_id, *family.end_ids, *self.config.banned_ids}
        if max(special) >= known:
            raise ValueError(
                f"the verifier has {known} token ids, too few for id {max(special)} of the model: "
                "take one with the model's vocabulary"
            )
        for row in rows:
            name = f"prompt {row.index}"
            if not row.prompt:
                raise ValueError(f"{name} is empty, but a verifier predicts from the token before")
            if max(*row.prompt, *row.response) >= known:
                raise ValueError(
                    f"{name} or its canvas has a token id that the verifier does not know"
                )
            if row.length > verifier.decoder.family.max_positions:
                raise ValueError(
                    f"{name} needs {row.length} positions with its canvas, more than the "
                    f"verifier's {verifier.decoder.family.max_positions}"
                )

    def plan(self, prompt: int, origin: str, given: Sequence[int] = (), request: int = 0) -> Plan:
        """The window that begins at each open position; `number` counts those before it. There are
        no blocks."""
        end, taken = prompt + self.config.gen_length, set(given)
        places = [prompt + p for p in range(self.config.gen_length) if p not in taken]
        windows = [(start, min(start + self.lookahead, end)) for start in places]
        return [
            PlannedStep(start, stop, bisect_left(places, stop) - number, 0, number)
            for number, (start, stop) in enumerate(windows)
        ]

    def following(
        self, plan: Plan, planned: PlannedStep, number: int,
        filled: Sequence[int], edited: bool, drafted: int,
    ) -> PlannedStep | None:  # fmt: skip
        at = planned.number + filled[0]
        return super().following(plan, planned, at, filled, edited, drafted)

    def decide(
        self, context: VerifiedContext, canvas: Canvas, active: Active
    ) -> tuple[LinearArgmax, Change]:
        hidden = context.hidden(canvas, active.planned, active.block)
        hidden = hidden.index_select(0, active.slots)
        draft = self.choose(canvas.family, context.draft_head, hidden, active)
        if context.verifier is None:
            return draft, Change(active.masked)
        causal = context.causal_states(canvas, active, draft.token).to(hidden.dtype)
        both = torch.cat([self.mixture * hidden, (1 - self.mixture) * causal], 1)
        best = self.choose(canvas.family, context.joint, both, active)
        agrees = active.rectangle((best.token == draft.token).long(), 1)  # as given tokens do
        first = active.masked & (active.masked.cumsum(1) == 1)
        return best, Change(active.masked & (agrees.cumprod(1).bool() | first))
