"""One dataclass tree for a training run; bwsft/presets.py fills it.

The command line is made from these fields: `bwsft train PRESET --steps 50 --optim.lr 1e-4`.
Imports nothing heavy, so that `bwsft --help` is quick.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bwsft.objectives.config import ObjectiveConfig
from bwsft.objectives.config import validate as validate_objective
from bwsft.utils import config_check, strict_json
from bwsft.utils.spelling import meant


@dataclass(frozen=True)
class DataConfig:
    """Records -> tokens -> packed batches."""

    template: Literal["metamath", "chat", "none"] = "metamath"
    """Prompt text: the paper's instruction, the bare question as a chat turn, or raw text."""
    canvas: Literal["fixed", "response", "padded"] = "fixed"
    """What comes after the response: [MASK] up to prompt + gen_length with the last block
    filled by end tokens; nothing; or visible padding (as the paper's released code)."""
    on_bad: Literal["stop", "skip"] = "stop"
    """A malformed record stops the run, or is skipped, counted and listed."""
    exclude_type: str | None = None
    """Drop records whose `type` contains this text (the released code drops "GSM")."""
    subset: str | None = None
    """Configuration of a Hub data set, such as openai/gsm8k's main; of a copy, its folder."""
    split: str | None = None
    """Split of a Hub data set, or slice such as train[:1000]; split of a folder; default train."""
    columns: str | None = None
    """What other columns are, as prompt=q,response=a,system=s,ignore=url; see docs."""
    turns: Literal["last", "all"] = "last"
    """Assistant turns of a conversation that are trained on, each as an example of its own."""
    template_args: str | None = None
    """Arguments of the chat template, such as enable_thinking=false,date_string=1 May 2025."""
    limit: int | None = None
    """Use at most this many kept examples, in source order."""
    holdout: int | None = 64
    """Examples kept out of training for the held-out blockwise NELBO; none: a tenth, at most 64."""
    cache_dir: str | None = None
    """Folder of tokenized sets; default $BWSFT_CACHE or ~/.cache/bwsft."""


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters; the LM head never gets one."""

    rank: int = 256
    """Rank r; 0 trains every weight instead (full fine-tuning)."""
    alpha: float = 512.0
    """Scale: the update is alpha / r times B A."""
    dropout: float = 0.05
    """Dropout on the adapter's input."""
    targets: Literal["all", "attention", "experts", "released"] = "all"
    """All matrices of every block but routed experts; attention's alone; all and the routed experts
    of a mixture, whose routers stay as they are; or those that the released code's list hits."""
    quantize: Literal["nf4"] | None = None
    """QLoRA: the frozen base in 4 bits. Needs CUDA and bitsandbytes; untested without a GPU."""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and the learning-rate schedule."""

    lr: float = 1e-5
    """Peak learning rate."""
    beta1: float = 0.95
    """Decay of the first moment."""
    beta2: float = 0.99
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    warmup: float = 0.1
    """Share of the steps that warm up."""
    warmup_shape: Literal["linear", "log"] = "linear"
    """Linear, or the logarithmic ramp of DeepSpeed's default."""
    floor: float = 0.1
    """The cosine ends at this share of the peak."""
    clip: float = 1.0
    """Largest gradient norm; 0 turns clipping off."""


@dataclass(frozen=True)
class EvalConfig:
    """Held-out blockwise NELBO with fixed draws: curves of different runs compare."""

    every: int = 50
    """Steps between evaluations (also before the first and after the last); 0 turns it off."""
    draws: int = 4
    """Masked states per held-out example, spread over its blocks; each costs one forward."""


@dataclass(frozen=True)
class WatchConfig:
    """The spike guard. A loss or gradient that is not finite always stops the run."""

    spike_factor: float = 10.0
    """A loss above this many times its running 90th percentile, by more than one guessed sequence
    adds, is a spike; 0 looks at no loss."""
    spike_norm_factor: float = 50.0
    """The same for the gradient norm, whose tail is heavier (and which is clipped anyway)."""
    spike_action: Literal["warn", "skip", "stop"] = "warn"
    """Report a spike and go on; leave its update out; or end the run before it."""
    spike_window: int = 64
    """Updates that the guard compares with; it waits for a quarter of them."""


@dataclass(frozen=True)
class InitConfig:
    """Shape of the small random LLaDA that is built when no model is given."""

    d_model: int = 128
    """Hidden size D."""
    n_layers: int = 4
    """Blocks."""
    n_heads: int = 4
    """Attention heads."""
    mlp_hidden_size: int = 384
    """Width of the MLP."""


@dataclass(frozen=True)
class Config:
    """A training run. Flat fields are what everyone sets."""

    preset: str = ""
    """Name of the preset these values started from."""
    data: str | None = None
    """JSONL/JSON/CSV/Parquet file, folder or glob of such, Hub id, or generated word problems:
    wordproblems-9-seed2 has operands up to 9 and holds out problems whose numbers no training
    problem has, newstories-9-seed2 other stories and another form of answer; wordproblems-9, and
    none, hold a random part of seed 0's out, which the embedded base was trained on."""
    model: str | None = None
    """Checkpoint folder or Hub id; none: the tiny embedded LLaDA, or with --tokenizer a small
    random one of that vocabulary (its shape: --init.*)."""
    tokenizer: str | None = None
    """Tokenizer folder or Hub id; default: the model's own."""
    mask_token: str | None = None
    """[MASK] of a model that has none (Qwen, Llama, ...): a special token, or a new one."""
    logit_shift: Literal[0, 1] | None = None
    """Of such a model: 1 if a row predicts the next token, 0 if its own."""
    out: str | None = None
    """Run folder; default runs/PRESET-seedN. It must not exist."""
    resume: str | None = None
    """Run folder to go on with, from its newest complete checkpoint."""
    steps: int = 200
    """Optimizer updates."""
    epochs: float | None = None
    """Passes over the training examples, instead of --steps; a run stores the steps it makes."""
    seed: int = 42
    """Seed of every random choice: order, blocks, rates, marks, dropout, initial weights."""
    block_size: int = 32
    """Tokens in a block, B."""
    gen_length: int | None = 128
    """Response positions on the decoder's canvas; none: what holds 99 % of the responses."""
    max_length: int | None = 256
    """Longest prompt + response; longer examples are dropped and counted. None: the longest of the
    data, up to the model's positions."""
    block_size_schedule: float = 0.0
    """Share of the steps, the first ones, in which blocks shrink to --block-size, by halves from
    the whole response: it leads a bidirectional model to --context block_causal; 0 for none."""
    clean_attention: Literal["block", "causal"] = "block"
    """What clean tokens see in --context block_causal: their block and all before it, or, causal,
    nothing after themselves. Of a model that predicts the next token; decoding follows."""
    ar_weight: float = 0.0
    """With --clean-attention causal: weight of the autoregressive loss of the clean response
    beside the noisy copies' loss."""
    context: Literal["exact", "cached", "block_causal"] = "exact"
    """How the active block's context is computed, in training and then in decoding."""
    draws_per_context: int = 1
    """Masks of the same block drawn per visit, which trains on their mean: cached, per context
    pass; exact, each with a forward and backward of its own; block_causal, noisy copies of every
    block beside one clean row."""
    active_blocks: int = 1
    """Blocks in a row that are masked at once, each at a higher rate than the one before it, for a
    decoder that fills several blocks at a time; of --objective.name blockwise, not cached."""
    shared_context: bool = False
    """In --context exact, of several draws: the first runs the whole canvas, and the others only
    their active block against its keys and values, which are constants to them."""
    batch_size: int = 32
    """Sequences per optimizer update."""
    micro_batch_size: int = 32
    """Sequences per forward and backward; the rest is gradient accumulation."""
    save_every: int = 100
    """Steps between checkpoints (the last step is always saved)."""
    keep_last: int = 3
    """Checkpoints kept; 0 keeps all."""
    grad_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more compute."""
    fused_ops: Literal["auto", "on", "off"] = "auto"
    """Norms, rotary embedding and SwiGLU of the native LLaDA in one kernel each; auto: on CUDA with
    triton."""
    device: str = "auto"
    """auto: a CUDA device if there is one, else the CPU."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """With several processes (torchrun): every one holds the model, or a share of it (FSDP2)."""
    profile: int = 0
    """Steps to write a torch profiler trace of, after three of warm-up; 0 for none."""
    trackers: str | None = None
    """Also log to tensorboard, wandb, trackio, mlflow (names, comma between them)."""
    dataset: DataConfig = field(default_factory=DataConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    init: InitConfig = field(default_factory=InitConfig)


ONE = "steps block_size gen_length max_length batch_size micro_batch_size draws_per_context"
ONE = [*ONE.split(), "save_every", "eval.draws", "dataset.limit", "watch.spike_window"]
ONE += ["active_blocks", "objective.soft_masked.buckets", "objective.rdm.levels"]
LEAST = dict.fromkeys(ONE, 1) | dict.fromkeys(
    ["keep_last", "eval.every", "dataset.holdout", "lora.rank", "optim.clip", "profile"], 0
)
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")


def run_folder(config: Config) -> Path:
    """Where the run writes: --resume, else --out, else runs/PRESET-seedN."""
    return Path(config.resume or config.out or f"runs/{config.preset}-seed{config.seed}")


def stored(folder: Path) -> Config | None:
    """The config of the run in `folder`, None where it has none yet. ValueError for a folder that
    does not exist, with the name of a run beside it that may be meant."""
    file = folder / "config.json"
    if file.exists():
        return from_json(strict_json.read_text(file), str(file))
    if not folder.exists():
        runs = [str(found.parent) for found in folder.parent.glob("*/config.json")]
        raise ValueError(f"--resume {folder}: there is no such run{meant(str(folder), runs)}")
    return None


def validate(config: Config) -> None:
    """Raise ValueError, naming the field, for values that no run can use."""
    values = config_check.flat(dataclasses.asdict(config))
    for path, least in LEAST.items():
        if values[path] is not None and values[path] < least:
            raise ValueError(f"--{path.replace('_', '-')} must be at least {least}")
    if config.gen_length is not None and config.gen_length % config.block_size:
        fit = math.ceil(config.gen_length / config.block_size) * config.block_size
        raise ValueError(
            f"--block-size {config.block_size} must divide --gen-length {config.gen_length}; "
            f"try --gen-length {fit}"
        )
    if config.batch_size % config.micro_batch_size:
        raise ValueError(
            f"--micro-batch-size {config.micro_batch_size} must divide "
            f"--batch-size {config.batch_size}"
        )
    if config.epochs is not None and not 0 < config.epochs < math.inf:
        raise ValueError("--epochs must be above 0")
    if not 0 <= config.seed < 2**63:
        raise ValueError("--seed must lie in [0, 2^63)")
    _validate_draws(config)
    _validate_active_blocks(config)
    _validate_context(config)
    _validate_groups(config)


def _validate_draws(config: Config) -> None:
    objective = config.objective
    if config.draws_per_context > 1 and (
        (config.context == "exact" and not objective.context_grad)
        or not (objective.has_blocks or objective.name == "classical")
    ):
        raise ValueError(
            "--draws-per-context above 1 needs blockwise or classical SFT or distill, and in "
            "--context exact gradients through the context"
        )
    if objective.pairs and config.draws_per_context % 2:
        raise ValueError("--objective.pairs needs an even --draws-per-context")
    if config.shared_context and (
        config.context != "exact"
        or not objective.has_blocks
        or config.draws_per_context == 1
        or objective.suffix_weight
    ):
        raise ValueError(
            "--shared-context is for several --draws-per-context of one block in --context "
            "exact, without --objective.suffix-weight: the further draws run no suffix"
        )


def _validate_active_blocks(config: Config) -> None:
    objective = config.objective
    if config.active_blocks == 1:
        return
    if config.gen_length and config.active_blocks > config.gen_length // config.block_size:
        raise ValueError(
            f"--active-blocks {config.active_blocks} are more than --gen-length "
            f"{config.gen_length} has, at --block-size {config.block_size}"
        )
    unfit = {
        f"--objective.name {objective.name}": objective.name != "blockwise",
        "--context cached": config.context == "cached",
        "--shared-context": config.shared_context,
        "--objective.pairs": objective.pairs,
        "--objective.weight discrete": objective.weight == "discrete",
        "--objective.suffix-weight": objective.suffix_weight,
        "--objective.prefix-noise": objective.prefix_noise,
        "--objective.suffix-leak": objective.suffix_leak,
    }
    if wrong := [flag for flag, found in unfit.items() if found]:
        raise ValueError(
            f"--active-blocks {config.active_blocks} cannot go with {wrong[0]}: it masks a group "
            "of blocks at rates that rise, the prefix clean and the suffix hidden"
        )


def _validate_context(config: Config) -> None:
    objective = config.objective
    if not 0 <= config.block_size_schedule <= 1:
        raise ValueError("--block-size-schedule must lie in [0, 1]")
    if config.block_size_schedule and config.context != "block_causal":
        raise ValueError(
            "--block-size-schedule is for --context block_causal: in the other modes a block "
            "attends to the whole canvas from the start"
        )
    if config.clean_attention == "causal" and config.context != "block_causal":
        raise ValueError("--clean-attention causal is for --context block_causal")
    if not 0 <= config.ar_weight < math.inf:
        raise ValueError("--ar-weight must be 0 or positive")
    if config.ar_weight and config.clean_attention != "causal":
        raise ValueError(
            "--ar-weight needs --clean-attention causal: else a clean token sees what it predicts"
        )
    if objective.suffix_weight and (config.context != "exact" or not objective.context_grad):
        raise ValueError(
            "--objective.suffix-weight needs --context exact with gradients through the context: "
            "elsewhere the suffix is a constant, or absent"
        )
    if objective.name == "uniform" and (config.context, config.clean_attention) != (
        "block_causal", "causal"
    ):  # fmt: skip
        raise ValueError(
            "--objective.name uniform needs --context block_causal --clean-attention causal"
        )
    if config.context == "exact":
        return
    if not objective.has_blocks:
        raise ValueError(
            f"--objective.name {objective.name} has no blocks for --context {config.context}"
        )
    if config.context == "cached" and not objective.context_grad:
        raise ValueError(
            "--objective.no-context-grad is for --context exact and block_causal: cached freezes "
            "the context in any case"
        )
    if config.context == "block_causal" and (
        objective.prefix_noise or objective.suffix_leak or objective.blocks != "uniform"
    ):
        raise ValueError(
            "--context block_causal trains every block behind a clean prefix, with no suffix: "
            "leave --objective.blocks, prefix-noise and suffix-leak as they are"
        )
    if config.context == "block_causal" and objective.weight == "discrete":
        raise ValueError("--objective.weight discrete is for --context exact and cached")


def tracker_names(config: Config) -> list[str]:
    """The trackers that --trackers names; ValueError for one that is unknown."""
    names = [name.strip() for name in (config.trackers or "").split(",") if name.strip()]
    if unknown := [name for name in names if name not in TRACKERS]:
        raise ValueError(f"--trackers {unknown[0]} is unknown; known are {', '.join(TRACKERS)}")
    return list(dict.fromkeys(names))


def _validate_groups(config: Config) -> None:
    optim, lora = config.optim, config.lora
    tracker_names(config)
    for name in ("spike_factor", "spike_norm_factor"):
        if not (0 == getattr(config.watch, name) or getattr(config.watch, name) > 1):
            raise ValueError(f"--watch.{name.replace('_', '-')} must be above 1, or 0 for none")
    validate_objective(config.objective)
    if not (0 < optim.lr and 0 <= optim.warmup <= 1 and 0 <= optim.floor <= 1):
        raise ValueError("--optim needs lr > 0, and warmup and floor in [0, 1]")
    if not (0 <= lora.dropout < 1 and lora.alpha > 0):
        raise ValueError("--lora needs dropout in [0, 1) and alpha > 0")
    if lora.rank and lora.targets == "experts" and lora.dropout:
        raise ValueError("--lora.targets experts needs --lora.dropout 0: experts have no dropout")
    if lora.quantize and (lora.rank == 0 or config.parallel == "fsdp" or config.model is None):
        raise ValueError("--lora.quantize needs --model, --lora.rank above 0 and --parallel ddp")


def to_json(config: Config) -> str:
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_json(text: str, where: str = "config.json") -> Config:
    """Read what `to_json` wrote; ValueError, naming `where` and the field, for anything else."""
    try:
        values = strict_json.parse(text)
    except ValueError as error:
        raise ValueError(f"{where} {error}") from error
    return config_check.build(Config, values, where)


def differences(a: Config, b: Config) -> list[str]:
    """Paths of the fields in which two configs differ, with both values."""
    left, right = (config_check.flat(dataclasses.asdict(x)) for x in (a, b))
    return [f"{k}: {left[k]} -> {right[k]}" for k in left if left[k] != right[k]]
