"""Transfer rules: which [MASK]s of the active blocks get their token in a denoising step.

A rule is one object that owns its options, the plan of a sequence and the choice of a step. Here
are what all share and those that plan every step; dynamic.py has those that commit what the model
is sure of, revising.py those that take tokens back, adaptive_parallel.py the one with a second
model, and config.py lists them all. Every rule commits at least one token of every sequence that
has a [MASK] left, so that a block takes at most B steps.

S sequences, B slots of an active block, N slots that are projected to logits, D hidden size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from bwsft_kernels import LinearArgmax
from bwsft_kernels.block_grid import BlockGrid
from bwsft_kernels.philox import Stream, philox_u24
from torch import Tensor

from bwsft.decoding.canvas import Active, Canvas, Change, Row
from bwsft.decoding.choice import Head, choose_tokens, head_of
from bwsft.decoding.context import DecodeContext
from bwsft.decoding.plan import Plan, PlannedStep, hitting_shares, quotas, timestep_shares
from bwsft.models.backbone import Backbone, Family

if TYPE_CHECKING:
    from bwsft.decoding.config import DecodeConfig
    from bwsft.models.verifier import Verifier


@dataclass(frozen=True)
class Rule:
    """What all rules share. The fields of a rule beside `config` are the options of DecodeConfig
    that belong to it, each with its value where none is given."""

    name: ClassVar[str]
    dynamic: ClassVar[bool] = False  # how many tokens a step commits depends on the model
    windowed: ClassVar[bool] = False  # several blocks may be active (option active_blocks)
    revising: ClassVar[bool] = False  # tokens of the active block may change until it is finished
    spare: ClassVar[int] = 0  # steps of a block that may follow its last [MASK]
    own_order: ClassVar[str | None] = None  # what goes first where option `order` has no say
    only_context: ClassVar[str | None] = None  # the one context mode that it works in
    step_noise: ClassVar[bool] = True  # a position draws other noise in every step
    takes_verifier: ClassVar[bool] = False
    needs_verifier: ClassVar[bool] = False
    context_type: ClassVar[type[DecodeContext]] = DecodeContext

    config: DecodeConfig

    @classmethod
    def options(cls) -> list[str]:
        """Names of the options that belong to the rule."""
        return [field.name for field in dataclasses.fields(cls) if field.name != "config"]

    @classmethod
    def of(cls, config: DecodeConfig) -> Rule:
        """The rule with the options that the config gives."""
        given = {name: getattr(config, name) for name in cls.options()}
        return cls(config, **{name: value for name, value in given.items() if value is not None})

    def check(self) -> None:
        """ValueError, naming the option, for values that can't be."""
        if self.own_order and self.config.order not in (None, self.own_order):
            raise ValueError(f"rule {self.name} goes by {self.own_order}: leave order out")

    def check_verifier(
        self, verifier: Verifier | None, rows: Iterable[Row], model: Backbone
    ) -> None:
        """ValueError for a verifier that is missing, not wanted, or does not fit."""
        if verifier is not None:
            raise ValueError(f"a verifier belongs to rule apd, and the rule is {self.name}")

    def shares(self, places: Sequence[int], request: int) -> list[int]:
        """[MASK]s that each step of a block takes; `places` are the block's open positions."""
        raise NotImplementedError

    def plan(self, prompt: int, origin: str, given: Sequence[int] = (), request: int = 0) -> Plan:
        """All steps of a sequence after a prompt of this length. Where they are known beforehand
        nobody has to ask the device how many [MASK]s are left; steps that would change nothing are
        left out. Under a dynamic rule: the first step of every block.

        Every block gets the same number of steps, on an absolute grid also the first, which may be
        short, and the last, which is whole and may reach beyond gen_length.
        `given` are the response positions that hold a token from the start; a block without open
        positions has no step. `request` decides hitting times.
        """
        plan, taken = [], {prompt + position for position in given}
        grid = BlockGrid(self.config.block_size, origin)
        for start, stop in grid.blocks(prompt, grid.filled(prompt, self.config.gen_length)):
            places = [position for position in range(start, stop) if position not in taken]
            left = total = len(places)
            count, spare = (total, self.spare) if self.revising else (0, 0)
            for number, share in enumerate(self.shares(places, request)):
                if left and (share or self.dynamic or self.revising):
                    stand = total - left if self.revising and not self.dynamic else 0
                    step = PlannedStep(start, stop, left, stand + share, number, count, spare)
                    plan.append(step)
                    left -= share
        return plan

    def first(self, plan: Plan) -> PlannedStep | None:
        """A sequence's first step; None if there is nothing to do."""
        return plan[0] if plan else None

    def following(
        self, plan: Plan, planned: PlannedStep, number: int,
        filled: Sequence[int], edited: bool, drafted: int,
    ) -> PlannedStep | None:  # fmt: skip
        """A sequence's step `number`, after `planned`; None if nothing is left. Where only the
        device knew (a dynamic rule): how many [MASK]s `planned` filled in each active block,
        whether it replaced a token, and how many it drafted."""
        return plan[number] if number < len(plan) else None

    @property
    def ordered_by(self) -> str:
        return self.config.order or self.own_order or "confidence"

    def choose(self, family: Family, head: Head, hidden: Tensor, active: Active) -> LinearArgmax:
        """Tokens of the N slots from hidden states [N, D]; no end ids where it is too early."""
        config, names = self.config, {"confidence", "margin", "entropy"}
        want = {"confidence", self.ordered_by} & names
        banned = config.banned_ids + ((family.eos_id,) if config.ends == "no_eos" else ())

        def best(banned: tuple[int, ...]) -> LinearArgmax:
            return choose_tokens(config, family, head, hidden, active.key, want, banned)

        free = best(banned)
        if active.early is None and config.ends != "last":
            return free
        endless = best(banned + family.end_ids)
        columns = {"token": free.token, **{name: getattr(endless, name) for name in want}}
        if config.ends == "last":
            # Ends have the least confidence there is, and the others' softmax is without them.
            is_end = torch.zeros_like(free.token, dtype=torch.bool)
            for end in family.end_ids:
                is_end |= free.token == end
            worst = {"confidence": 0.0, "margin": 0.0, "entropy": math.log(head.size)}
            for name in want:
                columns[name] = columns[name].masked_fill(is_end, worst[name])
        else:
            columns = {name: getattr(free, name) for name in columns}
        if active.early is not None:
            for name, usual in columns.items():
                columns[name] = torch.where(active.early, getattr(endless, name), usual)
        absent = dict.fromkeys(names - want)
        return LinearArgmax(**columns, **absent, nan_flag=free.nan_flag | endless.nan_flag)

    def priority(self, best: LinearArgmax, active: Active) -> Tensor:
        """Of the N slots, higher goes first."""
        request, step, position = active.key
        if self.ordered_by == "margin":
            return best.margin
        if self.ordered_by == "entropy":
            return -best.entropy
        if self.ordered_by == "random":
            word = philox_u24(position, step, request, seed=self.config.seed, stream=Stream.ORDER)
            return word.to(best.confidence.dtype)
        if self.ordered_by == "left":
            return -position.to(best.confidence.dtype)
        return best.confidence

    def decide(
        self, context: DecodeContext, canvas: Canvas, active: Active
    ) -> tuple[LinearArgmax, Change]:
        """Tokens of the N slots, from their hidden states [N, D] under the context mode, and what
        becomes of the slots."""
        hidden = context.hidden(canvas, active.planned, active.block)
        hidden = hidden.index_select(0, active.slots)
        best = self.choose(canvas.family, head_of(context.model), hidden, active)
        return best, self.commit(canvas, active, best)

    def commit(self, canvas: Canvas, active: Active, best: LinearArgmax) -> Change:
        """The `quota` [S] masked slots of every sequence that go first."""
        goes_first = active.rectangle(self.priority(best, active))
        return Change(commit_quota(goes_first, active.masked, active.quota))


def rank(priority: Tensor, masked: Tensor) -> Tensor:
    """Place [S, B] of every slot among its sequence's masked slots; the others come after them.
    Ties go to the leftmost slot."""
    order = priority.masked_fill(~masked, -torch.inf).sort(dim=1, descending=True, stable=True)[1]
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)


def commit_quota(priority: Tensor, masked: Tensor, quota: Tensor) -> Tensor:
    """The `quota` [S] masked slots of every sequence [S, B] that go first -> bool [S, B].

    Low-confidence remasking seen from the other side: the rest stays [MASK].
    """
    return masked & (rank(priority, masked) < quota[:, None])


@dataclass(frozen=True)
class Quota(Rule):
    """LLaDA: an even share of the block in each of `steps` steps of the canvas."""

    name = "quota"
    steps: int | None = None

    @property
    def steps_per_block(self) -> int:
        """Default: one per token."""
        size = self.config.block_size
        return size if self.steps is None else self.steps // (self.config.gen_length // size)

    def shares(self, places: Sequence[int], request: int) -> list[int]:
        return quotas(len(places), self.steps_per_block)


@dataclass(frozen=True)
class Dream(Quota):
    """Dream (arXiv:2508.15487): of the [MASK]s that are left, the share that a diffusion reveals
    from one of `steps` timesteps to the next, rounded down."""

    name = "dream"

    def shares(self, places: Sequence[int], request: int) -> list[int]:
        return timestep_shares(len(places), self.steps_per_block)


@dataclass(frozen=True)
class FirstHitting(Quota):
    """BD3-LM (arXiv:2503.09573): each token when a diffusion in continuous time reveals it, alone
    or with those of the same of `steps` intervals, or with those beyond `clip`."""

    name = "first_hitting"
    own_order = "hitting times"
    clip: tuple[float, float] | None = None

    def check(self) -> None:
        super().check()
        clip = self.clip
        if clip is None:
            return
        pair = isinstance(clip, tuple | list) and len(clip) == 2
        if not pair or not 0 <= clip[0] < clip[1] <= 1:
            raise ValueError(f"clip must be two rising numbers in [0, 1], not {clip}")
        if self.steps is not None:
            raise ValueError("clip and steps both say which tokens share a step: give one")

    def shares(self, places: Sequence[int], request: int) -> list[int]:
        position = torch.tensor(places, dtype=torch.long)
        times = hitting_times(position, request, self.config.seed)
        intervals = None if self.steps is None else self.steps_per_block
        return hitting_shares(times.tolist(), intervals, self.clip)

    def priority(self, best: LinearArgmax, active: Active) -> Tensor:
        request, _, position = active.key
        return hitting_times(position, request, self.config.seed).to(best.confidence.dtype)


def hitting_times(position: Tensor, request: Tensor | int, seed: int) -> Tensor:
    """When each position is revealed under first-hitting decoding: int64 in units of 2^-24.

    Under the linear schedule a [MASK] of time t is still one at s < t with probability s / t. So
    on the way down from time 1 the hitting times are uniform in [0, 1) and independent. BD3-LM's
    sampler (github.com/kuleshov-group/bd3lms) draws the same times one after the other,
    t <- t * U^(1 / masked), each for a uniformly chosen [MASK]. Positions count from the
    sequence's first token.
    """
    return philox_u24(position, 0, request, seed=seed, stream=Stream.TIME)
