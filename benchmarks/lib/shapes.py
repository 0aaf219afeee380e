"""LLaDA shapes that the benchmarks build, and lengths like GSM8K's."""

import json
import os
import re
from pathlib import Path

from bwsft.models.llada_config import LladaConfig
from bwsft.utils.flops import Cost

VOCAB = 126_464
# 8b is the published model; cpu keeps its vocabulary; mini and tiny are for sweeps and tests.
SIZES = {
    "tiny": dict(d_model=32, n_layers=2, n_heads=2, mlp_hidden_size=48, vocab_size=512),
    "mini": dict(d_model=128, n_layers=4, n_heads=4, mlp_hidden_size=384, vocab_size=8192),
    "cpu": dict(d_model=512, n_layers=12, n_heads=8, mlp_hidden_size=1536, vocab_size=VOCAB),
    "1b": dict(d_model=2048, n_layers=16, n_heads=16, mlp_hidden_size=5632, vocab_size=VOCAB),
    "8b": dict(d_model=4096, n_layers=32, n_heads=32, mlp_hidden_size=12288, vocab_size=VOCAB),
}
# (prompt, response) of 32 examples of at most 256 tokens, evenly spread over GSM8K's training set:
# Qwen3's tokens of the question and of the answer without calculator marks, and an end token.
GSM8K_LENGTHS = (
    (39, 43), (56, 63), (63, 92), (37, 63), (52, 60), (54, 169), (51, 47), (31, 59),
    (35, 76), (44, 159), (49, 80), (26, 37), (50, 102), (57, 147), (43, 76), (96, 150),
    (67, 104), (33, 40), (52, 90), (47, 62), (98, 101), (38, 71), (41, 64), (72, 56),
    (36, 62), (66, 73), (93, 120), (95, 109), (47, 73), (51, 104), (64, 32), (45, 46),
)  # fmt: skip


def config_of(size: str) -> LladaConfig:
    vocabulary = SIZES[size]["vocab_size"]
    mask, end = (126_336, 126_081) if vocabulary == VOCAB else (vocabulary - 1, vocabulary - 2)
    return LladaConfig(
        **SIZES[size], max_sequence_length=4096, mask_token_id=mask, eos_token_id=end,
        pad_token_id=end,
    )  # fmt: skip


def gsm8k_lengths(count: int, longest: int = 256) -> tuple[list[tuple[int, int]], str]:
    """(prompt, response) lengths of `count` examples of at most `longest` tokens, and their
    source: GSM8K in BWSFT_DATA_DIR, or the 32 above in turn."""
    folder = Path(os.environ.get("BWSFT_DATA_DIR", "/nowhere"))
    data, tokenizer = folder / "gsm8k/train.jsonl", folder / "tokenizers/qwen3/tokenizer.json"
    if not (data.exists() and tokenizer.exists()):
        fitting = [pair for pair in GSM8K_LENGTHS if sum(pair) <= longest]
        return [fitting[i % len(fitting)] for i in range(count)], "32 lengths of GSM8K train"
    from tokenizers import Tokenizer

    encode = Tokenizer.from_file(str(tokenizer)).encode
    lines = data.read_text(encoding="utf-8").splitlines()

    def pairs(first):
        for line in lines[first:]:
            record = json.loads(line)
            answer = re.sub(r"<<.*?>>", "", record["answer"])
            yield len(encode(record["question"])), len(encode(answer)) + 1  # an end token

    stride = len(lines) // count
    lengths = [next(p for p in pairs(i * stride) if sum(p) <= longest) for i in range(count)]
    return lengths, "GSM8K train, Qwen3's tokenizer"


def cost_of(size: str) -> Cost:
    s = SIZES[size]
    return Cost(s["d_model"], s["n_layers"], s["mlp_hidden_size"], s["vocab_size"])
