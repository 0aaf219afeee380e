"""Pre-train the tiny LLaDA that ships in bwsft/tiny: `python -m bwsft.experiments.tiny_base`.

Byte-level BPE over generated word problems (digits apart), then classical SFT of a random model
through the ordinary trainer: 6,000 updates of 32 sequences, a quarter of an hour on one idle core.
The base that ships is the checkpoint of step 3,500 (`--embed 3500`): it copies the numbers of the
question and writes the form of an answer, and gets a fifth of the sums right, so that fine-tuning
has something to teach. Its learning curve is in benchmarks/results/tiny_base.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from bwsft import config as c
from bwsft.data import word_problems as wordproblems
from bwsft.data.tokenizer import fast_tokenizer
from bwsft.objectives.config import ObjectiveConfig

SEED = 7
SPECIALS = ("<|endoftext|>", "[MASK]", "<|user|>", "<|assistant|>", "<|end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}"
    "{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(folder: Path) -> None:
    """Train the tokenizer on 20,000 generated problems and save it in `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    # Digits stand alone: numbers are then read and written the same way everywhere.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    records = wordproblems.generate(20_000, SEED)
    trainer = trainers.BpeTrainer(
        vocab_size=448, special_tokens=list(SPECIALS), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator((f"{r['query']}\n{r['response']}" for r in records), trainer)
    end, mask, *turns = SPECIALS
    wrapped = fast_tokenizer(
        tokenizer, eos_token=end, pad_token=end, mask_token=mask, additional_special_tokens=turns,
        chat_template=CHAT_TEMPLATE,
    )  # fmt: skip
    wrapped.save_pretrained(folder)


def pretraining(work: Path, steps: int) -> c.Config:
    """The pre-training run: classical masks over the whole response. Its problems are those of seed
    0, and fine-tuning takes others."""
    return c.Config(
        preset="debug", data="wordproblems-9-seed0", tokenizer=str(work / "tokenizer"),
        out=str(work / "run"), steps=steps, seed=SEED, block_size=8, gen_length=40, max_length=72,
        batch_size=32, micro_batch_size=32, save_every=500, keep_last=0,
        dataset=c.DataConfig(template="chat", holdout=64),
        objective=ObjectiveConfig(name="classical"),
        lora=c.LoraConfig(rank=0),
        optim=c.OptimConfig(lr=2e-3, beta1=0.9, warmup=0.05),
        eval=c.EvalConfig(every=500),
        init=c.InitConfig(),
    )  # fmt: skip


def embed(checkpoint: Path, folder: Path) -> None:
    """Store a checkpoint's model in bf16, with its tokenizer, as the embedded base."""
    import torch

    from bwsft.checkpoints.generation_config import write_generation_config
    from bwsft.checkpoints.resolve import load_trained
    from bwsft.utils.files import folder_atomic

    trained = load_trained(str(checkpoint), device="cpu", dtype=torch.bfloat16)
    with folder_atomic(folder) as part:
        trained.backbone.model.save_pretrained(part)
        trained.tokenizer.save_pretrained(part)
        write_generation_config(part, trained.backbone, trained.contract)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/tiny-base"))
    parser.add_argument("--steps", type=int, default=6000, help="length of the schedule")
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    parser.add_argument("--embed", type=int, metavar="STEP", help="store this checkpoint instead")
    parser.add_argument("--into", type=Path, default=Path("bwsft/tiny"), help="where to store it")
    options = parser.parse_args(argv)
    if options.embed is not None:
        embed(options.work / "run" / "checkpoints" / f"step-{options.embed}", options.into)
        return 0
    from bwsft.training.setup import train

    if not (options.work / "tokenizer").exists():
        make_tokenizer(options.work / "tokenizer")
    config = pretraining(options.work, options.steps)
    if options.resume:
        config = dataclasses.replace(config, resume=config.out, out=None)
    return train(config)


if __name__ == "__main__":
    sys.exit(main())
