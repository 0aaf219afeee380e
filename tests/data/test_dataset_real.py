"""The real GSM8K records with a real tokenizer."""

import json
import os
from pathlib import Path

import pytest

from bwsft.data.dataset import load_set
from bwsft.data.examples import DataOptions
from bwsft.data.packing import CanvasLayout, order, pack, samples
from bwsft.data.tokenizer import load_tokenizer

DATA = os.environ.get("BWSFT_DATA_DIR")
pytestmark = pytest.mark.skipif(not DATA, reason="BWSFT_DATA_DIR is not set")


def test_real_records(tmp_path):
    tokenizer = load_tokenizer(Path(DATA) / "tokenizers" / "smollm2")
    source = Path(DATA) / "metamath_shaped" / "gsm8k_train_AnsAugShape.jsonl"
    options = DataOptions(max_length=512, gen_length=256, mask_id=len(tokenizer))
    kept = load_set(source, tokenizer, options, tmp_path)
    report = kept.report
    assert report["records"] == 7473
    assert report["kept"] == len(kept) >= 0.9 * 7473
    assert report["dropped"] == {"longer than max_length 512": 7473 - len(kept)}
    assert 0 < report["longer_than_gen_length"] < 0.02
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    for i in (0, 1000, len(kept) - 1):
        row = rows[kept.sample_ids[i]]
        prompt, response = tokenizer.decode(kept.prompt(i)), tokenizer.decode(kept.response(i))
        assert row["query"] in prompt
        assert prompt.endswith("step by step.<|im_end|>\n<|im_start|>assistant\n")
        assert response == row["response"] + "<|im_end|>"
    layout = CanvasLayout(mask_id=len(tokenizer), eos_id=2, gen_length=256, max_length=512)
    batch = pack([kept.example(i, v) for i, v in samples(3, 16, len(kept), seed=42)], layout)
    assert (batch.response_lengths % 32 == 0).all()
    chosen = order(len(kept), 0, 42)[48:64]
    assert batch.sample_ids.tolist() == kept.sample_ids[chosen].tolist()
    assert load_set(source, tokenizer, options, tmp_path).fingerprint == kept.fingerprint


def test_real_gsm8k_and_chat_shapes_agree(tmp_path):
    tokenizer = load_tokenizer(Path(DATA) / "tokenizers" / "smollm2")
    lines = (Path(DATA) / "gsm8k" / "test.jsonl").read_text().splitlines()[:50]
    pairs = [json.loads(line) for line in lines]
    chats = [
        {
            "messages": [
                {"role": "user", "content": pair["question"]},
                {"role": "assistant", "content": pair["answer"]},
            ]
        }
        for pair in pairs
    ]
    options = DataOptions(template="chat", max_length=600)
    one, two = load_set(pairs, tokenizer, options), load_set(chats, tokenizer, options)
    assert len(one) == 50
    assert one.fingerprint == two.fingerprint
    assert one.response(7).tolist() == two.response(7).tolist()
