"""Where LLaDA's repository has its configuration; written for the tests, not LLaDA's code."""

from transformers import AutoConfig, PretrainedConfig


class LLaDAConfig(PretrainedConfig):
    model_type = "llada"


AutoConfig.register("llada", LLaDAConfig, exist_ok=True)
