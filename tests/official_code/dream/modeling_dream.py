"""Where Dream's repository has its model, which imports its sampler; written for the tests."""

from transformers import Qwen2ForCausalLM

from .configuration_dream import DreamConfig
from .generation_utils import DreamGenerationConfig


class DreamModel(Qwen2ForCausalLM):
    config_class = DreamConfig

    @classmethod
    def from_pretrained(cls, folder, *arguments, **options):
        found = super().from_pretrained(folder, *arguments, **options)
        model = found[0] if isinstance(found, tuple) else found
        model.generation_config = DreamGenerationConfig.from_pretrained(folder)
        return found
