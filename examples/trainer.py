"""Blockwise SFT under the Hugging Face Trainer, with a LoRA adapter of peft.

`python examples/trainer.py`: the LLaDA that ships with bwsft, seconds on a CPU. For the 8B model
put its name for TINY and presets.llada_8b_lora() for presets.debug().
"""

import dataclasses
import json
import tempfile
from pathlib import Path

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from bwsft import presets
from bwsft.checkpoints.resolve import TINY
from bwsft.models.lora import LLADA_TARGETS
from bwsft.training.hf_trainer import BlockwiseTrainer, load_examples

model = AutoModelForCausalLM.from_pretrained(TINY, dtype="float32")
model = get_peft_model(model, LoraConfig(r=8, target_modules=LLADA_TARGETS["all"]))
tokenizer = AutoTokenizer.from_pretrained(TINY)

with tempfile.TemporaryDirectory() as folder:
    data = Path(folder) / "data.jsonl"
    records = [{"query": f"{a} + {b}", "response": f"The answer is: {a + b}"}
               for a in range(2, 18) for b in range(2, 12)]  # fmt: skip
    data.write_text("".join(json.dumps(row) + "\n" for row in records))
    config = dataclasses.replace(
        presets.debug(), data=str(data), context="cached", draws_per_context=2
    )
    train, held_out = load_examples(config, tokenizer, model)
    arguments = TrainingArguments(
        folder, max_steps=20, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=1e-2, logging_steps=5, save_strategy="no", report_to=[],
    )  # fmt: skip
    trainer = BlockwiseTrainer(
        model, arguments, config=config, train_dataset=train, eval_dataset=held_out,
        processing_class=tokenizer,
    )  # fmt: skip
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model(f"{folder}/adapter")  # for PeftModel.from_pretrained or bwsft generate
print(f"held-out blockwise NELBO: {before:.4f} before, {after:.4f} after, nats per token")
