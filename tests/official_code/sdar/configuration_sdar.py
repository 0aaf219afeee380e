"""Where SDAR's repository has its configuration; written for the tests, not SDAR's code."""

from transformers import Qwen3Config


class SDARConfig(Qwen3Config):
    model_type = "sdar"
