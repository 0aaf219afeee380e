"""Training through bwsft in Python, and an answer of the trained model.

`python examples/train.py`: 30 updates of the LLaDA that ships with bwsft, seconds on a CPU.
`bwsft train debug --data FILE` does the same; presets.llada_8b_lora() is the 8B model's.
"""

import dataclasses
import json
import tempfile
from pathlib import Path

from bwsft import presets
from bwsft.config import EvalConfig
from bwsft.decoding.pipeline import make_decoder
from bwsft.decoding.settings import DecoderOptions
from bwsft.training.setup import train

with tempfile.TemporaryDirectory() as folder:
    data, run = Path(folder) / "data.jsonl", Path(folder) / "run"
    records = [{"query": f"{a} + {b}", "response": f"The answer is: {a + b}"}
               for a in range(2, 18) for b in range(2, 12)]  # fmt: skip
    data.write_text("".join(json.dumps(row) + "\n" for row in records))

    config = dataclasses.replace(
        presets.debug(), data=str(data), out=str(run), steps=30, eval=EvalConfig(every=15)
    )
    train(config)  # metrics, checkpoints and a plot of the loss are in `run` now

    question = "9 + 4"
    (answer,) = make_decoder(str(run), DecoderOptions())([question])
    print(f"{question} -> {answer.text!r} ({answer.tokens} tokens)")
