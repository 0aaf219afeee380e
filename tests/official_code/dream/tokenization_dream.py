"""Where Dream's repository has its tokenizer, without a fast one; written for the tests."""

from transformers import Qwen2Tokenizer


class DreamTokenizer(Qwen2Tokenizer):
    pass
