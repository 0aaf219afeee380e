"""Run folders for `bwsft report`, and what its pages hold."""

import json
import re

import jsonl

from bwsft import config as c


def data_of(path):
    """What the page embeds, found as a browser finds it: up to the first end of its element."""
    text = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'<script [^>]*id="data">(.*?)</script>', text, re.S)[1])


def small_run(folder, steps=3, config=None):
    """A run folder without checkpoints."""
    folder.mkdir()
    config = config or c.Config(preset="llada-8b-lora", model="missing/folder/x", steps=9)
    (folder / "config.json").write_text(c.to_json(config))
    numbers = {"loss": 2.0, "lr": 1e-5, "grad_norm": 0.5, "tokens": 100, "supervised_tokens": 25}
    rows = ({"step": i + 1, **numbers, "seconds": 0.5} for i in range(steps))
    jsonl.write(folder / "metrics.jsonl", *rows)
    return folder
