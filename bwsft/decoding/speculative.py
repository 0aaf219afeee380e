"""Self-speculative decoding (arXiv:2510.04147): the answer of the decoder that commits one token in
every step, from fewer forward passes.

That decoder takes the [MASK] that goes first, and looks again. Those that come next in the order of
the same look are drafts: likely, but not sure, to be what it takes next. A pass runs several states
of the active block side by side: the block as it stands, and with one draft more in each. The first
state is one that the decoder comes to, so its first token is committed. If that is the first draft,
at the same place, the second state is one too, and so on up to the first difference. The last such
state drafts for the next pass. So a pass commits at least one token, and at most as many as it runs
states.

S sequences, R states of them, B slots of an active block, K drafts, N masked slots, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from bwsft_kernels import LinearArgmax
from torch import Tensor

from bwsft.decoding.canvas import Active, Canvas, Change, upload
from bwsft.decoding.choice import head_of
from bwsft.decoding.context import DecodeContext, joined
from bwsft.decoding.plan import Plan, Planned, PlannedStep
from bwsft.decoding.rules import Rule, rank
from bwsft.models.backbone import Backbone
from bwsft.models.kv_cache import ContextCache, Span

if TYPE_CHECKING:
    from bwsft.decoding.config import DecodeConfig
    from bwsft.models.verifier import Verifier


class Drafts(NamedTuple):
    """What every sequence may take next, in order: slots of its active block, and tokens [S, K]."""

    slot: Tensor
    token: Tensor


@dataclass(frozen=True)
class States:
    """The states of a pass, those of a sequence one after the other, each as a row of a canvas."""

    canvas: Canvas
    planned: Planned  # the careful decoder's steps, if it comes to these states
    owner: list[int]  # which sequence each is a state of
    drafts: list[int]  # how many there are in it

    @classmethod
    def of(cls, canvas: Canvas, active: Active, drafts: Drafts) -> States:
        """The active blocks as they stand, and with as many drafts as is planned."""
        pairs = [(i, n) for i, step in enumerate(active.planned) for n in range(step.drafts + 1)]
        owner, counts = map(list, zip(*pairs, strict=True))
        steps = [
            replace(step, masked=step.masked - n, number=step.number + n)
            for step, n in ((active.planned[i], n) for i, n in pairs)
        ]
        copies = canvas.keep(owner)
        if filled := [(state, i, k) for state, (i, n) in enumerate(pairs) for k in range(n)]:
            state, row, k = upload(filled, canvas.ids.device).unbind(1)
            places = copies.cu_seqlens[state] + active.block.start[row] + drafts.slot[row, k]
            copies.ids[places] = drafts.token[row, k]
        return cls(copies, steps, owner, counts)

    def look(self, rule: Rule) -> Active:
        """The active blocks of all states, each in the step that the careful decoder sees it in."""
        active = self.canvas.look(self.planned, 0, rule)
        request, _, position = active.key
        steps = upload([step.number for step in self.planned], position.device)
        return replace(active, key=(request, steps[active.slots // active.block.width], position))

    def firsts(self, device: torch.device) -> Tensor:
        """The state [S] of each sequence without a draft."""
        return upload([state for state, n in enumerate(self.drafts) if n == 0], device)

    def table(self, values: Tensor, none: float) -> Tensor:
        """Values [R] as [S, most states of a sequence]."""
        width = max(self.drafts) + 1
        places = [i * width + n for i, n in zip(self.owner, self.drafts, strict=True)]
        empty = values.new_full(((self.owner[-1] + 1) * width,), none)
        return empty.index_copy_(0, upload(places, values.device), values).unflatten(0, (-1, width))


@dataclass
class StatesCache(ContextCache):
    """The keys and values that are stored for sequences, for states of them: `owner` [R]. A layer
    reads a copy for every state, with the state's own in their slots; the stored ones stay."""

    owner: Tensor | None = None

    @classmethod
    def of(cls, cache: ContextCache, owner: list[int]) -> StatesCache:
        index = upload(owner, cache.visible.device)
        return cls(cache.keys, cache.values, cache.visible[index], owner=index)

    @property
    def length(self) -> int:
        return self.most

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`ContextCache.write`, into copies [R, most that is seen + 1, K, E]."""
        stored = self.keys[layer], self.values[layer]
        keys, values = (b[:, : self.length + 1].index_select(0, self.owner) for b in stored)
        keys.flatten(0, 1).index_copy_(0, slots, k)
        values.flatten(0, 1).index_copy_(0, slots, v)
        return keys, values


@dataclass
class SpeculativeContext(DecodeContext):
    """The decode context of rule speculative: passes over several states, and what they drafted."""

    drafts: Drafts | None = None

    @classmethod
    def begin(
        cls, model: Backbone, config: DecodeConfig, canvas: Canvas, verifier: Verifier | None = None
    ) -> SpeculativeContext:
        context = super().begin(model, config, canvas, verifier)
        none = canvas.ids.new_zeros(len(canvas.rows), 0)
        context.drafts = Drafts(none, none)
        return context

    def keep(self, kept: list[int]) -> None:
        super().keep(kept)
        index = upload(kept, self.drafts.slot.device)
        self.drafts = Drafts(*(column[index] for column in self.drafts))

    def states_hidden(self, canvas: Canvas, active: Active, states: States, block: Span) -> Tensor:
        """The hidden states that predict the tokens of all states' active blocks, [R * B, D]."""
        if len(states.owner) == len(canvas.rows):
            return self.hidden(canvas, active.planned, active.block)
        if self.config.context == "exact":
            alone = self.alone(len(states.owner))
            hidden = alone.exact(states.canvas, states.planned, block)
            self.count(list(range(len(canvas.rows))), alone.passes[0])
            return hidden
        enter = self.finished.entering(active.planned)
        rest = [state for state, i in enumerate(states.owner) if i not in enter]
        parts = [(rest, self.stored_pass(states, rest, block))]
        if enter:  # nothing is drafted yet
            places = [states.owner.index(i) for i in enter]
            hidden = self.entering_pass(canvas, enter, active.planned, active.block)
            parts.append((places, hidden))
        return joined(parts, len(states.owner), block.width)

    def stored_pass(self, states: States, some: list[int], block: Span) -> Tensor:
        """block_causal: run the active blocks of some states against what is stored of their
        sequences."""
        owner, index = [states.owner[s] for s in some], upload(some, block.start.device)
        self.count(sorted(set(owner)))
        alone = self.alone(len(some))
        alone.cache, alone.finished = StatesCache.of(self.cache, owner), self.finished.keep(owner)
        part = replace(block, start=block.start[index], length=block.length[index])
        planned = [states.planned[s] for s in some]
        return alone.block_pass(states.canvas.keep(some), list(range(len(some))), planned, part)

    def alone(self, states: int) -> DecodeContext:
        """A context in which every state is a sequence."""
        return DecodeContext(self.model, self.run, self.config, None, [0] * states)


@dataclass(frozen=True)
class Speculative(Rule):
    """The rule. The careful decoder is rule quota with a step for every token."""

    name = "speculative"
    dynamic = True
    context_type = SpeculativeContext

    threshold: float = 0.0
    drafts: int = 3

    def check(self) -> None:
        super().check()
        context = self.config.context
        if self.drafts == 0:
            raise ValueError("drafts must be at least 1: rule quota commits a token a pass")
        if context not in ("exact", "block_causal"):
            raise ValueError(
                f"rule speculative needs context exact or block_causal, not {context}: there a "
                "block's states would need a context each"
            )
        if self.config.graphs:
            raise ValueError("rule speculative runs ever new shapes: leave graphs out")

    def shares(self, places: Sequence[int], request: int) -> list[int]:
        return [1] * len(places)

    def plan(self, prompt: int, origin: str, given: Sequence[int] = (), request: int = 0) -> Plan:
        """The careful decoder's steps; `number` counts from the first one of all."""
        careful = super().plan(prompt, origin, given, request)
        return [replace(step, number=number) for number, step in enumerate(careful)]

    def following(
        self, plan: Plan, planned: PlannedStep, number: int,
        filled: Sequence[int], edited: bool, drafted: int,
    ) -> PlannedStep | None:  # fmt: skip
        at = planned.number + filled[0]
        ahead = super().following(plan, planned, at, filled, edited, drafted)
        same = ahead is not None and ahead.start == planned.start
        return replace(ahead, drafts=drafted) if same else ahead

    def decide(
        self, context: SpeculativeContext, canvas: Canvas, active: Active
    ) -> tuple[LinearArgmax, Change]:
        """Run the states, commit the first token of each that the careful decoder comes to, and
        draft by the last one of these."""
        states = States.of(canvas, active, context.drafts)
        seen = states.look(self)
        hidden = context.states_hidden(canvas, active, states, seen.block)
        hidden = hidden.index_select(0, seen.slots)
        best = self.choose(canvas.family, head_of(context.model), hidden, seen)

        # 1. What each state would take [R, B], in its order, and which are the careful decoder's.
        slot = rank(seen.rectangle(self.priority(best, seen)), seen.masked).argsort(1)
        token = seen.rectangle(best.token, 0).gather(1, slot)
        confidence = seen.rectangle(best.confidence).gather(1, slot)
        first = states.table(slot[:, 0], -1)
        right = reached(first, states.table(token[:, 0], -1), context.drafts)

        # 2. The last of these drafts what comes next. With all of its [MASK]s filled a state would
        #    have nothing to tell.
        last, ahead = states.firsts(slot.device) + right.sum(1) - 1, slice(1, self.drafts + 1)
        context.drafts = Drafts(slot[last, ahead], token[last, ahead])
        sure = (confidence[last, ahead] >= self.threshold).long().cumprod(1).sum(1)
        drafted = torch.minimum(sure, seen.masked[last].sum(1) - 2).clamp(min=0)

        # 3. Their first tokens, in the slots of the sequences.
        places = first.masked_fill(~right, active.block.width)
        steps = upload([step.number for step in states.planned], slot.device)
        columns = [states.table(x, 0) for x in (token[:, 0], confidence[:, 0], steps)]
        *columns, taken = (spread(x, places, active.block.width) for x in (*columns, right))
        token, confidence, steps = (x.flatten()[active.slots] for x in columns)
        best = LinearArgmax(token, confidence, None, None, best.nan_flag)
        return best, Change(taken, steps=steps, drafted=drafted)


def reached(slot: Tensor, token: Tensor, drafts: Drafts) -> Tensor:
    """Which states the careful decoder comes to, bool, from what goes first in them, each
    [S, states]; slot -1 where a sequence has no more states. It comes to the first one, and to each
    after one that it comes to and in which the next draft goes first."""
    tried = slot.shape[1] - 1
    agrees = (slot[:, :-1] == drafts.slot[:, :tried]) & (token[:, :-1] == drafts.token[:, :tried])
    agrees &= slot[:, 1:] >= 0
    first = torch.ones_like(slot[:, :1], dtype=torch.bool)
    return torch.cat([first, agrees.long().cumprod(1).bool()], 1)


def spread(values: Tensor, places: Tensor, width: int) -> Tensor:
    """Values in their places, both [S, states] -> [S, width]; those at `width` go nowhere."""
    empty = values.new_zeros(len(values), width + 1)
    return empty.scatter_(1, places, values)[:, :width]
