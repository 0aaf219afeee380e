"""Training through bwsft in Python, and an answer of the trained model.

`python examples/train.py`: 30 updates of the LLaDA that ships with bwsft, seconds on a CPU.
`bwsft train debug --data FILE` does the same; the 8B model's preset is "llada-8b-lora".
"""

import json
import tempfile
from pathlib import Path

import bwsft

with tempfile.TemporaryDirectory() as folder:
    data, run = Path(folder) / "data.jsonl", Path(folder) / "run"
    records = [{"query": f"{a} + {b}", "response": f"The answer is: {a + b}"}
               for a in range(2, 18) for b in range(2, 12)]  # fmt: skip
    data.write_text("".join(json.dumps(row) + "\n" for row in records))

    # Metrics, checkpoints and a plot of the loss are in `run` afterwards.
    bwsft.train("debug", data=data, out=run, steps=30, eval={"every": 15})

    question = "9 + 4"
    (answer,) = bwsft.load(run).decode([question])
    print(f"{question} -> {answer.text!r} ({answer.tokens} tokens)")
