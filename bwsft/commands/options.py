"""What each command takes; `bwsft train` apart, whose settings are bwsft/config.py.

Imports nothing heavy, so that `bwsft COMMAND --help` answers at once: the commands import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro

from bwsft.decoding.settings import DecoderOptions
from bwsft.evaluation.pass_at_1 import EvaluateOptions

Benchmark = Literal["loss", "mask", "step", "generate", "operators", "attention"]


@dataclass(frozen=True)
class GenerateOptions(DecoderOptions):
    """Answer one prompt, or every prompt of a file."""

    model: str | None = None
    """Run folder, checkpoint, model folder or Hub id; default: the embedded tiny LLaDA."""
    prompt: str | None = None
    """One prompt; its answer is printed."""
    prompts: Path | None = None
    """Records as for training (answers are not read): a JSONL, JSON, CSV, TSV or Parquet file, a
    folder, glob or Hub id; any other file is read as text with one prompt per line."""
    subset: str | None = None
    """Configuration of a Hub data set in --prompts."""
    split: str | None = None
    """Split of --prompts where it is a Hub data set or a folder; default test."""
    columns: str | None = None
    """What the columns of --prompts are, as prompt=q,system=s; see docs/train_your_data.md."""
    out: Path | None = None
    """JSONL of answers, one line per prompt in the order of the prompts, written as they come."""
    resume: bool = False
    """Go on with an --out file that an earlier, interrupted call began."""
    trace: Path | None = None
    """JSONL with step, position, token and confidence of every commitment, a line per prompt."""


@dataclass(frozen=True)
class ChatOptions(DecoderOptions):
    """Talk to a model in the terminal."""

    model: str | None = None
    """Run folder, checkpoint, model folder or Hub id; default: the embedded tiny LLaDA."""
    system: str | None = None
    """System message that the conversation begins with."""


@dataclass(frozen=True)
class EvaluateCommand(DecoderOptions, EvaluateOptions):
    """Score existing outputs (--outputs), or decode with a model (--model) and score that."""


@dataclass(frozen=True)
class TraceOptions:
    """Draw how an answer was unmasked."""

    file: Annotated[Path, tyro.conf.Positional]
    """JSONL that `bwsft generate --trace FILE` wrote."""
    line: int = 1
    """Which answer of the file."""
    png: Path | None = None
    """Heat map of position x step, colored by confidence."""


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Which answers a report shows."""

    samples: int = 4
    """Held-out prompts that the base and the newest checkpoint answer; 0: no model is loaded."""
    steps: int | None = None
    """Denoising steps of an answer; default: one per token."""
    device: str = "auto"
    """auto: a CUDA device if there is one, else the CPU."""


@dataclass(frozen=True)
class ReportOptions(SampleOptions):
    """Write runs as one self-contained HTML page."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Run folders, finished or in progress; several are drawn over one another."""
    out: Path | None = None
    """The page; default RUN/report.html, of several runs ./report.html. An older one is
    replaced."""
    watch: bool = False
    """Rewrite the page, which loads itself again, until the runs have ended; Ctrl-C ends it. No
    model is loaded before that."""


@dataclass(frozen=True)
class CompareOptions(DecoderOptions):
    """Decode the same questions in several context modes and compare."""

    modes: str = "exact,cached,prefix"
    """Context modes, with commas; the others are compared with the first."""
    thresholds: str | None = None
    """Thresholds of --rule threshold, as 1,0.9,0.7: each mode's accuracy over tokens per forward,
    and its AUP."""
    model: str | None = None
    """Run folder, checkpoint, model folder or Hub id; default: the embedded tiny LLaDA."""
    data: Path | None = None
    """Questions with references, GSM8K-, MetaMath- or MATH-shaped: a file, folder, glob or Hub
    id."""
    subset: str | None = None
    """Configuration of a Hub data set in --data."""
    split: str | None = None
    """Split of --data where it is a Hub data set or a folder; default test."""
    columns: str | None = None
    """What the columns of --data are, as prompt=q,response=a; see docs/train_your_data.md."""
    task: Literal["gsm8k", "math"] = "gsm8k"
    """How answers are found and compared."""
    limit: int | None = 32
    """Use only the first so many questions."""
    json: Path | None = None
    """Where the comparison is written as JSON."""
    plot: Path | None = None
    """Where the curves of --thresholds are drawn (PNG)."""

    def threshold_list(self) -> list[float]:
        """The thresholds, from the largest on; ValueError for what is no number in [0, 1]."""
        found = []
        for word in (self.thresholds or "").split(",") if self.thresholds is not None else ():
            try:
                value = float(word)
            except ValueError:
                value = -1.0
            if not 0 <= value <= 1 or value in found:
                raise ValueError(
                    f"--thresholds has {word.strip()!r}: give numbers from 0 to 1, each once"
                )
            found.append(value)
        return sorted(found, reverse=True)


@dataclass(frozen=True, kw_only=True)
class DistillOptions(DecoderOptions):
    """Decode training prompts with care and keep the right answers with their traces, to train on
    with --objective.name distill. The same command goes on with what was interrupted."""

    model: str
    """Run folder, checkpoint, model folder or Hub id."""
    data: Path
    """Questions with references, GSM8K-, MetaMath- or MATH-shaped: a file, folder, glob or Hub
    id."""
    out: Path
    """Folder of the traces, in shards of JSONL: the --data of a training."""
    subset: str | None = None
    """Configuration of a Hub data set in --data."""
    split: str | None = None
    """Split of --data where it is a Hub data set or a folder; default train."""
    columns: str | None = None
    """What the columns of --data are, as prompt=q,response=a; see docs/train_your_data.md."""
    task: Literal["gsm8k", "math"] = "gsm8k"
    """How answers are found and compared."""
    limit: int | None = None
    """Use only the first so many questions."""
    shard: int = 256
    """Questions of a shard, which an interruption may cost."""

    def __post_init__(self) -> None:
        for name in ("limit", "shard"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")


@dataclass(frozen=True)
class ReplayOptions:
    """Run the sequences that a run kept when something was wrong with them."""

    folder: Annotated[Path, tyro.conf.Positional]
    """RUN/repro/step-N."""
    device: str = "auto"
    """auto: a CUDA device if there is one, else the CPU."""


@dataclass(frozen=True)
class ExportOptions:
    """Write a trained model as a folder that transformers, bwsft and LLaDA's own code load."""

    model: str
    """Run folder, checkpoint or model folder; a run folder stands for its newest checkpoint."""
    out: Path
    """Folder to write; it must not exist."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the stored weights; default: that of the base model for an adapter (merged in
    float32, rounded once), and that of the checkpoint otherwise."""
    shard_size: str = "5GB"
    """Largest file of weights, in KB, MB, GB or TB; a smaller model is one file."""
    push: str | None = None
    """ORG/NAME of a repository on the Hugging Face Hub to upload the folder to; it is made if it
    does not exist."""
    private: bool = False
    """Make that repository a private one."""


@dataclass(frozen=True)
class BenchOptions:
    """Run the quick benchmarks: LM head and loss, masks, training step, decoding, small
    operations."""

    only: tuple[Benchmark, ...] = get_args(Benchmark)
    """Benchmarks to run."""
    out: Path | None = None
    """Folder for each benchmark's full result (JSON)."""


@dataclass(frozen=True)
class DoctorOptions:
    """Print versions, device, kernels in use and caches, and test the fused loss on the device."""

    device: str = "auto"
    """auto: a CUDA device if there is one, else the CPU."""


@dataclass(frozen=True)
class DemoOptions:
    """Five minutes on two CPU cores."""

    out: str | None = None
    """Run folder of the training; default: the first free one of runs/demo, runs/demo-2, ..."""
    steps: int = 600
    """Optimizer updates."""
    problems: int = 200
    """Held-out problems that are decoded before and after."""
    seed: int = 0
    """Seed of the training."""


def as_in_training(name: str) -> Any:
    """An option that is also called as `bwsft train` calls it."""
    return tyro.conf.arg(aliases=(f"--dataset.{name}",))


@dataclass(frozen=True)
class DataCommand:
    """Show what training would make of a data set: columns, lengths, what is left out, an example
    as the model sees it, and the command that trains on it. Or write its records (--out)."""

    source: Annotated[str, tyro.conf.Positional]
    """File, folder, glob or Hub id, as --data of `bwsft train`; or wordproblems-9-seed2."""
    preset: str = "debug"
    """Preset of the training: its model, template and block size."""
    model: str | None = None
    """Model folder or Hub id instead of the preset's; only config and tokenizer are read."""
    tokenizer: str | None = None
    """Tokenizer folder or Hub id instead of the model's own."""
    mask_token: str | None = None
    """[MASK] of a model that has none."""
    logit_shift: Literal[0, 1] | None = None
    """Of such a model: 1 if a row predicts the next token, 0 if its own."""
    subset: Annotated[str | None, as_in_training("subset")] = None
    """Configuration of a Hub data set; of a copy, its folder."""
    split: Annotated[str | None, as_in_training("split")] = None
    """Split of a Hub data set, a folder or generated problems; default train."""
    columns: Annotated[str | None, as_in_training("columns")] = None
    """What other columns are, as prompt=q,response=a,system=s,ignore=url."""
    template: Annotated[
        Literal["metamath", "chat", "none"] | None, as_in_training("template")
    ] = None
    """Prompt text; default: the preset's, or chat where the records are conversations."""
    template_args: Annotated[str | None, as_in_training("template-args")] = None
    """Arguments of the chat template, as name=value,..."""
    turns: Annotated[Literal["last", "all"] | None, as_in_training("turns")] = None
    """Answers of a conversation that are examples; default last."""
    out: Path | None = None
    """Write the records to this JSONL file, as training reads them, and show nothing."""
    limit: int | None = None
    """With --out: write at most this many; of generated problems, make this many (1000)."""
