"""What each command takes; `bwsft train` apart, whose settings are bwsft/config.py.

Imports nothing heavy, so that `bwsft COMMAND --help` answers at once: the commands import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro

from bwsft.decoding.settings import DecoderOptions
from bwsft.evaluation.pass_at_1 import EvaluateOptions

Benchmark = Literal["loss", "mask", "step", "generate", "operators"]


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
    """Held-out prompts that the base and the newest checkpoint answer; 0: none."""
    steps: int | None = None
    """Denoising steps of an answer; default: one per token."""
    device: str = "auto"
    """auto: a CUDA device if there is one, else the CPU."""


@dataclass(frozen=True)
class ReportOptions(SampleOptions):
    """Write a run as one self-contained HTML page."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder, finished or in progress."""
    out: Path | None = None
    """The page; default RUN/report.html. An older one is replaced."""


@dataclass(frozen=True)
class CompareOptions(DecoderOptions):
    """Decode the same questions in several context modes and compare."""

    modes: str = "exact,cached,prefix"
    """Context modes, with commas; the others are compared with the first."""
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
