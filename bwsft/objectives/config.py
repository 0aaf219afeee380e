"""What is masked and how it is weighed: the options of bwsft/objectives/, one group per method."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal


@dataclass(frozen=True)
class DiscreteConfig:
    """--objective.weight discrete: one time t of 1..T per draw, mask rate t/T (Theorem 3.3)."""

    steps: int = 1000
    """T, at most 65536."""
    omega: Literal["elbo", "one"] = "elbo"
    """omega_t: 1/t, the bound of a linear schedule, or 1. The loss estimates the sum over t."""
    sample: Literal["uniform", "omega"] = "uniform"
    """t uniform with weight T omega_t, or by its omega_t with weight Z = the sum of omega_t."""


@dataclass(frozen=True)
class MdlmConfig:
    """--objective.name mdlm: MDLM's objective on the response."""

    RENAMED: ClassVar[dict[str, str]] = {"normalise": "normalize"}  # old spelling

    stratify: bool = True
    """Spread the times of an update evenly: one per stratum of [0, 1) (low-discrepancy t)."""
    subs: bool = True
    """[MASK] leaves the softmax (zero masking probability of SUBS)."""
    normalize: Literal["token", "sequence"] = "token"
    """Divide by the response tokens of the update, or by each sequence's own."""
    rate: Literal["mdlm", "llada"] = "mdlm"
    """Mask rate at time t in [eps, 1): (1 - eps) t with weight 1/t (log-linear schedule), or t
    itself drawn as classical SFT draws it, with weight 1 / rate."""


@dataclass(frozen=True)
class SoftMaskedConfig:
    """--objective.name soft_masked: a port of Masked-Diffuse LM (2023) to absorbing noise."""

    softness: float = 1.0
    """Lambda in [0, 1]: 0 masks all tokens at one rate, 1 one bucket after another."""
    buckets: int = 3
    """Groups of equal size by importance, the most important masked first."""
    weight: Literal["count", "elbo"] = "count"
    """1 / masked tokens, or the bound's p'(t) / p(t)."""


@dataclass(frozen=True)
class RdmConfig:
    """--objective.name rdm: the reparameterised discrete diffusion model."""

    levels: int = 50
    """Noise levels T; level k masks at rate (k + 1) / T."""
    weight: Literal["linear", "reciprocal", "none"] = "linear"
    """lambda(k): 1 - k / T; 1 / (k + 1), the bound; 1. All are divided by T for a common scale."""
    label_smoothing: float = 0.1
    """Share of the uniform target; it does not carry lambda(k)."""
    coupled: bool = True
    """Two nested masks per visit, at the higher and the lower of two levels: twice the FLOPs."""


@dataclass(frozen=True)
class TwoStepConfig:
    """--objective.name two_step: train on the model's own first step, with rising probability."""

    gap: Literal["uniform", "step"] = "uniform"
    """Second rate: uniform below the first, or one denoising step of the decoder below it."""
    reveal: Literal["random", "confidence"] = "random"
    """Which first-step tokens the second step sees: random ones, or the most confident."""
    schedule: Literal["linear", "constant", "ramp"] = "linear"
    """Chance that a sequence sees its own predictions and not the truth: 0 to 1 over the run; 1; 0
    to 1 over the first fifth."""
    replace: float = 0.0
    """Share of visible response tokens replaced by random ones (0.1 in the original)."""
    supervise: Literal["masked", "revealed", "all"] = "masked"
    """Supervised positions: masked; masked and revealed; the whole response."""


@dataclass(frozen=True)
class DistillConfig:
    """--objective.name distill: predict what the trace of a careful decoder commits next."""

    window_from: float = 0.5
    """Tokens that are supervised in a state, the next ones in the trace's order, at the start of
    the run; as a share of a block, at least one token."""
    window_to: float = 1.0
    """And at its end; between them they grow evenly."""


@dataclass(frozen=True)
class UniformConfig:
    """--objective.name uniform: random tokens in place of [MASK], as DiffusionGemma has it."""

    self_conditioning: float = 0.5
    """Chance that a block sees what the model itself says of it, from a pass without gradients."""
    one_block: bool = False
    """Train on one block of each response, drawn uniformly, with all that is before it, in place of
    all blocks in one pass: a cheaper step, and a dearer token."""


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is masked and how it is weighed (bwsft/objectives/)."""

    ABSENT: ClassVar[dict[str, str]] = {"empty": "last"}  # what files of runs without it mean

    name: Literal[
        "blockwise", "classical", "mdlm", "soft_masked", "rdm", "two_step", "distill", "uniform"
    ] = "blockwise"
    """Blockwise SFT; classical SFT (Bernoulli masks over the whole response); one of the other
    objectives of the paper's table, each with its own group of options; distill, on the traces
    that `bwsft distill` wrote; or uniform, DiffusionGemma's, where it is the default."""
    blocks: Literal[
        "uniform", "length", "rising", "falling", "traversal", "sequential", "each", "all"
    ] = "uniform"
    """Active block of a visit. With replacement: uniform, or with chances rho by length, rising or
    falling from left to right, which the weight 1/rho corrects. traversal: each block once per
    traversal of the example, in random order; sequential: each block in turn from the left; each:
    an epoch is every block of every example once, in random order (EQUAL-TOKENS); all: every block
    at every visit, at the cost of as many forwards and backwards."""
    weight: Literal["count", "rate", "flat", "discrete", "sum"] = "count"
    """Row weight: 1 / masked tokens, whose mean the loss is; 1 / (mask rate x block length); 1 /
    block length; omega_t of a time t = 1..T (--objective.discrete), over the block length; or 1,
    which makes it their sum, as in the paper's Eq. 8 and 9."""
    empty: Literal["redraw", "last", "skip"] = "redraw"
    """A draw that masks nothing: redraw makes it one that does, so that every token of a block has
    the same expected weight; last masks the block's last token, as the paper, which then has twice
    the weight of any other; skip weighs nothing."""
    block_factor: Literal["mean", "sum"] = "mean"
    """Estimate the mean over an example's blocks, or their sum."""
    low: float = 1e-3
    """Lowest mask rate."""
    high: float = 1.0
    """Highest mask rate."""
    prefix_noise: float = 0.0
    """Ablation: share of earlier response tokens that are masked too (never supervised)."""
    suffix_leak: float = 0.0
    """Ablation: share of later response tokens that stay visible."""
    suffix_weight: float = 0.0
    """Supervise the hidden suffix too (--context exact): its tokens together weigh so many times
    what the masked tokens of the block do."""
    suffix_decay: bool = False
    """--objective.suffix-weight falls linearly to 0 over the run."""
    pairs: bool = False
    """Draws of one context come in complementary pairs: together they mask every token once. If one
    masks all, the other is empty, and the first weighs as both."""
    context_grad: bool = True
    """False takes the context as a constant: in exact mode the paper's Algorithm 1, line 8, read
    literally; in block_causal what the noisy copies see of the clean rows, which then cost a
    forward alone."""
    confidence: float = 0.0
    """Add so many times the entropy of every supervised token that the model has right, with the
    token's own weight: surer answers, for decoding by threshold (CAP of LLaDA2.0)."""
    discrete: DiscreteConfig = field(default_factory=DiscreteConfig)
    mdlm: MdlmConfig = field(default_factory=MdlmConfig)
    soft_masked: SoftMaskedConfig = field(default_factory=SoftMaskedConfig)
    rdm: RdmConfig = field(default_factory=RdmConfig)
    two_step: TwoStepConfig = field(default_factory=TwoStepConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    uniform: UniformConfig = field(default_factory=UniformConfig)

    @property
    def has_blocks(self) -> bool:
        """A draw supervises one active block, or each block as such, in every context mode."""
        return self.name in ("blockwise", "distill", "uniform")

    @property
    def held_out(self) -> str:
        """What is measured on held-out examples."""
        what = "loss of noisy blocks" if self.name == "uniform" else "blockwise NELBO"
        return f"held-out {what}"


BLOCKWISE_ONLY = (
    "blocks weight discrete empty block_factor prefix_noise suffix_leak suffix_weight suffix_decay "
    "pairs context_grad"
).split()
GROUPS = "mdlm soft_masked rdm two_step distill uniform".split()


def validate(objective: ObjectiveConfig) -> None:
    """Raise ValueError, naming the flag, for values that no run can use."""
    if not 0 < objective.low <= objective.high <= 1:
        raise ValueError("--objective.low and --objective.high must satisfy 0 < low <= high <= 1")
    if not 0 <= objective.confidence < math.inf:
        raise ValueError("--objective.confidence must be 0 or positive")
    _validate_weight(objective)
    _validate_suffix(objective)
    _refuse_options_of_others(objective)
    shares = {
        "prefix-noise": objective.prefix_noise,
        "suffix-leak": objective.suffix_leak,
        "soft-masked.softness": objective.soft_masked.softness,
        "rdm.label-smoothing": objective.rdm.label_smoothing,
        "two-step.replace": objective.two_step.replace,
        "distill.window-from": objective.distill.window_from,
        "distill.window-to": objective.distill.window_to,
        "uniform.self-conditioning": objective.uniform.self_conditioning,
    }
    for name, value in shares.items():
        if not 0 <= value <= 1:
            raise ValueError(f"--objective.{name} must lie in [0, 1]")


def _validate_weight(objective: ObjectiveConfig) -> None:
    weight, plain = objective.weight, ObjectiveConfig()
    if weight in ("rate", "flat", "discrete") and objective.empty != "skip":
        raise ValueError(
            f"--objective.weight {weight} needs --objective.empty skip: filling an empty draw "
            "biases it"
        )
    if weight in ("rate", "discrete") and objective.pairs:
        raise ValueError(
            f"--objective.pairs can't go with --objective.weight {weight}: the complement's rate "
            "is not the one that is weighed; use weight count, flat or sum"
        )
    if weight == "discrete" and (objective.low, objective.high) != (plain.low, plain.high):
        raise ValueError(
            "--objective.low and --objective.high bound continuous rates: leave them as they are "
            "with --objective.weight discrete, whose rates are t/T"
        )
    if weight != "discrete" and objective.discrete != plain.discrete:
        raise ValueError("--objective.discrete needs --objective.weight discrete")
    if not 1 <= objective.discrete.steps <= 1 << 16:
        raise ValueError("--objective.discrete.steps must lie in [1, 65536]")


def _validate_suffix(objective: ObjectiveConfig) -> None:
    if not 0 <= objective.suffix_weight < math.inf:
        raise ValueError("--objective.suffix-weight must be 0 or positive")
    if objective.suffix_decay and not objective.suffix_weight:
        raise ValueError("--objective.suffix-decay needs --objective.suffix-weight above 0")
    if objective.suffix_weight and objective.name == "classical":
        raise ValueError(
            "--objective.suffix-weight is for blockwise SFT: classical SFT masks the whole "
            "response, leave it out"
        )


def _refuse_options_of_others(objective: ObjectiveConfig) -> None:
    """An option that the chosen objective would ignore must stay as it is."""
    plain = ObjectiveConfig()
    idle = {name: f"--objective.name {name}" for name in GROUPS if name != objective.name}
    if objective.name in GROUPS:
        idle |= dict.fromkeys(BLOCKWISE_ONLY, "blockwise and classical SFT")
    if objective.name in ("rdm", "distill"):
        idle |= dict.fromkeys(("low", "high"), "objectives with mask rates")
    for name, home in idle.items():
        if getattr(objective, name) != getattr(plain, name):
            raise ValueError(
                f"--objective.{name.replace('_', '-')} belongs to {home}; leave it as it is with "
                f"--objective.name {objective.name}"
            )
