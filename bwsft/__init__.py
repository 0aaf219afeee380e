"""Blockwise SFT of masked-diffusion language models.

Six things. The examples run as they stand, on a CPU, with the tiny LLaDA that ships here, which is
what a model of None means; put a folder or Hub id such as "GSAI-ML/LLaDA-8B-Instruct" for it.

1. BlockwiseConfig: transformers' TrainingArguments with block size, canvas, context mode, ...

    from bwsft import BlockwiseConfig
    args = BlockwiseConfig("trained", max_steps=4, block_size=8, gen_length=40, learning_rate=1e-3,
                           context="cached", draws_per_context=2, save_strategy="no")

2. BlockwiseTrainer: a Trainer of transformers, shaped like TRL's SFTTrainer.

    from bwsft import BlockwiseTrainer
    sums = [(a, b) for a in range(2, 10) for b in range(2, 10)]
    data = [{"prompt": f"{a} + {b}", "completion": f"The answer is: {a + b}"} for a, b in sums]
    trainer = BlockwiseTrainer(model=None, args=args, train_dataset=data)
    trainer.train()
    trainer.save_model()

3. train: a run of `bwsft train`, from a preset or a Config. Returns its folder.

    import bwsft
    run = bwsft.train("debug", data="wordproblems-9-seed1", steps=4, out="run",
                      dataset={"limit": 200, "holdout": 8})

4. load: a run, checkpoint, model folder or Hub id, ready to decode.

    decoder = bwsft.load("trained")
    answer = decoder.generate("3 + 4")
    ids = decoder.tokenizer("3 + 4").input_ids

5. generate: answers in one call.

    answers = bwsft.generate(run, ["3 + 4", "5 + 5"])

6. The kernels, for a training loop of your own (docs/use_the_loss.md): LM head and cross-entropy of
   the tokens that have a label alone, and the masks of Blockwise SFT.

    import torch
    from bwsft_kernels import block_mask, linear_cross_entropy
    hidden, head = torch.randn(2, 16, 64), torch.nn.Linear(64, 1000, bias=False)
    labels = torch.full((2, 16), -100)
    labels[:, 8:12] = torch.randint(1000, (2, 4))
    loss = linear_cross_entropy(hidden, head.weight, labels)

The command line: `bwsft --help`.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bwsft.models.registration import register_with_transformers
from bwsft.version import __version__

if TYPE_CHECKING:
    from bwsft.config import Config
    from bwsft.data.chat_template import Prompt
    from bwsft.decoding.pipeline import Decoder
    from bwsft.training.hf_config import BlockwiseConfig
    from bwsft.training.hf_trainer import BlockwiseTrainer

__all__ = ["BlockwiseConfig", "BlockwiseTrainer", "__version__", "generate", "load", "train"]

register_with_transformers()

# Imported when they are asked for: transformers takes seconds, and `import bwsft` no time.
_CLASSES = {
    "BlockwiseConfig": "bwsft.training.hf_config",
    "BlockwiseTrainer": "bwsft.training.hf_trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_CLASSES[name]), name)


def train(settings: str | Config = "debug", **changes: Any) -> Path:
    """Run a whole training, as `bwsft train` does, and return the run's folder.

    settings: the name of a preset, or a Config. changes: settings by the names of the flags, a
    group as a dict: steps=10, lora={"rank": 32}. Ctrl-C in the main thread saves and returns.
    ValueError for settings that no run can use; RuntimeError if the training failed.

        bwsft.train("debug", steps=10, out="runs/mine")
    """
    from bwsft import config as c
    from bwsft.presets import PRESETS
    from bwsft.training import setup
    from bwsft.utils import config_file

    if isinstance(settings, str):
        if settings not in PRESETS:
            raise ValueError(f"{settings!r} is no preset: take one of {', '.join(PRESETS)}")
        settings = PRESETS[settings]()
    changes = {name: str(v) if isinstance(v, Path) else v for name, v in changes.items()}
    config = config_file.update(settings, changes, "bwsft.train")
    c.validate(config)
    # Python takes signals in the main thread alone.
    main = threading.current_thread() is threading.main_thread()
    if setup.train(config, saves_on_signal=main) != 0:
        raise RuntimeError(f"the run in {c.run_folder(config)} failed; stderr says why")
    return c.run_folder(config)


def load(model: str | Path | None = None, **options: Any) -> Decoder:
    """A run folder, checkpoint, model or adapter folder, or Hub id, ready to decode; None: the tiny
    LLaDA that ships here. The result has `generate(prompts)`, `backbone` and `tokenizer`.

    options: those of `bwsft generate` (context, block_size, gen_length, temperature, template,
    device, dtype, ...); what is left out is as the model was trained.

        bwsft.load("runs/mine").generate("What is 3 + 4?")
    """
    from bwsft.decoding.pipeline import Decoder
    from bwsft.decoding.settings import DecoderOptions

    return Decoder.load(None if model is None else str(model), DecoderOptions(**options))


def generate(
    model: str | Path | Decoder | None, prompts: str | Sequence[Prompt], **options: Any
) -> str | list[str]:
    """The answer to a text, or the list of answers to several prompts (texts, or the turns of
    conversations). model: what `load` takes, or what it returned. options: those of `load`.

        bwsft.generate("runs/mine", ["What is 3 + 4?", "What is 5 + 5?"], context="cached")
    """
    from bwsft.decoding.pipeline import Decoder

    if isinstance(model, Decoder):
        return model.generate(prompts, **options)
    if not isinstance(model, str | Path | None):
        raise ValueError(
            f"model is a {type(model).__name__}: name its folder, as trainer.save_model writes it, "
            "or pass what bwsft.load returns"
        )
    return load(model, **options).generate(prompts)
