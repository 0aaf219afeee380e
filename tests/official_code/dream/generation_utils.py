"""Where Dream's repository has its sampler: here only the settings that it reads."""

from transformers import GenerationConfig


class DreamGenerationConfig(GenerationConfig):
    def __init__(self, **options):
        super().__init__(**options)
        self.steps = options.get("steps", 512)
        self.alg = options.get("alg", "origin")
        self.mask_token_id = options.get("mask_token_id")
