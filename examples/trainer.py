"""Blockwise SFT as a Trainer of transformers: records, an adapter of peft, samples on the way.

`python examples/trainer.py`: the LLaDA that ships with bwsft, seconds on a CPU. For the 8B model
put "GSAI-ML/LLaDA-8B-Instruct" for None, bf16=True, and the default sizes of block and canvas.
"""

import tempfile

from datasets import Dataset
from peft import LoraConfig

import bwsft
from bwsft import BlockwiseConfig, BlockwiseTrainer

sums = [(a, b) for a in range(2, 18) for b in range(2, 12)]
records = Dataset.from_list(
    [{"prompt": f"{a} + {b}", "completion": f"The answer is: {a + b}"} for a, b in sums]
)  # or messages; or query and response: docs/train_your_data.md

with tempfile.TemporaryDirectory() as folder:
    args = BlockwiseConfig(
        folder, block_size=8, gen_length=40, context="cached", draws_per_context=2, holdout=0.1,
        sample_prompts=["9 + 4"], max_steps=20, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, learning_rate=1e-2, logging_steps=5, eval_steps=10,
        eval_strategy="steps", save_strategy="no", report_to=[],
    )  # fmt: skip
    trainer = BlockwiseTrainer(
        model=None, args=args, train_dataset=records, peft_config=LoraConfig(r=8)
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()  # for bwsft.load, bwsft generate, or PeftModel.from_pretrained
    print(bwsft.generate(folder, "9 + 4"))
print(f"held-out blockwise NELBO: {before:.4f} before, {after:.4f} after, nats per token")
